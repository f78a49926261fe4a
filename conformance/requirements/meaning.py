"""Find out what a mask array means, by predicting the attention weights for each possible meaning.

Let p be the weights without a mask, and M the array that is passed. The meanings predict:

    attends      p where M is not 0, else 0; each row divided by its sum
    blocks       p where M is 0, else 0; each row divided by its sum
    added        p exp(M); each row divided by its sum          (M is added to the logits)
    multiplied   softmax of (logits M), or p M                  (M is a factor)
    ignored      p

Further meanings are "attends above ½", "attends where 1" and "blocks where 1", which differ from
"attends" and "blocks" only in numbers other than 0 and 1; "added before the scale", where the scale
multiplies M too; and "attends, equally, where the row's largest number is", where M is multiplied
by a number so large that the logits are lost to rounding when it is added to them.

The values of a form (see `FORMS`) are chosen to make predictions differ; if two are equal
nevertheless, such as "attends" and "attends above ½" for 0 and 1, the simpler meaning is reported.
If every row looks fully masked, M "blocks everything". If no prediction fits, the meaning is
"unexplained"; the nearest one is never guessed.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from conformance.adapter import layouts
from conformance.adapter.arguments import AXES, MaskArgument, Native, from_layout, to_layout
from conformance.definition.arithmetic import Exact
from conformance.definition.attention import forward
from conformance.definition.dtypes import Array, BoolArray, dtype_of
from conformance.definition.problem import Shape
from conformance.errors import WrongDeclaration
from conformance.records.phrase import NOTHING, Argument, Phrase
from conformance.requirements.laboratory import Laboratory, Seen

# Forms in which an array is passed to a mask argument, with values that tell meanings apart


@dataclass(frozen=True)
class Form:
    """A form of mask arrays: their dtype, and the values of which each row consists.

    Attributes:
        phrase: the phrase that names the form, such as "form.zero-one" with a dtype.
        values: the values, which are repeated and shuffled in each row. With a finite number in
            addition to −inf, "added" differs from "blocks"; with 0.25 in addition to 1, "nonzero"
            differs from "above ½"; and with 2, both of these differ from "is 1".
        dtype: a NumPy dtype, or "own" for the dtype of the implementation's inputs.
    """

    phrase: Phrase
    values: tuple[float, ...]
    dtype: str

    @property
    def is_of_another_float(self) -> bool:
        """Whether the mask has a floating dtype that inputs usually do not have (float16)."""
        return self.dtype == HALF

    def array(self, values: Array) -> Native:
        """Return a mask with these values in the dtype of this form.

        If that is the dtype of the inputs ("own"), the mask remains in float64, which the call
        converts.
        """
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


HALF = "float16"
INFINITE = float("-inf")
BOOL = _form("bool", 0, 1, dtype="bool")
ZERO_ONE = _form("zero-one", 0, 1)
ZERO_INFINITE = _form("zero-infinite", 0, INFINITE, -0.75)
LARGE = _form("zero-large", 0, -1e9, -0.75)
LEAST = _form("zero-least", 0, -dtype_of("float32").largest, -0.75)
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
    LEAST,
    _form("zero-infinite", 0, INFINITE, -0.75, dtype=HALF),
)
"""The forms to try in a float32 problem; the last one has another floating dtype, float16."""


def zero_one(argument: MaskArgument, usual: Form = ZERO_ONE) -> Form:
    """Return the form with 0 and 1 in the dtype that the argument declares.

    If the argument declares none, return `usual`.
    """
    return _form("zero-one", 0, 1, dtype=argument.dtype) if argument.dtype else usual


def own_forms(dtype: str) -> tuple[Form, ...]:
    """Return the forms to try with inputs in this dtype: masks in bool, this dtype, and float32."""
    large = -1e4 if dtype == "float16" else -1e9
    return (
        BOOL,
        _form("zero-one", 0, 1, dtype=dtype, own=True),
        _form("zero-infinite", 0, INFINITE, -0.75, dtype=dtype, own=True),
        _form("zero-large", 0, large, -0.75, dtype=dtype, own=True),
        ZERO_ONE,
        ZERO_INFINITE,
        _form("zero-least", 0, -dtype_of(dtype).largest, -0.75, dtype=dtype, own=True),
    )


def forms_of(dtype: str) -> tuple[Form, Form, Form, Form, Form]:
    """Return the forms that can block a key, for inputs in this dtype.

    They are booleans, 0 and 1, 0 and −inf, 0 and a large negative number (−1e9, or −1e4 in
    float16), and 0 and the most negative number of the dtype.
    """
    if dtype == "float32":
        return BOOL, ZERO_ONE, ZERO_INFINITE, LARGE, LEAST
    boolean, ones, infinite, large, *_, least = own_forms(dtype)
    return boolean, ones, infinite, large, least


def telling(form: Form, argument: MaskArgument, shape: Shape, seed: int = 0) -> tuple[Array, Array]:
    """Return a random mask of this form, in which no axis can be mistaken for another.

    All rows differ if there are enough permutations of the values.

    Args:
        form: the form.
        argument: the mask argument, which determines the layout.
        shape: the shape of the problem.
        seed: the seed of the random order of values.

    Returns:
        The mask as `[batch heads query key]`, with size 1 for each axis that the argument's first
        layout lacks, and the same mask in that layout; both in float64.
    """
    layout = argument.layouts[0]
    values = _values(form, layout, shape, seed).copy()
    laid = to_layout(values, layout, shape.logits, broadcast=False)
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
    random: np.random.Generator, sizes: Sequence[int], axis: int, values: tuple[float, ...]
) -> Array:
    """Return an array of these sizes whose rows along `axis` hold the values in different orders.

    The values are repeated, or cut off, to fill a row.
    """
    length = sizes[axis]
    row = np.resize(np.array(values, np.float64), length)
    rows = int(np.prod(sizes)) // max(length, 1)
    best = np.stack([random.permutation(row) for _ in range(rows)]) if rows else row[None][:0]
    for _ in range(100):
        if len({row.tobytes() for row in best}) == rows:
            break
        best = np.stack([random.permutation(row) for _ in range(rows)])
    shape = [*sizes[:axis], *sizes[axis + 1 :], length]
    return np.moveaxis(best.reshape(shape), -1, axis)


# Meanings of an array


ATTENDS, BLOCKS = Phrase("mask.attends"), Phrase("mask.blocks")
BLOCKS_WHERE_ONE = Phrase("mask.blocks-where-one")
BLOCKS_EVERYTHING = Phrase("mask.blocks-everything")
ADDED, IGNORED = Phrase("mask.added"), Phrase("mask.ignored")
INTO_WEIGHTS = Phrase("mask.multiplied-into-weights")
REJECTED, UNEXPLAINED = Phrase("mask.rejected"), Phrase("mask.unexplained")


def meaning(lab: Laboratory, seen: Seen, fed: Array) -> Phrase:
    """Return the meaning of the mask `fed` that predicts the weights applied in the answer `seen`.

    `fed` has four axes, `[batch heads query key]`, each of which may have size 1. If no meaning
    fits, the result is `BLOCKS_EVERYTHING` if all rows look fully masked, or else `UNEXPLAINED`.
    """
    for found, predicted in predictions(lab, seen, fed).items():
        if lab.alike(seen, predicted):
            return found
    weights = seen.applied
    # It is less than 1 / keys if blocked keys share a row with those that fill the last tile.
    most = 1 / max(weights.shape[-1], 1)
    highest, lowest = np.max(weights, initial=0.0), np.min(weights, initial=most)
    if (highest <= 1.01 * most and highest - lowest <= 0.01 * most) or np.isnan(weights).all():
        return BLOCKS_EVERYTHING
    return UNEXPLAINED


READINGS: dict[Phrase, Callable[[Array], BoolArray]] = {
    ATTENDS: lambda fed: fed != 0,
    Phrase("mask.attends-above-half"): lambda fed: fed > 0.5,
    Phrase("mask.attends-where-one"): lambda fed: fed == 1,
    BLOCKS: lambda fed: fed == 0,
    BLOCKS_WHERE_ONE: lambda fed: fed != 1,
}
"""For each meaning, a function that returns where a mask allows attention; the simplest first."""

BLOCKING = (BLOCKS, BLOCKS_WHERE_ONE)
ATTENDING = tuple(found for found in READINGS if found not in BLOCKING)
"""The meanings in which 1 allows attention; in those of `BLOCKING`, it blocks."""


def predictions(lab: Laboratory, seen: Seen, fed: Array) -> dict[Phrase, Array]:
    """Return the weights `[batch heads query key]` that each meaning of the mask `fed` predicts.

    If several meanings predict the same weights, only the first of them is included. Meanings that
    leave a query without weights are left out, unless the mask is multiplied into the weights.
    """
    shape = seen.problem.shape
    plain = lab.unmasked(seen)
    fed = np.broadcast_to(fed, shape.logits).astype(np.float64)
    # A factor needs logits, which the weights determine only up to a constant in each row.
    logits = forward(seen.problem, Exact()).logits
    with np.errstate(all="ignore"):
        factor = np.exp(fed - fed.max(axis=-1, keepdims=True))
        scaled = np.exp(fed * logits - (fed * logits).max(axis=-1, keepdims=True))
        largest = fed == fed.max(axis=-1, keepdims=True)
        every = {
            IGNORED: plain,
            **{found: among(plain, attends(fed)) for found, attends in READINGS.items()},
            ADDED: _normal(plain * factor),
            Phrase("mask.added-scaled"): _normal(plain * factor**seen.problem.logit_scale),
            Phrase("mask.multiplied"): _normal(scaled),
            INTO_WEIGHTS: plain * fed,
            Phrase("mask.attends-where-largest"): _normal(np.where(largest, 1.0, 0.0)),
        }
    found: dict[Phrase, Array] = {}
    for hypothesis, predicted in every.items():
        empty = (np.nan_to_num(predicted) == 0).all(axis=-1).any()
        repeated = any(_same(predicted, known) for known in found.values())
        if not repeated and not (empty and hypothesis != INTO_WEIGHTS):
            found[hypothesis] = predicted
    return found


def among(plain: Array, visible: BoolArray) -> Array:
    """Return the weights `plain` renormalised over the visible keys; NaN if a query has none."""
    with np.errstate(all="ignore"):
        return _normal(plain * visible)


def added_to(plain: Array, added: Array) -> Array:
    """Return what the weights `plain` become if `added` is added to the logits; −inf blocks."""
    with np.errstate(all="ignore"):
        return _normal(plain * np.exp(added - added.max(axis=-1, keepdims=True)))


def follows(lab: Laboratory, seen: Seen, visible: BoolArray, *, changed: bool = True) -> bool:
    """Return whether the weights are those of a mask that leaves only these keys visible.

    The weights of fully masked queries are not compared with any prediction.

    Args:
        lab: the laboratory.
        seen: an answer, with the weights that were applied.
        visible: whether each key is visible, `[batch heads query key]`.
        changed: whether the weights of fully masked queries must at least differ from those without
            a mask.
    """
    rows = np.asarray(visible.any(axis=-1, keepdims=True))
    # NaN in one head spreads to the query's whole output, so the other heads show it too.
    lost = np.isnan(seen.applied) & ~rows.all(axis=1, keepdims=True)
    predicted = np.where(rows & ~lost, among(lab.unmasked(seen), visible), seen.applied)
    if not lab.alike(seen, predicted):
        return False
    blocked = ~visible.any(axis=(1, 3))
    return not changed or bool((rows_changed(lab, seen) | ~blocked).all())


def _normal(weights: Array) -> Array:
    return weights / weights.sum(axis=-1, keepdims=True)


def _same(one: Array, other: Array) -> bool:
    # `np.allclose` takes four times as long, and there are dozens of predictions for each answer.
    with np.errstate(invalid="ignore"):
        near = (np.abs(one - other) <= 1e-9 * np.abs(other)) & np.isfinite(other)
    return bool((near | (one == other) | (np.isnan(one) & np.isnan(other))).all())


def rows_changed(lab: Laboratory, seen: Seen) -> BoolArray:
    """Return which queries `[batch query]` have weights that differ from those without a mask."""
    noise = lab.noise(seen.problem)
    with np.errstate(invalid="ignore"):
        near = np.abs(seen.applied - lab.unmasked(seen)) <= 12 * noise
    return np.asarray(~near.all(axis=(1, 3)))


# Where a causal flag may put its triangle


def triangles(shape: Shape) -> Iterator[tuple[Phrase, BoolArray]]:
    """Yield each known effect of a causal flag, with the keys that it leaves visible.

    The keys are given as a pattern `[1 1 query key]`. Correct effects come first. If several
    effects have the same pattern, only the first of them is included.
    """
    known: set[bytes] = set()
    for found, visible in _every_triangle(shape):
        if visible.tobytes() not in known:
            known.add(visible.tobytes())
            yield found, visible


def _every_triangle(shape: Shape) -> Iterator[tuple[Phrase, BoolArray]]:
    queries, keys = shape.query_length, shape.key_length
    names = {"top-left": 0, "bottom-right": keys - queries}
    aligned = {
        Phrase("causal.square" if queries == keys else f"causal.{name}"): offset
        for name, offset in names.items()
    }

    def tri(offset: int) -> BoolArray:
        return np.tri(queries, keys, offset, dtype=np.bool_)[None, None]

    for found, offset in aligned.items():
        yield found, tri(offset)
    yield Phrase("causal.ignored"), tri(keys)
    last = (np.arange(queries) == queries - 1)[:, None]
    for found, offset in aligned.items():
        about: dict[str, Argument] = {"triangle": found}
        yield Phrase("causal.strict", about), tri(offset - 1)
        yield Phrase("causal.next-too", about), tri(offset + 1)
        yield Phrase("causal.but-last-query", about), tri(offset) | last
        yield Phrase("causal.other-half", about), ~tri(offset - 1)


# How an implementation may interpret the axes of an array


def shown(layout: str) -> str:
    """Return a layout as text for cards: "(batch heads) 1 key" becomes "batch·heads 1 key"."""
    return " ".join("·".join(names) or "1" for names in layouts.parse(layout))


def readings(shape: tuple[int, ...], sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield every layout over batch, heads, query and key that fits an array of this shape."""
    joined = [
        names for count in range(1, len(AXES) + 1) for names in itertools.permutations(AXES, count)
    ]
    choices: list[list[str]] = []
    for size in shape:
        axes = [
            names[0] if len(names) == 1 else f"({' '.join(names)})"
            for names in joined
            if math.prod(sizes[name] for name in names) == size
        ]
        choices.append(["1", *axes] if size == 1 else axes)
    for chosen in itertools.product(*choices):
        # A layout that names an axis twice is invalid.
        with suppress(WrongDeclaration):
            layouts.parse(" ".join(chosen))
            yield " ".join(chosen)


