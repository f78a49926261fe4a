"""The process of an isolated implementation, and its messages: requests and responses.

The messages are plain data, never pickled objects: unpickling a message from the process could run
code of the implementation. The server from which such processes are forked preloads this module.
For this reason, the module imports what all of these processes need, but no framework.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from conformance.adapter.base import Adapter
from conformance.adapter.loading import load
from conformance.cases.case import Case
from conformance.cases.casefile import load_case
from conformance.cases.catalogue import case_of
from conformance.definition.dtypes import DTYPES, Array
from conformance.definition.geometry import Fixed, Geometry
from conformance.errors import ConformanceError, FailsOnImport, ProcessLost, Unavailable
from conformance.experiments import EXPERIMENTS
from conformance.records.findings import Phrase, Verdict, item_id, without_outcome
from conformance.records.header import Implementation
from conformance.records.record import encode_line
from conformance.running import observing
from conformance.running.provenance import describe
from conformance.running.selection import CORE_DTYPES, core_dtypes
from conformance.running.session import Examiner, Inquiry, Item, Row, Session, plan
from conformance.text import message

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

STACK_SIGNAL = getattr(signal, "SIGUSR1", None)
"""The signal on which a process prints its stack, even if Python hangs; None on Windows."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A message that the process has imported the implementation."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The reason why a process ended, was killed, or could not import the implementation.

    Attributes:
        verdict: the verdict for an item that the process was asked to examine.
        reason: the reason, as text.
        invalid: whether the reason is that the implementation does not exist or is invalid.
    """

    verdict: Verdict
    reason: str
    invalid: bool = False


class Declare(msgspec.Struct, frozen=True, tag=True):
    """A request for the adapter's declaration and the modes in which to run `cases` in `dtypes`."""

    cases: dict[str, str]
    """The path of the case file by the id of the case; "" if the case is in the catalogue."""
    dtypes: list[str]


class Declared(msgspec.Struct, frozen=True, tag=True):
    """The response to `Declare`: what a run needs to know about an isolated implementation.

    Fields without a description correspond to attributes and methods of the adapter.
    """

    implementation: Implementation
    modes: dict[str, bool]
    """Whether each mode is `optimised`, by name."""
    geometry: Geometry | None = None
    fixed: Fixed | None = None
    numbers: dict[str, float] = {}
    page: int = 0
    projections_supplied: bool = False
    device_model: str = ""
    compiles: bool = False
    plan: dict[str, list[str]] = {}
    """The names of the modes to examine, by `plan_key` of case and dtype."""
    refused: frozenset[str] = frozenset()
    """The keys in `plan` whose case the adapter's check rejects in this dtype."""
    ended: Ended | None = None
    """The verdict and reason for every item if no declaration was received, or else None."""


class Examine(msgspec.Struct, frozen=True, tag=True):
    """A request to examine an item, run an experiment, or answer one question of an experiment.

    Attributes:
        case: the id of the case or experiment.
        file: the path of the case file, if the case is not in the catalogue.
        place: the position of the item in the run, or -1 if its attention weights must not be
            recorded.
        question: the index of the question to answer, or -1 to list the questions; None to examine
            the item or run the whole experiment.
    """

    case: str
    dtype: str
    mode: str
    file: str = ""
    place: int = -1
    question: int | None = None


class Examined(msgspec.Struct, frozen=True, tag=True):
    """The response to `Examine`: the journal line and the id of an item.

    If `spent` is True, the process must not be used again.
    """

    line: bytes
    item: str
    spent: bool = False


class Checked(msgspec.Struct, frozen=True, tag=True):
    """A message with the journal line of an item that deviates, still without causes.

    The process sends it before `Examined`, when it begins to search for the causes.
    """

    line: bytes


class Mistaken(msgspec.Struct, frozen=True, tag=True):
    """A response that reports an error of the suite rather than of the implementation."""

    traceback: str


class Stated(msgspec.Struct, frozen=True, tag=True):
    """A message that the process has imported a layer that keeps a state, and what it declares."""

    name: str
    framework: str
    dtypes: list[str]


class Walk(msgspec.Struct, frozen=True, tag=True):
    """A request to take a layer that keeps a state on ways, given by name, in one dtype.

    The response is `Began` and `Checked` for each of them, then `Began` for each of `again` that
    it takes, then `Checked` with the result on bits, and then `Walked`. All journal lines are
    whole.
    """

    dtype: str
    ways: list[str]
    again: list[str]


class Began(msgspec.Struct, frozen=True, tag=True):
    """A message that the process begins with the whole text, `WHOLE`, or with a way."""

    way: str


