"""Experiments on what masks mean: in every form, from another library, and two at once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from conformance.adapter import layouts
from conformance.adapter.arguments import AXES, MaskArgument, Native, to_layout
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.problem import Shape, causal_mask
from conformance.experiments.experiment import difference_code, hiding_code, mask_lines, topic
from conformance.records.findings import NOTHING, Argument, Entry, Phrase
from conformance.requirements.laboratory import (
    CANNOT_BE_ASKED,
    REFUSED,
    SOMETHING_ELSE,
    Accepted,
    Laboratory,
    Refused,
    Sizes,
    numbers,
)
from conformance.requirements.meaning import (
    ADDED,
    ATTENDING,
    ATTENDS,
    BLOCKING,
    BLOCKS,
    BLOCKS_EVERYTHING,
    BOOL,
    FORMS,
    IGNORED,
    INFINITE,
    REJECTED,
    ZERO_INFINITE,
    MaskForm,
    added_to,
    among,
    arrange,
    examined,
    follows,
    forms_of,
    own_forms,
    telling,
    zero_one,
)

HALF = ("bfloat16", "float16")


@topic(
    "masks",
    "What a mask means",
    "What does each mask argument do with True, 0 and 1, 0 and −inf, large negative numbers?",
    place=10,
    every_mode=True,
    shared=True,
    revision=2,
)
def meanings(lab: Laboratory) -> Iterator[Entry]:
    """Pass masks in every form that users pass, and find the meaning that predicts the weights.
    The forms are booleans; 0 and 1 in several dtypes; 0, 1 and a third value, 0.25 or 2; 0 and
    −inf; 0 and −1e9 or the most negative finite number. Repeat most of this in half precision."""
    half = next((name for name in HALF if name != lab.dtype and lab.has(name)), "")
    for argument in lab.arguments():
        for form in FORMS:
            entry = examined(lab, argument, form)
            yield msgspec.structs.replace(entry, code=_code(lab, argument, form, entry.value))
        if half:
            for form in own_forms(half):
                yield examined(lab, argument, form, half)


def _code(lab: Laboratory, argument: MaskArgument, form: MaskForm, value: Phrase) -> str:
    """Return code that shows that the mask hides token 0, or that the mask is ignored.

    Return "" if `value`, the observed meaning, is neither, or if there is no such code.
    """
    layout = argument.layouts[0]
    if argument not in lab.adapter.mask_arguments:
        return ""
    if value == IGNORED:
        made = mask_lines(layout, form.dtype, 0.0, form.values[-1], "marks token 0")
        return difference_code(lab, argument.name, made, "0.0: it is ignored")
    fill, mark = {
        BLOCKS: (0.0, form.values[-1]),
        ATTENDS: (form.values[-1], 0.0),
        ADDED: (0.0, min(form.values)),
    }.get(value, (0.0, 0.0))
    if fill == mark or "key" not in layout:
        return ""
    made = mask_lines(layout, form.dtype, fill, mark, "marks token 0")
    return hiding_code(lab, argument.name, made, "0.0: token 0 is hidden from the others")


# How to block a key with an argument, as observed, not as declared


@dataclass(frozen=True)
class Blocking:
    """A form of a mask argument, with the numbers that leave a key visible and that hide it."""

    argument: MaskArgument
    form: MaskForm
    visible: float
    hidden: float

    @property
    def about(self) -> dict[str, Argument]:
        """The arguments of a `Phrase` about this mask argument and form."""
        return {"argument": self.argument.name, "form": self.form.phrase}

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the argument's first layout."""
        return layouts.axes(self.argument.layouts[0])

    def in_each_layout(self) -> list[Blocking]:
        """Return one like this for each layout of the argument, which then has no other layout."""
        arguments = (dataclasses.replace(self.argument, axes=it) for it in self.argument.layouts)
        return [dataclasses.replace(self, argument=argument) for argument in arguments]

    def native(
        self,
        visible: BoolArray,
        shape: Shape,
        among: Sequence[str] = (),
        *,
        broadcast: bool = False,
    ) -> Native | None:
        """Return the mask to pass for a pattern of visible keys, or None if no layout fits it.

        Args:
            visible: the pattern, `[batch heads query key]`, True for visible; axes may have size 1.
            shape: the shape of the problem.
            among: the layouts to try in this order; by default, all of the argument's.
            broadcast: whether axes of size 1 keep that size, unless they are joined with others.
        """
        values: Array = np.where(visible, self.visible, self.hidden)
        for layout in among or self.argument.layouts:
            laid = to_layout(values, layout, shape.logits, broadcast=broadcast)
            if laid is not None:
                return self.form.array(laid)
        return None

    def passed(
        self, visible: BoolArray, shape: Shape, among: Sequence[str] = ()
    ) -> dict[str, Native]:
        """Return a dictionary with the mask that `native` returns, under the argument's name.

        At least one layout must fit the pattern.
        """
        native = self.native(visible, shape, among)
        assert native is not None
        return {self.argument.name: native}


