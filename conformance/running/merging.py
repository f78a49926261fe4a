"""Reuse results of earlier runs in a new record, and join the records of the parts of a run.

A result of an earlier run is valid as long as the case, the requirements, the adapter, the
packages, the machine and everything else on which it depends are unchanged. All of these are in the
header of a record, so comparing two headers shows which items must be measured again. Items that
crashed, timed out, were unavailable or were not run are always measured again. The journal of an
interrupted run can be reused too.

The parts of a run may have different items (a shard, one dtype, some cases) and may come from
different machines. If two parts disagree on an item, the contradiction is reported.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from conformance.cases.case import describe_all
from conformance.cases.catalogue import catalogue, every_case
from conformance.definition.dtypes import DTYPES, Array
from conformance.errors import BrokenRecord, ConformanceError
from conformance.experiments import EXPERIMENTS, TOPICS
from conformance.frameworks.base import package_versions
from conformance.records.findings import ANSWERED, NOT_VERIFIED, CaseResult, Phrase
from conformance.records.header import Header, Implementation
from conformance.records.record import (
    PICTURED,
    Record,
    check_sealed,
    check_writable,
    encode_line,
    joined_inputs,
    read,
    read_arrays,
    read_journal,
    write,
)
from conformance.running import inputs
from conformance.running.kept import hash_of_catalogue
from conformance.running.provenance import (
    BASE_PACKAGES,
    CAUSES,
    adapter_digest,
    documentation,
    requirements,
    revisions,
    setting,
)
from conformance.running.session import Item, Row, WorstItems, is_exchanged, kept

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_SHARD = re.compile(r"(?:^| )--shard (\d+)/(\d+)$")


# One process writes a record


class Lock:
    """A context in which no other process writes a record.

    If the process ends inside the context, the operating system releases the lock. On platforms
    without `flock`, this class does nothing.

    Raises:
        ConformanceError: another run is writing this record; the message names its process. Or the
            lock file cannot be written, for example because the disk is full.
    """

    def __init__(self, record: Path) -> None:
        self._record = record
        self._path = record.with_name(record.name + ".lock")
        self._file: IO[bytes] | None = None

    def __enter__(self) -> None:
        while fcntl is not None and self._file is None:
            self._file = self._attempt()

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None

    def _attempt(self) -> IO[bytes] | None:
        """Return the locked file, or None if it was just removed, so that the caller tries again.

        Raises:
            ConformanceError: another process has the lock, or the file cannot be written.
        """
        try:
            # Without a buffer, because closing a file must not fail on a full disk.
            file = self._path.open("a+b", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().decode(errors="replace").strip() or "another run"
            file.close()
            raise ConformanceError(f"{self._record}: {holder} writes this record") from error
        is_same = False
        with contextlib.suppress(OSError):
            is_same = os.fstat(file.fileno()).st_ino == self._path.stat().st_ino
        if not is_same:
            file.close()
            return None
        now = datetime.datetime.now().astimezone()
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()}, which began at {now:%H:%M:%S},".encode())
        except OSError as error:
            self._path.unlink(missing_ok=True)
            file.close()
            raise self._unwritable(error) from error
        return file

    def _unwritable(self, error: OSError) -> ConformanceError:
        return ConformanceError(
            f"{self._record}: cannot be written ({error.strerror}); name another place"
        )


# Reusing the results of earlier runs

SETTING = (
    "code",
    "python",
    "platform",
    "machine",
    "environment",
    "device",
    "device_model",
    "driver",
)
"""The fields of `Provenance` that must be equal for any result to be reused.

