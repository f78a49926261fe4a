"""Build what the report says about conventions from records.

`experiment_cards` and `handed` return the observations of a run's experiments. `GLANCES` are the
columns of a table with the observations that people look for first. `conventions` puts declarations
about masks beside what requirements and experiments observed, and `features` does so for windows,
soft caps and other features beyond masks.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
import numpy as np

from conformance.records.findings import PREFIX, CaseResult, Entry, Phrase, Topic, count
from conformance.records.header import Implementation, MaskInfo
from conformance.reports.model import (
    Argument,
    Card,
    Chapter,
    Column,
    Convention,
    FeatureResults,
    Form,
    Handed,
    MaskedRow,
    Observed,
    Subject,
    Variant,
)
from conformance.reports.tables import RecordPart, by_key, worst_verdict
from conformance.words import say

_FEWER = "lengths.fewer-queries"

# What experiments showed


def experiment_cards(
    parts: Iterable[RecordPart], columns: Sequence[Column], topics: Sequence[Topic]
) -> list[Card]:
    """Return the convention card of each column that has results of any experiment in `topics`."""
    results = {part.key: by_key(part.results, lambda result: result.case) for part in parts}
    cards = []
    for column in columns:
        asked = results[column.key]
        chapters = [
            _chapter(topic, asked[topic.id], column) for topic in topics if topic.id in asked
        ]
        if chapters:
            cards.append(Card(column.key, chapters))
    return cards


def handed(parts: Iterable[RecordPart], columns: Sequence[Column]) -> list[Handed]:
    """Return the effect of passing one causal mask, in several encodings, to each implementation.

    Implementations without results of the experiment "same-mask" are left out.
    """
    by_column = {part.key: part for part in parts}
    return [
        Handed(
            column=part.key,
            argument=entry.subject.name("argument"),
            written=say(entry.subject.part("written")),
            value=say(entry.value),
            evidence=entry.evidence,
            weights=_numbers(part.arrays.get(f"{result.id}|{entry.subject}")),
            phrase=entry.value,
        )
        for part in (by_column[column.key] for column in columns)
        for result in part.results
        if result.case == PREFIX + "same-mask"
        for entry in result.entries
    ]


def _chapter(topic: Topic, results: Sequence[CaseResult], column: Column) -> Chapter:
    answered = [result for result in results if result.entries]
    reasons = {finding.detail for result in results for finding in result.findings}
    entries = [(result.mode, entry) for result in answered for entry in result.entries]
    command = ["mha-conformance", "probe", column.spec, "--experiment", topic.name]
    command += ["--device", column.device] if column.device != "cpu" else []
    return Chapter(
        topic=topic.name,
        modes=[result.mode for result in answered],
        subjects=[
            Subject(say(subject), list(_observed(same)), subject)
            for subject, same in by_key(entries, lambda pair: pair[1].subject).items()
        ],
        unsupported="" if answered else "; ".join(sorted(reasons - {""})),
        command=shlex.join(command),
    )


def _observed(entries: Iterable[tuple[str, Entry]]) -> Iterator[Observed]:
    """Yield each value that was observed for a subject, the most frequent first.

    `entries` are all observations of the subject, as pairs of mode and entry. If a value agrees
    with the declaration in some modes and not in others, it is yielded twice.
    """
    by_value = by_key(entries, lambda pair: (pair[1].value, pair[1].agrees))
    for alike in sorted(by_value.values(), key=lambda alike: -len(alike)):
        entry = alike[0][1]
        yield Observed(
            value=say(entry.value),
            modes=[] if len(by_value) == 1 else [mode for mode, _ in alike],
            evidence=entry.evidence,
            declared=say(entry.declared),
            agrees=entry.agrees,
            code=entry.code,
            phrase=entry.value,
        )


def _numbers(weights: np.ndarray | None) -> list[list[float | None]]:
    if weights is None or weights.ndim != 2:
        return []
    return [
        [round(float(value), 4) if np.isfinite(value) else None for value in row] for row in weights
    ]


def _is_infinite(subject: Phrase) -> bool:
    """Return whether a subject's mask encoding can block all keys of a query.

    Encodings that add large finite numbers cannot.
    """
    return subject.part("form").id not in ("form.zero-large", "form.zero-least")


# The table of all cards

_WRONG_GRADIENTS = ("gradients.sum-unlike", "gradients.unlike", "gradients.nan-beside-finite")
"""Gradients of a fully masked query that are not those of its output."""

_ALARMING = {
    "row.nan",
    "gradients.nan",
    *_WRONG_GRADIENTS,
    "leak.reaches",
    "leak.visible-reaches-none",
    "leak.visible-reaches-some",
    "mask.ignored",
    "mask.unexplained",
    "causal.ignored",
    "causal.unexplained",
    "combined.unexplained",
}


class ShownValue(NamedTuple):
    """A value in the table of cards, and where it holds ("" if that need not be stated)."""

    phrase: Phrase
    where: str

    @property
    def value(self) -> str:
        """The value as text."""
        return say(self.phrase)

    @property
    def alarming(self) -> bool:
        """Whether the value should be highlighted."""
        return self.phrase.id in _ALARMING


class Glance(NamedTuple):
    """A column of the table of cards: its heading, and a function that finds its values in a card.

    The table has one row for each card.
    """

    heading: str
    take: Callable[[Card], list[ShownValue]]


def glances_of(cards: Sequence[Card]) -> list[Glance]:
    """Return the columns of the table in which any of these cards has a value."""
    return [glance for glance in GLANCES if any(glance.take(card) for card in cards)]


def taking(
    *about: str,
    named: bool = False,
    value: Callable[[Phrase], Phrase] = lambda phrase: phrase,
    fits: Callable[[Phrase], bool] = lambda subject: True,
    **parts: Collection[str],
) -> Callable[[Card], list[ShownValue]]:
    """Return a function that finds in a card the values of certain subjects.

    Each value occurs once. If there are several, each states where it was observed, unless it was
    observed in all modes and no argument needs to be named.

    Args:
        about: ids of the subjects.
        named: whether to always name the mask argument of a value. By default it is named only if
            a mode has several values.
        value: function that maps an observed value to the one to show.
        fits: function that returns whether to include a subject.
        parts: by the name of an argument of a subject, the values that the argument must have for
            the subject to be included, as texts of phrases; "" stands for a missing argument.
    """

    def take(card: Card) -> list[ShownValue]:
        seen = [
            (subject.phrase, value(item.phrase), item.modes or chapter.modes, chapter.modes)
            for chapter in card.chapters
            for subject in chapter.subjects
            for item in subject.observed
            if subject.phrase.id in about
            and fits(subject.phrase)
            and all(str(subject.phrase.part(name)) in those for name, those in parts.items())
        ]
        usual: dict[tuple[str, str], set[Phrase]] = {}
        of_mode: dict[str, set[Phrase]] = {}
        for subject, found, modes, _ in seen:
            for mode in () if _beyond(subject) else modes:
                usual.setdefault((subject.name("argument"), mode), set()).add(found)
                of_mode.setdefault(mode, set()).add(found)
        places: dict[Phrase, dict[str, None]] = {}
        for subject, found, modes, every in seen:
            beyond, argument = _beyond(subject), subject.name("argument")
            if beyond:
                # A value that equals the usual one of a mode need not be mentioned again.
                modes = [mode for mode in modes if found not in usual.get((argument, mode), ())]
                if not modes:
                    continue
            names = named or any(len(of_mode.get(mode, ())) > 1 for mode in modes)
            beside = " and ".join(filter(None, (subject.name("needed"), argument))) if names else ""
            if any(len(usual.get((argument, mode), ())) > 1 for mode in modes):
                beside = " ".join(filter(None, (beside, say(subject.part("form")))))
            where = " ".join(filter(None, (beside, beyond)))
            if len(modes) < len(every):
                where = f"{where} ({', '.join(modes)})" if where else ", ".join(modes)
            places.setdefault(found, {}).update({where: None} if where else {})
        is_alone = len(places) == 1
        return [
            ShownValue(found, "" if is_alone else ", ".join(at)) for found, at in places.items()
        ]

    return take


def _beyond(subject: Phrase) -> str:
    """Return the unusual inputs or mask layout of a subject in words, or "" for the usual ones."""
    if subject.part("sharing"):
        return f"with {say(subject.part('sharing'))}"
    if subject.name("flagged"):
        return f"beside {subject.name('flagged')}"
    if subject.name("inputs_in"):
        return f"with inputs in {subject.name('inputs_in')}"
    return f"with {subject.name('laid_out')}" if subject.name("laid_out") else ""


def _furthest(value: Phrase) -> Phrase:
    """Shorten a value about a leak of NaN to whether it reaches the output or only gradients.

    Other values are returned unchanged.
    """
    if value.id != "leak.reaches":
        return value
    output = Phrase("place.output")
    if output in value.parts("places"):
        return Phrase("leak.reaches", {"places": [output]})
    return Phrase("leak.reaches-gradients")


def _weights(card: Card) -> list[ShownValue]:
    """Find in a card the form of the returned weights, and whether they include dropout.

    If some modes return weights and others do not, only the former are mentioned.
    """
    shown = taking("weights.returned")(card)
    if len(shown) > 1 and any(item.phrase.id == "weights.none" for item in shown):
        shown = [ShownValue(item.phrase, "") for item in shown if item.phrase.id != "weights.none"]
    for item in taking("dropout.returned")(card)[:1]:
        shown.append(ShownValue(Phrase("weights.those", {"which": item.phrase}), ""))
    return shown


def _form(form: str) -> Callable[[Card], list[ShownValue]]:
    """Return a function that finds in a card what masks in this encoding do."""
    return taking("mask.meaning", named=True, form=[form])


def _nan(*inputs: str) -> Callable[[Card], list[ShownValue]]:
    """Return a function that finds in a card how far NaN in blocked `inputs` spreads."""
    return taking("leak", value=_furthest, number=["number.nan"], input=inputs)


def _gradients_of_masked(card: Card) -> list[ShownValue]:
    """Find in a card where the gradients of fully masked queries are finite.

    Gradients that are not those of the query's output come first, with the masks that have them,
    including those that add large finite numbers. They take the place of "finite".
    """
    judged = taking("fully-masked.gradients-alone", "fully-masked.gradients-elsewhere", named=True)
    wrong = [item for item in judged(card) if item.phrase.id in _WRONG_GRADIENTS]
    usual = taking("fully-masked.gradients", fits=_is_infinite)(card)
    return wrong + [item for item in usual if not wrong or item.phrase.id != "gradients.finite"]


_BITS = ("again.apart", "again.within-noise", "again.same-bits-for", "again.same-bits")


def _bits(first: str, *others: str) -> Callable[[Card], list[ShownValue]]:
    """Return a function that finds in a card the worst that was observed of the same bits.

    It finds nothing if the subject `first` was not asked about, as in older records.
    """

    def take(card: Card) -> list[ShownValue]:
        if not taking(first)(card):
            return []
        shown = taking(first, *others, value=_of_lengths)(card)
        worst = next((name for name in _BITS if any(it.phrase.id == name for it in shown)), "")
        return [item for item in shown if item.phrase.id == worst]

    return take


def _of_lengths(value: Phrase) -> Phrase:
    """Return the value with no sizes but the lengths, without which equal bits say too much.

    A library chooses its kernels by size: bits that are equal at these may differ at others.
    The sizes of batches are left out, as calls with different batches share a cell.
    """
    if value.id != "again.same-bits-at":
        return value
    lengths = {name: value.arguments[name] for name in ("query", "key")}
    return Phrase("again.same-bits-for", lengths)


GLANCES = (
    Glance("True in a mask", _form("form.bool")),
    Glance("0 and 1, as floats", _form("form.zero-one(dtype=float32)")),
    Glance("0 and 1, as integers", _form("form.zero-one(dtype=int32)")),
    Glance("0 and −inf", _form("form.zero-infinite(dtype=float32)")),
    Glance("A fully masked query gets", taking("fully-masked.output", fits=_is_infinite)),
    Glance("… and gradients", _gradients_of_masked),
    Glance(
        "Causal flag, fewer queries than keys",
        taking("causal.no-flag", "causal.alone", lengths=["", _FEWER]),
    ),
    Glance(
        "Causal flag beside a mask",
        taking(
            *("causal.beside", "causal.beside-two", "causal.beside-in", "causal.beside-two-in"),
            named=True,
            lengths=["", "lengths.equal"],
        ),
    ),
    Glance("NaN in a blocked key", _nan("input.key", "input.token", "input.memory")),
    Glance("NaN in a blocked value", _nan("input.value")),
    Glance("Returned weights", _weights),
    Glance("Returned log-sum-exp", taking("log-sum-exp.returned")),
    Glance("Log-sum-exp without a key", taking("log-sum-exp.of-no-keys")),
    Glance("Returned largest logit", taking("max-logit.returned")),
    Glance("Largest logit without a key", taking("max-logit.of-no-keys")),
    Glance("No key at all", taking("size.no-key", "size.no-length")),
    Glance("No batch axis", taking("input.unbatched")),
    Glance("Bits in another batch", _bits("again.batches", "again.alone", "again.place")),
    Glance("Bits in another batch, one query", _bits("again.batches-with-one-query")),
    Glance("Bits of one query alone", _bits("again.steps")),
    Glance("Bits of several queries alone", _bits("again.chunks")),
    Glance("Bits of a packed sequence", _bits("again.packed")),
    Glance("Bits run to run", _bits("again.gradients", "again.twice")),
    Glance("Bits on other threads", _bits("again.threads")),
)
"""The columns of the table of cards, which show what people look for first."""

# Declarations beside observations

_NUMBERS = {
    "attends if nonzero": "mask.attends",
    "attends if 1": "mask.attends",
    "attends, 0 or 1 only": "mask.attends",
    "blocks if nonzero": "mask.blocks",
    "blocks if 1": "mask.blocks",
    "blocks, 0 or 1 only": "mask.blocks",
}
"""For each declared meaning of numbers, the meaning that 1 should be observed to have."""

_AXES = {"dtype": "", "mode": "mode", "case": "case"}
"""What an observation may depend on, and the word to put before its values, if any."""

Observations = Sequence[tuple[CaseResult, Phrase]]


def conventions(parts: Iterable[RecordPart], columns: Sequence[Column]) -> list[Convention]:
    """Return the declared and the observed mask conventions of each column."""
    by_column = {part.key: part for part in parts}
    return [_convention(by_column[column.key]) for column in columns]


def _convention(part: RecordPart) -> Convention:
    required: dict[str, list[tuple[CaseResult, Phrase]]] = defaultdict(list)
    for result in part.results:
        for finding in result.findings:
            if finding.value:
                required[finding.requirement].append((result, finding.value))
    experiments = [result for result in part.results if result.entries]
    # An alignment counts once for an experiment, however many of its calls show it.
    aligned = [
        (result, value)
        for result in experiments
        for value in dict.fromkeys(
            entry.value
            for entry in result.entries
            if entry.subject.id == "causal.alone" and entry.subject.part("lengths").id == _FEWER
        )
    ]
    meanings = _meanings(required["mask.polarity-is-as-declared"], experiments)
    return Convention(
        column=part.key,
        arguments=[_argument(mask, meanings) for mask in part.implementation.masks],
        causal=part.implementation.causal,
        alignment=_variants([*required["observed.causal-alignment"], *aligned]),
        fully_masked=_masked_rows(required["observed.fully-masked-row"], experiments),
        returned_weights=_variants(required["observed.returned-weights"]),
    )


def _meanings(
    observed: Observations, experiments: Sequence[CaseResult]
) -> dict[tuple[str, str], list[tuple[CaseResult, Phrase]]]:
    """Return the observed meanings by (argument, encoding), from requirements and experiments.

    Of experiments, only encodings in float32 or without a dtype are included.
    """
    meanings: dict[tuple[str, str], list[tuple[CaseResult, Phrase]]] = defaultdict(list)
    for result, value in observed:
        for part in value.parts("meanings"):
            if isinstance(part, Phrase):
                key = part.name("argument"), part.part("form").id
                meanings[key].append((result, part.part("meaning")))
    for result in experiments:
        for entry in result.entries:
            form = entry.subject.part("form")
            if entry.subject.id == "mask.meaning" and form.name("dtype") in ("", "float32"):
                meanings[entry.subject.name("argument"), form.id].append((result, entry.value))
    return meanings


def _argument(mask: MaskInfo, meanings: Mapping[tuple[str, str], Observations]) -> Argument:
    declared = _declared_forms(mask)
    return Argument(
        mask,
        [
            Form(form, declared.get(form, ""), _variants(meanings.get((mask.name, form), [])))
            for form in ("form.bool", "form.zero-one", "form.zero-infinite")
            if form in declared or (mask.name, form) in meanings
        ],
    )


def _declared_forms(mask: MaskInfo) -> dict[str, str]:
    """Return, for each encoding that a declaration covers, the id of the expected meaning."""
    forms = {} if mask.true is None else {"form.bool": f"mask.{mask.true}"}
    if mask.number == "added":
        return forms | {"form.zero-infinite": "mask.added", "form.zero-one": "mask.added"}
    if mask.number is not None:
        forms["form.zero-one"] = _NUMBERS.get(mask.number, mask.number)
    return forms


def _masked_rows(required: Observations, experiments: Sequence[CaseResult]) -> list[MaskedRow]:
    """Return each value that fully masked queries get, with the effects on gradients.

    The effects are those that requirements recorded for the value, or else those that experiments
    observed in the calls with this value.
    """
    parts = [(result, value.part("row"), value.part("beside")) for result, value in required]
    tried = _of_calls(experiments, "fully-masked.output")
    gradients = _of_calls(experiments, "fully-masked.gradients")
    rows = []
    told = _once([*((result, value) for result, value, _ in parts), *tried.values()])
    for row in _variants(told):
        beside = [(result, rest) for result, value, rest in parts if value == row.phrase and rest]
        in_gradients = [
            (result, Phrase("beside", {"parts": [Phrase("beside.gradients", {"value": value})]}))
            for call, (result, value) in gradients.items()
            if call in tried and tried[call][1] == row.phrase
        ]
        rows.append(MaskedRow(row, _variants(_once(beside or in_gradients))))
    return rows


def _once(observed: Observations) -> Observations:
    """Return each value once for each item and dtype, however many calls of it had that value."""
    return [
        *{(result.id, result.dtype, value): (result, value) for result, value in observed}.values()
    ]


def _of_calls(
    experiments: Sequence[CaseResult], about: str
) -> dict[tuple[str, str], tuple[CaseResult, Phrase]]:
    """Return what was observed of fully masked queries in each call, under the subject `about`.

    The keys are the id of the item and the arguments of the subject. A call with inputs in another
    dtype than that of the item counts as one in that dtype.
    """
    found = {}
    for result in experiments:
        for entry in result.entries:
            if entry.subject.id == about and _is_infinite(entry.subject):
                dtype = entry.subject.name("inputs_in") or result.dtype
                call = result.id, str(Phrase("", entry.subject.arguments))
                found[call] = msgspec.structs.replace(result, dtype=dtype), entry.value
    return found


def _variants(observed: Observations) -> list[Variant]:
    """Return each observed value and where it was observed, the most frequent value first."""
    every = [result for result, _ in observed]
    by_value = sorted(by_key(observed, lambda pair: pair[1]).items(), key=lambda one: -len(one[1]))
    variants: list[Variant] = []
    for value, pairs in by_value:
        some = [result for result, _ in pairs]
        place = "" if len(by_value) == 1 else _where(some, every)
        if place is None:
            place = "otherwise" if not variants else _in_part(some, every) or _listed(some)
        variants.append(Variant(say(value), len(some), place, value))
    return variants


def _where(some: Sequence[CaseResult], every: Sequence[CaseResult]) -> str | None:
    """Return, as text, the dtypes, modes and cases that distinguish some results from the others.

    Return None if these do not suffice to distinguish them. `every` are all results.
    """
    values = {axis: _values(some, axis) for axis in _AXES}
    cases = _cases(some) or _cases(every)
    inside = [item for item in every if all(getattr(item, axis) in values[axis] for axis in _AXES)]
    if len(inside) != len(some):
        return None
    places = []
    for axis in _AXES:
        differs = set(values[axis]) != set(_values(every, axis))
        # Experiments do not count as cases here.
        if differs and (axis != "case" or set(cases) != set(_cases(every))):
            names = cases if axis == "case" else values[axis]
            places.append(_named(axis, names))
    return "; ".join(places)


def _named(axis: str, values: Sequence[str]) -> str:
    """Return values of an axis as text, such as "modes train, eval"; dtypes need no word."""
    word = _AXES[axis]
    return f"{word}{'s' if word and len(values) > 1 else ''} {', '.join(values)}".strip()


def _in_part(some: Sequence[CaseResult], every: Sequence[CaseResult]) -> str:
    """Return, as text, the modes or dtypes of some results, and those that others share with them.

    Return "" if others share all of them.
    """
    own = {id(item) for item in some}
    others = [item for item in every if id(item) not in own]
    texts = {}
    for axis in ("mode", "dtype"):
        values, of_others = _values(some, axis), _values(others, axis)
        alone = [value for value in values if value not in of_others]
        shared = [value for value in values if value in of_others]
        if alone:
            texts[len(shared)] = f"{_named(axis, alone)}; in part {_named(axis, shared)}"
    return texts[min(texts)] if texts else ""


def _cases(results: Sequence[CaseResult]) -> list[str]:
    return [case for case in _values(results, "case") if not case.startswith(PREFIX)]


def _listed(results: Sequence[CaseResult]) -> str:
    texts = [f"{item.dtype}, mode {item.mode}, case {item.case}" for item in results]
    more = [f"and {len(texts) - 3} more"] if len(texts) > 3 else []
    return "; ".join([*texts[:3], *more])


def _values(results: Sequence[CaseResult], axis: str) -> list[str]:
    return list(dict.fromkeys(getattr(result, axis) for result in results))


# Features beyond masks


class FeatureFamily(NamedTuple):
    """A feature as the report shows it.

    Attributes:
        name: the heading of the feature.
        parts: the names of the features of cases that the heading covers.
        kinds: the kinds of declarations, such as "Cache", that the heading also covers. They change
            how tokens are passed, and name none of `parts`.
        chapter: the chapter whose requirements are only about this feature, or "".
        seen: functions that take observed values from a card, in order.
        subject: the part before the dot in the ids of the subjects of the feature's experiment, or
            "" if it has none.
        keys: whether it determines which keys a query sees and where they are stored; the others
            change the logits or their softmax.
    """

    name: str
    parts: frozenset[str]
    kinds: frozenset[str] = frozenset()
    chapter: str = ""
    seen: tuple[Callable[[Card], list[ShownValue]], ...] = ()
    subject: str = ""
    keys: bool = False


def _own_key(card: Card) -> list[ShownValue]:
    """Find in a card whether a window counts the query's own key, and how windows are aligned.

    What the card does not show is left out.
    """
    found: dict[Phrase, None] = {}
    aligned: dict[Phrase, None] = {}
    for subject in (one for chapter in card.chapters for one in chapter.subjects):
        if subject.phrase.id != "window.alone":
            continue
        for item in subject.observed:
            if subject.phrase.part("lengths").id == _FEWER:
                aligned[item.phrase.part("alignment")] = None
            with suppress(ValueError):
                asked = int(subject.phrase.name("value").strip("()").partition(",")[0])
                fewer = asked - int(item.phrase.name("before"))
                if asked > 0 and fewer in (0, 1):
                    found[Phrase("window.counts-own" if fewer else "window.besides-own")] = None
    return [ShownValue(phrase, "") for phrase in (*found, *aligned) if phrase]


FAMILIES = (
    FeatureFamily("Window", frozenset({"window"}), seen=(_own_key,), subject="window", keys=True),
    FeatureFamily(
        "Soft cap",
        frozenset({"soft cap"}),
        seen=tuple(
            taking(f"soft-cap.{name}") for name in ("formula", "beside-mask", "beside-bias")
        ),
        subject="soft-cap",
    ),
    FeatureFamily("Sinks", frozenset({"sinks"}), seen=(taking("sinks.units"),)),
    FeatureFamily("ALiBi", frozenset({"alibi"}), seen=(taking("alibi.bias", lengths=[_FEWER]),)),
    FeatureFamily(
        "Rotary", frozenset({"rotary"}), seen=(taking("rotary.turns", size=["rotary.all"]),)
    ),
    FeatureFamily(
        "Rotary, scaled",
        frozenset({"rotary scaling"}),
        seen=(taking("rotary-scaling.frequencies"), taking("rotary-scaling.factor")),
    ),
    FeatureFamily(
        "Rotary, on axes",
        frozenset({"position axes"}),
        seen=(taking("position-axes.sections"),),
    ),
    FeatureFamily("Query/key norm", frozenset({"query/key norm"})),
    FeatureFamily(
        "Lengths",
        frozenset({"lengths", "key lengths", "query lengths"}),
        chapter="lengths",
        seen=(taking("lengths.counts"),),
        subject="lengths",
        keys=True,
    ),
    FeatureFamily(
        "Chunks",
        frozenset({"chunk"}),
        seen=(taking("chunk.alone", lengths=[_FEWER]),),
        subject="chunk",
        keys=True,
    ),
    FeatureFamily(
        "Bidirectional spans",
        frozenset({"spans"}),
        seen=(taking("span.alone", spans=["span.two"]), taking("span.beside")),
        subject="span",
        keys=True,
    ),
    FeatureFamily(
        "Trees of drafted tokens",
        frozenset({"tree"}),
        seen=(taking("drafts.alone"),),
        subject="drafts",
        keys=True,
    ),
    FeatureFamily(
        "Segments, packed", frozenset({"segments"}), frozenset({"Packed"}), "packed", keys=True
    ),
    FeatureFamily("Positions", frozenset({"positions"}), chapter="positions", keys=True),
    FeatureFamily("Caches, pages", frozenset(), frozenset({"Cache", "Pages"}), "cache", keys=True),
)
"""The features, in the order of the report."""

_NOTHING = frozenset({"cannot-be-asked", "none", "causal.none-declared"})
"""The ids of observed values that do not show a convention."""


def features(
    parts: Iterable[RecordPart], columns: Sequence[Column], cards: Iterable[Card]
) -> list[FeatureResults]:
    """Return the results for every feature of every column, in the order of the columns."""
    by_column = {part.key: part for part in parts}
    own_cards = {card.column: card for card in cards}
    found = []
    for column in columns:
        part, card = by_column[column.key], own_cards.get(column.key, Card(column.key, []))
        verdicts = _verdicts(part)
        found += [
            FeatureResults(
                column=part.key,
                feature=family.name,
                declared=_declared(part.implementation, family, card),
                items=count(verdicts[family.name]),
                seen=_seen(family, card),
            )
            for family in FAMILIES
        ]
    return found


def _declared(
    implementation: Implementation, family: FeatureFamily, card: Card
) -> list[str] | None:
    """Return the declared arguments of a feature.

    If the record does not list declared features, return the arguments that experiments tried, or
    None if there are none.
    """
    if implementation.features is None:
        tried = {
            subject.phrase.name("argument"): None
            for chapter in card.chapters
            for subject in chapter.subjects
            if subject.phrase.id.partition(".")[0] == family.subject
        }
        return [name for name in tried if name] or None
    return [
        name
        for one in implementation.features
        if family.parts.intersection(one.says) or one.kind in family.kinds
        for name in one.names
    ]


def _verdicts(part: RecordPart) -> dict[str, list[str]]:
    """Return the verdicts of the items of each feature, by the name of the feature.

    For an item whose case has the feature, this is the item's verdict. For any other item on which
    requirements about the feature were checked, it is the worst verdict of these requirements.
    """
    of_case = {name: frozenset(one.features) for name, one in part.record.header.cases.items()}
    verdicts: dict[str, list[str]] = {family.name: [] for family in FAMILIES}
    for result in part.results:
        has = of_case.get(result.case, frozenset())
        chapters = by_key(result.findings, lambda one: one.requirement.partition(".")[0])
        for family in FAMILIES:
            if has & family.parts:
                verdicts[family.name].append(result.verdict)
            elif family.chapter and family.chapter in chapters:
                about = count(finding.verdict for finding in chapters[family.chapter])
                verdicts[family.name].append(worst_verdict(about))
    return verdicts


def _seen(family: FeatureFamily, card: Card) -> list[Variant]:
    found = []
    for take in family.seen:
        shown = [item for item in take(card) if item.phrase.id not in _NOTHING]
        for item in shown:
            where = item.where if len(shown) > 1 else ""
            found.append(Variant(item.value, 1, where, item.phrase))
    return found
