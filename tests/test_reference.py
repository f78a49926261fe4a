"""The reference against four ways of computing that owe it nothing.

Scalar loops in float64 (forward), the same loops and their differences in 50 digits, complex steps
through small matrices (every gradient), and the autodiff of torch and of JAX.
"""

from __future__ import annotations

import math
import re
import tracemalloc
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path

import mpmath
import numpy as np
import pytest
from problems import (
    BIAS_SHAPES,
    FEATURES,
    FULL,
    MEMORY,
    MODERN,
    SCALED,
    SCORES,
    SELF,
    TINY,
    WIDE,
    Numbers,
    by_loops,
    by_torch,
    emptied,
    given,
    gradients_by_complex_steps,
    in_framework,
    leaves,
    make,
    visible,
)

from conformance.cases.catalogue import case_of, large_cases
from conformance.definition import arithmetic, attention, expectation
from conformance.definition.arithmetic import Noisy
from conformance.definition.dtypes import dtype_of
from conformance.definition.expectation import expect, solve
from conformance.definition.problem import Positions, Segments
from conformance.definition.rotary import RotaryScaling
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


# Positions near 250 are left out: float64 has no digits of their angles to spare.
IN_FIFTY_DIGITS |= {
    "modern": {
        "modern": ("norm", "rotary", "cap", "slopes", "left window", "lengths", "segments"),
        "head_size": 4,
        "bias": False,
    },
    "interleaved": {
        "modern": ("interleaved", "sinks", "bottom-right"),
        "head_size": 3,
        "bias": False,
    },
    **{name: {"modern": (name,), "head_size": 4, "key_length": 4, "batch": 1} for name in SCALED},
    "in a span": {"modern": ("spans", "bottom-right"), "head_size": 3, "key_length": 4},
    "saturated": {"modern": ("norm", "cap", "sinks"), "head_size": 4, "gain": 10.0, "scale": 3.0},
}
SINKS_IN_FIFTY_DIGITS = np.array([12.0, -0.5])
"""The first is larger than all logits, the second is among them."""


def truth(problem):
    """Output, weights, their sums, and gradients by differences with a step of 1e-20: 50 digits."""
    with mpmath.workdps(50):
        number, step = mpmath.mpf, mpmath.mpf(10) ** -20
        leaf = {
            name: np.vectorize(number, otypes=[object])(array)
            for name, array in leaves(problem).items()
        }

        def loss():
            output, _ = by_loops(problem, leaf, number, mpmath)
            return (output * problem.cotangent).sum()

        output, weights = by_loops(problem, leaf, number, mpmath)
        found = {"output": output, "weights": weights, expectation.ROW_SUMS: weights.sum(axis=-1)}
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


@pytest.mark.sample(24)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", IN_FIFTY_DIGITS)
def test_everything_is_that_of_fifty_digits(name, score):
    problem = make(TINY, score=score, **IN_FIFTY_DIGITS[name])
    if problem.sinks is not None:
        problem = problem.replace(sinks=SINKS_IN_FIFTY_DIGITS)
    want, expected = truth(problem), expect(problem)
    got = expected.arrays
    assert_close(got, {name: array.astype(float) for name, array in want.items()}, 1e-14)
    with mpmath.workdps(50):
        # Small weights have all their digits too, and float64's σ knows float64's own error.
        for have, exact in zip(got["weights"].flat, want["weights"].flat, strict=True):
            assert abs(have - exact) <= 1e-14 * exact
        error = {name: (got[name] - array).astype(float) for name, array in want.items()}
    for name, difference in error.items():
        zero, noise = np.zeros(difference.shape), expected.sigma[name]
        assert np.abs(ratios(difference, zero, noise, expected.underflow)).max() <= LIMIT, name


# Complex steps: every gradient.


@pytest.mark.sample(12)
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
IN_JAX += ["all at once", "self", "bias and mask", "modern, all at once"]


@lru_cache(maxsize=1)
def jax_program():
    """Output, weights and the vector-Jacobian product, compiled once per shape and numbers."""
    import jax

    def run(numbers, leaf, allowed, arrays, cotangent):
        def output(leaf):
            return in_framework(jax.numpy, jax.lax.stop_gradient, numbers, leaf, allowed, arrays)

        found, back, weights = jax.vjp(output, leaf, has_aux=True)
        return {"output": found, "weights": weights, **named(back(cotangent)[0])}

    return jax.jit(run, static_argnums=0)