The versions of `BASE_PACKAGES` must be equal, too.
"""


@dataclass(frozen=True)
class Earlier:
    """The results of earlier runs that are still valid.

    Attributes:
        lines: the journal line of each item, by item id; the line states the day on which the item
            was measured, unless the new run began on the same day.
        days: the day on which each item was measured, by item id.
        problems: an explanation for each file that could not be used.
        inputs: what each implementation had read when its results were measured, by name.
    """

    lines: dict[str, bytes] = field(default_factory=dict)
    days: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    inputs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def earlier(
    files: Iterable[Path], header: Header, planned: Sequence[Row], places: Mapping[str, int]
) -> Earlier:
    """Return the results in records and journals that are still valid in a new run.

    If several files have a valid result of an item, the first of these files is used. A result is
    left out if the new record needs arrays of the item that the file does not have. A file that
    cannot be read is listed in `problems`.

    Args:
        files: paths of records and journals.
        header, planned: the header and the rows of the new run.
        places: the position in the new run of each item whose attention weights may be recorded,
            by item id.
    """
    problems: list[str] = []
    items = {item.id: item for item in planned}
    results: dict[str, CaseResult] = {}
    days: dict[str, str] = {}
    arrays: dict[str, dict[str, Array]] = {}
    read: dict[str, dict[str, str]] = defaultdict(dict)
    for file in files:
        try:
            before, measured = _read(file)
        except BrokenRecord as error:
            problems.append(f"{error}; not used")
            continue
        holds = _holds(before, header)
        declared = {one.name: one for one in before.implementations}
        for name, (result, own) in measured.items():
            if name in items and name not in results and holds(result, items[name]):
                results[name], arrays[name] = result, own
                read[result.implementation] |= declared[result.implementation].inputs
                days[name] = result.measured or before.provenance.created[:10]
    # The new record needs the arrays of some items.
    for name, result in list(results.items()):
        exchanged = is_exchanged(items[name]) and result.verdict in ("conforms", "deviates")
        if exchanged and not arrays[name].keys() - {*PICTURED}:
            del results[name]
    for name in WorstItems(places, results.values()).ids:
        if not arrays[name].keys() & {*PICTURED}:
            del results[name]
    lines = {
        name: encode_line(_measured(result, days[name], header), arrays[name])
        for name, result in results.items()
    }
    return Earlier(lines, {name: days[name] for name in lines}, problems, read)


def _measured(result: CaseResult, day: str, header: Header) -> CaseResult:
    """Return a copy of a result with its field `measured` set to `day`, the day of measurement.

    The field is set to "" if the record with the given header was created on that day.
    """
    day = "" if day == header.provenance.created[:10] else day
    return msgspec.structs.replace(result, measured=day)


def as_measured(days: Sequence[str], total: int) -> str:
    """Return a text such as "1,803 of 1,848 items as measured on 2026-11-22".

    `days` has the day of each reused measurement, and `total` is the number of all items.
    """
    each = sorted({*days})
    when = f"between {each[0]} and {each[-1]}" if len(each) > 3 else f"on {' and '.join(each)}"
    return f"{len(days):,} of {total:,} items as measured {when}"


def _read(file: Path) -> tuple[Header, dict[str, tuple[CaseResult, dict[str, Array]]]]:
    """Return the header of a record or journal, and each item's result and arrays, by item id.

    Raises:
        BrokenRecord: the file cannot be read, or is a journal without results.
    """
    if file.suffix == ".journal":
        header, results, stored = read_journal(file)
        if not results:
            raise BrokenRecord(f"{file.name}: nothing was measured")
    else:
        record = read(file)
        check_sealed(file, record)
        header, results, stored = record.header, record.results, read_arrays(file, record)
    arrays: dict[str, dict[str, Array]] = defaultdict(dict)
    for name, array in stored.items():
        item, _, part = name.rpartition("|")
        arrays[item][part] = array
    return header, {result.id: (result, arrays[result.id]) for result in results}


def _holds(before: Header, now: Header) -> Callable[[CaseResult, Row], bool]:
    """Return a function that decides whether a result of an earlier run is valid in a new run.

    The function takes the result, and the row of the new run with the same id. `before` is the
    header of the earlier run, and `now` that of the new run.
    """
    one, other = before.provenance, now.provenance
    pairs = [(getattr(one, name), getattr(other, name)) for name in SETTING]
    pairs += [(one.packages.get(name), other.packages.get(name)) for name in BASE_PACKAGES]
    same = all(then == today for then, today in pairs)
    declared = {each.name: _without_words(each) for each in now.implementations if each.digest}
    alike = {
        each.name
        for each in before.implementations
        if declared.get(each.name) == _without_words(each) and inputs.stand(each.inputs)
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
    """Return an adapter's declaration without inputs, and texts on which no result depends."""
    words = {"spec": "", "title": "", "documentation": "", "about": "", "example": ""}
    return msgspec.structs.replace(declared, mode_notes={}, inputs={}, **words)


