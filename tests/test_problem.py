"""The definition's data: what fits together, what is refused, and what a mask means."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import FULL, MEMORY, SELF, SIZES, make

from conformance.definition.dtypes import BFLOAT16
from conformance.definition.expectation import solve
from conformance.definition.problem import (
    WEIGHT_NAMES,
    Answer,
    Problem,
    Shape,
    causal_mask,
    check_broadcastable,
    check_shape,
)
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


def test_true_means_may_attend():
    mask = np.arange(5) < 2
    weights = solve(make(mask=mask[None, None, None])).weights
    assert (weights[..., :2] > 0).all()
    assert (weights[..., 2:] == 0).all()


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
