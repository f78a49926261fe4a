"""Draw one heat map of queries by keys as SVG elements.

Colours have an opacity through which the background shows, so that the same figure is legible on a
white and on a dark page. No meaning is conveyed by colour alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from conformance.records.numbers import Array, BoolArray
from conformance.reports.wording import superscript

# From numbers to colours and words

WEIGHT = "#1b69ad"
"""The colour of an attention weight, fully opaque at 1."""
MORE, LESS = "#ae4a08", "#7a4fb5"
"""The colours of more and of less weight than the reference has; the second also marks negative
weights. Colour-blind people can tell the two apart too."""
UNREAL = "#a3195b"
"""The colour of a cell that is not a finite number."""

WHITE_ABOVE = 0.82
"""The opacity of a cell above which its text is white, to be legible on light and on dark pages."""

STEPS = 50
"""The number of shades: finer ones cannot be told apart and would only make files larger."""


def shade(value: float, most: float) -> float:
    """Return the opacity for |value|: 1 if it is `most` or more, and above 0 unless it is 0.

    If `most` is 0, the opacity is 0 for every value.
    """
    if value == 0 or most <= 0:
        return 0.0
    step = round(min(1.0, abs(value) / most) * STEPS)
    return max(1, step) / STEPS


def exponent(most: float) -> int:
    """Return an n such that differences up to `most` have few digits in units of 10^n."""
    if most == 0 or 0.01 <= most < 100:
        return 0
    return math.floor(math.log10(most))


def cell(value: float) -> str:
    """Return a number as short text for a cell; only zero becomes "0"."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    size = abs(value)
    if size < 0.005 or size >= 1000:
        mantissa, power = f"{size:.0e}".split("e")
        text = f"{mantissa}e{'−' * (int(power) < 0)}{abs(int(power))}"
    else:
        text = f"{size:.2f}" if size < 10 else f"{size:.0f}"
    return f"−{text}" if value < 0 else text


def signed(value: float) -> str:
    """Return a difference as text for a cell, with a sign unless it is 0 or NaN."""
    text = cell(value)
    return f"+{text}" if value > 0 else text


def number(value: float) -> str:
    """Return a number as text for a sentence, with about three significant digits.

    Numbers from 1000 to 99,999 are rounded to integers, and infinite ones are "∞".
    """
    if math.isinf(value):
        return "∞"
    if value == 0:
        return "0"
    power = math.floor(math.log10(abs(value)))
    if -3 <= power < 5:
        return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
    digits, _, power_of_ten = f"{value:.2e}".partition("e")
    return f"{digits}×10{superscript(int(power_of_ten))}" if power > -308 else f"{value:.2g}"


# The map

TEXT_UP_TO = 8
"""The most queries and keys for which a map shows numbers in its cells."""

MOST_TICKS = 14

PATTERN = 112
"""The height in pixels of a small map in a table."""


@dataclass(frozen=True)
class HeatGrid:
    """The numbers of queries and keys of a heat map, and the sizes in pixels that follow from them.

    All heat maps of a figure have the same sizes.
    """

    queries: int
    keys: int

    @property
    def has_text(self) -> bool:
        """Whether cells are large enough for numbers."""
        return max(self.queries, self.keys) <= TEXT_UP_TO

    @property
    def cell_width(self) -> float:
        """The width of one cell."""
        return 40.0 if self.has_text else round(min(24.0, max(3.4, 320.0 / self.keys)), 1)

    @property
    def cell_height(self) -> float:
        """The height of one cell, which may exceed its width if there are few queries."""
        if self.has_text:
            return 28.0
        return round(min(max(self.cell_width, 190.0 / self.queries), 24.0, 3 * self.cell_width), 1)

    @property
    def width(self) -> float:
        """The width of the map."""
        return round(self.keys * self.cell_width, 1)

    @property
    def height(self) -> float:
        """The height of the map."""
        return round(self.queries * self.cell_height, 1)


@dataclass(frozen=True, eq=False)
class HeatMap:
    """The content of one heat map.

    Attributes:
        values: `[query key]`.
        most: the |value| that is drawn in full colour.
        inks: the colours of positive and of negative values.
        text: function that formats a value as text.
        blocked: `[query key]`; True = hatched.
        marked: `[query key]`; True = framed, because a blocked pair has a weight.
    """

    values: Array
    most: float
    inks: tuple[str, str]
    text: Callable[[float], str]
    blocked: BoolArray
    marked: BoolArray


def heat_map(grid: HeatGrid, shown: HeatMap) -> str:
    """Return the SVG elements of a heat map whose upper left corner is at 0, 0."""
    parts = [*_fills(grid, shown), _hatch(grid, shown.blocked), _frame(grid)]
    parts.append(_marks(grid, shown.marked))
    if grid.has_text:
        parts.append(_numbers(grid, shown))
    else:
        parts.append(_crosses(grid, shown.values))
    return "".join(parts)


def pattern(weights: Sequence[Sequence[float | None]], words: str) -> Markup:
    """Return a small SVG picture of weights `[query key]` under a causal mask; None = not finite.

    Keys ahead of a query are hatched, and framed if they have a positive weight nevertheless.
    `words` is the description for screen readers.
    """
    values = np.array([[np.nan if weight is None else weight for weight in row] for row in weights])
    ahead = np.triu(np.ones(values.shape, np.bool_), 1)
    leaks = ahead & (values > 0)
    grid = HeatGrid(*values.shape)
    shown = HeatMap(values, 1.0, (WEIGHT, LESS), cell, ahead, leaks)
    scale = PATTERN / grid.height
    return Markup(
        '<svg class="pattern" role="img" aria-label="{words}" width="{width}" height="{height}" '
        'viewBox="-1 -1 {across} {down}" fill="currentColor">{drawn}</svg>'
    ).format(
        words=words,
        width=round(grid.width * scale),
        height=PATTERN,
        across=at(grid.width + 2),
        down=at(grid.height + 2),
        drawn=Markup(heat_map(grid, shown)),
    )


