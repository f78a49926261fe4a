"""The report as one HTML page: no network, everything escaped, readable without script or colour.

Style and script are inlined, and a content security policy allows those two and nothing else, so
that a name in a record cannot become code even if escaping failed.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from conformance.card import TOPICS
from conformance.findings import NOT_VERIFIED, VERDICTS
from conformance.report import plot, views, wording
from conformance.report.cards import cards, polarity
from conformance.report.figures import Figure
from conformance.report.glance import glances
from conformance.report.model import Card, Report
from conformance.report.pattern import pattern

HERE = Path(__file__).parent


def render_html(
    report: Report, figures: Mapping[str, Figure] | None = None, folder: str = "cards"
) -> str:
    """The page; `figures` are those of deviations, by id; `folder` is where the cards are."""
    style, script = (_own(name) for name in ("style.css", "script.js"))
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            style=style,
            script=script,
            policy=_policy(style, script),
            cards=cards(report),
            polarity=polarity,
            evidence=views.evidence(report),
            figures=figures or {},
            glances=glances(),
            pattern=pattern,
            folder=folder,
            measured={(item.column, item.dtype): item for item in report.accuracy},
            rows={row.requirement: row for row in report.matrix},
            place={column.key: index for index, column in enumerate(report.columns)},
        )
    )


def render_card(report: Report, card: Card, report_file: str) -> str:
    """The page of one convention card; `report_file` is the name of the report's page."""
    style = _own("style.css")
    return (
        _environment()
        .get_template("card.html.j2")
        .render(
            report=report,
            card=card,
            column=report.column(card.column),
            topics={topic.name: topic for topic in TOPICS},
            style=style,
            policy=_policy(style, ""),
            report_file=report_file,
            place={},
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "views": views,
        "plot": plot,
        "words": wording,
        "VERDICTS": VERDICTS,
        "NOT_VERIFIED": NOT_VERIFIED,
    }
    environment.filters |= {
        "ratio": wording.ratio,
        "number": wording.number,
        "plural": wording.plural,
        "listed": wording.listed,
        "shape": wording.shape,
        "parts": wording.parts,
    }
    return environment


def _own(name: str) -> str:
    """One of the files beside this module."""
    return (HERE / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Nothing is fetched, and only what is inlined here runs."""
    return (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
