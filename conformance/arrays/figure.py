"""Draw |error| / σ over queries and components of the worst head, wrong parts outlined, as SVG."""

from __future__ import annotations

import html
from collections.abc import Mapping

import msgspec
import numpy as np

from conformance.definition.dtypes import Array

MOST = 64
"""The most cells of a map along each axis; a cell shows the largest of its numbers."""

CELL, WIDEST = 7, 640
FONTS = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
WRONG, RIGHT = "#c0392b", "#2f6db5"


class ErrorMap(msgspec.Struct, frozen=True):
    """|error| / σ of one head, the largest of each cell.

    Attributes:
        entry: the batch entry.
        head: the head.
        queries: the number of queries.
        components: the number of components.
        limit: the largest ratio that is right.
        cells: the ratios, in rows of queries; at most 1e6.
    """

    entry: int
    head: int
    queries: int
    components: int
    limit: float
    cells: list[list[float]]


def pooled(ratio: Array, rows: np.ndarray, queries: int) -> Array:
    """Return the cells of some rows of a head, `[query component]`; others are 0.

    Args:
        ratio: |error| / σ of the rows, `[rows component]`.
        rows: their indices.
        queries: the number of all rows.
    """
    count, width = min(MOST, queries), min(MOST, ratio.shape[1])
    cells = np.zeros((count, width))
    at = (
        (rows * count // queries)[:, None],
        np.arange(ratio.shape[1])[None] * width // ratio.shape[1],
    )
    np.maximum.at(cells, at, np.minimum(ratio, 1e6))
    return cells


def worst(maps: Mapping[tuple[int, int], Array], shape: tuple[int, int], limit: float) -> ErrorMap:
    """Return the map of the worst head.

    Args:
        maps: the cells of heads, by batch entry and head.
        shape: the numbers of queries and of components.
        limit: the largest ratio that is right.
    """
    (entry, head), cells = max(maps.items(), key=lambda it: float(it[1].max(initial=0)))
    numbers = [[float(f"{it:.3g}") for it in row] for row in cells]
    return ErrorMap(entry, head, *shape, limit, numbers)


def of_ratios(ratio: Array, limit: float) -> ErrorMap:
    """Return the map of the worst head, given all ratios `[batch heads query component]`."""
    entry, head = (int(it) for it in np.unravel_index(int(ratio.argmax()), ratio.shape)[:2])
    queries = ratio.shape[2]
    cells = pooled(ratio[entry, head], np.arange(queries), queries)
    return worst({(entry, head): cells}, (queries, ratio.shape[3]), limit)


def svg(of: ErrorMap) -> str:
    """Return the figure as SVG, without style, script or anything that is fetched."""
    cells = np.array(of.cells)
    height, width = (CELL * size for size in cells.shape)
    wrong = cells > of.limit
    body = []
    for (row, column), value in np.ndenumerate(cells):
        # Noise is pale; beyond it, every factor of ten is darker.
        strength = 0.3 * value / of.limit
        if wrong[row, column]:
            strength = min(1.0, 0.4 + 0.15 * float(np.log10(value / of.limit)))
        ink = WRONG if wrong[row, column] else RIGHT
        body.append(
            f'<rect x="{column * CELL}" y="{row * CELL}" width="{CELL}" height="{CELL}" '
            f'fill="{ink}" fill-opacity="{strength:.2f}"/>'
        )
    padded = np.pad(wrong, 1)
    down, across = np.nonzero(padded[1:, 1:-1] != padded[:-1, 1:-1])
    path = [f"M{x * CELL} {y * CELL}h{CELL}" for y, x in zip(down, across, strict=True)]
    down, across = np.nonzero(padded[1:-1, 1:] != padded[1:-1, :-1])
    path += [f"M{x * CELL} {y * CELL}v{CELL}" for y, x in zip(down, across, strict=True)]
    title = (
        f"|error| / σ of batch entry {of.entry}, head {of.head}: "
        f"{of.queries} queries down, {of.components} components across; "
        f"red is beyond {of.limit:g}σ"
    )
    width, height = max(width, WIDEST) + 4, height + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="-2 -20 {width} {height}" '
        f'width="{width}" height="{height}" font-family="{FONTS}" font-size="11">'
        f"<title>{html.escape(title)}</title>"
        f'<rect x="-2" y="-20" width="100%" height="100%" fill="#ffffff"/>'
        f'<text y="-7" fill="#1d2126">{html.escape(title)}</text>'
        f'<g shape-rendering="crispEdges">{"".join(body)}</g>'
        f'<path d="{"".join(path)}" fill="none" stroke="#1d2126" stroke-width="1.2"/></svg>\n'
    )
