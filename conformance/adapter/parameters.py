"""Map canonical weights to native parameters by a table of invertible einops patterns.

One table gives loading, exporting, the mapping of native gradients back to canonical ones, and,
between two implementations, a converter of weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import einops
import numpy as np
import numpy.typing as npt

from conformance.adapter import layouts
from conformance.definition.dtypes import Array
from conformance.definition.problem import WEIGHT_NAMES, Shape, Weights
from conformance.errors import WrongDeclaration

Positions = npt.NDArray[np.intp]
Parameters = dict[str, Array]
"""Native parameters by native name."""

_OF_KEY_VALUE_HEADS = ("key", "key_bias", "value", "value_bias")


@dataclass(frozen=True)
class Parameter:
    """One row of the table: `native <- sources, rearranged by pattern, stacked on an axis`.

    Args:
        native: the parameter's own name, such as "in_proj_weight".
        sources: names of canonical weights (fields of `Weights`), separated by spaces.
        pattern: einops pattern from canonical to native axes, such as
            "embed heads head -> (heads head) embed". Biases and weights with value heads use
            any axis names; only "heads", "kv_heads", "head", "value_head" have known sizes.
        stack: the axis of the native array on which several sources lie one after another.
        interleaved: whether query head h uses key/value head h % kv_heads natively, instead of
            h // group. Then native query heads stand in another order, along the axis "heads".
    """

    native: str
    sources: str
    pattern: str
    stack: int | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        unknown = set(self.names) - set(WEIGHT_NAMES)
        if unknown or not self.names:
            raise WrongDeclaration(
                f"parameter {self.native!r}: {sorted(unknown) or 'nothing'} is no canonical weight;"
                f" there are {', '.join(WEIGHT_NAMES)}"
            )
        if len(self.names) > 1 and self.stack is None:
            raise WrongDeclaration(f"parameter {self.native!r} has several sources but no `stack`")
        try:
            canonical, _ = layouts.sides(self.pattern)
        except WrongDeclaration as error:
            raise WrongDeclaration(f"parameter {self.native!r}: {error}") from error
        if self.interleaved and "heads" not in layouts.axes(canonical):
            raise WrongDeclaration(
                f"parameter {self.native!r}: interleaved, but {self.pattern!r} names no axis heads"
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the canonical weights that this parameter is made of."""
        return tuple(self.sources.split())

    def to_native(self, weights: Mapping[str, Array], shape: Shape) -> Array:
        """Return this native parameter for canonical weights, given by name."""
        order = self.order(shape)
        own = [self._ordered(name, weights[name], order) for name in self.names]
        parts = [self._rearrange(self.pattern, array, {}) for array in own]
        if self.stack is None:
            return parts[0]
        try:
            return np.concatenate(parts, axis=self.stack)
        except ValueError as error:
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise WrongDeclaration(
                f"parameter {self.native!r}: arrays of shapes {shapes} cannot lie one after "
                f"another on axis {self.stack}"
            ) from error

    def to_canonical(self, native: Array, shape: Shape) -> dict[str, Array]:
        """Return the canonical weights, or gradients, that the native parameter holds, by name."""
        left, right = layouts.sides(self.pattern)
        wanted = shape.weight_shapes()
        parts = [native]
        if self.stack is not None:
            sizes = []
            for name in self.names:
                like = self._rearrange(self.pattern, np.empty(wanted[name]), {})
                sizes.append(like.shape[self.stack])
            parts = np.split(native, np.cumsum(sizes)[:-1], axis=self.stack)
        found = {}
        for name, part in zip(self.names, parts, strict=True):
            if len(layouts.axes(left)) != len(wanted[name]):
                raise WrongDeclaration(
                    f"parameter {self.native!r}: {left!r} does not name the axes of {name}, whose "
                    f"shape is {list(wanted[name])}"
                )
            sizes_of = dict(zip(layouts.axes(left), wanted[name], strict=True))
            known = {axis: size for axis, size in sizes_of.items() if axis in layouts.axes(right)}
            canonical = self._rearrange(f"{right} -> {left}", part, known)
            found[name] = self._ordered(name, canonical, np.argsort(self.order(shape)))
        return found

    def order(self, shape: Shape) -> Positions:
        """Return the canonical query heads, `[heads]`, in the order of this parameter."""
        heads = np.arange(shape.heads, dtype=np.intp)
        return heads.reshape(shape.kv_heads, -1).T.ravel() if self.interleaved else heads

    def _ordered(self, name: str, array: Array, order: Positions) -> Array:
        if not self.interleaved or name in _OF_KEY_VALUE_HEADS:
            return array
        canonical, _ = layouts.sides(self.pattern)
        return np.take(array, order, axis=layouts.axes(canonical).index("heads"))

    def _rearrange(self, pattern: str, array: Array, sizes: dict[str, int]) -> Array:
        try:
            return einops.rearrange(array, pattern, **sizes)
        except einops.EinopsError as error:
            reason = str(error).strip().splitlines()[-1]
            raise WrongDeclaration(
                f"parameter {self.native!r}: pattern {pattern!r} does not fit an array of shape "
                f"{list(array.shape)}: {reason}"
            ) from error


class ParameterTable:
    """All rows of an implementation, for one shape.

    Rows whose sources a shape does not have (biases of a shape without) are left out. Every weight
    of the shape must be in exactly one row.
    """

    def __init__(self, rows: Iterable[Parameter], shape: Shape) -> None:
        present = shape.weight_shapes()
        self.shape = shape
        self._native_shapes: dict[str, tuple[int, ...]] = {}
        self._known: dict[tuple[str, tuple[int, ...]], dict[str, Positions]] = {}
        self.rows = tuple(row for row in rows if any(name in present for name in row.names))
        named = [name for row in self.rows for name in row.names]
        missing = sorted(set(present) - set(named))
        repeated = sorted({name for name in named if named.count(name) > 1})
        partial = [row.native for row in self.rows if not set(row.names) <= set(present)]
        if missing or repeated or partial:
            raise WrongDeclaration(
                "the parameter table must hold every canonical weight once: "
                f"missing {missing}, repeated {repeated}, rows only half there {partial}"
            )

    def load(self, weights: Weights) -> Parameters:
        """Return the native parameters for canonical weights, by name."""
        named = weights.named()
        found: Parameters = {}
        for row in self.rows:
            if row.native not in self._native_shapes:
                self._native_shapes[row.native] = row.to_native(named, self.shape).shape
            shape = self._native_shapes[row.native]
            flat = np.empty(math.prod(shape))
            for name, positions in self._positions(row, shape).items():
                flat[positions] = named[name]
            found[row.native] = flat.reshape(shape)
        return found

    def export(self, native: Mapping[str, Array]) -> dict[str, Array]:
        """Return the canonical weights, or gradients, that native parameters hold, by name."""
        found: dict[str, Array] = {}
        for row in self.rows:
            if row.native not in native:
                raise WrongDeclaration(f"the implementation has no parameter {row.native!r}")
            array = native[row.native]
            flat = array.ravel()
            for name, positions in self._positions(row, array.shape).items():
                found[name] = flat[positions]
        return found

    def _positions(self, row: Parameter, native: tuple[int, ...]) -> dict[str, Positions]:
        """Return the position in the flat native parameter of each element of each weight, by name.

        A row of the table is a permutation of elements; its pattern is read once per shape.
        """
        key = (row.native, native)
        if key not in self._known:
            numbered = np.arange(math.prod(native), dtype=np.float64).reshape(native)
            found = row.to_canonical(numbered, self.shape)
            self._known[key] = {name: at.astype(np.intp) for name, at in found.items()}
        return self._known[key]
