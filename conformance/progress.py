"""Show progress bars, but only at a terminal.

They go to stderr and vanish. In CI, in a pipe and with --quiet there are none, so that a log holds
results only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[..., None]
"""`advance(told="", steps=1)`: so much is done, and what comes next."""

_silenced = False


def silence() -> None:
    """Disable progress bars, as --quiet requires."""
    global _silenced
    _silenced = True


def wanted() -> bool:
    """Return whether stderr is a terminal and bars are not disabled."""
    dumb = os.environ.get("TERM") in ("dumb", "unknown")
    return bool(
        not (_silenced or dumb or os.environ.get("CI"))
        # Not sys.stderr, which may be captured while a bar is shown beside it.
        and sys.__stderr__ is not None
        and sys.__stderr__.isatty()
    )


@contextmanager
def progress(told: str, total: int | None = None) -> Iterator[Advance]:
    """Show a progress bar while the body runs, or a spinner if no total is given."""
    if not wanted():
        yield lambda told="", steps=1: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from conformance.text import printable

    count = (MofNCompleteColumn(),) if total is not None else ()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        *count,
        TimeElapsedColumn(),
        console=Console(file=sys.__stderr__),
        transient=True,
        refresh_per_second=4,
        # What implementations print stays where they print it.
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with bar:
        task = bar.add_task(_short(told), total=total)

        def advance(told: str = "", steps: int = 1) -> None:
            bar.update(task, advance=steps)
            if told:
                bar.update(task, description=escape(_short(printable(told))))

        yield advance


def _short(told: str, most: int = 36) -> str:
    return told if len(told) <= most else told[: most - 1] + "…"
