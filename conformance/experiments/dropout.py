"""Dropout of attention weights: where it is active, how it scales, and what shares a draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from conformance.adapter.base import Mode
from conformance.definition.dtypes import Array
from conformance.errors import Unsupported
from conformance.experiments.laboratory import Laboratory, Refused
from conformance.experiments.masks import numbers
from conformance.records.card import Entry

PROBABILITY = 0.5
"""A power of two, so that scaling by 1 / (1 - p) rounds nothing."""

DRAWS = 48
AXES = ("batch entries", "heads", "queries", "keys")


def dropout(lab: Laboratory) -> Iterator[Entry]:
    """In the mode in which it is active; elsewhere it must be off."""
    names = lab.adapter.dropout_modes
    if not names:
        raise Unsupported("the adapter names no mode with dropout")
    plain = lab.plain().applied
    draws = [lab.ask(lab.problem(), mode=_with_dropout(lab.mode, draw)) for draw in range(DRAWS)]
    refused = next((item for item in draws if isinstance(item, Refused)), None)
    if refused is not None:
        yield Entry("dropout", "refused", refused.told)
        return
    applied = np.stack([item.applied for item in draws if not isinstance(item, Refused)])
    noise = lab.noise(lab.problem())
    off = all(lab.alike_to_noise(item, plain, noise) for item in applied)
    active = lab.mode.name in names
    yield Entry(
        "dropout",
        "off" if off else "on",
        f"p = {PROBABILITY}, {DRAWS} draws",
        declared="on" if active else "off",
        agrees=off != active,
    )
    if off:
        return
    yield _kept(lab, applied, plain)
    yield _mean(applied, plain)
    yield _shared(applied)
    weights = [item.answer.weights for item in draws if not isinstance(item, Refused)]
    if weights[0] is not None and weights[0].ndim == 4:
        yield _returned(np.stack([item for item in weights if item is not None]), applied, plain)


def _with_dropout(mode: Mode, draw: int) -> Mode:
    return dataclasses.replace(mode, dropout=PROBABILITY, draw=draw)


def _kept(lab: Laboratory, applied: Array, plain: Array) -> Entry:
    kept = applied != 0
    share = 1 - kept.mean()
    factors = (applied / plain)[kept]
    told = f"{share:.0%} of the weights are 0, the others are {factors.min():.3g} to "
    told += f"{factors.max():.3g} times those without dropout"
    near = 16 * (lab.noise(lab.problem()) / plain).max()
    if np.abs(factors - 1 / (1 - PROBABILITY)).max() <= near:
        return Entry("kept weights", "scaled by 1/(1−p)", told)
    if np.abs(factors - 1).max() <= near:
        return Entry("kept weights", "not scaled", told)
    return Entry("kept weights", "something else", told)


def _mean(applied: Array, plain: Array) -> Entry:
    """One number a draw, since what is within a draw may be shared: the factor that fits it best.

    A dropout that divides each row by its sum again takes from large weights, and is seen by this.
    """
    means = (applied * plain).sum(axis=(1, 2, 3, 4)) / (plain**2).sum()
    mean, error = means.mean(), means.std(ddof=1) / np.sqrt(len(means))
    told = f"{mean:.3f} ± {error:.3f} times the weights, over {DRAWS} draws"
    near = abs(mean - 1) <= 5 * error
    return Entry("mean over draws", "the weights" if near else "not the weights", told)


def _shared(applied: Array) -> Entry:
    dropped = applied == 0
    same = [
        name
        for axis, name in enumerate(AXES, start=1)
        if dropped.shape[axis] > 1 and (dropped == np.take(dropped, [0], axis=axis)).all()
    ]
    value = f"the same for all {' and '.join(same)}" if same else "one for each weight"
    return Entry("a draw is", value, f"draw 0, entry 0, head 0: {numbers(applied[0, 0, 0, 0])}")


def _returned(weights: Array, applied: Array, plain: Array) -> Entry:
    """Whether returned weights are those before dropout."""
    scale = np.abs(plain).max()
    if np.abs(weights - applied).max() <= 1e-2 * scale:
        value = "after dropout"
    elif np.abs(weights - plain).max() <= 1e-2 * scale:
        value = "before dropout"
    else:
        value = "something else"
    told = f"returned {numbers(weights[0, 0, 0, 0])}, applied {numbers(applied[0, 0, 0, 0])}"
    return Entry("returned weights are those", value, f"draw 0, entry 0, head 0, query 0: {told}")
