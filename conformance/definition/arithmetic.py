"""The arithmetics in which the reference can run: float64, and float64 with rounding noise.

The noise is Monte Carlo arithmetic (Parker 1997): every intermediate x becomes x·(1 + u·ξ) + η·ξ',
with random ξ and ξ' that are uniform in [-1, 1]. The roundoff u and the underflow η are those of
the format in which an implementation of the given accuracy class would store x. The spread of the
results is the error that such an implementation cannot avoid. Correlations (a softmax row sums to
one, the row term of the backward pass) are preserved, because each sample runs through the whole
computation.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple
from weakref import WeakValueDictionary

import einops
import numpy as np

from conformance.definition.dtypes import Array, DType
from conformance.records.numbers import UNDERFLOW

Kind = Literal["tensor", "logits", "probability", "returned", "angle"]
"""The kind of an intermediate, which decides the format in which each accuracy class stores it.

"logits" include statistics and factors; "returned" adds the rounding to the dtype in those classes
that do not round probabilities to it, because the intermediate is returned; an "angle" is never
stored in a format less accurate than float32.
"""

SAMPLES = 12
FEWER_SAMPLES = 6
"""The numbers of samples: `SAMPLES` for classes that decide verdicts, `FEWER_SAMPLES` for others.

They limit the quality of σ for an element that dominates its row: with 8 samples, one correct
element in 400,000 exceeded 8σ; with 16, one in 2,500,000, at twice the cost.
"""


@dataclass(frozen=True)
class AccuracyClass:
    """An accuracy class of implementations: which intermediates they round to the problem's dtype.

    A field that is False means that these intermediates are stored in the accumulator's format,
    which for half precision is float32. `accumulators` are the running sums inside matrix products.
    `operands` are those of matrix products, which the class TF32 alone rounds, to that format.
    """

    name: str
    tensors: bool
    logits: bool
    probabilities: bool
    accumulators: bool
    operands: bool = False


CLASSES = (
    AccuracyClass("A0", False, False, False, False),
    AccuracyClass("A", True, False, True, False),
    AccuracyClass("B", True, True, True, False),
    AccuracyClass("C", True, True, True, True),
    AccuracyClass("TF32", False, False, False, False, operands=True),
)
"""The accuracy classes, in every dtype from most to least accurate.

A0, A, B and C each round all that the one before it rounds. TF32 exists only in float32.
`conformance.records.numbers.ACCURACY` describes in words what each class rounds.
"""

TF32_ROUNDOFF = 2.0**-11
"""The unit roundoff of TF32: float32 with 10 explicit bits of the significand instead of 23."""

AROUND_A_FUNCTION = AccuracyClass("A0", True, False, False, False)
"""Class A0 as a function can keep it.

The heads that it is given, what it returns, and the gradients of both are stored in the dtype;
everything in between is as in A0. No answer is said to have reached this class.
"""


def classes_of(dtype: DType, promised: str = "") -> tuple[AccuracyClass, ...]:
    """Return the accuracy classes to compare with in a dtype.

    In half precision, whose accumulators are more accurate than the dtype, they are A0 to C.
    Elsewhere, there is only A0 and, in float32, TF32 if that is the class `promised`.
    """
    if dtype.accumulator < dtype.roundoff:
        return CLASSES[:4]
    tf32 = promised == "TF32" and dtype.name == "float32"
    return CLASSES[:1] + CLASSES[4:] * tf32


class Exact:
    """Arithmetic in float64 without added rounding."""

    def __call__(self, values: Array, kind: Kind) -> Array:
        """Return an intermediate of this kind as an implementation stores it: here, unchanged."""
        return values

    def error(self, values: Array, kind: Kind) -> Array:
        """Return the error of storing these values as an intermediate of this kind: here, zeros."""
        return np.zeros_like(values)

    def contract(self, axes: str, left: Array, right: Array, kind: Kind) -> Array:
        """Return the contraction of two arrays, with axes given in einsum's notation."""
        if is_identity(right):
            return projected_by_identity(axes, left, right)
        return contract(axes, left, right)

    def total(self, axes: str, values: Array, kind: Kind) -> Array:
        """Return the sum of an array over some axes, given in einsum's notation."""
        return np.einsum(axes, values)

    def recomputed(self, weights: Array, log_total: Array) -> Array:
        """Return the weights as kernels recompute them from logits and `log_total`: here, as is.

        `log_total` is the logarithm of the softmax's normaliser.
        """
        return weights

    def reordered(self, axes: str, left: Array, right: Array) -> Array | float:
        """Return the difference of two sums of the same terms that round differently: here, 0."""
        return 0.0

    def lift(self, values: Array) -> Array:
        """Return an input with the axis of samples, if this arithmetic has one: here, unchanged."""
        return values

    def among_equals(self, terms: int) -> Exact:
        """Return the arithmetic for sums in which `terms` terms may be equal: here, this one."""
        return self


