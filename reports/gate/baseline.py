"""The baseline file: which deviations are known, and why. TOML, written by people.

    [[known]]
    requirement = "output.*"
    case = ["mask/*", "!*/long"]
    when = 'dtype == "float64" and torch_version < "2.9"'
    verdict = "deviates"
    cause = "accuracy.float32"
    reason = "The kernel's softmax is in float32."
    link = "https://example.org/issues/1"
    kind = "defect"
    reproduction = "docs/reproductions/softmax.py"

The first keys say of which findings an entry speaks; `verdict`, with `cause` or `raises`, what each
of them must be. `cause` is the id of a cause; `arguments` are those of its arguments that matter:

    cause = "scale.rounded"
    arguments = {to = "float32"}

An argument that is a phrase is written as its id, or as {id = "...", arguments = {...}}. Text in
place of an id is a part of the cause's wording. Patterns are those of the shell; one that begins
with "!" takes away.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from conformance.errors import BrokenBaseline
from conformance.records.header import KnownDeviation
from conformance.records.phrase import Argument, Phrase
from conformance.records.schema1 import old_wording
from conformance.reports.gate.condition import Condition, parse
from conformance.words import causes, say

PLACES = ("implementation", "requirement", "case", "mode")
"""Keys whose values are patterns: what an entry is about."""

VERDICTS = ("deviates", "error")
"""Verdicts that may be known. A crash, a hang or an absence says nothing about the answer."""

TODO = "TODO: say why this is known, and until when"
"""Written in place of a missing reason; the gate accepts no such reason."""

KINDS = ("convention", "limitation", "accuracy", "defect")
"""What a known deviation is: a convention that differs from the definition, a documented
limitation, a computation coarser than its dtype, or a mistake."""

MOST_BYTES = 2**22

_TEXTS = ("verdict", "reason", "link", "when", "cause", "raises", "kind", "reproduction")
_KEYS = (*PLACES, *_TEXTS, "arguments", "within", "strict")

_ID = re.compile(r"[a-z][a-z0-9-]*(\.[a-z0-9-]+)+")
"""The id of a cause, not a part of its wording."""


@dataclass(frozen=True)
class Entry:
    """One known deviation.

    Attributes:
        number: 1 for the first of the file.
        line: where it begins, or 0 if that cannot be said.
        cause: the id of each finding's cause, or a part of its wording; see `agrees_on_cause`.
        arguments: what the arguments of that id must be; others may be anything.
        raises: text that each error contains.
        within: how many σ each may be off; infinite if nothing is said.
        strict: whether all findings must deviate; otherwise, any.
        kind: one of `KINDS`, or "" if it is not sorted.
        reproduction: a script that shows it without the suite, or "".
    """

    number: int
    line: int
    verdict: str
    implementation: tuple[str, ...] = ()
    requirement: tuple[str, ...] = ()
    case: tuple[str, ...] = ()
    mode: tuple[str, ...] = ()
    condition: Condition | None = None
    cause: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    raises: str = ""
    within: float = math.inf
    reason: str = ""
    link: str = ""
    strict: bool = True
    kind: str = ""
    reproduction: str = ""

    @property
    def has_reason(self) -> bool:
        """Whether the entry gives a reason."""
        return bool(self.reason.strip()) and not self.reason.lstrip().upper().startswith("TODO")

    @property
    def says(self) -> tuple[object, ...]:
        """A key of what the entry says of its findings; two entries with one key are duplicates."""
        arguments = repr(sorted(self.arguments.items()))
        checks = (self.verdict, self.cause, arguments, self.raises, self.within, self.strict)
        return *checks, self.reason.strip()

    @property
    def address(self) -> str:
        """Where the entry stands in the file."""
        return f"line {self.line}" if self.line else f"entry {self.number}"

    @property
    def place(self) -> str:
        """Where the entry stands and what it is about, in one line."""
        about = [f"{name} {_some(getattr(self, name))}" for name in PLACES if getattr(self, name)]
        about += [f"when {self.condition.text}"] if self.condition else []
        return f"{self.address}: {', '.join(about)}"


@dataclass(frozen=True)
class Baseline:
    """A file of entries, or none if it is not there yet."""

    path: Path
    text: str
    entries: tuple[Entry, ...]
    there: bool = True

    @property
    def absence(self) -> str:
        """A message if the file is missing, else "": a mistyped name is not an empty baseline."""
        return "" if self.there else f"{self.path}: no such file, nothing is known yet"


def _some(patterns: tuple[str, ...]) -> str:
    more = f" and {len(patterns) - 2} more" if len(patterns) > 2 else ""
    return " ".join(patterns[:2]) + more


@lru_cache(maxsize=4096)
def fits(patterns: tuple[str, ...], name: str) -> bool:
    """Return whether patterns match a name; no patterns match all names, and "!" excludes."""
    wanted, unwanted = _compiled(patterns)
    return (not wanted or any(item.match(name) for item in wanted)) and not any(
        item.match(name) for item in unwanted
    )


@lru_cache(maxsize=1024)
def _compiled(patterns: tuple[str, ...]) -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    wanted = [re.compile(translate(item)) for item in patterns if not item.startswith("!")]
    unwanted = [re.compile(translate(item[1:])) for item in patterns if item.startswith("!")]
    return wanted, unwanted


def agrees_on_cause(entry: Entry, cause: Phrase) -> bool:
    """Return whether a finding's cause is the one that an entry names.

    An entry that quotes wording goes on matching what was worded so when it was written.
    """
    if not _ID.fullmatch(entry.cause):
        return entry.cause in say(cause) or entry.cause in old_wording(cause)
    return cause.id == entry.cause and _has(cause, entry.arguments)


def _has(phrase: Phrase, wanted: Mapping[str, Any]) -> bool:
    return all(
        name in phrase.arguments and _is(phrase.arguments[name], value)
        for name, value in wanted.items()
    )


def _is(argument: Argument, wanted: Any) -> bool:
    """Return whether an argument equals a TOML value."""
    if isinstance(argument, list):
        return (
            isinstance(wanted, list)
            and len(wanted) == len(argument)
            and all(map(_is, argument, wanted))
        )
    if not isinstance(argument, Phrase):
        return bool(argument == wanted)
    if isinstance(wanted, dict):
        return argument.id == wanted.get("id") and _has(argument, wanted.get("arguments", {}))
    return bool(argument.id == wanted)


def read_baseline(path: Path) -> Baseline:
    """Read the entries of a file; none, if there is no such file yet.

    Raises:
        BrokenBaseline: the file makes no sense.
    """
    try:
        if not path.exists():
            return Baseline(path, "", (), there=False)
        if path.stat().st_size > MOST_BYTES:
            raise BrokenBaseline(f"{path}: {MOST_BYTES} bytes are the most a baseline can have")
        # Line ends as they are: what is written again must not differ in them.
        text = path.read_bytes().decode()
    except OSError as error:
        raise BrokenBaseline(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise BrokenBaseline(f"{path}: not TOML (not UTF-8)") from error
    return baseline_of(path, text)


def baseline_of(path: Path, text: str) -> Baseline:
    """Return the entries of a file's text; raises `BrokenBaseline`."""
    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BrokenBaseline(f"{path}: not TOML ({error})") from error
    for name in content:
        if name != "known":
            raise BrokenBaseline(
                f"{path}: {name!r} means nothing here; entries begin with [[known]]"
            )
    tables = content.get("known", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise BrokenBaseline(f"{path}: each entry begins with [[known]]")
    lines = _lines(text, len(tables))
    entries = []
    for number, (table, line) in enumerate(zip(tables, lines, strict=True), 1):
        try:
            entries.append(_entry(table, number, line))
        except BrokenBaseline as error:
            place = f"line {line}" if line else f"entry {number}"
            raise BrokenBaseline(f"{path}, {place}: {error}") from error
    return Baseline(path, text, tuple(entries))


def recorded(known: Iterable[KnownDeviation]) -> Baseline:
    """Return the entries that a record carries; raises `BrokenBaseline`."""
    tables = [
        {name: value for name, value in msgspec.to_builtins(one).items() if value is not None}
        for one in known
    ]
    entries = (_entry(table, number, 0) for number, table in enumerate(tables, 1))
    return Baseline(Path("the record"), "", tuple(entries))


def to_record(entry: Entry) -> KnownDeviation:
    """Return an entry as a record carries it."""
    return KnownDeviation(
        verdict=entry.verdict,
        **{place: list(getattr(entry, place)) for place in PLACES},
        when=entry.condition.text if entry.condition else "",
        cause=entry.cause,
        arguments=dict(entry.arguments),
        raises=entry.raises,
        within=entry.within if entry.within < math.inf else None,
        strict=entry.strict,
        kind=entry.kind,
        reason=entry.reason,
        link=entry.link,
        reproduction=entry.reproduction,
    )


def _lines(text: str, count: int) -> list[int]:
    heads = re.finditer(r"^[ \t]*\[\[[ \t]*known[ \t]*\]\]", text, re.MULTILINE)
    lines = [text.count("\n", 0, head.start()) + 1 for head in heads]
    return lines if len(lines) == count else [0] * count


def _entry(table: dict[str, Any], number: int, line: int) -> Entry:
    for key in table:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1) or [", ".join(_KEYS)]
            raise BrokenBaseline(f"unknown key {key!r}; did you mean {near[0]}?")
    texts: dict[str, Any] = {key: _text(table, key) for key in _TEXTS}
    places: dict[str, Any] = {key: _patterns(table, key) for key in PLACES}
    verdict, when = texts.pop("verdict"), texts.pop("when")
    if verdict not in VERDICTS:
        given = f"verdict {verdict!r}" if verdict else "no verdict"
        raise BrokenBaseline(f"{given}; what may be known is {' or '.join(VERDICTS)}")
    if not places["requirement"] and not places["case"]:
        raise BrokenBaseline('say a requirement or a case; a pattern such as "mask/*" will do')
    if verdict == "error" and not texts["raises"].strip():
        raise BrokenBaseline(
            'say with raises = "..." a part of the error\'s text; otherwise any error is excused'
        )
    if verdict != "error" and texts["raises"]:
        raise BrokenBaseline('raises is for verdict = "error"; of a deviation, say its cause')
    if verdict == "error" and texts["cause"]:
        raise BrokenBaseline('cause is for verdict = "deviates"; of an error, say raises')
    arguments = table.get("arguments", {})
    if not isinstance(arguments, dict):
        raise BrokenBaseline('arguments is a table, such as {to = "float32"}')
    if _ID.fullmatch(texts["cause"]) and texts["cause"] not in causes():
        near = difflib.get_close_matches(texts["cause"], causes(), n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise BrokenBaseline(f"there is no cause {texts['cause']!r}{meant}")
    if arguments and not _ID.fullmatch(texts["cause"]):
        raise BrokenBaseline('arguments are those of a cause: say its id, cause = "mask.inverted"')
    if texts["kind"] not in ("", *KINDS):
        raise BrokenBaseline(f"kind {texts['kind']!r}; a deviation is one of {', '.join(KINDS)}")
    strict = table.get("strict", True)
    if not isinstance(strict, bool):
        raise BrokenBaseline("strict is true or false")
    within = table.get("within", math.inf)
    if isinstance(within, bool) or not isinstance(within, int | float) or not within > 0:
        raise BrokenBaseline("within is a number of σ, such as 1e9")
    if verdict == "error" and "within" in table:
        raise BrokenBaseline('within is for verdict = "deviates"; of an error, say raises')
    condition = parse(when) if when.strip() else None
    texts |= {"condition": condition, "within": float(within), "strict": strict}
    texts["arguments"] = arguments
    return Entry(number, line, verdict, **places, **texts)


def _text(table: dict[str, Any], key: str) -> str:
    value = table.get(key, "")
    if not isinstance(value, str):
        raise BrokenBaseline(f"{key} is text")
    return value


def _patterns(table: dict[str, Any], key: str) -> tuple[str, ...]:
    value = table.get(key)
    if value is None:
        return ()
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, list) or not several or not _all_texts(several):
        raise BrokenBaseline(f"{key} is a pattern or a list of patterns, each of them text")
    return tuple(several)


def _all_texts(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) and value.strip("! ") for value in values)
