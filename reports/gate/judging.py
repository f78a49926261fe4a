"""Judging: the findings of a run, held against a baseline.

What is matched is a finding: one requirement at one case, in one dtype, device and mode. An entry
*claims* every finding that its patterns and its condition find, whatever the verdict is; each of
these must then be as the entry says. So an entry cannot excuse more than it was written for, and
two entries that claim the same finding cannot both be right.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

import msgspec

from conformance.errors import BrokenBaseline, ExitCode, UnknownName
from conformance.records.findings import (
    NOT_VERIFIED,
    RUN,
    VERIFIED,
    CaseResult,
    Finding,
    count,
    gravity,
)
from conformance.records.header import Implementation
from conformance.records.numbers import UNDERFLOW
from conformance.records.record import Record, read
from conformance.reports.gate.baseline import (
    PLACES,
    VERDICTS,
    Baseline,
    Entry,
    agrees_on_cause,
    fits,
)

NARROWS = re.compile(r"(^| )(--case|--dtype|--mode|-k) ")
"""Options of a run that leave something out; case files add."""

LOST = ("crashed", "timed-out")
"""Verdicts that are left open by the implementation, which is a change for the worse."""


@dataclass(frozen=True, eq=False)
class Cell:
    """A finding, and where it was found."""

    result: CaseResult
    finding: Finding

    @property
    def requirement(self) -> str:
        """The id of the requirement."""
        return self.finding.requirement

    @property
    def wrong(self) -> bool:
        """Whether the finding needs an entry in the baseline."""
        return self.finding.verdict in VERDICTS

    def part(self, place: str) -> str:
        """Return the text that patterns under this key are matched with, which may be a dtype."""
        text: str = self.requirement if place == "requirement" else getattr(self.result, place)
        return text


@dataclass(frozen=True)
class Judgement:
    """The judgement on every finding and every entry.

    Attributes:
        known: deviations that are as their entry says.
        new: deviations that no entry claims, or that are otherwise than the entry says.
        expected: of those in `new` that an entry claims, that entry.
        fixed: entries with what they claim that does not deviate.
        open: findings that say nothing about the implementation: it died, or was not there.
        missing: planned items of which the record has nothing.
        ambiguous: pairs of entries that claim the same findings and say something else of them.
        duplicates: pairs that claim the same, and say the same.
        inactive: entries about other implementations, versions or devices than those of the run.
        claimed: what each entry claims, by its number.
        decided: every finding that an entry may claim.
    """

    baseline: Baseline
    record: Record
    counts: Mapping[str, int] = field(default_factory=dict)
    known: tuple[Cell, ...] = ()
    new: tuple[Cell, ...] = ()
    expected: Mapping[Cell, Entry] = field(default_factory=dict)
    fixed: tuple[tuple[Entry, tuple[Cell, ...]], ...] = ()
    open: tuple[Cell, ...] = ()
    missing: int = 0
    unmatched: tuple[Entry, ...] = ()
    ambiguous: tuple[tuple[Entry, Entry, tuple[Cell, ...]], ...] = ()
    duplicates: tuple[tuple[Entry, Entry], ...] = ()
    reasonless: tuple[Entry, ...] = ()
    inactive: tuple[Entry, ...] = ()
    claimed: Mapping[int, tuple[Cell, ...]] = field(default_factory=dict)
    decided: tuple[Cell, ...] = ()

    @property
    def lost(self) -> tuple[Cell, ...]:
        """The cells in which the implementation crashed or hung."""
        return tuple(cell for cell in self.open if cell.finding.verdict in LOST)

    @property
    def worse(self) -> bool:
        """Whether something is wrong that no entry covers."""
        return bool(self.new or self.lost)

    @property
    def to_edit(self) -> tuple[tuple[str, Entry], ...]:
        """Every entry to edit, with a reason; an entry may occur several times."""
        return (
            *(("fixed, remove or narrow it", entry) for entry, _ in self.fixed),
            *(("matches nothing", entry) for entry in self.unmatched),
            *(("says no reason", entry) for entry in self.reasonless),
            *(
                (f"says of the same findings something else than {other.place}", entry)
                for one, two, _ in self.ambiguous
                for entry, other in ((one, two), (two, one))
            ),
            *((f"says again what is said at {one.place}", two) for one, two in self.duplicates),
        )

    @property
    def answered(self) -> bool:
        """Whether everything that was asked has an answer."""
        return not (self.open or self.missing)

    @property
    def whole(self) -> bool:
        """Whether everything was asked and answered; otherwise an unmatched entry may be right."""
        header = self.record.header
        narrowed = header.deselected or NARROWS.search(header.provenance.selection)
        return self.answered and not narrowed

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the gate."""
        if not any(self.counts.get(verdict) for verdict in VERIFIED):
            return ExitCode.NOTHING_VERIFIED
        if self.worse or self.to_edit:
            return ExitCode.DEVIATES
        return ExitCode.OK if self.answered else ExitCode.INCOMPLETE

    @property
    def holds(self) -> bool:
        """Whether everything is as recorded."""
        return self.exit_code == ExitCode.OK


