"""Known defects in the treatment of masks, the causal flag, and the additive bias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from conformance.causes.hypothesis import Hypothesis, Maker, significant
from conformance.causes.stages import Stages
from conformance.definition.dtypes import BFLOAT16, FLOAT16, Array, BoolArray
from conformance.records.phrase import NOTHING, Phrase

FINITE = (1, 5, 10, 20, 30, 50, 100, 1e3, 1e4, 1e9)
"""Numbers that programmers write for infinity."""

UNDERFLOWS = 80.0
"""exp of minus this is next to nothing, in float32."""

WINDOWS = (1, 2, 3, 4, 5, 6, 8, 16, 32, 64, 128)
TILES = (2, 4, 8, 16, 32, 64, 128)


def hypotheses(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses about masks, the simplest first."""
    problem = maker.problem
    if problem.allowed is not None:
        yield from _whole(maker)
    if problem.causal is not None:
        yield from _causal(maker)
    if problem.attn_bias is not None:
        yield from _bias(maker, problem.attn_bias)
    if problem.allowed is not None:
        yield from _applied(maker)
        yield from _axes(maker)
        yield from _edges(maker)


def _whole(maker: Maker) -> Iterator[Hypothesis]:
    problem = maker.problem
    assert problem.allowed is not None
    if problem.mask is not None and problem.causal is not None:
        yield maker.asked("mask.not-applied-beside-causal", mask=None)
        yield maker.asked("causal.not-applied", causal=None)
        inverted = ~problem.mask
        yield maker.asked("mask.inverted-beside-causal", mask=inverted)
        yield maker.asked("mask.not-applied-with-causal", mask=None, causal=None)
    elif problem.mask is not None:
        yield maker.asked("mask.not-applied", mask=None)
    else:
        yield maker.asked("causal.not-applied", causal=None)
    yield maker.masked("mask.inverted", ~problem.allowed)
    for mistake, ones in (
        ("mask.added-where-attended", problem.allowed),
        ("mask.added-where-blocked", ~problem.allowed),
    ):
        plus = ones.astype(np.float64)
        if problem.attn_bias is not None:
            plus = plus + problem.attn_bias
        yield maker.asked(mistake, mask=None, causal=None, attn_bias=plus)


def _applied(maker: Maker) -> Iterator[Hypothesis]:
    """Return a mask that is the right one, and does something else than to block."""
    allowed = maker.right.allowed

    def after(a: Stages, logits: Array) -> Array:
        return np.where(allowed, Stages.softmax(a, a.shown), 0.0)

    right = maker.right
    above = np.max(right.shown, axis=-1) - np.max(right.logits, axis=-1)
    # Where the rest of the row underflows, the two are one.
    either = np.max(above) > UNDERFLOWS
    yield maker.staged(
        "mask.after-softmax-or-maximum" if either else "mask.after-softmax",
        softmax=after,
        in_parts=True,
    )
    yield maker.staged(
        "mask.multiplied-into-logits", hide=lambda a, logits: logits * allowed, in_parts=True
    )
    for number in FINITE:
        yield maker.staged(
            "mask.blocked-lowered",
            {"by": float(number)},
            hide=lambda a, logits, n=number: np.where(allowed, logits, logits - n),
            in_parts=True,
        )
        yield maker.staged(
            "mask.blocked-set",
            {"number": -float(number)},
            hide=lambda a, logits, n=number: np.where(allowed, logits, -n),
            in_parts=True,
        )


def _axes(maker: Maker) -> Iterator[Hypothesis]:
    """Return a mask whose axes are taken for others."""
    problem = maker.problem
    shape, full = problem.shape, maker.right.allowed
    batch, heads = shape.batch, shape.heads
    yield maker.masked("mask.of-first-batch-entry", full[:1])
    yield maker.masked("mask.of-first-head", full[:, :1])
    yield maker.masked("mask.of-first-query", full[:, :, :1])
    if shape.query_length == shape.key_length:
        turned = np.swapaxes(full, -1, -2)
        over_keys = problem.causal is None and problem.mask is not None
        if over_keys and problem.mask.shape[-2] == 1:  # type: ignore[union-attr]
            yield maker.masked("mask.padding-over-queries", turned)
        else:
            yield maker.masked("mask.transposed", turned)
        yield maker.masked("mask.applied-to-queries-too", full & turned)
    yield maker.masked("mask.reversed", full[..., ::-1])
    turned = full.reshape(heads, batch, *full.shape[2:]).swapaxes(0, 1)
    yield maker.masked("mask.heads-before-batch", turned)
    if shape.group > 1:
        split = full.reshape(batch, shape.group, -1, *full.shape[2:]).swapaxes(1, 2)
        yield maker.masked("mask.groups-split-otherwise", split.reshape(full.shape))
    tiled = np.tile(full[:, 0], (heads, 1, 1)).reshape(full.shape)
    yield maker.masked("mask.tiled-over-heads", tiled)


def _edges(maker: Maker) -> Iterator[Hypothesis]:
    """Return a mask that is off by one, and two masks joined wrongly."""
    problem = maker.problem
    triangle = None
    if problem.mask is not None and problem.causal is not None:
        triangle = problem.replace(mask=None).allowed
        assert triangle is not None
        yield maker.masked("mask.joined-by-or", problem.mask | triangle)
    full = problem.mask if problem.mask is not None else problem.allowed
    assert full is not None
    short, long = full.copy(), full.copy()
    short[..., :-1] &= full[..., 1:]
    long[..., 1:] |= full[..., :-1]
    yield maker.asked("mask.padding-one-too-long", mask=short)
    yield maker.asked("mask.padding-one-too-short", mask=long)
    for last, mistake in (
        (False, "mask.window-without-first-key"),
        (True, "mask.window-without-last-key"),
    ):
        every = _without_edge(full, last)
        if problem.mask is not None:
            yield maker.asked(mistake, mask=every)
        yield maker.masked(mistake, _without_edge(maker.right.allowed, last))
        if triangle is not None:
            yield maker.masked(mistake, every & _without_edge(triangle, last))


