"""`mha-conformance publish`: store the records of a run, and render the pages from stored records.

Records are stored compressed and without their arrays. Equal records give equal bytes, so that
nothing changes in the repository if nothing new was found. Sizes are limited, because version
control keeps every version of a file forever.
"""

from __future__ import annotations

import datetime
import gzip
import io
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from conformance.errors import BrokenRecord, ConformanceError
from conformance.records.long import Climb, as_record, read_climb
from conformance.records.record import Record, read_exploration, sealed, write_document
from conformance.reports.figures.lengths import plot
from conformance.reports.gate.baseline import read_baselines
from conformance.reports.load import find_records, load, load_versions
from conformance.reports.model import Loaded
from conformance.reports.publishing.pages import (
    EXPLORED,
    LARGE,
    LONG,
    MOST_RECORD,
    MOST_TOGETHER,
    PLOT,
    Known,
    Made,
    Published,
    large_of,
    lengths_of,
    render_index,
    render_page,
    render_table,
    sort,
)
from conformance.reports.publishing.site import SITE, Translator, render_site
from conformance.reports.tables import parts_of
from conformance.reports.wording import UNSORTED
from conformance.reports.writing import build, make_folder, outcome, read_run, write_file
from conformance.text import plural, printable, progress

T = TypeVar("T")

RECORDS, VERSIONS = "records", "versions"
"""The folders of the records, and of those that show other versions of the libraries."""

GPU = "gpu"
"""The folder of what was measured on a GPU, with folders of its own for records, `LARGE` and `LONG`
beside those of the CPU."""

MADE = "made.json"
END = "\n<!-- made by mha-conformance publish -->\n"
"""The end of every page and of the figure; a page without it was not made by this command, and is
not removed."""


@dataclass(frozen=True)
class Wanted:
    """The options of a publication: inputs and output.

    Attributes:
        records: record files or folders; if empty, the records stored in `output` are rendered
            again.
        versions: record files or folders of the same implementations with other versions of their
            libraries; they replace all stored ones, with `add` only those of the same names.
        large: record files or folders of level "large"; if empty, those in `output` are kept.
        gpu: folders of records that were made on a GPU, those of level "large" and of long
            sequences in folders `LARGE` and `LONG` inside; if empty, those in `output` are kept.
        expected, expected_versions: names of records that are required; unused with `add`.
        run: file with the id of the run; records of other runs are left out, unless with `add`.
        output: folder of the records and of the table.
        pages: folder of the pages.
        baselines: files or folders of known deviations.
        translator: function that makes the data of the site's page that translates masks.
        add: whether to keep the records in `output` and replace only those that were measured
            again.
    """

    records: Sequence[Path]
    versions: Sequence[Path]
    expected: Sequence[str]
    expected_versions: Sequence[str]
    run: Path | None
    output: Path
    pages: Path
    baselines: Sequence[Path]
    add: bool = False
    large: Sequence[Path] = ()
    gpu: Sequence[Path] = ()
    translator: Translator = lambda declared: {}


def publish(wanted: Wanted) -> int:
    """Store the records, write the pages, and return the exit code that a report would have.

    Raises:
        ConformanceError: if records are too large to store, if a file cannot be read or written, if
            no record is stored, or if a record to add does not fit those that are stored.
    """
    with progress("reading records") as advance:
        if wanted.add:
            _add(wanted)
        elif wanted.records:
            _keep_all(wanted)
        elif wanted.versions:
            raise ConformanceError("--versions without records replaces nothing; use --add")
        if wanted.large:
            folder = wanted.output / LARGE
            keep(_beside(_narrowed(wanted.large), folder, add=wanted.add), folder)
        if wanted.gpu:
            _keep_gpu(wanted)
        advance("rendering")
        published = read(wanted)
        files = render(published)
    for path, content in files.items():
        write_file(path, content.encode())
    write_file(wanted.output / SITE, render_site(published, wanted.translator))
    for stale in set(wanted.pages.glob("*.md")) - set(files):
        if stale.read_text(encoding="utf-8").endswith(END):
            stale.unlink()
    beside = {f"{name}, {record}": known for (record, name), known in published.beside.items()}
    every = [("", published), *([(f" on {GPU}", published.gpu)] if published.gpu else [])]
    for where, own in every:
        sizes = {f"{name}{where}, {LARGE} or {LONG}": known for name, known in own.sizes.items()}
        beside |= {f"{name}{where}": known for name, known in own.known.items()} | sizes
    for key, known in beside.items():
        if times := sum(item.kind == UNSORTED for item in known):
            print(printable(f"{key}: {plural(times, 'deviation')} that no baseline sorts"))
    for _, own in every:
        for problem in own.report.not_verified.problems:
            print(printable(f"left out: {problem}"))
    for name in published.report.not_verified.missing:
        print(printable(f"expected, and not there: {name}"))
    pages = len(published.columns)
    print(printable(f"published: {wanted.output}, {pages} pages in {wanted.pages}"))
    return outcome(published.report)


