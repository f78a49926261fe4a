"""Compare a run with a baseline: distinguish known from new deviations, and judge the results."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from conformance.errors import PYTEST_CODES
from conformance.records.findings import CaseResult
from conformance.records.header import Header, KnownDeviation
from conformance.records.record import Record
from conformance.reports.gate import tell
from conformance.reports.gate.baseline import VERDICTS, read_baseline, to_record
from conformance.reports.gate.judging import Claims, Judgement, judge
from conformance.text import printable, relative

KNOWN = "known: "


def is_known(report: pytest.TestReport) -> bool:
    """Return whether a test report is about an item whose deviations are all in the baseline."""
    return getattr(report, "wasxfail", "").removeprefix("reason: ").startswith(KNOWN)


class Gated:
    """The baseline with which a run is compared, and the judgement at the end of the run.

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
        """The entries of the baseline that apply to this run, for its record."""
        return [to_record(entry) for entry in self._claims.active]

    def unknown(self, result: CaseResult) -> CaseResult:
        """Return the result without findings that are known deviations."""
        left = [
            finding
            for finding in result.findings
            if finding.verdict not in VERDICTS or self._claims.knows(result, finding) is None
        ]
        return msgspec.structs.replace(result, findings=left)

    def excuse(self, result: CaseResult) -> str:
        """Return the reasons for an item's deviations if all of them are in the baseline.

        Return "" if there are no deviations, or if one is not in the baseline.
        """
        wrong = [finding for finding in result.findings if finding.verdict in VERDICTS]
        entries = [self._claims.knows(result, finding) for finding in wrong]
        reasons = {entry.reason.strip() for entry in entries if entry is not None}
        if None in entries or result.verdict not in VERDICTS:
            return ""
        return printable(f"{KNOWN}{'; '.join(sorted(reasons))}")

    def judge(
        self, header: Header, results: Sequence[CaseResult], missing: Sequence[CaseResult]
    ) -> int:
        """Compare the results with the baseline and return the exit code for pytest."""
        self.judgement = judge(self.baseline, Record(header, not missing, [*results, *missing]))
        return PYTEST_CODES[self.judgement.exit_code]

    def summary(self, terminal: Any, record: Path | None) -> None:
        """Print the judgement to pytest's terminal; `record` is the path of the record, if any."""
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
