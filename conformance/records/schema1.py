"""Records of schema 1, converted to the current schema while they are read.

The statements of such a record are English sentences; here they become phrases. `schema1.json` has
the templates by which the last suite that wrote schema 1 made them, and the requirements and topics
of that suite. The file is frozen: new statements need no template. A sentence that fits no template
becomes the phrase "text".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from conformance.records.findings import PREFIX
from conformance.records.header import SCHEMA
from conformance.records.phrase import NOTHING, Argument, Part, Phrase

SCHEMA_1 = "mha-conformance/record/1"


class _Frozen(msgspec.Struct, frozen=True):
    """The content of `schema1.json`.

    Attributes:
        phrases: a kind of phrase ("form", "subject masks") to its templates and their ids, the more
            specific templates first.
        causes: the id of a cause, or of what causes mention, to its template; of several templates,
            the first whose fields fit is meant.
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
    """Return a whole record in the current schema."""
    results = [upgrade_result(result) for result in record["results"]]
    return record | {"header": upgrade_header(record["header"]), "results": results}


def upgrade_header(header: dict[str, Any]) -> dict[str, Any]:
    """Return a header in the current schema."""
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
    """Return the result of one item in the current schema."""
    experiment = result["case"].removeprefix(PREFIX)
    entries = []
    differing = []
    for entry in result.get("entries", []):
        about = subject(experiment, entry["subject"])
        values = {
            name: _builtins(value(experiment, entry[name], about.id))
            for name in entry.keys() & {"value", "declared"}
        }
        entries.append(entry | {"subject": _builtins(about)} | values)
        if not entry.get("agrees", True):
            differing.append(about)
    findings = [_finding(finding, tuple(differing)) for finding in result["findings"]]
    return result | {"findings": findings} | ({"entries": entries} if entries else {})


def _finding(finding: dict[str, Any], differing: tuple[Part, ...]) -> dict[str, Any]:
    phrases = {}
    if "value" in finding:
        phrases["value"] = observed(finding["requirement"], finding["value"])
    if "cause" in finding:
        phrases["cause"] = old_cause(finding["cause"], differing)
    if "where" in finding:
        phrases["where"] = old_place(finding["where"])
    return finding | {name: _builtins(phrase) for name, phrase in phrases.items()}


@cache
def _builtins(phrase: Phrase) -> dict[str, Any]:
    return msgspec.to_builtins(phrase)


# Sentences of convention cards, causes and places


@cache
def subject(experiment: str, text: str) -> Phrase:
    """Return the subject of an entry, by the name of its experiment."""
    return _phrase(text, f"subject {experiment}")


@cache
def value(experiment: str, text: str, about: str) -> Phrase:
    """Return the value of an entry, or what is declared of it; `about` is its subject's id."""
    if text == "refused":
        return Phrase("refused")
    own = f"value {about}"
    return _phrase(text, own if own in _frozen().phrases else f"value {experiment}")


@cache
def observed(requirement: str, text: str) -> Phrase:
    """Return the observed value of a finding."""
    return _phrase(text, f"observed {requirement}")


@cache
def old_cause(text: str, subjects: tuple[Part, ...] = ()) -> Phrase:
    """Return the cause of a finding.

    Args:
        subjects: of the item's card entries that are otherwise than declared, in their order. A
            cause that lists some of them is made of these.
    """
    return (_cause(text, subjects) or _as_text(text)) if text else NOTHING


@cache
def old_place(text: str) -> Phrase:
    """Return the part of an array that deviates."""
    return (_place(text) or _as_text(text)) if text else NOTHING


def _phrase(text: str, kind: str) -> Phrase:
    return _or_text(kind)(text) if text else NOTHING


def _as_text(text: str) -> Phrase:
    return Phrase("text", {"text": text})


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
"""What stands around the template of a cause, the outermost first."""


def _cause(text: str, subjects: tuple[Part, ...] = ()) -> Phrase | None:
    cause = next(_read(text, "cause"), None)
    if cause is not None:
        if "subjects" in cause.arguments:
            more = cause.arguments.get("more", 0)
            count = len(subjects) - (more if isinstance(more, int) else 0)
            listed = list(subjects[:count]) or [cause.name("subjects")]
            return cause.having(subjects=listed)
        # Of three templates, that without arrays speaks of all of them.
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


def _place(text: str) -> Phrase | None:
    place = next(_read(text, "where"), None)
    if place is not None or ", " not in text:
        return place
    # Between the axes stands ", ", and between the indices of one of them too.
    parts = _several(", (?=[a-z])", _place)(text)
    return None if parts is None or len(parts) < 2 else Phrase("where", {"parts": parts})


