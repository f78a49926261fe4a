"""A long problem: queries and keys from few classes, with arbitrary values and cotangents.

Axes are `[batch heads length head]`. The whole problem takes O(length · head size) memory. The
queries and keys that an implementation gets are the prototypes of their classes, repeated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from conformance.definition.dtypes import Array, DType, dtype_of
from conformance.definition.problem import check_shape
from conformance.errors import WrongShape
from conformance.long.visibility import EVERYTHING, Visibility

Classes = npt.NDArray[np.uint8]
Stored = npt.NDArray[np.floating]
"""Numbers that are kept in float32 if it can represent them, to halve the memory, or else in
float64."""

WIDEST = 600.0
"""The largest difference allowed between two logits of a query, so that no exponential underflows
in float64."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LongProblem:
    """A long attention problem, whose logits form a table over classes of queries and keys.

    All numbers in its arrays are exactly representable in `dtype`.

    Attributes:
        queries: prototypes `[heads query_classes head]`.
        keys: prototypes `[kv_heads key_classes head]`.
        query_class: `[batch heads query]`; query i of head h is `queries[h, query_class[b, h, i]]`.
        key_class: the same for keys, `[batch kv_heads key]`.
        value: `[batch kv_heads key value_head]`.
        cotangent: the cotangent of the output, `[batch heads query value_head]`.
        scale: the factor of the logits; None for 1/√head.
        sees: which keys a query may attend to.
        sinks: a logit per head that enters only the sum of the softmax, `[heads]`; None for none.
        soft_cap: the cap of the logits, applied as cap · tanh(logits / cap); None for no cap.

    Raises:
        WrongShape: sizes do not fit together, or logits of a query differ by more than `WIDEST`.
    """

    dtype: str
    queries: Array
    keys: Array
    query_class: Classes
    key_class: Classes
    value: Stored
    cotangent: Stored
    scale: float | None = None
    sees: Visibility = EVERYTHING
    sinks: Array | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        batch, heads, length, kv_heads, keys = self.sizes
        head, value_head = self.queries.shape[-1], self.value.shape[-1]
        if kv_heads == 0 or heads % kv_heads:
            raise WrongShape(f"{heads} heads cannot share {kv_heads} key/value heads")
        check_shape("queries", self.queries.shape, (heads, self.queries.shape[1], head))
        check_shape("keys", self.keys.shape, (kv_heads, self.keys.shape[1], head))
        check_shape("value", self.value.shape, (batch, kv_heads, keys, value_head))
        check_shape("cotangent", self.cotangent.shape, (batch, heads, length, value_head))
        if self.sinks is not None:
            check_shape("sinks", self.sinks.shape, (heads,))
        for head in range(heads):
            logits = self.logits(head)
            if self.sinks is not None and np.isfinite(self.sinks[head]):
                logits = np.insert(logits, 0, self.sinks[head], axis=1)
            if logits.size and float(np.ptp(logits, axis=1).max()) > WIDEST:
                raise WrongShape(f"logits of one query differ by more than {WIDEST:g}")

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Batch, heads, query length, key/value heads, key length."""
        return *self.query_class.shape, *self.key_class.shape[1:]  # type: ignore[return-value]

    @property
    def group(self) -> int:
        """The number of query heads per key/value head."""
        return self.query_class.shape[1] // self.key_class.shape[1]

    @property
    def factor(self) -> float:
        """The factor of the logits."""
        return 1.0 / math.sqrt(self.queries.shape[-1]) if self.scale is None else self.scale

    @property
    def format(self) -> DType:
        """The floating-point format of every number in the problem's arrays."""
        return dtype_of(self.dtype)

    def uncapped(self, head: int) -> Array:
        """Return the logits of a head before the cap, `[query_classes key_classes]`."""
        return self.factor * self.queries[head] @ self.keys[head // self.group].T

    def logits(self, head: int) -> Array:
        """Return the logits of a head as a table `[query_classes key_classes]`."""
        logits = self.uncapped(head)
        if self.soft_cap is None:
            return logits
        return self.soft_cap * np.tanh(logits / self.soft_cap)

    def slope(self, head: int) -> Array:
        """Return the derivative of the cap `[query_classes key_classes]`, 1 without a cap."""
        if self.soft_cap is None:
            return np.ones((self.queries.shape[1], self.keys.shape[1]))
        return 1.0 - np.tanh(self.uncapped(head) / self.soft_cap) ** 2

    def query(self, entry: int, head: int, rows: slice = slice(None)) -> Array:
        """Return queries of one head, `[query head]`."""
        return self.queries[head][self.query_class[entry, head, rows]]

    def key(self, entry: int, kv_head: int, rows: slice = slice(None)) -> Array:
        """Return keys of one key/value head, `[key head]`."""
        return self.keys[kv_head][self.key_class[entry, kv_head, rows]]
