"""Experiments on arguments that restrict keys by their positions: windows and lengths."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import get_args

import numpy as np

from conformance.adapter.arguments import Native
from conformance.adapter.features import Lengths, Window
from conformance.definition import features
from conformance.definition.dtypes import BoolArray
from conformance.definition.problem import Causal, Shape
from conformance.experiments.experiment import topic
from conformance.records.findings import Entry
from conformance.records.phrase import NOTHING, Argument, Phrase
from conformance.requirements.laboratory import (
    CANNOT_BE_ASKED,
    REFUSED,
    Laboratory,
    Outcome,
    Refused,
    Seen,
    Sizes,
    numbers,
)
from conformance.requirements.meaning import among, follows

LENGTHS = (
    (Phrase("lengths.equal"), Sizes(query=7, key=7)),
    (Phrase("lengths.fewer-queries"), Sizes(query=4, key=7)),
    (Phrase("lengths.more-queries"), Sizes(query=7, key=4)),
)
ALIGNMENTS: tuple[Causal, ...] = get_args(Causal)

EVERY_KEY, NO_KEY = Phrase("window.every-key"), Phrase("window.no-key")
UNIFORM, UNEXPLAINED = Phrase("window.uniform"), Phrase("window.unexplained")


@topic(
    "windows",
    "The window",
    "Which keys does it show, does it count the own key, and from where if lengths differ?",
    place=42,
    revision=2,
    every_mode=True,
    shared=True,
    needs=(Window,),
)
def windows(lab: Laboratory) -> Iterator[Entry]:
    """Set the window argument, and find the window that predicts the attention weights.
    The values are ordinary sizes, 0, −1, and more than the number of keys. The causal flag is set
    only if the argument needs it. Repeat the ordinary sizes with different numbers of queries and
    keys."""
    for argument in lab.features(Window):
        natives = causal_beside(lab, argument.needs_causal)
        for told, sizes in LENGTHS[:1] if lab.sharing == "self" else LENGTHS:
            # Ordinary sizes reveal the alignment; others are tried where it does not matter.
            sets = (
                _usual(argument)
                if told != LENGTHS[0][0]
                else (*_usual(argument), *_edges(argument))
            )
            for value in sets:
                yield _windowed(lab, argument, value, told, sizes, natives)


def _usual(argument: Window) -> tuple[int | tuple[int, int], ...]:
    return ((1, 2), (2, 0)) if argument.form == "left right" else (1, 2)


def _edges(argument: Window) -> tuple[int | tuple[int, int], ...]:
    if argument.form == "left right":
        return ((0, 0), (-1, 1), (1, -1), (-1, -1), (50, 50))
    return (0, -1, 50)


def near(shape: Shape, limits: features.Window, alignment: Causal) -> BoolArray:
    """Return a mask `[1 1 query key]` of the keys in a window around each query's own position."""
    offset = shape.key_length - shape.query_length if alignment == "bottom-right" else 0
    distance = np.arange(shape.key_length) - np.arange(shape.query_length)[:, None] - offset
    return features.within(limits, distance)[None, None]


def _windowed(
    lab: Laboratory,
    argument: Window,
    value: int | tuple[int, int],
    told: Phrase,
    sizes: Sizes,
    natives: Mapping[str, Native],
) -> Entry:
    problem = lab.problem(sizes)
    about: dict[str, Argument] = {"argument": argument.name, "value": str(value), "lengths": told}
    found = lab.ask(problem, {**natives, argument.name: value})
    limits = argument.limits(value, causal=bool(natives))
    square = sizes.query == sizes.key
    said = NOTHING
    if limits is not None and not square and argument.alignment is None:
        said = REFUSED
    elif limits is not None:
        said = _named(problem.shape, limits, argument.alignment or "top-left")
    subject = Phrase("window.alone", about)
    if isinstance(found, Refused):
        said = NOTHING if found.value == CANNOT_BE_ASKED else said
        return Entry(subject, found.value, found.told, said, said in (NOTHING, found.value))
    observed = seen_window(lab, found)
    rows = "; ".join(numbers(row) for row in found.applied[0, 0][:3])
    evidence = f"entry 0, head 0: {rows}"
    return Entry(subject, observed, evidence, said, said in (NOTHING, observed))


def seen_window(lab: Laboratory, found: Seen) -> Phrase:
    """Return the phrase for the first window that explains the weights.

    Weights that are all NaN, all zero, uniform, or the same as without a window have phrases of
    their own. If nothing explains the weights, the result is `UNEXPLAINED`.
    """
    shape = found.problem.shape
    if np.isnan(found.applied).all():
        return Phrase("causal.nan")
    if lab.alike(found, lab.unmasked(found)):
        return EVERY_KEY
    if not np.nan_to_num(found.applied).any():
        return NO_KEY
    if np.allclose(found.applied, 1 / shape.key_length, rtol=0.02):
        return UNIFORM
    for alignment, limits in _candidates(shape):
        visible = np.broadcast_to(near(shape, limits, alignment), shape.logits)
        if not visible.all() and follows(lab, found, visible):
            return _named(shape, limits, alignment)
    return UNEXPLAINED


def _candidates(shape: Shape) -> Iterator[tuple[Causal, features.Window]]:
    most = max(shape.query_length, shape.key_length)
    # One less than the longer side reaches as far as no limit does.
    sizes = (*range(most - 1), None)
    alignments = ALIGNMENTS[:1] if shape.query_length == shape.key_length else ALIGNMENTS
    for limits in itertools.product(sizes, sizes):
        for alignment in alignments:
            yield alignment, limits


