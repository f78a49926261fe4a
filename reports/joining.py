"""Join records into one Report. Sees records only: no framework, no adapter, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.reports.accuracy import accuracy, limit
from conformance.reports.columns import columns, requirements_of, sources
from conformance.reports.conventions import conventions
from conformance.reports.deviations import deviations
from conformance.reports.experiments import experiment_cards, handed
from conformance.reports.matrix import matrix
from conformance.reports.model import SCHEMA, Loaded, Report
from conformance.reports.pairwise import apart, exchanged, pairs
from conformance.reports.totals import totals
from conformance.reports.trend import timelines, trends
from conformance.reports.unanswered import not_verified, unsupported


def build(
    records: Sequence[Loaded],
    expected: Sequence[str] = (),
    problems: Sequence[str] = (),
    earlier: Sequence[Loaded] = (),
    versions: Sequence[Loaded] = (),
) -> Report:
    """The report of these records.

    Args:
        records: as `load_records` gives them; shown in the order of `expected`, then as given.
        expected: names of records that must be there; those that are not are named.
        problems: lines about records that could not be used.
        earlier: records of the same implementations that were made before these.
        versions: records of the same implementations with other versions of their libraries.
    """
    order = {name: place for place, name in enumerate(expected)}
    records = sorted(records, key=lambda item: order.get(item[1].header.name, len(order)))
    found, seen = columns(records)
    origins = sources(records)
    asked = requirements_of(records)
    answers, unfit = exchanged(records)
    measured = accuracy(found, seen)
    allowed = limit(measured)
    return Report(
        schema=SCHEMA,
        created=max((source.provenance.created for source in origins), default=""),
        limit=allowed,
        totals=totals(found, origins, seen),
        columns=found,
        conventions=conventions(records, found, seen),
        cards=experiment_cards(records, found),
        handed=handed(records, found),
        matrix=matrix(found, seen, asked),
        accuracy=measured,
        pairs=pairs(found, answers),
        apart=apart(found, answers, allowed),
        deviations=deviations(found, seen, asked),
        unsupported=unsupported(found, seen),
        not_verified=not_verified(found, origins, seen, expected, [*problems, *unfit]),
        sources=origins,
        trends=trends(records, earlier),
        timelines=timelines(records, versions),
    )
