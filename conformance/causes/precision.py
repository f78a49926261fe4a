"""Known defects in precision: rounded intermediate results, and arrays that are too inaccurate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType

import numpy as np

from conformance.causes.hypothesis import BETTER, HALF, Evidence, Hypothesis, Maker, rms
from conformance.causes.stages import Change, Stages
from conformance.definition.arithmetic import Exact
from conformance.definition.dtypes import BFLOAT16, DTYPES, FLOAT16, FLOAT32, Array, BoolArray
from conformance.records.findings import NOTHING, Phrase
from conformance.records.numbers import LIMIT, ratios

STAGES = ("projections", "logits", "weights", "context", "output", "bias")
KEPT = ("logits", "weights")
"""The stages that kernels in half precision are expected to keep in float32."""

SPREAD = 0.5
"""The least share of all elements whose errors must exceed 2σ if rounding is the cause.

In at least seven of eight rows, the share within the row must be at least half of this.
"""

LEAST = 0.02
"""The least rms(error / σ), with σ scaled to the narrower dtype, if rounding is the cause."""

CLASSES = {24: "accuracy.float32", 11: "accuracy.float16", 8: "accuracy.bfloat16"}
"""For the number of significand bits of a dtype, the id of the cause which states that an array is
only as accurate as this dtype."""

LIKE = (0.25, 3.0)
"""The least and the largest rms error, relative to that of a computation in which everything is
rounded to the narrower dtype, if rounding is the cause.

