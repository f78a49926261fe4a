"""pytest plugins for the command line: progress, interruption, and one-line error messages."""

from __future__ import annotations

import gc
import io
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pytest

from conformance.errors import ConformanceError
from conformance.running.plugin import RUN
from conformance.text import Pace, printable, progress

if TYPE_CHECKING:
    from conformance.running.run import RunPlugin


Shown: TypeAlias = Literal["bar", "lines", "nothing"]

FIRST, NEXT = 10.0, 30.0
"""The number of seconds until the first line of progress in a log, and between later ones."""


class Progress:
    """A pytest plugin that shows what is left of a run, instead of pytest's letter for each test.

    Args:
        shown: "bar" for a progress bar, which needs a terminal; "lines" for a line now and then,
            for logs; or "nothing".
        loaded: what is loaded before anything is examined, which a line says in a terminal.
    """

    def __init__(self, shown: Shown, loaded: str = "") -> None:
        self._stack = ExitStack()
        self._shown = shown
        # pytest puts another stream there, which it prints at the end.
        self._stderr = sys.stderr
        self._advance: Callable[..., None] | None = None
        self._done = 0
        self._deviate = 0
        self._next = FIRST
        if shown == "bar":
            print(printable(f"loading {loaded}"), file=sys.stderr, flush=True)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> Iterator[None]:
        """Return pytest's status without the letter that it would print for the test."""
        status = yield
        return (status[0], "", status[2]) if status else status

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Show that one more item is done, for each test that was called or skipped."""
        if self._shown == "nothing" or not (report.when == "call" or report.skipped):
            return
        run = self._config.stash[RUN]
        name = report.nodeid.partition("[")[2].rstrip("]")
        if not self._done:
            self._reused = {*run.chosen} & {*run.reused}
            self._pace = Pace(len(run.chosen), len(self._reused))
        self._done += 1
        result = run.results.get(name)
        self._deviate += result is not None and result.verdict == "deviates"
        deviate = f"{self._deviate:,} deviate" if self._deviate else ""
        if self._shown == "lines":
            self._write(run, name, deviate)
            return
        if self._advance is None:
            total, free = len(run.chosen), len(self._reused)
            self._advance = self._stack.enter_context(progress("", total, free))
        told = ", ".join(filter(None, (deviate, name)))
        self._advance(told, free=name in self._reused)

    def _write(self, run: RunPlugin, name: str, deviate: str) -> None:
        """Write a line to stderr after the item `name`, if it is time for one."""
        if name not in self._reused:
            self._pace.advance()
        if self._pace.elapsed < self._next or self._done == len(run.chosen):
            return
        self._next = self._pace.elapsed + NEXT
        text = f"{self._done:,} of {len(run.chosen):,} items"
        told = ", ".join(filter(None, (text, deviate, self._pace.left())))
        print(printable(told), file=self._stderr, flush=True)

    def pytest_configure(self, config: pytest.Config) -> None:
        """Store the configuration, from which the number of items is read later."""
        self._config = config

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Remove the bar before the summary."""
        self._stack.close()


class Interruption:
    """A pytest plugin that leaves the last words of a run that ends early to the command.

    After Ctrl-C pytest would print where its own code was interrupted, and a hint how to see its
    traceback; after `-x` that it stops after "1 failures".
    """

    def __init__(self) -> None:
        self._interrupted = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
        """Let several processes that end at a failure, for `-x`, fail as one process does.

        pytest-xdist ends them by a `KeyboardInterrupt` of its own.
        """
        try:
            return (yield)
        except KeyboardInterrupt as error:
            if type(error) is KeyboardInterrupt or not session.shouldfail:
                raise
            raise session.Failed(session.shouldfail) from None

    @pytest.hookimpl(trylast=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Silence what pytest would print, unless `pytest.exit` ended the session."""
        if not isinstance(excinfo.value, KeyboardInterrupt):
            return
        self._interrupted = True
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if not self._config.option.fulltrace:
            terminal._report_keyboardinterrupt = terminal.summary_stats = lambda: None

    def pytest_configure(self, config: pytest.Config) -> None:
        """Store the configuration."""
        self._config = config

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Word pytest's last line anew, and collect the frames that were interrupted.

        One of them is a generator of pytest that would raise an exception if it ended later, when
        pytest no longer captures output.
        """
        if session.shouldfail:
            session.shouldfail = "ended early, as -x or --maxfail asks"
        if self._interrupted:
            gc.collect()


class Refusals:
    """A pytest plugin that collects pytest's messages about invalid arguments.

    Attributes:
        run: the `RunPlugin` of the pytest session, which has its results; None before the session
            ends, and None for a session that has no `RunPlugin`.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._heard = io.StringIO()
        self.run: RunPlugin | None = None

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
        """Store the session's `RunPlugin` in `run`, or None if there is none."""
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
