"""Defects with a number that only the answer tells: a factor on the scale or on the output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conformance.causes.hypothesis import Best, Evidence, Maker
from conformance.definition.dtypes import Array

STEPS = 33
LEAST = 1e-4
GOLDEN = (math.sqrt(5) - 1) / 2


def of_output(maker: Maker, evidence: Evidence, best: Best) -> None:
    """The output is a multiple of what it should be."""
    if not np.isfinite(evidence.got).all():
        return
    bias = maker.problem.weights.output_bias
    for told, offset in (
        ("the output", 0.0),
        ("the output without its bias", 0.0 if bias is None else bias),
    ):
        factor = best_factor(evidence.got - offset, evidence.want - offset)
        found = factor * (evidence.want - offset) + offset
        # Of 0 and 1 other causes speak.
        if min(abs(factor), abs(factor - 1)) > LEAST and evidence.explained(found):
            best.add(evidence.misfit(found), f"{told} is {factor:.4g} times what it should be")


def of_logits(maker: Maker, evidence: Evidence) -> str:
    """Scale or bias are a multiple of what they should be."""
    if not np.isfinite(evidence.got).all():
        return ""
    problem = maker.problem

    def shared(**changes: Any) -> Array:
        return maker.asked("", **changes).make().output

    def scaled(factor: float) -> Array:
        return shared(scale=problem.logit_scale * factor)

    families: list[tuple[str, Callable[[float], Array]]] = [("the scale", scaled)]
    if problem.attn_bias is not None:
        attn_bias = problem.attn_bias
        families.append(("the additive bias", lambda f: shared(attn_bias=f * attn_bias)))
    for told, answer in families:
        found = _search(answer, evidence)
        if found is not None and abs(found - 1) > LEAST and evidence.explained(answer(found)):
            return f"{told} is {found:.4g} times what it should be"
    return ""


def best_factor(got: Array, want: Array) -> float:
    """Least squares."""
    size = float((want * want).sum())
    with np.errstate(over="ignore", invalid="ignore"):
        return float((got * want).sum()) / size if size > 0 else 1.0


def _search(answer: Callable[[float], Array], evidence: Evidence) -> float | None:
    """The factor with which the answer comes nearest: a grid, then golden sections."""

    def misfit(exponent: float) -> float:
        found = answer(2.0**exponent)
        left = (evidence.got - found)[np.isfinite(found)]
        return float(left @ left)

    grid = np.linspace(-4, 4, STEPS)
    sizes = [misfit(float(exponent)) for exponent in grid]
    at = int(np.argmin(sizes))
    # Near a minimum so sharp that the grid sees little of it, half is a lot already.
    right = misfit(0.0)
    if not sizes[at] <= right:
        return None
    low, high = float(grid[max(at - 1, 0)]), float(grid[min(at + 1, STEPS - 1)])
    for exponent in _sections(misfit, low, high):
        best = exponent
    return 2.0**best


def _sections(misfit: Callable[[float], float], low: float, high: float) -> Iterator[float]:
    one, other = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    first, second = misfit(one), misfit(other)
    for _ in range(44):
        if first < second:
            high, other, second = other, one, first
            one = high - GOLDEN * (high - low)
            first = misfit(one)
        else:
            low, one, first = one, other, second
            other = low + GOLDEN * (high - low)
            second = misfit(other)
        yield (low + high) / 2