def unchanged(record: Path, specs: Sequence[str], device: str, level: str) -> Record | None:
    """Return the record in a file if a new run of the implementations `specs` would not change it.

    Return None if the record cannot be read, is incomplete, or comes from a restricted run, from a
    run of less than `level`, or from a run of other implementations. Also return None if some
    results are no longer valid, if some items could not be verified, or if no item was. No adapter
    or framework is imported. Because only a framework could determine the model of a GPU, the
    result is also None unless `device` is "cpu".
    """
    try:
        previous = read(record)
        check_sealed(record, previous)
    except BrokenRecord:
        return None
    header, then = previous.header, previous.header.provenance
    left_out = then.selection or then.chosen or header.deselected
    whole = previous.complete and not left_out
    if not whole or device != "cpu" or then.device != device or then.level not in (level, "full"):
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
        if not known or then.catalogue != hash_of_catalogue():
            return None
    if len(previous.results) != header.planned:
        return None
    verdicts = {result.verdict for result in previous.results}
    return previous if verdicts & ANSWERED and not verdicts & NOT_VERIFIED else None


def _stands(one: Implementation) -> bool:
    """Return whether an adapter's code, inputs, documentation and versions are as in `one`.

    `one` is the declaration in an earlier record. Return False if the adapter's code is unknown.
    """
    if not one.digest or package_versions(tuple(one.versions)) != one.versions:
        return False
    if not inputs.stand(one.inputs):
        return False
    words = documentation(one.spec)
    return adapter_digest(one.spec, one.framework) == one.digest and words in ("", one.about)


# Joining the parts of a run


class Joined(NamedTuple):
    """A record joined from parts.

    Attributes:
        record: the joined record; each item has its result from the first part that could check it
            (with a verdict not in `NOT_VERIFIED`), or else from the last part that contains it.
        contradictions: a line of text for each item on which two parts disagree.
    """

    record: Record
    contradictions: list[str]


def join(files: Sequence[Path], output: Path) -> Joined:
    """Join partial records, write the result to `output` and return it.

    Raises:
        BrokenRecord: a part cannot be read.
        ConformanceError: the parts cannot be joined, because they differ in the version or code of
            the suite, in the version of Python, in the device, or in the code or versions of an
            implementation; or the output cannot be written, or another run is writing it.
    """
    parts = [(file, read(file)) for file in files]
    for file, record in parts:
        # A journal has none, and its lines have checksums.
        if file.suffix != ".journal":
            check_sealed(file, record)
    header = _joined_header([(file.name, record.header) for file, record in parts], output.stem)
    results: dict[str, CaseResult] = {}
    arrays: dict[str, Array] = {}
    source: dict[str, Path] = {}
    contradictions: list[str] = []
    for file, record in parts:
        created = record.header.provenance.created[:10]
        for result in record.results:
            name, before = result.id, results.get(result.id)
            if before is not None and before.verdict not in NOT_VERIFIED:
                if result.verdict not in NOT_VERIFIED and _judged(before) != _judged(result):
                    contradictions.append(
                        f"{name}: {before.verdict} in {source[name].name}, "
                        f"{result.verdict} in {file.name}{_difference(before, result)}"
                    )
                continue
            results[name] = _measured(result, result.measured or created, header)
            source[name] = file
        for name, array in read_arrays(file, record).items():
            if source.get(name.rpartition("|")[0]) == file:
                arrays[name] = array
    ordered = sorted(results.values(), key=lambda r: (r.verdict == "not-run", _place(r, header)))
    complete = not any(result.verdict == "not-run" for result in ordered)
    pictured = {item for item, _, kind in (n.rpartition("|") for n in arrays) if kind in PICTURED}
    keep = kept(ordered, {r.id: place for place, r in enumerate(ordered) if r.id in pictured})
    header = msgspec.structs.replace(header, planned=len(results))
    check_writable(output)
    chosen = {name: array for name, array in arrays.items() if keep(name)}
    with Lock(output):
        return Joined(write(output, Record(header, complete, ordered), chosen), contradictions)


def _judged(result: CaseResult) -> list[tuple[str, str, Phrase]]:
    """Return each finding's requirement, verdict and value, on which all machines must agree."""
    return [(f.requirement, f.verdict, f.value) for f in result.findings]


def _difference(one: CaseResult, other: CaseResult) -> str:
    """Return text that names the requirements on which two results with equal verdicts differ.

    Return "" if the verdicts differ, because the verdicts then show the difference.
    """
    if one.verdict != other.verdict:
        return ""
    names = {name for name, *_ in {*_judged(one)} ^ {*_judged(other)}}
    return f", but otherwise for {', '.join(sorted(names))}"


