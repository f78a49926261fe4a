"""An experiment on dilated windows and global tokens: what is skipped, and what is never hidden."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from conformance.adapter.arguments import Native
from conformance.adapter.base import Adapter, Mode
from conformance.adapter.features import Window
from conformance.definition.dtypes import BoolArray, IntArray
from conformance.definition.features import to_or_from
from conformance.definition.problem import Causal, Shape, within
from conformance.definition.problem import Window as Limits
from conformance.experiments.causal import (
    ALIGNMENTS,
    WINDOW_LENGTHS,
    causal_beside,
    first_rule,
)
from conformance.experiments.experiment import agreeing, topic
from conformance.records.findings import Argument, Entry, Phrase
from conformance.requirements.laboratory import REFUSED, Laboratory, Refused, Sizes, numbers

NUMBERS = ((2, 2), (3, 3))
"""Pairs of a dilation, and of how far the window beside it reaches in what the argument counts."""

SIDES: tuple[Limits, ...] = ((1, 1), (1, 0), (1, None))
"""Which sides such a window may have; the first that an argument can express is set."""

TOKENS = ([1, 0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1, 0])
"""The global tokens among seven keys, for two batch entries in turn."""

Candidate = tuple[Phrase, BoolArray]


class _Near(NamedTuple):
    """A window that was set, and how its argument is declared.

    Attributes:
        argument: the declaration.
        natives: the arguments that set the window, with the causal flag if it is needed.
        limits: how far the window reaches on each side, in what the argument counts.
        causal: whether the causal flag is set.
    """

    argument: Window
    natives: dict[str, Native]
    limits: Limits
    causal: bool

    def seen(self, distance: IntArray, step: int = 1, *, counts: str = "positions") -> BoolArray:
        """Return what the window leaves visible if it counts positions, or steps, of a dilation."""
        unit = step if counts == "steps" else 1
        before, after = (None if side is None else side * unit for side in self.limits)
        return within((before, after), distance)

    def past(self, distance: IntArray) -> BoolArray:
        """Return what the causal flag, if it is set, leaves visible."""
        return (distance <= 0) | (not self.causal)


def _either(adapter: Adapter, mode: Mode) -> bool:
    """Return whether a window has an argument for a dilation or for global tokens."""
    declared = (one for one in adapter.features if isinstance(one, Window))
    return any(one.dilation or one.global_tokens for one in declared)


@topic(
    "dilation",
    "Dilated windows and global tokens",
    "Which keys does a dilation skip, what does the window beside it count, and what do global "
    "tokens see?",
    place=52,
    every_mode=True,
    shared=True,
    needs=(Window,),
    where=_either,
)
def dilation(lab: Laboratory) -> Iterator[Entry]:
    """Set dilations of 2 and 3 beside a window, then global tokens beside a window of one key.
    Find the rule that predicts the attention weights, with equal lengths and with fewer queries
    than keys. The causal flag is set only if the argument needs it. If the argument has both, set
    global tokens beside a dilated window too."""
    for argument in lab.features(Window):
        for lengths, sizes in WINDOW_LENGTHS[:1] if lab.sharing == "self" else WINDOW_LENGTHS[:2]:
            for step, far in NUMBERS if argument.dilation else ():
                near = _near(lab, argument, far)
                if near is not None:
                    yield _skipped(lab, near, step, lengths, sizes)
            for step in (1, 2) if argument.dilation else (1,):
                near = _near(lab, argument, step) if argument.global_tokens else None
                if near is not None:
                    yield _unhidden(lab, near, step, lengths, sizes)


def _near(lab: Laboratory, argument: Window, far: int) -> _Near | None:
    """Return a window that reaches as far as `far`; None if the argument can express none."""
    flag = causal_beside(lab, argument.needs_causal)
    for sides in SIDES:
        before, after = (None if side is None else side * far for side in sides)
        value = argument.value((before, after), causal=bool(flag))
        if value is not None:
            return _Near(argument, {**flag, argument.name: value}, (before, after), bool(flag))
    return None


def _skipped(lab: Laboratory, near: _Near, step: int, lengths: Phrase, sizes: Sizes) -> Entry:
    """Return an entry that states which keys a dilation skips."""
    about: dict[str, Argument] = {
        "argument": near.argument.dilation,
        "value": str(step),
        "window": f"{near.argument.name}={near.natives[near.argument.name]}",
        "lengths": lengths,
    }
    natives = {**near.natives, near.argument.dilation: step}
    shape = lab.problem(sizes).shape
    candidates = [
        (Phrase("dilation.sees", {"rule": Phrase(rule), "counts": Phrase(counts)}), alignment, seen)
        for alignment, distance in _distances(shape)
        for rule, on in _rules(distance, step)
        for counts, window in (
            ("dilation.in-positions", near.seen(distance)),
            ("dilation.in-steps", near.seen(distance, step, counts="steps")),
            ("dilation.without-window", np.ones_like(on)),
        )
        for seen in [on & window & near.past(distance)]
    ]
    alignment = near.argument.alignment or "top-left"
    distance = dict(_distances(shape)).get(alignment, dict(_distances(shape))["top-left"])
    wanted = near.seen(distance, step, counts=near.argument.counts) & (distance % step == 0)
    return _entry(
        lab,
        Phrase("dilation.alone", about),
        near.argument,
        natives,
        sizes,
        [(_placed(phrase, at, sizes), seen) for phrase, at, seen in candidates],
        wanted & near.past(distance),
    )


def _rules(distance: IntArray, step: int) -> Iterator[tuple[str, BoolArray]]:
    """Yield what a dilation may mean, with the keys `[query key]` that it leaves visible."""
    on, index = distance % step == 0, np.arange(distance.shape[1])
    yield "dilation.of-distance", on
    yield "dilation.ignored", np.ones_like(on)
    yield "dilation.of-index", np.broadcast_to(index % step == 0, on.shape)
    yield "dilation.skips-as-many", distance % (step + 1) == 0
    yield "dilation.one-less", distance % max(step - 1, 1) == 0
    yield "dilation.before-only", on | (distance > 0)
    yield "dilation.without-own", on & (distance != 0)
    yield "dilation.others", ~on


def _unhidden(lab: Laboratory, near: _Near, step: int, lengths: Phrase, sizes: Sizes) -> Entry:
    """Return an entry that states what global tokens see, and which queries see them."""
    argument, shape = near.argument, lab.problem(sizes).shape
    tokens = np.stack([np.array(TOKENS[entry % 2]) for entry in range(shape.batch)])
    window = f"{argument.name}={near.natives[argument.name]}"
    natives = {**near.natives, argument.global_tokens: tokens.astype(argument.dtype)}
    if step > 1:
        window += f", {argument.dilation}={step}"
        natives[argument.dilation] = step
    about: dict[str, Argument] = {
        "argument": argument.global_tokens,
        "window": window,
        "lengths": lengths,
    }
    candidates = []
    for alignment, distance in _distances(shape):
        past = near.past(distance)
        for rule, seen in _exempt(near, tokens, distance, step):
            phrase = Phrase("global.sees", {"rule": Phrase(rule)})
            visible = (seen & past)[:, None]
            candidates.append((alignment, _placed(phrase, alignment, sizes), visible))
    declared = argument.alignment if sizes.query != sizes.key else "top-left"
    wanted = next(seen for at, _, seen in candidates if at == (declared or "top-left"))
    listed = [(phrase, seen) for _, phrase, seen in candidates]
    return _entry(lab, Phrase("global.alone", about), argument, natives, sizes, listed, wanted)


def _exempt(
    near: _Near, tokens: IntArray, distance: IntArray, step: int
) -> Iterator[tuple[str, BoolArray]]:
    """Yield what global tokens may be, with the visible keys `[batch query key]` there are then.

    The first is what is declared.
    """
    on, window = distance % step == 0, near.seen(distance, step, counts=near.argument.counts)
    nobody, count = np.zeros_like(tokens), tokens.sum(axis=1, keepdims=True)

    def of_queries(of_keys: IntArray) -> IntArray:
        return (of_keys[:, None] * (distance == 0)).sum(axis=2)

    def seen(rows: IntArray, columns: IntArray) -> BoolArray:
        return to_or_from(of_queries(rows), columns)

    both = seen(tokens, tokens)
    yield "global.both", both | (window & on)
    yield "global.ignored", np.broadcast_to(window & on, both.shape)
    yield "global.rows", seen(tokens, nobody) | (window & on)
    yield "global.columns", seen(nobody, tokens) | (window & on)
    yield "global.own-only", both | (distance == 0)
    first = np.broadcast_to(tokens[:1], tokens.shape)
    yield "global.first-entry", seen(first, first) | (window & on)
    prefix = 1 * (np.arange(tokens.shape[1]) < count)
    yield "global.prefix", seen(prefix, prefix) | (window & on)
    if step > 1:
        yield "global.in-window", (both | on) & window
        yield "global.on-steps", (both | window) & on
        yield "global.without-dilation", both | near.seen(distance)


def _distances(shape: Shape) -> Iterator[tuple[Causal, IntArray]]:
    """Yield the alignments, with the position of each key minus that of each query."""
    more = shape.key_length - shape.query_length
    for alignment in ALIGNMENTS if more else ALIGNMENTS[:1]:
        offset = more if alignment == "bottom-right" else 0
        index = np.arange(shape.key_length) - np.arange(shape.query_length)[:, None]
        yield alignment, index - offset


def _placed(phrase: Phrase, alignment: Causal, sizes: Sizes) -> Phrase:
    """Return the phrase, with the alignment if it matters."""
    if sizes.query == sizes.key:
        return phrase
    aligned = {"alignment": Phrase(f"causal.{alignment}")}
    return Phrase(f"{phrase.id}-aligned", {**phrase.arguments, **aligned})


def _entry(
    lab: Laboratory,
    subject: Phrase,
    argument: Window,
    natives: dict[str, Native],
    sizes: Sizes,
    candidates: Sequence[Candidate],
    wanted: BoolArray,
) -> Entry:
    """Return an entry with the phrase of the first candidate that explains the weights.

    The declared value is the phrase of the first one that leaves the keys `wanted` visible.
    """
    said = REFUSED
    if argument.alignment is not None or sizes.query == sizes.key:
        said = next(phrase for phrase, seen in candidates if np.array_equal(seen, wanted))
    found = lab.ask(lab.problem(sizes), natives)
    if isinstance(found, Refused):
        return agreeing(subject, found.value, found.told, said)
    value = first_rule(lab, found, candidates)
    rows = "; ".join(numbers(row) for row in found.applied[0, 0][:3])
    return agreeing(subject, value, f"entry 0, head 0: {rows}", said)
