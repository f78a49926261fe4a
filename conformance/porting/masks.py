"""Masks between conventions: a mask for one argument, rewritten for another.

Both conventions are read from the adapters' declarations, so no framework is imported. A mask is
read in three steps: which declared layout its axes have, what its elements mean (where a query may
attend, or what is added to the logits), and how the target expresses that. A mask that is ambiguous
or cannot be expressed is refused, because training does not show that a mask is wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.adapter import layouts
from conformance.adapter.arguments import AXES, MaskArgument, from_layout, to_layout
from conformance.adapter.loading import find
from conformance.definition.problem import Shape
from conformance.errors import UnknownName, Untranslatable, WrongShape

Sizes = dict[str, int]
"""Sizes by axis, as far as they are known."""


def translate(
    mask: Any,
    *,
    source: str,
    target: str,
    batch: int | None = None,
    heads: int | None = None,
    query: int | None = None,
    key: int | None = None,
) -> np.ndarray:
    """Return, for a mask of one argument, the mask with the same meaning for another.

    Args:
        mask: an array in one of the layouts that the source declares; anything that NumPy reads.
        source: IMPLEMENTATION:ARGUMENT that the mask is for. The implementation is an adapter's
            name ("torch-mha"), its title ("torch.nn.MultiheadAttention"), the title without what
            stands in brackets ("keras.layers.MultiHeadAttention"), or path/to/file.py:NAME.
        target: the same for the argument that the result is for.
        batch: the batch size, needed only where the mask does not have it and the target does.
        heads: the number of heads, likewise.
        query: the query's length, likewise.
        key: the length of key and value, likewise.

    Returns:
        The mask in the first of the target's layouts that holds it. Boolean where the target takes
        booleans and the mask only says where a query may attend; otherwise floating, in the dtype
        of the mask, or float32 for a mask of booleans or integers. Axes of size 1 keep it if the
        target broadcasts, and are expanded if it does not.

    Raises:
        UnknownName: no such implementation or argument; the message has the nearest names.
        WrongShape: the mask has none of the source's layouts, or contradicts a size given.
        Untranslatable: it is ambiguous, a size is missing, or the target cannot express it;
            the message has the reason.
    """
    said, says = _argument(source), _argument(target)
    array = _array(mask)
    given = {"batch": batch, "heads": heads, "query": query, "key": key}
    for axis, size in given.items():
        if size is not None and size < 1:
            raise WrongShape(f"{axis}={size}; sizes are positive")
    canonical, sizes = _with_all_axes(
        array, said, source, {axis: size for axis, size in given.items() if size is not None}
    )
    elements = _said(_meaning(canonical, said, source), says, target)
    return _laid(elements, says, target, sizes)


@dataclass(frozen=True)
class _Meaning:
    """The meaning of a mask: True where a query may attend, or numbers added to the logits."""

    array: np.ndarray
    dtype: np.dtype
    """The dtype of numbers, if the target does not accept booleans."""


def _argument(spelled: str) -> MaskArgument:
    """Return the declaration that IMPLEMENTATION:ARGUMENT names."""
    implementation, colon, name = spelled.rpartition(":")
    if not colon:
        offered = [f"{spelled}:{name}" for it in find(spelled) for name in it.masks.by_name]
        raise UnknownName("mask argument", spelled, set(offered))
    found: list[MaskArgument] = []
    adapters = find(implementation)
    for adapter in adapters:
        if name not in adapter.masks.by_name:
            kind = f"mask argument of {implementation}"
            raise UnknownName(kind, name, adapter.masks.by_name)
        found.append(adapter.masks.by_name[name])
    if any(argument != found[0] for argument in found):
        names = " or ".join(adapter.name for adapter in adapters)
        raise Untranslatable(f"{spelled} does not mean the same everywhere; say {names}")
    return found[0]


def _array(mask: Any) -> np.ndarray:
    try:
        array = np.asarray(mask)
        # bfloat16, where a package adds it to NumPy, is of no kind but knows how to become a float.
        if array.dtype.kind == "V":
            array.astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        told = " ".join(str(error).split())
        raise Untranslatable(f"the mask is no array that NumPy can read: {told}") from error
    if array.dtype.kind not in "biufV":
        raise Untranslatable(f"the mask holds neither booleans nor numbers, but {array.dtype}")
    return array


# Axes


def _with_all_axes(
    array: np.ndarray, argument: MaskArgument, name: str, given: Mapping[str, int]
) -> tuple[np.ndarray, Sizes]:
    """Return the array as `[batch heads query key]`, and all sizes that are known then."""
    reasons, readings = [], []
    for layout in argument.layouts:
        try:
            readings.append((layout, *_read(array, layout, argument.broadcasts, given)))
        except WrongShape as reason:
            reasons.append(f"[{layout}]: {reason}")
    if not readings:
        raise WrongShape(
            f"{name}: a mask of shape {list(array.shape)} fits no layout; " + "; ".join(reasons)
        )
    for one, other in itertools.pairwise(readings):
        # Two readings that give the same numbers to the same pairs are one.
        if one[1].shape != other[1].shape or not np.array_equal(one[1], other[1]):
            raise Untranslatable(
                f"{name}: a mask of shape {list(array.shape)} may be read as [{one[0]}] or as "
                f"[{other[0]}]; give sizes that tell which: batch=, heads=, query=, key="
            )
    sizes = dict(readings[0][2])
    for _, _, known in readings[1:]:
        sizes = {axis: size for axis, size in sizes.items() if known.get(axis) == size}
    layout, canonical, _ = readings[0]
    return canonical, sizes


def _read(
    array: np.ndarray, layout: str, broadcasts: bool, given: Mapping[str, int]
) -> tuple[np.ndarray, Sizes]:
    """Return the array read in one layout, and sizes; raises `WrongShape` if it does not fit."""
    parts = layouts.parse(layout)
    if array.ndim != len(parts):
        raise WrongShape(f"{len(parts)} axes, the mask has {array.ndim}")
    sizes = dict(given)
    for axes, size in zip(parts, array.shape, strict=True):
        if len(axes) == 1 and size == 1 and broadcasts:
            continue
        _solve(axes, size, sizes)
    return from_layout(array, layout, sizes), sizes


def _solve(axes: tuple[str, ...], size: int, sizes: Sizes) -> None:
    """Add the sizes of axes that are joined in one of this size."""
    unknown = [axis for axis in axes if axis not in sizes]
    product = math.prod(sizes[axis] for axis in axes if axis in sizes)
    told = " x ".join(axes)
    if len(unknown) > 1:
        if size != 1:
            raise Untranslatable(
                f"an axis of size {size} is {told}; give "
                + " or ".join(f"{axis}=" for axis in unknown)
            )
        sizes.update(dict.fromkeys(unknown, 1))
    elif unknown and product and size % product == 0 and size:
        sizes[unknown[0]] = size // product
    elif unknown and len(axes) == 1:
        sizes[unknown[0]] = size
    elif unknown or size != product:
        raise WrongShape(
            f"{told} has size {size}, not {'a multiple of ' if unknown else ''}{product}"
        )


def _laid(elements: np.ndarray, argument: MaskArgument, name: str, sizes: Sizes) -> np.ndarray:
    """Return the elements in the target's first layout that holds them."""
    layout, held = next(_layouts(elements, argument), (None, elements))
    if layout is None:
        raise Untranslatable(_why_not(elements, argument, name))
    kept = {
        axes[0] for axes in layouts.parse(layout) if argument.broadcasts and len(axes) == 1
    }  # may stay at 1
    wanting = [
        axis
        for axes in layouts.parse(layout)
        for axis in axes
        if axis not in kept and axis not in sizes and held.shape[AXES.index(axis)] == 1
    ]
    if wanting:
        raise Untranslatable(
            f"{name} is [{layout}], and the mask does not tell every size: give "
            + ", ".join(f"{axis}=" for axis in wanting)
        )
    full = dict(zip(AXES, held.shape, strict=True)) | sizes
    found = to_layout(held, layout, _shape(full), broadcast=argument.broadcasts)
    assert found is not None
    return found


