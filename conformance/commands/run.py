"""`mha-conformance run`: examine implementations in a pytest session of the suite."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance.commands.shared import (
    IMPLEMENTATION,
    Commands,
    Once,
    Settings,
    add_format,
    add_quiet,
    print_json,
    read_settings,
)
from conformance.commands.watch import is_watched
from conformance.errors import PYTEST_CODES, ConformanceError, ExitCode, NothingRun
from conformance.running import LIMITS, OPTIONS, WHOLE, is_isolated, level_of
from conformance.text import printable, relative

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from conformance.commands.terminal import Shown
    from conformance.records.record import Record
    from conformance.running.examine import Outcome
    from conformance.running.isolation import ProcessLimits, Walker
    from conformance.running.isolation_child import Stated
    from conformance.stateful.checking import Stateful
    from conformance.stateful.layer import StatefulLayer

SLOW = ("logging", "subtests", "warnings", "unraisableexception", "threadexception")
"""Plugins of pytest to disable, because each costs as much per test as a small attention call."""

UNUSED = "hypothesispytest"
"""A pytest plugin to disable, because it would import all of Hypothesis for its summary lines."""

_PATHS: dict[str, dict[str, Any]] = {
    "record": {"type": Path, "action": Once},
    "case-file": {"type": Path},
}
"""By option, arguments of `add_argument` that replace or extend those in `OPTIONS`.

The suite's pytest plugin does not use them: there, paths stay strings, because xdist sends them to
workers.
"""


def add_parser(commands: Commands) -> None:
    """Add the parser of `run`."""
    run = commands.add_parser(
        "run",
        help="examine implementations and write a record",
        description="Examine implementations. Options that are not listed go to pytest: -k, -x, "
        "-n, --junitxml.",
    )
    run.add_argument(
        "implementation",
        nargs="*",
        help=f"{IMPLEMENTATION}. Without any, what [tool.mha-conformance] of pyproject.toml says",
    )
    add_examination(run)
    run.add_argument(
        "--module",
        metavar="PATH",
        help="implementation is a function that returns a model as those of transformers: check "
        "its part at PATH, such as layers.3.self_attn, as a layer that keeps a state",
    )
    run.add_argument(
        "--strict",
        action="store_true",
        help="exit with 1 if a requirement of level must fails; -x, which stops there, does so too",
    )
    run.add_argument(
        "-v", "--verbose", action="count", default=0, help="a line for each item; -vv for more"
    )
    add_format(run, "run")
    run.set_defaults(action=_run, passes_on=True, device=None)


_STOPS = re.compile(r"-[a-z]*x|--exitfirst|--maxfail")
"""The pattern of pytest's arguments that stop at a failure."""


def add_examination(run: argparse.ArgumentParser) -> None:
    """Add the options in `OPTIONS`, which determine what is examined and how, and --quiet."""
    for name, attributes in OPTIONS.items():
        run.add_argument(f"--{name}", **{**attributes, **_PATHS.get(name, {})})
    add_quiet(run)
    run.set_defaults(tell_help=run.format_help)


def _run(options: argparse.Namespace) -> int:
    if not options.implementation:
        fill_in(options, read_settings())
        if not options.implementation:
            raise ConformanceError(
                "which implementation? name one, or write implementations in "
                "[tool.mha-conformance] of pyproject.toml"
            )
    options.device = options.device or "cpu"
    _begin(options)
    if options.module is not None:
        for spec in options.implementation:
            if ":" not in spec:
                raise ConformanceError(
                    f"--module: {spec}: name the function that makes the model, FILE.py:NAME"
                )
        options.implementation = [f"{spec}:{options.module}" for spec in options.implementation]
    stateful = _stateful(options)
    if stateful:
        return _run_stateful(options, stateful)
    # Without failures, pytest would never stop at the first one.
    strict = options.strict or any(map(_STOPS.match, options.rest))
    record = None if strict or options.verbose else standing(options)
    if record is None:
        return examine(options, survey=not strict)
    from conformance.running.examine import Outcome

    outcome = Outcome(record, path=options.record.absolute())
    if options.format == "json":
        _print_summary(outcome, ExitCode.OK)
    else:
        print(outcome)
        print_standing(options.record, record)
    return ExitCode.OK


