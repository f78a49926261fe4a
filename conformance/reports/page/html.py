"""The report as one HTML page that needs no network, escapes everything, and is filled lazily.

The page shows the summary and the headings of everything else. It contains its other parts as
compressed, escaped HTML, which the script inserts when they come into view, and every single
finding as columns of numbers, which the script shows on request. Style and script are inlined, and
a content security policy allows only these two, so that a name in a record cannot become code even
if escaping failed.
"""

from __future__ import annotations

import base64
import gzip
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from markupsafe import Markup

from conformance.errors import ConformanceError
from conformance.records.findings import (
    GRAVITY,
    INFINITE,
    MAKERS,
    NOT_VERIFIED,
    VERDICTS,
    CaseResult,
    Figures,
    Finding,
    Worst,
    gravity,
    item_id,
    of_weights,
)
from conformance.records.numbers import UNDERFLOW, Array
from conformance.records.record import PICTURED
from conformance.reports.cards import glances_of
from conformance.reports.changes import Changes, deltas
from conformance.reports.figures import FOLDER, FigureSubject, Picture, again, picture, svg
from conformance.reports.figures.heatmap import pattern
from conformance.reports.model import Deviation, Loaded, Report
from conformance.reports.page import content_policy, environment, views
from conformance.reports.tables import by_key, parts_of, topics_of
from conformance.reports.wording import SYMBOLS
from conformance.text import axes, printable
from conformance.words import say

PAGE = Path(__file__).parent
INSIDE = ("compared", "causes")
"""The templates of parts that are not sections themselves but are inserted into sections. The
template "about" makes further such parts, one for each implementation that deviates."""

AT_ONCE = ("matrix", "deviations")
"""The anchors of sections that are in the page from the start, unlike all others."""

STYLES = ("style.css", "panel.css", "print.css")
SCRIPTS = (
    "elements",
    "findings",
    "address",
    "filter",
    "matrix",
    "pictures",
    "finding",
    "panel",
    "card",
    "search",
    "start",
)
"""The parts of the script, in the order in which they depend on each other."""


class Figure(NamedTuple):
    """A drawing of attention weights, and the command that draws it.

    If an earlier deviation has the same drawing, `svg` is "" and `elsewhere` is the anchor of that
    deviation; otherwise `elsewhere` is "".
    """

    svg: str
    elsewhere: str
    command: str


def render_html(
    report: Report,
    figures: Mapping[str, Figure] | None = None,
    records: Sequence[Loaded] = (),
) -> str:
    """Return the report as an HTML page.

    Args:
        report: the report to show.
        figures: drawings, by the ids of deviations.
        records: the records with the single findings that the script shows on request.
    """
    style = "".join(map(_part, STYLES))
    # The whole script is one function, so that nothing is global.
    lines = "\n".join(_part(f"script/{name}.js") for name in SCRIPTS)
    script = f'"use strict";\n(async () => {{\n{lines}\n}})();\n'
    made = environment(PAGE)
    symptoms = {column.key: views.symptoms(report, column) for column in report.columns}
    made.globals |= {
        "report": report,
        "cards": views.cards(report),
        "figures": figures or {},
        "glances": glances_of(report.cards),
        "pattern": pattern,
        "measured": {(item.column, item.dtype): item for item in report.accuracy},
        "features": {(item.column, item.feature): item for item in report.features},
        "rows": {row.requirement: row for row in report.matrix},
        "index_of": {row.requirement: index for index, row in enumerate(report.matrix)},
        "place": {column.key: index for index, column in enumerate(report.columns)},
        "symptoms": symptoms,
        "views": views,
        "MAKERS": MAKERS,
        "VERDICTS": VERDICTS,
        "NOT_VERIFIED": NOT_VERIFIED,
    }
    names = [target for target, _, _ in views.sections(report) if target not in AT_ONCE]
    parts = {name: made.get_template(f"{name}.html.j2").render() for name in (*names, *INSIDE)}
    about = made.get_template("about.html.j2")
    for index, column in enumerate(report.columns):
        if symptoms[column.key]:
            parts[f"about-{index}"] = about.render(column=column)
    read = contents(report, records, parts, symptoms)
    return made.get_template("report.html.j2").render(
        style=style,
        script=script,
        contents=_embedded(msgspec.json.encode(read)),
        cards_of=_embedded(msgspec.json.encode(report.cards)),
        findings=_embedded(packed(report, records)),
        policy=content_policy(style, script),
    )


def render_changes(changes: Changes) -> str:
    """Return a page that shows two records side by side and lists changes, regressions first."""
    before, after = changes.before.packages, changes.after.packages
    style = f"{_part(FOLDER / 'page.css')}\n{_part('changes.css')}"
    made = environment(
        PAGE, finalize=lambda value: printable(value) if type(value) is str else value
    )
    names = sorted({*before, *after})
    return made.get_template("changes.html.j2").render(
        changes=changes,
        deltas=deltas(changes),
        packages=[name for name in names if before.get(name) != after.get(name)],
        style=style,
        policy=content_policy(style),
    )


