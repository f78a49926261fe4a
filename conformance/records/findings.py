"""What a check found: plain data, and one place that counts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import msgspec

from conformance.records.card import Entry
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

VERDICTS: tuple[Verdict, ...] = (
    "conforms",
    "deviates",
    "observed",
    "unsupported",
    "error",
    "crashed",
    "timed-out",
    "unavailable",
    "not-run",
)

VERIFIED: frozenset[str] = frozenset({"conforms", "deviates", "observed", "error"})
"""Verdicts that say something about the implementation."""

NOT_VERIFIED: frozenset[str] = frozenset({"crashed", "timed-out", "unavailable", "not-run"})
"""Verdicts that leave a question open that the run set out to answer."""


RUN = "run"
"""In place of a requirement where none was decided: the process died, or the run ended."""

INFINITE = 1e300
"""Stands for an infinite ratio, which JSON cannot hold."""


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

    `value` is the observed value of a characteristic; `detail` one line for people; `cause` names
    the known mistake whose answer this is, where there is one, and `where` the part of an array
    that deviates, if it is not all of it. `made_by` says, where the suite supplies the projections,
    whether the kernel made the deviation or they: it deviates also alone, or only with them.
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
    """How far beyond what is allowed: by its worst element, then by all of them."""
    figures = finding.figures
    if figures is None:
        return 0.0, 0.0
    return figures.max_ratio / (figures.limit or 1.0), figures.rms_ratio


def of_weights(figures: Figures | None, worst: Worst | None) -> bool:
    """Whether what was measured are the attention weights, or sums of them."""
    arrays = {figures.array if figures else "", worst.array if worst else ""}
    return bool(arrays & {"weights", "row sums"})


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
        """The gravest of the findings' verdicts."""
        found = {finding.verdict for finding in self.findings}
        order: tuple[Verdict, ...] = (
            "crashed",
            "timed-out",
            "error",
            "deviates",
            "not-run",
            "unavailable",
            "conforms",
            "observed",
        )
        return next((verdict for verdict in order if verdict in found), "unsupported")


def without_outcome(name: str, verdict: Verdict, why: str) -> CaseResult:
    """The result of an item of which nothing is known but why."""
    implementation, case, dtype, device, mode = name.split(":")
    return CaseResult(implementation, case, dtype, device, mode, [Finding(RUN, verdict, why)])


def item_id(implementation: str, case: str, dtype: str, device: str, mode: str) -> str:
    """ "implementation:case:dtype:device:mode": what pytest prints and -k can search."""
    return f"{implementation}:{case}:{dtype}:{device}:{mode}"


def count(verdicts: Iterable[str]) -> dict[str, int]:
    """How many of each verdict, in a fixed order, zeros left out. Never one percentage."""
    counted = Counter(verdicts)
    return {verdict: counted[verdict] for verdict in VERDICTS if counted[verdict]}


def verified(counts: dict[str, int]) -> int:
    """How many findings say something about the implementation."""
    return sum(counts.get(verdict, 0) for verdict in VERIFIED)


def not_verified(counts: dict[str, int]) -> int:
    """How many questions were left open; `unsupported` is an answer, not an open question."""
    return sum(counts.get(verdict, 0) for verdict in NOT_VERIFIED)
