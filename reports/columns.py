"""From records to columns: one for each implementation on each device."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from conformance.records.findings import CaseResult, Topic
from conformance.records.header import Header, Implementation, RequirementInfo
from conformance.records.record import Record
from conformance.reports.model import Column, Loaded, Source
from conformance.reports.totals import Seen, finding_counts, item_counts, standing

Named = TypeVar("Named", RequirementInfo, Topic)

_BRACKETED = re.compile(r"(.*\S)\s*\(([^()]+)\)")


def sources(records: Sequence[Loaded]) -> list[Source]:
    """What is said about each record as a whole."""
    found = []
    for path, record, _ in records:
        without = sum(result.verdict == "not-run" for result in record.results)
        unwritten = max(0, record.header.planned - len(record.results))
        found.append(
            Source(
                name=record.header.name,
                file=path.name,
                complete=record.complete,
                planned=record.header.planned,
                missing=without + unwritten,
                deselected=record.header.deselected,
                implementations=[item.name for item in record.header.implementations],
                provenance=record.header.provenance,
            )
        )
    return found


def columns(records: Sequence[Loaded]) -> tuple[list[Column], list[Seen]]:
    """The columns, those of a group side by side, and every finding with its column."""
    found: list[Column] = []
    seen: list[Seen] = []
    keys = column_keys(records)
    for index, (_, record, _) in enumerate(records):
        own = defaultdict(list)
        for result in record.results:
            own[result.implementation].append(result)
        for implementation in declared(record):
            results = own[implementation.name]
            key = keys[index, implementation.name]
            found.append(_column(key, implementation, record, results))
            seen += [Seen(key, result, item) for result in results for item in result.findings]
    return _grouped(found), seen


def requirements_of(records: Sequence[Loaded]) -> list[RequirementInfo]:
    """The requirements of all records, each once, as the newest record words it."""
    return _each(item for header in _newest(records) for item in header.requirements)


def topics_of(records: Sequence[Loaded]) -> list[Topic]:
    """The topics of experiments likewise."""
    return _each(item for header in _newest(records) for item in header.topics)


def _newest(records: Sequence[Loaded]) -> list[Header]:
    headers = [record.header for _, record, _ in records]
    return sorted(headers, key=lambda header: header.provenance.created, reverse=True)


def _each(items: Iterable[Named]) -> list[Named]:
    found: dict[str, Named] = {}
    for item in items:
        found.setdefault(item.id, item)
    return list(found.values())


def declared(record: Record) -> list[Implementation]:
    """The implementations as declared, and a stand-in for any that only has results."""
    known = {item.name for item in record.header.implementations}
    others = dict.fromkeys(
        result.implementation for result in record.results if result.implementation not in known
    )
    unknown = [
        Implementation(
            name=name,
            title=name,
            documentation="",
            framework="",
            spec=name,
            versions={},
            modes=[],
            dtypes=[],
            masks=[],
        )
        for name in others
    ]
    return [*record.header.implementations, *unknown]


def column_keys(records: Sequence[Loaded]) -> dict[tuple[int, str], str]:
    """Key of each column by its record's place and its name.

    It is the name where that is unique, else with the device, else with the record too.
    """
    names = [
        (index, item.name, record)
        for index, (_, record, _) in enumerate(records)
        for item in declared(record)
    ]
    keys = {(index, name): name for index, name, _ in names}
    for longer in ("{name} on {device}", "{name} on {device} ({record})", "{name} #{index}"):
        times = Counter(keys.values())
        for index, name, record in names:
            if times[keys[index, name]] > 1:
                keys[index, name] = longer.format(
                    name=name,
                    device=record.header.provenance.device,
                    record=record.header.name,
                    index=index + 1,
                )
    return keys


def _column(
    key: str, implementation: Implementation, record: Record, results: Sequence[CaseResult]
) -> Column:
    provenance = record.header.provenance
    findings = finding_counts(results)
    title = implementation.title or implementation.name
    return Column(
        key=key,
        name=implementation.name,
        title=title,
        group=title,
        variant="",
        documentation=implementation.documentation,
        framework=implementation.framework,
        versions=implementation.versions,
        spec=implementation.spec,
        device=provenance.device,
        device_model=provenance.device_model,
        record=record.header.name,
        modes=implementation.modes,
        dtypes=implementation.dtypes,
        unavailable=implementation.unavailable,
        items=item_counts(results),
        findings=findings,
        standing=standing(findings, record.complete),
    )


def _grouped(found: Sequence[Column]) -> list[Column]:
    """Titles that differ only in what stands in brackets are variants of one layer."""
    members = defaultdict(list)
    for column in found:
        match = _BRACKETED.fullmatch(column.title)
        base, variant = (match[1], match[2]) if match else (column.title, "")
        members[base].append((column, variant))
    grouped = []
    for base, group in members.items():
        if len(group) == 1:
            grouped.append(group[0][0])
            continue
        named = Counter(variant for _, variant in group)
        for column, variant in group:
            told = variant if variant and named[variant] == 1 else column.key
            grouped.append(msgspec.structs.replace(column, group=base, variant=told))
    return grouped
