"""Known defects in masks that have a structure, caps, sinks, ALiBi, rotary positions and norms.

With most of these defects, an implementation interprets a convention differently, or ignores a
feature. Defects that appear when queries are passed in chunks, beside a cache, are here too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial, reduce
from typing import Any

import numpy as np

from conformance.cases.patterns import alibi_slopes, power_within
from conformance.causes.hypothesis import (
    CHUNKS,
    NO_MORE,
    TILES,
    About,
    Hypothesis,
    Maker,
    orders_of_groups,
)
from conformance.causes.stages import Change, Stages, cosine_and_sine
from conformance.definition.dtypes import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Array,
    BoolArray,
    DType,
    IntArray,
)
from conformance.definition.features import (
    LIMITING,
    ancestors,
    drafted,
    global_queries,
    span_of_queries,
    to_or_from,
    within_chunks,
    within_spans,
)
from conformance.definition.problem import (
    NO_WINDOW,
    Pairs,
    Positions,
    Problem,
    Rotary,
    Segments,
    Window,
    within,
)
from conformance.definition.rotary import (
    POSITION_AXES,
    RotaryAxes,
    RotaryScaling,
    Scaled,
    length_of,
)
from conformance.records.findings import Argument, Phrase

USUAL_BASE = 10000.0
BASE_OF_WHOLE, FACTOR_OF_WHOLE = 1e6, 8.0
"""The base and the linear factor of Gemma 3's layers without a window; others are usual."""
USUAL_EPSILON = 1e-6
USUAL_CAPS = (20.0, 30.0, 50.0)
MOST_SPLITS = 8

PARTS_OF_HEADS = (2, 4, 8)
"""The numbers of devices to try that may have a part of the heads each."""