def old_wording(phrase: Phrase) -> str:
    """Return the text of a cause in the words of schema 1; "" for a cause that it did not have.

    Entries of baselines may quote these words.
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
    """Return the text of an argument; `last` stands before the last of several parts."""
    if isinstance(value, list):
        texts = [_joined(part) for part in value]
        return last.join([*([", ".join(texts[:-1])] if texts[1:] else []), *texts[-1:]])
    if isinstance(value, Phrase):
        return old_wording(value)
    return f"{value:.9g}" if isinstance(value, float) else str(value)


# Templates


def _read(text: str, kind: str) -> Iterator[Phrase]:
    """Yield what the text says by each template of a kind that fits it."""
    fields = _FIELDS if kind in _frozen().phrases else _CAUSE_FIELDS
    for name, pattern in _patterns(kind):
        match = pattern.fullmatch(text)
        if match is not None:
            arguments = {key: fields.get(key, str)(part) for key, part in match.groupdict().items()}
            if None not in arguments.values():
                yield Phrase(name, arguments)  # type: ignore[arg-type]


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
    # Those with the most words of their own come first.
    templates.sort(key=lambda item: -len(re.sub(r"\{\w+\}", "", item[1])))
    return [(name, _pattern(template)) for name, template in templates]


def _pattern(template: str) -> re.Pattern[str]:
    """Return what texts of a template look like; a field that occurs twice is the same twice."""
    parts = re.split(r"\{(\w+)\}", template)
    fields = parts[1::2]
    for index, field in enumerate(fields):
        first = fields.index(field) == index
        parts[2 * index + 1] = f"(?P<{field}>.+?)" if first else f"(?P={field})"
    parts[::2] = map(re.escape, parts[::2])
    return re.compile("".join(parts), re.DOTALL)


Reader = Callable[[str], Argument | None]
"""Reads the text of a field; None if it cannot be that field."""


def _one(kind: str) -> Callable[[str], Phrase | None]:
    return lambda text: next(_read(text, kind), None)


def _or_text(kind: str) -> Callable[[str], Phrase]:
    return lambda text: next(_read(text, kind), None) or _as_text(text)


def _several(separator: str, read: Callable[[str], Part | None]) -> Callable[..., Any]:
    def several(text: str) -> list[Part] | None:
        items = [read(part) for part in re.split(separator, text)]
        return None if None in items else [item for item in items if item is not None]

    return several


def _integer(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _layouts(separator: str) -> Reader:
    """Read "[batch, 1, key] [query, key]" as "batch 1 key" and "query key"."""

    def layouts(text: str) -> Argument | None:
        items = re.findall(r"\[([^\[\]]+)\]", text)
        if separator.join(f"[{item}]" for item in items) != text:
            return None
        return [" ".join(item.split(", ")) for item in items]

    return layouts


def _reading(text: str) -> Phrase | None:
    shape, _, axes = text.partition(" is ")
    layout = re.fullmatch(r"\[([^\[\]]+)\]", shape)
    read = next(_read(axes, "value shapes.misread"), None)
    if layout is None or read is None:
        return None
    return Phrase("reading", {"shape": " ".join(layout[1].split(", ")), "axes": read})


def _meaning(text: str) -> Phrase | None:
    """Read "attn_mask[0/-inf]=added"."""
    match = re.fullmatch(r"(\S+?)\[([^\]\s]+)\]=(.+)", text)
    form = None if match is None else next(_read(match[2], "mask form"), None)
    if match is None or form is None:
        return None
    meaning = _or_text("meaning")(match[3])
    return Phrase("mask.means", {"argument": match[1], "form": form, "meaning": meaning})


def _beside(text: str) -> Phrase:
    return Phrase("beside", {"parts": _several("; ", _or_text("beside"))(text)})


_FIELDS: dict[str, Reader] = {
    **{kind: _one(kind) for kind in ("form", "sizes", "lengths", "triangle", "written")},
    **{kind: _one(kind) for kind in ("number", "input")},
    "otherwise": _one("returned"),
    "row": _or_text("row"),
    "value": _one("finite"),
    "percent": _integer,
    "places": _several(", ", _one("place")),
    "over": _several(" and ", _one("axis")),
    "arrays": lambda text: [*text.split(", ")],
    "shapes": _layouts(" "),
    "axes": _layouts(" or "),
    "readings": _several("; ", _reading),
    "meanings": _several(" ", _meaning),
    "beside": _beside,
}
"""How a field of a template of a card is read; others are names."""

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
"""How a field of a template of a cause is read; others are names."""
