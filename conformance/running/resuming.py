"""Going on with a run that was killed or interrupted: what it found, and whether it may be used.

A run that goes on makes the record that an uninterrupted one would have made. So it must ask the
same of the same: the suite, the cases, the implementations, their versions and the device are
compared with those of the unfinished run.
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from conformance.definition.dtypes import Array
from conformance.errors import ConformanceError
from conformance.records.findings import RUN, CaseResult
from conformance.records.header import Header
from conformance.records.record import (
    decode_line,
    encode_line,
    journal_path,
    read,
    read_arrays,
    read_header,
    whole_lines,
)
from conformance.running.provenance import begun

ENDED = "the run ended before this item"
"""Why an item has no outcome, in the record of an interrupted run."""

COMPARED = ("suite", "catalogue", "python", "platform", "device", "device_model", "selection")


@dataclass(frozen=True)
class Unfinished:
    """What a run found before it ended.

    Attributes:
        record: where its record was to be.
        header: its own.
        lines: journal line of each item that has an outcome, by id.
        size: bytes of its journal that are whole lines.
    """

    record: Path
    header: Header
    lines: dict[str, bytes]
    size: int


def unfinished(record: Path) -> Unfinished | None:
    """The run whose record was to be here, or None if there is none, or it found nothing yet.

    Raises:
        BrokenRecord: there is one, and it cannot be read.
    """
    journal = journal_path(record)
    if not journal.exists():
        _reopen(record)
    lines = whole_lines(journal) if journal.exists() else []
    if len(lines) < 2:
        return None
    own = {decode_line(line)[0].id: line for line in lines[1:]}
    size = sum(len(line) + 1 for line in lines)
    return Unfinished(record, read_header(journal, lines[0]), own, size)


def lines_of(record: Path, size: int) -> dict[str, bytes]:
    """The same lines in another process, while the journal grows."""
    with journal_path(record).open("rb") as file:
        lines = file.read(size).split(b"\n")[1:-1]
    return {decode_line(line)[0].id: line for line in lines}


def _reopen(record: Path) -> None:
    """Of the record of an interrupted run, make a journal again."""
    if not record.exists():
        return
    found = read(record)
    if found.complete:
        return
    arrays: dict[str, dict[str, Array]] = defaultdict(dict)
    for name, array in read_arrays(record, found).items():
        item, _, part = name.rpartition("|")
        arrays[item][part] = array
    lines = [msgspec.json.encode(found.header)]
    lines += [encode_line(r, arrays.get(r.id, {})) for r in found.results if not _was_ended(r)]
    journal = journal_path(record)
    temporary = journal.with_name(journal.name + ".new")
    temporary.write_bytes(b"".join(line + b"\n" for line in lines))
    temporary.replace(journal)


def _was_ended(result: CaseResult) -> bool:
    return any(item.requirement == RUN and item.detail == ENDED for item in result.findings)


def check(
    found: Unfinished, header: Header, planned: Collection[str], specs: Iterable[str]
) -> None:
    """Raise `ConformanceError` unless a run with this header is the same run."""
    reason = _difference(found, header, set(planned), specs)
    if reason:
        journal = journal_path(found.record).name
        raise ConformanceError(
            f"{journal} is of another run: {reason}; without --resume, it is put aside"
        )


def _difference(found: Unfinished, header: Header, planned: set[str], specs: Iterable[str]) -> str:
    then, now = found.header.provenance, header.provenance
    for name in COMPARED:
        one, other = getattr(then, name), getattr(now, name)
        if one != other:
            return f"{name.replace('_', ' ')} was {one or 'none'!r}, is {other or 'none'!r}"
    for package in sorted(then.packages.keys() | now.packages.keys()):
        one, other = then.packages.get(package, "none"), now.packages.get(package, "none")
        if one != other:
            return f"{package} was {one}, is {other}"
    names = [[item.name for item in h.implementations] for h in (found.header, header)]
    if names[0] != names[1]:
        return f"it examined {', '.join(names[0])}, this one {', '.join(names[1])}"
    for was, becomes in zip(found.header.implementations, header.implementations, strict=True):
        if was != becomes:
            return f"{was.name} declares something else now"
    if found.lines.keys() - planned:
        return "it had other items"
    folder = found.record.parent
    if begun(folder) and begun(folder) != then.run:
        return f"it was run {then.run}, and {begun(folder)} has begun"
    return _edited(then.created, specs)


def _edited(created: str, specs: Iterable[str]) -> str:
    """Files have no versions."""
    # The time of creation is in whole seconds, rounded down.
    began = datetime.datetime.fromisoformat(created).timestamp() + 1
    for spec in specs:
        file = Path(spec.partition(":")[0])
        if file.suffix == ".py" and file.is_file() and file.stat().st_mtime > began:
            return f"{file.name} has changed since"
    return ""
