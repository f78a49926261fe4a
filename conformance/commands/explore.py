"""`mha-conformance explore` and `reproduce`: find wrong answers, and write files that show them."""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from conformance.commands.shared import (
    Commands,
    add_device,
    add_files,
    add_format,
    add_implementation,
    add_quiet,
    add_repeatable,
    at_least,
    be_quiet_and_single_threaded,
    check_writable,
    one_case,
    print_json,
    replace_file,
)
from conformance.errors import (
    ConformanceError,
    ExitCode,
    Unavailable,
    Unsupported,
    check_names,
)
from conformance.text import printable, progress, stdout_to_stderr

if TYPE_CHECKING:
    from collections.abc import Callable

    from conformance.adapter.base import Adapter
    from conformance.cases.case import Case
    from conformance.explore.search import Known, ProblemSearch, SearchOptions
    from conformance.explore.shrinking import Small
    from conformance.explore.trial import Trial, TrialDeviation
    from conformance.running.known import KnownDeviations

SUFFIX = ".case"
LONGEST_SCRIPT = 180.0
"""The time limit in seconds for a generated script; importing TensorFlow alone takes ten."""


class Shown(msgspec.Struct, frozen=True):
    """A deviation on the smallest problem found or, with --no-shrink, on the original problem.

    Attributes:
        kind: the id of the requirement that is not met, or the type of the exception.
        detail: a sentence about the deviation.
        dtype, mode: the dtype and mode in which the problem is run.
        ratio: the error in units of σ; None if nothing was measured, or if the error is infinite.
        sizes: the sizes of the problem, such as {"batch": 1, "keys": 2}; {} with --every-mode.
    """

    implementation: str
    kind: str
    detail: str
    dtype: str
    mode: str
    ratio: float | None
    sizes: dict[str, int]


class Searched(msgspec.Struct, frozen=True):
    """What `explore` and `reproduce` found.

    Attributes:
        deviations: at most one; with --every-mode, one for each new class of deviations of each
            implementation.
        files: the case files and scripts that were written; with --every-mode, only the records.
        exit_code: the exit code of the command.
    """

    deviations: list[Shown]
    files: list[str]
    exit_code: int


