"""The reference: multi-head attention with a hand-written backward pass, in float64 NumPy.

It is written for readability and uses no framework. The backward pass applies the chain rule to
the definition in `conformance.definition.problem`, with P the weights, dX the gradient of the
loss with respect to X, C = P v the context, and D the row term of the softmax's Jacobian:

    dP = dC vᵀ        D_i = Σ_j P_ij dP_ij = dC_i·C_i        dS = P ∘ (dP − D)        dB = dS
    scaled dot:  dq = scale · dS k             dk = scale · dSᵀ q
    additive:    dH_ijd = scale · dS_ij w_d (1 − tanh²(q_i + k_j)_d);  dq = Σ_j dH, dk = Σ_i dH
    log-sum-exp: a loss on L_i = log Σ_j exp(S_ij) replaces D by D − dL, because ∂L/∂S = P

Features act in steps of their own, which stand in `conformance.definition.features`.

Axes are in einsum's notation: b batch, q query, k key, h heads, d head, e embed; `...` stands for
the sample axis of the noisy arithmetic, which the exact one does not have. `hold` is the
arithmetic, called wherever an implementation would store an intermediate. The tests compare the
reference with a scalar loop, 50-digit arithmetic, complex steps and two frameworks' autodiff.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from conformance.definition.arithmetic import Exact
from conformance.definition.dtypes import Array, BoolArray, IntArray
from conformance.definition.problem import Problem, check_shape, identities
from conformance.errors import WrongShape


@dataclass(frozen=True, eq=False)
class PreparedHeads:
    """Query or key heads after norm and rotation.

    `kept` is what the backward pass of each feature needs, by its name.
    """

    heads: Array
    kept: Mapping[str, Any]


def prepared(
    problem: Problem, query: Array, key: Array, hold: Exact
) -> tuple[PreparedHeads, PreparedHeads]:
    """Return the projected queries and keys after the features that change heads."""
    given = [entry.on_both(problem, query.dtype, hold) for entry in problem.entries]
    found = []
    for place, (side, heads) in enumerate((("query", query), ("key", key))):
        kept = {}
        for entry, of_both in zip(problem.entries, given, strict=True):
            heads, kept[entry.name] = entry.on_heads(problem, side, heads, of_both[place], hold)
        found.append(PreparedHeads(heads, kept))
    return found[0], found[1]


def gradients_of_prepared(
    problem: Problem, role: str, gradient: Array, after: PreparedHeads, hold: Exact
) -> tuple[Array, dict[str, Array]]:
    """Return the gradient of the projected heads, and those of arrays of features by their names.

    Args:
        problem: the problem.
        role: "query" or "key".
        gradient: the gradient of the prepared heads.
        after: the prepared heads.
        hold: the arithmetic.
    """
    found: dict[str, Array] = {}
    for entry in reversed(problem.entries):
        kept = after.kept[entry.name]
        gradient, trained = entry.back_to_heads(problem, role, gradient, kept, hold)
        found |= trained
    return gradient, found


@dataclass(frozen=True, eq=False)
class Forward:
    """The results of the forward pass, with the intermediates that the backward pass needs.

    `q`, `k` `[batch heads length head]` are projected, normed and rotated; `v`
    `[batch heads key value_head]` is projected. In `k` and `v`, heads are repeated for all query
    heads; `queries` and `keys` hold the prepared heads before they are repeated. `hidden` is
    tanh(q + k) of the additive score; `kept` is what the backward pass of each feature needs,
    which may have changed the logits, by its name. `log_total` `[batch heads query 1]` is the
    logarithm of the softmax's normaliser. `softmax` and `weights` differ only in rounding: the
    former divides exponentials by their sum, the latter is exp(logits - log_total). `of_extra`
    `[batch heads query 1]` is the weight of an extra logit. `hidden` and `of_extra` are None if the
    problem has no such step.
    """

    q: Array
    k: Array
    v: Array
    hidden: Array | None
    logits: Array
    softmax: Array
    weights: Array
    log_total: Array
    context: Array
    output: Array
    queries: PreparedHeads
    keys: PreparedHeads
    kept: Mapping[str, Any]
    of_extra: Array | None


def _for_group(heads: Array, group: int) -> Array:
    """Return key or value heads, each repeated for all query heads that share it."""
    # Long heads are not copied for nothing.
    return heads if group == 1 else np.repeat(heads, group, axis=-3)


def forward(problem: Problem, hold: Exact) -> Forward:
    """Return the output `[batch query output_width]`, the weights, and the intermediates."""
    shape, weights = problem.shape, problem.weights
    hold = hold.among_equals(equal_keys(problem))
    q, k, v = projected_heads(problem, hold)
    queries, keys = prepared(problem, q, k, hold)
    q, k = queries.heads, _for_group(keys.heads, shape.group)
    v = _for_group(v, shape.group)

    hidden = None
    if shape.score == "additive":
        summed = hold(q[..., :, None, :] + k[..., None, :, :], "logits")
        hidden = hold(np.tanh(summed), "logits")
        logits = hold.contract("...bhqkd,hd->...bhqk", hidden, _score(problem), "logits")
    else:
        logits = hold.contract("...bhqd,...bhkd->...bhqk", q, k, "logits")
    logits = hold(problem.logit_scale * logits, "logits")
    kept: dict[str, Any] = {}
    extra: Array | None = None
    for entry in problem.entries:
        logits, kept[entry.name] = entry.on_logits(problem, logits, hold)
        extra = entry.extra(problem) if extra is None else extra
    if problem.attn_bias is not None:
        logits = hold(logits + problem.attn_bias, "logits")

    softmax, of_extra, log_total = masked_softmax(logits, problem.allowed_in_full(), hold, extra)
    attention = hold.recomputed(softmax, log_total)
    context = hold.contract("...bhqk,...bhkd->...bhqd", attention, v, "tensor")
    output = hold.contract("...bhqd,hde->...bqe", context, weights.output, "tensor")
    if weights.output_bias is not None:
        output = hold(output + weights.output_bias, "tensor")
    return Forward(
        q=q,
        k=k,
        v=v,
        hidden=hidden,
        logits=logits,
        softmax=softmax,
        weights=attention,
        log_total=log_total,
        context=context,
        output=output,
        queries=queries,
        keys=keys,
        kept=kept,
        of_extra=of_extra,
    )


def projected_heads(problem: Problem, hold: Exact) -> tuple[Array, Array, Array]:
    """Return the projected query, key and value, before norm and rotation.

    They are `[batch heads query head]`, `[batch kv_heads key head]` and
    `[batch kv_heads key value_head]`.
    """
    weights, repeats = problem.weights, _repeats(problem)
    return (
        _project(problem.query, weights.query, weights.query_bias, hold, repeats.query),
        _project(problem.key, weights.key, weights.key_bias, hold, repeats.key),
        _project(problem.value, weights.value, weights.value_bias, hold, repeats.value),
    )


def masked_softmax(
    logits: Array, allowed: BoolArray, hold: Exact, extra: Array | None = None
) -> tuple[Array, Array | None, Array]:
    """Return the softmax over the allowed keys, the extra weight, and the normaliser's logarithm.

    The softmax has the shape of `logits` and is 0 for blocked keys, so a fully masked query gets
    only zeros. The other two results have the shape `[batch heads query 1]`. `extra`, `[heads]`,
    are logits that take weight and have no value. If it is None, so is their weight, and the
    logarithm for a fully masked query is 0.
    """
    peak = np.max(logits, axis=-1, keepdims=True, where=allowed, initial=-np.inf)
    if extra is not None:
        # Noise of -∞ would be NaN, so replace it by a finite number with the same effect.
        finite = np.maximum(extra, np.finfo(extra.dtype).min / 4)
        lifted = hold(hold.lift(finite[None, :, None, None]), "logits")
        peak = np.maximum(peak, lifted)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    powers = hold(np.exp(np.where(allowed, logits - peak, -np.inf)), "probability")
    total = hold.total("...bhqk->...bhq", powers, "logits")[..., None]
    of_extra = None
    if extra is not None:
        of_extra = hold(np.exp(lifted - peak), "logits")
        total = hold(total + of_extra, "logits")
    total = np.where(total > 0, total, 1.0)
    if of_extra is not None:
        of_extra = hold(of_extra / total, "probability")
    return hold(powers / total, "probability"), of_extra, peak + np.log(total)


def backward(problem: Problem, results: Forward, hold: Exact) -> dict[str, Array]:
    """Return the gradients of ⟨output, cotangent⟩, by the names that `Answer.gradients` explains.

    They are the gradients of inputs, weights, bias and trained arrays of features, as far as the
    problem has them. The projections are constants if the problem's `heads_alone` is true. A
    `weights_cotangent` adds ⟨weights, weights_cotangent⟩ to the loss, and a
    `log_sum_exp_cotangent` adds ⟨log-sum-exp, log_sum_exp_cotangent⟩.
    """
    shape, weights = problem.shape, problem.weights
    hold = hold.among_equals(equal_keys(problem))
    gradients: dict[str, Array] = {}
    d_output = hold.lift(problem.cotangent)
    if not problem.heads_alone:
        gradients["weights.output"] = hold.contract(
            "...bhqd,...bqe->...hde", results.context, d_output, "tensor"
        )
    if weights.output_bias is not None:
        gradients["weights.output_bias"] = hold.total("...bqe->...e", d_output, "tensor")

    # Recompute the weights with new noise, as fused kernels do in the backward pass.
    attention = hold.recomputed(results.softmax, results.log_total)
    if results.hidden is None:
        # Products in other tiles or of a transposed matrix are added in another order.
        again = hold.reordered("...bhqd,...bhkd->...bhqk", results.q, results.k)
        attention = attention * (1.0 + problem.logit_scale * again)
    d_context = hold.contract("...bqe,hde->...bhqd", d_output, weights.output, "tensor")
    d_v = hold.contract("...bhqk,...bhqd->...bhkd", attention, d_context, "tensor")
    d_weights = hold.contract("...bhqd,...bhkd->...bhqk", d_context, results.v, "probability")
    row = hold.contract("...bhqd,...bhqd->...bhq", d_context, results.context, "logits")
    if problem.weights_cotangent is not None:
        returned = hold.lift(problem.weights_cotangent)
        d_weights = hold(d_weights + returned, "probability")
        row_term = hold.contract("...bhqk,...bhqk->...bhq", attention, returned, "logits")
        row = hold(row + row_term, "logits")
    if problem.log_sum_exp_cotangent is not None:
        row = hold(row - hold.lift(problem.log_sum_exp_cotangent), "logits")
    d_logits = hold(attention * (d_weights - row[..., None]), "probability")
    if problem.attn_bias is not None:
        # An argument may hold the expanded bias; its gradient is rounded before the suite sums it.
        is_full = problem.attn_bias.shape == shape.logits
        d_bias = d_logits if is_full else hold(d_logits, "returned")
        gradients["attn_bias"] = hold(_sum_to(d_bias, problem.attn_bias.shape), "tensor")
    if results.of_extra is not None:
        of_extra = hold.recomputed(results.of_extra, results.log_total)[..., 0]
        for entry in problem.entries:
            gradients |= entry.back_to_extra(of_extra, row, hold)
    for entry in reversed(problem.entries):
        d_logits = entry.back_to_logits(problem, d_logits, results.kept[entry.name], hold)

    d_scores = hold(problem.logit_scale * d_logits, "probability")
    if results.hidden is None:
        d_q = hold.contract("...bhqk,...bhkd->...bhqd", d_scores, results.k, "tensor")
        d_k = hold.contract("...bhqk,...bhqd->...bhkd", d_scores, results.q, "tensor")
    else:
        gradients["weights.score"] = hold.contract(
            "...bhqk,...bhqkd->...hd", d_scores, results.hidden, "tensor"
        )
        slope = hold((1.0 - results.hidden**2) * _score(problem)[:, None, None, :], "logits")
        d_hidden = hold(d_scores[..., None] * slope, "probability")
        d_q = hold.total("...bhqkd->...bhqd", d_hidden, "tensor")
        d_k = hold.total("...bhqkd->...bhkd", d_hidden, "tensor")

    d_k = _sum_groups(d_k, shape.group, hold)
    d_q, d_gain = gradients_of_prepared(problem, "query", d_q, results.queries, hold)
    gradients |= d_gain
    d_k, d_gain = gradients_of_prepared(problem, "key", d_k, results.keys, hold)
    gradients |= d_gain
    projected = {
        "query": (problem.query, d_q),
        "key": (problem.key, d_k),
        "value": (problem.value, _sum_groups(d_v, shape.group, hold)),
    }
    d_inputs: dict[str, Array] = {}
    for name, (values, gradient) in projected.items():
        weight = getattr(weights, name)
        if not problem.heads_alone:
            gradients[f"weights.{name}"] = hold.contract(
                "...bqe,...bhqd->...ehd", hold.lift(values), gradient, "tensor"
            )
        if getattr(weights, f"{name}_bias") is not None:
            gradients[f"weights.{name}_bias"] = hold.total("...bhqd->...hd", gradient, "tensor")
        d_inputs[name] = hold.contract("...bhqd,ehd->...bqe", gradient, weight, "tensor")
    return gradients | _add_shared(problem, d_inputs, hold)


def merge(*parts: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the attention over all keys, and its log-sum-exp, from those over disjoint parts.

    With O and L those of a part, L = log Σ exp(L_part) and O = Σ exp(L_part − L) O_part (M. Milakov
    and N. Gimelshein, arXiv:1805.02867). A sink belongs to exactly one part.

    Args:
        parts: for each part of the keys, its output before the output projection, `[... query
            value_head]`, and its log-sum-exp `[... query]`, in base e. The log-sum-exp of a query
            that sees no key of a part is −∞; its output does not matter, unless it is NaN.

    Returns:
        The output `[... query value_head]`, 0 for queries that see no key at all, and the
        log-sum-exp `[... query]`; both in the dtype that NumPy computes them in.

    Raises:
        WrongShape: if no part is given, or shapes do not fit each other.
    """
    if not parts:
        raise WrongShape("there is no part to merge; pass pairs of output and log-sum-exp")
    outputs, sums = ([np.asarray(part[at]) for part in parts] for at in (0, 1))
    for output, each in zip(outputs, sums, strict=True):
        check_shape("an output", output.shape, outputs[0].shape)
        check_shape("a log-sum-exp", each.shape, output.shape[:-1])
    whole = np.logaddexp.reduce(sums)
    safe = np.where(np.isneginf(whole), 0.0, whole)
    merged = sum(
        np.exp(each - safe)[..., None] * output for output, each in zip(outputs, sums, strict=True)
    )
    return np.asarray(merged), whole


