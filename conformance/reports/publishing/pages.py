"""The published pages: one table of all implementations, and a page for each.

Everything, including the declarations of adapters, is taken from records and escaped; no adapter is
loaded. Every deviation is matched with the baseline entry that covers it, and sorted by its kind.
Baseline entries about level "large" or checks of long sequences name such cases in their `case`,
for example `*.d64t64x64` or `long/causal/*`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path, PurePath
from typing import Any

import msgspec
from markupsafe import Markup

from conformance.records.findings import NOTHING, VERIFIED, Phrase, without_place
from conformance.records.header import Implementation, Provenance
from conformance.records.long import Climb, Reach, as_record, reaches
from conformance.records.record import Exploration
from conformance.reports import wording
from conformance.reports.cards import FAMILIES, ShownValue, glances_of
from conformance.reports.gate.baseline import Baseline, BaselineEntry
from conformance.reports.gate.judging import Claims, knower
from conformance.reports.model import Accuracy, Column, Loaded, Point, Report, Trend
from conformance.reports.page.markdown import fenced, prose, render, text
from conformance.reports.page.views import SEVERITY
from conformance.reports.tables import (
    Group,
    Located,
    RecordPart,
    by_key,
    finding_counts,
    grouped,
    located,
    parts_of,
)
from conformance.text import short

LARGE, LONG = "large", "long"
"""The folders of records of level "large" and of checks of long sequences."""

EXPLORED = "explored"
"""The folder, beside that of the records, of results on random problems outside the catalogue."""

PLOT = "long.svg"
"""The figure of error against length."""

MOST_RECORD = 512 * 2**10
MOST_TOGETHER = 16 * 2**20
"""The maximum sizes in bytes, in the repository, of one record and of all records in a folder."""

FAMILIES_IN_TABLES = tuple(
    tuple(family.name for family in FAMILIES if family.keys == keys) for keys in (True, False)
)
"""The features in each of two tables: those that determine which keys a query sees and where they
are stored, and those that change the logits or their softmax."""

_OWN = "Written here, or for teaching"
"""The heading of implementations that belong to no library."""

# Deviations by kind


@dataclass(frozen=True)
class Known:
    """One deviation of one implementation: the findings that one baseline entry covers.

    Attributes:
        entry: the baseline entry, or None for the findings that no entry covers.
        group: the findings.
    """

    entry: BaselineEntry | None
    group: Group

    def most_frequent(self, place: str) -> list[str]:
        """Return the requirements, cases or other properties of its findings, most frequent first.

        `place` names the property: "requirement", or a field of a result such as "case".
        """
        counts = Counter(one.part(place) for one in self.group.members)
        return [name for name, _ in counts.most_common()]

    @property
    def cause(self) -> Phrase:
        """The most frequent cause of its findings; `NOTHING` if fewer than half of them have it."""
        causes = Counter(one.finding.cause for one in self.group.members if one.finding.cause)
        ((cause, times),) = causes.most_common(1) or [(NOTHING, 0)]
        return cause if 2 * times >= len(self.group.members) else NOTHING

    @property
    def made_by(self) -> str:
        """The part that deviates, "kernel" or "projections"; "" if it is unknown, or is both."""
        makers = {one.finding.made_by for one in self.group.members} - {""}
        return makers.pop() if len(makers) == 1 else ""

    @property
    def kind(self) -> str:
        """The kind of the deviation, such as "defect": one of `SEVERITY`."""
        return _kind(self.entry)

    @property
    def reason(self) -> str:
        """The reason why the deviation is known, or ""."""
        return self.entry.reason.strip() if self.entry else ""

    @property
    def text(self) -> str:
        """The reason why the deviation is known, or else the message of its worst finding."""
        return self.reason or self.group.worst.finding.detail

    @property
    def raised(self) -> str:
        """The most frequent error of its findings; "" if there is none, or if it is the text."""
        # Keras prints in bold, and a record keeps no escape.
        told = Counter(
            re.sub(r"\[\d+(;\d+)*m", "", without_place(one.finding.detail))
            for one in self.group.members
            if one.finding.verdict == "error" and one.finding.detail
        )
        ((most, _),) = told.most_common(1) or [("", 0)]
        return most if self.reason else ""

    @property
    def heading(self) -> str:
        """The first sentence of the text, as a heading."""
        sentence = re.split(r"(?<=[^.])[.:;] ", self.text, maxsplit=1)[0]
        return short(sentence.rstrip("."), 100)

    @property
    def when(self) -> str:
        """The condition of the baseline entry, or ""."""
        return self.entry.condition.text if self.entry and self.entry.condition else ""

    @property
    def identity(self) -> str:
        """A key that is equal for deviations that have the same underlying defect."""
        return (self.entry.reproduction if self.entry else "") or self.text

    @property
    def places(self) -> set[tuple[str, str, str, str]]:
        """The case, dtype, mode and requirement of each of its findings."""
        return {
            (one.result.case, one.result.dtype, one.result.mode, one.requirement)
            for one in self.group.members
        }


def _kind(entry: BaselineEntry | None) -> str:
    return (entry.kind if entry else "") or wording.UNSORTED


def sort(records: Sequence[Loaded], baseline: Baseline) -> list[tuple[RecordPart, list[Known]]]:
    """Return the deviations of each part: the worst kind first, then those with most findings."""
    known = []
    for part in parts_of(records):
        knows_of = knower(baseline, part.record)
        entries = {one: knows_of(one) for one in located(part.results) if one.wrong}
        groups = grouped(entries, entries.__getitem__)
        deviations = [Known(entries[group.worst], group) for group in groups]
        deviations.sort(key=lambda one: (SEVERITY.index(one.kind), -len(one.group)))
        known.append((part, deviations))
    return known


# The sizes of kernels


def large_of(part: RecordPart, baseline: Baseline) -> list[str]:
    """Return a line about each dtype with the results of level "large"; "" if nothing was judged.

    If nothing is wrong, the line has the number of findings that conform. Otherwise, it has the
    numbers of wrong and of judged findings, the largest error and the kinds of deviations.
    """
    claims, lines = Claims(baseline, part.record), []
    for dtype, results in by_key(part.results, lambda result: result.dtype).items():
        good = finding_counts(results).get("conforms", 0)
        wrong = [one for one in located(results) if one.wrong]
        if wrong:
            ratios = [one.finding.figures.max_ratio for one in wrong if one.finding.figures]
            worst = f", {wording.ratio(max(ratios))}σ" if any(ratios) else ""
            kinds = ", ".join(_kinds_of(wrong, claims))
            lines.append(f"{dtype} ✗ {len(wrong):,} of {good + len(wrong):,}{worst}: {kinds}")
        else:
            lines.append(f"{dtype} ✓ {good:,}" if good else "")
    return lines


def _kinds_of(wrong: Iterable[Located], claims: Claims) -> list[str]:
    return list(dict.fromkeys(_kind(claims.knows(one.result, one.finding)) for one in wrong))


@dataclass(frozen=True)
class Length:
    """The length up to which an implementation conforms in one dtype, and the first deviation.

    Attributes:
        reach: the measured lengths.
        kind: the kinds of the first deviation's findings, as text; "" if there is no deviation.
        cost: microseconds per token for the slowest problem that conforms at the length
            `reach.most`: of the implementation, and of the suite's own computation; None if there
            is no such problem.
    """

    reach: Reach
    kind: str
    cost: tuple[float, float] | None

    @property
    def worst(self) -> str:
        """The size of the first deviation in σ, or a description if it has no size.

        The text is "" if there is no deviation.
        """
        first = self.reach.first
        if first is None:
            return ""
        if first.worst is None:
            return "an error" if first.verdict == "error" else "another value"
        return f"{wording.ratio(first.worst.largest)}σ"

    @property
    def text(self) -> str:
        """The results as a line for the table; "" if nothing was compared."""
        reach = self.reach
        if not reach.compared:
            return ""
        told = f"{reach.most:,}" if reach.most else "–"
        if not reach.most and reach.beside:
            told = f"64 × {reach.beside:,}"
        if reach.first is not None:
            told += f", ✗ {reach.first.length:,} ({self.worst}, {self.kind})"
        return f"{reach.dtype} {told}"

    @property
    def missing(self) -> list[str]:
        """The reasons why problems were not reached or not supported, each reason once.

        Each is followed by the names of the problems, by the least length of each.
        """
        every = sorted([*self.reach.missing, *self.reach.refused], key=lambda step: step.length)
        told = []
        for reason, steps in by_key(every, lambda step: _reason(step.why)).items():
            least = {step.problem: step.length for step in reversed(steps)}
            problems = by_key(dict.fromkeys(step.problem for step in steps), least.__getitem__)
            parts = (f"{', '.join(some)} from {length:,}" for length, some in problems.items())
            told.append(f"{reason} ({'; '.join(parts)})")
        return told


_REASONS = {"takes": "the time", "needs": "the memory", "a mask of": "a mask as an array"}


def _reason(why: str) -> str:
    """Return a reason without its numbers, so that it is the same for all lengths."""
    return next((said for begin, said in _REASONS.items() if why.startswith(begin)), why)


def lengths_of(climb: Climb, baseline: Baseline) -> list[Length]:
    """Return the lengths up to which an implementation conforms, for each dtype."""
    record = as_record(climb)
    claims = Claims(baseline, record)
    results = {(one.case, one.dtype, one.mode): one for one in record.results}
    found = []
    for reach in reaches(climb.steps):
        kind = ""
        if reach.first is not None:
            result = results[reach.first.case, reach.dtype, reach.first.mode]
            kind = ", ".join(_kinds_of((one for one in located([result]) if one.wrong), claims))
        whole = [
            step
            for step in climb.steps
            if (step.dtype, step.queries, step.keys) == (reach.dtype, reach.most, reach.most)
            and step.verdict == "conforms"
        ]
        cost = None
        if whole:
            dearest = max(whole, key=lambda step: step.called)
            cost = (1e6 * dearest.called / reach.most, 1e6 * dearest.own / reach.most)
        found.append(Length(reach, kind, cost))
    return found


# Pages


class Made(msgspec.Struct, frozen=True):
    """How the records were made, so that the pages can be rendered again.

    Attributes:
        cores: the number of logical processors.
        memory: the size of the memory in GiB.
        minutes: the time from the start of the run to its publication; 0 if it was not measured.
        expected: names of records that were required.
        problems: lines about records that could not be used.
    """

    cores: int
    memory: int
    minutes: int
    expected: list[str]
    problems: list[str]


@dataclass(frozen=True)
class Published:
    """The data that the pages are made from.

    Attributes:
        report: the report of the published records.
        declared: by column, what the adapter declared when the record was made.
        explored: by implementation, what was found by random problems outside the catalogue.
        known: by column, the deviations.
        beside: by record and implementation, the deviations in records with other versions.
        large: by implementation, a line for each dtype with the results of level "large".
        lengths: by implementation, the results of checks of long sequences in each dtype.
        sizes: by implementation, the deviations in the results of `large` and `lengths`.
        climbs: by implementation, the checks of long sequences.
        versions: the records with other versions.
        origins: by implementation, its record: of the catalogue's cases, or else of its sizes.
        gpu: what was measured on a GPU, with everything of its own; None if nothing was.
        made: how the records were made, if that was stored.
        output, pages: folders of the table and of the pages.
        root: folder that links of baselines are relative to.
    """

    report: Report
    declared: Mapping[str, Implementation]
    explored: Mapping[str, Exploration]
    known: Mapping[str, Sequence[Known]]
    beside: Mapping[tuple[str, str], Sequence[Known]]
    large: Mapping[str, Sequence[str]]
    lengths: Mapping[str, Sequence[Length]]
    sizes: Mapping[str, Sequence[Known]]
    climbs: Mapping[str, Climb]
    made: Made | None
    output: Path
    pages: Path
    root: Path = Path()
    versions: Sequence[Loaded] = ()
    origins: Mapping[str, RecordPart] = field(default_factory=dict)
    gpu: Published | None = None

    @property
    def columns(self) -> list[Column]:
        """The columns of the report, and after them those that were measured on a GPU only."""
        names = {column.name for column in self.report.columns}
        others = self.gpu.report.columns if self.gpu else ()
        return [*self.report.columns, *(one for one in others if one.name not in names)]

    def holding(self, column: Column) -> Published:
        """Return `gpu` for a column that was measured on a GPU only, or else this object."""
        return self if self.gpu is None or column in self.report.columns else self.gpu

    def on_gpu(self, name: str) -> OnGpu | None:
        """Return what was measured of an implementation on a GPU; None if nothing was."""
        if self.gpu is None or name not in self.gpu.origins:
            return None
        columns = (column for column in self.gpu.report.columns if column.name == name)
        return OnGpu(self.gpu, name, next(columns, None))

    def course(self, column: Column) -> Trend | None:
        """Return how a column changed over versions; None if there are no other versions."""
        return next((one for one in self.report.timelines if one.column == column.key), None)

    def known_at(self, column: Column, point: Point) -> Sequence[Known]:
        """Return the deviations of a column in the record of one point of its `course`."""
        if point.record == column.record:
            return self.known.get(column.key, ())
        return self.beside.get((point.record, column.name), ())


@dataclass(frozen=True)
class OnGpu:
    """What was measured of one implementation on a GPU.

    Attributes:
        all: what was measured of all implementations.
        name: the name of the implementation.
        column: its column; None if only its sizes were measured.
    """

    all: Published
    name: str
    column: Column | None

    @property
    def key(self) -> str:
        """The key of its column, or else its name."""
        return self.column.key if self.column else self.name

    @property
    def declared(self) -> Implementation:
        """What its adapter declared on the GPU."""
        return self.all.origins[self.name].implementation

    @property
    def provenance(self) -> Provenance:
        """Where and how it was measured."""
        return self.all.origins[self.name].record.header.provenance

    @property
    def device(self) -> str:
        """The GPU with the versions of its driver, of CUDA and of cuDNN, as far as known."""
        return device_of(self.declared, self.provenance)

    @property
    def known(self) -> Sequence[Known]:
        """Its deviations, apart from those at the sizes of kernels."""
        return self.all.known.get(self.key, ())

    def lacks(self, known: Known) -> bool:
        """Return whether a deviation on the CPU is absent here: what was asked of it conforms."""
        verdicts = {
            finding.verdict
            for result in self.all.origins[self.name].results
            for finding in result.findings
            if (result.case, result.dtype, result.mode, finding.requirement) in known.places
        }
        return verdicts == {"conforms"}

    @property
    def sizes(self) -> Sequence[Known]:
        """Its deviations at the sizes of kernels."""
        return self.all.sizes.get(self.name, ())

    @property
    def large(self) -> Sequence[str]:
        """A line for each dtype with the results of level "large"."""
        return self.all.large.get(self.name, ())

    @property
    def lengths(self) -> Sequence[Length]:
        """The results of checks of long sequences in each dtype."""
        return self.all.lengths.get(self.name, ())

    @property
    def climb(self) -> Climb | None:
        """The checks of long sequences; None if there are none."""
        return self.all.climbs.get(self.name)

    @property
    def answers(self) -> dict[str, list[ShownValue]]:
        """What experiments observed, by question."""
        return _answers(self.all.report, self.key)

    @property
    def accuracy(self) -> list[Accuracy]:
        """How accurate it is, by dtype."""
        return [item for item in self.all.report.accuracy if item.column == self.key]

    @property
    def lines(self) -> list[str]:
        """A summary, as lines of a table cell."""
        if self.declared.unavailable:
            return [f"unavailable: {self.declared.unavailable}"]
        lines = []
        if self.column:
            standing = self.column.standing
            reached = accuracy_of(self.all.report, self.column)
            lines += [f"{dtype} {worst}" for dtype, worst in reached.items()]
            lines += [
                f"{times} × {kind}" if times > 1 else kind for kind, times in _kinds(self.known)
            ]
            if not self.known:
                lines.append("✓ nothing" if standing == "conforms" else standing)
        sizes = {LARGE: self.large, LONG: [one.text for one in self.lengths]}
        lines += [f"{size}: {line}" for size, own in sizes.items() for line in own if line]
        return lines


def _answers(report: Report, column: str) -> dict[str, list[ShownValue]]:
    """Return what experiments observed of a column, by question."""
    cards = [card for card in report.cards if card.column == column]
    return {glance.heading: glance.take(cards[0]) for glance in glances_of(cards)}


def device_of(declared: Implementation, provenance: Provenance) -> str:
    """Return the model of the device, with the versions of its driver and of its toolkit."""
    if provenance.device == "cpu":
        return provenance.device
    versions = {"driver": provenance.driver, **declared.toolkit}
    texts = (f"{name} {version}" for name, version in versions.items() if version)
    return ", ".join([provenance.device_model, *texts])


def render_table(published: Published) -> str:
    """Return the page with the table of all implementations."""
    report = published.report
    link = _links(published.output, published.root)
    return _render(
        "table.md.j2",
        report=report,
        made=published.made,
        gpu=published.gpu,
        on_gpu=published.on_gpu,
        gpus=_gpus(published),
        groups=_groups(published.columns),
        glances=_few(report),
        cards={card.column: card for card in report.cards},
        dtypes=list(dict.fromkeys(item.dtype for item in report.accuracy)),
        families=FAMILIES_IN_TABLES,
        features={(item.column, item.feature): item for item in report.features},
        reached=_reached(report),
        large=published.large,
        lengths={name: [one.text for one in own] for name, own in published.lengths.items()},
        plot=PLOT if published.climbs else "",
        seconds=_seconds(published.climbs.values()),
        kinds=lambda key: _kinds(published.known.get(key, ())),
        defects=_defects(published),
        pages=link(str(published.pages.absolute())),
        root=link(".") + "/",
        linked=lambda target: _link(target, link),
        changes=_changes,
        varying=varying,
        most_record=MOST_RECORD // 2**10,
        most_together=MOST_TOGETHER // 2**20,
    )


def _seconds(climbs: Iterable[Climb]) -> str:
    """Return the limits on the time of checks of long sequences; "" if there are none."""
    limits = sorted({round(climb.seconds) for climb in climbs if climb.seconds})
    return " to ".join(f"{limit}" for limit in dict.fromkeys((*limits[:1], *limits[-1:])))


def _gpus(published: Published) -> list[str]:
    """Return the GPUs on which anything was measured, each with its driver and the dates."""
    if published.gpu is None:
        return []
    made = [part.record.header.provenance for part in published.gpu.origins.values()]
    dates = by_key(made, lambda one: (one.device_model, one.driver))
    return [
        f"{model}{f', driver {driver}' if driver else ''} "
        f"({', '.join(sorted({wording.date(one.created) for one in own}))})"
        for (model, driver), own in dates.items()
    ]


def render_page(published: Published, column: Column) -> str:
    """Return the page of one implementation."""
    on_gpu = published.on_gpu(column.name)
    published = published.holding(column)
    report = published.report
    declared = published.declared[column.key]
    link = _links(published.pages, published.root)
    source = next(item for item in report.sources if item.name == column.record)
    answers = _answers(report, column.key)
    known = published.known.get(column.key, ())
    elsewhere = _elsewhere(published, column)
    every = [*known, *published.sizes.get(column.name, ()), *(item for item, _ in elsewhere)]
    other = on_gpu if published.gpu is not None else None
    if other:
        every += [*other.known, *other.sizes]
    times = Counter(item.heading for item in every)
    return _render(
        "page.md.j2",
        column=column,
        on_gpu=other,
        same={item.identity for item in known},
        differing=[
            (heading, answers.get(heading, []), told)
            for heading, told in (other.answers if other else {}).items()
            if told != answers.get(heading)
        ],
        device=device_of(declared, source.provenance),
        declared=declared,
        documentation=_address(declared.documentation, link),
        source=source,
        about=prose(declared.about),
        example=fenced(declared.example, "python") if declared.example else None,
        answers=list(answers.items()),
        deviations=known,
        explored=published.explored.get(column.name),
        large=published.large.get(column.name, ()),
        lengths=published.lengths.get(column.name, ()),
        climb=published.climbs.get(column.name),
        sizes=published.sizes.get(column.name, ()),
        cases=link(str((published.output / EXPLORED).absolute())),
        all_modes=lambda item: set(item.group.modes) >= set(column.modes),
        accuracy=[item for item in report.accuracy if item.column == column.key],
        limit=report.limit,
        unsupported=[item for item in report.unsupported if item.column == column.key],
        course=published.course(column),
        elsewhere=elsewhere,
        # Entries whose reasons begin with the same sentence differ in requirements or cases.
        titled=lambda item: (
            f"{item.heading} ({item.most_frequent('requirement')[0]} at "
            f"{item.most_frequent('case')[0]})"
            if times[item.heading] > 1
            else item.heading
        ),
        measured_since=lambda known: _since(published, column, known),
        kinds=lambda point: _kinds(published.known_at(column, point)),
        varying=varying,
        root=link(".") + "/",
        linked=lambda target: _link(target, link),
    )


def render_index(published: Published) -> str:
    """Return the page that links to the table and to the page of every implementation."""
    link = _links(published.pages, published.root)
    return _render(
        "index.md.j2",
        groups=_groups(published.columns),
        table=link(str((published.output / "README.md").absolute())),
        kinds=lambda column: _kinds(published.holding(column).known.get(column.key, ())),
    )


def _render(template: str, **values: Any) -> str:
    page = render(Path(__file__).with_name(template), **values)
    # Join rows of a table and items of a list, which templates may separate by empty lines.
    page = re.sub(r"(?<=\|)\n{2,}(?=\|)", "\n", page)
    return re.sub(r"(?m)^(- .*)\n{2,}(?=- )", r"\1\n", page)


def _groups(columns: Sequence[Column]) -> list[tuple[str, list[Column]]]:
    """Return the columns by library, with those that belong to no library last."""
    last = sorted(columns, key=lambda column: library_of(column) == _OWN)
    return list(by_key(last, library_of).items())


def library_of(column: Column) -> str:
    """Return the library that an implementation belongs to, or `_OWN` if there is none."""
    packages = {name.replace("-", "_") for name in column.versions}
    titled, dot, _ = column.title.partition("(")[0].partition(".")
    for library in (titled.partition(" ")[0], column.name.partition("-")[0]):
        if library in packages:
            return library
    return titled if dot else _OWN


def _few(report: Report) -> list[Any]:
    """Return the columns of the report's table of cards that the published table shows too."""
    headings = (
        "True in a mask",
        "0 and −inf",
        "A fully masked query gets",
        "Causal flag, fewer queries than keys",
    )
    return [glance for glance in glances_of(report.cards) if glance.heading in headings]


