"""A Case: one Problem of the catalogue under a stable id, in every dtype.

The numbers follow docs/noise.md: zero-mean inputs, N(0, 1) values and cotangents, logits with a
standard deviation of about 1.5, weights of unit gain; regimes depart from that on purpose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from conformance.cases.families import FAMILIES
from conformance.definition.dtypes import Array, BoolArray, dtype_of
from conformance.definition.problem import Causal, Problem, Shape, Weights

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
        why: in prose, what it does and what it catches.
        serves: the requirements, beyond those that every case serves, that use it.
        defined: False where the field has no agreed answer, so that only characteristics look.
        idle: inputs that by definition do not move the answer here, with the reason.
        core: whether the level "core" asks it: one case for each thing that goes wrong often.
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
        """The problem with every number rounded to `dtype`; cached, since many checks share it."""
        return _problem(self, dtype)

    def random(self, purpose: str = "") -> np.random.Generator:
        """A generator that depends on the id and the purpose only."""
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
    to_dtype = dtype_of(dtype).round
    rounded = {name: _frozen(to_dtype(values)) for name, values in drawn.items()}
    weights = {
        name.removeprefix("weights."): rounded.pop(name)
        for name in list(rounded)
        if name.startswith("weights.")
    }
    rounded.setdefault("key", rounded["query"])
    rounded.setdefault("value", rounded["key"])
    return Problem(
        shape=shape,
        dtype=dtype,
        weights=Weights(**weights),
        mask=None if mask is None else _frozen(mask),
        attn_bias=None if bias is None else _frozen(to_dtype(bias)),
        causal=case.causal,
        scale=case.scale,
        **rounded,
    )


@lru_cache(maxsize=1024)
def case_hash(case: Case) -> str:
    """A hash of every number and flag of a case, the same in every process.

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
    """Distinct inputs, weights and the cotangent of a problem of this shape."""
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


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
