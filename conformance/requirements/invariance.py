"""Invariances: to blocked keys, the order of keys, other batch entries, and a constant.

Each check puts a changed problem to the implementation and compares its two answers. None of them
needs to know the right answer, so each speaks of its own defect alone.
"""

from __future__ import annotations

import numpy as np

from conformance.cases import catalogue as served
from conformance.cases.patterns import other_mask
from conformance.definition.comparison import Comparison, between, compare
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.problem import Problem
from conformance.errors import Unsupported
from conformance.records.findings import Finding
from conformance.requirements.examination import Examination
from conformance.requirements.requirement import Requirement, judge


def _between(
    ex: Examination, name: str, one: Array, other: Array, noise: Array | None = None
) -> Comparison:
    """Compare two answers of the implementation, with the noise of both."""
    noise = ex.expectation.loosest[name] if noise is None else noise
    return between(name, one, other, noise, ex.expectation.underflow)


def with_other_content(problem: Problem, tokens: BoolArray, random: np.random.Generator) -> Problem:
    """Change the content of key and value at the tokens marked `[batch key]`.

    In self-attention the token changes as a query too.
    """
    changed = {}
    for name in problem.shape.distinct_inputs():
        if name == "query" and problem.shape.sharing != "self":
            continue
        values = getattr(problem, name).copy()
        fresh = problem.format.round(4.0 * random.standard_normal(values.shape))
        values[tokens] = fresh[tokens]
        changed[name] = values
    return problem.with_inputs(**changed)


def influenced(problem: Problem, tokens: BoolArray) -> BoolArray:
    """Return which outputs `[batch query]` may depend on the tokens `[batch key]`."""
    seen: BoolArray = np.any(problem.allowed_in_full() & tokens[:, None, None, :], axis=(1, 3))
    return seen | tokens if problem.shape.sharing == "self" else seen


def blocked_tokens(problem: Problem) -> BoolArray:
    """Return the tokens `[batch key]` to change: those blocked for all queries, else one each."""
    allowed = problem.allowed_in_full()
    never: BoolArray = np.logical_not(allowed.any(axis=(1, 2)))
    if never.any():
        return never
    hidden_from = (~allowed.any(axis=1)).sum(axis=1)
    chosen: BoolArray = np.arange(allowed.shape[-1]) == hidden_from.argmax(axis=-1)[:, None]
    return chosen


def blocked_key(ex: Examination) -> Finding:
    """Other content behind the mask leaves every answer that may not see it unmoved."""
    problem, answer = ex.problem, ex.answer
    tokens = blocked_tokens(problem)
    changed = with_other_content(problem, tokens, ex.case.random("blocked"))
    again = ex.ask(changed)
    unmoved = ~influenced(problem, tokens)
    found = [_rows(ex, "output", answer.output, again.output, unmoved)]
    if problem.shape.sharing != "self" and answer.gradients:
        unseen: BoolArray = np.logical_not(problem.allowed_in_full().any(axis=(1, 2)))
        if unseen.any():
            found += _zero_gradients(ex, unseen)
            if "query" in answer.gradients:
                one, other = answer.gradients["query"], again.gradients["query"]
                found.append(_rows(ex, "gradient.query", one, other, unmoved))
    return judge(BLOCKED_KEY.id, found, said="a blocked key moves {array}")


def _rows(ex: Examination, name: str, one: Array, other: Array, rows: BoolArray) -> Comparison:
    """Compare the chosen rows `[batch length]` only; the others count as equal."""
    same = np.where(rows[..., None], other, one)
    return _between(ex, name, one, same)


def _zero_gradients(ex: Examination, unseen: BoolArray) -> list[Comparison]:
    found = []
    for name in ("key", "value"):
        if name in ex.answer.gradients:
            gradient = ex.answer.gradients[name]
            zeroed = np.where(unseen[..., None], 0.0, gradient)
            exact = np.zeros_like(gradient)
            found.append(
                compare(f"gradient.{name}", gradient, zeroed, exact, ex.expectation.underflow)
            )
    return found


