"""`mha-conformance compare`: what changed between two records."""

from __future__ import annotations

import argparse
from pathlib import Path

from conformance.commands.shared import Commands, add_format
from conformance.errors import ExitCode


def add_parser(commands: Commands) -> None:
    """Add the parser of this command to `commands`."""
    compare = commands.add_parser(
        "compare",
        help="what changed between two records, regressions first",
        description="Say what changed from one record to another, also where implementations, "
        "cases or modes were added or removed. Exit code 0: nothing is worse; 1: something is "
        "worse, or no longer answered; 2: a record cannot be read; 3: the two have nothing in "
        "common. What is new and deviates is told, and is not worse than before.",
    )
    compare.add_argument("before", type=Path, help="a record, or a folder of records")
    compare.add_argument("after", type=Path, help="another")
    add_format(compare, "compare")
    compare.set_defaults(action=_compare)


def _compare(options: argparse.Namespace) -> int:
    from conformance.reports.changes import compare, load_side

    changes = compare(load_side(options.before), load_side(options.after))
    if options.format == "json":
        from conformance.commands.formats import print_json

        print_json(changes)
    else:
        from rich.console import Console

        from conformance.reports.changes import show

        show(Console(highlight=False), changes)
    if not changes.common:
        return ExitCode.NOTHING_VERIFIED
    return ExitCode.DEVIATES if changes.anything_worse else ExitCode.OK
