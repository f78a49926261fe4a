"""Coverage: compare how much a run verified with how much was verified before.

For each implementation and each "dtype:device:mode", a baseline stores how many findings must at
least be verified in each chapter of cases:

    [verified.mine]
    "float32:cpu:eval" = {causal = 120, mask = 310, plain = 96}

Without these numbers, an implementation could pass more easily by supporting less.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import tomlkit

from conformance.errors import BrokenBaseline
from conformance.records.findings import NOT_VERIFIED, RUN, STORED, VERIFIED
from conformance.records.record import Record

Chapters = Mapping[str, int]
Counts = Mapping[str, Mapping[str, Chapters]]
"""The number of verified findings by implementation, "dtype:device:mode" and chapter of cases."""

OPTIONS = ("--case", "--dtype", "--mode", "-k", "--level", "--shard", "--deselect")
_NARROWS = re.compile(rf"(^| )({'|'.join(OPTIONS)})( |$)")
"""Matches options that leave something out of a run; case files only add to it."""

HEAD = """\
# Findings that were verified at least, by chapter of cases. `baseline update` raises these numbers.
"""

_TABLE = re.compile(r"[ \t]*\[[ \t]*[\"']?(verified|pinned)\b")
_ENTRY = re.compile(r"[ \t]*\[\[[ \t]*known\b")


class Loss(NamedTuple):
    """A chapter of cases in which fewer findings were verified than the baseline requires.

    Attributes:
        place: "dtype:device:mode".
        reason: the most frequent reason why findings there are unsupported, or "".
    """

    implementation: str
    place: str
    chapter: str
    expected: int
    verified: int
    reason: str


def is_narrowed(record: Record) -> bool:
    """Return whether options narrowed a run, or deselected some of its items."""
    header = record.header
    return bool(header.deselected or _NARROWS.search(header.provenance.selection))


def is_whole(record: Record) -> bool:
    """Return whether a run was not narrowed and no planned item remained unverified."""
    results = record.results
    answered = record.complete and len(results) >= record.header.planned
    return (
        answered
        and not is_narrowed(record)
        and not any(
            one.requirement == RUN or one.verdict in NOT_VERIFIED
            for result in results
            for one in result.findings
        )
    )


def counted(record: Record, verdicts: Collection[str] = VERIFIED) -> Counts:
    """Count the findings of a record with these verdicts, by implementation, place and chapter.

    Cases that were read from files are not counted.
    """
    counts: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for name, place, chapter, verdict, _ in _findings(record):
        counts[name][place][chapter] += verdict in verdicts
    return {
        name: {
            place: {chapter: times for chapter, times in sorted(chapters.items()) if times}
            for place, chapters in places.items()
        }
        for name, places in counts.items()
    }


def losses(expected: Counts, record: Record) -> list[Loss]:
    """Return where less was verified than expected; [] if the run was not whole."""
    if not expected or not is_whole(record):
        return []
    now, device = counted(record), record.header.provenance.device
    reasons: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for *where, verdict, detail in _findings(record):
        if verdict == "unsupported":
            reasons[tuple(where)][detail] += 1  # type: ignore[index]
    return [
        Loss(one.name, place, chapter, least, times, _most(reasons[one.name, place, chapter]))
        for one in record.header.implementations
        for place, chapters in expected.get(one.name, {}).items()
        for chapter, least in chapters.items()
        if place.split(":")[1] == device
        and (times := now.get(one.name, {}).get(place, {}).get(chapter, 0)) < least
    ]


def _findings(record: Record) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield implementation, place, chapter, verdict and detail of the findings.

    Findings about cases that were read from files are left out.
    """
    for result in record.results:
        chapter = result.case.partition("/")[0]
        if chapter == STORED:  # The file need not be there in the next run.
            continue
        place = f"{result.dtype}:{result.device}:{result.mode}"
        for finding in result.findings:
            yield result.implementation, place, chapter, finding.verdict, finding.detail


def _most(reasons: Counter[str]) -> str:
    return next((reason for reason, _ in reasons.most_common(1)), "")


# In the file


def read_counts(table: Any) -> Counts:
    """Return the counts in the `verified` table; raises `BrokenBaseline` if they are invalid."""
    kind = dict[str, dict[str, dict[str, Annotated[int, msgspec.Meta(ge=0)]]]]
    try:
        counts = msgspec.convert(table, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        raise BrokenBaseline(
            "verified holds numbers of findings, such as verified.mine "
            f'= {{"float32:cpu:eval" = {{mask = 310}}}} ({error})'
        ) from error
    for name, places in counts.items():
        for place in places:
            if place.count(":") != 2:
                raise BrokenBaseline(f'verified.{name}: {place!r} is not "dtype:device:mode"')
    return counts


def raised(text: str, record: Record) -> str:
    """Return the text of a baseline with its counts raised to those of a record.

    Errors are not counted, no count is lowered, and a run that was not whole changes nothing.
    """
    if not is_whole(record):
        return text

    def edit(document: Any) -> bool:
        verified = document.setdefault("verified", tomlkit.table(is_super_table=True))
        changed = False
        # An error is recorded for more requirements than the output that replaces it once fixed.
        for name, places in counted(record, VERIFIED - {"error"}).items():
            table = verified.setdefault(name, tomlkit.table())
            for place, chapters in places.items():
                before = table.get(place, {})
                most = {
                    chapter: max(before.get(chapter, 0), chapters.get(chapter, 0))
                    for chapter in sorted({*before, *chapters})
                }
                if most and most != dict(before):
                    changed = True
                    inline = tomlkit.inline_table()
                    inline.update(most)
                    table[place] = inline
        return changed

    return edited(text, edit, HEAD)


def edited(text: str, edit: Callable[[Any], bool], head: str = "") -> str:
    """Return the text of a baseline with its tables of counts and pins edited.

    If they change, these tables are moved behind all entries.

    Args:
        text: the content of the file.
        edit: function that changes the parsed tables, and returns whether it did.
        head: a comment to write above the tables if there were none before.
    """
    rest, tables = _apart(text)
    document: Any = tomlkit.parse(tables)
    if not edit(document):
        return text
    end = "\r\n" if "\r\n" in text else "\n"
    written = ("" if tables.strip() else head) + tomlkit.dumps(document).strip()
    return rest.rstrip() + (end * 2 if rest.strip() else "") + end.join(written.splitlines()) + end


def counts_after(lines: Sequence[str], first: int) -> int:
    """Return the index of the line where counts or pins begin, at or after line `first`.

    Without such a line, the result is the number of lines.
    """
    heads = (n for n in range(first, len(lines)) if _TABLE.match(lines[n]) or _is_head(lines[n]))
    return next(heads, len(lines))


def _is_head(line: str) -> bool:
    return line.strip() == HEAD.strip()


def _apart(text: str) -> tuple[str, str]:
    """Split a file into its entries and its tables, the latter with the comment above them."""
    lines = text.splitlines(keepends=True)
    start = counts_after(lines, 0)
    entries = (n for n in range(start, len(lines)) if _ENTRY.match(lines[n]))
    stop = next(entries, len(lines))
    while stop < len(lines) and lines[stop - 1].lstrip().startswith("#"):
        # A comment above an entry belongs to the entry.
        stop -= 1
    return "".join(lines[:start] + lines[stop:]), "".join(lines[start:stop])
