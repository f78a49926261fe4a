"""A statement as an id with arguments; `conformance.words` has the English of it."""

from __future__ import annotations

import msgspec


class Phrase(msgspec.Struct, frozen=True, omit_defaults=True):
    """A statement that a program can compare, count and match; its wording may change.

    Attributes:
        id: stable and dotted, such as "mask.inverted"; "" for the empty phrase.
        arguments: what the statement is about, by name; the order of names does not matter.
    """

    id: str
    arguments: dict[str, Argument] = {}

    def __hash__(self) -> int:
        return hash((self.id, repr(sorted(self.arguments.items()))))

    def __bool__(self) -> bool:
        return bool(self.id)

    def __str__(self) -> str:
        """Return the id with its arguments, sorted by name: equal for equal phrases."""
        if not self.arguments:
            return self.id
        listed = (f"{name}={_text(value)}" for name, value in sorted(self.arguments.items()))
        return f"{self.id}({', '.join(listed)})"

    def name(self, argument: str) -> str:
        """Return an argument that is a name, or ""."""
        value = self.arguments.get(argument, "")
        return value if isinstance(value, str) else ""

    def part(self, argument: str) -> Phrase:
        """Return an argument that is a phrase, or the empty phrase."""
        value = self.arguments.get(argument, "")
        return value if isinstance(value, Phrase) else NOTHING

    def having(self, **arguments: Argument) -> Phrase:
        """Return the same statement with more arguments."""
        return Phrase(self.id, self.arguments | arguments)

    def parts(self, argument: str) -> list[Part]:
        """Return an argument that is a list, or []."""
        value = self.arguments.get(argument, [])
        return value if isinstance(value, list) else []


Part = Phrase | str | int | float

Argument = Part | list[Part]
"""A name, a number, a phrase, or a list of them."""

NOTHING = Phrase("")
"""The empty phrase."""


def _text(value: Argument) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
