"""Experiments on what is returned beside the output: weights, log-sum-exp and largest logit.

Another experiment finds what dropout does to weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from conformance.adapter.arguments import AXES, Native
from conformance.adapter.base import ReturnedStatistic
from conformance.adapter.features import Sinks, SoftCap
from conformance.definition.arithmetic import Exact
from conformance.definition.attention import forward
from conformance.definition.comparison import BETWEEN_ANSWERS
from conformance.definition.dtypes import Array
from conformance.definition.statistics import LOG_SUM_EXP, MAX_LOGIT, RowStatistic
from conformance.errors import Unsupported
from conformance.experiments.experiment import agreeing, topic
from conformance.experiments.masks import BIASES, blockings
from conformance.records.findings import NOTHING, Entry, Part, Phrase
from conformance.requirements.laboratory import (
    SOMETHING_ELSE,
    Accepted,
    Laboratory,
    Refused,
    numbers,
)
from conformance.requirements.meaning import ADDED, examined, forms_of, telling
from conformance.requirements.probed import returned_weights
from conformance.requirements.requirement import returns

SHAPES = {"per head": "[batch, heads, query, key]", "averaged": "[batch, query, key]"}


@topic(
    "weights",
    "Returned weights",
    "Are they for each head, do they sum to 1, are they the weights that were applied?",
    place=90,
    every_mode=True,
    shared=True,
    revision=2,
)
def returned(lab: Laboratory) -> Iterator[Entry]:
    """Compare the returned weights with the applied ones, which the problem's output reveals.
    Also sum the returned weights over the keys. If logits can be returned instead, find out whether
    they are those before or after a bias and a soft cap."""
    if lab.mode == lab.adapter.modes[0] and lab.fixed_sharing is None:
        yield from _logits(lab)
    found = lab.plain()
    weights = found.answer.weights
    declared = (lab.adapter.returns_weights or "none") if lab.mode.weights else "none"
    seen = "none" if weights is None else "per head" if weights.ndim == 4 else "averaged"
    shape = "" if weights is None else f"shape {list(weights.shape)}, {SHAPES[seen]}"
    if returned_weights(lab.adapter, seen).name("option"):
        shape += f", asked for with {lab.adapter.weights_option}"
    value, said = (returned_weights(lab.adapter, each) for each in (seen, declared))
    yield agreeing(Phrase("weights.returned"), value, shape, said)
    if weights is None:
        return
    noise = lab.noise(found.problem)
    applied = found.applied if weights.ndim == 4 else found.applied.mean(axis=1)
    noise = noise if weights.ndim == 4 else noise.mean(axis=1)
    sums = weights.sum(axis=-1)
    normal = (np.abs(sums - 1) <= BETWEEN_ANSWERS * noise.sum(axis=-1)).all()
    told = f"sums over the keys lie between {sums.min():.6g} and {sums.max():.6g}"
    value = Phrase(f"weights.sum-{'one' if normal else 'not-one'}")
    yield Entry(Phrase("weights.sum"), value, told)
    same = (np.abs(weights - applied) <= BETWEEN_ANSWERS * noise).all()
    row = (0, 0, 0) if weights.ndim == 4 else (0, 0)
    told = f"entry 0, query 0: returned {numbers(weights[row])}, applied {numbers(applied[row])}"
    value = Phrase("weights.same" if same else "weights.others")
    yield Entry(Phrase("weights.applied"), value, told)


LOGITS_APART = 1e-2
"""The largest difference between returned logits and those of a stage that they are taken for."""


def _logits(lab: Laboratory) -> Iterator[Entry]:
    """Yield an entry for each option that returns logits: the stage of which they are.

    A bias and a soft cap are passed, as far as there are arguments for them.
    """
    cap, problem = 0.5, lab.problem()
    products = forward(problem, Exact()).logits
    natives: dict[str, Native] = {}
    bias = np.zeros(1)
    numbered = forms_of(lab.dtype)[1]
    for argument in lab.arguments():
        if not natives and examined(lab, argument, numbered).value == ADDED:
            bias, laid = telling(replace(numbered, values=BIASES), argument, problem.shape)
            natives[argument.name] = numbered.array(laid)
    for feature in lab.features(SoftCap):
        natives[feature.name] = cap
    capped = natives.keys() - {argument.name for argument in lab.arguments()}

    def tanh(logits: Array) -> Array:
        return cap * np.tanh(logits / cap) if capped else logits

    stages = {
        "unscaled": products / problem.logit_scale,
        "scaled": products,
        "capped": tanh(products),
        "biased": products + bias,
        "capped-biased": tanh(products) + bias,
        "biased-capped": tanh(products + bias),
    }
    for option, options in lab.adapter.returned_logits.items():
        mode = replace(lab.mode, options={**lab.mode.options, **options}, weights=True)
        found = lab.ask(problem, natives, mode=mode)
        subject = Phrase("logits.returned", {"option": option})
        if isinstance(found, Refused):
            yield Entry(subject, found.value, found.told)
            continue
        got, value = found.answer.weights, SOMETHING_ELSE
        if got is None:
            yield Entry(subject, Phrase("weights.none"))
            continue
        for name, stage in stages.items():
            if stage.shape == got.shape and np.abs(got - stage).max() <= LOGITS_APART:
                value = Phrase(f"logits.{name}")
                break
        yield Entry(subject, value, f"entry 0, head 0, query 0: {numbers(got[0, 0, 0])}")


BIASED = 1.5
"""The logit of each sink beside which a statistic of rows is asked for."""


@topic(
    "log-sum-exp",
    "The log-sum-exp",
    "In which base is it, does a sink count, and what is that of a query that sees no key?",
    place=95,
    every_mode=True,
    every_dtype=True,
    revision=2,
    where=returns(LOG_SUM_EXP),
)
def log_sum_exp(lab: Laboratory) -> Iterator[Entry]:
    """Find out of which logits, and in which base, the returned log-sum-exp is. Ask for it beside a
    sink, and for a query whose keys are all blocked by each mask argument."""
    problem = lab.problem()
    results = forward(problem, Exact())
    logits, natural = results.logits, results.log_total[..., 0]
    unscaled = logits / problem.logit_scale
    stages = {
        "e": natural,
        "2": natural / math.log(2),
        "negated": -natural,
        "sum": np.exp(natural),
        "maximum": logits.max(axis=-1),
        "without-maximum": natural - logits.max(axis=-1),
        "unscaled": np.logaddexp.reduce(unscaled, axis=-1),
    }
    yield from _statistic(lab, LOG_SUM_EXP, stages)


@topic(
    "max-logit",
    "The largest logit",
    "Of which logits is it, does a sink count, and what is that of a query that sees no key?",
    place=96,
    every_mode=True,
    every_dtype=True,
    where=returns(MAX_LOGIT),
)
def max_logit(lab: Laboratory) -> Iterator[Entry]:
    """Find out of which logits, and in which base, the returned largest logit is. Ask for it beside
    a sink, and for a query whose keys are all blocked by each mask argument."""
    problem = lab.problem()
    results = forward(problem, Exact())
    largest = results.logits.max(axis=-1)
    stages = {
        "e": largest,
        "2": largest / math.log(2),
        "unscaled": largest / problem.logit_scale,
        "absolute": np.abs(results.logits).max(axis=-1),
        "log-sum-exp": results.log_total[..., 0],
        "of-head": np.broadcast_to(largest.max(axis=-1, keepdims=True), largest.shape),
    }
    yield from _statistic(lab, MAX_LOGIT, stages)


def _statistic(
    lab: Laboratory, statistic: RowStatistic, stages: dict[str, Array]
) -> Iterator[Entry]:
    """Yield the entries about a returned statistic of rows.

    `stages` holds what may be returned without a mask, by the last part of the entry's value.
    """
    declared, problem = lab.adapter.statistics_in(lab.mode)[statistic.name], lab.problem()
    found, unit = lab.plain(), math.log(2) if declared.base == "2" else 1.0
    if statistic.name not in found.answer.statistics:
        raise Unsupported(f"returns no {statistic.title}")
    got, chapter = found.answer.statistics[statistic.name] / unit, statistic.chapter
    value = SOMETHING_ELSE
    for name, stage in stages.items():
        if np.abs(got - stage).max() <= LOGITS_APART * (1 + np.abs(stage).max()):
            value = Phrase(f"{chapter}.{name}")
            break
    told = f"entry 0, head 0: {numbers(got[0, 0])}"
    said = Phrase(f"{chapter}.{declared.base}")
    yield agreeing(Phrase(f"{chapter}.returned"), value, told, said)
    dtype = found.answer.dtypes.get(statistic.name, "")
    yield Entry(Phrase(f"{chapter}.dtype"), Phrase("text", {"text": dtype}))
    for sinks in lab.features(Sinks):
        yield _beside_sink(lab, sinks.name, unit, declared)
    for argument in lab.arguments():
        for way in blockings(lab, argument):
            visible = np.ones(problem.shape.logits, np.bool_)
            visible[0] = False
            native = way.native(visible[:, :1, :1], problem.shape)
            if native is None or (-np.inf < way.hidden < 0):
                continue
            answered = lab.ask(problem, {argument.name: native})
            subject = Phrase(f"{chapter}.of-no-keys", way.about)
            if isinstance(answered, Refused):
                yield Entry(subject, answered.value, answered.told)
                continue
            rows = answered.answer.statistics[statistic.name][0] / unit
            said = NOTHING if declared.of_no_keys is None else _number(declared.of_no_keys)
            value = _number(float(rows[0, 0])) if _all_same(rows) else SOMETHING_ELSE
            yield agreeing(subject, value, f"entry 0, head 0: {numbers(rows[0])}", said)


def _beside_sink(lab: Laboratory, name: str, unit: float, declared: ReturnedStatistic) -> Entry:
    """Return the entry that states whether a sink counts in a returned statistic."""
    problem, statistic = lab.problem(), declared.of
    given = problem.format.round(np.full(problem.shape.heads, BIASED))
    subject = Phrase(f"{statistic.chapter}.sink")
    said = Phrase(f"{statistic.chapter}.sink-{_yes(declared.includes_sink)}")
    answered = lab.ask(problem, {name: given})
    if isinstance(answered, Refused):
        return Entry(subject, answered.value, answered.told)
    got = answered.answer.statistics[statistic.name]
    value, nearest = SOMETHING_ELSE, math.inf
    for counts, asked in ((True, problem.replace(sinks=given)), (False, problem)):
        stage = statistic.of(asked, forward(asked, Exact()))
        apart = np.abs(got - stage).max() / (1 + np.abs(stage).max())
        if apart <= LOGITS_APART and apart < nearest:
            value, nearest = Phrase(f"{statistic.chapter}.sink-{_yes(counts)}"), apart
    return agreeing(subject, value, f"entry 0, head 0: {numbers(got[0, 0] / unit)}", said)


def _yes(counts: bool) -> str:
    return "counts" if counts else "left-out"


def _all_same(rows: Array) -> bool:
    return bool(np.isnan(rows).all() or (rows == rows[0, 0]).all())


def _number(value: float) -> Phrase:
    if math.isnan(value):
        return Phrase("number.nan")
    if math.isinf(value):
        return Phrase("number.inf" if value > 0 else "number.minus-inf")
    return Phrase("text", {"text": f"{value:.3g}".replace("-", "−")})


ACTIVE, ON, OFF = (Phrase(f"dropout.{name}") for name in ("active", "on", "off"))

PROBABILITY = 0.5
"""The dropout probability p: a power of two, so that scaling by 1 / (1 - p) is exact."""

DRAWS = 48


@topic(
    "dropout",
    "Dropout",
    "Where is it active, how does it scale, and which weights share a draw?",
    place=100,
    every_mode=True,
    revision=2,
)
def dropout(lab: Laboratory) -> Iterator[Entry]:
    """Call the implementation many times with a dropout probability of 0.5.
    Compare the weights with those without dropout. In modes without dropout, they must be equal."""
    names = lab.adapter.dropout_modes
    if not names:
        raise Unsupported("the adapter names no mode with dropout")
    plain = lab.plain().applied
    modes = [replace(lab.mode, dropout=PROBABILITY, draw=draw) for draw in range(DRAWS)]
    draws: list[Accepted] = []
    for found in [lab.ask(lab.problem(), mode=mode) for mode in modes]:
        if isinstance(found, Refused):
            yield Entry(ACTIVE, found.value, found.told)
            return
        draws.append(found)
    applied = np.stack([item.applied for item in draws])
    noise = lab.noise(lab.problem())
    off = all(lab.alike_to_noise(item, plain, noise) for item in applied)
    value, said = OFF if off else ON, ON if lab.mode.name in names else OFF
    yield agreeing(ACTIVE, value, f"p = {PROBABILITY}, {DRAWS} draws", said)
    if off:
        return
    yield Entry(Phrase("dropout.kept"), *_kept(lab, applied, plain))
    yield _mean(applied, plain)
    yield _shared(applied)
    weights = [item.answer.weights for item in draws if item.answer.weights is not None]
    if weights and weights[0].ndim == 4:
        yield _returned(np.stack(weights), applied, plain)


def _kept(lab: Laboratory, applied: Array, plain: Array) -> tuple[Phrase, str]:
    kept = applied != 0
    share = 1 - kept.mean()
    factors = (applied / plain)[kept]
    told = f"{share:.0%} of the weights are 0, the others are {factors.min():.3g} to "
    told += f"{factors.max():.3g} times those without dropout"
    near = 16 * (lab.noise(lab.problem()) / plain).max()
    if np.abs(factors - 1 / (1 - PROBABILITY)).max() <= near:
        return Phrase("dropout.scaled"), told
    if np.abs(factors - 1).max() <= near:
        return Phrase("dropout.not-scaled"), told
    if share < 0.005:
        return Phrase("dropout.drops-no-weight"), told
    if f"{factors.min():.3g}" == f"{factors.max():.3g}":
        return Phrase("dropout.scaled-by", {"factor": float(f"{factors.min():.3g}")}), told
    return Phrase("dropout.scaled-unevenly"), told


def _mean(applied: Array, plain: Array) -> Entry:
    """Return an entry that states whether dropout preserves the weights on average over draws.

    Weights in a draw may be correlated, so the average is over one scale factor per draw. The
    factor also reveals dropout that normalises rows afterwards, as large weights become smaller.
    """
    means = (applied * plain).sum(axis=(1, 2, 3, 4)) / (plain**2).sum()
    mean, error = means.mean(), means.std(ddof=1) / np.sqrt(len(means))
    told = f"{mean:.3f} ± {error:.3f} times the weights, over {DRAWS} draws"
    value = Phrase("dropout.unbiased" if abs(mean - 1) <= 5 * error else "dropout.biased")
    return Entry(Phrase("dropout.mean"), value, told)


def _shared(applied: Array) -> Entry:
    dropped = applied == 0
    same: list[Part] = [
        Phrase(f"axis.{name}")
        for axis, name in enumerate(AXES, start=1)
        if dropped.shape[axis] > 1 and (dropped == np.take(dropped, [0], axis=axis)).all()
    ]
    value = Phrase("dropout.shared", {"over": same}) if same else Phrase("dropout.each-weight")
    told = f"draw 0, entry 0, head 0: {numbers(applied[0, 0, 0, 0])}"
    return Entry(Phrase("dropout.draw"), value, told)


def _returned(weights: Array, applied: Array, plain: Array) -> Entry:
    """Return an entry that states whether the returned weights are those before or after dropout.

    The value is `SOMETHING_ELSE` if they are neither.
    """
    value = SOMETHING_ELSE
    for name, expected in (("before", plain), ("after", applied)):
        if np.abs(weights - expected).max() <= 1e-2 * np.abs(plain).max():
            value = Phrase(f"dropout.{name}")
    told = f"returned {numbers(weights[0, 0, 0, 0])}, applied {numbers(applied[0, 0, 0, 0])}"
    return Entry(Phrase("dropout.returned"), value, f"draw 0, entry 0, head 0, query 0: {told}")
