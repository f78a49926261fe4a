"""Compare arrays in units of honest rounding noise.

One rule for everything: |got - want| ≤ limit·σ + underflow, element by element. Nothing is averaged
away, and an element that must be exact (σ = 0) has to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
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
        """Within the limit, everywhere."""
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


def element(name: str, index: tuple, got: float, want: float, noise: float) -> Worst:
    """One element as evidence."""
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


def against(
    expectation: Expectation, arrays: Mapping[str, Array], limit: float = LIMIT
) -> list[Comparison]:
    """Compare arrays, by their names, with what is expected of the least accurate class."""
    noise = expectation.loosest
    return [
        compare(name, got, expectation.arrays[name], noise[name], expectation.underflow, limit)
        for name, got in arrays.items()
    ]


def accuracy_class(expectation: Expectation, arrays: Mapping[str, Array]) -> str:
    """The most accurate class in whose limits every array lies, or "" for none."""
    for name, noise in expectation.noise.items():
        if all(
            np.all(
                np.abs(ratios(got, expectation.arrays[key], noise[key], expectation.underflow))
                <= LIMIT
            )
            for key, got in arrays.items()
        ):
            return name
    return ""


def worst_of(comparisons: Iterable[Comparison]) -> Comparison:
    """The one that comes closest to its limit or is furthest beyond it."""
    return max(comparisons, key=lambda item: item.figures.max_ratio / item.figures.limit)


def _rounded(value: float) -> float:
    """Four digits: more would only make records longer."""
    return float(f"{min(max(value, -INFINITE), INFINITE):.4g}")
