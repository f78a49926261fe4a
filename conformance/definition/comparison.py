"""Compare arrays in units of honest rounding noise.

One rule for everything: |got - want| ≤ limit·σ + underflow, element by element. Nothing is averaged
away, and an element that must be exact (σ = 0) has to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from conformance.definition.dtypes import Array
from conformance.definition.expectation import Expectation
from conformance.errors import WrongShape
from conformance.records.findings import INFINITE, Figures, Worst
from conformance.records.numbers import LIMIT, ratios

BETWEEN_ANSWERS = 11.31
"""Limit for two answers to the same problem: √2·LIMIT, since each has noise of its own."""

_HUGE = 1e100
"""Ratios are cut here before they are squared and added."""

NOTHING = Worst("", (), "", "", "")
"""Evidence is for what does not fit."""


@dataclass(frozen=True)
class Comparison:
    """One array, compared. `fits` says whether it is within the limit."""

    figures: Figures
    worst: Worst

    @property
    def fits(self) -> bool:
        """Whether every element is within the limit."""
        return self.figures.max_ratio <= self.figures.limit


def compare(
    name: str,
    got: Array,
    want: Array,
    noise: Array,
    underflow: float,
    limit: float = LIMIT,
) -> Comparison:
    """Compare one array.

    Raises:
        WrongShape: the shapes differ.
    """
    if got.shape != want.shape:
        raise WrongShape(f"{name} has shape {list(got.shape)}, wanted {list(want.shape)}")
    if got.size == 0:
        return Comparison(Figures(name, 0.0, 0.0, 0.0, limit), NOTHING)
    ratio = ratios(got, want, noise, underflow).ravel()
    size = np.abs(ratio)
    flat = int(size.argmax())
    largest = float(size[flat])
    finite = ratio if largest < _HUGE else np.clip(ratio[np.isfinite(ratio)], -_HUGE, _HUGE)
    count = max(1, finite.size)
    figures = Figures(
        array=name,
        max_ratio=_rounded(largest),
        rms_ratio=_rounded(math.sqrt(float(finite @ finite) / count)) if finite.size else INFINITE,
        bias=_rounded(float(finite.sum()) / math.sqrt(count)),
        limit=limit,
    )
    if largest <= limit:
        return Comparison(figures, NOTHING)
    at = np.unravel_index(flat, got.shape)
    return Comparison(figures, element(name, at, got[at], want[at], noise[at]))


def compare_all(
    got: Mapping[str, Array],
    want: Mapping[str, Array],
    noise: Mapping[str, Array],
    underflow: float,
    limit: float = LIMIT,
) -> list[Comparison]:
    """Compare the arrays of `got`, each as `compare` does.

    They are laid end to end and compared as one vector, because most arrays are so small that the
    calls of NumPy cost more than the arithmetic. The rare one that does not fit is looked at again.
    """
    names = list(got)
    alike = all(got[name].shape == want[name].shape and got[name].size for name in names)
    if len(names) < 2 or not alike:
        return [compare(n, got[n], want[n], noise[n], underflow, limit) for n in names]
    ratio = ratios(_joined(got, names), _joined(want, names), _joined(noise, names), underflow)
    counts, starts = _spans(got, names)
    largest = np.maximum.reduceat(np.abs(ratio), starts)
    with np.errstate(invalid="ignore", over="ignore"):
        rms = np.sqrt(np.add.reduceat(ratio * ratio, starts) / counts)
        bias = np.add.reduceat(ratio, starts) / np.sqrt(counts)
    return [
        Comparison(Figures(name, _rounded(most), _rounded(root), _rounded(mean), limit), NOTHING)
        if most <= limit
        else compare(name, got[name], want[name], noise[name], underflow, limit)
        for name, most, root, mean in zip(
            names, largest.tolist(), rms.tolist(), bias.tolist(), strict=True
        )
    ]


def element(name: str, index: tuple, got: float, want: float, noise: float) -> Worst:
    """Return one element as evidence."""
    texts = (f"{float(value):.10g}" for value in (got, want, noise))
    return Worst(name, tuple(int(i) for i in index), *texts)


def between(name: str, one: Array, other: Array, noise: Array, underflow: float) -> Comparison:
    """Compare two answers of an implementation, right or wrong.

    Each has noise of its own. A wrong answer may have some where the right one has none, so no
    element's σ is taken as less than the array's rms. NaN equals NaN: what is NaN twice is no
    disagreement, and other requirements speak of it.
    """
    flat = noise.ravel()
    typical = math.sqrt(float(flat @ flat) / max(1, flat.size))
    if one.shape == other.shape:
        both = np.isnan(one) & np.isnan(other)
        if both.any():
            one, other = np.where(both, 0.0, one), np.where(both, 0.0, other)
    return compare(name, one, other, np.maximum(noise, typical), underflow, BETWEEN_ANSWERS)


def all_between(
    one: Mapping[str, Array],
    other: Mapping[str, Array],
    noise: Mapping[str, Array],
    underflow: float,
) -> list[Comparison]:
    """Compare the arrays of two answers, by the names of `one`, each as `between` does."""
    names = list(one)
    alike = all(one[name].shape == other[name].shape and one[name].size for name in names)
    joined = _joined(one, names)
    if not alike or np.isnan(joined).any():
        return [between(n, one[n], other[n], noise[n], underflow) for n in names]
    if np.array_equal(joined, _joined(other, names)) and np.isfinite(joined).all():
        same = [Figures(name, 0.0, 0.0, 0.0, BETWEEN_ANSWERS) for name in names]
        return [Comparison(figures, NOTHING) for figures in same]
    counts, starts = _spans(one, names)
    sigmas = _joined(noise, names)
    typical = np.sqrt(np.add.reduceat(sigmas * sigmas, starts) / counts)
    floored = np.split(np.maximum(sigmas, np.repeat(typical, counts)), starts[1:])
    shaped = {n: part.reshape(one[n].shape) for n, part in zip(names, floored, strict=True)}
    return compare_all(one, other, shaped, underflow, BETWEEN_ANSWERS)


def _joined(arrays: Mapping[str, Array], names: Sequence[str]) -> Array:
    """Concatenate the arrays of these names, flattened."""
    return np.concatenate([arrays[name].reshape(-1) for name in names])


def _spans(arrays: Mapping[str, Array], names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the size of each array, and its start when they are concatenated."""
    counts = np.array([arrays[name].size for name in names])
    return counts, np.cumsum(counts) - counts


def against(
    expectation: Expectation, arrays: Mapping[str, Array], limit: float = LIMIT
) -> list[Comparison]:
    """Compare arrays, by their names, with what is expected of the least accurate class."""
    return compare_all(
        arrays, expectation.arrays, expectation.loosest, expectation.underflow, limit
    )


def accuracy_class(expectation: Expectation, arrays: Mapping[str, Array]) -> str:
    """Return the most accurate class whose limits hold for every array, or "" if none does."""
    names = list(arrays)
    got, want = _joined(arrays, names), _joined(expectation.arrays, names)
    for accuracy, noise in expectation.noise.items():
        ratio = ratios(got, want, _joined(noise, names), expectation.underflow)
        if (np.abs(ratio) <= LIMIT).all():
            return accuracy
    return ""


def worst_of(comparisons: Iterable[Comparison]) -> Comparison:
    """Return the comparison that is closest to its limit, or furthest beyond it."""
    return max(comparisons, key=lambda item: item.figures.max_ratio / item.figures.limit)


def _rounded(value: float) -> float:
    """Round to four digits; more would only lengthen records."""
    return float(f"{min(max(value, -INFINITE), INFINITE):.4g}")
