"""Encode masks as segment ids, which tell JAX's kernels which tokens belong together.

Easy to miss in a port: a segment id is not a mask. A query attends to the keys with the *same* id,
so ids can hide padding only if queries and keys have separate ids: with one array for both, padded
queries attend to the padding, and not to the tokens. Masks in which two queries have overlapping
but different sets of keys (a window, a prefix) cannot be expressed by ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from conformance import Problem, Unsupported
from conformance.adapter import MaskTable, Spelling

NOBODY = -1
"""The id of a fully masked query; no key has it."""
UNSEEN = -2
"""The id of a key that no query may attend to."""
PADDING = -3
"""The id of the queries and keys that are appended as padding to fill a block."""


def padded(array: Any, missing: Mapping[int, int], value: int = 0) -> Any:
    """Return a copy of a JAX array with elements equal to `value` appended along some axes.

    `missing` maps each of these axes to the number of elements to append.
    """
    import jax.numpy as jnp

    widths = [(0, missing.get(axis, 0)) for axis in range(array.ndim)]
    return jnp.pad(array, widths, constant_values=value)


@dataclass(frozen=True, eq=False)
class SegmentTable(MaskTable):
    """A mask table that also encodes a mask as segment ids, if ids can express the mask.

    Without `shared`, a mask with one row for all queries gets no ids here. Such a mask is only
    padding, for which the adapter declares a mask argument.

    Args:
        shared: whether there is one array `segment_ids` for queries and keys, instead of
            `segment_ids.q` and `segment_ids.kv`.
    """

    shared: bool = False

    def spell(self, problem: Problem) -> Spelling:
        try:
            return super().spell(problem)
        except Unsupported:
            if self.arguments or problem.mask is None:
                raise
            raise Unsupported("segment ids cannot express this mask") from None

    def spellings(self, problem: Problem) -> Iterator[Spelling]:
        ids = self._ids(problem)
        if ids:
            for other in super().spellings(replace(problem, mask=None)):
                if not ids.keys() & other.arguments.keys():
                    label = ", ".join(f"{name}=int" for name in ids)
                    label += f", {other.label}" if other.arguments else ""
                    yield replace(other, label=label, arguments={**ids, **other.arguments})
        yield from super().spellings(problem)

    def _ids(self, problem: Problem) -> dict[str, Any]:
        mask = problem.mask
        if mask is None or mask.shape[1] > 1:
            return {}
        if not self.shared and mask.shape[2] == 1:
            # The mask is only padding, which the declared argument for the keys' ids encodes.
            return {}
        shape = problem.shape
        sizes = (shape.batch, shape.query_length, shape.key_length)
        allowed = np.broadcast_to(mask[:, 0], sizes)
        of_query = np.where(allowed.any(axis=2), allowed.argmax(axis=2), NOBODY)
        seen_by = np.take_along_axis(of_query, allowed.argmax(axis=1), axis=1)
        of_key = np.where(allowed.any(axis=1), seen_by, UNSEEN)
        if self.shared:
            of_key = of_query
        if of_key.shape[1] != shape.key_length:
            return {}
        if not np.array_equal(of_query[:, :, None] == of_key[:, None, :], allowed):
            return {}
        names = ("segment_ids",) if self.shared else ("segment_ids.q", "segment_ids.kv")
        return {
            name: ids.astype(np.int32) for name, ids in zip(names, (of_query, of_key), strict=False)
        }
