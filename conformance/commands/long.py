"""`mha-conformance long`: compare answers for long sequences with the definition of attention."""

from __future__ import annotations

import argparse
import math
import os
import re
from contextlib import nullcontext
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
    check_writable,
    positive,
    print_json,
    replace_file,
)
from conformance.errors import ConformanceError, ExitCode, Unavailable, check_names
from conformance.text import printable, stdout_to_stderr

if TYPE_CHECKING:
    from conformance.records.long import Climb, Step

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def add_parser(commands: Commands) -> None:
    """Add the parser of this command to `commands`."""
    long = commands.add_parser("long", help="examine implementations at up to a million tokens")
    add_implementation(long, several=True)
    long.add_argument(
        "--lengths", default="4096:65536", metavar="FIRST:LAST", help="default: 4096:65536"
    )
    add_repeatable(
        long,
        dtype="default: float32, bfloat16 and float16",
        mode="default: one that is compiled, or else one that returns no weights",
    )
    long.add_argument("--head-size", type=int, help="default: what is declared, or else 64")
    long.add_argument(
        "--tile",
        type=int,
        help="keys that the kernel sums up at once (default: what is declared)",
    )
    long.add_argument("--memory-limit", default="", metavar="SIZE", help="such as 4GiB")
    long.add_argument(
        "--seconds", type=positive, help="begin nothing that ends later, for each implementation"
    )
    add_files(long, plot="draw error over length, as .svg")
    long.add_argument(
        "--record", type=Path, metavar="FOLDER", help="keep the results there, as NAME.json"
    )
    long.add_argument("--strict", action="store_true", help="exit with 1 if something deviates")
    add_device(long)
    add_quiet(long)
    add_format(long, "long")
    long.set_defaults(action=_long)


def _long(options: argparse.Namespace) -> int:
    """Examine implementations, and write what the options request; return the exit code.

    The code is `NOTHING_VERIFIED` if no problem conforms or deviates, or else
    `DEVIATES` if some deviate and --strict is given, or else `INCOMPLETE` if some were not reached,
    or else `OK`.
    """
    options.steps = _lengths(options.lengths)
    options.memory = _bytes(options.memory_limit) if options.memory_limit else None
    if options.plot is not None:
        if options.plot.suffix != ".svg":
            raise ConformanceError(f"{options.plot}: a plot is an .svg file")
        check_writable(options.plot)
    if any(size is not None and size < 1 for size in (options.head_size, options.tile)):
        raise ConformanceError("--head-size and --tile are at least 1")
    if options.record is not None:
        from conformance.records.record import check_writable as check_folder

        check_folder(options.record / "NAME.json")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    as_json = options.format == "json"
    with stdout_to_stderr() if as_json else nullcontext():
        climbs = [_climbed(spec, options) for spec in options.implementation]
    if as_json:
        print_json(climbs)
    if options.plot is not None:
        from conformance.reports.figures.lengths import plot

        replace_file(options.plot, plot(climbs).encode())
        if not as_json:
            print(f"drawn: {options.plot}")
    verdicts = {step.verdict for climb in climbs for step in climb.steps}
    if not verdicts & {"conforms", "deviates"}:
        return ExitCode.NOTHING_VERIFIED
    if options.strict and verdicts & {"deviates", "error"}:
        return ExitCode.DEVIATES
    return ExitCode.INCOMPLETE if "not reached" in verdicts else ExitCode.OK


