"""Convert a mask, window or soft cap for one argument of an implementation to another argument.

Both conventions are read from the adapters' declarations, so no framework is imported. A conversion
of a mask has three steps: find the declared layout that the axes have, find what the elements mean
(where a query may attend, or what is added to the logits), and express this meaning for the target.
A mask that is ambiguous or cannot be expressed is an error, because training does not reveal a
wrong mask.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.adapter import layouts
from conformance.adapter.arguments import AXES, MaskArgument, from_layout, to_layout
from conformance.adapter.features import SoftCap, Window
from conformance.adapter.loading import find
from conformance.definition.problem import within
from conformance.errors import (
    ConformanceError,
    UnknownName,
    Untranslatable,
    WrongShape,
    check_names,
)

Sizes = dict[str, int]
"""The sizes that are known, by the name of the axis."""

SHOWN_SIZES = {"batch": 2, "heads": 2, "query": 5, "key": 5}
"""The sizes of the masks that the website shows."""

_CANONICAL = MaskArgument("mask", "batch heads query key", true="attends", broadcasts=True)


def translate(
    mask: Any,
    *,
    source: str,
    target: str,
    batch: int | None = None,
    heads: int | None = None,
    query: int | None = None,
    key: int | None = None,
    causal: bool = False,
) -> Any:
    """Convert a mask for one argument to the mask with the same meaning for another.

    The value of a window or a soft cap is converted in the same way. For example, a window that
    counts the query's own key is larger by one than a window that does not.

    Args:
        mask: an array, or anything that NumPy can read, in a layout that the source declares; for
            an argument that is declared as a `Window` or a `SoftCap`, its value.
        source: the argument that the mask is for, as IMPLEMENTATION:ARGUMENT. The implementation is
            an adapter's name ("torch-mha"), its title ("torch.nn.MultiheadAttention"), the title
            without the part in brackets ("keras.layers.MultiHeadAttention"), or
            path/to/file.py:NAME.
        target: the argument that the result is for, in the same form.
        batch: the batch size; required only if the target's mask needs it and `mask` does not
            determine it, or if `mask` could be read in several ways.
        heads: the number of heads; required in the same case.
        query: the length of the query; required in the same case, and if a window becomes a mask
            or the target aligns windows differently.
        key: the length of key and value; required in the same cases as `query`.
        causal: for windows, whether both implementations also receive a causal mask.

    Returns:
        The mask in the first of the target's layouts that can represent it. It is boolean if the
        target takes booleans and the mask only says where a query may attend. Otherwise, it has the
        dtype that the target declares for numbers or, by default, the floating dtype of the mask,
        or float32 for a mask of booleans or integers. Axes of size 1 are kept if the target
        broadcasts them, and are expanded if it does not. For a window or a soft cap, the result is
        the value of the target's argument; for a window, it may also be a mask.

    Raises:
        UnknownName: there is no such implementation or argument; the message suggests others.
        ConformanceError: an implementation cannot be loaded.
        WrongShape: the mask has none of the source's layouts, or contradicts a given size.
        Untranslatable: the mask is ambiguous, a size is missing, or the target cannot express the
            mask; the message gives the reason.
    """
    sizes = {"batch": batch, "heads": heads, "query": query, "key": key}
    if feature := _numeric(source):
        other = _numeric(target) or _argument(target)
        return _of_number(feature, mask, source, other, target, known_sizes(sizes), causal=causal)
    return translate_between(
        mask, _argument(source), _argument(target), sizes, source=source, target=target
    )


def translate_between(
    mask: Any,
    from_argument: MaskArgument,
    to_argument: MaskArgument,
    sizes: Mapping[str, int | None],
    *,
    source: str = "the source",
    target: str = "the target",
) -> np.ndarray:
    """Convert a mask as `translate` does, given the declarations of both arguments.

    `source` and `target` are only the names that error messages use.
    """
    given = known_sizes(sizes)
    array = _array(mask)
    canonical, known = _with_all_axes(array, from_argument, source, given)
    dtype = array.dtype if array.dtype.kind in "fV" else np.dtype(np.float32)
    meaning = _meaning(canonical, from_argument, source)
    elements = _expressed(meaning, dtype, to_argument, target)
    return _laid_out(elements, to_argument, target, known)


def known_sizes(sizes: Mapping[str, int | None]) -> dict[str, int]:
    """Return the sizes that are not None, by name; raise `WrongShape` if one is below 1."""
    given = {name: size for name, size in sizes.items() if size is not None}
    for name, size in given.items():
        if size < 1:
            raise WrongShape(f"{name} is {size}; it has to be positive")
    return given


def _argument(spec: str) -> MaskArgument:
    """Return the mask argument that a text of the form IMPLEMENTATION:ARGUMENT names.

    Raise `UnknownName` if there is no such argument, and `Untranslatable` if it is a causal flag,
    or if several implementations have this name and declare the argument differently.
    """
    implementation, colon, name = spec.rpartition(":")
    if not colon:
        offered = {f"{spec}:{name}" for it in find(spec) for name in it.masks.by_name}
        raise UnknownName("mask argument", spec, offered)
    adapters = find(implementation)
    for adapter in adapters:
        if adapter.causal_flag is not None and adapter.causal_flag.name == name:
            raise Untranslatable(
                f"{spec} is a causal flag, not a mask: set the other implementation's own flag, or "
                "pass it a causal mask, np.tri(query, key, dtype=bool) where True attends"
            )
        check_names(f"mask argument of {implementation}", [name], adapter.masks.by_name)
    first, *others = (adapter.masks.by_name[name] for adapter in adapters)
    if any(argument != first for argument in others):
        names = " or ".join(adapter.name for adapter in adapters)
        raise Untranslatable(
            f"{spec} differs between these implementations; name one of them: {names}"
        )
    return first


def _numeric(spec: str) -> Window | SoftCap | None:
    """Return the declaration of the window or soft cap that IMPLEMENTATION:ARGUMENT names.

    Return None for other arguments. Raise `UnknownName` if there is no such implementation, and
    `Untranslatable` if several implementations with this name declare the argument differently.
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


