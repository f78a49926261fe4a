"""The report: joins records into one document, and renders it as JSON, Markdown and HTML.

It is made from records only, so it can be rendered years later without any framework. `load` reads
records and rejects those that do not belong together; `writing.build` assembles a `Report` (see
`model`) with the help of `columns`, `totals`, `cards`, `accuracy`, `deviations` and `trend`; `page`
renders it. `wording` holds the words that all pages share.
"""

from __future__ import annotations

from conformance.reports.load import Read, find_records, load
from conformance.reports.model import SCHEMA, Loaded, Report
from conformance.reports.page.html import render_html
from conformance.reports.page.markdown import render_markdown
from conformance.reports.writing import build, outcome, write

__all__ = [
    "SCHEMA",
    "Loaded",
    "Read",
    "Report",
    "build",
    "find_records",
    "load",
    "outcome",
    "render_html",
    "render_markdown",
    "write",
]
