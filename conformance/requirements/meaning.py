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

The requirement that the meaning is the declared one is checked in a problem with the sharing, score
and heads of the case. If an implementation has a mistake elsewhere, its output may not show the
weights, although it applies the mask correctly. In this case, the meaning is found by changing a
token: the queries whose output changes are those that attend to it.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from conformance.adapter import layouts
from conformance.adapter.arguments import AXES, MaskArgument, Native, to_layout
from conformance.definition.arithmetic import Exact
from conformance.definition.attention import forward
from conformance.definition.dtypes import Array, BoolArray, Wide, dtype_of
from conformance.definition.problem import Shape
from conformance.errors import Unsupported
from conformance.records.findings import (
    NOTHING,
    Argument,
    Entry,
    Finding,
    Part,
    Phrase,
    Verdict,
)
from conformance.requirements.examination import Examination
from conformance.requirements.invariance import with_other_content
from conformance.requirements.laboratory import (
    CANNOT_BE_ASKED,
    REFUSED,
    Accepted,
    Laboratory,
    NoAnswer,
    Refused,
    numbers,
)
from conformance.requirements.requirement import requirement
from conformance.words import say

# Forms in which an array is passed to a mask argument, with values that tell meanings apart


@dataclass(frozen=True)
class MaskForm:
    """A form of mask arrays: their dtype, and the values of which each row consists.

    Attributes:
        phrase: the phrase that names the form, such as "form.zero-one" with a dtype.
        values: the values, which are repeated and shuffled in each row. With a finite number in
            addition to −inf, "added" differs from "blocks"; with 0.25 in addition to 1, "attends"
            differs from "attends above ½"; and with 2, both differ from "attends where 1".
        dtype: a NumPy dtype, or "own" for the dtype of the implementation's inputs.
    """

    phrase: Phrase
    values: tuple[float, ...]
    dtype: str

    def array(self, values: Array) -> Native:
        """Return a mask with these values in the dtype of this form.

        If that is the dtype of the inputs ("own"), the mask remains in float64, which the call
        converts, unless it is `Wide`.
        """
        if self.dtype == "float64":
            return values.view(Wide)
        return values if self.dtype == "own" else values.astype(self.dtype)


def _form(kind: str, *values: float, dtype: str = "float32", own: bool = False) -> MaskForm:
    arguments: dict[str, Argument] = {"dtype": dtype} if kind != "bool" else {}
    if kind == "zero-large":
        arguments["large"] = f"{-values[1]:.0e}".replace("e+0", "e")
    return MaskForm(Phrase(f"form.{kind}", arguments), values, "own" if own else dtype)


OTHERS = ("float16", "float64")
INFINITE = float("-inf")
BOOL = _form("bool", 0, 1, dtype="bool")
ZERO_ONE = _form("zero-one", 0, 1)
ZERO_INFINITE = _form("zero-infinite", 0, INFINITE, -0.75)
LARGE = _form("zero-large", 0, -1e9, -0.75)
LEAST = _form("zero-least", 0, -dtype_of("float32").largest, -0.75)
FORMS = (
    BOOL,
    *(_form("zero-one", 0, 1, dtype=whole) for whole in ("uint8", "int32", "int64")),
    ZERO_ONE,
    _form("zero-quarter-one", 0, 0.25, 1),
    _form("zero-one-two", 0, 1, 2),
    ZERO_INFINITE,
    LARGE,
    LEAST,
    *(_form("zero-infinite", 0, INFINITE, -0.75, dtype=other) for other in OTHERS),
)
"""The forms of masks to try if the inputs have the laboratory's dtype, which is normally float32.
The last forms have other floating dtypes."""


def zero_one(argument: MaskArgument, usual: MaskForm = ZERO_ONE) -> MaskForm:
    """Return the form with 0 and 1 in the dtype that the argument declares.

    If the argument declares no dtype, return `usual`.
    """
    return _form("zero-one", 0, 1, dtype=argument.dtype) if argument.dtype else usual


