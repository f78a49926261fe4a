"""`mha-conformance explore` and `reproduce`: find a wrong answer, show it without the suite."""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.commands.shared import (
    Commands,
    add_device,
    add_implementation,
    add_quiet,
    add_repeatable,
    be_quiet_and_single_threaded,
)
from conformance.errors import ConformanceError, ExitCode, UnknownName, Unsupported

if TYPE_CHECKING:
    from conformance.adapter.base import Adapter
    from conformance.cases.case import Case
    from conformance.cases.casefile import Failure
    from conformance.explore.search import Options
    from conformance.explore.trial import Deviation, Trial

SUFFIX = ".case"
LONGEST_SCRIPT = 180.0
"""Seconds that a script may take to show its deviation; importing TensorFlow takes ten."""


def add_parser(commands: Commands) -> None:
    """Add the parsers of these commands to `commands`."""
    search = commands.add_parser(
        "explore",
        help="search for problems that an implementation answers wrongly",
        description="Draw random problems, compare with the reference, and make what deviates as "
        "small as it gets. Two files are written: a case that run --case-file asks again, and a "
        "stand-alone script. Exit code 0: nothing found; 1: a deviation.",
    )
    add_implementation(search)
    search.add_argument("--seed", type=int, default=0, help="equal seeds draw the same problems")
    search.add_argument("--examples", type=int, help="stop after so many problems")
    search.add_argument(
        "-o", "--output", type=Path, default=Path(), help="a folder for the files (default: here)"
    )
    search.set_defaults(action=_explore)

    again = commands.add_parser(
        "reproduce",
        help="a stand-alone script for a deviation at one case",
        description="Run a case, make its worst deviation as small as it gets, and write a "
        "script that shows it with NumPy and that library only. Exit code 0: nothing deviates, "
        "nothing is written; 1: the script is written.",
    )
    again.add_argument("case", help="id of a case, a pattern that finds one, or a case file")
    add_implementation(again)
    again.add_argument("-o", "--output", type=Path, help="the file to write")
    again.set_defaults(action=_reproduce)
    for command in (search, again):
        command.add_argument(
            "--seconds", type=float, default=60.0, help="time to search, and to shrink"
        )
        command.add_argument("--no-shrink", action="store_true", help="keep the problem as it is")
        add_repeatable(command, dtype="only this dtype", mode="only this mode")
        add_device(command)
        add_quiet(command)


def _explore(asked: argparse.Namespace) -> int:
    """Search, make what is found smaller, and write a case file and a script into the folder."""
    adapter, options = _prepared(asked)
    from conformance.explore.search import search
    from conformance.progress import progress
    from conformance.text import printable

    _check_folder(asked.output)
    adapter.prepare()
    end = time.monotonic() + options.seconds
    try:
        with progress(f"searching {adapter.name}"):
            state = search(adapter, options, end, lambda: time.monotonic() + options.seconds / 2)
    except Unsupported as reason:
        print(f"{adapter.name}: nothing to search: {printable(str(reason))}")
        return ExitCode.NOTHING_VERIFIED
    took = time.monotonic() - state.started
    print(
        f"{adapter.name}: {state.answered} problems answered in {took:.0f} s, seed {options.seed}"
    )
    if state.failing is None:
        if state.interrupted:
            return ExitCode.INTERRUPTED
        if not state.answered:
            print(f"none of {state.drawn} could be expressed: {printable(state.why_not)}")
            return ExitCode.NOTHING_VERIFIED
        print("no deviation found")
        return ExitCode.OK
    trial, deviation, finished = *state.failing, True
    if options.shrink and not state.interrupted:
        trial, deviation, finished = _shrunk(adapter, trial, deviation, options.seconds)
    if not finished:
        print("the search for a smaller problem was not finished")
    return _write(adapter, asked.implementation, trial, deviation, asked.output)


def _reproduce(asked: argparse.Namespace) -> int:
    """Write a script for the worst deviation of an implementation at one case."""
    adapter, options = _prepared(asked)
    from conformance.commands.drawing import replace
    from conformance.explore.script import script
    from conformance.explore.trial import worst

    case, found = _one_case(asked.case)
    if not case.defined:
        raise ConformanceError(f"{case.id}: no definition settles it, so nothing deviates from one")
    if asked.output is not None:
        _check_folder(asked.output.parent)
        if asked.output.is_dir():
            raise ConformanceError(f"{asked.output}: is a folder; name a file in it")
    adapter.prepare()
    dtypes = options.dtypes
    if found is not None and not dtypes and found.dtype in adapter.dtypes:
        dtypes = [found.dtype]
    failing, answered = worst(adapter, case, dtypes, options.modes, options.device)
    if failing is None:
        if not answered:
            print(f"{adapter.name}: {case.id} is unsupported")
            return ExitCode.NOTHING_VERIFIED
        print(
            f"{adapter.name}: nothing deviates at {case.id}; output, weights and gradients of one "
            "call were compared, and what needs several calls shows in mha-conformance run"
        )
        return ExitCode.OK
    trial, deviation = failing
    if options.shrink:
        trial, deviation, _ = _shrunk(adapter, trial, deviation, options.seconds)
    text = script(adapter, asked.implementation, trial, deviation, case.id)
    path = asked.output or Path(f"repro-{_word(adapter.name)}-{_word(case.id)}.py")
    replace(path, text.encode())
    _print_deviation(trial, deviation)
    print(f"script: {path}: {_checked(path)}")
    return ExitCode.DEVIATES


