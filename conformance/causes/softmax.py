"""Known defects in the softmax (axis, maximum, exponential, tiles) and in the returned weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from conformance.causes import features, logits
from conformance.causes.hypothesis import About, Best, Evidence, Hypothesis, Maker, significant
from conformance.causes.location import indices
from conformance.causes.logits import LEAST, TILES, best_factor, hidden_by
from conformance.causes.precision import Again, coarse
from conformance.causes.stages import Change, Stages
from conformance.definition.dtypes import BFLOAT16, FLOAT16, Array, BoolArray
from conformance.definition.problem import Problem
from conformance.definition.statistics import LOG_SUM_EXP, MAX_LOGIT
from conformance.records.findings import NOTHING, Phrase

LARGEST = 80.0
"""The largest logit whose exponential is in the range of float32, roughly."""

LARGEST_WEIGHTS = (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 256)
"""How many of the largest weights a sparse attention may keep."""

MOST_TILES = 12
"""The largest number of tiles that are tested one by one; each test computes attention once."""


def hypotheses(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses about the softmax, the simplest first."""
    yield from over_axes(maker)
    yield maker.staged("softmax.sigmoid", softmax=lambda a, x: _sigmoid(x))
    yield maker.staged("softmax.sigmoid-normalised", softmax=_normalised(_sigmoid))
    yield maker.staged("softmax.relu", softmax=lambda a, x: _relu(x))
    yield maker.staged("softmax.relu-normalised", softmax=_normalised(_relu))
    yield maker.staged("softmax.missing", softmax=lambda a, x: np.where(np.isfinite(x), x, 0.0))
    for hidden in (True, False) if maker.problem.allowed is not None else (False,):
        yield maker.staged("softmax.twice", softmax=_twice(hidden=hidden))
    yield maker.staged("softmax.not-divided", softmax=lambda a, x: a.powers(x)[0])
    if maker.right.shown.max() < LARGEST:
        yield maker.staged("softmax.not-divided", softmax=lambda a, x: np.exp(x))
    yield maker.staged("softmax.nothing-attended", softmax=lambda a, x: np.zeros_like(x))
    yield from _keys(maker)
    yield from _exponential(maker)
    yield from _maximum(maker)
    yield from _tiles(maker)


