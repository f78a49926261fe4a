"""The exact answer for every element, at a cost of O(length · classes · head size).

If queries and keys are drawn from few classes, e_ac = exp(s_ac − peak_a) is a small table, and the
sums that attention needs are sums by class over intervals. With a for the class of a query, q̄_a for
its prototype, c and k̄_c for those of a key, s for the logits and α for the scale:

    n_c(i) = Σ_{j∈c} 1     S_c(i) = Σ_{j∈c} V_j           over the keys j that query i sees
    Z_i = Σ_c e_ac n_c     O_i = Σ_c e_ac S_c / Z_i        w_i = 1/Z_i     D_i = dO_i·O_i
    dQ_i = α w_i Σ_c e_ac (dO_i·S_c − D_i n_c) k̄_c

    G_a(j) = Σ_{i∈a} w_i dO_i     H_a(j) = Σ_{i∈a} w_i D_i  over the queries i that see key j
    dV_j = Σ_a e_ac G_a    dK_j = α Σ_a e_ac (V_j·G_a − H_a) q̄_a

A sink adds exp(sink − peak_a) to Z, and its gradient is −Σ_i w_i exp(sink − peak_a) D_i. A cap is a
function of the logit, so its derivative is a table too, which multiplies e_ac in dQ and dK.

Rows are processed in blocks. Whole blocks of columns that every row of a block sees contribute
through the sums by class (`Sums`); the few blocks of columns at the edges are computed directly.
`conformance.long.noise` derives σ from the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from conformance.definition.dtypes import Array
from conformance.long.problem import Classes, Index, LongProblem

BLOCK = 128
"""The number of rows and of columns of a block. Larger blocks cost more at the edges of masks, and
smaller ones more in Python."""


def transposed(first: Index, last: Index, keys: int) -> tuple[Index, Index]:
    """Return the interval of queries that see each key: begin and end, `[keys]` each, sorted.

    `first` and `last` give the interval of keys that each query sees. Neither `last` nor the end
    belongs to its interval.
    """
    columns = np.arange(keys)
    begin = np.searchsorted(last, columns, side="right")
    end = np.searchsorted(first, columns, side="right")
    return begin, np.maximum(begin, end)


@dataclass(frozen=True, eq=False)
class Around:
    """A block of rows and the columns that they see: whole blocks that every row sees, and others.

    Attributes:
        span: the rows of the block.
        inner: the index of the first whole block of columns, and of the block after the last one;
            the two indices are equal if there is no whole block.
        edges: the other columns that some row sees, as at most two spans.
        visible: whether a row sees a column of the edges, 1 or 0, `[rows edge_columns]`.
        seen: how many columns each row sees altogether, `[rows]`.
    """

    span: slice
    inner: tuple[int, int]
    edges: tuple[slice, ...]
    visible: Array
    seen: Index


def surroundings(first: Index, last: Index, rows: slice, size: int) -> Iterator[Around]:
    """Yield the rows in blocks of at most `size`, each with its columns in blocks of `size`.

    A row sees the columns from `first` to `last` - 1, which are given for every row. A block ends
    early where the ends of the intervals jump, as between packed sequences, so that at most six
    blocks of columns are edges. Such long jumps are few, so there are O(length / size) blocks.
    """
    start = rows.start
    while start < rows.stop:
        ends = (np.searchsorted(x, x[start] + 2 * size, side="right") for x in (first, last))
        stop = int(min(start + size, rows.stop, *ends))
        low, high = first[start:stop], last[start:stop]
        inner = (-(-int(low[-1]) // size), int(high[0]) // size)
        edges: tuple[slice, ...]
        if inner[1] > inner[0]:
            edges = (slice(int(low[0]), inner[0] * size), slice(inner[1] * size, int(high[-1])))
        else:
            inner, edges = (inner[0], inner[0]), (slice(int(low[0]), int(high[-1])),)
        columns = np.concatenate([np.arange(edge.start, edge.stop) for edge in edges])
        visible = (columns >= low[:, None]) & (columns < high[:, None])
        yield Around(slice(start, stop), inner, edges, visible.astype(np.float64), high - low)
        start = stop


class Sums:
    """Sums by class over intervals of blocks of columns that only move right, without cancellation.

    Prefix sums over a million numbers lose digits if the difference of two of them is the sum of
    only a hundred numbers. Instead, the sum over the current interval is kept: blocks of columns
    are added as the interval grows and subtracted as it leaves them. The sums are double-double, so
    a subtracted block leaves an error of only about 1e-32 of the largest intermediate sum.

    Args:
        classes: the class of each column.
        count: the number of classes.
        size: the number of columns in a block.
        numbers: a function that returns the numbers to sum, `[columns numbers]`, for a slice of
            columns; it must return the same numbers each time.
        width: how many numbers there are for each column.
    """

    def __init__(
        self,
        classes: Classes,
        count: int,
        size: int,
        numbers: Callable[[slice], Array],
        width: int,
    ) -> None:
        self._classes, self._count, self._size, self._numbers = classes, count, size, numbers
        self._total, self._carry = np.zeros((2, count, width))
        self._first = self._last = 0

    def over(self, blocks: tuple[int, int]) -> Array:
        """Return the sums `[classes numbers]` over blocks `blocks[0]` to `blocks[1] - 1`.

        Neither number may decrease from call to call.
        """
        first, last = blocks
        if first >= self._last:
            self._total[:], self._carry[:] = 0.0, 0.0
            self._first = self._last = first
        for block in range(self._first, first):
            self._add(-self._of(block))
        for block in range(self._last, last):
            self._add(self._of(block))
        self._first, self._last = first, last
        return self._total + self._carry

    def _of(self, block: int) -> Array:
        columns = slice(block * self._size, (block + 1) * self._size)
        return one_hot(self._classes[columns], self._count) @ self._numbers(columns)

    def _add(self, numbers: Array) -> None:
        """Add numbers to the total by Knuth's TwoSum; its rounding errors go to the carry."""
        total = self._total + numbers
        back = total - self._total
        self._carry += (self._total - (total - back)) + (numbers - back)
        self._total = total


