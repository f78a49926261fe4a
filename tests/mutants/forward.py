"""Mistakes in projections, heads, scale and scores."""

from __future__ import annotations

from typing import Any

import numpy as np

from mutants.attention import Array, Attention
from mutants.mutant import BATCH, MADE, OUTPUT, SPELLINGS, Mutant, chapter

MUTANTS: list[Mutant] = []
_add = chapter("forward", MUTANTS)


# The scale.

_add(
    "scale-by-head-size",
    "divides the logits by d instead of √d",
    OUTPUT,
    default_factor=lambda a: 1 / a.shape.head_size,
)
_add(
    "scale-by-width",
    "divides the logits by the width of the model",
    OUTPUT,
    default_factor=lambda a: 1 / a.shape.query_width,
)
_add(
    "scale-by-root-of-width",
    "divides the logits by the root of the model's width",
    OUTPUT,
    default_factor=lambda a: a.shape.query_width**-0.5,
)
_add(
    "scale-by-value-head-size",
    "uses the size of the value heads as d",
    OUTPUT,
    default_factor=lambda a: a.shape.value_head_size**-0.5,
    case="mask/key-padding/value-head",
)
_add("scale-missing", "forgets the scale", OUTPUT, default_factor=lambda a: 1.0)
_add(
    "scale-twice",
    "scales the query, and the logits again",
    OUTPUT,
    scaled=lambda a, scores: scores * a.wide(a.factor() ** 2),
)
_add(
    "scale-one-percent-off",
    "uses a rounded 1/√d from a table",
    OUTPUT,
    default_factor=lambda a: 1.01 * a.shape.head_size**-0.5,
)
_add(
    "custom-scale-ignored",
    "always uses 1/√d",
    OUTPUT,
    factor=lambda a: 1.0 if "score" in a.own else a.default_factor(),
    case="plain/custom-scale/cross",
)
_add(
    "custom-scale-on-top",
    "multiplies a custom scale by 1/√d",
    OUTPUT,
    factor=lambda a: Attention.factor(a) * (a.default_factor() if a.given.scale else 1.0),
    case="plain/custom-scale/cross",
)
_add(
    "custom-scale-inverted",
    "divides by a custom scale",
    OUTPUT,
    factor=lambda a: 1 / a.given.scale if a.given.scale else Attention.factor(a),
    case="plain/custom-scale/cross",
)
_add(
    "scale-on-additive-score",
    "divides the additive score by √d",
    OUTPUT,
    factor=lambda a: Attention.factor(a) * (a.default_factor() if "score" in a.own else 1.0),
    case="plain/no-mask/additive",
)
_add(
    "scale-on-bias",
    "scales the logits after the bias was added",
    OUTPUT,
    bias=lambda a, bias: bias * a.wide(a.factor()),
    case="bias/in-full/cross",
)
_add(
    "scale-on-number-mask",
    "scales the logits after a mask of numbers was added",
    OUTPUT,
    SPELLINGS,
    biased=lambda a, logits: Attention.biased(a, logits / a.wide(a.factor())) * a.wide(a.factor()),
    case="bias/in-full/cross",
)
_add(
    "scale-before-query-bias",
    "scales the query before its bias is added",
    OUTPUT,
    shifted=lambda a, name, projected: (
        projected + a.own["query_bias"] / a.wide(a.factor())
        if name == "query" and "query_bias" in a.own
        else Attention.shifted(a, name, projected)
    ),
)

# A scale of the caller's own, beside everything else.


def _default_if(condition: Any) -> Any:
    """Uses 1/√d where this holds, whatever scale was given."""

    def factor(a: Attention) -> float:
        given = Attention.factor(a)
        default = 1.0 if "score" in a.own else a.default_factor()
        return default if a.given.scale is not None and condition(a) else given

    return factor


def _of_scale(change: Any) -> Any:
    """Changes a scale that was given."""
    return lambda a: Attention.factor(a) if a.given.scale is None else float(change(a.given.scale))


