"""The messages between a supervisor and its process: plain data, never pickled objects.

Unpickling a message from an implementation's process could run the implementation's code.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

import msgspec

from conformance.adapter.base import Call, Mode
from conformance.cases.case import Case
from conformance.definition.geometry import Geometry
from conformance.definition.problem import Answer, Problem
from conformance.errors import Unavailable
from conformance.records.findings import Verdict
from conformance.records.header import Implementation
from conformance.running.session import Planned

STACK_SIGNAL = getattr(signal, "SIGUSR1", None)
"""The signal on which a process prints its stack; a C handler does so even if Python hangs.

It is None on systems without this signal.
"""


@dataclass(frozen=True)
class Limits:
    """The limits of one process.

    Attributes:
        item: seconds for one item.
        start: seconds for the import of the implementation and its framework, and as many again
            for its declaration.
        memory: MiB of resident memory, including child processes. Address space would be easier
            to limit, but JAX, TensorFlow and CUDA reserve far more of it than they use.
        deaths: the number of consecutive lost processes after which the remaining items are
            skipped, so that the run ends in reasonable time.
    """

    item: float = 60.0
    start: float = 120.0
    memory: float = 8192.0
    deaths: int = 10


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
    """A request for the adapter's declaration and the modes in which to run these cases."""

    cases: list[str]
    dtypes: list[str]
    files: list[str] = []
    """The paths of case files, for cases that are not in the catalogue."""


class DeclaredMode(msgspec.Struct, frozen=True):
    """The attributes of a mode that planning needs."""

    name: str
    optimised: bool = False


class Declared(msgspec.Struct, frozen=True, tag=True):
    """The response to `Declare`: what a run needs to know about an isolated implementation."""

    implementation: Implementation
    modes: list[DeclaredMode]
    geometry: Geometry | None = None
    page: int = 0
    projections_supplied: bool = False
    device_model: str = ""
    compiles: bool = False
    plan: dict[str, list[str]] = {}
    """The names of the modes to examine, by `plan_key` of case and dtype."""
    ended: Ended | None = None
    """The verdict and reason for every item if the implementation could not be imported."""


class Examine(msgspec.Struct, frozen=True, tag=True):
    """A request to examine an item.

    `place` is the position of the item in the run, or -1 if its weights must not be recorded.
    """

    case: str
    dtype: str
    mode: str
    place: int
    file: str = ""
    """The path of the case file, if the case is not in the catalogue."""


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A request to answer one question of an experiment, or to list all of them.

    `number` is the index of the question, or -1 to list the subjects of all questions. The response
    is an `Examined` message with the result of `Session.question`.
    """

    case: str
    dtype: str
    mode: str
    number: int


class Examined(msgspec.Struct, frozen=True, tag=True):
    """The response to `Examine` and `Ask`: the journal line and the id of an item.

    If `spent` is True, the process must not be used again.
    """

    line: bytes
    item: str
    spent: bool = False


class Checked(msgspec.Struct, frozen=True, tag=True):
    """A message before `Examined`, if an item deviates: the journal line of the item so far.

    The process sends it before it begins to search for the causes of the deviations.
    """

    line: bytes


class Mistaken(msgspec.Struct, frozen=True, tag=True):
    """A response that reports an error of the suite rather than the implementation."""

    traceback: str


Request = Declare | Examine | Ask
"""A message from a supervisor to its process, which handles one request at a time."""

Response = Declared | Checked | Examined | Mistaken | Ended
"""A message that a supervisor gets in return, or `Ended` if the process ended or was killed."""


def plan_key(case: str, dtype: str) -> str:
    """Return the key for a case id and a dtype in `Declared.plan`."""
    return f"{case} {dtype}"


encode = msgspec.msgpack.encode
"""Encode a message as bytes."""


def decode(data: bytes, kind: Any) -> Any:
    """Decode a message of type `kind`, which may be a union of message types."""
    return msgspec.msgpack.decode(data, type=kind)


class StandIn(Planned):
    """A proxy adapter for an implementation in another process, created from its declaration."""

    def __init__(self, declared: Declared) -> None:
        self.declared = declared
        described = declared.implementation
        self.name = described.name
        self.title = described.title
        self.dtypes = tuple(described.dtypes)
        self.geometry = declared.geometry
        self.projections_supplied = declared.projections_supplied
        self.modes = tuple(Mode(mode.name, optimised=mode.optimised) for mode in declared.modes)

    @property
    def compiles(self) -> bool:
        return self.declared.compiles

    @property
    def page(self) -> int:
        return self.declared.page

    def planned_modes(self, case: Case, dtype: str) -> tuple[Mode, ...]:
        if self.declared.ended is not None:
            return self.modes[:1]
        names = self.declared.plan.get(plan_key(case.id, dtype), [])
        return tuple(mode for mode in self.modes if mode.name in names)

    def versions(self) -> dict[str, str]:
        return self.declared.implementation.versions

    def device_model(self, device: str) -> str:
        if self.declared.implementation.unavailable:
            raise Unavailable(self.declared.implementation.unavailable)
        return self.declared.device_model

    def run(self, problem: Problem, call: Call) -> Answer:
        raise AssertionError("an isolated implementation is run by its supervisor")
