"""The definition's data: Shape, Weights, Problem and Answer, and the features of a problem.

The classes are frozen; their arrays are NumPy arrays, which nobody may change. These are the usual
names of axes in the docstrings of the suite:

    batch, query (its length), key (its length), heads, kv_heads, head (query/key head size),
    value_head, query_width, key_width, value_width, output_width.

A Problem determines one answer, which `conformance.definition.expectation` computes:

    q = query · W_q + b_q        k = key · W_k + b_k        v = value · W_v + b_v
    logits  = scale · q kᵀ                      (score "scaled-dot", scale defaults to 1/√head)
            = scale · wᵀ tanh(q + k)            (score "additive",   scale defaults to 1)
    logits += attn_bias, if there is one
    weights = softmax over the keys that a query may attend to, 0 elsewhere
    output  = Σ_heads (weights · v) W_o + b_o

Query head h uses key/value head h // (heads / kv_heads). A fully masked query has weights 0
(the empty sum), so its output is the output bias; docs/definition.md explains why, and defines
the features that add further steps, such as windows and rotary embeddings. Causal masks, windows,
ALiBi and rotary embeddings use positions, the places of tokens in their sequences, never array
indices.

Sources: Vaswani et al. 2017 (arXiv:1706.03762) for the layer and the scaled dot product;
Bahdanau et al. 2015 (arXiv:1409.0473) for the additive score; Shazeer 2019 (arXiv:1911.02150)
and Ainslie et al. 2023 (arXiv:2305.13245) for shared key/value heads.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, reduce
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import numpy as np

from conformance.definition.dtypes import Array, BoolArray, DType, IntArray, dtype_of
from conformance.definition.features import ARRAYS, FEATURES, IN_ORDER, FeatureEntry, depths
from conformance.definition.features import NO_WINDOW as NO_WINDOW
from conformance.definition.features import Norm as Norm
from conformance.definition.features import Pairs as Pairs
from conformance.definition.features import Positions as Positions
from conformance.definition.features import Rotary as Rotary
from conformance.definition.features import Segments as Segments
from conformance.definition.features import Window as Window
from conformance.definition.features import within as within
from conformance.definition.rotary import POSITION_AXES
from conformance.definition.rotary import RotaryAxes as RotaryAxes
from conformance.definition.rotary import RotaryScaling as RotaryScaling
from conformance.errors import WrongShape


def ranks(segments: IntArray) -> IntArray:
    """Return each token's index within its segment, `[batch length]`, counted from 0."""
    order = np.argsort(segments, axis=1, kind="stable")
    together = np.take_along_axis(segments, order, axis=1)
    begins = np.ones(segments.shape, dtype=np.bool_)
    begins[:, 1:] = together[:, 1:] != together[:, :-1]
    index = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
    first = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    found = np.empty(segments.shape, dtype=np.int64)
    np.put_along_axis(found, order, index - first, axis=1)
    return found


def surplus_of_keys(segments: Segments, query_used: BoolArray, key_used: BoolArray) -> IntArray:
    """Return how many more keys than queries the segment of each query has, `[batch query]`.

    The number is negative if there are more queries. Only the tokens for which `query_used` and
    `key_used`, each `[1 or batch, length]`, are True are counted.
    """
    mine = segments.query[:, :, None]
    keys = (mine == segments.key[:, None]) & key_used[:, None]
    queries = (mine == segments.query[:, None]) & query_used[:, None]
    return keys.sum(axis=2) - queries.sum(axis=2)


T = TypeVar("T")

Score = Literal["scaled-dot", "additive"]
Sharing = Literal["separate", "memory", "self"]
Causal = Literal["top-left", "bottom-right"]


INPUT_AXES: Mapping[str, tuple[str, ...]] = {
    "query": ("batch", "query_length", "query_width"),
    "key": ("batch", "key_length", "key_width"),
    "value": ("batch", "key_length", "value_width"),
}
"""For each input, the fields of `Shape` that give the sizes of its axes."""

