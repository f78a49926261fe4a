"""Make a report from records, write its files, and return the exit code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from conformance.errors import ConformanceError, ExitCode
from conformance.records.findings import verified
from conformance.reports import accuracy, cards, tables, trend
from conformance.reports.gate.baseline import Baseline
from conformance.reports.gate.judging import knower
from conformance.reports.load import find_records, load, load_versions
from conformance.reports.model import SCHEMA, Loaded, Report
from conformance.reports.page.html import figures, render_html
from conformance.reports.page.markdown import render_markdown
from conformance.reports.wording import counts_text
from conformance.text import printable, progress, some


def build(
    records: Sequence[Loaded],
    expected: Sequence[str] = (),
    problems: Sequence[str] = (),
    earlier: Sequence[Loaded] = (),
    versions: Sequence[Loaded] = (),
    baseline: Baseline | None = None,
) -> Report:
    """Join records into one report, without any framework, adapter or clock.

    Args:
        records: records as returned by `load`; shown in the order of `expected`, then as given.
        expected: names of records that are required; the report names those that are missing.
        problems: one line about each record that could not be used.
        earlier: records of the same implementations that were made before these.
        versions: records of the same implementations with other versions of their libraries.
        baseline: known deviations; not needed for those that a record itself contains.

    Raises:
        BrokenBaseline: if an entry uses a variable that a run does not define, or a record
            contains an invalid entry.
    """
    order = {name: place for place, name in enumerate(expected)}
    records = sorted(records, key=lambda item: order.get(item[1].header.name, len(order)))
    parts, sources = tables.parts_of(records), tables.sources(records)
    columns, requirements = tables.columns(parts), tables.requirements_of(records)
    seen = [one for part in parts for one in tables.located(part.results, part.key)]
    baseline = baseline or Baseline(Path(), "", ())
    knows_of = {part.key: knower(baseline, part.record) for part in parts}
    known = {one: entry for one in seen if one.wrong and (entry := knows_of[one.column](one))}
    answers, mismatches = accuracy.exchanged(records, parts)
    problems = [*problems, *mismatches]
    measured = accuracy.accuracy(columns, seen)
    limit = accuracy.limit(measured)
    own_cards = cards.experiment_cards(parts, columns, tables.topics_of(records))
    return Report(
        schema=SCHEMA,
        created=max((source.provenance.created for source in sources), default=""),
        limit=limit,
        totals=tables.totals(columns, sources, seen),
        columns=columns,
        conventions=cards.conventions(parts, columns),
        cards=own_cards,
        handed=cards.handed(parts, columns),
        features=cards.features(parts, columns, own_cards),
        matrix=tables.matrix(columns, seen, requirements),
        accuracy=measured,
        pairs=accuracy.pairs(columns, answers),
        apart=accuracy.apart(columns, answers, limit),
        deviations=tables.deviations(columns, seen, requirements, known),
        unsupported=tables.unsupported(columns, seen),
        not_verified=tables.not_verified(columns, sources, seen, expected, problems),
        sources=sources,
        trends=trend.trends(parts, earlier),
        timelines=trend.timelines(parts, versions),
    )


def write(
    records: Sequence[Path],
    output: Path | None,
    expected: Sequence[str] = (),
    run: Path | None = None,
    html: Path | None = None,
    versions: Sequence[Path] = (),
    baseline: Baseline | None = None,
) -> int:
    """Write the report, and print a summary of a few lines.

    Args:
        records: record files, or folders of them.
        output: path without suffix, to which .json, .md and .html are appended; None to write none
            of these files.
        expected: names of records that are required.
        run: file with the id of the run; records of other runs are left out.
        html: file to which only the HTML page is written.
        versions: records of the same implementations with other versions of their libraries.
        baseline: known deviations.

    Returns:
        The exit code: nothing verified, incomplete, or OK, whether or not anything deviates. No
            file is written if there is no record.

    Raises:
        ConformanceError: if the run's file cannot be read, a file cannot be written or would
            replace a record, or an entry of the baseline does not fit the records.
    """
    with progress("reading records") as advance:
        current = find_records(records)
        loaded = load(current, read_run(run))
        # A folder with records of all versions has the one that is reported, too.
        known = {path.resolve() for path in current}
        earlier = [path for path in find_records(versions) if path.resolve() not in known]
        others, refused = load_versions(earlier)
        advance("making the report")
        problems = [*loaded.problems, *refused]
        report = build(loaded.current, expected, problems, loaded.earlier, others, baseline)
        page = render_html(report, figures(report, loaded.current), loaded.current).encode()
    files: dict[Path, bytes] = {}
    if output is not None and loaded.current:
        encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
        files = {
            output.with_name(output.name + ".html"): page,
            output.with_name(output.name + ".md"): render_markdown(report).encode(),
            output.with_name(output.name + ".json"): encoded + b"\n",
        }
    if html is not None and loaded.current:
        files[html] = page
    sources = [path for path, _, _ in (*loaded.current, *loaded.earlier, *others)]
    check_spares(files, sources)
    for path, content in files.items():
        write_file(path, content)
    last = f"report: {', '.join(map(str, files))}" if loaded.current else _nothing(records)
    unsealed = [path.name for path, record, _ in loaded.current if not record.seal]
    told = f"without a seal, so edits would not be noticed: {some(unsealed, 4)}"
    for line in [*_summary(report), *([told] if unsealed else []), last]:
        print(printable(line))
    return outcome(report)


def outcome(report: Report) -> ExitCode:
    """Return the exit code of a report: nothing verified, incomplete, or OK.

    Deviations do not affect it.
    """
    if not verified(report.totals.items):
        return ExitCode.NOTHING_VERIFIED
    return ExitCode.INCOMPLETE if report.not_verified.anything else ExitCode.OK


def write_file(path: Path, content: bytes, *, append: bool = False) -> None:
    """Write a file, or append to it, and create its folder if that is missing.

    Raises:
        ConformanceError: if the folder cannot be created, or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab" if append else "wb") as file:
            file.write(content)
    except OSError as error:
        raise ConformanceError(f"{path}: cannot be written ({error.strerror})") from error


