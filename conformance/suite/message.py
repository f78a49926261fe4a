"""What a failure says: it must stand on its own, for somebody who sees nothing but the CI log."""

from __future__ import annotations

import shlex

from conformance.errors import UnknownName
from conformance.findings import INFINITE, CaseResult, Figures, Finding
from conformance.requirements import find_requirement
from conformance.requirements.requirement import Requirement
from conformance.terminal import printable


def failure(result: CaseResult, spec: str, file: str = "") -> str:
    """Every discrepancy of the item at once; the first line is a summary.

    `file` is where the case lies, if it is not one of the catalogue.
    """
    wrong = [
        f for f in result.findings if f.verdict in ("deviates", "error", "crashed", "timed-out")
    ]
    causes = {finding.cause for finding in wrong if finding.cause}
    first = f"{result.verdict}: {', '.join(finding.requirement for finding in wrong)}"
    if causes:
        first += f"; {'; '.join(sorted(causes))}"
    lines = [first, f"  case {result.case}, {result.dtype}, mode {result.mode}, on {result.device}"]
    told: set[str] = set()
    for finding in wrong:
        if finding.verdict == "error" and finding.detail in told:
            lines += ["", f"{finding.requirement}: the same error"]
            continue
        told.add(finding.detail)
        lines += _paragraph(finding)
    lines += ["", f"again: {again(result, spec, file)}"]
    return printable("\n".join(lines))


def again(result: CaseResult, spec: str, file: str = "") -> str:
    """The command that runs just this item again."""
    command = ["mha-conformance", "run", spec, "--case", result.case, "--dtype", result.dtype]
    command += ["--case-file", file] if file else []
    command += ["--mode", result.mode, "--strict"]
    if result.device != "cpu":
        command += ["--device", result.device]
    return shlex.join(command)


def ratio(value: float) -> str:
    """A ratio for people."""
    return "∞ " if value >= INFINITE else f"{value:.3g}"


def measured(figures: Figures) -> str:
    """Measured against allowed, in noise units."""
    return f"{figures.array}: {ratio(figures.max_ratio)}σ, allowed {figures.limit:.3g}σ"


def known(name: str) -> Requirement | None:
    """The requirement; None where the process was lost, or if another version's record has it."""
    try:
        return find_requirement(name)
    except UnknownName:
        return None


def _paragraph(finding: Finding) -> list[str]:
    lines = ["", finding.requirement]
    requirement = known(finding.requirement)
    if requirement is not None:
        lines = ["", f"{finding.requirement} ({requirement.level})", f"  {requirement.sentence}"]
    if finding.detail:
        lines.append(f"  {finding.verdict}: {finding.detail}")
    if finding.figures is not None:
        lines.append(f"  measured {measured(finding.figures)}")
    if finding.worst is not None:
        worst = finding.worst
        index = ", ".join(map(str, worst.index))
        lines.append(
            f"  worst element {worst.array}[{index}]: got {worst.got}, want {worst.want}, "
            f"noise σ {worst.noise}"
        )
    if finding.cause:
        lines.append(f"  likely cause: {finding.cause}")
    return lines
