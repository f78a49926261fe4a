"""Known causes of wrong gradients when the output is right."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from conformance.causes import features, handing
from conformance.causes.hypothesis import NO_MORE, About, Best, Evidence, Maker, significant
from conformance.causes.precision import Again, coarse
from conformance.causes.scale import best_factor
from conformance.causes.stages import Change, Stages, row_of_context
from conformance.definition.dtypes import BFLOAT16, FLOAT16, Array, BoolArray
from conformance.records.phrase import NOTHING, Phrase

Backward = tuple[Phrase, Stages]
"""A cause that names a mistake in the backward pass, and the computation with that mistake."""

Arrays = dict[str, Array]

TILES = (8, 16, 32, 64, 128)


def cause(maker: Maker, evidence: Mapping[str, Evidence], again: Again, best: Best) -> None:
    """Add the causes of wrong gradients to `best`.

    `evidence` holds the evidence on each gradient by name, without the prefix "gradient.".
    """
    wrong = {name: one for name, one in evidence.items() if one.wrong.any()}
    if len(wrong) == 1:
        ((name, one),) = wrong.items()
        for own in _of_one(maker, name, one):
            if best.add(0.0, own.having(arrays=[_array(name)])):
                return
    if best.add(0.0, handing.unused_memory_in_gradients(maker, wrong)):
        return
    if best.add(0.0, _of_masked_queries(maker, evidence)):
        return
    for mistake, stages in _backward(maker):
        if not best.tries(mistake):
            continue
        found = stages.gradients
        if all(name in found for name in evidence) and _all_explained(evidence, found):
            best.add(_misfit(wrong, found), mistake)
            if best.is_found:
                return
    if best.known or best.add(0.0, _of_all(wrong)):
        return
    if best.wanted:
        single = (own for name, one in wrong.items() for own in _of_one(maker, name, one))
        any(best.add(0.0, own) for own in single)
        return
    arrays: dict[Phrase, list[str | int | float | Phrase]] = defaultdict(list)
    for name, one in wrong.items():
        known = [own for own in _of_one(maker, name, one) if best.accepts(own)]
        if not known:
            best.add(0.0, _coarse(maker, wrong, again))
            return
        arrays[known[0]].append(_array(name))
    if len(arrays) == 1 and len(evidence) > 2 and len(wrong) >= len(evidence) - 1:
        best.add(0.0, next(iter(arrays)).having(arrays=[]))
        return
    causes = [own.having(arrays=of) for own, of in arrays.items()]
    # Each of them was accepted.
    several = Phrase("gradient.several", {"causes": [*causes]})
    best.known.append((0.0, causes[0] if len(causes) == 1 else several))


def _of_masked_queries(maker: Maker, evidence: Mapping[str, Evidence]) -> Phrase:
    """Return the cause of gradients that are NaN exactly where a fully masked query contributes.

    The result is an empty phrase unless all other elements are right.
    """
    empty = ~maker.right.allowed.any(axis=-1, keepdims=True)
    if not empty.any():
        return NOTHING
    spoilt = Stages(
        maker.problem,
        d_softmax=lambda a, w, d: np.where(empty, np.nan, Stages.d_softmax(a, w, d)),
    )
    maker.share(spoilt, "weights", "context")
    found = spoilt.gradients
    for name, one in evidence.items():
        if name not in found or not np.array_equal(np.isnan(found[name]), np.isnan(one.got)):
            return NOTHING
        if not one.near(found[name])[~np.isnan(one.got)].all():
            return NOTHING
    return Phrase("backward.nan-of-masked-queries")


def _misfit(wrong: Mapping[str, Evidence], found: Mapping[str, Array]) -> float:
    """Return the rms of the wrong gradients' misfits, each in units of the rms of its noise."""
    sizes = [one.misfit(found[name]) / one.spread for name, one in wrong.items() if one.spread > 0]
    return math.sqrt(sum(size**2 for size in sizes) / max(1, len(sizes)))


def _array(name: str) -> Phrase:
    """Return the phrase that names the array to which a gradient belongs."""
    return Phrase(f"array.{name}")


def _all_explained(evidence: Mapping[str, Evidence], found: Mapping[str, Array]) -> bool:
    gain = max(one.gain(found[name]) for name, one in evidence.items())
    return all(
        one.explained(found[name], gain) if one.wrong.any() else one.near(found[name], gain).all()
        for name, one in evidence.items()
    )


def _of_all(wrong: Mapping[str, Evidence]) -> Phrase:
    """Return a cause with the limit at which gradients were clipped, if it explains all wrong ones.

    Otherwise, the result is an empty phrase.
    """
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


