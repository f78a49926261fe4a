"""Find out where an array is wrong, and which part of an implementation is responsible.

A defect may be confined to some heads or rows.

An implementation may be a function without projections, which the suite then supplies. The function
is responsible if it also deviates when it is called alone, with projected heads. Otherwise, the
projections are responsible if they deviate. If neither does, the deviation depends on something
else, such as earlier calls, the memory layout of the inputs, or which arrays need a gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from conformance import text
from conformance.adapter.base import Call
from conformance.adapter.function import Function
from conformance.causes.hypothesis import Evidence, Maker
from conformance.causes.stages import Stages
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.problem import Problem
from conformance.records.findings import NOTHING, Finding, Phrase
from conformance.records.numbers import LIMIT
from conformance.requirements.examination import NO_ANSWER, Examination

MOST = 3
"""The largest number of indices that are listed one by one."""

CLEAR = 0.05
"""The most by which a head's share of a defect, fitted by least squares, may differ from 0 or 1."""

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


def located(array: str, wrong: BoolArray) -> Phrase:
    """Return a phrase that names, axis by axis, the indices at which an array is wrong.

    `array` is the name of the array, and `wrong` is True at its wrong elements. The result is an
    empty phrase if all or no elements are wrong, if the names of the axes are unknown, or if no
    short phrase describes the indices.
    """
    names = text.axes(array, wrong.ndim)
    if not names or wrong.all() or not wrong.any():
        return NOTHING
    parts = []
    for axis, name in enumerate(names):
        others = tuple(other for other in range(wrong.ndim) if other != axis)
        at = np.nonzero(wrong.any(axis=others))[0]
        if 0 < at.size < wrong.shape[axis]:
            part = indices(name, at, wrong.shape[axis])
            parts += [part] if part else []
    if len(parts) > 1:
        return Phrase("where", {"parts": [*parts]})
    return parts[0] if parts else NOTHING


def indices(axis: str, at: Sequence[int] | np.ndarray, size: int) -> Phrase:
    """Return a phrase for some indices along an axis, or an empty phrase if there is no short one.

    Args:
        axis: the name of the axis.
        at: the indices, sorted; at least one.
        size: the size of the axis.
    """
    first, last, count = int(at[0]), int(at[-1]), len(at)
    together = last - first + 1 == count
    if count == 1:
        kind = "last" if first == size - 1 else "one"
        return Phrase(f"where.{axis}.{kind}", {"at": first})
    if together and last == size - 1:
        return Phrase(f"where.{axis}.from", {"first": first})
    if not (together and first == 0) and count <= MOST:
        return Phrase(f"where.{axis}.several", {"indices": [int(i) for i in at]})
    if together:
        return Phrase(f"where.{axis}.range", {"first": first, "last": last})
    return NOTHING


def where_wrong(wrong: BoolArray, tokens: str = "query") -> Phrase:
    """Return a phrase that says in which batch entries, heads and tokens rows are wrong.

    `wrong` is `[batch heads length]`. The result is an empty phrase if all or none are, or if no
    short phrase says it; parts that a short phrase describes are the smallest that hold all wrong
    rows, and not every row in them has to be wrong.
    """
    if wrong.all() or not wrong.any():
        return NOTHING
    parts = []
    for axis, name in enumerate(("batch", "head", tokens)):
        others = tuple(other for other in range(3) if other != axis)
        at = np.nonzero(wrong.any(axis=others))[0]
        if 0 < at.size < wrong.shape[axis]:
            part = indices(name, at, wrong.shape[axis]) or _every_nth(name, at)
            parts += [part] if part else []
    if len(parts) > 1:
        return Phrase("where", {"parts": [*parts]})
    return parts[0] if parts else NOTHING


def _every_nth(axis: str, at: np.ndarray) -> Phrase:
    """Return a phrase for equally spaced indices, such as the last row of every tile."""
    steps = np.diff(at)
    if at.size >= 3 and (steps == steps[0]).all():
        about = {"first": int(at[0]), "step": int(steps[0])}
        return Phrase(f"where.{axis}.every", {**about})
    return NOTHING


def last_axis(wrong: BoolArray, name: str) -> Phrase:
    """Return which components of the last axis are wrong; NOTHING if all or none are."""
    at = np.nonzero(wrong.any(axis=tuple(range(wrong.ndim - 1))))[0]
    return indices(name, at, wrong.shape[-1]) if 0 < at.size < wrong.shape[-1] else NOTHING