ZERO, NEGATIVE = "scale/zero/cross", "scale/negative-with-causal/self"
ABOVE_ONE, BESIDE_BIAS = "scale/above-one-with-mask/gqa", "scale/one-with-bias/full-tiles"

_add(
    "scale-of-0-is-the-default",
    "writes `scale or 1/√d`, so that a scale of 0 is not one",
    OUTPUT,
    factor=_default_if(lambda a: a.given.scale == 0),
    case=ZERO,
)
_add(
    "scale-of-1-is-the-default",
    "uses a scale of 1 to say that none was given",
    OUTPUT,
    factor=_default_if(lambda a: a.given.scale == 1),
    case=BESIDE_BIAS,
)
_add(
    "scale-not-positive-is-the-default",
    "uses a given scale only if it is positive",
    OUTPUT,
    factor=_default_if(lambda a: a.given.scale <= 0),
    case=NEGATIVE,
)
_add(
    "scale-without-sign",
    "multiplies query and key with the root of the scale's absolute value",
    OUTPUT,
    factor=_of_scale(abs),
    case=NEGATIVE,
)
_add(
    "scale-at-most-1",
    "limits the scale to 1",
    OUTPUT,
    factor=_of_scale(lambda scale: min(scale, 1.0)),
    case=ABOVE_ONE,
)
_add(
    "scale-at-least-0",
    "limits the scale to numbers above 0",
    OUTPUT,
    factor=_of_scale(lambda scale: max(scale, 0.0)),
    case=NEGATIVE,
)
_add(
    "scale-ignored-with-causal",
    "does not pass a scale on to its causal kernel",
    OUTPUT,
    factor=_default_if(lambda a: a.given.causal),
    case=NEGATIVE,
)
_add(
    "scale-ignored-with-mask",
    "does not pass a scale on to its kernel with masks",
    OUTPUT,
    factor=_default_if(lambda a: "mask" in a.given.masks),
    case=ABOVE_ONE,
)
_add(
    "scale-ignored-with-padding",
    "does not pass a scale on to its kernel for ragged batches",
    OUTPUT,
    factor=_default_if(lambda a: "padding" in a.given.masks),
    case=ZERO,
)
_add(
    "scale-ignored-with-bias",
    "does not pass a scale on to its kernel with a bias",
    OUTPUT,
    factor=_default_if(lambda a: "bias" in a.given.masks),
    case=BESIDE_BIAS,
)
_add(
    "scale-ignored-for-grouped-heads",
    "does not pass a scale on where heads are grouped",
    OUTPUT,
    factor=_default_if(lambda a: a.group > 1),
    case=ABOVE_ONE,
)
_add(
    "custom-scale-on-bias",
    "divides the bias by 1/√d and scales it with the logits, which cancels for that scale only",
    OUTPUT,
    bias=lambda a, bias: (
        bias * a.wide(a.factor() / a.default_factor()) if "score" not in a.own else bias
    ),
    case=BESIDE_BIAS,
)
_add(
    "maximum-before-scale",
    "scales the maximum of the scores, which is the minimum if the scale is negative",
    OUTPUT,
    peak=lambda a, logits: (
        Attention.peak(a, logits)
        if a.factor() > 0
        else logits.min(axis=-1, keepdims=True, initial=np.inf, where=np.isfinite(logits)).clip(
            -1e30, 1e30
        )
    ),
    case=NEGATIVE,
)
_add(
    "blocked-before-scale",
    "blocks with −∞ before it scales, so that a negative scale turns the mask round",
    OUTPUT,
    hide=lambda a, logits: np.where(
        np.isneginf(Attention.hide(a, logits)),
        a.wide(-np.inf) * a.wide(a.factor()),
        Attention.hide(a, logits),
    ),
    case=NEGATIVE,
)
_add(
    "scale-of-0-skips-the-mask",
    "takes the mean of all values if the scale is 0",
    OUTPUT,
    hide=lambda a, logits: logits if a.factor() == 0 else Attention.hide(a, logits),
    case=ZERO,
)

# The softmax's axis.


