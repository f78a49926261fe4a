"""Mistakes in the derivative only: the output is right."""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.definition.dtypes import BFLOAT16
from mutants.attention import Array, Attention
from mutants.mutant import BIAS, INPUTS, MODES, PARAMETERS, SPELLINGS, Mutant, chapter

MUTANTS: list[Mutant] = []
_add = chapter("backward", MUTANTS)

LONG = "plain/no-mask/long"
GQA = "plain/no-mask/gqa"
BIASED = "bias/in-full/cross"
SEPARATE = "plain/no-mask/one-key"


def _of(wanted: str, change: Any) -> Any:
    """One gradient, changed."""
    return lambda a, name, array: a.stored(change(array) if name == wanted else array)


def _turned(array: Array) -> Array:
    """The matrix of the first axis by the others, transposed where that fits."""
    matrix = array.reshape(array.shape[0], -1)
    if matrix.shape[0] != matrix.shape[1]:
        matrix = array.reshape(-1, array.shape[-1])
    return matrix.T.reshape(array.shape) if matrix.shape[0] == matrix.shape[1] else array


ADDITIVE = "plain/no-mask/additive"

_GRADIENTS = (
    # name, requirement, case in which it tells, whether it has a transposition
    ("query", INPUTS, "plain/no-mask/cross", False),
    ("key", INPUTS, "plain/no-mask/cross", False),
    ("value", INPUTS, LONG, False),
    ("weights.query", PARAMETERS, "plain/no-mask/cross", True),
    ("weights.key", PARAMETERS, "plain/no-mask/cross", True),
    ("weights.value", PARAMETERS, "plain/no-mask/cross", True),
    ("weights.output", PARAMETERS, "plain/no-mask/cross", True),
    ("weights.query_bias", PARAMETERS, "plain/no-mask/cross", False),
    # In a dot product it is 0 by definition.
    ("weights.key_bias", PARAMETERS, ADDITIVE, False),
    ("weights.value_bias", PARAMETERS, "plain/no-mask/cross", False),
    ("weights.output_bias", PARAMETERS, "plain/no-mask/cross", False),
    ("weights.score", PARAMETERS, ADDITIVE, False),
    ("mask.bias", BIAS, BIASED, False),
)

for _name, _requirement, _case, _turns in _GRADIENTS:
    _told = _name.removeprefix("weights.").removeprefix("mask.").replace("_", "-")
    _what = f"{_told}-weight" if _turns else _told if _name != "mask.bias" else "attention-bias"
    _what = {"score": "score-weight"}.get(_what, _what)
    _said = _what.replace("-", " ")
    _add(
        f"gradient-of-{_what}-missing",
        f"detaches the {_said}: its gradient is 0",
        _requirement,
        gradient=_of(_name, lambda array: 0 * array),
        case=_case,
    )
    _add(
        f"gradient-of-{_what}-doubled",
        f"adds up the gradient of the {_said} twice",
        _requirement,
        gradient=_of(_name, lambda array: 2 * array),
        case=_case,
    )
    if _turns:
        _add(
            f"gradient-of-{_what}-transposed",
            f"transposes the gradient of the {_said}",
            _requirement,
            gradient=_of(_name, _turned),
            case=_case,
        )
    if _requirement != INPUTS and not _turns and _name != "mask.bias":
        _add(
            f"gradient-of-{_what}-averaged",
            f"averages over the batch instead of summing for the gradient of the {_said}",
            _requirement,
            gradient=lambda a, name, array, wanted=_name: a.stored(
                array / a.wide(a.batch) if name == wanted else array
            ),
            case=_case,
        )

# The scale and the softmax.

