"""The bridge to a framework: arrays in and out, derivatives, devices, versions.

A check never sees a framework; an adapter sees its own. Each bridge is small enough to read at
once, and imports its framework when it is constructed, never before: see `conformance.frameworks`.
What all bridges do alike is done here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, ClassVar, Literal

import numpy as np
from packaging.version import Version

from conformance.definition.dtypes import DTYPES
from conformance.errors import ConformanceError, Unavailable, Unsupported, WrongDeclaration
from conformance.frameworks.surroundings import Setting

Natives = dict[str, Any]
"""Native arrays by name."""

Strides = Literal["", "gaps", "window"]
"""Contiguous; with gaps between the numbers; or cut out of a larger array, rows contiguous."""

Function = Callable[[Natives, Natives], tuple[Any, Any]]
"""(variables, constants) to (output, weights or None)."""


class WrongAnswer(ConformanceError):
    """An implementation returned something that is not an array of its framework."""


@dataclass(frozen=True, eq=False)
class Request:
    """A request for a bridge to evaluate.

    Attributes:
        function: pure in its two arguments, the variables and the constants.
        variables: the arrays to differentiate by.
        constants: the other arrays, such as masks.
        cotangent: that of the output, of the same shape.
        gradients: whether to differentiate.
        program: equal for functions that differ in nothing but their arguments, so that a framework
            that compiles can reuse what it compiled.
        optimised: compile as users do, not as quickly as possible.
        compiled: False to call operation by operation, also where the framework compiles.
        backwards: how often to go back through the same graph; the last gradients count.
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


@dataclass(frozen=True)
class Evaluated:
    """Native results: output, attention weights or None, gradients by variable name."""

    output: Any
    weights: Any
    gradients: Natives


