"""Which shapes a mask argument takes, and for which axes it takes theirs.

Asked twice: with sizes that are all different, where a wrong axis is mostly refused, and with sizes
that coincide, where it is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from conformance.adapter import layouts
from conformance.adapter.arguments import MaskArgument
from conformance.experiments.experiment import Experiment
from conformance.records.findings import Entry, Topic
from conformance.records.phrase import NOTHING, Argument, Part, Phrase
from conformance.requirements.laboratory import Laboratory, Refused, Seen, Sizes
from conformance.requirements.meaning import (
    ADDED,
    ATTENDING,
    BLOCKING,
    BOOL,
    INFINITE,
    ZERO_INFINITE,
    ZERO_ONE,
    Form,
    arrange,
    read_as,
)
from conformance.requirements.polarity import examined
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
"""Right ones and wrong ones: transposed, for the wrong number of heads, of another axis' length."""

WITHOUT_BROADCASTING = tuple(
    name for name in SHAPES if len(name.split()) > 1 and not {"1", "heads+1"} & set(name.split())
)
"""Where sizes coincide, what is broadcast is known already."""

COINCIDENCES = (
    ("batch-is-heads", {"batch": 3, "heads": 3, "query": 5, "key": 5}),
    ("batch-is-query", {"batch": 3, "heads": 5, "query": 3, "key": 5}),
    ("batch-is-key", {"batch": 5, "heads": 3, "query": 3, "key": 5}),
)
"""Every two axes have one size in one of these."""


def different_sizes(lab: Laboratory) -> Iterator[Entry]:
    """What each argument takes where every axis has a size of its own."""
    sizes = lab.sizes()
    for argument, marking in _markings(lab):
        accepted: dict[Phrase, list[str]] = defaultdict(list)
        refused: dict[str, list[str]] = defaultdict(list)
        about: dict[str, Argument] = {"argument": argument.name}
        for name, seen, readings in _tried(lab, argument, marking, SHAPES, sizes):
            if isinstance(seen, Refused):
                refused[seen.told].append(name)
            else:
                accepted[_as(name, readings)].append(name)
        takes = [shape for reading, shapes in accepted.items() if not reading for shape in shapes]
        declared = [
            " ".join("·".join(names) for names in layouts.parse(layout))
            for layout in argument.layouts
        ]
        lacking = [layout for layout in declared if layout not in takes]
        yield Entry(
            Phrase("shapes.taken", about),
            Phrase("shapes", {"shapes": [*takes]}) if takes else Phrase("shapes.none"),
            f"fed as {say(marking.form.phrase)}, {_told(sizes)}",
            declared=Phrase("shapes.at-least", {"shapes": [*declared]}),
            agrees=not lacking,
        )
        for reading, shapes in accepted.items():
            if reading:
                subject = Phrase("shapes.misread", about | {"shapes": [*shapes]})
                yield Entry(subject, reading, "no error")
        if refused:
            yield Entry(
                Phrase("shapes.refused", about),
                Phrase("shapes", {"shapes": [it for shapes in refused.values() for it in shapes]}),
                "; ".join(
                    f"{say(Phrase('shapes', {'shapes': [*shapes]}))}: {reason}"
                    for reason, shapes in refused.items()
                ),
            )


def coinciding_sizes(lab: Laboratory) -> Iterator[Entry]:
    """For which axes an array is taken where two axes have one size."""
    for coincidence, sizes in COINCIDENCES:
        own = lab.sizes(**sizes)
        for argument, marking in _markings(lab):
            taken: dict[tuple[int, ...], Phrase] = {}
            tried = _tried(lab, argument, marking, WITHOUT_BROADCASTING, own)
            for name, seen, readings in tried:
                if isinstance(seen, Seen):
                    shape = _sized(name, own)
                    taken.setdefault(shape, _as("", readings))
            listed: list[Part] = [
                Phrase("reading", {"shape": " ".join(map(str, shape)), "axes": reading})
                for shape, reading in taken.items()
            ]
            about: dict[str, Argument] = {"argument": argument.name}
            about |= {"sizes": Phrase(f"sizes.{coincidence}")}
            yield Entry(
                Phrase("shapes.coinciding", about),
                Phrase("readings", {"readings": listed}) if listed else Phrase("readings.none"),
                _told(own),
            )


class _Marking(NamedTuple):
    """A form, the number that marks in it, and whether marked positions attend or are blocked."""

    form: Form
    mark: float
    attends: bool


def _markings(lab: Laboratory) -> Iterator[tuple[MaskArgument, _Marking]]:
    """Yield the arguments that mark tokens, with the meaning found by experiment, not declared.

    What a framework attaches to its tensors goes the way of the arguments, so it is left out.
    """
    for argument in lab.arguments():
        if argument not in lab.adapter.mask_arguments:
            continue
        for form, mark in ((BOOL, 1.0), (ZERO_ONE, 1.0), (ZERO_INFINITE, INFINITE)):
            value = examined(lab, argument, form).value
            if value in (*ATTENDING, *BLOCKING) and mark == 1.0:
                yield argument, _Marking(form, mark, value in ATTENDING)
                break
            if value == ADDED and mark == INFINITE:
                yield argument, _Marking(form, mark, attends=False)
                break


def _tried(
    lab: Laboratory,
    argument: MaskArgument,
    marking: _Marking,
    names: Sequence[str],
    sizes: Sizes,
) -> Iterator[tuple[str, Seen | Refused, list[str]]]:
    """Yield each shape once, with its result and every reading of its axes that explains it."""
    tried: set[tuple[int, ...]] = set()
    problem = lab.problem(sizes)
    for number, name in enumerate(names):
        shape = _sized(name, sizes)
        if shape in tried or int(np.prod(shape)) < 2:
            continue
        tried.add(shape)
        random = np.random.default_rng([11, number])
        axis = max(range(len(shape)), key=lambda index: (shape[index] > 1, index))
        marked = arrange(random, list(shape), axis, (0, 1))
        fed = np.where(marked == 1, marking.mark, 0.0)
        seen = lab.ask(problem, {argument.name: marking.form.array(fed)})
        readings: list[str] = []
        if isinstance(seen, Seen):
            found = read_as(lab, seen, marked, attends=marking.attends)
            readings = [reading.name for reading in found]
        yield name, seen, readings


def _told(sizes: Sizes) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.named().items())


def _as(name: str, readings: list[str]) -> Phrase:
    """Return the axes that the shape was taken for, or nothing if they are the intended ones."""
    if name in readings:
        return NOTHING
    return Phrase("axes", {"axes": [*readings]}) if readings else Phrase("axes.unexplained")


def _sized(name: str, sizes: Sizes) -> tuple[int, ...]:
    known = sizes.named() | {"1": 1, "batch·heads": sizes.batch * sizes.heads}
    known["heads+1"] = sizes.heads + 1
    return tuple(known[axis] for axis in name.split())


EXPERIMENT = Experiment(
    Topic(
        "shapes",
        "Shapes of a mask",
        "Which shapes does each mask argument take, and for which axes?",
    ),
    different_sizes,
    place=60,
)


COINCIDING_SIZES = Experiment(
    Topic(
        "coinciding-sizes",
        "Shapes where sizes coincide",
        "For which axes is a mask taken where two axes have the same size?",
    ),
    coinciding_sizes,
    place=70,
)
