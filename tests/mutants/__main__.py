"""`python -m mutants`, in tests/: does the suite notice defective attentions?"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from conformance.commands.shared import add_format, add_quiet, add_repeatable


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the options, and examine the suite."""
    selftest = argparse.ArgumentParser(
        prog="python -m mutants",
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
    options = selftest.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from mutants.command import causes
    from mutants.command import selftest as examine

    if options.causes:
        return causes(options.chapter, options.mutant, as_json=options.format == "json")
    as_json = options.format == "json"
    return examine(options.chapter, options.mutant, matrix=options.matrix, as_json=as_json)


if __name__ == "__main__":
    raise SystemExit(main())
