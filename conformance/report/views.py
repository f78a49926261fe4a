"""How a report is read: what says the same on several backends is said once, causes come first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from conformance.report.model import (
    Apart,
    Argument,
    Column,
    Convention,
    Deviation,
    Pair,
    Report,
    Unsupported,
    Variant,
)
from conformance.report.totals import WRONG
from conformance.report.wording import boolean


class Group(NamedTuple):
    """Columns of one layer on several backends; mostly just one."""

    title: str
    columns: list[Column]


class Card(NamedTuple):
    """A convention, and all members of a group that share it."""

    title: str
    columns: list[Column]
    everybody: bool
    convention: Convention


class Reading(NamedTuple):
    """A mask argument as the page says it.

    `meanings` is what True was seen to do, or is declared to do where nobody looked; `agrees` is
    None there.
    """

    name: str
    axes: list[str]
    number: str | None
    meanings: list[tuple[str, str, str]]
    agrees: bool | None
    surprises: list[str]


class Symptom(NamedTuple):
    """Deviations of one implementation that have one cause, or one message."""

    told: str
    known: bool
    verdict: str
    times: int
    deviations: list[Deviation]


def groups(report: Report) -> list[Group]:
    """The columns by layer."""
    return [Group(title, list(own)) for title, own in groupby(report.columns, lambda c: c.group)]


def cards(report: Report, *parts: str) -> list[Card]:
    """Conventions, merged over those members of a group that agree in these parts."""
    conventions = {item.column: item for item in report.conventions}

    def key(column: Column) -> bytes:
        own = conventions[column.key]
        return msgspec.json.encode(_untimed([getattr(own, part) for part in parts]))

    return [
        Card(title, columns, everybody, conventions[columns[0].key])
        for title, columns, everybody in _merged(report, key)
    ]


def reasons(report: Report) -> list[tuple[str, list[Column], bool, list[Unsupported]]]:
    """What is unsupported, merged over those members of a group that have the same reasons."""
    own: dict[str, list[Unsupported]] = defaultdict(list)
    for item in report.unsupported:
        own[item.column].append(item)

    def key(column: Column) -> bytes:
        return msgspec.json.encode(sorted((i.reason, i.cases) for i in own[column.key]))

    return [
        (title, columns, everybody, own[columns[0].key])
        for title, columns, everybody in _merged(report, key)
        if own[columns[0].key]
    ]


def reading(argument: Argument) -> Reading:
    """What the argument means, and whether it was seen to."""
    forms = {form.form: form for form in argument.forms}
    observed = [form for form in argument.forms if form.observed]
    surprises = [
        f"{_fed(form.form)} {item.value}{f' ({item.where})' if item.where else ''}, "
        f"declared {form.declared}"
        for form in observed
        for item in form.observed
        if item.value != form.declared
    ]
    boolean_form = forms.get("bool")
    meanings = []
    if boolean_form is not None:
        seen = boolean_form.observed or [Variant(boolean_form.declared, 0, "")]
        meanings = [(item.value, boolean(item.value), item.where) for item in seen]
    return Reading(
        name=argument.declared.name,
        axes=argument.declared.axes,
        number=argument.declared.number,
        meanings=meanings,
        agrees=not surprises if observed else None,
        surprises=surprises,
    )


def symptoms(report: Report, column: str) -> list[Symptom]:
    """The deviations of one implementation by what is wrong, named causes first."""
    found: dict[tuple[str, str, bool], list[Deviation]] = defaultdict(list)
    for item in report.deviations:
        if item.column == column:
            told = item.cause or item.detail
            found[item.verdict, told, bool(item.cause)].append(item)
    listed = [
        Symptom(told, known, verdict, sum(item.times for item in items), items)
        for (verdict, told, known), items in found.items()
    ]
    return sorted(listed, key=lambda item: (not item.known, -item.times))


def evidence(report: Report) -> dict[tuple[str, str], str]:
    """Anchor of the first deviation of each (column, requirement)."""
    found: dict[tuple[str, str], str] = {}
    for item in report.deviations:
        found.setdefault((item.column, item.requirement), item.id)
    return found


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


def variants_of(columns: Sequence[Column]) -> str:
    """Names of the members, as the second line under a title."""
    return ", ".join(column.variant or column.key for column in columns)


def _merged(
    report: Report, key: Callable[[Column], bytes]
) -> list[tuple[str, list[Column], bool]]:
    merged = []
    for group in groups(report):
        alike: dict[bytes, list[Column]] = defaultdict(list)
        for column in group.columns:
            alike[key(column)].append(column)
        merged += [(group.title, own, len(own) == len(group.columns)) for own in alike.values()]
    return merged


def _untimed(value: Any) -> Any:
    """Without counts: a backend that runs fewer cases says the same."""
    plain = msgspec.to_builtins(value)
    if isinstance(plain, dict):
        return {name: _untimed(own) for name, own in plain.items() if name != "times"}
    return [_untimed(own) for own in plain] if isinstance(plain, list) else plain


def _fed(form: str) -> str:
    return {"bool": "booleans", "0/-inf": "0 and −∞", "0/1": "0 and 1"}.get(form, form)
