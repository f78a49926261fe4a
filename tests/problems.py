"""Small problems with every feature of the definition, and answers that owe the reference nothing.

Each way of computing is written from the formula in `conformance.definition.problem` in another
style: scalar loops over any kind of number, matrices that may be complex, and plain operations of
torch and JAX. They take the numbers apart from the problem, as a dict of *leaves* named like
gradients, so that one of them can be perturbed or differentiated.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np

from conformance.cases import case
from conformance.definition.dtypes import dtype_of
from conformance.definition.problem import (
    Norm,
    Positions,
    Problem,
    Rotary,
    Segments,
    Shape,
    Weights,
)
from conformance.definition.rotary import RotaryAxes, RotaryScaling

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
    modern=(),
    **changes,
) -> Problem:
    """Inputs N(0, 1), weights half as wide; `mask` and `attn_bias` are shapes or arrays.

    `modern` are names in `MODERN` and `SCALED`.
    """
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
    fields = {"causal": causal}
    for name in modern:
        fields |= (MODERN | SCALED)[name](shape, np.random.default_rng(seed + 1))
    problem = Problem(
        shape=shape,
        dtype="float64",
        weights=Weights(**weights),
        cotangent=cotangent,
        mask=mask,
        attn_bias=attn_bias,
        scale=scale,
        **inputs,
        **fields,
    )
    return case.rounded(problem, dtype)


def _norm(shape, random):
    query, key = 1 + random.standard_normal((2, shape.head_size)) / 3
    return {"norm": Norm(query=query, key=key, epsilon=0.1)}


def _lengths(shape, random):
    del random
    batch = np.arange(shape.batch)
    queries, keys = np.maximum(shape.query_length - batch, 0), shape.key_length - 1 + batch % 2
    return {"query_lengths": queries, "key_lengths": keys}


def _segments(shape, random):
    """Two members, of which the second has at least the last key and query."""
    del random
    queries, keys = shape.query_length, shape.key_length
    begins = np.arange(shape.batch)[:, None] + 1
    return {
        "segments": Segments(
            query=(np.arange(queries) >= np.minimum(begins, queries - 1)).astype(np.int64) * 3,
            key=(np.arange(keys) >= np.minimum(begins + 1, keys - 1)).astype(np.int64) * 3,
        )
    }


def _spans(shape, random):
    """Keys of one id on both sides of one of none, and one of another id."""
    del random
    ids = np.resize([7, 0, 7, 7, 4], shape.key_length)
    return {"spans": np.stack([np.roll(ids, -entry) for entry in range(shape.batch)])}


def _tree(shape, random):
    """Two children of one parent, or of the cached keys."""
    del random
    parents = np.resize([-1, 0, 0, 1, 2], shape.query_length)
    return {"tree": np.stack([np.maximum(parents - entry, -1) for entry in range(shape.batch)])}


def _global_tokens(shape, random):
    """One in each entry, another one in each."""
    del random
    at = 1 + 2 * np.arange(shape.batch)[:, None]
    return {"global_tokens": 1 * (np.arange(shape.key_length) == at % shape.key_length)}


def _positions(shape, random):
    """Near 250, where bfloat16 has no consecutive integers any more, and in no order."""
    query = 250 + random.integers(0, shape.key_length, (shape.batch, shape.query_length))
    key = 248 + random.permuted(np.tile(np.arange(shape.key_length), (shape.batch, 1)), axis=1)
    return {"positions": Positions(query=query, key=key)}


def _scaled(rope_type, **numbers):
    """A rotation of all pairs with scaled frequencies; `short` and `long` are given for each."""

    def fields(shape, random):
        del random
        pairs = shape.head_size // 2
        listed = {n: v[:pairs] for n, v in numbers.items() if isinstance(v, tuple)}
        scaling = RotaryScaling(rope_type=rope_type, **{**numbers, **listed})
        return {"rotary": Rotary(size=2 * pairs, base=50.0), "rotary_scaling": scaling}

    return fields


def _axes(sections, interleaved=None, **scaling):
    """Positions on three axes for the first numbers of `sections` that there are pairs for."""

    def fields(shape, random):
        of = np.repeat(range(3), sections)[: shape.head_size // 2]
        told = scaling or {"rope_type": "default"}
        made = RotaryScaling(
            mrope_section=tuple(np.bincount(of, minlength=3).tolist()),
            mrope_interleaved=interleaved,
            **told,
        )
        rotary = Rotary(size=2 * len(of), base=50.0)
        if not made.fits(rotary.size):
            made = dataclasses.replace(made, mrope_interleaved=None)
        query, key = (
            random.integers(0, 9, (shape.batch, length, 3))
            for length in (shape.query_length, shape.key_length)
        )
        axes = RotaryAxes(query=query, key=key)
        return {"rotary": rotary, "rotary_scaling": made, "axes": axes}

    return fields


_TRAINED_ON_3 = {"factor": 4.0, "original_max_position_embeddings": 3}
SCALED = {
    "linear": _scaled("linear", factor=3.0),
    "dynamic": _scaled("dynamic", **_TRAINED_ON_3),
    "yarn": _scaled("yarn", **_TRAINED_ON_3, beta_fast=0.7, beta_slow=0.05),
    "yarn, not truncated": _scaled(
        "yarn", **_TRAINED_ON_3, beta_fast=0.7, beta_slow=0.05, truncate=False
    ),
    "yarn, mscale": _scaled("yarn", **_TRAINED_ON_3, mscale=2.0, mscale_all_dim=0.5),
    "longrope": _scaled(
        "longrope", **_TRAINED_ON_3, short_factor=(1.0, 2.0, 3.0), long_factor=(1.5, 4.0, 9.0)
    ),
    "longrope, short": _scaled(
        "longrope",
        factor=4.0,
        original_max_position_embeddings=500,
        short_factor=(1.0, 2.0, 3.0),
        long_factor=(1.5, 4.0, 9.0),
        attention_factor=1.5,
    ),
    "llama3": _scaled("llama3", **_TRAINED_ON_3, low_freq_factor=0.05, high_freq_factor=0.4),
    "mrope": _axes((1, 1, 1)),
    "mrope, interleaved": _axes((2, 1, 0), interleaved=True),
    "mrope, dynamic": _axes((1, 0, 2), rope_type="dynamic", **_TRAINED_ON_3),
}
"""Rotary embeddings with scaled frequencies or several axes, as `MODERN`."""

MODERN = {
    "norm": _norm,
    "rotary": lambda shape, _: {"rotary": Rotary(size=shape.head_size // 2 * 2, base=50.0)},
    "interleaved": lambda shape, _: {
        "rotary": Rotary(size=(shape.head_size - 1) // 2 * 2, base=50.0, pairs="interleaved")
    },
    "scaled": SCALED["yarn, not truncated"],
    "cap": lambda *_: {"soft_cap": 0.75},
    "slopes": lambda shape, random: {"slopes": random.uniform(0.1, 0.5, shape.heads)},
    "window": lambda *_: {"window": (1, 2)},
    "left window": lambda *_: {"window": (1, None)},
    "lengths": _lengths,
    "segments": _segments,
    "positions": _positions,
    "sinks": lambda shape, random: {"sinks": random.standard_normal(shape.heads)},
    "bottom-right": lambda *_: {"causal": "bottom-right"},
    "chunk": lambda *_: {"chunk": 3},
    "spans": _spans,
    "tree": _tree,
    "dilation": lambda *_: {"dilation": 2},
    "global tokens": _global_tokens,
}
"""Features of problems, as functions of a shape and a generator that return fields."""


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
WIDE = {"head_size": 5, "kv_heads": 2}
FEATURES |= {name: {"modern": (name,), **WIDE} for name in MODERN}
FEATURES |= {name: {"modern": (name,), "head_size": 7, "kv_heads": 2} for name in SCALED}
FEATURES["tree and rotary"] = {"modern": ("tree", "rotary"), **WIDE}
FEATURES["tree, more queries"] = {"modern": ("tree", "slopes"), **MORE_QUERIES, **WIDE}
FEATURES["causal spans"] = {"modern": ("spans", "bottom-right"), **WIDE}
FEATURES["global tokens of Longformer"] = {
    "modern": ("window", "dilation", "global tokens"),
    **WIDE,
}
FEATURES["global tokens in chunks"] = {
    "modern": ("chunk", "global tokens", "bottom-right"),
    **WIDE,
}
FEATURES["modern, all at once"] = {
    "modern": tuple(name for name in MODERN if name != "interleaved"),
    "attn_bias": (1, 4, 3, 5),
    "mask": (2, 1, 3, 5),
    **WIDE,
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
    if problem.attn_bias is not None:
        found["attn_bias"] = problem.attn_bias
    if problem.sinks is not None:
        found["sinks"] = problem.sinks
    if problem.norm is not None:
        found |= {"norm.query": problem.norm.query, "norm.key": problem.norm.key}
    return found


def three_inputs(leaf: dict) -> tuple:
    """Query, key and value, of which the shared ones have one leaf."""
    query = leaf["query"]
    key = leaf.get("key", query)
    return query, key, leaf.get("value", key)


def length_of(problem: Problem, side: str, entry: int) -> int:
    lengths = getattr(problem, f"{side}_lengths")
    return getattr(problem.shape, f"{side}_length") if lengths is None else int(lengths[entry])


def member(problem: Problem, side: str, entry: int, token: int) -> int:
    """The number of the sequence to which a token belongs."""
    return 0 if problem.segments is None else int(getattr(problem.segments, side)[entry, token])


def position_of(problem: Problem, side: str, entry: int, token: int) -> int:
    """Where a token stands, from the words of the definition."""
    if problem.positions is not None:
        return int(getattr(problem.positions, side)[entry, token])
    if problem.tree is not None:
        cached = length_of(problem, "key", entry) - length_of(problem, "query", entry)
        query = token if side == "query" else token - cached
        if not 0 <= query < problem.shape.query_length:
            return token
        return cached + len(line_of(problem, entry, query)) - 1
    own = member(problem, side, entry, token)
    before = sum(member(problem, side, entry, other) == own for other in range(token))
    if side == "key" or problem.causal != "bottom-right":
        return before
    queries, keys = (
        sum(
            member(problem, each, entry, other) == own
            for other in range(length_of(problem, each, entry))
        )
        for each in ("query", "key")
    )
    return before + keys - queries


def place_of(problem: Problem, side: str, entry: int, token: int, pair: int) -> int:
    """By what a pair of a token is rotated: its position, or that on the axis of the pair."""
    if problem.axes is None:
        return position_of(problem, side, entry, token)
    time, height, width = problem.rotary_scaling.mrope_section
    axis = 0 if pair < time else 1 if pair < time + height else 2
    if problem.rotary_scaling.mrope_interleaved:
        axis = pair % 3 if pair < 3 * (time, height, width)[pair % 3] else 0
    return int(getattr(problem.axes, side)[entry, token, axis])


def line_of(problem: Problem, entry: int, query: int) -> list[int]:
    """A query, its parent, the parent of that, and so on."""
    line = [query]
    while problem.tree[entry, line[-1]] >= 0:
        line.append(int(problem.tree[entry, line[-1]]))
    return line


def told_of(problem: Problem, of_keys, entry: int, query: int) -> int:
    """What is told of the key that stands where the query stands, in its sequence; 0 for none."""
    for key in range(problem.shape.key_length):
        if member(problem, "key", entry, key) == member(
            problem, "query", entry, query
        ) and position_of(problem, "key", entry, key) == position_of(
            problem, "query", entry, query
        ):
            return int(of_keys[entry, key])
    return 0


def may_attend(problem: Problem, entry: int, head: int, query: int, key: int) -> bool:
    """All rules for one pair, from the words of the definition."""
    if query >= length_of(problem, "query", entry) or key >= length_of(problem, "key", entry):
        return False
    if member(problem, "query", entry, query) != member(problem, "key", entry, key):
        return False
    stands, there = (
        position_of(problem, side, entry, token) for side, token in (("query", query), ("key", key))
    )
    if problem.causal is not None and there > stands:
        own = 0 if problem.spans is None else told_of(problem, problem.spans, entry, query)
        if own == 0 or own != problem.spans[entry, key]:
            return False
    tokens = problem.global_tokens
    if tokens is None or not (tokens[entry, key] or told_of(problem, tokens, entry, query)):
        before, after = problem.window
        if before is not None and there < stands - before:
            return False
        if after is not None and there > stands + after:
            return False
        if problem.dilation is not None and (stands - there) % problem.dilation:
            return False
        if problem.chunk is not None and there // problem.chunk != stands // problem.chunk:
            return False
    if problem.tree is not None:
        cached = length_of(problem, "key", entry) - length_of(problem, "query", entry)
        if key >= cached and key - cached not in line_of(problem, entry, query):
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


def by_loops(problem: Problem, leaf: dict, number=float, functions=math):
    """Output and weights, one number at a time; `functions` has exp, tanh, sqrt, cos and sin."""
    shape, zero = problem.shape, number(0)
    tokens = dict(zip(("query", "key", "value"), three_inputs(leaf), strict=True))
    weight = {name.removeprefix("weights."): array for name, array in leaf.items()}
    weight |= {name: leaf[f"weights.{name}"] for name in ("query", "key", "value")}
    group = shape.heads // shape.kv_heads
    scale = scale_of(problem, number)

    def project(name, entry, position, head, unit):
        total = zero
        for width in range(tokens[name].shape[2]):
            total += tokens[name][entry, position, width] * weight[name][width, head, unit]
        return total + weight[f"{name}_bias"][head, unit] if f"{name}_bias" in weight else total

    @cache
    def vector(name, entry, position, head):
        """One head of one token, normed and rotated."""
        found = [project(name, entry, position, head, d) for d in range(shape.head_size)]
        if problem.norm is not None:
            square = sum((x * x for x in found), zero) / shape.head_size
            root = functions.sqrt(square + number(problem.norm.epsilon))
            found = [x * g / root for x, g in zip(found, leaf[f"norm.{name}"], strict=True)]
        if problem.rotary is not None:
            size = problem.rotary.size
            for pair in range(size // 2):
                stands = place_of(problem, name, entry, position, pair)
                i, j = pair, pair + size // 2
                if problem.rotary.pairs == "interleaved":
                    i, j = 2 * pair, 2 * pair + 1
                rate, factor = turns(problem, pair, number, functions)
                c, s = (factor * f(stands * rate) for f in (functions.cos, functions.sin))
                found[i], found[j] = found[i] * c - found[j] * s, found[i] * s + found[j] * c
        return found

    def logit(entry, head, i, j):
        total = zero
        q, k = vector("query", entry, i, head), vector("key", entry, j, head // group)
        for d in range(shape.head_size):
            hidden = functions.tanh(q[d] + k[d]) if "score" in weight else zero
            total += weight["score"][head, d] * hidden if "score" in weight else q[d] * k[d]
        total = scale * total
        if problem.soft_cap is not None:
            total = number(problem.soft_cap) * functions.tanh(total / number(problem.soft_cap))
        if problem.slopes is not None:
            stands = position_of(problem, "query", entry, i)
            distance = abs(stands - position_of(problem, "key", entry, j))
            total -= number(problem.slopes[head]) * distance
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
            sink = [leaf["sinks"][head]] if "sinks" in leaf else []
            peak = max([*logits.values(), *sink], default=zero)
            powers = {j: functions.exp(logits[j] - peak) for j in seen}
            total = sum([*powers.values(), *(functions.exp(each - peak) for each in sink)], zero)
            for j in seen:
                weights[entry, head, i, j] = powers[j] / total
            for d in range(shape.value_head_size):
                context = zero
                for j in seen:
                    v = project("value", entry, j, head // group, d)
                    context += weights[entry, head, i, j] * v
                for e in range(shape.output_width):
                    row[e] += context * weight["output"][head, d, e]
        for e in range(shape.output_width):
            output[entry, i, e] = row[e] + weight["output_bias"][e] if shape.bias else row[e]
    return output, weights


def turns(problem: Problem, pair: int, number=float, functions=math):
    """The angle per position of a pair, and what multiplies its cosine and sine."""
    size, base = problem.rotary.size, number(problem.rotary.base)
    rate, scaling = base ** (-number(2 * pair) / size), problem.rotary_scaling
    if scaling is None or scaling.rope_type == "default":
        return rate, number(1)
    factor, before = number(scaling.factor), scaling.original_max_position_embeddings
    sides = (("query", problem.shape.query_length), ("key", problem.shape.key_length))
    length = 1 + max(
        position_of(problem, side, entry, token)
        if problem.axes is None
        else int(getattr(problem.axes, side)[entry, token].max())
        for side, tokens in sides
        for entry, token in product(range(problem.shape.batch), range(tokens))
    )
    given = scaling.attention_factor and number(scaling.attention_factor)
    if scaling.rope_type == "linear":
        return rate / factor, number(1)
    if scaling.rope_type == "dynamic":
        stretched = factor * length / before - (factor - 1) if length > before else number(1)
        base *= stretched ** (number(size) / (size - 2))
        return base ** (-number(2 * pair) / size), number(1)
    if scaling.rope_type == "longrope":
        listed = scaling.long_factor if length > before else scaling.short_factor
        more = functions.log(factor) / functions.log(before)
        return rate / number(listed[pair]), given or functions.sqrt(1 + more)
    if scaling.rope_type == "llama3":
        wavelength = 2 * functions.pi / rate
        low, high = number(scaling.low_freq_factor), number(scaling.high_freq_factor)
        if wavelength > before / low:
            return rate / factor, number(1)
        if wavelength < before / high:
            return rate, number(1)
        smooth = (before / wavelength - low) / (high - low)
        return (1 - smooth) * rate / factor + smooth * rate, number(1)
    first, last = (
        size * functions.log(before / (number(beta) * 2 * functions.pi)) / (2 * functions.log(base))
        for beta in (scaling.beta_fast or 32.0, scaling.beta_slow or 1.0)
    )
    if scaling.truncate in (None, True):
        first, last = functions.floor(first), functions.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    ramp = (pair - first) / (last - first if last != first else number("0.001"))
    ramp = min(max(ramp, 0), 1)

    def grown(by):
        return by * functions.log(factor) / 10 + 1

    over = scaling.mscale and scaling.mscale_all_dim
    usual = grown(scaling.mscale) / grown(scaling.mscale_all_dim) if over else grown(1)
    return rate / factor * ramp + rate * (1 - ramp), given or usual


def alibi(problem: Problem) -> np.ndarray:
    """What ALiBi subtracts from the logits, `[batch heads query key]`; 0 without slopes."""
    shape, found = problem.shape, np.zeros(problem.shape.logits)
    if problem.slopes is not None:
        for entry, head, i, j in np.ndindex(found.shape):
            stands = position_of(problem, "query", entry, i)
            distance = abs(stands - position_of(problem, "key", entry, j))
            found[entry, head, i, j] = problem.slopes[head] * distance
    assert found.shape == shape.logits
    return found


def angles(problem: Problem, side: str) -> np.ndarray:
    """The angle of each token and pair, `[batch length size/2]`."""
    size, length = problem.rotary.size, getattr(problem.shape, f"{side}_length")
    found = np.zeros((problem.shape.batch, length, size // 2))
    for entry, token, pair in np.ndindex(found.shape):
        stands = place_of(problem, side, entry, token, pair)
        found[entry, token, pair] = stands * turns(problem, pair)[0]
    return found


def prepared(xp, epsilon, leaf: dict, side: str, heads, turned):
    """Heads `[batch ... length head]` after norm and rotation, in operations that all have.

    `epsilon` is that of the norm, `turned` what `rotations` returns; None leaves either out.
    """
    if epsilon is not None:
        mean = (heads * heads).sum(-1)[..., None] / heads.shape[-1]
        heads = heads * leaf[f"norm.{side}"] / xp.sqrt(mean + epsilon)
    if turned is None:
        return heads
    letters = "blij,bhlj->bhli" if len(heads.shape) == 4 else "blij,blj->bli"
    return xp.einsum(letters, turned, heads)


def rotations(problem: Problem, side: str) -> np.ndarray:
    """The matrix that rotates a head of each token, `[batch length head head]`."""
    angle, rotary, factor = angles(problem, side), problem.rotary, turns(problem, 0)[1]
    pairs = np.arange(rotary.size // 2)
    one, other = (
        (pairs, pairs + rotary.size // 2)
        if rotary.pairs == "halves"
        else (2 * pairs, 2 * pairs + 1)
    )
    found = np.zeros((*angle.shape[:2], problem.shape.head_size, problem.shape.head_size))
    found[..., range(problem.shape.head_size), range(problem.shape.head_size)] = 1.0
    for row, column, value in (
        (one, one, factor * np.cos(angle)),
        (other, other, factor * np.cos(angle)),
        (one, other, -factor * np.sin(angle)),
        (other, one, factor * np.sin(angle)),
    ):
        found[..., row, column] = value
    return found


def given(problem: Problem) -> dict[str, np.ndarray]:
    """The arrays without gradients that `in_framework` needs, besides what is visible."""
    found = {} if problem.slopes is None else {"alibi": alibi(problem)}
    if problem.rotary is not None:
        found |= {side: rotations(problem, side) for side in ("query", "key")}
    return found


class Numbers(NamedTuple):
    """What a program is compiled for: all of a problem that is no array."""

    shape: Shape
    scale: float
    soft_cap: float | None
    epsilon: float | None

    @classmethod
    def of(cls, problem: Problem) -> Numbers:
        epsilon = None if problem.norm is None else problem.norm.epsilon
        return cls(problem.shape, scale_of(problem), problem.soft_cap, epsilon)


def by_matrices(problem: Problem, leaf: dict, allowed: np.ndarray) -> np.ndarray:
    """The output with one small matrix product after the other; analytic, so complex steps work."""
    shape = problem.shape
    query, key, value = three_inputs(leaf)
    kind = np.result_type(*leaf.values())
    output = np.zeros(problem.cotangent.shape, dtype=kind)
    scale, group = scale_of(problem), shape.heads // shape.kv_heads
    numbers, arrays = Numbers.of(problem), given(problem)

    def head_of(name, tokens, head):
        found = tokens @ leaf[f"weights.{name}"][:, head]
        return found + leaf[f"weights.{name}_bias"][head] if shape.bias else found

    for head in range(shape.heads):
        q, k = head_of("query", query, head), head_of("key", key, head // group)
        q = prepared(np, numbers.epsilon, leaf, "query", q, arrays.get("query"))
        k = prepared(np, numbers.epsilon, leaf, "key", k, arrays.get("key"))
        v = head_of("value", value, head // group)
        if shape.score == "additive":
            logits = np.tanh(q[:, :, None] + k[:, None]) @ leaf["weights.score"][head]
        else:
            logits = q @ np.swapaxes(k, 1, 2)
        logits = logits * scale
        if problem.soft_cap is not None:
            logits = np.tanh(logits / problem.soft_cap) * problem.soft_cap
        if "alibi" in arrays:
            logits = logits - arrays["alibi"][:, head]
        if "attn_bias" in leaf:
            bias = leaf["attn_bias"]
            logits = logits + bias[:, head if bias.shape[1] > 1 else 0]
        # Subtracting a real constant from a row changes no derivative.
        real = np.where(allowed[:, head], logits.real, -np.inf).max(axis=2, keepdims=True)
        peak = np.where(np.isfinite(real), real, 0.0)
        powers = np.exp(logits - peak) * allowed[:, head]
        total = powers.sum(axis=2, keepdims=True)
        if "sinks" in leaf:
            total = total + np.exp(leaf["sinks"][head] - peak)
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


def in_framework(xp, constant, numbers: Numbers, leaf: dict, allowed, arrays: dict):
    """Output and weights in operations that torch and `jax.numpy` have in common.

    `constant` stops gradients; `arrays` are those of `given`.
    """
    shape, scale = numbers.shape, numbers.scale
    query, key, value = three_inputs(leaf)
    group = shape.heads // shape.kv_heads

    def project(name, tokens, repeats=1):
        heads = xp.einsum("ble,ehd->bhld", tokens, leaf[f"weights.{name}"])
        if shape.bias:
            heads = heads + leaf[f"weights.{name}_bias"][:, None, :]
        if name != "value":
            heads = prepared(xp, numbers.epsilon, leaf, name, heads, arrays.get(name))
        return heads[:, [head // repeats for head in range(shape.heads)]]

    q, k, v = project("query", query), project("key", key, group), project("value", value, group)
    if shape.score == "additive":
        hidden = xp.tanh(q[:, :, :, None] + k[:, :, None])
        logits = (hidden * leaf["weights.score"][:, None, None]).sum(-1)
    else:
        logits = xp.matmul(q, xp.swapaxes(k, 2, 3))
    logits = logits * scale
    if numbers.soft_cap is not None:
        logits = xp.tanh(logits / numbers.soft_cap) * numbers.soft_cap
    if "alibi" in arrays:
        logits = logits - arrays["alibi"]
    if "attn_bias" in leaf:
        logits = logits + leaf["attn_bias"]
    # Blocked logits are replaced before exp: a derivative of exp(-inf - -inf) is NaN in both.
    peak = xp.amax(xp.where(allowed, logits, xp.full_like(logits, -math.inf)), -1)[..., None]
    if "sinks" in leaf:
        peak = xp.maximum(peak, leaf["sinks"][:, None, None])
    peak = constant(xp.where(peak > -math.inf, peak, xp.zeros_like(peak)))
    nothing = xp.zeros_like(logits)
    powers = xp.where(allowed, xp.exp(xp.where(allowed, logits - peak, nothing)), nothing)
    total = powers.sum(-1)[..., None]
    if "sinks" in leaf:
        total = total + xp.exp(leaf["sinks"][:, None, None] - peak)
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
    arrays = {name: torch.tensor(array).to(kind) for name, array in given(problem).items()}
    output, weights = in_framework(
        torch, torch.Tensor.detach, Numbers.of(problem), leaf, allowed, arrays
    )
    cotangent = torch.tensor(problem.cotangent).to(kind)
    gradients = torch.autograd.grad(output, list(leaf.values()), cotangent, allow_unused=True)
    found = {"output": output, "weights": weights}
    for (name, array), gradient in zip(leaf.items(), gradients, strict=True):
        found[f"gradient.{name}"] = torch.zeros_like(array) if gradient is None else gradient
    return {name: array.detach().double().numpy() for name, array in found.items()}
