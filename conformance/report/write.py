"""From record files to the three files of a report, and what the whole was worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from conformance.errors import ConformanceError, ExitCode
from conformance.findings import verified
from conformance.report.build import build
from conformance.report.figures import figures
from conformance.report.html import render_card, render_html
from conformance.report.load import find_records, load_records
from conformance.report.markdown import render_markdown
from conformance.report.model import Report
from conformance.report.views import card_file
from conformance.report.wording import told
from conformance.terminal import printable


def write(
    records: Sequence[Path], output: Path, expected: Sequence[str] = (), run: Path | None = None
) -> int:
    """Write `output` with .json, .md and .html, say in a few lines what is in them.

    Args:
        records: record files, or folders of them.
        output: path of the report without a suffix.
        expected: names of records that must be there.
        run: file with the id of the run that the records must be of.

    Returns:
        An exit code: nothing verified, incomplete, or fine. Deviations are findings, not failures.

    Raises:
        ConformanceError: the run's file cannot be read.
    """
    loaded, problems = load_records(find_records(records), _run_id(run))
    report = build(loaded, expected, problems)
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = output.with_name(output.name + "-cards")
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
    for suffix, content in (
        (".json", encoded + b"\n"),
        (".md", render_markdown(report).encode()),
        (".html", render_html(report, figures(report, loaded), folder.name).encode()),
    ):
        output.with_name(output.name + suffix).write_bytes(content)
    _write_cards(report, folder, output.name + ".html")
    for line in _summary(report, output):
        print(printable(line))
    return outcome(report)


def _write_cards(report: Report, folder: Path, report_file: str) -> None:
    """A page for each card; pages of an earlier report do not stay."""
    if not report.cards and not folder.is_dir():
        return
    folder.mkdir(exist_ok=True)
    pages = {card_file(card.column): card for card in report.cards}
    for old in folder.glob("*.html"):
        if old.name not in pages:
            old.unlink()
    for name, card in pages.items():
        (folder / name).write_bytes(render_card(report, card, report_file).encode())


def outcome(report: Report) -> ExitCode:
    """What the report is worth, as an exit code."""
    if not verified(report.totals.findings):
        return ExitCode.NOTHING_VERIFIED
    return ExitCode.INCOMPLETE if report.not_verified.anything else ExitCode.OK


def _run_id(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        hint = "start the run with mha-conformance begin"
        raise ConformanceError(f"{file}: cannot be read ({error.strerror}); {hint}") from error


def _summary(report: Report, output: Path) -> list[str]:
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
    return [*lines, f"items: {told(report.totals.items)}", f"report: {output}.html, .md, .json"]
