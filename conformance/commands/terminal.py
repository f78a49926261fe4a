"""What the command line adds to a pytest session: a bar, one-line errors, a summary as data."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import pytest

from conformance.errors import ConformanceError
from conformance.progress import progress
from conformance.running.plugin import RUN

if TYPE_CHECKING:
    from conformance.running.run import Run


class Bar:
    """A progress bar in place of pytest's letters; with `shown` False, nothing in their place."""

    def __init__(self, *, shown: bool) -> None:
        self._stack = ExitStack()
        self._shown = shown
        self._advance: Callable[..., None] | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> Iterator[None]:
        """No letter."""
        found = yield
        return (found[0], "", found[2]) if found else found

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One more; reports of setup and teardown are of the same item."""
        if self._shown and (report.when == "call" or report.skipped):
            if self._advance is None:
                self._advance = self._stack.enter_context(progress("", self._total))
            self._advance(report.nodeid.partition("[")[2].rstrip("]"))

    def pytest_configure(self, config: pytest.Config) -> None:
        """Remember where the number of items can be asked."""
        self._config = config

    @property
    def _total(self) -> int:
        return len(self._config.stash[RUN].chosen)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """The bar vanishes before the summary."""
        self._stack.close()


class Refusals:
    """Collects what pytest says about a command line that it refuses; afterwards has the run."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._heard = io.StringIO()
        self.run: Run | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """From the beginning until pytest knows what to do."""
        before = sys.stderr
        self._stack.enter_context(redirect_stderr(self._heard))
        try:
            yield
        finally:
            self._stack.close()
            # Where pytest captures, it puts back what it found, which was this.
            sys.stderr = before

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        """Accepted: what was said until now goes where it was meant to."""
        self._stack.close()
        self.echo()

    def echo(self) -> None:
        """Say what was heard."""
        sys.stderr.write(self._heard.getvalue())
        self._heard.seek(0)
        self._heard.truncate()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Keep what the session was."""
        self.run = session.config.stash.get(RUN, None)

    def error(self, known: list[str]) -> ConformanceError:
        """All of it in one line; `known` are the options that there are."""
        heard = self._heard.getvalue()
        refused = re.search(r"unrecognized arguments: (.*)", heard)
        if refused is None:
            # Of argparse the line behind the usage, else all there is.
            meant = re.search(r"error: (.*)", heard)
            told = meant[1] if meant else " ".join(heard.replace("ERROR: ", "").split())
            return ConformanceError(told or "pytest refuses this command line")
        # A value may stand beside its option, and may be long.
        name = refused[1].split()[0]
        near = get_close_matches(name.partition("=")[0], known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}? " if near else ""
        return ConformanceError(
            f"unknown argument {name}; {hint}mha-conformance run --help lists options, and "
            "pytest's are passed on"
        )
