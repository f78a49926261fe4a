"""One implementation over the versions of its library, and what changed from one to the next."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from packaging.version import InvalidVersion, Version

from conformance.records.header import Implementation
from conformance.records.record import Record
from conformance.reports.columns import column_keys, declared
from conformance.reports.model import Loaded, Trend
from conformance.reports.trend import points

_BESIDE = ("numpy", "python")
"""What a library runs on: told where it differs between records."""


def timelines(records: Sequence[Loaded], others: Sequence[Loaded]) -> list[Trend]:
    """Those implementations of `records` that `others` have with other versions, oldest first."""
    keys = column_keys(records)
    found = []
    for index, own in enumerate(records):
        device = own[1].header.provenance.device
        for implementation in declared(own[1]):
            name = implementation.name
            beside = [
                item
                for item in others
                if item[1].header.provenance.device == device and _find(item[1], name)
            ]
            if beside:
                ordered = sorted([own, *beside], key=lambda item: _order(item[1], name))
                found.append(_told(Trend(keys[index, name], points(ordered, name)), ordered))
    return found


def _told(trend: Trend, records: Sequence[Loaded]) -> Trend:
    """With NumPy and Python among the versions, if they differ."""
    beside = [_beside(record) for _, record, _ in records]
    differ = [name for name in _BESIDE if len({own.get(name) for own in beside}) > 1]
    told = [
        msgspec.structs.replace(
            point, versions=point.versions | {name: own[name] for name in differ if name in own}
        )
        for point, own in zip(trend.points, beside, strict=True)
    ]
    return Trend(trend.column, told)


def _beside(record: Record) -> dict[str, str]:
    made = record.header.provenance
    found = {name: made.packages[name] for name in ("numpy",) if name in made.packages}
    return found | {"python": ".".join(made.python.split(".")[:2])}


def _order(record: Record, name: str) -> tuple[Any, ...]:
    """By the library's own version, then its framework's, NumPy's and Python's."""
    found = _find(record, name)
    versions = found.versions if found else {}
    # A framework's versions come first there, the library's own after it.
    own = [_version(versions[package]) for package in reversed(versions)]
    beside = _beside(record)
    return own, _version(beside.get("numpy", "0")), _version(beside["python"]), record.header.name


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        numbers = re.findall(r"\d+", text)
        return Version(".".join(numbers) or "0")


def _find(record: Record, name: str) -> Implementation | None:
    return next((item for item in record.header.implementations if item.name == name), None)
