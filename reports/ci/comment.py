"""A comment for a pull request: new, fixed and lost findings between two records."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from conformance.errors import ConformanceError
from conformance.reports.changes import Change, Changes
from conformance.reports.page.markdown import code, render
from conformance.reports.tables import by_key
from conformance.text import plural, some

MARKER = Markup("<!-- mha-conformance -->")
"""The first line of the comment, by which a build recognises its earlier comment to replace it."""

MOST = 15
"""The most rows of a table: GitHub rejects comments of more than 65,536 characters."""

FEW = 4
"""The most requirements that a row names."""


def comment(changes: Changes, page: str = "") -> str:
    """Return the comment in Markdown.

    Args:
        changes: the changes to show.
        page: the address of the HTML report, to which findings are linked; "" for no links.

    Raises:
        ConformanceError: if the address is not that of a web page, or could break out of a link.
    """
    if page and not re.fullmatch(r"https?://[\w:/.?=&+~%-]+", page):
        raise ConformanceError(f"--page {page}: give the address of the report, https://...")
    new = [*changes.worse, *changes.added.wrong]
    times = [sum(one.times for one in alike) for alike in (new, changes.fixed, changes.lost)]
    counted = [
        plural(number, *words)
        for number, words in zip(
            times,
            (
                ("new deviation",),
                ("finding fixed", "findings fixed"),
                ("finding no longer answered", "findings no longer answered"),
            ),
            strict=True,
        )
        if number
    ]
    removed = changes.removed.lines
    return render(
        Path(__file__).with_name("comment.md.j2"),
        marker=MARKER,
        heading=", ".join(counted) or ("less was asked" if removed else "nothing new"),
        changes=changes,
        tables=[
            ("New", _rows(new, page)),
            ("No longer answered", _rows(changes.lost, page)),
            ("Fixed", _rows(changes.fixed, page)),
        ],
        removed=removed,
        page=Markup(page),
        MOST=MOST,
    )


@dataclass(frozen=True)
class _Row:
    """Changes of an implementation with one cause, or with one requirement without a cause."""

    implementation: str
    before: str
    after: str
    cause: str
    requirements: Markup
    times: int


def _rows(changes: Sequence[Change], page: str) -> list[_Row]:
    """Return a row for the changes of each cause, and for each requirement without a cause."""

    def alike(change: Change) -> tuple[str, ...]:
        same = (change.implementation, change.before, change.after, change.cause)
        return same if change.cause else (*same, change.requirement, change.device)

    return [
        _Row(
            one.implementation,
            one.before,
            one.after,
            one.cause,
            Markup(some(list(dict.fromkeys(_linked(change, page) for change in group)), FEW)),
            sum(change.times for change in group),
        )
        for group in by_key(changes, alike).values()
        for one in group[:1]
    ]


def _linked(change: Change, page: str) -> Markup:
    """Return the requirement, with a link to the worst finding in the report."""
    shown = code(change.requirement)
    if not page:
        return shown
    words = {
        "of": change.implementation,
        "requirement": change.requirement,
        "case": change.case,
        "in": change.dtype,
        "mode": change.mode,
    }
    address = "&".join(f"{name}={quote(word, safe='/')}" for name, word in words.items())
    return Markup(f"[{shown}]({page}#{address})")
