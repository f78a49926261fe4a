"""Requirements that answers are invariant under changes that must not affect them.

These are changes of blocked keys, of the order of keys and of other batch entries, and shifts of
the logits. Each check calls the implementation with a changed problem and compares the two answers.
The checks do not use the correct answer, so they do not report again what other requirements find.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.cases.patterns import other_mask
from conformance.definition.comparison import Comparison, between, compare
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.problem import Problem
from conformance.errors import Unsupported
from conformance.records.findings import Finding
from conformance.requirements.examination import Examination
from conformance.requirements.requirement import judge, requirement


def _between(ex: Examination, name: str, one: Array, other: Array, noise: Array) -> Comparison:
    """Compare the array `name` of two answers that both have this rounding noise."""
    return between(name, one, other, noise, ex.expectation.underflow)


def _rows(ex: Examination, name: str, one: Array, other: Array, rows: BoolArray) -> Comparison:
    """Compare an array of two answers only in the rows where `rows` `[batch length]` is True."""
    same = np.where(rows[..., None], other, one)
    return _between(ex, name, one, same, ex.expectation.sigma[name])


def with_other_content(problem: Problem, tokens: BoolArray, random: np.random.Generator) -> Problem:
    """Return the problem with new random keys and values where `tokens` `[batch key]` is True.

    In self-attention, the queries at these tokens change too.
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


def _influenced(problem: Problem, tokens: BoolArray) -> BoolArray:
    """Return the queries `[batch query]` whose output may depend on the tokens `[batch key]`."""
    seen: BoolArray = np.any(problem.allowed_in_full() & tokens[:, None, None, :], axis=(1, 3))
    return seen | tokens if problem.shape.sharing == "self" else seen


def _blocked_tokens(problem: Problem) -> BoolArray:
    """Return which keys `[batch key]` are blocked for all queries in all heads.

    If there are none in the whole batch, return for each batch entry the key that is blocked in all
    heads for the largest number of queries.
    """
    allowed = problem.allowed_in_full()
    never: BoolArray = np.logical_not(allowed.any(axis=(1, 2)))
    if never.any():
        return never
    hidden_from = (~allowed.any(axis=1)).sum(axis=1)
    chosen: BoolArray = np.arange(allowed.shape[-1]) == hidden_from.argmax(axis=-1)[:, None]
    return chosen


@requirement(
    "mask.blocked-key-has-no-influence",
    "A blocked key influences nothing: not the output of a query that may not attend to it, "
    "and its own gradient is zero where no query may.",
    why="Padding that leaks makes answers depend on how a batch was padded.",
)
def blocked_key(ex: Examination) -> Finding:
    """Replace blocked keys and their values with random numbers about four times as large. The
    outputs of queries that may not attend to these keys must stay the same. If no query may attend
    to some keys, and this is not self-attention, the gradients of the queries must stay the same
    too, and the gradients of these keys and their values must be exactly 0."""
    problem, answer = ex.problem, ex.answer
    tokens = _blocked_tokens(problem)
    again = ex.ask(with_other_content(problem, tokens, ex.case.random("blocked")))
    unmoved = ~_influenced(problem, tokens)
    compared = [_rows(ex, "output", answer.output, again.output, unmoved)]
    unseen: BoolArray = np.logical_not(problem.allowed_in_full().any(axis=(1, 2)))
    if problem.shape.sharing != "self" and unseen.any():
        for name in [name for name in ("key", "value") if name in answer.gradients]:
            gradient = answer.gradients[name]
            zeroed, exact = np.where(unseen[..., None], 0.0, gradient), np.zeros_like(gradient)
            underflow = ex.expectation.underflow
            compared.append(compare(f"gradient.{name}", gradient, zeroed, exact, underflow))
        if "query" in answer.gradients:
            one, other = answer.gradients["query"], again.gradients["query"]
            compared.append(_rows(ex, "gradient.query", one, other, unmoved))
    return judge(blocked_key.id, compared, said="a blocked key moves {array}")


