"""The floating-point formats of a problem, and rounding to them without any framework.

The floating-point arrays of a `Problem` are NumPy float64. An array "in bfloat16" is a float64
array that holds only numbers that bfloat16 can represent. NumPy is therefore the only dependency,
although it has no bfloat16, and converting to a framework's array of the same format is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from conformance.errors import UnknownName
from conformance.records.numbers import UNDERFLOW

Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


class Wide(np.ndarray):
    """An array of float64 that is passed to an implementation as it is.

    Other arrays of float64 stand for arrays in the dtype of the problem.
    """


@dataclass(frozen=True)
class DType:
    """One floating-point format.

    `significand_bits` include the implicit leading bit.
    `roundoff` is the unit roundoff u: rounding to nearest changes x by at most u·|x|, unless the
    result underflows or overflows.
    `underflow` is the absolute error of a result that underflows: the smallest normal number if
    hardware flushes subnormals (float32, bfloat16), or else the spacing of subnormals (float16,
    float64).
    `accumulator` is the unit roundoff of the format in which matrix products sum their terms.
    """

    name: str
    significand_bits: int
    underflow: float
    accumulator: float

    @property
    def roundoff(self) -> float:
        """The unit roundoff u = 2^-p for p significand bits."""
        return 2.0**-self.significand_bits

    @property
    def largest(self) -> float:
        """The largest finite number that the format represents."""
        exponent = {"float64": 1024, "float16": 16}.get(self.name, 128)
        return (2 - 2.0 ** (1 - self.significand_bits)) * 2.0 ** (exponent - 1)

    def round(self, values: npt.ArrayLike) -> Array:
        """Return the nearest numbers that the format represents (ties to even), as float64.

        Numbers beyond its range become infinite.
        """
        exact = np.asarray(values, dtype=np.float64)
        if self.name == "float64":
            return exact.copy()
        if self.name == "float32":
            return exact.astype(np.float32).astype(np.float64)
        if self.name == "float16":
            return exact.astype(np.float16).astype(np.float64)
        # bfloat16 has float32's exponents and 8 significand bits. Rounding directly from float64
        # avoids double rounding; below 2^-126 the spacing is that of the subnormals.
        _, exponent = np.frexp(exact)
        spacing = np.ldexp(1.0, np.maximum(exponent, -125) - self.significand_bits)
        with np.errstate(invalid="ignore"):
            rounded = np.rint(exact / spacing) * spacing
            return np.where(np.abs(rounded) >= 2.0**128, np.copysign(np.inf, exact), rounded)


FLOAT64 = DType("float64", 53, UNDERFLOW["float64"], 2.0**-53)
FLOAT32 = DType("float32", 24, UNDERFLOW["float32"], 2.0**-24)
BFLOAT16 = DType("bfloat16", 8, UNDERFLOW["bfloat16"], 2.0**-24)
FLOAT16 = DType("float16", 11, UNDERFLOW["float16"], 2.0**-24)

DTYPES = {dtype.name: dtype for dtype in (FLOAT64, FLOAT32, BFLOAT16, FLOAT16)}


def dtype_of(name: str) -> DType:
    """Return the format with this name; raise `UnknownName` if there is none."""
    if name not in DTYPES:
        raise UnknownName("dtype", name, DTYPES)
    return DTYPES[name]
