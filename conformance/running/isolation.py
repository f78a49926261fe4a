"""Run each implementation in a separate process, with limits on time and memory.

If a process dies, hangs or uses too much memory, only one item is lost, and the next item gets a
new process. A supervisor returns a journal line for every item, even if the process is lost. This
module is imported only if an implementation is isolated, or an experiment may end its process.

Existing process pools do not suffice. Pebble does not notice a process that exits with code 0 (it
waits for the timeout) and does not limit memory. With loky and the standard library's pool, a
process that is killed while it returns a result blocks the pool, and processes survive a parent
that is killed. For these reasons, this module directly uses a process and a connection of
multiprocessing for each implementation.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import psutil
from msgspec.structs import replace

from conformance.adapter.base import DEFAULT_MODE, Call, Mode
from conformance.cases.case import Case, StoredCase
from conformance.definition.dtypes import DTYPES
from conformance.definition.problem import Answer, Problem
from conformance.errors import NotAnAdapter, Unavailable
from conformance.experiments import Experiment, settled
from conformance.records.findings import (
    BITS,
    STATEFUL,
    WHOLE,
    CaseResult,
    Finding,
    Phrase,
    Verdict,
    item_id,
    without_outcome,
)
from conformance.records.header import Implementation
from conformance.records.record import decode_line, encode_line
from conformance.requirements.laboratory import CANNOT_BE_ASKED
from conformance.requirements.probed import declares
from conformance.running.isolation_child import (
    STACK_SIGNAL,
    Began,
    Checked,
    Declare,
    Declared,
    Ended,
    Examine,
    Examined,
    Mistaken,
    Ready,
    Request,
    Response,
    Stated,
    Walk,
    Walked,
    decode,
    encode,
    plan_key,
    serve,
    serve_stateful,
)
from conformance.running.session import Asked, Inquiry, Planned, Row

TICK = 0.05
"""The interval in seconds at which the memory of a busy process is checked."""
TREE = 20
"""Only every 20th check includes child processes, because listing them takes milliseconds."""
SLOWEST = 10
"""How many times faster than the clock of a process elapsed time may be. A process that waits for a
disk for ever thus reaches its limits too."""

_SUPERVISORS: dict[str, Supervisor] = {}


@dataclass(frozen=True)
class ProcessLimits:
    """The limits of one process.

    Attributes:
        item: seconds for one item, and as many again for finding the causes of its deviations.
        start: seconds for the import of the implementation and its framework, and as many again
            for its declaration.
        memory: MiB of resident memory, including child processes. Address space would be easier
            to limit, but JAX, TensorFlow and CUDA reserve far more of it than they use.
        deaths: the number of processes lost in a row after which the remaining items are skipped,
            so that the run ends in reasonable time.
    """

    item: float = 60.0
    start: float = 120.0
    memory: float = 8192.0
    deaths: int = 10


class _Keeper:
    """An owner of the process of one implementation, which starts another when one is lost.

    Attributes:
        spec: the implementation, as on the command line.
        device: the device.
        limits: the limits of each process.
    """

    def __init__(self, spec: str, device: str, limits: ProcessLimits) -> None:
        self.spec, self.device, self.limits = spec, device, limits
        self._process: Process | None = None
        # How many processes were lost in a row.
        self._deaths = 0
        atexit.register(self.close)

    def _import(
        self, kinds: Any, target: Callable[[Connection, Connection, str, str], None] = serve
    ) -> Any:
        """Start a process, and return its first message: one of `kinds`, or `Ended`."""
        self._process = Process(self.spec, self.device, self.limits.memory, target)
        return self._process.receive(self.limits.start, kinds | Ended, "to its import")

    def _received(self, answer: Any) -> Any:
        """Return the response unchanged, after discarding the process if the response is `Ended`.

        Raises:
            RuntimeError: the response reports an error of the suite.
        """
        if isinstance(answer, Mistaken):
            raise RuntimeError(f"in the process of {self.spec}:\n{answer.traceback}")
        if isinstance(answer, Ended):
            self._clear()
        return answer

    def _clear(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = None

    def close(self) -> None:
        """Kill the process, with its process group if possible."""
        self._clear()
        atexit.unregister(self.close)


class Supervisor(_Keeper):
    """A supervisor that runs one implementation in a process, and replaces a process that died."""

    def __init__(self, spec: str, device: str, limits: ProcessLimits) -> None:
        super().__init__(spec, device, limits)
        self._ended: Ended | None = None
        # Whether the process was given inputs that may have spoiled its memory.
        self._exposed = False

    def start(self) -> None:
        """Start a process and import the implementation in it, unless this was already tried.

        If the import fails for any reason other than those below, nothing is raised here;
        `declare` and `examine` report the failure.

        Raises:
            NotAnAdapter: there is no such implementation, or it is invalid.
        """
        self._ended = self._started()
        if self._ended is not None and self._ended.invalid:
            raise NotAnAdapter(self._ended.reason)

    def _started(self) -> Ended | None:
        """Start a process and import the implementation, unless this was done or has failed before.

        Return None if there is now a process, or else the reason why there is none.
        """
        if self._ended is not None or self._process is not None:
            return self._ended
        answer = self._import(Ready)
        if isinstance(answer, Ready):
            return None
        self._clear()
        assert isinstance(answer, Ended), answer
        return answer

    def declare(self, cases: Sequence[Case], dtypes: Sequence[str]) -> Declared:
        """Return the implementation's declaration and the modes planned for each case and dtype.

        If the process could not be started or was lost, `ended` in the declaration is the reason.

        Raises:
            NotAnAdapter: there is no such implementation, or it is invalid.
        """
        self.start()
        if self._ended is None:
            assert self._process is not None
            request = Declare({case.id: _file_of(case) for case in cases}, list(dtypes))
            answer = self._received(self._process.ask(request, self.limits.start))
            if isinstance(answer, Declared):
                return answer
            self._ended = answer
        return self._unreachable()

    def adopt(self, declared: Declared) -> None:
        """Take over, from the declaration that another process received, whether the import failed.

        Nothing is imported here until `examine` is called.
        """
        self._ended = declared.ended

    def _unreachable(self) -> Declared:
        """Return a declaration for an implementation whose process gave none.

        It has default values, and the reason why there is no other declaration.
        """
        assert self._ended is not None
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
            unavailable=self._ended.reason,
        )
        return Declared(described, {DEFAULT_MODE.name: DEFAULT_MODE.optimised}, ended=self._ended)

    def examine(self, row: Row, place: int) -> bytes:
        """Examine a row in the process, and return its journal line.

        `place` is the position of the row in the run, or -1 if its attention weights must not be
        recorded. If the process is lost, the line has a verdict such as "crashed", and the reason.
        """
        if self._ended is None and isinstance(row, Inquiry) and row.asked.apart:
            return encode_line(self.inquire(row), {})
        if self._exposed:
            self._clear()
        if self._ended is None and self._deaths >= self.limits.deaths:
            reason = f"not asked: its process was lost at {self._deaths} items in a row"
            lost: Ended | None = Ended("not-run", reason)
        else:
            # If the first import succeeded, a failure now is attributed to this item.
            lost = self._started()
            self._deaths += lost is not None
        if lost is None:
            request = Examine(row.asked.id, row.dtype, row.mode.name, _file_of(row.asked), place)
            answer = self._examined(request, row)
            if isinstance(answer, Examined):
                self._deaths = 0
                if answer.spent:
                    self._clear()
                return answer.line
            self._deaths += 1
            lost = answer
        return encode_line(without_outcome(row.id, lost.verdict, lost.reason), {})

    def inquire(self, inquiry: Inquiry) -> CaseResult:
        """Return the result of an experiment, whose questions the process answers one by one.

        If the process is lost at a question, the entry that should hold the answer says so, and the
        next question goes to a new process. If `ProcessLimits.deaths` processes in a row are lost,
        the remaining questions are not asked. If the process cannot even list the questions, the
        result has no entries.
        """
        listed = self._question(inquiry, -1)
        if isinstance(listed, Ended):
            return without_outcome(inquiry.id, listed.verdict, listed.reason)
        entries, deaths = [], 0
        for number, entry in enumerate(listed.entries):
            found: CaseResult | Ended = listed
            if deaths < self.limits.deaths:
                found = self._question(inquiry, number)
            if isinstance(found, Ended):
                deaths += 1
                value = "bad-input.hangs" if found.verdict == "timed-out" else "bad-input.dies"
                entries.append(replace(entry, value=Phrase(value), evidence=found.reason))
            elif found is listed:
                reason = f"not asked: its process was lost at {deaths} questions in a row"
                entries.append(replace(entry, value=CANNOT_BE_ASKED, evidence=reason))
            else:
                deaths = 0
                # A process that was started again may give no answer to this question.
                reason = next((finding.detail for finding in found.findings), "")
                unanswered = replace(entry, value=CANNOT_BE_ASKED, evidence=reason)
                entries += found.entries or [unanswered]
                if entries[-1].value.id == "bad-input.reads-beyond":
                    # If it reads beyond an array, it may also have written there.
                    self._clear()
        return inquiry.concluded(settled(entries)) if entries else listed

    def _question(self, inquiry: Inquiry, number: int) -> CaseResult | Ended:
        """Return the result of the question with this number, or `Ended` if the process is lost.

        If `number` is -1, the result has an entry without a value for each question. Afterwards,
        the process is used only for questions.
        """
        failure = self._started()
        if failure is not None:
            return failure
        self._exposed = True
        asked, mode = inquiry.asked.id, inquiry.mode.name
        request = Examine(asked, inquiry.dtype, mode, question=number)
        answer = self._examined(request, inquiry)
        return answer if isinstance(answer, Ended) else decode_line(answer.line)[0]

    def close(self) -> None:
        """Kill the process, with its process group if possible, and forget this supervisor."""
        super().close()
        _SUPERVISORS.pop(self.spec, None)

    def _examined(self, request: Examine, row: Row) -> Examined | Ended:
        """Return the response of the process to a request about a row, or `Ended` if it is lost.

        A response about another item is treated as a crash. If only the search for causes takes too
        long, the response holds the item's result without causes.
        """
        assert self._process is not None
        answer = self._process.ask(request, self.limits.item)
        if isinstance(answer, Checked):
            # The search for causes, a part of the suite, gets the same time again. If it takes
            # longer, the verdict stands.
            line = answer.line
            answer = self._process.receive(self.limits.item, Response)
            if isinstance(answer, Ended) and answer.verdict == "timed-out":
                answer = Examined(line, row.id, spent=True)
        answer = self._received(answer)
        if isinstance(answer, Examined) and answer.item != row.id:
            self._clear()
            answer = Ended("crashed", f"the process answered another item: {answer.item}")
        assert isinstance(answer, Examined | Ended)
        return answer

    def _clear(self) -> None:
        super()._clear()
        self._exposed = False


class Walker(_Keeper):
    """A supervisor of a layer that keeps a state, which replaces a process that died.

    Attributes:
        stated: what the layer declares; None if the implementation is no such layer.
    """

    def __init__(self, spec: str, device: str, limits: ProcessLimits) -> None:
        """Start a process and import the layer in it.

        Raises:
            NotAnAdapter: there is no such layer, or it cannot be imported or is invalid.
        """
        super().__init__(spec, device, limits)
        started = self._started()
        if isinstance(started, Ended):
            raise NotAnAdapter(_with_place(spec, started))
        self.stated = started

    def _started(self) -> Stated | Ended | None:
        answer = self._import(Ready | Stated, serve_stateful)
        if isinstance(answer, Stated):
            return answer
        self._clear()
        return answer if isinstance(answer, Ended) else None

    def results(
        self, dtype: str, ways: Sequence[str], begins: Callable[[str], None]
    ) -> Iterator[CaseResult]:
        """Yield a result for each way in a dtype, also for those at which the process was lost.

        Args:
            dtype: the dtype.
            ways: the names of the ways.
            begins: is called with the name of a way and of the dtype before the way is taken.

        Raises:
            NotAnAdapter: the layer cannot be built.
            Unavailable: there is no such device.
        """
        left, done = list(ways), list[str]()
        while self._deaths < self.limits.deaths:
            doing = WHOLE
            answer: Any = self._started() if self._process is None else None
            if not isinstance(answer, Ended):
                assert self._process is not None
                answer = self._process.ask(Walk(dtype, left, done), self.limits.item)
            while not isinstance(self._received(answer), Walked | Ended):
                if isinstance(answer, Began):
                    doing = answer.way
                    begins(f"{doing} {dtype}")
                else:
                    self._deaths = 0
                    yield decode_line(answer.line)[0]
                    if doing in left:
                        left.remove(doing)
                        done.append(doing)
                assert self._process is not None
                answer = self._process.receive(self.limits.item, Response)
            if isinstance(answer, Walked):
                return
            if answer.verdict == "unavailable":
                raise (NotAnAdapter if answer.invalid else Unavailable)(answer.reason)
            self._deaths += 1
            if doing in done:
                # It was lost when ways were taken again.
                yield self._without(BITS, dtype, answer)
                return
            yield self._without(f"{STATEFUL}{doing}", dtype, answer)
            if doing == WHOLE:
                # Without the whole text, no way can be judged.
                return
            left.remove(doing)
        reason = f"not taken: its process was lost on {self._deaths} ways in a row"
        for case in (*(f"{STATEFUL}{way}" for way in left), BITS):
            yield self._without(case, dtype, Ended("not-run", reason))

    def _without(self, case: str, dtype: str, lost: Ended) -> CaseResult:
        assert self.stated is not None
        item = item_id(self.stated.name, case, dtype, self.device, "default")
        return without_outcome(item, lost.verdict, lost.reason)


def _with_place(spec: str, lost: Ended) -> str:
    """Return the reason why nothing could be imported, with the implementation if it lacks it."""
    return lost.reason if spec.partition(":")[0] in lost.reason else f"{spec}: {lost.reason}"


def _file_of(asked: Case | Experiment) -> str:
    return asked.path if isinstance(asked, StoredCase) else ""


@contextmanager
def asking(spec: str) -> Iterator[Callable[[Inquiry], CaseResult]]:
    """Yield a function, for `Session.apart`, that runs an experiment in a separate process.

    On exit, the processes are killed. `spec` is the implementation's name on the command line. If
    `spec` is "", no other process can import the implementation, so the function returns a result
    with the verdict "unsupported".
    """
    with contextlib.ExitStack() as stack:

        def ask(inquiry: Inquiry) -> CaseResult:
            if not spec:
                reason = "needs a process of its own, in which the implementation can be imported"
                return inquiry.result([Finding(declares.id, "unsupported", reason)])
            supervisor = supervise(spec, inquiry.device, ProcessLimits())
            stack.callback(supervisor.close)
            return supervisor.inquire(inquiry)

        yield ask


def supervise(spec: str, device: str, limits: ProcessLimits) -> Supervisor:
    """Return the supervisor of an implementation.

    An existing supervisor is reused if it has the same device and limits; otherwise, it is closed
    and replaced.
    """
    supervisor = _SUPERVISORS.get(spec)
    if supervisor is None or (supervisor.device, supervisor.limits) != (device, limits):
        if supervisor is not None:
            supervisor.close()
        supervisor = _SUPERVISORS[spec] = Supervisor(spec, device, limits)
    return supervisor


class StandIn(Planned):
    """A proxy adapter for an implementation in another process, created from its declaration."""

    def __init__(self, declared: Declared) -> None:
        self.declared = declared
        described = declared.implementation
        self.name = described.name
        self.title = described.title
        self.dtypes = tuple(described.dtypes)
        self.geometry = declared.geometry
        self.fixed = declared.fixed
        self.projections_supplied = declared.projections_supplied
        self.modes = tuple(Mode(name, optimised=how) for name, how in declared.modes.items())

    @property
    def compiles(self) -> bool:
        return self.declared.compiles

    @property
    def page(self) -> int:
        return self.declared.page

    @property
    def numbers(self) -> dict[str, float]:
        return self.declared.numbers

    def planned_modes(self, case: Case, dtype: str) -> Asked:
        if self.declared.ended is not None:
            return Asked(self.modes[:1])
        key = plan_key(case.id, dtype)
        names = self.declared.plan.get(key, [])
        modes = tuple(mode for mode in self.modes if mode.name in names)
        return Asked(modes, key in self.declared.refused)

    def versions(self) -> dict[str, str]:
        return self.declared.implementation.versions

    def device_model(self, device: str) -> str:
        if self.declared.implementation.unavailable:
            raise Unavailable(self.declared.implementation.unavailable)
        return self.declared.device_model

    def run(self, problem: Problem, call: Call) -> Answer:
        raise AssertionError("an isolated implementation is run by its supervisor")


# The process


class Process:
    """A process of one implementation, with its output and its memory limit.

    The limit `memory` is in MiB. `serve` is what the process does.
    """

    def __init__(
        self,
        spec: str,
        device: str,
        memory: float,
        serve: Callable[[Connection, Connection, str, str], None] = serve,
    ) -> None:
        self._spec, self._memory = spec, memory
        context = _context()
        self._channel, theirs = context.Pipe()
        printed, stdout = context.Pipe(duplex=False)
        with _without_main():
            self._process = context.Process(  # type: ignore[attr-defined]
                target=serve, args=(theirs, stdout, spec, device)
            )
            self._process.start()
        theirs.close()
        stdout.close()
        self._printed = Printed(printed)
        self._measured: psutil.Process | None = None
        with contextlib.suppress(psutil.Error):
            self._measured = psutil.Process(self._process.pid)

    def ask(self, request: Request | Walk, seconds: float) -> Any:
        """Send a request, and return the response, or `Ended` if the process died or was killed."""
        self._printed.forget()
        try:
            self._channel.send_bytes(encode(request))
        except OSError:
            return self._lost()
        return self.receive(seconds, Response)

    def receive(self, seconds: float, kinds: Any, to: str = "") -> Any:
        """Return the next message, or `Ended` if the process died or had to be killed.

        The process is killed if it sends nothing within `seconds`, sends anything other than a
        message of the types `kinds`, or uses too much memory. If it sends nothing, the reason in
        `Ended` begins with "no answer" and the text `to`, such as "to its import". Time in which
        it waits for a processor does not count, so a busy machine costs no verdict; but it gets
        at most `SLOWEST` times the seconds.
        """
        sources: list[Any] = [self._channel, self._process.sentinel, self._printed.channel]
        clock = Clock(self._process.pid or 0)
        clock.read()
        now = read = time.monotonic()
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
                if self._used(looks % TREE == 0) > self._memory:
                    reason = f"used more than {self._memory:g} MiB; the process was killed"
                    return self._kill("crashed", reason)
            if now >= min(deadline, read + TREE * TICK):
                clock.read(now - read)
                left = seconds - max(clock.own, clock.waited / SLOWEST)
                read, deadline = now, now + max(left, TICK) if left > 0 else now
            if now >= deadline:
                answer = f"no answer {to}".rstrip()
                self._ask_where()
                reason = f"{answer} within {seconds:g} s; the process was killed"
                return self._kill("timed-out", reason)

    def _used(self, tree: bool) -> float:
        """Return the resident memory in MiB, with child processes if `tree`; 0 if unknown."""
        try:
            processes = [self._measured] if self._measured else []
            processes += [child for one in processes if tree for child in one.children(True)]
            return sum(process.memory_info().rss for process in processes) / 2**20
        except psutil.Error:
            return 0.0

    def _ask_where(self) -> None:
        """Make the process print its stack, and wait for the stack for up to half a second.

        Do nothing if the system has no signal for this.
        """
        if STACK_SIGNAL is None or self._process.pid is None:
            return
        self._printed.read()
        with contextlib.suppress(OSError):
            os.kill(self._process.pid, STACK_SIGNAL)
            deadline = time.monotonic() + 0.5
            while not _FRAME.search(self._printed.text) and time.monotonic() < deadline:
                wait([self._process.sentinel], TICK / 5)

    def _lost(self) -> Ended:
        self._process.join(5)
        return self._kill("crashed", died(self._process.exitcode))

    def _kill(self, verdict: Verdict, reason: str) -> Ended:
        reason += last_words(self._printed.text, self._spec)
        self.close()
        return Ended(verdict, reason)

    def close(self) -> None:
        """Kill the process and, on systems with process groups, the rest of its group."""
        self._channel.close()
        self._printed.close()
        if self._process.pid is None:
            return
        if hasattr(os, "killpg"):
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join(5)


@dataclass
class Clock:
    """The clock of a process: its CPU time, and the time during which all its threads sleep.

    The clock stands still while the process waits for a processor or for a disk. But it shows at
    least the elapsed time divided by `SLOWEST`. Where the system hides what the process does,
    elapsed time counts as CPU time.

    Attributes:
        pid: the process; 0 if unknown.
        descendants: whether the processes that it started count too.
        cpu: seconds of CPU time of all threads.
        asleep: seconds during which all threads slept or were stopped.
        own: the same as elapsed time, of however many threads: seconds in which the process neither
            waited for a processor nor for a disk.
        waited: seconds during which a message was awaited from the process.
    """

    pid: int
    descendants: bool = False
    cpu: float = 0.0
    asleep: float = 0.0
    own: float = 0.0
    waited: float = 0.0

    @property
    def seconds(self) -> float:
        """What the clock shows."""
        return max(self.cpu + self.asleep, self.waited / SLOWEST)

    def read(self, waited: float = 0.0) -> None:
        """Read the clock after waiting for a message for so many seconds."""
        self.waited += waited
        try:
            cpu, sleeps = _activity(self.pid, self.descendants, threads=waited > 0)
        except (OSError, psutil.Error):
            self.cpu += waited
            self.own += waited
            return
        used = max(0.0, cpu - self.cpu)
        self.cpu += used
        if sleeps:
            self.asleep += max(0.0, waited - used)
        self.own += waited if sleeps else min(used, waited)


def _activity(pid: int, descendants: bool, *, threads: bool) -> tuple[float, bool]:
    """Return the CPU seconds of a process, and whether all its threads sleep or are stopped.

    `descendants` tells whether to include the processes that it started, and `threads` whether to
    look at threads at all.

    Raises:
        OSError, psutil.Error: the process has ended, or the system hides it.
    """
    below = psutil.Process(pid).children(recursive=True) if descendants else []
    ticks, states = 0, set()
    for number in (pid, *(child.pid for child in below)):
        try:
            # User and system time, and those of children that have ended.
            ticks += sum(map(int, stat_of(f"/proc/{number}/stat")[11:15]))
            for thread in os.listdir(f"/proc/{number}/task") if threads else ():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    states.add(stat_of(f"/proc/{number}/task/{thread}/stat")[0])
        except (FileNotFoundError, ProcessLookupError):
            if number == pid:
                raise
    return ticks / os.sysconf("SC_CLK_TCK"), states.isdisjoint("RD")


def stat_of(path: str) -> list[str]:
    """Return the fields of a `stat` file in /proc, beginning with the state of the process."""
    # The name of the process may contain anything.
    with open(path, "rb") as file:
        return file.read().rpartition(b")")[2].decode().split()


def _context() -> BaseContext:
    """Return a context that forks processes from a server that has imported only the suite.

    A new process then takes 20 ms instead of a second, and does not inherit any threads. On systems
    without such a server, the context spawns processes.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["conformance.running.isolation_child"])
    # The server inherits the mask. It ignores Ctrl-C once it has imported the suite, not before.
    # The tracker would unblock the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def serve_by_fork() -> None:
    """Make a fork of this process the server, instead of an interpreter that imports the suite.

    A run then starts half a second earlier. The process must have imported only the suite, and run
    no other code of the user. Do nothing except on Linux and in a process with a single thread, or
    if there is a server already.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        return
    resource_tracker.ensure_running()
    # Python has no other place at which it can be told how to start the server.
    start = util.spawnv_passfds  # type: ignore[attr-defined]
    util.spawnv_passfds = partial(_forked, start)  # type: ignore[attr-defined]
    try:
        _context()
    finally:
        util.spawnv_passfds = start  # type: ignore[attr-defined]


def _forked(
    start: Callable[..., int], _: bytes, arguments: Sequence[str], passed: Sequence[int]
) -> int:
    """Fork a process that executes the program after `-c` in `arguments`, and return its id.

    As after exec, it has no files open but the three streams and the descriptors in `passed`, and
    it starts other processes with `start`, as usual.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # NumPy may have threads, which stop before a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process:
        return process
    try:
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in passed:
                with contextlib.suppress(OSError):
                    os.close(number)
        sys.modules["__main__"] = ModuleType("__main__")
        util.spawnv_passfds = start  # type: ignore[attr-defined]
        # This process is starting a server, and holds the lock for that.
        forkserver.ensure_running.__self__.__init__()  # type: ignore[attr-defined]
        exec(arguments[-1], {"__name__": "__main__"})
    finally:
        os._exit(1)


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module inside the context, so that new processes do not import it again.

    The main module is pytest, or a script that may lack an `if __name__ == "__main__"` guard.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# What a process printed, and how it ended

