"""Compare answers to long problems with exact values, and locate the worst element.

`check` compares every element, block by block; `check_sampled` compares sampled rows of the output,
and all elements of gradients; and `missed` counts the rows of a retrieval that are wrong.

For each array, the first two compute the largest |error|/σ and its place, the rms of error/σ, the
signed bias Σ(error/σ)/√N, and the gain Σ(error·want/σ²)/√Σ(want/σ)². The gain is like the bias, but
adds up errors in the direction of the expected values, such as those of a normaliser that is too
small.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.definition.comparison import FEWEST, RMS
from conformance.definition.dtypes import Array, dtype_of
from conformance.long.calling import Answered, Slices
from conformance.long.noise import (
    COMMON,
    UNKNOWN,
    LongNoise,
    Variances,
    extras,
    models,
    noises,
    sampled_head,
)
from conformance.long.oracle import BLOCK, Head, columns, rows
from conformance.long.problem import Heads, LongProblem, Retrieval
from conformance.records.numbers import LIMIT, ratios

DRIFT = 0.25
"""What correlated errors add to the limits of bias and gain, in units of σ·LIMIT, before division
by the root of the number of independent errors. Pairs of the same classes are rounded alike, so an
array has at most as many independent errors as there are classes."""

CLOSE = 4
"""By how many roundoffs of the largest number a value that was looked for may be off."""

FEW = 16
"""The number of independent rows below which the limits of rms and gain are wider.

