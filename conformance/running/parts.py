"""A record that is made in parts: a shard of the items each, joined into one at the end.

Parts of one implementation may differ in what they asked (a shard, a dtype, some cases) and in the
machine that answered. Where two of them answered the same item, they have to agree.
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

from conformance.cases.catalogue import catalogue
from conformance.definition.dtypes import DTYPES, Array
from conformance.errors import ConformanceError
from conformance.experiments import EXPERIMENTS
from conformance.records.findings import NOT_VERIFIED, CaseResult
from conformance.records.header import Header, Implementation
from conformance.records.record import (
    PICTURED,
    Journal,
    Record,
    check_writable,
    encode_line,
    finish,
    read,
    read_arrays,
)
from conformance.running.examiner import Worst, kept
from conformance.running.session import Inquiry, Item

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_SHARD = re.compile(r"(?:^| )--shard (\d+)/(\d+)$")


# One process writes a record


class Lock:
    """Holds a record while a run writes it.

    The lock is the kernel's, so it ends with the process, however that ends. On a platform without
    such locks nothing is held.

    Raises:
        ConformanceError: another run writes this record; the message says which.
    """

    def __init__(self, record: Path) -> None:
        self._path = record.with_name(record.name + ".lock")
        self._file: IO[str] | None = None
        while fcntl is not None and self._file is None:
            self._file = self._attempt(record)

    def _attempt(self, record: Path) -> IO[str] | None:
        """The locked file; None if the one that held it has just taken it away."""
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
        """Let others write."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


# Shards


