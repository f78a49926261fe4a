"""Experiment on determinism: whether the bits stay the same in repeated and equivalent calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np

from conformance.adapter.arguments import AXES, MaskArgument
from conformance.definition.dtypes import Array
from conformance.definition.problem import Problem
from conformance.errors import Unsupported
from conformance.experiments.experiment import topic
from conformance.experiments.masks import blocking, visible_of
from conformance.records.findings import Argument, Entry, Phrase
from conformance.requirements.laboratory import (
    Laboratory,
    NoAnswer,
    Outcome,
    Refused,
    Seen,
    noise_of,
)

HEADS, LENGTH = 4, 144
"""Sizes at which the output spans several tiles, so that work is divided among threads."""

STRIDED = (("strided", "gaps"), ("window", "window"))


@topic(
    "repeatability",
    "The same again",
    "Are the bits the same twice, alone and in a batch, strided, eager and compiled?",
    place=130,
    every_mode=True,
    revision=3,
)
def repeatability(lab: Laboratory) -> Iterator[Entry]:
    """Repeat a call, and compare the attention weights with those of the first call.
    The inputs span several tiles if possible. The call is repeated unchanged, without the rest of
    the batch, with strided inputs, and compiled if the framework compiles; at the usual size, also
    with a strided mask. Weights are compared bit by bit, then up to the rounding noise."""
    first = _first(lab)
    problem = first.problem
    yield _compared(lab, "twice", lab.ask(problem), first.applied)
    yield _compared(lab, "alone", lab.ask(_alone(problem)), first.applied[:1])
    for name, strided in STRIDED:
        yield _compared(lab, name, lab.ask(problem, strided=strided), first.applied)
    if lab.adapter.compiles:
        # Compile with optimisation, as users do; other calls of the suite compile without it.
        users = replace(lab.mode, optimised=True)
        compiled = lab.ask(problem, compiled=True, mode=users)
        yield _compared(lab, "compiled", compiled, first.applied)
    if not getattr(lab.bridge, "has_strides", False):
        return
    for argument in lab.arguments():
        yield from _strided_mask(lab, argument)


def _first(lab: Laboratory) -> Seen:
    """Return the answer to a problem of several tiles or, if there is no answer, of usual size."""
    with suppress(Unsupported, NoAnswer):
        return lab.plain(lab.sizes(heads=HEADS, query=LENGTH, key=LENGTH + 1))
    return lab.plain()


def _strided_mask(lab: Laboratory, argument: MaskArgument) -> Iterator[Entry]:
    """Yield entries that compare the answer for a strided mask with that for a contiguous one.

    Yield nothing if the argument cannot block keys, or if the contiguous mask gives no answer.
    """
    way = blocking(lab, argument)
    if way is None:
        return
    problem = lab.problem()
    natives = way.passed(visible_of(way, problem.shape, 0), problem.shape)
    usual = lab.ask(problem, natives)
    if isinstance(usual, Refused):
        return
    for name, strided in STRIDED:
        found = lab.ask(problem, natives, strided=strided)
        yield _compared(lab, f"mask-{name}", found, usual.applied, argument=argument.name)


def _compared(lab: Laboratory, name: str, found: Outcome, want: Array, **about: Argument) -> Entry:
    subject = Phrase(f"again.{name}", about)
    if isinstance(found, Refused):
        # Arrays of some frameworks have no strides.
        missing = found.unsupported and name.endswith(("strided", "window"))
        return Entry(subject, Phrase("again.not-examined") if missing else found.value, found.told)
    if np.array_equal(found.applied, want):
        sizes = dict(zip(AXES, found.problem.shape.logits, strict=True))
        return Entry(subject, Phrase("again.same-bits-at", {**sizes}), "weights applied and output")
    # A batch entry has the same noise alone as within the whole batch.
    shape = replace(found.problem.shape, batch=lab.sizes().batch)
    noise = noise_of(shape, found.problem.dtype)[: len(want)]
    with np.errstate(all="ignore"):
        ratio = np.abs((found.applied - want) / noise)
    apart = float(np.max(ratio, initial=0.0, where=~np.isnan(ratio)))
    near = lab.alike_to_noise(found.applied, want, noise)
    value = Phrase("again.within-noise" if near else "again.apart")
    return Entry(subject, value, f"up to {apart:.2g} σ")


def _alone(problem: Problem) -> Problem:
    """Return the problem, which must have no mask, with only the first entry of its batch."""
    names = ("query", "key", "value", "cotangent")
    first = {name: getattr(problem, name)[:1] for name in names}
    return problem.replace(shape=replace(problem.shape, batch=1), **first)
