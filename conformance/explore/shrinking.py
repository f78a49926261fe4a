"""Make a failing problem smaller, step by step, as long as it fails in the same way.

A step may choose a simpler dtype or mode, remove batch entries, queries, keys, heads, a feature,
the mask or the biases, or simplify features or numbers. The step is kept if the same requirement is
still violated by the same array in the same way, and the error is either as large as at first, in
units of σ, or beyond doubt. Trying a problem that the adapter does not support costs almost
nothing, so few steps check in advance what it supports.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

from conformance.adapter.base import Adapter
from conformance.cases.case import StoredCase, assembled, rounded
from conformance.cases.casefile import Failure, store
from conformance.definition.dtypes import Array
from conformance.definition.features import ABSENT, ARRAYS, FEATURES, FeatureEntry, with_arrays
from conformance.definition.problem import INPUT_AXES, WEIGHT_AXES, Problem, Shape
from conformance.errors import ConformanceError, Unsupported
from conformance.explore.drawing import SHARINGS
from conformance.explore.trial import ORDER, Trial, TrialDeviation, askable, deviations

MOST_ELEMENTS = 64
"""The most elements of an array that are simplified one by one."""

MOST_TRIED = 8
"""The most positions of an axis that are tried as the only one to remove, and the most, besides the
last, that are tried as the only one to keep."""

_WIDTHS = ("query_width", "key_width", "value_width", "output_width")

_AXES: Mapping[str, tuple[str, ...]] = {
    **INPUT_AXES,
    **{f"weights.{name}": axes for name, axes in WEIGHT_AXES.items()},
    "cotangent": ("batch", "query_length", "output_width"),
    "mask": ("batch", "heads", "query_length", "key_length"),
    "attn_bias": ("batch", "heads", "query_length", "key_length"),
    **ARRAYS,
}
"""The fields of `Shape` that give the sizes of each array's axes, by the name of the array.

