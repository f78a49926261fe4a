"""Experiments on arguments that restrict keys by position: causal flags, windows and lengths."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

import msgspec
import numpy as np

from conformance.adapter.arguments import CausalFlag, Native
from conformance.adapter.features import Chunk, Lengths, Window
from conformance.definition.arithmetic import Exact
from conformance.definition.attention import forward
from conformance.definition.dtypes import BoolArray, dtype_of
from conformance.definition.features import within_chunks
from conformance.definition.problem import Causal, Problem, Shape, causal_mask, within
from conformance.definition.problem import Window as Limits
from conformance.experiments.blocked_keys import row_output
from conformance.experiments.experiment import agreeing, hiding_code, topic
from conformance.experiments.masks import (
    Blocking,
    blocking,
    blockings,
    combined,
    distinct,
    hypotheses,
    shown_and_weights,
    visible_of,
)
from conformance.records.findings import NOTHING, Argument, Entry, Phrase
from conformance.requirements.laboratory import (
    REFUSED,
    Accepted,
    Laboratory,
    Outcome,
    Refused,
    Sizes,
    numbers,
)
from conformance.requirements.meaning import among, follows, triangles

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
    revision=6,
)
def causal(lab: Laboratory) -> Iterator[Entry]:
    """Set the causal flag alone, for equal and for different numbers of queries and keys.
    Compare the weights with those predicted for a top-left and a bottom-right triangle. Then set it
    together with each mask argument; another encoding of the mask is reported if the two combine
    otherwise in it. Also set it with weights that give far larger logits, and with a mask that
    leaves only later keys visible to a query."""
    flag = lab.adapter.causal_flag
    if flag is None:
        yield Entry(Phrase("causal.no-flag"), Phrase("causal.none-declared"), "so none is asked")
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
        yield from _blocks(lab, flag)
    for argument in lab.arguments():
        ways = list(blockings(lab, argument))
        for told, sizes in lengths if ways else ():
            usual = _with_mask(lab, flag, ways[0], told, sizes, alone[told])
            yield usual
            for way in ways[1:]:
                other = _with_mask(lab, flag, way, told, sizes, alone[told])
                if other.value != usual.value:
                    about = other.subject.arguments | {"form": way.form.phrase}
                    subject = Phrase(f"{other.subject.id}-in", about)
                    yield msgspec.structs.replace(other, subject=subject)


def _with_mask(
    lab: Laboratory, flag: CausalFlag, way: Blocking, lengths: Phrase, sizes: Sizes, alone: Phrase
) -> Entry:
    """Return an entry that states how the causal flag combines with a mask, for these lengths.

    The mask blocks keys in the form `way`. `alone` is the observed effect of the flag without a
    mask.
    """
    problem, argument = lab.problem(sizes), way.argument.name
    shape = problem.shape
    visible = _telling(way, shape)
    natives: dict[str, Native] = {flag.name: True}
    if flag.needs is not None and flag.needs != argument:
        natives |= _needed(lab, flag.needs, shape)
    found = lab.ask(problem, natives | way.passed(visible, shape))
    about: dict[str, Argument] = {"flag": flag.name, "argument": argument, "lengths": lengths}
    subject = Phrase("causal.beside", about)
    if len(natives) > 1:
        subject = Phrase("causal.beside-two", about | {"needed": str(flag.needs)})
    declared = REFUSED if flag.alone else NOTHING
    if flag.effect != "always":
        obeyed = flag.name if flag.effect == "instead of masks" else argument
        declared = Phrase("combined.only", {"argument": obeyed})
    if isinstance(found, Refused):
        return agreeing(subject, found.value, found.told, declared)
    # The triangle is aligned in one of the two ways, or is the one observed for the flag alone.
    known = [causal_mask(shape, alignment) for alignment in ALIGNMENTS]
    known += [triangle for value, triangle in triangles(shape) if value == alone]
    value = combined(lab, found, known, visible, (flag.name, argument))
    return agreeing(subject, value, shown_and_weights(found, visible), declared)


def _telling(way: Blocking, shape: Shape) -> BoolArray:
    """Return a pattern of visible keys (True) that tells all `hypotheses` apart.

    Each hypothesis is a way to combine the pattern with a causal triangle, of either alignment. If
    none of 200 random patterns tells all apart, return the last.
    """
    for seed in range(200):
        visible = visible_of(way, shape, seed)
        triangles = [causal_mask(shape, alignment) for alignment in ALIGNMENTS]
        if all(distinct(hypotheses(triangle, visible, shape)) for triangle in triangles):
            break
    return visible


def _needed(lab: Laboratory, name: str, shape: Shape) -> dict[str, Native]:
    """Return the top-left triangle as a mask for the argument `name`, keyed by that name.

    Return {} if the triangle does not fit the argument, or if the argument was not observed to
    block keys.
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
    elif flag.effect == "none":
        declared = Phrase("causal.ignored")
    elif square or flag.alignment:
        declared = SQUARE if square else Phrase(f"causal.{flag.alignment}")
    if isinstance(found, Refused):
        return agreeing(subject, found.value, found.told, declared)
    value = _aligned(lab, found)
    told = "0.0: no query sees the last token but the last"
    code = hiding_code(lab, flag.name, [], told, token=-1) if value == SQUARE else ""
    return agreeing(subject, value, _rows_of(found), declared, code)


