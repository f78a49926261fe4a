"""Parse layouts and patterns of arrays.

"(batch heads) query key" is a layout, "embed heads head -> (heads head) embed" is a pattern.

A layout names the axes of an array in order. Axes in parentheses are joined into one, of which the
first varies slowest; "1" is an axis of size 1. A pattern is two layouts and an arrow, as in einops.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache

from conformance.errors import WrongDeclaration

Layout = tuple[tuple[str, ...], ...]
"""For each axis of an array, the names of the axes joined in it; () for an axis of size 1."""

_WORD = re.compile(r"\w+")
_AXIS = re.compile(r"\s*(?:(\w+)|\(([\w\s]*)\))\s*")


@lru_cache(maxsize=1024)
def parse(layout: str) -> Layout:
    """Return, for each axis of an array in this layout, the tuple of named axes joined in it.

    Raises:
        WrongDeclaration: if parentheses are nested or unbalanced, or a name is invalid or occurs
            twice.
    """
    parsed: list[tuple[str, ...]] = []
    end = 0
    while end < len(layout):
        match = _AXIS.match(layout, end)
        if match is None:
            raise WrongDeclaration(f"{layout!r} is no layout: see {layout[end:]!r}")
        end = match.end()
        parsed.append(tuple(name for name in _WORD.findall(match[0]) if name != "1"))
    named = [name for names in parsed for name in names]
    if len(set(named)) < len(named):
        raise WrongDeclaration(f"{layout!r} is no layout: a name occurs twice")
    return tuple(parsed)


def sides(pattern: str) -> tuple[str, str]:
    """Return the layouts before and after the arrow of a pattern.

    Raises:
        WrongDeclaration: if the pattern does not have exactly one arrow.
    """
    before, arrow, after = pattern.partition("->")
    if not arrow or "->" in after:
        raise WrongDeclaration(f"{pattern!r} is no pattern, which has one arrow")
    return before.strip(), after.strip()


def axes(layout: str) -> tuple[str, ...]:
    """Return all named axes of a layout in order, including joined ones."""
    return tuple(name for names in parse(layout) for name in names)


def joined(layout: str) -> frozenset[str]:
    """Return the names of the axes that are joined with others into one axis of the array."""
    return frozenset(name for names in parse(layout) if len(names) > 1 for name in names)


def shape(layout: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of an array in this layout, given the sizes of the named axes."""
    return tuple(math.prod(sizes[name] for name in names) for names in parse(layout))
