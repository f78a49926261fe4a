"""The sizes of an attention, read from its native parameters: a parameter table read backwards.

Each axis of a native parameter is an equation: its size is a product of sizes of the attention, or
a sum of such products where several weights are stacked. All solutions in whole numbers that the
implementation can have are found; who asks decides what to make of none or of several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from conformance.adapter.layer import Layer
from conformance.adapter.parameters import Parameter
from conformance.definition.problem import Shape, Sharing
from conformance.errors import ConformanceError, Unsupported, WrongDeclaration, WrongShape

Solution = dict[str, int]
"""Sizes by field of `Shape`."""

AXES_OF: Mapping[str, tuple[str, ...]] = {
    "query": ("query_width", "heads", "head_size"),
    "key": ("key_width", "kv_heads", "head_size"),
    "value": ("value_width", "kv_heads", "value_head_size"),
    "output": ("heads", "value_head_size", "output_width"),
    "query_bias": ("heads", "head_size"),
    "key_bias": ("kv_heads", "head_size"),
    "value_bias": ("kv_heads", "value_head_size"),
    "output_bias": ("output_width",),
    "score": ("heads", "head_size"),
}
"""Canonical weights: which size of a shape each axis has."""

# heads before what they divide; widths stand alone in most tables and are never guessed.
_GUESSED = ("heads", "kv_heads", "head_size", "value_head_size")

WIDTHS = ("query_width", "key_width", "value_width", "output_width")
SHARINGS: tuple[Sharing, ...] = ("separate", "memory", "self")


@dataclass(frozen=True)
class Equation:
    """`size = sum of products`, of one axis of one native parameter."""

    native: str
    size: int
    products: tuple[tuple[str, ...], ...]


def shapes_of(sizes: Mapping[str, int], weights: Iterable[str]) -> Iterator[Shape]:
    """Shapes with these sizes and these canonical weights, one for each kind of shared inputs.

    Nothing in the weights tells lengths, which are 1 here, or which inputs are one array, on which
    some implementations insist. None if no attention has these sizes, or one is missing.
    """
    present = set(weights)
    if not {axis for axes in AXES_OF.values() for axis in axes} <= sizes.keys():
        return
    for sharing in SHARINGS:
        try:
            yield Shape(
                batch=1,
                query_length=1,
                key_length=1,
                heads=sizes["heads"],
                kv_heads=sizes["kv_heads"],
                head_size=sizes["head_size"],
                value_head_size=sizes["value_head_size"],
                query_width=sizes["query_width"],
                key_width=sizes["key_width"],
                value_width=sizes["value_width"],
                output_width=sizes["output_width"],
                bias=any(name.endswith("_bias") for name in present),
                score="additive" if "score" in present else "scaled-dot",
                sharing=sharing,
            )
        except WrongShape:
            continue


def tables(layer: Layer) -> tuple[tuple[Parameter, ...], ...]:
    """Every table that the layer declares for some shape, each once.

    A table may depend on which widths are equal, on fewer key/value heads, on another size of value
    heads, on biases, the score and shared inputs; so shapes that differ in these are put to it.
    """
    if type(layer).parameters_for is Layer.parameters_for:
        return (tuple(layer.parameters),)
    widths = ((8, 8, 8, 8), (8, 6, 6, 8), (8, 6, 7, 8), (8, 8, 7, 8), (6, 8, 8, 8), (7, 6, 5, 9))
    plain = ["query", "key", "value", "output"]
    biases = [f"{name}_bias" for name in plain]
    additive = ["score"] if "additive" in layer.scores else []
    found: dict[tuple[Parameter, ...], None] = {}
    for wide, (kv_heads, value_head), weights in itertools.product(
        widths,
        ((4, 2), (2, 2), (1, 2), (4, 3)),
        (plain + biases, plain, plain + biases + additive, plain + additive),
    ):
        sizes = dict(zip(WIDTHS, wide, strict=True)) | {"heads": 4, "head_size": 2}
        sizes |= {"kv_heads": kv_heads, "value_head_size": value_head}
        for shape in shapes_of(sizes, weights):
            try:
                found[tuple(layer.parameters_for(shape))] = None
            except (Unsupported, ConformanceError):
                continue
    return tuple(found)


def equations(row: Parameter, native: Sequence[int]) -> list[Equation] | None:
    """What a native parameter's shape says, or None if it has another number of axes.

    Raises:
        WrongDeclaration: the pattern is none that can be read backwards.
    """
    left, right = (side.split() for side in row.pattern.split("->"))
    groups = _groups(" ".join(right))
    if len(groups) != len(native):
        return None
    named: list[dict[str, str]] = []
    for name in row.names:
        if len(left) != len(AXES_OF[name]) or not all(axis.isidentifier() for axis in left):
            raise WrongDeclaration(
                f"parameter {row.native!r}: {row.pattern!r} does not name the axes of {name}"
            )
        named.append(dict(zip(left, AXES_OF[name], strict=True)))
    found = []
    for place, (group, size) in enumerate(zip(groups, native, strict=True)):
        products = [tuple(axes[axis] for axis in group if axis != "1") for axes in named]
        if place == row.stack:
            found.append(Equation(row.native, size, tuple(products)))
        else:
            found += [Equation(row.native, size, (product,)) for product in dict.fromkeys(products)]
    return found


def native_shape(row: Parameter, sizes: Mapping[str, int]) -> list[int]:
    """The shape of a native parameter for these sizes."""
    left, right = (side.split() for side in row.pattern.split("->"))
    found = []
    for place, group in enumerate(_groups(" ".join(right))):
        parts = [
            math.prod(sizes[axes[axis]] for axis in group if axis != "1")
            for axes in (dict(zip(left, AXES_OF[name], strict=True)) for name in row.names)
        ]
        found.append(sum(parts) if place == row.stack else parts[0])
    return found


def solve(asked: Sequence[Equation], known: Mapping[str, int]) -> Iterator[Solution]:
    """Every solution of the equations in positive whole numbers.

    Sizes that no equation tells are absent from a solution. Heads are a multiple of the key/value
    heads in all of them.
    """
    settled = _settle(asked, dict(known))
    if settled is None:
        return
    left = {symbol for it in asked for product in it.products for symbol in product} - set(settled)
    symbol = next((symbol for symbol in _GUESSED if symbol in left), None)
    if symbol is None:
        yield settled
        return
    for guess in _candidates(symbol, asked, settled):
        yield from solve(asked, {**settled, symbol: guess})


def _settle(asked: Sequence[Equation], sizes: Solution) -> Solution | None:
    """What follows without guessing, or None for a contradiction."""
    before = -1
    while before < len(sizes):
        before = len(sizes)
        for it in asked:
            constant, factor, unknown = 0, 0, set()
            for product in it.products:
                known = math.prod(sizes[symbol] for symbol in product if symbol in sizes)
                missing = [symbol for symbol in product if symbol not in sizes]
                if not missing:
                    constant += known
                elif len(missing) == 1:
                    factor += known
                unknown.update(missing if len(missing) < 2 else [*missing, ""])
            rest = it.size - constant
            if not unknown and rest:
                return None
            if len(unknown) == 1:
                if rest < factor or rest % factor:
                    return None
                sizes[unknown.pop()] = rest // factor
            elif unknown and rest < 1:
                return None
    if {"heads", "kv_heads"} <= sizes.keys() and sizes["heads"] % sizes["kv_heads"]:
        return None
    return sizes


def _candidates(symbol: str, asked: Sequence[Equation], sizes: Solution) -> list[int]:
    """Numbers that may be this size: divisors of what it divides, else all that fit."""
    bounds = [
        it.size
        for it in asked
        if len(it.products) == 1 and symbol in it.products[0] and it.size > 0
    ]
    if symbol == "kv_heads" and "heads" in sizes:
        bounds.append(sizes["heads"])
    if not bounds:
        sums = [it.size for it in asked if any(symbol in product for product in it.products)]
        return list(range(1, min(sums, default=0) + 1))
    bound = math.gcd(*bounds)
    low = [n for n in range(1, math.isqrt(bound) + 1) if bound % n == 0]
    return sorted({*low, *(bound // n for n in low)})


def _groups(side: str) -> list[list[str]]:
    """The axes of one side of a pattern, those in brackets together."""
    spaced = side.replace("(", " ( ").replace(")", " ) ").split()
    groups: list[list[str]] = []
    inside = False
    for word in spaced:
        if word in "()":
            inside = word == "("
            if inside:
                groups.append([])
        elif inside:
            groups[-1].append(word)
        else:
            groups.append([word])
    return groups
