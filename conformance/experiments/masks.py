"""What each mask argument means, in every form that people hand over."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from conformance.adapter.arguments import MaskArgument, Native
from conformance.definition.dtypes import Array
from conformance.experiments.code import difference, hiding
from conformance.experiments.code import mask as mask_lines
from conformance.experiments.forms import FORMS, Form, own_forms, telling
from conformance.experiments.laboratory import Laboratory, Refused, Seen
from conformance.experiments.meaning import READINGS, UNEXPLAINED, meaning, rows_changed
from conformance.records.card import Entry

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
    subject = f"{argument.name}, {form.name}" + (f" (inputs {dtype})" if dtype else "")
    problem = lab.problem(dtype=dtype)
    fed, laid = telling(form, argument, problem.shape)
    found = lab.ask(problem, {argument.name: form.array(laid)})
    # What an adapter declares of numbers is said of the implementation's own dtype.
    own = not dtype or form.dtype in ("own", "bool")
    declared = declaration(argument, form) if own else ""
    if isinstance(found, Refused):
        return _entry(lab, argument, form, subject, "rejected", found.told, declared)
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
    subject: str,
    value: str,
    evidence: str,
    declared: str,
) -> Entry:
    # Whole numbers may be refused where fractions are taken: many libraries ask for floats.
    if value == "rejected" and "int" in form.dtype:
        declared = ""
    agrees = not declared or value == declared
    code = "" if "inputs" in subject else _code(lab, argument, form, value)
    return Entry(subject, value, evidence, declared, agrees, code)


def _code(lab: Laboratory, argument: MaskArgument, form: Form, value: str) -> str:
    """Lines in which the argument hides token 0, as far as it can in this form."""
    layout = argument.layouts[0]
    if argument not in lab.adapter.mask_arguments:
        return ""
    if value == "ignored":
        made = mask_lines(layout, form.dtype, 0.0, form.values[-1], "marks token 0")
        return difference(lab, argument.name, made, "0.0: it is ignored")
    fill, mark = {
        "blocks": (0.0, form.values[-1]),
        "attends": (form.values[-1], 0.0),
        "added": (0.0, min(form.values)),
    }.get(value, (0.0, 0.0))
    if fill == mark or "key" not in layout:
        return ""
    made = mask_lines(layout, form.dtype, fill, mark, "marks token 0")
    return hiding(lab, argument.name, made, "0.0: token 0 is hidden from the others")


def declaration(argument: MaskArgument, form: Form) -> str:
    """What the adapter says about this form, in the words of a meaning; "" for nothing.

    Of "0 or 1 only" there is nothing to compare with in other forms.
    """
    if form.dtype == "bool":
        return argument.true or ""
    if "int" in form.dtype and argument.whole is not None:
        argument = dataclasses.replace(argument, number=argument.whole)
    if argument.number == "added":
        return "added"
    values = np.array(form.values)
    attends = argument.attending(values)
    if attends is None:
        return ""
    if attends.all() or not attends.any():
        return "ignored" if attends.all() else "blocks everything"
    return next(name for name, who in READINGS.items() if (who(values) == attends).all())


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


def _rows(lab: Laboratory, seen: Seen, fed: Array) -> str:
    """An argument over queries: marked rows, or the others, lose their weights."""
    changed = rows_changed(lab, seen)
    marked = np.broadcast_to(fed[:, 0, :, 0], changed.shape)
    for name, expected in (
        ("ignored", np.zeros_like(changed)),
        ("attends", marked == 0),
        ("blocks", marked != 0),
        ("added", np.isneginf(marked) | (marked <= -1e3)),
    ):
        if (changed == expected).all():
            return name
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
