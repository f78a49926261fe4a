"""One implementation over time: what its earlier records found, and what changed from one to next.

Findings are compared where both records have them. Another version of the suite may ask other
questions of the same name, so the catalogue is told beside every point.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from conformance.records.card import PREFIX
from conformance.records.findings import CaseResult, Finding
from conformance.reports.columns import column_keys, declared
from conformance.reports.model import Change, Loaded, Point, Trend
from conformance.reports.totals import WRONG, finding_counts
from conformance.requirements.definition import OUTPUT

_SHAPE = re.compile(r"\[[^\[\]]*\]")
_SHAPES = re.compile(r"\[[^\[\]]*\]( \[[^\[\]]*\])*")

Asked = dict[tuple[str, str, str, str], Finding]
"""Case, dtype, mode and requirement to finding."""


def trends(records: Sequence[Loaded], earlier: Sequence[Loaded]) -> list[Trend]:
    """Those implementations that have an earlier record on the same device."""
    keys = column_keys(records)
    found = []
    for index, own in enumerate(records):
        device = own[1].header.provenance.device
        for implementation in declared(own[1]):
            before = [
                item
                for item in earlier
                if item[1].header.provenance.device == device
                and implementation.name in {told.name for told in declared(item[1])}
            ]
            if before:
                course = points([*before, own], implementation.name)
                found.append(Trend(keys[index, implementation.name], course))
    return found


def points(records: Sequence[Loaded], name: str) -> list[Point]:
    """One implementation in each of these records, and what changed from one to the next."""
    found: list[Point] = []
    before: Sequence[CaseResult] | None = None
    for _, record, _ in records:
        results = [result for result in record.results if result.implementation == name]
        implementation = next(item for item in declared(record) if item.name == name)
        told = implementation.unavailable
        made = record.header.provenance
        found.append(
            Point(
                record=record.header.name,
                created=made.created,
                suite=made.suite,
                catalogue=made.catalogue,
                versions=implementation.versions,
                findings=finding_counts(results),
                worst=_worst(results),
                change=None if before is None or told else _change(before, results),
                unavailable=told,
            )
        )
        before = before if told else results
    return found


def _asked(results: Sequence[CaseResult]) -> Asked:
    return {
        (result.case, result.dtype, result.mode, finding.requirement): finding
        for result in results
        for finding in result.findings
    }


def _apart(one: str, other: str) -> tuple[str, str]:
    """Two values; of two lists of shapes, those that only one of them has."""
    if not (_SHAPES.fullmatch(one) and _SHAPES.fullmatch(other)):
        return one, other
    before, after = _SHAPE.findall(one), _SHAPE.findall(other)
    gone = [shape for shape in before if shape not in after]
    new = [shape for shape in after if shape not in before]
    return " ".join(gone) or "no other", " ".join(new) or "no other"


def _worst(results: Sequence[CaseResult]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for result in results:
        for finding in result.findings:
            if finding.requirement == OUTPUT.id and finding.figures is not None:
                size = finding.figures.max_ratio
                worst[result.dtype] = max(worst.get(result.dtype, 0.0), size)
    return worst


def _seen(results: Sequence[CaseResult]) -> dict[tuple[str, str, str], str]:
    """What experiments showed: by experiment, mode and subject."""
    return {
        (result.case, result.mode, entry.subject): entry.value
        for result in results
        for entry in result.entries
    }


def _change(first: Sequence[CaseResult], second: Sequence[CaseResult]) -> Change:
    before, after = _asked(first), _asked(second)
    worse: Counter[str] = Counter()
    better: Counter[str] = Counter()
    other: Counter[tuple[str, str, str]] = Counter()
    for key in before.keys() & after.keys():
        one, two = before[key], after[key]
        was, is_now = one.verdict in WRONG, two.verdict in WRONG
        if was != is_now:
            (worse if is_now else better)[key[3]] += 1
        elif (one.value or one.verdict) != (two.value or two.verdict):
            other[key[3], one.value or one.verdict, two.value or two.verdict] += 1
    was_seen, seen = _seen(first), _seen(second)
    for place in was_seen.keys() & seen.keys():
        was_there, is_there = _apart(was_seen[place], seen[place])
        experiment, _, subject = place
        # What is not taken any more is refused now, and that is the same told again.
        if was_there != is_there and not subject.endswith("shapes it refuses"):
            other[f"{experiment.removeprefix(PREFIX)}: {subject}", was_there, is_there] += 1
    return Change(
        worse=dict(sorted(worse.items())),
        better=dict(sorted(better.items())),
        other=[(*change, times) for change, times in sorted(other.items())],
        added=len(after.keys() - before.keys()),
        removed=len(before.keys() - after.keys()),
    )
