"""What the page holds for its script: every finding of the records, as compressed JSON.

Hundreds of thousands of findings have to fit into a page that opens at once. Most of their text
repeats, so gzip makes a thirtieth of it; browsers undo that themselves.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence

import msgspec
from markupsafe import Markup

from conformance.records.findings import MAKERS, VERDICTS, Figures, Finding, Worst
from conformance.records.header import CaseInfo
from conformance.reports import wording
from conformance.reports.columns import column_keys, topics_of
from conformance.reports.model import Card, Loaded, Report
from conformance.reports.totals import GRAVITY
from conformance.text import axes
from conformance.words import say


class Shown(msgspec.Struct, omit_defaults=True):
    """A finding; requirement and verdict by their places in `Contents`."""

    requirement: int
    verdict: int
    detail: str = ""
    value: str = ""
    cause: str = ""
    where: str = ""
    made_by: str = ""
    figures: Figures | None = None
    worst: Worst | None = None


class Item(msgspec.Struct):
    """One case in one dtype and mode; the implementation by its place in `Contents.columns`."""

    column: int
    case: str
    dtype: str
    mode: str
    findings: list[Shown]


class ShownColumn(msgspec.Struct, frozen=True):
    """A column, as far as the script needs it."""

    key: str
    name: str
    title: str
    device: str
    spec: str
    versions: dict[str, str]


class Contents(msgspec.Struct):
    """Everything that the script reads.

    Attributes:
        requirements: id, chapter, level, sentence and why of each row of the matrix.
        topics: title and question of each experiment.
        axes: "array rank" to the names of the axes, for all arrays that have a worst element.
        makers: `Finding.made_by` in words.
    """

    limit: float
    verdicts: Sequence[str]
    gravity: Sequence[str]
    symbols: dict[str, str]
    columns: list[ShownColumn]
    requirements: list[tuple[str, str, str, str, str]]
    dtypes: list[str]
    topics: dict[str, tuple[str, str]]
    cards: list[Card]
    makers: dict[str, str]
    cases: dict[str, CaseInfo] = {}
    axes: dict[str, Sequence[str]] = {}
    items: list[Item] = []


def contents(report: Report, records: Sequence[Loaded]) -> Contents:
    """The findings of these records, for a page about this report."""
    found = Contents(
        limit=report.limit,
        verdicts=VERDICTS,
        gravity=GRAVITY,
        symbols=wording.SYMBOLS,
        columns=[
            ShownColumn(item.key, item.name, item.title, item.device, item.spec, item.versions)
            for item in report.columns
        ],
        requirements=[
            (row.requirement, row.chapter, row.level, row.sentence, row.why)
            for row in report.matrix
        ],
        dtypes=report.totals.dtypes,
        topics={topic.name: (topic.title, topic.question) for topic in topics_of(records)},
        cards=report.cards,
        makers=MAKERS,
    )
    place = {column.key: index for index, column in enumerate(report.columns)}
    row = {row.requirement: index for index, row in enumerate(report.matrix)}
    keys = column_keys(records)
    for index, (_, record, _) in enumerate(records):
        found.cases |= record.header.cases
        for result in record.results:
            column = place.get(keys[index, result.implementation])
            if column is None:
                continue
            shown = [_shown(finding, row) for finding in result.findings]
            found.items.append(Item(column, result.case, result.dtype, result.mode, shown))
            for finding in result.findings:
                if (worst := finding.worst) and (names := axes(worst.array, len(worst.index))):
                    found.axes[f"{worst.array} {len(worst.index)}"] = names
    return found


def _shown(finding: Finding, row: dict[str, int]) -> Shown:
    return Shown(
        row[finding.requirement],
        VERDICTS.index(finding.verdict),
        finding.detail,
        say(finding.value),
        say(finding.cause),
        say(finding.where),
        finding.made_by,
        finding.figures,
        finding.worst,
    )


def embedded(found: Contents) -> Markup:
    """The contents as text that can stand inside a script element whatever its strings hold."""
    packed = gzip.compress(msgspec.json.encode(found), compresslevel=6, mtime=0)
    return Markup(base64.b64encode(packed).decode())