With few rows, rms and gain vary almost as much as a single error."""

_READ = 2**15
"""The number of rows of an answer to convert at once."""


@dataclass(frozen=True)
class Place:
    """The position and the component of an element, with its actual and expected values."""

    position: int
    component: int
    got: float
    want: float


@dataclass(eq=False)
class Tally:
    """Statistics of the errors seen in one array so far, in units of σ.

    Attributes:
        groups: the number of rows whose errors are independent.
        count, rows: the number of elements and of rows.
        largest: the largest |error|/σ; `worst` is its place.
        squares, sum: the sums of (error/σ)² and of error/σ.
        along, size: the sums of error·want/σ² and of (want/σ)².
        beyond: the number of elements whose |error|/σ exceeds `LIMIT`.
        tiles: the batch entry, head and index of each block of `BLOCK` rows with such elements.
    """

    array: str
    groups: int = 1
    count: int = 0
    rows: int = 0
    largest: float = 0.0
    squares: float = 0.0
    sum: float = 0.0
    along: float = 0.0
    size: float = 0.0
    beyond: int = 0
    worst: Place | None = None
    tiles: set[tuple[int, int, int]] = field(default_factory=set)

    def add(
        self, at: tuple[int, int, int], got: Array, want: Array, sigma: Array, underflow: float
    ) -> None:
        """Add a block of rows `[rows size]`.

        Args:
            at: the batch entry, head and position of the first row.
            got, want, sigma: the actual and expected values, and σ of their difference.
            underflow: the largest error that counts as 0.
        """
        if not got.size:
            return
        ratio = ratios(got, want, sigma, underflow)
        # Both may be −∞, the log-normaliser of a query that sees nothing.
        ratio[got == want] = 0.0
        size = np.abs(ratio)
        largest = float(size.max())
        entry, head, start = at
        if largest > self.largest:
            row, component = np.unravel_index(int(size.argmax()), size.shape)
            numbers = (float(array[row, component]) for array in (got, want))
            self.largest = largest
            self.worst = Place(start + int(row), int(component), *numbers)
        if largest > LIMIT:
            beyond = size > LIMIT
            self.beyond += int(beyond.sum())
            at_rows = np.flatnonzero(beyond.any(axis=1)).tolist()
            self.tiles |= {(entry, head, (start + row) // BLOCK) for row in at_rows}
            ratio = np.clip(np.nan_to_num(ratio, posinf=1e100, neginf=-1e100), -1e100, 1e100)
        flat = ratio.ravel()
        strength = np.divide(want, sigma, out=np.zeros_like(want), where=sigma > 0).ravel()
        self.count += flat.size
        self.rows += len(got)
        self.squares += float(flat @ flat)
        self.sum += float(flat.sum())
        self.along += float(flat @ strength)
        self.size += float(strength @ strength)

    def join(self, other: Tally) -> None:
        """Add the statistics of another tally of the same array."""
        if other.largest > self.largest:
            self.largest, self.worst = other.largest, other.worst
        for name in ("count", "rows", "squares", "sum", "along", "size", "beyond"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.tiles |= other.tiles

    @property
    def rms(self) -> float:
        """The rms of error/σ."""
        return math.sqrt(self.squares / max(1, self.count))

    @property
    def bias(self) -> float:
        """The signed bias Σ(error/σ)/√N."""
        return self.sum / math.sqrt(max(1, self.count))

    @property
    def gain(self) -> float:
        """The gain: the bias in the direction of the expected values; 0 if all of them are 0."""
        return self.along / math.sqrt(self.size) if self.size else 0.0

    @property
    def excess(self) -> float:
        """The largest statistic relative to its limit; the array conforms if this is at most 1.

        In arrays with fewer than `FEWEST` elements, only the largest error counts.
        """
        parts = [self.largest / LIMIT]
        if self.count >= FEWEST:
            groups = min(self.groups, self.rows)
            alone = 1 / math.sqrt(self.count)
            # Weights of a row share an error, so the errors of dV_j = Σ_i P_ij dO_i are alike for
            # all keys.
            sides = 1 if self.array == "value" else groups
            bias = alone + DRIFT / math.sqrt(sides * self.count / self.rows)
            # The error of a single query's normaliser is in all keys, and may be as large as that
            # of a single element.
            few = (1 - RMS) / math.sqrt(groups) if groups < FEW else 0.0
            gain = alone + (DRIFT + few) / math.sqrt(groups)
            parts += [
                self.rms / ((RMS + few) * LIMIT),
                abs(self.bias) * alone / (LIMIT * bias),
                abs(self.gain) * alone / (LIMIT * gain),
            ]
        return max(parts)


@dataclass(frozen=True, eq=False)
class CheckedAnswer:
    """The comparison of one answer: tallies by accuracy class and array, and the time it took."""

    tallies: Mapping[str, Mapping[str, Tally]]
    seconds: float

    def decisive(self, promised: str = "") -> Mapping[str, Tally]:
        """Return the tallies that decide the verdict, by array.

        They are those of the accuracy class `promised`. If it is "" or was not compared, they are
        those of the least accurate class that was compared.
        """
        return self.tallies[promised if promised in self.tallies else list(self.tallies)[-1]]

    def conforms(self, promised: str = "") -> bool:
        """Return whether every array is within its limits, judged by the tallies of `decisive`."""
        return all(tally.excess <= 1 for tally in self.decisive(promised).values())

    @property
    def reached(self) -> str:
        """The most accurate class compared in which all arrays are within their limits, or ""."""
        return next((name for name in self.tallies if self.conforms(name)), "")


def check(
    problem: LongProblem,
    answered: Answered,
    *,
    tile: int = UNKNOWN,
    size: int = BLOCK,
    threads: int = 1,
    accuracy: str = "",
) -> CheckedAnswer:
    """Compare every element of every returned array with its exact value.

    Args:
        problem: the problem.
        answered: the results of the implementation.
        tile: how many keys the implementation sums up at once, for σ; `UNKNOWN` if not declared.
        size: the number of rows and of columns in a block.
        threads: how many pieces of each head to check at the same time.
        accuracy: the only accuracy class to compare with, for speed; "" or an unknown class for
            all of them.
    """
    started = time.perf_counter()
    batch, _, length, kv_heads, keys = problem.sizes
    arrays, of_classes, found = answered.arrays, noises(problem, tile), _Found(problem)
    of_classes = [noise for noise in of_classes if noise.name == accuracy] or of_classes
    with ThreadPoolExecutor(threads) as pool:
        for entry in range(batch):
            for kv_head in range(kv_heads):
                group = range(kv_head * problem.group, (kv_head + 1) * problem.group)
                heads = [Head(problem, entry, head) for head in group]
                for head in heads:
                    head.extra = np.zeros((length, COMMON + 2 * len(of_classes)))
                for task in [
                    pool.submit(_rows, head, span, size, of_classes, arrays)
                    for head in heads
                    for span in _pieces(length, threads, size)
                ]:
                    found.join(task.result())
                if not arrays.keys() & {"key", "value"}:
                    continue
                for task in [
                    pool.submit(_columns, heads, span, size, of_classes, arrays)
                    for span in _pieces(keys, threads, size)
                ]:
                    found.join(task.result())
    by_name = {noise.name: noise for noise in of_classes}
    for (name, sink), sums in found.sinks.items() if "sinks" in arrays else ():
        got = arrays["sinks"](0, 0, slice(0, 1))[:, [sink]]
        tally = found.of(name, "sinks")
        tally.add((0, sink, 0), got, *by_name[name].sinks(sums), problem.format.underflow)
    return CheckedAnswer(found.tallies, time.perf_counter() - started)


def _pieces(length: int, count: int, size: int) -> list[slice]:
    """Return slices that divide the length into at most `count` pieces of whole blocks.

    Only the last block of the last piece may have fewer than `size` rows.
    """
    step = max(size, -(-length // (count * size)) * size)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


class _Found:
    """Tallies by accuracy class and array, and the sums for the gradients of sinks."""

    def __init__(self, problem: LongProblem) -> None:
        batch, heads, queries, _, keys = problem.sizes
        classes = min(problem.queries.shape[1], problem.keys.shape[1], queries, keys)
        self._groups = batch * heads * max(1, classes)
        self.tallies: dict[str, dict[str, Tally]] = {}
        self.sinks: defaultdict[tuple[str, int], Any] = defaultdict(float)
        """For each accuracy class and head, the sum of what `LongNoise.of_sinks` gave so far."""

    def of(self, accuracy: str, array: str) -> Tally:
        """Return the tally of an array in an accuracy class; it is created on first use."""
        return self.tallies.setdefault(accuracy, {}).setdefault(array, Tally(array, self._groups))

    def join(self, other: _Found) -> None:
        """Add the tallies and sums of another piece."""
        for of_head, sums in other.sinks.items():
            self.sinks[of_head] += sums
        for accuracy, tallies in other.tallies.items():
            for array, tally in tallies.items():
                self.of(accuracy, array).join(tally)


class _Reader:
    """A reader of the rows of one head of an array, in order, which converts many rows at once."""

    def __init__(self, slices: Slices, entry: int, head: int, span: slice) -> None:
        self._slices, self._at, self._stop = slices, (entry, head), span.stop
        self._start, self._part = 0, np.zeros((0, 1))

    def __call__(self, rows: slice) -> Array:
        if rows.stop > self._start + len(self._part):
            self._start = rows.start
            stop = min(max(rows.stop, rows.start + _READ), self._stop)
            self._part = self._slices(*self._at, slice(rows.start, stop))
        return self._part[rows.start - self._start : rows.stop - self._start]


def _rows(
    head: Head,
    span: slice,
    size: int,
    of_classes: Sequence[LongNoise],
    arrays: Mapping[str, Slices],
) -> _Found:
    found, underflow = _Found(head.problem), head.problem.format.underflow
    read = {
        name: _Reader(arrays[name], head.entry, head.head, span)
        for name in ("output", "query", "log_total")
        if name in arrays
    }
    for block in rows(head, span, size):
        at = head.entry, head.head, block.span.start
        got = {name: reader(block.span) for name, reader in read.items()}
        needed = []
        for noise in of_classes:
            output, query, whole, row = noise.of_rows(head, block)
            needed.append((whole, row))
            if head.problem.sinks is not None:
                sums = noise.of_sinks(head, block.span, whole, row)
                found.sinks[noise.name, head.head] += sums
            wanted = {"output": (block.output, output), "query": (block.d_query, query)}
            if "log_total" in got:
                wanted["log_total"] = noise.of_log_total(head, block, whole)
            for name, numbers in got.items():
                found.of(noise.name, name).add(at, numbers, *wanted[name], underflow)
        head.extra[block.span] = extras(head, block, needed)
    return found


def _columns(
    heads: list[Head],
    span: slice,
    size: int,
    of_classes: Sequence[LongNoise],
    arrays: Mapping[str, Slices],
) -> _Found:
    first = heads[0]
    found, underflow = _Found(first.problem), first.problem.format.underflow
    read = {
        name: _Reader(arrays[name], first.entry, first.kv_head, span)
        for name in ("key", "value")
        if name in arrays
    }
    for block in columns(heads, span, size):
        at = first.entry, first.kv_head, block.span.start
        got = {name: reader(block.span) for name, reader in read.items()}
        for number, noise in enumerate(of_classes):
            key, value = noise.of_columns(block, COMMON + 2 * number)
            wanted = {"key": (block.d_key, key), "value": (block.d_value, value)}
            for name, numbers in got.items():
                found.of(noise.name, name).add(at, numbers, *wanted[name], underflow)
    return found


def check_sampled(
    heads: Heads, chosen: np.ndarray, answered: Answered, tile: int = UNKNOWN
) -> CheckedAnswer:
    """Compare the chosen rows of the output, and all gradients, with expected values.

    The inputs are those of `generic`, with a cotangent of 0 except in the chosen rows, so dQ is
    exactly 0 elsewhere. The gradients are dQ, dK, dV and those of the gains of a norm. Those that
    were not returned are left out. `tile` is as in `check`.
    """
    started = time.perf_counter()
    dtype, arrays = dtype_of(heads.dtype), answered.arrays
    _, count, queries, _ = heads.query.shape
    kv_heads, keys = heads.key.shape[1:3]
    group, underflow = count // kv_heads, dtype.underflow
    tallies: dict[str, dict[str, Tally]] = {}
    for of in (Variances(dtype, accuracy) for accuracy in models(dtype)):
        tallies[of.name] = of_array = {name: Tally(name, len(chosen)) for name in arrays}
        gains: dict[str, tuple[Array, Array]] = {}
        for kv_head in range(kv_heads):
            sums: dict[str, tuple[Array, Array]] = {}
            for head in range(kv_head * group, (kv_head + 1) * group):
                found = sampled_head(heads, head, chosen, of, tile)
                for name in found.keys() - {"output", "query"}:
                    joined = sums if name in ("key", "value") else gains
                    joined[name] = _sum(joined.get(name), found[name])
                for name in [name for name in ("output", "query") if name in arrays]:
                    want, variance = found[name]
                    got = arrays[name](0, head, slice(0, queries))
                    sigma, tally = of.sigma(variance, want), of_array[name]
                    for row, at in enumerate(chosen.tolist()):
                        one = slice(row, row + 1)
                        tally.add((0, head, at), got[at, None], want[one], sigma[one], underflow)
                    if name == "query":
                        rest = np.delete(got, chosen, axis=0)
                        nothing = np.zeros_like(rest)
                        tally.add((0, head, 0), rest, nothing, nothing, underflow)
            for name in [name for name in sums if name in arrays]:
                for span in _pieces(keys, 1 + keys // _READ, BLOCK):
                    want, variance = (array[span] for array in sums[name])
                    if group > 1:
                        variance = variance + of.tensor * want**2
                    got, sigma = arrays[name](0, kv_head, span), of.sigma(variance, want)
                    of_array[name].add((0, kv_head, span.start), got, want, sigma, underflow)
        for name in [name for name in gains if name in arrays]:
            want, variance = gains[name]
            got, sigma = arrays[name](0, 0, slice(0, 1)), of.sigma(variance, want)
            of_array[name].add((0, 0, 0), got, want, sigma, underflow)
    return CheckedAnswer(tallies, time.perf_counter() - started)


def _sum(before: tuple[Array, Array] | None, more: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the sum of two arrays and that of their variances."""
    return more if before is None else (before[0] + more[0], before[1] + more[1])