def _begin(options: argparse.Namespace) -> None:
    """Prepare the process for implementations, before anything that is not the suite's is imported.

    In the process of a command, the server of isolated implementations is forked from it.
    """
    pristine = is_watched() and ("OMP_NUM_THREADS" in os.environ or "numpy" not in sys.modules)
    # TensorFlow's log level stays, because a crash report shows the last line that it printed.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if pristine and any(
        is_isolated(spec, options.isolate, debugging=False) for spec in options.implementation
    ):
        from conformance.running.isolation import serve_by_fork

        serve_by_fork()


STATEFUL = ("dtype", "device", "isolate", "record", *LIMITS)
"""The options in `OPTIONS` that apply to a layer that keeps a state."""


def _limits(options: argparse.Namespace) -> ProcessLimits:
    """Return the limits of an isolated implementation's process."""
    from conformance.running.run import limits_of

    return limits_of(lambda name: getattr(options, name.strip("-").replace("-", "_")))


def _stateful(options: argparse.Namespace) -> dict[str, StatefulLayer | Walker]:
    """Return the layers that keep a state, or their processes, by implementation; {} if none does.

    Raises:
        ConformanceError: if only some implementations are such layers, or if one cannot be loaded.
    """
    from conformance.stateful.layer import find_stateful, may_be_stateful

    found: dict[str, StatefulLayer | Walker] = {}
    for spec in filter(may_be_stateful, options.implementation):
        if is_isolated(spec, options.isolate, debugging=False):
            from conformance.running.isolation import Walker

            walker = Walker(spec, options.device, _limits(options))
            if walker.stated is not None:
                found[spec] = walker
        else:
            layer = find_stateful(spec)
            if layer is not None:
                found[spec] = layer
    others = [spec for spec in options.implementation if spec not in found]
    if found and others:
        raise ConformanceError(f"{', '.join(others)}: run it without layers that keep a state")
    return found


def _run_stateful(options: argparse.Namespace, layers: Mapping[str, StatefulLayer | Walker]) -> int:
    """Check layers that keep a state, print what was found, and return the exit code.

    Raises:
        ConformanceError: if there are options of another kind.
    """
    for name, attributes in OPTIONS.items():
        given = getattr(options, name.replace("-", "_"))
        if name not in STATEFUL and given and given != attributes.get("default"):
            raise ConformanceError(
                f"--{name}: a layer that keeps a state is checked with all ways; there are "
                "--dtype, --device, --module, --record, --isolate, --strict, --format, -v and "
                f"--{', --'.join(LIMITS)}"
            )
    if options.rest:
        raise ConformanceError(f"{options.rest[0]}: a layer that keeps a state needs no pytest")

    def begins(way: str) -> None:
        # At once, because the layer may hang or end the process.
        if options.verbose:
            print(printable(way), file=sys.stderr, flush=True)

    found = [_walked(options, spec, layer, begins) for spec, layer in layers.items()]
    if options.record is not None:
        declared: dict[str, Any] = {
            spec: getattr(one, "stated", one) for spec, one in layers.items()
        }
        _record_stateful(options, declared, found)
    if options.format == "json":
        print_json([{"name": one.name, "results": one.results} for one in found])
    else:
        print(printable("\n\n".join(map(str, found))))
        if options.record is not None:
            print(f"record: {options.record}")
    if not all(one.is_verified for one in found):
        return ExitCode.NOTHING_VERIFIED
    return ExitCode.DEVIATES if options.strict and any(one.wrong for one in found) else ExitCode.OK