def by_jax(problem):
    """Sinks, slopes and rotations are always there, so that few programs are compiled."""
    jax = pytest.importorskip("jax")
    leaf, arrays = leaves(problem), given(problem)
    if problem.features:
        shape = problem.shape
        arrays.setdefault("alibi", np.zeros(shape.logits))
        for side, length in (("query", shape.query_length), ("key", shape.key_length)):
            still = np.eye(shape.head_size)[None, None].repeat(shape.batch, 0).repeat(length, 1)
            arrays.setdefault(side, still)
        leaf.setdefault("sinks", np.full(shape.heads, -np.inf))
    with jax.enable_x64(True):
        found = jax_program()(
            Numbers.of(problem), leaf, visible(problem), arrays, problem.cotangent
        )
        assert found["output"].dtype == np.float64
        wanted = {f"gradient.{name}" for name in leaves(problem)} | {"output", "weights"}
        return {name: np.asarray(array) for name, array in found.items() if name in wanted}


@pytest.mark.sample(16)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", IN_JAX)
def test_everything_is_that_of_jax(name, score):
    problem = featured(name, score)
    assert_close(solve(problem).arrays(), by_jax(problem), GRADIENT_ROUNDING)


# Features of today, in pairs.

PAIRS = [
    pair
    for pair in combinations(MODERN, 2)
    if set(pair) not in ({"rotary", "interleaved"}, {"window", "left window"})
    and set(pair) not in ({"rotary", "scaled"}, {"interleaved", "scaled"})
]


@pytest.mark.sample(60)
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_features_in_pairs_are_those_of_loops_torch_and_jax(pair):
    problem = make(modern=pair, attn_bias=(1, 4, 3, 5), **WIDE)
    answer = solve(problem)
    output, weights = by_loops(problem, leaves(problem))
    found = {"output": answer.output, "weights": answer.weights}
    assert_close(found, {"output": output, "weights": weights}, ROUNDING)
    for other in (by_torch, by_jax):
        pytest.importorskip(other.__name__.removeprefix("by_"))
        assert_close(answer.arrays(), other(problem), GRADIENT_ROUNDING)


# Features that are there, and change nothing, or what follows from them.


