"""Sums by class over intervals that only move right, without cancellation.

Prefix sums over a million numbers lose digits if the difference of two of them is the sum of only a
hundred numbers. Instead, the sum over the current interval is kept: blocks of columns are added as
the interval grows and subtracted as it leaves them. Thanks to double-double arithmetic, subtracted
blocks leave an error of only about 1e-32 of the largest intermediate sum.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from conformance.definition.dtypes import Array
from conformance.long.problem import Classes


class Sums:
    """Sums by class `[classes, numbers]` over whole blocks of columns.

    Args:
        classes: the class of each column.
        count: the number of classes.
        size: the number of columns in a block.
        numbers: returns the numbers to sum, `[columns numbers]`, for a slice of columns; it must
            return the same numbers each time.
        width: how many numbers there are for each column.
    """

    def __init__(
        self,
        classes: Classes,
        count: int,
        size: int,
        numbers: Callable[[slice], Array],
        width: int,
    ) -> None:
        self._classes, self._size, self._numbers = classes, size, numbers
        self._names = np.arange(count, dtype=classes.dtype)[:, None]
        self._total, self._carry = np.zeros((2, count, width))
        self._first = self._last = 0

    def over(self, blocks: tuple[int, int]) -> Array:
        """Return the sums over blocks first to last - 1; neither may decrease from call to call."""
        first, last = blocks
        if first >= self._last:
            self._total[:], self._carry[:] = 0.0, 0.0
            self._first = self._last = first
        for block in range(self._first, first):
            self._add(-self._of(block))
        for block in range(self._last, last):
            self._add(self._of(block))
        self._first, self._last = first, last
        return self._total + self._carry

    def _of(self, block: int) -> Array:
        columns = slice(block * self._size, (block + 1) * self._size)
        return one_hot(self._classes[columns], self._names) @ self._numbers(columns)

    def _add(self, numbers: Array) -> None:
        """Add with Knuth's TwoSum: the total is rounded, and the carry collects rounding errors."""
        total = self._total + numbers
        back = total - self._total
        self._carry += (self._total - (total - back)) + (numbers - back)
        self._total = total


def one_hot(classes: Classes, names: Classes) -> Array:
    """Return an array `[classes columns]` that is 1 where a column is of the class, else 0."""
    return (classes == names).astype(np.float64)
