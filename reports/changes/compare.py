"""From two sets of records to what changed. The unit is a finding: item and requirement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from conformance.errors import BrokenRecord
from conformance.records.findings import RUN, CaseResult, Finding, count, gravity
from conformance.records.header import CaseInfo
from conformance.records.record import Record, read
from conformance.reports.changes.model import SCHEMA, Change, Changes, Convention, Members, Side
from conformance.reports.load import find_records
from conformance.running.message import again, known
from conformance.text import some

Kind = Literal["same", "worse", "lost", "otherwise", "fixed", "gained"]

BAD = ("deviates", "error", "timed-out", "crashed")
"""From least to most grave."""
GOOD = ("conforms", "observed")

COARSER = 10.0
"""A deviation that grows by this factor is another deviation."""

_Key = tuple[str, str, str, str, str]
_Whose = tuple[str, str]


@dataclass
class Loaded:
    """One side: records, and their results by what they are of."""

    told: Side
    results: dict[_Key, CaseResult] = field(default_factory=dict)
    specs: dict[_Whose, str] = field(default_factory=dict)
    cases: dict[str, CaseInfo] = field(default_factory=dict)


@dataclass
class One:
    """One finding with its two states, before it is grouped with others."""

    result: CaseResult
    requirement: str
    before: str
    after: str
    finding: Finding | None


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
            if (own.name, device) in found.specs:
                raise BrokenRecord(f"{file}: {own.name} is in two records of {where}; remove one")
            found.specs[own.name, device] = own.spec
        found.cases |= record.header.cases
        found.results |= {_key(result): result for result in record.results}
    return found


def compare(before: Loaded, after: Loaded) -> Changes:
    """What changed from the first to the second."""
    kinds: dict[Kind, list[One]] = defaultdict(list)
    both = [key for key in before.results if key in after.results]
    common = same = added = removed = 0
    wrong_added: list[One] = []
    for key in both:
        one, other = before.results[key], after.results[key]
        for requirement, first, second in _paired(one, other):
            if first is None or second is None:
                added, removed = added + (first is None), removed + (second is None)
                if first is None and second is not None and second.verdict in BAD:
                    wrong_added.append(One(other, requirement, "", second.verdict, second))
                continue
            common += 1
            kind, told_before, told_after = _classified(requirement, first, second)
            if kind == "same":
                same += 1
            else:
                kinds[kind].append(One(other, requirement, told_before, told_after, second))
    shared = before.specs.keys() & after.specs.keys()
    wrong_added += [
        One(after.results[key], finding.requirement, "", finding.verdict, finding)
        for key in after.results
        if key not in before.results and _whose(key) in shared
        for finding in after.results[key].findings
        if finding.verdict in BAD
    ]

    def grouped(kind: Kind) -> list[Change]:
        return grouped_changes(kinds[kind], after.specs)

    return Changes(
        schema=SCHEMA,
        before=before.told,
        after=after.told,
        worse=grouped("worse"),
        lost=grouped("lost"),
        otherwise=grouped("otherwise"),
        fixed=grouped("fixed"),
        gained=grouped("gained"),
        conventions=list(_conventions(both, before, after)),
        added=_members(after, before, shared, added, grouped_changes(wrong_added, after.specs)),
        removed=_members(before, after, shared, removed, []),
        notes=list(_notes(before, after)),
        common=common,
        same=same,
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


def _key(result: CaseResult) -> _Key:
    return result.implementation, result.device, result.case, result.dtype, result.mode


def _whose(key: _Key) -> _Whose:
    return key[0], key[1]


def _paired(
    one: CaseResult, other: CaseResult
) -> Iterator[tuple[str, Finding | None, Finding | None]]:
    """Requirements with what both say about them; of a lost process, the item as a whole."""
    before = {finding.requirement: finding for finding in one.findings}
    after = {finding.requirement: finding for finding in other.findings}
    if RUN in before and RUN not in after:
        wrong = [finding for finding in other.findings if finding.verdict in BAD]
        for finding in wrong:
            yield finding.requirement, before[RUN], finding
        if not wrong:
            yield RUN, before[RUN], Finding(RUN, other.verdict)
    elif RUN in after and RUN not in before:
        yield RUN, Finding(RUN, one.verdict), after[RUN]
    else:
        for requirement in dict.fromkeys([*before, *after]):
            yield requirement, before.get(requirement), after.get(requirement)


def _classified(requirement: str, before: Finding, after: Finding) -> tuple[Kind, str, str]:
    """Which kind of change, and both states in words."""
    one, other = before.verdict, after.verdict
    if one == other:
        told = _otherwise(before, after)
        return ("otherwise", *told) if told else ("same", one, other)
    if other in BAD:
        graver = one not in BAD or BAD.index(other) > BAD.index(one)
        counts = graver and (other != "deviates" or _level(requirement) != "observed")
        return ("worse" if counts else "otherwise"), one, other
    if other in GOOD:
        kind: Kind = "fixed" if one in BAD else "otherwise" if one in GOOD else "gained"
        return kind, one, other
    return ("lost" if one in BAD or one in GOOD else "otherwise"), one, other


def _otherwise(before: Finding, after: Finding) -> tuple[str, str] | None:
    """Both states, if the verdict is the same and something else is not."""
    verdict = after.verdict
    if before.value != after.value:
        return before.value or "nothing", after.value or "nothing"
    if before.cause != after.cause:
        return tuple(  # type: ignore[return-value]
            f"{verdict}, {finding.cause or 'no cause known'}" for finding in (before, after)
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


def _level(name: str) -> str:
    requirement = known(name)
    return requirement.level if requirement else ""


def grouped_changes(found: Iterable[One], specs: Mapping[_Whose, str]) -> list[Change]:
    """Those of one implementation and requirement that changed alike are one."""
    groups: dict[tuple[str, ...], list[One]] = defaultdict(list)
    for one in found:
        cause = one.finding.cause if one.finding else ""
        result = one.result
        groups[
            result.implementation, result.device, one.requirement, one.before, one.after, cause
        ].append(one)
    changes = [_change(group, specs) for group in groups.values()]
    return sorted(changes, key=_order)


def _order(change: Change) -> tuple[bool, int, int]:
    """Requirements before what no definition settles; the gravest, then the most frequent."""
    grave = BAD.index(change.after) if change.after in BAD else -1
    return change.level == "observed", -grave, -change.times


def _change(group: Sequence[One], specs: Mapping[_Whose, str]) -> Change:
    worst = max(group, key=lambda one: gravity(one.finding) if one.finding else (0.0, 0.0))
    result, finding = worst.result, worst.finding

    def each(take: Callable[[CaseResult], str]) -> list[str]:
        return list(dict.fromkeys(take(one.result) for one in group))

    return Change(
        implementation=result.implementation,
        device=result.device,
        requirement=worst.requirement,
        level=_level(worst.requirement),
        before=worst.before,
        after=worst.after,
        times=len(group),
        cases=each(lambda found: found.case),
        dtypes=each(lambda found: found.dtype),
        modes=each(lambda found: found.mode),
        case=result.case,
        dtype=result.dtype,
        mode=result.mode,
        command=again(result, specs[result.implementation, result.device]),
        told=finding.detail if finding else "",
        cause=finding.cause if finding else "",
        figures=finding.figures if finding else None,
        worst=finding.worst if finding else None,
    )


def _conventions(both: Sequence[_Key], before: Loaded, after: Loaded) -> Iterator[Convention]:
    """Card entries that are others now; modes that changed alike are one."""
    found: dict[tuple[str, str, str, str, str, str], list[str]] = defaultdict(list)
    for key in both:
        one = {entry.subject: entry.value for entry in before.results[key].entries}
        other = {entry.subject: entry.value for entry in after.results[key].entries}
        for subject in dict.fromkeys([*one, *other]):
            values = one.get(subject, ""), other.get(subject, "")
            if values[0] != values[1]:
                found[key[0], key[1], key[2], subject, *values].append(key[4])
    for (name, device, case, subject, one_value, other_value), modes in found.items():
        yield Convention(name, device, case, subject, one_value, other_value, modes)


def _members(
    own: Loaded, other: Loaded, shared: Iterable[_Whose], findings: int, wrong: list[Change]
) -> Members:
    shared = set(shared)
    keys = [key for key in own.results if key not in other.results and _whose(key) in shared]
    known = {key[2] for key in other.results}
    return Members(
        implementations=sorted({name for name, _ in own.specs.keys() - other.specs.keys()}),
        cases=list(dict.fromkeys(key[2] for key in keys if key[2] not in known)),
        items=len(keys),
        findings=findings,
        wrong=wrong,
    )


def _notes(before: Loaded, after: Loaded) -> Iterator[str]:
    one, other = before.told, after.told
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
