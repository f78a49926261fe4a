"""`mha-conformance report`, `join` and `begin`: records become reports, parts become records."""

from __future__ import annotations

import argparse
from pathlib import Path

from conformance.commands.shared import Commands, add_quiet
from conformance.errors import ConformanceError, ExitCode


def add_parser(commands: Commands) -> None:
    """Add the parsers of `report`, `join` and `begin`."""
    report = commands.add_parser(
        "report", help="join records into a report: JSON, Markdown and HTML"
    )
    report.add_argument("records", nargs="*", type=Path, help="record files or folders of them")
    report.add_argument(
        "--output",
        type=Path,
        help="path without a suffix for the three files (default: reports/compatibility)",
    )
    report.add_argument(
        "--html", type=Path, metavar="FILE", help="the page in this file; without --output, alone"
    )
    report.add_argument(
        "--expect",
        action="append",
        default=[],
        metavar="NAME",
        help="a record that must be there, by its file's name without .json; repeatable",
    )
    report.add_argument(
        "--run-file", type=Path, help="refuse records of other runs than the one named in this file"
    )
    outputs = report.add_argument_group(
        "for a build", "without --output and --html, only what is named here is written"
    )
    outputs.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML")
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
        "--badge", type=Path, metavar="FILE", help="write a badge for shields.io (endpoint)"
    )
    outputs.add_argument(
        "--previous",
        type=Path,
        metavar="RECORD",
        help="an earlier record, or a folder of them: summary and annotations tell what changed",
    )
    outputs.add_argument(
        "--baseline", type=Path, metavar="FILE", help="known deviations, as gate takes them"
    )
    report.add_argument(
        "--versions",
        nargs="+",
        type=Path,
        default=[],
        metavar="RECORD",
        help="records, or folders of them, of the same implementations with other versions of "
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


def _report(options: argparse.Namespace) -> int:
    code = int(ExitCode.OK)
    asked = ("junit", "badge", "summary", "annotations")
    wished = [name for name in asked if getattr(options, name) not in (None, False)]
    for name, users in (("previous", ("summary", "annotations")), ("baseline", asked)):
        if getattr(options, name) is not None and not set(users) & set(wished):
            needed = " or ".join(f"--{user}" for user in users)
            raise ConformanceError(f"--{name} changes nothing that is written; add {needed}")
    if wished:
        from conformance.reports.ci.outputs import Outputs, write_outputs

        names = (*asked, "previous", "baseline")
        wanted = Outputs(**{name: getattr(options, name) for name in names})
        code = write_outputs(options.records, wanted)
        if options.output is None and options.html is None:
            return code
    from conformance.reports import write

    output = options.output
    if output is None and options.html is None:
        output = Path("reports/compatibility")
    report = write(
        options.records, output, options.expect, options.run_file, options.html, options.versions
    )
    return report or code


def _join(options: argparse.Namespace) -> int:
    from conformance.records.findings import count
    from conformance.reports.wording import counts_text
    from conformance.running.joining import join
    from conformance.text import printable

    joined = join(options.parts, options.output)
    for line in joined.contradictions:
        print(printable(f"contradiction: {line}"))
    record = joined.record
    for one in record.header.implementations:
        own = (r.verdict for r in record.results if r.implementation == one.name)
        print(printable(f"{one.name}: {counts_text(count(own))}"))
    selection = record.header.provenance.selection
    if selection:
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
