"""The reference against four ways of computing that owe it nothing.

Scalar loops in float64 (forward), the same loops and their differences in 50 digits, complex steps
through small matrices (every gradient), and the autodiff of torch and of JAX.
"""

from __future__ import annotations

from functools import lru_cache

import mpmath
import numpy as np
import pytest
from problems import (
    BIAS_SHAPES,
    FEATURES,
    FULL,
    MEMORY,
    SCORES,
    SELF,
    TINY,
    by_loops,
    by_torch,
    emptied,
    gradients_by_complex_steps,
    in_framework,
    leaves,
    make,
    scale_of,
    visible,
)

from conformance.definition.expectation import expect, solve
from conformance.records.numbers import LIMIT, ratios

ROUNDING = 1e-15  # of the forward pass: sums of a handful of products
GRADIENT_ROUNDING = 5e-14  # with logits of some ten, whose rounding the softmax multiplies


def featured(name, score):
    return make(score=score, **FEATURES[name])


def assert_close(got, want, tolerance):
    """Every array within the tolerance, relative to its largest element or to 1."""
    assert got.keys() == want.keys()
    for name, array in got.items():
        assert array.shape == want[name].shape, name
        scale = max(1.0, np.abs(want[name]).max(initial=0.0))
        error = np.abs(array - want[name]).max(initial=0.0) / scale
        assert error <= tolerance, f"{name} is off by {error:.1e}"


def named(gradients):
    return {f"gradient.{name}": array for name, array in gradients.items()}


# Scalar loops: the forward pass.


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", FEATURES)
def test_forward_is_that_of_scalar_loops(name, score):
    problem = featured(name, score)
    output, weights = by_loops(problem, leaves(problem))
    answer = solve(problem)
    assert_close(
        {"output": answer.output, "weights": answer.weights},
        {"output": output, "weights": weights},
        ROUNDING,
    )


@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_forward_with_every_broadcast_of_bias_and_mask_is_that_of_scalar_loops(shape):
    for problem in (make(attn_bias=shape), make(mask=shape, attn_bias=FULL)):
        output, weights = by_loops(problem, leaves(problem))
        answer = solve(problem)
        assert_close({"o": answer.output}, {"o": output}, ROUNDING)
        assert_close({"w": answer.weights}, {"w": weights}, ROUNDING)


# Fifty digits: forward and gradients.

IN_FIFTY_DIGITS = {
    "plain": {},
    "value head": {"value_head_size": 3, "bias": False},
    "gqa": {"heads": 4, "kv_heads": 2, "batch": 1},
    "self": {**SELF, "query_length": 3, "query_width": 3, "value_width": 3},
    "large logits": {"gain": 10.0},
    "all at once": {
        **MEMORY,
        "value_width": 3,
        "kv_heads": 1,
        "mask": emptied((2, 2, 2, 3)),
        "attn_bias": (1, 2, 2, 3),
        "causal": "bottom-right",
        "scale": 0.4,
        "bias": False,
    },
}


def truth(problem):
    """Output, weights and gradients in 50 digits; central differences with a step of 1e-20."""
    with mpmath.workdps(50):
        number, step = mpmath.mpf, mpmath.mpf(10) ** -20
        leaf = {
            name: np.vectorize(number, otypes=[object])(array)
            for name, array in leaves(problem).items()
        }

        def loss():
            output, _ = by_loops(problem, leaf, number, mpmath.exp, mpmath.tanh)
            return (output * problem.cotangent).sum()

        output, weights = by_loops(problem, leaf, number, mpmath.exp, mpmath.tanh)
        found = {"output": output, "weights": weights}
        for name, array in leaf.items():
            gradient = found[f"gradient.{name}"] = np.zeros(array.shape, dtype=object)
            for index in np.ndindex(array.shape):
                before = array[index]
                array[index] = before + step
                above = loss()
                array[index] = before - step
                gradient[index] = (above - loss()) / (2 * step)
                array[index] = before
    return found


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", IN_FIFTY_DIGITS)
def test_everything_is_that_of_fifty_digits(name, score):
    problem = make(TINY, score=score, **IN_FIFTY_DIGITS[name])
    want, expectation = truth(problem), expect(problem)
    got = expectation.arrays
    assert_close(got, {name: array.astype(float) for name, array in want.items()}, 1e-14)
    with mpmath.workdps(50):
        # Small weights have all their digits too, and float64's σ knows float64's own error.
        for have, exact in zip(got["weights"].flat, want["weights"].flat, strict=True):
            assert abs(have - exact) <= 1e-14 * exact
        error = {name: (got[name] - array).astype(float) for name, array in want.items()}
    for name, difference in error.items():
        zero, noise = np.zeros(difference.shape), expectation.loosest[name]
        assert np.abs(ratios(difference, zero, noise, expectation.underflow)).max() <= LIMIT, name


# Complex steps: every gradient.


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", FEATURES)
def test_gradients_are_those_of_complex_steps(name, score):
    problem = featured(name, score)
    got, want = solve(problem).gradients, gradients_by_complex_steps(problem)
    assert_close(named(got), named(want), GRADIENT_ROUNDING)