_ARRAY_OF: Mapping[Sharing, Mapping[str, str]] = {
    "separate": {},
    "memory": {"value": "key"},
    "self": {"key": "query", "value": "query"},
}
"""For each sharing, the inputs that are the same array as another one, by which they are named."""

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
"""For each canonical weight, the fields of `Shape` that give the sizes of its axes."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of an attention layer, its score, its sharing, and which projections have biases.

    `bias` is True if all projections have one, False if none has, or else the names of those that
    have, such as `("output",)`.

    `sharing` specifies which inputs are the same array: "self" (query, key and value:
    self-attention), "memory" (key and value: a decoder's cross-attention) or "separate".

    Raises:
        WrongShape: if a size is negative, the heads cannot share the key/value heads evenly, or
            inputs that share an array have different sizes.
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
    bias: bool | tuple[str, ...] = True
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

    @classmethod
    def of_heads(cls, query: Sequence[int], value: Sequence[int], *, bias: bool = False) -> Shape:
        """Return the shape of a layer whose projections leave heads, side by side, as they are.

        `query` and `value` are the sizes `[batch heads length head]` of query and value heads.
        """
        batch, heads, queries, size = query
        _, kv_heads, keys, value_size = value
        return cls(
            batch=batch,
            query_length=queries,
            key_length=keys,
            heads=heads,
            kv_heads=kv_heads,
            head_size=size,
            value_head_size=value_size,
            query_width=heads * size,
            key_width=kv_heads * size,
            value_width=kv_heads * value_size,
            output_width=heads * value_size,
            bias=bias,
        )

    @property
    def group(self) -> int:
        """The number of query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def default_scale(self) -> float:
        """The default scale: 1/√head for the scaled dot product, 1 for the additive score."""
        return 1.0 / math.sqrt(self.head_size) if self.score == "scaled-dot" else 1.0

    @property
    def position_axes(self) -> int:
        """The number of axes on which tokens have positions, if they have more than one."""
        return len(POSITION_AXES)

    @property
    def logits(self) -> tuple[int, int, int, int]:
        """The shape of the logits, `[batch heads query key]`."""
        return (self.batch, self.heads, self.query_length, self.key_length)

    def has_bias(self, projection: str) -> bool:
        """Return whether a projection, such as "query" or "output", has a bias."""
        return self.bias if isinstance(self.bias, bool) else projection in self.bias

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all canonical weights of the layer, by name."""
        return dict(self._weight_shapes)

    @cached_property
    def _weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: tuple(getattr(self, axis) for axis in axes)
            for name, axes in WEIGHT_AXES.items()
            if not name.endswith("_bias") or self.has_bias(name.removesuffix("_bias"))
            if (self.score == "additive" or name != "score")
        }

    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of query, key and value, by name."""
        return dict(self._input_shapes)

    @cached_property
    def _input_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: tuple(getattr(self, axis) for axis in axes) for name, axes in INPUT_AXES.items()
        }

    def distinct_inputs(self) -> tuple[str, ...]:
        """Return the names of the distinct input arrays; their gradients have the same names."""
        return tuple(dict.fromkeys(map(self.array_of, INPUT_AXES)))

    def array_of(self, name: str) -> str:
        """Return the name of the distinct array that the input "query", "key" or "value" is."""
        return _ARRAY_OF[self.sharing].get(name, name)

    def spread(self, distinct: Mapping[str, T]) -> dict[str, T]:
        """Return what belongs to query, key and value, given that of the distinct arrays."""
        return {name: distinct[self.array_of(name)] for name in INPUT_AXES}