def heads_alone(problem: Problem) -> Problem:
    """Return a problem whose inputs are the projected heads of another; its projections do nothing.

    These projections are identities. The query, key and value hold their heads side by side,
    `[batch length (heads head)]`. The cotangent is that of the context, the weights times the
    values. All of these arrays are rounded to the dtype.
    """
    shape, rounded = problem.shape, problem.format.round
    q, k, v = projected_heads(problem, Exact())

    def merged(heads: Array) -> Array:
        return rounded(heads.transpose(0, 2, 1, 3).reshape(heads.shape[0], heads.shape[2], -1))

    weights = identities(shape, problem.weights.score)
    d_context = np.einsum("bqe,hde->bhqd", problem.cotangent, problem.weights.output)
    return problem.replace(
        heads_alone=True,
        shape=replace(
            shape,
            sharing="separate",
            bias=False,
            query_width=len(weights.query),
            key_width=len(weights.key),
            value_width=len(weights.value),
            output_width=weights.output.shape[-1],
        ),
        weights=weights,
        query=merged(q),
        key=merged(k),
        value=merged(v),
        cotangent=merged(d_context),
    )


class Repeated(NamedTuple):
    """The distinct tokens of an input, and the index of each token among the distinct ones.

    `rows` is `[1 distinct embed]`, `origin` is `[(batch length)]`.
    """

    rows: Array
    origin: IntArray


