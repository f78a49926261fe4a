"""Causes of gradients that are wrong while the output is right."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from conformance.causes.fits import best_factor
from conformance.causes.hypothesis import Best, Evidence, Maker
from conformance.causes.precision import Again, coarse
from conformance.causes.stages import Stages
from conformance.definition.dtypes import BFLOAT16, FLOAT16, Array

TILES = (8, 16, 32, 64, 128)


def cause(maker: Maker, evidence: Mapping[str, Evidence], again: Again) -> str:
    """What the gradients, by names without "gradient.", are instead; or ""."""
    wrong = {name: one for name, one in evidence.items() if one.wrong.any()}
    if not wrong:
        return ""
    if len(wrong) == 1:
        ((name, one),) = wrong.items()
        told = _of_one(maker, name, one)
        if told:
            return f"the gradient of {words(name)} {told}"
    best = Best(maker.problem.dtype)
    for told, stages in _backward(maker):
        found = stages.gradients
        if all(name in found for name in evidence) and _all_explained(evidence, found):
            best.add(_misfit(wrong, found), f"the gradients are those {told}")
            if best.is_found:
                break
    if best.known:
        return best.told
    whole = _of_all(wrong)
    if whole:
        return whole
    said: dict[str, list[str]] = defaultdict(list)
    for name, one in wrong.items():
        told = _of_one(maker, name, one)
        if not told:
            return _coarse(maker, wrong, again)
        said[told].append(words(name))
    if len(said) == 1 and len(evidence) > 2 and len(wrong) >= len(evidence) - 1:
        return f"the gradients {_number(next(iter(said)), 2)}"
    return "; ".join(
        f"the gradient{'s' if len(of) > 1 else ''} of {_listed(of)} {_number(told, len(of))}"
        for told, of in said.items()
    )


def _misfit(wrong: Mapping[str, Evidence], found: Mapping[str, Array]) -> float:
    """Of all of them, each in units of its own noise."""
    sizes = [one.misfit(found[name]) / one.spread for name, one in wrong.items() if one.spread > 0]
    return math.sqrt(sum(size**2 for size in sizes) / max(1, len(sizes)))


def words(name: str) -> str:
    """ "weights.query_bias" is the query bias, "query" the query, "weights.query" its weight."""
    if name == "attn_bias":
        return "the additive bias"
    if name.startswith("weights."):
        own = name.removeprefix("weights.").replace("_", " ")
        return f"the {own}" if own.endswith("bias") else f"the {own} weight"
    return f"the {name}"


def _listed(told: list[str]) -> str:
    return told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}"


def _number(told: str, count: int) -> str:
    return told if count == 1 else "are" + told.removeprefix("is")


def _all_explained(evidence: Mapping[str, Evidence], found: Mapping[str, Array]) -> bool:
    gain = max(one.gain(found[name]) for name, one in evidence.items())
    return all(
        one.explained(found[name], gain) if one.wrong.any() else one.near(found[name], gain).all()
        for name, one in evidence.items()
    )


def _of_all(wrong: Mapping[str, Evidence]) -> str:
    """One limit for all of them."""
    if not all(np.isfinite(one.got).all() for one in wrong.values()):
        return ""
    limit = max(float(np.abs(one.got).max()) for one in wrong.values())
    if limit > 0 and all(one.explained(np.clip(one.want, -limit, limit)) for one in wrong.values()):
        return f"the gradients are cut at ±{limit:.4g}"
    return ""


def _coarse(maker: Maker, wrong: Mapping[str, Evidence], again: Again) -> str:
    told = {
        coarse(f"gradient.{name}", one, maker.problem.dtype, again)
        for name, one in wrong.items()
        if one.got.ndim > 1
    }
    return f"the gradient {told.pop()}" if len(told) == 1 and told != {""} else ""


def _of_one(maker: Maker, name: str, one: Evidence) -> str:
    """What one gradient is instead, in words that follow its name."""
    got, want, batch = one.got, one.want, maker.problem.shape.batch
    if not got.any():
        return "is missing: 0 throughout"
    if not np.isfinite(got).all():
        if name == "attn_bias" and one.near(want)[~np.isnan(got)].all():
            return "is NaN where it should be a number"
        return ""
    factor = best_factor(got, want)
    # Of no other gradient the scale is a factor by itself.
    scale = maker.problem.logit_scale if "query" in name or "key" in name else 0.0
    if one.explained(factor * want):
        for known, told in (
            (1 / scale if scale else 0.0, "lacks the scale"),
            (scale, "has the scale applied twice"),
            (2.0, "is doubled"),
            (-1.0, "is negated"),
            (1.0 / batch, "is averaged over the batch instead of summed"),
            (float(batch), f"is {batch} times too large, as often as there are batch entries"),
        ):
            if math.isclose(factor, known, rel_tol=0.02) and one.explained(known * want):
                return told
        return f"is {factor:.{4 if abs(factor - 1) > 1e-3 else 9}g} times what it should be"
    for told, found in _turned(want):
        if one.explained(found):
            return told
    for other, found in maker.right.gradients.items():
        if other != name and found.shape == got.shape and one.explained(found):
            return f"is that of {words(other)}"
    for kind in (FLOAT16, BFLOAT16):
        if one.explained(kind.round(want)):
            return f"is rounded to {kind.name}"
    return ""


def _turned(want: Array) -> Iterator[tuple[str, Array]]:
    for matrix in (want.reshape(want.shape[0], -1), want.reshape(-1, want.shape[-1])):
        if want.ndim > 1 and matrix.shape[0] == matrix.shape[1] > 1:
            yield "is transposed", matrix.T.reshape(want.shape)
    if want.ndim == 3 and want.shape[1] > 1:
        for found in (
            want.reshape(want.shape[0], want.shape[2], want.shape[1]).swapaxes(1, 2),
            want.swapaxes(1, 2).reshape(want.shape),
        ):
            yield "has its heads interleaved", found


def _backward(maker: Maker) -> Iterator[tuple[str, Stages]]:
    """One step of the backward pass done otherwise; the simplest first."""
    problem, shape, right = maker.problem, maker.problem.shape, maker.right

    def changed(**stages: Callable[..., Any]) -> Stages:
        found = Stages(problem, **stages)
        maker.share(found, "weights", "context")
        return found

    # Made of the weights, or of the context, which is right here.
    rows: tuple[dict[str, Callable[..., Any]], ...] = ({}, {"row": _row_of_context})
    scale = problem.logit_scale
    for told, factor in (
        ("without the scale", 1.0),
        ("with the scale applied twice", scale * scale),
        ("with the default scale instead of the one asked for", shape.default_scale),
        ("with 1/scale for the scale", 1 / scale if scale else 0.0),
    ):
        if not math.isclose(factor, scale):
            yield told, changed(d_scaled=lambda a, d, f=factor: d * f)
    yield (
        "of weights that are constants: nothing goes back through the softmax",
        changed(d_softmax=lambda a, w, d: 0 * d),
    )
    yield (
        "without the row term of the softmax's derivative",
        changed(row=lambda a, w, d: np.zeros_like(d[..., :1])),
    )
    yield (
        "with the row term Σ P² for Σ P dP",
        changed(row=lambda a, w, d: (w * w).sum(axis=-1, keepdims=True)),
    )
    yield (
        "with the first query's row term for all",
        changed(row=lambda a, w, d: Stages.row(a, w, d)[:, :, :1]),
    )
    yield (
        "with the softmax's derivative taken as the identity",
        changed(d_softmax=lambda a, w, d: d - Stages.row(a, w, d)),
    )
    yield (
        "with the softmax's derivative taken as the identity, and no row term",
        changed(d_softmax=lambda a, w, d: d),
    )
    if problem.allowed is not None:
        shown = Stages.softmax(right, right.shown)
        for row in rows:
            yield (
                "with the weights made again without the mask",
                changed(weights_again=lambda a: shown, **row),
            )
    if problem.attn_bias is not None:
        plain = Stages.softmax(right, right.hide(right.scaled(right.scores)))
        for row in rows:
            yield (
                "with the weights made again without the bias",
                changed(weights_again=lambda a: plain, **row),
            )
        yield from _of_bias(maker, changed)
    yield from _of_groups(maker, changed)
    yield from _of_shared(maker, changed)
    yield (
        "of the output's sum: what comes from above is ignored",
        changed(received=lambda a: np.ones_like(a.problem.cotangent)),
    )
    if shape.batch > 1:
        cotangent = problem.cotangent
        yield (
            "with the first batch entry's gradient of the output for all",
            changed(received=lambda a: np.broadcast_to(cotangent[:1], cotangent.shape)),
        )
    if shape.score == "additive":
        yield "with 1 − tanh for the slope 1 − tanh²", changed(d_tanh=lambda a, h: 1 - h)
        yield "without the slope of tanh", changed(d_tanh=lambda a, h: np.ones_like(h))
    else:
        if scale and not math.isclose(scale, 1.0):
            for name in ("query", "key"):
                yield (
                    f"without the scale in the {name}'s gradient",
                    changed(d_score=_unscaled(name, scale)),
                )
        yield (
            "with the keys in place of the queries in the key's gradient",
            changed(d_score=_keys_for_queries),
        )
    yield from _of_parts(maker, changed)


def _of_bias(maker: Maker, changed: Callable[..., Stages]) -> Iterator[tuple[str, Stages]]:
    scale = maker.problem.logit_scale
    blocked = ~maker.right.allowed
    yield (
        "with the additive bias scaled as the scores are",
        changed(d_bias=lambda a, d, shape: Stages.d_bias(a, d * scale, shape)),
    )
    yield (
        "with a gradient of 1 for what was added to blocked logits",
        changed(d_bias=lambda a, d, shape: Stages.d_bias(a, d + blocked, shape)),
    )

    def first(*axes: int) -> Any:
        def d_bias(a: Stages, d: Array, shape: tuple[int, ...]) -> Array:
            for axis in axes:
                if shape[axis] == 1:
                    d = np.take(d, [0], axis=axis)
            return Stages.d_bias(a, d, shape) if d.shape != tuple(shape) else d

        return d_bias

    for axes, told in (
        ((0,), "batch"),
        ((1,), "heads"),
        ((0, 1), "batch and heads"),
        ((2,), "queries"),
    ):
        yield (
            f"with the gradient of the additive bias not summed over the {told}: "
            "only the first is taken",
            changed(d_bias=first(*axes)),
        )

    def of_first(a: Stages, d: Array, shape: tuple[int, ...]) -> Array:
        return Stages.d_bias(a, np.broadcast_to(d[:1], d.shape), shape)

    if maker.problem.shape.batch > 1:
        yield (
            "with the first batch entry's gradient of the additive bias for all",
            changed(d_bias=of_first),
        )

    queries = maker.problem.shape.query_length
    for start in sorted({(queries - 1) // size * size for size in TILES if size < queries}):
        kept = (np.arange(queries) >= start)[:, None]
        yield (
            f"with the gradient of the additive bias of queries {start} and later only",
            changed(d_bias=lambda a, d, shape, k=kept: Stages.d_bias(a, d * k, shape)),
        )

    def mean(a: Stages, d: Array, shape: tuple[int, ...]) -> Array:
        axes = tuple(axis for axis, size in enumerate(shape) if size != d.shape[axis])
        return d.mean(axis=axes, keepdims=True)

    yield (
        "with the gradient of the additive bias averaged where it is summed",
        changed(d_bias=mean),
    )


def _of_groups(maker: Maker, changed: Callable[..., Stages]) -> Iterator[tuple[str, Stages]]:
    shape = maker.problem.shape
    group = shape.group
    if group == 1:
        return

    def only(names: tuple[str, ...], other: Callable[[Array], Array]) -> Any:
        return lambda a, g, name: other(g) if name in names else Stages.gather(a, g, name)

    def tiled(g: Array) -> Array:
        return g.reshape(g.shape[0], group, -1, *g.shape[2:]).sum(axis=1)

    for names, told in (
        (("key",), "key"),
        (("value",), "value"),
        (("key", "value"), "key and value"),
    ):
        of = f"with the {told} gradient"
        yield (
            f"{of} of the first query head of each group only",
            changed(gather=only(names, lambda g: g[:, ::group])),
        )
        yield (
            f"{of} of the last query head of each group only",
            changed(gather=only(names, lambda g: g[:, group - 1 :: group])),
        )
        yield (
            f"{of} averaged over each group instead of summed",
            changed(
                gather=lambda a, g, name, n=names: (
                    Stages.gather(a, g, name) / (group if name in n else 1)
                )
            ),
        )
        yield (
            f"{of} summed over heads as if they had been tiled",
            changed(gather=only(names, tiled)),
        )


def _of_shared(maker: Maker, changed: Callable[..., Stages]) -> Iterator[tuple[str, Stages]]:
    sharing = maker.problem.shape.sharing
    if sharing == "separate":
        return

    def without(dropped: str) -> Any:
        def joined(a: Stages, inputs: dict[str, Array]) -> dict[str, Array]:
            return Stages.joined(a, {n: 0 * g if n == dropped else g for n, g in inputs.items()})

        return joined

    names = ("query", "key", "value") if sharing == "self" else ("key", "value")
    for name in names:
        yield (
            f"without the {name}'s share of the gradient of their common input",
            changed(joined=without(name)),
        )
    if sharing == "self":
        yield (
            "without the shares of key and value in the gradient of their common input",
            changed(joined=lambda a, inputs: {"query": inputs["query"]}),
        )
        yield (
            "without the shares of query and key in the gradient of their common input",
            changed(joined=lambda a, inputs: {"query": inputs["value"]}),
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


def _of_parts(maker: Maker, changed: Callable[..., Stages]) -> Iterator[tuple[str, Stages]]:
    """Queries or keys that the backward pass leaves out; and mistakes of fused kernels."""
    shape, right = maker.problem.shape, maker.right
    queries, keys = shape.query_length, shape.key_length

    def without_last(a: Stages, d: Array, found: dict[str, Array]) -> tuple[Array, Array]:
        d_query, _ = Stages.d_score(a, d, {})
        last = (np.arange(queries) < queries - 1)[:, None]
        return d_query, Stages.d_score(a, d * last, found)[1]

    yield "without the last query in the key's gradient", changed(d_score=without_last)
    for size in TILES:
        if size < keys:
            kept = np.arange(keys) < size
            yield (
                f"of the first {size} keys only: the backward pass ends after one tile",
                changed(d_scaled=lambda a, d, k=kept: Stages.d_scaled(a, d * k)),
            )
        if size < queries:
            rows = (np.arange(queries) < size)[:, None]
            yield (
                f"of the first {size} queries only: the backward pass ends after one tile",
                changed(d_scaled=lambda a, d, k=rows: Stages.d_scaled(a, d * k)),
            )
    logits = right.logits
    peak = logits.max(axis=-1, keepdims=True)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    total = np.exp(logits - peak).sum(axis=-1, keepdims=True)
    for row in ({}, {"row": _row_of_context}):
        yield (
            "with weights made again from a normaliser that lacks the maximum",
            changed(weights_again=lambda a: a.weights * np.exp(peak), **row),
        )
    yield (
        "with the row term of a context that was not divided by the normaliser",
        changed(row=lambda a, w, d: Stages.row(a, w, d) * total),
    )
