"""`mha-conformance list` and `explain`: what there is, and what each of it means."""

from __future__ import annotations

import argparse

from conformance.commands.shared import Commands


def add_parser(commands: Commands) -> None:
    """How they are called."""
    listing = commands.add_parser(
        "list", help="list implementations, cases, experiments or requirements"
    )
    known = ("implementations", "cases", "experiments", "requirements")
    listing.add_argument("what", choices=known)
    listing.set_defaults(action=_list)

    explain = commands.add_parser("explain", help="explain a case, an experiment or a requirement")
    explain.add_argument("name")
    explain.set_defaults(action=_explain)


def _list(options: argparse.Namespace) -> int:
    from conformance import listing

    return listing.show(options.what)


def _explain(options: argparse.Namespace) -> int:
    from conformance import listing

    return listing.explain(options.name)
