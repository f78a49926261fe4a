"""`mha-conformance report`, `join` and `begin`: render reports, join records, begin a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from conformance.commands.shared import Commands, add_files, add_quiet, add_run_file, selected
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
    outputs = ("junit", "badge", "history", "summary", "annotations")
    chosen = {name for name in outputs if getattr(options, name) not in (None, False)}
    if options.previous is not None and not chosen.intersection(("summary", "annotations")):
        needed = "--summary or --annotations"
        raise ConformanceError(f"--previous changes nothing that is written; add {needed}")
    code: int = ExitCode.OK
    output = options.output
    if not chosen and options.baseline is not None and not options.baseline.exists():
        raise ConformanceError(f"{options.baseline}: no such file, nothing is known yet")
    if chosen:
        from conformance.commands.settings import known_deviations
        from conformance.reports.ci import Outputs, write_outputs

        options.baseline = options.baseline or known_deviations()
        code = write_outputs(options.records, selected(Outputs, options))
    if output is None and options.html is None:
        if chosen:
            return code
        output = Path("reports/compatibility")
    from conformance.reports.gate.baseline import read_baselines
    from conformance.reports.writing import write

    report = write(
        options.records,
        output,
        options.expect,
        options.run,
        options.html,
        options.versions,
        None if options.baseline is None else read_baselines([options.baseline]),
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
