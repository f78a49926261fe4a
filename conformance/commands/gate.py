"""`mha-conformance gate` and `baseline update`: allow only known deviations, and edit their list.

The list is a file, which is called the baseline.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.commands.run import (
    add_examination,
    examine,
    fill_in,
    print_standing,
    standing,
)
from conformance.commands.shared import (
    BASELINE,
    IMPLEMENTATION,
    Commands,
    Once,
    add_format,
    print_json,
    read_settings,
)
from conformance.errors import ConformanceError, ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from conformance.records.record import Record
    from conformance.reports.gate.baseline import Baseline


def add_parser(commands: Commands) -> None:
    """Add the parsers of `gate` and `baseline`."""
    gate = commands.add_parser(
        "gate",
        help="fail if there are deviations other than those listed in a baseline file",
        description="Examine implementations and compare the deviations with a file of known "
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
    add_format(gate, "gate")
    gate.set_defaults(action=_gate, passes_on=True)

    baseline = commands.add_parser("baseline", help="maintain the file of known deviations")
    baseline.set_defaults(action=lambda options: baseline.error("say what to do: update"))
    verbs = baseline.add_subparsers(dest="verb", metavar="VERB")
    update = verbs.add_parser(
        "update",
        help="write the smallest edit by which the gate holds",
        description="Examine implementations and edit the file of known deviations: add new ones "
        "and remove those that are fixed. Comments and order are kept.",
    )
    _add_options(update)
    update.add_argument(
        "--reason", default="", metavar="TEXT", help="of entries that are new or have none"
    )
    update.add_argument(
        "--allow-less",
        action="store_true",
        help="lower the numbers of what was verified where this run verified less",
    )
    update.set_defaults(action=_update, passes_on=True)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "implementation",
        nargs="*",
        help=f"{IMPLEMENTATION}; all of the record, with --from-record. Without any, those that "
        "[tool.mha-conformance] of pyproject.toml names",
    )
    known = "the file of known deviations (default: conformance.toml); without one, none is known"
    held = "judge what this record holds instead of examining anything"
    for option, text in (("--baseline", known), ("--from-record", held)):
        parser.add_argument(option, type=Path, action=Once, metavar="FILE", help=text)
    add_examination(parser)
    # Options that were not given are filled in from the settings.
    parser.set_defaults(device=None)


def _gate(options: argparse.Namespace) -> int:
    from conformance.reports.gate import gate
    from conformance.reports.gate.judging import judge
    from conformance.text import relative

    named = options.baseline
    baseline = _completed(options)
    # A new project has no file yet, and documents name the default one.
    if named is not None and named.name != BASELINE and not baseline.there:
        raise ConformanceError(
            f"{named}: no such file; baseline update --baseline FILE writes one, and without "
            "--baseline nothing is known to deviate"
        )
    if options.format == "json":
        return _gate_for_programs(options, baseline)
    if options.from_record is None:
        record = standing(options)
        judgement = judge(baseline, record) if record is not None else None
        # If the gate fails, run again to show the failures.
        if record is not None and judgement is not None and judgement.exit_code == ExitCode.OK:
            judged = ["--from-record", relative(options.record)]
            code = gate(judgement, judged, verbose=options.verbose)
            print_standing(options.record, record)
            return code
        more = ["--conformance-verbose"] if options.verbose else []
        return examine(options, *more, survey=True, baseline=options.baseline)
    record = _given(options)
    return gate(judge(baseline, record), _judged(options), verbose=options.verbose)


def _gate_for_programs(options: argparse.Namespace, baseline: Baseline) -> int:
    """Print only the judgement on stdout, as JSON, and return the exit code.

    If a run is needed, but is interrupted or writes no record, nothing is printed on stdout, and
    the exit code is that of the run.
    """
    from conformance.reports.gate import answer
    from conformance.reports.gate.judging import judge
    from conformance.text import stdout_to_stderr

    record = _given(options) if options.from_record is not None else standing(options)
    if record is None:
        # Everything else that is printed goes to stderr.
        options.format = "text"
        with stdout_to_stderr():
            record, code = _examined(options, baseline=options.baseline)
        if record is None:
            return code
    judgement = judge(baseline, record)
    print_json(answer(judgement))
    return judgement.exit_code


def _update(options: argparse.Namespace) -> int:
    from conformance.text import relative

    baseline = _completed(options)
    if options.from_record is not None:
        return _updated(options, baseline, _given(options), _judged(options))
    kept = options.record is not None
    # `update` prints the summary.
    record, code = _examined(options, "--no-summary")
    if record is None:
        return code
    if kept:
        print(f"record: {options.written}")
    judged = ["--from-record", relative(options.written)] if kept else []
    return _updated(options, baseline, record, judged)


def _updated(
    options: argparse.Namespace, baseline: Baseline, record: Record, judged: Sequence[str]
) -> int:
    from conformance.reports.gate import update

    return update(baseline, record, options.reason, judged, allow_less=options.allow_less)


def _examined(
    options: argparse.Namespace, *more: str, baseline: Path | None = None
) -> tuple[Record | None, int]:
    """Run the suite, and return a pair of the record and the exit code.

    The record is None if the run was interrupted or wrote no record. Without --record, the record
    is written to a temporary folder, which is removed afterwards.

    Args:
        more: further arguments for pytest.
        baseline: the file of known deviations with which the run is compared; None for no gate.
    """
    import tempfile

    from conformance.records.record import read

    with tempfile.TemporaryDirectory() as folder:
        options.record = options.record or Path(folder) / "record.json"
        code = examine(options, *more, survey=True, baseline=baseline)
        if options.written is None or code == ExitCode.INTERRUPTED:
            return None, code
        return read(options.written), code


def _hash(name: str) -> str:
    """Return the hash of the case with this id, or "" if this suite has no such case."""
    from conformance.cases.case import case_hash
    from conformance.cases.catalogue import case_of
    from conformance.errors import UnknownName

    try:
        return case_hash(case_of(name))
    except UnknownName:
        return ""


def _given(options: argparse.Namespace) -> Record:
    """Return the record of --from-record; if implementations are named, only their part of it.

    Raises:
        UnknownName: a named implementation is not in the record.
        BrokenRecord: the record cannot be read; a later run with the same record did not finish;
            the record was edited, or made by another version or other code of the suite, or with
            other cases, which may have been easier; or it has results of cases that it does not
            list.
    """
    import platform

    from conformance.errors import BrokenRecord
    from conformance.records.findings import STORED
    from conformance.records.record import check_sealed, journal_path
    from conformance.reports.gate.judging import part_of
    from conformance.running import inputs
    from conformance.running.kept import hash_of_catalogue
    from conformance.running.provenance import revisions, suite_code, suite_version

    if journal_path(options.from_record).exists():
        raise BrokenRecord(f"{options.from_record}: a later run did not finish; run it again")
    record = part_of(options.from_record, options.implementation)
    header, made = record.header, record.header.provenance
    asked = {
        name: case.hash for name, case in header.cases.items() if name.partition("/")[0] != STORED
    }
    every = {*header.cases, *(topic.id for topic in header.topics)}
    strangers = sorted({result.case for result in record.results} - every)
    if record.complete:
        check_sealed(options.from_record, record)
    suite = suite_version()
    version, _, _ = suite.partition("+")
    # Digests of parsed code are comparable in one version of Python only.
    edited: list[str] = []
    if made.python.split(".")[:2] == platform.python_version().split(".")[:2]:
        edited = [file for one in header.implementations for file in inputs.edited(one.inputs)]
        alike = (made.code, header.revisions) == (suite_code(), revisions())
    else:
        alike = made.suite == suite
    if made.suite.partition("+")[0] != version:
        fault = f"it is of suite {made.suite}, and this is {version}"
    elif not alike:
        fault = "it was made by other code of the suite"
    elif made.catalogue != hash_of_catalogue():
        fault = "it is of a catalogue with other cases"
    elif others := sorted(name for name in asked if _hash(name) != asked[name]):
        fault = f"its case {others[0]} asks another question than that of this suite"
    elif edited:
        fault = f"{edited[0]} has changed since it was measured"
    elif strangers:
        fault = f"it has results of {strangers[0]}, which it did not ask"
    else:
        return record
    raise BrokenRecord(f"{options.from_record}: cannot be judged, because {fault}; run again")


def _judged(options: argparse.Namespace) -> list[str]:
    return [*options.implementation, "--from-record", str(options.from_record)]


def _completed(options: argparse.Namespace) -> Baseline:
    """Fill in missing options from the settings, check the options, and return the baseline.

    Raises:
        ConformanceError: there is neither an implementation nor --from-record, or --from-record is
            used with arguments for pytest.
    """
    from conformance.reports.gate.baseline import read_baseline

    settings = read_settings()
    options.baseline = options.baseline or Path(settings.baseline or BASELINE)
    # With --from-record nothing is examined.
    if options.from_record is None:
        fill_in(options, settings)
    options.device = options.device or "cpu"
    if options.from_record is None and not options.implementation:
        raise ConformanceError(
            "which implementation? name one, or a record with --from-record, or write "
            "implementations in [tool.mha-conformance] of pyproject.toml"
        )
    if options.from_record is not None and options.rest:
        raise ConformanceError(
            f"nothing is run with --from-record; what is {' '.join(options.rest)} for?"
        )
    return read_baseline(options.baseline)
