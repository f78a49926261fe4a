"""Known defects in the projections: their weights, biases, heads and inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conformance.causes.hypothesis import About, Hypothesis, Maker, orders_of_groups
from conformance.causes.location import indices
from conformance.causes.stages import Change, Stages
from conformance.definition.dtypes import BFLOAT16, FLOAT16, FLOAT32, Array, DType, IntArray
from conformance.definition.problem import Shape
from conformance.records.findings import Phrase

NAMES = ("query", "key", "value")

EIGHT_BITS = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
"""Formats in which caches hold keys and values, each with its largest number."""

SCALED_OVER = {"scaled.token": (3,), "scaled.head": (2, 3), "scaled.component": (2,)}
"""What has a scale of its own, with the axes of heads `[batch heads length head]` that it spans."""


def hypotheses(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses about projections, the simplest first."""
    yield from _biases(maker)
    yield from _swapped(maker)
    yield from _transposed(maker)
    yield from _heads(maker)
    yield from _groups(maker)
    yield from _stored(maker)
    yield from _inputs(maker)
    if maker.problem.shape.score == "additive":
        yield from _additive(maker)


def _biases(maker: Maker) -> Iterator[Hypothesis]:
    own, shape, scale = maker.problem.weights, maker.problem.shape, maker.problem.logit_scale
    # Without a rotation, norm, soft cap or sink, the key's bias adds a constant to the dot products
    # of each row, which the softmax cancels: forgotten, it then explains nothing.
    names = ["query_bias", "value_bias", "output_bias", "key_bias"]
    present = maker.right.own
    without = {name: 0.0 * present[name] for name in names if name in present}
    for name, zero in without.items():
        of = {"of": name.removesuffix("_bias")}
        yield maker.weighed("projection.bias-forgotten", of, **{name: zero})
        yield maker.weighed("projection.bias-added-twice", of, **{name: 2.0 * present[name]})
    if not without:
        return
    yield maker.weighed("projection.all-biases-forgotten", **without)
    inputs = {name: zero for name, zero in without.items() if name != "output_bias"}
    if inputs and np.any(present.get("output_bias", 0.0)):
        yield maker.weighed("projection.input-biases-forgotten", **inputs)
    if scale and own.score is None and "query_bias" in present:
        early = present["query_bias"] / scale
        yield maker.weighed("projection.query-scaled-before-bias", query_bias=early)
    bias = present.get("output_bias")
    if bias is not None:
        yield maker.weighed("projection.output-bias-per-head", output_bias=shape.heads * bias)
        if bias.size == shape.heads * shape.value_head_size:
            split = bias.reshape(shape.heads, shape.value_head_size)
            projected = np.einsum("hd,hde->e", split, own.output)
            yield maker.weighed("projection.output-bias-before-projection", output_bias=projected)
    of_inputs = [f"{name}_bias" for name in NAMES if f"{name}_bias" in present]
    if of_inputs:
        firsts = {name: _first_of(present[name], axis=0) for name in of_inputs}
        yield maker.weighed("projection.bias-of-first-head", **firsts)
    if shape.head_size == 1:
        yield maker.staged("projection.bias-along-tokens", shifted=_along_tokens)


def _first_of(array: Array, axis: int) -> Array:
    """Return the array with every slice along an axis replaced by the first slice."""
    return np.broadcast_to(array.take([0], axis=axis), array.shape)


def _along_tokens(a: Stages, name: str, projected: Array) -> Array:
    """Return projections `[batch length heads 1]` plus a bias broadcast along the wrong axis.

    If there are as many heads as tokens, the bias `[heads 1]` is added as if it were
    `[length 1 1]`; otherwise, it is added correctly.
    """
    bias = a.own.get(f"{name}_bias")
    if bias is None or bias.shape != (projected.shape[1], 1):
        return Stages.shifted(a, name, projected)
    return projected + bias[:, None]


