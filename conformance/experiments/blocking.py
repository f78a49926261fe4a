"""How to block a key with an argument, as found out and not as declared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from conformance.adapter import layouts
from conformance.adapter.arguments import MaskArgument, Native, to_layout
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.problem import Shape
from conformance.experiments.forms import BOOL, ZERO_INFINITE, ZERO_ONE, Form
from conformance.experiments.laboratory import Laboratory
from conformance.experiments.masks import examined
from conformance.experiments.meaning import ADDED, ATTENDING, BLOCKING
from conformance.records.phrase import Argument


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