@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_gradient_of_a_broadcast_bias_is_that_of_complex_steps(shape):
    problem = make(
        TINY | {"heads": 4, "kv_heads": 4, "query_length": 3, "key_length": 5},
        attn_bias=shape,
        mask=emptied(FULL),
    )
    got, want = solve(problem).gradients, gradients_by_complex_steps(problem)
    assert got["attn_bias"].shape == shape
    assert_close(named(got), named(want), GRADIENT_ROUNDING)


# Two frameworks' autodiff.


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", FEATURES)
def test_everything_is_that_of_torch(name, score):
    pytest.importorskip("torch")
    problem = featured(name, score)
    assert_close(solve(problem).arrays(), by_torch(problem), GRADIENT_ROUNDING)


# Few, because JAX compiles each: five differ in arguments only and share one program per score.
IN_JAX = ["plain", "fully masked rows", "mask per head", "top-left", "bottom-right"]
IN_JAX += ["all at once", "self", "bias and mask"]


@lru_cache(maxsize=1)
def jax_program():
    """Output, weights and the vector-Jacobian product, compiled once per shape and scale."""
    import jax

    def run(shape, scale, leaf, allowed, cotangent):
        def output(leaf):
            stop = jax.lax.stop_gradient
            return in_framework(jax.numpy, stop, shape, scale, leaf, allowed)

        found, back, weights = jax.vjp(output, leaf, has_aux=True)
        return {"output": found, "weights": weights, **named(back(cotangent)[0])}

    return jax.jit(run, static_argnums=(0, 1))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", IN_JAX)
def test_everything_is_that_of_jax(name, score):
    jax = pytest.importorskip("jax")
    problem = featured(name, score)
    with jax.enable_x64(True):
        found = jax_program()(
            problem.shape,
            scale_of(problem),
            leaves(problem),
            visible(problem),
            problem.cotangent,
        )
        assert found["output"].dtype == np.float64
        found = {name: np.asarray(array) for name, array in found.items()}
    assert_close(solve(problem).arrays(), found, GRADIENT_ROUNDING)


# Rows that may attend no key.


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", ["fully masked rows", "bottom-right, more queries"])
def test_a_query_that_may_attend_nothing_gets_the_output_bias_and_gives_no_gradient(name, score):
    problem = featured(name, score)
    answer, rows = solve(problem), ~visible(problem).any(axis=3)
    empty = rows.all(axis=1)
    assert empty.any()
    assert (answer.weights[rows] == 0).all()
    assert (answer.output[empty] == problem.weights.output_bias).all()
    assert (answer.gradients["query"][empty] == 0).all()
    assert all(np.isfinite(array).all() for array in answer.arrays().values())


def test_without_an_output_bias_a_query_that_may_attend_nothing_gets_zeros():
    problem = make(mask=emptied(FULL), bias=False)
    assert (solve(problem).output[0, 1] == 0).all()


def test_a_query_that_may_attend_nothing_leaves_the_others_alone():
    mask = emptied(FULL)
    others = mask.any(axis=3).all(axis=1)
    emptied_, full = (solve(make(mask=m)) for m in (mask, mask | ~mask.any(axis=3, keepdims=True)))
    for name in ("output", "gradient.query"):
        one, other = emptied_.arrays()[name], full.arrays()[name]
        np.testing.assert_array_equal(one[others], other[others])
        assert not np.array_equal(one, other)


def test_a_bias_of_minus_infinity_is_a_mask():
    """In the answer and in every gradient, also where it empties rows."""
    mask = emptied(FULL)
    masked = make(mask=mask, attn_bias=np.zeros(FULL))
    biased = masked.replace(mask=None, attn_bias=np.where(mask, 0.0, -np.inf))
    want = solve(masked).arrays()
    for name, array in solve(biased).arrays().items():
        np.testing.assert_array_equal(array, want[name], err_msg=name)


@pytest.mark.parametrize("size", ["batch", "query_length", "key_length"])
def test_sizes_may_be_zero(size):
    problem = make(**{size: 0})
    answer = solve(problem)
    assert answer.output.shape == problem.cotangent.shape
    assert (answer.output == problem.weights.output_bias).all()
    assert {name: g.shape for name, g in answer.gradients.items()} == {
        name: array.shape for name, array in leaves(problem).items()
    }


@pytest.mark.parametrize("sharing", [SELF, MEMORY], ids=["self", "memory"])
@pytest.mark.parametrize("score", SCORES)
def test_a_shared_input_gets_the_sum_of_the_gradients_of_its_roles(sharing, score):
    shared = make(score=score, **sharing)
    apart = make(score=score, **{**sharing, "sharing": "separate"})
    apart = apart.replace(query=shared.query, key=shared.key, value=shared.value)
    apart = apart.replace(weights=shared.weights, cotangent=shared.cotangent)
    got, want = solve(shared).gradients, solve(apart).gradients
    roles = ("query", "key", "value") if sharing is SELF else ("key", "value")
    total = sum(want[role] for role in roles)
    np.testing.assert_allclose(got[roles[0]], total, rtol=0, atol=1e-13)
    assert set(want) - set(got) == set(roles[1:])
