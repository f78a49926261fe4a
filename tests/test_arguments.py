"""Mask arguments: what a declaration says, and that every spelling means the problem."""

from __future__ import annotations

import itertools
import re
from typing import get_args

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from conformance import attention_function
from conformance.adapter.arguments import (
    AXES,
    CausalFlag,
    MaskArgument,
    MaskTable,
    NumberMeans,
    Spelling,
)
from conformance.definition.problem import Problem, Shape, Weights
from conformance.errors import Unsupported, WrongDeclaration

FULL = "batch heads query key"
BOTH = {"true": "attends", "number": "added"}
ATTENDS = MaskArgument("mask", FULL, true="attends")
PADDING = MaskArgument("key_padding_mask", "batch key", true="blocks", number="added")
TORCH = MaskArgument(
    "attn_mask", ("query key", "(batch heads) query key"), true="blocks", number="added"
)
HINT = CausalFlag("is_causal", needs="attn_mask", alignment="top-left")


def ask(sizes=(2, 3, 4, 5), mask=None, causal=None, bias=None):
    """A problem of which only the mask, the flag and the bias matter."""
    batch, heads, query, key = sizes
    shape = Shape(
        batch=batch, query_length=query, key_length=key, heads=heads, kv_heads=heads,
        head_size=1, value_head_size=1, query_width=1, key_width=1, value_width=1, output_width=1,
        bias=False,
    )  # fmt: skip
    arrays = {name: np.zeros(size) for name, size in shape.input_shapes().items()}
    weights = Weights(**{name: np.zeros(size) for name, size in shape.weight_shapes().items()})
    cotangent = np.zeros((batch, query, 1))
    return Problem(
        shape=shape, dtype="float64", weights=weights, cotangent=cotangent,
        mask=mask, causal=causal, attn_bias=bias, **arrays,
    )  # fmt: skip


def pattern(*sizes, seed=0):
    """Neither all True nor all False."""
    mask = np.random.default_rng(seed).random(sizes) < 0.5
    mask.flat[0], mask.flat[-1] = True, False
    return mask


def numbers(*sizes):
    return np.random.default_rng(1).standard_normal(sizes)


def labels(table, problem):
    return [spelling.label for spelling in table.spellings(problem)]


# What a declaration may say


@pytest.mark.parametrize(
    ("declare", "told"),
    [
        (lambda: MaskArgument("mask", FULL), "mask accepts neither booleans nor numbers"),
        (lambda: MaskArgument("mask", FULL, true="yes"), "mask: true='yes'; say 'attends'"),
        (lambda: MaskArgument("mask", FULL, true=True), "mask: true=True; say 'attends'"),
        (lambda: MaskArgument("mask", FULL, number="multiplied"), "number='multiplied'; say"),
        (lambda: MaskArgument("mask", FULL, true="attends", whole="yes"), "mask: whole='yes'; say"),
        (lambda: MaskArgument("mask", FULL, number="added", dtype="int32"), "dtype='int32'; say"),
        (lambda: MaskArgument("mask", FULL, number="attends if 1", dtype="int"), "dtype='int'"),
        (lambda: MaskArgument("mask", (), true="attends"), "mask has no layout"),
        *[
            (lambda layout=layout: MaskArgument("mask", layout, true="attends"), repr(layout))
            for layout in (
                "", "batch key query heads key", "batch size", "batch, key", "batch 1 query key",
                "(batch heads query key", "batch heads) query key", "((batch heads) query) key",
                "() key", "b h q k",
            )
        ],
        (lambda: CausalFlag("causal", alignment="topleft"), "causal: alignment='topleft'; say"),
        (
            lambda: CausalFlag("causal", needs="mask", alone=True),
            "causal: it cannot both stand alone and need mask",
        ),
        (lambda: MaskTable((ATTENDS, ATTENDS)), "two mask arguments have the same name"),
        (
            lambda: MaskTable((ATTENDS,), CausalFlag("mask")),
            "'mask' is both the causal flag and a mask argument",
        ),
        (
            lambda: MaskTable((ATTENDS,), HINT),
            "causal flag needs 'attn_mask', which is not declared",
        ),
        (
            lambda: MaskTable((PADDING,), CausalFlag("is_causal", needs="key_padding_mask")),
            "needs 'key_padding_mask', which no layout lets hold a causal mask",
        ),
    ],
)  # fmt: skip
def test_a_declaration_that_contradicts_itself(declare, told):
    with pytest.raises(WrongDeclaration, match=re.escape(told)) as caught:
        declare()
    assert "\n" not in str(caught.value)


