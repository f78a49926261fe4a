"""Prose on a terminal: wrapped and indented, and text of strangers made harmless."""

from __future__ import annotations

import textwrap

from rich.console import Console

from conformance.terminal import printable

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
    """After an empty line."""
    console.print()
    line(console, text, style=style)


def plural(number: int, one: str, many: str = "") -> str:
    """ "1 case", "2 cases"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def some(names: list[str], most: int) -> str:
    """The first few, and how many more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