def _keep_all(wanted: Wanted) -> None:
    run = read_run(wanted.run)
    loaded = load(find_records(wanted.records), run)
    _check_level(loaded.current)
    others, refused = load_versions(find_records(wanted.versions), run)
    keep(loaded.current, wanted.output / RECORDS)
    keep(others, wanted.output / VERSIONS)
    there = {record.header.name for _, record, _ in others}
    absent = [
        f"{name}: these versions could not be set up, or did not finish"
        for name in wanted.expected_versions
        if name not in there
    ]
    problems = [*loaded.problems, *refused, *absent]
    _write_made(_made(_minutes(run) if run else 0, wanted.expected, problems), wanted.output)


def _add(wanted: Wanted) -> None:
    if wanted.versions:
        folder = wanted.output / VERSIONS
        keep(_beside(find_records(wanted.versions), folder, add=True), folder)
    if not (new := find_records(wanted.records)):
        return
    loaded = load([*find_records([wanted.output / RECORDS]), *new])
    if loaded.problems:
        raise ConformanceError("; ".join(loaded.problems))
    _check_level(loaded.current)
    keep(loaded.current, wanted.output / RECORDS)
    made = read_made(wanted.output) or _made(0, [], [])
    names = (record.header.name for path, record, _ in loaded.current if path in new)
    expected = list(dict.fromkeys([*made.expected, *names]))
    _write_made(msgspec.structs.replace(made, expected=expected), wanted.output)


def _check_level(loaded: Iterable[Loaded]) -> None:
    """Raise `ConformanceError` if a record was made at another level than "full"."""
    for path, record, _ in loaded:
        if record.header.provenance.level != "full":
            raise ConformanceError(
                f"{path.name}: its level is {record.header.provenance.level!r}; pages are made of "
                "records of --level full"
            )


def _narrowed(paths: Sequence[Path]) -> list[Path]:
    """Return files, and those records in folders that `find_records` leaves out."""
    return [
        file
        for path in paths
        for file in (sorted(path.glob("*.narrowed.json")) if path.is_dir() else [path])
    ]


def _beside(new: Sequence[Path], folder: Path, *, add: bool, device: str = "") -> Sequence[Loaded]:
    """Return the records to store in a folder; with `add`, also those that are already there.

    Raises:
        ConformanceError: if a record cannot be read, or was made on another device than `device`.
    """
    names = {_name(path) for path in new}
    old = [path for path in folder.glob("*.json.gz") if _name(path) not in names]
    loaded, problems = load_versions([*new, *(old if add else [])])
    if problems:
        raise ConformanceError("; ".join(problems))
    for path, record, _ in loaded:
        _check_device(path, record.header.provenance.device, device)
    # Of a run that was begun again, the record that is whole replaces the one that is not.
    return sorted(loaded, key=lambda item: item[1].complete)


def _name(path: Path) -> str:
    """Return the name of a record's file without what says its form; versions have dots too."""
    return re.sub(r"(\.narrowed)?\.json(\.gz|\.journal)?$", "", path.name)


