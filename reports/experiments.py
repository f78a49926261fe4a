"""Convention cards from records: what experiments showed, mode by mode, as one line a subject."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from conformance.records.findings import PREFIX, CaseResult, Entry, Topic
from conformance.records.phrase import Phrase
from conformance.reports.columns import column_keys, topics_of
from conformance.reports.model import (
    Card,
    Chapter,
    Column,
    Handed,
    Loaded,
    Observed,
    Subject,
)
from conformance.words import say

SAME_MASK = "same-mask"


def experiment_cards(records: Sequence[Loaded], columns: Sequence[Column]) -> list[Card]:
    """One card for each column of which something was asked."""
    by_column, topics = _results(records), topics_of(records)
    cards = []
    for column in columns:
        own = by_column[column.key]
        chapters = [_chapter(topic, own[topic.id], column) for topic in topics if own[topic.id]]
        if chapters:
            cards.append(Card(column.key, chapters))
    return cards


def handed(records: Sequence[Loaded], columns: Sequence[Column]) -> list[Handed]:
    """What everybody makes of one mask, in the order of the columns."""
    found: dict[str, list[Handed]] = defaultdict(list)
    keys = column_keys(records)
    for index, (_, record, arrays) in enumerate(records):
        for result in record.results:
            if result.case != PREFIX + SAME_MASK:
                continue
            key = keys.get((index, result.implementation), result.implementation)
            for entry in result.entries:
                argument = entry.subject.name("argument")
                written = say(entry.subject.part("written"))
                weights = arrays.get(f"{result.id}|{entry.subject}")
                shown = [] if weights is None or weights.ndim != 2 else _numbers(weights)
                found[key].append(
                    Handed(
                        key, argument, written, say(entry.value), entry.evidence, shown, entry.value
                    )
                )
    return [item for column in columns for item in found[column.key]]


def _results(records: Sequence[Loaded]) -> dict[str, dict[str, list[CaseResult]]]:
    """By column and topic: the results of experiments."""
    found: dict[str, dict[str, list[CaseResult]]] = defaultdict(lambda: defaultdict(list))
    keys = column_keys(records)
    for index, (_, record, _) in enumerate(records):
        for result in record.results:
            if result.case.startswith(PREFIX):
                key = keys.get((index, result.implementation), result.implementation)
                found[key][result.case].append(result)
    return found


def _chapter(topic: Topic, results: Sequence[CaseResult], column: Column) -> Chapter:
    asked = [result for result in results if result.entries]
    reasons = {finding.detail for result in results for finding in result.findings}
    by_subject: dict[Phrase, list[tuple[str, Entry]]] = defaultdict(list)
    for result in asked:
        for entry in result.entries:
            by_subject[entry.subject].append((result.mode, entry))
    command = ["mha-conformance", "probe", column.spec, "--experiment", topic.name]
    command += ["--device", column.device] if column.device != "cpu" else []
    return Chapter(
        topic=topic.name,
        modes=[result.mode for result in asked],
        subjects=[
            Subject(say(about), list(_observed(found)), about)
            for about, found in by_subject.items()
        ],
        unsupported="" if asked else "; ".join(sorted(reasons - {""})),
        command=shlex.join(command),
    )


def _observed(found: Sequence[tuple[str, Entry]]) -> Iterator[Observed]:
    """Each value once, the most frequent first."""
    by_value: dict[tuple[Phrase, bool], list[tuple[str, Entry]]] = defaultdict(list)
    for mode, entry in found:
        by_value[entry.value, entry.agrees].append((mode, entry))
    for alike in sorted(by_value.values(), key=lambda alike: -len(alike)):
        entry = alike[0][1]
        modes = [] if len(by_value) == 1 else [mode for mode, _ in alike]
        yield Observed(
            say(entry.value),
            modes,
            entry.evidence,
            say(entry.declared),
            entry.agrees,
            entry.code,
            entry.value,
        )


def _numbers(weights: np.ndarray) -> list[list[float | None]]:
    return [
        [round(float(value), 4) if np.isfinite(value) else None for value in row] for row in weights
    ]
