"""From record files to the files of a report, and what the whole was worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from conformance.errors import ConformanceError, ExitCode
from conformance.progress import progress
from conformance.records.findings import verified
from conformance.reports.joining import build
from conformance.reports.load import find_records, load, load_versions
from conformance.reports.model import Report
from conformance.reports.page.figures import figures
from conformance.reports.page.html import render_html
from conformance.reports.page.markdown import render_markdown
from conformance.reports.wording import told
from conformance.text import printable


def write(
    records: Sequence[Path],
    output: Path | None,
    expected: Sequence[str] = (),
    run: Path | None = None,
    html: Path | None = None,
    versions: Sequence[Path] = (),
) -> int:
    """Write the report, and say in a few lines what is in it.

    Args:
        records: record files, or folders of them.
        output: path without a suffix for .json, .md and .html; None for none of them.
        expected: names of records that must be there.
        run: file with the id of the run that the records must be of.
        html: file for the page alone.
        versions: records of the same implementations with other versions of their libraries.

    Returns:
        An exit code: nothing verified, incomplete, or fine. Deviations are findings, not failures.

    Raises:
        ConformanceError: the run's file cannot be read, or a file cannot be written.
    """
    with progress("reading records") as advance:
        found = load(find_records(records), read_run(run))
        others, refused = load_versions(find_records(versions))
        found = found._replace(problems=[*found.problems, *refused])
        advance("making the report")
        report = build(found.current, expected, found.problems, found.earlier, others)
        page = render_html(report, figures(report, found.current), found.current).encode()
    files: dict[Path, bytes] = {}
    if output is not None:
        encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
        files = {
            output.with_name(output.name + ".html"): page,
            output.with_name(output.name + ".md"): render_markdown(report).encode(),
            output.with_name(output.name + ".json"): encoded + b"\n",
        }
    if html is not None:
        files[html] = page
    for path, content in files.items():
        _write(path, content)
    for line in [*_summary(report), f"report: {', '.join(map(str, files))}"]:
        print(printable(line))
    return outcome(report)


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise ConformanceError(f"{path}: cannot be written ({error.strerror})") from error


def outcome(report: Report) -> ExitCode:
    """What the report is worth, as an exit code."""
    if not verified(report.totals.findings):
        return ExitCode.NOTHING_VERIFIED
    return ExitCode.INCOMPLETE if report.not_verified.anything else ExitCode.OK


def read_run(file: Path | None) -> str:
    """The id in a file of `begin`; "" without one."""
    if file is None:
        return ""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        hint = "start the run with mha-conformance begin"
        raise ConformanceError(f"{file}: cannot be read ({error.strerror}); {hint}") from error


def _summary(report: Report) -> list[str]:
    lines = [f"{column.key}: {told(column.items)}" for column in report.columns]
    open_questions = report.not_verified
    lines += [
        f"not verified: {name} could not be set up or did not finish"
        for name in open_questions.missing
    ]
    lines += [
        f"not verified: {name} ({reason})" for name, reason in open_questions.unavailable.items()
    ]
    lines += [f"not verified: {line}" for line in open_questions.incomplete]
    lines += [
        f"not verified: {item.column}, {item.items} items {item.verdict} ({item.reason})"
        for item in open_questions.open
    ]
    lines += [f"problem: {line}" for line in open_questions.problems]
    return [*lines, f"items: {told(report.totals.items)}"]
