"""Records from files: what cannot be used, or does not belong, is named and left out.

A report that mixes records in which one case asks different questions would compare answers to
different questions, so such records are refused; none of it stops the report. Earlier records of
the same implementations are no part of the tables: they make the trend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from conformance.errors import BrokenRecord
from conformance.records.record import Record, journal_path, read, read_arrays
from conformance.reports.model import Loaded


def find_records(paths: Iterable[Path]) -> list[Path]:
    """Files as given; of a folder, its records, and journals of runs that did not finish.

    Records of narrowed runs are left out of folders: they lie beside the whole ones.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        whole = [
            file
            for pattern in ("*.json", "*.json.gz")
            for file in path.glob(pattern)
            if not file.name.endswith(".narrowed.json")
        ]
        unfinished = [
            file
            for file in path.glob("*.json.journal")
            if not file.name.endswith(".narrowed.json.journal")
        ]
        found += sorted([*whole, *unfinished])
    return found


class Read(NamedTuple):
    """What was read.

    Attributes:
        current: the records that belong together.
        earlier: records of the same implementations that were made before those.
        problems: a line about each file that is left out.
    """

    current: list[Loaded]
    earlier: list[Loaded]
    problems: list[str]


def load(paths: Iterable[Path], run: str = "") -> Read:
    """Read records and sort them.

    Args:
        paths: files; see `find_records` for folders.
        run: refuse records of any other run.
    """
    loaded: list[Loaded] = []
    problems: list[str] = []
    for path in paths:
        try:
            record = read(path)
            loaded.append((path, record, read_arrays(path, record)))
        except BrokenRecord as error:
            problems.append(_without_folder(str(error), path))
    loaded, refused = _of_one_run(loaded, run)
    problems += refused
    loaded, earlier = _latest(loaded)
    loaded, refused = _of_one_kind(loaded)
    problems += refused
    loaded, refused = _without_twins(loaded)
    return Read(loaded, earlier, problems + refused)


def load_versions(paths: Iterable[Path], run: str = "") -> tuple[list[Loaded], list[str]]:
    """Records that stand beside each other: the same implementations with other versions.

    Args:
        paths: files; see `find_records` for folders.
        run: refuse records of any other run.
    """
    loaded: list[Loaded] = []
    problems: list[str] = []
    for path in paths:
        try:
            loaded.append((path, read(path), {}))
        except BrokenRecord as error:
            problems.append(_without_folder(str(error), path))
    kept, refused = _of_one_run(loaded, run)
    return kept, problems + refused


def load_records(paths: Iterable[Path], run: str = "") -> tuple[list[Loaded], list[str]]:
    """As `load`, for those who do not look back."""
    found = load(paths, run)
    return found.current, found.problems


def _of_one_run(loaded: Sequence[Loaded], run: str) -> tuple[list[Loaded], list[str]]:
    kept, refused = [], []
    for item in loaded:
        path, record, _ = item
        if run and record.header.provenance.run != run:
            told = f"is of run {record.header.provenance.run}, this report is of run {run}"
            refused.append(_refused(path, record, told))
        else:
            kept.append(item)
    return kept, refused


def _latest(loaded: Sequence[Loaded]) -> tuple[list[Loaded], list[Loaded]]:
    """The records, and apart from them those that whole later ones replace, the oldest first."""
    latest: dict[tuple[str, str], str] = {}
    for _, record, _ in loaded:
        if _whole(record):
            for key in _contestants(record):
                latest[key] = max(latest.get(key, ""), _created(record))
    kept: list[Loaded] = []
    earlier: list[Loaded] = []
    for item in loaded:
        record = item[1]
        own = _contestants(record)
        old = own and all(_created(record) < latest.get(key, "") for key in own)
        (earlier if old and _whole(record) else kept).append(item)
    return kept, sorted(earlier, key=lambda item: _created(item[1]))


def _whole(record: Record) -> bool:
    """What ended early, or was asked for a part only, neither replaces a record nor is compared."""
    return record.complete and not record.header.provenance.selection


def _created(record: Record) -> str:
    return record.header.provenance.created


def _contestants(record: Record) -> set[tuple[str, str]]:
    """Who answered, and on which device."""
    device = record.header.provenance.device
    return {(told.name, device) for told in record.header.implementations}


def _of_one_kind(loaded: Sequence[Loaded]) -> tuple[list[Loaded], list[str]]:
    """The suite version and catalogue that most records have; the first one's, if in doubt.

    A record of another catalogue belongs to them if the cases that it shares with them are the
    same, as after a case was added.
    """
    kinds = Counter(_kind(record) for _, record, _ in loaded)
    if len(kinds) < 2:
        return list(loaded), []
    suite, catalogue = kinds.most_common(1)[0][0]
    asked: dict[str, str] = {}
    for _, record, _ in loaded:
        if _kind(record) == (suite, catalogue):
            asked |= _hashes(record)
    kept, refused = [], []
    for item in loaded:
        path, record, _ = item
        own_suite, own_catalogue = _kind(record)
        told = []
        if own_suite != suite:
            told.append(f"suite version is {own_suite}, the other records have {suite}")
        if own_catalogue != catalogue and not _same_questions(asked, _hashes(record)):
            told.append(f"catalogue hash is {own_catalogue}, the other records have {catalogue}")
        if told:
            refused.append(_refused(path, record, "; ".join(told)))
        else:
            kept.append(item)
            asked |= _hashes(record)
    return kept, refused


def _hashes(record: Record) -> dict[str, str]:
    """The hash of each case, "" where the record does not have it."""
    return {name: case.hash for name, case in record.header.cases.items()}


def _same_questions(one: dict[str, str], other: dict[str, str]) -> bool:
    """Whether they share cases, and every one of these is known to be the same."""
    shared = one.keys() & other.keys()
    return bool(shared) and all(one[name] and one[name] == other[name] for name in shared)


def _without_twins(loaded: Sequence[Loaded]) -> tuple[list[Loaded], list[str]]:
    """Each implementation once per device: a second record of it would count twice."""
    known: dict[tuple[str, str], Path] = {}
    left_out: set[int] = set()
    refused = []
    for index in sorted(range(len(loaded)), key=lambda index: not loaded[index][1].complete):
        path, record, _ = loaded[index]
        own = _contestants(record)
        twins = sorted(own & known.keys())
        if twins:
            name, device = twins[0]
            other = known[twins[0]]
            told = f"{name} on {device} is already in {other.name}"
            if path == journal_path(other):
                told += ", which an unfinished run was to replace"
            refused.append(f"{path.name}: left out; {told}; give one of the two")
            left_out.add(index)
        else:
            known |= dict.fromkeys(own, path)
    return [item for index, item in enumerate(loaded) if index not in left_out], refused


def _kind(record: Record) -> tuple[str, str]:
    return record.header.provenance.suite, record.header.provenance.catalogue


def _refused(path: Path, record: Record, told: str) -> str:
    return f"{path.name}: left out; {told}; run tox -e {record.header.name} again"


def _without_folder(message: str, path: Path) -> str:
    """A report may be published, so it does not tell where its files lay."""
    folder = str(path.parent)
    return message if folder == "." else message.replace(f"{folder}/", "")
