"""Find which meaning of an array explains the attention weights, by predicting them for each.

With p the weights without a mask, and M the array that was handed over, the weights are

    attends      p where M is not 0, else 0; each row divided by its sum
    blocks       p where M is 0, else 0; divided likewise
    added        p exp(M), divided likewise                     (M was added to the logits)
    multiplied   softmax of (logits M), or p M                  (M was a factor)
    ignored      p

and readings of numbers that are neither 0 nor 1: "attends above ½", "attends where 1", "blocks
where 1". The values of a form (see `FORMS`) keep the predictions apart; where two coincide all the
same, as "attends" and "attends above ½" for 0 and 1, the plainer name stands for both. Where every
row looks as a fully masked one does, M "blocks everything". If no prediction is right, the meaning
is "unexplained": never the nearest guess.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from conformance.adapter import layouts
from conformance.adapter.arguments import AXES, MaskArgument, Native, to_layout
from conformance.definition.arithmetic import Exact
from conformance.definition.attention import forward
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.problem import Shape
from conformance.records.phrase import Argument, Phrase
from conformance.requirements.laboratory import Laboratory, Seen, Sizes

# The forms in which an array is handed to a mask argument, each with values that tell


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
        """Return the values in the dtype of this form; float64 means the implementation's own."""
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
    """Return the forms to use in another dtype: masks in that dtype and also in float32."""
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
    layout = argument.layouts[0]
    values = _values(form, layout, shape, seed).copy()
    laid = to_layout(values, layout, shape, broadcast=False)
    assert laid is not None
    return values, laid


@lru_cache(maxsize=512)
def _values(form: Form, layout: str, shape: Shape, seed: int) -> Array:
    random = np.random.default_rng([7, seed, zlib.crc32(str(form.phrase).encode())])
    named = layouts.axes(layout)
    sizes = [n if a in named else 1 for a, n in zip(AXES, shape.logits, strict=True)]
    last = "key" if "key" in named else "query"
    return arrange(random, sizes, AXES.index(last), form.values)


def arrange(
    random: np.random.Generator, sizes: list[int], axis: int, values: tuple[float, ...]
) -> Array:
    """Return an array whose rows along `axis` hold all values, in different orders."""
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


# What an array did


ATTENDS, BLOCKS = Phrase("mask.attends"), Phrase("mask.blocks")
BLOCKS_WHERE_ONE = Phrase("mask.blocks-where-one")
BLOCKS_EVERYTHING = Phrase("mask.blocks-everything")
ADDED, IGNORED = Phrase("mask.added"), Phrase("mask.ignored")
INTO_WEIGHTS = Phrase("mask.multiplied-into-weights")
REJECTED, UNEXPLAINED = Phrase("mask.rejected"), Phrase("mask.unexplained")


def meaning(lab: Laboratory, seen: Seen, fed: Array) -> Phrase:
    """Return the one hypothesis that explains the applied weights; `fed` has four axes."""
    for found, predicted in predictions(lab, seen, fed).items():
        if lab.alike(seen, predicted):
            return found
    weights = seen.applied
    uniform = np.allclose(weights, 1 / max(weights.shape[-1], 1), rtol=0.01, atol=0)
    if uniform or not weights.any() or np.isnan(weights).all():
        return BLOCKS_EVERYTHING
    return UNEXPLAINED


READINGS: dict[Phrase, Callable[[Array], BoolArray]] = {
    ATTENDS: lambda fed: fed != 0,
    Phrase("mask.attends-above-half"): lambda fed: fed > 0.5,
    Phrase("mask.attends-where-one"): lambda fed: fed == 1,
    BLOCKS: lambda fed: fed == 0,
    BLOCKS_WHERE_ONE: lambda fed: fed != 1,
}
"""Who attends by these numbers; the plainer name first."""

BLOCKING = (BLOCKS, BLOCKS_WHERE_ONE)
ATTENDING = tuple(found for found in READINGS if found not in BLOCKING)
"""What 1 means, and 0 the opposite."""


def predictions(lab: Laboratory, seen: Seen, fed: Array) -> dict[Phrase, Array]:
    """Return what each hypothesis predicts; equal predictions keep only the first."""
    shape = seen.problem.shape
    plain = lab.plain(Sizes(*shape.logits), seen.problem.dtype).applied
    fed = np.broadcast_to(fed, shape.logits).astype(np.float64)
    # Those of the definition: weights leave a summand of each row open, and a factor needs it.
    logits = forward(seen.problem, Exact()).logits
    with np.errstate(all="ignore"):
        factor = np.exp(fed - fed.max(axis=-1, keepdims=True))
        scaled = np.exp(fed * logits - (fed * logits).max(axis=-1, keepdims=True))
        every = {
            IGNORED: plain,
            **{found: among(plain, attends(fed)) for found, attends in READINGS.items()},
            ADDED: _normal(plain * factor),
            Phrase("mask.multiplied"): _normal(scaled),
            INTO_WEIGHTS: plain * fed,
        }
    found: dict[Phrase, Array] = {}
    for hypothesis, predicted in every.items():
        empty = (np.nan_to_num(predicted) == 0).all(axis=-1).any()
        repeated = any(_same(predicted, known) for known in found.values())
        if not repeated and not (empty and hypothesis != INTO_WEIGHTS):
            found[hypothesis] = predicted
    return found


