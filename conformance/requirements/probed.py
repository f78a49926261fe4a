"""Requirements that experiments decide: `conformance.experiments` yields the entries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from conformance.records.findings import Entry, Finding, Verdict
from conformance.requirements.examination import Examination
from conformance.requirements.requirement import Requirement
from conformance.words import say


def of_no_case(ex: Examination) -> Finding | None:
    """Experiments decide it, not cases."""
    return None


DROPOUT = Requirement(
    id="dropout.is-unbiased",
    level="should",
    sentence="Dropout leaves the attention weights as they are in the mean over draws.",
    why="Dropped without rescaling, rescaled twice, or dropped before the softmax, the model that "
    "is trained is not the one that is evaluated.",
    check=of_no_case,
)
LAYOUT = Requirement(
    id="call.memory-layout-does-not-matter",
    level="must",
    sentence="Inputs with gaps between their numbers, or cut out of a larger array, get the same "
    "answer as contiguous ones.",
    why="A kernel that ignores strides reads other numbers, and nothing raises.",
    check=of_no_case,
)


@dataclass(frozen=True)
class Rule:
    """A rule by which entries of an experiment decide a requirement."""

    requirement: Requirement
    experiment: str
    subjects: tuple[str, ...]
    verdicts: dict[str, Verdict]


_RULES = (
    Rule(
        DROPOUT,
        "dropout",
        ("dropout.mean",),
        {"dropout.unbiased": "conforms", "dropout.biased": "deviates"},
    ),
    Rule(
        LAYOUT,
        "repeatability",
        ("again.strided", "again.window"),
        {
            "again.same-bits": "conforms",
            "again.within-noise": "conforms",
            "again.apart": "deviates",
        },
    ),
)


_WORST_FIRST: tuple[Verdict, ...] = ("deviates", "unsupported", "conforms")


def decided(experiment: str, entries: Sequence[Entry]) -> Iterator[Finding]:
    """What the entries of an experiment say about requirements of its own."""
    for rule in _RULES:
        about = [
            (rule.verdicts.get(entry.value.id, "unsupported"), entry)
            for entry in entries
            if rule.experiment == experiment and entry.subject.id in rule.subjects
        ]
        if about:
            verdict, entry = min(about, key=lambda pair: _WORST_FIRST.index(pair[0]))
            detail = f"{say(entry.subject)}: {entry.evidence}" if verdict != "conforms" else ""
            yield Finding(rule.requirement.id, verdict, detail, entry.value)


REQUIREMENTS = (DROPOUT, LAYOUT)