Between 0.6 and 1.3 was measured in computations in float16 and bfloat16, for logits of 1 to 100. A
key bias of 0.15 that is forgotten has errors of 6, and an exponential that is off by 1e-4 of 0.11.
"""


def rounded_at_a_stage(maker: Maker) -> Iterator[Hypothesis]:
    """Yield hypotheses in which intermediate results are rounded to a narrower format.

    In each hypothesis, either one kind of intermediate result is rounded, or all factors of
    products are. In the last hypothesis about a format, all factors and all biases are rounded. In
    half precision, some results may also be rounded to the dtype itself, which is too narrow.
    """
    problem, own = maker.problem, maker.problem.format.significand_bits
    if problem.dtype == "float16":
        yield maker.staged("precision.products-kept-in-float16", scaled=_late)
    for bits, rounding in (
        (24, FLOAT32.round),
        (11, partial(_significant, bits=11)),
        (11, FLOAT16.round),
        (8, BFLOAT16.round),
        (4, partial(_significant, bits=4)),
    ):
        digits = {"format": Phrase(f"significand.{bits}")}
        if bits == own and rounding == problem.format.round and problem.dtype in HALF:
            # What is multiplied and added up is float32 in accurate kernels.
            for stage in KEPT:
                about = {"stage": Phrase(f"stage.{stage}"), **digits}
                yield maker.staged("precision.rounded", about, held=_at(stage, rounding))
        if bits >= own:
            continue
        for stage in STAGES if problem.attn_bias is not None else STAGES[:-1]:
            about = {"stage": Phrase(f"stage.{stage}"), **digits}
            yield maker.staged("precision.rounded", about, held=_at(stage, rounding))
        product = _factors(rounding)
        yield maker.staged("precision.factors-rounded", digits, product=product)
        biases = {n: rounding(a) for n, a in maker.right.own.items() if n.endswith("_bias")}
        stages = {"product": product, "held": _at("bias", rounding)}
        make = partial(Stages, problem.with_weights(**biases), **stages)
        yield Hypothesis(Phrase("precision.all-rounded", {**digits}), make)


TF32_BITS = 11
"""The number of significand bits of TF32, which has the exponents of float32."""

TF32_SIZE = 2.0 ** (24 - TF32_BITS)
"""The factor by which TF32 is coarser than float32."""


def in_tf32(maker: Maker, evidence: Evidence) -> Iterator[Phrase]:
    """Yield the cause that operands of matrix products were rounded to TF32, or cut off to it.

    An operand near the middle between two numbers of TF32 may be rounded otherwise than predicted.
    The prediction therefore has to explain most of the error, but need not be met exactly.
    """
    off = np.abs(ratios(evidence.got, evidence.want, evidence.noise, evidence.underflow))
    if maker.problem.dtype != "float32" or not LEAST * TF32_SIZE < rms(off) < LIMIT * TF32_SIZE:
        return
    scale = maker.problem.logit_scale
    for (how, rounding), where, factor, power in itertools.product(
        (("rounded", _NEAREST), ("cut", _CUT)),
        ("products", "attention", "projections"),
        (1.0, scale, scale / math.log(2)),
        (False, True),
    ):
        if factor == 0:
            continue
        stages: dict[str, Change] = {"product": _operands(rounding, where)}
        if factor != 1.0:
            stages["score"] = _score_of_scaled(factor)
        if power:
            stages["mix"] = _mix_of_powers
        found = Stages(maker.problem, **stages).output
        known = np.isfinite(found) & np.isfinite(evidence.got)
        left, before = (rms((evidence.got - array)[known]) for array in (found, evidence.want))
        if before > 0 and left <= BETTER * before:
            about = {"how": Phrase(f"tf32.{how}"), "where": Phrase(f"tf32.{where}")}
            yield Phrase("precision.tf32", {**about})
            return


def normalised_at_every_key(maker: Maker, evidence: Evidence, again: Again) -> Phrase:
    """Return the cause that the output is normalised again at every key, or an empty phrase.

    A recurrence that merges keys by the running logarithm of their normaliser rounds it at each of
    them. The weights of a row then have an error in common, which is the sum of all these roundings
    (docs/noise.md). The wrong rows must be explained by one factor for each head, within the noise
    of such a sum, and the errors must change if the problem changes slightly.
    """
    problem, right = maker.problem, maker.right
    wrong = evidence.wrong.any(axis=-1)
    error = evidence.got - evidence.want
    if problem.dtype in HALF or not wrong.any() or not np.isfinite(error).all():
        return NOTHING
    shares = np.einsum("bhqd,hde->bqeh", right.context, right.own["output"])
    if shares.shape[2] < 2 * shares.shape[3]:
        return NOTHING
    with np.errstate(invalid="ignore"):
        running = np.logaddexp.accumulate(right.logits, axis=-1)
    running = np.where(right.allowed & np.isfinite(running), running, 0.0)
    noise = problem.format.roundoff * np.sqrt((running**2).sum(axis=-1) / 3)
    for entry, query in zip(*np.nonzero(wrong), strict=True):
        share, off = shares[entry, query], error[entry, query]
        factors, *_ = np.linalg.lstsq(share, off, rcond=None)
        if (
            rms(off - share @ factors) > BETTER * rms(off)
            or (np.abs(factors) > LIMIT * noise[entry, :, query]).any()
        ):
            return NOTHING
    other = again(problem.format.significand_bits).get("output")
    weight = np.divide(1.0, evidence.noise, where=evidence.noise > 0, out=0.0 * error)
    # Rows with much noise would hide that an error in the others is always the same.
    if other is None or _correlation(error * weight, other * weight) > CORRELATED:
        return NOTHING
    return Phrase("precision.normalised-at-every-key")


def _operands(rounding: Callable[[Array], Array], where: str) -> Change:
    """Return a stage `product` that rounds the operands of some products.

    `where` is "attention" for the products of query and key and of weights and values,
    "projections" for all others, and "products" for all.
    """

    def product(a: Stages, axes: str, left: Array, right: Array) -> Array:
        inside = axes in ("bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd")
        if where == "products" or inside == (where == "attention"):
            left, right = rounding(left), rounding(right)
        return np.einsum(axes, left, right)

    return product


def _score_of_scaled(factor: float) -> Change:
    """Return a stage `score` in which the query is scaled first, which changes its rounding."""
    return lambda a, q, k: Stages.score(a, q * factor, k) / factor


def _mix_of_powers(a: Stages, weights: Array, values: Array) -> Array:
    """Return the context as fused kernels compute it, which divide by the normaliser last."""
    largest = weights.max(axis=-1, keepdims=True)
    largest = np.where(largest > 0, largest, 1.0)
    return Stages.mix(a, weights / largest, values) * largest


def _late(a: Stages, scores: Array) -> Array:
    kept = FLOAT16.round(scores)
    # NaN: if scores overflow, no answer is predicted for the row.
    return np.where(np.isfinite(kept), kept, np.nan) * a.problem.logit_scale


def _significant(values: Array, bits: int, rounding: Callable[[Array], Array] = np.rint) -> Array:
    fraction, exponent = np.frexp(values)
    return np.ldexp(rounding(fraction * 2.0**bits) / 2.0**bits, exponent)


ROUNDINGS: dict[int, Callable[[Array], Array]] = {
    24: FLOAT32.round,
    11: partial(_significant, bits=11),
    8: BFLOAT16.round,
}
"""For the numbers of significand bits in `CLASSES`, how a number is rounded to as many."""

_NEAREST = partial(_significant, bits=TF32_BITS)
_CUT = partial(_significant, bits=TF32_BITS, rounding=np.trunc)


def _at(stage: str, rounding: Callable[[Array], Array]) -> Change:
    return lambda a, what, values: rounding(values) if what == stage else values


def _factors(rounding: Callable[[Array], Array]) -> Change:
    return lambda a, axes, left, right: np.einsum(axes, rounding(left), rounding(right))


CORRELATED = 0.7
"""If the errors in two nearly equal problems are correlated more than this, they are not due to
rounding."""

Again = Callable[[int], Mapping[str, Array]]
"""A function of `bits` that returns the errors of the answer to perturbed inputs, by array name.

