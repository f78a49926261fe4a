"""The data of a figure of attention weights: the weights and the reference of some batch entries.

Arrays have the axes `[entry row query key]`; a row is a head, or the mean over heads.
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
    """The item whose attention weights are drawn."""

    name: str
    case: str
    dtype: str
    mode: str
    device: str
    note: str = ""
    """A note below the figure, for example that the definition leaves the case open."""


class Row(NamedTuple):
    """A numerical summary of one row of a picture: a head, or the mean over heads.

    Attributes:
        difference: the largest |got - want| of the finite cells.
        ratio: the largest |got - want| / σ; infinite for NaN, and for a value that must be exact
            and is not.
        at: the query and the key with the largest ratio.
        leaks: the number of blocked pairs with a finite weight that is not zero.
        unreal: the number of cells that are NaN or infinite.
    """

    difference: float
    ratio: float
    at: tuple[int, int]
    leaks: int
    unreal: int

    @property
    def fits(self) -> bool:
        """Whether the weights are within the rounding noise of a correct implementation."""
        return self.ratio <= LIMIT


@dataclass(frozen=True, eq=False, kw_only=True)
class Picture:
    """Attention weights together with the reference.

    Attributes:
        got, want, noise: `[entry row query key]`; noise is σ, 0 for an element that must be exact.
        blocked: the same shape; True = this query may not attend to this key.
        entries: the indices, in the batch, of the entries that the arrays contain.
        batch: the number of all entries of the batch.
        averaged: whether the only row is the mean over heads.
        underflow: the absolute error that no element of the dtype can avoid.
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
        """The difference got - want; NaN where it is not finite."""
        with np.errstate(invalid="ignore"):
            error = self.got - self.want
        return np.where(np.isfinite(error), error, np.nan)

    @cached_property
    def ratio(self) -> Array:
        """The ratio |got - want| / σ."""
        return np.abs(ratios(self.got, self.want, self.noise, self.underflow))

    @cached_property
    def leaks(self) -> BoolArray:
        """The blocked pairs that have a finite weight above the underflow of the dtype."""
        return self.blocked & np.isfinite(self.got) & (np.abs(self.got) > self.underflow)

    @property
    def furthest(self) -> int:
        """The index of the entry with the worst ratio; 0 if all are within the noise."""
        ratio = self.ratio.max(axis=(1, 2, 3))
        if ratio.max() <= LIMIT:
            return 0
        # Several ratios may be infinite, if exact values are missed: then the error decides.
        miss = np.nan_to_num(np.abs(self.difference), nan=np.inf).max(axis=(1, 2, 3))
        return max(range(len(ratio)), key=lambda entry: (ratio[entry], miss[entry]))

    @property
    def most(self) -> float:
        """The largest |difference| of all finite cells."""
        return _largest(self.difference)

    def row(self, entry: int, row: int) -> Row:
        """Return the summary of a row, given the indices of entry and row in the arrays."""
        ratio = self.ratio[entry, row]
        # If several ratios are infinite, because exact values are missed, the largest error is
        # the worst.
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
    """Return a picture of attention weights.

    Args:
        subject: the item that the weights belong to.
        got, want, noise: `[batch heads query key]`, or `[batch query key]` for the mean over heads.
        blocked: the same shape; True = this query may not attend to this key.
        underflow: the absolute error that no element of the dtype can avoid.
        entry: the batch entry to show; by default the worst one, or 0 if all are within the noise.
        every: whether to show all batch entries.

    Raises:
        WrongShape: if the shapes of the arrays differ or are invalid, or the arrays are empty.
        ConformanceError: if there is no such batch entry.
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