def _reached(report: Report) -> Callable[[Column, str], str]:
    measured = {(item.column, item.dtype): item for item in report.accuracy}

    def reached(column: Column, dtype: str) -> str:
        item = measured.get((column.key, dtype))
        spreads = [one for one in (item.output, item.gradients) if one] if item else []
        if not spreads:
            return "·"
        lost = sum(one.lost for one in spreads)
        beside = f" ({lost:,} not finite)" if lost else ""
        finite = [one.finite for one in spreads]
        worst = max(finite, key=lambda one: one.max_ratio / one.limit)
        if worst.max_ratio > worst.limit:
            return f"✗ {wording.ratio(worst.max_ratio)}σ{beside}"
        return (finite[0].worst_class or "none") + beside

    return reached


def accuracy_of(report: Report, column: Column) -> dict[str, str]:
    """Return, by dtype, the least accurate class that a column reached, or its largest error."""
    reached = _reached(report)
    dtypes = (item.dtype for item in report.accuracy if item.column == column.key)
    return {dtype: reached(column, dtype) for dtype in dtypes}


def _defects(published: Published) -> list[tuple[list[str], Known]]:
    """Return, for each defect, its columns and the deviation whose reason is shown for all of them.

    That is the reason that most of its columns have, because another may hold for one of them only.
    Of several, it is that of most findings, and then the longest.
    """
    every = [("", published), *([(" on gpu", published.gpu)] if published.gpu else [])]
    defects = [
        (f"{column.key}{where}", known)
        for where, own in every
        for column in own.report.columns
        for known in (*own.known.get(column.key, ()), *own.sizes.get(column.name, ()))
        if known.kind == "defect"
    ]
    chosen = []
    for group in by_key(defects, lambda item: item[1].identity).values():
        alike = by_key(group, lambda item: item[1].reason)

        def rank(reason: str, alike: dict[str, list[tuple[str, Known]]] = alike) -> tuple[int, ...]:
            columns = {key for key, _ in alike[reason]}
            findings = sum(len(known.group.members) for _, known in alike[reason])
            return len(columns), findings, len(reason)

        columns = list(dict.fromkeys(key for key, _ in group))
        chosen.append((columns, alike[max(alike, key=rank)][0][1]))
    return chosen


