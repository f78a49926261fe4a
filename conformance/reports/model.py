"""The report as data: the content of `compatibility.json`, from which the pages are made.

The classes are plain structs, filled in by `writing.build`. `Counts` maps names, mostly verdicts,
to numbers; results are never reduced to one percentage. Ratios are in units of the rounding noise σ
that no implementation can avoid; `findings.INFINITE` stands for an infinite ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from conformance.records.findings import NOTHING, Figures, Phrase, Worst
from conformance.records.header import CausalInfo, MaskInfo, Provenance
from conformance.records.numbers import Array
from conformance.records.record import Record

SCHEMA = "mha-conformance/report/2"

Loaded = tuple[Path, Record, Mapping[str, Array]]
"""The path of a record, the record, and its arrays, keyed by "item id|name of the array"."""

Standing = Literal["conforms", "deviates", "not verified"]
"""`not verified`: nothing is known to be wrong, but something, or everything, was not verified."""
Counts = dict[str, int]


class Column(msgspec.Struct, frozen=True):
    """One implementation on one device: a column of the matrix.

    Attributes:
        key: identifies the column in the report; equal to `name` if that is unique.
        group: the heading that the columns of one layer on several backends share: the title
            without its part in brackets. If no other column shares it, the whole title.
        variant: the part of the title in brackets, or `key` if that part is missing or not unique
            in the group; "" if no other column belongs to the group.
        record: the name of the record that the column comes from.
        items: the number of items (case x dtype x mode) with each verdict.
        findings: the number of findings (requirement x item) with each verdict.
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

    `missing` is the number of planned items for which the record has no outcome.
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
    """Totals of the report: implementations by standing, items and findings by verdict."""

    implementations: Counts
    items: Counts
    findings: Counts
    cases: int
    experiments: int
    dtypes: list[str]


class Cell(msgspec.Struct, frozen=True):
    """The findings of one requirement on one implementation, counted by verdict.

    `verdict` is the worst of these verdicts, or "" if there are no findings.
    """

    column: str
    counts: Counts
    verdict: str


class RequirementRow(msgspec.Struct, frozen=True):
    """One requirement across all implementations."""

    requirement: str
    chapter: str
    level: str
    sentence: str
    why: str
    cells: list[Cell]

    @property
    def asked(self) -> bool:
        """Whether any implementation has a finding of the requirement, whatever its verdict."""
        return any(cell.counts for cell in self.cells)


class Variant(msgspec.Struct, frozen=True):
    """An observed value, how often it was observed, and where.

    `where` is "" if the value was observed everywhere. `value` is the text of `phrase`. `times` is
    0 for a value that is only declared, and always 1 in `Feature.seen`.
    """

    value: str
    times: int
    where: str
    phrase: Phrase = NOTHING


class Form(msgspec.Struct, frozen=True):
    """One encoding of a mask: "form.bool", "form.zero-infinite" or "form.zero-one".

    `declared` is the id of the phrase that describes its declared meaning, or "".
    """

    form: str
    declared: str
    observed: list[Variant]


class Argument(msgspec.Struct, frozen=True):
    """A mask argument: its declaration, and what was observed with each encoding of a mask."""

    declared: MaskInfo
    forms: list[Form]


class MaskedRow(msgspec.Struct, frozen=True):
    """What a fully masked query outputs, and the effects on gradients and on other queries."""

    row: Variant
    consequences: list[Variant]


class Convention(msgspec.Struct, frozen=True):
    """What one implementation declares about masks, together with what was observed."""

    column: str
    arguments: list[Argument]
    causal: CausalInfo | None
    alignment: list[Variant]
    fully_masked: list[MaskedRow]
    returned_weights: list[Variant]


class Observed(msgspec.Struct, frozen=True, omit_defaults=True):
    """A value that an experiment observed, and the modes in which it was observed.

    `modes` is [] if no other value was observed. `value` and `declared` are texts; `value` is the
    text of `phrase`.
    """

    value: str
    modes: list[str]
    evidence: str = ""
    declared: str = ""
    agrees: bool = True
    code: str = ""
    phrase: Phrase = NOTHING


