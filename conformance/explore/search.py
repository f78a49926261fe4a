"""Draw problems until one is answered wrongly or the time is up.

Hypothesis draws, and shrinks what it drew: sizes, features, the seed. It knows no time limit, so
the function that it calls ends the search from within, by an exception that it lets pass.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from conformance.adapter.base import Adapter, Mode
from conformance.errors import ConformanceError, Unavailable, Unsupported
from conformance.explore.trial import Deviation, Trial, askable, deviations

MOST_EXAMPLES = 10**6


@dataclass(frozen=True)
class Wanted:
    """What a search looks at, as the command line says it; empty is everything."""

    dtypes: Sequence[str] = ()
    modes: Sequence[str] = ()
    device: str = "cpu"
    seed: int = 0
    examples: int = MOST_EXAMPLES


@dataclass
class Search:
    """What a search has seen so far; filled in as it goes."""

    drawn: int = 0
    answered: int = 0
    unsupported: int = 0
    why_not: str = ""
    failing: tuple[Trial, Deviation] | None = None
    interrupted: bool = False
    started: float = field(default_factory=time.monotonic)


class _Enough(BaseException):
    """The time is up. No `Exception`, which hypothesis would take for a failure."""


class _Wrong(Exception):
    """An answer is wrong; hypothesis makes the problem smaller."""


def search(
    adapter: Adapter, wanted: Wanted, until: float, shrink_until: Callable[[], float]
) -> Search:
    """Draw problems until `until` (of `time.monotonic`); what fails is made smaller for longer.

    Raises:
        ConformanceError: hypothesis is not installed, or nothing is left to be searched.
        Unsupported: the implementation takes none of the plainest problems.
        Unavailable: its framework or the device is missing.
    """
    try:
        import hypothesis
        from hypothesis import HealthCheck, Phase, Verbosity, given, settings
        from hypothesis.configuration import set_hypothesis_home_dir
    except ModuleNotFoundError as error:
        raise ConformanceError("exploring needs hypothesis; pip install hypothesis") from error
    from conformance.explore.strategies import drawings, learn

    asked = _asked(adapter, wanted)
    limits = learn(adapter, asked[0][0])
    modes = {mode.name: mode for mode in adapter.modes}
    seen = Search()
    nature: list[tuple[str, str, str]] = []
    missing: list[Unavailable] = []
    stop = [until]

    def look(drawn: object) -> None:
        if time.monotonic() > stop[0]:
            raise _Enough
        trial = _trial(drawn, modes, wanted.device)
        seen.drawn += 1
        if trial is None or not askable(trial.problem):
            hypothesis.reject()
        try:
            found = deviations(adapter, trial)
        except Unavailable as error:
            missing.append(error)
            raise _Enough from error
        except Unsupported as reason:
            seen.unsupported += 1
            seen.why_not = str(reason)
            hypothesis.reject()
        seen.answered += 1
        same = [item for item in found if not nature or item.nature == nature[0]]
        if same:
            if not nature:
                nature.append(same[0].nature)
                stop[0] = shrink_until()
            seen.failing = (trial, same[0])
            raise _Wrong

    phases = (Phase.generate, Phase.shrink)
    configured = settings(
        max_examples=wanted.examples,
        deadline=None,
        database=None,
        phases=phases,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    strategy = drawings(limits, asked, adapter.compiles)
    run = hypothesis.seed(wanted.seed)(configured(given(strategy)(look)))
    with tempfile.TemporaryDirectory() as folder:
        # Hypothesis notes what it knows about the code in a folder; it must not be the user's.
        set_hypothesis_home_dir(folder)
        try:
            run()
        except (_Enough, _Wrong, hypothesis.errors.HypothesisException):
            pass
        except KeyboardInterrupt:
            seen.interrupted = True
        finally:
            set_hypothesis_home_dir(None)
    if missing:
        raise missing[0]
    return seen


def _asked(adapter: Adapter, wanted: Wanted) -> list[tuple[str, str]]:
    """Dtypes and modes to search in, the simplest first."""
    from conformance.explore.shrinking import ORDER
    from conformance.explore.strategies import modes_of
    from conformance.frameworks import LACKS

    lacking = LACKS.get(adapter.framework, ())
    dtypes = [
        dtype
        for dtype in ORDER
        if dtype in adapter.dtypes
        and dtype not in lacking
        and (not wanted.dtypes or dtype in wanted.dtypes)
    ]
    asked = [
        (dtype, mode.name) for dtype in dtypes for mode in modes_of(adapter, dtype, wanted.modes)
    ]
    if not asked:
        raise Unavailable(f"{adapter.name} has no such dtype and mode together")
    return asked


def _trial(drawn: object, modes: dict[str, Mode], device: str) -> Trial | None:
    from conformance.explore.strategies import Drawn

    assert isinstance(drawn, Drawn)
    try:
        with np.errstate(all="ignore"):
            problem = drawn.recipe.problem(drawn.dtype)
    except (ConformanceError, ValueError):
        return None
    return Trial(problem, modes[drawn.mode], device)