@dataclass(frozen=True, eq=False)
class Weights:
    """The canonical weights, in one layout for all implementations.

    `query` is `[query_width heads head]`, `key` `[key_width kv_heads head]`, `value`
    `[value_width kv_heads value_head]` and `output` `[heads value_head output_width]`. A bias has
    the axes of its weight without the width, except that `output_bias` is `[output_width]`; biases
    are None if the layer has none. `score` is `[heads head]`, or None without the additive score.
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


def identities(shape: Shape, score: Array | None = None) -> Weights:
    """Return the weights of an attention over heads side by side: its projections do nothing.

    They ignore the widths of the shape, and have no biases. `score` is that of the additive score.
    The arrays are read-only, and problems of the same sizes share them.
    """
    query = _identity(shape.heads, shape.head_size)
    key = _identity(shape.kv_heads, shape.head_size)
    value = _identity(shape.kv_heads, shape.value_head_size)
    output = np.moveaxis(_identity(shape.heads, shape.value_head_size), 0, -1)
    return Weights(query, key, value, output, score=score)


@lru_cache(maxsize=8)
def _identity(heads: int, size: int) -> Array:
    """Return the identity as a projection `[embed heads head]`."""
    # All rows are views of one line, so that wide identities take no memory.
    width = heads * size
    line = np.zeros(2 * width - 1)
    line[width - 1] = 1.0
    step = line.itemsize
    square = np.lib.stride_tricks.as_strided(
        line[width - 1 :], (width, width), (-step, step), writeable=False
    )
    return square.reshape(width, heads, size)


WEIGHT_NAMES = tuple(item.name for item in dataclasses.fields(Weights))
ARRAY_NAMES = (
    *("query", "key", "value", "cotangent", "mask", "attn_bias"),
    *("weights_cotangent", "log_sum_exp_cotangent"),
)
"""The fields of a problem that are arrays and do not belong to a feature."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """The inputs, weights and masks of an attention layer, and the cotangent of its output.

    Every element of its floating-point arrays is exactly representable in `dtype`, so no error is
    due to rounding the inputs. A feature is absent if its field is None or, for `window`,
    `NO_WINDOW`.

    Attributes:
        shape: the sizes.
        dtype: the name of the floating-point format.
        weights: the canonical weights.
        query: `[batch query query_width]`.
        key: `[batch key key_width]`; the same object as `query` for sharing "self".
        value: `[batch key value_width]`; the same object as `key` for sharing "memory" and "self".
        cotangent: gradient of the loss with respect to the output, `[batch query output_width]`.
        mask: `[batch heads query key]`, each axis of full size or 1; True where a query may attend
            to a key; None if there is no mask.
        attn_bias: added to the logits; the same axes as those of a mask; None if there is no bias.
        causal: None, or the alignment of the causal mask: key j is visible to query i iff j <= i
            ("top-left") or j <= i + key_length - query_length ("bottom-right"). With lengths,
            segments or positions, the positions of both are compared instead.
        scale: factor of the logits; None means `shape.default_scale`.
        weights_cotangent: gradient of the loss with respect to the returned attention weights,
            `[batch heads query key]`; None if the loss does not depend on them.
        log_sum_exp_cotangent: likewise with respect to the log-sum-exp, `[batch heads query]`. If
            it is there, an answer has the statistics of rows too.
        heads_alone: whether query, key and value are heads that have already been projected; the
            projections are then the identity.
        window: how many keys before and after its own position a query sees; None means no limit.
        soft_cap: the cap in cap · tanh(logits / cap), which replaces the logits after the scale and
            before anything is added to them.
        sinks: `[heads]`, the logit of a sink for each head, which takes weight but has no value.
        slopes: `[heads]`, of ALiBi: slope · |distance of the positions| is subtracted from the
            logits.
        rotary: the rotation of queries and keys by their positions.
        rotary_scaling: how its frequencies are scaled; nothing without a rotation.
        norm: the RMS norm of query and key heads, before the rotation.
        query_lengths: `[batch]`, the number of queries of each batch entry; later queries are fully
            masked.
        key_lengths: `[batch]`, the number of keys of each batch entry; later keys are blocked.
        segments: the sequences that are packed into each batch entry.
        positions: the positions of tokens; None if they follow from the lengths, the segments and
            the alignment. If they are given, both alignments of the causal mask mean that a key is
            visible iff its position is not beyond the query's.
        chunk: the size of the blocks of positions, counted from position 0, beyond which no query
            sees a key; None if there are none.
        spans: `[batch key]`, the id of the bidirectional span of each key, 0 for none. A query is
            in the span of the key at its position, and sees the keys of its span although a causal
            mask would hide them. All other rules still hold. Without a causal mask, spans change
            nothing.
        tree: `[batch query]`, the tree of drafted tokens that the queries are: the index of the
            query from which each descends, or -1 if it follows the cached keys. The last keys are
            these queries, as with "bottom-right". A query sees, of these, itself and its ancestors,
            and stands one position after its parent.
        axes: the positions by which pairs turn if `rotary_scaling` has sections of several axes,
            such as of images and videos; None if they turn by the positions of tokens, which all
            else follows in any case.
        dilation: a query sees only keys whose position is a multiple of this number before or after
            its own; None if it sees the keys between, too. A window beside it still counts
            positions, not steps of the dilation.
        global_tokens: `[batch key]`, 1 for global tokens and 0 for others. A query is one if the
            key at its position is. The window, the dilation and the chunks hide no key from such a
            query, and no such key from any query. All other rules still hold.

    Raises:
        WrongShape: if an array does not fit the shape, or a number of a feature is out of range.
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
    weights_cotangent: Array | None = None
    log_sum_exp_cotangent: Array | None = None
    heads_alone: bool = False
    window: Window = NO_WINDOW
    soft_cap: float | None = None
    sinks: Array | None = None
    slopes: Array | None = None
    rotary: Rotary | None = None
    rotary_scaling: RotaryScaling | None = None
    norm: Norm | None = None
    query_lengths: IntArray | None = None
    key_lengths: IntArray | None = None
    segments: Segments | None = None
    positions: Positions | None = None
    chunk: int | None = None
    spans: IntArray | None = None
    tree: IntArray | None = None
    axes: RotaryAxes | None = None
    dilation: int | None = None
    global_tokens: IntArray | None = None

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
        if self.weights_cotangent is not None:
            check_shape("weights_cotangent", self.weights_cotangent.shape, self.shape.logits)
        if self.log_sum_exp_cotangent is not None:
            given, rows = self.log_sum_exp_cotangent.shape, self.shape.logits[:-1]
            check_shape("log_sum_exp_cotangent", given, rows)
        for name in ("mask", "attn_bias"):
            array = getattr(self, name)
            if array is not None:
                check_broadcastable(name, array.shape, self.shape.logits)
        if self.features:
            self._check_features()

    def _check_features(self) -> None:
        for name, array in self.feature_arrays().items():
            axes = ARRAYS[name]
            check_shape(name, array.shape, tuple(getattr(self.shape, axis) for axis in axes))
        for entry in self.entries:
            entry.check(self)

    @cached_property
    def entries(self) -> tuple[FeatureEntry, ...]:
        """The features that the problem has, in the order of the definition."""
        return tuple(entry for entry in IN_ORDER if entry.fields(self))

    @cached_property
    def features(self) -> tuple[str, ...]:
        """The names of the features that the problem has, in the order of the definition."""
        return tuple(entry.name for entry in self.entries)

    def feature_arrays(self) -> dict[str, Array | IntArray]:
        """Return the arrays of the features that the problem has: "sinks", "norm.query", ..."""
        found: dict[str, Array | IntArray] = {}
        for name in ARRAYS:
            holder: Any = self
            for part in name.split("."):
                holder = None if holder is None else getattr(holder, part)
            if holder is not None:
                found[name] = holder
        return found

    @property
    def position_of_queries(self) -> IntArray:
        """The position of each query, `[batch query]`, counted from 0 in its sequence.

        With the causal alignment "bottom-right", the last query of a sequence has the position of
        its last key. In a tree, a query stands one position after its parent. If the problem has
        `positions`, these take precedence.
        """
        size = (self.shape.batch, self.shape.query_length)
        return np.broadcast_to(self._positions()[0], size)

    @property
    def position_of_keys(self) -> IntArray:
        """The position of each key, `[batch key]`, counted from 0 in its sequence.

        If the problem has `positions`, these take precedence.
        """
        return np.broadcast_to(self._positions()[1], (self.shape.batch, self.shape.key_length))

    def trained(self) -> dict[str, Array | IntArray]:
        """Return the arrays of features that have gradients, by the name of the gradient."""
        named = {name for entry in self.entries for name in entry.trained}
        return {name: array for name, array in self.feature_arrays().items() if name in named}

    def _positions(self) -> tuple[IntArray, IntArray]:
        """Return the positions of queries and keys, with a batch axis of full size or 1."""
        if self.positions is not None:
            return self.positions.query, self.positions.key
        if self.tree is not None:
            return depths(self)
        shape, segments = self.shape, self.segments
        if segments is None:
            queries, keys = np.arange(shape.query_length)[None], np.arange(shape.key_length)[None]
        else:
            queries, keys = ranks(segments.query), ranks(segments.key)
        if self.causal != "bottom-right":
            return queries, keys
        if segments is not None:
            return queries + surplus_of_keys(segments, *self.used()), keys
        more = shape.key_length if self.key_lengths is None else self.key_lengths[:, None]
        less = shape.query_length if self.query_lengths is None else self.query_lengths[:, None]
        return queries + (more - less), keys

    def used(self) -> tuple[BoolArray, BoolArray]:
        """Return masks `[1 or batch, length]` of queries and of keys, True within the lengths."""
        queries = np.arange(self.shape.query_length)[None]
        keys = np.arange(self.shape.key_length)[None]
        return (
            queries < (np.inf if self.query_lengths is None else self.query_lengths[:, None]),
            keys < (np.inf if self.key_lengths is None else self.key_lengths[:, None]),
        )

    @property
    def format(self) -> DType:
        """The floating-point format of every number in the problem."""
        return dtype_of(self.dtype)

    @property
    def logit_scale(self) -> float:
        """The factor of the logits: `scale`, or the default scale if that is None."""
        return self.shape.default_scale if self.scale is None else self.scale

    @cached_property
    def allowed(self) -> BoolArray | None:
        """An array, True where a query may attend to a key; it broadcasts to the logits' shape.

        The mask, the causal mask, the window, the lengths and the segments are combined. The result
        is None if the problem has none of these. It is kept, as a search for causes asks for it a
        thousand times.
        """
        rules = [rule for _, rule in self.rules()]
        masks = rules if self.mask is None else [self.mask, *rules]
        return reduce(np.logical_and, masks) if masks else None

    def rules(self) -> Iterator[tuple[str, BoolArray]]:
        """Yield, for each rule besides the mask, its name and an array, True where it allows a key.

        The rules are "causal", "window", "query lengths", "key lengths", "segments", "chunk",
        "tree" and "dilation", as far as the problem has them. Spans belong to "causal", to which
        they add keys, and global tokens to "window", "dilation" and "chunk". Each array broadcasts
        to the shape of the logits.
        """
        for name in self.rule_names:
            yield name, self.rule(name)

    @property
    def rule_names(self) -> tuple[str, ...]:
        """The names of `rules`; no array, which may be too large, is computed for them."""
        own = (name for entry in self.entries for name in entry.rule_names(self))
        return (*([] if self.causal is None else ["causal"]), *own)

    def rule(self, name: str) -> BoolArray:
        """Return the array of one of `rules`."""
        if name == "causal":
            return self.relaxed(name, self.distances() <= 0)
        (entry,) = (entry for entry in self.entries if name in entry.rule_names(self))
        return self.relaxed(name, dict(entry.rules(self))[name])

    def relaxed(self, name: str, rule: BoolArray) -> BoolArray:
        """Return an array of the rule `name` with the pairs that features add to such a rule.

        Only spans and global tokens add any. Both arrays broadcast to the shape of the logits.
        """
        for entry in self.entries:
            rule = entry.relaxed(self, name, rule)
        return rule

    def distances(self) -> IntArray:
        """Return each key's position minus each query's, `[1 or batch, 1, query, key]`."""
        queries, keys = self._positions()
        return keys[:, None, None, :] - queries[:, None, :, None]

    @cached_property
    def sees(self) -> BoolArray:
        """An array `[batch heads query]`, True for queries that may attend to a key."""
        return np.any(self.allowed_in_full(), axis=-1)

    def allowed_in_full(self) -> BoolArray:
        """Return `allowed`, or True everywhere if that is None, as `[batch heads query key]`."""
        allowed = self.allowed
        return np.broadcast_to(True if allowed is None else allowed, self.shape.logits)

    def blocked_for(self, weights: Array) -> BoolArray:
        """Return an array shaped like `weights`, True where a query may not attend to a key.

        For weights averaged over heads, `[batch query key]`, it is True where no head may attend.
        """
        allowed = self.allowed_in_full()
        return ~(np.any(allowed, axis=1) if weights.ndim == 3 else allowed)

    def with_inputs(self, **inputs: Array) -> Problem:
        """Return a copy with these inputs, which also replace inputs that share their array.

        Raises:
            WrongShape: if a name is not one of `Shape.distinct_inputs`, or a shape is wrong.
        """
        unknown = set(inputs) - set(self.shape.distinct_inputs())
        if unknown:
            raise WrongShape(f"{sorted(unknown)} share another array here")
        given = {name: inputs.get(name, getattr(self, name)) for name in INPUT_AXES}
        return dataclasses.replace(self, **self.shape.spread(given))

    def with_weights(self, **weights: Any) -> Problem:
        """Return a copy of the problem in which the given weights are replaced."""
        return dataclasses.replace(self, weights=dataclasses.replace(self.weights, **weights))

    def digest(self) -> str:
        """Return a hash of what determines the answer to the problem, the same in every process."""
        flags = (self.shape, self.dtype, self.causal, self.scale)
        hashed = hashlib.blake2b(repr(flags).encode(), digest_size=16)
        arrays = {name: getattr(self, name) for name in ARRAY_NAMES}
        for name, weight in self.weights.named().items():
            # Without projections, the shape determines the other weights, which are large.
            if not self.heads_alone or name == "score":
                arrays[f"weights.{name}"] = weight
        arrays |= self.feature_arrays()
        for name, array in arrays.items():
            if array is not None:
                hashed.update(f"{name} {array.shape} {array.dtype}".encode())
                hashed.update(array.tobytes())
        if self.heads_alone:
            hashed.update(b"heads alone")
        if self.features:
            told = [
                value
                for entry in FEATURES
                if entry.hashed_if_absent or entry.fields(self)
                for value in entry.told(self).values()
            ]
            hashed.update(repr(tuple(told)).encode())
        return hashed.hexdigest()

    def replace(self, **changes: Any) -> Problem:
        """Return a copy of the problem in which the given fields are replaced."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, eq=False)
class Answer:
    """The results of an implementation, as float64.

    Attributes:
        output: `[batch query output_width]`.
        weights: attention weights `[batch heads query key]`, or `[batch query key]` if the
            implementation averages over heads; None if it does not return them.
        gradients: by canonical name: "query", "key", "value", "weights.query", ...,
            "attn_bias", "sinks", "norm.query", "norm.key". Inputs that share an array have one
            gradient, under the name of the first.
        dtypes: the native dtype of each returned array, by the array's name.
        statistics: those of each query's logits that the implementation returns, by their names in
            `conformance.definition.statistics`, `[batch heads query]` in base e. They are none of
            the arrays of `arrays`.
    """

    output: Array
    weights: Array | None = None
    gradients: Mapping[str, Array] = field(default_factory=lambda: MappingProxyType({}))
    dtypes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    statistics: Mapping[str, Array] = field(default_factory=lambda: MappingProxyType({}))

    def arrays(self) -> dict[str, Array]:
        """Return all arrays by name: "output", "weights", "gradient.query", ..."""
        arrays = {"output": self.output}
        if self.weights is not None:
            arrays["weights"] = self.weights
        return arrays | {f"gradient.{name}": array for name, array in self.gradients.items()}


def causal_mask(shape: Shape, alignment: Causal) -> BoolArray:
    """Return the causal mask `[1 1 query key]` of consecutive tokens, True where a key is seen."""
    offset = 0 if alignment == "top-left" else shape.key_length - shape.query_length
    triangle = np.tri(shape.query_length, shape.key_length, offset, dtype=np.bool_)
    return triangle[None, None]


def check_shape(name: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raise `WrongShape`, naming the array, unless both shapes are equal."""
    if got != wanted:
        raise WrongShape(f"{name} has shape {list(got)}, wanted {list(wanted)}")


def check_broadcastable(name: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raise `WrongShape` unless `got` has the axes of `wanted`, each of the same size or 1."""
    if len(got) != len(wanted) or any(g not in (1, w) for g, w in zip(got, wanted, strict=True)):
        raise WrongShape(
            f"{name} has shape {list(got)}; each axis of [batch heads query key] = {list(wanted)} "
            "must be there, in full or as 1"
        )
