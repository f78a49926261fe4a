"""What changed between two sets of records. The unit is a finding: item and requirement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from conformance.errors import BrokenRecord
from conformance.records.findings import (
    RUN,
    CaseResult,
    Figures,
    Finding,
    Worst,
    count,
)
from conformance.records.header import CaseInfo
from conformance.records.phrase import NOTHING, Phrase
from conformance.records.record import Record, read
from conformance.reports.load import find_records
from conformance.reports.totals import BAD, Group, grouped
from conformance.reports.wording import again
from conformance.text import some
from conformance.words import say

SCHEMA = "mha-conformance/changes/1"

Counts = dict[str, int]


class Side(msgspec.Struct, frozen=True):
    """One of the two: a record, or several in a folder.

    Attributes:
        file: as given.
        created: when the last of its records was made.
        suite, catalogue: versions; several if its records differ.
        packages: versions of packages.
        selection: what narrowed it, or "".
        complete: whether every planned item has an outcome.
        implementations: name to verdicts of its items, on all devices.
        devices: name to the devices that these are of.
    """

    file: str
    created: str
    suite: str
    catalogue: str
    packages: dict[str, str]
    selection: str
    complete: bool
    implementations: dict[str, Counts]
    devices: dict[str, list[str]]


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """Findings of one implementation and requirement that changed alike.

    Attributes:
        implementation, device: whose.
        requirement: which; "run" where the process was lost.
        level: of the requirement, or "".
        before, after: verdicts, or values of a characteristic; "" if it was not asked.
        told: what there is to say about the state now, or "".
        cause: the known mistake that explains it now, or "".
        times: how many findings.
        cases, dtypes, modes: where.
        case, dtype, mode: the item that is furthest off.
        figures, worst: its evidence.
        command: runs just that item.
    """

    implementation: str
    device: str
    requirement: str
    level: str
    before: str
    after: str
    times: int
    cases: list[str]
    dtypes: list[str]
    modes: list[str]
    case: str
    dtype: str
    mode: str
    command: str
    told: str = ""
    cause: str = ""
    figures: Figures | None = None
    worst: Worst | None = None


class Convention(msgspec.Struct, frozen=True):
    """An entry of a convention card that is another now; "" stands for no entry.

    `phrases` are subject, before and after, for programs.
    """

    implementation: str
    device: str
    experiment: str
    subject: str
    before: str
    after: str
    modes: list[str]
    phrases: list[Phrase] = []


class Members(msgspec.Struct, frozen=True):
    """What only one of the two has.

    Attributes:
        implementations: by name.
        cases: of implementations that both have.
        items: how many items of these implementations, in all cases, dtypes and modes.
        findings: how many findings of items that both have.
        wrong: those findings and items that deviate.
    """

    implementations: list[str]
    cases: list[str]
    items: int
    findings: int
    wrong: list[Change]


class Changes(msgspec.Struct, frozen=True):
    """All of it.

    Attributes:
        worse: what conformed, was unsupported or deviated less gravely, and is wrong now.
        lost: what was answered and is not any more.
        otherwise: what is another now, and neither better nor worse.
        fixed: what was wrong and conforms.
        gained: what was not answered and is now.
        conventions: what experiments show otherwise.
        added, removed: what only the second, or only the first has.
        notes: what to know before comparing, such as another catalogue.
        common: how many findings both have.
        same: how many of them are as they were.
    """

    schema: str
    before: Side
    after: Side
    worse: list[Change]
    lost: list[Change]
    otherwise: list[Change]
    fixed: list[Change]
    gained: list[Change]
    conventions: list[Convention]
    added: Members
    removed: Members
    notes: list[str]
    common: int
    same: int

    @property
    def kinds(self) -> list[tuple[str, str, list[Change]]]:
        """Symbol, name and changes of each kind, what is worse first."""
        return [
            ("✗", "worse", self.worse),
            ("?", "no longer answered", self.lost),
            ("~", "otherwise", self.otherwise),
            ("✓", "fixed", self.fixed),
            ("+", "answered now", self.gained),
        ]

    @property
    def anything_worse(self) -> bool:
        """Whether something is worse, or no longer answered."""
        return bool(self.worse or self.lost)


# What two sides say of the same


Key = tuple[str, str, str, str, str]
"""Of an item: implementation, device, case, dtype and mode."""

Answers = Mapping[Key, CaseResult]


class Pair(NamedTuple):
    """What two sides say of one requirement of an item; None of what a side was not asked."""

    key: Key
    requirement: str
    before: Finding | None
    after: Finding | None


def answers(results: Iterable[CaseResult]) -> dict[Key, CaseResult]:
    """Results by what they are of."""
    return {(own.implementation, own.device, own.case, own.dtype, own.mode): own for own in results}


def matched(before: Answers, after: Answers) -> Iterator[Pair]:
    """Every finding of both sides; of a lost process, one for the item as a whole."""
    for key in dict.fromkeys([*before, *after]):
        one, other = _by_requirement(before.get(key)), _by_requirement(after.get(key))
        if RUN in one and RUN not in other and key in after:
            wrong = [finding for finding in other.values() if finding.verdict in BAD]
            verdict = after[key].verdict
            for finding in wrong or [Finding(RUN, verdict)]:
                yield Pair(key, finding.requirement, one[RUN], finding)
        elif RUN in other and RUN not in one and key in before:
            yield Pair(key, RUN, Finding(RUN, before[key].verdict), other[RUN])
        else:
            for requirement in dict.fromkeys([*one, *other]):
                yield Pair(key, requirement, one.get(requirement), other.get(requirement))


def entries_apart(before: Answers, after: Answers) -> Iterator[tuple[Key, Phrase, Phrase, Phrase]]:
    """Subjects of convention cards of which the values differ; of items that both have."""
    for key in before:
        if key not in after:
            continue
        one = {entry.subject: entry.value for entry in before[key].entries}
        other = {entry.subject: entry.value for entry in after[key].entries}
        for subject in dict.fromkeys([*one, *other]):
            values = one.get(subject, NOTHING), other.get(subject, NOTHING)
            if values[0] != values[1]:
                yield key, subject, *values


def _by_requirement(result: CaseResult | None) -> dict[str, Finding]:
    return {finding.requirement: finding for finding in result.findings} if result else {}


# From records


Kind = Literal["same", "worse", "lost", "otherwise", "fixed", "gained"]

GOOD = ("conforms", "observed")

COARSER = 10.0
"""A deviation that grows by this factor is another deviation."""

_Owner = tuple[str, str]
"""Implementation and device."""


@dataclass
class Asked:
    """What is known of the questions of records.

    Attributes:
        specs: implementation and device to how the implementation is named on a command line.
        levels: requirement to its level.
    """

    specs: dict[_Owner, str] = field(default_factory=dict)
    levels: dict[str, str] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Learn from one more record."""
        device = record.header.provenance.device
        for own in record.header.implementations:
            self.specs[own.name, device] = own.spec
        self.levels |= {own.id: own.level for own in record.header.requirements}


