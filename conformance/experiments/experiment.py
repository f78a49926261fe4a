"""Experiments: each determines a convention of an implementation by calling it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from conformance.adapter.base import Adapter, Mode
from conformance.definition.dtypes import Array
from conformance.records.findings import Entry, Topic
from conformance.requirements.laboratory import Laboratory

Made = Iterator[Entry] | Iterator[tuple[Entry, Array | None]]


@dataclass
class Findings:
    """The findings of an experiment: entries, and arrays by the text of the entry's subject."""

    entries: list[Entry] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One question to an implementation.

    Attributes:
        topic: what it is about.
        make: runs it.
        place: where it stands on a card, the smallest first.
        every_mode: whether modes may differ; else the first is asked.
        costly: whether it needs many shapes, each of which costs seconds where a framework
            compiles every operation: then the first mode is asked there.
    """

    topic: Topic
    make: Callable[[Laboratory], Made]
    place: int
    every_mode: bool = False
    costly: bool = False

    @property
    def name(self) -> str:
        """The name, as in `--case probe/NAME`."""
        return self.topic.name

    @property
    def id(self) -> str:
        """The case id under which the experiment is recorded."""
        return self.topic.id

    def modes(self, adapter: Adapter) -> tuple[Mode, ...]:
        """Return the modes of the adapter in which the experiment is worth running."""
        if not self.every_mode or (self.costly and adapter.compiles):
            return tuple(adapter.modes[:1])
        # Nothing is compiled here, so a mode that differs in that only is the same again.
        return tuple(mode for mode in adapter.modes if not mode.optimised)

    def run(self, lab: Laboratory) -> Findings:
        """Return all entries.

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
