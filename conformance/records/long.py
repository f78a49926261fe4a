"""The record of how one implementation was tested on sequences of increasing length.

Reading such a record does not require an adapter. Each problem has the case id
`long/PROBLEM/QUERIESxKEYS`, so that a baseline can list known deviations on long problems together
with those on the catalogue's cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from conformance.records.findings import CaseResult, Figures, Finding
from conformance.records.header import SCHEMA as RECORD
from conformance.records.header import Header, Implementation, Provenance
from conformance.records.numbers import LIMIT
from conformance.records.record import Record, read_document

SCHEMA = "mha-conformance/long/1"
MOST_BYTES = 2**22
PREFIX = "long/"
"""The prefix of the ids of long problems, which take the place of case ids."""

Outcome = Literal["conforms", "deviates", "unsupported", "error", "not reached"]


def array_title(name: str) -> str:
    """Return "gradient of NAME" for an array called NAME; "output" and "log_total" stay as is."""
    return name if name in ("output", "log_total") else f"gradient of {name}"


class ArrayStatistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The error statistics of one array, in units of σ.

    Attributes:
        array: "output", "log_total", or the name of an input, such as "query" or "norm.key", for
            the gradient with respect to it.
        largest, rms, bias, gain: the largest |error|/σ, the rms and the signed bias of error/σ, and
            the bias in the direction of the expected values, as `conformance.long.checking` defines
            them. An infinite value is stored as `findings.INFINITE`.
        excess: the largest of these statistics relative to its limit; the array conforms if
            `excess` is at most 1.
    """

    array: str
    largest: float
    rms: float
    bias: float
    gain: float
    excess: float

    @property
    def title(self) -> str:
        """The name of the array in text; see `array_title`."""
        return array_title(self.array)


class Step(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The result of one problem.

    Attributes:
        problem: the name of the problem, such as "causal" or "few queries".
        why: the reason if nothing was compared, such as the text of an exception, or "".
        detail: a sentence about the worst element, or about rows that were not retrieved.
        seen: the statistics of each array; [] if nothing was compared, and for problems of
            retrieval, of which rows are counted.
        reached: the most accurate accuracy class whose limits all arrays meet, or "".
        called, own: the seconds that the implementation took, and those that the suite took.
        first: additional seconds that only the first call with a shape takes, such as compiling.
    """

    problem: str
    dtype: str
    mode: str
    queries: int
    keys: int
    verdict: Outcome
    why: str = ""
    detail: str = ""
    seen: list[ArrayStatistics] = []
    reached: str = ""
    called: float = 0.0
    own: float = 0.0
    first: float = 0.0

    @property
    def length(self) -> int:
        """The number of queries or of keys, whichever is larger."""
        return max(self.queries, self.keys)

    @property
    def case(self) -> str:
        """The id of the problem, used instead of a case id, such as "long/full/64x64"."""
        return f"{PREFIX}{self.problem.replace(' ', '-')}/{self.queries}x{self.keys}"

    @property
    def wrong(self) -> bool:
        """Whether the verdict is evidence of a mistake: "deviates" or "error"."""
        return self.verdict in ("deviates", "error")

    @property
    def judged(self) -> bool:
        """Whether there is a verdict on a call: "conforms", "deviates" or "error"."""
        return self.verdict == "conforms" or self.wrong

    @property
    def worst(self) -> ArrayStatistics | None:
        """The statistics of the array with the largest `excess`, or None if there are none."""
        return max(self.seen, key=lambda seen: seen.excess, default=None)


class Climb(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record of how one implementation was tested on long sequences.

    Attributes:
        lengths: the lengths that were tested, in order.
        tile: the number of keys that the implementation sums up at once, as its adapter declares or
            the user says; 0 if it is unknown.
        memory: the limit on memory in bytes; None if all available memory was allowed.
        seconds: the limit on the time for all problems; None for no limit.
        steps: the result of each problem, in the order in which the problems were posed.
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
    """The length up to which an implementation conforms in one dtype.

    Attributes:
        most: the greatest length at which a problem with as many queries as keys conforms, below
            the length of `first`; 0 for none.
        beside: the greatest length below that of `first` at which any problem conforms, including
            problems with few queries or few keys, which reach greater lengths; 0 for none.
        first: the shortest problem that deviates or raises an error, or None.
        missing: the problems that were not reached.
        refused: the problems that the implementation does not support.
    """

    dtype: str
    most: int
    beside: int
    first: Step | None
    missing: Sequence[Step]
    refused: Sequence[Step]

    @property
    def compared(self) -> bool:
        """Whether there are problems that conform, deviate or raise an error."""
        return bool(self.most or self.beside or self.first)


Climbs: TypeAlias = list[Climb]
"""The output of `long --format json`."""


def reaches(steps: Iterable[Step]) -> list[Reach]:
    """Return the length up to which an implementation conforms, for each dtype."""
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
        square = [step.length for step in below if step.queries == step.keys]
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
    """Return the results in `climb` as the record of a run, so that a baseline can be applied.

    Problems that are unsupported or were not reached are left out.
    """
    own, device = climb.implementation, climb.provenance.device
    results = [
        CaseResult(own.name, step.case, step.dtype, device, step.mode, _findings(step))
        for step in climb.steps
        if step.judged
    ]
    header = Header(RECORD, own.name, climb.provenance, [own], planned=len(results))
    return Record(header, True, results)


def _findings(step: Step) -> list[Finding]:
    """Return a finding for the output and one for the gradients, each about the worst array.

    If there are no statistics for one of the two, its finding is left out. If there are none at
    all, or an error was raised, return only a finding for the output.
    """
    if step.verdict == "error":
        return [Finding(_OUTPUT, "error", step.why)]
    if not step.seen:
        return [Finding(_OUTPUT, "deviates" if step.wrong else "conforms", step.detail)]
    found: dict[str, ArrayStatistics] = {}
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


def read_climb(path: Path) -> Climb:
    """Read and return the record of a test on long sequences.

    Raises:
        BrokenRecord: the file cannot be read, is too large, or is not such a record.
    """
    return read_document(path, Climb, SCHEMA, MOST_BYTES, "record of an examination at length")
