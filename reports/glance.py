"""All convention cards in one table: a row for each implementation, the answers people look for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from conformance.records.phrase import Phrase
from conformance.reports.model import Card, Observed, Subject
from conformance.words import say

Groups = dict[Phrase, list[str]]
"""A value, and for whom or where it holds."""

_ALARMING = {
    "row.nan",
    "gradients.nan",
    "leak.reaches",
    "mask.ignored",
    "mask.unexplained",
    "causal.ignored",
    "causal.unexplained",
    "combined.unexplained",
}
"""Values that should catch the eye."""


class Told(NamedTuple):
    """A value in a cell, and where it holds; "" if it is all that was seen."""

    phrase: Phrase
    where: str

    @property
    def value(self) -> str:
        """Its text."""
        return say(self.phrase)

    @property
    def alarming(self) -> bool:
        """Whether it should catch the eye."""
        return self.phrase.id in _ALARMING


class Glance(NamedTuple):
    """A column of the table: its heading, and what to take from a card."""

    heading: str
    take: Callable[[Card], list[Told]]


def told(cards: Sequence[Card]) -> list[Glance]:
    """The columns in which there is anything to say of these cards."""
    return [glance for glance in glances() if any(glance.take(card) for card in cards)]


def glances() -> tuple[Glance, ...]:
    """The columns."""
    return (
        Glance("True in a mask", lambda card: _by_argument(card, "form.bool")),
        Glance("0 and 1, as floats", lambda card: _by_argument(card, "form.zero-one", "float32")),
        Glance("0 and 1, as integers", lambda card: _by_argument(card, "form.zero-one", "int32")),
        Glance("0 and −inf", lambda card: _by_argument(card, "form.zero-infinite", "float32")),
        Glance(
            "A query that may attend nothing gets",
            lambda card: _pooled(_of_infinite(card, "fully-masked.output")),
        ),
        Glance(
            "… and gradients", lambda card: _pooled(_of_infinite(card, "fully-masked.gradients"))
        ),
        Glance("Causal flag, fewer queries than keys", _causal),
        Glance("Causal flag beside a mask", _causal_beside),
        Glance("NaN in a blocked key", lambda card: _leak(card, "key", "token", "memory")),
        Glance("NaN in a blocked value", lambda card: _leak(card, "value")),
        Glance("Returned weights", _weights),
        Glance(
            "No key at all", lambda card: _pooled(_subjects(card, "size.no-key", "size.no-length"))
        ),
        Glance("No batch axis", lambda card: _pooled(_subjects(card, "input.unbatched"))),
    )


def _subjects(card: Card, *about: str) -> list[Subject]:
    """The subjects with one of these ids."""
    return [
        subject
        for chapter in card.chapters
        for subject in chapter.subjects
        if subject.phrase.id in about
    ]


def _of_infinite(card: Card, about: str) -> list[Subject]:
    """Without large finite numbers, which block nothing where everything is blocked."""
    found = _subjects(card, about)
    return [item for item in found if item.phrase.part("form").id != "form.zero-large"]


def _causal(card: Card) -> list[Told]:
    return _pooled(
        subject
        for subject in _subjects(card, "causal.no-flag", "causal.alone")
        if subject.phrase.part("lengths").id in ("", "lengths.fewer-queries")
    )


def _causal_beside(card: Card) -> list[Told]:
    return _pooled(
        (
            subject
            for subject in _subjects(card, "causal.beside", "causal.beside-two")
            if subject.phrase.part("lengths").id == "lengths.equal"
        ),
        named=True,
    )


def _by_argument(card: Card, form: str, dtype: str = "") -> list[Told]:
    """What each mask argument does with a form."""
    groups: Groups = {}
    for subject in _subjects(card, "mask.meaning"):
        own = subject.phrase.part("form")
        if own.id == form and own.name("dtype") == dtype:
            for item in subject.observed:
                place = subject.phrase.name("argument") + _in_modes(item)
                groups.setdefault(item.phrase, []).append(place)
    return _told(groups)


def _pooled(subjects: Iterable[Subject], *, named: bool = False) -> list[Told]:
    """What was seen in all these subjects, and where if they differ: in which modes, and with
    `named` beside which argument."""
    groups: Groups = {}
    for subject in subjects:
        names = [subject.phrase.name(name) for name in ("needed", "argument")]
        beside = " and ".join(filter(None, names)) if named else ""
        for item in subject.observed:
            own = groups.setdefault(item.phrase, [])
            places = [beside + _in_modes(item)] if beside else item.modes
            own += [place for place in places if place not in own]
    return _told(groups)


def _leak(card: Card, *inputs: str) -> list[Told]:
    groups: Groups = {}
    for subject in _subjects(card, "leak"):
        about = subject.phrase
        if about.part("number").id != "number.nan":
            continue
        if about.part("input").id.removeprefix("input.") not in inputs:
            continue
        for item in subject.observed:
            own = groups.setdefault(_furthest(item.phrase), [])
            own += [mode for mode in item.modes if mode not in own]
    return _told(groups)


def _furthest(value: Phrase) -> Phrase:
    """The output if it gets there, else that it is in gradients only."""
    if value.id != "leak.reaches":
        return value
    output = Phrase("place.output")
    if output in value.parts("places"):
        return Phrase("leak.reaches", {"places": [output]})
    return Phrase("leak.reaches-gradients")


def _weights(card: Card) -> list[Told]:
    groups: Groups = {}
    for subject in _subjects(card, "weights.returned"):
        for item in subject.observed:
            groups.setdefault(item.phrase, []).extend(item.modes)
    if Phrase("weights.none") in groups and len(groups) > 1:
        del groups[Phrase("weights.none")]
        groups = {value: [] for value in groups}
    told = _told(groups)
    for subject in _subjects(card, "dropout.returned"):
        told += [
            Told(Phrase("weights.those", {"which": item.phrase}), "")
            for item in subject.observed[:1]
        ]
    return told


def _in_modes(item: Observed) -> str:
    return f" ({', '.join(item.modes)})" if item.modes else ""


def _told(groups: Mapping[Phrase, list[str]]) -> list[Told]:
    alone = len(groups) == 1
    return [Told(value, "" if alone else ", ".join(names)) for value, names in groups.items()]
