"""`mha-conformance run`: the suite's own pytest session, without pytest's command line."""

from __future__ import annotations

import argparse
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.commands.shared import (
    Commands,
    add_device,
    add_format,
    add_implementation,
    add_quiet,
    add_repeatable,
)
from conformance.errors import PYTEST_CODES, ExitCode
from conformance.running import LEVELS, LIMITS

if TYPE_CHECKING:
    from conformance.records.record import Record
    from conformance.running.ending import Outcome

WITHOUT = ("logging", "warnings", "unraisableexception", "threadexception")
QUICK = ("-q", "--assert=plain", "--capture=sys", *(f"-pno:{plugin}" for plugin in WITHOUT))
"""What pytest does around a test costs as much as a small attention; this leaves some out."""


def add_parser(commands: Commands) -> None:
    """How it is called."""
    run = commands.add_parser(
        "run",
        help="examine implementations and write a record",
        description="Examine implementations. Options that are not listed go to pytest: -k, -x, "
        "-n, --junitxml.",
    )
    add_implementation(run, several=True)
    add_examination(run)
    run.add_argument(
        "--strict", action="store_true", help="exit with 1 if a requirement of level must fails"
    )
    run.add_argument(
        "-v", "--verbose", action="count", default=0, help="a line for each item; -vv for more"
    )
    add_format(run, "run")
    run.set_defaults(action=_run, passes_on=True)


def add_examination(run: argparse.ArgumentParser) -> None:
    """What to ask, and how."""
    add_repeatable(
        run,
        case="only cases with this in their id, or matching it as a pattern",
        dtype="only this dtype",
        mode="only this mode",
    )
    run.add_argument(
        "--case-file",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="also the case in this file, as explore writes it; repeatable",
    )
    run.add_argument(
        "--level",
        choices=LEVELS,
        help="core: some seconds, one case for each thing that goes wrong often; full: everything "
        "(default)",
    )
    add_device(run)
    run.add_argument("--record", type=Path, help="write what was found to this JSON file")
    run.add_argument(
        "--fresh",
        action="store_true",
        help="ask everything, also what still holds of the record that is there",
    )
    run.add_argument(
        "--shard",
        default="1/1",
        metavar="K/N",
        help="only the K-th of N equal parts; join makes one record of all",
    )
    run.add_argument(
        "--isolate",
        action=argparse.BooleanOptionalAction,
        help="give each implementation a process of its own (default: those given by path or "
        "module)",
    )
    for name, (default, told) in LIMITS.items():
        run.add_argument(f"--{name}", type=float, default=default, metavar="N", help=told)
    add_quiet(run)
    run.set_defaults(tell_help=run.format_help)


def _run(options: argparse.Namespace) -> int:
    from conformance.running.ending import counted
    from conformance.text import printable

    found = None if options.strict or options.verbose else standing(options)
    if found is None:
        return examine(options, survey=not options.strict)
    outcome = outcome_of(options.record, found)
    if options.format == "json":
        from conformance.commands.formats import print_json
        from conformance.running.ending import summary

        print_json(summary(outcome, ExitCode.OK))
        return ExitCode.OK
    for name, _ in outcome.implementations:
        own = [result for result in found.results if result.implementation == name]
        for line in counted(name, own, reasons=False):
            print(printable(line))
    tell_standing(options.record, found)
    return ExitCode.OK


def standing(options: argparse.Namespace) -> Record | None:
    """The record that is there, if all of it still holds, so that there is nothing to ask.

    It says afterwards that it belongs to the run that was begun in its folder.
    """
    from conformance.running.provenance import begun, environment

    workers = re.fullmatch(r"(-n ?|--numprocesses[ =])\w+", " ".join(options.rest))
    narrowed = options.case or options.dtype or options.mode or options.case_file or options.level
    if options.record is None or options.fresh or narrowed or options.shard != "1/1":
        return None
    if (options.rest and not workers) or not options.record.exists():
        return None
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    environment()
    from conformance.records.record import journal_path, save
    from conformance.running.digests import remember
    from conformance.running.earlier import unchanged
    from conformance.running.parts import Lock

    if journal_path(options.record).exists():
        return None
    lock = Lock(options.record)
    try:
        found = unchanged(options.record, options.implementation, options.device)
        run = begun(options.record.parent)
        if found is not None and run and run != found.header.provenance.run:
            found = _of_run(found, run)
            save(options.record, found)
    finally:
        lock.release()
    remember()
    return found


def _of_run(record: Record, run: str) -> Record:
    import msgspec

    made = msgspec.structs.replace(record.header.provenance, run=run)
    header = msgspec.structs.replace(record.header, provenance=made)
    return msgspec.structs.replace(record, header=header)


