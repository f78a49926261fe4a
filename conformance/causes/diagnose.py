"""From an answer that is wrong to a cause, if one is known, to where it is wrong, and to who made
it so.

The output first: what made it wrong made everything wrong. If it is right, the weights that are
returned, and the gradients, each have mistakes of their own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec
import numpy as np

from conformance.adapter.arguments import Spelling
from conformance.adapter.base import Mode
from conformance.causes import (
    declared,
    gradients,
    location,
    masks,
    precision,
    projections,
    scale,
    softmax,
)
from conformance.causes.hypothesis import Best, Evidence, Hypothesis, Maker
from conformance.causes.stages import Stages
from conformance.definition.dtypes import Array
from conformance.definition.expectation import Expectation, expect, solve
from conformance.definition.problem import Answer, Problem, Weights
from conformance.errors import ConformanceError, Unsupported
from conformance.records.findings import Finding
from conformance.records.phrase import NOTHING, Phrase
from conformance.requirements.examination import Examination, Raised
from conformance.requirements.meaning import ADDED, READINGS, telling
from conformance.requirements.polarity import observations
from conformance.words import say

OF_AN_ANSWER = ("output.", "gradient.", "weights.", "mask.", "invariance.", "modes.")
"""Chapters of requirements for which an answer is searched for a cause."""

LOCATED = ("output.", "gradient.", "weights.equal")
"""Those that compare with the definition, so that it can be told where they part."""

ELEMENTS = 2**14
"""Weights of a problem above which only whole answers are tried, not parts of them."""


MOST_SPELLINGS = 8

MadeBy = Literal["", "kernel", "projections"]


@dataclasses.dataclass(frozen=True)
class Causes:
    """The causes that are known for each part of an answer; a part may have none."""

    output: Phrase = NOTHING
    weights: Phrase = NOTHING
    gradients: Phrase = NOTHING

    def of(self, requirement: str) -> Phrase:
        """Return the cause that a finding of this requirement has."""
        if requirement.startswith("weights."):
            return self.output or self.weights
        # Blocked keys with a little weight have a little gradient.
        leaks = self.weights if self.weights.id.startswith("mask.") else NOTHING
        if requirement.startswith(("gradient.", "mask.blocked")):
            return self.output or leaks or self.gradients
        return self.output or (
            self.gradients or self.weights if requirement.startswith("modes.") else NOTHING
        )


def explain(finding: Finding, ex: Examination) -> Finding:
    """Return the finding with its cause and location, as far as they are known."""
    cause = NOTHING
    if finding.requirement.startswith(OF_AN_ANSWER):
        # Who computes something else without any mask is not to be believed about masks.
        cause = _cause(finding, ex)
    cause = cause or declared.cause(finding, ex)
    if not finding.requirement.startswith(LOCATED):
        return msgspec.structs.replace(finding, cause=cause) if cause else finding
    where, made_by = _where(finding, ex), _made_by(finding, ex)
    return msgspec.structs.replace(finding, cause=cause, where=where, made_by=made_by)


def _cause(finding: Finding, ex: Examination) -> Phrase:
    with np.errstate(all="ignore"):
        found = causes(ex, ex.mode).of(finding.requirement)
        if not found and finding.requirement.startswith("modes."):
            first = ex.adapter.modes[0]
            found = causes(ex, first).of(finding.requirement)
            return found.having(mode=first.name) if found else NOTHING
        if not found and finding.requirement.startswith("mask.spellings"):
            return _of_spellings(ex, ex.problem, ex.expectation, ex.adapter.masks.spellings)
        if not found and finding.requirement.startswith("mask.polarity"):
            return _of_arguments(ex)
    return found


def causes(ex: Examination, mode: Mode) -> Causes:
    """Return the known defects that explain the answer in some mode; the result is cached."""
    key = ("causes", id(ex.adapter), ex.case.id, ex.dtype, ex.device, mode.name)

    def look() -> Causes:
        try:
            answer = ex.answer_in(mode)
        except (ConformanceError, Unsupported, Raised):
            return Causes()
        return diagnose(ex.problem, ex.expectation, answer, lambda moved: ex.ask(moved, mode=mode))

    return ex.bench.answers.get(key, look)


def _of_spellings(
    ex: Examination,
    problem: Problem,
    expectation: Expectation,
    spellings: Callable[[Problem], Iterable[Spelling]],
) -> Phrase:
    """Return the cause of the first spelling whose answer is wrong in a known way."""
    for spelling in itertools.islice(spellings(problem), MOST_SPELLINGS):
        try:
            answer = ex.ask(problem, spelling=spelling)
        except (ConformanceError, Unsupported, Raised):
            continue

        def ask(moved: Problem, said: Spelling = spelling) -> Answer:
            return ex.ask(moved, spelling=said)

        found = diagnose(problem, expectation, answer, ask)
        cause = found.output or found.gradients
        if cause:
            return cause.having(given=spelling.label)
    return NOTHING


def _of_arguments(ex: Examination) -> Phrase:
    """Return the effect of a mask argument whose meaning is not the declared one."""
    tried = observations(ex)
    misdeclared = {argument.name for argument, _, entry in tried if not entry.agrees}
    # Numbers of 0 and 1 are a bias as well as a mask; the other forms say which of them is wrong.
    for argument, form, entry in sorted(tried, key=lambda one: one[1].phrase.id == "form.zero-one"):
        if argument.name not in misdeclared:
            continue
        values, native = telling(form, argument, ex.problem.shape)
        blocked = np.isneginf(values)
        if blocked.any():
            # Known defects are of masks that block or do not; a bias beside it would hide them.
            native = np.where(np.isneginf(native), -np.inf, 0.0)
            problem = ex.problem.replace(mask=~blocked)
        elif entry.declared == ADDED:
            problem = ex.problem.replace(attn_bias=values)
        elif values.shape[-1] == 1:
            continue
        else:
            problem = ex.problem.replace(mask=READINGS[entry.declared](values))
        said = Spelling(say(entry.subject), {argument.name: form.array(native)})
        cause = _of_spellings(ex, problem, expect(problem), lambda _, one=said: [one])  # type: ignore[misc]
        if cause:
            return cause
    return NOTHING


def diagnose(
    problem: Problem,
    expectation: Expectation,
    answer: Answer,
    ask: Callable[[Problem], Answer],
) -> Causes:
    """Return the known defects that explain this answer; `ask` answers a modified problem."""
    evidence = {
        name: Evidence(array, want, expectation.loosest[name], expectation.underflow)
        for name, array in answer.arrays().items()
        if (want := expectation.arrays.get(name)) is not None and want.shape == array.shape
    }
    output = evidence.get("output")
    if output is None:
        return Causes()
    maker = Maker(problem)
    known: dict[int, dict[str, Array]] = {}

    def again(bits: int) -> Mapping[str, Array]:
        if bits not in known:
            known[bits] = _errors_beside(problem, ask, bits)
        return known[bits]

    if output.wrong.any():
        return Causes(output=_of_output(maker, output, again))
    of_weights, own = NOTHING, evidence.get("weights")
    if own is not None and own.wrong.any():
        of_weights = softmax.returned(maker, own, again)
    derived = {
        name.removeprefix("gradient."): one
        for name, one in evidence.items()
        if name.startswith("gradient.")
    }
    return Causes(NOTHING, of_weights, gradients.cause(maker, derived, again))


def _errors_beside(
    problem: Problem, ask: Callable[[Problem], Answer], bits: int
) -> dict[str, Array]:
    """Return the errors after moving every input by about one rounding error of so many bits."""
    random = np.random.Generator(np.random.PCG64(bits))
    moved = {}
    for name in problem.shape.distinct_inputs():
        values = getattr(problem, name)
        step = 2.0 ** (1 - bits) * random.standard_normal(values.shape)
        moved[name] = problem.format.round(values * (1 + step))
    beside = problem.with_inputs(**moved)
    try:
        arrays = ask(beside).arrays()
    except (ConformanceError, Unsupported, Raised):
        return {}
    want = solve(beside).arrays()
    return {n: a - want[n] for n, a in arrays.items() if n in want and a.shape == want[n].shape}


def hypotheses(maker: Maker) -> Iterator[Hypothesis]:
    """Yield whole hypotheses about the output, the simplest first."""
    yield from masks.hypotheses(maker)
    yield from scale.hypotheses(maker)
    yield from projections.hypotheses(maker)
    yield from softmax.hypotheses(maker)


def _of_output(maker: Maker, evidence: Evidence, again: precision.Again) -> Phrase:
    best = Best(maker.problem.dtype)
    scale.of_output(maker, evidence, best)
    if best.is_found:
        return best.cause
    computed: list[tuple[Phrase, Stages]] = []
    breaking: list[Phrase] = []
    for hypothesis in hypotheses(maker):
        stages = hypothesis.make()
        if evidence.explained(stages.output):
            if hypothesis.breaks:
                breaking.append(hypothesis.cause)
                continue
            best.add(evidence.misfit(stages.output), hypothesis.cause)
            if best.is_found:
                break
        if hypothesis.in_parts:
            computed.append((hypothesis.cause, stages))
    if best.known:
        return best.cause
    if breaking:
        others = len(breaking) - 1
        return breaking[0].having(others=others) if others else breaking[0]
    if np.prod(maker.problem.shape.logits) <= ELEMENTS:
        found = location.partial(maker, evidence, computed) or scale.of_logits(maker, evidence)
        if found:
            return found
        for hypothesis in precision.rounded_at_a_stage(maker):
            if evidence.explained(hypothesis.make().output):
                return hypothesis.cause
    return precision.coarse("output", evidence, maker.problem.dtype, again)


def _where(finding: Finding, ex: Examination) -> Phrase:
    """Return the part of the array in which the deviation is; nothing if it is all over."""
    if finding.figures is None:
        return NOTHING
    name = finding.figures.array
    if name not in ex.answer.arrays():
        return NOTHING
    part = location.located(name, _wrong(ex.suited_expectation, ex.answer, name))
    if name == "output" and not part:
        rows = _wrong(ex.expectation, ex.answer, name).any(axis=-1)
        part = location.rows(ex.problem, np.asarray(rows))
    return part


def _wrong(expectation: Expectation, answer: Answer, name: str) -> np.ndarray:
    got, want = answer.arrays()[name], expectation.arrays[name]
    return Evidence(got, want, expectation.loosest[name], expectation.underflow).wrong


# Who made it, where the suite supplies the projections


def _made_by(finding: Finding, ex: Examination) -> MadeBy:
    """Return whether the kernel or the supplied projections cause a deviation.

    The kernel is asked for itself: heads that the reference projected, rounded to the dtype, become
    its inputs, and there are no projections. Whatever still deviates, the kernel made. "" where
    that cannot be said.
    """
    if not ex.adapter.projections_supplied:
        return ""
    # What is missing altogether has no figures; that can be a gradient only.
    whole = finding.figures.array if finding.figures else "gradient"
    key = ("kernel", id(ex.adapter), ex.case.id, ex.dtype, ex.device, ex.mode.name)
    try:
        wrong = ex.bench.answers.get(key, lambda: _wrong_alone(ex))
    except (ConformanceError, Unsupported, Raised):
        return ""
    if whole in ("output", "weights", "gradient.attn_bias"):
        return "" if whole not in wrong else "kernel" if wrong[whole] else "projections"
    gradients = [found for name, found in wrong.items() if name.startswith("gradient.")]
    return "" if not gradients else "kernel" if any(gradients) else "projections"


def _wrong_alone(ex: Examination) -> dict[str, bool]:
    """Return whether each array of the kernel's own answer deviates."""
    problem = alone(ex.problem)
    answer, expectation = ex.ask(problem, projected=True), expect(problem)
    found = {}
    for name, want in expectation.arrays.items():
        array = answer.arrays().get(name)
        if array is not None and array.shape == want.shape:
            sigma = expectation.loosest[name]
            found[name] = bool(Evidence(array, want, sigma, expectation.underflow).wrong.any())
        elif answer.gradients and name.startswith("gradient."):
            # What was cut off from the graph has none.
            found[name] = name.removeprefix("gradient.") in ("query", "key", "value")
    return found