class Subject(msgspec.Struct, frozen=True):
    """One line of a convention card: what was examined, and the values that were observed.

    The most frequent value comes first. `subject` is the text of `phrase`.
    """

    subject: str
    observed: list[Observed]
    phrase: Phrase = NOTHING


class Chapter(msgspec.Struct, frozen=True):
    """The part of a convention card that is about one experiment.

    Attributes:
        topic: the name of the experiment.
        modes: the modes in which the experiment observed anything.
        unsupported: why nothing could be examined, or "".
        command: the command that runs the experiment again.
    """

    topic: str
    modes: list[str]
    subjects: list[Subject]
    unsupported: str
    command: str


class Card(msgspec.Struct, frozen=True):
    """The convention card of one implementation: what the run's experiments observed."""

    column: str
    chapters: list[Chapter]


class FeatureResults(msgspec.Struct, frozen=True):
    """The results of one implementation for one feature beyond masks.

    Attributes:
        column, feature: the implementation, and the name of the feature.
        declared: the arguments that the implementation declares for the feature. If the record
            does not list declared features, the arguments that experiments tried; None if there
            are none.
        items: the number of items (case x dtype x mode) of the feature with each verdict; {} if
            there are none.
        seen: the conventions that experiments observed.
    """

    column: str
    feature: str
    declared: list[str] | None
    items: Counts
    seen: list[Variant]

    @property
    def answered(self) -> int:
        """How many items were judged right or wrong."""
        return self.items.get("conforms", 0) + self.wrong

    @property
    def wrong(self) -> int:
        """How many items deviated or ended in an error."""
        return self.items.get("deviates", 0) + self.items.get("error", 0)


class Handed(msgspec.Struct, frozen=True):
    """The effect of passing a causal mask, in one encoding and unconverted, to an implementation.

    Attributes:
        column, argument: the implementation, and the argument that received the mask.
        written: the encoding of the mask.
        value: the effect; the text of `phrase`.
        evidence: the effect described in a sentence.
        weights: the weights of the first head in the first batch entry, `[query key]`, None where
            they are not finite; [] if the record has none, for example because the implementation
            rejected the mask.
    """

    column: str
    argument: str
    written: str
    value: str
    evidence: str
    weights: list[list[float | None]]
    phrase: Phrase = NOTHING


class Spread(msgspec.Struct, frozen=True):
    """Distances from the reference over all cases, in σ.

    Attributes:
        max_ratio, case: the largest |error| / σ of any element, and the case where it occurred.
        rms_ratio: the median over the findings of rms(error / σ).
        limit: the largest max_ratio that conforms.
        classes: how many findings reached each accuracy class; "" means that none was reached.
        worst_class: the least accurate of these classes; "" if any finding reached none.
        comparable: the spread of only those findings whose max_ratio is finite; None if this is so
            for all findings or for none. If a defect produces NaN, `comparable` shows how accurate
            the implementation is elsewhere.
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
        """`comparable`, or this spread itself if `comparable` is None."""
        return self.comparable or self

    @property
    def lost(self) -> int:
        """The number of findings that `comparable` leaves out; 0 if `comparable` is None."""
        return self.findings - self.finite.findings


class Accuracy(msgspec.Struct, frozen=True):
    """The accuracy of one implementation in one dtype.

    `output` or `gradients` is None if its errors were not measured.
    """

    column: str
    dtype: str
    output: Spread | None
    gradients: Spread | None


class Pair(msgspec.Struct, frozen=True):
    """Two implementations in one dtype: the largest |a - b| / (√2 σ) over their common cases.

    `max_ratio` occurred in `case`. Both leave out `nan_cases`, the cases in which at least one of
    the two returns NaN; if these are all common cases, `max_ratio` is 0 and `case` is "". `cases`
    is the number of all common cases.
    """

    dtype: str
    one: str
    other: str
    max_ratio: float
    case: str
    cases: int
    nan_cases: list[str]


class Apart(msgspec.Struct, frozen=True):
    """A case that the definition leaves open, or in which an implementation returns NaN.

    Attributes:
        dtypes: the dtypes to which `groups` and `nan` apply.
        groups: the implementations, grouped so that the outputs within a group agree.
        nan: the implementations that return NaN.
    """

    case: str
    dtypes: list[str]
    groups: list[list[str]]
    nan: list[str]


class Deviation(msgspec.Struct, frozen=True):
    """Equivalent findings of one implementation; the worst of them is shown as evidence.

    Attributes:
        id: the anchor of the deviation in the page.
        times: the number of these findings.
        of: the number of all findings of the requirement on the implementation.
        dtypes: the dtypes, each with the number of cases in which the deviation was found.
        everywhere: whether the deviation was found in every dtype, and whether in every mode, in
            which the requirement was checked on these cases.
        case, dtype, mode, device: the item that is shown as evidence.
        command: the command that runs only that item again.
        kind, reason, link, reproduction: copied from the baseline entry that covers the findings;
            without such an entry, or if the entry has no kind, the kind is "unsorted deviation".
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
    """The differences between two records of one implementation.

    Attributes:
        worse, better: for each requirement, how many findings have become wrong (worse) or are no
            longer wrong (better), among those that were checked for both records.
        other: changes that are neither better nor worse, such as a different value of a
            characteristic or something that was unsupported, as (requirement or subject of an
            experiment, before, after, how often).
        added, removed: the number of findings that only the later or only the earlier record has.
    """

    worse: Counts
    better: Counts
    other: list[tuple[str, str, str, int]]
    added: int
    removed: int