def own_forms(dtype: str) -> tuple[MaskForm, ...]:
    """Return the forms of masks to try with inputs in this dtype.

    The masks are in bool, in this dtype, or in float32.
    """
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


def forms_of(dtype: str) -> tuple[MaskForm, MaskForm, MaskForm, MaskForm, MaskForm]:
    """Return the forms of masks that can block a key, for inputs in this dtype.

    They are booleans, 0 and 1, 0 and −inf, 0 and a large negative number (−1e9, or −1e4 in
    float16), and 0 and the most negative number of the dtype. The last three also contain −0.75.
    """
    if dtype == "float32":
        return BOOL, ZERO_ONE, ZERO_INFINITE, LARGE, LEAST
    boolean, ones, infinite, large, *_, least = own_forms(dtype)
    return boolean, ones, infinite, large, least


def telling(
    form: MaskForm, argument: MaskArgument, shape: Shape, seed: int = 0
) -> tuple[Array, Array]:
    """Return a random mask of this form, once with all axes and once in the argument's layout.

    Its rows differ, so that its axes can be told apart, unless `arrange` finds no such order, for
    example because there are too few permutations of the values. The order depends on `seed`.

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
def _values(form: MaskForm, layout: str, shape: Shape, seed: int) -> Array:
    random = np.random.default_rng([7, seed, zlib.crc32(str(form.phrase).encode())])
    named = layouts.axes(layout)
    sizes = [n if a in named else 1 for a, n in zip(AXES, shape.logits, strict=True)]
    last = "key" if "key" in named else "query"
    return arrange(random, sizes, AXES.index(last), form.values)


def arrange(
    random: np.random.Generator, sizes: Sequence[int], axis: int, values: tuple[float, ...]
) -> Array:
    """Return an array of these sizes with the values in random order in each row along `axis`.

    The values are repeated or cut off to fill a row. The array is drawn again, up to a hundred
    times, until no two rows are equal; if they still are, the last draw is returned. It is drawn
    once if there are more rows than orders of a row.
    """
    length = sizes[axis]
    row = np.resize(np.array(values, np.float64), length)
    rows = int(np.prod(sizes)) // max(length, 1)
    repeats = np.unique(row, return_counts=True)[1].tolist()
    orders = math.factorial(length) // math.prod(map(math.factorial, repeats))
    for _ in range(101 if rows <= orders else 1):
        best = np.stack([random.permutation(row) for _ in range(rows)]) if rows else row[None][:0]
        if len({row.tobytes() for row in best}) == rows:
            break
    shape = [*sizes[:axis], *sizes[axis + 1 :], length]
    return np.moveaxis(best.reshape(shape), -1, axis)


# Meanings of an array

ATTENDS, BLOCKS = Phrase("mask.attends"), Phrase("mask.blocks")
BLOCKS_WHERE_ONE = Phrase("mask.blocks-where-one")
BLOCKS_EVERYTHING = Phrase("mask.blocks-everything")
ADDED, IGNORED = Phrase("mask.added"), Phrase("mask.ignored")
INTO_WEIGHTS = Phrase("mask.multiplied-into-weights")
REJECTED, UNEXPLAINED = Phrase("mask.rejected"), Phrase("mask.unexplained")


def meaning(lab: Laboratory, seen: Accepted, fed: Array) -> Phrase:
    """Return the first meaning of the mask `fed` that predicts the weights applied in `seen`.

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
"""For each meaning, a function that returns True where a mask allows attention. A simple meaning
precedes those that differ from it only in numbers other than 0 and 1."""

BLOCKING = (BLOCKS, BLOCKS_WHERE_ONE)
ATTENDING = tuple(found for found in READINGS if found not in BLOCKING)
"""The meanings in which 1 allows attention; in those of `BLOCKING`, it blocks."""


def predictions(lab: Laboratory, seen: Accepted, fed: Array) -> dict[Phrase, Array]:
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
    """Return the weights `plain` renormalised over the keys where `visible` is True.

    The weights of a query without visible keys are NaN.
    """
    with np.errstate(all="ignore"):
        return _normal(plain * visible)


