"""Convert records of schema 1 to the current schema when they are read.

Statements in such records are English sentences, which this module parses into phrases.
`schema1.json` has the sentence templates, requirements and topics of the last version that wrote
schema 1. It never changes, because new statements are written as phrases. A sentence that matches
no template becomes a phrase with the id "text".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from conformance.records.findings import NOTHING, PREFIX, Argument, Part, Phrase
from conformance.records.header import SCHEMA

SCHEMA_1 = "mha-conformance/record/1"


class _Frozen(msgspec.Struct, frozen=True):
    """The content of `schema1.json`.

    Attributes:
        requirements, topics: those of the last version that wrote schema 1.
        phrases: for each kind of phrase ("form", "subject masks"), the id of each template, with
            more specific templates first.
        causes: for each id of a cause, or of a phrase in a cause, its template or templates; the
            first one whose fields match is used.
    """

    requirements: list[dict[str, Any]]
    topics: list[dict[str, Any]]
    phrases: dict[str, dict[str, str]]
    causes: dict[str, str | list[str]]

    def templates(self, cause: str) -> list[str]:
        templates = self.causes.get(cause, [])
        return [templates] if isinstance(templates, str) else templates


@cache
def _frozen() -> _Frozen:
    content = Path(__file__).with_name("schema1.json").read_bytes()
    return msgspec.json.decode(content, type=_Frozen)


# Records: decoded JSON, before it becomes a `Record`


def upgrade_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return a decoded record, converted to the current schema."""
    results = [upgrade_result(result) for result in record["results"]]
    return record | {"header": upgrade_header(record["header"]), "results": results}


def upgrade_line(line: dict[str, Any]) -> dict[str, Any]:
    """Return a decoded line of a journal, converted to the current schema."""
    return line | {"result": upgrade_result(line["result"])}


def upgrade_header(header: dict[str, Any]) -> dict[str, Any]:
    """Return a decoded header, converted to the current schema."""
    return header | {
        "schema": SCHEMA,
        "implementations": [_implementation(item) for item in header["implementations"]],
        "requirements": _frozen().requirements,
        "topics": _frozen().topics,
    }


_CAUSAL = re.compile(r"(?P<name>.+) \((?P<alignment>[a-z -]+)(?:, with (?P<needs>.+))?\)")


def _implementation(item: dict[str, Any]) -> dict[str, Any]:
    causal = _CAUSAL.fullmatch(item.get("causal", ""))
    without = {name: value for name, value in item.items() if name != "causal"}
    if causal is None:
        return without
    alignment = "" if causal["alignment"] == "equal lengths only" else causal["alignment"]
    flag = {"name": causal["name"], "alignment": alignment, "needs": causal["needs"] or ""}
    return without | {"causal": flag}


def upgrade_result(result: dict[str, Any]) -> dict[str, Any]:
    """Return the decoded result of an item, converted to the current schema."""
    experiment = result["case"].removeprefix(PREFIX)
    entries = []
    differing = []
    for entry in result.get("entries", []):
        subject = parsed(entry["subject"], f"subject {experiment}")
        values = {
            name: _builtins(value(experiment, entry[name], subject.id))
            for name in entry.keys() & {"value", "declared"}
        }
        entries.append(entry | {"subject": _builtins(subject)} | values)
        if not entry.get("agrees", True):
            differing.append(subject)
    findings = [_finding(finding, tuple(differing)) for finding in result["findings"]]
    return result | {"findings": findings} | ({"entries": entries} if entries else {})


def _finding(finding: dict[str, Any], differing: tuple[Part, ...]) -> dict[str, Any]:
    phrases = {}
    if "value" in finding:
        phrases["value"] = parsed(finding["value"], f"observed {finding['requirement']}")
    if "cause" in finding:
        phrases["cause"] = old_cause(finding["cause"], differing)
    if "where" in finding:
        phrases["where"] = _or_text(_place(finding["where"]), finding["where"])
    return finding | {name: _builtins(phrase) for name, phrase in phrases.items()}


@cache
def _builtins(phrase: Phrase) -> dict[str, Any]:
    return msgspec.to_builtins(phrase)


# Sentences of convention cards, causes and places


@cache
def parsed(text: str, kind: str) -> Phrase:
    """Return the phrase for a sentence of a kind, such as "subject masks".

    The phrase has the id "text" if no template of this kind matches, and is empty if `text` is "".
    """
    return _or_text(_read(text, kind), text)


def _or_text(phrase: Phrase | None, text: str) -> Phrase:
    return phrase or (Phrase("text", {"text": text}) if text else NOTHING)


def value(experiment: str, text: str, about: str) -> Phrase:
    """Return the phrase for `text`, which states the value in an entry of a convention card.

    `experiment` is the name of the experiment, and `about` the id of the entry's subject.
    """
    if text == "refused":
        return Phrase("refused")
    own = f"value {about}"
    return parsed(text, own if own in _frozen().phrases else f"value {experiment}")