def among(plain: Array, visible: BoolArray) -> Array:
    """Return the weights if only these keys are visible; NaN where none is."""
    with np.errstate(all="ignore"):
        return _normal(plain * visible)


def among_shown(plain: Array, visible: BoolArray, seen: Seen) -> Array:
    """Return the weights for these keys, or the observed weights where no key is visible.

    NaN in one head reaches the query's whole output, so it is seen in the other heads too.
    """
    rows = np.asarray(visible.any(axis=-1, keepdims=True))
    lost = np.isnan(seen.applied) & ~rows.all(axis=1, keepdims=True)
    return np.where(rows & ~lost, among(plain, visible), seen.applied)


def _normal(weights: Array) -> Array:
    return weights / weights.sum(axis=-1, keepdims=True)


def _same(one: Array, other: Array) -> bool:
    return bool(np.allclose(one, other, rtol=1e-9, atol=0, equal_nan=True))


def rows_changed(lab: Laboratory, seen: Seen) -> BoolArray:
    """Return which queries `[batch query]` have weights that differ from those without a mask."""
    shape = seen.problem.shape
    plain = lab.plain(Sizes(*shape.logits), seen.problem.dtype)
    noise = lab.noise(seen.problem)
    with np.errstate(invalid="ignore"):
        near = np.abs(seen.applied - plain.applied) <= 12 * noise
    return np.asarray(~near.all(axis=(1, 3)))


# How an array of any shape may be read: which of its axes is which


@dataclass(frozen=True)
class ReadAs:
    """One way to take the axes of an array for axes of `[batch heads query key]`.

    `axes` names the axis of the attention for each axis of the array, "1" for an axis of size 1
    that is broadcast, and "batch·heads" or "heads·batch" for two in one.
    """

    axes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The axes by name, such as "batch 1 key"."""
        return " ".join(self.axes)

    def apply(self, array: Array, sizes: Mapping[str, int]) -> Array:
        """Return the array with four axes, of size 1 where it has none."""
        split: list[str] = []
        shape: list[int] = []
        for axis, size in zip(self.axes, array.shape, strict=True):
            names = axis.split("·")
            split += names
            shape += [sizes[name] for name in names] if len(names) > 1 else [size]
        opened = array.reshape(shape)
        kept = [index for index, name in enumerate(split) if name in AXES]
        order = sorted(kept, key=lambda index: AXES.index(split[index]))
        ones = [index for index in range(len(split)) if index not in kept]
        opened = opened.transpose(*order, *ones).reshape([shape[index] for index in order])
        present = {split[index] for index in order}
        return opened.reshape([sizes[axis] if axis in present else 1 for axis in AXES])


def readings(shape: tuple[int, ...], sizes: Mapping[str, int]) -> Iterator[ReadAs]:
    """Yield every way to read an array of this shape."""
    joined = {
        "batch·heads": sizes["batch"] * sizes["heads"],
        "heads·batch": sizes["batch"] * sizes["heads"],
    }
    choices: list[list[str]] = []
    for size in shape:
        own = [axis for axis in AXES if sizes[axis] == size]
        own += [axis for axis, both in joined.items() if both == size]
        choices.append(["1", *own] if size == 1 else own)
    for axes in itertools.product(*choices):
        named = [name for axis in axes for name in axis.split("·") if name != "1"]
        if len(set(named)) == len(named):
            yield ReadAs(tuple(axes))


def read_as(lab: Laboratory, seen: Seen, fed: Array, *, attends: bool) -> tuple[ReadAs, ...]:
    """Every reading of the array that explains the weights, if its nonzero elements attend (or
    block). Of rows that a reading blocks altogether it is asked that they changed."""
    shape = seen.problem.shape
    sizes = Sizes(*shape.logits).named()
    plain = lab.plain(Sizes(*shape.logits), seen.problem.dtype).applied
    found = []
    for reading in readings(fed.shape, sizes):
        four = np.broadcast_to(reading.apply(fed, sizes), shape.logits)
        visible = (four != 0) if attends else (four == 0)
        predicted = among_shown(plain, visible, seen)
        blocked = ~visible.any(axis=(1, 3))
        if lab.alike(seen, predicted) and (rows_changed(lab, seen) | ~blocked).all():
            found.append(reading)
    return tuple(found)
