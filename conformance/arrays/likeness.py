"""How one output comes from another: axes in another order, a factor, slices in another order.

Nothing is known of the inputs here, so that all of it is read off the two outputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from conformance.arrays.recovery import listed, nearest
from conformance.causes.hypothesis import significant
from conformance.causes.location import indices
from conformance.causes.logits import LEAST, best_factor
from conformance.definition.comparison import BETWEEN_ANSWERS
from conformance.definition.dtypes import Array, dtype_of
from conformance.errors import BadArrays
from conformance.records.findings import Phrase
from conformance.records.numbers import ratios

SAMPLED = 512
"""How many elements are compared first, before all are."""

COARSE = 0.05
"""How much they may differ, relative to the rms of the output."""

MOST_AXES = 6
"""The most axes, those of size 1 apart, whose orders are tried."""

MOST_SLICES = 2048
"""The most slices of an axis among which the nearest one to each is sought."""

MOST_COLUMNS = 1024
"""The most elements of a slice by which the nearest one is found."""

MOST_SHIFTED = 3
"""The most tokens by which an output is shifted."""

NAMES = ("batch entries", "heads", "tokens", "components")
"""What the axes `[batch heads length head]` of an output consist of."""


@dataclass(frozen=True)
class Measure:
    """Rounding noise σ, relative to the rms of each row, and the error that underflow may cause."""

    share: float
    underflow: float

    def sigma(self, want: Array) -> Array:
        """Return σ of each element of an output."""
        known = np.isfinite(want)
        counts = np.maximum(1, known.sum(axis=-1, keepdims=True))
        squares = (np.where(known, want, 0.0) ** 2).sum(axis=-1, keepdims=True)
        return np.broadcast_to(self.share * np.sqrt(squares / counts), want.shape)

    def near(self, got: Array, want: Array) -> bool:
        """Return whether two outputs are equal up to noise, NaN included."""
        both = np.isnan(got) & np.isnan(want)
        got, want = np.where(both, 0.0, got), np.where(both, 0.0, want)
        found = np.abs(ratios(got, want, self.sigma(want), self.underflow))
        return bool(found.max(initial=0.0) <= BETWEEN_ANSWERS)


@dataclass(frozen=True)
class Order:
    """An order of axes in which the numbers of one output, the finer one, may be the other's.

    Attributes:
        of_this: whether the finer one is this output, and not the other one.
        fine: the shape of the finer output.
        order: its axes in the order in which the coarser one has them.
        coarse: the shape of the coarser output.
    """

    of_this: bool
    fine: tuple[int, ...]
    order: tuple[int, ...]
    coarse: tuple[int, ...]

    @property
    def permuted(self) -> tuple[int, ...]:
        """The shape of the finer output with its axes in this order."""
        return tuple(self.fine[axis] for axis in self.order)

    @property
    def keeps_axes(self) -> bool:
        """Whether each axis of the coarser output is one of the finer one, or several of them."""
        return _bounds(self.coarse) <= _bounds(self.permuted)

    def applied(self, coarse: Array) -> Array:
        """Return the coarser output in the shape of the finer one."""
        return coarse.reshape(self.permuted).transpose(np.argsort(self.order))

    def sampled(self, fine: Array, coarse: Array, at: np.ndarray) -> Array:
        """Return |difference| of elements of the finer output, by their indices if it is flat."""
        places = np.unravel_index(at, self.fine)
        there = np.ravel_multi_index([places[axis] for axis in self.order], self.permuted)
        one, other = fine.ravel()[at], coarse.ravel()[there]
        found: Array = np.where(np.isnan(one) & np.isnan(other), 0.0, np.abs(one - other))
        return np.where(np.isnan(found), np.inf, found)

    def phrase(self, kind: str = "") -> Phrase:
        """Return what is said of the two outputs if this is how one comes from the other."""
        kept = self.permuted == self.coarse
        return Phrase(
            kind or ("outputs.transposed" if kept else "outputs.reshaped"),
            {
                "one": "the other output" if self.of_this else "this output",
                "other": "this one" if self.of_this else "the other one",
                "shape": [*self.coarse],
                "of": [*self.fine],
                "order": [*self.order],
            },
        )


def _bounds(shape: Sequence[int]) -> set[int]:
    """Return the products of the first sizes of a shape, by which it divides a flat array."""
    return {int(it) for it in itertools.accumulate(shape, lambda a, b: a * b)} | {1}


def _orders(
    this: tuple[int, ...], other: tuple[int, ...], *, apart: bool = False
) -> Iterator[Order]:
    """Yield every order of axes; with `apart`, those with the last axis divided into two, too."""
    for of_this, fine, coarse in ((False, other, this), (True, this, other)):
        width, shapes = fine[-1] if fine else 1, [fine]
        if apart and len(fine) < 4:
            shapes += [
                (*fine[:-1], n, width // n) for n in range(2, width // 2 + 1) if width % n == 0
            ]
        for shape in shapes:
            moved = [axis for axis, size in enumerate(shape) if size > 1]
            if len(moved) > MOST_AXES:
                continue
            for found in itertools.permutations(moved):
                places = iter(found)
                yield Order(
                    of_this,
                    shape,
                    tuple(next(places) if n > 1 else axis for axis, n in enumerate(shape)),
                    coarse,
                )


def in_one_shape(this: Array, other: Array) -> tuple[Array, Array, Order]:
    """Return two outputs of different shapes in that of the finer one, and how they are read.

    Axes are put into the order, and those that are joined are divided, by which the outputs have
    most in common.

    Raises:
        BadArrays: if there is no such order.
    """
    shapes = f"the outputs have different shapes, {list(this.shape)} and {list(other.shape)}"
    if this.size != other.size:
        raise BadArrays(
            f"{shapes}, of {this.size:,} and {other.size:,} elements, which no order of axes "
            "brings together; compare the same batch entries, heads and tokens"
        )
    size, at = _rms(other), _sample(this.size)

    def alike(order: Order) -> float:
        found = order.sampled(*_sides(order, this, other), at)
        return float((found <= COARSE * size).mean())

    every = [it for it in _orders(this.shape, other.shape) if it.keeps_axes]
    if not every:
        raise BadArrays(
            f"{shapes}, and no order of axes, joined or divided, brings them into one; transpose "
            "one of them to the axes of the other"
        )
    best = max(every, key=alike)
    fine, coarse = _sides(best, this, other)
    moved = best.applied(coarse)
    return (fine, moved, best) if best.of_this else (moved, fine, best)


def _sides(order: Order, this: Array, other: Array) -> tuple[Array, Array]:
    return (this, other) if order.of_this else (other, this)


def _sample(size: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(0)).integers(0, max(1, size), SAMPLED)


def _rms(array: Array) -> float:
    known = array[np.isfinite(array)]
    return math.sqrt(float(known @ known) / max(1, known.size))


def transposed(this: Array, other: Array, measure: Measure) -> Iterator[Phrase]:
    """Yield the order of axes in which one output has the numbers of the other, if there is one."""
    at, size = _sample(this.size), _rms(other)
    for order in _orders(this.shape, other.shape, apart=True):
        fine, coarse = _sides(order, this, other)
        fine = fine.reshape(order.fine)
        if (order.sampled(fine, coarse, at) > COARSE * size).mean() > 0.1:
            continue
        if measure.near(fine, order.applied(coarse)):
            yield order.phrase()
            return


def multiplied(this: Array, other: Array, measure: Measure) -> Iterator[Phrase]:
    """Yield the order of axes and the factor by which one output has the numbers of the other."""
    size = _rms(other)
    ratio = _rms(this) / size if size else 0.0
    if not (0 < ratio < math.inf) or abs(ratio - 1) <= LEAST:
        return
    for factor in (ratio, -ratio):
        for order in transposed(this / factor, other, measure):
            yield _both(order, factor)
            return


def _both(order: Phrase, factor: float) -> Phrase:
    """Return the cause that slices or axes are in another order, and all is multiplied."""
    by = Phrase("outputs.factor", {"factor": significant(factor)})
    return Phrase("mistakes.two", {"causes": [order, by]})


def related(got: Array, want: Array, wrong: np.ndarray, measure: Measure) -> Iterator[Phrase]:
    """Yield how an output `[batch heads length head]` comes from another one.

    `wrong` is True at elements that differ by more than noise.
    """
    if not (np.isfinite(got).all() and np.isfinite(want).all() and want.any()):
        return
    if measure.near(got, -want):
        yield Phrase("outputs.negated")
        return
    if not got.any():
        yield Phrase("outputs.zero")
        return
    factor = best_factor(got, want)
    if measure.near(got, factor * want):
        yield Phrase("outputs.factor", {"factor": significant(factor)})
    for axis, name in enumerate(NAMES):
        if not 1 < got.shape[axis] <= MOST_SLICES:
            continue
        slices = [np.moveaxis(it, axis, 0).reshape(got.shape[axis], -1) for it in (got, want)]
        step = -(-slices[0].shape[1] // MOST_COLUMNS)
        slices = [it[:, ::step] for it in slices]
        order = nearest(*slices)
        if order is not None and measure.near(got, np.take(want, order, axis)):
            yield _ordered(order, name)
            return
        sizes = [np.sqrt((it**2).sum(axis=1, keepdims=True)) for it in slices]
        if not all(size.all() for size in sizes):
            continue
        one, other = (it / size for it, size in zip(slices, sizes, strict=True))
        for order in (nearest(one, other), nearest(-one, other)):
            if order is not None:
                moved = np.take(want, order, axis)
                factor = best_factor(got, moved)
                if measure.near(got, factor * moved):
                    yield _both(_ordered(order, name), factor)
                    return
    for count in range(1, min(MOST_SHIFTED, got.shape[2] - 1) + 1):
        if measure.near(got[:, :, count:], want[:, :, :-count]):
            yield Phrase("outputs.late", {"count": count})
        elif measure.near(got[:, :, :-count], want[:, :, count:]):
            yield Phrase("outputs.early", {"count": count})
    for axis, name in enumerate(("batch", "head", "query")):
        others = tuple(other for other in range(4) if other != axis)
        at = np.nonzero(wrong.any(axis=others))[0]
        where = indices(name, at, got.shape[axis]) if len(at) < got.shape[axis] else None
        if where:
            one, other = np.take(got, at, axis), np.take(want, at, axis)
            factor = best_factor(one, other)
            if not one.any():
                yield Phrase("outputs.zero", {"part": where})
            elif measure.near(one, -other):
                yield Phrase("outputs.negated", {"part": where})
            elif measure.near(one, factor * other):
                yield Phrase("outputs.factor", {"factor": significant(factor), "part": where})


def _ordered(order: np.ndarray, name: str) -> Phrase:
    """Return the phrase for slices in another order."""
    count = len(order)
    straight = np.arange(count)
    if (order == straight[::-1]).all() and count > 2:
        return Phrase("outputs.reversed", {"of": name})
    steps = (order - straight) % count
    if (steps == steps[0]).all() and count > 2:
        back = int(steps[0])
        return Phrase("outputs.rolled", {"of": name, "count": min(-back, count - back, key=abs)})
    for groups in range(2, count // 2 + 1):
        each = count // groups
        if groups * each == count and (order == straight.reshape(groups, -1).T.ravel()).all():
            return Phrase("outputs.grouped", {"of": name, "groups": groups, "each": each})
    return Phrase("outputs.permuted", {"of": name, **listed(order)})


def rounded(this: Array, other: Array) -> Iterator[Phrase]:
    """Yield to which dtype one output is rounded that equals the other one otherwise."""
    for name in ("float32", "float16", "bfloat16"):
        to = dtype_of(name).round
        for one, source, which, of in (
            (this, other, "this output", "the other one"),
            (other, this, "the other output", "this one"),
        ):
            if np.array_equal(one, to(source), equal_nan=True) and not np.array_equal(
                one, source, equal_nan=True
            ):
                yield Phrase("outputs.rounded", {"one": which, "other": of, "dtype": name})
                return
