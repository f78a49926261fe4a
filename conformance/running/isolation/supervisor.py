"""Keeps one implementation in a process of its own: asks, waits, measures, and ends it if need be.

What comes back is a journal line, whatever happens there.
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
from conformance.cases.case import Case
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
from conformance.running.session import Inquiry, Item

TICK = 0.05
"""Seconds between two looks at the memory of a process that is busy."""
TREE = 20
"""Every so many looks, its own children count too: finding them costs milliseconds."""

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
        """Import the implementation, if that was not done.

        Raises:
            NotAnAdapter: the name is wrong. What goes wrong in the importing is `declare`'s to say.
        """
        if self._process is None and self._ended is None:
            self._ended = self._begin()
        if isinstance(self._ended, Refused) and not self._ended.failed:
            raise NotAnAdapter(self._ended.told)

    def declare(self, cases: Sequence[Case], dtypes: Sequence[str]) -> Declared:
        """What a run needs to know before it asks."""
        self.start()
        if self._ended is None:
            names, files = (
                [case.id for case in cases],
                [file for case in cases if (file := _file(case))],
            )
            found = self._ask(Declare(names, list(dtypes), files), self.limits.start)
            if isinstance(found, Declared):
                self.name = found.implementation.name
                return found
            assert isinstance(found, Fate | Refused), found
            self._ended = found
        return self._unreachable()

    def adopt(self, declared: Declared) -> None:
        """Take a declaration from another process of this run; nothing is imported yet."""
        self.name = declared.implementation.name
        if declared.ended is not None:
            verdict, told = declared.ended
            lost = verdict in ("crashed", "timed-out")
            self._ended = Fate(verdict, told) if lost else Refused(told, failed=True)  # type: ignore[arg-type]

    def _unreachable(self) -> Declared:
        """Nothing is known but the reason, which every item will have as its verdict."""
        ended = self._ended
        assert ended is not None
        verdict = ended.verdict if isinstance(ended, Fate) else "unavailable"
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
            unavailable=ended.told,
        )
        self.name = name
        return Declared(described, [DeclaredMode(DEFAULT_MODE.name)], ended=(verdict, ended.told))

    def examine(self, item: Item | Inquiry, place: int) -> bytes:
        """A journal line about one item."""
        name = item.id
        if self._ended is None and self._deaths >= self.limits.deaths:
            told = f"not asked: its process was lost at {self._deaths} items in a row"
            return _line(name, "not-run", told)
        if self._ended is None and self._process is None:
            # Its import went well before; whatever happens now belongs to this item.
            lost = self._begin()
            if lost is not None:
                self._deaths += 1
                verdict = lost.verdict if isinstance(lost, Fate) else "unavailable"
                return _line(name, verdict, lost.told)
        if self._ended is not None:
            verdict = self._ended.verdict if isinstance(self._ended, Fate) else "unavailable"
            return _line(name, verdict, self._ended.told)
        asked = item.case if isinstance(item, Item) else item.experiment
        request = Examine(asked.id, item.dtype, item.mode.name, place, _file(asked))
        found = self._ask(request, self.limits.item)
        if isinstance(found, Fate):
            self._deaths += 1
            return _line(name, found.verdict, found.told)
        assert isinstance(found, Examined), found
        self._deaths = 0
        if found.spent:
            self._clear()
        return found.line

    def close(self) -> None:
        """End the process, and whatever it started."""
        self._clear()
        atexit.unregister(self.close)
        _SUPERVISORS.pop(self.spec, None)

    # The process

    def _begin(self) -> Fate | Refused | None:
        """A fresh process with the implementation in it; or why there is none."""
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
        """The answer, or the fate of a process that gives none within its limits."""
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
                    told = f"used more than {self.limits.memory:g} MiB; the process was killed"
                    return self._kill("crashed", told)
            if now >= deadline:
                answer = f"no answer {to}".rstrip()
                told = f"{answer} within {seconds:g} s; the process was killed"
                self._ask_where()
                return self._kill("timed-out", told)

    def _used(self, tree: bool) -> float:
        """MiB of resident memory."""
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
        """Let the process print its stack."""
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
        told = died(process.exitcode) + last_words(self._printed.text, self.spec)
        self._clear()
        return Fate("crashed", told)

    def _kill(self, verdict: Any, told: str) -> Fate:
        assert self._printed is not None
        told += last_words(self._printed.text, self.spec)
        self._clear()
        return Fate(verdict, told)

    def _clear(self) -> None:
        """Nothing is left of the process, nor of what it started."""
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
    """The supervisor of this implementation: who asks twice gets the same."""
    supervisor = _SUPERVISORS.get(spec)
    if supervisor is None or (supervisor.device, supervisor.limits) != (device, limits):
        if supervisor is not None:
            supervisor.close()
        supervisor = _SUPERVISORS[spec] = Supervisor(spec, device, limits)
    return supervisor


def _file(case: object) -> str:
    """The file that a case was read from, or ""."""
    return getattr(case, "path", "")


def _line(name: str, verdict: Verdict, told: str) -> bytes:
    return encode_line(without_outcome(name, verdict, told), {})


def _context() -> BaseContext:
    """Processes are forked from a server that has imported the suite, and no framework.

    So that a fresh one costs 20 ms and not a second, and inherits no threads.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["conformance.running.isolation.child"])
    return context


