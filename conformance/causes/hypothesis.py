"""A `Hypothesis`: a known defect, and the answer of an implementation that has it.

The modules `handing`, `features`, `logits`, `projections`, `softmax`, `precision` and `gradients`
define the hypotheses. To add a hypothesis, define its cause (an id and arguments) and its
computation in the module that fits, and add the English text for the id to
`conformance/words.toml`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from conformance.causes.stages import Change, Stages, Turn
from conformance.definition.dtypes import Array, BoolArray, IntArray
from conformance.definition.expectation import Expectation
from conformance.definition.features import FEATURES, NO_RULES, OF_LOGITS
from conformance.definition.problem import Positions, Problem, Shape
from conformance.records.findings import NOTHING, Argument, Phrase
from conformance.records.numbers import LIMIT, ratios

if TYPE_CHECKING:
    from conformance.causes.handing import HandedTokens

CHUNKS = (1, 2, 3, 4, 5, 8, 16)
"""The chunk lengths to try in hypotheses about queries that are passed in chunks beside a cache."""

TILES = (2, 3, 4, 8, 16, 32, 64, 128)
"""The tile sizes to try in hypotheses about lengths, windows and packed sequences."""

MOST_ELEMENTS = 2**17
"""The number of attention weights above which the slowest searches are left out.

These searches compare similar cases, or look for mistakes in reading packed, paged or cached
tokens, or for defects of only some heads or rows.
"""

BETTER = 0.5
"""The largest share of the rms error that may remain if a hypothesis explains an answer.

Elements without a finite prediction do not count. If no element with a finite prediction is wrong,
any share may remain.
"""

ALIKE = 1.25
"""Misfits (remaining rms errors) up to this many times the smallest one count as equal to it."""

HALF = ("float16", "bfloat16")

FAILS = 0.05
"""A row is clearly wrong if its largest error exceeds this share of the expected array's rms."""

Chosen = tuple[IntArray, int]
"""The indices of the queries that were chosen from a longer problem, and how many it has."""

About = Mapping[str, Argument]
"""The arguments of the phrase that names a cause, by name."""

NO_MORE: About = MappingProxyType({})

_SHARED = frozenset(
    {"mask", "causal", "attn_bias", "scale"}
    | {name for entry in FEATURES if entry.step >= OF_LOGITS for name in entry.absent}
)
"""Fields of a problem that affect projections and scores at most through a rotary embedding."""

_AFTER_SCORES = frozenset(
    {"scaled", "added", "capped", "sloped", "far", "biased", "hide", "softmax", "sinks", "of_sinks"}
    | {"mix", "merge", "finish"}
)
"""Stages that can be replaced without affecting the projections and scores."""

_BEFORE_HEADS = frozenset({"input", "heads", "project", "shifted", "split", "product", "held"})
"""Stages on which the projected heads depend."""

PREPARING = _BEFORE_HEADS | frozenset(
    {"prepared", "prepared_values", "normed", "root", "gain"}
    | {"rotated", "turned", "angles", "frequencies", "positions", "attention_factor"}
)
"""Stages on which the heads depend after norm and rotary embedding."""

_BACKWARD = frozenset(
    {"received", "weights_again", "row", "slope_of_cap", "gather", "joined"}
    | {name for name in vars(Stages) if name.startswith("d_")}
)
"""Stages that can be replaced without affecting the output."""

_AFTER_CONTEXT = _BACKWARD | {"merge", "finish"}
"""Stages that can be replaced without affecting the context."""


