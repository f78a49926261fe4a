"""Experiment on the meaning of each mask argument, in every form in which users pass masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from conformance.adapter import layouts
from conformance.adapter.arguments import MaskArgument, Native, to_layout
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.problem import Shape
from conformance.experiments.code import difference, hiding
from conformance.experiments.code import mask as mask_lines
from conformance.experiments.experiment import topic
from conformance.records.findings import Entry
from conformance.records.phrase import Argument, Phrase
from conformance.requirements.laboratory import Laboratory
from conformance.requirements.meaning import (
    ADDED,
    ATTENDING,
    ATTENDS,
    BLOCKING,
    BLOCKS,
    FORMS,
    IGNORED,
    Form,
    forms_of,
    own_forms,
    zero_one,
)
from conformance.requirements.polarity import examined

HALF = ("bfloat16", "float16")


@topic(
    "masks",
    "What a mask means",
    "What does each mask argument do with True, 0 and 1, 0 and −inf, large negative numbers?",
    place=10,
    every_mode=True,
    shared=True,
    revision=2,
)
def meanings(lab: Laboratory) -> Iterator[Entry]:
    """Pass masks in every form that users pass, and find the meaning that predicts the weights.
    The forms are booleans, 0 and 1 in several dtypes, 0 and −inf, and 0 and −1e9 or the least
    finite number. Repeat this for inputs in half precision."""
    half = next((name for name in HALF if name != lab.dtype and lab.has(name)), "")
    for argument in lab.arguments():
        for form in FORMS:
            entry = examined(lab, argument, form)
            yield msgspec.structs.replace(entry, code=_code(lab, argument, form, entry.value))
        if half:
            for form in own_forms(half):
                yield examined(lab, argument, form, half)


def _code(lab: Laboratory, argument: MaskArgument, form: Form, value: Phrase) -> str:
    """Return code that shows the meaning by hiding token 0, or that shows that it is ignored.

    The result is "" if this form hides nothing, or if a framework attaches the mask to tensors.
    """
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


# How to block a key with an argument, as observed, not as declared


@dataclass(frozen=True)
class Blocking:
    """A form of a mask argument, with the numbers that leave a key visible and that hide it."""

    argument: MaskArgument
    form: Form
    visible: float
    hidden: float

    @property
    def about(self) -> dict[str, Argument]:
        """The arguments of a `Phrase` about this mask argument and form."""
        return {"argument": self.argument.name, "form": self.form.phrase}

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the argument's first layout."""
        return layouts.axes(self.argument.layouts[0])

    def native(
        self,
        visible: BoolArray,
        shape: Shape,
        among: Sequence[str] = (),
        *,
        broadcast: bool = False,
    ) -> Native | None:
        """Return the mask to pass for a pattern of visible keys, or None if no layout fits it.

        Args:
            visible: the pattern, `[batch heads query key]`; axes may have size 1.
            shape: the shape of the problem.
            among: the layouts to try in this order; by default, all of the argument's.
            broadcast: whether axes of size 1 keep that size.
        """
        values: Array = np.where(visible, self.visible, self.hidden)
        for layout in among or self.argument.layouts:
            laid = to_layout(values, layout, shape.logits, broadcast=broadcast)
            if laid is not None:
                return self.form.array(laid)
        return None


def blockings(lab: Laboratory, argument: MaskArgument) -> Iterator[Blocking]:
    """Yield the forms in which the argument was observed to block keys.

    The forms to try are booleans or, if these do not block keys, 0 and 1; and then 0 and −inf.
    """
    boolean, ones, infinite, *_ = forms_of(lab.dtype)
    for form in (boolean, zero_one(argument, ones)):
        value = examined(lab, argument, form).value
        if value in ATTENDING:
            yield Blocking(argument, form, 1.0, 0.0)
            break
        if value in BLOCKING:
            yield Blocking(argument, form, 0.0, 1.0)
            break
    if examined(lab, argument, infinite).value == ADDED:
        yield Blocking(argument, infinite, 0.0, -np.inf)


def blocking(lab: Laboratory, argument: MaskArgument) -> Blocking | None:
    """Return the first of the `blockings` of the argument, or None if there is none."""
    return next(blockings(lab, argument), None)
