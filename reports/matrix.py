"""Requirement x implementation: a count vector in every cell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from conformance.records.findings import RUN, count
from conformance.records.header import RequirementInfo
from conformance.reports.model import Cell, Column, Row
from conformance.reports.totals import Seen, gravest

_WITHOUT_OUTCOME = "Items without an outcome: the process died, or the run ended before them."
_UNKNOWN = "The record does not say what this requirement is."


def matrix(
    columns: Sequence[Column], seen: Iterable[Seen], requirements: Sequence[RequirementInfo]
) -> list[Row]:
    """A row for each requirement, in the given order, then for what else was recorded."""
    verdicts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key, _, finding in seen:
        verdicts[finding.requirement][key].append(finding.verdict)
    rows = [
        Row(item.id, item.chapter, item.level, item.sentence, item.why, []) for item in requirements
    ]
    known = {row.requirement for row in rows}
    for name in sorted(verdicts.keys() - known):
        sentence = _WITHOUT_OUTCOME if name == RUN else _UNKNOWN
        rows.append(Row(name, name.split(".")[0], "", sentence, "", []))
    for row in rows:
        for column in columns:
            counts = count(verdicts[row.requirement][column.key])
            row.cells.append(Cell(column.key, counts, gravest(counts)))
    return rows
