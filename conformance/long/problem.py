"""Long problems: their masks, their classes of queries and keys, and how they are drawn.

Attention over up to a million tokens is compared with exact values, so a long problem must be easy
to solve without being easy to get wrong. There are three kinds:

- `draw` returns a `LongProblem`, whose queries and keys come from few classes. Half of the query
  classes attend to common keys, whose logits have a standard deviation of 2, so that every tile of
  keys counts and none dominates. The other half attend mainly to rare keys: to each logit,
  log(1/frequency) of the key's class is added (up to a constant), so that a class with few keys
  gets as much weight as one with many. Keys of the rarest class are placed where indices wrap. The
  weight of a sink is of the same order as that of all common keys together.
- `generic` returns queries, keys and values from N(0, 1). The cotangent is 0 except in sampled
  rows, so that the gradients of every key and value are sums over these rows alone. Only these
  problems may have a norm of heads; a rotation or ALiBi, with which keys of a class would differ by
  their positions; and a dilation, global tokens or bidirectional spans, with which the keys of a
  query are no interval, or one that other queries do not see.
- `retrieval` returns keys that consist of the binary digits of their positions, as ±1. A query is a
  large multiple of the key that it looks for. The weight of this key is then 1 and all others
  underflow to 0, so the output is exactly a value, and the gradient of a value that one query looks
  for is exactly a cotangent, in every format. An index that wraps leads to another value. Each
  key/value head has different digits flipped, so that keys of different heads differ.

Masks are one interval of visible keys per query, so that they need not become arrays. With causal
masks, windows, chunks, packed sequences and padding, query i sees the keys j with
first_i ≤ j < last_i, and neither end moves left as i grows. All checks rely on these two
properties: sums over the keys that a query sees are sums over intervals, and the queries that see a
key form an interval too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.definition.dtypes import Array, BoolArray, DType, dtype_of
from conformance.definition.features import ABSENT, NO_WINDOW, Norm, Rotary
from conformance.definition.problem import Causal, Segments, Shape, Window, check_shape
from conformance.definition.rotary import RotaryScaling
from conformance.errors import Unsupported, WrongShape

Classes = npt.NDArray[np.uint8]
Index = npt.NDArray[np.int64]
Stored = npt.NDArray[np.floating]
"""An array in float64 if the dtype of the problem is float64, or else in float32, which takes half
of the memory."""

WIDEST = 600.0
"""The largest difference allowed between two logits of a query, including a finite sink: then no
exponential underflows in float64."""

WRAPS = tuple(2**power for power in (7, 8, 12, 15, 16, 17, 18, 19, 20))
"""Positions at which an index, or its product with another size, may wrap."""

_SPREAD = 0x9E3779B1
"""An odd number whose multiples differ in many bits."""

_RANDOM = 64
"""The number of rows drawn at random, in addition to those at the edges of tiles."""

_CHUNK = 2**22
"""The most random numbers to draw and round at once."""


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """A mask as structure: a key is visible if every part that is given allows it.

    These are rules of `Problem` that leave an interval of keys to each query; `rules` returns them
    as its fields, and `intervals` the same without arrays of all pairs.

    Attributes:
        causal: key j is visible to query i iff j <= i ("top-left") or
            j <= i + key_length - query_length ("bottom-right"), within their packed sequence.
        window: how many keys before and after the query's position are visible; None for no limit.
            The position is aligned as `causal` says, or top-left without `causal`.
        members: the lengths of packed sequences, of queries and of keys. A query sees only the keys
            of its sequence; queries beyond the last sequence see nothing.
        key_lengths: the number of keys of each batch entry; keys beyond it are padding.
        chunk: the size of blocks of positions, counted from position 0 of a sequence: a query sees
            only keys in its own block.

    Raises:
        WrongShape: a number is negative, chunks have no position, or the two tuples of `members`
            have different lengths.
    """

    causal: Causal | None = None
    window: Window = NO_WINDOW
    members: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    key_lengths: tuple[int, ...] | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        sizes = [size for size in self.window if size is not None]
        sizes += [size for side in self.members or () for size in side]
        if any(size < 0 for size in [*sizes, *(self.key_lengths or ())]):
            raise WrongShape("windows, members and key lengths are not negative")
        if self.chunk is not None and self.chunk < 1:
            raise WrongShape(f"chunks have at least 1 position, not {self.chunk}")
        if self.members is not None and len(self.members[0]) != len(self.members[1]):
            raise WrongShape("there are as many members of queries as of keys")

    def positions(self, entry: int, queries: int, keys: int) -> tuple[Index, Index]:
        """Return the positions of the queries and keys of a batch entry in their packed sequences.

        As in `Problem`, the last query of a sequence has the position of its last key that is no
        padding if `causal` is "bottom-right".

        Raises:
            WrongShape: the packed sequences together are longer than the axis.
        """
        of_queries, of_keys, _ = self._sizes(queries, keys)
        at_query, at_key = (
            np.concatenate([np.arange(size) for size in (*sizes, length - sum(sizes))])
            for sizes, length in ((of_queries, queries), (of_keys, keys))
        )
        if self.causal == "bottom-right":
            used = of_keys
            if self.key_lengths is not None:
                starts = np.cumsum(of_keys) - of_keys
                used = np.clip(self.key_lengths[entry] - starts, 0, of_keys)
            more = np.repeat(used - of_queries, of_queries)
            at_query[: len(more)] += more
        return at_query, at_key

    def _sizes(self, queries: int, keys: int) -> tuple[Index, Index, Index]:
        """Return the lengths of the packed sequences, and the sequence of each query in them."""
        of_queries, of_keys = self.members or ((queries,), (keys,))
        sizes = _sizes(of_queries, queries)
        return sizes, _sizes(of_keys, keys), np.repeat(np.arange(len(sizes)), sizes)

    def intervals(self, entry: int, queries: int, keys: int) -> tuple[Index, Index]:
        """Return the interval of keys that each query of a batch entry sees: `first` and `last`.

        Both are `[queries]` and sorted. A query sees the keys from `first` to `last` - 1, and no
        keys if the two are equal.

        Raises:
            WrongShape: the packed sequences together are longer than the axis.
        """
        _, key_sizes, member = self._sizes(queries, keys)
        sizes, starts = key_sizes[member], (np.cumsum(key_sizes) - key_sizes)[member]
        at = self.positions(entry, queries, keys)[0][: len(sizes)]
        first, last = np.zeros_like(sizes), sizes
        before, after = self.window
        if self.causal is not None:
            after = 0
        if after is not None:
            last = np.clip(at + after + 1, 0, sizes)
        if before is not None:
            first = np.clip(at - before, 0, sizes)
        if self.chunk is not None:
            begin = at // self.chunk * self.chunk
            first = np.maximum(first, np.clip(begin, 0, sizes))
            last = np.minimum(last, np.clip(begin + self.chunk, 0, sizes))
        slack = np.full(queries - len(sizes), key_sizes.sum(), np.int64)
        first = np.concatenate([starts + first, slack])
        last = np.concatenate([starts + last, slack])
        if self.key_lengths is not None:
            last = np.minimum(last, self.key_lengths[entry])
        return first, np.maximum(last, first)

    def rules(self, batch: int, queries: int, keys: int) -> dict[str, Any]:
        """Return the same rules as fields of `Problem`, for queries and keys of these numbers."""
        lengths = None if self.key_lengths is None else np.array(self.key_lengths)
        fields: dict[str, Any] = {"causal": self.causal, "window": self.window}
        fields |= {"key_lengths": lengths, "chunk": self.chunk}
        if self.members is None:
            return fields
        ids = []
        # Tokens beyond the last sequence are in one that has no token of the other side.
        for none, (sizes, length) in enumerate(zip(self.members, (queries, keys), strict=True), 1):
            own = np.repeat(np.arange(len(sizes)), _sizes(sizes, length))
            padded = np.pad(own, (0, length - len(own)), constant_values=-none)
            ids.append(np.tile(padded, (batch, 1)))
        return fields | {"segments": Segments(query=ids[0], key=ids[1])}

    def dense(self, batch: int, queries: int, keys: int) -> BoolArray:
        """Return the mask as an array `[batch 1 query key]`, True where a query sees a key."""
        columns = np.arange(keys)
        both = [self.intervals(entry, queries, keys) for entry in range(batch)]
        visible = [(columns >= first[:, None]) & (columns < last[:, None]) for first, last in both]
        return np.stack(visible)[:, None]


EVERYTHING = Visibility()
"""No mask: every query sees every key."""


def _sizes(members: Sequence[int], length: int) -> Index:
    sizes = np.asarray(members, np.int64)
    if sizes.sum() > length:
        raise WrongShape(f"members of {sizes.sum():,} tokens do not fit into {length:,}")
    return sizes


@dataclass(frozen=True, eq=False, kw_only=True)
class LongProblem:
    """A long attention problem, whose logits form a table over classes of queries and keys.

    All numbers in its arrays are exactly representable in `dtype`.

    Attributes:
        queries: prototypes `[heads query_classes head]`.
        keys: prototypes `[kv_heads key_classes head]`.
        query_class: `[batch heads query]`; query i of head h is `queries[h, query_class[b, h, i]]`.
        key_class: the same for keys, `[batch kv_heads key]`.
        value: `[batch kv_heads key value_head]`.
        cotangent: the cotangent of the output, `[batch heads query value_head]`.
        scale: the factor of the logits; None for 1/√head.
        sees: which keys a query may attend to.
        sinks: a logit per head that enters only the sum of the softmax, `[heads]`; None for none.
        soft_cap: the cap of the logits, applied as cap · tanh(logits / cap); None for no cap.

    Raises:
        WrongShape: sizes do not fit together, or logits of a query differ by more than `WIDEST`.
    """

    dtype: str
    queries: Array
    keys: Array
    query_class: Classes
    key_class: Classes
    value: Stored
    cotangent: Stored
    scale: float | None = None
    sees: Visibility = EVERYTHING
    sinks: Array | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        batch, heads, length, kv_heads, keys = self.sizes
        head, value_head = self.queries.shape[-1], self.value.shape[-1]
        if kv_heads == 0 or heads % kv_heads:
            raise WrongShape(f"{heads} heads cannot share {kv_heads} key/value heads")
        check_shape("queries", self.queries.shape, (heads, self.queries.shape[1], head))
        check_shape("keys", self.keys.shape, (kv_heads, self.keys.shape[1], head))
        check_shape("value", self.value.shape, (batch, kv_heads, keys, value_head))
        check_shape("cotangent", self.cotangent.shape, (batch, heads, length, value_head))
        if self.sinks is not None:
            check_shape("sinks", self.sinks.shape, (heads,))
        for head in range(heads):
            logits = self.logits(head)
            if self.sinks is not None and np.isfinite(self.sinks[head]):
                logits = np.insert(logits, 0, self.sinks[head], axis=1)
            if logits.size and float(np.ptp(logits, axis=1).max()) > WIDEST:
                raise WrongShape(f"logits of one query differ by more than {WIDEST:g}")

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """The batch, heads, query length, key/value heads and key length, in this order."""
        return *self.query_class.shape, *self.key_class.shape[1:]  # type: ignore[return-value]

    @property
    def group(self) -> int:
        """The number of query heads per key/value head."""
        return self.query_class.shape[1] // self.key_class.shape[1]

    @property
    def factor(self) -> float:
        """The factor of the logits: `scale`, or 1/√head if that is None."""
        return 1.0 / math.sqrt(self.queries.shape[-1]) if self.scale is None else self.scale

    @property
    def format(self) -> DType:
        """The floating-point format of every number in the problem's arrays."""
        return dtype_of(self.dtype)

    def uncapped(self, head: int) -> Array:
        """Return the logits of a head before the cap, `[query_classes key_classes]`."""
        return self.factor * self.queries[head] @ self.keys[head // self.group].T

    def logits(self, head: int) -> Array:
        """Return the logits of a head after any cap, `[query_classes key_classes]`."""
        logits = self.uncapped(head)
        if self.soft_cap is None:
            return logits
        return self.soft_cap * np.tanh(logits / self.soft_cap)

    def slope(self, head: int) -> Array:
        """Return the derivative of the cap at each logit, `[query_classes key_classes]`.

        The derivative is 1 without a cap.
        """
        if self.soft_cap is None:
            return np.ones((self.queries.shape[1], self.keys.shape[1]))
        return 1.0 - np.tanh(self.uncapped(head) / self.soft_cap) ** 2


@dataclass(frozen=True, eq=False)
class Heads:
    """The inputs of an implementation: arrays `[batch heads length head]`, and masks as structure.

    Arrays are float64 if `dtype` is, and float32 otherwise; all their numbers are exactly
    representable in `dtype`. `cotangent` is that of the output. `sinks` `[heads]` are logits that
    enter only the sum of the softmax; None for none. `soft_cap` is the cap of the logits; None for
    no cap. `sees` says which keys each query sees. `rotary` is the rotation of queries and keys by
    `sees.positions`, whose frequencies are scaled as `rotary_scaling` says; None for none. `slopes`
    `[heads]`, `dilation`, `global_tokens` and `spans` `[batch key]`, and `norm` are those of
    `Problem`; dilation, global tokens and spans change which keys each query sees.
    """

    dtype: str
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    cotangent: np.ndarray
    scale: float
    sees: Visibility
    sinks: np.ndarray | None = None
    soft_cap: float | None = None
    rotary: Rotary | None = None
    rotary_scaling: RotaryScaling | None = None
    slopes: np.ndarray | None = None
    dilation: int | None = None
    global_tokens: np.ndarray | None = None
    norm: Norm | None = None
    spans: np.ndarray | None = None

    @property
    def features(self) -> dict[str, Any]:
        """The features, as fields of `Problem`."""
        held = {name: getattr(self, name, None) for name in ABSENT}
        return {name: value for name, value in held.items() if value is not None}


def heads_of(problem: LongProblem) -> Heads:
    """Return the inputs of a problem as arrays."""
    wide, (_, heads, _, kv_heads, _) = problem.value.dtype, problem.sizes
    return Heads(
        problem.dtype,
        problem.queries.astype(wide)[np.arange(heads)[:, None], problem.query_class],
        problem.keys.astype(wide)[np.arange(kv_heads)[:, None], problem.key_class],
        problem.value,
        problem.cotangent,
        problem.factor,
        problem.sees,
        None if problem.sinks is None else problem.sinks.astype(wide),
        problem.soft_cap,
    )


def no_inputs(shape: Shape) -> dict[str, Array]:
    """Return inputs and a cotangent of zeros, which take no memory, for problems of rules alone."""
    sizes = shape.input_shapes()
    sizes["cotangent"] = (shape.batch, shape.query_length, shape.output_width)
    return {name: np.broadcast_to(0.0, size) for name, size in sizes.items()}


def wide_type(dtype: str) -> Any:
    """Return the type of the NumPy arrays that hold numbers of a dtype."""
    return np.float64 if dtype == "float64" else np.float32


def draw(
    dtype: str,
    queries: int,
    keys: int,
    *,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int = 1,
    head_size: int = 64,
    value_head_size: int = 0,
    classes: int = 32,
    sees: Visibility = EVERYTHING,
    scale: float | None = None,
    seed: int = 0,
    sinks: bool = False,
    soft_cap: float | None = None,
) -> LongProblem:
    """Return a problem over classes of queries and keys, as described at the top of this module.

    Args:
        dtype: the dtype in which all numbers are exactly representable.
        queries, keys: the lengths.
        batch, heads, kv_heads, head_size: the other sizes.
        value_head_size: the head size of the values; 0 for `head_size`.
        classes: the number of classes of queries, and of keys, at most 256.
        sees: which keys each query sees.
        scale: the factor of the logits; None for 1/√head_size.
        seed: the seed of all numbers.
        sinks: whether there is a sink in each head.
        soft_cap: the cap of the logits; None for no cap.
    """
    random, stored = np.random.Generator(np.random.SFC64(seed)), dtype_of(dtype)
    value_head_size = value_head_size or head_size
    frequency = _frequencies(classes, keys)
    query = 2.0 * random.standard_normal((heads, classes, head_size))
    key = random.standard_normal((kv_heads, classes, head_size))
    factor = 1 / math.sqrt(head_size) if scale is None else scale
    if head_size > 1:
        query[..., 0], key[..., 0] = 0.0, np.log(frequency.max() / frequency)
        query[:, 1::2, 0] = 1.0 / factor
    of_sinks = None
    if sinks:
        spread = np.random.default_rng(seed).standard_normal(heads)
        of_sinks = stored.round(math.log(max(keys, 2)) + spread)
    return LongProblem(
        dtype=dtype,
        queries=stored.round(query),
        keys=stored.round(key),
        query_class=random.integers(classes, size=(batch, heads, queries), dtype=np.uint8),
        key_class=_key_classes(random, frequency, (batch, kv_heads, keys)),
        value=_normal(random, (batch, kv_heads, keys, value_head_size), stored),
        cotangent=_normal(random, (batch, heads, queries, value_head_size), stored),
        scale=scale,
        sees=sees,
        sinks=of_sinks,
        soft_cap=soft_cap,
    )


def _frequencies(classes: int, keys: int) -> np.ndarray:
    """Return the probability of each class of keys.

    Half of the classes, rounded up, are equally common. The others are rarer, unless there are only
    few keys, and each of them is at most as common as the one before it.
    """
    common = classes - classes // 2
    rarest = math.log2(max(keys, 2) / 4)
    steps = np.linspace(min(math.log2(common) + 1, rarest), rarest, classes - common)
    frequency = np.concatenate([np.full(common, 1 / common), 2.0**-steps])
    return frequency / frequency.sum()


def _key_classes(
    random: np.random.Generator, frequency: np.ndarray, shape: tuple[int, int, int]
) -> Classes:
    """Return random classes of keys, `[batch kv_heads key]`, with the rarest at certain positions.

    The rarest class is the last. The positions are those in `WRAPS`, the ones just before them, and
    both ends.
    """
    drawn = np.searchsorted(np.cumsum(frequency)[:-1], random.random(shape, dtype=np.float32))
    found = drawn.astype(np.uint8)
    keys = shape[-1]
    places = [0, keys - 1, *(place + side for place in WRAPS for side in (-1, 0))]
    found[..., [place for place in places if 0 <= place < keys]] = len(frequency) - 1
    return found


def _normal(random: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Stored:
    """Return numbers from N(0, 1) rounded to `dtype`."""
    wide = wide_type(dtype.name)
    numbers: Stored = np.empty(math.prod(shape), wide)
    for start in range(0, numbers.size, _CHUNK):
        part: Any = numbers[start : start + _CHUNK]
        random.standard_normal(out=part, dtype=wide)
        if dtype.name == "float16":
            part[:] = part.astype(np.float16)
        elif dtype.name == "bfloat16":
            # Round to nearest, ties to even; `DType.round` takes ten times as long here.
            bits = part.view(np.uint32)
            bits += 0x7FFF + ((bits >> 16) & 1)
            bits &= 0xFFFF0000
    return numbers.reshape(shape)


def sampled(queries: int, tile: int, most: int = 256, seed: int = 0) -> np.ndarray:
    """Return the rows to sample, sorted: those at edges of tiles, and random ones.

    If there are too many edges for `most` rows, take an evenly spread selection of them. `tile` is
    the number of rows in a tile; if it is `UNKNOWN` (0), 64 is assumed.
    """
    edges = np.arange(0, queries, tile or 64)
    edges = np.unique(np.concatenate([edges, np.maximum(edges - 1, 0), [queries - 1]]))
    room = max(2, most - _RANDOM)
    if len(edges) > room:
        edges = edges[np.linspace(0, len(edges) - 1, room).astype(int)]
    random = np.random.default_rng(seed).integers(queries, size=_RANDOM)
    return np.unique(np.concatenate([edges, random]))


def generic(
    dtype: str,
    queries: int,
    keys: int,
    chosen: np.ndarray,
    *,
    heads: int = 1,
    kv_heads: int = 1,
    head_size: int = 64,
    sees: Visibility = EVERYTHING,
    seed: int = 0,
    **features: Any,
) -> Heads:
    """Return inputs of one batch entry from N(0, 1), with a cotangent of 0 except in chosen rows.

    `chosen` are the indices of these rows. Queries and keys are those before norm and rotation.
    `features` are the fields of `Heads` from `rotary` on.
    """
    random, stored, wide = np.random.default_rng(seed), dtype_of(dtype), wide_type(dtype)

    def rounded(*sizes: int) -> np.ndarray:
        return stored.round(random.standard_normal(sizes)).astype(wide)

    cotangent = np.zeros((1, heads, queries, head_size), wide)
    cotangent[:, :, chosen] = rounded(1, heads, len(chosen), head_size)
    return Heads(
        dtype,
        rounded(1, heads, queries, head_size),
        rounded(1, kv_heads, keys, head_size),
        rounded(1, kv_heads, keys, head_size),
        cotangent,
        1 / math.sqrt(head_size),
        sees,
        **features,
    )


@dataclass(frozen=True, eq=False)
class Retrieval:
    """A retrieval problem: its inputs, and the positions that its queries look for.

    `sought` is the position of the key that each query looks for, `[batch heads query]`.
    """

    heads: Heads
    sought: np.ndarray


def retrieval(
    dtype: str,
    queries: int,
    keys: int,
    *,
    heads: int = 1,
    kv_heads: int = 1,
    head_size: int = 64,
    causal: bool = False,
    seed: int = 0,
) -> Retrieval:
    """Return a retrieval problem of one batch entry, whose queries look for random positions.

    The last query looks for the last key that it can see and, if there are several queries, the
    first looks for the first key. `causal` adds a top-left causal mask.

    Raises:
        Unsupported: the head is too small to hold a position in binary.
    """
    digits = max(1, math.ceil(math.log2(max(2, keys))))
    if head_size < digits:
        raise Unsupported(f"a head of {head_size} cannot hold positions up to {keys:,}")
    random, stored, wide = np.random.default_rng(seed), dtype_of(dtype), wide_type(dtype)
    # exp(−150) is 0 in float32, and exp(−800) is 0 in float64.
    margin = 800.0 if dtype == "float64" else 150.0
    # Digits are repeated to fill the head; a mismatch costs at least twice the repeats.
    mismatch = 2 * (head_size // digits) / math.sqrt(head_size)
    factor = 2.0 ** math.ceil(math.log2(margin / mismatch))
    sought = random.permuted(np.broadcast_to(np.arange(keys), (heads, keys)), axis=1)
    sought = np.resize(sought, (1, heads, queries)) if queries != keys else sought[None]
    if causal:
        reach = np.minimum(np.arange(queries), keys - 1)
        sought = (random.random((1, heads, queries)) * (reach + 1)).astype(np.int64)
    sought[..., 0], sought[..., -1] = 0, min(queries if causal else keys, keys) - 1
    flips = np.arange(kv_heads) * _SPREAD % 2**digits
    of_keys = np.empty((1, kv_heads, keys, head_size), wide)
    for head, flip in enumerate(flips):
        of_keys[0, head] = _binary(np.arange(keys) ^ flip, digits, head_size)
    codes = sought ^ np.repeat(flips, heads // kv_heads)[:, None]
    given = Heads(
        dtype,
        wide(factor) * _binary(codes, digits, head_size).astype(wide),
        of_keys,
        _normal(random, (1, kv_heads, keys, head_size), stored),
        _normal(random, (1, heads, queries, head_size), stored),
        1 / math.sqrt(head_size),
        Visibility(causal="top-left") if causal else EVERYTHING,
    )
    return Retrieval(given, sought)


def _binary(positions: np.ndarray, digits: int, size: int) -> np.ndarray:
    """Return the binary digits of each position as ±1 `[... size]`, repeated to fill the size."""
    bits = (positions[..., None] >> (np.arange(size) % digits)) & 1
    return (2 * bits - 1).astype(np.int8)
