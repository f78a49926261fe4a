"""Runs one implementation in a process of its own: sends requests, measures, and ends the process.

Whatever happens there, the answer to a request is a journal line.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import msgspec
import psutil

from conformance.adapter.base import DEFAULT_MODE
from conformance.cases.case import Case, StoredCase
from conformance.definition.dtypes import DTYPES
from conformance.errors import NotAnAdapter
from conformance.records.findings import Verdict, without_outcome
from conformance.records.header import Implementation
from conformance.records.record import encode_line
from conformance.running.isolation.messages import (
    STACK_SIGNAL,
    Declare,
    Declared,
    DeclaredMode,
    Examine,
    Examined,
    Limits,
    Mistaken,
    Ready,
    Refused,
    decode,
    encode,
)
from conformance.running.session import Item, Row

TICK = 0.05
"""Seconds between two looks at the memory of a process that is busy."""
TREE = 20
"""Every so many looks include its child processes: finding them costs milliseconds."""

_SUPERVISORS: dict[str, Supervisor] = {}


class Supervisor:
    """One implementation, its process, and how many processes it has lost."""

    def __init__(self, spec: str, device: str, limits: Limits) -> None:
        self.spec, self.device, self.limits = spec, device, limits
        self.name = ""
        self._process: BaseProcess | None = None
        self._channel: Connection | None = None
        self._measured: psutil.Process | None = None
        self._printed: Printed | None = None
        self._deaths = 0
        self._ended: Fate | Refused | None = None
        atexit.register(self.close)

    def start(self) -> None:
        """Import the implementation, unless that was done.

        Raises:
            NotAnAdapter: the name is wrong. `declare` reports an error of the import.
        """
        if self._process is None and self._ended is None:
            self._ended = self._begin()
        if isinstance(self._ended, Refused) and not self._ended.failed:
            raise NotAnAdapter(self._ended.reason)

    def declare(self, cases: Sequence[Case], dtypes: Sequence[str]) -> Declared:
        """Return what a run has to know about an implementation for its plan."""
        self.start()
        if self._ended is None:
            names = [case.id for case in cases]
            files = [case.path for case in cases if isinstance(case, StoredCase) and case.path]
            found = self._ask(Declare(names, list(dtypes), files), self.limits.start)
            if isinstance(found, Declared):
                self.name = found.implementation.name
                return found
            assert isinstance(found, Fate | Refused), found
            self._ended = found
        return self._unreachable()

    def adopt(self, declared: Declared) -> None:
        """Take over a declaration from another process of this run, without an import."""
        self.name = declared.implementation.name
        if declared.ended is not None:
            verdict, reason = declared.ended
            lost = verdict in ("crashed", "timed-out")
            self._ended = Fate(verdict, reason) if lost else Refused(reason, failed=True)  # type: ignore[arg-type]

    def _unreachable(self) -> Declared:
        """Return a declaration without content, with the reason and verdict of every item."""
        ended = self._ended
        assert ended is not None
        verdict = _verdict(ended)
        name = self.spec.rpartition(":")[2]
        described = Implementation(
            name=name,
            title=name,
            documentation="",
            framework="",
            spec=self.spec,
            versions={},
            modes=[DEFAULT_MODE.name],
            dtypes=list(DTYPES),
            masks=[],
            unavailable=ended.reason,
        )
        self.name = name
        return Declared(described, [DeclaredMode(DEFAULT_MODE.name)], ended=(verdict, ended.reason))

    def examine(self, item: Row, place: int) -> bytes:
        """Return the journal line of one item."""
        lost, name = self._ended, item.id
        if lost is None and self._deaths >= self.limits.deaths:
            reason = f"not asked: its process was lost at {self._deaths} items in a row"
            return _line(name, "not-run", reason)
        if lost is None and self._process is None:
            # The import succeeded before, so a failure now belongs to this item.
            lost = self._begin()
            self._deaths += lost is not None
        if lost is not None:
            return _line(name, _verdict(lost), lost.reason)
        request = Examine(item.case_id, item.dtype, item.mode.name, place, _file(item))
        answer = self._ask(request, self.limits.item)
        if isinstance(answer, Fate):
            self._deaths += 1
            return _line(name, answer.verdict, answer.reason)
        assert isinstance(answer, Examined), answer
        self._deaths = 0
        if answer.spent:
            self._clear()
        return answer.line

    def close(self) -> None:
        """End the process, and the processes that it started."""
        self._clear()
        atexit.unregister(self.close)
        _SUPERVISORS.pop(self.spec, None)

    # The process

    def _begin(self) -> Fate | Refused | None:
        """Start a process and import the implementation; return the reason if that fails."""
        context = _context()
        ours, theirs = context.Pipe()
        printed, stdout = context.Pipe(duplex=False)
        with _without_main():
            from conformance.running.isolation.child import serve

            process = context.Process(  # type: ignore[attr-defined]
                target=serve, args=(theirs, stdout, self.spec, self.device)
            )
            process.start()
        theirs.close()
        stdout.close()
        self._process, self._channel, self._printed = process, ours, Printed(printed)
        with contextlib.suppress(psutil.Error):
            self._measured = psutil.Process(process.pid)
        found = self._receive(self.limits.start, Ready | Refused, "to its import")
        if isinstance(found, Ready):
            return None
        self._clear()
        return found

    def _ask(self, request: Declare | Examine, seconds: float) -> Any:
        assert self._channel is not None
        assert self._printed is not None
        self._printed.forget()
        try:
            self._channel.send_bytes(encode(request))
        except OSError:
            return self._lost()
        found = self._receive(seconds, Declared | Examined | Mistaken | Refused)
        if isinstance(found, Mistaken):
            raise RuntimeError(f"in the process of {self.spec}:\n{found.traceback}")
        return found

    def _receive(self, seconds: float, kinds: Any, to: str = "") -> Any:
        """Return the answer, or the fate of a process that gives none within its limits."""
        assert self._process is not None
        assert self._channel is not None
        assert self._printed is not None
        sources: list[Any] = [self._channel, self._process.sentinel, self._printed.channel]
        now = time.monotonic()
        deadline, look, looks = now + seconds, now + TICK, 0
        while True:
            ready = wait(sources, max(0.0, min(look, deadline) - now))
            if self._channel in ready:
                try:
                    return decode(self._channel.recv_bytes(), kinds)
                except (EOFError, OSError):
                    return self._lost()
                except msgspec.MsgspecError:
                    return self._kill("crashed", "the process sent something else than an answer")
            if self._process.sentinel in ready:
                return self._lost()
            if self._printed.channel in ready and not self._printed.read():
                sources.remove(self._printed.channel)
            now = time.monotonic()
            if now >= look:
                look, looks = now + TICK, looks + 1
                if self._used(looks % TREE == 0) > self.limits.memory:
                    reason = f"used more than {self.limits.memory:g} MiB; the process was killed"
                    return self._kill("crashed", reason)
            if now >= deadline:
                answer = f"no answer {to}".rstrip()
                reason = f"{answer} within {seconds:g} s; the process was killed"
                self._ask_where()
                return self._kill("timed-out", reason)

    def _used(self, tree: bool) -> float:
        """Return the resident memory in MiB; `tree` includes child processes."""
        if self._measured is None:
            return 0.0
        try:
            used = self._measured.memory_info().rss
            for child in self._measured.children(recursive=True) if tree else ():
                used += child.memory_info().rss
        except psutil.Error:
            return 0.0
        return used / 2**20

    def _ask_where(self) -> None:
        """Make the process print its stack."""
        process, printed = self._process, self._printed
        assert process is not None
        assert printed is not None
        if STACK_SIGNAL is None or process.pid is None:
            return
        printed.read()
        with contextlib.suppress(OSError):
            os.kill(process.pid, STACK_SIGNAL)
            deadline = time.monotonic() + 0.5
            while not has_stack(printed.text) and time.monotonic() < deadline:
                wait([process.sentinel], TICK / 5)

    def _lost(self) -> Fate:
        process = self._process
        assert process is not None
        process.join(5)
        assert self._printed is not None
        reason = died(process.exitcode) + last_words(self._printed.text, self.spec)
        self._clear()
        return Fate("crashed", reason)

    def _kill(self, verdict: Any, reason: str) -> Fate:
        assert self._printed is not None
        reason += last_words(self._printed.text, self.spec)
        self._clear()
        return Fate(verdict, reason)

    def _clear(self) -> None:
        """Kill the process, and the processes that it started."""
        process, channel = self._process, self._channel
        self._process = self._channel = self._measured = None
        if channel is not None:
            channel.close()
        if self._printed is not None:
            self._printed.close()
            self._printed = None
        if process is None or process.pid is None:
            return
        if hasattr(os, "killpg"):
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join(5)


def supervise(spec: str, device: str, limits: Limits) -> Supervisor:
    """Return the supervisor of this implementation: the same one for the same arguments."""
    supervisor = _SUPERVISORS.get(spec)
    if supervisor is None or (supervisor.device, supervisor.limits) != (device, limits):
        if supervisor is not None:
            supervisor.close()
        supervisor = _SUPERVISORS[spec] = Supervisor(spec, device, limits)
    return supervisor


def _file(row: Row) -> str:
    """Return the file that a case was read from, or ""."""
    return row.case.path if isinstance(row, Item) and isinstance(row.case, StoredCase) else ""


def _verdict(lost: Fate | Refused) -> Verdict:
    return lost.verdict if isinstance(lost, Fate) else "unavailable"


def _line(name: str, verdict: Verdict, reason: str) -> bytes:
    return encode_line(without_outcome(name, verdict, reason), {})


def _context() -> BaseContext:
    """Return a context that forks processes from a server, which has imported only the suite.

    A fresh process then costs 20 ms instead of a second, and inherits no threads.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["conformance.running.isolation.child"])
    return context


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module, which a new process would import again.

    That is pytest, or a script that was not written for it.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# What a process printed, and how it ended

