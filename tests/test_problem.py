"""The definition's data: what fits together, what is refused, and what a mask means."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import FULL, MEMORY, MODERN, SELF, SIZES, make, position_of, visible

from conformance.cases import patterns
from conformance.cases.case import rounded
from conformance.definition.dtypes import BFLOAT16, DTYPES
from conformance.definition.expectation import solve
from conformance.definition.features import ABSENT, FEATURES
from conformance.definition.problem import (
    WEIGHT_NAMES,
    Answer,
    Norm,
    Positions,
    Problem,
    Rotary,
    Segments,
    Shape,
    causal_mask,
    check_broadcastable,
    check_shape,
)
from conformance.definition.rotary import RotaryScaling
from conformance.errors import WrongShape

deterministic = settings(derandomize=True, database=None, deadline=None)
NUMBERS = [name for name, size in SIZES.items() if isinstance(size, int)]


def shape(**changes):
    return Shape(**{**SIZES, **changes})


# Shape.


@pytest.mark.parametrize("name", NUMBERS)
def test_sizes_are_not_negative(name):
    with pytest.raises(WrongShape, match=f"Shape.{name} is -1"):
        shape(**{name: -1})


@pytest.mark.parametrize("kv_heads", [0, 3, 8])
def test_heads_are_a_multiple_of_key_value_heads(kv_heads):
    with pytest.raises(WrongShape, match=f"4 heads cannot share {kv_heads} key/value heads"):
        shape(kv_heads=kv_heads)


def test_inputs_that_are_one_array_have_one_width():
    with pytest.raises(WrongShape, match="key and value are one array"):
        shape(sharing="memory")


@pytest.mark.parametrize("changes", [{"query_length": 4}, {"query_width": 9}])
def test_in_self_attention_query_and_key_agree(changes):
    shape(**SELF)
    with pytest.raises(WrongShape, match="query and key are one array"):
        shape(**{**SELF, **changes})


def test_group_is_query_heads_per_key_value_head():
    assert [shape(kv_heads=n).group for n in (4, 2, 1)] == [1, 2, 4]


def test_default_scale():
    assert shape(head_size=16).default_scale == 0.25
    assert shape(head_size=16, score="additive").default_scale == 1.0
    assert make(head_size=16).logit_scale == 0.25
    assert make(head_size=16, scale=3.0).logit_scale == 3.0
    assert make(scale=0.0).logit_scale == 0.0


def test_distinct_inputs():
    assert shape().distinct_inputs() == ("query", "key", "value")
    assert shape(**MEMORY).distinct_inputs() == ("query", "key")
    assert shape(**SELF).distinct_inputs() == ("query",)


def test_weights_have_one_layout():
    sizes = shape(kv_heads=2, score="additive").weight_shapes()
    assert sizes == {
        "query": (3, 4, 3),
        "key": (4, 2, 3),
        "value": (5, 2, 2),
        "output": (4, 2, 6),
        "query_bias": (4, 3),
        "key_bias": (2, 3),
        "value_bias": (2, 2),
        "output_bias": (6,),
        "score": (4, 3),
    }
    assert set(sizes) == set(WEIGHT_NAMES)
    plain = shape(kv_heads=2, bias=False).weight_shapes()
    assert plain == {name: sizes[name] for name in ("query", "key", "value", "output")}


# Problem.


@pytest.mark.parametrize("name", ["query", "key", "value", "cotangent"])
def test_inputs_have_the_shape_that_the_problem_says(name):
    problem = make()
    with pytest.raises(WrongShape, match=rf"{name} has shape .*, wanted \[2, "):
        problem.replace(**{name: np.zeros((2, 9, 9))})


@pytest.mark.parametrize("name", make(score="additive").weights.named())
def test_weights_have_the_shape_that_the_problem_says(name):
    with pytest.raises(WrongShape, match=f"weights.{name} has shape"):
        make(score="additive").with_weights(**{name: np.zeros((1, 1, 1))})


@pytest.mark.parametrize("name", ["query_bias", "key_bias", "value_bias", "output_bias"])
def test_biases_are_all_there_or_none(name):
    with pytest.raises(WrongShape, match="weights are"):
        make().with_weights(**{name: None})
    with pytest.raises(WrongShape, match="weights are"):
        make(bias=False).with_weights(**{name: np.zeros(make().shape.weight_shapes()[name])})


@pytest.mark.parametrize("name", ["mask", "attn_bias"])
@pytest.mark.parametrize(
    "wrong", [(3, 5), (4, 3, 5), (2, 4, 3, 6), (2, 2, 3, 5), (3, 1, 1, 5), (1, 2, 4, 3, 5), ()]
)
def test_masks_and_biases_have_four_axes_in_full_or_one(name, wrong):
    with pytest.raises(WrongShape, match=f"{name} has shape .*must be there, in full or as 1"):
        make().replace(**{name: np.ones(wrong, dtype=bool)})


@deterministic
@given(st.tuples(*(st.sampled_from([1, size]) for size in FULL)))
def test_every_axis_of_a_mask_may_be_one(size):
    make().replace(mask=np.ones(size, dtype=bool), attn_bias=np.zeros(size))


def test_errors_say_both_shapes():
    with pytest.raises(WrongShape, match=r"x has shape \[2\], wanted \[3, 4\]"):
        check_shape("x", (2,), (3, 4))
    with pytest.raises(WrongShape, match=r"x has shape \[2\].*= \[1, 2, 3, 4\]"):
        check_broadcastable("x", (2,), (1, 2, 3, 4))


def test_a_problem_and_its_parts_are_immutable():
    problem = make()
    for item, field in ((problem, "scale"), (problem.shape, "batch"), (problem.weights, "key")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(item, field, 1)


def test_format_is_found_by_the_dtype():
    assert make(dtype="bfloat16").format is BFLOAT16


# Features.

_YARN = partial(RotaryScaling, rope_type="yarn", factor=4.0)
_LLAMA3 = partial(
    RotaryScaling, rope_type="llama3", factor=8.0, original_max_position_embeddings=8192
)
BAD_SCALINGS = {
    ".rope_type is 'ntk'; say one of 'linear', 'dynamic', 'yarn', 'longrope', 'llama3'": (
        RotaryScaling(rope_type="ntk", factor=2.0)
    ),
    " of linear lacks factor": RotaryScaling(rope_type="linear"),
    " of yarn lacks original_max_position_embeddings": _YARN(),
    " of llama3 lacks high_freq_factor": _LLAMA3(low_freq_factor=1.0),
    " of linear takes no truncate": RotaryScaling(rope_type="linear", factor=2.0, truncate=True),
    ".factor is 0.5; it is at least 1 and finite": RotaryScaling(rope_type="linear", factor=0.5),
    ".factor is nan; it is at least 1 and finite": RotaryScaling(rope_type="linear", factor=np.nan),
    ".attention_factor is -1.0; it is positive and finite": _YARN(
        original_max_position_embeddings=32, attention_factor=-1.0
    ),
    ".low_freq_factor is 4.0; it is below high_freq_factor, 1.0": _LLAMA3(
        low_freq_factor=4.0, high_freq_factor=1.0
    ),
    ".beta_slow is 40.0; it is below beta_fast, 32.0": _YARN(
        original_max_position_embeddings=32, beta_slow=40.0
    ),
    ".long_factor has 2 numbers for 1 pairs": RotaryScaling(
        rope_type="longrope",
        factor=4.0,
        original_max_position_embeddings=32,
        short_factor=(1.0,),
        long_factor=(1.0, 2.0),
    ),
    " of dynamic needs two pairs: the first is never scaled": RotaryScaling(
        rope_type="dynamic", factor=4.0, original_max_position_embeddings=32
    ),
}
"""Scalings that cannot be, by what is told about `rotary_scaling` of one rotated pair."""

BAD_FEATURES = {
    "window has -1 keys before the query; None means no limit": {"window": (-1, None)},
    "window has -2 keys after the query; None means no limit": {"window": (3, -2)},
    "soft_cap is 0.0; it is positive and finite": {"soft_cap": 0.0},
    "soft_cap is inf; it is positive and finite": {"soft_cap": np.inf},
    "sinks has shape [3], wanted [4]": {"sinks": np.zeros(3)},
    "slopes has shape [1, 4], wanted [4]": {"slopes": np.zeros((1, 4))},
    "rotary.size is 4; it is even, positive and at most the head size, 3": {
        "rotary": Rotary(size=4)
    },
    "rotary.size is 1; it is even, positive and at most the head size, 3": {
        "rotary": Rotary(size=1)
    },
    "rotary.size is 0; it is even, positive and at most the head size, 3": {
        "rotary": Rotary(size=0)
    },
    "rotary.base is 0.0; it is positive and finite": {"rotary": Rotary(size=2, base=0.0)},
    **{
        f"rotary_scaling{told}": {"rotary": Rotary(size=2), "rotary_scaling": scaling}
        for told, scaling in BAD_SCALINGS.items()
    },
    "norm.key has shape [1], wanted [3]": {"norm": Norm(query=np.ones(3), key=np.ones(1))},
    "norm.epsilon is 0; it is positive and finite": {
        "norm": Norm(query=np.ones(3), key=np.ones(3), epsilon=0)
    },
    "query_lengths has shape [1], wanted [2]": {"query_lengths": np.array([1])},
    "query_lengths are [4, 0]; they are within 0 and 3": {"query_lengths": np.array([4, 0])},
    "spans holds -1; ids are at least 0, and 0 is in no span": {"spans": np.full((2, 5), -1)},
    "tree has a parent that is no earlier query; -1 is that of none": {
        "tree": np.array([[-1, 0, 2]] * 2)
    },
    "tree has shape [2, 5], wanted [2, 3]": {"tree": np.full((2, 5), -1)},
    "key_lengths are [5, -1]; they are within 0 and 5": {"key_lengths": np.array([5, -1])},
    "segments.key has shape [2, 3], wanted [2, 5]": {
        "segments": Segments(query=np.zeros((2, 3), int), key=np.zeros((2, 3), int))
    },
    "positions.query has shape [3], wanted [2, 3]": {
        "positions": Positions(query=np.zeros(3, int), key=np.zeros((2, 5), int))
    },
}


@pytest.mark.parametrize("told", BAD_FEATURES)
def test_features_fit_the_shape_or_are_refused_in_one_line(told):
    with pytest.raises(WrongShape, match=f"^{re.escape(told)}$"):
        make().replace(**BAD_FEATURES[told])


def test_a_scaling_is_read_from_a_configuration_as_it_is_published():
    """As in the files of Llama 3.1, gpt-oss and Phi 3, with older names of some."""
    llama = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    llama |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert RotaryScaling.of({"rope_theta": 5e5, **llama}) == RotaryScaling(**llama)
    oss = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    oss |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    assert RotaryScaling.of(oss).parameters() == oss
    phi = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}
    phi |= {"factor": 32.0, "original_max_position_embeddings": 4096}
    assert RotaryScaling.of(phi).long_factor == (2.0, 4.0)
    assert RotaryScaling.of(phi).gain == pytest.approx(1.19023807)
    assert RotaryScaling.of({"rope_theta": 1e4, "partial_rotary_factor": 0.5}) is None
    for wrong, told in (
        ({"rope_type": "ntk", "factor": 2.0}, "rotary_scaling.rope_type is 'ntk'; say one of"),
        ({**oss, "alpha": 1.0}, "rotary_scaling has no alpha"),
        ({"rope_type": "linear", "factor": 0.5}, "rotary_scaling.factor is 0.5; it is at least"),
    ):
        with pytest.raises(WrongShape, match=f"^{re.escape(told)}"):
            RotaryScaling.of(wrong)


PUBLISHED = {
    "Llama 3.1": (128, 5e5, 131072, _LLAMA3(low_freq_factor=1.0, high_freq_factor=4.0)),
    "gpt-oss": (
        64,
        1.5e5,
        131072,
        RotaryScaling(
            rope_type="yarn",
            factor=32.0,
            original_max_position_embeddings=4096,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
        ),
    ),
    "DeepSeek V3": (
        64,
        1e4,
        163840,
        RotaryScaling(
            rope_type="yarn",
            factor=40.0,
            original_max_position_embeddings=4096,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
    ),
    "Qwen 2.5": (128, 1e6, 131072, _YARN(original_max_position_embeddings=32768)),
    "Phi 3": (
        96,
        1e4,
        131072,
        RotaryScaling(
            rope_type="longrope",
            factor=32.0,
            original_max_position_embeddings=4096,
            short_factor=tuple(1 + pair / 100 for pair in range(48)),
            long_factor=tuple(1 + pair for pair in range(48)),
        ),
    ),
    "linear": (128, 1e4, 4096, RotaryScaling(rope_type="linear", factor=4.0)),
    "dynamic": (
        128,
        1e4,
        4096,
        RotaryScaling(rope_type="dynamic", factor=2.0, original_max_position_embeddings=4096),
    ),
}
"""As in published configurations: head size, base, most positions, scaling."""


@pytest.mark.parametrize("length", [4096, 20000])
@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies_of_published_models_are_those_of_transformers(name, length):
    pytest.importorskip("torch")
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    size, base, most, scaling = PUBLISHED[name]
    told = scaling.parameters() | {"rope_theta": base}
    if name == "dynamic":
        del told["original_max_position_embeddings"]
    config = LlamaConfig(
        hidden_size=size,
        num_attention_heads=1,
        max_position_embeddings=most,
        rope_parameters=told,
    )
    scale = rope.ROPE_INIT_FUNCTIONS[scaling.rope_type]
    frequencies, factor = scale(config, "cpu", seq_len=length)
    assert scaling.gain == pytest.approx(factor, rel=1e-12)
    found = scaling.scaled(size, base, length).frequencies()
    np.testing.assert_allclose(found, frequencies.double().numpy(), rtol=4e-6)


def test_numbers_of_features_may_be_less_than_one():
    ones = np.ones(3)
    make().replace(soft_cap=0.5, rotary=Rotary(size=2, base=0.5))
    make().replace(norm=Norm(query=ones, key=ones, epsilon=1e-8))


def test_features_are_listed_in_the_order_of_the_definition():
    assert make().features == ()
    assert make(causal="bottom-right", mask=FULL, attn_bias=FULL).features == ()
    names = {name: make(modern=(name,), head_size=5).features for name in MODERN}
    assert names == {
        "norm": ("query/key norm",),
        "rotary": ("rotary",),
        "interleaved": ("rotary",),
        "scaled": ("rotary",),
        "cap": ("soft cap",),
        "slopes": ("alibi",),
        "window": ("window",),
        "chunk": ("chunk",),
        "spans": ("spans",),
        "tree": ("tree",),
        "dilation": ("dilation",),
        "global tokens": ("global tokens",),
        "left window": ("window",),
        "lengths": ("lengths",),
        "segments": ("segments",),
        "positions": ("positions",),
        "sinks": ("sinks",),
        "bottom-right": (),
    }
    every = make(modern=tuple(MODERN), head_size=5).features
    order = ("query/key norm", "rotary", "soft cap", "alibi", "window", "lengths", "segments")
    rest = ("positions", "chunk", "spans", "tree", "dilation", "global tokens", "sinks")
    assert every == (*order, *rest)
    assert make(modern=("window",)).replace(window=(0, None)).features == ("window",)


def test_every_field_of_a_feature_is_that_of_one_entry():
    fields = [item.name for item in dataclasses.fields(Problem)]
    fields = fields[fields.index("heads_alone") + 1 :]
    assert fields == [name for entry in FEATURES for name in entry.absent]
    plain = make()
    assert {name: getattr(plain, name) for name in fields} == dict(ABSENT)
    for entry in FEATURES:
        assert set(entry.trained) <= set(entry.arrays)
        assert all(set(axes) <= {*SIZES, "bias", "position_axes"} for axes in entry.arrays.values())


@pytest.mark.parametrize("entry", FEATURES, ids=lambda entry: entry.name)
def test_what_draws_a_feature_makes_it_and_no_other(entry):
    whole = (*entry.needs, entry.name)
    drawn = {name for one in FEATURES if one.name in whole for name in one.absent}
    random = np.random.default_rng(3)
    given = shape(query_length=4, key_length=6, head_size=6)
    for name in entry.drawn:
        fields = getattr(patterns, name)(given, "bottom-right", random)
        assert fields.keys() <= drawn, name
        problem = make(query_length=4, key_length=6, head_size=6, causal="bottom-right")
        problem = problem.replace(**fields)
        assert problem.features == whole
        assert len([*entry.facts(problem)]) == 1
        for simpler in entry.simpler(problem):
            assert problem.replace(**simpler).features == whole


def test_a_token_whose_parent_is_removed_descends_from_the_nearest_that_is_kept():
    (entry,) = (entry for entry in FEATURES if entry.name == "tree")
    arrays = {"tree": np.array([[-1, 0, 1, 2, 1], [-1, -1, 1, 2, 3]])}
    entry.cut(arrays, {"query_length": [0, 3, 4]})
    # Of the first: 3 descends from 2, 1 and 0, and 4 from 1 and 0. Axes are cut afterwards.
    assert arrays["tree"][:, [0, 3, 4]].tolist() == [[-1, 0, 0], [-1, -1, 1]]


def test_positions_in_a_tree_are_depths():
    problem = make().replace(tree=np.array([[-1, 0, 0], [-1, -1, 1]]), key_lengths=np.array([5, 4]))
    assert problem.position_of_queries.tolist() == [[2, 3, 3], [1, 1, 2]]
    assert problem.position_of_keys[:, :4].tolist() == [[0, 1, 2, 3], [0, 1, 1, 2]]
    assert problem.allowed[0, 0, 2].tolist() == [True, True, True, False, True]
    assert problem.allowed[1, 0, 2].tolist() == [True, False, True, True, False]


def test_every_number_of_a_feature_is_in_the_digest():
    problem = make(modern=tuple(MODERN), head_size=5)
    norm, rotary = problem.norm, problem.rotary
    changes = [
        {"window": (2, 1)},
        {"soft_cap": 0.7},
        {"chunk": 4},
        {"dilation": 3},
        {"rotary": dataclasses.replace(rotary, base=51.0)},
        {"rotary": dataclasses.replace(rotary, pairs="interleaved")},
        {"rotary_scaling": dataclasses.replace(problem.rotary_scaling, factor=4.5)},
        {"rotary_scaling": dataclasses.replace(problem.rotary_scaling, truncate=None)},
        {"norm": dataclasses.replace(norm, epsilon=0.2)},
    ]
    for name, array in problem.feature_arrays().items():
        field, _, part = name.partition(".")
        changed = np.where(array == array.max(), array - 1, array)
        value = dataclasses.replace(getattr(problem, field), **{part: changed}) if part else changed
        changes.append({field: value})
    assert len(changes) == 9 + 13
    digests = {problem.replace(**change).digest() for change in ({}, *changes)}
    assert len(digests) == 1 + len(changes)
    assert make().digest() == "609a9e0774670853b7418aae8b93304e"


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_features_are_rounded_and_the_others_stay(dtype):
    exact = make(modern=tuple(MODERN), head_size=5)
    problem = rounded(exact, dtype)
    for name, array in problem.feature_arrays().items():
        before = exact.feature_arrays()[name]
        assert array.dtype == before.dtype
        np.testing.assert_array_equal(array, problem.format.round(before))
    assert problem.soft_cap == exact.soft_cap
    assert problem.norm.epsilon == exact.norm.epsilon


@deterministic
@given(st.data())
def test_positions_and_rules_are_those_of_the_words(data):
    """`tests/problems.py` asks for one pair at a time, in other words."""
    batch, queries, keys = (data.draw(st.integers(1, most)) for most in (2, 5, 6))
    problem = make(
        batch=batch,
        query_length=queries,
        key_length=keys,
        heads=1,
        kv_heads=1,
        causal=data.draw(st.sampled_from([None, "top-left", "bottom-right"])),
    )

    def numbers(most, *size):
        values = st.lists(st.integers(0, most), min_size=1, max_size=1)
        drawn = [data.draw(values)[0] for _ in range(int(np.prod(size)))]
        return np.array(drawn, dtype=np.int64).reshape(size)

    if data.draw(st.booleans()):
        problem = problem.replace(key_lengths=numbers(keys, batch))
    if data.draw(st.booleans()):
        problem = problem.replace(query_lengths=numbers(queries, batch))
    if data.draw(st.booleans()):
        segments = Segments(query=numbers(2, batch, queries), key=numbers(2, batch, keys))
        problem = problem.replace(segments=segments)
    if data.draw(st.integers(0, 3)) == 0:
        positions = Positions(query=numbers(6, batch, queries), key=numbers(6, batch, keys))
        problem = problem.replace(positions=positions)
    sides = st.none() | st.integers(0, 3)
    problem = problem.replace(window=(data.draw(sides), data.draw(sides)))
    for side, stands in (
        ("query", problem.position_of_queries),
        ("key", problem.position_of_keys),
    ):
        assert stands.shape == (batch, getattr(problem.shape, f"{side}_length"))
        for entry, token in np.ndindex(stands.shape):
            assert stands[entry, token] == position_of(problem, side, entry, token)
    np.testing.assert_array_equal(problem.allowed_in_full(), visible(problem))


def test_rules_that_no_entry_or_head_changes_stay_small():
    assert make(causal="bottom-right").replace(window=(1, 0)).allowed.shape == (1, 1, 3, 5)
    lengths = make().replace(key_lengths=np.array([2, 5]))
    assert lengths.allowed.shape == (2, 1, 1, 5)
    assert lengths.allowed[:, 0, 0].tolist() == [[1, 1, 0, 0, 0], [1] * 5]


# Replacing parts.


def test_inputs_that_share_an_array_follow():
    fresh = np.ones((2, 5, 4))
    changed = make(**SELF).with_inputs(query=fresh)
    assert changed.query is changed.key is changed.value is fresh
    before = make(**MEMORY)
    changed = before.with_inputs(key=fresh)
    assert changed.key is changed.value is fresh
    assert changed.query is before.query
    apart = make()
    changed = apart.with_inputs(key=np.zeros((2, 5, 4)))
    assert (changed.query, changed.value) == (apart.query, apart.value)


@pytest.mark.parametrize(
    ("sharing", "names"), [(SELF, ["key", "value"]), (MEMORY, ["value"]), ({}, ["mask"])]
)
def test_inputs_that_share_another_array_cannot_be_replaced(sharing, names):
    for name in names:
        with pytest.raises(WrongShape, match=f"{name}'] share another array"):
            make(**sharing).with_inputs(**{name: np.zeros((2, 5, 4))})


def test_a_changed_copy_leaves_the_problem_alone():
    problem = make(**MEMORY)
    fresh = np.zeros_like(problem.weights.query)
    changed = problem.with_weights(query=fresh).replace(scale=2.0)
    assert changed.weights.query is fresh
    assert changed.weights.key is problem.weights.key
    assert (changed.scale, problem.scale) == (2.0, None)
    assert problem.weights.query.any()


# Masks.


@pytest.mark.parametrize("alignment", ["top-left", "bottom-right"])
@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (5, 3), (4, 4), (1, 5), (5, 1)])
def test_causal_flag_as_the_definition_words_it(alignment, queries, keys):
    sizes = shape(query_length=queries, key_length=keys)
    offset = 0 if alignment == "top-left" else keys - queries
    want = [[j <= i + offset for j in range(keys)] for i in range(queries)]
    got = causal_mask(sizes, alignment)
    assert got.shape == (1, 1, queries, keys)
    assert got.dtype == np.bool_
    assert got[0, 0].tolist() == want


def test_bottom_right_lets_the_last_query_see_everything_and_top_left_the_first_key_only():
    sizes = shape(query_length=3, key_length=5)
    assert causal_mask(sizes, "bottom-right")[0, 0, -1].all()
    assert causal_mask(sizes, "top-left")[0, 0, 0].tolist() == [True] + [False] * 4


def test_allowed_is_mask_and_flag():
    mask = np.random.default_rng(0).random((2, 1, 1, 5)) < 0.5
    assert make().allowed is None
    assert make(mask=mask).allowed is mask
    flag = make(causal="top-left")
    np.testing.assert_array_equal(flag.allowed, causal_mask(flag.shape, "top-left"))
    both = make(mask=mask, causal="top-left")
    np.testing.assert_array_equal(both.allowed, mask & flag.allowed)
    for problem in (make(), flag, both):
        assert problem.allowed_in_full().shape == FULL
        assert problem.allowed_in_full().dtype == np.bool_
    assert make().allowed_in_full().all()
    # What is the same for all heads is never repeated in memory.
    assert both.allowed.shape[1] == 1
    assert both.allowed_in_full().strides[1] == 0


def test_true_means_may_attend():
    mask = np.arange(5) < 2
    weights = solve(make(mask=mask[None, None, None])).weights
    assert (weights[..., :2] > 0).all()
    assert (weights[..., 2:] == 0).all()


def test_what_is_blocked_has_the_shape_of_the_weights():
    """Of weights averaged over heads, only what no head may attend to is blocked."""
    mask = np.random.default_rng(0).random((1, 4, 3, 5)) < 0.5
    problem = make(mask=mask)
    allowed = problem.allowed_in_full()
    np.testing.assert_array_equal(problem.blocked_for(np.zeros(allowed.shape)), ~allowed)
    averaged = problem.blocked_for(np.zeros(allowed.shape)[:, 0])
    np.testing.assert_array_equal(averaged, ~allowed.any(axis=1))
    assert averaged.any() != averaged.all()


# Answer.


def test_an_answer_lists_what_it_has_by_the_names_of_expectations():
    answer = solve(make(attn_bias=FULL))
    arrays = answer.arrays()
    assert list(arrays)[:2] == ["output", "weights"]
    assert arrays["gradient.weights.query"] is answer.gradients["weights.query"]
    assert arrays["gradient.attn_bias"].shape == FULL
    assert list(Answer(answer.output).arrays()) == ["output"]


def test_gradients_go_by_the_distinct_inputs():
    for sharing in ({}, MEMORY, SELF):
        problem: Problem = make(**sharing)
        names = {name for name in solve(problem).gradients if "." not in name}
        assert names == set(problem.shape.distinct_inputs())
