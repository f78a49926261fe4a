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

The first keys select the findings that an entry is about; `verdict`, with `cause` or `raises`,
specifies what each of these findings must be. `cause` is the id of a cause, and `arguments` are the
arguments of this cause that have to match:

    cause = "scale.rounded"
    arguments = {to = "float32"}

Tables [verified.NAME] count what was verified, tables [promised.NAME] say how strictly, and tables
[pinned.NAME] store conventions; see `conformance.reports.gate.coverage`.

An argument that is a phrase is written as its id, or as {id = "...", arguments = {...}}. Patterns
are shell patterns; a pattern that begins with "!" excludes names.

Conditions look like environment markers (PEP 508), and versions are compared by `packaging`. The
markers of `packaging` itself are not used, because they accept only variables of an installation,
and their `in` is a substring search, which finds "float16" in "bfloat16". The syntax is therefore a
subset of Python's: comparisons of a variable with text, joined by `and`, `or` and `not`.
"""

from __future__ import annotations

import ast
import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from conformance.errors import BrokenBaseline
from conformance.records.findings import INFINITE, Argument, Phrase
from conformance.records.header import KnownDeviation
from conformance.records.numbers import UNDERFLOW
from conformance.records.record import size_of
from conformance.reports.gate.coverage import (
    Counts,
    Pins,
    Promises,
    read_counts,
    read_pins,
    read_promises,
)
from conformance.text import short
from conformance.words import causes

PLACES = ("implementation", "requirement", "case", "mode")
"""The keys that say what an entry applies to; their values are patterns."""

VERDICTS = ("deviates", "error")
"""The verdicts that may be known; a crash, a hang or an absence says nothing about the answer."""

TODO = "TODO: say why this is known, and until when"
"""The text written where a reason is missing; the gate does not accept it as a reason."""

KINDS = ("convention", "limitation", "accuracy", "defect")
"""The kinds of known deviations: a convention that differs from the definition, a documented
limitation, a computation less accurate than its dtype, or a mistake."""

MOST_BYTES = 2**22
MOST_PARTS = 16
_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_KEY = re.compile(rf"(?:{_PART}[ \t]*\.[ \t]*){{{MOST_PARTS}}}{_PART}[ \t.\w-]*[]=]")

_KEYS = KnownDeviation.__struct_fields__

_TYPES = {
    "arguments": 'arguments is a table, such as {to = "float32"}',
    "strict": "strict is true or false",
    "within": "within is a number of σ, such as 1e9",
} | {place: f"{place} is a pattern or a list of patterns, each of them text" for place in PLACES}
"""What the value of a key must be, for keys that do not take text."""

_FILE = re.compile(r"[\w./\\-]*\.py\b")
"""The name of a Python file."""

_OPEN = re.compile(r"\[[^]]*$")
"""A bracket of a pattern without an end, which matches only itself, and no name has one."""


# Conditions

_CHOICES = {"dtype": tuple(UNDERFLOW), "device": ("cpu", "gpu")}
"""The possible values of these variables; a comparison with any other value is rejected."""

_OPERATORS: dict[type, str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
_MIRRORED = str.maketrans("<>", "><")

Test = Callable[[Mapping[str, str]], bool]
"""A function that returns whether a condition holds, given the values of variables by name."""


@dataclass(frozen=True)
class Condition:
    """A condition that restricts the findings to which an entry applies.

    Attributes:
        names: the variables that occur in the condition.
        holds: function that returns whether the condition is true, given the values of variables.
    """

    text: str
    names: frozenset[str]
    holds: Test = field(compare=False)


def parse(text: str) -> Condition:
    """Parse a condition; raises `BrokenBaseline` with a message of one line if it is invalid."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BrokenBaseline(f"the condition {short(repr(text))} cannot be read") from error
    try:
        holds = _read(tree)
    except _Refused as error:
        raise BrokenBaseline(f"the condition {short(repr(text))}: {error}") from error
    except RecursionError as error:
        raise BrokenBaseline("the condition cannot be read: it is too long") from error
    names = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    return Condition(text, names, holds)


class _Refused(Exception):
    pass


def _read(node: ast.expr) -> Test:
    match node:
        case ast.BoolOp(op, values):
            join = all if isinstance(op, ast.And) else any
            tests = [_read(value) for value in values]
            return lambda variables: join(test(variables) for test in tests)
        case ast.UnaryOp(ast.Not(), operand):
            test = _read(operand)
            return lambda variables: not test(variables)
        case ast.Compare(left, operators, rights):
            triples = zip([left, *rights], operators, rights, strict=False)
            comparisons = [_compared(*triple) for triple in triples]
            return lambda variables: all(test(variables) for test in comparisons)
        case _:
            raise _Refused('it must compare, as in dtype == "float64"')