def _walked(
    options: argparse.Namespace,
    spec: str,
    layer: StatefulLayer | Walker,
    begins: Callable[[str], None],
) -> Stateful:
    """Return what is found of a layer in this process or, if it is a `Walker`, in its own."""
    from conformance.stateful.checking import Stateful, chosen, examine_stateful
    from conformance.stateful.layer import StatefulLayer
    from conformance.stateful.ways import WAYS

    if isinstance(layer, StatefulLayer):
        return examine_stateful(
            layer, dtypes=options.dtype, device=options.device, spec=spec, begins=begins
        )
    assert layer.stated is not None
    found = Stateful(layer.stated.name, options.device)
    names = [way.name for way in WAYS]
    for dtype in chosen(options.dtype) or layer.stated.dtypes:
        found.results.extend(layer.results(dtype, names, begins))
    layer.close()
    return found


def _record_stateful(
    options: argparse.Namespace,
    layers: Mapping[str, StatefulLayer | Stated],
    found: Sequence[Stateful],
) -> None:
    """Write what was found as the record of a run, so that a gate can judge it."""
    from msgspec.structs import replace

    from conformance.frameworks import framework
    from conformance.frameworks.base import package_versions
    from conformance.records.findings import BITS
    from conformance.records.findings import STATEFUL as PREFIX
    from conformance.records.header import CaseInfo, Implementation
    from conformance.records.record import Record, save
    from conformance.running.provenance import adapter_digest, header_of
    from conformance.stateful.checking import BITS_SENTENCE
    from conformance.stateful.ways import SENTENCES, WAYS

    described: list[Implementation] = []
    packages: dict[str, str] = {}
    for spec, layer in layers.items():
        bridge = framework(layer.framework)
        versions = package_versions(bridge.packages)
        packages |= versions
        described.append(
            Implementation(
                name=layer.name,
                title=layer.name,
                documentation="",
                framework=layer.framework,
                spec=spec,
                versions=versions,
                modes=["default"],
                dtypes=list(layer.dtypes),
                masks=[],
                kind="layer",
                digest=adapter_digest(spec, layer.framework),
            )
        )
    selection = " ".join(f"--dtype {dtype}" for dtype in options.dtype)
    command = shlex.join(["mha-conformance", "run", *layers, *selection.split()])
    header = header_of(
        [], described, [], options.device, selection, command=command, name=options.record.stem
    )
    made = replace(header.provenance, packages=header.provenance.packages | packages)
    results = [result for one in found for result in one.results]
    sentences = {f"{PREFIX}{way.name}": SENTENCES[way.requirement] for way in WAYS}
    sentences[BITS] = BITS_SENTENCE
    cases = {each.case: CaseInfo(sentences.get(each.case, ""), []) for each in results}
    header = replace(header, provenance=made, cases=cases, planned=len(results))
    options.record.parent.mkdir(parents=True, exist_ok=True)
    save(options.record, Record(header, complete=True, results=results))


def fill_in(options: argparse.Namespace, settings: Settings) -> None:
    """Take from `settings` the implementations and options that the command line does not give.

    Set `options.chosen` to the names of those options with which `settings` chooses cases, dtypes,
    modes or a level. These are all that the project asks, so that a run of them is not a part of a
    run.
    """
    names = {"case": "cases", "dtype": "dtypes", "mode": "modes", "level": "level"}
    keys = {name: getattr(settings, key) for name, key in names.items()}
    options.chosen = [name for name, value in keys.items() if value and not getattr(options, name)]
    for name in options.chosen:
        setattr(options, name, keys[name])
    options.implementation = options.implementation or settings.implementations
    options.device = options.device or settings.device
    if settings.record is not None:
        options.record = options.record or Path(settings.record)


def _print_summary(outcome: Outcome, code: ExitCode) -> None:
    from conformance.running.examine import summary

    print_json(summary(outcome, code))


