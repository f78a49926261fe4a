"""Judge every row of a long output in tiles, and choose rows that tell mistakes apart.

A tile is a few queries of the heads that share a key/value head, with all their keys. It is a
problem of its own, so its rows are expected, and have noise, as those of a short problem. Memory is
linear in the length. σ is first estimated from one noisy evaluation, with those keys that are
seen. A tile that then seems to deviate is judged again with the usual number and with all keys,
until one is known to deviate.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from conformance.arrays import ports
from conformance.arrays.figure import pooled
from conformance.arrays.given import MOST_LOGITS, Reading, merged, separate
from conformance.arrays.noise import of_statistic
from conformance.causes.hypothesis import MOST_ELEMENTS, Evidence
from conformance.definition.arithmetic import CLASSES, AccuracyClass, classes_of
from conformance.definition.comparison import Comparison, compare, element
from conformance.definition.dtypes import Array, BoolArray, IntArray
from conformance.definition.expectation import Expectation, expect, expect_carefully
from conformance.definition.problem import Problem, Shape, identities
from conformance.definition.statistics import STATISTICS, RowStatistic
from conformance.errors import BadArrays
from conformance.records.findings import Worst
from conformance.records.numbers import LIMIT, ratios
from conformance.text import progress

MOST_OF_TILE = 2**22
"""The most logits of a tile."""

MOST_WHOLE = 2**21
"""The most logits of an output that is examined as a whole, if nothing beside it has to be."""

FEWEST = 8
"""The fewest rows of each head on which mistakes are tried."""

ROUGHLY = 8.0
"""How many times too small σ of one noisy evaluation may be.

