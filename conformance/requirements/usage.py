"""Common ways to use a layer: freeze parts, differentiate twice, write into buffers.

None of it is a question to frameworks that compile: there, derivatives are functions of their own,
and arrays are never written to.
"""

from __future__ import annotations

from typing import Any

from conformance.cases import catalogue as served
from conformance.cases.patterns import other_mask
from conformance.definition.problem import Problem
from conformance.errors import Unsupported
from conformance.records.findings import Finding
from conformance.requirements.agreement import compare_answers
from conformance.requirements.examination import Examination
from conformance.requirements.requirement import Requirement, judge


def frozen(ex: Examination) -> Finding | None:
    """With all but one of the arguments frozen, and with all: the same output and gradients."""
    if ex.adapter.compiles or not ex.answer.gradients:
        return None
    problem = ex.problem
    parts = [*problem.shape.distinct_inputs(), "weights"]
    parts += ["attn_bias"] if problem.attn_bias is not None else []
    for part in (*parts, ""):
        again = ex.ask(problem, wanted=frozenset({part} - {""}))
        told = f"if only {part} needs one" if part else "if nothing needs a gradient"
        lost = ex.answer.gradients.keys() - again.gradients.keys()
        for name in sorted(lost):
            if name.split(".")[0] == part:
                return Finding(FROZEN.id, "deviates", detail=f"there is no gradient.{name} {told}")
        found = compare_answers(ex, again, ex.answer)
        finding = judge(FROZEN.id, found, said=f"{{array}} is another {told}")
        if finding.verdict != "conforms":
            break
    return finding


def twice(ex: Examination) -> Finding | None:
    """Gradients asked for a second time, through the same graph, are those of the first."""
    if ex.adapter.compiles or not ex.answer.gradients:
        return None
    again = ex.ask(ex.problem, backwards=2)
    found = compare_answers(ex, again, ex.answer)
    return judge(TWICE.id, found, said="{array} of the second backward pass is another")


def rewritten(ex: Examination) -> Finding | None:
    """Buffers that were used and then written to give the answer of their present numbers."""
    if ex.adapter.compiles:
        return None
    again = ex.ask_rewritten(_other(ex))
    found = compare_answers(ex, again, ex.answer)
    return judge(REWRITTEN.id, found, said="{array} is not that of the numbers it was given last")


def _other(ex: Examination) -> Problem:
    """Return a problem of the same shape with other numbers in every argument."""
    problem, random = ex.problem, ex.case.random("earlier")
    inputs = {
        name: problem.format.round(random.standard_normal(getattr(problem, name).shape))
        for name in problem.shape.distinct_inputs()
    }
    changes: dict[str, Any] = {}
    if problem.mask is not None:
        changes["mask"] = other_mask(problem.mask)
    if problem.attn_bias is not None:
        changes["attn_bias"] = -problem.attn_bias
    if not changes and problem.causal:
        raise Unsupported("no mask to write to")
    return problem.with_inputs(**inputs).replace(**changes)


FROZEN = Requirement(
    id=served.FROZEN,
    level="must",
    sentence="Output and gradients are the same whichever of the arguments need a gradient, and "
    "the output also if none does.",
    why="Adapters, frozen encoders and inference ask for less than everything; a path of its own "
    "for that may compute something else, or leave out a gradient.",
    check=frozen,
)
TWICE = Requirement(
    id=served.TWICE,
    level="must",
    sentence="Gradients asked for twice through the same graph are the same.",
    why="Two losses, or a Jacobian row by row, go back through one forward pass; what the first "
    "backward pass writes over is wrong in the second.",
    check=twice,
)
REWRITTEN = Requirement(
    id=served.REWRITTEN,
    level="must",
    sentence="A call reads the numbers that its arguments hold now, not those that they held in an "
    "earlier call.",
    why="Servers keep their buffers and write into them; what was remembered by identity is stale.",
    check=rewritten,
)

REQUIREMENTS = (FROZEN, TWICE, REWRITTEN)
