"""Causes, and places in an array, as records of schema 1 and older baselines word them.

`schema1_causes.json` has the templates by which the last suite that wrote schema 1 made its texts.
They are frozen: a cause that is added later needs no template here. A text that no template fits
stays as it is, in the phrase "text".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import msgspec

from conformance.records.phrase import NOTHING, Argument, Part, Phrase

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

_SEVERAL = {
    "gradient.several": ("causes", "; "),
    "argument.several": ("causes", "; "),
    "where": ("parts", ", "),
}
"""Phrases that list others, and what stands between these."""


@cache
def old_cause(text: str, subjects: tuple[Part, ...] = ()) -> Phrase:
    """Return the cause of a finding of schema 1.

    Args:
        subjects: of the item's card entries that are otherwise than declared, in their order. A
            cause that lists some of them is made of these.
    """
    if not text:
        return NOTHING
    return _cause(text, subjects) or Phrase("text", {"text": text})


@cache
def old_place(text: str) -> Phrase:
    """Return where a finding of schema 1 deviates."""
    if not text:
        return NOTHING
    return _place(text) or Phrase("text", {"text": text})


def old_wording(phrase: Phrase) -> str:
    """Return the text of a cause in the words of schema 1; "" for one that came later."""
    around = {name for name, _, _ in _AROUND} & phrase.arguments.keys()
    own = {name: value for name, value in phrase.arguments.items() if name not in around}
    if phrase.id in _SEVERAL:
        field, separator = _SEVERAL[phrase.id]
        parts = own.get(field)
        text = separator.join(map(_joined, parts)) if isinstance(parts, list) else ""
    else:
        text = _rendered(phrase.id, own)
    for name, _, template in reversed(_AROUND):
        if text and name in around:
            text = template.format(text=text, **{name: _joined(phrase.arguments[name])})
    return text


@cache
def _templates() -> dict[str, list[str]]:
    """Id to its templates; of several, the first whose fields fit is meant."""
    content = Path(__file__).with_suffix(".json").read_bytes()
    found = msgspec.json.decode(content, type=dict[str, str | list[str]])
    return {name: [own] if isinstance(own, str) else own for name, own in found.items()}


def _rendered(name: str, arguments: dict[str, Argument]) -> str:
    templates = _templates().get(name, [""])
    arrays = arguments.get("arrays")
    if isinstance(arrays, list) and len(templates) == 3:
        templates = templates[1:2] if len(arrays) > 1 else templates[0 if arrays else 2 :]
    texts = {
        key: _joined(value, " and " if key in _SERIES else ", ") for key, value in arguments.items()
    }
    for template in templates:
        if set(re.findall(r"\{(\w+)\}", template)) <= texts.keys():
            return template.format(**texts)
    return ""


def _joined(value: Argument, last: str = ", ") -> str:
    """Text of an argument; `last` stands before the last of several."""
    if isinstance(value, list):
        texts = [_joined(own) for own in value]
        return last.join([*([", ".join(texts[:-1])] if texts[1:] else []), *texts[-1:]])
    if isinstance(value, Phrase):
        return old_wording(value)
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _cause(text: str, subjects: tuple[Part, ...] = ()) -> Phrase | None:
    found = next(_read(text, _is_cause, subjects), None)
    if found is not None:
        return found
    if "; " in text:
        causes = [_cause(part) for part in text.split("; ")]
        if all(causes):
            name = "argument" if causes[0].id.startswith("argument.") else "gradient"  # type: ignore[union-attr]
            return Phrase(f"{name}.several", {"causes": causes})  # type: ignore[dict-item]
    for name, pattern, _ in _AROUND:
        match = pattern.fullmatch(text)
        if match is None:
            continue
        inner = _cause(match["text"])
        around: Argument | None = match[name]
        if name == "part":
            around = _place(match[name])
        elif name == "others":
            around = 1
        if inner is not None and around is not None:
            return inner.having(**{name: around})
    return None


def _place(text: str) -> Phrase | None:
    found = next(_read(text, lambda name: name.startswith("where.")), None)
    if found is not None:
        return found
    # Between the axes stands ", ", and between the indices of one of them too.
    parts = [_place(part) for part in re.split(r", (?=[a-z])", text)] if ", " in text else []
    if len(parts) < 2 or None in parts:
        return None
    return Phrase("where", {"parts": parts})  # type: ignore[dict-item]


def _is_cause(name: str) -> bool:
    return not name.startswith(("where.", "array.", "stage.", "significand.", "handed."))


def _named(kind: str) -> Callable[[str], Phrase | None]:
    return lambda text: next(_read(text, lambda name: name.startswith(f"{kind}.")), None)


def _read(
    text: str, wanted: Callable[[str], bool], subjects: Sequence[Part] = ()
) -> Iterator[Phrase]:
    """What the text says by each template that fits it."""
    for name, pattern in _patterns():
        match = pattern.fullmatch(text) if wanted(name) else None
        if match is None:
            continue
        read = {field: _FIELDS.get(field, str)(part) for field, part in match.groupdict().items()}
        if "subjects" in read:
            count = len(subjects) - int(match.groupdict().get("more", 0))
            read["subjects"] = list(subjects[:count]) or [match["subjects"]]
        if None not in read.values():
            if len(_templates()[name]) == 3:
                read.setdefault("arrays", [])
            yield Phrase(name, read)  # type: ignore[arg-type]


@cache
def _patterns() -> list[tuple[str, re.Pattern[str]]]:
    """Ids and what their texts look like, those that say most by themselves first."""
    listed = [(name, own) for name, templates in _templates().items() for own in templates]
    listed.sort(key=lambda item: -len(re.sub(r"\{\w+\}", "", item[1])))
    return [(name, _pattern(own)) for name, own in listed]


def _pattern(template: str) -> re.Pattern[str]:
    """Fields may be any text; one that stands there twice is the same twice."""
    parts = re.split(r"\{(\w+)\}", template)
    fields = parts[1::2]
    for index, field in enumerate(fields):
        first = fields.index(field) == index
        parts[2 * index + 1] = f"(?P<{field}>.+?)" if first else f"(?P={field})"
    parts[::2] = map(re.escape, parts[::2])
    return re.compile("".join(parts), re.DOTALL)


def _integer(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


_SERIES = {"arrays", "indices", "inputs", "over"}
"""Fields that list something, with "and" before the last."""


def _series(read: Callable[[str], Argument | None]) -> Callable[[str], Argument | None]:
    def several(text: str) -> Argument | None:
        items = [read(part) for part in re.split(", | and ", text)]
        return None if None in items else items  # type: ignore[return-value]

    return several


_FIELDS: dict[str, Callable[[str], Argument | None]] = {
    **dict.fromkeys(("by", "number", "limit", "factor", "amount", "below"), _number),
    **dict.fromkeys(
        ("at", "first", "last", "size", "cap", "power", "digits", "count", "batch", "more"),
        _integer,
    ),
    "keys": _named("where.key"),
    "queries": _named("where.query"),
    "array": _named("array"),
    "arrays": _series(_named("array")),
    "stage": _named("stage"),
    "format": _named("significand"),
    "form": _named("handed"),
    "accuracy": _named("accuracy"),
    "indices": _series(_integer),
    "inputs": _series(str),
    "over": _series(str),
    "order": lambda text: [*text.split(", ")],
}
"""How a field of a template is read; others are names."""