def _array(mask: Any) -> np.ndarray:
    try:
        array = np.asarray(mask)
        # bfloat16, which a package adds to NumPy, has kind "V" but can be converted to a float.
        if array.dtype.kind == "V":
            array.astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise Untranslatable(f"NumPy cannot read the mask as an array: {why}") from error
    if array.dtype.kind not in "biufV":
        raise Untranslatable(f"the mask holds neither booleans nor numbers, but {array.dtype}")
    return array


# Axes


def _with_all_axes(
    array: np.ndarray, argument: MaskArgument, name: str, given: Mapping[str, int]
) -> tuple[np.ndarray, Sizes]:
    """Return the array as `[batch heads query key]`, and all sizes that are then known.

    Raise `WrongShape` if no layout of the argument fits, and `Untranslatable` if several fit and
    give different results, or if the sizes of joined axes are unknown. `name` is the argument's
    name in messages.
    """
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
        # Two readings are equivalent if they give the same numbers to the same pairs.
        if one[1].shape != other[1].shape or not np.array_equal(one[1], other[1]):
            raise Untranslatable(
                f"{name}: a mask of shape {list(array.shape)} may be read as [{one[0]}] or as "
                f"[{other[0]}]; give sizes that decide: batch=, heads=, query=, key="
            )
    # Sizes on which all readings agree.
    common = set.intersection(*(set(sizes.items()) for _, _, sizes in readings))
    return readings[0][1], dict(common)


def _read(
    array: np.ndarray, layout: str, broadcasts: bool, given: Mapping[str, int]
) -> tuple[np.ndarray, Sizes]:
    """Return the array, read in a layout, as `[batch heads query key]`, and the known sizes.

    Raise `WrongShape` if the array does not fit the layout. If `broadcasts` is true, any axis that
    is not joined with others may have size 1.
    """
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
    """Add to `sizes` what follows from `size`, the size of an array axis that is made of `axes`.

    Raise `WrongShape` if `size` contradicts the known sizes, and `Untranslatable` if more than one
    of the joined sizes is unknown and `size` is not 1.
    """
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


def _laid_out(elements: np.ndarray, argument: MaskArgument, name: str, sizes: Sizes) -> np.ndarray:
    """Return the elements in the first of the target's layouts that can represent them.

    Raise `Untranslatable` if there is no such layout, or if a size that it needs is unknown.
    """
    layout, held = next(_layouts(elements, argument), ("", elements))
    if not layout:
        raise Untranslatable(_why_not(elements, argument, name))
    parts = layouts.parse(layout)
    may_stay_at_1 = {axes[0] for axes in parts if argument.broadcasts and len(axes) == 1}
    full = dict(zip(AXES, held.shape, strict=True)) | sizes
    unknown = [
        axis
        for axis in itertools.chain(*parts)
        if axis not in may_stay_at_1 and axis not in sizes and full[axis] == 1
    ]
    if unknown:
        raise Untranslatable(
            f"{name} is [{layout}], and the mask does not determine every size: give "
            + ", ".join(f"{axis}=" for axis in unknown)
        )
    array = to_layout(held, layout, [full[axis] for axis in AXES], broadcast=argument.broadcasts)
    assert array is not None
    return array


