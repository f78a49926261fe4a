"""Judge an output by its arrays alone, and name the mistake that explains it.

The output is compared with the definition, element by element, in units of rounding noise, once for
each reading that the arrays leave open. If it deviates in all of them, `conformance.arrays.search`
looks for the mistake that explains it.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import msgspec
import numpy as np

from conformance.arrays import figure, files, ports, tiles
from conformance.arrays.given import (
    Given,
    Reading,
    readings,
    separate,
)
from conformance.arrays.noise import expected
from conformance.arrays.pairs import PairSearch
from conformance.arrays.parts import NEAR, of_part
from conformance.arrays.search import TELLING, Search
from conformance.causes import precision, softmax
from conformance.causes.diagnose import hypotheses
from conformance.causes.hypothesis import (
    MOST_ELEMENTS,
    Chosen,
    Evidence,
    Maker,
    rms,
)
from conformance.causes.location import last_axis, where_wrong
from conformance.definition.comparison import Comparison, accuracy_class, against, element
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.problem import Answer, Problem
from conformance.definition.statistics import STATISTICS
from conformance.errors import Ambiguous, BadArrays, UnknownName
from conformance.records.findings import INFINITE, NOTHING, Argument, Phrase, Worst
from conformance.records.numbers import LIMIT, ratios
from conformance.words import advice, say

ILL = 0.02
"""Noise above this share of the output's rms, as an rms, is said to leave little to compare."""


NEARER = 0.25
"""An order of axes is the right one if at most this share of the output's variance is unlike what
is expected, and at most this share of what is unlike it in any other order."""

CLEAR = 0.1
"""The share of right elements from which one order of axes is the right one, if no other has half
as many."""

Verdict = Literal["noise", "deviates", "cannot-tell"]


class Told(msgspec.Struct, frozen=True):
    """A statement: its id, its arguments, its English text and, of a cause, what to change."""

    id: str
    text: str
    arguments: dict[str, Argument] = {}
    advice: str = ""


class Difference(msgspec.Struct, frozen=True):
    """How an array differs from what is expected.

    Attributes:
        array: its name: "output", "weights", "log_sum_exp", "gradient.query", ...
        fits: whether it is within the limits.
        max_ratio: the largest |error| in σ; `INFINITE` if an element is NaN or must be exact.
        rms_ratio: the rms of error / σ.
        limit: the largest |error| in σ that is right.
        wrong: the number of elements beyond it.
        size: the number of elements.
        worst: the worst element, or None if the array fits.
        where: what the wrong elements have in common, or None.
    """

    array: str
    fits: bool
    max_ratio: float
    rms_ratio: float
    limit: float
    wrong: int
    size: int
    worst: Worst | None = None
    where: Told | None = None


class Partial(msgspec.Struct, frozen=True):
    """A mistake that explains only some wrong elements: their share, and where they are."""

    cause: Told
    share: float
    where: Told | None = None


class Diagnosis(msgspec.Struct, frozen=True):
    """What arrays say of the attention that made them.

    Attributes:
        verdict: "noise" if the output is that of the definition within rounding noise; "deviates";
            or "cannot-tell" if it is, but would also be with any weights.
        dtype: the dtype whose rounding noise is the measure.
        accuracy: the most accurate class within whose limits all arrays are; "" if none.
        layout: the layout in which query, key and value are read.
        differences: one for each array.
        causes: the mistakes that explain every wrong element and leave every right one. If there
            are several, these numbers do not tell them apart.
        partial: if there are none, mistakes that explain part of the wrong elements.
        assumed: what was not told, and is read so because the numbers fit.
        notes: what limits this answer.
        hidden: if nothing deviates, mistakes that would not show in these numbers.
        wanted: the same for the output to which this one was compared, or None.
        unless: of an output that deviates, what was not told and makes it noise if it is meant; or
            None.
        place: where in a model this attention is; "" if it was given alone.
        map: |error| / σ of the output over queries and components of the head that is worst.
    """

    verdict: Verdict
    dtype: str
    accuracy: str
    layout: str
    differences: list[Difference]
    causes: list[Told] = []
    partial: list[Partial] = []
    assumed: list[Told] = []
    notes: list[Told] = []
    hidden: list[Told] = []
    wanted: Diagnosis | None = None
    unless: Told | None = None
    place: str = ""
    map: figure.ErrorMap | None = None

    def _repr_html_(self) -> str:
        """Return the diagnosis as HTML for a notebook, with the map of the worst head."""
        drawn = figure.svg(self.map) if self.map else ""
        return f"<pre>{html.escape(str(self))}</pre>{drawn}"

    @property
    def cause(self) -> Told | None:
        """The first of the causes, which is the simplest; None if there is none."""
        return self.causes[0] if self.causes else None

    def __str__(self) -> str:
        """Return the diagnosis as text for a terminal."""
        return "\n".join(_lines(self))


