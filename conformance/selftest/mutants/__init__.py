"""The zoo: one module per chapter, each a table of mutants."""

from __future__ import annotations

from conformance.errors import UnknownName
from conformance.selftest.mutant import Mutant
from conformance.selftest.mutants.backward import MUTANTS as BACKWARD
from conformance.selftest.mutants.causal import MUTANTS as CAUSAL
from conformance.selftest.mutants.forward import MUTANTS as FORWARD
from conformance.selftest.mutants.masks import MUTANTS as MASKS
from conformance.selftest.mutants.modes import MUTANTS as MODES
from conformance.selftest.mutants.precision import MUTANTS as PRECISION
from conformance.selftest.mutants.weights import MUTANTS as WEIGHTS

MUTANTS: tuple[Mutant, ...] = (
    *FORWARD,
    *MASKS,
    *CAUSAL,
    *PRECISION,
    *BACKWARD,
    *WEIGHTS,
    *MODES,
)

CHAPTERS = tuple(dict.fromkeys(mutant.chapter for mutant in MUTANTS))


def find_mutants(chapters: list[str], names: list[str]) -> tuple[Mutant, ...]:
    """Those of these chapters and names; all where neither is given.

    Raises:
        UnknownName: for a chapter or a mutant that is not there.
    """
    for wanted in chapters:
        if wanted not in CHAPTERS:
            raise UnknownName("chapter", wanted, CHAPTERS)
    known = {mutant.name for mutant in MUTANTS}
    for wanted in names:
        if wanted not in known:
            raise UnknownName("mutant", wanted, known)
    every = not chapters and not names
    return tuple(m for m in MUTANTS if every or m.chapter in chapters or m.name in names)