def _layouts(elements: np.ndarray, argument: MaskArgument) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the layouts that can represent the array, each with the array to arrange in it.

    First come layouts whose missing axes have size 1 in the array. Then all layouts are tried
    again, with a missing axis reduced to size 1 if the array is constant along it.
    """
    for collapse in (False, True):
        for layout in argument.layouts:
            held = elements
            missing = [i for i, axis in enumerate(AXES) if axis not in layouts.axes(layout)]
            for i in missing:
                if collapse and held.shape[i] > 1 and _constant(held, i):
                    held = held.take([0], axis=i)
            if all(held.shape[i] == 1 for i in missing):
                yield layout, held


def _why_not(elements: np.ndarray, argument: MaskArgument, name: str) -> str:
    varies = [axis for i, axis in enumerate(AXES) if not _constant(elements, i)]
    lacking: list[list[str]] = [
        [axis for axis in varies if axis not in layouts.axes(layout)] for layout in argument.layouts
    ]
    declared = " or ".join(f"[{layout}]" for layout in argument.layouts)
    fewest = min(lacking, key=len)
    return f"the mask varies over {' and '.join(fewest)}, and {name} is {declared}"


def _constant(array: np.ndarray, axis: int) -> bool:
    return bool((array == array.take([0], axis=axis)).all()) if array.size else True


# Elements


def _meaning(array: np.ndarray, argument: MaskArgument, name: str) -> np.ndarray:
    """Return the meaning of a mask for the argument `name`, as an array of the same shape.

    The result is boolean, with True where a query may attend to a key, or it holds the numbers that
    are added to the logits. Raise `Untranslatable` if the meaning is not declared or the mask holds
    NaN; also for integers and +inf if the argument adds numbers, and for infinity if it does not.
    """
    if array.dtype == np.bool_:
        if argument.true is None:
            raise Untranslatable(f"{name} takes no booleans, so what True means there is unknown")
        return array == (argument.true == "attends")
    if np.isnan(array).any():
        raise Untranslatable("there is NaN in the mask")
    if argument.number == "added":
        return _added(array, name)
    if argument.number is None and not ((array == 0) | (array == 1)).all():
        raise Untranslatable(f"{name} takes booleans only; the mask holds numbers beside 0 and 1")
    if np.isinf(array).any():
        raise Untranslatable(
            f"there is infinity in the mask, and numbers are not added by {name}: "
            "is it meant for another argument?"
        )
    if argument.number is None:
        return (array != 0) == (argument.true == "attends")
    attends = argument.attending(array)
    if attends is None:
        raise Untranslatable(
            f"{name} takes 0 and 1; the mask holds other numbers, whose meaning is not declared"
        )
    return attends


def _added(array: np.ndarray, name: str) -> np.ndarray:
    """Return the numbers of a mask that is added to the logits, or booleans for only 0 and -inf.

    The booleans are True for 0, where a query may attend. Raise `Untranslatable` for integers and
    for +inf.
    """
    if array.dtype.kind not in "fV":
        raise Untranslatable(
            f"{name} adds numbers to the logits, and the mask holds integers, which look like "
            "True and False; give booleans or floats"
        )
    if np.isposinf(array.astype(np.float64)).any():
        raise Untranslatable(f"+inf in the mask, added by {name}, gives NaN")
    attends = array == 0
    return attends if (attends | np.isinf(array)).all() else array


def _expressed(
    meaning: np.ndarray, dtype: np.dtype, argument: MaskArgument, name: str
) -> np.ndarray:
    """Return the elements of a mask with which `argument` expresses `meaning`.

    `meaning` holds booleans, where True attends, or numbers that are added to the logits. Booleans
    that become numbers get the given dtype, unless the argument declares another. Messages name
    the mask `name`.

    Raises:
        Untranslatable: `meaning` holds numbers, but the argument cannot add numbers to the logits.
    """
    if meaning.dtype != np.bool_:
        if argument.number != "added":
            raise Untranslatable(
                f"the mask adds finite numbers to the logits, and {name} only says which keys may "
                "be attended; numbers that are meant to block, such as -1e9, must be -inf, and a "
                "bias needs an argument that adds numbers"
            )
        return meaning
    if argument.true is not None:
        return meaning == (argument.true == "attends")
    if argument.number == "added":
        return np.where(meaning, 0.0, -np.inf).astype(dtype)
    return (meaning == (argument.one == "attends")).astype(argument.dtype or dtype)


# Windows and soft caps


def _of_number(
    feature: Window | SoftCap,
    value: Any,
    source: str,
    other: Window | SoftCap | MaskArgument,
    target: str,
    sizes: Sizes,
    *,
    causal: bool,
) -> Any:
    """Return the value or mask that means for `target` what `value` means for `source`.

    `feature` and `other` are the declarations of the arguments `source` and `target`. `causal` says
    whether both implementations also receive a causal mask. Raise `Untranslatable` if the target
    cannot express the meaning.
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
        return _window_mask(feature, limits, source, other, target, sizes)
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


