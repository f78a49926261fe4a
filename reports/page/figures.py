"""The attention patterns behind deviations, where a record has them: drawn once for each item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from conformance.errors import ConformanceError
from conformance.records.findings import CaseResult, item_id, of_weights
from conformance.records.numbers import UNDERFLOW, Array
from conformance.records.record import PICTURED
from conformance.reports.figures.drawing import again, svg
from conformance.reports.figures.picture import Picture, Subject, picture
from conformance.reports.model import Deviation, Loaded, Report


class Figure(NamedTuple):
    """What a panel shows: a drawing, or the anchor of the panel that has the same one."""

    svg: str
    elsewhere: str
    command: str


def figures(report: Report, records: Sequence[Loaded]) -> dict[str, Figure]:
    """Figure of each deviation of attention weights, by the deviation's id.

    That of its evidence, if the record has it, else that of another of its items.
    """
    found: dict[str, Figure] = {}
    drawn: dict[tuple[str, str], str] = {}
    known = _pictured(records)
    for deviation in report.deviations:
        if not of_weights(deviation.figures, deviation.worst):
            continue
        column = report.column(deviation.column)
        own = known.get((column.record, column.name, column.device), {})
        evidence = item_id(
            column.name, deviation.case, deviation.dtype, deviation.device, deviation.mode
        )
        told = [name for name, (result, _) in own.items() if _tells(result, deviation)]
        chosen = evidence if evidence in told else next(iter(told), "")
        if not chosen:
            continue
        result, arrays = own[chosen]
        try:
            shown = _picture(result, arrays)
        except ConformanceError:
            # Arrays that do not fit together: the record was not made by this suite.
            continue
        command = again(shown, column.spec, "heads.svg")
        place = drawn.setdefault((column.key, chosen), deviation.id)
        if place != deviation.id:
            found[deviation.id] = Figure("", place, command)
        else:
            drawing = svg(shown, name=f"{deviation.id}-heads", alone=False)
            found[deviation.id] = Figure(drawing, "", command)
    return found


Pictured = dict[str, tuple[CaseResult, Mapping[str, Array]]]
"""Item id to the item and its arrays."""


def _pictured(records: Sequence[Loaded]) -> dict[tuple[str, str, str], Pictured]:
    """By record, implementation and device: the items whose attention weights are there."""
    found: dict[tuple[str, str, str], Pictured] = {}
    for _, record, arrays in records:
        if not arrays:
            continue
        for result in record.results:
            own = {part: arrays.get(f"{result.id}|{part}") for part in PICTURED}
            if all(array is not None for array in own.values()):
                key = (record.header.name, result.implementation, record.header.provenance.device)
                found.setdefault(key, {})[result.id] = (result, own)  # type: ignore[assignment]
    return found


def _tells(result: CaseResult, deviation: Deviation) -> bool:
    """Whether the item is one of those that the deviation gathers."""
    return (
        result.case in deviation.cases
        and result.dtype in deviation.dtypes
        and result.mode in deviation.modes
        and any(
            (finding.requirement, finding.verdict, finding.cause)
            == (deviation.requirement, deviation.verdict, deviation.cause)
            for finding in result.findings
        )
    )


def _picture(result: CaseResult, arrays: Mapping[str, Array]) -> Picture:
    got, want, noise, blocked = (np.asarray(arrays[part], dtype=np.float64) for part in PICTURED)
    return picture(
        Subject(result.implementation, result.case, result.dtype, result.mode, result.device),
        got=got,
        want=want,
        noise=noise,
        blocked=blocked != 0,
        underflow=UNDERFLOW.get(result.dtype, 0.0),
    )