def diagnose(
    query: Any = None,
    key: Any = None,
    value: Any = None,
    output: Any = None,
    *,
    mask: Any = None,
    mask_true: Literal["", "attends", "blocks"] = "",
    bias: Any = None,
    causal: bool | Literal["top-left", "bottom-right"] | None = None,
    scale: float | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    slopes: Any = None,
    rotary: Any = None,
    norm: Any = None,
    query_lengths: Any = None,
    key_lengths: Any = None,
    segments: Any = None,
    positions: Any = None,
    chunk: int | None = None,
    spans: Any = None,
    tree: Any = None,
    dilation: int | None = None,
    global_tokens: Any = None,
    weights: Any = None,
    log_sum_exp: Any = None,
    max_logit: Any = None,
    gradients: Mapping[str, Any] | None = None,
    wanted: Any = None,
    layout: str = "",
    heads: int | None = None,
    kv_heads: int | None = None,
    batch: int | None = None,
    dtype: str = "",
    accuracy: str = "",
    config: Any = None,
    layer: int = 0,
    **others: Any,
) -> Diagnosis:
    """Say whether an output is noise apart from attention, and if not, which mistake explains it.

    Arrays are of NumPy, torch, JAX, TensorFlow, MLX, Paddle or tinygrad, or nested lists.

    Args:
        query: the query heads that go into the attention.
        key: the key heads.
        value: the value heads.
        output: what the attention returned, before any output projection.
        mask: booleans or 0 and 1, or numbers with −∞ (or less than −10,000) for blocked keys.
        mask_true: what True means, "attends" or "blocks"; "" tries both.
        bias: what is added to the logits.
        causal: "top-left", "bottom-right", or True, which tries both if the lengths differ.
        scale: the factor of the logits; None for 1/√head.
        window: the number of keys that a query sees, its own included; or how many before and
            after its own, where None is no limit.
        soft_cap: the cap of the logits.
        sinks: of each head, the logit of its sink.
        slopes: of each head, its slope of ALiBi.
        rotary: if query and key are given before their rotation: a dictionary with "base",
            "pairs" ("halves" or "interleaved"), "size" and "scaling" (an entry `rope_parameters`
            of transformers), or a `Rotary`.
        norm: if they are given before an RMS norm: a dictionary with "query", "key" and "epsilon".
        query_lengths: the number of queries of each batch entry that are no padding.
        key_lengths: the number of keys of each batch entry that are no padding.
        segments: ids of packed sequences, `[batch length]`; a pair if they differ for queries and
            keys.
        positions: positions, in the same form. If pairs turn by sections of time, height and width
            (`mrope_section` in "scaling"), they are `[3 batch length]`, or `[4 batch length]` with
            those of the text first, by which masks go.
        chunk: the number of positions of a block, such as of Llama 4: tokens see each other only in
            the same block, counted from position 0.
        spans: of each key, `[batch key]`, the number of its bidirectional span, such as an image or
            a prefix, or 0: beside a causal mask, a query sees the later keys of its span.
        tree: of each query, `[batch query]`, the index of its parent in a tree of drafted tokens,
            or -1 for those that follow the cached keys.
        dilation: a query sees only keys whose distance is a multiple of it. `window` beside it
            counts positions: one of 3 steps on each side of a dilation of 2 is (6, 6).
        global_tokens: of each key, `[batch key]`, 1 for global tokens, from which and to which no
            window, dilation or chunk hides anything, and 0 for others.
        weights: the attention weights, `[batch heads query key]`, if they were returned.
        log_sum_exp: `[batch heads query]`, if it was returned.
        max_logit: the largest logit of each query, `[batch heads query]`, if it was returned: after
            scale, soft cap and bias, of the keys that the query sees. A sink does not count.
        gradients: those of "query", "key" and "value", and that of the "output" they come from.
        wanted: the output of another implementation, to which this one was compared. What was not
            told is read in the same way for both: if no way fits both, this one deviates. A layout
            in which one of them is right, or is explained, is that of the other, too.
        layout: the axes of query, key and value, such as "batch query heads head" or
            "batch length (heads head)"; "" finds it out.
        heads: the number of query heads, if a layout joins them with their components.
        kv_heads: the number of key/value heads, in that case.
        batch: the number of batch entries, if their tokens follow each other in one axis, as in
            `[batch * length, heads * head]`. It is known if another array tells it.
        dtype: the dtype in which the attention was computed; "" for the narrowest that holds the
            output.
        accuracy: a class of docs/noise.md that is promised, such as "A".
        config: the model's configuration in the words of Hugging Face, or its file: it says what
            the other arguments do not.
        layer: the number of the layer in the configuration.
        others: any of these by another name that it may have in a file, such as `expected` for
            `wanted`, so that a dump can be passed as it was loaded: `diagnose(**dump)`.

    Raises:
        UnknownName: if none of these has such a name.
        ConformanceError: if the arrays contradict each other, are no floating-point numbers, or can
            be read in several ways between which the numbers do not decide.
    """
    options = dict(locals())
    options |= files.renamed(options.pop("others"), options)
    options = {name: files.scalar(it) for name, it in options.items()}
    other = options.pop("wanted")
    missing = [it for it in ("query", "key", "value", "output") if options[it] is None]
    if missing:
        raise BadArrays(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; two outputs "
            "without the heads that they come from are compared by conformance.compare(one, two)"
        )
    given = Given(**options)
    if other is None:
        return of(given)
    extras = dict.fromkeys(("weights", *STATISTICS, "gradients"))
    sides = given, Given(**{**options, **extras, "output": other})
    found, wanted = _in_one_layout(*sides)
    return beside(found, wanted, lambda: [(one, readings(one)) for one in sides])


