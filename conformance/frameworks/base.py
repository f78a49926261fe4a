"""The base class of bridges to frameworks: array conversion, derivatives, devices, versions.

Checks compare NumPy arrays, and an adapter uses only its own framework. The module of a bridge
imports its framework, so `conformance.frameworks` imports each bridge only when it is needed.

A `Setting` is a piece of process-wide state, such as a random generator. An implementation that
changes this state can affect later calls, so checks compare the state before and after a call, and
restore it.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import math
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from importlib import metadata
from typing import Any, ClassVar, Literal

import numpy as np
from packaging.version import Version

from conformance.definition.dtypes import DTYPES
from conformance.errors import DeviceLost, Unsupported, WrongDeclaration
from conformance.text import is_exhausted, message

Natives = dict[str, Any]
"""Arrays of a framework, by name."""

Strides = Literal["", "gaps", "transposed", "window", "expanded"]
"""How an array lies in memory: "" means contiguous; for the others, see `Framework.strided`."""

GUARD = 4096
"""The number of elements before and after an array in `Framework.surrounded`.

It is greater than the size of a batch entry in the experiments that surround arrays."""

_SMALL = tuple(2**power for power in range(9, 21))
"""The sizes in bytes of the small blocks that are poisoned whatever the sizes of the arrays."""

_POISONED = 4
"""How many blocks of the size of an array are poisoned: for results, gradients, and between."""

Divided = list[tuple[int, Sequence[np.ndarray]]]
"""The axes of an array that are divided among ranks, each with the indices that each rank gets."""


@dataclass(frozen=True)
class OnRanks:
    """A call of a function on all ranks of a world, which is a group of processes.

    Attributes:
        function: where a rank finds the function: its module, the module's file, and its name.
        divided: how each tensor is divided among the ranks.
        result: how the result is divided among the ranks.
        others: for each rank, the keyword arguments other than the tensors.
        ask: sends each rank one payload and returns the results of all ranks. A rank passes the
            items of its payload to `serve` of the class that the bridge names in `Framework.rank`.
    """

    function: tuple[str, str, str]
    divided: Mapping[str, Divided]
    result: Divided
    others: Sequence[Mapping[str, Any]]
    ask: Callable[[Sequence[Any]], list[Any]]


Function = Callable[[Natives, Natives], tuple[Any, Any]]
"""A function that maps (variables, constants) to (output, weights or None)."""


@dataclass(frozen=True, eq=False)
class Request:
    """A function with arguments and options, to be evaluated by a bridge.

    Attributes:
        function: a pure function of the variables and the constants.
        variables: the arrays with respect to which to differentiate.
        constants: the other arrays, such as masks.
        cotangent: the cotangent of the output, of the same shape.
        weights_cotangent: the cotangent of the returned weights, or None if the loss does not
            depend on them.
        gradients: whether to differentiate.
        program: a key; functions with equal keys can share one compiled program.
        optimised: whether to compile with the options of normal use rather than those that compile
            fastest.
        compiled: False to call the function operation by operation even if the framework compiles.
        backwards: the number of backward passes through the same graph; the last gradients are
            returned.
    """

    function: Function
    variables: Natives
    constants: Natives
    cotangent: Any
    gradients: bool
    program: Hashable
    optimised: bool = False
    compiled: bool = True
    backwards: int = 1
    weights_cotangent: Any = None

    def arrays(self) -> list[Any]:
        """Return all arrays that the function or its gradients get."""
        return [*self.variables.values(), *self.constants.values(), self.cotangent]

    def losses(self, output: Any, weights: Any) -> tuple[list[Any], list[Any]]:
        """Return the results on which the loss depends, and the cotangent of each."""
        if self.weights_cotangent is None:
            return [output], [self.cotangent]
        return [output, weights], [self.cotangent, self.weights_cotangent]


@dataclass(frozen=True)
class Evaluated:
    """Native results: the output, attention weights or None, and gradients by variable name."""

    output: Any
    weights: Any
    gradients: Natives


@dataclass(frozen=True)
class Memory:
    """The memory of a device, in bytes: what is free, what is used, and the most that was used.

    See `Framework.memory` for the time from which the peak counts.
    """

    free: int
    used: int
    peak: int


Values = list[Any]
"""The values of a sequence of settings, comparable with ==."""


@dataclass(frozen=True)
class Setting:
    """One piece of process-wide state.

    Attributes:
        name: a description for messages.
        get: returns the current value.
        put: restores a value.
        shown: whether messages include the values.
        recorded: whether records include the value, because it decides how precisely a framework
            computes.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]
    shown: bool = True
    recorded: bool = False