def _layouts(elements: np.ndarray, argument: MaskArgument) -> Iterator[tuple[str, np.ndarray]]:
    """Yield layouts that hold the array: first those of its shape, then those of its content."""
    for collapse in (False, True):
        for layout in argument.layouts:
            held = elements
            for i, axis in enumerate(AXES):
                if not any(axis in axes for axes in layouts.parse(layout)):
                    if collapse and held.shape[i] > 1 and _constant(held, i):
                        held = held.take([0], axis=i)
                    if held.shape[i] != 1:
                        break
            else:
                yield layout, held


def _why_not(elements: np.ndarray, argument: MaskArgument, name: str) -> str:
    varies = [axis for i, axis in enumerate(AXES) if not _constant(elements, i)]
    lacking: list[list[str]] = [
        [axis for axis in varies if not any(axis in axes for axes in layouts.parse(layout))]
        for layout in argument.layouts
    ]
    declared = " or ".join(f"[{layout}]" for layout in argument.layouts)
    fewest = min(lacking, key=len)
    return f"the mask varies over {' and '.join(fewest)}, and {name} is {declared}"


def _constant(array: np.ndarray, axis: int) -> bool:
    return bool((array == array.take([0], axis=axis)).all()) if array.size else True


def _shape(sizes: Mapping[str, int]) -> Shape:
    """Return a shape of these sizes, which are all that a layout depends on."""
    return Shape(
        batch=sizes["batch"],
        query_length=sizes["query"],
        key_length=sizes["key"],
        heads=sizes["heads"],
        kv_heads=1,
        head_size=1,
        value_head_size=1,
        query_width=1,
        key_width=1,
        value_width=1,
        output_width=1,
    )