def assert_within_noise(got: Any, query: Any, key: Any, value: Any, **told: Any) -> None:
    """Assert that an output is that of attention on these heads, within rounding noise.

    The message says where it is not, and names the mistake if it is a known one. The arguments
    after the output are those of `diagnose`.

    Raises:
        AssertionError: if the output deviates.
        ConformanceError: as `diagnose` does.
    """
    found = diagnose(query, key, value, got, **told)
    if found.verdict == "deviates":
        raise AssertionError(str(found))


@np.errstate(all="ignore")
def of(given: Given, layout: str = "") -> Diagnosis:
    """Return the diagnosis of what was given, in every layout or in the one that is known."""
    if given.accuracy and given.accuracy not in ("A0", "A", "B", "C", "TF32"):
        raise UnknownName("accuracy", given.accuracy, ("A0", "A", "B", "C", "TF32"))
    if given.output is None:
        raise BadArrays("output is missing; query, key, value and output are needed")
    return _unless_causal(_of(given, layout), given)


def _of(given: Given, layout: str) -> Diagnosis:
    try:
        found = judged(_laid(readings(given), layout), given)
    except Ambiguous:
        other = _if_causal(given, layout) or by_two(_laid(readings(given), layout), given)
        if other is None:
            raise
        return other
    unexplained = found.verdict == "deviates" and (not found.causes or _is_coarse(found))
    if not unexplained or _is_near(found):
        # Without a causal mask, or with one, the answer would be another one altogether.
        return found
    causal = _if_causal(given, layout)
    if causal is None or (found.causes and _is_coarse(causal)):
        if found.causes:
            return found
        return by_two(_laid(readings(given), layout), given) or found
    return causal


def _is_coarse(found: Diagnosis) -> bool:
    """Return whether the causes explain an output only if it is no more accurate than it should."""
    less = any(it.id.startswith("accuracy.") for it in found.causes)
    return less or any(note.id == "arrays.as-accurate-as" for note in found.notes)


def _laid(every: Sequence[Reading], layout: str) -> Sequence[Reading]:
    """Return the readings in a layout; all if it is "", or if there is none in it."""
    return [one for one in every if one.layout == layout] or every


def _in_one_layout(given: Given, second: Given) -> tuple[Diagnosis, Diagnosis]:
    """Return the diagnoses of two outputs that come from the same heads.

    Heads have one layout. If nothing decides it for one of the outputs, or no mistake explains this
    one, it is that in which the other one is right or is explained.

    Raises:
        ConformanceError: as `of` does, if the layout of neither is known.
    """
    one, other = _unless_open(given), _unless_open(second)
    own, known = _known_layout(one), _known_layout(other)
    if known and not own and getattr(one, "layout", "") != known:
        one = of(given, known)
    elif own and not known and getattr(other, "layout", "") != own:
        other = of(second, own)
    if isinstance(one, Ambiguous):
        raise one
    if isinstance(other, Ambiguous):
        raise other
    return one, other


def _unless_open(given: Given) -> Diagnosis | Ambiguous:
    """Return the diagnosis of what was given, or the error if nothing decides its layout."""
    try:
        return of(given)
    except Ambiguous as error:
        return error


def _known_layout(found: Diagnosis | Ambiguous) -> str:
    """Return the layout in which an output is right or is explained; "" if there is none."""
    if isinstance(found, Ambiguous) or (found.verdict == "deviates" and not found.causes):
        return ""
    return found.layout


@np.errstate(all="ignore")
def beside(
    found: Diagnosis,
    wanted: Diagnosis,
    both: Callable[[], Sequence[tuple[Given, Sequence[Reading]]]],
) -> Diagnosis:
    """Return the diagnosis of an output, with that of the one to which it was compared.

    What was not told, such as the alignment of a causal mask, has one meaning for both. If each
    output is right, but in no reading both are, the first one deviates from the second.

    Args:
        found: the diagnosis of the output alone.
        wanted: the diagnosis of the other output alone.
        both: how to read the first output, and how to read the second one.
    """
    if "deviates" in (found.verdict, wanted.verdict) or found.assumed == wanted.assumed:
        return msgspec.structs.replace(found, wanted=wanted)
    sides = both()
    right = [[one for one in every if Judged(one, side).fits_everywhere] for side, every in sides]
    if not all(right):
        return msgspec.structs.replace(found, wanted=wanted)
    common = set(map(_meant, right[0])) & set(map(_meant, right[1]))
    if common:
        found, wanted = (
            judged([one for one in every if _meant(one) in common], side)
            for (side, _), every in zip(sides, right, strict=True)
        )
        return msgspec.structs.replace(found, wanted=wanted)
    own, others = (_meant(every[0]) for every in right)
    cause = Phrase(
        "outputs.read-differently",
        {
            "output": [one for one in own if one not in others],
            "other": [one for one in others if one not in own],
        },
    )
    # If the axes of the first output allow it, it is compared with what the second one is.
    shown = next((one for one in sides[0][1] if _meant(one) == others), right[0][0])
    found = Judged(shown, sides[0][0]).with_wrong_rows().as_deviating_by(cause)
    return msgspec.structs.replace(found, wanted=wanted)


def _meant(reading: Reading) -> tuple[Phrase, ...]:
    """Return what is assumed in a reading, without the layout of the output itself."""
    return tuple(one for one in reading.assumed if one.id != "reading.output")