def _kinds(known: Sequence[Known]) -> list[tuple[str, int]]:
    times = [(kind, len({one.identity for one in known if one.kind == kind})) for kind in SEVERITY]
    return [(kind, number) for kind, number in times if number]


def _changes(course: Trend) -> str:
    """Return the numbers of changes over all versions as text, or "none"."""
    changes = [point.change for point in course.points if point.change is not None]
    times = {
        "worse": sum(sum(change.worse.values()) for change in changes),
        "fixed": sum(sum(change.better.values()) for change in changes),
        "otherwise": sum(len(change.other) for change in changes),
    }
    return ", ".join(f"{number:,} {word}" for word, number in times.items() if number) or "none"


def _elsewhere(published: Published, column: Column) -> list[tuple[Known, list[str]]]:
    """Return the deviations that occur only in other versions, each with ranges of these."""
    course = published.course(column)
    if course is None:
        return []
    here = {item.text for item in published.known.get(column.key, ())}
    elsewhere: dict[str, tuple[Known, list[Point]]] = {}
    for point in course.points:
        for item in published.beside.get((point.record, column.name), ()):
            points = elsewhere.setdefault(item.text, (item, []))[1]
            if item.text not in here and point not in points:
                points.append(point)
    return [
        (item, _ranges(course, library_of(column), points))
        for item, points in elsewhere.values()
        if points
    ]


