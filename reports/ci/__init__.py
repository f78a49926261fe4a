"""Convert records for CI systems: JUnit XML, a badge, annotations, a summary, and a history.

Each item becomes a JUnit test case. It is a failure if it has deviations for which `run --strict`
would fail, an error if an error was raised or the process died or hung, and skipped, with the
reason, if it is unsupported, unavailable or not run, or if all its deviations are known.

Annotations are lines on stdout that GitHub shows beside the code of a pull request; see "Workflow
commands for GitHub Actions". The characters that end a command or a property are escaped, so that a
value cannot begin another command: line feeds everywhere, and colons and commas in properties.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from xml.etree import ElementTree as ET

import msgspec

from conformance.errors import ConformanceError
from conformance.reports.changes import Change
from conformance.reports.ci.history import append
from conformance.reports.ci.summary import KNOWN, MUST, Item, Source, load, markdown
from conformance.reports.wording import failure
from conformance.reports.writing import write_file
from conformance.text import plural, printable, some

STEP_SUMMARY = "GITHUB_STEP_SUMMARY"

MOST = 10
"""The most annotations of one level for a step: GitHub drops any others silently."""


@dataclass(frozen=True)
class Outputs:
    """The options of `write_outputs`: files to write, or None for those that are not wanted.

    Attributes:
        history: file to which a line is appended; a figure of the trend is written beside it.
        summary: file to which Markdown is appended; "" for the file that GitHub specifies.
        annotations: whether to print GitHub annotations.
        previous: an earlier record, or folder of records, to compare with.
        baseline: file of known deviations.
    """

    junit: Path | None = None
    badge: Path | None = None
    history: Path | None = None
    summary: str | None = None
    annotations: bool = False
    previous: Path | None = None
    baseline: Path | None = None


def write_outputs(records: Sequence[Path], wanted: Outputs) -> int:
    """Write all requested outputs, and return an exit code.

    Returns:
        The exit code: nothing verified, incomplete, or OK. Deviations do not affect it; `run
        --strict` and `gate` fail for them, so that a job can show everything before it fails.

    Raises:
        ConformanceError: if a file cannot be read or written, if there is no record, or if GitHub
            does not specify a file for the summary.
    """
    target = _summary_file(wanted.summary)
    source = load(records, wanted.previous, wanted.baseline)
    if wanted.junit is not None:
        write_file(wanted.junit, junit(source))
    if wanted.badge is not None:
        write_file(wanted.badge, msgspec.json.encode(badge(source)) + b"\n")
    if target is not None:
        write_file(target, markdown(source).encode() + b"\n", append=True)
    past = append(wanted.history, source) if wanted.history is not None else []
    if wanted.annotations:
        for line in annotated(source):
            print(line)
    # GitHub ignores lines that are not commands, so prose may follow the annotations.
    paths = (wanted.junit, wanted.badge, target, *past)
    written = ", ".join(str(path) for path in paths if path is not None)
    if written:
        print(printable(f"written: {written}"))
    for absence in {judgement.baseline.absence for judgement in source.judgements} - {""}:
        print(printable(absence))
    return source.outcome


def _summary_file(asked: str | None) -> Path | None:
    if asked is None:
        return None
    name = asked or os.environ.get(STEP_SUMMARY, "")
    if not name:
        raise ConformanceError(f"--summary: there is no {STEP_SUMMARY} here; name a file")
    return Path(name)


# JUnit


def junit(source: Source) -> bytes:
    """Return JUnit XML with one test suite for each implementation."""
    root = ET.Element("testsuites", name="mha-conformance")
    for record, one in source.implementations:
        made = record.header.provenance
        suite = ET.SubElement(root, "testsuite", name=printable(one.name), timestamp=made.created)
        properties = ET.SubElement(suite, "properties")
        versions = {f"version.{name}": version for name, version in one.versions.items()}
        about = {"suite": made.suite, "catalogue": made.catalogue, "device": made.device_model}
        for name, value in (about | {"python": made.python} | versions).items():
            ET.SubElement(properties, "property", name=printable(name), value=printable(value))
        for item in source.items:
            if item.record is record and item.result.implementation == one.name:
                _test_case(suite, item, one.spec)
        _count(suite)
        _add_time(suite, (it.get("time") for it in suite.iter("testcase")))
    _count(root)
    _add_time(root, (it.get("time") for it in root.iter("testsuite")))
    ET.indent(root)
    return ET.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def _add_time(element: ET.Element, times: Iterable[str | None]) -> None:
    """Set the `time` of an element to a sum of times, if any are known; older records have none."""
    known = [float(time) for time in times if time is not None]
    if known:
        element.set("time", f"{sum(known):.3f}")


def _test_case(suite: ET.Element, item: Item, spec: str) -> None:
    result = item.result
    case = ET.SubElement(
        suite,
        "testcase",
        classname=printable(f"{result.implementation}.{result.case.split('/')[0]}"),
        name=printable(f"{result.case}[{result.dtype}-{result.device}-{result.mode}]"),
    )
    if result.seconds:
        case.set("time", f"{result.seconds:.3f}")
    if item.wrong:
        wrong = msgspec.structs.replace(result, findings=list(item.wrong))
        text = failure(wrong, spec, item.record.header)
        raised = sorted({finding.verdict for finding in item.wrong} - {"deviates"})
        kind = "system-out" if not item.fails else "error" if raised else "failure"
        element = ET.SubElement(case, kind)
        element.text = text
        if item.fails:
            element.attrib |= {"type": (*raised, "deviates")[0], "message": text.splitlines()[0]}
    elif item.verdict == KNOWN:
        message = "known: " + ", ".join(finding.requirement for finding in item.known)
        ET.SubElement(case, "skipped", message=printable(message))
    elif item.verdict in ("unsupported", "unavailable", "not-run"):
        ET.SubElement(case, "skipped", message=printable(f"{item.verdict}: {item.reason}"))


def _count(element: ET.Element) -> None:
    """Set the numbers of tests, failures, errors and skipped tests inside an element."""
    for name, tag in (
        ("tests", "testcase"),
        ("failures", "failure"),
        ("errors", "error"),
        ("skipped", "skipped"),
    ):
        element.set(name, str(sum(1 for _ in element.iter(tag))))


# A badge


class Badge(msgspec.Struct, frozen=True):
    """A badge in the format of https://shields.io/badges/endpoint-badge."""

    label: str
    message: str
    color: str
    schemaVersion: int = 1  # noqa: N815


