"""Small problems with every feature of the definition, and answers that owe the reference nothing.

Each way of computing is written from the formula in `conformance.definition.problem` in another
style: scalar loops over any kind of number, matrices that may be complex, and plain operations of
torch and JAX. They take the numbers apart from the problem, as a dict of *leaves* named like
gradients, so that one of them can be perturbed or differentiated.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from conformance.definition.dtypes import dtype_of
from conformance.definition.problem import Problem, Shape, Weights

SIZES = {
    "batch": 2,
    "query_length": 3,
    "key_length": 5,
    "heads": 4,
    "kv_heads": 4,
    "head_size": 3,
    "value_head_size": 2,
    "query_width": 3,
    "key_width": 4,
    "value_width": 5,
    "output_width": 6,
}
TINY = SIZES | {"query_length": 2, "key_length": 3, "heads": 2, "kv_heads": 2, "head_size": 2}
TINY |= {"query_width": 2, "key_width": 3, "value_width": 2, "output_width": 3}
MEMORY = {"sharing": "memory", "value_width": 4}
SELF = {"sharing": "self", "query_length": 5, "query_width": 4, "value_width": 4}
MORE_QUERIES = {"query_length": 5, "key_length": 3}


def make(
    sizes=SIZES,
    *,
    seed=0,
    dtype="float64",
    mask=None,
    attn_bias=None,
    causal=None,
    scale=None,
    gain=1.0,
    **changes,
) -> Problem:
    """Inputs N(0, 1), weights half as wide; `mask` and `attn_bias` are shapes or arrays."""
    shape = Shape(**{**sizes, **changes})
    random = np.random.default_rng(seed)
    rounded = dtype_of(dtype).round
    weights = {
        name: rounded(random.standard_normal(size) * (gain if name == "query" else 1.0) / 2)
        for name, size in shape.weight_shapes().items()
    }
    inputs = {
        name: rounded(random.standard_normal(size)) for name, size in shape.input_shapes().items()
    }
    if shape.sharing == "self":
        inputs["key"] = inputs["query"]
    if shape.sharing != "separate":
        inputs["value"] = inputs["key"]
    if isinstance(mask, tuple):
        mask = random.random(mask) < 0.6
        mask[..., 0] = True
    if isinstance(attn_bias, tuple):
        attn_bias = rounded(random.standard_normal(attn_bias))
    cotangent = rounded(
        random.standard_normal((shape.batch, shape.query_length, shape.output_width))
    )
    return Problem(
        shape=shape,
        dtype=dtype,
        weights=Weights(**weights),
        cotangent=cotangent,
        mask=mask,
        attn_bias=attn_bias,
        causal=causal,
        scale=scale,
        **inputs,
    )


def emptied(logits: tuple[int, int, int, int]) -> np.ndarray:
    """A mask with query 1 of entry 0 blocked in all heads, and query 2 of entry 1 in head 0."""
    mask = np.random.default_rng(5).random(logits) < 0.6
    mask[..., 0] = True
    mask[0, :, 1] = False
    mask[-1, 0, -1] = False
    return mask


FULL = (2, 4, 3, 5)
FEATURES = {
    "plain": {},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.7},
    "no biases": {"bias": False},
    "gqa": {"kv_heads": 2},
    "mqa": {"kv_heads": 1},
    "memory": MEMORY,
    "self": SELF,
    "one of each": {"batch": 1, "query_length": 1, "key_length": 1, "heads": 1, "kv_heads": 1},
    "key padding": {"mask": (2, 1, 1, 5)},
    "mask per head": {"mask": (1, 4, 3, 5)},
    "mask in full": {"mask": FULL},
    "mask per query": {"mask": np.array([True, False, True])[None, None, :, None]},
    "fully masked rows": {"mask": emptied(FULL)},
    "bias in full": {"attn_bias": FULL},
    "bias and mask": {"attn_bias": FULL, "mask": emptied(FULL)},
    "top-left": {"causal": "top-left"},
    "bottom-right": {"causal": "bottom-right"},
    "top-left, more queries": {"causal": "top-left", **MORE_QUERIES},
    "bottom-right, more queries": {"causal": "bottom-right", **MORE_QUERIES},
    "causal self": {"causal": "top-left", **SELF},
    "large logits": {"gain": 30.0},
    "all at once": {
        **MEMORY,
        "kv_heads": 2,
        "mask": (2, 1, 3, 5),
        "attn_bias": (1, 4, 3, 5),
        "causal": "bottom-right",
        "scale": 0.4,
        "bias": False,
    },
}
SCORES = ("scaled-dot", "additive")
BIAS_SHAPES = [
    tuple(size if kept else 1 for size, kept in zip(FULL, keep, strict=True))
    for keep in product((True, False), repeat=4)
]


def leaves(problem: Problem) -> dict[str, np.ndarray]:
    """Every array that has a gradient, by the gradient's name."""
    found = {name: getattr(problem, name) for name in problem.shape.distinct_inputs()}
    found |= {f"weights.{name}": weight for name, weight in problem.weights.named().items()}
    return found if problem.attn_bias is None else found | {"attn_bias": problem.attn_bias}