def look(settings: Sequence[Setting]) -> Values:
    """Return the values of all settings."""
    return [setting.get() for setting in settings]


def put_back(settings: Sequence[Setting], values: Values, present: Values | None = None) -> None:
    """Restore the settings to the given values.

    Settings that already have their value are left alone. `present` holds the current values; they
    are looked up if it is None.
    """
    present = look(settings) if present is None else present
    if present == values:
        return
    for setting, value, current in zip(settings, values, present, strict=True):
        if current != value:
            setting.put(value)


def changes(settings: Sequence[Setting], before: Values, after: Values) -> list[str]:
    """Return one line of text for each setting whose value changed."""
    if before == after:
        return []
    return [
        f"{setting.name}: {one} became {other}" if setting.shown else f"{setting.name} changed"
        for setting, one, other in zip(settings, before, after, strict=True)
        if one != other
    ]


_WORDS = 4 * (624 + 1)
"""The size in bytes of the state of NumPy's default generator: 624 words and a position."""

_copied: list[Any] = [None, ()]
"""The last state of NumPy's generator that was copied, preceded by its words.

In place of the words, there is None if they do not identify the state."""


def _numpy_generator() -> tuple[Any, ...]:
    """Return the state of NumPy's global generator.

    Copying the state with NumPy takes a hundred times as long as reading its words, so the last
    copy is reused while the words are the same. A generator that has drawn two normal numbers and
    kept the second for later is copied anew, because the words do not show that number.
    """
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    words = None
    if isinstance(generator, np.random.MT19937):
        words = ctypes.string_at(generator.ctypes.state_address, _WORDS)
        if words == _copied[0]:
            return _copied[1]
    state: Any = np.random.get_state()
    name, keys, *rest = state
    whole = (name, keys.tobytes(), *rest)
    _, has_normal, _ = rest
    _copied[:] = (None if has_normal else words, whole)
    return whole


def _put_numpy_generator(state: tuple[Any, ...]) -> None:
    name, keys, *rest = state
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))
    _copied[0] = None


def _environment() -> dict[Any, Any]:
    """Return the environment variables as Python stores them, which are bytes on POSIX systems.

    Decoding them would take twenty times as long.
    """
    held: dict[Any, Any] | None = getattr(os.environ, "_data", None)
    return dict(os.environ if held is None else held)


def _put_environment(values: dict[Any, Any]) -> None:
    os.environ.clear()
    os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in values.items()})


def _directory() -> str:
    with suppress(OSError):
        return os.getcwd()
    return ""


PROCESS = (
    Setting("Python's random generator", random.getstate, random.setstate, shown=False),
    Setting("NumPy's random generator", _numpy_generator, _put_numpy_generator, shown=False),
    Setting("NumPy's error handling", np.geterr, lambda values: np.seterr(**values)),
    Setting("the environment", _environment, _put_environment, shown=False),
    Setting("the current directory", _directory, os.chdir),
)
"""The settings that exist in every process, whatever the framework."""


