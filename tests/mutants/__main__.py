"""`tox -e selftest`: does the suite tell defective attentions from a correct one?

cd tests && python -m mutants [--matrix FILE | --causes | --levels] [--chapter NAME] [--mutant NAME]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

# The arrays are tiny: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from conformance.errors import ConformanceError, ExitCode
from conformance.text import progress
from conformance.words import say
from mutants import causes as table
from mutants.mutant import Mutant
from mutants.page import page
from mutants.run import Examiner, Outcome, count, survivors
from mutants.zoo import find_mutants

LEVELS = ("first", "core", "default")
"""The levels of which `--levels` prints the share."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine the suite, print the outcome, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m mutants",
        description="Examine the suite: each defective attention must be noticed, and the correct "
        "one that they are made of must not.",
    )
    parser.add_argument("--chapter", action="append", default=[], help="only this chapter")
    parser.add_argument("--mutant", action="append", default=[], help="only this mutant")
    parser.add_argument(
        "--matrix",
        type=Path,
        help="examine each in the whole catalogue, and write what noticed it to this file",
    )
    parser.add_argument(
        "--causes",
        action="store_true",
        help="instead, count how often the message names the mutant's mistake",
    )
    parser.add_argument(
        "--levels",
        action="store_true",
        help="instead, print how many of the mutants that show at small sizes each level notices",
    )
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="with --levels: every N-th mutant"
    )
    options = parser.parse_args(arguments)
    try:
        mutants = find_mutants(options.chapter, options.mutant)
    except ConformanceError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return error.exit_code
    if options.causes:
        # In other chapters, nobody has written down which cause each mutant should get.
        described = {one.chapter for one in find_mutants([], []) if one.name in table.CAUSES}
        mutants = [mutant for mutant in mutants if mutant.chapter in described]
        return causes(mutants, one_by_one=bool(options.mutant))
    if options.levels:
        return levels([one for one in mutants if one.level == "full"][:: options.every])
    return selftest(
        mutants,
        matrix=options.matrix,
        with_original=not (options.chapter or options.mutant),
        one_by_one=bool(options.mutant),
    )


def selftest(
    mutants: Sequence[Mutant], *, matrix: Path | None, with_original: bool, one_by_one: bool
) -> int:
    """Print how many mutants were killed, of how many; return 1 if one of them survived."""
    examiner = Examiner()
    began = time.monotonic()
    outcomes = []
    with progress("the original", len(mutants)) as advance:
        original = examiner.original() if with_original else []
        for mutant in mutants:
            advance(f"{mutant.chapter}: {mutant.name}", 0)
            outcomes.append((examiner.look_everywhere if matrix else examiner.kill)(mutant))
            advance()
    if matrix:
        matrix.write_text(page(outcomes), encoding="utf-8")
    if one_by_one:
        for outcome in outcomes:
            end = f"{outcome.by} at {outcome.where}" if outcome.killed else "survived"
            print(f"{outcome.mutant.name}: {end}")
    _print_count(outcomes, time.monotonic() - began)
    for name in survivors(outcomes):
        print(f"survived: {name}")
    for deviation in original:
        print(f"the original deviates: {deviation}")
    return ExitCode.DEVIATES if original or survivors(outcomes) else ExitCode.OK


def _print_count(outcomes: Sequence[Outcome], seconds: float) -> None:
    for chapter, (killed, total) in count(outcomes).items():
        print(f"{chapter:<12s}{killed:4d} / {total}")
    killed = sum(outcome.killed for outcome in outcomes)
    print(f"{'all':<12s}{killed:4d} / {len(outcomes)}  in {seconds:.0f} s")


def levels(mutants: Sequence[Mutant]) -> int:
    """Print what share of the mutants each level notices, by chapter, and what it costs."""
    examiner = Examiner()
    noticed: dict[str, Counter[str]] = {level: Counter() for level in LEVELS}
    seconds, rows, unnoticed = Counter[str](), Counter[str](), dict[str, list[str]]()
    with progress("levels", len(mutants)) as advance:
        for mutant in mutants:
            for level in LEVELS:
                advance(f"{mutant.chapter}: {mutant.name} at {level}", 0)
                began = time.process_time()
                found, number = examiner.at_level(mutant, level)
                seconds[level] += time.process_time() - began
                rows[level] += number
                noticed[level][mutant.chapter] += found
                if not found:
                    unnoticed.setdefault(level, []).append(mutant.name)
            advance()
    total = Counter(mutant.chapter for mutant in mutants)
    print("".join((f"{'':<12s}{'of':>6s}", *(f"{level:>10s}" for level in LEVELS))))
    for chapter, of in total.items():
        shares = (f"{noticed[level][chapter] / of:>10.1%}" for level in LEVELS)
        print("".join((f"{chapter:<12s}{of:>6d}", *shares)))
    for name, cells in {
        "all": [f"{noticed[level].total() / len(mutants):.1%}" for level in LEVELS],
        "rows each": [f"{rows[level] / len(mutants):.0f}" for level in LEVELS],
        "CPU seconds": [f"{seconds[level]:.0f}" for level in LEVELS],
    }.items():
        print("".join((f"{name:<12s}{len(mutants):>6d}", *(f"{cell:>10s}" for cell in cells))))
    for level, names in unnoticed.items():
        print(f"not noticed at {level}: {', '.join(names)}")
    return ExitCode.OK


def causes(mutants: Sequence[Mutant], *, one_by_one: bool) -> int:
    """Print how often the message names the mistake; return 1 if it names a wrong one."""
    examiner = Examiner()
    named = []
    with progress("causes", len(mutants)) as advance:
        for mutant in mutants:
            advance(f"{mutant.chapter}: {mutant.name}", 0)
            named.append(table.name(examiner, mutant))
            advance()
    total: Counter[str] = Counter()
    print("".join((f"{'':<12s}", *(f"{kind:>15s}" for kind in table.KINDS))))
    for chapter, kinds in table.count(named).items():
        total += kinds
        print("".join((f"{chapter:<12s}", *(f"{kinds[kind]:>15d}" for kind in table.KINDS))))
    print("".join((f"{'all':<12s}", *(f"{total[kind]:>15d}" for kind in table.KINDS))))
    for one in named:
        if one_by_one or one.kind in ("named wrongly", "not named"):
            print(f"{one.kind}: {one.mutant.name}: {say(one.cause) or one.mutant.did}")
    wrong = any(one.kind == "named wrongly" for one in named)
    return ExitCode.DEVIATES if wrong else ExitCode.OK


if __name__ == "__main__":
    raise SystemExit(main())
