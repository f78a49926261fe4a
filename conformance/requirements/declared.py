"""Compare what adapters declare with what experiments show (`conformance.experiments`)."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.adapter.base import Adapter
from conformance.records.findings import Entry, Finding
from conformance.records.phrase import Phrase
from conformance.requirements.examination import Examination
from conformance.requirements.requirement import Requirement
from conformance.words import say

MOST = 3
"""Entries that a detail names; the card has them all."""


def declared_row(said: str) -> Phrase:
    """Return the declared `Adapter.fully_masked_row` as a value of convention cards."""
    return Phrase(f"row.{said.replace(' ', '-')}")


def returned_weights(adapter: Adapter, returned: str) -> Phrase:
    """Return the form in which the implementation itself, without the adapter, returns weights.

    `returned` is "per head", "averaged" or "none", as they come back with it.
    """
    if returned == "per head" and adapter.weights_option:
        otherwise = Phrase(f"weights.{adapter.weights_otherwise}")
        return Phrase("weights.unless", {"otherwise": otherwise, "option": adapter.weights_option})
    return Phrase(f"weights.{returned.replace(' ', '-')}")


def compared(entries: Sequence[Entry]) -> Finding:
    """What an experiment says about the adapter's declaration."""
    wrong = [entry for entry in entries if not entry.agrees]
    if wrong:
        told = [
            f"{say(entry.subject)}: declared {say(entry.declared)}, observed {say(entry.value)}"
            for entry in wrong[:MOST]
        ]
        more = f"; and {len(wrong) - MOST} more" if len(wrong) > MOST else ""
        # Either may be what is wrong.
        cause = Phrase(
            "declaration.differs", {"subjects": [entry.subject for entry in wrong[:MOST]]}
        )
        if more:
            cause = cause.having(more=len(wrong) - MOST)
        return Finding(DECLARED.id, "deviates", "; ".join(told) + more, cause=cause)
    verdict = "conforms" if any(entry.declared for entry in entries) else "observed"
    return Finding(DECLARED.id, verdict)  # type: ignore[arg-type]


def of_no_case(ex: Examination) -> Finding | None:
    """Experiments decide it, not cases."""
    return None


DECLARED = Requirement(
    id="adapter.declares-what-is-observed",
    level="must",
    sentence="What the adapter declares of masks, flags, weights and dropout is what experiments "
    "show.",
    why="A declaration that is wrong makes a wrong translation, and a card that misleads a port.",
    check=of_no_case,
)

REQUIREMENTS = (DECLARED,)
