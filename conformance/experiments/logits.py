"""Experiments on soft caps, sinks, ALiBi and rotary embeddings.

Each experiment poses a problem that has the feature, with arguments made as the adapter declares.
Each known convention predicts attention weights; the entry names the first convention that predicts
the weights that were actually applied.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import get_args

import numpy as np

from conformance.adapter.arguments import MaskArgument, to_layout
from conformance.adapter.base import Adapter, Mode
from conformance.adapter.features import (
    Alibi,
    RotaryBase,
    RotaryConfig,
    RotaryTables,
    Sinks,
    SoftCap,
)
from conformance.definition.arithmetic import Exact
from conformance.definition.attention import forward
from conformance.definition.dtypes import Array, IntArray
from conformance.definition.problem import Pairs, Positions, Problem, Rotary
from conformance.definition.rotary import POSITION_AXES, RotaryAxes, RotaryScaling, length_of
from conformance.errors import Unsupported
from conformance.experiments.causal import WINDOW_LENGTHS
from conformance.experiments.experiment import agreeing, topic
from conformance.experiments.masks import blocking
from conformance.records.findings import NOTHING, Argument, Entry, Phrase
from conformance.requirements.laboratory import (
    CANNOT_BE_ASKED,
    Laboratory,
    Natives,
    Outcome,
    Refused,
    Sizes,
    numbers,
)
from conformance.requirements.meaning import ADDED, ZERO_INFINITE, examined

Guesses = Mapping[str, Array]
"""The weights `[batch heads query key]` that each convention predicts, by the id of its phrase."""

IGNORED, UNEXPLAINED = "feature.ignored", Phrase("feature.unexplained")

TEXT, ROWS, COLUMNS = 2, 2, 3
"""How many tokens of text are before an image, and the sizes of the image."""


@topic(
    "soft-cap",
    "The soft cap",
    "Does it cap scaled logits, before masks and biases, and what do 0 and −1 mean?",
    place=45,
    revision=2,
    every_mode=True,
    needs=(SoftCap,),
)
def soft_cap(lab: Laboratory) -> Iterator[Entry]:
    """Set a soft cap of 0.5, and find the formula that predicts the attention weights.
    Repeat this together with each mask argument, as a mask and as a bias. Then set the cap to 0, −1
    and infinity."""
    cap = 0.5
    problem = lab.problem()
    logits, scale = forward(problem, Exact()).logits, problem.logit_scale
    capped = problem.replace(soft_cap=cap)
    (argument,) = lab.features(SoftCap)
    about: dict[str, Argument] = {"argument": argument.name}
    formulas = {
        "soft-cap.of-scaled": cap * np.tanh(logits / cap),
        "soft-cap.of-unscaled": scale * cap * np.tanh(logits / scale / cap),
        "soft-cap.clip": np.clip(logits, -cap, cap),
        "soft-cap.without-factor": np.tanh(logits / cap),
        IGNORED: logits,
    }
    guesses = {name: _softmax(each) for name, each in formulas.items()}
    yield _entry(lab, Phrase("soft-cap.formula", about), _asked(lab, capped), guesses)
    for mask in lab.arguments():
        yield from _beside_mask(lab, mask, capped, logits, cap, about)
        yield from _beside_bias(lab, mask, capped, logits, cap, about)
    for number in (0.0, -1.0, math.inf):
        found = lab.ask(problem, {argument.name: number})
        told: dict[str, Argument] = {**about, "value": numbers(np.array([number]))[1:-1]}
        at_edge = {"soft-cap.no-cap": logits, "soft-cap.all-equal": np.zeros_like(logits)}
        if number == -1.0:
            # tanh is odd, so the formula itself knows no sign.
            at_edge["soft-cap.without-sign"] = np.tanh(logits)
        every = {name: _softmax(each) for name, each in at_edge.items()}
        said = Phrase("soft-cap.no-cap") if number == argument.none else NOTHING
        yield _entry(lab, Phrase("soft-cap.edge", told), found, every, said)


def _beside_mask(
    lab: Laboratory,
    mask: MaskArgument,
    capped: Problem,
    logits: Array,
    cap: float,
    about: dict[str, Argument],
) -> Iterator[Entry]:
    """Yield an entry that states whether the cap is applied before or after a mask.

    The mask blocks one key. Yield nothing if the argument `mask` cannot do so. `capped` is the
    problem with the cap, `logits` are those without the cap, and `about` are the arguments of the
    entry's subject.
    """
    way = blocking(lab, mask)
    if way is None or "key" not in way.axes:
        return
    visible = np.arange(logits.shape[-1])[None, None, None] != 1
    found = _asked(lab, capped, way.passed(visible, capped.shape))
    formula = cap * np.tanh(logits / cap)
    guesses = {
        "soft-cap.before-mask": _softmax(np.where(visible, formula, -np.inf)),
        # If the mask is applied first, tanh lifts the key's logit from −inf to −cap.
        "soft-cap.masked-first": _softmax(np.where(visible, formula, -cap)),
        IGNORED: _softmax(np.where(visible, logits, -np.inf)),
        "soft-cap.mask-ignored": _softmax(formula),
    }
    subject = Phrase("soft-cap.beside-mask", {**about, "mask": mask.name})
    yield _entry(lab, subject, found, guesses)


def _beside_bias(
    lab: Laboratory,
    mask: MaskArgument,
    capped: Problem,
    logits: Array,
    cap: float,
    about: dict[str, Argument],
) -> Iterator[Entry]:
    """Yield an entry that states whether the cap is applied before or after a bias is added.

    Yield nothing if the argument `mask` does not take a bias. `capped`, `logits` and `about` are as
    in `_beside_mask`.
    """
    if examined(lab, mask, ZERO_INFINITE).value != ADDED or "key" not in mask.layouts[0]:
        return
    # The numbers are of the same magnitude as the cap.
    bias = np.linspace(-1.0, 1.0, logits.shape[-1])[None, None, None]
    native = to_layout(bias, mask.layouts[0], capped.shape.logits, broadcast=False)
    if native is None:
        return
    found = _asked(lab, capped, {mask.name: native})
    formula = cap * np.tanh(logits / cap)
    guesses = {
        "soft-cap.before-bias": _softmax(formula + bias),
        "soft-cap.added-first": _softmax(cap * np.tanh((logits + bias) / cap)),
        IGNORED: _softmax(logits + bias),
        "soft-cap.bias-ignored": _softmax(formula),
    }
    subject = Phrase("soft-cap.beside-bias", {**about, "mask": mask.name})
    yield _entry(lab, subject, found, guesses)


@topic(
    "sinks",
    "Sinks",
    "What is a sink's logit: natural or of base 2, scaled, one for each head?",
    place=46,
    every_mode=True,
    needs=(Sinks,),
)
def sinks(lab: Laboratory) -> Iterator[Entry]:
    """Give each head a sink, and find the unit of its logit that predicts the attention weights.
    Set all sinks to −inf. Set sinks together with a mask that blocks every key of a batch entry."""
    problem = lab.problem()
    logits, scale = forward(problem, Exact()).logits, problem.logit_scale
    given = np.linspace(1.0, 3.0, problem.shape.heads)
    with_sinks = problem.replace(sinks=problem.format.round(given))
    extra = np.asarray(with_sinks.sinks)[:, None, None]
    units = {
        "sinks.natural": extra,
        "sinks.log2": extra * math.log(2.0),
        "sinks.times-scale": extra * scale,
        "sinks.first-for-all": np.broadcast_to(extra[:1], extra.shape),
        "sinks.reversed": extra[::-1],
        "sinks.zero": np.zeros_like(extra),
    }
    guesses = {name: _softmax(logits, each) for name, each in units.items()}
    guesses[IGNORED] = _softmax(logits)
    yield _entry(lab, Phrase("sinks.units"), _asked(lab, with_sinks), guesses)
    none = problem.replace(sinks=np.full_like(given, -np.inf))
    at_edge = {"sinks.none": _softmax(logits), "sinks.zero": _softmax(logits, 0 * extra)}
    yield _entry(lab, Phrase("sinks.minus-inf"), _asked(lab, none), at_edge)
    for mask in lab.arguments():
        way = blocking(lab, mask)
        if way is None:
            continue
        visible = np.ones(problem.shape.logits, np.bool_)
        visible[0] = False
        native = way.native(visible[:, :1, :1], problem.shape)
        if native is None:
            continue
        found = _asked(lab, with_sinks, {mask.name: native})
        fills = {"row.zeros": 0.0, "row.nan": np.nan, "row.uniform": 1 / visible.shape[-1]}
        natural = guesses["sinks.natural"]
        rows = {name: np.where(visible, natural, fill) for name, fill in fills.items()}
        subject = Phrase("sinks.beside-mask", {"mask": mask.name})
        yield _entry(lab, subject, found, rows, NOTHING)


@topic(
    "alibi",
    "ALiBi",
    "Is a slope times the distance subtracted, and from where does it count?",
    place=47,
    revision=2,
    every_mode=True,
    needs=(Alibi,),
)
def alibi(lab: Laboratory) -> Iterator[Entry]:
    """Give each head a slope, and find the linear bias that predicts the attention weights.
    Do this for equal and, if slopes are passed, for different numbers of queries and keys, without
    a causal mask if possible."""
    (argument,) = lab.features(Alibi)
    for told, sizes in WINDOW_LENGTHS[:1] if lab.sharing == "self" else WINDOW_LENGTHS:
        square = sizes.query == sizes.key
        causal = None if square else argument.alignment
        problem = lab.problem(sizes)
        own = argument.own(problem.shape)
        if own is not None and not square:
            continue
        given = np.linspace(0.25, 0.75, problem.shape.heads) if own is None else own
        slopes = problem.format.round(given)
        logits, slope = forward(problem, Exact()).logits, slopes[:, None, None]
        keys, queries = np.arange(sizes.key), np.arange(sizes.query)[:, None]
        if own is None:
            found = lab.ask(problem, {argument.name: argument.native(slopes, problem)})
        else:
            # A layer that makes its slopes itself may do so only with a causal mask.
            asked, found = _asked_causal(lab, problem.replace(slopes=slopes))
            logits = np.where(asked.allowed_in_full(), logits, -np.inf)
        guesses: dict[str, Array] = {}
        for name, offset in (("top-left", 0), ("bottom-right", sizes.key - sizes.query)):
            distance = keys - queries - offset
            ways = {
                "distance": -slope * np.abs(distance),
                "doubled": -2 * slope * np.abs(distance),
                "plus": slope * np.abs(distance),
                "signed": slope * distance,
            }
            tail = "" if square else f".{name}"
            for kind, bias in ways.items():
                if square or kind != "doubled":
                    guesses.setdefault(f"alibi.{kind}{tail}", _softmax(logits + bias))
        guesses |= {IGNORED: _softmax(logits), "alibi.of-key": _softmax(logits - slope * keys)}
        tail = "" if square else f".{causal}"
        said = Phrase(f"alibi.distance{tail}") if square or causal else NOTHING
        yield _entry(lab, Phrase("alibi.bias", {"lengths": told}), found, guesses, said)


@topic(
    "rotary",
    "Rotary embeddings",
    "Which components form a pair, and which way do they turn?",
    place=48,
    every_mode=True,
    needs=(RotaryTables, RotaryBase, RotaryConfig),
)
def rotary(lab: Laboratory) -> Iterator[Entry]:
    """Rotate queries and keys, and find the rotation that predicts the attention weights.
    Rotations differ in the components that form a pair, and in the direction. Do this for each way
    of pairing that the adapter declares, for whole heads and, if possible, for a part of each."""
    problem = lab.problem(Sizes(query=5, key=5))
    head = problem.shape.head_size
    declared: list[RotaryTables | RotaryBase | RotaryConfig] = [*lab.features(RotaryTables)]
    configured = (it for it in lab.features(RotaryConfig) if "default" in it.kinds)
    for argument in (*declared, *lab.features(RotaryBase), *configured):
        every: tuple[Pairs, ...] = get_args(Pairs) if argument.flag else (argument.pairs,)
        for pairs in every:
            in_part = isinstance(argument, RotaryTables)
            in_part = in_part or bool(getattr(argument, "size", getattr(argument, "partial", 0)))
            for size in (head - head % 2, 2 * (head // 4)) if in_part else (head,):
                if size % 2:
                    continue
                wanted = Rotary(size=size, pairs=pairs)
                turned = problem.replace(rotary=wanted)
                told = Phrase("rotary.all" if size >= head - 1 else "rotary.part")
                about: dict[str, Argument] = {"size": told, "pairs": Phrase(f"rotary.{pairs}")}
                guesses = _rotations(turned, wanted)
                yield _entry(lab, Phrase("rotary.turns", about), _asked(lab, turned), guesses)


def _rotations(problem: Problem, wanted: Rotary) -> Guesses:
    guesses = {}
    last = problem.shape.key_length - 1
    # If positions run backwards, all angles have the opposite sign.
    at = Positions(query=last - problem.position_of_queries, key=last - problem.position_of_keys)
    for pairs in sorted(get_args(Pairs), key=lambda pairs: pairs != wanted.pairs):
        turned = problem.replace(rotary=dataclasses.replace(wanted, pairs=pairs))
        guesses[f"rotary.{pairs}"] = forward(turned, Exact()).weights
        backwards = turned.replace(positions=at)
        guesses[f"rotary.{pairs}-backwards"] = forward(backwards, Exact()).weights
    guesses[IGNORED] = forward(problem.replace(rotary=None), Exact()).weights
    return guesses


@topic(
    "rotary-scaling",
    "Scaled rotary frequencies",
    "Which frequencies are scaled and how, and where is the attention factor?",
    place=49,
    every_mode=True,
    needs=(RotaryConfig,),
)
def rotary_scaling(lab: Laboratory) -> Iterator[Entry]:
    """For each kind of scaling that the adapter declares, rotate 13 tokens, which are more than the
    original length of kinds that depend on it, and find the frequencies and the attention factor
    that predict the attention weights. YaRN is asked with and without truncation of its ramp."""
    problem = lab.problem(Sizes(query=13, key=13))
    size = problem.shape.head_size // 2 * 2
    for argument in lab.features(RotaryConfig):
        problem = problem.replace(rotary=Rotary(size=size, base=50.0, pairs=argument.pairs))
        for subject, scaling in _scalings(size // 2).items():
            if scaling.rope_type in argument.kinds and (argument.partial or size % 2 == 0):
                yield from _scaled(lab, problem.replace(rotary_scaling=scaling), subject, scaling)


def _scalings(pairs: int) -> dict[str, RotaryScaling]:
    """Return the scalings that are asked about, by the id of what they are called."""
    made = partial(RotaryScaling, factor=4.0)
    yarn = partial(
        made, rope_type="yarn", original_max_position_embeddings=32, beta_fast=2.0, beta_slow=0.5
    )
    return {
        "rotary-scaling.linear": made(rope_type="linear"),
        "rotary-scaling.dynamic": made(rope_type="dynamic", original_max_position_embeddings=6),
        "rotary-scaling.yarn": yarn(),
        "rotary-scaling.yarn-untruncated": yarn(truncate=False),
        "rotary-scaling.longrope": made(
            rope_type="longrope",
            original_max_position_embeddings=6,
            short_factor=tuple(1.0 + 0.5 * (pair % 3) for pair in range(pairs)),
            long_factor=tuple(1.5 + 1.25 * pair for pair in range(pairs)),
            attention_factor=1.125,
        ),
        "rotary-scaling.llama3": made(
            rope_type="llama3",
            original_max_position_embeddings=32,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
    }


def _scaled(
    lab: Laboratory, problem: Problem, name: str, scaling: RotaryScaling
) -> Iterator[Entry]:
    """Yield which frequencies and, if the kind has one, which attention factor are applied."""
    assert problem.rotary is not None
    of: dict[str, Argument] = {"kind": Phrase(name)}
    size, base, length = problem.rotary.size, problem.rotary.base, length_of(problem)
    gain, longest = scaling.gain, 4 * (scaling.original_max_position_embeddings or 1)
    plain = base ** (-np.arange(0.0, size, 2.0) / size)
    frequencies = {"rotary-scaling.as-told": scaling.scaled(size, base, length).frequencies()}
    if scaling.rope_type == "dynamic":
        frequencies["rotary-scaling.for-longest"] = scaling.scaled(
            size, base, longest
        ).frequencies()
        frequencies["rotary-scaling.for-last-position"] = scaling.scaled(
            size, base, length - 1
        ).frequencies()
    if scaling.rope_type == "longrope":
        frequencies["rotary-scaling.short"] = scaling.scaled(size, base, 1).frequencies()
    if scaling.rope_type == "yarn":
        other = dataclasses.replace(scaling, truncate=scaling.truncate is False)
        cut = (
            "rotary-scaling.ramp-truncated"
            if other.truncate
            else "rotary-scaling.ramp-not-truncated"
        )
        frequencies[cut] = other.scaled(size, base, length).frequencies()
    if scaling.rope_type == "llama3":
        swapped = dataclasses.replace(scaling, low_freq_factor=4.0, high_freq_factor=1.0)
        frequencies["rotary-scaling.exchanged"] = swapped.scaled(size, base, length).frequencies()
    if scaling.rope_type != "linear":
        frequencies["rotary-scaling.all-divided"] = plain / 4
    frequencies["rotary-scaling.none"] = plain
    factors = {"rotary-scaling.on-both": gain}
    if gain != 1:
        # A factor on queries or keys alone multiplies logits once, not twice.
        factors |= {"rotary-scaling.no-factor": 1.0, "rotary-scaling.squared": gain**2}
        factors["rotary-scaling.on-one-side"] = math.sqrt(gain)
    asked, found = Phrase("rotary-scaling.frequencies", of), _asked(lab, problem)
    if isinstance(found, Refused):
        yield agreeing(asked, found.value, found.told, Phrase("rotary-scaling.as-told"))
        return
    turned, multiplied = UNEXPLAINED, UNEXPLAINED
    for (kind, rates), (factor, number) in itertools.product(frequencies.items(), factors.items()):
        known = _turning_by(problem.rotary, rates, gain=number)
        predicted = forward(problem.replace(rotary_scaling=known), Exact()).weights
        if lab.alike(found, predicted):
            turned, multiplied = Phrase(kind), Phrase(factor)
            break
    evidence = f"entry 0, head 0, query 12: {numbers(found.applied[0, 0, -1])}"
    yield agreeing(asked, turned, evidence, Phrase("rotary-scaling.as-told"))
    if gain != 1:
        where = Phrase("rotary-scaling.factor", of)
        yield agreeing(where, multiplied, evidence, Phrase("rotary-scaling.on-both"))


def _turning_by(
    rotary: Rotary, rates: Array, gain: float = 1.0, sections: tuple[int, ...] | None = None
) -> RotaryScaling:
    """Return the scaling with which pairs turn by `rates` `[pair]`, in radians per position.

    LongRoPE has a divisor for each pair, so it can say any frequencies. `gain` multiplies cosine
    and sine, and `sections` are those of several axes.
    """
    pairs = rotary.size // 2
    divided = tuple((rotary.base ** (-np.arange(pairs) / pairs) / rates).tolist())
    return RotaryScaling(
        rope_type="longrope",
        factor=1.0,
        original_max_position_embeddings=2,
        short_factor=divided,
        long_factor=divided,
        attention_factor=gain,
        mrope_section=sections,
    )


def _has_axes(adapter: Adapter, mode: Mode) -> bool:
    """Return whether a configuration has an argument for positions on axes."""
    return any(isinstance(one, RotaryConfig) and one.axes for one in adapter.features)


@topic(
    "position-axes",
    "Positions on several axes",
    "How are the sections of rotary pairs laid out that turn by time, height and width?",
    place=51,
    every_mode=True,
    needs=(RotaryConfig,),
    where=_has_axes,
)
def position_axes(lab: Laboratory) -> Iterator[Entry]:
    """Rotate 13 tokens, six of which are an image of two rows and three columns, by their positions
    of time, height and width, with sections of different lengths. Find the layout of the sections
    and the order of the positions that predict the attention weights. Do this for each layout that
    the adapter declares."""
    problem = lab.problem(Sizes(query=13, key=13))
    head = problem.shape.head_size
    size = head // 2 * 2
    for argument in lab.features(RotaryConfig):
        whole = argument.partial or size == head
        for laid in argument.sections if argument.axes and whole else ():
            at = _of_image(problem.shape.batch)
            turned = problem.replace(
                rotary=Rotary(size=size, base=50.0, pairs=argument.pairs),
                rotary_scaling=_unequal_sections(size // 2, interleaved=laid == "interleaved"),
                axes=RotaryAxes(query=at, key=at),
            )
            yield _laid_out(lab, turned)


def _of_image(batch: int) -> IntArray:
    """Return positions `[batch 13 3]` of a text with an image in it; entries begin one apart."""
    image = TEXT + np.indices((1, ROWS, COLUMNS)).reshape(3, -1).T
    after = image.max() + 1 + np.arange(13 - TEXT - len(image))
    texts = (np.repeat(text[:, None], 3, axis=1) for text in (np.arange(TEXT), after))
    one = np.concatenate([next(texts), image, next(texts)])
    return np.asarray(one + np.arange(batch)[:, None, None])


def _unequal_sections(pairs: int, *, interleaved: bool) -> RotaryScaling:
    """Return sections of different lengths that can lie side by side and be interleaved."""
    height, width = (pairs + 1) // 3, max(pairs // 3 - 1, min(pairs // 3, 1))
    return RotaryScaling(
        rope_type="default",
        mrope_section=(pairs - height - width, height, width),
        mrope_interleaved=interleaved or None,
    )


def _laid_out(lab: Laboratory, problem: Problem) -> Entry:
    """Return an entry that states by which positions which pairs turn."""
    scaling = problem.rotary_scaling
    assert scaling is not None
    declared = _layout(interleaved=bool(scaling.mrope_interleaved))
    subject = Phrase("position-axes.sections", {"laid": declared})
    found = _asked(lab, problem)
    if isinstance(found, Refused):
        return agreeing(subject, found.value, found.told, declared)
    value = UNEXPLAINED
    for phrase, turned in _layouts(problem, scaling):
        if lab.alike(found, forward(turned, Exact()).weights):
            value = phrase
            break
    evidence = f"entry 0, head 0, query 12: {numbers(found.applied[0, 0, -1])}"
    return agreeing(subject, value, evidence, declared)


def _layout(*, interleaved: bool) -> Phrase:
    return Phrase(f"position-axes.{'interleaved' if interleaved else 'side-by-side'}")


def _layouts(problem: Problem, scaling: RotaryScaling) -> Iterator[tuple[Phrase, Problem]]:
    """Yield what sections may mean, with the problem for which that is right."""
    axes, rotary = problem.axes, problem.rotary
    assert axes is not None
    assert rotary is not None
    assert scaling.mrope_section is not None
    sections = scaling.mrope_section
    told = bool(scaling.mrope_interleaved)
    for order in itertools.permutations(range(3)):
        rows = RotaryAxes(query=axes.query[..., order], key=axes.key[..., order])
        for interleaved in (told, not told):
            laid = RotaryScaling(
                rope_type="default", mrope_section=sections, mrope_interleaved=interleaved or None
            )
            phrase = _layout(interleaved=interleaved)
            if order != (0, 1, 2):
                names: dict[str, Argument] = {
                    "laid": phrase,
                    "order": [POSITION_AXES[axis] for axis in order],
                }
                phrase = Phrase("position-axes.in-order", names)
            yield phrase, problem.replace(axes=rows, rotary_scaling=laid)
    begun = np.concatenate([np.arange(count) for count in sections])
    again = _turning_by(rotary, rotary.base ** (-begun / (rotary.size // 2)), sections=sections)
    yield Phrase("position-axes.frequencies-begin-again"), problem.replace(rotary_scaling=again)
    for axis, name in enumerate(POSITION_AXES):
        of = RotaryAxes(query=axes.query[..., [axis] * 3], key=axes.key[..., [axis] * 3])
        yield Phrase("position-axes.one-axis", {"axis": name}), problem.replace(axes=of)
    yield Phrase("position-axes.tokens"), problem.replace(axes=None, rotary_scaling=None)


def _softmax(logits: Array, sink: Array | float = -np.inf) -> Array:
    """Return the softmax over keys, with the exponential of a sink's logit in the denominator."""
    peak = np.maximum(logits.max(axis=-1, keepdims=True), sink)
    with np.errstate(invalid="ignore"):
        powers = np.exp(logits - peak)
        return powers / (powers.sum(axis=-1, keepdims=True) + np.exp(sink - peak))


