"""Functions that templates call to group, merge and sort the content of a report.

The conventions of a layer are shown once for all of its backends that have equal declarations: if
their observed values differ, the most frequent value comes first, and each value states where it
was observed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from conformance.records.findings import Phrase, verified, without_place
from conformance.records.header import CausalInfo
from conformance.reports.model import (
    Apart,
    Argument,
    Column,
    Convention,
    Deviation,
    Handed,
    MaskedRow,
    Pair,
    Point,
    Report,
    RequirementRow,
    Trend,
    UnsupportedReason,
    Variant,
)
from conformance.reports.tables import by_key
from conformance.reports.wording import UNSORTED, listed
from conformance.text import plural, some
from conformance.words import say


def groups(report: Report) -> list[tuple[str, list[Column]]]:
    """Return the columns by layer: one layer on several backends is a group."""
    return [(title, list(own)) for title, own in groupby(report.columns, lambda c: c.group)]


def versions(report: Report) -> dict[str, list[str]]:
    """Return all packages that the implementations use, each with all its versions."""
    packages: dict[str, dict[str, None]] = defaultdict(dict)
    for column in report.columns:
        for package, version in column.versions.items():
            packages[package][version] = None
    return {package: list(names) for package, names in packages.items()}


def places(report: Report) -> list[str]:
    """Return the devices, platforms and Python versions with which the records were made."""
    made = [source.provenance for source in report.sources]
    texts = (f"{item.device} on {item.platform}, Python {item.python}" for item in made)
    return list(dict.fromkeys(texts))


def machines(report: Report) -> list[str]:
    """Return the processors on which the records were made, as far as these name them."""
    made = (source.provenance.machine for source in report.sources)
    return list(dict.fromkeys(filter(None, made)))


def known(column: Column) -> bool:
    """Return whether any finding of a column was verified."""
    return verified(column.findings) > 0


def sections(report: Report) -> list[tuple[str, str, str]]:
    """Return the sections of the page, each as (anchor, label for the navigation, heading).

    Sections that not every report needs are left out if they would be empty. If a run was narrowed,
    so are those that only a whole run fills.
    """
    asked = any(one.items or one.seen for one in report.features)
    whole = not report.not_verified.narrowed
    compared = bool(report.pairs or report.apart)
    every = (
        ("matrix", "Requirements", "Requirements", True),
        ("deviations", "Deviations", "Deviations", True),
        ("conventions", "Conventions", "What each mask argument means", True),
        ("features", "Features", "Features beyond masks", asked),
        ("cards", "Cards", "Convention cards", bool(report.cards or report.handed)),
        ("accuracy", "Accuracy", "Accuracy", whole or bool(report.accuracy)),
        ("pairs", "Pairwise", "Implementations against each other", whole or compared),
        ("trend", "Trend", "Trend", bool(report.trends)),
        ("versions", "Versions", "Versions", bool(report.timelines)),
        ("unsupported", "Unsupported", "Unsupported", whole or bool(report.unsupported)),
        ("not-verified", "Not verified", "Not verified", True),
        ("provenance", "Provenance", "Provenance", True),
    )
    return [(target, told, heading) for target, told, heading, there in every if there]


# The matrix


def chapters(report: Report) -> list[tuple[str, list[tuple[int, RequirementRow]]]]:
    """Return, by chapter, the rows that have findings, each with its index in the matrix."""
    rows = [(index, row) for index, row in enumerate(report.matrix) if row.asked]
    return list(by_key(rows, lambda item: item[1].chapter).items())


# Conventions


class MaskRow(NamedTuple):
    """A mask argument as the page shows it.

    Attributes:
        true, ones, infinite: the observed meanings of True in a boolean mask, of a mask of 0 and 1,
            and of a mask of 0 and −∞; the declared meaning where nothing was observed.
        agrees: whether all observations agree with the declaration; None if no encoding with a
            declared meaning was examined.
        surprises: texts about observations that contradict the declaration.
    """

    name: str
    axes: list[str]
    true: list[Variant]
    ones: list[Variant]
    infinite: list[Variant]
    agrees: bool | None
    surprises: list[str]


class CardGroup(NamedTuple):
    """The conventions of those columns of one layer that have equal declarations."""

    title: str
    columns: list[Column]
    arguments: list[MaskRow]
    causal: CausalInfo | None
    alignment: list[Variant]
    fully_masked: list[MaskedRow]
    returned_weights: list[Variant]


_FORMS = {
    "form.bool": "booleans",
    "form.zero-one": "0 and 1",
    "form.zero-infinite": "0 and −∞",
}


def cards(report: Report) -> list[CardGroup]:
    """Return one card for each layer, or several if its backends have different declarations."""
    conventions = {item.column: item for item in report.conventions}

    def declares(column: Column) -> tuple[str, bytes]:
        own = conventions[column.key]
        masks = [argument.declared for argument in own.arguments]
        return column.group, msgspec.json.encode((masks, own.causal))

    return [
        _card(title, columns, [conventions[column.key] for column in columns])
        for (title, _), columns in by_key(report.columns, declares).items()
    ]


def polarity(cards: Sequence[CardGroup]) -> dict[str, list[tuple[CardGroup, list[MaskRow]]]]:
    """Return the cards and their mask arguments by the meaning of True: "attends" or "blocks".

    Arguments in which True has another meaning, or none that is known, are left out.
    """
    answer: dict[str, list[tuple[CardGroup, list[MaskRow]]]] = {"attends": [], "blocks": []}
    for meaning, entries in answer.items():
        for card in cards:
            ids = [reading.true[0].phrase.id if reading.true else "" for reading in card.arguments]
            pairs = zip(ids, card.arguments, strict=True)
            if readings := [reading for name, reading in pairs if name == f"mask.{meaning}"]:
                entries.append((card, readings))
    return answer


def pooled(members: Sequence[tuple[str, Sequence[Variant]]]) -> list[Variant]:
    """Merge the observations of several backends into one list, the most frequent value first.

    `members` are pairs of the name of a backend and its observations.
    """
    if len(members) == 1:
        return list(members[0][1])
    examined = sum(bool(observed) for _, observed in members)
    seen = [(name, item) for name, observed in members for item in observed]
    variants = []
    for (value, phrase), same in by_key(seen, lambda one: (one[1].value, one[1].phrase)).items():
        names_of: dict[str, list[str]] = defaultdict(list)
        for name, item in same:
            names_of[item.where].append(name)
        if len(names_of) == 1 and len(same) == examined:
            (place,) = names_of
        else:
            place = " · ".join(
                ", ".join(names) + (f": {where}" if where else "")
                for where, names in names_of.items()
            )
        variants.append(Variant(value, sum(item.times for _, item in same), place, phrase))
    return sorted(variants, key=lambda variant: -variant.times)


def _card(title: str, columns: list[Column], conventions: Sequence[Convention]) -> CardGroup:
    names = [column.variant or column.key for column in columns]
    members = list(zip(names, conventions, strict=True))
    first = conventions[0]
    return CardGroup(
        title=title,
        columns=columns,
        arguments=[
            _reading([(name, item.arguments[index]) for name, item in members])
            for index in range(len(first.arguments))
        ],
        causal=first.causal,
        alignment=pooled([(name, item.alignment) for name, item in members]),
        fully_masked=_masked([(name, item.fully_masked) for name, item in members]),
        returned_weights=pooled([(name, item.returned_weights) for name, item in members]),
    )


def _reading(members: Sequence[tuple[str, Argument]]) -> MaskRow:
    declared = {form.form: form.declared for _, item in members for form in item.forms}
    observed = [(name, {form.form: form.observed for form in item.forms}) for name, item in members]
    forms = {
        form: pooled([(name, found.get(form, [])) for name, found in observed]) for form in declared
    }
    surprises: dict[str, list[str]] = defaultdict(list)
    for form, variants in forms.items():
        for item in variants:
            if declared[form] and item.phrase.id != declared[form]:
                place = f" ({item.where})" if item.where else ""
                text = f"{item.value}{place}, declared {say(Phrase(declared[form]))}"
                surprises[text].append(_FORMS.get(form, form))

    def shown(form: str) -> list[Variant]:
        meaning = Phrase(declared.get(form, ""))
        stated = [Variant(say(meaning), 0, "declared", meaning)] if meaning else []
        return forms.get(form) or stated

    examined = any(forms[form] for form, meaning in declared.items() if meaning)
    mask = members[0][1].declared
    return MaskRow(
        mask.name,
        mask.axes,
        shown("form.bool"),
        shown("form.zero-one"),
        shown("form.zero-infinite"),
        agrees=not surprises if examined else None,
        surprises=[f"{' and '.join(fed)}: {text}" for text, fed in surprises.items()],
    )


def _masked(members: Sequence[tuple[str, Sequence[MaskedRow]]]) -> list[MaskedRow]:
    found = []
    for row in pooled([(name, [item.row for item in masked]) for name, masked in members]):
        consequences = [
            (name, item.consequences)
            for name, masked in members
            for item in masked
            if item.row.phrase == row.phrase
        ]
        found.append(MaskedRow(row, pooled(consequences)))
    return found


class HandedRow(NamedTuple):
    """The effect of one mask in several encodings on one implementation."""

    column: Column
    argument: str
    cells: list[Handed]


class EncodingGroup(NamedTuple):
    """Implementations that interpret the mask correctly in the same encodings."""

    title: str
    rows: list[HandedRow]


def features(report: Report) -> tuple[list[str], list[str]]:
    """Return the names of the features of which something is known, and those of the others."""
    known = {
        name: any(one.declared or one.items or one.seen for one in those)
        for name, those in by_key(report.features, lambda one: one.feature).items()
    }
    return [name for name in known if known[name]], [name for name in known if not known[name]]


def families(report: Report) -> list[EncodingGroup]:
    """Group the implementations by the encodings of one mask that they interpret correctly."""
    rows: dict[tuple[str, ...], list[HandedRow]] = defaultdict(list)
    for key, cells in by_key(report.handed, lambda item: item.column).items():
        right = tuple(item.written for item in cells if item.phrase.id == "same-mask.as-meant")
        rows[right].append(HandedRow(report.column(key), cells[0].argument, cells))
    return [
        EncodingGroup(f"Right with {listed(right) or 'none'}", own)
        for right, own in sorted(rows.items(), key=lambda item: -len(item[1]))
    ]


# Accuracy

TICKS = (0.1, 1.0, 10.0, 100.0, 1000.0)
LOWEST, HIGHEST = TICKS[0], TICKS[-1]
MARGIN = 3.0
"""The percentage of the logarithmic axis to leave free at either end, for the marks themselves."""


def position(value: float) -> float:
    """Return the position of a ratio on the axis in per cent; ratios beyond it are clamped."""
    inside = min(max(value, LOWEST), HIGHEST)
    share = math.log(inside / LOWEST) / math.log(HIGHEST / LOWEST)
    return round(MARGIN + (100 - 2 * MARGIN) * share, 2)


# Implementations against each other


def heat(report: Report) -> list[tuple[str, list[Column], dict[tuple[str, str], Pair]]]:
    """Return for each dtype the columns that were compared, and all pairs in both orders."""
    maps = []
    for dtype, pairs in by_key(report.pairs, lambda pair: pair.dtype).items():
        both = {(pair.one, pair.other): pair for pair in pairs}
        both |= {(pair.other, pair.one): pair for pair in pairs}
        names = {name for names in both for name in names}
        columns = [column for column in report.columns if column.key in names]
        maps.append((dtype, columns, both))
    return maps


def heat_level(pair: Pair, limit: float) -> int:
    """Return the heat level of a pair: 0 to 3 if the two agree within `limit`, or else 4.

    Two implementations of which one returns NaN do not agree.
    """
    if pair.nan_cases or pair.max_ratio > limit:
        return 4
    return sum(pair.max_ratio >= edge for edge in (1.0, 2.0, 4.0))


def furthest(report: Report, most: int = 12) -> list[Pair]:
    """Return up to `most` pairs that differ most; those with the most cases of NaN come first."""
    ranked = sorted(report.pairs, key=lambda pair: (-len(pair.nan_cases), -pair.max_ratio))
    return ranked[:most]


def undefined(report: Report) -> list[tuple[str, list[Apart]]]:
    """Return, by case, the results in cases that the definition leaves open or that have NaN."""
    return list(by_key(report.apart, lambda item: item.case).items())


def apart_count(report: Report) -> int:
    """Return the number of pairs that do not agree within the limit, summed over dtypes."""
    return sum(heat_level(pair, report.limit) == 4 for pair in report.pairs)


# Over time

MOST_CHANGES = 8
"""The most changes of one kind to name."""

MARKS = (
    "M-4 0A4 4 0 1 1 4 0A4 4 0 1 1-4 0Z",
    "M-3.6-3.6H3.6V3.6H-3.6Z",
    "M0-5L5 0L0 5L-5 0Z",
    "M0-4.6L4.6 3.6H-4.6Z",
)
"""A circle, a square, a diamond and a triangle, so that lines differ in more than colour."""

WIDTH, HEIGHT, LEFT, BELOW = 640.0, 170.0, 44.0, 22.0


class ChartLine(NamedTuple):
    """The line of one dtype in a chart: the SVG paths of a mark and of the line, and its points.

    Each point is (x, y, value).
    """

    dtype: str
    mark: str
    path: str
    points: list[tuple[float, float, float]]


def across(index: int, count: int) -> float:
    """Return the x coordinate of point `index` of `count` in a chart with a margin at both ends."""
    wide = WIDTH - LEFT - 60
    return round(LEFT + 30 + (wide * index / (count - 1) if count > 1 else wide / 2), 1)


def height(value: float) -> float:
    """Return the y coordinate of a ratio in a chart."""
    return round((HEIGHT - BELOW) * (1 - position(value) / 100), 1)


def lines(trend: Trend) -> list[ChartLine]:
    """Return the largest errors of a trend as lines of a chart, one for each dtype."""
    names = dict.fromkeys(dtype for point in trend.points for dtype in point.worst)
    drawn = []
    for place, dtype in enumerate(names):
        points = [
            (across(index, len(trend.points)), height(point.worst[dtype]), point.worst[dtype])
            for index, point in enumerate(trend.points)
            if dtype in point.worst
        ]
        path = "M" + "L".join(f"{x} {y}" for x, y, _ in points)
        drawn.append(ChartLine(dtype, MARKS[place % len(MARKS)], path, points))
    return drawn


def changed(point: Point) -> str:
    """Return a line about the changes since the previous point that could be compared.

    If there is no such point, or the implementation could not be run at this one, the line says so.
    """
    change = point.change
    if point.unavailable:
        return point.unavailable
    if change is None:
        return "the first"
    texts = [
        f"{sum(counts.values()):,} {word}: "
        + some(sorted(counts, key=counts.__getitem__, reverse=True), MOST_CHANGES)
        for word, counts in (("worse", change.worse), ("fixed", change.better))
        if counts
    ]
    texts += [f"{name}: {was} → {now}" for name, was, now, _ in change.other[:MOST_CHANGES]]
    more = len(change.other) - MOST_CHANGES
    texts += [plural(more, "more change")] if more > 0 else []
    texts += [f"{change.added:,} checked for the first time"] if change.added else []
    texts += [f"{change.removed:,} no longer checked"] if change.removed else []
    return "; ".join(texts) or "no change"


# Deviations


class Symptom(NamedTuple):
    """Deviations of one implementation that probably arise from the same defect.

    They have the same verdict, kind, reason and `text`.

    Attributes:
        kind, reason: those of the baseline entry.
        text: the known cause if `explained` is true; otherwise the message or, if errors were
            measured, the dtypes and modes in which the deviations occur.
        times: the number of findings.
        folded: whether several deviations are the same exception, of which one is enough evidence.
        link, reproduction: those of the first deviation.
    """

    kind: str
    text: str
    explained: bool
    verdict: str
    times: int
    deviations: list[Deviation]
    folded: bool
    reason: str
    link: str
    reproduction: str


class CauseGroup(NamedTuple):
    """Symptoms, of one or more implementations, that have the same cause.

    Attributes:
        symptom: the first of these symptoms.
        members: the columns in which the cause occurs, each with the anchor of a deviation.
        times: the number of findings of all these symptoms.
    """

    symptom: Symptom
    members: list[tuple[Column, str]]
    times: int

    @property
    def columns(self) -> list[Column]:
        """The columns of the implementations in which the cause occurs."""
        return [column for column, _ in self.members]


SEVERITY = (UNSORTED, "defect", "accuracy", "limitation", "convention")
"""The kinds of deviations, the worst first."""


def symptoms(report: Report, column: Column) -> list[Symptom]:
    """Group the deviations of one implementation into symptoms, the worst kind first.

    Within a kind, symptoms with a known cause come first, then the most frequent ones.
    """
    own = (item for item in report.deviations if item.column == column.key)
    alike = by_key(
        own,
        lambda item: (item.verdict, _symptom(item), bool(item.cause), item.kind, item.reason),
    )
    found = [
        Symptom(
            kind=kind,
            text=text,
            explained=explained,
            verdict=verdict,
            times=sum(item.times for item in items),
            deviations=items,
            folded=verdict == "error" and len(items) > 1,
            reason=reason,
            link=items[0].link,
            reproduction=items[0].reproduction,
        )
        for (verdict, text, explained, kind, reason), items in alike.items()
    ]
    return sorted(
        found, key=lambda item: (SEVERITY.index(item.kind), not item.explained, -item.times)
    )


def causes(report: Report, symptoms: Mapping[str, Sequence[Symptom]]) -> list[CauseGroup]:
    """Group the symptoms that have the same kind and reason or, without a reason, the same text.

    The worst kinds come first, and within a kind the most frequent causes.
    """
    alike = by_key(
        ((column, symptom) for column in report.columns for symptom in symptoms[column.key]),
        lambda item: (item[1].kind, item[1].reason or (item[1].text, item[1].explained)),
    )
    found = []
    for members in alike.values():
        first = by_key(members, lambda item: item[0].key).values()
        times = sum(symptom.times for _, symptom in members)
        places = [(column, symptom.deviations[0].id) for (column, symptom), *_ in first]
        found.append(CauseGroup(members[0][1], places, times))
    return sorted(found, key=lambda item: (SEVERITY.index(item.symptom.kind), -item.times))


def kinds(symptoms: Sequence[Symptom]) -> list[tuple[str, int]]:
    """Return the kinds of an implementation's deviations, each with its number of causes."""
    own = by_key(symptoms, lambda symptom: symptom.kind)
    return [
        (kind, len({symptom.reason or symptom.text for symptom in own[kind]}))
        for kind in SEVERITY
        if kind in own
    ]


