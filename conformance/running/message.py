"""What a failure says: it must stand on its own, for somebody who sees nothing but the CI log."""

from __future__ import annotations

import shlex

from conformance.errors import UnknownName
from conformance.records.findings import INFINITE, MAKERS, CaseResult, Figures, Finding
from conformance.requirements import find_requirement
from conformance.requirements.requirement import Requirement
from conformance.text import element, printable

ALONE = (
    "asked alone, a fresh instance conforms: this deviates only after other calls. Something is "
    "kept between calls: a cache, a buffer, a seed, an input that is changed in place"
)


def failure(
    result: CaseResult, spec: str, file: str = "", *, alone: bool = False, command: str = ""
) -> str:
    """Every discrepancy of the item at once; the first line is a summary.

    `file` is where the case lies, if it is not one of the catalogue; `alone` is whether a fresh
    instance, asked for this item only, conforms; `command` runs the item again, if not by `spec`.
    """
    wrong = [
        f for f in result.findings if f.verdict in ("deviates", "error", "crashed", "timed-out")
    ]
    causes = {finding.cause for finding in wrong if finding.cause}
    first = f"{result.verdict}: {', '.join(finding.requirement for finding in wrong)}"
    if alone:
        first += "; only after other calls"
    elif causes:
        first += f"; {'; '.join(sorted(causes))}"
    lines = [first, f"  case {result.case}, {result.dtype}, mode {result.mode}, on {result.device}"]
    prose = _prose(result.case)
    lines += [f"  {prose}"] if prose else []
    lines += ["", ALONE] if alone else []
    told: set[str] = set()
    cause = ""
    for finding in wrong:
        if finding.verdict == "error" and finding.detail in told:
            lines += ["", f"{finding.requirement}: the same error"]
            continue
        told.add(finding.detail)
        lines += _paragraph(finding, said=cause)
        cause = finding.cause or cause
    if any(finding.figures for finding in wrong):
        lines += ["", f"σ: the rounding error that an honest {result.dtype} cannot avoid there"]
    program = command or again(result, spec, file)
    if alone:
        program = f"{program} (alone it conforms: run what comes before it too)"
    lines += ["", f"again: {program}"]
    return printable("\n".join(lines))


def _prose(name: str) -> str:
    """What a case or an experiment asks, in words; "" if it is neither."""
    from conformance.cases.catalogue import catalogue
    from conformance.records.card import TOPICS

    words = {case.id: case.why for case in catalogue()} | {t.id: t.question for t in TOPICS}
    return words.get(name, "")


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


def _paragraph(finding: Finding, said: str) -> list[str]:
    """One finding; `said` is the cause that was told last."""
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
        lines.append(
            f"  worst element {element(worst.array, worst.index)}: got {worst.got}, "
            f"want {worst.want}, noise σ {worst.noise}"
        )
    if finding.where:
        lines.append(f"  deviates only in: {finding.where}")
    if finding.made_by:
        lines.append(f"  made by: {MAKERS[finding.made_by]}")
    if finding.cause:
        lines.append(f"  likely cause: {'the same' if finding.cause == said else finding.cause}")
    return lines
