"""Masks between conventions: every ordered pair of declared arguments, and what is refused."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import SIZES, make

from conformance.adapter.arguments import AXES, MaskArgument, MaskTable, from_layout, to_layout
from conformance.adapter.loading import load, registered
from conformance.errors import ConformanceError, UnknownName, Untranslatable, WrongShape
from conformance.porting.conversion import convert
from conformance.porting.masks import translate

FULL = dict(zip(AXES, (2, 4, 3, 5), strict=True))
ATTN, PADDING = "torch-mha:attn_mask", "torch-mha:key_padding_mask"
FLAX, KERAS = "flax-nnx:mask", "keras.layers.MultiHeadAttention:attention_mask"


def declared() -> dict[MaskArgument, str]:
    """Every different declaration of the built-in adapters, and one spelling of each."""
    found: dict[MaskArgument, str] = {}
    for name in registered():
        try:
            adapter = load(name)
        except ConformanceError:
            continue
        for argument in adapter.mask_arguments:
            found.setdefault(argument, f"{name}:{argument.name}")
    return found


DECLARED = declared()
PAIRS = list(itertools.product(DECLARED, repeat=2))


def axes_of(layout):
    return [axis for axis in AXES if axis in layout]


def kinds(argument):
    """Whether numbers, for each way in which the argument says who attends."""
    return [numbers for numbers in (False, True) if (argument.number if numbers else argument.true)]


def said(mask, argument, numbers):
    """Who attends, in the argument's words; written from the declaration's own docstring."""
    if not numbers:
        return mask if argument.true == "attends" else ~mask
    if argument.number == "added":
        return np.where(mask, 0.0, -np.inf)
    return np.where(mask == argument.number.startswith("attends"), 1.0, 0.0)


def drawn(layout, sizes, seed, kept=AXES):
    """A mask that varies over the axes of the layout that are kept, so that no axis is constant."""
    shape = tuple(sizes[axis] if axis in axes_of(layout) and axis in kept else 1 for axis in AXES)
    return np.random.default_rng(seed).random(shape) < 0.5


def spelled(mask, argument, sizes):
    """What the suite's own table spells; axes are left at 1 where the argument allows."""
    problem = make(
        SIZES | {"batch": sizes["batch"], "heads": sizes["heads"], "kv_heads": sizes["heads"]},
        query_length=sizes["query"],
        key_length=sizes["key"],
        mask=mask,
    )
    wanted = np.dtype(bool if argument.true is not None else argument.dtype or float)
    found = [it.arguments[argument.name] for it in MaskTable((argument,)).spellings(problem)]
    return [array for array in found if array.dtype == wanted]


def meant(array, argument, sizes):
    """Who attends, in full, of an array in the argument's words."""
    numbers = array.dtype != bool
    of_both = {"both": sizes["batch"] * sizes["heads"]}
    for layout in argument.layouts:
        axes = layout.replace("(batch heads)", "both").split()
        lengths = [(sizes | of_both)[axis] for axis in axes]
        if len(axes) == array.ndim and all(
            found in (1, length) for found, length in zip(array.shape, lengths, strict=True)
        ):
            full = np.broadcast_to(from_layout(array, layout, sizes), tuple(sizes.values()))
            allowed = np.array([False, True])
            words = said(allowed, argument, numbers)
            return np.where(full == words[1], True, False)
    raise AssertionError(array.shape)


def check(source, target, layout, numbers, sizes, mask):
    """Translate there and back; False where the target cannot say it."""
    array = to_layout(
        said(mask, source, numbers), layout, make_shape(sizes).logits, broadcast=source.broadcasts
    )
    assert array is not None
    wanted = spelled(mask, target, sizes)
    names = {"source": DECLARED[source], "target": DECLARED[target]}
    if not wanted:
        constant = [np.array_equal(mask, mask.take([0], axis=i)) for i in range(4)]
        if not any(constant[i] for i in range(4) if mask.shape[i] > 1):
            with pytest.raises(Untranslatable, match="varies over"):
                translate(array, **names, **sizes)
        return False
    found = translate(array, **names, **sizes)
    assert found.dtype.kind == wanted[-1].dtype.kind
    assert np.array_equal(found, wanted[-1])
    back = translate(found, source=names["target"], target=names["source"], **sizes)
    first = to_layout(mask, "batch heads query key", make_shape(sizes).logits, broadcast=False)
    assert np.array_equal(meant(found, target, sizes), first)
    assert np.array_equal(meant(back, source, sizes), first)
    return True


