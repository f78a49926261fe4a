"""Compare two sets of records and list all changes, regressions first.

The unit is a finding: one requirement for one item. Only records are read, so neither a framework
nor the catalogue that the records were made with is needed.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from rich.console import Console

from conformance.errors import BrokenRecord
from conformance.records.findings import (
    BAD,
    NOTHING,
    RUN,
    VERDICTS,
    CaseResult,
    Figures,
    Finding,
    Phrase,
    Worst,
)
from conformance.records.header import CaseInfo
from conformance.records.record import Record, read
from conformance.reports.load import find_records
from conformance.reports.model import Counts
from conformance.reports.tables import Located, by_key, grouped, item_counts
from conformance.reports.wording import again, measured
from conformance.text import heading, line, paragraph, plural, some
from conformance.words import say

SCHEMA = "mha-conformance/changes/1"


class Side(msgspec.Struct, frozen=True):
    """One side of a comparison: a record, or several in a folder.

    Attributes:
        file: the path or paths as given.
        created: when the newest record was made.
        suite, catalogue: the version of the suite, and the hash of the catalogue of cases; several,
            joined by commas, if records differ.
        packages: the versions of packages.
        selection: the options that left items out of the runs, or "".
        complete: whether every planned item has an outcome.
        implementations: for each, by name, the number of items with each verdict, over all devices.
        devices: by name, the devices on which the implementation was run.
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


class FindingChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """Findings of one implementation and requirement that changed in the same way.

    Attributes:
        requirement: the id of the requirement; "run" if items have no findings of requirements,
            for example because the process died or hung.
        level: the level of the requirement, or "".
        before, after: verdicts, or values of a characteristic; "" if there was no such finding.
        told: the message of the worst finding after the change, or "".
        cause: the known mistake that explains the worst finding, or "".
        times: the number of findings that changed in this way.
        cases, dtypes, modes: those in which these findings were made.
        case, dtype, mode: the item with the worst finding.
        figures, worst: the measured evidence of that item.
        command: the command that runs only that item.
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

    @property
    def evidence(self) -> list[str]:
        """Up to two lines: the measurement, or else the message, and the likely cause, if known."""
        detail = f"measured {measured(self.figures)}" if self.figures is not None else self.told
        cause = f"likely cause: {self.cause}" if self.cause else ""
        return [text for text in (detail, cause) if text]

    @property
    def extent(self) -> str:
        """The number of findings and of cases, as text."""
        return f"{plural(self.times, 'finding')} in {plural(len(self.cases), 'case')}"


class EntryChange(msgspec.Struct, frozen=True):
    """An entry of a convention card that has changed.

    `before` or `after` is "" if that side has no such entry. `phrases` contains `subject`, `before`
    and `after` in machine-readable form.
    """

    implementation: str
    device: str
    experiment: str
    subject: str
    before: str
    after: str
    modes: list[str]
    phrases: list[Phrase] = []

    def __str__(self) -> str:
        before, after = self.before or "not asked", self.after or "not asked"
        where = f"{self.implementation}, {self.experiment}: {self.subject}"
        return f"{where}: {before} → {after} ({', '.join(self.modes)})"


class Members(msgspec.Struct, frozen=True):
    """What only one side of a comparison has.

    Attributes:
        implementations: names of implementations that only this side has on some device.
        cases: cases that only this side has, for implementations that both sides have.
        items: the number of items that only this side has, for the same implementations.
        findings: the number of findings that only this side has, for items that both sides have.
        wrong: those findings that only this side has, for implementations that both sides have, and
            that failed (deviation, error, timeout or crash); [] in `Changes.removed`.
    """

    implementations: list[str]
    cases: list[str]
    items: int
    findings: int
    wrong: list[FindingChange]

    @property
    def lines(self) -> list[str]:
        """One line for each kind of member that is present."""
        asked = "of a wrong answer less is asked, and another suite asks something else"
        lines = {
            f"implementations: {', '.join(self.implementations)}": self.implementations,
            f"{plural(len(self.cases), 'case')}: {some(self.cases, 6)}": self.cases,
            f"{plural(self.items, 'item')} (case × dtype × mode)": self.items,
            f"{plural(self.findings, 'finding')} on items of both ({asked})": self.findings,
        }
        return [text for text, there in lines.items() if there]


class Changes(msgspec.Struct, frozen=True):
    """All changes between two sets of records.

    Attributes:
        worse: findings that are wrong now (deviation, error, timeout or crash) and were not wrong,
            or were less severely wrong, before; for characteristics, see `otherwise`.
        lost: findings that conformed, were observed or were wrong before and are undecided now, for
            example unsupported or not run.
        otherwise: all other findings that have changed, for example in their cause, and
            characteristics that are now reported to deviate from what is declared.
        fixed: findings that were wrong before, and conform or are observed now.
        gained: findings that were undecided before, and conform or are observed now.
        conventions: entries of convention cards that have changed.
        added, removed: what only the second, or only the first side has.
        notes: lines with differences between the runs, such as a different catalogue.
        common: the number of findings that both sides have.
        same: the number of these findings that are unchanged.
    """

    schema: str
    before: Side
    after: Side
    worse: list[FindingChange]
    lost: list[FindingChange]
    otherwise: list[FindingChange]
    fixed: list[FindingChange]
    gained: list[FindingChange]
    conventions: list[EntryChange]
    added: Members
    removed: Members
    notes: list[str]
    common: int
    same: int

    @property
    def kinds(self) -> list[tuple[str, str, list[FindingChange]]]:
        """The symbol, name and changes of each kind of change, regressions first."""
        return [
            ("✗", "worse", self.worse),
            ("?", "no longer answered", self.lost),
            ("~", "otherwise", self.otherwise),
            ("✓", "fixed", self.fixed),
            ("+", "answered now", self.gained),
        ]

    @property
    def anything_worse(self) -> bool:
        """Whether any finding is worse or lost; those of `added.wrong` do not count."""
        return bool(self.worse or self.lost)

    @property
    def summary(self) -> str:
        """A one-line summary: how many findings changed, and in which way."""
        times = [
            f"{sum(change.times for change in changes)} {kind}"
            for _, kind, changes in self.kinds
            if changes
        ]
        return ", ".join([*times, f"{self.same} of {self.common} findings as they were"])


# Findings of two sides in pairs

Key = tuple[str, str, str, str, str]
"""The key of an item: implementation, device, case, dtype and mode."""

Answers = Mapping[Key, CaseResult]


class FindingPair(NamedTuple):
    """The findings of two sides for one requirement and item; None if a side has no finding."""

    key: Key
    requirement: str
    before: Finding | None
    after: Finding | None


def answers(results: Iterable[CaseResult]) -> dict[Key, CaseResult]:
    """Return results by the keys of their items."""
    return {(one.implementation, one.device, one.case, one.dtype, one.mode): one for one in results}


def changed_cases(before: Mapping[str, CaseInfo], after: Mapping[str, CaseInfo]) -> list[str]:
    """Return the names of the cases that ask something else now, as far as both hashes are known.

    Their answers say nothing of what was asked before, so comparisons leave them out.
    """
    hashes = {name: (case.hash, after[name].hash) for name, case in before.items() if name in after}
    return [name for name, both in hashes.items() if all(both) and len({*both}) > 1]


def matched(before: Answers, after: Answers) -> Iterator[FindingPair]:
    """Yield the findings of both sides in pairs.

    An item whose process died or hung, for example, has one finding "run" instead of findings of
    requirements. If that is so on the first side only, "run" is paired with each wrong finding that
    the item has on the second side or, if there is none, with the item's verdict there. If that is
    so on the second side only, "run" is paired with the item's verdict on the first side.
    """
    for key in dict.fromkeys([*before, *after]):
        one, other = _by_requirement(before.get(key)), _by_requirement(after.get(key))
        if RUN in one and RUN not in other and key in after:
            wrong = [finding for finding in other.values() if finding.verdict in BAD]
            verdict = after[key].verdict
            for finding in wrong or [Finding(RUN, verdict)]:
                yield FindingPair(key, finding.requirement, one[RUN], finding)
        elif RUN in other and RUN not in one and key in before:
            yield FindingPair(key, RUN, Finding(RUN, before[key].verdict), other[RUN])
        else:
            for requirement in dict.fromkeys([*one, *other]):
                yield FindingPair(key, requirement, one.get(requirement), other.get(requirement))


def differing_entries(
    before: Answers, after: Answers
) -> Iterator[tuple[Key, Phrase, Phrase, Phrase]]:
    """Yield (item, subject, before, after) for each entry of a convention card that differs.

    Only items that both sides have are compared. `NOTHING` stands for the value of an entry that
    only the other side has.
    """
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
"""The factor by which a deviation must grow or shrink to count as changed."""

_Owner = tuple[str, str]
"""An implementation and a device."""


class Records:
    """Several records as a whole: one of the two sides of a comparison.

    Attributes:
        side: a summary of these records.
        specs: the name of each implementation on a command line, by implementation and device.
        levels: the level of each requirement.
        results: the result of each item.
        cases: the description of each case.
    """

    def __init__(self, records: Sequence[Record], where: str = "") -> None:
        self.specs: dict[_Owner, str] = {}
        self.levels: dict[str, str] = {}
        self.results: dict[Key, CaseResult] = {}
        self.cases: dict[str, CaseInfo] = {}
        packages: dict[str, str] = {}
        for record in records:
            made = record.header.provenance
            packages |= made.packages
            self.specs |= {(i.name, made.device): i.spec for i in record.header.implementations}
            self.levels |= {one.id: one.level for one in record.header.requirements}
            self.results |= answers(record.results)
            self.cases |= record.header.cases
        every = [record.header.provenance for record in records]
        devices = by_key(sorted(self.specs), lambda owner: owner[0])
        by_name = by_key(self.results.values(), lambda result: result.implementation)
        self.side = Side(
            file=where,
            created=max(made.created for made in every),
            suite=", ".join(sorted({made.suite for made in every})),
            catalogue=", ".join(sorted({made.catalogue for made in every})),
            packages=packages,
            selection="; ".join(dict.fromkeys(made.selection for made in every if made.selection)),
            complete=all(record.complete for record in records),
            implementations={
                name: item_counts(by_name.get(name, []))
                for name in dict.fromkeys([*(name for name, _ in self.specs), *by_name])
            },
            devices={name: [device for _, device in devices[name]] for name, _ in self.specs},
        )

    def without(self, cases: Iterable[str]) -> Records:
        """Return the same without the results of some cases."""
        left, out = copy.copy(self), {*cases}
        left.results = {key: one for key, one in self.results.items() if one.case not in out}
        return left


def load_side(*paths: Path) -> Records:
    """Read one or more records, given as files or as folders of records.

    Raises:
        BrokenRecord: if a record cannot be read, if there is none, or if two records contain the
            same implementation on the same device.
    """
    files = find_records(paths)
    where = ", ".join(map(str, paths))
    if not files:
        raise BrokenRecord(f"{where}: there is no record in this folder")
    records = [read(file) for file in files]
    owners: set[_Owner] = set()
    for file, record in zip(files, records, strict=True):
        device = record.header.provenance.device
        for one in record.header.implementations:
            if (one.name, device) in owners:
                raise BrokenRecord(f"{file}: {one.name} is in two records of {where}; remove one")
            owners.add((one.name, device))
    return Records(records, where)


def compare(one: Records, two: Records) -> Changes:
    """Return the changes from the first set of records to the second."""
    kinds: dict[Kind, list[Located]] = defaultdict(list)
    shared = one.specs.keys() & two.specs.keys()
    levels = one.levels | two.levels
    changed = changed_cases(one.cases, two.cases)
    notes = list(_notes(one, two, changed))
    one, two = one.without(changed), two.without(changed)
    common = added = removed = 0
    wrong: list[Located] = []
    for key, requirement, was, now in matched(one.results, two.results):
        both = key in one.results and key in two.results
        if was is None or now is None:
            added, removed = added + (both and was is None), removed + (both and now is None)
            if now is not None and now.verdict in BAD and key[:2] in shared:
                wrong.append(Located(two.results[key], now, after=now.verdict))
            continue
        common += 1
        observed = levels.get(requirement) == "observed"
        kind, first, second = _classified(was, now, observed=observed)
        kinds[kind].append(Located(two.results[key], now, "", first, second))
    changes = {
        kind: grouped_changes(kinds[kind], two.specs, levels)
        for kind in ("worse", "lost", "otherwise", "fixed", "gained")
    }
    return Changes(
        schema=SCHEMA,
        before=one.side,
        after=two.side,
        **changes,
        conventions=_conventions(one, two),
        added=_members(two, one, added, grouped_changes(wrong, two.specs, levels)),
        removed=_members(one, two, removed, []),
        notes=notes,
        common=common,
        same=len(kinds["same"]),
    )


def _classified(before: Finding, after: Finding, *, observed: bool) -> tuple[Kind, str, str]:
    """Return the kind of a change, and both states in words.

    If `observed` is true, the requirement only records a characteristic, and "deviates" is never
    worse.
    """
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
    """Return both states in words if findings of equal verdict differ in other ways, else None."""
    verdict = after.verdict
    if before.value != after.value:
        return say(before.value) or "nothing", say(after.value) or "nothing"
    if before.cause != after.cause:
        one_cause, other_cause = (say(item.cause) or "no cause known" for item in (before, after))
        return f"{verdict}, {one_cause}", f"{verdict}, {other_cause}"
    if before.figures is None or after.figures is None:
        return None
    one, other = before.figures, after.figures
    if verdict == "conforms" and one.accuracy != other.accuracy:
        return f"accuracy {one.accuracy or 'none'}", f"accuracy {other.accuracy or 'none'}"
    growth = (other.max_ratio or 1) / (one.max_ratio or 1)
    if verdict == "deviates" and not 1 / COARSER < growth < COARSER:
        return f"deviates by {one.max_ratio:.2g}σ", f"deviates by {other.max_ratio:.2g}σ"
    return None


def grouped_changes(
    findings: Iterable[Located], specs: Mapping[_Owner, str], levels: Mapping[str, str]
) -> list[FindingChange]:
    """Merge findings that changed in the same way into changes, and sort these.

    Merged findings have the same implementation, device, requirement, cause, and states before and
    after. The gravest changes come first, and among equals the most frequent. Those of requirements
    of level "observed", which only record characteristics, come last.
    """

    def alike(one: Located) -> tuple[object, ...]:
        result = one.result
        states = one.before, one.after, one.finding.cause
        return result.implementation, result.device, one.requirement, *states

    def order(change: FindingChange) -> tuple[bool, int, int]:
        grave = BAD.index(change.after) if change.after in BAD else -1
        return change.level == "observed", -grave, -change.times

    changes = []
    for group in grouped(findings, alike):
        worst, result = group.worst, group.worst.result
        change = FindingChange(
            **group.evidence,
            implementation=result.implementation,
            requirement=worst.requirement,
            level=levels.get(worst.requirement, ""),
            before=worst.before,
            after=worst.after,
            dtypes=group.dtypes,
            command=again(result, specs[result.implementation, result.device]),
            told=worst.finding.detail,
            cause=say(worst.finding.cause),
        )
        changes.append(change)
    return sorted(changes, key=order)


def _conventions(before: Records, after: Records) -> list[EntryChange]:
    """Return the entries of convention cards that changed, with all modes of the same change."""
    alike = by_key(
        differing_entries(before.results, after.results), lambda entry: (entry[0][:3], *entry[1:])
    )
    changed = []
    for (owner, subject, one, other), entries in alike.items():
        texts = say(subject), say(one), say(other)
        modes = [key[4] for key, *_ in entries]
        changed.append(EntryChange(*owner, *texts, modes, [subject, one, other]))
    return changed


def _members(these: Records, others: Records, findings: int, wrong: list[FindingChange]) -> Members:
    """Return what `these` records have and the `others` lack.

    `findings` and `wrong` are fields of the result that `compare` has already determined.
    """
    shared = these.specs.keys() & others.specs.keys()
    keys = [key for key in these.results if key not in others.results and key[:2] in shared]
    asked = {key[2] for key in others.results}
    return Members(
        implementations=sorted({name for name, _ in these.specs.keys() - others.specs}),
        cases=list(dict.fromkeys(key[2] for key in keys if key[2] not in asked)),
        items=len(keys),
        findings=findings,
        wrong=wrong,
    )


def _notes(before: Records, after: Records, changed: list[str]) -> Iterator[str]:
    one, other = before.side, after.side
    if one.suite != other.suite:
        yield f"suite {one.suite} → {other.suite}"
    if changed:
        yield f"left out, since they ask something else now: {some(changed, 3)}"
    shared = before.cases.keys() & after.cases.keys()
    known = shared and all(side.cases[name].hash for side in (before, after) for name in shared)
    if one.catalogue != other.catalogue and not known:
        yield "the catalogues differ: a case of the same name may have other numbers"
    for name in dict.fromkeys([*one.packages, *other.packages]):
        versions = one.packages.get(name, "none"), other.packages.get(name, "none")
        if versions[0] != versions[1]:
            yield f"{name} {versions[0]} → {versions[1]}"
    if one.selection and one.selection == other.selection:
        yield f"both were asked for a part only: {one.selection}"
    for side in (one, other):
        if side.selection and one.selection != other.selection:
            yield f"{side.file} is only a part of a run: {side.selection}"
        if not side.complete:
            yield f"{side.file} is incomplete"


# On a terminal

MOST_CHANGES = 12
"""The most changes of one kind to print; --format json has all of them."""

STYLES = {"✗": "bold red", "?": "bold yellow", "~": "bold", "✓": "bold green", "+": "bold green"}


def show(console: Console, changes: Changes) -> None:
    """Print the changes, of each kind at most `MOST_CHANGES`."""
    before, after = changes.before, changes.after
    line(console, f"{before.file} ({before.created[:10]}) → {after.file} ({after.created[:10]})")
    for note in changes.notes:
        paragraph(console, note, bullet="· ", style="dim")
    for symbol, kind, alike in changes.kinds:
        _show_kind(console, f"{symbol} {kind}", STYLES[symbol], alike)
    _show_kind(console, "✗ new, and deviating from the start", "bold yellow", changes.added.wrong)
    if changes.conventions:
        heading(console, f"~ conventions, by experiment: {len(changes.conventions)}")
        for convention in changes.conventions[:MOST_CHANGES]:
            paragraph(console, str(convention))
        _rest(console, len(changes.conventions))
    for title, members in (("+ added", changes.added), ("- removed", changes.removed)):
        if members.lines:
            heading(console, title)
        for text in members.lines:
            paragraph(console, text)
    console.print()
    for name, counts in deltas(changes).items():
        line(console, f"{name}: {counts}")
    line(console, changes.summary, style="bold")


def deltas(changes: Changes) -> dict[str, str]:
    """Return, as text, the counts of verdicts for each implementation now, with their changes.

    An example is "12 conforms (+2), 3 deviates". An implementation that is only on the second side
    is marked as new. If the device changed, the items did too; in this case no changes are shown.
    """
    one, other = changes.before, changes.after
    texts = {}
    for name, counts in other.implementations.items():
        before = one.implementations.get(name, counts)
        if name in one.devices and one.devices[name] != other.devices.get(name):
            before = counts
        shown = [
            f"{counts.get(verdict, 0)} {verdict}" + difference(counts, before, verdict)
            for verdict in VERDICTS
            if counts.get(verdict) or before.get(verdict)
        ]
        texts[name] = ", ".join(shown) + ("" if name in one.implementations else " (new)")
    return texts


def difference(counts: Mapping[str, int], before: Mapping[str, int], verdict: str) -> str:
    """Return the change of a verdict's count as text, such as " (+2)", or "" if it is unchanged."""
    change = counts.get(verdict, 0) - before.get(verdict, 0)
    return f" ({change:+,})" if change else ""


def _show_kind(console: Console, title: str, style: str, changes: list[FindingChange]) -> None:
    if not changes:
        return
    heading(console, f"{title}: {sum(change.times for change in changes)}", style)
    for change in changes[:MOST_CHANGES]:
        device = "" if change.device == "cpu" else f" on {change.device}"
        line(console, f"  {change.implementation}{device}: {change.requirement}", style="bold")
        states = f"{change.before or 'not asked'} → {change.after}"
        for text in (
            f"{states}, {change.extent}: {some(change.cases, 3)}",
            f"{', '.join(change.dtypes)}; {', '.join(change.modes)}",
            *change.evidence,
        ):
            paragraph(console, text, indent=4)
        if change.after not in ("conforms", "observed"):
            line(console, f"again: {change.command}", indent=4, style="dim")
    _rest(console, len(changes))


def _rest(console: Console, number: int) -> None:
    if number > MOST_CHANGES:
        line(console, f"  and {number - MOST_CHANGES} more; --format json has them all")
