"""What becomes of weights, biases, heads, and of what goes into them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from conformance.causes.hypothesis import Hypothesis, Maker
from conformance.causes.stages import Stages
from conformance.definition.dtypes import Array

NAMES = ("query", "key", "value")


def hypotheses(maker: Maker) -> Iterator[Hypothesis]:
    """The simplest first."""
    yield from _biases(maker)
    yield from _swapped(maker)
    yield from _transposed(maker)
    yield from _heads(maker)
    if maker.problem.shape.group > 1:
        yield from _groups(maker)
    yield from _inputs(maker)
    if maker.problem.shape.score == "additive":
        yield from _additive(maker)


def _biases(maker: Maker) -> Iterator[Hypothesis]:
    own = maker.problem.weights
    names = ["query_bias", "value_bias", "output_bias"]
    # In a dot product the key's bias adds a constant to each row, which no softmax sees.
    names += ["key_bias"] if own.score is not None else []
    there = {name: getattr(own, name) for name in names if getattr(own, name) is not None}
    for name, bias in there.items():
        told = name.replace("_", " ")
        yield maker.weighed(f"with the {told} forgotten", **{name: 0.0 * bias})
        yield maker.weighed(f"with the {told} added twice", **{name: 2.0 * bias})
    if not there:
        return
    without = {name: 0.0 * bias for name, bias in there.items()}
    yield maker.weighed("with all biases forgotten", **without)
    kept = {name: bias for name, bias in without.items() if name != "output_bias"}
    yield maker.weighed("with the biases of query, key and value forgotten", **kept)
    shape, factor = maker.problem.shape, maker.problem.logit_scale
    if own.query_bias is not None and factor and own.score is None:
        yield maker.weighed(
            "with the query scaled before its bias is added", query_bias=own.query_bias / factor
        )
    bias = own.output_bias
    assert bias is not None
    yield maker.weighed(
        "with the output bias added once for each head", output_bias=shape.heads * bias
    )
    if bias.size == shape.heads * shape.value_head_size:
        early = bias.reshape(shape.heads, shape.value_head_size)
        yield maker.weighed(
            "with the output bias added before the output projection",
            output_bias=np.einsum("hd,hde->e", early, own.output),
        )
    firsts = {
        name: np.broadcast_to(getattr(own, name)[:1], getattr(own, name).shape)
        for name in ("query_bias", "key_bias", "value_bias")
    }
    yield maker.weighed("with the first head's bias for all heads", **firsts)
    if shape.head_size == 1:
        told = "with the biases of heads of size 1 added along the tokens"
        yield maker.staged(told, shifted=_along_tokens)


def _along_tokens(a: Stages, name: str, projected: Array) -> Array:
    """A bias of `[heads 1]` without its last axis is added to `[batch length heads 1]`."""
    bias = a.own.get(f"{name}_bias")
    if bias is None or bias.shape != (projected.shape[1], 1):
        return Stages.shifted(a, name, projected)
    return projected + bias[:, None]


def _swapped(maker: Maker) -> Iterator[Hypothesis]:
    own = maker.problem.weights
    for one, other in (("query", "key"), ("key", "value"), ("query", "value")):
        if getattr(own, one).shape == getattr(own, other).shape:
            weights = {one: getattr(own, other), other: getattr(own, one)}
            biases = {
                f"{one}_bias": getattr(own, f"{other}_bias"),
                f"{other}_bias": getattr(own, f"{one}_bias"),
            }
            yield maker.weighed(f"with {one} and {other} weights swapped", **weights, **biases)
            yield maker.weighed(
                f"with {one} and {other} weights swapped, but not their biases", **weights
            )
            yield maker.weighed(
                f"with the {other} weight in place of the {one} weight", **{one: weights[one]}
            )
    if own.query.shape == own.key.shape == own.value.shape:
        for order in (("key", "value", "query"), ("value", "query", "key")):
            turned: dict[str, Any] = {}
            for name, source in zip(NAMES, order, strict=True):
                turned[name] = getattr(own, source)
                turned[f"{name}_bias"] = getattr(own, f"{source}_bias")
            yield maker.weighed(f"with weights packed as {', '.join(order)}", **turned)


def _transposed(maker: Maker) -> Iterator[Hypothesis]:
    own = maker.problem.weights
    turned = {}
    for name in (*NAMES, "output"):
        weight = getattr(own, name)
        matrix = weight.reshape(-1, weight.shape[-1]) if name == "output" else None
        matrix = weight.reshape(weight.shape[0], -1) if matrix is None else matrix
        if matrix.shape[0] == matrix.shape[1]:
            turned[name] = matrix.T.reshape(weight.shape)
            yield maker.weighed(f"with the {name} weight transposed", **{name: turned[name]})
    if len(turned) > 1:
        yield maker.weighed("with all square weights transposed", **turned)
        inputs = {name: weight for name, weight in turned.items() if name != "output"}
        yield maker.weighed("with query, key and value weights transposed", **inputs)


def _interleaved(array: Array) -> Array:
    """`(heads head)` read as `(head heads)`, on the last two axes."""
    *leading, heads, size = array.shape
    return array.reshape(*leading, size, heads).swapaxes(-1, -2)


def _other_way(array: Array) -> Array:
    *leading, heads, size = array.shape
    return array.swapaxes(-1, -2).reshape(*leading, heads, size)


def _heads(maker: Maker) -> Iterator[Hypothesis]:
    own, shape = maker.problem.weights, maker.problem.shape
    if shape.heads == 1:
        return
    for mixed in (_interleaved, _other_way):
        changed = {name: mixed(getattr(own, name)) for name in NAMES}
        biases = {
            f"{name}_bias": mixed(getattr(own, f"{name}_bias"))
            for name in NAMES
            if getattr(own, f"{name}_bias") is not None
        }
        told = "heads interleaved: (head heads) in place of (heads head)"
        yield maker.weighed(f"with {told}", **changed, **biases)
        for name in NAMES:
            bias = f"{name}_bias"
            one = {key: value for key, value in biases.items() if key == bias}
            told = f"with heads interleaved in the {name} weight"
            yield maker.weighed(told, **{name: changed[name]}, **one)
            if one:
                yield maker.weighed(told, **{name: changed[name]})
        output = np.moveaxis(mixed(np.moveaxis(own.output, -1, 0)), 0, -1)
        yield maker.weighed("with heads interleaved in the output weight", output=output)
        yield maker.weighed(
            "with heads interleaved in all weights", **changed, **biases, output=output
        )

    def viewed(a: Stages, projected: Array, name: str) -> Array:
        batch, length, heads, size = projected.shape
        return projected.reshape(batch, heads, length, size)

    yield maker.staged(
        "with heads split by a reshape to [batch heads length head], without the transposition",
        split=viewed,
    )
    yield maker.staged(
        "with heads merged by a reshape, without transposing back",
        merge=lambda a, c: c.reshape(c.shape[0], c.shape[2], c.shape[1], c.shape[3]),
    )
    yield maker.staged(
        "with heads split and merged by a reshape, without transpositions",
        split=viewed,
        merge=lambda a, c: c.reshape(c.shape[0], c.shape[2], c.shape[1], c.shape[3]),
    )
    yield maker.weighed("with the heads merged in reverse order", output=own.output[::-1])
    for head, told in ((shape.heads - 1, "last"), (0, "first")):
        kept = own.output * (np.arange(shape.heads) != head)[:, None, None]
        yield maker.weighed(f"with the {told} head left out", output=kept)
        alone = own.output * (np.arange(shape.heads) == head)[:, None, None]
        yield maker.weighed(f"with the {told} head only", output=alone)
    yield maker.weighed(
        "with the mean over heads in place of the sum", output=own.output / shape.heads
    )
    for name in NAMES:
        firsts = {name: np.broadcast_to(getattr(own, name)[:, :1], getattr(own, name).shape)}
        bias = getattr(own, f"{name}_bias")
        if bias is not None:
            firsts[f"{name}_bias"] = np.broadcast_to(bias[:1], bias.shape)
        plural = {"query": "queries", "key": "keys", "value": "values"}[name]
        yield maker.weighed(f"with the first head's {plural} for all heads", **firsts)


def _groups(maker: Maker) -> Iterator[Hypothesis]:
    """Fewer key/value heads than query heads."""

    def tiled(*names: str) -> Any:
        def repeat(a: Stages, heads: Array, name: str) -> Array:
            own = Stages.repeat(a, heads, name)
            return np.tile(heads, (1, a.shape.group, 1, 1)) if name in names else own

        return repeat

    if maker.problem.shape.kv_heads > 1:
        yield maker.staged(
            "with key/value heads tiled instead of repeated", repeat=tiled("key", "value")
        )
        yield maker.staged("with value heads tiled instead of repeated", repeat=tiled("value"))
        yield maker.staged("with key heads tiled instead of repeated", repeat=tiled("key"))
        yield maker.staged(
            "with the first key/value head for all query heads",
            repeat=lambda a, heads, name: np.repeat(heads[:, :1], a.shape.heads, axis=1),
        )


def _inputs(maker: Maker) -> Iterator[Hypothesis]:
    problem, own, shape = maker.problem, maker.problem.weights, maker.problem.shape

    def reads(name: str, source: str) -> Any:
        return lambda a, wanted: getattr(a.problem, source if wanted == name else wanted)

    for name, source in (("value", "key"), ("key", "value"), ("key", "query"), ("query", "key")):
        one, other = getattr(problem, name), getattr(problem, source)
        if one is not other and one.shape == other.shape:
            yield maker.staged(
                f"with the {name} projected from the {source}'s input", input=reads(name, source)
            )
    for name in NAMES:
        weight = getattr(own, name)
        if weight.shape[0] == weight[0].size:
            yield maker.staged(
                f"with the {name} not projected",
                project=lambda a, n, x, w=name: (
                    x.reshape(*x.shape[:2], *a.own[n].shape[1:])
                    if n == w
                    else Stages.project(a, n, x)
                ),
            )
    if shape.heads * shape.value_head_size == shape.output_width:
        yield maker.staged(
            "with the output not projected",
            finish=lambda a, merged: merged.reshape(*merged.shape[:2], -1),
        )
    if shape.query_width == shape.output_width:
        yield maker.staged(
            "with the query added to the output",
            finish=lambda a, merged: Stages.finish(a, merged) + a.problem.query,
        )
    if shape.batch > 1:
        for name in ("key", "value", "query"):
            yield maker.staged(
                f"with the first batch entry's {name} for all",
                input=lambda a, n, w=name: (
                    np.broadcast_to(getattr(a.problem, n)[:1], getattr(a.problem, n).shape)
                    if n == w
                    else getattr(a.problem, n)
                ),
            )
        yield maker.staged(
            "with the batch's mean subtracted from the projected values",
            mix=lambda a, w, v: Stages.mix(a, w, v - v.mean(axis=0, keepdims=True)),
        )
    if shape.score == "scaled-dot" and shape.head_size > 1:
        told = "with the last component of each head left out of the scores"
        yield maker.staged(told, score=lambda a, q, k: Stages.score(a, q[..., :-1], k[..., :-1]))


def _additive(maker: Maker) -> Iterator[Hypothesis]:
    own = maker.problem.weights
    assert own.score is not None
    yield maker.staged(
        "without the tanh of the additive score",
        tanh=lambda a, q, k: q[:, :, :, None] + k[:, :, None],
    )
    yield maker.staged(
        "with tanh(q − k) for tanh(q + k)", tanh=lambda a, q, k: Stages.tanh(a, q, -k)
    )
    yield maker.weighed(
        "with the first head's score weight for all",
        score=np.broadcast_to(own.score[:1], own.score.shape),
    )
    yield maker.staged(
        "with a dot product in place of the additive score",
        score=lambda a, q, k: np.einsum("bhqd,bhkd->bhqk", q, k),
    )
