"""Features beyond masks: what each implementation declares about them, and its results.

The report shows three things about a feature: the arguments that an adapter declares for it, the
verdicts of all items whose problem includes it, and the conventions that experiments observed.
Records made before features existed contain nothing about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from conformance.records.findings import count
from conformance.records.header import Implementation
from conformance.records.phrase import Phrase
from conformance.reports.cards import Shown, taking
from conformance.reports.model import Card, Column, Feature, Variant
from conformance.reports.tables import Part, by_key, worst_verdict


class Family(NamedTuple):
    """A feature as the report shows it.

    Attributes:
        name: the heading of the feature.
        parts: the names of the problem features that the heading covers.
        kinds: the kinds of declarations that the heading covers although they name none of `parts`:
            those that change how tokens are passed.
        chapter: the chapter whose requirements are only about this feature, or "".
        seen: functions that take observed values from a card, in order.
        subject: what comes before the dot in the ids of the subjects of the feature's experiment,
            or "".
    """

    name: str
    parts: frozenset[str]
    kinds: frozenset[str] = frozenset()
    chapter: str = ""
    seen: tuple[Callable[[Card], list[Shown]], ...] = ()
    subject: str = ""


_FEWER = "lengths.fewer-queries"


def _own_key(card: Card) -> list[Shown]:
    """Return whether a window counts the query's own key, and how windows are aligned."""
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
    return [Shown(phrase, "") for phrase in (*found, *aligned) if phrase]


FAMILIES = (
    Family("Window", frozenset({"window"}), seen=(_own_key,), subject="window"),
    Family(
        "Soft cap",
        frozenset({"soft cap"}),
        seen=tuple(
            taking(f"soft-cap.{name}") for name in ("formula", "beside-mask", "beside-bias")
        ),
        subject="soft-cap",
    ),
    Family("Sinks", frozenset({"sinks"}), seen=(taking("sinks.units"),)),
    Family("ALiBi", frozenset({"alibi"}), seen=(taking("alibi.bias", lengths=[_FEWER]),)),
    Family("Rotary", frozenset({"rotary"}), seen=(taking("rotary.turns", size=["rotary.all"]),)),
    Family("Query/key norm", frozenset({"query/key norm"})),
    Family(
        "Lengths",
        frozenset({"lengths", "key lengths", "query lengths"}),
        chapter="lengths",
        seen=(taking("lengths.counts"),),
        subject="lengths",
    ),
    Family("Segments, packed", frozenset({"segments"}), frozenset({"Packed"}), "packed"),
    Family("Positions", frozenset({"positions"}), chapter="positions"),
    Family("Caches, pages", frozenset(), frozenset({"Cache", "Pages"}), "cache"),
)
"""The features, in the order of the report."""

_NOTHING = frozenset({"cannot-be-asked", "none"})
"""The ids of observed values that do not show a convention."""


def features(
    parts: Iterable[Part], columns: Sequence[Column], cards: Iterable[Card]
) -> list[Feature]:
    """Return the results for every feature of every column, in the order of the columns."""
    by_column = {part.key: part for part in parts}
    own_cards = {card.column: card for card in cards}
    found = []
    for column in columns:
        part = by_column[column.key]
        card = own_cards.get(column.key) or Card(column.key, [])
        verdicts = _verdicts(part)
        found += [
            Feature(
                column=part.key,
                feature=family.name,
                declared=_declared(part.implementation, family, card),
                items=count(verdicts[family.name]),
                seen=_seen(family, card),
            )
            for family in FAMILIES
        ]
    return found


def _declared(implementation: Implementation, family: Family, card: Card) -> list[str] | None:
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


def _verdicts(part: Part) -> dict[str, list[str]]:
    """Return the verdict of each item of each feature.

    If the case of an item has the feature, the item's own verdict counts; if only requirements
    about the feature were checked on the item, the worst verdict of these counts.
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


def _seen(family: Family, card: Card) -> list[Variant]:
    found = []
    for take in family.seen:
        shown = [item for item in take(card) if item.phrase.id not in _NOTHING]
        for item in shown:
            where = item.where if len(shown) > 1 else ""
            found.append(Variant(item.value, 1, where, item.phrase))
    return found