def _softmax_over(axis: int | tuple[int, ...]) -> Any:
    def softmax(a: Attention, logits: Array) -> Array:
        peak = logits.max(axis=axis, keepdims=True)
        powers = np.exp(logits - np.where(np.isfinite(peak), peak, 0))
        total = powers.sum(axis=axis, keepdims=True)
        return powers / np.where(total > 0, total, 1)

    return softmax


_add("softmax-over-queries", "takes the softmax over dim=2", OUTPUT, softmax=_softmax_over(2))
_add("softmax-over-heads", "takes the softmax over dim=1", OUTPUT, softmax=_softmax_over(1))
_add("softmax-over-batch", "takes the softmax over dim=0", OUTPUT, softmax=_softmax_over(0))
_add(
    "softmax-over-matrix",
    "takes the softmax over queries and keys together",
    OUTPUT,
    softmax=_softmax_over((2, 3)),
)
_add(
    "sigmoid",
    "applies a sigmoid to each logit instead of a softmax",
    OUTPUT,
    softmax=lambda a, logits: 1 / (1 + np.exp(-logits)),
)
_add(
    "softmax-twice",
    "takes the softmax of the weights once more, which the library did already",
    OUTPUT,
    softmax=lambda a, logits: Attention.softmax(
        a, np.where(logits > -np.inf, Attention.softmax(a, logits), logits)
    ),
)
_add(
    "softmax-not-divided",
    "forgets the last division of a running softmax",
    OUTPUT,
    normalised=lambda a, powers, total: powers,
)

# Heads.


def _interleaved(a: Attention, projected: Array, name: str) -> Array:
    batch, length, heads, size = projected.shape
    return projected.reshape(batch, length, size, heads).transpose(0, 3, 1, 2)


def _untransposed(a: Attention, projected: Array, name: str) -> Array:
    batch, length, heads, size = projected.shape
    return projected.reshape(batch, heads, length, size)


_add(
    "heads-interleaved",
    "splits as `(head heads)` instead of `(heads head)`",
    OUTPUT,
    split=_interleaved,
)
_add(
    "heads-split-by-view",
    "reshapes to `[batch heads length head]` instead of transposing",
    OUTPUT,
    split=_untransposed,
)
_add(
    "key-heads-interleaved",
    "splits only the key as `(head heads)`",
    OUTPUT,
    split=lambda a, x, name: (_interleaved if name == "key" else Attention.split)(a, x, name),
)
_add(
    "heads-not-transposed-back",
    "reshapes the context without transposing it back",
    OUTPUT,
    merge=lambda a, context: context.reshape(a.batch, a.queries, *context.shape[1::2]),
)
_add(
    "output-written-sequence-first",
    "writes the context by the strides of [length batch heads head]",
    OUTPUT,
    merge=lambda a, context: context.transpose(2, 0, 1, 3).reshape(
        a.batch, a.queries, *context.shape[1::2]
    ),
)
_add(
    "heads-reversed",
    "merges the heads in reverse order",
    OUTPUT,
    merge=lambda a, context: Attention.merge(a, context)[:, :, ::-1],
)
_add(
    "last-head-dropped",
    "loops over one head too few",
    OUTPUT,
    merge=lambda a, context: (
        Attention.merge(a, context) * (np.arange(a.shape.heads) < a.shape.heads - 1)[:, None]
    ).astype(a.wide),
)
_add(
    "first-head-for-all",
    "uses the keys of the first head for every head",
    OUTPUT,
    score=lambda a, q, k: Attention.score(a, q, np.broadcast_to(k[:, :1], k.shape)),
)
_add(
    "grouped-tiled",
    "tiles the key/value heads instead of repeating each",
    OUTPUT,
    repeat=lambda a, heads: np.tile(heads, (1, a.group, 1, 1)),
    case="plain/no-mask/gqa",
)
_add(
    "grouped-merged-by-group",
    "merges query heads as (group heads), the heads being those of keys",
    OUTPUT,
    merge=lambda a, context: Attention.merge(
        a, context[:, np.arange(a.shape.heads).reshape(-1, a.group).T.ravel()]
    ),
    case="plain/no-mask/gqa",
)
_add(
    "grouped-split-by-group",
    "splits query heads as (group heads), the heads being those of keys, and merges them otherwise",
    OUTPUT,
    repeat=lambda a, heads: np.tile(heads, (1, a.group, 1, 1)),
    merge=lambda a, context: Attention.merge(
        a, context[:, np.arange(a.shape.heads).reshape(a.group, -1).T.ravel()]
    ),
    case="plain/no-mask/gqa",
)
_add(
    "grouped-values-tiled",
    "repeats the key heads and tiles the value heads",
    OUTPUT,
    repeat=lambda a, x: np.tile(x, (1, a.group, 1, 1)) if x is a.v else Attention.repeat(a, x),
    case="plain/no-mask/gqa",
)
_add(
    "grouped-first-head",
    "gives every query head the first key/value head",
    OUTPUT,
    repeat=lambda a, heads: np.repeat(heads[:, :1], a.shape.heads, axis=1),
    case="plain/no-mask/gqa",
)
_add(
    "key-heads-reversed",
    "takes the key heads in reverse order",
    OUTPUT,
    repeat=lambda a, x: Attention.repeat(a, x[:, ::-1] if x is a.k else x),
)
_add(
    "value-heads-reversed",
    "takes the value heads in reverse order",
    OUTPUT,
    repeat=lambda a, x: Attention.repeat(a, x[:, ::-1] if x is a.v else x),
)
_add(
    "key-and-value-heads-reversed",
    "takes the key and value heads in reverse order",
    OUTPUT,
    repeat=lambda a, x: Attention.repeat(a, x[:, ::-1] if x is a.k or x is a.v else x),
    case="plain/no-mask/gqa",
)

