"""Where a ratio stands on the logarithmic axis of the accuracy plot, in per cent of its width."""

from __future__ import annotations

import math

LOWEST, HIGHEST = 0.1, 1000.0
MARGIN = 3.0
"""Per cent left free at both ends, for the marks themselves."""

TICKS = (0.1, 1.0, 10.0, 100.0, 1000.0)


def position(value: float) -> float:
    """Per cent from the left; what is beyond the axis stands at its end."""
    inside = min(max(value, LOWEST), HIGHEST)
    share = math.log(inside / LOWEST) / math.log(HIGHEST / LOWEST)
    return round(MARGIN + (100 - 2 * MARGIN) * share, 2)


def beyond(value: float) -> bool:
    """Whether the axis ends before it."""
    return value > HIGHEST
