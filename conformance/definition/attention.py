"""The reference: multi-head attention and its derivative, by hand, in float64 NumPy.

Written for reading, and independent of every contestant. The backward pass is the chain rule
through the definition in `conformance.definition.problem`, with P the weights, dX the gradient of
the loss with respect to X, C = P v the context, and D the row term of the softmax's Jacobian:

    dP = dC vᵀ        D_i = Σ_j P_ij dP_ij = dC_i·C_i        dS = P ∘ (dP − D)        dB = dS
    scaled dot:  dq = scale · dS k             dk = scale · dSᵀ q
    additive:    dH_ijd = scale · dS_ij w_d (1 − tanh²(q_i + k_j)_d);  dq = Σ_j dH, dk = Σ_i dH

An axis string is einsum's: b batch, q query, k key, h heads, d head, e embed; `...` stands for
the sample axis of the noisy arithmetic, absent in the exact one. `hold` is that arithmetic: it
says where an implementation would hold an intermediate, and in which kind of storage. Checked in
`tests/` against a scalar loop, 50-digit arithmetic, complex steps and two frameworks' autodiff.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from conformance.definition.arithmetic import Exact
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.problem import Problem


@dataclass(frozen=True, eq=False)
class Forward:
    """The forward pass with the intermediates that the backward pass needs.

    `q`, `k` `[batch heads length head]`, `v` `[batch heads key value_head]` are projected and
    repeated to all heads; `hidden` is tanh(q + k) of the additive score; `log_total` is the
    logarithm of the softmax's normaliser.
    """

    q: Array
    k: Array
    v: Array
    hidden: Array | None
    logits: Array
    weights: Array
    log_total: Array
    context: Array
    output: Array


def forward(problem: Problem, hold: Exact) -> Forward:
    """Return the output `[batch query output_width]`, the weights, and what `backward` needs."""
    shape, weights = problem.shape, problem.weights
    q = _project(problem.query, weights.query, weights.query_bias, hold)
    k = _project(problem.key, weights.key, weights.key_bias, hold)
    v = _project(problem.value, weights.value, weights.value_bias, hold)
    k, v = np.repeat(k, shape.group, axis=-3), np.repeat(v, shape.group, axis=-3)

    hidden = None
    if shape.score == "additive":
        summed = hold(q[..., :, None, :] + k[..., None, :, :], "logits")
        hidden = hold(np.tanh(summed), "logits")
        logits = hold.contract("...bhqkd,hd->...bhqk", hidden, _score(problem), "logits")
    else:
        logits = hold.contract("...bhqd,...bhkd->...bhqk", q, k, "logits")
    logits = hold(problem.logit_scale * logits, "logits")
    if problem.attn_bias is not None:
        logits = hold(logits + problem.attn_bias, "logits")

    attention, log_total = masked_softmax(logits, problem.allowed_in_full(), hold)
    context = hold.contract("...bhqk,...bhkd->...bhqd", attention, v, "tensor")
    output = hold.contract("...bhqd,hde->...bqe", context, weights.output, "tensor")
    if weights.output_bias is not None:
        output = hold(output + weights.output_bias, "tensor")
    return Forward(q, k, v, hidden, logits, attention, log_total, context, output)


def masked_softmax(logits: Array, allowed: BoolArray, hold: Exact) -> tuple[Array, Array]:
    """Return the softmax over allowed keys, 0 elsewhere; 0 throughout where no key is allowed.

    Also returns the logarithm of the normaliser, `[batch heads query 1]`.
    """
    peak = np.max(logits, axis=-1, keepdims=True, where=allowed, initial=-np.inf)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    powers = hold(np.exp(np.where(allowed, logits - peak, -np.inf)), "probability")
    total = hold.total("...bhqk->...bhq", powers, "logits")[..., None]
    total = np.where(total > 0, total, 1.0)
    return hold(powers / total, "probability"), peak + np.log(total)


def backward(problem: Problem, found: Forward, hold: Exact) -> dict[str, Array]:
    """Return the gradients of ⟨output, cotangent⟩ by canonical name, each in its array's shape."""
    shape, weights = problem.shape, problem.weights
    gradients: dict[str, Array] = {}
    d_output = hold.lift(problem.cotangent)
    gradients["weights.output"] = hold.contract(
        "...bhqd,...bqe->...hde", found.context, d_output, "tensor"
    )
    if weights.output_bias is not None:
        gradients["weights.output_bias"] = hold.total("...bqe->...e", d_output, "tensor")

    attention = hold.recomputed(found.weights, found.log_total)
    d_context = hold.contract("...bqe,hde->...bhqd", d_output, weights.output, "tensor")
    d_v = hold.contract("...bhqk,...bhqd->...bhkd", attention, d_context, "tensor")
    d_weights = hold.contract("...bhqd,...bhkd->...bhqk", d_context, found.v, "probability")
    row = hold.contract("...bhqd,...bhqd->...bhq", d_context, found.context, "logits")
    d_logits = hold(attention * (d_weights - row[..., None]), "probability")
    if problem.attn_bias is not None:
        gradients["attn_bias"] = hold(_sum_to(d_logits, problem.attn_bias.shape), "tensor")

    d_scores = hold(problem.logit_scale * d_logits, "probability")
    if found.hidden is None:
        d_q = hold.contract("...bhqk,...bhkd->...bhqd", d_scores, found.k, "tensor")
        d_k = hold.contract("...bhqk,...bhqd->...bhkd", d_scores, found.q, "tensor")
    else:
        gradients["weights.score"] = hold.contract(
            "...bhqk,...bhqkd->...hd", d_scores, found.hidden, "tensor"
        )
        slope = hold((1.0 - found.hidden**2) * _score(problem)[:, None, None, :], "logits")
        d_hidden = hold(d_scores[..., None] * slope, "probability")
        d_q = hold.total("...bhqkd->...bhqd", d_hidden, "tensor")
        d_k = hold.total("...bhqkd->...bhkd", d_hidden, "tensor")

    projected = {
        "query": (problem.query, d_q),
        "key": (problem.key, _sum_groups(d_k, shape.group, hold)),
        "value": (problem.value, _sum_groups(d_v, shape.group, hold)),
    }
    d_inputs: dict[str, Array] = {}
    for name, (values, gradient) in projected.items():
        gradients[f"weights.{name}"] = hold.contract(
            "...bqe,...bhqd->...ehd", hold.lift(values), gradient, "tensor"
        )
        if getattr(weights, f"{name}_bias") is not None:
            gradients[f"weights.{name}_bias"] = hold.total("...bhqd->...hd", gradient, "tensor")
        weight = getattr(weights, name)
        d_inputs[name] = hold.contract("...bhqd,ehd->...bqe", gradient, weight, "tensor")
    return gradients | _add_shared(problem, d_inputs, hold)


