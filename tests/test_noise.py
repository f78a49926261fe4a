"""σ is the size of honest rounding: zero where there is none, and no larger than it has to be.

Honest arithmetic of every dtype stays within the limit and is not far below σ; coarser arithmetic
and small mistakes lie far beyond the limit.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pages
import pytest
from mutants.honest import (
    Divided,
    Honest,
    KeyByKey,
    MergedTiles,
    Online,
    ScaledQuery,
    StoredNormaliser,
    algorithms,
    cut_tf32,
    drawn_recipe,
    nearest_tf32,
    reading,
)
from problems import FULL, MODERN, SCALED, by_torch, emptied, make, scale_of

from conformance import MaskArgument, attention_function
from conformance.adapter.base import Call
from conformance.cases.catalogue import LARGE, case_of, catalogue, find_cases
from conformance.definition.arithmetic import CLASSES, SAMPLES, Exact, Noisy, classes_of
from conformance.definition.attention import backward, equal_keys, forward, heads_alone
from conformance.definition.comparison import accuracy_class, against
from conformance.definition.dtypes import BFLOAT16, DTYPES, FLOAT32, DType
from conformance.definition.expectation import (
    ROW_SUMS,
    expect,
    expect_carefully,
    of_function,
    solve,
)
from conformance.definition.geometry import Grid
from conformance.definition.problem import Answer, Positions
from conformance.errors import Unsupported
from conformance.explore.drawing import Frame, Recipe
from conformance.records.numbers import LIMIT, ratios
from conformance.running.session import Session, plan

TF32 = DType("tf32", 11, 2.0**-126, 2.0**-24)
CLASS_NAMES = [item.name for item in CLASSES if item.name != "TF32"]
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
    noise = expectation.noise[accuracy] if accuracy else expectation.sigma
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
            floor = roundoff * np.abs(array) / math.sqrt(3) * (1 - 2**-23)  # σ is kept in float32
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
        # Nor is the reference any more exact there: σ is √2 times as large.
        ("float64", "float32", 2.0**28.5, 0.7),
        ("float16", "bfloat16", 2.0**3, 0.9),
    ],
)
def test_noise_grows_with_the_roundoff(fine, coarse, factor, least):
    growth = {}
    for case_id in ORDINARY:
        small, large = (expect(problem_of(case_id, dtype)).sigma for dtype in (fine, coarse))
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
            # One element may decide, and six samples know its σ to a factor of two.
            for accurate, less in pairwise(figures):
                assert accurate <= 2 * less, (case_id, name)
    for accurate, less in pairwise(pooled.values()):
        assert accurate < 0.97 * less, pooled


# Honest arithmetic is within the limit, and not far inside it.


@pytest.mark.parametrize(
    ("library", "case_id"),
    [*(("torch", name) for name in ORDINARY), *(("numpy", name) for name in SCALED_DOT)],
)
def test_plain_float32_is_honest(library, case_id):
    pytest.importorskip(library)
    problem = problem_of(case_id)
    found = sizes(expect(problem), {"torch": by_torch, "numpy": simulated}[library](problem))
    assert worst(found) < LIMIT
    for name, array in found.items():
        assert 0.05 < rms(array) < 2, name


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["float64", *HALF])
@pytest.mark.parametrize("case_id", ORDINARY)
def test_torch_in_every_dtype_is_honest(case_id, dtype):
    pytest.importorskip("torch")
    problem = problem_of(case_id, dtype)
    found = sizes(expect(problem), by_torch(problem))
    assert worst(found) < LIMIT
    assert all(0.02 < rms(array) < 2 for array in found.values())


@pytest.mark.night
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


ROUNDED_ELSEWHERE = (
    # The logarithm of the normaliser is large, and a weight near 1 carries its whole rounding.
    14,
    # All keys are equal, so that the error of their projection does not average out.
    41,
    # A few heads of size 1 share the error of a normaliser that is rounded twice.
    135,
    # With a scale of 0, all rows have the same normaliser.
    492,
    # The gradients are subnormal in float16.
    85,
    *range(5),
)


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", ROUNDED_ELSEWHERE)
def test_no_correct_algorithm_is_a_false_alarm(seed, dtype):
    assert_honest(drawn_recipe(seed).problem(dtype), algorithms())


def assert_honest(problem, adapters):
    expectation = expect(problem)
    for adapter in adapters:
        answer = adapter.run(problem, Call(mode=adapter.modes[0]))
        for comparison in against(expectation, answer.arrays()):
            assert comparison.fits, (adapter.name, comparison.figures)


# Large problems have fewer samples, of amplified noise.

LARGE_CASES = ["mask/per-head/mqa.d64t32x32", "causal/square/self.d96v32t32x64"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_amplified_noise_is_that_of_the_definition(dtype, monkeypatch):
    problem = case_of(LARGE_CASES[0]).problem(dtype)
    amplified = expect(problem, samples=16)
    monkeypatch.setattr("conformance.definition.expectation.LARGE", math.inf)
    usual = expect(problem, samples=16)
    for accuracy, noise in usual.noise.items():
        for name, sigma in noise.items():
            found = amplified.noise[accuracy][name]
            np.testing.assert_array_equal(found == 0, sigma == 0)
            assert 0.93 < rms(found) / rms(sigma) < 1.07, (accuracy, name)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("far", [0, 5000])
def test_amplified_noise_knows_features(dtype, far, monkeypatch):
    """At position 5,000 the amplified noise of an angle would be half a turn."""
    names = ("interleaved", "norm", "sinks", "cap", "slopes", "window", "positions")
    problem = make(
        modern=names, dtype=dtype, gain=2.0, batch=1, head_size=16, query_length=40, key_length=48
    )
    there = problem.positions
    moved = Positions(query=there.query + far, key=there.key + far)
    problem = problem.replace(positions=moved, sinks=np.array([0.5, 1.0, -np.inf, 2.0]))
    usual = expect(problem, samples=32)
    monkeypatch.setattr("conformance.definition.expectation.LARGE", 0)
    amplified = expect(problem, samples=32)
    for accuracy, noise in usual.noise.items():
        for name, sigma in noise.items():
            ratio = rms(amplified.noise[accuracy][name]) / rms(sigma)
            assert 0.75 < ratio < 1.33, (accuracy, name)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LARGE_CASES)
def test_no_correct_algorithm_is_a_false_alarm_in_large_problems(case, dtype):
    # The others take many seconds.
    quick = [one for one in algorithms(slow=False) if one.name not in ("Online1", "Online2")]
    assert_honest(case_of(case).problem(dtype), quick)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    "case", ["logits/constant-rows/cross.d128t128x64", "logits/low/separate.d128t128x64"]
)
def test_equal_terms_and_logits_made_again_are_no_false_alarm_in_large_problems(case, dtype):
    """Without them, errors of correct algorithms were at 14σ and 23σ."""
    names = ("Divided", "ThroughTheNormaliser", "Online128", "LogitsAgain")
    assert_honest(case_of(case).problem(dtype), [one for one in algorithms() if one.name in names])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_running_normaliser_of_each_key_is_class_a_in_half_precision_only(dtype):
    """It is rounded once for every key, and once for every tile where tiles are merged."""
    problem = case_of("logits/low/separate.d64t64x64").problem(dtype)
    expected = expect(problem)
    reached = {}
    for kind in (KeyByKey, MergedTiles):
        adapter = Honest(kind)
        found = adapter.run(problem, Call(mode=adapter.modes[0])).arrays()
        reached[kind] = accuracy_class(expected, found)
    assert reached[MergedTiles] == ("A" if dtype in HALF else "A0")
    if dtype != "float64":
        assert reached[KeyByKey] == ("A" if dtype in HALF else "")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("case", "prepared"),
    [
        ("logits/low/separate.d128v64t128x128", lambda problem: problem),
        ("logits/low/separate.d128-64t128x64", heads_alone),
    ],
)
def test_a_stored_log_normaliser_of_some_hundred_is_class_c(case, prepared):
    """It scales rows by up to exp(1). With 1 + 1 instead, the errors were at 8.5σ and 9.4σ."""
    problem = prepared(case_of(case).problem("bfloat16"))
    expected = expect_carefully(problem)
    adapter = Honest(StoredNormaliser)
    found = adapter.run(problem, Call(mode=adapter.modes[0])).arrays()
    asked = {name: array for name, array in found.items() if name in expected.arrays}
    for comparison in against(expected, asked):
        assert comparison.fits, comparison.figures


@pytest.mark.parametrize(
    ("case", "dtype", "more"),
    [
        ("logits/low/separate", "bfloat16", True),
        ("logits/low/separate", "float16", False),
        ("logits/low/separate", "float32", False),
        ("plain/no-mask/self", "bfloat16", False),
    ],
)
def test_sigma_is_estimated_a_third_time_only_where_an_exponent_needs_it(case, dtype, more):
    """It takes 64 times the samples, which would be half of the time of a wrong function."""
    careful = expect_carefully(case_of(case).problem(dtype))
    assert (careful.careful() is not None) is more


@pytest.mark.night
def test_the_most_careful_sigma_is_that_of_a_stored_log_normaliser():
    """A draw of the night: an element was at 9.4σ of 96 samples, which have no extreme exponent."""
    case = case_of("logits/low/separate.d128v64t128x128")
    problem = replace(case, name=case.name.replace("low", "low-3")).problem("bfloat16")
    adapter = Honest(StoredNormaliser)
    found = adapter.run(problem, Call(mode=adapter.modes[0])).arrays()
    careful = expect_carefully(problem)
    assert all(comparison.fits for comparison in against(careful, found))
    sigma = careful.sigma["gradient.query"]
    again = replace(careful, careful=lambda: None)
    assert not all(comparison.fits for comparison in against(again, found))
    most = careful.careful().sigma["gradient.query"]
    assert 1.3 < most[1, 44, 11] / sigma[1, 44, 11] < 1.5


@pytest.mark.parametrize("dtype", HALF)
def test_sigma_is_finite_where_the_log_normaliser_is_off_by_more_than_exp_allows(dtype):
    problem = case_of("logits/beyond-float16/separate").problem(dtype)
    sigma = expect(problem).sigma
    assert all(np.isfinite(each).all() for each in sigma.values())
    assert np.median(sigma["weights"]) < 100


@pytest.mark.parametrize("tiles", ["128x64", "128x128"])
def test_sigma_in_float64_holds_the_rounding_of_the_reference(tiles):
    """Equal keys move no query, but the reference finds a gradient of 3e-14."""
    case = case_of(f"logits/constant-rows/cross.d128t{tiles}")
    expected = expect(case.problem("float64"))
    equal = (np.ptp(case.problem("float64").key, axis=1) == 0).all(axis=-1)
    assert equal.any()
    wrong, sigma = expected.arrays["gradient.query"][equal], expected.sigma["gradient.query"][equal]
    assert np.abs(wrong).max() > 0
    assert (np.abs(wrong) < LIMIT / 2 * sigma).all()


def test_sigma_of_large_problems_can_be_estimated_again():
    """The smallest of 66,048 σ, of which 10 samples gave 0.45: a correct element may exceed 8σ."""
    problem = heads_alone(find_cases("plain/no-mask/self.d128v64t128x128")[0].problem("float32"))
    careful = expect_carefully(problem)
    element = (1, 99, 124)
    ratio = [e.sigma["gradient.value"][element] for e in (expect(problem), careful)]
    assert 1.5 < ratio[1] / ratio[0] < 3


def test_sigma_of_small_problems_can_be_estimated_again():
    """One query: all elements of a key's gradient share the error of one logit."""
    problem = case_of("logits/huge/one-query.d128v64t128x128").problem("float64")
    before, careful = (
        e.sigma["gradient.key"] for e in (expect(problem), expect_carefully(problem))
    )
    assert 1.8 < (careful[before > 0] / before[before > 0]).max() < 3


