"""The process of one implementation: it receives an item, examines it, and returns a line.

The server from which such processes are forked imports this module, so it imports what they all
need, and no framework.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import traceback
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from pathlib import Path

from conformance.adapter.base import Adapter
from conformance.adapter.loading import load
from conformance.cases.case import Case
from conformance.cases.casefile import load_case
from conformance.cases.catalogue import catalogue
from conformance.errors import ConformanceError, FailsOnImport, Unavailable
from conformance.experiments import EXPERIMENTS
from conformance.records.findings import item_id, without_outcome
from conformance.records.record import encode_line
from conformance.running.examiner import Examiner
from conformance.running.isolation.messages import (
    STACK_SIGNAL,
    Declare,
    Declared,
    DeclaredMode,
    Examine,
    Examined,
    Mistaken,
    Ready,
    Refused,
    decode,
    encode,
    plan_key,
)
from conformance.running.provenance import describe
from conformance.running.session import Inquiry, Item, Row, plan

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FATAL = ("CUDA error", "device-side assert", "CUDNN_STATUS_", "CUBLAS_STATUS_EXECUTION_FAILED")
"""Parts of messages after which every later call of this process would fail."""


def serve(channel: Connection, printed: Connection, spec: str, device: str) -> None:
    """Load the implementation, then answer requests until there are no more."""
    settle(printed)
    try:
        adapter = load(spec)
    except BaseException as error:
        channel.send_bytes(encode(_refused(error)))
        os._exit(0)
    channel.send_bytes(encode(Ready()))
    desk = Desk(adapter, spec, device)
    while True:
        try:
            request = decode(channel.recv_bytes(), Declare | Examine)
        except (EOFError, OSError):
            # Not sys.exit: a framework may hang or crash while the interpreter shuts down.
            os._exit(0)
        channel.send_bytes(encode(desk.answer(request)))


class Desk:
    """A server of requests about one adapter."""

    def __init__(self, adapter: Adapter, spec: str, device: str) -> None:
        self._adapter, self._spec, self._device = adapter, spec, device
        self._cases: dict[str, Case] = {case.id: case for case in catalogue()}
        self._experiments = {experiment.id: experiment for experiment in EXPERIMENTS}
        self._modes = {mode.name: mode for mode in adapter.modes}
        self._places: dict[str, int] = {}
        self._examiner = Examiner(self._places)

    def answer(self, request: Declare | Examine) -> Declared | Examined | Mistaken | Refused:
        """Return an answer, whatever happens."""
        try:
            if isinstance(request, Declare):
                return self._declare(request)
            return self._examine(request)
        except Exception:
            return Mistaken(traceback.format_exc())
        except BaseException as error:
            # The implementation raised it: nothing else here ends the program.
            if isinstance(request, Declare):
                return _refused(error)
            return Examined(self._ended(request, error))

    def _declare(self, request: Declare) -> Declared:
        adapter, device = self._adapter, self._device
        (described,) = describe([(adapter, self._spec)], device)
        asked: dict[str, list[str]] = {}
        for file in request.files:
            self._read(file)
        cases = [self._cases[name] for name in request.cases]
        for item in plan([adapter], cases, request.dtypes, device):
            asked.setdefault(plan_key(item.case.id, item.dtype), []).append(item.mode.name)
        reachable = not described.unavailable
        return Declared(
            implementation=described,
            modes=[DeclaredMode(mode.name, mode.optimised) for mode in adapter.modes],
            device_model=adapter.device_model(device) if reachable else "",
            compiles=adapter.compiles if reachable else False,
            plan=asked,
        )

    def _examine(self, request: Examine) -> Examined:
        mode = self._modes[request.mode]
        item: Row
        if request.case in self._experiments:
            experiment = self._experiments[request.case]
            item = Inquiry(self._adapter, experiment, request.dtype, self._device, mode)
        else:
            if request.case not in self._cases:
                self._read(request.file)
            case = self._cases[request.case]
            item = Item(self._adapter, case, request.dtype, self._device, mode)
        if request.place >= 0:
            self._places[item.id] = request.place
        result, arrays = self._examiner.examine(item)
        line = encode_line(result, arrays)
        details = [finding.detail for finding in result.findings if finding.verdict == "error"]
        return Examined(line, any(sign in detail for detail in details for sign in FATAL))

    def _read(self, file: str) -> None:
        case = load_case(Path(file))
        self._cases[case.id] = case

    def _ended(self, request: Examine, error: BaseException) -> bytes:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(": ")
        name = item_id(self._adapter.name, request.case, request.dtype, self._device, request.mode)
        return encode_line(without_outcome(name, "error", reason), {})


def _refused(error: BaseException) -> Refused:
    if isinstance(error, FailsOnImport | Unavailable):
        return Refused(str(error), failed=True)
    if isinstance(error, ConformanceError):
        return Refused(str(error), failed=False)
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
    return Refused(f"does not import: {reason}", failed=True)


# Before anything of the implementation is imported


def settle(printed: Connection) -> None:
    """Detach from the terminal, redirect output to the pipe, and exit with the parent."""
    if hasattr(os, "setsid"):
        # Ctrl-C is for the run; what the implementation starts is killed with its process group.
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
    """End this process and the processes that it started when the run is killed."""
    parent = parent_process()
    if parent is None:
        return
    try:
        _ask_kernel(parent.sentinel)
    except (AttributeError, OSError):
        # Elsewhere a thread watches; C code that lets no thread run is not interrupted there.
        threading.Thread(target=_watch, args=(parent.sentinel,), daemon=True).start()


def _ask_kernel(sentinel: int) -> None:
    """On Linux, let the kernel kill the process group when the other end of this pipe closes."""
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
