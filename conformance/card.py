"""An entry of a convention card: one thing that an experiment showed."""

from __future__ import annotations

import msgspec


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One observed convention.

    Attributes:
        subject: what was looked at: "attn_mask, bool".
        value: what was seen, in few words: "blocks". The words are fixed, so that implementations
            can be compared.
        evidence: what exactly was fed and seen, for people.
        declared: what the adapter says, in the words of `value`; "" if it says nothing.
        agrees: whether `value` is what the adapter declares.
        code: lines that show it without this suite, or "".
    """

    subject: str
    value: str
    evidence: str = ""
    declared: str = ""
    agrees: bool = True
    code: str = ""