def test_sigma_of_weights_beyond_the_range_of_float32_is_not_that_of_its_subnormals():
    """A key has a weight of 5e-45. Its σ was an eighteenth of that from samples in float64."""
    grid = Grid(tiles=(128, 128), head_size=128, value_head_size=64)
    (case,) = find_cases("logits/huge/one-query")
    problem = heads_alone(replace(case, name=f"{case.name}-1").on(grid).problem("float64"))
    sigma = expect(problem).sigma["gradient.key"]
    # Small cotangents have samples in float64, and gradients are proportional to them.
    small = problem.replace(cotangent=problem.cotangent * 2.0**-60)
    want = expect(small).sigma["gradient.key"] * 2.0**60
    assert ((sigma > 0) == (want > 0)).all()
    ratio = sigma[want > 0] / want[want > 0]
    assert ((ratio > 0.5) & (ratio < 2)).all()


def test_numbers_beyond_the_range_of_float32_have_noise_too():
    """Squares of the smallest ones are 0 in float32."""
    problem = case_of(LARGE_CASES[0]).problem("float64")
    assert problem.shape.sharing == "self"
    small = problem.with_inputs(query=problem.query * 1e-30).replace(
        cotangent=problem.cotangent * 1e-30
    )
    for noise in expect(small).noise.values():
        assert all((sigma > 0).any() for sigma in noise.values())


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


