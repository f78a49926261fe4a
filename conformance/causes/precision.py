"""Digits that were lost: at one stage, exactly as a rounding there would; or everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from conformance.causes.hypothesis import Evidence, Hypothesis, Maker
from conformance.causes.stages import Stages
from conformance.definition.dtypes import BFLOAT16, DTYPES, FLOAT16, FLOAT32, Array
from conformance.records.numbers import LIMIT, ratios
from conformance.records.phrase import NOTHING, Phrase

STAGES = ("projections", "logits", "weights", "context", "output", "bias")
SPREAD = 0.5
"""Rounding errs everywhere: at least this share of the rows, in most of the elements."""

LEAST = 0.05
"""rms(error / σ), in σ of the narrower dtype; less are errors of another kind."""

CLASSES = {24: "accuracy.float32", 11: "accuracy.float16", 8: "accuracy.bfloat16"}
"""Significand bits of a narrower dtype, and the cause that says that no more of them are right."""


def rounded_at_a_stage(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses in which exactly one kind of intermediate is rounded."""
    own = DTYPES[maker.problem.dtype].significand_bits
    if maker.problem.dtype == "float16":
        yield maker.staged(
            "precision.products-kept-in-float16",
            scaled=_late,
        )
    for bits, rounding in (
        (24, FLOAT32.round),
        (11, lambda x: _significant(x, 11)),
        (11, FLOAT16.round),
        (8, BFLOAT16.round),
        (4, lambda x: _significant(x, 4)),
    ):
        if bits >= own:
            continue
        digits = {"format": Phrase(f"significand.{bits}")}
        for stage in STAGES:
            if stage == "bias" and maker.problem.attn_bias is None:
                continue
            yield maker.staged(
                "precision.rounded",
                {"stage": Phrase(f"stage.{stage}"), **digits},
                held=_at(stage, rounding),
            )
        yield maker.staged("precision.factors-rounded", digits, product=_factors(rounding))
        yield maker.staged(
            "precision.all-rounded",
            digits,
            product=_factors(rounding),
            shifted=_shifted(rounding),
            finish=_finished(rounding),
            held=_at("bias", rounding),
        )


def _late(a: Stages, scores: Array) -> Array:
    kept = FLOAT16.round(scores)
    # Rows in which they overflow are anything.
    return np.where(np.isfinite(kept), kept, np.nan) * a.problem.logit_scale


def _significant(values: Array, bits: int) -> Array:
    fraction, exponent = np.frexp(values)
    return np.ldexp(np.rint(fraction * 2.0**bits) / 2.0**bits, exponent)


def _at(stage: str, rounding: Any) -> Any:
    return lambda a, what, values: rounding(values) if what == stage else values


def _factors(rounding: Any) -> Any:
    return lambda a, axes, left, right: np.einsum(axes, rounding(left), rounding(right))


def _shifted(rounding: Any) -> Any:
    def shifted(a: Stages, name: str, projected: Array) -> Array:
        bias = a.own.get(f"{name}_bias")
        return projected if bias is None else projected + rounding(bias)

    return shifted


def _finished(rounding: Any) -> Any:
    def finish(a: Stages, merged: Array) -> Array:
        output = a.product("bqhd,hde->bqe", merged, a.weight("output"))
        bias = a.own.get("output_bias")
        return output if bias is None else output + rounding(bias)

    return finish


ALIKE = 0.7
"""Correlation of the errors of two problems that are next to each other; of rounding it is less."""

Again = Callable[[int], Mapping[str, Array]]
"""The errors of the answer to the same problem with inputs that are moved by so many bits."""


def coarse(name: str, evidence: Evidence, dtype: str, again: Again) -> Phrase:
    """Return which accuracy the array has instead of its own, if its error is that of rounding.

    It must be everywhere, of that size, and another for a problem next to this one: an error that
    stays where the inputs move by a rounding error is a mistake, however small. Never for what is
    not finite, or for an error in few rows: that is another answer there.
    """
    own = DTYPES[dtype].significand_bits
    got, want = evidence.got, evidence.want
    if not np.isfinite(got).all() or got.ndim < 2 or got.size < 16:
        return NOTHING
    exact = evidence.noise == 0
    if (np.abs(got - want)[exact] > evidence.underflow).any():
        return NOTHING
    ratio = ratios(got, want, evidence.noise, evidence.underflow)
    off = np.abs(ratio) > 2.0
    rows = off.reshape(-1, off.shape[-1])[~exact.reshape(-1, off.shape[-1]).all(axis=-1)]
    if rows.mean() < SPREAD or (rows.mean(axis=-1) >= SPREAD / 2).mean() < 1 - SPREAD / 4:
        return NOTHING
    for bits, mistake in CLASSES.items():
        if bits >= own:
            continue
        coarser = ratio / 2.0 ** (own - bits)
        if np.abs(coarser).max() > LIMIT:
            continue
        rms = float(np.sqrt(np.mean(coarser**2)))
        if rms < LEAST or _correlation(got - want, again(bits).get(name)) > ALIKE:
            return NOTHING
        return Phrase(mistake)
    return NOTHING


def _correlation(one: Array, other: Array | None) -> float:
    if other is None or other.shape != one.shape or not np.isfinite(other).all():
        return 1.0
    size = float(np.sqrt((one * one).sum() * (other * other).sum()))
    return abs(float((one * other).sum())) / size if size > 0 else 1.0