def _window_mask(
    window: Window,
    limits: tuple[int | None, int | None],
    source: str,
    argument: MaskArgument,
    target: str,
    sizes: Sizes,
) -> np.ndarray:
    """Return a window as a mask for `argument`, in booleans or numbers as the argument declares.

    `limits` are the numbers of keys before and after the query's position; None means no limit.
    Raise `Untranslatable` if the lengths are unknown or the argument cannot express the window.
    """
    missing = [axis for axis in ("query", "key") if axis not in sizes]
    if missing:
        raise Untranslatable(f"a mask needs the lengths: give {' and '.join(missing)}")
    queries, keys = sizes["query"], sizes["key"]
    if window.alignment is None and queries != keys:
        raise Untranslatable(f"{source} is declared for equal lengths only")
    offset = keys - queries if window.alignment == "bottom-right" else 0
    seen = within(limits, np.arange(keys) - np.arange(queries)[:, None] - offset)
    elements = _expressed(seen[None, None], np.dtype(np.float32), argument, target)
    full = (sizes.get("batch", 1), sizes.get("heads", 1), queries, keys)
    for layout in argument.layouts:
        laid = to_layout(elements, layout, full, broadcast=argument.broadcasts)
        if laid is not None:
            return laid
    raise Untranslatable(f"{target} has no axes of queries and keys")


# Every conversion, for the website


def _shown() -> dict[str, np.ndarray]:
    """Return the website's masks by name, as `[batch heads query key]`; True means attends."""
    query, key = np.arange(SHOWN_SIZES["query"])[:, None], np.arange(SHOWN_SIZES["key"])
    causal = key <= query
    # The second batch entry has two keys fewer.
    there = (key < np.array([[5], [3]]))[:, None, None, :]
    second = key >= 3
    made = {
        "Causal": causal,
        "Causal, a window of 2 keys, the own one included": causal & (key > query - 2),
        "A window of 1 key before and after the own one": abs(key - query) <= 1,
        "Padding: the second entry has 3 keys": there,
        "Causal, and padding": causal & there,
        "A prefix of 2 keys, then causal": causal | (key < 2),
        "Two documents in a row, 3 and 2 tokens": (query >= 3) == second,
    }
    shape = tuple(SHOWN_SIZES.values())
    return {name: np.broadcast_to(mask, shape).copy() for name, mask in made.items()}


def answers(arguments: Iterable[tuple[str, str, MaskArgument]]) -> dict[str, Any]:
    """Return the website's masks, converted from each argument to every argument.

    Args:
        arguments: for each argument, its implementation, its name and its declaration.

    Returns:
        A dictionary that can be written as JSON. Arguments whose declarations differ only in the
        name are of one kind and share results. In the item "answers", `answers[mask][kind]` is a
        pair: the mask as a source of this kind expresses it, and a list of the masks converted from
        it, one for each kind of target. The list is empty if the source cannot express the mask.
        Each mask is an index into the item "arrays". If its conversion fails, it is −1 − i instead,
        where i is the index of an error message in the item "problems".
    """
    kinds: dict[MaskArgument, int] = {}
    listed = [
        [key, name, kinds.setdefault(replace(mask, name="mask"), len(kinds))]
        for key, name, mask in arguments
    ]
    arrays: dict[str, int] = {}
    problems: dict[str, int] = {}

    def answer(mask: Any, source: MaskArgument, target: MaskArgument) -> tuple[Any, int]:
        try:
            made = translate_between(mask, source, target, SHOWN_SIZES)
        except ConformanceError as error:
            return None, -1 - problems.setdefault(str(error), len(problems))
        text = json.dumps([str(made.dtype), list(made.shape), _written(made)])
        return made, arrays.setdefault(text, len(arrays))

    def answers_from(mask: np.ndarray, source: MaskArgument) -> list[Any]:
        native, index = answer(mask, _CANONICAL, source)
        return [index, [] if native is None else [answer(native, source, to)[1] for to in kinds]]

    masks = _shown()
    told = [[answers_from(mask, source) for source in kinds] for mask in masks.values()]
    return {
        "masks": [[name, mask[:, 0].astype(int).tolist()] for name, mask in masks.items()],
        "sizes": SHOWN_SIZES,
        "arguments": listed,
        "kinds": [[kind.axes, kind.true, kind.number] for kind in kinds],
        "arrays": [json.loads(text) for text in arrays],
        "problems": list(problems),
        "answers": told,
    }


def _written(array: np.ndarray) -> Sequence[Any]:
    """Return the array as nested lists that JSON can represent.

    Infinity and NaN become None, and booleans become 0 and 1.
    """
    if array.dtype.kind != "f":
        return array.astype(int).tolist()  # type: ignore[no-any-return]
    return np.where(np.isfinite(array), array.astype(object), np.array(None)).tolist()  # type: ignore[no-any-return]
