"""Mistakes of ports, which nobody declares: what was not told, and arrays that are misread.

An adapter declares its features and its layout, so these hypotheses are tried for arrays only. Each
is a `Hypothesis` like those of `conformance.causes`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from conformance.arrays.given import merged, separate
from conformance.cases.patterns import alibi_slopes
from conformance.causes.hypothesis import (
    PREPARING,
    About,
    Hypothesis,
    Maker,
)
from conformance.causes.stages import Change, Stages
from conformance.definition.dtypes import Array, BoolArray, IntArray
from conformance.definition.features import ARRAYS, NO_RULES, drafted, with_arrays, within_tree
from conformance.definition.problem import (
    NO_WINDOW,
    Norm,
    Positions,
    Problem,
    Rotary,
    Shape,
    identities,
)
from conformance.definition.rotary import RotaryScaling
from conformance.records.findings import Phrase

BASES = (10000.0, 100000.0, 500000.0, 1000000.0)
"""The bases of rotary embeddings that models use."""

FIRST_KEYS = (1, 2, 4, 8, 16)
"""How many first tokens stay visible beside a window in models that stream."""

SCALINGS = (
    *(RotaryScaling(rope_type="linear", factor=float(2**n)) for n in range(1, 6)),
    *(
        RotaryScaling(
            rope_type="llama3",
            factor=factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        )
        for factor in (8.0, 32.0)
    ),
)
"""Scalings of rotary frequencies that models have."""

WINDOWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""The windows that models use, in keys that count the query's own."""

MOST_KEYS = 512
"""The keys up to which every 64th may be the first that repeats the one before it."""

PARTS_OF_HEADS = (16, 32, 64, 128)
"""The numbers of rotated components that heads have beside others, as in MLA."""

EPSILONS = (1e-8, 1e-5, 1e-4, 1e-3, 1e-2)
"""Numbers that models and their ports add to the mean square in a norm, besides the usual 1e-6."""


def hypotheses(maker: Maker) -> Iterator[Hypothesis]:
    """Yield the hypotheses, the simplest first."""
    yield from _exchanged(maker)
    yield from _untold(maker)
    yield from _misread(maker)
    yield from _stale(maker)