# Weights and biases.


def _projected_as(roles: dict[str, str]) -> Any:
    def project(a: Attention, name: str, values: Array) -> Array:
        other = roles.get(name, name)
        fits = a.own[other].shape == a.own[name].shape
        return Attention.project(a, other if fits else name, values)

    return project


def _transposed(weight: Array, rows: int) -> Array:
    """The matrix of the first axes by the others, transposed where that fits."""
    matrix = weight.reshape(int(np.prod(weight.shape[:rows])), -1)
    return matrix.T.reshape(weight.shape) if matrix.shape[0] == matrix.shape[1] else weight


_add(
    "query-and-key-swapped",
    "unpacks the projections as key, query, value",
    OUTPUT,
    project=_projected_as({"query": "key", "key": "query"}),
)
_add(
    "key-and-value-swapped",
    "unpacks the projections as query, value, key",
    OUTPUT,
    project=_projected_as({"key": "value", "value": "key"}),
)
_add(
    "value-reads-key-input",
    "projects the value from the input of the key",
    OUTPUT,
    input=lambda a, name: a.read(
        a.given.inputs["key"]
        if name == "value" and a.shape.key_width == a.shape.value_width
        else a.given.inputs[name]
    ),
    case="plain/no-mask/long",
)
_add(
    "query-weight-transposed",
    "multiplies by the transposed weight of the query",
    OUTPUT,
    weight=lambda a, name: _transposed(a.own[name], 1) if name == "query" else a.own[name],
)
_add(
    "output-weight-transposed",
    "multiplies by the transposed weight of the output",
    OUTPUT,
    weight=lambda a, name: _transposed(a.own[name], 2) if name == "output" else a.own[name],
)
_add(
    "value-not-projected",
    "splits the value into heads without projecting it",
    OUTPUT,
    project=lambda a, name, x: (
        x.reshape(*x.shape[:2], *a.own[name].shape[1:])
        if name == "value" and a.own[name].shape[0] == a.own[name][0].size
        else Attention.project(a, name, x)
    ),
)


def _forgets(which: str) -> Any:
    return lambda a, name, x: x if name == which else Attention.shifted(a, name, x)


def _twice(which: str) -> Any:
    def shifted(a: Attention, name: str, projected: Array) -> Array:
        once = Attention.shifted(a, name, projected)
        return Attention.shifted(a, name, once) if name == which else once

    return shifted


