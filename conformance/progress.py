"""Show progress bars, but only on a terminal.

Bars are written to stderr and erased at the end. With --quiet, in CI, or if stderr is redirected or
a dumb terminal, no bars are shown, so that logs contain only results.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[..., None]
"""`advance(text="", steps=1)` reports that `steps` more steps are done.

`text` names the next step; with "", the name that is shown stays.
"""

_silenced = False


def silence() -> None:
    """Disable progress bars, as --quiet requires."""
    global _silenced
    _silenced = True


def wanted() -> bool:
    """Return whether stderr is a terminal that can show bars, and bars are not disabled."""
    dumb = os.environ.get("TERM") in ("dumb", "unknown")
    return bool(
        not (_silenced or dumb or os.environ.get("CI"))
        # sys.stderr may be replaced while output is captured; bars go to the real one.
        and sys.__stderr__ is not None
        and sys.__stderr__.isatty()
    )


@contextmanager
def progress(text: str, total: int | None = None) -> Iterator[Advance]:
    """Show a progress bar while the body runs, and yield the function that advances it.

    `total` is the number of steps. Without it, the bar only shows that the program is running.
    """
    if not wanted():
        yield lambda text="", steps=1: None
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
        # Leave the stdout of implementations alone.
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with bar:
        task = bar.add_task(_short(text), total=total)

        def advance(text: str = "", steps: int = 1) -> None:
            bar.update(task, advance=steps)
            if text:
                bar.update(task, description=escape(_short(printable(text))))

        yield advance


def _short(text: str, most: int = 36) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
