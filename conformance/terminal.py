"""Text of strangers on a terminal: messages of implementations, and whatever a record says.

A control sequence could move the cursor, clear the screen or rename the window, and a bidirectional
mark could show a line backwards; so what does not print is shown as Python writes it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """What anybody prints goes to stderr, so that stdout holds the answer and nothing else."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            sys.__stdout__.flush()  # type: ignore[union-attr]
            kept = os.dup(1)
            os.dup2(2, 1)
        except (AttributeError, OSError, io.UnsupportedOperation):
            # There are no such descriptors: nothing can be written past Python either.
            yield
            return
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def printable(text: str) -> str:
    """The text with every character that does not print, but line feed, as an escape."""
    if text.isprintable():
        return text
    return "".join(
        char if char == "\n" or char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def relative(path: Path) -> str:
    """A path as somebody here would write it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
