"""A Hypothesis: a known defect, what it would answer, and when that explains an answer.

A hypothesis stands in one place: its id, the arguments of the id, and its computation are one entry
of `masks`, `scale`, `projections`, `softmax`, `precision`, `weights` or `gradients`. To add one,
add that entry, and the English of its id to `conformance/words.toml`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from conformance.causes.stages import Change, Stages
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.problem import Problem
from conformance.records.numbers import LIMIT, ratios
from conformance.records.phrase import NOTHING, Argument, Phrase

BETTER = 0.5
"""A hypothesis leaves at most this share of the error: else it explains no more than noise does."""

ALIKE = 1.25
"""Misfits whose ratio is less than this are equal, for all that can be known."""

FAILS = 0.05
"""Of the size of the right answer: an error of a row that left the range of its numbers."""

About = Mapping[str, Argument]
"""Arguments of the id of a cause."""

NO_MORE: About = MappingProxyType({})

_SHARED = frozenset({"mask", "causal", "attn_bias", "scale"})
"""What may change of a problem without a change to projections and scores."""


def significant(value: float, digits: int = 4) -> float:
    """Return a measured number with only the digits that are the same wherever it is measured."""
    return float(f"{value:.{digits}g}")


@dataclass(frozen=True)
class Hypothesis:
    """One defect.

    Attributes:
        cause: which one, such as "mask.inverted".
        make: the computation that has it.
        in_parts: whether some heads or rows alone may have it.
        breaks: whether it only shows which rows cannot be right, so that others may as well.
    """

    cause: Phrase
    make: Callable[[], Stages]
    in_parts: bool = False
    breaks: bool = False


class Maker:
    """A factory of hypotheses about one problem; they share what the right computation has.

    Each takes the id of the cause, and the arguments of that id.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.right = Stages(problem)

    def asked(
        self, cause: str, about: About = NO_MORE, /, *, in_parts: bool = True, **changes: Any
    ) -> Hypothesis:
        """Return the hypothesis that the answer is right for another problem."""

        def make() -> Stages:
            found = Stages(self.problem.replace(**changes))
            if changes.keys() <= _SHARED:
                self.share(found)
            return found

        return Hypothesis(Phrase(cause, dict(about)), make, in_parts)

    def weighed(self, cause: str, about: About = NO_MORE, /, **weights: Any) -> Hypothesis:
        """Return the hypothesis that the answer is right for other attention weights."""
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
        """Return the hypothesis that some stages are computed differently."""

        def make() -> Stages:
            found = Stages(self.problem, **stages)
            if stages.keys() <= {"scaled", "biased", "hide", "softmax", "mix", "merge", "finish"}:
                self.share(found)
            return found

        return Hypothesis(Phrase(cause, dict(about)), make, in_parts, breaks)

    def masked(self, cause: str, allowed: BoolArray, about: About = NO_MORE) -> Hypothesis:
        """Return the hypothesis that the answer is right under another mask."""
        return self.asked(cause, about, mask=allowed, causal=None)

    def share(self, found: Stages, *more: str) -> None:
        """Hand over what the right computation has, up to the scores and `more`."""
        for name in ("projected", "scores", "values", *more):
            found.__dict__[name] = getattr(self.right, name)


@dataclass
class Best:
    """The hypothesis to name, of those that explain an answer.

    In half precision noise is so wide that several do: then the plainest of those that fit about as
    well as the best. In others it is the first, and nobody need look further.
    """

    dtype: str
    known: list[tuple[float, Phrase]] = field(default_factory=list)

    @property
    def is_found(self) -> bool:
        """Whether to look no further."""
        return bool(self.known) and self.dtype not in ("float16", "bfloat16")

    def add(self, misfit: float, cause: Phrase) -> None:
        """Add one that explains the answer."""
        self.known.append((misfit, cause))

    @property
    def cause(self) -> Phrase:
        """The cause to name, or an empty phrase."""
        limit = ALIKE * min((misfit for misfit, _ in self.known), default=0.0)
        return next((cause for misfit, cause in self.known if misfit <= limit), NOTHING)


