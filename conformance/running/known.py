"""Compare deviations of a run, or of randomly drawn problems, with the known ones in a baseline.

Entries of a baseline refer to cases of the catalogue by patterns, but a randomly drawn problem is
not one of these cases. It is represented by the cases that have the same features, that is, the
same kinds of masks, heads and scale. If there are no such cases, the problem is represented by
those that have the most of its features and no others. An entry explains a deviation of the drawn
problem if the entry states the same deviation and its patterns match more than half of the cases
that represent the problem. For example, `mask/*` explains deviations on problems with a mask, but
neither `*/one-key` nor `logits/huge/*` explains deviations on problems without a mask.
"""

from __future__ import annotations

import dataclasses
import io
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from conformance.adapter.base import Adapter
from conformance.cases.catalogue import catalogue
from conformance.causes.diagnose import explain
from conformance.definition.problem import Problem
from conformance.errors import PYTEST_CODES
from conformance.explore.search import features
from conformance.explore.trial import LOOKED_AT, Trial, TrialDeviation
from conformance.records.findings import INFINITE, CaseResult, Figures, Finding
from conformance.records.header import Header, KnownDeviation
from conformance.records.numbers import LIMIT
from conformance.records.record import Record
from conformance.reports.gate import tell
from conformance.reports.gate.baseline import (
    VERDICTS,
    Baseline,
    BaselineEntry,
    read_baseline,
    to_record,
)
from conformance.reports.gate.judging import Claims, Judgement, agrees, judge
from conformance.requirements.examination import Examination
from conformance.running.provenance import describe, header_of
from conformance.text import relative


class Gated:
    """The baseline with which a run is compared, and the judgement at the end of the run.

    `path` is the file of the baseline, relative to `folder`. If `verbose` is true, the summary
    shows all deviations, or else only the first of each kind.

    Raises:
        BrokenBaseline: the baseline cannot be read, or a condition in it uses a variable that the
            run does not define.
    """

    def __init__(self, path: Path, folder: Path, header: Header, *, verbose: bool) -> None:
        # In messages, use the path as the user wrote it.
        self.baseline = dataclasses.replace(read_baseline(folder / path), path=path)
        self.verbose = verbose
        self._claims = Claims(self.baseline, Record(header, True, []))
        self.judgement: Judgement | None = None

    @property
    def known(self) -> list[KnownDeviation]:
        """The entries of the baseline that apply to this run, as its record stores them."""
        return [to_record(entry) for entry in self._claims.active]

    def unknown(self, result: CaseResult) -> CaseResult:
        """Return the result without findings that are known deviations."""
        left = [
            finding
            for finding in result.findings
            if finding.verdict not in VERDICTS or self._claims.knows(result, finding) is None
        ]
        return replace(result, findings=left)

    def excuse(self, result: CaseResult) -> str:
        """Return the reasons for an item's deviations and errors if all are in the baseline.

        Return "" if the item has no deviations or errors, if one of them is not in the baseline, or
        if the item crashed or timed out.
        """
        wrong = [finding for finding in result.findings if finding.verdict in VERDICTS]
        entries = [self._claims.knows(result, finding) for finding in wrong]
        reasons = {entry.reason.strip() for entry in entries if entry is not None}
        if None in entries or result.verdict not in VERDICTS:
            return ""
        return "; ".join(sorted(reasons))

    def judge(
        self, header: Header, results: Sequence[CaseResult], missing: Sequence[CaseResult]
    ) -> int:
        """Compare the results with the baseline and return the exit code for pytest.

        `missing` has a result for each planned item that was not examined.
        """
        self.judgement = judge(self.baseline, Record(header, not missing, [*results, *missing]))
        return PYTEST_CODES[self.judgement.exit_code]

    def summary(self, terminal: Any, record: Path | None) -> None:
        """Print the judgement, if there is one, to pytest's terminal.

        `record` is the path of the record that was written, or None.
        """
        from rich.console import Console

        if self.judgement is None:
            return
        writer = terminal._tw
        file = io.StringIO()
        console = Console(
            file=file,
            force_terminal=writer.hasmarkup,
            no_color=not writer.hasmarkup,
            highlight=False,
            width=writer.fullwidth,
        )
        judged = ["--from-record", relative(record)] if record is not None else []
        console.print(tell(self.judgement, verbose=self.verbose, judged=judged), soft_wrap=True)
        terminal.write(file.getvalue(), flush=True)


# Problems drawn at random


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
        self.seen: Counter[BaselineEntry] = Counter()

    def __call__(self, trial: Trial, deviation: TrialDeviation) -> bool:
        """Return whether an entry explains this deviation, and if so, count the entry in `seen`."""
        entry = self._entry(trial, deviation)
        if entry is not None:
            self.seen[entry] += 1
        return entry is not None

    def _entry(self, trial: Trial, deviation: TrialDeviation) -> BaselineEntry | None:
        name, dtype = self._adapter.name, trial.problem.dtype
        results = [
            CaseResult(name, case, dtype, trial.device, trial.mode.name, [])
            for case in similar(trial.problem)
        ]
        # An exception is an error for every requirement.
        every = [item.id for item in LOOKED_AT]
        for requirement in [deviation.requirement] if deviation.requirement else every:
            finding = _finding(requirement, deviation)
            claims = Counter(
                entry for result in results for entry in self._claims.of(result, finding)
            )
            for entry, count in claims.items():
                if 2 * count <= len(results):
                    continue
                if entry.cause and not finding.cause:
                    finding = self._explained(finding, trial)
                if agrees(entry, finding):
                    return entry
        return None

    def _explained(self, finding: Finding, trial: Trial) -> Finding:
        """Return the finding with its cause, which is found by calling the implementation again.

        The cause is empty if no known mistake explains the finding.
        """
        dtype = trial.problem.dtype
        ex = Examination(self._adapter, trial.case(), dtype, trial.device, trial.mode)
        return replace(finding, cause=explain(finding, ex).cause)


def _finding(requirement: str, deviation: TrialDeviation) -> Finding:
    """Return a deviation or an exception as a finding on a requirement, without a cause."""
    if not deviation.requirement:
        return Finding(requirement, "error", deviation.text)
    ratio = min(deviation.ratio, INFINITE)
    figures = Figures(deviation.array, ratio, ratio, 0.0, LIMIT)
    return Finding(requirement, "deviates", deviation.text, figures=figures)


def similar(problem: Problem) -> Sequence[str]:
    """Return the ids of the cases that represent a problem, as this module's docstring explains.

    These cases share the most features with the problem, and have none that it lacks.
    """
    return _similar(features(problem))


@lru_cache(maxsize=256)
def _similar(wanted: frozenset[str]) -> tuple[str, ...]:
    shared = [(case, found) for case, found in _featured() if found <= wanted]
    most = max((len(found) for _, found in shared), default=0)
    return tuple(case for case, found in shared if len(found) == most)


@lru_cache(maxsize=1)
def _featured() -> tuple[tuple[str, frozenset[str]], ...]:
    """Return the id and the features of each case that can represent a drawn problem.

    Such a case has ordinary inputs and an answer that the definition determines.
    """
    return tuple(
        (case.id, features(case.problem("float32")))
        for case in catalogue()
        if case.regime is None and case.defined
    )
