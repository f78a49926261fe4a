"""What there is to tell: records, what is known of them, and what was before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from conformance.errors import BrokenRecord, ExitCode
from conformance.records.findings import NOT_VERIFIED, CaseResult, Finding, count, verified
from conformance.records.header import Implementation
from conformance.records.record import Record, read
from conformance.reports.changes import Changes, compare, load_side
from conformance.reports.changes.compare import Asked, Change, One, grouped_changes
from conformance.reports.gate.baseline import read_baseline
from conformance.reports.gate.judging import Judgement, judge
from conformance.reports.load import find_records
from conformance.reports.totals import BAD

KNOWN = "known"
"""In place of a verdict: deviates, as the baseline says."""


MUST = ("must", "")
"""Levels of which a deviation is a failure; a requirement that is not known is taken for one."""


@dataclass(frozen=True)
class Item:
    """An item of a record, and which of its findings are as the baseline says."""

    record: Record
    result: CaseResult
    known: tuple[Finding, ...]

    @cached_property
    def wrong(self) -> tuple[Finding, ...]:
        """What is wrong and not known."""
        return tuple(
            finding
            for finding in self.result.findings
            if finding.verdict in BAD and finding not in self.known
        )

    @cached_property
    def worth_telling(self) -> tuple[Finding, ...]:
        """Those of `wrong`, with an error once that many requirements met."""
        errors = {f.detail: f for f in reversed(self.wrong) if f.verdict == "error"}
        return tuple(
            finding
            for finding in self.wrong
            if finding.verdict != "error" or errors[finding.detail] is finding
        )

    @cached_property
    def verdict(self) -> str:
        """The item's, or "known" if all that is wrong with it is."""
        verdict = self.result.verdict
        return KNOWN if verdict in BAD and not self.wrong else verdict

    @cached_property
    def fails(self) -> bool:
        """Whether `run --strict` would: something wrong that a requirement forbids."""
        return any(
            finding.verdict != "deviates" or self._is_must(finding.requirement)
            for finding in self.wrong
        )

    @property
    def reason(self) -> str:
        """Why it has no answer, as far as that was recorded."""
        return next((finding.detail for finding in self.result.findings if finding.detail), "")

    def _is_must(self, name: str) -> bool:
        requirement = self.record.header.requirement(name)
        return requirement is None or requirement.level in MUST


@dataclass(frozen=True)
class Source:
    """Everything that is told."""

    records: Sequence[Record]
    items: Sequence[Item]
    judgements: Sequence[Judgement]
    """One for each record, if there is a baseline."""
    changes: Changes | None
    """Since the previous record, if there is one."""

    @cached_property
    def implementations(self) -> list[tuple[Record, Implementation]]:
        """Each with its record."""
        return [(record, own) for record in self.records for own in record.header.implementations]

    def counts(self, implementation: str, device: str) -> dict[str, int]:
        """Verdicts of the items of one, with "known" apart."""
        return counted(
            item.verdict
            for item in self.items
            if (item.result.implementation, item.record.header.provenance.device)
            == (implementation, device)
        )

    @cached_property
    def totals(self) -> dict[str, int]:
        """Verdicts of all items."""
        return counted(item.verdict for item in self.items)

    @cached_property
    def wrong(self) -> list[Change]:
        """What is wrong and not known; what is alike is one, the gravest first."""
        asked = Asked()
        for record in self.records:
            asked.add(record)
        return grouped_changes(
            (
                One(item.result, finding.requirement, "", finding.verdict, finding)
                for item in self.items
                for finding in item.worth_telling
            ),
            asked,
        )

    @cached_property
    def open(self) -> dict[tuple[str, str, str], int]:
        """What was not found out: implementation, verdict and reason, to the number of items."""
        found: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        for item in self.items:
            if item.result.verdict in ("unavailable", "not-run"):
                found[item.result.implementation, item.result.verdict, item.reason] += 1
        return dict(found)

    def sentence(self, requirement: str) -> str:
        """What a requirement says; "" if no record has it."""
        found = (record.header.requirement(requirement) for record in self.records)
        return next((own.sentence for own in found if own), "")

    @property
    def outcome(self) -> ExitCode:
        """What the records are worth, as an exit code; what deviates is for run and gate to say."""
        counts = count(item.result.verdict for item in self.items)
        if not verified(counts):
            return ExitCode.NOTHING_VERIFIED
        whole = all(record.complete for record in self.records)
        open_questions = any(counts.get(verdict) for verdict in NOT_VERIFIED)
        return ExitCode.OK if whole and not open_questions else ExitCode.INCOMPLETE


def load(
    paths: Sequence[Path], previous: Path | None = None, baseline: Path | None = None
) -> Source:
    """Read everything.

    Raises:
        ConformanceError: a file cannot be read, or there is none.
    """
    files = find_records(paths)
    if not files:
        raise BrokenRecord("there is no record; name a file that run --record has written")
    records = [read(file) for file in files]
    items: list[Item] = []
    judgements = []
    entries = read_baseline(baseline) if baseline is not None else None
    for record in records:
        known: set[int] = set()
        if entries is not None:
            judgement = judge(entries, record)
            judgements.append(judgement)
            known = {id(cell.finding) for cell in judgement.known}
        items += [
            Item(record, result, tuple(f for f in result.findings if id(f) in known))
            for result in record.results
        ]
    changes = None
    if previous is not None:
        changes = compare(load_side(previous), load_side(*files))
    return Source(records, items, judgements, changes)


def counted(verdicts: Iterable[str]) -> dict[str, int]:
    """As `count`, with "known" behind what conforms."""
    verdicts = list(verdicts)
    known = verdicts.count(KNOWN)
    counts = count(verdict for verdict in verdicts if verdict != KNOWN)
    if not known:
        return counts
    before = {name: counts.pop(name) for name in ("conforms",) if name in counts}
    return before | {KNOWN: known} | counts