def _joined_header(parts: Sequence[tuple[str, Header]], name: str) -> Header:
    (first_name, first), *others = parts
    implementations: dict[str, Implementation] = {one.name: one for one in first.implementations}
    for other_name, other in others:
        pair = first.provenance, other.provenance
        for key in ("suite", "code", "python", "device"):
            here, there = (getattr(each, key).partition("+")[0] for each in pair)
            if here != there:
                raise ConformanceError(
                    f"{other_name} is no part of what {first_name} is of: {key} is {there!r} "
                    f"there, and {here!r} here"
                )
        for one in other.implementations:
            before = implementations.setdefault(one.name, one)
            implementations[one.name] = msgspec.structs.replace(
                before, inputs=joined_inputs(before.inputs, one.inputs)
            )
            if (before.digest, before.versions) != (one.digest, one.versions):
                what = "versions" if before.versions != one.versions else "code"
                raise ConformanceError(
                    f"{other_name} is no part of what {first_name} is of: {one.name} has other "
                    f"{what} there"
                )
    headers = [header for _, header in parts]
    made = [header.provenance for header in headers]

    def several(key: str) -> str:
        return "; ".join(dict.fromkeys(filter(None, (getattr(each, key) for each in made))))

    asks = {each.chosen for each in made}
    # What the settings of some parts leave out restricts these, if it is not the same for all.
    left = [each.selection for each in made]
    if len(asks) > 1:
        left = [f"{each.chosen} {each.selection}".strip() for each in made]
    packages = {name: version for each in made for name, version in each.packages.items()}
    ids = [case.id for case in every_case()]
    cases = {name: case for header in headers for name, case in header.cases.items()}
    topics = list(dict.fromkeys(topic for header in headers for topic in header.topics))
    experiments = [experiment.topic for experiment in EXPERIMENTS]
    return msgspec.structs.replace(
        first,
        name=name,
        implementations=list(implementations.values()),
        deselected=0,
        cases=dict(sorted(cases.items(), key=lambda each: _index(ids, each[0]))),
        topics=sorted(topics, key=lambda topic: _index(experiments, topic)),
        provenance=msgspec.structs.replace(
            first.provenance,
            created=max(each.created for each in made),
            packages=dict(sorted(packages.items())),
            command=shlex.join(["mha-conformance", *sys.argv[1:]]),
            selection=joined_selection(left),
            chosen=asks.pop() if len(asks) == 1 else "",
            level=next((each.level for each in made if each.level != "full"), "full"),
            platform=several("platform"),
            machine=several("machine"),
            device_model=several("device_model"),
            driver=several("driver"),
        ),
    )


def joined_selection(selections: Sequence[str]) -> str:
    """Return the selection of a joined record, given the selections of its parts.

    A selection is the text of the options that restrict a run. The result is "" if a part is a
    complete run, or if all shards of a complete run are present. In all other cases, the selections
    of the parts are separated by semicolons. Shards of one run are combined, as in "--shard 1/4,
    3/4", and --shard is left out if all shards of the run are present.
    """
    shards: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    left: dict[str, None] = {}
    for selection in selections:
        match = _SHARD.search(selection)
        if match is None:
            left[selection] = None
        else:
            shards[selection[: match.start()]][int(match[2])].add(int(match[1]))
    for before, counts in shards.items():
        for of, numbers in counts.items():
            if numbers >= {*range(1, of + 1)}:
                left[before] = None
                continue
            names = ", ".join(f"{number}/{of}" for number in sorted(numbers))
            left[f"{before} --shard {names}".strip()] = None
    return "" if "" in left else "; ".join(left)


def _place(result: CaseResult, header: Header) -> tuple[int, ...]:
    """Return a sort key that puts the results of several parts in the order of a single run."""
    names = [one.name for one in header.implementations]
    implementation = names.index(result.implementation)
    mode = _index(header.implementations[implementation].modes, result.mode)
    if result.case in header.cases:
        case = list(header.cases).index(result.case)
        return 0, case, _index(list(DTYPES), result.dtype), implementation, mode
    experiment = _index([topic.id for topic in header.topics], result.case)
    return 1, implementation, experiment, mode, 0


def _index(order: Sequence[object], one: object) -> int:
    return order.index(one) if one in order else len(order)
