"""Conventions by experiment: what an implementation does with what people hand to it.

An experiment asks one implementation, in one mode, and yields entries of its convention card. It
believes no declaration; where an entry has one beside it, the two are compared, and a difference is
a deviation of the adapter. How weights are seen: `conformance.requirements.laboratory`.

Every `Experiment` that a module of this package defines is one of them; nothing else names it.
"""

from __future__ import annotations

import fnmatch
import importlib
import pkgutil
from collections.abc import Iterator

from conformance.errors import UnknownName
from conformance.experiments.experiment import Experiment, Findings
from conformance.records.findings import Topic

__all__ = ["EXPERIMENTS", "TOPICS", "Experiment", "Findings", "experiment", "find_experiments"]


def _defined() -> Iterator[Experiment]:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        found = vars(importlib.import_module(module.name)).values()
        yield from (item for item in found if isinstance(item, Experiment))


EXPERIMENTS = tuple(sorted(_defined(), key=lambda item: item.place))
"""In the order of a card."""

TOPICS: tuple[Topic, ...] = tuple(item.topic for item in EXPERIMENTS)
"""What they are about."""


def find_experiments(pattern: str) -> tuple[Experiment, ...]:
    """Return those whose id is or matches the pattern, or begins with it; () if none."""
    return tuple(
        item
        for item in EXPERIMENTS
        if item.id.startswith(pattern) or fnmatch.fnmatchcase(item.id, pattern)
    )


def experiment(name: str) -> Experiment:
    """Return the experiment of this name, with or without "probe/"; raises `UnknownName`."""
    known = {item.name: item for item in EXPERIMENTS}
    wanted = name.removeprefix("probe/")
    if wanted not in known:
        raise UnknownName("experiment", name, known)
    return known[wanted]