def part_of(path: Path, names: Sequence[str]) -> Record:
    """Return a record, or the part of it that is about these implementations.

    Raises:
        UnknownName: the record has none of that name.
    """
    record = read(path)
    if not names:
        return record
    every = record.header.implementations
    for name in names:
        if not any(name in (one.name, one.spec) for one in every):
            raise UnknownName(f"implementation in {path}", name, [one.name for one in every])
    kept = [one for one in every if {one.name, one.spec} & {*names}]
    kept_names = {one.name for one in kept}
    results = [result for result in record.results if result.implementation in kept_names]
    planned = record.header.planned - (len(record.results) - len(results))
    header = msgspec.structs.replace(record.header, implementations=kept, planned=planned)
    return msgspec.structs.replace(record, header=header, results=results)


class Claims:
    """The entries that claim a finding, for the platform and versions of one run.

    Raises:
        BrokenBaseline: a condition asks for what the run does not know.
    """

    def __init__(self, baseline: Baseline, record: Record) -> None:
        implementations = record.header.implementations
        self._variables = {one.name: _variables(one, record) for one in implementations}
        self.active: list[Entry] = []
        self.inactive: list[Entry] = []
        for entry in baseline.entries:
            # Every implementation is asked, because a variable may be unknown of any.
            applies = [one for one in implementations if self._applies(entry, one)]
            (self.active if applies else self.inactive).append(entry)

    def of(self, result: CaseResult, finding: Finding) -> list[Entry]:
        """Return the entries that claim it; more than one is a fault of the baseline."""
        cell = Cell(result, finding)
        return [entry for entry in self.active if self._claims(entry, cell)]

    def knows(self, result: CaseResult, finding: Finding) -> Entry | None:
        """Return the entry that covers a deviation, or None."""
        claiming = self.of(result, finding) if finding.requirement != RUN else []
        return next((entry for entry in claiming if agrees(entry, finding)), None)

    def _claims(self, entry: Entry, cell: Cell) -> bool:
        if not all(fits(getattr(entry, place), cell.part(place)) for place in PLACES):
            return False
        if entry.condition is None:
            return True
        result = cell.result
        item = {"dtype": result.dtype, "device": result.device}
        return entry.condition.holds(self._variables.get(result.implementation, {}) | item)

    def _applies(self, entry: Entry, implementation: Implementation) -> bool:
        """Return whether an entry applies to this implementation, its versions and its device."""
        if not fits(entry.implementation, implementation.name):
            return False
        if entry.condition is None:
            return True
        if implementation.unavailable and not implementation.versions:
            return False
        variables = self._variables[implementation.name]
        for name in sorted(entry.condition.names):
            if name != "dtype" and name not in variables:
                known = ", ".join(sorted([*variables, "dtype"]))
                raise BrokenBaseline(
                    f"{entry.place}: nothing of {implementation.name} is called {name!r}; "
                    f"known: {known}"
                )
        return any(entry.condition.holds(variables | {"dtype": dtype}) for dtype in UNDERFLOW)


