"""Join partial records into one, and lock records against concurrent writing.

Partial records of an implementation may have different items (a shard, one dtype, some cases) and
may come from different machines. If two of them disagree on an item, this is reported.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from conformance.cases.catalogue import every_case
from conformance.definition.dtypes import DTYPES, Array
from conformance.errors import ConformanceError
from conformance.experiments import EXPERIMENTS
from conformance.records.findings import NOT_VERIFIED, CaseResult
from conformance.records.header import Header, Implementation
from conformance.records.phrase import Phrase
from conformance.records.record import PICTURED, Record, check_writable, read, read_arrays, write
from conformance.running.session import kept

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_SHARD = re.compile(r"(?:^| )--shard (\d+)/(\d+)$")


# One process writes a record


class Lock:
    """An exclusive lock on writing a record, held until `release`.

    If the process ends without a call of `release`, the operating system releases the lock. On
    platforms without `flock`, this class does nothing.

    Raises:
        ConformanceError: another run is writing this record; the message names its process.
    """

    def __init__(self, record: Path) -> None:
        self._path = record.with_name(record.name + ".lock")
        self._file: IO[str] | None = None
        while fcntl is not None and self._file is None:
            self._file = self._attempt(record)

    def _attempt(self, record: Path) -> IO[str] | None:
        """Return the locked file, or None to try again, if another process has just removed it."""
        file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "another run"
            file.close()
            raise ConformanceError(f"{record}: {holder} writes this record") from error
        with contextlib.suppress(OSError):
            if os.fstat(file.fileno()).st_ino == self._path.stat().st_ino:
                file.truncate(0)
                now = datetime.datetime.now().astimezone()
                file.write(f"process {os.getpid()}, which began at {now:%H:%M:%S},")
                file.flush()
                return file
        file.close()
        return None

    def release(self) -> None:
        """Release the lock, so that other processes can write the record."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


# Joining


class Joined(NamedTuple):
    """A record joined from parts.

    Attributes:
        record: the joined record; each item has its result from the first part that verified it,
            or else from the last part that contains it.
        contradictions: a line of text for each item on which two parts disagree.
    """

    record: Record
    contradictions: list[str]


def join(files: Sequence[Path], output: Path) -> Joined:
    """Join partial records, write the result to `output` and return it.

    Raises:
        BrokenRecord: a part cannot be read.
        ConformanceError: parts differ in the suite, in Python, in the device, or in the code or
            versions of an implementation, so they cannot be joined; or the output cannot be
            written, or another run is writing it.
    """
    parts = [(file, read(file)) for file in files]
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
            day = result.measured or created
            day = "" if day == header.provenance.created[:10] else day
            results[name] = msgspec.structs.replace(result, measured=day)
            source[name] = file
        for name, array in read_arrays(file, record).items():
            item = name.rpartition("|")[0]
            if source.get(item) == file:
                arrays[name] = array
    ordered = sorted(results.values(), key=lambda r: (r.verdict == "not-run", _place(r, header)))
    complete = not any(result.verdict == "not-run" for result in ordered)
    pictured = {item for item, _, kind in (n.rpartition("|") for n in arrays) if kind in PICTURED}
    keep = kept(ordered, {r.id: place for place, r in enumerate(ordered) if r.id in pictured})
    header = msgspec.structs.replace(header, planned=len(results))
    check_writable(output)
    lock = Lock(output)
    try:
        chosen = {name: array for name, array in arrays.items() if keep(name)}
        return Joined(write(output, Record(header, complete, ordered), chosen), contradictions)
    finally:
        lock.release()


def _judged(result: CaseResult) -> list[tuple[str, str, Phrase]]:
    """Return what must be the same on all machines: requirement, verdict and value of findings."""
    return [(f.requirement, f.verdict, f.value) for f in result.findings]


def _difference(one: CaseResult, other: CaseResult) -> str:
    """Return a text that names the requirements on which two results of one verdict differ."""
    if one.verdict != other.verdict:
        return ""
    names = {name for name, *_ in {*_judged(one)} ^ {*_judged(other)}}
    return f", but otherwise for {', '.join(sorted(names))}"


def _joined_header(parts: Sequence[tuple[str, Header]], name: str) -> Header:
    (first_name, first), *others = parts
    implementations: dict[str, Implementation] = {one.name: one for one in first.implementations}
    for other_name, other in others:
        pair = first.provenance, other.provenance
        for field in ("suite", "code", "python", "device"):
            values = [getattr(each, field) for each in pair]
            if values[0] != values[1]:
                raise ConformanceError(
                    f"{other_name} is no part of what {first_name} is of: {field} is "
                    f"{values[1]!r} there, and {values[0]!r} here"
                )
        for one in other.implementations:
            before = implementations.setdefault(one.name, one)
            if (before.digest, before.versions) != (one.digest, one.versions):
                what = "versions" if before.versions != one.versions else "code"
                raise ConformanceError(
                    f"{other_name} is no part of what {first_name} is of: {one.name} has other "
                    f"{what} there"
                )
    headers = [header for _, header in parts]
    made = [header.provenance for header in headers]

    def several(field: str) -> str:
        return "; ".join(dict.fromkeys(getattr(each, field) for each in made))

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
            selection=joined_selection([each.selection for each in made]),
            platform=several("platform"),
            machine=several("machine"),
            device_model=several("device_model"),
        ),
    )


def joined_selection(selections: Sequence[str]) -> str:
    """Return the selection of the joined record, given the selections of its parts.

    It is "" if a part is a complete run, or if all shards of a complete run are present.
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
            missing = sorted({*range(1, of + 1)} - numbers)
            if not missing:
                left[before] = None
                continue
            names = ", ".join(f"{number}/{of}" for number in sorted(numbers))
            left[f"{before} --shard {names}".strip()] = None
    return "" if "" in left else "; ".join(left)


def _place(result: CaseResult, header: Header) -> tuple[int, ...]:
    """Return a sort key by which results have the order that they would have in a single run."""
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
