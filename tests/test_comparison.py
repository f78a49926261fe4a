"""Comparison in units of noise: every element counts, and exact means exact."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.definition.comparison import (
    BETWEEN_ANSWERS,
    NOTHING,
    accuracy_class,
    against,
    all_between,
    between,
    compare,
    compare_all,
    element,
    worst_of,
)
from conformance.definition.expectation import ROW_SUMS, Expectation
from conformance.errors import WrongShape
from conformance.records.findings import INFINITE
from conformance.records.numbers import LIMIT, ratios
from conformance.requirements.examination import averaged_over_heads

NAN, INF = np.nan, np.inf


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def measure(got, want, noise, underflow=0.0, limit=LIMIT):
    return compare("output", *(np.asarray(x, float) for x in (got, want, noise)), underflow, limit)


# The rule, at its edges


def test_an_element_at_the_limit_fits_and_one_beyond_does_not():
    assert measure([1.0 + 8 * 2.0**-20], [1.0], [2.0**-20]).fits
    assert not measure([1.0 + 9 * 2.0**-20], [1.0], [2.0**-20]).fits
    assert measure([1.0 + 8 * 2.0**-20], [1.0], [2.0**-20]).worst == NOTHING
    assert measure([1.0 - 8 * 2.0**-20], [1.0], [2.0**-20]).fits
    assert not measure([1.0 - 9 * 2.0**-20], [1.0], [2.0**-20]).fits


def test_one_element_of_many_is_enough():
    got = np.zeros((7, 11, 13))
    got[3, 5, 2] = 100.0
    found = measure(got, np.zeros_like(got), np.ones_like(got))
    assert not found.fits
    assert found.worst.index == (3, 5, 2)
    assert found.figures.max_ratio == 100.0
    assert found.figures.rms_ratio < LIMIT


def test_the_worst_is_worst_in_its_own_noise():
    # The largest error is honest; a thousandth of it, where nothing is noisy, is not.
    found = measure([1.0, 1e-3], [0.0, 0.0], [1.0, 1e-5])
    assert found.worst.index == (1,)
    assert found.figures.max_ratio == 100.0


def test_equal_arrays():
    values = np.array([0.0, -1.5, 1e300, 5e-324])
    found = measure(values, values, np.ones(4))
    assert found.fits
    assert (found.figures.max_ratio, found.figures.rms_ratio, found.figures.bias) == (0, 0, 0)


# No noise: exact


@pytest.mark.parametrize("off", [1e-300, -1e-300, 2.0**-52, 1.0, NAN, INF, -INF])
def test_where_there_is_no_noise_the_answer_must_be_exact(off):
    found = measure([0.5, 0.0 + off], [0.5, 0.0], [0.1, 0.0])
    assert not found.fits
    assert found.figures.max_ratio == INFINITE
    assert found.worst.index == (1,)
    assert found.worst.noise == "0"
    assert measure([0.5, 0.0], [0.5, 0.0], [0.1, 0.0]).fits


def test_minus_zero_is_zero():
    assert measure([-0.0], [0.0], [0.0]).fits


# NaN and infinity are never close to a number


@pytest.mark.parametrize("noise", [0.0, 1.0, 1e300])
@pytest.mark.parametrize("odd", [NAN, INF, -INF])
def test_neither_nan_nor_infinity_fits_a_number(odd, noise):
    found = measure([1.0, odd], [1.0, 1.0], [1.0, noise])
    assert not found.fits
    assert found.figures.max_ratio == INFINITE
    assert found.worst.index == (1,)
    assert found.worst.got == str(odd)


def test_a_number_does_not_fit_nan_nor_nan_itself():
    assert not measure([1.0], [NAN], [1.0]).fits
    assert not measure([NAN], [NAN], [1.0]).fits
    assert not measure([INF], [INF], [1.0]).fits


def test_the_other_elements_are_still_measured():
    found = measure([NAN, 2.0, -2.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    assert found.figures.rms_ratio == 2.0
    assert found.figures.bias == 0.0


def test_nothing_but_nan():
    figures = measure([NAN, NAN], [0.0, 1.0], [1.0, 1.0]).figures
    assert (figures.max_ratio, figures.rms_ratio, figures.bias) == (INFINITE, INFINITE, 0.0)


# Underflow


@pytest.mark.parametrize("noise", [0.0, 1e-50])
def test_below_the_underflow_nothing_counts(noise):
    tiny = 2.0**-126
    assert measure([tiny], [0.0], [noise], underflow=tiny).figures.max_ratio == 0.0
    assert measure([-tiny], [0.0], [noise], underflow=tiny).fits
    assert not measure([1.001 * tiny], [0.0], [noise], underflow=tiny).fits


# Shapes


@pytest.mark.parametrize("shape", [(2, 3, 1), (3, 2), (2, 3, 4), (6,), ()])
def test_other_shapes_are_not_broadcast(shape):
    with pytest.raises(WrongShape) as caught:
        compare("output", np.zeros(shape), np.zeros((2, 3)), np.ones((2, 3)), 0.0)
    assert str(caught.value) == f"output has shape {list(shape)}, wanted [2, 3]"


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)])
def test_empty_arrays_fit(shape):
    found = measure(np.zeros(shape), np.zeros(shape), np.zeros(shape))
    assert found.fits
    figures = found.figures
    assert (figures.max_ratio, figures.rms_ratio, figures.bias, found.excess) == (0, 0, 0, 0)
    assert found.worst.index == ()


# Bias


def test_the_bias_has_a_sign_and_grows_with_the_number_of_elements():
    ones, zeros = np.ones(100), np.zeros(100)
    assert measure(ones, zeros, ones).figures.bias == 10.0
    assert measure(-ones, zeros, ones).figures.bias == -10.0
    mixed = np.where(np.arange(100) % 2, 1.0, -1.0)
    assert measure(mixed, zeros, ones).figures.bias == 0.0
    assert measure(mixed, zeros, ones).figures.rms_ratio == 1.0


def test_honest_noise_has_a_bias_of_about_one():
    noise = np.random.default_rng(0).standard_normal(10_000)
    figures = measure(noise, np.zeros(10_000), np.ones(10_000)).figures
    assert abs(figures.bias) < 3
    assert abs(figures.rms_ratio - 1) < 0.05


# Figures can always be written down


WILD = st.floats() | st.sampled_from([0.0, -0.0, NAN, INF, -INF, 1e308, -1e308, 5e-324])


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(WILD, st.floats(allow_nan=False, allow_infinity=False), st.floats(0, 1e300)),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([0.0, 2.0**-126, 5e-324]),
)
def test_by_the_definition_element_by_element(rows, underflow):
    got, want, noise = (np.array(column, float) for column in zip(*rows, strict=True))
    with warnings.catch_warnings():
        # Sums of squares of ratios may overflow; the figure is then INFINITE.
        warnings.simplefilter("ignore", RuntimeWarning)
        found = measure(got, want, noise, underflow)
    fits = True
    for g, w, n in rows:
        error = abs(g - w)
        ok = error <= underflow or (n > 0 and error / n <= LIMIT and np.isfinite(g))
        fits &= bool(ok)
    # Exactly at the limit, rounding a ratio to four digits may add a hair.
    if abs(found.figures.max_ratio - LIMIT) > 1e-2:
        assert found.fits == fits
    for value in (found.figures.max_ratio, found.figures.rms_ratio):
        assert 0 <= value <= INFINITE


def test_a_bias_that_overflows_both_ways_is_a_number():
    with np.errstate(all="ignore"):
        figures = measure([1e308, -1e308] * 8, [0.0] * 16, [1.0] * 16).figures
    assert np.isfinite(figures.bias)


def test_a_huge_ratio_does_not_become_infinite():
    with np.errstate(over="ignore"):
        figures = measure([1e300], [0.0], [1e-300]).figures
    assert figures.max_ratio == INFINITE


def test_large_ratios_do_not_warn():
    assert not measure([1e200, 1e200], [0.0, 0.0], [1.0, 1.0]).fits


def test_ratios_are_signed():
    found = ratios(np.array([3.0, -3.0, 1.0]), np.zeros(3), np.array([1.0, 1.0, 0.0]), 0.0)
    assert found.tolist() == [3.0, -3.0, INF]


def test_evidence_is_text():
    worst = element("output", (np.int64(1), np.int64(2)), np.float64(NAN), -INF, 1e-7)
    assert worst == type(worst)("output", (1, 2), "nan", "-inf", "1e-07")
    assert all(type(i) is int for i in worst.index)


# Two answers of one implementation


def test_two_answers_may_each_have_noise():
    assert pytest.approx(LIMIT * np.sqrt(2), rel=1e-3) == BETWEEN_ANSWERS
    ones = np.ones(4)
    assert between("x", 11.0 * ones, 0.0 * ones, ones, 0.0).fits
    assert not between("x", 12.0 * ones, 0.0 * ones, ones, 0.0).fits


def test_between_answers_nan_twice_is_no_disagreement():
    one, noise = np.array([NAN, 1.0]), np.ones(2)
    assert between("x", one, one, noise, 0.0).fits
    assert between("x", one, one, 1e-6 * noise, 0.0).excess == 0.0
    nothing = {"x": np.full(2, NAN), "y": np.full(2, NAN)}
    assert all(found.fits for found in all_between(nothing, nothing, dict.fromkeys("xy", noise), 0))
    assert not between("x", one, np.array([0.0, 1.0]), noise, 0.0).fits
    assert not between("x", np.array([0.0, 1.0]), one, noise, 0.0).fits


def test_between_wrong_answers_an_exact_element_has_the_usual_noise():
    noise = np.array([0.0, 1.0])
    assert between("x", np.array([1.0, 0.0]), np.zeros(2), noise, 0.0).fits
    assert not between("x", np.array([99.0, 0.0]), np.zeros(2), noise, 0.0).fits
    assert between("x", np.zeros((0,)), np.zeros((0,)), np.zeros((0,)), 0.0).fits


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 1)])
def test_two_answers_of_different_shapes_are_not_broadcast(shape):
    with pytest.raises(WrongShape):
        between("x", np.full(shape, NAN), np.full(2, NAN), np.ones(2), 0.0)


# Against an expectation


odd_numbers = st.sampled_from([0.0, 0.0, 1.0, -1.0, 7.9, 8.1, -20.0, 1e-40, 1e200, NAN, INF, -INF])


@st.composite
def several_arrays(draw):
    """Two sets of arrays with the same names and mostly the same shapes, and their noise."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    one, other, noise = {}, {}, {}
    for place, size in enumerate(sizes):
        rows = [draw(st.lists(odd_numbers, min_size=size, max_size=size)) for _ in range(2)]
        one[f"array {place}"], other[f"array {place}"] = map(np.array, rows)
        sigmas = st.sampled_from([0.0, 0.5, 1.0])
        noise[f"array {place}"] = np.array(draw(st.lists(sigmas, min_size=size, max_size=size)))
    if len(sizes) > 1 and draw(st.booleans()):
        other["array 1"] = other["array 1"][None]
    return one, other, noise