def _swapped(maker: Maker) -> Iterator[Hypothesis]:
    own = maker.problem.weights

    def taken(suffix: str, sources: dict[str, str]) -> dict[str, Any]:
        found = {}
        for name, other in sources.items():
            mine, others = (getattr(own, f"{it}{suffix}") for it in (name, other))
            # Where only some projections have biases, the others take none.
            if mine is not None:
                found[f"{name}{suffix}"] = 0.0 * mine if others is None else others
        return found

    for one, other in (("query", "key"), ("key", "value"), ("query", "value")):
        if getattr(own, one).shape == getattr(own, other).shape:
            names, sources = {"one": one, "other": other}, {one: other, other: one}
            weights, biases = taken("", sources), taken("_bias", sources)
            yield maker.weighed("projection.swapped", names, **weights, **biases)
            yield maker.weighed("projection.swapped-without-biases", names, **weights)
            yield maker.weighed("projection.replaced", names, **taken("", {one: other}))
    if own.query.shape == own.key.shape == own.value.shape:
        for order in (("key", "value", "query"), ("value", "query", "key")):
            sources = dict(zip(NAMES, order, strict=True))
            turned = taken("", sources) | taken("_bias", sources)
            yield maker.weighed("projection.packed-otherwise", {"order": [*order]}, **turned)
        for by_head in (True, False):
            found: dict[str, Any] = {}
            for suffix in ("", "_bias"):
                parts = [getattr(own, f"{name}{suffix}") for name in NAMES]
                if all(part is not None for part in parts):
                    split = _split_otherwise(parts, by_head)
                    found |= {f"{n}{suffix}": it for n, it in zip(NAMES, split, strict=True)}
            about = {"how": Phrase("packed.by-head" if by_head else "packed.by-projection")}
            yield maker.weighed("projection.packed-split", about, **found)


def _split_otherwise(parts: list[Array], by_head: bool) -> list[Array]:
    """Return the projections `[... heads head]` that a wrong split of their packed rows gives.

    Packed rows are `(3 heads head)`, read as `(heads 3 head)` if `by_head`, or the reverse.
    """
    heads, size = parts[0].shape[-2:]
    packed = np.stack(parts, axis=-3 if by_head else -2)
    rows = packed.reshape(*packed.shape[:-3], 3 * heads * size)
    if by_head:
        read = rows.reshape(*rows.shape[:-1], heads, 3, size)
        return [read[..., at, :] for at in range(3)]
    read = rows.reshape(*rows.shape[:-1], 3, heads, size)
    return [read[..., at, :, :] for at in range(3)]


def _transposed(maker: Maker) -> Iterator[Hypothesis]:
    turned = {}
    for name in (*NAMES, "output"):
        weight = maker.right.own[name]
        rows = -1 if name == "output" else weight.shape[0]
        matrix = weight.reshape(rows, weight.shape[-1] if name == "output" else -1)
        if matrix.shape[0] == matrix.shape[1]:
            turned[name] = matrix.T.reshape(weight.shape)
            yield maker.weighed("projection.transposed", {"of": name}, **{name: turned[name]})
    if len(turned) > 1:
        yield maker.weighed("projection.all-transposed", **turned)
        turned.pop("output", None)
        yield maker.weighed("projection.inputs-transposed", **turned)


def _interleaved(array: Array) -> Array:
    """Return the array with its last two axes, `[heads head]`, misread as if they were exchanged.

    Element [h, d] of the result is element d · heads + h of the two axes, flattened.
    """
    *leading, heads, size = array.shape
    return array.reshape(*leading, size, heads).swapaxes(-1, -2)


def _other_way(array: Array) -> Array:
    """Return the array with its last two axes, `[heads head]`, exchanged and then misread.

    This is the inverse of `_interleaved`: element d · heads + h of the two axes of the result,
    flattened, is element [h, d] of the array.
    """
    return array.swapaxes(-1, -2).reshape(array.shape)


def _split_by_reshape(a: Stages, projected: Array, name: str) -> Array:
    batch, length, heads, size = projected.shape
    return projected.reshape(batch, heads, length, size)


def _merged_by_reshape(a: Stages, context: Array) -> Array:
    batch, heads, length, size = context.shape
    return context.reshape(batch, length, heads, size)