def _is_near(found: Diagnosis) -> bool:
    """Return whether the worst element is nearly what is wanted."""
    worst = found.differences[0].worst
    if worst is None:
        return False
    got, want = float(worst.got), float(worst.want)
    return abs(got - want) < NEAR * abs(want)


def _if_causal(given: Given, layout: str) -> Diagnosis | None:
    """Return the diagnosis of what was given if it is causal, or None if that explains nothing.

    A mistake in a causal mask shows only beside one, and whoever dumps arrays may not tell it.
    """
    if given.causal is not None:
        return None
    causal = replace(given, causal=True)
    try:
        found, _, _ = _explained_reading(_laid(readings(causal), layout), causal)
    except BadArrays:
        return None
    if found is None or any(it.id == "causal.not-applied" for it in found.causes):
        # That is the answer without a causal mask, which has been tried.
        return None
    assumed = [*found.assumed, told(Phrase("reading.causal-not-told"))]
    return msgspec.structs.replace(found, assumed=assumed) if found.causes else None


def _unless_causal(found: Diagnosis, given: Given) -> Diagnosis:
    """Return a diagnosis that says if the output is right, provided that it is meant to be causal.

    That this is the cause is not enough: all that was given must then be within noise.
    """
    cause = next((it for it in found.causes if it.id in _UNTOLD_CAUSAL), None)
    if cause is None or given.causal is not None:
        return found
    alignment: Any = cause.arguments.get("alignment", True)
    causal = replace(given, causal=alignment)
    again = judged(_laid(readings(causal), found.layout), causal)
    if again.verdict != "noise":
        return found
    ratio = max(it.max_ratio for it in again.differences)
    about = {**cause.arguments, "ratio": ratio}
    return msgspec.structs.replace(found, unless=told(Phrase(_UNTOLD_CAUSAL[cause.id], about)))


_UNTOLD_CAUSAL = {
    "untold.causal": "unless.causal",
    "untold.causal-aligned": "unless.causal-aligned",
}
"""What is said of an output if this is its cause, and it is right with a causal mask."""


@np.errstate(all="ignore")
def by_two(every: Sequence[Reading], given: Given) -> Diagnosis | None:
    """Return the diagnosis of a reading that two mistakes explain together; None if none does."""
    return _explained_reading(every, given, ("pairs",))[0]


@np.errstate(all="ignore")
def judged(every: Sequence[Reading], given: Given) -> Diagnosis:
    """Return the diagnosis of the reading that fits, or else of the one that is explained."""
    explained, found, layouts = _explained_reading(every, given)
    if explained is not None:
        return explained
    if len(layouts) > 1:
        raise Ambiguous(
            f"the output deviates, no known mistake explains it, and the axes may be "
            f"{' or '.join(repr(it) for it in layouts)}; tell which: layout= (--layout)"
        )
    of_best = [one for one in found if one.reading.layout == layouts[0]]
    return min(of_best, key=lambda one: one.misfit).with_wrong_rows().as_deviating([])


def _explained_reading(
    every: Sequence[Reading], given: Given, by: Sequence[str] = ("exact", "causes")
) -> tuple[Diagnosis | None, list[Judged], list[str]]:
    """Return the diagnosis of the reading that fits or is explained, or None; and what was read.

    The last result holds the layouts between which the numbers do not decide. `by` names the
    attributes of `Judged` that hold causes, in the order in which they are tried.
    """
    found: list[Judged] = []
    for _, same in itertools.groupby(every, lambda reading: reading.layout):
        of_layout = [Judged(reading, given) for reading in same]
        fitting = [one for one in of_layout if one.fits]
        if fitting:
            # That another order of axes fits too would be a coincidence.
            return fitting[0].as_noise(fitting[1:]), found, []
        for one in of_layout:
            one.read_otherwise = [it for it in of_layout if it is not one]
        found += of_layout
    layouts = [*dict.fromkeys(one.reading.layout for one in found)]
    blind = {one.reading.layout for one in found if _causal_hides_all(one.problem)}
    layouts.sort(key=lambda it: it in blind)
    right = {it: max(one.right for one in found if one.reading.layout == it) for it in layouts}
    best = max(layouts, key=lambda it: right[it])
    if all(right[best] > max(CLEAR, 2 * right[it]) for it in layouts if it != best):
        layouts = [best]
    else:
        left = {it: min(one.unlike for one in found if one.reading.layout == it) for it in layouts}
        nearest = min(layouts, key=lambda it: left[it])
        if all(left[nearest] < NEARER * min(1.0, left[it]) for it in layouts if it != nearest):
            layouts = [nearest]
    # What explains the output at its own precision comes before what does so at a coarser one.
    for kind in by:
        for layout in layouts:
            explained = [
                one for one in found if one.reading.layout == layout and getattr(one, kind)
            ]
            if explained:
                others = explained[1:]
                # What is exact has no other causes.
                kind = "causes" if kind == "exact" else kind
                return explained[0].as_deviating(others, by=kind), found, layouts
    return None, found, [it for it in layouts if it not in blind] or layouts


