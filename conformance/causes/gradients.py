"""Known causes of wrong gradients when the output is right."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from conformance.causes.features import but_for
from conformance.causes.handing import PARTS, all_nan, names_of
from conformance.causes.hypothesis import (
    BETTER,
    NO_MORE,
    About,
    Best,
    Evidence,
    Hypothesis,
    Maker,
    significant,
)
from conformance.causes.location import indices
from conformance.causes.logits import best_factor, unasked_alignments
from conformance.causes.precision import Again, coarse
from conformance.causes.softmax import MOST_OTHERWISE, made_otherwise
from conformance.causes.stages import Change, Stages
from conformance.definition.dtypes import BFLOAT16, FLOAT16, Array, BoolArray
from conformance.definition.features import FEATURES, OF_LOGITS
from conformance.records.findings import NOTHING, Phrase

Arrays = dict[str, Array]

TILES = (8, 16, 32, 64, 128)

LOW = 40.0
"""A finite number for blocked logits, so low that gradients are proportional to their weights."""


def cause(maker: Maker, evidence: Mapping[str, Evidence], again: Again, best: Best) -> None:
    """Add causes that explain wrong gradients to `best`.

    `evidence` holds the evidence on each gradient by name, without the prefix "gradient.". `again`
    returns the errors of the answer to perturbed inputs, as for `precision.coarse`.
    """
    wrong = {name: one for name, one in evidence.items() if one.wrong.any()}
    if len(wrong) == 1:
        ((name, one),) = wrong.items()
        array = Phrase(f"array.{name}")
        if any(best.add(0.0, own.having(arrays=[array])) for own in _of_one(maker, name, one)):
            return
    if all_nan(maker, wrong.values()) and best.add(0.0, Phrase("backward.unused-memory-read")):
        return
    if best.add(0.0, _of_masked_queries(maker, evidence)):
        return
    if best.add(0.0, _of_finite_logits(maker, evidence)):
        return
    for hypothesis in filter(lambda one: best.tries(one.cause), hypotheses(maker)):
        found = hypothesis.make().gradients
        if evidence.keys() <= found.keys() and _all_explained(evidence, found):
            best.add(_misfit(wrong, found), hypothesis.cause)
            if best.is_found:
                return
    if best.known or best.add(0.0, _of_all(wrong)):
        return
    if best.add(0.0, _made_otherwise(maker, evidence, best)):
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
        arrays[known[0]].append(Phrase(f"array.{name}"))
    if len(arrays) == 1 and len(evidence) > 2 and len(wrong) >= len(evidence) - 1:
        best.add(0.0, next(iter(arrays)).having(arrays=[]))
        return
    causes = [own.having(arrays=of) for own, of in arrays.items()]
    # Each of them was accepted.
    several = Phrase("gradient.several", {"causes": [*causes]})
    best.known.append((0.0, causes[0] if len(causes) == 1 else several))


def _of_masked_queries(maker: Maker, evidence: Mapping[str, Evidence]) -> Phrase:
    """Return a cause if gradients are NaN exactly where fully masked queries could make them NaN.

    All other elements must equal the prediction up to noise. Otherwise, and if no query is fully
    masked, the result is an empty phrase.
    """
    empty = ~maker.right.allowed.any(axis=-1, keepdims=True)
    if not empty.any():
        return NOTHING
    cause = "backward.nan-of-masked-queries"
    spoilt = (
        maker.staged(
            cause, d_softmax=lambda a, w, d: np.where(empty, np.nan, Stages.d_softmax(a, w, d))
        ),
        # Weights that are made again are also those of the gradient of the values.
        maker.staged(cause, weights_again=lambda a: np.where(empty, np.nan, a.weights)),
    )
    return next((each.cause for each in spoilt if _has_same_nan(each, evidence)), NOTHING)


def _has_same_nan(hypothesis: Hypothesis, evidence: Mapping[str, Evidence]) -> bool:
    """Return whether gradients are NaN where the predicted ones are, and equal them elsewhere."""
    found = hypothesis.make().gradients
    return all(
        name in found
        and np.array_equal(np.isnan(found[name]), np.isnan(one.got))
        and one.near(found[name])[~np.isnan(one.got)].all()
        for name, one in evidence.items()
    )


def _of_finite_logits(maker: Maker, evidence: Mapping[str, Evidence]) -> Phrase:
    """Return a cause if blocked logits are finite, but too low to be noticed in the output.

    Keys that all queries block then get gradients that should be 0. These are proportional to their
    weights, so one number for the blocked logits predicts those for every other number. Everything
    else must be right; otherwise, the result is an empty phrase.
    """
    allowed = maker.right.allowed
    zeros = {name: (one.want == 0) & (one.noise == 0) for name, one in evidence.items()}
    if any((one.wrong & ~zeros[name]).any() for name, one in evidence.items()):
        return NOTHING
    got = np.concatenate([one.got[zeros[name]] for name, one in evidence.items()])
    if not got.any() or not np.isfinite(got).all():
        return NOTHING

    def not_passed_on(a: Stages, d: Array) -> Array:
        return Stages.d_scaled(a, np.where(allowed, d, 0.0))

    replaced: Change = lambda a, x: np.where(allowed, x, -LOW)  # noqa: E731
    lowered: Change = lambda a, x: np.where(allowed, x, x - LOW)  # noqa: E731
    for cause, about, sign, stages in (
        ("mask.blocked-set", "number", 1.0, {"hide": replaced, "d_scaled": not_passed_on}),
        ("mask.blocked-lowered", "by", -1.0, {"hide": lowered}),
    ):
        gradients = maker.staged(cause, **stages).make().gradients
        if not evidence.keys() <= gradients.keys():
            continue
        found = np.concatenate([gradients[name][at] for name, at in zeros.items()])
        factor = best_factor(got, found)
        left = ((got - factor * found) ** 2).sum()
        if factor > 0 and left <= BETTER**2 * (got**2).sum():
            number = sign * (math.log(factor) - LOW)
            return Phrase(cause, {about: significant(number, 3)})
    return NOTHING


def _misfit(wrong: Mapping[str, Evidence], found: Mapping[str, Array]) -> float:
    """Return how badly the predicted gradients `found` fit the wrong gradients.

    The result is an rms over the wrong gradients; the misfit of each is divided by the rms of its
    noise. Gradients without noise are left out; if none remains, the result is 0.
    """
    sizes = [one.misfit(found[name]) / one.spread for name, one in wrong.items() if one.spread > 0]
    return math.sqrt(sum(size**2 for size in sizes) / max(1, len(sizes)))


def _all_explained(evidence: Mapping[str, Evidence], found: Mapping[str, Array]) -> bool:
    gain = max(one.gain(found[name]) for name, one in evidence.items())
    return all(
        one.explained(found[name], gain) if one.wrong.any() else one.near(found[name], gain).all()
        for name, one in evidence.items()
    )


def _of_all(wrong: Mapping[str, Evidence]) -> Phrase:
    """Return the cause "gradient.cut" if clipping at one limit explains all wrong gradients.

    Otherwise, the result is an empty phrase.
    """
    if not all(np.isfinite(one.got).all() for one in wrong.values()):
        return NOTHING
    limit = max(float(np.abs(one.got).max()) for one in wrong.values())
    if limit > 0 and all(one.explained(np.clip(one.want, -limit, limit)) for one in wrong.values()):
        return Phrase("gradient.cut", {"limit": significant(limit)})
    return NOTHING


def _made_otherwise(maker: Maker, evidence: Mapping[str, Evidence], best: Best) -> Phrase:
    """Return a cause if the weights that are made again have a mistake of the forward pass.

    Otherwise, and if there are too many weights to try that, the result is an empty phrase.
    """
    cause = "backward.weights-otherwise"
    if maker.right.weights.size > MOST_OTHERWISE or not best.tries(Phrase(cause)):
        return NOTHING
    for mistake, weights in made_otherwise(maker):
        about = {"mistake": mistake}
        for hypothesis in _recomputed(maker, cause, lambda a, w=weights: w, about):
            found = hypothesis.make().gradients
            if evidence.keys() <= found.keys() and _all_explained(evidence, found):
                return hypothesis.cause
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
    """Yield the causes that explain one wrong gradient, the simplest first.

    The arguments of these causes do not include `name`, the name of the gradient.
    """
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
            yield Phrase("gradient.of-other", {"array": Phrase(f"array.{other}")})
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


# Backward passes


def hypotheses(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses in which a step of the backward pass is wrong, the simplest first."""
    problem, shape, right = maker.problem, maker.problem.shape, maker.right
    yield from _of_scale_and_softmax(maker)
    if problem.soft_cap is not None:
        yield from _of_cap(maker)
    if problem.sinks is not None:
        yield from _of_sinks(maker)
    if problem.rotary is not None:
        yield from _of_rotary(maker)
    if problem.norm is not None:
        yield from _of_norm(maker)
    yield from _without_features(maker)
    yield from _of_stored_tokens(maker)
    if problem.allowed is not None:
        shown = right.softmax(right.shown)
        yield from _recomputed(maker, "backward.weights-without-mask", lambda a: shown)
    for alignment in unasked_alignments(problem):
        masked = maker.asked("", causal=alignment).make().weights
        cause = "backward.weights-causal-unasked"
        yield from _recomputed(maker, cause, lambda a, weights=masked: weights)
    if problem.attn_bias is not None:
        plain = right.softmax(right.hide(right.sloped(right.capped(right.scaled(right.scores)))))
        yield from _recomputed(maker, "backward.weights-without-bias", lambda a: plain)
        yield from _of_bias(maker)
    yield from _of_groups(maker)
    yield from _of_shared(maker)
    ones = np.ones_like(problem.cotangent)
    yield maker.staged("backward.cotangent-ignored", received=lambda a: ones)
    if shape.batch > 1:
        first = np.broadcast_to(problem.cotangent[:1], problem.cotangent.shape)
        yield maker.staged("backward.cotangent-of-first-batch-entry", received=lambda a: first)
    yield from _of_score(maker)
    yield from _of_parts(maker)


