"""`mha-conformance compare`: print what changed between two records."""

from __future__ import annotations

import argparse
from pathlib import Path

from conformance.commands.shared import Commands, add_format, check_writable, replace_file
from conformance.errors import ConformanceError, ExitCode


def add_parser(commands: Commands) -> None:
    """Add the parser of this command to `commands`."""
    compare = commands.add_parser(
        "compare",
        help="what changed between two records, regressions first",
        description="Print what changed from one record to another, even if implementations, "
        "cases or modes were added or removed. Exit code 0: nothing is worse; 1: something is "
        "worse, or no longer answered; 2: a record cannot be read; 3: the two have nothing in "
        "common. New items that deviate are printed, but do not count as worse.",
    )
    compare.add_argument("before", type=Path, help="a record, or a folder of records")
    compare.add_argument("after", type=Path, help="a later record, or a folder of records")
    add_format(compare, "compare")
    compare.add_argument(
        "--html", type=Path, metavar="FILE", help="also write a page with both side by side"
    )
    compare.add_argument(
        "--comment",
        type=Path,
        metavar="FILE",
        help="also write a comment for a pull request, in Markdown",
    )
    compare.add_argument(
        "--page", default="", metavar="URL", help="the report's address, for links of the comment"
    )
    compare.set_defaults(action=_compare)


def _compare(options: argparse.Namespace) -> int:
    from rich.console import Console

    from conformance.commands.formats import print_json
    from conformance.reports.changes import compare, load_side, show

    for file in filter(None, (options.html, options.comment)):
        check_writable(file)
    if options.page and options.comment is None:
        raise ConformanceError("--page is for links of a comment; add --comment FILE")
    changes = compare(load_side(options.before), load_side(options.after))
    if options.html:
        from conformance.reports.page.html import render_changes

        replace_file(options.html, render_changes(changes).encode())
    if options.comment:
        from conformance.reports.ci.summary import comment

        replace_file(options.comment, comment(changes, options.page).encode())
    if options.format == "json":
        print_json(changes)
    else:
        show(Console(highlight=False), changes)
    if not changes.common:
        return ExitCode.NOTHING_VERIFIED
    return ExitCode.DEVIATES if changes.anything_worse else ExitCode.OK