def alone(problem: Problem) -> Problem:
    """Return the same attention on projected heads: all weights are the identity."""
    stages, shape = Stages(problem), problem.shape
    rounded = problem.format.round

    def merged(heads: Array) -> Array:
        return rounded(heads.transpose(0, 2, 1, 3).reshape(heads.shape[0], heads.shape[2], -1))

    def identity(heads: int, size: int) -> Array:
        return np.eye(heads * size).reshape(heads * size, heads, size)

    d_context = np.einsum("bqe,hde->bhqd", problem.cotangent, problem.weights.output)
    sizes = {
        "query": (shape.heads, shape.head_size),
        "key": (shape.kv_heads, shape.head_size),
        "value": (shape.kv_heads, shape.value_head_size),
        "output": (shape.heads, shape.value_head_size),
    }
    widths: dict[str, Any] = {f"{name}_width": many * size for name, (many, size) in sizes.items()}
    weights = {name: identity(*own) for name, own in sizes.items() if name != "output"}
    weights["output"] = np.moveaxis(identity(*sizes["output"]), 0, -1)
    own = {name: merged(stages.projected[name]) for name in ("query", "key", "value")}
    return problem.replace(
        shape=dataclasses.replace(shape, sharing="separate", bias=False, **widths),
        weights=Weights(score=problem.weights.score, **weights),
        cotangent=merged(d_context),
        **own,
    )
