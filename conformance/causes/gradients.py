"""Known causes of wrong gradients when the output is right."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from conformance.causes.hypothesis import NO_MORE, About, Best, Evidence, Maker, significant
from conformance.causes.precision import Again, coarse
from conformance.causes.scale import best_factor
from conformance.causes.stages import Stages
from conformance.definition.dtypes import BFLOAT16, FLOAT16, Array
from conformance.records.phrase import NOTHING, Phrase

Backward = tuple[Phrase, Stages]
"""A mistake of the backward pass, and the computation that makes it."""

TILES = (8, 16, 32, 64, 128)


def cause(maker: Maker, evidence: Mapping[str, Evidence], again: Again) -> Phrase:
    """Return what the gradients, by names without "gradient.", are instead; or nothing."""
    wrong = {name: one for name, one in evidence.items() if one.wrong.any()}
    if not wrong:
        return NOTHING
    if len(wrong) == 1:
        ((name, one),) = wrong.items()
        own = _of_one(maker, name, one)
        if own:
            return own.having(arrays=[_array(name)])
    best = Best(maker.problem.dtype)
    for mistake, stages in _backward(maker):
        found = stages.gradients
        if all(name in found for name in evidence) and _all_explained(evidence, found):
            best.add(_misfit(wrong, found), mistake)
            if best.is_found:
                break
    if best.known:
        return best.cause
    whole = _of_all(wrong)
    if whole:
        return whole
    arrays: dict[Phrase, list[str | int | float | Phrase]] = defaultdict(list)
    for name, one in wrong.items():
        own = _of_one(maker, name, one)
        if not own:
            return _coarse(maker, wrong, again)
        arrays[own].append(_array(name))
    if len(arrays) == 1 and len(evidence) > 2 and len(wrong) >= len(evidence) - 1:
        return next(iter(arrays)).having(arrays=[])
    several = [own.having(arrays=of) for own, of in arrays.items()]
    return several[0] if len(several) == 1 else Phrase("gradient.several", {"causes": [*several]})


def _misfit(wrong: Mapping[str, Evidence], found: Mapping[str, Array]) -> float:
    """Return the misfit over all gradients, each in units of its own noise."""
    sizes = [one.misfit(found[name]) / one.spread for name, one in wrong.items() if one.spread > 0]
    return math.sqrt(sum(size**2 for size in sizes) / max(1, len(sizes)))


def _array(name: str) -> Phrase:
    """Return the name of an array of which there is a gradient."""
    return Phrase(f"array.{name}")


def _all_explained(evidence: Mapping[str, Evidence], found: Mapping[str, Array]) -> bool:
    gain = max(one.gain(found[name]) for name, one in evidence.items())
    return all(
        one.explained(found[name], gain) if one.wrong.any() else one.near(found[name], gain).all()
        for name, one in evidence.items()
    )


def _of_all(wrong: Mapping[str, Evidence]) -> Phrase:
    """Return the limit to which all gradients were clipped, if one limit explains them all."""
    if not all(np.isfinite(one.got).all() for one in wrong.values()):
        return NOTHING
    limit = max(float(np.abs(one.got).max()) for one in wrong.values())
    if limit > 0 and all(one.explained(np.clip(one.want, -limit, limit)) for one in wrong.values()):
        return Phrase("gradient.cut", {"limit": significant(limit)})
    return NOTHING


def _coarse(maker: Maker, wrong: Mapping[str, Evidence], again: Again) -> Phrase:
    classes = {
        coarse(f"gradient.{name}", one, maker.problem.dtype, again)
        for name, one in wrong.items()
        if one.got.ndim > 1
    }
    if len(classes) != 1 or not (accuracy := classes.pop()):
        return NOTHING
    return Phrase("gradient.accuracy", {"accuracy": accuracy})


def _of_one(maker: Maker, name: str, one: Evidence) -> Phrase:
    """Return what one gradient equals instead; the caller adds the name of its array."""
    got, want, batch = one.got, one.want, maker.problem.shape.batch
    if not got.any():
        return Phrase("gradient.missing")
    if not np.isfinite(got).all():
        if name == "attn_bias" and one.near(want)[~np.isnan(got)].all():
            return Phrase("gradient.nan")
        return NOTHING
    factor = best_factor(got, want)
    # Of no other gradient the scale is a factor by itself.
    scale = maker.problem.logit_scale if "query" in name or "key" in name else 0.0
    if one.explained(factor * want):
        for known, mistake in (
            (1 / scale if scale else 0.0, Phrase("gradient.without-scale")),
            (scale, Phrase("gradient.scaled-twice")),
            (2.0, Phrase("gradient.doubled")),
            (-1.0, Phrase("gradient.negated")),
            (1.0 / batch, Phrase("gradient.averaged-over-batch")),
            (float(batch), Phrase("gradient.times-batch", {"batch": batch})),
        ):
            if math.isclose(factor, known, rel_tol=0.02) and one.explained(known * want):
                return mistake
        digits = 4 if abs(factor - 1) > 1e-3 else 9
        return Phrase("gradient.factor", {"factor": significant(factor, digits)})
    for mistake, found in _turned(want):
        if one.explained(found):
            return mistake
    for other, found in maker.right.gradients.items():
        if other != name and found.shape == got.shape and one.explained(found):
            return Phrase("gradient.of-other", {"array": _array(other)})
    for kind in (FLOAT16, BFLOAT16):
        if one.explained(kind.round(want)):
            return Phrase("gradient.rounded", {"to": kind.name})
    return NOTHING


def _turned(want: Array) -> Iterator[tuple[Phrase, Array]]:
    for matrix in (want.reshape(want.shape[0], -1), want.reshape(-1, want.shape[-1])):
        if want.ndim > 1 and matrix.shape[0] == matrix.shape[1] > 1:
            yield Phrase("gradient.transposed"), matrix.T.reshape(want.shape)
    if want.ndim == 3 and want.shape[1] > 1:
        for found in (
            want.reshape(want.shape[0], want.shape[2], want.shape[1]).swapaxes(1, 2),
            want.swapaxes(1, 2).reshape(want.shape),
        ):
            yield Phrase("gradient.heads-interleaved"), found


def _backward(maker: Maker) -> Iterator[Backward]:
    """Yield backward passes with one step done differently, the simplest first."""
    problem, shape, right = maker.problem, maker.problem.shape, maker.right

    def changed(mistake: str, about: About = NO_MORE, /, **stages: Callable[..., Any]) -> Backward:
        found = Stages(problem, **stages)
        maker.share(found, "weights", "context")
        return Phrase(mistake, {**about}), found

    # Made of the weights, or of the context, which is right here.
    rows: tuple[dict[str, Callable[..., Any]], ...] = ({}, {"row": _row_of_context})
    scale = problem.logit_scale
    for mistake, factor in (
        ("backward.without-scale", 1.0),
        ("backward.scaled-twice", scale * scale),
        ("backward.default-scale", shape.default_scale),
        ("backward.scale-inverted", 1 / scale if scale else 0.0),
    ):
        if not math.isclose(factor, scale):
            yield changed(mistake, d_scaled=lambda a, d, f=factor: d * f)
    yield changed("backward.softmax-detached", d_softmax=lambda a, w, d: 0 * d)
    yield changed("backward.without-row-term", row=lambda a, w, d: np.zeros_like(d[..., :1]))
    yield changed(
        "backward.row-term-of-squares", row=lambda a, w, d: (w * w).sum(axis=-1, keepdims=True)
    )
    yield changed(
        "backward.row-term-of-first-query", row=lambda a, w, d: Stages.row(a, w, d)[:, :, :1]
    )
    yield changed("backward.softmax-is-identity", d_softmax=lambda a, w, d: d - Stages.row(a, w, d))
    yield changed("backward.softmax-is-identity-without-row-term", d_softmax=lambda a, w, d: d)
    if problem.allowed is not None:
        shown = Stages.softmax(right, right.shown)
        for row in rows:
            yield changed("backward.weights-without-mask", weights_again=lambda a: shown, **row)
    if problem.attn_bias is not None:
        plain = Stages.softmax(right, right.hide(right.scaled(right.scores)))
        for row in rows:
            yield changed("backward.weights-without-bias", weights_again=lambda a: plain, **row)
        yield from _of_bias(maker, changed)
    yield from _of_groups(maker, changed)
    yield from _of_shared(maker, changed)
    yield changed(
        "backward.cotangent-ignored", received=lambda a: np.ones_like(a.problem.cotangent)
    )
    if shape.batch > 1:
        cotangent = problem.cotangent
        yield changed(
            "backward.cotangent-of-first-batch-entry",
            received=lambda a: np.broadcast_to(cotangent[:1], cotangent.shape),
        )
    if shape.score == "additive":
        yield changed("backward.tanh-slope-wrong", d_tanh=lambda a, h: 1 - h)
        yield changed("backward.tanh-slope-missing", d_tanh=lambda a, h: np.ones_like(h))
    else:
        if scale and not math.isclose(scale, 1.0):
            for name in ("query", "key"):
                yield changed(
                    "backward.without-scale-in", {"of": name}, d_score=_unscaled(name, scale)
                )
        yield changed("backward.keys-for-queries", d_score=_keys_for_queries)
    yield from _of_parts(maker, changed)


def _of_bias(maker: Maker, changed: Callable[..., Backward]) -> Iterator[Backward]:
    scale = maker.problem.logit_scale
    blocked = ~maker.right.allowed
    yield changed(
        "backward.bias-scaled", d_bias=lambda a, d, shape: Stages.d_bias(a, d * scale, shape)
    )
    yield changed(
        "backward.bias-of-blocked-is-1",
        d_bias=lambda a, d, shape: Stages.d_bias(a, d + blocked, shape),
    )

    def first(*axes: int) -> Any:
        def d_bias(a: Stages, d: Array, shape: tuple[int, ...]) -> Array:
            for axis in axes:
                if shape[axis] == 1:
                    d = np.take(d, [0], axis=axis)
            return Stages.d_bias(a, d, shape) if d.shape != tuple(shape) else d

        return d_bias

    for axes, over in (
        ((0,), ["batch"]),
        ((1,), ["heads"]),
        ((0, 1), ["batch", "heads"]),
        ((2,), ["queries"]),
    ):
        yield changed("backward.bias-not-summed", {"over": [*over]}, d_bias=first(*axes))

    def of_first(a: Stages, d: Array, shape: tuple[int, ...]) -> Array:
        return Stages.d_bias(a, np.broadcast_to(d[:1], d.shape), shape)

    if maker.problem.shape.batch > 1:
        yield changed("backward.bias-of-first-batch-entry", d_bias=of_first)

    queries = maker.problem.shape.query_length
    for start in sorted({(queries - 1) // size * size for size in TILES if size < queries}):
        kept = (np.arange(queries) >= start)[:, None]
        yield changed(
            "backward.bias-of-queries",
            {"queries": Phrase("where.query.from", {"first": start})},
            d_bias=lambda a, d, shape, k=kept: Stages.d_bias(a, d * k, shape),
        )

    def mean(a: Stages, d: Array, shape: tuple[int, ...]) -> Array:
        axes = tuple(axis for axis, size in enumerate(shape) if size != d.shape[axis])
        return d.mean(axis=axes, keepdims=True)

    yield changed("backward.bias-averaged", d_bias=mean)


def _of_groups(maker: Maker, changed: Callable[..., Backward]) -> Iterator[Backward]:
    shape = maker.problem.shape
    group = shape.group
    if group == 1:
        return

    def only(names: tuple[str, ...], other: Callable[[Array], Array]) -> Any:
        return lambda a, g, name: other(g) if name in names else Stages.gather(a, g, name)

    def tiled(g: Array) -> Array:
        return g.reshape(g.shape[0], group, -1, *g.shape[2:]).sum(axis=1)

    for names in (("key",), ("value",), ("key", "value")):
        of: About = {"inputs": [*names]}
        yield changed("backward.group-first-head", of, gather=only(names, lambda g: g[:, ::group]))
        yield changed(
            "backward.group-last-head", of, gather=only(names, lambda g: g[:, group - 1 :: group])
        )
        yield changed(
            "backward.group-averaged",
            of,
            gather=lambda a, g, name, n=names: (
                Stages.gather(a, g, name) / (group if name in n else 1)
            ),
        )
        yield changed("backward.group-tiled", of, gather=only(names, tiled))


def _of_shared(maker: Maker, changed: Callable[..., Backward]) -> Iterator[Backward]:
    sharing = maker.problem.shape.sharing
    if sharing == "separate":
        return

    def without(dropped: str) -> Any:
        def joined(a: Stages, inputs: dict[str, Array]) -> dict[str, Array]:
            return Stages.joined(a, {n: 0 * g if n == dropped else g for n, g in inputs.items()})

        return joined

    names = ("query", "key", "value") if sharing == "self" else ("key", "value")
    for name in names:
        yield changed("backward.without-share", {"of": name}, joined=without(name))
    if sharing == "self":
        yield changed(
            "backward.without-key-and-value-shares",
            joined=lambda a, inputs: {"query": inputs["query"]},
        )
        yield changed(
            "backward.without-query-and-key-shares",
            joined=lambda a, inputs: {"query": inputs["value"]},
        )


def _row_of_context(a: Stages, weights: Array, d_weights: Array) -> Array:
    return (a.d_context * a.context).sum(axis=-1, keepdims=True)


def _unscaled(name: str, scale: float) -> Callable[..., tuple[Array, Array]]:
    def d_score(a: Stages, d: Array, found: dict[str, Array]) -> tuple[Array, Array]:
        d_query, d_key = Stages.d_score(a, d, found)
        return (d_query / scale, d_key) if name == "query" else (d_query, d_key / scale)

    return d_score


def _keys_for_queries(a: Stages, d: Array, found: dict[str, Array]) -> tuple[Array, Array]:
    d_query, _ = Stages.d_score(a, d, found)
    return d_query, np.einsum("bhqk,bhqd->bhkd", d, d_query)


def _of_parts(maker: Maker, changed: Callable[..., Backward]) -> Iterator[Backward]:
    """Yield backward passes that leave out queries or keys, and mistakes of fused kernels."""
    shape, right = maker.problem.shape, maker.right
    queries, keys = shape.query_length, shape.key_length

    def without_last(a: Stages, d: Array, found: dict[str, Array]) -> tuple[Array, Array]:
        d_query, _ = Stages.d_score(a, d, {})
        last = (np.arange(queries) < queries - 1)[:, None]
        return d_query, Stages.d_score(a, d * last, found)[1]

    yield changed("backward.key-without-last-query", d_score=without_last)
    for size in TILES:
        if size < keys:
            kept = np.arange(keys) < size
            yield changed(
                "backward.first-keys-only",
                {"count": size},
                d_scaled=lambda a, d, k=kept: Stages.d_scaled(a, d * k),
            )
        if size < queries:
            rows = (np.arange(queries) < size)[:, None]
            yield changed(
                "backward.first-queries-only",
                {"count": size},
                d_scaled=lambda a, d, k=rows: Stages.d_scaled(a, d * k),
            )
    logits = right.logits
    peak = logits.max(axis=-1, keepdims=True)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    total = np.exp(logits - peak).sum(axis=-1, keepdims=True)
    for row in ({}, {"row": _row_of_context}):
        yield changed(
            "backward.normaliser-without-maximum",
            weights_again=lambda a: a.weights * np.exp(peak),
            **row,
        )
    yield changed(
        "backward.row-term-of-unnormalised-context", row=lambda a, w, d: Stages.row(a, w, d) * total
    )