def _project(values: Array, weight: Array, bias: Array | None, hold: Exact) -> Array:
    """Project `[batch length embed]` to `[batch heads length head]`."""
    heads = hold.contract("...bqe,ehd->...bhqd", hold.lift(values), weight, "tensor")
    return heads if bias is None else hold(heads + bias[:, None, :], "tensor")


def _score(problem: Problem) -> Array:
    weight = problem.weights.score
    assert weight is not None, "Problem checks its weights against its shape"
    return weight


def _sum_to(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes (of the last four) along which an array of `shape` was broadcast."""
    axes = tuple(axis - 4 for axis in range(4) if shape[axis] == 1)
    return gradient.sum(axis=axes, keepdims=True) if axes else gradient


def _sum_groups(gradient: Array, group: int, hold: Exact) -> Array:
    """Sum over the query heads that share a key/value head."""
    if group == 1:
        return gradient
    *leading, heads, length, size = gradient.shape
    grouped = gradient.reshape(*leading, heads // group, group, length, size)
    return hold(grouped.sum(axis=-3), "tensor")


def _add_shared(problem: Problem, d_inputs: dict[str, Array], hold: Exact) -> dict[str, Array]:
    """Return one gradient per distinct input array; inputs that share an array are added."""
    if problem.shape.sharing == "separate":
        return d_inputs
    memory = hold(d_inputs["key"] + d_inputs["value"], "tensor")
    if problem.shape.sharing == "memory":
        return {"query": d_inputs["query"], "key": memory}
    return {"query": hold(d_inputs["query"] + memory, "tensor")}
