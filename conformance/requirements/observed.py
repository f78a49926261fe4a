"""Characteristics, which no definition settles: observed, and compared with the declaration."""

from __future__ import annotations

import numpy as np

from conformance.adapter.arguments import Spelling
from conformance.cases import catalogue as served
from conformance.definition.dtypes import Array
from conformance.definition.expectation import solve
from conformance.errors import Unsupported
from conformance.records.findings import Finding, Verdict
from conformance.records.numbers import LIMIT
from conformance.requirements.examination import Examination, Raised
from conformance.requirements.requirement import Requirement

WHERE = (0, 1)
"""Entry and query of the fully masked row in `patterns.with_fully_masked_row`."""


def fully_masked_row(ex: Examination) -> Finding:
    """What a query gets that may attend no key."""
    answer, problem = ex.answer, ex.problem
    row = answer.output[WHERE]
    bias = problem.weights.output_bias
    nothing = np.zeros_like(row) if bias is None else bias
    # scale 0 without a mask: uniform weights over all keys.
    mean = solve(problem.replace(mask=None, causal=None, scale=0.0)).output[WHERE]
    unmasked = solve(problem.replace(mask=None, causal=None)).output[WHERE]
    if np.isnan(row).any():
        seen = "nan"
    elif not row.any():
        seen = "zeros"
    elif _near(ex, row, nothing):
        seen = "output bias"
    elif _near(ex, row, mean):
        seen = "mean of values"
    elif _near(ex, row, unmasked):
        seen = "as if unmasked"
    else:
        seen = "something else"
    if answer.gradients:
        lost = [name for name, array in answer.gradients.items() if np.isnan(array).any()]
        others = np.delete(answer.output[0], WHERE[1], axis=0)
        seen += f"; NaN in gradients of {', '.join(lost)}" if lost else "; gradients finite"
        if np.isnan(others).any():
            seen += "; NaN in other rows"
    return _against_declaration(FULLY_MASKED.id, seen, ex)


def _against_declaration(requirement: str, seen: str, ex: Examination) -> Finding:
    declared = ex.adapter.masked_row(ex.mode)
    if declared is None:
        return Finding(requirement, "observed", value=seen)
    if seen.split(";")[0] == declared:
        return Finding(requirement, "conforms", value=seen)
    detail = f"the adapter declares {declared!r}, observed {seen!r}"
    return Finding(requirement, "deviates", detail=detail, value=seen)


def causal_alignment(ex: Examination) -> Finding | None:
    """Where the causal flag puts its triangle if there are more keys than queries."""
    flag, problem = ex.adapter.causal_flag, ex.problem
    if flag is None:
        raise Unsupported("no causal flag")
    if not ex.varies_arguments:
        return None
    spelled: dict = {flag.name: True}
    if flag.needs is not None:
        raise Unsupported(f"{flag.name} is only a hint about {flag.needs}")
    try:
        output = ex.ask(problem, spelling=Spelling(flag.name, spelled)).output
    except Raised as error:
        seen = f"refused: {error.told}"
        verdict: Verdict = "conforms" if flag.alignment is None else "deviates"
        return Finding(ALIGNMENT.id, verdict, value=seen, detail=seen if flag.alignment else "")
    seen = "unexplained"
    for alignment in ("top-left", "bottom-right"):
        if _near(ex, output, solve(problem.replace(causal=alignment)).output):
            seen = alignment
    if seen == flag.alignment:
        return Finding(ALIGNMENT.id, "conforms", value=seen)
    detail = f"the adapter declares {flag.alignment!r}, observed {seen!r}"
    return Finding(ALIGNMENT.id, "deviates", detail=detail, value=seen)


def returned_weights(ex: Examination) -> Finding | None:
    """Whether weights come back per head, averaged, or not at all."""
    weights = ex.answer.weights
    if not ex.mode.weights:
        return None
    seen = "none" if weights is None else "averaged" if weights.ndim == 3 else "per head"
    declared = ex.adapter.returns_weights or "none"
    if seen == declared:
        return Finding(RETURNED.id, "conforms", value=ex.adapter.weights_told(seen))
    detail = f"the adapter declares {declared!r}, observed {seen!r}"
    return Finding(RETURNED.id, "deviates", detail=detail, value=seen)


def _near(ex: Examination, output: Array, want: Array) -> bool:
    """Close enough to tell hypotheses apart: to the noise, or to a thousandth of the output."""
    noise = np.sqrt(np.mean(ex.expectation.loosest["output"] ** 2))
    size = np.sqrt(np.mean(ex.expectation.arrays["output"] ** 2))
    with np.errstate(invalid="ignore"):
        return bool((np.abs(output - want) <= max(4 * LIMIT * noise, 1e-3 * size)).all())


FULLY_MASKED = Requirement(
    id=served.FULLY_MASKED,
    level="observed",
    sentence="What a query gets that may attend no key: NaN, zeros, the output bias, the mean of "
    "the values.",
    why="A NaN spreads through the batch; a mean of padding looks like an answer.",
    check=fully_masked_row,
)
ALIGNMENT = Requirement(
    id=served.ALIGNMENT,
    level="observed",
    sentence="Where the causal flag puts its triangle if lengths differ: top-left or bottom-right.",
    why="Decoding with a cache needs bottom-right; most flags are top-left.",
    check=causal_alignment,
)
RETURNED = Requirement(
    id=served.RETURNED,
    level="observed",
    sentence="Whether attention weights come back per head, averaged over heads, or not at all.",
    why="An average hides the heads that people want to see.",
    check=returned_weights,
)

REQUIREMENTS = (FULLY_MASKED, ALIGNMENT, RETURNED)
