"""Statistics of each query's logits, which kernels compute anyway and some return.

An entry says what a statistic is. How an implementation returns it, an adapter declares
(`conformance.adapter.base`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from conformance.definition.attention import Forward
from conformance.definition.dtypes import Array
from conformance.definition.problem import Problem


@dataclass(frozen=True)
class RowStatistic:
    """A number of each query and head.

    Attributes:
        name: in an `Answer`, an `Expectation`, a declaration, and a file of arrays.
        title: in messages.
        of: returns it, `[batch heads query]`, from the results of the forward pass; a sink counts.
            It is 0 for a query that sees neither a key nor a sink.
        includes_sink: whether a sink counts where nothing is declared.
        files: other names of it in files of arrays.
    """

    name: str
    title: str
    of: Callable[[Problem, Forward], Array]
    includes_sink: bool
    files: str

    @property
    def chapter(self) -> str:
        """The first part of the ids of requirements, experiments and entries about it."""
        return self.name.replace("_", "-")


LOG_SUM_EXP = RowStatistic(
    "log_sum_exp",
    "log-sum-exp",
    lambda problem, results: results.log_total[..., 0],
    includes_sink=True,
    files="lse softmax_lse logsumexp",
)

STATISTICS: Mapping[str, RowStatistic] = {entry.name: entry for entry in (LOG_SUM_EXP,)}
"""The entries by name."""
