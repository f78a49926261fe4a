"""Experiments that find out which shapes a mask argument accepts, and how it reads their axes.

In the first experiment, all sizes are different if possible, so that swapped axes usually raise an
error. In the second, two axes have the same size, so that swapping them raises no error.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np

from conformance.adapter import layouts
from conformance.adapter.arguments import AXES, from_layout
from conformance.definition.dtypes import Array, BoolArray
from conformance.errors import WrongDeclaration
from conformance.experiments.experiment import topic
from conformance.experiments.masks import Blocking, blocking
from conformance.records.findings import NOTHING, Argument, Entry, Part, Phrase
from conformance.requirements.laboratory import (
    CANNOT_BE_ASKED,
    Accepted,
    Laboratory,
    Refused,
    Sizes,
)
from conformance.requirements.meaning import (
    arrange,
    follows,
)
from conformance.words import say

SHAPES = (
    "key",
    "query",
    "batch",
    "heads",
    "batch key",
    "key batch",
    "batch query",
    "query key",
    "key query",
    "heads key",
    "1 key",
    "query 1",
    "batch 1",
    "batch query key",
    "batch key query",
    "heads query key",
    "1 query key",
    "batch 1 key",
    "batch query 1",
    "batch·heads query key",
    "heads+1 query key",
    "batch heads query key",
    "batch 1 query key",
    "1 heads query key",
    "1 1 query key",
    "batch 1 1 key",
    "batch heads 1 key",
    "batch heads query 1",
    "batch heads key query",
    "heads batch query key",
    "batch heads+1 query key",
)
"""The shapes to try: correct and transposed ones, ones that lack some axes or have axes of size 1,
and ones with one head too many."""

WITHOUT_BROADCASTING = tuple(
    name for name in SHAPES if len(name.split()) > 1 and not {"1", "heads+1"} & set(name.split())
)
"""The shapes to try if two axes have equal sizes: those of several axes, none of size 1 or with one
head too many. Other shapes are tried only with different sizes."""

COINCIDENCES = (
    ("batch-is-heads", {"batch": 3, "heads": 3, "query": 5, "key": 5}),
    ("batch-is-query", {"batch": 3, "heads": 5, "query": 3, "key": 5}),
    ("batch-is-key", {"batch": 5, "heads": 3, "query": 3, "key": 5}),
)
"""Sets of sizes such that every two axes have the same size in one of them."""

_UNANSWERED = {
    CANNOT_BE_ASKED.id: "shapes.cannot-be-asked",
    "another-shape": "shapes.answered-otherwise",
    "malformed-answer": "shapes.answered-otherwise",
}
"""The subject of the entry that lists shapes without an answer, by the reason why there is none.
For any other reason, the subject is "shapes.refused"."""


@topic(
    "shapes",
    "Shapes of a mask",
    "Which shapes does each mask argument take, and how does it read their axes?",
    place=60,
    revision=5,
)
def different_sizes(lab: Laboratory) -> Iterator[Entry]:
    """Pass masks of right and wrong shapes in a problem whose sizes all differ, if possible.
    Find the reading of the masks' axes that explains the attention weights."""
    sizes = lab.sizes()
    for way in _ways(lab):
        accepted: dict[Phrase, list[str]] = defaultdict(list)
        refused: dict[Phrase, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        about: dict[str, Argument] = {"argument": way.argument.name}
        understood: set[str] = set()
        for name, seen, readings, otherwise in _tried(lab, way, SHAPES, sizes):
            understood.update(readings)
            if isinstance(seen, Refused):
                refused[seen.value][seen.told].append(name)
            else:
                accepted[_as(name, readings, otherwise)].append(name)
        takes = accepted[NOTHING]
        declared = [shown(layout) for layout in way.argument.layouts]
        yield Entry(
            Phrase("shapes.taken", about),
            Phrase("shapes", {"shapes": [*takes]}) if takes else Phrase("shapes.none"),
            f"fed as {say(way.form.phrase)}, {_told(sizes)}",
            declared=Phrase("shapes.at-least", {"shapes": [*declared]}),
            agrees=understood.issuperset(declared),
        )
        for reading, shapes in accepted.items():
            if reading:
                subject = Phrase("shapes.misread", about | {"shapes": [*shapes]})
                yield Entry(subject, reading, "no error")
        for value, by_reason in refused.items():
            subject = Phrase(_UNANSWERED.get(value.id, "shapes.refused"), about)
            shapes = [shape for listed in by_reason.values() for shape in listed]
            evidence = (
                f"{say(Phrase('shapes', {'shapes': [*listed]}))}: {reason}"
                for reason, listed in by_reason.items()
            )
            yield Entry(subject, Phrase("shapes", {"shapes": [*shapes]}), "; ".join(evidence))


@topic(
    "coinciding-sizes",
    "Shapes where sizes coincide",
    "How does it read the axes of a mask where two axes have the same size?",
    place=70,
    revision=4,
)
def coinciding_sizes(lab: Laboratory) -> Iterator[Entry]:
    """Pass masks of many shapes in problems where two axes have the same size.
    Find the readings of the masks' axes that explain the attention weights."""
    for coincidence, sizes in COINCIDENCES:
        own = lab.sizes(**sizes)
        for way in _ways(lab):
            listed: list[Part] = []
            for name, seen, readings, otherwise in _tried(lab, way, WITHOUT_BROADCASTING, own):
                if isinstance(seen, Accepted):
                    shape = " ".join(map(str, _sized(name, own)))
                    read = _as("", readings, otherwise)
                    listed.append(Phrase("reading", {"shape": shape, "axes": read}))
            told = Phrase(f"sizes.{coincidence}")
            subject = Phrase("shapes.coinciding", {"argument": way.argument.name, "sizes": told})
            value = Phrase("readings", {"readings": listed}) if listed else Phrase("readings.none")
            yield Entry(subject, value, _told(own))


def _ways(lab: Laboratory) -> Iterator[Blocking]:
    """Yield a way to block keys for each mask argument that has one.

    Numbers are float32, unless the argument declares another dtype for 0 and 1. Masks that a
    framework attaches to tensors are left out, as they end up in these arguments.
    """
    for argument in lab.arguments():
        if argument in lab.adapter.mask_arguments:
            way = blocking(lab, argument, "float32")
            if way is not None:
                yield way


def _tried(
    lab: Laboratory, way: Blocking, names: Sequence[str], sizes: Sizes
) -> Iterator[tuple[str, Accepted | Refused, list[str], Phrase]]:
    """Pass a mask of each shape once, and yield what happens.

    The shapes are those with these names, and then those of the argument's layouts; masks with
    fewer than two elements are left out. Each item is the name of the shape, the outcome, the
    readings of the axes that explain it, and a phrase. The phrase is `NOTHING` unless no reading
    explains the outcome, but a way to resize the mask does; it then names that way.
    """
    tried: set[tuple[int, ...]] = set()
    problem = lab.problem(sizes)
    declared = {_sized(shown(layout), sizes): shown(layout) for layout in way.argument.layouts}
    # A mask of 0 and 1 marks the keys that attend, or those that do not; one of −inf the latter.
    attends = way.visible == 1.0
    names = [declared.get(_sized(name, sizes), name) for name in names]
    for number, name in enumerate([*names, *declared.values()]):
        shape = _sized(name, sizes)
        if shape in tried or int(np.prod(shape)) < 2:
            continue
        tried.add(shape)
        random = np.random.default_rng([11, number])
        axis = max(range(len(shape)), key=lambda index: (shape[index] > 1, index))
        marked = arrange(random, list(shape), axis, (0, 1))
        fed = np.where((marked == 1) == attends, way.visible, way.hidden)
        seen = lab.ask(problem, {way.argument.name: way.form.array(fed)})
        readings: list[str] = []
        otherwise = NOTHING
        if isinstance(seen, Accepted):
            readings = read_as(lab, seen, marked, attends=attends)
            if not readings:
                otherwise = read_resized(lab, seen, marked, attends=attends)
        yield name, seen, readings, otherwise


def _told(sizes: Sizes) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.named().items())


