"""What a finding says, as an id with arguments; `conformance.words` makes the text of it."""

from __future__ import annotations

import msgspec


class Phrase(msgspec.Struct, frozen=True, omit_defaults=True):
    """A statement that a program can compare, count and match; its wording may change.

    Attributes:
        id: stable and dotted, such as "mask.inverted"; "" says nothing.
        arguments: what the statement is about, by name; the order of names does not matter.
    """

    id: str
    arguments: dict[str, Argument] = {}

    def __hash__(self) -> int:
        return hash((self.id, repr(sorted(self.arguments.items()))))

    def __bool__(self) -> bool:
        return bool(self.id)


Argument = str | int | float | Phrase | list[Phrase]
"""A name, a number, or what another phrase says."""
