"""Determinism: the same bits twice, alone and inside a batch, strided, compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from conformance.definition.dtypes import Array
from conformance.definition.problem import Problem
from conformance.experiments.laboratory import Laboratory, Outcome, Refused
from conformance.records.card import Entry


def repeatability(lab: Laboratory) -> Iterator[Entry]:
    """Each against the plain answer."""
    first = lab.plain()
    problem = first.problem
    yield _compared(lab, "asked twice", lab.ask(problem), first.applied)
    yield _compared(lab, "alone and inside a batch", lab.ask(_alone(problem)), first.applied[:1])
    for subject, strided in (("contiguous and strided", "gaps"), ("whole and cut out", "window")):
        yield _compared(lab, subject, lab.ask(problem, strided=strided), first.applied)
    if lab.adapter.compiles:
        compiled = lab.ask(problem, compiled=True)
        yield _compared(lab, "eager and compiled", compiled, first.applied)


def _compared(lab: Laboratory, subject: str, found: Outcome, want: Array) -> Entry:
    if isinstance(found, Refused):
        return Entry(
            subject, "not examined" if "no strides" in found.told else "refused", found.told
        )
    if np.array_equal(found.applied, want):
        return Entry(subject, "same bits", "weights applied and output")
    noise = lab.noise(lab.problem())[: len(want)]
    apart = float(np.abs((found.applied - want) / noise).max())
    near = lab.alike_to_noise(found.applied, want, noise)
    return Entry(subject, "within noise" if near else "apart", f"up to {apart:.2g} σ")


def _alone(problem: Problem) -> Problem:
    """The first entry of the batch."""
    return dataclasses.replace(
        problem,
        shape=dataclasses.replace(problem.shape, batch=1),
        query=problem.query[:1],
        key=problem.key[:1],
        value=problem.value[:1],
        cotangent=problem.cotangent[:1],
    )
