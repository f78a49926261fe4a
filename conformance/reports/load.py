"""Read records from files, and leave out those that cannot be read or do not fit together.

Records are comparable only if they come from one version of the suite and cases of the same name
pose the same problem, so records that differ from the majority in this are left out. A line is
returned about each record that is left out; the report is made from the others. Earlier records of
the same implementations are not part of the tables; they are shown as the trend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from msgspec.structs import replace

from conformance.errors import BrokenRecord
from conformance.records.header import Implementation
from conformance.records.record import Record, journal_path, read, read_arrays
from conformance.reports.model import Loaded


def find_records(paths: Iterable[Path]) -> list[Path]:
    """Return the given files, and the records in each given folder, including unfinished ones.

    In a folder, records of runs that options restricted ("*.narrowed.json*") are left out, because
    they lie beside the complete records. A file that is given by name is never left out.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            patterns = ("*.json", "*.json.gz", "*.json.journal")
            inside = {file for pattern in patterns for file in path.glob(pattern)}
            files += sorted(file for file in inside if ".narrowed.json" not in file.name)
        else:
            files.append(path)
    return files


class Read(NamedTuple):
    """The records that were read.

    Attributes:
        current: the records that belong together.
        earlier: older records of the same implementations.
        problems: one line about each file that was left out.
    """

    current: list[Loaded]
    earlier: list[Loaded]
    problems: list[str]


def load(paths: Iterable[Path], run: str = "") -> Read:
    """Read records, and separate them into current, earlier and unusable ones.

    Args:
        paths: files; see `find_records` for folders.
        run: id of a run; records of other runs are left out. "" accepts all runs.
    """
    loaded, problems = _read_all(paths, run, arrays=True)
    loaded, earlier = _latest(_with_distinct_names(loaded))
    loaded, of_other_kind = _of_one_kind(loaded)
    loaded, twins = _without_twins(loaded)
    return Read(loaded, earlier, [*problems, *of_other_kind, *twins])


def load_versions(paths: Iterable[Path], run: str = "") -> tuple[list[Loaded], list[str]]:
    """Read records of several versions of the same implementations, without choosing among them.

    Returns:
        The records, without their arrays, and one line about each file that was left out.
    """
    return _read_all(paths, run, arrays=False)


def _read_all(paths: Iterable[Path], run: str, *, arrays: bool) -> tuple[list[Loaded], list[str]]:
    loaded: list[Loaded] = []
    broken, refused = [], []
    for path in paths:
        try:
            record = read(path)
            item: Loaded = (path, record, read_arrays(path, record) if arrays else {})
        except BrokenRecord as error:
            # A report may be published, so it must not reveal the folder of its files.
            folder = str(path.parent)
            message = str(error)
            broken.append(message if folder == "." else message.replace(f"{folder}/", ""))
            continue
        own_run = record.header.provenance.run
        if run and own_run != run:
            reason = f"is of run {own_run}, this report is of run {run}"
            refused.append(_refused(path, record, reason))
        else:
            loaded.append(item)
    return loaded, broken + refused


def _with_distinct_names(loaded: Sequence[Loaded]) -> list[Loaded]:
    """Return the records with another name for functions of one name in several files.

    Functions `f` in "a.py" and in "b.py" are two implementations, "a.f" and "b.f". Two places are
    the same file if one is the end of the other, because a file may be given from another folder.
    """
    places: dict[str, list[tuple[str, ...]]] = {}
    for _, record, _ in loaded:
        for one in record.header.implementations:
            own, known = _place(one.spec), places.setdefault(one.name, [])
            if own and not any(_is_same(own, other) for other in known):
                known.append(own)
    return [
        _renamed(item, {one.name: _name_of(one, places[one.name]) for one in _all(item)})
        for item in loaded
    ]


def _all(item: Loaded) -> list[Implementation]:
    return item[1].header.implementations


def _place(spec: str) -> tuple[str, ...]:
    """Return the parts of the file or module in an implementation's spec; () for other names."""
    place, colon, _ = spec.partition(":")
    if place.endswith(".py"):
        return PurePath(place.removesuffix(".py")).parts
    return tuple(place.split(".")) if colon else ()


