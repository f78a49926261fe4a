"""What the page holds for its script: every finding, as columns of numbers beside tables of words.

A hundred thousand findings have to fit into a page that opens at once, so a word is written once,
and what most findings do not have (a worst element, a message) is kept apart with the place of the
finding that has it. `page/script/findings.js` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from markupsafe import Markup

from conformance.records.card import TOPICS
from conformance.records.findings import MAKERS, VERDICTS, CaseResult, Figures, Worst
from conformance.records.header import CaseInfo
from conformance.reports import wording
from conformance.reports.columns import column_keys, declared
from conformance.reports.matrix import levels
from conformance.reports.model import Card, Loaded, Report
from conformance.reports.totals import GRAVITY
from conformance.text import axes


class Words:
    """A table of words: each once, in the order in which they came."""

    def __init__(self, *known: str) -> None:
        self._places = {word: place for place, word in enumerate(known)}

    def place(self, word: str) -> int:
        """Where the word stands; it is put at the end if it is new."""
        return self._places.setdefault(word, len(self._places))

    @property
    def listed(self) -> list[str]:
        """All of them."""
        return list(self._places)


class Items(msgspec.Struct):
    """Items in the order of the records: words by place, and how many findings each has."""

    column: list[int] = []
    case: list[int] = []
    dtype: list[int] = []
    mode: list[int] = []
    findings: list[int] = []


class Measured(msgspec.Struct):
    """Figures of the findings that have them; `at` is the step from one of those to the next."""

    at: list[int] = []
    array: list[int] = []
    max: list[float] = []
    rms: list[float] = []
    bias: list[float] = []
    limit: list[int] = []
    accuracy: list[int] = []


class Told(msgspec.Struct):
    """Words about some findings; `at` as in `Measured`."""

    at: list[int] = []
    word: list[int] = []


class Worsts(msgspec.Struct):
    """Worst elements; `at` as in `Measured`."""

    at: list[int] = []
    worst: list[tuple[int, Sequence[int], str, str, str]] = []


class Shown(msgspec.Struct, frozen=True):
    """A column, as far as the script needs it."""

    key: str
    name: str
    title: str
    device: str
    spec: str
    versions: dict[str, str]


class Contents(msgspec.Struct):
    """All of it."""

    limit: float
    verdicts: Sequence[str]
    gravity: Sequence[str]
    symbols: dict[str, str]
    columns: list[Shown]
    requirements: list[tuple[str, str, str, str, str]]
    cases: dict[str, CaseInfo]
    topics: dict[str, tuple[str, str]]
    cards: list[Card]
    items: Items
    requirement: list[int]
    verdict: list[int]
    figures: Measured
    worst: Worsts
    detail: Told
    cause: Told
    where: Told
    value: Told
    made_by: Told
    makers: dict[str, str]
    case_words: list[str] = []
    dtypes: list[str] = []
    modes: list[str] = []
    arrays: list[str] = []
    axes: dict[str, Sequence[str]] = {}
    limits: list[str] = []
    classes: list[str] = []
    details: list[str] = []
    causes: list[str] = []
    wheres: list[str] = []
    values: list[str] = []
    made_bys: list[str] = []


def contents(report: Report, records: Sequence[Loaded]) -> Contents:
    """The findings of these records, for a page about this report."""
    return _Writer(report).write(records)


def embedded(found: Contents) -> Markup:
    """JSON that can stand inside a script element whatever its strings hold."""
    text = msgspec.json.encode(found).decode()
    return Markup(text.replace("<", "\\u003c"))


class _Writer:
    def __init__(self, report: Report) -> None:
        level = levels()
        self.requirements = Words(*(row.requirement for row in report.matrix))
        self.columns = {column.key: place for place, column in enumerate(report.columns)}
        self.cases, self.dtypes, self.modes = Words(), Words(*report.totals.dtypes), Words()
        self.arrays, self.limits, self.classes = Words(), Words(), Words()
        self.details, self.causes, self.wheres, self.values = Words(), Words(), Words(), Words()
        self.made_bys = Words()
        self.found = Contents(
            limit=report.limit,
            verdicts=VERDICTS,
            gravity=GRAVITY,
            symbols=wording.SYMBOLS,
            columns=[
                Shown(item.key, item.name, item.title, item.device, item.spec, item.versions)
                for item in report.columns
            ],
            requirements=[
                (
                    row.requirement,
                    row.chapter,
                    level.get(row.requirement, ""),
                    row.sentence,
                    row.why,
                )
                for row in report.matrix
            ],
            cases={},
            topics={topic.name: (topic.title, topic.question) for topic in TOPICS},
            cards=report.cards,
            items=Items(),
            requirement=[],
            verdict=[],
            figures=Measured(),
            worst=Worsts(),
            detail=Told(),
            cause=Told(),
            where=Told(),
            value=Told(),
            made_by=Told(),
            makers=MAKERS,
        )
        self._last: dict[int, int] = {}

    def write(self, records: Sequence[Loaded]) -> Contents:
        found = self.found
        keys = column_keys(records)
        for index, (_, record, _) in enumerate(records):
            own: dict[str, list[CaseResult]] = {item.name: [] for item in declared(record)}
            for result in record.results:
                own[result.implementation].append(result)
            for name, results in own.items():
                place = self.columns.get(keys[index, name])
                if place is not None:
                    for result in results:
                        self._item(place, result)
            found.cases |= record.header.cases
        found.case_words = self.cases.listed
        found.dtypes, found.modes = self.dtypes.listed, self.modes.listed
        found.arrays, found.classes = self.arrays.listed, self.classes.listed
        found.limits = self.limits.listed
        found.details, found.causes = self.details.listed, self.causes.listed
        found.wheres, found.values = self.wheres.listed, self.values.listed
        found.made_bys = self.made_bys.listed
        return found

    def _item(self, column: int, result: CaseResult) -> None:
        items = self.found.items
        items.column.append(column)
        items.case.append(self.cases.place(result.case))
        items.dtype.append(self.dtypes.place(result.dtype))
        items.mode.append(self.modes.place(result.mode))
        items.findings.append(len(result.findings))
        for finding in result.findings:
            place = len(self.found.requirement)
            self.found.requirement.append(self.requirements.place(finding.requirement))
            self.found.verdict.append(VERDICTS.index(finding.verdict))
            if finding.figures is not None:
                self._figures(place, finding.figures)
            if finding.worst is not None:
                self._worst(place, finding.worst)
            for told, words, word in (
                (self.found.detail, self.details, finding.detail),
                (self.found.cause, self.causes, finding.cause),
                (self.found.where, self.wheres, finding.where),
                (self.found.value, self.values, finding.value),
                (self.found.made_by, self.made_bys, finding.made_by),
            ):
                if word:
                    self._step(told.at, place)
                    told.word.append(words.place(word))

    def _figures(self, place: int, own: Figures) -> None:
        figures = self.found.figures
        self._step(figures.at, place)
        figures.array.append(self.arrays.place(own.array))
        figures.max.append(own.max_ratio)
        figures.rms.append(own.rms_ratio)
        figures.bias.append(own.bias)
        figures.limit.append(self.limits.place(wording.limit(own.limit)))
        figures.accuracy.append(self.classes.place(own.accuracy))

    def _worst(self, place: int, own: Worst) -> None:
        self._step(self.found.worst.at, place)
        array = self.arrays.place(own.array)
        if names := axes(own.array, len(own.index)):
            self.found.axes[f"{own.array} {len(own.index)}"] = names
        self.found.worst.worst.append((array, own.index, own.got, own.want, own.noise))

    def _step(self, steps: list[int], place: int) -> None:
        """Steps are shorter than places."""
        steps.append(place - self._last.get(id(steps), 0))
        self._last[id(steps)] = place
