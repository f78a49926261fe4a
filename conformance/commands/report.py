"""`mha-conformance report`, `publish`, `compare`, `join` and `begin`: read, join and show records.

`begin` only writes the id of a new run to files, so that records of other runs can be refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.commands.shared import (
    Commands,
    add_files,
    add_format,
    add_quiet,
    add_records,
    add_run_file,
    check_writable,
    known_deviations,
    print_json,
    replace_file,
    selected,
)
from conformance.errors import ConformanceError, ExitCode
from conformance.records.header import Implementation

RECORDS = "record files or folders of them"


def add_parser(commands: Commands) -> None:
    """Add the parsers of `report`, `join`, `begin`, `publish` and `compare` to `commands`."""
    report = commands.add_parser(
        "report", help="join records into a report: JSON, Markdown and HTML"
    )
    report.add_argument("records", nargs="*", type=Path, help=RECORDS)
    report.add_argument(
        "--output",
        type=Path,
        help="path without a suffix for the three files (default: reports/compatibility)",
    )
    add_files(report, html="the page in this file; without --output, alone")
    report.add_argument(
        "--expect",
        action="append",
        default=[],
        metavar="NAME",
        help="a record that must be there, by its file's name without .json; repeatable",
    )
    add_run_file(report)
    outputs = report.add_argument_group(
        "for a build", "without --output and --html, only what is named here is written"
    )
    add_files(
        outputs,
        junit="write JUnit XML",
        badge="write a badge for shields.io (endpoint)",
        history="append a line about this run, and draw the trend beside it, as FILE.svg",
        baseline="known deviations (default for a build: those that gate takes); for a page, a "
        "folder of them too",
    )
    outputs.add_argument(
        "--summary",
        nargs="?",
        const="",
        metavar="FILE",
        help="append a summary in Markdown (default: $GITHUB_STEP_SUMMARY)",
    )
    outputs.add_argument(
        "--annotations", action="store_true", help="print annotations for GitHub Actions"
    )
    outputs.add_argument(
        "--previous",
        type=Path,
        metavar="RECORD",
        help="an earlier record, or a folder of them: summary and annotations tell what changed",
    )
    add_records(
        report,
        versions="records, or folders of them, of the same implementations with other versions of "
        "their libraries: what changed between which versions",
    )
    add_quiet(report)
    report.set_defaults(action=_report)

    join = commands.add_parser(
        "join",
        help="join records that were made in parts (shards, dtypes, machines) into one",
        description="Parts of one implementation become the record that one run would have made. "
        "Exit code 1: two parts say something else of the same item; 4: an item has no outcome in "
        "any of them.",
    )
    join.add_argument("parts", nargs="+", type=Path, metavar="PART", help="record files")
    join.add_argument("--output", type=Path, required=True, metavar="RECORD.json")
    join.set_defaults(action=_join)

    begin = commands.add_parser("begin", help="start a run of several environments")
    begin.add_argument(
        "--run-file",
        type=Path,
        required=True,
        action="append",
        help="where to write its id: `run`, in a folder of records; repeatable",
    )
    begin.set_defaults(action=_begin)

    publish = commands.add_parser(
        "publish",
        help="keep records, compressed, with a table of them and a page for each implementation",
        description="Without records, render the pages again from those that are kept.",
    )
    publish.add_argument("records", nargs="*", type=Path, help=RECORDS)
    add_records(
        publish,
        versions="records of the same implementations with other versions of their libraries",
        large='records of level "large", a column of the table',
    )
    publish.add_argument(
        "--gpu",
        nargs="+",
        type=Path,
        default=[],
        metavar="FOLDER",
        help='folders of records of a GPU; those of level "large" and those of `long` lie in '
        "folders `large` and `long` inside",
    )
    names: dict[str, Any] = {"type": _names, "default": [], "metavar": "NAME,NAME"}
    for option, dest, meaning in (
        ("--expect", "expected", "records that must be there, by their file's name without .json"),
        ("--expect-versions", "expected_versions", "likewise, of those with other versions"),
    ):
        publish.add_argument(option, dest=dest, help=meaning, **names)
    add_run_file(publish)
    for option, default, meaning in (
        ("--output", "reports/published", "folder of the records and the table"),
        ("--pages", "docs/implementations", "folder of the pages"),
    ):
        text = f"{meaning} (default: {default})"
        publish.add_argument(option, type=Path, default=Path(default), help=text)
    publish.add_argument(
        "--baseline",
        dest="baselines",
        nargs="+",
        type=Path,
        default=[Path("reports/baselines")],
        metavar="FILE",
        help="known deviations, by file or folder (default: reports/baselines)",
    )
    publish.add_argument(
        "--add",
        action="store_true",
        help="keep what is published beside these records, instead of replacing all of it",
    )
    add_quiet(publish)
    publish.set_defaults(action=_publish)

    compare = commands.add_parser(
        "compare",
        help="what changed between two records, regressions first",
        description="Print what changed from one record to another, even if implementations, "
        "cases or modes were added or removed. Exit code 0: nothing is worse; 1: something is "
        "worse, or no longer answered; 2: a record cannot be read; 3: the two have nothing in "
        "common. New items that deviate are printed, but do not count as worse.",
    )
    compare.add_argument("before", type=Path, help="a record, or a folder of records")
    compare.add_argument("after", type=Path, help="a later record, or a folder of records")
    add_format(compare, "compare")
    add_files(
        compare,
        html="also write a page with both side by side",
        comment="also write a comment for a pull request, in Markdown",
    )
    compare.add_argument(
        "--page", default="", metavar="URL", help="the report's address, for links of the comment"
    )
    compare.set_defaults(action=_compare)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _report(options: argparse.Namespace) -> int:
    outputs = ("junit", "badge", "history", "summary", "annotations")
    chosen = {name for name in outputs if getattr(options, name) not in (None, False)}
    if options.previous is not None and not chosen.intersection(("summary", "annotations")):
        needed = "--summary or --annotations"
        raise ConformanceError(f"--previous changes nothing that is written; add {needed}")
    for path in map(str, options.records):
        if ".py:" in path and not Path(path).exists():
            file, _, name = path.rpartition(":")
            raise ConformanceError(
                f"{path} is an implementation, and a report is made of records; first "
                f"mha-conformance run {path} --record {Path(file).stem}-{name}.json, each with a "
                "record of its own"
            )
    beside = chosen or options.expect or options.versions or options.run
    if len(options.records) == 1 and not options.records[0].exists() and not beside:
        from conformance.records.record import read

        read(options.records[0])  # raises: nothing else was named that a report could be made of
    code: int = ExitCode.OK
    output = options.output
    if not chosen and options.baseline is not None and not options.baseline.exists():
        raise ConformanceError(f"{options.baseline}: no such file, nothing is known yet")
    if chosen:
        from conformance.reports.ci import Outputs, write_outputs

        options.baseline = options.baseline or known_deviations()
        code = write_outputs(options.records, selected(Outputs, options))
    if output is None and options.html is None:
        if chosen:
            return code
        output = Path("reports/compatibility")
    from conformance.reports.gate.baseline import read_baselines
    from conformance.reports.writing import write

    baselines = None if options.baseline is None else read_baselines([options.baseline])
    records, expected, run = options.records, options.expect, options.run
    report = write(records, output, expected, run, options.html, options.versions, baselines)
    return report or code


def _join(options: argparse.Namespace) -> int:
    from conformance.records.findings import count
    from conformance.reports.wording import counts_text
    from conformance.running.merging import join
    from conformance.text import printable

    joined = join(options.parts, options.output)
    for line in joined.contradictions:
        print(printable(f"contradiction: {line}"))
    record = joined.record
    for one in record.header.implementations:
        verdicts = (r.verdict for r in record.results if r.implementation == one.name)
        print(printable(f"{one.name}: {counts_text(count(verdicts))}"))
    if selection := record.header.provenance.selection:
        print(printable(f"narrowed by {selection}"))
    print(printable(f"record: {options.output}"))
    if joined.contradictions:
        return ExitCode.DEVIATES
    return ExitCode.OK if record.complete else ExitCode.INCOMPLETE


def _begin(options: argparse.Namespace) -> int:
    from conformance.running.provenance import new_run_id

    run = new_run_id()
    for file in options.run_file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(run + "\n", encoding="utf-8")
    print(f"run {run}")
    return ExitCode.OK


def _publish(options: argparse.Namespace) -> int:
    from conformance.reports.publishing import Wanted, publish

    options.translator = _translations
    return publish(selected(Wanted, options))


def _translations(declared: Mapping[str, Implementation]) -> dict[str, Any]:
    """Return how masks convert between the mask arguments of implementations, as data for JSON.

    The keys of `declared` name the implementations in the result, which is made by
    `conformance.porting.masks.answers`.
    """
    from msgspec import convert
    from msgspec.structs import asdict

    from conformance.adapter.arguments import MaskArgument
    from conformance.porting.masks import answers

    return answers(
        (key, mask.name, convert(asdict(mask) | {"axes": tuple(mask.axes)}, MaskArgument))
        for key, implementation in declared.items()
        for mask in implementation.masks
    )


def _compare(options: argparse.Namespace) -> int:
    from rich.console import Console

    from conformance.reports.changes import compare, load_side, show
    from conformance.reports.load import find_records
    from conformance.reports.writing import check_spares

    files = [file for file in (options.html, options.comment) if file is not None]
    for file in files:
        check_writable(file)
    check_spares(files, find_records((options.before, options.after)))
    if options.page and options.comment is None:
        raise ConformanceError("--page is for links of a comment; add --comment FILE")
    changes = compare(load_side(options.before), load_side(options.after))
    if options.html:
        from conformance.reports.page.html import render_changes

        replace_file(options.html, render_changes(changes).encode())
    if options.comment:
        from conformance.reports.ci.summary import comment

        replace_file(options.comment, comment(changes, options.page).encode())
    if options.format == "json":
        print_json(changes)
    else:
        show(Console(highlight=False), changes)
    if not changes.common:
        return ExitCode.NOTHING_VERIFIED
    return ExitCode.DEVIATES if changes.anything_worse else ExitCode.OK
