"""What the axes of each array are, in words: for messages that name an element or a region."""

from __future__ import annotations

from collections.abc import Sequence

INPUTS = {"query": "query", "key": "key", "value": "key"}
_WEIGHTS = {
    "query": ("in", "head", "component"),
    "key": ("in", "head", "component"),
    "value": ("in", "head", "component"),
    "output": ("head", "component", "out"),
    "output_bias": ("out",),
}


def axes(array: str, count: int) -> tuple[str, ...]:
    """Names of the axes of an array by its name, such as "gradient.weights.key"; () if unknown."""
    name = array.removeprefix("gradient.")
    if array == "output":
        found: tuple[str, ...] = ("batch", "query", "component")
    elif array in ("weights", "row sums") or name == "attn_bias":
        found = ("batch", "head", "query", "key")
        if array == "weights" and count == 3:
            found = ("batch", "query", "key")
        if array == "row sums":
            found = found[:-1] if count == 3 else ("batch", "query")
    elif name in INPUTS:
        found = ("batch", INPUTS[name], "component")
    else:
        found = _WEIGHTS.get(name.removeprefix("weights."), ("head", "component"))
    return found if len(found) == count else ()


def element(array: str, index: Sequence[int]) -> str:
    """One element, such as "output[batch 2, query 1, component 4]"."""
    names = axes(array, len(index))
    told = (f"{n} {i}" for n, i in zip(names, index, strict=True)) if names else map(str, index)
    return f"{array}[{', '.join(told)}]"
