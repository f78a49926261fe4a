"""Experiments on sizes: those that are accepted, axes of size 0 and 1, and layouts of the input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from conformance.cases.case import assembled, draw, rounded
from conformance.definition.expectation import solve
from conformance.definition.problem import Shape
from conformance.errors import Unsupported
from conformance.experiments.blocked_keys import NAN, OUTPUT_BIAS, ZEROS
from conformance.experiments.experiment import topic
from conformance.records.findings import Entry, Phrase
from conformance.requirements.laboratory import (
    CANNOT_BE_ASKED,
    REFUSED,
    SOMETHING_ELSE,
    Laboratory,
    Refused,
    numbers,
)

HEAD_SIZES = (64, 128, 16, 32, 80, 96, 256, 72, 40, 33, 5)
"""The head sizes to try: the most usual first, then other multiples of 8, then odd ones."""

LENGTHS = ((128, 128), (64, 64), (256, 256), (16, 16), (5, 5))
"""The pairs of lengths (query, key) at which head sizes are tried until one is accepted. Everything
else is then tried at the pair of lengths at which that head size was accepted."""

VALUES = (0.5, 2.0)
"""The sizes of value heads to try, relative to that of key heads."""

LONGEST = (512, 1024)
FEW = 16
"""The number of queries beside many keys with the additive score."""
FAR_OFF = 0.05
"""The relative error of the output (in the Euclidean norm) above which it counts as wrong. It is
large, because accuracy is not in question here."""

HEADS = (1, 3, 8, 32)
GROUPS = (2, 3, 8, 16)


@dataclass
class _Trials:
    """A laboratory, and the failures of trials of sizes, by a description of each trial.

    Attributes:
        lab: the laboratory.
        wrong: the descriptions of the trials whose output was wrong.
        reasons: why trials failed, by their descriptions.
    """

    lab: Laboratory
    wrong: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def takes(self, shape: Shape, tried: str) -> bool:
        """Return whether the implementation gives a correct output for a shape.

        A failure is recorded under `tried`, the description of the trial.
        """
        problem = rounded(assembled(shape, draw(shape, np.random.default_rng(0))), self.lab.dtype)
        try:
            self.lab.adapter.check(problem)
        except Unsupported as reason:
            self.reasons[tried] = str(reason)
            return False
        answer = self.lab.answer(problem, compiled=True)
        if isinstance(answer, Refused):
            self.reasons[tried] = answer.told
            if answer.value not in (REFUSED, CANNOT_BE_ASKED):
                self.wrong.append(tried)
            return False
        want = solve(problem, gradients=False).output
        off = float(np.linalg.norm(answer.output - want) / np.linalg.norm(want))
        if not off <= FAR_OFF:
            self.reasons[tried] = f"off by {off:.0%}"
            self.wrong.append(tried)
        return off <= FAR_OFF


@topic(
    "sizes",
    "Sizes",
    "Which sizes of heads, lengths and numbers of heads does it take?",
    place=115,
    plain=False,
    costly=True,
)
def sizes_taken(lab: Laboratory) -> Iterator[Entry]:
    """Compute attention without masks at many sizes, one after another, and see which are accepted.
    These are sizes of heads and of value heads, lengths that are not multiples of usual block
    sizes, long sequences, numbers of heads, and numbers of query heads that share a key head. An
    output that is far from the definition's counts as wrong, not as accepted."""
    trials = _Trials(lab)
    start = _start(lab, trials)
    if start is None:
        reason = next(iter(trials.reasons.values()), "")
        if not trials.wrong:
            lab.plain()
            raise Unsupported(reason or "it takes no size")
        yield Entry(Phrase("sizes.head"), Phrase("sizes.none"), reason)
        yield from _wrong(trials)
        return
    # Compiling for each size would take most of the time of all experiments.
    step = 2 if lab.adapter.compiles else 1
    numbers, shared = HEADS[::step], GROUPS[::step]
    size = start.head_size
    head_sizes = [*dict.fromkeys((size, *HEAD_SIZES[::step]))]

    def accepted(sizes: Iterable[int], named: str, shaped: Callable[[int], Shape]) -> list[int]:
        return [each for each in sizes if trials.takes(shaped(each), named.format(each))]

    named = "head size {}"
    taken = [size, *accepted(head_sizes[1:], named, lambda each: _with(lab, start, 4, 4, each))]
    yield _entry(trials, "sizes.head", taken, head_sizes, named)
    values, named = [*dict.fromkeys(int(size * factor) for factor in VALUES)], "value heads of {}"
    others = accepted(values, named, lambda each: replace(start, value_head_size=each))
    yield _entry(trials, "sizes.value-head", others, values, named)
    multiples = _multiples(trials, start)
    yield Entry(Phrase("sizes.multiples"), Phrase("text", {"text": "{} and {}".format(*multiples)}))
    longest = _longest(trials, start)
    length = Phrase("text", {"text": str(longest)}) if longest else Phrase("sizes.any-length")
    yield Entry(Phrase("sizes.longest"), length, trials.reasons.get("a length", ""))
    heads = accepted(numbers, "{} heads", lambda each: _with(lab, start, each, each, size))
    yield _entry(trials, "sizes.heads", heads, numbers, "{} heads")
    groups = accepted(shared, "groups of {}", lambda each: _with(lab, start, 2 * each, 2, size))
    yield _entry(trials, "sizes.groups", groups, shared, "groups of {}")
    yield from _wrong(trials)
    fields: dict[str, object] = {}
    if len(taken) < len(head_sizes):
        fields["head_sizes"] = tuple(taken)
    if multiples != (1, 1):
        fields["multiples"] = multiples
    if longest:
        fields["greatest_length"] = longest
    if len(heads) < len(numbers):
        fields["heads"] = tuple(sorted({*heads, start.heads, *(2 * n for n in groups)}))
    if groups and len(groups) < len(shared):
        fields["groups"] = (1, *groups)
    if fields:
        fields = {"head_sizes": tuple(taken)} | fields
        if longest and longest < 64:
            fields["tiles"] = (longest, longest)
        text = f"Geometry({', '.join(f'{name}={value!r}' for name, value in fields.items())})"
        yield Entry(Phrase("sizes.geometry"), Phrase("text", {"text": text}))