def added_to(plain: Array, added: Array) -> Array:
    """Return what the weights `plain` become if `added` is added to the logits; −inf blocks.

    The weights of a query for which all keys are blocked are NaN.
    """
    with np.errstate(all="ignore"):
        return _normal(plain * np.exp(added - added.max(axis=-1, keepdims=True)))


def follows(lab: Laboratory, seen: Accepted, visible: BoolArray, *, changed: bool = True) -> bool:
    """Return whether the weights are those of a mask that leaves only the keys `visible`.

    Where a head masks a query fully, its weights are not compared with any prediction. If all heads
    mask the query fully, its weights must at least differ from those without a mask, unless
    `changed` is False. `visible` is `[batch heads query key]`, True for the keys.
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


def rows_changed(lab: Laboratory, seen: Accepted) -> BoolArray:
    """Return True for queries `[batch query]` whose weights a mask has changed in some head."""
    noise = lab.noise(seen.problem)
    with np.errstate(invalid="ignore"):
        near = np.abs(seen.applied - lab.unmasked(seen)) <= 12 * noise
    return np.asarray(~near.all(axis=(1, 3)))


# Where a causal flag may put its triangle


def triangles(shape: Shape) -> Iterator[tuple[Phrase, BoolArray]]:
    """Yield each known effect of a causal flag, with the keys that it leaves visible.

    The pattern `[1 1 query key]` is True where a key is visible. Correct effects come first. If
    several effects have the same pattern, only the first of them is included.
    """
    queries, keys = shape.query_length, shape.key_length
    aligned = {Phrase("causal.top-left"): 0, Phrase("causal.bottom-right"): keys - queries}
    if queries == keys:
        aligned = {Phrase("causal.square"): 0}

    def tri(offset: int) -> BoolArray:
        return np.tri(queries, keys, offset, dtype=np.bool_)[None, None]

    every = [(found, tri(offset)) for found, offset in aligned.items()]
    every.append((Phrase("causal.ignored"), tri(keys)))
    last = (np.arange(queries) == queries - 1)[:, None]
    for found, offset in aligned.items():
        about: dict[str, Argument] = {"triangle": found}
        every += [
            (Phrase("causal.strict", about), tri(offset - 1)),
            (Phrase("causal.next-too", about), tri(offset + 1)),
            (Phrase("causal.but-last-query", about), tri(offset) | last),
            (Phrase("causal.other-half", about), ~tri(offset - 1)),
        ]
    known: set[bytes] = set()
    for found, visible in every:
        if visible.tobytes() not in known:
            known.add(visible.tobytes())
            yield found, visible


# What an argument means, and whether that is declared

STILL, MOVED = 12.0, 24.0
"""The changes, in σ, below which an output counts as unaffected, and above which as affected."""


def examined(lab: Laboratory, argument: MaskArgument, form: MaskForm, dtype: str = "") -> Entry:
    """Return an entry for the convention card: what a mask argument means in a given form.

    `dtype` is that of the inputs; "" stands for the laboratory's.
    """
    about: dict[str, Argument] = {"argument": argument.name, "form": form.phrase}
    subject = Phrase("mask.meaning", about)
    if dtype:
        subject = Phrase("mask.meaning-for-inputs", about | {"dtype": dtype})
    problem = lab.problem(dtype=dtype)
    fed, laid = telling(form, argument, problem.shape)
    found = lab.ask(problem, {argument.name: form.array(laid)})
    # What an adapter declares about numbers holds for masks in the dtype of the inputs.
    own = not (dtype or form.dtype in OTHERS) or form.dtype in ("own", "bool")
    if argument.dtype:
        own = form.dtype in (argument.dtype, "bool")
    declared = declaration(argument, form) if own else NOTHING
    if isinstance(found, Refused):
        value, evidence = REJECTED if found.value == REFUSED else found.value, found.told
        # Integers may be refused where numbers are declared: many libraries require floats.
        another = "int" in form.dtype and form.dtype != argument.dtype
        excused = found.value == CANNOT_BE_ASKED or another
        declared = NOTHING if excused else declared
    else:
        handed = np.asarray(form.array(fed), np.float64)
        value, evidence = (_rows if fed.shape[-1] == 1 else _weights)(lab, found, handed)
        if lab.case and fed.shape[-1] > 1 and value in (UNEXPLAINED, BLOCKS_EVERYTHING):
            influence = by_influence(lab, argument, form)
            value = value if influence == UNEXPLAINED else influence
    return Entry(subject, value, evidence, declared, not declared or value == declared)


def declaration(argument: MaskArgument, form: MaskForm) -> Phrase:
    """Return the meaning that the adapter declares for this form, or an empty phrase.

    An argument that is declared to take only 0 and 1 has no declared meaning in other forms. One
    that is declared to be ignored, or to be refused, is so in the forms that it would take.
    """
    if argument.effect != "always" and (argument.true if form.dtype == "bool" else argument.number):
        return IGNORED if argument.effect == "none" else REJECTED
    if form.dtype == "bool":
        return Phrase(f"mask.{argument.true}") if argument.true else NOTHING
    if "int" in form.dtype and argument.whole is not None:
        argument = dataclasses.replace(argument, number=argument.whole)
    if argument.number == "added":
        return ADDED
    values = np.array(form.values)
    attends = argument.attending(values)
    if attends is None:
        return NOTHING
    if attends.all() or not attends.any():
        return IGNORED if attends.all() else BLOCKS_EVERYTHING
    return next(it for it, reading in READINGS.items() if (reading(values) == attends).all())


def _weights(lab: Laboratory, seen: Accepted, fed: Array) -> tuple[Phrase, str]:
    """Return the meaning of the mask `fed`, and evidence: the first query's mask and weights."""
    arrays = (np.broadcast_to(fed, seen.applied.shape), seen.applied, lab.unmasked(seen))
    row, weights, without = (numbers(array[0, 0, 0]) for array in arrays)
    evidence = f"entry 0, head 0, query 0: fed {row}, weights {weights}, without it {without}"
    return meaning(lab, seen, fed), evidence


