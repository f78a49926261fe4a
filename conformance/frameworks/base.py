"""The bridge to a framework: arrays in and out, derivatives, devices, versions.

A check never sees a framework; an adapter sees its own. Each bridge is small enough to read at
once, and imports its framework when it is constructed, never before: see `conformance.frameworks`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, ClassVar, Literal

import numpy as np
from packaging.version import Version

from conformance.errors import ConformanceError, Unavailable, Unsupported
from conformance.frameworks.surroundings import Setting

Natives = dict[str, Any]
"""Native arrays by name."""

Strides = Literal["", "gaps", "window"]
"""In one piece; with gaps between the numbers; cut out of a larger array, rows in one piece."""

Function = Callable[[Natives, Natives], tuple[Any, Any]]
"""(variables, constants) to (output, weights or None)."""


class WrongAnswer(ConformanceError):
    """An implementation returned something that is no array of its framework."""


@dataclass(frozen=True)
class Evaluated:
    """Native results: output, attention weights or None, gradients by variable name."""

    output: Any
    weights: Any
    gradients: Natives


class Framework(ABC):
    """What the suite needs of a framework."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    """Distributions whose versions belong into the record."""
    differentiable: ClassVar[bool] = True
    compiles: ClassVar[bool] = False
    """Whether a program is compiled for each new set of arguments."""
    loads_in_place: ClassVar[bool] = False
    """Whether `load` writes into a layer's own parameters; else `Layer.bind` hands them on."""
    takes_other_paths: ClassVar[bool] = False
    """Whether an implementation may compute otherwise where no gradient is asked for."""

    @abstractmethod
    def array(self, values: np.ndarray, dtype: str, device: str) -> Any:
        """NumPy to native: float64, the suite's own numbers, as `dtype`; the rest as it is."""

    @abstractmethod
    def numpy(self, native: Any) -> np.ndarray:
        """Native to NumPy: float64 or bool."""

    @abstractmethod
    def is_array(self, value: Any) -> bool:
        """Whether this is an array of the framework."""

    @abstractmethod
    def dtype(self, native: Any) -> str:
        """The array's dtype by NumPy's name, such as "bfloat16"."""

    @abstractmethod
    def evaluate(
        self,
        function: Function,
        variables: Natives,
        constants: Natives,
        cotangent: Any,
        *,
        gradients: bool,
        program: Hashable,
        optimised: bool = False,
        compiled: bool = True,
        backwards: int = 1,
    ) -> Evaluated:
        """Call the function and, if asked, its vector-Jacobian product by the variables.

        Args:
            function: pure in its two arguments.
            variables: what to differentiate by.
            constants: masks.
            cotangent: of the output.
            gradients: whether to differentiate.
            program: equal for functions that differ in nothing but their arguments, so that a
                framework that compiles can use what it compiled.
            optimised: compile as users do, not as quickly as possible.
            compiled: False to call operation by operation, also where the framework compiles.
            backwards: how often to go back through the same graph; what is found last counts.
                Raises `Unsupported` for more than 1 where derivatives are functions.
        """

    @abstractmethod
    def einsum(self, axes: str, *operands: Any) -> Any:
        """The framework's own einsum, for projections around function adapters."""

    def cast(self, native: Any, dtype: str) -> Any:
        """The array in another dtype, told by NumPy's name."""
        return native.astype(dtype)

    @abstractmethod
    def devices(self) -> dict[str, str]:
        """The kinds of device there are, "cpu" and maybe "gpu", with their models."""

    def settings(self) -> tuple[Setting, ...]:
        """What of the framework belongs to everybody in the process, and can be put back."""
        return ()

    def load(
        self, layer: Any, parameters: Mapping[str, np.ndarray], dtype: str, device: str
    ) -> Natives:
        """Native parameters as variables to differentiate by."""
        return {name: self.array(values, dtype, device) for name, values in parameters.items()}

    def place(self, layer: Any, device: str) -> Any:
        """Move a newly built layer to a device; nothing to do where parameters are arguments."""
        return layer

    @contextmanager
    def session(self, dtype: str, device: str) -> Iterator[None]:
        """Whatever must be switched on around building and calling in this dtype."""
        yield

    def check_device(self, device: str) -> None:
        """Raise `Unavailable` unless there is such a device."""
        devices = self.devices()
        if device not in devices:
            raise Unavailable(
                f"{self.name} sees no {device} on this machine (it has {', '.join(devices)})"
            )

    def versions(self) -> dict[str, str]:
        """Versions of the packages behind this bridge."""
        return package_versions(self.packages)

    def strided(self, native: Any, how: Strides) -> Any:
        """The same numbers, which lie otherwise in memory; around them NaN.

        Raises `Unsupported` where arrays have no strides.
        """
        raise Unsupported(f"arrays of {self.name} have no strides")

    def overwrite(self, native: Any, by: Any) -> None:
        """Write the numbers of one array into another; raises `Unsupported` if that cannot be."""
        raise Unsupported(f"arrays of {self.name} cannot be written to")

    def attached(self, native: Any) -> dict[str, str]:
        """What hangs on an array besides its numbers: attributes, such as a mask."""
        return {
            name: type(value).__name__ for name, value in getattr(native, "__dict__", {}).items()
        }


def other_parameters(layer: Any, own: Iterable[str], table: Iterable[str]) -> str:
    """What to say where a layer and its parameter table do not name the same."""
    missing, unknown = sorted({*own} - {*table}), sorted({*table} - {*own})
    told = [f"only the layer has {', '.join(missing)}"] if missing else []
    told += [f"only the table has {', '.join(unknown)}"] if unknown else []
    return (
        f"{type(layer).__name__} and its parameter table differ: {'; '.join(told)}. What is no "
        "part of the attention must be no parameter of what `build` returns: a buffer, say"
    )


def place_within(sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """Sizes of a larger array, and where in it an array of these sizes lies as a window.

    The window is one of the axes between the batch and the last one, so that rows are whole.
    """
    between = range(1, len(sizes) - 1) or range(len(sizes))
    larger = tuple(size + 3 * (axis in between) for axis, size in enumerate(sizes))
    window = tuple(
        slice(1, 1 + size) if axis in between else slice(None) for axis, size in enumerate(sizes)
    )
    return larger, window


def package_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Installed versions; a package that is not installed is left out."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def since(package: str, version: str) -> bool:
    """Whether the installed package has this version or a later one, without importing it.

    True also if it is not installed: what nobody can run is declared as it is today.
    """
    found = package_versions((package,))
    return not found or Version(found[package]) >= Version(version)
