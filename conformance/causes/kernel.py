"""Who made a deviation where the suite supplies the projections: the kernel, or they.

The kernel is asked for itself: heads that the reference projected, rounded to the dtype, become its
inputs, and there are no projections. Whatever still deviates, the kernel made.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from conformance.causes.hypothesis import Evidence
from conformance.causes.stages import Stages
from conformance.definition.dtypes import Array
from conformance.definition.expectation import expect
from conformance.definition.problem import Problem, Weights
from conformance.errors import ConformanceError, Unsupported
from conformance.records.findings import Finding
from conformance.requirements.examination import Examination, Raised

Maker = Literal["", "kernel", "projections"]


def maker(finding: Finding, ex: Examination) -> Maker:
    """Who made a deviation from the definition; "" where nobody can say."""
    if not ex.adapter.projections_supplied:
        return ""
    # What is missing altogether has no figures; that can be a gradient only.
    whole = finding.figures.array if finding.figures else "gradient"
    key = ("kernel", id(ex.adapter), ex.case.id, ex.dtype, ex.device, ex.mode.name)
    try:
        wrong = ex.bench.answers.get(key, lambda: _wrong_alone(ex))
    except (ConformanceError, Unsupported, Raised):
        return ""
    if whole in ("output", "weights", "gradient.attn_bias"):
        return "" if whole not in wrong else "kernel" if wrong[whole] else "projections"
    gradients = [found for name, found in wrong.items() if name.startswith("gradient.")]
    return "" if not gradients else "kernel" if any(gradients) else "projections"


def _wrong_alone(ex: Examination) -> dict[str, bool]:
    """Whether each array of the kernel's own answer deviates."""
    problem = alone(ex.problem)
    answer, expectation = ex.ask(problem, projected=True), expect(problem)
    found = {}
    for name, want in expectation.arrays.items():
        array = answer.arrays().get(name)
        if array is not None and array.shape == want.shape:
            sigma = expectation.loosest[name]
            found[name] = bool(Evidence(array, want, sigma, expectation.underflow).wrong.any())
        elif answer.gradients and name.startswith("gradient."):
            # What was cut off from the graph has none.
            found[name] = name.removeprefix("gradient.") in ("query", "key", "value")
    return found


def alone(problem: Problem) -> Problem:
    """The same attention of heads that are projected already: all weights are the identity."""
    stages, shape = Stages(problem), problem.shape
    rounded = problem.format.round

    def merged(heads: Array) -> Array:
        return rounded(heads.transpose(0, 2, 1, 3).reshape(heads.shape[0], heads.shape[2], -1))

    def identity(heads: int, size: int) -> Array:
        return np.eye(heads * size).reshape(heads * size, heads, size)

    d_context = np.einsum("bqe,hde->bhqd", problem.cotangent, problem.weights.output)
    sizes = {
        "query": (shape.heads, shape.head_size),
        "key": (shape.kv_heads, shape.head_size),
        "value": (shape.kv_heads, shape.value_head_size),
        "output": (shape.heads, shape.value_head_size),
    }
    widths: dict[str, Any] = {f"{name}_width": many * size for name, (many, size) in sizes.items()}
    weights = {name: identity(*own) for name, own in sizes.items() if name != "output"}
    weights["output"] = np.moveaxis(identity(*sizes["output"]), 0, -1)
    own = {name: merged(stages.projected[name]) for name in ("query", "key", "value")}
    return problem.replace(
        shape=dataclasses.replace(shape, sharing="separate", bias=False, **widths),
        weights=Weights(score=problem.weights.score, **weights),
        cotangent=merged(d_context),
        **own,
    )
