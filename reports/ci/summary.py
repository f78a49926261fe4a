"""Summarise records for a build, with known deviations and the changes since the last one.

`markdown` writes the summary, for `$GITHUB_STEP_SUMMARY`, a merge request's comment, or a file:
counts, what changed, what is wrong, what is not verified. What a record says is escaped as in the
report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from conformance.errors import BrokenRecord, ExitCode
from conformance.records.findings import (
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
    Located,
    Records,
    compare,
    grouped_changes,
    load_side,
)
from conformance.reports.gate.baseline import read_baseline
from conformance.reports.gate.judging import Judgement, judge
from conformance.reports.load import find_records
from conformance.reports.page.markdown import code, fenced, text
from conformance.reports.totals import BAD
from conformance.reports.wording import SYMBOLS
from conformance.text import plural, some

KNOWN = "known"
"""In place of a verdict: deviates, as the baseline says."""

MUST = ("must", "")
"""Levels of requirements that fail a run; an unknown requirement is taken for one of these."""


@dataclass(frozen=True)
class Item:
    """An item of a record, and the findings of it that are as the baseline says."""

    record: Record
    result: CaseResult
    known: tuple[Finding, ...]

    @cached_property
    def wrong(self) -> tuple[Finding, ...]:
        """The findings that are wrong and not known."""
        return tuple(
            finding
            for finding in self.result.findings
            if finding.verdict in BAD and finding not in self.known
        )

    @cached_property
    def worth_showing(self) -> tuple[Finding, ...]:
        """The findings of `wrong`, where several requirements that met one error appear once."""
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
        """Whether `run --strict` would fail: a requirement forbids something that was found."""
        return any(
            finding.verdict != "deviates" or self._is_must(finding.requirement)
            for finding in self.wrong
        )

    @property
    def reason(self) -> str:
        """The reason why the item has no answer, or ""."""
        return next((finding.detail for finding in self.result.findings if finding.detail), "")

    def _is_must(self, name: str) -> bool:
        requirement = self.record.header.requirement(name)
        return requirement is None or requirement.level in MUST


@dataclass(frozen=True)
class Source:
    """Everything that a build shows."""

    records: Sequence[Record]
    items: Sequence[Item]
    judgements: Sequence[Judgement]
    """One for each record, if there is a baseline."""
    changes: Changes | None
    """Since the previous record, if there is one."""

    @cached_property
    def implementations(self) -> list[tuple[Record, Implementation]]:
        """Every implementation with its record."""
        return [(record, one) for record in self.records for one in record.header.implementations]

    def counts(self, implementation: str, device: str) -> dict[str, int]:
        """Return the verdicts of the items of one implementation, with "known" apart."""
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
        """Changes that are wrong and not known; similar ones are merged, the worst come first."""
        findings = [
            Located(item.result, finding.requirement, "", finding.verdict, finding)
            for item in self.items
            for finding in item.worth_showing
        ]
        whole = Records(self.records)
        return grouped_changes(findings, whole.specs, whole.levels)

    @cached_property
    def open(self) -> dict[tuple[str, str, str], int]:
        """The number of items without an answer, by implementation, verdict and reason."""
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
        """The exit code of the records; deviations are left to `run` and `gate`."""
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
    """Count verdicts as `count` does, with "known" after what conforms."""
    verdicts = list(verdicts)
    known = verdicts.count(KNOWN)
    counts = count(verdict for verdict in verdicts if verdict != KNOWN)
    if not known:
        return counts
    before = {name: counts.pop(name) for name in ("conforms",) if name in counts}
    return before | {KNOWN: known} | counts


MOST = 30
"""Rows of a table: GitHub cuts a summary off at one MiB."""

MOST_ENTRIES = 10

ORDER = ("conforms", KNOWN, *(verdict for verdict in VERDICTS if verdict != "conforms"))


def markdown(source: Source) -> str:
    """Return the summary."""
    parts = [
        "## Attention conformance",
        *_counts(source),
        *_changes(source.changes),
        *_wrong(source),
        *_baseline(source),
        *_open(source),
        *_made(source),
    ]
    return "\n\n".join(parts) + "\n"


def _counts(source: Source) -> Iterator[str]:
    """Yield a row for each implementation, with what was added or taken away."""
    rows = []
    used = {verdict for verdict, number in source.totals.items() if number}
    then = source.changes.before if source.changes else None
    before = then.implementations if then else {}
    # A row is of one device, and what was before is of all that there were.
    devices = then.devices if then else {}
    used |= {verdict for counts in before.values() for verdict in counts}
    columns = [verdict for verdict in ORDER if verdict in used]
    if not columns:
        yield "Nothing was verified."
        return
    for record, one in source.implementations:
        device = record.header.provenance.device
        counts = source.counts(one.name, device)
        name = code(one.name) + (f" on {device}" if device != "cpu" else "")
        was = before.get(one.name) if devices.get(one.name) == [device] else None
        cells = [_cell(counts, was, verdict) for verdict in columns]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    heads = " | ".join(f"{SYMBOLS.get(verdict, '✓')} {verdict}" for verdict in columns)
    yield "\n".join([f"| items | {heads} |", "| :-- |" + " --: |" * len(columns), *rows])


def _cell(counts: dict[str, int], before: dict[str, int] | None, verdict: str) -> str:
    now = counts.get(verdict, 0)
    # A record knows of no baseline, so what is known was among what deviates.
    if before is None or verdict == KNOWN or counts.get(KNOWN):
        return f"{now:,}"
    differs = now - before.get(verdict, 0)
    return f"{now:,}" + (f" ({differs:+,})" if differs else "")


def _changes(changes: Changes | None) -> Iterator[str]:
    if changes is None:
        return
    then = f"{code(changes.before.file)} of {changes.before.created[:10]}"
    yield f"### Since {then}"
    yield f"{text(changes.summary)}."
    if changes.notes:
        yield "\n".join(f"- {text(note)}" for note in changes.notes)
    for symbol, kind, alike in changes.kinds:
        if alike:
            yield f"**{symbol} {kind.capitalize()}**"
            yield _table(alike, states=True)
    if changes.conventions:
        yield "**~ Conventions, by experiment**"
        yield _list([f"- {text(one)}" for one in changes.conventions])
    for kind, members in (("+ Added", changes.added), ("− Removed", changes.removed)):
        if members.lines:
            yield f"**{kind}**"
            yield "\n".join(f"- {text(line)}" for line in members.lines)


def _wrong(source: Source) -> Iterator[str]:
    found = source.wrong
    known = source.totals.get(KNOWN, 0)
    heading = "### What deviates"
    if not found:
        if source.totals:
            yield heading
            yield "Nothing" + (f" but what is known, {plural(known, 'item')}." if known else ".")
        return
    yield heading + (f" and is not known ({plural(known, 'item')} known)" if known else "")
    yield _table(found, states=False)
    for change in found[:MOST_ENTRIES]:
        yield _details(change)
    if len(found) > MOST_ENTRIES:
        yield f"and {len(found) - MOST_ENTRIES} more"


def _table(changes: list[Change], *, states: bool) -> str:
    rows = [
        "| implementation | requirement | | findings | cause |",
        "| :-- | :-- | :-- | --: | :-- |",
    ]
    for change in changes[:MOST]:
        state = f"{text(change.before)} → {text(change.after)}" if states else text(change.after)
        cells = (
            code(change.implementation),
            code(change.requirement),
            state,
            f"{change.times:,}",
            text(change.cause),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, *_rest(len(changes))])


def _details(change: Change) -> str:
    lines = [
        f"<details><summary>{text(change.implementation)}: {text(change.requirement)}, "
        f"{change.extent}</summary>",
        f"{text(', '.join(change.dtypes))}; {text(', '.join(change.modes))}; "
        f"{text(some(change.cases, 6))}",
        text(change.told if change.figures is not None else ""),
        *map(text, change.evidence),
        fenced(change.command),
        "</details>",
    ]
    return "\n\n".join(filter(None, lines))


def _baseline(source: Source) -> Iterator[str]:
    stale = dict.fromkeys(
        f"- {text(f'{judgement.baseline.path.name}, {entry.place}')}: {text(why)}"
        for judgement in source.judgements
        for why, entry in judgement.to_edit
    )
    if stale:
        yield "### The baseline is out of date"
        yield _list(list(stale))


def _open(source: Source) -> Iterator[str]:
    found = source.open
    lines = [
        f"- {code(name)}: {plural(items, 'item')} {verdict}: {text(reason or 'no reason given')}"
        for (name, verdict, reason), items in found.items()
    ]
    lines += [
        f"- {code(record.header.name)} is incomplete"
        for record in source.records
        if not record.complete
    ]
    lines += [
        f"- {code(record.header.name)} was asked for a part only: "
        f"{code(record.header.provenance.selection)}"
        for record in source.records
        if record.header.provenance.selection
    ]
    if lines:
        yield "### Not verified"
        yield "\n".join(lines)


def _made(source: Source) -> Iterator[str]:
    made = source.records[0].header.provenance
    versions = ", ".join(f"{name} {version}" for name, version in made.packages.items())
    yield f"<sub>{text(f'{made.created[:10]}, suite {made.suite}; {versions}')}</sub>"


def _list(lines: Sequence[str]) -> str:
    return "\n".join([*lines[:MOST], *_rest(len(lines))])


def _rest(number: int) -> list[str]:
    return [f"\nand {number - MOST} more"] if number > MOST else []