def badge(source: Source) -> Badge:
    """Return a badge with the counts of items by verdict.

    It is red if `run --strict` would fail for deviations or errors that are not known, grey if
    nothing was verified, yellow if something was not verified, and green otherwise.
    """
    totals = source.totals
    counts = ", ".join(f"{number:,} {verdict}" for verdict, number in totals.items())
    if any(item.fails for item in source.items):
        color = "red"
    elif not any(totals.get(verdict) for verdict in ("conforms", "observed", "deviates", KNOWN)):
        color = "lightgrey"
    elif source.open or not all(record.complete for record in source.records):
        color = "yellow"
    else:
        color = "brightgreen"
    return Badge("attention conformance", counts or "nothing verified", color)


# Annotations


def annotated(source: Source) -> list[str]:
    """Return annotations, errors first, then warnings.

    If there are more than `MOST` of one of these levels, its last annotation counts those left out.
    """
    lines: dict[str, list[str]] = {"error": [], "warning": []}
    worse = source.changes.worse if source.changes else []
    regressions = {(change.implementation, change.requirement) for change in worse}
    files = {one.name: _file(one.spec) for _, one in source.implementations}
    for change in source.wrong:
        about = change.implementation, change.requirement
        level = "error" if change.after != "deviates" or change.level in MUST else "warning"
        message = _message(change, source.sentence(change.requirement))
        title = ": ".join(about) + (" (new)" if about in regressions else "")
        file = files.get(change.implementation, "")
        lines[level].append(command(level, message, file=file, title=title))
    for judgement in source.judgements:
        file = _relative(str(judgement.baseline.path))
        for why, entry in judgement.to_edit:
            message = f"{entry.place}: {why}; mha-conformance gate says more"
            title = "the baseline is out of date"
            line = str(entry.line or "")
            lines["error"].append(command("error", message, file=file, line=line, title=title))
    for (name, verdict, reason), items in source.open.items():
        message = f"{plural(items, 'item')}: {reason}"
        lines["warning"].append(command("warning", message, title=f"{name}: {verdict}"))
    shown: list[str] = []
    for level, several in lines.items():
        # Every record has the same baseline.
        unique = list(dict.fromkeys(several))
        if left := len(unique) - (MOST - 1) if len(unique) > MOST else 0:
            message = "the job's summary has all of them"
            unique[MOST - 1 :] = [command(level, message, title=f"and {left} more")]
        shown += unique
    return shown


def command(name: str, message: str, **properties: str) -> str:
    """Return a GitHub workflow command with those properties that are not empty."""
    escaped = [
        f"{key}={_data(value).replace(':', '%3A').replace(',', '%2C')}"
        for key, value in properties.items()
        if value
    ]
    return f"::{name} {','.join(escaped)}::{_data(message)}"


def _data(text: str) -> str:
    text = printable(text).replace("%", "%25")
    return text.replace("\r", "%0D").replace("\n", "%0A")


def _message(change: Change, sentence: str) -> str:
    where = f"{change.after}: {change.extent}, such as {some(change.cases, 3)}"
    lines = [sentence, where, *change.evidence, f"again: {change.command}"]
    return "\n".join(filter(None, lines))


def _file(spec: str) -> str:
    """Return the file of an implementation that was given by path, relative to the repository.

    The result is "" for other implementations and for files outside the repository.
    """
    path, colon, _ = spec.rpartition(":")
    return _relative(path) if colon and path.endswith(".py") else ""


def _relative(path: str) -> str:
    """Return a path relative to the working directory, as GitHub requires; "" if it is outside."""
    pure = PurePath(path)
    if pure.is_absolute():
        try:
            pure = pure.relative_to(Path.cwd())
        except ValueError:
            return ""
    normal = posixpath.normpath(pure.as_posix())
    return "" if normal.startswith("..") else normal
