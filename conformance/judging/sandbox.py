"""Sandboxes and workers: the processes in which candidates run, isolated from everything else.

`bubblewrap` gives a sandbox its own namespaces: it has no network, sees no other processes, and has
a read-only file system without the suite and one temporary folder in memory. A process in it has
imported the framework and forks a child for each candidate. The child gives up system calls and
sets limits on its resources before it imports the candidate. With `limits` there is such a child,
but there are no namespaces. Verdicts list what `limits` therefore does not prevent, and this kind
of isolation is used only if the user chooses it.

A `Worker` exchanges messages with such a child. The form of every message from it is checked. The
contents are not trusted: numbers are only compared with expected ones, which the child never
receives. Limits on time are counted on the `Clock` of the child, and not as elapsed time, so that a
verdict depends neither on the speed nor on the load of the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import math
import os
import secrets
import shutil
import signal
import site
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from conformance.adapter.arguments import CausalFlag, MaskArgument
from conformance.adapter.base import Mode
from conformance.adapter.features import DECLARATIONS
from conformance.definition.dtypes import Array
from conformance.definition.geometry import Geometry
from conformance.errors import ConformanceError
from conformance.running.isolation import SLOWEST, Clock, stat_of

DECLARABLE: tuple[type[Any], ...] = (CausalFlag, Geometry, MaskArgument, Mode, *DECLARATIONS)
"""The classes whose objects a candidate's declaration may contain."""

RUNNER = Path(__file__).with_name("runner.py")
NOBODY = 65534
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")

THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

T = TypeVar("T")
V = TypeVar("V")

SANDBOX_LOST = "its sandbox was lost"

HEADER = struct.Struct("<II")
"""The format of the beginning of a message: the sizes in bytes of its JSON part and its arrays."""
MOST_JSON, MOST_ARRAYS = 2**20, 2**28

PR_SET_DUMPABLE = 4
"""The option of prctl that keeps other processes of the user from reading or writing this one."""

POLL = 0.1
"""The seconds between two looks at a process from which a message is awaited."""

LACKS: dict[str, tuple[str, ...]] = {
    "bubblewrap": (),
    "limits": (
        "the file system can be read, and written to where the user may write",
        "files of other candidates and of the suite can be read",
        "other processes of the user can be seen and killed",
    ),
}
"""What each kind of isolation does not prevent, as it is worded in verdicts."""
AS_ROOT = "as root, every file can be written to, those of this program too"
"""What `limits` does not prevent either if the judge runs as root."""


def lacks(isolation: str) -> tuple[str, ...]:
    """Return what a kind of isolation does not prevent here."""
    as_root = isolation == "limits" and hasattr(os, "geteuid") and os.geteuid() == 0
    return (*LACKS[isolation], *([AS_ROOT] if as_root else []))


@dataclass(frozen=True)
class CandidateLimits:
    """The resources that one candidate may use.

    Limits on time are in seconds of the `Clock` of the candidate's process.

    Attributes:
        start: seconds for importing the candidate. Starting the sandbox, or a process in it, may
            take `SLOWEST` times as long, in elapsed time.
        item: seconds for one problem.
        once: seconds of CPU time that each process of the candidate has in addition to `start` and
            `item`, for what it does only once: late imports and compilation, for instance. All its
            messages share them.
        seconds: seconds for everything, both for one process of the candidate, and for all of them
            together with the CPU time of the judge.
        memory: MiB in addition to what its framework takes.
        file: MiB of one file and, under bubblewrap, of all temporary files.
        processes: 0 if the candidate may start no process, which a filter enforces; otherwise the
            maximum number of processes and threads of its user.
    """

    start: float = 60.0
    item: float = 10.0
    once: float = 60.0
    seconds: int = 300
    memory: int = 2048
    file: int = 64
    processes: int = 0


