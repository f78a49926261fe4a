"""Are the attention weights that it returns those that made the output?"""

from __future__ import annotations

import numpy as np

from conformance.definition.comparison import against, between, compare, element
from conformance.definition.dtypes import Array
from conformance.errors import Unsupported
from conformance.records.findings import Finding
from conformance.requirements.examination import Examination
from conformance.requirements.requirement import Requirement, judge


def _weights(ex: Examination) -> Array | None:
    """Return the weights, or None if this mode does not return any."""
    if not ex.mode.weights:
        return None
    weights = ex.answer.weights
    if weights is None:
        raise Unsupported("returns no attention weights")
    return weights


def equal(ex: Examination) -> Finding | None:
    """Element by element, within rounding noise."""
    weights = _weights(ex)
    if weights is None:
        return None
    found = against(ex.suited_expectation, {"weights": weights})
    return judge(EQUAL.id, found, said="the returned attention weights are not the definition's")


def sums(ex: Examination) -> Finding | None:
    """Each row sums to one."""
    weights = _weights(ex)
    if weights is None:
        return None
    noise = np.sqrt((ex.suited_expectation.loosest["weights"] ** 2).sum(axis=-1))
    total = weights.sum(axis=-1)
    # A row with a single visible key has no noise of its own; the sum is still rounded once.
    noise = np.maximum(noise, ex.problem.format.roundoff)
    found = compare("row sums", total, np.ones_like(total), noise, ex.expectation.underflow)
    return judge(SUMS.id, [found], said="rows of the returned weights do not sum to one")


def blocked(ex: Examination) -> Finding | None:
    """Exactly zero where a key is blocked."""
    weights = _weights(ex)
    if weights is None or ex.problem.allowed is None:
        return None
    forbidden = ex.problem.blocked_for(weights)
    with np.errstate(invalid="ignore"):
        wrong = forbidden & ~(np.abs(weights) <= ex.expectation.underflow)
    if not wrong.any():
        return Finding(BLOCKED.id, "conforms")
    at = np.unravel_index(
        np.argmax(np.where(wrong, np.nan_to_num(np.abs(weights)), -1)), wrong.shape
    )
    worst = element("weights", at, weights[at], 0.0, 0.0)
    detail = f"{int(wrong.sum())} of {int(forbidden.sum())} blocked weights are not zero"
    return Finding(BLOCKED.id, "deviates", detail=detail, worst=worst)


def made_the_output(ex: Examination) -> Finding | None:
    """Weights times projected values, through the output projection, is the output."""
    weights = _weights(ex)
    if weights is None:
        return None
    if weights.ndim == 3:
        raise Unsupported("weights averaged over heads say little about the output")
    problem, own = ex.problem, ex.problem.weights
    values = np.einsum("bke,ehd->bhkd", problem.value, own.value)
    if own.value_bias is not None:
        values = values + own.value_bias[:, None, :]
    values = np.repeat(values, problem.shape.group, axis=1)
    output = np.einsum("bhqk,bhkd,hde->bqe", weights, values, own.output, optimize=True)
    if own.output_bias is not None:
        output = output + own.output_bias
    # Weights that are wrong may be larger, and then their noise is.
    size = np.sqrt(np.mean(ex.expectation.arrays["output"] ** 2))
    finite = output[np.isfinite(output)]
    gain = max(1.0, np.sqrt(np.mean(finite**2)) / size) if finite.size and size > 0 else 1.0
    noise = gain * ex.expectation.loosest["output"]
    found = between("output", ex.answer.output, output, noise, ex.expectation.underflow)
    return judge(MADE.id, [found], said="the output was not made of the returned weights")


EQUAL = Requirement(
    id="weights.equal-definition",
    level="must",
    sentence="The returned attention weights are those of the definition.",
    why="People plot them, prune by them and distil from them.",
    check=equal,
    every_case=True,
    of_answer=True,
)
SUMS = Requirement(
    id="weights.rows-sum-to-one",
    level="must",
    sentence="Each row of the returned weights sums to one.",
    why="A softmax over the wrong axis, or weights after dropout, shows here first.",
    check=sums,
    every_case=True,
    of_answer=True,
)
BLOCKED = Requirement(
    id="weights.blocked-are-zero",
    level="must",
    sentence="The returned weight of a blocked key is zero, exactly.",
    why="A weight of 1e-5 on padding is a mask that leaks.",
    check=blocked,
    every_case=True,
    of_answer=True,
)
MADE = Requirement(
    id="weights.made-the-output",
    level="must",
    sentence="The output is made of the returned weights: weights times values, projected.",
    why="Weights that were averaged, taken before the mask or after dropout explain nothing.",
    check=made_the_output,
    every_case=True,
    of_answer=True,
)

REQUIREMENTS = (EQUAL, SUMS, BLOCKED, MADE)
