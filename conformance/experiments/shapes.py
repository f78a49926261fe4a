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
from conformance.experiments.forms import BOOL, INFINITE, ZERO_INFINITE, ZERO_ONE, Form, arrange
from conformance.experiments.laboratory import Laboratory, Refused, Seen
from conformance.experiments.masks import examined
from conformance.experiments.meaning import read_as
from conformance.experiments.readout import Sizes
from conformance.records.card import Entry

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
    ("batch = heads, query = key", {"batch": 3, "heads": 3, "query": 5, "key": 5}),
    ("batch = query, heads = key", {"batch": 3, "heads": 5, "query": 3, "key": 5}),
    ("batch = key, heads = query", {"batch": 5, "heads": 3, "query": 3, "key": 5}),
)
"""Every two axes have one size in one of these."""


def different_sizes(lab: Laboratory) -> Iterator[Entry]:
    """What each argument takes where every axis has a size of its own."""
    sizes = lab.sizes()
    for argument, marking in _markings(lab):
        accepted: dict[str, list[str]] = defaultdict(list)
        refused: dict[str, list[str]] = defaultdict(list)
        for name, seen, readings in _tried(lab, argument, marking, SHAPES, sizes):
            if isinstance(seen, Refused):
                refused[seen.told].append(_shown(name))
            else:
                accepted[_as(name, readings)].append(_shown(name))
        takes = [shape for reading, shapes in accepted.items() if not reading for shape in shapes]
        declared = [
            _shown(" ".join("·".join(names) for names in layouts.parse(layout)))
            for layout in argument.layouts
        ]
        lacking = [layout for layout in declared if layout not in takes]
        yield Entry(
            f"{argument.name}: shapes it takes",
            " ".join(takes) or "none",
            f"fed as {marking.form.name}, {_told(sizes)}",
            declared=f"at least {' '.join(declared)}",
            agrees=not lacking,
        )
        for reading, shapes in accepted.items():
            if reading:
                yield Entry(f"{argument.name}: takes {' '.join(shapes)}", reading, "no error")
        if refused:
            yield Entry(
                f"{argument.name}: shapes it refuses",
                " ".join(shape for shapes in refused.values() for shape in shapes),
                "; ".join(f"{' '.join(shapes)}: {told}" for told, shapes in refused.items()),
            )


def coinciding_sizes(lab: Laboratory) -> Iterator[Entry]:
    """For which axes an array is taken where two axes have one size."""
    for told, sizes in COINCIDENCES:
        own = lab.sizes(**sizes)
        for argument, marking in _markings(lab):
            taken: dict[tuple[int, ...], str] = {}
            tried = _tried(lab, argument, marking, WITHOUT_BROADCASTING, own)
            for name, seen, readings in tried:
                if isinstance(seen, Seen):
                    shape = _sized(name, own)
                    taken.setdefault(shape, _as("", readings) or "no axes")
            listed = [f"{list(shape)} is {reading}" for shape, reading in taken.items()]
            yield Entry(
                f"{argument.name}, {told}",
                "; ".join(listed) or "takes none",
                _told(own),
            )


class _Marking(NamedTuple):
    """A form, the number that marks in it, and whether marked positions attend or are blocked."""

    form: Form
    mark: float
    attends: bool


def _markings(lab: Laboratory) -> Iterator[tuple[MaskArgument, _Marking]]:
    """The arguments that say who attends or blocks, and how: as found out, not as declared.

    What a framework attaches to its tensors goes the way of the arguments, so it is left out.
    """
    for argument in lab.arguments():
        if argument not in lab.adapter.mask_arguments:
            continue
        for form, mark in ((BOOL, 1.0), (ZERO_ONE, 1.0), (ZERO_INFINITE, INFINITE)):
            value = examined(lab, argument, form).value
            if value.startswith(("attends", "blocks")) and mark == 1.0 and "every" not in value:
                yield argument, _Marking(form, mark, value.startswith("attends"))
                break
            if value == "added" and mark == INFINITE:
                yield argument, _Marking(form, mark, attends=False)
                break


def _tried(
    lab: Laboratory,
    argument: MaskArgument,
    marking: _Marking,
    names: Sequence[str],
    sizes: Sizes,
) -> Iterator[tuple[str, Seen | Refused, list[str]]]:
    """Each shape once, with what came of it and every reading of its axes that explains that."""
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


def _as(name: str, readings: list[str]) -> str:
    """ "" for the axes that the shape was made of, else what it was taken for."""
    if _shown(name) in readings:
        return ""
    return " or ".join(readings) if readings else "taken, but no reading of its axes explains it"


def _sized(name: str, sizes: Sizes) -> tuple[int, ...]:
    known = sizes.named() | {"1": 1, "batch·heads": sizes.batch * sizes.heads}
    known["heads+1"] = sizes.heads + 1
    return tuple(known[axis] for axis in name.split())


def _shown(name: str) -> str:
    return f"[{', '.join(name.split())}]"