def _blocks(lab: Laboratory, flag: CausalFlag) -> Iterator[Entry]:
    """Yield entries that state whether the flag blocks later keys that are hard to block.

    Later keys are hard to block if logits are large, or if a mask blocks all other keys. The latter
    is not asked of a flag that has no effect beside a mask.
    """
    problem = lab.problem(LENGTHS[0][1])
    later = ~causal_mask(problem.shape, "top-left")
    for name, largest in (("large", 1.5e4), ("huge", 1e10)):
        if largest**2 > dtype_of(lab.dtype).largest > 1e5 or largest > dtype_of(lab.dtype).largest:
            continue
        factor = largest / np.abs(forward(problem, Exact()).logits).max()
        louder = dataclasses.replace(problem.weights, query=problem.weights.query * factor)
        found = lab.ask(problem.replace(weights=louder), {flag.name: True})
        subject = Phrase(f"causal.{name}-logits", {"flag": flag.name})
        if isinstance(found, Refused):
            yield Entry(subject, found.value, found.told)
            continue
        weights = np.where(later, found.applied, 0.0)
        told = f"at most {numbers(weights.max(axis=(0, 1, 2)))} on later keys"
        yield Entry(subject, Phrase(f"causal.{'lowers' if weights.any() else 'blocks'}"), told)
    for argument in lab.arguments() if flag.effect == "always" else ():
        for way in blockings(lab, argument):
            if "key" in way.axes:
                yield from _later_only(lab, flag.name, way, problem)


def _later_only(lab: Laboratory, flag: str, way: Blocking, problem: Problem) -> Iterator[Entry]:
    """Yield an entry that states what queries get if the flag and a mask leave them no keys.

    The mask blocks the first two keys. The first two queries show whether the flag only lowers
    logits; the first query alone shows any other effect. Yield nothing if there is no answer.
    """
    shown = (np.arange(problem.shape.key_length) >= 2)[None, None, None]
    native = way.native(shown, problem.shape)
    found = None if native is None else lab.ask(problem, {flag: True, way.argument.name: native})
    if isinstance(found, Accepted):
        weights = found.applied[:, :, :2]
        earlier = causal_mask(problem.shape, "top-left")[:, :, :2]
        is_lowered = weights.any() and not (weights * earlier).any()
        value = Phrase("causal.lowers") if is_lowered else row_output(lab, found, 0, 0)
        evidence = f"entry 0, head 0, query 0: weights {numbers(weights[0, 0, 0])}"
        yield Entry(Phrase("causal.later-only", {"flag": flag} | way.about), value, evidence)