def read_as(lab: Laboratory, seen: Seen, fed: Array, *, attends: bool) -> list[str]:
    """Return each layout of the mask `fed` that explains the weights, as text from `shown`.

    If a query is fully masked in a layout, its weights must merely differ from those without a
    mask.

    Args:
        lab: the laboratory.
        seen: the answer to a call with this mask.
        fed: the mask, in the shape in which it was passed.
        attends: whether nonzero elements of the mask allow attention; if not, they block it.
    """
    shape = seen.problem.shape.logits
    sizes = dict(zip(AXES, shape, strict=True))
    visible = {
        reading: np.broadcast_to((from_layout(fed, reading, sizes) != 0) == attends, shape)
        for reading in readings(fed.shape, sizes)
    }
    return [shown(reading) for reading, keys in visible.items() if follows(lab, seen, keys)]


def read_resized(lab: Laboratory, seen: Seen, fed: Array, *, attends: bool) -> Phrase:
    """Return how the implementation makes a mask of a wrong size fit.

    The arguments are those of `read_as`. Return the empty phrase if no known way explains the
    weights.
    """
    shape = seen.problem.shape.logits
    sizes = dict(zip(AXES, shape, strict=True))
    visible = (fed != 0) == attends
    for reading, axes, keys in _resized(visible, fed, sizes):
        if follows(lab, seen, np.broadcast_to(keys, shape)):
            return Phrase(reading, {"axes": axes})
    return NOTHING


