"""Judging: compare the findings of a run with a baseline.

The unit is a finding: one requirement for one case, dtype, device and mode. An entry *claims* every
finding that its patterns and its condition match, whether or not it deviates; each of these
findings must then agree with the entry. Only an entry that is not strict may also claim findings
that do not deviate. Thus an entry cannot excuse more than it was written for, and two entries that
claim the same finding but contradict each other cannot both be right.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import msgspec

from conformance.errors import BrokenBaseline, ExitCode, UnknownName
from conformance.records.findings import (
    RUN,
    VERIFIED,
    CaseResult,
    Finding,
    gravity,
    without_place,
)
from conformance.records.header import Implementation
from conformance.records.numbers import UNDERFLOW
from conformance.records.record import Record, read
from conformance.reports.gate.baseline import (
    Baseline,
    BaselineEntry,
    agrees_on_cause,
    fits,
    recorded,
)
from conformance.reports.gate.coverage import (
    Loss,
    PinChange,
    Promise,
    changes,
    implementations_counted,
    is_narrowed,
    is_open,
    is_whole,
    losses,
    withdrawn_and_gained,
)
from conformance.reports.tables import Located, by_key, finding_counts, located

LOST = ("crashed", "timed-out")
"""The verdicts without an answer that the implementation causes: a change for the worse."""

MARGIN = 4.0
"""The factor by which an error may exceed the largest measured one, because the size of rounding
errors depends on the machine."""

BROAD = 1000.0
"""The factor from which `within` bounds nothing. In the committed baselines it is at most 46 times
the largest error of a full run, and 400 times that of a sample."""

LEAST_SHARE = 0.1
"""The least share of findings that deviate, of those that an entry allows without saying how."""


@dataclass(frozen=True)
class Judgement:
    """The result of comparing a record with a baseline: a judgement on every finding and entry.

    An entry claims the findings that its patterns and its condition match.

    Attributes:
        known: deviations that agree with an entry.
        new: deviations that no entry claims, or that agree with none of the entries claiming them.
        expected: for findings in `new` that any entry claims, the first of these entries.
        fixed: entries that claim findings that no longer deviate, with these findings. An entry
            that is not strict is listed only if none of its findings deviates in a whole run.
        open: findings that verify nothing: the process died or hung, the implementation was
            unavailable, or the item was not run.
        missing: the number of planned items for which the record has no outcome; at least 1 if the
            record is incomplete and `open` is empty.
        unmatched: entries that match no finding, although the run was whole and posed problems of
            the sizes that they name.
        ambiguous: pairs of entries that contradict each other, with the findings that both claim.
        duplicates: pairs of entries that are equal, or that assert the same about a finding that
            both claim.
        broad: entries that excuse far more than deviates in a whole run, with what to write.
        reasonless: entries without a reason.
        inactive: entries about other implementations, versions or devices than those of the run.
        claimed: the findings that each active entry claims, by the number of the entry.
        decided: all findings that entries can claim.
        less: chapters of cases in which less was verified than the baseline requires.
        withdrawn, gained: promises that are weaker and stronger than the baseline says.
        changed: pinned conventions whose values differ from those in the baseline, and experiments
            whose conventions are still to be pinned.
    """

    baseline: Baseline
    record: Record
    known: Sequence[Located]
    new: Sequence[Located]
    expected: Mapping[Located, BaselineEntry]
    fixed: Sequence[tuple[BaselineEntry, Sequence[Located]]]
    open: Sequence[Located]
    missing: int
    unmatched: Sequence[BaselineEntry]
    ambiguous: Sequence[tuple[BaselineEntry, BaselineEntry, Sequence[Located]]]
    duplicates: Sequence[tuple[BaselineEntry, BaselineEntry]]
    broad: Sequence[tuple[BaselineEntry, str]]
    reasonless: Sequence[BaselineEntry]
    inactive: Sequence[BaselineEntry]
    claimed: Mapping[int, Sequence[Located]]
    decided: Sequence[Located]
    less: Sequence[Loss]
    withdrawn: Sequence[Promise]
    gained: Sequence[Promise]
    changed: Sequence[PinChange]

    @property
    def worse(self) -> bool:
        """Whether anything changed for the worse.

        That is a new deviation, a loss of coverage, a weaker promise, a change of a pinned
        convention, or a process that died or hung.
        """
        lost = any(one.finding.verdict in LOST for one in self.open)
        return bool(self.new or self.less or self.withdrawn or self.changed or lost)

    @property
    def unverified(self) -> list[str]:
        """The implementations of which nothing was checked, except those that were deselected.

        An error counts here: it is known or new, like a deviation.
        """
        results = by_key(self.record.results, lambda result: result.implementation)
        names = [one.name for one in self.record.header.implementations]
        if is_narrowed(self.record) and results:
            names = [name for name in names if name in results]
        checked = {
            name for name in names if VERIFIED & finding_counts(results.get(name, ())).keys()
        }
        return [name for name in names if name not in checked]

    @property
    def uncounted(self) -> list[str]:
        """The implementations of a whole run for which only the baseline's numbers are missing.

        The baseline has counts for this level and device, but none for them: they may have been
        renamed, and all that was verified of them before would be lost unnoticed. Likewise if the
        project's table chooses a level, and they have counts for others only.
        """
        if not is_whole(self.record):
            return []
        expected = self.baseline.verified
        counted = implementations_counted(expected, self.record)
        names = [one.name for one in self.record.header.implementations]
        others = {*names} if counted else set()
        if "--level" in self.record.header.provenance.chosen.split():
            others |= implementations_counted(expected, self.record, every_level=True)
        return [name for name in names if name in others - counted]

    @property
    def to_edit(self) -> tuple[tuple[str, BaselineEntry], ...]:
        """The reasons why entries need to be edited, each with the entry.

        An entry that needs to be edited for several reasons occurs several times.
        """
        return (
            *(("fixed, remove or narrow it", entry) for entry, _ in self.fixed),
            *(("matches nothing", entry) for entry in self.unmatched),
            *(("excuses more than deviates", entry) for entry, _ in self.broad),
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
        """Whether no selected item is left without an answer; "unsupported" is an answer.

        Items that crashed, timed out, were unavailable or were not run have none.
        """
        return not (self.open or self.missing)

    @property
    def whole(self) -> bool:
        """Whether options left nothing out of the run, and every planned item has an outcome."""
        return self.answered and not is_narrowed(self.record)

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the gate: nothing verified, deviates, incomplete, or OK.

        It is "deviates" if anything is worse or an entry needs an edit. It is "nothing verified" if
        nothing was verified at all, or if nothing was verified of one of several implementations,
        all items have an outcome and nothing else is wrong.
        """
        every = {result.implementation for result in self.record.results}
        unverified = self.unverified
        if every <= {*unverified}:
            return ExitCode.NOTHING_VERIFIED
        if self.worse or self.to_edit or self.uncounted:
            return ExitCode.DEVIATES
        if unverified and self.answered:
            return ExitCode.NOTHING_VERIFIED
        return ExitCode.OK if self.answered else ExitCode.INCOMPLETE

    @property
    def holds(self) -> bool:
        """Whether the run agrees with the baseline."""
        return self.exit_code == ExitCode.OK


