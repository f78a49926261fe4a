"""Find out which part of an array is wrong, and recognise defects of single heads or rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from conformance import text
from conformance.causes.hypothesis import Evidence, Maker
from conformance.causes.stages import Stages
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.problem import Problem
from conformance.records.phrase import NOTHING, Phrase

MOST = 3
"""The most indices to list one by one."""

CLEAR = 0.05
"""How far a head's least-squares share of a defect may be from 0 or 1."""


def located(array: str, wrong: BoolArray) -> Phrase:
    """Return at which indices of which axes an array is wrong.

    The result is an empty phrase if it is wrong everywhere or nowhere, or if no short phrase says
    where.
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


def rows(problem: Problem, wrong: BoolArray) -> Phrase:
    """Return whether the wrong rows `[batch query]` are those with, or those without, blocked keys.

    The result is an empty phrase if neither is true.
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
    """Yield the causes in `computed` that explain the output if only a part has the defect.

    The part consists of some rows or heads; each cause names it.
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
    """Return which heads have the defect, or an empty phrase unless some, but not all, have it.

    The heads are found by least squares, since the output is a sum over heads.
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
    share, *_ = np.linalg.lstsq(moved[:, known].T, (evidence.got - right.output)[known], rcond=None)
    has = share > 0.5
    if has.all() or not has.any() or np.abs(share - has).max() > CLEAR:
        return NOTHING
    with np.errstate(invalid="ignore"):
        mixed = np.where(has[:, None, None], stages.context, right.context)
        if not evidence.explained(stages.finished(mixed)):
            return NOTHING
    return indices("head", np.nonzero(has)[0], has.size) or Phrase("where.head.some")
