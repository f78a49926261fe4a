"""Draw the attention weights of every head, the reference, and their difference as heat maps.

`picture` holds the numbers, `heatmap` draws one map, and `figure.svg.j2` arranges the maps in a
figure with one row for each head. Only arrays are needed, so a report can draw from records. PNGs
are rendered by resvg, which is a single wheel without dependencies, unlike a browser or Cairo.
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
from jinja2 import Template
from markupsafe import Markup, escape

from conformance.errors import ConformanceError
from conformance.records.header import CaseInfo
from conformance.records.numbers import LIMIT
from conformance.reports import wording
from conformance.reports.figures import heatmap
from conformance.reports.figures.heatmap import Grid, Map, heat_map, ticks
from conformance.reports.figures.picture import Picture
from conformance.reports.page import content_policy, environment

FOLDER = Path(__file__).parent

FONTS = "Helvetica, Arial, 'Liberation Sans', 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', "
FONTS += "sans-serif"
INK, PAPER = "#1d2126", "#ffffff"
"""The colours of text and background in a standalone figure; a page sets those of its figures."""

_LEFT, _GAP, _SIDE = 96, 26, 214
"""The widths of the labels, of the gap between columns, and of the text about a row."""
_NARROWEST = 118
"""The least width of a column, which its title needs."""

_WEIGHTS = [(heatmap.WEIGHT, (step + 1) / 20) for step in range(20)]
_CHANGES = [(heatmap.LESS, (10 - step) / 10) for step in range(10)]
_CHANGES += [(heatmap.MORE, (step + 1) / 10) for step in range(10)]


def svg(picture: Picture, *, name: str = "heads", alone: bool = True, headed: bool = True) -> str:
    """Return the figure as SVG.

    Args:
        picture: the data to show.
        name: prefix of the ids in the figure, which must differ between the figures of a page.
        alone: whether the figure sets its own text and background colours instead of those of the
            surrounding page.
        headed: whether to draw the title above the figure; it is always present as metadata.
    """
    grid = Grid(*picture.got.shape[2:])
    column = max(grid.width, _NARROWEST)
    pitch = column + _GAP
    unit = heatmap.exponent(picture.most)
    times = f" ×10{wording.superscript(unit)}" if unit and grid.has_text else ""
    longest = int((pitch - _GAP / 2) / 7.2)
    drawn = _template().render(
        picture=picture,
        grid=grid,
        name=name,
        alone=alone,
        headed=headed,
        title=title(picture),
        how=how(picture),
        sentences=sentences(picture),
        headings=[wording.short(picture.subject.name, longest), "reference", f"difference{times}"],
        about=lambda place, index: _about(picture, place, index),
        maps=lambda place, index: [
            Markup(heat_map(grid, shown)) for shown in _maps(picture, place, index)
        ],
        swatches=list(_swatches(picture, grid)),
        most=heatmap.number(picture.most),
        width=max(_LEFT + 3 * pitch + _SIDE, 700),
        pitch=pitch,
        side=_LEFT + 2 * pitch + column + 18,
        ticks=ticks,
        weights=_WEIGHTS,
        changes=_CHANGES,
        LEFT=_LEFT,
        FONTS=Markup(FONTS),
        INK=INK,
        PAPER=PAPER,
    )
    return drawn + "\n"


@cache
def _template() -> Template:
    made = environment(FOLDER)
    made.filters |= {"at": heatmap.at, "raised": _raised}
    return made.get_template("figure.svg.j2")


_RAISED = re.compile("([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)([^⁻⁰¹²³⁴⁵⁶⁷⁸⁹]*)")
_PLAIN = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "−0123456789")


def _raised(text: str) -> Markup:
    """Replace superscript characters, which many fonts lack, by raised digits."""

    def drawn(match: re.Match[str]) -> str:
        down = f'<tspan dy="4">{match[2]}</tspan>' if match[2] else ""
        return f'<tspan dy="-4" font-size="8.5">{match[1].translate(_PLAIN)}</tspan>{down}'

    return Markup(_RAISED.sub(drawn, str(escape(text))))


def title(picture: Picture) -> str:
    """Return a one-line title with the implementation and the case."""
    return f"{picture.subject.name}: attention weights of {picture.subject.case}"


def again(picture: Picture, spec: str, file: str, entry: str = "") -> str:
    """Return the command that draws the picture into a file.

    `entry` is the batch entry to draw; "" means the first one in the picture.
    """
    own = picture.subject
    words = ["mha-conformance", "heads", spec, "--case", own.case, "--dtype", own.dtype]
    words += ["--mode", own.mode]
    if own.device != "cpu":
        words += ["--device", own.device]
    return shlex.join([*words, "--entry", entry or str(picture.entries[0]), "-o", file])


def sentences(picture: Picture) -> list[str]:
    """Describe the figure in sentences, for screen readers and for the terminal."""
    lines = []
    for place, entry in enumerate(picture.entries):
        for index in range(picture.got.shape[1]):
            row = "mean over heads" if picture.averaged else f"head {index}"
            about = "; ".join(_about(picture, place, index))
            lines.append(f"Batch entry {entry}, {row}: {about}.")
    return lines


def how(picture: Picture) -> str:
    """Return a line with the dtype, mode, device and batch entries."""
    own = picture.subject
    entries = (
        f"batch entry {picture.entries[0]} of {picture.batch}"
        if len(picture.entries) == 1
        else f"all {picture.batch} batch entries"
    )
    return f"{own.dtype}, mode {own.mode}, on {own.device}; {entries}"


def _about(picture: Picture, place: int, index: int) -> list[str]:
    """Return lines that describe a row of the figure, the verdict first."""
    row = picture.row(place, index)
    if row.fits:
        lines = [f"within noise: {wording.ratio(row.ratio)}σ of {LIMIT:.0f}σ allowed"]
    elif row.unreal:
        lines = [f"beyond noise: {row.unreal} of {picture.got[0, 0].size} cells are no numbers"]
    elif np.isinf(row.ratio):
        lines = ["beyond noise: ∞σ, since zero has to be exact"]
    else:
        lines = [f"beyond noise: {wording.ratio(row.ratio)}σ, allowed {LIMIT:.0f}σ"]
    lines.append(f"max |difference| {heatmap.number(row.difference)}")
    if not row.fits:
        lines.append(f"worst at query {row.at[0]}, key {row.at[1]}")
    if row.leaks:
        lines.append(f"blocked, but not zero: {row.leaks}")
    return lines


def _maps(picture: Picture, place: int, index: int) -> list[Map]:
    at = (place, index)
    blocked, leaks = picture.blocked[at], picture.leaks[at]
    most = picture.most or 1.0
    unit = heatmap.exponent(picture.most)
    weights = (heatmap.WEIGHT, heatmap.LESS)
    changes = (heatmap.MORE, heatmap.LESS)
    return [
        Map(picture.got[at], 1.0, weights, heatmap.cell, blocked, leaks),
        Map(picture.want[at], 1.0, weights, heatmap.cell, blocked, np.zeros_like(leaks)),
        Map(
            picture.difference[at],
            most,
            changes,
            lambda value: heatmap.signed(value / 10.0**unit),
            blocked,
            leaks,
        ),
    ]


def _swatches(picture: Picture, grid: Grid) -> Iterator[tuple[Markup, str]]:
    """Yield the entries of the legend: a cell of each kind in the figure, with its meaning."""

    def one(value: float, *, blocked: bool = False, marked: bool = False) -> Markup:
        flags = (np.full((1, 1), flag) for flag in (blocked, marked))
        ink = (heatmap.WEIGHT, heatmap.LESS)
        shown = Map(np.full((1, 1), value), 1.0, ink, lambda _: "", *flags)
        return Markup(
            '<svg viewBox="-1 -1 42 30" width="36" height="18" preserveAspectRatio="none">'
            f"{heat_map(Grid(1, 1), shown)}</svg>"
        )

    if picture.blocked.any():
        yield one(0, blocked=True), "blocked: this query may not attend this key"
    if picture.leaks.any():
        yield one(0.4, blocked=True, marked=True), "a leak: blocked, and the weight is not zero"
    if not np.isfinite(picture.got).all():
        text = "NaN" if np.isnan(picture.got).any() else "∞"
        yield one(np.nan), f"{text}: no number{'' if grid.has_text else ', crossed'}"
    if (picture.got < 0).any():
        rectangle = f'<rect width="36" height="18" fill="{heatmap.LESS}"/>'
        yield Markup(rectangle), "a negative weight"


SCALE = 2
"""The pixels per unit of length: sharp on high-resolution screens and in print."""

_LETTERS = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">'
    f'<text y="15" font-family="{FONTS}">{{}}</text></svg>'
)


def page(picture: Picture, case: CaseInfo, command: str, versions: Mapping[str, str]) -> str:
    """Return the figure as an HTML page that fetches nothing and allows only its own style."""
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    return (
        environment(FOLDER)
        .get_template("page.html.j2")
        .render(
            title=title(picture),
            how=how(picture),
            case=case,
            name=picture.subject.case,
            figure=svg(picture, alone=False, headed=False),
            sentences=sentences(picture),
            command=command,
            versions=versions,
            style=style,
            policy=content_policy(style),
        )
    )


def renderer() -> ModuleType:
    """Return the resvg library; raises `ConformanceError` if it is not installed."""
    try:
        return importlib.import_module("resvg_py")
    except ImportError as error:
        raise ConformanceError(
            "drawing a PNG needs resvg_py: pip install resvg_py, or write .svg"
        ) from error


def png(drawing: str, **options: object) -> bytes:
    """Return a figure as a PNG.

    Args:
        drawing: an SVG that sets its own text and background colours.
        options: options of the resvg library, such as `skip_system_fonts`.

    Raises:
        ConformanceError: if the library is not installed, or no font is available.
    """
    library = renderer()
    # Without a font, the library leaves out all text without any warning.
    if _render(library, _LETTERS.format("M"), options) == _render(
        library, _LETTERS.format(" "), options
    ):
        raise ConformanceError(
            "a PNG needs a font, and none is installed here; install one, such as DejaVu Sans, "
            "or write .svg"
        )
    return _render(library, drawing, {"zoom": SCALE, **options})


def _render(library: ModuleType, svg: str, options: dict[str, object]) -> bytes:
    return bytes(library.svg_to_bytes(svg_string=svg, **options))