def _resized(
    visible: BoolArray, fed: Array, sizes: Mapping[str, int]
) -> Iterator[tuple[str, str, BoolArray]]:
    """Yield the known ways in which a mask of a wrong size may be made to fit.

    Each is the id of the way, a layout, and an array of the keys that would then be visible.

    Args:
        visible: for each element of the mask, whether it makes a key visible.
        fed: the mask as passed, of the same shape as `visible`.
        sizes: the sizes of the axes by name.
    """
    keys, heads = sizes["key"], sizes["heads"]
    *leading, length = visible.shape
    if length < keys:
        for reading, rest in (("axes.rest-blocked", False), ("axes.rest-visible", True)):
            padding = [(0, 0)] * len(leading) + [(0, keys - length)]
            padded = np.pad(visible, padding, constant_values=rest)
            for axes in readings(padded.shape, sizes):
                if axes.endswith("key"):
                    yield reading, shown(axes), from_layout(padded, axes, sizes)
    if len(leading) == 2 and leading[1:] == [sizes["query"]] and length == keys:
        given = leading[0]
        for reading, of_head in (
            ("axes.first-heads", np.arange(heads)),
            ("axes.last-head-repeated", np.minimum(np.arange(heads), given - 1)),
            ("axes.heads-in-turn", np.arange(heads) % given),
        ):
            if of_head[-1] < given:
                yield reading, "heads query key", visible[of_head][None]
    if fed.shape == (sizes["batch"],):
        yield "axes.lengths", "batch", (np.arange(keys) < fed[:, None])[:, None, None, :]