def _compared(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Test:
    if isinstance(operator, ast.In | ast.NotIn):
        if not isinstance(left, ast.Name) or not isinstance(right, ast.Tuple | ast.List):
            raise _Refused('"in" asks for a list, as in dtype in ("float16", "bfloat16")')
        name = left.id
        values = [_checked(name, "==", element) for element in right.elts]
        expected = isinstance(operator, ast.In)
        return lambda known: (
            expected == any(_holds(name, known[name], "==", value) for value in values)
        )
    symbol = _OPERATORS.get(type(operator), "")
    if not symbol:
        raise _Refused("only ==, !=, <, <=, >, >=, in and not in compare")
    if not isinstance(left, ast.Name):
        left, right, symbol = right, left, symbol.translate(_MIRRORED)
    if not isinstance(left, ast.Name):
        raise _Refused("it must compare a variable with text")
    name, value = left.id, _checked(left.id, symbol, right)
    return lambda known: _holds(name, known[name], symbol, value)


def _holds(name: str, actual: str, operator: str, value: str) -> bool:
    if name.endswith("_version"):
        return SpecifierSet(operator + value).contains(actual, prereleases=True)
    return (actual == value) == (operator == "==")


def _checked(name: str, operator: str, node: ast.expr) -> str:
    """Return the text that a variable is compared with; raises `_Refused` if it is invalid."""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise _Refused("a variable is compared with text in quotation marks")
    value = node.value
    if name.endswith("_version"):
        try:
            if not re.search(r"\d", value):
                raise InvalidSpecifier(value)
            # A version with thousands of digits is only refused when it is compared.
            SpecifierSet(operator + value).contains("1")
        except (InvalidSpecifier, ValueError) as error:
            raise _Refused(
                f"{short(repr(value))} is no version that {operator} can compare"
            ) from error
    elif operator not in ("==", "!="):
        raise _Refused(f"{name} is no version: compare with ==, != or in")
    choices = _CHOICES.get(name, (value,))
    if value not in choices:
        raise _Refused(f"no {name} is {value!r}; it is one of {', '.join(choices)}")
    return value


# Entries


class BaselineEntry(KnownDeviation, frozen=True):
    """One known deviation.

    `cause` is the id of each finding's cause; see `agrees_on_cause`.
    The entry claims the findings that its patterns and its condition match. If `strict` is true,
    all of them must deviate as described; otherwise, at least one.

    Attributes:
        number: the position of the entry in the file, from 1.
        line: the line in which the entry begins, or 0 if unknown.
        condition: the parsed condition of `when`, or None.
    """

    number: int = 0
    line: int = 0
    condition: Condition | None = None

    def __hash__(self) -> int:
        return hash((self.number, self.line, self.requirement, self.case, self.reason))

    @property
    def has_reason(self) -> bool:
        """Whether the entry gives a reason.

        A text that begins with "TODO", in upper or lower case, does not count as one.
        """
        return bool(self.reason.strip()) and not self.reason.lstrip().upper().startswith("TODO")

    @property
    def says(self) -> tuple[object, ...]:
        """What the entry asserts about its findings, as a key that is equal for duplicates."""
        arguments = repr(sorted(self.arguments.items()))
        checks = (self.verdict, self.cause, arguments, self.raises, self.within, self.strict)
        return *checks, self.reason.strip()

    @property
    def address(self) -> str:
        """The position of the entry in the file, as text."""
        return f"line {self.line}" if self.line else f"entry {self.number}"

    @property
    def place(self) -> str:
        """The position of the entry, the first two patterns of each key, and its condition."""
        about = [
            f"{name} {' '.join(patterns[:2])}"
            + (f" and {len(patterns) - 2} more" if len(patterns) > 2 else "")
            for name in PLACES
            if (patterns := getattr(self, name))
        ]
        about += [f"when {self.condition.text}"] if self.condition else []
        # A pattern may contain a line feed, followed by anything.
        return f"{self.address}: {' '.join(', '.join(about).split())}"


@dataclass(frozen=True)
class Baseline:
    """The content of a baseline file: entries, counts of what was verified, promises, conventions.

    Pinned conventions are those that must not change. If `there` is false, the file does not exist
    yet and the baseline is empty.
    """

    path: Path
    text: str
    entries: tuple[BaselineEntry, ...]
    there: bool = True
    verified: Counts = field(default_factory=dict)
    pinned: Pins = field(default_factory=dict)
    promised: Promises = field(default_factory=dict)

    @property
    def absence(self) -> str:
        """A message if the file does not exist, because its name may be mistyped, else ""."""
        return "" if self.there else f"{self.path}: no such file, nothing is known yet"


@lru_cache(maxsize=4096)
def fits(patterns: tuple[str, ...], name: str) -> bool:
    """Return whether a name matches any of these patterns and none that begins with "!".

    Without patterns, or if all of them begin with "!", all names that are not excluded match.
    """
    wanted, unwanted = _compiled(patterns)
    return (not wanted or any(item.match(name) for item in wanted)) and not any(
        item.match(name) for item in unwanted
    )


@lru_cache(maxsize=1024)
def _compiled(patterns: tuple[str, ...]) -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    wanted = [re.compile(translate(item)) for item in patterns if not item.startswith("!")]
    unwanted = [re.compile(translate(item[1:])) for item in patterns if item.startswith("!")]
    return wanted, unwanted


def agrees_on_cause(entry: BaselineEntry, cause: Phrase) -> bool:
    """Return whether a finding's cause is the one that an entry names; True if it names none."""
    return not entry.cause or (cause.id == entry.cause and _has(cause, entry.arguments))


def _has(phrase: Phrase, wanted: Mapping[str, Any]) -> bool:
    return all(
        name in phrase.arguments and _is(phrase.arguments[name], value)
        for name, value in wanted.items()
    )


def _is(argument: Argument, wanted: Any) -> bool:
    """Return whether an argument of a cause is the one that an entry states as a TOML value."""
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
    """Read a baseline file; a missing file gives an empty baseline.

    Raises:
        BrokenBaseline: if the file cannot be read, or its content is invalid.
    """
    try:
        if not path.exists():
            return Baseline(path, "", (), there=False)
        if size_of(path) > MOST_BYTES:
            raise BrokenBaseline(f"{path}: {MOST_BYTES} bytes are the most a baseline can have")
        # Preserve line ends, because the file may be written again.
        # Some editors begin a file with a byte-order mark.
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise BrokenBaseline(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise BrokenBaseline(f"{path}: not TOML (not UTF-8)") from error
    return baseline_of(path, text)


def read_baselines(paths: Iterable[Path]) -> Baseline:
    """Return the entries of baseline files, and of all .toml files in folders, as one baseline.

    Raises:
        BrokenBaseline: if a file cannot be read, or its content is invalid.
    """
    files = [
        file
        for path in paths
        for file in (sorted(path.glob("*.toml")) if path.is_dir() else [path])
    ]
    entries = [entry for file in files for entry in read_baseline(file).entries]
    numbered = (msgspec.structs.replace(entry, number=n) for n, entry in enumerate(entries, 1))
    return Baseline(Path("baselines"), "", tuple(numbered))


def baseline_of(path: Path, text: str) -> Baseline:
    """Parse the text of a baseline file; raises `BrokenBaseline` if it is invalid."""
    if _LONG_KEY.search(text):
        # The parser takes quadratic time.
        raise BrokenBaseline(f"{path}: a key has more than {MOST_PARTS} parts")
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenBaseline(f"{path}: not TOML ({str(error)[:200]})") from error
    for name in content:
        if name not in ("known", "verified", "promised", "pinned"):
            raise BrokenBaseline(
                f"{path}: {name[:80]!r} means nothing here; entries begin with [[known]]"
            )
    try:
        verified = read_counts(content.get("verified", {}))
        promised = read_promises(content.get("promised", {}))
        pinned = read_pins(content.get("pinned", {}))
    except BrokenBaseline as error:
        raise BrokenBaseline(f"{path}: {error}") from error
    tables = content.get("known", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise BrokenBaseline(f"{path}: each entry begins with [[known]]")
    heads = re.finditer(r"^[ \t]*\[\[[ \t]*known[ \t]*\]\]", text, re.MULTILINE)
    lines = [text.count("\n", 0, head.start()) + 1 for head in heads]
    if len(lines) != len(tables):
        lines = [0] * len(tables)
    entries = []
    for number, (table, line) in enumerate(zip(tables, lines, strict=True), 1):
        try:
            entries.append(_entry(_typed(table), number, line))
        except BrokenBaseline as error:
            place = f"line {line}" if line else f"entry {number}"
            raise BrokenBaseline(f"{path}, {place}: {error}") from error
    return Baseline(path, text, tuple(entries), verified=verified, pinned=pinned, promised=promised)


def recorded(known: Iterable[KnownDeviation]) -> Baseline:
    """Return the known deviations of a record as a baseline.

    Raises:
        BrokenBaseline: if one of them is invalid.
    """
    entries = (_entry(one, number) for number, one in enumerate(known, 1))
    return Baseline(Path("the record"), "", tuple(entries))


def to_record(entry: BaselineEntry) -> KnownDeviation:
    """Return an entry in the form in which records store it."""
    return KnownDeviation(**{key: getattr(entry, key) for key in _KEYS})


def _typed(table: dict[str, Any]) -> KnownDeviation:
    """Return an entry's TOML table as a struct.

    Raises:
        BrokenBaseline: if a key is unknown, or a value has a wrong type or is an empty pattern.
    """
    for key in table:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1) or [", ".join(_KEYS)]
            raise BrokenBaseline(f"unknown key {key!r}; did you mean {near[0]}?")
    lists = {place: [table[place]] for place in PLACES if isinstance(table.get(place), str)}
    try:
        known = msgspec.convert({"verdict": "", **table, **lists}, KnownDeviation)
    except msgspec.ValidationError as error:
        key = next(key for key in table if f"`$.{key}" in str(error))
        raise BrokenBaseline(_TYPES.get(key, f"{key} is text")) from error
    except OverflowError as error:
        raise BrokenBaseline(_TYPES["within"]) from error
    for place in PLACES:
        patterns = getattr(known, place)
        if place in table and not (patterns and all(pattern.strip("! ") for pattern in patterns)):
            raise BrokenBaseline(_TYPES[place])
        for pattern in patterns:
            if _OPEN.search(pattern):
                raise BrokenBaseline(f"{place} = {short(repr(pattern))}: a [ is never closed")
    return known


def _says_something(raises: str) -> bool:
    """Return whether a text has a word of three letters that is no part of "error" or "exception".

    Such parts occur in the texts of all errors, and single letters in most. The name of a file,
    which is in the place "(at mine.py:3)" of an error, is no word. A message after the type of an
    error may be short.
    """
    quoted = _FILE.sub(" ", raises.lower())
    words = re.findall(r"[^\W\d]{3,}", quoted)
    return bool(re.search(r"(error|exception): \S", quoted)) or any(
        not any(word in one for one in ("error", "exception")) for word in words
    )


def _finds_everything(patterns: tuple[str, ...]) -> bool:
    """Return whether patterns, apart from exclusions, probably match every name.

    This is assumed if they match two names that share no letter.
    """
    wanted = tuple(pattern for pattern in patterns if not pattern.startswith("!"))
    return all(fits(wanted, name) for name in ("a.b/c", "zy.xw-v/u-t/s"))


def _entry(known: KnownDeviation, number: int, line: int = 0) -> BaselineEntry:
    """Return a validated entry; raises `BrokenBaseline` if it is invalid or excuses too much."""
    is_error = known.verdict == "error"
    given = f"verdict {known.verdict!r}" if known.verdict else "no verdict"
    similar = ""
    if is_unknown := known.cause not in ("", *causes()):
        near = difflib.get_close_matches(known.cause, causes(), n=1)
        similar = f"; did you mean {near[0]}?" if near else ""
    faults = (
        (known.verdict not in VERDICTS, f"{given}; what may be known is {' or '.join(VERDICTS)}"),
        (
            not (known.requirement or known.case),
            'say a requirement or a case; a pattern such as "mask/*" will do',
        ),
        (
            is_error and not known.raises.strip(),
            'say with raises = "..." a part of the error\'s text; otherwise any error is excused',
        ),
        (
            is_error and not _says_something(known.raises),
            f"raises = {known.raises!r} is in the text of any error; quote the message of this one",
        ),
        (
            not (known.strict or is_error or known.cause or known.within)
            and all(map(_finds_everything, (known.requirement, known.case))),
            "strict = false for every requirement and case excuses everything: say a cause, or "
            "where it is so",
        ),
        (
            not is_error and known.raises,
            'raises is for verdict = "error"; of a deviation, say its cause',
        ),
        (is_error and known.cause, 'cause is for verdict = "deviates"; of an error, say raises'),
        (is_unknown, f"there is no cause {known.cause!r}{similar}"),
        (
            known.arguments and not known.cause,
            'arguments are those of a cause: say its id, cause = "mask.inverted"',
        ),
        (
            known.kind not in ("", *KINDS),
            f"kind {known.kind!r}; a deviation is one of {', '.join(KINDS)}",
        ),
        (known.within is not None and not 0 < known.within < INFINITE, _TYPES["within"]),
        (
            is_error and known.within is not None,
            'within is for verdict = "deviates"; of an error, say raises',
        ),
    )
    for is_so, message in faults:
        if is_so:
            raise BrokenBaseline(message)
    condition = parse(known.when) if known.when.strip() else None
    values = msgspec.structs.asdict(known)
    return BaselineEntry(**values, number=number, line=line, condition=condition)
