"""Classes of deviations, which group failing problems so that each defect is reported once.

A problem that has been shrunk has only the features and sizes that its deviation needs. Any other
problem that has all of these and deviates in the same way is assumed to show the same defect. This
may hide a second defect behind the first, but one defect is not reported again for every problem.
"""

from __future__ import annotations

from dataclasses import dataclass

from conformance.definition.problem import Problem
from conformance.explore.trial import ORDER, Deviation, Trial

SIZES = ("batch", "query_length", "key_length", "kv_heads", "heads", "head_size")


def features(problem: Problem) -> frozenset[str]:
    """Return the features of a problem that a deviation may depend on."""
    shape, found = problem.shape, set()
    for name, array in (("mask", problem.mask), ("bias", problem.attn_bias)):
        if array is not None:
            found.add(name)
    if problem.causal is not None:
        found.add(f"causal {problem.causal}")
    if problem.scale is not None:
        found.add("scale")
    if shape.group > 1:
        found.add("grouped heads")
    if shape.value_head_size != shape.head_size:
        found.add("value heads")
    if shape.score != "scaled-dot":
        found.add(shape.score)
    return frozenset(found) | set(problem.features)


@dataclass(frozen=True)
class Class:
    """The properties that all problems showing the same deviation share.

    Attributes:
        dtype: the dtype of the smallest problem. A deviation in float32 is expected in every dtype.
        nature: the requirement that is not met and how; for an exception, its type and the name of
            the function that raised it.
        features, sizes: the features and sizes of the smallest problem.
    """

    dtype: str
    nature: tuple[str, ...]
    features: frozenset[str]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, trial: Trial, deviation: Deviation) -> Class:
        """Return the class of a deviation, with the problem of the trial as its smallest one."""
        problem = trial.problem
        sizes = tuple(getattr(problem.shape, name) for name in SIZES)
        return cls(problem.dtype, _nature(deviation), features(problem), sizes)

    def has(self, trial: Trial, deviation: Deviation) -> bool:
        """Return whether the deviation of a trial belongs to this class."""
        return self.includes(Class.of(trial, deviation))

    def includes(self, other: Class) -> bool:
        """Return whether every problem of the other class also belongs to this one."""
        return (
            self.nature == other.nature
            and self.dtype in (other.dtype, ORDER[0])
            and self.features <= other.features
            and all(map(int.__le__, self.sizes, other.sizes))
        )


def _nature(deviation: Deviation) -> tuple[str, ...]:
    """Return the requirement and the kind, or an exception's type and the function raising it."""
    if deviation.requirement:
        return (deviation.requirement, deviation.kind)
    return (deviation.kind, deviation.array)
