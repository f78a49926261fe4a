"""A run compared with a baseline: which deviations are known, and the judgement at the end."""

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
from conformance.reports.gate.baseline import VERDICTS, read_baseline, to_record
from conformance.reports.gate.judging import Claims, Judgement, judge
from conformance.reports.gate.telling import tell
from conformance.text import printable, relative

KNOWN = "known: "


def is_known(report: pytest.TestReport) -> bool:
    """Return whether the baseline knows the deviations of an item."""
    return getattr(report, "wasxfail", "").removeprefix("reason: ").startswith(KNOWN)


class Gated:
    """The baseline of this run.

    Raises:
        BrokenBaseline: it cannot be read, or names what the run does not have.
    """

    def __init__(self, path: Path, folder: Path, header: Header, *, verbose: bool) -> None:
        # Messages name it as it was given.
        self.baseline = dataclasses.replace(read_baseline(folder / path), path=path)
        self.verbose = verbose
        self._claims = Claims(self.baseline, Record(header, True, []))
        self.judgement: Judgement | None = None

    @property
    def known(self) -> list[KnownDeviation]:
        """Return the entries that apply to this run, for its record."""
        return [to_record(entry) for entry in self._claims.active]

    def unknown(self, result: CaseResult) -> CaseResult:
        """Return the result without the deviations that are known."""
        left = [
            finding
            for finding in result.findings
            if finding.verdict not in VERDICTS or self._claims.knows(result, finding) is None
        ]
        return msgspec.structs.replace(result, findings=left)

    def excuse(self, result: CaseResult) -> str:
        """Return the reasons for known deviations of an item; "" if one of them is not known."""
        wrong = [finding for finding in result.findings if finding.verdict in VERDICTS]
        entries = [self._claims.knows(result, finding) for finding in wrong]
        reasons = {entry.reason.strip() for entry in entries if entry is not None}
        if None in entries or result.verdict not in VERDICTS:
            return ""
        return printable(f"{KNOWN}{'; '.join(sorted(reasons))}")

    def judge(
        self, header: Header, results: Sequence[CaseResult], missing: Sequence[CaseResult]
    ) -> int:
        """Judge the results; return the exit code for pytest."""
        self.judgement = judge(self.baseline, Record(header, not missing, [*results, *missing]))
        return PYTEST_CODES[self.judgement.exit_code]

    def summary(self, terminal: Any, record: Path | None) -> None:
        """Print it as pytest prints; `record` is where the record was written."""
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
