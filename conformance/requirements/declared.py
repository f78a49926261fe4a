"""What adapters declare, beside what experiments show (`conformance.experiments`)."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.records.card import Entry
from conformance.records.findings import Finding
from conformance.records.phrase import Phrase
from conformance.requirements.examination import Examination
from conformance.requirements.requirement import Requirement

MOST = 3
"""Entries that a detail names; the card has them all."""


def compared(entries: Sequence[Entry]) -> Finding:
    """What an experiment says about the adapter's declaration."""
    wrong = [entry for entry in entries if not entry.agrees]
    if wrong:
        told = [
            f"{entry.subject}: declared {entry.declared}, observed {entry.value}"
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
