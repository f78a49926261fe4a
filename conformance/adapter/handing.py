"""Declare other ways to pass queries, keys and values: packed, in pages, or partly from a cache.

An adapter for a function lists these declarations among its features. Each declaration yields
further encodings of the problems that it can express: a packed batch must give the same result as a
padded one, and likewise for pages and caches. The suite moves tokens with the framework's own
operations, so gradients flow back to the original tokens. Memory that is passed but that no token
uses holds NaN, because in practice it may hold anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import einops
import numpy as np

from conformance.adapter.features import Feature, Said, Value, check_choices
from conformance.definition.problem import Causal, Problem
from conformance.definition.rotary import turning
from conformance.errors import WrongDeclaration
from conformance.frameworks.base import Framework, Natives

TOKENS = "(batch length) heads head"
INDEX_DTYPES = ("int32", "int64")
Index = np.ndarray
"""For each element of a new array, the index of the token that is put there, counted over the whole
batch; −1 for an element that no token uses."""


@dataclass(frozen=True, eq=False)
class Moved:
    """How the tokens of a problem are moved before a call, and those of the result after it.

    Attributes:
        query: the index of the token that is passed as each query, `[token]`; None if queries stay
            in place.
        key: likewise, for the keys and values that are passed as key and value: `[token]`, or
            `[batch key]` if queries stay in place; None if these keys and values stay in place.
        held: likewise, for the keys and values in a cache or in pages, which are passed in the
            arguments `names`: `[outer inner]`, where "outer" counts batch entries or pages, and
            "inner" the tokens in each; None without a cache or pages.
        names: the names of the arguments for `held`: the one for keys and the one for values.
        layout: the layout of these arguments, with the axes "outer" and "inner" of `held`; "" for
            the layout of queries, keys and values.
        back: the row of the result that belongs to each query, `[batch query]`, −1 for a query that
            was not passed; None if the result stays in place.
        prepared: whether the keys in the arguments `names` have already been normed and rotated.
        masks: whether masks may be passed as well.
        ring: whether the function may write new keys and values over those that are `held`.
    """

    query: Index | None = None
    key: Index | None = None
    held: Index | None = None
    names: tuple[str, str] = ("", "")
    layout: str = ""
    back: Index | None = None
    prepared: bool = False
    masks: bool = False
    ring: bool = False

    @property
    def program(self) -> Hashable:
        """A hashable key of the attributes on which a compiled program depends."""
        arrays = (self.query, self.key, self.held, self.back)
        moves = tuple(None if a is None else (a.shape, a.tobytes()) for a in arrays)
        return (*moves, self.names, self.layout, self.prepared)

    def hand(
        self, bridge: Framework, layout: str, heads: Natives, cached: Any, device: str
    ) -> tuple[Natives, Natives]:
        """Return query, key and value as they are passed, and further arguments, both by name.

        Args:
            bridge, device: the bridge of the arrays' framework, and the kind of their device.
            layout: the layout of the heads.
            heads: query, key and value, by name, before they are moved.
            cached: the keys that fill a cache or pages, in the same layout; they have already been
                normed and rotated if `prepared` is true.
        """
        passed: Natives = dict(heads)
        more: Natives = {}
        tokens = {
            name: einops.rearrange(array, f"{layout} -> {TOKENS}")
            for name, array in (heads | {"cached": cached}).items()
        }

        def taken(name: str, index: Index) -> Any:
            return _taken(bridge, tokens[name], index, math.nan, device)

        if self.query is not None:
            passed["query"] = taken("query", self.query)
        if self.key is not None:
            shaped = {n: taken(n, self.key.ravel()) for n in ("key", "value")}
            if self.query is None:
                batch = self.key.shape[0]
                shaped = {n: _batched(array, layout, batch) for n, array in shaped.items()}
            passed |= shaped
        if self.held is not None:
            wanted = self.layout or layout.replace("batch", "outer").replace("length", "inner")
            pattern = f"(outer inner) heads head -> {wanted}"
            for name, argument in zip(("cached", "value"), self.names, strict=True):
                flat = taken(name, self.held.ravel())
                native = einops.rearrange(flat, pattern, outer=self.held.shape[0])
                (passed if argument in passed else more)[argument] = native
        return passed, more

    def returned(self, bridge: Framework, layout: str, context: Any, device: str) -> Any:
        """Return the result `context` in `layout`, with each row moved back to its query.

        Queries that were not passed get 0. If `back` is None, return `context` unchanged.
        """
        if self.back is None:
            return context
        rows = _taken(bridge, context, self.back.ravel(), 0.0, device)
        return _batched(rows, layout, self.back.shape[0])


class Handing(Feature):
    """The base class of declarations of how queries, keys and values are passed to a function.

    Attributes:
        only: whether the implementation accepts queries, keys and values in no other way.
    """

    says: ClassVar[tuple[str, ...]] = ("handing",)
    only: bool = False


@dataclass(frozen=True)
class Packed(Handing):
    """The tokens of all sequences one after another, `[token heads head]`, without padding.

    The sequences are the entries of the batch up to their lengths, or the segments in these
    entries. If there are several sequences, a second encoding inserts an empty sequence after the
    first.

    Args:
        query_offsets: the name of the argument `[sequence + 1]` that holds the index of the first
            query of each sequence, followed by the number of all queries.
        key_offsets: likewise, for the keys.
        longest_query: the name of the argument for the greatest number of queries in a sequence; ""
            if there is none.
        longest_key: likewise, for the keys.
        slack: the number of unused tokens after the last sequence; they are NaN.
        only: whether queries, keys and values cannot be passed in any other way.
        dtype: the integer dtype of the offsets.
    """

    query_offsets: str = "cu_seqlens_q"
    key_offsets: str = "cu_seqlens_k"
    longest_query: str = ""
    longest_key: str = ""
    slack: int = 0
    only: bool = False
    dtype: str = "int32"
    named_by: ClassVar[tuple[str, ...]] = (
        "query_offsets",
        "key_offsets",
        "longest_query",
        "longest_key",
    )

    def __post_init__(self) -> None:
        check_choices(self.query_offsets, dtype=(self.dtype, INDEX_DTYPES))
        if self.slack < 0:
            raise WrongDeclaration(f"packed: slack={self.slack} is no number of tokens")

    @property
    def covers(self) -> tuple[str, ...]:
        return (*self.says, "key lengths", "query lengths", "segments")

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        members = list(_members(problem))
        yield self._packed(problem, said, members)
        if len(members) > 1:
            nothing = np.arange(0)
            yield self._packed(problem, said, [members[0], (nothing, nothing), *members[1:]])

    def _packed(self, problem: Problem, said: Said, members: list[tuple[Index, Index]]) -> Said:
        """Return `said` with the arguments that pass the sequences `members` packed.

        A sequence is given by the indices of its queries and of its keys in the whole batch.
        """
        shape = problem.shape
        queries, keys = ([member[side] for member in members] for side in (0, 1))
        arguments: dict[str, Value] = {
            name: np.cumsum([0, *map(len, side)]).astype(self.dtype)
            for name, side in ((self.query_offsets, queries), (self.key_offsets, keys))
        }
        for name, side in ((self.longest_query, queries), (self.longest_key, keys)):
            if name:
                arguments[name] = max(map(len, side), default=0)
        slack = np.full(self.slack, -1)
        query, key = (np.concatenate([*side, slack]).astype(np.int64) for side in (queries, keys))
        back = np.full((shape.batch, shape.query_length), -1)
        used = len(query) - self.slack
        back.flat[query[:used]] = np.arange(used)
        moved = Moved(query=query, key=key, back=back)
        done = said.saying(*self.covers, **arguments)
        return replace(done, handing=moved, stands=_ranks(problem, members))


@dataclass(frozen=True)
class Pages(Handing):
    """Keys and values in pages of `size` tokens, whose order is given by a table `[batch page]`.

    Args:
        table: the name of the argument that holds the numbers of the pages of each entry.
        lengths: the name of the argument `[batch]` for the number of keys of each entry.
        key: the name of the argument that holds the pages of keys; "key" if they are passed in
            place of the keys.
        value: likewise, for values.
        size: the number of tokens in a page.
        layout: the layout of the pages.
        prepared: whether the keys in the pages have already been normed and rotated, as in most
            implementations.
        only: whether keys and values cannot be passed in any other way.
        dtype: the integer dtype of the table and the lengths.
    """

    table: str = "block_table"
    lengths: str = "cache_seqlens"
    key: str = "key"
    value: str = "value"
    size: int = 16
    layout: Literal["page token heads head", "page heads token head"] = "page token heads head"
    prepared: bool = True
    only: bool = False
    dtype: str = "int32"
    named_by: ClassVar[tuple[str, ...]] = ("table", "lengths")

    def __post_init__(self) -> None:
        layouts = ("page token heads head", "page heads token head")
        dtype = (self.dtype, INDEX_DTYPES)
        check_choices(self.table, layout=(self.layout, layouts), dtype=dtype)
        if self.size < 1:
            raise WrongDeclaration(f"{self.table}: a page of {self.size} tokens")

    @property
    def covers(self) -> tuple[str, ...]:
        return (*self.says, "key lengths")

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        shape, lengths = problem.shape, _key_lengths(problem)
        needed = -(-lengths // self.size)
        # One additional page, which belongs to no entry, fills the rest of the table.
        numbers = np.random.default_rng(0).permutation(int(needed.sum()) + 1)
        pages = np.full((len(numbers), self.size), -1)
        table = np.full((shape.batch, max(int(needed.max(initial=0)), 1)), numbers[-1])
        taken = iter(numbers)
        for entry, length in enumerate(lengths):
            for first in range(0, int(length), self.size):
                number = next(taken)
                table[entry, first // self.size] = number
                rows = np.arange(first, min(first + self.size, int(length)))
                pages[number, : len(rows)] = entry * shape.key_length + rows
        layout = self.layout.replace("page", "outer").replace("token", "inner")
        names = (self.key, self.value)
        moved = Moved(held=pages, names=names, layout=layout, prepared=self.prepared)
        arguments = {self.table: table.astype(self.dtype), self.lengths: lengths.astype(self.dtype)}
        yield replace(said.saying(*self.covers, **arguments), handing=moved, keys=lengths)


@dataclass(frozen=True)
class Cache(Handing):
    """Keys and values of tokens before the queries, which earlier calls have left in a KV cache.

    Only problems with a causal mask of alignment "bottom-right" are passed in this way. If there
    are n queries, the last n keys are new. The earlier keys are in the cache, except those that a
    ring buffer has overwritten.

    Args:
        key: the name of the argument that holds the keys of the cache.
        value: likewise, for the values.
        lengths: the name of the argument `[batch]` that says, as `counts` specifies, how much of
            the cache is used in each batch entry; "" if the whole cache always is.
        counts: what `lengths` holds: the number of keys in the cache ("cached"), this number plus
            that of the new keys ("total"), or the index of the last new key ("last index").
        prepared: whether the keys of the cache have already been normed and rotated, as in most
            implementations.
        spare: how many rows the cache has in addition to those for the cached and the new keys. It
            has no effect for a ring. A cache without `lengths` has rows for the cached keys only.
        ring: whether the cache is a ring buffer, for problems with a window: the key at position p
            is in row p modulo the number of rows. There is a row for each key that the window shows
            before a query, and one for each new key.
        only: whether keys and values cannot be passed in any other way.
        dtype: the integer dtype of the lengths.
    """

    key: str = "past_key"
    value: str = "past_value"
    lengths: str = ""
    counts: Literal["cached", "total", "last index"] = "cached"
    prepared: bool = True
    spare: int = 1
    ring: bool = False
    only: bool = False
    dtype: str = "int32"
    named_by: ClassVar[tuple[str, ...]] = ("key", "value", "lengths")

    def __post_init__(self) -> None:
        if self.ring and not self.lengths:
            raise WrongDeclaration(f"{self.key}: a ring needs lengths")
        counts = (self.counts, ("cached", "total", "last index"))
        check_choices(self.key, counts=counts, dtype=(self.dtype, INDEX_DTYPES))

    @property
    def covers(self) -> tuple[str, ...]:
        return (*self.says, "key lengths") if self.lengths else self.says

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        shape, lengths = problem.shape, problem.key_lengths
        if problem.causal != "bottom-right" or problem.segments or problem.positions:
            return
        if problem.query_lengths is not None or (lengths is not None and not self.lengths):
            return
        totals = _key_lengths(problem)
        cached, new = totals - shape.query_length, shape.query_length
        if (cached < 0).any() or not cached.any():
            return
        if self.ring:
            before = problem.window[0]
            if before is None:
                return
            kept = _wrapped(cached, before + new)
        else:
            places = int(cached.max()) + (new + self.spare if self.lengths else 0)
            kept = np.where(np.arange(places) < cached[:, None], np.arange(places), -1)
        start = np.arange(shape.batch)[:, None] * shape.key_length
        held = np.where(kept < 0, -1, start + kept)
        moved = Moved(
            key=start + cached[:, None] + np.arange(new),
            held=held,
            names=(self.key, self.value),
            prepared=self.prepared,
            masks=not self.lengths,
            ring=self.ring,
        )
        counted = {"cached": cached, "total": totals, "last index": totals - 1}[self.counts]
        arguments = {self.lengths: counted.astype(self.dtype)} if self.lengths else {}
        said = replace(said, labels=(*said.labels, f"{self.key}=[{held.shape[1]} places]"))
        done = said.saying(*self.covers, **arguments)
        yield replace(done, handing=moved, stands=_behind(problem, cached))


def _wrapped(cached: np.ndarray, places: int) -> Index:
    """Return the index of the cached key in each row of a ring buffer, `[batch row]`.

    The index is −1 for an empty row. `cached` holds the number of cached keys of each batch entry,
    and `places` is the number of rows.
    """
    last = cached[:, None] - 1
    found = last - (last - np.arange(places)) % places
    return np.where(found < 0, -1, found)


def _ranks(
    problem: Problem, members: list[tuple[Index, Index]]
) -> Callable[[Causal | None], np.ndarray | None]:
    """Return the function `Said.stands` for packed sequences, `members` as `_members` yields them.

    It takes an alignment, and returns the positions of keys minus those of queries. The positions
    of keys begin at 0 in each sequence. If the alignment is None and a sequence has different
    numbers of queries and keys, it returns None.
    """
    shape = problem.shape

    def ahead(alignment: Causal | None) -> np.ndarray | None:
        p = np.zeros(shape.batch * shape.query_length, dtype=np.int64)
        r = np.zeros(shape.batch * shape.key_length, dtype=np.int64)
        for queries, keys in members:
            if alignment is None and len(queries) != len(keys):
                return None
            offset = len(keys) - len(queries) if alignment == "bottom-right" else 0
            p[queries], r[keys] = offset + np.arange(len(queries)), np.arange(len(keys))
        return r.reshape(shape.batch, 1, -1) - p.reshape(shape.batch, -1, 1)

    return ahead


def _behind(problem: Problem, cached: np.ndarray) -> Callable[[Causal | None], np.ndarray]:
    """Return the function `Said.stands` for queries that follow the cached keys.

    It takes an alignment, which it ignores, and returns the positions of keys minus those of
    queries. `cached` holds the number of cached keys of each batch entry.
    """
    queries = cached[:, None] + np.arange(problem.shape.query_length)
    return lambda alignment: np.arange(problem.shape.key_length) - queries[:, :, None]


def turns_of(problem: Problem) -> np.ndarray:
    """Return, for each key, the matrix that rotates it, `[batch key head head]`.

    A key is a row, which is multiplied by the matrix from the right.
    """
    rotary, size = problem.rotary, problem.shape.head_size
    assert rotary is not None
    half = rotary.size // 2
    one, other = np.arange(half), half + np.arange(half)
    if rotary.pairs == "interleaved":
        one, other = 2 * np.arange(half), 2 * np.arange(half) + 1
    frequencies, gain = turning(problem)
    angles = problem.position_of_keys[..., None] * frequencies
    turns = np.zeros((*angles.shape[:-1], size, size)) + np.eye(size)
    turns[..., one, one] = turns[..., other, other] = gain * np.cos(angles)
    turns[..., one, other] = gain * np.sin(angles)
    turns[..., other, one] = -gain * np.sin(angles)
    return turns


def _key_lengths(problem: Problem) -> np.ndarray:
    """Return how many keys each batch entry has, `[batch]`: all keys if there are no lengths."""
    shape, lengths = problem.shape, problem.key_lengths
    return np.full(shape.batch, shape.key_length) if lengths is None else lengths


def _members(problem: Problem) -> Iterator[tuple[Index, Index]]:
    """Yield the tokens of each sequence: the indices of its queries, and those of its keys.

    A sequence is a batch entry up to its lengths or, if there are segments, a segment in it.
    Indices count over the whole batch.
    """
    shape = problem.shape
    lengths = (problem.query_lengths, problem.key_lengths)
    for entry in range(shape.batch):
        sides = []
        for length, used in zip((shape.query_length, shape.key_length), lengths, strict=True):
            sides.append(entry * length + np.arange(length if used is None else used[entry]))
        if problem.segments is None:
            yield sides[0], sides[1]
            continue
        ids = (problem.segments.query.ravel()[sides[0]], problem.segments.key.ravel()[sides[1]])
        for one in np.unique(np.concatenate(ids)):
            yield sides[0][ids[0] == one], sides[1][ids[1] == one]


def _taken(bridge: Framework, tokens: Any, index: Index, unused: float, device: str) -> Any:
    """Return the tokens `[token heads head]` at `index`; `unused` where the index is −1."""
    count = tokens.shape[0]
    if (index < 0).any():
        row = np.full((1, *tokens.shape[1:]), unused)
        row = bridge.array(row, bridge.dtype(tokens), device)
        tokens, _ = einops.pack([tokens, row], "* heads head")
    return bridge.take(tokens, np.where(index < 0, count, index))


def _batched(tokens: Any, layout: str, batch: int) -> Any:
    return einops.rearrange(tokens, f"{TOKENS} -> {layout}", batch=batch)