def outcome_of(path: Path, record: Record) -> Outcome:
    """What a record says, in the form of a run that has ended."""
    from conformance.running.ending import Outcome

    pairs = [(one.name, one.spec) for one in record.header.implementations]
    return Outcome(pairs, record.results, record.header.planned, "", path.absolute())


def tell_standing(path: Path, record: Record) -> None:
    """Say that nothing was asked, of when the measurements are, and where the record is."""
    from conformance.running.earlier import as_measured
    from conformance.text import printable

    created = record.header.provenance.created[:10]
    days = [result.measured or created for result in record.results]
    print(f"{as_measured(days, len(days))}; --fresh asks all")
    print(printable(f"record: {path.absolute()}"))


def examine(
    options: argparse.Namespace, *more: str, survey: bool, baseline: Path | None = None
) -> int:
    """Run the suite's pytest session.

    Args:
        options: those of `add_examination`, with implementations and the rest for pytest.
        more: options of the plugin.
        survey: whether deviations are findings, and no failures.
        baseline: the file of known deviations, if what deviates is held against it.
    """
    # Not TensorFlow's log level: what it says is part of an isolated implementation's last words.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import pytest

    from conformance.cases.casefile import load_case
    from conformance.commands.terminal import Bar, Refusals
    from conformance.progress import wanted
    from conformance.running.plugin import SUITE
    from conformance.running.provenance import environment
    from conformance.text import stdout_to_stderr

    environment()
    _load(options)

    arguments = [str(SUITE), "-c", str(SUITE.with_name("pytest.ini")), "-p", "no:cacheprovider"]
    arguments += ["--rootdir", str(SUITE.parent), *QUICK]
    for name in ("implementation", "case", "dtype", "mode"):
        for value in getattr(options, name):
            arguments += [f"--{name}", value]
    for file in options.case_file:
        load_case(file)
        arguments += ["--case-file", str(file.absolute())]
    arguments += ["--device", options.device]
    for name in LIMITS:
        arguments += [f"--{name}", str(getattr(options, name.replace("-", "_")))]
    if options.isolate is not None:
        arguments.append("--isolate" if options.isolate else "--no-isolate")
    if options.level:
        arguments += ["--level", options.level]
    if options.fresh:
        arguments.append("--fresh")
    arguments += ["--shard", options.shard]
    if options.record:
        arguments += ["--record", str(options.record.absolute())]
    if survey:
        arguments.append("--survey")
    gated = baseline is not None
    if gated:
        more = (*more, "--conformance-baseline", str(baseline))
    verbose = getattr(options, "verbose", 0)
    # Of the gate -v is an option of its own.
    if not gated:
        arguments += ["-" + "v" * (verbose + 1), "--no-header"] if verbose else []
    refusals = Refusals()
    plugins: list[object] = [refusals]
    bar = wanted() and not verbose and not {"-s", "--pdb", "--trace"} & {*options.rest}
    if bar or options.quiet:
        plugins.append(Bar(shown=bar))
        arguments += ["-o", "console_output_style=classic"]
    as_json = getattr(options, "format", "text") == "json"
    with stdout_to_stderr() if as_json else nullcontext(), refusals.listening():
        code = pytest.main([*arguments, *more, *options.rest], plugins=plugins)
    if code == pytest.ExitCode.USAGE_ERROR:
        raise refusals.error(re.findall(r"--[\w-]+", options.tell_help()))
    refusals.echo()
    # Not where it was to be: a narrowed one lies beside, and there may be none at all.
    options.written = refusals.run.written if refusals.run is not None else None
    worth = _worth(int(code), survey=survey, gated=gated)
    if as_json and refusals.run is not None:
        from conformance.commands.formats import print_json
        from conformance.running.ending import summary

        print_json(summary(refusals.run.outcome, worth))
    return worth


def _worth(code: int, *, survey: bool, gated: bool) -> ExitCode:
    worth = {own: known for known, own in PYTEST_CODES.items()}.get(code, ExitCode.INCOMPLETE)
    # Of a survey only a gate fails, or an item that got no outcome at all.
    return ExitCode.INCOMPLETE if worth == ExitCode.DEVIATES and survey and not gated else worth


def _load(options: argparse.Namespace) -> None:
    """Find every implementation before anything else: what is wrong with a name is one line."""
    from conformance.adapter.loading import load
    from conformance.running.run import isolated

    debugging = bool({"--pdb", "--trace"} & {*options.rest})
    for spec in options.implementation:
        if not isolated(spec, options.isolate, debugging=debugging):
            load(spec)
            continue
        from conformance.running.isolation import Limits, supervise

        limits = Limits(options.item_timeout, options.start_timeout, options.memory_limit)
        supervise(spec, options.device, limits).start()
