"""Make a failing problem smaller, step by step, as long as it fails in the same way.

A step removes batch entries, queries, keys, heads, the mask or the biases, or rounds numbers. It is
kept if the same array is then wrong, as clearly as before. A step that the implementation cannot
express costs almost nothing, so no step asks what the implementation can.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from conformance.adapter.base import Adapter
from conformance.cases.case import assembled
from conformance.definition.dtypes import Array
from conformance.definition.problem import INPUT_AXES, WEIGHT_AXES, Problem, Shape, Sharing
from conformance.errors import ConformanceError, Unsupported
from conformance.explore.trial import ORDER, Deviation, Trial, askable, deviations, in_dtype

MOST_ELEMENTS = 64
"""Arrays with more numbers than this are simplified as a whole only."""

MOST_TRIED = 8
"""Positions of an axis that are tried alone, or left out alone."""

_WIDTHS = ("query_width", "key_width", "value_width", "output_width")

_AXES: Mapping[str, tuple[str, ...]] = {
    **INPUT_AXES,
    **{f"weights.{name}": axes for name, axes in WEIGHT_AXES.items()},
    "cotangent": ("batch", "query_length", "output_width"),
    "mask": ("batch", "heads", "query_length", "key_length"),
    "attn_bias": ("batch", "heads", "query_length", "key_length"),
}
"""The field of the shape that is the size of each axis; of masks and biases, it may also be 1."""

_TOGETHER: Mapping[str, tuple[str, ...]] = {
    "lengths": ("query_length", "key_length"),
    "inputs": _WIDTHS[:3],
    "widths": _WIDTHS,
}
"""Fields of the shape that are cut at once."""

_MOVE_WIDTHS = frozenset({"kv_heads", "group", "head_size", "value_head_size"})
"""Axes on which an implementation may insist that the widths follow."""

Move = Callable[[Adapter, Trial], Iterator[Trial]]
"""Yields candidates in place of a trial, the smallest first."""


@dataclass(frozen=True, eq=False)
class Small:
    """The smallest problem, how it fails, and whether all steps were tried."""

    trial: Trial
    deviation: Deviation
    finished: bool


def shrink(
    adapter: Adapter,
    trial: Trial,
    deviation: Deviation,
    until: float,
    watch: Callable[[Trial, Deviation], None] = lambda trial, deviation: None,
) -> Small:
    """Return the smallest problem found before `until` that fails in the same way.

    Args:
        until: the end, on the clock of `time.monotonic`.
        watch: called with every smaller problem, so that an interruption loses nothing.
    """
    first = deviation

    def failing(candidate: Trial) -> Deviation | None:
        try:
            if not askable(candidate.problem):
                return None
            wrong = deviations(adapter, candidate)
        except (Unsupported, ConformanceError, ValueError):
            return None
        return next((item for item in wrong if item.as_clear_as(first)), None)

    improved = True
    while improved:
        improved = False
        for moves in (lambda _: _STRUCTURE, _number_moves):
            for move in moves(trial):
                helped = True
                while helped:
                    helped = False
                    for candidate in move(adapter, trial):
                        if time.monotonic() > until:
                            return Small(trial, deviation, False)
                        still = failing(candidate)
                        if still is not None:
                            trial, deviation = candidate, still
                            watch(trial, deviation)
                            helped = improved = True
                            break
    return Small(trial, deviation, True)


def _dtype(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
    dtypes = [dtype for dtype in ORDER if dtype in adapter.dtypes]
    for dtype in dtypes[: dtypes.index(trial.problem.dtype)]:
        yield in_dtype(trial, dtype)


def _mode(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
    for mode in adapter.modes:
        if mode.name == trial.mode.name:
            return
        if mode.dtypes is None or trial.problem.dtype in mode.dtypes:
            yield dataclasses.replace(trial, mode=mode)


def _without(name: str) -> Move:
    def move(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
        if getattr(trial.problem, name) is not None:
            yield _with(trial, trial.problem.replace(**{name: None}))

    return move


def _causal_as_mask(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
    problem = trial.problem
    if problem.causal is not None:
        yield _with(trial, problem.replace(mask=problem.allowed, causal=None))


def _biases(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
    if trial.problem.shape.bias:
        yield _with(trial, _rebuilt(trial.problem, _arrays(trial.problem), bias=False))


def _sharing(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
    sharings: tuple[Sharing, ...] = ("self", "memory", "separate")
    for sharing in sharings[: sharings.index(trial.problem.shape.sharing)]:
        with suppress(ConformanceError):
            yield _with(trial, _rebuilt(trial.problem, _arrays(trial.problem), sharing=sharing))


def _same_for_all(name: str) -> Move:
    """Use the first row of a mask or bias for a whole axis."""

    def move(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
        array = getattr(trial.problem, name)
        for axis in range(4) if array is not None else ():
            if array.shape[axis] > 1:
                yield _with(trial, trial.problem.replace(**{name: array.take([0], axis=axis)}))

    return move


def _less(axis: str) -> Move:
    """Keep one position of an axis, half of them, or all but one."""

    def move(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
        problem = trial.problem
        for kept in _kept(_size(problem.shape, axis)):
            for narrow in (False, True) if axis in _MOVE_WIDTHS else (False,):
                with suppress(ConformanceError):
                    yield _with(trial, _narrowed(_cut(problem, axis, kept), problem, narrow))

    return move


def _fewer_queries(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
    """Turn self-attention into attention to a memory with fewer queries."""
    problem = trial.problem
    if problem.shape.sharing == "self":
        arrays = _arrays(problem) | {"key": problem.key}
        apart = _rebuilt(problem, arrays, sharing="memory")
        for kept in _kept(problem.shape.query_length):
            with suppress(ConformanceError):
                yield _with(trial, _cut(apart, "query_length", kept))


_STRUCTURE: tuple[Move, ...] = (
    _dtype,
    _mode,
    *map(_without, ("mask", "attn_bias", "causal", "scale")),
    _causal_as_mask,
    _biases,
    *map(_less, ("batch", "query_length", "key_length", "lengths", "kv_heads", "group")),
    *map(_less, ("head_size", "value_head_size", "widths", "inputs", *_WIDTHS)),
    _fewer_queries,
    _sharing,
    *map(_same_for_all, ("mask", "attn_bias")),
)


def _number_moves(trial: Trial) -> Iterator[Move]:
    """Simplify numbers: first whole arrays, then single elements, then the mask."""
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
                yield _with(trial, _rebuilt(trial.problem, _arrays(trial.problem) | {name: simple}))


def _fewer_blocked(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
    mask = trial.problem.mask
    if mask is not None and mask.size <= MOST_ELEMENTS:
        for at in zip(*np.nonzero(~mask), strict=True):
            yield _with(trial, trial.problem.replace(mask=_put(mask, at, True)))


def _simpler_element(
    name: str, at: tuple[int, ...], adapter: Adapter, trial: Trial
) -> Iterator[Trial]:
    array = _arrays(trial.problem).get(name)
    if array is not None:
        for simple in _simpler_numbers(float(array[at])):
            yield _with(
                trial,
                _rebuilt(trial.problem, _arrays(trial.problem) | {name: _put(array, at, simple)}),
            )


def _simpler_arrays(array: Array) -> Iterator[Array]:
    yield np.zeros_like(array)
    if not array.any():
        return
    if set(np.unique(array)) <= {0.0, 1.0}:
        return
    yield np.ones_like(array)
    if array.ndim >= 2:
        # The identity, from the first axis to all others.
        flat = np.eye(array.shape[0], array.size // array.shape[0])
        yield flat.reshape(array.shape)
    for unit in (1.0, 0.5, 0.25, 0.125, 2.0**-6, 2.0**-10):
        yield np.round(array / unit) * unit
        if (array / unit == np.round(array / unit)).all():
            return


def _simpler_numbers(number: float) -> Iterator[float]:
    """Yield numbers closer to 0, in the order 0, 1, small whole numbers, halves."""
    if number == 0:
        return
    yield 0.0
    if number == 1:
        return
    if number < 0:
        yield -number
    yield 1.0
    for unit in (1.0, 0.5, 0.25, 0.125, 2.0**-6):
        simple = round(number / unit) * unit
        if simple == number:
            break
        if simple != 0:
            yield simple
    else:
        return
    if abs(number) > 1 and number == round(number):
        half = float(int(number / 2))
        if half:
            yield half
        yield number - np.sign(number)


# Problems from problems


def _with(trial: Trial, problem: Problem) -> Trial:
    return dataclasses.replace(trial, problem=problem)


def _arrays(problem: Problem) -> dict[str, Array]:
    """Return all arrays but the mask, in the order in which they are simplified."""
    weights = {f"weights.{name}": array for name, array in problem.weights.named().items()}
    biases = [*reversed([name for name in weights if name.endswith("_bias")]), "weights.score"]
    arrays = {"cotangent": problem.cotangent}
    arrays |= {name: weights.pop(name) for name in biases if name in weights}
    if problem.attn_bias is not None:
        arrays["attn_bias"] = problem.attn_bias
    arrays |= dict(reversed(weights.items()))
    return arrays | {n: getattr(problem, n) for n in reversed(problem.shape.distinct_inputs())}


def _rebuilt(problem: Problem, arrays: Mapping[str, Any], **fields: Any) -> Problem:
    """Return the problem with other arrays and other fields of its shape.

    Arrays that such a shape does not have are left out.
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
    ).replace(dtype=problem.dtype)


