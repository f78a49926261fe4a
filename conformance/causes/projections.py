"""Known defects in the projections: weights, biases, heads, and their inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from conformance.causes.hypothesis import Hypothesis, Maker
from conformance.causes.stages import Stages
from conformance.definition.dtypes import Array

NAMES = ("query", "key", "value")


def hypotheses(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses about projections, the simplest first."""
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
        of = {"of": name.removesuffix("_bias")}
        yield maker.weighed("projection.bias-forgotten", of, **{name: 0.0 * bias})
        yield maker.weighed("projection.bias-added-twice", of, **{name: 2.0 * bias})
    if not there:
        return
    without = {name: 0.0 * bias for name, bias in there.items()}
    yield maker.weighed("projection.all-biases-forgotten", **without)
    kept = {name: bias for name, bias in without.items() if name != "output_bias"}
    yield maker.weighed("projection.input-biases-forgotten", **kept)
    shape, factor = maker.problem.shape, maker.problem.logit_scale
    if own.query_bias is not None and factor and own.score is None:
        yield maker.weighed(
            "projection.query-scaled-before-bias", query_bias=own.query_bias / factor
        )
    bias = own.output_bias
    assert bias is not None
    yield maker.weighed("projection.output-bias-per-head", output_bias=shape.heads * bias)
    if bias.size == shape.heads * shape.value_head_size:
        early = bias.reshape(shape.heads, shape.value_head_size)
        yield maker.weighed(
            "projection.output-bias-before-projection",
            output_bias=np.einsum("hd,hde->e", early, own.output),
        )
    firsts = {
        name: np.broadcast_to(getattr(own, name)[:1], getattr(own, name).shape)
        for name in ("query_bias", "key_bias", "value_bias")
    }
    yield maker.weighed("projection.bias-of-first-head", **firsts)
    if shape.head_size == 1:
        yield maker.staged("projection.bias-along-tokens", shifted=_along_tokens)


def _along_tokens(a: Stages, name: str, projected: Array) -> Array:
    """Add a bias of `[heads 1]`, its last axis dropped, to `[batch length heads 1]`."""
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
            names = {"one": one, "other": other}
            yield maker.weighed("projection.swapped", names, **weights, **biases)
            yield maker.weighed("projection.swapped-without-biases", names, **weights)
            yield maker.weighed("projection.replaced", names, **{one: weights[one]})
    if own.query.shape == own.key.shape == own.value.shape:
        for order in (("key", "value", "query"), ("value", "query", "key")):
            turned: dict[str, Any] = {}
            for name, source in zip(NAMES, order, strict=True):
                turned[name] = getattr(own, source)
                turned[f"{name}_bias"] = getattr(own, f"{source}_bias")
            yield maker.weighed("projection.packed-otherwise", {"order": list(order)}, **turned)


def _transposed(maker: Maker) -> Iterator[Hypothesis]:
    own = maker.problem.weights
    turned = {}
    for name in (*NAMES, "output"):
        weight = getattr(own, name)
        matrix = weight.reshape(-1, weight.shape[-1]) if name == "output" else None
        matrix = weight.reshape(weight.shape[0], -1) if matrix is None else matrix
        if matrix.shape[0] == matrix.shape[1]:
            turned[name] = matrix.T.reshape(weight.shape)
            yield maker.weighed("projection.transposed", {"of": name}, **{name: turned[name]})
    if len(turned) > 1:
        yield maker.weighed("projection.all-transposed", **turned)
        inputs = {name: weight for name, weight in turned.items() if name != "output"}
        yield maker.weighed("projection.inputs-transposed", **inputs)


