"""What checks and experiments say about one case: findings with verdicts, entries of a card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal, get_args

import msgspec

from conformance.records.phrase import NOTHING, Phrase

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
"""`observed`: a characteristic about which the adapter declares nothing; its value is recorded.
`not-run`: planned, but without an outcome, as after an interruption."""

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

VERIFIED: frozenset[str] = frozenset({"conforms", "deviates", "observed", "error"})
"""Verdicts that say something about the implementation."""

NOT_VERIFIED: frozenset[str] = frozenset({"crashed", "timed-out", "unavailable", "not-run"})
"""Verdicts that leave a question open that the run set out to answer."""


RUN = "run"
"""In place of a requirement where none was decided: the process died, or the run ended."""

INFINITE = 1e300
"""Stands for an infinite ratio, which JSON cannot hold."""


PREFIX = "probe/"
"""Before the name of an experiment, where its results are recorded like those of a case."""


class Figures(msgspec.Struct, frozen=True, omit_defaults=True):
    """Measured against allowed, for the array that came closest to (or went beyond) its limit.

    Attributes:
        array: its name, such as "output" or "gradient.weights.key".
        max_ratio: max |error| / σ; INFINITE where a NaN or a nonzero stands for an exact value.
        rms_ratio: rms of error / σ.
        bias: Σ(error / σ) / √N, the signed bias.
        limit: what max_ratio may be.
        accuracy: the most accurate class all arrays fit in, or "" for none.
    """

    array: str
    max_ratio: float
    rms_ratio: float
    bias: float
    limit: float
    accuracy: str = ""


class Worst(msgspec.Struct, frozen=True):
    """The element that is furthest off, in units of its own noise.

    Numbers are text, because JSON has neither NaN nor infinity.
    """

    array: str
    index: tuple[int, ...]
    got: str
    want: str
    noise: str


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one requirement says about one case.

    Attributes:
        detail: one line for people.
        value: the observed value of a characteristic.
        cause: the known mistake that explains a deviation.
        where: the part of an array that deviates, if it is not all of it.
        made_by: where the suite supplies the projections, whether the kernel deviates without them
            too, or the deviation comes from the projections only.
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
    "kernel": "the kernel: given heads that are projected already, it deviates too",
    "projections": "the projections that the suite supplies: without them the kernel conforms",
}
"""`Finding.made_by` in words."""


def gravity(finding: Finding) -> tuple[float, float]:
    """Return how far beyond its limit a finding is: by its worst element, then by the rms."""
    figures = finding.figures
    if figures is None:
        return 0.0, 0.0
    return figures.max_ratio / (figures.limit or 1.0), figures.rms_ratio


def of_weights(figures: Figures | None, worst: Worst | None) -> bool:
    """Return whether the attention weights, or sums of them, were measured."""
    arrays = {figures.array if figures else "", worst.array if worst else ""}
    return bool(arrays & {"weights", "row sums"})


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One observed convention.

    Attributes:
        subject: what was looked at: "mask.meaning" of an argument in a form.
        value: what was seen: "mask.blocks".
        evidence: what exactly was fed and seen, for people.
        declared: what the adapter says, to be compared with `value`; `NOTHING` if it says nothing.
        agrees: whether `value` is what the adapter declares.
        code: lines that show it without this suite, or "".
    """

    subject: Phrase
    value: Phrase
    evidence: str = ""
    declared: Phrase = NOTHING
    agrees: bool = True
    code: str = ""


class Topic(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an experiment is about.

    Attributes:
        name: as in "probe/masks".
        title: a heading.
        question: what it asks, in a sentence.
        revision: to be increased whenever the same behaviour may be described by another entry.
    """

    name: str
    title: str
    question: str
    revision: int = 1

    @property
    def id(self) -> str:
        """The case id under which it is recorded."""
        return PREFIX + self.name


class CaseResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """All findings of one case, as one implementation answered it in one dtype, device and mode.

    Where the case is an experiment ("probe/masks"), `entries` are what it showed. `measured` is the
    day of the measurement ("2026-11-22") if an earlier run made it, else "": that of the record.
    """

    implementation: str
    case: str
    dtype: str
    device: str
    mode: str
    findings: list[Finding]
    entries: list[Entry] = []
    measured: str = ""

    @property
    def id(self) -> str:
        """The test id, as in pytest's node ids."""
        return item_id(self.implementation, self.case, self.dtype, self.device, self.mode)

    @property
    def verdict(self) -> Verdict:
        """The worst of the findings' verdicts."""
        verdicts = {finding.verdict for finding in self.findings}
        return next((verdict for verdict in _WORST_FIRST if verdict in verdicts), "unsupported")


_WORST_FIRST: tuple[Verdict, ...] = (
    *("crashed", "timed-out", "error", "deviates", "not-run", "unavailable", "conforms"),
    "observed",
)


def without_outcome(name: str, verdict: Verdict, why: str) -> CaseResult:
    """Return the result of an item without an outcome, and why it has none."""
    implementation, case, dtype, device, mode = name.split(":")
    return CaseResult(implementation, case, dtype, device, mode, [Finding(RUN, verdict, why)])


def item_id(implementation: str, case: str, dtype: str, device: str, mode: str) -> str:
    """Return "implementation:case:dtype:device:mode", which pytest prints and -k searches."""
    return f"{implementation}:{case}:{dtype}:{device}:{mode}"


def count(verdicts: Iterable[str]) -> dict[str, int]:
    """Return how many there are of each verdict, in a fixed order and without zeros."""
    counts = Counter(verdicts)
    return {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}


def verified(counts: dict[str, int]) -> int:
    """Return how many findings say something about the implementation."""
    return sum(counts.get(verdict, 0) for verdict in VERIFIED)


def not_verified(counts: dict[str, int]) -> int:
    """Return how many questions are open; `unsupported` is an answer."""
    return sum(counts.get(verdict, 0) for verdict in NOT_VERIFIED)
