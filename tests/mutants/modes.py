"""Mistakes in modes, dropout, state, dtypes, and what stands in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mutants.attention import Array, Attention
from mutants.mutant import (
    BATCH,
    BEYOND,
    BLOCKED_KEY,
    DECLARED,
    DROPOUT,
    DROPPED_BACK,
    DROPPED_OFF,
    DTYPE,
    FROZEN,
    INFERENCE,
    INPUTS,
    KEPT,
    KEY_ORDER,
    LAYOUT,
    LENGTHS,
    MODES,
    NAN,
    OF_A_SUM,
    OF_MASKED_QUERY,
    OUTPUT,
    PROMISED,
    REPEATS,
    REWRITTEN,
    SAME_IF_SHARED,
    SAME_IN_DTYPES,
    SAME_IN_ENCODINGS,
    SAME_IN_LAYOUTS,
    SAME_IN_MODES,
    SHARED,
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

# Modes that should agree on a fully masked query: what it gets is a convention, but one for all.

MASKED = "edge/fully-masked-row/cross"


def _lost(a: Attention) -> Array:
    """Which rows of the logits have no visible key."""
    return np.isneginf(a.logits).all(axis=-1, keepdims=True)


def _finishing(value: Callable[[Attention, Array], Array]) -> Callable[..., Array]:
    def rescaled(a: Attention, context: Array, total: Array) -> Array:
        found = Attention.rescaled(a, context, total)
        return np.where(_lost(a), value(a, found), found).astype(found.dtype)

    return rescaled


_add(
    "fused-masked-row-is-nan",
    "divides by the sum of an empty row in the fused kernel",
    MODES,
    rescaled=_finishing(lambda a, context: np.nan),
    case=MASKED,
)
_add(
    "fused-masked-row-is-mean",
    "gives a fully masked query the mean of the values in the fused kernel",
    MODES,
    rescaled=_finishing(lambda a, context: a.all_v.mean(axis=2, keepdims=True)),
    case=MASKED,
)
_add(
    "fused-masked-row-is-stale",
    "leaves the row before it where a fully masked query should have been written",
    MODES,
    rescaled=_finishing(lambda a, context: np.roll(context, 1, axis=2)),
    case=MASKED,
)
_add(
    "evaluation-masked-row-is-uniform",
    "gives a fully masked query equal weights in evaluation",
    MODES,
    softmax=lambda a, logits: (
        np.where(
            np.isneginf(logits).all(axis=-1, keepdims=True),
            a.wide(1 / a.keys),
            Attention.softmax(a, logits),
        )
        if _evaluates(a)
        else Attention.softmax(a, logits)
    ),
    case=MASKED,
)
_add(
    "fused-masked-row-in-backward",
    "takes weights of 1 for a fully masked query in the backward pass of the fused kernel",
    MODES,
    weights_again=lambda a: (
        np.where(_lost(a), a.wide(1), Attention.weights_again(a))
        if _fuses(a)
        else Attention.weights_again(a)
    ),
    case=MASKED,
)

# What experiments show in one mode, dtype, sharing or encoding, and not in another.


def _backward_if(where: Callable[[Attention], bool]) -> Callable[..., Array]:
    """Weights of 1 for a fully masked query in the backward pass, somewhere."""

    def weights_again(a: Attention) -> Array:
        found = Attention.weights_again(a)
        return np.where(_lost(a), a.wide(1), found) if where(a) else found

    return weights_again


def _one_mask(a: Attention) -> Iterator[Array]:
    shown = [*Attention.visible(a)]
    return iter(shown[-1:] if _evaluates(a) else shown)


_add(
    "evaluation-takes-one-mask",
    "takes the last of several masks in evaluation",
    SAME_IN_MODES,
    visible=_one_mask,
    case="probe/pairs",
)
_add(
    "masked-row-in-backward",
    "takes weights of 1 for a fully masked query in the backward pass",
    OF_MASKED_QUERY,
    weights_again=_backward_if(lambda a: True),
    case="probe/masked-rows",
)
_add(
    "masked-row-in-backward-is-nan",
    "divides 0 by 0 for a fully masked query in the backward pass",
    OF_MASKED_QUERY,
    weights_again=lambda a: np.where(_lost(a), a.wide(np.nan), Attention.weights_again(a)),
    case="probe/masked-rows",
)
_add(
    "masked-row-in-backward-attends",
    "takes the weights without a mask for a fully masked query in the backward pass, where the "
    "forward pass takes equal ones",
    OF_MASKED_QUERY,
    softmax=lambda a, logits: np.where(_lost(a), a.wide(1 / a.keys), Attention.softmax(a, logits)),
    weights_again=lambda a: np.where(
        _lost(a), Attention.softmax(a, a.scaled(a.scores)), Attention.weights_again(a)
    ),
    case="probe/masked-rows",
)
_add(
    "normaliser-lost-in-large-numbers",
    "keeps the largest logit plus the logarithm of the normaliser, which is lost beside −1e9",
    OF_MASKED_QUERY,
    weights_again=lambda a: (
        np.exp(a.logits - (a.largest + a.log_total)) if a.weights is None else a.weights
    ),
    case="probe/masked-rows",
)
_add(
    "masked-row-in-backward-of-float16",
    "takes weights of 1 for a fully masked query in the backward pass for float16",
    SAME_IN_DTYPES,
    weights_again=_backward_if(lambda a: a.given.dtype.name == "float16"),
    case="probe/masked-rows",
)
_add(
    "masked-row-in-backward-of-self-attention",
    "takes weights of 1 for a fully masked query in the backward pass of self-attention",
    SAME_IF_SHARED,
    weights_again=_backward_if(lambda a: a.shape.sharing == "self"),
    case="probe/masked-rows",
)
_add(
    "masked-row-in-backward-of-numbers",
    "takes weights of 1 for a fully masked query in the backward pass if −∞ was added",
    SAME_IN_ENCODINGS,
    weights_again=_backward_if(
        lambda a: any(m.dtype != np.bool_ for n, m in a.given.masks.items() if n == "mask")
    ),
    case="probe/masked-rows",
)
_add(
    "masked-row-in-backward-of-broadcast-mask",
    "takes weights of 1 for a fully masked query in the backward pass if all heads share the mask",
    SAME_IN_LAYOUTS,
    weights_again=_backward_if(
        lambda a: any(m.shape[1] == 1 for n, m in a.given.masks.items() if n == "mask")
    ),
    case="probe/masked-rows",
)
for _input in ("query", "key", "value"):
    _add(
        f"nan-in-{_input}-replaced",
        f"takes NaN in the {_input} for 0",
        NAN,
        input=lambda a, name, of=_input: (
            np.nan_to_num(Attention.input(a, name), posinf=np.inf, neginf=-np.inf)
            if name == of
            else Attention.input(a, name)
        ),
        case="probe/leaks",
    )
_add(
    "nan-in-weights-replaced",
    "takes NaN in the weights for 0, as a guard for fully masked queries",
    NAN,
    softmax=lambda a, logits: np.nan_to_num(Attention.softmax(a, logits)),
    case="probe/leaks",
)

# State.


def _counting(a: Attention, merged: Array) -> Array:
    calls = a.given.memory["calls"] = a.given.memory.get("calls", 0) + 1
    return Attention.finish(a, merged) * a.wide(1 + 1e-3 * (calls - 1))


def _last_bit(a: Attention, values: Array) -> Array:
    calls = a.given.memory["calls"] = a.given.memory.get("calls", 0) + 1
    return np.nextafter(values, a.wide(np.inf)) if calls % 2 else values


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
    "last-bit-of-every-other-call",
    "adds up in another order in every other call",
    PROMISED,
    finish=lambda a, merged: _last_bit(a, Attention.finish(a, merged)),
    case="probe/repeatability",
    promises=("runs",),
)
_add(
    "last-bit-of-every-other-gradient",
    "adds up one gradient in another order in every other call",
    PROMISED,
    gradient=lambda a, name, array: _last_bit(a, array) if name == "key" else array,
    case="probe/repeatability",
    promises=("gradients",),
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

# Inputs that contradict each other.


def _counted_by(array: Array, *sizes: int) -> Array:
    if array.shape == sizes or not array.flags.c_contiguous:
        return array
    strides = np.cumprod([array.itemsize, *sizes[:0:-1]])[::-1]
    return np.lib.stride_tricks.as_strided(array, sizes, strides)


def _by_the_keys(a: Attention, name: str) -> Array:
    array = a.given.inputs[name]
    return a.read(_counted_by(array, *a.given.inputs["key"].shape[:2], array.shape[2]))


def _by_the_queries(a: Attention, name: str) -> Array:
    array = a.given.inputs[name]
    return a.read(_counted_by(array, a.batch, *array.shape[1:]))


def _by_the_weights(a: Attention, name: str) -> Array:
    array = a.given.inputs[name]
    return a.read(_counted_by(array, *array.shape[:2], len(a.own[name])))


def _as_float32(a: Attention, name: str) -> Array:
    array = a.given.inputs[name]
    if array.dtype == np.float16 and a.given.dtype.name == "float32":
        array = _counted_by(array, *array.shape[:2], 2 * array.shape[2]).copy().view(np.float32)
    return a.read(array)


_BEYOND = "probe/bad-input"
_add(
    "values-counted-by-keys",
    "reads as many values as there are keys",
    BEYOND,
    input=lambda a, name: _by_the_keys(a, name) if name == "value" else Attention.input(a, name),
    case=_BEYOND,
)
_add(
    "batch-counted-by-queries",
    "reads keys and values for every batch entry of the query",
    BEYOND,
    input=_by_the_queries,
    case=_BEYOND,
)
_add(
    "width-counted-by-weights",
    "reads rows as wide as the projection wants them",
    BEYOND,
    input=_by_the_weights,
    case=_BEYOND,
)
_add(
    "half-read-as-float32",
    "reads 32 bits for each number of a float16 array",
    BEYOND,
    input=_as_float32,
    case=_BEYOND,
)
_add(
    "mask-counted-by-logits",
    "reads a mask for every pair, also from one with fewer keys",
    BEYOND,
    mask=lambda a, mask: mask if 1 in mask.shape else _counted_by(mask, *a.scores.shape),
    case=_BEYOND,
)
_add(
    "padding-counted-by-keys",
    "reads the padding mask for every key, also from one with fewer",
    BEYOND,
    padding=lambda a, mask: Attention.padding(a, _counted_by(mask, a.batch, a.keys)),
    case=_BEYOND,
)


def _mask_in_order(a: Attention) -> None:
    for name, mask in a.given.masks.items():
        if not mask.flags.c_contiguous:
            a.given.masks[name] = mask.base.ravel()[: mask.size].reshape(mask.shape)


_add(
    "mask-strides-ignored",
    "reads the memory of masks and biases in order, whatever their strides are",
    LAYOUT,
    begin=_mask_in_order,
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

# What is written to, and how it lies in memory: one argument at a time.

JOINED = "scale/one-with-bias/full-tiles"


def _scratch(a: Attention, cotangent: Array) -> Array:
    read = Attention.received(a, cotangent)
    cotangent *= cotangent.dtype.type(0.5)
    return read


def _joined_in_place(a: Attention, mask: Array) -> Array:
    if a.given.causal and mask.shape[-2:] == (a.queries, a.keys):
        mask &= Attention.triangle(a)
    return mask


def _blocks_bias(a: Attention, logits: Array, visible: Array) -> Array:
    bias = a.given.masks.get("bias")
    if bias is not None and bias.shape == logits.shape:
        bias[np.broadcast_to(~visible, bias.shape)] = -np.inf
    return Attention.block(a, logits, visible)


def _zeroes_padding(a: Attention) -> None:
    padding = a.given.masks.get("padding")
    if padding is not None and a.shape.sharing != "self":
        a.given.inputs["value"][padding == 0] = 0


def _clips_mask(a: Attention, mask: Array) -> Array:
    lowest = a.given.masks["mask"].dtype.type(-6e4)
    np.maximum(a.given.masks["mask"], lowest, out=a.given.masks["mask"])
    return mask


_add(
    "cotangent-as-scratch",
    "writes into the gradient that comes in",
    UNCHANGED,
    received=_scratch,
)
_add(
    "mask-joined-with-causal-in-place",
    "writes the triangle into the mask",
    UNCHANGED,
    mask=_joined_in_place,
    case=JOINED,
)
_add(
    "bias-blocked-in-place",
    "writes −∞ into the bias where the mask blocks",
    UNCHANGED,
    block=_blocks_bias,
    case="bias/with-mask/cross",
)
_add(
    "padding-zeroed-in-place",
    "writes zeros into the padded values",
    UNCHANGED,
    begin=_zeroes_padding,
    case="mask/key-padding/cross",
)
_add(
    "number-mask-clipped-in-place",
    "replaces −∞ in a mask of numbers by −60,000, in place",
    UNCHANGED,
    additive=_clips_mask,
    case="mask/key-padding/cross",
)


def _in_order(array: Array) -> Array:
    """The numbers as they lie in memory, whatever the strides are."""
    if array.flags.c_contiguous:
        return array
    whole = array if array.base is None else array.base
    return np.resize(whole.ravel(order="K"), array.shape)


def _as_the_query_lies(a: Attention, name: str) -> Array:
    query, array = a.given.inputs["query"], a.given.inputs[name]
    if query.flags.c_contiguous and not array.flags.c_contiguous:
        return a.read(_in_order(array))
    if array.flags.c_contiguous and not query.flags.c_contiguous:
        return a.read(np.roll(array, 1))
    return a.read(array)


def _unordered(which: str) -> Any:
    def begin(a: Attention) -> None:
        if which in a.given.masks:
            a.given.masks[which] = _in_order(a.given.masks[which])

    return begin


LAID_OUT = "bias/with-mask/self"
_add(
    "strides-of-the-query-for-all",
    "uses the strides of the query for key and value too",
    LAYOUT,
    input=_as_the_query_lies,
    case="mask/per-head/separate",
)
_add(
    "strides-of-the-value-ignored",
    "reads the value in order, whatever its strides are, and only if the key is in order",
    LAYOUT,
    input=lambda a, name: a.read(
        _in_order(a.given.inputs[name])
        if name == "value" and a.given.inputs["key"].flags.c_contiguous
        else a.given.inputs[name]
    ),
    case="mask/per-head/separate",
)
_add(
    "strides-of-the-cotangent-ignored",
    "reads the gradient that comes in in order, whatever its strides are",
    LAYOUT,
    received=lambda a, cotangent: a.read(_in_order(cotangent)),
    case=LAID_OUT,
)
for _argument in ("mask", "padding", "bias"):
    _add(
        f"strides-of-the-{_argument}-ignored",
        f"reads the {_argument} in order, whatever its strides are",
        LAYOUT,
        begin=_unordered(_argument),
        case="mask/key-padding/separate" if _argument == "padding" else LAID_OUT,
    )

# A switch that turns dropout off in one direction.


def _draw_again(a: Attention, weights: Array, seed: int) -> None:
    random = np.random.default_rng(seed)
    a.kept = a.compensated((random.random(weights.shape) >= a.given.mode.dropout) * a.wide(1))


def _dropped_backwards(a: Attention) -> Array:
    weights = Attention.weights_again(a)
    if a.given.mode.dropout and not a.drops():
        _draw_again(a, weights, a.given.mode.draw)
    return weights


_add(
    "dropout-in-backward-of-evaluation",
    "drops again in the backward pass, also in evaluation",
    DROPPED_OFF,
    weights_again=_dropped_backwards,
    case="mask/key-padding/cross",
)
_add(
    "dropout-rescales-in-evaluation",
    "leaves out the drawing in evaluation, but not the factor of the gradient",
    DROPPED_OFF,
    weights_again=lambda a: (
        Attention.weights_again(a)
        if a.drops()
        else (
            setattr(a, "kept", a.compensated(a.wide(1))),
            Attention.weights_again(a),
        )[1]
    ),
    case="mask/key-padding/cross",
)


def _drawn_again(a: Attention) -> Array:
    weights = Attention.weights_again(a)
    if a.given.mode.dropout and a.drops():
        _draw_again(a, weights, a.given.mode.draw + 1)
    return weights


_add(
    "dropout-drawn-again-in-backward",
    "drops other weights in the backward pass than in the forward pass",
    DROPPED_BACK,
    weights_again=_drawn_again,
    case="mask/key-padding/cross",
)

# One array as two arguments, and what outlives a call.


def _address(array: Array) -> int:
    return array.__array_interface__["data"][0]


def _value_of_self_attention(a: Attention, name: str) -> Array:
    inputs = a.given.inputs
    return a.read(inputs["query" if inputs["query"] is inputs["key"] else name])


def _query_if_at_its_address(a: Attention, name: str) -> Array:
    query, array = a.given.inputs["query"], a.given.inputs[name]
    if array.shape != query.shape and _address(array) == _address(query):
        return a.read(query[:, -array.shape[1] :])
    return a.read(array)


_add(
    "self-attention-if-query-is-key",
    "projects the query to values if query and key are one object",
    SHARED,
    input=_value_of_self_attention,
    case="plain/no-mask/self",
)
_add(
    "last-tokens-for-the-first",
    "reads the last tokens of the query for a key that is a view of its first tokens",
    SHARED,
    input=_query_if_at_its_address,
    case="plain/no-mask/self",
)


def _added_if_one_array(a: Attention, *given: Any) -> tuple[Array, Array, Array]:
    d_q, d_k, d_v = Attention.d_attention(a, *given)
    inputs = a.given.inputs
    if inputs["key"] is inputs["value"] and np.array_equal(a.k, a.v):
        d_k = d_v = d_k + d_v
    return d_q, d_k, d_v


_add(
    "gradient-of-shared-heads-twice",
    "returns the sum of the gradients of keys and values for both if these are one array of heads",
    SHARED,
    d_attention=_added_if_one_array,
    case="plain/no-mask/self",
    accuracy="A",
)


def _keys_by_identity(a: Attention, name: str) -> Array:
    if name != "key":
        return Attention.heads(a, name)
    key = a.given.inputs["key"]
    kept, numbers, heads = a.given.memory.get("projected", (None, None, None))
    if kept is not key or not np.array_equal(numbers, key):
        heads = Attention.heads(a, name)
        a.given.memory["projected"] = key, key.copy(), heads
    return heads


def _in_workspace(a: Attention, values: Array) -> Array:
    found = Attention.stored(a, values)
    if values is not getattr(a, "output", None):
        return found
    kept = a.given.memory.setdefault((found.shape, found.dtype), found)
    kept[...] = found
    return kept


_add(
    "projected-keys-cached",
    "keeps projected keys as long as the key stays the same, whatever becomes of the weights",
    REWRITTEN,
    heads=_keys_by_identity,
    case="plain/no-mask/cross",
)


def _weights_put_away(a: Attention, logits: Array) -> Array:
    a.given.memory["weights"] = Attention.softmax(a, logits)
    return a.given.memory["weights"]


_add(
    "weights-of-the-latest-call-in-backward",
    "keeps the weights for the backward pass in one place for all calls",
    KEPT,
    softmax=_weights_put_away,
    weights_again=lambda a: (
        Attention.weights_again(a) if a.weights is None else a.hold(a.given.memory["weights"])
    ),
    case="plain/no-mask/cross",
)
_add(
    "output-in-a-workspace",
    "returns the output in memory that the next call overwrites",
    KEPT,
    stored=_in_workspace,
    case="plain/no-mask/cross",
)


def _overwritten_if_unmasked(a: Attention, weights: Array, d_weights: Array) -> Array:
    found = Attention.d_softmax(a, weights, d_weights)
    if a.weights is not None and not a.given.masks:
        a.weights = found
    return found


_add(
    "weights-overwritten-where-nothing-is-masked",
    "overwrites the stored weights in the backward pass of calls without a mask",
    TWICE,
    d_softmax=_overwritten_if_unmasked,
    case="plain/no-mask/cross",
)


def _transposed_read_in_order(a: Attention, mask: Array) -> Array:
    if mask.ndim >= 2 and mask.strides[-2] == mask.itemsize and mask.shape[-2] > 1:
        return np.ascontiguousarray(mask.swapaxes(-1, -2)).reshape(mask.shape)
    return mask


_add(
    "transposed-mask-read-in-order",
    "reads a mask in order whose rows lie side by side",
    LAYOUT,
    mask=_transposed_read_in_order,
    case="mask/per-head/separate",
)


def _triangle_of_the_longest(a: Attention) -> Array:
    # For each instance, which serves calls of any length.
    kept = a.given.memory.setdefault("triangle", Attention.triangle(a))
    if kept.shape[0] < a.queries or kept.shape[1] < a.keys:
        kept = a.given.memory["triangle"] = Attention.triangle(a)
    return kept[: a.queries, : a.keys]


_add(
    "triangle-of-the-longest-call",
    "keeps the triangle of the longest call, and cuts it at the wrong end for shorter ones",
    LENGTHS,
    OUTPUT,
    triangle=_triangle_of_the_longest,
    case="causal/bottom-right/separate",
)


def _contiguous_or_dense(a: Attention, cotangent: Array) -> Array:
    if 0 in cotangent.strides and cotangent.size > 1:
        return a.read(cotangent) * (np.arange(cotangent.size) < 1).reshape(cotangent.shape)
    return a.read(cotangent)


_add(
    "reads-beyond-an-expanded-cotangent",
    "reads the gradient that comes in in order, also where all of it is one number",
    OF_A_SUM,
    received=_contiguous_or_dense,
    case="mask/key-padding/separate",
)
_add(
    "triangle-shifted-in-inference",
    "sees one key too many where nothing needs a gradient",
    INFERENCE,
    triangle=lambda a: np.tri(
        a.queries, a.keys, a.offset() + (not a.given.wanted and a.given.mode.gradients), bool
    ),
    case="causal/bottom-right/cross",
)


def _padding_into_bias(a: Attention) -> None:
    bias, padding = (a.given.masks.get(name) for name in ("bias", "padding"))
    if bias is not None and padding is not None and padding.dtype == np.bool_:
        blocked = np.broadcast_to(~padding[:, None, None, :], bias.shape)
        bias[blocked] = -np.inf


_add(
    "padding-written-into-the-bias",
    "joins the padding with the bias in the memory of the bias",
    UNCHANGED,
    begin=_padding_into_bias,
    case="bias/high-on-padding/cross",
)