def blockings(lab: Laboratory, argument: MaskArgument, dtype: str = "") -> Iterator[Blocking]:
    """Yield the forms in which the argument was observed to block keys.

    Try booleans and, only if they do not block keys, 0 and 1. In any case, also try 0 and −inf.
    Numbers are passed in `dtype`, where "" stands for that of the laboratory. If the argument
    declares a dtype, 0 and 1 are passed in that one instead.
    """
    boolean, ones, infinite, *_ = forms_of(dtype or lab.dtype)
    for form in (boolean, zero_one(argument, ones)):
        value = examined(lab, argument, form).value
        if value in ATTENDING:
            yield Blocking(argument, form, 1.0, 0.0)
            break
        if value in BLOCKING:
            yield Blocking(argument, form, 0.0, 1.0)
            break
    # −inf blocks where it is added, and also where whatever is not 0 blocks.
    if examined(lab, argument, infinite).value in (ADDED, *BLOCKING):
        yield Blocking(argument, infinite, 0.0, -np.inf)


def blocking(lab: Laboratory, argument: MaskArgument, dtype: str = "") -> Blocking | None:
    """Return the first of the `blockings` of the argument, or None if there is none."""
    return next(blockings(lab, argument, dtype), None)


LENGTH = 5


@topic(
    "same-mask",
    "A mask made for another library",
    "One causal mask, encoded in three ways and passed unchanged: does it hide the future?",
    place=20,
    revision=2,
)
def same_mask(lab: Laboratory) -> Iterator[tuple[Entry, Array | None]]:
    """Pass one causal mask in three encodings, without converting it to what the library expects.
    In the first, 1 attends; in the second, 1 blocks; in the third, 0 and −inf are to be added.
    Measure the share of attention that queries give to future tokens.

    Yields an entry for each encoding, with the weights `[query key]` of batch entry 0 and head 0,
    or None if there was no answer. There are no entries if no mask argument covers queries and
    keys.
    """
    candidates = [(item, item.layout_over("query", "key")) for item in lab.adapter.mask_arguments]
    argument, layout = next((pair for pair in candidates if pair[1]), (None, None))
    if argument is None or layout is None:
        return
    problem = lab.problem(Sizes(query=LENGTH, key=LENGTH))
    visible = np.tri(LENGTH, dtype=np.bool_)[None, None]
    takes_bool = examined(lab, argument, BOOL).value not in (REJECTED, CANNOT_BE_ASKED)
    marks = BOOL if takes_bool else zero_one(argument)
    ways = {
        "one-attends": Blocking(argument, marks, 1.0, 0.0),
        "one-blocks": Blocking(argument, marks, 0.0, 1.0),
        "added": Blocking(argument, ZERO_INFINITE, 0.0, INFINITE),
    }
    for written, way in ways.items():
        found = lab.ask(problem, way.passed(visible, problem.shape, (layout,)))
        encoding = Phrase(f"written.{written}")
        subject = Phrase("same-mask", {"argument": argument.name, "written": encoding})
        if isinstance(found, Refused):
            yield Entry(subject, found.value, found.told), None
        else:
            yield Entry(subject, *_outcome(lab, found)), found.applied[0, 0]


