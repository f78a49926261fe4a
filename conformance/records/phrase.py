"""Represent a statement as an id with arguments.

`conformance.words` has the English text for each id.
"""

from __future__ import annotations

import msgspec


class Phrase(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A statement that programs can compare and count, independently of its wording.

    Attributes:
        id: a stable, dotted id such as "mask.inverted"; "" for the empty phrase.
        arguments: the values in the statement, by name; the order of names does not matter.
    """

    id: str
    arguments: dict[str, Argument] = {}

    def __hash__(self) -> int:
        return hash((self.id, repr(sorted(self.arguments.items()))))

    def __bool__(self) -> bool:
        return bool(self.id)

    def __str__(self) -> str:
        """Return the id with its arguments sorted by name; equal phrases have equal texts."""
        if not self.arguments:
            return self.id
        listed = (f"{name}={_text(value)}" for name, value in sorted(self.arguments.items()))
        return f"{self.id}({', '.join(listed)})"

    def name(self, argument: str) -> str:
        """Return the argument if it is a string, or ""."""
        value = self.arguments.get(argument, "")
        return value if isinstance(value, str) else ""

    def part(self, argument: str) -> Phrase:
        """Return the argument if it is a phrase, or the empty phrase."""
        value = self.arguments.get(argument, "")
        return value if isinstance(value, Phrase) else NOTHING

    def having(self, **arguments: Argument) -> Phrase:
        """Return a copy of the phrase with additional or changed arguments."""
        return Phrase(self.id, self.arguments | arguments)

    def parts(self, argument: str) -> list[Part]:
        """Return the argument if it is a list, or []."""
        value = self.arguments.get(argument, [])
        return value if isinstance(value, list) else []


Part = Phrase | str | int | float

Argument = Part | list[Part]
"""The type of an argument: a string, a number, a phrase, or a list of these."""

NOTHING = Phrase("")
"""The empty phrase, for fields that say nothing."""


def _text(value: Argument) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
