"""NaN and infinities behind a mask: a blocked key or value must not be seen."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.experiments.experiment import Experiment
from conformance.experiments.masks import Blocking, blockings
from conformance.records.findings import Entry, Topic
from conformance.records.phrase import Phrase
from conformance.requirements.laboratory import REFUSED, Laboratory, Refused, Seen

HIDDEN = 1
"""The key that is blocked for everybody."""

NUMBERS = (("nan", np.nan), ("inf", np.inf), ("minus-inf", -np.inf))


def leaks(lab: Laboratory) -> Iterator[Entry]:
    """The first argument that can block a key, in each of its forms."""
    for argument in lab.arguments():
        ways = [way for way in blockings(lab, argument) if "key" in way.axes]
        if ways:
            for way in ways:
                yield from _behind(lab, way)
            return


def _behind(lab: Laboratory, way: Blocking) -> Iterator[Entry]:
    problem = lab.problem()
    visible = np.ones((1, 1, 1, problem.shape.key_length), bool)
    visible[..., HIDDEN] = False
    native = way.native(visible, problem.shape)
    assert native is not None
    inputs = {"separate": ("key", "value"), "memory": ("key",), "self": ("query",)}
    for name in inputs[problem.shape.sharing]:
        for told, number in NUMBERS:
            array = getattr(problem, name).copy()
            # One number is enough: its projection fills the key. A value carries its own index.
            array[:, HIDDEN, HIDDEN if name == "value" else -1] = number
            changed = problem.with_inputs(**{name: array})
            what = {"separate": name, "memory": "memory", "self": "token"}[problem.shape.sharing]
            about = {"number": Phrase(f"number.{told}"), "input": Phrase(f"input.{what}")}
            subject = Phrase("leak", about | way.about)
            found = lab.ask(changed, {way.argument.name: native}, gradients=True)
            if isinstance(found, Refused):
                yield Entry(subject, REFUSED, found.told)
                continue
            places = _places(found)
            reached = Phrase("leak.reaches", {"places": [*places]})
            yield Entry(subject, reached if places else Phrase("leak.hidden"), _arrays(found))


def _places(found: Seen) -> list[Phrase]:
    """Return where non-finite values appear, except in the row of the blocked token itself."""
    queries = np.arange(found.problem.shape.query_length)
    own = found.problem.shape.sharing == "self"
    seen = queries != HIDDEN if own else queries >= 0
    places: list[Phrase] = []
    if not np.isfinite(found.answer.output[:, seen]).all():
        places.append(Phrase("place.output"))
    weights = found.answer.weights
    if weights is not None and not np.isfinite(weights[..., seen, :]).all():
        places.append(Phrase("place.weights"))
    for name, array in found.answer.gradients.items():
        if name == "query":
            finite = np.isfinite(array[:, seen]).all()
        elif name in ("key", "value"):
            others = np.arange(array.shape[1]) != HIDDEN
            finite = np.isfinite(array[:, others]).all()
        else:
            finite = np.isfinite(array).all()
            name = "parameters"
        place = Phrase("place.gradients", {"of": name})
        if not finite and place not in places:
            places.append(place)
    return places


def _arrays(found: Seen) -> str:
    lost = [name for name, array in found.answer.arrays().items() if not np.isfinite(array).all()]
    return f"not finite: {', '.join(lost)}" if lost else "everything is finite"


LEAKS = Experiment(
    Topic(
        "leaks",
        "NaN behind the mask",
        "Does NaN or an infinity in a blocked key or value reach the output or a gradient?",
    ),
    leaks,
    place=80,
    every_mode=True,
)
