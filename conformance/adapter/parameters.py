"""Map canonical weights to native parameters by a table of invertible einops patterns.

One table is enough to load and export weights, to convert native gradients to canonical ones, and
to convert weights between two implementations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import einops
import numpy as np
import numpy.typing as npt

from conformance.adapter import layouts
from conformance.definition.dtypes import Array
from conformance.definition.problem import WEIGHT_NAMES, Shape, Weights
from conformance.errors import WrongDeclaration

Positions = npt.NDArray[np.intp]
Parameters = dict[str, Array]
"""Native parameters, keyed by their names in the implementation."""

_OF_KEY_VALUE_HEADS = ("key", "key_bias", "value", "value_bias")


@dataclass(frozen=True)
class Parameter:
    """One row of the table: how the parameter `native` is made of the canonical weights `sources`.

    Args:
        native: the parameter's name in the implementation, such as "in_proj_weight".
        sources: names of canonical weights (fields of `Weights`), separated by spaces.
        pattern: einops pattern from canonical to native axes, such as
            "embed heads head -> (heads head) embed". It names every axis of the source once. The
            names are arbitrary, except that `interleaved` and `grouped` require "heads".
        stack: the axis of the native array along which the sources are concatenated; None if there
            is only one.
        interleaved: whether query head h natively uses key/value head h % kv_heads, instead of
            h // group; then the query heads are reordered along the axis "heads". Sources with
            key/value heads are not reordered.
        grouped: whether the stack holds, for each key/value head in turn, the query heads that use
            it, that key head and that value head. Otherwise it holds all query heads, then all key
            heads, then all value heads. In the pattern, the axis `stack` must begin with "heads".
    """

    native: str
    sources: str
    pattern: str
    stack: int | None = None
    interleaved: bool = False
    grouped: bool = False

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
            canonical, native = layouts.sides(self.pattern)
            axes = layouts.parse(native)
        except WrongDeclaration as error:
            raise WrongDeclaration(f"parameter {self.native!r}: {error}") from error
        if self.interleaved and "heads" not in layouts.axes(canonical):
            raise WrongDeclaration(
                f"parameter {self.native!r}: interleaved, but {self.pattern!r} names no axis heads"
            )
        if self.grouped and (self.stack is None or axes[self.stack][:1] != ("heads",)):
            raise WrongDeclaration(
                f"parameter {self.native!r}: grouped, but the axis of {self.pattern!r} along which "
                "it is stacked does not begin with heads"
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the canonical weights that this parameter is made of."""
        return tuple(self.sources.split())

    def to_native(self, weights: Mapping[str, Array], shape: Shape) -> Array:
        """Return this native parameter, made from canonical weights given by name.

        Raises:
            WrongDeclaration: if the pattern does not fit the weights, or they cannot be stacked.
        """
        ordered = [self._ordered(name, weights[name], shape) for name in self.names]
        parts = [self._rearranged(self.pattern, array) for array in ordered]
        if self.stack is None:
            return parts[0]
        try:
            if not self.grouped:
                return np.concatenate(parts, axis=self.stack)
            groups = [self._in_groups(part, shape) for part in parts]
            return self._whole(np.concatenate(groups, axis=self.stack + 1))
        except ValueError as error:
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise WrongDeclaration(
                f"parameter {self.native!r}: arrays of shapes {shapes} cannot lie one after "
                f"another on axis {self.stack}"
            ) from error

    def to_canonical(self, native: Array, shape: Shape) -> dict[str, Array]:
        """Return the canonical weights that this native parameter holds, by name.

        `native` may also be the parameter's gradient; the result is then the weights' gradients.

        Raises:
            WrongDeclaration: if the pattern does not fit the parameter or the weights.
        """
        left, right = layouts.sides(self.pattern)
        sizes = {name: shape.weight_shapes()[name] for name in self.names}
        parts = [native]
        if self.stack is not None:
            arrays = [self._rearranged(self.pattern, np.empty(size)) for size in sizes.values()]
            ends = np.cumsum([array.shape[self.stack] for array in arrays])[:-1]
            if self.grouped:
                groups = np.split(
                    self._in_groups(native, shape), ends // shape.kv_heads, axis=self.stack + 1
                )
                parts = [self._whole(group) for group in groups]
            else:
                parts = np.split(native, ends, axis=self.stack)
        canonical = {}
        for (name, size), part in zip(sizes.items(), parts, strict=True):
            if len(layouts.axes(left)) != len(size):
                raise WrongDeclaration(
                    f"parameter {self.native!r}: {left!r} does not name the axes of {name}, whose "
                    f"shape is {list(size)}"
                )
            named = dict(zip(layouts.axes(left), size, strict=True))
            named = {axis: named[axis] for axis in layouts.axes(right) if axis in named}
            array = self._rearranged(f"{right} -> {left}", part, **named)
            canonical[name] = self._ordered(name, array, shape, back=True)
        return canonical

    def order(self, shape: Shape) -> Positions:
        """Return the indices of canonical query heads in the native order, shape `[heads]`."""
        heads = np.arange(shape.heads, dtype=np.intp)
        return heads.reshape(shape.kv_heads, -1).T.ravel() if self.interleaved else heads

    def _ordered(self, name: str, array: Array, shape: Shape, *, back: bool = False) -> Array:
        """Return the array of the weight `name` with its query heads in native order.

        If `back` is true, the heads are in native order and are put back in canonical order.
        """
        if not self.interleaved or name in _OF_KEY_VALUE_HEADS:
            return array
        order = np.argsort(self.order(shape)) if back else self.order(shape)
        canonical, _ = layouts.sides(self.pattern)
        return np.take(array, order, axis=layouts.axes(canonical).index("heads"))

    def _in_groups(self, array: Array, shape: Shape) -> Array:
        """Return an array with the axis `stack` split in two: key/value head, and row within it."""
        assert self.stack is not None
        before, after = array.shape[: self.stack], array.shape[self.stack + 1 :]
        return array.reshape(*before, shape.kv_heads, -1, *after)

    def _whole(self, groups: Array) -> Array:
        """Return an array with the two axes that `_in_groups` split joined again."""
        assert self.stack is not None
        before, after = groups.shape[: self.stack], groups.shape[self.stack + 2 :]
        return groups.reshape(*before, -1, *after)

    def _rearranged(self, pattern: str, array: Array, **sizes: int) -> Array:
        try:
            return einops.rearrange(array, pattern, **sizes)
        except einops.EinopsError as error:
            reason = str(error).strip().splitlines()[-1]
            raise WrongDeclaration(
                f"parameter {self.native!r}: pattern {pattern!r} does not fit an array of shape "
                f"{list(array.shape)}: {reason}"
            ) from error


