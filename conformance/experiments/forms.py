"""The forms in which an array is handed to a mask argument, each with values that tell."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.adapter import layouts
from conformance.adapter.arguments import MaskArgument, Native, to_layout
from conformance.definition.dtypes import Array
from conformance.definition.problem import Shape
from conformance.records.phrase import Argument, Phrase


@dataclass(frozen=True)
class Form:
    """A dtype and the values that a row is made of.

    Attributes:
        phrase: what it is, such as "form.zero-one" of a dtype.
        values: of a row; repeated and shuffled. A finite number beside −inf tells "added" from
            "blocks", 0.25 beside 1 tells "nonzero" from "above ½", and 2 either from "is 1".
        dtype: as NumPy calls it, or "own" for the implementation's.
    """

    phrase: Phrase
    values: tuple[float, ...]
    dtype: str

    def array(self, values: Array) -> Native:
        """The values in the dtype of this form; float64 stands for the implementation's own."""
        if self.dtype == "own":
            return values
        if self.dtype == "bool":
            return values != 0
        kind: Any = np.dtype(self.dtype)
        return values.astype(kind)


def _form(kind: str, *values: float, dtype: str = "float32", own: bool = False) -> Form:
    arguments: dict[str, Argument] = {"dtype": dtype} if kind != "bool" else {}
    if kind == "zero-large":
        arguments["large"] = f"{-values[1]:.0e}".replace("e+0", "e")
    return Form(Phrase(f"form.{kind}", arguments), values, "own" if own else dtype)


INFINITE = float("-inf")
BOOL = _form("bool", 0, 1, dtype="bool")
ZERO_ONE = _form("zero-one", 0, 1)
ZERO_INFINITE = _form("zero-infinite", 0, INFINITE, -0.75)
LARGE = _form("zero-large", 0, -1e9, -0.75)
FORMS = (
    BOOL,
    _form("zero-one", 0, 1, dtype="uint8"),
    _form("zero-one", 0, 1, dtype="int32"),
    _form("zero-one", 0, 1, dtype="int64"),
    ZERO_ONE,
    _form("zero-quarter-one", 0, 0.25, 1),
    _form("zero-one-two", 0, 1, 2),
    ZERO_INFINITE,
    LARGE,
)
"""In a problem of float32."""


def own_forms(dtype: str) -> tuple[Form, ...]:
    """In a problem of another dtype: masks in that dtype, and in float32 beside it."""
    large = -1e4 if dtype == "float16" else -1e9
    return (
        BOOL,
        _form("zero-one", 0, 1, dtype=dtype, own=True),
        _form("zero-infinite", 0, INFINITE, -0.75, dtype=dtype, own=True),
        _form("zero-large", 0, large, -0.75, dtype=dtype, own=True),
        ZERO_ONE,
        ZERO_INFINITE,
    )


def telling(form: Form, argument: MaskArgument, shape: Shape, seed: int = 0) -> tuple[Array, Array]:
    """An asymmetric array of this form: `[batch heads query key]` (1 where the layout has none),
    and the same in the argument's first layout.

    Every row has every value at least once, no two rows of a head or entry are alike as long as
    there are enough arrangements, so no axis can be taken for another.
    """
    random = np.random.default_rng([7, seed, zlib.crc32(str(form.phrase).encode())])
    named = layouts.axes(argument.layouts[0])
    axes = ("batch", "heads", "query", "key")
    sizes = [n if a in named else 1 for a, n in zip(axes, shape.logits, strict=True)]
    last = "key" if "key" in named else "query"
    values = arrange(random, sizes, axes.index(last), form.values)
    laid = to_layout(values, argument.layouts[0], shape, broadcast=False)
    assert laid is not None
    return values, laid


def arrange(
    random: np.random.Generator, sizes: list[int], axis: int, values: tuple[float, ...]
) -> Array:
    """An array whose rows along `axis` hold all values, in different orders."""
    length = sizes[axis]
    row = np.resize(np.array(values, np.float64), length)
    rows = int(np.prod(sizes)) // max(length, 1)
    best = np.stack([random.permutation(row) for _ in range(rows)]) if rows else row[None][:0]
    for _ in range(100):
        if len(np.unique(best, axis=0)) == rows:
            break
        best = np.stack([random.permutation(row) for _ in range(rows)])
    shape = [*sizes[:axis], *sizes[axis + 1 :], length]
    return np.moveaxis(best.reshape(shape), -1, axis)
