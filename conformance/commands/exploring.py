"""`mha-conformance explore` and `reproduce`: what to write, where, and what to say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.adapter.base import Adapter
from conformance.adapter.loading import load
from conformance.cases.case import Case
from conformance.cases.casefile import Found, is_name, read, store
from conformance.cases.catalogue import find_cases
from conformance.cases.stored import CHAPTER
from conformance.commands.drawing import replace
from conformance.definition.dtypes import dtype_of
from conformance.errors import ConformanceError, ExitCode, UnknownName, Unsupported
from conformance.explore.script import TooLong, script
from conformance.explore.search import MOST_EXAMPLES, Wanted, search
from conformance.explore.shrinking import ORDER, shrink
from conformance.explore.trial import Deviation, Trial, examined
from conformance.progress import progress
from conformance.records.numbers import LIMIT
from conformance.reports.wording import sigmas
from conformance.requirements.examination import Examination
from conformance.text import printable

SUFFIX = ".case"
LONGEST_SCRIPT = 180.0
"""Seconds that a script may take to show its deviation; importing TensorFlow takes ten."""


@dataclass(frozen=True)
class Options:
    """What the command line says; empty is everything."""

    dtypes: Sequence[str] = ()
    modes: Sequence[str] = ()
    device: str = "cpu"
    seconds: float = 60.0
    seed: int = 0
    examples: int = MOST_EXAMPLES
    shrink: bool = True


def explore(spec: str, options: Options, folder: Path) -> int:
    """Search, make what is found smaller, and write a case file and a script into the folder.

    Raises:
        ConformanceError: the options are wrong, the implementation cannot be had, or nothing can
            be written there; all but the last before anything is searched.
    """
    adapter = _adapter(spec, options)
    _check_folder(folder)
    adapter.prepare()
    wanted = Wanted(
        [dtype_of(name).name for name in options.dtypes],
        options.modes,
        options.device,
        options.seed,
        options.examples,
    )
    end = time.monotonic() + options.seconds
    try:
        with progress(f"searching {adapter.name}"):
            seen = search(adapter, wanted, end, lambda: time.monotonic() + options.seconds / 2)
    except Unsupported as reason:
        print(f"{adapter.name}: nothing to search: {printable(str(reason))}")
        return ExitCode.NOTHING_VERIFIED
    took = time.monotonic() - seen.started
    print(f"{adapter.name}: {seen.answered} problems answered in {took:.0f} s, seed {options.seed}")
    if seen.failing is None:
        if seen.interrupted:
            return ExitCode.INTERRUPTED
        if not seen.answered:
            print(f"none of {seen.drawn} could be expressed: {printable(seen.why_not)}")
            return ExitCode.NOTHING_VERIFIED
        print("no deviation found")
        return ExitCode.OK
    best, finished = list(seen.failing), True
    if options.shrink and not seen.interrupted:
        finished = _shrunk(adapter, best, options.seconds)
    trial, deviation = best
    assert isinstance(trial, Trial)
    assert isinstance(deviation, Deviation)
    if not finished:
        print("the search for a smaller problem was not finished")
    return _written(adapter, spec, trial, deviation, folder)


def reproduce(pattern: str, spec: str, options: Options, output: Path | None) -> int:
    """Write a script for the gravest deviation of an implementation at one case.

    Raises:
        ConformanceError: as `explore`; or the case is not one but several.
    """
    adapter = _adapter(spec, options)
    case, found = _one_case(pattern)
    if not case.defined:
        raise ConformanceError(f"{case.id}: no definition settles it, so nothing deviates from one")
    if output is not None:
        _check_folder(output.parent)
        if output.is_dir():
            raise ConformanceError(f"{output}: is a folder; name a file in it")
    adapter.prepare()
    dtypes = [dtype_of(name).name for name in options.dtypes]
    modes = list(options.modes)
    if found is not None and not dtypes and found.dtype in adapter.dtypes:
        dtypes = [found.dtype]
    trial, deviation, answered = _gravest(adapter, case, dtypes, modes, options.device)
    if trial is None or deviation is None:
        if not answered:
            print(f"{adapter.name}: {case.id} is unsupported")
            return ExitCode.NOTHING_VERIFIED
        print(
            f"{adapter.name}: nothing deviates at {case.id}; output, weights and gradients of one "
            "call were compared, and what needs several calls shows in mha-conformance run"
        )
        return ExitCode.OK
    best: list[object] = [trial, deviation]
    if options.shrink:
        _shrunk(adapter, best, options.seconds)
    trial, deviation = best  # type: ignore[assignment]
    assert isinstance(trial, Trial)
    assert isinstance(deviation, Deviation)
    text = script(adapter, spec, trial, deviation, case.id)
    path = output or Path(f"repro-{_word(adapter.name)}-{_word(case.id)}.py")
    replace(path, text.encode())
    _tell(trial, deviation)
    print(f"script: {path}: {_checked(path)}")
    return ExitCode.DEVIATES


def _adapter(spec: str, options: Options) -> Adapter:
    if not 0 < options.seconds < float("inf"):
        raise ConformanceError(f"--seconds is {options.seconds:g}; say a number above 0")
    adapter = load(spec)
    known = [mode.name for mode in adapter.modes]
    for name in options.modes:
        if name not in known:
            raise UnknownName("mode", name, known)
    for name in options.dtypes:
        dtype_of(name)
    return adapter


def _one_case(pattern: str) -> tuple[Case, Found | None]:
    """The case of the catalogue, or in the file, that this spells."""
    path = Path(pattern)
    if path.suffix == SUFFIX or path.is_file():
        return read(path)
    cases = find_cases(pattern)
    if len(cases) > 1:
        told = ", ".join(case.id for case in cases[:6]) + ", ..." * (len(cases) > 6)
        raise ConformanceError(f"{pattern} finds {len(cases)} cases; say which: {told}")
    return cases[0], None


def _gravest(
    adapter: Adapter, case: Case, dtypes: Sequence[str], modes: Sequence[str], device: str
) -> tuple[Trial | None, Deviation | None, int]:
    """The deviation that is furthest off, whatever the dtype and mode; how many answers came."""
    best: tuple[Trial, Deviation] | None = None
    answered = 0
    for dtype in [d for d in ORDER if d in adapter.dtypes and (not dtypes or d in dtypes)]:
        for mode in adapter.modes:
            if (modes and mode.name not in modes) or (mode.dtypes and dtype not in mode.dtypes):
                continue
            try:
                found = examined(Examination(adapter, case, dtype, device, mode))
            except Unsupported:
                continue
            answered += 1
            for deviation in found[:1]:
                if best is None or deviation.ratio > best[1].ratio:
                    best = Trial(case.problem(dtype), mode, device), deviation
    return (*best, answered) if best else (None, None, answered)


def _shrunk(adapter: Adapter, best: list, seconds: float) -> bool:
    """Make the problem in `best` smaller; an interruption keeps what was reached."""

    def watch(trial: Trial, deviation: Deviation) -> None:
        best[:] = [trial, deviation]

    try:
        with progress("making it smaller"):
            return shrink(adapter, best[0], best[1], time.monotonic() + seconds, watch).finished
    except KeyboardInterrupt:
        return False


def _written(
    adapter: Adapter, spec: str, trial: Trial, deviation: Deviation, folder: Path
) -> ExitCode:
    """Write both files, and say what is in them."""
    kind = deviation.array or deviation.kind
    name = _word(f"{adapter.name}-{kind}-{trial.problem.dtype}")
    told = f"{deviation.requirement or 'it raises'}: {deviation.told}"
    found = Found(
        adapter.name,
        trial.problem.dtype,
        trial.mode.name,
        deviation.requirement,
        deviation.told,
        adapter.versions(),
    )
    path = folder / f"{name}{SUFFIX}"
    case = store(path, name, trial.problem, f"Found by a search: {told}", found)
    _tell(trial, deviation)
    print(f"case: {path}: mha-conformance run {spec} --case-file {path} --case {CHAPTER}/")
    try:
        text = script(adapter, spec, trial, deviation, case.id)
    except TooLong as error:
        print(f"no script: {error}")
        return ExitCode.DEVIATES
    program = folder / f"{name}.py"
    replace(program, text.encode())
    print(f"script: {program}: {_checked(program)}")
    return ExitCode.DEVIATES


def _tell(trial: Trial, deviation: Deviation) -> None:
    shape = trial.problem.shape
    # What raises is told with its type, which is its kind.
    kind = deviation.requirement or deviation.kind
    told = printable(deviation.told.removeprefix(f"{kind}: "))
    print(
        f"{kind}: {told}, {trial.problem.dtype}, mode {trial.mode.name}"
        + (f": {sigmas(deviation.ratio)}σ, allowed {LIMIT:g}σ" if deviation.index else "")
    )
    print(
        f"smallest problem: batch {shape.batch}, queries {shape.query_length}, keys "
        f"{shape.key_length}, heads {shape.heads}, key/value heads {shape.kv_heads}, head size "
        f"{shape.head_size}"
    )


def _checked(path: Path) -> str:
    """What happens when the script is run, in a process of its own."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    try:
        ran = subprocess.run(
            [sys.executable, str(path)],
            capture_output=True,
            text=True,
            timeout=LONGEST_SCRIPT,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"run, and not finished after {LONGEST_SCRIPT:.0f} s"
    if ran.returncode == 0:
        return "run, and it shows no deviation: it needs how this suite calls, such as compiled"
    # Some frameworks say more after the error itself.
    told = ran.stderr.strip().splitlines() or [""]
    named = [line for line in told if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return f"run, and it fails as it should: {printable((named or told)[-1])[:120]}"


def _check_folder(folder: Path) -> None:
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConformanceError(f"{folder}: is no folder that can be written to")


def _word(text: str) -> str:
    """As a part of a file's name, and a case's."""
    word = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60].strip("-")
    return word if is_name(word) else "case"
