"""Correct attentions that round differently: the algorithms that must never deviate.

Each changes the order or the place of roundings as some kernel, framework or tutorial does, and
nothing else. `benchmarks/calibrate.py --honest` counts how many of their elements lie beyond the
limit, over many problems and all dtypes: none may.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from conformance.adapter.base import Mode
from conformance.explore.drawing import BIASES, MASKS, REGIMES, SCALES, Frame, Recipe
from mutants.attention import Array, Attention
from mutants.contestant import Contestant

LOG2E = float(np.log2(np.e))


class Divided(Attention):
    """The textbook: exponentials relative to the largest logit, divided by their sum."""


class ThroughTheNormaliser(Attention):
    """exp(s - logsumexp(s)), for the output as for returned weights."""

    def softmax(self, logits: Array) -> Array:
        peak = self.peak(logits)
        total = self.total(self.powers(logits - peak))
        log_total = np.where(total > 0, peak + np.log(np.where(total > 0, total, 1)), 0)
        return self.powers(logits - log_total.astype(self.wide))


class LogSoftmax(Attention):
    """exp of a log-softmax: (s - max) - log(sum), rounded in between."""

    def softmax(self, logits: Array) -> Array:
        shifted = logits - self.peak(logits)
        total = self.total(self.powers(shifted))
        return self.powers(shifted - np.log(np.where(total > 0, total, self.wide(1))))


class BaseTwo(Attention):
    """2^(s log2 e): the factor log2 e is part of the scale, as in fused kernels."""

    def scaled(self, scores: Array) -> Array:
        return scores * self.wide(self.factor() * LOG2E)

    def additive(self, mask: Array) -> Array:
        return mask * self.wide(LOG2E)

    def bias(self, bias: Array) -> Array:
        return bias * self.wide(LOG2E)

    def powers(self, exponents: Array) -> Array:
        return np.exp2(exponents)


class ScaledQuery(Attention):
    """The scale is multiplied into the query before the product; the result is stored."""

    def score(self, q: Array, k: Array) -> Array:
        if "score" in self.own:
            return super().score(q, k) * self.wide(self.factor())
        return super().score(self.hold(q * self.wide(self.factor())), k)

    def scaled(self, scores: Array) -> Array:
        return scores


class ScaledBoth(Attention):
    """The square root of the scale is multiplied into query and key, and both are stored."""

    def score(self, q: Array, k: Array) -> Array:
        if "score" in self.own:
            return super().score(q, k) * self.wide(self.factor())
        root = self.wide(abs(self.factor()) ** 0.5)
        return super().score(self.hold(q * root), self.hold(k * root))

    def scaled(self, scores: Array) -> Array:
        return scores * self.wide(np.sign(self.factor()))


class ScaledKey(Attention):
    """The scale is multiplied into the key, which is not stored."""

    def score(self, q: Array, k: Array) -> Array:
        if "score" in self.own:
            return super().score(q, k) * self.wide(self.factor())
        return super().score(q, k * self.wide(self.factor()))

    def scaled(self, scores: Array) -> Array:
        return scores


class KeysReversed(Attention):
    """All sums over the keys begin with the last one."""

    def total(self, powers: Array) -> Array:
        return super().total(np.ascontiguousarray(powers[..., ::-1]))

    def mix(self, weights: Array, v: Array) -> Array:
        return super().mix(np.ascontiguousarray(weights[..., ::-1]), v[:, :, ::-1])


class OneByOne(Attention):
    """Products are summed one term after the other, in the accumulator's format."""

    def product(self, axes: str, left: Array, right: Array) -> Array:
        return _summed(axes, left, right, self.wide)


class Backwards(Attention):
    """The same from the last term to the first."""

    def product(self, axes: str, left: Array, right: Array) -> Array:
        return _summed(axes, left, right, self.wide, step=-1)


class Lanes(Attention):
    """Eight running sums, added up at the end, as vector units do."""

    def product(self, axes: str, left: Array, right: Array) -> Array:
        return _summed(axes, left, right, self.wide, lanes=8)


class Pairwise(Attention):
    """Products are summed in pairs, the sums in pairs again, as in a tree."""

    def product(self, axes: str, left: Array, right: Array) -> Array:
        terms = _terms(axes, left, right, self.wide)
        while terms.shape[-1] > 1:
            odd = terms[..., -1:] if terms.shape[-1] % 2 else terms[..., :0]
            terms = np.concatenate([terms[..., :-1:2] + terms[..., 1::2], odd], axis=-1)
        return terms[..., 0]