def parse_shard(text: str) -> tuple[int, int]:
    """ "2/8" as (2, 8); raises `ConformanceError`."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    number, of = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= of:
        raise ConformanceError(f"--shard is {text!r}; say which of how many, such as 2/8")
    return number, of


def part(
    items: Sequence[Item], asked: Sequence[Inquiry], number: int, of: int
) -> list[Item | Inquiry]:
    """One of so many equal parts of a plan, in the plan's order.

    Items that share an expectation stay together. Nothing but the plan decides, so that machines
    which plan the same need not talk to each other.
    """
    planned: list[Item | Inquiry] = [*items, *asked]
    if of == 1:
        return planned
    groups: dict[tuple[str, str], list[Item | Inquiry]] = defaultdict(list)
    for item in planned:
        if isinstance(item, Item):
            groups[item.dtype, item.case.id].append(item)
        else:
            groups[item.adapter.name, item.experiment.id].append(item)
    # By dtype before by case: an implementation that lacks a dtype answers at once there.
    ordered = sorted(groups.items(), key=lambda each: (-len(each[1]), each[0][0]))
    sizes = [0] * of
    chosen: set[str] = set()
    for _, group in ordered:
        smallest = sizes.index(min(sizes))
        sizes[smallest] += len(group)
        if smallest == number - 1:
            chosen |= {item.id for item in group}
    return [item for item in planned if item.id in chosen]


# Joining


class Joined(NamedTuple):
    """A record made of parts.

    Attributes:
        record: it has what the first part says that verified an item.
        contradictions: a line about each item of which two parts say something else.
    """

    record: Record
    contradictions: list[str]


def join(files: Sequence[Path], output: Path) -> Joined:
    """Write the record of which these are parts.

    Raises:
        BrokenRecord: a part cannot be read.
        ConformanceError: parts are of other code, versions or devices, so they are none of one run;
            or the output cannot be written.
    """
    parts = [(file, read(file)) for file in files]
    header = _joined_header([(file.name, record.header) for file, record in parts], output.stem)
    results: dict[str, CaseResult] = {}
    arrays: dict[str, dict[str, Array]] = defaultdict(dict)
    source: dict[str, Path] = {}
    contradictions: list[str] = []
    for file, record in parts:
        measured = record.header.provenance.created[:10]
        own = read_arrays(file, record)
        taken: set[str] = set()
        for result in record.results:
            name, known = result.id, results.get(result.id)
            if known is not None and known.verdict not in NOT_VERIFIED:
                if result.verdict not in NOT_VERIFIED and not _agree(known, result):
                    contradictions.append(
                        f"{name}: {known.verdict} in {source[name].name}, "
                        f"{result.verdict} in {file.name}{_difference(known, result)}"
                    )
                continue
            day = result.measured or measured
            day = "" if day == header.provenance.created[:10] else day
            results[name] = msgspec.structs.replace(result, measured=day)
            source[name] = file
            taken.add(name)
        for name, array in own.items():
            item, _, kind = name.rpartition("|")
            if item in taken:
                arrays[item][kind] = array
    order = sorted(results, key=lambda name: _place(results[name], header))
    open_items = [name for name in order if results[name].verdict == "not-run"]
    order = [name for name in order if name not in open_items]
    header = msgspec.structs.replace(header, planned=len(results))
    check_writable(output)
    lock = Lock(output)
    try:
        lines = (encode_line(results[name], arrays[name]) for name in order)
        Journal(output, header, lines).close()
        drawn = {name: i for i, name in enumerate(order) if {*PICTURED} & arrays[name].keys()}
        worst = Worst(drawn)
        for name in order:
            worst.takes(results[name])
        missing = [results[name] for name in open_items]
        record = finish(output, missing, order, kept(worst.ids, drawn))
    finally:
        lock.release()
    return Joined(record, contradictions)


def _agree(one: CaseResult, other: CaseResult) -> bool:
    """Whether two measurements say the same; a figure may differ by rounding between machines."""
    said = [
        (r.verdict, [(f.requirement, f.verdict, f.value) for f in r.findings]) for r in (one, other)
    ]
    return said[0] == said[1]


def _difference(one: CaseResult, other: CaseResult) -> str:
    """Which requirements they judge otherwise, where the verdicts are the same."""
    if one.verdict != other.verdict:
        return ""
    first = {finding.requirement: (finding.verdict, finding.value) for finding in one.findings}
    second = {finding.requirement: (finding.verdict, finding.value) for finding in other.findings}
    names = sorted(n for n in first.keys() | second.keys() if first.get(n) != second.get(n))
    return f", but otherwise for {', '.join(names)}"


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
            known = implementations.setdefault(one.name, one)
            if (known.digest, known.versions) != (one.digest, one.versions):
                what = "versions" if known.versions != one.versions else "code"
                raise ConformanceError(
                    f"{other_name} is no part of what {first_name} is of: {one.name} has other "
                    f"{what} there"
                )
    headers = [header for _, header in parts]
    made = [header.provenance for header in headers]

    def several(field: str) -> str:
        return "; ".join(dict.fromkeys(getattr(each, field) for each in made))

    packages = {name: version for each in made for name, version in each.packages.items()}
    ids = [case.id for case in catalogue()]
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
            selection=_joined_selection([each.selection for each in made]),
            platform=several("platform"),
            machine=several("machine"),
            device_model=several("device_model"),
        ),
    )


def _joined_selection(selections: Sequence[str]) -> str:
    """What still narrows the whole: nothing, if one part was whole or all shards are there."""
    shards: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    left: dict[str, None] = {}
    for selection in selections:
        found = _SHARD.search(selection)
        if found is None:
            left[selection] = None
        else:
            shards[selection[: found.start()]][int(found[2])].add(int(found[1]))
    for before, counts in shards.items():
        for of, numbers in counts.items():
            missing = sorted({*range(1, of + 1)} - numbers)
            if not missing:
                left[before] = None
                continue
            told = ", ".join(f"{number}/{of}" for number in sorted(numbers))
            left[f"{before} --shard {told}".strip()] = None
    return "" if "" in left else "; ".join(left)


def _place(result: CaseResult, header: Header) -> tuple[int, ...]:
    """Where an item stands in the plan of one run: see `plan` and `inquiries`."""
    names = [one.name for one in header.implementations]
    own = header.implementations[names.index(result.implementation)]
    implementation, mode = names.index(result.implementation), _index(own.modes, result.mode)
    if result.case in header.cases:
        case = list(header.cases).index(result.case)
        return 0, case, _index(list(DTYPES), result.dtype), implementation, mode
    experiment = _index([topic.id for topic in header.topics], result.case)
    return 1, implementation, experiment, mode, 0


def _index(known: Sequence[object], one: object) -> int:
    return known.index(one) if one in known else len(known)
