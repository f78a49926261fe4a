"""All wording of findings, card entries and causes: what each id of a `Phrase` says in English.

This is the only place where their text is made. Nothing takes it apart again, so every sentence
here may be improved without changing a verdict, a gate or the structure of a page.
"""

from __future__ import annotations

from conformance.records.phrase import Argument, Phrase

WORDS: dict[str, str] = {}
"""Id to a template in the syntax of `str.format`, with the names of the arguments as fields."""


def say(phrase: Phrase) -> str:
    """Return the English text of a phrase; an id of a newer suite stands for itself."""
    if not phrase:
        return ""
    told = {name: _argument(value) for name, value in phrase.arguments.items()}
    if phrase.id in WORDS:
        return WORDS[phrase.id].format(**told)
    listed = ", ".join(f"{name}={value}" for name, value in told.items())
    return f"{phrase.id}({listed})" if listed else phrase.id


def _argument(value: Argument) -> str:
    if isinstance(value, Phrase):
        return say(value)
    if isinstance(value, list):
        return ", ".join(map(say, value))
    return str(value)