def _untold(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses in which a feature is there that was not told."""
    problem, shape = maker.problem, maker.problem.shape
    queries, keys = maker.queries, shape.key_length
    # All rows of a few queries may be chosen, too, and have positions then.
    chosen = maker.chosen
    positions = None
    if queries != keys and problem.causal is None and (chosen or problem.positions is None):
        positions = Positions(
            query=(maker.rows + keys - queries)[None] + np.zeros((shape.batch, 1), int),
            key=np.arange(keys)[None] + np.zeros((shape.batch, 1), int),
        )
    # Rows that were chosen have positions, which no alignment changes.
    at_end: dict[str, Any] = {"positions": positions} if chosen and positions is not None else {}
    if problem.causal is None and keys > 1:
        if queries == keys:
            # There is one alignment only.
            yield maker.asked("untold.causal", causal="bottom-right", **at_end)
        else:
            name, about = "untold.causal-aligned", {"alignment": "bottom-right"}
            yield maker.asked(name, {**about}, causal="bottom-right", **at_end)
            yield maker.asked(name, {"alignment": "top-left"}, causal="top-left")
    if problem.window == NO_WINDOW:
        for size in WINDOWS:
            if size < keys:
                yield maker.asked(
                    "untold.window",
                    {"size": size},
                    causal=problem.causal or "bottom-right",
                    window=(size - 1, 0),
                    **at_end,
                )
    if problem.chunk is None:
        for size in WINDOWS:
            if size < keys:
                chunks: dict[str, Any] = {"causal": problem.causal or "bottom-right", "chunk": size}
                yield maker.asked("untold.chunk", {"size": size}, **chunks)
    if problem.rotary is None and shape.head_size % 2 == 0:
        for pairs in ("halves", "interleaved"):
            for base in BASES:
                yield maker.asked(
                    "untold.rotary",
                    {"pairs": pairs, "base": base},
                    rotary=Rotary(size=shape.head_size, base=base, pairs=pairs),
                    positions=positions or problem.positions,
                )
    if problem.window[0] is not None:
        bare = problem.replace(window=NO_WINDOW).allowed_in_full()
        for count in FIRST_KEYS:
            # Some keys must be hidden still.
            if count + problem.window[0] + 1 < keys:
                shown = maker.right.allowed | (bare & (np.arange(keys) < count))
                yield maker.masked("window.first-keys-visible", shown, {"count": count})
    if problem.rotary is not None and problem.rotary_scaling is None:
        for scaling in SCALINGS:
            yield maker.asked(
                "untold.rotary-scaling",
                {"kind": scaling.rope_type, "factor": scaling.factor or 1.0},
                rotary_scaling=scaling,
            )
    if problem.rotary is not None:
        for base in BASES:
            if base != problem.rotary.base:
                changed = replace(problem.rotary, base=base)
                yield maker.asked("rotary.base", {"base": base}, rotary=changed)
    if problem.norm is not None:
        for epsilon in EPSILONS:
            norm = replace(problem.norm, epsilon=epsilon)
            yield maker.asked("norm.epsilon", {"epsilon": epsilon}, norm=norm)
    if problem.norm is None:
        ones = np.ones(shape.head_size)
        yield maker.asked("untold.norm", norm=Norm(query=ones, key=ones))
    if problem.sinks is None:
        yield maker.asked("untold.sink-of-0", sinks=np.zeros(shape.heads))


def _exchanged(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses in which two of the inputs change places."""
    problem = maker.problem
    for one, other in (("query", "key"), ("key", "value")):
        a, b = getattr(problem, one), getattr(problem, other)
        if a.shape == b.shape and not np.array_equal(a, b):
            places = {one: b, other: a}
            yield maker.staged(
                "inputs.exchanged",
                {"one": one, "other": other},
                input=lambda s, name, places=places: places.get(name, getattr(s.problem, name)),
            )


def in_few_rows(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses that join heads, so that they are tried in a few rows of everything first.

    They are ALiBi that was not told, and heads of one projection that are told apart otherwise.
    """
    problem, shape = maker.problem, maker.problem.shape
    if problem.slopes is None:
        for causal in dict.fromkeys((problem.causal, problem.causal or "bottom-right")):
            slopes = alibi_slopes(shape.heads)
            yield maker.asked("untold.alibi", slopes=slopes, causal=causal)
    alike = shape.head_size == shape.value_head_size and shape.query_length == shape.key_length
    if not (alike and problem.heads_alone and shape.heads > 1):
        return
    counts = {"query": shape.heads, "key": shape.kv_heads, "value": shape.kv_heads}
    first = np.cumsum([0, *counts.values()])
    by_sides = np.arange(first[-1])
    by_groups = np.concatenate(
        [part.reshape(shape.kv_heads, -1) for part in np.split(by_sides, first[1:-1])], axis=1
    ).ravel()
    sides, groups = Phrase("order.by-sides"), Phrase(f"order.by-{_KINDS[shape.group > 1]}")
    for packed, split, order in (
        (groups, sides, by_groups),
        (sides, groups, np.argsort(by_groups)),
    ):

        def taken_apart(a: Stages, name: str, order: IntArray = order) -> Array:
            heads = [separate(getattr(a.problem, it), count) for it, count in counts.items()]
            at = [*counts].index(name)
            chosen = order[first[at] : first[at + 1]]
            return merged(np.concatenate(heads, axis=1)[:, chosen])

        about: About = {"packed": packed, "split": split}
        yield maker.staged("heads.packed-otherwise", about, input=taken_apart)


_KINDS = ("heads", "groups")
"""How the ids end of the order by heads, without and with groups of query heads."""


def _misread(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses in which the memory of an array is read with other axes."""
    problem, shape = maker.problem, maker.problem.shape

    def reshaped(a: Stages, q: Array, k: Array) -> Array:
        batch, heads, length, size = k.shape
        return np.matmul(q, np.ascontiguousarray(k).reshape(batch, heads, size, length))

    if shape.key_length > 1 and shape.head_size > 1:
        yield maker.staged("key.reshaped", score=reshaped)
    for last in PARTS_OF_HEADS if shape.score == "scaled-dot" else ():
        if last < shape.head_size:

            def rolled(a: Stages, q: Array, k: Array, last: int = last) -> Array:
                return Stages.score(a, q, np.roll(k, last, axis=-1))

            yield maker.staged("key.last-components-first", {"count": last}, score=rolled)
            for cause, kept in (
                ("score.last-components-left-out", slice(-last)),
                ("score.first-components-left-out", slice(last, None)),
            ):

                def partly(a: Stages, q: Array, k: Array, kept: slice = kept) -> Array:
                    return Stages.score(a, q[..., kept], k[..., kept])

                yield maker.staged(cause, {"count": last}, score=partly)
    if shape.group > 1:

        def of_first(a: Stages, context: Array) -> Array:
            return Stages.merge(a, np.repeat(context[:, :: shape.group], shape.group, axis=1))

        yield maker.staged("heads.first-of-group", merge=of_first)
    for of in (("value",), ("key",), ("query",), ("key", "value")):
        for cause, turn in (
            ("layout.tokens-before-heads", _tokens_before_heads),
            ("layout.heads-before-tokens", _heads_before_tokens),
        ):

            def read(
                a: Stages, projected: Array, name: str, of: Any = of, turn: Any = turn
            ) -> Array:
                heads = Stages.split(a, projected, name)
                return turn(heads) if name in of else heads

            if shape.heads > 1 and problem.heads_alone:
                yield maker.staged(cause, {"of": [*of]}, split=read)
    plain = problem.mask is None and problem.attn_bias is None and problem.heads_alone
    if plain and shape.heads > 1 and shape.group == 1 and shape.query_length == shape.key_length:
        swapped = problem.features in ((), ("soft cap",))
        if swapped and shape.query_length != 1:
            among_heads = Phrase("layout.heads-for-tokens")
            yield Hypothesis(among_heads, lambda: _Swapped(problem))


def _tokens_before_heads(heads: Array) -> Array:
    """Return heads whose memory is `[batch length heads head]`, read as with heads first."""
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(heads.shape)


def _heads_before_tokens(heads: Array) -> Array:
    """Return heads whose memory is `[batch heads length head]`, read as with tokens first."""
    batch, count, length, size = heads.shape
    return np.ascontiguousarray(heads).reshape(batch, length, count, size).swapaxes(1, 2)


class _Swapped(Stages):
    """The attention among the heads of each token, whose output has the usual layout."""

    @cached_property
    def output(self) -> Array:
        """The output, `[b q e]`."""
        problem, shape = self.problem, self.shape

        def exchanged(array: Array) -> Array:
            return separate(array, shape.heads).swapaxes(1, 2)

        q, k, v = (exchanged(getattr(problem, name)) for name in ("query", "key", "value"))
        logits = self.capped(self.scaled(np.matmul(q, k.swapaxes(-1, -2))))
        if problem.causal is not None:
            logits = np.where(np.tri(shape.heads, dtype=np.bool_), logits, -np.inf)
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        context = np.matmul(powers / powers.sum(axis=-1, keepdims=True), v)
        return merged(context.swapaxes(1, 2))


def changed(of: Collection[str], change: Callable[[Array], Array]) -> Change:
    """Return the stage `input` in which some of the inputs are changed."""
    return lambda a, name: (
        change(getattr(a.problem, name)) if name in of else getattr(a.problem, name)
    )


def taken(of: Collection[str], at: IntArray) -> Change:
    """Return the stage `input` in which the rows of some inputs are those at other places."""
    return changed(of, lambda array: array[:, at])


def _beginnings(keys: int, queries: int, end: int) -> set[int]:
    """Return the first keys from which on rows may not be written: every 64th before `end`."""
    every = {keys - queries, keys // 2, *range(64, end, 64)}
    return {it for it in every if 0 < it < keys}


def _stale(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses in which rows of keys and values are old, or have not been written."""
    shape = maker.problem.shape
    queries, keys = maker.queries, shape.key_length
    if keys < 2:
        return

    index, named = np.arange(keys), {"score": "key", "mix": "value"}
    for end in sorted(_beginnings(keys, queries, keys) | {keys - 1}):
        told = (
            Phrase("where.key.last", {"at": end})
            if end == keys - 1
            else Phrase("where.key.from", {"first": end})
        )
        for of in (("key", "value"), ("value",), ("key",)):

            def unwritten(array: Array, end: int = end) -> Array:
                return np.where((index < end)[:, None], array, 0.0)

            def score(a: Stages, q: Array, k: Array, end: int = end) -> Array:
                return np.where(index < end, Stages.score(a, q, k), 0.0)

            def mix(a: Stages, w: Array, v: Array, end: int = end) -> Array:
                return Stages.mix(a, w, unwritten(v, end))

            about: About = {"of": [*of], "keys": told}
            stages: dict[str, Any] = {"input": changed(of, unwritten)}
            if maker.problem.heads_alone and "score" not in maker.right.own:
                # Rows of zeros stay zeros, so nothing has to be rotated again.
                stages = {n: it for n, it in (("score", score), ("mix", mix)) if named[n] in of}
            yield maker.staged("cache.rows-not-written", about, **stages)
    first = max(0, keys - queries)
    for of in (("key", "value"), ("value",), ("key",)):
        for cause, at in (
            ("cache.last-row-repeats", np.where(index == keys - 1, keys - 2, index)),
            ("cache.one-row-late", np.maximum(index - 1, 0)),
            ("cache.one-row-early", np.minimum(index + 1, keys - 1)),
            ("cache.rows-one-on", np.roll(index, 1)),
            ("cache.rows-one-back", np.roll(index, -1)),
        ):
            yield maker.staged(cause, {"of": [*of]}, input=taken(of, at))
        for cause, about, at in _repeated(keys, queries):
            yield maker.staged(cause, {"of": [*of], **about}, input=taken(of, at))
        # From the last row on, this is a row of zeros.
        for start in {0, first} - {keys - 1}:

            def shifted(array: Array, start: int = start) -> Array:
                late = array[:, np.where(index > start, index - 1, index)].copy()
                late[:, start] = 0.0
                return late

            begin: About = {"of": [*of], "keys": Phrase("where.key.from", {"first": start})}
            yield maker.staged("cache.written-one-late", begin, input=changed(of, shifted))
        for step in (1, -1) if shape.batch > 1 else ():

            def rolled(array: Array, step: int = step) -> Array:
                return np.roll(array, step, axis=0)

            yield maker.staged("cache.of-next-entry", {"of": [*of]}, input=changed(of, rolled))


def _repeated(keys: int, queries: int) -> Iterator[tuple[str, About, IntArray]]:
    """Yield the ways in which several rows of a cache repeat others.

    Each is the id of a cause, arguments of its phrase, and the index of what is in each row.
    """
    index = np.arange(keys)
    for first in sorted(_beginnings(keys, queries, min(keys, MOST_KEYS))):
        if first < keys - 1:
            about: About = {"keys": Phrase("where.key.from", {"first": first})}
            yield "cache.rows-repeat-one", about, np.minimum(index, first - 1)
    for count in sorted({queries, 2, 3, 4, 5, 8, 16, 32, 64}):
        if 2 <= count <= keys // 2:
            last = np.where(index >= keys - count, index - count, index)
            yield "cache.rows-repeat-those-before", {"count": count}, last


def _heads_of(shape: Shape, group: int, head: int | None) -> slice:
    """Return the query heads that share a key/value head, or one of them."""
    first = group * shape.group
    return slice(first, first + shape.group) if head is None else slice(head, head + 1)


def part(problem: Problem, entry: int, group: int, head: int | None = None) -> Problem:
    """Return the problem of one batch entry and of the query heads that share one key/value head.

    The problem must be on projected heads. If `head` is told, it is the only query head.
    """
    shape = problem.shape
    heads = _heads_of(shape, group, head)
    b = slice(entry, entry + 1)
    size, value = shape.head_size, shape.value_head_size

    def columns(array: Array, of: slice, width: int) -> Array:
        return array[b, :, of.start * width : of.stop * width]

    def cut(array: Array | None) -> Array | None:
        if array is None:
            return None
        array = array[b] if array.shape[0] > 1 else array
        return array[:, heads] if array.shape[1] > 1 else array

    own = slice(group, group + 1)
    small = Shape.of_heads(
        (1, heads.stop - heads.start, shape.query_length, size), (1, 1, shape.key_length, value)
    )
    changes = {name: cut(getattr(problem, name)) for name in ("mask", "attn_bias")}
    first = {"batch": b, "heads": heads}
    changes |= with_arrays(
        problem,
        {n: a[first.get(ARRAYS[n][0], slice(None))] for n, a in problem.feature_arrays().items()},
    )
    return problem.replace(
        shape=small,
        weights=identities(small),
        query=columns(problem.query, heads, size),
        key=columns(problem.key, own, size),
        value=columns(problem.value, own, value),
        cotangent=columns(problem.cotangent, heads, value),
        **changes,
    )


def rows_of(problem: Problem, rows: IntArray) -> Problem:
    """Return the problem of some queries, which keep their positions.

    The problem must be on projected heads.
    """
    shape = problem.shape
    changes: dict[str, Any] = {
        name: None if array is None else array[:, :, rows] if array.shape[2] > 1 else array
        for name, array in (("mask", problem.mask), ("attn_bias", problem.attn_bias))
    }
    if problem.query_lengths is not None:
        used = (rows < problem.query_lengths[:, None])[:, None, :, None]
        mask = changes["mask"]
        changes |= {"query_lengths": None, "mask": used if mask is None else used & mask}
    if problem.tree is not None:
        seen = within_tree(problem.tree, drafted(problem))[:, None, rows]
        mask = changes["mask"]
        changes |= {"tree": None, "mask": seen if mask is None else seen & mask}
    if problem.segments is not None:
        changes["segments"] = replace(problem.segments, query=problem.segments.query[:, rows])
    return problem.replace(
        shape=replace(shape, query_length=len(rows)),
        query=problem.query[:, rows],
        cotangent=problem.cotangent[:, rows],
        positions=Positions(
            query=problem.position_of_queries[:, rows], key=np.array(problem.position_of_keys)
        ),
        **changes,
    )


def prepares_otherwise(stages: Stages) -> bool:
    """Return whether a computation differs from attention at most until its heads are prepared."""
    return type(stages) is Stages and stages.changes.keys() <= PREPARING


def with_rows(stages: Stages, rows: IntArray) -> Stages:
    """Return the computation of some queries, whose heads are prepared among all of them.

    The problem must be on projected heads, and the computation one that `prepares_otherwise`.
    """
    found = Stages(rows_of(stages.problem, rows), **stages.changes)
    heads = stages.projected
    vars(found)["projected"] = {**heads, "query": heads["query"][:, :, rows]}
    return found


def of_seen_keys(problem: Problem) -> Problem:
    """Return the problem of the keys from the first to the last that a query sees.

    The problem must be on projected heads. Tokens keep their positions, and a mask stands for all
    rules.
    """
    allowed = problem.allowed
    if allowed is None:
        return problem
    seen = np.nonzero(np.broadcast_to(allowed, problem.shape.logits).any(axis=(0, 1, 2)))[0]
    keys = slice(seen[0], seen[-1] + 1) if seen.size else slice(0, 1)

    def of_keys(array: Any) -> Any:
        return array if array is None or array.shape[-1] == 1 else array[..., keys]

    positions = Positions(
        query=np.array(problem.position_of_queries), key=problem.position_of_keys[:, keys]
    )
    return problem.replace(
        shape=replace(problem.shape, key_length=keys.stop - keys.start),
        key=problem.key[:, keys],
        value=problem.value[:, keys],
        mask=of_keys(np.array(allowed)),
        attn_bias=of_keys(problem.attn_bias),
        causal=None,
        **{**NO_RULES, "positions": positions},
    )


def cut(
    problem: Problem, array: np.ndarray, entry: int, group: int, head: int | None = None
) -> np.ndarray:
    """Return the part of an array like the output that belongs to the heads of a `part`."""
    width, heads = problem.shape.value_head_size, _heads_of(problem.shape, group, head)
    return array[entry : entry + 1, :, heads.start * width : heads.stop * width]


def empty(problem: Problem) -> BoolArray:
    """Return a mask `[batch heads query]`, True for queries that see no key."""
    return ~problem.sees


def unseen(problem: Problem) -> BoolArray:
    """Return a mask like the output, True for queries that see no key, whose output is open."""
    rows = empty(problem)
    if not problem.heads_alone:
        # The output projection joins the heads.
        rows = np.asarray(rows.any(axis=1, keepdims=True))
    width = problem.shape.output_width // rows.shape[1]
    return merged(np.repeat(rows[..., None], width, axis=-1))


def apart(problem: Problem) -> int:
    """Return how many heads are side by side in the output: 1 if a projection joins them."""
    return problem.shape.heads if problem.heads_alone else 1


ACROSS = (
    "heads.",
    "layout.",
    "softmax.over-heads",
    "softmax.over-batch",
    "softmax.maximum-of-all",
    "softmax.maximum-of-batch-entry",
    "mask.of-first-",
    "mask.of-next-",
    "mask.heads-before-batch",
    "mask.groups-",
    "mask.tiled-",
    "bias.of-first-",
    "inputs.",
    "alibi.",
    "sinks.",
    "norm.over-all-heads",
    "lengths.",
    "segments.of-first-entry",
    "spans.of-first-entry",
    "tree.of-first-entry",
    "rotary.positions-of-first-entry",
    "cache.of-next-entry",
    "scale.by-",
    "projection.",
    "precision.stored-scaled-together",
    "output.",
)
"""How the ids of causes begin that join heads or batch entries, so that no part shows them."""


ACROSS_ROWS = (
    "heads.merged",
    "heads.split",
    "layout.",
    "norm.over-tokens",
    "output.strides",
    "rotary.positions-from-the-end",
    "rotary.positions-reversed",
    "softmax.over-matrix",
    "softmax.over-queries",
)
"""How the ids of causes begin that join queries."""


def joins_queries(cause: Phrase) -> bool:
    """Return whether a mistake joins queries, so that no choice of rows shows it.

    What is laid out otherwise in keys or values only, or inside each token, does not.
    """
    of, axes = cause.parts("of"), str(cause.arguments.get("layout", ""))
    inside = (of and "query" not in of) or axes.startswith("batch length ")
    return cause.id.startswith(ACROSS_ROWS) and not inside