def make_shape(sizes):
    return make(
        SIZES | {"batch": sizes["batch"], "heads": sizes["heads"], "kv_heads": sizes["heads"]},
        query_length=sizes["query"],
        key_length=sizes["key"],
    ).shape


@pytest.mark.sample(6)
@pytest.mark.parametrize("target", DECLARED, ids=DECLARED.get)
def test_every_pair_says_what_the_table_spells(target):
    covered = 0
    for source in DECLARED:
        for layout in source.layouts:
            for numbers in kinds(source):
                mask = drawn(layout, FULL, seed=covered)
                covered += check(source, target, layout, numbers, FULL, mask)
    assert covered >= 2, "only the argument itself"


def test_many_pairs_are_covered():
    assert len(DECLARED) >= 8
    expressible = [
        (source, target)
        for source, target in PAIRS
        if any(
            set(axes_of(one)) <= set(axes_of(other))
            for one in source.layouts
            for other in target.layouts
        )
    ]
    assert len(expressible) >= 40


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_pair_of_any_sizes(data):
    source, target = data.draw(st.sampled_from(PAIRS))
    layout = data.draw(st.sampled_from(source.layouts))
    numbers = data.draw(st.sampled_from(kinds(source)))
    sizes = {axis: data.draw(st.integers(1, 4), label=axis) for axis in AXES}
    kept = data.draw(st.sets(st.sampled_from(AXES))) if source.broadcasts else AXES
    mask = drawn(layout, sizes, data.draw(st.integers(0, 99)), kept)
    array = to_layout(
        said(mask, source, numbers), layout, make_shape(sizes).logits, broadcast=source.broadcasts
    )
    names = {"source": DECLARED[source], "target": DECLARED[target]}
    try:
        found = translate(array, **names, **sizes)
    except Untranslatable:
        assert not spelled(mask, target, sizes)
    else:
        full = np.broadcast_to(mask, tuple(sizes.values()))
        assert np.array_equal(meant(found, target, sizes), full)
        assert (found.dtype == bool) == (target.true is not None)


# Elements


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_bias_stays_as_it_is(dtype):
    bias = np.array([[0.5, -np.inf, 0.0], [-3.25, 2.0, -np.inf]], dtype=dtype)
    found = translate(bias, source=ATTN, target="ours:attn_bias")
    assert found.dtype == dtype
    assert np.array_equal(found, bias[None, None])
    back = translate(found, source="ours:attn_bias", target=ATTN)
    assert back.dtype == dtype
    assert np.array_equal(back, bias)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_zero_and_infinity_are_booleans(dtype):
    mask = np.array([[0.0, -np.inf], [0.0, 0.0]], dtype=dtype)
    found = translate(mask, source=ATTN, target=FLAX)
    assert found.dtype == bool
    assert np.array_equal(found[0, 0], [[True, False], [True, True]])
    kept = translate(mask, source=ATTN, target="ours:attn_bias")
    assert kept.dtype == dtype
    assert np.array_equal(kept[0, 0], mask)


def test_booleans_become_numbers_where_booleans_are_not_taken():
    found = translate([[False, True]], source=ATTN, target="ours:attn_bias")
    assert found.dtype == np.float32
    assert np.array_equal(found[0, 0], [[0.0, -np.inf]])


def test_nonzero_of_any_size_attends():
    found = translate(np.array([[[[0, 1, 7, -2]]]]), source=FLAX, target=ATTN, query=1)
    assert np.array_equal(found, [[True, False, False, False]])


def test_two_neither_blocks_nor_hides_where_only_one_does():
    mask = np.array([[[[0, 1, 0.25, 2]]]])
    found = translate(mask, source="tutorial-1:mask", target="tutorial-2:mask")
    assert np.array_equal(found, [[[[True, False, True, True]]]])


