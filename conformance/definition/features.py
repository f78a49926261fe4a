"""The positions of tokens, and the features of a problem beyond projections, masks and a scale.

`docs/definition.md` defines all of them with formulas. A position is the place of a token in its
sequence. Causal masks, windows, ALiBi and rotary embeddings use positions, never array indices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from conformance.definition.dtypes import Array, BoolArray, IntArray

Pairs = Literal["halves", "interleaved"]
Window = tuple[int | None, int | None]

NO_WINDOW: Window = (None, None)


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary position embedding of the first `size` components of each query and key head.

    Pair t turns by position · base^(−2t/size). It is made of the components t and t + size/2
    ("halves") or 2t and 2t + 1 ("interleaved").
    """

    size: int
    base: float = 10000.0
    pairs: Pairs = "halves"


@dataclass(frozen=True, eq=False, kw_only=True)
class Norm:
    """RMS norm of each query and key head, x · g / √(mean(x²) + epsilon), before the rotation.

    The gains `query` and `key` are `[head]`: all heads share them.
    """

    query: Array
    key: Array
    epsilon: float = 1e-6


@dataclass(frozen=True, eq=False, kw_only=True)
class Segments:
    """The ids of the segments (packed sequences) to which the tokens of each batch entry belong.

    A query may attend only to keys with the same id. `query` is `[batch query]`, `key` is
    `[batch key]`.
    """

    query: IntArray
    key: IntArray


@dataclass(frozen=True, eq=False, kw_only=True)
class Positions:
    """Explicit positions of the tokens, which replace those derived from lengths and segments.

    `query` is `[batch query]`, `key` is `[batch key]`.
    """

    query: IntArray
    key: IntArray


def within(window: Window, ahead: IntArray) -> BoolArray:
    """Return whether the window shows a key, given its position minus the query's (`ahead`)."""
    before, after = window
    seen = np.ones(ahead.shape, np.bool_)
    if before is not None:
        seen &= ahead >= -before
    if after is not None:
        seen &= ahead <= after
    return seen


def ranks(segments: IntArray) -> IntArray:
    """Return each token's index within its segment: the number of earlier tokens in it."""
    order = np.argsort(segments, axis=1, kind="stable")
    together = np.take_along_axis(segments, order, axis=1)
    begins = np.ones(segments.shape, dtype=np.bool_)
    begins[:, 1:] = together[:, 1:] != together[:, :-1]
    index = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
    first = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    found = np.empty(segments.shape, dtype=np.int64)
    np.put_along_axis(found, order, index - first, axis=1)
    return found


def surplus_of_keys(segments: Segments, query_used: BoolArray, key_used: BoolArray) -> IntArray:
    """Return how many more keys than queries the segment of each query has, `[batch query]`.

    The number is negative if there are more queries. Only the tokens for which `query_used` and
    `key_used`, each `[1 or batch, length]`, are True are counted.
    """
    mine = segments.query[:, :, None]
    keys = (mine == segments.key[:, None]) & key_used[:, None]
    queries = (mine == segments.query[:, None]) & query_used[:, None]
    return keys.sum(axis=2) - queries.sum(axis=2)
