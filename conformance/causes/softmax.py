"""What becomes of the softmax: its axis, its maximum, its exponential, its tiles; and what is
returned in place of its weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from conformance.causes.hypothesis import Evidence, Hypothesis, Maker, significant
from conformance.causes.location import indices
from conformance.causes.masks import hidden_by
from conformance.causes.precision import Again, coarse
from conformance.causes.scale import LEAST, best_factor
from conformance.causes.stages import Stages
from conformance.definition.dtypes import BFLOAT16, FLOAT16, Array, BoolArray
from conformance.records.phrase import NOTHING, Phrase

TILES = (2, 4, 8, 16, 32, 64, 128)


def hypotheses(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses about the softmax, the simplest first."""
    for axis, mistake in (
        (-2, "softmax.over-queries"),
        (-3, "softmax.over-heads"),
        (0, "softmax.over-batch"),
        ((-2, -1), "softmax.over-matrix"),
    ):
        # Where all is blocked, libraries give NaN, and the careful 0.
        for empty in (np.nan, 0.0) if maker.problem.allowed is not None else (np.nan,):
            yield maker.staged(mistake, softmax=over(axis, empty))
    yield maker.staged("softmax.sigmoid", softmax=lambda a, x: 1 / (1 + np.exp(-x)))
    yield maker.staged("softmax.missing", softmax=lambda a, x: np.where(np.isfinite(x), x, 0.0))
    yield maker.staged("softmax.nothing-attended", softmax=lambda a, x: np.zeros_like(x))
    yield from _keys(maker)
    yield from _exponential(maker)
    yield from _maximum(maker)
    yield from _tiles(maker)


def over(axis: int | tuple[int, ...], empty: float) -> Any:
    """Return a softmax over another axis; `empty` is the result where all is blocked."""

    def softmax(a: Stages, logits: Array) -> Array:
        with np.errstate(invalid="ignore"):
            peak = logits.max(axis=axis, keepdims=True)
            powers = np.exp(logits - np.where(np.isfinite(peak), peak, 0.0))
            total = powers.sum(axis=axis, keepdims=True)
            return np.where(total > 0, powers / total, empty)

    return softmax


