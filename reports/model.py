"""The report as data: what `compatibility.json` holds, and everything that the pages show.

Plain structs, filled in by `build`. Counts are vectors, verdict to number, never one percentage.
Ratios are in units of honest rounding noise σ; `findings.INFINITE` stands for an infinite one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from conformance.records.findings import Figures, Worst
from conformance.records.header import CausalInfo, MaskInfo, Provenance
from conformance.records.numbers import Array
from conformance.records.phrase import NOTHING, Phrase
from conformance.records.record import Record

SCHEMA = "mha-conformance/report/2"

Loaded = tuple[Path, Record, Mapping[str, Array]]
"""A record, where it was read, and its exchange arrays by "item id|array"."""

Standing = Literal["conforms", "deviates", "not verified"]
"""`not verified`: nothing is known to be wrong, but a question was left open."""
Counts = dict[str, int]


class Column(msgspec.Struct, frozen=True):
    """One implementation on one device: a column of the matrix.

    Attributes:
        key: identifies the column in the report; the name, where that is enough.
        group: the title without what stands in brackets: one layer on several backends is a group.
        variant: what stands in brackets, where the group has several members; else "".
        record: the name of the record that it comes from.
        items: verdicts of its items (case x dtype x mode).
        findings: verdicts of its findings (requirement x item).
    """

    key: str
    name: str
    title: str
    group: str
    variant: str
    documentation: str
    framework: str
    versions: dict[str, str]
    spec: str
    device: str
    device_model: str
    record: str
    modes: list[str]
    dtypes: list[str]
    unavailable: str
    items: Counts
    findings: Counts
    standing: Standing


class Source(msgspec.Struct, frozen=True):
    """A record from which the report is made.

    `missing` is how many planned items have no outcome of their own.
    """

    name: str
    file: str
    complete: bool
    planned: int
    missing: int
    deselected: int
    implementations: list[str]
    provenance: Provenance


class Totals(msgspec.Struct, frozen=True):
    """Everything, counted once: implementations by standing, items and findings by verdict."""

    implementations: Counts
    items: Counts
    findings: Counts
    cases: int
    experiments: int
    dtypes: list[str]


class Cell(msgspec.Struct, frozen=True):
    """One requirement, one implementation; `verdict` is the worst, "" where there is none."""

    column: str
    counts: Counts
    verdict: str


class Row(msgspec.Struct, frozen=True):
    """One requirement across all implementations."""

    requirement: str
    chapter: str
    level: str
    sentence: str
    why: str
    cells: list[Cell]

    @property
    def asked(self) -> bool:
        """Whether any implementation was asked about it."""
        return any(cell.counts for cell in self.cells)


class Variant(msgspec.Struct, frozen=True):
    """A value that was observed, how often, and where; `where` is "" if that is everywhere.

    `value` is the text of `phrase`.
    """

    value: str
    times: int
    where: str
    phrase: Phrase = NOTHING


class Form(msgspec.Struct, frozen=True):
    """One form of a mask: "form.bool", "form.zero-infinite" or "form.zero-one".

    `declared` is the id of the phrase for what it is declared to mean, or "".
    """

    form: str
    declared: str
    observed: list[Variant]


class Argument(msgspec.Struct, frozen=True):
    """A mask argument, as declared and as observed."""

    declared: MaskInfo
    forms: list[Form]


class MaskedRow(msgspec.Struct, frozen=True):
    """What a fully masked query gets, and what that does to the gradients."""

    row: Variant
    consequences: list[Variant]


class Convention(msgspec.Struct, frozen=True):
    """What one implementation declares of masks, with what was observed."""

    column: str
    arguments: list[Argument]
    causal: CausalInfo | None
    alignment: list[Variant]
    fully_masked: list[MaskedRow]
    returned_weights: list[Variant]


class Observed(msgspec.Struct, frozen=True, omit_defaults=True):
    """A value that an experiment showed, and in which modes; `modes` is [] if in all of them.

    `value` and `declared` are texts; `value` is that of `phrase`.
    """

    value: str
    modes: list[str]
    evidence: str = ""
    declared: str = ""
    agrees: bool = True
    code: str = ""
    phrase: Phrase = NOTHING


class Subject(msgspec.Struct, frozen=True):
    """One line of a card: a subject, and its observed values, the most frequent first."""

    subject: str
    observed: list[Observed]
    phrase: Phrase = NOTHING


class Chapter(msgspec.Struct, frozen=True):
    """A topic of a card.

    Attributes:
        topic: the name of the experiment.
        modes: the modes that were examined.
        unsupported: why nothing could be examined, or "".
        command: runs the experiment again.
    """

    topic: str
    modes: list[str]
    subjects: list[Subject]
    unsupported: str
    command: str


class Card(msgspec.Struct, frozen=True):
    """The convention card of one implementation; experiments of the run made every entry."""

    column: str
    chapters: list[Chapter]


class Feature(msgspec.Struct, frozen=True):
    """What became of one feature beyond masks in one implementation.

    Attributes:
        column, feature: the implementation, and the name of the feature.
        declared: the arguments that it declares for it; None if the record does not say.
        items: verdicts of the items (case x dtype x mode) that have it; {} if nobody asked.
        seen: the conventions that experiments read off.
    """

    column: str
    feature: str
    declared: list[str] | None
    items: Counts
    seen: list[Variant]

    @property
    def answered(self) -> int:
        """How many items have an answer that is right or wrong."""
        return self.items.get("conforms", 0) + self.wrong

    @property
    def wrong(self) -> int:
        """How many items deviate, or ended in an error."""
        return self.items.get("deviates", 0) + self.items.get("error", 0)


class Handed(msgspec.Struct, frozen=True):
    """One causal mask, handed to one implementation as it is.

    Attributes:
        column, argument: the implementation, and the argument that it was passed as.
        written: the encoding of the mask.
        value: what came of it, the text of `phrase`.
        evidence: the same in a sentence.
        weights: of the first head, `[query key]`; null where they are NaN. [] if it was refused.
    """

    column: str
    argument: str
    written: str
    value: str
    evidence: str
    weights: list[list[float | None]]
    phrase: Phrase = NOTHING


class Spread(msgspec.Struct, frozen=True):
    """How far from the reference, over all cases, in σ.

    Attributes:
        max_ratio, case: the largest |error| / σ of any element, and where it was measured.
        rms_ratio: the median over the findings of rms(error / σ).
        limit: the largest max_ratio that conforms.
        classes: how many findings reached each accuracy class; "" is none.
        worst_class: the least accurate of those.
        comparable: the same over the findings in which every element is finite; None if all are, or
            none is. Where a known defect gives NaN, it says how accurate the rest is.
    """

    max_ratio: float
    case: str
    rms_ratio: float
    limit: float
    findings: int
    classes: Counts
    worst_class: str
    comparable: Spread | None = None

    @property
    def finite(self) -> Spread:
        """The spread over what is finite, or over everything if nothing else is."""
        return self.comparable or self

    @property
    def lost(self) -> int:
        """In how many findings an element is not finite, beside others in which all are."""
        return self.findings - self.finite.findings


class Accuracy(msgspec.Struct, frozen=True):
    """One implementation in one dtype; None where nothing was measured."""

    column: str
    dtype: str
    output: Spread | None
    gradients: Spread | None


class Pair(msgspec.Struct, frozen=True):
    """Two implementations in one dtype: the largest |a - b| / (√2 σ) over their common cases.

    `nan_cases` are left out of `max_ratio`: there, one of the two answers with NaN.
    """

    dtype: str
    one: str
    other: str
    max_ratio: float
    case: str
    cases: int
    nan_cases: list[str]


class Apart(msgspec.Struct, frozen=True):
    """A case without an agreed answer, or with NaN: which implementations answer alike."""

    case: str
    dtypes: list[str]
    groups: list[list[str]]
    nan: list[str]


class Deviation(msgspec.Struct, frozen=True):
    """Findings of one implementation that say the same; the worst of them is the evidence.

    Attributes:
        id: its anchor in the page.
        times, of: how many of the findings of this requirement on this implementation these are.
        dtypes: each with the number of cases in which this was found.
        everywhere: whether that is every dtype, and every mode, in which these cases were examined.
        case, dtype, mode, device: the item of the evidence.
        command: runs just that item again.
        kind, reason, link, reproduction: of the entry of a baseline that knows of them; the kind is
            "unsorted deviation" where none does.
    """

    id: str
    column: str
    requirement: str
    level: str
    verdict: str
    cause: Phrase
    made_by: str
    detail: str
    times: int
    of: int
    dtypes: Counts
    modes: list[str]
    everywhere: tuple[bool, bool]
    cases: list[str]
    case: str
    dtype: str
    mode: str
    device: str
    figures: Figures | None
    worst: Worst | None
    command: str
    kind: str = "unsorted deviation"
    reason: str = ""
    link: str = ""
    reproduction: str = ""


class Change(msgspec.Struct, frozen=True):
    """What changed in the findings that two records of one implementation have in common.

    Attributes:
        worse, better: requirement to how many findings are wrong now and were not, and the reverse.
        other: requirement or subject of an experiment, before, after, how often: what is neither
            better nor worse, such as another value of a characteristic.
        added, removed: how many findings only the later or only the earlier record has.
    """

    worse: Counts
    better: Counts
    other: list[tuple[str, str, str, int]]
    added: int
    removed: int


class Point(msgspec.Struct, frozen=True):
    """One record of an implementation, as a point in time or among its library's versions.

    Attributes:
        worst: dtype to the largest |output error| / σ of any case.
        change: what changed since the point before; None for the first.
        unavailable: why nothing of it could be run, or "".
    """

    record: str
    created: str
    suite: str
    catalogue: str
    versions: dict[str, str]
    findings: Counts
    worst: dict[str, float]
    change: Change | None
    unavailable: str = ""


class Trend(msgspec.Struct, frozen=True):
    """One implementation over several records, the oldest first; or over versions."""

    column: str
    points: list[Point]


class Unsupported(msgspec.Struct, frozen=True):
    """What an implementation cannot express, which is an answer and never a pass."""

    column: str
    reason: str
    items: int
    cases: int
    examples: list[str]


class Open(msgspec.Struct, frozen=True):
    """Questions that a run set out to answer and did not."""

    column: str
    verdict: str
    reason: str
    items: int
    examples: list[str]


class NotVerified(msgspec.Struct, frozen=True):
    """Everything that was left open.

    Attributes:
        missing: expected records that are not there.
        unavailable: implementation to reason.
        incomplete: records that ended early.
        narrowed: record to what narrowed it.
        problems: files that could not be used, and why.
    """

    missing: list[str]
    unavailable: dict[str, str]
    incomplete: list[str]
    narrowed: dict[str, str]
    open: list[Open]
    problems: list[str]

    @property
    def anything(self) -> bool:
        """Whether something was left open; a run that was narrowed on request is not."""
        return bool(
            self.missing or self.unavailable or self.incomplete or self.open or self.problems
        )


class Report(msgspec.Struct, frozen=True):
    """Everything that the pages show."""

    schema: str
    created: str
    limit: float
    totals: Totals
    columns: list[Column]
    conventions: list[Convention]
    cards: list[Card]
    handed: list[Handed]
    features: list[Feature]
    matrix: list[Row]
    accuracy: list[Accuracy]
    pairs: list[Pair]
    apart: list[Apart]
    deviations: list[Deviation]
    unsupported: list[Unsupported]
    not_verified: NotVerified
    sources: list[Source]
    trends: list[Trend] = []
    timelines: list[Trend] = []

    def column(self, key: str) -> Column:
        """Return the column with this key."""
        return next(column for column in self.columns if column.key == key)
