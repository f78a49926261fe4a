"""σ is the size of honest rounding: zero where there is none, and no larger than it has to be.

Honest arithmetic of every dtype stays within the limit and is not far below σ; coarser arithmetic
and small mistakes lie far beyond the limit.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from problems import FULL, by_torch, emptied, make, scale_of

from conformance.cases.catalogue import catalogue, find_cases
from conformance.definition.arithmetic import CLASSES, SAMPLES, Exact, Noisy, classes_of
from conformance.definition.attention import backward, forward
from conformance.definition.comparison import accuracy_class
from conformance.definition.dtypes import BFLOAT16, DTYPES, FLOAT32, DType
from conformance.definition.expectation import expect
from conformance.definition.problem import Answer
from conformance.records.numbers import LIMIT, ratios

TF32 = DType("tf32", 11, 2.0**-126, 2.0**-24)
CLASS_NAMES = [item.name for item in CLASSES]
HALF = ["bfloat16", "float16"]

ORDINARY = [
    "plain/no-mask/self",
    "plain/no-mask/cross",
    "mask/per-batch/separate",
    "mask/key-padding/value-head",
    "plain/no-mask/gqa",
    "mask/per-head/mqa",
    "plain/no-mask/additive",
    "plain/no-mask/long",
    "mask/key-padding/cross",
    "mask/per-head/self",
    "mask/sliding-window/separate",
    "causal/bottom-right/gqa",
    "causal/square/mqa",
    "bias/in-full/cross",
    "bias/per-head/self",
    "values/outliers/cross",
    "values/small/long",
    "logits/large/self",
]
SCALED_DOT = [name for name in ORDINARY if not name.endswith("additive")]


def problem_of(case_id, dtype="float32"):
    (case,) = find_cases(case_id)
    return case.problem(dtype)


def sizes(expectation, arrays, accuracy=None):
    """|error| / σ of every array; σ of the least accurate class unless another is named."""
    noise = expectation.noise[accuracy] if accuracy else expectation.loosest
    return {
        name: np.abs(ratios(got, expectation.arrays[name], noise[name], expectation.underflow))
        for name, got in arrays.items()
    }


def worst(found):
    return max(array.max() for array in found.values())


def rms(array):
    return float(np.sqrt(np.mean(np.square(array))))


# Where there is nothing to round.


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_blocked_keys_are_exact(dtype):
    problem = make(dtype=dtype, mask=emptied(FULL), causal="bottom-right")
    allowed = problem.allowed_in_full()
    for noise in expect(problem).noise.values():
        np.testing.assert_array_equal(noise["weights"] == 0, ~allowed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_key_that_nobody_sees_are_exact(dtype):
    problem = problem_of("mask/key-padding/separate", dtype)
    unseen = ~problem.allowed_in_full().any(axis=(1, 2))
    assert unseen.any()
    for noise in expect(problem).noise.values():
        for name in ("gradient.key", "gradient.value"):
            np.testing.assert_array_equal((noise[name] == 0).all(axis=-1), unseen)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_blocked_bias_and_of_a_query_without_keys_are_exact(dtype):
    problem = make(dtype=dtype, mask=emptied(FULL), attn_bias=FULL)
    blocked = ~problem.allowed_in_full()
    for noise in expect(problem).noise.values():
        assert (noise["gradient.attn_bias"][blocked] == 0).all()
        assert (noise["gradient.attn_bias"][~blocked] > 0).all()
        assert (noise["gradient.query"][0, 1] == 0).all()
        assert (noise["gradient.query"][1] > 0).all()


def test_an_exact_element_has_to_be_exact():
    problem = make(dtype="float32", mask=emptied(FULL))
    expectation = expect(problem)
    weights = expectation.arrays["weights"].copy()
    weights[0, 0, 1, 0] = 1e-30
    assert sizes(expectation, {"weights": weights})["weights"].max() == math.inf


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_is_never_below_the_final_rounding(dtype):
    expectation = expect(problem_of("mask/per-batch/separate", dtype))
    roundoff = DTYPES[dtype].roundoff
    for noise in expectation.noise.values():
        for name, array in expectation.arrays.items():
            floor = roundoff * np.abs(array) / math.sqrt(3) * (1 - 1e-12)
            assert (noise[name] >= floor).all()


# Same problem, same σ; coarser dtype or class, larger σ.


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_problem_has_the_same_noise(dtype):
    one, other = (expect(problem_of("bias/with-mask/cross", dtype)) for _ in range(2))
    for name, noise in one.noise.items():
        for array in noise:
            np.testing.assert_array_equal(noise[array], other.noise[name][array])


@pytest.mark.parametrize(
    ("fine", "coarse", "factor", "least"),
    [
        # The noisy evaluation is done in float64, whose own rounding adds to the noise there.
        ("float64", "float32", 2.0**29, 0.7),
        ("float16", "bfloat16", 2.0**3, 0.9),
    ],
)
def test_noise_grows_with_the_roundoff(fine, coarse, factor, least):
    growth = {}
    for case_id in ORDINARY:
        small, large = (expect(problem_of(case_id, dtype)).loosest for dtype in (fine, coarse))
        for name, noise in large.items():
            growth[case_id, name] = rms(noise) / rms(small[name]) / factor
    # A few samples know σ of one array to some 30 %, all arrays together far better.
    assert all(1 / 4 < factor < 4 for factor in growth.values())
    assert least < np.exp(np.mean(np.log(list(growth.values())))) < 1.1


def test_float32_and_float64_have_one_class_and_half_precision_has_four():
    for name, dtype in DTYPES.items():
        wanted = CLASS_NAMES if name in HALF else ["A0"]
        assert [item.name for item in classes_of(dtype)] == wanted
        assert list(expect(problem_of("plain/no-mask/self", name)).noise) == wanted


@pytest.mark.parametrize("dtype", HALF)
def test_a_less_accurate_class_has_more_noise(dtype):
    pooled = dict.fromkeys(CLASS_NAMES, 0.0)
    for case_id in ORDINARY:
        noise = expect(problem_of(case_id, dtype)).noise
        for name, loosest in noise["C"].items():
            figures = [rms(arrays[name]) / rms(loosest) for arrays in noise.values()]
            for accuracy, figure in zip(CLASS_NAMES, figures, strict=True):
                pooled[accuracy] += figure
            for accurate, less in pairwise(figures):  # of which one outlier may decide
                assert accurate <= 1.6 * less, (case_id, name)
    for accurate, less in pairwise(pooled.values()):
        assert accurate < 0.97 * less, pooled


# Honest arithmetic is within the limit, and not far inside it.


@pytest.mark.parametrize("case_id", ORDINARY)
def test_plain_float32_of_torch_is_honest(case_id):
    pytest.importorskip("torch")
    problem = problem_of(case_id)
    found = sizes(expect(problem), by_torch(problem))
    assert worst(found) < LIMIT
    for name, array in found.items():
        assert 0.05 < rms(array) < 2, name


@pytest.mark.parametrize("case_id", SCALED_DOT)
def test_plain_float32_of_numpy_is_honest(case_id):
    problem = problem_of(case_id)
    found = sizes(expect(problem), simulated(problem))
    assert worst(found) < LIMIT
    for name, array in found.items():
        assert 0.05 < rms(array) < 2, name


@pytest.mark.parametrize("dtype", ["float64", *HALF])
@pytest.mark.parametrize("case_id", ORDINARY)
def test_torch_in_every_dtype_is_honest(case_id, dtype):
    pytest.importorskip("torch")
    problem = problem_of(case_id, dtype)
    found = sizes(expect(problem), by_torch(problem))
    assert worst(found) < LIMIT
    assert all(0.02 < rms(array) < 2 for array in found.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_as_large_as_modelled_is_no_false_alarm(dtype):
    """More samples of the noise are answers of implementations that round as badly as they may.

    An element that dominates its row has a σ that rests on SAMPLES draws alone: with too few, the
    tail of Student's distribution is no match for a limit of 8.
    """
    elements = beyond = 0
    for case in catalogue():
        problem = case.problem(dtype)
        expectation, noisy = expect(problem), Noisy(problem.format, seed=12345)
        found = forward(problem, noisy)
        samples = Answer(found.output, found.weights, backward(problem, found, noisy)).arrays()
        # The last SAMPLES are those of the least accurate class.
        answers = {name: problem.format.round(a[-SAMPLES:]) for name, a in samples.items()}
        for array in sizes(expectation, answers).values():
            elements += array.size
            beyond += int((array > LIMIT).sum())
    assert elements > 1e6
    assert beyond <= 2e-6 * elements


def long_sum(dtype):
    """A problem whose context sums 257 terms of one sign, where partial sums are large."""
    problem = make(dtype=dtype, key_length=257, batch=3, query_length=8)
    positive = {name: np.abs(getattr(problem.weights, name)) for name in ("value", "value_bias")}
    flat = problem.with_weights(query=problem.weights.query / 4, **positive)
    return flat.with_inputs(value=np.abs(problem.value))


def added_one_by_one(problem, partial):
    """The output, if `partial` is the format of the running sum over the keys."""
    exact = forward(problem, Exact())
    context = np.zeros(exact.context.shape)
    for key in range(problem.shape.key_length):
        term = partial.round(exact.weights[..., key, None] * exact.v[:, :, key, None])
        context = partial.round(context + term)
    output = np.einsum("bhqd,hde->bqe", context, problem.weights.output)
    return {"output": problem.format.round(output + problem.weights.output_bias)}


def test_a_sum_one_after_the_other_in_float32_is_honest():
    problem = long_sum("float32")
    (found,) = sizes(expect(problem), added_one_by_one(problem, FLOAT32)).values()
    assert found.max() < LIMIT
    assert 0.05 < rms(found) < 2


@pytest.mark.parametrize("dtype", HALF)
def test_a_sum_one_after_the_other_in_half_precision_is_class_c(dtype):
    problem = long_sum(dtype)
    expectation = expect(problem)
    found = added_one_by_one(problem, problem.format)
    assert accuracy_class(expectation, found) == "C"
    assert 0.05 < rms(sizes(expectation, found)["output"]) < 2
    assert accuracy_class(expectation, added_one_by_one(problem, FLOAT32)) in ("A0", "A")


# Coarser arithmetic and small mistakes are beyond it.


def cubic(values):
    """exp by a cubic polynomial after the usual reduction: 3 digits."""
    power = np.rint(values / math.log(2))
    rest = values - power * math.log(2)
    return np.ldexp(1 + rest + rest**2 / 2 + rest**3 / 6, power.astype(int))


def simulated(problem, *, products=FLOAT32, softmax=FLOAT32, exp=np.exp, factor=1.0):
    """Output and weights of a scaled dot product that rounds everything to float32, or worse.

    `products` is the format of what goes into a matrix product, `softmax` that of the weights.
    """
    r, shape, w = FLOAT32.round, problem.shape, problem.weights

    def product(axes, left, right):
        return r(np.einsum(axes, products.round(left), products.round(right)))

    def project(name, values):
        found = product("ble,ehd->bhld", values, getattr(w, name))
        bias = getattr(w, f"{name}_bias")
        found = found if bias is None else r(found + bias[:, None])
        return np.repeat(found, shape.heads // found.shape[1], axis=1)

    q, k, v = (project(name, getattr(problem, name)) for name in ("query", "key", "value"))
    logits = r(product("bhqd,bhkd->bhqk", q, k) * r(factor * scale_of(problem)))
    if problem.attn_bias is not None:
        logits = r(logits + problem.attn_bias)
    allowed = problem.allowed_in_full()
    peak = np.where(allowed, logits, -np.inf).max(axis=-1, keepdims=True)
    shifted = r(logits - peak)
    powers = np.where(allowed, softmax.round(exp(np.where(allowed, shifted, 0.0))), 0.0)
    weights = softmax.round(powers / r(powers.sum(axis=-1, keepdims=True)))
    output = product("bhqd,hde->bqe", product("bhqk,bhkd->bhqd", weights, v), w.output)
    output = output if w.output_bias is None else r(output + w.output_bias)
    return {"output": output, "weights": weights}


@pytest.mark.parametrize("case_id", SCALED_DOT)
@pytest.mark.parametrize(
    "coarse",
    [{"products": TF32}, {"softmax": BFLOAT16}, {"exp": cubic}, {"factor": 1.01}],
    ids=["TF32", "bfloat16 softmax", "cubic exp", "scale 1 % off"],
)
def test_coarser_float32_is_far_beyond_the_limit(case_id, coarse):
    problem = problem_of(case_id)
    found = sizes(expect(problem), simulated(problem, **coarse))
    assert found["output"].max() > 20 * LIMIT, "the output alone should tell"
    assert found["weights"].max() > 20 * LIMIT


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("family", ["self", "cross", "gqa"])
def test_rounding_logits_far_from_zero_is_class_b_and_not_class_a(family, dtype):
    """A constant in every logit changes no weight, but a logit near 32 has few digits left.

    Without the constant, A and B differ little here: rounding the projected queries and keys,
    which both do, moves a logit about as much as rounding the logit does.
    """
    pytest.importorskip("torch")
    problem = problem_of(f"bias/in-full/{family}", dtype)
    expectation = expect(problem)
    assert accuracy_class(expectation, by_torch(problem)) in ("A", "B")

    far = problem.replace(attn_bias=problem.format.round(problem.attn_bias + 32.0))
    expectation = expect(far)
    naive = by_torch(far)
    assert accuracy_class(expectation, naive) == "B"
    assert worst(sizes(expectation, naive, "A")) > 2 * LIMIT


@pytest.mark.parametrize("dtype", HALF)
def test_the_exact_answer_rounded_once_is_class_a0(dtype):
    problem = problem_of("mask/per-batch/separate", dtype)
    expectation = expect(problem)
    rounded = {name: problem.format.round(a) for name, a in expectation.arrays.items()}
    assert accuracy_class(expectation, rounded) == "A0"


def test_a_wrong_answer_is_in_no_class():
    expectation = expect(problem_of("mask/per-batch/separate", "bfloat16"))
    doubled = {name: 2 * array for name, array in expectation.arrays.items()}
    assert accuracy_class(expectation, doubled) == ""