Any axis of "mask" and "attn_bias" may have size 1 instead.
"""

_TOGETHER: Mapping[str, tuple[str, ...]] = {
    "lengths": ("query_length", "key_length"),
    "inputs": _WIDTHS[:3],
    "widths": _WIDTHS,
}
"""Fields of `Shape` that are reduced together, by a name that `_cut` accepts as an axis."""

UNITS = (1.0, 0.5, 0.25, 0.125, 2.0**-6)
"""Steps round numbers to multiples of these units, which are tried in this order."""

_MOVE_WIDTHS = frozenset({"kv_heads", "group", "head_size", "value_head_size"})
"""Axes that determine the widths if an implementation requires widths of heads × head size."""

Move = Callable[[Adapter, Trial], Iterator[Trial]]
"""A step: a function that yields simpler trials, possibly none, to try instead of a trial."""


@dataclass(frozen=True, eq=False)
class Small:
    """The smallest trial that `shrink` found.

    Attributes:
        trial: the trial.
        deviation: how the trial fails.
        finished: False if shrinking ended before all steps had been tried on this trial.
    """

    trial: Trial
    deviation: TrialDeviation
    finished: bool

    def store(self, adapter: Adapter, path: Path, name: str) -> StoredCase:
        """Write the problem to the file `path` as a case called `name`, and return the case.

        The file also describes the deviation.

        Raises:
            ConformanceError: the name is not allowed, or the file cannot be written.
        """
        problem, deviation = self.trial.problem, self.deviation
        failure = Failure(
            implementation=adapter.name,
            dtype=problem.dtype,
            mode=self.trial.mode.name,
            requirement=deviation.requirement,
            told=deviation.text,
            versions=adapter.versions(),
        )
        why = f"Found by a search: {deviation.requirement or 'it raises'}: {deviation.text}"
        return store(path, name, problem, why, failure)


def shrink(
    adapter: Adapter,
    trial: Trial,
    deviation: TrialDeviation,
    until: float,
    *,
    modes: Sequence[str] = (),
    dtypes: Sequence[str] = (),
) -> Small:
    """Return the smallest trial found that fails in the same way as `trial`, or `trial` itself.

    Args:
        deviation: the deviation of `trial`, which smaller trials must show as clearly.
        until: the deadline, on the clock of `time.monotonic`; Ctrl-C ends shrinking too.
        modes, dtypes: the names of the modes and dtypes of smaller trials; empty for all.
    """

    def failing(candidate: Trial) -> TrialDeviation | None:
        if (modes and candidate.mode.name not in modes) or (
            dtypes and candidate.problem.dtype not in dtypes
        ):
            return None
        with suppress(Unsupported, ConformanceError, ValueError):
            if askable(candidate.problem):
                wrong = deviations(adapter, candidate)
                return next((item for item in wrong if item.as_clear_as(first)), None)
        return None

    first, finished = deviation, False
    try:
        while not finished:
            finished = True
            for moves in (lambda _: _STRUCTURE, _number_moves):
                for move in moves(trial):
                    candidates = move(adapter, trial)
                    while (candidate := next(candidates, None)) is not None:
                        if time.monotonic() > until:
                            return Small(trial, deviation, finished=False)
                        if (still := failing(candidate)) is not None:
                            trial, deviation, finished = candidate, still, False
                            candidates = move(adapter, trial)
    except KeyboardInterrupt:
        finished = False
    return Small(trial, deviation, finished=finished)


def _dtype(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
    dtypes = [dtype for dtype in ORDER if dtype in adapter.dtypes]
    for dtype in dtypes[: dtypes.index(trial.problem.dtype)]:
        yield trial.with_problem(rounded(trial.problem, dtype))


def _mode(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
    for mode in itertools.takewhile(lambda mode: mode.name != trial.mode.name, adapter.modes):
        if mode.has(trial.problem.dtype):
            yield dataclasses.replace(trial, mode=mode)


def _without(name: str) -> Move:
    nothing = ABSENT.get(name)

    def move(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
        there = getattr(trial.problem, name)
        if there is not None and not (isinstance(there, tuple) and there == nothing):
            # Positions on axes need the sections of a scaling.
            with suppress(ConformanceError):
                yield trial.with_problem(trial.problem.replace(**{name: nothing}))

    return move


def _simpler_feature(entry: FeatureEntry) -> Move:
    def move(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
        for fields in entry.simpler(trial.problem):
            yield trial.with_problem(trial.problem.replace(**fields))

    return move


def _causal_as_mask(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
    problem = trial.problem
    if problem.causal is not None:
        causal = dict(problem.rules())["causal"]
        mask = causal if problem.mask is None else problem.mask & causal
        yield trial.with_problem(problem.replace(mask=mask, causal=None))


def _biases(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
    if trial.problem.shape.bias:
        yield _with_arrays(trial, {}, bias=False)


def _sharing(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
    for sharing in SHARINGS[: SHARINGS.index(trial.problem.shape.sharing)]:
        with suppress(ConformanceError):
            yield _with_arrays(trial, {}, sharing=sharing)


def _same_for_all(name: str) -> Move:
    """Return a step that reduces an axis of an array to size 1 by keeping only the first slice.

    `name` is "mask" or "attn_bias"; these arrays are broadcast along axes of size 1.
    """

    def move(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
        array = getattr(trial.problem, name)
        for axis in range(4) if array is not None else ():
            if array.shape[axis] > 1:
                first = array.take([0], axis=axis)
                yield trial.with_problem(trial.problem.replace(**{name: first}))

    return move


def _less(axis: str) -> Move:
    """Return a step that keeps only some positions of an axis, as `_cut` does.

    If widths were heads × head size, the step also yields trials in which they still are.
    """

    def move(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
        shape = trial.problem.shape
        size = min(getattr(shape, field) for field in _TOGETHER.get(axis, (axis,)))
        for kept in itertools.chain(_declared(adapter, axis, size), _kept(size)):
            with suppress(ConformanceError):
                smaller = _cut(trial.problem, axis, kept)
                yield trial.with_problem(smaller)
                if axis in _MOVE_WIDTHS:
                    yield trial.with_problem(_narrowed(smaller, shape))

    return move


def _declared(adapter: Adapter, axis: str, size: int) -> Iterator[list[int]]:
    """Yield lists of the first positions of an axis, one for each smaller size to try.

    These are the sizes below `size` that the adapter's geometry allows. Yield nothing if there is
    no geometry, or if it does not restrict the sizes of the axis.
    """
    geometry = adapter.geometry
    if geometry is None:
        return
    step = {
        "query_length": geometry.multiples[0],
        "key_length": geometry.multiples[1],
        "lengths": math.lcm(*geometry.multiples),
    }
    sizes = {"head_size": geometry.head_sizes, "value_head_size": geometry.value_head_sizes}
    smaller = sizes.get(axis, range(step.get(axis, size), size, step.get(axis, size)))
    for kept in sorted({each for each in smaller if each < size}):
        yield list(range(kept))


def _fewer_queries(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
    """Yield trials in which fewer queries attend to all keys, if this is self-attention."""
    problem = trial.problem
    if problem.shape.sharing == "self":
        apart = _with_arrays(trial, {"key": problem.key}, sharing="memory").problem
        for kept in _kept(problem.shape.query_length):
            with suppress(ConformanceError):
                yield trial.with_problem(_cut(apart, "query_length", kept))


_STRUCTURE: tuple[Move, ...] = (
    _dtype,
    _mode,
    *map(_without, ("mask", "attn_bias", "causal", "scale", *ABSENT)),
    _causal_as_mask,
    _biases,
    *map(_less, ("batch", "query_length", "key_length", "lengths", "kv_heads", "group")),
    *map(_less, ("head_size", "value_head_size", "widths", "inputs", *_WIDTHS)),
    _fewer_queries,
    _sharing,
    *map(_same_for_all, ("mask", "attn_bias")),
    *map(_simpler_feature, FEATURES),
)


def _number_moves(trial: Trial) -> Iterator[Move]:
    """Yield steps that simplify whole arrays of numbers, then single numbers, then the mask.

    Single elements are simplified only in arrays of at most `MOST_ELEMENTS`.
    """
    arrays = _arrays(trial.problem)
    for name in arrays:
        yield partial(_simpler, name)
    for name, array in arrays.items():
        for at in np.ndindex(array.shape) if array.size <= MOST_ELEMENTS else ():
            yield partial(_simpler_element, name, at)
    yield _fewer_blocked


def _simpler(name: str, adapter: Adapter, trial: Trial) -> Iterator[Trial]:
    array = _arrays(trial.problem).get(name)
    if array is not None:
        for simple in _simpler_arrays(array):
            if not np.array_equal(simple, array):
                with suppress(ConformanceError):
                    yield _with_arrays(trial, {name: simple})


def _simpler_element(
    name: str, at: tuple[int, ...], adapter: Adapter, trial: Trial
) -> Iterator[Trial]:
    array = _arrays(trial.problem).get(name)
    if array is not None:
        for simple in _simpler_numbers(float(array[at])):
            with suppress(ConformanceError):
                yield _with_arrays(trial, {name: _put(array, at, simple)})


def _fewer_blocked(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
    mask = trial.problem.mask
    if mask is not None and mask.size <= MOST_ELEMENTS:
        for at in zip(*np.nonzero(~mask), strict=True):
            yield trial.with_problem(trial.problem.replace(mask=_put(mask, at, True)))


def _simpler_arrays(array: Array) -> Iterator[Array]:
    """Yield arrays of simpler numbers: zeros, ones, the identity, then rounded numbers.

    If all numbers are 0 or 1, yield only zeros. There is no identity for a single axis. Rounded
    numbers begin with the coarsest.
    """
    yield np.zeros_like(array)
    if set(np.unique(array)) <= {0.0, 1.0}:
        return
    yield np.ones_like(array)
    if array.ndim >= 2:
        # An identity between the first axis and all the others.
        yield np.eye(array.shape[0], array.size // array.shape[0]).reshape(array.shape)
    for unit in (*UNITS, 2.0**-10):
        simple = np.round(array / unit) * unit
        yield simple
        if (array == simple).all():
            return


def _simpler_numbers(number: float) -> Iterator[float]:
    """Yield simpler numbers to try: 0, the absolute value, 1, rounded values, smaller integers.

    Yield only those that apply: none for 0, only 0 for 1, smaller integers only for integers.
    """
    if number == 0:
        return
    yield 0.0
    if number == 1:
        return
    if number < 0:
        yield -number
    yield 1.0
    for unit in UNITS:
        simple = round(number / unit) * unit
        if simple == number:
            break
        if simple != 0:
            yield simple
    if abs(number) > 1 and number == round(number):
        yield float(int(number / 2))
        yield number - np.sign(number)


# Deriving a problem from a problem


def _arrays(problem: Problem) -> dict[str, Any]:
    """Return a problem's arrays except the mask, by name, in the order to simplify them in."""
    weights = {f"weights.{name}": array for name, array in problem.weights.named().items()}
    biases = [*reversed([name for name in weights if name.endswith("_bias")]), "weights.score"]
    arrays: dict[str, Any] = {"cotangent": problem.cotangent}
    arrays |= {name: weights.pop(name) for name in biases if name in weights}
    if problem.attn_bias is not None:
        arrays["attn_bias"] = problem.attn_bias
    arrays |= problem.feature_arrays()
    arrays |= dict(reversed(weights.items()))
    return arrays | {n: getattr(problem, n) for n in reversed(problem.shape.distinct_inputs())}


