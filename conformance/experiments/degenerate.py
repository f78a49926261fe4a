"""Axes of size 0 and 1, input without a batch axis, and sequence-first input."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from conformance.errors import Unsupported
from conformance.experiments.experiment import Experiment
from conformance.experiments.masked_rows import NAN, OUTPUT_BIAS, ZEROS
from conformance.records.findings import Entry, Topic
from conformance.records.phrase import Phrase
from conformance.requirements.laboratory import (
    REFUSED,
    SOMETHING_ELSE,
    Laboratory,
    Refused,
    numbers,
)

UNBATCHED, SEQUENCE_FIRST = Phrase("input.unbatched"), Phrase("input.sequence-first")
TAKEN = Phrase("input.taken")


def degenerate(lab: Laboratory) -> Iterator[Entry]:
    """What there is no attention of: an empty batch, no query, no key; and a single key."""
    empty: list[tuple[str, dict[str, int]]] = [("no-batch", {"batch": 0})]
    if lab.sharing == "self":
        empty.append(("no-length", {"key": 0}))
    else:
        empty += [("no-query", {"query": 0}), ("no-key", {"key": 0})]
    for name, sizes in [*empty, ("one-key", {"key": 1})]:
        subject = Phrase(f"size.{name}")
        found = lab.ask(lab.problem(lab.sizes(**sizes)), gradients=True)
        if isinstance(found, Refused):
            yield Entry(subject, REFUSED, found.told)
            continue
        output = found.answer.output
        if np.isnan(output).any():
            value = NAN
        elif not output.size:
            value = Phrase("output.empty")
        elif sizes.get("key") == 0:
            value = OUTPUT_BIAS if output.any() else ZEROS
        else:
            value = Phrase("output.value") if (found.applied == 1).all() else SOMETHING_ELSE
        lost = [n for n, a in found.answer.gradients.items() if not np.isfinite(a).all()]
        told_more = f"; gradients not finite: {', '.join(lost)}" if lost else ""
        yield Entry(subject, value, f"output of shape {list(output.shape)}{told_more}")


def layouts(lab: Laboratory) -> Iterator[Entry]:
    """Input as `[length width]`, and as `[length batch width]` where there is a switch."""
    sizes = lab.sizes(batch=1)
    plain = lab.plain(sizes)
    found = lab.ask(plain.problem, unbatched=True)
    if isinstance(found, Refused):
        yield Entry(UNBATCHED, REFUSED, found.told)
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
        yield Entry(SEQUENCE_FIRST, REFUSED, other.told)
    else:
        same = lab.alike(other, lab.plain().applied)
        yield Entry(SEQUENCE_FIRST, TAKEN if same else SOMETHING_ELSE, f"mode {name}")


DEGENERATE_SIZES = Experiment(
    Topic(
        "degenerate-sizes",
        "Axes of size 0 and 1",
        "What comes of an empty batch, of no query, of no key, of one key?",
    ),
    degenerate,
    place=110,
    every_mode=True,
    costly=True,
)


INPUT_LAYOUTS = Experiment(
    Topic(
        "input-layouts",
        "Layout of the input",
        "Is input without a batch axis taken, is there sequence-first input?",
    ),
    layouts,
    place=120,
)