def _causal_hides_all(problem: Problem) -> bool:
    """Return whether there are queries from which a causal mask hides every key.

    This is what becomes of heads in groups whose axis is taken for that of the tokens. If the mask
    is said to be aligned top-left, the lengths are meant to differ, and no query is such.
    """
    shape = problem.shape
    return problem.causal == "bottom-right" and shape.query_length > shape.key_length


class Judged:
    """A reading of the arrays, compared with what is expected of it."""

    def __init__(self, reading: Reading, given: Given, screen: tiles.Screen | None = None) -> None:
        self.given = given
        self.whole: Reading | None = None
        self._longer: Problem | None = None
        self.chosen: Chosen | None = None
        if tiles.is_long(reading):
            self.whole = reading
            sizes = None
            if screen:
                sizes = screen.sizes if screen.count else _of_queries(screen)
            self.chosen = tiles.chosen(reading, sizes), reading.problem.shape.query_length
            reading = tiles.thinned(reading, self.chosen[0])
            if screen:
                self.screen = screen
            else:
                # With other rows, what joins all of them has been tried before.
                self._longer = self.whole.problem
        self.reading = reading
        self.problem = reading.problem
        self.answer = _without_masked_rows(reading)
        gradients = bool(reading.answer.gradients)
        if self.chosen and not gradients:
            self.expectation = tiles.of_parts(self.problem, given.accuracy)
        else:
            self.expectation = expected(self.problem, given.accuracy, gradients)
        if self.answer is not reading.answer:
            empty = ports.empty(self.problem)
            rows = ports.unseen(self.problem)
            want = self.expectation.arrays["output"]
            output = np.where(rows, want, reading.answer.output)
            weights = reading.answer.weights
            if weights is not None:
                weights = np.where(empty[..., None], self.expectation.arrays["weights"], weights)
            self.answer = replace(reading.answer, output=output, weights=weights)
        self.compared = against(self.expectation, self.answer.arrays())
        self.statistics = {
            name: tiles.compared_statistic(STATISTICS[name], self.problem, array)
            for name, array in reading.statistics.items()
        }
        self.read_otherwise: Sequence[Judged] = ()
        self._partial: list[tuple[Phrase, float, Phrase]] = []
        self._accuracy = NOTHING

    @cached_property
    def screen(self) -> tiles.Screen:
        """What is seen of all rows of a long output."""
        assert self.whole is not None
        return tiles.screened(self.whole, self.given.accuracy)

    def with_wrong_rows(self) -> Judged:
        """Return a judgement of rows that are wrong, of a long output; itself of a short one."""
        return self if self.whole is None else Judged(self.whole, self.given, self.screen)

    @property
    def fits(self) -> bool:
        """Whether everything is within noise."""
        others = (compared for _, compared in self.statistics.values())
        return all(one.fits for one in (*self.compared, *others))

    @property
    def fits_everywhere(self) -> bool:
        """Whether everything is within noise, in all rows of a long output, too."""
        return self.fits and (self.whole is None or all(it.fits for it in self.differences()))

    @property
    def right(self) -> float:
        """The share of the output's elements that are right, of those that are judged."""
        wrong = Evidence.of("output", self.answer.output, self.expectation).wrong
        if self.answer is not self.reading.answer:
            wrong = wrong[~ports.unseen(self.problem)]
        return 1.0 - float(wrong.mean()) if wrong.size else 0.0

    @property
    def unlike(self) -> float:
        """The share of the output's variance that no multiple of what is expected has, 1 − r²."""
        got, want = self.answer.output, self.expectation.arrays["output"]
        known = np.isfinite(got) & np.isfinite(want)
        if self.answer is not self.reading.answer:
            known &= ~ports.unseen(self.problem)
        got, want = got[known], want[known]
        sizes = float(got @ got) * float(want @ want)
        return 1.0 - float(got @ want) ** 2 / sizes if 0 < sizes < math.inf else 1.0

    @property
    def misfit(self) -> float:
        """The largest figure, relative to its limit."""
        return max(one.excess for one in self.compared)

    @cached_property
    def _search(self) -> PairSearch:
        where = None if self.whole is None else self._where
        expected_otherwise = (it.expectation.arrays["output"] for it in self.read_otherwise)
        shape = self.answer.output.shape
        return PairSearch(
            self.problem,
            self.expectation,
            self.answer,
            where=where,
            chosen=self.chosen,
            longer=self._longer,
            read_otherwise=[it for it in expected_otherwise if it.shape == shape],
        )

    @cached_property
    def exact(self) -> list[Phrase]:
        """The mistakes that explain what is wrong at the precision by which it is judged."""
        of_keys = [] if self._of_keys is None else self._of_keys.causes()
        found = of_keys or self._search.causes()
        return found if found or self._search.output.wrong.any() else self._of_statistics()

    @cached_property
    def causes(self) -> list[Phrase]:
        """The mistakes that explain what is wrong, the simplest first."""
        found = self.exact or self._less_accurate(self._search) or self._of_statistics()
        self._partial = [] if found else self._search.partial
        return found

    @cached_property
    def pairs(self) -> list[Phrase]:
        """The causes that are two mistakes together."""
        return self._search.pairs()

    def _of_statistics(self) -> list[Phrase]:
        """Return the causes of the first statistic that is wrong and has any."""
        for name, (evidence, compared) in self.statistics.items():
            if not compared.fits:
                counted = STATISTICS[name].counted(self.problem)
                found = softmax.causes_of_statistic(name, counted, evidence, self.problem.sinks)
                if causes := [*found]:
                    return causes
        return []

    def _less_accurate(self, search: PairSearch) -> list[Phrase]:
        """Return the causes if the output was computed in a narrower dtype than it is judged by.

        They are that it is no more accurate than this dtype or, if it deviates in this one too, the
        mistakes that explain it so far.
        """
        if not search.output.wrong.any():
            return []
        accuracy = search.accuracy()
        if not search.close:
            return [accuracy] if accuracy else []
        narrower = [it for it in precision.CLASSES if it < self.problem.format.significand_bits]
        for bits in narrower:
            # With large logits, noise grows by less than the roundoff, and would hide everything.
            for noise in narrower:
                found = search.with_digits(bits, noise).causes() if noise >= bits else []
                if found:
                    # A factor that is slightly wrong has errors as small as rounding.
                    if exact := search.with_factor(found):
                        return exact
                    self._accuracy = precision.accuracy(self.problem.dtype, bits)
                    return found
        return []

    @cached_property
    def _side(self) -> tuple[int, int] | None:
        """The batch entry and the key/value head in which causes of wrong gradients are sought.

        It is that with most wrong numbers in gradients of keys and values, if the output is right.
        """
        if self.whole is None or not {"key", "value"} & self.whole.answer.gradients.keys():
            return None
        if self.right < 1 or self.screen.count:
            return None
        sides = [self.screen.others.get(name) for name in ("gradient.key", "gradient.value")]
        wrong = [it.wrong.sum(axis=-1) for it in sides if it is not None and not it.fits]
        if not wrong:
            return None
        counts = np.sum(wrong, axis=0)
        entry, group = np.unravel_index(int(counts.argmax()), counts.shape)
        return int(entry), int(group)

    @cached_property
    def _of_keys(self) -> Search | None:
        """The search for causes of wrong gradients of keys and values in a long dump, if any is.

        A gradient of a key is a sum over all queries, so some of the rows would not do.
        """
        if self._side is None:
            return None
        assert self.whole is not None
        entry, group = self._side
        problem, given = self.whole.problem, self.whole.answer
        part, shape = ports.part(problem, entry, group), problem.shape
        widths = {"query": shape.group * shape.head_size, "key": shape.head_size}
        widths["value"] = shape.value_head_size
        gradients = {
            name: array[entry : entry + 1, :, group * widths[name] : (group + 1) * widths[name]]
            for name, array in given.gradients.items()
        }
        answer = Answer(output=ports.cut(problem, given.output, entry, group), gradients=gradients)
        return Search(part, tiles.rough(part, self.given.accuracy), answer)

    def _where(self, wrong: BoolArray) -> Phrase:
        """Return where all wrong rows of a long output are, some of which are `wrong`."""
        return where_wrong(self.screen.wrong)

    def differences(self) -> list[Difference]:
        """How each array differs."""
        if self.whole is not None:
            listed = [_of_screen(self.screen, "output", self.whole.answer.output.size)]
            shape = self.whole.problem.shape
            sizes = dict.fromkeys(STATISTICS, 1) | {"gradient.value": shape.value_head_size}
            for name, of_other in self.screen.others.items():
                size = of_other.wrong.size * sizes.get(name, shape.head_size)
                listed.append(_of_screen(of_other, name, size))
            return listed
        found = [
            _difference(
                self.reading,
                one,
                Evidence.of(
                    one.figures.array, self.answer.arrays()[one.figures.array], self.expectation
                ),
            )
            for one in self.compared
        ]
        for evidence, compared in self.statistics.values():
            found.append(_difference(self.reading, compared, evidence))
        return found

    def as_noise(self, others: Sequence[Judged]) -> Diagnosis:
        """Return the diagnosis of an output that is right, also as `others` read it.

        Of a long output, a row may be wrong that has not been seen yet.
        """
        if not self.fits_everywhere:
            return self.with_wrong_rows().as_deviating([])
        hidden = self._hidden()
        notes = [*self._notes(), *_alike(self.reading, [one.reading for one in others])]
        nothing = any(phrase.id == "softmax.uniform" for phrase in hidden)
        return self._diagnosis(
            "cannot-tell" if nothing else "noise", notes=notes, hidden=[*map(told, hidden)]
        )

    def as_deviating(self, others: Sequence[Judged], by: str = "causes") -> Diagnosis:
        """Return the diagnosis of an output that deviates; `others` are explained too.

        `by` names the attribute that holds the causes.
        """
        causes = [*getattr(self, by)]
        notes = self._notes()
        for other in others:
            for cause in getattr(other, by):
                read = Phrase("reading.several", {"readings": [*other.reading.assumed]})
                causes.append(cause.having(given=read) if other.reading.assumed else cause)
        if not causes and self.reading.layout.startswith("length"):
            notes.append(told(Phrase("arrays.of-one-entry")))
        if not causes and self.whole is None:
            output = Evidence.of("output", self.answer.output, self.expectation)
            size = rms(output.want[np.isfinite(output.got)])
            if output.wrong.any() and size > 0:
                percent = float(f"{100 * output.misfit(output.want) / size:.2g}")
                notes.append(told(Phrase("arrays.unexplained", {"percent": percent})))
        if len(causes) > 1 and self._search.telling:
            notes += map(told, self._search.telling)
        if self._accuracy:
            notes.append(told(Phrase("arrays.as-accurate-as", {"accuracy": self._accuracy})))
        return self._diagnosis(
            "deviates",
            causes=[*map(told, causes)],
            partial=[
                Partial(told(cause), round(share, 4), told(where) if where else None)
                for cause, share, where in self._partial
            ],
            notes=notes,
        )

    def as_deviating_by(self, cause: Phrase) -> Diagnosis:
        """Return the diagnosis of an output that deviates, with a cause that is known."""
        return self._diagnosis("deviates", causes=[told(cause)], notes=self._notes())

    def _diagnosis(self, verdict: Verdict, **fields: Any) -> Diagnosis:
        assumed = [told(one) for one in self.reading.assumed]
        return Diagnosis(
            verdict=verdict,
            dtype=self.problem.dtype,
            accuracy=(
                accuracy_class(self.expectation, self.answer.arrays())
                if self.whole is None
                else self.screen.accuracy
            ),
            layout=self.reading.layout,
            differences=self.differences(),
            assumed=assumed,
            map=self._map(),
            **fields,
        )

    def _map(self) -> figure.ErrorMap:
        if self.whole is not None:
            shape = self.whole.problem.shape
            return figure.worst(
                self.screen.cells, (shape.query_length, shape.value_head_size), LIMIT
            )
        one = Evidence.of("output", self.answer.output, self.expectation)
        ratio = np.abs(ratios(one.got, one.want, one.noise, one.underflow))
        return figure.of_ratios(separate(ratio, ports.apart(self.problem)), LIMIT)

    def _notes(self) -> list[Told]:
        notes = [told(one) for one in self.reading.notes]
        if self.whole is not None:
            rows = self.problem.shape.query_length
            notes.append(told(Phrase("arrays.in-tiles", {"rows": rows})))
            if self._side is not None:
                about = dict(zip(("entry", "head"), self._side, strict=True))
                notes.append(told(Phrase("arrays.gradients-sought-in", {**about})))
        empty = int(ports.empty(self.problem).sum())
        if empty:
            notes.append(told(Phrase("arrays.masked-rows-not-judged", {"count": empty})))
        want, sigma = self.expectation.arrays["output"], self.expectation.sigma["output"]
        share = rms(sigma) / (rms(want) or 1.0)
        if share > ILL:
            notes.append(told(Phrase("arrays.ill-conditioned", {"percent": round(100 * share)})))
        return notes

    def _hidden(self) -> list[Phrase]:
        """Return the mistakes in `TELLING` whose numbers these would be, too."""
        # By what the output reaches, a mistake may show that the least accurate class would hide.
        reached = accuracy_class(self.expectation, {"output": self.answer.output})
        expectation = self.expectation.at_accuracy(reached or self.given.accuracy)
        output = Evidence.of("output", self.answer.output, expectation)
        problem = self.problem
        if math.prod(problem.shape.logits) > MOST_ELEMENTS and problem.heads_alone:
            problem, output = ports.part(problem, 0, 0), of_part(problem, output, 0, 0)
        maker = Maker(problem, chosen=self.chosen)
        found: list[Phrase] = []
        for hypothesis in hypotheses(maker):
            if hypothesis.cause.id in TELLING and hypothesis.cause not in found:
                predicted = hypothesis.make().output
                # A factor of what is not there, such as a group of one head, is no mistake.
                if output.near(predicted).all():
                    found.append(hypothesis.cause)
        return found


