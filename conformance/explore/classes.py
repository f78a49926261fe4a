"""Classes of deviations: whether a failing problem shows what another, smaller one showed already.

A small problem that was shrunk has only the features and the sizes that its deviation needs. Every
problem with all of these, which deviates in the same way, is taken for another sight of it. That
may hide a second defect behind a first, and never reports one defect for each problem that has it.
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
    """What all sights of one deviation have in common.

    Attributes:
        dtype: the dtype of the smallest problem. One in float32 is expected in every dtype.
        nature: what deviates, and how.
        features, sizes: those of the smallest problem.
    """

    dtype: str
    nature: tuple[str, ...]
    features: frozenset[str]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, trial: Trial, deviation: Deviation) -> Class:
        """Return the class of the smallest problem of a deviation."""
        problem = trial.problem
        sizes = tuple(getattr(problem.shape, name) for name in SIZES)
        return cls(problem.dtype, _nature(deviation), features(problem), sizes)

    def has(self, trial: Trial, deviation: Deviation) -> bool:
        """Return whether this is another sight of the same deviation."""
        return self.includes(Class.of(trial, deviation))

    def includes(self, other: Class) -> bool:
        """Return whether every problem of the other class is in this one."""
        return (
            self.nature == other.nature
            and self.dtype in (other.dtype, ORDER[0])
            and self.features <= other.features
            and all(map(int.__le__, self.sizes, other.sizes))
        )


def _nature(deviation: Deviation) -> tuple[str, ...]:
    """Return the requirement and the kind; for an exception, its type and where it was raised."""
    if deviation.requirement:
        return (deviation.requirement, deviation.kind)
    return (deviation.kind, deviation.array)