class ExactProducts(Attention):
    """Products are summed in float64 and rounded once."""

    def product(self, axes: str, left: Array, right: Array) -> Array:
        wide = np.einsum(axes, left.astype(np.float64), right.astype(np.float64))
        return wide.astype(self.wide)


class Online(Attention):
    """A running maximum over tiles of 64 keys, weights made again for the gradients."""


def online(tile: int) -> type[Attention]:
    """Return the same over tiles of another size."""
    return type(f"Online{tile}", (Attention,), {"tile": tile})


class OnlineFromTheEnd(Attention):
    """Tiles of 16, the last one first, as causal kernels do."""

    tile = 16

    def tiles(self) -> Any:
        return reversed(list(super().tiles()))


class OnlineBaseTwo(BaseTwo):
    """Tiles of 32 and powers of two, the statistics too."""

    tile = 32

    def shrink(self, before: Array, now: Array) -> Array:
        return np.exp2(before - now)

    def log_normaliser(self, peak: Array, total: Array) -> Array:
        return peak + np.log2(total)

    def weights_again(self) -> Array:
        if self.weights is None:
            return np.exp2(self.logits - self.log_total)
        return super().weights_again()


class NaturalNormaliser(OnlineBaseTwo):
    """The same, with the natural logarithm of the normaliser kept: it is rounded twice."""

    def log_normaliser(self, peak: Array, total: Array) -> Array:
        return peak * self.wide(1 / LOG2E) + np.log(total)

    def weights_again(self) -> Array:
        if self.weights is None:
            return np.exp2(self.logits - self.log_total * self.wide(LOG2E))
        return super().weights_again()


class StoredPowers(Attention):
    """Tiles, with the exponentials and the logits' gradient stored before they are multiplied."""

    tile = 16

    def powers(self, exponents: Array) -> Array:
        return self.hold(super().powers(exponents))

    def d_softmax(self, weights: Array, d_weights: Array) -> Array:
        return self.hold(super().d_softmax(weights, d_weights))


