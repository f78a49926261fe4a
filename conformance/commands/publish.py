"""`mha-conformance publish`: store records of implementations, and render pages from them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import convert
from msgspec.structs import asdict

from conformance.commands.shared import Commands, add_quiet, add_run_file, selected
from conformance.records.header import Implementation


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
        "--large",
        nargs="+",
        type=Path,
        default=[],
        metavar="RECORD",
        help='records of level "large", a column of the table',
    )
    parser.add_argument(
        "--expect",
        dest="expected",
        type=_names,
        default=[],
        metavar="NAME,NAME",
        help="records that must be there, by their file's name without .json",
    )
    parser.add_argument(
        "--expect-versions",
        dest="expected_versions",
        type=_names,
        default=[],
        metavar="NAME,NAME",
        help="likewise, of those with other versions",
    )
    add_run_file(parser)
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
        dest="baselines",
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
    from conformance.reports.publishing import Wanted, publish

    options.translator = _translations
    return publish(selected(Wanted, options))


def _translations(declared: Mapping[str, Implementation]) -> dict[str, Any]:
    """Return how masks are translated between the mask arguments of these implementations."""
    from conformance.adapter.arguments import MaskArgument
    from conformance.porting.masks import answers

    return answers(
        (key, mask.name, convert(asdict(mask) | {"axes": tuple(mask.axes)}, MaskArgument))
        for key, implementation in declared.items()
        for mask in implementation.masks
    )


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]
