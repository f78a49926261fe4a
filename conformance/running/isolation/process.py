"""What a new process does before anything of the implementation is imported in it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

STACK_SIGNAL = getattr(signal, "SIGUSR1", None)
"""Asks a process where it is; answered by C code, also while Python hangs."""


def settle(printed: Connection) -> None:
    """Detach from the terminal, print into the pipe, end with the parent."""
    if hasattr(os, "setsid"):
        # Ctrl-C is for the run, and what the implementation starts is to be killed with it.
        os.setsid()
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    for descriptor in (1, 2):
        os.dup2(printed.fileno(), descriptor)
    printed.close()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        # Whatever the parent's streams were; a line is written when it ends.
        setattr(sys, name, open(descriptor, "w", buffering=1, closefd=False, errors="replace"))  # noqa: SIM115
    faulthandler.enable()
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, all_threads=False)


def _end_with_parent() -> None:
    """A run that is killed leaves nobody behind, nor what they started."""
    parent = parent_process()
    if parent is None:
        return
    try:
        _ask_kernel(parent.sentinel)
    except (AttributeError, OSError):
        # Elsewhere a thread watches; who hangs in C code and lets no thread run goes on there.
        threading.Thread(target=_watch, args=(parent.sentinel,), daemon=True).start()


def _ask_kernel(sentinel: int) -> None:
    """Linux: when the other end of this pipe closes, the kernel kills the process group."""
    # Not prctl's signal at the parent's death: the parent is the server, which outlives the run.
    fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)  # type: ignore[attr-defined]
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpgrp())
    flags = fcntl.fcntl(sentinel, fcntl.F_GETFL)
    fcntl.fcntl(sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
    if connection.wait([sentinel], 0):
        os._exit(1)


def _watch(sentinel: int) -> None:
    connection.wait([sentinel])
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