def _heads(maker: Maker) -> Iterator[Hypothesis]:
    own, shape = maker.right.own, maker.problem.shape
    if shape.heads == 1:
        return
    output = own["output"]
    of_inputs = [name for name in own if name.removesuffix("_bias") in NAMES]
    for mixed in (_interleaved, _other_way):
        inputs = {name: mixed(own[name]) for name in of_inputs}
        yield maker.weighed("heads.interleaved", **inputs)
        for name in NAMES:
            changed = {key: array for key, array in inputs.items() if key.startswith(name)}
            yield maker.weighed("heads.interleaved-in", {"of": name}, **changed)
            if changed.pop(f"{name}_bias", None) is not None:
                yield maker.weighed("heads.interleaved-in", {"of": name}, **changed)
        turned = np.moveaxis(mixed(np.moveaxis(output, -1, 0)), 0, -1)
        yield maker.weighed("heads.interleaved-in", {"of": "output"}, output=turned)
        yield maker.weighed("heads.interleaved-in-all", **inputs, output=turned)
    split, merge = _split_by_reshape, _merged_by_reshape
    yield maker.staged("heads.split-by-reshape", split=split)
    yield maker.staged("heads.merged-by-reshape", merge=merge)
    yield maker.staged("heads.split-and-merged-by-reshape", split=split, merge=merge)
    for axes in ("length batch heads head", "batch heads head length", "batch length head heads"):
        if _order(axes, shape) != _order("batch length heads head", shape):
            yield maker.staged("output.strides", {"layout": axes}, merge=_laid_out(axes))
    yield maker.weighed("heads.reversed", output=output[::-1])
    for which, head in (("last", shape.heads - 1), ("first", 0)):
        chosen = (np.arange(shape.heads) == head)[:, None, None]
        yield maker.weighed(f"heads.{which}-left-out", output=output * ~chosen)
        yield maker.weighed(f"heads.{which}-only", output=output * chosen)
    yield maker.weighed("heads.averaged", output=output / shape.heads)
    for head in range(shape.heads) if shape.heads > 1 else ():
        of_one = _of_head(head)
        part: About = {"head": indices("head", [head], shape.heads)}
        yield maker.staged("heads.output-of-one", part, merge=of_one(Stages.merge))
        if head in (0, shape.heads - 1):
            yield maker.staged("heads.weights-of-one", part, mix=of_one(Stages.mix))
    if shape.heads > 1:

        def averaged(a: Stages, weights: Array, values: Array) -> Array:
            return Stages.mix(a, 0 * weights + weights.mean(axis=1, keepdims=True), values)

        yield maker.staged("heads.weights-averaged", mix=averaged)
    for name, cause in (
        ("query", "heads.queries-of-first"),
        ("key", "heads.keys-of-first"),
        ("value", "heads.values-of-first"),
    ):
        # In weights and biases, the heads are the second-to-last axis.
        firsts = {n: _first_of(own[n], axis=-2) for n in of_inputs if n.startswith(name)}
        yield maker.weighed(cause, **firsts)


def _of_head(head: int) -> Callable[[Change], Change]:
    """Return what makes a stage use one head of its first argument in place of every head."""

    def changed(stage: Change) -> Change:
        return lambda a, heads, *more: stage(a, 0 * heads + heads[:, head : head + 1], *more)

    return changed


AXES = ("batch", "heads", "length", "head")
"""The axes of a context."""


def _order(axes: str, shape: Shape) -> list[str]:
    """Return those of the axes that have more than one element."""
    sizes = dict(zip(AXES, (*shape.logits[:3], shape.value_head_size), strict=True))
    return [axis for axis in axes.split() if sizes[axis] > 1]


def _laid_out(axes: str) -> Change:
    """Return a stage that writes the context in the order of `axes`, as the memory is not read."""

    def merge(a: Stages, context: Array) -> Array:
        batch, heads, length, size = context.shape
        written = context.transpose([AXES.index(axis) for axis in axes.split()])
        return np.ascontiguousarray(written).reshape(batch, length, heads, size)

    return merge


