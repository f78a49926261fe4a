"""Diagnose a wrong answer: find its cause, where it deviates, and which part is responsible.

The output is examined first, since a defect that affects it usually affects the weights and the
gradients too. If the output is right, the returned weights and the gradients are examined
separately. Some causes follow from an observation and the adapter's declaration alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import msgspec
import numpy as np

from conformance.adapter.arguments import Spelling
from conformance.adapter.base import Mode
from conformance.cases.catalogue import relatives
from conformance.causes import (
    features,
    gradients,
    handing,
    location,
    logits,
    precision,
    projections,
    softmax,
)
from conformance.causes.handing import HandedTokens
from conformance.causes.hypothesis import (
    MOST_ELEMENTS,
    Best,
    Evidence,
    Hypothesis,
    Maker,
    alike,
    significant,
)
from conformance.causes.stages import Stages
from conformance.definition.dtypes import Array
from conformance.definition.expectation import Expectation, expect, solve
from conformance.definition.problem import Answer, Problem
from conformance.definition.statistics import STATISTICS
from conformance.errors import ConformanceError
from conformance.records.findings import NOTHING, Argument, Entry, Finding, Phrase
from conformance.records.numbers import LIMIT
from conformance.requirements.examination import NO_ANSWER, Examination
from conformance.requirements.meaning import (
    ADDED,
    ATTENDS,
    BLOCKS,
    IGNORED,
    READINGS,
    observations,
    telling,
)
from conformance.requirements.probed import OTHER_BITS, SAME_BITS, is_promise
from conformance.words import say

OF_AN_ANSWER = ("output.", "kernel.", "gradient.", "weights.", "mask.", "invariance.", "modes.")
"""Prefixes of the requirements whose findings a diagnosis of the answer may explain."""

LOCATED = ("output.", "gradient.", "weights.equal")
"""Prefixes of the requirements whose findings say which part of an array deviates."""

ELEMENTS = 2**14
"""The number of attention weights above which some causes of a wrong output are not tried.