def _ranges(course: Trend, library: str, chosen: Sequence[Point]) -> list[str]:
    """Return versions as texts, one for each run of neighbours, such as "torch 2.6 to 2.9".

    An end has the versions of other packages, too, if its library alone does not tell it from a
    point that is not chosen.
    """
    points = [point for point in course.points if not point.unavailable]
    brief = [_brief(course, library, point) for point in points]
    others = {own for own, point in zip(brief, points, strict=True) if point not in chosen}
    texts: list[str] = []
    for inside, run in groupby(range(len(points)), lambda at: points[at] in chosen):
        places = [*run]
        at, to = places[0], places[-1]
        if not inside:
            continue
        if brief[at] == brief[to] or "," in brief[at]:
            # Without a library of its own, several packages decide, and there is no one order.
            texts += dict.fromkeys(varying(course, points[place]) for place in places)
            continue
        first, last = (
            varying(course, points[place]) if brief[place] in others else brief[place]
            for place in (at, to)
        )
        same = (first, last) == (brief[at], brief[to])
        texts.append(f"{first} to {last.rpartition(' ')[2] if same else last}")
    return texts


def _brief(course: Trend, library: str, point: Point) -> str:
    """Return a point's version of the library, or else what `varying` returns."""
    packages = point.versions.items()
    own = (f"{name} {one}" for name, one in packages if name.replace("-", "_") == library)
    return next(own, varying(course, point))