def missed(given: Retrieval, answered: Answered) -> dict[str, int]:
    """Return how many rows of the output and of the gradient of the values are wrong, by array.

    An array without a wrong row is left out. A row is wrong if it is not the one looked for, up to
    `CLOSE` roundoffs of the largest number: the exponent of the largest logit may be rounded, and
    parts may be merged with their difference. The gradient of a value that no query looks for is 0,
    up to what exponentials are cut off at, the square of a roundoff. If several queries that share
    a value head look for the same value, its gradient is a sum, which is not compared.
    """
    heads, wrong = given.heads, Counter[str]()
    dtype = dtype_of(heads.dtype)
    _, count, queries, _ = heads.query.shape
    kv_heads, keys = heads.value.shape[1:3]
    group, close = count // kv_heads, CLOSE * dtype.roundoff
    for head in range(count):
        got = answered.arrays["output"](0, head, slice(0, queries))
        wanted = heads.value[0, head // group][given.sought[0, head]]
        wrong["output"] += _differing(got, wanted, close * np.abs(wanted).max(initial=0))
    for head in range(kv_heads if "value" in answered.arrays else 0):
        of_group = slice(head * group, (head + 1) * group)
        sought = given.sought[0, of_group].ravel()
        times = np.bincount(sought, minlength=keys)[:, None]
        wanted = np.zeros(heads.value.shape[2:], heads.value.dtype)
        wanted[sought] = heads.cotangent[0, of_group].reshape(-1, wanted.shape[1])
        got = answered.arrays["value"](0, head, slice(0, keys))
        got = np.where(times > 1, wanted, got)
        near = np.where(times > 0, close, dtype.accumulator**2)
        wrong["value"] += _differing(got, wanted, near * np.abs(wanted).max(initial=0))
    return dict(+wrong)


def _differing(got: np.ndarray, wanted: np.ndarray, near: npt.ArrayLike) -> int:
    return int((~(np.abs(got - wanted) <= near)).any(axis=1).sum())