def _part(name: str | Path) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


# What the script reads


def contents(
    report: Report,
    records: Sequence[Loaded],
    parts: Mapping[str, str],
    symptoms: Mapping[str, Sequence[views.Symptom]],
) -> dict[str, Any]:
    """Return the data that the script reads first: names, counts, and parts of the page as HTML.

    `cells` has for each row and column of the matrix a flat list that alternates the index of a
    verdict and its count.
    """
    place: dict[str, int] = {verdict: index for index, verdict in enumerate(VERDICTS)}
    return {
        "limit": report.limit,
        "verdicts": VERDICTS,
        "gravity": GRAVITY,
        "symbols": SYMBOLS,
        "columns": report.columns,
        "requirements": [
            (one.requirement, one.chapter, one.level, one.sentence, one.why)
            for one in report.matrix
        ],
        "dtypes": report.totals.dtypes,
        "topics": {topic.name: (topic.title, topic.question) for topic in topics_of(records)},
        "makers": MAKERS,
        "cells": [
            [
                [n for verdict, n in cell.counts.items() for n in (place[verdict], n)]
                for cell in row.cells
            ]
            for row in report.matrix
        ],
        "carded": [card.column for card in report.cards],
        "symptoms": [
            (index, symptom.text, symptom.times, symptom.deviations[0].id)
            for index, column in enumerate(report.columns)
            for symptom in symptoms[column.key]
        ],
        "parts": parts,
    }


IN_FULL = 12
"""The most findings of one kind that have all digits and their worst element in the page. Others
keep only the two digits shown, so that a page of a million findings can be sent by email."""


def packed(report: Report, records: Sequence[Loaded]) -> bytes:
    """Return all findings as columns of numbers: one line of JSON, then the bytes of the columns.

    Most numbers are zero-based indices into lists in the JSON or in `contents`; the column "many"
    has the number of findings of each item. The bytes of a column are ordered by significance, all
    lowest bytes first, because this compresses best.
    """
    column = {own.key: index for index, own in enumerate(report.columns)}
    row = {own.requirement: index for index, own in enumerate(report.matrix)}
    results = [
        (column[part.key], result)
        for part in parts_of(records)
        if part.key in column
        for result in part.results
    ]
    findings = [finding for _, result in results for finding in result.findings]
    full = _in_full(results)
    lists: dict[str, dict[Any, int]] = {
        name: {first: 0}
        for name, first in (
            ("cases", None), ("in", None), ("modes", None), ("arrays", ""), ("ratios", 0.0),
            ("limits", 0.0), ("accuracies", ""), ("texts", ("", "", "", "", "")),
        )
    }  # fmt: skip

    def places(among: str, values: Iterable[Any]) -> list[int]:
        known = lists[among]
        return [known.setdefault(value, len(known)) for value in values]

    verdicts: dict[str, int] = {verdict: index for index, verdict in enumerate(VERDICTS)}
    shown = [(finding, id(finding) in full) for finding in findings]
    figures = [finding.figures or _NO_FIGURES for finding in findings]
    exact: list[tuple[Figures | None, Worst | None]] = [(None, None)]
    exact += ((one.figures, one.worst) for one, whole in shown if whole and one.worst)
    counted = itertools.count(1)
    # Building one column at a time, a report of a million findings takes seconds.
    numbers: dict[str, list[int]] = {
        "column": [index for index, _ in results],
        "case": places("cases", (result.case for _, result in results)),
        "dtype": places("in", (result.dtype for _, result in results)),
        "mode": places("modes", (result.mode for _, result in results)),
        "many": [len(result.findings) for _, result in results],
        "requirement": [row[finding.requirement] for finding in findings],
        "verdict": [verdicts[finding.verdict] for finding in findings],
        "text": places("texts", itertools.starmap(_texts, shown)),
        "array": places("arrays", (own.array for own in figures)),
        "max": places("ratios", (_digits(own.max_ratio) for own in figures)),
        "rms": places("ratios", (_digits(own.rms_ratio) for own in figures)),
        "bias": places("ratios", (_lean(own.bias) for own in figures)),
        "limit": places("limits", (own.limit for own in figures)),
        "accuracy": places("accuracies", (own.accuracy for own in figures)),
        "exact": [next(counted) if whole and one.worst else 0 for one, whole in shown],
    }
    sizes: list[tuple[str, int, int]] = []
    head = {
        "lists": {name: list(known) for name, known in lists.items()},
        "exact": exact,
        "numbers": sizes,
        "cases": {
            name: case for _, record, _ in records for name, case in record.header.cases.items()
        },
        # By name and rank of the array.
        "axes": {
            f"{worst.array} {len(worst.index)}": names
            for _, worst in exact
            if worst and (names := axes(worst.array, len(worst.index)))
        },
    }
    content = []
    for name, values in numbers.items():
        wide = 1 + (max(values, default=0) > 0xFF) + 2 * (max(values, default=0) > 0xFFFF)
        sizes.append((name, len(values), min(wide, 4)))
        octets = np.array(values, dtype="<u4").view(np.uint8).reshape(-1, 4)
        content.append(octets[:, : min(wide, 4)].T.tobytes())
    return msgspec.json.encode(head) + b"\n" + b"".join(content)


