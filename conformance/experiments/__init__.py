"""All experiments, which find out the conventions of an implementation by calling it.

An experiment calls one implementation in one mode, and yields entries for the implementation's
convention card. Each entry is one observed convention. An experiment relies on the adapter's
declarations only to make calls, for example on the names of arguments. If the adapter also declares
the convention, the observation is compared with the declaration, and a difference is a deviation.
`conformance.requirements.laboratory` explains how attention weights are observed.

The experiments are collected from the modules of this package: every `Experiment` in a module is
found without further registration.
"""

from __future__ import annotations

import fnmatch
import importlib
import pkgutil
from collections.abc import Iterator

from conformance.errors import UnknownName
from conformance.experiments.experiment import Experiment, Findings, Question, settled
from conformance.records.findings import Topic

__all__ = [
    "EXPERIMENTS",
    "TOPICS",
    "Experiment",
    "Findings",
    "Question",
    "experiment",
    "find_experiments",
    "settled",
]


def _defined() -> Iterator[Experiment]:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        found = vars(importlib.import_module(module.name)).values()
        yield from (item for item in found if isinstance(item, Experiment))


EXPERIMENTS = tuple(sorted(_defined(), key=lambda item: item.place))
"""All experiments, in the order in which a convention card shows their entries."""

TOPICS: tuple[Topic, ...] = tuple(item.topic for item in EXPERIMENTS)
"""The topics of all experiments, in the same order."""


def find_experiments(pattern: str) -> tuple[Experiment, ...]:
    """Return the experiments whose id begins with the pattern, or matches it as a glob."""
    return tuple(
        item
        for item in EXPERIMENTS
        if item.id.startswith(pattern) or fnmatch.fnmatchcase(item.id, pattern)
    )


def experiment(name: str) -> Experiment:
    """Return the experiment with this name, with or without "probe/", or raise `UnknownName`."""
    known = {item.name: item for item in EXPERIMENTS}
    wanted = name.removeprefix("probe/")
    if wanted not in known:
        raise UnknownName("experiment", name, known)
    return known[wanted]
