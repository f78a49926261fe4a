"""A recipe: names and sizes from which all numbers of a problem follow.

A search draws recipes instead of arrays, so that it can change one thing at a time. Numbers,
masks, biases and regimes are those of the catalogue, whose noise is known to be realistic; their
combinations and sizes are new.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from conformance.cases import patterns, regimes
from conformance.cases.case import BiasPattern, Pattern, Regime, assembled, draw, rounded
from conformance.definition.dtypes import BoolArray
from conformance.definition.problem import (
    Causal,
    Problem,
    Score,
    Shape,
    Sharing,
    causal_mask,
)

Widths = Literal["equal", "memory", "free"]

MASKS: dict[str, Pattern | None] = {
    "none": None,
    "padding": patterns.key_padding,
    "left-padding": patterns.left_padding,
    "shared": patterns.shared,
    "per-batch": patterns.per_batch,
    "per-head": patterns.per_head,
    "one-key": patterns.one_allowed_key,
}
BIASES: dict[str, BiasPattern | None] = {
    "none": None,
    "shared": patterns.bias_shared,
    "per-head": patterns.bias_per_head,
    "in-full": patterns.bias_in_full,
    "alibi": patterns.alibi,
}
REGIMES: dict[str, Regime | None] = {
    "none": None,
    "all-positive": regimes.all_positive,
    "outliers": regimes.outliers,
    "small-values": regimes.small_values,
    "large-logits": regimes.large_logits,
    "huge-logits": regimes.huge_logits,
    "constant-rows": regimes.constant_rows,
    "repeated-maxima": regimes.repeated_maxima,
}
SCALES = (None, 0.75, 0.125, 2.0)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Properties on which an implementation may insist, whatever the sizes."""

    score: Score = "scaled-dot"
    sharing: Sharing = "self"
    widths: Widths = "equal"
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One problem in names and small numbers. Names are keys of the tables above.

    `widths` "equal" are heads x head size; "memory" those of key and value are others; "free" all
    differ. `size` and `value_size` are those of a head; `extra` is added to widths that differ.
    """

    frame: Frame = Frame()
    batch: int = 2
    query: int = 3
    key: int = 3
    kv_heads: int = 2
    group: int = 1
    size: int = 3
    value_size: int = 0
    """0: as `size`."""
    extra: int = 1
    mask: str = "none"
    bias: str = "none"
    causal: Causal | None = None
    scale: float | None = None
    regime: str = "none"
    seed: int = 0

    @property
    def shape(self) -> Shape:
        """The shape of the problem; raises `WrongShape` if there is none of these sizes."""
        frame, heads = self.frame, self.kv_heads * self.group
        width = heads * self.size
        free = frame.widths == "free"
        key_width = width if frame.widths == "equal" else width + self.extra
        query_width = key_width if free and frame.sharing == "self" else width + 2 * free
        separate = frame.sharing == "separate" and frame.widths != "equal"
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
            output_width=width + 3 * free,
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
        allowed = None if mask is None else _usable(mask(shape, random), shape, self.causal)
        added = None if bias is None else bias(shape, random)
        if regime is not None:
            # A small problem may have no huge logits; then it becomes NaN, and is left out.
            with np.errstate(all="ignore"):
                regime(shape, drawn, random)
        exact = assembled(
            shape, drawn, mask=allowed, attn_bias=added, causal=self.causal, scale=self.scale
        )
        return rounded(exact, dtype)


def _usable(mask: BoolArray, shape: Shape, causal: Causal | None) -> BoolArray:
    """Let every query attend to a key: the last that the causal flag allows."""
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
