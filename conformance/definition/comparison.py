"""Compare arrays in units of unavoidable rounding noise.

One rule holds for every element: |got - want| is at most limit·σ, or at most the underflow. There
is no averaging that could hide a deviation, and elements with σ = 0 must be exact, except for
underflow. In arrays of at least `FEWEST` elements, two more rules detect what no single element
shows: the rms of error/σ must be at most a quarter of the limit, and the signed bias of outputs and
weights at most what correlated roundings cause in correct implementations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from conformance.definition.dtypes import Array
from conformance.definition.expectation import Expectation
from conformance.errors import WrongShape
from conformance.records.findings import INFINITE, Figures, Worst, rounded_figure
from conformance.records.numbers import LIMIT, ratios

BETWEEN_ANSWERS = 11.31
"""The limit for comparing two answers to one problem: √2·LIMIT, because both have noise."""

DOUBTFUL = 2.0
"""An array that exceeds its limits by at most this factor is checked with σ from more samples."""

ESTIMATES = 2
"""How often σ is estimated again while an array is doubtful; the second time needs heavy tails."""

FEWEST = 64
"""Arrays with fewer elements are judged by their worst element alone: their errors may come from
three or four roundings, so their rms varies as much as a single error."""

RMS = 0.25
"""The limit of the rms, relative to that of an element: 2σ. The largest rms of 28 correct
algorithms is 1.7σ (`benchmarks/calibrate.py --honest`)."""

SINGLE = 2.0**-20
"""About the largest relative σ that a weight has in float32; in half precision, σ is larger."""

UNBIASED = ("output", "weights")
"""The arrays whose bias is judged. Gradients are not among them, because in the gradients of shared
weights, correlated errors add up."""

_HUGE = 1e100
"""The magnitude to which ratios are clipped, so that their squares can be added."""

NOTHING = Worst("", (), "", "", "")
"""The placeholder for the worst element of an array that is within its limits."""


class Comparison(msgspec.Struct, frozen=True):
    """The result of comparing one array: its figures, and its worst element if the array deviates.

    `excess` is the largest of the figures that count for the array, each relative to its limit. The
    error of the worst element always counts, the rms in arrays of at least `FEWEST` elements, and
    the bias in such arrays if `UNBIASED` names them. `worst` is `NOTHING` if `excess` is at most 1.
    """

    figures: Figures
    worst: Worst
    excess: float

    @property
    def fits(self) -> bool:
        """Whether all figures that count for the array are within their limits."""
        return self.excess <= 1


def compare(
    name: str,
    got: Array,
    want: Array,
    noise: Array,
    underflow: float,
    limit: float = LIMIT,
    tolerated: float = 0.0,
) -> Comparison:
    """Return the comparison of an array with its expected values; `noise` is σ of each element.

    An empty array has no errors. `underflow` is the largest error that counts as 0, `limit` the
    largest |error|/σ that conforms, and `tolerated` a bias that conforms in any case.

    Raises:
        WrongShape: if the shapes of `got` and `want` differ.
    """
    if got.shape != want.shape:
        raise WrongShape(f"{name} has shape {list(got.shape)}, wanted {list(want.shape)}")
    if got.size == 0:
        return Comparison(Figures(name, 0.0, 0.0, 0.0, limit), NOTHING, 0.0)
    ratio = ratios(got, want, noise, underflow).ravel()
    size = np.abs(ratio)
    flat = int(size.argmax())
    largest = float(size[flat])
    finite = ratio if largest < _HUGE else np.clip(ratio[np.isfinite(ratio)], -_HUGE, _HUGE)
    count = max(1, finite.size)
    figures = Figures(
        array=name,
        max_ratio=rounded_figure(largest),
        rms_ratio=rounded_figure(math.sqrt(float(finite @ finite) / count))
        if finite.size
        else INFINITE,
        bias=rounded_figure(float(finite.sum()) / math.sqrt(count)),
        limit=limit,
    )
    excess = _excess(
        name, count, figures.max_ratio, figures.rms_ratio, figures.bias, limit, tolerated
    )
    if excess > 1 and name in UNBIASED:
        tolerated = max(tolerated, _tolerated_bias(name, want, noise, limit))
        excess = _excess(
            name, count, figures.max_ratio, figures.rms_ratio, figures.bias, limit, tolerated
        )
    if excess <= 1:
        return Comparison(figures, NOTHING, excess)
    at = np.unravel_index(flat, got.shape)
    return Comparison(figures, element(name, at, got[at], want[at], noise[at]), excess)


def _excess(
    name: str,
    count: int,
    largest: float,
    rms: float,
    bias: float,
    limit: float,
    tolerated: float = 0.0,
) -> float:
    """Return the largest of the three figures of an array, each relative to its limit.

    In arrays with fewer than `FEWEST` elements, only the largest error counts; the bias counts only
    in the arrays `UNBIASED`. `tolerated` is the limit of the bias if it is larger than the limit
    for independent rows.
    """
    parts = [largest / limit]
    if count >= FEWEST:
        parts.append(rms / (RMS * limit))
        if name in UNBIASED:
            # Correlated errors add up to a bias that grows with √N; without them it would be 1.
            parts.append(abs(bias) / max(tolerated, limit * (1 + math.sqrt(count) / 100)))
    return max(parts)


def _tolerated_bias(name: str, want: Array, noise: Array, limit: float) -> float:
    """Return the limit of the bias of an array whose rows share errors.

    Equal rows, as with a scale of 0, are rounded alike, so only distinct rows are independent. All
    weights of a row may share the error of its normaliser: up to 2σ, and in the mean over n
    distinct rows 4σ/√n. Relative to the weight, σ of that error is at most that of the row's most
    accurate weight and, because normalisers are at least as accurate as float32, `SINGLE`.
    """
    rows = want.reshape(-1, want.shape[-1])
    if name == "weights":
        # A normaliser does not depend on the order of the keys.
        rows = np.sort(rows, axis=-1)
    largest = float(np.abs(rows).max()) or 1.0
    with np.errstate(invalid="ignore"):
        distinct = len(np.unique(np.round(rows / largest, 12), axis=0))
    tolerated = limit * (1 + math.sqrt(want.size) / 100) * math.sqrt(len(rows) / distinct)
    if name != "weights" or not want.any():
        return tolerated
    inverse = np.divide(np.abs(want), noise, out=np.zeros(want.shape), where=noise > 0)
    most = inverse.max(axis=-1, keepdims=True)
    shared = np.minimum(np.divide(1.0, most, out=np.zeros(most.shape), where=most > 0), SINGLE)
    in_all = float((shared * inverse).sum()) / math.sqrt(want.size)
    return max(tolerated, limit / LIMIT * min(2.0, 4 / math.sqrt(distinct)) * in_all)


def compare_all(
    got: Mapping[str, Array],
    want: Mapping[str, Array],
    noise: Mapping[str, Array],
    underflow: float,
    limit: float = LIMIT,
    tolerated: float = 0.0,
) -> list[Comparison]:
    """Return the comparison of each array in `got`, as `compare` does.

    The arrays are concatenated and compared as one vector, because for small arrays NumPy's calls
    cost more than the arithmetic. Only arrays that exceed a limit are then compared individually.
    If an array is empty or has a wrong shape, all arrays are compared individually instead.

    Raises:
        WrongShape: if an array has a wrong shape.
    """
    names = list(got)
    alike = all(got[name].shape == want[name].shape and got[name].size for name in names)
    if len(names) < 2 or not alike:
        return [compare(n, got[n], want[n], noise[n], underflow, limit, tolerated) for n in names]
    ratio = ratios(_joined(got, names), _joined(want, names), _joined(noise, names), underflow)
    counts, starts = _spans(got, names)
    largest = np.maximum.reduceat(np.abs(ratio), starts)
    with np.errstate(invalid="ignore", over="ignore"):
        rms = np.sqrt(np.add.reduceat(ratio * ratio, starts) / counts)
        bias = np.add.reduceat(ratio, starts) / np.sqrt(counts)
    compared = []
    for name, count, most, root, mean in zip(
        names, counts.tolist(), largest.tolist(), rms.tolist(), bias.tolist(), strict=True
    ):
        excess = _excess(name, count, most, root, mean, limit, tolerated)
        if excess <= 1:
            figures = Figures(
                name, rounded_figure(most), rounded_figure(root), rounded_figure(mean), limit
            )
            compared.append(Comparison(figures, NOTHING, excess))
        else:
            of_array = got[name], want[name], noise[name]
            compared.append(compare(name, *of_array, underflow, limit, tolerated))
    return compared


def element(name: str, index: tuple, got: float, want: float, noise: float) -> Worst:
    """Return an element of an array as evidence of a deviation, with its numbers as text."""
    texts = (f"{float(value):.10g}" for value in (got, want, noise))
    return Worst(name, tuple(int(i) for i in index), *texts)


def between(name: str, one: Array, other: Array, noise: Array, underflow: float) -> Comparison:
    """Return the comparison of one array in two answers of an implementation.

    Both answers contain noise, and may be wrong. A wrong answer may have noise where the correct
    one has none, so each σ is raised to at least the rms of σ over the array. Elements that are NaN
    in both count as equal, because other requirements report NaN.
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
    """Return the comparison of each array in two answers of an implementation, as `between` does.

    `one` and `other` are the arrays of the answers, and `noise` is σ of each element, all by name.
    """
    names = list(one)
    alike = all(one[name].shape == other[name].shape and one[name].size for name in names)
    joined = _joined(one, names)
    if not alike or np.isnan(joined).any():
        return [between(n, one[n], other[n], noise[n], underflow) for n in names]
    if (joined == _joined(other, names)).all() and np.isfinite(joined).all():
        same = [Figures(name, 0.0, 0.0, 0.0, BETWEEN_ANSWERS) for name in names]
        return [Comparison(figures, NOTHING, 0.0) for figures in same]
    counts, starts = _spans(one, names)
    sigmas = _joined(noise, names)
    typical = np.sqrt(np.add.reduceat(sigmas * sigmas, starts) / counts)
    floored = np.split(np.maximum(sigmas, np.repeat(typical, counts)), starts[1:])
    shaped = {n: part.reshape(one[n].shape) for n, part in zip(names, floored, strict=True)}
    return compare_all(one, other, shaped, underflow, BETWEEN_ANSWERS)


