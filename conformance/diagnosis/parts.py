"""A defect in some heads or in some rows only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from conformance.diagnosis.hypothesis import Evidence, Maker
from conformance.diagnosis.location import located
from conformance.diagnosis.stages import Stages
from conformance.dtypes import Array


def cause(maker: Maker, evidence: Evidence, found: Sequence[tuple[str, Stages]]) -> str:
    """The first hypothesis, of those that were computed, that explains the answer in part."""
    for told, stages in found:
        for where, output in _mixed(maker, evidence, stages):
            if evidence.explained(output):
                return f"equals the answer {told}, in {where} only"
    return ""


def _mixed(maker: Maker, evidence: Evidence, stages: Stages) -> Iterator[tuple[str, Array]]:
    right, other = maker.right, stages.output
    if other.shape != right.output.shape or np.isnan(other).all():
        return
    wrong = np.asarray(evidence.wrong.any(axis=-1))
    if not wrong.all():
        # Where nothing is wrong the defect is not, or does not show.
        rows = located("output", np.broadcast_to(wrong[..., None], other.shape))
        if rows:
            yield rows, np.where(wrong[..., None], other, right.output)
    heads = maker.problem.shape.heads
    if heads < 2 or stages.context.shape != right.context.shape:
        return
    at = np.arange(heads)
    for chosen, told in (
        (at > 0, "heads 1 and later" if heads > 2 else "head 1"),
        (at == 0, "head 0"),
        (at == heads - 1, "the last head"),
        (at < heads - 1, "all heads but the last"),
    ):
        with np.errstate(invalid="ignore"):
            mixed = np.where(chosen[:, None, None], stages.context, right.context)
            yield told, stages.finished(mixed)