class Walked(msgspec.Struct, frozen=True, tag=True):
    """A message that all ways were taken."""


Request = Declare | Examine
"""A message to the process, which handles one request at a time."""

Response = Declared | Checked | Examined | Mistaken | Ended | Began | Walked
"""A message with which the process responds. The supervisor also uses `Ended` if the process died
or was killed instead."""


def plan_key(case: str, dtype: str) -> str:
    """Return the key for a case id and a dtype in `Declared.plan`."""
    return f"{case} {dtype}"


encode = msgspec.msgpack.encode
"""Encode a message as bytes."""


def decode(data: bytes, kind: Any) -> Any:
    """Decode a message of type `kind`, which may be a union of message types."""
    return msgspec.msgpack.decode(data, type=kind)


# The process

FATAL = ("CUDA error", "device-side assert", "CUDNN_STATUS_", "CUBLAS_STATUS_EXECUTION_FAILED")
"""Parts of error messages after which every later call in the same process would fail.

Bridges notice by themselves that a device is lost; these are for frameworks whose bridge does not.
"""


def serve(channel: Connection, printed: Connection, spec: str, device: str) -> None:
    """Load the implementation, then serve requests until the channel is closed.

    If the implementation cannot be loaded, send the reason and exit. `printed` is the pipe for what
    the process prints.
    """
    settle(printed)
    observing.observe()
    try:
        adapter = load(spec)
    except BaseException as error:
        channel.send_bytes(encode(_failed(error)))
        os._exit(0)
    channel.send_bytes(encode(Ready()))
    process = os.getpid()

    def say(answer: Response) -> None:
        if os.getpid() != process:
            # The implementation has forked, and both processes returned: only one may respond.
            os._exit(0)
        channel.send_bytes(encode(answer))

    desk = RequestHandler(adapter, spec, device, lambda line: say(Checked(line)))
    while True:
        try:
            request = decode(channel.recv_bytes(), Request)
        except (EOFError, OSError):
            # Avoid sys.exit: a framework may hang or crash while the interpreter shuts down.
            os._exit(0)
        say(desk.answer(request))


def serve_stateful(channel: Connection, printed: Connection, spec: str, device: str) -> None:
    """Do the same for a layer that keeps a state; if the implementation is none, say `Ready`."""
    settle(printed)

    def say(answer: Any) -> None:
        channel.send_bytes(encode(answer))

    # What the suite needs for this takes time to import, and other processes do not need it.
    from conformance.stateful.checking import walked
    from conformance.stateful.layer import find_stateful
    from conformance.stateful.ways import WAYS

    try:
        layer = find_stateful(spec)
    except BaseException as error:
        say(_failed(error))
        os._exit(0)
    if layer is None:
        say(Ready())
        os._exit(0)
    say(Stated(layer.name, layer.framework, list(layer.dtypes)))
    causes: dict[str, Phrase] = {}
    while True:
        try:
            request = decode(channel.recv_bytes(), Walk)
        except (EOFError, OSError):
            os._exit(0)
        ways, again = (
            [way for way in WAYS if way.name in names] for names in (request.ways, request.again)
        )
        try:
            for result in walked(
                layer,
                request.dtype,
                device,
                ways,
                causes,
                lambda told: say(Began(told.partition(" ")[0])),
                again,
            ):
                say(Checked(encode_line(result, {})))
            say(Walked())
        except ConformanceError as error:
            say(_failed(error))
        except Exception:
            say(Mistaken(traceback.format_exc()))


