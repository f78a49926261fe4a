"""The definition's data: Shape, Weights, Problem and Answer.

Everything is NumPy and immutable. Axis names, used in every docstring of the suite:

    batch, query (its length), key (its length), heads, kv_heads, head (query/key head size),
    value_head, query_width, key_width, value_width, output_width.

A Problem is one complete question, which `conformance.definition.expectation` answers. It means:

    q = query · W_q + b_q        k = key · W_k + b_k        v = value · W_v + b_v
    logits  = scale · q kᵀ                      (score "scaled-dot", scale defaults to 1/√head)
            = scale · wᵀ tanh(q + k)            (score "additive",   scale defaults to 1)
    logits += attn_bias, where one is given
    weights = softmax over the keys that a query may attend, 0 elsewhere
    output  = Σ_heads (weights · v) W_o + b_o

Query head h uses key/value head h // (heads / kv_heads). A query that may attend no key has
weights 0 (the empty sum), so its output is the output bias: see docs/definition.md for why.

Sources: Vaswani et al. 2017 (arXiv:1706.03762) for the layer and the scaled dot product;
Bahdanau et al. 2015 (arXiv:1409.0473) for the additive score; Shazeer 2019 (arXiv:1911.02150)
and Ainslie et al. 2023 (arXiv:2305.13245) for shared key/value heads.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from conformance.definition.dtypes import Array, BoolArray, DType, dtype_of
from conformance.errors import WrongShape

Score = Literal["scaled-dot", "additive"]
Sharing = Literal["separate", "memory", "self"]
Causal = Literal["top-left", "bottom-right"]


INPUT_AXES: Mapping[str, tuple[str, ...]] = {
    "query": ("batch", "query_length", "query_width"),
    "key": ("batch", "key_length", "key_width"),
    "value": ("batch", "key_length", "value_width"),
}
"""The field of a `Shape` that is the size of each axis of an input."""

WEIGHT_AXES: Mapping[str, tuple[str, ...]] = {
    "query": ("query_width", "heads", "head_size"),
    "key": ("key_width", "kv_heads", "head_size"),
    "value": ("value_width", "kv_heads", "value_head_size"),
    "output": ("heads", "value_head_size", "output_width"),
    "query_bias": ("heads", "head_size"),
    "key_bias": ("kv_heads", "head_size"),
    "value_bias": ("kv_heads", "value_head_size"),
    "output_bias": ("output_width",),
    "score": ("heads", "head_size"),
}
"""The same for the canonical weights."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of an attention, and what it is made of.

    `sharing` says which inputs are one array, as a Transformer uses them: "self" (query, key and
    value), "memory" (key and value: the decoder's cross-attention) or "separate".
    """

    batch: int
    query_length: int
    key_length: int
    heads: int
    kv_heads: int
    head_size: int
    value_head_size: int
    query_width: int
    key_width: int
    value_width: int
    output_width: int
    bias: bool = True
    score: Score = "scaled-dot"
    sharing: Sharing = "separate"

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            size = getattr(self, item.name)
            if isinstance(size, int) and not isinstance(size, bool) and size < 0:
                raise WrongShape(f"Shape.{item.name} is {size}; sizes are not negative")
        if self.kv_heads == 0 or self.heads % self.kv_heads:
            raise WrongShape(f"{self.heads} heads cannot share {self.kv_heads} key/value heads")
        if self.sharing != "separate" and self.key_width != self.value_width:
            raise WrongShape("key and value are one array, so their widths must agree")
        if self.sharing == "self" and (self.query_length, self.query_width) != (
            self.key_length,
            self.key_width,
        ):
            raise WrongShape("query and key are one array, so length and width must agree")

    @property
    def group(self) -> int:
        """The number of query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def default_scale(self) -> float:
        """The default scale: 1/√head for the scaled dot product, 1 for the additive score."""
        return 1.0 / math.sqrt(self.head_size) if self.score == "scaled-dot" else 1.0

    @property
    def logits(self) -> tuple[int, int, int, int]:
        """The shape of the logits, `[batch heads query key]`."""
        return (self.batch, self.heads, self.query_length, self.key_length)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every canonical weight that this attention has, by name."""
        return {
            name: tuple(getattr(self, axis) for axis in axes)
            for name, axes in WEIGHT_AXES.items()
            if (self.bias or not name.endswith("_bias"))
            if (self.score == "additive" or name != "score")
        }

    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of query, key and value, by name."""
        return {
            name: tuple(getattr(self, axis) for axis in axes) for name, axes in INPUT_AXES.items()
        }

    def distinct_inputs(self) -> tuple[str, ...]:
        """Return the names of the inputs that are separate arrays; gradients have these names."""
        return {"self": ("query",), "memory": ("query", "key")}.get(
            self.sharing, ("query", "key", "value")
        )


@dataclass(frozen=True, eq=False)
class Weights:
    """The canonical weights, in one layout for all implementations.

    `query`, `key` `[embed heads head]`, `value` `[embed heads value_head]`, `output`
    `[heads value_head embed]`; biases `[heads head]`, `[heads value_head]`, `[embed]`; `score`
    `[heads head]` for the additive score. Keys and values have kv_heads instead of heads.
    """

    query: Array
    key: Array
    value: Array
    output: Array
    query_bias: Array | None = None
    key_bias: Array | None = None
    value_bias: Array | None = None
    output_bias: Array | None = None
    score: Array | None = None

    def named(self) -> dict[str, Array]:
        """Return the weights that are not None, by name."""
        pairs = ((item.name, getattr(self, item.name)) for item in dataclasses.fields(self))
        return {name: value for name, value in pairs if value is not None}


WEIGHT_NAMES = tuple(item.name for item in dataclasses.fields(Weights))
ARRAY_NAMES = ("query", "key", "value", "cotangent", "mask", "attn_bias")
"""The fields of a problem that are arrays."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """One question to an attention: inputs, masks, and the cotangent of the output.

    Every number is exactly representable in `dtype`, so rounding the inputs is no part of any
    error.

    Attributes:
        query: `[batch query query_width]`.
        key: `[batch key key_width]`; the same object as `query` for sharing "self".
        value: `[batch key value_width]`; the same object as `key` for sharing "memory", "self".
        cotangent: gradient of the loss with respect to the output, `[batch query output_width]`.
        mask: True where a query may attend; 4 axes, each that of `[batch heads query key]` or 1.
        attn_bias: added to the logits; 4 axes likewise.
        causal: key j is visible to query i iff j <= i ("top-left") or
            j <= i + key_length - query_length ("bottom-right").
        scale: factor of the logits; None means `shape.default_scale`.
    """

    shape: Shape
    dtype: str
    weights: Weights
    query: Array
    key: Array
    value: Array
    cotangent: Array
    mask: BoolArray | None = None
    attn_bias: Array | None = None
    causal: Causal | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        for name, wanted in self.shape.input_shapes().items():
            check_shape(name, getattr(self, name).shape, wanted)
        wanted = (self.shape.batch, self.shape.query_length, self.shape.output_width)
        check_shape("cotangent", self.cotangent.shape, wanted)
        shapes = self.shape.weight_shapes()
        named = self.weights.named()
        if named.keys() != shapes.keys():
            raise WrongShape(f"weights are {sorted(named)}, the shape has {sorted(shapes)}")
        for name, weight in named.items():
            check_shape(f"weights.{name}", weight.shape, shapes[name])
        for name in ("mask", "attn_bias"):
            array = getattr(self, name)
            if array is not None:
                check_broadcastable(name, array.shape, self.shape.logits)

    @property
    def format(self) -> DType:
        """The floating-point format of every number in the problem."""
        return dtype_of(self.dtype)

    @property
    def logit_scale(self) -> float:
        """The factor of the logits."""
        return self.shape.default_scale if self.scale is None else self.scale

    @property
    def allowed(self) -> BoolArray | None:
        """The mask and causal flag as one, True = may attend; 4 axes, or None if nothing blocks."""
        if self.causal is None:
            return self.mask
        triangle = causal_mask(self.shape, self.causal)
        return triangle if self.mask is None else self.mask & triangle

    def allowed_in_full(self) -> BoolArray:
        """Return `allowed`, expanded to `[batch heads query key]`."""
        allowed = self.allowed
        return np.broadcast_to(True if allowed is None else allowed, self.shape.logits)

    def blocked_for(self, weights: Array) -> BoolArray:
        """Return True where a query may not attend to a key, in the shape of these weights.

        For weights averaged over heads, `[batch query key]`, that is where no head may.
        """
        allowed = self.allowed_in_full()
        return ~(np.any(allowed, axis=1) if weights.ndim == 3 else allowed)

    def with_inputs(self, **inputs: Array) -> Problem:
        """Return the problem with other distinct inputs; those that share an array follow."""
        unknown = set(inputs) - set(self.shape.distinct_inputs())
        if unknown:
            raise WrongShape(f"{sorted(unknown)} share another array here")
        query = inputs.get("query", self.query)
        if self.shape.sharing == "self":
            return dataclasses.replace(self, query=query, key=query, value=query)
        key = inputs.get("key", self.key)
        value = key if self.shape.sharing == "memory" else inputs.get("value", self.value)
        return dataclasses.replace(self, query=query, key=key, value=value)

    def with_weights(self, **weights: Any) -> Problem:
        """Return the problem with other weights."""
        return dataclasses.replace(self, weights=dataclasses.replace(self.weights, **weights))

    def digest(self) -> str:
        """Return a hash of every number and flag: equal for equal problems, in every process."""
        flags = (self.shape, self.dtype, self.causal, self.scale)
        hashed = hashlib.blake2b(repr(flags).encode(), digest_size=16)
        arrays = {name: getattr(self, name) for name in ARRAY_NAMES}
        arrays |= {f"weights.{name}": array for name, array in self.weights.named().items()}
        for name, array in arrays.items():
            if array is not None:
                hashed.update(f"{name} {array.shape} {array.dtype}".encode())
                hashed.update(array.tobytes())
        return hashed.hexdigest()

    def replace(self, **changes: Any) -> Problem:
        """Return a copy with other fields."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, eq=False)
class Answer:
    """The results of an implementation, as float64.

    Attributes:
        output: `[batch query output_width]`, or None where it was not computed.
        weights: attention weights `[batch heads query key]`, or `[batch query key]` where the
            implementation averages over heads; None if it returns none.
        gradients: by canonical name: "query", "key", "value", "weights.query", ...,
            "attn_bias". Inputs that share an array have one gradient, under the first's name.
        dtypes: the native dtype of each array, by the same names.
    """

    output: Array
    weights: Array | None = None
    gradients: Mapping[str, Array] = field(default_factory=lambda: MappingProxyType({}))
    dtypes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def arrays(self) -> dict[str, Array]:
        """All returned arrays, by the names that expectations use."""
        found = {"output": self.output}
        if self.weights is not None:
            found["weights"] = self.weights
        return found | {f"gradient.{name}": array for name, array in self.gradients.items()}


def causal_mask(shape: Shape, alignment: Causal) -> BoolArray:
    """Return the causal flag as a mask `[1 1 query key]`."""
    offset = 0 if alignment == "top-left" else shape.key_length - shape.query_length
    triangle = np.tri(shape.query_length, shape.key_length, offset, dtype=np.bool_)
    return triangle[None, None]


def check_shape(name: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raise `WrongShape` unless the shapes are equal."""
    if got != wanted:
        raise WrongShape(f"{name} has shape {list(got)}, wanted {list(wanted)}")


def check_broadcastable(name: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raise `WrongShape` unless every axis has the wanted size or 1."""
    if len(got) != len(wanted) or any(g not in (1, w) for g, w in zip(got, wanted, strict=True)):
        raise WrongShape(
            f"{name} has shape {list(got)}; each axis of [batch heads query key] = {list(wanted)} "
            "must be there, in full or as 1"
        )