def _prepared(asked: argparse.Namespace) -> tuple[Adapter, Options]:
    """Return the adapter and the options, checked before the search starts.

    Raises:
        ConformanceError: the options are wrong, or the implementation cannot be had.
    """
    be_quiet_and_single_threaded()
    from conformance.adapter.loading import load
    from conformance.definition.dtypes import dtype_of
    from conformance.explore.search import Options

    if not 0 < asked.seconds < float("inf"):
        raise ConformanceError(f"--seconds is {asked.seconds:g}; say a number above 0")
    adapter = load(asked.implementation)
    known = [mode.name for mode in adapter.modes]
    for name in asked.mode:
        if name not in known:
            raise UnknownName("mode", name, known)
    given = {name: getattr(asked, name, None) for name in ("seed", "examples")}
    options = Options(
        dtypes=[dtype_of(name).name for name in asked.dtype],
        modes=asked.mode,
        device=asked.device,
        seconds=asked.seconds,
        shrink=not asked.no_shrink,
        **{name: value for name, value in given.items() if value is not None},
    )
    return adapter, options


def _one_case(pattern: str) -> tuple[Case, Failure | None]:
    """Return the one case that the name selects, from the catalogue or from a file."""
    from conformance.cases.casefile import read
    from conformance.cases.catalogue import find_cases

    path = Path(pattern)
    if path.suffix == SUFFIX or path.is_file():
        return read(path)
    cases = find_cases(pattern)
    if len(cases) > 1:
        names = ", ".join(case.id for case in cases[:6]) + ", ..." * (len(cases) > 6)
        raise ConformanceError(f"{pattern} finds {len(cases)} cases; say which: {names}")
    return cases[0], None


def _shrunk(
    adapter: Adapter, trial: Trial, deviation: Deviation, seconds: float
) -> tuple[Trial, Deviation, bool]:
    """Return the smallest problem found, and whether every step was tried, even if interrupted."""
    from conformance.explore.shrinking import shrink
    from conformance.progress import progress

    best = [(trial, deviation)]
    finished = False
    try:
        with progress("making it smaller"):
            finished = shrink(
                adapter,
                trial,
                deviation,
                time.monotonic() + seconds,
                lambda smaller, still: best.append((smaller, still)),
            ).finished
    except KeyboardInterrupt:
        pass
    return *best[-1], finished


def _write(
    adapter: Adapter, spec: str, trial: Trial, deviation: Deviation, folder: Path
) -> ExitCode:
    """Write the case file and the script, and print what is in them."""
    from conformance.cases.case import STORED
    from conformance.cases.casefile import Failure, store
    from conformance.commands.drawing import replace
    from conformance.explore.script import TooLong, script

    kind = deviation.array or deviation.kind
    name = _word(f"{adapter.name}-{kind}-{trial.problem.dtype}")
    why = f"Found by a search: {deviation.requirement or 'it raises'}: {deviation.text}"
    found = Failure(
        adapter.name,
        trial.problem.dtype,
        trial.mode.name,
        deviation.requirement,
        deviation.text,
        adapter.versions(),
    )
    path = folder / f"{name}{SUFFIX}"
    case = store(path, name, trial.problem, why, found)
    _print_deviation(trial, deviation)
    print(f"case: {path}: mha-conformance run {spec} --case-file {path} --case {STORED}/")
    try:
        text = script(adapter, spec, trial, deviation, case.id)
    except TooLong as error:
        print(f"no script: {error}")
        return ExitCode.DEVIATES
    program = folder / f"{name}.py"
    replace(program, text.encode())
    print(f"script: {program}: {_checked(program)}")
    return ExitCode.DEVIATES


def _print_deviation(trial: Trial, deviation: Deviation) -> None:
    from conformance.records.numbers import LIMIT
    from conformance.reports.wording import sigmas
    from conformance.text import printable

    shape = trial.problem.shape
    # The text of what was raised begins with its type, which is the kind.
    kind = deviation.requirement or deviation.kind
    text = printable(deviation.text.removeprefix(f"{kind}: "))
    print(
        f"{kind}: {text}, {trial.problem.dtype}, mode {trial.mode.name}"
        + (f": {sigmas(deviation.ratio)}σ, allowed {LIMIT:g}σ" if deviation.index else "")
    )
    print(
        f"smallest problem: batch {shape.batch}, queries {shape.query_length}, keys "
        f"{shape.key_length}, heads {shape.heads}, key/value heads {shape.kv_heads}, head size "
        f"{shape.head_size}"
    )


def _checked(path: Path) -> str:
    """Run the script in its own process, and return a description of the outcome."""
    import subprocess
    import sys

    from conformance.text import printable

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
        return f"run, and not finished after {LONGEST_SCRIPT:.0f} s"
    if ran.returncode == 0:
        return "run, and it shows no deviation: it needs how this suite calls, such as compiled"
    # Some frameworks say more after the error itself.
    errors = ran.stderr.strip().splitlines() or [""]
    named = [line for line in errors if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return f"run, and it fails as it should: {printable((named or errors)[-1])[:120]}"


def _check_folder(folder: Path) -> None:
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConformanceError(f"{folder}: is no folder that can be written to")


def _word(text: str) -> str:
    """Return text made safe for part of a file name or of a case name."""
    from conformance.cases.casefile import is_name

    word = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60].strip("-")
    return word if is_name(word) else "case"
