"""`mha-conformance judge`: judge untrusted kernels in a sandbox, on fresh problems."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.commands.shared import (
    Commands,
    add_files,
    add_repeatable,
    at_least,
    check_writable,
    positive,
)
from conformance.errors import ExitCode, Unwritten
from conformance.text import printable

if TYPE_CHECKING:
    from conformance.judging.verdict import Verdict


def add_parser(commands: Commands) -> None:
    """Add the parser of this command to `commands`."""
    judge = commands.add_parser(
        "judge",
        help="judge kernels that nobody trusts: in a sandbox, on problems nobody can foresee",
        description="Judge functions that compute attention, such as those that a program wrote. "
        "Each runs in a sandbox without network, gets fresh problems, and is judged by numbers "
        "that it never had. The verdict is JSON: a score from 0 to 1, what was wrong and why, and "
        "tricks, for which the score is 0.",
    )
    judge.add_argument(
        "candidate", nargs="+", metavar="FILE:NAME", help="a function in a file; or a folder"
    )
    judge.add_argument(
        "--level", default="core", choices=("core", "full"), help="for a loop, or for a merge"
    )
    add_repeatable(
        judge,
        chapter="only this chapter of cases, such as mask; all but feature otherwise",
        dtype="only this dtype",
        case="only this case",
        require="this chapter or feature, such as causal, grouped or window, must be supported",
    )
    judge.add_argument("--no-gradients", action="store_true", help="only outputs count")
    judge.add_argument(
        "--own-work", action="store_true", help="calling a ready attention is a cheat"
    )
    judge.add_argument(
        "--blind", action="store_true", help="withhold hints, so that a search cannot fit the judge"
    )
    judge.add_argument("--hints", type=int, default=5, help="at most so many causes (default: 5)")
    judge.add_argument("--token", default="", help="ask the problems of an earlier verdict")
    judge.add_argument("--framework", default="", choices=("numpy", "torch", "jax"))
    judge.add_argument(
        "--isolation",
        default="bubblewrap",
        choices=("bubblewrap", "limits"),
        help="limits accepts less, where bubblewrap is not available (default: bubblewrap)",
    )
    judge.add_argument(
        "--seconds",
        type=at_least(1),
        default=300,
        help="for one candidate: CPU time and sleeping time, not elapsed time (default: 300)",
    )
    judge.add_argument(
        "--once",
        type=positive,
        default=60.0,
        metavar="SECONDS",
        help="CPU time of a process beside 10 s for each problem, for what it does only once, such "
        "as late imports and compilation (default: 60)",
    )
    judge.add_argument(
        "--memory", type=at_least(1), default=2048, help="MiB beside its framework (default: 2048)"
    )
    judge.add_argument(
        "--processes", type=at_least(0), default=0, help="how many it may start (default: 0)"
    )
    judge.add_argument(
        "--jobs", type=at_least(1), default=1, help="candidates at a time (default: 1)"
    )
    judge.add_argument(
        "--on",
        default="",
        metavar="CLUSTER",
        help="ray or ray://HOST:PORT: a cluster, as for matrix, whose nodes have this suite",
    )
    add_files(judge, output="append verdicts to FILE, one a line")
    judge.set_defaults(action=_judge)


def _judge(options: argparse.Namespace) -> int:
    import msgspec

    from conformance.judging.judge import Task
    from conformance.judging.pool import Options, judged
    from conformance.judging.sandbox import CandidateLimits, lacks

    if options.output is not None:
        check_writable(options.output)
    task = Task(
        level=options.level,
        chapters=tuple(options.chapter),
        dtypes=tuple(options.dtype),
        gradients=not options.no_gradients,
        cases=tuple(options.case),
        require=tuple(options.require),
    )
    resources = ("once", "seconds", "memory", "processes")
    limits = CandidateLimits(**{name: getattr(options, name) for name in resources})
    names = ("token", "own_work", "blind", "hints", "isolation", "framework")
    how = Options(task, limits=limits, **{name: getattr(options, name) for name in names})
    if lacking := lacks(options.isolation):
        print(f"isolation {options.isolation} lacks this: {'; '.join(lacking)}", file=sys.stderr)
    rulings = set()
    many = len(options.candidate) > 1 or Path(options.candidate[0]).is_dir()
    for verdict in judged(options.candidate, how, options.jobs, options.on):
        rulings.add(verdict.verdict)
        line = msgspec.json.encode(verdict)
        if options.output is not None:
            try:
                with options.output.open("ab", buffering=0) as file:
                    file.write(line + b"\n")
            except OSError as error:
                # A verdict may have taken minutes.
                print(line.decode(), flush=True)
                raise Unwritten(
                    f"{options.output}: cannot be written ({error.strerror}); the verdict is on "
                    "standard output, and the other candidates were not judged"
                ) from error
            print(_told(verdict), file=sys.stderr)
        elif many:
            print(line.decode(), flush=True)
        else:
            print(msgspec.json.format(line, indent=2).decode())
            print(_told(verdict), file=sys.stderr)
    return ExitCode.OK if rulings == {"right"} else ExitCode.DEVIATES


def _told(verdict: Verdict) -> str:
    why = f": {verdict.why}" if verdict.why else ""
    part = ""
    if verdict.verdict == "right" and verdict.supports < 1:
        # A share that is not all of it is not rounded to all of it.
        part = f" in the {math.floor(100 * verdict.supports)} % that it supports"
    line = f"{verdict.candidate}: {verdict.verdict}{part}, {verdict.score:.3f}{why}"
    # One line, whatever a candidate's name or exception says.
    return printable(" ".join(line.split())[:300])