def _without_masked_rows(reading: Reading) -> Answer:
    """Return the answer; a copy if there are queries that see no key, whose output is open."""
    if not ports.empty(reading.problem).any():
        return reading.answer
    return replace(reading.answer)


def _alike(first: Reading, others: Sequence[Reading]) -> Iterator[Told]:
    for other in others:
        different = [one for one in other.assumed if one not in first.assumed]
        if different:
            yield told(Phrase("arrays.also-fits", {"readings": [*different]}))


def _difference(reading: Reading, compared: Comparison, evidence: Evidence) -> Difference:
    figures = compared.figures
    name, shape = figures.array, reading.problem.shape
    heads = {"gradient.key": shape.kv_heads, "gradient.value": shape.kv_heads}.get(
        name, ports.apart(reading.problem)
    )
    wrong, worst, where = evidence.wrong, None, NOTHING
    if not compared.fits:
        got, want, noise = evidence.got, evidence.want, evidence.noise
        if name == "output" or name.startswith("gradient."):
            got, want, noise = (separate(it, heads) for it in (got, want, noise))
            wrong = separate(wrong, heads)
        ratio = np.abs(ratios(got, want, noise, evidence.underflow))
        at = np.unravel_index(int(ratio.argmax()), ratio.shape)
        # A layer's output has no heads.
        place = at if reading.problem.heads_alone or name != "output" else (at[0], *at[2:])
        worst = element(name, place, got[at], want[at], noise[at])
        last = {"output": "component", "weights": "key"}.get(name, "component")
        tokens = "key" if name in ("gradient.key", "gradient.value") else "query"
        where = (
            where_wrong(wrong, tokens)
            if name in STATISTICS
            else where_wrong(np.asarray(wrong.any(axis=-1)), tokens) or last_axis(wrong, last)
        )
    return Difference(
        array=name,
        fits=compared.fits,
        max_ratio=figures.max_ratio,
        rms_ratio=figures.rms_ratio,
        limit=figures.limit,
        wrong=int(evidence.wrong.sum()),
        size=evidence.got.size,
        worst=worst,
        where=told(where) if where else None,
    )