def _interleaved(array: Array) -> Array:
    """Read `(heads head)` as `(head heads)` on the last two axes."""
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
        yield maker.weighed("heads.interleaved", **changed, **biases)
        for name in NAMES:
            bias = f"{name}_bias"
            one = {key: value for key, value in biases.items() if key == bias}
            of = {"of": name}
            yield maker.weighed("heads.interleaved-in", of, **{name: changed[name]}, **one)
            if one:
                yield maker.weighed("heads.interleaved-in", of, **{name: changed[name]})
        output = np.moveaxis(mixed(np.moveaxis(own.output, -1, 0)), 0, -1)
        yield maker.weighed("heads.interleaved-in", {"of": "output"}, output=output)
        yield maker.weighed("heads.interleaved-in-all", **changed, **biases, output=output)

    def viewed(a: Stages, projected: Array, name: str) -> Array:
        batch, length, heads, size = projected.shape
        return projected.reshape(batch, heads, length, size)

    yield maker.staged(
        "heads.split-by-reshape",
        split=viewed,
    )
    yield maker.staged(
        "heads.merged-by-reshape",
        merge=lambda a, c: c.reshape(c.shape[0], c.shape[2], c.shape[1], c.shape[3]),
    )
    yield maker.staged(
        "heads.split-and-merged-by-reshape",
        split=viewed,
        merge=lambda a, c: c.reshape(c.shape[0], c.shape[2], c.shape[1], c.shape[3]),
    )
    yield maker.weighed("heads.reversed", output=own.output[::-1])
    for head, left_out, only in (
        (shape.heads - 1, "heads.last-left-out", "heads.last-only"),
        (0, "heads.first-left-out", "heads.first-only"),
    ):
        kept = own.output * (np.arange(shape.heads) != head)[:, None, None]
        yield maker.weighed(left_out, output=kept)
        alone = own.output * (np.arange(shape.heads) == head)[:, None, None]
        yield maker.weighed(only, output=alone)
    yield maker.weighed("heads.averaged", output=own.output / shape.heads)
    for name, mistake in (
        ("query", "heads.queries-of-first"),
        ("key", "heads.keys-of-first"),
        ("value", "heads.values-of-first"),
    ):
        firsts = {name: np.broadcast_to(getattr(own, name)[:, :1], getattr(own, name).shape)}
        bias = getattr(own, f"{name}_bias")
        if bias is not None:
            firsts[f"{name}_bias"] = np.broadcast_to(bias[:1], bias.shape)
        yield maker.weighed(mistake, **firsts)


def _groups(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses for fewer key/value heads than query heads."""

    def tiled(*names: str) -> Any:
        def repeat(a: Stages, heads: Array, name: str) -> Array:
            own = Stages.repeat(a, heads, name)
            return np.tile(heads, (1, a.shape.group, 1, 1)) if name in names else own

        return repeat

    if maker.problem.shape.kv_heads > 1:
        yield maker.staged("heads.tiled", repeat=tiled("key", "value"))
        yield maker.staged("heads.values-tiled", repeat=tiled("value"))
        yield maker.staged("heads.keys-tiled", repeat=tiled("key"))
        yield maker.staged(
            "heads.first-key-value-for-all",
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
                "projection.of-other-input",
                {"of": name, "source": source},
                input=reads(name, source),
            )
    for name in NAMES:
        weight = getattr(own, name)
        if weight.shape[0] == weight[0].size:
            yield maker.staged(
                "projection.missing",
                {"of": name},
                project=lambda a, n, x, w=name: (
                    x.reshape(*x.shape[:2], *a.own[n].shape[1:])
                    if n == w
                    else Stages.project(a, n, x)
                ),
            )
    if shape.heads * shape.value_head_size == shape.output_width:
        yield maker.staged(
            "projection.missing",
            {"of": "output"},
            finish=lambda a, merged: merged.reshape(*merged.shape[:2], -1),
        )
    if shape.query_width == shape.output_width:
        yield maker.staged(
            "output.query-added",
            finish=lambda a, merged: Stages.finish(a, merged) + a.problem.query,
        )
    if shape.batch > 1:
        for name in ("key", "value", "query"):
            yield maker.staged(
                "inputs.of-first-batch-entry",
                {"of": name},
                input=lambda a, n, w=name: (
                    np.broadcast_to(getattr(a.problem, n)[:1], getattr(a.problem, n).shape)
                    if n == w
                    else getattr(a.problem, n)
                ),
            )
        yield maker.staged(
            "inputs.batch-mean-subtracted",
            mix=lambda a, w, v: Stages.mix(a, w, v - v.mean(axis=0, keepdims=True)),
        )
    if shape.score == "scaled-dot" and shape.head_size > 1:
        yield maker.staged(
            "score.last-component-left-out",
            score=lambda a, q, k: Stages.score(a, q[..., :-1], k[..., :-1]),
        )


def _additive(maker: Maker) -> Iterator[Hypothesis]:
    own = maker.problem.weights
    assert own.score is not None
    yield maker.staged(
        "score.tanh-missing",
        tanh=lambda a, q, k: q[:, :, :, None] + k[:, :, None],
    )
    yield maker.staged("score.of-difference", tanh=lambda a, q, k: Stages.tanh(a, q, -k))
    yield maker.weighed(
        "score.weight-of-first-head",
        score=np.broadcast_to(own.score[:1], own.score.shape),
    )
    yield maker.staged(
        "score.dot-product",
        score=lambda a, q, k: np.einsum("bhqd,bhkd->bhqk", q, k),
    )
