"""Experiments on blocked keys: what fully masked queries get, and whether NaN leaks through."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from conformance.adapter import layouts
from conformance.adapter.arguments import AXES, Native
from conformance.definition.dtypes import Array, BoolArray, dtype_of
from conformance.definition.problem import Problem
from conformance.experiments.experiment import mask_lines, output_code, topic
from conformance.experiments.masks import Blocking, blockings
from conformance.experiments.shapes import shown
from conformance.records.findings import NOTHING, Argument, Entry, Phrase
from conformance.requirements.laboratory import (
    SOMETHING_ELSE,
    Accepted,
    Laboratory,
    Natives,
    Outcome,
    Refused,
    numbers,
)
from conformance.requirements.meaning import ADDED, BLOCKING, INFINITE, examined, forms_of
from conformance.requirements.probed import declared_row
from conformance.words import say

ENTRY, QUERY = 0, 1
NAN, ZEROS, UNIFORM = Phrase("row.nan"), Phrase("row.zeros"), Phrase("row.uniform")
OUTPUT_BIAS, MEAN = Phrase("row.output-bias"), Phrase("row.mean-of-values")
BELOW_ONE = Phrase("row.equal-below-one")
FINITE = Phrase("gradients.finite")

NEAR = 0.02
"""The relative difference beyond which sums of weights, and gradients, count as different. In every
dtype, it is larger than their rounding noise."""

_SHOWN = {
    NAN: ("output[0, 0, :4]", "NaN"),
    ZEROS: ("abs(output).max()", "0.0: zeros"),
    OUTPUT_BIAS: ("abs(output - output[0, 0]).max()", "0.0: the output bias alone, for all"),
    MEAN: (
        "abs(output[0] - output[0, 0]).max()",
        "0.0: the mean of the values, for all of its queries",
    ),
}
"""For each observed value, an expression of `output` that shows the value, and a comment on what
is printed."""


@topic(
    "masked-rows",
    "A fully masked query",
    "Is its output NaN, zeros, the output bias, or a mean? Are there NaN in the gradients?",
    place=30,
    every_mode=True,
    shared=True,
    every_dtype=True,
    revision=5,
)
def masked_rows(lab: Laboratory) -> Iterator[Entry]:
    """Block all keys of one query with each mask argument, in each form that blocks keys.
    Examine the output and the weights of that query, and look for NaN in the gradients. Repeat this
    for each layout of the mask that has a key axis, unless a large finite number blocks the keys;
    weights and gradients are then reported only if they differ from those for the first layout.
    Set the causal flag beside the mask too, and report an output that differs from that without."""
    for argument in lab.arguments():
        ways = list(blockings(lab, argument))
        if any(way.hidden == INFINITE for way in ways):
            ways += [
                Blocking(argument, form, 0.0, min(form.values))
                for form in forms_of(lab.dtype)[3:]
                if examined(lab, argument, form).value in (ADDED, *BLOCKING)
            ]
        for way in ways:
            first: dict[str, Phrase] = {}
            for laid_out, visible, native in _laid_out(lab, way):
                about = way.about | ({"laid_out": laid_out} if laid_out else {})
                for entry in _one(lab, way, visible, native, about):
                    kind = entry.subject.id
                    if kind == "fully-masked.output" or entry.value != first.get(kind):
                        yield entry
                    first.setdefault(kind, entry.value)
                if not laid_out and not _is_finite(way):
                    yield from _flagged(lab, way, native, first["fully-masked.output"])


def _is_finite(way: Blocking) -> bool:
    """Return whether keys are hidden by a negative finite number, which may not block fully."""
    return -np.inf < way.hidden < 0


def _laid_out(lab: Laboratory, way: Blocking) -> Iterator[tuple[str, BoolArray, Native]]:
    """Yield a mask that blocks all keys of one query, in each declared layout with a key axis.

    In a layout without a query axis, the mask blocks all keys of all queries of a batch entry. If
    the argument broadcasts, masks with a head axis of size 1 follow. Masks of a shape that has been
    yielded already are left out. If keys are hidden by a large finite number, only the first mask
    is yielded.

    Yields:
        The name of the layout ("" for the first), the visible keys (True) as an array that
        broadcasts to `[batch heads query key]`, and the array to pass.
    """
    shape, argument = lab.problem().shape, way.argument
    known: set[tuple[int, ...]] = set()
    for broadcast, layout in itertools.product((False, True), argument.layouts):
        axes = layouts.axes(layout)
        if "key" not in axes or (broadcast and not argument.broadcasts):
            continue
        visible = np.ones(shape.logits, bool)
        visible[ENTRY, :, QUERY if "query" in axes else slice(None)] = False
        varies = set(axes) - ({"heads"} if broadcast else set())
        visible = visible[tuple(slice(None if axis in varies else 1) for axis in AXES)]
        native = way.native(visible, shape, (layout,), broadcast=broadcast)
        if native is None or np.shape(native) in known:
            continue
        one_head = " with one head for all" if broadcast else ""
        yield f"[{shown(layout)}]{one_head}" if known else "", visible, native
        known.add(np.shape(native))
        if _is_finite(way):
            return


def _one(
    lab: Laboratory,
    way: Blocking,
    visible: BoolArray,
    native: Native,
    about: dict[str, Argument],
) -> Iterator[Entry]:
    problem = lab.problem()
    shape = problem.shape
    natives = {way.argument.name: native}
    found = lab.ask(problem, natives, gradients=True)
    if isinstance(found, Refused):
        # A mask that is attached to a tensor may be lost when a derivative is traced.
        found = lab.ask(problem, natives)
    if isinstance(found, Refused):
        yield Entry(Phrase("fully-masked.output", about), found.value, found.told)
        return
    blocked = np.asarray(~np.broadcast_to(visible, shape.logits).any(axis=(1, 3)))
    value = row_output(lab, found)
    said = lab.adapter.masked_row(lab.mode)
    declared = declared_row(said) if said and not _is_finite(way) else NOTHING
    same = {ZEROS, OUTPUT_BIAS} if not shape.bias else {value}
    yield Entry(
        Phrase("fully-masked.output", about),
        value,
        f"weights applied {numbers(found.applied[ENTRY, 0, QUERY])}",
        declared=declared,
        agrees=not declared or value == declared or {value, declared} == same,
        code="" if "laid_out" in about else _code(lab, way, value),
    )
    if found.answer.weights is not None:
        row = found.answer.weights[ENTRY]
        row = row[0, QUERY] if row.ndim == 3 else row[QUERY]
        plain = lab.plain().answer.weights
        before = None if plain is None else plain[ENTRY].reshape(-1, *plain.shape[-2:])[0, QUERY]
        yield Entry(Phrase("fully-masked.weights", about), _row(row, before), numbers(row))
    if found.answer.gradients:
        yield Entry(Phrase("fully-masked.gradients", about), *_gradients(found, blocked))
        yield from _by_cotangent(lab, about, found, natives, blocked)


def _flagged(lab: Laboratory, way: Blocking, native: Native, usual: Phrase) -> Iterator[Entry]:
    """Yield an entry if the output is not `usual` with the causal flag set beside the mask.

    Yield nothing if the two cannot be combined.
    """
    flag, problem = lab.adapter.causal_flag, lab.problem()
    if flag is None or flag.needs is not None or flag.alone or flag.effect != "always":
        return
    found = lab.ask(problem, {flag.name: True, way.argument.name: native})
    if isinstance(found, Refused):
        return
    value = row_output(lab, found)
    if value == SOMETHING_ELSE:
        alone = lab.ask(problem, {flag.name: True})
        plain = alone.applied[ENTRY, 0, QUERY] if isinstance(alone, Accepted) else None
        value = _row(found.applied[ENTRY, 0, QUERY], plain)
    if value != usual:
        subject = Phrase("fully-masked.output", way.about | {"flagged": flag.name})
        evidence = f"weights applied {numbers(found.applied[ENTRY, 0, QUERY])}"
        yield Entry(subject, value, evidence)


def _by_cotangent(
    lab: Laboratory,
    about: dict[str, Argument],
    whole: Accepted,
    natives: Natives,
    blocked: BoolArray,
) -> Iterator[Entry]:
    """Yield entries that describe the gradients of two losses: on a masked and on other queries.

    Each loss is the sum of the outputs of its queries: their cotangent is 1, and that of others 0.
    The gradients should be those of the output that was returned, whatever convention it follows.
    `blocked` `[batch query]` is True for masked queries, and `whole` is the answer with the usual
    cotangent.
    """
    problem = whole.problem
    alone = np.zeros(blocked.shape, bool)
    alone[ENTRY, QUERY] = True
    shown = whole.applied[ENTRY, :, QUERY]
    others = ~blocked
    for name, rows in (("alone", alone), ("elsewhere", others)):
        cotangent = np.broadcast_to(rows[..., None] * 1.0, problem.cotangent.shape)
        found = lab.ask(problem.replace(cotangent=cotangent), natives, gradients=True)
        subject = Phrase(f"fully-masked.gradients-{name}", about)
        if isinstance(found, Refused):
            yield Entry(subject, found.value, found.told)
            continue
        value, evidence = _gradients(found, blocked)
        if value == FINITE:
            expected = float(others.sum() if name == "elsewhere" else shown.sum(axis=-1).mean())
            value = _sum(found, expected, name)
            if value.id == "gradients.sum":
                value = _unlike(lab, found, shown, whole) or value
            backward = numbers(_values_gradient(found).mean(axis=1))
            evidence = f"sums of weights, by key: {backward} in the gradient of the values"
            if name == "alone":
                evidence += f", {numbers(shown.mean(axis=0))} in the output"
        elif np.isfinite(shown).all():
            value = Phrase("gradients.nan-beside-finite", value.arguments)
        yield Entry(subject, value, evidence)


def _values_gradient(found: Accepted) -> Array:
    """Return, as `[key keys]`, the gradient of the values' indices, averaged over the heads.

    If some queries have the cotangent 1 and the others 0, each column is the sum of these queries'
    weights, as the backward pass has them.
    """
    shape = found.problem.shape
    # The features that hold the keys' indices get a gradient only through the values.
    of_values = found.answer.gradients[shape.array_of("value")][..., : shape.key_length]
    return np.asarray(of_values.sum(axis=0) / shape.heads)


def _sum(found: Accepted, expected: float, name: str) -> Phrase:
    """Return a phrase that compares the sum of the values' finite gradients with `expected`.

    `name` is "alone" if only the masked query has a cotangent, "elsewhere" if only others have.
    """
    sums = _values_gradient(found).sum(axis=0)
    total = round(float(sums.mean()), 2) + 0.0
    if np.isnan(expected):
        return Phrase("gradients.sum-beside-nan", {"sum": total})
    if np.abs(sums - expected).max() > NEAR * max(expected, 1.0):
        return Phrase("gradients.sum-unlike", {"sum": total, "expected": round(expected, 2) + 0.0})
    if name == "elsewhere":
        return Phrase("gradients.of-others")
    return Phrase("gradients.sum", {"sum": total})


def _unlike(lab: Laboratory, found: Accepted, shown: Array, whole: Accepted) -> Phrase | None:
    """Return a phrase that says where gradients are not those of the masked query's output.

    Only the masked query has a cotangent. `shown` `[heads key]` are its weights, which its output
    shows. `whole` is the answer with the usual cotangent. The result is None if all gradients fit,
    or if the output follows no known convention.
    """
    known = [_row(row, plain) for row, plain in zip(shown, _plain_rows(lab, found), strict=True)]
    if SOMETHING_ELSE in known:
        return None
    places = []
    of_values = _values_gradient(found)
    mean = shown.mean(axis=0)
    if np.abs(of_values - mean[:, None]).max() > NEAR * max(float(mean.max()), 1 / len(mean)):
        places.append("values")
    if not shown.any():
        # Zeros depend on nothing; other weights may have lost the logits to rounding only. What is
        # added and cancels around an attention, such as a residual, leaves its rounding noise.
        for name, place in (("query", "masked-queries"), ("key", "keys"), ("value", "values")):
            usual = np.abs(whole.answer.gradients.get(name, 0.0)).max()
            if np.abs(found.answer.gradients.get(name, 0.0)).max() > NEAR * usual:
                places.append(place)
    found_at = [Phrase(f"place.{place}") for place in dict.fromkeys(places)]
    return Phrase("gradients.unlike", {"places": [*found_at]}) if found_at else None


def _plain_rows(lab: Laboratory, found: Accepted) -> Array:
    """Return the weights `[heads key]` of the masked query without a mask."""
    return np.asarray(lab.unmasked(found)[ENTRY, :, QUERY])


def row_output(lab: Laboratory, found: Accepted, entry: int = ENTRY, query: int = QUERY) -> Phrase:
    """Return the phrase for the output of a query.

    There are phrases for NaN, zeros, the output bias alone, the mean of the values, the output
    without a mask, and anything else.
    """
    output = found.answer.output[entry, query]
    if np.isnan(output).any():
        return NAN
    if not output.any():
        return ZEROS
    value = _row(found.applied[entry, 0, query], lab.unmasked(found)[entry, 0, query])
    return {ZEROS: OUTPUT_BIAS, UNIFORM: MEAN}.get(value, value)


def _row(weights: Array, plain: Array | None) -> Phrase:
    if np.isnan(weights).any():
        return NAN
    if not weights.any():
        return ZEROS
    if np.allclose(weights, 1 / len(weights), rtol=0.01, atol=0):
        return UNIFORM
    if np.allclose(weights, weights[0], rtol=0.01, atol=0) and 0 < weights.sum() < 1:
        # For example, the last tile is filled up with keys that get as much.
        return BELOW_ONE
    if plain is not None and np.allclose(weights, plain, rtol=0.01, atol=0):
        return Phrase("row.unmasked")
    return SOMETHING_ELSE


def _gradients(found: Accepted, blocked: BoolArray) -> tuple[Phrase, str]:
    """Return a phrase that says where gradients are NaN or infinite, or `FINITE`, and evidence."""
    places = nan_places(found, blocked)
    if places:
        lost = [name for name, array in found.answer.gradients.items() if np.isnan(array).any()]
        return Phrase("gradients.nan", {"places": [*places]}), f"NaN in {', '.join(lost)}"
    return FINITE, f"all of {', '.join(found.answer.gradients)}"


def nan_places(found: Accepted, blocked: BoolArray) -> list[Phrase]:
    """Return the places where gradients are NaN or infinite, such as "keys" or "parameters".

    `blocked` `[batch query]` is True for masked queries.
    """
    places: list[str] = []
    for name, array in found.answer.gradients.items():
        rows = ~np.isfinite(array).all(axis=-1)
        named = {f"{name}s" if name in ("key", "value") else "parameters": rows}
        if name == "query":
            named = {"masked-queries": rows & blocked, "other-queries": rows & ~blocked}
        places += [place for place, lost in named.items() if lost.any()]
    return [Phrase(f"place.{place}") for place in dict.fromkeys(places)]


def _code(lab: Laboratory, way: Blocking, value: Phrase) -> str:
    if way.argument not in lab.adapter.mask_arguments:
        return ""
    made = mask_lines(
        way.argument.layouts[0], way.form.dtype, way.hidden, None, "blocks every token"
    )
    line, told = _SHOWN.get(value, ("output[0, 0, :4]", say(value)))
    return output_code(lab, way.argument.name, made, line, told)


HIDDEN, VISIBLE = 1, 0
"""The positions of a key that is blocked for every query, and of one that is visible to all."""


@topic(
    "leaks",
    "NaN behind the mask",
    "Does NaN or an infinity in a blocked key or value reach the output or a gradient?",
    place=80,
    every_mode=True,
    shared=True,
    revision=4,
)
def leaks(lab: Laboratory) -> Iterator[Entry]:
    """Put NaN, an infinity or a huge number into a key or value that is blocked for every query.
    Look for it in the output, the weights and the gradients. Then put NaN into a visible key or
    value, and see whether it reaches the output of every query. Repeat this without a mask, and
    also put NaN into a query, to see whether it reaches the output of that query."""
    yield from _unmasked(lab)
    for argument in lab.arguments():
        for way in blockings(lab, argument):
            if "key" in way.axes:
                yield from _behind(lab, way)


INPUTS = {
    "separate": {"query": "query", "key": "key", "value": "value"},
    "memory": {"query": "query", "key": "memory"},
    "self": {"query": "token"},
}
"""For each kind of sharing, the inputs, and what they are called on a convention card."""


def _unmasked(lab: Laboratory) -> Iterator[Entry]:
    """Yield an entry for each input that states whether NaN in it reaches the unmasked output."""
    for name, what in INPUTS[lab.sharing].items():
        about: dict[str, Argument] = {"input": Phrase(f"input.{what}")}
        subject = Phrase("leak.visible-unmasked", about | {"number": Phrase("number.nan")})
        rows = slice(VISIBLE, VISIBLE + 1) if what == "query" else slice(None)
        yield _reached(subject, lab.ask(_spoilt(lab.problem(), name, VISIBLE, np.nan)), rows)


def _spoilt(problem: Problem, name: str, token: int, number: float) -> Problem:
    """Return the problem with `number` in one component of the input `name` at one token.

    All batch entries are changed.
    """
    array = getattr(problem, name).copy()
    # One number is enough: its projection fills the key. A value carries its own index.
    array[:, token, token if name == "value" else -1] = number
    return problem.with_inputs(**{name: array})


def _reached(subject: Phrase, found: Outcome, rows: slice = slice(None)) -> Entry:
    """Return an entry that states whether NaN reaches all, some or no outputs of queries `rows`."""
    if isinstance(found, Refused):
        return Entry(subject, found.value, found.told)
    lost = np.isnan(found.answer.output[:, rows]).any(axis=-1)
    value = "all" if lost.all() else "some" if lost.any() else "none"
    evidence = f"NaN in {lost.mean():.0%} of the outputs"
    return Entry(subject, Phrase(f"leak.visible-reaches-{value}"), evidence)


def _behind(lab: Laboratory, way: Blocking) -> Iterator[Entry]:
    problem = lab.problem()
    visible = (np.arange(problem.shape.key_length) != HIDDEN)[None, None, None]
    natives = way.passed(visible, problem.shape)
    if problem.shape.sharing == "self":
        # As a query, the blocked token attends to others, which is no leak.
        cotangent = problem.cotangent.copy()
        cotangent[:, HIDDEN] = 0
        problem = problem.replace(cotangent=cotangent)
    usual = lab.ask(problem, natives, gradients=True)
    if isinstance(usual, Refused):
        usual = lab.ask(problem, natives)
    largest = dtype_of(problem.dtype).largest
    hidden = {"nan": np.nan, "inf": np.inf, "minus-inf": -np.inf, "large": 1e5, "largest": largest}
    for name, what in INPUTS[problem.shape.sharing].items():
        if what == "query":
            continue
        about = {"input": Phrase(f"input.{what}")} | way.about
        for number_name, number in hidden.items():
            if number_name == "large" and largest <= number:
                continue
            spoilt = _spoilt(problem, name, HIDDEN, number)
            found = lab.ask(spoilt, natives, gradients=True)
            if isinstance(found, Refused):
                # A mask that is attached to a tensor may be lost when a derivative is traced.
                found = lab.ask(spoilt, natives)
            subject = Phrase("leak", about | {"number": Phrase(f"number.{number_name}")})
            if isinstance(found, Refused):
                yield Entry(subject, found.value, found.told)
                continue
            # A finite number that gets through shows in what differs from the usual answer.
            places = _places(found, usual if np.isfinite(number) else None)
            reached = Phrase("leak.reaches", {"places": [*places]})
            yield Entry(subject, reached if places else Phrase("leak.hidden"), _arrays(found))
        subject = Phrase("leak.visible", about | {"number": Phrase("number.nan")})
        yield _reached(subject, lab.ask(_spoilt(problem, name, VISIBLE, np.nan), natives))


def _moved(array: Array, usual: Array | None) -> BoolArray:
    """Return an array, True where `array` is not finite or is far from `usual`.

    If `usual` is None or not finite itself, the elements are not compared with it.
    """
    moved = ~np.isfinite(array)
    if usual is not None and usual.size and np.isfinite(usual).all():
        with np.errstate(invalid="ignore"):
            moved |= np.abs(array - usual) > 0.05 * np.abs(usual).max()
    return moved


def _places(found: Accepted, usual: Outcome | None) -> list[Phrase]:
    """Return the places that a hidden number reaches, apart from the blocked token's own row.

    A place is reached if an element in it is not finite. If `usual`, the outcome without the
    number, is given, a place is also reached if an element in it is far from that outcome.
    """
    queries = np.arange(found.problem.shape.query_length)
    own = found.problem.shape.sharing == "self"
    seen = queries != HIDDEN if own else queries >= 0
    places: list[Phrase] = []
    before = usual.answer if isinstance(usual, Accepted) else None
    moved = {
        name: _moved(array, None if before is None else before.arrays().get(name))
        for name, array in found.answer.arrays().items()
    }
    if moved["output"][:, seen].any():
        places.append(Phrase("place.output"))
    if "weights" in moved and moved["weights"][..., seen, :].any():
        places.append(Phrase("place.weights"))
    if own and before is not None and not np.isfinite(found.answer.output[:, HIDDEN]).all():
        return places
    for name in found.answer.gradients:
        array = moved[f"gradient.{name}"]
        if name == "query":
            array = array[:, seen]
        elif name in ("key", "value"):
            array = np.delete(array, HIDDEN, axis=1)
        else:
            name = "parameters"
        place = Phrase("place.gradients", {"of": name})
        if array.any() and place not in places:
            places.append(place)
    return places


def _arrays(found: Accepted) -> str:
    lost = [name for name, array in found.answer.arrays().items() if not np.isfinite(array).all()]
    return f"not finite: {', '.join(lost)}" if lost else "everything is finite"
