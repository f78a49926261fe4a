"""Summarise records for a CI build, with known deviations and changes since the previous record.

`markdown` returns the summary for `$GITHUB_STEP_SUMMARY`, a comment on a merge request, or a file:
counts, changes, deviations, and what was not verified. Texts from records are escaped as in the
report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markupsafe import Markup

from conformance.errors import BrokenRecord, ExitCode
from conformance.records.findings import (
    BAD,
    NOT_VERIFIED,
    VERDICTS,
    CaseResult,
    Finding,
    count,
    verified,
)
from conformance.records.header import Implementation
from conformance.records.record import Record, read
from conformance.reports.changes import (
    Change,
    Changes,
    Records,
    compare,
    difference,
    grouped_changes,
    load_side,
)
from conformance.reports.gate.baseline import read_baseline
from conformance.reports.gate.judging import Judgement, judge
from conformance.reports.load import find_records
from conformance.reports.page.markdown import code, render, text
from conformance.reports.tables import Located
from conformance.text import plural, some

KNOWN = "known"
"""The word that replaces the verdict of an item if the baseline lists all its deviations."""

MUST = ("must", "")
"""The levels of requirements whose violation fails a run; an unknown requirement has level ""."""


@dataclass(frozen=True)
class Item:
    """An item of a record, and those of its findings that the baseline covers."""

    record: Record
    result: CaseResult
    known: tuple[Finding, ...]

    @cached_property
    def wrong(self) -> tuple[Finding, ...]:
        """The findings that failed (deviation, error, timeout or crash) and are not in `known`."""
        return tuple(
            finding
            for finding in self.result.findings
            if finding.verdict in BAD and finding not in self.known
        )

    @cached_property
    def worth_showing(self) -> tuple[Finding, ...]:
        """The findings of `wrong`, but only one finding for each distinct error message."""
        errors = {f.detail: f for f in reversed(self.wrong) if f.verdict == "error"}
        return tuple(
            finding
            for finding in self.wrong
            if finding.verdict != "error" or errors[finding.detail] is finding
        )

    @cached_property
    def verdict(self) -> str:
        """The verdict of the item, or "known" if everything wrong with it is known."""
        verdict = self.result.verdict
        return KNOWN if verdict in BAD and not self.wrong else verdict

    @cached_property
    def fails(self) -> bool:
        """Whether a finding in `wrong` violates a "must", or is an error, a crash or a timeout.

        These are the findings that make `run --strict` fail.
        """
        return any(
            finding.verdict != "deviates" or self._is_must(finding.requirement)
            for finding in self.wrong
        )

    @property
    def reason(self) -> str:
        """The first message of its findings, such as why the item was not run, or ""."""
        return next((finding.detail for finding in self.result.findings if finding.detail), "")

    def _is_must(self, name: str) -> bool:
        requirement = self.record.header.requirement(name)
        return requirement is None or requirement.level in MUST


@dataclass(frozen=True)
class Source:
    """All data that the outputs for a CI system are made from."""

    records: Sequence[Record]
    items: Sequence[Item]
    judgements: Sequence[Judgement]
    """One judgement for each record; empty if there is no baseline."""
    changes: Changes | None
    """The changes since the previous record, or None if there is none."""

    @cached_property
    def implementations(self) -> list[tuple[Record, Implementation]]:
        """Every implementation with its record."""
        return [(record, one) for record in self.records for one in record.header.implementations]

    def counts(self, implementation: str, device: str) -> dict[str, int]:
        """Return the number of items of one implementation with each verdict, including "known"."""
        return counted(
            item.verdict
            for item in self.items
            if (item.result.implementation, item.record.header.provenance.device)
            == (implementation, device)
        )

    @cached_property
    def totals(self) -> dict[str, int]:
        """The number of items for each verdict."""
        return counted(item.verdict for item in self.items)

    @cached_property
    def wrong(self) -> list[Change]:
        """The wrong findings that are not known, with similar ones merged, the worst first."""
        findings = [
            Located(item.result, finding, after=finding.verdict)
            for item in self.items
            for finding in item.worth_showing
        ]
        whole = Records(self.records)
        return grouped_changes(findings, whole.specs, whole.levels)

    @cached_property
    def open(self) -> dict[tuple[str, str, str], int]:
        """The number of items that were not run, by implementation, verdict and reason."""
        return Counter(
            (item.result.implementation, item.result.verdict, item.reason)
            for item in self.items
            if item.result.verdict in ("unavailable", "not-run")
        )

    def sentence(self, requirement: str) -> str:
        """Return the sentence of a requirement; "" if no record has it."""
        infos = (record.header.requirement(requirement) for record in self.records)
        return next((info.sentence for info in infos if info), "")

    @property
    def outcome(self) -> ExitCode:
        """The exit code for the records, which deviations do not affect."""
        counts = count(item.result.verdict for item in self.items)
        if not verified(counts):
            return ExitCode.NOTHING_VERIFIED
        whole = all(record.complete for record in self.records)
        open_questions = any(counts.get(verdict) for verdict in NOT_VERIFIED)
        return ExitCode.OK if whole and not open_questions else ExitCode.INCOMPLETE


def load(
    paths: Sequence[Path], previous: Path | None = None, baseline: Path | None = None
) -> Source:
    """Read records, an earlier record to compare with, and a baseline.

    Raises:
        ConformanceError: if a file cannot be read, or if there is no record.
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


