"""A tiled attention in NumPy, forward and backward, in stages, each of which a mutant replaces.

It works as kernels do: tiles of queries and of keys, an online softmax, a list of work items dealt
to workers, a split of the keys where queries are few, and a backward pass that goes over the tiles
of keys, adds to the gradient of queries, and recomputes the weights from the log-normaliser.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.adapter.base import Adapter, Call
from conformance.adapter.features import (
    Alibi,
    Chunk,
    HeadNorm,
    Lengths,
    RotaryConfig,
    Sinks,
    SoftCap,
    Spans,
    Window,
)
from conformance.definition.dtypes import dtype_of
from conformance.definition.problem import Answer, Problem
from conformance.definition.rotary import RotaryScaling
from conformance.errors import Unsupported
from conformance.long.problem import Heads

Array = np.ndarray
F = np.float32


@dataclass(frozen=True, eq=False)
class Masked(Heads):
    """Heads with a mask and a bias as arrays, which broadcast to `[batch heads query key]`."""

    mask: Array | None = None
    bias: Array | None = None


class Tiled:
    """The attention; every method is a stage that a mutant may replace.

    Attributes:
        rows, columns: queries and keys of a tile.
        few: up to how many queries the keys are split, into `splits` parts.
        workers: how many workers share the tiles of queries.
    """

    rows, columns, few, splits, workers = 64, 128, 16, 7, 5

    def __init__(self, heads: Heads) -> None:
        self.given = heads
        self.wide: Any = np.float64 if heads.dtype == "float64" else np.float32
        self.format = dtype_of(heads.dtype)
        self.batch, self.heads, self.queries, _ = heads.query.shape
        self.kv_heads, self.keys = heads.key.shape[1:3]
        self.scale = self.wide(heads.scale)
        self.mask, self.bias = getattr(heads, "mask", None), getattr(heads, "bias", None)
        full = (self.batch, self.heads, self.queries, self.keys)
        if self.mask is not None:
            self.mask = np.broadcast_to(self.mask, full)
        if self.bias is not None:
            self.bias = np.broadcast_to(self.bias, full)
        self.entry = self.head = 0
        self.split, self.pair, self.phase = 0, (0, 0), "forward"
        self.of_queries, self.of_keys = self.query_tiles(), self.key_tiles()
        self.of_gains = {n: np.zeros(heads.query.shape[3], self.wide) for n in ("query", "key")}
        self.of_tables: dict[tuple[str, tuple[int, int]], Any] = {}

    def held(self, array: Array) -> Array:
        """As it is stored in the dtype of the tensors."""
        if self.format.name in ("float32", "float64"):
            return array.astype(self.wide)
        if self.format.name == "float16":
            return array.astype(np.float16).astype(F)
        bits = np.ascontiguousarray(array, F).view(np.uint32)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return even.view(F)

    # What a tile is.

    def query_tiles(self) -> list[tuple[int, int]]:
        return [(i, min(i + self.rows, self.queries)) for i in range(0, self.queries, self.rows)]

    def key_tiles(self) -> list[tuple[int, int]]:
        return [(j, min(j + self.columns, self.keys)) for j in range(0, self.keys, self.columns)]

    def items(self, kind: str) -> list[tuple[int, ...]]:
        """Batch entry and head, and of the forward pass a tile of queries and a split of the keys,
        of the backward pass a tile of keys."""
        parts = self.splits if self.queries <= self.few else 1
        inner = (len(self.of_queries), parts) if kind == "forward" else (len(self.of_keys),)
        return [*np.ndindex(self.batch, self.heads, *inner)]

    def work(self, kind: str) -> Iterator[tuple[int, ...]]:
        """The items, worker by worker."""
        items = self.items(kind)
        for worker in range(self.workers):
            yield from items[worker :: self.workers]

    def kv_head(self) -> int:
        return self.head // (self.heads // self.kv_heads)

    def address(self, index: Array) -> Array:
        """Where row `index` of a head is read."""
        return index

    def address_of_queries(self, index: Array) -> Array:
        return index

    def row_of(self, name: str, index: Array) -> Array:
        """Where rows of a head are in `[batch × heads × length head]`.

        Names are those of inputs, "output", and "d_query" and so on.
        """
        if name.removeprefix("d_") in ("key", "value"):
            return (self.entry * self.kv_heads + self.kv_head()) * self.keys + self.address(index)
        return (self.entry * self.heads + self.head) * self.queries + index

    def load(self, name: str, span: tuple[int, int]) -> Array:
        """A tile of a head of query, key, value or cotangent."""
        array, index = getattr(self.given, name), np.arange(*span)
        if name not in ("key", "value"):
            index = self.address_of_queries(index)
        rows = array.reshape(-1, array.shape[-1])[self.row_of(name, index)]
        if name in ("query", "key"):
            return self.prepared(name, span, rows)
        return rows

    def prepared(self, name: str, span: tuple[int, int], rows: Array) -> Array:
        """A tile of queries or keys after norm and rotation."""
        if self.given.norm is not None:
            rows = self.held(self.normed(name, rows))
        if self.given.rotary is not None:
            rows = self.held(self.turned(name, span, rows, 1))
        return rows

    # Norm.

    def epsilon(self) -> Any:
        return self.wide(self.given.norm.epsilon)

    def root(self, rows: Array) -> Array:
        """The root of the mean square of each token, `[token 1]`."""
        return np.sqrt((rows**2).mean(axis=1, keepdims=True) + self.epsilon())

    def gain_of_norm(self, name: str) -> Array:
        return getattr(self.given.norm, name).astype(self.wide)

    def normed(self, name: str, rows: Array) -> Array:
        """A tile of queries or keys, each divided by its root, times the gain."""
        return rows / self.root(rows) * self.gain_of_norm(name)

    def before_norm(self, name: str, span: tuple[int, int], gradient: Array) -> Array:
        """The gradient of a tile before its norm; that of the gain is added up on the way."""
        array = getattr(self.given, name)
        rows = array.reshape(-1, array.shape[-1])[self.row_of(name, np.arange(*span))]
        root = self.root(rows)
        quotients = rows / root
        self.of_gains[name] = self.for_gain(self.of_gains[name], gradient, quotients)
        return self.across(gradient * self.gain_of_norm(name), quotients) / root

    def for_gain(self, total: Array, gradient: Array, quotients: Array) -> Array:
        return total + (gradient * quotients).sum(axis=0)

    def across(self, gradient: Array, quotients: Array) -> Array:
        """The gradient without its part along the quotients."""
        return gradient - quotients * (gradient * quotients).mean(axis=1, keepdims=True)

    # Rotation.

    def rotary_positions(self, name: str, span: tuple[int, int]) -> Array:
        """The positions of a tile of queries or keys."""
        return self.aligned(span) if name == "query" else self.within(1, span)

    def frequencies(self) -> Array:
        rotary, scaling = self.given.rotary, self.scaling()
        if scaling is None:
            return rotary.base ** (-np.arange(0.0, rotary.size, 2) / rotary.size)
        return scaling.scaled(rotary.size, rotary.base, self.keys).frequencies()

    def scaling(self) -> RotaryScaling | None:
        return self.given.rotary_scaling

    def gain(self, name: str) -> Any:
        """The attention factor of the cosines and sines for queries or keys."""
        return self.wide(1.0 if self.given.rotary_scaling is None else self.scaling().gain)

    def angles(self, positions: Array) -> Array:
        return positions.astype(self.wide)[:, None] * self.frequencies().astype(self.wide)

    def tables(self, name: str, span: tuple[int, int]) -> tuple[Array, Array]:
        """Cosines and sines `[token pair]` of a tile, computed once for all heads."""
        if (name, span) not in self.of_tables:
            angles = self.angles(self.rotary_positions(name, span))
            self.of_tables[name, span] = tuple(
                self.table(f(angles)).astype(self.wide) for f in (np.cos, np.sin)
            )
        return self.of_tables[name, span]

    def table(self, values: Array) -> Array:
        """As the table of cosines or sines is stored."""
        return values

    def places(self) -> tuple[slice, slice]:
        return self.given.rotary.places()

    def turned(self, name: str, span: tuple[int, int], rows: Array, sign: int) -> Array:
        """A tile of queries or keys, rotated by its positions, or back if the sign is −1."""
        cosine, sine = (self.gain(name) * table for table in self.tables(name, span))
        one, other = self.places()
        found = rows.copy()
        found[:, one] = rows[:, one] * cosine - sign * rows[:, other] * sine
        found[:, other] = rows[:, other] * cosine + sign * rows[:, one] * sine
        return found

    def back(self, name: str, span: tuple[int, int], gradient: Array) -> Array:
        """The gradient of a tile of queries or keys before norm and rotation."""
        gradient = self.turned_back(name, span, gradient)
        if self.given.norm is not None:
            gradient = self.before_norm(name, span, gradient)
        return gradient

    def turned_back(self, name: str, span: tuple[int, int], gradient: Array) -> Array:
        if self.given.rotary is None:
            return gradient
        return self.turned(name, span, gradient, -1)

    # Masks.

    def positions(self, span: tuple[int, int]) -> Array:
        return np.arange(*span)

    def alignment(self) -> int:
        return self.length() - self.queries if self.given.sees.causal == "bottom-right" else 0

    def member(self, side: int, span: tuple[int, int]) -> Array:
        """The packed member of each token, and −1 − side beyond the last."""
        members = self.given.sees.members
        assert members is not None
        ends = np.cumsum(members[side])
        at = np.searchsorted(ends, np.arange(*span), side="right")
        return np.where(at < len(ends), at, -1 - side)

    def within(self, side: int, span: tuple[int, int]) -> Array:
        """The position of each token within its member."""
        members = self.given.sees.members
        positions = self.positions(span)
        if members is None:
            return positions
        starts = np.concatenate([[0], np.cumsum(members[side])])
        return positions - starts[np.maximum(self.member(side, span), 0)]

    def aligned(self, span: tuple[int, int]) -> Array:
        """The position of each query among the keys of its member."""
        members = self.given.sees.members
        at = self.within(0, span)
        if members is None:
            return at + self.alignment()
        if self.given.sees.causal != "bottom-right":
            return at
        starts = np.cumsum(members[1]) - members[1]
        more = np.clip(self.length() - starts, 0, members[1]) - members[0]
        return at + np.append(more, 0)[self.member(0, span)]

    def length(self) -> int:
        lengths = self.given.sees.key_lengths
        return self.keys if lengths is None else lengths[self.entry]

    def filled(self) -> int:
        """How many tiles of keys hold a key within the length."""
        return min(len(self.of_keys), -(-self.length() // self.columns))

    def before(self) -> int | None:
        return self.given.sees.window[0]

    def after(self) -> int | None:
        return 0 if self.given.sees.causal else self.given.sees.window[1]

    def visible(self, rows: tuple[int, int], columns: tuple[int, int]) -> Array:
        """The bits of a tile of the mask."""
        seen = np.zeros((rows[1] - rows[0], 1), bool) | (np.arange(*columns) < self.length())
        if self.mask is not None:
            seen &= self.bits(rows, columns)
        distance = self.within(1, columns) - self.aligned(rows)[:, None]
        if self.before() is not None:
            seen &= distance >= -self.before()
        if self.after() is not None:
            late = distance > self.after()
            if self.given.spans is not None:
                late &= ~self.in_span(rows, columns)
            seen &= ~late
        if self.chunk() is not None:
            seen &= self.block(0, rows)[:, None] == self.block(1, columns)
        if self.given.dilation is not None:
            seen &= self.in_step(rows, columns, distance)
        if self.given.global_tokens is not None:
            seen |= self.of_global(rows, columns) & self.before_own(distance)
        if self.given.sees.members is not None:
            seen &= self.member(0, rows)[:, None] == self.member(1, columns)
        return seen

    def in_span(self, rows: tuple[int, int], columns: tuple[int, int]) -> Array:
        """Where the query and the key are in the same bidirectional span."""
        ids = self.span_ids("key", columns)
        return (self.span_ids("query", rows)[:, None] == ids) & (ids > 0)

    def span_ids(self, name: str, span: tuple[int, int]) -> Array:
        """The id of the bidirectional span of each query or key of a tile, 0 for none."""
        at = self.aligned(span) if name == "query" else np.arange(*span)
        return np.where(at < 0, 0, self.given.spans[self.entry][at])

    def end_of_spans(self, rows: tuple[int, int]) -> int:
        """Where the last key is, plus 1, of the spans of a tile of queries; 0 if there is none."""
        ids = self.span_ids("query", rows)
        inside = np.isin(self.given.spans[self.entry], ids[ids > 0])
        return int(np.flatnonzero(inside).max(initial=-1)) + 1

    def in_step(self, rows: tuple[int, int], columns: tuple[int, int], distance: Array) -> Array:
        """Where the distance is a multiple of the dilation."""
        return distance % self.given.dilation == 0

    def of_global(self, rows: tuple[int, int], columns: tuple[int, int]) -> Array:
        """Where the query or the key is a global token."""
        return self.is_global("query", rows)[:, None] | self.is_global("key", columns)

    def is_global(self, name: str, span: tuple[int, int]) -> Array:
        at = self.aligned(span) if name == "query" else np.arange(*span)
        return self.given.global_tokens[self.entry][at] != 0

    def before_own(self, distance: Array) -> Array:
        """Where the causal mask lets a query see a key, if there is one."""
        return distance <= (0 if self.given.sees.causal else self.keys)

    def chunk(self) -> int | None:
        return self.given.sees.chunk

    def block(self, side: int, span: tuple[int, int]) -> Array:
        """The chunk to which the position of each query or key belongs."""
        return (self.within(1, span) if side else self.aligned(span)) // self.chunk()

    def bits(self, rows: tuple[int, int], columns: tuple[int, int]) -> Array:
        """What the mask has for a tile."""
        return self.mask[self.entry, self.head, slice(*rows), slice(*columns)]

    def biases(self, rows: tuple[int, int], columns: tuple[int, int]) -> Array:
        """What the bias has for a tile."""
        return self.bias[self.entry, self.head, slice(*rows), slice(*columns)]

    def is_blocked(self, tile: int, column: int) -> bool:
        """Whether the mask blocks all of a tile, so that it need not be visited."""
        if self.mask is None:
            return False
        return not self.bits(self.of_queries[tile], self.of_keys[column]).any()

    def first_tile(self, rows: tuple[int, int]) -> int:
        """The first tile of keys that a tile of queries visits."""
        if self.given.sees.members is not None or self.given.global_tokens is not None:
            return 0
        first = rows[0] + self.alignment()
        begins = [0]
        if self.before() is not None:
            begins.append(first - self.before())
        if self.chunk() is not None:
            begins.append(self.chunk_begins(first))
        return max(begins) // self.columns

    def chunk_begins(self, position: int) -> int:
        """The first position of the chunk of a position."""
        return position // self.chunk() * self.chunk()

    def last_tile(self, rows: tuple[int, int]) -> int:
        """The tile of keys after the last that a tile of queries visits."""
        last = self.filled()
        if self.after() is None or self.given.sees.members is not None:
            return last
        if self.given.global_tokens is not None and not self.given.sees.causal:
            return last
        end = rows[1] - 1 + self.alignment() + self.after() + 1
        if self.given.spans is not None:
            end = max(end, self.end_of_spans(rows))
        return min(last, max(0, -(-end // self.columns)))

    def visits(self, tile: int) -> list[int]:
        """The tiles of keys that a tile of queries visits, in order; the same in all passes."""
        rows = self.of_queries[tile]
        every = range(self.first_tile(rows), self.last_tile(rows))
        return [column for column in every if not self.is_blocked(tile, column)]

    def visits_forward(self, tile: int) -> list[int]:
        return self.visits(tile)

    def visits_for_query(self, tile: int) -> list[int]:
        return self.visits(tile)

    def visits_for_key(self, tile: int) -> list[int]:
        return self.visits(tile)

    # Forward.

    def logits(self, query: Array, key: Array) -> Array:
        return query @ key.T * self.scale

    def capped(self, logits: Array) -> Array:
        cap = self.given.soft_cap
        return logits if cap is None else self.wide(cap) * np.tanh(logits / self.wide(cap))

    def slope(self, tile: int, column: int) -> Array | float:
        """The derivative of the cap in a tile."""
        if self.given.soft_cap is None:
            return 1.0
        rows, columns = self.of_queries[tile], self.of_keys[column]
        logits = self.logits(self.load("query", rows), self.load("key", columns))
        return 1 - np.tanh(logits / self.wide(self.given.soft_cap)) ** 2

    def sink(self) -> Any:
        """The logit of the sink of the present head, −∞ if there is none."""
        return self.wide(-np.inf if self.given.sinks is None else self.given.sinks[self.head])

    def with_sink(self, context: Array, log_total: Array) -> tuple[Array, Array]:
        """The output and its log-normaliser after the sink took part in it, once for all splits."""
        sink = self.sink()
        if sink == -np.inf:
            return context, log_total
        total = np.logaddexp(log_total, sink)
        return context * self.exp(log_total - total)[:, None], total

    def exp(self, values: Array) -> Array:
        return np.exp(values)

    def masked(self, tile: int, column: int) -> Array:
        rows, columns = self.of_queries[tile], self.of_keys[column]
        logits = self.capped(self.logits(self.load("query", rows), self.load("key", columns)))
        if self.bias is not None:
            logits = logits + self.biases(rows, columns)
        if self.given.slopes is not None:
            logits = logits - self.alibi_slope() * self.far(rows, columns)
        return np.where(self.visible(rows, columns), logits, -np.inf).astype(self.wide)

    def alibi_slope(self) -> Any:
        """The slope of ALiBi of the present head."""
        return self.wide(self.given.slopes[self.head])

    def far(self, rows: tuple[int, int], columns: tuple[int, int]) -> Array:
        """The distance of each key of a tile from each query."""
        at, there = self.alibi_positions("query", rows), self.alibi_positions("key", columns)
        return np.abs(there - at[:, None]).astype(self.wide)

    def alibi_positions(self, name: str, span: tuple[int, int]) -> Array:
        """The positions of a tile of queries or keys, from which distances are counted."""
        return self.aligned(span) if name == "query" else self.within(1, span)

    def highest(self, tile: int, column: int, before: Array, logits: Array) -> Array:
        return np.maximum(before, logits.max(axis=1))

    def shrink(self, tile: int, column: int, before: Array, now: Array) -> Array:
        """The factor of what was summed before the maximum grew."""
        return np.where(before == -np.inf, 0, self.exp(before - np.where(now == -np.inf, 0, now)))

    def sum_of(self, total: Array, factor: Array, powers: Array) -> Array:
        return (total * factor + powers.sum(axis=1)).astype(self.wide)

    def context_of(self, context: Array, factor: Array, powers: Array, value: Array) -> Array:
        return context * factor[:, None] + self.held(powers) @ value

    def over(self, tile: int, columns: list[int]) -> tuple[Array, Array, Array]:
        """Context, normaliser and maximum over some tiles of keys, not divided yet."""
        rows = self.of_queries[tile]
        number = rows[1] - rows[0]
        peak = np.full(number, -np.inf, self.wide)
        total = np.zeros(number, self.wide)
        context = np.zeros((number, self.given.value.shape[-1]), self.wide)
        for column in columns:
            self.pair = tile, column
            logits = self.masked(tile, column)
            now = self.highest(tile, column, peak, logits)
            factor = self.shrink(tile, column, peak, now).astype(self.wide)
            powers = self.exp(logits - np.where(now == -np.inf, 0, now)[:, None])
            total = self.sum_of(total, factor, powers)
            value = self.load("value", self.of_keys[column])
            context = self.context_of(context, factor, powers, value).astype(self.wide)
            peak = now
        return context, total, peak

    def divided(self, context: Array, total: Array) -> Array:
        return context / np.where(total > 0, total, 1)[:, None]

    def log_total(self, total: Array, peak: Array) -> Array:
        with np.errstate(divide="ignore"):
            return np.where(total > 0, peak + np.log(total), -np.inf).astype(self.wide)

    def parts(self, columns: list[int]) -> list[list[int]]:
        """The tiles of keys of each split."""
        if self.queries > self.few:
            return [columns]
        each = -(-len(self.of_keys) // self.splits)
        return [[c for c in columns if c // each == split] for split in range(self.splits)]

    def share(self, log_totals: Array) -> Array:
        """The weight of each split `[splits rows]`."""
        peak = log_totals.max(axis=0)
        weights = self.exp(log_totals - np.where(peak == -np.inf, 0, peak))
        total = weights.sum(axis=0)
        return weights / np.where(total > 0, total, 1)

    def merged(self, outputs: Array, log_totals: Array) -> tuple[Array, Array]:
        """The output of all splits and its log-normaliser."""
        output = (self.share(log_totals)[..., None] * outputs).sum(axis=0)
        peak = log_totals.max(axis=0)
        finite = np.where(peak == -np.inf, 0, peak)
        return output, self.log_total(self.exp(log_totals - finite).sum(axis=0), peak)

    def forward(self) -> tuple[Array, Array]:
        """Output and log-normaliser, `[batch heads query (head)]`."""
        self.phase = "forward"
        given, wide = self.given, self.wide
        output = np.zeros((*given.query.shape[:3], given.value.shape[-1]), wide)
        log_total = np.full(given.query.shape[:3], -np.inf, wide)
        parts = self.splits if self.queries <= self.few else 1
        outputs = np.zeros((parts, *output.shape), wide)
        log_totals = np.full((parts, *log_total.shape), -np.inf, wide)
        for entry, head, tile, split in self.work("forward"):
            self.entry, self.head, self.split = entry, head, split
            columns = self.visits_forward(tile)
            context, total, peak = self.over(tile, self.parts(columns)[split])
            at = split, entry, head, slice(*self.of_queries[tile])
            outputs[at], log_totals[at] = self.divided(context, total), self.log_total(total, peak)
        for entry, head, tile in np.ndindex(self.batch, self.heads, len(self.of_queries)):
            self.entry, self.head = entry, head
            at = slice(None), entry, head, slice(*self.of_queries[tile])
            context, log = (outputs[at][0], log_totals[at][0])
            if parts > 1:
                context, log = self.merged(outputs[at], log_totals[at])
            context, log = self.with_sink(context, log)
            self.write("output", output, self.of_queries[tile], self.held(context))
            log_total[at[1:]] = log
        return output, log_total

    # Backward.

    def row_term(self, tile: int, cotangent: Array, output: Array) -> Array:
        return (cotangent * output).sum(axis=1)

    def weights(self, tile: int, column: int, log_total: Array) -> Array:
        finite = np.where(log_total == -np.inf, 0, log_total)
        return self.exp(self.masked(tile, column) - finite[:, None])

    def d_logits(self, weights: Array, d_weights: Array, row: Array) -> Array:
        return weights * (d_weights - row[:, None])

    def for_query(self, gradient: Array, d_logits: Array, key: Array) -> Array:
        return gradient + self.held(d_logits) @ key * self.scale

    def for_key(self, gradient: Array, d_logits: Array, query: Array) -> Array:
        return gradient + self.held(d_logits).T @ query * self.scale

    def for_value(self, gradient: Array, weights: Array, cotangent: Array) -> Array:
        return gradient + self.held(weights).T @ cotangent

    def for_bias(self, gradient: Array, d_logits: Array) -> Array:
        return gradient + d_logits

    def write(self, name: str, array: Array, rows: tuple[int, int], values: Array) -> None:
        """Store a tile of the output or of the gradient of queries."""
        index = self.row_of(name, self.stored_at(np.arange(*rows)))
        array.reshape(-1, array.shape[-1])[index] = values

    def stored_at(self, index: Array) -> Array:
        return index

    def add_group(self, name: str, array: Array, index: Array, gradient: Array) -> None:
        """Add the gradient of keys of a head to that of its key/value head."""
        array.reshape(-1, array.shape[-1])[self.row_of(name, index)] += gradient

    def visited_by(self, times: dict[int, list[tuple[int, int, int]]]) -> None:
        """For each tile of keys, the tiles of queries, how often for either gradient."""
        for tile in range(len(self.of_queries)):
            of_query, of_key = self.visits_for_query(tile), self.visits_for_key(tile)
            for column in {*of_query, *of_key}:
                times.setdefault(column, []).append(
                    (tile, of_query.count(column), of_key.count(column))
                )

    def row_terms(self, output: Array) -> Array:
        """The row term of every query, `[batch heads query]`."""
        found = np.zeros(output.shape[:3], self.wide)
        for entry, head, tile in np.ndindex(self.batch, self.heads, len(self.of_queries)):
            self.entry, self.head = entry, head
            rows = self.of_queries[tile]
            at = entry, head, slice(*rows)
            found[at] = self.row_term(tile, self.load("cotangent", rows), output[at])
        return found

    def backward(self, output: Array, log_total: Array) -> dict[str, Array]:
        """The gradients of query, key and value."""
        sums = [np.zeros_like(getattr(self.given, n), self.wide) for n in ("query", "key", "value")]
        d_query, d_key, d_value = sums
        self.phase = "backward"
        if self.bias is not None:
            self.d_bias = np.zeros(self.bias.shape, self.wide)
        row = self.row_terms(output)
        visited: dict[tuple[int, int], dict[int, list[tuple[int, int, int]]]] = {}
        for entry, head, column in self.work("backward"):
            self.entry, self.head = entry, head
            if (entry, head) not in visited:
                self.visited_by(visited.setdefault((entry, head), {}))
            columns = self.of_keys[column]
            keys, values = self.load("key", columns), self.load("value", columns)
            of_keys, of_values = np.zeros_like(keys), np.zeros_like(values)
            for tile, of_query, of_key in visited[entry, head].get(column, ()):
                self.pair, rows = (tile, column), self.of_queries[tile]
                queries, cotangent = self.load("query", rows), self.load("cotangent", rows)
                at = entry, head, slice(*rows)
                weights = self.weights(tile, column, log_total[at])
                d_logits = self.d_logits(weights, cotangent @ values.T, row[at])
                uncapped = d_logits * self.slope(tile, column)
                for _ in range(of_query):
                    d_query[at] = self.for_query(d_query[at], uncapped, keys)
                for _ in range(of_key):
                    of_keys = self.for_key(of_keys, uncapped, queries)
                    of_values = self.for_value(of_values, weights, cotangent)
                if self.bias is not None:
                    there = *at, slice(*columns)
                    self.d_bias[there] = self.for_bias(self.d_bias[there], d_logits)
            of_keys = self.back("key", columns, of_keys)
            self.add_group("d_key", d_key, np.arange(*columns), of_keys)
            self.add_group("d_value", d_value, np.arange(*columns), of_values)
        query = np.zeros_like(d_query)
        for entry, head, tile in np.ndindex(self.batch, self.heads, len(self.of_queries)):
            self.entry, self.head = entry, head
            rows = self.of_queries[tile]
            of_rows = self.back("query", rows, d_query[entry, head, slice(*rows)])
            self.write("d_query", query, rows, of_rows)
        arrays = {"query": query, "key": d_key, "value": d_value}
        if self.given.sinks is not None:
            arrays["sinks"] = self.for_sinks(log_total, row)
        if self.given.norm is not None:
            arrays |= {f"norm.{name}": gradient for name, gradient in self.of_gains.items()}
        return {name: self.held(array) for name, array in arrays.items()}

    def for_sinks(self, log_total: Array, row: Array) -> Array:
        """The gradient of the sinks `[heads]`."""
        sinks = self.given.sinks.astype(self.wide)[:, None]
        return -(self.exp(sinks - log_total) * row).sum(axis=(0, 2))

    def run(self) -> dict[str, Array]:
        output, log_total = self.forward()
        return {"output": output, **self.backward(output, log_total), "log_total": log_total}


class Kernel(Adapter):
    """The tiled attention, or one of its mutants, as an implementation."""

    title = "a tiled attention in NumPy"
    fully_masked_row = "zeros"
    accuracy = "A"
    features = (
        *(SoftCap("soft_cap"), Sinks("sinks"), RotaryConfig("rope"), Chunk("chunk")),
        *(Alibi("slopes"), Lengths("lengths"), HeadNorm("query_norm", "key_norm")),
        Spans("spans", alignment="bottom-right"),
        Window("window", dilation="dilation", global_tokens="tokens"),
    )

    def __init__(self, kind: type[Tiled] = Tiled, tiles: tuple[int, int] = (64, 128)) -> None:
        self._kind = type(kind.__name__, (kind,), {"rows": tiles[0], "columns": tiles[1]})

    def run(self, problem: Problem, call: Call) -> Answer:
        raise Unsupported("only at length")

    def at_length(self, heads: Heads) -> Mapping[str, Array]:
        with np.errstate(all="ignore"):
            return self._kind(heads).run()
