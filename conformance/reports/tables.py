"""The tables of a report: columns, totals, requirements, deviations, and what was not verified.

A column is one implementation on one device. Its findings are counted by verdict, and equivalent
deviations are grouped.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from conformance.records.findings import (
    GRAVITY,
    NOT_VERIFIED,
    PREFIX,
    RUN,
    WRONG,
    CaseResult,
    Finding,
    Topic,
    count,
    gravity,
    verified,
)
from conformance.records.header import Header, Implementation, KnownDeviation, RequirementInfo
from conformance.records.numbers import Array
from conformance.records.record import Record
from conformance.reports.model import (
    Cell,
    Column,
    Counts,
    Deviation,
    Loaded,
    NotVerified,
    Open,
    RequirementRow,
    Source,
    Standing,
    Totals,
    UnsupportedReason,
)
from conformance.reports.wording import UNSORTED, again

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Named = TypeVar("Named", RequirementInfo, Topic)

# Findings, counted and grouped


class Located(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A finding together with the result of the item in which it was made.

    Attributes:
        column: the key of its column in a report, or "".
        before, after: in a comparison of two records, the states in the first and the second.
    """

    result: CaseResult
    finding: Finding
    column: str = ""
    before: str = ""
    after: str = ""

    @property
    def requirement(self) -> str:
        """The id of the requirement."""
        return self.finding.requirement

    @property
    def wrong(self) -> bool:
        """Whether the finding is a deviation or an error."""
        return self.finding.verdict in WRONG

    def part(self, place: str) -> str:
        """Return the requirement, or the field of the item's result, that `place` names."""
        text: str = self.requirement if place == "requirement" else getattr(self.result, place)
        return text


class Group:
    """A group of equivalent findings.

    Attributes:
        members: the findings, in the given order.
        worst: the worst finding, which serves as evidence.
        cases, dtypes, modes: those in which the findings were made.
    """

    def __init__(self, members: Sequence[Located]) -> None:
        self.members = members
        self.worst = max(members, key=lambda member: gravity(member.finding))
        self.cases = list(dict.fromkeys(member.result.case for member in members))
        self.dtypes = list(dict.fromkeys(member.result.dtype for member in members))
        self.modes = list(dict.fromkeys(member.result.mode for member in members))

    def __len__(self) -> int:
        return len(self.members)

    @property
    def evidence(self) -> dict[str, Any]:
        """The fields that `model.Deviation` and `changes.FindingChange` both have, by name.

        They are the number of findings, the cases and modes, and the worst item with its figures.
        """
        result, finding = self.worst.result, self.worst.finding
        return {
            "times": len(self),
            "cases": self.cases,
            "modes": self.modes,
            "figures": finding.figures,
            "worst": finding.worst,
            **{name: getattr(result, name) for name in ("case", "dtype", "mode", "device")},
        }