def _outcome(lab: Laboratory, found: Accepted) -> tuple[Phrase, str]:
    future = np.triu(np.ones((LENGTH, LENGTH), bool), 1)
    weights = found.applied
    lost = np.isnan(weights).any(axis=-1)
    shares = np.where(lost, 0.0, np.nan_to_num(weights) @ np.ones(LENGTH))
    ahead = np.where(future, np.nan_to_num(weights), 0.0).sum(axis=-1)
    # The last query has no future.
    share = float(ahead[..., :-1].sum() / max(shares[..., :-1].sum(), 1e-300))
    told = f"{share:.0%} of the attention of queries that have a future goes there"
    if lost.any():
        told += f"; {lost.mean():.0%} of the queries get NaN"
    plain = lab.unmasked(found)
    if lab.alike(found, among(plain, np.broadcast_to(~future, weights.shape))):
        return Phrase("same-mask.as-meant"), told
    if lab.alike(found, plain):
        return IGNORED, told
    if share == 0 and not lost.any():
        return (SOMETHING_ELSE if weights.any() else BLOCKS_EVERYTHING), told
    name = "same-mask.attends-future" + ("-with-nan" if lost.any() else "")
    return Phrase(name, {"percent": round(100 * share)}), told


UNEXPLAINED = Phrase("combined.unexplained")
EQUAL = Sizes(batch=4, heads=4, query=4, key=4)
BIASES = (-1.25, 0.5, -0.25, 1.5, -0.75)
"""Values of a bias, all of which every dtype represents exactly."""


@topic(
    "pairs",
    "Two masks at once",
    "Do two mask arguments combine, or does one win?",
    place=50,
    every_mode=True,
    shared=True,
    revision=4,
)
def pairs(lab: Laboratory) -> Iterator[Entry]:
    """Pass two mask arguments at once that hide different keys, and see how they are combined.
    A key may be visible if both masks show it, if at least one does, if a certain one does, or
    always. Repeat this with all axes of equal size, and in each layout. Pass a bias together with
    each mask, with another bias, and with the causal flag. Also pass any two of these with a custom
    scale."""
    known = [found for item in lab.arguments() if (found := blocking(lab, item)) is not None]
    for told, sizes in (("differ", lab.sizes()), ("coincide", EQUAL)):
        for one, other in itertools.combinations(known, 2):
            yield _pair(lab, one, other, sizes, told)
    for one, other in itertools.combinations(known, 2):
        # Together, the first layouts have been tried above.
        for laid in [*itertools.product(one.in_each_layout(), other.in_each_layout())][1:]:
            yield _pair(lab, *laid, lab.sizes())
    yield from _weighed(lab, [item for item in known if "key" in item.axes])


def _pair(lab: Laboratory, one: Blocking, other: Blocking, sizes: Sizes, told: str = "") -> Entry:
    """Return an entry that states how two arguments combine, in the first layout of each.

    `told` describes the sizes in the entry's subject; if it is empty, the layouts are named there.
    """
    problem = lab.problem(sizes)
    shape = problem.shape
    shown = telling_pair(one, other, shape)
    found = lab.ask(problem, one.passed(shown[0], shape) | other.passed(shown[1], shape))
    names = (one.argument.name, other.argument.name)
    about: dict[str, Argument] = {"one": names[0], "other": names[1]}
    if told:
        subject = Phrase("pair", about | {"sizes": Phrase(f"sizes.{told}")})
    else:
        axes = (item.argument.layouts[0] for item in (one, other))
        subject = Phrase("pair.laid", about | dict(zip(("of_one", "of_other"), axes, strict=True)))
    declared = REFUSED if one.argument.alone or other.argument.alone else NOTHING
    if isinstance(found, Refused):
        return Entry(subject, found.value, found.told, declared)
    value = combined(lab, found, shown[:1], shown[1], names)
    return Entry(subject, value, shown_and_weights(found, *shown), declared, not declared)


def shown_and_weights(found: Accepted, *patterns: BoolArray) -> str:
    """Return text for an entry's evidence: the first query's visible keys, and its weights."""
    rows = (np.broadcast_to(item, found.applied.shape)[0, 0, 0] * 1.0 for item in patterns)
    fed, weights = " and ".join(map(numbers, rows)), numbers(found.applied[0, 0, 0])
    return f"entry 0, head 0, query 0: visible {fed}, weights {weights}"


