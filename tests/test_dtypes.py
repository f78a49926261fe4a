"""Rounding to a format, against the formats' own bits and against torch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.definition.arithmetic import CLASSES
from conformance.definition.dtypes import BFLOAT16, DTYPES, FLOAT16, FLOAT32, FLOAT64, dtype_of
from conformance.errors import UnknownName
from conformance.records.numbers import ACCURACY, UNDERFLOW

each = pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)

deterministic = settings(derandomize=True, database=None, deadline=None)

# Magnitudes that are normal numbers in every format.
normal = st.floats(2.0**-14, 6e4).flatmap(lambda x: st.sampled_from([x, -x]))


def neighbours(name, value):
    """The numbers of the format next below and next above a float64, from its bits."""
    digits = DTYPES[name].significand_bits
    exponent = np.floor(np.log2(abs(value)))
    step = 2.0 ** (exponent - digits + 1)
    return np.floor(value / step) * step, np.ceil(value / step) * step


@each
@deterministic
@given(value=normal)
def test_rounds_to_the_nearer_neighbour(dtype, value):
    below, above = neighbours(dtype.name, value)
    got = dtype.round(value)
    assert got in (below, above)
    assert abs(got - value) == min(abs(below - value), abs(above - value))


@each
@deterministic
@given(value=normal)
def test_error_is_at_most_the_roundoff(dtype, value):
    assert abs(dtype.round(value) - value) <= dtype.roundoff * abs(value)


@each
@deterministic
@given(value=normal)
def test_a_rounded_number_stays_and_the_sign_is_kept(dtype, value):
    once = dtype.round(value)
    assert dtype.round(once) == once
    assert dtype.round(-value) == -once


@each
@deterministic
@given(one=normal, other=normal)
def test_order_is_kept(dtype, one, other):
    low, high = sorted([one, other])
    assert dtype.round(low) <= dtype.round(high)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=lambda dtype: dtype.name)
def test_ties_go_to_the_even_neighbour(dtype):
    u = dtype.roundoff
    ties, even = [1 + u, 1 + 3 * u, 1 - u / 2, -1 - u], [1.0, 1 + 4 * u, 1.0, -1.0]
    np.testing.assert_array_equal(dtype.round(ties), even)
    np.testing.assert_array_equal(dtype.round([1 + u * 1.001, 1 + u * 0.999]), [1 + 2 * u, 1.0])


@each
def test_zeros_infinities_and_nan_stay(dtype):
    np.testing.assert_array_equal(dtype.round([0.0, np.inf, -np.inf]), [0.0, np.inf, -np.inf])
    assert np.isnan(dtype.round(np.nan))
    assert np.signbit(dtype.round(-0.0))


@each
def test_the_result_is_a_new_float64_array_of_the_same_shape(dtype):
    values = np.linspace(-3, 3, 24).reshape(2, 3, 4)
    got = dtype.round(values)
    assert got.dtype == np.float64
    assert got.shape == values.shape
    assert not np.shares_memory(got, values)
    assert dtype.round(2).shape == ()


def test_bfloat16_is_float32_without_the_lower_half_of_its_bits():
    values = (
        np.random.default_rng(0).standard_normal(10_000)
        * 10.0 ** np.arange(-30, 30).repeat(10_000 // 60 + 1)[:10_000]
    )
    bits = BFLOAT16.round(values).astype(np.float32).view(np.uint32)
    assert (bits & 0xFFFF == 0).all()
    assert (bits & 0x10000 != 0).any(), "the last kept bit is used"


@pytest.mark.parametrize("name", DTYPES)
def test_rounding_is_that_of_torch(name):
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(0)
    # Exponents that are normal in every format; ties, and what lies just beside them. float32
    # numbers only: torch converts float64 by way of float32, and rounds twice.
    values = random.standard_normal(20_000) * 2.0 ** random.integers(-10, 10, 20_000)
    ties = (BFLOAT16.round(values) * (1 + 2.0**-8)).astype(np.float32)
    single = np.concatenate([values.astype(np.float32), ties, np.nextafter(ties, np.float32(0))])
    want = torch.tensor(single).to(getattr(torch, name)).double().numpy()
    np.testing.assert_array_equal(DTYPES[name].round(single), want)


LARGEST = {
    "float32": (2 - 2.0**-23) * 2.0**127,
    "float16": 65504.0,
    "bfloat16": 2.0**127 * 255 / 128,
}


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=lambda d: d.name)
def test_beyond_the_largest_number_is_infinity(dtype):
    largest = LARGEST[dtype.name]
    assert dtype.round(largest) == largest
    with np.errstate(over="ignore"):
        assert dtype.round(largest * (1 + 0.9 * dtype.roundoff)) == np.inf


@pytest.mark.parametrize(
    ("dtype", "smallest"),
    [
        (FLOAT32, 2.0**-149),
        (FLOAT16, 2.0**-24),
        (BFLOAT16, 2.0**-133),
    ],
    ids=["float32", "float16", "bfloat16"],
)
def test_subnormals_are_multiples_of_the_smallest(dtype, smallest):
    values = smallest * np.array([1.0, 1.25, 2.75, 6.25, 0.25])
    np.testing.assert_array_equal(dtype.round(values), smallest * np.array([1, 1, 3, 6, 0]))


def test_roundoff_and_underflow_are_those_of_the_formats():
    for dtype in (FLOAT32, FLOAT64, FLOAT16):
        assert dtype.roundoff == np.finfo(dtype.name).eps / 2
    assert BFLOAT16.roundoff == 2.0**-8
    assert FLOAT16.underflow == np.finfo("float16").smallest_subnormal
    assert FLOAT64.underflow == np.finfo("float64").smallest_subnormal
    # float32 units may flush subnormals, so there a smaller number may become 0.
    assert FLOAT32.underflow == BFLOAT16.underflow == np.finfo("float32").smallest_normal


def test_half_precision_adds_up_in_float32():
    assert BFLOAT16.accumulator == FLOAT16.accumulator == FLOAT32.roundoff
    assert FLOAT32.accumulator == FLOAT32.roundoff
    assert FLOAT64.accumulator == FLOAT64.roundoff


def test_formats_are_found_by_name():
    assert [dtype_of(name) for name in DTYPES] == list(DTYPES.values())
    assert all(dtype.name == name for name, dtype in DTYPES.items())


def test_an_unknown_format_is_answered_with_the_nearest():
    with pytest.raises(UnknownName, match=r"unknown dtype 'float8'; did you mean .*float16"):
        dtype_of("float8")


def test_records_know_the_same_formats_and_classes():
    assert {name: dtype.underflow for name, dtype in DTYPES.items()} == UNDERFLOW
    assert list(DTYPES) == list(UNDERFLOW)
    assert [item.name for item in CLASSES] == list(ACCURACY)


def test_float64_is_not_rounded():
    values = np.array([1e300, -5e-324, 1 + 2.0**-52, 2.0**-1060])
    assert FLOAT64.round(values).tobytes() == values.tobytes()


def test_the_largest_numbers_and_the_underflow_are_those_of_numpy():
    for name in ("float64", "float32", "float16"):
        info = np.finfo(name)
        assert DTYPES[name].largest == info.max
        smallest = info.tiny if name == "float32" else info.smallest_subnormal
        assert UNDERFLOW[name] == smallest
    assert BFLOAT16.largest == 255 * 2.0**120
    assert UNDERFLOW["bfloat16"] == UNDERFLOW["float32"]
