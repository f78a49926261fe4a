"""The report as one HTML page: no network, everything escaped, readable without script or colour.

The page itself has the summary, the matrix and the deviations; every single finding lies in it as
data, and is shown when somebody asks for it. Style and script are inlined, and a content security
policy allows those two and nothing else, so that a name in a record cannot become code even if
escaping failed.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from conformance.records.findings import MAKERS, NOT_VERIFIED, VERDICTS
from conformance.reports import wording
from conformance.reports.figures.heatmap import pattern
from conformance.reports.glance import told
from conformance.reports.model import Loaded, Report
from conformance.reports.page import plot, views
from conformance.reports.page.cards import cards, polarity
from conformance.reports.page.contents import contents, embedded
from conformance.reports.page.figures import Figure
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


def render_html(
    report: Report,
    figures: Mapping[str, Figure] | None = None,
    records: Sequence[Loaded] = (),
) -> str:
    """The page.

    Args:
        report: what is shown as it is.
        figures: drawings of deviations, by their ids.
        records: what the script shows when somebody looks closer.
    """
    style = "".join(map(_own, STYLES))
    script = _script()
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            style=style,
            script=script,
            contents=embedded(contents(report, records)),
            policy=_policy(style, script),
            cards=cards(report),
            polarity=polarity,
            evidence=views.evidence(report),
            figures=figures or {},
            glances=told(report.cards),
            pattern=pattern,
            measured={(item.column, item.dtype): item for item in report.accuracy},
            rows={row.requirement: row for row in report.matrix},
            index_of={row.requirement: index for index, row in enumerate(report.matrix)},
            place={column.key: index for index, column in enumerate(report.columns)},
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(PAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "views": views,
        "plot": plot,
        "words": wording,
        "MAKERS": MAKERS,
        "MOST_CHANGES": views.MOST_CHANGES,
        "VERDICTS": VERDICTS,
        "NOT_VERIFIED": NOT_VERIFIED,
    }
    environment.filters |= {
        "say": say,
        "ratio": wording.ratio,
        "number": wording.number,
        "plural": wording.plural,
        "listed": wording.listed,
        "shape": wording.shape,
        "parts": wording.parts,
    }
    return environment


def _own(name: str) -> str:
    """One of the files that the page is made of."""
    return (PAGE / name).read_text(encoding="utf-8")


def _script() -> str:
    """All of the script as one block, in which nothing is global."""
    parts = "\n".join(_own(f"script/{name}.js") for name in SCRIPTS)
    return f'"use strict";\n(async () => {{\n{parts}\n}})();\n'


def _policy(style: str, script: str) -> str:
    """Nothing is fetched, and only what is inlined here runs."""
    return (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
