"""The convention cards as a page shows them: one block a layer, however many backends it has.

Where backends behave differently, the value that is most frequent comes first and the others say
where they were seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from conformance.records.header import CausalInfo
from conformance.records.phrase import Phrase
from conformance.reports.model import (
    Argument,
    Column,
    Convention,
    MaskedRow,
    Report,
    Variant,
)
from conformance.words import say

Members = Sequence[tuple[str, Sequence[Variant]]]
"""Name of a backend, and what was observed on it."""


class Reading(NamedTuple):
    """A mask argument as the page says it.

    `true`, `ones` and `infinite` are what booleans, 0 and 1, and 0 and −∞ were seen to do; or are
    declared to do where nobody looked, and `agrees` is None there.
    """

    name: str
    axes: list[str]
    true: list[Variant]
    ones: list[Variant]
    infinite: list[Variant]
    agrees: bool | None
    surprises: list[str]


class Card(NamedTuple):
    """A layer, the columns that it has, and its conventions."""

    title: str
    columns: list[Column]
    arguments: list[Reading]
    causal: CausalInfo | None
    alignment: list[Variant]
    fully_masked: list[MaskedRow]
    returned_weights: list[Variant]


def cards(report: Report) -> list[Card]:
    """One for each layer; a layer whose backends declare different things has several."""
    conventions = {item.column: item for item in report.conventions}
    alike: dict[tuple[str, bytes], list[Column]] = defaultdict(list)
    for column in report.columns:
        alike[column.group, _declared(conventions[column.key])].append(column)
    return [
        _card(title, columns, [conventions[column.key] for column in columns])
        for (title, _), columns in alike.items()
    ]


def polarity(found: Sequence[Card]) -> dict[str, list[tuple[Card, list[Reading]]]]:
    """Which arguments attend where True, and which block: the answer that most people look for."""
    answer: dict[str, list[tuple[Card, list[Reading]]]] = {"attends": [], "blocks": []}
    for meaning, told in answer.items():
        for card in found:
            own = [
                argument
                for argument in card.arguments
                if argument.true and argument.true[0].phrase.id == f"mask.{meaning}"
            ]
            if own:
                told.append((card, own))
    return answer


def pooled(members: Members) -> list[Variant]:
    """What several backends were seen to do, as one list."""
    if len(members) == 1:
        return list(members[0][1])
    times: dict[tuple[str, Phrase], int] = defaultdict(int)
    places: dict[tuple[str, Phrase], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, observed in members:
        for item in observed:
            times[item.value, item.phrase] += item.times
            places[item.value, item.phrase][item.where].append(name)
    looked = sum(bool(observed) for _, observed in members)
    found = []
    for value in sorted(times, key=lambda value: -times[value]):
        wheres = places[value]
        everywhere = sum(len(names) for names in wheres.values()) == looked
        if everywhere and len(wheres) == 1:
            where = next(iter(wheres))
        else:
            where = " · ".join(
                ", ".join(names) + (f": {where}" if where else "")
                for where, names in wheres.items()
            )
        found.append(Variant(value[0], times[value], where, value[1]))
    return found


def _card(title: str, columns: list[Column], own: Sequence[Convention]) -> Card:
    names = [column.variant or column.key for column in columns]
    members = list(zip(names, own, strict=True))
    return Card(
        title=title,
        columns=columns,
        arguments=[
            _reading([(name, item.arguments[index]) for name, item in members])
            for index in range(len(own[0].arguments))
        ],
        causal=own[0].causal,
        alignment=pooled([(name, item.alignment) for name, item in members]),
        fully_masked=_masked([(name, item.fully_masked) for name, item in members]),
        returned_weights=pooled([(name, item.returned_weights) for name, item in members]),
    )


def _reading(members: Sequence[tuple[str, Argument]]) -> Reading:
    first = members[0][1]
    declared = {form.form: form.declared for _, item in members for form in item.forms}
    forms = {
        form: pooled([(name, _observed(item, form)) for name, item in members]) for form in declared
    }
    surprises: dict[str, list[str]] = defaultdict(list)
    for form, observed in forms.items():
        for item in observed:
            if declared[form] and item.phrase.id != declared[form]:
                place = f" ({item.where})" if item.where else ""
                surprises[f"{item.value}{place}, declared {say(Phrase(declared[form]))}"].append(
                    _fed(form)
                )

    def seen(form: str) -> list[Variant]:
        meaning = Phrase(declared.get(form, ""))
        return forms.get(form) or (
            [Variant(say(meaning), 0, "declared", meaning)] if meaning else []
        )

    looked = any(forms[form] for form, told in declared.items() if told)
    return Reading(
        name=first.declared.name,
        axes=first.declared.axes,
        true=seen("form.bool"),
        ones=seen("form.zero-one"),
        infinite=seen("form.zero-infinite"),
        agrees=not surprises if looked else None,
        surprises=[f"{' and '.join(fed)}: {told}" for told, fed in surprises.items()],
    )


def _observed(argument: Argument, form: str) -> list[Variant]:
    return next((own.observed for own in argument.forms if own.form == form), [])


def _masked(members: Sequence[tuple[str, Sequence[MaskedRow]]]) -> list[MaskedRow]:
    rows = pooled([(name, [item.row for item in found]) for name, found in members])
    return [
        MaskedRow(
            row,
            pooled(
                [
                    (name, item.consequences)
                    for name, found in members
                    for item in found
                    if item.row.phrase == row.phrase
                ]
            ),
        )
        for row in rows
    ]


def _declared(convention: Convention) -> bytes:
    """Everything that the adapter says."""
    return msgspec.json.encode(
        ([argument.declared for argument in convention.arguments], convention.causal)
    )


def _fed(form: str) -> str:
    return {
        "form.bool": "booleans",
        "form.zero-infinite": "0 and −∞",
        "form.zero-one": "0 and 1",
    }.get(form, form)
