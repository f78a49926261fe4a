"""The report in GitHub's Markdown.

What a record says can break out of neither a table nor a paragraph: every value is escaped as it is
put in, as character references, which GitHub shows as they are meant and reads as nothing else.
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
    """Render a template of Markdown, in which every value is escaped."""
    made = environment(template.parent, finalize=text)
    made.filters |= {"code": code, "fenced": fenced, "vector": vector}
    page = made.get_template(template.name).render(
        views=views, MAKERS=MAKERS, VERDICTS=VERDICTS, **values
    )
    return re.sub(r"\n{3,}", "\n\n", page).strip() + "\n"


def render_markdown(report: Report) -> str:
    """Return the page."""
    return render(
        Path(__file__).with_name("report.md.j2"),
        report=report,
        cards=views.cards(report),
        glances=glances_of(report.cards),
        measured={(item.column, item.dtype): item for item in report.accuracy},
        rows={row.requirement: row for row in report.matrix},
    )


def text(value: object) -> Markup:
    """Escape any value as text in one line; what is Markdown already stays so."""
    if isinstance(value, Markup):
        return value
    line = " ".join(str(value).split())
    return Markup(_SPECIAL.sub(lambda match: f"&#{ord(match[0])};", line))


def code(value: str) -> Markup:
    """Return inline code, which is also valid in a table."""
    if _HARMLESS.fullmatch(value) and value.strip() == value:
        return Markup(f"`{value}`")
    return Markup(f"<code>{text(value)}</code>")


_SYNTAX = re.compile(r"[`<&|]|\](?=[(\[:])|^\s*#", re.MULTILINE)
"""What begins code, HTML, a reference, a table or a heading, or makes a link of brackets."""


def prose(value: str) -> Markup:
    """Keep paragraphs, lists, inline code and emphasis; escape everything else of Markdown."""
    parts = re.split(r"(`[^`]+`)", value)
    for place, part in enumerate(parts):
        # A blank line would end inline code before its second backtick.
        if place % 2 == 0 or "\n\n" in part:
            parts[place] = _SYNTAX.sub(_reference, part)
    return Markup("".join(parts))


def _reference(match: re.Match[str]) -> str:
    return match[0][:-1] + f"&#{ord(match[0][-1])};"


def fenced(value: str, language: str = "sh") -> Markup:
    """Return a block of code; the fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall(r"`+", value)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}{language}\n{value}\n{fence}")


def vector(counts: Counts) -> Markup:
    """Return a count vector for a cell, the worst verdict first."""
    numbers = (
        f"{wording.SYMBOLS[verdict]}&nbsp;{times:,}"
        for verdict, times in wording.worst_first(counts)
    )
    return Markup("<br>".join(numbers) or "·")
