"""The figure: rows are heads; columns are the implementation, the reference, their difference.

One SVG for all: as a file, in a page, in the report, and under a PNG. It has presentation
attributes only, no style, no script and nothing that is fetched, so any content security policy
lets it pass; everything that is not ours is escaped. PNGs are drawn by resvg: one wheel without
dependencies, where browsers and Cairo are many.
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Mapping
from html import escape
from pathlib import Path
from types import ModuleType

import numpy as np

from conformance.errors import ConformanceError
from conformance.records.header import CaseInfo
from conformance.records.numbers import LIMIT
from conformance.reports import wording
from conformance.reports.figures import heatmap
from conformance.reports.figures.heatmap import Grid, Map, heat_map, ticks
from conformance.reports.figures.picture import Picture, Row
from conformance.reports.page import content_policy, environment

FONTS = "Helvetica, Arial, 'Liberation Sans', 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', "
FONTS += "sans-serif"
INK, PAPER = "#1d2126", "#ffffff"
"""Of a figure that stands alone; inside a page it has the page's."""

_LEFT, _GAP, _SIDE = 96, 26, 214
"""Width of the labels, between the columns, and of what is said about a row."""
_BELOW = 40
"""Height of the key axis under a map, and the space to the next."""
_LINE = 16
_RAISED = re.compile("([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)([^⁻⁰¹²³⁴⁵⁶⁷⁸⁹]*)")
_PLAIN = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "−0123456789")
_NARROWEST = 118
"""A column's title needs this much."""


def svg(picture: Picture, *, name: str = "heads", alone: bool = True, headed: bool = True) -> str:
    """Return the figure.

    Args:
        picture: what it shows.
        name: prefix of the ids in it: different for each figure of a page.
        alone: whether it brings its own ink and paper, or takes those of the page around it.
        headed: whether its title stands over it, besides being in it.
    """
    grid = Grid(*picture.got.shape[2:])
    body: list[str] = []
    down = 62.0 if headed else 8.0
    for place, entry in enumerate(picture.entries):
        if len(picture.entries) > 1:
            down += 18 if place else 0
            body.append(_text(0, down + 4, f"batch entry {entry}", size=13, weight=700))
            down += 24
        drawn, down = _entry(picture, place, grid, down)
        body += drawn
    drawn, down = _legend(picture, grid, down + 6)
    body += drawn
    width, height = _width(grid), down + 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f'viewBox="-16 -16 {width + 32:.0f} {height + 32:.0f}" width="{width + 32:.0f}" '
        f'height="{height + 32:.0f}" font-family="{FONTS}" font-size="12" fill="currentColor" '
        f'aria-labelledby="{name}-title {name}-desc"' + (f' color="{INK}"' if alone else "") + ">"
        f'<title id="{name}-title">{escape(title(picture))}</title>'
        f'<desc id="{name}-desc">{escape(" ".join(sentences(picture)))}</desc>'
        + (f'<rect x="-16" y="-16" width="100%" height="100%" fill="{PAPER}"/>' if alone else "")
        + (_head(picture, width) if headed else "")
        + "".join(body)
        + "</svg>\n"
    )


def title(picture: Picture) -> str:
    """Return in one line which implementation answered what."""
    return f"{picture.subject.name}: attention weights of {picture.subject.case}"


def again(picture: Picture, spec: str, file: str, entry: str = "") -> str:
    """Return the command that draws it; by default, `entry` is the batch entry that it shows."""
    own = picture.subject
    words = ["mha-conformance", "heads", spec, "--case", own.case, "--dtype", own.dtype]
    words += ["--mode", own.mode]
    if own.device != "cpu":
        words += ["--device", own.device]
    return shlex.join([*words, "--entry", entry or str(picture.entries[0]), "-o", file])


def sentences(picture: Picture) -> list[str]:
    """Return the figure in sentences: for those who hear it, and for the terminal."""
    lines = []
    for place, entry in enumerate(picture.entries):
        for index in range(picture.got.shape[1]):
            row = picture.row(place, index)
            where = f"Batch entry {entry}, {row_name(picture, index)}:"
            lines.append(f"{where} {'; '.join(_about(picture, row))}.")
    return lines


def row_name(picture: Picture, index: int) -> str:
    """Return the name of a row."""
    return "mean over heads" if picture.averaged else f"head {index}"


def _head(picture: Picture, width: float) -> str:
    return _text(
        0, 14, wording.short(title(picture), int(width / 8.4)), size=16, weight=700
    ) + _text(0, 34, wording.short(how(picture), int(width / 6.2)), soft=True)


def how(picture: Picture) -> str:
    """Return in one line the dtype, mode, device and batch entries."""
    own = picture.subject
    entries = (
        f"batch entry {picture.entries[0]} of {picture.batch}"
        if len(picture.entries) == 1
        else f"all {picture.batch} batch entries"
    )
    return f"{own.dtype}, mode {own.mode}, on {own.device}; {entries}"


