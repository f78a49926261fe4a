"""The report as one HTML page: no network, everything escaped, readable without script or colour.

The page itself has the summary, the matrix and the deviations; every single finding lies in it as
compressed JSON, which the script shows on request. Style and script are inlined, and a content
security policy allows those two and nothing else, so that a name in a record cannot become code
even if escaping failed.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from markupsafe import Markup

from conformance.errors import ConformanceError
from conformance.records.findings import (
    MAKERS,
    NOT_VERIFIED,
    VERDICTS,
    CaseResult,
    Figures,
    Finding,
    Worst,
    item_id,
    of_weights,
)
from conformance.records.numbers import UNDERFLOW, Array
from conformance.records.record import PICTURED
from conformance.reports.cards import glances_of
from conformance.reports.columns import parts_of, topics_of
from conformance.reports.figures.drawing import again, svg
from conformance.reports.figures.heatmap import pattern
from conformance.reports.figures.picture import Picture, Subject, picture
from conformance.reports.model import Deviation, Loaded, Report
from conformance.reports.page import content_policy, environment, views
from conformance.reports.totals import GRAVITY
from conformance.reports.wording import SYMBOLS
from conformance.text import axes
from conformance.words import say

PAGE = Path(__file__).parent
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
    "start",
)
"""Parts of the script, in the order in which they build on each other."""


class Figure(NamedTuple):
    """The content of a panel: a drawing, or the anchor of the panel that has the same one."""

    svg: str
    elsewhere: str
    command: str


def render_html(
    report: Report,
    figures: Mapping[str, Figure] | None = None,
    records: Sequence[Loaded] = (),
) -> str:
    """Return the page.

    Args:
        report: what is shown as it is.
        figures: drawings of deviations, by their ids.
        records: what the script shows when somebody looks closer.
    """
    style = "".join(map(_part, STYLES))
    # All of the script is one block, in which nothing is global.
    lines = "\n".join(_part(f"script/{name}.js") for name in SCRIPTS)
    script = f'"use strict";\n(async () => {{\n{lines}\n}})();\n'
    return (
        environment(PAGE)
        .get_template("report.html.j2")
        .render(
            report=report,
            style=style,
            script=script,
            contents=_embedded(contents(report, records)),
            policy=content_policy(style, script),
            cards=views.cards(report),
            evidence=views.evidence(report),
            figures=figures or {},
            glances=glances_of(report.cards),
            pattern=pattern,
            measured={(item.column, item.dtype): item for item in report.accuracy},
            rows={row.requirement: row for row in report.matrix},
            index_of={row.requirement: index for index, row in enumerate(report.matrix)},
            place={column.key: index for index, column in enumerate(report.columns)},
            views=views,
            MAKERS=MAKERS,
            VERDICTS=VERDICTS,
            NOT_VERIFIED=NOT_VERIFIED,
        )
    )


def _part(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


# What the script reads


class Shown(msgspec.Struct, omit_defaults=True):
    """A finding with its text; requirement and verdict by their places in the contents."""

    requirement: int
    verdict: int
    detail: str = ""
    value: str = ""
    cause: str = ""
    where: str = ""
    made_by: str = ""
    figures: Figures | None = None
    worst: Worst | None = None


def contents(report: Report, records: Sequence[Loaded]) -> dict[str, Any]:
    """Return everything that the script reads, with every finding of the records.

    Implementations are named by their place among the columns, requirements by their row of the
    matrix. `axes` has the names of the axes of every array with a worst element, by "array rank".
    """
    place = {column.key: index for index, column in enumerate(report.columns)}
    row = {one.requirement: index for index, one in enumerate(report.matrix)}
    names_of_axes = {}
    items = []
    for part in parts_of(records):
        for result in part.results:
            if part.key in place:
                items.append(
                    {
                        "column": place[part.key],
                        "case": result.case,
                        "dtype": result.dtype,
                        "mode": result.mode,
                        "findings": [_shown(finding, row) for finding in result.findings],
                    }
                )
            for finding in result.findings:
                if (worst := finding.worst) and (names := axes(worst.array, len(worst.index))):
                    names_of_axes[f"{worst.array} {len(worst.index)}"] = names
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
        "cards": report.cards,
        "makers": MAKERS,
        "cases": {
            name: case for _, record, _ in records for name, case in record.header.cases.items()
        },
        "axes": names_of_axes,
        "items": items,
    }


def _shown(finding: Finding, row: Mapping[str, int]) -> Shown:
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


def _embedded(readable: object) -> Markup:
    """Return it as text that can stand inside a script element whatever its strings hold.

    Hundreds of thousands of findings have to fit into a page that opens at once. Most of their
    text repeats, so gzip makes a thirtieth of it; browsers decompress it themselves.
    """
    packed = gzip.compress(msgspec.json.encode(readable), compresslevel=6, mtime=0)
    return Markup(base64.b64encode(packed).decode())


# Attention patterns


def figures(report: Report, records: Sequence[Loaded]) -> dict[str, Figure]:
    """Return a figure for each deviation of attention weights, by the deviation's id.

    It shows the item of the evidence if the record has its weights, else another item of the
    deviation; every item is drawn once.
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
            # Arrays that do not fit together: the record was not made by this suite.
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
    """Return whether an item is one of those of a deviation."""
    return (
        result.case in deviation.cases
        and result.dtype in deviation.dtypes
        and result.mode in deviation.modes
        and any(
            (finding.requirement, finding.verdict, finding.cause)
            == (deviation.requirement, deviation.verdict, deviation.cause)
            for finding in result.findings
        )
    )


def _picture(result: CaseResult, arrays: Sequence[Array]) -> Picture:
    got, want, noise, blocked = (np.asarray(array, dtype=np.float64) for array in arrays)
    return picture(
        Subject(result.implementation, result.case, result.dtype, result.mode, result.device),
        got=got,
        want=want,
        noise=noise,
        blocked=blocked != 0,
        underflow=UNDERFLOW.get(result.dtype, 0.0),
    )
