"""Convert the value of a window or a soft cap to the equivalent value for another argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.adapter.arguments import MaskArgument, to_layout
from conformance.adapter.features import SoftCap, Window
from conformance.adapter.loading import find
from conformance.definition.features import within
from conformance.errors import Untranslatable

Numeric = Window | SoftCap


def numeric(spec: str) -> Numeric | None:
    """Return the window or soft cap that IMPLEMENTATION:ARGUMENT names, or None if it is neither.

    Raises:
        UnknownName: there is no such implementation.
        Untranslatable: several implementations have this name, and their declarations differ.
    """
    implementation, colon, name = spec.rpartition(":")
    found = [
        declared
        for adapter in (find(implementation) if colon else ())
        for declared in adapter.features
        if isinstance(declared, Window | SoftCap) and declared.name == name
    ]
    if any(declared != found[0] for declared in found):
        raise Untranslatable(f"{spec} differs between these implementations; name one of them")
    return found[0] if found else None


def of_number(
    feature: Numeric,
    value: Any,
    source: str,
    other: Numeric | MaskArgument,
    target: str,
    sizes: Mapping[str, int],
    *,
    causal: bool,
) -> Any:
    """Return the value or mask that means the same for the target as `value` does for the source.

    Args:
        feature: the declaration of the argument that the value is for.
        value: the value of a window or a soft cap.
        source: the name of the argument that the value is for.
        other: the declaration of the argument that the result is for.
        target: the name of the argument that the result is for.
        sizes: the lengths "query" and "key" if they are known; also "batch" and "heads" for a mask.
        causal: whether both implementations also receive a causal mask.

    Raises:
        Untranslatable: the value has no meaning, or the target cannot express it.
    """
    if isinstance(feature, SoftCap):
        if not isinstance(other, SoftCap):
            raise Untranslatable(f"{target} is no soft cap, and a mask cannot be one")
        return other.none if value == feature.none else value
    if not isinstance(other, Window | MaskArgument):
        raise Untranslatable(f"{target} is no window")
    value = tuple(value) if isinstance(value, list) else value
    limits = feature.limits(value, causal=causal or feature.needs_causal)
    if limits is None:
        raise Untranslatable(f"{source}={value!r} has no meaning that is declared")
    if isinstance(other, MaskArgument):
        return _mask(feature, limits, source, other, target, sizes)
    equal = sizes.get("query") == sizes.get("key") and "key" in sizes
    if not equal and feature.alignment != other.alignment:
        aligned = [each.alignment or "for equal lengths only" for each in (feature, other)]
        raise Untranslatable(
            f"{source} is aligned {aligned[0]} and {target} {aligned[1]}; give query= and key= if "
            "they are equal"
        )
    if other.form != "left right" and limits[0] is None and (causal or limits[1] is None):
        return other.none
    if other.needs_causal and limits[1] != 0:
        raise Untranslatable(f"{target} is read beside a causal mask only")
    found = other.value(limits, causal=causal or other.needs_causal)
    if found is None:
        before, after = ("no limit" if each is None else each for each in limits)
        raise Untranslatable(f"{target} cannot say a window of {before} before and {after} after")
    return found


def _mask(
    window: Window,
    limits: tuple[int | None, int | None],
    source: str,
    argument: MaskArgument,
    target: str,
    sizes: Mapping[str, int],
) -> np.ndarray:
    """Return the window as a mask for the argument, in booleans or in numbers as it declares.

    Raises:
        Untranslatable: a length is missing, the lengths differ but the window is declared for equal
            lengths only, or no layout of the argument can represent the mask.
    """
    missing = [axis for axis in ("query", "key") if axis not in sizes]
    if missing:
        raise Untranslatable(f"a mask needs the lengths: give {' and '.join(missing)}")
    queries, keys = sizes["query"], sizes["key"]
    if window.alignment is None and queries != keys:
        raise Untranslatable(f"{source} is declared for equal lengths only")
    offset = keys - queries if window.alignment == "bottom-right" else 0
    distance = np.arange(keys) - np.arange(queries)[:, None] - offset
    seen = within(limits, distance)
    full = (sizes.get("batch", 1), sizes.get("heads", 1), queries, keys)
    if argument.true is not None:
        elements = seen == (argument.true == "attends")
    elif argument.number == "added":
        elements = np.where(seen, np.float32(0), np.float32(-np.inf))
    else:
        elements = (seen == (argument.one == "attends")).astype(argument.dtype or np.float32)
    for layout in argument.layouts:
        laid = to_layout(elements[None, None], layout, full, broadcast=argument.broadcasts)
        if laid is not None:
            return laid
    raise Untranslatable(f"{target} has no axes of queries and keys")