@dataclass(frozen=True)
class Checkpoint:
    """How the files of trained models name the parameters of their attentions.

    Args:
        models: the values of `model_type` in the configurations of such models.
        places: how names begin in each kind of attention, with "{layer}" for the number of the
            layer, such as "layers.{layer}.self_attn.". Files may have more before it: "model.".
        own: how the native names in the parameter table begin instead.
        renamed: names in files by native names where they differ, both without their beginnings.
        absent: the canonical weights that models may lack; they are zeros then.
        beside: the kinds of the other tensors with such names, by the beginning of the rest of the
            name, such as {"output.LayerNorm.": "norms"}. Unknown tensors are refused.
        added: how the name of a bias that is added to the logits ends, such as
            "SelfAttention.relative_attention_bias.weight" in the first layer of T5, which is for
            all; "" if there is none.
        scale: a function of the model's configuration and the number of the layer that returns the
            scale of the logits; None if it is always the default.
    """

    models: tuple[str, ...]
    places: tuple[str, ...]
    own: str = ""
    renamed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    absent: tuple[str, ...] = ()
    beside: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    added: str = ""
    scale: Callable[[Mapping[str, Any], int], float] | None = None


class ParameterTable:
    """All parameters of an implementation, for one shape.

    Rows whose sources do not exist in the shape (such as biases) are left out.

    Raises:
        WrongDeclaration: if a weight of the shape is not in exactly one row, or if only some of a
            row's sources exist.
    """

    def __init__(self, rows: Iterable[Parameter], shape: Shape) -> None:
        present = shape.weight_shapes()
        self.shape = shape
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
        """Return the native parameters made from canonical weights, as new arrays by name."""
        named = weights.named()
        return {
            row.native: np.array(row.to_native(named, self.shape), order="C") for row in self.rows
        }

    def export(self, native: Mapping[str, Array], *, every: bool = True) -> dict[str, Array]:
        """Return the canonical weights, or gradients, that the native parameters hold, by name.

        Args:
            native: the native parameters, or their gradients, by name.
            every: whether all native parameters must be given. If not, weights in parameters that
                are missing are left out.

        Raises:
            WrongDeclaration: if a native parameter is missing, and `every` is true.
        """
        canonical: dict[str, Array] = {}
        for row in self.rows:
            if row.native not in native:
                if not every:
                    continue
                raise WrongDeclaration(f"the implementation has no parameter {row.native!r}")
            array = native[row.native]
            flat, positions = array.ravel(), self._positions(row, array.shape)
            canonical |= {name: flat[at] for name, at in positions.items()}
        return canonical

    def _positions(self, row: Parameter, native: tuple[int, ...]) -> dict[str, Positions]:
        """Return, by name of the weight, the flat indices of its elements in the native parameter.

        `native` is the shape of this parameter. The indices are cached: evaluating the patterns
        each time would take a tenth of a run's time.
        """
        key = (row.native, native)
        if key not in self._known:
            numbered = np.arange(math.prod(native), dtype=np.float64).reshape(native)
            canonical = row.to_canonical(numbered, self.shape)
            self._known[key] = {name: at.astype(np.intp) for name, at in canonical.items()}
        return self._known[key]