def _keep_gpu(wanted: Wanted) -> None:
    """Store what was measured on a GPU; with `add`, keep what is already stored."""
    folder = wanted.output / GPU
    for path in wanted.gpu:
        if not path.is_dir():
            raise ConformanceError(f"{path}: no folder of records")
    kept = {}
    for inside, place in (("", folder / RECORDS), (LARGE, folder / LARGE)):
        places = [path / inside for path in wanted.gpu if (path / inside).is_dir()]
        new = [*find_records(places), *_narrowed(places)]
        kept[place] = _beside(new, place, add=wanted.add, device=GPU)
    climbs: dict[str, Climb] = {}
    for path in wanted.gpu:
        climbs |= _read_each(path / LONG, read_climb, lambda it: it.implementation.name)
    for name, climb in climbs.items():
        _check_device(Path(f"{name}.json"), climb.provenance.device, GPU)
    if not (climbs or any(kept.values())):
        raise ConformanceError(f"{wanted.gpu[0]}: no records are there")
    # Everything was read, so nothing is replaced by a part of what was given.
    for place, records in kept.items():
        keep(records, place)
    old = set() if wanted.add else {*(folder / LONG).glob("*.json")}
    for path in old - {folder / LONG / f"{name}.json" for name in climbs}:
        path.unlink()
    for name, climb in climbs.items():
        write_document(folder / LONG / f"{name}.json", climb)


def _check_device(path: Path, device: str, wanted: str) -> None:
    if wanted and device != wanted:
        raise ConformanceError(f"{path.name}: it was made on the device {device!r}, not {wanted!r}")


def keep(records: Sequence[Loaded], folder: Path) -> None:
    """Write these records into a folder and remove all other records from it.

    Raises:
        ConformanceError: if one record, or all of them together, exceed the size limit.
    """
    files = {f"{record.header.name}.json.gz": packed(record) for _, record, _ in records}
    for name, content in files.items():
        if len(content) > MOST_RECORD:
            raise ConformanceError(
                f"{name}: {len(content):,} bytes, {MOST_RECORD:,} are the most that a published "
                "record can have; examine fewer implementations in one environment"
            )
    size = sum(map(len, files.values()))
    if size > MOST_TOGETHER:
        raise ConformanceError(
            f"{folder}: {size:,} bytes, {MOST_TOGETHER:,} are the most that published records "
            "can have together"
        )
    make_folder(folder)
    for name, content in files.items():
        write_file(folder / name, content)
    for file in folder.glob("*.json.gz"):
        if file.name not in files:
            file.unlink()


def packed(record: Record) -> bytes:
    """Return a record in compressed form, without what concerns files of this machine alone."""
    replace = msgspec.structs.replace
    implementations = [replace(one, inputs={}) for one in record.header.implementations]
    header = replace(record.header, implementations=implementations)
    kept = replace(record, header=header, exchange="", digest="")
    text = msgspec.json.encode(sealed(kept) if record.seal else kept)
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=9, mtime=0, filename="") as file:
        file.write(text)
    return buffer.getvalue()


def _made(minutes: int, expected: Sequence[str], problems: Sequence[str]) -> Made:
    return Made(
        cores=os.cpu_count() or 1,
        memory=round(psutil.virtual_memory().total / 2**30),
        minutes=minutes,
        expected=list(expected),
        problems=list(problems),
    )


def _write_made(made: Made, folder: Path) -> None:
    text = msgspec.json.format(msgspec.json.encode(made), indent=1)
    write_file(folder / MADE, text + b"\n")


def read_made(folder: Path) -> Made | None:
    """Return how the records in a folder were made; None if `MADE` is missing there or invalid."""
    try:
        return msgspec.json.decode((folder / MADE).read_bytes(), type=Made)
    except (OSError, msgspec.MsgspecError):
        return None


def _minutes(run: str) -> int:
    """Return the minutes since the start of a run; its id begins with the time of the start."""
    began = datetime.datetime.strptime(run.partition("-")[0], "%Y%m%dT%H%M%SZ")
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    return round((now - began).total_seconds() / 60)


