"""Masks as one interval of visible keys per query, so that they need not become arrays.

With causal masks, windows, packed sequences and padding, query i sees the keys j with first_i ≤ j
< last_i, and neither end moves left as i grows. All checks of long sequences rely on these two
properties: sums over the keys that a query sees are sums over intervals, and the queries that see a
key form an interval too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from conformance.definition.dtypes import BoolArray
from conformance.definition.problem import Causal
from conformance.errors import WrongShape

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """A mask as structure: a key is visible if every part that is given allows it.

    Attributes:
        causal: key j is visible to query i iff j <= i ("top-left") or
            j <= i + key_length - query_length ("bottom-right"), within their packed sequence.
        window: how many keys before and after the query's position are visible; None for no limit.
            That position follows the alignment of `causal`, which is top-left if there is none.
        members: the lengths of packed sequences, of queries and of keys. A query sees only the keys
            of its sequence; queries beyond the last sequence see nothing.
        key_lengths: the number of keys of each batch entry; keys beyond it are padding.

    Raises:
        WrongShape: a number is negative, or the two tuples of `members` differ in length.
    """

    causal: Causal | None = None
    window: tuple[int | None, int | None] = (None, None)
    members: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    key_lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        sizes = [size for size in self.window if size is not None]
        sizes += [size for side in self.members or () for size in side]
        if any(size < 0 for size in [*sizes, *(self.key_lengths or ())]):
            raise WrongShape("windows, members and key lengths are not negative")
        if self.members is not None and len(self.members[0]) != len(self.members[1]):
            raise WrongShape("there are as many members of queries as of keys")

    def intervals(self, entry: int, queries: int, keys: int) -> tuple[Index, Index]:
        """Return `first` and `last`, `[queries]` each, of a batch entry; both are sorted.

        A query sees the keys from `first` to `last` - 1; none if the two are equal.

        Raises:
            WrongShape: the packed sequences together are longer than the axis.
        """
        of_queries, of_keys = self.members or ((queries,), (keys,))
        query_sizes, key_sizes = _sizes(of_queries, queries), _sizes(of_keys, keys)
        sizes = np.repeat(key_sizes, query_sizes)
        starts = np.repeat(np.cumsum(key_sizes) - key_sizes, query_sizes)
        at = np.arange(len(sizes)) - np.repeat(np.cumsum(query_sizes) - query_sizes, query_sizes)
        if self.causal == "bottom-right":
            at = at + np.repeat(key_sizes - query_sizes, query_sizes)
        first, last = np.zeros_like(sizes), sizes
        before, after = self.window
        if self.causal is not None:
            after = 0
        if after is not None:
            last = np.clip(at + after + 1, 0, sizes)
        if before is not None:
            first = np.clip(at - before, 0, sizes)
        slack = np.full(queries - len(sizes), key_sizes.sum(), np.int64)
        first = np.concatenate([starts + first, slack])
        last = np.concatenate([starts + last, slack])
        if self.key_lengths is not None:
            last = np.minimum(last, self.key_lengths[entry])
        return first, np.maximum(last, first)

    def dense(self, batch: int, queries: int, keys: int) -> BoolArray:
        """Return the mask as an array `[batch 1 query key]`, for short sequences."""
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


def transposed(first: Index, last: Index, keys: int) -> tuple[Index, Index]:
    """Return the interval of queries that see each key: begin and end, `[keys]` each, sorted."""
    columns = np.arange(keys)
    begin = np.searchsorted(last, columns, side="right")
    end = np.searchsorted(first, columns, side="right")
    return begin, np.maximum(begin, end)


@dataclass(frozen=True, eq=False)
class Around:
    """The columns that a block of rows sees: whole blocks that every row sees, and the rest.

    Attributes:
        start, stop: the first row of the block, and the row after the last.
        inner: the index of the first whole block of columns, and of the block after the last one;
            the two indices are equal if there is no whole block.
        edges: the other columns that some row sees, as at most two spans.
        visible: `[rows edge_columns]`, whether a row sees a column of the edges.
        seen: `[rows]`, how many columns each row sees altogether.
    """

    start: int
    stop: int
    inner: tuple[int, int]
    edges: tuple[slice, ...]
    visible: npt.NDArray[np.float64]
    seen: Index


def surroundings(first: Index, last: Index, rows: slice, size: int) -> Iterator[Around]:
    """Yield all rows in blocks of at most `size`, each with its columns in blocks of `size`.

    A block ends early where the ends of the intervals jump, as between packed sequences, so that at
    most six blocks of columns are edges. Such long jumps are few, so there are O(length / size)
    blocks.
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
        yield Around(start, stop, inner, edges, visible.astype(np.float64), high - low)
        start = stop
