"""Draw the error in σ against sequence length, with a line for each implementation.

There is a row of panels for each dtype, with a panel for each array. The last panel of a row shows
the time per token; if there is only one implementation, it also shows the time that the suite's own
computation takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from xml.sax.saxutils import escape

from conformance.records.long import Climb, array_title
from conformance.records.numbers import LIMIT
from conformance.text import printable

ARRAYS = ("output", "query", "key", "value")
_COST, _OWN = "µs per token", "the suite's own"
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 190, 140, 84, 60, 46
_COLOURS = ("#0b5394", "#b45f06", "#38761d", "#741b47", "#990000", "#1f7a7a", "#7f6000", "#444444")
_DASHES = ("", "6 3", "2 2", "8 2 2 2", "1 4", "12 3", "4 1")
_MOST = 1e6
"""The largest error, in σ, to draw to scale; larger ones are drawn at this value."""

Points = Iterator[tuple[str, int, float]]
"""Triples of the name of an implementation, a length, and a number to draw there."""

Lines = Mapping[str, Mapping[int, float]]
"""Numbers by implementation and then by length."""


def plot(climbs: Sequence[Climb]) -> str:
    """Return an SVG figure of the errors and times of implementations on long sequences."""
    names = [climb.implementation.name for climb in climbs]
    styles = dict(zip([*names, _OWN], _styles(), strict=False))
    dtypes = list(dict.fromkeys(step.dtype for climb in climbs for step in climb.steps))
    lengths = sorted({n for climb in climbs for n in climb.lengths})
    title = "Largest error in σ over length"
    title = f"{printable(names[0])}: {title[0].lower()}{title[1:]}" if len(names) == 1 else title
    body = [f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>']
    for row, dtype in enumerate(dtypes):
        top = _TOP + row * (_HEIGHT + _GAP)
        body.append(f'<text x="8" y="{top + 12}" font-weight="bold">{escape(dtype)}</text>')
        panels = {array_title(name): _largest(_errors(climbs, dtype, name)) for name in ARRAYS}
        panels[_COST] = _largest(_costs(climbs, dtype))
        for place, (heading, lines) in enumerate(panels.items()):
            left = _LEFT + place * (_WIDTH + _GAP)
            body += _panel(heading, lines, lengths, styles, left, top)
    bottom = _TOP + len(dtypes) * (_HEIGHT + _GAP)
    body += _legend([*names, _OWN] if len(names) == 1 else names, styles, bottom)
    width = _LEFT + (len(ARRAYS) + 1) * (_WIDTH + _GAP)
    height = bottom + 16 * -(-(len(names) + 1) // 6) + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="10" role="img"><title>{escape(title)}</title>'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(body)}</svg>\n'
    )


def _largest(points: Points) -> Lines:
    """Return the largest of the given numbers for each implementation and length."""
    found: dict[str, dict[int, float]] = {}
    for name, length, value in points:
        line = found.setdefault(name, {})
        line[length] = max(line.get(length, 0.0), value)
    return found


def _errors(climbs: Iterable[Climb], dtype: str, array: str) -> Points:
    for climb in climbs:
        for step in climb.steps:
            for seen in step.seen:
                if (step.dtype, seen.array) == (dtype, array):
                    yield climb.implementation.name, step.length, min(seen.largest, _MOST)


def _costs(climbs: Sequence[Climb], dtype: str) -> Points:
    for climb in climbs:
        for step in climb.steps:
            if step.dtype == dtype and step.seen:
                yield climb.implementation.name, step.length, 1e6 * step.called / step.length
                if len(climbs) == 1:
                    yield _OWN, step.length, 1e6 * step.own / step.length


def _styles() -> Iterable[str]:
    """Yield line styles without end; they vary first in colour and then in dashes."""
    for number, colour in enumerate(cycle(_COLOURS)):
        dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
        yield f'stroke="{colour}" stroke-dasharray="{dash}" fill="none"'


def _panel(
    heading: str,
    lines: Lines,
    lengths: Sequence[int],
    styles: Mapping[str, str],
    left: int,
    top: int,
) -> list[str]:
    right, bottom, limit = left + _WIDTH, top + _HEIGHT, None if heading == _COST else LIMIT
    body = [f'<text x="{left}" y="{top - 8}">{escape(heading)}</text>']
    values = [value for line in lines.values() for value in line.values() if value > 0]
    if not values:
        return [*body, f'<text x="{left + 8}" y="{top + 40}">nothing was compared</text>']
    x = _scale(math.log2(lengths[0]), math.log2(lengths[-1]), left + 14, right - 14)
    low = math.floor(math.log10(max(1e-3, min([*values, limit or 1e9]))))
    high = max(low + 1, math.ceil(math.log10(max([*values, limit or 0.0]))))
    y = _scale(low, high, bottom, top)
    for decade in range(low, high + 1):
        at = y(decade)
        body.append(
            f'<line x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#dddddd"/>'
            f'<text x="{left - 4}" y="{at + 3:.1f}" text-anchor="end">{10.0**decade:g}</text>'
        )
    for length in lengths:
        at = x(math.log2(length))
        body.append(
            f'<text x="{at:.1f}" y="{bottom + 13}" text-anchor="middle">{_short(length)}</text>'
        )
    if limit is not None:
        at = y(math.log10(limit))
        body.append(
            f'<line x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#cc0000"/>'
            f'<text x="{right - 3}" y="{at - 3:.1f}" text-anchor="end" fill="#cc0000">'
            f"{limit:g}σ</text>"
        )
    for name, line in lines.items():
        points = [
            (x(math.log2(length)), y(math.log10(max(value, 10.0**low))))
            for length, value in sorted(line.items())
        ]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        said = f"<title>{escape(printable(name))}</title>"
        body.append(
            f'<g {styles[name]}>{said}<polyline points="{path}" stroke-width="1.3"/>'
            + "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="1.8"/>' for a, b in points)
            + "</g>"
        )
    return body


def _legend(names: Sequence[str], styles: Mapping[str, str], top: int) -> list[str]:
    body = []
    for number, name in enumerate(names):
        left, at = _LEFT + number % 6 * 196, top + 16 * (number // 6)
        body.append(
            f'<line x1="{left}" x2="{left + 28}" y1="{at}" y2="{at}" {styles[name]}/>'
            f'<text x="{left + 34}" y="{at + 4}">{escape(printable(name))}</text>'
        )
    return body


def _short(length: int) -> str:
    """Return a length as short text, such as "4096" or "64Ki"."""
    return f"{length // 1024}Ki" if length >= 2**14 and length % 1024 == 0 else str(length)


def _scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (stop - start)
