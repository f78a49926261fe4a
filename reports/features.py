"""Features beyond masks: what each implementation declares about them, and its results.

The report shows three things about a feature: the arguments that an adapter declares for it, the
verdicts of all items whose problem includes it, and the conventions that experiments observed.
Records made before features existed contain nothing about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from conformance.records.findings import CaseResult, count
from conformance.records.header import Implementation
from conformance.records.phrase import Phrase
from conformance.reports.cards import Shown, taking
from conformance.reports.columns import Part
from conformance.reports.model import Card, Column, Counts, Feature, Variant
from conformance.reports.totals import worst_verdict


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


def _own_key(card: Card) -> list[Shown]:
    """Return whether a window counts the query's own key, and how windows are aligned."""
    found: dict[Phrase, None] = {}
    aligned: dict[Phrase, None] = {}
    for subject in (one for chapter in card.chapters for one in chapter.subjects):
        if subject.phrase.id != "window.alone":
            continue
        for item in subject.observed:
            if subject.phrase.part("lengths").id == "lengths.fewer-queries":
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
            map(taking, ("soft-cap.formula", "soft-cap.beside-mask", "soft-cap.beside-bias"))
        ),
        subject="soft-cap",
    ),
    Family("Sinks", frozenset({"sinks"}), seen=(taking("sinks.units"),)),
    Family(
        "ALiBi",
        frozenset({"alibi"}),
        seen=(taking("alibi.bias", lengths=["lengths.fewer-queries"]),),
    ),
    Family(
        "Rotary",
        frozenset({"rotary"}),
        seen=(taking("rotary.turns", size=["rotary.all"]),),
    ),
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
    return [
        feature
        for column in columns
        for feature in _of(by_column[column.key], own_cards.get(column.key))
    ]


def _of(part: Part, card: Card | None) -> list[Feature]:
    of_case = {name: frozenset(one.features) for name, one in part.record.header.cases.items()}
    asked = [_chapters(result) for result in part.results]
    return [
        Feature(
            column=part.key,
            feature=family.name,
            declared=_declared(part.implementation, family, card),
            items=_items(part.results, asked, family, of_case),
            seen=[] if card is None else _seen(family, card),
        )
        for family in FAMILIES
    ]


def _declared(
    implementation: Implementation, family: Family, card: Card | None
) -> list[str] | None:
    """Return the declared arguments of a feature.

    If the record does not list declared features, return the arguments that experiments tried, or
    None if there are none.
    """
    if implementation.features is None:
        tried = {
            subject.phrase.name("argument"): None
            for chapter in (card.chapters if card else ())
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


_CHAPTERS = frozenset(family.chapter for family in FAMILIES if family.chapter)


def _chapters(result: CaseResult) -> dict[str, list[str]]:
    """Return an item's verdicts on requirements that are about a single feature, by chapter."""
    found: dict[str, list[str]] = {}
    for finding in result.findings:
        chapter = finding.requirement.partition(".")[0]
        if chapter in _CHAPTERS:
            found.setdefault(chapter, []).append(finding.verdict)
    return found


def _items(
    results: Iterable[CaseResult],
    asked: Iterable[Mapping[str, Sequence[str]]],
    family: Family,
    of_case: Mapping[str, frozenset[str]],
) -> Counts:
    """Count the items of a feature by verdict.

    If the case of an item has the feature, the item's own verdict counts; if only requirements
    about the feature were checked on the item, the worst verdict of these counts.
    """
    verdicts: list[str] = []
    for result, chapters in zip(results, asked, strict=True):
        if of_case.get(result.case, frozenset()) & family.parts:
            verdicts.append(result.verdict)
        elif about := chapters.get(family.chapter):
            verdicts.append(worst_verdict(count(about)))
    return count(verdicts)


def _seen(family: Family, card: Card) -> list[Variant]:
    return [
        Variant(item.value, 1, item.where if len(shown) > 1 else "", item.phrase)
        for take in family.seen
        for shown in [[item for item in take(card) if item.phrase.id not in _NOTHING]]
        for item in shown
    ]