def over_axes(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses in which the softmax is over another axis than that of the keys."""
    for cause, axis in (
        ("softmax.over-queries", -2),
        ("softmax.over-heads", -3),
        ("softmax.over-batch", 0),
        ("softmax.over-matrix", (-2, -1)),
    ):
        # If everything is blocked, most libraries return NaN, and careful ones return 0.
        for empty in (np.nan, 0.0) if maker.problem.allowed is not None else (np.nan,):
            yield maker.staged(cause, softmax=over(axis, empty))


def _sigmoid(logits: Array) -> Array:
    return 1 / (1 + np.exp(-logits))


def _relu(logits: Array) -> Array:
    return np.maximum(logits, 0.0)


def _normalised(function: Callable[[Array], Array]) -> Change:
    """Return a stage that divides a function of the logits by its sum over the keys.

    The weights are 0 where that sum is 0.
    """

    def softmax(a: Stages, logits: Array) -> Array:
        values = function(logits)
        total = values.sum(axis=-1, keepdims=True)
        return values / np.where(total > 0, total, 1.0)

    return softmax


def _largest(count: int, *, normalised: bool) -> Change:
    """Return a stage that keeps the largest weights of each row, and divides them by their sum.

    They are not divided, so that their sum is below 1, unless `normalised`.
    """

    def softmax(a: Stages, logits: Array) -> Array:
        least = np.partition(logits, -count, axis=-1)[..., -count, None]
        if normalised:
            return Stages.softmax(a, np.where(logits >= least, logits, -np.inf))
        return np.where(logits >= least, Stages.softmax(a, logits), 0.0)

    return softmax


def _twice(*, hidden: bool) -> Change:
    """Return a stage that takes the softmax of the weights; keys are `hidden` once more or not."""

    def softmax(a: Stages, logits: Array) -> Array:
        weights = Stages.softmax(a, logits)
        return Stages.softmax(
            a, np.where(logits > -np.inf, weights, -np.inf) if hidden else weights
        )

    return softmax


def over(axis: int | tuple[int, ...], empty: float) -> Change:
    """Return a stage that computes the softmax over one or more axes.

    `empty` is the weight wherever everything along these axes is blocked.
    """

    def softmax(a: Stages, logits: Array) -> Array:
        powers = np.exp(logits - _peak(logits, axis))
        total = powers.sum(axis=axis, keepdims=True)
        return np.where(total > 0, powers / total, empty)

    return softmax


def _peak(logits: Array, axis: int | tuple[int, ...] = -1) -> Array:
    """Return the maximum along the axes, kept with size 1; 0 where the maximum is not finite."""
    peak = logits.max(axis=axis, keepdims=True)
    return np.where(np.isfinite(peak), peak, 0.0)


def _exponentials(logits: Array) -> Array:
    return np.exp(logits - _peak(logits))


def _keys(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses in which keys are left out or counted twice."""
    queries, keys = maker.queries, maker.problem.shape.key_length
    full, bias, at = maker.right.allowed, maker.problem.attn_bias, np.arange(keys)
    ends = {keys - 1, queries, *range(4, min(keys, 64), 4), *range(64, keys, 16)}
    # Causal kernels may stop after the tile of the last query.
    ends |= {-(-queries // size) * size for size in TILES}
    for end in sorted(ends):
        kept = full & (at < end)
        # A row that lost all its keys would fit many answers.
        if 0 < end < keys and np.array_equal(kept.any(axis=-1), full.any(axis=-1)):
            yield maker.masked("keys.ignored", kept, {"keys": _from(end, keys)})
    if keys > 1:
        yield maker.masked("keys.ignored", full & (at > 0), {"keys": indices("key", [0], keys)})

    def twice(cause: str, about: About, chosen: BoolArray) -> Hypothesis:
        plus = np.where(chosen, np.log(2.0), 0.0)[None, None, None, :]
        return maker.asked(cause, about, attn_bias=plus if bias is None else bias + plus)

    for size in TILES:
        if size < keys:
            tile: About = {"size": size}
            last = keys // size * size if keys % size else keys - size
            edges = (at % size == size - 1) & (at < keys - 1)
            yield twice("keys.counted-twice", {"keys": _from(last, keys)}, at >= last)
            yield twice("keys.last-of-tiles-counted-twice", tile, edges)
            for left_out in (edges, edges | (at == keys - 1)):
                yield maker.masked("keys.last-of-tiles-left-out", full & ~left_out, tile)
    if maker.problem.causal is None:
        for count in sorted({-keys % size for size in TILES} - {0}):
            counted = _with_zeros(count)
            yield maker.staged("keys.zeros-counted", {"count": count}, softmax=counted)
    for first, end in _single_tiles(keys):
        kept = full & ((at < first) | (at >= end))
        if end < keys and np.array_equal(kept.any(axis=-1), full.any(axis=-1)):
            span = indices("key", range(first, end), keys)
            yield maker.masked("keys.ignored", kept, {"keys": span})


def _with_zeros(count: int) -> Change:
    """Return a softmax stage that counts so many keys of zeros, whose values are zeros, too."""

    def softmax(a: Stages, logits: Array) -> Array:
        zeros = np.zeros((*logits.shape[:-1], count))
        return Stages.softmax(a, np.concatenate([logits, zeros], axis=-1))[..., :-count]

    return softmax


def _single_tiles(keys: int) -> Iterator[tuple[int, int]]:
    """Yield the first index and the end of each tile of keys, except the first tile.

    Tiles of several sizes are yielded: the larger ones in `TILES` that divide `keys` keys into at
    least 2 and at most `MOST_TILES` tiles.
    """
    for size in TILES[3:]:
        if size < keys <= MOST_TILES * size:
            for first in range(size, keys, size):
                yield first, min(first + size, keys)


def _from(first: int, count: int) -> Phrase:
    return indices("key", range(first, count), count)


def _powers(change: Callable[..., Array], plus: float = 0.0) -> Change:
    """Return a stage that computes a softmax with the function `change` in place of exp.

    `plus` is added to the normaliser. The sinks, if there are any, are among the logits.
    """

    def softmax(a: Stages, logits: Array) -> Array:
        sinks, peak = a.sinks(), _peak(logits)
        peak = peak if sinks is None else np.maximum(peak, sinks)
        powers = change(logits - peak)
        total = powers.sum(axis=-1, keepdims=True) + plus
        total = total if sinks is None else total + change(sinks - peak)
        return powers / np.where(total > 0, total, 1.0)

    return softmax


def _divided_twice(a: Stages, logits: Array) -> Array:
    powers, of_sinks = a.powers(logits)
    total = powers.sum(axis=-1, keepdims=True) + of_sinks
    return powers / np.where(total > 0, total, 1.0) ** 2


def _exponential(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses with a function other than exp, another normaliser, or limited values."""
    yield maker.staged("softmax.base-2", softmax=_powers(np.exp2))
    yield maker.staged("softmax.rational", softmax=_powers(lambda x: 1 / (1 + np.square(x))))
    for power in (256, 1024, 4096, 65536):
        limit = _powers(lambda x, n=power: np.maximum(1 + x / n, 0.0) ** n)
        yield maker.staged("softmax.power", {"power": power}, softmax=limit)
    for digits in (3, 5, 6, 8, 9, 10, 12):
        plus = _powers(np.exp, 10.0**-digits)
        yield maker.staged("softmax.normaliser-plus", {"digits": digits}, softmax=plus)
    if maker.problem.sinks is None:
        none = np.zeros(maker.problem.shape.heads)
        yield maker.asked("softmax.sink-of-0", in_parts=False, sinks=none)
    yield maker.staged("softmax.one-added", softmax=_powers(np.exp, 1.0))
    yield maker.staged("softmax.divided-twice", softmax=_divided_twice)
    for digits in (2, 3, 4, 5, 6):

        def large(a: Stages, logits: Array, least: float = 10.0**-digits) -> Array:
            weights = Stages.softmax(a, logits)
            return np.where(weights < least, 0.0, weights)

        yield maker.staged("softmax.small-weights-dropped", {"digits": digits}, softmax=large)
    for count in LARGEST_WEIGHTS:
        if count < maker.problem.shape.key_length:
            for cause, normalised in (
                ("softmax.largest-only", True),
                ("softmax.largest-only-not-divided", False),
            ):
                kept = _largest(count, normalised=normalised)
                yield maker.staged(cause, {"count": count}, softmax=kept)
    for cap in (5, 10, 15, 20, 30, 50, 100):

        def soft(a: Stages, scores: Array, cap: float = cap) -> Array:
            return cap * np.tanh(Stages.scaled(a, scores) / cap)

        yield maker.staged("logits.capped-softly", {"cap": cap}, scaled=soft)
    for cap in (5, 10, 15, 20, 30, 50):

        def near(x: Array, cap: float = cap) -> Array:
            return np.exp(np.maximum(x, -cap))

        about = {"cap": cap}
        unblocked = _powers(lambda x, near=near: np.where(x == -np.inf, 0.0, near(x)))
        yield maker.staged("logits.cut-below-maximum", about, softmax=unblocked)
        if maker.problem.allowed is not None:
            cause = "logits.cut-below-maximum-if-blocked-too"
            yield maker.staged(cause, about, softmax=_powers(near))
    for cap in (10, 20, 30, 50, 80):
        if np.abs(maker.right.shown).max() > cap:

            def clipped(a: Stages, logits: Array, cap: float = cap) -> Array:
                return Stages.hide(a, np.clip(logits, -cap, cap))

            yield maker.staged("logits.cut", {"cap": cap}, hide=clipped)


STARTS = (-100, -300, -1_000, -10_000, -50_000)
"""Numbers that stand for -∞ in programs, as the start of a running maximum; 0 has its own cause."""


def _maximum(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses in which the softmax subtracts a number other than the row's maximum.

    Infinite weights mark the rows that become wrong. Nothing is yielded if all logits are small.
    """
    shown, logits = maker.right.shown, maker.right.logits
    if np.abs(shown).max() < 10:
        return
    peak, lowest = _peak(logits), float(_peak(logits).min())
    subtracted: list[tuple[str, About, Any]] = [
        ("softmax.maximum-not-subtracted", {}, 0.0),
        ("softmax.maximum-before-mask", {}, shown.max(-1, keepdims=True)),
        ("softmax.maximum-from-0", {}, np.maximum(peak, 0.0)),
        *(
            ("softmax.maximum-from", {"start": start}, np.maximum(peak, start))
            for start in STARTS
            if lowest < start
        ),
        ("softmax.maximum-of-all", {}, logits.max()),
        ("softmax.maximum-of-head", {}, logits.max(axis=(-2, -1), keepdims=True)),
        ("softmax.maximum-of-batch-entry", {}, logits.max(axis=(-3, -2, -1), keepdims=True)),
        ("softmax.maximum-of-first-row", {}, peak[:, :, :1]),
        *(
            ("softmax.maximum-of-first-tile", {"size": size}, _peak(logits[..., :size]))
            for size in TILES
            if size < logits.shape[-1]
        ),
    ]
    for cause, about, number in subtracted:
        for kind in _kinds(maker.problem.dtype):
            yield maker.staged(cause, about, breaks=True, softmax=_range(number, kind))


def _kinds(dtype: str) -> list[Any]:
    """Return the kinds of numbers in which implementations compute the exponentials of a dtype.

    Those of bfloat16 have the range of float32 in either case.
    """
    if dtype == "float16":
        return [np.float32, np.float16]
    return [np.float64 if dtype == "float64" else np.float32]


def _range(peak: Any, kind: Any) -> Change:
    """Return a softmax stage that subtracts `peak`, and overflows as implementations do.

    Numbers have the range of `kind`. Weights are infinite in rows that become wrong, NaN in rows
    that cannot be predicted, and 0 for fully masked queries.
    """

    def softmax(a: Stages, logits: Array) -> Array:
        limits = np.finfo(kind)
        exact = np.exp(logits - peak)
        held = exact.astype(kind)
        sums = np.where(held > 0, exact, 0.0).sum(axis=-1, keepdims=True)
        broken = (sums == 0) | (sums > limits.max)
        # Subnormal numbers have too few digits to predict the weights, and rounding decides whether
        # a sum near the largest number is still in range.
        few = sums < limits.tiny / limits.eps
        near = np.abs(sums / limits.max - 1) < limits.eps**0.5
        with np.errstate(invalid="ignore", divide="ignore"):
            weights = np.where(few | near, np.nan, exact / sums)
        weights = np.where(broken & ~near, np.inf, weights)
        return np.where((logits == -np.inf).all(axis=-1, keepdims=True), 0.0, weights)

    return softmax


def _tiles(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses about a softmax that processes the keys in tiles."""
    keys = maker.right.logits.shape[-1]
    sizes = [size for size in TILES if size < keys]
    for start in sorted({(keys - 1) // size * size for size in sizes}):

        def of_last(a: Stages, logits: Array, start: int = start) -> Array:
            powers = _exponentials(logits)
            return _quotient(powers, powers[..., start:])

        about = {"keys": _from(start, keys)}
        yield maker.staged("softmax.normaliser-of-keys", about, softmax=of_last)
    for size in sizes:
        for cause, softmax in _rescaled(size).items():
            yield maker.staged(cause, {"size": size}, softmax=softmax)
    for size in sorted({*sizes, *(-(-keys // parts) for parts in (2, 4, 8))} - {1, keys}):
        for cause, power in (
            ("tiles.merged-in-base-2", np.log(2.0)),
            ("tiles.base-2-merged-as-natural", 1 / np.log(2.0)),
            ("tiles.averaged", 0.0),
        ):
            yield maker.staged(cause, {"size": size}, softmax=_merged_by_power(size, power))
        cause = "tiles.merged-without-maxima"
        yield maker.staged(cause, {"size": size}, softmax=_merged_without_maxima(size))
    for first, end in _single_tiles(keys):
        for cause, softmax in _rescaled_but_for(first, end).items():
            span = indices("key", range(first, end), keys)
            yield maker.staged(cause, {"keys": span}, softmax=softmax)


def _merged_by_power(size: int, power: float) -> Change:
    """Return a softmax stage that merges splits of `size` keys by a power of their sums.

    The power is ln(2) if 2 is raised to natural logarithms of sums, and 0 for the mean.
    """

    def softmax(a: Stages, logits: Array) -> Array:
        starts = np.arange(0, logits.shape[-1], size)
        powers = _exponentials(logits)
        sums = np.add.reduceat(powers, starts, axis=-1)
        shares = np.where(sums > 0, sums, 1.0) ** (power - 1.0)
        changed = powers * np.repeat(shares, size, axis=-1)[..., : logits.shape[-1]]
        return changed / np.maximum(changed.sum(axis=-1, keepdims=True), np.finfo(float).tiny)

    return softmax


def _merged_without_maxima(size: int) -> Change:
    """Return a softmax stage that adds splits of `size` keys, each relative to its own maximum."""

    def softmax(a: Stages, logits: Array) -> Array:
        starts = np.arange(0, logits.shape[-1], size)
        highest = np.maximum.reduceat(logits, starts, axis=-1)
        highest = np.where(np.isfinite(highest), highest, 0.0)
        own = np.repeat(highest, size, axis=-1)[..., : logits.shape[-1]]
        return Stages.softmax(a, logits - own + _peak(logits))

    return softmax


def _quotient(powers: Array, summed: Array) -> Array:
    return powers / summed.sum(axis=-1, keepdims=True)


def _rescaled(size: int) -> dict[str, Change]:
    """Return softmax stages that rescale sums over tiles wrongly, by the id of the cause.

    A tile has `size` keys. Sums over earlier tiles have to be rescaled whenever a later tile has a
    larger logit.
    """

    def running(logits: Array) -> Array:
        """Return the running maximum after the tile of each key, or 0 if it is not finite."""
        tiles = np.maximum.reduceat(logits, np.arange(0, logits.shape[-1], size), axis=-1)
        highest = np.repeat(np.maximum.accumulate(tiles, axis=-1), size, axis=-1)
        highest = highest[..., : logits.shape[-1]]
        return np.where(np.isfinite(highest), highest, 0.0)

    def both(times: float) -> Change:
        return lambda a, logits: Stages.softmax(
            a, logits + times * (_peak(logits) - running(logits))
        )

    def stale(logits: Array) -> Array:
        return np.exp(logits - running(logits))

    def inverse(logits: Array) -> Array:
        return np.exp(logits - 2.0 * running(logits) + _peak(logits))

    return {
        "tiles.sums-not-rescaled": both(1.0),
        "tiles.sums-rescaled-inversely": both(2.0),
        "tiles.normaliser-not-rescaled": lambda a, x: _quotient(_exponentials(x), stale(x)),
        "tiles.values-not-rescaled": lambda a, x: _quotient(stale(x), _exponentials(x)),
        "tiles.normaliser-rescaled-inversely": lambda a, x: _quotient(_exponentials(x), inverse(x)),
        "tiles.values-rescaled-inversely": lambda a, x: _quotient(inverse(x), _exponentials(x)),
    }


def _rescaled_but_for(first: int, end: int) -> dict[str, Change]:
    """Return softmax stages that do not rescale at the tile `first:end`, by the id of the cause."""

    def earlier(logits: Array) -> Array:
        """Return the exponentials; those of keys before the tile lack its rescaling."""
        before, after = _peak(logits[..., :first]), _peak(logits[..., :end])
        powers = _exponentials(logits)
        powers[..., :first] *= np.exp(np.maximum(after - before, 0.0))
        return powers

    return {
        "tiles.sums-not-rescaled-at": lambda a, x: _quotient(earlier(x), earlier(x)),
        "tiles.normaliser-not-rescaled-at": lambda a, x: _quotient(_exponentials(x), earlier(x)),
        "tiles.values-not-rescaled-at": lambda a, x: _quotient(earlier(x), _exponentials(x)),
    }


# Weights that are wrong while the output is right


def returned(maker: Maker, evidence: Evidence, again: Again, best: Best) -> None:
    """Add causes that explain wrong returned weights to `best`, given that the output is right.

    Weights that are averaged over heads are not examined. `again` returns the errors of the answer
    to perturbed inputs, as for `precision.coarse`.
    """
    if evidence.got.ndim != 4:
        return
    found = any(best.add(0.0, cause) for cause in _of_weights(maker, evidence))
    if not found and not best.wanted:
        best.add(0.0, coarse("weights", evidence, maker.problem.dtype, again))


def _of_weights(maker: Maker, evidence: Evidence) -> Iterator[Phrase]:
    for mistake, other in _instead(maker):
        if evidence.explained(other):
            yield mistake
    right, got = maker.right, evidence.got
    if np.isfinite(got).all():
        yield hidden_by(right.shown, got, right.allowed)
        factor = best_factor(got, right.weights)
        if abs(factor - 1) > LEAST and evidence.explained(factor * right.weights):
            yield Phrase("returned.factor", {"factor": significant(factor)})
        plus = float(np.median(got - right.weights))
        if plus and evidence.explained(right.weights + plus):
            yield Phrase("returned.added", {"amount": significant(plus, 3)})
        yield _small_dropped(evidence, right.weights)
    if right.weights.size <= MOST_OTHERWISE:
        for mistake, other in made_otherwise(maker):
            if evidence.explained(other):
                yield Phrase("returned.made-otherwise", {"mistake": mistake})


MOST_OTHERWISE = 2**14
"""The number of attention weights above which it is not tried whether they are made otherwise."""


def made_otherwise(maker: Maker) -> Iterator[tuple[Phrase, Array]]:
    """Yield mistakes of the forward pass, each with the weights that the output has with it.

    Weights that are made again, to be returned or for the backward pass, may have a mistake that
    those of the output do not have. Kernels make them of the logits and of the log-sum-exp that the
    forward pass saved, which does not have it: the last ones that are yielded are such weights.
    """
    right = maker.right
    for mistake, stages in _with_a_mistake(maker):
        if stages.weights.shape == right.weights.shape:
            yield from _other(mistake, stages.weights, right)
    largest = right.weights.max(axis=-1, keepdims=True)
    seen = largest > 0
    totals = np.where(seen, right.logits.max(axis=-1, keepdims=True), 0.0)
    totals -= np.log(np.where(seen, largest, 1.0))
    for mistake, stages in _with_a_mistake(maker):
        logits = stages.logits
        if logits.shape == right.logits.shape and not np.array_equal(logits, right.logits):
            yield from _other(mistake, np.where(seen, np.exp(logits - totals), 0.0), right)


def _with_a_mistake(maker: Maker) -> Iterator[tuple[Phrase, Stages]]:
    every = (features.hypotheses(maker), logits.hypotheses(maker), hypotheses(maker))
    for hypothesis in itertools.chain.from_iterable(every):
        if not hypothesis.breaks:
            yield hypothesis.cause, hypothesis.make()


def _other(mistake: Phrase, weights: Array, right: Stages) -> Iterator[tuple[Phrase, Array]]:
    """Yield the weights with their mistake if they are finite and not the right ones."""
    if np.isfinite(weights).all() and not np.array_equal(weights, right.weights):
        yield mistake, weights


def _instead(maker: Maker) -> Iterator[tuple[Phrase, Array]]:
    """Yield causes, each with the array that is returned in place of the weights."""
    right, shape = maker.right, maker.problem.shape
    w, logits = right.weights, right.logits
    if shape.heads > 1:
        mean = w.mean(axis=1, keepdims=True)
        yield Phrase("returned.averaged-and-repeated"), np.broadcast_to(mean, w.shape)
        yield Phrase("returned.of-first-head"), np.broadcast_to(w[:, :1], w.shape)
        yield Phrase("returned.of-last-head"), np.broadcast_to(w[:, -1:], w.shape)
        yield Phrase("returned.heads-reversed"), w[:, ::-1]
        if shape.group > 1:
            first = np.repeat(w[:, :: shape.group], shape.group, axis=1)
            yield Phrase("returned.of-one-head-per-group"), first
    if shape.batch > 1:
        yield Phrase("returned.of-first-batch-entry"), np.broadcast_to(w[:1], w.shape)
    if maker.problem.allowed is not None:
        yield Phrase("returned.before-mask"), Stages.softmax(right, right.shown)
    # NaN, which fits anything, replaces the logits of blocked keys.
    yield Phrase("returned.logits"), np.where(np.isfinite(logits), logits, np.nan)
    yield Phrase("returned.logits-before-mask"), right.shown
    yield Phrase("returned.scores"), right.scores
    yield Phrase("returned.exponentials"), np.exp(logits - logits.max(axis=-1, keepdims=True))
    yield Phrase("returned.exponentials"), np.exp(logits)
    yield Phrase("returned.logarithms"), np.where(w > 0, np.log(w), np.nan)
    sums = w.sum(axis=2, keepdims=True)
    yield Phrase("returned.normalised-over-queries"), w / np.maximum(sums, 1e-30)
    yield Phrase("returned.softmax-over-queries"), over(-2, 0.0)(right, logits)
    if shape.query_length == shape.key_length:
        yield Phrase("returned.transposed"), w.swapaxes(-1, -2)
    yield Phrase("returned.one-hot"), 1.0 * (w == w.max(axis=-1, keepdims=True))
    for narrow in (FLOAT16, BFLOAT16):
        if narrow.significand_bits < maker.problem.format.significand_bits:
            yield Phrase("returned.rounded", {"to": narrow.name}), narrow.round(w)


def _small_dropped(evidence: Evidence, right: Array) -> Phrase:
    """Return a cause if all wrong weights, and all weights smaller than the largest of them, are 0.

    Otherwise, the result is an empty phrase. `right` holds the right weights, by which sizes are
    compared.
    """
    dropped = evidence.wrong & (evidence.got == 0)
    if not dropped.any() or (evidence.wrong & ~dropped).any():
        return NOTHING
    largest = float(right[dropped].max())
    if right[evidence.got != 0].min(initial=np.inf) < largest:
        return NOTHING
    return Phrase("returned.small-dropped", {"below": float(10.0 ** np.ceil(np.log10(largest)))})


# The log-sum-exp


def of_log_sum_exp(
    problem: Problem, right: Stages, want: Array, sinks: Array | None
) -> Iterator[tuple[Phrase, Array]]:
    """Yield causes of a wrong log-sum-exp, as in `OF_STATISTIC`."""
    peak = right.logits.max(axis=-1)
    yield Phrase("lse.base-2"), want / np.log(2)
    yield Phrase("lse.natural-taken-for-base-2"), want * np.log(2)
    yield Phrase("lse.without-maximum"), want - np.where(np.isfinite(peak), peak, 0.0)
    yield Phrase("lse.maximum-only"), peak
    yield Phrase("lse.without-logarithm"), np.exp(want)
    yield Phrase("lse.negated"), -want
    if problem.sinks is not None:
        yield Phrase("lse.without-sink"), log_sum_exp(right.logits)
        extra = np.broadcast_to(problem.sinks[None, :, None], want.shape)
        yield Phrase("lse.sink-twice"), np.logaddexp(want, extra)

    def whole(logits: Array) -> Array:
        found = log_sum_exp(logits)
        return found if problem.sinks is None else np.logaddexp(found, problem.sinks[:, None])

    if problem.soft_cap is not None:
        yield Phrase("lse.without-cap"), whole(right.hide(right.scaled(right.scores)))
    if problem.attn_bias is not None:
        yield Phrase("lse.without-bias"), whole(right.hide(right.shown - problem.attn_bias))
    if problem.allowed is not None:
        yield Phrase("lse.without-mask"), whole(right.shown)
    yield Phrase("lse.without-scale"), whole(right.hide(right.added(right.scores)))
    mean = want - np.log(right.allowed.sum(axis=-1))
    yield Phrase("lse.of-mean"), mean
    if len(want) > 1:
        yield Phrase("lse.of-first-entry"), np.broadcast_to(want[:1], want.shape)
    if want.shape[1] > 1:
        yield Phrase("lse.of-first-head"), np.broadcast_to(want[:, :1], want.shape)
    for narrow in (FLOAT16, BFLOAT16):
        if narrow.significand_bits < problem.format.significand_bits:
            yield Phrase("lse.rounded", {"to": narrow.name}), narrow.round(want)


def of_max_logit(
    problem: Problem, right: Stages, want: Array, sinks: Array | None
) -> Iterator[tuple[Phrase, Array]]:
    """Yield causes of a wrong largest logit, as in `OF_STATISTIC`."""

    def whole(logits: Array) -> Array:
        found = logits.max(axis=-1)
        return found if problem.sinks is None else np.maximum(found, problem.sinks[:, None])

    yield Phrase("largest.base-2"), want / np.log(2)
    yield Phrase("largest.natural-taken-for-base-2"), want * np.log(2)
    yield Phrase("largest.clamped"), np.maximum(want, 0.0)
    if problem.allowed is not None:
        yield Phrase("largest.without-mask"), whole(right.shown)
    yield Phrase("largest.without-scale"), whole(right.hide(right.added(right.scores)))
    if problem.soft_cap is not None:
        uncapped = right.biased(right.sloped(right.scaled(right.scores)))
        yield Phrase("largest.without-cap"), whole(right.hide(uncapped))
    if problem.attn_bias is not None:
        unbiased = right.hide(right.shown - problem.attn_bias)
        yield Phrase("largest.without-bias"), whole(unbiased)
    if problem.sinks is not None:
        yield Phrase("largest.without-sink"), right.logits.max(axis=-1)
    elif sinks is not None:
        yield Phrase("largest.with-sink"), np.maximum(want, sinks[:, None])
    yield Phrase("largest.log-sum-exp"), log_sum_exp(right.logits)
    absolute = np.where(right.allowed, np.abs(right.shown), -np.inf)
    yield Phrase("largest.absolute"), whole(absolute)
    for step, cause in ((1, "previous-query"), (-1, "next-query")):
        yield Phrase(f"largest.of-{cause}"), np.roll(want, step, axis=-1)
    of_head = want.max(axis=-1, keepdims=True)
    yield Phrase("largest.of-head"), np.broadcast_to(of_head, want.shape)
    if len(want) > 1:
        yield Phrase("largest.of-first-entry"), np.broadcast_to(want[:1], want.shape)
    if want.shape[1] > 1:
        yield Phrase("largest.of-first-head"), np.broadcast_to(want[:, :1], want.shape)
    for narrow in (FLOAT16, BFLOAT16):
        if narrow.significand_bits < problem.format.significand_bits:
            yield Phrase("largest.rounded", {"to": narrow.name}), narrow.round(want)
    keys = right.logits.shape[-1]
    for first in range(keys - 1, 0, -1):
        found = whole(right.logits[..., :first])
        yield Phrase("largest.of-first-keys", {"first": first, "of": keys}), found


OfStatistic = Callable[[Problem, Stages, Array, Array | None], Iterator[tuple[Phrase, Array]]]

OF_STATISTIC: Mapping[str, OfStatistic] = {
    LOG_SUM_EXP.name: of_log_sum_exp,
    MAX_LOGIT.name: of_max_logit,
}
"""For each statistic of rows, a function that yields causes of a wrong one, `[batch heads query]`,
each with the array that is returned in its place.

It takes the problem without sinks that do not count, its stages, the right statistic, and the
sinks `[heads]`, whether they count or not."""


def causes_of_statistic(
    name: str, problem: Problem, evidence: Evidence, sinks: Array | None
) -> Iterator[Phrase]:
    """Yield the causes that explain a wrong statistic of rows, `[batch heads query]`.

    Queries that see no key are not explained: what is returned for them is a convention.

    Args:
        name: the name of the statistic, as in `STATISTICS`.
        problem: the problem, without sinks that the statistic does not count.
        evidence: what was returned.
        sinks: the sinks `[heads]`, whether the statistic counts them or not.
    """
    seen = problem.allowed_in_full().any(axis=-1)
    with np.errstate(all="ignore"):
        for cause, found in OF_STATISTIC[name](problem, Stages(problem), evidence.want, sinks):
            if evidence.explained(np.where(seen, found, evidence.want)):
                yield cause


def log_sum_exp(logits: Array) -> Array:
    """Return log Σ exp over the last axis; −∞ where everything is blocked."""
    peak = logits.max(axis=-1, keepdims=True)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(logits - peak).sum(axis=-1)) + peak[..., 0]
