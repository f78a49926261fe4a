"""Experiments on axes of size 0 and 1, on unbatched input, and on sequence-first input."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from conformance.errors import Unsupported
from conformance.experiments.experiment import topic
from conformance.experiments.masked_rows import NAN, OUTPUT_BIAS, ZEROS
from conformance.records.findings import Entry
from conformance.records.phrase import Phrase
from conformance.requirements.laboratory import (
    SOMETHING_ELSE,
    Laboratory,
    Refused,
    numbers,
)

UNBATCHED, SEQUENCE_FIRST = Phrase("input.unbatched"), Phrase("input.sequence-first")
TAKEN = Phrase("input.taken")


@topic(
    "degenerate-sizes",
    "Axes of size 0 and 1",
    "What does it return for an empty batch, no query, no key, or one key?",
    place=110,
    every_mode=True,
    revision=3,
    costly=True,
)
def degenerate(lab: Laboratory) -> Iterator[Entry]:
    """Pass an empty batch, no query, no key, and a single key.
    Examine the output, and whether the gradients are finite."""
    empty: list[tuple[str, dict[str, int]]] = [("no-batch", {"batch": 0})]
    if lab.sharing == "self":
        empty.append(("no-length", {"key": 0}))
    else:
        empty += [("no-query", {"query": 0}), ("no-key", {"key": 0})]
    for name, sizes in [*empty, ("one-key", {"key": 1})]:
        subject = Phrase(f"size.{name}")
        found = lab.ask(lab.problem(lab.sizes(**sizes)), gradients=True)
        if isinstance(found, Refused):
            yield Entry(subject, found.value, found.told)
            continue
        output = found.answer.output
        if np.isnan(output).any():
            value = NAN
        elif not output.size:
            value = Phrase("output.empty")
        elif sizes.get("key") == 0:
            value = OUTPUT_BIAS if output.any() else ZEROS
        else:
            whole = lab.alike(found, np.ones_like(found.applied))
            value = Phrase("output.value") if whole else SOMETHING_ELSE
        lost = [n for n, a in found.answer.gradients.items() if not np.isfinite(a).all()]
        told_more = f"; gradients not finite: {', '.join(lost)}" if lost else ""
        yield Entry(subject, value, f"output of shape {list(output.shape)}{told_more}")


@topic(
    "input-layouts",
    "Layout of the input",
    "Does it take input without a batch axis, and input with the sequence first?",
    place=120,
    revision=2,
)
def layouts(lab: Laboratory) -> Iterator[Entry]:
    """Pass inputs as `[length width]`, and as `[length batch width]`.
    The latter are passed in the mode that the adapter declares for them. Compare the weights with
    those for `[batch length width]`."""
    sizes = lab.sizes(batch=1)
    plain = lab.plain(sizes)
    found = lab.ask(plain.problem, unbatched=True)
    if isinstance(found, Refused):
        yield Entry(UNBATCHED, found.value, found.told)
    else:
        same = lab.alike(found, plain.applied)
        told = f"entry 0, head 0, query 0: weights {numbers(found.applied[0, 0, 0])}"
        yield Entry(UNBATCHED, TAKEN if same else SOMETHING_ELSE, told)
    name = lab.adapter.sequence_first
    if not name:
        yield Entry(SEQUENCE_FIRST, Phrase("input.no-switch"), "the adapter names no mode for it")
        return
    mode = next((mode for mode in lab.adapter.modes if mode.name == name), None)
    if mode is None:
        raise Unsupported(f"the adapter has no mode {name!r}")
    other = lab.ask(lab.problem(), mode=dataclasses.replace(mode, weights=lab.mode.weights))
    if isinstance(other, Refused):
        yield Entry(SEQUENCE_FIRST, other.value, other.told)
    else:
        same = lab.alike(other, lab.plain().applied)
        yield Entry(SEQUENCE_FIRST, TAKEN if same else SOMETHING_ELSE, f"mode {name}")
