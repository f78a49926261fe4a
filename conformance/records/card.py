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

TOPICS = (
    Topic(
        "masks",
        "What a mask means",
        "What does each mask argument do with True, 0 and 1, 0 and −inf, large negative numbers?",
    ),
    Topic(
        "same-mask",
        "Somebody else's mask",
        "One causal mask, written in three ways: who sees the future if it is handed over as is?",
    ),
    Topic(
        "masked-rows",
        "A query that may attend nothing",
        "What does it get: NaN, zeros, the output bias, a mean? And what becomes of gradients?",
    ),
    Topic(
        "causal",
        "The causal flag",
        "Where is its triangle if lengths differ, and what becomes of a mask beside it?",
    ),
    Topic("pairs", "Two masks at once", "Do two mask arguments combine, or does one win?"),
    Topic(
        "shapes",
        "Shapes of a mask",
        "Which shapes does each mask argument take, and for which axes?",
    ),
    Topic(
        "coinciding-sizes",
        "Shapes where sizes coincide",
        "For which axes is a mask taken where two axes have the same size?",
    ),
    Topic(
        "leaks",
        "NaN behind the mask",
        "Does NaN or an infinity in a blocked key or value reach the output or a gradient?",
    ),
    Topic(
        "weights",
        "Returned weights",
        "Are they for each head, do they sum to 1, are they the weights that were applied?",
    ),
    Topic("dropout", "Dropout", "Where is it active, how does it scale, what shares a draw?"),
    Topic(
        "degenerate-sizes",
        "Axes of size 0 and 1",
        "What comes of an empty batch, of no query, of no key, of one key?",
    ),
    Topic(
        "input-layouts",
        "Layout of the input",
        "Is input without a batch axis taken, is there sequence-first input?",
    ),
    Topic(
        "repeatability",
        "The same again",
        "Same bits twice, alone and inside a batch, strided, eager and compiled?",
    ),
)
"""In the order of a card. `conformance.experiments` has an experiment for each."""
