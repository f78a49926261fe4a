"""Known defects in how the mask, the causal flag, the bias and the scale act on the logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from conformance.causes.hypothesis import (
    NO_MORE,
    About,
    Best,
    Evidence,
    Hypothesis,
    Maker,
    significant,
)
from conformance.causes.stages import Stages
from conformance.definition.dtypes import BFLOAT16, DTYPES, FLOAT16, Array, BoolArray
from conformance.definition.problem import Causal, Problem
from conformance.records.findings import NOTHING, Phrase

FINITE = (1, 5, 10, 20, 30, 50, 100, 1e3, 1e4, 1e9)
"""Sizes of the finite numbers that programs use in place of −∞ to block keys."""

UNDERFLOWS = 80.0
"""The number x beyond which exp(−x) is negligible in float32."""

WINDOWS = (1, 2, 3, 4, 5, 6, 8, 16, 32, 64, 128)
TILES = (2, 4, 8, 16, 32, 64, 128)

LEAST = 1e-4
"""A factor is reported only if it differs from 1 by more than this number."""

GRID = np.linspace(-4, 4, 33)
"""The binary logarithms of the factors that are tried before the best one is refined."""

GOLDEN = (math.sqrt(5) - 1) / 2


def hypotheses(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses about the mask, the bias and the scale, the simplest first."""
    problem = maker.problem
    if problem.allowed is not None:
        yield from _whole(maker)
    if problem.causal is not None:
        yield from _causal(maker)
    if problem.attn_bias is not None:
        yield from _bias(maker, problem.attn_bias)
    yield from _causal_unasked(maker)
    if problem.allowed is not None:
        yield from _applied(maker)
        yield from _axes(maker)
        yield from _edges(maker)
    yield from _scale(maker)
    yield from _of_other_blocks(maker)


def _whole(maker: Maker) -> Iterator[Hypothesis]:
    problem = maker.problem
    mask, causal, allowed = problem.mask, problem.causal, maker.right.allowed
    if mask is not None and causal is not None:
        yield maker.asked("mask.not-applied-beside-causal", mask=None)
        yield maker.asked("causal.not-applied", causal=None)
        yield maker.asked("mask.inverted-beside-causal", mask=~mask)
        yield maker.asked("mask.not-applied-with-causal", mask=None, causal=None)
    elif mask is not None:
        yield maker.asked("mask.not-applied", mask=None)
    else:
        yield maker.asked("causal.not-applied", causal=None)
    yield maker.masked("mask.inverted", ~allowed)
    bias = 0.0 if problem.attn_bias is None else problem.attn_bias
    for cause, ones in (
        ("mask.added-where-attended", allowed),
        ("mask.added-where-blocked", ~allowed),
    ):
        yield maker.asked(cause, mask=None, causal=None, attn_bias=ones + bias)


