"""Turn records into columns: one for each implementation on each device."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from conformance.records.findings import CaseResult, Topic
from conformance.records.header import Header, Implementation, RequirementInfo
from conformance.records.numbers import Array
from conformance.records.record import Record
from conformance.reports.model import Column, Loaded, Source
from conformance.reports.totals import (
    Located,
    by_key,
    finding_counts,
    item_counts,
    located,
    standing,
)

_BRACKETED = re.compile(r"(.*\S)\s*\(([^()]+)\)")

Named = TypeVar("Named", RequirementInfo, Topic)


class Part(NamedTuple):
    """The part of a record that is about one implementation.

    Attributes:
        key: the key of its column: the name if that is unique, else the name and the device, else
            also the name of the record, or at last the name and the number of the record.
        arrays: the arrays stored beside the whole record, by "item id|array".
    """

    key: str
    implementation: Implementation
    record: Record
    arrays: Mapping[str, Array]
    results: Sequence[CaseResult]


def parts_of(records: Sequence[Loaded]) -> list[Part]:
    """Return a part for every implementation of every record, in the order of the records."""
    found = []
    for index, (_, record, arrays) in enumerate(records):
        results = by_key(record.results, lambda result: result.implementation)
        for implementation in declared(record):
            name = implementation.name
            part = Part(name, implementation, record, arrays, results.get(name, []))
            found.append((index, part))
    for longer in ("{name} on {device}", "{name} on {device} ({record})", "{name} #{index}"):
        times = Counter(part.key for _, part in found)
        for place, (index, part) in enumerate(found):
            if times[part.key] > 1:
                key = longer.format(
                    name=part.implementation.name,
                    device=part.record.header.provenance.device,
                    record=part.record.header.name,
                    index=index + 1,
                )
                found[place] = index, part._replace(key=key)
    return [part for _, part in found]


def findings_of(parts: Iterable[Part]) -> list[Located]:
    """Return every finding with its column."""
    return [one for part in parts for one in located(part.results, part.key)]


def sources(records: Sequence[Loaded]) -> list[Source]:
    """Return information about each record as a whole."""
    return [
        Source(
            name=record.header.name,
            file=path.name,
            complete=record.complete,
            planned=record.header.planned,
            missing=sum(result.verdict == "not-run" for result in record.results)
            + max(0, record.header.planned - len(record.results)),
            deselected=record.header.deselected,
            implementations=[item.name for item in record.header.implementations],
            provenance=record.header.provenance,
        )
        for path, record, _ in records
    ]


def columns(parts: Iterable[Part]) -> list[Column]:
    """Return the columns, with those of one layer side by side.

    Columns whose titles differ only in the part in brackets are variants of one layer.
    """
    layers: dict[str, list[tuple[Part, str]]] = {}
    for part in parts:
        match = _BRACKETED.fullmatch(_title(part))
        layer, variant = (match[1], match[2]) if match else (_title(part), "")
        layers.setdefault(layer, []).append((part, variant))
    shown = []
    for layer, members in layers.items():
        times = Counter(variant for _, variant in members)
        for part, variant in members:
            unique = variant if variant and times[variant] == 1 else part.key
            is_alone = len(members) == 1
            group = _title(part) if is_alone else layer
            shown.append(_column(part, group, "" if is_alone else unique))
    return shown


def _title(part: Part) -> str:
    return part.implementation.title or part.implementation.name


def _column(part: Part, group: str, variant: str) -> Column:
    implementation, provenance = part.implementation, part.record.header.provenance
    findings = finding_counts(part.results)
    return Column(
        key=part.key,
        name=implementation.name,
        title=_title(part),
        group=group,
        variant=variant,
        documentation=implementation.documentation,
        framework=implementation.framework,
        versions=implementation.versions,
        spec=implementation.spec,
        device=provenance.device,
        device_model=provenance.device_model,
        record=part.record.header.name,
        modes=implementation.modes,
        dtypes=implementation.dtypes,
        unavailable=implementation.unavailable,
        items=item_counts(part.results),
        findings=findings,
        standing=standing(findings, part.record.complete),
    )


def requirements_of(records: Sequence[Loaded]) -> list[RequirementInfo]:
    """Return the requirements of all records, each once, from the newest record that has it."""
    return _each(item for header in _newest(records) for item in header.requirements)


def topics_of(records: Sequence[Loaded]) -> list[Topic]:
    """Return the topics in all records, each once, from the newest record that has it."""
    return _each(item for header in _newest(records) for item in header.topics)


def _newest(records: Sequence[Loaded]) -> list[Header]:
    headers = [record.header for _, record, _ in records]
    return sorted(headers, key=lambda header: header.provenance.created, reverse=True)


def _each(items: Iterable[Named]) -> list[Named]:
    return [same[0] for same in by_key(items, lambda item: item.id).values()]


def declared(record: Record) -> list[Implementation]:
    """Return the declared implementations, and placeholders for undeclared ones with results."""
    names = {item.name for item in record.header.implementations}
    unknown = dict.fromkeys(result.implementation for result in record.results)
    return [
        *record.header.implementations,
        *(
            Implementation(name, name, "", "", name, versions={}, modes=[], dtypes=[], masks=[])
            for name in unknown
            if name not in names
        ),
    ]