@settings(deadline=None, max_examples=100)
@given(several_arrays(), st.sampled_from([0.0, 1e-38]))
@pytest.mark.parametrize(
    ("together", "alone"), [(compare_all, compare), (all_between, between)], ids=["answer", "two"]
)
def test_all_at_once_is_one_after_the_other(together, alone, arrays, underflow):
    one, other, noise = arrays
    try:
        wanted = [alone(n, one[n], other[n], noise[n], underflow) for n in one]
    except WrongShape as error:
        with pytest.raises(WrongShape, match=re.escape(str(error))):
            together(one, other, noise, underflow)
        return
    for got, want in zip(together(one, other, noise, underflow), wanted, strict=True):
        assert got.worst == want.worst
        assert got.excess == pytest.approx(want.excess, rel=2e-3, abs=1e-12)
        assert (got.figures.array, got.figures.limit) == (want.figures.array, want.figures.limit)
        for figure in ("max_ratio", "rms_ratio", "bias"):
            near = pytest.approx(getattr(want.figures, figure), rel=2e-3, abs=1e-12)
            assert getattr(got.figures, figure) == near


def spread(size, each, name="output", row=4, alike=1, relative=2.0**-20):
    """Compare `size` elements that are all this many σ off, in rows, of which some are equal."""
    want = (np.arange(size) // (row * alike)).reshape(-1, row) + 1.0
    noise = relative * want
    return compare(name, want + each * noise, want, noise, 0.0)


@pytest.mark.parametrize(
    ("size", "each", "fits"), [(64, 1.9, True), (64, 2.1, False), (63, 2.1, True)]
)
def test_many_elements_within_the_limit_may_be_too_much_together(size, each, fits):
    signs = np.resize([1.0, -1.0], size)
    array = each * signs
    compared = compare("gradient.key", array, np.zeros(size), np.ones(size), 0.0)
    assert compared.fits is fits
    assert compared.worst == NOTHING if fits else compared.worst.array == "gradient.key"


@pytest.mark.parametrize(
    ("name", "size", "fits"),
    [("output", 60, True), ("output", 400, False), ("weights", 400, False),
     ("gradient.key", 400, True)],
)  # fmt: skip
def test_errors_of_one_sign_add_up_in_outputs_and_weights(name, size, fits):
    assert spread(size, 1.0, name).fits is fits


@pytest.mark.parametrize("name", ["output", "weights"])
def test_rows_that_are_equal_may_have_one_error(name):
    """With a scale of 0 every row is rounded alike, so a bias is that of one row, many times."""
    assert not spread(4_000, 0.3, name).fits
    assert spread(4_000, 0.3, name, alike=100).fits
    assert not spread(4_000, 1.9, "output", alike=10).fits


def test_weights_in_another_order_are_those_of_an_equal_row():
    """A normaliser is a sum over keys, in whatever order they come; what follows it is not."""
    rows, keys = 400, 10
    turned = (np.arange(keys) + np.arange(rows)[:, None]) % keys + 1.0
    noise = 2.0**-20 * turned
    for name, fits in (("weights", True), ("output", False)):
        assert compare(name, turned + 1.5 * noise, turned, noise, 0.0).fits is fits
    apart = turned + np.arange(rows)[:, None]
    noise = 2.0**-20 * apart
    assert not compare("weights", apart + 1.5 * noise, apart, noise, 0.0).fits


def test_the_weights_of_a_row_may_share_the_error_of_its_normaliser():
    """As many of them as there are keys; outputs do not, since signs of values differ."""
    assert spread(400, 0.9, "weights", row=40).fits
    assert spread(400, 1.2, "weights", row=40).fits
    assert not spread(400, 1.3, "weights", row=40).fits
    assert not spread(400, 0.9, "output", row=40).fits
    assert not spread(40_000, 0.9, "weights", row=40).fits


@pytest.mark.parametrize(("each", "fits"), [(1.3, True), (1.5, False)])
def test_the_error_of_a_normaliser_is_shared_where_most_weights_are_small(each, fits):
    """As with 16,385 keys: σ of a small weight is mostly that of its row, not relative to it."""
    rows, keys = 8, 16_385
    want = np.random.default_rng(0).lognormal(0, 2, (rows, keys))
    want /= want.sum(axis=-1, keepdims=True)
    own = 2.0**-21 * want
    noise = np.sqrt((own**2 + (own**2).mean(axis=-1, keepdims=True)) / 2)
    share = each * (noise / want).min(axis=-1, keepdims=True)
    assert compare("weights", want * (1 + share), want, noise, 0.0).fits is fits


def test_normalisers_are_accurate_where_weights_are_in_half_precision():
    """The error of a normaliser in float32 is no excuse for one that was kept in float16."""
    assert not spread(400, 0.9, "weights", row=40, relative=2.0**-12).fits
    assert spread(400, 0.9, "weights", row=40, relative=2.0**-24).fits


def test_the_limit_of_the_bias_grows_with_the_root_of_the_size():
    """8·(1 + √10,000/100) is 16; each of 10,000 elements adds a hundredth of its error."""
    assert spread(10_000, 0.1599).fits
    assert not spread(10_000, 0.1601).fits
    assert spread(10_000, -0.1599).fits
    assert not spread(10_000, -0.1601).fits


@pytest.fixture
def expectation():
    """Class A is four times as accurate as B."""
    arrays = {"output": np.zeros(3), "gradient.query": np.zeros(2)}
    noise = {name: {k: np.full(v.shape, s) for k, v in arrays.items()}
             for name, s in (("A", 0.25), ("B", 1.0))}  # fmt: skip
    return Expectation(arrays, noise, underflow=2.0**-20)


@pytest.mark.parametrize(
    ("size", "reached", "fits"),
    [(0.0, "A", True), (2.0, "A", True), (2.1, "B", True), (8.0, "B", True), (8.1, "", False)],
)
def test_the_class_that_was_reached(expectation, size, reached, fits):
    arrays = {"output": np.array([0.0, size, 0.0]), "gradient.query": np.zeros(2)}
    assert accuracy_class(expectation, arrays) == reached
    found = against(expectation, arrays)
    assert [item.figures.array for item in found] == ["output", "gradient.query"]
    assert all(item.fits for item in found) == fits


def test_every_array_must_reach_the_class(expectation):
    arrays = {"output": np.zeros(3), "gradient.query": np.array([5.0, 0.0])}
    assert accuracy_class(expectation, arrays) == "B"


@pytest.mark.parametrize(
    ("size", "asked", "reached", "fits"),
    [(7.9, 0, "B", True), (8.1, 2, "B", True), (15.9, 2, "B", True), (16.1, 0, "", False)],
)
def test_sigma_is_estimated_again_where_it_is_in_doubt(expectation, size, asked, reached, fits):
    more = {name: {k: 2 * v for k, v in each.items()} for name, each in expectation.noise.items()}
    times = []

    def careful():
        times.append(1)
        return replace(expectation, noise=more)

    doubted = replace(expectation, careful=careful)
    arrays = {"output": np.array([0.0, size, 0.0]), "gradient.query": np.zeros(2)}
    assert accuracy_class(doubted, arrays) == reached
    assert all(item.fits for item in against(doubted, arrays)) == fits
    assert len(times) == asked


def test_more_samples_do_not_excuse_what_deviates(expectation):
    doubted = replace(expectation, careful=lambda: expectation)
    arrays = {"output": np.array([0.0, 9.0, 0.0]), "gradient.query": np.zeros(2)}
    assert accuracy_class(doubted, arrays) == ""
    assert not all(item.fits for item in against(doubted, arrays))


def test_no_class_is_sought_a_third_time(expectation):
    """An expectation of more samples may itself be able to take more."""
    again = replace(expectation, careful=lambda: again)
    arrays = {"output": np.array([0.0, 9.0, 0.0]), "gradient.query": np.zeros(2)}
    assert accuracy_class(again, arrays) == ""


@pytest.mark.parametrize(("promised", "fits"), [("", False), ("A", False), ("TF32", True)])
def test_any_bias_conforms_in_class_tf32_alone(promised, fits):
    """Truncated operands have errors of one sign; more samples do not excuse those of others."""
    arrays = {"output": np.arange(10_000.0).reshape(-1, 4)}
    noise = {promised or "A0": {"output": np.ones((2_500, 4))}}
    given = Expectation(arrays, noise, underflow=0.0, promised=promised)
    given = replace(given, careful=lambda: replace(given, careful=lambda: None))
    (compared,) = against(given, {"output": arrays["output"] + 0.2})
    assert compared.fits is fits
    assert promised == "TF32" or 1 < compared.excess < 2


@pytest.mark.parametrize("odd", [NAN, INF])
def test_what_is_not_finite_reaches_no_class(expectation, odd):
    assert accuracy_class(expectation, {"output": np.array([odd, 0.0, 0.0])}) == ""


def test_the_worst_comparison_is_that_closest_to_its_limit():
    near = measure([7.0], [0.0], [1.0], limit=8.0)
    far = measure([9.0], [0.0], [1.0], limit=11.0)
    assert worst_of([near, far]) is near
    broken = measure([NAN], [0.0], [1.0])
    assert worst_of([near, broken, far]) is broken


def test_averaged_weights_are_compared_with_averages_of_more_samples_too():
    arrays = {"weights": np.full((1, 4, 2, 2), 0.5), ROW_SUMS: np.ones((1, 4, 2))}
    noise = {"A": {name: np.full_like(array, 0.01) for name, array in arrays.items()}}
    expectation = Expectation(arrays, noise, underflow=0.0)
    averaged = averaged_over_heads(replace(expectation, careful=lambda: expectation))
    beyond = averaged.arrays["weights"] + 9 * averaged.sigma["weights"]
    (found,) = against(averaged, {"weights": beyond})
    assert not found.fits
    assert found.worst.array == "weights"
