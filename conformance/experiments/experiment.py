"""The experiments: what is asked, and in which modes."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from conformance.adapter.base import Adapter, Mode
from conformance.definition.dtypes import Array
from conformance.errors import UnknownName
from conformance.experiments.causal import causal
from conformance.experiments.combinations import pairs
from conformance.experiments.degenerate import degenerate, layouts
from conformance.experiments.dropout import dropout
from conformance.experiments.laboratory import Laboratory
from conformance.experiments.leaks import leaks
from conformance.experiments.masked_rows import masked_rows
from conformance.experiments.masks import meanings
from conformance.experiments.repeatability import repeatability
from conformance.experiments.same_mask import same_mask
from conformance.experiments.shapes import coinciding_sizes, different_sizes
from conformance.experiments.weights import returned
from conformance.records.card import TOPICS, Entry, Topic

Made = Iterator[Entry] | Iterator[tuple[Entry, Array | None]]


@dataclass
class Findings:
    """What an experiment found: entries, and arrays by the text of the entry's subject."""

    entries: list[Entry] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One question to an implementation.

    Attributes:
        topic: what it is about.
        make: runs it.
        every_mode: whether modes may differ; else the first is asked.
        costly: whether it needs many shapes, each of which costs seconds where a framework
            compiles every operation: then the first mode is asked there.
    """

    topic: Topic
    make: Callable[[Laboratory], Made]
    every_mode: bool = False
    costly: bool = False

    @property
    def name(self) -> str:
        """As in `--case probe/NAME`."""
        return self.topic.name

    @property
    def id(self) -> str:
        """The case id under which it is recorded."""
        return self.topic.id

    def modes(self, adapter: Adapter) -> tuple[Mode, ...]:
        """Those of the adapter in which it is worth asking."""
        if not self.every_mode or (self.costly and adapter.compiles):
            return tuple(adapter.modes[:1])
        # Nothing is compiled here, so a mode that differs in that only is the same again.
        return tuple(mode for mode in adapter.modes if not mode.optimised)

    def run(self, lab: Laboratory) -> Findings:
        """All entries.

        Raises:
            Unsupported: there is nothing to ask.
            NoAnswer: not even the plain problem is answered.
        """
        lab.plain()
        found = Findings()
        for made in self.make(lab):
            entry, array = (made, None) if isinstance(made, Entry) else made
            found.entries.append(entry)
            if array is not None:
                found.arrays[str(entry.subject)] = array
        return found


_MAKERS: dict[str, tuple[Callable[[Laboratory], Made], bool, bool]] = {
    "masks": (meanings, True, False),
    "same-mask": (same_mask, False, False),
    "masked-rows": (masked_rows, True, False),
    "causal": (causal, True, False),
    "pairs": (pairs, True, False),
    "shapes": (different_sizes, False, False),
    "coinciding-sizes": (coinciding_sizes, False, False),
    "leaks": (leaks, True, False),
    "weights": (returned, True, False),
    "dropout": (dropout, True, False),
    "degenerate-sizes": (degenerate, True, True),
    "input-layouts": (layouts, False, False),
    "repeatability": (repeatability, True, False),
}
"""Topic to maker, `every_mode` and `costly`."""

EXPERIMENTS = tuple(Experiment(topic, *_MAKERS[topic.name]) for topic in TOPICS)


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