def hypotheses(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses about what is wrong with each feature that the problem has.

    Those about queries in chunks beside a cache, and about windows in whole blocks, come last.
    """
    problem = maker.problem
    if problem.tree is not None:
        yield from _tree(maker, problem.tree)
    if problem.window != NO_WINDOW:
        yield from _window(maker, problem.window)
    if problem.chunk is not None:
        yield from _chunk(maker, problem.chunk)
    if problem.dilation is not None:
        yield from _dilation(maker, problem.dilation)
    if problem.global_tokens is not None:
        yield from _global_tokens(maker, problem.global_tokens)
    if problem.spans is not None and problem.causal is not None:
        yield from _spans(maker, problem.spans)
    if problem.soft_cap is not None:
        yield from _soft_cap(maker, problem.soft_cap)
    if problem.sinks is not None:
        yield from _sinks(maker, problem.sinks)
    if problem.slopes is not None:
        yield from _alibi(maker, problem.slopes)
    if problem.norm is not None:
        yield from _norm(maker)
    if problem.rotary is not None:
        yield from _rotary(maker)
        scaling = problem.rotary_scaling
        if scaling is not None and problem.axes is not None:
            yield from _axes(maker, problem.rotary, scaling, problem.axes)
        if scaling is not None and scaling.rope_type != "default":
            yield from _scaling(maker, problem.rotary, scaling)
    for side in ("key", "query"):
        lengths = getattr(problem, f"{side}_lengths")
        if lengths is not None:
            yield from _lengths(maker, side, lengths)
    if problem.segments is not None:
        yield from _segments(maker, problem.segments)
    ragged = (problem.query_lengths, problem.key_lengths, problem.segments, problem.positions)
    if problem.causal == "bottom-right" and all(each is None for each in ragged):
        yield from _cache(maker)
    if problem.window != NO_WINDOW:
        yield from _window_in_blocks(maker, problem.window)


def _asked(maker: Maker, cause: str, *about: Any, **changes: Any) -> Hypothesis:
    """Return the hypothesis that the answer is right for a problem in which some fields differ.

    `changes` holds these fields. `about` is empty, or one mapping with the arguments of the cause.
    The defect must affect all heads and rows.
    """
    return maker.asked(cause, *about, in_parts=False, **changes)


def _counted(maker: Maker, offset: int | IntArray) -> IntArray:
    """Return the index of each key minus the index of each query, minus an offset.

    With one number as offset, the result is `[1 1 query key]`; with offsets `[batch]`, it is
    `[batch 1 query key]`.
    """
    distance = np.arange(maker.problem.shape.key_length) - maker.rows[:, None]
    return distance - np.reshape(offset, (-1, 1, 1, 1))


def rotated_at(change: Change, *sides: str) -> Change:
    """Return a rotary stage that changes the positions of queries, of keys, or of both.

    `change` maps positions `[batch length]` to other positions. `sides` says whose positions are
    changed: "query" or "key"; if no side is given, both are.
    """
    changed = sides or ("query", "key")

    def rotated(a: Stages, side: str, x: Array) -> Array:
        positions = a.places(side)
        if side in changed:
            # Each axis of several has positions of its own, and all are changed alike.
            axes = positions[..., None] if positions.ndim == 2 else positions
            positions = np.stack([change(it) for it in np.moveaxis(axes, -1, 0)], axis=-1)
            positions = positions[..., 0] if a.problem.axes is None else positions
        return a.turned(x, a.angles(positions))

    return rotated


def _cache(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses about queries passed in chunks, while a cache holds earlier keys."""
    problem = maker.problem
    queries, keys = maker.queries, problem.shape.key_length
    rows, columns, cached = maker.rows[:, None], np.arange(keys), keys - queries
    without = _without(problem, "causal")
    for size in CHUNKS:
        if size >= queries:
            continue
        about = {"size": size}
        top_left = without & (columns <= rows % size)
        yield maker.masked("cache.aligned-top-left", top_left, about)
        start = cached + rows - rows % size
        own = (columns >= start) | (rows < size)
        yield maker.masked("cache.forgotten", maker.right.allowed & own, about)
        yield maker.masked("cache.chunk-not-causal", without & (columns < start + size), about)
        if size > 1:  # With chunks of size 1, these equal other hypotheses.
            unread = maker.right.allowed & (columns != np.minimum(start + size, keys) - 1)
            yield maker.masked("cache.last-key-unread", unread, about)
            alone = without & ((columns < start) | (columns == cached + rows))
            yield maker.masked("cache.own-key-only", alone, about)
        if problem.rotary is not None:

            def from_0(p: IntArray, size: int = size) -> IntArray:
                return np.where(p >= cached, (p - cached) % size, p)

            yield maker.staged("rotary.chunks-from-0", about, rotated=rotated_at(from_0))
            of_queries = rotated_at(from_0, "query")
            yield maker.staged("rotary.queries-of-chunks-from-0", about, rotated=of_queries)
        if problem.window != NO_WINDOW:
            from_first = _counted(maker, cached) + rows % size
            seen = _without(problem, "window") & within(problem.window, from_first)
            yield maker.masked("window.of-the-chunk", seen, about)
            last = np.minimum(rows - rows % size + size, queries) - 1
            from_last = _counted(maker, cached) + rows - last
            if 1 < size <= (problem.window[0] or 0) + 1:
                seen = _without(problem, "window") & within(problem.window, from_last)
                yield maker.masked("window.of-last-query", seen, about)
        if problem.slopes is not None:
            of_chunk = np.abs(columns - rows % size)[None, None]
            yield maker.staged("alibi.of-the-chunk", about, far=lambda a, far=of_chunk: far)
        bias = problem.attn_bias
        if bias is not None and bias.shape[-2] == queries:
            first = np.take(bias, np.arange(queries) % size, axis=-2)
            yield _asked(maker, "cache.bias-of-first-rows", about, attn_bias=first)
    stored = (columns < cached)[:, None]

    def unless_stored(stage: Change) -> Change:
        def changed(a: Stages, side: str, x: Array) -> Array:
            done: Array = stage(a, side, x)
            return np.where(stored, x, done) if side == "key" else done

        return changed

    if problem.rotary is not None:
        yield maker.staged("rotary.of-history-missing", rotated=unless_stored(Stages.rotated))

        def twice(a: Stages, side: str, x: Array) -> Array:
            once = Stages.rotated(a, side, x)
            return np.where(stored, Stages.rotated(a, side, once), once) if side == "key" else once

        yield maker.staged("rotary.of-history-twice", rotated=twice)
        for cause, by in (("rotary.new-from-0", -cached), ("rotary.new-one-late", 1)):

            def moved(p: IntArray, by: int = by) -> IntArray:
                return np.where(p >= cached, p + by, p)

            yield maker.staged(cause, rotated=rotated_at(moved))
    if problem.norm is not None:
        yield maker.staged("norm.of-history-missing", normed=unless_stored(Stages.normed))


def _window(maker: Maker, window: Window) -> Iterator[Hypothesis]:
    problem, (before, after) = maker.problem, window
    distance, base = problem.distances(), _without(problem, "window")

    def seen(window: Window, distance: IntArray) -> BoolArray:
        return problem.relaxed("window", within(window, distance))

    yield maker.asked("window.not-applied", window=NO_WINDOW)
    if before is not None:
        if before > 0:
            yield _asked(maker, "window.one-fewer-before", window=(before - 1, after))
        yield _asked(maker, "window.one-more-before", window=(before + 1, after))
    if after is not None:
        if after > 0:
            yield _asked(maker, "window.one-fewer-after", window=(before, after - 1))
        yield _asked(maker, "window.one-more-after", window=(before, after + 1))
    if 0 in window:
        limits = (before or None, after or None)
        yield _asked(maker, "window.of-0-is-none", window=limits)
    if before is not None and after is not None:
        yield _asked(maker, "window.sides-exchanged", window=(after, before))
        yield _asked(maker, "window.left-side-only", window=(before, None))
        yield _asked(maker, "window.right-side-only", window=(None, after))
        yield _asked(maker, "window.nothing-after", window=(before, 0))
        yield _asked(maker, "window.whole-width-each-side", window=(before + after, before + after))
        yield _asked(maker, "window.half-each-side", window=(before // 2, after // 2))
    if before is not None and before != after:
        yield _asked(maker, "window.symmetric", window=(before, before))
    if problem.causal is not None:
        bare = _without(problem, "window", "causal")
        yield maker.masked("window.in-place-of-causal", bare & seen(window, distance))
        if before is not None and after is not None:
            yield maker.masked("window.in-place-of-causal", bare & seen((before, None), distance))
        if before is not None:
            both = bare & seen((before, before), distance)
            yield maker.masked("window.symmetric-although-causal", both)
    if before is not None and problem.causal is not None and 1 < maker.queries <= before + 1:
        r = problem.position_of_keys
        from_last = (r - r.max(axis=1, keepdims=True))[:, None, None]
        about: About = {"size": maker.queries}
        yield maker.masked("window.of-last-query", base & seen(window, from_last), about)
    yield maker.masked("window.without-own-key", base & seen(window, distance) & (distance != 0))
    if problem.segments is not None:
        yield maker.masked("window.over-segments", base & seen(window, _counted(maker, 0)))
    more = problem.shape.key_length - maker.queries
    for alignment, offset in (("top-left", 0), ("bottom-right", more)):
        counted = seen(window, _counted(maker, offset))
        if not np.array_equal(base & counted, maker.right.allowed):
            yield maker.masked("window.aligned", base & counted, {"alignment": alignment})


def _window_in_blocks(maker: Maker, window: Window) -> Iterator[Hypothesis]:
    """Yield hypotheses about a window that is measured in whole blocks of keys."""
    problem, base = maker.problem, _without(maker.problem, "window")
    p, r = problem.position_of_queries, problem.position_of_keys
    for size in TILES:
        blocks = (r[:, None] // size - p[:, :, None] // size)[:, None] * size
        in_blocks = base & problem.relaxed("window", within(window, blocks))
        if not np.array_equal(in_blocks, maker.right.allowed):
            yield maker.masked("window.in-blocks", in_blocks, {"size": size})


def _chunk(maker: Maker, size: int) -> Iterator[Hypothesis]:
    problem, base = maker.problem, _without(maker.problem, "chunk")
    p, r = problem.position_of_queries, problem.position_of_keys
    yield maker.asked("chunk.not-applied", chunk=None)
    for other in (size - 1, size + 1, 2 * size):
        if other > 0:
            yield _asked(maker, "chunk.of", {"size": other}, chunk=other)
    yield _asked(maker, "chunk.as-window", chunk=None, window=(size - 1, 0))
    if problem.causal is not None:
        both = _without(problem, "causal")
        yield maker.masked("chunk.in-place-of-causal", both)
    first = p.min(axis=1, keepdims=True)
    again = {
        "chunk.from-first-query": within_chunks(size, p - first, r - first),
        "chunk.of-rows": within_chunks(size, p - first, r),
        "chunk.with-one-before": within_chunks(size, p, r) | within_chunks(size, p - size, r),
    }
    for cause, seen in again.items():
        allowed = base & problem.relaxed("chunk", seen[:, None])
        if not np.array_equal(allowed, maker.right.allowed):
            yield maker.masked(cause, allowed)


def _dilation(maker: Maker, step: int) -> Iterator[Hypothesis]:
    """Yield hypotheses about a dilation, and about the window beside it."""
    problem, base = maker.problem, _without(maker.problem, "dilation")
    distance, before, after = problem.distances(), *problem.window
    yield maker.asked("dilation.not-applied", dilation=None)
    for other in (step - 1, step + 1, 2 * step):
        if other > 0:
            yield _asked(maker, "dilation.of", {"dilation": other}, dilation=other)
    for cause, factor in (("in-steps", Fraction(step)), ("divided", Fraction(1, step))):
        other_window = tuple(None if n is None else int(n * factor) for n in (before, after))
        if other_window != problem.window:
            yield _asked(maker, f"dilation.window-{cause}", window=other_window)
    on = distance % step == 0
    first = problem.position_of_keys[:, None, None] % step == 0
    seen: list[tuple[str, About, BoolArray]] = [
        ("dilation.from-first-key", NO_MORE, first),
        ("dilation.of-rows", NO_MORE, _counted(maker, 0) % step == 0),
        ("dilation.only-before", NO_MORE, on | (distance > 0)),
        ("dilation.only-after", NO_MORE, on | (distance < 0)),
        ("dilation.without-own-key", NO_MORE, on & (distance != 0)),
        ("dilation.of-the-others", NO_MORE, ~on | (distance == 0)),
    ]
    for by in range(1, step):
        seen.append(("dilation.shifted", {"by": by}, (distance - by) % step == 0))
    for size in dict.fromkeys((*CHUNKS, *TILES)):
        of_block = distance + (maker.rows % size)[:, None]
        seen.append(("dilation.from-block", {"size": size}, of_block % step == 0))
    for cause, about, each in seen:
        allowed = base & problem.relaxed("dilation", each)
        if not np.array_equal(allowed, maker.right.allowed):
            yield maker.masked(cause, allowed, about)


def _global_tokens(maker: Maker, tokens: IntArray) -> Iterator[Hypothesis]:
    problem, shape = maker.problem, maker.problem.shape
    yield maker.asked("global.not-applied", global_tokens=None)
    count, index = tokens.sum(axis=1, keepdims=True), np.arange(shape.key_length)
    others = {
        "global.of-first-entry": np.broadcast_to(tokens[:1], tokens.shape),
        "global.of-every-entry": np.broadcast_to(tokens.max(axis=0), tokens.shape),
        "global.padded-with-first": np.where((index == 0) & (count < count.max()), 1, tokens),
        "global.first-only": np.where(tokens.cumsum(axis=1) > 1, 0, tokens),
        "global.as-prefix": 1 * (index < count),
    }
    for cause, other in others.items():
        if not np.array_equal(other, tokens):
            yield _asked(maker, cause, global_tokens=other)
    limits = {n: r for n, r in problem.replace(global_tokens=None).rules() if n in LIMITING}
    base, rows = _without(problem, *limits), np.minimum(maker.rows, shape.key_length - 1)
    of_queries, nobody = global_queries(problem), np.zeros_like(tokens)
    of_rows = np.where(maker.rows < shape.key_length, tokens[:, rows], 0)
    own = problem.distances() == 0

    def seen(queries: IntArray, keys: IntArray, *still: str) -> BoolArray:
        """Return what is visible if the rules in `still` limit global tokens too."""
        of_global = to_or_from(queries, keys)[:, None]
        allowed = base
        for name, limit in limits.items():
            allowed = allowed & (limit if name in still else limit | of_global)
        return allowed

    masks = {
        "global.rows-only": seen(of_queries, nobody),
        "global.columns-only": seen(0 * of_queries, tokens),
        "global.of-rows": seen(of_rows, tokens),
        "global.in-place-of-window": base & (own | to_or_from(of_queries, tokens)[:, None]),
        **{f"global.limited-by-{name}": seen(of_queries, tokens, name) for name in limits},
    }
    every, of_global = dict(problem.rules()), to_or_from(of_queries, tokens)[:, None]
    held = {"causal": "causal", "key lengths": "lengths", "segments": "segments"}
    for rule, name in held.items():
        if rule in every:
            masks[f"global.beyond-{name}"] = _without(problem, rule) & (every[rule] | of_global)
    for cause, allowed in masks.items():
        if not np.array_equal(allowed, maker.right.allowed):
            yield maker.masked(cause, allowed)
    near = reduce(np.logical_and, limits.values(), base) & (tokens != 0)[:, None, None]
    twice = np.log(2.0) * (near & (of_queries == 0)[:, None, :, None])
    if twice.any():
        yield maker.staged("global.counted-twice", sloped=lambda a, s: Stages.sloped(a, s) + twice)


def _spans(maker: Maker, ids: IntArray) -> Iterator[Hypothesis]:
    problem, shape = maker.problem, maker.problem.shape
    yield maker.asked("spans.not-applied", spans=None)
    beside = np.zeros((shape.batch, 1), ids.dtype)
    before = np.concatenate([beside, ids[:, :-1]], axis=1)
    after = np.concatenate([ids[:, 1:], beside], axis=1)
    inside = ids > 0
    runs = (inside & (ids != before)).cumsum(axis=1)
    joined = (inside & (before == 0)).cumsum(axis=1)
    others = {
        "spans.parted-where-they-do-not-touch": np.where(inside, runs, 0),
        "spans.joined-where-they-touch": np.where(inside, joined, 0),
        "spans.of-any-id": 1 * inside,
        "spans.of-none-too": ids + 1,
        "spans.without-last-key": np.where(after == ids, ids, 0),
        "spans.with-one-key-more": np.where(inside, ids, before),
        "spans.prefix-only": np.where(inside & (runs == 1) & inside[:, :1], ids, 0),
        "spans.of-first-entry": np.broadcast_to(ids[:1], ids.shape),
    }
    for cause, other in others.items():
        yield _asked(maker, cause, spans=other)
    for own in np.unique(ids[inside]).tolist():
        yield _asked(maker, "spans.of-id-only", {"id": own}, spans=np.where(ids == own, ids, 0))
    of_queries, base = span_of_queries(problem), _without(problem, "causal")
    in_span = within_spans(of_queries, ids)[:, None]
    rules = dict(problem.replace(spans=None).rules())
    past, in_one = rules["causal"], (of_queries > 0)[:, None, :, None]
    rows = np.minimum(maker.rows, shape.key_length - 1)
    of_rows = np.where(maker.rows < shape.key_length, ids[:, rows], 0)
    seen = {
        "spans.see-only-themselves": np.where(in_one, in_span, past),
        "spans.shown-to-all": past | inside[:, None, None],
        "spans.see-everything": past | in_one,
        "spans.of-rows": past | within_spans(of_rows, ids)[:, None],
    }
    masks = {cause: base & each for cause, each in seen.items()}
    held = {"window": "window", "chunk": "chunk", "key lengths": "lengths", "segments": "segments"}
    for rule, name in held.items():
        if rule in rules:
            there = _without(problem, "causal", rule)
            masks[f"spans.beyond-{name}"] = there & ((past & rules[rule]) | in_span)
    for cause, allowed in masks.items():
        if not np.array_equal(allowed, maker.right.allowed):
            yield maker.masked(cause, allowed)


def _tree(maker: Maker, tree: IntArray) -> Iterator[Hypothesis]:
    """Yield hypotheses about drafted tokens, whose positions are right in all but the last."""
    problem, queries = maker.problem, tree.shape[1]
    base, at, tokens = _without(problem, "tree"), drafted(problem), np.arange(queries)
    line, parents = ancestors(tree), tree[:, :, None] == tokens
    cached, own = at < 0, np.eye(queries, dtype=np.bool_)[None]
    chain = tokens <= tokens[:, None]
    up = [np.broadcast_to(own, line.shape)]
    for _ in range(2):
        up.append(own | (1 * up[-1] @ (1 * parents) > 0))
    siblings = tree[:, :, None] == tree[:, None]
    end = np.arange(problem.shape.key_length)[None] - problem.shape.key_length + queries

    def seen(line: BoolArray, at: IntArray = at, cached: BoolArray = cached) -> BoolArray:
        there = (at >= 0) & (at < queries)
        index = np.where(there, at, 0)[:, None]
        of_line = np.take_along_axis(line, index, axis=2) & there[:, None]
        return base & (of_line | cached[:, None])[:, None]

    whole = np.broadcast_to(np.array(True), line.shape)
    known: list[tuple[str, About, BoolArray]] = [
        ("tree.not-applied", NO_MORE, base),
        ("tree.as-chain", NO_MORE, seen(whole & chain)),
        *(("tree.generations", {"count": n}, seen(up[n])) for n in range(3)),
        ("tree.without-own", NO_MORE, seen(line & ~own)),
        ("tree.root-is-last", NO_MORE, seen(line | (tokens == queries - 1))),
        ("tree.root-is-first", NO_MORE, seen(line | (tokens == 0))),
        ("tree.with-siblings", NO_MORE, seen(line | siblings)),
        ("tree.with-descendants", NO_MORE, seen(line | line.swapaxes(1, 2))),
        ("tree.of-descendants", NO_MORE, seen(line.swapaxes(1, 2))),
        ("tree.without-cache", NO_MORE, seen(line, cached=cached & (at >= 0))),
        ("tree.without-last-cached", NO_MORE, seen(line, cached=at < -1)),
        ("tree.of-first-entry", NO_MORE, seen(np.broadcast_to(line[:1], line.shape))),
    ]
    others = {"tree.moved": at - 1, "tree.at-end-of-array": np.broadcast_to(end, at.shape)}
    for cause, other in others.items():
        about = {"by": 1} if cause == "tree.moved" else NO_MORE
        known.append((cause, about, seen(line, other, other < 0)))
    for cause, about, allowed in known:
        if not np.array_equal(allowed, maker.right.allowed):
            yield maker.masked(cause, allowed, about)
    keys = np.broadcast_to(np.arange(at.shape[1]), at.shape)
    rows = tokens + keys[:, :1] - at[:, :1]
    yield _asked(maker, "tree.positions-by-index", positions=Positions(query=rows, key=keys))


def _without(problem: Problem, *left_out: str) -> BoolArray:
    """Return a mask `[batch heads query key]` that combines the mask and rules such as "causal".

    The rules in `left_out`, named as in `Problem.rules`, are not applied. True means that the query
    may attend to the key.
    """
    allowed = np.broadcast_to(True if problem.mask is None else problem.mask, problem.shape.logits)
    for name, rule in problem.rules():
        allowed = allowed if name in left_out else allowed & rule
    return allowed


def _soft_cap(maker: Maker, cap: float) -> Iterator[Hypothesis]:
    def limited(values: Array) -> Array:
        return cap * np.tanh(values / cap)

    yield maker.asked("soft-cap.not-applied", soft_cap=None)
    if maker.problem.attn_bias is not None:
        yield maker.staged(
            "soft-cap.after-bias",
            added=lambda a, s: Stages.sloped(a, limited(Stages.biased(a, s))),
        )
    if maker.problem.slopes is not None:
        yield maker.staged(
            "soft-cap.after-alibi",
            added=lambda a, s: Stages.biased(a, limited(Stages.sloped(a, s))),
        )
    for hidden in _hidden(maker):

        def lifted(a: Stages, logits: Array, hidden: BoolArray = hidden) -> Array:
            return np.where(hidden, Stages.hide(a, logits), limited(Stages.hide(a, logits)))

        yield maker.staged("soft-cap.after-mask", capped=lambda a, s: s, hide=lifted)
    scale = maker.problem.logit_scale
    changes: dict[str, Change] = {
        "soft-cap.on-unscaled-scores": lambda a, s: scale * limited(a.scores),
        "soft-cap.not-multiplied": lambda a, s: np.tanh(s / cap),
        "soft-cap.not-divided": lambda a, s: cap * np.tanh(s),
        "soft-cap.clips": lambda a, s: np.clip(s, -cap, cap),
        "soft-cap.from-above-only": lambda a, s: np.where(s > 0, limited(s), s),
        "soft-cap.from-below-only": lambda a, s: np.where(s < 0, limited(s), s),
        "soft-cap.softsign": lambda a, s: s / (1 + np.abs(s / cap)),
        "soft-cap.twice": lambda a, s: limited(limited(s)),
    }
    for cause, change in changes.items():
        yield maker.staged(cause, capped=change)
    for usual in (*USUAL_CAPS, float(round(cap))):
        if usual not in (0.0, cap):
            yield _asked(maker, "soft-cap.of", {"cap": usual}, soft_cap=usual)


def _hidden(maker: Maker) -> Iterator[BoolArray]:
    """Yield masks `[batch heads query key]`, True for keys that a kernel might not read at all.

    The first mask is False everywhere. The second is True beyond the lengths and in other segments.
    The third is also True where the causal mask blocks keys. The others are True where any rule but
    one blocks keys, or any but the mask. Masks that contain all blocked keys, or that equal another
    one, are left out. Nothing is yielded if the problem has neither a mask nor rules.
    """
    problem, blocked = maker.problem, ~maker.right.allowed
    if problem.allowed is None:
        return
    blocking = {name: ~rule for name, rule in problem.rules()}
    beyond = [block for name, block in blocking.items() if name not in ("causal", "window")]
    if problem.mask is not None:
        blocking["mask"] = ~problem.mask
    found: list[BoolArray] = []
    for unread in (
        [],
        beyond,
        [*beyond, *(block for name, block in blocking.items() if name == "causal")],
        *([block for name, block in blocking.items() if name != one] for one in blocking),
    ):
        mask = np.zeros(problem.shape.logits, np.bool_)
        for block in unread:
            mask = mask | block
        if not mask[blocked].all() and not any(np.array_equal(mask, other) for other in found):
            found.append(mask)
    yield from found


def _sinks(maker: Maker, sinks: Array) -> Iterator[Hypothesis]:
    group, scale, cap = maker.problem.shape.group, maker.problem.logit_scale, maker.problem.soft_cap

    def of(change: Callable[[Array], Array]) -> Change:
        return lambda a, peak: Stages.of_sinks(a, peak) * 0 + change(peak)

    own = sinks[None, :, None, None]
    yield maker.asked("sinks.not-applied", sinks=None)
    yield _asked(maker, "sinks.of-first-head", sinks=0 * sinks + sinks[0])
    yield _asked(maker, "sinks.averaged", sinks=0 * sinks + sinks.mean())
    yield _asked(maker, "sinks.of-0", sinks=0 * sinks)
    yield maker.staged("sinks.of-1-not-shifted", of_sinks=of(np.ones_like))
    yield maker.staged("sinks.not-shifted", of_sinks=of(lambda peak: np.exp(own)))
    yield maker.staged("sinks.without-exponential", of_sinks=of(lambda peak: own))
    yield maker.staged(
        "sinks.in-place-of-first-key",
        of_sinks=of(lambda peak: 0 * peak),
        hide=lambda a, logits: Stages.hide(
            a, np.where(np.arange(logits.shape[-1]) == 0, own, logits)
        ),
    )
    for narrow in (FLOAT16, BFLOAT16):
        kept = narrow.round(sinks)
        if not np.array_equal(kept, sinks):
            yield _asked(maker, "sinks.rounded", {"to": narrow.name}, sinks=kept)
    yield _asked(maker, "sinks.scaled", sinks=sinks * scale)
    if cap is not None:
        yield _asked(maker, "sinks.capped", sinks=cap * np.tanh(sinks / cap))
    if maker.problem.slopes is not None:
        yield _asked(maker, "sinks.with-alibi", sinks=sinks - maker.problem.slopes)
    yield _asked(maker, "sinks.negated", sinks=-sinks)
    yield _asked(maker, "sinks.doubled", sinks=2.0 * sinks)
    yield _asked(maker, "sinks.log2-for-natural", sinks=sinks * np.log(2))
    yield _asked(maker, "sinks.natural-for-log2", sinks=sinks / np.log(2))
    yield _asked(maker, "sinks.heads-reversed", sinks=sinks[::-1])
    for step in (1, -1):
        yield _asked(maker, "sinks.of-next-head", sinks=np.roll(sinks, step))
    for order in orders_of_groups(maker.problem.shape) if 1 < group < len(sinks) else ():
        listed: About = {"order": [int(head) for head in order]}
        yield _asked(maker, "sinks.of-other-heads", listed, sinks=sinks[order])
    if group > 1:
        yield _asked(maker, "sinks.of-key-head", sinks=sinks[np.arange(len(sinks)) // group])
    for times in range(2, MOST_SPLITS + 1):
        yield _asked(maker, "sinks.counted", {"times": times}, sinks=sinks + np.log(times))

    def with_value(value: Callable[[Array], Array]) -> Change:
        return lambda a, w, v: Stages.mix(a, w, v) + a.share_of_sinks() * value(v)

    yield maker.staged("sinks.take-first-value", mix=with_value(lambda v: v[:, :, :1]))
    mean = with_value(lambda v: v.mean(axis=2, keepdims=True))
    yield maker.staged("sinks.take-mean-value", mix=mean)


def _alibi(maker: Maker, slopes: Array) -> Iterator[Hypothesis]:
    problem, shape = maker.problem, maker.problem.shape
    heads, more = np.arange(shape.heads), shape.key_length - maker.queries

    yield maker.asked("alibi.not-applied", slopes=None)
    yield _asked(maker, "alibi.added", slopes=-slopes)
    # For a single head, other numbers of heads give many slopes, among them this one.
    yield _asked(maker, "alibi.scaled", slopes=slopes * problem.logit_scale)
    yield maker.staged("alibi.by-key-position", far=lambda a: -a.positions("key")[:, None, None])
    yield maker.staged("alibi.only-before", far=lambda a: np.maximum(-a.distances(), 0))
    yield maker.staged("alibi.squared-distance", far=lambda a: a.distances() ** 2.0)
    if problem.segments is not None:
        yield maker.staged("alibi.over-segments", far=lambda a: np.abs(_counted(maker, 0)))
    for alignment, offset in (("top-left", 0), ("bottom-right", more)):
        far = np.abs(_counted(maker, offset))
        if not np.array_equal(far + 0 * maker.right.far(), maker.right.far()):
            about = {"alignment": alignment}
            yield maker.staged("alibi.aligned", about, far=lambda a, far=far: far)
    for start, cause in ((1, "alibi.slopes-geometric"), (0, "alibi.slopes-from-exponent-0")):
        yield _asked(maker, cause, slopes=2.0 ** (-8.0 * (heads + start) / shape.heads))
    below = power_within(shape.heads)
    power = below if below == shape.heads else 2 * below
    yield _asked(maker, "alibi.slopes-of-next-power", slopes=2.0 ** (-8.0 * (heads + 1) / power))
    yield _asked(maker, "alibi.slopes-of-paper", slopes=alibi_slopes(shape.heads))
    if below < shape.heads:
        yield _asked(maker, "alibi.slopes-continued", slopes=2.0 ** (-8.0 * (heads + 1) / below))
        in_turn = alibi_slopes(shape.heads, step=1)
        yield _asked(maker, "alibi.slopes-of-twice-in-turn", slopes=in_turn)
    for parts in PARTS_OF_HEADS:
        total = parts * shape.heads
        every = alibi_slopes(total).reshape(parts, shape.heads)
        for part, own in enumerate(every):
            of_part: About = {"heads": total, "first": part * shape.heads}
            yield _asked(maker, "alibi.slopes-of-more-heads", of_part, slopes=own)
        if shape.heads % parts == 0:
            fewer = shape.heads // parts
            again = np.tile(alibi_slopes(fewer), parts)
            yield _asked(maker, "alibi.slopes-of-fewer-heads", {"heads": fewer}, slopes=again)
    if shape.group > 1:
        of_shared = np.repeat(alibi_slopes(shape.kv_heads), shape.group)
        yield _asked(maker, "alibi.slopes-made-for-key-heads", slopes=of_shared)
    yield _asked(maker, "alibi.slopes-sorted", slopes=-np.sort(-slopes))
    yield _asked(maker, "alibi.heads-reversed", slopes=slopes[::-1])
    yield _asked(maker, "alibi.of-first-head", slopes=0 * slopes + slopes[0])
    if shape.group > 1:
        yield _asked(maker, "alibi.of-key-head", slopes=slopes[heads // shape.group])
    yield _asked(maker, "alibi.log2-for-natural", slopes=slopes * np.log(2))
    yield _asked(maker, "alibi.twice", slopes=2 * slopes)
    for narrow in (FLOAT16, BFLOAT16):
        kept = narrow.round(slopes)
        if not np.array_equal(kept, slopes):
            yield _asked(maker, "alibi.slopes-rounded", {"to": narrow.name}, slopes=kept)
    if max(shape.query_length, shape.key_length) > 256:

        def rounded(a: Stages) -> Array:
            p, r = (BFLOAT16.round(1.0 * a.positions(side)) for side in ("query", "key"))
            return np.abs(r[:, None] - p[:, :, None])[:, None]

        yield maker.staged("alibi.positions-rounded", far=rounded)


def but_for(skipped: str, stage: Change) -> Change:
    """Return a stage that acts like `stage`, but leaves the heads of one side unchanged.

    `stage` is a stage such as `Stages.rotated`; `skipped` is the side, "query" or "key".
    """
    return lambda a, side, x: x if side == skipped else stage(a, side, x)


def _norm(maker: Maker) -> Iterator[Hypothesis]:
    norm = maker.problem.norm
    assert norm is not None

    yield maker.asked("norm.not-applied", norm=None)
    yield _asked(maker, "norm.without-epsilon", norm=replace(norm, epsilon=1e-30))
    for epsilon in (USUAL_EPSILON, norm.epsilon**2):
        about = {"epsilon": epsilon}
        yield _asked(maker, "norm.epsilon", about, norm=replace(norm, epsilon=epsilon))

    def mean_square(x: Array, *axes: int) -> Array:
        return (x**2).mean(axis=axes, keepdims=True)

    roots: dict[str, Change] = {
        "norm.over-all-heads": lambda a, x: np.sqrt(mean_square(x, 1, 3) + norm.epsilon),
        "norm.over-tokens": lambda a, x: np.sqrt(mean_square(x, 2) + norm.epsilon),
        "norm.of-sum": lambda a, x: np.sqrt((x**2).sum(axis=-1, keepdims=True) + norm.epsilon),
        "norm.of-absolutes": lambda a, x: np.abs(x).mean(axis=-1, keepdims=True) + norm.epsilon,
    }
    yield maker.staged(
        "norm.epsilon-outside-root", root=lambda a, x: np.sqrt(mean_square(x, -1)) + norm.epsilon
    )
    yield maker.staged(
        "norm.centred",
        normed=lambda a, s, x: Stages.normed(a, s, x - x.mean(axis=-1, keepdims=True)),
    )
    for cause, root in roots.items():
        yield maker.staged(cause, root=root)
    ones = replace(norm, query=np.ones_like(norm.query), key=np.ones_like(norm.key))
    yield _asked(maker, "norm.without-weight", norm=ones)
    plus = replace(norm, query=1 + norm.query, key=1 + norm.key)
    yield _asked(maker, "norm.weight-plus-1", norm=plus)
    weights = {"query": norm.query, "key": norm.key}
    for side, other in (("key", "query"), ("query", "key")):
        own, about_side = weights[side], {"of": side}
        for cause, changed in (
            ("norm.without-weight-of", np.ones_like(own)),
            ("norm.weight-plus-1-of", 1 + own),
            ("norm.weight-of-other-side", weights[other]),
        ):
            gains: Any = {side: changed}
            yield _asked(maker, cause, about_side, norm=replace(norm, **gains))
    exchanged = replace(norm, query=norm.key, key=norm.query)
    yield _asked(maker, "norm.weights-exchanged", norm=exchanged)
    for side in ("key", "query"):
        skipping = but_for(side, Stages.normed)
        yield maker.staged("norm.not-applied-to", {"of": side}, normed=skipping)
    yield maker.staged("norm.of-values-too", prepared_values=lambda a, v: v / a.root(v))
    if maker.problem.rotary is not None:
        yield maker.staged(
            "norm.after-rotary",
            prepared=lambda a, side, x: Stages.rotated(a, side, x / a.root(x)) * a.gain(side),
        )


def _by_table(a: Stages, side: str, heads: Array, *, pairs: Pairs) -> Array:
    """Return heads whose components are `pairs`, rotated by a table laid out for other pairs.

    Each component of a pair then turns by an angle of its own.
    """
    assert a.problem.rotary is not None
    rotary = replace(a.problem.rotary, pairs=pairs)
    of_table = replace(rotary, pairs="interleaved" if pairs == "halves" else "halves")
    pair = np.empty(rotary.size, np.int64)
    for place in of_table.places():
        pair[place] = np.arange(rotary.size // 2)
    angles = a.angles(a.places(side))[..., pair]
    cos, sin = (a.attention_factor() * it for it in cosine_and_sine(angles))
    turned, (first, second) = heads.copy(), rotary.places()
    for own, other, sign in ((first, second, -1), (second, first, 1)):
        turned[..., own] = (
            heads[..., own] * cos[..., own] + sign * heads[..., other] * sin[..., own]
        )
    return turned


def _by_rounded_table(a: Stages, side: str, heads: Array, *, narrow: DType) -> Array:
    """Return heads rotated by cosines and sines that are rounded to a narrow dtype."""
    assert a.problem.rotary is not None
    table = cosine_and_sine(a.angles(a.places(side)))
    cos, sin = (narrow.round(a.attention_factor() * it) for it in table)
    turned, (first, second) = heads.copy(), a.problem.rotary.places()
    turned[..., first] = heads[..., first] * cos - heads[..., second] * sin
    turned[..., second] = heads[..., first] * sin + heads[..., second] * cos
    return turned


def _rotary(maker: Maker) -> Iterator[Hypothesis]:
    problem, shape, rotary = maker.problem, maker.problem.shape, maker.problem.rotary
    assert rotary is not None
    more, size = shape.key_length - maker.queries, shape.head_size

    def at(cause: str, change: Change, *sides: str, **about: int) -> Hypothesis:
        return maker.staged(cause, about, rotated=rotated_at(change, *sides))

    yield maker.asked("rotary.not-applied", rotary=None)
    other: Pairs = "halves" if rotary.pairs == "interleaved" else "interleaved"
    if rotary.size > 2:
        pairs: About = {"pairs": other}
        yield _asked(maker, "rotary.pairs", pairs, rotary=replace(rotary, pairs=other))
        order = np.arange(size)
        halves = np.arange(rotary.size).reshape(2, -1).ravel()
        neighbours = np.arange(rotary.size).reshape(-1, 2).T.ravel()
        if other == "interleaved":
            order[halves] = neighbours
        else:
            order[neighbours] = halves
        inverse = np.argsort(order)
        for side in ("key", "query"):

            def of_side(a: Stages, which: str, x: Array, side: str = side) -> Array:
                if which != side:
                    return Stages.rotated(a, which, x)
                return Stages.rotated(a, which, x[..., order])[..., inverse]

            yield maker.staged("rotary.pairs-of", {"of": side, **pairs}, rotated=of_side)
    yield _asked(maker, "rotary.usual-base", rotary=replace(rotary, base=USUAL_BASE))
    scaling = problem.rotary_scaling
    base, factor = (BASE_OF_WHOLE, FACTOR_OF_WHOLE) if scaling is None else (USUAL_BASE, 1.0)
    if problem.axes is None and base != rotary.base:
        # A layer with a window that is taken for one without, or the other way round.
        fields = {
            "rotary": replace(rotary, base=base),
            "rotary_scaling": RotaryScaling(rope_type="linear", factor=factor),
        }
        of_others: About = {"base": base, "factor": factor}
        yield _asked(maker, "rotary.of-other-layers", of_others, **fields)
    for other_size in dict.fromkeys((size // 2 * 2, rotary.size // 2)):
        fits = scaling is None or scaling.fits(other_size)
        if other_size not in (0, rotary.size) and other_size % 2 == 0 and fits:
            size_read: About = {"size": other_size}
            yield _asked(maker, "rotary.size", size_read, rotary=replace(rotary, size=other_size))
    for side in ("key", "query"):
        skipping = but_for(side, Stages.rotated)
        yield maker.staged("rotary.not-applied-to", {"of": side}, rotated=skipping)
    index = np.broadcast_to(maker.rows, problem.position_of_queries.shape)
    for cause, offset in (("rotary.queries-from-0", 0), ("rotary.queries-at-the-end", more)):
        if not np.array_equal(index + offset, problem.position_of_queries):
            yield at(cause, lambda p, offset=offset: index + offset, "query")
    yield at("rotary.query-positions-from-1", lambda p: p + 1, "query")
    yield at("rotary.queries-at-first-position", lambda p: 0 * p + p[:, :1], "query")
    yield at("rotary.positions-reversed", lambda p: p[:, ::-1], "query")
    mask = problem.mask
    if mask is not None and mask.shape[1:3] == (1, 1) and not more and not mask.all():
        # As transformers do with `position_ids`.
        counted = np.maximum(mask[:, 0, 0].cumsum(-1) - 1, 0)

        def not_counted(p: IntArray) -> IntArray:
            # Of a longer problem, only some queries are there.
            return 0 * p + (counted if p.shape[1] == counted.shape[1] else counted[:, maker.rows])

        yield at("rotary.padding-not-counted", not_counted)
    if problem.positions is not None:
        yield at("rotary.positions-not-read", lambda p: 0 * p + np.arange(p.shape[1]))
        yield at("rotary.positions-of-first-entry", lambda p: 0 * p + p[:1])
        yield at("rotary.positions-counted-on", lambda p: p[:, :1] + np.arange(p.shape[1]))
    second = np.zeros(size, np.bool_)
    half = rotary.size // 2
    second[slice(half, rotary.size) if rotary.pairs == "halves" else slice(1, rotary.size, 2)] = (
        True
    )
    for side in ("key", "query"):

        def exchanged(a: Stages, other: str, x: Array, side: str = side) -> Array:
            angles = a.angles(a.places(other))
            return a.turned(x, np.pi / 2 - angles if other == side else angles)

        yield maker.staged("rotary.sine-for-cosine", {"of": side}, rotated=exchanged)

        def negated(a: Stages, other: str, x: Array, side: str = side) -> Array:
            return Stages.rotated(a, other, np.where(second & (other == side), -x, x))

        yield maker.staged("rotary.second-negated", {"of": side}, rotated=negated)
    if rotary.size < size:
        rest = np.arange(size) >= rotary.size
        yield maker.staged(
            "rotary.rest-dropped",
            rotated=lambda a, s, x: np.where(rest, 0.0, Stages.rotated(a, s, x)),
        )
        step = size - rotary.size
        yield maker.staged(
            "rotary.last-components",
            rotated=lambda a, s, x: np.roll(
                Stages.rotated(a, s, np.roll(x, -step, axis=-1)), step, axis=-1
            ),
        )
        if rotary.pairs == "halves" and size % 2 == 0 and problem.axes is None:
            # The halves of the whole head, of which only the first angles are not 0.
            of_head = replace(rotary, size=size)
            angles = np.zeros(size // 2)
            angles[: rotary.size // 2] = maker.right.frequencies()
            yield Hypothesis(
                Phrase("rotary.partners-in-whole-head"),
                lambda: Stages(problem.replace(rotary=of_head), frequencies=lambda a: angles),
            )

    for cause, sides in (
        ("rotary.keys-turned-back", ("key",)),
        ("rotary.queries-turned-back", ("query",)),
        ("rotary.turned-back", ("query", "key")),
    ):

        def back(a: Stages, side: str, x: Array, sides: tuple[str, ...] = sides) -> Array:
            sign = -1 if side in sides else 1
            return a.turned(x, sign * a.angles(a.places(side)))

        yield maker.staged(cause, rotated=back)
    # Where only distances matter, this is the same as turning both back.
    yield at("rotary.positions-from-the-end", lambda p: p[:, ::-1])
    if rotary.size > 2 and problem.axes is None:
        for of_pairs, of_table in ((rotary.pairs, other), (other, rotary.pairs)):
            yield maker.staged(
                "rotary.table-of-other-pairs",
                {"pairs": of_pairs, "table": of_table},
                rotated=partial(_by_table, pairs=of_pairs),
            )
    for cause, sides in (
        ("rotary.keys-twice", ("key",)),
        ("rotary.queries-twice", ("query",)),
        ("rotary.twice", ("query", "key")),
    ):

        def twice(a: Stages, side: str, x: Array, sides: tuple[str, ...] = sides) -> Array:
            once = Stages.rotated(a, side, x)
            return Stages.rotated(a, side, once) if side in sides else once

        yield maker.staged(cause, rotated=twice)
    if shape.value_head_size == size:
        yield maker.staged(
            "rotary.of-values-too", prepared_values=lambda a, v: Stages.rotated(a, "key", v)
        )

    def frequencies(cause: str, change: Callable[[Array], Array]) -> Hypothesis:
        return maker.staged(cause, frequencies=lambda a: change(Stages.frequencies(a)))

    if rotary.size > 2:
        by_head = rotary.size / size
        if by_head != 1:
            yield frequencies("rotary.exponents-by-head-size", lambda f: f**by_head)
        yield frequencies("rotary.exponents-halved", lambda f: f**0.5)
        yield frequencies("rotary.exponents-doubled", lambda f: f**2)
        yield frequencies("rotary.frequencies-reversed", lambda f: f[::-1])
        yield frequencies("rotary.one-frequency", np.ones_like)
    yield frequencies("rotary.exponents-from-1", lambda f: f * rotary.base ** (-2 / rotary.size))
    last = int(max(problem.position_of_queries.max(), problem.position_of_keys.max()))
    for bits in (6, 7, 8, 11, 12):
        if last >= 2**bits:
            yield at("rotary.positions-wrap", lambda p, n=2**bits: p % n, count=2**bits)
            ends = partial(np.minimum, 2**bits - 1)
            yield at("rotary.table-ends", ends, count=2**bits)
    if last > 256:
        yield at("rotary.positions-rounded", lambda p: BFLOAT16.round(1.0 * p))
    if last > 2048:
        yield at("rotary.positions-in-float16", lambda p: FLOAT16.round(1.0 * p))
    for bits, narrow in ((8, BFLOAT16), (11, FLOAT16)):
        yield maker.staged(
            "rotary.angles-rounded",
            {"format": Phrase(f"significand.{bits}")},
            angles=lambda a, p, narrow=narrow: narrow.round(Stages.angles(a, p)),
        )
        about: About = {"format": Phrase(f"significand.{bits}")}
        by_narrow = partial(_by_rounded_table, narrow=narrow)
        yield maker.staged("rotary.table-rounded", about, rotated=by_narrow)
        yield maker.staged(
            "rotary.frequencies-rounded",
            about,
            frequencies=lambda a, narrow=narrow: narrow.round(Stages.frequencies(a)),
        )
        if problem.axes is None:
            yield maker.staged(
                "rotary.table-made-in",
                about,
                rotated=by_narrow,
                frequencies=lambda a, narrow=narrow: narrow.round(Stages.frequencies(a)),
                angles=lambda a, p, narrow=narrow: narrow.round(
                    a.frequencies() * narrow.round(1.0 * p)[:, None, :, None]
                ),
            )
    if problem.dtype == "float64":
        yield maker.staged(
            "rotary.angles-rounded",
            {"format": Phrase("significand.24")},
            frequencies=lambda a: FLOAT32.round(Stages.frequencies(a)),
            angles=lambda a, p: FLOAT32.round(Stages.angles(a, p)),
        )


def _axes(
    maker: Maker, rotary: Rotary, scaling: RotaryScaling, axes: RotaryAxes
) -> Iterator[Hypothesis]:
    """Yield causes of pairs that turn by positions on another axis than theirs."""
    sections, pairs = scaling.mrope_section or (), np.arange(rotary.size // 2)
    axis = scaling.axis_of_pairs()

    def by(cause: str, axis_of_pairs: IntArray, about: About = NO_MORE) -> Hypothesis:
        return maker.staged(
            cause, about, angles=lambda a, p: (p[..., axis_of_pairs] * a.frequencies())[:, None]
        )

    yield maker.asked("mrope.not-applied", axes=None)
    for number, name in enumerate(POSITION_AXES):
        yield by("mrope.one-axis", 0 * axis + number, {"axis": name})
    for order in list(itertools.permutations(range(len(POSITION_AXES))))[1:]:
        names: About = {"order": [POSITION_AXES[it] for it in order]}
        yield by("mrope.axes-exchanged", np.array(order)[axis], names)
    # As if the rows of positions began with those of text.
    yield by("mrope.rows-shifted", np.minimum(axis + 1, 2))
    if scaling.mrope_interleaved:
        yield by("mrope.interleaved-to-the-end", pairs % 3)
    others = [tuple(sections[it] for it in order) for order in itertools.permutations(range(3))]
    for more, less in itertools.permutations(range(3), 2):
        moved = [*sections]
        moved[more], moved[less] = moved[more] + 1, moved[less] - 1
        others.append(tuple(moved))
    for counts in dict.fromkeys(others):
        other = replace(scaling, mrope_section=counts)
        if counts != sections and other.fits(rotary.size):
            yield by("mrope.sections-exchanged", other.axis_of_pairs(), {"sections": [*counts]})
    flipped = replace(scaling, mrope_interleaved=not scaling.mrope_interleaved)
    as_read = "mrope.side-by-side" if scaling.mrope_interleaved else "mrope.interleaved"
    # Sections that would be too long if they were interleaved end with the pairs.
    yield by(as_read, flipped.axis_of_pairs())
    if scaling.mrope_interleaved:
        for begin in (1, 2):
            begun: About = {"axis": POSITION_AXES[begin]}
            yield by("mrope.interleaved-from", np.roll(axis, -begin), begun)
    else:
        starts = np.cumsum([0, *sections])[axis]
        again = rotary.base ** (-(pairs - starts) / len(pairs))
        alone = rotary.base ** (-(pairs - starts) / np.array(sections)[axis])
        yield maker.staged("mrope.frequencies-begin-again", frequencies=lambda a: again)
        yield maker.staged("mrope.frequencies-of-own-size", frequencies=lambda a: alone)
        for cause, components in (
            ("mrope.sections-of-components", np.repeat(np.arange(3), 2 * np.array(sections))),
            ("mrope.first-half-only", np.concatenate([axis, 0 * axis])),
        ):
            yield maker.staged(cause, rotated=_by_components(axes, components, rotary.pairs))
    for side in ("key", "query"):
        yield maker.staged(
            "mrope.not-applied-to",
            {"of": side},
            rotated=lambda a, s, x, side=side: a.turned(
                x, a.angles(a.positions(s) if s == side else a.places(s))
            ),
        )
    yield from _other_axes(maker, axes)


def _other_axes(maker: Maker, axes: RotaryAxes) -> Iterator[Hypothesis]:
    """Yield causes of other positions on axes, and of rules that follow time in place of tokens."""
    problem, shape = maker.problem, maker.problem.shape
    counted = (problem.position_of_queries, problem.position_of_keys)

    def at(cause: str, query: IntArray, key: IntArray) -> Iterator[Hypothesis]:
        if not (np.array_equal(query, axes.query) and np.array_equal(key, axes.key)):
            yield maker.asked(cause, axes=RotaryAxes(query=query, key=key))

    both = (axes.query, axes.key)
    by_tokens = (
        np.concatenate([own[..., None], side[..., 1:]], axis=-1)
        for own, side in zip(counted, both, strict=True)
    )
    yield from at("mrope.time-of-tokens", *by_tokens)
    yield from at("mrope.of-first-entry", *(np.broadcast_to(of[:1], of.shape) for of in both))
    yield from at("mrope.queries-from-0", axes.query - axes.query[:, :1], axes.key)
    if shape.query_length:
        rows = np.minimum(np.arange(shape.key_length), shape.query_length - 1)
        yield from at("mrope.keys-by-queries", axes.query, axes.query[:, rows])
    time = np.unique(np.concatenate([of[..., 0].ravel() for of in both]))
    dense = (
        np.concatenate([np.searchsorted(time, of[..., :1]), of[..., 1:]], axis=-1) for of in both
    )
    yield from at("mrope.time-without-gaps", *dense)
    if problem.key_lengths is not None and shape.query_length == shape.key_length:
        moved = (
            np.stack(
                [np.roll(one, n, axis=0) for one, n in zip(of, problem.key_lengths, strict=True)]
            )
            for of in both
        )
        yield from at("mrope.as-if-padded-on-the-left", *moved)
    later = (axes.key[:, None, :, 0] - axes.query[:, :, None, 0])[:, None]
    if problem.causal is not None:
        seen = _without(problem, "causal") & problem.relaxed("causal", later <= 0)
        yield maker.masked("mrope.causal-by-time", seen)
    if problem.window != NO_WINDOW:
        near = problem.relaxed("window", within(problem.window, later))
        yield maker.masked("mrope.window-by-time", _without(problem, "window") & near)


def _by_components(axes: RotaryAxes, axis: IntArray, pairs: Pairs) -> Change:
    """Return a rotary stage in which each component, not each pair, has an axis, `[component]`.

    Both components of a pair are then rotated by angles of their own.
    """
    half = len(axis) // 2
    first, second = axis[:half], axis[half:]
    at_second = np.arange(len(axis)) >= half
    if pairs == "interleaved":
        first, second, at_second = axis[::2], axis[1::2], np.arange(len(axis)) % 2 == 1

    def rotated(a: Stages, side: str, x: Array) -> Array:
        places, rates = getattr(axes, side), a.frequencies()
        one, other = (a.turned(x, (places[..., of] * rates)[:, None]) for of in (first, second))
        taken = np.zeros(x.shape[-1], np.bool_)
        taken[: len(axis)] = at_second
        return np.where(taken, other, one)

    return rotated


def _scaling(maker: Maker, rotary: Rotary, scaling: RotaryScaling) -> Iterator[Hypothesis]:
    """Yield causes of wrong frequencies where they are scaled, and of wrong attention factors."""
    size, factor, kind = rotary.size, scaling.factor or 1.0, scaling.rope_type
    length = length_of(maker.problem)
    before = scaling.original_max_position_embeddings or 1
    plain = float(rotary.base) ** (-np.arange(0.0, size, 2.0) / size)
    how = scaling.scaled(size, rotary.base, length)
    right = how.frequencies()

    def turning(cause: str, frequencies: Array, about: About = NO_MORE) -> Hypothesis:
        return maker.staged(cause, about, frequencies=lambda a: frequencies)

    def told(
        cause: str, about: About = NO_MORE, /, tokens: int = length, **numbers: Any
    ) -> Hypothesis:
        other = replace(scaling, **numbers).scaled(size, rotary.base, tokens)
        return turning(cause, other.frequencies(), about)

    if not np.array_equal(plain, right):
        # Positions on several axes are still those of sections.
        laid = ("mrope_section", "mrope_interleaved")
        kept = {name: getattr(scaling, name) for name in laid}
        alone = RotaryScaling(rope_type="default", **kept) if scaling.mrope_section else None
        yield maker.asked("scaling.not-applied", rotary_scaling=alone)
        yield turning("scaling.frequencies-not-scaled", plain)
        yield turning("scaling.inverted", plain**2 / right)
        yield turning("scaling.twice", right**2 / plain)
        for side in ("query", "key"):
            yield maker.staged(
                "scaling.not-applied-to",
                {"of": side},
                rotated=lambda a, s, x, side=side: a.turned(
                    x, a.angles(a.places(s)) * (plain / right if s == side else 1.0)
                ),
            )
    yield turning("scaling.on-base", (factor * rotary.base) ** (-np.arange(0.0, size, 2.0) / size))
    if kind in ("yarn", "llama3", "dynamic"):
        yield turning("scaling.as-linear", plain / factor)
    if kind == "linear":
        yield turning("scaling.without-first-pair", np.where(right == right[0], plain, right))
    if kind in ("yarn", "llama3"):
        yield from _ramps(scaling, how, told, turning)
    if kind == "dynamic":
        others = (before * factor, maker.queries, length - 1, maker.problem.shape.key_length)
        for other in dict.fromkeys(int(other) for other in others):
            if max(other, before) != max(length, before):
                yield told("scaling.length", {"length": other}, tokens=other)
        grown = factor * max(length, before) / before
        for cause, stretched in (
            ("scaling.growth-to-the-power-of-1", grown - (factor - 1)),
            ("scaling.growth-not-lessened", grown ** (size / (size - 2))),
        ):
            base = rotary.base * stretched
            yield turning(cause, base ** (-np.arange(0.0, size, 2.0) / size))
    if kind == "longrope":
        listed = {"short": scaling.short_factor, "long": scaling.long_factor}
        if length > before:
            yield turning("scaling.short-for-long", plain / np.array(listed["short"]))
        else:
            yield turning("scaling.long-for-short", plain / np.array(listed["long"]))
        yield turning("scaling.factors-reversed", plain / how.divisor[::-1])
    if kind != "longrope":
        for usual in (2.0, 4.0, 8.0, 16.0, 32.0, 40.0):
            if usual != factor:
                yield told("scaling.factor", {"factor": usual}, factor=usual)
    yield from _attention_factor(maker, rotary, scaling)


def _ramps(
    scaling: RotaryScaling,
    how: Scaled,
    told: Callable[..., Hypothesis],
    turning: Callable[..., Hypothesis],
) -> Iterator[Hypothesis]:
    """Yield causes of a wrong share of the frequencies that is left as it is."""
    factor, before = scaling.factor or 1.0, scaling.original_max_position_embeddings or 1
    low = {"llama3": "low_freq_factor", "yarn": "beta_slow"}[scaling.rope_type]
    high = {"llama3": "high_freq_factor", "yarn": "beta_fast"}[scaling.rope_type]
    ends = (scaling.low_freq_factor, scaling.high_freq_factor)
    ends = ends if scaling.rope_type == "llama3" else (scaling.slow, scaling.fast)
    yield told("scaling.factors-swapped", **{low: ends[1], high: ends[0]})
    yield told("scaling.new-length", original_max_position_embeddings=before * factor)
    yield told("scaling.without-2-pi", original_max_position_embeddings=before * 2 * np.pi)
    for cause, share in (
        # Those of Llama 3 are the other way round if its factors are exchanged.
        ("scaling.ramp-backwards", 1 - how.share),
        ("scaling.no-ramp", np.floor(how.share)),
    ):
        yield turning(cause, replace(how, share=share).frequencies())
    divisor = how.divisor * (1 - how.share) + how.share
    waves = replace(how, share=0 * divisor, divisor=divisor)
    yield turning("scaling.mean-of-wavelengths", waves.frequencies())
    if scaling.rope_type == "yarn":
        cut = scaling.truncate in (None, True)
        yield told("scaling.not-truncated" if cut else "scaling.truncated", truncate=not cut)
        yield told("scaling.usual-betas", beta_fast=32.0, beta_slow=1.0)
        pairs = np.arange(len(how.share))
        falls = np.flatnonzero((how.share > 0) & (how.share < 1))
        if len(falls):
            first, last = falls[0] - 1, falls[-1] + 1
            for cause, begin, end in (
                ("scaling.truncated-inwards", first + 1, last - 1),
                ("scaling.ramp-over-components", first / 2, last / 2),
            ):
                if begin < end:
                    share = 1 - np.clip((pairs - begin) / (end - begin), 0, 1)
                    yield turning(cause, replace(how, share=share).frequencies())


def _attention_factor(maker: Maker, rotary: Rotary, scaling: RotaryScaling) -> Iterator[Hypothesis]:
    """Yield causes of a wrong factor of cosine and sine."""
    right, grown = scaling.gain, np.log(scaling.factor or 1.0)
    usual = 0.1 * grown + 1
    others = {
        "attention-factor.left-out": 1.0,
        "attention-factor.squared": right**2,
        "attention-factor.inverted": 1 / right,
        "attention-factor.not-read": replace(scaling, attention_factor=None).gain,
        "attention-factor.decimal-logarithm": 0.1 * grown / np.log(10) + 1,
        "attention-factor.without-mscale": usual,
        "attention-factor.mscale-not-divided": 0.1 * (scaling.mscale or 1.0) * grown + 1,
    }
    if scaling.rope_type == "longrope":
        others["attention-factor.of-yarn"] = usual
        del others["attention-factor.without-mscale"], others["attention-factor.mscale-not-divided"]
    if right == 1:
        return
    for cause, other in others.items():
        if other != right:
            yield maker.staged(cause, attention_factor=lambda a, other=other: float(other))
    turned = np.arange(maker.problem.shape.head_size) < rotary.size
    for side in ("query", "key"):
        yield maker.staged(
            "attention-factor.of-one-side",
            {"of": side},
            rotated=lambda a, s, x, side=side: (
                Stages.rotated(a, s, x) / np.where(turned & (s != side), right, 1.0)
            ),
        )
    if not turned.all():
        yield maker.staged(
            "attention-factor.of-whole-head",
            rotated=lambda a, s, x: Stages.rotated(a, s, x) * np.where(turned, 1.0, right),
        )


def misread_lengths(lengths: IntArray) -> tuple[tuple[str, IntArray], ...]:
    """Return ids of causes, each with the lengths `[batch]` that a kernel with that defect uses.

    An id occurs twice if the defect has two forms.
    """
    return (
        ("lengths.one-more", lengths + 1),
        ("lengths.last-index", np.maximum(lengths - 1, 0)),
        ("lengths.last-index", np.maximum(lengths - 1, 1)),
        ("lengths.of-first-entry", 0 * lengths + lengths[0]),
        ("lengths.of-next-entry", np.roll(lengths, 1)),
        ("lengths.of-next-entry", np.roll(lengths, -1)),
        ("lengths.longest", 0 * lengths + lengths.max()),
    )


def _lengths(maker: Maker, side: str, lengths: IntArray) -> Iterator[Hypothesis]:
    problem, about = maker.problem, {"of": side}
    whole = getattr(problem.shape, f"{side}_length")
    base = _without(problem, f"{side} lengths")

    def used(lengths: IntArray) -> BoolArray:
        there = np.arange(whole) < lengths[:, None]
        return there[:, None, None] if side == "key" else there[:, None, :, None]

    # The positions of queries do not depend on which keys are hidden.
    for cause, other in (
        ("lengths.not-applied", 0 * lengths + whole),
        *misread_lengths(lengths),
        ("lengths.shortest", 0 * lengths + max(1, lengths.min())),
    ):
        yield maker.masked(cause, base & used(other), about)
    for size in TILES:
        up = np.minimum(-(-lengths // size) * size, whole)
        down = np.maximum(lengths // size * size, 1)
        for cause, tiled in (("lengths.in-tiles", up), ("lengths.in-full-tiles", down)):
            if not np.array_equal(tiled, lengths):
                yield maker.masked(cause, base & used(tiled), {**about, "size": size})
    if side == "key" and not lengths.all():
        last = np.maximum(np.cumsum(lengths > 0) - 1, 0)
        yield maker.staged(
            "lengths.empty-not-skipped", mix=lambda a, w, v: Stages.mix(a, w, v)[last]
        )
    others = {"key": problem.query_lengths, "query": problem.key_lengths}[side]
    if others is not None:
        yield maker.masked("lengths.of-other-side", base & used(others), about)
    if side == "query" and problem.causal == "bottom-right":
        keys = problem.key_lengths
        ends = problem.shape.key_length + 0 * lengths if keys is None else keys
        own, kept = ends - lengths, _without(problem, "causal")
        before = np.concatenate([own[:1], own[:-1]])
        for cause, offset in (
            ("lengths.alignment-of-entry-before", before),
            ("lengths.of-queries-not-in-alignment", ends - whole),
        ):
            yield maker.masked(cause, kept & (_counted(maker, offset) <= 0))
    if side == "key":
        second = np.arange(whole) >= whole // 2
        yield maker.masked("lengths.not-in-second-half", base & (used(lengths) | second), about)
        yield maker.masked("lengths.from-the-end", base & used(lengths)[..., ::-1], about)
    if side == "key" and problem.causal == "bottom-right":
        kept = _without(problem, "causal")
        for cause, ends in (
            ("lengths.not-in-alignment", 0 * lengths + whole),
            ("lengths.alignment-of-first-entry", 0 * lengths + lengths[0]),
            ("lengths.alignment-one-off", lengths - 1),
            ("lengths.alignment-one-off", lengths + 1),
        ):
            offset = ends - maker.queries
            yield maker.masked(cause, kept & (_counted(maker, offset) <= 0))


def _boundaries(maker: Maker, ids: IntArray) -> Iterator[Hypothesis]:
    """Yield hypotheses in which packed sequences of queries and keys begin a token late or early.

    Positions begin again where the sequences do, unless a rotary embedding is there, which may be
    applied before. Each boundary is tried alone too, if there are few.
    """
    problem = maker.problem
    kept = Positions(query=problem.position_of_queries, key=problem.position_of_keys)

    def rotated(a: Stages, side: str, x: Array) -> Array:
        return a.turned(x, a.angles(getattr(kept, side)))

    def made(other: IntArray) -> Stages:
        moved = problem.replace(segments=Segments(query=other, key=other))
        return Stages(moved, **{**maker.right.changes, "rotated": rotated})

    begins = ids[:, 1:] != ids[:, :-1]
    late = np.concatenate([ids[:, :1], ids[:, :-1]], axis=1)
    early = np.concatenate([ids[:, 1:], ids[:, -1:]], axis=1)
    where = np.flatnonzero(begins.any(axis=0)) + 1
    alone = where.tolist() if 1 < len(where) <= MOST_SPLITS else []
    for at, (by, moved) in itertools.product((None, *alone), (("late", late), ("early", early))):
        about: dict[str, Argument] = {} if at is None else {"at": at}
        cause = f"segments.begin-{by}" if at is None else f"segments.one-begins-{by}"
        tokens = None if at is None else np.arange(ids.shape[1]) == at - (by == "early")
        other = moved if tokens is None else np.where(tokens, moved, ids)
        yield _asked(maker, cause, about, segments=Segments(query=other, key=other))
        if problem.rotary is not None and problem.axes is None:
            yield Hypothesis(Phrase(cause, about), partial(made, other))


def _segments(maker: Maker, segments: Segments) -> Iterator[Hypothesis]:
    problem = maker.problem
    query, key = segments.query[:, :, None], segments.key[:, None]
    base, same = _without(problem, "segments"), query == key
    last = np.maximum(query.max(axis=1, keepdims=True), key.max(axis=2, keepdims=True)) - 1
    queries = query.shape[1]
    if queries < key.shape[2]:
        of_keys = base & (key[:, 0, :queries, None] == key)[:, None]
        yield maker.masked("segments.of-keys-for-queries", of_keys)
    for cause, seen in (
        ("segments.not-applied", np.ones_like(same)),
        ("segments.of-first-entry", np.broadcast_to(same[:1], same.shape)),
        ("segments.shifted", np.roll(same, 1, axis=-1)),
        ("segments.see-those-before", query >= key),
        ("segments.see-neighbours", np.abs(query - key) <= 1),
        ("segments.by-parity", (query - key) % 2 == 0),
        ("segments.numbers-rounded", BFLOAT16.round(1.0 * query) == BFLOAT16.round(1.0 * key)),
        ("segments.last-joined", np.minimum(query, last) == np.minimum(key, last)),
        ("segments.of-one-token-dropped", same & (same.sum(axis=-1, keepdims=True) > 1)),
    ):
        yield maker.masked(cause, base & seen[:, None])
    if queries == key.shape[2] and np.array_equal(segments.query, segments.key):
        yield from _boundaries(maker, segments.key)
    if problem.causal is not None:
        kept = _without(problem, "causal")
        more = problem.shape.key_length - maker.queries
        # Positions begin again in each sequence, but not for what knows of no sequences.
        plain = _without(problem, "segments", "causal") & (_counted(maker, more) <= 0)
        yield maker.masked("segments.not-applied", plain)
        yield maker.masked("segments.aligned-as-a-whole", kept & (_counted(maker, more) <= 0))
        at_start = problem.replace(causal=None).distances() <= 0
        yield maker.masked("segments.aligned-at-start", kept & at_start)
    if problem.rotary is not None:
        index = [np.arange(n)[None] for n in problem.shape.logits[2:]]
        of = [np.broadcast_to(at, (len(query), at.shape[1])) for at in index]
        there = Positions(query=of[0], key=of[1])
        yield maker.staged(
            "rotary.over-segments",
            rotated=lambda a, side, x: a.turned(x, a.angles(getattr(there, side))),
        )
