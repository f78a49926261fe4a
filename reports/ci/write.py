"""Writes what was asked for, and says where."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from conformance.errors import ConformanceError
from conformance.reports.ci.annotations import annotated
from conformance.reports.ci.badge import badge
from conformance.reports.ci.junit import junit
from conformance.reports.ci.source import Source, load
from conformance.reports.ci.summary import markdown
from conformance.text import printable

STEP_SUMMARY = "GITHUB_STEP_SUMMARY"


@dataclass(frozen=True)
class Wanted:
    """What to write, and where; None for nothing.

    Attributes:
        summary: Markdown, appended; "" for the file that GitHub names.
        annotations: whether to print GitHub's.
    """

    junit: Path | None = None
    badge: Path | None = None
    summary: str | None = None
    annotations: bool = False
    previous: Path | None = None
    baseline: Path | None = None


def write(records: Sequence[Path], wanted: Wanted) -> int:
    """Write all of it.

    Returns:
        An exit code: nothing verified, incomplete, or fine. What deviates is for `run --strict`
        and `gate` to fail on, so that a job is told everything before it fails.

    Raises:
        ConformanceError: a record cannot be read, or a file cannot be written.
    """
    target = _summary_file(wanted.summary)
    source = load(records, wanted.previous, wanted.baseline)
    files: list[tuple[Path | None, Callable[[Source], bytes], str]] = [
        (wanted.junit, junit, "wb"),
        (wanted.badge, lambda own: msgspec.json.encode(badge(own)) + b"\n", "wb"),
        (target, lambda own: markdown(own).encode() + b"\n", "ab"),
    ]
    for path, render, mode in files:
        if path is not None:
            _put(path, render(source), mode)
    if wanted.annotations:
        for line in annotated(source):
            print(line)
    # A line of prose between annotations would be taken for nothing else, so it may follow.
    told = ", ".join(str(path) for path, _, _ in files if path is not None)
    if told:
        print(printable(f"written: {told}"))
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


def _put(path: Path, content: bytes, mode: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode) as file:
            file.write(content)
    except OSError as error:
        raise ConformanceError(f"{path}: cannot be written ({error.strerror})") from error