def test_one_layout_needs_no_tuple():
    assert MaskArgument("mask", FULL, true="attends").layouts == (FULL,)
    assert TORCH.layouts == ("query key", "(batch heads) query key")


# The spellings of a problem, one by one


def test_nothing_to_say():
    (spelling,) = MaskTable((ATTENDS,)).spellings(ask())
    assert not spelling.arguments
    assert MaskTable().spell(ask()).arguments == {}


@pytest.mark.parametrize(
    ("declared", "dtype", "blocked", "attended"),
    [
        ({"true": "attends"}, np.bool_, False, True),
        ({"true": "blocks"}, np.bool_, True, False),
        ({"number": "added"}, np.float64, -np.inf, 0.0),
        ({"number": "attends if nonzero"}, np.float64, 0.0, 1.0),
        ({"number": "blocks if nonzero"}, np.float64, 1.0, 0.0),
    ],
)
def test_what_a_mask_holds(declared, dtype, blocked, attended):
    mask = pattern(2, 3, 4, 5)
    table = MaskTable((MaskArgument("m", FULL, **declared),))
    said = table.spell(ask(mask=mask)).arguments["m"]
    assert said.dtype == dtype
    assert np.array_equal(said, np.where(mask, attended, blocked))


def test_booleans_come_before_numbers_and_whole_arrays_before_broadcast_ones():
    table = MaskTable((MaskArgument("m", FULL, broadcasts=True, **BOTH),))
    problem = ask(mask=pattern(2, 1, 4, 5))
    assert labels(table, problem) == [
        f"m=bool[{FULL}]", f"m=float[{FULL}]", f"m=bool[~{FULL}]", f"m=float[~{FULL}]",
    ]  # fmt: skip
    shapes = [spelling.arguments["m"].shape for spelling in table.spellings(problem)]
    assert shapes == [(2, 3, 4, 5)] * 2 + [(2, 1, 4, 5)] * 2


def test_what_varies_over_every_axis_has_no_broadcast_spelling():
    table = MaskTable((MaskArgument("m", FULL, true="attends", broadcasts=True),))
    assert labels(table, ask(mask=pattern(2, 3, 4, 5))) == [f"m=bool[{FULL}]"]


def test_mask_flag_and_bias_in_one_argument():
    mask, bias = pattern(2, 1, 1, 5), numbers(1, 3, 4, 5)
    problem = ask(mask=mask, causal="bottom-right", bias=bias)
    (spelling,) = MaskTable((MaskArgument("m", FULL, **BOTH),)).spellings(problem)
    allowed = mask & np.tri(4, 5, 1, dtype=bool)
    assert np.array_equal(spelling.arguments["m"], np.where(allowed, bias, -np.inf))
    assert spelling.bias == ("m", FULL)


def test_padding_and_triangle_each_in_its_own_argument():
    mask = pattern(2, 1, 1, 5)
    table = MaskTable((PADDING, TORCH))
    spelling = table.spell(ask(mask=mask, causal="top-left"))
    assert spelling.label == "key_padding_mask=bool[batch key], attn_mask=bool[query key]"
    assert np.array_equal(spelling.arguments["key_padding_mask"], ~mask[:, 0, 0])
    assert np.array_equal(spelling.arguments["attn_mask"], ~np.tri(4, 5, dtype=bool))
    merged = "attn_mask=bool[(batch heads) query key]"
    assert merged in labels(table, ask(mask=mask, causal="top-left"))


def test_batch_and_heads_in_one_axis():
    mask = pattern(2, 3, 4, 5)
    said = MaskTable((TORCH,)).spell(ask(mask=mask)).arguments["attn_mask"]
    assert said.shape == (6, 4, 5)
    assert all(np.array_equal(said[3 * b + h], ~mask[b, h]) for b in range(2) for h in range(3))


def test_a_joined_axis_is_never_broadcast():
    argument = MaskArgument("m", "(batch heads) query key", true="attends", broadcasts=True)
    every = list(MaskTable((argument,)).spellings(ask(mask=pattern(1, 1, 1, 5))))
    assert [spelling.arguments["m"].shape for spelling in every] == [(6, 4, 5), (6, 1, 5)]


@pytest.mark.parametrize("alignment", ["top-left", "bottom-right", None])
def test_a_flag_alone_comes_first(alignment):
    table = MaskTable((ATTENDS,), CausalFlag("causal", alignment))
    first, second = table.spellings(ask((2, 3, 4, 4), causal="top-left"))
    assert first.arguments == {"causal": True}
    assert first.label == "causal"
    assert second.arguments.keys() == {"mask"}