@dataclass
class Loaded:
    """One side: its records as a whole, and their results by what they are of."""

    side: Side
    asked: Asked = field(default_factory=Asked)
    results: dict[Key, CaseResult] = field(default_factory=dict)
    cases: dict[str, CaseInfo] = field(default_factory=dict)


@dataclass
class One:
    """One finding with its two states, before it is grouped with others."""

    result: CaseResult
    requirement: str
    before: str
    after: str
    finding: Finding


def load_side(*paths: Path) -> Loaded:
    """A record, several, or all records in a folder.

    Raises:
        BrokenRecord: one of them cannot be read, there is none, or two are of one implementation.
    """
    files = find_records(paths)
    where = ", ".join(map(str, paths))
    if not files:
        raise BrokenRecord(f"{where}: there is no record in this folder")
    records = [read(file) for file in files]
    found = Loaded(_side(where, records))
    for file, record in zip(files, records, strict=True):
        device = record.header.provenance.device
        for own in record.header.implementations:
            if (own.name, device) in found.asked.specs:
                raise BrokenRecord(f"{file}: {own.name} is in two records of {where}; remove one")
        found.asked.add(record)
        found.cases |= record.header.cases
        found.results |= answers(record.results)
    return found


def compare(before: Loaded, after: Loaded) -> Changes:
    """What changed from the first to the second."""
    kinds: dict[Kind, list[One]] = defaultdict(list)
    shared = before.asked.specs.keys() & after.asked.specs.keys()
    asked = Asked(after.asked.specs, before.asked.levels | after.asked.levels)
    common = added = removed = 0
    wrong: list[One] = []
    for key, requirement, one, other in matched(before.results, after.results):
        both = key in before.results and key in after.results
        if one is None or other is None:
            added, removed = added + (both and one is None), removed + (both and other is None)
            if other is not None and other.verdict in BAD and key[:2] in shared:
                wrong.append(One(after.results[key], requirement, "", other.verdict, other))
            continue
        common += 1
        level = asked.levels.get(requirement, "")
        kind, was, is_now = _classified(one, other, observed=level == "observed")
        kinds[kind].append(One(after.results[key], requirement, was, is_now, other))

    def grouped(kind: Kind) -> list[Change]:
        return grouped_changes(kinds[kind], asked)

    return Changes(
        schema=SCHEMA,
        before=before.side,
        after=after.side,
        worse=grouped("worse"),
        lost=grouped("lost"),
        otherwise=grouped("otherwise"),
        fixed=grouped("fixed"),
        gained=grouped("gained"),
        conventions=_conventions(before, after),
        added=_members(after, before, shared, added, grouped_changes(wrong, asked)),
        removed=_members(before, after, shared, removed, []),
        notes=list(_notes(before, after)),
        common=common,
        same=len(kinds["same"]),
    )


