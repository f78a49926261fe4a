"""Requirement x implementation: a count vector in every cell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from conformance.records.findings import count
from conformance.reports.model import Cell, Column, Row
from conformance.reports.totals import Seen, gravest
from conformance.requirements import REQUIREMENTS

_WITHOUT_OUTCOME = "Items without an outcome: the process died, or the run ended before them."
_UNKNOWN = "This version of the suite has no such requirement."


def matrix(columns: Sequence[Column], seen: Iterable[Seen]) -> list[Row]:
    """A row for each requirement, in the suite's order, then for what else was recorded."""
    verdicts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key, _, finding in seen:
        verdicts[finding.requirement][key].append(finding.verdict)
    rows = [
        Row(item.id, item.chapter, item.level, item.sentence, item.why, []) for item in REQUIREMENTS
    ]
    known = {row.requirement for row in rows}
    for name in sorted(verdicts.keys() - known):
        sentence = _WITHOUT_OUTCOME if name == "run" else _UNKNOWN
        rows.append(Row(name, name.split(".")[0], "", sentence, "", []))
    for row in rows:
        for column in columns:
            counts = count(verdicts[row.requirement][column.key])
            row.cells.append(Cell(column.key, counts, gravest(counts)))
    return rows


def levels() -> dict[str, str]:
    """Level of each requirement."""
    return {item.id: item.level for item in REQUIREMENTS}
