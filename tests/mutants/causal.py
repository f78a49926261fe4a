"""Mistakes in the causal flag."""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.definition.dtypes import BFLOAT16
from mutants.attention import Array, Attention
from mutants.mutant import ALIGNMENT, OUTPUT, SPELLINGS, Mutant, chapter

MUTANTS: list[Mutant] = []
_add = chapter("causal", MUTANTS)

SQUARE = "causal/square/self"
OBLONG = "causal/bottom-right/cross"


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
    triangle=_half_positions,
    case="causal/next-key-attracts/longer",
    dtype="bfloat16",
)