for _name, _case in (
    ("query", "plain/no-mask/cross"),
    # In a dot product the key's bias adds a constant to each row, which no softmax sees.
    ("key", "plain/no-mask/additive"),
    ("value", "plain/no-mask/cross"),
):
    _add(
        f"{_name}-bias-forgotten",
        f"forgets the bias of the {_name}",
        OUTPUT,
        shifted=_forgets(_name),
        case=_case,
    )
    _add(
        f"{_name}-bias-twice",
        f"adds the bias of the {_name} twice",
        OUTPUT,
        shifted=_twice(_name),
        case=_case,
    )


def _output_bias(times: float) -> Any:
    def finish(a: Attention, merged: Array) -> Array:
        output = Attention.finish(a, merged)
        bias = a.own.get("output_bias")
        factor = a.wide(a.shape.heads if times < 0 else times)
        return output if bias is None else output + (factor - 1) * bias

    return finish


def _bias_first(a: Attention, merged: Array) -> Array:
    bias = a.own.get("output_bias")
    if bias is None or bias.size != merged[0, 0].size:
        return Attention.finish(a, merged)
    early = merged + bias.reshape(merged.shape[2:])
    return a.product("bqhd,hde->bqe", early, a.own["output"])


_add("output-bias-forgotten", "forgets the bias of the output", OUTPUT, finish=_output_bias(0))
_add("output-bias-twice", "adds the bias of the output twice", OUTPUT, finish=_output_bias(2))
_add("output-bias-per-head", "adds the output's bias per head", OUTPUT, finish=_output_bias(-1))
_add("output-bias-before-projection", "adds the bias before projecting", OUTPUT, finish=_bias_first)
_add(
    "bias-of-first-head",
    "broadcasts the first head's bias over all heads",
    OUTPUT,
    shifted=lambda a, name, x: x + a.own[f"{name}_bias"][:1] if f"{name}_bias" in a.own else x,
)
_add(
    "residual-added",
    "adds the query to the output, as the block around it does",
    OUTPUT,
    MADE,
    finish=lambda a, merged: (
        Attention.finish(a, merged) + a.input("query")
        if a.shape.query_width == a.shape.output_width
        else Attention.finish(a, merged)
    ),
)
_add(
    "output-weight-read-as-packed",
    "reads the output's weight as if it were transposed, where there are no biases and it is wider "
    "or narrower than the input",
    OUTPUT,
    finish=lambda a, merged: (
        Attention.finish(a, merged)
        if "output_bias" in a.own or a.shape.query_width == a.shape.output_width
        else merged.reshape(*merged.shape[:2], -1)
        @ a.own["output"].reshape(a.shape.output_width, -1).T
    ),
)

# The additive score.


def _additive(change: Any) -> Any:
    def score(a: Attention, q: Array, k: Array) -> Array:
        return change(a, q, k) if "score" in a.own else Attention.score(a, q, k)

    return score


def _summed(a: Attention, q: Array, k: Array) -> Array:
    a.hidden = q[:, :, :, None] + k[:, :, None]
    return a.product("bhqkd,hd->bhqk", a.hidden, a.own["score"])


def _minus(a: Attention, q: Array, k: Array) -> Array:
    return Attention.score(a, q, -k)


def _first_score(a: Attention, q: Array, k: Array) -> Array:
    Attention.score(a, q, k)
    return a.product("bhqkd,d->bhqk", a.hidden, a.own["score"][0])


_add(
    "tanh-missing",
    "forgets the tanh of the additive score",
    OUTPUT,
    score=_additive(_summed),
    case="plain/no-mask/additive",
)
_add(
    "score-of-difference",
    "takes tanh(q − k)",
    OUTPUT,
    score=_additive(_minus),
    case="plain/no-mask/additive",
)
_add(
    "score-weight-of-first-head",
    "uses the score weight of the first head for all heads",
    OUTPUT,
    score=_additive(_first_score),
    case="plain/no-mask/additive",
)

# Wrong for some sizes only.