class Point(msgspec.Struct, frozen=True):
    """One record of an implementation: a point in time, or one version of its library.

    Attributes:
        worst: for each dtype, the largest |output error| / σ of any case.
        change: what changed since the last point at which the implementation could be run; None if
            there is no such point, or if the implementation could not be run at this point.
        unavailable: why the implementation could not be run, or "".
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
    """One implementation in several records, from the oldest to the newest date or version."""

    column: str
    points: list[Point]


class UnsupportedReason(msgspec.Struct, frozen=True):
    """Items of one implementation with unsupported findings that have the same reason.

    `examples` are up to three of their cases. Unsupported findings never count as passed.
    """

    column: str
    reason: str
    items: int
    cases: int
    examples: list[str]


class Open(msgspec.Struct, frozen=True):
    """Items of one implementation that a run should have verified but did not, for one reason.

    `examples` are up to three of their cases.
    """

    column: str
    verdict: str
    reason: str
    items: int
    examples: list[str]


class NotVerified(msgspec.Struct, frozen=True):
    """Everything that was not verified.

    Attributes:
        missing: the names of expected records that were not found.
        unavailable: the implementations that could not be run, each with the reason.
        incomplete: a line about each record of a run that ended early.
        narrowed: the records of runs that options restricted, each with these options and, if
            items were deselected, their number.
        problems: a line about each file, or item in a file, that could not be used.
    """

    missing: list[str]
    unavailable: dict[str, str]
    incomplete: list[str]
    narrowed: dict[str, str]
    open: list[Open]
    problems: list[str]

    @property
    def anything(self) -> bool:
        """Whether anything was not verified, apart from what options left out of a run."""
        return bool(
            self.missing or self.unavailable or self.incomplete or self.open or self.problems
        )


class Report(msgspec.Struct, frozen=True):
    """The report as the pages show it; single findings and drawings are not included."""

    schema: str
    created: str
    limit: float
    totals: Totals
    columns: list[Column]
    conventions: list[Convention]
    cards: list[Card]
    handed: list[Handed]
    features: list[FeatureResults]
    matrix: list[RequirementRow]
    accuracy: list[Accuracy]
    pairs: list[Pair]
    apart: list[Apart]
    deviations: list[Deviation]
    unsupported: list[UnsupportedReason]
    not_verified: NotVerified
    sources: list[Source]
    trends: list[Trend] = []
    timelines: list[Trend] = []

    def column(self, key: str) -> Column:
        """Return the column that has the given key, which must exist."""
        return next(column for column in self.columns if column.key == key)
