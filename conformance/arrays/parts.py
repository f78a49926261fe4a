"""Parts of a problem on which mistakes are tried first, and what dismisses a mistake there.

A mistake that does not explain the first part that shows it is not tried on the whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from types import MethodType
from typing import Any, NamedTuple

import numpy as np

from conformance.arrays import ports, tiles
from conformance.arrays.given import merged, separate
from conformance.causes import features, projections, softmax
from conformance.causes.diagnose import hypotheses
from conformance.causes.hypothesis import BETTER, Chosen, Evidence, Hypothesis, Maker, rms
from conformance.causes.stages import Stages
from conformance.definition.dtypes import Array, BoolArray, IntArray
from conformance.definition.problem import Problem
from conformance.records.findings import Phrase
from conformance.records.numbers import ratios

MOST_FIRST = 2**15
"""The most attention weights of the part on which every mistake is tried first."""

FEWEST_ROWS = 8
"""The fewest rows of a head on which mistakes are tried first, and on which pairs are tried."""

LEAST_SHARE = 0.1
"""The least share of the wrong elements that such a mistake explains."""

NEAR = 0.1
"""The largest rms error, relative to that of the right answer, that a mistake leaves for which the
noise of its own answer is measured."""

ALONG = 0.7
"""The least correlation of the error with what a known mistake changes, if it is no rounding."""

BY_CHANCE = 4.5
"""A correlation with rounding errors, times the root of their number, that none of some hundred
mistakes reaches by chance."""


class Part:
    """A part of a problem on heads, and of the evidence: of some heads, some queries, or both.

    Attributes:
        evidence: the evidence on this part.
    """

    def __init__(
        self,
        problem: Problem,
        evidence: Evidence,
        chosen: Chosen | None = None,
        place: tuple[int, ...] | None = None,
        rows: IntArray | None = None,
    ) -> None:
        """Take a part.

        Args:
            problem: the whole problem.
            evidence: the evidence on the whole output.
            chosen: which queries of a longer problem these are, and how many that has.
            place: the batch entry, the key/value head and, if only one is taken, the query head;
                None for all of them.
            rows: the queries; None for all of them.
        """
        self._whole, self._of_whole, self._chosen = problem, evidence, chosen
        self._place, self._rows = place, rows
        self.evidence = evidence
        if place is not None:
            self.evidence = of_part(problem, evidence, *place)
        if rows is not None:
            self.evidence = self.evidence.of_rows(rows)

    def shows(self, cause: Phrase) -> bool:
        """Return whether this part shows a mistake, which must not join what is left out."""
        if self._place is not None and cause.id.startswith(ports.ACROSS):
            return False
        return self._rows is None or not ports.joins_queries(cause)

    def thin(self) -> Part | None:
        """Return a part of it with few queries, most of them wrong; None if it has few.

        None is also returned for a problem whose queries cannot be told from each other by their
        positions, because lengths or a tree belong to them.
        """
        problem, shape = self._whole, self._whole.shape
        heads = shape.batch * shape.heads if self._place is None else shape.group
        count = max(FEWEST_ROWS, MOST_FIRST // (heads * shape.key_length))
        lengths = (problem.query_lengths, problem.key_lengths, problem.tree)
        if 2 * count > shape.query_length or any(it is not None for it in lengths):
            return None
        one = self.evidence
        off = np.abs(ratios(one.got, one.want, one.noise, one.underflow))
        largest = np.nan_to_num(off, nan=math.inf).max(axis=(0, 2))
        return self._taken(self._place, tiles.telling(largest, count))

    def of_worst_head(self) -> Part:
        """Return the part of the query head with the largest errors, of a part of a group."""
        assert self._place is not None
        group = self._whole.shape.group
        errors = separate(self._errors, group).max(axis=(0, 2, 3))
        entry, kv_head = self._place[:2]
        head = kv_head * group + int(errors.argmax())
        return self._taken((entry, kv_head, head), self._rows)

    def of_worst_rows(self, count: int) -> Part:
        """Return the part of so many of its queries, which have the largest errors."""
        assert self._rows is None
        largest = self._errors.max(axis=(0, 2))
        return self._taken(self._place, np.sort(np.argsort(-largest)[:count]))

    @property
    def _errors(self) -> Array:
        got, want = self.evidence.got, self.evidence.want
        return np.where(np.isfinite(got), np.abs(got - want), 0.0)

    def _taken(self, place: tuple[int, ...] | None, rows: IntArray | None) -> Part:
        return Part(self._whole, self._of_whole, self._chosen, place, rows)

    @property
    def chosen(self) -> Chosen | None:
        """Which queries of a longer problem these are, and how many that has; None for all."""
        if self._rows is None:
            return self._chosen
        every, count = self._chosen or (None, self._whole.shape.query_length)
        return (self._rows if every is None else every[self._rows]), count

    def cut(self, array: np.ndarray) -> np.ndarray:
        """Return what belongs to this part of an array like the output."""
        if self._place is not None:
            array = ports.cut(self._whole, array, *self._place)
        return array if self._rows is None else array[:, self._rows]

    @cached_property
    def maker(self) -> Maker:
        """The factory of hypotheses about this part."""
        problem = self._whole
        if self._place is not None:
            problem = ports.part(problem, *self._place)
        if self._rows is not None:
            problem = ports.rows_of(problem, self._rows)
        return Maker(problem, chosen=self.chosen)


class Seen(NamedTuple):
    """What a mistake explains that does not explain everything.

    Attributes:
        share: the share of the wrong elements that it explains; 0 if that is too small, or if it
            changes elements that are right.
        close: whether at least half of the error would not be there without it.
        along: whether it changes the output as the error does, but by more or less.
    """

    share: float = 0.0
    close: bool = False
    along: bool = False

    @classmethod
    def of(cls, cause: Phrase, evidence: Evidence, predicted: Array) -> Seen:
        """Return what the output with a mistake has in common with the one that was returned."""
        if predicted.shape != evidence.got.shape or not cause:
            return cls()
        known = np.isfinite(predicted) & np.isfinite(evidence.got)
        left, before = (rms((evidence.got - it)[known]) for it in (predicted, evidence.want))
        along = not cause.id.endswith("rounded") and _correlated(evidence, predicted)
        share = float(elements_explained(evidence, predicted).sum() / evidence.wrong.sum())
        right = share >= LEAST_SHARE and evidence.near(predicted)[~evidence.wrong].all()
        return cls(share if right else 0.0, left <= BETTER * before, along)


def every_hypothesis(maker: Maker) -> Iterator[Hypothesis]:
    """Yield all hypotheses about arrays, the simplest first."""
    # Those of `ports` that begin with "untold." are the same: nobody asks for anything here.
    told = ("causal.unasked", "softmax.sink-of-0")
    yield from (it for it in hypotheses(maker) if it.cause.id not in told)
    yield from ports.hypotheses(maker)


def joining_queries(maker: Maker) -> Iterator[Hypothesis]:
    """Yield those of all hypotheses that join queries.

    The others are not made on the way: of a long output, some hold arrays as large as its weights.
    """
    of_modules = (features.hypotheses, projections.hypotheses, softmax.over_axes, ports.hypotheses)
    every = itertools.chain.from_iterable(it(maker) for it in of_modules)
    return (it for it in every if ports.joins_queries(it.cause))


def numbered(listed: Any) -> Iterator[tuple[int, Hypothesis]]:
    """Yield hypotheses, each with how many with an equal cause were before it."""
    seen: dict[Phrase, int] = {}
    for hypothesis in listed:
        number = seen[hypothesis.cause] = seen.get(hypothesis.cause, -1) + 1
        yield number, hypothesis


def of_part(
    problem: Problem, evidence: Evidence, entry: int, group: int, head: int | None = None
) -> Evidence:
    """Return the evidence on the heads of one batch entry that share a key/value head, or on one.

    The arguments after the evidence are those of `ports.part`.
    """
    got, want, noise = (
        ports.cut(problem, it, entry, group, head)
        for it in (evidence.got, evidence.want, evidence.noise)
    )
    return replace(evidence, got=got, want=want, noise=noise)


def explained(evidence: Evidence, predicted: Array, hypothesis: Hypothesis) -> bool:
    """Return whether the answer with a mistake is the one that was returned, up to noise.

    If it nearly is, the noise of the answer with the mistake is measured: with larger logits, it is
    larger than that of the right answer.
    """
    if evidence.explained(predicted):
        return True
    if predicted.shape != evidence.got.shape or hypothesis.breaks:
        return False
    known = np.isfinite(predicted) & np.isfinite(evidence.got)
    left = float(np.mean((evidence.got - predicted)[known] ** 2)) if known.any() else math.inf
    before = float(np.mean((evidence.got - evidence.want)[known] ** 2)) if known.any() else 0.0
    if not left <= NEAR**2 * before or not evidence.spread:
        return False
    noisy = hypothesis.make()
    problem = noisy.problem
    random = np.random.Generator(np.random.PCG64(1))
    u, summed = problem.format.roundoff, problem.format.accumulator

    def held(a: Stages, what: str, values: Array) -> Array:
        size: Any = np.abs(values) * u
        if what == "logits" and "score" not in a.own:
            # A sum of products, each partial sum of which was rounded, may cancel.
            q, k = (a.projected[name] for name in ("query", "key"))
            norms = [np.sqrt((it**2).sum(axis=-1)) for it in (q, a.repeat(k, "key"))]
            products = norms[0][..., None] * norms[1][:, :, None]
            if products.shape == values.shape:
                size = size + products * abs(a.problem.logit_scale) * summed
        return values + size * random.uniform(-1, 1, values.shape)

    if "held" in vars(noisy):
        return False
    noisy.held = MethodType(held, noisy)  # type: ignore[method-assign]
    for shared in ("weights", "context"):
        vars(noisy).pop(shared, None)
    errors = noisy.output - predicted
    if errors.shape != evidence.got.shape or not np.isfinite(errors[known]).all():
        return False
    rows = np.sqrt(np.where(known, errors, 0.0) ** 2).max(axis=-1, keepdims=True)
    return evidence.explained(predicted, rows / evidence.spread)


def elements_explained(evidence: Evidence, predicted: Array) -> BoolArray:
    """Return which wrong elements a mistake explains."""
    # A prediction of huge numbers has so much noise that it is near everything.
    off, left = (np.abs(evidence.got - it) for it in (evidence.want, predicted))
    explained: BoolArray = evidence.near(predicted) & evidence.wrong & (left <= BETTER * off)
    return explained


def rows_explained(evidence: Evidence, predicted: Array, heads: int) -> bool:
    """Return whether a mistake explains the wrong rows of heads if it is made in these only."""
    if predicted.shape != evidence.got.shape:
        return False
    wrong = separate(evidence.wrong, heads)
    rows = merged(np.broadcast_to(wrong.any(axis=-1, keepdims=True), wrong.shape))
    mixed = np.where(rows, predicted, evidence.want)
    return not np.isnan(mixed).any() and evidence.explained(mixed)


def _correlated(evidence: Evidence, predicted: Array) -> bool:
    """Return whether the error is, in units of σ, about a multiple of what a mistake changes.

    Rounding errors are not: they are as good as random.
    """
    known = np.isfinite(predicted) & np.isfinite(evidence.got) & (evidence.noise > 0)
    noise = np.where(known, evidence.noise, 1.0)
    changed, off = (((array - evidence.want) / noise)[known] for array in (predicted, evidence.got))
    size = math.sqrt(float(changed @ changed) * float(off @ off))
    if not (size > 0 and math.isfinite(size)):
        return False
    return abs(float(changed @ off)) / size > max(ALONG, BY_CHANCE / math.sqrt(off.size))