class _Repeats(NamedTuple):
    """What repeats in a problem: the tokens of each input, and equal keys.

    An input is None if all its tokens are distinct. `equal_keys` is the greatest number of equal
    keys in a batch entry, or 0 if that is too small to matter.
    """

    query: Repeated | None
    key: Repeated | None
    value: Repeated | None
    equal_keys: int


_known: WeakKeyDictionary[Problem, _Repeats] = WeakKeyDictionary()
"""A cache of what repeats in each problem. The search takes a quarter of the time of a noisy
evaluation."""


def _repeats(problem: Problem) -> _Repeats:
    found = _known.get(problem)
    if found is None:
        query, key, value = problem.query, problem.key, problem.value
        of_query = _repeated(query)
        of_key = of_query if key is query else _repeated(key)
        of_value = of_key if value is key else _repeated(value)
        found = _Repeats(of_query, of_key, of_value, _most_equal_keys(problem))
        _known[problem] = found
    return found


def _repeated(values: Array) -> Repeated | None:
    """Return the distinct tokens of an input and where they occur, or None if all are distinct."""
    tokens = values.reshape(-1, values.shape[-1])
    if not _may_repeat(tokens):
        return None
    rows, origin = np.unique(tokens, axis=0, return_inverse=True)
    return Repeated(rows[None], origin.ravel()) if len(rows) < len(tokens) else None