def three_inputs(leaf: dict) -> tuple:
    """Query, key and value, of which the shared ones have one leaf."""
    query = leaf["query"]
    key = leaf.get("key", query)
    return query, key, leaf.get("value", key)


def may_attend(problem: Problem, entry: int, head: int, query: int, key: int) -> bool:
    """Mask and causal flag for one pair, from the words of the definition."""
    shape = problem.shape
    if problem.causal == "top-left" and key > query:
        return False
    if problem.causal == "bottom-right" and key > query + shape.key_length - shape.query_length:
        return False
    return problem.mask is None or bool(broadcast(problem.mask, entry, head, query, key))


def broadcast(array, *index: int):
    """The element of an array whose axes may have size 1."""
    return array[tuple(0 if n == 1 else i for i, n in zip(index, array.shape, strict=True))]


def visible(problem: Problem) -> np.ndarray:
    """`may_attend` of every pair, `[batch heads query key]`."""
    allowed = np.zeros(problem.shape.logits, dtype=bool)
    for index in np.ndindex(allowed.shape):
        allowed[index] = may_attend(problem, *index)
    return allowed


def scale_of(problem: Problem, number=float):
    if problem.scale is not None:
        return number(problem.scale)
    return (
        number(1) if problem.shape.score == "additive" else number(problem.shape.head_size) ** -0.5
    )