def _of_one(maker: Maker, name: str, one: Evidence) -> Iterator[Phrase]:
    """Yield the causes of one wrong gradient, the simplest first, without the array's name."""
    got, want, batch = one.got, one.want, maker.problem.shape.batch
    if not got.any():
        yield Phrase("gradient.missing")
        return
    if not np.isfinite(got).all():
        if name == "attn_bias" and one.near(want)[~np.isnan(got)].all():
            yield Phrase("gradient.nan")
        return
    factor = best_factor(got, want)
    # The scale is a factor of these gradients only.
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
                yield mistake
        digits = 4 if abs(factor - 1) > 1e-3 else 9
        yield Phrase("gradient.factor", {"factor": significant(factor, digits)})
    for mistake, found in _turned(want):
        if one.explained(found):
            yield mistake
    for other, found in maker.right.gradients.items():
        if other != name and found.shape == got.shape and one.explained(found):
            yield Phrase("gradient.of-other", {"array": _array(other)})
    for kind in (FLOAT16, BFLOAT16):
        if one.explained(kind.round(want)):
            yield Phrase("gradient.rounded", {"to": kind.name})


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

    def changed(mistake: str, about: About = NO_MORE, /, **stages: Change) -> Backward:
        found = Stages(problem, **stages)
        maker.share(found, "weights", "context")
        return Phrase(mistake, {**about}), found

    # The row term may be computed from the weights, or from the context, which is right here.
    rows: tuple[dict[str, Change], ...] = ({}, {"row": row_of_context})
    scale = problem.logit_scale
    for mistake, factor in (
        ("backward.without-scale", 1.0),
        ("backward.scaled-twice", scale * scale),
        ("backward.default-scale", shape.default_scale),
        ("backward.scale-inverted", 1 / scale if scale else 0.0),
    ):
        if not math.isclose(factor, scale):
            yield changed(mistake, d_scaled=lambda a, d, f=factor: d * f)

    def of_first_query(a: Stages, w: Array, d: Array) -> Array:
        return Stages.row(a, w, d)[:, :, :1]

    def of_squares(a: Stages, w: Array, d: Array) -> Array:
        return (w * w).sum(axis=-1, keepdims=True)

    yield changed("backward.softmax-detached", d_softmax=lambda a, w, d: 0 * d)
    yield changed("backward.without-row-term", row=lambda a, w, d: np.zeros_like(d[..., :1]))
    yield changed("backward.row-term-of-squares", row=of_squares)
    yield changed("backward.row-term-of-first-query", row=of_first_query)
    yield changed("backward.softmax-is-identity", d_softmax=lambda a, w, d: d - Stages.row(a, w, d))
    yield changed("backward.softmax-is-identity-without-row-term", d_softmax=lambda a, w, d: d)
    yield from features.backward(maker, changed)
    yield from handing.backward(maker, changed)
    if problem.allowed is not None:
        shown = Stages.softmax(right, right.shown)
        for row in rows:
            yield changed("backward.weights-without-mask", weights_again=lambda a: shown, **row)
    if problem.attn_bias is not None:
        plain = Stages.softmax(
            right, right.hide(right.sloped(right.capped(right.scaled(right.scores))))
        )
        for row in rows:
            yield changed("backward.weights-without-bias", weights_again=lambda a: plain, **row)
        yield from _of_bias(maker, changed)
    yield from _of_groups(maker, changed)
    yield from _of_shared(maker, changed)
    ones = np.ones_like(problem.cotangent)
    yield changed("backward.cotangent-ignored", received=lambda a: ones)
    if shape.batch > 1:
        first = np.broadcast_to(problem.cotangent[:1], problem.cotangent.shape)
        yield changed("backward.cotangent-of-first-batch-entry", received=lambda a: first)
    if shape.score == "additive":
        yield changed("backward.tanh-slope-wrong", d_tanh=lambda a, h: 1 - h)
        yield changed("backward.tanh-slope-missing", d_tanh=lambda a, h: np.ones_like(h))
    else:
        if scale and not math.isclose(scale, 1.0):
            for place, name in enumerate(("query", "key")):

                def unscaled(a: Stages, d: Array, found: Arrays, place: int = place) -> list[Array]:
                    gradients = Stages.d_score(a, d, found)
                    return [g / scale if i == place else g for i, g in enumerate(gradients)]

                yield changed("backward.without-scale-in", {"of": name}, d_score=unscaled)
        yield changed("backward.keys-for-queries", d_score=_keys_for_queries)
    yield from _of_parts(maker, changed)


def _keys_for_queries(a: Stages, d: Array, found: Arrays) -> tuple[Array, Array]:
    d_query, _ = Stages.d_score(a, d, found)
    return d_query, np.einsum("bhqk,bhqd->bhkd", d, d_query)


