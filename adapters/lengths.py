"""Encode padding as lengths, one number per sequence of the batch, as serving kernels require.

Easy to miss in a port: a length counts keys from the left, so the padding has to be on the right.
Some libraries expect the number of keys, and others that number minus one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from conformance import Problem
from conformance.adapter import MaskTable, Spelling


@dataclass(frozen=True, eq=False)
class LengthTable(MaskTable):
    """A mask table that can also encode padding on the right as lengths.

    Args:
        lengths: the name of the argument that takes the lengths, `[batch]`.
        less: the number to subtract from each count of keys; 1 if the argument takes the index of
            the last key.
        first: whether encodings with lengths come before all other encodings instead of after them.
    """

    lengths: str = ""
    less: int = 0
    first: bool = False

    def spellings(self, problem: Problem) -> Iterator[Spelling]:
        ways = (self._counted(problem), super().spellings(problem))
        for way in ways if self.first else reversed(ways):
            yield from way

    def _counted(self, problem: Problem) -> Iterator[Spelling]:
        mask, shape = problem.mask, problem.shape
        if mask is None or mask.shape[1:3] != (1, 1):
            return
        counts = right_padding(np.broadcast_to(mask, (shape.batch, 1, 1, shape.key_length)))
        if counts is None:
            return
        native: Any = (counts - self.less).astype(np.int32)
        for other in super().spellings(replace(problem, mask=None)):
            if self.lengths not in other.arguments:
                label = f"{self.lengths}=int[batch]"
                label += f", {other.label}" if other.arguments else ""
                yield replace(
                    other, label=label, arguments={self.lengths: native, **other.arguments}
                )


def right_padding(visible: np.ndarray) -> np.ndarray | None:
    """Return the number of visible keys of each batch entry, if a mask is padding on the right.

    `visible` is the mask: boolean and `[batch heads query key]`, where True attends. Return None
    for any other mask, or if a batch entry has no visible keys.
    """
    counts = visible[:, 0, 0].sum(axis=-1)
    padded = np.arange(visible.shape[-1]) < counts[:, None, None, None]
    return counts if counts.all() and (visible == padded).all() else None