def _as(name: str, readings: list[str], otherwise: Phrase) -> Phrase:
    """Return how the axes of a shape were read, or `NOTHING` if they were read as `name` says.

    `readings` are the readings that explain the weights. If there are none, return `otherwise` or,
    if it is empty, a phrase that says so.
    """
    if name in readings:
        return NOTHING
    if readings:
        return Phrase("axes", {"axes": [*readings]})
    return otherwise or Phrase("axes.unexplained")


def _sized(name: str, sizes: Sizes) -> tuple[int, ...]:
    known = sizes.named() | {"1": 1, "heads+1": sizes.heads + 1}
    return tuple(math.prod(known[one] for one in axis.split("·")) for axis in name.split())


# How an implementation may interpret the axes of an array


def shown(layout: str) -> str:
    """Return a layout as text for cards: "(batch heads) 1 key" becomes "batch·heads 1 key"."""
    return " ".join("·".join(names) or "1" for names in layouts.parse(layout))


def readings(shape: tuple[int, ...], sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield every layout over batch, heads, query and key that fits an array of this shape."""
    counts = range(1, len(AXES) + 1)
    joined = [names for count in counts for names in itertools.permutations(AXES, count)]
    named = {"1": 1}
    for names in joined:
        axis = names[0] if len(names) == 1 else f"({' '.join(names)})"
        named[axis] = math.prod(sizes[name] for name in names)
    choices = [[axis for axis, whole in named.items() if whole == size] for size in shape]
    for chosen in itertools.product(*choices):
        # A layout that names an axis twice is invalid.
        with suppress(WrongDeclaration):
            layouts.parse(" ".join(chosen))
            yield " ".join(chosen)


def read_as(lab: Laboratory, seen: Accepted, fed: Array, *, attends: bool) -> list[str]:
    """Return each layout of the mask `fed` that explains the weights, as text from `shown`.

    `attends` is whether nonzero elements of the mask allow attention; if not, they block it. If a
    query is fully masked in a layout, its weights must merely differ from those without a mask.
    """
    shape = seen.problem.shape.logits
    sizes = dict(zip(AXES, shape, strict=True))
    visible = {
        reading: np.broadcast_to((from_layout(fed, reading, sizes) != 0) == attends, shape)
        for reading in readings(fed.shape, sizes)
    }
    return [shown(reading) for reading, keys in visible.items() if follows(lab, seen, keys)]


def read_resized(lab: Laboratory, seen: Accepted, fed: Array, *, attends: bool) -> Phrase:
    """Return how the implementation makes a mask of a wrong size fit, or an empty phrase.

    A layout that explains the weights only together with a causal mask, or with what blocks and
    what attends exchanged, is a way, too: a decoder adds a causal mask to a mask of padding, in
    which 1 attends although other masks are added. The arguments are those of `read_as`.
    """
    shape = seen.problem.shape.logits
    sizes = dict(zip(AXES, shape, strict=True))
    visible = (fed != 0) == attends
    for reading, axes, keys in _resized(visible, fed, sizes):
        if follows(lab, seen, np.broadcast_to(keys, shape)):
            return Phrase(reading, {"axes": axes})
    triangle = np.tri(*shape[2:], shape[3] - shape[2], dtype=np.bool_)
    for causal, inverted in ((True, False), (True, True), (False, True)):
        keys_of = visible != inverted
        plain = (
            ("axes", axes, from_layout(keys_of, axes, sizes)) for axes in readings(fed.shape, sizes)
        )
        for reading, axes, keys in (*plain, *_resized(keys_of, fed, sizes)):
            if follows(lab, seen, np.broadcast_to(keys & triangle if causal else keys, shape)):
                told = Phrase(reading, {"axes": [shown(axes)] if reading == "axes" else axes})
                told = Phrase("axes.under-causal", {"reading": told}) if causal else told
                return Phrase("axes.inverted", {"reading": told}) if inverted else told
    return NOTHING


def _resized(
    visible: BoolArray, fed: Array, sizes: Mapping[str, int]
) -> Iterator[tuple[str, str, BoolArray]]:
    """Yield the known ways in which an implementation may make a mask of a wrong size fit.

    Each is the id of its phrase, a layout, and the keys that are then visible. `fed` is the mask as
    it was passed, and `visible` is True where its element makes a key visible.
    """
    keys, heads = sizes["key"], sizes["heads"]
    *leading, length = visible.shape
    if length < keys:
        padding = [(0, 0)] * len(leading) + [(0, keys - length)]
        for reading, rest in (("axes.rest-blocked", False), ("axes.rest-visible", True)):
            padded = np.pad(visible, padding, constant_values=rest)
            for axes in readings(padded.shape, sizes):
                if axes.endswith("key"):
                    yield reading, shown(axes), from_layout(padded, axes, sizes)
    if len(leading) == 2 and leading[1:] == [sizes["query"]] and length == keys:
        given = leading[0]
        for reading, of_head in (
            ("axes.first-heads", np.arange(heads)),
            ("axes.last-head-repeated", np.minimum(np.arange(heads), given - 1)),
            ("axes.heads-in-turn", np.arange(heads) % given),
        ):
            if of_head[-1] < given:
                yield reading, "heads query key", visible[of_head][None]
    if len(leading) == 1 and leading[0] > sizes["batch"]:
        cut = np.pad(visible[: sizes["batch"]], [(0, 0), (0, max(keys - length, 0))])
        if cut.shape[1] == keys:
            yield "axes.first-entries", "batch key", from_layout(cut, "batch key", sizes)
        if length == 1:
            entries = visible[: sizes["batch"], :, None, None]
            yield "axes.first-entries", "batch 1", entries
    if visible.size == math.prod(sizes.values()):
        order = " ".join(AXES)
        yield "axes.in-order", order, visible.reshape([sizes[axis] for axis in AXES])
    if fed.shape == (sizes["batch"],):
        yield "axes.lengths", "batch", (np.arange(keys) < fed[:, None])[:, None, None, :]
