"""Draw heads into a file: .svg, .png or .html, as its name says."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from conformance.cases.told import tell
from conformance.errors import ConformanceError, ExitCode
from conformance.frameworks.base import package_versions
from conformance.reports.figures.drawing import again, svg, told
from conformance.reports.figures.files import page, png, renderer
from conformance.running.weights import Question, Seen, ask

SUFFIXES = (".svg", ".png", ".html")


def draw(question: Question, output: Path) -> int:
    """Ask, draw, write, and say in a few lines what there is to see.

    Returns:
        `OK`, whatever is seen: a drawing is no verdict.

    Raises:
        ConformanceError: see `ask`; or the file cannot be written. Then there is no file, or what
            was there before.
    """
    check_output(output)
    seen = ask(question)
    replace(output, render(seen, question, output))
    for line in told(seen.picture):
        print(line)
    print(f"drawn: {output}")
    return ExitCode.OK


def check_output(output: Path) -> None:
    """Raise `ConformanceError` unless a figure can be written there; better before the work."""
    if output.suffix not in SUFFIXES:
        raise ConformanceError(
            f"{output}: the name says which format, {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        )
    if output.is_dir():
        raise ConformanceError(f"{output}: is a folder; name a file in it")
    try:
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise ConformanceError(
            f"{output}: cannot be written ({error.strerror}); name another place"
        ) from error
    if output.suffix == ".png":
        renderer()


def render(seen: Seen, question: Question, output: Path) -> bytes:
    """The file's content."""
    if output.suffix == ".html":
        versions = package_versions(("mha-conformance", "numpy")) | seen.adapter.versions()
        command = again(seen.picture, question.implementation, output.name, question.entry)
        return page(seen.picture, tell(seen.case), command, versions).encode()
    figure = svg(seen.picture)
    return png(figure) if output.suffix == ".png" else figure.encode()


def replace(output: Path, content: bytes) -> None:
    """Write the whole file or nothing."""
    temporary = output.with_name(f"{output.name}.{os.getpid()}.new")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, output)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConformanceError(
            f"{output}: cannot be written ({error.strerror}); name another place"
        ) from error