def one_hot(classes: Classes, count: int) -> Array:
    """Return an array `[classes columns]` that is 1 where a column is of the class, else 0."""
    return (classes == np.arange(count, dtype=classes.dtype)[:, None]).astype(np.float64)


def squared_norms(vectors: Array) -> Array:
    """Return the squared Euclidean norms `[rows]` of the rows of an array `[rows size]`."""
    return np.einsum("id,id->i", vectors, vectors)


@dataclass(eq=False)
class Head:
    """One query head of one batch entry, with the forward results that the backward pass needs.

    The symbols e, Z, w and D are those of this module's docstring.

    Attributes:
        powers: e `[query_classes key_classes]`.
        slopes: e times the derivative of the cap, of the same shape.
        of_sink: the term of the sink in Z `[query_classes]`.
        first, last: the interval of keys that each query sees, without `last` itself, `[query]`.
        weight: w `[query]`, which `rows` sets; it is 0 if Z is 0.
        row: D `[query]`, which `rows` sets.
        extra: further numbers of each query `[query extra]`, which are summed by class of the
            query to compute the noise of keys.
    """

    problem: LongProblem
    entry: int
    head: int
    weight: Array = field(init=False)
    row: Array = field(init=False)
    extra: Array = field(init=False)

    def __post_init__(self) -> None:
        _, _, length, _, keys = self.problem.sizes
        self.first, self.last = self.problem.sees.intervals(self.entry, length, keys)
        self.kv_head = self.head // self.problem.group
        logits, sinks = self.problem.logits(self.head), self.problem.sinks
        sink = -np.inf if sinks is None else float(sinks[self.head])
        self.peak = np.maximum(logits.max(axis=1), sink)
        self.powers = np.exp(logits - self.peak[:, None])
        self.slopes = self.powers * self.problem.slope(self.head)
        self.of_sink = np.exp(sink - self.peak)
        self.weight, self.row = np.zeros((2, length))
        self.extra = np.zeros((length, 0))

    @property
    def query_class(self) -> Classes:
        """The class of each query, `[query]`."""
        return self.problem.query_class[self.entry, self.head]

    @property
    def key_class(self) -> Classes:
        """The class of each key, `[key]`."""
        return self.problem.key_class[self.entry, self.kv_head]

    @property
    def queries(self) -> Array:
        """The prototypes of the classes of queries, `[query_classes head]`."""
        return self.problem.queries[self.head]

    @property
    def keys(self) -> Array:
        """The prototypes of the classes of keys, `[key_classes head]`."""
        return self.problem.keys[self.kv_head]

    @cached_property
    def seen_by(self) -> tuple[Index, Index]:
        """The interval of queries that see each key, as begin and end, `[key]` each."""
        return transposed(self.first, self.last, len(self.key_class))

    def value(self, columns: slice) -> Array:
        """Return the values of a slice of keys, `[columns value_head]`, in float64."""
        return self.problem.value[self.entry, self.kv_head, columns].astype(np.float64)

    def cotangent(self, rows: slice) -> Array:
        """Return the cotangents of a slice of queries, `[rows value_head]`, in float64."""
        return self.problem.cotangent[self.entry, self.head, rows].astype(np.float64)