class Noisy(Exact):
    """Arithmetic in float64 with the rounding noise of every accuracy class at once.

    Arrays have a leading axis of samples; `counts[i]` of the samples belong to the i-th of
    `classes`.
    """

    def __init__(
        self,
        dtype: DType,
        seed: int,
        samples: int | None = None,
        classes: Sequence[AccuracyClass] = (),
    ) -> None:
        """Prepare the noise of a dtype.

        Args:
            dtype: the format in which implementations store intermediates.
            seed: the seed of the noise.
            samples: the number of samples of each class; None for the usual numbers.
            classes: the accuracy classes; () for those that differ in the dtype.
        """
        self.classes = tuple(classes) or classes_of(dtype)
        decisive = ("A", self.classes[-1].name)
        usual = [SAMPLES if item.name in decisive else FEWER_SAMPLES for item in self.classes]
        self.counts = [samples] * len(usual) if samples else usual
        held = {
            "tensor": [item.tensors for item in self.classes],
            "logits": [item.logits for item in self.classes],
            "probability": [item.probabilities for item in self.classes],
            "accumulator": [item.accumulators for item in self.classes],
        }
        self._roundoff = {
            kind: np.repeat(np.where(stored, dtype.roundoff, dtype.accumulator), self.counts)
            for kind, stored in held.items()
        }
        # Accumulators of float16 have the exponent range of float32.
        wide = min(dtype.underflow, UNDERFLOW["float32"])
        self._underflow = {
            kind: np.repeat(np.where(stored, dtype.underflow, wide), self.counts)
            for kind, stored in held.items()
        }
        # Results are returned in the dtype, so classes that do not round to it do so here.
        half = dtype.accumulator < dtype.roundoff
        rounds = np.repeat([half and not item.probabilities for item in self.classes], self.counts)
        self._roundoff["returned"] = rounds * dtype.roundoff
        self._underflow["returned"] = rounds * dtype.underflow
        self._roundoff["angle"] = np.full(sum(self.counts), dtype.accumulator)
        self._underflow["angle"] = np.full(sum(self.counts), wide)
        reads = np.repeat([item.operands for item in self.classes], self.counts)
        self._roundoff["operand"] = reads * TF32_ROUNDOFF
        self._equal = 0
        self._random = np.random.Generator(np.random.SFC64(seed))
        self._reordering = np.random.Generator(np.random.SFC64([seed, 1]))

    def parts(self, most: int) -> Iterator[tuple[Noisy, dict[str, slice]]]:
        """Yield this arithmetic in parts of at most `most` samples, which fit into caches.

        Each part comes with a dictionary that maps the name of a class to the slice of its samples
        in the part. The parts share one generator.
        """
        ends = np.cumsum(self.counts)
        for first in range(0, int(ends[-1]), most):
            part = copy.copy(self)
            chosen = slice(first, first + most)
            part._roundoff = {kind: each[chosen] for kind, each in self._roundoff.items()}
            part._underflow = {kind: each[chosen] for kind, each in self._underflow.items()}
            members = {
                item.name: slice(max(0, int(end) - count - first), int(end) - first)
                for item, end, count in zip(self.classes, ends, self.counts, strict=True)
                if end > first and end - count < first + most
            }
            yield part, members

    def among_equals(self, terms: int) -> Noisy:
        """Return a copy of this arithmetic for sums in which `terms` terms may be equal."""
        found = copy.copy(self)
        found._equal = terms
        return found

    def __call__(self, values: Array, kind: Kind) -> Array:
        """Return `values` with the noise of storing them as intermediates of this kind.

        Each x becomes x·(1 + u·ξ), plus η·ξ' if underflow matters; the module explains the symbols.
        Zeros stay zero, and kinds that no class rounds are returned unchanged.
        """
        if not self._roundoff[kind].any():
            return values
        roundoff = _column(self._roundoff[kind], values.ndim)
        shape = np.broadcast_shapes(roundoff.shape, values.shape)
        noise = self._uniform(shape) * roundoff
        noise *= values
        noise += values
        underflow = _column(self._underflow[kind], values.ndim)
        # Exponentials underflow in every format; other intermediates only in float16.
        if kind == "probability" or underflow.max() > UNDERFLOW["float32"]:
            noise += self._uniform(shape) * (underflow * (values != 0))
        return noise

    def error(self, values: Array, kind: Kind) -> Array:
        """Return a random rounding error of at most u·|x| for each x; u is the kind's roundoff."""
        roundoff = _column(self._roundoff[kind], values.ndim)
        return self._uniform(np.broadcast_shapes(roundoff.shape, values.shape)) * roundoff * values

    def contract(self, axes: str, left: Array, right: Array, kind: Kind) -> Array:
        """Return the contraction of two arrays with the noise of accumulating and rounding it.

        A projection by the identity is exact, because its operand has already been rounded.
        """
        if is_identity(right):
            return projected_by_identity(axes, left, right)
        if self._roundoff["operand"].any() and is_product(axes):
            axes, left, right = _with_samples(axes, left, right)
            left, right = self._truncated(left), self._truncated(right)
        squares = contract(axes, _first(left, axes, 0) ** 2, _first(right, axes, 1) ** 2)
        terms = _terms(axes, left, right)
        return self._accumulated(axes, contract(axes, left, right), squares, terms, kind)

    def total(self, axes: str, values: Array, kind: Kind) -> Array:
        """Return the sum over some axes with the noise of accumulating and rounding it."""
        squares = np.einsum(axes, values[:1] ** 2)
        terms = _terms(axes, values)
        return self._accumulated(axes, np.einsum(axes, values), squares, terms, kind)

    def recomputed(self, weights: Array, log_total: Array) -> Array:
        """Return the weights with each row scaled by exp(u·|log_total|·ξ), random ξ in [-1, 1].

        This is the error of rounding the logarithm of the normaliser, with the roundoff u. Fused
        kernels keep only this logarithm for the backward pass, and recompute the weights from it.
        This error becomes their largest one when logits are about 100 or, for weights near 1,
        already when they are about 8. `_growth` says what becomes of large exponents.
        """
        error = np.abs(log_total) * _column(self._roundoff["accumulator"], log_total.ndim)
        return weights * (1.0 + _growth(error * self._uniform(error.shape)))

    def reordered(self, axes: str, left: Array, right: Array) -> Array | float:
        """Return the difference of two sums of the same terms that round differently.

        The sums are those of an accumulator that is no less accurate than float32: only kernels
        form them again, and their accumulators are.
        """
        squares = contract(axes, _first(left, axes, 0) ** 2, _first(right, axes, 1) ** 2)
        exact = contract(axes, _first(left, axes, 0), _first(right, axes, 1))
        spread = _spread(axes, exact, squares, _terms(axes, left, right))
        roundoff = _column(self._roundoff["angle"], exact.ndim)
        shape = np.broadcast_shapes(roundoff.shape, exact.shape)
        return self._uniform(shape, self._reordering) * roundoff * np.sqrt(2 * spread)

    def lift(self, values: Array) -> Array:
        """Return an input with a leading axis of size 1, because it is the same in all samples."""
        return values[None]

    def _truncated(self, values: Array) -> Array:
        """Return operands with the noise of cutting off the digits that TF32 does not have.

        Some hardware and libraries round to nearest, and some cut off. The latter's error is
        between 0 and 2u·|x|, and has one sign, so that the errors of all products add up. As σ is
        the mean square of errors, not of deviations from their mean, it covers both.
        """
        roundoff = _column(self._roundoff["operand"], values.ndim)
        noise = self._uniform(np.broadcast_shapes(roundoff.shape, values.shape)) + 1.0
        noise *= -roundoff
        noise += 1.0
        noise *= values
        return noise

    def _accumulated(
        self, axes: str, exact: Array, squares: Array, terms: int, kind: Kind
    ) -> Array:
        """Return `exact` with the noise of summing its terms one by one and rounding the sum.

        Each partial sum is rounded, and may underflow. Sums and squares are taken from one sample,
        because they hardly differ between samples.
        """
        spread = _spread(axes, exact[:1], squares, terms, self._equal)
        roundoff = _column(self._roundoff["accumulator"], exact.ndim)
        shape = np.broadcast_shapes(roundoff.shape, exact.shape)
        noise = self._uniform(shape) * roundoff
        noise *= np.sqrt(spread)
        underflow = _column(self._underflow["accumulator"], exact.ndim)
        if underflow.max() > UNDERFLOW["float32"]:
            noise += self._uniform(shape) * (underflow * math.sqrt(terms) * (exact != 0))
        noise += exact
        return self(noise, kind)

    def _uniform(self, shape: tuple[int, ...], random: np.random.Generator | None = None) -> Array:
        """Return uniform noise in [-1, 1], which callers must not change.

        It is a slice of the pool at a random offset. If it would be larger than half of the pool,
        one slice is taken for each sample, or else fresh noise is drawn. `random` is the generator
        to draw from, if not the usual one.
        """
        random = random or self._random
        size = math.prod(shape)
        pool = _pool()
        if size > pool.size // 2:
            if len(shape) > 1 and shape[0] > 1:
                return np.stack([self._uniform(shape[1:], random) for _ in range(shape[0])])
            return random.uniform(-1.0, 1.0, shape)
        start = int(random.integers(pool.size - size))
        return pool[start : start + size].reshape(shape)