def _of_other_blocks(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses in which values meet the keys of the block before or after, as in a ring."""
    keys = maker.problem.shape.key_length
    for blocks, by in ((2, 1), (3, 1), (3, -1), (4, 1), (4, -1)):
        shift = by * (keys // blocks)
        if not shift:
            continue

        def score(a: Stages, query: Array, key: Array, shift: int = shift) -> Array:
            return Stages.score(a, query, np.roll(key, shift, axis=2))

        yield maker.staged("keys.of-another-block", {"blocks": blocks}, score=score)


def _applied(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses in which the right mask is applied wrongly, such as after the softmax."""
    right, allowed = maker.right, maker.right.allowed
    partly = partial(maker.staged, in_parts=True)

    def after(a: Stages, logits: Array) -> Array:
        return np.where(allowed, Stages.softmax(a, a.shown), 0.0)

    above = np.max(right.shown, axis=-1) - np.max(right.logits, axis=-1)
    # If the rest of the row underflows, the two defects have the same effect.
    either = "-or-maximum" if np.max(above) > UNDERFLOWS else ""
    yield partly(f"mask.after-softmax{either}", softmax=after)
    yield partly("mask.multiplied-into-logits", hide=lambda a, logits: logits * allowed)
    for number in map(float, FINITE):

        def lowered(a: Stages, logits: Array, by: float = number) -> Array:
            return np.where(allowed, logits, logits - by)

        def replaced(a: Stages, logits: Array, by: float = number) -> Array:
            return np.where(allowed, logits, -by)

        yield partly("mask.blocked-lowered", {"by": number}, hide=lowered)
        yield partly("mask.blocked-set", {"number": -number}, hide=replaced)


def _axes(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses in which axes of the mask are exchanged, reversed, misread or ignored."""
    problem, shape, full = maker.problem, maker.problem.shape, maker.right.allowed
    batch, heads, *matrix = full.shape
    yield maker.masked("mask.of-first-batch-entry", full[:1])
    for by in (1, -1) if batch > 2 else (1,) if batch == 2 else ():
        yield maker.masked("mask.of-next-entry", np.roll(full, by, axis=0))
    yield maker.masked("mask.of-first-head", full[:, :1])
    yield maker.masked("mask.of-first-query", full[:, :, :1])
    if shape.query_length == shape.key_length:
        turned = np.swapaxes(full, -1, -2)
        mask = problem.mask if problem.causal is None else None
        padding = mask is not None and mask.shape[-2] == 1
        yield maker.masked("mask.padding-over-queries" if padding else "mask.transposed", turned)
        yield maker.masked("mask.applied-to-queries-too", full & turned)
    yield maker.masked("mask.reversed", full[..., ::-1])
    if problem.mask is not None and problem.causal is not None:
        yield maker.asked("mask.reversed", mask=problem.mask[..., ::-1])
    yield maker.masked(
        "mask.heads-before-batch", full.reshape(heads, batch, *matrix).swapaxes(0, 1)
    )
    if shape.group > 1:
        split = full.reshape(batch, shape.group, -1, *matrix).swapaxes(1, 2)
        yield maker.masked("mask.groups-split-otherwise", split.reshape(full.shape))
    tiled = np.tile(full[:, 0], (heads, 1, 1)).reshape(full.shape)
    yield maker.masked("mask.tiled-over-heads", tiled)


def _edges(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses in which a mask is off by one, or two masks are joined wrongly."""
    mask, allowed = maker.problem.mask, maker.right.allowed
    triangle = maker.problem.replace(mask=None).allowed if mask is not None else None
    if mask is not None and triangle is not None:
        yield maker.masked("mask.joined-by-or", mask | triangle)
    full = mask if mask is not None else maker.problem.allowed
    assert full is not None
    short, long = full.copy(), full.copy()
    short[..., :-1] &= full[..., 1:]
    long[..., 1:] |= full[..., :-1]
    yield maker.asked("mask.padding-one-too-long", mask=short)
    yield maker.asked("mask.padding-one-too-short", mask=long)
    for cause, last in (
        ("mask.window-without-first-key", False),
        ("mask.window-without-last-key", True),
    ):
        inner = _without_edge(full, last)
        if (allowed & ~_without_edge(allowed, last)).any(axis=(0, 1, 2)).sum() == 1:
            # The same key is missing for every query, so this is not the edge of a window.
            continue
        if mask is not None:
            yield maker.asked(cause, mask=inner)
        yield maker.masked(cause, _without_edge(allowed, last))
        if triangle is not None:
            yield maker.masked(cause, inner & _without_edge(triangle, last))


def _without_edge(allowed: BoolArray, last: bool) -> BoolArray:
    """Return the mask without the first or, if `last`, the last key that each query attends to.

    `allowed` and the result are True where a query may attend to a key. If a query attends to only
    one key, this key is kept.
    """
    turned = allowed[..., ::-1] if last else allowed
    edge = (np.cumsum(turned, axis=-1) == 1) & turned
    kept: BoolArray = turned & ~(edge & (turned.sum(axis=-1, keepdims=True) > 1))
    return kept[..., ::-1] if last else kept


def _causal(maker: Maker) -> Iterator[Hypothesis]:
    problem, shape = maker.problem, maker.problem.shape
    queries, keys = maker.queries, shape.key_length
    rows, columns = maker.rows[:, None], np.arange(keys)
    other = "top-left" if problem.causal == "bottom-right" else "bottom-right"
    if queries != keys and queries == shape.query_length:
        yield maker.asked("causal.aligned", {"alignment": other}, causal=other)
    own = 0 if problem.causal == "top-left" else keys - queries

    def tri(offset: int) -> BoolArray:
        return columns <= rows + own + offset

    def seen(cause: str, triangle: BoolArray, about: About = NO_MORE) -> Hypothesis:
        full = np.broadcast_to(triangle, shape.logits)
        return maker.masked(cause, full if problem.mask is None else problem.mask & full, about)

    yield seen("causal.without-own-key", tri(-1))
    yield seen("causal.sees-next-key", tri(1))
    if queries != keys:
        yield seen("causal.offset-negated", columns <= rows + queries - keys)
        if queries != shape.query_length:
            aligned = columns <= rows + (0 if other == "top-left" else keys - queries)
            yield seen("causal.aligned", aligned, {"alignment": other})
    yield seen("causal.reversed", ~tri(0) | (columns == rows))
    yield seen("causal.reversed", ~tri(-1))
    if max(queries, keys) > 256:
        for kind in (BFLOAT16, FLOAT16):
            rounded = kind.round(columns) <= kind.round(rows + own)
            yield seen("causal.positions-rounded", rounded, {"to": kind.name})
    for size in WINDOWS:
        if size < keys:
            yield seen("causal.window", tri(0) & ~tri(-size), {"size": size})
    for size in TILES:
        if size < max(queries, keys):
            same_tile = rows // size == columns // size
            yield seen("causal.by-tile", tri(0) | same_tile, {"size": size})


def _causal_unasked(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses in which a causal mask is applied although the problem has none."""
    problem, keys = maker.problem, maker.problem.shape.key_length
    if maker.queries == problem.shape.query_length:
        for alignment in unasked_alignments(problem):
            yield maker.asked("causal.unasked", {"alignment": alignment}, causal=alignment)
    elif problem.causal is None:
        offsets = {"top-left": 0, "bottom-right": keys - maker.queries}
        for name, own in offsets.items():
            if own or name == "top-left":
                triangle = np.arange(keys) <= maker.rows[:, None] + own
                full = np.broadcast_to(triangle, problem.shape.logits)
                allowed = full if problem.allowed is None else problem.allowed & full
                yield maker.masked("causal.unasked", allowed, {"alignment": name})


def unasked_alignments(problem: Problem) -> tuple[Causal, ...]:
    """Return the alignments of causal masks that differ, if the problem has none; else ()."""
    shape = problem.shape
    if problem.causal is not None:
        return ()
    square = shape.query_length == shape.key_length
    return ("top-left",) if square else ("top-left", "bottom-right")


def _bias(maker: Maker, bias: Array) -> Iterator[Hypothesis]:
    problem, scale = maker.problem, maker.problem.logit_scale
    yield maker.asked("bias.not-applied", attn_bias=None)
    yield maker.asked("bias.subtracted", attn_bias=-bias)
    yield maker.asked("bias.added-twice", attn_bias=2.0 * bias)
    yield maker.asked("bias.scaled", attn_bias=bias * scale)
    if scale:
        yield maker.asked("bias.divided-by-scale", attn_bias=bias / scale)
    full = np.broadcast_to(bias, problem.shape.logits)
    yield maker.asked("bias.of-first-head", attn_bias=full[:, :1])
    yield maker.asked("bias.of-first-batch-entry", attn_bias=full[:1])
    yield maker.asked("bias.of-first-query", attn_bias=full[:, :, :1])
    if problem.shape.query_length == problem.shape.key_length:
        yield maker.asked("bias.transposed", attn_bias=np.swapaxes(full, -1, -2))
    for limit in (0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0):
        if np.abs(bias).max() > limit:
            yield maker.asked("bias.cut", {"limit": limit}, attn_bias=np.clip(bias, -limit, limit))


def _scale(maker: Maker) -> Iterator[Hypothesis]:
    problem, shape = maker.problem, maker.problem.shape
    size, scale = shape.head_size, maker.problem.logit_scale
    width = max(1, shape.query_width)
    on_additive = shape.score == "additive" and problem.scale is None
    for mistake, other in (
        ("scale.missing", 1.0),
        ("scale.by-head-size", 1.0 / size),
        ("scale.on-additive-score" if on_additive else "scale.default", 1.0 / math.sqrt(size)),
        ("scale.by-root-of-width", 1.0 / math.sqrt(width)),
        ("scale.by-width", 1.0 / width),
        ("scale.by-value-head-size", 1.0 / math.sqrt(shape.value_head_size)),
        ("scale.by-number-of-heads", 1.0 / math.sqrt(shape.heads)),
        ("scale.applied-twice", scale * scale),
        ("scale.default-on-top", scale / math.sqrt(size)),
        ("scale.inverted", 1.0 / scale if scale else 0.0),
        ("scale.root-of-head-size", math.sqrt(size)),
        ("softmax.uniform", 0.0),
    ):
        if not math.isclose(other, scale):
            yield maker.asked(mistake, scale=other)
    for name in ("float32", "float16", "bfloat16"):
        narrow = DTYPES[name]
        if narrow.significand_bits >= problem.format.significand_bits:
            continue
        # Where it is one over a root, the root may be rounded first.
        roots = [1 / float(narrow.round(1 / scale))] if scale else []
        for other in dict.fromkeys(float(narrow.round(one)) for one in [scale, *roots]):
            if other != scale:
                yield maker.asked("scale.rounded", {"to": name}, scale=other)


def factor_of_output(maker: Maker, evidence: Evidence, best: Best) -> None:
    """Add causes to `best` if the output is a multiple of the expected output, up to noise.

    Outputs are compared as they are, and after the output bias is subtracted from both. Nothing is
    added if the factor is nearly 0 or 1, or if the output is not finite.
    """
    if not np.isfinite(evidence.got).all():
        return
    bias = maker.problem.weights.output_bias
    offsets: dict[str, Any] = {"output.factor": 0.0}
    if bias is not None:
        offsets["output.factor-without-bias"] = bias
    for mistake, offset in offsets.items():
        factor = best_factor(evidence.got - offset, evidence.want - offset)
        found = factor * (evidence.want - offset) + offset
        if min(abs(factor), abs(factor - 1)) > LEAST and evidence.explained(found):
            cause = Phrase(mistake, {"factor": significant(factor)})
            best.add(evidence.misfit(found), cause)


def fitted_factors(maker: Maker, evidence: Evidence) -> Iterator[tuple[Phrase, float]]:
    """Yield causes with a factor by which the scale, the bias, ALiBi or the rotary base is wrong.

    A cause is yielded, with its factor in all digits, only if the factor explains the output and is
    not nearly 1.
    """
    if not np.isfinite(evidence.got).all():
        return
    problem = maker.problem

    def answer_to(**changes: Any) -> Array:
        return maker.asked("", **changes).make().output

    families: dict[str, Callable[[float], Array]] = {
        "scale.factor": lambda factor: answer_to(scale=problem.logit_scale * factor)
    }
    if problem.attn_bias is not None:
        bias = problem.attn_bias
        families["bias.factor"] = lambda factor: answer_to(attn_bias=factor * bias)
    if problem.slopes is not None:
        slopes = problem.slopes
        families["alibi.factor"] = lambda factor: answer_to(slopes=factor * slopes)
    rotary = problem.rotary
    if rotary is not None and rotary.size > 2:
        families["rotary.base"] = lambda factor: answer_to(
            rotary=replace(rotary, base=factor * rotary.base)
        )
    for mistake, answer in families.items():
        factor = _search(answer, evidence)
        if factor is not None and abs(factor - 1) > LEAST and evidence.explained(answer(factor)):
            if mistake == "rotary.base" and rotary is not None:
                yield Phrase(mistake, {"base": significant(factor * rotary.base)}), factor
            else:
                yield Phrase(mistake, {"factor": significant(factor)}), factor


def best_factor(got: Array, want: Array) -> float:
    """Return the factor by which `want` has to be multiplied to fit `got`, by least squares.

    The result is 1 if `want` is zero everywhere.
    """
    size = float((want * want).sum())
    return float((got * want).sum()) / size if size > 0 else 1.0


def _search(answer: Callable[[float], Array], evidence: Evidence) -> float | None:
    """Return the factor between 1/16 and 16 for which the predicted answer fits best.

    The factors of a grid are tried, and the best one is refined. `answer` returns the prediction
    for a factor. The result is None if the misfit is NaN for some factor of the grid.
    """

    def misfit(exponent: float) -> float:
        found = answer(2.0**exponent)
        left = (evidence.got - found)[np.isfinite(found)]
        return float(left @ left)

    sizes = [misfit(float(exponent)) for exponent in GRID]
    at = int(np.argmin(sizes))
    if not sizes[at] <= misfit(0.0):
        return None
    low, high = float(GRID[max(at - 1, 0)]), float(GRID[min(at + 1, GRID.size - 1)])
    one, other = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    first, second = misfit(one), misfit(other)
    for _ in range(44):
        if first < second:
            high, other, second = other, one, first
            one = high - GOLDEN * (high - low)
            first = misfit(one)
        else:
            low, one, first = one, other, second
            other = low + GOLDEN * (high - low)
            second = misfit(other)
    return 2.0 ** ((low + high) / 2)


def hidden_by(logits: Array, weights: Array, allowed: BoolArray) -> Phrase:
    """Return how blocked logits were changed, judged by returned weights that should be zero.

    A weight is exp(logit − c), and c follows from the weights of the row's allowed keys. Only
    blocked keys with a positive weight are judged. The result is an empty phrase unless all their
    logits were lowered by, or set to, nearly the same number.

    Args:
        logits: the right logits before masking, `[batch heads query key]`.
        weights: the returned weights, of the same shape.
        allowed: the mask, True where a query may attend to a key.
    """
    seen = np.log(weights)
    visible = allowed & (weights > 0)
    usable = visible.any(axis=-1, keepdims=True)
    level = np.where(usable, np.where(visible, seen - logits, np.nan), 0.0)
    seen = seen - np.nanmean(level, axis=-1, keepdims=True)
    blocked = ~allowed & (weights > 0) & usable
    if not blocked.any():
        return NOTHING
    for values, mistake, name in (
        ((logits - seen)[blocked], "mask.blocked-lowered", "by"),
        (seen[blocked], "mask.blocked-set", "number"),
    ):
        middle = float(np.median(values))
        if abs(middle) > 0.5 and np.abs(values - middle).max() <= 0.01 * abs(middle):
            return Phrase(mistake, {name: significant(middle)})
    return NOTHING