@dataclass(eq=False)
class _Block:
    around: Around

    @property
    def span(self) -> slice:
        """The queries or keys of the block."""
        return self.around.span


@dataclass(eq=False)
class Rows(_Block):
    """A block of queries: its output, log-normaliser and gradient, with the terms that form them.

    The symbols are those of this module's docstring.

    Attributes:
        around: the rows of the block, and the columns that they see.
        output, d_query: `[rows value_head]` and `[rows head]`.
        log_total: the log-normaliser `[rows]`.
        powers: e of each row `[rows key_classes]`.
        cotangent: dO `[rows value_head]`.
        count, dotted, squares: n, dO·S and Σ_{j∈c} |V_j|² `[rows key_classes]`.
        inner: S, n and Σ|V|² `[key_classes value_head+2]` over the whole blocks of columns that all
            rows see; None if there is no such block.
        values, of_columns: V and the classes of the columns at the edges.
    """

    output: Array
    log_total: Array
    d_query: Array
    powers: Array
    cotangent: Array
    count: Array
    dotted: Array
    squares: Array
    inner: Array | None
    values: Array
    of_columns: Classes


def rows(head: Head, span: slice, size: int = BLOCK) -> Iterator[Rows]:
    """Yield the queries of a span in blocks, and store their `weight` and `row` in the head."""
    classes, width = len(head.keys), head.problem.value.shape[-1]

    def numbers(columns: slice) -> Array:
        values = head.value(columns)
        return np.column_stack([values, np.ones(len(values)), squared_norms(values)])

    sums = Sums(head.key_class, classes, size, numbers, width + 2)
    for around in surroundings(head.first, head.last, span, size):
        block = around.span
        of_columns = np.concatenate([head.key_class[edge] for edge in around.edges])
        values = np.concatenate([head.value(edge) for edge in around.edges])
        each = one_hot(of_columns, classes)
        of_queries = head.query_class[block]
        powers = head.powers[of_queries]
        cotangent = head.cotangent(block)
        summed = (powers[:, of_columns] * around.visible) @ values
        dotted = (around.visible * (cotangent @ values.T)) @ each.T
        both = around.visible @ np.vstack([each, each * squared_norms(values)]).T
        count, squares = both[:, :classes], both[:, classes:]
        inner = sums.over(around.inner) if around.inner[1] > around.inner[0] else None
        if inner is not None:
            summed += powers @ inner[:, :width]
            dotted += cotangent @ inner[:, :width].T
            count += inner[:, width]
            squares += inner[:, width + 1]
        normaliser = np.einsum("ic,ic->i", powers, count) + head.of_sink[of_queries]
        some = normaliser > 0
        weight = np.divide(1.0, normaliser, out=np.zeros_like(normaliser), where=some)
        output = weight[:, None] * summed
        row = np.einsum("id,id->i", cotangent, output)
        slopes = head.slopes[of_queries]
        d_logits = weight[:, None] * slopes * (dotted - row[:, None] * count)
        d_query = head.problem.factor * d_logits @ head.keys
        head.weight[block], head.row[block] = weight, row
        peak = np.where(some, head.peak[of_queries], -np.inf)
        log_total = peak + np.log(np.where(some, normaliser, 1.0))
        yield Rows(
            around, output, log_total, d_query, powers, cotangent, count, dotted, squares, inner,
            values, of_columns,
        )  # fmt: skip


