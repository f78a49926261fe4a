"""Implementations against each other: no reference, only their answers to the same problems."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from conformance.records.findings import INFINITE, PREFIX
from conformance.records.numbers import UNDERFLOW, Array, ratios
from conformance.records.record import PICTURED
from conformance.reports.columns import column_keys
from conformance.reports.model import Apart, Column, Loaded, Pair

_UNDEFINED = "edge/"
"""Cases whose answer no definition settles."""


class Exchanged(NamedTuple):
    """One implementation's answer to one case, with the reference and its noise."""

    output: Array
    want: Array
    noise: Array


Answers = dict[tuple[str, str], dict[str, Exchanged]]
"""(dtype, case) to column to answer."""


def exchanged(records: Sequence[Loaded]) -> tuple[Answers, list[str]]:
    """The arrays of all records, put in order; and what does not fit together."""
    answers: Answers = defaultdict(dict)
    problems: list[str] = []
    keys = column_keys(records)
    for index, (path, record, arrays) in enumerate(records):
        items = {result.id: result for result in record.results}
        parts: dict[str, dict[str, Array]] = defaultdict(dict)
        for name, array in arrays.items():
            item, _, part = name.rpartition("|")
            # Attention weights, and what experiments showed, are there for figures.
            experiment = item in items and items[item].case.startswith(PREFIX)
            if part not in PICTURED and not experiment:
                parts[item][part] = np.asarray(array, dtype=np.float64)
        for item, own in parts.items():
            result = items.get(item)
            try:
                found = Exchanged(own["output"], own["want"], own["noise"])
            except KeyError as missing:
                problems.append(f"{path.name}: {item} exchanges no {missing}")
                continue
            if result is None:
                problems.append(f"{path.name}: exchanges {item}, about which it has no result")
                continue
            place = answers[result.dtype, result.case]
            if any(not _same_problem(found, other) for other in place.values()):
                told = f"{path.name}: {item} was compared with another reference than the others"
                problems.append(f"{told}; left out of the pairwise comparison")
                continue
            place.setdefault(keys[index, result.implementation], found)
    return answers, problems


def pairs(columns: Sequence[Column], answers: Answers) -> list[Pair]:
    """Every two implementations that answered a common case, by dtype."""
    found = []
    for dtype in _dtypes(answers):
        cases = {
            case: own
            for (other, case), own in answers.items()
            if other == dtype and not case.startswith(_UNDEFINED)
        }
        for one, other in combinations((column.key for column in columns), 2):
            common = {case: own for case, own in cases.items() if one in own and other in own}
            if common:
                found.append(_pair(dtype, one, other, common))
    return found


def _pair(dtype: str, one: str, other: str, common: Mapping[str, Mapping[str, Exchanged]]) -> Pair:
    nan = [case for case, own in common.items() if _has_nan(own[one]) or _has_nan(own[other])]
    sizes = {
        case: _distance(own[one], own[other], dtype)
        for case, own in common.items()
        if case not in nan
    }
    # Of equal ones the first by name: the order of arrays in a file is no order.
    worst = max(sorted(sizes), key=lambda case: sizes[case], default="")
    size = min(sizes.get(worst, 0.0), INFINITE)
    return Pair(dtype, one, other, float(f"{size:.4g}"), worst, len(common), nan)


def apart(columns: Sequence[Column], answers: Answers, limit: float) -> list[Apart]:
    """Cases without an agreed answer, or with NaN: who answers like whom."""
    found: dict[tuple[object, ...], Apart] = {}
    order = [column.key for column in columns]
    dtypes = _dtypes(answers)
    for (dtype, case), own in sorted(answers.items(), key=lambda item: dtypes.index(item[0][0])):
        nan = [key for key in order if key in own and _has_nan(own[key])]
        if not nan and not case.startswith(_UNDEFINED):
            continue
        groups: list[list[str]] = []
        for key in order:
            if key not in own:
                continue
            alike = (group for group in groups if _alike(own[group[0]], own[key], dtype, limit))
            group = next(alike, None)
            if group is None:
                groups.append([key])
            else:
                group.append(key)
        kind = (case, str(groups), str(nan))
        if kind in found:
            found[kind].dtypes.append(dtype)
        else:
            found[kind] = Apart(case, [dtype], groups, nan)
    return list(found.values())


def _distance(one: Exchanged, other: Exchanged, dtype: str) -> float:
    """The largest |a - b| in units of √2 σ."""
    underflow = UNDERFLOW.get(dtype, 0.0)
    size = np.abs(ratios(one.output, other.output, np.sqrt(2.0) * one.noise, underflow))
    return float(size.max(initial=0.0))


def _alike(one: Exchanged, other: Exchanged, dtype: str, limit: float) -> bool:
    """Equal to the noise; NaN is like NaN."""
    nan = np.isnan(one.output)
    if (nan != np.isnan(other.output)).any():
        return False
    finite = [Exchanged(*(array[~nan] for array in item)) for item in (one, other)]
    return _distance(finite[0], finite[1], dtype) <= limit


def _has_nan(answer: Exchanged) -> bool:
    return bool(np.isnan(answer.output).any())


def _same_problem(one: Exchanged, other: Exchanged) -> bool:
    return one.output.shape == other.output.shape and bool(
        np.allclose(one.want, other.want, rtol=1e-9, atol=1e-12, equal_nan=True)
    )


def _dtypes(answers: Iterable[tuple[str, str]]) -> list[str]:
    """In the suite's order, then whatever else there is."""
    have = dict.fromkeys(dtype for dtype, _ in answers)
    return [*(name for name in UNDERFLOW if name in have), *(n for n in have if n not in UNDERFLOW)]