def _side(where: str, records: Sequence[Record]) -> Side:
    made = [record.header.provenance for record in records]
    packages: dict[str, str] = {}
    for provenance in made:
        packages |= provenance.packages
    counted: dict[str, list[str]] = {}
    devices: dict[str, list[str]] = defaultdict(list)
    for record in records:
        for own in record.header.implementations:
            counted.setdefault(own.name, [])
            devices[own.name].append(record.header.provenance.device)
        for result in record.results:
            counted.setdefault(result.implementation, []).append(result.verdict)
    return Side(
        file=where,
        created=max(provenance.created for provenance in made),
        suite=", ".join(sorted({provenance.suite for provenance in made})),
        catalogue=", ".join(sorted({provenance.catalogue for provenance in made})),
        packages=packages,
        selection="; ".join(dict.fromkeys(p.selection for p in made if p.selection)),
        complete=all(record.complete for record in records),
        implementations={name: count(verdicts) for name, verdicts in counted.items()},
        devices={name: sorted(set(found)) for name, found in devices.items()},
    )


def _classified(before: Finding, after: Finding, *, observed: bool) -> tuple[Kind, str, str]:
    """Which kind of change, and both states in words."""
    one, other = before.verdict, after.verdict
    if one == other:
        states = _otherwise(before, after)
        return ("otherwise", *states) if states else ("same", one, other)
    if other in BAD:
        graver = one not in BAD or BAD.index(other) > BAD.index(one)
        counts = graver and not (other == "deviates" and observed)
        return ("worse" if counts else "otherwise"), one, other
    if other in GOOD:
        kind: Kind = "fixed" if one in BAD else "otherwise" if one in GOOD else "gained"
        return kind, one, other
    return ("lost" if one in BAD or one in GOOD else "otherwise"), one, other


