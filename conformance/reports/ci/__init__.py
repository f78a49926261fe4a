"""Convert records for CI systems: JUnit XML, a badge, annotations, a summary, and a history.

Each item becomes a JUnit test case. It is a failure if it has deviations for which `run --strict`
would fail, an error if an error was raised or the process died or hung, and skipped, with the
reason, if it is unsupported, unavailable or not run, or if everything wrong with it is known.

Annotations are lines on stdout that GitHub shows beside the code of a pull request; see "Workflow
commands for GitHub Actions". The characters that end a command or a property are escaped, so that a
value cannot begin another command: line feeds everywhere, and colons and commas in properties.

The history has a line of JSON for each run, with counts of items instead of findings. It is small
and does not depend on the records it was made from. A CI system keeps the file.
"""

from __future__ import annotations

import os
import posixpath
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

import msgspec

from conformance.errors import ConformanceError
from conformance.reports.ci.summary import KNOWN, MUST, SummaryItem, SummarySource, load, markdown
from conformance.reports.wording import SYMBOLS, failure
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


def junit(source: SummarySource) -> bytes:
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
        _total(suite, "testcase")
    _total(root, "testsuite")
    ET.indent(root)
    return ET.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def _test_case(suite: ET.Element, item: SummaryItem, spec: str) -> None:
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


def _total(element: ET.Element, part: str) -> None:
    """Set attributes of an element: the numbers of tests in it, by result, and their total time.

    The time is summed over the inner elements with the tag `part`, and is not set if none of them
    has a time.
    """
    for name, tag in (
        ("tests", "testcase"),
        ("failures", "failure"),
        ("errors", "error"),
        ("skipped", "skipped"),
    ):
        element.set(name, str(sum(1 for _ in element.iter(tag))))
    if times := [float(it.get("time", "")) for it in element.iter(part) if it.get("time")]:
        element.set("time", f"{sum(times):.3f}")


# A badge


class Badge(msgspec.Struct, frozen=True):
    """A badge in the format of https://shields.io/badges/endpoint-badge."""

    label: str
    message: str
    color: str
    schemaVersion: int = 1  # noqa: N815


def badge(source: SummarySource) -> Badge:
    """Return a badge with the counts of items by verdict.

    It is red if `run --strict` would fail for deviations or errors that are not known, grey if
    nothing was verified, yellow if something was not verified, and green otherwise.
    """
    totals = source.totals
    if any(item.fails for item in source.items):
        color = "red"
    elif not any(totals.get(verdict) for verdict in ("conforms", "observed", "deviates", KNOWN)):
        color = "lightgrey"
    elif source.open or not all(record.complete for record in source.records):
        color = "yellow"
    else:
        color = "brightgreen"
    return Badge("attention conformance", _counts(totals) or "nothing verified", color)


# Annotations


def annotated(source: SummarySource) -> list[str]:
    """Return lines with annotations, errors first, then warnings.

    If there are more than `MOST` of one of these levels, the last line of this level counts those
    that are left out.
    """
    lines: dict[str, list[str]] = {"error": [], "warning": []}
    worse = source.changes.worse if source.changes else []
    regressions = {(change.implementation, change.requirement) for change in worse}
    files = {one.name: _file(one.spec) for _, one in source.implementations}
    for change in source.wrong:
        about = change.implementation, change.requirement
        level = "error" if change.after != "deviates" or change.level in MUST else "warning"
        where = f"{change.after}: {change.extent}, such as {some(change.cases, 3)}"
        told = [source.sentence(change.requirement), where, *change.evidence]
        message = "\n".join(filter(None, [*told, f"again: {change.command}"]))
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


# The history

COMMIT = ("GITHUB_SHA", "CI_COMMIT_SHA")
"""The environment variables in which CI services name the commit."""

COLOURS = {
    "conforms": "#1f6f3d",
    "observed": "#7ba8d0",
    KNOWN: "#c9a227",
    "deviates": "#b3372a",
    "other": "#6b4f8a",
    "unsupported": "#d5d8dc",
}
"""The colours of a bar from bottom to top; errors, crashes and missing outcomes are "other"."""

MOST_RUNS = 60
"""The most runs to show in the figure; the file keeps all of them."""

_LEFT, _TOP, _BAR, _GAP, _HEIGHT, _ROW = 170, 44, 9, 2, 36, 54


class HistoryPoint(msgspec.Struct, frozen=True):
    """One run in the history.

    Attributes:
        created: when the newest record of the run was made.
        commit: the commit of the project, or "".
        suite: the version of the suite.
        selection: the options that left items out of the run, or "".
        seconds: the total time of all items.
        implementations: the number of items with each verdict, by the name of the implementation,
            followed by "on DEVICE" unless the device is the CPU.
    """

    created: str
    commit: str
    suite: str
    selection: str
    seconds: float
    implementations: dict[str, dict[str, int]]


