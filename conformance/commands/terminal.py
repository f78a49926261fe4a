"""Additions of the command line to a pytest session: a progress bar and one-line errors."""

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
    """A progress bar in place of pytest's letters; nothing is shown if `shown` is False."""

    def __init__(self, *, shown: bool) -> None:
        self._stack = ExitStack()
        self._shown = shown
        self._advance: Callable[..., None] | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> Iterator[None]:
        """Remove the letter."""
        status = yield
        return (status[0], "", status[2]) if status else status

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Advance by one item; reports of setup and teardown are not counted."""
        if self._shown and (report.when == "call" or report.skipped):
            if self._advance is None:
                self._advance = self._stack.enter_context(progress("", self._total))
            self._advance(report.nodeid.partition("[")[2].rstrip("]"))

    def pytest_configure(self, config: pytest.Config) -> None:
        """Keep the configuration, from which the number of items follows."""
        self._config = config

    @property
    def _total(self) -> int:
        return len(self._config.stash[RUN].chosen)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Remove the bar before the summary."""
        self._stack.close()


class Refusals:
    """A collector of pytest's messages about invalid arguments."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._heard = io.StringIO()
        self.run: Run | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Collect stderr until pytest has accepted the arguments."""
        before = sys.stderr
        self._stack.enter_context(redirect_stderr(self._heard))
        try:
            yield
        finally:
            self._stack.close()
            # pytest restores what it captured, which was our buffer.
            sys.stderr = before

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        """The arguments are accepted: print what was collected."""
        self._stack.close()
        self.echo()

    def echo(self) -> None:
        """Print what was captured, and clear it."""
        sys.stderr.write(self._heard.getvalue())
        self._heard.seek(0)
        self._heard.truncate()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Keep the run."""
        self.run = session.config.stash.get(RUN, None)

    def error(self, known: list[str]) -> ConformanceError:
        """Return the refusal as a one-line error; `known` are all options."""
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
