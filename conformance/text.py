"""Words for people: text of strangers made harmless, prose on a terminal, names of axes.

A control sequence could move the cursor, clear the screen or rename the window, and a bidirectional
mark could show a line backwards; so what does not print is shown as Python writes it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect everything that is printed to stderr, so that stdout holds only the answer."""
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
    """Return the text with each unprintable character escaped, except line feeds."""
    if text.isprintable():
        return text
    return "".join(
        char if char == "\n" or char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def relative(path: Path) -> str:
    """Return a path relative to the working directory where that is shorter."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


WIDTH = 88
"""Longer lines are hard to read."""


def paragraph(
    console: Console, text: str, *, indent: int = 2, bullet: str = "", style: str = ""
) -> None:
    """Print it wrapped; names with hyphens stay whole, so that they can be copied."""
    filled = textwrap.fill(
        printable(text),
        min(console.width, WIDTH),
        initial_indent=" " * indent + bullet,
        subsequent_indent=" " * (indent + len(bullet)),
        break_on_hyphens=False,
        break_long_words=False,
    )
    line(console, filled, style=style)


def line(console: Console, text: str, *, indent: int = 0, style: str = "") -> None:
    """Print it as it is, however long: commands and links, to be copied."""
    told = " " * indent + printable(text)
    console.print(told, markup=False, highlight=False, soft_wrap=True, style=style or None)


def heading(console: Console, text: str, style: str = "bold") -> None:
    """Print a heading after an empty line."""
    console.print()
    line(console, text, style=style)


def plural(number: int, one: str, many: str = "") -> str:
    """Return a count with its noun: "1 case", "2 cases"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def some(names: list[str], most: int) -> str:
    """Return the first few items, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


INPUTS = {"query": "query", "key": "key", "value": "key"}
_WEIGHTS = {
    "query": ("in", "head", "component"),
    "key": ("in", "head", "component"),
    "value": ("in", "head", "component"),
    "output": ("head", "component", "out"),
    "output_bias": ("out",),
}


def axes(array: str, count: int) -> tuple[str, ...]:
    """Return the axis names of an array such as "gradient.weights.key"; () if unknown."""
    name = array.removeprefix("gradient.")
    if array == "output":
        found: tuple[str, ...] = ("batch", "query", "component")
    elif array in ("weights", "row sums") or name == "attn_bias":
        found = ("batch", "head", "query", "key")
        if array == "weights" and count == 3:
            found = ("batch", "query", "key")
        if array == "row sums":
            found = found[:-1] if count == 3 else ("batch", "query")
    elif name in INPUTS:
        found = ("batch", INPUTS[name], "component")
    else:
        found = _WEIGHTS.get(name.removeprefix("weights."), ("head", "component"))
    return found if len(found) == count else ()


def element(array: str, index: Sequence[int]) -> str:
    """Return one element as text, such as "output[batch 2, query 1, component 4]"."""
    names = axes(array, len(index))
    told = (f"{n} {i}" for n, i in zip(names, index, strict=True)) if names else map(str, index)
    return f"{array}[{', '.join(told)}]"
