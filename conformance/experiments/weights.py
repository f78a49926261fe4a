"""Experiment on returned weights: are they per head, normalised, and those that were applied?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.definition.comparison import BETWEEN_ANSWERS
from conformance.experiments.experiment import topic
from conformance.records.findings import Entry
from conformance.records.phrase import Phrase
from conformance.requirements.laboratory import Laboratory, numbers
from conformance.requirements.probed import returned_weights

SHAPES = {"per head": "[batch, heads, query, key]", "averaged": "[batch, query, key]"}


@topic(
    "weights",
    "Returned weights",
    "Are they for each head, do they sum to 1, are they the weights that were applied?",
    place=90,
    every_mode=True,
    shared=True,
    revision=2,
)
def returned(lab: Laboratory) -> Iterator[Entry]:
    """Compare the returned weights with the applied ones, which the problem's output reveals.
    Also sum the returned weights over the keys."""
    found = lab.plain()
    weights = found.answer.weights
    declared = (lab.adapter.returns_weights or "none") if lab.mode.weights else "none"
    seen = "none" if weights is None else "per head" if weights.ndim == 4 else "averaged"
    shape = "" if weights is None else f"shape {list(weights.shape)}, {SHAPES[seen]}"
    if returned_weights(lab.adapter, seen).name("option"):
        shape += f", asked for with {lab.adapter.weights_option}"
    yield Entry(
        Phrase("weights.returned"),
        returned_weights(lab.adapter, seen),
        shape,
        returned_weights(lab.adapter, declared),
        seen == declared,
    )
    if weights is None:
        return
    noise = lab.noise(found.problem)
    applied = found.applied if weights.ndim == 4 else found.applied.mean(axis=1)
    noise = noise if weights.ndim == 4 else noise.mean(axis=1)
    sums = weights.sum(axis=-1)
    normal = (np.abs(sums - 1) <= BETWEEN_ANSWERS * noise.sum(axis=-1)).all()
    told = f"sums over the keys lie between {sums.min():.6g} and {sums.max():.6g}"
    yield Entry(
        Phrase("weights.sum"), Phrase(f"weights.sum-{'one' if normal else 'not-one'}"), told
    )
    same = (np.abs(weights - applied) <= BETWEEN_ANSWERS * noise).all()
    row = (0, 0, 0) if weights.ndim == 4 else (0, 0)
    told = f"entry 0, query 0: returned {numbers(weights[row])}, applied {numbers(applied[row])}"
    value = Phrase("weights.same" if same else "weights.others")
    yield Entry(Phrase("weights.applied"), value, told)
