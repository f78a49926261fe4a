"""`mha-conformance selftest`: does the suite tell defective attentions from a correct one?"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from conformance.commands.formats import print_json
from conformance.errors import ExitCode
from conformance.progress import progress
from mutants.page import page
from mutants.run import Examiner, Outcome, count, survivors
from mutants.zoo import find_mutants


class Killed(msgspec.Struct, frozen=True):
    """How many were noticed, of how many."""

    killed: int
    total: int


class Examined(msgspec.Struct, frozen=True):
    """A mutant: `killed_by` is the requirement that noticed it, `at` where, both "" if none did."""

    name: str
    chapter: str
    did: str
    expected: list[str]
    killed_by: str
    at: str


class NamedCause(msgspec.Struct, frozen=True):
    """What was said of a mutant; `kind` is one of `mutants.causes.KINDS`."""

    name: str
    chapter: str
    kind: str
    expected: str
    cause: str


class Selftest(msgspec.Struct, frozen=True):
    """All of it; `original_deviates` must be empty."""

    chapters: dict[str, Killed]
    mutants: list[Examined]
    original_deviates: list[str]
    seconds: float


def selftest(
    chapters: list[str],
    names: list[str],
    *,
    matrix: Path | None = None,
    as_json: bool = False,
) -> int:
    """Examine the mutants, print killed and total; exit code 1 if one survived.

    Raises:
        UnknownName: for a chapter or a mutant that is not there; before anything is examined.
    """
    mutants = find_mutants(chapters, names)
    examiner = Examiner()
    begun = time.monotonic()
    outcomes = []
    with progress("the original", len(mutants)) as advance:
        original = [] if chapters or names else examiner.original()
        for mutant in mutants:
            advance(f"{mutant.chapter}: {mutant.name}", 0)
            look = examiner.look_everywhere if matrix else examiner.kill
            outcomes.append(look(mutant))
            advance()
    seconds = time.monotonic() - begun
    if matrix:
        matrix.write_text(page(outcomes), encoding="utf-8")
    if as_json:
        _print_json(outcomes, original, seconds)
    else:
        _print(outcomes, original, seconds, one_by_one=bool(names))
    return ExitCode.DEVIATES if original or survivors(outcomes) else ExitCode.OK


def causes(chapters: list[str], names: list[str], *, as_json: bool = False) -> int:
    """How often the message names the mistake; exit code 1 if one is named wrongly.

    Raises:
        UnknownName: for a chapter or a mutant that is not there.
    """
    from mutants import causes as table

    mutants = find_mutants(chapters, names)
    examiner = Examiner()
    found = []
    with progress("causes", len(mutants)) as advance:
        for mutant in mutants:
            advance(f"{mutant.chapter}: {mutant.name}", 0)
            found.append(table.name(examiner, mutant))
            advance()
    if as_json:
        print_json(
            [
                NamedCause(one.mutant.name, one.mutant.chapter, one.kind, one.expected, one.cause)
                for one in found
            ]
        )
    else:
        _print_causes(table.count(found), table.KINDS)
        for one in found:
            if names or one.kind in ("named wrongly", "not named"):
                print(f"{one.kind}: {one.mutant.name}: {one.cause or one.mutant.did}")
    return ExitCode.DEVIATES if any(one.kind == "named wrongly" for one in found) else ExitCode.OK


def _print_causes(counted: dict[str, Counter[str]], kinds: Sequence[str]) -> None:
    total: Counter[str] = Counter()
    print("".join((f"{'':<12s}", *(f"{kind:>15s}" for kind in kinds))))
    for chapter, own in counted.items():
        total += own
        print("".join((f"{chapter:<12s}", *(f"{own[kind]:>15d}" for kind in kinds))))
    print("".join((f"{'all':<12s}", *(f"{total[kind]:>15d}" for kind in kinds))))


def _print(
    outcomes: Sequence[Outcome], original: Sequence[str], seconds: float, *, one_by_one: bool
) -> None:
    if one_by_one:
        for outcome in outcomes:
            told = f"{outcome.by} at {outcome.where}" if outcome.killed else "survived"
            print(f"{outcome.mutant.name}: {told}")
    for chapter, (killed, total) in count(outcomes).items():
        print(f"{chapter:<12s}{killed:4d} / {total}")
    print(f"{'all':<12s}{sum(o.killed for o in outcomes):4d} / {len(outcomes)}  in {seconds:.0f} s")
    for name in survivors(outcomes):
        print(f"survived: {name}")
    for told in original:
        print(f"the original deviates: {told}")


def _print_json(outcomes: Sequence[Outcome], original: Sequence[str], seconds: float) -> None:
    counted = count(outcomes)
    print_json(
        Selftest(
            chapters={chapter: Killed(*of) for chapter, of in counted.items()},
            mutants=[
                Examined(
                    name=outcome.mutant.name,
                    chapter=outcome.mutant.chapter,
                    did=outcome.mutant.did,
                    expected=list(outcome.mutant.killed_by),
                    killed_by=outcome.by,
                    at=outcome.where,
                )
                for outcome in outcomes
            ],
            original_deviates=list(original),
            seconds=round(seconds, 1),
        )
    )