def _named(shape: Shape, limits: features.Window, alignment: Causal) -> Phrase:
    """Return the phrase for a window: that of the first candidate with the same visible keys."""
    wanted = near(shape, limits, alignment)
    if wanted.all():
        return EVERY_KEY
    if not wanted.any():
        return NO_KEY
    for other, same in _candidates(shape):
        if np.array_equal(near(shape, same, other), wanted):
            alignment, limits = other, same
            break
    before, after = ("all" if limit is None else str(limit) for limit in limits)
    about: dict[str, Argument] = {"before": before, "after": after}
    if shape.query_length == shape.key_length:
        return Phrase("window.sees", about)
    aligned = Phrase(f"causal.{alignment}")
    return Phrase("window.sees-aligned", about | {"alignment": aligned})


@topic(
    "lengths",
    "Lengths of the batch's entries",
    "What does a number of keys or queries count, and what does a query beyond it get?",
    place=44,
    revision=2,
    every_mode=True,
    needs=(Lengths,),
)
def lengths(lab: Laboratory) -> Iterator[Entry]:
    """Pass lengths that leave out the last keys, or the last queries, of each batch entry.
    Find which keys queries attend to, and which weights a query has if it is left out or has no
    keys."""
    for argument in lab.features(Lengths):
        problem = lab.problem(LENGTHS[0][1] if argument.needs_causal else None)
        shape = problem.shape
        full = shape.key_length if argument.of == "keys" else shape.query_length
        counted = np.array([full - 2, *[full - 1] * (shape.batch - 1)])
        native = counted - (argument.counts == "last index")
        beside = causal_beside(lab, argument.needs_causal)
        found = lab.ask(problem, {**beside, argument.name: native.astype(argument.dtype)})
        about: dict[str, Argument] = {
            "argument": argument.name,
            "of": Phrase(f"lengths.{argument.of}"),
        }
        if argument.of == "keys":
            before = causal_keys(shape) if beside else np.ones((1, 1), np.bool_)
            yield _of_keys(lab, Phrase("lengths.counts", about), argument, native, found, before)
            nothing = np.zeros_like(native).astype(argument.dtype) - (
                argument.counts == "last index"
            )
            empty = lab.ask(problem, {**beside, argument.name: nothing.astype(argument.dtype)})
            yield _row(lab, Phrase("lengths.none", about), empty, slice(None))
        else:
            yield _row(lab, Phrase("lengths.beyond", about), found, slice(full - 1, None))


def causal_beside(lab: Laboratory, needed: bool) -> dict[str, Native]:
    """Return the causal flag, set to True, by its name, if an argument needs it; otherwise {}."""
    flag = lab.adapter.causal_flag
    return {flag.name: True} if needed and flag is not None else {}


def causal_keys(shape: Shape) -> BoolArray:
    """Return a mask `[query key]` of the keys up to each query's position, for equal lengths."""
    return np.tri(shape.query_length, shape.key_length, dtype=np.bool_)


def _of_keys(
    lab: Laboratory,
    subject: Phrase,
    argument: Lengths,
    native: np.ndarray,
    found: Outcome,
    before: BoolArray,
) -> Entry:
    """Return an entry on what the number of keys means.

    Args:
        lab: the laboratory.
        subject: the subject of the entry.
        argument: the declaration of the argument.
        native: the numbers that were passed, `[batch]`.
        found: the outcome of the call.
        before: the keys that are visible without the argument, `[query key]`.
    """
    said = Phrase("lengths.length" if argument.counts == "length" else "lengths.index-of-last")
    if isinstance(found, Refused):
        said = NOTHING if found.value == CANNOT_BE_ASKED else said
        return Entry(subject, found.value, found.told, said, said in (NOTHING, found.value))
    keys = np.arange(found.problem.shape.key_length)
    guesses = {
        "lengths.length": keys < native[:, None],
        "lengths.index-of-last": keys <= native[:, None],
        "lengths.blocked-start": keys >= native[:, None],
    }
    value = Phrase("lengths.unexplained")
    if lab.alike(found, among(lab.unmasked(found), before)):
        value = Phrase("causal.ignored")
    for name, visible in guesses.items():
        predicted = among(lab.unmasked(found), visible[:, None, None] & before)
        if lab.alike(found, predicted):
            value = Phrase(name)
    evidence = f"{numbers(native)}: entry 0, head 0, query 0 has {numbers(found.applied[0, 0, 0])}"
    return Entry(subject, value, evidence, said, said == value)


def _row(lab: Laboratory, subject: Phrase, found: Outcome, rows: slice) -> Entry:
    """Return an entry on the weights of queries that have no keys, or are beyond the length."""
    if isinstance(found, Refused):
        return Entry(subject, found.value, found.told)
    applied = found.applied[:, :, rows]
    if np.isnan(applied).all():
        value = Phrase("row.nan")
    elif not applied.any():
        value = Phrase("row.zeros")
    elif lab.alike_to_noise(
        applied, lab.unmasked(found)[:, :, rows], lab.noise(found.problem)[:, :, rows]
    ):
        value = Phrase("row.unmasked")
    elif np.allclose(applied, 1 / applied.shape[-1], rtol=0.02):
        value = Phrase("row.uniform")
    else:
        value = Phrase("something-else")
    return Entry(subject, value, f"entry 0, head 0, last query: {numbers(applied[0, 0, -1])}")
