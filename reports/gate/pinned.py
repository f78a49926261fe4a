"""Pinned conventions: entries of a convention card that must not change.

A convention is not a deviation, so a change of it in a new version would go unnoticed. A baseline
may therefore store what an experiment observed, by implementation, experiment and
"dtype:device:mode":

    [pinned.mine."probe/leaks"."float32:cpu:eval"]
    "leak(argument=mask, form=form.bool, input=input.key, number=number.nan)" = "leak.hidden"

`baseline update` fills in an empty table, `[pinned.mine."probe/leaks"]`, for all modes, and updates
values that have changed. Entries that are not pinned may appear, change and disappear.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import tomlkit

from conformance.errors import BrokenBaseline
from conformance.records.findings import NOT_VERIFIED, RUN, CaseResult
from conformance.records.record import Record
from conformance.reports.gate.coverage import edited, is_narrowed

Pins = Mapping[str, Mapping[str, Mapping[str, Mapping[str, str]]]]
"""A value's text by implementation, experiment, "dtype:device:mode" and text of the subject."""

NOT_OBSERVED, NOT_WRITTEN = "not observed", "not written yet: run baseline update"


class Change(NamedTuple):
    """A pinned entry whose value has changed, or an experiment without any pinned entries yet.

    `pinned` and `now` are the texts of phrases, but `now` is `NOT_OBSERVED` if the record has no
    such entry. For an experiment without pinned entries, `now` is `NOT_WRITTEN`, and `place`,
    `subject` and `pinned` are "".
    """

    implementation: str
    experiment: str
    place: str
    subject: str
    pinned: str
    now: str


def read_pins(table: Any) -> Pins:
    """Return the pins in the `pinned` table; raises `BrokenBaseline` if they are invalid."""
    try:
        return msgspec.convert(table, dict[str, dict[str, dict[str, dict[str, str]]]])
    except msgspec.ValidationError as error:
        raise BrokenBaseline(
            'pinned holds values of entries, such as [pinned.mine."probe/leaks"."float32:cpu:eval"]'
            f" ({error})"
        ) from error


def changes(pins: Pins, record: Record) -> Iterator[Change]:
    """Yield the pinned entries whose value in a record differs, and experiments without entries.

    Experiments on other devices, and those that a narrowed run left out or that have no outcome,
    are skipped.
    """
    for name in {one.name for one in record.header.implementations} & pins.keys():
        for experiment, places in pins[name].items():
            if not places:
                yield Change(name, experiment, "", "", "", NOT_WRITTEN)
            results = _results(record, name, experiment)
            for place, expected in places.items():
                on_device = place.split(":")[1:2] == [record.header.provenance.device]
                if not on_device or (place not in results and is_narrowed(record)):
                    continue
                result = results.get(place)
                if result is not None and _is_open(result):
                    continue
                now = {} if result is None else _texts(result)
                for subject, value in expected.items():
                    if now.get(subject) != value:
                        there = now.get(subject, NOT_OBSERVED)
                        yield Change(name, experiment, place, subject, value, there)


def repinned(text: str, pins: Pins, record: Record) -> str:
    """Return the text of a baseline with its pins updated to the values in a record."""

    def edit(document: Any) -> bool:
        changed = False
        for name in {one.name for one in record.header.implementations} & pins.keys():
            for experiment, places in pins[name].items():
                table = document["pinned"][name][experiment]
                for place, result in _results(record, name, experiment).items():
                    now = _texts(result)
                    if _is_open(result) or (places and place not in places):
                        continue
                    kept = {it: now[it] for it in places.get(place, now) if it in now}
                    if kept and kept != places.get(place):
                        table[place] = tomlkit.item(kept)
                        changed = True
        return changed

    return edited(text, edit) if any(pins.values()) else text


def _results(record: Record, name: str, experiment: str) -> dict[str, CaseResult]:
    return {
        f"{result.dtype}:{result.device}:{result.mode}": result
        for result in record.results
        if (result.implementation, result.case) == (name, experiment)
    }


def _is_open(result: CaseResult) -> bool:
    return any(one.requirement == RUN or one.verdict in NOT_VERIFIED for one in result.findings)


def _texts(result: CaseResult) -> dict[str, str]:
    return {str(entry.subject): str(entry.value) for entry in result.entries}
