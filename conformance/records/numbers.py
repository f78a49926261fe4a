"""Define what the numbers in a record mean: dtypes, errors in units of σ, limits, accuracy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

UNDERFLOW = {
    "float64": 2.0**-1074,
    "float32": 2.0**-126,
    "bfloat16": 2.0**-126,
    "float16": 2.0**-24,
}
"""The absolute error that underflow may cause, by dtype in the order of reports. It is the
smallest normal number where hardware flushes subnormals (float32, bfloat16), and the spacing of
subnormals elsewhere (float16, float64)."""

LIMIT = 8.0
"""The κ in the rule |error| ≤ κσ for each element of an array.

With 7.1 instead, there would be one false alarm in 10⁵ arrays of 10⁶ elements."""

ACCURACY = {
    "A0": "float32 (or wider) throughout, one final rounding",
    "A": "logits, statistics and sums in float32; tensors and weights rounded to the dtype",
    "B": "every operation rounds to the dtype",
    "C": "as B, and the sums inside products and the softmax's log-normaliser too",
    "TF32": "as A0, with the operands of matrix products rounded to TF32 (float32 only)",
}
"""The accuracy classes, in every dtype from most to least accurate, with what each rounds."""


def ratios(got: Array, want: Array, noise: Array, underflow: float) -> Array:
    """Return (got - want) / noise, the error of each element in units of its noise σ.

    The ratio has the sign of the error. It is 0 where |error| is at most `underflow`, and infinite
    where an element that should be exact (σ = 0) is not, or where the ratio would be NaN. All
    arrays have the same shape.
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = got - want
        ratio = error / noise
    ratio[np.abs(error) <= underflow] = 0.0
    ratio[np.isnan(ratio)] = np.inf
    return ratio
