"""Observe characteristics that the definition leaves open, and compare them with declarations."""

from __future__ import annotations

import numpy as np

from conformance.adapter.arguments import Spelling
from conformance.adapter.raised import is_our_own
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.expectation import solve
from conformance.definition.problem import Answer
from conformance.errors import Unsupported
from conformance.records.findings import Argument, Finding, Part, Phrase
from conformance.records.numbers import LIMIT
from conformance.requirements import probed
from conformance.requirements.examination import Examination, RaisedInside
from conformance.requirements.meaning import triangles
from conformance.requirements.requirement import requirement
from conformance.words import say


def _found(name: str, agrees: bool, value: Phrase, declared: object, seen: str) -> Finding:
    """Return a finding that conforms if `agrees`, that is, if the observation is as declared.

    Otherwise, the finding deviates, and its text shows the declaration and `seen`, the observed
    `value` in words. `name` is the id of the requirement.
    """
    if agrees:
        return Finding(name, "conforms", value=value)
    detail = f"the adapter declares {declared!r}, observed {seen!r}"
    return Finding(name, "deviates", detail=detail, value=value)


@requirement(
    "observed.fully-masked-row",
    "What a fully masked query gets: NaN, zeros, the output bias, the mean of the values.",
    level="observed",
    why="A NaN spreads through the batch; a mean of padding looks like an answer; and what another "
    "sequence left there is of somebody else.",
    revision=2,
)
def fully_masked_row(ex: Examination) -> Finding:
    """Find out which known value the output of all fully masked queries has: NaN, zeros, the output
    bias, the mean of the values, or the output without a mask. If the answer has gradients, also
    look for NaN in them and in the outputs of the other queries of the same batch entry."""
    answer, problem = ex.answer_as_returned(), ex.problem
    masked = ~np.any(problem.allowed_in_full(), axis=(1, 3))
    rows = answer.output[masked]
    bias = problem.weights.output_bias
    open_to_all = problem.replace(mask=None, causal=None, key_lengths=None)
    # With scale 0 and without a mask, all keys have the same weight.
    outcomes = {
        "row.output-bias": np.zeros_like(rows)
        if bias is None
        else np.broadcast_to(bias, rows.shape),
        "row.mean-of-values": solve(open_to_all.replace(scale=0.0)).output[masked],
        "row.unmasked": solve(open_to_all).output[masked],
    }
    if np.isnan(rows).any(axis=-1).all():
        seen = Phrase("row.nan")
    elif not rows.any():
        seen = Phrase("row.zeros")
    else:
        near = [name for name, outcome in outcomes.items() if _near(ex, rows, outcome)]
        seen = Phrase(near[0] if near else "something-else")
    about: dict[str, Argument] = {"row": seen}
    if answer.gradients:
        about["beside"] = _beside(answer, masked)
    value = Phrase("fully-masked.query", about)
    declared = ex.adapter.masked_row(ex.mode)
    if declared is None:
        return Finding(fully_masked_row.id, "observed", value=value)
    agrees = seen == probed.declared_row(declared)
    return _found(fully_masked_row.id, agrees, value, declared, say(value))


def _beside(answer: Answer, masked: BoolArray) -> Phrase:
    """Return a phrase that says in which gradients there is NaN, if in any.

    The phrase also says if there is NaN in outputs of queries that are not `masked`, `[batch
    query]`, beside one that is in their batch entry.
    """
    gradients = Phrase("beside.gradients", {"value": Phrase("gradients.finite")})
    lost = [name for name, array in answer.gradients.items() if np.isnan(array).any()]
    if lost:
        gradients = Phrase("beside.nan-in-gradients", {"arrays": [*lost]})
    parts: list[Part] = [gradients]
    if np.isnan(answer.output[masked.any(axis=1, keepdims=True) & ~masked]).any():
        parts.append(Phrase("beside.nan-in-other-rows"))
    return Phrase("beside", {"parts": parts})


@requirement(
    "observed.causal-alignment",
    "Where the causal flag puts its triangle if lengths differ: top-left or bottom-right.",
    level="observed",
    why="Decoding with a cache needs bottom-right; most flags are top-left.",
    revision=2,
)
def causal_alignment(ex: Examination) -> Finding | None:
    """Set the causal flag, without any mask, in a case with different numbers of queries and keys.
    Compare the output with the reference for both alignments, and for known mistakes."""
    flag, problem = ex.adapter.causal_flag, ex.problem
    if flag is None:
        raise Unsupported("no causal flag")
    if not ex.varies_arguments:
        return None
    if flag.needs is not None:
        raise Unsupported(f"{flag.name} is only a hint about {flag.needs}")
    try:
        output = ex.ask(problem, spelling=Spelling(flag.name, {flag.name: True})).output
    except RaisedInside as error:
        if is_our_own(error.original, ex.adapter):
            raise
        value = Phrase("refused.because", {"reason": error.told})
        if flag.alignment is None and flag.effect != "none":
            return Finding(causal_alignment.id, "conforms", value=value)
        return Finding(causal_alignment.id, "deviates", say(value), value)
    value = Phrase("causal.nan" if np.isnan(output).all() else "causal.unexplained")
    for found, visible in triangles(problem.shape):
        mask = np.broadcast_to(visible, problem.shape.logits)
        seen = mask.any(axis=(1, 3))
        if _near(ex, output[seen], solve(problem.replace(mask=mask)).output[seen]):
            value = found
            break
    declared = "ignored" if flag.effect == "none" else flag.alignment
    agrees = value == Phrase(f"causal.{declared}")
    return _found(causal_alignment.id, agrees, value, declared, say(value))


@requirement(
    "observed.returned-weights",
    "Whether attention weights come back per head, averaged over heads, or not at all.",
    level="observed",
    why="An average hides the heads that people want to see.",
)
def returned_weights(ex: Examination) -> Finding | None:
    """Count the axes of the attention weights that are returned with the output. With 4 axes, they
    are weights per head; with 3 axes, they are averaged over heads."""
    weights = ex.answer.weights
    if not ex.mode.weights:
        return None
    seen = "none" if weights is None else "averaged" if weights.ndim == 3 else "per head"
    declared = ex.adapter.returns_weights or "none"
    value = Phrase(f"weights.{seen.replace(' ', '-')}")
    if seen == declared:
        value = probed.returned_weights(ex.adapter, seen)
    return _found(returned_weights.id, seen == declared, value, declared, seen)


def _near(ex: Examination, output: Array, want: Array) -> bool:
    """Return whether no element of two outputs differs by more than a tolerance.

    The tolerance is 4 `LIMIT` times the rms of σ over the whole output, or 1/1000 of the rms of the
    expected output if that is larger. NaN is never near.
    """
    noise = np.sqrt(np.mean(ex.expectation.sigma["output"] ** 2))
    size = np.sqrt(np.mean(ex.expectation.arrays["output"] ** 2))
    with np.errstate(invalid="ignore"):
        return bool((np.abs(output - want) <= max(4 * LIMIT * noise, 1e-3 * size)).all())
