"""The convention card: what is declared about masks, and what was observed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from conformance.card import Entry
from conformance.findings import CaseResult
from conformance.record import Implementation, MaskInfo
from conformance.report.columns import column_keys, declared
from conformance.report.model import (
    Argument,
    Column,
    Convention,
    Form,
    Loaded,
    MaskedRow,
    Variant,
)
from conformance.report.totals import Seen
from conformance.requirements.observed import ALIGNMENT, FULLY_MASKED, RETURNED
from conformance.requirements.polarity import POLARITY

_MEANING = re.compile(r"(\S+?)\[([^\]\s]+)\]=(\S+)")

_MASKS = "probe/masks"
_FORMS = {"bool": "bool", "float32 0/1": "0/1", "float32 0/−inf": "0/-inf"}
"""Forms of the experiment, and what the requirement calls them: it asks of some shapes only."""

_AXES = {"dtype": "", "mode": "mode", "case": "case"}
"""What an observation may depend on, and the word for it where its values do not speak."""

Observations = Sequence[tuple[CaseResult, str]]


def conventions(
    records: Sequence[Loaded], columns: Sequence[Column], seen: Iterable[Seen]
) -> list[Convention]:
    """One card for each column."""
    observed: dict[tuple[str, str], list[tuple[CaseResult, str]]] = defaultdict(list)
    probed: dict[str, list[tuple[CaseResult, str]]] = defaultdict(list)
    every = list(seen)
    for column, result, finding in every:
        if finding.value:
            observed[column, finding.requirement].append((result, finding.value))
    for column, result, _ in every:
        if result.case == _MASKS and not observed[column, POLARITY.id]:
            probed[column].append((result, _as_polarity(result.entries)))
    for column, found in probed.items():
        observed[column, POLARITY.id] = found
    keys = column_keys(records)
    implementations = {
        keys[index, item.name]: item
        for index, (_, record, _) in enumerate(records)
        for item in declared(record)
    }
    return [
        _card(
            column,
            implementations[column.key],
            {
                item.id: observed[column.key, item.id]
                for item in (POLARITY, ALIGNMENT, FULLY_MASKED, RETURNED)
            },
        )
        for column in columns
    ]


def _as_polarity(entries: Sequence[Entry]) -> str:
    """What an experiment showed, in the form in which the requirement says it."""
    told = []
    for entry in entries:
        argument, _, form = entry.subject.partition(", ")
        if form in _FORMS:
            told.append(f"{argument}[{_FORMS[form]}]={entry.value.split()[0]}")
    return " ".join(told)


def _card(
    column: Column, implementation: Implementation, observed: Mapping[str, Observations]
) -> Convention:
    meanings: dict[tuple[str, str], list[tuple[CaseResult, str]]] = defaultdict(list)
    for result, value in observed[POLARITY.id]:
        for argument, form, meaning in _MEANING.findall(value):
            meanings[argument, form].append((result, meaning))
    arguments = []
    for mask in implementation.masks:
        forms = [
            Form(form, told, variants(meanings[mask.name, form]))
            for form, told in _declared_forms(mask).items()
        ]
        arguments.append(Argument(mask, forms))
    return Convention(
        column=column.key,
        arguments=arguments,
        causal=implementation.causal,
        alignment=variants(observed[ALIGNMENT.id]),
        fully_masked=_masked_rows(observed[FULLY_MASKED.id]),
        returned_weights=variants(observed[RETURNED.id]),
    )


def _declared_forms(mask: MaskInfo) -> dict[str, str]:
    """What each form should be seen to mean, if the declaration is right."""
    forms = {} if mask.true is None else {"bool": mask.true}
    if mask.number == "added":
        forms |= {"0/-inf": "added", "0/1": "added"}
    elif mask.number is not None:
        forms["0/1"] = mask.number.removesuffix(" if nonzero")
    return forms


def _masked_rows(observed: Observations) -> list[MaskedRow]:
    """The row itself, and separately what comes with it: not every mode has gradients."""
    parts = [(result, *value.partition("; ")[::2]) for result, value in observed]
    rows = []
    for row in variants([(result, value) for result, value, _ in parts]):
        after = [(result, rest) for result, value, rest in parts if value == row.value and rest]
        rows.append(MaskedRow(row, variants(after)))
    return rows


def variants(observed: Observations) -> list[Variant]:
    """Each value with where it was seen, the most frequent first."""
    by_value: dict[str, list[CaseResult]] = defaultdict(list)
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
        found.append(Variant(value, len(some), told))
    return found


def where(some: Sequence[CaseResult], every: Sequence[CaseResult]) -> str | None:
    """In which dtypes, modes and cases; only what tells these from the others, if that does."""
    own = {axis: _values(some, axis) for axis in _AXES}
    inside = [item for item in every if all(getattr(item, axis) in own[axis] for axis in _AXES)]
    if len(inside) != len(some):
        return None
    told = []
    for axis, word in _AXES.items():
        if set(own[axis]) != set(_values(every, axis)):
            told.append(
                f"{word}{'s' if word and len(own[axis]) > 1 else ''} {', '.join(own[axis])}"
            )
    return "; ".join(told).strip()


def _listed(some: Sequence[CaseResult], most: int = 3) -> str:
    listed = [f"{item.dtype}, mode {item.mode}, case {item.case}" for item in some[:most]]
    more = f"; and {len(some) - most} more" if len(some) > most else ""
    return "; ".join(listed) + more


def _values(results: Sequence[CaseResult], axis: str) -> list[str]:
    return list(dict.fromkeys(getattr(result, axis) for result in results))
