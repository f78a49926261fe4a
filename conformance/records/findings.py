"""The results of one case: findings of requirements, and entries of convention cards.

A convention card lists which conventions an implementation was observed to follow. Statements that
programs compare are phrases: ids with arguments, whose English text is in `conformance.words`.
Errors are numbers in units of the rounding noise σ.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import msgspec


class Phrase(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A statement that programs can compare and count, independently of its wording.

    Attributes:
        id: a stable, dotted id such as "mask.inverted"; "" for the empty phrase.
        arguments: the values in the statement, by name; the order of names does not matter.
    """

    id: str
    arguments: dict[str, Argument] = {}

    def __hash__(self) -> int:
        values = ((n, tuple(v) if isinstance(v, list) else v) for n, v in self.arguments.items())
        return hash((self.id, frozenset(values)))

    def __bool__(self) -> bool:
        return bool(self.id)

    def __str__(self) -> str:
        """Return the id, followed in parentheses by the arguments, if any, sorted by name."""
        if not self.arguments:
            return self.id
        listed = (f"{name}={_text(value)}" for name, value in sorted(self.arguments.items()))
        return f"{self.id}({', '.join(listed)})"

    def name(self, argument: str) -> str:
        """Return the argument with this name; "" if it is missing or not a string."""
        value = self.arguments.get(argument, "")
        return value if isinstance(value, str) else ""

    def part(self, argument: str) -> Phrase:
        """Return the argument with this name; the empty phrase if it is missing or not a phrase."""
        value = self.arguments.get(argument, "")
        return value if isinstance(value, Phrase) else NOTHING

    def having(self, **arguments: Argument) -> Phrase:
        """Return a copy of the phrase with additional or changed arguments."""
        return Phrase(self.id, self.arguments | arguments)

    def parts(self, argument: str) -> list[Part]:
        """Return the argument with this name; [] if it is missing or not a list."""
        value = self.arguments.get(argument, [])
        return value if isinstance(value, list) else []


Part = Phrase | str | int | float

Argument = Part | list[Part]
"""The type of an argument: a string, a number, a phrase, or a list of these."""

NOTHING = Phrase("")
"""The empty phrase, for fields that say nothing."""


def _text(value: Argument) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


Verdict = Literal[
    "conforms",
    "deviates",
    "observed",
    "unsupported",
    "error",
    "crashed",
    "timed-out",
    "unavailable",
    "not-run",
]
"""`observed`: the adapter declares nothing about this characteristic, so its value is recorded.
`not-run`: the item was planned but not examined, for example after an interruption."""

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

VERIFIED: frozenset[str] = frozenset({"conforms", "deviates", "observed", "error"})
"""The verdicts of checks that were carried out: the implementation answered or raised an error."""

ANSWERED = VERIFIED - {"error"}
"""The verdicts of checks that had an answer to judge, which an error has not."""

NOT_VERIFIED: frozenset[str] = frozenset({"crashed", "timed-out", "unavailable", "not-run"})
"""The verdicts of items that were planned but could not be checked."""

BAD = ("deviates", "error", "timed-out", "crashed")
"""The verdicts that fail a run, from least to most severe."""

WRONG = frozenset({"deviates", "error"})
"""The verdicts that are evidence of a wrong answer: it deviates, or an error was raised."""

RUN = "run"
"""The value of `Finding.requirement` for items without an outcome: the process died or hung, the
implementation was unavailable, or the item was not run."""

INFINITE = 1e300
"""The number that represents an infinite ratio, which JSON cannot represent."""

STATEFUL = "stateful/"
"""The prefix of ids that take the place of case ids in results on layers that keep a state."""

WHOLE = "whole"
"""The name of a text all at once, to which the ways of a layer that keeps a state are compared."""

BITS = f"{STATEFUL}bits"
"""The id that takes the place of a case id for findings on bits of such a layer."""

PREFIX = "probe/"
"""The prefix of the id of an experiment, such as "probe/masks", which takes the place of a case
id."""

STORED = "file"
"""The chapter (the first part of the id) of all cases that are read from files."""


def rounded_figure(number: float) -> float:
    """Return a number to four digits, limited to ±`INFINITE`, to keep records short.

    NaN gives `INFINITE`.
    """
    number = INFINITE if math.isnan(number) else min(max(number, -INFINITE), INFINITE)
    return float(f"{number:.4g}")


def without_place(detail: str) -> str:
    """Return a finding's `detail` without a final "(at FILE:LINE)", where an exception was raised.

    Other text is returned unchanged. The place differs between versions of a library even if the
    exception is the same.
    """
    return re.sub(r" \(at [^()]*\)$", "", detail)