def read(wanted: Wanted, root: Path = Path()) -> Published:
    """Read the stored records and all other data for the pages.

    Links in baselines are relative to `root`.

    Raises:
        ConformanceError: if no record is stored, or another file cannot be read.
    """
    loaded = load(find_records([wanted.output / RECORDS]))
    others, refused = load_versions(find_records([wanted.output / VERSIONS]))
    if not loaded.current:
        raise ConformanceError(f"{wanted.output}: no records are kept there; name some to publish")
    problems = [*loaded.problems, *refused]
    published = _read(wanted, loaded.current, problems, root, versions=others)
    folder = wanted.output / GPU
    if not folder.is_dir():
        return published
    # Nobody has every GPU again when a case is added, so records of other catalogues stay.
    on_gpu, refused = load_versions(_stored(folder / RECORDS))
    gpu = _read(replace(wanted, output=folder), on_gpu, refused, root)
    return replace(published, gpu=gpu) if gpu.origins else published


def _read(
    wanted: Wanted,
    records: Sequence[Loaded],
    problems: Sequence[str],
    root: Path,
    versions: Sequence[Loaded] = (),
) -> Published:
    """Return the data for the pages, given the records of one kind of device.

    All other files are read from `wanted.output`.
    """
    large, refused = load_versions(_stored(wanted.output / LARGE))
    climbs = _read_each(wanted.output / LONG, read_climb, lambda it: it.implementation.name)
    explored = _read_each(wanted.output / EXPLORED, read_exploration, lambda it: it.implementation)
    made = read_made(wanted.output)
    problems = [*(made.problems if made else ()), *problems, *refused]
    expected = made.expected if made else ()
    baseline = read_baselines(wanted.baselines)
    at_length: list[Loaded] = [(Path(name), as_record(climb), {}) for name, climb in climbs.items()]
    sizes: dict[str, list[Known]] = {}
    for part, known in sort([*large, *at_length], baseline):
        sizes.setdefault(part.implementation.name, []).extend(known)
    return Published(
        report=build(records, expected, problems, versions=versions),
        declared={part.key: part.implementation for part in parts_of(records)},
        explored=explored,
        known={part.key: known for part, known in sort(records, baseline)},
        beside={
            (part.record.header.name, part.implementation.name): known
            for part, known in sort(versions, baseline)
        },
        large={part.implementation.name: large_of(part, baseline) for part in parts_of(large)},
        lengths={name: lengths_of(climb, baseline) for name, climb in climbs.items()},
        sizes=sizes,
        climbs=climbs,
        versions=versions,
        origins={
            part.implementation.name: part for part in parts_of([*large, *at_length, *records])
        },
        made=made,
        output=wanted.output,
        pages=wanted.pages,
        root=root,
    )


def _stored(folder: Path) -> list[Path]:
    return find_records([folder] if folder.is_dir() else [])


def _read_each(
    folder: Path, read: Callable[[Path], T], name_of: Callable[[T], str]
) -> dict[str, T]:
    """Return the result of `read` for each JSON file in a folder, by implementation.

    `name_of` takes such a result, and returns the name of its implementation.

    Raises:
        BrokenRecord: if a file cannot be read, or is not named after its implementation.
    """
    found = {path: read(path) for path in sorted(folder.glob("*.json"))}
    for path, one in found.items():
        if name_of(one) != path.stem:
            raise BrokenRecord(f"{path} is not about {path.stem}")
    return {path.stem: one for path, one in found.items()}


def render(published: Published) -> dict[Path, str]:
    """Return the content of every page and figure, by path."""
    files = {
        published.output / "README.md": render_table(published),
        published.pages / "index.md": render_index(published),
    }
    for column in published.columns:
        files[published.pages / f"{column.key}.md"] = render_page(published, column)
    for own in filter(None, (published, published.gpu)):
        if own.climbs:
            files[own.output / PLOT] = plot(list(own.climbs.values()))
    return {path: content + END for path, content in files.items()}