def _stored(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses in which keys and values are stored in a narrower dtype, as in a cache."""
    for narrow in (FLOAT32, FLOAT16, BFLOAT16):
        if narrow.significand_bits < maker.problem.format.significand_bits:

            def repeat(a: Stages, heads: Array, name: str, narrow: DType = narrow) -> Array:
                return Stages.repeat(a, narrow.round(heads), name)

            yield maker.staged("precision.stored-rounded", {"to": narrow.name}, repeat=repeat)
    for name, largest in EIGHT_BITS.items():
        if name != "int8":
            yield _stored_as(maker, "precision.stored-rounded", {"to": name})
        for over, axes in SCALED_OVER.items():
            about: About = {"to": name, "over": Phrase(over)}
            yield _stored_as(maker, "precision.stored-scaled", about, axes, largest)
        mixed: About = {"to": name, "over": Phrase("scaled.mixed")}
        yield _stored_as(maker, "precision.stored-scaled", mixed, (2,), largest, of_values=(3,))
        every = (0, 1, 2, 3)
        yield _stored_as(maker, "precision.stored-scaled-together", {"to": name}, every, largest)


def _stored_as(
    maker: Maker,
    cause: str,
    about: About,
    axes: tuple[int, ...] | None = None,
    largest: float = math.inf,
    of_values: tuple[int, ...] | None = None,
) -> Hypothesis:
    """Return the hypothesis that keys and values are stored in 8 bits.

    They are divided by a scale, with which the largest number along the axes of heads
    `[batch heads length head]` becomes the largest one of the format; without axes, they are not.
    """
    name = str(about["to"])

    def repeat(a: Stages, heads: Array, which: str) -> Array:
        unit: Any = 1.0
        if axes is not None:
            along = of_values if which == "value" and of_values else axes
            highest = np.abs(heads).max(axis=along, keepdims=True)
            unit = np.where(highest > 0, (highest / largest).astype(np.float32), 1.0)
        return Stages.repeat(a, _in_eight_bits(name, heads / unit) * unit, which)

    return maker.staged(cause, about, repeat=repeat)


def _in_eight_bits(name: str, values: Array) -> Array:
    """Return the nearest numbers of a format of `EIGHT_BITS`, and its largest beyond its range."""
    spacing: Any = 1.0
    if name != "int8":
        bits, lowest = (4, -6) if name == "float8_e4m3fn" else (3, -14)
        exponent = np.maximum(np.frexp(values)[1] - 1, lowest)
        spacing = np.ldexp(1.0, exponent + 1 - bits)
    return np.clip(np.rint(values / spacing) * spacing, -EIGHT_BITS[name], EIGHT_BITS[name])


def _groups(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses about which key/value head serves a query head."""
    shape = maker.problem.shape

    def tiled(*names: str) -> Change:
        def repeat(a: Stages, heads: Array, name: str) -> Array:
            right = Stages.repeat(a, heads, name)
            return np.tile(heads, (1, a.shape.group, 1, 1)) if name in names else right

        return repeat

    def first(a: Stages, heads: Array, name: str) -> Array:
        return np.repeat(heads[:, :1], a.shape.heads, axis=1)

    if shape.kv_heads > 1:
        if shape.group > 1:
            yield maker.staged("heads.tiled", repeat=tiled("key", "value"))
            of_split, of_merged = orders_of_groups(shape)

            def by(order: IntArray) -> Change:
                return lambda a, context: Stages.merge(a, context[:, order])

            yield maker.staged("heads.by-group-merged", merge=by(of_merged))
            both = tiled("key", "value")
            yield maker.staged("heads.by-group-split", repeat=both, merge=by(of_split))
            yield maker.staged("heads.values-tiled", repeat=tiled("value"))
            yield maker.staged("heads.keys-tiled", repeat=tiled("key"))
        yield maker.staged("heads.first-key-value-for-all", repeat=first)
        for names in (("key",), ("value",), ("key", "value")):

            def backwards(a: Stages, heads: Array, name: str, names: Any = names) -> Array:
                return Stages.repeat(a, heads[:, ::-1] if name in names else heads, name)

            yield maker.staged("heads.reversed-in", {"of": [*names]}, repeat=backwards)


def _inputs(maker: Maker) -> Iterator[Hypothesis]:
    problem, shape = maker.problem, maker.problem.shape

    def replaced(name: str, array: Array) -> Change:
        return lambda a, other: array if other == name else getattr(a.problem, other)

    for name, source in (("value", "key"), ("key", "value"), ("key", "query"), ("query", "key")):
        one, other = getattr(problem, name), getattr(problem, source)
        if one is not other and one.shape == other.shape:
            about = {"of": name, "source": source}
            yield maker.staged("projection.of-other-input", about, input=replaced(name, other))

    def unprojected(name: str) -> Change:
        def project(a: Stages, other: str, values: Array) -> Array:
            if other != name:
                return Stages.project(a, other, values)
            return values.reshape(*values.shape[:2], *a.own[name].shape[1:])

        return project

    for name in NAMES:
        weight = maker.right.own[name]
        if weight.shape[0] == weight[0].size:
            yield maker.staged("projection.missing", {"of": name}, project=unprojected(name))
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
            first = replaced(name, _first_of(getattr(problem, name), axis=0))
            yield maker.staged("inputs.of-first-batch-entry", {"of": name}, input=first)
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
    weight = maker.right.own["score"]
    yield maker.staged("score.tanh-missing", tanh=lambda a, q, k: q[:, :, :, None] + k[:, :, None])
    yield maker.staged("score.of-difference", tanh=lambda a, q, k: Stages.tanh(a, q, -k))
    yield maker.weighed("score.weight-of-first-head", score=_first_of(weight, axis=0))
    yield maker.staged(
        "score.dot-product", score=lambda a, q, k: np.einsum("bhqd,bhkd->bhqk", q, k)
    )