# Features of today: honest, noticed.


def modern_of(seed, dtype):
    """A problem with one feature, or with about a third of all, and logits of up to some ten."""
    random = np.random.default_rng(seed)
    names = [name for name in MODERN if random.random() < 0.35]
    if seed < len(MODERN):
        names = [list(MODERN)[seed]]
    problem = make(
        seed=seed,
        dtype=dtype,
        modern=names,
        gain=random.choice([1.0, 3.0, 8.0, 20.0]),
        head_size=int(random.choice([5, 8])),
        kv_heads=int(random.choice([1, 2, 4])),
        query_length=int(random.choice([1, 5, 9])),
        key_length=int(random.choice([3, 9, 20])),
        bias=bool(random.random() < 0.5),
    )
    if problem.sinks is not None and random.random() < 0.5:
        problem = problem.replace(sinks=4.0 * problem.sinks)
    if problem.soft_cap is not None and random.random() < 0.6:
        problem = problem.replace(soft_cap=float(random.choice([2.0, 5.0, 30.0])))
    return problem


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(50))
def test_features_as_models_and_kernels_compute_them_are_honest(seed, dtype):
    pytest.importorskip("torch")
    from modern import eager, fused

    problem = modern_of(seed, dtype)
    expectation = expect(problem)
    for answer in (eager(problem), fused(problem)):
        for comparison in against(expectation, answer):
            assert comparison.fits, comparison.figures


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCALED)
def test_scaled_frequencies_as_models_compute_them_are_honest(name, dtype):
    """On both sides of the original length and far beyond it, where an error has grown most."""
    pytest.importorskip("torch")
    from modern import eager, fused

    for seed, begin in ((1, 0), (2, 250), (3, 4000)):
        modern = (name,) if begin == 0 else (name, "positions")
        problem = make(seed=seed, dtype=dtype, modern=modern, gain=3.0, head_size=7, key_length=9)
        if begin:
            there = problem.positions
            more = begin - 250
            far = Positions(query=there.query + more, key=there.key + more)
            problem = problem.replace(positions=far)
        expectation = expect(problem)
        for answer in (eager(problem), fused(problem)):
            for comparison in against(expectation, answer):
                assert comparison.fits, comparison.figures


