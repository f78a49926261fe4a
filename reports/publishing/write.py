"""`mha-conformance publish`: keep the records of a run, and render the pages from what is kept."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from conformance.errors import ConformanceError
from conformance.progress import progress
from conformance.reports.columns import column_keys, declared
from conformance.reports.joining import build
from conformance.reports.load import find_records, load, load_versions
from conformance.reports.publishing import keep
from conformance.reports.publishing.pages import Published, render_index, render_page, render_table
from conformance.reports.publishing.sorting import UNSORTED, read_baselines, sort, sort_versions
from conformance.reports.wording import plural
from conformance.reports.writing import outcome, read_run
from conformance.text import printable

MADE = "\n<!-- made by mha-conformance publish -->\n"
"""Ends every page. A file without it is somebody else's, and is not taken away."""


@dataclass(frozen=True)
class Wanted:
    """What to publish, and where.

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
    """Write the files; an exit code as that of a report.

    Raises:
        ConformanceError: records are too large to keep, or something cannot be read or written;
            or one to be added does not fit those that are there.
    """
    with progress("reading records") as advance:
        if wanted.records:
            (_add if wanted.add else _keep)(wanted)
        advance("rendering")
        published = read(wanted)
        files = render(published)
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    for stale in set(wanted.pages.glob("*.md")) - set(files):
        if stale.read_text(encoding="utf-8").endswith(MADE):
            stale.unlink()
    beside = {f"{name}, {record}": known for (record, name), known in published.beside.items()}
    for key, known in {**published.known, **beside}.items():
        times = sum(item.kind == UNSORTED for item in known)
        if times:
            print(printable(f"{key}: {plural(times, 'deviation')} that no baseline sorts"))
    print(printable(f"published: {wanted.output}, {len(files) - 2} pages in {wanted.pages}"))
    return outcome(published.report)


def _keep(wanted: Wanted) -> None:
    run = read_run(wanted.run)
    found = load(find_records(wanted.records), run)
    others, refused = load_versions(find_records(wanted.versions), run)
    keep.keep(found.current, wanted.output / keep.RECORDS)
    keep.keep(others, wanted.output / keep.VERSIONS)
    there = {record.header.name for _, record, _ in others}
    absent = [
        f"{name}: these versions could not be set up, or did not finish"
        for name in wanted.expected_versions
        if name not in there
    ]
    problems = [*found.problems, *refused, *absent]
    made = keep.made_here(_minutes(run) if run else 0, wanted.expected, problems)
    keep.write_made(made, wanted.output)


def _add(wanted: Wanted) -> None:
    new = find_records(wanted.records)
    found = load([*find_records([wanted.output / keep.RECORDS]), *new])
    if found.problems:
        raise ConformanceError("; ".join(found.problems))
    keep.keep(found.current, wanted.output / keep.RECORDS)
    made = keep.read_made(wanted.output) or keep.made_here(0, [], [])
    names = (record.header.name for path, record, _ in found.current if path in new)
    expected = list(dict.fromkeys([*made.expected, *names]))
    keep.write_made(msgspec.structs.replace(made, expected=expected), wanted.output)


def _minutes(run: str) -> int:
    """Since the run was begun, which is what its id begins with."""
    began = datetime.datetime.strptime(run.partition("-")[0], "%Y%m%dT%H%M%SZ")
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    return round((now - began).total_seconds() / 60)


def read(wanted: Wanted, root: Path = Path()) -> Published:
    """What the pages are made of, from the records that are kept; links lead from `root`."""
    found = load(find_records([wanted.output / keep.RECORDS]))
    others, refused = load_versions(find_records([wanted.output / keep.VERSIONS]))
    if not found.current:
        raise ConformanceError(f"{wanted.output}: no records are kept there; name some to publish")
    made = keep.read_made(wanted.output)
    problems = [*(made.problems if made else ()), *found.problems, *refused]
    expected = made.expected if made else ()
    report = build(found.current, expected, problems, versions=others)
    baseline = read_baselines(wanted.baselines)
    keys = column_keys(found.current)
    return Published(
        report=report,
        declared={
            keys[index, item.name]: item
            for index, (_, record, _) in enumerate(found.current)
            for item in declared(record)
        },
        known=sort(found.current, baseline),
        beside=sort_versions(others, baseline),
        made=made,
        output=wanted.output,
        pages=wanted.pages,
        root=root,
    )


def render(published: Published) -> dict[Path, str]:
    """Every file by its path."""
    files = {
        published.output / "README.md": render_table(published),
        published.pages / "index.md": render_index(published),
    }
    for column in published.report.columns:
        files[published.pages / f"{column.key}.md"] = render_page(published, column)
    return {path: content + MADE for path, content in files.items()}
