"""Two arithmetics for one reference: exact (float64), and float64 with rounding noise.

The noise is Monte Carlo arithmetic (Parker 1997): every intermediate x becomes x·(1 + u·ξ) + η·ξ',
ξ and ξ' uniform in [-1, 1], where u is the roundoff and η the underflow of the format in which an
implementation of the given accuracy class would hold it. The spread of the results is the error
that such an implementation cannot avoid. Correlations (a softmax row sums to one, the row term of
the backward pass) come out by themselves, because one sample runs through the whole computation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from conformance.definition.dtypes import Array, DType

Kind = Literal["tensor", "logits", "probability"]

SAMPLES = 12
FEWER_SAMPLES = 4
"""Evaluations for the class that decides a verdict, and for those that only name the accuracy.

σ of an element that dominates its row rests on these alone: with 8, one honest element in 400,000
lay beyond 8σ; with 16, one in 2,500,000, at twice the cost.
"""


@dataclass(frozen=True)
class AccuracyClass:
    """A class of implementations by which intermediates they hold in the problem's dtype.

    The rest it holds in the accumulator's format: float32 for half precision. `accumulators`
    says the same of the running sums inside matrix products.
    """

    name: str
    tensors: bool
    logits: bool
    probabilities: bool
    accumulators: bool


CLASSES = (
    AccuracyClass("A0", False, False, False, False),
    AccuracyClass("A", True, False, True, False),
    AccuracyClass("B", True, True, True, False),
    AccuracyClass("C", True, True, True, True),
)
"""From the most accurate to the least; each allows what the one before it does.

`conformance.records.numbers.ACCURACY` says in words what each rounds.
"""


def classes_of(dtype: DType) -> tuple[AccuracyClass, ...]:
    """Return the classes that can be told apart: one if sums are no wider than the dtype."""
    return CLASSES if dtype.accumulator < dtype.roundoff else CLASSES[:1]


class Exact:
    """Arithmetic in float64 without added rounding."""

    def __call__(self, values: Array, kind: Kind) -> Array:
        """Return an intermediate as an implementation would store it."""
        return values

    def contract(self, axes: str, left: Array, right: Array, kind: Kind) -> Array:
        """Return a sum of products, in einsum's notation."""
        return np.einsum(axes, left, right)

    def total(self, axes: str, values: Array, kind: Kind) -> Array:
        """Return a sum over axes given in einsum's notation."""
        return np.einsum(axes, values)

    def recomputed(self, weights: Array, log_total: Array) -> Array:
        """Return the weights for the backward pass: stored, or recomputed as exp(s - log_total)."""
        return weights

    def lift(self, values: Array) -> Array:
        """Give an input the sample axis, if there is one."""
        return values


class Noisy(Exact):
    """Arithmetic in float64 with the rounding noise of every accuracy class at once.

    Arrays have a leading axis `samples`: `counts` evaluations for each class of the dtype.
    """

    def __init__(self, dtype: DType, seed: int) -> None:
        self.classes = classes_of(dtype)
        self.counts = [FEWER_SAMPLES] * (len(self.classes) - 1) + [SAMPLES]
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
        self._underflow = dtype.underflow
        self._random = np.random.Generator(np.random.SFC64(seed))

    def __call__(self, values: Array, kind: Kind) -> Array:
        """Return x·(1 + u·ξ) + η·ξ'; an exact zero stays zero, as it needed no computation."""
        roundoff = _column(self._roundoff[kind], values.ndim)
        shape = np.broadcast_shapes(roundoff.shape, values.shape)
        noise = self._uniform(shape) * roundoff
        noise *= values
        noise += values
        if kind == "probability":
            # Exponentials underflow; everything else is made of them and inherits the error.
            noise += self._uniform(shape) * (self._underflow * (values != 0))
        return noise

    def contract(self, axes: str, left: Array, right: Array, kind: Kind) -> Array:
        """Return a sum of products with the noise of its own accumulation, then rounded."""
        squares = np.einsum(axes, _first(left, axes, 0) ** 2, _first(right, axes, 1) ** 2)
        terms = _terms(axes, left, right)
        return self._accumulated(np.einsum(axes, left, right), squares, terms, kind)

    def total(self, axes: str, values: Array, kind: Kind) -> Array:
        """Return a sum with the noise of its own accumulation, then rounded."""
        squares = np.einsum(axes, values[:1] ** 2)
        return self._accumulated(np.einsum(axes, values), squares, _terms(axes, values), kind)

    def recomputed(self, weights: Array, log_total: Array) -> Array:
        """Rounding the logarithm of the normaliser scales a whole row by 1 + u·|log_total|·ξ.

        Fused kernels keep only that logarithm and make the weights again; with logits of some
        hundred this is the largest error that they have.
        """
        error = np.abs(log_total) * _column(self._roundoff["logits"], log_total.ndim)
        return weights * (1.0 + error * self._uniform(error.shape))

    def lift(self, values: Array) -> Array:
        """Add a leading axis of size one: an input is the same in all samples."""
        return values[None]

    def _accumulated(self, exact: Array, squares: Array, terms: int, kind: Kind) -> Array:
        """Add the noise of n terms x summed one after the other, as a matrix product does.

        Each partial sum is rounded. Terms with mean S/n and mean square Q/n make the k-th partial
        sum k(Q/n - S²/n²) + k²S²/n² in the mean square, which adds up to nQ/2 + (n/3 - 1/2)S².
        Q and S are taken from one sample: they differ between samples by no more than u.
        """
        spread = max(terms / 2, 1.0) * squares
        spread += max(terms / 3 - 0.5, 0.0) * exact[:1] ** 2
        roundoff = _column(self._roundoff["accumulator"], exact.ndim)
        shape = np.broadcast_shapes(roundoff.shape, exact.shape)
        noise = self._uniform(shape) * roundoff
        noise *= np.sqrt(spread)
        noise += exact
        return self(noise, kind)

    def _uniform(self, shape: tuple[int, ...]) -> Array:
        """Return noise uniform in [-1, 1], a read-only stretch of the pool from a random start."""
        size = math.prod(shape)
        pool = _pool()
        if size > pool.size // 2:
            return self._random.uniform(-1.0, 1.0, shape)
        start = int(self._random.integers(pool.size - size))
        return pool[start : start + size].reshape(shape)


def _column(per_sample: Array, dimensions: int) -> Array:
    return per_sample.reshape(-1, *(1,) * (dimensions - 1))


@lru_cache(maxsize=1)
def _pool() -> Array:
    """Return a pool of noise, drawn once: drawing anew would double the cost of an evaluation."""
    return np.random.Generator(np.random.SFC64(0)).uniform(-1.0, 1.0, 2**20)


def _first(operand: Array, axes: str, position: int) -> Array:
    """Return the first sample of an operand with a sample axis, or the operand itself."""
    return operand[:1] if axes.split("->")[0].split(",")[position].startswith("...") else operand


def _terms(axes: str, *operands: Array) -> int:
    """Return the number of terms that each element of an einsum sums up."""
    inputs, output = axes.replace("...", "").split("->")
    sizes: dict[str, int] = {}
    for letters, operand in zip(inputs.split(","), operands, strict=True):
        sizes |= zip(letters, operand.shape[operand.ndim - len(letters) :], strict=True)
    return math.prod(size for letter, size in sizes.items() if letter not in output)
