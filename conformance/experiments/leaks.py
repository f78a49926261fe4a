"""Experiment on whether NaN, infinities and large numbers leak through a mask that hides them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.definition.dtypes import Array, BoolArray, dtype_of
from conformance.definition.problem import Problem
from conformance.experiments.experiment import topic
from conformance.experiments.masks import Blocking, blockings
from conformance.records.findings import Entry
from conformance.records.phrase import Argument, Phrase
from conformance.requirements.laboratory import Laboratory, Outcome, Refused, Seen

HIDDEN = 1
"""The position of the key that is blocked for every query."""

VISIBLE = 0
"""The position of a key that is visible to every query."""


@topic(
    "leaks",
    "NaN behind the mask",
    "Does NaN or an infinity in a blocked key or value reach the output or a gradient?",
    place=80,
    every_mode=True,
    shared=True,
    revision=3,
)
def leaks(lab: Laboratory) -> Iterator[Entry]:
    """Put NaN, an infinity or a huge number into a key or value that is blocked for every query.
    Look for it in the output, the weights and the gradients. Then put NaN into a visible key or
    value, and see whether it reaches the output of every query. Repeat this without a mask, and
    also for a query."""
    yield from _unmasked(lab)
    for argument in lab.arguments():
        for way in blockings(lab, argument):
            if "key" in way.axes:
                yield from _behind(lab, way)


INPUTS = {
    "separate": {"query": "query", "key": "key", "value": "value"},
    "memory": {"query": "query", "key": "memory"},
    "self": {"query": "token"},
}
"""For each kind of sharing, the inputs and what they are called on a card."""


def _unmasked(lab: Laboratory) -> Iterator[Entry]:
    """Yield an entry for each input on whether NaN in it reaches the output without a mask."""
    for name, what in INPUTS[lab.sharing].items():
        problem = _spoilt(lab.problem(), name, VISIBLE, np.nan)
        about: dict[str, Argument] = {"input": Phrase(f"input.{what}")}
        subject = Phrase("leak.visible-unmasked", about | {"number": Phrase("number.nan")})
        rows = slice(VISIBLE, VISIBLE + 1) if what == "query" else slice(None)
        yield _reached(subject, lab.ask(problem), rows)


def _spoilt(problem: Problem, name: str, token: int, number: float) -> Problem:
    """Return the problem with `number` in the input `name` at one token of each batch entry."""
    array = getattr(problem, name).copy()
    # One number is enough: its projection fills the key. A value carries its own index.
    array[:, token, token if name == "value" else -1] = number
    return problem.with_inputs(**{name: array})


def _reached(subject: Phrase, found: Outcome, rows: slice = slice(None)) -> Entry:
    """Return an entry on whether a visible NaN reached the outputs of the queries in `rows`."""
    if isinstance(found, Refused):
        return Entry(subject, found.value, found.told)
    lost = np.isnan(found.answer.output[:, rows]).any(axis=-1)
    value = "all" if lost.all() else "some" if lost.any() else "none"
    evidence = f"NaN in {lost.mean():.0%} of the outputs"
    return Entry(subject, Phrase(f"leak.visible-reaches-{value}"), evidence)


def _numbers(dtype: str) -> dict[str, float]:
    """Return the numbers to hide, keyed by the last part of their phrases' ids."""
    largest = dtype_of(dtype).largest
    finite = {"large": 1e5} if largest > 1e5 else {}
    return {"nan": np.nan, "inf": np.inf, "minus-inf": -np.inf, **finite, "largest": largest}


def _behind(lab: Laboratory, way: Blocking) -> Iterator[Entry]:
    problem = lab.problem()
    visible = np.ones((1, 1, 1, problem.shape.key_length), bool)
    visible[..., HIDDEN] = False
    native = way.native(visible, problem.shape)
    assert native is not None
    natives = {way.argument.name: native}
    if problem.shape.sharing == "self":
        # As a query, the blocked token attends to others, which is no leak.
        cotangent = problem.cotangent.copy()
        cotangent[:, HIDDEN] = 0
        problem = problem.replace(cotangent=cotangent)
    usual = lab.ask(problem, natives, gradients=True)
    for name, what in INPUTS[problem.shape.sharing].items():
        if what == "query":
            continue
        about = {"input": Phrase(f"input.{what}")} | way.about
        for number_name, number in _numbers(problem.dtype).items():
            found = lab.ask(_spoilt(problem, name, HIDDEN, number), natives, gradients=True)
            subject = Phrase("leak", about | {"number": Phrase(f"number.{number_name}")})
            if isinstance(found, Refused):
                yield Entry(subject, found.value, found.told)
                continue
            # A finite number that gets through shows in what differs from the usual answer.
            places = _places(found, usual if np.isfinite(number) else None)
            reached = Phrase("leak.reaches", {"places": [*places]})
            yield Entry(subject, reached if places else Phrase("leak.hidden"), _arrays(found))
        subject = Phrase("leak.visible", about | {"number": Phrase("number.nan")})
        yield _reached(subject, lab.ask(_spoilt(problem, name, VISIBLE, np.nan), natives))


def _moved(array: Array, usual: Array | None) -> BoolArray:
    """Return a mask of the elements that are not finite or, given `usual`, far from that array."""
    moved = ~np.isfinite(array)
    if usual is not None and usual.size and np.isfinite(usual).all():
        with np.errstate(invalid="ignore"):
            moved |= np.abs(array - usual) > 0.05 * np.abs(usual).max()
    return moved


def _places(found: Seen, usual: Outcome | None) -> list[Phrase]:
    """Return the places that a hidden number reaches, apart from the blocked token's own row."""
    queries = np.arange(found.problem.shape.query_length)
    own = found.problem.shape.sharing == "self"
    seen = queries != HIDDEN if own else queries >= 0
    places: list[Phrase] = []
    before = usual.answer if isinstance(usual, Seen) else None
    moved = {
        name: _moved(array, None if before is None else before.arrays().get(name))
        for name, array in found.answer.arrays().items()
    }
    if moved["output"][:, seen].any():
        places.append(Phrase("place.output"))
    if "weights" in moved and moved["weights"][..., seen, :].any():
        places.append(Phrase("place.weights"))
    if own and before is not None and not np.isfinite(found.answer.output[:, HIDDEN]).all():
        return places
    for name in found.answer.gradients:
        array = moved[f"gradient.{name}"]
        if name == "query":
            reached = array[:, seen].any()
        elif name in ("key", "value"):
            reached = array[:, np.arange(array.shape[1]) != HIDDEN].any()
        else:
            reached = array.any()
            name = "parameters"
        place = Phrase("place.gradients", {"of": name})
        if reached and place not in places:
            places.append(place)
    return places


def _arrays(found: Seen) -> str:
    lost = [name for name, array in found.answer.arrays().items() if not np.isfinite(array).all()]
    return f"not finite: {', '.join(lost)}" if lost else "everything is finite"