def _start(lab: Laboratory, trials: _Trials) -> Shape | None:
    """Return the first shape that the implementation accepts, or None if it accepts none.

    The shapes to try are that of the laboratory's problems with batch size 1, 4 heads, and each of
    `LENGTHS` and `HEAD_SIZES`. If one is accepted, the failures before it are forgotten.
    """
    usual = lab.problem().shape
    for queries, keys in LENGTHS:
        lengths = replace(usual, batch=1, query_length=queries, key_length=keys)
        for head in HEAD_SIZES:
            shape = _with(lab, lengths, 4, 4, head)
            if trials.takes(shape, f"head size {head}"):
                trials.reasons.clear()
                trials.wrong.clear()
                return shape
    return None


def _with(lab: Laboratory, shape: Shape, heads: int, kv_heads: int, head: int) -> Shape:
    """Return the shape with these numbers of heads, the head size `head`, and suitable widths.

    The widths are 32 for a function, and heads · head for a layer.
    """
    width = 32 if lab.adapter.projections_supplied else heads * head
    names = ("query_width", "key_width", "value_width", "output_width")
    widths: dict[str, Any] = dict.fromkeys(names, width)
    other = replace(shape, heads=heads, kv_heads=kv_heads, head_size=head, value_head_size=head)
    return replace(other, **widths)


def _multiples(trials: _Trials, shape: Shape) -> tuple[int, int]:
    """Return the numbers of which the query length and the key length must be multiples.

    Each length is extended by 1, then by 2, 4, and so on up to 64, but by less than the length. The
    number is the first of these with which it is accepted, or the length if there is none.
    """

    def multiple(axis: str) -> int:
        length = getattr(shape, axis)
        axes = ("query_length", "key_length") if shape.sharing == "self" else (axis,)
        for more in (1, 2, 4, 8, 16, 32, 64):
            if more >= length:
                break
            longer = replace(shape, **dict.fromkeys(axes, length + more))
            if trials.takes(longer, f"{length + more} long"):
                return more
        return length

    return multiple("query_length"), multiple("key_length")


def _longest(trials: _Trials, shape: Shape) -> int:
    """Return the greatest length that is accepted, or 0 if all lengths in `LONGEST` are.

    The longer of the shape's lengths counts as accepted. The additive score has a component for
    each query, key and feature, so there are then only `FEW` queries, unless they are the keys.
    """
    last = max(shape.query_length, shape.key_length)
    is_large = shape.score == "additive" and shape.sharing != "self"
    for length in LONGEST:
        longer = replace(shape, query_length=FEW if is_large else length, key_length=length)
        if not trials.takes(longer, "a length"):
            return last
        last = length
    return 0


