"""Known defects in the scale of the logits, and factors that only the answer reveals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from conformance.causes.hypothesis import Best, Evidence, Hypothesis, Maker, significant
from conformance.definition.dtypes import DTYPES, Array
from conformance.records.phrase import NOTHING, Phrase

STEPS = 33
LEAST = 1e-4
GOLDEN = (math.sqrt(5) - 1) / 2


def hypotheses(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses about the scale, the simplest first."""
    problem, shape = maker.problem, maker.problem.shape
    size, scale = shape.head_size, maker.problem.logit_scale
    width = max(1, shape.query_width)
    on_additive = shape.score == "additive" and problem.scale is None
    seen: list[float] = [scale]
    for mistake, other in (
        ("scale.missing", 1.0),
        ("scale.by-head-size", 1.0 / size),
        ("scale.on-additive-score" if on_additive else "scale.default", 1.0 / math.sqrt(size)),
        ("scale.by-root-of-width", 1.0 / math.sqrt(width)),
        ("scale.by-width", 1.0 / width),
        ("scale.by-value-head-size", 1.0 / math.sqrt(shape.value_head_size)),
        ("scale.applied-twice", scale * scale),
        ("scale.default-on-top", scale / math.sqrt(size)),
        ("scale.inverted", 1.0 / scale if scale else 0.0),
        ("scale.root-of-head-size", math.sqrt(size)),
        ("softmax.uniform", 0.0),
    ):
        if not any(math.isclose(other, known) for known in seen):
            seen.append(other)
            yield maker.asked(mistake, scale=other)
    for name in ("float32", "float16", "bfloat16"):
        narrow = DTYPES[name]
        other = float(narrow.round(scale))
        if narrow.significand_bits < problem.format.significand_bits and other != scale:
            yield maker.asked("scale.rounded", {"to": name}, scale=other)


def of_output(maker: Maker, evidence: Evidence, best: Best) -> None:
    """Add to `best` the hypothesis that the output is a multiple of the expected one."""
    if not np.isfinite(evidence.got).all():
        return
    bias = maker.problem.weights.output_bias
    for mistake, offset in (
        ("output.factor", 0.0),
        ("output.factor-without-bias", 0.0 if bias is None else bias),
    ):
        factor = best_factor(evidence.got - offset, evidence.want - offset)
        found = factor * (evidence.want - offset) + offset
        # Of 0 and 1 other causes speak.
        if min(abs(factor), abs(factor - 1)) > LEAST and evidence.explained(found):
            cause = Phrase(mistake, {"factor": significant(factor)})
            best.add(evidence.misfit(found), cause)


def of_logits(maker: Maker, evidence: Evidence) -> Phrase:
    """Return the factor by which scale or bias is off, if one explains the answer."""
    if not np.isfinite(evidence.got).all():
        return NOTHING
    problem = maker.problem

    def scaled(factor: float) -> Array:
        return maker.asked("", scale=problem.logit_scale * factor).make().output

    families: list[tuple[str, Callable[[float], Array]]] = [("scale.factor", scaled)]
    if problem.attn_bias is not None:
        bias = problem.attn_bias
        families.append(
            ("bias.factor", lambda factor: maker.asked("", attn_bias=factor * bias).make().output)
        )
    for mistake, answer in families:
        factor = _search(answer, evidence)
        if factor is not None and abs(factor - 1) > LEAST and evidence.explained(answer(factor)):
            return Phrase(mistake, {"factor": significant(factor)})
    return NOTHING


def best_factor(got: Array, want: Array) -> float:
    """Return the best factor by least squares."""
    size = float((want * want).sum())
    with np.errstate(over="ignore", invalid="ignore"):
        return float((got * want).sum()) / size if size > 0 else 1.0


def _search(answer: Callable[[float], Array], evidence: Evidence) -> float | None:
    """Search for the factor that fits the answer best: on a grid, then by golden sections."""

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