def _since(published: Published, column: Column, known: Known) -> str:
    """Return, as text, since which measured version a deviation has been present.

    Only the time without interruption up to the column's own version counts. The result is "" if
    fewer than two versions could be measured.
    """
    course = published.course(column)
    points = [point for point in course.points if not point.unavailable] if course else []
    if course is None or len(points) < 2:
        return ""
    brief = partial(_brief, course, library_of(column))
    asked = known.places

    def has(point: Point) -> bool:
        there = published.known_at(column, point)
        return any(one.identity == known.identity and asked & one.places for one in there)

    # A deviation may have disappeared and come back; only its latest period counts.
    now = next((at for at, point in enumerate(points) if point.record == column.record), -1)
    first, before = now, set[str]()
    for at in range(now - 1, -1, -1):
        if has(points[at]):
            first = at
        elif before := _verdicts(published, column, points[at], asked) & VERIFIED:
            break  # A version in which nothing of it was asked says nothing.
    if first == 0:
        return f"{brief(points[0])}, the oldest version that was measured"
    one = points[first]
    if not before:
        return f"{brief(one)}, the oldest version in which it was asked"
    other = points[at]
    told, within = (brief(one), brief(other)), "in"
    if told[0] == told[1]:
        told, within = (varying(course, one), varying(course, other)), "with"
    if before.isdisjoint(("conforms", "observed")):
        # Whether this deviation would be there too cannot be seen behind another one.
        otherwise = "are errors" if before == {"error"} else "deviate for another reason"
        return f"{told[0]}; {within} {told[1]} the same findings {otherwise}"
    return f"{told[0]}; not {within} {told[1]}"


