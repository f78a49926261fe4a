"""Fresh problems: cases of the catalogue whose numbers and sizes are drawn from a token.

The token is the seed of every number. All cases of a family for which sizes are drawn get the same
sizes, so that compiling implementations meet few shapes; cases on a grid keep the sizes of the
grid. What makes a family special, such as a single key, is kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from conformance.cases.case import FAMILIES, Case
from conformance.definition.attention import heads_alone
from conformance.definition.problem import Problem, Shape

SQUARE = ("square",)
"""Families whose sizes all coincide, however they are drawn."""
FIXED = ("size-one", "full-tiles", "one-head", "tiles", "longer", "long", "one-key")
"""Families in which only the batch size varies."""

_WIDTHS = ("query_width", "key_width", "value_width", "output_width")

MOST_DRAWS = 50
"""The most draws of a case with a regime, which is drawn again if an input or the cotangent is
beyond the range of float16."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Fresh(Case):
    """A case of the catalogue with numbers that a token determines.

    Attributes:
        token: the seed of the numbers; "" for the numbers and sizes of the catalogue, which are
            public.
        jittered: whether the token determines the sizes too, unless the case is on a grid.
        heads: whether the inputs are heads that are projected already, as functions take them.
        attempt: the number of earlier draws, which were rejected.
    """

    token: str
    jittered: bool = True
    heads: bool = True
    attempt: int = 0

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def id(self) -> str:
        """The id of the case in the catalogue, with its grid if it has one.

        "@catalogue" is appended to the id of a case without a grid if the token determines its
        numbers but not its sizes.
        """
        fixed = bool(self.token) and not self.jittered and self.grid is None
        return f"{super().id}@catalogue" if fixed else super().id

    @property
    def shape(self) -> Shape:
        """The shape of the problem, before identities replace the projections if `heads` is set."""
        # A grid has the sizes that an implementation declares; it may not support others.
        if self.jittered and self.token and self.grid is None:
            return _jittered(self.family, self.token)
        return super().shape

    def random(self, purpose: str = "") -> np.random.Generator:
        """Return a random generator seeded by the token, the id, the purpose and the attempt.

        Without a token, return the generator of the catalogue's case.
        """
        if not self.token:
            return super().random(purpose)
        again = f"#{self.attempt}" if self.attempt else ""
        return _random(self.token, f"{self.id}:{purpose}{again}")

    def problem(self, dtype: str) -> Problem:
        """Return the problem with all numbers rounded to `dtype`; the result is cached.

        If `heads` is set, its inputs are the projected heads, and its projections are identities.
        """
        return _problem(self, dtype)


@lru_cache(maxsize=256)
def _problem(case: Fresh, dtype: str) -> Problem:
    drawn = super(Fresh, case).problem(dtype)
    return heads_alone(drawn) if case.heads else drawn


def fresh(case: Case, token: str, *, heads: bool, jittered: bool = True) -> Fresh:
    """Return the case with numbers that a token determines; for "", with those of the catalogue.

    If a case with a regime has an input or a cotangent beyond the range of float16, it is drawn
    again. After `MOST_DRAWS` draws, the last one is returned nevertheless.

    Args:
        case: a case of the catalogue.
        token: the seed of the numbers, or "".
        heads: whether the inputs are heads that are projected already.
        jittered: whether the token also determines the sizes, unless the case is on a grid.
    """
    fields: dict[str, Any] = {one.name: getattr(case, one.name) for one in dataclasses.fields(Case)}
    for attempt in range(MOST_DRAWS):
        drawn = Fresh(**fields, token=token, heads=heads, jittered=jittered, attempt=attempt)
        # Only a regime produces numbers so large; those of the catalogue are tested to fit.
        if not token or case.regime is None or _fits(drawn):
            break
    return drawn


def _fits(case: Fresh) -> bool:
    """Return whether inputs and cotangent are finite in float16."""
    with np.errstate(over="ignore"):
        problem = case.problem("float16")
    arrays = (problem.query, problem.key, problem.value, problem.cotangent)
    return all(bool(np.isfinite(array).all()) for array in arrays)


def _random(token: str, purpose: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{token}:{purpose}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def shuffled(token: str, purpose: str, count: int) -> list[int]:
    """Return the numbers from 0 to `count` - 1 in an order seeded by the token and the purpose."""
    return [int(place) for place in _random(token, purpose).permutation(count)]


@lru_cache(maxsize=512)
def _jittered(family: str, token: str) -> Shape:
    """Return the shape of a family with some sizes increased at random; the token is the seed.

    In the families `FIXED`, only the batch can grow.
    """
    shape, random = FAMILIES[family], _random(token, f"sizes of {family}")
    more = {
        name: int(random.integers(most))
        for name, most in (("batch", 3), ("query", 4), ("key", 4), ("heads", 2), ("size", 3))
    }
    batch = shape.batch + more["batch"]
    if family in FIXED:
        return dataclasses.replace(shape, batch=batch)
    if family in SQUARE:
        names = ("batch", "query_length", "key_length", "heads", "kv_heads", "head_size")
        square: dict[str, Any] = dict.fromkeys((*names, "value_head_size"), batch)
        square |= dict.fromkeys(_WIDTHS, batch * batch)
        return dataclasses.replace(shape, **square)
    # Cases with bottom-right alignment must keep at least as many keys as queries.
    query = shape.query_length + (more["query"] if shape.query_length > 1 else 0)
    key = shape.key_length + more["query"] + more["key"]
    kv_heads = shape.kv_heads + more["heads"]
    heads = kv_heads * shape.group
    # Rotary embeddings need an even size.
    head, value_head = shape.head_size + 2 * more["size"], shape.value_head_size + 2 * more["size"]
    sizes: dict[str, Any] = {
        "batch": batch,
        "query_length": query,
        "key_length": query if shape.sharing == "self" else key,
        "kv_heads": kv_heads,
        "heads": heads,
        "head_size": head,
        "value_head_size": value_head,
    }
    natural = shape.heads * shape.head_size
    sizes |= {name: heads * head for name in _WIDTHS if getattr(shape, name) == natural}
    if shape.sharing != "separate":
        sizes["value_width"] = sizes.get("key_width", shape.key_width)
        if shape.sharing == "self":
            sizes["query_width"] = sizes["value_width"]
    return dataclasses.replace(shape, **sizes)
