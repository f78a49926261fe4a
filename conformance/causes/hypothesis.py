"""A `Hypothesis`: a known defect, and the answer of an implementation that has it.

The modules `handing`, `features`, `logits`, `projections`, `softmax`, `precision` and `gradients`
define the hypotheses. To add one, add its id, the arguments of the id and its computation to the
module that fits, and the English text for the id to `conformance/words.toml`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from conformance.causes.stages import Change, Stages
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.expectation import Expectation
from conformance.definition.problem import NO_WINDOW, Positions, Problem
from conformance.records.findings import NOTHING, Argument, Phrase
from conformance.records.numbers import LIMIT, ratios

if TYPE_CHECKING:
    from conformance.causes.handing import Handed

CHUNKS = (1, 2, 3, 4, 5, 8, 16)
"""The lengths of the chunks in which queries may have been passed beside a cache."""

TILES = (2, 3, 4, 8, 16, 32, 64, 128)
"""The tile sizes that hypotheses about lengths, windows and packed sequences try."""

MOST_ELEMENTS = 2**17
"""The number of attention weights above which the slowest searches are left out.

These compare similar cases, or look for mistakes in reading packed, paged or cached tokens, or for
defects of only some heads or rows.
"""

BETTER = 0.5
"""The largest share of the rms error that may remain if a hypothesis explains an answer.

Elements without a finite prediction do not count. If no other element is wrong, no limit applies.
"""

ALIKE = 1.25
"""Misfits (remaining rms errors) up to this many times the smallest one count as equal to it."""

HALF = ("float16", "bfloat16")

FAILS = 0.05
"""A row is clearly wrong if its largest error exceeds this share of the expected array's rms."""

About = Mapping[str, Argument]
"""The arguments of the phrase that names a cause, by name."""

NO_MORE: About = MappingProxyType({})

_SHARED = frozenset(
    {"mask", "causal", "attn_bias", "scale", "window", "soft_cap", "sinks", "slopes"}
    | {"query_lengths", "key_lengths", "segments", "positions"}
)
"""Fields of a problem that affect projections and scores at most through a rotary embedding."""

_AFTER_SCORES = frozenset(
    {"scaled", "added", "capped", "sloped", "far", "biased", "hide", "softmax", "sinks", "of_sinks"}
    | {"mix", "merge", "finish"}
)
"""Stages that can be replaced without affecting the projections and scores."""

_BACKWARD = frozenset(
    {"received", "weights_again", "row", "slope_of_cap", "gather", "joined"}
    | {name for name in vars(Stages) if name.startswith("d_")}
)
"""Stages that can be replaced without affecting the output."""


def significant(value: float, digits: int = 4) -> float:
    """Return a number rounded to `digits` significant digits, so that machines rarely disagree."""
    return float(f"{value:.{digits}g}")


@dataclass(frozen=True)
class Hypothesis:
    """A known defect that may explain a wrong answer.

    Attributes:
        cause: the phrase that names the defect, such as "mask.inverted".
        make: a function that returns the computation with the defect.
        in_parts: whether the defect may also be confined to some heads or rows.
        breaks: whether the hypothesis predicts only which rows are wrong, so that several such
            hypotheses may fit equally well.
    """

    cause: Phrase
    make: Callable[[], Stages]
    in_parts: bool = False
    breaks: bool = False


