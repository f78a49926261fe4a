"""Define `Requirement`: one sentence, the reason why it matters, and the check that decides it.

A check receives an `Examination` (one implementation and one case), and returns a `Finding`, or
None if the requirement does not apply. It raises `Unsupported` if the implementation lacks what the
requirement is about. A check never handles the arrays of a framework.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from conformance.adapter.base import Adapter, Mode
from conformance.cases.case import Case
from conformance.definition.comparison import RMS, Comparison, worst_of
from conformance.definition.statistics import RowStatistic
from conformance.records.findings import Finding
from conformance.requirements.examination import Examination

Level = Literal["must", "should", "observed"]
Check = Callable[[Examination], Finding | None]


@dataclass(frozen=True)
class Requirement:
    """One sentence that an implementation must or should satisfy, or an observed characteristic.

    Attributes:
        id: a stable name, "chapter.sentence".
        sentence: what is required.
        check: the function that decides whether the requirement is satisfied. For a requirement
            that only experiments decide, it returns None.
        why: what goes wrong for users if the requirement is not satisfied.
        level: "must", "should", or "observed" for a characteristic that the definition leaves open.
        every_case: whether the requirement is checked with every case that has a defined answer.
            Otherwise, it is checked only with cases that name it in `Case.serves` or match `cases`.
        cases: patterns for ids of cases, such as "mask/key-padding/*". Use them to check the
            requirement with existing cases, whose hashes a change of `Case.serves` would change.
        of_answer: whether the finding depends only on the answer to the case, so that modes whose
            answers are bitwise equal share the finding.
        where: whether an adapter's mode has what the requirement is about. If not, it is not asked,
            whereas a check that raises `Unsupported` is counted.
        revision: a number to increase whenever the same answer may lead to another finding, so that
            earlier findings are not reused.
    """

    id: str
    sentence: str
    check: Check
    why: str
    level: Level = "must"
    every_case: bool = False
    cases: tuple[str, ...] = ()
    of_answer: bool = False
    where: Callable[[Adapter, Mode], bool] = lambda adapter, mode: True
    revision: int = 1

    @property
    def chapter(self) -> str:
        """The part of the id before the first dot."""
        return self.id.split(".")[0]

    def serves(self, case: Case) -> bool:
        """Return whether this requirement is checked with the case."""
        if self.id in case.serves:
            return True
        matches = any(fnmatch.fnmatchcase(case.off_grid, pattern) for pattern in self.cases)
        return matches or (case.defined and self.every_case)


def requirement(name: str, sentence: str, **fields: Any) -> Callable[[Check], Requirement]:
    """Return a decorator that turns a check function into the `Requirement` that it decides.

    Args:
        name: the id of the requirement.
        sentence: the sentence of the requirement.
        fields: other attributes of the `Requirement`: `why`, and those whose values are not the
            defaults.
    """
    return lambda check: Requirement(name, sentence, check, **fields)


def returns(statistic: RowStatistic) -> Callable[[Adapter, Mode], bool]:
    """Return a function that says whether an implementation returns a statistic in a mode."""
    return lambda adapter, mode: statistic.name in adapter.statistics_in(mode)


def judge(
    requirement: str,
    comparisons: Iterable[Comparison],
    *,
    accuracy: str = "",
    said: str = "{array} is off",
) -> Finding:
    """Return a finding with the verdict "conforms" if every comparison fits, else "deviates".

    Args:
        requirement: the requirement's id.
        comparisons: at least one comparison; the finding has the figures of the worst one.
        accuracy: the accuracy class that was reached, or "".
        said: the detail of a deviation; `{array}` stands for the name of the worst array. If no
            single element deviates, the rms and the bias of that array are appended.
    """
    worst = worst_of(comparisons)
    figures = msgspec.structs.replace(worst.figures, accuracy=accuracy)
    if worst.fits:
        return Finding(requirement, "conforms", figures=figures)
    detail = said.format(array=figures.array)
    if figures.max_ratio <= figures.limit:
        detail += f": no single element, but all together (rms {figures.rms_ratio:.3g}σ"
        detail += f", allowed {RMS * figures.limit:.3g}σ; bias {figures.bias:.3g})"
    return Finding(requirement, "deviates", detail=detail, figures=figures, worst=worst.worst)
