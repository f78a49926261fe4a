"""What `mha-conformance gate` and `baseline update` do with a record."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from conformance.errors import ExitCode, UnknownName
from conformance.records.record import Record, read
from conformance.reports.gate.baseline import Baseline, baseline_of
from conformance.reports.gate.judging import judge
from conformance.reports.gate.telling import coloured, tell
from conformance.reports.gate.updating import propose, write
from conformance.text import printable


def gate(baseline: Baseline, record: Record, judged: Sequence[str], *, verbose: bool) -> int:
    """Judge a record, and tell; `judged` are the arguments that named it."""
    found = judge(baseline, record)
    _console().print(tell(found, verbose=verbose, judged=judged), soft_wrap=True)
    return found.exit_code


def update(baseline: Baseline, record: Record, reason: str, judged: Sequence[str] = ()) -> int:
    """Write the smallest edit by which the gate holds; 0 if it does, or would with reasons.

    `judged` are the arguments that named the record, if it stays.
    """
    console = _console()
    found = judge(baseline, record)
    if found.exit_code == ExitCode.NOTHING_VERIFIED:
        console.print(tell(found, judged=judged), soft_wrap=True)
        return found.exit_code
    text = propose(baseline, found, reason)
    if text != baseline.text:
        write(baseline.path, text)
        old, new = baseline.text.splitlines(), text.splitlines()
        for line in list(difflib.unified_diff(old, new, lineterm="", n=1))[2:]:
            console.print(Text(*coloured(printable(line))), soft_wrap=True)
    edited = baseline_of(baseline.path, text)
    left = judge(edited, record)
    told = "written" if text != baseline.text else "nothing to edit"
    console.print(Text(printable(f"{baseline.path}: {told}")), soft_wrap=True)
    if left.holds and not edited.entries:
        console.print("nothing deviates: the baseline is empty", soft_wrap=True)
    if left.reasonless and not (left.fixed or left.unmatched or left.ambiguous or left.duplicates):
        lines = ", ".join(str(entry.line or entry.number) for entry in left.reasonless)
        console.print(f"the gate holds once these say why: line {lines}", soft_wrap=True)
        return ExitCode.OK if not (left.worse or left.open or left.missing) else left.exit_code
    if not left.holds:
        console.print(tell(left, judged=judged), soft_wrap=True)
    return left.exit_code


def part_of(path: Path, names: Sequence[str]) -> Record:
    """A record, or the part of it that is about these implementations.

    Raises:
        UnknownName: the record has none of that name.
    """
    record = read(path)
    if not names:
        return record
    told = record.header.implementations
    for name in names:
        if not any(name in (one.name, one.spec) for one in told):
            raise UnknownName(f"implementation in {path}", name, [one.name for one in told])
    kept = [one for one in told if {one.name, one.spec} & {*names}]
    own = {one.name for one in kept}
    results = [result for result in record.results if result.implementation in own]
    planned = record.header.planned - (len(record.results) - len(results))
    header = msgspec.structs.replace(record.header, implementations=kept, planned=planned)
    return msgspec.structs.replace(record, header=header, results=results)


def _console() -> Console:
    return Console(highlight=False)
