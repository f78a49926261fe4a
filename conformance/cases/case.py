"""A case: one problem under a stable id, in every dtype; and the shape families.

The numbers follow docs/noise.md: zero-mean inputs, N(0, 1) values and cotangents, logits with a
standard deviation of about 1.5, weights of unit gain; regimes depart from that on purpose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np

from conformance.definition.dtypes import Array, BoolArray, dtype_of
from conformance.definition.problem import (
    ARRAY_NAMES,
    Causal,
    Problem,
    Score,
    Shape,
    Sharing,
    Weights,
)

Drawn = dict[str, Array]
"""Inputs and weights by name ("query", "weights.query", "cotangent"), not yet rounded."""

Pattern = Callable[[Shape, np.random.Generator], BoolArray]
BiasPattern = Callable[[Shape, np.random.Generator], Array]
Regime = Callable[[Shape, Drawn, np.random.Generator], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem of the catalogue.

    Attributes:
        name: "chapter/what", such as "mask/key-padding".
        family: name of its shape in `FAMILIES`.
        why: what it does and what it catches.
        serves: the requirements, beyond those that every case serves, that use it.
        defined: False if no definition settles the answer, so that it is observed, not checked.
        idle: inputs that by definition do not change the answer here, with the reason.
        core: whether the level "core" has it: one case for each thing that goes wrong often.
        exchanged: whether its outputs go into the record, so that implementations can be compared
            pairwise.
    """

    name: str
    family: str
    why: str
    mask: Pattern | None = None
    bias: BiasPattern | None = None
    causal: Causal | None = None
    scale: float | None = None
    regime: Regime | None = None
    serves: frozenset[str] = frozenset()
    defined: bool = True
    idle: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    core: bool = False
    exchanged: bool = False

    @property
    def id(self) -> str:
        """ "chapter/what/family": stable, readable, and safe in pytest's -k."""
        return f"{self.name}/{self.family}"

    @property
    def chapter(self) -> str:
        """The first word of the id."""
        return self.name.split("/")[0]

    @property
    def shape(self) -> Shape:
        """The shape of its family."""
        return FAMILIES[self.family]

    def problem(self, dtype: str) -> Problem:
        """Return the problem with every number rounded to `dtype`; cached."""
        return _problem(self, dtype)

    def random(self, purpose: str = "") -> np.random.Generator:
        """Return a random generator that depends on the id and the purpose only."""
        digest = hashlib.sha256(f"{self.id}:{purpose}".encode()).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "little")))

    def __hash__(self) -> int:
        return hash(self.id)


@lru_cache(maxsize=1024)
def _problem(case: Case, dtype: str) -> Problem:
    shape, random = case.shape, case.random()
    drawn = draw(shape, random)
    mask = None if case.mask is None else case.mask(shape, random)
    bias = None if case.bias is None else case.bias(shape, random)
    if case.regime is not None:
        case.regime(shape, drawn, random)
    exact = assembled(shape, drawn, mask=mask, attn_bias=bias, causal=case.causal, scale=case.scale)
    problem = rounded(exact, dtype)
    arrays = [getattr(problem, name) for name in ARRAY_NAMES]
    for array in (*arrays, *problem.weights.named().values()):
        if array is not None:
            array.setflags(write=False)
    return problem


def assembled(shape: Shape, drawn: Mapping[str, Array], **fields: Any) -> Problem:
    """Return the problem in float64 that has these inputs, weights and cotangent.

    Args:
        drawn: arrays by name; inputs that are one array occur once.
        fields: mask, bias, causal flag and scale, as `Problem` has them.
    """
    weights = {
        name.removeprefix("weights."): array
        for name, array in drawn.items()
        if name.startswith("weights.")
    }
    key = drawn.get("key", drawn["query"])
    return Problem(
        shape=shape,
        dtype="float64",
        weights=Weights(**weights),
        query=drawn["query"],
        key=key,
        value=drawn.get("value", key),
        cotangent=drawn["cotangent"],
        **fields,
    )


def rounded(problem: Problem, dtype: str) -> Problem:
    """Return the same problem in another dtype, with every number rounded to it."""
    to_dtype = dtype_of(dtype).round
    query = to_dtype(problem.query)
    key = query if problem.shape.sharing == "self" else to_dtype(problem.key)
    bias = problem.attn_bias
    return problem.replace(
        dtype=dtype,
        weights=Weights(**{n: to_dtype(array) for n, array in problem.weights.named().items()}),
        query=query,
        key=key,
        value=to_dtype(problem.value) if problem.shape.sharing == "separate" else key,
        cotangent=to_dtype(problem.cotangent),
        attn_bias=None if bias is None else to_dtype(bias),
    )


