"""The report in GitHub's Markdown.

No text of a record can break out of a table or a paragraph: special characters of inserted values
are escaped as character references, which GitHub displays but does not interpret as Markdown.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from markupsafe import Markup

from conformance.records.findings import MAKERS, VERDICTS
from conformance.reports import wording
from conformance.reports.cards import glances_of
from conformance.reports.model import Counts, Report
from conformance.reports.page import environment, views

_SPECIAL = re.compile(r"[\\`*\[\]<>|&@#~$]|\b_|_\b")
_HARMLESS = re.compile(r"[\w .,:;=/()·+\[\]-]+")


def render(template: Path, **values: Any) -> str:
    """Render a Markdown template, escaping every value except those of type `Markup`."""
    made = environment(template.parent, finalize=text)
    made.filters |= {"code": code, "fenced": fenced, "vector": vector}
    page = made.get_template(template.name).render(
        views=views, MAKERS=MAKERS, VERDICTS=VERDICTS, **values
    )
    return re.sub(r"\n{3,}", "\n\n", page).strip() + "\n"


def render_markdown(report: Report) -> str:
    """Return the report as a Markdown page."""
    return render(
        Path(__file__).with_name("report.md.j2"),
        report=report,
        cards=views.cards(report),
        glances=glances_of(report.cards),
        measured={(item.column, item.dtype): item for item in report.accuracy},
        rows={row.requirement: row for row in report.matrix},
    )


def text(value: object) -> Markup:
    """Return a value as one line of escaped text; `Markup` is returned unchanged."""
    if isinstance(value, Markup):
        return value
    line = " ".join(str(value).split())
    return Markup(_SPECIAL.sub(lambda match: f"&#{ord(match[0])};", line))


def code(value: str) -> Markup:
    """Return a text as inline code, in a form that is valid inside a table too."""
    if _HARMLESS.fullmatch(value) and value.strip() == value:
        return Markup(f"`{value}`")
    return Markup(f"<code>{text(value)}</code>")


_SYNTAX = re.compile(r"[`<&|]|\](?=[(\[:])|^\s*#", re.MULTILINE)
"""Matches what begins code, HTML, a reference, a table or a heading, or makes brackets a link."""


def prose(value: str) -> Markup:
    """Escape all Markdown in a text except paragraphs, lists, inline code and emphasis."""
    parts = re.split(r"(`[^`]+`)", value)
    for place, part in enumerate(parts):
        # A blank line would end inline code before its second backtick.
        if place % 2 == 0 or "\n\n" in part:
            parts[place] = _SYNTAX.sub(_reference, part)
    return Markup("".join(parts))


def _reference(match: re.Match[str]) -> str:
    return match[0][:-1] + f"&#{ord(match[0][-1])};"


def fenced(value: str, language: str = "sh") -> Markup:
    """Return a fenced code block; the fence is longer than any run of backticks in the code."""
    longest = max((len(run) for run in re.findall(r"`+", value)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}{language}\n{value}\n{fence}")


def vector(counts: Counts) -> Markup:
    """Return the count of each verdict for a table cell, the worst verdict first; "·" for none."""
    numbers = (
        f"{wording.SYMBOLS[verdict]}&nbsp;{times:,}"
        for verdict, times in wording.worst_first(counts)
    )
    return Markup("<br>".join(numbers) or "·")