def _asked(lab: Laboratory, problem: Problem, natives: Natives | None = None) -> Outcome:
    """Call the implementation with a problem, and return the outcome.

    The problem is encoded as the adapter declares, and the mask arguments `natives` are passed too.
    The outcome is `Refused` if the declarations cannot encode the problem.
    """
    try:
        said = lab.adapter.masks.spell(problem)
    except Unsupported as reason:
        return Refused(str(reason), unsupported=True, value=CANNOT_BE_ASKED)
    given = {**said.arguments, **(natives or {})}
    return lab.ask(problem, dataclasses.replace(said, arguments=given))


def _asked_causal(lab: Laboratory, problem: Problem) -> tuple[Problem, Outcome]:
    """Call the implementation with a problem; return the problem that was posed, and the outcome.

    If the question cannot be asked without a causal mask, the problem gets a top-left one.
    """
    found = _asked(lab, problem)
    if isinstance(found, Refused) and found.value == CANNOT_BE_ASKED:
        problem = problem.replace(causal="top-left")
        found = _asked(lab, problem)
    return problem, found


def _entry(
    lab: Laboratory, subject: Phrase, found: Outcome, guesses: Guesses, said: Phrase | None = None
) -> Entry:
    """Return an entry with the first convention that predicts the weights, or `UNEXPLAINED`.

    `said` is what the adapter declares; by default, it is the first convention in `guesses`.
    """
    declared = Phrase(next(iter(guesses))) if said is None else said
    if isinstance(found, Refused):
        return agreeing(subject, found.value, found.told, declared)
    value = UNEXPLAINED
    if np.isnan(found.applied).all():
        value = Phrase("causal.nan")
    for name, predicted in guesses.items():
        if lab.alike(found, predicted):
            value = Phrase(name)
            break
    evidence = f"entry 0, head 0, query 0: {numbers(found.applied[0, 0, 0])}"
    return agreeing(subject, value, evidence, declared)