Elements of a row share errors. In 20,480 rows of 3 to 256 keys in bfloat16, it was up to 7 times
too small.
"""

MOST_TRIED = 2**20
"""The most logits, of all heads, on which mistakes are tried, if there are more than these rows."""


@dataclass
class Screen:
    """What is seen of a long output.

    Attributes:
        sizes: the largest |error| in σ of each row, `[batch heads query]`.
        largest: the largest |error| in σ, and its element in `worst`.
        squares: the sum of the squares of error / σ.
        count: the number of elements that deviate.
        fits: whether every tile is within its limits.
        classes: the accuracy classes within whose limits every tile is.
        cells: the map of each head, by batch entry and head; see `figure.pooled`.
        others: the same of statistics of rows and of gradients, by name, without maps.
    """

    sizes: Array
    largest: float = 0.0
    worst: Worst | None = None
    squares: float = 0.0
    count: int = 0
    fits: bool = True
    classes: Sequence[AccuracyClass] = CLASSES
    cells: dict[tuple[int, int], Array] = field(default_factory=dict)
    others: dict[str, Screen] = field(default_factory=dict)

    @property
    def wrong(self) -> BoolArray:
        """Which rows have elements that deviate, `[batch heads query]`."""
        return self.sizes > LIMIT

    @property
    def accuracy(self) -> str:
        """The most accurate class of the output and of gradients; "" if there is none."""
        every = [self, *(it for name, it in self.others.items() if name not in STATISTICS)]
        common = (it.name for it in self.classes if all(it in one.classes for one in every))
        return next(common, "")

    def add(self, judged: Tile, entry: int, heads: slice, rows: IntArray) -> Array:
        """Add a tile of these heads and rows; return its |error| / σ, `[heads query ...]`."""
        size = np.abs(judged.ratio)
        at = np.unravel_index(int(size.argmax()), size.shape)
        if size[at] > self.largest:
            place = entry, heads.start + int(at[0]), int(rows[at[1]]), *map(int, at[2:])
            numbers = (array[at] for array in (judged.got, judged.want, judged.noise))
            self.worst = element(judged.array, place, *numbers)
            self.largest = float(size[at])
        finite = judged.ratio[np.isfinite(judged.ratio)]
        self.squares += float(finite @ finite)
        self.fits = self.fits and judged.fits
        self.classes = [it for it in self.classes if it in judged.classes]
        self.count += int((size > LIMIT).sum())
        of_rows = size.reshape(*size.shape[:2], -1).max(axis=-1)
        self.sizes[entry, heads, rows[0] : rows[-1] + 1] = of_rows
        return size


class Tile(NamedTuple):
    """An array of the rows of a tile, `[heads query ...]`, compared with what is expected.

    `classes` are the accuracy classes within whose limits it is; all of them if it is in none by
    definition.
    """

    array: str
    got: Array
    want: Array
    noise: Array
    ratio: Array
    fits: bool
    classes: Sequence[AccuracyClass] = CLASSES


def screened(reading: Reading, accuracy: str) -> Screen:
    """Return how every element of an output, and of what came with it, compares with the expected.

    Raises:
        BadArrays: if there are gradients, and those of one key/value head are too large.
    """
    problem, output = reading.problem, reading.answer.output
    shape = problem.shape
    found = Screen(
        np.zeros(shape.logits[:3], np.float32), classes=classes_of(problem.format, accuracy)
    )
    for name in reading.statistics:
        found.others[name] = Screen(np.zeros(shape.logits[:3], np.float32))
    if reading.answer.gradients:
        found.others |= _of_gradients(reading, accuracy)
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
                rows: IntArray,
                whole: Problem = whole,
                got: Array = got,
                place: tuple[int, slice] = (entry, heads),
            ) -> tuple[Tile, list[Tile]]:
                # Once a tile is known to deviate, so does the output.
                tile = ports.rows_of(whole, rows)
                judged = _judged(tile, got[:, rows], accuracy, found)
                others = [
                    _judged_statistic(
                        STATISTICS[name], tile, every[place][:, rows], not found.others[name].fits
                    )
                    for name, every in reading.statistics.items()
                ]
                return judged, others

            for rows, (judged, others) in zip(spans, pool.map(judge, spans), strict=True):
                size = found.add(judged, entry, heads, rows)
                for other in others:
                    found.others[other.array].add(other, entry, heads, rows)
                for head, of_head in enumerate(size, heads.start):
                    cells = pooled(of_head, rows, shape.query_length)
                    before = found.cells.get((entry, head), 0.0)
                    found.cells[entry, head] = np.maximum(before, cells)
                advance()
    return found


@np.errstate(all="ignore")
def _of_gradients(reading: Reading, accuracy: str) -> dict[str, Screen]:
    """Return how gradients compare, for one batch entry and one key/value head after another.

    A gradient of a key is a sum over all queries, so that tiles of queries would not do.
    """
    problem = reading.problem
    shape = problem.shape
    logits = shape.group * shape.query_length * shape.key_length
    if logits > MOST_LOGITS:
        raise BadArrays(
            f"{logits:,} attention weights of a key/value head are more than those whose gradients "
            f"are judged, {MOST_LOGITS:,}; leave the gradients out, or pass fewer queries"
        )
    counts = {"query": shape.heads, "key": shape.kv_heads, "value": shape.kv_heads}
    lengths = {"query": shape.query_length, "key": shape.key_length, "value": shape.key_length}
    names = reading.answer.gradients.keys()
    found = {
        f"gradient.{name}": Screen(
            np.zeros((shape.batch, counts[name], lengths[name]), np.float32),
            classes=classes_of(problem.format, accuracy),
        )
        for name in names
    }
    parts = [*itertools.product(range(shape.batch), range(shape.kv_heads))]
    with progress("judging gradients", len(parts)) as advance:
        for entry, group in parts:
            part = ports.part(problem, entry, group)
            first = [it for name in names for it in found[f"gradient.{name}"].classes[:1]]
            roughly, careful = rough(part, accuracy, also=first), None
            for name in names:
                array = f"gradient.{name}"
                each = counts[name] // shape.kv_heads
                heads = slice(group * each, (group + 1) * each)
                got = separate(reading.answer.gradients[name], counts[name])[entry, heads]
                tile = _compared(array, got, roughly)
                if not tile.fits and found[array].fits:
                    careful = careful or rough(part, accuracy, None)
                    tile = _compared(array, got, careful)
                classes = _reached(
                    array,
                    merged(got[None]),
                    found[array].classes,
                    roughly,
                    partial(expect, part, weights=False, promised=accuracy),
                )
                tile = tile._replace(classes=classes)
                found[array].add(tile, entry, heads, np.arange(lengths[name]))
            advance()
    return found


def of_parts(
    problem: Problem, accuracy: str, expected: Callable[..., Expectation] = expect
) -> Expectation:
    """Return what is expected of some queries, without gradients, by one key/value head at a time.

    The keys of one head fit into caches, and as many heads are expected at once as there are cores.

    Args:
        problem: the problem, on heads.
        accuracy: the accuracy class by which answers are judged; "" for the least accurate.
        expected: what gives the expectation of a part.
    """
    shape = problem.shape
    parts = [*itertools.product(range(shape.batch), range(shape.kv_heads))]

    def of_part(place: tuple[int, int]) -> Expectation:
        return expected(ports.part(problem, *place), gradients=False, promised=accuracy)

    def joined(arrays: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
        def of_heads(name: str, entry: int) -> Array:
            own = arrays[entry * shape.kv_heads : (entry + 1) * shape.kv_heads]
            return np.concatenate([it[name] for it in own], axis=2 if name == "output" else 1)

        return {
            name: np.concatenate([of_heads(name, entry) for entry in range(shape.batch)])
            for name in arrays[0]
        }

    def careful() -> Expectation | None:
        return of_parts(problem, accuracy, expect_carefully) if expected is expect else None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [*pool.map(of_part, parts)]
    return replace(
        found[0],
        arrays=joined([it.arrays for it in found]),
        noise={name: joined([it.noise[name] for it in found]) for name in found[0].noise},
        careful=careful,
    )


def rough(
    problem: Problem,
    accuracy: str,
    samples: int | None = 1,
    also: Sequence[AccuracyClass] = (),
) -> Expectation:
    """Return what is expected, with σ of one class and, unless told, of one noisy evaluation.

    `also` are classes of which σ is included.
    """
    classes = _with_decisive(problem, accuracy, also)
    return expect(problem, samples=samples, weights=False, promised=accuracy, classes=classes)


def _with_decisive(
    problem: Problem, accuracy: str, others: Sequence[AccuracyClass]
) -> list[AccuracyClass]:
    """Return accuracy classes, the last of which is the one by which answers are judged."""
    classes = classes_of(problem.format, accuracy)
    decisive = next((it for it in classes if it.name == accuracy), classes[-1])
    return [*dict.fromkeys(it for it in others if it != decisive), decisive]


def _reached(
    array: str,
    got: Array,
    classes: Sequence[AccuracyClass],
    found: Expectation,
    expected: Callable[..., Expectation],
) -> Sequence[AccuracyClass]:
    """Return those of some accuracy classes, from the most accurate on, in which an array is.

    Args:
        array: the name of the array.
        got: the array, like that of the expectation.
        classes: the classes, the most accurate first.
        found: what is expected, with σ of some classes, of one noisy evaluation.
        expected: what gives an expectation with σ of some `classes` of so many `samples`.
    """
    for at, item in enumerate(classes):
        for samples in (1, None):
            one = found
            if item.name not in found.noise or samples is None:
                one = expected(samples=samples, classes=[item])
            noise = one.noise[item.name][array]
            largest = np.abs(ratios(got, one.arrays[array], noise, one.underflow)).max(initial=0)
            if largest <= LIMIT:
                return classes[at:]
            if largest > ROUGHLY * LIMIT:
                break
    return ()


def _compared(array: str, got: Array, expectation: Expectation) -> Tile:
    """Return how the heads `[heads length head]` of a gradient compare with what is expected."""
    want, noise = (
        separate(it[array], len(got))[0] for it in (expectation.arrays, expectation.sigma)
    )
    underflow = expectation.underflow
    fits = compare(array, got, want, noise, underflow).fits
    return Tile(array, got, want, noise, ratios(got, want, noise, underflow), fits)


@np.errstate(all="ignore")
def _judged(tile: Problem, got: Array, accuracy: str, so_far: Screen) -> Tile:
    """Return a tile of the output, which is only roughly judged if one is known to deviate."""
    tile = _narrowed(tile)
    told: dict[str, Any] = {"gradients": False, "weights": False, "promised": accuracy}
    classes, known = so_far.classes, not so_far.fits
    decisive = _with_decisive(tile, accuracy, classes[:1])
    roughly = found = expect(ports.of_seen_keys(tile), samples=1, classes=decisive, **told)
    want = found.arrays["output"]
    got = np.where(ports.unseen(tile), want, got)

    def fits() -> bool:
        return compare("output", got, want, found.sigma["output"], found.underflow).fits

    if not known and not fits():
        found = expect(tile, classes=decisive[-1:], **told)
    noise = found.sigma["output"]
    ratio = ratios(got, want, noise, found.underflow)
    fitting = fits()
    reached = _reached("output", got, classes, roughly, partial(expect, tile, **told))
    got, want, noise, ratio = (
        separate(it, tile.shape.group)[0] for it in (got, want, noise, ratio)
    )
    return Tile("output", got, want, noise, ratio, fitting, reached)


def _narrowed(problem: Problem) -> Problem:
    """Return a problem in half precision with inputs in float32, which holds their values.

    float32 is exact enough for what is expected in half precision, and twice as fast as float64.
    """
    if problem.format.accumulator >= problem.format.roundoff:
        return problem
    names = ("query", "key", "value", "cotangent")
    return problem.replace(**{name: getattr(problem, name).astype(np.float32) for name in names})


def _judged_statistic(statistic: RowStatistic, tile: Problem, got: Array, known: bool) -> Tile:
    """Return the same of a statistic of rows, `[heads query]`."""
    shape = tile.shape
    # The statistic does not depend on the values, so one component of each is enough.
    small = Shape.of_heads(
        (1, shape.heads, shape.query_length, shape.head_size), (1, 1, shape.key_length, 1)
    )
    tile = tile.replace(
        shape=small,
        weights=identities(small),
        value=tile.value[..., :1],
        cotangent=np.zeros((1, shape.query_length, shape.heads)),
    )
    seen = ports.of_seen_keys(tile)
    evidence, compared = compared_statistic(statistic, seen, got[None], samples=1)
    if not known and not compared.fits:
        evidence, compared = compared_statistic(statistic, tile, got[None])
    numbers, want, noise = evidence.got, evidence.want, evidence.noise
    ratio = ratios(numbers, want, noise, evidence.underflow)
    return Tile(statistic.name, numbers[0], want[0], noise[0], ratio[0], compared.fits)


def compared_statistic(
    statistic: RowStatistic, problem: Problem, got: Array, samples: int | None = None
) -> tuple[Evidence, Comparison]:
    """Return how a statistic `[batch heads query]` compares; σ is of so many evaluations."""
    want, sigma = of_statistic(statistic, problem, samples)
    blocked = np.isneginf(want)
    # What a query gets that sees no key is open.
    got, want = np.where(blocked, 0.0, got), np.where(blocked, 0.0, want)
    underflow = problem.format.underflow
    compared = compare(statistic.name, got, want, sigma, underflow)
    return Evidence(got, want, sigma, underflow), compared


def chosen(reading: Reading, sizes: Array | None = None) -> IntArray:
    """Return the rows on which mistakes are tried: mostly wrong ones, if it is known which are.

    Half of the wrong ones are those with the largest errors in σ, because only these tell similar
    mistakes apart where noise hides most of the others, as it does in long rows.

    Args:
        sizes: the largest |error| in σ of each row, `[batch heads query]`; None if unknown.
    """
    shape = reading.problem.shape
    of_part = MOST_ELEMENTS // (shape.group * shape.key_length)
    of_all = MOST_TRIED // (shape.batch * shape.heads * shape.key_length)
    count = max(FEWEST, min(of_part, of_all))
    return telling(np.zeros(shape.query_length) if sizes is None else sizes.max(axis=(0, 1)), count)


def telling(largest: Array, count: int) -> IntArray:
    """Return about so many rows, at most a quarter of them right ones unless all are right.

    Args:
        largest: the largest |error| in σ of each row, `[query]`.
        count: the number of rows; fewer are returned if there are not as many of a kind.
    """

    def spread(of: IntArray, number: int) -> IntArray:
        return of[np.unique(np.linspace(0, len(of) - 1, min(number, len(of))).astype(np.int64))]

    every = np.arange(len(largest))
    rows = largest > LIMIT
    if not rows.any():
        return spread(every, count)
    good = spread(every[~rows], count // 4)
    left = count - count // 4
    by_size = every[rows][np.argsort(-largest[rows], kind="stable")]
    telling = by_size[: left // 2]
    others = np.setdiff1d(every[rows], telling)
    return np.sort(np.concatenate([telling, spread(others, left - len(telling)), good]))


def thinned(reading: Reading, rows: IntArray) -> Reading:
    """Return the reading of some of the queries only.

    Raises:
        BadArrays: if there are weights, which are judged as a whole only.
    """
    answer = reading.answer
    if answer.weights is not None:
        raise BadArrays(
            f"{math.prod(reading.problem.shape.logits):,} attention weights are more than those "
            f"that are judged themselves, {MOST_LOGITS:,}; leave them out, or pass fewer heads, "
            "batch entries or queries"
        )
    # The gradient of a query depends on no other query.
    gradients = {n: it[:, rows] for n, it in answer.gradients.items() if n == "query"}
    return replace(
        reading,
        statistics={name: every[:, :, rows] for name, every in reading.statistics.items()},
        problem=_narrowed(ports.rows_of(reading.problem, rows)),
        answer=replace(answer, output=answer.output[:, rows], gradients=gradients),
    )


def is_long(reading: Reading) -> bool:
    """Return whether a problem is too large to be examined as a whole.

    Weights are examined as a whole as far as that is possible, and so are projections and positions
    on several axes.
    """
    problem = reading.problem
    alone = reading.answer.weights is None and problem.axes is None
    most = min(MOST_WHOLE, MOST_LOGITS) if alone and problem.heads_alone else MOST_LOGITS
    return math.prod(problem.shape.logits) > most
