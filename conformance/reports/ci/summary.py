"""Markdown for a CI build: the summary of its records, and the comment on a pull request.

`markdown` returns the summary, for `$GITHUB_STEP_SUMMARY` or another file: counts, changes,
deviations, and what was not verified. `comment` returns the comment: the findings that are new,
fixed or no longer answered in the later of two records. Texts from records are escaped as in the
report.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from markupsafe import Markup

from conformance.errors import BrokenRecord, ConformanceError, ExitCode
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
    Changes,
    FindingChange,
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
from conformance.reports.tables import Located, by_key
from conformance.text import plural, some

KNOWN = "known"
"""The word that replaces the verdict of an item if the baseline lists all its deviations."""

MUST = ("must", "")
"""The levels of requirements whose violation fails a run; an unknown requirement has level ""."""


@dataclass(frozen=True)
class SummaryItem:
    """An item of a record; `known` are those of its findings that the baseline covers."""

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
        """Whether a finding in `wrong` makes `run --strict` fail.

        That is a deviation from a "must" or from an unknown requirement, an error, a crash or a
        timeout.
        """
        requirement = self.record.header.requirement
        return any(
            finding.verdict != "deviates"
            or (info := requirement(finding.requirement)) is None
            or info.level in MUST
            for finding in self.wrong
        )

    @property
    def reason(self) -> str:
        """The first message of its findings, such as why the item was not run, or ""."""
        return next((finding.detail for finding in self.result.findings if finding.detail), "")


@dataclass(frozen=True)
class SummarySource:
    """All data that the outputs for a CI system are made from."""

    records: Sequence[Record]
    items: Sequence[SummaryItem]
    judgements: Sequence[Judgement]
    """One judgement for each record; empty if there is no baseline."""
    changes: Changes | None
    """The changes since the previous record, or None if there is none."""

    @cached_property
    def whole(self) -> Records:
        """The records as one side of a comparison."""
        return Records(self.records)

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
        """The number of items with each verdict, including "known"."""
        return counted(item.verdict for item in self.items)

    @cached_property
    def wrong(self) -> list[FindingChange]:
        """The failed findings that are not known, with similar ones merged, the worst first."""
        findings = [
            Located(item.result, finding, after=finding.verdict)
            for item in self.items
            for finding in item.worth_showing
        ]
        return grouped_changes(findings, self.whole.specs, self.whole.levels)

    @cached_property
    def open(self) -> dict[tuple[str, str, str], int]:
        """The number of items that were not checked, by implementation, verdict and reason.

        The verdict is "unavailable" or "not-run".
        """
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
        """The exit code for the records: nothing verified, incomplete, or OK.

        Deviations do not affect it.
        """
        counts = count(item.result.verdict for item in self.items)
        if not verified(counts):
            return ExitCode.NOTHING_VERIFIED
        whole = all(record.complete for record in self.records)
        open_questions = any(counts.get(verdict) for verdict in NOT_VERIFIED)
        return ExitCode.OK if whole and not open_questions else ExitCode.INCOMPLETE


def load(
    paths: Sequence[Path], previous: Path | None = None, baseline: Path | None = None
) -> SummarySource:
    """Read records, an earlier record to compare with, and a baseline.

    Raises:
        ConformanceError: if a file cannot be read or is invalid, or if there is no record.
    """
    files = find_records(paths)
    if not files:
        raise BrokenRecord("there is no record; name a file that run --record has written")
    records = [read(file) for file in files]
    entries = read_baseline(baseline) if baseline is not None else None
    judgements = [judge(entries, record) for record in records] if entries is not None else []
    known = {id(cell.finding) for judgement in judgements for cell in judgement.known}
    items = [
        SummaryItem(record, result, tuple(one for one in result.findings if id(one) in known))
        for record in records
        for result in record.results
    ]
    changes = compare(load_side(previous), load_side(*files)) if previous is not None else None
    return SummarySource(records, items, judgements, changes)


ORDER = ("conforms", KNOWN, *(verdict for verdict in VERDICTS if verdict != "conforms"))
"""All verdicts of items, in the order in which they are shown."""


def counted(verdicts: Iterable[str]) -> dict[str, int]:
    """Return the number of each verdict that occurs, in the order of `ORDER`."""
    counts = Counter(verdicts)
    return {verdict: counts[verdict] for verdict in ORDER if counts[verdict]}


# The summary

MOST, MOST_ENTRIES = 30, 10
"""The most rows of a table, and detailed entries: GitHub truncates a summary at 1 MiB."""


def markdown(source: SummarySource) -> str:
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


def _rows(source: SummarySource, columns: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the name, the device and the counts of each implementation, as texts.

    There is a count for each verdict in `columns`, with its change since the previous record if
    there is a comparable one.
    """
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


