"""`mha-conformance publish`: keep records of all implementations, and pages made from them."""

from __future__ import annotations

import argparse
from pathlib import Path

from conformance.commands.shared import Commands, add_quiet


def add_parser(commands: Commands) -> None:
    """Add the parser of `publish`."""
    parser = commands.add_parser(
        "publish",
        help="keep records, compressed, with a table of them and a page for each implementation",
        description="Without records, render the pages again from those that are kept.",
    )
    parser.add_argument("records", nargs="*", type=Path, help="record files or folders of them")
    parser.add_argument(
        "--versions",
        nargs="+",
        type=Path,
        default=[],
        metavar="RECORD",
        help="records of the same implementations with other versions of their libraries",
    )
    parser.add_argument(
        "--expect",
        default="",
        metavar="NAME,NAME",
        help="records that must be there, by their file's name without .json",
    )
    parser.add_argument(
        "--expect-versions",
        default="",
        metavar="NAME,NAME",
        help="likewise, of those with other versions",
    )
    parser.add_argument(
        "--run-file", type=Path, help="refuse records of other runs than the one named in this file"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("reports/published"),
        help="folder of the records and the table (default: reports/published)",
    )
    parser.add_argument(
        "--pages",
        type=Path,
        default=Path("docs/implementations"),
        help="folder of the pages (default: docs/implementations)",
    )
    parser.add_argument(
        "--baseline",
        nargs="+",
        type=Path,
        default=[Path("reports/baselines")],
        metavar="FILE",
        help="known deviations, by file or folder (default: reports/baselines)",
    )
    parser.add_argument(
        "--add",
        action="store_true",
        help="keep what is published beside these records, instead of replacing all of it",
    )
    add_quiet(parser)
    parser.set_defaults(action=_publish)


def _publish(options: argparse.Namespace) -> int:
    from conformance.reports.publishing.write import Wanted, publish

    return publish(
        Wanted(
            records=options.records,
            versions=options.versions,
            expected=_names(options.expect),
            expected_versions=_names(options.expect_versions),
            run=options.run_file,
            output=options.output,
            pages=options.pages,
            baselines=options.baseline,
            add=options.add,
        )
    )


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]