@cache
def old_cause(text: str, subjects: tuple[Part, ...] = ()) -> Phrase:
    """Return the phrase for the cause of a finding.

    Args:
        text: the sentence of the cause.
        subjects: the subjects of the item's card entries whose values differ from the adapter's
            declarations. A cause that says that declarations differ gets these subjects.
    """
    return _or_text(_cause(text, subjects), text)


_AROUND = (
    ("mode", re.compile(r"in mode (?P<mode>.+?): (?P<text>.+)"), "in mode {mode}: {text}"),
    ("given", re.compile(r"with (?P<given>.+?): (?P<text>.+)"), "with {given}: {text}"),
    ("part", re.compile(r"(?P<text>.+), in (?P<part>.+?) only"), "{text}, in {part} only"),
    (
        "others",
        re.compile(r"(?P<text>.+)(?P<others>, or with another number than that)"),
        "{text}, or with another number than that",
    ),
)
"""Optional additions before or after the sentence of a cause, the outermost first.

Each has the name of the phrase's argument, a pattern to parse the addition, and a template.
"""


def _cause(text: str, subjects: tuple[Part, ...] = ()) -> Phrase | None:
    cause = _read(text, "cause")
    if cause is not None:
        if "subjects" in cause.arguments:
            more = cause.arguments.get("more", 0)
            count = len(subjects) - (more if isinstance(more, int) else 0)
            listed = list(subjects[:count]) or [cause.name("subjects")]
            return cause.having(subjects=listed)
        # If there are three templates, the one without "arrays" stands for all arrays.
        all_arrays = len(_frozen().templates(cause.id)) == 3 and "arrays" not in cause.arguments
        return cause.having(arrays=[]) if all_arrays else cause
    if "; " in text:
        causes = [part for part in map(_cause, text.split("; ")) if part is not None]
        if len(causes) == text.count("; ") + 1:
            group = "argument" if causes[0].id.startswith("argument.") else "gradient"
            return Phrase(f"{group}.several", {"causes": [*causes]})
    for name, pattern, _ in _AROUND:
        match = pattern.fullmatch(text)
        if match is None:
            continue
        inner = _cause(match["text"])
        argument: Argument | None = match[name]
        if name == "part":
            argument = _place(match[name])
        elif name == "others":
            argument = 1
        if inner is not None and argument is not None:
            return inner.having(**{name: argument})
    return None


@cache
def _place(text: str) -> Phrase | None:
    """Parse a sentence about which part of an array deviates; return None if none matches."""
    place = _read(text, "where")
    if place is not None or ", " not in text:
        return place
    # A ", " separates axes, but also the indices along one axis.
    parts = _several(", (?=[a-z])", _place)(text)
    return None if parts is None or len(parts) < 2 else Phrase("where", {"parts": parts})


def old_wording(phrase: Phrase) -> str:
    """Return the sentence of schema 1 for a cause; entries of baselines may quote this sentence.

    Return "" if schema 1 did not have the cause.
    """
    around = {name for name, _, _ in _AROUND} & phrase.arguments.keys()
    arguments = {name: value for name, value in phrase.arguments.items() if name not in around}
    if phrase.id in ("gradient.several", "argument.several"):
        text = "; ".join(map(_joined, phrase.parts("causes")))
    elif phrase.id == "where":
        text = ", ".join(map(_joined, phrase.parts("parts")))
    else:
        text = _rendered(phrase.id, arguments)
    for name, _, template in reversed(_AROUND):
        if text and name in around:
            text = template.format(text=text, **{name: _joined(phrase.arguments[name])})
    return text


def _rendered(name: str, arguments: dict[str, Argument]) -> str:
    templates = _frozen().templates(name)
    arrays = arguments.get("arrays")
    if isinstance(arrays, list) and len(templates) == 3:
        templates = templates[1:2] if len(arrays) > 1 else templates[0 if arrays else 2 :]
    texts = {
        key: _joined(value, " and " if key in ("arrays", "indices", "inputs", "over") else ", ")
        for key, value in arguments.items()
    }
    for template in templates:
        if set(re.findall(r"\{(\w+)\}", template)) <= texts.keys():
            return template.format(**texts)
    return ""


def _joined(value: Argument, last: str = ", ") -> str:
    """Return the text of an argument; `last` is the separator before the last part of a list."""
    if isinstance(value, list):
        texts = [_joined(part) for part in value]
        return last.join([*([", ".join(texts[:-1])] if texts[1:] else []), *texts[-1:]])
    if isinstance(value, Phrase):
        return old_wording(value)
    return f"{value:.9g}" if isinstance(value, float) else str(value)


# Templates


def _read(text: str, kind: str) -> Phrase | None:
    """Parse a text by the first matching template of a kind; return None if none matches."""
    fields = _FIELDS if kind in _frozen().phrases else _CAUSE_FIELDS
    for name, pattern in _patterns(kind):
        match = pattern.fullmatch(text)
        if match is not None:
            arguments = {key: fields.get(key, str)(part) for key, part in match.groupdict().items()}
            if None not in arguments.values():
                return Phrase(name, arguments)  # type: ignore[arg-type]
    return None