@dataclass(eq=False)
class BlockPart:
    """What one query head adds to the gradients of a block of keys, with the terms that form it.

    The symbols are those of this module's docstring.

    Attributes:
        d_key, d_value: `[keys head]` and `[keys value_head]`.
        powers: e of each key `[keys query_classes]`.
        dotted: V·G − H `[keys query_classes]`.
        extra: the head's `extra`, summed over the queries of each class
            `[keys query_classes extra]`.
        inner: G, H and sums of `extra` over the whole blocks of queries that see all these keys;
            None if there is no such block.
        numbers: w dO, w D and `extra` of the queries at the edges.
        of_queries: the classes of the queries at the edges.
    """

    head: Head
    d_key: Array
    d_value: Array
    powers: Array
    dotted: Array
    extra: Array
    inner: Array | None
    numbers: Array
    of_queries: Classes


@dataclass(eq=False)
class Columns(_Block):
    """A block of keys: their values `[keys value_head]`, and a `BlockPart` from each query head."""

    values: Array
    parts: list[BlockPart]

    @property
    def d_key(self) -> Array:
        """The gradient of the keys `[keys head]`."""
        return np.add.reduce([part.d_key for part in self.parts])

    @property
    def d_value(self) -> Array:
        """The gradient of the values `[keys value_head]`."""
        return np.add.reduce([part.d_value for part in self.parts])


def columns(heads: list[Head], span: slice, size: int = BLOCK) -> Iterator[Columns]:
    """Yield the keys of a span in blocks, with gradients from all query heads that share them.

    Before this, `rows` must have yielded all queries of each head.
    """
    begin, end = heads[0].seen_by
    of_heads = [_Transposed(head, size) for head in heads]
    for around in surroundings(begin, end, span, size):
        values = heads[0].value(around.span)
        yield Columns(around, values, [each.part(around, values) for each in of_heads])


class _Transposed:
    """A query head with its sums over queries, from which the gradients of keys are computed."""

    def __init__(self, head: Head, size: int) -> None:
        self.head = head
        self.width = head.problem.value.shape[-1]
        width = self.width + 1 + head.extra.shape[1]
        self.sums = Sums(head.query_class, len(head.queries), size, self.numbers, width)

    def numbers(self, of: slice) -> Array:
        """Return w dO, w D and `extra` of a slice of queries, `[queries value_head+1+extra]`."""
        head = self.head
        weight = head.weight[of][:, None]
        return np.hstack([weight * head.cotangent(of), weight * head.row[of, None], head.extra[of]])

    def part(self, around: Around, values: Array) -> BlockPart:
        """Return what this head adds to the gradients of a block of keys and their `values`."""
        head, width = self.head, self.width
        of_queries = np.concatenate([head.query_class[edge] for edge in around.edges])
        numbers = np.concatenate([self.numbers(edge) for edge in around.edges])
        each = one_hot(of_queries, len(head.queries)).T
        powers = head.powers.T[head.key_class[around.span]]
        d_value = (powers[:, of_queries] * around.visible) @ numbers[:, :width]
        dotted = (around.visible * (values @ numbers[:, :width].T - numbers[:, width])) @ each
        every = each[:, :, None] * numbers[:, None, width + 1 :]
        extra = np.tensordot(around.visible, every, 1)
        inner = self.sums.over(around.inner) if around.inner[1] > around.inner[0] else None
        if inner is not None:
            d_value += powers @ inner[:, :width]
            dotted += values @ inner[:, :width].T - inner[:, width]
            extra += inner[:, width + 1 :]
        slopes = head.slopes.T[head.key_class[around.span]]
        d_key = head.problem.factor * (slopes * dotted) @ head.queries
        return BlockPart(
            head, d_key, d_value, powers, dotted, extra, inner, numbers, of_queries
        )  # fmt: skip