def _entry(
    trials: _Trials, subject: str, taken: Iterable[int], tried: Iterable[int], named: str
) -> Entry:
    """Return the entry that lists the accepted sizes, with up to three reasons why others fail.

    `taken` are those of the sizes `tried` that were accepted. `named` is a format that makes the
    description of a trial from a size.
    """
    sizes, every = sorted(taken), sorted(tried)
    value = Phrase("sizes.none")
    if sizes:
        kind = "sizes.all" if sizes == every else "sizes.these"
        value = Phrase(kind, {"sizes": [*map(str, sizes)]})
    failed = [name for size in every if (name := named.format(size)) in trials.reasons]
    why = [f"{name}: {trials.reasons[name]}" for name in failed[:3]]
    return Entry(Phrase(subject), value, "; ".join(why))


def _wrong(trials: _Trials) -> Iterator[Entry]:
    """Yield an entry that lists the trials with a wrong output, if there are any."""
    if trials.wrong:
        told = Phrase("sizes.these", {"sizes": [*dict.fromkeys(trials.wrong)]})
        yield Entry(Phrase("sizes.wrong"), told)


UNBATCHED, SEQUENCE_FIRST = Phrase("input.unbatched"), Phrase("input.sequence-first")
TAKEN = Phrase("input.taken")


@topic(
    "degenerate-sizes",
    "Axes of size 0 and 1",
    "What does it return for an empty batch, no query, no key, or one key?",
    place=110,
    every_mode=True,
    revision=3,
    costly=True,
)
def degenerate(lab: Laboratory) -> Iterator[Entry]:
    """Pass an empty batch, no query, no key, and a single key.
    Examine the output, and whether the gradients are finite."""
    empty: list[tuple[str, dict[str, int]]] = [("no-batch", {"batch": 0})]
    if lab.sharing == "self":
        empty.append(("no-length", {"key": 0}))
    else:
        empty += [("no-query", {"query": 0}), ("no-key", {"key": 0})]
    for name, sizes in [*empty, ("one-key", {"key": 1})]:
        subject = Phrase(f"size.{name}")
        found = lab.ask(lab.problem(lab.sizes(**sizes)), gradients=True)
        if isinstance(found, Refused):
            yield Entry(subject, found.value, found.told)
            continue
        output = found.answer.output
        if np.isnan(output).any():
            value = NAN
        elif not output.size:
            value = Phrase("output.empty")
        elif sizes.get("key") == 0:
            value = OUTPUT_BIAS if output.any() else ZEROS
        else:
            whole = lab.alike(found, np.ones_like(found.applied))
            value = Phrase("output.value") if whole else SOMETHING_ELSE
        lost = [n for n, a in found.answer.gradients.items() if not np.isfinite(a).all()]
        told_more = f"; gradients not finite: {', '.join(lost)}" if lost else ""
        yield Entry(subject, value, f"output of shape {list(output.shape)}{told_more}")


@topic(
    "input-layouts",
    "Layout of the input",
    "Does it take input without a batch axis, and input with the sequence first?",
    place=120,
    revision=3,
    shared=True,
)
def layouts(lab: Laboratory) -> Iterator[Entry]:
    """Pass inputs as `[length width]`, and as `[length batch width]`.
    The latter are passed in the mode that the adapter declares for them. Compare the weights with
    those for `[batch length width]`."""
    sizes = lab.sizes(batch=1)
    plain = lab.plain(sizes)
    found = lab.ask(plain.problem, unbatched=True)
    if isinstance(found, Refused):
        yield Entry(UNBATCHED, found.value, found.told)
    else:
        same = lab.alike(found, plain.applied)
        told = f"entry 0, head 0, query 0: weights {numbers(found.applied[0, 0, 0])}"
        yield Entry(UNBATCHED, TAKEN if same else SOMETHING_ELSE, told)
    name = lab.adapter.sequence_first
    if not name:
        yield Entry(SEQUENCE_FIRST, Phrase("input.no-switch"), "the adapter names no mode for it")
        return
    mode = next((mode for mode in lab.adapter.modes if mode.name == name), None)
    if mode is None:
        raise Unsupported(f"the adapter has no mode {name!r}")
    other = lab.ask(lab.problem(), mode=replace(mode, weights=lab.mode.weights))
    if isinstance(other, Refused):
        yield Entry(SEQUENCE_FIRST, other.value, other.told)
    else:
        same = lab.alike(other, lab.plain().applied)
        yield Entry(SEQUENCE_FIRST, TAKEN if same else SOMETHING_ELSE, f"mode {name}")
