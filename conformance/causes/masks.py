"""What becomes of a mask, the causal flag, or the additive bias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from conformance.causes.hypothesis import Hypothesis, Maker
from conformance.causes.stages import Stages
from conformance.definition.dtypes import BFLOAT16, FLOAT16, Array, BoolArray

FINITE = (1, 5, 10, 20, 30, 50, 100, 1e3, 1e4, 1e9)
"""Numbers that programmers write for infinity."""

UNDERFLOWS = 80.0
"""exp of minus this is next to nothing, in float32."""

WINDOWS = (1, 2, 3, 4, 5, 6, 8, 16, 32, 64, 128)
TILES = (2, 4, 8, 16, 32, 64, 128)


def hypotheses(maker: Maker) -> Iterator[Hypothesis]:
    """The simplest first."""
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
        yield maker.asked("with the mask ignored beside the causal flag", mask=None)
        yield maker.asked("with the causal flag ignored", causal=None)
        inverted = ~problem.mask
        yield maker.asked("with the mask inverted beside the causal flag", mask=inverted)
    told = "mask" if problem.mask is not None else "causal flag"
    if problem.mask is not None and problem.causal is not None:
        told = "mask and the causal flag"
    yield maker.asked(f"with the {told} ignored", mask=None, causal=None)
    yield maker.masked("with the mask inverted", ~problem.allowed)
    for sign, where in ((1.0, "where it may attend"), (-1.0, "where it may not")):
        plus = (problem.allowed if sign > 0 else ~problem.allowed).astype(np.float64)
        if problem.attn_bias is not None:
            plus = plus + problem.attn_bias
        yield maker.asked(
            f"with the mask added to the logits as 1 {where}",
            mask=None,
            causal=None,
            attn_bias=plus,
        )


def _applied(maker: Maker) -> Iterator[Hypothesis]:
    """A mask that is the right one, and does something else than to block."""
    allowed = maker.right.allowed

    def after(a: Stages, logits: Array) -> Array:
        return np.where(allowed, Stages.softmax(a, a.shown), 0.0)

    right = maker.right
    above = np.max(right.shown, axis=-1) - np.max(right.logits, axis=-1)
    # Where the rest of the row underflows, the two are one.
    also = "the row's maximum taken before the mask, or " if np.max(above) > UNDERFLOWS else ""
    yield maker.staged(
        f"with {also}the mask applied after the softmax", softmax=after, in_parts=True
    )
    yield maker.staged(
        "with blocked logits set to 0, as by multiplying the mask with the logits",
        hide=lambda a, logits: logits * allowed,
        in_parts=True,
    )
    for number in FINITE:
        yield maker.staged(
            f"with blocked logits lowered by {number:g} only",
            hide=lambda a, logits, n=number: np.where(allowed, logits, logits - n),
            in_parts=True,
        )
        yield maker.staged(
            f"with blocked logits set to {-number:g}",
            hide=lambda a, logits, n=number: np.where(allowed, logits, -n),
            in_parts=True,
        )


def _axes(maker: Maker) -> Iterator[Hypothesis]:
    """A mask whose axes are taken for others."""
    problem = maker.problem
    shape, full = problem.shape, maker.right.allowed
    batch, heads = shape.batch, shape.heads
    yield maker.masked("with the first batch entry's mask for all", full[:1])
    yield maker.masked("with the first head's mask for all", full[:, :1])
    yield maker.masked("with the first query's mask for all", full[:, :, :1])
    if shape.query_length == shape.key_length:
        turned = np.swapaxes(full, -1, -2)
        over_keys = problem.causal is None and problem.mask is not None
        if over_keys and problem.mask.shape[-2] == 1:  # type: ignore[union-attr]
            yield maker.masked("with the padding applied to queries instead of keys", turned)
        else:
            yield maker.masked("with the mask transposed", turned)
        yield maker.masked("with the mask applied to queries as to keys", full & turned)
    yield maker.masked("with the mask reversed along the keys", full[..., ::-1])
    turned = full.reshape(heads, batch, *full.shape[2:]).swapaxes(0, 1)
    yield maker.masked("with the mask read as (heads batch) instead of (batch heads)", turned)
    if shape.group > 1:
        split = full.reshape(batch, shape.group, -1, *full.shape[2:]).swapaxes(1, 2)
        yield maker.masked(
            "with the mask's heads split into groups the other way", split.reshape(full.shape)
        )
    tiled = np.tile(full[:, 0], (heads, 1, 1)).reshape(full.shape)
    yield maker.masked("with the batch's masks tiled over the heads instead of repeated", tiled)


def _edges(maker: Maker) -> Iterator[Hypothesis]:
    """A mask that is off by one, and two masks joined wrongly."""
    problem = maker.problem
    triangle = None
    if problem.mask is not None and problem.causal is not None:
        triangle = problem.replace(mask=None).allowed
        assert triangle is not None
        yield maker.masked(
            "with mask and causal flag joined by or instead of and", problem.mask | triangle
        )
    full = problem.mask if problem.mask is not None else problem.allowed
    assert full is not None
    short, long = full.copy(), full.copy()
    short[..., :-1] &= full[..., 1:]
    long[..., 1:] |= full[..., :-1]
    yield maker.asked("with the padding one key too long: a key less is seen", mask=short)
    yield maker.asked("with the padding one key too short: a key more is seen", mask=long)
    for last, told in ((False, "first"), (True, "last")):
        every = _without_edge(full, last)
        told = f"without the {told} key of each row's window"
        if problem.mask is not None:
            yield maker.asked(told, mask=every)
        yield maker.masked(told, _without_edge(maker.right.allowed, last))
        if triangle is not None:
            yield maker.masked(told, every & _without_edge(triangle, last))


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
        yield maker.asked(f"with the causal mask aligned {other}", causal=other)
    own = 0 if problem.causal == "top-left" else keys - queries

    def seen(triangle: Any) -> BoolArray:
        full = np.broadcast_to(triangle.astype(np.bool_), shape.logits)
        return full if problem.mask is None else problem.mask & full

    for offset, told in ((-1, "a query does not see its own key"), (1, "a query sees the next")):
        yield maker.masked(
            f"with the causal mask off by one ({offset:+d}): {told}",
            seen(np.tri(queries, keys, own + offset)),
        )
    if queries != keys:
        yield maker.masked(
            "with the causal mask's offset negated", seen(np.tri(queries, keys, queries - keys))
        )
    triangle = np.tri(queries, keys, own, dtype=np.bool_)
    yield maker.masked(
        "with the causal mask reversed: the upper triangle is kept",
        seen(~triangle | np.eye(queries, keys, dtype=np.bool_)),
    )
    yield maker.masked(
        "with the causal mask reversed: the upper triangle is kept",
        seen(~np.tri(queries, keys, own - 1, dtype=np.bool_)),
    )
    if max(queries, keys) > 256:
        for kind in (BFLOAT16, FLOAT16):
            row, column = kind.round(np.arange(queries) + own), kind.round(np.arange(keys))
            yield maker.masked(
                f"with positions of the causal mask rounded to {kind.name}",
                seen(column <= row[:, None]),
            )
    for size in WINDOWS:
        if size < keys:
            yield maker.masked(
                f"with a causal window of {size} keys",
                seen(triangle & ~np.tri(queries, keys, own - size, dtype=np.bool_)),
            )
    for size in TILES:
        if size < max(queries, keys):
            tile = np.arange(queries)[:, None] // size == np.arange(keys) // size
            yield maker.masked(
                f"with the causal mask applied to whole tiles of {size}: the tile on the "
                "diagonal sees all of itself",
                seen(triangle | tile),
            )


def _bias(maker: Maker, bias: Array) -> Iterator[Hypothesis]:
    problem = maker.problem
    yield maker.asked("with the additive bias ignored", attn_bias=None)
    yield maker.asked("with the additive bias subtracted", attn_bias=-bias)
    yield maker.asked("with the additive bias added twice", attn_bias=2.0 * bias)
    yield maker.asked(
        "with the scale applied to the bias too", attn_bias=bias * problem.logit_scale
    )
    if problem.logit_scale:
        yield maker.asked(
            "with the bias divided by the scale", attn_bias=bias / problem.logit_scale
        )
    full = np.broadcast_to(bias, problem.shape.logits)
    yield maker.asked("with the first head's bias for all", attn_bias=full[:, :1])
    yield maker.asked("with the first batch entry's bias for all", attn_bias=full[:1])
    yield maker.asked("with the first query's bias for all", attn_bias=full[:, :, :1])
    if problem.shape.query_length == problem.shape.key_length:
        yield maker.asked("with the bias transposed", attn_bias=np.swapaxes(full, -1, -2))
    for limit in (0.5, 1, 2, 3, 5, 10, 20, 50):
        if np.abs(bias).max() > limit:
            yield maker.asked(
                f"with the bias cut at ±{limit:g}", attn_bias=np.clip(bias, -limit, limit)
            )
    if problem.allowed is not None:
        yield maker.asked(
            "with the bias added to blocked logits after they were blocked, and the mask ignored",
            mask=None,
            causal=None,
            attn_bias=bias,
        )


def hidden_by(logits: Array, weights: Array, allowed: BoolArray) -> str:
    """What was done to blocked logits, from returned weights that are not zero there.

    A weight is exp(logit − c); c is told by the row's allowed weights.
    """
    blocked = ~allowed & (weights > 0)
    if not blocked.any():
        return ""
    with np.errstate(divide="ignore", invalid="ignore"):
        seen = np.log(weights)
    level = np.where(allowed & (weights > 0), seen - logits, np.nan)
    counts = (~np.isnan(level)).any(axis=-1, keepdims=True)
    rows = np.nanmean(np.where(counts, level, 0.0), axis=-1, keepdims=True)
    set_to = (seen - rows)[blocked & counts]
    lowered = (seen - rows - logits)[blocked & counts]
    if not set_to.size:
        return ""
    for values, told in ((lowered, "lowered by {:.4g} only"), (set_to, "set to {:.4g}")):
        middle = float(np.median(values))
        if abs(middle) > 0.5 and np.abs(values - middle).max() <= 0.01 * abs(middle):
            number = -middle if values is lowered else middle
            return f"equals the answer with blocked logits {told.format(number)}"
    return ""