class SplitKeys(Attention):
    """Two halves of the keys on their own, merged by their normalisers, as in decoding."""

    def fused(self, logits: Array, v: Array) -> tuple[Array, Array]:
        half = max(1, self.keys // 2)
        parts = []
        for span in (slice(0, half), slice(half, self.keys)):
            if logits[..., span].shape[-1]:
                context, log_total = super().fused(logits[..., span], v[:, :, span])
                parts.append((context, self.largest + log_total))
        # What is merged, and kept, is the whole normaliser.
        self.largest = self.wide(0)
        empty = [~np.isfinite(logits[..., :half]).any(-1, keepdims=True)]
        empty += [~np.isfinite(logits[..., half:]).any(-1, keepdims=True)]
        totals = [
            np.where(hidden, -np.inf, total)
            for hidden, (_, total) in zip(empty, parts, strict=False)
        ]
        largest = np.maximum.reduce(totals)
        peak = np.where(np.isfinite(largest), largest, self.wide(0))
        shares = [np.exp(total - peak) for total in totals]
        total = sum(shares)
        safe = np.where(total > 0, total, self.wide(1)).astype(self.wide)
        context = sum(s * c for s, (c, _) in zip(shares, parts, strict=True)) / safe
        return context.astype(self.wide), (peak + np.log(safe)).astype(self.wide)

    def tiles(self) -> Any:
        return [(0, self.keys)]


class LogitsAgain(Attention):
    """Tiles, and gradients from logits that are made again, with sums in eight lanes."""

    tile = 32

    def weights_again(self) -> Array:
        if self.weights is None:
            scores = _summed("bhqd,bhkd->bhqk", self.q, self.all_k, self.wide, lanes=8)
            if "score" in self.own:
                scores = self.scores
            logits = self.hide(self.biased(self.scaled(scores)))
            return np.exp(logits - self.largest - self.log_total)
        return super().weights_again()


class MergedTiles(Attention):
    """Tiles of 64, each normalised on its own, and merged by the logarithms of their normalisers.

    The context is normalised after every tile, so the logarithm is rounded once for each tile.
    """

    tile = 64

    def fused(self, logits: Array, v: Array) -> tuple[Array, Array]:
        # The whole normaliser is merged, and kept.
        self.largest = self.wide(0)
        log_total = np.full((*logits.shape[:-1], 1), -np.inf, self.wide)
        context = np.zeros((*logits.shape[:-1], v.shape[-1]), self.wide)
        for start, stop in self.tiles():
            part = logits[..., start:stop]
            peak = self.peak(part)
            powers = self.powers(part - peak)
            total = powers.sum(axis=-1, keepdims=True)
            safe = np.where(total > 0, total, self.wide(1))
            own = np.where(total > 0, peak + np.log(safe), self.wide(-np.inf))
            mixed = self.product("bhqk,bhkd->bhqd", powers, v[:, :, start:stop]) / safe
            merged = np.logaddexp(log_total, own)
            finite = np.where(np.isfinite(merged), merged, self.wide(0))
            context = context * np.exp(log_total - finite) + mixed * np.exp(own - finite)
            log_total = merged
        return context, np.where(np.isfinite(log_total), log_total, self.wide(0))


class KeyByKey(MergedTiles):
    """The same with every key on its own: see the section on the log-normaliser in docs/noise.md.

    It is not among `FUSED`, because in float32 and float64 it is less accurate than class A0.
    """

    tile = 1


class StoredOutput(Attention):
    """The row term of the softmax's derivative from the context as it was stored."""

    of_weights: Array = 0.0

    def d_returned(self, d_weights: Array, of_weights: Array) -> Array:
        self.of_weights = of_weights
        return super().d_returned(d_weights, of_weights)

    def row(self, weights: Array, d_weights: Array) -> Array:
        of_output = (self.d_context * self.hold(self.context)).sum(axis=-1, keepdims=True)
        return of_output + (weights * self.of_weights).sum(axis=-1, keepdims=True)


class OperationByOperation(Attention):
    """Every operation stores its result in the dtype of the problem, as eager programs do."""

    def product(self, axes: str, left: Array, right: Array) -> Array:
        return self.hold(super().product(axes, left, right))

    def shifted(self, name: str, projected: Array) -> Array:
        return self.hold(super().shifted(name, projected))

    def scaled(self, scores: Array) -> Array:
        return self.hold(super().scaled(scores))

    def biased(self, logits: Array) -> Array:
        return self.hold(super().biased(logits))

    def powers(self, exponents: Array) -> Array:
        return self.hold(super().powers(self.hold(exponents)))

    def total(self, powers: Array) -> Array:
        return self.hold(super().total(powers))

    def d_softmax(self, weights: Array, d_weights: Array) -> Array:
        row = self.hold(self.row(weights, d_weights))
        return self.hold(weights * self.hold(d_weights - row))

    def d_scaled(self, d_logits: Array) -> Array:
        return self.hold(super().d_scaled(d_logits))


class StoredNormaliser(OperationByOperation):
    """The same through the logarithm of the normaliser, which is stored too."""

    def softmax(self, logits: Array) -> Array:
        peak = self.peak(logits)
        total = self.total(self.powers(logits - peak))
        safe = np.where(total > 0, total, self.wide(1))
        log_total = self.hold(peak + self.hold(np.log(safe)))
        return self.powers(logits - np.where(total > 0, log_total, 0))


class StoredSums(OperationByOperation):
    """The same with running sums in the dtype of the problem."""

    def product(self, axes: str, left: Array, right: Array) -> Array:
        return _summed(axes, left, right, self.wide, hold=self.hold)


WHOLE: tuple[type[Attention], ...] = (
    Divided,
    ThroughTheNormaliser,
    LogSoftmax,
    BaseTwo,
    ScaledQuery,
    ScaledBoth,
    ScaledKey,
    KeysReversed,
    OneByOne,
    Backwards,
    Lanes,
    Pairwise,
    ExactProducts,
    StoredOutput,
    OperationByOperation,
    StoredNormaliser,
    StoredSums,
)
"""Those that make the whole matrix of weights, and return it."""

FUSED: tuple[type[Attention], ...] = (
    Online,
    *map(online, (1, 2, 4, 8, 16, 32, 128)),
    OnlineFromTheEnd,
    OnlineBaseTwo,
    NaturalNormaliser,
    StoredPowers,
    SplitKeys,
    LogitsAgain,
    MergedTiles,
)
"""Those that go over the keys in tiles, and make the weights again for the gradients."""


def nearest_tf32(values: Array) -> Array:
    """Round float32 to TF32: 10 explicit bits of the significand, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0xFFF + (bits >> 13 & 1)) & ~np.uint64(0x1FFF)
    return bits.astype(np.uint32).view(np.float32)


def cut_tf32(values: Array) -> Array:
    """Ignore the 13 lowest bits of float32, as hardware does that is given float32 itself."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def reading(kind: type[Attention], rounding: Any, sums: Any = None) -> type[Attention]:
    """Return an algorithm whose matrix products round their operands, and their `sums` if given."""

    def product(self: Attention, axes: str, left: Array, right: Array) -> Array:
        left, right = rounding(left), rounding(right)
        if sums is None:
            return kind.product(self, axes, left, right)
        return _summed(axes, left, right, sums).astype(self.wide)

    return type(f"{kind.__name__}, {rounding.__name__}", (kind,), {"product": product})


SLOW: tuple[type[Attention], ...] = (OneByOne, Backwards, Lanes, Pairwise, StoredSums)
"""Those that take many seconds or gigabytes for a problem of a real size."""


class Honest(Contestant):
    """One of these algorithms as an implementation with one mode."""

    def __init__(self, kind: type[Attention], accuracy: Any = "") -> None:
        super().__init__(kind.__name__, kind)
        self.accuracy = accuracy
        fused = any(base in FUSED for base in kind.__mro__)
        self.modes = (Mode("eval", {"train": False, "fused": fused}, weights=not fused),)
        self.dropout_modes = ()


def algorithms(*, slow: bool = True) -> list[Honest]:
    """Return all of them as implementations, or only those that are not `SLOW`."""
    return [Honest(kind) for kind in WHOLE + FUSED if slow or kind not in SLOW]


def drawn_recipe(seed: int) -> Recipe:
    """Return a random problem that an attention with any mask, bias and sizes can be given."""
    random = np.random.default_rng(seed)

    def one_of(values: Iterable[Any]) -> Any:
        options = list(values)
        return options[int(random.integers(len(options)))]

    sharing = one_of(("self", "memory", "separate"))
    query = one_of((1, 3, 7, 17, 40))
    key = query if sharing == "self" else one_of((2, 5, 16, 33, 70))
    # Query and key that are one array are projected alike: no key is far ahead of all others.
    regime = one_of(name for name in REGIMES if (sharing, name) != ("self", "huge-logits"))
    frame = Frame(
        sharing=sharing,
        widths=one_of(("equal", "free") if sharing == "self" else ("equal", "memory", "free")),
        bias=one_of((True, False)),
    )
    return Recipe(
        frame=frame,
        batch=one_of((1, 2, 3)),
        query=query,
        key=key,
        kv_heads=one_of((1, 2, 3, 4)),
        group=one_of((1, 2, 3)) if regime != "huge-logits" else 1,
        size=one_of((1, 3, 8, 16)),
        mask=one_of(MASKS) if key > 1 else "none",
        bias=one_of(BIASES),
        causal=one_of((None, "bottom-right")) if key >= query else None,
        scale=one_of(SCALES) if regime != "huge-logits" else None,
        regime=regime,
        seed=seed,
    )


def _summed(
    axes: str,
    left: Array,
    right: Array,
    wide: Any,
    *,
    lanes: int = 1,
    step: int = 1,
    hold: Any = None,
) -> Array:
    """Return an einsum of two arrays whose terms are added one after the other.

    Args:
        lanes: how many running sums there are, added up at the end.
        step: -1 to begin with the last term.
        hold: rounds every partial sum; by default sums are kept in `wide`.
    """
    terms = _terms(axes, left, right, wide)[..., ::step]
    sums = [np.zeros(terms.shape[:-1], wide) for _ in range(lanes)]
    for index in range(terms.shape[-1]):
        partial = sums[index % lanes] + terms[..., index]
        sums[index % lanes] = partial if hold is None else hold(partial)
    total = sums[0]
    for partial in sums[1:]:
        total = total + partial
    return total


def _terms(axes: str, left: Array, right: Array, wide: Any) -> Array:
    """Return the terms of each element of an einsum of two arrays, along a last axis."""
    inputs, output = axes.split("->")
    summed = [axis for axis in dict.fromkeys(inputs.replace(",", "")) if axis not in output]
    terms = np.einsum(f"{inputs}->{output}{''.join(summed)}", left, right).astype(wide)
    return terms.reshape(*terms.shape[: len(output)], -1)
