"""Mistakes in the attention weights that are returned: the output is right."""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.definition.dtypes import BFLOAT16
from mutants.attention import Array, Attention
from mutants.mutant import (
    BLOCKED_WEIGHTS,
    MADE,
    MODES,
    RETURNED,
    SPELLINGS,
    SUMS,
    THROUGH_WEIGHTS,
    WEIGHTS,
    Mutant,
    chapter,
)

MUTANTS: list[Mutant] = []
_add = chapter("weights", MUTANTS)

MASKED = "mask/per-head/cross"


def _instead(change: Any) -> Any:
    def returned(a: Attention) -> Array | None:
        return None if a.weights is None else a.stored(np.asarray(change(a, a.weights), a.wide))

    return returned


_add(
    "weights-averaged",
    "averages the returned weights over heads",
    RETURNED,
    returned=_instead(lambda a, w: w.mean(axis=1)),
)
_add(
    "weights-averaged-and-repeated",
    "returns the average over heads for each head",
    WEIGHTS,
    MADE,
    returned=_instead(lambda a, w: np.broadcast_to(w.mean(axis=1, keepdims=True), w.shape)),
)
_add("weights-not-returned", "returns no weights", RETURNED, returned=lambda a: None)
_add(
    "weights-of-first-head",
    "returns the weights of the first head for all",
    WEIGHTS,
    returned=_instead(lambda a, w: np.broadcast_to(w[:, :1], w.shape)),
)
_add(
    "weights-of-first-entry",
    "returns the weights of the first batch entry for all",
    WEIGHTS,
    returned=_instead(lambda a, w: np.broadcast_to(w[:1], w.shape)),
)
_add(
    "weights-heads-reversed",
    "returns the heads in reverse order",
    WEIGHTS,
    returned=_instead(lambda a, w: w[:, ::-1]),
)
_add(
    "weights-before-mask",
    "returns the weights from before the mask",
    BLOCKED_WEIGHTS,
    WEIGHTS,
    returned=_instead(lambda a, w: Attention.softmax(a, a.biased(a.scaled(a.scores)))),
    case=MASKED,
)
_add(
    "weights-are-logits",
    "returns the logits",
    SUMS,
    WEIGHTS,
    returned=_instead(lambda a, w: a.logits),
)
_add(
    "weights-are-scores",
    "returns the scores, before scale and mask",
    SUMS,
    WEIGHTS,
    returned=_instead(lambda a, w: a.scores),
)
_add(
    "weights-not-normalised",
    "returns the exponentials",
    SUMS,
    WEIGHTS,
    returned=_instead(lambda a, w: np.exp(a.logits - Attention.peak(a, a.logits))),
)
_add(
    "weights-sum-over-queries",
    "normalises the returned weights over the queries",
    SUMS,
    WEIGHTS,
    returned=_instead(lambda a, w: w / np.maximum(w.sum(axis=2, keepdims=True), 1e-30)),
)
_add(
    "weights-transposed",
    "returns `[key query]` if the lengths are equal",
    WEIGHTS,
    returned=_instead(lambda a, w: w.swapaxes(-1, -2) if a.queries == a.keys else w),
    case="plain/no-mask/self",
)
_add(
    "weights-after-dropout",
    "returns the weights times 0.9, which is their mean after dropout",
    SUMS,
    WEIGHTS,
    returned=_instead(lambda a, w: w * 0.9),
)
_add(
    "weights-leak",
    "adds 1e-6 to the returned weights, so that their logarithm is finite",
    BLOCKED_WEIGHTS,
    WEIGHTS,
    returned=_instead(lambda a, w: w + 1e-6),
    case=MASKED,
)
_add(
    "weights-in-bfloat16",
    "returns weights of bfloat16",
    WEIGHTS,
    returned=_instead(lambda a, w: BFLOAT16.round(w)),
)
_add(
    "returned-weights-cut",
    "returns 0 for weights below 1e-3",
    WEIGHTS,
    returned=_instead(lambda a, w: np.where(w < 1e-3, 0, w)),
    case="plain/no-mask/long",
)
_add(
    "weights-one-hot",
    "returns a one-hot vector of the key with the largest weight",
    WEIGHTS,
    returned=_instead(lambda a, w: w == w.max(axis=-1, keepdims=True)),
)
_add(
    "weights-of-last-call",
    "returns the weights of the previous call",
    WEIGHTS,
    MODES,
    SPELLINGS,
    returned=_instead(
        lambda a, w: (
            a.given.memory.pop("weights", w)
            if a.given.memory.get("weights", w).shape == w.shape
            else w,
            a.given.memory.update(weights=w),
        )[0]
    ),
    case="mask/key-padding/cross",
)
_add(
    "weights-of-a-group",
    "returns one head's weights for each head of its group",
    WEIGHTS,
    returned=_instead(lambda a, w: np.repeat(w[:, :: a.group], a.group, axis=1)),
    case="plain/no-mask/gqa",
)

# A loss on the returned weights.

LOSS = "mask/per-batch/cross"

_add(
    "returned-weights-detached",
    "returns a copy of the weights that no gradient passes through",
    THROUGH_WEIGHTS,
    d_returned=lambda a, d_weights, of_weights: d_weights,
    case=LOSS,
)
_add(
    "loss-on-weights-alone",
    "passes on the gradient of the returned weights instead of that of the output",
    THROUGH_WEIGHTS,
    d_returned=lambda a, d_weights, of_weights: of_weights,
    case=LOSS,
)
_add(
    "loss-on-weights-of-first-head",
    "returns the weights of all heads, but keeps a graph for the first",
    THROUGH_WEIGHTS,
    d_returned=lambda a, d_weights, of_weights: (
        d_weights + of_weights * (np.arange(a.shape.heads) < 1)[:, None, None].astype(a.wide)
    ),
    case=LOSS,
)
_add(
    "loss-on-weights-without-row-term",
    "adds the gradient of the returned weights after the row term was made of the context",
    THROUGH_WEIGHTS,
    d_returned=lambda a, d_weights, of_weights: (
        setattr(a, "row_term", (a.d_context * a.context).sum(axis=-1, keepdims=True)),
        d_weights + of_weights,
    )[1],
    row=lambda a, w, d: getattr(a, "row_term", Attention.row(a, w, d)),
    case=LOSS,
)
_add(
    "loss-on-weights-averaged",
    "averages the gradient of the returned weights over the heads",
    THROUGH_WEIGHTS,
    d_returned=lambda a, d_weights, of_weights: d_weights + of_weights.mean(axis=1, keepdims=True),
    case=LOSS,
)
