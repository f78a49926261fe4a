"""Compute the results of `translate` for every pair of mask arguments, for the website."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.adapter.arguments import MaskArgument
from conformance.errors import ConformanceError
from conformance.porting.masks import translate_between

SIZES = {"batch": 2, "heads": 2, "query": 5, "key": 5}
"""The sizes of the masks that are shown."""

_CANONICAL = MaskArgument("mask", "batch heads query key", true="attends", broadcasts=True)


def masks() -> dict[str, np.ndarray]:
    """Return the masks to choose from, by name, as `[batch heads query key]`; True attends."""
    query, key = np.arange(SIZES["query"])[:, None], np.arange(SIZES["key"])
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
    shape = tuple(SIZES.values())
    return {name: np.broadcast_to(mask, shape).copy() for name, mask in made.items()}


def answers(arguments: Iterable[tuple[str, str, MaskArgument]]) -> dict[str, Any]:
    """Return the result of converting each mask from each argument to every argument.

    Args:
        arguments: for each argument, its implementation, its name and its declaration.

    Returns:
        A dictionary that can be written as JSON. Arguments whose declarations differ only in the
        name are of one kind and share results. `answers[mask][kind]` has two items: the mask for
        this kind of source, and a list with the converted mask for each kind of target, which is
        empty if the source cannot express the mask. Each mask is given as an index into `arrays`
        or, if there is none, as −1 − i, where i is the index of an error message in `problems`.
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
            made = translate_between(mask, source, target, SIZES)
        except ConformanceError as error:
            return None, -1 - problems.setdefault(str(error), len(problems))
        text = json.dumps([str(made.dtype), list(made.shape), _written(made)])
        return made, arrays.setdefault(text, len(arrays))

    told = []
    for mask in masks().values():
        of_mask = []
        for source in kinds:
            native, index = answer(mask, _CANONICAL, source)
            targets = [] if native is None else [answer(native, source, to)[1] for to in kinds]
            of_mask.append([index, targets])
        told.append(of_mask)
    return {
        "masks": [[name, mask[:, 0].astype(int).tolist()] for name, mask in masks().items()],
        "sizes": SIZES,
        "arguments": listed,
        "kinds": [[kind.axes, kind.true, kind.number] for kind in kinds],
        "arrays": [json.loads(text) for text in arrays],
        "problems": list(problems),
        "answers": told,
    }


def _written(array: np.ndarray) -> Sequence[Any]:
    """Return the array as nested lists, with None for -inf, which JSON cannot represent."""
    if array.dtype.kind != "f":
        return array.astype(int).tolist()  # type: ignore[no-any-return]
    return np.where(np.isfinite(array), array.astype(object), np.array(None)).tolist()  # type: ignore[no-any-return]
