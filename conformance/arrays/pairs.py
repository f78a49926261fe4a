"""Search for two mistakes together, one of which is common, or for one and a wrong factor.

Neither explains the output alone. They are sought in a few rows, and have to explain everything.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from conformance.arrays import recovery
from conformance.arrays.parts import FEWEST_ROWS, NEAR, every_hypothesis, numbered
from conformance.arrays.search import TELLING, TWO, Search, chosen_causes, every_and
from conformance.causes import logits
from conformance.causes.hypothesis import (
    BETTER,
    MOST_ELEMENTS,
    About,
    Best,
    Hypothesis,
    Maker,
)
from conformance.causes.stages import Stages
from conformance.definition.expectation import Expectation
from conformance.definition.problem import Answer
from conformance.records.findings import NOTHING, Argument, Phrase

COMMON = (
    *(it for it in TELLING if it not in ("softmax.uniform", "window.one-fewer-before")),
    "scale.by-head-size",
    "mask.not-applied-beside-causal",
    "mask.inverted-beside-causal",
    "mask.transposed",
    "causal.sees-next-key",
    "causal.without-own-key",
    "heads.merged-by-reshape",
    "softmax.base-2",
    "sinks.not-applied",
    "alibi.not-applied",
    "alibi.added",
    "norm.without-weight",
    "key.reshaped",
    "output.permuted",
    "cache.one-row-late",
    "untold.causal",
    "untold.causal-aligned",
    "untold.rotary",
    "untold.norm",
)
"""Mistakes of which one may be made together with any other; the others are not tried in pairs."""

RARE = (
    *("tiles.", "keys.", "softmax.power", "softmax.small", "softmax.normaliser", "softmax.maximum"),
    *("logits.cut", "precision.", "scale.rounded", "causal.by-tile", "causal.positions-rounded"),
    *("window.in-blocks", "mask.blocked-", "cache.chunk", "cache.forgotten", "cache.aligned"),
    *("window.of-last", "window.first-keys", "untold.chunk", "untold.rotary-scaling"),
    *("score.last-components", "score.first-components", "key.last-", "heads.first-of"),
    *("rotary.new-", "rotary.table-of"),
)
"""How the ids of causes begin that are not tried beside another one, mostly those of kernels."""

MOST_PAIRED = 2**13
"""The most attention weights of a problem, or a part, for which pairs of mistakes are tried."""

FEWEST_PAIRED = 4
"""The fewest rows on which pairs are tried where a part has a single head."""


MOST_OPEN = 0.5
"""The largest share of the wrong elements that two mistakes leave open, as they see no key."""


class PairSearch(Search):
    """A search for the mistakes that explain an answer, also for two of them together."""

    def pairs(self) -> list[Phrase]:
        """Return the causes that are two mistakes together, one of which is common.

        Neither explains the output alone, and each of them leaves most of what the other explains.
        """
        if not self.output.wrong.any():
            return []
        small = self._small()
        known = [] if small is None else small._pairs()
        if small is not None and small is not self:
            # What explains these rows has to explain everything.
            known = [(self._of_both(cause), cause) for _, cause in known]
            known = [(misfit, cause) for misfit, cause in known if math.isfinite(misfit)]
            self.open_causes |= small.open_causes
        found = self._apart(chosen_causes(known, self.problem.dtype))
        return found or ([] if small is None else self.with_factor(small.close))

    def _small(self) -> PairSearch | None:
        """Return a search in a part that is small enough for pairs; None if there is none."""
        problem, shape = self.problem, self.problem.shape
        if math.prod(shape.logits) <= MOST_PAIRED:
            return self
        if not problem.heads_alone:
            return None
        part = self._part(self._worst_part)
        heads = shape.group
        if FEWEST_ROWS * heads * shape.key_length > MOST_PAIRED:
            heads, part = 1, part.of_worst_head()
        count = MOST_PAIRED // (heads * shape.key_length)
        if count < min(FEWEST_PAIRED, shape.query_length):
            return None
        if count < shape.query_length:
            part = part.of_worst_rows(count)
        one = part.evidence
        expectation = Expectation({"output": one.want}, {"": {"output": one.noise}}, one.underflow)
        return PairSearch(
            part.maker.problem, expectation, Answer(output=one.got), chosen=part.chosen
        )

    def _pairs(self) -> list[tuple[float, Phrase]]:
        """Return the pairs of mistakes that explain this output, each with its misfit."""
        output, maker = self.output, self._maker(self.problem)
        known: list[tuple[float, Phrase]] = []
        named: set[frozenset[Phrase]] = set()
        alone = {
            (it.cause, n): output.misfit(self._predicted(it))
            for n, it in numbered(every_hypothesis(maker))
        }
        before = output.misfit(output.want)
        self.close |= {cause for (cause, _), left in alone.items() if left <= BETTER * before}
        for number, first in numbered(every_hypothesis(maker)):
            left = alone[first.cause, number]
            stages = first.make()
            if first.cause.id not in COMMON or type(stages) is not Stages or left == before:
                continue
            beside = maker.beside(stages)
            misfit, cause = self._permuted_or_multiplied(beside)
            if cause and math.isfinite(misfit) and misfit <= NEAR * left:
                about: About = {"causes": [first.cause, cause]}
                known.append((misfit, Phrase(TWO, {**about})))
            for other, second in numbered(every_hypothesis(beside)):
                both = frozenset((first.cause, second.cause))
                if second.breaks or second.cause.id.startswith(RARE) or both in named:
                    continue
                if _is_of_one_kind(first.cause, second.cause):
                    continue
                misfit, alone_too = (
                    self._of_pair(second),
                    alone.get((second.cause, other), math.inf),
                )
                if math.isfinite(misfit) and misfit <= NEAR * min(left, alone_too):
                    named.add(both)
                    about = {"causes": [first.cause, second.cause]}
                    known.append((misfit, Phrase(TWO, {**about})))
                    if self._leaves_open(self._predicted(second)):
                        self.open_causes.add(known[-1][1])
        return known

    def _permuted_or_multiplied(self, maker: Maker) -> tuple[float, Phrase]:
        """Return the cause that an output is another one multiplied, or in another order.

        The other one is that of `maker`, beside a mistake. The first result is the misfit.
        """
        output, want = self.output, maker.right.output
        if want.shape != output.got.shape or not np.isfinite(want).all():
            return math.inf, NOTHING
        evidence = replace(output, want=want)
        best = Best(self.problem.dtype, lambda cause: True)
        logits.factor_of_output(maker, evidence, best)
        if best.cause:
            return min(best.known, key=lambda it: it[0])
        return 0.0, recovery.permuted(self.problem, evidence)

    def _of_pair(self, second: Hypothesis) -> float:
        """Return the misfit of a mistake beside another; ∞ if they do not explain the output."""
        try:
            predicted = self._predicted(second)
        except (AssertionError, IndexError, ValueError):
            # A hypothesis may presuppose what the first mistake takes away, such as a shape.
            return math.inf
        if predicted.shape != self.output.got.shape:
            return math.inf
        misfit, wrong = self.output.misfit(predicted), self.output.wrong
        if not misfit <= NEAR * self.output.misfit(self.output.want):
            return math.inf
        if (np.isnan(predicted) & wrong).sum() > MOST_OPEN * wrong.sum():
            return math.inf
        return misfit if self._explains(self.output, predicted, second) else math.inf

    def _of_both(self, both: Phrase) -> float:
        """Return the misfit of the two mistakes that a cause holds; ∞ if they do not explain it."""
        made = every_and([both])(self._maker(self.problem))
        return min((self._of_pair(hypothesis) for hypothesis in made), default=math.inf)

    def with_factor(self, causes: Collection[Phrase]) -> list[Phrase]:
        """Return the causes that are one of these mistakes and a wrong factor of the logits.

        What such a factor leaves beside a mistake may be as small as rounding in a narrower dtype.
        """
        whole = self._maker(self.problem)
        part = next(iter(self._parts()), None)
        maker, evidence = (whole, self.output) if part is None else (part.maker, part.evidence)
        known: list[tuple[float, Phrase]] = []
        if math.prod(maker.problem.shape.logits) > MOST_ELEMENTS:
            return []
        of_whole = {(it.cause, number): it for number, it in numbered(self.every(whole))}
        for number, first in numbered(self.every(maker)):
            again = of_whole.get((first.cause, number))
            if first.cause not in causes or again is None or type(again.make()) is not Stages:
                continue
            for second, factor in logits.fitted_factors(maker.beside(first.make()), evidence):
                for misfit, named in self._factor(whole.beside(again.make()), second, factor):
                    if misfit > BETTER * self.output.misfit(self._predicted(again)):
                        continue
                    both: dict[str, Argument] = {"causes": [first.cause, named]}
                    known.append((misfit, Phrase(TWO, both)))
        return self._apart(chosen_causes(known, self.problem.dtype))


def _is_of_one_kind(one: Phrase, other: Phrase) -> bool:
    """Return whether two mistakes are about the same number, so that any two make a third."""
    kinds = [it.id.partition(".")[0] for it in (one, other)]
    return kinds == ["scale", "scale"] or one.id == other.id
