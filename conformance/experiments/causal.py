"""The causal flag: where its triangle is if lengths differ, and what it does beside a mask."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.adapter.arguments import Native
from conformance.definition.dtypes import BoolArray
from conformance.definition.problem import Causal, Shape, causal_mask
from conformance.experiments.code import hiding
from conformance.experiments.combinations import (
    UNEXPLAINED,
    combined,
    distinct,
    hypotheses,
    visible_of,
)
from conformance.experiments.experiment import Experiment
from conformance.experiments.masks import Blocking, blocking
from conformance.records.findings import Entry, Topic
from conformance.records.phrase import NOTHING, Argument, Phrase
from conformance.requirements.laboratory import REFUSED, Laboratory, Refused, Seen, Sizes, numbers
from conformance.requirements.meaning import among_shown

LENGTHS = (
    (Phrase("lengths.equal"), 5, 5),
    (Phrase("lengths.fewer-queries"), 3, 5),
    (Phrase("lengths.more-queries"), 5, 3),
)
SQUARE = Phrase("causal.square")


def causal(lab: Laboratory) -> Iterator[Entry]:
    """The flag alone, then with each mask argument."""
    flag = lab.adapter.causal_flag
    if flag is None:
        yield Entry(Phrase("causal.no-flag"), Phrase("none"), "the adapter declares none")
        return
    lengths = LENGTHS[:1] if lab.sharing == "self" else LENGTHS
    for told, queries, keys in lengths:
        yield _alone(lab, flag.name, told, Sizes(query=queries, key=keys))
    if flag.needs is not None:
        for told, queries, keys in lengths:
            yield from _with_its_mask(lab, flag.name, flag.needs, told, queries, keys)
    for argument in lab.arguments():
        for told, queries, keys in lengths[:2]:
            way = blocking(lab, argument)
            if way is None:
                continue
            problem = lab.problem(Sizes(query=queries, key=keys))
            visible = _telling(way, problem.shape)
            native = way.native(visible, problem.shape)
            assert native is not None
            natives: dict[str, Native] = {flag.name: True}
            if flag.needs not in (None, argument.name):
                natives |= _needed(lab, flag.needs, problem.shape)
            found = lab.ask(problem, natives | {argument.name: native})
            about: dict[str, Argument] = {"flag": flag.name, "argument": argument.name}
            subject = Phrase("causal.beside", about | {"lengths": told})
            if len(natives) > 1:
                needed: dict[str, Argument] = {"needed": str(flag.needs), "lengths": told}
                subject = Phrase("causal.beside-two", about | needed)
            declared = REFUSED if flag.alone else NOTHING
            if isinstance(found, Refused):
                yield Entry(subject, REFUSED, found.told, declared)
                continue
            yield Entry(
                subject,
                _beside(lab, found, visible, flag.name, argument.name),
                f"entry 0, head 0, query 0: visible "
                f"{numbers(np.broadcast_to(visible, problem.shape.logits)[0, 0, 0] * 1.0)}, "
                f"weights {numbers(found.applied[0, 0, 0])}",
                declared,
                not declared,
            )


def _telling(way: Blocking, shape: Shape) -> BoolArray:
    """Return a pattern that differs from both triangles in every way that `combined` can detect."""
    for seed in range(200):
        visible = visible_of(way, shape, seed)
        if all(
            distinct(hypotheses(_triangle(shape, alignment), visible, shape))
            for alignment in ("top-left", "bottom-right")
        ):
            break
    return visible


def _needed(lab: Laboratory, name: str | None, shape: Shape) -> dict[str, Native]:
    """Return the triangle as the mask argument of this name."""
    argument = next(item for item in lab.adapter.mask_arguments if item.name == name)
    way = blocking(lab, argument)
    native = None if way is None else way.native(_triangle(shape, "top-left"), shape)
    return {} if native is None or name is None else {name: native}


def _alone(lab: Laboratory, name: str, lengths: Phrase, sizes: Sizes) -> Entry:
    flag = lab.adapter.causal_flag
    assert flag is not None
    found = lab.ask(lab.problem(sizes), {name: True})
    subject = Phrase("causal.alone", {"flag": name, "lengths": lengths})
    square = sizes.query == sizes.key
    declared = REFUSED
    if square or flag.alignment:
        declared = SQUARE if square else Phrase(f"causal.{flag.alignment}")
    if isinstance(found, Refused):
        # Of a flag without the mask that it needs, nothing is declared.
        declared = NOTHING if flag.needs is not None else declared
        return Entry(subject, REFUSED, found.told, declared, declared in (NOTHING, REFUSED))
    value = _aligned(lab, found)
    told = "0.0: no query sees the last token but the last"
    code = hiding(lab, name, [], told, token=-1) if value == SQUARE else ""
    rows = "; ".join(numbers(row) for row in found.applied[0, 0])
    return Entry(subject, value, f"entry 0, head 0: {rows}", declared, value == declared, code)


def _aligned(lab: Laboratory, found: Seen) -> Phrase:
    shape = found.problem.shape
    square = shape.query_length == shape.key_length
    for alignment in ("top-left", "bottom-right"):
        visible = np.broadcast_to(_triangle(shape, alignment), shape.logits)
        if _follows(lab, found, visible):
            return SQUARE if square else Phrase(f"causal.{alignment}")
    if _follows(lab, found, np.ones(shape.logits, bool)):
        return Phrase("causal.ignored")
    return Phrase("causal.unexplained")


def _follows(lab: Laboratory, found: Seen, visible: BoolArray) -> bool:
    plain = lab.plain(Sizes(*found.problem.shape.logits)).applied
    return lab.alike(found, among_shown(plain, visible, found))


def _triangle(shape: Shape, alignment: str) -> BoolArray:
    known: Causal = "top-left" if alignment == "top-left" else "bottom-right"
    return causal_mask(shape, known)


def _with_its_mask(
    lab: Laboratory, flag: str, needs: str, lengths: Phrase, queries: int, keys: int
) -> Iterator[Entry]:
    """A flag that is a hint about a mask, with either triangle in that mask."""
    argument = next(item for item in lab.adapter.mask_arguments if item.name == needs)
    way = blocking(lab, argument)
    if way is None:
        return
    for alignment in ("top-left", "bottom-right"):
        if queries == keys and alignment == "bottom-right":
            continue
        problem = lab.problem(Sizes(query=queries, key=keys))
        native = way.native(_triangle(problem.shape, alignment), problem.shape)
        assert native is not None
        natives: dict[str, Native] = {flag: True, needs: native}
        found = lab.ask(problem, natives)
        triangle = SQUARE if queries == keys else Phrase(f"causal.{alignment}")
        about: dict[str, Argument] = {"flag": flag, "argument": needs}
        about |= {"triangle": triangle, "lengths": lengths}
        subject = Phrase("causal.with-triangle", about)
        if isinstance(found, Refused):
            yield Entry(subject, REFUSED, found.told)
        else:
            rows = "; ".join(numbers(row) for row in found.applied[0, 0])
            yield Entry(subject, _aligned(lab, found), f"entry 0, head 0: {rows}")


def _beside(lab: Laboratory, found: Seen, visible: BoolArray, flag: str, name: str) -> Phrase:
    for alignment in ("top-left", "bottom-right"):
        triangle = _triangle(found.problem.shape, alignment)
        value = combined(lab, found, triangle, visible, (flag, name))
        if value != UNEXPLAINED:
            return value
    return UNEXPLAINED


CAUSAL = Experiment(
    Topic(
        "causal",
        "The causal flag",
        "Where is its triangle if lengths differ, and what becomes of a mask beside it?",
    ),
    causal,
    place=40,
    every_mode=True,
)