NOTHING = {
    "window": {"window": (4, 4)},
    "cap": {"soft_cap": 1e12},
    "sinks": {"sinks": np.full(4, -np.inf)},
    "slopes": {"slopes": np.zeros(4)},
    "scaling": {"rotary_scaling": RotaryScaling(rope_type="linear", factor=3.0)},
    "chunk": {"chunk": 5},
    "spans": {"spans": np.zeros((2, 5), int)},
    "tree": {"tree": np.tile(np.arange(-1, 2), (2, 1))},
    "lengths": {"query_lengths": np.array([3, 3]), "key_lengths": np.array([5, 5])},
    "segments": {"segments": Segments(query=np.zeros((2, 3), int), key=np.zeros((2, 5), int))},
    "positions": {
        "positions": Positions(
            query=np.tile(np.arange(2, 5), (2, 1)), key=np.tile(np.arange(5), (2, 1))
        )
    },
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_feature_that_does_nothing_changes_nothing(name):
    plain = make(causal="bottom-right", mask=emptied(FULL), attn_bias=FULL)
    without, answer = solve(plain).arrays(), solve(plain.replace(**NOTHING[name])).arrays()
    if name == "sinks":
        assert not answer.pop("gradient.sinks").any()
    assert_close(answer, without, 1e-14)
    noise = expect(plain.replace(dtype="bfloat16", **NOTHING[name])).sigma
    assert all(np.isfinite(array).all() for array in noise.values())


@pytest.mark.parametrize("name", ["rotary", "interleaved", "scaled", "slopes", "window"])
def test_only_differences_of_positions_matter(name):
    problem = make(modern=(name, "positions"), **WIDE)
    there = problem.positions
    moved = problem.replace(positions=Positions(query=there.query + 50, key=there.key + 50))
    assert_close(solve(moved).arrays(), solve(problem).arrays(), 1e-12)


def test_a_query_that_may_attend_nothing_but_the_sink_gets_the_output_bias():
    problem = make(modern=("sinks",), mask=emptied(FULL))
    answer, rows = solve(problem), ~visible(problem).any(axis=3)
    assert (answer.weights[rows] == 0).all()
    assert (answer.output[rows.all(axis=1)] == problem.weights.output_bias).all()
    assert all(np.isfinite(array).all() for array in answer.arrays().values())
    nothing = solve(problem.replace(mask=np.zeros(FULL, dtype=bool)))
    assert not nothing.gradients["sinks"].any()


def test_a_sink_beyond_all_exponents_takes_everything():
    problem = make(modern=("sinks",))
    answer = solve(problem.replace(sinks=np.array([1e4, 1e4, 1e4, 1e4])))
    assert not answer.weights.any()
    assert not answer.gradients["sinks"].any()


@pytest.mark.parametrize("causal", [None, "top-left", "bottom-right"])
def test_a_packed_batch_is_each_member_alone(causal):
    """Of lengths 2 and 3 with 4 and 3 keys: positions begin again, and gradients are apart."""
    features = ("rotary", "slopes", "left window", "cap", "sinks", "norm")
    packed = make(modern=features, batch=1, query_length=5, key_length=7, head_size=6)
    packed = packed.replace(
        causal=causal,
        segments=Segments(
            query=np.repeat([[4, 2]], [2, 3], axis=1), key=np.repeat([[4, 2]], [4, 3], axis=1)
        ),
    )
    whole, gains = solve(packed), Counter()
    for queries, keys in ((slice(0, 2), slice(0, 4)), (slice(2, 5), slice(4, 7))):
        shape = replace(packed.shape, query_length=queries.stop - queries.start)
        alone = packed.replace(
            shape=replace(shape, key_length=keys.stop - keys.start),
            segments=None,
            query=packed.query[:, queries],
            key=packed.key[:, keys],
            value=packed.value[:, keys],
            cotangent=packed.cotangent[:, queries],
        )
        answer = solve(alone)
        np.testing.assert_allclose(answer.output, whole.output[:, queries], atol=1e-13)
        for name, span in (("query", queries), ("key", keys), ("value", keys)):
            got, want = answer.gradients.pop(name), whole.gradients[name][:, span]
            np.testing.assert_allclose(got, want, atol=1e-13)
        for name, gradient in answer.gradients.items():
            gains[name] = gains[name] + gradient
    assert_close(gains, {name: whole.gradients[name] for name in gains}, 1e-13)


def test_heads_alone_keep_all_features():
    names = tuple(name for name in MODERN if name != "interleaved")
    problem = make(modern=names, attn_bias=FULL, **WIDE)
    alone = attention.heads_alone(problem)
    assert alone.features == problem.features
    whole, of_heads = solve(problem), solve(alone)
    np.testing.assert_allclose(of_heads.weights, whole.weights, atol=1e-14)
    assert {"sinks", "norm.query", "norm.key", "attn_bias"} <= of_heads.gradients.keys()
    for name in ("sinks", "norm.query", "norm.key", "attn_bias"):
        want = whole.gradients[name]
        np.testing.assert_allclose(of_heads.gradients[name], want, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("name", ["sinks", "cap", "rotary", "norm"])
def test_a_loss_on_the_weights_reaches_every_feature(name):
    torch = pytest.importorskip("torch")
    problem = make(modern=(name,), **WIDE)
    problem = problem.replace(weights_cotangent=np.random.default_rng(3).normal(size=FULL))
    leaf = {name: torch.tensor(a, requires_grad=True) for name, a in leaves(problem).items()}
    arrays = {name: torch.tensor(array) for name, array in given(problem).items()}
    found = in_framework(
        torch,
        torch.Tensor.detach,
        Numbers.of(problem),
        leaf,
        torch.tensor(visible(problem)),
        arrays,
    )
    losses = [torch.tensor(problem.cotangent), torch.tensor(problem.weights_cotangent)]
    gradients = torch.autograd.grad(found, leaf.values(), losses)
    wanted = {name: array.numpy() for name, array in zip(leaf, gradients, strict=True)}
    assert_close(solve(problem).gradients, wanted, GRADIENT_ROUNDING)


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


CONTRACTIONS = re.findall(r'"([a-z.]+,[a-z.]+->[a-z.]+)"', Path(attention.__file__).read_text())


@pytest.mark.parametrize(
    ("axes", "samples"),
    [
        (axes, samples)
        for axes in sorted(set(CONTRACTIONS))
        for samples in [(0, 0), (1, 3), (3, 3), (3, 0), (0, 3)]
        for operands in [axes.split("->")[0].split(",")]
        if all(o.startswith("...") or not n for o, n in zip(operands, samples, strict=True))
    ],
)
def test_matrix_products_contract_as_einsum_does(axes, samples, monkeypatch):
    random = np.random.default_rng(0)
    sizes = dict(zip("bhqkde", (2, 3, 9, 11, 7, 13), strict=True))
    operands = []
    for letters, count in zip(axes.split("->")[0].split(","), samples, strict=True):
        shape = [sizes[letter] for letter in letters.removeprefix("...")]
        operands.append(random.standard_normal([count, *shape] if count else shape))
    monkeypatch.setattr(arithmetic, "MOST_SUMMED", 0)
    want = np.einsum(axes, *operands)
    np.testing.assert_allclose(arithmetic.contract(axes, *operands), want, rtol=0, atol=1e-12)


def test_the_identity_as_a_projection_only_rearranges_axes():
    random = np.random.default_rng(0)
    identity = np.eye(12).reshape(12, 3, 4)
    values, heads = random.standard_normal((2, 5, 12)), random.standard_normal((2, 3, 5, 4))
    for axes, operand, weight in (
        ("bqe,ehd->bhqd", values, identity),
        ("...bhqd,ehd->...bqe", heads, identity),
        ("...bhqd,hde->...bqe", heads, identity.transpose(1, 2, 0)),
        ("...bqe,hde->...bhqd", values[None], identity.transpose(1, 2, 0)),
    ):
        got = arithmetic.projected_by_identity(axes, operand, weight)
        assert np.array_equal(got, np.einsum(axes, operand, weight)), axes


@pytest.mark.parametrize("most", [1, 5, 7, 12, 100])
def test_parts_of_the_noise_have_every_sample_of_every_class_once(most):
    noisy = Noisy(dtype_of("bfloat16"), 0)
    counted = Counter()
    for part, members in noisy.parts(most):
        drawn = part(np.ones((1, 3)), "tensor")
        assert len(drawn) <= most
        assert sum(len(drawn[those]) for those in members.values()) == len(drawn)
        counted.update({name: len(drawn[those]) for name, those in members.items()})
    wanted = zip(noisy.classes, noisy.counts, strict=True)
    assert counted == {item.name: count for item, count in wanted}


def test_sigma_is_the_same_within_its_own_noise_whatever_the_parts(monkeypatch):
    problem = case_of("plain/no-mask/cross").problem("bfloat16")
    whole = expect(problem)
    monkeypatch.setattr(expectation, "MOST_ELEMENTS", 5 * np.prod(problem.shape.logits))
    parts = expect(problem)
    for accuracy, arrays in whole.noise.items():
        for name, sigma in arrays.items():
            other = parts.noise[accuracy][name]
            assert 0.7 < np.sqrt((sigma**2).mean() / (other**2).mean()) < 1.4, (accuracy, name)


@pytest.mark.parametrize(
    ("case", "large"),
    [("plain/no-mask/cross.d64t64x64", True), ("causal/next-key-attracts/longer", False)],
)
def test_the_forward_pass_alone_has_the_same_noise(monkeypatch, case, large):
    """In parts as well, each of which draws its own; small problems cannot skip what they drew."""
    problem = case_of(case).problem("float32")
    assert expectation._is_large(problem) == large
    monkeypatch.setattr(expectation, "MOST_ELEMENTS", 5 * np.prod(problem.shape.logits))
    every, alone = expect(problem), expect(problem, gradients=False)
    assert list(alone.arrays) == ["output", "weights", expectation.ROW_SUMS]
    for name in alone.arrays:
        np.testing.assert_array_equal(alone.arrays[name], every.arrays[name])
        np.testing.assert_array_equal(alone.sigma[name], every.sigma[name])


def test_the_reference_of_the_largest_case_takes_little_memory():
    """All of level "large" is far within 2 GiB: with its noise, 500 bytes for each logit."""
    logits = {case.id: math.prod(case.shape.logits) for case in large_cases()}
    largest = max(logits, key=logits.__getitem__)
    problem = case_of(largest).problem("float32")
    tracemalloc.start()
    try:
        expect(problem)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < max(2**20, logits[largest]) * 600 < 2**31


def test_equal_rows_are_found_where_there_are_some():
    rows = np.random.default_rng(0).standard_normal((50, 3))
    assert not attention._may_repeat(rows)
    rows[7] = rows[31]
    assert attention._may_repeat(rows)
    assert attention._may_repeat(np.array([[0.0, 1.0], [-0.0, 1.0]]))


def test_projections_that_happen_to_be_the_identity_have_gradients():
    problem = case_of("plain/no-mask/cross").problem("float64")
    alone = attention.heads_alone(problem)
    assert not [name for name in solve(alone).gradients if name.startswith("weights.")]
    layer = alone.replace(heads_alone=False)
    assert {f"weights.{name}" for name in layer.weights.named()} <= solve(layer).gradients.keys()
    assert layer.digest() != alone.digest()
