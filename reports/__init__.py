"""The report: joins records into one document, and renders it as JSON, Markdown and HTML.

It sees records only, so it can be rendered years later without any framework. The data flows
through small modules: `load` reads records and refuses what does not belong; `build` makes a
`Report` (see `model`) out of `columns`, `matrix`, `conventions`, `accuracy`, `pairwise`, `trend`,
`deviations` and `unanswered`; `figures` draws the attention weights that records have; `html` and
`markdown` render it all, with `cards` and `views` deciding what is said once, and `wording` how.

The page is made of the templates, styles and scripts in `page`. It can be read without its script;
with it, every finding can be reached: `contents` puts them into the page.
"""

from __future__ import annotations

from conformance.reports.joining import build
from conformance.reports.load import Read, find_records, load, load_records
from conformance.reports.model import SCHEMA, Loaded, Report
from conformance.reports.page.html import render_html
from conformance.reports.page.markdown import render_markdown
from conformance.reports.writing import outcome, write

__all__ = [
    "SCHEMA",
    "Loaded",
    "Read",
    "Report",
    "build",
    "find_records",
    "load",
    "load_records",
    "outcome",
    "render_html",
    "render_markdown",
    "write",
]
