"""The zoo: one module per chapter, each a table of mutants."""

from __future__ import annotations

from conformance.errors import UnknownName
from mutants.backward import MUTANTS as BACKWARD
from mutants.causal import MUTANTS as CAUSAL
from mutants.features import MUTANTS as FEATURES
from mutants.forward import MUTANTS as FORWARD
from mutants.handed import MUTANTS as HANDED
from mutants.log_sum_exp import MUTANTS as RETURNING
from mutants.long import MUTANTS as LONG
from mutants.masks import MUTANTS as MASKS
from mutants.max_logit import MUTANTS as LARGEST
from mutants.modes import MUTANTS as MODES
from mutants.mutant import Mutant
from mutants.precision import MUTANTS as PRECISION
from mutants.sizes import MUTANTS as SIZES
from mutants.weights import MUTANTS as WEIGHTS
from mutants.world import MUTANTS as WORLD

SMALL: tuple[Mutant, ...] = (
    *FORWARD,
    *MASKS,
    *CAUSAL,
    *PRECISION,
    *BACKWARD,
    *WEIGHTS,
    *MODES,
)
"""Mutants of the attention in small stages, which show at the sizes of the small catalogue."""

MUTANTS: tuple[Mutant, ...] = (
    *SMALL,
    *FEATURES,
    *HANDED,
    *RETURNING,
    *LARGEST,
    *WORLD,
    *SIZES,
    *LONG,
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