STORED = "file"
"""The chapter of cases that are not in the catalogue; the catalogue has no chapter of this name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredCase(Case):
    """A case that is not in the catalogue, made from stored numbers.

    Attributes:
        stored: the problem before it is rounded to the dtype in which it is asked for.
        path: the file that it was read from, or "".
    """

    stored: Problem
    path: str = ""

    # Two cases may have one id and different numbers, so caches must tell them apart.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def shape(self) -> Shape:
        """The shape of the stored problem."""
        return self.stored.shape

    def problem(self, dtype: str) -> Problem:
        """Return the stored problem, rounded."""
        return _rounded(self, dtype)


@lru_cache(maxsize=64)
def _rounded(case: StoredCase, dtype: str) -> Problem:
    return rounded(case.stored, dtype)


@lru_cache(maxsize=1024)
def case_hash(case: Case) -> str:
    """Return a hash of every number and flag of a case, the same in every process.

    The numbers are hashed in float64, from which those of every other dtype are rounded, so the
    hash of a case in one dtype is this one with the dtype's name. Wording is no part of it.
    """
    flags = (
        case.problem("float64").digest(),
        sorted(case.serves),
        case.defined,
        sorted(case.idle),
    )
    return hashlib.sha256(repr(flags).encode()).hexdigest()[:16]


def draw(shape: Shape, random: np.random.Generator) -> Drawn:
    """Return distinct inputs, weights and the cotangent of a problem of this shape, by name."""
    drawn: Drawn = {}
    inputs = shape.input_shapes()
    for name in shape.distinct_inputs():
        drawn[name] = random.standard_normal(inputs[name])
    # A query gain of 1.5 gives logits a standard deviation of about 1.5; additive scores add
    # `head` products of a tanh, so their weight needs a gain of its own to be as wide.
    gains = {"query": 1.5, "score": 1.2}
    for name, size in shape.weight_shapes().items():
        weight = random.standard_normal(size)
        if name.endswith("_bias"):
            weight *= 0.5
        elif name == "output":
            weight /= np.sqrt(size[0] * size[1])
        elif name != "score":
            weight /= np.sqrt(size[0])
        drawn[f"weights.{name}"] = weight * gains.get(name, 1.0)
    size = (shape.batch, shape.query_length, shape.output_width)
    drawn["cotangent"] = random.standard_normal(size)
    return drawn


def _shape(
    batch: int,
    query: int,
    key: int,
    heads: int,
    head: int,
    *,
    kv_heads: int | None = None,
    value_head: int | None = None,
    widths: tuple[int, int, int, int] | None = None,
    bias: bool = True,
    sharing: Sharing = "separate",
    score: Score = "scaled-dot",
) -> Shape:
    query_width, key_width, value_width, output_width = widths or (heads * head,) * 4
    return Shape(
        batch=batch,
        query_length=query,
        key_length=key,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_size=head,
        value_head_size=value_head or head,
        query_width=query_width,
        key_width=key_width,
        value_width=value_width,
        output_width=output_width,
        bias=bias,
        sharing=sharing,
        score=score,
    )


FAMILIES: dict[str, Shape] = {
    # An even number of heads: torch takes its fused path for no other.
    "self": _shape(2, 7, 7, 4, 6, sharing="self"),
    "cross": _shape(3, 4, 6, 2, 5, sharing="memory"),
    "separate": _shape(2, 5, 7, 3, 4, widths=(12, 9, 11, 12)),
    "narrow": _shape(2, 6, 4, 3, 5, widths=(8, 7, 7, 9), sharing="memory"),
    "value-head": _shape(3, 4, 5, 2, 7, value_head=6, widths=(11, 9, 8, 11)),
    "gqa": _shape(4, 5, 7, 6, 8, kv_heads=2, widths=(10, 9, 9, 10), sharing="memory"),
    "mqa": _shape(2, 5, 5, 4, 6, kv_heads=1, widths=(9, 9, 9, 9), bias=False, sharing="self"),
    "one-query": _shape(3, 1, 6, 2, 4, sharing="memory"),
    "one-key": _shape(3, 5, 1, 2, 4),
    "one-head": _shape(2, 4, 6, 1, 5, bias=False),
    "long": _shape(1, 19, 131, 2, 8),
    # One more than a power of two: the last tile of a kernel holds a single query and key.
    "tiles": _shape(1, 129, 129, 2, 33, sharing="self"),
    # More positions than bfloat16 has whole numbers.
    "longer": _shape(1, 300, 300, 1, 4, bias=False, sharing="separate"),
    "decoding": _shape(3, 1, 20, 12, 4, kv_heads=2, widths=(24, 22, 22, 24), sharing="memory"),
    # As many tokens as heads of size 1: a bias [heads 1] can be taken for one along the tokens.
    "size-one": _shape(2, 3, 3, 3, 1, sharing="self"),
    "additive": _shape(2, 4, 6, 3, 5, sharing="memory", score="additive"),
    "additive-self": _shape(3, 6, 6, 2, 5, sharing="self", score="additive"),
}
"""The shape families: few, because a compiling framework pays for each new shape.

Inside a family all sizes are pairwise different wherever the implementations allow it (batch,
query, key, heads, kv_heads, group, head, value_head), so that a swapped axis changes a shape or
an answer instead of passing. Widths equal heads × head where most layers insist on it; `narrow`,
`value-head`, `gqa` and `mqa` are where they must not.
"""
