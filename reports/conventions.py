"""The convention card: what is declared about masks, and what was observed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from conformance.records.findings import PREFIX, CaseResult
from conformance.records.header import Implementation, MaskInfo
from conformance.records.phrase import Phrase
from conformance.reports.columns import column_keys, declared
from conformance.reports.model import (
    Argument,
    Column,
    Convention,
    Form,
    Loaded,
    MaskedRow,
    Variant,
)
from conformance.reports.totals import Seen
from conformance.words import say

_POLARITY = "mask.polarity-is-as-declared"
_FULLY_MASKED = "observed.fully-masked-row"
_ALIGNMENT = "observed.causal-alignment"
_RETURNED = "observed.returned-weights"
"""Requirements whose observed values a card shows."""

FORMS = ("form.bool", "form.zero-one", "form.zero-infinite")
"""Forms of a mask that a card shows."""

_NUMBERS = {
    "attends if nonzero": "mask.attends",
    "attends if 1": "mask.attends",
    "attends, 0 or 1 only": "mask.attends",
    "blocks if nonzero": "mask.blocks",
    "blocks if 1": "mask.blocks",
    "blocks, 0 or 1 only": "mask.blocks",
}
"""What adapters declare of numbers, and what 1 should be seen to mean then."""

_AXES = {"dtype": "", "mode": "mode", "case": "case"}
"""What an observation may depend on, and the word for it where its values do not speak."""

Observations = Sequence[tuple[CaseResult, Phrase]]
Found = dict[str, list[tuple[CaseResult, Phrase]]]
"""Observations by requirement."""


def conventions(
    records: Sequence[Loaded], columns: Sequence[Column], seen: Iterable[Seen]
) -> list[Convention]:
    """One card for each column."""
    required: dict[str, Found] = defaultdict(lambda: defaultdict(list))
    results: dict[str, dict[str, CaseResult]] = defaultdict(dict)
    for column, result, finding in seen:
        if finding.value:
            required[column][finding.requirement].append((result, finding.value))
        if result.entries:
            results[column][result.id] = result
    keys = column_keys(records)
    implementations = {
        keys[index, item.name]: item
        for index, (_, record, _) in enumerate(records)
        for item in declared(record)
    }
    return [
        _card(column, implementations[column.key], required[column.key], experiments)
        for column in columns
        for experiments in [list(results[column.key].values())]
    ]


def _card(
    column: Column,
    implementation: Implementation,
    required: Found,
    experiments: Sequence[CaseResult],
) -> Convention:
    meanings = _meanings(required[_POLARITY], experiments)
    return Convention(
        column=column.key,
        arguments=[_argument(mask, meanings) for mask in implementation.masks],
        causal=implementation.causal,
        alignment=variants(
            [*required[_ALIGNMENT], *_tried(experiments, "causal.alone", _has_fewer_queries)]
        ),
        fully_masked=_masked_rows(required[_FULLY_MASKED], experiments),
        returned_weights=variants(required[_RETURNED]),
    )


def _meanings(
    observed: Observations, experiments: Sequence[CaseResult]
) -> dict[tuple[str, str], list[tuple[CaseResult, Phrase]]]:
    """What each form of each argument was seen to mean, by requirement and by experiment."""
    found: dict[tuple[str, str], list[tuple[CaseResult, Phrase]]] = defaultdict(list)
    for result, value in observed:
        for part in value.parts("meanings"):
            if isinstance(part, Phrase):
                key = part.name("argument"), part.part("form").id
                found[key].append((result, part.part("meaning")))
    for result in experiments:
        for entry in result.entries:
            form = entry.subject.part("form")
            if entry.subject.id == "mask.meaning" and form.name("dtype") in ("", "float32"):
                found[entry.subject.name("argument"), form.id].append((result, entry.value))
    return found


def _argument(mask: MaskInfo, meanings: Mapping[tuple[str, str], Observations]) -> Argument:
    said = _declared_forms(mask)
    forms = [
        Form(form, said.get(form, ""), variants(meanings.get((mask.name, form), [])))
        for form in FORMS
        if form in said or (mask.name, form) in meanings
    ]
    return Argument(mask, forms)


def _declared_forms(mask: MaskInfo) -> dict[str, str]:
    """What each form should be seen to mean, if the declaration is right; ids of phrases."""
    forms = {} if mask.true is None else {"form.bool": f"mask.{mask.true}"}
    if mask.number == "added":
        forms |= {"form.zero-infinite": "mask.added", "form.zero-one": "mask.added"}
    elif mask.number is not None:
        forms["form.zero-one"] = _NUMBERS.get(mask.number, mask.number)
    return forms


def _has_fewer_queries(subject: Phrase) -> bool:
    return subject.part("lengths").id == "lengths.fewer-queries"


def _is_infinite(subject: Phrase) -> bool:
    """Not a large finite number, which blocks nothing where everything is blocked."""
    return subject.part("form").id != "form.zero-large"


def _tried(
    experiments: Sequence[CaseResult], about: str, fits: Callable[[Phrase], bool]
) -> list[tuple[CaseResult, Phrase]]:
    """What experiments showed of subjects with this id that fit; each value once for each."""
    return [
        (result, value)
        for result in experiments
        for value in dict.fromkeys(
            entry.value
            for entry in result.entries
            if entry.subject.id == about and fits(entry.subject)
        )
    ]


def _masked_rows(required: Observations, experiments: Sequence[CaseResult]) -> list[MaskedRow]:
    """The row itself, and separately what comes with it: not every mode has gradients."""
    parts = [(result, value.part("row"), value.part("beside")) for result, value in required]
    tried = _tried(experiments, "fully-masked.output", _is_infinite)
    lost = _tried(experiments, "fully-masked.gradients", _is_infinite)
    rows = []
    for row in variants([*((result, value) for result, value, _ in parts), *tried]):
        after = [
            (result, beside) for result, value, beside in parts if value == row.phrase and beside
        ]
        modes = {result.mode for result, value in tried if value == row.phrase}
        known = [
            (result, Phrase("beside", {"parts": [Phrase("beside.gradients", {"value": value})]}))
            for result, value in lost
            if result.mode in modes
        ]
        rows.append(MaskedRow(row, variants(after or known)))
    return rows


def variants(observed: Observations) -> list[Variant]:
    """Each value with where it was seen, the most frequent first."""
    by_value: dict[Phrase, list[CaseResult]] = defaultdict(list)
    for result, value in observed:
        by_value[value].append(result)
    every = [result for result, _ in observed]
    values = sorted(by_value, key=lambda value: -len(by_value[value]))
    found = []
    for value in values:
        some = by_value[value]
        told = "" if len(values) == 1 else where(some, every)
        if told is None:
            told = "otherwise" if value == values[0] else _listed(some)
        found.append(Variant(say(value), len(some), told, value))
    return found


def where(some: Sequence[CaseResult], every: Sequence[CaseResult]) -> str | None:
    """In which dtypes, modes and cases; only what tells these from the others, if that does."""
    own = {axis: _values(some, axis) for axis in _AXES}
    cases = _cases(some) or _cases(every)
    inside = [item for item in every if all(getattr(item, axis) in own[axis] for axis in _AXES)]
    if len(inside) != len(some):
        return None
    told = []
    for axis, word in _AXES.items():
        differs = set(own[axis]) != set(_values(every, axis))
        # An experiment is no case of its own: it asks the same beside them.
        if differs and (axis != "case" or set(cases) != set(_cases(every))):
            named = cases if axis == "case" else own[axis]
            told.append(f"{word}{'s' if word and len(named) > 1 else ''} {', '.join(named)}")
    return "; ".join(told).strip()


def _cases(results: Sequence[CaseResult]) -> list[str]:
    return [case for case in _values(results, "case") if not case.startswith(PREFIX)]


def _listed(some: Sequence[CaseResult], most: int = 3) -> str:
    listed = [f"{item.dtype}, mode {item.mode}, case {item.case}" for item in some[:most]]
    more = f"; and {len(some) - most} more" if len(some) > most else ""
    return "; ".join(listed) + more


def _values(results: Sequence[CaseResult], axis: str) -> list[str]:
    return list(dict.fromkeys(getattr(result, axis) for result in results))