class Maker:
    """A factory of hypotheses about one problem.

    A hypothesis may reuse intermediate results of the correct computation that its defect cannot
    affect. Each method that returns a hypothesis takes the id of its cause, and `about`, the
    arguments of the phrase with that id.

    Attributes:
        problem: the problem that was posed.
        handed: how tokens were packed, paged or cached; None if they were passed unchanged.
        right: the correct computation.
    """

    def __init__(self, problem: Problem, handed: Handed | None = None) -> None:
        self.problem = problem
        self.handed = handed
        self.right = Stages(problem)

    def asked(
        self, cause: str, about: About = NO_MORE, /, *, in_parts: bool = True, **changes: Any
    ) -> Hypothesis:
        """Return the hypothesis that the answer is right for the problem with these fields changed.

        `in_parts` says whether the defect may also be confined to some heads or rows.
        """

        def make() -> Stages:
            problem = self.problem.replace(**changes)
            stages = Stages(problem)
            if changes.keys() <= _SHARED and not (problem.rotary and _moved(self.problem, problem)):
                self.share(stages)
            return stages

        return Hypothesis(Phrase(cause, dict(about)), make, in_parts)

    def weighed(self, cause: str, about: About = NO_MORE, /, **weights: Any) -> Hypothesis:
        """Return the hypothesis that the answer is right if these weights replace the problem's."""
        phrase = Phrase(cause, dict(about))
        return Hypothesis(phrase, lambda: Stages(self.problem.with_weights(**weights)))

    def staged(
        self,
        cause: str,
        about: About = NO_MORE,
        /,
        *,
        in_parts: bool = False,
        breaks: bool = False,
        **stages: Change,
    ) -> Hypothesis:
        """Return the hypothesis that some stages are computed differently.

        `stages` holds the replacements by the name of the stage; `in_parts` and `breaks` are as in
        `Hypothesis`.
        """

        def make() -> Stages:
            found = Stages(self.problem, **stages)
            if stages.keys() <= _BACKWARD:
                self.share(found, "weights", "context")
            elif stages.keys() <= _AFTER_SCORES:
                self.share(found)
            return found

        return Hypothesis(Phrase(cause, dict(about)), make, in_parts, breaks)

    def masked(self, cause: str, allowed: BoolArray, about: About = NO_MORE) -> Hypothesis:
        """Return the hypothesis that `allowed` replaces the mask and all rules that block keys.

        `allowed` is True where a query may attend to a key. Features that use the positions of
        tokens keep the positions of the problem.
        """
        problem = self.problem
        rest: dict[str, Any] = {}
        if problem.features:
            there = Positions(query=problem.position_of_queries, key=problem.position_of_keys)
            rest = {"window": NO_WINDOW, "positions": there, "segments": None}
            rest |= dict.fromkeys(("query_lengths", "key_lengths"))
        return self.asked(cause, about, mask=allowed, causal=None, **rest)

    def share(self, found: Stages, *more: str) -> None:
        """Copy correct results to `found`: projections, scores, repeated values, and `more`.

        `more` holds the names of further attributes of `Stages`.
        """
        for name in ("plain", "projected", "scores", "values", *more):
            found.__dict__[name] = getattr(self.right, name)


def _moved(one: Problem, other: Problem) -> bool:
    """Return whether the positions of queries or keys differ between two problems."""
    return not (
        np.array_equal(one.position_of_queries, other.position_of_queries)
        and np.array_equal(one.position_of_keys, other.position_of_keys)
    )


@dataclass
class Best:
    """A choice among the hypotheses that explain an answer, which are added simplest first.

    In half precision, noise is so large that several hypotheses may explain one answer: the choice
    is the simplest of those that fit about as well as the best. In other dtypes, the search can end
    at the first hypothesis that explains the answer.

    Attributes:
        dtype: the dtype of the problem.
        accepts: a function that returns whether the answers to other problems permit a cause.
        wanted: the id of the only cause to consider, or "" for all.
        known: the accepted causes, each with its misfit.
    """

    dtype: str
    accepts: Callable[[Phrase], bool]
    wanted: str = ""
    known: list[tuple[float, Phrase]] = field(default_factory=list)

    @property
    def is_found(self) -> bool:
        """Whether the choice is final, so that no further hypothesis has to be tried."""
        return bool(self.known) and (bool(self.wanted) or self.dtype not in HALF)

    def tries(self, cause: Phrase) -> bool:
        """Return whether this cause is to be tried, which depends on `wanted`."""
        return not self.wanted or cause.id == self.wanted

    def add(self, misfit: float, cause: Phrase) -> bool:
        """Add the cause of a hypothesis that explains the answer; return whether it is accepted.

        A cause that is not accepted is not added.

        Args:
            misfit: the error that the hypothesis leaves, as an rms; 0 if it is not measured.
            cause: the cause; an empty phrase is never accepted.
        """
        accepted = bool(cause) and self.tries(cause) and self.accepts(cause)
        if accepted:
            self.known.append((misfit, cause))
        return accepted

    @property
    def cause(self) -> Phrase:
        """The cause of the chosen hypothesis, or an empty phrase if none was accepted."""
        limit = ALIKE * min((misfit for misfit, _ in self.known), default=0.0)
        return next((cause for misfit, cause in self.known if misfit <= limit), NOTHING)