def _otherwise(before: Finding, after: Finding) -> tuple[str, str] | None:
    """Both states, if the verdict is the same and something else is not."""
    verdict = after.verdict
    if before.value != after.value:
        return say(before.value) or "nothing", say(after.value) or "nothing"
    if before.cause != after.cause:
        return tuple(  # type: ignore[return-value]
            f"{verdict}, {say(finding.cause) or 'no cause known'}" for finding in (before, after)
        )
    if before.figures is None or after.figures is None:
        return None
    one, other = before.figures, after.figures
    if verdict == "conforms" and one.accuracy != other.accuracy:
        return f"accuracy {one.accuracy or 'none'}", f"accuracy {other.accuracy or 'none'}"
    if verdict == "deviates" and not 1 / COARSER < (other.max_ratio or 1) / (one.max_ratio or 1) < (
        COARSER
    ):
        return f"deviates by {one.max_ratio:.2g}σ", f"deviates by {other.max_ratio:.2g}σ"
    return None


def grouped_changes(found: Iterable[One], asked: Asked) -> list[Change]:
    """Those of one implementation and requirement that changed alike are one."""

    def alike(own: One) -> tuple[object, ...]:
        result = own.result
        states = own.before, own.after, own.finding.cause
        return result.implementation, result.device, own.requirement, *states

    return sorted((_change(group, asked) for group in grouped(found, alike)), key=_order)


def _order(change: Change) -> tuple[bool, int, int]:
    """Requirements before what no definition settles; the gravest, then the most frequent."""
    grave = BAD.index(change.after) if change.after in BAD else -1
    return change.level == "observed", -grave, -change.times


def _change(group: Group[One], asked: Asked) -> Change:
    worst = group.worst
    result, finding = worst.result, worst.finding
    return Change(
        implementation=result.implementation,
        device=result.device,
        requirement=worst.requirement,
        level=asked.levels.get(worst.requirement, ""),
        before=worst.before,
        after=worst.after,
        times=len(group),
        cases=group.cases,
        dtypes=group.dtypes,
        modes=group.modes,
        case=result.case,
        dtype=result.dtype,
        mode=result.mode,
        command=again(result, asked.specs[result.implementation, result.device]),
        told=finding.detail,
        cause=say(finding.cause),
        figures=finding.figures,
        worst=finding.worst,
    )


def _conventions(before: Loaded, after: Loaded) -> list[Convention]:
    """Card entries that are others now; modes that changed alike are one."""
    found: dict[tuple[str, str, str, Phrase, Phrase, Phrase], list[str]] = defaultdict(list)
    for key, subject, one, other in entries_apart(before.results, after.results):
        found[*key[:3], subject, one, other].append(key[4])
    return [
        Convention(
            name, device, case, say(subject), say(one), say(other), modes, [subject, one, other]
        )
        for (name, device, case, subject, one, other), modes in found.items()
    ]


def _members(
    own: Loaded, other: Loaded, shared: Collection[_Owner], findings: int, wrong: list[Change]
) -> Members:
    keys = [key for key in own.results if key not in other.results and key[:2] in shared]
    asked = {key[2] for key in other.results}
    return Members(
        implementations=sorted({name for name, _ in own.asked.specs.keys() - other.asked.specs}),
        cases=list(dict.fromkeys(key[2] for key in keys if key[2] not in asked)),
        items=len(keys),
        findings=findings,
        wrong=wrong,
    )


def _notes(before: Loaded, after: Loaded) -> Iterator[str]:
    one, other = before.side, after.side
    if one.suite != other.suite:
        yield f"suite {one.suite} → {other.suite}"
    changed = [
        name
        for name, case in before.cases.items()
        if name in after.cases and after.cases[name] != case
    ]
    if changed:
        yield f"cases that ask something else now: {some(changed, 3)}"
    elif one.catalogue != other.catalogue:
        yield "the catalogues differ: a case of the same name may have other numbers"
    for name in dict.fromkeys([*one.packages, *other.packages]):
        versions = one.packages.get(name, "none"), other.packages.get(name, "none")
        if versions[0] != versions[1]:
            yield f"{name} {versions[0]} → {versions[1]}"
    if one.selection and one.selection == other.selection:
        yield f"both were asked for a part only: {one.selection}"
    for side in (one, other):
        if side.selection and one.selection != other.selection:
            yield f"{side.file} was asked for a part only: {side.selection}"
        if not side.complete:
            yield f"{side.file} is incomplete"
