"""The history of a project: a line of JSON for each run, and a figure of the trend.

A CI system keeps the file, and every run appends to it. A line contains counts of items instead of
findings, so a history of years is small and does not depend on the records it was made from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import msgspec

from conformance.errors import ConformanceError
from conformance.reports.ci.summary import KNOWN, Source
from conformance.reports.wording import SYMBOLS
from conformance.reports.writing import write_file
from conformance.text import printable

COMMIT = ("GITHUB_SHA", "CI_COMMIT_SHA")
"""The environment variables in which CI services name the commit."""

COLOURS = {
    "conforms": "#1f6f3d",
    "observed": "#7ba8d0",
    KNOWN: "#c9a227",
    "deviates": "#b3372a",
    "other": "#6b4f8a",
    "unsupported": "#d5d8dc",
}
"""The colours of a bar from bottom to top; errors, crashes and missing outcomes are "other"."""

MOST = 60
"""The most runs to show in the figure; the file keeps all of them."""

_LEFT, _TOP, _BAR, _GAP, _HEIGHT, _ROW = 170, 44, 9, 2, 36, 54


class Point(msgspec.Struct, frozen=True):
    """One run in the history.

    Attributes:
        created: when the newest record of the run was made.
        commit: the commit of the project, or "".
        suite: the version of the suite.
        selection: the options that narrowed the run, or "".
        seconds: the total time of all items.
        implementations: the number of items with each verdict, by the name of the implementation,
            followed by "on DEVICE" unless the device is the CPU.
    """

    created: str
    commit: str
    suite: str
    selection: str
    seconds: float
    implementations: dict[str, dict[str, int]]


def point(source: Source) -> Point:
    """Return the history entry of a run."""
    made = [record.header.provenance for record in source.records]
    return Point(
        created=max(one.created for one in made),
        commit=next((os.environ[name] for name in COMMIT if os.environ.get(name)), ""),
        suite=", ".join(sorted({one.suite for one in made})),
        selection="; ".join(dict.fromkeys(one.selection for one in made if one.selection)),
        seconds=round(sum(item.result.seconds for item in source.items), 1),
        implementations={
            one.name + ("" if device == "cpu" else f" on {device}"): source.counts(one.name, device)
            for record, one in source.implementations
            for device in [record.header.provenance.device]
        },
    )


def read_history(path: Path) -> list[Point]:
    """Return the runs in a history file, the oldest first; [] if the file does not exist.

    Raises:
        ConformanceError: if the file cannot be read, or a line is not a valid entry.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConformanceError(f"{path}: cannot be read ({error.strerror})") from error
    points = []
    for number, line in enumerate(lines, 1):
        try:
            points.append(msgspec.json.decode(line, type=Point))
        except msgspec.MsgspecError as error:
            raise ConformanceError(f"{path}: line {number} is no run: {error}") from error
    return points


def append(path: Path, source: Source) -> list[Path]:
    """Append a run to the history unless it is already the last entry, and redraw the trend.

    Returns:
        The paths of the history and of the figure.
    """
    points = read_history(path)
    now = point(source)
    if not points or points[-1] != now:
        write_file(path, msgspec.json.encode(now) + b"\n", append=True)
        points.append(now)
    figure = path.with_suffix(".svg")
    write_file(figure, trend(points).encode())
    return [path, figure]


def trend(points: Sequence[Point]) -> str:
    """Return an SVG figure with one row for each implementation and one bar for each run.

    There must be at least one point; only the last `MOST` are shown.
    """
    shown = points[-MOST:]
    names = list(dict.fromkeys(name for one in reversed(shown) for name in one.implementations))
    width = _LEFT + max(len(shown), 24) * (_BAR + _GAP) + 250
    body = []
    for row, name in enumerate(names):
        top = _TOP + row * _ROW
        highest = max(sum(one.implementations.get(name, {}).values()) for one in shown) or 1
        body.append(_text(8, top + _HEIGHT, name))
        for at, one in enumerate(shown):
            body += _bar(one, name, _LEFT + at * (_BAR + _GAP), top + _HEIGHT, highest)
        last = shown[-1].implementations.get(name)
        told = _counts(last) if last else "not in the last run"
        body.append(_text(_LEFT + len(shown) * (_BAR + _GAP) + 6, top + _HEIGHT, told))
    first, last_day = shown[0].created[:10], shown[-1].created[:10]
    heading = f"Items by verdict, {len(shown)} runs, {first} to {last_day}"
    height = _TOP + len(names) * _ROW + 24
    for place, (verdict, colour) in enumerate(COLOURS.items()):
        left = _LEFT + place * 92
        body.append(f'<rect x="{left}" y="{height - 20}" width="9" height="9" fill="{colour}"/>')
        body.append(_text(left + 13, height - 11, f"{SYMBOLS.get(verdict, '')} {verdict}".strip()))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11" role="img"><title>{escape(heading)}</title>'
        f'<rect width="100%" height="100%" fill="white"/>{_text(8, 22, heading, 15)}'
        f"{''.join(body)}</svg>\n"
    )


def _bar(one: Point, name: str, left: int, bottom: float, highest: int) -> list[str]:
    """Return the stacked bar of one run as SVG, with its date, commit and counts in a tooltip.

    Return [] if the run has no counts for the implementation `name`.
    """
    counts = one.implementations.get(name)
    if not counts:
        return []
    commit = f", {one.commit[:10]}" if one.commit else ""
    title = escape(printable(f"{one.created[:16]}{commit}: {_counts(counts)}"))
    parts = [f"<g><title>{title}</title>"]
    for kind, colour in COLOURS.items():
        number = sum(
            times
            for verdict, times in counts.items()
            if (verdict if verdict in COLOURS else "other") == kind
        )
        if number:
            # Even one item of thousands remains visible.
            size = max(2.0, _HEIGHT * number / highest)
            bottom -= size
            parts.append(
                f'<rect x="{left}" y="{bottom:.1f}" width="{_BAR}" height="{size:.1f}" '
                f'fill="{colour}"/>'
            )
    return ["".join(parts) + "</g>"]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{times:,} {verdict}" for verdict, times in counts.items())


def _text(left: int, top: float, text: str, size: int = 11) -> str:
    return f'<text x="{left}" y="{top}" font-size="{size}">{escape(printable(text))}</text>'