@pytest.mark.night
@pytest.mark.parametrize("dtype", DTYPES)
def test_features_of_the_catalogue_are_no_false_alarm(dtype):
    pytest.importorskip("torch")
    from modern import eager, fused

    for case in catalogue():
        problem = case.problem(dtype)
        if problem.features:
            expectation = expect(problem)
            for compute in (eager, fused) if problem.attn_bias is None else (eager,):
                for comparison in against(expectation, compute(problem)):
                    assert comparison.fits, (case.id, comparison.figures)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODERN)
def test_sigma_is_the_size_of_the_errors_of_models_with_features(name, dtype):
    pytest.importorskip("torch")
    from modern import eager

    if (problem := modern_of(list(MODERN).index(name), dtype)).shape.query_length == 1:
        problem = make(dtype=dtype, modern=(name,), head_size=8, query_length=9)
    found = sizes(expect(problem), eager(problem))
    for array, errors in found.items():
        assert rms(errors) < 2, array
    # What is exact, such as the weight of a key that is not seen, says nothing of the size.
    joined = np.concatenate([errors[errors > 0] for errors in found.values()])
    assert rms(joined) > 0.1


def wrong_by(problem, name, part):
    """The same with one number of a feature wrong by this part of itself, or of 1 for sinks."""
    rotary, norm = problem.rotary, problem.norm
    return problem.replace(
        **{
            "sinks": lambda: {"sinks": problem.sinks + part},
            "cap": lambda: {"soft_cap": problem.soft_cap * (1 + part)},
            "slopes": lambda: {"slopes": problem.slopes * (1 + part)},
            "rotary": lambda: {"rotary": replace(rotary, base=rotary.base * (1 + part))},
            "interleaved": lambda: {"rotary": replace(rotary, base=rotary.base * (1 + part))},
            "scaled": lambda: {"rotary": replace(rotary, base=rotary.base * (1 + part))},
            "norm": lambda: {"norm": replace(norm, key=norm.key * (1 + part))},
        }[name]()
    )


@pytest.mark.parametrize("dtype", ["float32", *HALF])
@pytest.mark.parametrize(
    "name", ["sinks", "cap", "slopes", "rotary", "interleaved", "scaled", "norm"]
)
def test_a_feature_that_is_slightly_wrong_is_noticed(name, dtype):
    """By 100 units of roundoff by the least accurate class, which are 6e-6 in float32."""
    problem = make(
        seed=1, dtype=dtype, modern=(name,), gain=3.0, head_size=8, query_length=9, key_length=20
    )
    if problem.soft_cap is not None:
        problem = problem.replace(soft_cap=2.0)
    expectation, roundoff = expect(problem), problem.format.roundoff
    answer = solve(wrong_by(problem, name, 100 * roundoff)).arrays()
    assert worst(sizes(expectation, answer)) > LIMIT
    answer = solve(wrong_by(problem, name, roundoff / 2)).arrays()
    assert worst(sizes(expectation, answer)) < LIMIT


def test_positions_in_bfloat16_are_in_no_class():
    """Beyond 256, every second integer is missing: angles are in float32 in every class."""
    problem = make(dtype="bfloat16", modern=("rotary", "positions"), gain=3.0, head_size=8)
    there = problem.positions
    there = Positions(query=there.query + 100, key=there.key + 100)
    rounded = [BFLOAT16.round(each).astype(int) for each in (there.query, there.key)]
    problem = problem.replace(positions=there)
    moved = problem.replace(positions=Positions(query=rounded[0], key=rounded[1]))
    assert accuracy_class(expect(problem), solve(problem).arrays()) == "A0"
    assert accuracy_class(expect(problem), solve(moved).arrays()) == ""


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