def extent(symptoms: Sequence[Symptom], rows: Mapping[str, RequirementRow]) -> str:
    """Return the chapters, verdicts and dtypes of deviations as words for the page's filter."""
    items = [item for symptom in symptoms for item in symptom.deviations]
    words = {rows[item.requirement].chapter for item in items} | {item.verdict for item in items}
    return " ".join(sorted(words | {dtype for item in items for dtype in item.dtypes}))


def _symptom(item: Deviation) -> str:
    """Return the text by which a deviation is grouped.

    It is the cause, if known. Without a cause, it is the message, or the verdict if there is no
    message. If errors were measured, it consists of the dtypes and modes instead, and of the case
    if there is only one, because deviations that arise from one defect often share these.
    """
    if item.cause:
        return say(item.cause)
    if item.figures is None:
        return without_place(item.detail) or item.verdict
    every_dtype, every_mode = item.everywhere
    if every_dtype and every_mode:
        extent = "every dtype and mode"
    else:
        modes = "every mode" if every_mode else _modes(item)
        extent = f"{'every dtype' if every_dtype else listed(item.dtypes)}, {modes}"
    case = f"{item.cases[0]}, " if len(item.cases) == 1 else ""
    return f"beyond rounding noise in {case}{extent}"


def _modes(item: Deviation) -> str:
    return f"mode{'' if len(item.modes) == 1 else 's'} {listed(item.modes)}"


