"""Characteristics, which no definition settles: observed, and compared with the declaration."""

from __future__ import annotations

import numpy as np

from conformance.adapter.arguments import Spelling
from conformance.cases import catalogue as served
from conformance.definition.dtypes import Array
from conformance.definition.expectation import solve
from conformance.definition.problem import Answer
from conformance.errors import Unsupported
from conformance.records.findings import Finding, Verdict
from conformance.records.numbers import LIMIT
from conformance.records.phrase import Argument, Part, Phrase
from conformance.requirements.declared import declared_row
from conformance.requirements.declared import returned_weights as as_called
from conformance.requirements.examination import Examination, Raised
from conformance.requirements.requirement import Requirement
from conformance.words import say

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
        seen = Phrase("row.nan")
    elif not row.any():
        seen = Phrase("row.zeros")
    elif _near(ex, row, nothing):
        seen = Phrase("row.output-bias")
    elif _near(ex, row, mean):
        seen = Phrase("row.mean-of-values")
    elif _near(ex, row, unmasked):
        seen = Phrase("row.unmasked")
    else:
        seen = Phrase("something-else")
    about: dict[str, Argument] = {"row": seen}
    if answer.gradients:
        about["beside"] = _beside(answer)
    value = Phrase("fully-masked.query", about)
    declared = ex.adapter.masked_row(ex.mode)
    if declared is None:
        return Finding(FULLY_MASKED.id, "observed", value=value)
    if seen == declared_row(declared):
        return Finding(FULLY_MASKED.id, "conforms", value=value)
    detail = f"the adapter declares {declared!r}, observed {say(value)!r}"
    return Finding(FULLY_MASKED.id, "deviates", detail=detail, value=value)


def _beside(answer: Answer) -> Phrase:
    """Return side effects of a fully masked row: NaN in gradients or in other rows."""
    lost = [name for name, array in answer.gradients.items() if np.isnan(array).any()]
    parts: list[Part] = [
        Phrase("beside.nan-in-gradients", {"arrays": [*lost]})
        if lost
        else Phrase("beside.gradients", {"value": Phrase("gradients.finite")})
    ]
    if np.isnan(np.delete(answer.output[0], WHERE[1], axis=0)).any():
        parts.append(Phrase("beside.nan-in-other-rows"))
    return Phrase("beside", {"parts": parts})


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
        value = Phrase("refused.because", {"reason": error.told})
        verdict: Verdict = "conforms" if flag.alignment is None else "deviates"
        detail = say(value) if flag.alignment else ""
        return Finding(ALIGNMENT.id, verdict, value=value, detail=detail)
    seen = "unexplained"
    for alignment in ("top-left", "bottom-right"):
        if _near(ex, output, solve(problem.replace(causal=alignment)).output):
            seen = alignment
    value = Phrase(f"causal.{seen}")
    if seen == flag.alignment:
        return Finding(ALIGNMENT.id, "conforms", value=value)
    detail = f"the adapter declares {flag.alignment!r}, observed {seen!r}"
    return Finding(ALIGNMENT.id, "deviates", detail=detail, value=value)


def returned_weights(ex: Examination) -> Finding | None:
    """Whether weights come back per head, averaged, or not at all."""
    weights = ex.answer.weights
    if not ex.mode.weights:
        return None
    seen = "none" if weights is None else "averaged" if weights.ndim == 3 else "per head"
    declared = ex.adapter.returns_weights or "none"
    if seen == declared:
        return Finding(RETURNED.id, "conforms", value=as_called(ex.adapter, seen))
    detail = f"the adapter declares {declared!r}, observed {seen!r}"
    value = Phrase(f"weights.{seen.replace(' ', '-')}")
    return Finding(RETURNED.id, "deviates", detail=detail, value=value)


def _near(ex: Examination, output: Array, want: Array) -> bool:
    """Return whether two answers agree to within the noise, or a thousandth of the output."""
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