class IsolationMissing(ConformanceError):
    """This machine cannot isolate candidates as requested."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"candidates cannot be isolated here: {why}. On Debian and Ubuntu, "
            "`apt install bubblewrap`; or accept less with --isolation limits, which lacks this: "
            + "; ".join(lacks("limits"))
        )
        self.why = why

    def __reduce__(self) -> tuple[type[IsolationMissing], tuple[str]]:
        # Nodes of a cluster pickle this exception.
        return type(self), (self.why,)


def check(isolation: str) -> None:
    """Check that this machine supports a kind of isolation.

    Raises:
        ConformanceError: there is no such kind, or the system is not Linux.
        IsolationMissing: bubblewrap does not work on this machine.
    """
    if isolation not in LACKS:
        raise ConformanceError(f"--isolation is {isolation!r}; say {' or '.join(LACKS)}")
    if sys.platform != "linux":
        raise ConformanceError(
            "candidates can be judged on Linux only: elsewhere neither their processes nor "
            "their memory can be limited"
        )
    why = _why_not() if isolation == "bubblewrap" else ""
    if why:
        raise IsolationMissing(why)


@cache
def _why_not() -> str:
    """Return why bubblewrap does not work on this machine; "" if it does."""
    program = shutil.which("bwrap")
    if program is None:
        return "bubblewrap (bwrap) is not installed"
    command = [program, *_walls(16), "--", sys.executable, "-I", "-c", "import numpy"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"bubblewrap does not work: {said[:200]}"
    return ""


def _walls(memory: int) -> list[str]:
    """Return bubblewrap's arguments for isolation; `memory` is the MiB of the temporary folder."""
    walls = ["--unshare-all", "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    walls += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    walls += ["--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp"]
    for variable in THREADS.items():
        walls += ["--setenv", *variable]
    for place in SYSTEM:
        path = Path(place)
        if path.is_symlink():
            walls += ["--symlink", os.readlink(path), place]
        elif path.exists():
            walls += ["--ro-bind", place, place]
    suite = RUNNER.parent.parent
    shown = {sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), *site.getsitepackages()}
    # The interpreter of an environment may be a link into a home folder.
    shown |= {str(Path(sys.executable).resolve().parent.parent)}
    for place in sorted(shown):
        if Path(place).is_dir() and not any(place.startswith(f"{one}/") for one in SYSTEM):
            walls += ["--ro-bind", place, place]
    walls += ["--proc", "/proc", "--dev", "/dev", "--size", str(memory * 2**20), "--tmpfs", "/tmp"]
    if any(suite.is_relative_to(place) for place in shown):
        walls += ["--tmpfs", str(suite)]
    # Only the temporary folder, which is wiped, can hold what a candidate leaves behind.
    for place in ("/proc", "/dev", "/"):
        walls += ["--remount-ro", place]
    return [*walls, "--chdir", "/tmp"]


def _is_stopped(pid: int) -> bool:
    try:
        return stat_of(f"/proc/{pid}/stat")[0] in "Tt"
    except OSError:
        # If it has ended, its channel is closed.
        return False