def agrees(entry: Entry, finding: Finding) -> bool:
    """Return whether a finding is as an entry says."""
    if entry.within < math.inf:
        figures = finding.figures
        if figures is None or figures.max_ratio > entry.within:
            return False
    return (
        finding.verdict == entry.verdict
        and agrees_on_cause(entry, finding.cause)
        and entry.raises in finding.detail
    )


def judge(baseline: Baseline, record: Record) -> Judgement:
    """Hold a record against a baseline.

    Raises:
        BrokenBaseline: a condition asks for what the run does not know.
    """
    claims = Claims(baseline, record)
    known, new, left, decided = [], [], [], []
    expected: dict[Cell, Entry] = {}
    claimed: dict[int, list[Cell]] = {entry.number: [] for entry in claims.active}
    shared: dict[tuple[int, int], list[Cell]] = defaultdict(list)
    for cell in _cells(record):
        if cell.requirement == RUN or cell.finding.verdict in NOT_VERIFIED:
            left.append(cell)
            continue
        if cell.finding.verdict == "unsupported":
            continue
        decided.append(cell)
        claiming = claims.of(cell.result, cell.finding)
        for index, entry in enumerate(claiming):
            claimed[entry.number].append(cell)
            for other in claiming[index + 1 :]:
                shared[entry.number, other.number].append(cell)
        if not cell.wrong:
            continue
        if any(agrees(entry, cell.finding) for entry in claiming):
            known.append(cell)
        else:
            new.append(cell)
            if claiming:
                expected[cell] = claiming[0]
    header = record.header
    judgement = Judgement(
        baseline,
        record,
        count(cell.finding.verdict for cell in _cells(record)),
        tuple(known),
        tuple(sorted(new, key=lambda cell: gravity(cell.finding), reverse=True)),
        expected,
        open=tuple(left),
        missing=max(0, header.planned - len(record.results)),
        reasonless=tuple(entry for entry in baseline.entries if not entry.has_reason),
        inactive=tuple(claims.inactive),
        claimed={number: tuple(cells) for number, cells in claimed.items()},
        decided=tuple(decided),
    )
    return _with_entries(judgement, claims.active, shared)


def _with_entries(
    judgement: Judgement, active: list[Entry], shared: Mapping[tuple[int, int], list[Cell]]
) -> Judgement:
    entries = {entry.number: entry for entry in active}
    pairs = [(entries[one], entries[two], tuple(cells)) for (one, two), cells in shared.items()]
    twins = [(one, two) for one, two, _ in pairs if one.says == two.says]
    # Equal entries that claim nothing share no finding either.
    asked = {(one.number, two.number) for one, two in twins}
    alike: dict[Entry, list[Entry]] = defaultdict(list)
    for entry in active:
        alike[replace(entry, number=0, line=0)].append(entry)
    for equal in alike.values():
        for one, two in combinations(equal, 2):
            twins += [(one, two)] if (one.number, two.number) not in asked else []
    fixed = []
    for entry in active:
        claimed = judgement.claimed[entry.number]
        well = tuple(cell for cell in claimed if not cell.wrong)
        if well and (entry.strict or (judgement.whole and len(well) == len(claimed))):
            fixed.append((entry, well))
    unmatched = [entry for entry in active if not judgement.claimed[entry.number]]
    return replace(
        judgement,
        fixed=tuple(fixed),
        unmatched=tuple(unmatched) if judgement.whole else (),
        ambiguous=tuple(pair for pair in pairs if pair[0].says != pair[1].says),
        duplicates=tuple(twins),
    )


def _cells(record: Record) -> Iterator[Cell]:
    for result in record.results:
        for finding in result.findings:
            yield Cell(result, finding)


def _variables(implementation: Implementation, record: Record) -> dict[str, str]:
    made = record.header.provenance
    system, _, machine = made.platform.partition(" ")
    packages = made.packages | implementation.versions
    named = {
        f"{name.lower().replace('-', '_').replace('.', '_')}_version": version
        for name, version in packages.items()
    }
    return named | {
        "device": made.device,
        "device_model": made.device_model,
        "platform_system": system,
        "platform_machine": machine,
        "python_version": ".".join(made.python.split(".")[:2]),
        "python_full_version": made.python,
    }