def ticks(count: int) -> list[int]:
    """Return which indices of an axis of length `count` have labels: at most `MOST_TICKS`."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if count <= s * MOST_TICKS)
    return list(range(0, count, step))


def _fills(grid: HeatGrid, shown: HeatMap) -> Iterable[str]:
    """Yield one path for each colour and shade.

    One rectangle for each cell would take ten times the space.
    """
    paths: dict[tuple[str, float], list[str]] = defaultdict(list)
    width, height = grid.cell_width, grid.cell_height
    for (query, key), value in np.ndenumerate(shown.values):
        ink, opacity = _colour(shown, float(value))
        if opacity:
            x, y = at(key * width), at(query * height)
            paths[ink, opacity].append(f"M{x} {y}h{at(width)}v{at(height)}h-{at(width)}z")
    for (ink, opacity), cells in sorted(paths.items()):
        yield (
            f'<path fill="{ink}" fill-opacity="{at(opacity)}" shape-rendering="crispEdges" '
            f'd="{"".join(cells)}"/>'
        )


def _colour(shown: HeatMap, value: float) -> tuple[str, float]:
    if not np.isfinite(value):
        return UNREAL, 1.0
    return shown.inks[value < 0], shade(value, shown.most)


def _hatch(grid: HeatGrid, blocked: BoolArray) -> str:
    """Return an SVG path of diagonals over blocked cells; they continue those of adjacent cells."""
    width, height = grid.cell_width, grid.cell_height
    shares = (0.5, 1.0) if grid.has_text else (1.0,)
    lines = []
    for query, key in np.argwhere(blocked):
        x, y = key * width, query * height
        for share in shares:
            w, h = share * width, share * height
            lines.append(f"M{at(x)} {at(y + h)}l{at(w)} {at(-h)}")
            if share < 1:
                lines.append(f"M{at(x + width - w)} {at(y + height)}l{at(w)} {at(-h)}")
    stroke = 1 if grid.has_text else 0.6
    return _stroke(lines, "currentColor", stroke, 'stroke-opacity=".3" ')


def _frame(grid: HeatGrid) -> str:
    lines = []
    if grid.has_text:
        lines += [f"M{at(k * grid.cell_width)} 0v{at(grid.height)}" for k in range(1, grid.keys)]
        lines += [f"M0 {at(q * grid.cell_height)}h{at(grid.width)}" for q in range(1, grid.queries)]
    return _stroke(lines, "currentColor", 1, 'stroke-opacity=".13" ') + (
        f'<rect width="{at(grid.width)}" height="{at(grid.height)}" fill="none" '
        'stroke="currentColor" stroke-opacity=".45"/>'
    )


def _marks(grid: HeatGrid, marked: BoolArray) -> str:
    width, height = grid.cell_width, grid.cell_height
    stroke = 2.0 if grid.has_text else 0.8
    inset = stroke / 2
    lines = []
    for query, key in np.argwhere(marked):
        x, y = at(key * width + inset), at(query * height + inset)
        w, h = at(width - stroke), at(height - stroke)
        lines.append(f"M{x} {y}h{w}v{h}h-{w}z")
    return _stroke(lines, MORE, stroke)


def _crosses(grid: HeatGrid, values: Array) -> str:
    """Return crosses over cells that are not finite, for maps without room for text."""
    width, height = grid.cell_width, grid.cell_height
    lines = []
    for query, key in np.argwhere(~np.isfinite(values)):
        x, y = key * width, query * height
        lines.append(f"M{at(x)} {at(y)}l{at(width)} {at(height)}")
        lines.append(f"M{at(x + width)} {at(y)}l{at(-width)} {at(height)}")
    return _stroke(lines, "#fff", 0.8)


def _numbers(grid: HeatGrid, shown: HeatMap) -> str:
    dark: list[str] = []
    light: list[str] = []
    for (query, key), value in np.ndenumerate(shown.values):
        # The hatch alone stands for zero here, so that a leak stands out.
        if value == 0 and shown.blocked[query, key]:
            continue
        x, y = (key + 0.5) * grid.cell_width, (query + 0.5) * grid.cell_height + 3.7
        text = f'<text x="{at(x)}" y="{at(y)}">{shown.text(float(value))}</text>'
        opaque = _colour(shown, float(value))[1] > WHITE_ABOVE
        (light if opaque else dark).append(text)
    start = '<g font-size="10.5" text-anchor="middle" fill='
    return "".join(
        f'{start}"{ink}">{"".join(texts)}</g>'
        for ink, texts in (("currentColor", dark), ("#fff", light))
        if texts
    )


def _stroke(lines: list[str], ink: str, width: float, more: str = "") -> str:
    if not lines:
        return ""
    return (
        f'<path fill="none" stroke="{ink}" stroke-width="{at(width)}" {more}d="{"".join(lines)}"/>'
    )


def at(value: float) -> str:
    """Return a coordinate or an opacity as text, with at most two decimal places."""
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"