class RequestHandler:
    """The handler of all requests to the process of one implementation.

    `checked` is called with the journal line of an item that deviates, before the search for the
    causes of the deviations.
    """

    def __init__(
        self, adapter: Adapter, spec: str, device: str, checked: Callable[[bytes], None]
    ) -> None:
        self._adapter, self._spec, self._device = adapter, spec, device
        self._stored: dict[str, Case] = {}
        self._experiments = {experiment.id: experiment for experiment in EXPERIMENTS}
        self._modes = {mode.name: mode for mode in adapter.modes}
        self._places: dict[str, int] = {}
        session = Session(checked=lambda result: checked(encode_line(result, {})))
        self._examiner = Examiner(self._places, session)

    def answer(self, request: Request) -> Response:
        """Handle a request and return a response, even if an exception is raised."""
        try:
            if isinstance(request, Declare):
                return self._declare(request)
            return self._examine(request)
        except ProcessLost as error:
            # A process without its ranks or its device is replaced like one that ended.
            return Ended(error.verdict, str(error))
        except Exception:
            return Mistaken(traceback.format_exc())
        except BaseException as error:
            # Only the implementation can have raised SystemExit or KeyboardInterrupt.
            if isinstance(request, Declare):
                return _failed(error)
            place = request.case, request.dtype, self._device, request.mode
            failed = without_outcome(item_id(self._adapter.name, *place), "error", _reason(error))
            return Examined(encode_line(failed, {}), failed.id)

    def _declare(self, request: Declare) -> Declared:
        adapter, device = self._adapter, self._device
        (described,) = describe([(adapter, self._spec)], device)
        asked: dict[str, list[str]] = {}
        refused: set[str] = set()
        cases = [self._case(name, file) for name, file in request.cases.items()]
        dtypes = request.dtypes
        if tuple(dtypes) == CORE_DTYPES:
            # There are others for an implementation that lacks some, and more where something is
            # fixed.
            own = DTYPES if adapter.fixed is not None else core_dtypes(adapter)
            dtypes = [*dict.fromkeys((*dtypes, *own))]
        for item in plan([adapter], cases, dtypes, device):
            key = plan_key(item.asked.id, item.dtype)
            asked.setdefault(key, []).append(item.mode.name)
            if item.refused:
                refused.add(key)
        reachable = not described.unavailable
        return Declared(
            implementation=described,
            modes={mode.name: mode.optimised for mode in adapter.modes},
            geometry=adapter.geometry,
            fixed=adapter.fixed,
            numbers=adapter.numbers,
            page=adapter.page,
            projections_supplied=adapter.projections_supplied,
            device_model=adapter.device_model(device) if reachable else "",
            compiles=adapter.compiles if reachable else False,
            plan=asked,
            refused=frozenset(refused),
        )

    def _examine(self, request: Examine) -> Examined:
        where = request.dtype, self._device, self._modes[request.mode]
        experiment = self._experiments.get(request.case)
        row: Row
        if experiment is None:
            row = Item(self._adapter, self._case(request.case, request.file), *where)
        else:
            row = Inquiry(self._adapter, experiment, *where)
        if request.place >= 0:
            self._places[row.id] = request.place
        arrays: dict[str, Array] = {}
        if isinstance(row, Inquiry) and request.question is not None:
            result = self._examiner.session.question(row, request.question)
        else:
            result, arrays = self._examiner.examine(row)
        details = [finding.detail for finding in result.findings if finding.verdict == "error"]
        spent = any(sign in detail for detail in details for sign in FATAL)
        spent |= self._examiner.session.lost_device
        return Examined(encode_line(result, arrays, observing.news()), row.id, spent)

    def _case(self, name: str, file: str) -> Case:
        if not file:
            return case_of(name)
        if name not in self._stored:
            self._stored[name] = load_case(Path(file))
        return self._stored[name]


def _failed(error: BaseException) -> Ended:
    if isinstance(error, ConformanceError):
        invalid = not isinstance(error, FailsOnImport | Unavailable)
        return Ended("unavailable", str(error), invalid)
    return Ended("unavailable", f"does not import: {_reason(error)}")


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {message(error)[:300]}".rstrip(": ")


# Before the implementation is imported


def settle(printed: Connection) -> None:
    """Detach from the terminal, redirect output to the pipe, and arrange to end with the parent."""
    if hasattr(os, "setsid"):
        # A new process group receives no Ctrl-C, and can be killed with all its children.
        os.setsid()
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    for descriptor in (1, 2):
        os.dup2(printed.fileno(), descriptor)
    printed.close()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        # Replace the inherited streams by line-buffered ones.
        setattr(sys, name, open(descriptor, "w", buffering=1, closefd=False, errors="replace"))  # noqa: SIM115
    faulthandler.enable()
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, all_threads=False)


def _end_with_parent() -> None:
    """Arrange for this process and its process group to be killed when the parent ends."""
    parent = parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel
    try:
        # On Linux, the kernel kills the process group when the other end of this pipe is closed.
        # prctl's parent-death signal does not work: the parent is the server, which outlives the
        # run.
        fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)  # type: ignore[attr-defined]
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpgrp())
        flags = fcntl.fcntl(sentinel, fcntl.F_GETFL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
        if connection.wait([sentinel], 0):
            os._exit(1)
    except (AttributeError, OSError):
        # On other systems a thread watches; it cannot interrupt C code that holds the GIL.
        threading.Thread(target=_watch, args=(sentinel,), daemon=True).start()


def _watch(sentinel: int) -> None:
    connection.wait([sentinel])
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
