"""Causes of attention weights that are wrong while the output is right."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.causes.hypothesis import Evidence, Maker, significant
from conformance.causes.masks import hidden_by
from conformance.causes.precision import Again, coarse
from conformance.causes.scale import LEAST, best_factor
from conformance.causes.softmax import over as softmax_over
from conformance.causes.stages import Stages
from conformance.definition.dtypes import BFLOAT16, FLOAT16, Array
from conformance.records.phrase import NOTHING, Phrase


def cause(maker: Maker, evidence: Evidence, again: Again) -> Phrase:
    """Return what the returned weights are instead, or nothing."""
    if evidence.got.ndim != 4:
        return NOTHING
    for mistake, found in _instead(maker):
        if evidence.explained(found):
            return mistake
    right, got = maker.right, evidence.got
    if np.isfinite(got).all():
        hidden = hidden_by(right.shown, got, right.allowed)
        if hidden:
            return hidden
        factor = best_factor(got, right.weights)
        if abs(factor - 1) > LEAST and evidence.explained(factor * right.weights):
            return Phrase("returned.factor", {"factor": significant(factor)})
        plus = float(np.median(got - right.weights))
        if plus and evidence.explained(right.weights + plus):
            return Phrase("returned.added", {"amount": significant(plus, 3)})
        cut = _cut(evidence, right.weights)
        if cut:
            return cut
    return coarse("weights", evidence, maker.problem.dtype, again)


def _instead(maker: Maker) -> Iterator[tuple[Phrase, Array]]:
    right, shape = maker.right, maker.problem.shape
    w = right.weights
    if shape.heads > 1:
        mean = w.mean(axis=1, keepdims=True)
        yield Phrase("returned.averaged-and-repeated"), np.broadcast_to(mean, w.shape)
        yield Phrase("returned.of-first-head"), np.broadcast_to(w[:, :1], w.shape)
        yield Phrase("returned.of-last-head"), np.broadcast_to(w[:, -1:], w.shape)
        yield Phrase("returned.heads-reversed"), w[:, ::-1]
        if shape.group > 1:
            first = np.repeat(w[:, :: shape.group], shape.group, axis=1)
            yield Phrase("returned.of-one-head-per-group"), first
    if shape.batch > 1:
        yield Phrase("returned.of-first-batch-entry"), np.broadcast_to(w[:1], w.shape)
    logits = right.logits
    if maker.problem.allowed is not None:
        yield Phrase("returned.before-mask"), Stages.softmax(right, right.shown)
    # Infinite where blocked: whatever is there is wrong.
    yield Phrase("returned.logits"), np.where(np.isfinite(logits), logits, np.nan)
    yield Phrase("returned.logits-before-mask"), right.shown
    yield Phrase("returned.scores"), right.scores
    with np.errstate(all="ignore"):
        peak = logits.max(axis=-1, keepdims=True)
        yield Phrase("returned.exponentials"), np.exp(logits - peak)
        yield Phrase("returned.exponentials"), np.exp(logits)
        yield Phrase("returned.logarithms"), np.where(w > 0, np.log(w), np.nan)
        over = w.sum(axis=2, keepdims=True)
        yield Phrase("returned.normalised-over-queries"), w / np.maximum(over, 1e-30)
        yield Phrase("returned.softmax-over-queries"), softmax_over(-2, 0.0)(right, logits)
    if shape.query_length == shape.key_length:
        yield Phrase("returned.transposed"), w.swapaxes(-1, -2)
    yield (
        Phrase("returned.one-hot"),
        (w == w.max(axis=-1, keepdims=True)).astype(np.float64),
    )
    for narrow in (FLOAT16, BFLOAT16):
        if narrow.significand_bits < maker.problem.format.significand_bits:
            yield Phrase("returned.rounded", {"to": narrow.name}), narrow.round(w)


def _cut(evidence: Evidence, right: Array) -> Phrase:
    """Small weights are 0, and no others are wrong."""
    dropped = evidence.wrong & (evidence.got == 0)
    if not dropped.any() or (evidence.wrong & ~dropped).any():
        return NOTHING
    largest = float(right[dropped].max())
    kept = right[evidence.got != 0]
    if kept.size and kept.min() < largest:
        return NOTHING
    return Phrase("returned.small-dropped", {"below": _round_up(largest)})


def _round_up(value: float) -> float:
    """To the next power of ten."""
    return float(10.0 ** np.ceil(np.log10(value)))