@dataclass(frozen=True, eq=False)
class Evidence:
    """An array that the implementation returned, the expected array and its noise σ.

    `underflow` is the absolute error that underflow may cause in any element.
    """

    got: Array
    want: Array
    noise: Array
    underflow: float

    @classmethod
    def of(cls, array: str, got: Array, expectation: Expectation) -> Evidence:
        """Return the evidence on an array, given its name and the values `got` in the answer."""
        want, noise = expectation.arrays[array], expectation.sigma[array]
        return cls(got, want, noise, expectation.underflow)

    @cached_property
    def wrong(self) -> BoolArray:
        """True for each element that is NaN or whose error exceeds `LIMIT` times its noise.

        Errors of at most `underflow` do not count.
        """
        off: BoolArray = np.abs(ratios(self.got, self.want, self.noise, self.underflow)) > LIMIT
        return off

    @cached_property
    def _size(self) -> float:
        return _rms(self.want)

    @cached_property
    def spread(self) -> float:
        """The root mean square of the noise."""
        return _rms(self.noise)

    def gain(self, found: Array) -> float:
        """Return the rms of the finite elements of `found` divided by that of the expected array.

        The result is at least 1. It is always 1 if the expected array is hardly more than rounding
        noise, such as the gradient of a key bias.
        """
        if self._size <= 10 * self.spread:
            return 1.0
        return max(1.0, _rms(found[np.isfinite(found)]) / self._size)

    def near(self, found: Array, gain: float = 1.0) -> BoolArray:
        """Return a mask, True where the answer equals the prediction `found` up to noise.

        The tolerance includes the noise of the prediction. This is `gain` times as large as that of
        the expected array, or more if the prediction itself is larger than the expected array by a
        greater factor.
        """
        gain = max(gain, self.gain(found))
        tolerance = LIMIT * (self.noise + 2 * gain * self.spread) + self.underflow
        # Zeros without noise, such as gradients of blocked keys, must be matched exactly.
        tolerance = np.where((self.noise == 0) & (found == 0), self.underflow, tolerance)
        near: BoolArray = np.abs(self.got - found) <= tolerance
        return near

    def misfit(self, found: Array) -> float:
        """Return the rms difference between the answer and the prediction where both are finite."""
        return _rms((self.got - found)[np.isfinite(found) & np.isfinite(self.got)])

    def explained(self, found: Array, gain: float = 1.0) -> bool:
        """Return whether the prediction `found` fits the whole returned array.

        Arrays of different shapes do not fit. Where the prediction is NaN, any element fits. Where
        it is ±∞, the row of the returned array must be clearly wrong; where it is −∞, the element
        must also be NaN. There must be finite predictions, and the returned array must be near all
        of them, as `near` decides with `gain`.

        Some wrong element must have a prediction other than NaN, unless there are rows that are
        predicted to be NaN throughout, and each of these contains a wrong element. If a wrong
        element has a finite prediction, the rms difference from the finite predictions must be at
        most half of that from the expected array.
        """
        if found.shape != self.got.shape:
            return False
        predicted, broken = ~np.isnan(found), np.isinf(found)
        finite = predicted & ~broken
        if not finite.any() or (broken.any() and not self._fails(broken)):
            return False
        if not np.isnan(self.got[np.isneginf(found)]).all():
            return False
        if not (self.wrong & predicted).any():
            free_rows = np.asarray(self.wrong.any(axis=-1))[~predicted.any(axis=-1)]
            if not (free_rows.size and free_rows.all()):
                return False
        if not self.near(np.where(finite, found, 0.0), gain)[finite].all():
            return False
        if not (self.wrong & finite).any():
            return True
        left = np.mean((self.got - found)[finite] ** 2)
        before = np.mean((self.got - self.want)[finite] ** 2)
        return bool(left <= BETTER**2 * before)

    def _fails(self, broken: BoolArray) -> bool:
        """Return whether every row with `broken` elements has an error too large for rounding."""
        off = np.where(np.isfinite(self.got), np.abs(self.got - self.want), np.inf).max(axis=-1)
        return bool((off > FAILS * self._size)[np.asarray(broken.any(axis=-1))].all())


def _rms(values: Array) -> float:
    """Return the root mean square of the values; 0 for an empty array."""
    return float(np.sqrt(np.mean(values**2))) if values.size else 0.0
