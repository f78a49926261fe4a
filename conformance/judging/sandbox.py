"""A sandbox: processes in which candidates run, isolated from everything else on the machine.

`bubblewrap` gives a sandbox its own namespaces: it has no network, sees no other processes, and has
a read-only file system without the suite and one temporary folder in memory. A process in it has
imported the framework and forks a child for each candidate. The child gives up system calls and
sets limits on its resources before it imports the candidate. With `limits` there is such a child,
but there are no namespaces: verdicts list what this does not prevent, and it is never used unless
the user chooses it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import site
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from conformance.errors import ConformanceError

Isolation = Literal["bubblewrap", "limits"]

RUNNER = Path(__file__).with_name("runner.py")
NOBODY = 65534
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")

SANDBOX_LOST = "its sandbox was lost"

LACKS: dict[str, tuple[str, ...]] = {
    "bubblewrap": (),
    "limits": (
        "the file system can be read, and written to where the user may write",
        "files of other candidates and of the suite can be read",
        "other processes of the user can be seen and killed",
    ),
}
"""What each kind of isolation does not prevent, in the words of a verdict."""


@dataclass(frozen=True)
class Limits:
    """The resources that one candidate may use.

    Attributes:
        start: seconds for importing the candidate; also for starting the sandbox.
        item: seconds for one problem.
        seconds: elapsed seconds for everything that one process of the candidate does; the limit
            on the CPU time of the process is 10 seconds higher.
        memory: MiB in addition to what its framework takes.
        file: MiB of one file and, under bubblewrap, of all temporary files.
        processes: 0 if it may start no process, which a filter enforces; otherwise the maximum
            number of processes and threads of its user.
    """

    start: float = 60.0
    item: float = 10.0
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
            + "; ".join(LACKS["limits"])
        )
        self.why = why

    def __reduce__(self) -> tuple[type[IsolationMissing], tuple[str]]:
        # Nodes of a cluster pickle this exception.
        return type(self), (self.why,)


def check(isolation: str) -> None:
    """Raise `IsolationMissing` unless this machine supports this kind of isolation.

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
    """Return bubblewrap's arguments; `memory` is the size of the temporary folder in MiB."""
    walls = ["--unshare-all", "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    walls += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    walls += ["--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp"]
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        walls += ["--setenv", name, "1"]
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


class Sandbox:
    """A process that has imported the frameworks, and forks a child for each candidate.

    Args:
        isolation: "bubblewrap" or "limits".
        limits: the resources that each candidate may use.
        warm: modules that are imported once, for all candidates.
    """

    def __init__(self, isolation: str, limits: Limits, warm: Sequence[str] = ()) -> None:
        self.isolation, self.limits, self.warm = isolation, limits, tuple(warm)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
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
        ours, theirs = socket.socketpair()
        runner = os.memfd_create("runner")
        os.write(runner, RUNNER.read_bytes())
        os.lseek(runner, 0, os.SEEK_SET)
        arguments = [str(theirs.fileno())]
        own = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        if self.isolation == "bubblewrap":
            program = shutil.which("bwrap") or "bwrap"
            walls = _walls(self.limits.file)
            at = walls.index("--remount-ro")
            walls[at:at] = ["--perms", "0444", "--ro-bind-data", str(runner), "/runner.py"]
            command = [program, *walls, "--", sys.executable, "-I", "/runner.py"]
            command += [*arguments, "alone", *self.warm]
        else:
            self._folder = tempfile.mkdtemp(prefix="judge-")
            command = [sys.executable, "-I", str(RUNNER), *arguments, "among", *self.warm]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), runner),
            env={"PATH": "/usr/bin:/bin", **own},
            cwd=self._folder or "/",
            start_new_session=True,
        )
        theirs.close()
        os.close(runner)
        self._control = ours
        if self._reply(1, self.limits.start) != b"r":
            self.close()
            raise ConformanceError("the sandbox for candidates did not start")

    def fork(self) -> socket.socket:
        """Fork a process for a candidate, and return a channel to it.

        Raises:
            ConformanceError: no process can be forked, not even after restarting the sandbox.
        """
        for _ in range(2):
            self.start()
            ours, theirs = socket.socketpair()
            limits = {
                "memory": self.limits.memory,
                "file": self.limits.file,
                "seconds": self.limits.seconds,
                "processes": self.limits.processes,
            }
            head = {"do": "fork", "limits": limits, "filter": True}
            assert self._control is not None
            with theirs, contextlib.suppress(OSError):
                socket.send_fds(self._control, [json.dumps(head).encode()], [theirs.fileno()])
                if self._reply(1, self.limits.start) == b"f":
                    return ours
            ours.close()
            self.close()
        raise ConformanceError("the sandbox for candidates does not start processes")

    def bury(self) -> str:
        """End the candidate's process and all that it started; return how the process had ended.

        That is the name of a signal, or "" if the process exited, was still running or got SIGKILL.
        If the sandbox does not answer, end it and return `SANDBOX_LOST`.
        """
        if self._control is None:
            return ""
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps({"do": "bury"}).encode())
            status = self._reply(4, 10.0)
            if len(status) == 4:
                code = os.waitstatus_to_exitcode(struct.unpack("<i", status)[0])
                if code < 0 and -code != signal.SIGKILL:
                    return signal.Signals(-code).name
                return ""
        # The candidate killed its parent, or stopped it.
        self.close()
        return SANDBOX_LOST

    def _reply(self, size: int, seconds: float) -> bytes:
        assert self._control is not None
        self._control.settimeout(seconds)
        data = b""
        try:
            while len(data) < size:
                more = self._control.recv(size - len(data))
                if not more:
                    break
                data += more
        except OSError:
            return b""
        return data

    def close(self) -> None:
        """End all processes of the sandbox."""
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
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""