def by_loops(problem: Problem, leaf: dict, number=float, exp=math.exp, tanh=math.tanh):
    """Output and weights, one number at a time."""
    shape, zero = problem.shape, number(0)
    query, key, value = three_inputs(leaf)
    weight = {name.removeprefix("weights."): array for name, array in leaf.items()}
    weight |= {name: leaf[f"weights.{name}"] for name in ("query", "key", "value")}
    group = shape.heads // shape.kv_heads
    scale = scale_of(problem, number)

    def project(name, tokens, entry, position, head, unit):
        total = zero
        for width in range(tokens.shape[2]):
            total += tokens[entry, position, width] * weight[name][width, head, unit]
        return total + weight[f"{name}_bias"][head, unit] if f"{name}_bias" in weight else total

    def logit(entry, head, i, j):
        total = zero
        for d in range(shape.head_size):
            q = project("query", query, entry, i, head, d)
            k = project("key", key, entry, j, head // group, d)
            total += weight["score"][head, d] * tanh(q + k) if "score" in weight else q * k
        total = scale * total
        return (
            total + broadcast(leaf["attn_bias"], entry, head, i, j)
            if "attn_bias" in leaf
            else total
        )

    kind = np.float64 if number is float else object
    weights = np.full(shape.logits, zero, dtype=kind)
    output = np.full(problem.cotangent.shape, zero, dtype=kind)
    for entry, i in product(range(shape.batch), range(shape.query_length)):
        row = [zero] * shape.output_width
        for head in range(shape.heads):
            seen = [j for j in range(shape.key_length) if may_attend(problem, entry, head, i, j)]
            logits = {j: logit(entry, head, i, j) for j in seen}
            peak = max(logits.values(), default=zero)
            powers = {j: exp(logits[j] - peak) for j in seen}
            total = sum(powers.values(), zero)
            for j in seen:
                weights[entry, head, i, j] = powers[j] / total
            for d in range(shape.value_head_size):
                context = zero
                for j in seen:
                    v = project("value", value, entry, j, head // group, d)
                    context += weights[entry, head, i, j] * v
                for e in range(shape.output_width):
                    row[e] += context * weight["output"][head, d, e]
        for e in range(shape.output_width):
            output[entry, i, e] = row[e] + weight["output_bias"][e] if shape.bias else row[e]
    return output, weights


def by_matrices(problem: Problem, leaf: dict, allowed: np.ndarray) -> np.ndarray:
    """The output with one small matrix product after the other; analytic, so complex steps work."""
    shape = problem.shape
    query, key, value = three_inputs(leaf)
    kind = np.result_type(*leaf.values())
    output = np.zeros(problem.cotangent.shape, dtype=kind)
    scale, group = scale_of(problem), shape.heads // shape.kv_heads

    def head_of(name, tokens, head):
        found = tokens @ leaf[f"weights.{name}"][:, head]
        return found + leaf[f"weights.{name}_bias"][head] if shape.bias else found

    for head in range(shape.heads):
        q = head_of("query", query, head)
        k, v = (head_of(name, x, head // group) for name, x in (("key", key), ("value", value)))
        if shape.score == "additive":
            logits = np.tanh(q[:, :, None] + k[:, None]) @ leaf["weights.score"][head]
        else:
            logits = q @ np.swapaxes(k, 1, 2)
        logits = logits * scale
        if "attn_bias" in leaf:
            bias = leaf["attn_bias"]
            logits = logits + bias[:, head if bias.shape[1] > 1 else 0]
        # Subtracting a real constant from a row changes no derivative.
        real = np.where(allowed[:, head], logits.real, -np.inf).max(axis=2, keepdims=True)
        powers = np.exp(logits - np.where(np.isfinite(real), real, 0.0)) * allowed[:, head]
        total = powers.sum(axis=2, keepdims=True)
        output += (powers / np.where(total == 0, 1.0, total)) @ v @ leaf["weights.output"][head]
    return output + leaf["weights.output_bias"] if shape.bias else output


def gradients_by_complex_steps(problem: Problem) -> dict[str, np.ndarray]:
    """Im f(x + ih) / h: no difference is taken, so h may be tiny and no digit is lost."""
    allowed = visible(problem)
    leaf = {name: array.astype(complex) for name, array in leaves(problem).items()}
    found = {name: np.zeros(array.shape) for name, array in leaf.items()}
    for name, array in leaf.items():
        for index in np.ndindex(array.shape):
            before = array[index]
            array[index] = before + 1e-100j
            moved = (by_matrices(problem, leaf, allowed) * problem.cotangent).sum()
            found[name][index] = moved.imag / 1e-100
            array[index] = before
    return found


def in_framework(xp, constant, shape: Shape, scale: float, leaf: dict, allowed):
    """Output and weights in operations that torch and `jax.numpy` have in common.

    `constant` stops gradients.
    """
    query, key, value = three_inputs(leaf)
    group = shape.heads // shape.kv_heads

    def project(name, tokens, repeats=1):
        heads = xp.einsum("ble,ehd->bhld", tokens, leaf[f"weights.{name}"])
        if shape.bias:
            heads = heads + leaf[f"weights.{name}_bias"][:, None, :]
        return heads[:, [head // repeats for head in range(shape.heads)]]

    q, k, v = project("query", query), project("key", key, group), project("value", value, group)
    if shape.score == "additive":
        hidden = xp.tanh(q[:, :, :, None] + k[:, :, None])
        logits = (hidden * leaf["weights.score"][:, None, None]).sum(-1)
    else:
        logits = xp.matmul(q, xp.swapaxes(k, 2, 3))
    logits = logits * scale
    if "attn_bias" in leaf:
        logits = logits + leaf["attn_bias"]
    # Blocked logits are replaced before exp: a derivative of exp(-inf - -inf) is NaN in both.
    peak = xp.amax(xp.where(allowed, logits, xp.full_like(logits, -math.inf)), -1)[..., None]
    peak = constant(xp.where(peak > -math.inf, peak, xp.zeros_like(peak)))
    nothing = xp.zeros_like(logits)
    powers = xp.where(allowed, xp.exp(xp.where(allowed, logits - peak, nothing)), nothing)
    total = powers.sum(-1)[..., None]
    weights = powers / xp.where(total > 0, total, xp.ones_like(total))
    output = xp.einsum("bhqd,hde->bqe", xp.matmul(weights, v), leaf["weights.output"])
    return (output + leaf["weights.output_bias"] if shape.bias else output), weights


def by_torch(problem: Problem, dtype: str | None = None) -> dict[str, np.ndarray]:
    """Output, weights and every gradient, by torch's autodiff in the problem's dtype."""
    import torch

    kind = getattr(torch, dtype or problem.dtype)
    leaf = {
        name: torch.tensor(array).to(kind).requires_grad_()
        for name, array in leaves(problem).items()
    }
    allowed = torch.tensor(visible(problem))
    output, weights = in_framework(
        torch, torch.Tensor.detach, problem.shape, scale_of(problem), leaf, allowed
    )
    cotangent = torch.tensor(problem.cotangent).to(kind)
    gradients = torch.autograd.grad(output, list(leaf.values()), cotangent, allow_unused=True)
    found = {"output": output, "weights": weights}
    for (name, array), gradient in zip(leaf.items(), gradients, strict=True):
        found[f"gradient.{name}"] = torch.zeros_like(array) if gradient is None else gradient
    return {name: array.detach().double().numpy() for name, array in found.items()}
