"""Call an implementation on long sequences, whether it is a function of heads or a whole layer.

An implementation may take masks as structure (see `AtLength`). Others get the arguments that they
declare, as in other problems. A mask that no flag or feature can express becomes an array, which
must be small or have a single row. The inputs are created once, as `[batch heads length head]`, and
results are read in slices, so that no second copy of them is needed, unless tokens are passed
packed, in pages or beside a cache.

A layer gets projections that pass the heads on unchanged. Products with 0 and 1 are exact in every
precision, so the layer returns the attention of these heads. If it takes only one input for query,
key and value, this input holds all three side by side. The layer then has three heads: the first
extracts query, key and value from the input, and the other two see zeros.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from conformance.adapter.base import Adapter, Call, Mode
from conformance.adapter.function import Function
from conformance.adapter.native import MASK
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.features import ARRAYS, FEATURES
from conformance.definition.problem import Problem, Shape, Weights, check_shape, identities
from conformance.errors import Unsupported, WrongAnswer
from conformance.frameworks import LACKS
from conformance.frameworks.base import Natives
from conformance.long.problem import Heads, LongProblem, heads_of, no_inputs

DENSE = 2**26
"""The largest number of (query, key) pairs for which a mask with several rows is passed as an
array."""

SHORT = 10.0
"""A first call that takes at most this many seconds is repeated, to find its compile time."""

_INPUTS = ("query", "key", "value")
TRAINED = {name: entry.arrays[name][0] for entry in FEATURES for name in entry.trained}
"""The arrays of features of which an implementation may return gradients, each with its axis."""

_WANTED = frozenset((*_INPUTS, *TRAINED))


@runtime_checkable
class AtLength(Protocol):
    """An implementation that takes masks as a `Visibility` instead of arrays or flags."""

    def at_length(self, heads: Heads) -> Mapping[str, np.ndarray]:
        """Return the "output" and any gradients of "query", "key" and "value", as NumPy arrays.

        The axes are `[batch heads length head]`. The dictionary may also hold "log_total"
        `[batch heads query]`, the logarithm of each normaliser, and the gradients of the arrays of
        features in `TRAINED`, which have one axis.
        """
        ...


class _StructuredProblem(Problem):
    """A problem whose rules become arrays only if these have at most `DENSE` pairs."""

    def rule(self, name: str) -> BoolArray:
        queries, keys = self.shape.logits[2:]
        if queries * keys > DENSE and not name.endswith("lengths"):
            raise Unsupported(f"a mask of {queries:,} × {keys:,} as an array")
        return super().rule(name)


Slices = Callable[[int, int, slice], Array]
"""A function from `(batch entry, head, rows)` to rows of an array, `[rows head]`, in float64."""


@dataclass(frozen=True, eq=False)
class Answered:
    """The results of an implementation, and the seconds that the call took.

    `arrays` holds "output" and any gradients, as "query", "key" and "value". It may also hold
    "log_total", with one number in each row, and arrays of features, each as a single row. `first`
    is the additional time, in seconds, that only the first call of a shape takes, such as for
    compiling.
    """

    arrays: Mapping[str, Slices]
    seconds: float
    first: float = 0.0


def call(
    adapter: Adapter,
    problem: LongProblem | Heads,
    device: str = "cpu",
    mode: Mode | None = None,
) -> Answered:
    """Call an implementation, in its first mode by default, and return its results.

    If the adapter is an `AtLength`, `device` and `mode` have no effect.

    Raises:
        Unsupported: the implementation cannot express the problem.
        Unavailable: the framework or the device is missing.
        WrongAnswer: the implementation returned something other than the expected arrays.
        WrongShape: the implementation returned arrays of wrong shapes.
    """
    heads = heads_of(problem) if isinstance(problem, LongProblem) else problem
    if isinstance(adapter, AtLength):
        started = time.perf_counter()
        arrays = adapter.at_length(heads)
        seconds = time.perf_counter() - started
        shapes = {name: np.shape(array) for name, array in arrays.items()}
        slices = {name: slices_of(array) for name, array in arrays.items()}
        return Answered(_checked(heads, slices, shapes), seconds)
    options = Call(mode=mode or adapter.modes[0], device=device, projected=True)
    if isinstance(adapter, Function):
        return _call_function(adapter, heads, options)
    return _call_layer(adapter, heads, replace(options, projected=False, wanted=_WANTED))


def _timed(action: Callable[[], Any], *, compiles: bool) -> tuple[Any, float, float]:
    """Return an action's result, the seconds that it takes, and the extra seconds of a first call.

    The action is repeated to measure the extra seconds. They are 0 if `compiles` is False, or if
    the first call takes more than `SHORT` seconds, so that it is not repeated.
    """
    started = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - started
    if not compiles or seconds > SHORT:
        return result, seconds, 0.0
    started = time.perf_counter()
    result = action()
    again = time.perf_counter() - started
    return result, again, max(0.0, seconds - again)


def _call_function(adapter: Function, heads: Heads, call: Call) -> Answered:
    bridge, problem = adapter.bridge, _stand_in(heads)
    if heads.dtype in LACKS.get(adapter.framework, ()):
        raise Unsupported(f"{adapter.framework} has no {heads.dtype}")
    Adapter.check(adapter, problem)
    spelling = adapter.masks.handed(adapter.masks.spell(problem), problem)
    if problem.key_lengths is not None:
        # A function may take masks as well, but it is serving that has lengths.
        every = adapter.masks.spellings(problem)
        spelling = next((one for one in every if one.handing is not None), spelling)
    adapter.prepare()
    swapped, moved = adapter.layout != "batch heads length head", spelling.handing
    call = replace(call, spelling=spelling, wanted=_WANTED)
    if moved is None:
        call = replace(call, given=_Wide(heads, swapped))
    else:
        turned = 0 if heads.rotary is None else heads.key.size * heads.key.shape[3]
        if moved.prepared and turned > DENSE:
            raise Unsupported(f"a cache of {heads.key.shape[2]:,} keys that are rotated already")
        problem = problem.replace(**_joined(heads))
    with adapter.requested(problem, call) as whole:
        # Weights, if it returns any, are an array of all pairs, which is not kept.
        request = replace(
            whole,
            function=lambda variables, constants: (whole.function(variables, constants)[0], None),
            program=("long", whole.program),
            optimised=whole.optimised or bridge.compiles,
        )

        def evaluate() -> Natives:
            result = bridge.evaluate(request)
            returned = {"output": result.output, **result.gradients}
            for argument, name in spelling.gradients().items():
                if MASK + argument in returned:
                    returned[name] = returned.pop(MASK + argument)
            for array in returned.values():
                if not bridge.is_array(array):
                    raise WrongAnswer(f"returned {type(array).__name__}, no array of {bridge.name}")
            bridge.wait(returned.values())
            return returned

        bridge.poison(request.arrays())
        # The time of a call is not that of moving its inputs to the device.
        bridge.wait(request.arrays())

        compiles = bridge.compiles or request.optimised
        returned, seconds, first = _timed(evaluate, compiles=compiles)

    def slices(name: str, array: Any) -> Slices:
        if name in TRAINED:
            return slices_of(spelling.variables[name].factor * bridge.numpy(array))
        if swapped:
            return lambda entry, head, rows: bridge.numpy(array[entry, rows, head])
        return lambda entry, head, rows: bridge.numpy(array[entry, head, rows])

    shapes = {name: tuple(array.shape) for name, array in returned.items()}
    if swapped:
        heads_first = {n: (s[0], s[2], s[1], *s[3:]) for n, s in shapes.items() if len(s) > 2}
        shapes |= heads_first
    arrays = {name: slices(name, array) for name, array in returned.items()}
    return Answered(_checked(heads, arrays, shapes), seconds, first)


class _Wide(Mapping[str, np.ndarray]):
    """Heads in the layout of a function and in float64, one array at a time to save memory."""

    def __init__(self, heads: Heads, swapped: bool) -> None:
        self._heads, self._swapped = heads, swapped

    def __getitem__(self, name: str) -> np.ndarray:
        values: np.ndarray = getattr(self._heads, name)
        return (values.swapaxes(1, 2) if self._swapped else values).astype(np.float64)

    def __contains__(self, name: object) -> bool:
        return name in (*_INPUTS, "cotangent")

    def __iter__(self) -> Iterator[str]:
        return iter((*_INPUTS, "cotangent"))

    def __len__(self) -> int:
        return 1 + len(_INPUTS)


def _call_layer(adapter: Adapter, heads: Heads, call: Call) -> Answered:
    """Call a layer, which projects its inputs, with projections that pass the heads on exactly."""
    refused: list[Unsupported] = []
    for shared, bias in itertools.product((False, True), repeat=2):
        try:
            problem = _passed_on(heads, shared=shared, bias=bias)
            adapter.check_shape(problem.shape)
            break
        except Unsupported as reason:
            refused.append(reason)
    else:
        raise refused[0]
    compiles = adapter.compiles or call.mode.optimised
    answer, seconds, first = _timed(lambda: adapter.run(problem, call), compiles=compiles)
    count, size = heads.query.shape[1], heads.query.shape[3]
    arrays = {"output": answer.output}
    arrays |= {name: answer.gradients[name] for name in _WANTED if name in answer.gradients}
    if shared:
        # One input, and so one gradient, holds query, key and value side by side.
        whole = arrays.get("query")
        arrays["output"] = answer.output[..., :size]
        if whole is not None:
            parts = (whole[..., at : at + size] for at in (0, size, 2 * size))
            arrays |= dict(zip(_INPUTS, parts, strict=True))
        # Of arrays of heads, too, the first belongs to the attention that is looked at.
        of_heads = [name for name in arrays if TRAINED.get(name) == "heads"]
        arrays |= {name: arrays[name][:1] for name in of_heads}
    split = {
        name: array.reshape(*array.shape[:2], count, -1).swapaxes(1, 2)
        if array.ndim == 3 and array.shape[2] % count == 0
        else array
        for name, array in arrays.items()
    }
    shapes = {name: array.shape for name, array in split.items()}
    slices = {name: slices_of(array) for name, array in split.items()}
    return Answered(_checked(heads, slices, shapes), seconds, first)


def _passed_on(heads: Heads, *, shared: bool, bias: bool) -> Problem:
    """Return a problem whose projections are identities, so that a layer attends over these heads.

    Args:
        heads: the heads.
        shared: whether a single input holds query, key and value side by side.
        bias: whether the projections have biases; they are all 0.

    Raises:
        Unsupported: `shared` is set, but there are several heads, or queries, keys and values
            differ in length or head size.
    """
    count, queries, size = heads.query.shape[1:]
    kv_heads, keys, value_size = heads.value.shape[1:]
    if shared and not (count == kv_heads == 1 and queries == keys and size == value_size):
        raise Unsupported("queries and keys of different lengths in self-attention")

    inputs = _joined(heads)
    if shared:
        whole = np.concatenate([inputs[name] for name in _INPUTS], axis=2)
        inputs |= dict.fromkeys(_INPUTS, whole)
        inputs["cotangent"] = np.pad(inputs["cotangent"], ((0, 0), (0, 0), (0, 2 * size)))
    shape = _shape(heads, shared=shared, bias=bias)
    weights = {name: np.zeros(sizes) for name, sizes in shape.weight_shapes().items()}
    for place, name in enumerate((*_INPUTS, "output")):
        weight = weights[name]
        if not shared:
            # A square matrix, one of whose axes is split into heads.
            weights[name] = np.eye(math.isqrt(weight.size)).reshape(weight.shape)
        elif name == "output":
            weight[0, :, :size] = np.eye(size)
        else:
            weight[place * size : (place + 1) * size, 0] = np.eye(size)
    # The two heads that see zeros have an array of each feature, too.
    features = {
        name: np.pad(value, (0, 2)) if shared and ARRAYS.get(name) == ("heads",) else value
        for name, value in heads.features.items()
    }
    return _problem(heads, shape, Weights(**weights), inputs, **features)


def _joined(heads: Heads) -> dict[str, Array]:
    """Return the inputs and the cotangent `[batch length (heads head)]`, by name."""
    arrays = {name: getattr(heads, name).swapaxes(1, 2) for name in (*_INPUTS, "cotangent")}
    return {n: a.reshape(*a.shape[:2], -1).astype(np.float64) for n, a in arrays.items()}


def _shape(heads: Heads, *, shared: bool = False, bias: bool = False) -> Shape:
    """Return the shape of a layer that attends over these heads.

    If `shared`, the layer has three heads, because its input holds query, key and value.
    """
    query, value = heads.query.shape, heads.value.shape
    if not shared:
        return Shape.of_heads(query, value, bias=bias)
    query, value = ((it[0], 3, *it[2:]) for it in (query, value))
    return replace(Shape.of_heads(query, value, bias=bias), sharing="self")


def _problem(
    heads: Heads,
    shape: Shape,
    weights: Weights,
    inputs: Mapping[str, Any],
    **features: Any,
) -> Problem:
    batch, _, queries, keys = shape.logits
    return _StructuredProblem(
        shape=shape,
        dtype=heads.dtype,
        weights=weights,
        scale=None if heads.scale == shape.default_scale else heads.scale,
        **heads.sees.rules(batch, queries, keys),
        **inputs,
        **features,
    )


def slices_of(array: np.ndarray) -> Slices:
    """Return the function that reads rows of an array `[batch heads length head]`, or `[size]`."""
    if np.ndim(array) == 1:
        array = array[None, None, None]

    def read(entry: int, head: int, rows: slice) -> Array:
        part = np.asarray(array[entry, head, rows], np.float64)
        return part[:, None] if part.ndim == 1 else part

    return read


def _checked(
    heads: Heads, arrays: Mapping[str, Slices], shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, Slices]:
    """Return the arrays; raise `WrongAnswer` or `WrongShape` if their names or shapes are wrong."""
    sizes = {"heads": heads.query.shape[1], "head_size": heads.query.shape[3]}
    wanted = {
        "output": heads.cotangent.shape,
        "query": heads.query.shape,
        "key": heads.key.shape,
        "value": heads.value.shape,
        "log_total": heads.query.shape[:3],
        **{n: (sizes[axis],) for n, axis in TRAINED.items()},
    }
    if "output" not in arrays or arrays.keys() - wanted.keys():
        raise WrongAnswer(f"returned {', '.join(arrays)}; wanted output and gradients")
    for name in arrays:
        check_shape(f"{name}, [batch heads length head],", tuple(shapes[name]), wanted[name])
    return arrays


def _stand_in(heads: Heads) -> Problem:
    """Return a `Problem` with the sizes, scale, causal flag and features of these heads.

    Its inputs are zeros that take almost no memory.
    """
    shape = _shape(heads)
    return _problem(heads, shape, identities(shape), no_inputs(shape), **heads.features)
