"""Explore every mode of an implementation, and add the findings to those of earlier runs."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from conformance.adapter.base import Adapter
from conformance.cases.casefile import Failure, store
from conformance.errors import ConformanceError, Unavailable
from conformance.explore.classes import Class
from conformance.explore.search import Options, Search
from conformance.explore.shrinking import Small, shrink
from conformance.explore.trial import Deviation, Trial
from conformance.records.findings import INFINITE
from conformance.records.record import (
    EXPLORATION,
    Exploration,
    Found,
    read_exploration,
    write_document,
)

MOST_CLASSES = 20
"""The most classes of deviations to collect for one implementation; more can wait."""


Known = Callable[[Trial, Deviation], bool]
"""A function that returns whether a deviation is already known, and thus not a finding."""


def survey(
    adapter: Adapter,
    options: Options,
    seconds: float,
    folder: Path,
    known: Known = lambda trial, deviation: False,
) -> list[Found]:
    """Explore each mode for some seconds, write NAME.json and case files, and return new findings.

    For each class of deviations, shrinking a problem takes at most half of `seconds` in addition. A
    deviation that is `known`, either as drawn or after shrinking, is not kept.

    Raises:
        Unsupported: the adapter supports none of the simplest problems.
        Unavailable: the framework or the device is missing.
        ConformanceError: the record cannot be read or written.
    """
    path = folder / f"{adapter.name}.json"
    earlier = read_exploration(path) if path.exists() else None
    found = [msgspec.structs.replace(one, times=0) for one in earlier.found] if earlier else []
    before = {one.case for one in found}
    answered: dict[str, int] = {}
    folder.mkdir(parents=True, exist_ok=True)
    modes = [mode.name for mode in adapter.modes if not options.modes or mode.name in options.modes]
    for name in modes:
        wanted = dataclasses.replace(options, modes=(name,))
        search = Search(adapter, wanted, time.monotonic() + seconds)
        try:
            for trial, wrong in search:
                began = time.monotonic()
                new = next((one for one in wrong if not known(trial, one)), None)
                if new is not None:
                    _sort(adapter, trial, new, found, began + seconds / 2, folder, known)
                search.until += time.monotonic() - began
        except Unavailable:
            if not answered:
                raise
            continue
        answered[name] = search.answered
    exploration = Exploration(
        EXPLORATION,
        adapter.name,
        adapter.versions(),
        options.device,
        options.seed,
        seconds,
        answered,
        found,
    )
    try:
        write_document(path, exploration)
    except OSError as error:
        raise ConformanceError(f"{path}: cannot be written ({error.strerror})") from error
    return [one for one in found if one.case not in before]


def _sort(
    adapter: Adapter,
    trial: Trial,
    deviation: Deviation,
    found: list[Found],
    until: float,
    folder: Path,
    known: Known,
) -> None:
    """Count the deviation in its class if `found` has that, or else add a new class for it.

    No class is added if the deviation is `known` after shrinking, or if there are `MOST_CLASSES`.
    """
    if _counted(trial, deviation, found) or len(found) >= MOST_CLASSES:
        return
    small = shrink(adapter, trial, deviation, until, modes=(trial.mode.name,))
    # A deviation that looked new because of its size may belong to a known class once shrunk.
    if _counted(small.trial, small.deviation, found) or known(small.trial, small.deviation):
        return
    numbers = {int(one.case.rpartition("-")[2].partition(".")[0]) for one in found}
    new = _kept(adapter, small, max(numbers, default=0) + 1, folder)
    # Conversely, earlier findings that have more features may belong to the new class.
    narrower = [one for one in found if _class(new).includes(_class(one))]
    for one in narrower:
        found.remove(one)
        (folder / one.case).unlink(missing_ok=True)
    found.append(msgspec.structs.replace(new, times=1 + sum(one.times for one in narrower)))


def _class(one: Found) -> Class:
    return Class(one.dtype, tuple(one.nature), frozenset(one.features), tuple(one.sizes))


def _counted(trial: Trial, deviation: Deviation, found: list[Found]) -> bool:
    """Count the deviation in the known class that includes it; return whether there is one."""
    for place, one in enumerate(found):
        if _class(one).has(trial, deviation):
            modes = [*one.modes, *({trial.mode.name} - {*one.modes})]
            found[place] = msgspec.structs.replace(one, times=one.times + 1, modes=modes)
            return True
    return False


def _kept(adapter: Adapter, small: Small, number: int, folder: Path) -> Found:
    """Store a shrunk problem as a case file, and return its finding."""
    trial, deviation = small.trial, small.deviation
    problem, versions = trial.problem, adapter.versions()
    failure = Failure(
        adapter.name,
        problem.dtype,
        trial.mode.name,
        deviation.requirement,
        deviation.text,
        versions,
    )
    name = f"{adapter.name}-{number}"
    why = f"Found by a search: {deviation.requirement or 'it raises'}: {deviation.text}"
    store(folder / f"{name}.case", f"found-{number}", problem, why, failure)
    finite = math.isfinite(deviation.ratio) and deviation.ratio < INFINITE
    its = Class.of(trial, deviation)
    return Found(
        dtype=its.dtype,
        nature=list(its.nature),
        features=sorted(its.features),
        sizes=list(its.sizes),
        modes=[trial.mode.name],
        array=deviation.array,
        detail=deviation.text,
        ratio=deviation.ratio if finite else None,
        times=1,
        case=f"{name}.case",
        since=versions,
    )
