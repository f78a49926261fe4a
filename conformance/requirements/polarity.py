"""What a mask argument really means, found by experiment.

A pattern is fed to the argument natively, and one token's content is changed: the queries whose
output moves are those that attend it. That tells `attends` from `blocks`, and from a mask that
hides nothing, without knowing the right answer: an implementation with a wrong scale still has a
right mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from conformance.adapter import layouts
from conformance.adapter.arguments import MaskArgument, Native, Spelling, to_layout
from conformance.cases import catalogue as served
from conformance.definition.arithmetic import Exact
from conformance.definition.attention import forward
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.problem import Problem
from conformance.errors import Unsupported, WrongShape
from conformance.records.findings import Finding
from conformance.records.numbers import ratios
from conformance.records.phrase import Argument, Part, Phrase
from conformance.requirements.examination import Examination, Raised
from conformance.requirements.invariance import with_other_content
from conformance.requirements.requirement import Requirement

FORMS = {"bool": "form.bool", "0/1": "form.zero-one", "0/-inf": "form.zero-infinite"}

MOVED = 24.0
STILL = 12.0
"""In units of σ: beyond MOVED an output moved, below STILL it did not; between, nobody knows."""


@dataclass(frozen=True)
class Trial:
    """One way to feed an argument, and what its declaration says will happen."""

    argument: str
    form: str
    native: Native
    marked: BoolArray
    """Where the pattern is True (or 1, or 0 of 0/-inf): `[batch query key]`, or 1 along an axis."""
    declared: str


def trials(problem: Problem, argument: MaskArgument, random: np.random.Generator) -> list[Trial]:
    """The forms that the argument is declared to take, with an asymmetric pattern in each."""
    layout = argument.layouts[0]
    pattern = _pattern(problem, layout, random)
    laid = to_layout(pattern, layout, problem.shape, broadcast=False)
    assert laid is not None
    marked = pattern[:, 0]
    found = []
    if argument.true is not None:
        found.append(Trial(argument.name, "bool", laid, marked, argument.true))
    if argument.number == "added":
        hidden = np.where(laid, 0.0, -np.inf)
        found.append(Trial(argument.name, "0/-inf", hidden, marked, "attends"))
        found.append(Trial(argument.name, "0/1", laid.astype(np.float64), marked, "added"))
    elif argument.one is not None:
        found.append(Trial(argument.name, "0/1", laid.astype(np.float64), marked, argument.one))
    return found


def observe(ex: Examination, trial: Trial) -> tuple[str, str]:
    """What the marked positions do: attends, blocks, added, ignored, rejected, unexplained.

    The second text is the evidence.
    """
    problem = ex.problem
    spelling = Spelling(f"{trial.argument}={trial.form}", {trial.argument: trial.native})
    try:
        masked = ex.ask(problem, spelling=spelling).output
    except Raised as error:
        return "rejected", error.told
    except WrongShape as error:
        return "rejected", str(error)
    plain = ex.ask(problem).output
    if trial.marked.shape[-1] == 1:
        return _rows(ex, masked, plain, trial.marked[..., 0])
    token, changed = ex.bench.expectations.get(
        ("telling", ex.case.id, ex.dtype, trial.marked.tobytes()),
        lambda: _telling_change(ex, trial.marked),
    )
    moved, still = _moves(ex, masked, ex.ask(changed, spelling=spelling).output)
    marked = np.broadcast_to(trial.marked[..., token], moved.shape)
    seen = _queries(moved)
    evidence = (
        f"token {token} is marked for the queries {_queries(marked)}; changing its content moved "
        f"the outputs of {seen}"
    )
    if not (moved | still).all():
        return "unexplained", f"{evidence}; some moved by a little"
    if (moved == marked).all():
        return "attends", evidence
    if (moved == ~marked).all():
        return "blocks", evidence
    if moved.all():
        different, same = _moves(ex, masked, plain)
        if same.all():
            return "ignored", f"{evidence}; the output is the same without the mask"
        if different.any():
            return "added", f"{evidence}; the output differs from the one without the mask"
    return "unexplained", evidence


def observations(ex: Examination) -> list[tuple[Trial, str, str]]:
    """Return every trial of every mask argument with what `observe` says of it; remembered."""

    def look() -> list[tuple[Trial, str, str]]:
        random = ex.case.random("polarity")
        return [
            (trial, *observe(ex, trial))
            for argument in ex.adapter.mask_arguments
            for trial in trials(ex.problem, argument, random)
        ]

    key = ("polarity", id(ex.adapter), ex.case.id, ex.dtype, ex.device, ex.mode.name)
    return ex.bench.answers.get(key, look)


def polarity(ex: Examination) -> Finding | None:
    """Every mask argument, in every form that it is declared to take."""
    if not ex.adapter.mask_arguments:
        raise Unsupported("no mask arguments are declared")
    if not ex.varies_arguments:
        return None
    told: list[Part] = []
    wrong = []
    for trial, seen, evidence in observations(ex):
        meaning = seen if trial.form != "0/-inf" else {"attends": "added"}.get(seen, seen)
        about: dict[str, Argument] = {"argument": trial.argument}
        about |= {"form": Phrase(FORMS[trial.form]), "meaning": Phrase(f"mask.{meaning}")}
        told.append(Phrase("mask.means", about))
        if seen != trial.declared:
            declared = f"declared {trial.argument}[{trial.form}] {trial.declared}"
            wrong.append(f"{declared}, observed {seen}: {evidence}")
    value = Phrase("mask.meanings", {"meanings": told})
    if wrong:
        return Finding(POLARITY.id, "deviates", detail="; ".join(wrong), value=value)
    return Finding(POLARITY.id, "conforms", value=value)


def _pattern(problem: Problem, layout: str, random: np.random.Generator) -> BoolArray:
    """About half marked, every row and column mixed; the same for all heads."""
    shape = problem.shape
    sizes = [
        size if axis in layouts.axes(layout) else 1
        for axis, size in zip(("batch", "heads", "query", "key"), shape.logits, strict=True)
    ]
    sizes[1] = 1
    while True:
        marked = random.random(sizes) < 0.5
        rows = marked.any(axis=-1) & ~marked.all(axis=-1) | (sizes[3] == 1)
        columns = marked.reshape(-1, sizes[3]).mean(axis=0)
        across = marked.any(axis=-2) & ~marked.all(axis=-2) | (sizes[2] == 1)
        if rows.all() and across.all() and ((columns > 0.2) & (columns < 0.8)).any():
            return marked


def _telling_change(ex: Examination, marked: BoolArray) -> tuple[int, Problem]:
    """A token and new content for it that moves every query that attends it, unmistakably.

    Judged by the reference, under each meaning that the mask may have: the change whose smallest
    movement is the largest.
    """
    problem, shape = ex.problem, ex.problem.shape
    random = ex.case.random("telling")
    mask = np.broadcast_to(marked, (shape.batch, *shape.logits[2:]))[:, None]
    meanings = [problem.replace(mask=seen) for seen in (mask, ~mask, None)]
    before = [forward(meaning, Exact()).output for meaning in meanings]
    best: tuple[float, int, Problem] | None = None
    for token in range(shape.key_length):
        share = mask[..., token].mean()
        if not 0.0 < share < 1.0:
            continue
        tokens = np.broadcast_to(
            np.arange(shape.key_length) == token, (shape.batch, shape.key_length)
        )
        for _ in range(4):
            changed = with_other_content(problem, tokens, random)
            least = np.inf
            for meaning, old in zip(meanings, before, strict=True):
                asked = changed.replace(mask=meaning.mask)
                size = _sizes(ex, forward(asked, Exact()).output, old)
                least = min(least, size[asked.allowed_in_full()[:, 0, :, token]].min())
            if best is None or least > best[0]:
                best = (least, token, changed)
    assert best is not None, "the pattern has a column that is neither full nor empty"
    return best[1], best[2]


def _moves(ex: Examination, one: Array, other: Array) -> tuple[BoolArray, BoolArray]:
    """Which outputs `[batch query]` certainly moved, and which certainly did not."""
    size = _sizes(ex, one, other)
    return size > MOVED, size < STILL


def _sizes(ex: Examination, one: Array, other: Array) -> Array:
    """The largest movement of each output row, in σ."""
    noise = ex.expectation.loosest["output"]
    return np.abs(ratios(one, other, noise, ex.expectation.underflow)).max(axis=-1)


def _rows(ex: Examination, masked: Array, plain: Array, marked: BoolArray) -> tuple[str, str]:
    """An argument over queries: which rows does it change?"""
    moved, still = _moves(ex, masked, plain)
    marked = np.broadcast_to(marked, moved.shape)
    evidence = f"marked queries {_queries(marked)}, outputs changed at {_queries(moved)}"
    if still.all():
        return "ignored", evidence
    if (moved == ~marked).all():
        return "attends", evidence
    if (moved == marked).all():
        return "blocks", evidence
    return "unexplained", evidence


def _queries(marked: BoolArray) -> str:
    """(entry, query) pairs, as text."""
    pairs = [f"({b},{q})" for b, q in zip(*np.nonzero(marked), strict=True)]
    return " ".join(pairs) if pairs else "none"


POLARITY = Requirement(
    id=served.POLARITY,
    level="must",
    sentence="Each mask argument means what is declared: True attends or blocks, numbers are added "
    "or say who attends; fed natively, and told apart by experiment.",
    why="`True` attends in one library and blocks in the next; believing costs a week.",
    check=polarity,
)

REQUIREMENTS = (POLARITY,)