def telling_pair(one: Blocking, other: Blocking, shape: Shape) -> tuple[BoolArray, BoolArray]:
    """Return patterns of visible keys, one for each argument, that tell all `hypotheses` apart.

    Each hypothesis is a way to combine them. If none of 100 random pairs of patterns tells all
    apart, return the last pair.
    """
    for seed in range(100):
        pair = visible_of(one, shape, seed), visible_of(other, shape, seed + 1000)
        if distinct(hypotheses(*pair, shape)):
            break
    return pair


def hypotheses(one: BoolArray, other: BoolArray, shape: Shape) -> dict[str, BoolArray]:
    """Return the combinations of two patterns of visible keys, by the name of the way to combine.

    Each result is `[batch heads query key]`, True where a key is visible.
    """
    first, second = (np.broadcast_to(item, shape.logits) for item in (one, other))
    both, either = first & second, first | second
    neither = np.ones_like(first)
    return {"both": both, "one": first, "other": second, "either": either, "neither": neither}


def distinct(patterns: dict[str, BoolArray]) -> bool:
    """Return whether every two patterns differ in some row in which all patterns show a key."""
    several = list(patterns.values())
    shown = np.all([item.any(axis=-1) for item in several], axis=0)[..., None]
    pairs = itertools.combinations(several, 2)
    return all(((one != other) & shown).any() for one, other in pairs)


def visible_of(item: Blocking, shape: Shape, seed: int) -> BoolArray:
    """Return a random pattern `[batch heads query key]`, True where a key is visible.

    Axes that the argument lacks have size 1. If there is a key axis, the first key is visible to
    every query, so that two such patterns together do not mask a query fully.
    """
    sizes = [n if a in item.axes else 1 for a, n in zip(AXES, shape.logits, strict=True)]
    return _pattern(tuple(sizes), "key" if "key" in item.axes else "query", seed).copy()


@lru_cache(maxsize=4096)
def _pattern(sizes: tuple[int, ...], last: str, seed: int) -> BoolArray:
    random = np.random.default_rng([13, seed])
    pattern = arrange(random, sizes, AXES.index(last), (0, 1)) != 0
    if last == "key":
        pattern[..., 0] = True
    return pattern


def combined(
    lab: Laboratory,
    seen: Accepted,
    ones: Sequence[BoolArray],
    other: BoolArray,
    names: tuple[str, str],
) -> Phrase:
    """Return how the weights combine two patterns of visible keys, or `UNEXPLAINED`.

    The patterns were passed as the two arguments in `names`. The first argument may stand for any
    of the patterns in `ones`; the second stands for `other`. The weights of fully masked queries
    only have to differ from those without a mask.
    """
    shape = seen.problem.shape
    only = {"one": names[0], "other": names[1]}
    for one in ones:
        for name, visible in hypotheses(one, other, shape).items():
            if follows(lab, seen, visible):
                if name in only:
                    return Phrase("combined.only", {"argument": only[name]})
                return Phrase(f"combined.{name}")
    # Code that fills a boolean mask with numbers inverts it: each number other than 0 becomes True.
    inverted: set[Phrase] = set()
    for one in ones:
        patterns = [np.broadcast_to(item, shape.logits) for item in (one, other)]
        for kept, turned in ((0, 1), (1, 0)):
            about: dict[str, Argument] = {"argument": names[kept], "inverted": names[turned]}
            if follows(lab, seen, patterns[kept] | ~patterns[turned]):
                inverted.add(Phrase("combined.or-blocked", about))
            if follows(lab, seen, patterns[kept] & ~patterns[turned]):
                inverted.add(Phrase("combined.and-blocked", about))
    return inverted.pop() if len(inverted) == 1 else UNEXPLAINED


# A bias beside something else, and a scale


class _Given(NamedTuple):
    """An argument that is passed together with another one.

    Attributes:
        name: the name of the argument.
        native: the array to pass, or True for the causal flag.
        adds: what the argument should add to the logits.
        is_bias: whether the argument is a bias, rather than a mask or the causal flag.
    """

    name: str
    native: Native
    adds: Array
    is_bias: bool = False

    @property
    def phrase(self) -> Phrase:
        kind = "bias" if self.is_bias else "mask"
        return Phrase(f"part.{kind}", {"argument": self.name})


