"""`mha-conformance list`, `explain` and `schema`: what there is, and what each of it means."""

from __future__ import annotations

import argparse

from conformance.commands.shared import Commands, add_format
from conformance.errors import ExitCode

OUTPUTS = ("record", "report", "list", "explain", "run", "probe", "compare")


def add_parser(commands: Commands) -> None:
    """How they are called."""
    listing = commands.add_parser(
        "list", help="list implementations, cases, experiments or requirements"
    )
    known = ("implementations", "cases", "experiments", "requirements")
    listing.add_argument("what", choices=known)
    add_format(listing, "list")
    listing.set_defaults(action=_list)

    explain = commands.add_parser(
        "explain",
        help="explain a case, an experiment or a requirement",
        description="Explain a case, an experiment or a requirement: what it asks and why, the "
        "inputs, how the expected answer follows, and what each adapter declares.",
    )
    explain.add_argument(
        "name",
        help="an id, the beginning of several, or a pattern: mask/shared, probe/, '*/cross'",
    )
    add_format(explain, "explain")
    explain.set_defaults(action=_explain)

    schema = commands.add_parser(
        "schema", help="print the JSON schema of records and of what commands print"
    )
    schema.add_argument(
        "output", choices=OUTPUTS, metavar="OUTPUT", help=f"one of {', '.join(OUTPUTS)}"
    )
    schema.set_defaults(action=_schema)


def _list(options: argparse.Namespace) -> int:
    from conformance.commands import listings as listing

    return listing.show(options.what, as_json=options.format == "json")


def _explain(options: argparse.Namespace) -> int:
    from conformance.commands import explaining

    return explaining.explain(options.name, as_json=options.format == "json")


def _schema(options: argparse.Namespace) -> int:
    from conformance.commands.formats import print_schema

    print_schema(options.output)
    return ExitCode.OK