class Figures(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The errors of one array.

    In a finding, this is the array that is closest to its limit, or exceeds it most.

    Attributes:
        array: the name of the array, such as "output" or "gradient.weights.key".
        max_ratio: max |error| / σ; INFINITE if an element is NaN or should be exact but is not.
        rms_ratio: rms of error / σ.
        bias: the signed bias Σ(error / σ) / √N.
        limit: the largest allowed max_ratio.
        accuracy: the most accurate accuracy class whose limit all arrays meet, or "".
    """

    array: str
    max_ratio: float
    rms_ratio: float
    bias: float
    limit: float
    accuracy: str = ""


class Worst(msgspec.Struct, frozen=True, gc=False):
    """The element with the largest error in units of its noise σ.

    Numbers are stored as text, because JSON has neither NaN nor infinity.
    """

    array: str
    index: tuple[int, ...]
    got: str
    want: str
    noise: str


class Finding(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The result of checking one requirement on one case.

    Attributes:
        detail: a line of text for readers.
        value: the observed value of a characteristic, or `NOTHING`.
        cause: the known mistake that explains a deviation, or `NOTHING`.
        where: the part of an array that deviates; `NOTHING` if all of it does, or if it is unknown.
        made_by: the origin of the deviation, if the suite supplies the projections: "kernel" if the
            kernel also deviates without them, or else "projections"; "" if this is unknown.
    """

    requirement: str
    verdict: Verdict
    detail: str = ""
    value: Phrase = NOTHING
    figures: Figures | None = None
    worst: Worst | None = None
    cause: Phrase = NOTHING
    where: Phrase = NOTHING
    made_by: Literal["", "kernel", "projections"] = ""


MAKERS = {
    "kernel": "the kernel: given projected heads directly, it deviates too",
    "projections": "the projections that the suite supplies: without them the kernel conforms",
}
"""The wording of each value of `Finding.made_by`."""


def gravity(finding: Finding) -> tuple[float, float]:
    """Return a key for sorting deviations: the largest error relative to its limit, and the rms.

    A limit of 0 counts as 1. Both numbers are 0 for a finding without figures.
    """
    figures = finding.figures
    if figures is None:
        return 0.0, 0.0
    return figures.max_ratio / (figures.limit or 1.0), figures.rms_ratio


def of_weights(figures: Figures | None, worst: Worst | None) -> bool:
    """Return whether the figures or the worst element belong to attention weights or row sums."""
    arrays = {figures.array if figures else "", worst.array if worst else ""}
    return bool(arrays & {"weights", "row sums"})


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """An entry of a convention card: one observed convention.

    Attributes:
        subject: what was examined, such as "mask.meaning" with a mask argument and an encoding.
        value: the observed convention, such as "mask.blocks".
        evidence: text that describes the inputs and the observation.
        declared: the adapter's declaration, to be compared with `value`, or `NOTHING`.
        agrees: whether `value` agrees with the declaration; true if there is none.
        code: Python lines that demonstrate the convention without this suite, or "".
    """

    subject: Phrase
    value: Phrase
    evidence: str = ""
    declared: Phrase = NOTHING
    agrees: bool = True
    code: str = ""


class Topic(msgspec.Struct, frozen=True, omit_defaults=True):
    """The description of an experiment.

    Attributes:
        name: the part of its id after "probe/", such as "masks".
        title: a heading.
        question: the question that the experiment answers.
        revision: a number that is increased whenever a change of the experiment may give other
            results for an implementation that has not changed.
    """

    name: str
    title: str
    question: str
    revision: int = 1

    @property
    def id(self) -> str:
        """The id, such as "probe/masks", which takes the place of a case id in results."""
        return PREFIX + self.name


class CaseResult(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, eq=False):
    """All findings about one implementation on one case in one dtype, device and mode.

    If the case is an experiment ("probe/masks"), `entries` are the conventions that it observed.
    `measured` is the day ("2026-11-22") of the earlier run that measured the result, or "" if this
    run did. `seconds` is how long the item took, or 0 if that is unknown; results that differ only
    in `seconds` are equal.
    """

    implementation: str
    case: str
    dtype: str
    device: str
    mode: str
    findings: list[Finding]
    entries: list[Entry] = []
    measured: str = ""
    seconds: float = 0.0

    def __eq__(self, other: object) -> bool:
        """Return whether two results are equal, apart from the seconds that they took."""
        if not isinstance(other, CaseResult):
            return NotImplemented
        names = (name for name in self.__struct_fields__ if name != "seconds")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def __ne__(self, other: object) -> bool:
        """Return whether two results differ; without this, msgspec compares identities."""
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    @property
    def id(self) -> str:
        """The id of the item: "implementation:case:dtype:device:mode"."""
        return item_id(self.implementation, self.case, self.dtype, self.device, self.mode)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all findings; "unsupported" if there are no findings."""
        verdicts = {finding.verdict for finding in self.findings}
        return next((verdict for verdict in GRAVITY if verdict in verdicts), "unsupported")


GRAVITY: tuple[Verdict, ...] = (
    *("crashed", "timed-out", "error", "deviates", "not-run", "unavailable", "conforms"),
    *("observed", "unsupported"),
)
"""All verdicts, worst first. The verdict of an item is the worst one of its findings."""


def without_outcome(name: str, verdict: Verdict, why: str) -> CaseResult:
    """Return the result of an item that has only a verdict: `name` is its id, `why` the reason."""
    implementation, case, dtype, device, mode = name.split(":")
    return CaseResult(implementation, case, dtype, device, mode, [Finding(RUN, verdict, why)])


def item_id(implementation: str, case: str, dtype: str, device: str, mode: str) -> str:
    """Return the id "implementation:case:dtype:device:mode", which is used in pytest's node ids."""
    return f"{implementation}:{case}:{dtype}:{device}:{mode}"


def count(verdicts: Iterable[str]) -> dict[str, int]:
    """Return the number of each verdict that occurs, in the order of `VERDICTS`."""
    counts = Counter(verdicts)
    return {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}


def verified(counts: Mapping[str, int]) -> int:
    """Return how many of the results, counted by verdict, had an answer to judge.

    An exit code depends on items, not on findings: in an item that is an error, an experiment may
    have observed no more than that.
    """
    return sum(counts.get(verdict, 0) for verdict in ANSWERED)
