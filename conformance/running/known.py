"""Find which entries of a baseline explain a deviation on a randomly drawn problem.

Entries name cases of the catalogue, and a drawn problem is not one of them.

An entry names cases by patterns. The cases of the catalogue that have the features of the drawn
problem stand for it: the same kinds of masks, heads and scale, or, if there are none, as many of
these features as any case has. An entry explains a deviation of the drawn problem if it claims the
same deviation of more than half of them. So `mask/*` explains what a search finds with a mask, and
neither `*/one-key` nor `logits/huge/*` explains what it finds without one.
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
from conformance.explore.classes import features
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
    """The deviations of one implementation that a baseline knows.

    Attributes:
        seen: how often each entry has explained a deviation.

    Raises:
        BrokenBaseline: a condition asks for what is not known of the implementation.
    """

    def __init__(self, baseline: Baseline, adapter: Adapter, spec: str, device: str) -> None:
        self._adapter = adapter
        described = describe([(adapter, spec)], device)
        header = header_of([adapter], described, [], device, "", command="")
        self._claims = Claims(baseline, Record(header, False, []))
        self.seen: Counter[Entry] = Counter()

    def __call__(self, trial: Trial, deviation: Deviation) -> bool:
        """Return whether an entry explains this deviation, and count it."""
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
        # An exception is an error of whatever is asked.
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
    """Return the finding of a deviation, without a cause."""
    if not deviation.requirement:
        return Finding(requirement, "error", deviation.text)
    ratio = min(deviation.ratio, INFINITE)
    figures = Figures(deviation.array, ratio, ratio, 0.0, LIMIT)
    return Finding(requirement, "deviates", deviation.text, figures=figures)


def _explained(finding: Finding, adapter: Adapter, trial: Trial) -> Finding:
    """Return the finding with its cause; the implementation is called again to find it."""
    if finding.cause:
        return finding
    ex = Examination(adapter, trial.case(), trial.problem.dtype, trial.device, trial.mode)
    return msgspec.structs.replace(finding, cause=explain(finding, ex).cause)


def similar(problem: Problem) -> Sequence[str]:
    """Return the ids of the cases that stand for a problem; no case has magnitudes of its own."""
    return _similar(features(problem))


@lru_cache(maxsize=256)
def _similar(wanted: frozenset[str]) -> tuple[str, ...]:
    shared = [(case, found) for case, found in _featured() if found <= wanted]
    most = max((len(found) for _, found in shared), default=0)
    return tuple(case for case, found in shared if len(found) == most)


@lru_cache(maxsize=1)
def _featured() -> tuple[tuple[str, frozenset[str]], ...]:
    """Return the id and the features of each case of the catalogue whose inputs are the usual."""
    return tuple(
        (case.id, features(case.problem("float32")))
        for case in catalogue()
        if case.regime is None and case.defined
    )
