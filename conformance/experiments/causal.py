"""Experiment on the causal flag: how its triangle is aligned, and how it combines with a mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import get_args

import numpy as np

from conformance.adapter.arguments import CausalFlag, Native
from conformance.definition.arithmetic import Exact
from conformance.definition.attention import forward
from conformance.definition.dtypes import BoolArray, dtype_of
from conformance.definition.problem import Causal, Problem, Shape, causal_mask
from conformance.experiments.code import hiding
from conformance.experiments.combinations import (
    combined,
    distinct,
    hypotheses,
    visible_of,
)
from conformance.experiments.experiment import topic
from conformance.experiments.masked_rows import row_output
from conformance.experiments.masks import Blocking, blocking, blockings
from conformance.records.findings import Entry
from conformance.records.phrase import NOTHING, Argument, Phrase
from conformance.requirements.laboratory import (
    CANNOT_BE_ASKED,
    REFUSED,
    Laboratory,
    Refused,
    Seen,
    Sizes,
    numbers,
)
from conformance.requirements.meaning import follows, triangles

LENGTHS = (
    (Phrase("lengths.equal"), Sizes(query=5, key=5)),
    (Phrase("lengths.fewer-queries"), Sizes(query=3, key=6)),
    (Phrase("lengths.more-queries"), Sizes(query=6, key=3)),
)
ALIGNMENTS: tuple[Causal, ...] = get_args(Causal)
SQUARE = Phrase("causal.square")


@topic(
    "causal",
    "The causal flag",
    "Where is its triangle if lengths differ, and what becomes of a mask beside it?",
    place=40,
    every_mode=True,
    shared=True,
    revision=4,
)
def causal(lab: Laboratory) -> Iterator[Entry]:
    """Set the causal flag alone, for equal and for different numbers of queries and keys.
    Compare the weights with those predicted for a top-left and a bottom-right triangle. Then set it
    together with each mask argument. Also set it with inputs that give far larger logits, and with
    a mask that leaves only later keys visible to a query."""
    flag = lab.adapter.causal_flag
    if flag is None:
        yield Entry(Phrase("causal.no-flag"), Phrase("none"), "the adapter declares none")
        return
    lengths = LENGTHS[:1] if lab.sharing == "self" else LENGTHS
    alone: dict[Phrase, Phrase] = {}
    for told, sizes in lengths:
        entry = _alone(lab, flag, told, sizes)
        alone[told] = entry.value
        yield entry
    if flag.needs is not None:
        for told, sizes in lengths:
            yield from _with_its_mask(lab, flag.name, flag.needs, told, sizes)
    if alone[LENGTHS[0][0]] == SQUARE:
        yield from _blocks(lab, flag.name)
    for argument in lab.arguments():
        for told, sizes in lengths[:2]:
            way = blocking(lab, argument)
            if way is None:
                continue
            problem = lab.problem(sizes)
            visible = _telling(way, problem.shape)
            native = way.native(visible, problem.shape)
            assert native is not None
            natives: dict[str, Native] = {flag.name: True}
            if flag.needs is not None and flag.needs != argument.name:
                natives |= _needed(lab, flag.needs, problem.shape)
            found = lab.ask(problem, natives | {argument.name: native})
            about: dict[str, Argument] = {"flag": flag.name, "argument": argument.name}
            subject = Phrase("causal.beside", about | {"lengths": told})
            if len(natives) > 1:
                needed: dict[str, Argument] = {"needed": str(flag.needs), "lengths": told}
                subject = Phrase("causal.beside-two", about | needed)
            declared = REFUSED if flag.alone else NOTHING
            if isinstance(found, Refused):
                yield Entry(subject, found.value, found.told, declared)
                continue
            yield Entry(
                subject,
                _beside(lab, found, visible, (flag.name, argument.name), alone[told]),
                f"entry 0, head 0, query 0: visible "
                f"{numbers(np.broadcast_to(visible, problem.shape.logits)[0, 0, 0] * 1.0)}, "
                f"weights {numbers(found.applied[0, 0, 0])}",
                declared,
                not declared,
            )


def _telling(way: Blocking, shape: Shape) -> BoolArray:
    """Return a mask pattern for which all hypotheses of `combined` predict different weights.

    If 200 random patterns contain no such pattern, return the last of them.
    """
    for seed in range(200):
        visible = visible_of(way, shape, seed)
        triangles = [causal_mask(shape, alignment) for alignment in ALIGNMENTS]
        if all(distinct(hypotheses(triangle, visible, shape)) for triangle in triangles):
            break
    return visible


def _needed(lab: Laboratory, name: str, shape: Shape) -> dict[str, Native]:
    """Return the top-left causal triangle as a native mask, by the argument's name.

    The result is {} if the argument cannot hold it.
    """
    way = blocking(lab, lab.adapter.masks.by_name[name])
    native = None if way is None else way.native(causal_mask(shape, "top-left"), shape)
    return {} if native is None else {name: native}


def _alone(lab: Laboratory, flag: CausalFlag, lengths: Phrase, sizes: Sizes) -> Entry:
    found = lab.ask(lab.problem(sizes), {flag.name: True})
    subject = Phrase("causal.alone", {"flag": flag.name, "lengths": lengths})
    square = sizes.query == sizes.key
    declared = REFUSED
    if flag.needs is not None:
        # Nothing is declared about the flag without the mask that it needs.
        declared = NOTHING
    elif square or flag.alignment:
        declared = SQUARE if square else Phrase(f"causal.{flag.alignment}")
    if isinstance(found, Refused):
        declared = NOTHING if found.value == CANNOT_BE_ASKED else declared
        return Entry(subject, found.value, found.told, declared, declared in (NOTHING, found.value))
    value = _aligned(lab, found)
    told = "0.0: no query sees the last token but the last"
    code = hiding(lab, flag.name, [], told, token=-1) if value == SQUARE else ""
    rows = "; ".join(numbers(row) for row in found.applied[0, 0])
    return Entry(
        subject, value, f"entry 0, head 0: {rows}", declared, declared in (NOTHING, value), code
    )


def _blocks(lab: Laboratory, flag: str) -> Iterator[Entry]:
    """Yield entries on whether the flag gives later keys no weight at all.

    In these problems, some logits are very large, or a mask blocks all but the later keys of a
    query.
    """
    problem = lab.problem(LENGTHS[0][1])
    later = ~causal_mask(problem.shape, "top-left")
    for name, largest in (("large", 1.5e4), ("huge", 1e10)):
        if largest**2 > dtype_of(lab.dtype).largest > 1e5 or largest > dtype_of(lab.dtype).largest:
            continue
        factor = largest / np.abs(forward(problem, Exact()).logits).max()
        found = lab.ask(_louder(problem, factor), {flag: True})
        subject = Phrase(f"causal.{name}-logits", {"flag": flag})
        if isinstance(found, Refused):
            yield Entry(subject, found.value, found.told)
            continue
        weights = np.where(later, found.applied, 0.0)
        told = f"at most {numbers(weights.max(axis=(0, 1, 2)))} on later keys"
        yield Entry(subject, Phrase(f"causal.{'lowers' if weights.any() else 'blocks'}"), told)
    for argument in lab.arguments():
        for way in blockings(lab, argument):
            if "key" in way.axes:
                yield from _later_only(lab, flag, way, problem)


def _louder(problem: Problem, factor: float) -> Problem:
    """Return the problem with its query projection multiplied by `factor`."""
    louder = problem.weights.query * factor
    return problem.replace(weights=dataclasses.replace(problem.weights, query=louder))


def _later_only(lab: Laboratory, flag: str, way: Blocking, problem: Problem) -> Iterator[Entry]:
    """Yield an entry on what the first two queries get if a mask blocks the first two keys.

    There is no entry if such a mask cannot be passed, or if the call gives no answer.
    """
    shown = (np.arange(problem.shape.key_length) >= 2)[None, None, None]
    native = way.native(shown, problem.shape)
    found = None if native is None else lab.ask(problem, {flag: True, way.argument.name: native})
    if isinstance(found, Seen):
        weights = found.applied[:, :, :2]
        earlier = causal_mask(problem.shape, "top-left")[:, :, :2]
        is_lowered = weights.any() and not (weights * earlier).any()
        value = Phrase("causal.lowers") if is_lowered else row_output(lab, found, 0, 0)
        evidence = f"entry 0, head 0, query 0: weights {numbers(weights[0, 0, 0])}"
        yield Entry(Phrase("causal.later-only", {"flag": flag} | way.about), value, evidence)


def _aligned(lab: Laboratory, found: Seen) -> Phrase:
    shape = found.problem.shape
    if np.isnan(found.applied).all():
        return Phrase("causal.nan")
    for value, triangle in triangles(shape):
        ignored = bool(triangle.all())
        if follows(lab, found, np.broadcast_to(triangle, shape.logits), changed=ignored):
            return value
    return Phrase("causal.unexplained")


def _with_its_mask(
    lab: Laboratory, flag: str, needs: str, lengths: Phrase, sizes: Sizes
) -> Iterator[Entry]:
    """Yield entries on a flag that needs a mask argument, given each causal triangle in turn."""
    way = blocking(lab, lab.adapter.masks.by_name[needs])
    if way is None:
        return
    square = sizes.query == sizes.key
    problem = lab.problem(sizes)
    for alignment in ALIGNMENTS[:1] if square else ALIGNMENTS:
        native = way.native(causal_mask(problem.shape, alignment), problem.shape)
        assert native is not None
        natives: dict[str, Native] = {flag: True, needs: native}
        found = lab.ask(problem, natives)
        triangle = SQUARE if square else Phrase(f"causal.{alignment}")
        about: dict[str, Argument] = {"flag": flag, "argument": needs}
        about |= {"triangle": triangle, "lengths": lengths}
        subject = Phrase("causal.with-triangle", about)
        if isinstance(found, Refused):
            yield Entry(subject, found.value, found.told)
        else:
            rows = "; ".join(numbers(row) for row in found.applied[0, 0])
            yield Entry(subject, _aligned(lab, found), f"entry 0, head 0: {rows}")


def _beside(
    lab: Laboratory, found: Seen, visible: BoolArray, names: tuple[str, str], alone: Phrase
) -> Phrase:
    """Return how the flag's triangle combines with a pattern of visible keys.

    The triangle is aligned in one of the two ways, or equals the one observed for the flag alone.
    """
    shape = found.problem.shape
    known = [causal_mask(shape, alignment) for alignment in ALIGNMENTS]
    known += [triangle for value, triangle in triangles(shape) if value == alone]
    return combined(lab, found, known, visible, names)
