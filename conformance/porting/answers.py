"""Answers of `translate` for every pair of mask arguments: what the site's translator shows."""

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
"""Of the masks that are shown."""

_CANONICAL = MaskArgument("mask", "batch heads query key", true="attends", broadcasts=True)


def masks() -> dict[str, np.ndarray]:
    """Return the masks that can be chosen, by name: `[batch heads query key]`, True attends."""
    query, key = np.arange(SIZES["query"])[:, None], np.arange(SIZES["key"])
    causal = key <= query
    # The second entry of the batch has two keys fewer.
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
    """Return what each mask becomes for each argument, from every other.

    Args:
        arguments: implementation, argument, and what is declared of it.

    Returns:
        Plain data. Arguments with the same declaration share an answer. `answers[mask][source]`
        is the array for the source, and a list of those for each target: indices into `arrays`, or
        into `problems` as −1 − index.
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
    """Return the array as lists; -inf, which JSON has not, as null."""
    if array.dtype.kind != "f":
        return array.astype(int).tolist()  # type: ignore[no-any-return]
    return np.where(np.isfinite(array), array.astype(object), np.array(None)).tolist()  # type: ignore[no-any-return]
