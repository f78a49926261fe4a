"""What each mask argument means, in every form that people hand over."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from conformance.adapter import layouts
from conformance.adapter.arguments import MaskArgument, Native, to_layout
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.problem import Shape
from conformance.experiments.code import difference, hiding
from conformance.experiments.code import mask as mask_lines
from conformance.experiments.experiment import Experiment
from conformance.experiments.laboratory import Laboratory, Refused, Seen
from conformance.experiments.meaning import (
    ADDED,
    ATTENDING,
    ATTENDS,
    BLOCKING,
    BLOCKS,
    BLOCKS_EVERYTHING,
    BOOL,
    FORMS,
    IGNORED,
    READINGS,
    REJECTED,
    UNEXPLAINED,
    ZERO_INFINITE,
    ZERO_ONE,
    Form,
    meaning,
    own_forms,
    rows_changed,
    telling,
)
from conformance.records.findings import Entry, Topic
from conformance.records.phrase import NOTHING, Argument, Phrase

HALF = ("bfloat16", "float16")


def meanings(lab: Laboratory) -> Iterator[Entry]:
    """One entry for each argument and form; in one half precision too."""
    half = next((name for name in HALF if name != lab.dtype and lab.has(name)), "")
    for argument in lab.arguments():
        for form in FORMS:
            yield examined(lab, argument, form)
        if half:
            for form in own_forms(half):
                yield examined(lab, argument, form, half)


def examined(lab: Laboratory, argument: MaskArgument, form: Form, dtype: str = "") -> Entry:
    """One argument in one form, in the laboratory's dtype or another."""
    about: dict[str, Argument] = {"argument": argument.name, "form": form.phrase}
    subject = Phrase("mask.meaning", about)
    if dtype:
        subject = Phrase("mask.meaning-for-inputs", about | {"dtype": dtype})
    problem = lab.problem(dtype=dtype)
    fed, laid = telling(form, argument, problem.shape)
    found = lab.ask(problem, {argument.name: form.array(laid)})
    # What an adapter declares of numbers is said of the implementation's own dtype.
    own = not dtype or form.dtype in ("own", "bool")
    declared = declaration(argument, form) if own else NOTHING
    if isinstance(found, Refused):
        return _entry(lab, argument, form, subject, REJECTED, found.told, declared)
    as_handed: Native = form.array(fed)
    assert isinstance(as_handed, np.ndarray)
    numbers = as_handed.astype(np.float64)
    if np.broadcast_to(numbers, problem.shape.logits).shape[-1] and fed.shape[-1] == 1:
        value = _rows(lab, found, numbers)
        evidence = _told_rows(lab, found, numbers)
    else:
        value = meaning(lab, found, numbers)
        evidence = told(lab, found, numbers)
    return _entry(lab, argument, form, subject, value, evidence, declared)


def _entry(
    lab: Laboratory,
    argument: MaskArgument,
    form: Form,
    subject: Phrase,
    value: Phrase,
    evidence: str,
    declared: Phrase,
) -> Entry:
    # Whole numbers may be refused where fractions are taken: many libraries ask for floats.
    if value == REJECTED and "int" in form.dtype:
        declared = NOTHING
    agrees = not declared or value == declared
    code = "" if "dtype" in subject.arguments else _code(lab, argument, form, value)
    return Entry(subject, value, evidence, declared, agrees, code)


def _code(lab: Laboratory, argument: MaskArgument, form: Form, value: Phrase) -> str:
    """Lines in which the argument hides token 0, as far as it can in this form."""
    layout = argument.layouts[0]
    if argument not in lab.adapter.mask_arguments:
        return ""
    if value == IGNORED:
        made = mask_lines(layout, form.dtype, 0.0, form.values[-1], "marks token 0")
        return difference(lab, argument.name, made, "0.0: it is ignored")
    fill, mark = {
        BLOCKS: (0.0, form.values[-1]),
        ATTENDS: (form.values[-1], 0.0),
        ADDED: (0.0, min(form.values)),
    }.get(value, (0.0, 0.0))
    if fill == mark or "key" not in layout:
        return ""
    made = mask_lines(layout, form.dtype, fill, mark, "marks token 0")
    return hiding(lab, argument.name, made, "0.0: token 0 is hidden from the others")


