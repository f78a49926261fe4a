"""One implementation over time, and over the versions of its library: what changed in between.

Findings are compared where both records have them. Another version of the suite may ask other
questions of the same name, so the catalogue is told beside every point in time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from packaging.version import InvalidVersion, Version

from conformance.records.findings import PREFIX, CaseResult
from conformance.records.phrase import Part, Phrase
from conformance.records.record import Record
from conformance.reports.accuracy import OUTPUT
from conformance.reports.changes.compare import answers, entries_apart, matched
from conformance.reports.columns import column_keys, declared
from conformance.reports.model import Change, Loaded, Point, Trend
from conformance.reports.totals import WRONG, finding_counts
from conformance.words import say

_BESIDE = ("numpy", "python")
"""What a library runs on: told where it differs between records."""


def trends(records: Sequence[Loaded], earlier: Sequence[Loaded]) -> list[Trend]:
    """Those implementations that have an earlier record on the same device, the oldest first."""
    return [
        Trend(column, points([*others, own], name))
        for column, name, own, others in _beside(records, earlier)
    ]


def timelines(records: Sequence[Loaded], others: Sequence[Loaded]) -> list[Trend]:
    """Those implementations of `records` that `others` have with other versions, oldest first."""
    found = []
    for column, name, own, beside in _beside(records, others):
        ordered = sorted([own, *beside], key=lambda item: _order(item[1], name))
        grounds = [_ground(record) for _, record, _ in ordered]
        differ = [one for one in _BESIDE if len({ground.get(one) for ground in grounds}) > 1]
        course = []
        for point, ground in zip(points(ordered, name), grounds, strict=True):
            more = {one: ground[one] for one in differ if one in ground}
            course.append(msgspec.structs.replace(point, versions=point.versions | more))
        found.append(Trend(column, course))
    return found


def _beside(
    records: Sequence[Loaded], others: Sequence[Loaded]
) -> Iterator[tuple[str, str, Loaded, list[Loaded]]]:
    """Column, name, record and other records, of every implementation that others have too."""
    keys = column_keys(records)
    for index, own in enumerate(records):
        device = own[1].header.provenance.device
        for implementation in declared(own[1]):
            name = implementation.name
            beside = [
                item
                for item in others
                if item[1].header.provenance.device == device
                and name in {one.name for one in declared(item[1])}
            ]
            if beside:
                yield keys[index, name], name, own, beside


def points(records: Sequence[Loaded], name: str) -> list[Point]:
    """One implementation in each of these records, and what changed from one to the next."""
    found: list[Point] = []
    before: Sequence[CaseResult] | None = None
    for _, record, _ in records:
        results = [result for result in record.results if result.implementation == name]
        implementation = next(item for item in declared(record) if item.name == name)
        unavailable = implementation.unavailable
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
                change=None if before is None or unavailable else _change(before, results),
                unavailable=unavailable,
            )
        )
        # What could not be run is stepped over.
        before = before if unavailable else results
    return found


def _worst(results: Sequence[CaseResult]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for result in results:
        for finding in result.findings:
            if finding.requirement == OUTPUT and finding.figures is not None:
                size = finding.figures.max_ratio
                worst[result.dtype] = max(worst.get(result.dtype, 0.0), size)
    return worst


def _change(first: Sequence[CaseResult], second: Sequence[CaseResult]) -> Change:
    worse: Counter[str] = Counter()
    better: Counter[str] = Counter()
    other: Counter[tuple[str, str, str]] = Counter()
    added = removed = 0
    before, after = answers(first), answers(second)
    for pair in matched(before, after):
        one, two = pair.before, pair.after
        if one is None or two is None:
            added, removed = added + (one is None), removed + (two is None)
            continue
        was, is_now = one.verdict in WRONG, two.verdict in WRONG
        if was != is_now:
            (worse if is_now else better)[pair.requirement] += 1
        elif (one.value or one.verdict) != (two.value or two.verdict):
            texts = [say(item.value) or item.verdict for item in (one, two)]
            other[pair.requirement, texts[0], texts[1]] += 1
    for key, subject, was_there, is_there in entries_apart(before, after):
        # What is not taken any more is refused now, and that is the same told again.
        if was_there and is_there and subject.id != "shapes.refused":
            experiment = key[2].removeprefix(PREFIX)
            other[f"{experiment}: {say(subject)}", *_apart(was_there, is_there)] += 1
    return Change(
        worse=dict(sorted(worse.items())),
        better=dict(sorted(better.items())),
        other=[(*change, times) for change, times in sorted(other.items())],
        added=added,
        removed=removed,
    )


def _apart(one: Phrase, other: Phrase) -> tuple[str, str]:
    """Two values; of two lists of shapes, those that only one of them has."""
    if not one.id == other.id == "shapes":
        return say(one), say(other)
    before, after = one.parts("shapes"), other.parts("shapes")
    gone = [shape for shape in before if shape not in after]
    new = [shape for shape in after if shape not in before]
    return _shapes(gone), _shapes(new)


def _shapes(shapes: list[Part]) -> str:
    return say(Phrase("shapes", {"shapes": shapes})) if shapes else "no other"


def _ground(record: Record) -> dict[str, str]:
    """Versions of NumPy and Python."""
    made = record.header.provenance
    found = {name: made.packages[name] for name in ("numpy",) if name in made.packages}
    return found | {"python": ".".join(made.python.split(".")[:2])}


def _order(record: Record, name: str) -> tuple[Any, ...]:
    """By the library's own version, then its framework's, NumPy's and Python's."""
    versions = next((own.versions for own in declared(record) if own.name == name), {})
    # A framework's versions come first there, the library's own after it.
    own = [_version(versions[package]) for package in reversed(versions)]
    ground = _ground(record)
    return own, _version(ground.get("numpy", "0")), _version(ground["python"]), record.header.name


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        numbers = re.findall(r"\d+", text)
        return Version(".".join(numbers) or "0")