@pytest.mark.parametrize("declared", ["top-left", "bottom-right", None])
@pytest.mark.parametrize("wanted", ["top-left", "bottom-right"])
@pytest.mark.parametrize("sizes", [(1, 1, 3, 5), (1, 1, 5, 3)])
def test_a_flag_of_another_alignment_is_not_used(declared, wanted, sizes):
    table = MaskTable((ATTENDS,), CausalFlag("causal", declared))
    used = ["causal" in s.arguments for s in table.spellings(ask(sizes, causal=wanted))]
    assert used == ([True, False] if declared == wanted else [False])


def test_a_flag_is_not_used_where_nothing_is_causal():
    table = MaskTable((ATTENDS,), CausalFlag("causal"))
    for spelling in table.spellings(ask((2, 3, 4, 4), mask=pattern(2, 3, 4, 4))):
        assert spelling.arguments.keys() == {"mask"}


def test_a_flag_with_a_mask_beside_it():
    mask = pattern(2, 1, 1, 4)
    table = MaskTable((ATTENDS,), CausalFlag("causal"))
    spelling = table.spell(ask((2, 3, 4, 4), mask=mask, causal="top-left"))
    assert spelling.label == f"mask=bool[{FULL}], causal"
    assert np.array_equal(spelling.arguments["mask"], np.broadcast_to(mask, (2, 3, 4, 4)))


def test_a_flag_that_stands_alone_is_never_beside_a_mask():
    table = MaskTable((ATTENDS,), CausalFlag("causal", alone=True))
    both = ask((2, 3, 4, 4), mask=pattern(2, 1, 1, 4), causal="top-left")
    assert [spelling.label for spelling in table.spellings(both)] == [f"mask=bool[{FULL}]"]
    assert table.spell(ask((2, 3, 4, 4), causal="top-left")).label == "causal"


def test_an_argument_that_stands_alone_is_never_beside_another():
    bias = MaskArgument("bias", FULL, number="added", alone=True)
    table = MaskTable((ATTENDS, bias), CausalFlag("causal", alignment="top-left"))
    numbers = np.ones((2, 1, 4, 4))
    both = ask((2, 3, 4, 4), mask=pattern(2, 1, 1, 4), causal="top-left", bias=numbers)
    assert labels(table, both) == [f"bias=float[{FULL}], causal", f"bias=float[{FULL}]"]
    assert np.isneginf(table.spell(both).arguments["bias"]).any()
    assert table.spell(ask((2, 3, 4, 4), bias=numbers)).label == f"bias=float[{FULL}]"


def test_a_flag_that_needs_its_mask():
    table = MaskTable((PADDING, TORCH), HINT)
    problem = ask((2, 3, 4, 4), mask=pattern(2, 1, 1, 4), causal="top-left")
    spellings = list(table.spellings(problem))
    assert "is_causal" not in spellings[0].arguments
    hinted = [spelling.arguments for spelling in spellings if "is_causal" in spelling.arguments]
    assert len(hinted) == 2
    for arguments in hinted:
        triangle = arguments["attn_mask"]
        blocked = triangle if triangle.dtype == np.bool_ else triangle == -np.inf
        assert np.array_equal(blocked, ~np.tri(4, 4, dtype=bool))


def test_a_flag_that_needs_its_mask_never_comes_with_another_in_it():
    # A mask that only fits the argument that the flag needs: then there is no hint.
    table = MaskTable((TORCH,), HINT)
    problem = ask((2, 3, 4, 4), mask=pattern(2, 3, 4, 4), causal="top-left")
    assert all("is_causal" not in spelling.arguments for spelling in table.spellings(problem))


# What cannot be said, and why


@pytest.mark.parametrize(
    ("table", "problem", "told"),
    [
        (MaskTable(), ask(mask=pattern(1, 1, 1, 5)), "no mask arguments: cannot express mask"),
        (
            MaskTable((), CausalFlag("causal", "top-left")),
            ask(causal="bottom-right", bias=numbers(1, 1, 4, 5)),
            "no mask arguments: cannot express causal and bias",
        ),
        (MaskTable((ATTENDS,)), ask(bias=numbers(1, 1, 4, 5)), "no argument adds a bias"),
        (
            MaskTable((PADDING,)),
            ask(mask=pattern(2, 1, 4, 5)),
            "a mask that varies over batch, query, key fits none of key_padding_mask[batch key]",
        ),
        (
            MaskTable((MaskArgument("m", ("batch key", "query key"), true="attends"),)),
            ask(mask=pattern(1, 3, 1, 5)),
            "varies over heads, key fits none of m[batch key | query key]",
        ),
    ],
)
def test_unsupported_with_the_reason(table, problem, told):
    assert not list(table.spellings(problem))
    with pytest.raises(Unsupported, match=re.escape(told)):
        table.spell(problem)