class DeviceState:
    """What a call on a device other than the CPU may leave behind: no memory, or no device."""

    def __init__(self) -> None:
        self._exhausted = False
        self._lost = ""

    @contextmanager
    def watching(
        self, attempt: Callable[[], object], empty: Callable[[], object] = lambda: None
    ) -> Iterator[None]:
        """Enter the context of a call on the device.

        If the last call ran out of memory, that which nothing uses is freed first.

        Args:
            attempt: a function that raises an exception if the device can no longer be used.
            empty: a function that returns unused memory from the framework to the device.

        Raises:
            DeviceLost: the device cannot be used in this process, since this call or an earlier.
        """
        if self._lost:
            raise DeviceLost(self._lost)
        if self._exhausted:
            # Exceptions are in cycles with the frames that hold the arrays.
            gc.collect()
            empty()
            self._exhausted = False
        try:
            yield
        except Exception as error:
            self._exhausted = is_exhausted(error)
            try:
                attempt()
            except Exception as again:
                if is_exhausted(again):
                    raise
                self._lost = f"the device is lost: {type(error).__name__}: {message(error)[:300]}"
                raise DeviceLost(self._lost) from error
            raise


class Framework(ABC):
    """The base class of bridges, with the operations that the suite needs from a framework."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    """The distributions whose versions are recorded."""
    array_type: ClassVar[type]
    differentiable: ClassVar[bool] = True
    records_graphs: ClassVar[bool] = False
    """Whether a call builds a graph through which gradients can be computed repeatedly."""
    differentiates_weights: ClassVar[bool] = False
    """Whether a loss may depend on the returned weights as well as on the output."""
    compiles: ClassVar[bool] = False
    """Whether a program is compiled for each new set of arguments."""
    compiles_modes: ClassVar[bool] = False
    """Whether it is in optimised modes alone: there, a function gets arrays without numbers."""
    loads_in_place: ClassVar[bool] = False
    """Whether `load` writes into the layer's parameters; if not, `Layer.bind` passes them."""
    has_strides: ClassVar[bool] = False
    """Whether arrays can be views of other arrays and be assigned to by index."""
    takes_other_paths: ClassVar[bool] = False
    """Whether implementations may use another algorithm when gradients are disabled."""
    settings: ClassVar[tuple[Setting, ...]] = ()
    """The process-wide settings of the framework."""
    rank: ClassVar[str] = ""
    """The class that serves in the process of a rank, "module:class"; "" if there are no ranks."""

    @abstractmethod
    def array(self, values: np.ndarray, dtype: str, device: str) -> Any:
        """Return NumPy values as a native array on the device; float64 is converted to `dtype`.

        Other dtypes are kept as far as the framework has them.
        """

    def device_of(self, native: Any) -> str:
        """Return the kind of device on which an array lies; "" if arrays lie on none in particular.

        The array may be abstract, as in a function that is being compiled; it lies on no device.
        """
        return ""

    @abstractmethod
    def numpy(self, native: Any) -> np.ndarray:
        """Return a native array as a NumPy array: of bool if it is boolean, or else of float64."""

    @abstractmethod
    def einsum(self, axes: str, *operands: Any) -> Any:
        """Return the einsum of the operands; `axes` is a pattern such as "bqe,ehd->bqhd".

        The suite uses it to compute the projections for functions, which have none of their own.
        Some bridges accept only two operands that are multiplied as matrices.
        """

    def take(self, native: Any, index: np.ndarray) -> Any:
        """Return the elements of an array's first axis at the positions `index`, `[row]`."""
        return native[index]

    @abstractmethod
    def devices(self) -> dict[str, str]:
        """Return the model of each kind of device, "cpu" or "gpu", that the framework can use."""

    def device_name(self, device: str) -> str:
        """Return what the framework calls a kind of device, such as "cuda"; by default, the kind.

        An override raises `Unavailable` if there is no such device.
        """
        return device

    def toolkit(self) -> dict[str, str]:
        """Return the versions of the libraries for GPUs that the framework uses, by name.

        A version that it does not know is "". The method may raise any exception if it knows none.
        By default, return {}.
        """
        return {}

    def memory(self, device: str, *, anew: bool = False) -> Memory | None:
        """Return the memory of a device; None if it is the host's, or if the framework cannot say.

        If `anew` is true, the peak counts from this call on, where the framework can do that. By
        default, return None.
        """
        return None

    def poison(self, arrays: Iterable[Any]) -> None:  # noqa: B027 - most hand out no memory
        """Leave NaN in free memory, where the next arrays of these sizes will lie.

        A kernel that reads what it has not written then returns NaN rather than, by luck, zeros or
        the right numbers of an earlier call. This is done on devices whose memory the framework
        hands out itself. By default, do nothing.
        """

    def wait(self, arrays: Iterable[Any]) -> None:
        """Wait until these arrays are computed; raise the error of a computation that failed.

        Frameworks compute asynchronously on some devices, so time is taken only after this. By
        default, one element of each array is read.
        """
        for array in arrays:
            self.numpy(array[tuple(slice(1) for _ in array.shape)])

    def evaluate(self, request: Request) -> Evaluated:
        """Call the function and, if requested, compute the gradients of the variables.

        An output whose shape is not the cotangent's is returned without gradients. A bridge may
        raise an exception instead if the output is not an array or the loss depends on the weights.

        Raises:
            Unsupported: for gradients, repeated backward passes or a loss on the weights, if the
                framework, or its bridge, cannot compute them.
        """
        if request.weights_cotangent is not None and not self.differentiates_weights:
            raise Unsupported(f"the bridge to {self.name} takes a loss on the output only")
        if request.backwards > 1 and self.differentiable and not self.records_graphs:
            raise Unsupported(f"derivatives of {self.name} are functions, not graphs")
        return self.differentiate(request) if request.gradients else self.call(request)

    def call(self, request: Request) -> Evaluated:
        """Call the function without computing gradients."""
        with self.without_gradients():
            return Evaluated(*request.function(request.variables, request.constants), {})

    def differentiate(self, request: Request) -> Evaluated:
        """Call the function and compute its vector-Jacobian product with the cotangents.

        Raise `Unsupported` if the framework has no derivatives, which is the default.
        """
        raise Unsupported(f"{self.name} has no derivatives")

    def without_gradients(self) -> AbstractContextManager[Any]:
        """Return the context manager with which users disable gradients; by default, a null one."""
        return nullcontext()

    @contextmanager
    def on_threads(self, count: int | None = None) -> Iterator[None]:
        """Compute on another number of threads in the context: on one, or on two in place of one.

        Args:
            count: the number of threads, if it matters.

        Raises:
            Unsupported: if the number cannot be set in this process.
        """
        if self._threads is None:
            raise Unsupported(f"the number of threads of {self.name} cannot be set")
        before = self.threads
        self._threads.put(count or (1 if before > 1 else 2))
        try:
            yield
        finally:
            self._threads.put(before)

    @property
    def threads(self) -> int:
        """The number of threads on which a call computes; 0 if it is not known."""
        return 0 if self._threads is None else int(self._threads.get())

    @property
    def _threads(self) -> Setting | None:
        found = [each for each in self.settings if each.name.endswith("number of threads")]
        return found[0] if found else None

    def fits(self, output: Any, cotangent: Any) -> bool:
        """Return whether the output is an array of the cotangent's shape."""
        return self.is_array(output) and output.shape == cotangent.shape

    def is_array(self, value: Any) -> bool:
        """Return whether a value is an array of the framework."""
        return isinstance(value, self.array_type)

    def dtype(self, native: Any) -> str:
        """Return the name of the array's dtype, such as "bfloat16", "int32" or "bool"."""
        return _name_of(native.dtype)

    def cast(self, native: Any, dtype: str) -> Any:
        """Return the array converted to the dtype with this name, such as "float32"."""
        return native.astype(dtype)

    def load(
        self, layer: Any, parameters: Mapping[str, np.ndarray], dtype: str, device: str
    ) -> Natives:
        """Return the parameters by name, as native arrays with respect to which to differentiate.

        If `loads_in_place` is true, they are the layer's own parameters, into which the numbers are
        written. In this case, raise `WrongDeclaration` if names or shapes differ from the layer's.
        """
        if not self.loads_in_place:
            return {name: self.array(values, dtype, device) for name, values in parameters.items()}
        own = dict(layer.named_parameters())
        _check_parameters(layer, own, parameters)
        for name, values in parameters.items():
            self.fill(own[name], values, dtype, device)
        return own

    def fill(self, native: Any, values: np.ndarray, dtype: str, device: str) -> None:
        """Write NumPy values, which `dtype` represents exactly, into a native array."""
        self.overwrite(native, self.array(values, dtype, device))

    def place(self, layer: Any, device: str) -> Any:
        """Return a layer that has just been built, moved to the device if the bridge moves layers.

        By default, return it unchanged.
        """
        return layer

    @contextmanager
    def session(self, dtype: str, device: str) -> Iterator[None]:
        """Enter the context in which implementations are built and called; by default, a null one.

        An override raises `Unsupported` if the framework cannot compute with this dtype on this
        device.
        """
        yield

    def strided(self, native: Any, how: Strides, device: str) -> Any:
        """Return the same numbers with other strides, as a view of a larger array.

        If `how` is "gaps", each number is stored twice in a row. If it is "transposed", the last
        two axes are swapped in memory. If it is "expanded", axes along which all numbers are equal
        have strides of 0. If it is "window", the view is a slice along the axes between the first
        and the last, or along all axes if there are fewer than three. The rest of the larger array
        is NaN or, for booleans and integers, one. Raise `Unsupported` if the framework's arrays
        have no such strides.
        """
        if not self.has_strides:
            raise Unsupported(f"arrays of {self.name} have no strides")
        sizes, dtype = tuple(native.shape), self.dtype(native)

        def filled(*sizes: int) -> Any:
            values = np.full(sizes, np.nan) if dtype in DTYPES else np.ones(sizes, dtype)
            return self.array(values, dtype, device)

        if how == "expanded":
            values = self.numpy(native)
            constant = [(values == values.take([0], axis)).all() for axis in range(values.ndim)]
            once = tuple(slice(0, 1) if same else slice(None) for same in constant)
            return self.expanded(self.array(values[once], dtype, device), sizes)
        if how == "transposed":
            if len(sizes) < 2:
                return native
            around = filled(*sizes[:-2], sizes[-1], sizes[-2])
            around[...] = native.swapaxes(-1, -2)
            return around.swapaxes(-1, -2)
        if how == "gaps":
            around = filled(*sizes, 2)
            # Two assignments, because Paddle does not differentiate a broadcasting assignment.
            around[..., 0] = native
            around[..., 1] = native
            return around[..., 0]
        between = range(1, len(sizes) - 1) or range(len(sizes))
        window = tuple(
            slice(1, 1 + size) if axis in between else slice(None)
            for axis, size in enumerate(sizes)
        )
        around = filled(*(size + 3 * (axis in between) for axis, size in enumerate(sizes)))
        around[window] = native
        return around[window]

    def expanded(self, native: Any, sizes: tuple[int, ...]) -> Any:
        """Return a view of the array with these sizes, repeated with strides of 0."""
        raise Unsupported(f"arrays of {self.name} have no strides of 0")

    def surrounded(self, native: Any, by: float, device: str) -> Any:
        """Return the same numbers as a contiguous view into a larger array, with guards around it.

        The guards before and after the view are filled with `by` or, in an array of booleans or
        integers, with `bool(by)`. Return the array itself if the framework's arrays have no
        strides.
        """
        if not self.has_strides:
            return native
        sizes, dtype = tuple(native.shape), self.dtype(native)
        # NaN counts as true in an array of booleans or integers.
        guards = np.full(math.prod(sizes) + 2 * GUARD, by if dtype in DTYPES else bool(by))
        if dtype not in DTYPES:
            guards = guards.astype(dtype)
        around = self.array(guards, dtype, device)
        around[GUARD:-GUARD] = native.reshape(-1)
        return around[GUARD:-GUARD].reshape(sizes)

    def on_ranks(self, told: OnRanks, tensors: Natives) -> Any:
        """Call a function on each rank of a world with the rank's part of the tensors.

        Return the result, joined from the parts that the ranks return. If a result or a gradient is
        not divided, its elements are taken from the ranks in turn, so that every rank must compute
        it correctly. Raise `Unsupported` if the bridge has no ranks.

        Args:
            told: the function, and how tensors and result are divided.
            tensors: the whole tensors, by name of the function's argument.
        """
        raise Unsupported(f"the bridge to {self.name} starts no ranks")

    def overwrite(self, native: Any, by: Any) -> None:
        """Copy the numbers of `by` into the array `native`; raise `Unsupported` if impossible."""
        raise Unsupported(f"arrays of {self.name} cannot be written to")

    def attached(self, native: Any) -> dict[str, str]:
        """Return the names of the attributes attached to an array, with the names of their types.

        Frameworks attach, for example, a mask. A cached property of the array's class, which is
        stored when it is first read, is not attached.
        """
        return {
            name: type(value).__name__
            for name, value in getattr(native, "__dict__", {}).items()
            if not isinstance(inspect.getattr_static(type(native), name, None), cached_property)
        }


