"""Write `site.json`, the data of the documentation site: conventions and results by version.

The site is built from this file alone, so that building it requires neither the records nor this
package. Its pages are "can I use", a page for each convention, requirement and defect, the
translator, and the badges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from conformance.records.header import Implementation
from conformance.reports.cards import FAMILIES, GLANCES, experiment_cards, features
from conformance.reports.model import Card, Column, Feature, Trend
from conformance.reports.publishing.pages import Known, Published, library_of, varying
from conformance.reports.tables import columns, parts_of, topics_of
from conformance.words import say

SITE = "site.json"
SCHEMA = "mha-conformance/site/1"

Translator = Callable[[Mapping[str, Implementation]], Any]
"""A function that makes the translator's answers from what implementations declare."""

Answers = dict[str, list[list[Any]]]
"""The values of each question, with where they hold ("" if everywhere) and whether to warn."""


def render_site(published: Published, translator: Translator) -> bytes:
    """Return the content of `site.json`."""
    report = published.report
    cards = {card.column: card for card in report.cards}
    parts = parts_of(published.versions)
    shown = columns(parts)
    their_cards = experiment_cards(parts, shown, topics_of(published.versions))
    by_key = {card.column: card for card in their_cards}
    their_features = features(parts, shown, their_cards)
    before = {
        (part.record.header.name, part.implementation.name): _answers(
            by_key.get(part.key), [one for one in their_features if one.column == part.key]
        )
        for part in parts
    }
    content = {
        "schema": SCHEMA,
        "questions": [glance.heading for glance in GLANCES],
        "features": [family.name for family in FAMILIES],
        "implementations": [
            _implementation(published, column, cards.get(column.key), before)
            for column in report.columns
        ],
        "requirements": [
            {
                "id": row.requirement,
                "level": row.level,
                "sentence": row.sentence,
                "why": row.why,
                "cells": {cell.column: cell.counts for cell in row.cells if cell.counts},
            }
            for row in report.matrix
        ],
        "translator": translator(published.declared),
    }
    return msgspec.json.encode(content) + b"\n"


def _implementation(
    published: Published,
    column: Column,
    card: Card | None,
    before: Mapping[tuple[str, str], Answers],
) -> dict[str, Any]:
    report, declared = published.report, published.declared[column.key]
    own = [one for one in report.features if one.column == column.key]
    answers = _answers(card, own)
    course = next((item for item in report.timelines if item.column == column.key), None)
    known = [_known(one) for one in published.known.get(column.key, ())]
    return {
        "key": column.key,
        "title": column.title,
        "library": library_of(column),
        "versions": column.versions,
        "dtypes": column.dtypes,
        "documentation": column.documentation,
        "arguments": [
            [mask.name, ", ".join(mask.axes), mask.true, mask.number] for mask in declared.masks
        ],
        "causal": [declared.causal.name, declared.causal.alignment] if declared.causal else None,
        "answers": answers,
        "features": {
            one.feature: {"declared": one.declared, "items": one.items}
            for one in own
            if one.declared is not None or one.items
        },
        "known": known,
        "history": _history(published, column, course, answers, before) if course else [],
    }


def _history(
    published: Published,
    column: Column,
    course: Trend,
    answers: Answers,
    before: Mapping[tuple[str, str], Answers],
) -> list[dict[str, Any]]:
    """Return the data of every measured version, the oldest first."""
    return [
        {
            "with": varying(course, point),
            "date": point.created[:10],
            "now": point.record == column.record,
            "unavailable": point.unavailable,
            "answers": answers
            if point.record == column.record
            else before.get((point.record, column.name), {}),
            "known": [
                one.reason or one.detail
                for one in (
                    published.known.get(column.key, ())
                    if point.record == column.record
                    else published.beside.get((point.record, column.name), ())
                )
            ],
        }
        for point in course.points
    ]


def _answers(card: Card | None, own: Iterable[Feature]) -> Answers:
    answers: Answers = {}
    for glance in GLANCES if card else ():
        taken = glance.take(card) if card else []
        if taken:
            answers[glance.heading] = [[one.value, one.where, one.alarming] for one in taken]
    for feature in own:
        if feature.seen:
            answers[feature.feature] = [[one.value, one.where, False] for one in feature.seen]
    return answers


def _known(known: Known) -> dict[str, Any]:
    members = known.group.members
    entry = known.entry
    return {
        "kind": known.kind,
        "reason": known.reason or known.detail,
        "when": known.when,
        "cases": entry.case if entry else [],
        "link": entry.link if entry else "",
        "script": entry.reproduction if entry else "",
        "dtypes": list(dict.fromkeys(one.result.dtype for one in members)),
        "modes": list(dict.fromkeys(one.result.mode for one in members)),
        "requirements": known.most_frequent("requirement"),
        "cause": say(known.cause) if known.cause else "",
        "findings": len(known.group),
    }
