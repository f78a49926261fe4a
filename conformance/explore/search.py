"""Draw problems until the time is up, and collect those that an implementation gets wrong.

For a given seed, problem number n is the same in every search with the same adapter, dtypes and
modes, however long the search runs.

`survey` searches in each requested mode and reports each class of deviations once. A shrunk problem
is assumed to have only the features and sizes that its deviation needs. Any other problem that has
these features, is at least as large and deviates in the same way is assumed to show the same
defect. This may hide a second defect behind the first, but one defect is not reported again for
every problem.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from conformance.adapter.base import Adapter
from conformance.definition.problem import Problem
from conformance.errors import ConformanceError, Unavailable, Unsupported
from conformance.explore.drawing import Drawer
from conformance.explore.shrinking import shrink
from conformance.explore.trial import ORDER, Trial, TrialDeviation, askable, deviations, ways
from conformance.records.record import (
    EXPLORATION,
    Exploration,
    Found,
    read_exploration,
    write_document,
)

MOST_EXAMPLES = 10**6
MOST_DRAWN = 20
"""A search ends after drawing more than this many times `SearchOptions.examples` problems."""

SIZES = ("batch", "query_length", "key_length", "kv_heads", "heads", "head_size")

MOST_CLASSES = 20
"""The most classes of deviations in the record of an implementation; no more are added."""

Known = Callable[[Trial, TrialDeviation], bool]
"""A function that returns whether the deviation of a trial is known and thus not reported."""


@dataclass(frozen=True)
class SearchOptions:
    """The extent of a search.

    Attributes:
        dtypes, modes: the names of the dtypes and modes to search in; empty for all that the
            adapter has.
        device: "cpu" or "gpu".
        seed: the seed with which problems are drawn.
        examples: the number of answered problems after which the search ends.
    """

    dtypes: Sequence[str] = ()
    modes: Sequence[str] = ()
    device: str = "cpu"
    seed: int = 0
    examples: int = MOST_EXAMPLES


@dataclass
class ProblemSearch:
    """A search, which draws problems when iterated over, and yields the trials that fail.

    Attributes:
        until: the deadline, on the clock of `time.monotonic`; it may be moved between two problems.
        started: when the search was created, on the same clock; it may be moved likewise.
        drawn: how many problems were drawn.
        answered: how many of these the implementation supports; it was run on all of them.
        why_not: why the last unsupported problem is not supported; "" if there was none.
    """

    adapter: Adapter
    options: SearchOptions
    until: float
    drawn: int = 0
    answered: int = 0
    why_not: str = ""
    started: float = field(default_factory=time.monotonic)

    def __iter__(self) -> Iterator[tuple[Trial, tuple[TrialDeviation, ...]]]:
        """Yield each trial that fails, with its deviations.

        Raises:
            Unsupported: the adapter supports none of the simplest problems.
            Unavailable: the framework or the device is missing, or no dtype and mode fit.
        """
        pairs = ways(self.adapter, self.options.dtypes, self.options.modes)
        if not pairs:
            raise Unavailable(f"{self.adapter.name} has no such dtype and mode together")
        drawer = Drawer(self.adapter, pairs[0][0], few_shapes=self.adapter.compiles)
        while self.answered < self.options.examples and time.monotonic() < self.until:
            if self.drawn > MOST_DRAWN * self.options.examples:
                return
            random = np.random.default_rng((self.options.seed, self.drawn))
            self.drawn += 1
            dtype, mode = pairs[int(random.integers(len(pairs)))]
            try:
                with np.errstate(all="ignore"):
                    trial = Trial(drawer.draw(random).problem(dtype), mode, self.options.device)
            except (ConformanceError, ValueError):
                continue
            if not askable(trial.problem):
                continue
            try:
                wrong = deviations(self.adapter, trial)
            except Unsupported as reason:
                self.why_not = str(reason)
                continue
            self.answered += 1
            if wrong:
                yield trial, wrong


def features(problem: Problem) -> frozenset[str]:
    """Return the names of what is special about a problem, such as "mask" or "grouped heads"."""
    shape = problem.shape
    present = {
        "mask": problem.mask is not None,
        "bias": problem.attn_bias is not None,
        f"causal {problem.causal}": problem.causal is not None,
        "scale": problem.scale is not None,
        "grouped heads": shape.group > 1,
        "value heads": shape.value_head_size != shape.head_size,
        shape.score: shape.score != "scaled-dot",
    }
    return frozenset(name for name, there in present.items() if there) | set(problem.features)


@dataclass(frozen=True)
class Class:
    """A class of deviations, described by the smallest problem that was found to show one.

    Attributes:
        dtype: the dtype of the smallest problem. A deviation in float32 is expected in every dtype.
        nature: the requirement that is not met and `TrialDeviation.kind`; for an exception, its
            type and the name of the function that raised it.
        features, sizes: the features of the smallest problem, and its sizes in the order of
            `SIZES`. All problems of the class have these features and at least these sizes.
    """

    dtype: str
    nature: tuple[str, ...]
    features: frozenset[str]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, trial: Trial, deviation: TrialDeviation) -> Class:
        """Return the class of a deviation, with the problem of the trial as its smallest one."""
        problem, kind = trial.problem, deviation.kind
        nature = (deviation.requirement, kind) if deviation.requirement else (kind, deviation.array)
        sizes = tuple(getattr(problem.shape, name) for name in SIZES)
        return cls(problem.dtype, nature, features(problem), sizes)

    @classmethod
    def found(cls, one: Found) -> Class:
        """Return the class that `one`, an entry in the record of a survey, describes."""
        return cls(one.dtype, tuple(one.nature), frozenset(one.features), tuple(one.sizes))

    def includes(self, other: Class) -> bool:
        """Return whether every problem of the other class also belongs to this one."""
        return (
            self.nature == other.nature
            and self.dtype in (other.dtype, ORDER[0])
            and self.features <= other.features
            and all(map(int.__le__, self.sizes, other.sizes))
        )


def survey(
    adapter: Adapter,
    options: SearchOptions,
    seconds: float,
    folder: Path,
    known: Known = lambda trial, deviation: False,
) -> list[Found]:
    """Explore each mode for some seconds, write NAME.json and case files, and return new findings.

    NAME is the adapter's name. Findings in an existing NAME.json are kept, unless a new class
    includes them, but their counts `times` begin again at 0. Once some mode has been explored,
    unavailable modes are skipped. Both files are written as soon as a class is found, so that an
    interrupted search keeps it.

    Args:
        seconds: the time for each mode. Shrinking a problem takes up to half as long in addition.
        folder: where to write the files; created if it does not exist.
        known: a function that tells which deviations not to keep; it is asked about a deviation as
            drawn and after shrinking.

    Raises:
        Unsupported: the adapter supports none of the simplest problems.
        Unavailable: the framework or the device is missing, or no dtype and mode fit.
        ConformanceError: the record or a case file cannot be read or written.
        KeyboardInterrupt: Ctrl-C ended the search.
    """
    path = folder / f"{adapter.name}.json"
    earlier = read_exploration(path).found if path.exists() else []
    found = [msgspec.structs.replace(one, times=0) for one in earlier]
    before = {one.case for one in found}
    answered: dict[str, int] = {}
    folder.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        exploration = Exploration(
            schema=EXPLORATION,
            implementation=adapter.name,
            versions=adapter.versions(),
            device=options.device,
            seed=options.seed,
            seconds=seconds,
            answered=answered,
            found=found,
        )
        try:
            write_document(path, exploration)
        except OSError as error:
            raise ConformanceError(f"{path}: cannot be written ({error.strerror})") from error

    for mode in adapter.modes:
        if options.modes and mode.name not in options.modes:
            continue
        wanted = dataclasses.replace(options, modes=(mode.name,))
        search = ProblemSearch(adapter, wanted, time.monotonic() + seconds)
        try:
            for trial, wrong in search:
                began = time.monotonic()
                new = next((one for one in wrong if not known(trial, one)), None)
                if new is not None:
                    _sort(adapter, trial, new, found, began + seconds / 2, folder, known, keep)
                search.until += time.monotonic() - began
        except Unavailable:
            if not answered:
                raise
            continue
        answered[mode.name] = search.answered
    keep()
    return [one for one in found if one.case not in before]


def _sort(
    adapter: Adapter,
    trial: Trial,
    deviation: TrialDeviation,
    found: list[Found],
    until: float,
    folder: Path,
    known: Known,
    keep: Callable[[], None],
) -> None:
    """Count a deviation in a class of `found` that includes it, or shrink it and add a new class.

    If a class includes the shrunk deviation, that one is counted there instead. Nothing is added if
    the shrunk deviation is known, or if `found` already has `MOST_CLASSES` classes. A new class
    gets a case file in `folder`. It replaces the classes that it includes; `keep` then writes the
    record, and their case files are deleted. Shrinking ends at the time `until`.

    Raises:
        KeyboardInterrupt: Ctrl-C ended shrinking.
    """
    if _counted(trial, deviation, found) or len(found) >= MOST_CLASSES:
        return
    small = shrink(adapter, trial, deviation, until, modes=(trial.mode.name,))
    if not small.finished and time.monotonic() <= until:
        raise KeyboardInterrupt
    trial, deviation = small.trial, small.deviation
    # A deviation that looked new because of its size may belong to a known class once shrunk.
    if _counted(trial, deviation, found) or known(trial, deviation):
        return
    numbers = (int(one.case.rpartition("-")[2].partition(".")[0]) for one in found)
    number = max(numbers, default=0) + 1
    file = f"{adapter.name}-{number}.case"
    small.store(adapter, folder / file, f"found-{number}")
    its = Class.of(trial, deviation)
    # Conversely, earlier findings that have more features may belong to the new class.
    narrower = [one for one in found if its.includes(Class.found(one))]
    for one in narrower:
        found.remove(one)
    found.append(
        Found(
            dtype=its.dtype,
            nature=list(its.nature),
            features=sorted(its.features),
            sizes=list(its.sizes),
            modes=[trial.mode.name],
            array=deviation.array,
            detail=deviation.text,
            ratio=deviation.finite_ratio,
            times=1 + sum(one.times for one in narrower),
            case=file,
            since=adapter.versions(),
        )
    )
    keep()
    for one in narrower:
        (folder / one.case).unlink(missing_ok=True)


def _counted(trial: Trial, deviation: TrialDeviation, found: list[Found]) -> bool:
    """Count the deviation in the first class of `found` that includes it, if there is one.

    Return whether there is one; its entry in `found` is then replaced.
    """
    own = Class.of(trial, deviation)
    for place, one in enumerate(found):
        if Class.found(one).includes(own):
            modes = [*one.modes, *({trial.mode.name} - {*one.modes})]
            found[place] = msgspec.structs.replace(one, times=one.times + 1, modes=modes)
            return True
    return False
