"""Judge every row of a long output in tiles, and choose rows that tell mistakes apart.

A tile is a few queries of the heads that share a key/value head, with all their keys. It is a
problem of its own, so its rows are expected, and have noise, as those of a short problem. Memory is
linear in the length. σ is first estimated from one noisy evaluation. A tile that then seems to
deviate is judged again with the usual number, until one is known to deviate.
"""

from __future__ import annotations

import itertools
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from conformance.arrays import ports
from conformance.arrays.figure import pooled
from conformance.arrays.given import MOST_LOGITS, Reading, separate
from conformance.causes.hypothesis import MOST_ELEMENTS
from conformance.definition.arithmetic import classes_of
from conformance.definition.comparison import compare, element
from conformance.definition.dtypes import Array, BoolArray, IntArray
from conformance.definition.expectation import expect
from conformance.definition.problem import Problem
from conformance.errors import BadArrays
from conformance.records.findings import Worst
from conformance.records.numbers import LIMIT, ratios
from conformance.text import progress

MOST_OF_TILE = 2**22
"""The most logits of a tile."""

FEWEST = 8
"""The fewest rows of each head on which mistakes are tried."""

MOST_TRIED = 2**20
"""The most logits, of all heads, on which mistakes are tried, if there are more than these rows."""


@dataclass
class Screen:
    """What is seen of a long output.

    Attributes:
        wrong: which rows have elements that deviate, `[batch heads query]`.
        largest: the largest |error| in σ, and its element in `worst`.
        squares: the sum of the squares of error / σ.
        count: the number of elements that deviate.
        fits: whether every tile is within its limits.
        cells: the map of each head, by batch entry and head; see `figure.pooled`.
    """

    wrong: BoolArray
    largest: float = 0.0
    worst: Worst | None = None
    squares: float = 0.0
    count: int = 0
    fits: bool = True
    cells: dict[tuple[int, int], Array] = field(default_factory=dict)


def screened(problem: Problem, output: Array, accuracy: str) -> Screen:
    """Return how every element of an output compares with what is expected."""
    shape = problem.shape
    found = Screen(np.zeros(shape.logits[:3], np.bool_))
    step = max(1, MOST_OF_TILE // (shape.group * shape.key_length))
    spans = [
        np.arange(start, min(start + step, shape.query_length))
        for start in range(0, shape.query_length, step)
    ]
    parts = [*itertools.product(range(shape.batch), range(shape.kv_heads))]
    with (
        progress("judging", len(parts) * len(spans)) as advance,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        for entry, group in parts:
            whole = ports.part(problem, entry, group)
            got = ports.cut(problem, output, entry, group)
            heads = slice(group * shape.group, (group + 1) * shape.group)

            def judge(
                rows: IntArray, whole: Problem = whole, got: Array = got
            ) -> tuple[Array, Array, Array, Array, bool]:
                # Once a tile is known to deviate, so does the output.
                return _judged(ports.rows_of(whole, rows), got[:, rows], accuracy, not found.fits)

            for rows, (*arrays, fits) in zip(spans, pool.map(judge, spans), strict=True):
                numbers, want, noise, ratio = (separate(it, shape.group)[0] for it in arrays)
                size = np.abs(ratio)
                at = np.unravel_index(int(size.argmax()), size.shape)
                if size[at] > found.largest:
                    place = entry, heads.start + int(at[0]), int(rows[at[1]]), int(at[2])
                    found.worst = element("output", place, numbers[at], want[at], noise[at])
                    found.largest = float(size[at])
                finite = ratio[np.isfinite(ratio)]
                found.squares += float(finite @ finite)
                found.fits = found.fits and fits
                found.count += int((size > LIMIT).sum())
                found.wrong[entry, heads, rows[0] : rows[-1] + 1] = (size > LIMIT).any(axis=-1)
                for head, of_head in enumerate(size, heads.start):
                    cells = pooled(of_head, rows, shape.query_length)
                    before = found.cells.get((entry, head), 0.0)
                    found.cells[entry, head] = np.maximum(before, cells)
                advance()
    return found


@np.errstate(all="ignore")
def _judged(
    tile: Problem, got: Array, accuracy: str, known: bool
) -> tuple[Array, Array, Array, Array, bool]:
    """Return got, want, σ and error / σ of a tile, and whether it is within its limits."""
    if tile.format.accumulator < tile.format.roundoff:
        # float32 is exact enough for the expected values of half precision, and twice as fast.
        names = ("query", "key", "value", "cotangent")
        tile = tile.replace(**{name: getattr(tile, name).astype(np.float32) for name in names})
    classes = classes_of(tile.format, accuracy)
    decisive = [it for it in classes if it.name == accuracy] or classes[-1:]
    found = expect(tile, samples=1, gradients=False, promised=accuracy, classes=decisive)
    want = found.arrays["output"]
    got = np.where(ports.unseen(tile), want, got)

    def fits() -> bool:
        return compare("output", got, want, found.sigma["output"], found.underflow).fits

    if not known and not fits():
        found = expect(tile, gradients=False, promised=accuracy, classes=decisive)
    noise = found.sigma["output"]
    return got, want, noise, ratios(got, want, noise, found.underflow), fits()


def chosen(reading: Reading, wrong: BoolArray | None = None) -> IntArray:
    """Return the rows on which mistakes are tried: mostly wrong ones, if it is known which are."""
    shape = reading.problem.shape
    of_part = MOST_ELEMENTS // (shape.group * shape.key_length)
    of_all = MOST_TRIED // (shape.batch * shape.heads * shape.key_length)
    count = max(FEWEST, min(of_part, of_all))

    def spread(of: IntArray, number: int) -> IntArray:
        return of[np.unique(np.linspace(0, len(of) - 1, min(number, len(of))).astype(np.int64))]

    every = np.arange(shape.query_length)
    if wrong is None:
        return spread(every, count)
    rows = wrong.any(axis=(0, 1))
    bad, good = spread(every[rows], count - count // 4), spread(every[~rows], count // 4)
    return np.sort(np.concatenate([bad, good]))


def thinned(reading: Reading, rows: IntArray) -> Reading:
    """Return the reading of some of the queries only.

    Raises:
        BadArrays: if there are other arrays than the output, which are judged as a whole only.
    """
    answer = reading.answer
    if len(answer.arrays()) > 1 or reading.log_sum_exp is not None:
        raise BadArrays(
            f"with {math.prod(reading.problem.shape.logits):,} attention weights, more than "
            f"{MOST_LOGITS:,}, only the output is judged; leave the weights, the log-sum-exp and "
            "gradients out, or pass fewer heads, batch entries or queries"
        )
    return replace(
        reading,
        problem=ports.rows_of(reading.problem, rows),
        answer=replace(answer, output=answer.output[:, rows]),
    )


def is_long(reading: Reading) -> bool:
    """Return whether a problem is too large to be examined as a whole."""
    return math.prod(reading.problem.shape.logits) > MOST_LOGITS