def _weighed(lab: Laboratory, known: Sequence[Blocking]) -> Iterator[Entry]:
    """Pass two masks, biases or causal flags together; yield entries that say which take effect.

    At the usual scale, only pairs with a bias are passed. At a custom scale, all pairs are passed,
    and the entries also say whether the scale takes effect. `known` are forms that block keys.
    """
    sizes = lab.sizes(query=5, key=5)
    shape = lab.problem(sizes).shape
    alone = {item.name for item in lab.arguments() if item.alone}
    given = [*_given(lab, known, shape)]
    several = [
        (one, other)
        for one, other in itertools.combinations(given, 2)
        if one.name != other.name and not {one.name, other.name} & alone
    ]
    scales = (None, 0.5 * shape.default_scale) if lab.adapter.custom_scale else (None,)
    for scale, (one, other) in itertools.product(scales, several):
        is_biased = one.is_bias or other.is_bias
        if scale is None and not is_biased:
            continue
        problem = lab.problem(sizes, scale=scale)
        found = lab.ask(problem, {one.name: one.native, other.name: other.native})
        about: dict[str, Argument] = {"one": one.phrase, "other": other.phrase}
        subject = Phrase(f"pair.with-{'bias' if scale is None else 'scale'}", about)
        if isinstance(found, Refused):
            if found.value != CANNOT_BE_ASKED:
                yield Entry(subject, found.value, found.told)
            continue
        fed = " and ".join(numbers(item.adds[0, 0, 1]) for item in (one, other))
        weights = numbers(found.applied[0, 0, 1])
        evidence = f"entry 0, head 0, query 1: {fed} added to the logits, weights {weights}"
        yield Entry(subject, _effect(lab, found, one, other), evidence)


def _given(lab: Laboratory, known: Sequence[Blocking], shape: Shape) -> Iterator[_Given]:
    """Yield a mask for each argument in `known`, each possible bias, and the causal flag.

    The flag is left out if it needs a mask argument, or is declared to be rejected or ignored
    beside one.
    """
    for seed, item in enumerate(known):
        visible = visible_of(item, shape, seed)
        added = np.broadcast_to(np.where(visible, 0.0, -np.inf), shape.logits)
        (native,) = item.passed(visible, shape).values()
        yield _Given(item.argument.name, native, added)
    numbered = forms_of(lab.dtype)[1]
    for seed, argument in enumerate(lab.arguments()):
        if examined(lab, argument, numbered).value == ADDED:
            fed, laid = telling(dataclasses.replace(numbered, values=BIASES), argument, shape, seed)
            if fed.shape[-1] > 1:
                added = np.broadcast_to(fed, shape.logits)
                yield _Given(argument.name, numbered.array(laid), added, is_bias=True)
    flag = lab.adapter.causal_flag
    if flag is not None and not flag.needs and not flag.alone and flag.effect == "always":
        triangle = np.where(causal_mask(shape, "top-left"), 0.0, -np.inf)
        yield _Given(flag.name, True, np.broadcast_to(triangle, shape.logits))


def _effect(lab: Laboratory, seen: Accepted, one: _Given, other: _Given) -> Phrase:
    """Return which of two arguments had an effect on the weights, and whether the scale had one.

    Return `UNEXPLAINED` if no combination of effects predicts the weights.
    """
    problem = seen.problem
    plain = lab.unmasked(seen)
    effects = [(Phrase("combined.both"), one.adds + other.adds)]
    for kept, lost in ((one, other), (other, one)):
        effects.append((Phrase("combined.only", {"argument": kept.name}), kept.adds))
        if lost.is_bias:
            scaled = Phrase("combined.scaled", {"argument": lost.name})
            effects.append((scaled, kept.adds + problem.logit_scale * lost.adds))
    effects.append((Phrase("combined.neither"), np.zeros_like(one.adds)))
    for value, added in effects:
        if lab.alike(seen, added_to(plain, added)):
            return value
    if problem.scale is not None:
        usual = lab.plain(Sizes(*problem.shape.logits), problem.dtype).applied
        if lab.alike(seen, added_to(usual, one.adds + other.adds)):
            return Phrase("combined.without-scale")
    return UNEXPLAINED