@pytest.mark.sample(4)
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


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case_id", ["bias/per-head/self", "bias/over-keys/cross"])
def test_a_gradient_that_is_rounded_before_the_suite_sums_it_is_class_a0(case_id, dtype):
    """An argument that holds a bias in full has a gradient in full."""
    problem = problem_of(case_id, dtype)
    shape = problem.attn_bias.shape
    full = problem.replace(attn_bias=np.broadcast_to(problem.attn_bias, problem.shape.logits))
    gradient = problem.format.round(solve(full).gradients["attn_bias"])
    axes = tuple(axis for axis in range(4) if shape[axis] == 1)
    summed = gradient.sum(axis=axes, keepdims=True)
    assert accuracy_class(expect(problem), {"gradient.attn_bias": summed}) == "A0"


def promising_a0(torch):
    """Functions that promise class A0, by name; only the last one stores what it should not."""

    def weights(query, key, mask, wide):
        logits = query.to(wide) @ key.to(wide).mT / math.sqrt(query.shape[-1])
        return torch.softmax(logits.masked_fill(~mask, -math.inf), dim=-1)

    class Fused(torch.autograd.Function):
        """A kernel that saves its output for the gradients, as it was rounded."""

        @staticmethod
        def forward(ctx, query, key, value, mask, stores):
            def held(values):
                return (values.to(query.dtype) if stores else values).to(torch.float32)

            p = weights(query, key, mask, torch.float32)
            output = (held(p) @ value.float()).to(query.dtype)
            ctx.save_for_backward(query, key, value, output, p)
            ctx.held = held
            return output

        @staticmethod
        def backward(ctx, d_output):
            query, key, value, output, p = ctx.saved_tensors
            d = d_output.float()
            row = (d * output.float()).sum(dim=-1, keepdim=True)
            d_logits = p * (d @ value.float().mT - row) / math.sqrt(query.shape[-1])
            d_logits, p = ctx.held(d_logits), ctx.held(p)
            found = d_logits @ key.float(), d_logits.mT @ query.float(), p.mT @ d
            return *(each.to(query.dtype) for each in found), None, None

    def every(query, mask):
        return torch.ones((), dtype=torch.bool) if mask is None else mask

    def in_format(wide):
        def attend(query, key, value, mask=None):
            p = weights(query, key, every(query, mask), wide)
            return (p @ value.to(wide)).to(query.dtype)

        return attend

    def fused(*, stores):
        def attend(query, key, value, mask=None):
            return Fused.apply(query, key, value, every(query, mask), stores)

        return attend

    mask = MaskArgument("mask", "batch heads query key", true="attends", broadcasts=True)
    functions = {
        "float32": in_format(torch.float32),
        "float64": in_format(torch.float64),
        "fused": fused(stores=False),
        "class A": fused(stores=True),
    }
    decorated = attention_function("torch", mask, accuracy="A0", dtypes=HALF)
    return {name: decorated(function) for name, function in functions.items()}


PROMISED = (
    "plain/no-mask/cross",
    "plain/no-mask/long",
    "plain/no-mask/one-key",
    "mask/per-batch/separate",
    "logits/huge/cross",
    "logits/low/separate",
    "values/outliers/cross",
    "mask/per-head/self.d64t32x32",
)


@pytest.mark.parametrize("name", ["float32", "float64", "fused", "class A"])
def test_functions_that_round_their_results_once_keep_the_promise_a0(name):
    """They are given heads in the dtype, and cannot return anything else."""
    adapter = promising_a0(pytest.importorskip("torch"))[name]
    adapter.name = name
    cases = [case for pattern in PROMISED for case in find_cases(pattern)]
    assert len(cases) == len(PROMISED)
    session = Session(explains=False)
    found = {
        (item.asked.id, item.dtype, finding.requirement)
        for item in plan([adapter], cases, HALF, "cpu")
        for finding in session.examine(item).findings
        if finding.verdict not in ("conforms", "unsupported")
    }
    assert bool(found) == (name == "class A"), found


def test_a_layer_that_promises_a0_rounds_nothing_in_between():
    """Only functions are given and return heads in the dtype."""
    problem = problem_of("plain/no-mask/cross", "bfloat16")
    expectation, around = expect(problem), of_function(problem)
    assert of_function(problem_of("plain/no-mask/cross", "float32")) is None
    for array, sigma in around.items():
        if array not in ("weights", ROW_SUMS, "gradient.weights.output_bias"):
            assert rms(sigma) > 1.2 * rms(expectation.at_accuracy("A0").sigma[array]), array
            assert rms(sigma) < 1.2 * rms(expectation.at_accuracy("A").sigma[array]), array


def test_a_wrong_answer_is_in_no_class():
    expectation = expect(problem_of("mask/per-batch/separate", "bfloat16"))
    doubled = {name: 2 * array for name, array in expectation.arrays.items()}
    assert accuracy_class(expectation, doubled) == ""


