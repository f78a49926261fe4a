"""Messages between a supervisor and its process: bytes of plain data, never pickled objects.

Unpickling what an implementation's process sends could run the implementation's code here.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

import msgspec

from conformance.adapter.base import Adapter, Call, Mode
from conformance.cases.case import Case
from conformance.definition.problem import Answer, Problem
from conformance.errors import Unavailable
from conformance.records.header import Implementation

STACK_SIGNAL = getattr(signal, "SIGUSR1", None)
"""Asks a process for its stack; C code answers, so it works while Python hangs."""


@dataclass(frozen=True)
class Limits:
    """Limits of one process.

    Attributes:
        item: seconds for one item.
        start: seconds to import the implementation and its framework, and to tell its declaration.
        memory: MiB of resident memory, with that of processes it started. Address space would be
            easier to limit, but JAX, TensorFlow and CUDA reserve far more of it than they use.
        deaths: in a row, after which no further item is asked: the run shall end in reasonable
            time.
    """

    item: float = 60.0
    start: float = 120.0
    memory: float = 8192.0
    deaths: int = 10


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The implementation is imported."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """There is no implementation: the name is wrong, or (`failed`) the import fails."""

    reason: str
    failed: bool


class Declare(msgspec.Struct, frozen=True, tag=True):
    """Asks which modes to examine for these cases and dtypes, and what the adapter declares."""

    cases: list[str]
    dtypes: list[str]
    files: list[str] = []
    """Files of the cases that are not in the catalogue."""


class DeclaredMode(msgspec.Struct, frozen=True):
    """What planning needs of a mode."""

    name: str
    optimised: bool = False


class Declared(msgspec.Struct, frozen=True, tag=True):
    """What a run needs to know of an implementation that it does not import."""

    implementation: Implementation
    modes: list[DeclaredMode]
    device_model: str = ""
    compiles: bool = False
    plan: dict[str, list[str]] = {}
    """`plan_key` of case and dtype to the modes in which it is examined."""
    ended: tuple[str, str] | None = None
    """Verdict of every item, and the reason, where the implementation could not be imported."""


class Examine(msgspec.Struct, frozen=True, tag=True):
    """Asks for one item; `place` is that in the run, or -1 if the record has no weights of it."""

    case: str
    dtype: str
    mode: str
    place: int
    file: str = ""
    """The case file, if the case is not in the catalogue."""


class Examined(msgspec.Struct, frozen=True, tag=True):
    """A journal line; `spent` if the process cannot be used again."""

    line: bytes
    spent: bool = False


class Mistaken(msgspec.Struct, frozen=True, tag=True):
    """An error of the suite, not of the implementation, with its traceback."""

    traceback: str


def plan_key(case: str, dtype: str) -> str:
    """Return the key of `Declared.plan`."""
    return f"{case} {dtype}"


def encode(message: msgspec.Struct) -> bytes:
    """Return a message as bytes."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: Any) -> Any:
    """Decode a message; `kind` may be a union of the messages that are expected."""
    return msgspec.msgpack.decode(data, type=kind)


class StandIn(Adapter):
    """A stand-in for an implementation in another process, with its declaration but no code."""

    def __init__(self, declared: Declared) -> None:
        self.declared = declared
        described = declared.implementation
        self.name = described.name
        self.title = described.title
        self.dtypes = tuple(described.dtypes)
        self.modes = tuple(Mode(mode.name, optimised=mode.optimised) for mode in declared.modes)

    @property
    def compiles(self) -> bool:
        return self.declared.compiles

    def modes_of(self, case: Case, dtype: str) -> tuple[Mode, ...]:
        """Return the modes in which the case is examined, as the adapter's process planned it."""
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
