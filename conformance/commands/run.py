"""`mha-conformance run`: the suite's own pytest session, without pytest's command line."""

from __future__ import annotations

import argparse
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance.commands.shared import Commands, add_format, add_implementation, add_quiet
from conformance.errors import PYTEST_CODES, ExitCode
from conformance.running import OPTIONS

if TYPE_CHECKING:
    from conformance.records.record import Record
    from conformance.running.examine import Outcome

WITHOUT = ("logging", "warnings", "unraisableexception", "threadexception")
QUICK = ("-q", "--assert=plain", "--capture=sys", *(f"-pno:{plugin}" for plugin in WITHOUT))
"""What pytest does around a test costs as much as a small attention; this leaves some out."""


_PATHS: dict[str, dict[str, Any]] = {"record": {"type": Path}, "case-file": {"type": Path}}
"""pytest's options are strings, because xdist sends them to its workers."""


def add_parser(commands: Commands) -> None:
    """Add the parser of `run`."""
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
    """Add the options that say what to examine, and how."""
    for name, attributes in OPTIONS.items():
        run.add_argument(f"--{name}", **{**attributes, **_PATHS.get(name, {})})
    add_quiet(run)
    run.set_defaults(tell_help=run.format_help)


def _run(options: argparse.Namespace) -> int:
    record = None if options.strict or options.verbose else standing(options)
    if record is None:
        return examine(options, survey=not options.strict)
    from conformance.running.examine import Outcome

    outcome = Outcome(record, path=options.record.absolute())
    if options.format == "json":
        _print_summary(outcome, ExitCode.OK)
    else:
        print(outcome)
        print_standing(options.record, record)
    return ExitCode.OK


def _print_summary(outcome: Outcome, code: ExitCode) -> None:
    from conformance.commands.formats import print_json
    from conformance.running.ending import summary

    print_json(summary(outcome, code))


def standing(options: argparse.Namespace) -> Record | None:
    """Return the existing record if all of it still holds, so that nothing needs to be measured.

    The record is then part of the run that was begun in its folder.
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
    from conformance.running.joining import Lock

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


def print_standing(path: Path, record: Record) -> None:
    """Print that nothing was measured again, when it was measured, and the record's path."""
    from conformance.running.earlier import as_measured
    from conformance.text import printable

    created = record.header.provenance.created[:10]
    days = [result.measured or created for result in record.results]
    print(f"{as_measured(days, len(days))}; --fresh measures all again")
    print(printable(f"record: {path.absolute()}"))


def examine(
    options: argparse.Namespace, *more: str, survey: bool, baseline: Path | None = None
) -> int:
    """Run the suite's pytest session; return the exit code.

    Args:
        options: those of `add_examination`, with implementations and the rest for pytest.
        more: options of the plugin.
        survey: whether deviations are findings, not failures.
        baseline: the file of known deviations that a gate compares with.
    """
    # Not TensorFlow's log level: a crash report shows the last line of what it printed.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import pytest

    from conformance.commands.terminal import Bar, Refusals
    from conformance.progress import wanted
    from conformance.running.plugin import SUITE
    from conformance.running.provenance import environment
    from conformance.text import stdout_to_stderr

    environment()
    _check_names(options)
    arguments = [str(SUITE), "-c", str(SUITE.with_name("pytest.ini")), "-p", "no:cacheprovider"]
    arguments += ["--rootdir", str(SUITE.parent), *QUICK, *_for_pytest(options)]
    arguments += ["--survey"] if survey else []
    gated = baseline is not None
    arguments += ["--conformance-baseline", str(baseline)] if gated else []
    # The gate's -v is an option of its own.
    verbose = 0 if gated else getattr(options, "verbose", 0)
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
    run = refusals.run
    # A narrowed record has another name than the one given, and there may be none at all.
    options.written = run.written if run is not None else None
    worth = {number: name for name, number in PYTEST_CODES.items()}.get(code, ExitCode.INCOMPLETE)
    if worth == ExitCode.DEVIATES and survey and not gated:
        # In a survey only an item that got no outcome fails.
        worth = ExitCode.INCOMPLETE
    if as_json and run is not None:
        _print_summary(run.outcome, worth)
    return worth


def _for_pytest(options: argparse.Namespace) -> list[str]:
    """Return the options of the command line as the plugin takes them."""
    arguments = [word for name in options.implementation for word in ("--implementation", name)]
    for name in OPTIONS:
        value = getattr(options, name.replace("-", "_"))
        if name == "isolate":
            arguments += [] if value is None else ["--isolate" if value else "--no-isolate"]
        elif isinstance(value, bool):
            arguments += [f"--{name}"] if value else []
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            for one in values:
                text = str(one.absolute()) if isinstance(one, Path) else str(one)
                arguments += [f"--{name}", text]
    return arguments


def _check_names(options: argparse.Namespace) -> None:
    """Load implementations and case files first, so that an error in one is a single line."""
    from conformance.adapter.loading import load
    from conformance.cases.casefile import load_case
    from conformance.running.run import is_isolated, limits_of

    debugging = bool({"--pdb", "--trace"} & {*options.rest})
    for spec in options.implementation:
        if not is_isolated(spec, options.isolate, debugging=debugging):
            load(spec)
            continue
        from conformance.running.isolation import supervise

        limits = limits_of(lambda name: getattr(options, name.strip("-").replace("-", "_")))
        supervise(spec, options.device, limits).start()
    for file in options.case_file:
        load_case(file)
