"""pytest plugins for the command line: a progress bar, and one-line error messages."""

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
from conformance.running.plugin import RUN
from conformance.text import progress

if TYPE_CHECKING:
    from conformance.running.run import Run


class Bar:
    """A pytest plugin that hides pytest's letter for each test, and can show a progress bar.

    Args:
        shown: whether to show the bar.
    """

    def __init__(self, *, shown: bool) -> None:
        self._stack = ExitStack()
        self._shown = shown
        self._advance: Callable[..., None] | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> Iterator[None]:
        """Return pytest's status without the letter that it would print for the test."""
        status = yield
        return (status[0], "", status[2]) if status else status

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Advance the bar, if shown, by one item for each test that was called or skipped."""
        if self._shown and (report.when == "call" or report.skipped):
            if self._advance is None:
                total = len(self._config.stash[RUN].chosen)
                self._advance = self._stack.enter_context(progress("", total))
            self._advance(report.nodeid.partition("[")[2].rstrip("]"))

    def pytest_configure(self, config: pytest.Config) -> None:
        """Store the configuration, from which the number of items is read later."""
        self._config = config

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Remove the bar before the summary."""
        self._stack.close()


class Refusals:
    """A pytest plugin that collects pytest's messages about invalid arguments.

    Attributes:
        run: the `Run` of the pytest session, which has its results; None before the session ends,
            and None for a session that has no `Run`.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._heard = io.StringIO()
        self.run: Run | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Return a context that collects stderr until pytest accepts its arguments."""
        before = sys.stderr
        self._stack.enter_context(redirect_stderr(self._heard))
        try:
            yield
        finally:
            self._stack.close()
            # pytest sets stderr back to what it found, which was the buffer.
            sys.stderr = before

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        """Stop collecting stderr and print what was collected: the arguments are accepted."""
        self._stack.close()
        self.echo()

    def echo(self) -> None:
        """Print the collected messages, and clear them."""
        sys.stderr.write(self._heard.getvalue())
        self._heard.seek(0)
        self._heard.truncate()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Store the session's `Run` in `run`, or None if there is none."""
        self.run = session.config.stash.get(RUN, None)

    def error(self, known: list[str]) -> ConformanceError:
        """Return an error with a one-line message about the arguments that pytest refused.

        Args:
            known: all valid options; for an unknown argument, the message suggests a similar one.
        """
        heard = self._heard.getvalue()
        refused = re.search(r"unrecognized arguments: (\S+)", heard)
        if refused is None:
            # From argparse, take the line after the usage; otherwise, take everything.
            meant = re.search(r"error: (.*)", heard)
            text = meant[1] if meant else " ".join(heard.replace("ERROR: ", "").split())
            return ConformanceError(text or "pytest refuses this command line")
        # Compare without the value, which may follow after "=" and be long.
        near = get_close_matches(refused[1].partition("=")[0], known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}? " if near else ""
        return ConformanceError(
            f"unknown argument {refused[1]}; {hint}mha-conformance run --help lists options, and "
            "pytest's are passed on"
        )
