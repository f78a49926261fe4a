"""Run a command in a watched child process, because an exit code alone proves nothing.

C code of an implementation can end its process at any time, even with the exit code for success,
and no code in that process can prevent this. Therefore the command runs in a child process, which
reports its exit code before it ends. The parent waits for the child and passes signals on to it.
The child is forked before any framework is imported.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from conformance.errors import ExitCode

COMMANDS = ("run", "gate", "baseline", "probe", "explore", "reproduce", "heads", "long")
"""The commands that run in a watched process, because they may call an implementation."""

_WATCHED: list[int] = []
"""The id of this process once it is a watched one."""

_NAMES = ("SIGCHLD", "SIGINT", "SIGTERM", "SIGHUP")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


def watched(run: Callable[[], int]) -> int:
    """Call `run` in a forked child process; return its exit code, in parent and child alike.

    If the child ends before `run` returns or raises, the parent returns `INCOMPLETE`. If a signal
    ends the child later, the parent returns 128 plus the signal's number. If the platform cannot
    fork processes, call `run` in this process.
    """
    if not hasattr(os, "fork"):
        return run()
    sys.stdout.flush()
    parent = os.getpid()
    # No process inherits the ends of this pipe through exec.
    ours, theirs = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(ours)
        _WATCHED[:] = [os.getpid()]
        _end_with(parent)
        return _reported(run, theirs)
    os.close(theirs)
    try:
        status = _wait(child)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # A process that the child started may still hold the other end.
    os.set_blocking(ours, False)
    said = b""
    with suppress(BlockingIOError):
        said = os.read(ours, 64)
    process, _, code = said.decode().partition(" ")
    if process == str(child):
        # It may still have crashed while the interpreter shut down.
        return 128 - status if status < 0 else status or int(code)
    from conformance.running.isolation import died

    print(
        f"mha-conformance: {died(status)} before the command did; a record keeps what was "
        "measured, and run --isolate says at which item it happens; for a layer that keeps a "
        "state, run -v does",
        file=sys.stderr,
    )
    return ExitCode.INCOMPLETE


def is_watched() -> bool:
    """Return whether this process was forked by `watched`, so it is that of a command."""
    return os.getpid() in _WATCHED


def _reported(run: Callable[[], int], channel: int) -> int:
    """Call `run`, return its exit code, and write the process id and the code to a pipe.

    The code is also written if `run` raises: that of `SystemExit`, or 1 for other exceptions.
    `channel` is the file descriptor of the pipe.
    """
    code = 1
    try:
        code = run()
        return code
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    finally:
        # Only processes are left to be ended, which another Ctrl-C shall not interrupt.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.write(channel, f"{os.getpid()} {int(code)}".encode())


def _end_with(parent: int) -> None:
    """Arrange for this process to be killed when its parent, the process `parent`, ends.

    If the parent has ended already, exit at once with `INCOMPLETE`.
    """
    try:
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    except (ImportError, OSError, AttributeError):
        # Only Linux has this; elsewhere a thread looks every second.
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(ExitCode.INCOMPLETE)


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait(child: int) -> int:
    """Wait until the child ends; return its exit code, or the negative number of a fatal signal.

    Meanwhile, pass on signals to the child, except those that a terminal sends to it anyway.
    """
    while True:
        number, sender = _signal()
        if number == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
        elif sender:
            with suppress(OSError):
                os.kill(child, number)


def _signal() -> tuple[int, int]:
    """Wait for a signal, and return its number and the id of the process that sent it.

    The id is 0 if the signal comes from a terminal, which sends it to the child as well. Where the
    platform does not tell the sender, the id is 0 for SIGINT and 1 for other signals.
    """
    if hasattr(signal, "sigwaitinfo"):
        info = signal.sigwaitinfo(_SIGNALS)
        return info.si_signo, info.si_pid
    # Only a terminal usually sends SIGINT.
    number = signal.sigwait(_SIGNALS)
    return number, 0 if number == signal.SIGINT else 1