@cache
def _patterns(kind: str) -> list[tuple[str, re.Pattern[str]]]:
    frozen = _frozen()
    if kind in frozen.phrases:
        return [(name, _pattern(template)) for template, name in frozen.phrases[kind].items()]
    mentioned = ("where.", "array.", "stage.", "significand.", "handed.")
    templates = [
        (name, template)
        for name in frozen.causes
        if (not name.startswith(mentioned) if kind == "cause" else name.startswith(f"{kind}."))
        for template in frozen.templates(name)
    ]
    # Templates with the most fixed text come first.
    templates.sort(key=lambda item: -len(re.sub(r"\{\w+\}", "", item[1])))
    return [(name, _pattern(template)) for name, template in templates]


def _pattern(template: str) -> re.Pattern[str]:
    """Return a regular expression for a template; a repeated field must match equal texts."""
    parts = re.split(r"\{(\w+)\}", template)
    fields = parts[1::2]
    for index, field in enumerate(fields):
        first = fields.index(field) == index
        parts[2 * index + 1] = f"(?P<{field}>.+?)" if first else f"(?P={field})"
    parts[::2] = map(re.escape, parts[::2])
    return re.compile("".join(parts), re.DOTALL)


Reader = Callable[[str], Argument | None]
"""A function that parses the text of a field, or returns None if the text does not fit."""


def _one(kind: str) -> Reader:
    return lambda text: _read(text, kind)


def _any(kind: str) -> Callable[[str], Phrase]:
    return lambda text: parsed(text, kind)


def _several(separator: str, read: Callable[[str], Any]) -> Callable[[str], Any]:
    def several(text: str) -> list[Part] | None:
        items = [read(part) for part in re.split(separator, text)]
        return None if None in items else items

    return several


def _integer(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _number(text: str) -> float | None:
    with suppress(ValueError):
        return float(text)
    return None


def _layouts(separator: str) -> Reader:
    """Return a reader of layouts in brackets, joined by `separator`.

    With the separator " ", it parses "[batch, 1] [key]" as ["batch 1", "key"]. It returns None for
    text of another form.
    """

    def layouts(text: str) -> Argument | None:
        items = re.findall(r"\[([^\[\]]+)\]", text)
        if separator.join(f"[{item}]" for item in items) != text:
            return None
        return [" ".join(item.split(", ")) for item in items]

    return layouts


def _reading(text: str) -> Phrase | None:
    match = re.fullmatch(r"\[([^\[\]]+)\] is (.*)", text)
    axes = match and _read(match[2], "value shapes.misread")
    if not match or not axes:
        return None
    return Phrase("reading", {"shape": " ".join(match[1].split(", ")), "axes": axes})


def _meaning(text: str) -> Phrase | None:
    """Parse a text such as "attn_mask[0/-inf]=added"; return None if it has another form."""
    match = re.fullmatch(r"(\S+?)\[([^\]\s]+)\]=(.+)", text)
    form = match and _read(match[2], "mask form")
    if not match or not form:
        return None
    meaning = parsed(match[3], "meaning")
    return Phrase("mask.means", {"argument": match[1], "form": form, "meaning": meaning})


_FIELDS: dict[str, Reader] = {
    **{
        kind: _one(kind)
        for kind in ["form", "sizes", "lengths", "triangle", "written", "number", "input"]
    },
    "otherwise": _one("returned"),
    "row": _any("row"),
    "value": _one("finite"),
    "percent": _integer,
    "places": _several(", ", _one("place")),
    "over": _several(" and ", _one("axis")),
    "arrays": lambda text: [*text.split(", ")],
    "shapes": _layouts(" "),
    "axes": _layouts(" or "),
    "readings": _several("; ", _reading),
    "meanings": _several(" ", _meaning),
    "beside": lambda text: Phrase("beside", {"parts": _several("; ", _any("beside"))(text)}),
}
"""The readers of fields in templates of cards; all other fields are strings."""

_CAUSE_FIELDS: dict[str, Reader] = {
    **dict.fromkeys(("by", "number", "limit", "factor", "amount", "below"), _number),
    **dict.fromkeys(("at", "first", "last", "size", "cap", "power", "digits"), _integer),
    **dict.fromkeys(("count", "batch", "more"), _integer),
    "keys": _one("where.key"),
    "queries": _one("where.query"),
    "array": _one("array"),
    "arrays": _several(", | and ", _one("array")),
    "stage": _one("stage"),
    "format": _one("significand"),
    "form": _one("handed"),
    "accuracy": _one("accuracy"),
    "indices": _several(", | and ", _integer),
    "inputs": _several(", | and ", str),
    "over": _several(", | and ", str),
    "order": lambda text: [*text.split(", ")],
}
"""The readers of fields in templates of causes; all other fields are strings."""
