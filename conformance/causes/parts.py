"""A defect in some heads or in some rows only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conformance.causes.hypothesis import Evidence, Maker
from conformance.causes.location import heads, located
from conformance.causes.stages import Stages
from conformance.definition.dtypes import Array

CLEAR = 0.05
"""How far a head's share may be from 0 or 1, in the least squares that tell it."""


def cause(maker: Maker, evidence: Evidence, found: Sequence[tuple[str, Stages]]) -> str:
    """The first hypothesis, of those that were computed, that explains the answer in part."""
    wrong = np.asarray(evidence.wrong.any(axis=-1))
    # Where nothing is wrong the defect is not, or does not show.
    rows = "" if wrong.all() else located("output", np.repeat(wrong[..., None], 2, axis=-1))
    for told, stages in found:
        other = stages.output
        if other.shape != maker.right.output.shape:
            continue
        mixed = np.where(wrong[..., None], other, maker.right.output)
        if rows and not np.isnan(other[wrong]).any() and evidence.explained(mixed):
            return f"equals the answer {told}, in {rows} only"
        which = _heads(maker, evidence, stages)
        if which:
            return f"equals the answer {told}, in {which} only"
    return ""


def _heads(maker: Maker, evidence: Evidence, stages: Stages) -> str:
    """Which heads have the defect: the output is a sum over heads, so least squares tells."""
    right, count = maker.right, maker.problem.shape.heads
    if count < 2 or stages.context.shape != right.context.shape:
        return ""
    moved: Array = np.einsum(
        "bhqd,hde->hbqe", stages.context - right.context, maker.problem.weights.output
    )
    known = np.isfinite(evidence.got) & np.isfinite(moved).all(axis=0)
    if not known.any():
        return ""
    share, *_ = np.linalg.lstsq(moved[:, known].T, (evidence.got - right.output)[known], rcond=None)
    has = share > 0.5
    if has.all() or not has.any() or np.abs(share - has).max() > CLEAR:
        return ""
    with np.errstate(invalid="ignore"):
        mixed = np.where(has[:, None, None], stages.context, right.context)
        return heads(has) if evidence.explained(stages.finished(mixed)) else ""