def _joined(arrays: Mapping[str, Array], names: Sequence[str]) -> Array:
    """Return the concatenation of the flattened arrays with these names, in this order."""
    return np.concatenate([arrays[name].reshape(-1) for name in names])


def _spans(arrays: Mapping[str, Array], names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sizes of the arrays, and their offsets in the concatenation of all."""
    counts = np.array([arrays[name].size for name in names])
    return counts, np.cumsum(counts) - counts


def _estimates(expectation: Expectation) -> Iterator[Expectation]:
    """Yield an expectation, then up to `ESTIMATES` times one whose σ is from more samples."""
    yield expectation
    for _ in range(ESTIMATES):
        careful = expectation.careful()
        if careful is None:
            return
        yield (expectation := careful)


def against(
    expectation: Expectation, arrays: Mapping[str, Array], limit: float = LIMIT
) -> list[Comparison]:
    """Return the comparison of each array with the expectation, using the expectation's `sigma`.

    While an array exceeds its limits by so little that a bad estimate of σ may be the reason, all
    arrays are compared again with σ from more samples, as far as the expectation can provide them.

    If class TF32 is promised, any bias conforms: operands may be truncated, and σ is then mostly
    the mean of errors of one sign.
    """
    want, underflow = expectation.arrays, expectation.underflow
    tolerated = math.inf if expectation.promised == "TF32" else 0.0
    compared: list[Comparison] = []
    for estimate in _estimates(expectation):
        compared = compare_all(arrays, want, estimate.sigma, underflow, limit, tolerated)
        if not any(1 < each.excess <= DOUBTFUL for each in compared):
            break
    return compared


def accuracy_class(expectation: Expectation, arrays: Mapping[str, Array]) -> str:
    """Return the most accurate class whose limit no element exceeds; "" if there is none.

    The rms and the bias are not considered. If no class fits, but the worst element exceeds the
    limit of the least accurate class by so little that a bad estimate of σ may be the reason, all
    classes are tried again with σ estimated from more samples, up to `ESTIMATES` times.
    """
    names = list(arrays)
    got, want = _joined(arrays, names), _joined(expectation.arrays, names)
    for estimate in _estimates(expectation):
        beyond = math.inf
        for accuracy, noise in estimate.noise.items():
            ratio = ratios(got, want, _joined(noise, names), estimate.underflow)
            beyond = float(np.abs(ratio).max(initial=0)) / LIMIT
            if beyond <= 1:
                return accuracy
        if not beyond <= DOUBTFUL:
            break
    return ""


def worst_of(comparisons: Iterable[Comparison]) -> Comparison:
    """Return the comparison with the largest excess; there has to be at least one."""
    return max(comparisons, key=lambda item: item.excess)