def rows(problem: Problem, wrong: BoolArray) -> Phrase:
    """Return a phrase that says whether the wrong rows are those with, or without, blocked keys.

    `wrong` is `[batch query]`, True for wrong rows. A key counts as blocked if it is blocked in any
    head. The result is an empty phrase if neither is true, or if all or no rows are wrong.
    """
    allowed = problem.allowed_in_full()
    blocked = (~allowed).any(axis=(1, 3))
    if wrong.any() and not wrong.all() and blocked.any() and not blocked.all():
        if (wrong == blocked).all():
            return Phrase("where.rows-with-blocked-keys")
        if (wrong == ~blocked).all():
            return Phrase("where.rows-without-blocked-keys")
    return NOTHING


def partial(
    maker: Maker, evidence: Evidence, computed: Sequence[tuple[Phrase, Stages]]
) -> Iterator[Phrase]:
    """Yield the causes that explain the output if only some rows or some heads have the defect.

    `computed` holds the causes to try, each with the computation that has the defect everywhere.
    Each cause that is yielded has an argument "part", which names the rows or heads.
    """
    wrong = np.asarray(evidence.wrong.any(axis=-1))
    # In right rows, the defect is absent or has no effect.
    part = NOTHING if wrong.all() else located("output", np.repeat(wrong[..., None], 2, axis=-1))
    for cause, stages in computed:
        other = stages.output
        if other.shape != maker.right.output.shape:
            continue
        mixed = np.where(wrong[..., None], other, maker.right.output)
        if part and not np.isnan(other[wrong]).any() and evidence.explained(mixed):
            yield cause.having(part=part)
            continue
        heads = _heads(maker, evidence, stages)
        if heads:
            yield cause.having(part=heads)


def _heads(maker: Maker, evidence: Evidence, stages: Stages) -> Phrase:
    """Return a phrase that names the heads with the defect of `stages`, or an empty phrase.

    It is empty unless the output is explained by the defect in some heads, but not in all.
    """
    right, count = maker.right, maker.problem.shape.heads
    if count < 2 or stages.context.shape != right.context.shape:
        return NOTHING
    moved: Array = np.einsum(
        "bhqd,hde->hbqe", stages.context - right.context, maker.problem.weights.output
    )
    known = np.isfinite(evidence.got) & np.isfinite(moved).all(axis=0)
    if not known.any():
        return NOTHING
    # The output is a sum over heads.
    share, *_ = np.linalg.lstsq(moved[:, known].T, (evidence.got - right.output)[known], rcond=None)
    has = share > 0.5
    if has.all() or not has.any() or np.abs(share - has).max() > CLEAR:
        return NOTHING
    mixed = np.where(has[:, None, None], stages.context, right.context)
    if not evidence.explained(stages.finished(mixed)):
        return NOTHING
    return indices("head", np.nonzero(has)[0], has.size) or Phrase("where.head.some")


# Which part of an implementation is responsible


def responsible(finding: Finding, ex: Examination) -> MadeBy:
    """Return which part causes a deviation: "kernel", "projections", or "" if that is unknown.

    The kernel is the function without projections. It is responsible if its answer also deviates
    when it gets heads that the reference projected, rounded to the dtype. The projections are
    responsible if they deviate, and the answer of the kernel does not. The result is "" if neither
    deviates, if the suite does not supply the projections, or if the kernel gives no answer.
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

    The result is False if the projections cannot be read, or if the function adds their biases.
    """
    adapter, problem = ex.adapter, ex.problem
    if not isinstance(adapter, Function) or ex.mode.name in adapter.bias_modes:
        return False
    key = ("projections", id(adapter), ex.case.id, ex.dtype, ex.device)

    def deviates(stages: Stages, name: str) -> bool:
        got = _projected(adapter, problem, Call(ex.mode, ex.device), name)
        want = stages.heads(name)
        if adapter.layout == "batch length heads head":
            want = want.transpose(0, 2, 1, 3)
        if got.shape != want.shape:
            return True
        # The noise of an element combines the roundings of all its factors and of its sum.
        size = np.einsum("ble,ehd->blhd", stages.input(name) ** 2, stages.own[name] ** 2)
        noise = problem.format.roundoff * np.sqrt(size + np.square(want).mean())
        return bool((np.abs(got - want) > LIMIT * noise.mean()).any())

    def look() -> bool:
        stages = Stages(problem)
        return any(deviates(stages, name) for name in ("query", "key", "value"))

    try:
        found: bool = ex.bench.answers.get(key, look)
    except Exception:
        # The adapter cannot be called like this, so nothing is known about its projections.
        return False
    return found


def _projected(adapter: Function, problem: Problem, call: Call, name: str) -> Array:
    """Return the projected heads of an input as the function receives them, in its own layout.

    `name` is the input: "query", "key" or "value".
    """
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