class Sandbox:
    """A process, started when needed, that imports frameworks and forks a child per candidate.

    Args:
        isolation: "bubblewrap" or "limits".
        limits: the resources that each candidate may use.
        warm: modules to import once, for all candidates; those that are missing are skipped.
    """

    def __init__(self, isolation: str, limits: CandidateLimits, warm: Sequence[str] = ()) -> None:
        self.isolation, self.limits, self.warm = isolation, limits, tuple(warm)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._runner = 0
        self._candidate = 0
        self._folder = ""

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the process, unless it is running.

        Raises:
            ConformanceError: the process cannot be started.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        ours, theirs = _channels()
        runner = os.memfd_create("runner")
        os.write(runner, RUNNER.read_bytes())
        os.lseek(runner, 0, os.SEEK_SET)
        control = str(theirs.fileno())
        if self.isolation == "bubblewrap":
            program = shutil.which("bwrap") or "bwrap"
            walls = _walls(self.limits.file)
            at = walls.index("--remount-ro")
            walls[at:at] = ["--perms", "0444", "--ro-bind-data", str(runner), "/runner.py"]
            command = [program, *walls, "--", sys.executable, "-I", "/runner.py", control, "alone"]
        else:
            # A candidate of the same user could write the numbers that it should get into this one.
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
            self._folder = tempfile.mkdtemp(prefix="judge-")
            command = [sys.executable, "-I", str(RUNNER), control, "among"]
        self._process = subprocess.Popen(
            [*command, *self.warm],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), runner),
            env={"PATH": "/usr/bin:/bin", **THREADS},
            cwd=self._folder or "/",
            start_new_session=True,
        )
        theirs.close()
        os.close(runner)
        self._control = ours
        try:
            self._runner = self._greeted(ours)
        except OSError:
            self.close()
            raise ConformanceError("the sandbox for candidates did not start") from None

    def fork(self) -> tuple[socket.socket, int]:
        """Fork a process for a candidate; return a channel to it, and its number on this machine.

        Raises:
            ConformanceError: no process can be forked, not even after restarting the sandbox.
        """
        for _ in range(2):
            self.start()
            ours, theirs = _channels()
            head = {"do": "fork", "limits": dataclasses.asdict(self.limits)}
            assert self._control is not None
            with contextlib.suppress(OSError):
                with theirs:
                    socket.send_fds(self._control, [json.dumps(head).encode()], [theirs.fileno()])
                    (self._candidate,) = struct.unpack("<i", self._reply(4))
                return ours, self._greeted(ours)
            ours.close()
            self.close()
        raise ConformanceError("the sandbox for candidates does not start processes")

    def bury(self) -> str:
        """End the candidate's process and all that it started; return how the process had ended.

        The result is the name of a signal, or "" if the process exited, was still running or got
        SIGKILL, or if the sandbox is not running. If the sandbox was ended or stopped, end it and
        return `SANDBOX_LOST`. Under `limits`, only the process group of the candidate's process is
        ended.
        """
        if self._control is None:
            return ""
        try:
            self._control.sendall(json.dumps({"do": "bury"}).encode())
            status = self._reply(4)
        except TimeoutError:
            self.close()
            return ""
        except OSError:
            # The candidate killed its parent, or stopped it.
            self.close()
            return SANDBOX_LOST
        self._candidate = 0
        code = os.waitstatus_to_exitcode(struct.unpack("<i", status)[0])
        return signal.Signals(-code).name if code < 0 and -code != signal.SIGKILL else ""

    def _reply(self, size: int) -> bytes:
        """Return the next `size` bytes from the runner.

        Raises:
            TimeoutError: they did not arrive although the runner is not stopped.
            OSError: the runner has ended or is stopped.
        """
        assert self._control is not None
        return self._wait().receive(self._control, size)

    def _greeted(self, channel: socket.socket) -> int:
        """Return the number, on this machine, of the process that sends the first byte.

        The result is 0 if the system does not tell.

        Raises:
            TimeoutError, OSError: as for `_reply`.
        """
        greeting, more, *_ = self._wait().step(partial(channel.recvmsg, 1), CREDENTIALS)
        if greeting != b"r":
            raise OSError("closed")
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        return int(struct.unpack_from("i", more[0][2])[0]) if more else 0

    def _wait(self) -> Wait:
        """Return a wait for the runner, or for its child before that runs a candidate."""
        left = SLOWEST * self.limits.start

        def look(waited: float) -> None:
            nonlocal left
            left -= waited
            if self._runner and _is_stopped(self._runner):
                raise OSError("stopped")
            if left <= 0:
                raise TimeoutError

        return Wait(look)

    def close(self) -> None:
        """Kill the sandbox's process and what it started.

        Under `limits`, this is the process group of the candidate, if it was not ended before.
        """
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                self._process.kill()
            self._process.wait()
            self._process = None
            self._runner = 0
        if self._candidate and self.isolation == "limits":
            # Under bubblewrap, it has ended, and its number is that of a process elsewhere.
            with contextlib.suppress(OSError):
                os.killpg(self._candidate, signal.SIGKILL)
        self._candidate = 0
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""


CREDENTIALS = socket.CMSG_SPACE(struct.calcsize("3i"))
"""The size of the process, user and group that the system adds to a message."""


def _channels() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets; the first is told which process sends a message to it."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ours.settimeout(POLL)
    return ours, theirs


