"""The record of an examination at length: what one implementation was asked, from length to length.

It is read without an adapter. A deviation is sorted by a baseline like any other: the case of a
problem is `long/PROBLEM/QUERIESxKEYS`, and what is known of it stands beside what is known of the
catalogue's cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from conformance.errors import BrokenRecord
from conformance.records.findings import CaseResult, Figures, Finding
from conformance.records.header import SCHEMA as RECORD
from conformance.records.header import Header, Implementation, Provenance
from conformance.records.numbers import LIMIT
from conformance.records.record import Record

SCHEMA = "mha-conformance/long/1"
MOST_BYTES = 2**22
PREFIX = "long/"
"""Begins the id of a problem in the place of a case id."""

SQUARE = ("causal", "full", "sampled", "window", "packed", "sinks", "soft cap")
"""The problems with as many queries as keys; the others are long on one side only."""

Outcome = Literal["conforms", "deviates", "unsupported", "error", "not reached"]


class Seen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was seen of one array, in units of σ.

    Attributes:
        array: "output", "log_total", or "query", "key", "value" and "sinks" for the gradient of
            each.
        largest, rms, bias, gain: as in `conformance.long.checking`; at most `findings.INFINITE`.
        excess: the largest of them relative to its limit; the array conforms up to 1.
    """

    array: str
    largest: float
    rms: float
    bias: float
    gain: float
    excess: float


class Step(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The result of one problem.

    Attributes:
        problem: its name, such as "causal" or "few queries".
        why: the reason, where nothing was compared.
        detail: a sentence about the worst element, or about rows that are not bit for bit.
        seen: one entry for each array; empty for retrieval, and where nothing was compared.
        reached: the most accurate class within whose limits all arrays are.
        called, own: seconds of the implementation and of the suite.
        first: further seconds of what only the first call of a shape takes, such as compiling.
    """

    problem: str
    dtype: str
    mode: str
    queries: int
    keys: int
    verdict: Outcome
    why: str = ""
    detail: str = ""
    seen: list[Seen] = []
    reached: str = ""
    called: float = 0.0
    own: float = 0.0
    first: float = 0.0

    @property
    def length(self) -> int:
        """The longer side."""
        return max(self.queries, self.keys)

    @property
    def case(self) -> str:
        """The id that stands in the place of a case id."""
        return f"{PREFIX}{self.problem.replace(' ', '-')}/{self.queries}x{self.keys}"

    @property
    def wrong(self) -> bool:
        """Whether there is evidence that something is wrong."""
        return self.verdict in ("deviates", "error")

    @property
    def worst(self) -> Seen | None:
        """The array that is furthest beyond its limits, or closest to them."""
        return max(self.seen, key=lambda seen: seen.excess, default=None)


class Climb(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one implementation was asked at length.

    Attributes:
        lengths: those that were asked, in order.
        tile: how many keys the implementation says to add up at once; 0 if it does not.
        memory, seconds: the limits; None for none.
        steps: a result for each problem, in the order in which they were asked.
    """

    schema: str
    implementation: Implementation
    provenance: Provenance
    lengths: list[int]
    head_size: int
    tile: int
    memory: int | None
    seconds: float | None
    steps: list[Step]


@dataclass(frozen=True)
class Reach:
    """How far an implementation conforms in one dtype.

    Attributes:
        most: the greatest length up to which whole sequences conform, and everything else that was
            compared; 0 for none.
        beside: the same for problems that are long on one side only, which reach further.
        first: the first problem that deviates, or None.
        missing: the problems that were not reached.
        refused: those that it does not support.
    """

    dtype: str
    most: int
    beside: int
    first: Step | None
    missing: Sequence[Step]
    refused: Sequence[Step]

    @property
    def compared(self) -> bool:
        """Whether anything was compared."""
        return bool(self.most or self.beside or self.first)


Climbs: TypeAlias = list[Climb]
"""The output of `long --format json`."""


def reaches(steps: Iterable[Step]) -> list[Reach]:
    """Return how far an implementation conforms, for each dtype."""
    every = list(steps)
    found = []
    for dtype in dict.fromkeys(step.dtype for step in every):
        own = sorted((step for step in every if step.dtype == dtype), key=lambda one: one.length)
        first = next((step for step in own if step.wrong), None)
        below = [
            step
            for step in own
            if step.verdict == "conforms" and (first is None or step.length < first.length)
        ]
        square = [step.length for step in below if step.problem in SQUARE]
        found.append(
            Reach(
                dtype,
                max(square, default=0),
                max((step.length for step in below), default=0),
                first,
                [step for step in own if step.verdict == "not reached"],
                [step for step in own if step.verdict == "unsupported"],
            )
        )
    return found


_OUTPUT, _GRADIENT = "output.equals-definition", "gradient.inputs-equal-definition"


def as_record(climb: Climb) -> Record:
    """Return what was compared as a record of a run, so that a baseline can sort it."""
    own, device = climb.implementation, climb.provenance.device
    results = [
        CaseResult(own.name, step.case, step.dtype, device, step.mode, _findings(step))
        for step in climb.steps
        if step.verdict in ("conforms", "deviates", "error")
    ]
    header = Header(RECORD, own.name, climb.provenance, [own], planned=len(results))
    return Record(header, True, results)


def _findings(step: Step) -> list[Finding]:
    """Return one finding for the output and one for the gradients, of the array that decides."""
    if step.verdict == "error":
        return [Finding(_OUTPUT, "error", step.why)]
    if not step.seen:
        return [Finding(_OUTPUT, "deviates" if step.wrong else "conforms", step.detail)]
    found: dict[str, Seen] = {}
    for seen in sorted(step.seen, key=lambda seen: seen.excess):
        found[_OUTPUT if seen.array in ("output", "log_total") else _GRADIENT] = seen
    return [
        Finding(
            requirement,
            "deviates" if seen.excess > 1 else "conforms",
            step.detail if seen == step.worst else "",
            figures=Figures(seen.array, seen.largest, seen.rms, seen.bias, LIMIT, step.reached),
        )
        for requirement, seen in sorted(found.items(), reverse=True)
    ]


def write_climb(path: Path, climb: Climb) -> None:
    """Write the record as indented JSON, which version control can compare."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(climb), indent=1)
    temporary = path.with_suffix(".new")
    temporary.write_bytes(content + b"\n")
    temporary.replace(path)


def read_climb(path: Path) -> Climb:
    """Return the record; raises `BrokenRecord` if the file is none."""
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            raise BrokenRecord(f"{path} is no record of an examination at length")
        found = msgspec.json.decode(path.read_bytes(), type=Climb)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BrokenRecord(f"{path} is no record of an examination at length: {error}") from error
    if found.schema != SCHEMA:
        raise BrokenRecord(f"{path} has schema {found.schema!r}; this suite reads {SCHEMA}")
    return found