The relative perturbation has a standard deviation of 32 times 2^-bits, but at most 2^-5.
"""


def coarse(
    name: str,
    evidence: Evidence,
    dtype: str,
    again: Again | None,
    certain: BoolArray | None = None,
    computed: Stages | None = None,
) -> Phrase:
    """Return the cause that an array is only as accurate as a narrower dtype, or an empty phrase.

    The error must be finite, occur in most rows, and be as large as rounding in the narrower dtype.
    It must also change with tiny changes of the inputs, if that can be seen: an error that does not
    change is a systematic mistake, however small. Elements without noise must be exact. For arrays
    with fewer than two axes or fewer than 16 elements, the result is an empty phrase.

    Args:
        name: the name of the array.
        evidence: the array that was returned, and the expected one.
        dtype: the dtype of the problem.
        again: a function that returns the errors, by array, for perturbed inputs; None if nobody
            can be asked.
        certain: a mask over all axes but the last, True for rows that may be exact and do not
            count when rows with errors are counted; None if there are no such rows.
        computed: the computation of the output, if its errors in the narrower dtype are known from
            that: the rms error must then be `LIKE` theirs. None if it only has to be `LEAST`.
    """
    own = DTYPES[dtype].significand_bits
    got, want = evidence.got, evidence.want
    if not np.isfinite(got).all() or got.ndim < 2 or got.size < 16:
        return NOTHING
    exact = evidence.noise == 0
    if (np.abs(got - want)[exact] > evidence.underflow).any():
        return NOTHING
    ratio = ratios(got, want, evidence.noise, evidence.underflow)
    open_rows = exact.all(axis=-1) if certain is None else exact.all(axis=-1) | certain
    if not is_rounding(ratio, open_rows):
        return NOTHING
    for bits in CLASSES:
        if bits >= own:
            continue
        coarser = ratio / 2.0 ** (own - bits)
        if np.abs(coarser).max() > LIMIT:
            continue
        if computed is None:
            size, (least, most) = rms(coarser), (LEAST, math.inf)
        else:
            size, (least, most) = size_of_errors(evidence, want, computed, bits), LIKE
        if size > most:
            continue
        if size < least:
            return NOTHING
        if again is not None and _correlation(got - want, again(bits).get(name)) > CORRELATED:
            return NOTHING
        return accuracy(dtype, bits)
    return NOTHING


def size_of_errors(evidence: Evidence, found: Array, computed: Stages, bits: int) -> float:
    """Return how large the errors of a prediction are, relative to those of a narrower dtype.

    It is the rms of error/σ, relative to that of a computation in which everything is rounded to so
    many significand bits. If that has no errors, or the shapes differ, it is ∞.

    Args:
        evidence: the array that was returned, with its noise.
        found: the prediction: what `computed` gives without rounding.
        computed: the computation.
        bits: the number of significand bits of the narrower dtype: one of `CLASSES`.
    """
    rounded = in_digits(computed, bits).output
    if not rounded.shape == found.shape == evidence.got.shape:
        return math.inf
    known = np.isfinite(rounded) & np.isfinite(found) & np.isfinite(evidence.got)
    known &= evidence.noise > 0
    left, usual = (
        rms(((array - found) / np.where(known, evidence.noise, 1.0))[known])
        for array in (evidence.got, rounded)
    )
    return left / usual if usual > 0 else math.inf


def in_digits(computed: Stages, bits: int) -> Stages:
    """Return a computation with all that is multiplied or stored rounded to so many bits.

    If the computation rounds on its own, it is the right one of its problem that is rounded.
    """
    rounding = ROUNDINGS[bits]
    changes = {n: it.__func__ for n, it in vars(computed).items() if isinstance(it, MethodType)}
    if type(computed) is not Stages or changes.keys() & {"held", "product"}:
        changes = {}

    def product(a: Stages, axes: str, left: Array, right: Array) -> Array:
        return Exact().contract(axes, rounding(left), rounding(right), "tensor")

    # Heads are rounded as projections: products with identities, which are large, are left out.
    rounded: dict[str, Change] = {} if computed.problem.heads_alone else {"product": product}
    rounded["held"] = lambda a, what, values: rounding(values)
    return Stages(computed.problem, **changes, **rounded)


def accuracy(dtype: str, bits: int) -> Phrase:
    """Return the cause that an array in a dtype has no more than so many significand bits."""
    tf32 = dtype == "float32" and bits == TF32_BITS
    return Phrase("accuracy.tf32" if tf32 else CLASSES[bits])


def is_rounding(ratio: Array, certain: BoolArray) -> bool:
    """Return whether errors are in as many places as those of rounding to a narrower dtype.

    `ratio` holds the errors relative to σ; rows that are `certain` do not count.
    """
    rows = (np.abs(ratio) > 2.0)[~certain]
    return bool(
        rows.size
        and rows.mean() >= SPREAD
        and (rows.mean(axis=-1) >= SPREAD / 2).mean() >= 1 - SPREAD / 4
    )


def _correlation(one: Array, other: Array | None) -> float:
    if other is None or other.shape != one.shape or not np.isfinite(other).all():
        return 1.0
    size = float(np.sqrt((one * one).sum() * (other * other).sum()))
    return abs(float((one * other).sum())) / size if size > 0 else 1.0