def _rows(lab: Laboratory, seen: Accepted, fed: Array) -> tuple[Phrase, str]:
    """Return the meaning of a mask without a key axis, and evidence.

    The evidence is a text that lists the queries of batch entry 0 whose weights the mask changed.
    """
    changed = rows_changed(lab, seen)
    marked = np.broadcast_to(fed[:, 0, :, 0], changed.shape)
    rows = ", ".join(str(row) for row in np.flatnonzero(changed[0])) or "none"
    evidence = f"entry 0: fed {numbers(marked[0])} to the queries; rows that changed: {rows}"
    for value, expected in (
        (IGNORED, np.zeros_like(changed)),
        (ATTENDS, marked == 0),
        (BLOCKS, marked != 0),
        (ADDED, np.isneginf(marked) | (marked <= -1e3)),
    ):
        if (changed == expected).all():
            return value, evidence
    return UNEXPLAINED, evidence


def by_influence(lab: Laboratory, argument: MaskArgument, form: MaskForm) -> Phrase:
    """Return the meaning of the argument, inferred from the queries that the first token affects.

    Return `UNEXPLAINED` if no meaning predicts which queries are affected, if it is doubtful
    whether some query is, or if a call gives no answer.
    """
    problem = lab.problem()
    shape = problem.shape
    for seed in range(1000):
        fed = telling(form, argument, shape, seed)[0][:, :1]
        marked = np.isfinite(fed) if INFINITE in form.values else fed != 0
        some, every = marked.any(axis=-2), marked.all(axis=-2)
        if shape.query_length > 1 == marked.shape[2] or (some & ~every).all():
            break
    laid = to_layout(fed, argument.layouts[0], shape.logits, broadcast=False)
    assert laid is not None
    natives = {argument.name: form.array(laid)}
    tokens = np.broadcast_to(np.arange(shape.key_length) == 0, (shape.batch, shape.key_length))
    other = with_other_content(problem, tokens, np.random.default_rng(0))
    asked = (lab.ask(problem, natives), lab.ask(other, natives), lab.ask(problem))
    outputs = [found.answer.output for found in asked if isinstance(found, Accepted)]
    if len(outputs) < len(asked):
        return UNEXPLAINED
    noise = lab.noise(problem).max(axis=(1, 3))
    with np.errstate(invalid="ignore"):
        changes = [np.abs(outputs[0] - output).max(axis=-1) / noise for output in outputs[1:]]
    moved, still = changes[0] > MOVED, changes[0] < STILL
    visible = np.broadcast_to(marked[:, 0, :, 0], moved.shape)
    if not (moved | still).all():
        return UNEXPLAINED
    if (moved == visible).all():
        return ADDED if INFINITE in form.values else ATTENDS
    if (moved == ~visible).all():
        return BLOCKS
    if moved.all() and (changes[1] < STILL).all():
        return IGNORED
    # A boolean that leaves some weight on every key is as likely to block with too small a number.
    added = moved.all() and INFINITE not in form.values and form.dtype != "bool"
    return ADDED if added else UNEXPLAINED