def _verdicts(
    published: Published, column: Column, point: Point, asked: set[tuple[str, str, str, str]]
) -> set[str]:
    """Return the verdicts in the record of `point` on the findings in `asked`.

    A finding is given by its case, dtype, mode and requirement.
    """
    return {
        finding.verdict
        for _, record, _ in published.versions
        if record.header.name == point.record
        for result in record.results
        if result.implementation == column.name
        for finding in result.findings
        if (result.case, result.dtype, result.mode, finding.requirement) in asked
    }


def varying(course: Trend, point: Point) -> str:
    """Return a point's versions of those packages whose versions vary between points, as text.

    If there are none, the result is the name of the point's record.
    """
    names = {name for one in course.points for name in one.versions}
    differ = {name for name in names if len({one.versions.get(name) for one in course.points}) > 1}
    texts = [f"{name} {version}" for name, version in point.versions.items() if name in differ]
    return ", ".join(texts) or point.record


def _links(folder: Path, root: Path) -> Callable[[str], str]:
    """Return a function that converts a path in `root` to a link from `folder`."""

    def link(target: str) -> str:
        return PurePath(os.path.relpath(root / target, folder)).as_posix()

    return link


def _address(target: str, link: Callable[[str], str]) -> str:
    """Return a link to documentation, or "" if its scheme is not that of a web page.

    The link is marked as safe if it has no character that could end a link.
    """
    if not target or (":" in target and not target.startswith(("https://", "http://"))):
        return ""
    address = target if ":" in target else link(target)
    return Markup(address) if re.fullmatch(r"[\w:/.#%?=&+~-]+", address) else address


def _link(target: str, link: Callable[[str], str]) -> Markup:
    """Return a link of a baseline entry as Markdown; "" if there is none."""
    if not target:
        return Markup("")
    if target.startswith("https://"):
        shown = re.sub(r"^https://(www\.)?github\.com/", "", target).removeprefix("https://")
        return Markup(f"[{text(shown)}]({target})")
    path, _, anchor = target.partition("#")
    shown = f"§ {anchor.replace('-', ' ')}" if anchor else path
    return Markup(f"[{text(shown)}]({link(target)})")