KEPT = 64 * 2**10
"""The number of bytes kept from the end of the output: enough for a stack and a line before it."""
AT_ONCE = 2**20
"""The number of bytes after which `Printed.read` stops, because a process may print endlessly."""


class Printed:
    """The reading end of the pipe for stdout and stderr of a process.

    A file would be simpler, but a process that prints endlessly would fill the disk.
    """

    def __init__(self, channel: Connection) -> None:
        self.channel = channel
        self._end = b""
        os.set_blocking(channel.fileno(), False)

    def read(self) -> bool:
        """Read available output, at most about `AT_ONCE` bytes, without blocking, and keep its end.

        Return False if the pipe is closed, and True otherwise.
        """
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
        """Discard the output so far."""
        self.read()
        self._end = b""

    @property
    def text(self) -> str:
        """The last bytes of the output so far, at most `KEPT`, as text."""
        self.read()
        return self._end.decode(errors="replace")

    def close(self) -> None:
        """Close the pipe."""
        with contextlib.suppress(OSError):
            self.channel.close()


_DUMP = re.compile(r"^(Fatal Python error: |Current thread |Thread 0x|Stack \(most recent)", re.M)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (\S+)$', re.MULTILINE)


def died(code: int | None) -> str:
    """Return a text that describes how a process ended.

    `code` is its `multiprocessing.Process.exitcode`: negative for a signal, None if unknown.
    """
    if code is not None and code < 0:
        try:
            return f"the process died with {signal.Signals(-code).name}"
        except ValueError:
            return f"the process died with signal {-code}"
    return f"the process ended with exit code {'unknown' if code is None else code}"


def last_words(text: str, spec: str) -> str:
    """Return where a process ended and what it printed last, as a suffix for a reason.

    For example, " (at layer.py:12); it printed last: out of memory". What is unknown is left out.
    The place is in the implementation's own file, if the stack has a frame in it. `text` is the
    output of the process that runs the implementation `spec`, including any stack that it printed.
    """
    dump = _DUMP.search(text)
    printed, stack = (text[: dump.start()], text[dump.start() :]) if dump else (text, "")
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    frames = [(Path(path).name, line) for path, line, _ in _FRAME.findall(stack)]
    # Prefer frames in the implementation's own file.
    file = Path(spec.partition(":")[0]).name
    theirs = [frame for frame in frames if frame[0] == file] or frames
    where = " (at {}:{})".format(*theirs[0]) if theirs else ""
    return where + (f"; it printed last: {lines[-1][:200]}" if lines else "")
