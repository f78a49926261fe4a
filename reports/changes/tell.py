"""What changed, for people: regressions first, and one line for what is as it was."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from conformance.records.findings import VERDICTS
from conformance.reports.changes.compare import Change, Changes, Convention, Members
from conformance.reports.wording import measured
from conformance.text import heading, line, paragraph, plural, some

MOST_NAMES = 3
MOST_CHANGES = 12
"""Of one kind; --format json has them all."""


STYLES = {
    "✗": "bold red",
    "?": "bold yellow",
    "~": "bold",
    "✓": "bold green",
    "+": "bold green",
}


def show(console: Console, changes: Changes) -> None:
    """Print all of it."""
    before, after = changes.before, changes.after
    line(console, f"{before.file} ({before.created[:10]}) → {after.file} ({after.created[:10]})")
    for note in changes.notes:
        paragraph(console, note, bullet="· ", style="dim")
    for symbol, kind, found in changes.kinds:
        _kind(console, f"{symbol} {kind}", STYLES[symbol], found)
    _kind(console, "✗ new, and deviating from the start", "bold yellow", changes.added.wrong)
    if changes.conventions:
        heading(console, f"~ conventions, by experiment: {len(changes.conventions)}")
        for convention in changes.conventions[:MOST_CHANGES]:
            paragraph(console, convention_told(convention))
        _rest(console, len(changes.conventions))
    for symbol, kind, members in (
        ("+", "added", changes.added),
        ("-", "removed", changes.removed),
    ):
        told = list(members_told(members))
        if told:
            heading(console, f"{symbol} {kind}")
            for text in told:
                paragraph(console, text)
    console.print()
    for name, counts in deltas(changes).items():
        line(console, f"{name}: {counts}")
    line(console, summary(changes), style="bold")


def summary(changes: Changes) -> str:
    """One line: what it comes to."""
    told = [
        f"{sum(one.times for one in found)} {kind}" for _, kind, found in changes.kinds if found
    ]
    told.append(f"{changes.same} of {changes.common} findings as they were")
    return ", ".join(told)


def deltas(changes: Changes) -> dict[str, str]:
    """Implementation to its count vector, with what was added or taken away.

    Counts of other devices are of other items, so between them there is no difference to tell.
    """
    one, other = changes.before, changes.after
    found = {}
    for name, counts in other.implementations.items():
        alike = name not in one.devices or one.devices[name] == other.devices.get(name)
        found[name] = vector(counts, one.implementations.get(name) if alike else counts)
    return found


def vector(counts: dict[str, int], before: dict[str, int] | None) -> str:
    """ "12 conforms (+2), 3 deviates"."""
    told = []
    for verdict in VERDICTS:
        now, then = counts.get(verdict, 0), (before or {}).get(verdict, 0)
        if now or (before is not None and then):
            differs = before is not None and now != then
            told.append(f"{now} {verdict}" + (f" ({now - then:+d})" if differs else ""))
    return ", ".join(told) + (" (new)" if before is None else "")


def convention_told(found: Convention) -> str:
    """One line."""
    before, after = found.before or "not asked", found.after or "not asked"
    where = f"{found.implementation}, {found.experiment}: {found.subject}"
    return f"{where}: {before} → {after} ({', '.join(found.modes)})"


def members_told(members: Members) -> Iterator[str]:
    """A line for each kind of what came, or went."""
    if members.implementations:
        yield f"implementations: {', '.join(members.implementations)}"
    if members.cases:
        yield f"{plural(len(members.cases), 'case')}: {some(members.cases, 6)}"
    if members.items:
        yield f"{plural(members.items, 'item')} (case × dtype × mode)"
    if members.findings:
        yield f"{plural(members.findings, 'finding')} of items that both have"


def _kind(console: Console, told: str, style: str, found: list[Change]) -> None:
    if not found:
        return
    heading(console, f"{told}: {sum(change.times for change in found)}", style)
    for change in found[:MOST_CHANGES]:
        _change(console, change)
    _rest(console, len(found))


def _change(console: Console, change: Change) -> None:
    device = "" if change.device == "cpu" else f" on {change.device}"
    line(console, f"  {change.implementation}{device}: {change.requirement}", style="bold")
    states = f"{change.before or 'not asked'} → {change.after}"
    times, cases = plural(change.times, "finding"), plural(len(change.cases), "case")
    told = [
        f"{states}, {times} in {cases}: {some(change.cases, MOST_NAMES)}",
        f"{', '.join(change.dtypes)}; {', '.join(change.modes)}",
    ]
    if change.figures is not None:
        told.append(f"measured {measured(change.figures)}")
    elif change.told:
        told.append(change.told)
    if change.cause:
        told.append(f"likely cause: {change.cause}")
    for text in told:
        paragraph(console, text, indent=4)
    if change.after not in ("conforms", "observed"):
        line(console, f"again: {change.command}", indent=4, style="dim")


def _rest(console: Console, number: int) -> None:
    if number > MOST_CHANGES:
        line(console, f"  and {number - MOST_CHANGES} more; --format json has them all")
