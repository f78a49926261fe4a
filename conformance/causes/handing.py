"""Known defects in reading packed sequences, pages and caches.

Which tokens a query reads follows from offsets, a page table, or the length of a cache. With most
defects, queries read the wrong tokens. The suite arranged the memory, so it knows which tokens they
read with each defect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from conformance.adapter.arguments import Spelling
from conformance.adapter.base import Adapter
from conformance.adapter.handing import Cache, Handing, Packed, Pages
from conformance.causes.features import misread_lengths, rotated_at
from conformance.causes.hypothesis import (
    CHUNKS,
    MOST_ELEMENTS,
    NO_MORE,
    TILES,
    About,
    Evidence,
    Hypothesis,
    Maker,
)
from conformance.causes.stages import Change, Stages
from conformance.definition.dtypes import Array, BoolArray, IntArray
from conformance.definition.problem import Problem, within
from conformance.errors import Unsupported
from conformance.records.findings import Phrase

PARTS = (("key", "value"), ("value",), ("key",))
"""The sets of inputs that a mistake may affect."""


@dataclass(frozen=True)
class HandedTokens:
    """How tokens were passed: the declaration of their storage, and the encoding that was used."""

    declared: Handing
    spelling: Spelling

    @classmethod
    def of(
        cls, adapter: Adapter, problem: Problem, spelling: Spelling | None = None
    ) -> HandedTokens | None:
        """Return how an encoding passes tokens, or None if inputs are passed unchanged.

        If `spelling` is None, the encoding is the one that the adapter prefers. The result is also
        None if the adapter cannot pass the problem, or declares no storage with these arguments.
        """
        handings = [one for one in adapter.features if isinstance(one, Handing)]
        if not handings:
            return None
        try:
            spelling = adapter.masks.handed(spelling or adapter.masks.spell(problem), problem)
        except Unsupported:
            return None
        moved = spelling.handing
        if moved is None:
            return None
        for declared in handings:
            if set(declared.names) <= {*spelling.arguments, *moved.names}:
                return cls(declared, spelling)
        return None

    def tokens(self, what: Literal["query", "key", "held"]) -> IntArray:
        """Return the index of the token at each place of a rearranged array; −1 for no token.

        `what` is "query" for queries, "key" for keys and values that are passed as such, and "held"
        for those in pages or in a cache.
        """
        assert self.spelling.handing is not None
        found: IntArray | None = getattr(self.spelling.handing, what)
        assert found is not None
        return found

    def argument(self, name: str) -> IntArray:
        """Return the value of the integer argument `name`, such as offsets or a page table."""
        return np.asarray(self.spelling.arguments[name], np.int64)

    @property
    def has_unused(self) -> bool:
        """Whether some of the memory holds no token and is filled with NaN."""
        moved = self.spelling.handing
        assert moved is not None
        places = (moved.query, moved.key, moved.held)
        return any(at is not None and bool((at < 0).any()) for at in places)

    def stored(self, problem: Problem) -> tuple[str, BoolArray]:
        """Return the name of a group of tokens whose gradients may be lost, and a mask for them.

        The group is the last packed sequence, the tokens in all but the first page of each batch
        entry, or the tokens in the cache. The mask is `[batch key]`, True for tokens of the group.
        """
        shape = problem.shape
        if isinstance(self.declared, Packed):
            first, last = self.argument(self.declared.key_offsets)[-2:]
            name, tokens = "last-sequence", self.tokens("key")[first:last]
        elif isinstance(self.declared, Pages):
            later = self.argument(self.declared.table)[:, 1:]
            name, tokens = "later-pages", self.tokens("held")[later]
        else:
            name, tokens = "cache", self.tokens("held")
        # Places that hold no token have the index −1, which is the last element here.
        inside = np.zeros(shape.batch * shape.key_length + 1, np.bool_)
        inside[tokens] = True
        return name, inside[:-1].reshape(shape.batch, -1)


@dataclass(frozen=True)
class QueryRun:
    """Queries that read the same keys.

    Attributes:
        queries: the indices of the queries, counted over the whole batch.
        keys: the indices of the keys, in the order in which they are read; −1 means memory that
            holds no token.
        values: the indices of the values, in the same order; −1 has the same meaning.
        first: the position of the first query among the keys that are read.
        ahead: the position of each key minus that of each query, `[query key]`; None if the keys
            have consecutive positions.
        seen: a further mask, True where the query attends to the key, broadcastable to
            `[query key]`.
    """

    queries: IntArray
    keys: IntArray
    values: IntArray
    first: int = 0
    ahead: IntArray | None = None
    seen: Any = True

    def distances(self) -> IntArray:
        """Return the position of each key minus that of each query, `[query key]`."""
        in_order = np.arange(len(self.keys)) - np.arange(len(self.queries))[:, None] - self.first
        return in_order if self.ahead is None else self.ahead


def read(a: Stages, runs: Iterable[QueryRun]) -> Array:
    """Return the context that results if queries read the keys of their runs.

    The context is `[batch heads query value_head]`. It is 0 for queries that are in no run or read
    no keys, and −∞ for queries that attend to memory without a token.
    """
    shape, problem = a.shape, a.problem
    # The last row stands for memory that holds no token.
    flat = {
        name: np.pad(
            heads.transpose(0, 2, 1, 3).reshape(-1, shape.heads, heads.shape[-1]),
            [(0, 1), (0, 0), (0, 0)],
        )
        for name, heads in (
            ("query", a.projected["query"]),
            ("key", a.repeat(a.projected["key"], "key")),
            ("value", a.repeat(a.projected["value"], "value")),
        )
    }
    found = np.zeros((len(flat["query"]) - 1, shape.heads, flat["value"].shape[-1]))
    for run in runs:
        if not (len(run.keys) and len(run.queries)):
            continue
        scores = np.einsum("qhd,khd->hqk", flat["query"][run.queries], flat["key"][run.keys])
        distances, logits = run.distances(), a.capped(a.scaled(scores))
        if problem.slopes is not None:
            logits = logits - problem.slopes[:, None, None] * np.abs(distances)
        if problem.attn_bias is not None:
            logits = logits + _beside(problem, problem.attn_bias, run, 0.0)
        seen = within(problem.window, distances) & run.seen
        if problem.causal is not None:
            seen = seen & (distances <= 0)
        if problem.mask is not None:
            seen = seen & _beside(problem, problem.mask, run, True)
        weights = a.softmax(np.where(seen, logits, -np.inf)[None])[0]
        context = np.einsum("hqk,khd->qhd", weights, flat["value"][run.values])
        unused = (seen & ((run.keys < 0) | (run.values < 0))).any(axis=-1)
        context[np.broadcast_to(unused, weights.shape[:2]).T] = -np.inf
        found[run.queries] = context
    return found.reshape(shape.batch, -1, *found.shape[1:]).transpose(0, 2, 1, 3)


def _beside(problem: Problem, array: Array | BoolArray, run: QueryRun, rest: float | bool) -> Any:
    """Return the part of a mask or bias that applies to a run, `[heads query key]`.

    Column i of the array applies to the i-th key that the run reads. If the run reads more keys
    than the array has columns, further columns with the value `rest` are appended.
    """
    shape = problem.shape
    whole = np.broadcast_to(array, shape.logits)
    more = max(0, len(run.keys) - shape.key_length)
    whole = np.pad(whole, [(0, 0)] * 3 + [(0, more)], constant_values=rest)
    rows = whole[run.queries // shape.query_length, :, run.queries % shape.query_length]
    return rows.transpose(1, 0, 2)[..., : len(run.keys)]


def names_of(of: tuple[str, ...]) -> About:
    """Return the arguments of a cause that say whether keys, values or both are affected."""
    return {"of": Phrase(f"handing.{'-and-'.join(of)}")}


def hypotheses(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses about reading a packed batch, pages or a cache, the simplest first.

    Nothing is yielded for a large problem or for one with explicit positions.
    """
    problem, handed = maker.problem, maker.handed
    if np.prod(problem.shape.logits) > MOST_ELEMENTS or problem.positions is not None:
        return
    if handed is None:
        ragged = (problem.query_lengths, problem.key_lengths, problem.segments)
        if problem.causal == "bottom-right" and all(each is None for each in ragged):
            yield from _in_chunks(maker)
    elif isinstance(handed.declared, Packed):
        yield from _packed(maker, handed, handed.declared)
    elif isinstance(handed.declared, Pages):
        yield from _pages(maker, handed, handed.declared)
    elif isinstance(handed.declared, Cache):
        yield from (_ring if handed.declared.ring else _cache)(maker, handed)


