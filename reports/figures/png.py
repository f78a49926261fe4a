"""SVG to PNG, with resvg: one wheel without dependencies, where browsers and Cairo are many."""

from __future__ import annotations

import importlib
from types import ModuleType

from conformance.errors import ConformanceError

SCALE = 2
"""Pixels per unit: sharp on today's screens and in print."""

_LETTERS = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">'
    '<text y="15" font-family="sans-serif">{}</text></svg>'
)


def renderer() -> ModuleType:
    """The library; raises `ConformanceError` where it is not installed."""
    try:
        return importlib.import_module("resvg_py")
    except ImportError as error:
        raise ConformanceError(
            "drawing a PNG needs resvg_py: pip install resvg_py, or write .svg"
        ) from error


def png(svg: str, **options: object) -> bytes:
    """The picture.

    Args:
        svg: a figure with ink and paper of its own.
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
    return _render(library, svg, {"zoom": SCALE, **options})


def _render(library: ModuleType, svg: str, options: dict[str, object]) -> bytes:
    return bytes(library.svg_to_bytes(svg_string=svg, **options))