def _of_bias(maker: Maker, changed: Callable[..., Backward]) -> Iterator[Backward]:
    shape, scale, blocked = maker.problem.shape, maker.problem.logit_scale, ~maker.right.allowed

    def after(change: Callable[[Array], Array]) -> Change:
        """Return a stage that computes the bias gradient from a changed gradient of the logits."""
        return lambda a, d, shape: Stages.d_bias(a, change(d), shape)

    yield changed("backward.bias-scaled", d_bias=after(lambda d: d * scale))
    yield changed("backward.bias-of-blocked-is-1", d_bias=after(lambda d: d + blocked))

    def first(*axes: int) -> Change:
        def d_bias(a: Stages, d: Array, shape: tuple[int, ...]) -> Array:
            for axis in axes:
                if shape[axis] == 1:
                    d = np.take(d, [0], axis=axis)
            return Stages.d_bias(a, d, shape)

        return d_bias

    for axes, over in (
        ((0,), ["batch"]),
        ((1,), ["heads"]),
        ((0, 1), ["batch", "heads"]),
        ((2,), ["queries"]),
    ):
        yield changed("backward.bias-not-summed", {"over": [*over]}, d_bias=first(*axes))
    if shape.batch > 1:
        repeated = after(lambda d: np.broadcast_to(d[:1], d.shape))
        yield changed("backward.bias-of-first-batch-entry", d_bias=repeated)
    queries = shape.query_length
    for start in sorted({(queries - 1) // size * size for size in TILES if size < queries}):
        about = {"queries": Phrase("where.query.from", {"first": start})}
        kept = (np.arange(queries) >= start)[:, None]
        yield changed("backward.bias-of-queries", about, d_bias=after(partial(np.multiply, kept)))

    def mean(a: Stages, d: Array, shape: tuple[int, ...]) -> Array:
        axes = tuple(axis for axis, size in enumerate(shape) if size != d.shape[axis])
        return d.mean(axis=axes, keepdims=True)

    yield changed("backward.bias-averaged", d_bias=mean)


def _of_groups(maker: Maker, changed: Callable[..., Backward]) -> Iterator[Backward]:
    group = maker.problem.shape.group

    def grouped(gradient: Array) -> Array:
        return gradient.reshape(gradient.shape[0], -1, group, *gradient.shape[2:])

    mistakes: dict[str, Callable[[Array], Array]] = {
        "backward.group-first-head": lambda g: grouped(g)[:, :, 0],
        "backward.group-last-head": lambda g: grouped(g)[:, :, -1],
        "backward.group-averaged": lambda g: grouped(g).sum(axis=2) / group,
        "backward.group-tiled": lambda g: g.reshape(len(g), group, -1, *g.shape[2:]).sum(axis=1),
    }
    for names in (("key",), ("value",), ("key", "value")) if group > 1 else ():
        for mistake, other in mistakes.items():

            def gather(
                a: Stages,
                g: Array,
                name: str,
                names: tuple[str, ...] = names,
                other: Callable[[Array], Array] = other,
            ) -> Array:
                return other(g) if name in names else Stages.gather(a, g, name)

            yield changed(mistake, {"inputs": [*names]}, gather=gather)


def _of_shared(maker: Maker, changed: Callable[..., Backward]) -> Iterator[Backward]:
    sharing = maker.problem.shape.sharing

    def without(*dropped: str) -> Change:
        return lambda a, inputs: Stages.joined(
            a, {name: 0 * g if name in dropped else g for name, g in inputs.items()}
        )

    shared = {"self": ("query", "key", "value"), "memory": ("key", "value"), "separate": ()}
    for name in shared[sharing]:
        yield changed("backward.without-share", {"of": name}, joined=without(name))
    if sharing == "self":
        yield changed("backward.without-key-and-value-shares", joined=without("key", "value"))
        yield changed("backward.without-query-and-key-shares", joined=without("query", "key"))


def _of_parts(maker: Maker, changed: Callable[..., Backward]) -> Iterator[Backward]:
    """Yield backward passes that leave out queries or keys, or have mistakes of fused kernels."""
    shape, logits = maker.problem.shape, maker.right.logits
    queries, keys = np.arange(shape.query_length)[:, None], np.arange(shape.key_length)

    def without_last(a: Stages, d: Array, found: Arrays) -> tuple[Array, Array]:
        d_query, _ = Stages.d_score(a, d, {})
        return d_query, Stages.d_score(a, d * (queries < queries.size - 1), found)[1]

    yield changed("backward.key-without-last-query", d_score=without_last)
    for size in TILES:
        for mistake, at in (
            ("backward.first-keys-only", keys),
            ("backward.first-queries-only", queries),
        ):
            if size < at.size:

                def only(a: Stages, d: Array, kept: BoolArray = at < size) -> Array:
                    return Stages.d_scaled(a, d * kept)

                yield changed(mistake, {"count": size}, d_scaled=only)
    peak = logits.max(axis=-1, keepdims=True)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    total = np.exp(logits - peak).sum(axis=-1, keepdims=True)
    mistake = "backward.normaliser-without-maximum"
    for row in ({}, {"row": row_of_context}):
        yield changed(mistake, weights_again=lambda a: a.weights * np.exp(peak), **row)
    mistake = "backward.row-term-of-unnormalised-context"
    yield changed(mistake, row=lambda a, w, d: Stages.row(a, w, d) * total)
