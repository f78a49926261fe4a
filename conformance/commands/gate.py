"""`mha-conformance gate` and `baseline update`: what deviates must be what is known."""

from __future__ import annotations

import argparse
from pathlib import Path

from conformance.commands.run import add_examination, examine, print_standing, standing
from conformance.commands.shared import IMPLEMENTATION, Commands
from conformance.errors import ConformanceError, ExitCode

BASELINE = Path("conformance.toml")


def add_parser(commands: Commands) -> None:
    """Add the parsers of `gate` and `baseline`."""
    gate = commands.add_parser(
        "gate",
        help="fail if anything deviates but what a baseline file knows of",
        description="Examine implementations and hold what deviates against a file of known "
        "deviations. Exit code 0: exactly those were found; 1: something is worse, or the file is "
        "out of date; 3: nothing was verified; 4: something was not verified. Options that are "
        "not listed go to pytest.",
    )
    _add_options(gate)
    gate.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="print all deviations, and the reasons of known ones",
    )
    gate.set_defaults(action=_gate, passes_on=True)

    baseline = commands.add_parser("baseline", help="keep the file of known deviations")
    baseline.set_defaults(action=lambda options: baseline.error("say what to do: update"))
    verbs = baseline.add_subparsers(dest="verb", metavar="VERB")
    update = verbs.add_parser(
        "update",
        help="write the smallest edit by which the gate holds",
        description="Examine implementations and edit the file of known deviations: add what is "
        "new, take out what is fixed. Comments and order are kept.",
    )
    _add_options(update)
    update.add_argument(
        "--reason", default="", metavar="TEXT", help="of entries that are new or have none"
    )
    update.set_defaults(action=_update, passes_on=True)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "implementation", nargs="*", help=f"{IMPLEMENTATION}; all of the record, with --from-record"
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        default=BASELINE,
        metavar="FILE",
        help=f"the file of known deviations (default: {BASELINE}); without one, none is known",
    )
    parser.add_argument(
        "--from-record",
        type=Path,
        metavar="FILE",
        help="judge what this record holds instead of examining anything",
    )
    add_examination(parser)


def _gate(options: argparse.Namespace) -> int:
    from conformance.reports.gate.baseline import read_baseline
    from conformance.reports.gate.judging import judge, part_of
    from conformance.reports.gate.telling import gate
    from conformance.text import relative

    _check(options)
    # An error in it is reported before anything is run.
    baseline = read_baseline(options.baseline)

    if options.from_record is None:
        record = standing(options)
        judgement = judge(baseline, record) if record is not None else None
        # If the gate fails, a run shows the failures.
        if record is not None and judgement is not None and judgement.exit_code == ExitCode.OK:
            judged = ["--from-record", relative(options.record)]
            code = gate(judgement, judged, verbose=options.verbose)
            print_standing(options.record, record)
            return code
        more = ["--conformance-verbose"] if options.verbose else []
        return examine(options, *more, survey=True, baseline=options.baseline)
    record = part_of(options.from_record, options.implementation)
    return gate(judge(baseline, record), _judged(options), verbose=options.verbose)


def _update(options: argparse.Namespace) -> int:
    import tempfile

    from conformance.records.record import read
    from conformance.reports.gate.baseline import read_baseline
    from conformance.reports.gate.judging import part_of
    from conformance.reports.gate.telling import update
    from conformance.text import relative

    _check(options)
    baseline = read_baseline(options.baseline)
    if options.from_record is not None:
        record = part_of(options.from_record, options.implementation)
        return update(baseline, record, options.reason, _judged(options))
    kept = options.record is not None
    with tempfile.TemporaryDirectory() as folder:
        options.record = options.record or Path(folder) / "record.json"
        # `update` prints the summary.
        code = examine(options, "--no-summary", survey=True)
        if options.written is None or code == ExitCode.INTERRUPTED:
            return code
        record = read(options.written)
    if kept:
        print(f"record: {options.written}")
    judged = ["--from-record", relative(options.written)] if kept else []
    return update(baseline, record, options.reason, judged)


def _judged(options: argparse.Namespace) -> list[str]:
    """Return the arguments that name the record."""
    return [*options.implementation, "--from-record", str(options.from_record)]


def _check(options: argparse.Namespace) -> None:
    if options.from_record is None and not options.implementation:
        raise ConformanceError("which implementation? name one, or a record with --from-record")
    if options.from_record is not None and options.rest:
        raise ConformanceError(
            f"nothing is run with --from-record; what is {' '.join(options.rest)} for?"
        )
