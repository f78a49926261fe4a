"""Find out whether a deviation comes from the tested function or from the suite's own projections.

Each is named only on direct evidence: the function if it deviates when it is called alone, the
projections if they deviate and the function alone does not. If neither does, the deviation depends
on something else, such as earlier calls, the memory layout of the inputs, or which arrays need a
gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any, Literal

import numpy as np

from conformance.adapter.base import Call
from conformance.adapter.function import Function
from conformance.causes.hypothesis import Evidence
from conformance.causes.stages import Stages
from conformance.definition.dtypes import Array
from conformance.definition.problem import Problem
from conformance.records.findings import Finding
from conformance.records.numbers import LIMIT
from conformance.requirements.examination import NO_ANSWER, Examination

MadeBy = Literal["", "kernel", "projections"]

COMPARED = frozenset(
    {
        "output.equals-definition",
        "gradient.inputs-equal-definition",
        "gradient.parameters-equal-definition",
        "gradient.bias-equals-definition",
        "weights.equal-definition",
    }
)
"""The requirements whose findings name a responsible part, if it is known."""


def part(finding: Finding, ex: Examination) -> MadeBy:
    """Return which part causes a deviation: "kernel", "projections", or "" if that is unknown.

    The projections are those that the suite supplies. The kernel is called alone: its inputs are
    the heads projected by the reference, rounded to the dtype. A deviation that remains is the
    kernel's.
    """
    if not ex.adapter.projections_supplied:
        return ""
    # Only a missing gradient has no figures.
    array = finding.figures.array if finding.figures else "gradient"
    try:
        answer, expectation = ex.kernel_answer, ex.kernel_expectation
    except NO_ANSWER:
        return ""
    wrong = {}
    for name, want in expectation.arrays.items():
        got = answer.arrays().get(name)
        if got is not None and got.shape == want.shape:
            wrong[name] = bool(Evidence.of(name, got, expectation).wrong.any())
        elif answer.gradients and name.startswith("gradient."):
            # An input without a gradient was detached from the graph.
            wrong[name] = name.removeprefix("gradient.") in ("query", "key", "value")
    beginning = array if array in ("output", "weights", "gradient.attn_bias") else "gradient."
    parts = [is_wrong for name, is_wrong in wrong.items() if name.startswith(beginning)]
    if any(parts):
        return "kernel"
    return "projections" if parts and _projections_deviate(ex) else ""


def _projections_deviate(ex: Examination) -> bool:
    """Return whether the projections in the implementation's framework deviate (cached).

    They do if a projected query, key or value has another shape than the reference, or differs from
    it by more than rounding noise. The result is False if the projections cannot be read.
    """
    adapter, problem = ex.adapter, ex.problem
    if not isinstance(adapter, Function) or ex.mode.name in adapter.bias_modes:
        return False
    key = ("projections", id(adapter), ex.case.id, ex.dtype, ex.device)

    def look() -> bool:
        stages = Stages(problem)
        for name in ("query", "key", "value"):
            got = _projected(adapter, problem, Call(ex.mode, ex.device), name)
            want = stages.heads(name)
            if adapter.layout == "batch length heads head":
                want = want.transpose(0, 2, 1, 3)
            if got.shape != want.shape or _off(got, want, stages, name):
                return True
        return False

    try:
        found: bool = ex.bench.answers.get(key, look)
    except Exception:
        # The adapter cannot be called like this, so nothing is known about its projections.
        return False
    return found


def _projected(adapter: Function, problem: Problem, call: Call, name: str) -> Array:
    """Return the projected heads of one input as the function receives them, in its layout."""
    probe = copy.copy(adapter)
    place = ("query", "key", "value").index(name)

    def attend_for(problem: Problem, call: Call) -> tuple[Callable[..., Any], Hashable]:
        attend, key = adapter.attend_for(problem, call)

        def attended(*given: Any, **options: Any) -> tuple[Any, Any]:
            result = attend(*given, **options)
            return (result[0] if isinstance(result, tuple) else result), given[place]

        return attended, (key, "projected", name)

    probe.attend_for = attend_for  # type: ignore[method-assign]
    probe.name = f"{adapter.name} projected {name}"
    weights = probe.run(problem, call).weights
    assert weights is not None
    return weights


def _off(got: Array, want: Array, stages: Stages, name: str) -> bool:
    """Return whether projected heads differ from the expected ones by more than rounding noise.

    The noise of an element combines the roundings of all its factors and of its sum; the limit is
    `LIMIT` times the mean noise.
    """
    problem = stages.problem
    values, weight = stages.input(name), stages.own[name]
    size = np.einsum("ble,ehd->blhd", values**2, weight**2)
    noise = problem.format.roundoff * np.sqrt(size + np.square(want).mean())
    return bool((np.abs(got - want) > LIMIT * noise.mean()).any())