def test_a_translated_mask_does_what_its_source_did():
    torch = pytest.importorskip("torch")
    from conformance.adapters.tutorials.tutorial_1 import MultiHeadAttention as First
    from conformance.adapters.tutorials.tutorial_2 import MultiHeadAttention as Second

    torch.manual_seed(0)
    one, two = First(8, 2, 0.0).double(), Second(8, 2).double()
    weights = {name: value.numpy() for name, value in one.state_dict().items()}
    same = convert(weights, source="tutorial-1", target="tutorial-2", heads=2)
    two.load_state_dict({name: torch.tensor(value) for name, value in same.items()})
    x = torch.randn(1, 4, 8).double()
    mask = torch.tensor([[[[0.0, 1.0, 0.25, 2.0]]]])
    other = translate(mask, source="tutorial-1:mask", target="tutorial-2:mask")
    assert torch.allclose(one(x, x, x, mask)[0], two(x, x, x, torch.tensor(other)))
    assert not torch.allclose(one(x, x, x)[0], two(x, x, x, torch.tensor(other)))


def test_numbers_of_which_nothing_is_declared_are_refused():
    source = "keras-jax-gqa:attention_mask"
    for number in (0.25, 2, -1):
        with pytest.raises(Untranslatable, match="other numbers, whose meaning is not declared"):
            translate(np.array([[[0, 1, number]]]), source=source, target=FLAX)
    found = translate(np.array([[[0, 1, 1.0]]]), source=source, target=FLAX)
    assert np.array_equal(found, [[[[False, True, True]]]])


def test_nonzero_that_blocks(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from conformance import MaskArgument, attention_function\n"
        "@attention_function('numpy', MaskArgument('mask', 'batch key', "
        "number='blocks if nonzero'))\n"
        "def mine(query, key, value, mask=0): ...\n"
    )
    found = translate(np.array([[0.0, 3.0]]), source=f"{file}:mine:mask", target=PADDING)
    assert np.array_equal(found, [[False, True]])
    back = translate(found, source=PADDING, target=f"{file}:mine:mask")
    assert back.dtype == np.float32
    assert np.array_equal(back, [[0.0, 1.0]])


def test_a_tensor_is_read():
    torch = pytest.importorskip("torch")
    mask = torch.ones(3, 3, dtype=torch.bool).triu(1)
    assert np.array_equal(translate(mask, source=ATTN, target=KERAS)[0], ~mask.numpy())
    with pytest.raises(Untranslatable, match="NumPy cannot read the mask"):
        translate(mask.to(torch.bfloat16), source=ATTN, target=KERAS)


@pytest.mark.parametrize("flag", ["torch-mha:is_causal", "keras-jax-mha:use_causal_mask"])
def test_a_causal_flag_is_no_mask(flag):
    with pytest.raises(Untranslatable, match=f"^{flag} is a causal flag, not a mask"):
        translate(True, source=flag, target=KERAS)


def test_bfloat16_of_numpy():
    kind = pytest.importorskip("ml_dtypes").bfloat16
    bias = np.array([[0.5, -np.inf]], dtype=kind)
    found = translate(bias, source=ATTN, target="ours:attn_bias")
    assert found.dtype == kind
    assert found.tobytes() == bias.tobytes()


# Axes


def test_a_mask_expanded_over_heads_loses_them_where_it_must():
    mask = np.random.default_rng(1).random((2, 1, 1, 5)) < 0.5
    full = np.broadcast_to(mask, (2, 4, 3, 5))
    found = translate(full, source=FLAX, target=PADDING)
    assert np.array_equal(found, ~mask[:, 0, 0])


def test_batch_and_heads_are_told_apart_by_either_size():
    mask = np.random.default_rng(2).random((6, 3, 5)) < 0.5
    for sizes in ({"heads": 3}, {"batch": 2}, {"batch": 2, "heads": 3}):
        found = translate(mask, source=ATTN, target=FLAX, **sizes)
        assert np.array_equal(found, ~mask.reshape(2, 3, 3, 5))
    other = translate(mask, source=ATTN, target=FLAX, heads=2)
    assert not np.array_equal(other.ravel(), ~mask.reshape(2, 3, 3, 5)) or other.shape[0] == 3