# TF32, where it is declared


def answer_of(kind, problem):
    """The arrays of an algorithm of `mutants.honest`."""
    adapter = Honest(kind)
    with np.errstate(all="ignore"):
        return adapter.run(problem, Call(mode=adapter.modes[0])).arrays()


def deviating(kind, problem, expectation):
    """The names of the arrays of an algorithm that deviate."""
    found = against(expectation, answer_of(kind, problem))
    return {each.figures.array for each in found if not each.fits}


@cache
def in_tf32(case_id):
    """The expectation of a case for an implementation that declares TF32."""
    return expect(case_of(case_id).problem("float32"), promised="TF32")


def is_answered(case):
    """Whether the algorithms of `mutants.honest` can be given the case."""
    try:
        Honest(Divided).check(case.problem("float32"))
    except Unsupported:
        return False
    return True


@cache
def core():
    """The cases of level "core" that they can be given."""
    return [case for case in catalogue() if case.core and is_answered(case)]


READINGS = [nearest_tf32, cut_tf32]
"""Libraries round to nearest; hardware that is given float32 ignores the lowest bits."""


def test_tf32_has_ten_explicit_bits():
    one, ulp = np.float32(1), np.float32(2.0**-10)
    values = np.array([one + ulp, one + ulp / 2, one + 3 * ulp / 2, -(one + 0.75 * ulp), 0, 1e38])
    values = values.astype(np.float32)
    assert nearest_tf32(values)[:5].tolist() == [1 + 2.0**-10, 1, 1 + 2.0**-9, -1 - 2.0**-10, 0]
    assert cut_tf32(values)[:5].tolist() == [1 + 2.0**-10, 1, 1 + 2.0**-10, -1, 0]
    assert abs(float(nearest_tf32(values)[5]) / 1e38 - 1) < 2.0**-11


@pytest.mark.night
@pytest.mark.parametrize("rounding", READINGS)
@pytest.mark.parametrize("kind", [Divided, Online, ScaledQuery], ids=lambda kind: kind.__name__)
def test_products_in_tf32_conform_where_tf32_is_declared(kind, rounding):
    """In all core cases, forward and backward, and σ is of the size of their errors."""
    ratios_of: dict[str, list[float]] = {"output": [], "gradient": []}
    classes = set()
    for case in core():
        problem = case.problem("float32")
        expectation = in_tf32(case.id)
        answer = answer_of(reading(kind, rounding), problem)
        for each in against(expectation, answer):
            assert each.fits, (case.id, each)
            part = each.figures.array.partition(".")[0]
            ratios_of.setdefault(part, []).append(each.figures.rms_ratio)
        classes.add(accuracy_class(expectation, answer))
        undeclared = expectation.at_accuracy("A0")
        assert max(each.excess for each in against(undeclared, answer)) > 20, case.id
    least, most = (0.15, 0.4) if rounding is nearest_tf32 else (0.45, 0.75)
    for part in ("output", "gradient"):
        assert least < rms(ratios_of[part]) < most, part
    assert classes == {"TF32"}


@pytest.mark.night
@pytest.mark.parametrize("name", ["plain/no-mask/cross", "causal/square/self"])
def test_products_in_tf32_conform_at_head_size_128(name):
    grid = next(grid for grid in LARGE if grid.head_size == 128)
    problem = find_cases(name)[0].on(grid).problem("float32")
    expectation = expect(problem, promised="TF32")
    for rounding in READINGS:
        for kind in (Divided, Online):
            assert not deviating(reading(kind, rounding), problem, expectation)
    assert deviating(reading(Divided, nearest_tf32, np.float16), problem, expectation)


@pytest.mark.parametrize("seed", range(24))
def test_products_in_tf32_conform_for_random_problems(seed):
    problem = drawn_recipe(seed).problem("float32")
    expectation = expect(problem, promised="TF32")
    for kind in (Divided, Online, ScaledQuery):
        for rounding in READINGS:
            assert not deviating(reading(kind, rounding), problem, expectation)


def test_errors_of_one_sign_conform_where_tf32_is_declared():
    """Operands that are cut off make all outputs of positive values smaller."""
    problem = make(seed=1, dtype="float32", query_length=40, key_length=60, head_size=8)
    positive = {
        name: np.abs(array)
        for name, array in problem.weights.named().items()
        if name.startswith(("value", "output"))
    }
    problem = problem.replace(value=np.abs(problem.value)).with_weights(**positive)
    expectation = expect(problem, promised="TF32")
    answer = answer_of(reading(Divided, cut_tf32), problem)
    (output,) = against(expectation, {"output": answer["output"]})
    assert output.fits
    size = math.sqrt(answer["output"].size)
    assert abs(output.figures.bias) > 1.3 * LIMIT * (1 + size / 100), "else it proves nothing"