class Wait:
    """A wait for a channel, which may take several steps.

    Whenever another `POLL` seconds have passed, `look` is called with their number. What it raises
    ends the wait.
    """

    def __init__(self, look: Callable[[float], None]) -> None:
        self._look, self._looked = look, time.monotonic()

    def step(self, step: Callable[[V], T], value: V) -> T:
        """Return what `step` returns for `value`; call it again if it raises TimeoutError."""
        while True:
            if time.monotonic() - self._looked >= POLL:
                # However late this look is: what kept this process may have kept the other one.
                self._look(POLL)
                self._looked = time.monotonic()
            with contextlib.suppress(TimeoutError):
                return step(value)

    def receive(self, channel: socket.socket, size: int) -> bytes:
        """Return the next `size` bytes from a channel; raise OSError if it is closed."""
        data = bytearray()
        while len(data) < size:
            more = self.step(channel.recv, min(size - len(data), 2**20))
            if not more:
                raise OSError("closed")
            data += more
        return bytes(data)

    def send(self, channel: socket.socket, data: bytes) -> None:
        """Send all of `data`; raise OSError if the channel is closed."""
        left = memoryview(data)
        while left:
            left = left[self.step(channel.send, left) :]


class Lost(ConformanceError):
    """The process of a candidate ended, hung, or sent something that is not an answer."""


class CandidateRefused(ConformanceError):
    """A candidate cannot be imported, or its function or framework cannot be determined."""


class CandidateRaised(msgspec.Struct, frozen=True):
    """An exception that a candidate raised: its type, its text, and the line of the file.

    The line, `place`, is "" if no line of the candidate's file is in the traceback.
    """

    kind: str
    text: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" + (f" ({self.place})" if self.place else "")


