"""Experiments on bidirectional spans: who is in one, and what else restricts what it sees."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.adapter.features import Chunk, Spans, Window
from conformance.definition.dtypes import BoolArray, IntArray
from conformance.definition.features import within_chunks, within_spans
from conformance.definition.problem import Causal, Shape, causal_mask
from conformance.definition.problem import Window as Limits
from conformance.experiments.causal import (
    ALIGNMENTS,
    UNEXPLAINED,
    WINDOW_LENGTHS,
    causal_beside,
    first_rule,
    near,
)
from conformance.experiments.experiment import agreeing, topic
from conformance.records.findings import NOTHING, Argument, Entry, Phrase
from conformance.requirements.laboratory import REFUSED, Accepted, Laboratory, Refused, numbers
from conformance.requirements.meaning import follows

SPANS = {
    "span.prefix": ([1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]),
    "span.two": ([0, 1, 1, 0, 2, 2, 0], [1, 1, 0, 0, 2, 2, 2]),
    "span.touching": ([0, 1, 1, 2, 2, 2, 0], [1, 1, 1, 2, 2, 0, 0]),
    "span.of-one-id": ([0, 1, 1, 0, 1, 1, 0], [1, 1, 0, 0, 1, 1, 1]),
}
"""The ids of the spans of seven keys, for two batch entries in turn."""

LONG = ([0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0, 0])
"""The same of a span that is longer than a window, and that begins before the first query."""

LIMITS: tuple[Limits, ...] = ((2, None), (2, 2), (2, 0))
"""Windows shorter than this span; the first that an argument can express is set."""

CHUNK = 3

Candidate = tuple[Phrase, BoolArray]


@topic(
    "spans",
    "Bidirectional spans",
    "Which later keys does a query see in a span, and does a window hold inside it?",
    place=41,
    every_mode=True,
    shared=True,
    needs=(Spans,),
)
def spans(lab: Laboratory) -> Iterator[Entry]:
    """Pass a prefix, two spans, two that touch, and keys of one id that do not touch.
    Find the rule that predicts the attention weights. Repeat this with fewer queries than keys, and
    with a window, or chunks, shorter than a span. The causal flag is set if the argument needs
    it."""
    (equal, square), (fewer, oblong), _ = WINDOW_LENGTHS
    asked = [(name, listed, equal, square) for name, listed in SPANS.items()]
    if lab.sharing != "self":
        asked.append(("span.long", LONG, fewer, oblong))
    for argument in lab.features(Spans):
        for name, listed, lengths, sizes in asked:
            problem = lab.problem(sizes)
            native = argument.native(_ids(listed, problem.shape))
            if native is None:
                continue
            about: dict[str, Argument] = {"argument": argument.name, "lengths": lengths}
            subject = Phrase("span.alone", about | {"spans": Phrase(name)})
            told = _told(argument, native, problem.shape)
            said = REFUSED
            if sizes.query == sizes.key or argument.alignment is not None:
                said = _declared(problem.shape, told, argument)
            flag = causal_beside(lab, not argument.causal)
            found = lab.ask(problem, {**flag, argument.name: native})
            if isinstance(found, Refused):
                yield agreeing(subject, found.value, found.told, said)
            else:
                value = first_rule(lab, found, _candidates(problem.shape, told))
                yield agreeing(subject, value, _rows(found), said)
        limits: tuple[Window | Chunk, ...] = (*lab.features(Window), *lab.features(Chunk))
        for limit in limits:
            yield from _limited(lab, argument, limit)


def _ids(listed: tuple[list[int], ...], shape: Shape) -> IntArray:
    return np.stack([np.array(listed[entry % 2]) for entry in range(shape.batch)])


def _rows(found: Accepted) -> str:
    return "entry 0, head 0: " + "; ".join(numbers(row) for row in found.applied[0, 0])


def _told(argument: Spans, native: IntArray, shape: Shape) -> IntArray:
    """Return what was passed as numbers `[batch key]`, 0 for keys in no span."""
    if argument.form == "prefix":
        return 1 * (np.arange(shape.key_length) < native[:, None])
    return np.where(native == argument.none, 0, native)


def _shifted(told: IntArray, by: int) -> IntArray:
    """Return the numbers of the keys that stand `by` (1 or -1) before each key, 0 if none does."""
    moved = np.roll(told, by, axis=1)
    moved[:, 0 if by > 0 else -1] = 0
    return moved


def _runs(told: IntArray) -> IntArray:
    """Return ids with which each run of equal numbers is a span of its own."""
    return np.where(told != 0, (told != _shifted(told, 1)).cumsum(axis=1), 0)


def _rules(told: IntArray) -> Iterator[tuple[str, IntArray]]:
    """Yield what the numbers `told` may mean, with the ids of the spans that there are then."""
    runs, marked = _runs(told), 1 * (told != 0)
    yield "span.ids", told
    yield "span.runs", runs
    yield "span.runs-of-any", _runs(marked)
    yield "span.any", marked
    yield "span.none-too", told + 1
    yield "span.without-last", np.where(_shifted(told, -1) == told, told, 0)
    yield "span.with-one-more", np.where(told == 0, _shifted(told, 1), told)
    yield "span.prefix-only", np.where((runs == runs[:, :1]) & (runs != 0), told, 0)
    yield "span.of-id-1", np.where(told == 1, told, 0)


def _inside(ids: IntArray, shape: Shape, alignment: Causal) -> tuple[IntArray, BoolArray]:
    """Return the ids of the queries `[batch query]`, and which keys are in the span of each.

    The latter is `[batch 1 query key]`.
    """
    offset = shape.key_length - shape.query_length if alignment == "bottom-right" else 0
    at = np.arange(shape.query_length) + offset
    there = (at >= 0) & (at < shape.key_length)
    of_queries = np.where(there, ids[:, np.where(there, at, 0)], 0)
    return of_queries, within_spans(of_queries, ids)[:, None]


def _candidates(shape: Shape, told: IntArray) -> Iterator[Candidate]:
    """Yield the phrases of all rules, with the keys that each leaves visible."""
    square = shape.query_length == shape.key_length
    for alignment in ALIGNMENTS[:1] if square else ALIGNMENTS:
        past, marked = causal_mask(shape, alignment), (told != 0)[:, None, None]
        seen = []
        for rule, ids in _rules(told):
            of_queries, inside = _inside(ids, shape, alignment)
            seen.append((rule, "span.and-before", past | inside))
            alone = np.where((of_queries != 0)[:, None, :, None], inside, past)
            seen.append((rule, "span.not-before", alone))
        seen.append(("span.to-all", "span.and-before", past | marked))
        seen.append(("span.ignored", "span.and-before", past | (marked & False)))
        for rule, before, visible in seen:
            about: dict[str, Argument] = {"rule": Phrase(rule), "before": Phrase(before)}
            phrase = Phrase("span.sees", about)
            if not square:
                aligned = {"alignment": Phrase(f"causal.{alignment}")}
                phrase = Phrase("span.aligned", about | aligned)
            yield phrase, visible


def _declared(shape: Shape, told: IntArray, argument: Spans) -> Phrase:
    """Return the phrase of the first rule with the effect of the declared one."""
    alignment = argument.alignment or "top-left"
    ids = told if argument.form == "ids" else _runs(told)
    wanted = causal_mask(shape, alignment) | _inside(ids, shape, alignment)[1]
    return next(
        phrase for phrase, visible in _candidates(shape, told) if np.array_equal(visible, wanted)
    )


def _limited(lab: Laboratory, argument: Spans, limit: Window | Chunk) -> Iterator[Entry]:
    """Yield an entry that states whether a window, or chunks, hold inside a span.

    Yield nothing for chunks that are causal by themselves, as nothing is declared of them.
    """
    problem = lab.problem(WINDOW_LENGTHS[0][1])
    shape = problem.shape
    ids = _ids(LONG, shape)
    spanned, value = argument.native(ids), None
    held = before = np.ones((1, 1, shape.query_length, shape.key_length), np.bool_)
    if isinstance(limit, Window):
        for limits in LIMITS:
            value = limit.value(limits, causal=False)
            if value is not None:
                held = near(shape, limits, "top-left")
                before = near(shape, (limits[0], None), "top-left")
                break
    elif not limit.causal:
        value, at = CHUNK, np.arange(shape.key_length)
        held = before = within_chunks(CHUNK, at, at)[None, None]
    if spanned is None or value is None:
        return
    past, (_, inside) = causal_mask(shape, "top-left"), _inside(ids, shape, "top-left")
    subject = Phrase("span.beside", {"argument": argument.name, "limit": limit.name})
    said = Phrase("span.held" if argument.limited else "span.not-held")
    if isinstance(limit, Window) and limit.form in ("own and before", "before"):
        # What these hide after a query's own position, the causal mask hides in any other case.
        said = NOTHING
    needs = isinstance(limit, Window) and limit.needs_causal
    flag = causal_beside(lab, needs or not argument.causal)
    found = lab.ask(problem, {**flag, argument.name: spanned, limit.name: value})
    if isinstance(found, Refused):
        yield agreeing(subject, found.value, found.told, said)
        return
    guesses = {
        "span.held": (past | inside) & held,
        "span.held-before": (past | inside) & before,
        "span.not-held": (past & held) | inside,
        "span.limit-ignored": past | inside,
        "span.ignored-beside": past & held,
    }
    names = (
        name
        for name, visible in guesses.items()
        if follows(lab, found, np.broadcast_to(visible, shape.logits))
    )
    yield agreeing(subject, Phrase(next(names, UNEXPLAINED.id)), _rows(found), said)
