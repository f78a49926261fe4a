"""One implementation over time: what its earlier records found, and what changed from one to next.

Findings are compared where both records have them. Another version of the suite may ask other
questions of the same name, so the catalogue is told beside every point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from conformance.findings import CaseResult, Finding
from conformance.report.columns import column_keys, declared
from conformance.report.model import Change, Loaded, Point, Trend
from conformance.report.totals import WRONG, finding_counts
from conformance.requirements.definition import OUTPUT

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
                points = _points([*before, own], implementation.name)
                found.append(Trend(keys[index, implementation.name], points))
    return found


def _points(records: Sequence[Loaded], name: str) -> list[Point]:
    points: list[Point] = []
    before: Asked | None = None
    for _, record, _ in records:
        results = [result for result in record.results if result.implementation == name]
        implementation = next(item for item in declared(record) if item.name == name)
        asked = _asked(results)
        made = record.header.provenance
        points.append(
            Point(
                record=record.header.name,
                created=made.created,
                suite=made.suite,
                catalogue=made.catalogue,
                versions=implementation.versions,
                findings=finding_counts(results),
                worst=_worst(results),
                change=None if before is None else _change(before, asked),
            )
        )
        before = asked
    return points


def _asked(results: Sequence[CaseResult]) -> Asked:
    return {
        (result.case, result.dtype, result.mode, finding.requirement): finding
        for result in results
        for finding in result.findings
    }


def _worst(results: Sequence[CaseResult]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for result in results:
        for finding in result.findings:
            if finding.requirement == OUTPUT.id and finding.figures is not None:
                size = finding.figures.max_ratio
                worst[result.dtype] = max(worst.get(result.dtype, 0.0), size)
    return worst


def _change(before: Asked, after: Asked) -> Change:
    worse: Counter[str] = Counter()
    better: Counter[str] = Counter()
    for key in before.keys() & after.keys():
        was, is_now = before[key].verdict in WRONG, after[key].verdict in WRONG
        if was != is_now:
            (worse if is_now else better)[key[3]] += 1
    return Change(
        worse=dict(sorted(worse.items())),
        better=dict(sorted(better.items())),
        added=len(after.keys() - before.keys()),
        removed=len(before.keys() - after.keys()),
    )
