"""Draw problems until one is answered wrongly or the time is up.

First the adapter is asked about one small problem for each feature, so that few of the problems
that are drawn are unsupported. Hypothesis draws recipes within these limits, and shrinks sizes,
features and the seed. It has no time limit, so the function that it calls ends the search by an
exception that Hypothesis does not catch.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.adapter.base import Adapter
from conformance.definition.problem import Causal, Score, Sharing
from conformance.errors import ConformanceError, Unavailable, Unsupported
from conformance.explore.recipe import BIASES, MASKS, REGIMES, SCALES, Frame, Recipe, Widths
from conformance.explore.trial import ORDER, Deviation, Trial, askable, deviations
from conformance.frameworks import LACKS

MOST_EXAMPLES = 10**6
MOST_SEEDS = 2**16

SCORES: tuple[Score, ...] = ("scaled-dot", "additive")
SHARINGS: tuple[Sharing, ...] = ("self", "memory", "separate")
WIDTHS: tuple[Widths, ...] = ("equal", "memory", "free")
CAUSAL: tuple[Causal | None, ...] = (None, "top-left", "bottom-right")


@dataclass(frozen=True)
class Options:
    """The extent and duration of a search; without names, all dtypes and modes."""

    dtypes: Sequence[str] = ()
    modes: Sequence[str] = ()
    device: str = "cpu"
    seconds: float = 60.0
    seed: int = 0
    examples: int = MOST_EXAMPLES
    shrink: bool = True


@dataclass
class Search:
    """The state of a search, updated as it goes."""

    drawn: int = 0
    answered: int = 0
    unsupported: int = 0
    why_not: str = ""
    failing: tuple[Trial, Deviation] | None = None
    interrupted: bool = False
    started: float = field(default_factory=time.monotonic)


class _Enough(BaseException):
    """The time is up. Not an `Exception`, which hypothesis would take for a failure."""


class _Wrong(Exception):
    """An answer is wrong; raised so that hypothesis makes the problem smaller."""


def search(
    adapter: Adapter, options: Options, until: float, shrink_until: Callable[[], float]
) -> Search:
    """Draw problems until one fails or the time is up.

    Args:
        until: the end, on the clock of `time.monotonic`.
        shrink_until: returns the end of the time for making a failure smaller.

    Raises:
        ConformanceError: hypothesis is not installed, or nothing is left to be searched.
        Unsupported: the implementation takes none of the plainest problems.
        Unavailable: its framework or the device is missing.
    """
    try:
        import hypothesis
        from hypothesis import HealthCheck, Phase, Verbosity
        from hypothesis.configuration import set_hypothesis_home_dir
    except ModuleNotFoundError as error:
        raise ConformanceError("exploring needs hypothesis; pip install hypothesis") from error

    ways = _ways(adapter, options)
    modes = {mode.name: mode for mode in adapter.modes}
    state = Search()
    nature: list[tuple[str, str, str]] = []
    missing: list[Unavailable] = []
    stop = [until]

    def look(drawn: tuple[Recipe, str, str]) -> None:
        if time.monotonic() > stop[0]:
            raise _Enough
        recipe, dtype, mode = drawn
        state.drawn += 1
        try:
            with np.errstate(all="ignore"):
                trial = Trial(recipe.problem(dtype), modes[mode], options.device)
        except (ConformanceError, ValueError):
            hypothesis.reject()
        if not askable(trial.problem):
            hypothesis.reject()
        try:
            wrong = deviations(adapter, trial)
        except Unavailable as error:
            missing.append(error)
            raise _Enough from error
        except Unsupported as reason:
            state.unsupported += 1
            state.why_not = str(reason)
            hypothesis.reject()
        state.answered += 1
        same = [item for item in wrong if not nature or item.nature == nature[0]]
        if same:
            if not nature:
                nature.append(same[0].nature)
                stop[0] = shrink_until()
            state.failing = (trial, same[0])
            raise _Wrong

    configured: Any = hypothesis.settings(
        max_examples=options.examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    drawings = _drawings(learn(adapter, ways[0][0]), ways, few_shapes=adapter.compiles)
    given: Any = hypothesis.given(drawings)
    run = hypothesis.seed(options.seed)(configured(given(look)))
    with tempfile.TemporaryDirectory() as folder:
        # Hypothesis writes into a folder, which must not be the user's.
        set_hypothesis_home_dir(folder)
        try:
            run()
        except (_Enough, _Wrong, hypothesis.errors.HypothesisException):
            pass
        except KeyboardInterrupt:
            state.interrupted = True
        finally:
            set_hypothesis_home_dir(None)
    if missing:
        raise missing[0]
    return state


def _ways(adapter: Adapter, options: Options) -> list[tuple[str, str]]:
    """Return the dtypes and modes to search in, the simplest first."""
    lacking = LACKS.get(adapter.framework, ())
    ways = [
        (dtype, mode.name)
        for dtype in ORDER
        if dtype in adapter.dtypes and dtype not in lacking
        if not options.dtypes or dtype in options.dtypes
        for mode in adapter.modes
        if (not options.modes or mode.name in options.modes)
        and (mode.dtypes is None or dtype in mode.dtypes)
    ]
    if not ways:
        raise Unavailable(f"{adapter.name} has no such dtype and mode together")
    return ways


@dataclass(frozen=True)
class Limits:
    """The limits of what an implementation can express.

    `masks` has the combinations of mask, additive bias and causal flag.
    """

    frames: tuple[Frame, ...]
    grouped: bool
    value_heads: bool
    scales: bool
    masks: tuple[tuple[str, str, Causal | None], ...]


def learn(adapter: Adapter, dtype: str) -> Limits:
    """Ask the adapter about one small problem for each feature.

    Raises:
        Unsupported: not even the plainest problem.
    """

    def takes(recipe: Recipe) -> bool:
        try:
            adapter.check(recipe.problem(dtype))
        except (Unsupported, ConformanceError):
            return False
        except Exception:
            # A mistake in the adapter's own check is a finding, so it must come up.
            return True
        return True

    every = itertools.product(SCORES, SHARINGS, WIDTHS, (True, False))
    frames = [Frame(score=s, sharing=w, widths=v, bias=b) for s, w, v, b in every]
    frames = [frame for frame in frames if takes(Recipe(frame=frame))]
    if not frames:
        raise Unsupported("it takes none of the plainest problems")

    def any_frame(**changes: Any) -> bool:
        return any(takes(Recipe(frame=frame, **changes)) for frame in frames)

    return Limits(
        tuple(frames),
        grouped=any_frame(group=2),
        value_heads=any_frame(value_size=2),
        scales=any_frame(scale=0.75),
        masks=tuple(
            (mask, bias, causal)
            for mask, bias, causal in itertools.product(MASKS, BIASES, CAUSAL)
            if any_frame(mask=mask, bias=bias, causal=causal)
        ),
    )


def _drawings(limits: Limits, ways: Sequence[tuple[str, str]], *, few_shapes: bool) -> Any:
    """Return a strategy for recipes with dtype and mode.

    Simple values come first in every choice, because hypothesis shrinks towards the first.
    `few_shapes` is for implementations that compile each new shape.
    """
    from hypothesis import strategies as st

    lengths = st.one_of(st.integers(1, 6), st.integers(1, 12), st.integers(1, 40))
    if few_shapes:
        lengths = st.sampled_from((1, 2, 5, 9))
    sizes = st.sampled_from((1, 2, 3)) if few_shapes else st.integers(1, 6)

    @st.composite
    def drawing(draw: Any) -> tuple[Recipe, str, str]:
        dtype, mode = draw(st.sampled_from(ways))
        frame = draw(st.sampled_from(limits.frames))
        query = draw(lengths)
        key = query if frame.sharing == "self" else draw(lengths)
        # These lengths leave something to block, and every query a key.
        kinds = [
            (mask, bias, causal)
            for mask, bias, causal in limits.masks
            if (mask == "none" or key > 1) and (causal != "bottom-right" or key >= query)
        ]
        mask, bias, causal = draw(st.sampled_from(kinds or [("none", "none", None)]))
        regimes = [
            name
            for name in REGIMES
            if (frame.score == "scaled-dot" or not name.endswith("-logits"))
            and (frame.sharing != "self" or name != "huge-logits")
        ]
        recipe = Recipe(
            frame=frame,
            batch=draw(st.integers(1, 2 if few_shapes else 3)),
            query=query,
            key=key,
            kv_heads=draw(st.integers(1, 2 if few_shapes else 4)),
            group=draw(st.integers(1, 3)) if limits.grouped else 1,
            size=draw(sizes),
            value_size=draw(st.integers(0, 4)) if limits.value_heads else 0,
            extra=draw(st.integers(1, 3)) if frame.widths != "equal" else 1,
            mask=mask,
            bias=bias,
            causal=causal,
            scale=draw(st.sampled_from(SCALES)) if limits.scales else None,
            regime=draw(st.sampled_from(regimes)),
            seed=draw(st.integers(0, MOST_SEEDS)),
        )
        if recipe.regime == "huge-logits":
            recipe = dataclasses.replace(recipe, scale=None)
        return recipe, dtype, mode

    return drawing()
