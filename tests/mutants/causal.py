"""Mistakes in the causal flag."""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.definition.dtypes import BFLOAT16
from mutants.attention import Array, Attention
from mutants.mutant import (
    ALIGNMENT,
    FLAG_BLOCKS,
    FULLY_MASKED,
    INPUTS,
    OUTPUT,
    PARAMETERS,
    SPELLINGS,
    Mutant,
    chapter,
)

MUTANTS: list[Mutant] = []
_add = chapter("causal", MUTANTS)

SQUARE = "causal/square/self"
OBLONG = "causal/bottom-right/cross"
FULL = "causal/square/full-tiles"
NARROW = "causal/bottom-right/narrow"


def _tri(a: Attention, diagonal: int = 0) -> Array:
    return np.tri(a.queries, a.keys, diagonal, dtype=np.bool_)


def _unless(condition: Any) -> Any:
    """No triangle where this holds."""
    return lambda a: Attention.triangle(a) | bool(condition(a))


_add(
    "causal-ignored",
    "ignores the flag",
    OUTPUT,
    triangle=_unless(lambda a: True),
    case=SQUARE,
)
_add(
    "causal-sees-the-next",
    "lets a query see the key after its own",
    OUTPUT,
    diagonal=1,
    case=SQUARE,
)
_add("causal-strict", "hides a query's own key", OUTPUT, diagonal=-1, case=SQUARE)
_add(
    "causal-reversed",
    "keeps the upper triangle",
    OUTPUT,
    triangle=lambda a: ~Attention.triangle(a) | np.eye(a.queries, a.keys, dtype=np.bool_),
    case=SQUARE,
)
_add(
    "causal-top-left",
    "aligns at the first key if lengths differ",
    OUTPUT,
    ALIGNMENT,
    offset=lambda a: 0,
    case=OBLONG,
)
_add(
    "causal-bottom-right-one-off",
    "uses an offset that is one too small if lengths differ",
    OUTPUT,
    ALIGNMENT,
    offset=lambda a: a.keys - a.queries - (a.keys != a.queries),
    case=OBLONG,
)
_add(
    "causal-offset-negated",
    "uses the length of the queries minus that of the keys",
    OUTPUT,
    ALIGNMENT,
    offset=lambda a: a.queries - a.keys,
    case=OBLONG,
)
_add(
    "causal-ignored-with-padding",
    "ignores the flag if padding is given",
    OUTPUT,
    SPELLINGS,
    triangle=_unless(lambda a: "padding" in a.given.masks),
    case="causal/with-left-aligned-padding/self",
)
_add(
    "causal-ignored-with-mask",
    "ignores the flag if a mask is given",
    SPELLINGS,
    OUTPUT,
    triangle=_unless(lambda a: "mask" in a.given.masks),
    case="causal/with-left-aligned-padding/self",
)
_add(
    "causal-ignored-with-bias",
    "ignores the flag if a bias is given",
    OUTPUT,
    triangle=_unless(lambda a: "bias" in a.given.masks),
    case="bias/with-causal/self",
)
_add(
    "causal-instead-of-padding",
    "ignores the padding if the flag is given",
    OUTPUT,
    padding=lambda a, mask: Attention.padding(a, mask | a.given.causal),
    case="causal/with-left-aligned-padding/self",
)
_add(
    "causal-ignored-where-lengths-differ",
    "applies the flag to square problems only",
    OUTPUT,
    ALIGNMENT,
    triangle=_unless(lambda a: a.queries != a.keys),
    case=OBLONG,
)
_add(
    "causal-ignored-when-long",
    "ignores the flag above 128 keys",
    OUTPUT,
    triangle=_unless(lambda a: a.keys > 128),
    case="causal/bottom-right/long",
)
_add(
    "causal-on-first-head",
    "applies the flag to the first head only",
    OUTPUT,
    triangle=lambda a: _tri(a, a.offset()) | (np.arange(a.shape.heads) > 0)[:, None, None],
    case=SQUARE,
)
_add(
    "causal-on-first-entry",
    "applies the flag to the first batch entry only",
    OUTPUT,
    triangle=lambda a: _tri(a, a.offset()) | (np.arange(a.batch) > 0)[:, None, None, None],
    case=SQUARE,
)
_add(
    "causal-window",
    "keeps a window of four keys, as for another model",
    OUTPUT,
    triangle=lambda a: _tri(a, a.offset()) & ~_tri(a, a.offset() - 4),
    case=SQUARE,
)
_add(
    "causal-by-tile",
    "hides whole tiles, and lets the tile on the diagonal see itself",
    OUTPUT,
    triangle=lambda a: (
        _tri(a, a.offset()) | (np.arange(a.queries)[:, None] // 2 == np.arange(a.keys) // 2)
    ),
    case=SQUARE,
)


def _half_positions(a: Attention) -> Array:
    if a.given.dtype.name != "bfloat16":
        return Attention.triangle(a)
    queries = BFLOAT16.round(np.arange(a.queries, dtype=np.float64) + Attention.offset(a))
    return BFLOAT16.round(np.arange(a.keys, dtype=np.float64)) <= queries[:, None]


_add(
    "positions-in-bfloat16",
    "compares positions in the dtype of the tensors, which cannot represent 257",
    OUTPUT,
    INPUTS,
    triangle=_half_positions,
    case="causal/next-key-attracts/longer",
    dtype="bfloat16",
)

# A single query, or several, beside keys that came before.

DECODING = "causal/bottom-right/decoding"
CACHED = "causal/beside-a-cache/gqa"

_add(
    "causal-top-left-for-one-query",
    "counts positions from 0 for a single query, which then sees the first key only",
    OUTPUT,
    ALIGNMENT,
    offset=lambda a: 0 if a.queries == 1 else Attention.offset(a),
    case=DECODING,
)
_add(
    "causal-strict-for-one-query",
    "hides the newest key from a single query",
    OUTPUT,
    offset=lambda a: Attention.offset(a) - (a.queries == 1),
    case=DECODING,
)
_add(
    "causal-ignored-for-one-query",
    "drops the flag for a single query, as one aligned at the end allows",
    OUTPUT,
    alignment="top-left",
    offset=lambda a: 0,
    triangle=_unless(lambda a: a.queries == 1),
    case="causal/top-left/one-query",
)
_add(
    "causal-bottom-right-for-one-query",
    "sees a cache in a single query, although it aligns at the first key",
    OUTPUT,
    alignment="top-left",
    offset=lambda a: a.keys - 1 if a.queries == 1 else 0,
    case="causal/top-left/one-query",
)
_add(
    "padding-ignored-for-one-causal-query",
    "drops all masks where a flag is given and there is a single query: nothing comes after it",
    OUTPUT,
    visible=lambda a: iter(()) if a.given.causal and a.queries == 1 else Attention.visible(a),
    case="causal/beside-a-cache/decoding",
)
_add(
    "causal-top-left-beside-mask",
    "counts positions from 0 if a mask is given: a chunk of queries forgets the keys before it",
    OUTPUT,
    ALIGNMENT,
    offset=lambda a: 0 if a.given.masks else Attention.offset(a),
    case=CACHED,
)
_add(
    "causal-without-offset-in-padding",
    "counts a sequence's positions without its padding for the keys only",
    OUTPUT,
    triangle=lambda a: (
        Attention.triangle(a)
        if "padding" not in a.given.masks or a.queries == a.keys
        else np.cumsum(a.padding(a.given.masks["padding"]), axis=-1)
        <= np.arange(a.queries)[:, None]
        + a.offset()
        + 1
        - (~a.padding(a.given.masks["padding"])).sum(axis=-1, keepdims=True)
        + 1
    ),
    case=CACHED,
)
_add(
    "causal-chunk-sees-itself",
    "lets all queries of a chunk see the whole chunk beside a cache",
    OUTPUT,
    triangle=lambda a: Attention.triangle(a) | (bool(a.given.masks) and 1 < a.queries < a.keys),
    case=CACHED,
)

# Beside a mask, beyond the first tile.

BEYOND = "scale/one-with-bias/full-tiles"


def _beyond(a: Attention, shown: Array) -> Array:
    """Everything is visible beyond the first 64 keys if the flag is given."""
    return shown | (a.given.causal and (np.arange(a.keys) >= 64))


_add(
    "mask-of-first-tile-beside-causal",
    "loads a mask only for the first 64 keys if the flag is given too",
    OUTPUT,
    mask=lambda a, mask: _beyond(a, Attention.mask(a, mask)),
    case=BEYOND,
)
_add(
    "padding-of-first-tile-beside-causal",
    "loads the padding only for the first 64 keys if the flag is given too",
    OUTPUT,
    padding=lambda a, mask: _beyond(a, Attention.padding(a, mask)),
    case="causal/with-left-aligned-padding/full-tiles",
)
_add(
    "bias-of-first-tile-beside-causal",
    "adds a bias only to the first 64 keys if the flag is given too",
    OUTPUT,
    bias=lambda a, bias: bias * a.wide(1) * ((np.arange(a.keys) < 64) | (not a.given.causal)),
    case=BEYOND,
)
_add(
    "causal-tile-of-diagonal-skipped",
    "ends the loop over tiles before the diagonal if the length is a multiple of 64",
    OUTPUT,
    triangle=lambda a: (
        Attention.triangle(a)
        & (
            (a.keys % 64 > 0)
            | (np.arange(a.keys) // 64 < np.maximum(np.arange(a.queries)[:, None] // 64, 1))
        )
    ),
    case=FULL,
)

# A flag that does not block.

FLAG = "probe/causal"


def _lowering(amount: float) -> Any:
    """Subtracts a finite number where the triangle blocks; masks block as ever."""

    def hide(a: Attention, logits: Array) -> Array:
        shown = [*a.visible()]
        if a.given.causal:
            logits = np.where(shown.pop(), logits, logits - a.wide(amount))
        for visible in shown:
            logits = a.block(logits, visible)
        return logits

    return hide


for _amount in (1e4, 1e9):
    _add(
        f"causal-subtracts-{_amount:.0f}",
        f"subtracts {_amount:,.0f} from the logits of later keys, and does not block them",
        FLAG_BLOCKS,
        hide=_lowering(_amount),
        case=FLAG,
    )


def _limit_rounded_down(a: Attention) -> Array:
    visible = Attention.triangle(a)
    for start in range(0, a.queries, 64):
        limit = start + 64 + a.offset()
        if limit < a.keys:
            visible[start : start + 64, limit // 16 * 16 :] = False
    return visible


_add(
    "causal-limit-rounded-down",
    "ends the keys of 64 queries at a multiple of 16, except for the last queries",
    OUTPUT,
    triangle=_limit_rounded_down,
    case="causal/bottom-right/blocks",
)
_add(
    "causal-rows-before-the-first-key-are-nan-again",
    "makes weights again from logits of −∞ and a logarithm of −∞ where the flag leaves none",
    INPUTS,
    PARAMETERS,
    case=NARROW,
    weights_again=lambda a: np.where(
        np.isfinite(a.logits).any(axis=-1, keepdims=True), Attention.weights_again(a), np.nan
    ).astype(a.wide),
)
_add(
    "causal-rows-before-the-first-key-are-nan",
    "divides by the sum of no keys where the flag, not a mask, leaves a query none",
    FULLY_MASKED,
    case=NARROW,
    normalised=lambda a, powers, total: (
        powers / total
        if a.given.causal and a.keys < a.queries
        else Attention.normalised(a, powers, total)
    ),
)