@lru_cache(maxsize=64)
def _name_of(dtype: Hashable) -> str:
    return str(dtype).rpartition(".")[2]


def poisoned_sizes(sizes: Iterable[int], free: int) -> list[int]:
    """Return the sizes in bytes of the blocks to poison before a call on arrays of `sizes`.

    Allocators hand out the block that fits best, so blocks of all these sizes exist at once. There
    are none if they would take more than a quarter of the memory that is `free`.
    """
    found = [*_SMALL, *(size for size in {*sizes} if size for _ in range(_POISONED))]
    return found if sum(found) <= free // 4 else []


def cudnn_version(number: int) -> str:
    """Return cuDNN's version as text, such as "9.10.2" for 91002; "" for 0."""
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}" if number else ""


def by_name(variables: Natives, gradients: Iterable[Any]) -> Natives:
    """Return the gradients by name of the variable, omitting those that are None."""
    named = zip(variables, gradients, strict=True)
    return {name: gradient for name, gradient in named if gradient is not None}


def _check_parameters(layer: Any, own: Natives, table: Mapping[str, np.ndarray]) -> None:
    """Raise `WrongDeclaration` unless `table` has the names and shapes of the parameters `own`."""
    missing, unknown = sorted({*own} - {*table}), sorted({*table} - {*own})
    if missing or unknown:
        differences = [f"only the layer has {', '.join(missing)}"] if missing else []
        differences += [f"only the table has {', '.join(unknown)}"] if unknown else []
        raise WrongDeclaration(
            f"{type(layer).__name__} and its parameter table differ: {'; '.join(differences)}. "
            "What is no part of the attention must be no parameter of what `build` returns: "
            "a buffer, say"
        )
    for name, values in table.items():
        needed, made = list(own[name].shape), list(values.shape)
        if needed != made:
            raise WrongDeclaration(f"{name} has shape {needed}, the table makes {made}")


def package_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the installed versions by package, omitting packages that are not installed."""
    versions = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


@cache
def since(package: str, version: str) -> bool:
    """Return whether the installed package has at least this version, without importing it.

    Also return True if the package is not installed, so that declarations describe the newest
    version.
    """
    versions = package_versions((package,))
    return not versions or Version(versions[package]) >= Version(version)