_add(
    "gradient-without-scale",
    "forgets the scale in the backward pass",
    INPUTS,
    d_scaled=lambda a, d_logits: d_logits,
)
_add(
    "gradient-scaled-twice",
    "scales the gradient of the logits twice",
    INPUTS,
    d_scaled=lambda a, d_logits: d_logits * a.wide(a.factor() ** 2),
)
_add(
    "gradient-with-default-scale",
    "ignores a custom scale in the backward pass",
    INPUTS,
    d_scaled=lambda a, d: d * a.wide(a.default_factor() if a.given.scale else a.factor()),
    case="plain/custom-scale/cross",
)
_add(
    "softmax-detached",
    "treats the weights as constants",
    INPUTS,
    d_softmax=lambda a, weights, d_weights: 0 * d_weights,
)
_add(
    "softmax-without-row-term",
    "omits the sum in the derivative of the softmax",
    INPUTS,
    row=lambda a, weights, d_weights: a.wide(0),
)
_add(
    "row-term-of-first-query",
    "uses the row term of the first query for all",
    INPUTS,
    row=lambda a, w, d: Attention.row(a, w, d)[:, :, :1],
)
_add(
    "row-term-of-weights-squared",
    "uses Σ P² instead of Σ P dP as the row term",
    INPUTS,
    row=lambda a, weights, d_weights: (weights * weights).sum(axis=-1, keepdims=True),
)
_add(
    "softmax-straight-through",
    "uses the identity as the derivative of the softmax",
    INPUTS,
    d_softmax=lambda a, weights, d_weights: d_weights - a.row(weights, d_weights),
)
_add(
    "gradient-of-stale-keys",
    "recomputes the weights with the keys of the other half, as a ring that is one step late",
    INPUTS,
    weights_again=lambda a: Attention.softmax(
        a, a.scaled(a.score(a.q, np.roll(a.all_k, a.keys // 2, axis=2)))
    ),
    case="plain/no-mask/cross",
)
_add(
    "gradient-leaks-past-saved-normaliser",
    "recomputes the weights without the mask, from the logarithm of the normaliser with it",
    INPUTS,
    weights_again=lambda a: np.exp(
        a.biased(a.scaled(a.scores)) - np.logaddexp.reduce(a.logits, axis=-1, keepdims=True)
    ),
    case="mask/shared/cross",
)
_add(
    "gradient-leaks-through-mask",
    "recomputes the weights without the mask",
    INPUTS,
    PARAMETERS,
    weights_again=lambda a: Attention.softmax(a, a.biased(a.scaled(a.scores))),
    case="mask/shared/cross",
)
_add(
    "gradient-without-bias",
    "recomputes the weights without the bias",
    INPUTS,
    weights_again=lambda a: Attention.softmax(a, a.hide(a.scaled(a.scores))),
    case=BIASED,
)
_add(
    "gradient-of-blocked-bias",
    "gives a gradient to what was added to a blocked logit",
    BIAS,
    d_added=lambda a, d, shape: Attention.d_added(a, d + (a.logits == -np.inf), shape),
    case="bias/with-mask/cross",
)
_add(
    "gradient-of-bias-not-summed",
    "uses the gradient of the first batch entry for a bias that all entries share",
    BIAS,
    d_added=lambda a, d, shape: (
        np.broadcast_to(d[:1], d.shape) if shape[0] == a.batch else d[:1].sum(axis=1, keepdims=True)
    ),
    case="bias/shared/cross",
)
_add(
    "gradient-of-bias-scaled",
    "multiplies the gradient of the bias with the scale",
    BIAS,
    d_added=lambda a, d, shape: Attention.d_added(a, d * a.wide(a.factor()), shape),
    case=BIASED,
)
_add(
    "gradient-of-infinite-bias-is-nan",
    "computes 0 · ∞ where the bias is −∞",
    BIAS,
    SPELLINGS,
    d_added=lambda a, d, shape: Attention.d_added(
        a, np.where(a.biased(a.scaled(a.scores)) == -np.inf, a.wide(np.nan), d), shape
    ),
    case="bias/with-mask/cross",
)

# Heads, groups, shared inputs.

_add(
    "grouped-gradient-of-first-head",
    "uses the key gradient of the first query head of each group",
    INPUTS,
    gather=lambda a, g: g[:, :: a.group],
    case=GQA,
)
_add(
    "grouped-gradient-averaged",
    "computes the mean over a group instead of the sum",
    INPUTS,
    gather=lambda a, g: Attention.gather(a, g) / a.wide(a.group),
    case=GQA,
)
_add(
    "grouped-gradient-tiled",
    "sums over heads as if they had been tiled",
    INPUTS,
    gather=lambda a, g: g.reshape(g.shape[0], a.group, -1, *g.shape[2:]).sum(axis=1),
    case=GQA,
)
_add(
    "grouped-value-gradient-of-last-head",
    "overwrites the value gradient of a group instead of adding to it",
    INPUTS,
    gather_values=lambda a, g: g[:, a.group - 1 :: a.group],
    case=GQA,
)


def _joined(dropped: str, into: str) -> Any:
    def joined(a: Attention, found: dict[str, Array]) -> dict[str, Array]:
        if a.shape.sharing != "separate":
            found[dropped] = 0 * found[dropped]
        return Attention.joined(a, found)

    return joined


_add(
    "memory-gradient-without-values",
    "overwrites the values' gradient of a memory with the keys'",
    INPUTS,
    joined=_joined("value", "key"),
)
_add(
    "self-gradient-without-keys",
    "ignores that the input of the query is also that of the keys",
    INPUTS,
    joined=_joined("key", "query"),
    case="plain/no-mask/self",
)
_add(
    "key-gradient-from-keys",
    "multiplies the gradient of the logits by the keys to get the gradient of the keys",
    INPUTS,
    d_score=lambda a, d, found: (
        (Attention.d_score(a, d, found)[0], np.matmul(d.swapaxes(-1, -2), d @ a.all_k))
        if "score" not in a.own
        else Attention.d_score(a, d, found)
    ),
)
_add(
    "tanh-slope",
    "uses 1 − tanh as the derivative of tanh",
    INPUTS,
    d_tanh=lambda a, hidden: 1 - hidden,
    case=ADDITIVE,
)

# The cotangent, and numbers.

_add(
    "cotangent-ignored",
    "differentiates the sum of the output and ignores the incoming gradient",
    INPUTS,
    received=lambda a, cotangent: np.ones_like(a.read(cotangent)),
)
_add(
    "cotangent-of-first-entry",
    "broadcasts the cotangent of the first batch entry",
    INPUTS,
    received=lambda a, c: np.broadcast_to(a.read(c)[:1], c.shape),
)
_add(
    "gradient-cut",
    "cuts gradients at ±1",
    INPUTS,
    gradient=lambda a, name, array: a.stored(np.clip(array, -1, 1)),
)
_add(
    "gradient-in-bfloat16",
    "rounds gradients to bfloat16",
    INPUTS,
    gradient=lambda a, name, array: a.stored(BFLOAT16.round(array).astype(a.wide)),
)
_add(
    "gradient-of-last-query-dropped",
    "omits one query in the sum for the gradient of the keys",
    INPUTS,
    d_score=lambda a, d, found: (
        Attention.d_score(a, d, found)[0],
        Attention.d_score(a, d * (np.arange(a.queries) < a.queries - 1)[:, None], found)[1],
    ),
)
_add(
    "fused-gradient-without-maximum",
    "stores the logarithm of the normaliser without the maximum",
    INPUTS,
    MODES,
    weights_again=lambda a: np.exp(a.logits - a.log_total) if a.weights is None else a.weights,
)
_add(
    "fused-gradient-of-first-tile",
    "processes only the first tile in the backward pass",
    INPUTS,
    MODES,
    d_scaled=lambda a, d: Attention.d_scaled(a, d * (np.arange(a.keys) < a.tile)),
    case=LONG,
)


def _in_last_tile(a: Attention) -> Array:
    return np.arange(a.queries)[:, None] >= (a.queries - 1) // 8 * 8


_add(
    "query-gradient-of-last-tile",
    "overwrites the gradient of the query with what each tile of 8 keys adds",
    INPUTS,
    d_score=lambda a, d, found: (
        Attention.d_score(a, d * (np.arange(a.keys) >= (a.keys - 1) // 8 * 8), {})[0],
        Attention.d_score(a, d, found)[1],
    ),
    case=LONG,
)
_add(
    "value-gradient-of-last-tile",
    "overwrites the gradient of the values with what each tile of 8 queries adds",
    INPUTS,
    gather_values=lambda a, gradient: Attention.gather_values(
        a, a.product("bhqk,bhqd->bhkd", a.weights_again() * a.kept * _in_last_tile(a), a.d_context)
    ),
    case=LONG,
)
_add(
    "key-gradient-of-last-tile",
    "overwrites the gradient of the keys with what each tile of 8 queries adds",
    INPUTS,
    d_score=lambda a, d, found: (
        Attention.d_score(a, d, found)[0],
        Attention.d_score(a, d * _in_last_tile(a), {})[1],
    ),
    case=LONG,
)
_add(
    "fused-row-term-of-output",
    "computes the row term from the context before its division by the normaliser",
    INPUTS,
    MODES,
    row=lambda a, weights, d: (
        Attention.row(a, weights, d) * np.exp(a.log_total)
        if a.weights is None
        else Attention.row(a, weights, d)
    ),
)


def _last_tile_only(a: Attention, d_logits: Array, shape: tuple[int, ...]) -> Array:
    if shape[2] == 1:
        d_logits = d_logits[:, :, (a.queries - 1) // a.tile * a.tile :]
        shape = (shape[0], shape[1], 1 if d_logits.shape[2] > 1 else d_logits.shape[2], shape[3])
    return Attention.d_added(a, d_logits, shape)


_add(
    "bias-gradient-of-last-tile",
    "writes the gradient of a bias for all queries once per tile, instead of adding to it",
    BIAS,
    SPELLINGS,
    d_added=_last_tile_only,
    case="bias/over-keys/tiles",
)

_add(
    "bias-gradient-of-first-head",
    "takes the gradient of a bias for each key from the first head",
    BIAS,
    SPELLINGS,
    d_added=lambda a, d, shape: Attention.d_added(
        a, d[:, :1] if shape[1:3] == (1, 1) else d, shape
    ),
    case="bias/per-key/cross",
)

# Beside a scale, wide values, packed weights, full tiles.


def _scaled_by_default_if(condition: Any) -> Any:
    return lambda a, d: (
        d * a.wide(a.default_factor() if a.given.scale is not None and condition(a) else a.factor())
    )


_add(
    "gradient-with-default-scale-beside-mask",
    "ignores a given scale in the backward pass if there is a mask",
    INPUTS,
    d_scaled=_scaled_by_default_if(lambda a: a.given.masks),
    case="scale/above-one-with-mask/gqa",
)
_add(
    "gradient-with-default-scale-beside-causal",
    "ignores a given scale in the backward pass if the flag is given",
    INPUTS,
    d_scaled=_scaled_by_default_if(lambda a: a.given.causal),
    case="scale/negative-with-causal/self",
)
_add(
    "gradient-without-sign-of-scale",
    "uses the absolute value of the scale in the backward pass",
    INPUTS,
    d_scaled=lambda a, d: d * a.wide(abs(a.factor())),
    case="scale/negative-with-causal/self",
)
_add(
    "gradient-divided-by-scale",
    "scales the gradient by the ratio of logits and scores, which is 0/0 if the scale is 0",
    INPUTS,
    d_scaled=lambda a, d: d * (a.wide(a.factor()) ** 2 / a.wide(a.factor())),
    case="scale/zero/cross",
)
_add(
    "gradient-of-values-beyond-head-size",
    "computes the gradient of values only as far as the query's heads are wide",
    INPUTS,
    gather_values=lambda a, g: (
        Attention.gather_values(a, g) * (np.arange(g.shape[-1]) < a.shape.head_size)
    ).astype(a.wide),
    case="mask/heads-only/wide-value",
)
_add(
    "fused-row-term-of-head-size",
    "sums the fused row term only as far as the query's heads are wide",
    INPUTS,
    MODES,
    row=lambda a, w, d: (
        (a.d_context * a.context)[..., : a.shape.head_size].sum(axis=-1, keepdims=True)
        if a.weights is None
        else Attention.row(a, w, d)
    ),
    case="mask/heads-only/wide-value",
)
_add(
    "gradient-of-packed-keys-missing",
    "without biases, writes the gradient of two of three packed projections",
    PARAMETERS,
    gradient=lambda a, name, array: a.stored(
        0 * array
        if name == "weights.key"
        and "key_bias" not in a.own
        and a.shape.group == 1
        and a.shape.sharing == "self"
        else array
    ),
    case="transformer/decoder-self-attention/packed",
)
_add(
    "gradient-of-last-full-tile-dropped",
    "leaves out the last 64 keys in the backward pass if they are a full tile",
    INPUTS,
    d_scaled=lambda a, d: Attention.d_scaled(
        a, d * (np.arange(a.keys) < a.keys - (64 if a.keys % 64 == 0 else 0))
    ),
    case="causal/square/full-tiles",
)
_add(
    "bias-gradient-of-first-tile-beside-causal",
    "writes the gradient of a bias for 64 keys only if the flag is given too",
    BIAS,
    d_added=lambda a, d, shape: Attention.d_added(
        a, d * ~(a.given.causal & (np.arange(a.keys) >= 64)), shape
    ),
    case="scale/one-with-bias/full-tiles",
)
_add(
    "bias-gradient-summed-over-heads-if-as-many",
    "sums the gradient of a bias `[1 heads query key]` over the heads if entries are as many",
    SPELLINGS,
    BIAS,
    d_added=lambda a, d, shape: (
        d.sum(axis=1)[None]
        if a.batch == a.shape.heads == shape[1] and shape[0] == 1
        else Attention.d_added(a, d, shape)
    ),
    case="bias/per-head-with-mask/square",
)
