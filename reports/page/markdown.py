"""The report in GitHub's Markdown.

What a record says can break out of neither a table nor a paragraph: every value is escaped as it is
put in, as character references, which GitHub shows as they are meant and reads as nothing else.
"""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from conformance.records.findings import MAKERS, VERDICTS
from conformance.reports import wording
from conformance.reports.glance import told
from conformance.reports.model import Counts, Report
from conformance.reports.page import views
from conformance.reports.page.cards import cards
from conformance.words import say

_SPECIAL = re.compile(r"[\\`*\[\]<>|&@#~$]|\b_|_\b")
_HARMLESS = re.compile(r"[\w .,:;=/()·+\[\]-]+")


def render_markdown(report: Report) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=text,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "say": say,
        "code": code,
        "fenced": fenced,
        "vector": vector,
        "ratio": wording.ratio,
        "number": wording.number,
        "plural": wording.plural,
        "listed": wording.listed,
        "shape": wording.shape,
    }
    page = environment.get_template("report.md.j2").render(
        report=report,
        views=views,
        words=wording,
        cards=cards(report),
        glances=told(report.cards),
        MAKERS=MAKERS,
        VERDICTS=VERDICTS,
        measured={(item.column, item.dtype): item for item in report.accuracy},
        rows={row.requirement: row for row in report.matrix},
    )
    return re.sub(r"\n{3,}", "\n\n", page).strip() + "\n"


def text(value: object) -> Markup:
    """Any value as text in one line; what is Markdown already stays so."""
    if isinstance(value, Markup):
        return value
    line = " ".join(str(value).split())
    return Markup(_SPECIAL.sub(lambda found: f"&#{ord(found[0])};", line))


def code(value: str) -> Markup:
    """Inline code, in a table too."""
    if _HARMLESS.fullmatch(value) and value.strip() == value:
        return Markup(f"`{value}`")
    return Markup(f"<code>{text(value)}</code>")


_SYNTAX = re.compile(r"[`<&|]|\](?=[(\[:])|^\s*#", re.MULTILINE)
"""What begins code, HTML, a reference, a table or a heading, or makes a link of brackets."""


def prose(value: str) -> Markup:
    """Paragraphs and lists with inline code and emphasis; nothing else in it is Markdown."""
    parts = re.split(r"(`[^`]+`)", value)
    for place, part in enumerate(parts):
        # A blank line would end inline code before its second backtick.
        if place % 2 == 0 or "\n\n" in part:
            parts[place] = _SYNTAX.sub(_reference, part)
    return Markup("".join(parts))


def _reference(found: re.Match[str]) -> str:
    return found[0][:-1] + f"&#{ord(found[0][-1])};"


def fenced(value: str) -> Markup:
    """A block of code; the fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall(r"`+", value)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}sh\n{value}\n{fence}")


def vector(counts: Counts) -> Markup:
    """A count vector for a cell, the gravest first."""
    told = (
        f"{wording.SYMBOLS[verdict]}&nbsp;{times:,}"
        for verdict, times in wording.gravest_first(counts)
    )
    return Markup("<br>".join(told) or "·")