def _without_edge(allowed: BoolArray, last: bool) -> BoolArray:
    at = allowed[..., ::-1] if last else allowed
    edge = (np.cumsum(at, axis=-1) == 1) & at
    kept: BoolArray = at & ~(edge & ~(at.sum(axis=-1, keepdims=True) == 1))
    return kept[..., ::-1] if last else kept


def _causal(maker: Maker) -> Iterator[Hypothesis]:
    problem, shape = maker.problem, maker.problem.shape
    queries, keys = shape.query_length, shape.key_length
    other = "top-left" if problem.causal == "bottom-right" else "bottom-right"
    if queries != keys:
        yield maker.asked("causal.aligned", {"alignment": other}, causal=other)
    own = 0 if problem.causal == "top-left" else keys - queries

    def seen(triangle: Any) -> BoolArray:
        full = np.broadcast_to(triangle.astype(np.bool_), shape.logits)
        return full if problem.mask is None else problem.mask & full

    for offset, mistake in ((-1, "causal.without-own-key"), (1, "causal.sees-next-key")):
        yield maker.masked(mistake, seen(np.tri(queries, keys, own + offset)))
    if queries != keys:
        yield maker.masked("causal.offset-negated", seen(np.tri(queries, keys, queries - keys)))
    triangle = np.tri(queries, keys, own, dtype=np.bool_)
    yield maker.masked(
        "causal.reversed",
        seen(~triangle | np.eye(queries, keys, dtype=np.bool_)),
    )
    yield maker.masked(
        "causal.reversed",
        seen(~np.tri(queries, keys, own - 1, dtype=np.bool_)),
    )
    if max(queries, keys) > 256:
        for kind in (BFLOAT16, FLOAT16):
            row, column = kind.round(np.arange(queries) + own), kind.round(np.arange(keys))
            yield maker.masked(
                "causal.positions-rounded", seen(column <= row[:, None]), {"to": kind.name}
            )
    for size in WINDOWS:
        if size < keys:
            yield maker.masked(
                "causal.window",
                seen(triangle & ~np.tri(queries, keys, own - size, dtype=np.bool_)),
                {"size": size},
            )
    for size in TILES:
        if size < max(queries, keys):
            tile = np.arange(queries)[:, None] // size == np.arange(keys) // size
            yield maker.masked("causal.by-tile", seen(triangle | tile), {"size": size})


def _bias(maker: Maker, bias: Array) -> Iterator[Hypothesis]:
    problem = maker.problem
    yield maker.asked("bias.not-applied", attn_bias=None)
    yield maker.asked("bias.subtracted", attn_bias=-bias)
    yield maker.asked("bias.added-twice", attn_bias=2.0 * bias)
    yield maker.asked("bias.scaled", attn_bias=bias * problem.logit_scale)
    if problem.logit_scale:
        yield maker.asked("bias.divided-by-scale", attn_bias=bias / problem.logit_scale)
    full = np.broadcast_to(bias, problem.shape.logits)
    yield maker.asked("bias.of-first-head", attn_bias=full[:, :1])
    yield maker.asked("bias.of-first-batch-entry", attn_bias=full[:1])
    yield maker.asked("bias.of-first-query", attn_bias=full[:, :, :1])
    if problem.shape.query_length == problem.shape.key_length:
        yield maker.asked("bias.transposed", attn_bias=np.swapaxes(full, -1, -2))
    for limit in (0.5, 1, 2, 3, 5, 10, 20, 50):
        if np.abs(bias).max() > limit:
            yield maker.asked(
                "bias.cut", {"limit": float(limit)}, attn_bias=np.clip(bias, -limit, limit)
            )
    if problem.allowed is not None:
        yield maker.asked(
            "bias.undoes-mask",
            mask=None,
            causal=None,
            attn_bias=bias,
        )


def hidden_by(logits: Array, weights: Array, allowed: BoolArray) -> Phrase:
    """Return how blocked logits were changed, judging by returned weights that are not zero there.

    A weight is exp(logit − c); c is told by the row's allowed weights.
    """
    blocked = ~allowed & (weights > 0)
    if not blocked.any():
        return NOTHING
    with np.errstate(divide="ignore", invalid="ignore"):
        seen = np.log(weights)
    level = np.where(allowed & (weights > 0), seen - logits, np.nan)
    counts = (~np.isnan(level)).any(axis=-1, keepdims=True)
    rows = np.nanmean(np.where(counts, level, 0.0), axis=-1, keepdims=True)
    set_to = (seen - rows)[blocked & counts]
    lowered = (seen - rows - logits)[blocked & counts]
    if not set_to.size:
        return NOTHING
    for values, mistake, name in (
        (-lowered, "mask.blocked-lowered", "by"),
        (set_to, "mask.blocked-set", "number"),
    ):
        middle = float(np.median(values))
        if abs(middle) > 0.5 and np.abs(values - middle).max() <= 0.01 * abs(middle):
            return Phrase(mistake, {name: significant(middle)})
    return NOTHING
