"""Text output: escaping of untrusted text, paragraphs and progress bars, names of axes.

A control sequence could move the cursor, clear the screen or rename the window, and a bidirectional
mark could reverse a line. `printable` therefore turns unprintable characters into Python escapes.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect everything printed in the `with` body to stderr, so that stdout has only the result.

    If stdout and stderr have file descriptors, this includes what C code and child processes print.
    """
    with contextlib.redirect_stdout(sys.stderr):
        try:
            sys.__stdout__.flush()  # type: ignore[union-attr]
            kept = os.dup(1)
            os.dup2(2, 1)
        except (AttributeError, OSError, io.UnsupportedOperation):
            # Without file descriptors, nothing can be printed outside Python's streams.
            yield
            return
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def printable(text: str) -> str:
    """Return the text with Python escapes for unprintable characters other than line feeds."""
    if text.isprintable():
        return text
    return "".join(
        char if char == "\n" or char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def short(text: str, most: int = 120) -> str:
    """Return a text, cut off with an ellipsis if it is longer than `most` characters.

    It is cut between words, unless that would leave less than two thirds of it.
    """
    if len(text) <= most:
        return text
    cut = text[: max(1, most - 1)]
    words = cut if text[len(cut)].isspace() else cut.rpartition(" ")[0]
    return (words if len(words) > 2 * most / 3 else cut).rstrip(" .,;:") + "…"


def text_of(error: BaseException) -> str:
    """Return the text of an exception from foreign code, whose `__str__` may itself raise.

    If `__str__` raises, the returned text says that the text cannot be read.
    """
    try:
        return str(error)
    except Exception as failure:
        return f"its text cannot be read: {type(failure).__name__}"


def is_exhausted(error: BaseException) -> bool:
    """Return whether an exception says that memory ran out, be it the host's or a device's."""
    signs = ("out of memory", "Out of memory", "RESOURCE_EXHAUSTED")
    return isinstance(error, MemoryError) or any(sign in text_of(error) for sign in signs)


def message(error: BaseException) -> str:
    """Return the text of an exception from foreign code as one line; "" if it has no text."""
    return " ".join(text_of(error).split())


def one_line(error: BaseException) -> str:
    """Return an exception as one line of text, with the place that raised it.

    The place is the innermost line outside this suite; it is left out if there is none.
    """
    frames = traceback.extract_tb(error.__traceback__)
    suite = f"{Path(__file__).parent}{os.sep}"
    outside = [frame for frame in frames if not frame.filename.startswith(suite)]
    place = f" (at {Path(outside[-1].filename).name}:{outside[-1].lineno})" if outside else ""
    return f"{type(error).__name__}: {message(error)[:300]}{place}"


def relative(path: Path) -> str:
    """Return a path as text; an absolute path inside the working directory becomes relative."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


WIDTH = 88
"""The maximum line length of paragraphs, which only a single long word can exceed."""


def paragraph(
    console: Console, text: str, *, indent: int = 2, bullet: str = "", style: str = ""
) -> None:
    """Print a wrapped paragraph; hyphenated names are not split, so that they can be copied.

    `bullet` is put before the first line, and the other lines are indented by its length.
    """
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
    """Print a line, such as a command or link that users copy, without wrapping it."""
    text = " " * indent + printable(text)
    console.print(text, markup=False, highlight=False, soft_wrap=True, style=style or None)


def heading(console: Console, text: str, style: str = "bold") -> None:
    """Print a heading after an empty line."""
    console.print()
    line(console, text, style=style)


def plural(number: int, one: str, many: str = "") -> str:
    """Return a count with its noun, such as "2,000 cases"; `many` is an irregular plural."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def some(names: list[str], most: int) -> str:
    """Return the first `most` names and the number of the rest, if any: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# Progress bars

Advance = Callable[..., None]
"""`advance(text="", steps=1, free=False)` reports that `steps` more steps are done.

`text` names the next step; if it is "", the bar keeps showing the previous name. With `free`, the
steps took no time.
"""

_silenced = False


def silence_progress() -> None:
    """Disable progress bars, as --quiet requires."""
    global _silenced
    _silenced = True


def shows_progress() -> bool:
    """Return whether to show progress bars: if stderr is a terminal, but not in CI or with --quiet.

    A terminal that cannot erase text, according to the variable TERM, gets no bars either.
    """
    dumb = os.environ.get("TERM") in ("dumb", "unknown")
    return bool(
        not (_silenced or dumb or os.environ.get("CI"))
        # sys.stderr may be replaced while output is captured; bars go to the real one.
        and sys.__stderr__ is not None
        and sys.__stderr__.isatty()
    )


class Pace:
    """An estimate of the time that the rest of some steps takes, from the time of those done.

    Args:
        total: the number of steps.
        free: how many of them take no time, such as items whose results are reused.
    """

    def __init__(self, total: int, free: int = 0) -> None:
        self._began = time.monotonic()
        self._left = total - free
        self._done = 0

    @property
    def elapsed(self) -> float:
        """The number of seconds since the first step began."""
        return time.monotonic() - self._began

    def advance(self, steps: int = 1) -> None:
        """Count steps that took time as done."""
        self._done += steps
        self._left -= steps

    def left(self) -> str:
        """Return the time left as text, such as "about 3 min left"; "" if it is not known yet."""
        if not self._done or self._left <= 0 or self.elapsed < SOON:
            return ""
        return f"about {_duration(self.elapsed / self._done * self._left)} left"


SOON = 2.0
"""The number of seconds for which `Pace` gives no estimate, because it would be too rough."""


def _duration(seconds: float) -> str:
    if seconds < 58:
        return f"{max(5 * round(seconds / 5), 5)} s"
    if seconds < 58 * 60:
        return f"{max(round(seconds / 60), 1)} min"
    return f"{seconds / 3600:.1f} h"


BESIDE_BAR = 36
"""The most characters of the text beside a progress bar."""


@contextmanager
def progress(text: str, total: int | None = None, free: int = 0) -> Iterator[Advance]:
    """Show a progress bar while the `with` body runs, and yield a function that advances the bar.

    The bar is written to stderr and erased at the end. In CI, with --quiet, or if stderr is no
    terminal or a dumb one, no bar is shown, so that logs contain only results.

    `total` is the number of steps, of which `free` take no time. Without it, the bar only shows
    that the program is running, and for how long.
    """
    if not shows_progress():
        yield lambda text="", steps=1, free=False: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    pace = Pace(total or 0, free)
    # With a count, all columns together fit into 80 characters.
    counted = (BarColumn(bar_width=12), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    timed = (BarColumn(bar_width=24), TimeElapsedColumn())
    bar = Progress(
        TextColumn("{task.description}"),
        *(counted if total is not None else timed),
        console=Console(file=sys.__stderr__),
        transient=True,
        refresh_per_second=4,
        # Leave the stdout of implementations alone.
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with bar:
        task = bar.add_task(short(text, BESIDE_BAR), total=total, left="")

        def advance(text: str = "", steps: int = 1, *, free: bool = False) -> None:
            pace.advance(0 if free else steps)
            bar.update(task, advance=steps, left=pace.left())
            if text:
                bar.update(task, description=escape(short(printable(text), BESIDE_BAR)))

        yield advance


# Names of axes

_AXES = {
    "output": ("batch query component",),
    "weights": ("batch head query key", "batch query key"),
    "row sums": ("batch head query", "batch query"),
    "attn_bias": ("batch head query key",),
    "query": ("batch query component",),
    "key": ("batch key component",),
    "value": ("batch key component",),
    "weights.query": ("in head component",),
    "weights.key": ("in head component",),
    "weights.value": ("in head component",),
    "weights.output": ("head component out",),
    "weights.output_bias": ("out",),
}
"""For each array, the names of its axes: one string for each number of axes that it may have.

An array that is not listed here has the axes "head component" if it has two axes.
"""


def axes(array: str, count: int) -> tuple[str, ...]:
    """Return the names of the `count` axes of `array`, such as "output"; () if they are unknown.

    A gradient has the axes of the array that it belongs to: "gradient.query" has those of "query".
    """
    known = _AXES.get(array.removeprefix("gradient."), ("head component",))
    return next((names for it in known if len(names := tuple(it.split())) == count), ())


def element(array: str, index: Sequence[int]) -> str:
    """Return the name of an element, such as "output[batch 2, query 1, component 4]".

    If the names of the axes are unknown, only the indices are in brackets.
    """
    names = axes(array, len(index)) or ("",) * len(index)
    at = ", ".join(f"{name} {i}".strip() for name, i in zip(names, index, strict=True))
    return f"{array}[{at}]"