def _about(picture: Picture, row: Row) -> list[str]:
    """Return a description of a row, the verdict first."""
    if row.fits:
        lines = [f"within noise: {heatmap.sigmas(row.ratio)} of {LIMIT:.0f}σ allowed"]
    elif row.unreal:
        lines = [f"beyond noise: {row.unreal} of {picture.got[0, 0].size} cells are no numbers"]
    elif np.isinf(row.ratio):
        lines = ["beyond noise: ∞σ, since zero has to be exact"]
    else:
        lines = [f"beyond noise: {heatmap.sigmas(row.ratio)}, allowed {LIMIT:.0f}σ"]
    lines.append(f"max |difference| {heatmap.number(row.difference)}")
    if not row.fits:
        lines.append(f"worst at query {row.at[0]}, key {row.at[1]}")
    if row.leaks:
        lines.append(f"blocked, but not zero: {row.leaks}")
    return lines


# Layout


def _pitch(grid: Grid) -> float:
    """Return the distance from one column to the next."""
    return max(grid.width, _NARROWEST) + _GAP


def _width(grid: Grid) -> float:
    return max(_LEFT + 3 * _pitch(grid) + _SIDE, 700.0)


def _entry(picture: Picture, place: int, grid: Grid, down: float) -> tuple[list[str], float]:
    """Draw all heads of one batch entry, from `down` on; return also where they end."""
    pitch = _pitch(grid)
    unit = heatmap.exponent(picture.most)
    times = f" ×10{wording.superscript(unit)}" if unit and grid.has_text else ""
    longest = int((pitch - _GAP / 2) / 7.2)
    names = (wording.short(picture.subject.name, longest), "reference", f"difference{times}")
    drawn = [
        _text(_LEFT + column * pitch, down, name, weight=700) for column, name in enumerate(names)
    ]
    down += 10
    for index in range(picture.got.shape[1]):
        drawn += _row(picture, place, index, grid, down)
        lines = len(_about(picture, picture.row(place, index)))
        down += max(grid.height + _BELOW, lines * _LINE + 24)
    return drawn, down


def _row(picture: Picture, place: int, index: int, grid: Grid, down: float) -> list[str]:
    """Draw one head: three maps with their axes, and what is said about them."""
    drawn = [_heading(picture, index, grid, down)]
    for column, shown in enumerate(_maps(picture, place, index)):
        left = _LEFT + column * _pitch(grid)
        drawn.append(f'<g transform="translate({left:g} {down:g})">')
        drawn += [heat_map(grid, shown), *_axes(grid, first=column == 0), "</g>"]
    left = _LEFT + 2 * _pitch(grid) + max(grid.width, _NARROWEST) + 18
    verdict, *others = _about(picture, picture.row(place, index))
    kind, _, rest = verdict.partition(": ")
    drawn.append(_text(left, down + 12, kind, weight=700))
    drawn += [
        _text(left, down + 12 + _LINE * line, text, size=11.5, soft=True)
        for line, text in enumerate([rest, *others], start=1)
    ]
    return drawn


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


def _heading(picture: Picture, index: int, grid: Grid, down: float) -> str:
    middle = down + grid.height / 2
    if not picture.averaged:
        return _text(0, middle + 4, row_name(picture, index), weight=700)
    return _text(0, middle - 4, "mean over", weight=700) + _text(
        0, middle + 12, "heads", weight=700
    )


def _axes(grid: Grid, *, first: bool) -> list[str]:
    """Draw the indices along both axes; those of the queries once, since rows share them."""
    drawn = ['<g font-size="10" fill-opacity=".75">', '<g text-anchor="middle">']
    drawn += [
        f'<text x="{(key + 0.5) * grid.cell_width:g}" y="{grid.height + 12:g}">{key}</text>'
        for key in ticks(grid.keys)
    ]
    drawn.append(f'<text x="{grid.width / 2:g}" y="{grid.height + 25:g}">key</text>')
    drawn.append("</g>")
    if first:
        drawn.append('<g text-anchor="end">')
        drawn += [
            f'<text x="-5" y="{(query + 0.5) * grid.cell_height + 3.5:g}">{query}</text>'
            for query in ticks(grid.queries)
        ]
        drawn.append("</g>")
        middle = grid.height / 2
        drawn.append(
            f'<text transform="translate(-26 {middle:g}) rotate(-90)" text-anchor="middle">'
            "query</text>"
        )
    return [*drawn, "</g>"]


