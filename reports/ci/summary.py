"""A job's summary in Markdown: counts, what changed, what is wrong, what is not known.

For `$GITHUB_STEP_SUMMARY`, a merge request's comment, or a file. What a record says is escaped as
in the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from conformance.records.findings import VERDICTS
from conformance.reports.changes.compare import Change, Changes
from conformance.reports.changes.tell import convention_told, members_told, summary
from conformance.reports.ci.source import KNOWN, Source
from conformance.reports.page.markdown import code, fenced, text
from conformance.reports.wording import SYMBOLS, measured
from conformance.text import plural, some

MOST = 30
"""Rows of a table: GitHub cuts a summary off at one MiB."""

MOST_ENTRIES = 10

ORDER = ("conforms", KNOWN, *(verdict for verdict in VERDICTS if verdict != "conforms"))


def markdown(source: Source) -> str:
    """The summary."""
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
    """A row for each implementation, with what was added or taken away."""
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
    for record, own in source.implementations:
        device = record.header.provenance.device
        counts = source.counts(own.name, device)
        told = code(own.name) + (f" on {device}" if device != "cpu" else "")
        was = before.get(own.name) if devices.get(own.name) == [device] else None
        cells = [_cell(counts, was, verdict) for verdict in columns]
        rows.append(f"| {told} | {' | '.join(cells)} |")
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
    yield f"{text(summary(changes))}."
    if changes.notes:
        yield "\n".join(f"- {text(note)}" for note in changes.notes)
    for symbol, kind, found in changes.kinds:
        if found:
            yield f"**{symbol} {kind.capitalize()}**"
            yield _table(found, states=True)
    if changes.conventions:
        yield "**~ Conventions, by experiment**"
        told = [f"- {text(convention_told(one))}" for one in changes.conventions[:MOST]]
        yield "\n".join([*told, *_rest(len(changes.conventions), MOST)])
    for kind, members in (("+ Added", changes.added), ("− Removed", changes.removed)):
        lines = [f"- {text(line)}" for line in members_told(members)]
        if lines:
            yield f"**{kind}**"
            yield "\n".join(lines)


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


def _table(found: list[Change], *, states: bool) -> str:
    rows = [
        "| implementation | requirement | | findings | cause |",
        "| :-- | :-- | :-- | --: | :-- |",
    ]
    for change in found[:MOST]:
        state = f"{text(change.before)} → {text(change.after)}" if states else text(change.after)
        cells = (
            code(change.implementation),
            code(change.requirement),
            state,
            f"{change.times:,}",
            text(change.cause),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, *(("\n" + line) for line in _rest(len(found), MOST))])


def _details(change: Change) -> str:
    cases = plural(len(change.cases), "case")
    lines = [
        f"<details><summary>{text(change.implementation)}: {text(change.requirement)}, "
        f"{plural(change.times, 'finding')} in {cases}</summary>",
        f"{text(', '.join(change.dtypes))}; {text(', '.join(change.modes))}; "
        f"{text(some(change.cases, 6))}",
    ]
    if change.told:
        lines.append(str(text(change.told)))
    if change.figures is not None:
        lines.append(f"measured {text(measured(change.figures))}")
    if change.cause:
        lines.append(f"likely cause: {text(change.cause)}")
    return "\n\n".join([*lines, str(fenced(change.command)), "</details>"])


def _baseline(source: Source) -> Iterator[str]:
    stale = dict.fromkeys(
        f"- {text(f'{judgement.baseline.path.name}, {entry.place}')}: {text(why)}"
        for judgement in source.judgements
        for why, entry in judgement.to_edit
    )
    if stale:
        yield "### The baseline is out of date"
        yield "\n".join([*list(stale)[:MOST], *(f"\n{more}" for more in _rest(len(stale), MOST))])


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


def _rest(number: int, most: int) -> Iterable[str]:
    if number > most:
        yield f"and {number - most} more"
