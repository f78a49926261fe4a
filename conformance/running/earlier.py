"""Reuse the results of an earlier run where they are still valid.

An outcome holds as long as nothing changed on which it depends: the case, the requirements that it
serves, the adapter, the packages, the machine. All of that is in the header of a record, so two
headers say which items must be measured again. An item that crashed, or was not run, always is.
The journal of a run that was killed counts as an earlier run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from conformance.cases.catalogue import catalogue
from conformance.cases.description import describe_all
from conformance.definition.dtypes import Array
from conformance.errors import BrokenRecord
from conformance.experiments import TOPICS
from conformance.frameworks.base import package_versions
from conformance.records.findings import NOT_VERIFIED, VERIFIED, CaseResult
from conformance.records.header import Header, Implementation, Provenance
from conformance.records.record import (
    PICTURED,
    Record,
    decode_line,
    encode_line,
    read,
    read_arrays,
    read_header,
    whole_lines,
)
from conformance.running.digests import CAUSES, adapter_digest, documentation, revisions
from conformance.running.examiner import is_exchanged, worst_of
from conformance.running.provenance import (
    BASE_PACKAGES,
    requirements,
    setting,
    suite_version,
)
from conformance.running.session import Item, Row

SETTING = (
    "code",
    "python",
    "platform",
    "machine",
    "environment",
    "device",
    "device_model",
)
"""Fields of the provenance that must be equal for any outcome to hold."""


@dataclass(frozen=True)
class Earlier:
    """The outcomes of earlier runs that are still valid.

    Attributes:
        lines: item id to its journal line, which says when it was measured.
        days: item id to the day of its measurement.
        problems: a line about each file that could not be used.
    """

    lines: dict[str, bytes] = field(default_factory=dict)
    days: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def earlier(
    files: Iterable[Path],
    header: Header,
    planned: Sequence[Row],
    places: Mapping[str, int],
) -> Earlier:
    """Return the results in these records and journals that are still valid; earlier files win.

    Args:
        files: records and journals.
        header: that of the run that begins.
        planned: its items.
        places: item id to its place, for those whose attention weights may go into the record.
    """
    problems: list[str] = []
    items = {item.id: item for item in planned}
    results: dict[str, CaseResult] = {}
    arrays: dict[str, dict[str, Array]] = {}
    for file in files:
        try:
            before, measured = _read(file)
        except BrokenRecord as error:
            problems.append(f"{error}; not used")
            continue
        holds = _holds(before, header)
        for name, (result, exchanged) in measured.items():
            if name in items and name not in results and holds(result, items[name]):
                day = result.measured or before.provenance.created[:10]
                results[name] = msgspec.structs.replace(result, measured=day)
                arrays[name] = exchanged
    _drop_without_arrays(results, arrays, items, places)
    today = header.provenance.created[:10]
    lines = {}
    for name, result in results.items():
        day = "" if result.measured == today else result.measured
        lines[name] = encode_line(msgspec.structs.replace(result, measured=day), arrays[name])
    return Earlier(lines, {name: result.measured for name, result in results.items()}, problems)


def as_measured(days: Sequence[str], total: int) -> str:
    """Return e.g. "1,803 of 1,848 items as measured on 2026-11-22"; `days` has one day per item."""
    each = sorted({*days})
    when = f"between {each[0]} and {each[-1]}" if len(each) > 3 else f"on {' and '.join(each)}"
    return f"{len(days):,} of {total:,} items as measured {when}"


Read = tuple[Header, dict[str, tuple[CaseResult, dict[str, Array]]]]


def _read(file: Path) -> Read:
    """Return the header, and results with their arrays by item id; raise `BrokenRecord`."""
    if file.suffix == ".journal":
        lines = whole_lines(file)
        if len(lines) < 2:
            raise BrokenRecord(f"{file.name}: nothing was measured")
        decoded = [decode_line(line) for line in lines[1:]]
        return read_header(file, lines[0]), {result.id: (result, part) for result, part in decoded}
    record = read(file)
    arrays: dict[str, dict[str, Array]] = defaultdict(dict)
    for name, array in read_arrays(file, record).items():
        item, _, part = name.rpartition("|")
        arrays[item][part] = array
    return record.header, {r.id: (r, arrays.get(r.id, {})) for r in record.results}


def _holds(before: Header, now: Header) -> Callable[[CaseResult, Row], bool]:
    """Return a function that says whether an outcome of the run before holds now."""
    same = _same_setting(before.provenance, now.provenance)
    declared = {one.name: one for one in before.implementations}
    alike = {
        one.name
        for one in now.implementations
        if one.digest and one.name in declared and _same_declaration(declared[one.name], one)
    }

    def holds(result: CaseResult, item: Row) -> bool:
        if not same or result.implementation not in alike or result.verdict in NOT_VERIFIED:
            return False
        if result.case in now.cases:
            asked = before.cases.get(result.case)
            if asked is None or asked.hash != now.cases[result.case].hash:
                return False
        names = {finding.requirement for finding in result.findings}
        if isinstance(item, Item):
            names |= {requirement.id for requirement in item.requirements}
        else:
            names.add(result.case)
        if any(finding.verdict == "deviates" for finding in result.findings):
            names.add(CAUSES)
        return all(before.revisions.get(name) == now.revisions.get(name) for name in names)

    return holds


def _same_setting(one: Provenance, other: Provenance) -> bool:
    if any(getattr(one, name) != getattr(other, name) for name in SETTING) or not one.code:
        return False
    return all(one.packages.get(name) == other.packages.get(name) for name in BASE_PACKAGES)


def _same_declaration(one: Implementation, other: Implementation) -> bool:
    """Return whether code, versions and declaration are the same."""
    words = {"spec": "", "title": "", "documentation": "", "about": "", "example": ""}
    pair = [msgspec.structs.replace(each, mode_notes={}, **words) for each in (one, other)]
    return pair[0] == pair[1]


def _drop_without_arrays(
    results: dict[str, CaseResult],
    arrays: Mapping[str, Mapping[str, Array]],
    items: Mapping[str, Row],
    places: Mapping[str, int],
) -> None:
    """Remove items of which the arrays that a record keeps are missing."""
    for name, result in list(results.items()):
        exchanged = is_exchanged(items[name]) and result.verdict in ("conforms", "deviates")
        if exchanged and not arrays[name].keys() - {*PICTURED}:
            del results[name]
    for name in worst_of(results.values(), places):
        if not arrays[name].keys() & {*PICTURED}:
            del results[name]


# Nothing changed at all


def unchanged(record: Path, specs: Sequence[str], device: str) -> Record | None:
    """Return the record if all of it still holds for a run of these implementations, else None.

    No adapter or framework is loaded for that. On a GPU only the framework knows which one it is,
    so the answer is None.
    """
    try:
        previous = read(record)
    except BrokenRecord:
        return None
    header, then = previous.header, previous.header.provenance
    whole = previous.complete and not then.selection and not header.deselected
    if not whole or device != "cpu" or then.device != device:
        return None
    if [one.spec for one in header.implementations] != list(specs):
        return None
    now = msgspec.structs.replace(
        then,
        suite=suite_version(),
        packages=then.packages | package_versions(BASE_PACKAGES),
        **setting(),
    )
    if now != then or not all(map(_stands, header.implementations)):
        return None
    asks = (describe_all(catalogue()), revisions(), requirements(), [*TOPICS])
    if asks != (header.cases, header.revisions, header.requirements, header.topics):
        return None
    if len(previous.results) != header.planned:
        return None
    verdicts = {result.verdict for result in previous.results}
    return previous if verdicts & VERIFIED and not verdicts & NOT_VERIFIED else None


def _stands(one: Implementation) -> bool:
    """Return whether the adapter would declare the same again, from the same code."""
    if not one.digest or package_versions(tuple(one.versions)) != one.versions:
        return False
    words = documentation(one.spec)
    return adapter_digest(one.spec, one.framework) == one.digest and words in ("", one.about)