class Framework(ABC):
    """The operations that the suite needs from a framework."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    """Distributions whose versions the record has."""
    array_type: ClassVar[type]
    differentiable: ClassVar[bool] = True
    records_graphs: ClassVar[bool] = False
    """Whether a call leaves a graph, through which gradients can be asked for repeatedly."""
    compiles: ClassVar[bool] = False
    """Whether a program is compiled for each new set of arguments."""
    loads_in_place: ClassVar[bool] = False
    """Whether `load` writes into a layer's own parameters; else `Layer.bind` passes them."""
    has_strides: ClassVar[bool] = False
    """Whether arrays can be views of others, and be written to by index."""
    takes_other_paths: ClassVar[bool] = False
    """Whether an implementation may compute differently without gradients."""

    @abstractmethod
    def array(self, values: np.ndarray, dtype: str, device: str) -> Any:
        """Return a native array: float64, the suite's own numbers, as `dtype`; else unchanged."""

    @abstractmethod
    def numpy(self, native: Any) -> np.ndarray:
        """Return a native array as NumPy's, of float64 or bool."""

    @abstractmethod
    def einsum(self, axes: str, *operands: Any) -> Any:
        """Return the framework's own einsum, for projections around function adapters."""

    @abstractmethod
    def devices(self) -> dict[str, str]:
        """Return the kinds of device on this machine, "cpu" and maybe "gpu", with their models."""

    def evaluate(self, request: Request) -> Evaluated:
        """Call the function and, if asked, its vector-Jacobian product by the variables.

        A result that is no array of the cotangent's shape comes back without gradients. Raises
        `Unsupported` for repeated gradients where derivatives are functions.
        """
        if request.backwards > 1 and self.differentiable and not self.records_graphs:
            raise Unsupported(f"derivatives of {self.name} are functions, not graphs")
        return self.differentiate(request) if request.gradients else self.call(request)

    def call(self, request: Request) -> Evaluated:
        """Call the function alone."""
        with self.without_gradients():
            return Evaluated(*request.function(request.variables, request.constants), {})

    def differentiate(self, request: Request) -> Evaluated:
        """Call the function, and go back from the cotangent to the variables."""
        raise Unsupported(f"{self.name} has no derivatives")

    def without_gradients(self) -> AbstractContextManager[Any]:
        """Return the context in which users call without gradients."""
        return nullcontext()

    def fits(self, output: Any, cotangent: Any) -> bool:
        """Return whether the output is an array that this cotangent can belong to."""
        return self.is_array(output) and output.shape == cotangent.shape

    def is_array(self, value: Any) -> bool:
        """Return whether this is an array of the framework."""
        return isinstance(value, self.array_type)

    def dtype(self, native: Any) -> str:
        """Return the array's dtype by NumPy's name, such as "bfloat16"."""
        return str(native.dtype).rpartition(".")[2]

    def cast(self, native: Any, dtype: str) -> Any:
        """Return the array in another dtype, given by NumPy's name."""
        return native.astype(dtype)

    def settings(self) -> tuple[Setting, ...]:
        """Return the settings of the framework that the whole process shares."""
        return ()

    def load(
        self, layer: Any, parameters: Mapping[str, np.ndarray], dtype: str, device: str
    ) -> Natives:
        """Return native parameters as variables to differentiate by.

        Raises `WrongDeclaration` where they are loaded in place and are not the layer's own.
        """
        natives = {name: self.array(array, dtype, device) for name, array in parameters.items()}
        if not self.loads_in_place:
            return natives
        own = dict(layer.named_parameters())
        _check_parameters(layer, own, natives)
        for name, native in natives.items():
            self.overwrite(own[name], native)
        return own

    def place(self, layer: Any, device: str) -> Any:
        """Move a newly built layer to a device; nothing to do if parameters are arguments."""
        return layer

    @contextmanager
    def session(self, dtype: str, device: str) -> Iterator[None]:
        """Enter what building and calling in this dtype need."""
        yield

    def check_device(self, device: str) -> None:
        """Raise `Unavailable` unless this machine has such a device."""
        devices = self.devices()
        if device not in devices:
            raise Unavailable(
                f"{self.name} sees no {device} on this machine (it has {', '.join(devices)})"
            )

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages behind this bridge."""
        return package_versions(self.packages)

    def strided(self, native: Any, how: Strides, device: str) -> Any:
        """Return the same numbers with other strides, as a view of a larger array.

        With "gaps" each number lies there twice. A "window" lies in one of the axes between the
        batch and the last one, so that rows are whole, and NaN around it. Raises `Unsupported`
        where arrays have no strides.
        """
        if not self.has_strides:
            raise Unsupported(f"arrays of {self.name} have no strides")
        sizes = tuple(native.shape)
        if how == "gaps":
            around = self._filled((*sizes, 2), self.dtype(native), device)
            # Not both at once: Paddle has no gradient of what is broadcast as it is written.
            around[..., 0] = native
            around[..., 1] = native
            return around[..., 0]
        between = range(1, len(sizes) - 1) or range(len(sizes))
        larger = tuple(size + 3 * (axis in between) for axis, size in enumerate(sizes))
        window = tuple(
            slice(1, 1 + size) if axis in between else slice(None)
            for axis, size in enumerate(sizes)
        )
        around = self._filled(larger, self.dtype(native), device)
        around[window] = native
        return around[window]

    def _filled(self, sizes: tuple[int, ...], dtype: str, device: str) -> Any:
        values = np.full(sizes, np.nan) if dtype in DTYPES else np.ones(sizes, dtype)
        return self.array(values, dtype, device)

    def overwrite(self, native: Any, by: Any) -> None:
        """Write the numbers of one array into another; raises `Unsupported` if it cannot."""
        raise Unsupported(f"arrays of {self.name} cannot be written to")

    def attached(self, native: Any) -> dict[str, str]:
        """Return the names of attributes attached to an array, such as a mask."""
        return {
            name: type(value).__name__ for name, value in getattr(native, "__dict__", {}).items()
        }


def by_name(variables: Natives, gradients: Iterable[Any]) -> Natives:
    """Return gradients by the names of the variables, without those that are None."""
    named = zip(variables, gradients, strict=True)
    return {name: gradient for name, gradient in named if gradient is not None}


def _check_parameters(layer: Any, own: Natives, table: Natives) -> None:
    """Raise `WrongDeclaration` unless the parameter table makes the layer's parameters."""
    missing, unknown = sorted({*own} - {*table}), sorted({*table} - {*own})
    if missing or unknown:
        differences = [f"only the layer has {', '.join(missing)}"] if missing else []
        differences += [f"only the table has {', '.join(unknown)}"] if unknown else []
        raise WrongDeclaration(
            f"{type(layer).__name__} and its parameter table differ: {'; '.join(differences)}. "
            "What is no part of the attention must be no parameter of what `build` returns: "
            "a buffer, say"
        )
    for name, native in table.items():
        needed, made = list(own[name].shape), list(native.shape)
        if needed != made:
            raise WrongDeclaration(f"{name} has shape {needed}, the table makes {made}")


def package_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return installed versions by package; one that is not installed is left out."""
    versions = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


@cache
def since(package: str, version: str) -> bool:
    """Return whether the installed package has this version or a later one, without an import.

    True also if it is not installed: what nobody can run is declared as it is today.
    """
    versions = package_versions((package,))
    return not versions or Version(versions[package]) >= Version(version)
