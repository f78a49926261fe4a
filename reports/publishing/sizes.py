"""The published results of level "large" and of checks of long sequences.

Their deviations are classified by the same baselines as all others. An entry about them names such
cases in its `case`, for example `*.d64t64x64` or `long/causal/*`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from conformance.errors import BrokenRecord
from conformance.records.findings import INFINITE, WRONG, count
from conformance.records.long import Climb, Reach, as_record, reaches, read_climb
from conformance.reports import wording
from conformance.reports.gate.baseline import Baseline
from conformance.reports.gate.judging import Claims
from conformance.reports.tables import Part, by_key
from conformance.reports.wording import UNSORTED

T = TypeVar("T")

LARGE, LONG = "large", "long"
"""The folders of records of level "large" and of checks of long sequences."""

PLOT = "long.svg"
"""The figure of error against length."""


@dataclass(frozen=True)
class Large:
    """The results of level "large" for an implementation in one dtype.

    Attributes:
        findings: the number of findings with each verdict.
        worst: the largest error in σ of the wrong findings; 0 if none was measured.
        kinds: the kinds of the deviations.
    """

    dtype: str
    findings: Mapping[str, int]
    worst: float
    kinds: Sequence[str]

    @property
    def wrong(self) -> int:
        """The number of findings that are deviations or errors."""
        return sum(self.findings.get(verdict, 0) for verdict in WRONG)

    @property
    def text(self) -> str:
        """The results as a line for the table; "" if there are none."""
        good = self.findings.get("conforms", 0)
        if not self.wrong:
            return f"{self.dtype} ✓ {good:,}" if good else ""
        worst = f", {wording.ratio(self.worst)}σ" if self.worst else ""
        return f"{self.dtype} ✗ {self.wrong:,} of {good + self.wrong:,}{worst}: " + ", ".join(
            self.kinds
        )


def large_of(part: Part, baseline: Baseline) -> list[Large]:
    """Return the results of an implementation in a record of level "large", for each dtype."""
    claims, found = Claims(baseline, part.record), []
    for dtype, results in by_key(part.results, lambda result: result.dtype).items():
        every = [(result, one) for result in results for one in result.findings]
        bad = [(result, one) for result, one in every if one.verdict in WRONG]
        entries = [claims.knows(result, one) for result, one in bad]
        figures = [one.figures.max_ratio for _, one in bad if one.figures]
        kinds = dict.fromkeys((entry and entry.kind) or UNSORTED for entry in entries)
        counts = count(one.verdict for _, one in every)
        found.append(Large(dtype, counts, max(figures, default=0.0), list(kinds)))
    return found


def read_climbs(folder: Path) -> dict[str, Climb]:
    """Return the saved checks of long sequences in a folder, by implementation.

    Raises:
        BrokenRecord: if a file is not such a check, or is not named after its implementation.
    """
    return read_each(folder, read_climb, lambda climb: climb.implementation.name)


def read_each(folder: Path, read: Callable[[Path], T], name_of: Callable[[T], str]) -> dict[str, T]:
    """Return what is stored in the JSON files of a folder, by implementation.

    Raises:
        BrokenRecord: if a file cannot be read, or is not named after its implementation.
    """
    found = {path: read(path) for path in sorted(folder.glob("*.json"))}
    for path, one in found.items():
        if name_of(one) != path.stem:
            raise BrokenRecord(f"{path} is not about {path.stem}")
    return {path.stem: one for path, one in found.items()}


@dataclass(frozen=True)
class Length:
    """The length up to which an implementation conforms in one dtype, and the first deviation.

    Attributes:
        reach: the measured lengths.
        kind: the kinds of the first deviation's findings, as text; "" if there is no deviation.
        cost: microseconds per token for the longest conforming sequence: of the implementation,
            and of the suite's own computation; None if there is no such sequence.
    """

    reach: Reach
    kind: str
    cost: tuple[float, float] | None

    @property
    def worst(self) -> str:
        """The size of the first deviation in σ, or a description if there is no number."""
        first = self.reach.first
        if first is None:
            return ""
        if first.worst is None:
            return "an error" if first.verdict == "error" else "not bit for bit"
        largest = first.worst.largest
        return "∞σ" if largest >= INFINITE else f"{wording.ratio(largest)}σ"

    @property
    def text(self) -> str:
        """The results as a line for the table; "" if nothing was compared."""
        reach = self.reach
        if not reach.compared:
            return ""
        told = f"{reach.most:,}" if reach.most else "–"
        if not reach.most and reach.beside:
            told = f"64 × {reach.beside:,}"
        if reach.first is not None:
            told += f", ✗ {reach.first.length:,} ({self.worst}, {self.kind})"
        return f"{reach.dtype} {told}"

    @property
    def missing(self) -> list[str]:
        """The reasons why problems were not reached or not supported, each reason once."""
        every = [*self.reach.missing, *self.reach.refused]
        return [
            f"{reason} ({', '.join(dict.fromkeys(step.problem for step in steps))} from "
            f"{min(step.length for step in steps):,})"
            for reason, steps in by_key(every, lambda step: _reason(step.why)).items()
        ]


def _reason(why: str) -> str:
    """Return a reason without its numbers, so that it is the same for all lengths."""
    for begin, said in (("takes", "the time"), ("needs", "the memory")):
        if why.startswith(begin):
            return said
    return "a mask as an array" if why.startswith("a mask of") else why


def lengths_of(climb: Climb, baseline: Baseline) -> list[Length]:
    """Return the lengths up to which an implementation conforms, for each dtype."""
    record = as_record(climb)
    claims = Claims(baseline, record)
    results = {(one.case, one.dtype, one.mode): one for one in record.results}
    found = []
    for reach in reaches(climb.steps):
        kind = ""
        if reach.first is not None:
            result = results[reach.first.case, reach.dtype, reach.first.mode]
            bad = [one for one in result.findings if one.verdict in WRONG]
            entries = [claims.knows(result, one) for one in bad]
            kinds = dict.fromkeys((entry and entry.kind) or UNSORTED for entry in entries)
            kind = ", ".join(kinds)
        whole = [
            step
            for step in climb.steps
            if (step.dtype, step.queries, step.keys) == (reach.dtype, reach.most, reach.most)
            and step.verdict == "conforms"
        ]
        cost = None
        if whole:
            dearest = max(whole, key=lambda step: step.called)
            cost = (1e6 * dearest.called / reach.most, 1e6 * dearest.own / reach.most)
        found.append(Length(reach, kind, cost))
    return found