def _keys(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses in which keys are left out or counted twice."""
    shape = maker.problem.shape
    keys, full = shape.key_length, maker.right.allowed
    queries = shape.query_length
    ends = {keys - 1, queries, *range(4, min(keys, 64), 4), *range(64, keys, 16)}
    # The tile in which the last query is ends later, one tile or another.
    ends |= {-(-queries // size) * size for size in TILES}
    at = np.arange(keys)
    for end in sorted(ends):
        kept = full & (at < end)
        # A row that is left without any key has no one answer, and would fit many.
        if 0 < end < keys and np.array_equal(kept.any(axis=-1), full.any(axis=-1)):
            yield maker.masked("keys.ignored", kept, {"keys": _from(end, keys)})
    if keys > 1:
        yield maker.masked("keys.ignored", full & (at > 0), {"keys": indices("key", [0], keys)})
    for size in TILES:
        if size < keys:
            last = keys // size * size if keys % size else keys - size
            edges = (at % size == size - 1) & (at < keys - 1)
            yield maker.asked(
                "keys.counted-twice",
                {"keys": _from(last, keys)},
                attn_bias=_twice(maker, at >= last),
            )
            yield maker.asked(
                "keys.last-of-tiles-counted-twice",
                {"size": size},
                attn_bias=_twice(maker, edges),
            )
            for left_out in (edges, edges | (at == keys - 1)):
                yield maker.masked("keys.last-of-tiles-left-out", full & ~left_out, {"size": size})


def _from(first: int, count: int) -> Phrase:
    return indices("key", range(first, count), count)


def _twice(maker: Maker, chosen: BoolArray) -> Array:
    bias = maker.problem.attn_bias
    plus = np.where(chosen, np.log(2.0), 0.0)[None, None, None, :]
    return plus if bias is None else bias + plus


def _peak(logits: Array) -> Array:
    peak = logits.max(axis=-1, keepdims=True)
    return np.where(np.isfinite(peak), peak, 0.0)


def _powers(change: Any) -> Any:
    """Return the softmax with another function in place of exp(logit − maximum)."""

    def softmax(a: Stages, logits: Array) -> Array:
        with np.errstate(all="ignore"):
            powers = change(logits - _peak(logits))
            total = powers.sum(axis=-1, keepdims=True)
            return powers / np.where(total > 0, total, 1.0)

    return softmax


def _exponential(maker: Maker) -> Iterator[Hypothesis]:
    yield maker.staged("softmax.base-2", softmax=_powers(np.exp2))
    yield maker.staged("softmax.rational", softmax=_powers(lambda x: 1 / (1 + np.square(x))))
    for power in (256, 1024, 4096, 65536):
        yield maker.staged(
            "softmax.power",
            {"power": power},
            softmax=_powers(lambda x, n=power: np.maximum(1 + x / n, 0.0) ** n),
        )
    for digits in (3, 5, 6, 8, 9, 10, 12):
        yield maker.staged(
            "softmax.normaliser-plus", {"digits": digits}, softmax=_plus(10.0**-digits)
        )
    for digits in (2, 3, 4, 5, 6):
        yield maker.staged(
            "softmax.small-weights-dropped", {"digits": digits}, softmax=_cut(10.0**-digits)
        )
    for cap in (5, 10, 15, 20, 30, 50, 100):
        yield maker.staged(
            "logits.capped-softly",
            {"cap": cap},
            scaled=lambda a, s, c=cap: c * np.tanh(Stages.scaled(a, s) / c),
        )
    for cap in (5, 10, 15, 20, 30, 50):
        yield maker.staged(
            "logits.cut-below-maximum",
            {"cap": cap},
            softmax=_powers(
                lambda x, c=cap: np.where(x == -np.inf, 0.0, np.exp(np.maximum(x, -c)))
            ),
        )
        if maker.problem.allowed is not None:
            yield maker.staged(
                "logits.cut-below-maximum-if-blocked-too",
                {"cap": cap},
                softmax=_powers(lambda x, c=cap: np.exp(np.maximum(x, -c))),
            )
    for cap in (10, 20, 30, 50, 80):
        if np.abs(maker.right.shown).max() > cap:
            yield maker.staged("logits.cut", {"cap": cap}, softmax=_clipped(cap))


def _plus(amount: float) -> Any:
    def softmax(a: Stages, logits: Array) -> Array:
        powers = np.exp(logits - _peak(logits))
        return powers / (powers.sum(axis=-1, keepdims=True) + amount)

    return softmax


def _cut(limit: float) -> Any:
    def softmax(a: Stages, logits: Array) -> Array:
        weights = Stages.softmax(a, logits)
        return np.where(weights < limit, 0.0, weights)

    return softmax


def _clipped(cap: float) -> Any:
    def softmax(a: Stages, logits: Array) -> Array:
        return Stages.softmax(a, np.where(logits == -np.inf, logits, np.clip(logits, -cap, cap)))

    return softmax


def _maximum(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses in which exponentials overflow or underflow; infinity marks a lost row."""
    shown = maker.right.shown
    if np.abs(shown).max() < 10:
        return
    logits = maker.right.logits
    yield maker.staged("softmax.maximum-not-subtracted", breaks=True, softmax=_range(0.0))
    yield maker.staged(
        "softmax.maximum-before-mask",
        breaks=True,
        softmax=_range(shown.max(-1, keepdims=True)),
    )
    yield maker.staged(
        "softmax.maximum-from-0",
        breaks=True,
        softmax=_range(np.maximum(_peak(logits), 0.0)),
    )
    yield maker.staged(
        "softmax.maximum-of-all",
        breaks=True,
        softmax=_range(logits.max()),
    )
    for axes, mistake in (
        ((-2, -1), "softmax.maximum-of-head"),
        ((-3, -2, -1), "softmax.maximum-of-batch-entry"),
    ):
        yield maker.staged(
            mistake,
            breaks=True,
            softmax=_range(logits.max(axis=axes, keepdims=True)),
        )
    yield maker.staged(
        "softmax.maximum-of-first-row",
        breaks=True,
        softmax=_range(_peak(logits)[:, :, :1]),
    )
    for size in TILES:
        if size < logits.shape[-1]:
            yield maker.staged(
                "softmax.maximum-of-first-tile",
                {"size": size},
                breaks=True,
                softmax=_range(_peak(logits[..., :size])),
            )


def _range(peak: Any) -> Any:
    """Return the softmax with another maximum, in the range in which sums are computed."""

    def softmax(a: Stages, logits: Array) -> Array:
        kind = np.float64 if a.problem.dtype == "float64" else np.float32
        with np.errstate(all="ignore"):
            powers = np.exp((logits - peak).astype(kind)).astype(np.float64)
            # What is left of the smallest numbers has too few digits.
            tiny = np.finfo(kind).tiny
            total = powers.sum(axis=-1, keepdims=True).astype(kind).astype(np.float64)
            found = np.where(total > tiny / np.finfo(kind).eps, powers / total, np.nan)
            found = np.where(np.isfinite(total) & (total > 0), found, np.inf)
            return np.where((logits == -np.inf).all(axis=-1, keepdims=True), 0.0, found)

    return softmax


def _tiles(maker: Maker) -> Iterator[Hypothesis]:
    """Yield mistakes of a softmax that processes the keys in tiles."""
    logits = maker.right.logits
    keys = logits.shape[-1]
    for start in sorted({(keys - 1) // size * size for size in TILES if size < keys}):
        yield maker.staged(
            "softmax.normaliser-of-keys",
            {"keys": _from(start, keys)},
            softmax=_last_normaliser(start),
        )
    for size in TILES:
        if size >= keys:
            continue
        for mistake, softmax in (
            ("tiles.sums-not-rescaled", _rescaled(size, 1.0)),
            ("tiles.sums-rescaled-inversely", _rescaled(size, 2.0)),
            ("tiles.normaliser-not-rescaled", _one_rescaled(size, normaliser=True)),
            ("tiles.values-not-rescaled", _one_rescaled(size, normaliser=False)),
        ):
            yield maker.staged(mistake, {"size": size}, softmax=softmax)


def _running(logits: Array, size: int) -> Array:
    """Return, for each key, the running maximum after its tile."""
    keys = logits.shape[-1]
    starts = np.arange(0, keys, size)
    highest = np.maximum.accumulate(np.maximum.reduceat(logits, starts, axis=-1), axis=-1)
    return np.repeat(highest, size, axis=-1)[..., :keys]


def _rescaled(size: int, times: float) -> Any:
    def softmax(a: Stages, logits: Array) -> Array:
        running = _running(logits, size)
        running = np.where(np.isfinite(running), running, 0.0)
        grown = _peak(logits) - running
        return Stages.softmax(a, logits + times * grown)

    return softmax


def _one_rescaled(size: int, *, normaliser: bool) -> Any:
    """Return the softmax with one of two sums not rescaled when the maximum grew."""

    def softmax(a: Stages, logits: Array) -> Array:
        running = _running(logits, size)
        stale = np.exp(logits - np.where(np.isfinite(running), running, 0.0))
        powers = np.exp(logits - _peak(logits))
        above, below = (powers, stale) if normaliser else (stale, powers)
        with np.errstate(all="ignore"):
            return above / below.sum(axis=-1, keepdims=True)

    return softmax


def _last_normaliser(start: int) -> Any:
    def softmax(a: Stages, logits: Array) -> Array:
        powers = np.exp(logits - _peak(logits))
        with np.errstate(all="ignore"):
            return powers / powers[..., start:].sum(axis=-1, keepdims=True)

    return softmax


# Weights that are wrong while the output is right


def returned(maker: Maker, evidence: Evidence, again: Again) -> Phrase:
    """Return what was returned in place of the weights, or nothing."""
    if evidence.got.ndim != 4:
        return NOTHING
    for mistake, found in _instead(maker):
        if evidence.explained(found):
            return mistake
    right, got = maker.right, evidence.got
    if np.isfinite(got).all():
        hidden = hidden_by(right.shown, got, right.allowed)
        if hidden:
            return hidden
        factor = best_factor(got, right.weights)
        if abs(factor - 1) > LEAST and evidence.explained(factor * right.weights):
            return Phrase("returned.factor", {"factor": significant(factor)})
        plus = float(np.median(got - right.weights))
        if plus and evidence.explained(right.weights + plus):
            return Phrase("returned.added", {"amount": significant(plus, 3)})
        cut = _small_dropped(evidence, right.weights)
        if cut:
            return cut
    return coarse("weights", evidence, maker.problem.dtype, again)


def _instead(maker: Maker) -> Iterator[tuple[Phrase, Array]]:
    right, shape = maker.right, maker.problem.shape
    w = right.weights
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
    logits = right.logits
    if maker.problem.allowed is not None:
        yield Phrase("returned.before-mask"), Stages.softmax(right, right.shown)
    # Infinite where blocked: whatever is there is wrong.
    yield Phrase("returned.logits"), np.where(np.isfinite(logits), logits, np.nan)
    yield Phrase("returned.logits-before-mask"), right.shown
    yield Phrase("returned.scores"), right.scores
    with np.errstate(all="ignore"):
        peak = logits.max(axis=-1, keepdims=True)
        yield Phrase("returned.exponentials"), np.exp(logits - peak)
        yield Phrase("returned.exponentials"), np.exp(logits)
        yield Phrase("returned.logarithms"), np.where(w > 0, np.log(w), np.nan)
        sums = w.sum(axis=2, keepdims=True)
        yield Phrase("returned.normalised-over-queries"), w / np.maximum(sums, 1e-30)
        yield Phrase("returned.softmax-over-queries"), over(-2, 0.0)(right, logits)
    if shape.query_length == shape.key_length:
        yield Phrase("returned.transposed"), w.swapaxes(-1, -2)
    yield (
        Phrase("returned.one-hot"),
        (w == w.max(axis=-1, keepdims=True)).astype(np.float64),
    )
    for narrow in (FLOAT16, BFLOAT16):
        if narrow.significand_bits < maker.problem.format.significand_bits:
            yield Phrase("returned.rounded", {"to": narrow.name}), narrow.round(w)


def _small_dropped(evidence: Evidence, right: Array) -> Phrase:
    """Return the threshold if small weights are 0 and no others are wrong."""
    dropped = evidence.wrong & (evidence.got == 0)
    if not dropped.any() or (evidence.wrong & ~dropped).any():
        return NOTHING
    largest = float(right[dropped].max())
    kept = right[evidence.got != 0]
    if kept.size and kept.min() < largest:
        return NOTHING
    return Phrase("returned.small-dropped", {"below": _round_up(largest)})


def _round_up(value: float) -> float:
    """Return the number rounded up to the next power of ten."""
    return float(10.0 ** np.ceil(np.log10(value)))