def _recomputed(
    maker: Maker, cause: str, weights: Change, about: About = NO_MORE
) -> Iterator[Hypothesis]:
    """Yield two hypotheses whose backward pass uses the wrong weights that `weights` returns.

    They differ in the row term of the softmax derivative, a sum over the keys: the first computes
    it from these weights and the second, as flash attention does, from the right context.
    """
    yield maker.staged(cause, about, weights_again=weights)
    yield maker.staged(
        cause,
        about,
        weights_again=weights,
        row=lambda a, w, d: (a.d_context * a.context).sum(axis=-1, keepdims=True),
    )


def _of_scale_and_softmax(maker: Maker) -> Iterator[Hypothesis]:
    scale = maker.problem.logit_scale
    for cause, factor in (
        ("backward.without-scale", 1.0),
        ("backward.scaled-twice", scale * scale),
        ("backward.default-scale", maker.problem.shape.default_scale),
        ("backward.scale-inverted", 1 / scale if scale else 0.0),
    ):
        if not math.isclose(factor, scale):
            yield maker.staged(cause, d_scaled=lambda a, d, f=factor: d * f)
    yield maker.staged("backward.softmax-detached", d_softmax=lambda a, w, d: 0 * d)
    rows: dict[str, Change] = {
        "backward.without-row-term": lambda a, w, d: np.zeros_like(d[..., :1]),
        "backward.row-term-of-squares": lambda a, w, d: (w * w).sum(axis=-1, keepdims=True),
        "backward.row-term-of-first-query": lambda a, w, d: Stages.row(a, w, d)[:, :, :1],
    }
    for cause, row in rows.items():
        yield maker.staged(cause, row=row)
    identity = "backward.softmax-is-identity"
    yield maker.staged(identity, d_softmax=lambda a, w, d: d - Stages.row(a, w, d))
    yield maker.staged(f"{identity}-without-row-term", d_softmax=lambda a, w, d: d)


