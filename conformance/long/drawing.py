"""Draw long problems in which every tile of keys matters to some rows, and single keys to others.

Half of the query classes attend to common keys, whose logits have a standard deviation of 2, so
that every tile of keys counts and none dominates. The other half attend mainly to rare keys: to
each logit, log(1/frequency) of the key's class is added (up to a constant), so that a class with
few keys gets as much weight as one with many. Keys of the rarest class are placed where indices
wrap. Values and cotangents are drawn from N(0, 1). The weight of a sink is of the same order as
that of all common keys together.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from conformance.definition.dtypes import DType, dtype_of
from conformance.long.problem import Classes, LongProblem, Stored
from conformance.long.visibility import EVERYTHING, Visibility

WRAPS = tuple(2**power for power in (7, 8, 12, 15, 16, 17, 18, 19, 20))
"""Positions at which 8-bit and 16-bit indices wrap, and larger powers of 2, at which products of an
index and other sizes may."""

_CHUNK = 2**22


def draw(
    dtype: str,
    queries: int,
    keys: int,
    *,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int = 1,
    head_size: int = 64,
    value_head_size: int = 0,
    classes: int = 32,
    sees: Visibility = EVERYTHING,
    scale: float | None = None,
    seed: int = 0,
    sinks: bool = False,
    soft_cap: float | None = None,
) -> LongProblem:
    """Return a problem with these sizes; `value_head_size` 0 means `head_size`."""
    random, stored = np.random.Generator(np.random.SFC64(seed)), dtype_of(dtype)
    value_head_size = value_head_size or head_size
    frequency = _frequencies(classes, keys)
    query = 2.0 * random.standard_normal((heads, classes, head_size))
    key = random.standard_normal((kv_heads, classes, head_size))
    factor = 1 / math.sqrt(head_size) if scale is None else scale
    if head_size > 1:
        query[..., 0], key[..., 0] = 0.0, np.log(frequency.max() / frequency)
        query[:, 1::2, 0] = 1.0 / factor
    of_sinks = None
    if sinks:
        spread = np.random.default_rng(seed).standard_normal(heads)
        of_sinks = stored.round(math.log(max(keys, 2)) + spread)
    return LongProblem(
        dtype=dtype,
        queries=stored.round(query),
        keys=stored.round(key),
        query_class=random.integers(classes, size=(batch, heads, queries), dtype=np.uint8),
        key_class=_key_classes(random, frequency, (batch, kv_heads, keys)),
        value=normal(random, (batch, kv_heads, keys, value_head_size), stored),
        cotangent=normal(random, (batch, heads, queries, value_head_size), stored),
        scale=scale,
        sees=sees,
        sinks=of_sinks,
        soft_cap=soft_cap,
    )


def _frequencies(classes: int, keys: int) -> np.ndarray:
    """Return the probability of each class of keys.

    Half of the classes are equally common; each of the others is rarer than the one before it.
    """
    common = classes - classes // 2
    rarest = math.log2(max(keys, 2) / 4)
    steps = np.linspace(min(math.log2(common) + 1, rarest), rarest, classes - common)
    frequency = np.concatenate([np.full(common, 1 / common), 2.0**-steps])
    return frequency / frequency.sum()


def _key_classes(
    random: np.random.Generator, frequency: np.ndarray, shape: tuple[int, int, int]
) -> Classes:
    """Return random classes of keys, with the rarest class around `WRAPS` and at both ends."""
    drawn = np.searchsorted(np.cumsum(frequency)[:-1], random.random(shape, dtype=np.float32))
    found = drawn.astype(np.uint8)
    keys = shape[-1]
    places = [0, keys - 1, *(place + side for place in WRAPS for side in (-1, 0))]
    found[..., [place for place in places if 0 <= place < keys]] = len(frequency) - 1
    return found


def normal(random: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Stored:
    """Return normally distributed numbers rounded to `dtype`.

    The array is float64 if `dtype` is, and float32 otherwise.
    """
    wide: Any = np.float64 if dtype.name == "float64" else np.float32
    numbers: Stored = np.empty(math.prod(shape), wide)
    for start in range(0, numbers.size, _CHUNK):
        part: Any = numbers[start : start + _CHUNK]
        random.standard_normal(out=part, dtype=wide)
        if dtype.name == "float16":
            part[:] = part.astype(np.float16)
        elif dtype.name == "bfloat16":
            # Round to nearest, ties to even; `DType.round` takes ten times as long here.
            bits = part.view(np.uint32)
            bits += 0x7FFF + ((bits >> 16) & 1)
            bits &= 0xFFFF0000
    return numbers.reshape(shape)