def observations(ex: Examination) -> list[tuple[MaskArgument, MaskForm, Entry]]:
    """Return what each mask argument means in each form that it is declared to take.

    Each element of the list is an argument, a form, and the entry with the observed meaning. Only
    three forms are tried: booleans, 0 and 1, and 0 and −inf. The result is cached. Raise
    `Unsupported` if the adapter cannot express the case.
    """

    def look() -> list[tuple[MaskArgument, MaskForm, Entry]]:
        ex.adapter.check(ex.problem)
        lab = Laboratory(ex.adapter, ex.dtype, ex.device, ex.mode, case=ex.problem.shape)
        with suppress(NoAnswer):
            lab.plain()
        boolean, ones, infinite = own_forms(ex.dtype)[:3]
        return [
            (argument, form, examined(lab, argument, form))
            for argument in ex.adapter.mask_arguments
            for form, taken in (
                (boolean, argument.true),
                (infinite, argument.number == "added"),
                (zero_one(argument, ones), argument.number),
            )
            if taken
        ]

    key = ("polarity", id(ex.adapter), ex.case.id, ex.dtype, ex.device, ex.mode.name)
    return ex.bench.answers.get(key, look)


@requirement(
    "mask.polarity-is-as-declared",
    "Each mask argument means what the adapter declares: True attends or blocks, numbers are added "
    "or say who attends. An experiment passes the argument natively and finds its meaning.",
    revision=2,
    why="`True` attends in one library and blocks in the next; a wrong guess costs a week.",
)
def polarity(ex: Examination) -> Finding | None:
    """Pass arrays to each mask argument: booleans, 0 and 1, and 0 and −inf, as far as the adapter
    declares that the argument takes them. The output of the problem is the attention weights. The
    meaning of the array that predicts these weights must be the declared one."""
    if not ex.adapter.mask_arguments:
        raise Unsupported("no mask arguments are declared")
    if not ex.varies_arguments:
        return None
    meanings: list[Part] = []
    wrong = []
    tried = observations(ex)
    if tried and all(entry.value == CANNOT_BE_ASKED for *_, entry in tried):
        raise Unsupported(tried[0][-1].evidence.removeprefix("unsupported: "))
    for argument, form, entry in tried:
        about: dict[str, Argument] = {"argument": argument.name, "form": Phrase(form.phrase.id)}
        meanings.append(Phrase("mask.means", about | {"meaning": entry.value}))
        if not entry.agrees:
            given = say(Phrase("mask.means", about | {"meaning": entry.declared})).replace("=", " ")
            wrong.append(f"declared {given}, observed {say(entry.value)}: {entry.evidence}")
    value = Phrase("mask.meanings", {"meanings": meanings})
    verdict: Verdict = "deviates" if wrong else "conforms"
    return Finding(polarity.id, verdict, detail="; ".join(wrong), value=value)