def where(item: Deviation) -> str:
    """Return the dtypes, modes and number of cases of a deviation.

    If the number of cases differs between dtypes, it is also given for each dtype.
    """
    total = len(item.cases)
    same = set(item.dtypes.values()) == {total}
    names = [
        dtype if same else f"{dtype} ({plural(cases, 'case')})"
        for dtype, cases in item.dtypes.items()
    ]
    return f"{listed(names)}; {_modes(item)}; {plural(total, 'case')}"


def evidence(report: Report) -> dict[tuple[str, str], str]:
    """Return the anchor of the first deviation of each (column, requirement)."""
    anchors: dict[tuple[str, str], str] = {}
    for item in report.deviations:
        anchors.setdefault((item.column, item.requirement), item.id)
    return anchors


def reasons(report: Report) -> list[tuple[str, list[Column], list[UnsupportedReason]]]:
    """Return what is unsupported, as (title, columns, reasons).

    Backends of one layer are merged if they have equal reasons for equal numbers of cases.
    """
    own = by_key(report.unsupported, lambda item: item.column)
    alike = by_key(
        (column for column in report.columns if column.key in own),
        lambda c: (c.group, tuple(sorted((item.reason, item.cases) for item in own[c.key]))),
    )
    return [(title, columns, own[columns[0].key]) for (title, _), columns in alike.items()]
