"""All convention cards in one table: a row for each implementation, the answers people look for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from conformance.reports.model import Card, Observed, Subject

Groups = dict[str, list[str]]
"""A value, and for whom or where it holds."""


class Told(NamedTuple):
    """A value in a cell, and where it holds; "" if it is all that was seen."""

    value: str
    where: str


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
        Glance("True in a mask", lambda card: _by_argument(card, "bool")),
        Glance("0 and 1, as floats", lambda card: _by_argument(card, "float32 0/1")),
        Glance("0 and 1, as integers", lambda card: _by_argument(card, "int32 0/1")),
        Glance("0 and −inf", lambda card: _by_argument(card, "float32 0/−inf")),
        Glance(
            "A query that may attend nothing gets",
            lambda card: _pooled(card, "masked-rows", r"(?!.*1e9).*: output"),
        ),
        Glance(
            "… and gradients", lambda card: _pooled(card, "masked-rows", r"(?!.*1e9).*: gradients")
        ),
        Glance(
            "Causal flag, fewer queries than keys",
            lambda card: _pooled(card, "causal", r"causal flag|.* alone, fewer.*"),
        ),
        Glance(
            "Causal flag beside a mask",
            lambda card: _pooled(
                card,
                "causal",
                r".* with (?!.*(top-left|bottom-right| causal,)).*, equal.*",
                named=True,
            ),
        ),
        Glance("NaN in a blocked key", lambda card: _leak(card, "key|token")),
        Glance("NaN in a blocked value", lambda card: _leak(card, "value")),
        Glance("Returned weights", _weights),
        Glance("No key at all", lambda card: _pooled(card, "degenerate-sizes", r"no key|length 0")),
        Glance("No batch axis", lambda card: _pooled(card, "input-layouts", r".*batch axis")),
    )


def _subjects(card: Card, topic: str, pattern: str) -> Iterator[Subject]:
    for chapter in card.chapters:
        if chapter.topic == topic:
            for subject in chapter.subjects:
                if re.fullmatch(pattern, subject.subject):
                    yield subject


def _by_argument(card: Card, form: str) -> list[Told]:
    """What each mask argument does with a form."""
    groups: Groups = {}
    for subject in _subjects(card, "masks", rf".*, {re.escape(form)}"):
        argument = subject.subject.partition(",")[0]
        for item in subject.observed:
            groups.setdefault(item.value, []).append(argument + _in_modes(item))
    return _told(groups)


def _pooled(card: Card, topic: str, pattern: str, *, named: bool = False) -> list[Told]:
    """What was seen in all subjects of this kind, and where if they differ: in which modes, and
    with `named` beside which argument."""
    groups: Groups = {}
    for subject in _subjects(card, topic, pattern):
        beside = subject.subject.partition(" with ")[2].partition(",")[0] if named else ""
        for item in subject.observed:
            own = groups.setdefault(item.value, [])
            places = [beside + _in_modes(item)] if beside else item.modes
            own += [place for place in places if place not in own]
    return _told(groups)


def _leak(card: Card, what: str) -> list[Told]:
    groups: Groups = {}
    for subject in _subjects(card, "leaks", rf"NaN in a blocked ({what})\b.*"):
        for item in subject.observed:
            value = item.value if item.value in ("hidden", "refused") else _furthest(item.value)
            own = groups.setdefault(value, [])
            own += [mode for mode in item.modes if mode not in own]
    return _told(groups)


def _furthest(value: str) -> str:
    """The output if it gets there, else that it is in gradients only."""
    return "reaches the output" if "the output" in value else "reaches gradients"


def _weights(card: Card) -> list[Told]:
    groups: Groups = {}
    for subject in _subjects(card, "weights", "returned weights"):
        for item in subject.observed:
            groups.setdefault(item.value, []).extend(item.modes)
    if "none" in groups and len(groups) > 1:
        del groups["none"]
        groups = {value: [] for value in groups}
    told = _told(groups)
    for subject in _subjects(card, "dropout", "returned weights are those"):
        told += [Told(f"those {item.value}", "") for item in subject.observed[:1]]
    return told


def _in_modes(item: Observed) -> str:
    return f" ({', '.join(item.modes)})" if item.modes else ""


def _told(groups: Mapping[str, list[str]]) -> list[Told]:
    alone = len(groups) == 1
    return [Told(value, "" if alone else ", ".join(names)) for value, names in groups.items()]
