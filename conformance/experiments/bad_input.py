"""Experiment on contradictory inputs: do they cause an error, a wrong read, or a crash?

Every array that is passed lies inside a larger one. A call is repeated with other numbers around
its arrays. If this changes the answer, it was computed from numbers that were not passed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import einops
import numpy as np

from conformance.adapter.arguments import AXES
from conformance.adapter.function import Function
from conformance.definition.attention import heads_alone
from conformance.definition.dtypes import Array, BoolArray, Wide, dtype_of
from conformance.definition.expectation import solve
from conformance.definition.problem import INPUT_AXES, Answer, Problem
from conformance.errors import Unsupported
from conformance.experiments.experiment import Question, topic
from conformance.experiments.masks import Blocking, blocking
from conformance.records.findings import Argument, Phrase
from conformance.requirements.laboratory import Laboratory, Refused, readout_shape

READS_BEYOND = Phrase("bad-input.reads-beyond")
CAST = "bad-input.as-cast"
AROUND = (np.nan, 0.0)
"""The values that surround each array: first NaN or True, then 0 or False."""
SHORT = 3
"""A length that is less than the usual number of keys, and differs from all other usual sizes."""

Inputs = dict[str, Array]
Meanings = Mapping[str, Callable[[], Array]]
"""Functions that compute the outputs of well-defined calls, by the id that describes the call."""


@topic(
    "bad-input",
    "Inputs that contradict each other",
    "What does it do if lengths, batches, dtypes, widths or masks do not fit together?",
    place=140,
    every_mode=True,
    shared=True,
    costly=True,
    apart=True,
)
def bad_input(lab: Laboratory) -> Iterator[Question]:
    """Pass inputs and masks whose sizes or dtypes contradict each other, in a separate process.
    See whether the implementation raises an error, returns an answer, or reads numbers outside the
    arrays. If it returns an answer, see which well-defined call has the same answer."""
    if lab.bridge is None:
        raise Unsupported("this adapter hands on NumPy arrays as they are")
    if lab.fixed_sharing is None or not lab.adapter.projections_supplied:
        # The heads that a function receives are always separate arrays.
        yield from _inputs(lab)
    for argument in lab.arguments():
        if argument in lab.adapter.mask_arguments:
            way = blocking(lab, argument)
            if way is not None:
                yield from _masks(lab, way)


def _question(
    lab: Laboratory,
    subject: Phrase,
    problem: Problem,
    given: Mapping[str, np.ndarray],
    masks: Mapping[str, np.ndarray],
    meanings: Meanings,
) -> Question:
    """Return the question of what a call does with inputs and masks that do not fit together.

    Args:
        lab: the laboratory.
        subject: the subject of the entry.
        problem: a similar problem, as in `Laboratory.attempt`.
        given: the inputs to replace.
        masks: the array for each mask argument.
        meanings: functions that compute the outputs of calls that may be equivalent; the value of
            the entry names the first call with an equal output.
    """
    fed = "passed " + ", ".join(
        f"{name} {_dtype_passed(lab, array)}{list(array.shape)}"
        for name, array in (*given.items(), *masks.items())
    )

    def value_of() -> tuple[Phrase, str]:
        found = lab.attempt(problem, given, masks, around=AROUND[0])
        if isinstance(found, Refused):
            return found.value, f"{found.told}; {fed}"
        # The last call has the first numbers around its arrays, as memory farther away may change.
        for around in (AROUND[1], AROUND[0]):
            other = lab.attempt(problem, given, masks, around=around)
            if isinstance(other, Refused) or not _alike(found, other):
                return READS_BEYOND, f"the answer depends on what lies beside the arrays; {fed}"
        evidence = f"{fed}; returned {found.dtypes.get('output', '')}"
        about: dict[str, Argument] = {"shape": " ".join(map(str, found.output.shape))}
        # If dtypes differ, the coarser one determines the tolerance.
        coarser = max(dtype_of(name).roundoff for name in (lab.dtype, _other_dtype(lab.dtype)))
        allowed = 1e-3 + 16 * (coarser if "dtype" in subject.id else dtype_of(lab.dtype).roundoff)
        promoted = lab.dtype != "float64" == found.dtypes.get("output")
        for name, meaning in meanings.items():
            want = meaning()
            if want.shape == found.output.shape and _near(found.output, want, allowed):
                name = "bad-input.as-promoted" if promoted and name == CAST else name
                return Phrase("bad-input.answers-as", about | {"as": Phrase(name)}), evidence
        return Phrase("bad-input.answers", about), evidence

    return Question(subject, value_of)


def _alike(one: Answer, other: Answer) -> bool:
    """Return whether two answers have the same arrays up to rounding; NaN equals NaN."""
    first, second = one.arrays(), other.arrays()
    return first.keys() == second.keys() and all(
        first[name].shape == second[name].shape and _near(first[name], second[name], 1e-2)
        for name in first
    )


def _near(one: Array, other: Array, allowed: float) -> bool:
    """Return whether two arrays differ by at most `allowed` times the largest number in `other`.

    Equal infinities do not differ, nor do two NaN.
    """
    largest = np.abs(other[np.isfinite(other)]).max(initial=0.0)
    with np.errstate(invalid="ignore"):
        close = np.abs(one - other) <= allowed * largest
    return bool((close | (one == other) | (np.isnan(one) & np.isnan(other))).all())


# Query, key and value


def _inputs(lab: Laboratory) -> Iterator[Question]:
    problem = lab.problem()
    axes = "batch length width"
    if lab.adapter.projections_supplied:
        problem = heads_alone(problem)
        if isinstance(lab.adapter, Function):
            axes = lab.adapter.layout
    shape = problem.shape
    names = shape.distinct_inputs()
    heads = {"query": shape.heads, "key": shape.kv_heads, "value": shape.kv_heads}

    def passed(inputs: Inputs) -> dict[str, Any]:
        if "heads" not in axes:
            return dict(inputs)
        pattern = f"batch length (heads head) -> {axes}"
        return {n: einops.rearrange(a, pattern, heads=heads[n]) for n, a in inputs.items()}

    usual: Inputs = {name: getattr(problem, name) for name in names}
    whole = passed(usual)

    def bad(name: str, changed: Mapping[str, Any], meanings: Meanings | None = None) -> Question:
        given = whole | {n: changed[n] for n in names if n in changed}
        subject = Phrase(f"bad-input.{name}")
        return _question(lab, subject, problem, given, {}, meanings or {})

    def sized(name: str, sizes: Mapping[str, int], **meanings: Inputs) -> Question:
        """Return a question about inputs whose batch sizes or lengths are changed to `sizes`.

        `meanings` are, by name, the inputs that an implementation may use in place of them.
        """
        changed = {}
        for one, array in usual.items():
            batch = sizes.get(f"{one} batch", array.shape[0])
            length = sizes.get(f"{one} length", array.shape[1])
            changed[one] = _cut(array, batch, length)
        solved = {
            f"bad-input.as-{way}": partial(_solved, problem, changed | meant)
            for way, meant in meanings.items()
        }
        return bad(name, passed(changed), solved)

    query, value = problem.query, problem.value
    batch = shape.batch
    both = ("key", "value") if "value" in names else ("key",)
    first = {name: array[:1] for name, array in usual.items()}
    repeated = {name: np.repeat(array, batch, axis=0) for name, array in first.items()}
    if "value" in names:
        cut = {name: _cut(usual[name], batch, SHORT) for name in both}
        padded = np.concatenate([cut["value"], 0 * value[:, SHORT:]], axis=1)
        sizes = {"value length": SHORT}
        yield sized("value-short", sizes, cut={"key": cut["key"]}, padded={"value": padded})
        yield sized("key-short", {"key length": SHORT}, cut={"value": cut["value"]})
        alike = {name: usual[name][:, :1].repeat(value.shape[1], axis=1) for name in both}
        yield sized("value-length-of-1", {"value length": 1}, broadcast={"value": alike["value"]})
        yield sized(
            "key-length-of-1",
            {"key length": 1},
            broadcast={"key": alike["key"]},
            cut={"value": value[:, :1]},
            # The weight of a single key is 1; broadcast over the values, it adds them up.
            summed={"value": value.sum(axis=1, keepdims=True)},
        )
        values = {"value": repeated["value"]}
        yield sized("value-batch-of-1", {"value batch": 1}, broadcast=values)
    if "key" in names:
        keys = {name: repeated[name] for name in both}
        yield sized("keys-batch-of-1", {f"{name} batch": 1 for name in both}, broadcast=keys)
        queries, keys = {"query": repeated["query"]}, {name: first[name] for name in both}
        yield sized("query-batch-of-1", {"query batch": 1}, broadcast=queries, first=keys)
        yield sized("query-batch-larger", {"query batch": batch + 1}, cut={"query": query})
    width = axes.split().index("head" if "head" in axes.split() else "width")
    for name in names:
        if name != "value" or "heads" not in axes:
            # A function may accept values of another head size.
            array = np.delete(whole[name], -1, axis=width)
            yield bad(f"{name}-narrow", {name: array})
    if "heads" in axes:
        place = axes.split().index("heads")
        some = {name: whole[name] for name in ("key", "value")}
        indivisible = {n: a.take(range(SHORT + 1), axis=place) for n, a in some.items()}
        yield bad("heads-indivisible", indivisible)
        yield bad("value-heads", {"value": whole["value"].take(range(SHORT), axis=place)})
    for name in names:
        if len(names) > 1:
            native = _other_dtype(lab.dtype)
            rounded = usual | {name: dtype_of(native).round(usual[name])}
            meant_by = {CAST: partial(_solved, problem, rounded)}
            yield bad(f"{name}-dtype", {name: whole[name].astype(native)}, meant_by)
    if lab.dtype != "float64":
        wide = {name: whole[name].view(Wide) for name in names}
        meant_by = {CAST: partial(_solved, problem, {})}
        for name in names if len(names) > 1 else ():
            yield bad(f"{name}-wide", {name: wide[name]}, meant_by)
        if not lab.adapter.projections_supplied:
            # The weights of a layer are not float64.
            yield bad("all-wide", wide, meant_by)
    if "key" in names:
        yield bad("query-rank", {"query": whole["query"][0]})
        yield bad("keys-rank", {name: whole[name][0] for name in both})
    nested = {name: array[None] for name, array in whole.items()}
    joined = {name: array.reshape(1, -1, array.shape[2]) for name, array in usual.items()}

    def within_another_batch(inputs: Inputs) -> Array:
        solved = _solved(problem, inputs).reshape(query.shape[0], query.shape[1], -1)
        return passed({"query": solved})["query"][None]

    ways = {"one-batch": usual, "one-sequence": joined}
    meanings = {f"bad-input.as-{n}": partial(within_another_batch, way) for n, way in ways.items()}
    yield bad("two-batch-axes", nested, meanings)


def _dtype_passed(lab: Laboratory, array: np.ndarray) -> str:
    """Return the dtype in which an array is passed; float64 stands for that of the laboratory."""
    own = array.dtype == np.float64 and not isinstance(array, Wide)
    return lab.dtype if own else str(array.dtype)


def _other_dtype(dtype: str) -> str:
    """Return a dtype that NumPy supports and that differs from this one: float16 or float32."""
    return "float32" if dtype == "float16" else "float16"


def _cut(array: Array, batch: int, length: int) -> Array:
    """Return the array cut or extended to this batch and length; it is extended by repetition."""
    return array.take(range(batch), axis=0, mode="wrap").take(range(length), axis=1, mode="wrap")


def _solved(problem: Problem, inputs: Inputs, mask: BoolArray | None = None) -> Array:
    """Return the definition's output for the problem with these inputs and this mask, or no mask.

    Inputs that are not given are those of the problem; the lengths and the batch follow the inputs.
    """
    given = {name: inputs.get(name, getattr(problem, name)) for name in INPUT_AXES}
    given = problem.shape.spread(given)
    (batch, queries, _), (_, keys, _) = given["query"].shape, given["key"].shape
    shape = dataclasses.replace(problem.shape, batch=batch, query_length=queries, key_length=keys)
    cotangent = np.zeros((batch, queries, shape.output_width))
    return solve(problem.replace(shape=shape, mask=mask, cotangent=cotangent, **given)).output


# Masks


def _masks(lab: Laboratory, way: Blocking) -> Iterator[Question]:
    """Yield questions about masks that are made for sizes other than those of the problem."""
    argument, own = way.argument.name, set(way.axes)
    whole = lab.sizes()
    single = lab.sizes(batch=1, query=1) if lab.sharing != "self" else lab.sizes(batch=1)
    one_head, one_key = lab.sizes(heads=1), lab.sizes(key=1)
    questions = [
        ("keys-few", whole, {"key": SHORT}),
        ("queries-few", whole, {"query": SHORT}),
        ("heads-fewer", whole, {"heads": whole.heads // 2}),
        ("transposed", whole, {"query": whole.key, "key": whole.query}),
        ("batch-over-1", single, {"batch": 2}),
        ("query-over-1", single, {"query": whole.query}),
        ("heads-over-1", one_head, {"heads": 2}),
        ("key-over-1", one_key, {"key": SHORT}),
    ]
    for name, sizes, other in questions:
        if not own.issuperset(other) or other.items() <= sizes.named().items():
            continue
        problem = lab.problem(sizes)
        if lab.adapter.projections_supplied:
            problem = heads_alone(problem)
        made = dataclasses.replace(sizes, **other)
        visible = _visible(made.named(), own)
        native = way.native(visible, readout_shape(made, "separate", "scaled-dot"))
        if not isinstance(native, np.ndarray):
            continue
        subject = Phrase(f"bad-input.mask-{name}", {"argument": argument})
        yield _question(lab, subject, problem, {}, {argument: native}, _readings(problem, visible))


def _visible(made: Mapping[str, int], own: set[str]) -> BoolArray:
    """Return a mask, True where visible, that blocks one key in each row.

    `made` gives the sizes of the axes, but axes that are not in `own` have size 1. Without a key
    axis, the mask blocks some queries.
    """
    sizes = [made[axis] if axis in own else 1 for axis in AXES]
    rows = np.indices(sizes[:3]).sum(axis=0)
    return np.asarray(np.arange(sizes[3]) != (rows % made["key"])[..., None])


def _readings(problem: Problem, visible: BoolArray) -> Meanings:
    """Return, by id, a function for each known reading of a mask that does not fit.

    The function returns the definition's output with the mask that the reading makes of `visible`.
    """
    target = problem.shape.logits
    wanted = tuple(1 if had == 1 else size for had, size in zip(visible.shape, target, strict=True))
    cut = visible[tuple(map(slice, wanted))]
    missing = [(0, want - had) for want, had in zip(wanted, cut.shape, strict=True)]
    fitted = np.pad(cut, missing, constant_values=True)
    readings = {"fitted": partial(_solved, problem, {}, fitted)}
    if visible.size >= fitted.size:
        in_order = visible.ravel()[: fitted.size].reshape(wanted)
        readings["in-memory"] = partial(_solved, problem, {}, in_order)
    if all(1 in pair or len({*pair}) == 1 for pair in zip(visible.shape, target, strict=True)):
        batch, heads, queries, keys = np.broadcast_shapes(visible.shape, target)
        inputs = {name: getattr(problem, name) for name in problem.shape.distinct_inputs()}
        wider = {name: _cut(array, batch, keys) for name, array in inputs.items()}
        wider["query"] = _cut(problem.query, batch, queries)
        # There are no weights for another head, and in self-attention keys are queries.
        if heads == target[1] and ("key" in inputs or keys == target[3]):
            readings["broadcast"] = partial(_solved, problem, wider, visible)
    readings["unmasked"] = partial(_solved, problem, {})
    return {f"bad-input.as-{name}": reading for name, reading in readings.items()}