def point(source: SummarySource) -> HistoryPoint:
    """Return the history entry of a run."""
    made = source.whole.side
    return HistoryPoint(
        created=made.created,
        commit=next((os.environ[name] for name in COMMIT if os.environ.get(name)), ""),
        suite=made.suite,
        selection=made.selection,
        seconds=round(sum(item.result.seconds for item in source.items), 1),
        implementations={
            one.name + ("" if device == "cpu" else f" on {device}"): source.counts(one.name, device)
            for record, one in source.implementations
            for device in [record.header.provenance.device]
        },
    )


def read_history(path: Path) -> list[HistoryPoint]:
    """Return the runs in a history file, the oldest first; [] if the file does not exist.

    Raises:
        ConformanceError: if the file cannot be read, or a line is not a valid entry.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConformanceError(f"{path}: cannot be read ({error.strerror})") from error
    points = []
    for number, line in enumerate(lines, 1):
        try:
            points.append(msgspec.json.decode(line, type=HistoryPoint))
        except msgspec.MsgspecError as error:
            raise ConformanceError(f"{path}: line {number} is no run: {error}") from error
    return points


def append(path: Path, source: SummarySource) -> list[Path]:
    """Append a run to the history unless it is already the last entry, and redraw the trend.

    Returns:
        The paths of the history and of the figure.

    Raises:
        ConformanceError: if a file cannot be read or written, or the history is invalid.
    """
    points = read_history(path)
    now = point(source)
    if not points or points[-1] != now:
        write_file(path, msgspec.json.encode(now) + b"\n", append=True)
        points.append(now)
    figure = path.with_suffix(".svg")
    write_file(figure, trend(points).encode())
    return [path, figure]


def trend(points: Sequence[HistoryPoint]) -> str:
    """Return an SVG figure with one row for each implementation and one bar for each run.

    There must be at least one point; only the last `MOST_RUNS` are shown.
    """
    shown = points[-MOST_RUNS:]
    names = list(dict.fromkeys(name for one in reversed(shown) for name in one.implementations))
    width = _LEFT + max(len(shown), 24) * (_BAR + _GAP) + 250
    body = []
    for row, name in enumerate(names):
        top = _TOP + row * _ROW
        highest = max(sum(one.implementations.get(name, {}).values()) for one in shown) or 1
        body.append(_text(8, top + _HEIGHT, name))
        for at, one in enumerate(shown):
            body += _bar(one, name, _LEFT + at * (_BAR + _GAP), top + _HEIGHT, highest)
        last = shown[-1].implementations.get(name)
        told = _counts(last) if last else "not in the last run"
        body.append(_text(_LEFT + len(shown) * (_BAR + _GAP) + 6, top + _HEIGHT, told))
    first, last_day = shown[0].created[:10], shown[-1].created[:10]
    heading = f"Items by verdict, {len(shown)} runs, {first} to {last_day}"
    height = _TOP + len(names) * _ROW + 24
    for place, (verdict, colour) in enumerate(COLOURS.items()):
        left = _LEFT + place * 92
        body.append(f'<rect x="{left}" y="{height - 20}" width="9" height="9" fill="{colour}"/>')
        body.append(_text(left + 13, height - 11, f"{SYMBOLS.get(verdict, '')} {verdict}".strip()))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11" role="img"><title>{escape(heading)}</title>'
        f'<rect width="100%" height="100%" fill="white"/>{_text(8, 22, heading, 15)}'
        f"{''.join(body)}</svg>\n"
    )


def _bar(one: HistoryPoint, name: str, left: int, bottom: float, highest: int) -> list[str]:
    """Return the stacked bar of one run as SVG, with its date, commit and counts in a tooltip.

    `highest` is the number of items that a bar of full height stands for. Return [] if the run has
    no counts for the implementation `name`.
    """
    counts = one.implementations.get(name)
    if not counts:
        return []
    commit = f", {one.commit[:10]}" if one.commit else ""
    title = escape(printable(f"{one.created[:16]}{commit}: {_counts(counts)}"))
    parts = [f"<g><title>{title}</title>"]
    numbers: Counter[str] = Counter()
    for verdict, times in counts.items():
        numbers[verdict if verdict in COLOURS else "other"] += times
    for kind, colour in COLOURS.items():
        if number := numbers[kind]:
            # Even one item of thousands remains visible.
            size = max(2.0, _HEIGHT * number / highest)
            bottom -= size
            parts.append(
                f'<rect x="{left}" y="{bottom:.1f}" width="{_BAR}" height="{size:.1f}" '
                f'fill="{colour}"/>'
            )
    return ["".join(parts) + "</g>"]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{times:,} {verdict}" for verdict, times in counts.items())


def _text(left: int, top: float, text: str, size: int = 11) -> str:
    return f'<text x="{left}" y="{top}" font-size="{size}">{escape(printable(text))}</text>'