def _of_score(maker: Maker) -> Iterator[Hypothesis]:
    scale = maker.problem.logit_scale
    if maker.problem.shape.score == "additive":
        yield maker.staged("backward.tanh-slope-wrong", d_tanh=lambda a, h: 1 - h)
        yield maker.staged("backward.tanh-slope-missing", d_tanh=lambda a, h: np.ones_like(h))
        return

    def unscaled(place: int) -> Change:
        def d_score(a: Stages, d: Array, found: Arrays) -> list[Array]:
            gradients = Stages.d_score(a, d, found)
            return [g / scale if i == place else g for i, g in enumerate(gradients)]

        return d_score

    def keys_for_queries(a: Stages, d: Array, found: Arrays) -> tuple[Array, Array]:
        d_query, _ = Stages.d_score(a, d, found)
        return d_query, np.einsum("bhqk,bhqd->bhkd", d, d_query)

    if scale and not math.isclose(scale, 1.0):
        for place, name in enumerate(("query", "key")):
            yield maker.staged("backward.without-scale-in", {"of": name}, d_score=unscaled(place))
    yield maker.staged("backward.keys-for-queries", d_score=keys_for_queries)


def _of_bias(maker: Maker) -> Iterator[Hypothesis]:
    shape, scale, blocked = maker.problem.shape, maker.problem.logit_scale, ~maker.right.allowed

    def after(change: Callable[[Array], Array]) -> Change:
        """Return a stage that computes the bias gradient from a changed gradient of the logits."""
        return lambda a, d, shape: Stages.d_bias(a, change(d), shape)

    yield maker.staged("backward.bias-scaled", d_bias=after(lambda d: d * scale))
    yield maker.staged("backward.bias-of-blocked-is-1", d_bias=after(lambda d: d + blocked))

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
        yield maker.staged("backward.bias-not-summed", {"over": [*over]}, d_bias=first(*axes))
    if shape.batch > 1:
        repeated = after(lambda d: np.broadcast_to(d[:1], d.shape))
        yield maker.staged("backward.bias-of-first-batch-entry", d_bias=repeated)
    queries = shape.query_length
    for start in sorted({(queries - 1) // size * size for size in TILES if size < queries}):
        about = {"queries": Phrase("where.query.from", {"first": start})}
        kept = after(partial(np.multiply, (np.arange(queries) >= start)[:, None]))
        yield maker.staged("backward.bias-of-queries", about, d_bias=kept)

    def mean(a: Stages, d: Array, shape: tuple[int, ...]) -> Array:
        axes = tuple(axis for axis, size in enumerate(shape) if size != d.shape[axis])
        return d.mean(axis=axes, keepdims=True)

    yield maker.staged("backward.bias-averaged", d_bias=mean)


def _of_groups(maker: Maker) -> Iterator[Hypothesis]:
    group = maker.problem.shape.group

    def grouped(gradient: Array) -> Array:
        return gradient.reshape(gradient.shape[0], -1, group, *gradient.shape[2:])

    def gathered(names: tuple[str, ...], other: Callable[[Array], Array]) -> Change:
        return lambda a, g, name: other(g) if name in names else Stages.gather(a, g, name)

    mistakes: dict[str, Callable[[Array], Array]] = {
        "backward.group-first-head": lambda g: grouped(g)[:, :, 0],
        "backward.group-last-head": lambda g: grouped(g)[:, :, -1],
        "backward.group-averaged": lambda g: grouped(g).sum(axis=2) / group,
        "backward.group-tiled": lambda g: g.reshape(len(g), group, -1, *g.shape[2:]).sum(axis=1),
    }
    for names in (("key",), ("value",), ("key", "value")) if group > 1 else ():
        for cause, other in mistakes.items():
            yield maker.staged(cause, {"inputs": [*names]}, gather=gathered(names, other))


def _of_shared(maker: Maker) -> Iterator[Hypothesis]:
    sharing = maker.problem.shape.sharing

    def without(*dropped: str) -> Change:
        return lambda a, inputs: Stages.joined(
            a, {name: 0 * g if name in dropped else g for name, g in inputs.items()}
        )

    shared = {"self": ("query", "key", "value"), "memory": ("key", "value"), "separate": ()}
    for name in shared[sharing]:
        yield maker.staged("backward.without-share", {"of": name}, joined=without(name))
    if sharing == "self":
        both = without("key", "value")
        yield maker.staged("backward.without-key-and-value-shares", joined=both)
        both = without("query", "key")
        yield maker.staged("backward.without-query-and-key-shares", joined=both)


def _of_parts(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses whose backward pass leaves out tokens, or normalises rows wrongly."""
    shape, logits = maker.problem.shape, maker.right.logits
    queries, keys = np.arange(shape.query_length)[:, None], np.arange(shape.key_length)

    def without_last(a: Stages, d: Array, found: Arrays) -> tuple[Array, Array]:
        d_query, _ = Stages.d_score(a, d, {})
        return d_query, Stages.d_score(a, d * (queries < queries.size - 1), found)[1]

    def only(kept: BoolArray) -> Change:
        return lambda a, d: Stages.d_scaled(a, d * kept)

    def of_keys(first: int, end: int) -> Change:
        def d_score(a: Stages, d: Array, found: Arrays) -> tuple[Array, Array]:
            kept = (keys >= first) & (keys < end)
            return Stages.d_score(a, d * kept, {})[0], Stages.d_score(a, d, found)[1]

        return d_score

    def of_queries(first: int, end: int, of: tuple[str, ...]) -> Change:
        def gather(a: Stages, g: Array, side: str) -> Array:
            if side not in of:
                return Stages.gather(a, g, side)
            kept = (queries >= first) & (queries < end)
            weights = a.weights_again()
            if side == "value":
                found = np.einsum("bhqk,bhqd->bhkd", weights * kept, a.d_context)
            else:
                above = np.einsum("bhqd,bhkd->bhqk", a.d_context, a.values)
                logits = a.d_softmax(weights, above) * kept
                found = a.d_score(a.d_scaled(a.d_capped(logits)), {})[1]
            return Stages.gather(a, found, side)

        return gather

    yield maker.staged("backward.key-without-last-query", d_score=without_last)
    for size in TILES:
        for cause, at in (
            ("backward.first-keys-only", keys),
            ("backward.first-queries-only", queries),
        ):
            if size < at.size:
                yield maker.staged(cause, {"count": size}, d_scaled=only(at < size))
        if size < keys.size:
            for first, end in ((0, size), ((keys.size - 1) // size * size, keys.size)):
                span: About = {"keys": indices("key", range(first, end), keys.size)}
                yield maker.staged("backward.query-of-keys", span, d_score=of_keys(first, end))
        if size < queries.size:
            for first, end in ((0, size), ((queries.size - 1) // size * size, queries.size)):
                rows: About = {"queries": indices("query", range(first, end), queries.size)}
                for of in PARTS:
                    gather = of_queries(first, end, of)
                    cause = "backward.of-queries"
                    yield maker.staged(cause, {**names_of(of), **rows}, gather=gather)
    peak = logits.max(axis=-1, keepdims=True)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    total = np.exp(logits - peak).sum(axis=-1, keepdims=True)
    cause = "backward.normaliser-without-maximum"
    yield from _recomputed(maker, cause, lambda a: a.weights * np.exp(peak))
    cause = "backward.row-term-of-unnormalised-context"
    yield maker.staged(cause, row=lambda a, w, d: Stages.row(a, w, d) * total)


# Backward passes of features, and of tokens that are packed, paged or cached


def _of_cap(maker: Maker) -> Iterator[Hypothesis]:
    def slope(values: Array) -> Array:
        return 1.0 - np.tanh(values) ** 2

    slopes: dict[str, Callable[[Array, float], Array]] = {
        "backward.cap-twice": lambda s, c: slope(s / c) ** 2,
        "backward.cap-of-capped": lambda s, c: slope(np.tanh(s / c)),
        "backward.cap-not-divided": lambda s, c: 1 - (c * np.tanh(s / c)) ** 2,
        "backward.cap-not-squared": lambda s, c: 1 - np.tanh(s / c),
        "backward.cap-of-clip": lambda s, c: np.asarray(np.abs(s) < c, np.float64),
        "backward.cap-times-cap": lambda s, c: c * slope(s / c),
    }
    yield maker.staged("backward.cap-missing", d_capped=lambda a, d: d)
    for cause, of in slopes.items():
        yield maker.staged(cause, slope_of_cap=lambda a, c, of=of: of(a.scaled(a.scores), c))
    yield maker.staged("backward.cap-of-unscaled", slope_of_cap=lambda a, c: slope(a.scores / c))
    if maker.problem.attn_bias is not None or maker.problem.slopes is not None:
        yield maker.staged(
            "backward.cap-of-sum",
            slope_of_cap=lambda a, c: 1 - (a.added(a.scaled(a.scores)) / c) ** 2,
        )
    if maker.problem.attn_bias is not None:
        yield maker.staged(
            "backward.cap-of-biased",
            slope_of_cap=lambda a, c: slope(a.biased(a.scaled(a.scores)) / c),
        )
        yield maker.staged(
            "backward.cap-in-bias",
            d_bias=lambda a, d, shape: Stages.d_bias(a, a.d_capped(d), shape),
        )


def _of_sinks(maker: Maker) -> Iterator[Hypothesis]:
    share = maker.right.share_of_sinks()

    def summed(gradient: Array) -> Array:
        return -gradient.sum(axis=(0, 2, 3))

    changes: dict[str, Callable[[Array], Array]] = {
        "backward.sinks-of-first-entry": lambda row: summed((share * row)[:1]),
        "backward.sinks-of-last-query": lambda row: summed((share * row)[:, :, -1:]),
        "backward.sinks-without-share": summed,
        "backward.sinks-summed-over-heads": lambda row: np.full(
            share.shape[1], summed(share * row).sum()
        ),
    }
    if maker.problem.soft_cap is not None:
        uncapped = Stages(maker.problem.replace(soft_cap=None)).share_of_sinks()
        changes["backward.sinks-without-cap"] = lambda row: summed(uncapped * row)
    for cause, change in changes.items():
        yield maker.staged(cause, d_sinks=lambda a, row, change=change: change(row))
    yield maker.staged(
        "backward.sinks-in-row-term", row=lambda a, w, d: Stages.row(a, w, d) / (1 - share)
    )
    right = maker.right
    if (share < 1).all():
        yield maker.staged(
            "backward.log-sum-exp-without-sinks",
            weights_again=lambda a: right.weights / (1 - share),
            row=lambda a, w, d: (a.d_context * a.context).sum(axis=-1, keepdims=True),
            d_sinks=lambda a, row: summed(share / (1 - share) * row),
        )


def _of_rotary(maker: Maker) -> Iterator[Hypothesis]:
    problem = maker.problem

    yield maker.staged("backward.rotary-missing", d_rotated=lambda a, side, g: g)
    yield maker.staged("backward.rotary-turned-on", d_rotated=Stages.rotated)
    for side in ("key", "query"):
        skipping = but_for(side, Stages.d_rotated)
        yield maker.staged("backward.rotary-missing-in", {"of": side}, d_rotated=skipping)
    assert problem.rotary is not None
    if problem.axes is not None:
        yield maker.staged(
            "backward.mrope-missing",
            d_rotated=lambda a, side, g: a.turned(g, -a.angles(a.positions(side))),
        )
    scaling = problem.rotary_scaling
    if scaling is not None and scaling.rope_type != "default":
        bare = problem.replace(rotary_scaling=None, axes=None)
        share = Stages(bare).frequencies() / maker.right.frequencies()
        yield maker.staged(
            "backward.scaling-missing",
            d_rotated=lambda a, side, g: a.turned(g, -a.angles(a.places(side)) * share),
        )
        turned = np.arange(problem.shape.head_size) < problem.rotary.size
        factor = np.where(turned, scaling.gain, 1.0)
        yield maker.staged(
            "backward.attention-factor-missing",
            d_rotated=lambda a, side, g: Stages.d_rotated(a, side, g) / factor,
        )
    if problem.rotary.size < problem.shape.head_size:
        rest = np.arange(problem.shape.head_size) >= problem.rotary.size
        yield maker.staged(
            "backward.rotary-rest-dropped",
            d_rotated=lambda a, side, g: np.where(rest, 0.0, Stages.d_rotated(a, side, g)),
        )
    index = np.broadcast_to(
        np.arange(problem.shape.query_length), problem.position_of_queries.shape
    )
    if not np.array_equal(index, problem.position_of_queries):
        yield maker.staged(
            "backward.rotary-from-0",
            d_rotated=lambda a, side, g: a.turned(
                g, -a.angles(index if side == "query" else a.positions(side))
            ),
        )


def _of_norm(maker: Maker) -> Iterator[Hypothesis]:
    def of_first(axis: int) -> Change:
        def d_gain(a: Stages, side: str, g: Array) -> Array:
            found = g * a.plain[side] / a.root(a.plain[side])
            return np.take(found, [0], axis=axis).sum(axis=(0, 1, 2))

        return d_gain

    yield maker.staged("backward.norm-root-constant", d_root=lambda a, x, g: 0 * x[..., :1])
    yield maker.staged(
        "backward.norm-sum-not-mean", d_root=lambda a, x, g: (x * g).sum(axis=-1, keepdims=True)
    )
    yield maker.staged("backward.norm-passed-on", d_normed=lambda a, side, g: g)
    yield maker.staged(
        "backward.norm-square-not-cube", d_root=lambda a, x, g: Stages.d_root(a, x, g) * a.root(x)
    )
    yield maker.staged(
        "backward.norm-weight-not-normalised",
        d_gain=lambda a, side, g: (g * a.plain[side]).sum(axis=(0, 1, 2)),
    )
    yield maker.staged("backward.norm-weight-of-first-head", d_gain=of_first(axis=1))
    yield maker.staged("backward.norm-weight-of-first-entry", d_gain=of_first(axis=0))
    yield maker.staged(
        "backward.norm-without-weight",
        d_normed=lambda a, side, g: Stages.d_normed(a, side, g / a.gain(side)),
    )


def _without_features(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses whose backward pass recomputes the weights without a feature."""
    problem = maker.problem
    for entry in FEATURES:
        # Positions alone do not make other weights.
        if entry.step >= OF_LOGITS and entry.name != "positions" and entry.fields(problem):
            plain = Stages(problem.replace(**entry.absent))
            maker.share(plain)
            name = entry.name.removeprefix("soft ").replace(" ", "-")
            cause = f"backward.weights-without-{name}"
            yield from _recomputed(maker, cause, lambda a, weights=plain.weights: weights)


def _of_stored_tokens(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses whose backward pass loses the gradients of some keys, values or both.

    The tokens are those of `Handed.stored`, such as the tokens in a cache. Nothing is yielded if
    tokens were passed unchanged.
    """
    if maker.handed is None:
        return
    group, tokens = maker.handed.stored(maker.problem)

    def gathered(of: tuple[str, ...]) -> Change:
        def gather(a: Stages, g: Array, side: str) -> Array:
            found = Stages.gather(a, g, side)
            return np.where(tokens[:, None, :, None], 0.0, found) if side in of else found

        return gather

    for of in PARTS:
        about = {**names_of(of), "tokens": Phrase(f"handing.{group}")}
        yield maker.staged("backward.tokens-detached", about, gather=gathered(of))