@contextmanager
def _without_main() -> Iterator[None]:
    """A new process needs nothing of the program that runs this one.

    Else it would import that program again: pytest, or a script that was not written for it.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# What a process printed, and how it ended

KEPT = 64 * 2**10
"""Bytes at the end, enough for the stack of a crash and the line before it."""
AT_ONCE = 2**20
"""Bytes read before somebody else gets a turn, of a process that prints without end."""


class Printed:
    """The reading end of the pipe that a process has for stdout and stderr.

    A file would be simpler, and fill the disk when a process prints for a minute.
    """

    def __init__(self, channel: Connection) -> None:
        self.channel = channel
        self._end = b""
        os.set_blocking(channel.fileno(), False)

    def read(self) -> bool:
        """Take what is there; False when nothing can come any more."""
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
        """What was printed so far tells nothing about what comes next."""
        self.read()
        self._end = b""

    @property
    def text(self) -> str:
        """The end of what was printed."""
        self.read()
        return self._end.decode(errors="replace")

    def close(self) -> None:
        """Nobody reads any more."""
        with contextlib.suppress(OSError):
            self.channel.close()


_DUMP = re.compile(r"^(Fatal Python error: |Current thread |Thread 0x|Stack \(most recent)", re.M)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Fate:
    """No answer: the verdict, and why."""

    verdict: Literal["crashed", "timed-out"]
    told: str


def died(code: int | None) -> str:
    """How a process ended by itself."""
    if code is not None and code < 0:
        try:
            return f"the process died with {signal.Signals(-code).name}"
        except ValueError:
            return f"the process died with signal {-code}"
    return f"the process ended with exit code {'unknown' if code is None else code}"


def has_stack(text: str) -> bool:
    """Whether the process printed where it was."""
    return bool(_FRAME.search(text))


def last_words(text: str, spec: str) -> str:
    """Where it was, and the last line that it printed, as far as known: "" or " (at ...)"."""
    dump = _DUMP.search(text)
    own, stack = (text[: dump.start()], text[dump.start() :]) if dump else (text, "")
    lines = [line.strip() for line in own.splitlines() if line.strip()]
    place, words = _place(stack, spec), lines[-1][:200] if lines else ""
    return (f" (at {place})" if place else "") + (f"; it printed last: {words}" if words else "")


def _place(stack: str, spec: str) -> str:
    """The innermost line in the implementation's file, or else the innermost of all."""
    frames = _FRAME.findall(stack)
    file = Path(spec.partition(":")[0]).name
    theirs = [frame for frame in frames if Path(frame[0]).name == file] or frames
    return f"{Path(theirs[0][0]).name}:{theirs[0][1]}" if theirs else ""
