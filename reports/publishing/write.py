"""`mha-conformance publish`: keep the records of a run, and render the pages from what is kept.

Records are kept whole but for the exchanged arrays, and compressed. The same record gives the same
bytes, so that nothing changes in the repository where nothing new was found. Version control keeps
every edition for ever, hence the limits.
"""

from __future__ import annotations

import datetime
import gzip
import io
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from conformance.errors import ConformanceError
from conformance.progress import progress
from conformance.records.record import Record
from conformance.reports.columns import parts_of
from conformance.reports.load import find_records, load, load_versions
from conformance.reports.model import Loaded
from conformance.reports.publishing.pages import (
    MOST_RECORD,
    MOST_TOGETHER,
    UNSORTED,
    Made,
    Published,
    read_baselines,
    render_index,
    render_page,
    render_table,
    sort,
)
from conformance.reports.writing import build, outcome, read_run
from conformance.text import plural, printable

RECORDS, VERSIONS = "records", "versions"
"""Folders of the records, and of those that are there for their versions only."""

MADE = "made.json"

END = "\n<!-- made by mha-conformance publish -->\n"
"""Ends every page. A file without it was not made here, and is not removed."""


@dataclass(frozen=True)
class Wanted:
    """The options of a publication: inputs and output.

    Attributes:
        records: files or folders; none to render again what is kept in `output`.
        versions: likewise, of the same implementations with other versions.
        expected, expected_versions: names of records that must be there.
        run: file with the id of the run that they must be of.
        output: folder of the records and of the table.
        pages: folder of the pages.
        baselines: files or folders of known deviations.
        add: keep what is in `output` beside these records, and replace only what they measured
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


def publish(wanted: Wanted) -> int:
    """Write the files, and return an exit code as that of a report.

    Raises:
        ConformanceError: records are too large to keep, or something cannot be read or written;
            or one to be added does not fit those that are there.
    """
    with progress("reading records") as advance:
        if wanted.records:
            (_add if wanted.add else _keep_all)(wanted)
        advance("rendering")
        published = read(wanted)
        files = render(published)
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    for stale in set(wanted.pages.glob("*.md")) - set(files):
        if stale.read_text(encoding="utf-8").endswith(END):
            stale.unlink()
    beside = {f"{name}, {record}": known for (record, name), known in published.beside.items()}
    for key, known in {**published.known, **beside}.items():
        times = sum(item.kind == UNSORTED for item in known)
        if times:
            print(printable(f"{key}: {plural(times, 'deviation')} that no baseline sorts"))
    print(printable(f"published: {wanted.output}, {len(files) - 2} pages in {wanted.pages}"))
    return outcome(published.report)


def _keep_all(wanted: Wanted) -> None:
    run = read_run(wanted.run)
    loaded = load(find_records(wanted.records), run)
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
    new = find_records(wanted.records)
    loaded = load([*find_records([wanted.output / RECORDS]), *new])
    if loaded.problems:
        raise ConformanceError("; ".join(loaded.problems))
    keep(loaded.current, wanted.output / RECORDS)
    made = read_made(wanted.output) or _made(0, [], [])
    names = (record.header.name for path, record, _ in loaded.current if path in new)
    expected = list(dict.fromkeys([*made.expected, *names]))
    _write_made(msgspec.structs.replace(made, expected=expected), wanted.output)


def keep(records: Sequence[Loaded], folder: Path) -> int:
    """Write these records into a folder, from which all others are removed.

    Returns:
        How many bytes they have.

    Raises:
        ConformanceError: one of them, or all together, are larger than what may be kept.
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
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for file in folder.glob("*.json.gz"):
        if file.name not in files:
            file.unlink()
    return size


def packed(record: Record) -> bytes:
    """Compress a record, leaving out its arrays, which are kept in another file."""
    text = msgspec.json.encode(msgspec.structs.replace(record, exchange="", digest=""))
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=9, mtime=0, filename="") as file:
        file.write(text)
    return buffer.getvalue()


def _made(minutes: int, expected: Sequence[str], problems: Sequence[str]) -> Made:
    """Describe how records were made on this machine."""
    return Made(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        memory=round(psutil.virtual_memory().total / 2**30),
        minutes=minutes,
        expected=list(expected),
        problems=list(problems),
    )


def _write_made(made: Made, folder: Path) -> None:
    text = msgspec.json.format(msgspec.json.encode(made), indent=1)
    (folder / MADE).write_bytes(text + b"\n")


def read_made(folder: Path) -> Made | None:
    """Return the provenance stored beside the records, or None."""
    try:
        return msgspec.json.decode((folder / MADE).read_bytes(), type=Made)
    except (OSError, msgspec.MsgspecError):
        return None


def _minutes(run: str) -> int:
    """Return the minutes since the run was begun, which is what its id begins with."""
    began = datetime.datetime.strptime(run.partition("-")[0], "%Y%m%dT%H%M%SZ")
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    return round((now - began).total_seconds() / 60)


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = [line.partition(":")[2] for line in text.splitlines() if line.startswith("model name")]
    return names[0].strip() if names else platform.processor() or platform.machine()


def read(wanted: Wanted, root: Path = Path()) -> Published:
    """Read what the pages are made of from the records that are kept; links lead from `root`."""
    loaded = load(find_records([wanted.output / RECORDS]))
    others, refused = load_versions(find_records([wanted.output / VERSIONS]))
    if not loaded.current:
        raise ConformanceError(f"{wanted.output}: no records are kept there; name some to publish")
    made = read_made(wanted.output)
    problems = [*(made.problems if made else ()), *loaded.problems, *refused]
    expected = made.expected if made else ()
    baseline = read_baselines(wanted.baselines)
    return Published(
        report=build(loaded.current, expected, problems, versions=others),
        declared={part.key: part.implementation for part in parts_of(loaded.current)},
        known={part.key: known for part, known in sort(loaded.current, baseline)},
        beside={
            (part.record.header.name, part.implementation.name): known
            for part, known in sort(others, baseline)
        },
        made=made,
        output=wanted.output,
        pages=wanted.pages,
        root=root,
    )


def render(published: Published) -> dict[Path, str]:
    """Return every file by its path."""
    files = {
        published.output / "README.md": render_table(published),
        published.pages / "index.md": render_index(published),
    }
    for column in published.report.columns:
        files[published.pages / f"{column.key}.md"] = render_page(published, column)
    return {path: content + END for path, content in files.items()}