def _of_queries(screen: tiles.Screen) -> Array | None:
    """Return the largest errors of rows whose statistic or gradient is wrong; None if none is."""
    every = [it for n, it in screen.others.items() if n in (*STATISTICS, "gradient.query")]
    return next((it.sizes for it in every if it.wrong.any()), None)


def _of_screen(screen: tiles.Screen, array: str, size: int) -> Difference:
    tokens = "key" if array in ("gradient.key", "gradient.value") else "query"
    where = where_wrong(screen.wrong, tokens)
    return Difference(
        array=array,
        fits=screen.fits,
        max_ratio=min(float(f"{screen.largest:.4g}"), INFINITE),
        rms_ratio=float(f"{math.sqrt(screen.squares / size):.4g}"),
        limit=LIMIT,
        wrong=screen.count,
        size=size,
        worst=None if screen.fits else screen.worst,
        where=told(where) if where and not screen.fits else None,
    )


def told(phrase: Phrase) -> Told:
    """Return a phrase with its text and, if it is a cause, the change to make."""
    return Told(phrase.id, say(phrase), phrase.arguments, advice(phrase, of_arrays=True))


# Text


def _lines(found: Diagnosis) -> Iterator[str]:
    wrong = [one for one in found.differences if not one.fits]
    if found.place:
        yield found.place
    if found.verdict == "deviates" and not wrong:
        yield "deviates"
    elif found.verdict == "deviates":
        if found.unless is None:
            yield f"deviates: {_counted(wrong[0])}"
        else:
            yield f"deviates unless {found.unless.text}"
            yield _row("else", _counted(wrong[0]))
        for one in wrong[1:]:
            yield f"          {_counted(one)}"
    elif found.verdict == "noise":
        one = max(found.differences, key=lambda it: it.max_ratio)
        yield (
            f"noise: every element is within {one.max_ratio:.2g}σ of attention in {found.dtype} "
            f"(allowed: {one.limit:g}σ){_accuracy(found)}"
        )
        if found.wanted is not None and found.wanted.verdict == "deviates":
            yield _row("other", "the two outputs differ: this one is right, the other one deviates")
    else:
        yield (
            "cannot tell: the output is right, but these numbers would be right with any weights; "
            "--suggest FILE writes a problem that tells"
        )
    for one in wrong:
        if one.worst is not None:
            yield _row("worst", _element(one.worst))
        if one.where is not None:
            yield _row("where", f"{one.array}: {one.where.text}")
    if found.verdict == "deviates":
        if len(found.causes) > 1:
            yield _row("cause", "these numbers do not tell apart:")
        for cause in found.causes:
            only = len(found.causes) == 1
            yield _row("cause" if only else "", cause.text if only else f"- {cause.text}")
            if cause.advice:
                yield _row("change" if only else "", cause.advice if only else f"  {cause.advice}")
        alone = any(note.id == "arrays.noise-of-random-heads" for note in found.notes)
        if not found.causes and not alone:
            yield _row("cause", "no known mistake explains every wrong element")
        for partly in found.partial:
            place = f", {partly.where.text}" if partly.where else ""
            yield _row(
                "in part", f"{partly.share:.0%} of the wrong elements{place}: {partly.cause.text}"
            )
    for label, listed in (("read as", found.assumed), ("note", found.notes)):
        for one_told in listed:
            yield _row(label, one_told.text)
    if found.verdict == "noise" and found.hidden:
        yield _row("hidden", "these numbers would be the same, if the answer")
        for hidden in found.hidden:
            yield _row("", hidden.text)
    if found.wanted is not None:
        yield "the output that it was compared to:"
        yield from (f"  {line}" for line in _lines(found.wanted))


def _row(label: str, text: str) -> str:
    return f"  {label:<8} {text}"


def _counted(one: Difference) -> str:
    worst = "∞" if one.max_ratio >= INFINITE else f"{one.max_ratio:.3g}"
    return (
        f"{one.wrong:,} of {one.size:,} elements of {one.array} are beyond {one.limit:g}σ of "
        f"rounding noise; the worst is at {worst}σ"
    )


def _accuracy(found: Diagnosis) -> str:
    return f", accuracy class {found.accuracy}" if found.accuracy else ""


_AXES = {
    3: ("batch", "head", "query"),
    4: ("batch", "head", "query", "component"),
}


def _element(worst: Worst) -> str:
    names = list(_AXES.get(len(worst.index), ("",) * len(worst.index)))
    if worst.array == "output" and len(worst.index) == 3:
        names = ["batch", "query", "component"]
    if worst.array == "weights":
        names[-1] = "key"
    if worst.array in ("gradient.key", "gradient.value"):
        names[2] = "key"
    at = ", ".join(f"{name} {i}".strip() for name, i in zip(names, worst.index, strict=True))
    return f"{worst.array}[{at}]: got {worst.got}, want {worst.want}, noise σ {worst.noise}"
