"""Bit-exact retrieval: every query finds exactly one key, at whatever position it lies.

The key at position j consists of the binary digits of j, written as ±1, and a query is a large
multiple of the key that it looks for. The weight of this key is then 1 and all others underflow to
0, so the output is exactly a value, and the gradient of a value that one query looks for is exactly
a cotangent, in every format.
An index that wraps leads to another value, however long the sequence. Each key/value head has
different digits flipped, so that keys of different heads differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.definition.dtypes import dtype_of
from conformance.errors import Unsupported
from conformance.long.calling import Answered, Heads
from conformance.long.drawing import normal
from conformance.long.visibility import EVERYTHING, Visibility

MARGIN = {"float64": 800.0}
"""The least amount by which the logit of the sought key exceeds all others, by dtype; 150 for
dtypes that are not listed. exp(−150) is 0 in float32, and exp(−800) is 0 in float64."""

_SPREAD = 0x9E3779B1
"""An odd number whose multiples differ in many bits."""


@dataclass(frozen=True, eq=False)
class Retrieval:
    """The inputs, and in `sought` `[batch heads query]` the position of the key for each query."""

    heads: Heads
    sought: np.ndarray


@dataclass(frozen=True)
class Missed:
    """The number of wrong rows in one head of an array, and the place of the first of them."""

    array: str
    count: int
    entry: int
    head: int
    position: int


def retrieval(
    dtype: str,
    queries: int,
    keys: int,
    *,
    heads: int = 1,
    kv_heads: int = 1,
    head_size: int = 64,
    causal: bool = False,
    seed: int = 0,
) -> Retrieval:
    """Return a retrieval problem of one batch entry, whose queries look for random positions.

    The first of several queries looks for the first key, and the last query for the last key that
    it can see.

    Raises:
        Unsupported: the head is too small to hold a position in binary.
    """
    digits = max(1, math.ceil(math.log2(max(2, keys))))
    if head_size < digits:
        raise Unsupported(f"a head of {head_size} cannot hold positions up to {keys:,}")
    random, stored = np.random.default_rng(seed), dtype_of(dtype)
    wide: Any = np.float64 if dtype == "float64" else np.float32
    # Digits are repeated to fill the head; a mismatch costs at least twice the repeats.
    mismatch = 2 * (head_size // digits) / math.sqrt(head_size)
    factor = 2.0 ** math.ceil(math.log2(MARGIN.get(dtype, 150.0) / mismatch))
    sought = random.permuted(np.broadcast_to(np.arange(keys), (heads, keys)), axis=1)
    sought = np.resize(sought, (1, heads, queries)) if queries != keys else sought[None]
    if causal:
        reach = np.minimum(np.arange(queries), keys - 1)
        sought = (random.random((1, heads, queries)) * (reach + 1)).astype(np.int64)
    sought[..., 0], sought[..., -1] = 0, min(queries if causal else keys, keys) - 1
    flips = np.arange(kv_heads) * _SPREAD % 2**digits
    of_keys = np.empty((1, kv_heads, keys, head_size), wide)
    for head, flip in enumerate(flips):
        of_keys[0, head] = _binary(np.arange(keys) ^ flip, digits, head_size)
    codes = sought ^ np.repeat(flips, heads // kv_heads)[:, None]
    given = Heads(
        dtype,
        wide(factor) * _binary(codes, digits, head_size).astype(wide),
        of_keys,
        normal(random, (1, kv_heads, keys, head_size), stored),
        normal(random, (1, heads, queries, head_size), stored),
        1 / math.sqrt(head_size),
        Visibility(causal="top-left") if causal else EVERYTHING,
    )
    return Retrieval(given, sought)


def _binary(positions: np.ndarray, digits: int, size: int) -> np.ndarray:
    """Return the binary digits of each position as ±1 `[... size]`, repeated to fill the size."""
    bits = (positions[..., None] >> (np.arange(size) % digits)) & 1
    return (2 * bits - 1).astype(np.int8)


def missed(given: Retrieval, answered: Answered) -> list[Missed]:
    """Return where the output and, if there is one, the gradient of the values have wrong rows.

    If several queries that share a value head look for the same value, its gradient is a sum, which
    is not compared.
    """
    heads, wrong = given.heads, []
    _, count, queries, _ = heads.query.shape
    kv_heads, keys = heads.value.shape[1:3]
    group = count // kv_heads
    for head in range(count):
        got = answered.arrays["output"](0, head, slice(0, queries))
        wanted = heads.value[0, head // group][given.sought[0, head]]
        wrong += _differing("output", head, got, wanted)
    for head in range(kv_heads if "value" in answered.arrays else 0):
        of_group = slice(head * group, (head + 1) * group)
        sought = given.sought[0, of_group].ravel()
        times = np.bincount(sought, minlength=keys)
        wanted = np.zeros(heads.value.shape[2:], heads.value.dtype)
        wanted[sought] = heads.cotangent[0, of_group].reshape(-1, wanted.shape[1])
        got = answered.arrays["value"](0, head, slice(0, keys))
        got = np.where(times[:, None] > 1, wanted, got)
        wrong += _differing("value", head, got, wanted)
    return wrong


def _differing(array: str, head: int, got: np.ndarray, wanted: np.ndarray) -> list[Missed]:
    rows = np.flatnonzero((got != wanted).any(axis=1))
    return [Missed(array, len(rows), 0, head, int(rows[0]))] if len(rows) else []