# Elements


def _meaning(array: np.ndarray, argument: MaskArgument, name: str) -> _Meaning:
    """Return the meaning of the elements in the convention of the source."""
    floating = array.dtype.kind in "fV"
    dtype = array.dtype if floating else np.dtype(np.float32)
    if array.dtype == np.bool_:
        if argument.true is None:
            raise Untranslatable(f"{name} takes no booleans, so what True means there is unknown")
        return _Meaning(array if argument.true == "attends" else ~array, dtype)
    if np.isnan(array).any():
        raise Untranslatable("there is NaN in the mask")
    if argument.number == "added":
        return _added(array, name, floating, dtype)
    if argument.number is None and not ((array == 0) | (array == 1)).all():
        raise Untranslatable(f"{name} takes booleans only; the mask holds numbers beside 0 and 1")
    if np.isinf(array).any():
        raise Untranslatable(
            f"there is infinity in the mask, and numbers are not added by {name}: "
            "is it meant for another argument?"
        )
    if argument.number is None:
        return _Meaning((array != 0) == (argument.true == "attends"), dtype)
    attends = argument.attending(array)
    if attends is None:
        raise Untranslatable(
            f"{name} says who attends by 0 and 1; the mask holds other numbers, of which nothing "
            "is declared"
        )
    return _Meaning(attends, dtype)


def _added(array: np.ndarray, name: str, floating: bool, dtype: np.dtype) -> _Meaning:
    if not floating:
        raise Untranslatable(
            f"{name} adds numbers to the logits, and the mask holds integers, which look like "
            "True and False; give booleans or floats"
        )
    if np.isposinf(array.astype(np.float64)).any():
        raise Untranslatable(f"+inf in the mask, added by {name}, gives NaN")
    attends = array == 0
    if (attends | np.isinf(array)).all():
        return _Meaning(attends, dtype)
    return _Meaning(array, dtype)


def _said(meaning: _Meaning, argument: MaskArgument, name: str) -> np.ndarray:
    """Return elements with this meaning in the target's convention."""
    array, dtype = meaning.array, meaning.dtype
    if array.dtype != np.bool_:
        if argument.number != "added":
            raise Untranslatable(
                f"the mask adds finite numbers to the logits, and {name} only says who attends; "
                "numbers that are meant to block, such as -1e9, must be -inf"
            )
        return array
    if argument.true is not None:
        return array if argument.true == "attends" else ~array
    if argument.number == "added":
        return np.where(array, 0.0, -np.inf).astype(dtype)
    return (array == (argument.one == "attends")).astype(dtype)
