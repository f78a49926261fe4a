"""Search for the mistake that explains an answer, or some of its elements.

Every known mistake is tried, first on a few queries of one batch entry and of the heads that share
one key/value head, which is quick, and what explains that part, on everything. A mistake is named
only if it explains every wrong element and leaves every right one. If several do, they are compared
on another problem: what agrees there too is one thing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from conformance.arrays import ports, recovery, suggestion
from conformance.arrays.given import MOST_LOGITS, merged, separate
from conformance.arrays.noise import expected
from conformance.arrays.parts import (
    Part,
    Seen,
    elements_explained,
    every_hypothesis,
    explained,
    joining_queries,
    numbered,
    of_part,
    rows_explained,
)
from conformance.causes import gradients, logits, precision, softmax
from conformance.causes.diagnose import ELEMENTS
from conformance.causes.hypothesis import (
    BETTER,
    HALF,
    MOST_ELEMENTS,
    Best,
    Chosen,
    Evidence,
    Hypothesis,
    Maker,
    alike,
    rms,
)
from conformance.causes.location import where_wrong
from conformance.causes.stages import Stages
from conformance.definition.dtypes import DTYPES, Array, BoolArray, IntArray
from conformance.definition.expectation import Expectation
from conformance.definition.problem import Answer, Problem
from conformance.records.findings import INFINITE, NOTHING, Argument, Phrase
from conformance.records.numbers import ratios

TELLING = (
    "softmax.uniform",
    "scale.missing",
    "mask.inverted",
    "mask.not-applied",
    "causal.not-applied",
    "causal.aligned",
    "softmax.over-queries",
    "softmax.over-heads",
    "heads.tiled",
    "heads.split-by-reshape",
    "heads.interleaved",
    "rotary.not-applied",
    "rotary.pairs",
    "window.one-fewer-before",
    "window.one-more-before",
    "soft-cap.not-applied",
    "soft-cap.after-mask",
    "sinks.not-applied",
    "norm.not-applied",
    "bias.not-applied",
    "bias.transposed",
)
"""Mistakes whose numbers are compared with the right ones, to say which of them would not show."""


TWO = "mistakes.two"
"""The id of the cause that is two mistakes together."""


MOST_PARTIAL = 3
"""The most mistakes that are named because they explain some of the wrong elements."""


BEND = 1e-3
"""By how much the angle of the last position changes where a rotary frequency is bent."""


BENT = 0.7
"""The share of an error, as an rms, that bent rotary frequencies leave if it is not rounding."""


FEWEST_FOR_EACH = 8
"""The fewest elements of an output for each rotary frequency that is fitted to it."""


MOST_SIZE = 4096
"""The largest size of a head, or of a layer, whose root a wrong scale may be the inverse of."""


WIDEST = 1024
"""The most components of all heads together for which mistakes are tried on the whole at once."""


MOST_LEFT = 1.0
"""The largest error, in σ and as an rms, that a mistake may leave in half precision.

