"""Changes of an implementation over time, and between versions of its library.

Findings that two successive records both contain are compared; the others are only counted. A case
of the same name may differ between versions of the suite, so the catalogue is shown for every point
in time. Cases whose hashes differ are left out of the comparison, and so is whether bits are equal
if the records are of different machines: both say nothing of the library.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from packaging.version import InvalidVersion, Version

from conformance.records.findings import PREFIX, VERIFIED, WRONG, CaseResult, Phrase
from conformance.records.findings import Part as PhrasePart
from conformance.records.record import Record
from conformance.reports.accuracy import OUTPUT
from conformance.reports.changes import answers, changed_cases, differing_entries, matched
from conformance.reports.model import Change, Loaded, Point, Trend
from conformance.reports.tables import RecordPart, by_key, finding_counts, parts_of
from conformance.words import say

_OF_BITS = ("again.same-bits", "again.within-noise")
"""How the ids of values begin that tell whether an answer that is asked again has the same bits."""


def trends(parts: Iterable[RecordPart], earlier: Sequence[Loaded]) -> list[Trend]:
    """Return the trend of each implementation that has earlier records on the same device."""
    return [Trend(part.key, _points([*others, part])) for part, others in _beside(parts, earlier)]


def timelines(parts: Iterable[RecordPart], others: Sequence[Loaded]) -> list[Trend]:
    """Return the trend over versions of each implementation that is also in the records `others`.

    Only records of the same device are joined, the oldest version first. If the versions of NumPy
    or Python vary, they are added to those of the library.
    """
    courses = []
    for part, beside in _beside(parts, others):
        ordered = sorted([part, *beside], key=_order)
        platforms = [_platform(one.record) for one in ordered]
        software = ("numpy", "python")
        differ = [name for name in software if len({one.get(name) for one in platforms}) > 1]
        points = [
            msgspec.structs.replace(
                point,
                versions=point.versions
                | {name: platform[name] for name in differ if name in platform},
            )
            for point, platform in zip(_points(ordered), platforms, strict=True)
        ]
        courses.append(Trend(part.key, points))
    return courses


def _beside(
    parts: Iterable[RecordPart], others: Sequence[Loaded]
) -> Iterator[tuple[RecordPart, list[RecordPart]]]:
    """Yield each part that has counterparts in other records, with these counterparts.

    A counterpart is about the same implementation on the same device.
    """
    by_contestant = by_key(parts_of(others), _contestant)
    for part in parts:
        if beside := by_contestant.get(_contestant(part)):
            yield part, beside


def _contestant(part: RecordPart) -> tuple[str, str]:
    return part.implementation.name, part.record.header.provenance.device


def _points(parts: Iterable[RecordPart]) -> list[Point]:
    """Return one point for each part, all of one implementation, with the changes between them."""
    points: list[Point] = []
    before: RecordPart | None = None
    for part in parts:
        unavailable = part.implementation.unavailable
        made = part.record.header.provenance
        points.append(
            Point(
                record=part.record.header.name,
                created=made.created,
                suite=made.suite,
                catalogue=made.catalogue,
                versions=part.implementation.versions,
                findings=finding_counts(part.results),
                worst=_worst(part.results),
                change=None if before is None or unavailable else _change(before, part),
                unavailable=unavailable,
            )
        )
        # Records in which the implementation could not be run are skipped in comparisons.
        before = before if unavailable else part
    return points


def _worst(results: Sequence[CaseResult]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for result in results:
        for finding in result.findings:
            if finding.requirement == OUTPUT and finding.figures is not None:
                size = finding.figures.max_ratio
                worst[result.dtype] = max(worst.get(result.dtype, 0.0), size)
    return worst


def _of_processors(one: Phrase | None, other: Phrase | None) -> bool:
    """Return whether two values differ in what depends on the processor: whether bits are equal."""
    return all(value is not None and value.id.startswith(_OF_BITS) for value in (one, other))


def _change(first: RecordPart, second: RecordPart) -> Change:
    worse: Counter[str] = Counter()
    better: Counter[str] = Counter()
    other: Counter[tuple[str, str, str]] = Counter()
    added = removed = 0
    changed = changed_cases(first.record.header.cases, second.record.header.cases)
    before, after = (
        answers(result for result in part.results if result.case not in changed)
        for part in (first, second)
    )
    machines = {part.record.header.provenance.machine for part in (first, second)}
    elsewhere = len(machines) > 1
    for pair in matched(before, after):
        one, two = pair.before, pair.after
        if one is None or two is None:
            added, removed = added + (one is None), removed + (two is None)
            continue
        was, is_now = one.verdict in WRONG, two.verdict in WRONG
        # What was not supported was not better, and what no longer is, is not fixed.
        if was != is_now and {one.verdict, two.verdict} <= VERIFIED:
            (worse if is_now else better)[pair.requirement] += 1
        elif elsewhere and _of_processors(one.value, two.value):
            continue
        elif (one.value or one.verdict) != (two.value or two.verdict):
            texts = [say(item.value) or item.verdict for item in (one, two)]
            other[pair.requirement, texts[0], texts[1]] += 1
    for key, subject, was_there, is_there in differing_entries(before, after):
        if elsewhere and _of_processors(was_there, is_there):
            continue
        # A shape that is no longer accepted is now rejected: both entries show the same change.
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
    """Return two values as texts; from two lists of shapes, leave out the shapes in both lists."""
    if not one.id == other.id == "shapes":
        return say(one), say(other)
    before, after = one.parts("shapes"), other.parts("shapes")
    gone: list[PhrasePart] = [shape for shape in before if shape not in after]
    new: list[PhrasePart] = [shape for shape in after if shape not in before]
    texts = [say(Phrase("shapes", {"shapes": own})) if own else "no other" for own in (gone, new)]
    return texts[0], texts[1]


def _platform(record: Record) -> dict[str, str]:
    """Return the versions of Python and, if it is known, NumPy with which a record was made."""
    made = record.header.provenance
    numpy = {"numpy": made.packages["numpy"]} if "numpy" in made.packages else {}
    return numpy | {"python": ".".join(made.python.split(".")[:2])}


def _order(part: RecordPart) -> tuple[Any, ...]:
    """Return a sort key: versions of library, framework, NumPy and Python; name of the record."""
    # `versions` lists the framework first and the library itself last.
    versions = [_version(version) for version in reversed(part.implementation.versions.values())]
    platform = _platform(part.record)
    numpy, python = _version(platform.get("numpy", "0")), _version(platform["python"])
    return versions, numpy, python, part.record.header.name


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version(".".join(re.findall(r"\d+", text)) or "0")
