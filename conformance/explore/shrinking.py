"""Make a failing problem smaller, step by step, as long as it fails in the same way.

A step changes the problem: fewer entries, queries, keys, heads; no mask, no biases; rounder
numbers. It is kept if the implementation is then wrong about the same array, as clearly as before.
Steps that fail are as good as free, so none needs to know what the implementation can express.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from conformance.adapter.base import Adapter
from conformance.definition.dtypes import Array
from conformance.definition.problem import Problem, Shape, Sharing, Weights
from conformance.errors import ConformanceError, Unsupported
from conformance.explore.trial import ORDER, Deviation, Trial, askable, deviations, in_dtype

MOST_ELEMENTS = 64
"""Arrays with more numbers than this are simplified as a whole only."""

MOST_TRIED = 8
"""Positions of an axis that are tried alone, or left out alone."""

Move = Callable[[Adapter, Trial], Iterator[Trial]]
"""Candidates in place of a trial, the smallest first."""


@dataclass(frozen=True, eq=False)
class Small:
    """What is left, how it fails, and whether anything more was to be tried."""

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
    """The smallest problem found before `until` (of `time.monotonic`) that fails in the same way.

    `watch` is told of every success, so that nothing is lost if the search is interrupted.
    """
    first = deviation

    def failing(candidate: Trial) -> Deviation | None:
        try:
            if not askable(candidate.problem):
                return None
            found = deviations(adapter, candidate)
        except (Unsupported, ConformanceError, ValueError):
            return None
        return next((item for item in found if item.as_clear_as(first)), None)

    improved = True
    while improved:
        improved = False
        for moves in (_structure_moves, _number_moves):
            for move in moves(trial):
                helped = True
                while helped:
                    helped = False
                    for candidate in move(adapter, trial):
                        if time.monotonic() > until:
                            return Small(trial, deviation, False)
                        found = failing(candidate)
                        if found is not None:
                            trial, deviation = candidate, found
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
        yield _with(trial, _without_biases(trial.problem))


def _sharing(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
    sharings: tuple[Sharing, ...] = ("self", "memory", "separate")
    for sharing in sharings[: sharings.index(trial.problem.shape.sharing)]:
        with suppress(ConformanceError):
            yield _with(trial, _shared(trial.problem, sharing))


def _same_for_all(name: str) -> Move:
    """One row of a mask or bias for a whole axis."""

    def move(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
        array = getattr(trial.problem, name)
        for axis in range(4) if array is not None else ():
            if array.shape[axis] > 1:
                yield _with(trial, trial.problem.replace(**{name: array.take([0], axis=axis)}))

    return move


def _less(axis: str) -> Move:
    """Only one of an axis, half of it, all but one; as often as it helps."""

    def move(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
        problem = trial.problem
        for kept in _kept(_size(problem.shape, axis)):
            for narrow in (False, True) if axis in _MOVE_WIDTHS else (False,):
                with suppress(ConformanceError):
                    yield _with(trial, _narrowed(_cut(problem, axis, kept), problem, narrow))

    return move


def _fewer_queries(adapter: Adapter, trial: Trial) -> Iterator[Trial]:
    """Self-attention as attention to a memory, if that needs fewer queries."""
    problem = trial.problem
    if problem.shape.sharing == "self":
        apart = dataclasses.replace(problem.shape, sharing="memory")
        for kept in _kept(problem.shape.query_length):
            with suppress(ConformanceError):
                yield _with(trial, _cut(problem.replace(shape=apart), "query", kept))


_LESS: tuple[str, ...] = (
    *("batch", "query", "key", "length", "heads", "group", "head", "head_value"),
    *("widths", "inputs", "query_width", "key_width", "value_width", "output_width"),
)

_STRUCTURE: tuple[Move, ...] = (
    _dtype,
    _mode,
    *map(_without, ("mask", "attn_bias", "causal", "scale")),
    _causal_as_mask,
    _biases,
    *map(_less, _LESS),
    _fewer_queries,
    _sharing,
    *map(_same_for_all, ("mask", "attn_bias")),
)


def _structure_moves(trial: Trial) -> Iterable[Move]:
    return _STRUCTURE


def _number_moves(trial: Trial) -> Iterator[Move]:
    """Zeros, ones, whole numbers, halves; first whole arrays, then single elements."""
    names = list(_arrays(trial.problem))
    for name in names:
        yield partial(_simpler, name)
    for name, array in _arrays(trial.problem).items():
        for at in np.ndindex(array.shape) if array.size <= MOST_ELEMENTS else ():
            yield partial(_simpler_element, name, at)
    yield _fewer_blocked


def _simpler(name: str, adapter: Adapter, trial: Trial) -> Iterator[Trial]:
    array = _arrays(trial.problem).get(name)
    if array is not None:
        for simple in _simpler_arrays(array):
            if not np.array_equal(simple, array):
                yield _with(trial, _set(trial.problem, name, simple))


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
            yield _with(trial, _set(trial.problem, name, _put(array, at, simple)))


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
    """Closer to 0, in the order 0, 1, small whole numbers, halves."""
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
    found = {"cotangent": problem.cotangent}
    for name in ("output_bias", "value_bias", "key_bias", "query_bias", "score"):
        array = getattr(problem.weights, name)
        if array is not None:
            found[f"weights.{name}"] = array
    if problem.attn_bias is not None:
        found["attn_bias"] = problem.attn_bias
    for name in ("output", "value", "key", "query"):
        found[f"weights.{name}"] = getattr(problem.weights, name)
    for name in reversed(problem.shape.distinct_inputs()):
        found[name] = getattr(problem, name)
    return found


def _set(problem: Problem, name: str, array: Array) -> Problem:
    if name.startswith("weights."):
        return problem.with_weights(**{name.removeprefix("weights."): array})
    if name in ("cotangent", "attn_bias"):
        return problem.replace(**{name: array})
    return problem.with_inputs(**{name: array})


def _put(array: np.ndarray, at: tuple[int, ...], value: float) -> np.ndarray:
    changed = array.copy()
    changed[at] = value
    return changed


def _without_biases(problem: Problem) -> Problem:
    kept = {n: a for n, a in problem.weights.named().items() if not n.endswith("_bias")}
    shape = dataclasses.replace(problem.shape, bias=False)
    return problem.replace(shape=shape, weights=Weights(**kept))


def _shared(problem: Problem, sharing: Sharing) -> Problem:
    shape = dataclasses.replace(problem.shape, sharing=sharing)
    key = problem.query if sharing == "self" else problem.key
    return problem.replace(shape=shape, key=key, value=key)


_MOVE_WIDTHS = frozenset({"heads", "group", "head", "head_value"})
"""Axes on which an implementation may insist that the widths follow."""

_FIELDS = {
    "batch": ("batch",),
    "query": ("query_length",),
    "key": ("key_length",),
    "length": ("query_length", "key_length"),
    "heads": ("kv_heads",),
    "group": ("heads",),
    "head": ("head_size",),
    "head_value": ("value_head_size",),
    "inputs": ("query_width", "key_width", "value_width"),
    "widths": ("query_width", "key_width", "value_width", "output_width"),
}


def _size(shape: Shape, axis: str) -> int:
    if axis == "group":
        return shape.group
    return min(getattr(shape, field) for field in _FIELDS.get(axis, (axis,)))


def _kept(size: int) -> Iterator[list[int]]:
    """Which positions stay: the first, the last, any one, either half, all but one."""
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
    """The problem with these positions of an axis only."""
    shape, own = problem.shape, problem.weights
    sizes: dict[str, Any] = {field: len(kept) for field in _FIELDS.get(axis, (axis,))}
    heads = kv = None
    if axis == "heads":
        kv = kept
        heads = [h for h in range(shape.heads) if h // shape.group in kept]
        sizes = {"kv_heads": len(kv), "heads": len(heads)}
    elif axis == "group":
        heads = [h for h in range(shape.heads) if h % shape.group in kept]
        sizes = {"heads": len(heads)}
    if axis == "head" and shape.value_head_size == shape.head_size:
        sizes["value_head_size"] = len(kept)
    if shape.sharing != "separate" and axis in ("key_width", "value_width"):
        sizes |= {"key_width": len(kept), "value_width": len(kept)}
    smaller = dataclasses.replace(shape, **sizes)

    on = {
        "batch": kept if axis == "batch" else None,
        "query": kept if axis in ("query", "length") else None,
        "key": kept if axis in ("key", "length") else None,
        "heads": heads,
        "kv": kv,
        "head": kept if axis == "head" else None,
        "value_head": kept if "value_head_size" in sizes else None,
        **{
            field: kept if field in sizes else None
            for field in ("query_width", "key_width", "value_width", "output_width")
        },
    }

    def take(array: np.ndarray | None, *names: str) -> np.ndarray | None:
        if array is None:
            return None
        for place, name in enumerate(names):
            which = on[name]
            if which is not None and not (array.shape[place] == 1 and len(names) == 4):
                array = array.take(which, axis=place)
        return array

    weights = Weights(
        query=_array(take(own.query, "query_width", "heads", "head")),
        key=_array(take(own.key, "key_width", "kv", "head")),
        value=_array(take(own.value, "value_width", "kv", "value_head")),
        output=_array(take(own.output, "heads", "value_head", "output_width")),
        query_bias=take(own.query_bias, "heads", "head"),
        key_bias=take(own.key_bias, "kv", "head"),
        value_bias=take(own.value_bias, "kv", "value_head"),
        output_bias=take(own.output_bias, "output_width"),
        score=take(own.score, "heads", "head"),
    )
    query = take(problem.query, "batch", "query", "query_width")
    key = query
    if shape.sharing != "self":
        key = take(problem.key, "batch", "key", "key_width")
    shared = shape.sharing != "separate"
    return problem.replace(
        shape=smaller,
        weights=weights,
        query=query,
        key=key,
        value=key if shared else take(problem.value, "batch", "key", "value_width"),
        cotangent=take(problem.cotangent, "batch", "query", "output_width"),
        mask=take(problem.mask, "batch", "heads", "query", "key"),
        attn_bias=take(problem.attn_bias, "batch", "heads", "query", "key"),
    )


def _array(array: np.ndarray | None) -> np.ndarray:
    assert array is not None
    return array


def _narrowed(problem: Problem, before: Problem, narrow: bool) -> Problem:
    """Widths that were heads times head size still are, if asked for."""
    if not narrow:
        return problem
    shape = problem.shape
    whole = before.shape.heads * before.shape.head_size
    widths = [f for f in _FIELDS["widths"] if getattr(before.shape, f) == whole]
    width = shape.heads * shape.head_size
    if not widths or width >= whole:
        raise ConformanceError("no width follows")
    kept = list(range(width))
    if len(widths) == 4:
        return _cut(problem, "widths", kept)
    for field in widths:
        problem = _cut(problem, field, kept)
    return problem
