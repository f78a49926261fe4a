"""Determinism: the same bits twice, alone and inside a batch, strided, compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from conformance.definition.dtypes import Array
from conformance.definition.problem import Problem
from conformance.experiments.experiment import Experiment
from conformance.records.findings import Entry, Topic
from conformance.records.phrase import Phrase
from conformance.requirements.laboratory import REFUSED, Laboratory, Outcome, Refused


def repeatability(lab: Laboratory) -> Iterator[Entry]:
    """Each against the plain answer."""
    first = lab.plain()
    problem = first.problem
    yield _compared(lab, "twice", lab.ask(problem), first.applied)
    yield _compared(lab, "alone", lab.ask(_alone(problem)), first.applied[:1])
    for name, strided in (("strided", "gaps"), ("window", "window")):
        yield _compared(lab, name, lab.ask(problem, strided=strided), first.applied)
    if lab.adapter.compiles:
        # As users compile it; operations that are called one by one are compiled quickly here.
        users = dataclasses.replace(lab.mode, optimised=True)
        compiled = lab.ask(problem, compiled=True, mode=users)
        yield _compared(lab, "compiled", compiled, first.applied)


def _compared(lab: Laboratory, name: str, found: Outcome, want: Array) -> Entry:
    subject = Phrase(f"again.{name}")
    if isinstance(found, Refused):
        # Arrays of some frameworks have no strides.
        missing = found.unsupported and name in ("strided", "window")
        return Entry(subject, Phrase("again.not-examined") if missing else REFUSED, found.told)
    if np.array_equal(found.applied, want):
        return Entry(subject, Phrase("again.same-bits"), "weights applied and output")
    noise = lab.noise(lab.problem())[: len(want)]
    apart = float(np.abs((found.applied - want) / noise).max())
    near = lab.alike_to_noise(found.applied, want, noise)
    return Entry(
        subject, Phrase(f"again.{'within-noise' if near else 'apart'}"), f"up to {apart:.2g} σ"
    )


def _alone(problem: Problem) -> Problem:
    """Return a problem with only the first entry of the batch."""
    return dataclasses.replace(
        problem,
        shape=dataclasses.replace(problem.shape, batch=1),
        query=problem.query[:1],
        key=problem.key[:1],
        value=problem.value[:1],
        cotangent=problem.cotangent[:1],
    )


REPEATABILITY = Experiment(
    Topic(
        "repeatability",
        "The same again",
        "Same bits twice, alone and inside a batch, strided, eager and compiled?",
    ),
    repeatability,
    place=130,
    every_mode=True,
)