def _put(array: np.ndarray, at: tuple[int, ...], value: float) -> np.ndarray:
    changed = array.copy()
    changed[at] = value
    return changed


def _size(shape: Shape, axis: str) -> int:
    if axis == "group":
        return shape.group
    return min(getattr(shape, field) for field in _TOGETHER.get(axis, (axis,)))


def _kept(size: int) -> Iterator[list[int]]:
    """Yield the positions that stay: the first, the last, any one, either half, all but one."""
    if size < 2:
        return
    for single in (0, size - 1, *range(1, min(size - 1, MOST_TRIED))):
        yield [single]
    if size > 3:
        yield list(range(size // 2))
        yield list(range(size // 2, size))
    if size > 2:
        for gone in range(size - 1, max(-1, size - 1 - MOST_TRIED), -1):
            yield [i for i in range(size) if i != gone]


def _cut(problem: Problem, axis: str, kept: list[int]) -> Problem:
    """Return the problem with these positions of an axis only."""
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
    for name, array in arrays.items():
        for place, field in enumerate(_AXES[name]):
            if field in positions and (array.shape[place] > 1 or name not in ("mask", "attn_bias")):
                array = array.take(positions[field], axis=place)
        arrays[name] = array
    return _rebuilt(problem, arrays, **{name: len(at) for name, at in positions.items()})


def _narrowed(problem: Problem, before: Problem, narrow: bool) -> Problem:
    """Return the problem with widths that still are heads × head size, if asked for.

    Raises:
        ConformanceError: no width was that.
    """
    if not narrow:
        return problem
    shape = problem.shape
    whole = before.shape.heads * before.shape.head_size
    widths = [f for f in _WIDTHS if getattr(before.shape, f) == whole]
    width = shape.heads * shape.head_size
    if not widths or width >= whole:
        raise ConformanceError("no width follows")
    kept = list(range(width))
    if len(widths) == 4:
        return _cut(problem, "widths", kept)
    for field in widths:
        problem = _cut(problem, field, kept)
    return problem
