"""The English text of findings, causes and entries of convention cards.

A convention card lists the conventions that an implementation was observed to follow. Records hold
all these statements as phrases: ids with named arguments. The text for an id is a template
in `words.toml` or, if it needs code, a function below. No program parses the text, so rewording it
changes no verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from conformance.records.findings import Argument, Phrase

Wording = str | Callable[..., str]
"""A template from `words.toml`, or a function of the phrase's named arguments."""


class Worded(msgspec.Struct, frozen=True, omit_defaults=True):
    """A phrase with its English text, for output read by both people and programs."""

    id: str
    text: str
    arguments: dict[str, Argument] = {}


def worded(phrase: Phrase) -> Worded | None:
    """Return the phrase with its text; None if the phrase is empty."""
    return Worded(phrase.id, say(phrase), phrase.arguments) if phrase else None


def say(phrase: Phrase) -> str:
    """Return the English text of a phrase; "" if the phrase is empty.

    If its id has no wording, or the wording does not fit its arguments, return the id with the
    arguments as text.
    """
    if not phrase:
        return ""
    around = tables()["around"]
    wording = wordings().get(phrase.id)
    arguments = {name: value for name, value in phrase.arguments.items() if name not in around}
    try:
        if wording is None:
            text = str(Phrase(phrase.id, arguments))
        elif callable(wording):
            text = wording(**arguments)
        else:
            text = wording.format(**_fields(arguments))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError):
        # A newer suite may use other arguments; the id with its arguments is still readable.
        text = str(Phrase(phrase.id, arguments))
    for name, template in around.items():
        if name in phrase.arguments:
            text = template.format(text=text, **_fields({name: phrase.arguments[name]}))
    return text


def advice(cause: Phrase, *, of_arrays: bool = False) -> str:
    """Return the advice on what to change so that the cause of a deviation is removed.

    If the cause is that of arrays which no adapter made (`of_arrays`), the advice asks for no
    declarations.

    Return "" if `words.toml` has no advice for the cause, or the advice does not fit its arguments.
    """
    template = tables()["advice"].get(cause.id, "")
    if of_arrays:
        template = tables()["advice for arrays"].get(cause.id, template)
    try:
        return template.format(**_fields(cause.arguments))
    except (KeyError, IndexError, ValueError):
        return ""


@cache
def tables() -> dict[str, dict[str, str]]:
    """Return the tables of `words.toml` by name.

    Each table maps ids to templates, except "around", which maps names of arguments to templates
    that extend the text of a phrase with this argument.
    """
    import tomllib

    return tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))


@cache
def wordings() -> Mapping[str, Wording]:
    """Return the wordings of all phrases, by id."""
    templates = {name: text for key in TABLES for name, text in tables()[key].items()}
    return templates | _FUNCTIONS


@cache
def causes() -> frozenset[str]:
    """Return the ids of all causes."""
    return frozenset(tables()["causes"]) | {"declaration.differs"}


TABLES = "entries", "causes", "places", "names"
"""The tables of `words.toml` that contain the wordings of phrases, by id."""


class _Listed:
    """A non-numeric argument of a phrase, wrapped so that templates can format it.

    The top of `words.toml` describes the format specifications.
    """

    def __init__(self, value: Argument) -> None:
        self.values = value if isinstance(value, list) else [value]

    def __format__(self, spec: str) -> str:
        if "|" in spec:
            one, several = spec.split("|")
            return one if len(self.values) == 1 else several
        texts = [say(value) if isinstance(value, Phrase) else str(value) for value in self.values]
        kind, _, separator = spec.partition(" ")
        if kind == "shapes":
            texts = [f"[{', '.join(text.split())}]" for text in texts]
            separator = separator.removeprefix("by ")
        elif kind == "gradients":
            if not texts:
                return "the gradients"
            return f"the gradient{'s' if texts[1:] else ''} of {self:and}"
        elif kind == "and":
            return " and ".join([", ".join(texts[:-1]), texts[-1]] if texts[1:] else texts)
        elif kind not in ("", "by"):
            raise ValueError(f"{spec!r} does not format {texts}")
        return (separator or ", ").join(texts)


def _fields(arguments: Mapping[str, Argument]) -> dict[str, Any]:
    """Return the arguments of a phrase as values that a template can format."""
    numbers = (int, float)
    return {n: v if isinstance(v, numbers) else _Listed(v) for n, v in arguments.items()}


def _mask_means(argument: str, form: Phrase, meaning: Phrase) -> str:
    forms = {"form.bool": "bool", "form.zero-one": "0/1", "form.zero-infinite": "0/-inf"}
    return f"{argument}[{forms.get(form.id) or say(form)}]={say(meaning)}"


def _fully_masked_query(row: Phrase, beside: Phrase | None = None) -> str:
    # Use the names of the values with which adapters declare `fully_masked_row`.
    names = {
        "row.nan": "nan",
        "row.output-bias": "output bias",
        "row.mean-of-values": "mean of values",
    }
    return "; ".join([names.get(row.id) or say(row), *([say(beside)] if beside else [])])


def _declaration_differs(subjects: Argument, more: int = 0) -> str:
    text = f"the declaration and what was seen differ: {_Listed(subjects)}"
    return f"{text}; and {more} more" if more else text


_FUNCTIONS: dict[str, Wording] = {
    "mask.means": _mask_means,
    "fully-masked.query": _fully_masked_query,
    "declaration.differs": _declaration_differs,
}
