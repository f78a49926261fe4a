"""A case that is not in the catalogue: one problem with its own numbers, in every dtype.

Checks see no difference. Its id begins with "file/", a chapter that the catalogue does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from conformance.cases.case import Case
from conformance.definition.dtypes import dtype_of
from conformance.definition.problem import Problem, Shape, Weights

CHAPTER = "file"


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredCase(Case):
    """A case made of numbers that are already there.

    Attributes:
        stored: the problem with its numbers as they were written down; they are rounded to the
            dtype in which it is asked for.
        path: the file that it was read from, or "".
    """

    stored: Problem
    path: str = ""

    # Two cases may have one id and other numbers, so what is remembered of one is not the other's.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def shape(self) -> Shape:
        """The shape of the stored problem."""
        return self.stored.shape

    def problem(self, dtype: str) -> Problem:
        """The stored problem, rounded."""
        return _rounded(self, dtype)


@lru_cache(maxsize=64)
def _rounded(case: StoredCase, dtype: str) -> Problem:
    return rounded(case.stored, dtype)


def rounded(problem: Problem, dtype: str) -> Problem:
    """The same problem in another dtype, with every number rounded to it."""
    to_dtype = dtype_of(dtype).round
    weights = {name: to_dtype(array) for name, array in problem.weights.named().items()}
    query = to_dtype(problem.query)
    key = query if problem.shape.sharing == "self" else to_dtype(problem.key)
    shared = problem.shape.sharing != "separate"
    bias = problem.attn_bias
    return problem.replace(
        dtype=dtype,
        weights=Weights(**weights),
        query=query,
        key=key,
        value=key if shared else to_dtype(problem.value),
        cotangent=to_dtype(problem.cotangent),
        attn_bias=None if bias is None else to_dtype(bias),
    )