def standing(options: argparse.Namespace) -> Record | None:
    """Return the record named by --record if it is still up to date, or else None.

    Only a run of all cases on the CPU can be skipped. So return None with --fresh, with any option
    that selects cases, dtypes, modes, a shard, a smaller level or a case file, and with any
    argument for pytest other than a number of workers. If `begin` has started a run in the record's
    folder, the record is saved with the id of that run.

    Raises:
        ConformanceError: if another process is writing the record.
    """
    from conformance.running.provenance import begun, environment

    workers = re.fullmatch(r"(-n ?|--numprocesses[ =])\w+", " ".join(options.rest))
    restrictions = options.case, options.dtype, options.mode, options.case_file
    level = level_of(options.level, *restrictions)
    narrowed = any(restrictions) or level not in WHOLE
    if options.record is None or options.fresh or narrowed or options.shard != "1/1":
        return None
    if (options.rest and not workers) or not options.record.exists():
        return None
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    environment()
    from msgspec.structs import replace

    from conformance.records.record import journal_path, save
    from conformance.running.merging import Lock, unchanged
    from conformance.running.provenance import remember

    if journal_path(options.record).exists():
        return None
    with Lock(options.record):
        record = unchanged(options.record, options.implementation, options.device, level)
        run = begun(options.record.parent)
        if record is not None and run and run != record.header.provenance.run:
            provenance = replace(record.header.provenance, run=run)
            record = replace(record, header=replace(record.header, provenance=provenance))
            save(options.record, record)
    remember()
    return record


def print_standing(path: Path, record: Record) -> None:
    """Print when the results were measured, that --fresh measures them again, and the path."""
    from conformance.running.merging import as_measured

    created = record.header.provenance.created[:10]
    days = [result.measured or created for result in record.results]
    print(f"{as_measured(days, len(days))}; --fresh measures all again")
    print(printable(f"record: {path.absolute()}"))


def examine(
    options: argparse.Namespace, *more: str, survey: bool, baseline: Path | None = None
) -> int:
    """Run the suite's pytest session, and return the exit code.

    Set `options.written` to the path of the record, or to None if there is no record.

    Args:
        options: the options of `add_examination`, the implementations, and arguments for pytest.
        more: further arguments for pytest.
        survey: True to record deviations without failing; False to fail on them.
        baseline: a file of known deviations; the run fails on all others, even with `survey`. None
            for no such comparison.

    Raises:
        NothingRun: if pytest ended without an error, but did not run the session.
        ConformanceError: if pytest refuses its arguments, or an implementation or a case file
            cannot be loaded.
    """
    _begin(options)
    import pytest

    from conformance.commands.terminal import Interruption, Progress, Refusals
    from conformance.running.plugin import SUITE
    from conformance.running.provenance import environment
    from conformance.text import shows_progress, stdout_to_stderr

    environment()
    _check_names(options)
    gated = baseline is not None
    # The gate's -v has another meaning.
    verbose = 0 if gated else getattr(options, "verbose", 0)
    refusals = Refusals()
    plugins: list[object] = [refusals, Interruption()]
    arguments = [str(SUITE), "-c", str(SUITE.with_name("pytest.ini")), "-p", "no:cacheprovider"]
    # By name, because PYTEST_DISABLE_PLUGIN_AUTOLOAD may be set.
    arguments += ["-p", "mha-conformance"]
    arguments += ["--rootdir", str(SUITE.parent), "-q", "--assert=plain", "--capture=sys"]
    # What fails is told by the suite itself.
    arguments += [] if verbose else ["-rN"]
    arguments += [*(f"-pno:{plugin}" for plugin in (*SLOW, UNUSED)), *_for_pytest(options)]
    arguments += ["--survey"] if survey else []
    arguments += ["--conformance-baseline", str(baseline)] if gated else []
    chosen = getattr(options, "chosen", ())
    arguments += ["--conformance-chosen", " ".join(chosen)] if chosen else []
    arguments += ["-" + "v" * (verbose + 1), "--no-header"] if verbose else []
    if not verbose and not {"-s", "--pdb", "--trace"} & {*options.rest}:
        shown: Shown = "nothing" if options.quiet else "bar" if shows_progress() else "lines"
        plugins.append(Progress(shown, ", ".join(options.implementation)))
        arguments += ["-o", "console_output_style=classic"]
    as_json = getattr(options, "format", "text") == "json"
    with stdout_to_stderr() if as_json else nullcontext(), refusals.listening():
        pytest_code = _interruptible([*arguments, *more, *options.rest], plugins)
    if pytest_code == pytest.ExitCode.USAGE_ERROR:
        raise refusals.error(re.findall(r"--[\w-]+", options.tell_help()))
    refusals.echo()
    run = refusals.run
    if pytest_code == pytest.ExitCode.OK:
        # With --fixtures, for example, pytest returns 0 no matter how its session ended.
        if run is None or run.exit_status is None:
            given = " ".join([os.environ.get("PYTEST_ADDOPTS", ""), *options.rest]).strip()
            raise NothingRun(f"nothing was run: pytest was given {given}")
        pytest_code = run.exit_status
    # The record of a narrowed run has a different name, and there may be no record at all.
    options.written = run.written if run is not None else None
    if pytest_code == pytest.ExitCode.INTERRUPTED:
        print(f"mha-conformance: {_interrupted(options)}", file=sys.stderr)
    codes = {number: name for name, number in PYTEST_CODES.items()}
    code = codes.get(pytest_code, ExitCode.INCOMPLETE)
    if code == ExitCode.DEVIATES and survey and not gated:
        # In a survey, an item fails only if it has no outcome.
        code = ExitCode.INCOMPLETE
    if as_json and run is not None:
        _print_summary(run.outcome, code)
    return code