def _project(
    values: Array, weight: Array, bias: Array | None, hold: Exact, repeated: Repeated | None
) -> Array:
    """Return the projection of `[batch length embed]` to `[batch heads length head]`.

    Equal rows are projected once and share their noise. Implementations round them identically, so
    their errors do not average out in a sum over keys.
    """
    batch, length, _ = values.shape
    distinct = values if repeated is None else repeated.rows
    heads = hold.contract("...bqe,ehd->...bhqd", hold.lift(distinct), weight, "tensor")
    if bias is not None:
        heads = hold(heads + bias[:, None, :], "tensor")
    if repeated is None:
        return heads
    spread = heads[..., 0, :, :, :].take(repeated.origin, axis=-2)
    *leading, _, size = spread.shape
    return spread.reshape(*leading, batch, length, size).swapaxes(-4, -3)


FEW = 64
"""Up to this many equal keys, the usual noise covers the sum of their errors."""


def equal_keys(problem: Problem) -> int:
    """Return the greatest number of equal keys in a batch entry, or 0 if it is at most `FEW`.

    Equal keys get equal weights, so some sums over keys may have this many equal terms, whose
    rounding errors add up. If the scale is 0 and nothing is added to the logits, all keys of an
    entry count as equal.
    """
    return _repeats(problem).equal_keys


