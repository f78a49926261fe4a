"""Where an array is wrong, in words, if it is not wrong everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conformance import text as named
from conformance.definition.dtypes import BoolArray
from conformance.definition.problem import Problem

_PLURAL = {
    "batch": ("batch entry", "batch entries"),
    "head": ("head", "heads"),
    "query": ("query", "queries"),
    "key": ("key", "keys"),
    "component": ("component", "components"),
    "in": ("input component", "input components"),
    "out": ("output component", "output components"),
}
MOST = 3
"""Indices that are listed one by one."""


def located(array: str, wrong: BoolArray) -> str:
    """Such as "batch entries 1 and later, query 4 (the last)"; "" where it is wrong all over."""
    names = named.axes(array, wrong.ndim)
    if not names or wrong.all() or not wrong.any():
        return ""
    told = []
    for axis, name in enumerate(names):
        others = tuple(other for other in range(wrong.ndim) if other != axis)
        at = np.nonzero(wrong.any(axis=others))[0]
        if 0 < at.size < wrong.shape[axis]:
            said = _indices(at, wrong.shape[axis])
            if said:
                told.append(f"{_PLURAL[name][at.size > 1]} {said}")
    return ", ".join(told)


def heads(chosen: BoolArray) -> str:
    """Such as "head 1 (the last)" or "heads 1 and later"."""
    at = np.nonzero(chosen)[0]
    return f"{_PLURAL['head'][at.size > 1]} {_indices(at, chosen.size) or 'in part'}"


def _indices(at: Sequence[int] | np.ndarray, size: int) -> str:
    first, last, count = int(at[0]), int(at[-1]), len(at)
    if count == 1:
        return f"{first} (the last)" if first == size - 1 else str(first)
    together = last - first + 1 == count
    if together and last == size - 1:
        return f"{first} and later"
    if together and first == 0:
        return f"0 to {last}"
    if count <= MOST:
        return f"{', '.join(str(int(i)) for i in at[:-1])} and {last}"
    return f"{first} to {last}" if together else ""


def rows(problem: Problem, wrong: BoolArray) -> str:
    """What the wrong rows `[batch query]` have in common and the others have not."""
    allowed = problem.allowed_in_full()
    blocked = (~allowed).any(axis=(1, 3))
    if wrong.any() and not wrong.all() and blocked.any() and not blocked.all():
        if (wrong == blocked).all():
            return "all rows in which a key is blocked, and no other"
        if (wrong == ~blocked).all():
            return "all rows in which no key is blocked, and no other"
    return ""