def _reads(
    maker: Maker, cause: str, runs: Iterable[QueryRun], about: About = NO_MORE, **more: Any
) -> Hypothesis:
    known = list(runs)
    return maker.staged(cause, about, mix=lambda a, w, v: read(a, known), **more)


# Packed sequences

Span = Callable[..., tuple[int, int]]
"""A function that returns the bounds of the keys that are read for a packed sequence.

It takes the index of the sequence and the right bounds of its keys.
"""


def _packed(maker: Maker, handed: HandedTokens, declared: Packed) -> Iterator[Hypothesis]:
    bottom = maker.problem.causal == "bottom-right"
    tokens_of_queries, tokens = handed.tokens("query"), handed.tokens("key")
    q_at = handed.argument(declared.query_offsets).tolist()
    k_at = handed.argument(declared.key_offsets).tolist()
    last = len(q_at) - 2

    def taken(span: tuple[int, int]) -> IntArray:
        return tokens[max(span[0], 0) : max(*span, 0)]

    def runs(
        keys: Span, values: Span | None = None, starts: list[int] = q_at
    ) -> Iterator[QueryRun]:
        for n, (first, stop) in enumerate(pairwise(starts)):
            of_keys, of_values = (
                taken(span(n, k_at[n], k_at[n + 1])) for span in (keys, values or keys)
            )
            if len(of_keys) == len(of_values):
                at = len(of_keys) - (stop - first) if bottom else 0
                yield QueryRun(tokens_of_queries[first:stop], of_keys, of_values, at)

    whole = tokens[: k_at[-1]]
    at = len(whole) - q_at[-1] if bottom else 0
    in_one = QueryRun(tokens_of_queries[: q_at[-1]], whole, whole, at)
    yield _reads(maker, "packed.offsets-ignored", [in_one])

    def right(n: int, first: int, stop: int) -> tuple[int, int]:
        return first, stop

    of_queries: tuple[Span, Span] = (
        lambda n, i, j: (q_at[n], q_at[n + 1]),
        lambda n, i, j: (q_at[n], q_at[n] + j - i),
    )
    for span in of_queries if q_at != k_at else ():
        cause = "packed.offsets-of-queries"
        yield _reads(maker, cause, runs(span), names_of(("key", "value")))
        yield _reads(maker, cause, runs(right, span), names_of(("value",)))
    ends: list[tuple[str, Span]] = [
        ("packed.begin-one-late", lambda n, i, j: (i + 1, j)),
        ("packed.begin-one-late", lambda n, i, j: (min(i + (n > 0), j), j)),
        ("packed.begin-one-early", lambda n, i, j: (i - 1, j)),
        ("packed.end-one-late", lambda n, i, j: (i, j + 1)),
        ("packed.end-one-early", lambda n, i, j: (i, max(i, j - 1))),
        ("packed.last-key-unread", lambda n, i, j: (i, max(i, j - (n == last)))),
    ]
    for cause, span in ends:
        yield _reads(maker, cause, runs(span))
    kept = [n for n in range(last + 1) if q_at[n] < q_at[n + 1]]
    if len(kept) <= last:
        starts = [*(q_at[n] for n in kept), q_at[-1]]
        yield _reads(maker, "packed.empty-left-out", runs(right, starts=starts))
    yield _reads(maker, "packed.last-left-out", list(runs(right))[:-1])
    if maker.problem.causal is None:
        # With a causal mask, this equals a causal mask that is aligned top-left.
        most = max(np.diff(q_at), default=0)
        fewer = runs(lambda n, i, j: (i, min(j, i + most)))
        yield _reads(maker, "packed.as-many-keys-as-queries", fewer)
    for size in TILES:
        tiled = runs(lambda n, i, j, size=size: (i, i + -(-(j - i) // size) * size))
        yield _reads(maker, "packed.in-tiles", tiled, {"size": size})


# Pages


def _pages(maker: Maker, handed: HandedTokens, declared: Pages) -> Iterator[Hypothesis]:
    problem, pages = maker.problem, handed.tokens("held")
    table, lengths = handed.argument(declared.table), handed.argument(declared.lengths)
    queries = problem.shape.query_length

    def runs(keys: IntArray, values: IntArray, used: IntArray) -> Iterator[QueryRun]:
        for entry, length in enumerate(used):
            of_keys, of_values = (
                pages[numbers[entry] % len(pages)].ravel()[: max(length, 0)]
                for numbers in (keys, values)
            )
            counted = queries if problem.query_lengths is None else problem.query_lengths[entry]
            at = len(of_keys) - int(counted) if problem.causal == "bottom-right" else 0
            yield QueryRun(entry * queries + np.arange(queries), of_keys, of_values, at)

    size, index = declared.size, np.arange(table.shape[1])
    for cause, other in misread_lengths(lengths):
        yield _reads(maker, cause, runs(table, table, other), {"of": "key"})
    for cause, other in (
        ("lengths.in-full-tiles", np.maximum(lengths // size * size, 1)),
        ("lengths.in-tiles", -(-lengths // size) * size),
    ):
        yield _reads(maker, cause, runs(table, table, other), {"of": "key", "size": size})
    used, is_last = index < -(-lengths // size)[:, None], index == len(index) - 1
    ascending = np.sort(np.where(used, table, len(pages)), axis=1)
    tables = [
        ("pages.of-first-entry", np.broadcast_to(table[:1], table.shape)),
        ("pages.of-other-entry", np.roll(table, 1, axis=0)),
        ("pages.of-other-entry", np.roll(table, -1, axis=0)),
        ("pages.in-order", np.arange(table.size).reshape(table.shape)),
        ("pages.from-the-first", table[:, :1] + index),
        ("pages.first-again", np.broadcast_to(table[:, :1], table.shape)),
        ("pages.stale", np.where(is_last, np.roll(table, 1, axis=0), table)),
        ("pages.stale", np.where(is_last, np.roll(table, -1, axis=0), table)),
        ("pages.sorted", np.where(used, ascending, table)),
        ("pages.sorted", np.sort(table, axis=1)),
        ("pages.from-the-end", table[:, ::-1]),
    ]
    for of in PARTS:
        for cause, other in tables:
            keys, values = (other if side in of else table for side in ("key", "value"))
            yield _reads(maker, cause, runs(keys, values, lengths), names_of(of))


# A cache beside new keys


def _cache(maker: Maker, handed: HandedTokens) -> Iterator[Hypothesis]:
    problem, held, new = maker.problem, handed.tokens("held"), handed.tokens("key")
    queries = problem.shape.query_length
    cached = new[:, 0] - np.arange(len(new)) * problem.shape.key_length
    neighbour, count = np.roll(np.arange(len(new)), 1), len(new)

    def usual(e: int) -> IntArray:
        return held[e, : cached[e]]

    def runs(
        past: Callable[..., IntArray], of: tuple[str, ...] = PARTS[0], *, behind: bool = False
    ) -> Iterator[QueryRun]:
        for entry in range(count):
            right, wrong = (usual(entry), new[entry]), (past(entry), new[entry])
            wrong = wrong[::-1] if behind else wrong
            keys, values = (
                np.concatenate(wrong if side in of else right) for side in ("key", "value")
            )
            if len(keys) == len(values):
                at = len(keys) - queries
                yield QueryRun(entry * queries + np.arange(queries), keys, values, at)

    top_left = [replace(run, first=0) for run in runs(usual)]
    yield _reads(maker, "causal.aligned", top_left, {"alignment": "top-left"})
    yield _reads(maker, "cached.forgotten", runs(lambda e: held[e, :0]))
    pasts: dict[str, Callable[[int], IntArray]] = {
        "cached.of-first-entry": lambda e: held[0, : cached[e]],
        "cached.of-other-entry": lambda e: held[neighbour[e], : cached[e]],
        "cached.last-overwritten": lambda e: np.r_[usual(e)[:-1], new[e, : min(1, cached[e])]],
        "cached.read-one-late": lambda e: held[e, 1 : cached[e] + 1],
    }
    for of in PARTS:
        for cause, past in pasts.items():
            yield _reads(maker, cause, runs(past, of), names_of(of))
        yield _reads(maker, "cached.behind-new", runs(usual, of, behind=True), names_of(of))

    def moved(by: IntArray, *sides: str) -> Change:
        """Return a rotary stage that adds `by`, `[batch]`, to the positions of new tokens.

        `sides` says whose positions are changed: "query" or "key"; if it is empty, both are.
        """
        first = cached[:, None]
        return rotated_at(lambda p: np.where(p >= first, p + by[:, None], p), *sides)

    def again(once: Change, twice: Change) -> Change:
        """Return a stage that applies `once` to all heads, then `twice` to keys in the cache."""
        stored = (np.arange(problem.shape.key_length) < cached[:, None])[:, None, :, None]

        def change(a: Stages, side: str, x: Array) -> Array:
            done: Array = once(a, side, x)
            return done if side == "query" else np.where(stored, twice(a, side, done), done)

        return change

    for cause, other in (
        ("cached.one-fewer", np.maximum(cached - 1, 0)),
        ("cached.one-more", cached + 1),
        ("cached.length-of-other-entry", cached[neighbour]),
        ("cached.length-of-other-entry", np.roll(cached, -1)),
        ("cached.length-of-first-entry", 0 * cached + cached[0]),
    ):
        read = [*runs(lambda e, other=other: held[e, : other[e]])]
        yield _reads(maker, cause, read)
        if problem.rotary is not None:
            # New tokens are rotated by the positions that follow from the wrong length.
            yield _reads(maker, cause, read, rotated=moved(other - cached))
    if problem.rotary is not None:
        yield maker.staged("rotary.new-from-0", rotated=moved(-cached))
        for cause, behind in (
            ("rotary.new-as-in-first-entry", cached[0]),
            ("rotary.new-behind-longest", cached.max()),
        ):
            yield maker.staged(cause, rotated=moved(behind - cached))
        yield maker.staged("rotary.new-keys-one-late", rotated=moved(0 * cached + 1, "key"))
        yield maker.staged("rotary.keys-twice", rotated=again(Stages.rotated, Stages.rotated))
    if problem.norm is not None:
        yield maker.staged("norm.keys-twice", prepared=again(Stages.prepared, Stages.normed))


def _ring(maker: Maker, handed: HandedTokens) -> Iterator[Hypothesis]:
    problem, held, new = maker.problem, handed.tokens("held"), handed.tokens("key")
    queries = problem.shape.query_length
    cached, places = new[:, 0] - np.arange(len(new)) * problem.shape.key_length, held.shape[1]
    column = np.arange(places)

    def runs(
        place: Callable[[IntArray], IntArray] = lambda p: p % places,
        *,
        by_place: bool = False,
        all_seen: bool = False,
    ) -> Iterator[QueryRun]:
        for entry, past in enumerate(cached):
            memory, last = held[entry].copy(), past + queries - 1
            memory[place(past + np.arange(queries))] = new[entry]
            positions = last - (last - column) % places
            there = positions >= 0
            ahead = (column if by_place else positions) - past - np.arange(queries)[:, None]
            ahead = 0 * ahead if all_seen else ahead
            read_in = np.where(there, memory, -1)
            rows = entry * queries + np.arange(queries)
            yield QueryRun(rows, read_in, read_in, ahead=ahead, seen=there)

    late = runs(lambda p: np.where(p < places, p, p % places + 1) % places)
    yield _reads(maker, "ring.not-wrapped", runs(lambda p: np.minimum(p, places - 1)))
    yield _reads(maker, "ring.one-late", late)
    yield _reads(maker, "ring.one-late", runs(lambda p: (p + 1) % places))
    yield _reads(maker, "ring.one-early", runs(lambda p: (p - 1) % places))
    yield _reads(maker, "ring.by-place", runs(by_place=True))
    yield _reads(maker, "ring.all-seen", runs(all_seen=True))


def _in_chunks(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses about an implementation that maintains its cache of keys and values itself.

    Nothing is yielded unless there are more keys than queries.
    """
    shape = maker.problem.shape
    queries, keys = shape.query_length, shape.key_length
    past = keys - queries
    if past < 1:
        return

    def runs(size: int, *, of: tuple[str, ...] = (), over: bool = False) -> Iterator[QueryRun]:
        """Yield a run for each chunk of `size` queries of each batch entry.

        For the inputs in `of` ("key", "value"), the tokens before the chunk are read from the first
        batch entry. If `over` is true, each chunk overwrites the tokens of the first chunk.
        """
        for entry in range(shape.batch):
            own = entry * keys + np.arange(keys)
            for start in range(past, keys, size):
                stop = min(start + size, keys)
                memory = own[:stop].copy()
                for before in range(past, stop, size) if over else ():
                    memory[before : before + size] = -1
                    written = own[before : min(before + size, stop)]
                    memory[past : past + len(written)] = written
                of_keys, of_values = (
                    np.r_[np.arange(start), memory[start:]] if side in of else memory
                    for side in ("key", "value")
                )
                rows = entry * queries + np.arange(start - past, stop - past)
                yield QueryRun(rows, of_keys, of_values, start)

    for size in (*(n for n in CHUNKS if n < queries), queries):
        if size < queries:
            yield _reads(maker, "cache.overwritten", runs(size, over=True), {"size": size})
        for of in PARTS:
            yield _reads(maker, "cached.of-first-entry", runs(size, of=of), names_of(of))


# Memory that holds no token


def all_nan(maker: Maker, wrong: Iterable[Evidence]) -> bool:
    """Return whether there is unused memory, and all wrong elements of the arrays are NaN."""
    there = maker.handed is not None and maker.handed.has_unused
    return there and all(bool(np.isnan(one.got[one.wrong]).all()) for one in wrong)