def part_of(path: Path, names: Sequence[str]) -> Record:
    """Read a record, and keep only the part about the named implementations, if any are named.

    An implementation may be named as in the record or by its name on the command line.

    Raises:
        BrokenRecord: if the record cannot be read.
        UnknownName: if the record has no implementation of one of these names.
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
    """The entries of a baseline that apply to a run, with a search for those that claim a finding.

    An entry claims the findings that its patterns and its condition match.

    Attributes:
        active, inactive: the entries that apply to an implementation, version and device of the
            run, and all others.

    Raises:
        BrokenBaseline: if a condition uses a variable that the run does not define.
    """

    def __init__(self, baseline: Baseline, record: Record) -> None:
        implementations = record.header.implementations
        self._variables = {one.name: _variables(one, record) for one in implementations}
        self.active: list[BaselineEntry] = []
        self.inactive: list[BaselineEntry] = []
        self._holding: dict[tuple[str, str, str], list[BaselineEntry]] = {}
        for entry in baseline.entries:
            # Check every implementation, because any of them may lack a variable.
            applies = [one for one in implementations if self._applies(entry, one)]
            (self.active if applies else self.inactive).append(entry)

    def of(self, result: CaseResult, finding: Finding) -> list[BaselineEntry]:
        """Return the entries that claim a finding: their patterns and their condition match it."""
        where = (result.implementation, result.dtype, result.device)
        # A record has few such combinations but very many findings.
        if where not in self._holding:
            self._holding[where] = self._hold(*where)
        return [
            entry
            for entry in self._holding[where]
            if fits(entry.requirement, finding.requirement)
            and fits(entry.case, result.case)
            and fits(entry.mode, result.mode)
        ]

    def _hold(self, name: str, dtype: str, device: str) -> list[BaselineEntry]:
        """Return the entries that apply to an implementation, dtype and device."""
        variables = self._variables.get(name, {}) | {"dtype": dtype, "device": device}
        return [
            entry
            for entry in self.active
            if fits(entry.implementation, name)
            and (entry.condition is None or entry.condition.holds(variables))
        ]

    def knows(self, result: CaseResult, finding: Finding) -> BaselineEntry | None:
        """Return the first entry that claims a deviation and agrees with it, or None."""
        claiming = self.of(result, finding) if finding.requirement != RUN else []
        return next((entry for entry in claiming if agrees(entry, finding)), None)

    def _applies(self, entry: BaselineEntry, implementation: Implementation) -> bool:
        """Return whether an entry applies to an implementation, its versions and its device.

        Raises:
            BrokenBaseline: if its condition uses a variable that the implementation does not have.
        """
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


def agrees(entry: BaselineEntry, finding: Finding) -> bool:
    """Return whether a finding has the verdict, cause, error text and size that an entry states."""
    if entry.within is not None:
        figures = finding.figures
        if figures is None or not figures.max_ratio <= entry.within:
            return False
    return (
        finding.verdict == entry.verdict
        and agrees_on_cause(entry, finding.cause)
        and (not entry.raises or entry.raises in without_place(finding.detail))
    )


def bound(cells: Iterable[Located]) -> str:
    """Return the bound in σ of an entry for these findings, as a number in TOML.

    It is `MARGIN` times the largest error of the findings, rounded up to one digit.
    """
    figures = [cell.finding.figures for cell in cells]
    largest = MARGIN * max(each.max_ratio for each in figures if each is not None)
    exponent = math.floor(math.log10(largest))
    digit = math.ceil(largest / 10.0**exponent)
    if digit == 10:
        digit, exponent = 1, exponent + 1
    return str(digit * 10**exponent) if 0 <= exponent < 4 else f"{digit}e{exponent}"


def judge(baseline: Baseline, record: Record) -> Judgement:
    """Return the judgement on a record, that is, its comparison with a baseline.

    Raises:
        BrokenBaseline: if a condition uses a variable that the run does not define.
    """
    claims = Claims(baseline, record)
    known, new, left, decided = [], [], [], []
    expected: dict[Located, BaselineEntry] = {}
    claimed: dict[int, list[Located]] = {entry.number: [] for entry in claims.active}
    shared: dict[tuple[int, int], list[Located]] = defaultdict(list)
    for one in located(record.results):
        if is_open(one.finding):
            left.append(one)
            continue
        if one.finding.verdict == "unsupported":
            continue
        decided.append(one)
        claiming = claims.of(one.result, one.finding)
        for entry in claiming:
            claimed[entry.number].append(one)
        for first, second in combinations(claiming, 2):
            shared[first.number, second.number].append(one)
        if not one.wrong:
            continue
        if any(agrees(entry, one.finding) for entry in claiming):
            known.append(one)
        else:
            new.append(one)
            if claiming:
                expected[one] = claiming[0]
    entries = {entry.number: entry for entry in claims.active}
    pairs = [(entries[one], entries[two], cells) for (one, two), cells in shared.items()]
    missing = max(0, record.header.planned - len(record.results))
    if not (record.complete or left or missing):
        # The plan was edited, or the record is the journal of a run that ended early.
        missing = 1
    # In an incomplete run, an entry that matches nothing may still match what is missing.
    whole = not (left or missing or is_narrowed(record))
    all_of_level = is_whole(record)
    withdrawn, gained = withdrawn_and_gained(baseline.promised, record)
    fixed = []
    for entry in claims.active:
        well = [one for one in claimed[entry.number] if not one.wrong]
        if well and (entry.strict or (whole and len(well) == len(claimed[entry.number]))):
            fixed.append((entry, well))
    return Judgement(
        baseline=baseline,
        record=record,
        known=known,
        new=sorted(new, key=lambda one: gravity(one.finding), reverse=True),
        expected=expected,
        fixed=fixed,
        open=left,
        missing=missing,
        unmatched=[
            entry
            for entry in claims.active
            if whole and not claimed[entry.number] and _is_asked(entry, record)
        ],
        # Entries that are not strict allow deviations without requiring them.
        ambiguous=[
            (one, two, cells)
            for one, two, cells in pairs
            if one.says != two.says and (one.strict or two.strict)
        ],
        duplicates=_duplicates(claims.active, pairs),
        broad=[
            (entry, told)
            for entry in claims.active
            if all_of_level
            and (told := _excess(entry, claimed[entry.number], len(decided), full=whole))
        ],
        reasonless=[entry for entry in baseline.entries if not entry.has_reason],
        inactive=claims.inactive,
        claimed=claimed,
        decided=decided,
        less=losses(baseline.verified, record),
        withdrawn=withdrawn,
        gained=gained,
        changed=[*changes(baseline.pinned, record)],
    )


def _excess(entry: BaselineEntry, claimed: Sequence[Located], decided: int, *, full: bool) -> str:
    """Return what to write instead of an entry that excuses far more than deviates, or "".

    Args:
        claimed: the findings that the entry matches.
        decided: the number of all findings that entries can match.
        full: whether nothing was left out; else what deviates may have been.
    """
    right = [one for one in claimed if one.wrong and agrees(entry, one.finding)]
    if entry.within is not None and right:
        largest = max(one.finding.figures.max_ratio for one in right if one.finding.figures)
        if entry.within > BROAD * largest:
            return f"the largest error is {largest:.3g}σ: write within = {bound(right)}"
    says_how = entry.cause or entry.raises or entry.within is not None
    if entry.strict or says_how or len(right) >= LEAST_SHARE * len(claimed):
        return ""
    # Without any that deviates, it is fixed, which only a full run can know, unless it is for all.
    if not right and (full or 2 * len(claimed) < decided):
        return ""
    return (
        f"{len(right)} of {len(claimed)} findings deviate: name their requirement and cases, or "
        "say a cause or within"
    )


_SIZES = re.compile(r"(long/)|.*\.d[\d*?[]")
"""Matches cases, and patterns of cases, of long problems or with sizes such as ".d64t64x64"."""


def _is_asked(entry: BaselineEntry, record: Record) -> bool:
    """Return whether a run included cases of the sizes that an entry names, if it names any.

    Cases of level "large" and of checks of long sequences do not occur in other runs.
    """

    def sizes(name: str) -> str:
        found = _SIZES.match(name)
        return "" if found is None else found[1] or "grid"

    named = {sizes(pattern) for pattern in entry.case if not pattern.startswith("!")}
    return not named or bool(named & {sizes(result.case) for result in record.results})


def _duplicates(
    active: Sequence[BaselineEntry],
    pairs: Sequence[tuple[BaselineEntry, BaselineEntry, Sequence[Located]]],
) -> list[tuple[BaselineEntry, BaselineEntry]]:
    """Return the pairs of entries that are equal or assert the same about a common finding."""
    twins = {(one.number, two.number): (one, two) for one, two, _ in pairs if one.says == two.says}
    # Equal entries that claim nothing share no finding.
    equal = by_key(active, lambda entry: msgspec.structs.replace(entry, number=0, line=0))
    for entries in equal.values():
        for one, two in combinations(entries, 2):
            twins.setdefault((one.number, two.number), (one, two))
    return list(twins.values())


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


def knower(baseline: Baseline, record: Record) -> Callable[[Located], BaselineEntry | None]:
    """Return a function that takes a deviation, and returns the entry that agrees with it, or None.

    The entry is taken from the baseline, or else from the known deviations stored in the record.

    Raises:
        BrokenBaseline: if a condition uses a variable that the run does not define, or a known
            deviation stored in the record is invalid.
    """
    claims, carried = Claims(baseline, record), Claims(recorded(record.header.known), record)
    return lambda one: (
        claims.knows(one.result, one.finding) or carried.knows(one.result, one.finding)
    )
