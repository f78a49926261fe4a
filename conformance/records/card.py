"""Convention cards: their topics, and an entry for each thing that an experiment showed."""

from __future__ import annotations

import msgspec

from conformance.records.phrase import NOTHING, Phrase


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One observed convention.

    Attributes:
        subject: what was looked at: "mask.meaning" of an argument in a form.
        value: what was seen: "mask.blocks".
        evidence: what exactly was fed and seen, for people.
        declared: what the adapter says, to be compared with `value`; `NOTHING` if it says nothing.
        agrees: whether `value` is what the adapter declares.
        code: lines that show it without this suite, or "".
    """

    subject: Phrase
    value: Phrase
    evidence: str = ""
    declared: Phrase = NOTHING
    agrees: bool = True
    code: str = ""


class Topic(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an experiment is about.

    Attributes:
        name: as in "probe/masks".
        title: a heading.
        question: what it asks, in a sentence.
        revision: to be increased whenever the same behaviour may be described by another entry.
    """

    name: str
    title: str
    question: str
    revision: int = 1

    @property
    def id(self) -> str:
        """The case id under which it is recorded."""
        return PREFIX + self.name


PREFIX = "probe/"