def _with_arrays(trial: Trial, arrays: Mapping[str, Array], **fields: Any) -> Trial:
    """Return the trial with some arrays of its problem replaced, and `fields` of its shape."""
    problem = trial.problem
    return trial.with_problem(_rebuilt(problem, {**_arrays(problem), **arrays}, **fields))


def _rebuilt(problem: Problem, arrays: Mapping[str, Any], **fields: Any) -> Problem:
    """Return a problem made of the given arrays, with `fields` of the problem's shape replaced.

    Arrays that the new shape does not have, such as biases, are ignored. The mask is kept if
    `arrays` has none.
    """
    shape = dataclasses.replace(problem.shape, **fields)
    names = {*shape.distinct_inputs(), "cotangent"}
    names |= {f"weights.{name}" for name in shape.weight_shapes()}
    return assembled(
        shape,
        {name: array for name, array in arrays.items() if name in names},
        mask=arrays.get("mask", problem.mask),
        attn_bias=arrays.get("attn_bias"),
        causal=problem.causal,
        scale=problem.scale,
        **_features(problem, arrays, shape),
    ).replace(dtype=problem.dtype)


def _features(problem: Problem, arrays: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """Return the fields that hold features, with the given arrays and for a new shape."""
    fitted = (entry.fitted(problem, shape) for entry in FEATURES)
    # Simpler numbers are floats, but lengths, segments and positions are integers.
    given = {n: arrays[n].astype(old.dtype) for n, old in problem.feature_arrays().items()}
    return reduce(operator.or_, fitted) | with_arrays(problem, given)


def _put(array: np.ndarray, at: tuple[int, ...], value: float) -> np.ndarray:
    changed = array.copy()
    changed[at] = value
    return changed


def _kept(size: int) -> Iterator[list[int]]:
    """Yield lists of positions to keep: single ones, beginnings, halves, and all but one.

    There are beginnings only for sizes above 16, and no lists for a size below 2.
    """
    if size < 2:
        return
    for single in (0, size - 1, *range(1, min(size - 1, MOST_TRIED))):
        yield [single]
    if size > 16:
        # Beginnings fill tiles, just exceed them, or omit a part at the end.
        powers = [2**power for power in range(1, size.bit_length())]
        wholes = {kept for power in powers for kept in (power, power + 1)}
        parts = {size - size // power for power in powers if power > 1}
        for kept in sorted(kept for kept in wholes | parts if kept < size):
            yield list(range(kept))
    if size > 3:
        yield list(range(size // 2))
        yield list(range(size // 2, size))
    if size > 2:
        for gone in range(size - 1, max(-1, size - 1 - MOST_TRIED), -1):
            yield [i for i in range(size) if i != gone]


def _cut(problem: Problem, axis: str, kept: list[int]) -> Problem:
    """Return the problem with only the positions `kept` of an axis.

    The axis is a field of `Shape`, "group" (query heads by their place in the group), or a key of
    `_TOGETHER`. Other axes that must have the same size are cut as well.
    """
    shape = problem.shape
    positions = dict.fromkeys(_TOGETHER.get(axis, (axis,)), kept)
    if axis == "kv_heads":
        positions["heads"] = [head for head in range(shape.heads) if head // shape.group in kept]
    elif axis == "group":
        positions = {"heads": [head for head in range(shape.heads) if head % shape.group in kept]}
    elif axis == "head_size" and shape.value_head_size == shape.head_size:
        positions["value_head_size"] = kept
    elif axis in ("key_width", "value_width") and shape.sharing != "separate":
        positions = {"key_width": kept, "value_width": kept}
    arrays: dict[str, Any] = _arrays(problem)
    if problem.mask is not None:
        arrays["mask"] = problem.mask
    for entry in FEATURES:
        entry.cut(arrays, positions)
    for name, array in arrays.items():
        for place, field in enumerate(_AXES[name]):
            if field in positions and (array.shape[place] > 1 or name not in ("mask", "attn_bias")):
                array = array.take(positions[field], axis=place)
        arrays[name] = array
    return _rebuilt(problem, arrays, **{name: len(at) for name, at in positions.items()})


def _narrowed(problem: Problem, before: Shape) -> Problem:
    """Return the problem with some widths reduced to its number of heads × its head size.

    These are the widths that were equal to heads × head size in the earlier shape `before`.

    Raises:
        ConformanceError: there are no such widths, or heads × head size has not become smaller.
    """
    whole, width = before.heads * before.head_size, problem.shape.heads * problem.shape.head_size
    widths = [field for field in _WIDTHS if getattr(before, field) == whole]
    if not widths or width >= whole:
        raise ConformanceError("no width follows")
    for axis in ["widths"] if len(widths) == 4 else widths:
        problem = _cut(problem, axis, list(range(width)))
    return problem