def by_key(items: Iterable[V], key: Callable[[V], K]) -> dict[K, list[V]]:
    """Group items by a key, in the order in which keys first occur."""
    groups: dict[K, list[V]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def located(results: Iterable[CaseResult], column: str = "") -> list[Located]:
    """Return every finding of some items, together with its item."""
    return [Located(result, one, column) for result in results for one in result.findings]


def grouped(findings: Iterable[Located], key: Callable[[Located], Hashable]) -> list[Group]:
    """Group findings with equal keys, in the order of the groups' first members."""
    return [Group(members) for members in by_key(findings, key).values()]


def reasons(results: Iterable[CaseResult], verdicts: Collection[str]) -> Counter[str]:
    """Return how many items have one of these verdicts, by the reason for the verdict.

    The reason is the message of an item's first finding, or "no requirement applies".
    """
    return Counter(
        (result.findings[0].detail if result.findings else "") or "no requirement applies"
        for result in results
        if result.verdict in verdicts
    )


def worst_verdict(counts: Mapping[str, int]) -> str:
    """Return the worst verdict that occurs, or ""."""
    return next((verdict for verdict in GRAVITY if counts.get(verdict)), "")


def item_counts(results: Iterable[CaseResult]) -> Counts:
    """Return the number of items with each verdict."""
    return count(result.verdict for result in results)


def finding_counts(results: Iterable[CaseResult]) -> Counts:
    """Return the number of findings with each verdict."""
    return count(finding.verdict for result in results for finding in result.findings)


# Records and columns


class RecordPart(NamedTuple):
    """The part of a record that is about one implementation.

    Attributes:
        key: the key of its column: the name if that is unique, else the name and the device, else
            also the name of the record, or finally the name and the number of the record.
        arrays: the arrays stored beside the whole record, by "item id|array".
    """

    key: str
    implementation: Implementation
    record: Record
    arrays: Mapping[str, Array]
    results: Sequence[CaseResult]

    @property
    def title(self) -> str:
        """The title of the implementation, or its name if it has no title."""
        return self.implementation.title or self.implementation.name


def parts_of(records: Sequence[Loaded]) -> list[RecordPart]:
    """Return a part for every implementation of every record, in the order of the records."""
    found = []
    for index, (_, record, arrays) in enumerate(records):
        results = by_key(record.results, lambda result: result.implementation)
        declared = {item.name: item for item in record.header.implementations}
        for name in dict.fromkeys([*declared, *results]):
            implementation = declared.get(name) or Implementation(
                name, name, "", "", name, versions={}, modes=[], dtypes=[], masks=[]
            )
            part = RecordPart(name, implementation, record, arrays, results.get(name, []))
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


def sources(records: Sequence[Loaded]) -> list[Source]:
    """Return for each record how it was made, what was planned, and how much is missing."""
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


def columns(parts: Iterable[RecordPart]) -> list[Column]:
    """Return a column for each part, with the columns of one layer side by side.

    Columns whose titles differ only in the part in brackets are variants of one layer.
    """
    layers: dict[str, list[tuple[RecordPart, str]]] = {}
    for part in parts:
        match = re.fullmatch(r"(.*\S)\s*\(([^()]+)\)", part.title)
        layer, variant = (match[1], match[2]) if match else (part.title, "")
        layers.setdefault(layer, []).append((part, variant))
    shown = []
    for layer, members in layers.items():
        if len(members) == 1:
            part, _ = members[0]
            shown.append(_column(part, part.title, ""))
            continue
        times = Counter(variant for _, variant in members)
        for part, variant in members:
            unique = variant if variant and times[variant] == 1 else part.key
            shown.append(_column(part, layer, unique))
    return shown


def _column(part: RecordPart, group: str, variant: str) -> Column:
    implementation, provenance = part.implementation, part.record.header.provenance
    findings = finding_counts(part.results)
    return Column(
        key=part.key,
        name=implementation.name,
        title=part.title,
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
        standing=_standing(findings, part.record.complete),
    )


def _standing(findings: Counts, complete: bool) -> Standing:
    if any(findings.get(verdict) for verdict in WRONG):
        return "deviates"
    is_open = any(findings.get(verdict) for verdict in NOT_VERIFIED)
    if complete and verified(findings) and not is_open:
        return "conforms"
    return "not verified"


def requirements_of(records: Sequence[Loaded]) -> list[RequirementInfo]:
    """Return the requirements of all records, each once, from the newest record that has it."""
    return _each(item for header in _newest(records) for item in header.requirements)


def topics_of(records: Sequence[Loaded]) -> list[Topic]:
    """Return the descriptions of all experiments, each once, from the newest record that has it."""
    return _each(item for header in _newest(records) for item in header.topics)


def _newest(records: Sequence[Loaded]) -> list[Header]:
    headers = [record.header for _, record, _ in records]
    return sorted(headers, key=lambda header: header.provenance.created, reverse=True)


def _each(items: Iterable[Named]) -> list[Named]:
    return [same[0] for same in by_key(items, lambda item: item.id).values()]


# The matrix of requirements and columns


def totals(columns: Sequence[Column], sources: Iterable[Source], seen: Sequence[Located]) -> Totals:
    """Return the dtypes and the numbers of implementations, items, findings, cases and experiments.

    `sources` are the records of the columns, and `seen` their findings.
    """
    order: tuple[Standing, ...] = ("conforms", "deviates", "not verified")
    standings = [column.standing for column in columns]
    items: Counter[str] = Counter()
    findings: Counter[str] = Counter()
    for column in columns:
        items.update(column.items)
        findings.update(column.findings)
    # A journal has no lines for items that were not reached; a finished record has.
    items["not-run"] = max(items["not-run"], sum(source.missing for source in sources))
    cases = {one.result.case for one in seen}
    experiments = sum(case.startswith(PREFIX) for case in cases)
    return Totals(
        implementations={name: standings.count(name) for name in order if name in standings},
        items=count(items.elements()),
        findings=count(findings.elements()),
        cases=len(cases) - experiments,
        experiments=experiments,
        dtypes=list(dict.fromkeys(one.result.dtype for one in seen)),
    )


def matrix(
    columns: Sequence[Column], seen: Iterable[Located], requirements: Sequence[RequirementInfo]
) -> list[RequirementRow]:
    """Return one row for each given requirement, then one for each other requirement with findings.

    The others include "run", the row of items without an outcome.
    """
    verdicts: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one in seen:
        verdicts[one.finding.requirement, one.column].append(one.finding.verdict)
    rows = [
        RequirementRow(item.id, item.chapter, item.level, item.sentence, item.why, [])
        for item in requirements
    ]
    for name in sorted({name for name, _ in verdicts} - {row.requirement for row in rows}):
        sentence = "The record does not say what this requirement is."
        if name == RUN:
            sentence = "Items without an outcome: the process died, or the run ended before them."
        rows.append(RequirementRow(name, name.split(".")[0], "", sentence, "", []))
    for row in rows:
        for column in columns:
            counts = count(verdicts.get((row.requirement, column.key), ()))
            row.cells.append(Cell(column.key, counts, worst_verdict(counts)))
    return rows


# Deviations


def deviations(
    columns: Sequence[Column],
    seen: Sequence[Located],
    requirements: Sequence[RequirementInfo],
    known: Mapping[Located, KnownDeviation],
) -> list[Deviation]:
    """Return the deviations, sorted by implementation, requirement, and frequency (highest first).

    The worst finding of each deviation is its evidence. `known` maps findings to the baseline entry
    that covers them.
    """
    asked = by_key(seen, _place)
    level = {item.id: item.level for item in requirements}
    rank = {name: index for index, name in enumerate(level)}
    order = {column.key: index for index, column in enumerate(columns)}
    groups = sorted(
        _alike([one for one in seen if one.wrong], known),
        key=lambda group: (
            order[group.worst.column],
            rank.get(group.worst.requirement, len(rank)),
            -len(group),
        ),
    )
    entries: list[Deviation] = []
    anchors: Counter[str] = Counter()
    for group in groups:
        column, requirement = place = _place(group.worst)
        # The anchor must be safe in a link, whatever the name of the implementation.
        anchor = re.sub(r"[^a-z0-9]+", "-", f"{column} {requirement}".lower()).strip("-")
        anchors[anchor] += 1
        finding = group.worst.finding
        cases = by_key((member.result for member in group.members), lambda item: item.dtype)
        beside = [one.result for one in asked[place] if one.result.case in group.cases]
        entry = known.get(group.worst) or KnownDeviation(finding.verdict)
        deviation = Deviation(
            **group.evidence,
            id=f"{anchor}-{anchors[anchor]}",
            column=column,
            requirement=requirement,
            level=level.get(requirement, ""),
            verdict=finding.verdict,
            cause=finding.cause,
            made_by=finding.made_by,
            detail=finding.detail,
            of=len(asked[place]),
            dtypes={dtype: len({item.case for item in items}) for dtype, items in cases.items()},
            everywhere=(
                {item.dtype for item in beside} <= {*group.dtypes},
                {item.mode for item in beside} <= {*group.modes},
            ),
            command=again(group.worst.result, columns[order[column]].spec),
            kind=entry.kind or UNSORTED,
            reason=entry.reason.strip(),
            link=entry.link,
            reproduction=entry.reproduction,
        )
        entries.append(deviation)
    return entries


def _place(one: Located) -> tuple[str, str]:
    return one.column, one.requirement


def _alike(wrong: Sequence[Located], known: Mapping[Located, KnownDeviation]) -> list[Group]:
    """Group equivalent findings.

    Measured findings without a known cause are kept apart if their cases deviate in different
    dtypes: what is wrong only in float64 is a different fault from what is wrong in all dtypes.
    """

    def says(one: Located) -> tuple[object, ...]:
        finding = one.finding
        text = normalised(finding, one.result.mode, one.result.dtype)
        entry = id(known.get(one))
        return *_place(one), entry, finding.verdict, finding.cause, finding.made_by, text

    said = {id(one): says(one) for one in wrong}
    dtypes: dict[tuple[object, str], set[str]] = defaultdict(set)
    for one in wrong:
        dtypes[said[id(one)], one.result.case].add(one.result.dtype)

    def key(one: Located) -> tuple[object, ...]:
        same = said[id(one)]
        if one.finding.cause or one.finding.figures is None:
            return (same,)
        return same, frozenset(dtypes[same, one.result.case])

    return grouped(wrong, key)


_NUMBER = re.compile(r"-?\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\b")
_REPEATED = re.compile(r"\(#,#\)(?: \(#,#\))*")


def normalised(finding: Finding, mode: str, dtype: str) -> str:
    """Return the message of a finding, with placeholders for array, mode, dtype and numbers.

    Such details vary from item to item; with placeholders, equivalent findings have equal texts.
    """
    array = finding.figures.array if finding.figures is not None else ""
    text = finding.detail
    for word in filter(None, (array, mode, dtype)):
        text = re.sub(rf"(?<![\w.]){re.escape(word)}(?![\w.])", "…", text)
    return _REPEATED.sub("(…)", _NUMBER.sub("#", text))


# What was not answered


def unsupported(columns: Sequence[Column], seen: Iterable[Located]) -> list[UnsupportedReason]:
    """Return the items with unsupported findings by implementation and reason.

    For each implementation, the most frequent reason comes first.
    """
    left = (one for one in seen if one.finding.verdict == "unsupported")
    entries = [
        UnsupportedReason(
            group.worst.column, group.worst.finding.detail, items, len(group.cases), some
        )
        for group, items, some in _unanswered(columns, left)
    ]
    order = [column.key for column in columns]
    return sorted(entries, key=lambda entry: (order.index(entry.column), -entry.items))


def _unanswered(
    columns: Sequence[Column], seen: Iterable[Located]
) -> list[tuple[Group, int, list[str]]]:
    """Group findings by column, verdict and reason, in the order of the columns.

    Each group is returned with its number of items and up to three of its cases.
    """
    groups = grouped(seen, lambda one: (one.column, one.finding.verdict, one.finding.detail))
    order = [column.key for column in columns]
    return [
        (group, len({one.result.id for one in group.members}), group.cases[:3])
        for group in sorted(groups, key=lambda group: order.index(group.worst.column))
    ]


def not_verified(
    columns: Sequence[Column],
    sources: Sequence[Source],
    seen: Iterable[Located],
    expected: Sequence[str],
    problems: Sequence[str],
) -> NotVerified:
    """Return everything that should have been verified but was not, with the reasons.

    `expected` are the names of required records, and `problems` are lines about unusable records.
    """
    present = {source.name for source in sources}
    unavailable = {column.key: column.unavailable for column in columns if column.unavailable}
    left = (
        one
        for one in seen
        if one.finding.verdict in NOT_VERIFIED
        and not (one.finding.verdict == "unavailable" and one.column in unavailable)
    )
    return NotVerified(
        missing=[name for name in dict.fromkeys(expected) if name not in present],
        unavailable=unavailable,
        incomplete=[
            f"{source.name}: {source.missing} of {source.planned} planned items have no outcome; "
            "the run has not ended, or ended early"
            for source in sources
            if not source.complete
        ],
        narrowed={
            source.name: (
                source.provenance.selection
                + (f" ({source.deselected} items deselected)" if source.deselected else "")
            ).strip()
            for source in sources
            if source.provenance.selection or source.deselected
        },
        open=[
            Open(one.column, one.finding.verdict, one.finding.detail, items, some)
            for group, items, some in _unanswered(columns, left)
            for one in [group.worst]
        ],
        problems=list(problems),
    )