class Amplified(Exact):
    """Arithmetic with the noise of one sample, amplified so that float32 suffices for it.

    The effect of small noise is proportional to it. Noise below `AMPLIFIED` is therefore raised to
    that size, and the error of the result is divided by the same factor. The amplified noise is far
    above the rounding of float32, but small enough for its effect to stay proportional. Arrays have
    no axis of samples, so they fit into caches, and the scale of the noise of each sum is computed
    only once, with the first sample.

    The samples of a class are stratified: over all of them, the noise of each intermediate has the
    mean square of uniform noise. σ is therefore exact where a single rounding dominates, and fewer
    samples are enough.

    Attributes:
        factor: the factor by which the noise of the current sample is amplified.
    """

    def __init__(
        self, dtype: DType, seed: int, wide: type[np.floating], reach: float = 1.0
    ) -> None:
        """Prepare the noise of a dtype.

        Args:
            dtype: the format in which implementations store intermediates.
            seed: the seed of the noise.
            wide: the format of the arrays: float32, or float64 for numbers beyond its range.
            reach: a factor by which the problem itself magnifies noise, so that the noise is
                amplified by so much less.
        """
        self._dtype, self._seed, self._wide, self._reach = dtype, seed, wide, reach
        self._spreads: list[Array] = []
        self._equal = 0

    def begin(self, accuracy: AccuracyClass, number: int, samples: int) -> None:
        """Begin a sample of an accuracy class; sample 0 of each class has to come first.

        Args:
            accuracy: the accuracy class.
            number: the number of the sample, counted from 0.
            samples: the number of samples of this class.
        """
        dtype, held = self._dtype, accuracy
        stored = {
            "tensor": held.tensors,
            "logits": held.logits,
            "probability": held.probabilities,
            "accumulator": held.accumulators,
        }
        roundoff = {kind: dtype.roundoff if s else dtype.accumulator for kind, s in stored.items()}
        roundoff["angle"] = dtype.accumulator
        roundoff["operand"] = held.operands * TF32_ROUNDOFF
        self.factor = max(1.0, AMPLIFIED / self._reach / max(roundoff.values()))
        wide = min(dtype.underflow, UNDERFLOW["float32"])
        underflow = {kind: dtype.underflow if s else wide for kind, s in stored.items()}
        # Results are returned in the dtype, so classes that do not round to it do so here.
        rounds = len(classes_of(dtype)) > 1 and not held.probabilities
        roundoff["returned"] = rounds * dtype.roundoff
        underflow["returned"] = rounds * dtype.underflow
        self._roundoff = {kind: each * self.factor for kind, each in roundoff.items()}
        # Comparisons allow more than float32's underflow anyway.
        self._underflow = {
            kind: each * self.factor if each > UNDERFLOW["float32"] else 0.0
            for kind, each in underflow.items()
        }
        # Samples of a class differ only in their pools.
        self._pool = _stratified(samples, np.dtype(self._wide).name)[number]
        place = (*CLASSES, AROUND_A_FUNCTION).index(accuracy)
        self._random = np.random.Generator(np.random.SFC64([self._seed, place]))
        self._reordering = np.random.Generator(np.random.SFC64([self._seed, place, 1]))
        if number == 0:
            self._scales: list[Array] = []
        self._place = 0

    def __call__(self, values: Array, kind: Kind) -> Array:
        """Return `values` with amplified noise of storing them as this kind; zeros stay zero."""
        if not self._roundoff[kind]:
            return values
        noise = self._times_noise(values, self._roundoff[kind])
        noise += values
        if self._underflow[kind]:
            noise += self._times_noise((values != 0).astype(self._wide), self._underflow[kind])
        return noise

    def error(self, values: Array, kind: Kind) -> Array:
        """Return an amplified random rounding error for each value x, proportional to x."""
        return self._times_noise(values, self._roundoff[kind])

    def contract(self, axes: str, left: Array, right: Array, kind: Kind) -> Array:
        """Return the contraction of two arrays with the noise of accumulating and rounding it."""
        if is_identity(right):
            return projected_by_identity(axes, left, right)
        if self._roundoff["operand"] and is_product(axes):
            left, right = self._truncated(left), self._truncated(right)
        exact = contract(axes, left, right)
        terms = _terms(axes, left, right)
        return self._accumulated(exact, lambda: self._spread(axes, exact, left, right), terms, kind)

    def total(self, axes: str, values: Array, kind: Kind) -> Array:
        """Return the sum over some axes with the noise of accumulating and rounding it."""
        exact, terms = np.einsum(axes, values), _terms(axes, values)
        return self._accumulated(exact, lambda: self._spread(axes, exact, values), terms, kind)

    def recomputed(self, weights: Array, log_total: Array) -> Array:
        """Return the weights with each row scaled by exp(u·|log_total|·ξ), as `Noisy` does.

        The exponent is not amplified, but its effect is, so that this stays proportional.
        """
        error = self._times_noise(log_total, self._roundoff["accumulator"] / self.factor)
        return weights * (1 + _growth(error) * self.factor)

    def _truncated(self, values: Array) -> Array:
        """Return operands with the noise of cutting off digits, as `Noisy` does."""
        roundoff = self._roundoff["operand"]
        noise = self._times_noise(values, -roundoff)
        noise += values * (1.0 - roundoff)
        return noise

    def reordered(self, axes: str, left: Array, right: Array) -> Array:
        """Return the difference of two sums of the same terms that round differently."""

        def spread() -> Array:
            return self._spread(axes, contract(axes, left, right), left, right)

        twice = 2 * self._roundoff["angle"] ** 2
        scale = self._scale(spread, lambda squares: squares * twice)
        return self._times_noise(scale, 1.0, self._reordering)

    def among_equals(self, terms: int) -> Amplified:
        """Return this arithmetic, from now on for sums in which `terms` terms may be equal."""
        self._equal = terms
        return self

    def _spread(self, axes: str, exact: Array, *operands: Array) -> Array:
        """Return the sum of the squared partial sums of a sum `exact`, as `_spread` does."""
        squared = [operand**2 for operand in operands]
        squares = np.einsum(axes, *squared) if len(squared) == 1 else contract(axes, *squared)
        return _spread(axes, exact, squares, _terms(axes, *operands), self._equal)

    def _accumulated(
        self, exact: Array, spread: Callable[[], Array], terms: int, kind: Kind
    ) -> Array:
        """Return the sum `exact` with the noise of accumulating its terms and then rounding it."""

        def variance(squares: Array) -> Array:
            roundoff, underflow = self._roundoff, self._underflow
            found = squares * roundoff["accumulator"] ** 2
            found += (exact * roundoff[kind]) ** 2
            lost = underflow["accumulator"] ** 2 * terms + underflow[kind] ** 2
            found += lost * (exact != 0)
            return found

        noise = self._times_noise(self._scale(spread, variance), 1.0)
        noise += exact
        return noise

    def _scale(self, spread: Callable[[], Array], variance: Callable[[Array], Array]) -> Array:
        """Return the scale of the noise of a sum, by its place in the order of all sums.

        It is computed only with the first sample of a class, because samples differ only in noise.

        Args:
            spread: returns the sum of the squared partial sums, which is the same in all classes.
            variance: returns the square of the scale, from that sum.
        """
        place, self._place = self._place, self._place + 1
        if place == len(self._spreads):
            self._spreads.append(spread())
        if place == len(self._scales):
            found = variance(self._spreads[place])
            self._scales.append(np.sqrt(found, out=found))
        return self._scales[place]

    def _times_noise(
        self, values: Array, scale: float, random: np.random.Generator | None = None
    ) -> Array:
        """Return values · scale · noise, computed in parts that fit into caches.

        `random` is the generator to draw from, if not the usual one.
        """
        random = random or self._random
        flat = np.ascontiguousarray(values).reshape(-1)
        product = np.empty_like(flat)
        starts = random.integers(self._pool.size - _AT_ONCE, size=-(-flat.size // _AT_ONCE))
        for part, start in enumerate(starts.tolist()):
            span = slice(part * _AT_ONCE, (part + 1) * _AT_ONCE)
            taken, into = flat[span], product[span]
            np.multiply(taken, self._pool[start : start + taken.size], out=into)
            if scale != 1.0:
                into *= scale
        return product.reshape(values.shape)


AMPLIFIED = 2.0**-13
"""The roundoff to which `Amplified` raises the largest roundoff of a class if that is smaller: 2^11
times the roundoff of float32."""

_AT_ONCE = 2**15
"""How many elements `Amplified` multiplies by noise at once."""


@lru_cache(maxsize=8)
def _stratified(samples: int, wide: str) -> Array:
    """Return a pool of noise for each sample, `[samples pool]`.

    [-1, 1] is divided into as many parts as there are samples. For each element of the pool, every
    sample is drawn from a different part, and the mean square over the samples is 1/3.
    """
    random = np.random.Generator(np.random.SFC64(samples))
    parts = random.permuted(np.repeat(np.arange(samples)[:, None], 2**18, axis=1), axis=0)
    pool = (parts + random.random(parts.shape)) * (2 / samples) - 1
    pool /= np.sqrt(3 * np.mean(pool**2, axis=0))
    return pool.astype(wide)


MOST_SUMMED = 2**18
"""The most products to sum with einsum; beyond that, matrix products are much faster."""


def projected_by_identity(axes: str, values: Array, identity: Array) -> Array:
    """Return the contraction of values with a projection that is the identity.

    This contraction only rearranges axes.
    """
    operands, output = axes.replace("...", "").split("->")
    given, of_weight = operands.split(",")
    before, after = (" ".join(each).replace("e", "(h d)") for each in (given, output))
    heads = identity.shape[of_weight.index("h")]
    return einops.rearrange(values, f"... {before} -> ... {after}", h=heads)


def contract(axes: str, left: Array, right: Array) -> Array:
    """Return `numpy.einsum(axes, left, right)`, by matrix products if many terms make them faster.

    An ellipsis stands for at most one axis, that of the samples.
    """
    plan = _plan(axes, left.ndim, right.ndim)
    terms = right.size * math.prod(left.shape[place] for place in plan.lone)
    if terms <= MOST_SUMMED or not plan.rows or not plan.columns:
        return np.einsum(axes, left, right)
    sizes = dict(zip(plan.left + plan.right, left.shape + right.shape, strict=True))

    def stacked(operand: Array, axes: str, *groups: list[str]) -> Array:
        """Return the operand as matrices whose rows and columns are these groups of axes."""
        order = [axes.index(axis) for axis in (*plan.both, *groups[0], *groups[1])]
        sides = (math.prod(sizes[axis] for axis in group) for group in groups)
        moved = operand.transpose(order)
        return moved.reshape(*moved.shape[: len(plan.both)], *sides)

    product = stacked(left, plan.left, plan.rows, plan.summed) @ stacked(
        right, plan.right, plan.summed, plan.columns
    )
    made = [*plan.both, *plan.rows, *plan.columns]
    sides = (sizes[axis] for axis in (*plan.rows, *plan.columns))
    order = [made.index(axis) for axis in plan.output if axis in made]
    return product.reshape(*product.shape[: len(plan.both)], *sides).transpose(order)


class _Plan(NamedTuple):
    """The axes of a contraction of two arrays, by the role that they play in it.

    `left`, `right` and `output` are the axes of the operands and of the result. Axes of both
    operands are in `both` if the result has them, and in `summed` if not. `rows` are the axes that
    the right operand lacks, and `columns` those that the left one lacks. `lone` holds the positions
    of `rows` in the left operand.
    """

    left: str
    right: str
    output: str
    both: list[str]
    summed: list[str]
    rows: list[str]
    columns: list[str]
    lone: list[int]


@lru_cache(maxsize=256)
def _plan(axes: str, *dimensions: int) -> _Plan:
    """Return the plan of a contraction; `dimensions` are the numbers of axes of its operands."""
    letters, output = axes.replace("...", "s").split("->")
    left, right = (
        each if len(each) == count else each.removeprefix("s")
        for each, count in zip(letters.split(","), dimensions, strict=True)
    )
    return _Plan(
        left,
        right,
        output,
        both=[axis for axis in left if axis in right and axis in output],
        summed=[axis for axis in left if axis in right and axis not in output],
        rows=[axis for axis in left if axis not in right],
        columns=[axis for axis in right if axis not in left],
        lone=[place for place, axis in enumerate(left) if axis not in right],
    )


def _growth(exponents: Array) -> Array:
    """Return exp(x) - 1 for exponents x up to 1, and beyond that its tangent, e·x - 1.

    In half precision, a log-normaliser of some hundred is off by 1. Where it is off by some
    hundred, the power would overflow, and an infinite σ would accept any answer.
    """
    near = np.expm1(np.minimum(exponents, 1.0))
    return np.where(exponents > 1.0, math.e * exponents - 1.0, near)


def _column(per_sample: Array, dimensions: int) -> Array:
    return per_sample.reshape(-1, *(1,) * (dimensions - 1))


@lru_cache(maxsize=1)
def _pool() -> Array:
    """Return noise in [-1, 1] to be reused, because fresh noise would double a sample's cost."""
    return np.random.Generator(np.random.SFC64(0)).uniform(-1.0, 1.0, 2**20)


def is_identity(weight: Array) -> bool:
    """Return whether a weight, `[width heads head]` or `[heads head width]`, is the identity.

    It is compared as a matrix, with the axes of heads joined.
    """
    if weight.ndim != 3 or not weight.size:
        return False
    if _identities.get(id(weight)) is weight:
        return True
    first, last = weight.shape[0], weight.shape[-1]
    sides = {(first, first): (first, -1), (last, last): (-1, last)}
    size = math.isqrt(weight.size)
    shape = sides.get((size, size))
    if shape is None or size * size != weight.size:
        return False
    square = weight.reshape(shape)
    if not (square.diagonal() == 1).all() or np.count_nonzero(square) != size:
        return False
    _identities[id(weight)] = weight
    return True


_identities: WeakValueDictionary[int, Array] = WeakValueDictionary()
"""Weights known to be identities; checking again would take longer than the attention."""


def is_product(axes: str) -> bool:
    """Return whether a contraction is a matrix product, not a sum of elementwise products.

    In a matrix product, an operand has an axis that the other one does not have.
    """
    left, right = (set(each) for each in axes.replace("...", "").split("->")[0].split(","))
    return left != right


def _with_samples(axes: str, *operands: Array) -> tuple[str, Array, Array]:
    """Return the axes and the operands of a contraction, all operands with an axis of samples."""
    inputs, output = axes.split("->")
    letters = inputs.split(",")
    left, right = (
        operand if each.startswith("...") else operand[None]
        for each, operand in zip(letters, operands, strict=True)
    )
    every = ",".join(f"...{each.removeprefix('...')}" for each in letters)
    return f"{every}->{output}", left, right


def _first(operand: Array, axes: str, position: int) -> Array:
    """Return the first sample of an operand, or the whole operand if it has no sample axis.

    The operand is the one at `position` in `axes`, which are in einsum's notation.
    """
    return operand[:1] if axes.split("->")[0].split(",")[position].startswith("...") else operand


def _spread(axes: str, exact: Array, squares: Array, terms: int, equal: int = 0) -> Array:
    """Return the sum of the squares of the partial sums of n terms that are added one by one.

    For terms with mean S/n and mean square Q/n, the k-th partial sum has the mean square
    k(Q/n - S²/n²) + k²S²/n²; the total over all k is nQ/2 + (n/3 - 1/2)S².

    If m terms are equal, each is rounded like the one before it, until the sum has doubled. Their
    errors then add up to m/2 times the rounding error of the sum, instead of partly cancelling.

    Args:
        axes: the axes of the sum, in einsum's notation.
        exact: the sum S.
        squares: the sum Q of the squares of its terms.
        terms: the number n of its terms.
        equal: the number m of its terms that are equal if it is a sum over tokens.
    """
    spread = max(terms / 2, 1.0) * squares
    spread += max(terms / 3 - 0.5, 0.0) * exact**2
    if 0 < equal <= terms and _over_tokens(axes):
        spread += (equal / 2 * exact) ** 2
    return spread


def _over_tokens(axes: str) -> bool:
    """Return whether a contraction sums over queries or keys, not only over components."""
    inputs, output = axes.split("->")
    return any(axis in inputs and axis not in output for axis in "qk")


def _terms(axes: str, *operands: Array) -> int:
    """Return the number of terms that einsum sums for each element of its result."""
    inputs, output = axes.replace("...", "").split("->")
    sizes: dict[str, int] = {}
    for letters, operand in zip(inputs.split(","), operands, strict=True):
        sizes |= zip(letters, operand.shape[operand.ndim - len(letters) :], strict=True)
    return math.prod(size for letter, size in sizes.items() if letter not in output)
