"""Write `site.json`, the data of the documentation site: conventions and results by version.

The site is built from this file alone, so that building it requires neither the records nor this
package. It has the page "Can I use", a page for each convention, requirement and defect, a page
that translates masks between implementations, and badges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from conformance.records.header import Implementation
from conformance.reports.cards import FAMILIES, GLANCES, experiment_cards, features
from conformance.reports.model import Card, Column, FeatureResults
from conformance.reports.publishing.pages import (
    Known,
    OnGpu,
    Published,
    accuracy_of,
    library_of,
    varying,
)
from conformance.reports.tables import columns, parts_of, topics_of
from conformance.words import say

SITE = "site.json"
SCHEMA = "mha-conformance/site/1"

Translator = Callable[[Mapping[str, Implementation]], Any]
"""A function that takes what implementations declare, by column, and returns data to translate
masks between them."""

Answers = dict[str, list[list[Any]]]
"""For each question or feature, a list of observed values, each as [value, where it holds, whether
to warn of it]. If the value holds everywhere, the second text is ""."""


def render_site(published: Published, translator: Translator) -> bytes:
    """Return the content of `site.json`, including the answers of `translator`."""
    report = published.report
    parts = parts_of(published.versions)
    shown = columns(parts)
    cards = experiment_cards(parts, shown, topics_of(published.versions))
    before = _answers(cards, features(parts, shown, cards))
    other_versions = {
        (part.record.header.name, part.implementation.name): before.get(part.key, {})
        for part in parts
    }
    answers = _answers(report.cards, report.features)
    gpu = published.gpu
    on_gpu = _answers(gpu.report.cards, gpu.report.features) if gpu else {}
    content = {
        "schema": SCHEMA,
        "questions": [glance.heading for glance in GLANCES],
        "features": [family.name for family in FAMILIES],
        "implementations": [
            _implementation(published, column, answers, on_gpu, other_versions)
            for column in published.columns
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
    on_cpu: Mapping[str, Answers],
    on_gpu: Mapping[str, Answers],
    before: Mapping[tuple[str, str], Answers],
) -> dict[str, Any]:
    """Return the data of one implementation.

    What only a GPU showed is given twice: as the implementation's data, and as those of the GPU.
    """
    gpu, is_own = published.on_gpu(column.name), column in published.report.columns
    published = published.holding(column)
    answers = (on_cpu if is_own else on_gpu).get(column.key, {})
    declared = published.declared[column.key]
    return {
        "key": column.key,
        "title": column.title,
        "device": column.device,
        "accuracy": accuracy_of(published.report, column),
        "gpu": _on_gpu(gpu, on_gpu.get(gpu.key, {})) if gpu else None,
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
            for one in published.report.features
            if one.column == column.key and (one.declared is not None or one.items)
        },
        "known": [_known(one) for one in published.known.get(column.key, ())],
        "history": _history(published, column, answers, before),
    }


def _on_gpu(gpu: OnGpu, answers: Answers) -> dict[str, Any]:
    made = gpu.provenance
    return {
        "on": gpu.device,
        "date": made.created[:10],
        "asked": made.selection,
        "unavailable": gpu.declared.unavailable,
        "versions": gpu.declared.versions,
        "dtypes": gpu.column.dtypes if gpu.column else [],
        "accuracy": accuracy_of(gpu.all.report, gpu.column) if gpu.column else {},
        "answers": answers,
        "known": [_known(one) for one in gpu.known],
    }


def _history(
    published: Published,
    column: Column,
    answers: Answers,
    before: Mapping[tuple[str, str], Answers],
) -> list[dict[str, Any]]:
    """Return the data of every version, the oldest first; [] if there are no other versions."""
    course, history = published.course(column), []
    if course is None:
        return []
    for point in course.points:
        is_now = point.record == column.record
        told = {
            "with": varying(course, point),
            "date": point.created[:10],
            "now": is_now,
            "unavailable": point.unavailable,
            "answers": answers if is_now else before.get((point.record, column.name), {}),
            "known": [one.text for one in published.known_at(column, point)],
        }
        history.append(told)
    return history


def _answers(cards: Iterable[Card], features: Iterable[FeatureResults]) -> dict[str, Answers]:
    """Return the answers that cards and features contain, by column."""
    answers: dict[str, Answers] = defaultdict(dict)
    for card in cards:
        for glance in GLANCES:
            if taken := glance.take(card):
                texts = [[one.value, one.where, one.alarming] for one in taken]
                answers[card.column][glance.heading] = texts
    for feature in features:
        if feature.seen:
            texts = [[one.value, one.where, False] for one in feature.seen]
            answers[feature.column][feature.feature] = texts
    return answers


def _known(known: Known) -> dict[str, Any]:
    members, entry = known.group.members, known.entry
    return {
        "kind": known.kind,
        "reason": known.text,
        "when": known.when,
        "cases": entry.case if entry else [],
        "link": entry.link if entry else "",
        "script": entry.reproduction if entry else "",
        "dtypes": list(dict.fromkeys(one.result.dtype for one in members)),
        "modes": list(dict.fromkeys(one.result.mode for one in members)),
        "requirements": known.most_frequent("requirement"),
        "cause": say(known.cause),
        "findings": len(known.group),
    }