@requirement(
    "invariance.key-order",
    "The order of keys does not matter when values, mask and bias move along.",
    why="Attention is a sum over keys; a dropped or repeated tile makes their order matter.",
)
def key_order(ex: Examination) -> Finding:
    """Permute keys, values, mask and bias in the same way. The output must stay the same, and the
    gradients of keys and values must be permuted too. In self-attention, queries and the rows of
    the output are also permuted."""
    problem = ex.problem
    order = ex.case.random("order").permutation(problem.shape.key_length)
    rows_move = problem.shape.sharing == "self"
    masks: dict[str, Any] = {"mask": problem.allowed, "attn_bias": problem.attn_bias}
    for axis in (-1, -2) if rows_move else (-1,):
        for name, array in masks.items():
            if array is not None and array.shape[axis] > 1:
                masks[name] = np.take(array, order, axis=axis)
    permuted = problem.replace(causal=None, **masks)
    if rows_move:
        # Tokens are queries too, so the rows of the output are permuted with them.
        permuted = permuted.replace(cotangent=problem.cotangent[:, order])
        moved = {"query"}
    else:
        moved = {*problem.shape.distinct_inputs()} - {"query"}
    inputs = {name: getattr(problem, name)[:, order] for name in moved}
    again = ex.ask(permuted.with_inputs(**inputs)).arrays()
    again.pop("weights", None)
    of_tokens = {f"gradient.{name}" for name in moved} | ({"output"} if rows_move else set())
    compared = []
    for name, one in ex.answer.arrays().items():
        if name not in again:
            continue
        noise = ex.expectation.sigma[name]
        if name in of_tokens:
            one, noise = one[:, order], noise[:, order]
        elif name == "gradient.attn_bias":
            one, noise = one[..., order], noise[..., order]
        compared.append(_between(ex, name, one, again[name], noise))
    return judge(key_order.id, compared, said="{array} depends on the order of the keys")


@requirement(
    "invariance.batch-entries-are-independent",
    "Entries of a batch do not influence each other.",
    why="A mask or a tile of a neighbouring entry goes unnoticed while entries are equal.",
)
def batch_entries(ex: Examination) -> Finding:
    """Replace the inputs and masks of all batch entries except the last. The output and the input
    gradients of the last entry must stay the same up to rounding noise."""
    problem, last = ex.problem, ex.problem.shape.batch - 1
    random = ex.case.random("batch")
    inputs = {}
    for name in problem.shape.distinct_inputs():
        values = problem.format.round(2.0 * random.standard_normal(getattr(problem, name).shape))
        values[last] = getattr(problem, name)[last]
        inputs[name] = values
    changes = {}
    if problem.mask is not None and problem.mask.shape[0] > 1:
        changes["mask"] = other_mask(problem.mask)
        changes["mask"][last] = problem.mask[last]
    again = ex.ask(problem.with_inputs(**inputs).replace(**changes)).arrays()
    names = ["output", *(f"gradient.{name}" for name in inputs)]
    compared = [
        _between(ex, name, one[last], again[name][last], ex.expectation.sigma[name][last])
        for name, one in ex.answer.arrays().items()
        if name in names and name in again
    ]
    return judge(
        batch_entries.id, compared, said="{array} of one batch entry depends on the others"
    )


@requirement(
    "invariance.logit-shift",
    "A constant added to a row of logits changes nothing.",
    why="A softmax ignores it; one that does not subtract the row's maximum may not.",
)
def logit_shift(ex: Examination) -> Finding:
    """Add an integer between -3 and 3 to each row of the additive bias. The output must stay the
    same up to rounding noise."""
    problem = ex.problem
    if problem.attn_bias is None:
        raise Unsupported("no additive bias to shift")
    # Multiples of 1/16 below 4, plus integers up to 3, are exact even in bfloat16, so the two
    # problems differ by exactly the integer.
    bias = np.clip(np.rint(problem.attn_bias * 16) / 16, -3.5, 3.5)
    rows = ex.case.random("shift").integers(-3, 4, (*problem.shape.logits[:3], 1))
    shifted = problem.replace(attn_bias=bias + rows)
    noise = ex.expected("shifted", lambda: shifted).sigma["output"]
    one, other = ex.ask(problem.replace(attn_bias=bias)).output, ex.ask(shifted).output
    compared = [_between(ex, "output", other, one, noise)]
    return judge(logit_shift.id, compared, said="a constant added to a row of logits moves {array}")