An implementation that makes it and rounds after every operation leaves half of that. Bent logits
are within the limits of mistakes that they are not, but these leave more than twice as much."""


FITTED = ("scale.factor", "bias.factor", "alibi.factor")
"""Causes with a number that was fitted: a mistake without one is named instead if it fits, too."""


class Search:
    """The search for the mistakes that explain an answer.

    Attributes:
        partial: mistakes that explain some wrong elements, their share, and where these are.
        open_causes: mistakes that explain the output, but say nothing of some wrong elements.
        telling: what would tell several causes apart, if it is known.
        close: mistakes without which at least half of the error would not be there.
        along: mistakes that change the output as the error does, but by more or less.
        chosen: which queries of a longer problem these are, and how many that has, or None.
    """

    def __init__(
        self,
        problem: Problem,
        expectation: Expectation,
        answer: Answer,
        only: Collection[Phrase] = (),
        coarser: tuple[float, int] = (1.0, 0),
        where: Callable[[BoolArray], Phrase] | None = None,
        chosen: Chosen | None = None,
        longer: Problem | None = None,
        read_otherwise: Sequence[Array] = (),
    ) -> None:
        """Prepare the search.

        Args:
            problem: the problem.
            expectation: what is expected.
            answer: the answer that deviates.
            only: the mistakes that are tried; () for all.
            coarser: how much larger the noise is than that of the dtype of the arrays; and of what
                dtype the errors that a mistake leaves must then be, by its significand bits.
            where: how to say where rows are wrong; None for `where_wrong`.
            chosen: which queries of a longer problem these are, and how many that has.
            longer: this problem, if mistakes that join its queries are to be tried on it.
            read_otherwise: the outputs that are expected of what was given as it was read
                otherwise. A mistake may leave more than noise, so that it has to explain more than
                these do.
        """
        self.problem = problem
        self.expectation = expectation
        self.answer = answer
        output = Evidence.of("output", answer.output, expectation)
        closely = problem.dtype in HALF and coarser[0] == 1
        self.output = replace(output, most=MOST_LEFT) if closely else output
        self.partial: list[tuple[Phrase, float, Phrase]] = []
        self.telling: list[Phrase] = []
        self.open_causes: set[Phrase] = set()
        self.close: set[Phrase] = set()
        self.along: set[Phrase] = set()
        self._only, self._where = only, where or where_wrong
        self._coarser, self._bits = coarser
        self.chosen = chosen
        self._read_otherwise = read_otherwise
        self._longer = longer
        # What a query gets that sees no key is open, so nothing is predicted of it.
        unseen = ports.unseen(problem)
        self.open = unseen if unseen.any() else None

    def accuracy(self) -> Phrase:
        """Return the cause that the output is only as accurate as a narrower dtype, if it is."""
        if self.along - self.close or self._turns_otherwise():
            return NOTHING
        problem = self.problem
        certain = (problem.allowed_in_full().sum(axis=-1) <= 1).all(axis=1)
        right = Stages(problem)
        return precision.coarse("output", self.output, problem.dtype, None, certain, right)

    def _turns_otherwise(self) -> bool:
        """Return whether the error is one of rotary frequencies, which no rounding is like."""
        rotary = self.problem.rotary
        if rotary is None or not self.problem.heads_alone or not self.output.wrong.any():
            return False
        part = self._part(self._worst_part)
        maker, evidence = part.maker, part.evidence
        if math.prod(maker.problem.shape.logits) > MOST_ELEMENTS:
            return False
        step = BEND / max(1.0, float(np.abs(maker.problem.position_of_keys).max()))
        right, columns = maker.right.output, []
        for pair in range(rotary.size // 2):

            def frequencies(a: Stages, pair: int = pair) -> Array:
                found = Stages.frequencies(a).copy()
                found[pair] += step
                return found

            bent = maker.staged("", frequencies=frequencies).make().output
            columns.append(((bent - right) / step / evidence.noise).ravel())
        known = np.isfinite(columns).all(axis=0) & np.isfinite(evidence.got.ravel())
        off = ((evidence.got - evidence.want) / evidence.noise).ravel()[known]
        matrix = np.array(columns)[:, known].T
        if len(off) < FEWEST_FOR_EACH * matrix.shape[1]:
            return False
        fitted, *_ = np.linalg.lstsq(matrix, off, rcond=None)
        return rms(off - matrix @ fitted) < BENT * rms(off)

    def with_digits(self, bits: int, noise_bits: int) -> Search:
        """Return a search among the close mistakes, with more noise.

        Args:
            bits: the significand bits of the narrower dtype in which it was computed.
            noise_bits: those of the dtype whose roundoff the noise is scaled to.
        """
        narrow = next(it for it in DTYPES.values() if it.significand_bits == noise_bits)
        coarser = 2.0 ** (self.problem.format.significand_bits - noise_bits)
        noise = {name: coarser * sigma for name, sigma in self.expectation.sigma.items()}
        expectation = Expectation(self.expectation.arrays, {"": noise}, narrow.underflow)
        problem = self.problem.replace(dtype=narrow.name)
        others = (self.close, (coarser, bits), self._where, self.chosen)
        also_read = self._read_otherwise
        return Search(problem, expectation, self.answer, *others, read_otherwise=also_read)

    def causes(self) -> list[Phrase]:
        """Return the causes, the simplest first; [] if none is known or nothing is wrong."""
        if self.output.wrong.any():
            return self._with_gradients(self._apart(self._of_output()))
        maker = self._maker(self.problem)
        weights = self.answer.weights
        if weights is not None:
            evidence = Evidence.of("weights", weights, self.expectation)
            if evidence.wrong.any():
                best = Best(self.problem.dtype, lambda cause: True)
                softmax.returned(maker, evidence, _nothing, best)
                return [best.cause] if best.cause else []
        derived = {
            name: Evidence.of(f"gradient.{name}", array, self.expectation)
            for name, array in self.answer.gradients.items()
        }
        if any(one.wrong.any() for one in derived.values()):
            best = Best(self.problem.dtype, lambda cause: True)
            gradients.cause(maker, derived, _nothing, best)
            return [best.cause] if best.cause else []
        return []

    def _apart(self, found: list[Phrase]) -> list[Phrase]:
        """Return those of several causes that are not one thing, each with one of its numbers.

        Those that say nothing of some wrong elements give way to those that explain all.
        """
        found = [it for it in found if it not in self.open_causes] or found
        if len(found) < 2:
            return found
        kept, self.telling = suggestion.apart(self.problem, found, every_and(found))
        kinds: dict[tuple[str, ...], list[Phrase]] = {}
        for it in kept:
            parts = [one.id for one in it.parts("causes") if isinstance(one, Phrase)]
            kinds.setdefault((it.id, *parts), []).append(it)
        return [
            first.having(others=len(others)) if others and first.id != TWO else first
            for first, *others in kinds.values()
        ]

    def _leaves_open(self, predicted: Array) -> bool:
        """Return whether a prediction says nothing of some wrong elements."""
        return bool((np.isnan(predicted) & self.output.wrong).any())

    def _with_gradients(self, found: list[Phrase]) -> list[Phrase]:
        """Return the causes of a wrong output, with that of gradients that do not follow from it.

        Gradients are examined if one mistake is named, and the answer with it is the right one to
        another problem, whose gradients and noise are known.
        """
        if len(found) != 1 or not self.answer.gradients or self._coarser > 1 or self.chosen:
            return found
        maker = self._maker(self.problem)
        made = (
            hypothesis.make()
            for hypothesis in self.every(maker)
            if hypothesis.cause == found[0]
            and self._explains(self.output, self._predicted(hypothesis), hypothesis)
        )
        stages = next(made, None)
        if stages is None or stages.changes or type(stages) is not Stages:
            return found
        with_it = expected(stages.problem, "", True)
        follow, right = (
            {n: Evidence.of(f"gradient.{n}", it, of) for n, it in self.answer.gradients.items()}
            for of in (with_it, self.expectation)
        )
        if not any(one.wrong.any() for one in follow.values()):
            return found
        second = Phrase("gradient.of-right-output")
        if any(one.wrong.any() for one in right.values()):
            best = Best(self.problem.dtype, lambda cause: True)
            gradients.cause(maker.beside(stages), follow, _nothing, best)
            second = best.cause or Phrase("gradient.of-neither")
        return [Phrase(TWO, {"causes": [found[0], second]})]

    def _of_output(self) -> list[Phrase]:
        output, whole = self.output, self._maker(self.problem)
        best = Best(self.problem.dtype, lambda cause: True)
        logits.factor_of_output(whole, output, best)
        known = [one for one in best.known if self._is_rounding(one[0])]
        breaking: list[Phrase] = []
        parts = self._parts()
        dismissed = self._dismissed(parts)
        partly: list[tuple[float, Phrase, int]] = []
        made: dict[Phrase, tuple[float, Phrase]] = {}
        # One after another, since some hypotheses hold weights, which are large for wide heads.
        for number, hypothesis in numbered(self.every(whole)):
            seen = dismissed.get((hypothesis.cause, number))
            if seen is not None:
                self._note(hypothesis.cause, seen)
                partly += [(seen.share, hypothesis.cause, number)] if seen.share else []
                continue
            predicted = self._predicted(hypothesis)
            if self._explains(output, predicted, hypothesis):
                if self._leaves_open(predicted):
                    self.open_causes.add(hypothesis.cause)
                if hypothesis.breaks:
                    breaking.append(hypothesis.cause)
                else:
                    known.append((output.misfit(predicted), hypothesis.cause))
            elif not hypothesis.breaks:
                mixed = self._in_part(hypothesis, predicted)
                if mixed is not None:
                    made[hypothesis.cause] = mixed
                else:
                    self._note_partial(hypothesis.cause, predicted)
        if not known:
            known += self._across_rows()
        if self._coarser == 1 and not known:
            read_off = itertools.islice(recovery.of_output(whole, output, is_partial=bool(made)), 1)
            known += [(0.0, cause) for cause in read_off]
        if not known:
            known += [(misfit, cause) for misfit, cause in made.values()]
        if not known and breaking:
            known = [
                (0.0, breaking[0].having(others=len(breaking) - 1) if breaking[1:] else breaking[0])
            ]
        if not known or self.problem.dtype in HALF:
            # In half precision, a wrong mistake may fit within the noise, but not as well.
            known += self._less_simple(whole, parts[0] if parts else None, bool(known))
        if not known:
            self._note_again(whole, partly)
        return chosen_causes(known, self.problem.dtype)

    def _across_rows(self) -> list[tuple[float, Phrase]]:
        """Return the mistakes that join queries, of which some rows alone show nothing.

        Where only the heads are prepared otherwise, a few of their rows are computed. What joins
        queries after that is tried on the heads of a part, and then on everything.
        """
        if self._longer is None or self.chosen is None:
            return []
        rows, part = self.chosen[0], self._part(self._worst_part)
        known: list[tuple[float, Phrase]] = []
        is_too_long = math.prod(self._longer.shape.logits) > MOST_LOGITS
        of_whole = [*numbered(self._joining(Maker(self._longer, shares=not is_too_long)))]
        for _, hypothesis in of_whole:
            if not _joins_later(hypothesis):

                def make(whole: Hypothesis = hypothesis) -> Stages:
                    return ports.with_rows(whole.make(), rows)

                few = replace(hypothesis, make=make)
                predicted = self._predicted(few)
                if self._explains(self.output, predicted, few):
                    known.append((self.output.misfit(predicted), few.cause))
        if known or is_too_long:
            return known
        possible: set[tuple[Phrase, int]] = set()
        of_part = Maker(ports.part(self._longer, *self._worst_part))
        for number, hypothesis in numbered(self._joining(of_part)):
            cause = hypothesis.cause
            if not cause.id.startswith(ports.ACROSS) and _joins_later(hypothesis):
                predicted = self._predicted(hypothesis, part, rows)
                if self._explains(part.evidence, predicted, hypothesis):
                    possible.add((cause, number))
        for number, hypothesis in of_whole:
            cause = hypothesis.cause
            tried = cause.id.startswith(ports.ACROSS) or (cause, number) in possible
            if tried and _joins_later(hypothesis):
                predicted = self._predicted(hypothesis, rows=rows)
                if self._explains(self.output, predicted, hypothesis):
                    known.append((self.output.misfit(predicted), cause))
        return known

    def _joining(self, maker: Maker) -> Iterator[Hypothesis]:
        return self._of_these(joining_queries(maker))

    def _part(self, place: tuple[int, ...] | None = None) -> Part:
        return Part(self.problem, self.output, self.chosen, place)

    def _maker(self, problem: Problem) -> Maker:
        return Maker(problem, chosen=self.chosen)

    def every(self, maker: Maker) -> Iterator[Hypothesis]:
        """Yield the hypotheses that are tried."""
        return self._of_these(every_hypothesis(maker))

    def _of_these(self, hypotheses: Iterator[Hypothesis]) -> Iterator[Hypothesis]:
        return (it for it in hypotheses if not self._only or it.cause in self._only)

    def _explains(self, evidence: Evidence, predicted: Array, hypothesis: Hypothesis) -> bool:
        if not explained(evidence, predicted, hypothesis):
            return False
        if not self._explains_each_row(evidence, predicted):
            return False
        if evidence is self.output and not self._is_better(predicted):
            return False
        return self._leaves_rounding(evidence, predicted, hypothesis)

    def _is_rounding(self, misfit: float) -> bool:
        """Return whether an rms error is not too large for the narrower dtype, if there is one."""
        if self._coarser == 1:
            return True
        off = precision.in_digits(Stages(self.problem), self._bits).output - self.output.want
        return misfit <= precision.LIKE[1] * rms(off[np.isfinite(off)])

    def _leaves_rounding(
        self, evidence: Evidence, predicted: Array, hypothesis: Hypothesis
    ) -> bool:
        """Return whether what a mistake leaves is rounding to the narrower dtype, if there is one.

        Its noise would hide other mistakes, so it must have the size of errors that rounding makes.
        """
        if self._coarser == 1:
            return True
        lost = ~(np.isfinite(predicted) & np.isfinite(evidence.got))
        left = ratios(evidence.got, predicted, evidence.noise / self._coarser, evidence.underflow)
        if not precision.is_rounding(left, np.asarray(lost.any(axis=-1))):
            return False
        size = precision.size_of_errors(evidence, predicted, hypothesis.make(), self._bits)
        return size <= precision.LIKE[1]

    def _is_better(self, predicted: Array) -> bool:
        """Return whether a mistake leaves at most half of what each other reading leaves."""
        got = self.output.got
        for other in self._read_otherwise:
            known = np.isfinite(predicted) & np.isfinite(other) & np.isfinite(got)
            if self.open is not None:
                known &= ~self.open
            left, otherwise = (rms((got - it)[known]) for it in (predicted, other))
            if known.any() and left > BETTER * otherwise:
                return False
        return True

    def _explains_each_row(self, evidence: Evidence, predicted: Array) -> bool:
        """Return whether a mistake explains the wrong numbers of each row of a long output.

        A row of few keys has so much more noise than one of thousands that it would hide what the
        mistake leaves there.
        """
        if self.chosen is None:
            return True
        counts = evidence.wrong & np.isfinite(predicted) & np.isfinite(evidence.got)
        left, before = (
            np.sum((evidence.got - it) ** 2, axis=(0, 2), where=counts)
            for it in (predicted, evidence.want)
        )
        return bool((left <= BETTER**2 * before).all())

    def _predicted(
        self, hypothesis: Hypothesis, part: Part | None = None, rows: IntArray | None = None
    ) -> Array:
        """Return the output with a mistake, of the whole or of a part; NaN where it is open.

        `rows` are those of the queries which are predicted, if the hypothesis is of more.

        It is open only for queries that see no key with the mistake; without it, too, it is what
        was returned. Everywhere else, a prediction of NaN or ∞ is one: a number is not what the
        mistake gives.
        """
        stages = hypothesis.make()
        found, got = stages.output, self.answer.output
        if rows is not None and found.ndim == 3:
            found = found[:, rows[rows < found.shape[1]]]
        hidden = self.open
        if part is not None:
            got = part.cut(got)
            hidden = None if hidden is None else part.cut(hidden)
        unseen = ports.unseen(stages.problem)
        stages.forget()
        if found.shape != got.shape:
            return found
        lost = ~np.isfinite(found) & np.isfinite(got)
        if lost.any() and not hypothesis.breaks:
            found = np.where(lost & ~(unseen if rows is None else unseen[:, rows]), INFINITE, found)
        if hidden is None:
            return found
        # What is open is right, unless the mistake predicts nothing anywhere else.
        predicts = bool((np.isfinite(found) & ~hidden).any())
        return np.where(hidden, got if predicts else np.nan, found)

    def _parts(self) -> list[Part]:
        """Return parts with wrong numbers, the quickest to examine first; none of a small problem.

        Of each mistake, the first part that shows it decides whether it is tried on the whole.
        """
        problem, shape = self.problem, self.problem.shape
        # With many heads, the identities that stand for projections are large, too.
        little = math.prod(shape.logits) <= ELEMENTS * 2 and shape.query_width <= WIDEST
        if little or not problem.heads_alone:
            return []
        of_heads: list[Part] = []
        if not shape.batch == shape.kv_heads == 1:
            of_heads = [self._part(self._worst_part)]
        thin = [it.thin() for it in (*of_heads, self._part())]
        return [*(it for it in thin if it is not None), *of_heads]

    @cached_property
    def _worst_part(self) -> tuple[int, int]:
        """The batch entry and the key/value head with most wrong numbers."""
        shape = self.problem.shape
        wrong = separate(self.output.wrong & np.isfinite(self.output.got), shape.heads)
        counts = wrong.reshape(shape.batch, shape.kv_heads, -1).sum(axis=-1)
        if not counts.any():
            counts = (
                separate(self.output.wrong, shape.heads)
                .reshape(shape.batch, shape.kv_heads, -1)
                .sum(axis=-1)
            )
        entry, group = np.unravel_index(int(counts.argmax()), counts.shape)
        return int(entry), int(group)

    def _in_part(self, hypothesis: Hypothesis, predicted: Array) -> tuple[float, Phrase] | None:
        """Return the misfit and the cause if the mistake is made in some heads or rows only.

        Every wrong row of a head must be that of the mistake, and all others are right.
        """
        output, heads = self.output, ports.apart(self.problem)
        if predicted.shape != output.got.shape or not hypothesis.cause:
            return None
        wrong = np.asarray(separate(output.wrong, heads).any(axis=-1))
        if wrong.all():
            return None
        rows = np.repeat(wrong[..., None], output.got.shape[-1] // heads, axis=-1)
        mixed = np.where(merged(rows), predicted, output.want)
        # That a row is lost does not explain which numbers it has, nor why others are not lost.
        if (~np.isfinite(mixed) & np.isfinite(output.got)).any():
            return None
        if not (output.wrong & np.isfinite(mixed)).any() or not output.explained(mixed):
            return None
        if not self._explains_each_row(output, mixed) or not self._is_better(mixed):
            return None
        if not self._leaves_rounding(output, mixed, hypothesis):
            return None
        part = self._where(wrong)
        if not part:
            return None
        # Where the mistake changes nothing, the numbers do not show whether it is made.
        same = output.near(predicted)
        if same.all():
            return None
        return output.misfit(mixed), hypothesis.cause.having(part=part)

    def _dismissed(self, parts: Sequence[Part]) -> dict[tuple[Phrase, int], Seen]:
        """Return the mistakes that do not explain the first part that shows them.

        They are named by their cause and by how many with an equal one were before.
        """
        asked: dict[tuple[Phrase, int], Seen | None] = {}
        for part in parts:
            for number, hypothesis in numbered(self.every(part.maker)):
                cause, evidence = hypothesis.cause, part.evidence
                if (cause, number) in asked or not part.shows(cause):
                    continue
                predicted = self._predicted(hypothesis, part)
                # A mistake that shows nothing to this part may show something to others.
                shows = bool(np.isfinite(predicted).any())
                open_still = (
                    not shows
                    or self._explains(evidence, predicted, hypothesis)
                    or rows_explained(evidence, predicted, ports.apart(part.maker.problem))
                )
                asked[cause, number] = None if open_still else Seen.of(cause, evidence, predicted)
        return {key: seen for key, seen in asked.items() if seen is not None}

    def _note(self, cause: Phrase, seen: Seen) -> None:
        """Remember a mistake that explains much of the error."""
        if seen.close:
            self.close.add(cause)
        if seen.along:
            self.along.add(cause)

    def _note_partial(self, cause: Phrase, predicted: Array) -> None:
        """Remember a mistake also if it explains some wrong elements, and where these are."""
        seen = Seen.of(cause, self.output, predicted)
        self._note(cause, seen)
        if not seen.share:
            return
        where = NOTHING
        if self._where is where_wrong:
            explained = elements_explained(self.output, predicted)
            heads = ports.apart(self.problem)
            where = where_wrong(np.asarray(separate(explained, heads).all(axis=-1)))
        self.partial.append((cause, seen.share, where))
        self.partial.sort(key=lambda one: -one[1])
        del self.partial[MOST_PARTIAL:]

    def _note_again(self, whole: Maker, partly: Sequence[tuple[float, Phrase, int]]) -> None:
        """Remember of the mistakes that explain most of a part what they explain of the whole."""
        most = sorted(partly, key=lambda one: -one[0])[:MOST_PARTIAL]
        named = {(cause, number) for _, cause, number in most}
        for number, hypothesis in numbered(self.every(whole)) if named else ():
            if (hypothesis.cause, number) in named:
                self._note_partial(hypothesis.cause, self._predicted(hypothesis))

    def _less_simple(
        self, whole: Maker, part: Part | None, only_factors: bool
    ) -> list[tuple[float, Phrase]]:
        """Return causes that need a search of their own: a factor, or rounding on the way."""
        maker, evidence = (whole, self.output) if part is None else (part.maker, part.evidence)
        known: list[tuple[float, Phrase]] = []
        if math.prod(maker.problem.shape.logits) > MOST_ELEMENTS:
            return known
        for cause, factor in logits.fitted_factors(maker, evidence):
            known += self._factor(whole, cause, factor)
        if known or only_factors or self._coarser > 1:
            return known
        known += self._factor_in_heads(whole)
        if known:
            return known
        known += [(0.0, cause) for cause in precision.in_tf32(maker, evidence)]
        if known:
            return known
        coarse = self.accuracy()
        nearest = math.inf
        for hypothesis in precision.rounded_at_a_stage(maker):
            predicted = hypothesis.make().output
            if evidence.explained(predicted):
                again = next(
                    one
                    for one in precision.rounded_at_a_stage(whole)
                    if one.cause == hypothesis.cause
                )
                if part is None or self.output.explained(again.make().output):
                    return [(0.0, hypothesis.cause)]
            # A number near the middle between two of the format may be rounded otherwise.
            left, before = evidence.misfit(predicted), evidence.misfit(evidence.want)
            if coarse and left <= BETTER * before and left < nearest:
                known, nearest = [(0.0, hypothesis.cause)], left
        return known

    def _factor_in_heads(self, whole: Maker) -> list[tuple[float, Phrase]]:
        """Return the causes that are a factor in some heads only, which fits the worst of them."""
        rows = separate(self.output.wrong, ports.apart(self.problem))
        wrong = np.asarray(rows.any(axis=(0, 2, 3)))
        if not self.problem.heads_alone or (wrong.all() and self.problem.shape.kv_heads == 1):
            return []
        one = self._part(self._worst_part).of_worst_head()
        if math.prod(one.maker.problem.shape.logits) > MOST_ELEMENTS:
            return []
        factors = [*logits.fitted_factors(one.maker, one.evidence)]
        found = [it for cause, number in factors for it in self._factor(whole, cause, number)]
        of_scale = any(cause.id == "scale.factor" for cause, _ in factors)
        return found or (self._factor_of_each_head(whole) if of_scale else [])

    def _factor_of_each_head(self, whole: Maker) -> list[tuple[float, Phrase]]:
        """Return the cause that the logits of each key/value head have a factor of their own."""
        problem, shape = self.problem, self.problem.shape
        found = []
        for group in range(shape.kv_heads):
            evidence = of_part(problem, self.output, 0, group)
            fitted: dict[str, float] = {}
            if evidence.wrong.any():
                maker = Maker(ports.part(problem, 0, group), chosen=self.chosen)
                fitted = {it.id: by for it, by in logits.fitted_factors(maker, evidence)}
                if "scale.factor" not in fitted:
                    return []
            found.append(fitted.get("scale.factor", 1.0))
        times = np.array(found)[:, None, None]
        cause = Phrase("scale.factors", {**recovery.listed_factors(found)})
        changed = whole.staged(
            "",
            score=lambda a, q, k: Stages.score(a, q * np.repeat(times, a.shape.group, axis=0), k),
        )
        predicted = changed.make().output
        if not self._explains(self.output, predicted, changed):
            return []
        return [(self.output.misfit(predicted), cause)]

    def _factor(self, whole: Maker, cause: Phrase, number: float) -> list[tuple[float, Phrase]]:
        """Return the cause of a factor if it holds, or does in a part, as 1/√n where it is that."""
        problem = whole.problem
        if cause.id == "rotary.base":
            assert problem.rotary is not None
            base = number * problem.rotary.base
            usual = {it: it for it in ports.BASES if math.isclose(it, base, rel_tol=1e-2)}
            tries = [
                (cause.having(base=said), whole.asked("", rotary=replace(problem.rotary, base=it)))
                for it, said in {**usual, base: cause.arguments["base"]}.items()
            ]
        elif cause.id == "alibi.factor":
            assert problem.slopes is not None
            # The number of digits that programs write.
            short = {it: cause.having(factor=it) for it in (float(f"{number:.2g}"),)}
            tries = [
                (said, whole.asked("", slopes=it * problem.slopes))
                for it, said in {**short, number: cause}.items()
            ]
        elif cause.id == "bias.factor":
            assert problem.attn_bias is not None
            tries = [(cause, whole.asked("", attn_bias=number * problem.attn_bias))]
        else:
            scale = number * problem.logit_scale
            tries = []
            for size, exact, name in (
                (round(1 / scale**2), lambda n: 1 / math.sqrt(n), "scale.of-size"),
                (round(1 / abs(scale)), lambda n: 1 / n, "scale.of-whole-size"),
            ):
                if 1 < size < MOST_SIZE and math.isclose(exact(size), scale, rel_tol=2e-3):
                    about: dict[str, Argument] = {
                        "size": size,
                        "scale": float(f"{exact(size):.6g}"),
                    }
                    tries.append((Phrase(name, about), whole.asked("", scale=exact(size))))
            tries.append((cause, whole.asked("", scale=scale)))
        for named, hypothesis in tries:
            predicted = hypothesis.make().output
            if self._explains(self.output, predicted, hypothesis):
                return [(self.output.misfit(predicted), named)]
            in_part = self._in_part(replace(hypothesis, cause=named), predicted)
            if in_part is not None:
                return [in_part]
        return []


def _nothing(bits: int) -> Mapping[str, Array]:
    """Return no errors for perturbed inputs: nobody can be asked again."""
    return {}


def every_and(causes: Sequence[Phrase]) -> Callable[[Maker], Iterator[Hypothesis]]:
    """Return a function that yields all hypotheses, and those of two mistakes among `causes`."""

    def every(maker: Maker) -> Iterator[Hypothesis]:
        if not all(it.id == TWO for it in causes):
            yield from every_hypothesis(maker)
        for both in causes:
            first, second = both.parts("causes") or (None, None)
            made = (it.make() for it in every_hypothesis(maker) if first and it.cause == first)
            for stages in itertools.islice(made, 1):
                for it in every_hypothesis(maker.beside(stages)):
                    if it.cause == second:
                        yield Hypothesis(both, it.make)

    return every


def _joins_later(hypothesis: Hypothesis) -> bool:
    """Return whether a mistake may join queries after their heads are prepared."""
    return not ports.prepares_otherwise(hypothesis.make())


def chosen_causes(known: list[tuple[float, Phrase]], dtype: str) -> list[Phrase]:
    """Return the causes that fit about as well as the best, without repetitions."""
    fitting = [cause for _, cause in (alike(known) if dtype in HALF else known)]
    named = [cause for cause in fitting if cause.id not in FITTED]
    return [*dict.fromkeys(named or fitting)]