These are a rounded stage, and a wrong factor of the scale or of the additive bias.
"""

MOST_SPELLINGS = 8
"""The largest number of encodings of a mask (ways to pass it) that are tried."""

UNIVERSAL = {
    *("gradient.accuracy", "gradient.rounded", "accuracy.tf32"),
    *precision.CLASSES.values(),
}
"""Ids of causes that state how accurate an array is; ids beginning with "precision." do so too."""


@dataclasses.dataclass(frozen=True)
class Causes:
    """The cause found for each part of an answer; the phrase is empty if no cause is known."""

    output: Phrase = NOTHING
    weights: Phrase = NOTHING
    gradients: Phrase = NOTHING

    def of(self, requirement: str) -> Phrase:
        """Return the cause that applies to a finding of this requirement, or an empty phrase.

        The cause of a wrong output takes precedence over those of weights and gradients.
        """
        if requirement.startswith("weights."):
            return self.output or self.weights
        if requirement.startswith(("gradient.", "mask.blocked")):
            # Blocked keys that get a small weight also get a small gradient.
            leaks = self.weights if self.weights.id.startswith("mask.") else NOTHING
            return self.output or leaks or self.gradients
        if requirement.startswith("modes."):
            return self.output or self.gradients or self.weights
        return self.output


def explain(finding: Finding, ex: Examination) -> Finding:
    """Return a copy of the finding with its cause, location and responsible part, where known.

    If the case has no definition to compare with, only the cause is looked for. An error of the
    search itself takes its place: the finding is as it was measured.
    """
    try:
        return _with_cause(finding, ex)
    except (ConformanceError, MemoryError):
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
        return msgspec.structs.replace(finding, cause=Phrase("search.failed", {"error": at}))


def _with_cause(finding: Finding, ex: Examination) -> Finding:
    cause, where, made_by = NOTHING, NOTHING, finding.made_by
    if not ex.case.defined:
        # All other causes presuppose a definition, which these cases lack.
        return msgspec.structs.replace(finding, cause=_of_observation(finding, ex) or finding.cause)
    if finding.requirement.startswith(OF_AN_ANSWER):
        # A defect that also appears without a mask takes precedence over causes about masks.
        with np.errstate(all="ignore"):
            cause = _cause(finding.requirement, ex)
    cause = cause or _of_statistic(finding.requirement, ex)
    if finding.requirement == THROUGH_LOG_SUM_EXP:
        cause = cause or _through_log_sum_exp(ex)
    cause = cause or _gradients_missing(finding, ex) or _of_observation(finding, ex)
    if finding.requirement.startswith(LOCATED):
        where = _where(finding, ex)
    if finding.requirement in location.COMPARED:
        made_by = location.responsible(finding, ex)
    return msgspec.structs.replace(
        finding, cause=cause or finding.cause, where=where or finding.where, made_by=made_by
    )


def _cause(requirement: str, ex: Examination) -> Phrase:
    if requirement.startswith("kernel."):
        return _of_kernel(ex)
    cause = causes(ex, ex.mode).of(requirement)
    if cause:
        return cause
    if requirement.startswith("modes."):
        first = ex.adapter.modes[0]
        cause = causes(ex, first).of(requirement)
        return cause.having(mode=first.name) if cause else NOTHING
    if requirement.startswith("mask.spellings"):
        return _of_spellings(ex, ex.problem, ex.expectation, ex.adapter.masks.spellings(ex.problem))
    return _of_arguments(ex) if requirement.startswith("mask.polarity") else NOTHING


def _of_kernel(ex: Examination) -> Phrase:
    """Return the cause of a wrong answer of a function to heads that are projected already.

    The answer with the projections is right, within their noise.
    """
    ask = partial(ex.ask, projected=True)
    try:
        answer = ex.kernel_answer
    except NO_ANSWER:
        return NOTHING
    problem = ex.kernel_problem
    handed = HandedTokens.of(ex.adapter, problem)
    known = diagnose(problem, ex.kernel_expectation, answer, ask, handed)
    return known.output or known.gradients


def _of_statistic(requirement: str, ex: Examination) -> Phrase:
    """Return the cause of a wrong log-sum-exp or another statistic of rows, or an empty phrase.

    There is none if the requirement is about something else, or if the output is wrong, too.
    """
    compared = {f"{one.chapter}.equals-definition": name for name, one in STATISTICS.items()}
    name = compared.get(requirement, "")
    if not name:
        return NOTHING
    try:
        got = ex.answer.statistics.get(name)
    except NO_ANSWER:
        return NOTHING
    declared = ex.adapter.statistics_in(ex.mode).get(name)
    if got is None or declared is None or causes(ex, ex.mode).output:
        return NOTHING
    problem, expected = ex.with_statistics(declared)
    seen = problem.allowed_in_full().any(axis=-1)
    shown = np.where(seen, got, expected.arrays[name])
    evidence = Evidence.of(name, shown, expected)
    return next(softmax.causes_of_statistic(name, problem, evidence, ex.problem.sinks), NOTHING)


THROUGH_LOG_SUM_EXP = "gradient.through-log-sum-exp"


def _through_log_sum_exp(ex: Examination) -> Phrase:
    """Return what becomes of the gradient of a loss on the log-sum-exp, or an empty phrase.

    The gradients of a loss on the output alone are right.
    """
    declared = ex.adapter.log_sum_exp_in(ex.mode)
    if declared is None:
        return NOTHING
    problem, expected = ex.with_statistics(declared)
    try:
        got = ex.ask(problem).arrays()
    except NO_ANSWER:
        return NOTHING
    alone = {n: a for n, a in ex.expectation.arrays.items() if n.startswith("gradient.")}
    evidence = {n: Evidence.of(n, got[n], expected) for n in alone.keys() & got.keys()}
    wrong = {name: one for name, one in evidence.items() if one.wrong.any()}
    if not wrong:
        return NOTHING
    own = {n: (wrong[n].got - alone[n], wrong[n].want - alone[n]) for n in sorted(wrong)}
    off, more = (np.concatenate([it[side].ravel() for it in own.values()]) for side in (0, 1))
    factor = float(off @ more / (more @ more))
    for known, cause in ((0.0, "lse.gradient-dropped"), (-1.0, "lse.gradient-negated")):
        found = {n: alone[n] + known * (one.want - alone[n]) for n, one in evidence.items()}
        if all(one.near(found[n]).all() for n, one in evidence.items()):
            return Phrase(cause)
        if not known and all(one.near(found[n]).all() for n, one in wrong.items()):
            arrays = [Phrase(f"array.{n.removeprefix('gradient.')}") for n in sorted(wrong)]
            return Phrase("lse.gradient-dropped-in", {"arrays": [*arrays]})
    if all(
        one.near(alone[n] + factor * (one.want - alone[n])).all() for n, one in evidence.items()
    ):
        return Phrase("lse.gradient-factor", {"factor": significant(factor)})
    return NOTHING


def _gradients_missing(finding: Finding, ex: Examination) -> Phrase:
    """Return a cause that lists the arrays whose gradients were not returned, or an empty phrase.

    The phrase is also empty if the finding has figures, or is not about gradients.
    """
    # A finding that compares gradients has figures unless some are missing.
    if finding.figures is not None:
        return NOTHING
    shape = ex.problem.shape
    arrays = {
        "gradient.inputs-equal-definition": [*shape.distinct_inputs()],
        "gradient.parameters-equal-definition": [f"weights.{n}" for n in shape.weight_shapes()],
        "gradient.bias-equals-definition": ["attn_bias"],
        "gradient.features-equal-definition": [*ex.problem.trained()],
    }.get(finding.requirement, [])
    gone = [Phrase(f"array.{name}") for name in arrays if name not in ex.answer.gradients]
    return Phrase("gradient.not-returned", {"arrays": [*gone]}) if gone else NOTHING


def causes(ex: Examination, mode: Mode) -> Causes:
    """Return the known defects that explain the answer to the case in a mode (cached).

    A mode is a way to run the implementation. If repeating the call changes a part of the answer by
    more than rounding noise, its cause is "state.changes", since any other would be a coincidence;
    so are those of all parts if the output changes. Without an answer, all causes are empty
    phrases.
    """
    key = ("causes", id(ex.adapter), ex.case.id, ex.dtype, ex.device, mode.name)

    def look() -> Causes:
        try:
            answer = ex.answer_in(mode)
        except NO_ANSWER:
            return Causes()
        ask = partial(ex.ask, mode=mode)
        changes, changing = Phrase("state.changes"), _changing(ex, answer, ask)
        if "output" in changing:
            return Causes(changes, changes, changes)
        others = cache(lambda: [*_others(ex, mode)])
        handed = HandedTokens.of(ex.adapter, ex.problem)
        found = _search(ex.problem, ex.expectation, answer, ask, others, handed=handed)
        named = {part: best.cause for part, best in found.items()}
        return Causes(**{part: changes if part in changing else it for part, it in named.items()})

    return ex.bench.answers.get(key, look)


def _changing(ex: Examination, answer: Answer, ask: Callable[[Problem], Answer]) -> set[str]:
    """Return the parts of an answer that change by more than rounding noise if a call is repeated.

    They are named as in `Causes`. A number that becomes NaN counts, and so does the reverse;
    changed shapes do not. If the repeated call gives no answer, nothing is known to change.
    """
    try:
        arrays = ask(ex.problem).arrays()
    except NO_ANSWER:
        return set()
    noise = ex.suited_expectation.sigma
    return {
        "gradients" if name.startswith("gradient.") else name
        for name, array in answer.arrays().items()
        if name in arrays
        and name in noise
        and noise[name].shape == array.shape == arrays[name].shape
        and bool(
            (np.abs(array - arrays[name]) > LIMIT * noise[name]).any()
            or (np.isnan(array) != np.isnan(arrays[name])).any()
        )
    }


@dataclasses.dataclass(frozen=True)
class Similar:
    """The answer to a similar case.

    Attributes:
        search: a function that takes the id of the only cause to consider, or "" for all causes,
            and returns, by the name of each wrong part of this answer, the causes that explain it.
        is_elsewhere: whether this case and the original case are in different families of shapes.
    """

    search: Callable[[str], dict[str, Best]]
    is_elsewhere: bool

    def contradicts(self, part: str, cause: str) -> bool:
        """Return whether `part` of the answer is wrong, and not because of the cause with this id.

        In a case of the same family of shapes as the original one, the result is True only if
        another known cause explains this part. If the output is wrong here, nothing is known of
        other parts, but a known cause of a wrong output is another one than theirs.
        """
        answer = self.search(cause)
        found = answer.get(part)
        if found is None and "output" in answer:
            other = self.search("")["output"].cause
            return bool(other) and not _says_how_accurate(other)
        if found is None or found.known:
            return False
        # With other numbers, an error may be too large to be predicted.
        return self.is_elsewhere or bool(self.search("")[part].known)


def _others(ex: Examination, mode: Mode) -> Iterator[Similar]:
    """Yield the answers to similar cases of the catalogue, which distinguish similar defects.

    If two sizes or two keys happen to be equal, two different defects may have the same effect in
    the original case. They rarely have the same effect in a case of another family of shapes, or in
    one of the same family with other numbers. Each of these two groups gives at most one answer,
    and none if the problem is large.
    """
    if np.prod(ex.problem.shape.logits) > MOST_ELEMENTS:
        return
    elsewhere, same_shape = relatives(ex.case) or ((), ())
    for similar in (elsewhere, same_shape):
        for case in similar:
            other = dataclasses.replace(ex, case=case)
            try:
                answer = other.answer_in(mode)
            except NO_ANSWER:
                continue
            # An answer without any finite number does not reveal its cause.
            if np.isfinite(answer.output).any():
                yield Similar(partial(_explained, other, mode, answer), similar is elsewhere)
                break


def _explained(ex: Examination, mode: Mode, answer: Answer, wanted: str) -> dict[str, Best]:
    """Return, for each wrong part of an answer by name, the causes that explain it, as a `Best`.

    The result is cached. No similar cases are consulted. `wanted` is the id of the only cause to
    consider, or "" for all causes.
    """
    key = (id(ex.adapter), ex.case.id, ex.dtype, ex.device, mode.name, wanted)
    search = partial(_search, ex.problem, ex.expectation, answer, partial(ex.ask, mode=mode))
    handed = HandedTokens.of(ex.adapter, ex.problem)
    return ex.bench.explained.get(key, lambda: search(wanted=wanted, handed=handed))


def _of_spellings(
    ex: Examination, problem: Problem, expectation: Expectation, spellings: Iterable[Spelling]
) -> Phrase:
    """Pose the problem in several encodings, and return the first cause found of a wrong answer.

    `spellings` are encodings of the mask, of which at most `MOST_SPELLINGS` are tried. The result
    is an empty phrase if no known defect explains an answer.
    """
    for spelling in itertools.islice(spellings, MOST_SPELLINGS):
        ask = partial(ex.ask, spelling=spelling)
        try:
            answer = ask(problem)
        except NO_ANSWER:
            continue
        handed = HandedTokens.of(ex.adapter, problem, spelling)
        known = diagnose(problem, expectation, answer, ask, handed)
        cause = known.output or known.gradients
        if cause:
            return cause.having(given=spelling.label)
    return NOTHING


def _of_arguments(ex: Examination) -> Phrase:
    """Return the cause of a wrong answer to a mask argument that does not mean what is declared.

    All such arguments are tried until a cause is found. The result is an empty phrase if there is
    no such argument, or if no known defect explains an answer.
    """
    tried = observations(ex)
    misdeclared = {argument.name for argument, _, entry in tried if not entry.agrees}
    # Zeros and ones may be a bias or a mask; other forms are unambiguous, so they come first.
    for argument, form, entry in sorted(tried, key=lambda one: one[1].phrase.id == "form.zero-one"):
        if argument.name not in misdeclared:
            continue
        values, native = telling(form, argument, ex.problem.shape)
        blocked = np.isneginf(values)
        if blocked.any():
            # Finite numbers in the mask would conceal the known defects, so they become 0.
            native = np.where(np.isneginf(native), -np.inf, 0.0)
            problem = ex.problem.replace(mask=~blocked)
        elif entry.declared == ADDED:
            problem = ex.problem.replace(attn_bias=values)
        elif values.shape[-1] == 1:
            continue
        else:
            problem = ex.problem.replace(mask=READINGS[entry.declared](values))
        spelling = Spelling(say(entry.subject), {argument.name: form.array(native)})
        expectation = expect(problem, promised=ex.adapter.promised(ex.dtype))
        cause = _of_spellings(ex, problem, expectation, [spelling])
        if cause:
            return cause
    return NOTHING


def diagnose(
    problem: Problem,
    expectation: Expectation,
    answer: Answer,
    ask: Callable[[Problem], Answer],
    handed: HandedTokens | None = None,
) -> Causes:
    """Return the known defects that explain an answer, without a comparison with similar cases.

    Args:
        problem: the problem that was posed.
        expectation: the expected answer and its noise.
        answer: the answer of the implementation.
        ask: a function that returns the implementation's answer to another problem.
        handed: how tokens were packed, paged or cached; None if they were passed unchanged.
    """
    found = _search(problem, expectation, answer, ask, handed=handed)
    return Causes(**{part: best.cause for part, best in found.items()})


@np.errstate(all="ignore")
def _search(
    problem: Problem,
    expectation: Expectation,
    answer: Answer,
    ask: Callable[[Problem], Answer],
    others: Callable[[], Iterable[Similar]] = tuple,
    *,
    wanted: str = "",
    handed: HandedTokens | None = None,
) -> dict[str, Best]:
    """Return, for each wrong part of an answer by name, the causes that explain it, as a `Best`.

    If the output is wrong, "output" is the only part; otherwise, the parts are "weights" and
    "gradients", if they are wrong. The result is {} if the output has an unexpected shape.
    Only the cause with the id `wanted` is considered, unless `wanted` is "". `others` returns the
    answers to similar cases; a cause that one of them contradicts is not accepted, unless it only
    states how accurate the answer is.
    """
    evidence = {
        name: Evidence.of(name, array, expectation)
        for name, array in answer.arrays().items()
        if name in expectation.arrays and expectation.arrays[name].shape == array.shape
    }
    output, weights = evidence.get("output"), evidence.get("weights")
    if output is None:
        return {}
    maker = Maker(problem, handed)
    again = cache(partial(_errors_beside, problem, ask))

    def best(part: str) -> Best:
        def accepts(cause: Phrase) -> bool:
            # Answers to similar problems may be less accurate for other reasons.
            if _says_how_accurate(cause):
                return True
            return not any(other.contradicts(part, cause.id) for other in others())

        return Best(problem.dtype, accepts, wanted)

    if output.wrong.any():
        found = best("output")
        _of_output(maker, output, again, found)
        return {"output": found}
    parts = {}
    if weights is not None and weights.wrong.any():
        parts["weights"] = best("weights")
        softmax.returned(maker, weights, again, parts["weights"])
    derived = {
        name.removeprefix("gradient."): one
        for name, one in evidence.items()
        if name.startswith("gradient.")
    }
    if any(one.wrong.any() for one in derived.values()):
        parts["gradients"] = best("gradients")
        gradients.cause(maker, derived, again, parts["gradients"])
    return parts


def _says_how_accurate(cause: Phrase) -> bool:
    return cause.id in UNIVERSAL or cause.id.startswith("precision.")


def _errors_beside(
    problem: Problem, ask: Callable[[Problem], Answer], bits: int
) -> dict[str, Array]:
    """Return the errors of the answer to a problem with perturbed inputs, by array name.

    The result is {} if there is no answer, and lacks arrays of an unexpected shape. The relative
    perturbation has a standard deviation of 32 times 2^-`bits`, but at most 2^-5, so that even a
    logit of a hundred is rounded differently.
    """
    random = np.random.Generator(np.random.PCG64(bits))
    moved = {}
    for name in problem.shape.distinct_inputs():
        values = getattr(problem, name)
        step = 2.0 ** min(5 - bits, -5) * random.standard_normal(values.shape)
        moved[name] = problem.format.round(values * (1 + step))
    beside = problem.with_inputs(**moved)
    try:
        arrays = ask(beside).arrays()
    except NO_ANSWER:
        return {}
    want = solve(beside).arrays()
    return {n: a - want[n] for n, a in arrays.items() if n in want and a.shape == want[n].shape}


def hypotheses(maker: Maker) -> Iterator[Hypothesis]:
    """Yield the hypotheses that may explain the whole output, the simplest first."""
    yield from handing.hypotheses(maker)
    yield from features.hypotheses(maker)
    yield from logits.hypotheses(maker)
    yield from projections.hypotheses(maker)
    yield from softmax.hypotheses(maker)


def _of_output(maker: Maker, evidence: Evidence, again: precision.Again, best: Best) -> None:
    """Add causes that explain a wrong output, the simplest first, until `best` is final.

    `again` returns the errors of the answer to perturbed inputs, as for `precision.coarse`.
    """
    logits.factor_of_output(maker, evidence, best)
    if handing.all_nan(maker, [evidence]):
        best.add(0.0, Phrase("handing.unused-memory-read"))
    if best.is_found:
        return
    elements = np.prod(maker.problem.shape.logits)
    computed: list[tuple[Phrase, Stages]] = []
    breaking: list[Phrase] = []
    for hypothesis in filter(lambda one: best.tries(one.cause), hypotheses(maker)):
        stages = hypothesis.make()
        if evidence.explained(stages.output):
            if hypothesis.breaks:
                breaking.append(hypothesis.cause)
                continue
            best.add(evidence.misfit(stages.output), hypothesis.cause)
            if best.is_found:
                _with_other_numbers(hypothesis.cause, maker, evidence, best)
                return
        if hypothesis.in_parts and elements <= MOST_ELEMENTS:
            computed.append((hypothesis.cause, stages))
    if best.known:
        return
    accepted = [cause for cause in dict.fromkeys(breaking) if best.accepts(cause)]
    if accepted:
        others = len(accepted) - 1
        best.add(0.0, accepted[0].having(others=others) if others else accepted[0])
        return

    def less_simple() -> Iterator[Phrase]:
        yield from location.partial(maker, evidence, computed)
        if elements <= ELEMENTS:
            yield from (cause for cause, _ in logits.fitted_factors(maker, evidence))
        if elements <= MOST_ELEMENTS:
            yield from precision.in_tf32(maker, evidence)
        yield precision.normalised_at_every_key(maker, evidence, again)
        if elements <= ELEMENTS:
            for hypothesis in precision.rounded_at_a_stage(maker):
                if best.tries(hypothesis.cause) and evidence.explained(hypothesis.make().output):
                    yield hypothesis.cause

    if not any(best.add(0.0, cause) for cause in less_simple()) and not best.wanted:
        # The weight of the only visible key is 1 in every dtype.
        certain = (maker.problem.allowed_in_full().sum(axis=-1) <= 1).all(axis=1)
        dtype = maker.problem.dtype
        best.add(0.0, precision.coarse("output", evidence, dtype, again, certain))


def _with_other_numbers(found: Phrase, maker: Maker, evidence: Evidence, best: Best) -> None:
    """Choose among the numbers with which the cause in `best` explains the answer.

    A prediction may be noisy in some rows, so that a number next to the right one fits, too. If
    several fit alike, the phrase says so.
    """
    if not found.arguments:
        return
    for hypothesis in hypotheses(maker):
        cause = hypothesis.cause
        if cause.id == found.id and cause != found and not hypothesis.breaks:
            output = hypothesis.make().output
            if evidence.explained(output):
                best.add(evidence.misfit(output), cause)
    (misfit, cause), *others = alike(best.known)
    if others:
        best.known[:] = [(misfit, cause.having(others=len(others)))]


def _where(finding: Finding, ex: Examination) -> Phrase:
    """Return which part of the compared array deviates, or an empty phrase if none can be named."""
    name = finding.figures.array if finding.figures else ""
    got = ex.answer.arrays().get(name)
    if got is None:
        return NOTHING
    part = location.located(name, Evidence.of(name, got, ex.suited_expectation).wrong)
    if name == "output" and not part:
        wrong = Evidence.of(name, got, ex.expectation).wrong
        part = location.rows(ex.problem, np.asarray(wrong.any(axis=-1)))
    return part


# Causes that follow from an observation and the declaration alone

_FORMS = {
    "form.bool": "handed.as-boolean",
    "form.zero-one": "handed.as-ones",
    "form.zero-infinite": "handed.as-infinite",
}
"""For each form of masks, by id, the id of the phrase that says how such a mask was passed."""

_MASKED_ROW = {
    "row.nan": "masked-row.nan",
    "row.mean-of-values": "masked-row.finite-number",
    "row.zeros": "masked-row.zeros",
    "row.unmasked": "masked-row.unmasked",
}

_RETURNED = {"weights.averaged": "returned.averaged", "weights.none": "returned.none"}

_KEPT = {
    "dropout.not-scaled": "dropout.not-rescaled",
    "dropout.drops-no-weight": "dropout.of-logits",
    "dropout.scaled-unevenly": "dropout.renormalised",
}
"""For each observation about the weights that dropout keeps, by id, the id of its cause."""


def _of_observation(finding: Finding, ex: Examination) -> Phrase:
    """Return the cause that the observed value of a finding reveals, or an empty phrase."""
    if finding.requirement == "mask.polarity-is-as-declared":
        return _polarity(ex)
    if finding.requirement == "observed.fully-masked-row":
        return Phrase(_MASKED_ROW.get(finding.value.part("row").id, ""))
    if finding.value.id in ("causal.top-left", "causal.bottom-right"):
        alignment = finding.value.id.removeprefix("causal.")
        return Phrase("causal.alignment", {"alignment": alignment})
    if finding.requirement == "observed.returned-weights":
        return Phrase(_RETURNED.get(finding.value.id, ""))
    return NOTHING


def _polarity(ex: Examination) -> Phrase:
    causes = []
    for argument, form, entry in observations(ex):
        if entry.agrees:
            continue
        handed = Phrase(_FORMS[form.phrase.id])
        about: dict[str, Argument] = {"argument": argument.name, "form": handed}
        meaning = entry.value.id.removeprefix("mask.")
        if entry.value == IGNORED:
            causes.append(Phrase("argument.not-applied", about))
        elif {entry.declared, entry.value} == {ATTENDS, BLOCKS}:
            causes.append(Phrase("argument.inverted", {**about, "true": meaning}))
        elif entry.value == ADDED:
            causes.append(Phrase("argument.added", about))
        elif entry.declared == ADDED and entry.value in (ATTENDS, BLOCKS):
            causes.append(Phrase("argument.as-boolean", {**about, "nonzero": meaning}))
    if len(causes) > 1:
        return Phrase("argument.several", {"causes": [*causes]})
    return causes[0] if causes else NOTHING


_MENDED = {
    "again.on-one-thread": "bits.of-threads",
    "again.with-few-keys": "bits.keys-divided-by-batch",
    "again.of-two-queries": "bits.path-for-one-query",
}
"""By the condition under which bits are equal that were not, the reason why they were not."""


def _of_bits(entries: Sequence[Entry]) -> Phrase:
    """Return why a promise of equal bits is broken, or `NOTHING` if no condition tells it."""
    other = {entry.subject.id: entry for entry in entries if entry.value.id in OTHER_BITS}
    for entry in entries:
        of = entry.subject.part("of").id or "again.steps"
        mended = entry.subject.id in _MENDED and entry.value.id.startswith(SAME_BITS)
        if not mended or of not in other:
            continue
        # If the same call has other bits, it is chance that other calls have the same.
        if is_promise(other[of]) and (of == "again.twice" or "again.twice" not in other):
            return Phrase(_MENDED[entry.subject.id])
    return NOTHING


def of_entries(finding: Finding, entries: Sequence[Entry]) -> Phrase:
    """Return the cause that an experiment's observations reveal, or else the finding's own cause.

    `entries` holds the observations. If they reveal no cause, and the finding is a deviation from
    "dropout.is-unbiased", the result is an empty phrase.
    """
    wrong = [entry for entry in entries if not entry.agrees]
    if len(wrong) == 1 and wrong[0].value.id in ("dropout.on", "dropout.off"):
        return Phrase("dropout.is-on" if wrong[0].value.id == "dropout.on" else "dropout.is-off")
    if finding.requirement == "bits.are-as-promised":
        return _of_bits(entries)
    if finding.requirement != "dropout.is-unbiased" or finding.verdict != "deviates":
        return finding.cause
    kept = next((it.value for it in entries if it.subject.id == "dropout.kept"), NOTHING)
    if kept.id == "dropout.scaled-by":
        return Phrase("dropout.factor", kept.arguments)
    return Phrase(_KEPT.get(kept.id, ""))