ORDER = ("conforms", KNOWN, *(verdict for verdict in VERDICTS if verdict != "conforms"))


def counted(verdicts: Iterable[str]) -> dict[str, int]:
    """Count verdicts, in the order of `ORDER`, in which "known" follows "conforms"."""
    counts = Counter(verdicts)
    return {verdict: counts[verdict] for verdict in ORDER if counts[verdict]}


MOST = 30
"""The most rows of a table: GitHub truncates a summary at 1 MiB."""

MOST_ENTRIES = 10


def markdown(source: Source) -> str:
    """Return the summary in Markdown."""
    then = source.changes.before.implementations if source.changes else {}
    used = {*source.totals, *(verdict for counts in then.values() for verdict in counts)}
    columns = [verdict for verdict in ORDER if verdict in used]
    stale = dict.fromkeys(
        f"{judgement.baseline.path.name}, {entry.place}: {why}"
        for judgement in source.judgements
        for why, entry in judgement.to_edit
    )
    return render(
        Path(__file__).with_name("summary.md.j2"),
        source=source,
        columns=columns,
        rows=list(_rows(source, columns)),
        stale=list(stale),
        open=list(_open(source)),
        made=source.records[0].header.provenance,
        some=some,
        MOST=MOST,
        MOST_ENTRIES=MOST_ENTRIES,
    )


def _rows(source: Source, columns: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield name, device and counts of each implementation, with the changes of the counts."""
    then = source.changes.before if source.changes else None
    for record, one in source.implementations:
        device = record.header.provenance.device
        # A row is about one device, but the earlier counts are sums over all devices.
        is_alike = then is not None and then.devices.get(one.name) == [device]
        before = then.implementations.get(one.name) if then and is_alike else None
        counts = source.counts(one.name, device)
        yield one.name, device, [_cell(counts, before, verdict) for verdict in columns]


def _cell(counts: Mapping[str, int], before: Mapping[str, int] | None, verdict: str) -> str:
    # The earlier counts were made without the baseline, so they count known items as deviating.
    is_alone = before is None or verdict == KNOWN or counts.get(KNOWN)
    then = counts if before is None or is_alone else before
    return f"{counts.get(verdict, 0):,}" + difference(counts, then, verdict)


def _open(source: Source) -> Iterator[Markup]:
    """Yield lines about everything that was not verified."""
    for (name, verdict, reason), items in source.open.items():
        why = text(reason or "no reason given")
        yield Markup(f"{code(name)}: {plural(items, 'item')} {verdict}: {why}")
    for record in source.records:
        if not record.complete:
            yield Markup(f"{code(record.header.name)} is incomplete")
    for record in source.records:
        if selection := record.header.provenance.selection:
            part = f"{code(record.header.name)} is only a part of a run: {code(selection)}"
            yield Markup(part)