def orders_of_groups(shape: Shape) -> tuple[IntArray, IntArray]:
    """Return the orders of query heads that come of (group kv_heads) for (kv_heads group).

    The first is that of heads which are split so, the second that of heads which are merged so.
    """
    heads = np.arange(shape.heads)
    split = heads.reshape(shape.group, shape.kv_heads).T.ravel()
    return split, heads.reshape(shape.kv_heads, shape.group).T.ravel()


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
        breaks: whether the hypothesis predicts only which rows are wrong, not the numbers in them,
            so that several such hypotheses may fit equally well.
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
        rows: the indices of the queries: those of the problem, or of a longer one that it is from.
        queries: the number of queries of that problem.
        chosen: whether the queries are some of a longer problem, or all of one that is too long.
        shares: whether results are computed to be reused, which are as large as the weights.
    """

    def __init__(
        self,
        problem: Problem,
        handed: HandedTokens | None = None,
        chosen: Chosen | None = None,
        *,
        shares: bool = True,
    ) -> None:
        self.problem = problem
        self.handed = handed
        self.right = Stages(problem)
        self.shares = shares
        count = problem.shape.query_length
        self.chosen = chosen is not None
        self.rows, self.queries = (np.arange(count), count) if chosen is None else chosen

    def beside(self, stages: Stages) -> Maker:
        """Return a factory of hypotheses about an implementation that has another defect as well.

        `stages` is the computation with that defect, which takes the place of the correct one.
        """
        found = Maker(stages.problem, self.handed, (self.rows, self.queries))
        found.right = stages
        return found

    def asked(
        self, cause: str, about: About = NO_MORE, /, *, in_parts: bool = True, **changes: Any
    ) -> Hypothesis:
        """Return the hypothesis that the answer is the right one to another problem.

        `changes` holds the fields in which that problem differs from the one that was posed.
        `in_parts` says whether the defect may also be confined to some heads or rows.
        """

        def make() -> Stages:
            problem = self.problem.replace(**changes)
            stages = Stages(problem, **self.right.changes)
            turned = any(entry.turns for entry in problem.entries)
            if changes.keys() <= _SHARED and not (turned and _moved(self.problem, problem)):
                self.share(stages)
            elif changes.keys() <= _SHARED | {"norm", "rotary", "rotary_scaling"}:
                self._share_heads(stages)
            return stages

        return Hypothesis(Phrase(cause, dict(about)), make, in_parts)

    def weighed(self, cause: str, about: About = NO_MORE, /, **weights: Any) -> Hypothesis:
        """Return the hypothesis that the answer is right for a problem with other `weights`."""

        def make() -> Stages:
            found = Stages(self.problem.with_weights(**weights), **self.right.changes)
            if weights.keys() <= {"output", "output_bias"}:
                self.share(found, "weights", "context")
            return found

        return Hypothesis(Phrase(cause, dict(about)), make)

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

        `stages` maps the names of stages to their replacements; `in_parts` and `breaks` are the
        attributes of the `Hypothesis`.
        """

        def make() -> Stages:
            found = Stages(self.problem, **{**self.right.changes, **stages})
            self._share_before(found, stages.keys())
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
            rest = {**NO_RULES, "positions": there}
        return self.asked(cause, about, mask=allowed, causal=None, **rest)

    def share(self, found: Stages, *more: str) -> None:
        """Copy intermediate results of the correct computation to `found`.

        These are the projections, the scores, the repeated values, and the attributes of `Stages`
        that are named in `more`.
        """
        for name in ("plain", "projected", "scores", "values", *more) if self.shares else ():
            found.__dict__[name] = getattr(self.right, name)

    def _share_before(self, found: Stages, changed: Collection[str]) -> None:
        """Copy to `found` what does not depend on the stages that are `changed`."""
        changed = frozenset(changed)
        if changed <= _AFTER_CONTEXT:
            self.share(found, "weights", "context")
        elif changed <= _AFTER_SCORES:
            self.share(found)
        elif changed == {"input"}:
            self._share_heads(found)
            found.__dict__["plain"] = {
                name: heads if found.input(name) is self.right.input(name) else found.heads(name)
                for name, heads in self.right.plain.items()
            }
        elif not changed & _BEFORE_HEADS:
            self._share_heads(found)
            if not changed & PREPARING:
                found.__dict__["projected"] = self.right.projected

    def _share_heads(self, found: Stages) -> None:
        """Copy the projected heads to `found`, and what they are after the right rotation."""
        found.__dict__["plain"] = self.right.plain
        if self.problem.rotary is not None:
            found.turns = self._turns

    @cached_property
    def _turns(self) -> list[Turn]:
        _ = self.right.projected
        return self.right.turns


def _moved(one: Problem, other: Problem) -> bool:
    """Return whether the positions of queries or keys differ between two problems."""
    return not (
        np.array_equal(one.position_of_queries, other.position_of_queries)
        and np.array_equal(one.position_of_keys, other.position_of_keys)
    )


def alike(known: Collection[tuple[float, Phrase]]) -> list[tuple[float, Phrase]]:
    """Return those of several causes, each with its misfit, that fit about as well as the best."""
    limit = ALIKE * min((misfit for misfit, _ in known), default=0.0)
    return [(misfit, cause) for misfit, cause in known if misfit <= limit]