KEPT = 64 * 2**10
"""Bytes at the end of the output that are kept: a stack and the line before it."""
AT_ONCE = 2**20
"""Bytes that `Printed.read` reads at most, because a process may print without end."""


class Printed:
    """The reading end of a process's stdout and stderr.

    A file would be simpler, but would fill the disk if a process prints for a minute.
    """

    def __init__(self, channel: Connection) -> None:
        self.channel = channel
        self._end = b""
        os.set_blocking(channel.fileno(), False)

    def read(self) -> bool:
        """Read what is there; return False if the pipe is closed."""
        taken = 0
        while taken < AT_ONCE:
            try:
                some = os.read(self.channel.fileno(), KEPT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not some:
                return False
            taken += len(some)
            self._end = (self._end + some)[-KEPT:]
        return True

    def forget(self) -> None:
        """Discard what was printed so far."""
        self.read()
        self._end = b""

    @property
    def text(self) -> str:
        """Return the end of what was printed."""
        self.read()
        return self._end.decode(errors="replace")

    def close(self) -> None:
        """Close the pipe."""
        with contextlib.suppress(OSError):
            self.channel.close()


_DUMP = re.compile(r"^(Fatal Python error: |Current thread |Thread 0x|Stack \(most recent)", re.M)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Fate:
    """The verdict and the reason, if a process gave no answer."""

    verdict: Literal["crashed", "timed-out"]
    reason: str


def died(code: int | None) -> str:
    """Return a description of how a process ended by itself."""
    if code is not None and code < 0:
        try:
            return f"the process died with {signal.Signals(-code).name}"
        except ValueError:
            return f"the process died with signal {-code}"
    return f"the process ended with exit code {'unknown' if code is None else code}"


def has_stack(text: str) -> bool:
    """Return whether the process printed its stack."""
    return bool(_FRAME.search(text))


def last_words(text: str, spec: str) -> str:
    """Return its innermost line and the last line that it printed, as far as known, or ""."""
    dump = _DUMP.search(text)
    printed, stack = (text[: dump.start()], text[dump.start() :]) if dump else (text, "")
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    place, words = _place(stack, spec), lines[-1][:200] if lines else ""
    return (f" (at {place})" if place else "") + (f"; it printed last: {words}" if words else "")


def _place(stack: str, spec: str) -> str:
    """Return the innermost stack line in the implementation's file, or the innermost of all."""
    frames = _FRAME.findall(stack)
    file = Path(spec.partition(":")[0]).name
    theirs = [frame for frame in frames if Path(frame[0]).name == file] or frames
    return f"{Path(theirs[0][0]).name}:{theirs[0][1]}" if theirs else ""
