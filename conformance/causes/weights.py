"""Causes of attention weights that are wrong while the output is right."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.causes.fits import LEAST, best_factor
from conformance.causes.hypothesis import Evidence, Maker
from conformance.causes.masks import hidden_by
from conformance.causes.precision import Again, coarse
from conformance.causes.softmax import over as softmax_over
from conformance.causes.stages import Stages
from conformance.definition.dtypes import BFLOAT16, FLOAT16, Array


def cause(maker: Maker, evidence: Evidence, again: Again) -> str:
    """What the returned weights are instead, or ""."""
    if evidence.got.ndim != 4:
        return ""
    for told, found in _instead(maker):
        if evidence.explained(found):
            return f"the returned weights are {told}"
    right, got = maker.right, evidence.got
    if np.isfinite(got).all():
        told = hidden_by(right.shown, got, right.allowed)
        if told:
            return told
        factor = best_factor(got, right.weights)
        if abs(factor - 1) > LEAST and evidence.explained(factor * right.weights):
            return f"the returned weights are {factor:.4g} times those of the softmax"
        plus = float(np.median(got - right.weights))
        if plus and evidence.explained(right.weights + plus):
            return f"the returned weights have {plus:.3g} added"
        cut = _cut(evidence, right.weights)
        if cut:
            return cut
    return coarse("weights", evidence, maker.problem.dtype, again)


def _instead(maker: Maker) -> Iterator[tuple[str, Array]]:
    right, shape = maker.right, maker.problem.shape
    w = right.weights
    if shape.heads > 1:
        mean = w.mean(axis=1, keepdims=True)
        yield "the average over heads, repeated for each head", np.broadcast_to(mean, w.shape)
        yield "those of the first head, for all", np.broadcast_to(w[:, :1], w.shape)
        yield "those of the last head, for all", np.broadcast_to(w[:, -1:], w.shape)
        yield "those of the heads in reverse order", w[:, ::-1]
        if shape.group > 1:
            first = np.repeat(w[:, :: shape.group], shape.group, axis=1)
            yield "those of one head for each head of its group", first
    if shape.batch > 1:
        yield "those of the first batch entry, for all", np.broadcast_to(w[:1], w.shape)
    logits = right.logits
    if maker.problem.allowed is not None:
        yield "those from before the mask", Stages.softmax(right, right.shown)
    # Infinite where blocked: whatever is there is wrong.
    yield "the logits", np.where(np.isfinite(logits), logits, np.nan)
    yield "the logits from before the mask", right.shown
    yield "the scores, before scale and mask", right.scores
    with np.errstate(all="ignore"):
        peak = logits.max(axis=-1, keepdims=True)
        yield "the exponentials, not normalised", np.exp(logits - peak)
        yield "the exponentials, not normalised", np.exp(logits)
        yield "the logarithms of the weights", np.where(w > 0, np.log(w), np.nan)
        over = w.sum(axis=2, keepdims=True)
        yield "normalised over the queries", w / np.maximum(over, 1e-30)
        yield "those of a softmax over the queries", softmax_over(-2, 0.0)(right, logits)
    if shape.query_length == shape.key_length:
        yield "transposed: [key query]", w.swapaxes(-1, -2)
    yield (
        "1 for the key that is attended most, and 0 for the others",
        (w == w.max(axis=-1, keepdims=True)).astype(np.float64),
    )
    for narrow in (FLOAT16, BFLOAT16):
        if narrow.significand_bits < maker.problem.format.significand_bits:
            yield f"rounded to {narrow.name}", narrow.round(w)


def _cut(evidence: Evidence, right: Array) -> str:
    """Small weights are 0, and no others are wrong."""
    dropped = evidence.wrong & (evidence.got == 0)
    if not dropped.any() or (evidence.wrong & ~dropped).any():
        return ""
    largest = float(right[dropped].max())
    kept = right[evidence.got != 0]
    if kept.size and kept.min() < largest:
        return ""
    return f"returned weights below {_round_up(largest):.0e} are 0"


def _round_up(value: float) -> float:
    """To the next power of ten."""
    return float(10.0 ** np.ceil(np.log10(value)))