# Every spelling of every problem, decoded by hand


def cell(array, layout, position):
    """The element for a position `{axis: index}`, one index at a time."""
    index = []
    for axis, part in enumerate(re.findall(r"\([^)]*\)|\w+", layout)):
        flat = 0
        for name in part.strip("()").split():
            flat = flat * position[f"size of {name}"] + position[name]
        index.append(0 if array.shape[axis] == 1 else flat)
    return array[tuple(index)]


def decoded(table, spelling, problem):
    """(allowed, added) `[batch heads query key]`, as the declaration says."""
    sizes = problem.shape.logits
    known = {f"size of {axis}": size for axis, size in zip(AXES, sizes, strict=True)}
    layouts = dict(re.findall(r"(\w+)=(?:bool|float)\[~?([^\]]*)\]", spelling.label))
    allowed, added = np.ones(sizes, bool), np.zeros(sizes)
    for at in itertools.product(*map(range, sizes)):
        position = known | dict(zip(AXES, at, strict=True))
        for name, value in spelling.arguments.items():
            if table.causal is not None and name == table.causal.name:
                assert value is True
                shift = sizes[3] - sizes[2] if table.causal.alignment == "bottom-right" else 0
                allowed[at] &= at[3] <= at[2] + shift
                continue
            argument = table.by_name[name]
            said = cell(value, layouts[name], position)
            if value.dtype == np.bool_:
                assert argument.true is not None
                allowed[at] &= said if argument.true == "attends" else not said
            elif argument.number.startswith("attends"):
                assert said in (0.0, 1.0)
                allowed[at] &= said != 0
            elif argument.number.startswith("blocks"):
                assert said in (0.0, 1.0)
                allowed[at] &= said == 0
            else:
                assert argument.number == "added"
                assert not np.isnan(said)
                allowed[at] &= said > -np.inf
                added[at] += said if np.isfinite(said) else 0.0
    return allowed, added


LAYOUTS = (
    FULL,
    "batch key",
    "query key",
    "key query",
    "batch query key",
    "heads query key",
    "(batch heads) query key",
    "batch (heads query) key",
    "batch query",
)


@st.composite
def arguments(draw, name):
    true = draw(st.sampled_from(["attends", "blocks", None]))
    number = draw(st.sampled_from([*get_args(NumberMeans), None]))
    assume(true or number)
    layouts = draw(st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=2, unique=True))
    return MaskArgument(name, tuple(layouts), true, number, draw(st.booleans()))


@st.composite
def tables(draw):
    names = draw(st.sampled_from([(), ("one",), ("one", "two")]))
    declared = tuple(draw(arguments(name)) for name in names)
    fit = [it.name for it in declared if any({"query", "key"} <= {*re.findall(r"\w+", layout)}
           for layout in it.layouts)]  # fmt: skip
    flag = None
    if draw(st.booleans()):
        alignment = draw(st.sampled_from(["top-left", "bottom-right", None]))
        flag = CausalFlag("flag", alignment, draw(st.sampled_from([None, *fit])))
    return MaskTable(declared, flag)


@st.composite
def problems(draw):
    sizes = tuple(draw(st.integers(1, most)) for most in (2, 3, 3, 4))
    kept = st.tuples(*[st.booleans()] * 4)
    random = np.random.default_rng(draw(st.integers(0, 99)))

    def some():
        return tuple(n if k else 1 for n, k in zip(sizes, draw(kept), strict=True))

    mask = random.random(some()) < 0.6 if draw(st.booleans()) else None
    bias = random.standard_normal(some()) if draw(st.booleans()) else None
    causal = draw(st.sampled_from([None, "top-left", "bottom-right"]))
    return ask(sizes, mask, causal, bias)


def whole(argument, layout, sizes):
    """The shape without any broadcasting."""
    parts = re.findall(r"\([^)]*\)|\w+", layout)
    known = dict(zip(AXES, sizes, strict=True))
    return tuple(int(np.prod([known[n] for n in part.strip("()").split()])) for part in parts)


