"""Generic long inputs: check sampled rows of the output, and all of dQ, dK and dV.

Queries, keys and values are all N(0, 1). The cotangent is 0 except in the sampled rows, which are
edges of tiles and random ones. The gradients of every key and value are therefore sums over these
rows alone, and dQ is exactly 0 elsewhere. The cost is O(rows · length · head size). σ is that of
`conformance.long.noise`, except that every error is independent, as no two logits are equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from conformance.definition.arithmetic import classes_of
from conformance.definition.dtypes import Array, DType, dtype_of
from conformance.long.calling import Answered, Heads
from conformance.long.checking import Checked, Tally
from conformance.long.noise import MODELS, UNKNOWN, terms
from conformance.long.visibility import EVERYTHING, Visibility

RANDOM = 64
"""The number of rows sampled at random, in addition to those at the edges of tiles."""

_COLUMNS = 4096


def sampled(queries: int, tile: int, most: int = 256, seed: int = 0) -> np.ndarray:
    """Return the rows to sample, sorted: those at edges of tiles, and random ones.

    If there are too many edges for `most` rows, take an evenly spread selection of them. An
    `UNKNOWN` tile counts as one of 64 rows.
    """
    edges = np.arange(0, queries, tile or 64)
    edges = np.unique(np.concatenate([edges, np.maximum(edges - 1, 0), [queries - 1]]))
    room = max(2, most - RANDOM)
    if len(edges) > room:
        edges = edges[np.linspace(0, len(edges) - 1, room).astype(int)]
    random = np.random.default_rng(seed).integers(queries, size=RANDOM)
    return np.unique(np.concatenate([edges, random]))


def generic(
    dtype: str,
    queries: int,
    keys: int,
    chosen: np.ndarray,
    *,
    heads: int = 1,
    kv_heads: int = 1,
    head_size: int = 64,
    sees: Visibility = EVERYTHING,
    seed: int = 0,
) -> Heads:
    """Return inputs of one batch entry, with a cotangent of 0 except in the chosen rows."""
    random, stored = np.random.default_rng(seed), dtype_of(dtype)
    wide = np.float64 if dtype == "float64" else np.float32

    def normal(*sizes: int) -> np.ndarray:
        return stored.round(random.standard_normal(sizes)).astype(wide)

    cotangent = np.zeros((1, heads, queries, head_size), wide)
    cotangent[:, :, chosen] = normal(1, heads, len(chosen), head_size)
    return Heads(
        dtype,
        normal(1, heads, queries, head_size),
        normal(1, kv_heads, keys, head_size),
        normal(1, kv_heads, keys, head_size),
        cotangent,
        1 / math.sqrt(head_size),
        sees,
    )


def check_sampled(
    heads: Heads, chosen: np.ndarray, answered: Answered, tile: int = UNKNOWN
) -> Checked:
    """Compare the chosen rows of the output, and all of dQ, dK and dV, with expected values.

    The heads are those of `generic`, with a cotangent of 0 except in the chosen rows.
    """
    import time

    started = time.perf_counter()
    dtype = dtype_of(heads.dtype)
    names = [item for item in classes_of(dtype) if item.name in MODELS]
    tallies = {
        item.name: {name: Tally(name, len(chosen)) for name in answered.arrays} for item in names
    }
    _, count, queries, size = heads.query.shape
    kv_heads, keys = heads.key.shape[1:3]
    group = count // kv_heads
    first, last = heads.sees.intervals(0, queries, keys)
    for item in names:
        roundoffs = {
            name: (dtype.roundoff if stored else dtype.accumulator) ** 2 / 3
            for name, stored in (
                ("tensor", item.tensors),
                ("logits", item.logits),
                ("probability", item.probabilities),
            )
        }
        of_array = tallies[item.name]
        for kv_head in range(kv_heads):
            key = heads.key[0, kv_head].astype(np.float64)
            value = heads.value[0, kv_head].astype(np.float64)
            sums = np.zeros((4, keys, size))
            for head in range(kv_head * group, (kv_head + 1) * group):
                found = _head(
                    heads, head, chosen, key, value, (first, last), roundoffs, dtype, tile
                )
                for name, (want, variance) in found.items():
                    if name in ("output", "query") and name in answered.arrays:
                        got = answered.arrays[name](0, head, slice(0, queries))
                        sigma = _sigma(variance, want, dtype)
                        for row, at in enumerate(chosen):
                            one = slice(row, row + 1)
                            of_array[name].add(
                                (0, head, int(at)), got[at : at + 1], want[one], sigma[one],
                                dtype.underflow,
                            )  # fmt: skip
                        if name == "query":
                            rest = np.delete(got, chosen, axis=0)
                            nothing = np.zeros_like(rest)
                            of_array[name].add(
                                (0, head, 0), rest, nothing, nothing, dtype.underflow
                            )
                for number, name in enumerate(("key", "value")):
                    sums[2 * number] += found[name][0]
                    sums[2 * number + 1] += found[name][1]
            for number, name in enumerate(("key", "value")):
                if name in answered.arrays:
                    want, variance = sums[2 * number], sums[2 * number + 1]
                    if group > 1:
                        variance = variance + roundoffs["tensor"] * want**2
                    got = answered.arrays[name](0, kv_head, slice(0, keys))
                    of_array[name].add(
                        (0, kv_head, 0), got, want, _sigma(variance, want, dtype), dtype.underflow
                    )
    return Checked(tallies, time.perf_counter() - started)


def _sigma(variance: Array, want: Array, dtype: DType) -> Array:
    variance = (variance + variance.mean(axis=1, keepdims=True)) / 2
    factor = 2.0 if dtype.name == "float64" else 1.0
    return np.sqrt(factor * (variance + dtype.roundoff**2 / 3 * want**2))


def _head(
    heads: Heads,
    head: int,
    chosen: np.ndarray,
    key: Array,
    value: Array,
    intervals: tuple[np.ndarray, np.ndarray],
    roundoffs: Mapping[str, float],
    dtype: DType,
    tile: int,
) -> dict[str, tuple[Array, Array]]:
    """Return the expected output and gradients of a head, each with its variance.

    The output and the gradient of the queries have only the chosen rows.
    """
    query = heads.query[0, head, chosen].astype(np.float64)
    cotangent = heads.cotangent[0, head, chosen].astype(np.float64)
    first, last = (ends[chosen][:, None] for ends in intervals)
    size, scale, sums = query.shape[1], heads.scale, dtype.accumulator**2 / 3
    spans = [slice(at, min(at + _COLUMNS, len(key))) for at in range(0, len(key), _COLUMNS)]
    squares = np.einsum("jd,jd->j", value, value)

    def logits(span: slice) -> Array:
        at = np.arange(span.start, span.stop)
        return np.where((at >= first) & (at < last), scale * query @ key[span].T, -np.inf)

    peak = np.full((len(chosen), 1), -np.inf)
    total = np.zeros((len(chosen), 1))
    for span in spans:
        each = logits(span)
        now = np.maximum(peak, each.max(axis=1, keepdims=True))
        finite = np.where(np.isfinite(now), now, 0.0)
        total = total * np.exp(peak - finite) + np.exp(each - finite).sum(axis=1, keepdims=True)
        peak = now
    log_total = np.where(total > 0, peak + np.log(np.where(total > 0, total, 1.0)), 0.0)

    def weights(span: slice) -> tuple[Array, Array]:
        """Return the weights, and the relative variance of each due to logit and exponential."""
        each = logits(span)
        finite = np.where(np.isfinite(each), each, 0.0)
        spread = size / 2 * scale**2 * (query**2 @ (key[span] ** 2).T)
        relative = sums * (spread + max(size / 3 - 0.5, 0) * finite**2)
        relative += 2 * roundoffs["logits"] * finite**2 + roundoffs["probability"]
        return np.exp(each - log_total), relative

    output, of_output = np.zeros_like(cotangent), np.zeros_like(cotangent)
    of_squares, of_ones = np.zeros((len(chosen), 1)), np.zeros((len(chosen), 1))
    for span in spans:
        weight, relative = weights(span)
        error = weight**2 * (relative + roundoffs["probability"])
        output += weight @ value[span]
        of_output += error @ value[span] ** 2
        of_ones += error.sum(axis=1, keepdims=True)
        of_squares += (weight**2 @ squares[span])[:, None]
    number = np.maximum(last - first, 1)
    many, long = terms(number, tile)
    whole = sums * (many + long + log_total**2) + roundoffs["logits"]
    of_output += of_ones * output**2 + sums * (many * of_squares / size + long * output**2)
    of_output += (whole + roundoffs["tensor"]) * output**2
    row = (cotangent * output).sum(axis=1, keepdims=True)
    of_row = (cotangent**2 * of_output).sum(axis=1, keepdims=True)
    of_row += sums * size / 2 * (cotangent**2 * output**2).sum(axis=1, keepdims=True)
    of_row += (sums * size / 3 + roundoffs["logits"]) * row**2

    d_query, of_query, seen = (np.zeros_like(query) for _ in range(3))
    d_key, of_key = np.zeros((2, *key.shape))
    d_value, of_value = np.zeros((2, *value.shape))
    products = sums * 5 * size / 6 + roundoffs["probability"]
    for span in spans:
        weight, relative = weights(span)
        relative += roundoffs["probability"]
        d_weights = cotangent @ value[span].T
        d_logits = scale * weight * (d_weights - row)
        error = d_logits**2 * (relative + 2 * roundoffs["probability"] + sums * many)
        error += (scale * weight) ** 2 * products * d_weights**2
        d_query += d_logits @ key[span]
        of_query += error @ key[span] ** 2
        seen += scale * weight @ key[span]
        d_key[span] = d_logits.T @ query
        of_key[span] = (error + d_logits**2 * whole + (scale * weight) ** 2 * of_row).T @ query**2
        d_value[span] = weight.T @ cotangent
        of_value[span] = (weight**2 * (relative + whole + sums * many)).T @ cotangent**2
    of_query += of_row * seen**2 + (whole + sums * long + roundoffs["tensor"]) * d_query**2
    few = sums * len(chosen) / 3 + roundoffs["tensor"]
    return {
        "output": (output, of_output),
        "query": (d_query, of_query),
        "key": (d_key, of_key + few * d_key**2),
        "value": (d_value, of_value + few * d_value**2),
    }
