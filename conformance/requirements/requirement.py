"""A Requirement: one sentence, why it matters, and the check that decides it.

A check sees an Examination (one implementation, one case) and returns a Finding. It never sees a
framework.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from conformance.cases.case import Case
from conformance.definition.comparison import Comparison, worst_of
from conformance.records.findings import Finding
from conformance.requirements.examination import Examination

Level = Literal["must", "should", "observed"]


@dataclass(frozen=True)
class Requirement:
    """One sentence that an implementation must or should satisfy, or an observed characteristic.

    Attributes:
        id: stable words, "chapter.sentence".
        level: "must", "should", or "observed" for what no definition settles.
        sentence: what is required.
        why: what goes wrong for users otherwise.
        check: decides it.
        every_case: whether all defined cases serve it; else those that name it in `Case.serves`,
            and those of `cases`.
        cases: patterns of the ids of defined cases that serve it, such as "mask/key-padding/*".
            They stand here, not in the case, where a requirement is added to cases that exist:
            what a case serves is part of its hash.
        of_answer: whether the finding depends on nothing but the answer to the case, so that modes
            that answer alike, bit for bit, share it.
        revision: to be increased whenever the same answer may get another finding, so that
            earlier findings are not taken for today's.
    """

    id: str
    level: Level
    sentence: str
    why: str
    check: Callable[[Examination], Finding | None]
    every_case: bool = False
    cases: tuple[str, ...] = ()
    of_answer: bool = False
    revision: int = 1

    @property
    def chapter(self) -> str:
        """The first word of the id."""
        return self.id.split(".")[0]

    def serves(self, case: Case) -> bool:
        """Return whether the case says something about this requirement."""
        if self.id in case.serves:
            return True
        matches = any(fnmatch.fnmatchcase(case.id, pattern) for pattern in self.cases)
        return case.defined and (self.every_case or matches)


def judge(
    requirement: str,
    comparisons: Iterable[Comparison],
    *,
    accuracy: str = "",
    said: str = "{array} is off",
) -> Finding:
    """Return `conforms` if every comparison fits, else `deviates` with the worst element."""
    worst = worst_of(comparisons)
    figures = worst.figures
    if accuracy:
        figures = type(figures)(
            figures.array,
            figures.max_ratio,
            figures.rms_ratio,
            figures.bias,
            figures.limit,
            accuracy,
        )
    if worst.fits:
        return Finding(requirement, "conforms", figures=figures)
    detail = said.format(array=figures.array)
    return Finding(requirement, "deviates", detail=detail, figures=figures, worst=worst.worst)