def _aligned(lab: Laboratory, found: Accepted) -> Phrase:
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
    """Yield entries that state the effect of a flag that has to be set together with a mask.

    The mask is each causal triangle in turn. `needs` is the name of the mask argument. Yield
    nothing if this argument was not observed to block keys.
    """
    way = blocking(lab, lab.adapter.masks.by_name[needs])
    if way is None:
        return
    square = sizes.query == sizes.key
    problem = lab.problem(sizes)
    for alignment in ALIGNMENTS[:1] if square else ALIGNMENTS:
        mask = way.passed(causal_mask(problem.shape, alignment), problem.shape)
        found = lab.ask(problem, {flag: True, **mask})
        triangle = SQUARE if square else Phrase(f"causal.{alignment}")
        about: dict[str, Argument] = {"flag": flag, "argument": needs}
        about |= {"triangle": triangle, "lengths": lengths}
        subject = Phrase("causal.with-triangle", about)
        if isinstance(found, Refused):
            yield Entry(subject, found.value, found.told)
        else:
            yield Entry(subject, _aligned(lab, found), _rows_of(found))


def _rows_of(found: Accepted, most: int | None = None) -> str:
    return "entry 0, head 0: " + "; ".join(numbers(row) for row in found.applied[0, 0][:most])


# Windows and lengths
WINDOW_LENGTHS = (
    (Phrase("lengths.equal"), Sizes(query=7, key=7)),
    (Phrase("lengths.fewer-queries"), Sizes(query=4, key=7)),
    (Phrase("lengths.more-queries"), Sizes(query=7, key=4)),
)

EVERY_KEY, NO_KEY = Phrase("window.every-key"), Phrase("window.no-key")
UNIFORM, UNEXPLAINED = Phrase("window.uniform"), Phrase("window.unexplained")


