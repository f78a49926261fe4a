"""`mha-conformance selftest`: the suite, examined."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from conformance.commands.shared import Commands, add_format, add_quiet, add_repeatable


def add_parser(commands: Commands) -> None:
    """How it is called."""
    selftest = commands.add_parser(
        "selftest",
        help="does the suite notice defective attentions?",
        description="Examine the suite: some hundred attentions with one defect each must be "
        "noticed, and the correct one that they are made of must not.",
    )
    add_repeatable(selftest, chapter="only this chapter", mutant="only this mutant")
    selftest.add_argument(
        "--matrix",
        type=Path,
        help="examine each in the whole catalogue, and write what noticed it to this file",
    )
    selftest.add_argument(
        "--causes",
        action="store_true",
        help="instead, count how often the message names the mutant's mistake",
    )
    add_format(selftest, "selftest")
    add_quiet(selftest)
    selftest.set_defaults(action=_selftest)


def _selftest(options: argparse.Namespace) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from mutants.command import causes, selftest

    if options.causes:
        return causes(options.chapter, options.mutant, as_json=options.format == "json")
    as_json = options.format == "json"
    return selftest(options.chapter, options.mutant, matrix=options.matrix, as_json=as_json)
