"""The published pages: one table over everybody, and a page for each implementation.

Everything comes out of records, declarations of adapters too, and is escaped: no adapter is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from conformance.records.findings import MAKERS
from conformance.records.header import Implementation
from conformance.reports import wording
from conformance.reports.gate.baseline import KINDS
from conformance.reports.glance import told
from conformance.reports.model import Column, Point, Report, Trend
from conformance.reports.page import views
from conformance.reports.page.markdown import code, fenced, prose, text, vector
from conformance.reports.publishing import keep
from conformance.reports.publishing.sorting import UNSORTED, Known
from conformance.words import say

_OWN = "Written here, or for teaching"
"""Heading of what belongs to no library."""


@dataclass(frozen=True)
class Published:
    """All that the pages are made of.

    Attributes:
        report: of the published records.
        declared: what each column's adapter declared when its record was made.
        known: by column, its deviations by what they are.
        beside: the same by record and implementation, of records with other versions.
        made: how the records were made, if that was kept.
        output, pages: folders of the table and of the pages.
        root: folder that links of baselines are relative to.
    """

    report: Report
    declared: Mapping[str, Implementation]
    known: Mapping[str, Sequence[Known]]
    beside: Mapping[tuple[str, str], Sequence[Known]]
    made: keep.Made | None
    output: Path
    pages: Path
    root: Path = Path()


def render_table(published: Published) -> str:
    """The table over everybody."""
    report = published.report
    link = _links(published.output, published.root)
    return _render(
        "table.md.j2",
        report=report,
        made=published.made,
        groups=_groups(report.columns),
        glances=_few(report),
        cards={card.column: card for card in report.cards},
        dtypes=views.dtypes(report),
        reached=_reached(report),
        kinds=lambda key: _kinds(published.known.get(key, ())),
        defects=_defects(published),
        pages=link(str(published.pages.absolute())),
        root=link(".") + "/",
        script=lambda known: _link(known.reproduction, link),
        linked=lambda target: _link(target, link),
        changes=_changes,
        varying=_varying,
        most_record=keep.MOST_RECORD // 2**10,
        most_together=keep.MOST_TOGETHER // 2**20,
    )


def render_page(published: Published, column: Column) -> str:
    """The page of one implementation."""
    report = published.report
    declared = published.declared[column.key]
    link = _links(published.pages, published.root)
    cards = [card for card in report.cards if card.column == column.key]
    known = published.known.get(column.key, ())
    course = next((item for item in report.timelines if item.column == column.key), None)
    return _render(
        "page.md.j2",
        column=column,
        declared=declared,
        documentation=_address(declared.documentation, link),
        source=next(item for item in report.sources if item.name == column.record),
        about=prose(declared.about),
        example=_example(declared),
        answers=[(glance.heading, glance.take(cards[0])) for glance in told(cards)],
        deviations=known,
        all_modes=lambda item: set(item.modes) >= set(column.modes),
        accuracy=[item for item in report.accuracy if item.column == column.key],
        limit=report.limit,
        unsupported=[item for item in report.unsupported if item.column == column.key],
        course=course,
        elsewhere=_elsewhere(published, column, course),
        kinds=lambda point: _kinds(
            known
            if point.record == column.record
            else published.beside.get((point.record, column.name), ())
        ),
        varying=_varying,
        root=link(".") + "/",
        script=lambda item: _link(item.reproduction, link),
        linked=lambda target: _link(target, link),
        MAKERS=MAKERS,
    )


def render_index(published: Published) -> str:
    """The list of the pages."""
    link = _links(published.pages, published.root)
    return _render(
        "index.md.j2",
        groups=_groups(published.report.columns),
        table=link(str((published.output / "README.md").absolute())),
        kinds=lambda key: _kinds(published.known.get(key, ())),
    )


def _render(template: str, **known: Any) -> str:
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
        "vector": vector,
        "ratio": wording.ratio,
        "number": wording.number,
        "plural": wording.plural,
        "listed": wording.listed,
        "shape": wording.shape,
    }
    page = environment.get_template(template).render(views=views, words=wording, **known)
    # Rows of a table, and items of a list, stand together however the template is laid out.
    page = re.sub(r"(?<=\|)\n{2,}(?=\|)", "\n", page)
    page = re.sub(r"(?m)^(- .*)\n{2,}(?=- )", r"\1\n", page)
    return re.sub(r"\n{3,}", "\n\n", page).strip() + "\n"


def _groups(columns: Sequence[Column]) -> list[tuple[str, list[Column]]]:
    """Columns by library; what belongs to none comes last."""
    found: dict[str, list[Column]] = {}
    for column in sorted(columns, key=lambda column: _library(column) == _OWN):
        found.setdefault(_library(column), []).append(column)
    return list(found.items())


def _library(column: Column) -> str:
    packages = {name.replace("-", "_") for name in column.versions}
    titled, dot, _ = column.title.partition("(")[0].partition(".")
    for library in (titled.partition(" ")[0], column.name.partition("-")[0]):
        if library in packages:
            return library
    return titled if dot else _OWN


def _few(report: Report) -> list[Any]:
    """The columns of the table of cards that people look for first."""
    wanted = ("True in a mask", "0 and −inf", "A query that may attend nothing gets")
    return [
        glance
        for glance in told(report.cards)
        if glance.heading in wanted or glance.heading.startswith("Causal flag, fewer")
    ]


def _reached(report: Report) -> Callable[[Column, str], str]:
    measured = {(item.column, item.dtype): item for item in report.accuracy}

    def reached(column: Column, dtype: str) -> str:
        item = measured.get((column.key, dtype))
        spreads = [one for one in (item.output, item.gradients) if one] if item else []
        if not spreads:
            return "·"
        worst = max(spreads, key=lambda one: one.max_ratio / one.limit)
        if worst.max_ratio > worst.limit:
            return f"✗ {wording.ratio(worst.max_ratio)}σ"
        return wording.accuracy_class(spreads[0].worst_class)

    return reached


def _defects(published: Published) -> list[tuple[list[str], Known]]:
    """Each once, with all that have it, as its most telling entry puts it."""
    found: dict[str, list[tuple[str, Known]]] = {}
    for column in published.report.columns:
        for known in published.known.get(column.key, ()):
            if known.kind == "defect":
                found.setdefault(_one(known), []).append((column.key, known))
    return [
        (
            list(dict.fromkeys(key for key, _ in group)),
            max((known for _, known in group), key=lambda known: len(known.reason)),
        )
        for group in found.values()
    ]


def _one(known: Known) -> str:
    """The same for entries that say the same: several findings may show one defect."""
    return known.reproduction or known.reason or known.detail


def _kinds(known: Sequence[Known]) -> list[tuple[str, int]]:
    kinds = [UNSORTED, *reversed(KINDS)]
    counted = [(kind, len({_one(item) for item in known if item.kind == kind})) for kind in kinds]
    return [(kind, times) for kind, times in counted if times]


def _changes(course: Trend) -> str:
    """How much changed over all versions, in few words."""
    better = worse = other = 0
    for point in course.points:
        if point.change is not None:
            worse += sum(point.change.worse.values())
            better += sum(point.change.better.values())
            other += len(point.change.other)
    told = [(worse, "worse"), (better, "mended"), (other, "otherwise")]
    return ", ".join(f"{times:,} {word}" for times, word in told if times) or "none"


def _elsewhere(
    published: Published, column: Column, course: Trend | None
) -> list[tuple[Known, list[str]]]:
    """What deviates in other versions only, and in which."""
    here = {item.reason or item.detail for item in published.known.get(column.key, ())}
    found: dict[str, tuple[Known, list[str]]] = {}
    if course is None:
        return []
    for point in course.points:
        for item in published.beside.get((point.record, column.name), ()):
            told, versions = item.reason or item.detail, _varying(course, point)
            if told in here:
                continue
            _, known = found.setdefault(told, (item, []))
            if versions not in known:
                known.append(versions)
    return list(found.values())


def _varying(course: Trend, point: Point) -> str:
    """The versions of a point, of what is not the same in all points."""
    names = {name for one in course.points for name in one.versions}
    differ = {name for name in names if len({one.versions.get(name) for one in course.points}) > 1}
    told = [f"{name} {version}" for name, version in point.versions.items() if name in differ]
    return ", ".join(told) or point.record


def _example(declared: Implementation) -> Markup | None:
    if not declared.example:
        return None
    return Markup(fenced(declared.example).replace("sh\n", "python\n", 1))


def _links(folder: Path, root: Path) -> Callable[[str], str]:
    """Of a path from the root, the way there from a folder."""

    def link(target: str) -> str:
        return PurePath(os.path.relpath(root / target, folder)).as_posix()

    return link


def _address(target: str, link: Callable[[str], str]) -> str:
    """Of a library's documentation; as it is, if nothing in it could end a link."""
    if not target or (":" in target and not target.startswith(("https://", "http://"))):
        return ""
    address = target if ":" in target else link(target)
    return Markup(address) if re.fullmatch(r"[\w:/.#%?=&+~-]+", address) else address


def _link(target: str, link: Callable[[str], str]) -> Markup:
    """A link of a baseline as Markdown; "" where there is none."""
    if not target:
        return Markup("")
    if target.startswith("https://"):
        shown = re.sub(r"^https://(www\.)?github\.com/", "", target).removeprefix("https://")
        return Markup(f"[{text(shown)}]({target})")
    path, _, anchor = target.partition("#")
    shown = f"§ {anchor.replace('-', ' ')}" if anchor else path
    return Markup(f"[{text(shown)}]({link(target)})")