REFUSED = {
    "heads unknown": (
        np.zeros((6, 3, 5), bool), ATTN, FLAX, {}, Untranslatable, "batch= or heads=",
    ),
    "query unknown": (
        np.array([[True, False]]), PADDING, ATTN, {"heads": 2}, Untranslatable, "give query=",
    ),
    "all unknown": (
        np.ones((2, 1, 1, 5), bool), FLAX, ATTN, {}, Untranslatable, "give heads=, query=",
    ),
    "per head": (
        drawn("heads query key", FULL, 0), FLAX, "keras-jax-mha:value_mask", {}, Untranslatable,
        r"varies over heads and query, and keras-jax-mha:value_mask is \[batch key\]",
    ),
    "varies over queries": (
        np.tri(4, dtype=bool), ATTN, PADDING, {"batch": 2}, Untranslatable, "varies over query",
    ),
    "bias": (np.array([[0.5]]), ATTN, FLAX, {}, Untranslatable, "adds finite numbers"),
    "finite infinity": (np.array([[0, -1e9]]), ATTN, FLAX, {}, Untranslatable, "must be -inf"),
    "NaN": (np.array([[0.0, np.nan]]), ATTN, FLAX, {}, Untranslatable, "NaN"),
    "+inf": (np.array([[0.0, np.inf]]), ATTN, "ours:attn_bias", {}, Untranslatable, r"\+inf"),
    "integers added": (np.array([[0, 1]]), ATTN, FLAX, {}, Untranslatable, "integers"),
    "infinity, not added": (
        np.full((1, 1, 1, 2), -np.inf), FLAX, ATTN, {"query": 1}, Untranslatable, "infinity",
    ),
    "numbers for booleans": (
        np.full((1, 1, 1, 2), 2), "ours:attend_mask", FLAX, {}, Untranslatable, "beside 0 and 1",
    ),
    "booleans for numbers": (
        np.ones((1, 1, 1, 2), bool), "ours:attn_bias", FLAX, {}, Untranslatable, "no booleans",
    ),
    "text": (np.array([["x"]]), ATTN, FLAX, {}, Untranslatable, "no array|neither"),
    "nothing": (None, ATTN, FLAX, {}, Untranslatable, "neither|no array"),
    "complex": (np.array([[1j]]), ATTN, FLAX, {}, Untranslatable, "neither"),
    "rank": (np.ones(3, bool), ATTN, FLAX, {}, WrongShape, "fits no layout"),
    "heads do not divide": (
        np.ones((6, 3, 5), bool), ATTN, FLAX, {"heads": 4}, WrongShape, "not a multiple of 4",
    ),
    "size contradicts": (np.ones((2, 5), bool), PADDING, FLAX, {"key": 6}, WrongShape, "key"),
    "no size": (np.ones((2, 5), bool), PADDING, FLAX, {"heads": 0}, WrongShape, "positive"),
    "argument": (np.ones((2, 5), bool), "torch-mha:attn_msk", FLAX, {}, UnknownName, "attn_mask"),
    "implementation": (np.ones(2), "torch-mah:attn_mask", FLAX, {}, UnknownName, "torch-mha"),
    "title": (
        np.ones(2), "torch.nn.MultiHeadAttention:attn_mask", FLAX, {}, UnknownName,
        "torch.nn.MultiheadAttention",
    ),
    "no argument": (np.ones(2), "torch-mha", FLAX, {}, UnknownName, "torch-mha:attn_mask"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    mask, source, target, sizes, kind, match = REFUSED[name]
    with pytest.raises(kind, match=match) as raised:
        translate(mask, source=source, target=target, **sizes)
    assert "\n" not in str(raised.value)


def test_two_readings_are_refused_unless_sizes_tell(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from conformance import MaskArgument, attention_function\n"
        "@attention_function('numpy', MaskArgument('mask', "
        "('batch query key', 'heads query key'), true='attends'))\n"
        "def mine(query, key, value, mask=True): ...\n"
    )
    source = f"{file}:mine:mask"
    mask = np.random.default_rng(0).random((3, 4, 5)) < 0.5
    with pytest.raises(Untranslatable, match=r"\[batch query key\] or as \[heads query key\]"):
        translate(mask, source=source, target=FLAX)
    with pytest.raises(Untranslatable, match="may be read as"):
        translate(mask, source=source, target=FLAX, batch=3)
    assert translate(mask, source=source, target=FLAX, batch=2).shape == (1, 3, 4, 5)
    assert translate(mask, source=source, target=FLAX, heads=2).shape == (3, 1, 4, 5)
    # One entry, or one head: the same mask either way.
    assert translate(mask[:1], source=source, target=FLAX).shape == (1, 1, 4, 5)


def test_names_and_titles_are_one():
    mask = np.tri(3, dtype=bool)
    spellings = ("torch-mha", "torch.nn.MultiheadAttention")
    targets = ("keras-jax-mha", "keras.layers.MultiHeadAttention (JAX)", KERAS.partition(":")[0])
    found = [
        translate(mask, source=f"{source}:attn_mask", target=f"{target}:attention_mask")
        for source, target in itertools.product(spellings, targets)
    ]
    assert all(np.array_equal(one, ~mask[None]) for one in found)


def test_no_framework_is_imported():
    program = (
        "import sys, numpy as np\n"
        "from conformance.porting.masks import translate\n"
        f"translate(np.ones((2, 2), bool), source={ATTN!r}, target={KERAS!r})\n"
        "print({'torch', 'jax', 'flax', 'keras', 'tensorflow'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


# In the frameworks themselves


@pytest.mark.night
def test_torch_and_keras_give_one_output():
    """Both called as their users call them, on the same projections."""
    torch = pytest.importorskip("torch")
    os.environ.setdefault("KERAS_BACKEND", "torch")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    keras = pytest.importorskip("keras")
    torch.manual_seed(0)
    # Heads of 4: Keras rounds its scale to float32, which 1/2 survives.
    width, heads = 8, 2
    here = torch.nn.MultiheadAttention(width, heads, batch_first=True).double()
    there = keras.layers.MultiHeadAttention(heads, width // heads, dtype="float64")
    there.build((2, 3, width), (2, 5, width), (2, 5, width))
    stacked = here.in_proj_weight.detach().numpy().reshape(3, heads, width // heads, width)
    out = here.out_proj.weight.detach().numpy().T.reshape(heads, width // heads, width)
    own = {"attention_output/kernel": out}
    own |= {
        f"{name}/kernel": stacked[i].transpose(2, 0, 1)
        for i, name in enumerate(("query", "key", "value"))
    }
    paths = [variable.path.split("/", 1)[1] for variable in there.weights]
    here.in_proj_bias.data.zero_()
    here.out_proj.bias.data.zero_()
    there.set_weights(
        [own.get(path, np.zeros(v.shape)) for path, v in zip(paths, there.weights, strict=True)]
    )
    query, key = torch.randn(2, 3, width).double(), torch.randn(2, 5, width).double()

    def output(mask):
        # Arrays of NumPy's would become float32 on the way in.
        own = [keras.ops.convert_to_tensor(x.numpy(), dtype="float64") for x in (query, key)]
        # With scores: the other path computes in float32 here, whatever the dtype.
        found = there(*own, attention_mask=mask, return_attention_scores=True)[0]
        return keras.ops.convert_to_numpy(found)

    random = np.random.default_rng(3)
    masks = [random.random((3, 5)) < 0.4, random.random((2 * heads, 3, 5)) < 0.4]
    for mask in masks:
        mask[..., 0] = False
        blocked = torch.tensor(mask)
        wanted = here(query, key, key, attn_mask=blocked)[0].detach().numpy()
        found = translate(blocked, source=ATTN, target=KERAS, heads=heads)
        assert np.allclose(output(found), wanted, rtol=0, atol=1e-12)
        assert not np.allclose(output(~found), wanted, rtol=0, atol=1e-3)
    untranslated = masks[0][None]
    wanted = here(query, key, key, attn_mask=torch.tensor(masks[0]))[0].detach().numpy()
    assert not np.allclose(output(untranslated), wanted, rtol=0, atol=1e-3)