def key_order(ex: Examination) -> Finding:
    """Keys, values, mask and bias permuted together: the same output, permuted gradients."""
    problem = ex.problem
    order = ex.case.random("order").permutation(problem.shape.key_length)
    moved = {
        name: None
        if array is None
        else np.take(array, order, axis=-1)
        if array.shape[-1] > 1
        else array
        for name, array in (("mask", problem.allowed), ("attn_bias", problem.attn_bias))
    }
    permuted = problem.replace(causal=None, **moved)
    if problem.shape.sharing == "self":
        # Tokens are queries too: permute those with them, and expect the rows permuted.
        for name in ("mask", "attn_bias"):
            array = moved[name]
            if array is not None and array.shape[-2] > 1:
                permuted = permuted.replace(**{name: np.take(array, order, axis=-2)})
        inputs = {"query": problem.query[:, order]}
        permuted = permuted.replace(cotangent=problem.cotangent[:, order])
    else:
        names = [name for name in problem.shape.distinct_inputs() if name != "query"]
        inputs = {name: getattr(problem, name)[:, order] for name in names}
    again = ex.ask(permuted.with_inputs(**inputs)).arrays()
    again.pop("weights", None)
    rows = ("output", "gradient.query") if problem.shape.sharing == "self" else ()
    found = []
    for name, one in ex.answer.arrays().items():
        if name not in again:
            continue
        other = again[name]
        if name in rows or name in ("gradient.key", "gradient.value"):
            one = one[:, order]
            noise = ex.expectation.loosest[name][:, order]
        elif name == "gradient.attn_bias":
            one, noise = one[..., order], ex.expectation.loosest[name][..., order]
        else:
            noise = ex.expectation.loosest[name]
        found.append(_between(ex, name, one, other, noise))
    return judge(KEY_ORDER.id, found, said="{array} depends on the order of the keys")


def batch_entries(ex: Examination) -> Finding:
    """Other content in all entries but one leaves that one unmoved, to the noise."""
    problem = ex.problem
    kept = problem.shape.batch - 1
    random = ex.case.random("batch")
    inputs = {}
    for name in problem.shape.distinct_inputs():
        values = problem.format.round(2.0 * random.standard_normal(getattr(problem, name).shape))
        values[kept] = getattr(problem, name)[kept]
        inputs[name] = values
    changes = {}
    if problem.mask is not None and problem.mask.shape[0] > 1:
        mask = other_mask(problem.mask)
        mask[kept] = problem.mask[kept]
        changes["mask"] = mask
    again = ex.ask(problem.with_inputs(**inputs).replace(**changes)).arrays()
    names = ["output", *(f"gradient.{name}" for name in problem.shape.distinct_inputs())]
    found = [
        _between(ex, name, one[kept], again[name][kept], ex.expectation.loosest[name][kept])
        for name, one in ex.answer.arrays().items()
        if name in names and name in again
    ]
    return judge(BATCH.id, found, said="{array} of one batch entry depends on the others")


def logit_shift(ex: Examination) -> Finding:
    """A constant added to each row of the bias changes nothing but the rounding."""
    problem = ex.problem
    if problem.attn_bias is None:
        raise Unsupported("no additive bias to shift")
    # Sixteenths below 4 plus whole numbers up to 3 are exact even in bfloat16, so the two
    # problems differ by exactly the constant.
    bias = np.clip(np.rint(problem.attn_bias * 16) / 16, -3.5, 3.5)
    rows = ex.case.random("shift").integers(-3, 4, (*problem.shape.logits[:3], 1))
    shifted = problem.replace(attn_bias=bias + rows)
    noise = ex.expected("shifted", lambda: shifted).loosest["output"]
    one, other = ex.ask(problem.replace(attn_bias=bias)).output, ex.ask(shifted).output
    found = [_between(ex, "output", other, one, noise)]
    return judge(SHIFT.id, found, said="a constant added to a row of logits moves {array}")


BLOCKED_KEY = Requirement(
    id=served.BLOCKED,
    level="must",
    sentence="A blocked key influences nothing: not the output of a query that may not attend it, "
    "and its own gradient is zero where no query may.",
    why="Padding that leaks makes answers depend on how a batch was padded.",
    check=blocked_key,
)
KEY_ORDER = Requirement(
    id=served.KEY_ORDER,
    level="must",
    sentence="The order of keys does not matter when values, mask and bias move along.",
    why="Attention is a sum over keys; a dropped or repeated tile shows as an order.",
    check=key_order,
)
BATCH = Requirement(
    id=served.BATCH,
    level="must",
    sentence="Entries of a batch do not influence each other.",
    why="A mask or a tile taken from the neighbour is invisible with equal entries.",
    check=batch_entries,
)
SHIFT = Requirement(
    id=served.SHIFT,
    level="must",
    sentence="A constant added to a row of logits changes nothing.",
    why="It is what the softmax is for; one without the row's maximum subtracted fails it.",
    check=logit_shift,
)

REQUIREMENTS = (BLOCKED_KEY, KEY_ORDER, BATCH, SHIFT)
