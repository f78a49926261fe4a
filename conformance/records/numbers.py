"""The numbers of a record: in which formats, in which unit, and what is allowed."""

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
"""The dtypes, in the order of reports, with the absolute error of a result too small for them: the
smallest normal number where hardware flushes subnormals (float32, bfloat16), the spacing of
subnormals where it does not (float16, float64)."""

LIMIT = 8.0
"""κ of the rule |error| ≤ κσ. √(2 ln(N/p)) is 7.1 for 10⁶ elements and a false alarm in 10⁵."""

ACCURACY = {
    "A0": "float32 (or wider) throughout, one final rounding",
    "A": "logits, statistics and sums in float32; tensors and weights rounded to the dtype",
    "B": "every operation rounds to the dtype",
    "C": "as B, and the sums inside products too",
}
"""The accuracy classes, from the most accurate to the least, and what each rounds."""


def ratios(got: Array, want: Array, noise: Array, underflow: float) -> Array:
    """Return (got - want) / σ: 0 within the underflow, ±inf where an exact element differs.

    The arrays have one shape: `Float64[Array, "*axes"]`.
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = got - want
        ratio = error / noise
    ratio[np.abs(error) <= underflow] = 0.0
    ratio[np.isnan(ratio)] = np.inf
    return ratio