@dataclass(frozen=True, eq=False)
class Evidence:
    """One array as it came, as it should be, and the noise of both."""

    got: Array
    want: Array
    noise: Array
    underflow: float

    @cached_property
    def wrong(self) -> BoolArray:
        """The elements that exceed their limit."""
        off: BoolArray = np.abs(ratios(self.got, self.want, self.noise, self.underflow)) > LIMIT
        return off

    @cached_property
    def _size(self) -> float:
        return float(np.sqrt(np.mean(self.want**2)))

    @cached_property
    def spread(self) -> float:
        """The root mean square of the noise."""
        return float(np.sqrt(np.mean(self.noise**2)))

    def gain(self, found: Array) -> float:
        """Return how many times larger than the right answer `found` is; at least 1."""
        if self._is_noise:
            return 1.0
        told = found[np.isfinite(found)]
        size = float(np.sqrt(np.mean(told**2))) if told.size else 0.0
        return max(1.0, size / self._size)

    def tolerance(self, found: Array, gain: float = 1.0) -> Array:
        """Return how far an honest computation of `found` may be off, with a margin.

        A hypothesis has noise of its own, and more of it if it is larger than the right answer, or
        made of what is (`gain`).
        """
        gain = max(gain, self.gain(found))
        tolerance: Array = LIMIT * (self.noise + 2 * gain * self.spread) + self.underflow
        # What nothing was computed for is exact, here as there.
        return np.where((self.noise == 0) & (found == 0), self.underflow, tolerance)

    def _fails(self, broken: BoolArray) -> bool:
        """Return whether what came in these rows is nothing that rounding could have made."""
        off = np.where(np.isfinite(self.got), np.abs(self.got - self.want), np.inf).max(axis=-1)
        return bool((off > FAILS * self._size)[np.asarray(broken.any(axis=-1))].all())

    def _is_far_from(self, found: Array, gain: float) -> bool:
        """Return whether the element furthest off already rules the hypothesis out."""
        off = float(np.abs(self.got - found).max())
        size = float(np.abs(found).max())
        gain = gain if self._is_noise else max(gain, size / self._size)
        return off > LIMIT * (self._most + 2 * gain * self.spread) + self.underflow

    @cached_property
    def _is_noise(self) -> bool:
        """Return whether the array is zero but for rounding, as the gradient of a key bias is."""
        return self._size <= 10 * self.spread

    @cached_property
    def _most(self) -> float:
        return float(self.noise.max())

    def near(self, found: Array, gain: float = 1.0) -> BoolArray:
        """Return where the answer equals `found` to within the noise."""
        with np.errstate(invalid="ignore", over="ignore"):
            near: BoolArray = np.abs(self.got - found) <= self.tolerance(found, gain)
        return near

    def misfit(self, found: Array) -> float:
        """Return the rms of the answer that remains unexplained by the hypothesis."""
        left = (self.got - found)[np.isfinite(found) & np.isfinite(self.got)]
        return float(np.sqrt(np.mean(left**2))) if left.size else 0.0

    def explained(self, found: Array, gain: float = 1.0) -> bool:
        """Return whether `found` is what came, everywhere.

        Where it is NaN anything goes, and where it is infinite what came is wrong in that row; but
        something that is wrong must be explained, and by more than a little.
        """
        if found.shape != self.got.shape:
            return False
        if self._is_far_from(found, gain):
            return False
        told, broken = ~np.isnan(found), np.isinf(found)
        plain = told & ~broken
        rows = np.asarray(self.wrong.any(axis=-1))
        if not plain.any() or (broken.any() and not self._fails(broken)):
            return False
        untold = rows[~told.any(axis=-1)]
        if not (self.wrong & told).any() and not (untold.size and untold.all()):
            return False
        if not plain.all():
            if not self.near(np.where(plain, found, 0.0), gain)[plain].all():
                return False
        elif not self.near(found, gain).all():
            return False
        if not (self.wrong & plain).any():
            return True
        with np.errstate(over="ignore"):
            left = np.mean((self.got - found)[plain] ** 2)
            before = np.mean((self.got - self.want)[plain] ** 2)
        return bool(left <= BETTER**2 * before)
