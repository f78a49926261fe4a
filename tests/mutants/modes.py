"""Mistakes in modes, dropout, state, dtypes, and what stands in memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from mutants.attention import Array, Attention
from mutants.mutant import (
    BATCH,
    BLOCKED_KEY,
    DECLARED,
    DROPOUT,
    DTYPE,
    FROZEN,
    INPUTS,
    KEY_ORDER,
    LAYOUT,
    MODES,
    OUTPUT,
    REPEATS,
    REWRITTEN,
    SURROUNDINGS,
    TWICE,
    UNCHANGED,
    Mutant,
    chapter,
)

MUTANTS: list[Mutant] = []
_add = chapter("modes", MUTANTS)

EXPERIMENT = "probe/dropout"
BIASED = "bias/in-full/cross"


# Dropout.


def _on_logits(a: Attention, weights: Array) -> Array:
    if not (a.given.mode.dropout and a.drops()):
        return weights
    random = np.random.default_rng(a.given.mode.draw)
    kept = random.random(weights.shape) >= a.given.mode.dropout
    return Attention.softmax(a, a.logits * kept / a.wide(1 - a.given.mode.dropout))


def _renormalised(a: Attention, weights: Array) -> Array:
    left = Attention.dropped(a, weights)
    total = left.sum(axis=-1, keepdims=True)
    return left / np.where(total > 0, total, 1) if a.given.mode.dropout else left


_add(
    "dropout-in-evaluation",
    "leaves dropout active in evaluation",
    DECLARED,
    drops=lambda a: True,
    case=EXPERIMENT,
)
_add(
    "dropout-never",
    "never passes the probability on",
    DECLARED,
    drops=lambda a: False,
    case=EXPERIMENT,
)
_add(
    "dropout-not-rescaled",
    "drops without dividing by 1 − p",
    DROPOUT,
    compensated=lambda a, kept: kept,
    case=EXPERIMENT,
)
_add(
    "dropout-rescaled-twice",
    "divides by 1 − p twice",
    DROPOUT,
    compensated=lambda a, kept: kept / a.wide((1 - a.given.mode.dropout) ** 2),
    case=EXPERIMENT,
)
_add("dropout-on-logits", "drops logits", DROPOUT, dropped=_on_logits, case=EXPERIMENT)
_add(
    "dropout-renormalised",
    "divides each row by its sum after dropout",
    DROPOUT,
    dropped=_renormalised,
    case=EXPERIMENT,
)

# Modes that should agree.


def _in(mode: str, wanted: bool) -> Any:
    return lambda a: a.given.mode[mode] is wanted


_evaluates, _fuses = _in("train", False), _in("fused", True)

_add(
    "evaluation-keeps-probability",
    "multiplies by 1 − p in evaluation, as well as dividing in training",
    MODES,
    OUTPUT,
    mix=lambda a, w, v: Attention.mix(a, w, v) * a.wide(0.9 if _evaluates(a) else 1),
)
_add(
    "evaluation-without-output-bias",
    "has a fast path for evaluation, without the output's bias",
    MODES,
    OUTPUT,
    finish=lambda a, merged: (
        a.product("bqhd,hde->bqe", merged, a.own["output"])
        if _evaluates(a)
        else Attention.finish(a, merged)
    ),
)
_add(
    "evaluation-with-other-scale",
    "exports 0.999/√d for evaluation",
    MODES,
    OUTPUT,
    default_factor=lambda a: a.shape.head_size**-0.5 * (0.999 if _evaluates(a) else 1),
)
_add(
    "fused-ignores-padding",
    "does not pass the padding to the fused kernel",
    MODES,
    OUTPUT,
    padding=lambda a, mask: Attention.padding(a, mask) | np.bool_(_fuses(a)),
    case="mask/key-padding/cross",
)
_add(
    "fused-ignores-bias",
    "does not pass the bias to the fused kernel",
    MODES,
    OUTPUT,
    bias=lambda a, bias: 0 * np.nan_to_num(bias) if _fuses(a) else bias,
    case=BIASED,
)
_add(
    "fused-ignores-custom-scale",
    "does not pass a custom scale to the fused kernel",
    MODES,
    OUTPUT,
    factor=lambda a: (
        a.default_factor() if _fuses(a) and "score" not in a.own else Attention.factor(a)
    ),
    case="plain/custom-scale/cross",
)
_add(
    "fused-causal-top-left",
    "aligns the fused kernel's triangle at the first key",
    MODES,
    OUTPUT,
    triangle=lambda a: (
        np.tri(a.queries, a.keys, dtype=np.bool_) if _fuses(a) else Attention.triangle(a)
    ),
    case="causal/bottom-right/cross",
)

# State.


def _counting(a: Attention, merged: Array) -> Array:
    calls = a.given.memory["calls"] = a.given.memory.get("calls", 0) + 1
    return Attention.finish(a, merged) * a.wide(1 + 1e-3 * (calls - 1))


def _first_seen(a: Attention, name: str) -> Array:
    found = Attention.heads(a, name)
    if name != "key":
        return found
    kept = a.given.memory.setdefault(f"{found.shape} {a.given.dtype.name}", found)
    return kept


def _first_mask(a: Attention, mask: Array) -> Array:
    return a.given.memory.setdefault(f"{mask.shape}", mask.copy())


def _seeded(a: Attention, merged: Array) -> Array:
    np.random.seed(merged.size)
    return Attention.finish(a, merged)


_add(
    "generator-seeded",
    "seeds the global random generator in every call",
    SURROUNDINGS,
    finish=_seeded,
)
_add(
    "state-drifts",
    "keeps a running scale that every call changes",
    REPEATS,
    OUTPUT,
    finish=_counting,
)
_add(
    "keys-cached",
    "keeps the projected keys of the first call, by shape",
    KEY_ORDER,
    BLOCKED_KEY,
    OUTPUT,
    heads=_first_seen,
    case="mask/key-padding/cross",
)
_add(
    "mask-cached",
    "keeps the first mask of each shape",
    BATCH,
    OUTPUT,
    mask=_first_mask,
    case="mask/per-head/cross",
)


def _mask_by_identity(a: Attention, mask: Array) -> Array:
    # Holds the mask, so that no other array gets its identity.
    kept, copy = a.given.memory.get("mask", (None, None))
    if kept is not mask:
        kept, copy = a.given.memory["mask"] = mask, mask.copy()
    return copy


_add(
    "mask-cached-by-identity",
    "converts a mask once, and caches it by identity",
    REWRITTEN,
    mask=_mask_by_identity,
    padding=lambda a, mask: Attention.padding(a, _mask_by_identity(a, mask)),
    case="mask/key-padding/separate",
)


def _in_place(what: str) -> Any:
    def begin(a: Attention) -> None:
        if what == "query":
            a.given.inputs["query"] *= a.given.inputs["query"].dtype.type(0.5)
        elif what in a.given.masks:
            a.given.masks[what][..., -1] = True

    return begin


def _filled(a: Attention, logits: Array) -> Array:
    bias = a.given.masks.get("bias")
    if bias is not None:
        bias += bias.dtype.type(1)
    return Attention.biased(a, logits)


_add(
    "query-scaled-in-place",
    "scales the query in place",
    UNCHANGED,
    OUTPUT,
    begin=_in_place("query"),
)
_add(
    "padding-filled-in-place",
    "makes the last key visible by writing into the padding",
    UNCHANGED,
    begin=_in_place("padding"),
    case="mask/key-padding/cross",
)
_add(
    "bias-shifted-in-place",
    "adds a constant to the bias in place",
    UNCHANGED,
    biased=_filled,
    case=BIASED,
)

# What is asked for, and how often.

FROZEN_CASE = "mask/key-padding/separate"


def _overwritten(a: Attention, weights: Array, d_weights: Array) -> Array:
    found = Attention.d_softmax(a, weights, d_weights)
    if a.weights is not None:
        a.weights = found
    return found


_add(
    "key-gradient-with-query-only",
    "computes the gradient of the key only if the query needs one too",
    FROZEN,
    gradient=lambda a, name, array: a.stored(
        0 * array if name == "key" and "query" not in a.given.wanted else array
    ),
    case=FROZEN_CASE,
)
_add(
    "bias-forgotten-in-inference",
    "has a fast path for calls without gradients, which forgets the bias",
    FROZEN,
    bias=lambda a, bias: bias if a.given.wanted or not a.given.mode.gradients else 0 * bias,
    case=BIASED,
)
_add(
    "weights-overwritten-by-backward",
    "overwrites the stored weights with the gradient of the logits",
    TWICE,
    d_softmax=_overwritten,
    case=FROZEN_CASE,
)

# Neighbours in the batch, and what stands in memory.

_add(
    "values-mixed-over-batch",
    "subtracts the batch's mean from the values, as a batch norm does",
    BATCH,
    OUTPUT,
    mix=lambda a, w, v: Attention.mix(a, w, v - v.mean(axis=0, keepdims=True)),
)
_add(
    "neighbour-leaks",
    "adds a thousandth of the neighbouring batch entry's keys",
    BATCH,
    OUTPUT,
    score=lambda a, q, k: Attention.score(a, q, k + a.wide(1e-3) * np.roll(k, 1, axis=0)),
)
_add(
    "batch-of-1-only",
    "skips the scale unless the batch size is 1",
    OUTPUT,
    default_factor=lambda a: Attention.default_factor(a) if a.batch == 1 else 1.0,
)
_add(
    "scaled-for-batch-of-1",
    "skips the scale if the batch size is 1",
    OUTPUT,
    default_factor=lambda a: 1.0 if a.batch == 1 else Attention.default_factor(a),
    case="plain/no-mask/long",
)


def _contiguous(a: Attention, name: str) -> Array:
    array = a.given.inputs[name]
    if not array.flags.c_contiguous:
        array = array.base.ravel()[: array.size].reshape(array.shape)
    return a.read(array)


_add(
    "strides-ignored",
    "reads memory in order, whatever the strides are",
    LAYOUT,
    input=_contiguous,
    case="probe/repeatability",
)


def _rows_only(a: Attention, name: str) -> Array:
    array = a.given.inputs[name]
    if array.flags.c_contiguous or array.strides[-1] != array.itemsize:
        return a.read(array)
    batch, length, width = array.shape
    rows = np.lib.stride_tricks.as_strided(
        array, (batch * length, width), (array.strides[-2], array.strides[-1])
    )
    return a.read(rows.reshape(array.shape))


_add(
    "batch-stride-assumed",
    "assumes that the stride of the batch is the length times that of a row",
    LAYOUT,
    input=_rows_only,
    case="probe/repeatability",
)

# Dtypes.

_add(
    "output-widened",
    "returns float64 for everything",
    DTYPE,
    stored=lambda a, values: values.astype(np.float64),
)
_add(
    "half-returned-as-float32",
    "returns float32 for half precision",
    DTYPE,
    stored=lambda a, values: (
        a.hold(values) if a.given.dtype.name == "float16" else Attention.stored(a, values)
    ),
    dtype="float16",
)
_add(
    "gradients-widened",
    "accumulates gradients in float64, and leaves them there",
    DTYPE,
    gradient=lambda a, name, array: array.astype(np.float64),
)
_add(
    "gradients-lost-when-fused",
    "has no backward pass for the key in the fused kernel",
    INPUTS,
    MODES,
    gradient=lambda a, name, array: a.stored(0 * array if _fuses(a) and name == "key" else array),
)
