"""The content of a drawing of attention patterns: the weights of some batch entries.

Axes are `[entry row query key]`; a row is a head, or the mean over heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from conformance.errors import ConformanceError, WrongShape
from conformance.records.numbers import LIMIT, Array, BoolArray, ratios


@dataclass(frozen=True)
class Subject:
    """The item whose weights these are."""

    name: str
    case: str
    dtype: str
    mode: str
    device: str
    note: str = ""
    """Text below the figure, such as that no definition settles the case."""


class Row(NamedTuple):
    """One head in numbers.

    Attributes:
        difference: the largest |got - want| of the cells that are numbers.
        ratio: the largest |got - want| / σ; infinite for NaN and where an exact value is missed.
        at: query and key of that.
        leaks: how many blocked pairs have a weight.
        unreal: how many cells are NaN or infinite.
    """

    difference: float
    ratio: float
    at: tuple[int, int]
    leaks: int
    unreal: int

    @property
    def fits(self) -> bool:
        """Whether the weights are within the noise of an honest implementation."""
        return self.ratio <= LIMIT


@dataclass(frozen=True, eq=False, kw_only=True)
class Picture:
    """Attention weights beside the reference.

    Attributes:
        got, want, noise: `[entry row query key]`; noise is σ, 0 for an element that must be exact.
        blocked: the same shape; True = this query may not attend this key.
        entries: which batch entries these are, of `batch` in all.
        averaged: whether the only row is the mean over heads.
        underflow: absolute error that no element of the dtype can avoid.
    """

    subject: Subject
    got: Array
    want: Array
    noise: Array
    blocked: BoolArray
    entries: tuple[int, ...]
    batch: int
    averaged: bool
    underflow: float

    @cached_property
    def difference(self) -> Array:
        """The difference got - want; NaN where either is NaN."""
        with np.errstate(invalid="ignore"):
            error = self.got - self.want
        return np.where(np.isfinite(error), error, np.nan)

    @cached_property
    def ratio(self) -> Array:
        """The ratio |got - want| / σ."""
        return np.abs(ratios(self.got, self.want, self.noise, self.underflow))

    @cached_property
    def leaks(self) -> BoolArray:
        """The blocked pairs that have a nonzero weight; NaN is not counted."""
        return self.blocked & np.isfinite(self.got) & (np.abs(self.got) > self.underflow)

    @property
    def furthest(self) -> int:
        """The entry that is furthest beyond its noise, by its place; 0 if none is."""
        ratio = self.ratio.max(axis=(1, 2, 3))
        if ratio.max() <= LIMIT:
            return 0
        # Several may miss an exact value, which is infinitely far: then the larger miss counts.
        miss = np.nan_to_num(np.abs(self.difference), nan=np.inf).max(axis=(1, 2, 3))
        return max(range(len(ratio)), key=lambda entry: (ratio[entry], miss[entry]))

    @property
    def most(self) -> float:
        """The largest |difference| of all cells that are numbers."""
        return _largest(self.difference)

    def row(self, entry: int, row: int) -> Row:
        """Return one head of one of the entries, both by their place in the arrays."""
        ratio = self.ratio[entry, row]
        # Where several miss an exact value, all infinitely far, the largest miss is the worst.
        miss = np.nan_to_num(np.abs(self.difference[entry, row]), nan=np.inf)
        worst = np.where(ratio == ratio.max(), miss, -1.0).argmax()
        query, key = np.unravel_index(int(worst), ratio.shape)
        return Row(
            difference=_largest(self.difference[entry, row]),
            ratio=float(ratio[query, key]),
            at=(int(query), int(key)),
            leaks=int(self.leaks[entry, row].sum()),
            unreal=int((~np.isfinite(self.got[entry, row])).sum()),
        )


def picture(
    subject: Subject,
    *,
    got: Array,
    want: Array,
    noise: Array,
    blocked: BoolArray,
    underflow: float,
    entry: int | None = None,
    every: bool = False,
) -> Picture:
    """Return a picture of these weights.

    Args:
        subject: the item that they belong to.
        got, want, noise: `[batch heads query key]`, or `[batch query key]` for the mean over heads.
        blocked: the same shape; True = this query may not attend this key.
        underflow: absolute error that no element of the dtype can avoid.
        entry: the batch entry to show; by default the one that is furthest off, 0 if none is.
        every: show all batch entries.

    Raises:
        WrongShape: the arrays do not fit together, or there is nothing to see in them.
        ConformanceError: there is no such batch entry.
    """
    shapes = {array.shape for array in (got, want, noise, blocked)}
    if len(shapes) > 1 or got.ndim not in (3, 4) or not got.size:
        listed = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise WrongShape(f"attention weights of shape {listed} cannot be drawn beside each other")
    averaged = got.ndim == 3
    if averaged:
        got, want, noise = got[:, None], want[:, None], noise[:, None]
        blocked = blocked[:, None]
    batch = got.shape[0]
    if entry is not None and not 0 <= entry < batch:
        raise ConformanceError(f"there is no batch entry {entry}; there are 0 to {batch - 1}")
    whole = Picture(
        subject=subject,
        got=got,
        want=want,
        noise=noise,
        blocked=blocked,
        entries=tuple(range(batch)),
        batch=batch,
        averaged=averaged,
        underflow=underflow,
    )
    if every:
        return whole
    chosen = whole.furthest if entry is None else entry
    one = slice(chosen, chosen + 1)
    return replace(
        whole,
        got=got[one],
        want=want[one],
        noise=noise[one],
        blocked=blocked[one],
        entries=(chosen,),
    )


def _largest(values: Array) -> float:
    return float(np.nan_to_num(np.abs(values), nan=0.0).max(initial=0.0))
