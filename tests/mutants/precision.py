"""Mistakes in the softmax's arithmetic, and precision that is lost without a word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from conformance.definition.dtypes import BFLOAT16, FLOAT16
from mutants.attention import Array, Attention
from mutants.mutant import (
    KERNEL,
    MODES,
    OUTPUT,
    PARAMETERS,
    SHIFT,
    SUMS,
    WEIGHTS,
    Mutant,
    chapter,
)

MUTANTS: list[Mutant] = []
_add = chapter("precision", MUTANTS)

LONG = "plain/no-mask/long"
HUGE = "logits/huge/cross"


def _bfloat16(values: Array) -> Array:
    return BFLOAT16.round(values).astype(values.dtype)


def _float16(values: Array) -> Array:
    return FLOAT16.round(values).astype(values.dtype)


def _fp8(values: Array) -> Array:
    """Four significant bits (E4M3), without its limits."""
    fraction, exponent = np.frexp(values)
    return np.ldexp(np.rint(fraction * 2.0**4) / 2.0**4, exponent).astype(values.dtype)


def _tf32(values: Array) -> Array:
    """Eleven significant bits, as tensor cores read float32."""
    fraction, exponent = np.frexp(values)
    return np.ldexp(np.rint(fraction * 2.0**11) / 2.0**11, exponent).astype(values.dtype)


# The maximum.

_add(
    "no-maximum",
    "computes exp of the logits without subtracting the maximum",
    OUTPUT,
    PARAMETERS,
    SHIFT,
    peak=lambda a, logits: a.wide(0),
    case=HUGE,
)
_add(
    "maximum-of-all-rows",
    "subtracts the largest logit of the whole matrix",
    OUTPUT,
    WEIGHTS,
    peak=lambda a, logits: np.max(logits, initial=-np.inf).astype(a.wide),
    case=HUGE,
)
_add(
    "maximum-of-first-row",
    "subtracts the largest logit of the first row",
    OUTPUT,
    WEIGHTS,
    peak=lambda a, logits: Attention.peak(a, logits)[:, :, :1],
    case=HUGE,
)
_add(
    "maximum-of-blocked-keys-too",
    "takes the maximum before the mask",
    OUTPUT,
    WEIGHTS,
    peak=lambda a, logits: Attention.peak(a, a.biased(a.scaled(a.scores))),
    case="bias/high-on-padding/cross",
)
_add(
    "logits-cut",
    "cuts logits at ±20 instead of subtracting the maximum",
    OUTPUT,
    powers=lambda a, x: np.exp(np.clip(x, -20, 20)),
    case="logits/large/cross",
    dtype="float64",
)
_add(
    "logits-soft-capped",
    "keeps another model's soft cap of 30",
    OUTPUT,
    scaled=lambda a, scores: 30 * np.tanh(Attention.scaled(a, scores) / a.wide(30)),
)

# The normaliser and the exponential.

for _digits in (6, 9):
    _add(
        f"normaliser-plus-1e-{_digits}",
        f"adds 1e-{_digits} to the normaliser",
        OUTPUT,
        WEIGHTS,
        SUMS,
        total=lambda a, powers, e=_digits: Attention.total(a, powers) + a.wide(10.0**-e),
        dtype="float64",
    )
_add(
    "weights-cut",
    "drops weights below 1e-4",
    OUTPUT,
    WEIGHTS,
    normalised=lambda a, powers, total: np.where(powers < 1e-4 * total, 0, powers / total).astype(
        a.wide
    ),
    case=LONG,
)


def _polynomial(a: Attention, x: Array) -> Array:
    """2^n times a cubic, with a relative error of 1e-4."""
    scaled = np.maximum(x, a.wide(-1e4)) * a.wide(np.log2(np.e))
    whole = np.floor(scaled)
    part = scaled - whole
    cubic = 1 + part * (0.69583282 + part * (0.22606716 + part * 0.07802486))
    return np.where(x == -np.inf, 0, np.ldexp(cubic, whole.astype(np.int32))).astype(a.wide)


def _limit(a: Attention, x: Array) -> Array:
    return np.maximum(1 + x / a.wide(4096), a.wide(0)) ** 4096


_add("exp-by-cubic", "approximates exp by a cubic polynomial", OUTPUT, powers=_polynomial)
_add("exp-by-power", "uses (1 + x/4096)⁴⁰⁹⁶ as exp", OUTPUT, powers=_limit)
_add("exp-of-2", "uses 2ˣ instead of eˣ", OUTPUT, powers=lambda a, x: np.exp2(x))


def _of_splits(power: float) -> Any:
    """Splits of 4 keys, merged by a power of their sums of exponentials."""

    def softmax(a: Attention, logits: Array) -> Array:
        powers, starts = a.powers(logits - a.peak(logits)), np.arange(0, a.keys, 4)
        sums = np.repeat(np.add.reduceat(powers, starts, axis=-1), 4, axis=-1)[..., : a.keys]
        powers = powers * np.where(sums > 0, sums, a.wide(1)) ** a.wide(power - 1)
        return a.normalised(powers, a.total(powers))

    return softmax


_add(
    "softmax-of-splits-averaged",
    "takes the mean of the outputs of splits of the keys",
    OUTPUT,
    softmax=_of_splits(0.0),
)
_add(
    "softmax-of-splits-of-base-2",
    "raises e to logarithms of base 2 where splits of the keys are merged",
    OUTPUT,
    softmax=_of_splits(1 / np.log(2)),
)


def _without_maxima(a: Attention, logits: Array) -> Array:
    """Splits of 4 keys, each relative to its own maximum, which are added as they are."""
    highest = np.maximum.reduceat(logits, np.arange(0, a.keys, 4), axis=-1)
    own = np.repeat(highest, 4, axis=-1)[..., : a.keys]
    powers = a.powers(logits - np.where(np.isfinite(own), own, a.wide(0)))
    return a.normalised(powers, a.total(powers))


_add(
    "softmax-of-splits-without-maxima",
    "adds splits of the keys as they are, each relative to its own maximum",
    OUTPUT,
    softmax=_without_maxima,
)
_add(
    "softmax-plus-one",
    "adds 1 to the normaliser after the maximum is subtracted",
    OUTPUT,
    total=lambda a, powers: Attention.total(a, powers) + a.wide(1),
)


def _off_by_one(a: Attention, logits: Array) -> Array:
    peak = a.peak(logits)
    powers = a.powers(logits - peak)
    return a.normalised(powers, a.total(powers) + a.powers(-peak))


_add(
    "softmax-with-a-sink-of-0",
    "adds 1 to the sum of exponentials, as a quiet softmax does",
    OUTPUT,
    softmax=_off_by_one,
)
_add(
    "weights-divided-twice",
    "divides the weights by the normaliser twice",
    OUTPUT,
    normalised=lambda a, powers, total: Attention.normalised(
        a, Attention.normalised(a, powers, total), total
    ),
)
_add(
    "zeros-of-last-tile-counted",
    "counts the keys of zeros that fill the last tile of 16",
    OUTPUT,
    softmax=lambda a, logits: Attention.softmax(
        a, np.concatenate([logits, np.zeros((*logits.shape[:-1], -a.keys % 16), a.wide)], axis=-1)
    )[..., : a.keys],
)
_add(
    "squares-for-exp",
    "uses 1/(1 + x²) instead of exp, as a softmax-free attention does",
    OUTPUT,
    powers=lambda a, x: 1 / (1 + np.square(x)),
)

# Roundings that the dtype does not call for.


def _in_int8(**axes: int) -> Any:
    """Keys and values in 8 bits, with a scale for all numbers along an axis of their heads."""

    def heads(a: Attention, name: str) -> Array:
        found = Attention.heads(a, name)
        if name not in axes:
            return found
        unit = np.abs(found).max(axis=axes[name], keepdims=True) / a.wide(127)
        return np.rint(found / np.where(unit > 0, unit, a.wide(1))) * unit

    return heads


_add(
    "heads-in-int8-by-component",
    "stores keys and values in 8 bits, with a scale for each component",
    OUTPUT,
    heads=_in_int8(key=2, value=2),
)
_add(
    "keys-in-int8-by-component",
    "stores keys in 8 bits with a scale for each component, and values for each token",
    OUTPUT,
    heads=_in_int8(key=2, value=3),
)


def _when(names: tuple[str, ...], rounded: Any, stage: str) -> Any:
    """The stage with its result rounded, in these dtypes."""

    def instead(a: Attention, *operands: Any) -> Array:
        values = getattr(Attention, stage)(a, *operands)
        return rounded(values) if a.given.dtype.name in names else values

    return instead


_WIDE = ("float32", "float64")

_add(
    "softmax-in-bfloat16",
    "computes the softmax in bfloat16",
    OUTPUT,
    WEIGHTS,
    softmax=_when(_WIDE, _bfloat16, "softmax"),
)


def _scaled_late(a: Attention, scores: Array) -> Array:
    return Attention.scaled(a, a.hold(scores))


_add(
    "products-in-float16",
    "keeps the products of query and key in the dtype of the tensors, and scales them afterwards",
    OUTPUT,
    scaled=_scaled_late,
    case="logits/from-large-heads/cross",
    dtype="float16",
)
_add(
    "softmax-in-float16",
    "computes the softmax in float16",
    OUTPUT,
    WEIGHTS,
    softmax=_when(_WIDE, _float16, "softmax"),
)
_add(
    "weights-in-fp8",
    "rounds weights in half precision to 8 bits, as kernels for inference do",
    OUTPUT,
    WEIGHTS,
    softmax=_when(("float16", "bfloat16"), _fp8, "softmax"),
    dtype="float16",
)
_add(
    "logits-in-bfloat16",
    "rounds the logits to bfloat16",
    OUTPUT,
    WEIGHTS,
    scaled=_when(_WIDE, _bfloat16, "scaled"),
)
_add(
    "logits-of-float16-in-bfloat16",
    "rounds the logits of float16 to bfloat16",
    OUTPUT,
    WEIGHTS,
    scaled=_when(("float16",), _bfloat16, "scaled"),
    case="mask/prefix-lm/cross",
    dtype="float16",
)
_add(
    "projections-in-bfloat16",
    "projects under an unrequested autocast",
    OUTPUT,
    project=_when(_WIDE, _bfloat16, "project"),
)
_add(
    "output-in-float16",
    "rounds the output to float16 on the way",
    OUTPUT,
    finish=_when(_WIDE, _float16, "finish"),
)
_add(
    "context-in-bfloat16",
    "keeps the context in bfloat16",
    OUTPUT,
    merge=_when(_WIDE, _bfloat16, "merge"),
)
_add(
    "bias-in-bfloat16",
    "keeps the bias in bfloat16",
    OUTPUT,
    bias=_when(_WIDE, _bfloat16, "bias"),
    case="bias/in-full/cross",
)


def _read_as(rounding: Any) -> Any:
    def product(a: Attention, axes: str, left: Array, right: Array) -> Array:
        if a.given.dtype.name == "float32":
            left, right = rounding(left), rounding(right)
        return Attention.product(a, axes, left, right)

    return product


_add("products-in-tf32", "multiplies float32 on tensor cores", OUTPUT, product=_read_as(_tf32))
_add(
    "products-in-bfloat16",
    "multiplies float32 in one pass of bfloat16",
    OUTPUT,
    product=_read_as(_bfloat16),
)


def _narrowed(a: Attention, array: Array) -> Array:
    return array.astype(np.float32).astype(a.wide)


_add(
    "float64-through-float32",
    "reads float64 as float32",
    OUTPUT,
    read=lambda a, array: _narrowed(a, array),
    dtype="float64",
    case=HUGE,
)
_add(
    "bfloat16-without-biases",
    "leaves out the projections' biases in bfloat16",
    OUTPUT,
    shifted=lambda a, name, x: (
        x if a.given.dtype.name == "bfloat16" else Attention.shifted(a, name, x)
    ),
    dtype="bfloat16",
)
_add(
    "float16-scale-missing",
    "skips the scale in float16, for fear of underflow",
    OUTPUT,
    default_factor=lambda a: (
        1.0 if a.given.dtype.name == "float16" else Attention.default_factor(a)
    ),
    dtype="float16",
)

# The online softmax, tile by tile.


def _tiles(change: Any) -> Any:
    def tiles(a: Attention) -> Iterator[tuple[int, int]]:
        yield from change(list(Attention.tiles(a)))

    return tiles


def _short(tiles: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return tiles[:-1] if len(tiles) > 1 else tiles


def _overlapping(tiles: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(max(start - 1, 0), stop) for start, stop in tiles]


def _gapped(tiles: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(start, stop - 1 if len(tiles) > 1 else stop) for start, stop in tiles]


_add(
    "last-tile-dropped",
    "counts tiles by integer division",
    OUTPUT,
    MODES,
    tiles=_tiles(_short),
    case=LONG,
)
_add(
    "last-tile-read-twice",
    "reads the last, partial tile twice",
    OUTPUT,
    MODES,
    tiles=_tiles(lambda tiles: tiles + tiles[-1:] if len(tiles) > 1 else tiles),
    case=LONG,
)
_add(
    "tiles-overlap",
    "begins each tile at the last key of the one before",
    OUTPUT,
    MODES,
    tiles=_tiles(_overlapping),
    case=LONG,
)
_add(
    "tiles-leave-gaps",
    "ends each tile one key early",
    OUTPUT,
    MODES,
    tiles=_tiles(_gapped),
    case=LONG,
)
_add(
    "sums-not-rescaled",
    "leaves the sums as they are when the maximum grows",
    OUTPUT,
    MODES,
    shrink=lambda a, before, now: np.where(before == -np.inf, 0, a.wide(1)),
    case=LONG,
)
_add(
    "sums-rescaled-the-wrong-way",
    "multiplies the sums with exp(new − old)",
    OUTPUT,
    MODES,
    shrink=lambda a, before, now: np.where(before == -np.inf, 0, np.exp(now - before)),
    case=LONG,
)


def _inversely(of: str) -> Any:
    """Tiles of 4 keys, where one of two sums is divided by what it has to be multiplied with."""

    def fused(a: Attention, logits: Array, v: Array) -> tuple[Array, Array]:
        highest = np.full((*logits.shape[:-1], 1), -np.inf, a.wide)
        total = np.zeros_like(highest)
        context = np.zeros((*logits.shape[:-1], v.shape[-1]), a.wide)
        for start in range(0, a.keys, 4):
            part = logits[..., start : start + 4]
            before, highest = highest, np.maximum(highest, a.highest(part))
            peak = np.where(np.isfinite(highest), highest, a.wide(0))
            powers, shrink = a.powers(part - peak), a.shrink(before, peak)
            wrong = np.where(shrink > 0, 1 / shrink, a.wide(0))
            added = a.product("bhqk,bhkd->bhqd", powers, v[:, :, start : start + 4])
            context = context * (wrong if of == "values" else shrink) + added
            own = wrong if of == "normaliser" else shrink
            total = total * own + powers.sum(axis=-1, keepdims=True)
        a.largest = peak
        safe = np.where(total > 0, total, a.wide(1))
        return a.rescaled(context, safe), a.log_normaliser(peak, safe)

    return fused


for _of, _sum in (("values", "sum of values"), ("normaliser", "normaliser")):
    _add(
        f"{_of}-rescaled-the-wrong-way",
        f"multiplies the {_sum} alone with exp(new − old), for each tile of 4 keys",
        OUTPUT,
        MODES,
        fused=_inversely(_of),
    )


def _first_maximum(a: Attention, part: Array) -> Array:
    if not hasattr(a, "seen"):
        a.seen = Attention.highest(a, part)  # type: ignore[attr-defined]
    return a.seen  # type: ignore[attr-defined]


_add(
    "stale-maximum",
    "keeps the maximum of the first tile",
    OUTPUT,
    MODES,
    highest=_first_maximum,
    case="logits/rising/long",
)
_add(
    "maximum-starts-at-0",
    "starts the running maximum at 0, so that rows of small logits underflow",
    OUTPUT,
    MODES,
    highest=lambda a, part: np.maximum(Attention.highest(a, part), a.wide(0)),
    case="bias/far-below-zero/cross",
)
for _start, _number in ((-300.0, "300"), (-1e3, "1000"), (-5e4, "50000")):
    _add(
        f"maximum-starts-at-minus-{_number}",
        f"starts the running maximum at -{_number} in place of -∞",
        OUTPUT,
        highest=lambda a, part, start=_start: np.maximum(Attention.highest(a, part), a.wide(start)),
        case="bias/lower/narrow",
    )
_add(
    "maximum-of-blocked-tile-is-0",
    "takes 0 for the maximum of a tile in which all keys are blocked",
    OUTPUT,
    highest=lambda a, part: np.where(
        np.isfinite(highest := Attention.highest(a, part)), highest, a.wide(0)
    ),
    case="logits/lower-behind-mask/tiles",
)
_add(
    "normaliser-of-last-tile",
    "forgets the normaliser of the earlier tiles",
    OUTPUT,
    MODES,
    rescaled=lambda a, context, total: (
        context
        / np.exp(
            a.logits[..., (a.keys - 1) // a.tile * a.tile :] - Attention.peak(a, a.logits)
        ).sum(axis=-1, keepdims=True)
        if a.keys > a.tile
        else context / total
    ),
    case=LONG,
)

_add(
    "single-key-tile-dropped",
    "counts tiles so that a last tile of a single key is omitted",
    OUTPUT,
    MODES,
    tiles=_tiles(lambda tiles: [tile for tile in tiles if tile[1] - tile[0] > 1] or tiles),
    case="plain/no-mask/tiles",
)

# What a class-A implementation holds in float32, in the dtype of the tensors instead. The adapter
# promises class A and is given the heads: within the limits of class C, or beside the roundings of
# the projections, most of these are within the noise.


def _held(stage: str) -> Any:
    """The stage with its result rounded to the dtype of the tensors."""
    return lambda a, *operands: a.hold(getattr(Attention, stage)(a, *operands))


def _held_log_normaliser(a: Attention, logits: Array, v: Array) -> tuple[Array, Array]:
    context, log_total = Attention.fused(a, logits, v)
    return context, a.hold(a.largest + log_total) - a.largest


def _held_sum(a: Attention, powers: Array) -> Array:
    """The powers are added one after the other."""
    total = np.zeros((*powers.shape[:-1], 1), a.wide)
    for key in range(powers.shape[-1]):
        total = a.hold(total + powers[..., key : key + 1])
    return total


def _held_scores(a: Attention, q: Array, k: Array) -> Array:
    if "score" in a.own:
        return Attention.score(a, q, k)
    scores = a.wide(0)
    for axis in range(q.shape[-1]):
        term = Attention.product(a, "bhqd,bhkd->bhqk", q[..., [axis]], k[..., [axis]])
        scores = a.hold(scores + term)
    return scores


def _truncated(a: Attention, values: Array) -> Array:
    """Rounding towards zero."""
    rounded = Attention.hold(a, values)
    beyond = np.abs(rounded) > np.abs(values)
    lower = Attention.hold(a, rounded * a.wide(1 - 2.0**-a.given.dtype.significand_bits))
    return np.where(beyond, lower, rounded)


_HELD: tuple[tuple[str, str, tuple[str, ...], dict[str, Any]], ...] = (
    ("logits", "the logits", (KERNEL,), {"scaled": _held("scaled")}),
    ("biased-logits", "logits plus bias", (KERNEL, OUTPUT), {"biased": _held("biased")}),
    ("sum-of-powers", "the running sum of the powers", (KERNEL, OUTPUT), {"total": _held_sum}),
    ("log-normaliser", "the log-normaliser", (KERNEL,), {"fused": _held_log_normaliser}),
    ("sums-of-scores", "sums inside query times key", (KERNEL,), {"score": _held_scores}),
    ("truncated", "everything, rounded towards zero,", (OUTPUT, PARAMETERS), {"hold": _truncated}),
)

for _dtype in ("bfloat16", "float16"):
    for _name, _what, _noticed, _changes in _HELD:
        _add(
            f"{_name}-in-{_dtype}-storage",
            f"keeps {_what} in {_dtype}",
            *_noticed,
            **_changes,
            case=LONG,
            dtype=_dtype,
            accuracy="A",
        )

_add(
    "exponents-in-bfloat16-storage",
    "keeps logits minus the maximum in bfloat16",
    KERNEL,
    powers=lambda a, x: Attention.powers(a, a.hold(x)),
    case=LONG,
    dtype="bfloat16",
    accuracy="A",
)
_add(
    "scale-4-ulp-off",
    "computes the scale of float32 with a relative error of 5e-7, as by a fast square root",
    KERNEL,
    default_factor=lambda a: Attention.default_factor(a) * (1 + 5e-7),
    case="bias/in-full/cross",
    accuracy="A",
)
_add(
    "float16-through-bfloat16",
    "reads float16 as bfloat16",
    OUTPUT,
    read=lambda a, array: (
        _bfloat16(Attention.read(a, array))
        if a.given.dtype.name == "float16"
        else Attention.read(a, array)
    ),
    dtype="float16",
)
_add(
    "values-of-float16-in-bfloat16",
    "keeps the projected values of float16 in bfloat16",
    OUTPUT,
    mix=lambda a, weights, v: Attention.mix(
        a, weights, _bfloat16(v) if a.given.dtype.name == "float16" else v
    ),
    dtype="float16",
    accuracy="A",
)
for _dtype, _percent in (("bfloat16", 2.0), ("bfloat16", 1.0), ("float16", 1.0), ("float16", 0.3)):
    _add(
        f"scale-{_percent}-percent-off-in-{_dtype}",
        f"multiplies the scale of {_dtype} by {1 + _percent / 100}",
        KERNEL,
        OUTPUT,
        default_factor=lambda a, p=_percent: Attention.default_factor(a) * (1 + p / 100),
        dtype=_dtype,
        case=LONG,
        accuracy="A",
    )