def _vectorised(a: Attention, q: Array, k: Array) -> Array:
    even = q.shape[-1] // 2 * 2 or 1
    return (
        Attention.score(a, q[..., :even], k[..., :even])
        if "score" not in a.own
        else (Attention.score(a, q, k))
    )


def _only_keys(a: Attention, logits: Array, wanted: Array) -> Array:
    return np.where(wanted, Attention.hide(a, logits), a.wide(-np.inf))


_add(
    "odd-head-size",
    "processes components in pairs, and omits the last one of an odd head size",
    OUTPUT,
    score=_vectorised,
)
_add(
    "odd-number-of-keys",
    "processes keys in pairs, and omits the last one of an odd number",
    OUTPUT,
    hide=lambda a, logits: _only_keys(a, logits, np.arange(a.keys) < max(a.keys // 2 * 2, 1)),
    case="plain/no-mask/self",
)
_add(
    "keys-beyond-queries",
    "loops over as many keys as there are queries",
    OUTPUT,
    hide=lambda a, logits: _only_keys(a, logits, np.arange(a.keys) < max(a.queries, 1)),
)
_add(
    "keys-beyond-128",
    "has room for only 128 keys",
    OUTPUT,
    hide=lambda a, logits: _only_keys(a, logits, np.arange(a.keys) < 128),
    case="plain/no-mask/long",
)
_add(
    "keys-of-first-entry",
    "gives every batch entry the keys of the first",
    OUTPUT,
    BATCH,
    score=lambda a, q, k: Attention.score(a, q, np.broadcast_to(k[:1], k.shape)),
)
_add(
    "one-query-path",
    "has a separate path for a single query, without the scale",
    OUTPUT,
    default_factor=lambda a: 1.0 if a.queries == 1 else Attention.default_factor(a),
    case="plain/no-mask/one-query",
)


def _bias_over_tokens(a: Attention, name: str, projected: Array) -> Array:
    bias = a.own.get(f"{name}_bias")
    if bias is None or bias.shape[1] != 1 or projected.shape[1] != bias.shape[0]:
        return Attention.shifted(a, name, projected)
    return projected + bias[:, :, None]


_add(
    "bias-over-tokens-for-heads-of-1",
    "squeezes the bias of heads of size 1, so that it can be added along the tokens",
    OUTPUT,
    shifted=_bias_over_tokens,
    case="plain/no-mask/size-one",
)

# Without biases, and with one matrix for three projections.


def _packed(a: Attention) -> bool:
    """Self-attention without biases, with an even number of heads: one matrix product."""
    shape = a.shape
    return (
        "query_bias" not in a.own
        and shape.sharing == "self"
        and shape.heads == shape.kv_heads
        and shape.heads % 2 == 0
    )


PACKED = "transformer/decoder-self-attention/packed"
_add(
    "packed-split-by-head",
    "without biases, splits the packed product as `heads 3 head` instead of `3 heads head`",
    OUTPUT,
    project=lambda a, name, x: (
        Attention.project(a, name, x)
        if not _packed(a)
        else a.product(
            "ble,eshd->blshd",
            x,
            np.stack([a.own[n] for n in ("query", "key", "value")], 1),
        ).reshape(*x.shape[:2], a.shape.heads, 3, -1)[
            :, :, :, ("query", "key", "value").index(name)
        ]
    ),
    case=PACKED,
)
_add(
    "packed-without-scale",
    "without biases, takes a packed path that forgets the scale",
    OUTPUT,
    default_factor=lambda a: 1.0 if _packed(a) else Attention.default_factor(a),
    case=PACKED,
)
_add(
    "packed-key-and-value-swapped",
    "without biases, unpacks query, value, key",
    OUTPUT,
    weight=lambda a, name: a.own[
        {"key": "value", "value": "key"}.get(name, name) if _packed(a) else name
    ],
    case=PACKED,
)
# Values of another size than keys.

WIDE = "mask/heads-only/wide-value"


def _cut(v: Array, size: int) -> Array:
    return v * (np.arange(v.shape[-1]) < size).astype(v.dtype)


_add(
    "values-beyond-head-size",
    "keeps a context as wide as the query's heads, and loses the rest of wider values",
    OUTPUT,
    heads=lambda a, name: (
        _cut(Attention.heads(a, name), a.shape.head_size)
        if name == "value"
        else Attention.heads(a, name)
    ),
    case=WIDE,
)
_add(
    "scale-by-widest-head",
    "takes the larger of both head sizes as d, since it pads the smaller",
    OUTPUT,
    default_factor=lambda a: max(a.shape.head_size, a.shape.value_head_size) ** -0.5,
    case=WIDE,
)
_add(
    "scale-by-narrowest-head",
    "takes the smaller of both head sizes as d",
    OUTPUT,
    default_factor=lambda a: min(a.shape.head_size, a.shape.value_head_size) ** -0.5,
    case="mask/key-padding/value-head",
)
_add(
    "heads-merged-by-head-size",
    "merges heads of values as if they were as wide as those of queries",
    OUTPUT,
    merge=lambda a, context: (
        np.resize(
            Attention.merge(a, context)[..., : a.shape.head_size],
            Attention.merge(a, context).shape,
        )
        if a.shape.value_head_size > a.shape.head_size
        else Attention.merge(a, context)
    ),
    case=WIDE,
)

# Sizes that coincide.

SQUARE = "mask/key-padding/square"


def _taken_for_self(a: Attention, name: str) -> Array:
    inputs = a.given.inputs
    same = inputs["query"].shape == inputs["key"].shape
    return a.read(inputs["query"] if name == "key" and same else inputs[name])


_add(
    "self-attention-by-shape",
    "takes a memory as long as the query for self-attention, and projects the query",
    OUTPUT,
    input=_taken_for_self,
    case=SQUARE,
)
_add(
    "heads-first-by-size",
    "takes `[batch length heads head]` for `[batch heads length head]` if both fit",
    OUTPUT,
    split=lambda a, x, name: x if x.shape[1] == x.shape[2] > 3 else Attention.split(a, x, name),
    case=SQUARE,
)
_add(
    "sequence-first-by-size",
    "takes the first axis for the length if it is as long as the second",
    OUTPUT,
    input=lambda a, name: (
        a.read(a.given.inputs[name]).swapaxes(0, 1)
        if a.batch == a.keys == a.queries
        else Attention.input(a, name)
    ),
    finish=lambda a, merged: (
        Attention.finish(a, merged).swapaxes(0, 1)
        if a.batch == a.keys == a.queries
        else Attention.finish(a, merged)
    ),
    case=SQUARE,
)
_add(
    "key-not-transposed-by-size",
    "multiplies with the key as it is if heads are as wide as the sequence is long",
    OUTPUT,
    score=lambda a, q, k: (
        np.matmul(q, k)
        if q.shape[-1] == k.shape[-2] and "score" not in a.own
        else Attention.score(a, q, k)
    ),
    case=SQUARE,
)

# Lengths that are multiples of a tile.

FULL = "causal/square/full-tiles"
for _tile in (16, 32, 64, 128):
    _add(
        f"last-full-tile-of-{_tile}-dropped",
        f"takes the remainder of a division by {_tile} for the length of the last tile: 0 if full",
        OUTPUT,
        hide=lambda a, logits, tile=_tile: (
            _only_keys(a, logits, np.arange(a.keys) < a.keys - tile)
            if a.keys % tile == 0 and a.keys >= tile
            else Attention.hide(a, logits)
        ),
        case=FULL,
    )
_add(
    "last-full-tile-of-queries-dropped",
    "does not store the last tile of queries if it is full",
    OUTPUT,
    merge=lambda a, context: (
        Attention.merge(a, context)
        * (np.arange(a.queries) < a.queries - (64 if a.queries % 64 == 0 else 0))[:, None, None]
    ).astype(a.wide),
    case=FULL,
)
_add(
    "length-of-a-full-tile-alone",
    "has a path for exactly one tile of 128 keys, without the scale",
    OUTPUT,
    default_factor=lambda a: 1.0 if a.keys == 128 else Attention.default_factor(a),
    case=FULL,
)