_NO_FIGURES = Figures(array="", max_ratio=0.0, rms_ratio=0.0, bias=0.0, limit=0.0, accuracy="")


def _texts(finding: Finding, whole: bool) -> tuple[str, str, str, str, str]:
    """Return the texts of a finding: its detail, value, cause, `where` and `made_by`.

    The detail is left out if the finding has figures and `whole` is false.
    """
    detail = finding.detail if whole or finding.figures is None else ""
    value, cause, where = finding.value, finding.cause, finding.where
    if not (value.id or cause.id or where.id):
        return (detail, "", "", "", finding.made_by)
    return (detail, say(value), say(cause), say(where), finding.made_by)


def _in_full(results: Sequence[tuple[int, CaseResult]]) -> set[int]:
    """Return the `id()` of each finding that the page contains in full.

    These are up to `IN_FULL` findings of each kind, the worst ones. Findings of a kind have the
    same column, requirement, verdict and cause; those that conform are never contained in full.
    """
    alike = by_key(
        (
            (index, one)
            for index, result in results
            for one in result.findings
            if one.verdict != "conforms"
        ),
        lambda item: (item[0], item[1].requirement, item[1].verdict, item[1].cause),
    )
    return {
        id(finding)
        for same in alike.values()
        for _, finding in sorted(same, key=lambda item: gravity(item[1]), reverse=True)[:IN_FULL]
    }


def _digits(value: float) -> float:
    """Round a ratio to the two digits that the page shows."""
    return value if value in (0, INFINITE) else float(f"{value:.1e}")


def _lean(bias: float) -> float:
    """Round a bias to the nearest half, or to two digits beyond ±5, which chance cannot explain."""
    return float(f"{bias:.1e}") if abs(bias) > 5 else round(2 * bias) / 2


def _embedded(content: bytes) -> Markup:
    """Return bytes, compressed, as text that is safe inside a script element."""
    return Markup(base64.b64encode(gzip.compress(content, compresslevel=9, mtime=0)).decode())


# Attention patterns


def figures(report: Report, records: Sequence[Loaded]) -> dict[str, Figure]:
    """Return a figure for each deviation of attention weights, by the deviation's id.

    The figure shows the item that is the deviation's evidence if the record has its weights, else
    another item of the deviation. There is no figure if no weights are stored or if they cannot be
    drawn. Each item is drawn once; further figures of it refer to that drawing.
    """
    shown: dict[str, Figure] = {}
    drawn: dict[str, str] = {}
    pictured = {
        part.key: [
            (result, [part.arrays[f"{result.id}|{kind}"] for kind in PICTURED])
            for result in part.results
            if all(f"{result.id}|{kind}" in part.arrays for kind in PICTURED)
        ]
        for part in parts_of(records)
        if part.arrays
    }
    for deviation in report.deviations:
        if not of_weights(deviation.figures, deviation.worst):
            continue
        column = report.column(deviation.column)
        evidence = item_id(
            column.name, deviation.case, deviation.dtype, deviation.device, deviation.mode
        )
        items = [item for item in pictured.get(column.key, []) if _gathers(deviation, item[0])]
        if not items:
            continue
        result, arrays = next((item for item in items if item[0].id == evidence), items[0])
        try:
            figure = _picture(result, arrays)
        except ConformanceError:
            # The arrays do not fit together, so the record was not made by this suite.
            continue
        command = again(figure, column.spec, "heads.svg")
        place = drawn.setdefault(f"{column.key}:{result.id}", deviation.id)
        if place == deviation.id:
            drawing = svg(figure, name=f"{deviation.id}-heads", alone=False)
            shown[deviation.id] = Figure(drawing, "", command)
        else:
            shown[deviation.id] = Figure("", place, command)
    return shown


def _gathers(deviation: Deviation, result: CaseResult) -> bool:
    """Return whether an item has a finding like those of a deviation.

    The item's case, dtype and mode are among those of the deviation, and the finding's requirement,
    verdict and cause are equal to those of the deviation.
    """
    is_there = result.case in deviation.cases and result.mode in deviation.modes
    says = deviation.requirement, deviation.verdict, deviation.cause
    return (is_there and result.dtype in deviation.dtypes) and any(
        (finding.requirement, finding.verdict, finding.cause) == says for finding in result.findings
    )


def _picture(result: CaseResult, arrays: Sequence[Array]) -> Picture:
    got, want, noise, blocked = (np.asarray(array, dtype=np.float64) for array in arrays)
    return picture(
        FigureSubject(result.implementation, result.case, result.dtype, result.mode, result.device),
        got=got,
        want=want,
        noise=noise,
        blocked=blocked != 0,
        underflow=UNDERFLOW.get(result.dtype, 0.0),
    )