@topic(
    "windows",
    "The window",
    "Which keys does it show, does it count the own key, and from where if lengths differ?",
    place=42,
    revision=4,
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
        for told, sizes in WINDOW_LENGTHS[:1] if lab.sharing == "self" else WINDOW_LENGTHS:
            two_sided = argument.form == "left right"
            values: list[int | tuple[int, int]] = [(1, 2), (2, 0)] if two_sided else [1, 2]
            if sizes.query == sizes.key:
                # Ordinary sizes reveal the alignment; others are tried where it does not matter.
                edges = [(0, 0), (-1, 1), (1, -1), (-1, -1), (50, 50)]
                values += edges if two_sided else [0, -1, 50]
            for value in values:
                yield _windowed(lab, argument, value, told, sizes, natives)


def near(shape: Shape, limits: Limits, alignment: Causal) -> BoolArray:
    """Return a mask `[1 1 query key]`, True for keys in a window around each query's position.

    `limits` are the numbers of keys that the window shows before and after that position; None
    means no limit. `alignment` determines the positions of the queries among the keys.
    """
    offset = shape.key_length - shape.query_length if alignment == "bottom-right" else 0
    distance = np.arange(shape.key_length) - np.arange(shape.query_length)[:, None] - offset
    return within(limits, distance)[None, None]


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
        return agreeing(subject, found.value, found.told, said)
    return agreeing(subject, seen_window(lab, found), _rows_of(found, 3), said)


def seen_window(lab: Laboratory, found: Accepted) -> Phrase:
    """Return the phrase for the first window that explains the weights.

    Weights that are all NaN, all zero, uniform, or the same as without a window have phrases of
    their own, and so have windows that leave out the own key. If nothing explains the weights, the
    result is `UNEXPLAINED`.
    """
    shape = found.problem.shape
    if np.isnan(found.applied).all():
        return Phrase("causal.nan")
    if lab.alike(found, lab.unmasked(found)):
        return EVERY_KEY
    if not np.nan_to_num(found.applied).any():
        return NO_KEY
    alike = np.isclose(found.applied, 1 / shape.key_length, rtol=0.02).all(axis=-1)
    if (alike | ~found.applied.any(axis=-1)).all():
        return UNIFORM if alike.all() else Phrase("window.uniform-or-no-key")
    for alignment, limits in _candidates(shape):
        visible = np.broadcast_to(near(shape, limits, alignment), shape.logits)
        if not visible.all() and follows(lab, found, visible):
            return _named(shape, limits, alignment)
    # A negative limit that is taken for a number of keys, not for no limit, hides the own key.
    distance = np.arange(shape.key_length) - np.arange(shape.query_length)[:, None]
    for first, last in itertools.combinations_with_replacement(range(1, shape.key_length), 2):
        about: dict[str, Argument] = {"first": str(first), "last": str(last)}
        for side, far in (("after", distance), ("before", -distance)):
            visible = np.broadcast_to((far >= first) & (far <= last), shape.logits)
            if follows(lab, found, visible):
                return Phrase(f"window.{side}-own", about)
    return UNEXPLAINED


def _candidates(shape: Shape) -> Iterator[tuple[Causal, Limits]]:
    most = max(shape.query_length, shape.key_length)
    # One less than the longer side reaches as far as no limit does.
    sizes = (*range(most - 1), None)
    alignments = ALIGNMENTS[:1] if shape.query_length == shape.key_length else ALIGNMENTS
    for limits in itertools.product(sizes, sizes):
        for alignment in alignments:
            yield alignment, limits


def _named(shape: Shape, limits: Limits, alignment: Causal) -> Phrase:
    """Return the phrase for a window: that of the first candidate with the same visible keys.

    Windows that show every key or no key have phrases of their own.
    """
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
    "chunks",
    "Chunks",
    "Which keys does a size of chunks show, and from where are queries counted if lengths differ?",
    place=43,
    every_mode=True,
    shared=True,
    needs=(Chunk,),
)
def chunks(lab: Laboratory) -> Iterator[Entry]:
    """Set the size of chunks to 2 and 3, with equal and with different numbers of queries and keys.
    Find the blocks of positions that predict the attention weights."""
    for argument in lab.features(Chunk):
        for told, sizes in WINDOW_LENGTHS[:1] if lab.sharing == "self" else WINDOW_LENGTHS:
            problem = lab.problem(sizes)
            square = sizes.query == sizes.key
            for size in (2, 3):
                found = lab.ask(problem, {argument.name: size})
                subject = Phrase(
                    "chunk.alone",
                    {"argument": argument.name, "value": str(size), "lengths": told},
                )
                said = REFUSED
                if square or argument.alignment is not None:
                    alignment = argument.alignment or "top-left"
                    said = _of_chunk(problem.shape, size, alignment, argument.causal)
                if isinstance(found, Refused):
                    yield agreeing(subject, found.value, found.told, said)
                else:
                    value = first_rule(lab, found, _chunks(problem.shape))
                    yield agreeing(subject, value, _rows_of(found, 3), said)


def first_rule(
    lab: Laboratory, found: Accepted, rules: Iterable[tuple[Phrase, BoolArray]]
) -> Phrase:
    """Return the phrase of the first rule whose visible keys explain the weights.

    It is `EVERY_KEY` if the weights are those without a mask, and `UNEXPLAINED` if no rule fits.
    """
    if lab.alike(found, lab.unmasked(found)):
        return EVERY_KEY
    for phrase, visible in rules:
        if follows(lab, found, np.broadcast_to(visible, found.problem.shape.logits)):
            return phrase
    return UNEXPLAINED


def _chunks(shape: Shape) -> Iterator[tuple[Phrase, BoolArray]]:
    """Yield phrases for all blocks, and the keys that they leave visible."""
    sizes = range(1, shape.key_length)
    for size, alignment, causal in itertools.product(sizes, ALIGNMENTS, (True, False)):
        visible = _in_chunks(shape, size, alignment, causal)
        yield _of_chunk(shape, size, alignment, causal), visible


def _in_chunks(shape: Shape, size: int, alignment: Causal, causal: bool) -> BoolArray:
    """Return a mask `[1 1 query key]`, True for the keys in the block of each query's position."""
    offset = shape.key_length - shape.query_length if alignment == "bottom-right" else 0
    queries, keys = np.arange(shape.query_length) + offset, np.arange(shape.key_length)
    seen = within_chunks(size, queries, keys)[None, None]
    return seen & causal_mask(shape, alignment) if causal else seen


