"""All wording of findings, card entries and causes: what each id of a `Phrase` says in English.

This is the only place where their text is made. Nothing takes it apart again, so every sentence
here may be improved without changing a verdict, a gate or the structure of a page.
"""

from __future__ import annotations

from collections.abc import Callable

from conformance.records.phrase import Argument, Phrase

Wording = str | Callable[..., str]
"""A template in the syntax of `str.format`, or a function of the arguments, by name."""

WORDS: dict[str, Wording] = {}
"""Id to its wording. A template gets each argument as text, a function as it is."""


def say(phrase: Phrase) -> str:
    """Return the English text of a phrase; an id of a newer suite stands for itself."""
    if not phrase:
        return ""
    wording = WORDS.get(phrase.id)
    try:
        if callable(wording):
            return wording(**phrase.arguments)
        if wording is not None:
            return wording.format(**{name: _text(it) for name, it in phrase.arguments.items()})
    except (KeyError, TypeError, AttributeError):
        # Arguments of another suite: the id with what there is says more than an error.
        pass
    return str(phrase)


def _text(value: Argument | Phrase | str, separator: str = ", ") -> str:
    if isinstance(value, Phrase):
        return say(value)
    if isinstance(value, list):
        return separator.join(map(_text, value))
    return str(value)
