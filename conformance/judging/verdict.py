"""The verdict on a candidate, and the score computed from its right answers.

The score is a weighted mean over all problems of the task, with weights that depend only on the
task and on the dtypes that the framework has, and not on a candidate's declarations. Therefore, if
a candidate is right on every problem on which another candidate of the same framework is right, it
never scores less, unless it cheats. A problem that a candidate does not support does not count as
right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from conformance.records.findings import CaseResult

Ruling = Literal["right", "wrong", "cheat", "failed"]
"""The verdict in a word. "failed": the candidate cannot be imported or judged, or supports no
problem of the task, or too few of chapter "plain"."""

WEIGHTS: Mapping[str, float] = {
    "plain": 5,
    "mask": 5,
    "causal": 4,
    "bias": 2,
    "logits": 2,
    "values": 1,
    "scale": 1,
    "edge": 1,
    "feature": 4,
}
"""The weight of each chapter, relative to the sum over all chapters of the task."""
OTHERWISE = 1.0
"""The weight of each chapter that is not in `WEIGHTS`."""
LEAST_PLAIN = 0.3
"""The share of right outputs in chapter "plain" below which the score is 0. Such a candidate does
not compute attention, but might be right on easy problems: with one key, every weight is 1."""
OF_OUTPUT = 0.6
"""The share of a problem's points for its output, if gradients count; they get the rest."""


class Cause(msgspec.Struct, frozen=True, omit_defaults=True):
    """A deviation, on the smallest problem that shows it.

    Attributes:
        requirement: the id of the requirement that is not met.
        cause: the mistake that explains it, in a sentence; "" if none is known.
        detail: what deviates.
        case, dtype: the id of the case, without the name of a grid of sizes, and the dtype.
        sizes: the sizes of the problem, by the names batch, query, key, heads, kv_heads, head and
            value_head.
        array, index: the array and the index of the worst element; "" and () if there is none.
        got, want: the actual and the expected value of that element, as text.
        ratio: the error of that element in units of rounding noise σ; None if not compared.
        allowed: the largest ratio that a right answer may have; None if not compared.
        where: the part of the array that is wrong; "" if all of it is, or the part is unknown.
        advice: what to change; "" if the cause is not known.
        reproduce: a command that poses this problem again.
    """

    requirement: str
    detail: str
    case: str
    dtype: str
    sizes: dict[str, int]
    reproduce: str
    cause: str = ""
    array: str = ""
    index: tuple[int, ...] = ()
    got: str = ""
    want: str = ""
    ratio: float | None = None
    allowed: float | None = None
    where: str = ""
    advice: str = ""


class ChapterCounts(msgspec.Struct, frozen=True):
    """The numbers of items of a chapter that were right, wrong and unsupported."""

    right: int = 0
    wrong: int = 0
    unsupported: int = 0


class Trick(msgspec.Struct, frozen=True):
    """Behaviour that no honest kernel shows, and that marks a candidate as a cheat."""

    kind: str
    detail: str


class Isolation(msgspec.Struct, frozen=True):
    """How the candidate was isolated (`by`), and what that does not prevent (`lacks`)."""

    by: str
    lacks: tuple[str, ...] = ()


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a candidate.

    Attributes:
        candidate: its file and name.
        verdict: "right", "wrong", "cheat" or "failed".
        score: from 0 to 1; 0 for a cheat or a candidate that failed.
        level: the level of the task, "core" or "full".
        token: the token with which the same problems can be posed again; "" if withheld.
        isolation: how the candidate was isolated.
        why: why it failed or is a cheat, or how its process was lost; "" otherwise.
        asked: the number of items: problems, each counted once per dtype and mode.
        supports: the share of these that the candidate supports, from 0 to 1. A verdict "right" is
            about them only.
        chapters: the numbers of right, wrong and unsupported items, by chapter; empty if withheld
            or if nothing was asked.
        accuracy: by dtype, the accuracy class of the least accurate output, or "" if an output is
            wrong; empty if withheld.
        causes: the first deviations with their causes; empty if withheld, for a cheat, or if a
            process was lost.
        tricks: the behaviour that marks it as a cheat.
        calls: the existing attention functions that it was seen to call.
        seconds: how long judging the candidate took.
    """

    candidate: str
    verdict: Ruling
    score: float
    level: str
    token: str
    isolation: Isolation
    why: str = ""
    asked: int = 0
    supports: float = 0.0
    chapters: dict[str, ChapterCounts] = {}
    accuracy: dict[str, str] = {}
    causes: list[Cause] = []
    tricks: list[Trick] = []
    calls: list[str] = []
    seconds: float = 0.0

    def blind(self) -> Verdict:
        """Return the verdict without hints that a search could exploit to fit candidates."""
        return msgspec.structs.replace(self, chapters={}, accuracy={}, causes=[], token="")


@dataclass(frozen=True)
class Marks:
    """Whether an item's output is supported, is right, and whether its gradients are right."""

    supported: bool
    output: bool
    gradients: bool


BAD = ("deviates", "error", "crashed", "timed-out", "not-run")


def marked(result: CaseResult) -> Marks:
    """Return whether a result's output is supported, and whether output and gradients are right.

    The output is right if it conforms, and only requirements on gradients are violated, if any.
    Gradients are right if those of the inputs conform, and no requirement on gradients is violated.
    """
    by_requirement = {finding.requirement: finding.verdict for finding in result.findings}
    bad = [name for name, verdict in by_requirement.items() if verdict in BAD]
    output = by_requirement.get("output.equals-definition")
    gradients = by_requirement.get("gradient.inputs-equal-definition")
    of_gradients = [name for name in bad if name.startswith("gradient.")]
    return Marks(
        output is not None and output != "unsupported",
        output == "conforms" and len(bad) == len(of_gradients),
        gradients == "conforms" and not of_gradients,
    )


def scored(asked: Mapping[tuple[str, str, str], Iterable[Marks]], *, gradients: bool) -> float:
    """Return the score for the marks of each (chapter, case, dtype) of a task.

    A problem that is posed in several modes or sizes is right only if it is right in all of them. A
    problem that was not posed has no marks, and does not count as right. The score is 0 if less
    than `LEAST_PLAIN` of the outputs in chapter "plain" are right. `gradients` tells whether
    gradients count.
    """
    points: dict[str, list[float]] = {}
    plain: list[bool] = []
    for (chapter, _, _), marks in asked.items():
        marks = list(marks)
        output = bool(marks) and all(mark.output for mark in marks)
        slopes = bool(marks) and all(mark.gradients for mark in marks)
        if chapter == "plain":
            plain.append(output)
        share = OF_OUTPUT * output + (1 - OF_OUTPUT) * slopes if gradients else float(output)
        points.setdefault(chapter, []).append(share)
    if not points or sum(plain) < LEAST_PLAIN * len(plain):
        return 0.0
    weights = {chapter: WEIGHTS.get(chapter, OTHERWISE) for chapter in sorted(points)}
    parts = (
        weight * sum(points[chapter]) / len(points[chapter]) for chapter, weight in weights.items()
    )
    return round(sum(parts) / sum(weights.values()), 6)
