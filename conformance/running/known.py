"""Find the entry of a baseline that explains a deviation on a randomly drawn problem.

Entries refer to cases of the catalogue by patterns, but a drawn problem is not one of these cases.
It is represented by the cases that have the same features, that is, the same kinds of masks, heads
and scale. If there are no such cases, it is represented by those that have as many of its features
as possible and no others. An entry explains a deviation of the drawn problem if it claims the same
deviation of more than half of the cases that represent it. For example, `mask/*` explains
deviations on problems with a mask, but neither `*/one-key` nor `logits/huge/*` explains deviations
on problems without a mask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from conformance.adapter.base import Adapter
from conformance.cases.catalogue import catalogue
from conformance.causes.diagnose import explain
from conformance.definition.problem import Problem
from conformance.explore.search import features
from conformance.explore.trial import LOOKED_AT, Deviation, Trial
from conformance.records.findings import INFINITE, CaseResult, Figures, Finding
from conformance.records.numbers import LIMIT
from conformance.records.record import Record
from conformance.reports.gate.baseline import Baseline, Entry
from conformance.reports.gate.judging import Claims, agrees
from conformance.requirements.examination import Examination
from conformance.running.provenance import describe, header_of

EVERY_REQUIREMENT = tuple(item.id for item in LOOKED_AT)


class KnownDeviations:
    """The known deviations of one implementation, as listed in a baseline.

    Attributes:
        seen: the number of deviations that each entry has explained.

    Raises:
        BrokenBaseline: a condition uses a variable that is not defined for the implementation.
    """

    def __init__(self, baseline: Baseline, adapter: Adapter, spec: str, device: str) -> None:
        self._adapter = adapter
        described = describe([(adapter, spec)], device)
        header = header_of([adapter], described, [], device, "", command="")
        self._claims = Claims(baseline, Record(header, False, []))
        self.seen: Counter[Entry] = Counter()

    def __call__(self, trial: Trial, deviation: Deviation) -> bool:
        """Return whether an entry explains this deviation, and if so, count it in `seen`."""
        entry = self._entry(trial, deviation)
        if entry is not None:
            self.seen[entry] += 1
        return entry is not None

    def _entry(self, trial: Trial, deviation: Deviation) -> Entry | None:
        name, dtype = self._adapter.name, trial.problem.dtype
        results = [
            CaseResult(name, case, dtype, trial.device, trial.mode.name, [])
            for case in similar(trial.problem)
        ]
        # An exception is an error for every requirement.
        for requirement in [deviation.requirement] if deviation.requirement else EVERY_REQUIREMENT:
            finding = _finding(requirement, deviation)
            claims = Counter(
                entry for result in results for entry in self._claims.of(result, finding)
            )
            for entry, count in claims.items():
                if 2 * count <= len(results):
                    continue
                if entry.cause:
                    finding = _explained(finding, self._adapter, trial)
                if agrees(entry, finding):
                    return entry
        return None


def _finding(requirement: str, deviation: Deviation) -> Finding:
    """Return a deviation as a finding on a requirement, without a cause."""
    if not deviation.requirement:
        return Finding(requirement, "error", deviation.text)
    ratio = min(deviation.ratio, INFINITE)
    figures = Figures(deviation.array, ratio, ratio, 0.0, LIMIT)
    return Finding(requirement, "deviates", deviation.text, figures=figures)


def _explained(finding: Finding, adapter: Adapter, trial: Trial) -> Finding:
    """Return the finding with its cause; to find it, call the implementation again."""
    if finding.cause:
        return finding
    ex = Examination(adapter, trial.case(), trial.problem.dtype, trial.device, trial.mode)
    return msgspec.structs.replace(finding, cause=explain(finding, ex).cause)


def similar(problem: Problem) -> Sequence[str]:
    """Return the ids of the cases that represent a problem; see the docstring of this module."""
    return _similar(features(problem))


@lru_cache(maxsize=256)
def _similar(wanted: frozenset[str]) -> tuple[str, ...]:
    shared = [(case, found) for case, found in _featured() if found <= wanted]
    most = max((len(found) for _, found in shared), default=0)
    return tuple(case for case, found in shared if len(found) == most)


@lru_cache(maxsize=1)
def _featured() -> tuple[tuple[str, frozenset[str]], ...]:
    """Return the id and the features of each case with usual inputs and a defined answer."""
    return tuple(
        (case.id, features(case.problem("float32")))
        for case in catalogue()
        if case.regime is None and case.defined
    )
