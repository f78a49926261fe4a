"""Draw problems until the time is up, and find those that an implementation gets wrong.

For a given seed, problem number n is the same in every search with the same dtypes and modes,
however long the search runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from conformance.adapter.base import Adapter, Mode
from conformance.errors import ConformanceError, Unavailable, Unsupported
from conformance.explore.drawing import Drawer
from conformance.explore.trial import ORDER, Deviation, Trial, askable, deviations
from conformance.frameworks import LACKS

MOST_EXAMPLES = 10**6
MOST_DRAWN = 20
"""The most problems to draw for each that is requested; some are not supported."""


@dataclass(frozen=True)
class Options:
    """The extent of a search; empty `dtypes` or `modes` stand for all of them."""

    dtypes: Sequence[str] = ()
    modes: Sequence[str] = ()
    device: str = "cpu"
    seed: int = 0
    examples: int = MOST_EXAMPLES

    def ways(self, adapter: Adapter) -> list[tuple[str, Mode]]:
        """Return the pairs of dtype and mode to search, in the order of `ORDER` and of the modes.

        Raises:
            Unavailable: the adapter has no such pair.
        """
        lacking = LACKS.get(adapter.framework, ())
        ways = [
            (dtype, mode)
            for dtype in ORDER
            if dtype in adapter.dtypes and dtype not in lacking
            if not self.dtypes or dtype in self.dtypes
            for mode in adapter.modes
            if (not self.modes or mode.name in self.modes)
            and (mode.dtypes is None or dtype in mode.dtypes)
        ]
        if not ways:
            raise Unavailable(f"{adapter.name} has no such dtype and mode together")
        return ways


@dataclass
class Search:
    """A search, which draws problems when iterated over, and yields those with wrong results.

    Attributes:
        until: the deadline, on the clock of `time.monotonic`; it may be moved between two problems.
        drawn, answered: how many problems were drawn, and on how many the implementation was run.
        why_not: why the last unsupported problem is not supported; "" if there was none.
    """

    adapter: Adapter
    options: Options
    until: float
    drawn: int = 0
    answered: int = 0
    why_not: str = ""
    started: float = field(default_factory=time.monotonic)

    def __iter__(self) -> Iterator[tuple[Trial, tuple[Deviation, ...]]]:
        """Yield each trial that fails, with all its deviations.

        Raises:
            Unsupported: the adapter supports none of the simplest problems.
            Unavailable: the framework or the device is missing, or no dtype and mode fit.
        """
        ways = self.options.ways(self.adapter)
        drawer = Drawer(self.adapter, ways[0][0], few_shapes=self.adapter.compiles)
        while self.answered < self.options.examples and time.monotonic() < self.until:
            if self.drawn > MOST_DRAWN * self.options.examples:
                return
            random = np.random.default_rng((self.options.seed, self.drawn))
            self.drawn += 1
            dtype, mode = ways[int(random.integers(len(ways)))]
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