def scaled_by(factor):
    """A scale that is wrong by this factor, with products in TF32."""
    right = reading(Divided, nearest_tf32)
    return type(
        "Scaled", (right,), {"scaled": lambda self, s: right.scaled(self, s) * self.wide(factor)}
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("kind", "least"),
    [
        (reading(Divided, lambda values: BFLOAT16.round(values).astype(np.float32)), 0.9),
        (scaled_by(1.01), 0.8),
        (scaled_by(1.003), 0.005),
        (reading(Divided, nearest_tf32, np.float16), 0.05),
    ],
    ids=["bfloat16", "scale 1 % off", "scale 0.3 % off", "sums in float16"],
)
def test_less_than_tf32_deviates_where_tf32_is_declared(kind, least):
    noticed = [bool(deviating(kind, case.problem("float32"), in_tf32(case.id))) for case in core()]
    assert np.mean(noticed) > least


def test_tf32_is_a_class_of_float32_that_is_evaluated_only_if_promised():
    for name in DTYPES:
        problem = problem_of("plain/no-mask/self", name)
        usual, promised = expect(problem), expect(problem, promised="TF32")
        assert "TF32" not in usual.noise
        assert list(promised.noise) == [*usual.noise, *["TF32"] * (name == "float32")]
        assert promised.promised == ("TF32" if name == "float32" else "")
    assert list(expect(problem_of("plain/no-mask/self"), promised="A").noise) == ["A0"]


def test_sums_without_a_product_are_as_exact_as_in_float32_where_tf32_is_declared():
    noise = in_tf32("plain/no-mask/self").noise
    for name, sigma in noise["A0"].items():
        if "key_bias" not in name:
            ratio = rms(noise["TF32"][name]) / rms(sigma)
            # Whatever the weights of a row are, they are divided by their sum.
            without = name.endswith(("output_bias", "row sums"))
            assert ratio < 1.5 if without else 2**11 < ratio < 2**15, name


def test_products_in_tf32_of_torch_conform_where_tf32_is_declared():
    """With integer arithmetic on tensors, and autograd through the rounded products."""
    torch = pytest.importorskip("torch")
    adapter = in_tf32_of_torch(torch)
    problems = ((case, case.problem("float32")) for case in core())
    taken = [
        (case, problem)
        for case, problem in problems
        if problem.shape.group == 1
        and problem.shape.score == "scaled-dot"
        and not problem.features
        and problem.allowed_in_full().any(axis=-1).all()
    ]
    for case, problem in taken[::4]:
        answer = adapter.run(problem, Call(mode=adapter.modes[0])).arrays()
        assert all(each.fits for each in against(in_tf32(case.id), answer)), case.id
        undeclared = in_tf32(case.id).at_accuracy("A0")
        assert not all(each.fits for each in against(undeclared, answer)), case.id


def in_tf32_of_torch(torch):
    class Product(torch.autograd.Function):
        @staticmethod
        def rounded(tensor):
            bits = tensor.contiguous().view(torch.int32)
            return ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)

        @staticmethod
        def forward(ctx, left, right):
            left, right = Product.rounded(left), Product.rounded(right)
            ctx.save_for_backward(left, right)
            return left @ right

        @staticmethod
        def backward(ctx, gradient):
            left, right = ctx.saved_tensors
            gradient = Product.rounded(gradient)
            return gradient @ right.mT, left.mT @ gradient

    @attention_function(
        "torch",
        (
            MaskArgument("mask", "batch heads query key", true="attends"),
            MaskArgument("bias", "batch heads query key", number="added", broadcasts=True),
        ),
        grouped=False,
        dtypes=("float32",),
        accuracy="TF32",
    )
    def attend(query, key, value, mask=None, bias=None, scale=None):
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        logits = Product.apply(query, key.mT) * scale
        logits = logits if bias is None else logits + bias
        logits = logits if mask is None else logits.masked_fill(~mask, -math.inf)
        return Product.apply(logits.softmax(-1), value)

    return attend


# The page


def benchmark(name):
    """A program of the folder benchmarks, as a module."""
    file = pages.ROOT / "benchmarks" / f"{name}.py"
    specification = importlib.util.spec_from_file_location(name, file)
    program = importlib.util.module_from_spec(specification)
    # Its dataclasses look for their module.
    sys.modules[name] = program
    specification.loader.exec_module(program)
    return program


@pytest.fixture(scope="module")
def sensitivity():
    """The benchmark that writes the tables of docs/noise.md."""
    return benchmark("sensitivity")


