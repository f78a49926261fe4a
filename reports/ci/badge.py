"""A badge: an endpoint for shields.io, with a count vector and never one percentage."""

from __future__ import annotations

import msgspec

from conformance.reports.ci.source import KNOWN, Source


class Badge(msgspec.Struct, frozen=True):
    """As https://shields.io/badges/endpoint-badge has it."""

    label: str
    message: str
    color: str
    schemaVersion: int = 1  # noqa: N815


def badge(source: Source) -> Badge:
    """Red if something is wrong that is not known, yellow if something was not found out."""
    totals = source.totals
    told = ", ".join(f"{number:,} {verdict}" for verdict, number in totals.items())
    if any(item.fails for item in source.items):
        color = "red"
    elif not any(totals.get(verdict) for verdict in ("conforms", "observed", "deviates", KNOWN)):
        color = "lightgrey"
    elif source.open or not all(record.complete for record in source.records):
        color = "yellow"
    else:
        color = "brightgreen"
    return Badge("attention conformance", told or "nothing verified", color)
