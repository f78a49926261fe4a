"""Find out what a mask argument means, and require that the adapter declares this meaning.

The argument is passed a native array, in a problem whose output is the attention weights, and each
possible meaning predicts these weights (see `meaning`). The problem has the sharing, score and
heads of the case. If an implementation has a mistake elsewhere, its output may not show the
weights, although it applies the mask correctly. In this case, the meaning is found by changing a
token: the queries whose output changes are those that attend to it.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress

import numpy as np

from conformance.adapter.arguments import MaskArgument, to_layout
from conformance.definition.dtypes import Array
from conformance.errors import Unsupported
from conformance.records.findings import Entry, Finding, Verdict
from conformance.records.phrase import NOTHING, Argument, Part, Phrase
from conformance.requirements.examination import Examination
from conformance.requirements.invariance import with_other_content
from conformance.requirements.laboratory import (
    CANNOT_BE_ASKED,
    REFUSED,
    Laboratory,
    NoAnswer,
    Refused,
    Seen,
    numbers,
)
from conformance.requirements.meaning import (
    ADDED,
    ATTENDS,
    BLOCKS,
    BLOCKS_EVERYTHING,
    IGNORED,
    INFINITE,
    READINGS,
    REJECTED,
    UNEXPLAINED,
    Form,
    meaning,
    own_forms,
    rows_changed,
    telling,
    zero_one,
)
from conformance.requirements.requirement import requirement
from conformance.words import say

STILL, MOVED = 12.0, 24.0
"""The changes, in σ, below which an output counts as unaffected, and above which as affected."""

Tried = tuple[MaskArgument, Form, Entry]


def examined(lab: Laboratory, argument: MaskArgument, form: Form, dtype: str = "") -> Entry:
    """Return a card entry on what a mask in a given form means for an argument.

    Args:
        lab: the laboratory that calls the implementation.
        argument: the declaration of the argument.
        form: the form in which the mask is passed.
        dtype: the dtype of the inputs; "" for the laboratory's dtype.
    """
    about: dict[str, Argument] = {"argument": argument.name, "form": form.phrase}
    subject = Phrase("mask.meaning", about)
    if dtype:
        subject = Phrase("mask.meaning-for-inputs", about | {"dtype": dtype})
    problem = lab.problem(dtype=dtype)
    fed, laid = telling(form, argument, problem.shape)
    found = lab.ask(problem, {argument.name: form.array(laid)})
    # What an adapter declares about numbers holds for masks in the dtype of the inputs.
    own = not (dtype or form.is_of_another_float) or form.dtype in ("own", "bool")
    if argument.dtype:
        own = form.dtype in (argument.dtype, "bool")
    declared = declaration(argument, form) if own else NOTHING
    if isinstance(found, Refused):
        value, evidence = REJECTED if found.value == REFUSED else found.value, found.told
        # Integers may be refused where numbers are declared: many libraries require floats.
        another = "int" in form.dtype and form.dtype != argument.dtype
        excused = found.value == CANNOT_BE_ASKED or another
        declared = NOTHING if excused else declared
    else:
        handed = np.asarray(form.array(fed), np.float64)
        value, evidence = (_rows if fed.shape[-1] == 1 else _weights)(lab, found, handed)
        if lab.case and fed.shape[-1] > 1 and value in (UNEXPLAINED, BLOCKS_EVERYTHING):
            influence = by_influence(lab, argument, form)
            value = value if influence == UNEXPLAINED else influence
    return Entry(subject, value, evidence, declared, not declared or value == declared)


def declaration(argument: MaskArgument, form: Form) -> Phrase:
    """Return the meaning that the adapter declares for this form, or an empty phrase.

    An argument that is declared to take only 0 and 1 has no declared meaning in other forms.
    """
    if form.dtype == "bool":
        return Phrase(f"mask.{argument.true}") if argument.true else NOTHING
    if "int" in form.dtype and argument.whole is not None:
        argument = dataclasses.replace(argument, number=argument.whole)
    if argument.number == "added":
        return ADDED
    values = np.array(form.values)
    attends = argument.attending(values)
    if attends is None:
        return NOTHING
    if attends.all() or not attends.any():
        return IGNORED if attends.all() else BLOCKS_EVERYTHING
    return next(it for it, reading in READINGS.items() if (reading(values) == attends).all())


def _weights(lab: Laboratory, seen: Seen, fed: Array) -> tuple[Phrase, str]:
    """Return the meaning of the mask `fed`, and the evidence.

    The evidence shows the mask of the first query, and its weights with and without this mask.
    """
    arrays = (np.broadcast_to(fed, seen.applied.shape), seen.applied, lab.unmasked(seen))
    row, weights, without = (numbers(array[0, 0, 0]) for array in arrays)
    evidence = f"entry 0, head 0, query 0: fed {row}, weights {weights}, without it {without}"
    return meaning(lab, seen, fed), evidence


def _rows(lab: Laboratory, seen: Seen, fed: Array) -> tuple[Phrase, str]:
    """Return the meaning of the mask `fed`, which has no key axis, and the evidence.

    The evidence lists the queries of the first batch entry whose weights the mask changed.
    """
    changed = rows_changed(lab, seen)
    marked = np.broadcast_to(fed[:, 0, :, 0], changed.shape)
    rows = ", ".join(str(row) for row in np.flatnonzero(changed[0])) or "none"
    evidence = f"entry 0: fed {numbers(marked[0])} to the queries; rows that changed: {rows}"
    for value, expected in (
        (IGNORED, np.zeros_like(changed)),
        (ATTENDS, marked == 0),
        (BLOCKS, marked != 0),
        (ADDED, np.isneginf(marked) | (marked <= -1e3)),
    ):
        if (changed == expected).all():
            return value, evidence
    return UNEXPLAINED, evidence


def by_influence(lab: Laboratory, argument: MaskArgument, form: Form) -> Phrase:
    """Return the meaning of the argument, inferred from the queries that the first token affects.

    Return `UNEXPLAINED` if no meaning predicts which queries these are, if it is doubtful whether
    some query is affected, or if a call gives no answer.
    """
    problem = lab.problem()
    shape = problem.shape
    for seed in range(1000):
        fed = telling(form, argument, shape, seed)[0][:, :1]
        marked = np.isfinite(fed) if INFINITE in form.values else fed != 0
        some, every = marked.any(axis=-2), marked.all(axis=-2)
        if shape.query_length > 1 == marked.shape[2] or (some & ~every).all():
            break
    laid = to_layout(fed, argument.layouts[0], shape.logits, broadcast=False)
    assert laid is not None
    natives = {argument.name: form.array(laid)}
    tokens = np.broadcast_to(np.arange(shape.key_length) == 0, (shape.batch, shape.key_length))
    other = with_other_content(problem, tokens, np.random.default_rng(0))
    asked = (lab.ask(problem, natives), lab.ask(other, natives), lab.ask(problem))
    outputs = [found.answer.output for found in asked if isinstance(found, Seen)]
    if len(outputs) < len(asked):
        return UNEXPLAINED
    noise = lab.noise(problem).max(axis=(1, 3))
    with np.errstate(invalid="ignore"):
        changes = [np.abs(outputs[0] - output).max(axis=-1) / noise for output in outputs[1:]]
    moved, still = changes[0] > MOVED, changes[0] < STILL
    visible = np.broadcast_to(marked[:, 0, :, 0], moved.shape)
    if not (moved | still).all():
        return UNEXPLAINED
    if (moved == visible).all():
        return ADDED if INFINITE in form.values else ATTENDS
    if (moved == ~visible).all():
        return BLOCKS
    if moved.all() and (changes[1] < STILL).all():
        return IGNORED
    return ADDED if moved.all() and INFINITE not in form.values else UNEXPLAINED


def observations(ex: Examination) -> list[Tried]:
    """Return each mask argument with each form that it is declared to take, and the card entry.

    The result, a list of triples, is cached.

    Raises:
        Unsupported: the adapter cannot express the case.
    """

    def look() -> list[Tried]:
        ex.adapter.check(ex.problem)
        lab = Laboratory(ex.adapter, ex.dtype, ex.device, ex.mode, case=ex.problem.shape)
        with suppress(NoAnswer):
            lab.plain()
        boolean, ones, infinite = own_forms(ex.dtype)[:3]
        return [
            (argument, form, examined(lab, argument, form))
            for argument in ex.adapter.mask_arguments
            for form, taken in (
                (boolean, argument.true),
                (infinite, argument.number == "added"),
                (zero_one(argument, ones), argument.number),
            )
            if taken
        ]

    key = ("polarity", id(ex.adapter), ex.case.id, ex.dtype, ex.device, ex.mode.name)
    return ex.bench.answers.get(key, look)


@requirement(
    "mask.polarity-is-as-declared",
    "Each mask argument means what the adapter declares: True attends or blocks, numbers are added "
    "or say who attends. An experiment passes the argument natively and finds its meaning.",
    revision=2,
    why="`True` attends in one library and blocks in the next; a wrong guess costs a week.",
)
def polarity(ex: Examination) -> Finding | None:
    """Pass an array to each mask argument, in each form that the argument is declared to take. The
    output of the problem is the attention weights. The meaning that predicts these weights must be
    the declared one."""
    if not ex.adapter.mask_arguments:
        raise Unsupported("no mask arguments are declared")
    if not ex.varies_arguments:
        return None
    meanings: list[Part] = []
    wrong = []
    tried = observations(ex)
    if tried and all(entry.value == CANNOT_BE_ASKED for *_, entry in tried):
        raise Unsupported(tried[0][-1].evidence.removeprefix("unsupported: "))
    for argument, form, entry in tried:
        about: dict[str, Argument] = {"argument": argument.name, "form": Phrase(form.phrase.id)}
        meanings.append(Phrase("mask.means", about | {"meaning": entry.value}))
        if not entry.agrees:
            given = say(Phrase("mask.means", about | {"meaning": entry.declared})).replace("=", " ")
            wrong.append(f"declared {given}, observed {say(entry.value)}: {entry.evidence}")
    value = Phrase("mask.meanings", {"meanings": meanings})
    verdict: Verdict = "deviates" if wrong else "conforms"
    return Finding(polarity.id, verdict, detail="; ".join(wrong), value=value)
