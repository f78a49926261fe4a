"""How a report is read: what says the same on several backends is said once, causes come first."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

from conformance.records.findings import Worst, verified
from conformance.reports.model import (
    Apart,
    Column,
    Deviation,
    Handed,
    Pair,
    Point,
    Report,
    Row,
    Unsupported,
)
from conformance.reports.totals import WRONG
from conformance.reports.wording import listed, plural
from conformance.text import element
from conformance.words import say

_PLACE = re.compile(r" \(at [^()]*\)$")
"""Where an error was raised: often several places for one error."""


class Group(NamedTuple):
    """Columns of one layer on several backends; mostly just one."""

    title: str
    columns: list[Column]


class Symptom(NamedTuple):
    """Deviations of one implementation that have one cause, or one message.

    `folded`: the same error answered all of these requirements, so one of them is evidence enough.
    """

    told: str
    known: bool
    verdict: str
    times: int
    deviations: list[Deviation]
    folded: bool


def groups(report: Report) -> list[Group]:
    """The columns by layer."""
    return [Group(title, list(own)) for title, own in groupby(report.columns, lambda c: c.group)]


def reasons(report: Report) -> list[tuple[str, list[Column], list[Unsupported]]]:
    """What is unsupported; members of a group that have the same reasons are one entry."""
    own: dict[str, list[Unsupported]] = defaultdict(list)
    for item in report.unsupported:
        own[item.column].append(item)
    alike: dict[tuple[str, tuple[tuple[str, int], ...]], list[Column]] = defaultdict(list)
    for column in report.columns:
        same = tuple(sorted((item.reason, item.cases) for item in own[column.key]))
        if same:
            alike[column.group, same].append(column)
    return [(title, columns, own[columns[0].key]) for (title, _), columns in alike.items()]


def symptoms(report: Report, column: Column) -> list[Symptom]:
    """The deviations of one implementation by what seems to be one thing, named causes first."""
    found: dict[tuple[str, str, bool], list[Deviation]] = defaultdict(list)
    for item in report.deviations:
        if item.column == column.key:
            found[item.verdict, _symptom(item), bool(item.cause)].append(item)
    listed = [
        Symptom(
            told,
            known,
            verdict,
            sum(item.times for item in items),
            items,
            verdict == "error" and len(items) > 1,
        )
        for (verdict, told, known), items in found.items()
    ]
    return sorted(listed, key=lambda item: (not item.known, -item.times))


def _symptom(item: Deviation) -> str:
    """The cause or the message; else where the numbers are off, which is often one thing."""
    if item.cause:
        return say(item.cause)
    if item.figures is None:
        return _PLACE.sub("", item.detail) or item.verdict
    every_dtype, every_mode = item.everywhere
    told = [
        *(item.cases if len(item.cases) == 1 else []),
        "every dtype" if every_dtype else listed(item.dtypes),
        "every mode" if every_mode else _modes(item),
    ]
    return f"beyond honest noise in {', '.join(told)}".replace("dtype, every", "dtype and")


def _modes(item: Deviation) -> str:
    return f"mode{'' if len(item.modes) == 1 else 's'} {listed(item.modes)}"


def place_of(worst: Worst) -> str:
    """The worst element, by the names of its axes."""
    return element(worst.array, worst.index)


def where(item: Deviation) -> str:
    """In which dtypes, modes and cases; with the cases of each dtype where they differ."""
    total = len(item.cases)
    same = set(item.dtypes.values()) == {total}
    dtypes = [
        dtype if same else f"{dtype} ({plural(cases, 'case')})"
        for dtype, cases in item.dtypes.items()
    ]
    return f"{listed(dtypes)}; {_modes(item)}; {plural(total, 'case')}"


class HandedRow(NamedTuple):
    """What one implementation makes of one mask, written in several ways."""

    column: Column
    argument: str
    cells: list[Handed]


class Family(NamedTuple):
    """Implementations for which the same way to write the mask is as meant."""

    told: str
    rows: list[HandedRow]


def families(report: Report) -> list[Family]:
    """The implementations that were handed one mask, by which way to write it they understand."""
    rows: dict[str, list[Handed]] = defaultdict(list)
    for item in report.handed:
        rows[item.column].append(item)
    found: dict[tuple[str, ...], list[HandedRow]] = defaultdict(list)
    for key, cells in rows.items():
        understood = tuple(item.written for item in cells if item.phrase.id == "same-mask.as-meant")
        found[understood].append(HandedRow(report.column(key), cells[0].argument, cells))
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    return [
        Family(f"Right with {listed(understood)}" if understood else "Right with none", own)
        for understood, own in ordered
    ]


def written(report: Report) -> list[str]:
    """The ways in which the one mask was written."""
    return list(dict.fromkeys(item.written for item in report.handed))


def versions(report: Report) -> dict[str, list[str]]:
    """Every package that stands behind an implementation, in all versions that took part."""
    found: dict[str, list[str]] = {}
    for column in report.columns:
        for package, version in column.versions.items():
            known = found.setdefault(package, [])
            if version not in known:
                known.append(version)
    return found


def places(report: Report) -> list[str]:
    """On which devices, platforms and Pythons the records were made."""
    made = [source.provenance for source in report.sources]
    told = (f"{item.device} on {item.platform}, Python {item.python}" for item in made)
    return list(dict.fromkeys(told))


def evidence(report: Report) -> dict[tuple[str, str], str]:
    """Anchor of the first deviation of each (column, requirement)."""
    found: dict[tuple[str, str], str] = {}
    for item in report.deviations:
        found.setdefault((item.column, item.requirement), item.id)
    return found


def known(column: Column) -> bool:
    """Whether anything at all was verified."""
    return verified(column.findings) > 0


def wrong(column: Column) -> int:
    """How many findings are wrong."""
    return sum(times for verdict, times in column.findings.items() if verdict in WRONG)


def dtypes(report: Report) -> list[str]:
    """Those in which something was measured, in the order of the records."""
    return list(dict.fromkeys(item.dtype for item in report.accuracy))


def heat(report: Report) -> list[tuple[str, list[Column], dict[tuple[str, str], Pair]]]:
    """For each dtype: the columns that exchanged answers, and every pair, both ways round."""
    maps = []
    for dtype in dict.fromkeys(pair.dtype for pair in report.pairs):
        own = [pair for pair in report.pairs if pair.dtype == dtype]
        both = {(pair.one, pair.other): pair for pair in own}
        both |= {(pair.other, pair.one): pair for pair in own}
        named = {name for pair in own for name in (pair.one, pair.other)}
        columns = [column for column in report.columns if column.key in named]
        maps.append((dtype, columns, both))
    return maps


def heat_level(pair: Pair, limit: float) -> int:
    """0 to 3 for what cannot be told apart, 4 for what can."""
    if pair.nan_cases or pair.max_ratio > limit:
        return 4
    return sum(pair.max_ratio >= edge for edge in (1.0, 2.0, 4.0))


def furthest(report: Report, most: int = 12) -> list[Pair]:
    """The largest pairwise differences."""
    ranked = sorted(report.pairs, key=lambda pair: (-len(pair.nan_cases), -pair.max_ratio))
    return ranked[:most]


def undefined(report: Report) -> list[tuple[str, list[Apart]]]:
    """Cases without an agreed answer, or with NaN, by case."""
    found: dict[str, list[Apart]] = defaultdict(list)
    for item in report.apart:
        found[item.case].append(item)
    return list(found.items())


def measured(report: Report, column: Column) -> bool:
    """Whether anything was measured of it."""
    return any(item.column == column.key for item in report.accuracy)


def apart_count(report: Report) -> int:
    """How many pairs, counted once per dtype, can be told apart."""
    return sum(heat_level(pair, report.limit) == 4 for pair in report.pairs)


def asked(report: Report) -> list[Row]:
    """The rows of the matrix that hold anything."""
    return [row for row in report.matrix if _holds_anything(row)]


def _holds_anything(row: Row) -> bool:
    return any(cell.counts for cell in row.cells)


def chapters(report: Report) -> list[tuple[str, list[tuple[int, Row]]]]:
    """What was asked by chapter, in the order of their first rows; each row with its place in the
    matrix."""
    found: dict[str, list[tuple[int, Row]]] = defaultdict(list)
    for index, row in enumerate(report.matrix):
        if _holds_anything(row):
            found[row.chapter].append((index, row))
    return list(found.items())


def unasked(report: Report) -> list[str]:
    """Requirements of which nobody was asked anything."""
    return [row.requirement for row in report.matrix if not _holds_anything(row)]


MOST_CHANGES = 8
"""Changes of conventions that are told at once."""


def changed(point: Point) -> str:
    """What changed since the point before, in one line."""
    change = point.change
    if point.unavailable:
        return point.unavailable
    if change is None:
        return "the first"
    told = [
        f"{sum(counts.values()):,} {word}: {_first_few(counts)}"
        for word, counts in (("worse", change.worse), ("mended", change.better))
        if counts
    ]
    told += [f"{name}: {was} → {now}" for name, was, now, _ in change.other[:MOST_CHANGES]]
    more = len(change.other) - MOST_CHANGES
    told += [f"{more:,} more change{'s' * (more > 1)}"] if more > 0 else []
    told += [f"{change.added:,} asked for the first time"] if change.added else []
    told += [f"{change.removed:,} no longer asked"] if change.removed else []
    return "; ".join(told) or "no change"


def _first_few(counts: Mapping[str, int]) -> str:
    names = sorted(counts, key=counts.__getitem__, reverse=True)
    more = len(names) - MOST_CHANGES
    return ", ".join(names[:MOST_CHANGES]) + (f" and {more} more" if more > 0 else "")