def check_spares(files: Iterable[Path], records: Iterable[Path]) -> None:
    """Raise `ConformanceError` if a file that is to be written is one of the records."""
    kept = {path.resolve() for path in records}
    for path in files:
        if path.resolve() in kept:
            raise ConformanceError(
                f"{path}: is a record that this is made from, and would be replaced; "
                "name another file"
            )


def make_folder(path: Path) -> None:
    """Create a folder if it is missing; raise `ConformanceError` if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConformanceError(f"{path}: cannot be created ({error.strerror})") from error


def _nothing(records: Sequence[Path]) -> str:
    """Return the line that says why there is no report."""
    folders = [place for place in records if place.is_dir()]
    narrowed = sorted(file for folder in folders for file in folder.glob("*.narrowed.json*"))
    named = f"; a narrowed one is read if it is named: {narrowed[0]}" if narrowed else ""
    give = "give its file: mha-conformance report RECORD.json"
    return f"nothing is written, because no record was found; {give}{named}"


def read_run(file: Path | None) -> str:
    """Return the id of the run from a file written by the `begin` command; "" if `file` is None.

    Raises:
        ConformanceError: if the file cannot be read.
    """
    if file is None:
        return ""
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        hint = "start the run with mha-conformance begin"
        raise ConformanceError(f"{file}: cannot be read ({reason}); {hint}") from error


def _summary(report: Report) -> list[str]:
    gaps = report.not_verified
    open_questions = [
        *(f"{name} could not be set up or did not finish" for name in gaps.missing),
        *(f"{name} ({reason})" for name, reason in gaps.unavailable.items()),
        *gaps.incomplete,
        *(f"{one.column}, {one.items} items {one.verdict} ({one.reason})" for one in gaps.open),
    ]
    return [
        *(f"{column.key}: {counts_text(column.items)}" for column in report.columns),
        *(f"not verified: {line}" for line in open_questions),
        *(f"problem: {line}" for line in gaps.problems),
        f"items: {counts_text(report.totals.items)}",
    ]
