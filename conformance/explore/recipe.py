"""A `Recipe`: the names and sizes that determine all numbers of a problem.

A search draws recipes instead of arrays, so that it can change one thing at a time. Numbers,
masks, biases and regimes are drawn as in the catalogue, for which the estimates of noise are known
to be realistic; their combinations and sizes are new.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from conformance.cases import patterns
from conformance.cases.case import (
    BiasPattern,
    FeaturePattern,
    Pattern,
    Regime,
    assembled,
    draw,
    on_tiles,
    rounded,
)
from conformance.definition.dtypes import BoolArray
from conformance.definition.geometry import Pair
from conformance.definition.problem import (
    Causal,
    Problem,
    Score,
    Shape,
    Sharing,
    causal_mask,
)

Widths = Literal["equal", "memory", "free"]

SCORES: tuple[Score, ...] = ("scaled-dot", "additive")
SHARINGS: tuple[Sharing, ...] = ("self", "memory", "separate")
WIDTHS: tuple[Widths, ...] = ("equal", "memory", "free")

MASKS: dict[str, Pattern | None] = {
    "none": None,
    "padding": patterns.key_padding,
    "left-padding": patterns.left_padding,
    "shared": patterns.shared,
    "per-batch": patterns.per_batch,
    "per-head": patterns.per_head,
    "one-key": patterns.one_allowed_key,
    "over-keys": patterns.over_keys,
    "over-keys-per-head": patterns.keys_per_head,
    "heads-only": patterns.heads_only,
    "blocked-start": patterns.blocked_start,
    "block-diagonal": patterns.block_diagonal,
    "sliding-window": patterns.sliding_window,
    "prefix": patterns.prefix_lm,
    "everything": patterns.everything,
    "whole-tiles": patterns.whole_tiles,
}
BIASES: dict[str, BiasPattern | None] = {
    "none": None,
    "shared": patterns.bias_shared,
    "per-head": patterns.bias_per_head,
    "in-full": patterns.bias_in_full,
    "alibi": patterns.alibi,
    "over-keys": patterns.bias_over_keys,
    "over-queries": patterns.bias_over_queries,
    "per-entry": patterns.bias_per_entry,
}
REGIMES: dict[str, Regime | None] = {
    "none": None,
    "all-positive": patterns.all_positive,
    "outliers": patterns.outliers,
    "small-values": patterns.small_values,
    "large-logits": patterns.large_logits,
    "huge-logits": patterns.huge_logits,
    "constant-rows": patterns.constant_rows,
    "repeated-maxima": patterns.repeated_maxima,
}
FEATURES: dict[str, tuple[FeaturePattern, ...]] = {
    "window": (
        patterns.window,
        patterns.window_tight,
        patterns.window_before,
        patterns.window_nothing_before,
        patterns.window_nothing_after,
    ),
    "soft cap": (patterns.soft_cap,),
    "sinks": (patterns.sinks,),
    "alibi": (patterns.slopes, patterns.slopes_of_alibi),
    "rotary": (
        patterns.rotary_halves,
        patterns.rotary_interleaved,
        patterns.rotary_partial,
        patterns.rotary_far,
    ),
    "query/key norm": (patterns.norm,),
    "lengths": (patterns.key_lengths, patterns.key_lengths_from_queries),
    "segments": (patterns.segments, patterns.two_segments),
}
"""The ways to draw each feature; a recipe names one by the feature and its index here."""
SCALES = (None, 0.75, 0.125, 2.0, 1.0, 0.0, -0.5, -1.5)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Properties that an implementation may require regardless of the sizes."""

    score: Score = "scaled-dot"
    sharing: Sharing = "self"
    widths: Widths = "equal"
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One problem, described by keys of `MASKS`, `BIASES`, `REGIMES` and `FEATURES`, and numbers.

    `frame.widths` specifies which widths differ from heads × head size: none for "equal", those of
    key and value for "memory", and all for "free". A key width that differs exceeds heads × head
    size by `extra`. `size` is the head size of queries and keys, and `value_size` that of values. A
    `width` other than 0 is the width of all inputs and of the output. If `tiles` are given, masks
    end around their edges.
    """

    frame: Frame = Frame()
    batch: int = 2
    query: int = 3
    key: int = 3
    kv_heads: int = 2
    group: int = 1
    size: int = 3
    value_size: int = 0
    """The head size of values; 0 stands for `size`."""
    extra: int = 1
    width: int = 0
    tiles: Pair | None = None
    mask: str = "none"
    bias: str = "none"
    causal: Causal | None = None
    scale: float | None = None
    features: tuple[tuple[str, int], ...] = ()
    regime: str = "none"
    seed: int = 0

    @property
    def shape(self) -> Shape:
        """The shape of the problem; raises `WrongShape` if the sizes do not fit together."""
        frame, heads = self.frame, self.kv_heads * self.group
        width = heads * self.size
        free = frame.widths == "free"
        key_width = width if frame.widths == "equal" else width + self.extra
        output_width = width + 3 * free
        query_width = key_width if free and frame.sharing == "self" else width + 2 * free
        if self.width:
            query_width = key_width = output_width = self.width
        separate = not self.width and frame.sharing == "separate" and frame.widths != "equal"
        return Shape(
            batch=self.batch,
            query_length=self.query,
            key_length=self.query if frame.sharing == "self" else self.key,
            heads=heads,
            kv_heads=self.kv_heads,
            head_size=self.size,
            value_head_size=self.value_size or self.size,
            query_width=query_width,
            key_width=key_width,
            value_width=key_width + separate,
            output_width=output_width,
            bias=frame.bias,
            score=frame.score,
            sharing=frame.sharing,
        )

    def problem(self, dtype: str) -> Problem:
        """Return the problem, with every number rounded to the dtype."""
        shape = self.shape
        random = np.random.Generator(np.random.PCG64(self.seed))
        drawn = draw(shape, random)
        mask, bias, regime = MASKS[self.mask], BIASES[self.bias], REGIMES[self.regime]
        if mask is not None and self.tiles is not None:
            mask = on_tiles(mask, self.tiles)
        allowed = None if mask is None else _usable(mask(shape, random), shape, self.causal)
        added = None if bias is None else bias(shape, random)
        if regime is not None:
            # A small problem may be unable to have huge logits; it becomes NaN and is skipped.
            with np.errstate(all="ignore"):
                regime(shape, drawn, random)
        fields: dict[str, Any] = {}
        for name, place in self.features:
            fields |= FEATURES[name][place](shape, self.causal, random)
        exact = assembled(
            shape,
            drawn,
            mask=allowed,
            attn_bias=added,
            causal=self.causal,
            scale=self.scale,
            **fields,
        )
        return rounded(_visible(exact) if fields else exact, dtype)


def _visible(problem: Problem) -> Problem:
    """Return the problem with the mask lifted for queries that would otherwise see no key."""
    if problem.mask is None:
        return problem
    hidden = ~problem.allowed_in_full().any(axis=-1, keepdims=True)
    return problem.replace(mask=problem.mask | hidden) if hidden.any() else problem


def _usable(mask: BoolArray, shape: Shape, causal: Causal | None) -> BoolArray:
    """Return the mask, but let fully masked queries attend to the last causally allowed key."""
    allowed = mask if causal is None else mask & causal_mask(shape, causal)
    empty = ~allowed.any(axis=-1, keepdims=True)
    if not empty.any():
        return mask
    if causal is None:
        last = np.arange(shape.key_length) == shape.key_length - 1
    else:
        triangle = causal_mask(shape, causal)
        last = triangle & ~np.roll(triangle, -1, axis=-1)
        last[..., -1] = triangle[..., -1]
    return mask | (empty & last)
