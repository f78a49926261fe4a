"""GitHub's annotations: lines on stdout that a pull request shows beside the code.

See "Workflow commands for GitHub Actions". A value could end the command and begin another, so
what ends one is escaped: line feeds everywhere, and colons and commas in properties.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path, PurePath

from conformance.reports.changes.compare import Change
from conformance.reports.ci.source import MUST, Source
from conformance.reports.wording import measured
from conformance.text import plural, printable, some

MOST = 10
"""GitHub shows so many of one level for a step, and drops the others without a word."""


def annotated(source: Source) -> list[str]:
    """Errors first; of more than fit, the last says how many there are."""
    errors: list[tuple[str, str, str, int]] = []
    warnings: list[tuple[str, str, str, int]] = []
    worse = (
        {(change.implementation, change.requirement) for change in source.changes.worse}
        if source.changes
        else set()
    )
    files = {own.name: _file(own.spec) for _, own in source.implementations}
    for change in source.wrong:
        new = (change.implementation, change.requirement) in worse
        title = f"{change.implementation}: {change.requirement}" + (" (new)" if new else "")
        level = errors if change.after != "deviates" or change.level in MUST else warnings
        level.append(
            (
                title,
                _message(change, source.sentence(change.requirement)),
                files.get(change.implementation, ""),
                0,
            )
        )
    stale: list[tuple[str, str, str, int]] = []
    for judgement in source.judgements:
        path = _relative(str(judgement.baseline.path))
        for why, entry in judgement.to_edit:
            told = f"{entry.place}: {why}; mha-conformance gate says more"
            stale.append(("the baseline is out of date", told, path, entry.line))
    errors += dict.fromkeys(stale)
    for (name, verdict, reason), items in source.open.items():
        warnings.append((f"{name}: {verdict}", f"{plural(items, 'item')}: {reason}", "", 0))
    return [*_lines("error", errors), *_lines("warning", warnings)]


def _lines(level: str, found: list[tuple[str, str, str, int]]) -> Iterator[str]:
    shown = found if len(found) <= MOST else found[: MOST - 1]
    for title, message, file, line in shown:
        place = {"file": file, "line": str(line) if line else "", "title": title}
        yield command(level, message, **{name: value for name, value in place.items() if value})
    if len(found) > len(shown):
        left = len(found) - len(shown)
        yield command(level, "the job's summary has all of them", title=f"and {left} more")


def command(name: str, message: str, **properties: str) -> str:
    """One workflow command."""
    told = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
    return f"::{name} {told}::{_data(message)}"


def _data(text: str) -> str:
    text = printable(text).replace("%", "%25")
    return text.replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _message(change: Change, sentence: str) -> str:
    lines = [sentence] if sentence else []
    times, cases = plural(change.times, "finding"), plural(len(change.cases), "case")
    lines.append(f"{change.after}: {times} in {cases}, such as {some(change.cases, 3)}")
    if change.figures is not None:
        lines.append(f"measured {measured(change.figures)}")
    elif change.told:
        lines.append(change.told)
    if change.cause:
        lines.append(f"likely cause: {change.cause}")
    return "\n".join([*lines, f"again: {change.command}"])


def _file(spec: str) -> str:
    """The file of an implementation that was given by its path, if GitHub may know it."""
    path, colon, _ = spec.rpartition(":")
    return _relative(path) if colon and path.endswith(".py") else ""


def _relative(path: str) -> str:
    """As GitHub wants it: relative to the repository, which is where a step runs."""
    pure = PurePath(path)
    if pure.is_absolute():
        try:
            pure = pure.relative_to(Path.cwd())
        except ValueError:
            return ""
    told = posixpath.normpath(pure.as_posix())
    return "" if told.startswith("..") else told
