"""A query that may attend no key: what it gets, and what becomes of the gradients."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.definition.dtypes import Array, BoolArray
from conformance.experiments.code import mask, output
from conformance.experiments.experiment import Experiment
from conformance.experiments.masks import Blocking, blockings
from conformance.records.findings import Entry, Topic
from conformance.records.phrase import NOTHING, Phrase
from conformance.requirements.declared import declared_row
from conformance.requirements.laboratory import (
    REFUSED,
    SOMETHING_ELSE,
    Laboratory,
    Refused,
    Seen,
    numbers,
)
from conformance.requirements.meaning import ADDED, INFINITE, LARGE
from conformance.requirements.polarity import examined
from conformance.words import say

ENTRY, QUERY = 0, 1
NAN, ZEROS, UNIFORM = Phrase("row.nan"), Phrase("row.zeros"), Phrase("row.uniform")
OUTPUT_BIAS, MEAN = Phrase("row.output-bias"), Phrase("row.mean-of-values")

_SHOWN = {
    NAN: ("output[0, 0, :4]", "NaN"),
    ZEROS: ("abs(output).max()", "0.0: zeros"),
    OUTPUT_BIAS: ("abs(output - output[0, 0]).max()", "0.0: the output bias alone, for all"),
    MEAN: (
        "abs(output[0] - output[0, 0]).max()",
        "0.0: the mean of the values, for all of its queries",
    ),
}
"""Expressions of `output` that show a value, and what is printed."""


def masked_rows(lab: Laboratory) -> Iterator[Entry]:
    """Each argument that can block all keys of a query, with each way to block."""
    for argument in lab.arguments():
        ways = list(blockings(lab, argument))
        if any(way.hidden == INFINITE for way in ways) and (
            examined(lab, argument, LARGE).value == ADDED
        ):
            ways.append(Blocking(argument, LARGE, 0.0, -1e9))
        for way in ways:
            if "key" in way.axes:
                yield from _one(lab, way)


def _one(lab: Laboratory, way: Blocking) -> Iterator[Entry]:
    problem = lab.problem()
    shape = problem.shape
    visible = np.ones(shape.logits, bool)
    if "query" in way.axes:
        visible[ENTRY, :, QUERY] = False
        visible = visible if "heads" in way.axes else visible[:, :1]
    else:
        visible[ENTRY] = False
        visible = visible[:, :1, :1]
    native = way.native(visible if "batch" in way.axes else visible[:1], shape)
    if native is None:
        return
    natives = {way.argument.name: native}
    found = lab.ask(problem, natives, gradients=True)
    if isinstance(found, Refused):
        # What is attached to a tensor may be lost where it is traced for a derivative.
        found = lab.ask(problem, natives)
    if isinstance(found, Refused):
        yield Entry(Phrase("fully-masked.output", way.about), REFUSED, found.told)
        return
    blocked = np.asarray(~np.broadcast_to(visible, shape.logits).any(axis=(1, 3)))
    if "batch" not in way.axes:
        blocked[:, QUERY] = True
    value = _output(lab, found)
    said = lab.adapter.masked_row(lab.mode)
    declared = declared_row(said) if said and way.form is not LARGE else NOTHING
    same = {ZEROS, OUTPUT_BIAS} if not shape.bias else {value}
    yield Entry(
        Phrase("fully-masked.output", way.about),
        value,
        f"weights applied {numbers(found.applied[ENTRY, 0, QUERY])}",
        declared=declared,
        agrees=not declared or value == declared or {value, declared} == same,
        code=_code(lab, way, value),
    )
    if found.answer.weights is not None:
        row = found.answer.weights[ENTRY]
        row = row[0, QUERY] if row.ndim == 3 else row[QUERY]
        plain = lab.plain().answer.weights
        before = None if plain is None else plain[ENTRY].reshape(-1, *plain.shape[-2:])[0, QUERY]
        yield Entry(Phrase("fully-masked.weights", way.about), _row(row, before), numbers(row))
    if found.answer.gradients:
        yield Entry(Phrase("fully-masked.gradients", way.about), *_gradients(found, blocked))


def _output(lab: Laboratory, found: Seen) -> Phrase:
    output = found.answer.output[ENTRY, QUERY]
    if np.isnan(output).any():
        return NAN
    if not output.any():
        return ZEROS
    value = _row(found.applied[ENTRY, 0, QUERY], lab.plain().applied[ENTRY, 0, QUERY])
    return {ZEROS: OUTPUT_BIAS, UNIFORM: MEAN}.get(value, value)


def _row(weights: Array, plain: Array | None) -> Phrase:
    if np.isnan(weights).any():
        return NAN
    if not weights.any():
        return ZEROS
    if np.allclose(weights, 1 / len(weights), rtol=0.01, atol=0):
        return UNIFORM
    if plain is not None and np.allclose(weights, plain, rtol=0.01, atol=0):
        return Phrase("row.unmasked")
    return SOMETHING_ELSE


def _gradients(found: Seen, blocked: BoolArray) -> tuple[Phrase, str]:
    """Return where NaN appears in gradients; `blocked` marks masked queries `[batch query]`."""
    places = nan_places(found, blocked)
    if places:
        lost = [name for name, array in found.answer.gradients.items() if np.isnan(array).any()]
        return Phrase("gradients.nan", {"places": [*places]}), f"NaN in {', '.join(lost)}"
    return Phrase("gradients.finite"), f"all of {', '.join(found.answer.gradients)}"


def nan_places(found: Seen, blocked: BoolArray) -> list[Phrase]:
    """Return where gradients are NaN: masked queries, other queries, keys, values or parameters."""
    places: list[Phrase] = []
    for name, array in found.answer.gradients.items():
        lost = ~np.isfinite(array)
        if not lost.any():
            continue
        if name == "query":
            rows = lost.any(axis=-1)
            if (rows & blocked).any():
                places.append(Phrase("place.masked-queries"))
            if (rows & ~blocked).any():
                places.append(Phrase("place.other-queries"))
        elif name in ("key", "value"):
            places.append(Phrase(f"place.{name}s"))
        elif Phrase("place.parameters") not in places:
            places.append(Phrase("place.parameters"))
    return places


def _code(lab: Laboratory, way: Blocking, value: Phrase) -> str:
    if way.argument not in lab.adapter.mask_arguments:
        return ""
    made = mask(way.argument.layouts[0], way.form.dtype, way.hidden, None, "blocks every token")
    shown, told = _SHOWN.get(value, ("output[0, 0, :4]", say(value)))
    return output(lab, way.argument.name, made, shown, told)


MASKED_ROWS = Experiment(
    Topic(
        "masked-rows",
        "A query that may attend nothing",
        "What does it get: NaN, zeros, the output bias, a mean? And what becomes of gradients?",
    ),
    masked_rows,
    place=30,
    every_mode=True,
)
