"""The experiments: what is asked, and in which modes."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from conformance.card import Entry
from conformance.dtypes import Array
from conformance.errors import UnknownName
from conformance.interface.adapter import Adapter, Mode
from conformance.probes.causal import causal
from conformance.probes.combinations import pairs
from conformance.probes.degenerate import degenerate, layouts
from conformance.probes.dropout import dropout
from conformance.probes.laboratory import Laboratory
from conformance.probes.leaks import leaks
from conformance.probes.masked_rows import masked_rows
from conformance.probes.masks import meanings
from conformance.probes.repeatability import repeatability
from conformance.probes.same_mask import same_mask
from conformance.probes.shapes import coinciding_sizes, different_sizes
from conformance.probes.weights import returned

Made = Iterator[Entry] | Iterator[tuple[Entry, Array | None]]


@dataclass
class Findings:
    """What an experiment found: entries, and arrays by the entry's subject."""

    entries: list[Entry] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One question to an implementation.

    Attributes:
        name: as in `--case probe/NAME`.
        title: for a card.
        question: what it asks, in a sentence.
        make: runs it.
        every_mode: whether modes may differ; else the first is asked.
        costly: whether it needs many shapes, each of which costs seconds where a framework
            compiles every operation: then the first mode is asked there.
    """

    name: str
    title: str
    question: str
    make: Callable[[Laboratory], Made]
    every_mode: bool = False
    costly: bool = False

    @property
    def id(self) -> str:
        """The case id under which it is recorded."""
        return f"probe/{self.name}"

    def modes(self, adapter: Adapter) -> tuple[Mode, ...]:
        """Those of the adapter in which it is worth asking."""
        if not self.every_mode or (self.costly and adapter.compiles):
            return tuple(adapter.modes[:1])
        # Nothing is compiled here, so a mode that differs in that only is the same again.
        return tuple(mode for mode in adapter.modes if not mode.optimised)

    def run(self, lab: Laboratory) -> Findings:
        """All entries; raises `Unsupported` where there is nothing to ask."""
        found = Findings()
        for made in self.make(lab):
            if isinstance(made, Entry):
                found.entries.append(made)
                continue
            entry, array = made
            found.entries.append(entry)
            if array is not None:
                found.arrays[entry.subject] = array
        return found


EXPERIMENTS = (
    Experiment(
        "masks",
        "What a mask means",
        "What does each mask argument do with True, 0 and 1, 0 and −inf, large negative numbers?",
        meanings,
        every_mode=True,
    ),
    Experiment(
        "same-mask",
        "Somebody else's mask",
        "One causal mask, written in three ways: who sees the future if it is handed over as is?",
        same_mask,
    ),
    Experiment(
        "masked-rows",
        "A query that may attend nothing",
        "What does it get: NaN, zeros, the output bias, a mean? And what becomes of gradients?",
        masked_rows,
        every_mode=True,
    ),
    Experiment(
        "causal",
        "The causal flag",
        "Where is its triangle if lengths differ, and what becomes of a mask beside it?",
        causal,
        every_mode=True,
    ),
    Experiment(
        "pairs",
        "Two masks at once",
        "Do two mask arguments combine, or does one win?",
        pairs,
        every_mode=True,
    ),
    Experiment(
        "shapes",
        "Shapes of a mask",
        "Which shapes does each mask argument take, and for which axes?",
        different_sizes,
    ),
    Experiment(
        "coinciding-sizes",
        "Shapes where sizes coincide",
        "For which axes is a mask taken where two axes have the same size?",
        coinciding_sizes,
    ),
    Experiment(
        "leaks",
        "NaN behind the mask",
        "Does NaN or an infinity in a blocked key or value reach the output or a gradient?",
        leaks,
        every_mode=True,
    ),
    Experiment(
        "weights",
        "Returned weights",
        "Are they for each head, do they sum to 1, are they the weights that were applied?",
        returned,
        every_mode=True,
    ),
    Experiment(
        "dropout",
        "Dropout",
        "Where is it active, how does it scale, what shares a draw?",
        dropout,
        every_mode=True,
    ),
    Experiment(
        "degenerate-sizes",
        "Axes of size 0 and 1",
        "What comes of an empty batch, of no query, of no key, of one key?",
        degenerate,
        every_mode=True,
        costly=True,
    ),
    Experiment(
        "input-layouts",
        "Layout of the input",
        "Is input without a batch axis taken, is there sequence-first input?",
        layouts,
    ),
    Experiment(
        "repeatability",
        "The same again",
        "Same bits twice, alone and inside a batch, strided, eager and compiled?",
        repeatability,
        every_mode=True,
    ),
)


def find_experiments(pattern: str) -> tuple[Experiment, ...]:
    """Those whose id is or matches the pattern, or begins with it; () if none."""
    return tuple(
        item
        for item in EXPERIMENTS
        if item.id.startswith(pattern) or fnmatch.fnmatchcase(item.id, pattern)
    )


def experiment(name: str) -> Experiment:
    """By name, with or without "probe/"; raises `UnknownName`."""
    known = {item.name: item for item in EXPERIMENTS}
    wanted = name.removeprefix("probe/")
    if wanted not in known:
        raise UnknownName("experiment", name, known)
    return known[wanted]