def declaration(argument: MaskArgument, form: Form) -> Phrase:
    """What the adapter says about this form, as a meaning, if it says anything.

    Of "0 or 1 only" there is nothing to compare with in other forms.
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


def told(lab: Laboratory, seen: Seen, fed: Array) -> str:
    """The first row of what was fed, and its weights with and without."""
    shape = seen.problem.shape
    full = np.broadcast_to(fed, shape.logits)
    plain = lab.plain(
        lab.sizes(**dict(zip(("batch", "heads", "query", "key"), shape.logits, strict=True))),
        seen.problem.dtype,
    )
    return (
        f"entry 0, head 0, query 0: fed {numbers(full[0, 0, 0])}, "
        f"weights {numbers(seen.applied[0, 0, 0])}, without it {numbers(plain.applied[0, 0, 0])}"
    )


def _rows(lab: Laboratory, seen: Seen, fed: Array) -> Phrase:
    """An argument over queries: marked rows, or the others, lose their weights."""
    changed = rows_changed(lab, seen)
    marked = np.broadcast_to(fed[:, 0, :, 0], changed.shape)
    for value, expected in (
        (IGNORED, np.zeros_like(changed)),
        (ATTENDS, marked == 0),
        (BLOCKS, marked != 0),
        (ADDED, np.isneginf(marked) | (marked <= -1e3)),
    ):
        if (changed == expected).all():
            return value
    return UNEXPLAINED


def _told_rows(lab: Laboratory, seen: Seen, fed: Array) -> str:
    changed = rows_changed(lab, seen)[0]
    marked = np.broadcast_to(fed[:, 0, :, 0], (fed.shape[0], len(changed)))[0]
    rows = ", ".join(str(row) for row in np.flatnonzero(changed)) or "none"
    return f"entry 0: fed {numbers(marked)} to the queries; rows that changed: {rows}"


def numbers(row: Array, most: int = 8) -> str:
    """ "[0 0.25 −inf]": short, and exact zeros as 0."""

    def one(value: float) -> str:
        if value == 0:
            return "0"
        if math.isinf(value):
            return "−inf" if value < 0 else "inf"
        if math.isnan(value):
            return "NaN"
        if abs(value) < 0.005:
            return f"{value:.0e}".replace("-", "−")
        return f"{value:.2g}".replace("-", "−")

    listed = [one(float(value)) for value in row[:most]]
    return f"[{' '.join(listed)}{' …' if len(row) > most else ''}]"


# How to block a key with an argument, as found out and not as declared


@dataclass(frozen=True)
class Blocking:
    """An argument in a form, and the values that hide a key and leave it visible."""

    argument: MaskArgument
    form: Form
    visible: float
    hidden: float

    @property
    def about(self) -> dict[str, Argument]:
        """Arguments of a phrase about it."""
        return {"argument": self.argument.name, "form": self.form.phrase}

    @property
    def axes(self) -> tuple[str, ...]:
        """Of the argument's first layout."""
        return layouts.axes(self.argument.layouts[0])

    def native(self, visible: BoolArray, shape: Shape) -> Native | None:
        """The array that says who is visible `[batch heads query key]`, or None if that does not
        fit the argument."""
        values: Array = np.where(visible, self.visible, self.hidden)
        for layout in self.argument.layouts:
            laid = to_layout(values, layout, shape, broadcast=False)
            if laid is not None:
                return self.form.array(laid)
        return None


def blockings(lab: Laboratory, argument: MaskArgument) -> Iterator[Blocking]:
    """The forms with which the argument blocks: booleans or 0 and 1, and 0 with −inf."""
    for form in (BOOL, ZERO_ONE):
        value = examined(lab, argument, form).value
        if value in ATTENDING:
            yield Blocking(argument, form, 1.0, 0.0)
            break
        if value in BLOCKING:
            yield Blocking(argument, form, 0.0, 1.0)
            break
    if examined(lab, argument, ZERO_INFINITE).value == ADDED:
        yield Blocking(argument, ZERO_INFINITE, 0.0, -np.inf)


def blocking(lab: Laboratory, argument: MaskArgument) -> Blocking | None:
    """The first of them."""
    return next(blockings(lab, argument), None)


MASKS = Experiment(
    Topic(
        "masks",
        "What a mask means",
        "What does each mask argument do with True, 0 and 1, 0 and −inf, large negative numbers?",
    ),
    meanings,
    place=10,
    every_mode=True,
)
