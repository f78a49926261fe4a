"""Which shapes a mask argument takes, and for which axes it takes theirs.

Asked twice: with sizes that are all different, where a wrong axis is mostly refused, and with sizes
that coincide, where it is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from conformance.card import Entry
from conformance.interface.arguments import MaskArgument
from conformance.probes.forms import BOOL, ZERO_ONE, Form, arrange
from conformance.probes.laboratory import Laboratory, Refused, Seen
from conformance.probes.masks import examined
from conformance.probes.meaning import read_as
from conformance.probes.readout import Sizes

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

COINCIDENCES = (
    ("batch = heads, query = key", {"batch": 3, "heads": 3, "query": 5, "key": 5}),
    ("batch = query, heads = key", {"batch": 3, "heads": 5, "query": 3, "key": 5}),
    ("batch = key, heads = query", {"batch": 5, "heads": 3, "query": 3, "key": 5}),
)
"""Every two axes have one size in one of these."""


def different_sizes(lab: Laboratory) -> Iterator[Entry]:
    """What each argument takes where every axis has a size of its own."""
    for argument in lab.arguments():
        form, attends = _form(lab, argument)
        if form is None:
            continue
        accepted: dict[str, list[str]] = defaultdict(list)
        refused: dict[str, list[str]] = defaultdict(list)
        for name, seen, readings in _tried(lab, argument, form, attends, lab.sizes()):
            if isinstance(seen, Refused):
                refused[seen.told].append(_shown(name))
            else:
                accepted[_as(name, readings)].append(_shown(name))
        takes = [shape for reading, shapes in accepted.items() if not reading for shape in shapes]
        declared = [
            f"[{', '.join(layout.replace('(batch heads)', 'batch·heads').split())}]"
            for layout in argument.layouts
        ]
        lacking = [layout for layout in declared if layout not in takes]
        yield Entry(
            f"{argument.name}: shapes it takes",
            " ".join(takes) or "none",
            f"fed as {form.name}, with batch 2, heads 3, query 4, key 5",
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
        for argument in lab.arguments():
            form, attends = _form(lab, argument)
            if form is None:
                continue
            taken: dict[tuple[int, ...], str] = {}
            for name, seen, readings in _tried(lab, argument, form, attends, own):
                if isinstance(seen, Seen):
                    shape = _sized(name, own)
                    taken.setdefault(shape, _as("", readings) or "no axes")
            listed = [f"{list(shape)} is {reading}" for shape, reading in taken.items()]
            yield Entry(
                f"{argument.name}, {told}",
                "; ".join(listed) or "takes none",
                f"sizes {', '.join(f'{axis} {size}' for axis, size in own.named().items())}",
            )


def _form(lab: Laboratory, argument: MaskArgument) -> tuple[Form | None, bool]:
    """A form in which the argument says who attends or blocks, as found out, not as declared."""
    for form in (BOOL, ZERO_ONE):
        value = examined(lab, argument, form).value
        if value.startswith(("attends", "blocks")):
            return form, value.startswith("attends")
    return None, False


def _tried(
    lab: Laboratory, argument: MaskArgument, form: Form, attends: bool, sizes: Sizes
) -> Iterator[tuple[str, Seen | Refused, list[str]]]:
    tried: set[tuple[int, ...]] = set()
    problem = lab.problem(sizes)
    for number, name in enumerate(SHAPES):
        shape = _sized(name, sizes)
        if shape in tried or int(np.prod(shape)) < 2:
            continue
        tried.add(shape)
        random = np.random.default_rng([11, number])
        axis = max(range(len(shape)), key=lambda index: (shape[index] > 1, index))
        fed = arrange(random, list(shape), axis, (0, 1))
        seen = lab.ask(problem, {argument.name: form.array(fed)})
        readings: list[str] = []
        if isinstance(seen, Seen):
            found = read_as(lab, seen, fed, attends=attends)
            readings = [reading.name for reading in found]
        yield name, seen, readings


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
