"""`mha-conformance explore` and `reproduce`: find a wrong answer, show it without the suite."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from conformance.commands.shared import (
    Commands,
    add_device,
    add_implementation,
    add_quiet,
    add_repeatable,
    be_quiet_and_single_threaded,
)


def add_parser(commands: Commands) -> None:
    """How they are called."""
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
        description="Run a case, make its gravest deviation as small as it gets, and write a "
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


def _explore(options: argparse.Namespace) -> int:
    searched = _searched(options)
    from conformance.commands.exploring import explore

    return explore(options.implementation, searched, options.output)


def _reproduce(options: argparse.Namespace) -> int:
    searched = _searched(options)
    from conformance.commands.exploring import reproduce

    return reproduce(options.case, options.implementation, searched, options.output)


def _searched(options: argparse.Namespace) -> Any:
    be_quiet_and_single_threaded()
    from conformance.commands.exploring import Options

    given = {name: getattr(options, name, None) for name in ("seed", "examples")}
    return Options(
        dtypes=options.dtype,
        modes=options.mode,
        device=options.device,
        seconds=options.seconds,
        shrink=not options.no_shrink,
        **{name: value for name, value in given.items() if value is not None},
    )
