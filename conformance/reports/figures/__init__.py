"""Draw the attention weights of every head, the reference, and their difference as heat maps.

A `Picture` holds the numbers, in arrays with the axes `[entry row query key]`; a row is a head, or
the mean over heads. `heatmap` draws one map, and `figure.svg.j2` arranges the maps in a figure with
one row for each head. Only arrays are needed, so a report can draw from records. PNGs are rendered
by resvg, which is a single wheel without dependencies, unlike a browser or Cairo.
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
from jinja2 import Template
from markupsafe import Markup, escape

from conformance.errors import ConformanceError, WrongShape
from conformance.records.header import CaseInfo
from conformance.records.numbers import LIMIT, Array, BoolArray, ratios
from conformance.reports import wording
from conformance.reports.figures import heatmap
from conformance.reports.figures.heatmap import HeatGrid, HeatMap, heat_map, ticks
from conformance.reports.page import content_policy, environment
from conformance.text import short

FOLDER = Path(__file__).parent

FONTS = (
    "Helvetica, Arial, 'Liberation Sans', 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', "
    "sans-serif"
)
INK, PAPER = "#1d2126", "#ffffff"
"""The colours of text and background in a standalone figure; a page sets those of its figures."""

_LEFT, _GAP, _SIDE, _NARROWEST = 96, 26, 214, 118
"""The widths of labels, of gaps and of the text about a row, and the least width of a column."""

_WEIGHTS = [(heatmap.WEIGHT, (step + 1) / 20) for step in range(20)]
_CHANGES = [(heatmap.LESS, (10 - step) / 10) for step in range(10)]
_CHANGES += [(heatmap.MORE, (step + 1) / 10) for step in range(10)]


@dataclass(frozen=True)
class FigureSubject:
    """The item whose attention weights are drawn."""

    name: str
    case: str
    dtype: str
    mode: str
    device: str
    note: str = ""
    """A note below the figure, for example that the definition leaves the case open."""


class FigureRow(NamedTuple):
    """A numerical summary of one row of a picture: a head, or the mean over heads.

    Attributes:
        difference: the largest |got - want| of the cells where it is finite; 0 if there are none.
        ratio: the largest |got - want| / σ; infinite for NaN, and for a value that must be exact
            and is not.
        at: the query and the key with the largest ratio.
        leaks: the number of blocked pairs (query and key) with a finite weight above the underflow
            of the dtype.
        unreal: the number of cells that are NaN or infinite.
    """

    difference: float
    ratio: float
    at: tuple[int, int]
    leaks: int
    unreal: int

    @property
    def fits(self) -> bool:
        """Whether the weights are within the rounding noise of a correct implementation."""
        return self.ratio <= LIMIT


@dataclass(frozen=True, eq=False, kw_only=True)
class Picture:
    """Attention weights together with the reference.

    Attributes:
        got, want, noise: `[entry row query key]`; noise is σ, 0 for an element that must be exact.
        blocked: the same shape; True = this query may not attend to this key.
        entries: the indices, in the batch, of the entries that the arrays contain.
        batch: the number of all entries of the batch.
        averaged: whether the only row is the mean over heads.
        underflow: the absolute error that underflow in the dtype may cause in any element.
    """

    subject: FigureSubject
    got: Array
    want: Array
    noise: Array
    blocked: BoolArray
    entries: tuple[int, ...]
    batch: int
    averaged: bool
    underflow: float

    @cached_property
    def difference(self) -> Array:
        """The difference got - want; NaN where it is not finite."""
        with np.errstate(invalid="ignore"):
            error = self.got - self.want
        return np.where(np.isfinite(error), error, np.nan)

    @cached_property
    def ratio(self) -> Array:
        """The ratio |got - want| / σ."""
        return np.abs(ratios(self.got, self.want, self.noise, self.underflow))

    @cached_property
    def leaks(self) -> BoolArray:
        """The blocked pairs that have a finite weight above the underflow of the dtype."""
        return self.blocked & np.isfinite(self.got) & (np.abs(self.got) > self.underflow)

    @cached_property
    def _miss(self) -> Array:
        """The absolute `difference`, with infinity in place of NaN.

        Among elements with equal ratios, such as infinite ones, it tells which is the worst.
        """
        return np.nan_to_num(np.abs(self.difference), nan=np.inf)

    @property
    def furthest(self) -> int:
        """The index of the entry with the worst ratio; 0 if all are within the noise."""
        ratio = self.ratio.max(axis=(1, 2, 3))
        if ratio.max() <= LIMIT:
            return 0
        miss = self._miss.max(axis=(1, 2, 3))
        return max(range(len(ratio)), key=lambda entry: (ratio[entry], miss[entry]))

    @property
    def most(self) -> float:
        """The largest |difference| of all cells where it is finite; 0 if there are none."""
        return _largest(self.difference)

    def row(self, entry: int, row: int) -> FigureRow:
        """Return the summary of a row, given the indices of entry and row in the arrays."""
        ratio = self.ratio[entry, row]
        worst = np.where(ratio == ratio.max(), self._miss[entry, row], -1.0).argmax()
        query, key = np.unravel_index(int(worst), ratio.shape)
        return FigureRow(
            difference=_largest(self.difference[entry, row]),
            ratio=float(ratio[query, key]),
            at=(int(query), int(key)),
            leaks=int(self.leaks[entry, row].sum()),
            unreal=int((~np.isfinite(self.got[entry, row])).sum()),
        )


def picture(
    subject: FigureSubject,
    *,
    got: Array,
    want: Array,
    noise: Array,
    blocked: BoolArray,
    underflow: float,
    entry: int | None = None,
    every: bool = False,
) -> Picture:
    """Return a picture of attention weights.

    Args:
        subject: the item that the weights belong to.
        got, want, noise: the returned weights, the expected weights and σ, `[batch heads query
            key]`, or `[batch query key]` for the mean over heads.
        blocked: the same shape; True = this query may not attend to this key.
        underflow: the absolute error that underflow in the dtype may cause in any element.
        entry: the batch entry to show; by default the worst one, or 0 if all are within the noise.
        every: whether to show all batch entries instead of one.

    Raises:
        WrongShape: if the shapes of the arrays differ or are invalid, or the arrays are empty.
        ConformanceError: if there is no such batch entry.
    """
    shapes = {array.shape for array in (got, want, noise, blocked)}
    if len(shapes) > 1 or got.ndim not in (3, 4) or not got.size:
        listed = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise WrongShape(f"attention weights of shape {listed} cannot be drawn beside each other")
    averaged = got.ndim == 3
    if averaged:
        got, want, noise = got[:, None], want[:, None], noise[:, None]
        blocked = blocked[:, None]
    batch = got.shape[0]
    if entry is not None and not 0 <= entry < batch:
        raise ConformanceError(f"there is no batch entry {entry}; there are 0 to {batch - 1}")
    whole = Picture(
        subject=subject,
        got=got,
        want=want,
        noise=noise,
        blocked=blocked,
        entries=tuple(range(batch)),
        batch=batch,
        averaged=averaged,
        underflow=underflow,
    )
    if every:
        return whole
    chosen = whole.furthest if entry is None else entry
    one = slice(chosen, chosen + 1)
    return replace(
        whole,
        got=got[one],
        want=want[one],
        noise=noise[one],
        blocked=blocked[one],
        entries=(chosen,),
    )


def _largest(values: Array) -> float:
    return float(np.nan_to_num(np.abs(values), nan=0.0).max(initial=0.0))


# The figure


def svg(picture: Picture, *, name: str = "heads", alone: bool = True, headed: bool = True) -> str:
    """Return the figure as SVG.

    Args:
        picture: the data to show.
        name: prefix of the ids in the figure, which must differ between the figures of a page.
        alone: whether the figure sets its own text and background colours instead of those of the
            surrounding page.
        headed: whether to draw the title above the figure; it is always present as metadata.
    """
    grid = HeatGrid(*picture.got.shape[2:])
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
        headings=[short(picture.subject.name, longest), "reference", f"difference{times}"],
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
    """Return text as SVG, with raised digits for superscript characters, which many fonts lack."""

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
    words = ["mha-conformance", "heads", spec]
    words += ["--case", own.case, "--dtype", own.dtype, "--mode", own.mode]
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
    """Return lines that describe a row of the figure, the verdict first.

    `place` and `index` are the indices of the batch entry and the row in the picture's arrays.
    """
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


def _maps(picture: Picture, place: int, index: int) -> list[HeatMap]:
    at = (place, index)
    blocked, leaks = picture.blocked[at], picture.leaks[at]
    most = picture.most or 1.0
    unit = heatmap.exponent(picture.most)
    weights = (heatmap.WEIGHT, heatmap.LESS)
    changes = (heatmap.MORE, heatmap.LESS)
    return [
        HeatMap(picture.got[at], 1.0, weights, heatmap.cell, blocked, leaks),
        HeatMap(picture.want[at], 1.0, weights, heatmap.cell, blocked, np.zeros_like(leaks)),
        HeatMap(
            picture.difference[at],
            most,
            changes,
            lambda value: heatmap.signed(value / 10.0**unit),
            blocked,
            leaks,
        ),
    ]


def _swatches(picture: Picture, grid: HeatGrid) -> Iterator[tuple[Markup, str]]:
    """Yield the entries of the legend: a cell of each kind in the figure, with its meaning."""

    def one(value: float, *, blocked: bool = False, marked: bool = False) -> Markup:
        flags = (np.full((1, 1), flag) for flag in (blocked, marked))
        ink = (heatmap.WEIGHT, heatmap.LESS)
        shown = HeatMap(np.full((1, 1), value), 1.0, ink, lambda _: "", *flags)
        return Markup(
            '<svg viewBox="-1 -1 42 30" width="36" height="18" preserveAspectRatio="none">'
            f"{heat_map(HeatGrid(1, 1), shown)}</svg>"
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
    """Return the figure as an HTML page that fetches nothing and allows only its own style.

    The page also shows the description of the case, the command that draws the figure again, and
    the versions of packages, which are given by name.
    """
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
