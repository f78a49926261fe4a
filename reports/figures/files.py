"""The figure as a file: a page with what was asked and how to draw it again, or a PNG.

PNGs are drawn by resvg: one wheel without dependencies, where browsers and Cairo are many.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from conformance.errors import ConformanceError
from conformance.records.header import CaseInfo
from conformance.reports.figures.drawing import how, svg, title, told
from conformance.reports.figures.picture import Picture

HERE = Path(__file__).parent

SCALE = 2
"""Pixels per unit: sharp on today's screens and in print."""

_LETTERS = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">'
    '<text y="15" font-family="sans-serif">{}</text></svg>'
)


def page(picture: Picture, case: CaseInfo, command: str, versions: Mapping[str, str]) -> str:
    """Return one HTML file that fetches nothing; its policy allows its own style alone."""
    style = (HERE / "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        title=title(picture),
        how=how(picture),
        case=case,
        name=picture.subject.case,
        figure=svg(picture, alone=False, headed=False),
        told=told(picture),
        command=command,
        versions=versions,
        style=style,
        policy="default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src 'sha256-{digest}'",
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