class Returned(msgspec.Struct, frozen=True):
    """A returned array without its numbers, which follow the JSON message as float64."""

    name: str
    shape: list[int]
    dtype: str


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reply of a worker: arrays, a declaration or an exception, and the observed behaviour.

    `id` is that of the request. `violations` and `calls` list the forbidden behaviour, and the
    existing attention functions called, that were observed so far.
    """

    id: str
    violations: list[tuple[str, str]] = []
    calls: list[str] = []
    raised: CandidateRaised | None = None
    declared: dict[str, Any] | None = None
    arrays: list[Returned] | None = None


class Worker:
    """A candidate in its own process.

    Attributes:
        violations: forbidden behaviour of the candidate, as pairs of a kind and a sentence.
        calls: the names of existing attention functions that the candidate was seen to call.
        lost: how the process was lost; "" while it can be used.
        clock: the clock of the process.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.violations: dict[tuple[str, str], None] = {}
        self.calls: dict[str, None] = {}
        self.lost = ""
        self._sandbox = sandbox
        self._channel, pid = sandbox.fork()
        self.clock = Clock(pid, sandbox.limits.processes > 0)
        self._once = sandbox.limits.once

    def load(
        self, source: str, file: str, name: str, framework: str, *, profiled: bool
    ) -> dict[str, Any]:
        """Import the candidate; return its declaration as plain data.

        Args:
            source: the content of the candidate's file.
            file: the name of the file, for messages.
            name: the name of the function; "" if only one function in the file can be meant.
            framework: the framework of its arrays; "" if the candidate declares it.
            profiled: whether to record which existing attention functions the import calls.

        Raises:
            Refused: the candidate cannot be imported, or its function or framework is unclear.
            Lost: the process ended, hung, or sent an invalid reply.
        """
        head = {"do": "import", "source": source, "file": file, "name": name}
        more = {"framework": framework, "frameworks": self._sandbox.warm, "profile": profiled}
        more["words"] = [kind.__name__ for kind in DECLARABLE]
        reply, _ = self._exchange(head | more, (), self._sandbox.limits.start)
        if reply.raised is not None:
            raise CandidateRefused(str(reply.raised))
        if reply.declared is None:
            raise self._end("sent something else than a declaration")
        return reply.declared

    def ask(
        self, head: Mapping[str, Any], arrays: Sequence[np.ndarray]
    ) -> tuple[CandidateRaised | None, dict[str, Array], dict[str, str]]:
        """Send a problem; return the exception or None, and the returned arrays and dtypes by name.

        With an exception, both dictionaries are empty. `head` describes the call and its `arrays`.

        Raises:
            Lost: the process ended, hung, or sent an invalid reply.
        """
        data = [np.ascontiguousarray(array).tobytes() for array in arrays]
        reply, body = self._exchange({"do": "ask", **head}, data, self._sandbox.limits.item)
        if reply.raised is not None:
            return reply.raised, {}, {}
        if reply.arrays is None:
            raise self._end("sent something else than an answer")
        found: dict[str, Array] = {}
        at = 0
        for one in reply.arrays:
            if any(size < 0 for size in one.shape):
                raise self._end("sent an array of a negative size")
            size = 8 * math.prod(one.shape)
            if at + size > len(body):
                raise self._end("sent half an answer")
            found[one.name] = np.frombuffer(body[at : at + size]).reshape(one.shape).copy()
            at += size
        if at != len(body) or len(found) != len(reply.arrays):
            raise self._end("sent more than an answer")
        return None, found, {one.name: one.dtype for one in reply.arrays}

    def close(self) -> None:
        """End the process and what it started, as `Sandbox.bury` does."""
        self._channel.close()
        self._sandbox.bury()

    def _exchange(
        self, head: dict[str, Any], arrays: Sequence[bytes], seconds: float
    ) -> tuple[Reply, bytes]:
        if self.lost:
            raise Lost(self.lost)
        name = secrets.token_hex(8)
        text = json.dumps(head | {"id": name}).encode()
        body = b"".join(arrays)
        wait = Wait(self._look(seconds))
        try:
            wait.send(self._channel, HEADER.pack(len(text), len(body)) + text + body)
            sizes = HEADER.unpack(wait.receive(self._channel, HEADER.size))
            if sizes[0] > MOST_JSON or sizes[1] > MOST_ARRAYS:
                raise self._end("sent more than an answer can hold")
            told, returned = (wait.receive(self._channel, size) for size in sizes)
        except TimeoutError as error:
            raise self._end(str(error)) from None
        except OSError:
            raise self._end("its process ended") from None
        try:
            reply = msgspec.json.decode(told, type=Reply)
        except (msgspec.MsgspecError, RecursionError):
            raise self._end("sent something that is no answer") from None
        if reply.id != name:
            raise self._end("answered another question")
        self.violations |= dict.fromkeys(
            (kind[:40], text[:200]) for kind, text in reply.violations[:20]
        )
        self.calls |= dict.fromkeys(call[:100] for call in reply.calls[:20])
        return reply, returned

    def _look(self, seconds: float) -> Callable[[float], None]:
        """Return a function that reads the clock while a reply is awaited, and checks the limits.

        It raises TimeoutError, with the limit, if the process has reached one. `seconds` is the
        limit for this reply.
        """
        clock, limits, once = self.clock, self._sandbox.limits, self._once
        clock.read()
        before = dataclasses.replace(clock)

        def look(waited: float) -> None:
            clock.read(waited)
            if clock.seconds >= limits.seconds:
                raise TimeoutError(f"used all of its {limits.seconds} s of CPU and sleeping time")
            cpu, asleep = clock.cpu - before.cpu, clock.asleep - before.asleep
            if asleep >= seconds:
                raise TimeoutError(f"no answer within {seconds:g} s of sleeping time")
            self._once = once - max(0.0, cpu + asleep - seconds)
            if self._once < 0:
                why = f"no answer within {seconds:g} s of CPU and sleeping time"
                raise TimeoutError(f"{why}, beside {limits.once:g} s of CPU time for all answers")
            most = SLOWEST * (seconds + limits.once)
            if clock.waited - before.waited >= most:
                raise TimeoutError(f"no answer within {most:g} s of elapsed time")

        return look

    def _end(self, why: str) -> Lost:
        how = ""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        if why == "its process ended":
            how = self._sandbox.bury()
            if how == SANDBOX_LOST:
                self.violations["tampering", "it ended or stopped the process beside it"] = None
        self.lost = why + (f": {how}" if how else "")
        return Lost(self.lost)
