"""Known defects in the scale of the logits, and factors that are estimated from the answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conformance.causes.hypothesis import Best, Evidence, Hypothesis, Maker, significant
from conformance.definition.dtypes import DTYPES, Array
from conformance.records.phrase import Phrase

STEPS = 33
LEAST = 1e-4
GOLDEN = (math.sqrt(5) - 1) / 2


def hypotheses(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses about the scale, the simplest first."""
    problem, shape = maker.problem, maker.problem.shape
    size, scale = shape.head_size, maker.problem.logit_scale
    width = max(1, shape.query_width)
    on_additive = shape.score == "additive" and problem.scale is None
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
        if not math.isclose(other, scale):
            yield maker.asked(mistake, scale=other)
    for name in ("float32", "float16", "bfloat16"):
        narrow = DTYPES[name]
        if narrow.significand_bits >= problem.format.significand_bits:
            continue
        # Where it is one over a root, the root may be rounded first.
        roots = [1 / float(narrow.round(1 / scale))] if scale else []
        for other in dict.fromkeys(float(narrow.round(one)) for one in [scale, *roots]):
            if other != scale:
                yield maker.asked("scale.rounded", {"to": name}, scale=other)


def of_output(maker: Maker, evidence: Evidence, best: Best) -> None:
    """Add a cause to `best` if the output is a multiple of the expected one.

    Multiples with and without the output bias are tried.
    """
    if not np.isfinite(evidence.got).all():
        return
    bias = maker.problem.weights.output_bias
    for mistake, offset in (
        ("output.factor", 0.0),
        ("output.factor-without-bias", 0.0 if bias is None else bias),
    ):
        factor = best_factor(evidence.got - offset, evidence.want - offset)
        found = factor * (evidence.want - offset) + offset
        # Factors 0 and 1 have other causes.
        if min(abs(factor), abs(factor - 1)) > LEAST and evidence.explained(found):
            cause = Phrase(mistake, {"factor": significant(factor)})
            best.add(evidence.misfit(found), cause)


def of_logits(maker: Maker, evidence: Evidence) -> Iterator[Phrase]:
    """Yield causes with a factor of the scale or of the additive bias that explains the answer."""
    if not np.isfinite(evidence.got).all():
        return
    problem = maker.problem

    def answer_to(**changes: Any) -> Array:
        return maker.asked("", **changes).make().output

    families: dict[str, Callable[[float], Array]] = {
        "scale.factor": lambda factor: answer_to(scale=problem.logit_scale * factor)
    }
    if problem.attn_bias is not None:
        bias = problem.attn_bias
        families["bias.factor"] = lambda factor: answer_to(attn_bias=factor * bias)
    for mistake, answer in families.items():
        factor = _search(answer, evidence)
        if factor is not None and abs(factor - 1) > LEAST and evidence.explained(answer(factor)):
            yield Phrase(mistake, {"factor": significant(factor)})


def best_factor(got: Array, want: Array) -> float:
    """Return the factor by which `want` has to be multiplied to fit `got`, by least squares.

    The result is 1 if `want` is zero everywhere.
    """
    size = float((want * want).sum())
    with np.errstate(over="ignore", invalid="ignore"):
        return float((got * want).sum()) / size if size > 0 else 1.0


def _search(answer: Callable[[float], Array], evidence: Evidence) -> float | None:
    """Return the factor whose predicted answer fits best, by grid and golden-section search.

    Factors from 1/16 to 16 are tried. The result is None if a misfit on the grid is NaN.
    """

    def misfit(exponent: float) -> float:
        found = answer(2.0**exponent)
        left = (evidence.got - found)[np.isfinite(found)]
        return float(left @ left)

    grid = np.linspace(-4, 4, STEPS)
    sizes = [misfit(float(exponent)) for exponent in grid]
    at = int(np.argmin(sizes))
    if not sizes[at] <= misfit(0.0):
        return None
    low, high = float(grid[max(at - 1, 0)]), float(grid[min(at + 1, STEPS - 1)])
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
    return 2.0 ** ((low + high) / 2)