def _is_same(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    shorter = min(len(one), len(other))
    return one[-shorter:] == other[-shorter:]


def _name_of(one: Implementation, places: Sequence[tuple[str, ...]]) -> str:
    """Return a name with as many parts of the implementation's place as distinguish it."""
    own = _place(one.spec)
    if len(places) < 2 or not own:
        return one.name
    others = [place for place in places if not _is_same(place, own)]
    most = next(n for n in range(1, len(own) + 1) if not any(o[-n:] == own[-n:] for o in others))
    return ".".join([*own[-most:], one.name])


def _renamed(item: Loaded, names: dict[str, str]) -> Loaded:
    """Return a record in which implementations have the names in `names`."""
    path, record, arrays = item
    if all(name == other for name, other in names.items()):
        return item
    implementations = [
        replace(
            one,
            name=names[one.name],
            title=names[one.name] if one.title == one.name else one.title,
        )
        for one in _all(item)
    ]
    results = [replace(one, implementation=names[one.implementation]) for one in record.results]
    header = replace(record.header, implementations=implementations)
    renamed = {}
    for key, array in arrays.items():
        name, colon, rest = key.partition(":")
        renamed[f"{names[name]}{colon}{rest}"] = array
    return path, replace(record, header=header, results=results), renamed


def _latest(loaded: Sequence[Loaded]) -> tuple[list[Loaded], list[Loaded]]:
    """Return the current records in the given order, and the replaced ones, the oldest first.

    A complete record of a run that no option restricted is replaced if, for each implementation in
    it, there is a later record of this kind for the same device.
    """
    by_age = sorted(loaded, key=lambda item: _created(item[1]))
    whole = [
        item for item in by_age if item[1].complete and not item[1].header.provenance.selection
    ]
    latest = {key: _created(record) for _, record, _ in whole for key in _contestants(record)}
    earlier = [
        item
        for item in whole
        if (keys := _contestants(item[1])) and all(_created(item[1]) < latest[key] for key in keys)
    ]
    replaced = {id(record) for _, record, _ in earlier}
    return [item for item in loaded if id(item[1]) not in replaced], earlier


def _created(record: Record) -> str:
    return record.header.provenance.created


def _contestants(record: Record) -> set[tuple[str, str]]:
    """Return the implementations of a record, each as a pair of its name and the device."""
    device = record.header.provenance.device
    return {(one.name, device) for one in record.header.implementations}


def _of_one_kind(loaded: Sequence[Loaded]) -> tuple[list[Loaded], list[str]]:
    """Return the records with the most frequent suite version and catalogue.

    Also return a line about each record that is left out, with the reason. If two combinations are
    equally frequent, the first is taken. A record of the same suite version, but another catalogue,
    is kept too if it shares cases with the kept records and these cases have equal hashes, for
    example after a case was added to the catalogue.
    """
    kinds = Counter(_kind(record) for _, record, _ in loaded)
    if len(kinds) < 2:
        return list(loaded), []
    suite, catalogue = kinds.most_common(1)[0][0]
    cases: dict[str, str] = {}
    for _, record, _ in loaded:
        if _kind(record) == (suite, catalogue):
            cases |= _hashes(record)
    kept, refused = [], []
    for item in loaded:
        path, record, _ = item
        own_suite, own_catalogue = _kind(record)
        reasons = []
        if own_suite != suite:
            reasons.append(f"suite version is {own_suite}, the other records have {suite}")
        if own_catalogue != catalogue and not _same_questions(cases, _hashes(record)):
            reasons.append(f"catalogue hash is {own_catalogue}, the other records have {catalogue}")
        if reasons:
            refused.append(_refused(path, record, "; ".join(reasons)))
        else:
            kept.append(item)
            cases |= _hashes(record)
    return kept, refused


def _hashes(record: Record) -> dict[str, str]:
    """Return the hash of each case, by name; "" if the record does not contain the hash."""
    return {name: case.hash for name, case in record.header.cases.items()}


def _same_questions(one: dict[str, str], other: dict[str, str]) -> bool:
    """Return whether two records share cases, all with equal, known hashes.

    `one` and `other` map the names of the records' cases to their hashes.
    """
    shared = one.keys() & other.keys()
    return bool(shared) and all(one[name] and one[name] == other[name] for name in shared)


def _without_twins(loaded: Sequence[Loaded]) -> tuple[list[Loaded], list[str]]:
    """Return the records without duplicates, and a line about each record that is left out.

    A record is left out as a whole if one of its implementations is already in another record
    of the same device; complete records are preferred to incomplete ones.
    """
    places: dict[tuple[str, str], Path] = {}
    left_out: set[int] = set()
    refused = []
    for path, record, _ in sorted(loaded, key=lambda item: not item[1].complete):
        contestants = _contestants(record)
        twins = sorted(contestants & places.keys())
        if not twins:
            places |= dict.fromkeys(contestants, path)
            continue
        name, device = twins[0]
        other = places[twins[0]]
        reason = f"{name} on {device} is already in {other.name}"
        if path == journal_path(other):
            reason += ", which an unfinished run was to replace"
        refused.append(f"{path.name}: left out; {reason}; give one of the two")
        left_out.add(id(record))
    return [item for item in loaded if id(item[1]) not in left_out], refused


def _kind(record: Record) -> tuple[str, str]:
    made = record.header.provenance
    return made.suite.partition("+")[0], made.catalogue


def _refused(path: Path, record: Record, reason: str) -> str:
    return f"{path.name}: left out; {reason}; run tox -e {record.header.name} again"
