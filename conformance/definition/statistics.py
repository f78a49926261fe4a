"""Statistics of each query's logits, which kernels compute anyway and some return.

Of the logits S_ij of the keys j that query i sees, after scale, soft cap, ALiBi and bias, they are
L_i = log Σ_j exp(S_ij) and M_i = max_j S_ij. An entry says what a statistic is; how an
implementation returns it, an adapter declares (`conformance.adapter.base`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

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

    def counted(self, problem: Problem) -> Problem:
        """Return the problem without its sinks, if they do not count where nothing is declared."""
        return problem if self.includes_sink else problem.replace(sinks=None)


LOG_SUM_EXP = RowStatistic(
    "log_sum_exp",
    "log-sum-exp",
    lambda problem, results: results.log_total[..., 0],
    includes_sink=True,
    files="lse softmax_lse logsumexp",
)


def _largest(problem: Problem, results: Forward) -> Array:
    seen = problem.allowed_in_full()
    found = np.max(results.logits, axis=-1, where=seen, initial=-np.inf)
    for entry in problem.entries:
        extra = entry.extra(problem)
        found = found if extra is None else np.maximum(found, extra[:, None])
    return np.where(np.isneginf(found), 0.0, found)


MAX_LOGIT = RowStatistic(
    "max_logit",
    "largest logit",
    _largest,
    includes_sink=False,
    files="max_logits max_score max_scores softmax_max row_max",
)

STATISTICS: Mapping[str, RowStatistic] = {entry.name: entry for entry in (LOG_SUM_EXP, MAX_LOGIT)}
"""The entries by name."""
