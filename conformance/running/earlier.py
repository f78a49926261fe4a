"""Reuse those results of an earlier run that are still valid.

A result is valid as long as nothing has changed on which it depends: the case, the requirements,
the adapter, the packages and the machine. All of these are in the header of a record, so comparing
two headers shows which items must be measured again. Items that crashed, timed out, were
unavailable or were not run are always measured again. The journal of an interrupted run can be
reused too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from conformance.cases.catalogue import catalogue, catalogue_hash
from conformance.cases.description import describe_all
from conformance.definition.dtypes import Array
from conformance.errors import BrokenRecord
from conformance.experiments import TOPICS
from conformance.frameworks.base import package_versions
from conformance.records.findings import NOT_VERIFIED, VERIFIED, CaseResult
from conformance.records.header import Header, Implementation
from conformance.records.record import (
    PICTURED,
    Record,
    encode_line,
    read,
    read_arrays,
    read_journal,
)
from conformance.running.provenance import (
    BASE_PACKAGES,
    CAUSES,
    adapter_digest,
    documentation,
    requirements,
    revisions,
    setting,
)
from conformance.running.session import Item, Row, is_exchanged, worst_of

SETTING = ("code", "python", "platform", "machine", "environment", "device", "device_model")
"""The fields of `Provenance` that must be equal for any result to be reused.

The versions of `BASE_PACKAGES` must be equal, too.
"""


@dataclass(frozen=True)
class Earlier:
    """The results of earlier runs that are still valid.

    Attributes:
        lines: the journal line of each item, by item id; it has the day of the measurement unless
            this is the day of the new run.
        days: the day on which each item was measured, by item id.
        problems: an explanation for each file that could not be used.
    """

    lines: dict[str, bytes] = field(default_factory=dict)
    days: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def earlier(
    files: Iterable[Path], header: Header, planned: Sequence[Row], places: Mapping[str, int]
) -> Earlier:
    """Return the results in records and journals that are still valid in a new run.

    If several files have a valid result of an item, the first of these files is used. A result is
    left out if the new record needs arrays that are missing.

    Args:
        files: paths of records and journals.
        header, planned: the header and the rows of the new run.
        places: the position in the new run of each item whose attention weights may be recorded,
            by item id.
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
    """Return a text such as "1,803 of 1,848 items as measured on 2026-11-22".

    `days` has the day of each reused measurement, and `total` is the number of all items.
    """
    each = sorted({*days})
    when = f"between {each[0]} and {each[-1]}" if len(each) > 3 else f"on {' and '.join(each)}"
    return f"{len(days):,} of {total:,} items as measured {when}"


def _read(file: Path) -> tuple[Header, dict[str, tuple[CaseResult, dict[str, Array]]]]:
    """Return the header of a record or journal, and each item's result and arrays, by item id."""
    if file.suffix == ".journal":
        header, results, stored = read_journal(file, resumes=True)
        if not results:
            raise BrokenRecord(f"{file.name}: nothing was measured")
    else:
        record = read(file)
        header, results, stored = record.header, record.results, read_arrays(file, record)
    arrays: dict[str, dict[str, Array]] = defaultdict(dict)
    for name, array in stored.items():
        item, _, part = name.rpartition("|")
        arrays[item][part] = array
    return header, {result.id: (result, arrays[result.id]) for result in results}


def _holds(before: Header, now: Header) -> Callable[[CaseResult, Row], bool]:
    """Return a function that returns whether a result of the run with header `before` is valid."""
    one, other = before.provenance, now.provenance
    pairs = [(getattr(one, name), getattr(other, name)) for name in SETTING]
    pairs += [(one.packages.get(name), other.packages.get(name)) for name in BASE_PACKAGES]
    same = one.code and all(then == today for then, today in pairs)
    declared = {each.name: _without_words(each) for each in before.implementations}
    alike = {
        each.name
        for each in now.implementations
        if each.digest and declared.get(each.name) == _without_words(each)
    }

    def holds(result: CaseResult, row: Row) -> bool:
        if not same or result.implementation not in alike or result.verdict in NOT_VERIFIED:
            return False
        if result.case in now.cases:
            asked = before.cases.get(result.case)
            if asked is None or asked.hash != now.cases[result.case].hash:
                return False
        names = {finding.requirement for finding in result.findings}
        names |= {one.id for one in row.requirements} if isinstance(row, Item) else {result.case}
        if any(finding.verdict == "deviates" for finding in result.findings):
            names.add(CAUSES)
        return all(before.revisions.get(name) == now.revisions.get(name) for name in names)

    return holds


def _without_words(declared: Implementation) -> Implementation:
    """Return a declaration without its descriptive texts, on which no result depends."""
    words = {"spec": "", "title": "", "documentation": "", "about": "", "example": ""}
    return msgspec.structs.replace(declared, mode_notes={}, **words)


def _drop_without_arrays(
    results: dict[str, CaseResult],
    arrays: Mapping[str, Mapping[str, Array]],
    items: Mapping[str, Row],
    places: Mapping[str, int],
) -> None:
    """Remove results whose arrays are missing although the new record needs them."""
    for name, result in list(results.items()):
        exchanged = is_exchanged(items[name]) and result.verdict in ("conforms", "deviates")
        if exchanged and not arrays[name].keys() - {*PICTURED}:
            del results[name]
    for name in worst_of(results.values(), places):
        if not arrays[name].keys() & {*PICTURED}:
            del results[name]


# Nothing changed at all


def unchanged(record: Path, specs: Sequence[str], device: str) -> Record | None:
    """Return the record in a file if a new run of these implementations would not change it.

    Return None if the record is incomplete, is of a restricted run, or has results that are no
    longer valid or that verify nothing. No adapter and no framework is imported. For a GPU the
    result is None, because only a framework could determine the model of the GPU.
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
    packages = then.packages | package_versions(BASE_PACKAGES)
    now = msgspec.structs.replace(then, packages=packages, **setting())
    if now != then or not all(map(_stands, header.implementations)):
        return None
    if (header.revisions, header.requirements) != (revisions(), requirements()):
        return None
    if not set(header.topics) <= set(TOPICS):
        return None
    described = describe_all(catalogue())
    if header.cases != described:
        # A case with features is only in records of implementations that have these features.
        # No case of the catalogue may be new or different.
        known = header.cases.items() <= described.items()
        if not known or then.catalogue != catalogue_hash():
            return None
    if len(previous.results) != header.planned:
        return None
    verdicts = {result.verdict for result in previous.results}
    return previous if verdicts & VERIFIED and not verdicts & NOT_VERIFIED else None


def _stands(one: Implementation) -> bool:
    """Return whether the adapter's code, documentation and package versions are unchanged."""
    if not one.digest or package_versions(tuple(one.versions)) != one.versions:
        return False
    words = documentation(one.spec)
    return adapter_digest(one.spec, one.framework) == one.digest and words in ("", one.about)
