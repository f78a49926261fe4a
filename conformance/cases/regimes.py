"""Inputs away from the ordinary, on purpose: where naive arithmetic and shortcuts show."""

from __future__ import annotations

import numpy as np

from conformance.cases.case import Drawn
from conformance.definition.problem import Shape


def large_logits(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Make logits 8 times as wide: the softmax is nearly one-hot, and rounding a logit shows."""
    _scale_queries(drawn, 8.0)


def huge_logits(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Raise logits to about 110: exp overflows float32 unless the row maximum is subtracted.

    Queries grow from entry to entry. The first entry stays ordinary, because rows that are one-hot
    to the last digit say nothing about scale and biases; no entry has larger logits, because their
    noise in bfloat16 has no useful size.
    """
    q = np.einsum("bqe,ehd->bhqd", drawn["query"], drawn["weights.query"])
    k = np.einsum("bke,ehd->bhkd", drawn["key"], drawn["weights.key"])
    logits = shape.default_scale * np.einsum("bhqd,bhkd->bhqk", q, k)
    growth = np.linspace(0.0, 1.0, shape.batch)[:, None, None]
    drawn["query"] *= (110.0 / logits[-1].max()) ** growth


def large_heads(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Make projected queries and keys 128 times as large: their products overflow float16."""
    for name in ("query", "key"):
        drawn[f"weights.{name}"] *= 128.0
        if f"weights.{name}_bias" in drawn:
            drawn[f"weights.{name}_bias"] *= 128.0


def next_key_attracts(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Make each query resemble the next key, so that a triangle too wide by one shows.

    Among hundreds of keys, one more would be lost in the noise of half precision.
    """
    drawn["weights.query"] = drawn["weights.key"].copy()
    drawn["query"][:, :-1] = 4.0 * drawn["key"][:, 1:]


def rising_logits(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Keys grow along the sequence by a hundred, and queries until logits reach about 110.

    The largest logit of a row is among the last keys, and exp of its distance to the largest among
    the first overflows float32. The first query stays ordinary, as in `huge_logits`.
    """
    drawn["key"] *= np.geomspace(0.01, 1.0, shape.key_length)[:, None]
    q = np.einsum("bqe,ehd->bhqd", drawn["query"], drawn["weights.query"])
    k = np.einsum("bke,ehd->bhkd", drawn["key"], drawn["weights.key"])
    logits = shape.default_scale * np.einsum("bhqd,bhkd->bhqk", q, k)
    growth = np.linspace(0.0, 1.0, shape.query_length)[:, None]
    drawn["query"] *= (110.0 / logits[:, :, -1].max()) ** growth


def large_scores(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Make the additive score's weight 6 times as large (tanh bounds what the inputs can do)."""
    drawn["weights.score"] *= 6.0


def constant_rows(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Make all keys of the first batch entry equal: constant logits and uniform weights there."""
    name = "query" if shape.sharing == "self" else "key"
    drawn[name][0] = drawn[name][0, :1]


def repeated_maxima(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Make keys equal in pairs, so that the largest logit of each row appears exactly twice."""
    name = "query" if shape.sharing == "self" else "key"
    _scale_queries(drawn, 3.0)
    half = drawn[name].shape[1] // 2
    drawn[name][:, half : 2 * half] = drawn[name][:, :half]


def outliers(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Draw from N(0, 1) with a few entries from N(0, 100), as in FlashAttention-3's error table."""
    for name in shape.distinct_inputs():
        values = drawn[name]
        chosen = random.random(values.shape) < 0.01
        chosen.flat[random.integers(values.size)] = True
        values[chosen] += 10.0 * random.standard_normal(int(chosen.sum()))


def all_positive(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Draw inputs from [0, 2): sums do not cancel, so biased rounding shows."""
    for name in shape.distinct_inputs():
        drawn[name] = 2.0 * random.random(drawn[name].shape)


def small_values(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Make the output a thousand times smaller, where a fixed absolute tolerance is meaningless."""
    for name in ("weights.value", "weights.value_bias", "weights.output_bias"):
        if name in drawn:
            drawn[name] *= 2.0**-10


def _scale_queries(drawn: Drawn, factor: float) -> None:
    # Through the weights, not the inputs: in self-attention the inputs are keys and values too.
    for name in ("weights.query", "weights.query_bias"):
        if name in drawn:
            drawn[name] *= factor