def _answering(action: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Return an action that calls `action` and, with --format json, prints the results as JSON.

    What `action` itself prints then goes to stderr.
    """

    def answer(options: argparse.Namespace) -> int:
        options.shown, options.files = [], []
        if options.format == "text":
            return action(options)
        with stdout_to_stderr():
            code = action(options)
        print_json(Searched(options.shown, [str(path) for path in options.files], int(code)))
        return code

    return answer


def add_parser(commands: Commands) -> None:
    """Add the parsers of `explore` and `reproduce` to `commands`."""
    search = commands.add_parser(
        "explore",
        help="search for problems that an implementation answers wrongly",
        description="Draw random problems, compare the answers with the reference, and shrink a "
        "problem that deviates. Two files are written: a case for run --case-file, and a "
        "stand-alone script. Exit code 0: nothing found; 1: a deviation. With --every-mode, each "
        "mode is searched to the end of its time, and each class of deviations is kept once, with "
        "those that --record holds already; exit code 1: a new one. With --baseline, what is known "
        "is no finding.",
    )
    add_implementation(search, several=True)
    search.add_argument(
        "--every-mode",
        action="store_true",
        help="search each mode for --seconds, and keep what is found in --record",
    )
    search.add_argument(
        "--record",
        type=Path,
        default=Path("explored"),
        metavar="FOLDER",
        help="where --every-mode keeps NAME.json and case files (default: explored)",
    )
    add_files(
        search,
        baseline="known deviations, as for gate: what one of them explains is counted, and no "
        "finding",
    )
    search.add_argument(
        "--seed",
        type=at_least(0),
        default=0,
        metavar="N",
        help="equal seeds draw the same problems",
    )
    search.add_argument("--examples", type=at_least(1), help="stop after this many problems")
    search.add_argument(
        "-o", "--output", type=Path, default=Path(), help="a folder for the files (default: here)"
    )
    add_format(search, "explore")
    search.set_defaults(action=_answering(_explore))

    again = commands.add_parser(
        "reproduce",
        help="a stand-alone script for a deviation at one case",
        description="Run a case, shrink the problem with the worst deviation, and write a script "
        "that shows it with NumPy and the library only. Exit code 0: nothing deviates, nothing is "
        "written; 1: the script is written.",
    )
    again.add_argument("case", help="id of a case, a pattern that matches one, or a case file")
    add_implementation(again)
    again.add_argument("-o", "--output", type=Path, help="the file to write")
    add_format(again, "reproduce")
    again.set_defaults(action=_answering(_reproduce))
    for command in (search, again):
        command.add_argument(
            "--seconds", type=float, default=60.0, help="time to search, and to shrink"
        )
        command.add_argument(
            "--no-shrink", dest="shrink", action="store_false", help="keep the problem as it is"
        )
        add_repeatable(command, dtype="only this dtype", mode="only this mode")
        add_device(command)
        add_quiet(command)


def _explore(options: argparse.Namespace) -> int:
    if options.every_mode:
        return _survey(options)
    if len(options.implementation) > 1:
        raise ConformanceError("several implementations are explored with --every-mode only")
    (spec,) = options.implementation
    adapter = _prepared(options, spec)
    from conformance.explore.search import ProblemSearch

    check_writable(options.output / f"NAME{SUFFIX}")
    known = _known(options, adapter)
    adapter.prepare()
    search = ProblemSearch(adapter, _extent(options), time.monotonic() + options.seconds)
    found, interrupted = None, False
    try:
        with progress(f"searching {adapter.name}"):
            found = _first(adapter, search, options, known or _is_never_known)
    except KeyboardInterrupt:
        interrupted = True
    except Unsupported as reason:
        print(f"{adapter.name}: nothing to search: {printable(str(reason))}")
        return ExitCode.NOTHING_VERIFIED
    took = time.monotonic() - search.started
    print(
        f"{adapter.name}: {search.answered} problems answered in {took:.0f} s, seed {options.seed}"
    )
    _print_known(known)
    if found is not None:
        return _write(adapter, spec, options, found)
    if interrupted:
        return ExitCode.INTERRUPTED
    if not search.answered:
        print(f"none of {search.drawn} could be expressed: {printable(search.why_not)}")
        return ExitCode.NOTHING_VERIFIED
    print("no deviation found")
    return ExitCode.OK


def _first(
    adapter: Adapter, search: ProblemSearch, options: argparse.Namespace, is_known: Known
) -> Small | None:
    """Return the first deviation that is not known, on a problem made smaller by `_shrunk`.

    `is_known` tells which deviations are known; the result is unknown before and after shrinking.
    In each failing trial, only the first unknown deviation is shrunk. Return None if the search
    ends without such a deviation. Time spent on shrinking is not search time.
    """
    for trial, wrong in search:
        new = next((one for one in wrong if not is_known(trial, one)), None)
        if new is not None:
            began = time.monotonic()
            small = _shrunk(adapter, trial, new, options)
            # A deviation may turn out to be known once the problem is shrunk.
            shrunk_is_known = is_known(small.trial, small.deviation)
            took = time.monotonic() - began
            search.started, search.until = search.started + took, search.until + took
            if not shrunk_is_known:
                return small
    return None


def _extent(options: argparse.Namespace) -> SearchOptions:
    from conformance.explore.search import MOST_EXAMPLES, SearchOptions

    return SearchOptions(
        dtypes=options.dtype,
        modes=options.mode,
        device=options.device,
        seed=options.seed,
        examples=MOST_EXAMPLES if options.examples is None else options.examples,
    )


def _is_never_known(trial: Trial, deviation: TrialDeviation) -> bool:
    return False


def _known(options: argparse.Namespace, adapter: Adapter) -> KnownDeviations | None:
    """Return the known deviations of an implementation, or None without --baseline.

    Raises:
        ConformanceError: the file given by --baseline does not exist or cannot be read.
    """
    if options.baseline is None:
        return None
    from conformance.reports.gate.baseline import read_baseline
    from conformance.running.known import KnownDeviations

    baseline = read_baseline(options.baseline)
    if not baseline.there:
        raise ConformanceError(baseline.absence)
    return KnownDeviations(baseline, adapter, adapter.name, options.device)


def _print_known(known: KnownDeviations | None) -> None:
    for entry, times in known.seen.most_common() if known is not None else ():
        print(printable(f"known, {times} times: {entry.place}: {entry.reason}"))


def _survey(options: argparse.Namespace) -> int:
    from conformance.explore.search import survey

    worst = ExitCode.OK
    for spec in options.implementation:
        adapter = _prepared(options, spec)
        known = _known(options, adapter)
        is_known = known or _is_never_known
        try:
            adapter.prepare()
            with progress(f"searching {adapter.name}"):
                new = survey(adapter, _extent(options), options.seconds, options.record, is_known)
        except (Unsupported, Unavailable) as reason:
            print(f"{adapter.name}: nothing to search: {printable(str(reason))}")
            worst = max(worst, ExitCode.NOTHING_VERIFIED)
            continue
        print(f"{adapter.name}: {options.record / adapter.name}.json, {len(new)} new")
        _print_known(known)
        options.files.append(options.record / f"{adapter.name}.json")
        for one in new:
            about = (one.nature[0], one.detail, one.dtype, one.modes[0], one.ratio)
            options.shown.append(Shown(adapter.name, *about, sizes={}))
            features = ", ".join(one.features) or "nothing special"
            print(printable(f"  {one.case}: {one.detail}, {one.dtype}, {one.modes[0]}: {features}"))
        if new:
            worst = ExitCode.DEVIATES
    return worst


def _reproduce(options: argparse.Namespace) -> int:
    adapter = _prepared(options, options.implementation)
    from conformance.cases.casefile import read
    from conformance.explore.script import script
    from conformance.explore.trial import worst

    stored, failure = Path(options.case), None
    case: Case
    if stored.suffix == SUFFIX or stored.is_file():
        case, failure = read(stored)
    else:
        case = one_case(options.case)
    if not case.defined:
        raise ConformanceError(f"{case.id}: no definition settles it, so nothing deviates from one")
    path = options.output or Path(f"repro-{_word(adapter.name)}-{_word(case.id)}.py")
    check_writable(path)
    adapter.prepare()
    dtypes = options.dtype
    if failure is not None and not dtypes and failure.dtype in adapter.dtypes:
        dtypes = [failure.dtype]
    failing, answered = worst(adapter, case, dtypes, options.mode, options.device)
    if not answered:
        print(f"{adapter.name}: {case.id} is unsupported")
        return ExitCode.NOTHING_VERIFIED
    if failing is None:
        print(
            f"{adapter.name}: nothing deviates at {case.id}; output, weights and gradients of one "
            "call were compared, and what needs several calls shows in mha-conformance run"
        )
        return ExitCode.OK
    small = _shrunk(adapter, *failing, options)
    text = script(adapter, options.implementation, small.trial, small.deviation, case.id)
    _print_deviation(options, adapter, small)
    _write_script(options, path, text, small.deviation)
    return ExitCode.DEVIATES


def _prepared(options: argparse.Namespace, spec: str) -> Adapter:
    """Check --seconds, --mode and --dtype, and return the adapter that `spec` names or locates."""
    be_quiet_and_single_threaded()
    from conformance.adapter.loading import load
    from conformance.definition.dtypes import DTYPES

    if not 0 < options.seconds < float("inf"):
        raise ConformanceError(f"--seconds is {options.seconds:g}; say a number above 0")
    adapter = load(spec)
    check_names("mode", options.mode, (mode.name for mode in adapter.modes))
    check_names("dtype", options.dtype, DTYPES)
    return adapter


def _shrunk(
    adapter: Adapter, trial: Trial, deviation: TrialDeviation, options: argparse.Namespace
) -> Small:
    """Return the smallest trial found that fails in the same way; with --no-shrink, `trial`."""
    from conformance.explore.shrinking import Small, shrink

    if not options.shrink:
        return Small(trial, deviation, finished=True)
    until = time.monotonic() + options.seconds
    with progress("making it smaller"):
        small = shrink(adapter, trial, deviation, until, modes=options.mode, dtypes=options.dtype)
    if not small.finished:
        print("the search for a smaller problem was not finished")
    return small


def _write(adapter: Adapter, spec: str, options: argparse.Namespace, small: Small) -> ExitCode:
    """Write a case file and, unless it is too long, a script; print the deviation.

    Return the exit code `DEVIATES`.
    """
    from conformance.explore.script import TooLong, script
    from conformance.records.findings import STORED

    kind = small.deviation.array or small.deviation.kind
    name = _word(f"{adapter.name}-{kind}-{small.trial.problem.dtype}")
    path = options.output / f"{name}{SUFFIX}"
    case = small.store(adapter, path, name)
    _print_deviation(options, adapter, small)
    options.files.append(path)
    print(f"case: {path}: mha-conformance run {spec} --case-file {path} --case {STORED}/")
    try:
        text = script(adapter, spec, small.trial, small.deviation, case.id)
    except TooLong as error:
        print(f"no script: {error}")
    else:
        _write_script(options, options.output / f"{name}.py", text, small.deviation)
    return ExitCode.DEVIATES


def _print_deviation(options: argparse.Namespace, adapter: Adapter, small: Small) -> None:
    from conformance.records.numbers import LIMIT
    from conformance.reports.wording import sigmas

    deviation, shape = small.deviation, small.trial.problem.shape
    # The text of an exception begins with its type, which is the kind already.
    kind = deviation.requirement or deviation.kind
    text = printable(deviation.text.removeprefix(f"{kind}: "))
    dtype, mode = small.trial.problem.dtype, small.trial.mode.name
    print(
        f"{kind}: {text}, {dtype}, mode {mode}"
        + (f": {sigmas(deviation.ratio)}σ, allowed {LIMIT:g}σ" if deviation.index else "")
    )
    sizes = {
        "batch": shape.batch,
        "queries": shape.query_length,
        "keys": shape.key_length,
        "heads": shape.heads,
        "key/value heads": shape.kv_heads,
        "head size": shape.head_size,
    }
    print("smallest problem: " + ", ".join(f"{name} {size}" for name, size in sizes.items()))
    ratio = deviation.finite_ratio if deviation.index else None
    options.shown.append(Shown(adapter.name, kind, text, dtype, mode, ratio, sizes))


def _write_script(
    options: argparse.Namespace, path: Path, text: str, deviation: TrialDeviation
) -> None:
    """Write the script, run it in another process, and print whether it shows the deviation.

    The process is ended after `LONGEST_SCRIPT` seconds.
    """
    import subprocess
    import sys

    replace_file(path, text.encode())
    options.files.append(path)
    try:
        ran = subprocess.run(
            [sys.executable, str(path)],
            capture_output=True,
            text=True,
            timeout=LONGEST_SCRIPT,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"script: {path}: run, and not finished after {LONGEST_SCRIPT:.0f} s")
        return
    outcome = "it shows no deviation: it needs how this suite calls, such as compiled"
    if ran.returncode != 0:
        # Some frameworks print more lines after the error message.
        errors = ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"]
        named = [line for line in errors if re.match(r"[\w.]*(Error|Exception)\b", line)]
        wanted = re.compile(rf"([\w.]+\.)?(AssertionError|{deviation.kind})\b")
        expected = [line for line in errors if wanted.match(line)]
        how = "as it should" if expected else "in another way; correct it before you use it"
        outcome = f"it fails {how}: {printable((expected or named or errors)[-1])[:120]}"
    print(f"script: {path}: run, and {outcome}")


def _word(text: str) -> str:
    """Return `text` as a name for a file or case: lower-case words and digits joined by hyphens.

    The name has at most 60 characters. If no valid name results, return "case".
    """
    from conformance.cases.casefile import is_name

    word = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60].strip("-")
    return word if is_name(word) else "case"
