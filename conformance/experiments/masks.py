"""Determine what each mask argument means, in every form that users pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from conformance.adapter import layouts
from conformance.adapter.arguments import MaskArgument, Native, to_layout
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.problem import Shape
from conformance.experiments.code import difference, hiding
from conformance.experiments.code import mask as mask_lines
from conformance.experiments.experiment import Experiment
from conformance.records.findings import Entry, Topic
from conformance.records.phrase import Argument, Phrase
from conformance.requirements.laboratory import Laboratory
from conformance.requirements.meaning import (
    ADDED,
    ATTENDING,
    ATTENDS,
    BLOCKING,
    BLOCKS,
    BOOL,
    FORMS,
    IGNORED,
    ZERO_INFINITE,
    ZERO_ONE,
    Form,
    own_forms,
)
from conformance.requirements.polarity import examined

HALF = ("bfloat16", "float16")


def meanings(lab: Laboratory) -> Iterator[Entry]:
    """One entry for each argument and form; in one half precision too."""
    half = next((name for name in HALF if name != lab.dtype and lab.has(name)), "")
    for argument in lab.arguments():
        for form in FORMS:
            entry = examined(lab, argument, form)
            yield msgspec.structs.replace(entry, code=_code(lab, argument, form, entry.value))
        if half:
            for form in own_forms(half):
                yield examined(lab, argument, form, half)


def _code(lab: Laboratory, argument: MaskArgument, form: Form, value: Phrase) -> str:
    """Return code in which the argument hides token 0, as far as this form can."""
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


# How to block a key with an argument, as found out and not as declared


@dataclass(frozen=True)
class Blocking:
    """A form of an argument, with the values that hide a key and that leave it visible."""

    argument: MaskArgument
    form: Form
    visible: float
    hidden: float

    @property
    def about(self) -> dict[str, Argument]:
        """Return the arguments of a phrase about this form."""
        return {"argument": self.argument.name, "form": self.form.phrase}

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the argument's first layout."""
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
    """Return the forms with which the argument blocks: booleans, 0 and 1, or 0 and −inf."""
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
    """Return the first of the forms with which the argument blocks, or None."""
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