def _open(source: SummarySource) -> Iterator[Markup]:
    """Yield lines about items that are unavailable or not run, and incomplete or partial runs."""
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


# The comment

MARKER = Markup("<!-- mha-conformance -->")
"""The first line of the comment, by which a build recognises its earlier comment to replace it."""

MOST_CHANGED, FEW = 15, 4
"""The most rows of a table, and requirements that a row names: GitHub rejects long comments."""


def comment(changes: Changes, page: str = "") -> str:
    """Return the comment in Markdown.

    Args:
        changes: the changes to show.
        page: the address of the HTML report, to which findings are linked; "" for no links.

    Raises:
        ConformanceError: if the address is not that of a web page, or could break out of a link.
    """
    if page and not re.fullmatch(r"https?://[\w:/.?=&+~%-]+", page):
        raise ConformanceError(f"--page {page}: give the address of the report, https://...")
    new = [*changes.worse, *changes.added.wrong]
    counts = [
        plural(number, one, several)
        for alike, one, several in (
            (new, "new deviation", "new deviations"),
            (changes.fixed, "finding fixed", "findings fixed"),
            (changes.lost, "finding no longer answered", "findings no longer answered"),
        )
        if (number := sum(change.times for change in alike))
    ]
    removed = changes.removed.lines
    return render(
        Path(__file__).with_name("comment.md.j2"),
        marker=MARKER,
        heading=", ".join(counts) or ("less was asked" if removed else "nothing new"),
        changes=changes,
        tables=[
            ("New", _merged(new, page)),
            ("No longer answered", _merged(changes.lost, page)),
            ("Fixed", _merged(changes.fixed, page)),
        ],
        removed=removed,
        page=Markup(page),
        MOST=MOST_CHANGED,
    )


class _Row(NamedTuple):
    """A row of the comment: changes of one implementation with equal states before and after.

    They have the same cause or, without a known cause, the same requirement and device.
    """

    implementation: str
    before: str
    after: str
    cause: str
    requirements: Markup
    times: int


def _merged(changes: Sequence[FindingChange], page: str) -> list[_Row]:
    """Merge the changes of each implementation that have the same states and cause into one row.

    Changes without a known cause are merged only if requirement and device are the same too.
    """

    def alike(change: FindingChange) -> tuple[str, ...]:
        same = (change.implementation, change.before, change.after, change.cause)
        return same if change.cause else (*same, change.requirement, change.device)

    return [
        _Row(
            one.implementation,
            one.before,
            one.after,
            one.cause,
            Markup(some(list(dict.fromkeys(_linked(change, page) for change in group)), FEW)),
            sum(change.times for change in group),
        )
        for group in by_key(changes, alike).values()
        for one in group[:1]
    ]


def _linked(change: FindingChange, page: str) -> Markup:
    """Return the requirement, with a link to the worst finding in the report at `page`.

    If `page` is "", there is no link.
    """
    shown = code(change.requirement)
    if not page:
        return shown
    words = {
        "of": change.implementation,
        "requirement": change.requirement,
        "case": change.case,
        "in": change.dtype,
        "mode": change.mode,
    }
    address = "&".join(f"{name}={quote(word, safe='/')}" for name, word in words.items())
    return Markup(f"[{shown}]({page}#{address})")
