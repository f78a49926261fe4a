"""A Requirement: one sentence, why it matters, and the check that decides it.

A check sees an Examination (one implementation, one case) and returns a Finding. It never sees a
framework.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from conformance.cases.case import Case
from conformance.definition.comparison import RMS, Comparison, worst_of
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
        check: the function that decides it.
        why: what goes wrong for users otherwise.
        level: "must", "should", or "observed" for what the definition leaves open.
        every_case: whether every case with a defined answer examines it; otherwise, these are the
            cases that name it in `Case.serves` or match `cases`.
        cases: id patterns of cases, such as "mask/key-padding/*". Use this to add a requirement to
            existing cases, because changing `Case.serves` would change their hashes.
        of_answer: whether the finding depends only on the answer to the case, so that modes whose
            answers are bitwise equal share it.
        revision: increase it whenever the same answer may get another finding, so that earlier
            findings are not reused.
    """

    id: str
    sentence: str
    check: Check
    why: str
    level: Level = "must"
    every_case: bool = False
    cases: tuple[str, ...] = ()
    of_answer: bool = False
    revision: int = 1

    @property
    def chapter(self) -> str:
        """The first word of the id."""
        return self.id.split(".")[0]

    def serves(self, case: Case) -> bool:
        """Return whether this requirement is examined with the case."""
        if self.id in case.serves:
            return True
        matches = any(fnmatch.fnmatchcase(case.id, pattern) for pattern in self.cases)
        return matches or (case.defined and self.every_case)


def requirement(name: str, sentence: str, **fields: Any) -> Callable[[Check], Requirement]:
    """Return a decorator that replaces a check by the requirement that it decides.

    Args:
        name, sentence: `id` and `sentence` of the `Requirement`.
        fields: further attributes of the `Requirement`: `why`, and any that are not the default.
    """
    return lambda check: Requirement(name, sentence, check, **fields)


def judge(
    requirement: str,
    comparisons: Iterable[Comparison],
    *,
    accuracy: str = "",
    said: str = "{array} is off",
) -> Finding:
    """Return a finding that `conforms` if every comparison fits, else `deviates`.

    Args:
        requirement: the requirement's id.
        comparisons: at least one; the finding has the figures of the worst.
        accuracy: the accuracy class that was reached, "" if none.
        said: the detail of a deviation; `{array}` stands for the name of the worst array.
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