def test_a_part_of_the_night_of_correct_algorithms_is_empty(monkeypatch, capsys):
    """`tox -e honest` does the same with all cases, four sizes, four dtypes and 20 draws."""
    calibrate = benchmark("calibrate")
    monkeypatch.setattr(calibrate, "GRIDS", (Grid(head_size=32, tiles=(16, 16)),))
    patterns = ["causal/bottom-right/gqa.d32t16x16", "logits/low/separate.d32t16x16"]
    problems = calibrate._drawn(range(2), ["float32"], patterns, large=True)
    assert calibrate._print_honest(problems, ["float32"], [], math.inf, large=True) == 0
    printed = capsys.readouterr().out
    assert "4 of 4 problems" in printed
    assert printed.count("| 0 |") >= 25


def table(name):
    """The rows of a table of the page, by their first cells, as lists of the others."""
    page = (pages.DOCS / "noise.md").read_text(encoding="utf-8")
    lines = re.search(rf"<!-- table {name} -->\n(.*?)<!-- end -->", page, re.DOTALL)[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_shows_what_the_benchmark_measures(sensitivity):
    head, _, *rows = table("sizes")
    assert head[2:] == [*sensitivity.ERRORS]
    shown = [(dtype, "" if promise == "nothing" else promise) for dtype, promise, *_ in rows]
    assert shown == [*sensitivity.PROMISES]
    head, _, correct, *rows = table("defects")
    assert [row[0] for row in rows] == [*sensitivity.DEFECTS]
    assert set(correct[1:]) == {"0"}, "a false alarm"


@pytest.mark.night
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_error_of_the_size_on_the_page_is_noticed(sensitivity, dtype):
    """And a quarter of it by none of the same cases."""
    (row,) = (row for row in table("sizes") if row[:2] == [dtype, "nothing"])
    cases = [case for case in sensitivity.core() if case.id.startswith(("plain/", "logits/"))]
    for (name, error), size in zip(sensitivity.ERRORS.items(), map(float, row[2:]), strict=True):
        assert sensitivity.noticed(error(2 * size), dtype, "", sensitivity.core(), first=True), name
        assert not sensitivity.noticed(error(size / 4), dtype, "", cases), name


@pytest.mark.night
def test_a_promise_makes_defects_visible(sensitivity):
    (case,) = (case for case in sensitivity.core() if case.id == "plain/no-mask/long")
    for name, stages in sensitivity.DEFECTS.items():
        assert sensitivity.noticed(stages, "float16", "A0", [case]), name
    stages = sensitivity.DEFECTS["the log-normaliser"]
    (tiles,) = (case for case in sensitivity.core() if case.id == "plain/no-mask/tiles")
    assert sensitivity.noticed(stages, "float16", "A", [tiles])
    assert not sensitivity.noticed(stages, "float16", "", [case])
    assert not sensitivity.noticed({}, "float16", "A0", [case])


# Equal terms, whose errors add up.


def of_equal_terms(sharing, **fields):
    length = 90 if sharing == "self" else 300
    return Recipe(
        frame=Frame(sharing=sharing),
        query=length if sharing == "self" else 5,
        key=length,
        size=4,
        seed=1,
        **fields,
    ).problem("float32")


@pytest.mark.parametrize("fields", [{"regime": "constant-rows"}, {"scale": 0.0}], ids=str)
@pytest.mark.parametrize("sharing", ["separate", "memory", "self"])
def test_sums_of_many_equal_terms_are_honest_and_mistakes_are_not(sharing, fields):
    problem = of_equal_terms(sharing, **fields)
    expected = expect(problem)
    one_by_one = {adapter.name: adapter for adapter in algorithms()}["OneByOne"]
    for adapter in (algorithms()[0], one_by_one):
        found = adapter.run(problem, Call(mode=adapter.modes[0])).arrays()
        assert all(comparison.fits for comparison in against(expected, found)), adapter.name
        wrong = {name: array * 1.001 for name, array in found.items()}
        assert not any(
            comparison.fits
            for comparison in against(expected, wrong)
            if comparison.figures.array in ("output", "weights", "gradient.weights.value_bias")
        )


def test_noise_without_many_equal_keys_is_what_it_was():
    assert equal_keys(of_equal_terms("memory", regime="constant-rows")) == 300
    assert equal_keys(of_equal_terms("memory", scale=0.0)) == 300
    assert not equal_keys(of_equal_terms("memory"))
    assert not any(equal_keys(case.problem("float32")) for case in catalogue())


@pytest.mark.parametrize(
    ("axes", "loosened"), [("...bqe,ehd->...bhqd", False), ("...bqe,...bhqd->...ehd", True)]
)
def test_only_sums_over_tokens_have_equal_terms(axes, loosened):
    """A projection sums over components, which differ, however many keys are equal."""
    random = np.random.default_rng(0)
    left = random.normal(size=(1, 2, 100, 100))
    right = random.normal(size=(100, 3, 5) if axes.count("...") == 2 else (1, 2, 3, 100, 5))
    found = [
        Noisy(FLOAT32, seed=1).among_equals(equal).contract(axes, left, right, "tensor")
        for equal in (0, 90)
    ]
    assert (found[0] == found[1]).all() != loosened