def _climbed(spec: str, options: argparse.Namespace) -> Climb:
    """Examine the implementation that `spec` names, and print and return its results.

    If the framework or the device is missing, print that, and return a `Climb` without results.
    With --record, write the results to a file before and after each problem.
    """
    from conformance.adapter.loading import load
    from conformance.definition.dtypes import DTYPES as KNOWN_DTYPES
    from conformance.long.ladder import DTYPES, Ladder, LongLimits, LongSizes, lengths
    from conformance.records.long import SCHEMA, Climb
    from conformance.records.record import write_document
    from conformance.running.provenance import describe, header_of
    from conformance.text import progress

    adapter = load(spec)
    check_names("mode", options.mode, (mode.name for mode in adapter.modes))
    check_names("dtype", options.dtype, KNOWN_DTYPES)
    dtypes = options.dtype or [name for name in DTYPES if name in adapter.dtypes]
    sizes = LongSizes.of(adapter.geometry, options.head_size, options.tile)
    described = describe([(adapter, spec)], options.device)
    header = header_of([adapter], described, [], options.device, "", command="")
    steps = lengths(*options.steps)
    limits = LongLimits(options.memory, options.seconds)
    climb = Climb(
        schema=SCHEMA,
        implementation=described[0],
        provenance=header.provenance,
        lengths=steps,
        head_size=sizes.head_size,
        tile=sizes.tile,
        memory=limits.memory,
        seconds=limits.seconds,
        steps=[],
    )

    def keep(*begun: Step) -> None:
        if options.record is not None:
            own = msgspec.structs.replace(climb, steps=[*climb.steps, *begun])
            write_document(options.record / f"{adapter.name}.json", own)

    print(f"{adapter.name}, head size {sizes.head_size}, on {options.device}")
    try:
        adapter.prepare()
    except Unavailable as reason:
        print(f"{adapter.name}: unavailable: {printable(str(reason))}")
        keep()
        return climb
    ladder = Ladder(
        adapter,
        steps,
        dtypes,
        limits,
        sizes=sizes,
        modes=options.mode,
        device=options.device,
        threads=os.cpu_count() or 1,
    )
    if ladder.lacks:
        print(f"not asked at length: {', '.join(ladder.lacks)}")
    with progress(adapter.name, len(ladder)) as advance:

        def begin(step: Step, left: float) -> None:
            needs = ladder.needs(step)
            advance(f"{step.dtype} {step.length:,}, {needs}, {left:,.0f} s left", steps=0)
            # This is what the record says if the process ends during this problem.
            keep(msgspec.structs.replace(step, why=f"the process ended; it needed {needs}"))

        for step in ladder.climb(begin):
            climb.steps.append(step)
            advance()
            print(line(step), flush=True)
    keep()
    for text in summary(climb.steps):
        print(text)
    return climb


def line(step: Step) -> str:
    """Return a line of text with the verdict on one problem, its sizes, errors and times."""
    sizes = f"{step.queries:>9,} × {step.keys:<9,}"
    text = f"{step.dtype:8s} {sizes} {step.problem:11s} {step.verdict}"
    worst = step.worst
    if step.why:
        return printable(f"{text}: {step.why}")
    if worst is not None:
        text += f"{f', class {step.reached}' if step.reached else ''}: {worst.title} "
        text += f"max {worst.largest:.3g}σ, rms {worst.rms:.2g}, bias {worst.bias:+.2g}, "
        text += f"gain {worst.gain:+.2g}"
    if step.detail:
        text += f"{'; ' if worst is not None else ': '}{step.detail}"
    return f"{text} ({step.called:.1f} s, suite {step.own:.1f} s)"


def summary(steps: list[Step]) -> list[str]:
    """Return a line of text for each dtype: up to which length the implementation conforms.

    Only lengths below the first deviation or error count. The line also gives the length of that
    deviation or error, if any, and the number of problems that were not reached, unless it is 0.
    """
    from conformance.records.long import reaches

    lines = []
    for reach in reaches(steps):
        if not reach.compared:
            text = f"{reach.dtype}: nothing was compared"
        elif reach.most or reach.beside:
            text = f"{reach.dtype}: conforms up to {reach.most or reach.beside:,} tokens"
            if not reach.most:
                text += " on one side"
            elif reach.beside > reach.most:
                text += f", and {reach.beside:,} on one side"
        else:
            text = f"{reach.dtype}: no length at which everything conforms"
        if reach.first is not None:
            asked = [step for step in steps if step.dtype == reach.dtype and step.judged]
            there = [step for step in asked if step.length == reach.first.length]
            wrong = sum(step.wrong for step in there)
            text += f", deviates from {reach.first.length:,} ({wrong} of {len(there)} problems)"
        lines.append(text + (f"; {len(reach.missing)} not reached" if reach.missing else ""))
    return lines


def _lengths(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 2 <= first <= last:
        raise ConformanceError(f"--lengths is {text!r}; say FIRST:LAST, such as 4096:1048576")
    return first, last


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if not found or not 0 < float(found[1]) < math.inf:
        raise ConformanceError(f"--memory-limit is {text[:40]!r}; say a size such as 4GiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])
