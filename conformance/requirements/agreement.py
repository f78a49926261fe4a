"""Equivalent calls must give equal answers: modes, spellings of a mask, repeated calls."""

from __future__ import annotations

import itertools

from conformance.cases import catalogue as served
from conformance.definition.comparison import Comparison, all_between
from conformance.definition.problem import Answer
from conformance.errors import Unsupported
from conformance.records.findings import Finding
from conformance.requirements.examination import Examination
from conformance.requirements.requirement import Requirement, judge

MOST_SPELLINGS = 8
MOST_COMPILED_SPELLINGS = 4


def modes(ex: Examination) -> Finding | None:
    """The answer in this mode is that of the implementation's first mode."""
    first = ex.adapter.modes[0]
    if ex.mode.name == first.name:
        return None
    found = compare_answers(ex, ex.answer, ex.answer_in(first))
    said = f"{{array}} in mode {ex.mode.name} is not that in mode {first.name}"
    return judge(MODES.id, found, said=said)


def spellings(ex: Examination) -> Finding | None:
    """Boolean or additive, in one argument or two, by flag or by mask: the same answer."""
    if not ex.varies_arguments:
        return None
    most = MOST_COMPILED_SPELLINGS if ex.adapter.compiles else MOST_SPELLINGS
    every = list(itertools.islice(ex.adapter.masks.spellings(ex.problem), most))
    if not every:
        ex.adapter.masks.spell(ex.problem)
    if len(every) < 2:
        return None
    for spelling in every[1:]:
        again = ex.ask(ex.problem, spelling=spelling)
        said = f"{{array}} with {spelling.label} is not that with {every[0].label}"
        finding = judge(SPELLINGS.id, compare_answers(ex, again, ex.answer), said=said)
        if finding.verdict != "conforms":
            return finding
    return finding


def unchanged(ex: Examination) -> Finding | None:
    """Inputs hold the same numbers after the call, and nothing new hangs on them."""
    if not ex.calls_eagerly:
        return None
    changed = ex.side_effects().changed
    if changed:
        return Finding(UNCHANGED.id, "deviates", detail="; ".join(changed))
    return Finding(UNCHANGED.id, "conforms")


def surroundings(ex: Examination) -> Finding | None:
    """Two calls on the same objects leave generators, settings and environment as they were."""
    if not ex.calls_eagerly:
        return None
    changed = ex.side_effects().surroundings
    if changed:
        return Finding(SURROUNDINGS.id, "deviates", detail="; ".join(changed))
    return Finding(SURROUNDINGS.id, "conforms")


def repeats(ex: Examination) -> Finding | None:
    """The second call on the same objects answers as the first."""
    if not ex.calls_eagerly:
        return None
    effects = ex.side_effects()
    found = compare_answers(ex, effects.second, effects.first)
    return judge(REPEATS.id, found, said="{array} of the second call is not that of the first")


def compare_answers(ex: Examination, one: Answer, other: Answer) -> list[Comparison]:
    """Return a comparison for every array that both answers have."""
    ones, others = one.arrays(), other.arrays()
    if ex.answer.weights is None or ones.get("weights") is None:
        ones.pop("weights", None)
    noise = ex.suited_expectation.loosest
    common = [
        name
        for name in ones
        if name in others and ones[name].shape == others[name].shape == noise[name].shape
    ]
    if not common:
        raise Unsupported("the two answers have no array in common")
    chosen = {name: ones[name] for name in common}
    return all_between(chosen, others, noise, ex.expectation.underflow)


MODES = Requirement(
    id="modes.agree",
    level="must",
    sentence="Modes that mean the same (weights asked for or not, fast and slow path, training and "
    "evaluation without dropout) give the same output, weights and gradients.",
    why="Otherwise asking for the weights, or switching to evaluation, changes the model.",
    check=modes,
    every_case=True,
)
SPELLINGS = Requirement(
    id=served.SPELLINGS,
    level="must",
    sentence="Spellings of a mask that mean the same (boolean or additive, one argument or two, "
    "causal flag or explicit mask) give the same output and gradients.",
    why="People switch between them without a second thought.",
    check=spellings,
)
UNCHANGED = Requirement(
    id="call.leaves-inputs-unchanged",
    level="must",
    sentence="A call changes neither its inputs nor anything attached to them.",
    why="The next layer reads the same tensors.",
    check=unchanged,
)
REPEATS = Requirement(
    id="call.repeats",
    level="must",
    sentence="The same call on the same objects gives the same answer.",
    why="State left behind by the first call makes results depend on history.",
    check=repeats,
)

SURROUNDINGS = Requirement(
    id=served.SURROUNDINGS,
    level="should",
    sentence="A call leaves alone what belongs to everybody in the process: random generators, "
    "default dtypes, numbers of threads, precisions, the environment, the current directory.",
    why="Whoever is called next computes something else, and nobody looks for the reason here.",
    check=surroundings,
)

REQUIREMENTS = (MODES, SPELLINGS, UNCHANGED, REPEATS, SURROUNDINGS)