@dataclass
class Best:
    """A choice among the hypotheses that explain an answer, which are added simplest first.

    In half precision, noise is so large that several hypotheses may explain one answer: the choice
    is the simplest of those that fit about as well as the best. In other dtypes, the search can end
    at the first hypothesis that explains the answer.

    Attributes:
        dtype: the dtype of the problem.
        accepts: a function that returns whether a cause is consistent with the answers to similar
            problems.
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
        """Return whether to try this cause: `wanted` must be its id, or "" for all causes."""
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
        return next((cause for _, cause in alike(self.known)), NOTHING)


@dataclass(frozen=True, eq=False)
class Evidence:
    """An array that the implementation returned, the expected array and its noise σ.

    `underflow` is the absolute error that underflow may cause in any element, and `most` the
    largest error, in σ and as an rms, that a prediction may leave if it explains the array.
    """

    got: Array
    want: Array
    noise: Array
    underflow: float
    most: float = math.inf

    @classmethod
    def of(cls, array: str, got: Array, expectation: Expectation) -> Evidence:
        """Return the evidence on the array named `array`, whose returned values are `got`."""
        want, noise = expectation.arrays[array], expectation.sigma[array]
        return cls(got, want, noise, expectation.underflow)

    def of_rows(self, rows: IntArray) -> Evidence:
        """Return the evidence on some rows, with predictions as noisy as among all of them."""
        got, want, noise = (array[:, rows] for array in (self.got, self.want, self.noise))
        found = replace(self, got=got, want=want, noise=noise)
        vars(found).update(spread=self.spread, _size=self._size)
        return found

    @cached_property
    def wrong(self) -> BoolArray:
        """True for each element that is NaN or whose error exceeds `LIMIT` times its noise.

        Errors of at most `underflow` do not count.
        """
        off: BoolArray = np.abs(ratios(self.got, self.want, self.noise, self.underflow)) > LIMIT
        return off

    @cached_property
    def _size(self) -> float:
        return rms(self.want)

    @cached_property
    def spread(self) -> float:
        """The root mean square of the noise."""
        return rms(self.noise)

    def gain(self, found: Array) -> float:
        """Return the rms of the prediction `found` divided by that of the expected array.

        Only finite elements count. The result is at least 1, and no more than the answer has of
        this size, so that a prediction which is far too large does not fit within its own noise. It
        is always 1 if the expected array is hardly more than rounding noise, such as the gradient
        of a key bias.
        """
        if self._size <= 10 * self.spread:
            return 1.0
        both = np.isfinite(found) & np.isfinite(self.got)
        return max(1.0, min(rms(it[both]) for it in (found, self.got)) / self._size)

    def near(self, found: Array, gain: float | Array = 1.0) -> BoolArray:
        """Return a mask, True where the answer equals the prediction `found` up to noise.

        The prediction is noisy too: its noise is that of the expected array times `gain`, or times
        `self.gain(found)` if this is greater. Predicted zeros without noise must be matched
        exactly, apart from underflow.
        """
        gain = np.maximum(gain, self.gain(found))
        tolerance = LIMIT * (self.noise + 2 * gain * self.spread) + self.underflow
        # Zeros without noise, such as gradients of blocked keys, must be matched exactly.
        tolerance = np.where((self.noise == 0) & (found == 0), self.underflow, tolerance)
        near: BoolArray = np.abs(self.got - found) <= tolerance
        return near

    def left(self, found: Array, gain: float | Array = 1.0) -> float:
        """Return the errors of the prediction `found`, in σ, as an rms where both are finite.

        The prediction is as noisy as in `near`, and σ is the larger one of both. Elements for which
        it predicts what is expected do not count.
        """
        counts = np.isfinite(found) & np.isfinite(self.got) & (found != self.want)
        sigma = np.maximum(self.noise, np.maximum(gain, self.gain(found)) * self.spread)
        off = np.abs(self.got - found)
        wrong = counts & (off > self.underflow)
        sigma = np.broadcast_to(sigma, off.shape)
        return rms(np.where(wrong, off, 0.0)[counts] / np.where(sigma > 0, sigma, 1.0)[counts])

    def misfit(self, found: Array) -> float:
        """Return the rms difference between the answer and the prediction where both are finite."""
        return rms((self.got - found)[np.isfinite(found) & np.isfinite(self.got)])

    def explained(self, found: Array, gain: float | Array = 1.0) -> bool:
        """Return whether the prediction `found` fits the whole returned array.

        The shapes must be equal, and some predictions finite. Each returned element must then fit
        its prediction. A number must be matched up to noise, as `near` decides with `gain`. NaN
        predicts nothing, so any element fits. ±∞ predicts that the row is clearly wrong, and −∞
        also that the element is NaN.

        The prediction must also explain an error. Some wrong element must have a prediction other
        than NaN; if none has, some rows must be predicted to be NaN throughout, and each of these
        must contain a wrong element. If wrong elements have finite predictions, the rms difference
        from the finite predictions must be at most half of that from the expected array, and in
        σ, it must be at most `most`.
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
        if not left <= BETTER**2 * before:
            return False
        return self.most == math.inf or self.left(found, gain) <= self.most

    def _fails(self, broken: BoolArray) -> bool:
        """Return whether every row with `broken` elements has an error too large for rounding."""
        off = np.where(np.isfinite(self.got), np.abs(self.got - self.want), np.inf).max(axis=-1)
        return bool((off > FAILS * self._size)[np.asarray(broken.any(axis=-1))].all())


def rms(values: Array) -> float:
    """Return the root mean square of the values; 0 for an empty array."""
    return float(np.sqrt(np.mean(values**2))) if values.size else 0.0