def _interruptible(arguments: list[str], plugins: list[object]) -> int:
    """Run pytest, and return its exit code.

    If pytest raises an exception while it handles a KeyboardInterrupt, return `INTERRUPTED`.
    """
    import pytest

    try:
        return pytest.main(arguments, plugins=plugins)
    except Exception as error:
        # A frame that has just been entered has no line number, with which pytest calculates.
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        return pytest.ExitCode.INTERRUPTED


def _interrupted(options: argparse.Namespace) -> str:
    """Return what an interrupted run leaves, and how to go on."""
    if options.written is not None:
        return printable(
            f"interrupted; {relative(options.written)} keeps what was measured, and the same "
            "command goes on from there"
        )
    if options.record is not None:
        return "interrupted before anything was measured"
    return "interrupted; nothing is kept without --record FILE, with which a run can go on"


def _for_pytest(options: argparse.Namespace) -> list[str]:
    """Return the implementations and the options in `OPTIONS` as arguments for the plugin."""
    arguments = [word for name in options.implementation for word in ("--implementation", name)]
    for name in OPTIONS:
        value = getattr(options, name.replace("-", "_"))
        if value is False:
            arguments += ["--no-isolate"] if name == "isolate" else []
        elif value is True:
            arguments.append(f"--{name}")
        elif value is not None:
            for one in value if isinstance(value, list) else [value]:
                arguments += [f"--{name}", str(one.absolute() if isinstance(one, Path) else one)]
    return arguments


def _check_names(options: argparse.Namespace) -> None:
    """Load implementations and case files before pytest starts, so that each error is one line.

    An isolated implementation is loaded in its own process instead, which the run then uses.
    """
    from conformance.adapter.loading import load
    from conformance.cases.casefile import load_case
    from conformance.running import observing
    from conformance.running.run import exit_raises
    from conformance.running.selection import certain_names, check_distinct

    check_distinct(certain_names(options.implementation))
    debugging = bool({"--pdb", "--trace"} & {*options.rest})
    for spec in options.implementation:
        if not is_isolated(spec, options.isolate, debugging=debugging):
            if options.record:
                # What is imported now is an input of the results.
                observing.observe()
            with exit_raises():
                load(spec)
            continue
        from conformance.running.isolation import supervise

        supervise(spec, options.device, _limits(options)).start()
    for file in options.case_file:
        load_case(file)