def _most_equal_keys(problem: Problem) -> int:
    keys = problem.key
    if keys.shape[1] <= FEW:
        return 0
    if problem.logit_scale == 0 and problem.attn_bias is None and problem.slopes is None:
        return keys.shape[1]
    if not _may_repeat(keys.reshape(-1, keys.shape[-1])):
        return 0
    counts = (np.unique(entry, axis=0, return_counts=True)[1].max() for entry in keys)
    most = int(max(counts, default=0))
    return most if most > FEW else 0


def _may_repeat(rows: Array) -> bool:
    """Return whether two rows may be equal; if this is False, all rows are distinct.

    The rows are compared by their hashes, which is faster than sorting them.
    """
    if not rows.size:
        return True
    # The sum makes -0.0 equal to 0.0.
    bits = (rows.astype(np.float64) + 0.0).view(np.uint64)
    # A product has no more low bits than its factors, and numbers of a narrow format have none.
    bits ^= bits >> np.uint64(32)
    hashes = bits @ _odd_factors(rows.shape[1])
    return len(np.unique(hashes)) < len(rows)


@lru_cache(maxsize=64)
def _odd_factors(count: int) -> np.ndarray:
    """Return random odd numbers, by which the components of a row are multiplied in its hash."""
    return np.random.default_rng(0).integers(2**63, size=count, dtype=np.uint64) | 1


def _score(problem: Problem) -> Array:
    weight = problem.weights.score
    assert weight is not None, "Problem checks its weights against its shape"
    return weight


def _sum_to(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Return the gradient summed over those of its last four axes that have size 1 in `shape`."""
    axes = tuple(axis - 4 for axis in range(4) if shape[axis] == 1)
    return gradient.sum(axis=axes, keepdims=True) if axes else gradient


def _sum_groups(gradient: Array, group: int, hold: Exact) -> Array:
    """Return a gradient `[... heads key size]` summed over the query heads of each group."""
    if group == 1:
        return gradient
    *leading, heads, length, size = gradient.shape
    grouped = gradient.reshape(*leading, heads // group, group, length, size)
    return hold(grouped.sum(axis=-3), "tensor")


def _add_shared(problem: Problem, d_inputs: dict[str, Array], hold: Exact) -> dict[str, Array]:
    """Return one gradient per distinct input; gradients of inputs that share an array are added."""
    found = dict(d_inputs)
    for name, before in (("value", "key"), ("key", "query")):
        if problem.shape.array_of(name) != name:
            found[before] = hold(found[before] + found.pop(name), "tensor")
    return found
