"""An attention pattern as a small heat map: orange is the future, crossed is NaN."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

CELL = 13
PER_CENT = 100


def pattern(weights: Sequence[Sequence[float | None]], told: str) -> Markup:
    """SVG of weights `[query key]` under a causal mask; `told` is its text for those who hear it.

    Presentation attributes and classes of the page only, so any content security policy lets it
    pass.
    """
    rows, columns = len(weights), max((len(row) for row in weights), default=0)
    width, height = columns * CELL + 2, rows * CELL + 2
    cells = []
    for i, row in enumerate(weights):
        for j, weight in enumerate(row):
            x, y = 1 + j * CELL, 1 + i * CELL
            kind = "ahead" if j > i else "past"
            if weight is None:
                cells.append(Markup(_NAN).format(x=x, y=y, to=x + CELL - 1, down=y + CELL - 1))
                continue
            cells.append(
                Markup(_CELL).format(
                    kind=kind if weight > 0 else "none",
                    x=x,
                    y=y,
                    size=CELL - 1,
                    # A small weight must still be seen, since any is one too many in the future.
                    opacity=round(0.25 + 0.75 * min(max(weight, 0.0), 1.0), 2) if weight else 1,
                    query=i,
                    key=j,
                    weight=f"{weight:.2g}",
                )
            )
    return Markup(
        '<svg class="pattern" role="img" aria-label="{told}" width="{w}" height="{h}" '
        'viewBox="0 0 {w} {h}">{cells}</svg>'
    ).format(told=told, w=width, h=height, cells=Markup("").join(cells))


_CELL = (
    '<rect class="{kind}" x="{x}" y="{y}" width="{size}" height="{size}" opacity="{opacity}">'
    "<title>query {query}, key {key}: {weight}</title></rect>"
)
_NAN = '<path class="lost" d="M{x} {y}L{to} {down}M{to} {y}L{x} {down}"><title>NaN</title></path>'
