"""Other ways to hand over queries, keys and values: packed, in pages, or partly from a cache.

An adapter of a function declares them among its features, and then they are encodings of a problem
like any other: what a packed batch gives must be what a padded one gives, and so for the others.
The suite moves tokens natively, so gradients flow back to where the tokens came from. Memory that
no token uses holds NaN, as what lies there in practice may be anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import einops
import numpy as np

from conformance.adapter.features import Feature, Said, Value, check_dtype, check_field
from conformance.definition.features import Rotary
from conformance.definition.problem import Causal, Problem
from conformance.errors import WrongDeclaration
from conformance.frameworks.base import Framework, Natives

TOKENS = "(batch length) heads head"
Index = np.ndarray
"""Which tokens, counted over the whole batch, lie where; −1 stands for memory that none uses."""


@dataclass(frozen=True, eq=False)
class Moved:
    """How tokens are moved, and back.

    Attributes:
        query: where queries come from, `[token]`, or None if they stay in place.
        key: where the keys and values that are passed as such come from, `[token]`, None likewise.
        held: where those of other arguments come from, with any axes.
        names: the names of those arguments for keys and for values.
        layout: the layout of those arguments, in which "outer" and "inner" are the axes of `held`;
            "" for that of queries, keys and values.
        back: where the result's tokens, `[batch query]`, come from; None if they stay in place.
        prepared: whether keys in those arguments have been normed and rotated already.
        masks: whether masks may be passed beside it.
    """

    query: Index | None = None
    key: Index | None = None
    held: Index | None = None
    names: tuple[str, str] = ("", "")
    layout: str = ""
    back: Index | None = None
    prepared: bool = False
    masks: bool = False

    @property
    def program(self) -> Hashable:
        """What a compiled program depends on."""
        arrays = (self.query, self.key, self.held, self.back)
        moves = tuple(None if a is None else (a.shape, a.tobytes()) for a in arrays)
        return (*moves, self.names, self.layout, self.prepared)

    def hand(
        self, bridge: Framework, layout: str, heads: Natives, cached: Any, device: str
    ) -> tuple[Natives, Natives]:
        """Return query, key and value as they are passed, and the further arguments.

        Args:
            bridge: the framework of the arrays.
            layout: the layout of the heads.
            heads: query, key and value.
            cached: the keys as they are held in a cache.
            device: the kind of device.
        """
        passed: Natives = dict(heads)
        more: Natives = {}
        tokens = {
            name: einops.rearrange(array, f"{layout} -> {TOKENS}") for name, array in heads.items()
        }
        tokens["cached"] = einops.rearrange(cached, f"{layout} -> {TOKENS}")

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
        """Return the result with its tokens where those of the queries were, 0 where none was."""
        if self.back is None:
            return context
        rows = _taken(bridge, context, self.back.ravel(), 0.0, device)
        return _batched(rows, layout, self.back.shape[0])


class Handing(Feature):
    """The base class of declarations of how queries, keys and values are handed over."""

    says: ClassVar[tuple[str, ...]] = ("handing",)
    only: bool = False


@dataclass(frozen=True)
class Packed(Handing):
    """The tokens of all sequences one after another, `[token heads head]`, without padding.

    The sequences are the entries of the batch up to their lengths, or the segments in them. In a
    second encoding, a sequence without tokens follows the first.

    Args:
        query_offsets: the name of the argument `[sequence + 1]` that holds where the queries of
            each sequence begin, and where those of the last one end.
        key_offsets: likewise, of the keys.
        longest_query: the name of the argument for the greatest number of queries, or "".
        longest_key: likewise, of keys.
        slack: how many tokens that belong to no sequence are behind the last one; they are NaN.
        only: whether there is no other way to hand them over.
        dtype: the integer dtype of the offsets.
    """

    query_offsets: str = "cu_seqlens_q"
    key_offsets: str = "cu_seqlens_k"
    longest_query: str = ""
    longest_key: str = ""
    slack: int = 0
    only: bool = False
    dtype: str = "int32"

    def __post_init__(self) -> None:
        check_dtype(self.query_offsets, self.dtype, ("int32", "int64"))
        if self.slack < 0:
            raise WrongDeclaration(f"packed: slack={self.slack} is no number of tokens")

    @property
    def names(self) -> tuple[str, ...]:
        named = (self.query_offsets, self.key_offsets, self.longest_query, self.longest_key)
        return tuple(name for name in named if name)

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
        """Return the arguments for these sequences, each of its queries and of its keys."""
        shape = problem.shape
        queries, keys = ([member[side] for member in members] for side in (0, 1))
        longest = [max(map(len, side), default=0) for side in (queries, keys)]
        arguments: dict[str, Value] = {
            name: np.cumsum([0, *map(len, side)]).astype(self.dtype)
            for name, side in ((self.query_offsets, queries), (self.key_offsets, keys))
        }
        for name, most in zip((self.longest_query, self.longest_key), longest, strict=True):
            arguments |= {name: most} if name else {}
        slack = np.full(self.slack, -1)
        taken = [np.concatenate([*side, slack]).astype(np.int64) for side in (queries, keys)]
        back = np.full(shape.batch * shape.query_length, -1)
        used = len(taken[0]) - self.slack
        back[taken[0][:used]] = np.arange(used)
        moved = Moved(
            query=taken[0], key=taken[1], back=back.reshape(shape.batch, shape.query_length)
        )
        done = said.saying("handing", "key lengths", "query lengths", "segments", **arguments)
        return replace(done, handing=moved, stands=_ranks(problem, members))


@dataclass(frozen=True)
class Pages(Handing):
    """Keys and values in pages of `size` tokens, which a table `[batch page]` puts in order.

    Args:
        table: the name of the argument that holds the number of each page of an entry.
        lengths: the name of the argument `[batch]` for the number of keys of each entry.
        key: the name of the argument that holds the pages of keys; "key" if they take its place.
        value: likewise, of values.
        size: the number of tokens in a page.
        layout: the layout of the pages.
        prepared: whether the keys in them have been normed and rotated already, as in most.
        only: whether there is no other way to hand them over.
        dtype: the integer dtype of table and lengths.
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

    def __post_init__(self) -> None:
        known = Literal["page token heads head", "page heads token head"]
        check_field(self.table, layout=(self.layout, known))
        check_dtype(self.table, self.dtype, ("int32", "int64"))
        if self.size < 1:
            raise WrongDeclaration(f"{self.table}: a page of {self.size} tokens")

    @property
    def page(self) -> int:
        return self.size

    @property
    def names(self) -> tuple[str, ...]:
        return (self.table, self.lengths)

    @property
    def covers(self) -> tuple[str, ...]:
        return (*self.says, "key lengths")

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        shape = problem.shape
        lengths = problem.key_lengths
        lengths = np.full(shape.batch, shape.key_length) if lengths is None else lengths
        needed = -(-lengths // self.size)
        # One page more than needed, which belongs to nobody, fills the table.
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
        arguments: dict[str, Value] = {
            self.table: table.astype(self.dtype), self.lengths: lengths.astype(self.dtype)
        }  # fmt: skip
        done = said.saying("handing", "key lengths", **arguments)
        yield replace(done, handing=moved, keys=lengths)


@dataclass(frozen=True)
class Cache(Handing):
    """Keys and values of tokens before the queries, which earlier calls have left in a cache.

    Problems whose causal mask is aligned at the end are handed over so: there the last keys, as
    many as there are queries, are new.

    Args:
        key: the name of the argument that holds the keys of the cache.
        value: likewise, of the values.
        lengths: the name of the argument `[batch]` for how much of the cache is used in each entry;
            "" if all of it is.
        counts: what `lengths` counts: the keys that are in the cache, those and the new ones
            ("total"), or the index of the last new one ("last index").
        prepared: whether its keys have been normed and rotated already, as in most of them.
        spare: how many places of the cache are free behind the new keys, if there are lengths.
        ring: whether places are used again, under a window: the key at position p lies at p modulo
            the number of places, of which there are as many as the window shows before a query and
            new keys.
        only: whether there is no other way to hand them over.
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

    def __post_init__(self) -> None:
        if self.ring and not self.lengths:
            raise WrongDeclaration(f"{self.key}: a ring needs lengths")
        check_field(self.key, counts=(self.counts, Literal["cached", "total", "last index"]))
        check_dtype(self.key, self.dtype, ("int32", "int64"))

    @property
    def names(self) -> tuple[str, ...]:
        return (self.key, self.value, *([self.lengths] if self.lengths else []))

    @property
    def covers(self) -> tuple[str, ...]:
        return (*self.says, *(["key lengths"] if self.lengths else []))

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        shape, lengths = problem.shape, problem.key_lengths
        if problem.causal != "bottom-right" or problem.segments or problem.positions:
            return
        if problem.query_lengths is not None or (lengths is not None and not self.lengths):
            return
        totals = np.full(shape.batch, shape.key_length) if lengths is None else lengths
        cached, new = totals - shape.query_length, shape.query_length
        if (cached < 0).any() or not cached.any():
            return
        places = int(cached.max()) + ((new + self.spare) if self.lengths else 0)
        start = np.arange(shape.batch)[:, None] * shape.key_length
        column = np.arange(places)
        held = np.where(column < cached[:, None], start + column, -1)
        if self.ring:
            before = problem.window[0]
            if before is None:
                return
            held = _wrapped(cached, before + new)
            held = np.where(held < 0, -1, start + held)
            places = held.shape[1]
        moved = Moved(
            key=start + cached[:, None] + np.arange(new),
            held=held,
            names=(self.key, self.value),
            prepared=self.prepared,
            masks=not self.lengths,
        )
        counted = {"cached": cached, "total": totals, "last index": totals - 1}[self.counts]
        arguments = {self.lengths: counted.astype(self.dtype)} if self.lengths else {}
        parts = ("handing", "key lengths") if self.lengths else ("handing",)
        done = said.saying(*parts, **arguments)
        labels = (*said.labels, f"{self.key}=[{places} places]", *done.labels[len(said.labels) :])
        yield replace(done, labels=labels, handing=moved, stands=_behind(problem, cached))


def _wrapped(cached: np.ndarray, places: int) -> Index:
    """Return which of the cached keys of each entry lies in which place of a ring; −1 if none."""
    last = cached[:, None] - 1
    found = last - (last - np.arange(places)) % places
    return np.where(found < 0, -1, found)


def _ranks(
    problem: Problem, members: list[tuple[Index, Index]]
) -> Callable[[Causal | None], np.ndarray | None]:
    """Return each key's position minus each query's, both counted in their own sequence."""
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
    """Return each key's position minus that of each query, which follows the cached keys.

    That does not depend on the alignment: there are as many queries as new keys.
    """
    queries = cached[:, None] + np.arange(problem.shape.query_length)
    return lambda alignment: np.arange(problem.shape.key_length) - queries[:, :, None]


def turns_of(rotary: Rotary, size: int, positions: np.ndarray) -> np.ndarray:
    """Return the matrix that rotates a head of this size at each position, `[... head head]`."""
    half = rotary.size // 2
    one, other = np.arange(half), half + np.arange(half)
    if rotary.pairs == "interleaved":
        one, other = 2 * np.arange(half), 2 * np.arange(half) + 1
    angles = positions[..., None] * float(rotary.base) ** (-2 * np.arange(half) / rotary.size)
    turns = np.zeros((*positions.shape, size, size)) + np.eye(size)
    turns[..., one, one] = turns[..., other, other] = np.cos(angles)
    turns[..., one, other] = np.sin(angles)
    turns[..., other, one] = -np.sin(angles)
    return turns


def _members(problem: Problem) -> Iterator[tuple[Index, Index]]:
    """Yield the tokens of each sequence, of its queries and of its keys."""
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
    """Return `[token heads head]` taken from such an array; `unused` where the index is −1."""
    count = tokens.shape[0]
    if (index < 0).any():
        row = np.full((1, *tokens.shape[1:]), unused)
        row = bridge.array(row, bridge.dtype(tokens), device)
        tokens, _ = einops.pack([tokens, row], "* heads head")
    return bridge.take(tokens, np.where(index < 0, count, index))


def _batched(tokens: Any, layout: str, batch: int) -> Any:
    return einops.rearrange(tokens, f"{TOKENS} -> {layout}", batch=batch)