def _legend(picture: Picture, grid: Grid, down: float) -> tuple[list[str], float]:
    """Draw both scales, and every mark that occurs."""
    most = picture.most
    drawn = _scale(0, down, [(heatmap.WEIGHT, (step + 1) / 20) for step in range(20)])
    drawn += _ends(0, down, ("0", "attention weight", "1"))
    if most:
        inks = [(heatmap.LESS, (10 - step) / 10) for step in range(10)]
        inks += [(heatmap.MORE, (step + 1) / 10) for step in range(10)]
        drawn += _scale(250, down, inks)
        end = heatmap.number(most)
        drawn += _ends(250, down, (f"−{end}", "less | more", f"+{end}"))
        drawn.append(_text(470, down + 10, "difference: implementation − reference", soft=True))
    else:
        drawn.append(_text(250, down + 10, "No difference at all.", soft=True))
    down += 46
    for swatch, meaning in _swatches(picture, grid):
        drawn += [f'<g transform="translate(0 {down:g})">{swatch}</g>']
        drawn.append(_text(48, down + 12, meaning, soft=True))
        down += 24
    if picture.subject.note:
        drawn.append(_text(0, down + 8, picture.subject.note, soft=True))
        down += 20
    return drawn, down


def _swatches(picture: Picture, grid: Grid) -> list[tuple[str, str]]:
    """Return a cell of each kind that is in the figure, with its meaning."""
    small = Grid(1, 1)
    size = 'viewBox="-1 -1 42 30" width="36" height="18"'
    yes, no = np.ones((1, 1), np.bool_), np.zeros((1, 1), np.bool_)

    def one(value: float, blocked: bool, marked: bool) -> str:
        values = np.full((1, 1), value)
        flags = (yes if blocked else no, yes if marked else no)
        shown = Map(values, 1.0, (heatmap.WEIGHT, heatmap.LESS), lambda _: "", *flags)
        return f'<svg {size} preserveAspectRatio="none">{heat_map(small, shown)}</svg>'

    swatches = []
    if picture.blocked.any():
        swatches.append((one(0, True, False), "blocked: this query may not attend this key"))
    if picture.leaks.any():
        swatches.append((one(0.4, True, True), "a leak: blocked, and the weight is not zero"))
    if not np.isfinite(picture.got).all():
        text = "NaN" if np.isnan(picture.got).any() else "∞"
        sign = "" if grid.has_text else ", crossed"
        swatches.append((one(np.nan, False, False), f"{text}: no number{sign}"))
    if (picture.got < 0).any():
        swatches.append(
            (f'<rect width="36" height="18" fill="{heatmap.LESS}"/>', "a negative weight")
        )
    return swatches


def _scale(left: float, down: float, inks: list[tuple[str, float]]) -> list[str]:
    step = 200 / len(inks)
    cells = [
        f'<rect x="{left + step * place:g}" y="{down:g}" width="{step:g}" height="12" '
        f'fill="{ink}" fill-opacity="{opacity:g}" shape-rendering="crispEdges"/>'
        for place, (ink, opacity) in enumerate(inks)
    ]
    frame = f'<rect x="{left:g}" y="{down:g}" width="200" height="12" fill="none" '
    return [*cells, frame + 'stroke="currentColor" stroke-opacity=".45"/>']


def _ends(left: float, down: float, texts: tuple[str, str, str]) -> list[str]:
    anchors = ("start", "middle", "end")
    return [
        _text(left + 100 * place, down + 27, text, size=11, anchor=anchor, soft=True)
        for place, (text, anchor) in enumerate(zip(texts, anchors, strict=True))
    ]


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: float = 12,
    weight: int = 400,
    anchor: str = "",
    soft: bool = False,
) -> str:
    own = f' font-size="{size:g}"' if size != 12 else ""
    own += f' font-weight="{weight}"' if weight != 400 else ""
    own += f' text-anchor="{anchor}"' if anchor else ""
    own += ' fill-opacity=".8"' if soft else ""
    return f'<text x="{x:g}" y="{y:g}"{own}>{_RAISED.sub(_raised, escape(text))}</text>'


def _raised(match: re.Match[str]) -> str:
    """Draw exponents higher: few fonts have all of the characters for them."""
    plain, after = match[1].translate(_PLAIN), match[2]
    down = f'<tspan dy="4">{after}</tspan>' if after else ""
    return f'<tspan dy="-4" font-size="8.5">{plain}</tspan>{down}'


SCALE = 2
"""Pixels per unit: sharp on today's screens and in print."""

_LETTERS = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">'
    '<text y="15" font-family="sans-serif">{}</text></svg>'
)


def page(picture: Picture, case: CaseInfo, command: str, versions: Mapping[str, str]) -> str:
    """Return one HTML file that fetches nothing; its policy allows its own style alone."""
    folder = Path(__file__).parent
    style = (folder / "page.css").read_text(encoding="utf-8")
    return (
        environment(folder)
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
    """Return the library; raises `ConformanceError` where it is not installed."""
    try:
        return importlib.import_module("resvg_py")
    except ImportError as error:
        raise ConformanceError(
            "drawing a PNG needs resvg_py: pip install resvg_py, or write .svg"
        ) from error


def png(drawing: str, **options: object) -> bytes:
    """Return a figure as a PNG.

    Args:
        drawing: an SVG with ink and paper of its own.
        options: to the library, such as `skip_system_fonts`.

    Raises:
        ConformanceError: the library, or any font that it could write with, is not there.
    """
    library = renderer()
    # Without a font it leaves all text out, and says nothing.
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