@settings(deadline=None, max_examples=150)
@given(tables(), problems())
def test_every_spelling_means_the_problem(table, problem):
    every = list(table.spellings(problem))
    bias = np.zeros(()) if problem.attn_bias is None else problem.attn_bias
    bias = np.broadcast_to(bias, problem.shape.logits)
    for spelling in every:
        allowed, added = decoded(table, spelling, problem)
        assert np.array_equal(allowed, problem.allowed_in_full()), spelling.label
        assert np.array_equal(added[allowed], bias[allowed]), spelling.label
        layouts = dict(re.findall(r"(\w+)=\w+\[~?([^\]]*)\]", spelling.label))
        for name, layout in layouts.items():
            said = spelling.arguments[name].shape
            wanted = whole(table.by_name[name], layout, problem.shape.logits)
            marked = f"[~{layout}]" in spelling.label
            assert layout in table.by_name[name].layouts
            assert table.by_name[name].broadcasts or said == wanted
            assert all(one in (1, other) for one, other in zip(said, wanted, strict=True))
            if not marked:
                assert said == wanted
    told = [
        tuple((n, np.asarray(v).dtype.kind, np.shape(v), np.asarray(v).tobytes())
              for n, v in sorted(s.arguments.items()))
        for s in every
    ]  # fmt: skip
    assert len(set(told)) == len(told), "a spelling is repeated"
    if not every:
        with pytest.raises(Unsupported, match=r"^[^\n]+$"):
            table.spell(problem)
    else:
        assert table.spell(problem).label == every[0].label


@settings(deadline=None, max_examples=60)
@given(tables(), problems())
def test_an_argument_for_everything_always_has_a_spelling(table, problem):
    everything = MaskArgument("everything", FULL, **BOTH)
    able = MaskTable((*table.arguments, everything), table.causal)
    assert able.spell(problem) is not None


# Gradients of a bias


@settings(deadline=None, max_examples=100)
@given(tables(), problems(), st.booleans())
def test_the_gradient_of_a_bias_goes_back_the_way_the_bias_came(table, problem, masked):
    assume(problem.attn_bias is not None)
    if not masked:
        problem = problem.replace(mask=None, causal=None)
    for spelling in table.spellings(problem):
        name, layout = spelling.bias
        native = spelling.arguments[name]
        gradient = np.random.default_rng(5).standard_normal(native.shape)
        # Each native element came from one element of the bias: add it up there.
        shape = problem.attn_bias.shape
        wanted = np.zeros(shape)
        known = dict(zip(AXES, problem.shape.logits, strict=True))
        parts = [part.strip("()").split() for part in re.findall(r"\([^)]*\)|\w+", layout)]
        for index in np.ndindex(native.shape):
            position = dict.fromkeys(AXES, 0)
            for names, flat in zip(parts, index, strict=True):
                sizes = [known[n] for n in names]
                position |= zip(names, np.unravel_index(flat, sizes), strict=True)
            at = tuple(
                min(position[axis], size - 1) for axis, size in zip(AXES, shape, strict=True)
            )
            wanted[at] += gradient[index]
            if np.isfinite(native[index]):
                assert native[index] == problem.attn_bias[at]
        found = spelling.bias_gradient(gradient, problem)
        assert found.shape == shape
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_the_gradient_is_summed_where_the_bias_was_repeated():
    bias = numbers(1, 3, 1, 5)
    spelling = MaskTable((MaskArgument("m", FULL, number="added"),)).spell(ask(bias=bias))
    assert spelling.arguments["m"].shape == (2, 3, 4, 5)
    gradient = numbers(2, 3, 4, 5)
    found = spelling.bias_gradient(gradient, ask(bias=bias))
    assert np.array_equal(found, gradient.sum(axis=(0, 2), keepdims=True))


def test_only_a_bias_has_a_gradient():
    assert MaskTable((ATTENDS,)).spell(ask(mask=pattern(1, 1, 4, 5))).bias is None
    with pytest.raises(AssertionError):
        Spelling("none", {}).bias_gradient(np.zeros(1), ask())


def test_a_function_takes_its_mask_arguments_one_by_one_or_together():
    one = MaskArgument("mask", "batch key", true="attends")
    other = MaskArgument("bias", FULL, number="added")
    together = [
        attention_function("numpy", *given)(lambda query, key, value: value).mask_arguments
        for given in ((one, other), ((one, other),), ([one], other), ())
    ]
    assert together == [(one, other)] * 3 + [()]