def _of_chunk(shape: Shape, size: int, alignment: Causal, causal: bool) -> Phrase:
    direction = Phrase("chunk.causal" if causal else "chunk.both-ways")
    about: dict[str, Argument] = {"size": str(size), "causal": direction}
    if shape.query_length == shape.key_length:
        return Phrase("chunk.sees", about)
    return Phrase("chunk.sees-aligned", about | {"alignment": Phrase(f"causal.{alignment}")})


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
        problem = lab.problem(WINDOW_LENGTHS[0][1] if argument.needs_causal else None)
        shape = problem.shape
        full = shape.key_length if argument.of == "keys" else shape.query_length
        counted = np.array([full - 2, *[full - 1] * (shape.batch - 1)])
        native, nothing = (
            number - (argument.counts == "last index") for number in (counted, 0 * counted)
        )
        beside = causal_beside(lab, argument.needs_causal)
        found = lab.ask(problem, {**beside, argument.name: native.astype(argument.dtype)})
        of = Phrase(f"lengths.{argument.of}")
        about: dict[str, Argument] = {"argument": argument.name, "of": of}
        if argument.of == "keys":
            yield _of_keys(lab, Phrase("lengths.counts", about), argument, native, found)
            empty = lab.ask(problem, {**beside, argument.name: nothing.astype(argument.dtype)})
            yield _row(lab, Phrase("lengths.none", about), empty, slice(None))
        else:
            yield _row(lab, Phrase("lengths.beyond", about), found, slice(full - 1, None))


def causal_beside(lab: Laboratory, needed: bool) -> dict[str, Native]:
    """Return {name of the causal flag: True}, or {} if there is no flag or it is not `needed`."""
    flag = lab.adapter.causal_flag
    return {flag.name: True} if needed and flag is not None else {}


def _of_keys(
    lab: Laboratory, subject: Phrase, argument: Lengths, native: np.ndarray, found: Outcome
) -> Entry:
    """Return an entry that states what the numbers `native` `[batch]`, passed as lengths, mean."""
    said = Phrase("lengths.length" if argument.counts == "length" else "lengths.index-of-last")
    if isinstance(found, Refused):
        return agreeing(subject, found.value, found.told, said)
    shape = found.problem.shape
    before = np.ones((1, 1), np.bool_)
    if causal_beside(lab, argument.needs_causal):
        before = causal_mask(shape, "top-left")
    keys = np.arange(shape.key_length)
    guesses = {
        "lengths.length": keys < native[:, None],
        "lengths.index-of-last": keys <= native[:, None],
        "lengths.blocked-start": keys >= native[:, None],
    }
    plain = lab.unmasked(found)
    value = Phrase("lengths.unexplained")
    if lab.alike(found, among(plain, before)):
        value = Phrase("causal.ignored")
    for name, visible in guesses.items():
        if lab.alike(found, among(plain, visible[:, None, None] & before)):
            value = Phrase(name)
    evidence = f"{numbers(native)}: entry 0, head 0, query 0 has {numbers(found.applied[0, 0, 0])}"
    return agreeing(subject, value, evidence, said)


def _row(lab: Laboratory, subject: Phrase, found: Outcome, rows: slice) -> Entry:
    """Return an entry that describes the weights of the queries `rows`, which should see no key.

    The value is NaN, zeros, the weights without lengths, equal weights, or something else.
    """
    if isinstance(found, Refused):
        return Entry(subject, found.value, found.told)
    applied, noise = (each[:, :, rows] for each in (found.applied, lab.noise(found.problem)))
    if np.isnan(applied).all():
        value = Phrase("row.nan")
    elif not applied.any():
        value = Phrase("row.zeros")
    elif lab.alike_to_noise(applied, lab.unmasked(found)[:, :, rows], noise):
        value = Phrase("row.unmasked")
    elif np.allclose(applied, 1 / applied.shape[-1], rtol=0.02):
        value = Phrase("row.uniform")
    else:
        value = Phrase("something-else")
    return Entry(subject, value, f"entry 0, head 0, last query: {numbers(applied[0, 0, -1])}")
