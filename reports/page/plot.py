"""Where a ratio stands on a logarithmic axis: of the accuracy plot, and of a trend."""

from __future__ import annotations

import math
from typing import NamedTuple

from conformance.reports.model import Trend

LOWEST, HIGHEST = 0.1, 1000.0
MARGIN = 3.0
"""Per cent left free at both ends, for the marks themselves."""

TICKS = (0.1, 1.0, 10.0, 100.0, 1000.0)


def position(value: float) -> float:
    """Per cent of the axis; what is beyond the axis stands at its end."""
    inside = min(max(value, LOWEST), HIGHEST)
    share = math.log(inside / LOWEST) / math.log(HIGHEST / LOWEST)
    return round(MARGIN + (100 - 2 * MARGIN) * share, 2)


def beyond(value: float) -> bool:
    """Whether the axis ends before it."""
    return value > HIGHEST


MARKS = (
    "M-4 0A4 4 0 1 1 4 0A4 4 0 1 1-4 0Z",
    "M-3.6-3.6H3.6V3.6H-3.6Z",
    "M0-5L5 0L0 5L-5 0Z",
    "M0-4.6L4.6 3.6H-4.6Z",
)
"""A circle, a square, a diamond, a triangle: for lines that colour alone would not tell apart."""

WIDTH, HEIGHT, LEFT, BELOW = 640.0, 170.0, 44.0, 22.0


class Line(NamedTuple):
    """One dtype over the records: an SVG path, and the places of its marks with their values."""

    dtype: str
    mark: str
    path: str
    points: list[tuple[float, float, float]]


def across(index: int, count: int) -> float:
    """Where the record of this place stands; a little is left free at both ends."""
    wide = WIDTH - LEFT - 60
    return round(LEFT + 30 + (wide * index / (count - 1) if count > 1 else wide / 2), 1)


def height(value: float) -> float:
    """Where a ratio stands on the vertical axis."""
    return round((HEIGHT - BELOW) * (1 - position(value) / 100), 1)


def lines(trend: Trend) -> list[Line]:
    """The worst elements of a trend, a line for each dtype."""
    dtypes = list(dict.fromkeys(dtype for point in trend.points for dtype in point.worst))
    found = []
    for place, dtype in enumerate(dtypes):
        points = [
            (across(index, len(trend.points)), height(point.worst[dtype]), point.worst[dtype])
            for index, point in enumerate(trend.points)
            if dtype in point.worst
        ]
        path = "M" + "L".join(f"{x} {y}" for x, y, _ in points)
        found.append(Line(dtype, MARKS[place % len(MARKS)], path, points))
    return found
