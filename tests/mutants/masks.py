"""Mistakes in what masks and biases do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mutants.attention import Array, Attention
from mutants.mutant import (
    BLOCKED_KEY,
    BLOCKED_WEIGHTS,
    COMBINE,
    FULLY_MASKED,
    MODES,
    OUTPUT,
    POLARITY,
    SPELLINGS,
    WEIGHTS,
    Mutant,
    chapter,
)

MUTANTS: list[Mutant] = []
_add = chapter("masks", MUTANTS)

PADDING = "mask/key-padding/cross"
SQUARE_PADDING = "mask/key-padding/self"
SHARED = "mask/shared/cross"
SQUARE = "mask/shared/self"
PER_HEAD = "mask/per-head/cross"
BIASED = "bias/in-full/cross"
SPELLED = "mask/key-padding/cross"


def _true(array: Array) -> Array:
    return np.ones(array.shape, dtype=np.bool_)


def _numbers(instead: Any) -> Any:
    """Padding of numbers goes another way than padding of booleans."""
    return lambda a, m: Attention.padding(a, m) if m.dtype == np.bool_ else instead(a, m)


def _booleans(instead: Any) -> Any:
    return lambda a, m: instead(a, m) if m.dtype == np.bool_ else Attention.padding(a, m)


# Ignored.

_add(
    "padding-ignored",
    "ignores the padding",
    OUTPUT,
    POLARITY,
    padding=lambda a, mask: Attention.padding(a, _true(mask)),
    case=PADDING,
)
_add(
    "padding-of-numbers-ignored",
    "applies padding only if it is boolean",
    POLARITY,
    SPELLINGS,
    padding=_numbers(lambda a, mask: Attention.padding(a, _true(mask))),
    case=SPELLED,
)
_add(
    "mask-ignored",
    "ignores the mask",
    OUTPUT,
    POLARITY,
    mask=lambda a, mask: _true(mask),
    case=SHARED,
)
_add(
    "number-mask-ignored",
    "applies the mask only if it is boolean",
    POLARITY,
    SPELLINGS,
    additive=lambda a, mask: 0 * np.nan_to_num(mask),
)
_add(
    "bias-ignored",
    "never adds the bias",
    OUTPUT,
    bias=lambda a, bias: 0 * np.nan_to_num(bias),
    case=BIASED,
)
_add(
    "heads-mask-ignored",
    "applies a mask to the first head only",
    OUTPUT,
    mask=lambda a, mask: mask | (np.arange(a.shape.heads) > 0)[:, None, None],
    case=SHARED,
)
_add(
    "mask-ignored-with-bias",
    "uses the bias instead of the mask if both are given",
    OUTPUT,
    mask=lambda a, mask: _true(mask) if "bias" in a.given.masks else mask,
    case="bias/with-mask/cross",
)
_add(
    "padding-ignored-with-mask",
    "uses the mask instead of the padding if both are given",
    SPELLINGS,
    OUTPUT,
    padding=lambda a, mask: Attention.padding(a, _true(mask) if len(a.given.masks) > 1 else mask),
    case="causal/with-left-aligned-padding/cross",
)
_add(
    "mask-ignored-when-long",
    "uses a path without masks above 128 keys",
    OUTPUT,
    hide=lambda a, logits: logits if a.keys > 128 else Attention.hide(a, logits),
    case="mask/per-batch/long",
)

# Turned round.

_add(
    "padding-inverted",
    "treats True as padding",
    OUTPUT,
    POLARITY,
    padding=_booleans(lambda a, mask: ~Attention.padding(a, mask)),
    case=PADDING,
)
_add(
    "padding-of-numbers-inverted",
    "treats 1 as padding",
    POLARITY,
    SPELLINGS,
    padding=_numbers(lambda a, mask: ~Attention.padding(a, mask)),
    case=SPELLED,
)
_add("mask-inverted", "treats True as blocked", OUTPUT, mask=lambda a, mask: ~mask, case=SHARED)
_add(
    "number-mask-negated",
    "subtracts the mask of numbers",
    POLARITY,
    SPELLINGS,
    additive=lambda a, mask: -mask,
)
_add("bias-negated", "subtracts the bias", OUTPUT, bias=lambda a, bias: -bias, case=BIASED)
_add(
    "mask-transposed",
    "reads the mask as `[key query]`",
    OUTPUT,
    mask=lambda a, m: m.swapaxes(-1, -2) if m.shape[-1] == m.shape[-2] else m,
    case=SQUARE,
)
_add(
    "bias-transposed",
    "reads the bias as `[key query]`",
    OUTPUT,
    bias=lambda a, b: b.swapaxes(-1, -2) if b.shape[-1] == b.shape[-2] else b,
    case="bias/in-full/self",
)
_add(
    "padding-reversed",
    "treats padding on the right as padding on the left",
    OUTPUT,
    padding=lambda a, mask: Attention.padding(a, mask[:, ::-1]),
    case=PADDING,
)

# Applied otherwise.


def _total_over_all(a: Attention, powers: Array) -> Array:
    shown = a.biased(a.scaled(a.scores))
    return np.exp(shown - a.peak(a.logits)).sum(axis=-1, keepdims=True)


_add(
    "mask-multiplies-logits",
    "multiplies the logits by the mask",
    OUTPUT,
    BLOCKED_WEIGHTS,
    block=lambda a, logits, visible: logits * visible,
    case=SHARED,
)
_add(
    "mask-added-as-numbers",
    "adds the boolean mask to the logits as 0 and 1",
    OUTPUT,
    BLOCKED_WEIGHTS,
    block=lambda a, logits, visible: logits + visible.astype(a.wide),
    case=SHARED,
)
_add(
    "mask-after-softmax",
    "sets weights to zero after the softmax, and does not normalise again",
    OUTPUT,
    total=_total_over_all,
    case=SHARED,
)
_add(
    "blocked-minus-5",
    "blocks with −5",
    OUTPUT,
    BLOCKED_KEY,
    BLOCKED_WEIGHTS,
    block=lambda a, logits, visible: np.where(visible, logits, logits - a.wide(5)),
    case=PADDING,
)
_add(
    "blocked-minus-50",
    "blocks with −50, which is enough in half precision",
    BLOCKED_WEIGHTS,
    OUTPUT,
    block=lambda a, logits, visible: np.where(visible, logits, logits - a.wide(50)),
    case=PADDING,
)
_add(
    "blocked-minus-100",
    "blocks with −100, which is enough in single precision",
    BLOCKED_WEIGHTS,
    OUTPUT,
    WEIGHTS,
    block=lambda a, logits, visible: np.where(visible, logits, logits - a.wide(100)),
    case=PADDING,
    dtype="float64",
)
_add(
    "blocked-becomes-0",
    "sets blocked logits to 0",
    OUTPUT,
    blocked=0.0,
    case=SHARED,
)
_add(
    "blocked-minus-10000",
    "blocks with −10,000, so that a fully masked row becomes a mean",
    FULLY_MASKED,
    blocked=-1e4,
    case="edge/fully-masked-row/cross",
)
_add(
    "blocked-minus-10000-but-for-masked-rows",
    "blocks with −10,000, and leaves out only queries that are fully masked",
    OUTPUT,
    block=lambda a, logits, visible: np.where(
        visible, logits, np.where(visible.any(axis=-1, keepdims=True), a.wide(-1e4), -np.inf)
    ).astype(a.wide),
    case="bias/lower/narrow",
)
_add(
    "blocked-smallest-float32",
    "blocks with the smallest float32",
    FULLY_MASKED,
    blocked=float(np.finfo(np.float32).min),
    case="edge/fully-masked-row/cross",
)
_add(
    "fully-masked-row-is-nan",
    "divides by the sum of an empty row",
    FULLY_MASKED,
    normalised=lambda a, powers, total: powers / total,
    case="edge/fully-masked-row/cross",
)
_add(
    "fully-masked-row-filled",
    "fills the context of a fully masked query with ones",
    FULLY_MASKED,
    finish=lambda a, merged: Attention.finish(
        a, np.where(np.isneginf(a.logits).all(axis=-1).transpose(0, 2, 1)[..., None], 1, merged)
    ),
    case="edge/fully-masked-row/cross",
)


def _unlike_booleans(value: Callable[[Attention, Array], Array]) -> Callable[..., Array]:
    """A softmax with other weights of fully masked queries if a mask of numbers is there."""

    def softmax(a: Attention, logits: Array) -> Array:
        found = Attention.softmax(a, logits)
        mask = a.given.masks.get("mask")
        if mask is None or mask.dtype == np.bool_:
            return found
        lost = np.isneginf(logits).all(axis=-1, keepdims=True)
        return np.where(lost, value(a, found), found).astype(found.dtype)

    return softmax


_add(
    "masked-row-of-numbers-is-nan",
    "gives a fully masked query zeros if the mask is boolean, and NaN if −∞ was added",
    SPELLINGS,
    softmax=_unlike_booleans(lambda a, weights: np.nan),
    case="edge/fully-masked-row/cross",
)
_add(
    "masked-row-of-numbers-is-mean",
    "gives a fully masked query zeros if the mask is boolean, and a mean if −∞ was added",
    SPELLINGS,
    softmax=_unlike_booleans(lambda a, weights: 1 / a.keys),
    case="edge/fully-masked-row/cross",
)
_add(
    "masked-row-of-numbers-attends-one",
    "lets a fully masked query attend to the first key if −∞ was added",
    SPELLINGS,
    softmax=_unlike_booleans(lambda a, weights: 1.0 * (np.arange(a.keys) == 0)),
    case="edge/fully-masked-row/cross",
)
_add(
    "number-mask-cut",
    "cuts masks of numbers at −5",
    POLARITY,
    SPELLINGS,
    OUTPUT,
    additive=lambda a, mask: np.maximum(mask, a.wide(-5)),
)
_add(
    "number-mask-as-boolean",
    "treats a mask of numbers as a boolean one, in which 0 blocks",
    POLARITY,
    SPELLINGS,
    additive=lambda a, mask: np.where(mask != 0, a.wide(0), a.wide(-np.inf)),
)
_add(
    "padding-of-numbers-added",
    "adds the padding of 0 and 1 to the logits",
    POLARITY,
    SPELLINGS,
    padding=_numbers(lambda a, mask: Attention.padding(a, _true(mask))),
    biased=lambda a, logits: (
        Attention.biased(a, logits)
        + (
            a.read(a.given.masks["padding"])[:, None, None]
            if "padding" in a.given.masks and a.given.masks["padding"].dtype != np.bool_
            else a.wide(0)
        )
    ),
    case=SPELLED,
)
_add("bias-twice", "adds the bias twice", OUTPUT, bias=lambda a, bias: 2 * bias, case=BIASED)
_add(
    "bias-cut",
    "cuts the bias at ±2",
    OUTPUT,
    bias=lambda a, bias: np.clip(bias, -2, 2),
    case=BIASED,
)

# The wrong axis.

_add(
    "padding-of-first-entry",
    "uses the padding of the first batch entry for all",
    OUTPUT,
    padding=lambda a, mask: Attention.padding(a, mask[:1]),
    case=PADDING,
)
_add(
    "mask-of-first-entry",
    "uses the mask of the first batch entry for all",
    OUTPUT,
    mask=lambda a, mask: mask[:1],
    case="mask/per-batch/cross",
)
_add(
    "mask-of-next-entry",
    "uses the mask of the neighbouring batch entry",
    OUTPUT,
    mask=lambda a, mask: np.roll(mask, 1, axis=0),
    case="mask/per-batch/cross",
)
_add(
    "mask-of-first-head",
    "uses the mask of the first head for all",
    OUTPUT,
    mask=lambda a, mask: mask[:, :1],
    case=PER_HEAD,
)
_add(
    "mask-of-first-query",
    "uses the mask of the first query for all",
    OUTPUT,
    mask=lambda a, mask: mask[:, :, :1],
    case=SHARED,
)


def _heads_first(a: Attention, mask: Array) -> Array:
    if mask.shape[:2] != (a.batch, a.shape.heads):
        return mask
    turned = mask.reshape(a.shape.heads, a.batch, *mask.shape[2:])
    return turned.transpose(1, 0, 2, 3)


def _heads_tiled(a: Attention, mask: Array) -> Array:
    full = np.broadcast_to(mask, (a.batch, a.shape.heads, *mask.shape[2:]))
    return np.tile(full[:, 0], (a.shape.heads, 1, 1)).reshape(full.shape)


_add(
    "mask-heads-first",
    "reads `(batch heads)` as `(heads batch)`",
    OUTPUT,
    mask=_heads_first,
    case=PER_HEAD,
)
_add(
    "mask-tiled-over-heads",
    "tiles the batch's masks instead of repeating each for its heads",
    OUTPUT,
    mask=_heads_tiled,
    case="mask/per-batch/cross",
)
_add(
    "attention-bias-of-first-head",
    "uses the bias of the first head for all",
    OUTPUT,
    bias=lambda a, bias: bias[:, :1],
    case="bias/per-head/self",
)
_add(
    "bias-of-first-entry",
    "uses the bias of the first batch entry for all",
    OUTPUT,
    bias=lambda a, bias: bias[:1],
    case=BIASED,
)
_add(
    "padding-over-queries",
    "broadcasts the padding over the wrong axis, to block queries",
    OUTPUT,
    padding=lambda a, mask: (
        Attention.padding(a, mask).swapaxes(-1, -2)
        if a.queries == a.keys
        else Attention.padding(a, mask)
    ),
    case=SQUARE_PADDING,
)
_add(
    "padding-on-queries-too",
    "blocks padded tokens as queries too",
    OUTPUT,
    padding=lambda a, mask: (
        Attention.padding(a, mask)
        & (Attention.padding(a, mask).swapaxes(-1, -2) if a.queries == a.keys else True)
    ),
    case=SQUARE_PADDING,
)
_add(
    "broadcast-mask-for-first-head",
    "applies a mask of one head to the first head only",
    SPELLINGS,
    OUTPUT,
    mask=lambda a, mask: (
        mask | (np.arange(a.shape.heads) > 0)[:, None, None] if mask.shape[1] == 1 else mask
    ),
    case=SPELLED,
)
_add(
    "broadcast-mask-for-first-entry",
    "applies a mask of one entry to the first entry only",
    SPELLINGS,
    OUTPUT,
    mask=lambda a, mask: (
        mask | (np.arange(a.batch) > 0)[:, None, None, None] if mask.shape[0] == 1 else mask
    ),
    case="causal/top-left/cross",
)

# Off by one.


def _shortened(a: Attention, mask: Array) -> Array:
    found = Attention.padding(a, mask).copy()
    found[..., :-1] &= found[..., 1:]
    return found


def _lengthened(a: Attention, mask: Array) -> Array:
    found = Attention.padding(a, mask).copy()
    found[..., 1:] |= found[..., :-1].copy()
    return found


_add(
    "padding-one-short",
    "uses a length that is one too small",
    OUTPUT,
    padding=_shortened,
    case=PADDING,
)
_add(
    "padding-one-long",
    "uses a length that is one too large",
    OUTPUT,
    padding=_lengthened,
    case=PADDING,
)


def _without_edge(last: bool) -> Any:
    """A window from the first to the last visible key, one too narrow on one side."""

    def visible(a: Attention) -> Iterator[Array]:
        for mask in Attention.visible(a):
            at = mask[..., ::-1] if last else mask
            edge = (np.cumsum(at, axis=-1) == 1) & at
            alone = at.sum(axis=-1, keepdims=True) == 1
            at = at & ~(edge & ~alone)
            yield at[..., ::-1] if last else at

    return visible


_add(
    "window-without-first-key",
    "begins a row's window one key too late",
    OUTPUT,
    visible=_without_edge(False),
    case="mask/sliding-window/cross",
)
_add(
    "window-without-last-key",
    "ends a row's window one key too early",
    OUTPUT,
    visible=_without_edge(True),
    case="mask/sliding-window/cross",
)


def _either(a: Attention) -> Iterator[Array]:
    every = list(Attention.visible(a))
    if every:
        joined = every[0]
        for mask in every[1:]:
            joined = joined | mask
        yield joined


_add(
    "masks-joined-by-or",
    "lets a query attend to what either of two masks allows",
    OUTPUT,
    SPELLINGS,
    visible=_either,
    case="causal/with-left-aligned-padding/self",
)


def _spares_unpadded(a: Attention, mask: Array) -> Array:
    return Attention.padding(a, _true(mask) if mask[0].all() else mask)


_add(
    "padding-dropped-if-first-entry-has-none",
    "skips the padding if the first batch entry has none",
    OUTPUT,
    padding=_spares_unpadded,
    case="mask/first-entry-unpadded/cross",
)


def _stops_at_blocked_tile(a: Attention) -> Iterator[tuple[int, int]]:
    for start, stop in Attention.tiles(a):
        if np.isneginf(a.logits[..., start:stop]).all():
            return
        yield start, stop


_add(
    "stops-at-blocked-tile",
    "ends the loop over tiles at a fully blocked one, instead of continuing with the next",
    OUTPUT,
    MODES,
    tiles=_stops_at_blocked_tile,
    case="mask/blocked-start/tiles",
)


def _split_for_one_query(a: Attention, mask: Array) -> Array:
    if a.queries > 1 or a.group == 1 or mask.shape[1] == 1:
        return mask
    grouped = mask.reshape(len(mask), a.group, -1, *mask.shape[2:])
    return grouped.swapaxes(1, 2).reshape(mask.shape)


_add(
    "mask-split-otherwise-for-one-query",
    "splits the heads of a mask into groups in the other order if there is a single query",
    OUTPUT,
    mask=_split_for_one_query,
    case="mask/per-head/decoding",
)

# Structure over heads or entries only, and sizes that coincide.

HEADS_ONLY = "mask/heads-only/wide-value"
SAME_SIZES = "bias/per-head-with-mask/square"
PADDED = "mask/key-padding/square"


def _coincide(a: Attention) -> bool:
    return bool(a.batch == a.shape.heads > 1)


_add(
    "mask-of-all-entries-for-first-head",
    "reads a mask per head without a batch axis as a mask for every head",
    SPELLINGS,
    OUTPUT,
    mask=lambda a, mask: mask[:, :1] if len(mask) == 1 else mask,
    case=HEADS_ONLY,
)
_add(
    "mask-of-heads-rolled-over-batch",
    "spreads a mask `[1 heads query key]` over `batch·heads` in the wrong order",
    SPELLINGS,
    OUTPUT,
    mask=lambda a, mask: (
        np.repeat(mask[0], a.batch, axis=0).reshape(a.batch, a.shape.heads, *mask.shape[2:])
        if len(mask) == 1 and mask.shape[1] > 1
        else mask
    ),
    case=HEADS_ONLY,
)
_add(
    "mask-per-head-over-keys-as-per-entry",
    "reads `[1 heads 1 key]` as `[1 1 1 key]`",
    SPELLINGS,
    OUTPUT,
    mask=lambda a, mask: mask[:, :1] if mask.shape[2] == 1 else mask,
    case="scale/above-one-with-mask/gqa",
)
_add(
    "mask-of-key-heads",
    "takes a mask per head for one per key/value head if entries share it",
    SPELLINGS,
    OUTPUT,
    mask=lambda a, mask: (
        np.repeat(mask[:, :: a.group], a.group, axis=1)
        if mask.shape[1] > 1 and len(mask) == 1
        else mask
    ),
    case="scale/above-one-with-mask/gqa",
)
_add(
    "mask-of-entries-for-heads",
    "reads `[batch 1 query key]` as `[1 heads query key]` if there are as many",
    SPELLINGS,
    OUTPUT,
    mask=lambda a, mask: (
        mask.swapaxes(0, 1) if _coincide(a) and mask.shape[1] == 1 < len(mask) else mask
    ),
    case=SAME_SIZES,
)
_add(
    "bias-of-heads-for-entries",
    "reads a bias `[1 heads query key]` as `[batch 1 query key]` if there are as many",
    SPELLINGS,
    OUTPUT,
    bias=lambda a, bias: (
        bias.swapaxes(0, 1) if _coincide(a) and len(bias) == 1 < bias.shape[1] else bias
    ),
    case=SAME_SIZES,
)
_add(
    "padding-over-queries-if-batch-fits",
    "reads padding `[batch key]` as `[query key]` if there are as many queries as entries",
    OUTPUT,
    padding=lambda a, mask: (
        Attention.padding(a, mask).transpose(1, 2, 0, 3)
        if a.batch == a.queries
        else Attention.padding(a, mask)
    ),
    case=PADDED,
)
_add(
    "padding-transposed-if-batch-fits",
    "reads padding `[batch key]` as `[key batch]` if there are as many keys as entries",
    OUTPUT,
    padding=lambda a, mask: Attention.padding(a, mask.T if a.batch == a.keys else mask),
    case=PADDED,
)
_add(
    "padding-over-heads-if-batch-fits",
    "reads padding `[batch key]` as `[heads key]` if there are as many heads as entries",
    OUTPUT,
    padding=lambda a, mask: (
        Attention.padding(a, mask).swapaxes(0, 1) if _coincide(a) else Attention.padding(a, mask)
    ),
    case=PADDED,
)

# Blocked logits that are large.

BEYOND_FLOAT16 = "logits/beyond-float16/separate"


def _finite(amount: float) -> Any:
    """Adds a finite number to blocked logits."""
    return lambda a, logits, visible: np.where(visible, logits, logits - a.wide(amount))


for _amount, _why, _dtype in (
    (1e4, "the number that old models used in half precision", "float32"),
    (65504.0 / 2, "half the largest float16, to be safe from overflow", "float16"),
):
    _add(
        f"blocked-by-adding-{_amount:.0f}",
        f"adds −{_amount:,.0f} to blocked logits, {_why}",
        OUTPUT,
        BLOCKED_WEIGHTS,
        block=_finite(_amount),
        case=BEYOND_FLOAT16,
        dtype=_dtype,
    )


def _in_float16(a: Attention, logits: Array) -> Array:
    if a.given.dtype.name != "float16":
        return logits
    return logits.astype(np.float16).astype(a.wide)


_add(
    "blocked-products-in-float16",
    "adds −∞ to products of float16, of which a blocked one may be +∞",
    OUTPUT,
    scaled=lambda a, scores: Attention.scaled(
        a, _in_float16(a, scores) if a.given.scale is None else scores
    ),
    block=lambda a, logits, visible: logits + np.where(visible, a.wide(0), a.wide(-np.inf)),
    case=BEYOND_FLOAT16,
    dtype="float16",
)
_add(
    "products-of-inputs-in-float16",
    "stores products before they are scaled, as float16, if the scale is the default",
    OUTPUT,
    scaled=lambda a, scores: Attention.scaled(
        a, _in_float16(a, scores) if a.given.scale is None else scores
    ),
    case=BEYOND_FLOAT16,
    dtype="float16",
)

# Two arguments at once, of which one is not a mask of 0 and −∞, or beside a scale of the caller's.

PAIRS = "probe/pairs"


def _numbers(a: Attention) -> bool:
    mask = a.given.masks.get("mask")
    return mask is not None and mask.dtype != np.bool_


_add(
    "number-mask-only-blocks-beside-bias",
    "takes a mask of numbers for booleans if there is a bias to be added already",
    COMBINE,
    additive=lambda a, mask: (
        np.where(np.isneginf(mask), mask, a.wide(0)) if "bias" in a.given.masks else mask
    ),
    case=PAIRS,
)
_add(
    "number-mask-only-blocks-beside-padding",
    "takes a mask of numbers for booleans if it is joined with padding",
    COMBINE,
    additive=lambda a, mask: (
        np.where(np.isneginf(mask), mask, a.wide(0)) if "padding" in a.given.masks else mask
    ),
    case=PAIRS,
)
_add(
    "number-mask-only-blocks-beside-causal",
    "takes a mask of numbers for booleans if it is joined with the triangle",
    COMBINE,
    additive=lambda a, mask: (
        np.where(np.isneginf(mask), mask, a.wide(0)) if a.given.causal else mask
    ),
    case=PAIRS,
)
_add(
    "bias-halved-beside-number-mask",
    "takes the mean of a bias and a mask of numbers",
    COMBINE,
    additive=lambda a, mask: mask / a.wide(2) if "bias" in a.given.masks else mask,
    bias=lambda a, bias: bias / a.wide(2) if _numbers(a) else bias,
    case=PAIRS,
)
_add(
    "scale-ignored-with-padding-and-mask",
    "does not pass a scale on to its kernel for two masks",
    COMBINE,
    factor=lambda a: (
        a.default_factor()
        if {"padding", "mask"} <= a.given.masks.keys() and "score" not in a.own
        else Attention.factor(a)
    ),
    case=PAIRS,
)
_add(
    "scale-on-number-mask-beside-bias",
    "scales a mask of numbers too if it was added to a bias, and the scale is the caller's",
    COMBINE,
    additive=lambda a, mask: (
        mask * a.wide(a.factor()) if "bias" in a.given.masks and a.given.scale is not None else mask
    ),
    case=PAIRS,
)

# Axes that are recognised by their size, and batches that are divided.


def _heads_if_as_many(a: Attention, mask: Array) -> Array:
    batch, heads = mask.shape[:2]
    return mask.swapaxes(0, 1) if heads == 1 and batch == a.shape.heads > 1 else mask


def _padding_if_as_many(a: Attention, mask: Array) -> Array:
    alike = mask.shape[:3] == (1, 1, a.batch) and a.batch > 1
    return mask.swapaxes(0, 2) if alike else mask


def _first_slice(a: Attention, mask: Array) -> Array:
    return Attention.padding(a, mask[np.arange(a.batch) % 8])


_add(
    "batch-mask-for-heads-if-as-many",
    "takes a mask of each batch entry for one of each head where there are as many",
    SPELLINGS,
    mask=_heads_if_as_many,
    case="mask/per-batch/square",
)
_add(
    "shared-mask-for-padding-if-as-many",
    "takes a mask [query key] for padding where there are as many queries as batch entries",
    SPELLINGS,
    mask=_padding_if_as_many,
    case="mask/shared/square",
)
_add(
    "padding-of-the-first-eight",
    "divides large batches into slices of 8, and passes the padding of the first to each",
    OUTPUT,
    padding=_first_slice,
    case="mask/key-padding/large-batch",
)
