"""Masks and additive biases as people build them, each from a Shape and a random generator.

Masks are canonical: True = may attend, four axes of `[batch heads query key]`, 1 where the
pattern does not vary. Every row keeps at least one key (but for `with_fully_masked_row`): fully
masked rows have no agreed meaning and are observed, not asserted.
"""

from __future__ import annotations

import numpy as np

from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.problem import Shape


def key_padding(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return a ragged batch: entry b sees only its first keys, `[batch 1 1 key]`."""
    lengths = shape.key_length - 1 - np.arange(shape.batch) % max(1, shape.key_length - 1)
    return (np.arange(shape.key_length) < lengths[:, None])[:, None, None, :]


def other_mask(mask: BoolArray) -> BoolArray:
    """Return another mask of the same shape, in which every query sees the first key."""
    other: BoolArray = np.logical_not(mask)
    other[..., 0] = True
    return other


def first_unpadded(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return a ragged batch, longest first: entry 0 sees all its keys, `[batch 1 1 key]`."""
    lengths = shape.key_length - np.arange(shape.batch) % shape.key_length
    return (np.arange(shape.key_length) < lengths[:, None])[:, None, None, :]


def blocked_start(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Block the first 54 % of the keys for every query, in whole tiles, `[1 1 1 key]`."""
    return (np.arange(shape.key_length) >= 0.54 * shape.key_length)[None, None, None]


def left_padding(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return a ragged batch padded on the left, as for generation, `[batch 1 1 key]`."""
    return key_padding(shape, random)[..., ::-1].copy()


def shared(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return an arbitrary mask, shared by the whole batch, `[1 1 query key]`."""
    return _arbitrary((1, 1, shape.query_length, shape.key_length), random)


def per_batch(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return an arbitrary mask for each batch entry, `[batch 1 query key]`."""
    return _arbitrary((shape.batch, 1, shape.query_length, shape.key_length), random)


def per_head(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return an arbitrary mask for each batch entry and head, `[batch heads query key]`."""
    return _arbitrary(shape.logits, random)


def block_diagonal(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Pack two sequences into each entry that do not see each other, `[batch 1 query key]`."""
    cuts = 0.35 + 0.3 * np.arange(shape.batch) / max(1, shape.batch - 1)
    query = (np.arange(shape.query_length) + 0.5) / shape.query_length > cuts[:, None]
    key = (np.arange(shape.key_length) + 0.5) / shape.key_length > cuts[:, None]
    return (query[:, :, None] == key[:, None, :])[:, None]


def sliding_window(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Allow keys at most 2 before and 1 after the (rescaled) query position, `[1 1 query key]`."""
    centre = np.arange(shape.query_length) * shape.key_length // shape.query_length
    distance = np.arange(shape.key_length) - centre[:, None]
    return ((distance >= -2) & (distance <= 1))[None, None]


def prefix_lm(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Let every query see a prefix, which differs per entry; the rest is causal."""
    prefix = 1 + np.arange(shape.batch) % (shape.key_length - 1)
    causal = np.tri(shape.query_length, shape.key_length, dtype=np.bool_)
    visible = np.arange(shape.key_length) < prefix[:, None]
    return causal[None, None] | visible[:, None, None, :]


def one_allowed_key(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Let every other query attend exactly one key, which differs per entry and query."""
    mask = per_batch(shape, random)
    for entry in range(shape.batch):
        for query in range(0, shape.query_length, 2):
            mask[entry, :, query] = False
            mask[entry, :, query, (query + 2 * entry + 1) % shape.key_length] = True
    return mask


def with_fully_masked_row(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return an arbitrary mask per batch entry that blocks all keys of query 1 of entry 0."""
    mask = per_batch(shape, random)
    mask[0, :, 1] = False
    return mask


def alibi(shape: Shape, random: np.random.Generator) -> Array:
    """Return a bias linear in the distance, one slope per head (ALiBi, arXiv:2108.12409)."""
    slopes = 2.0 ** (-4.0 * np.arange(1, shape.heads + 1) / shape.heads)
    distance = np.arange(shape.key_length) - np.arange(shape.query_length)[:, None]
    return -np.abs(distance)[None, None] * slopes[None, :, None, None]


def bias_shared(shape: Shape, random: np.random.Generator) -> Array:
    """Draw a bias from N(0, 1), shared by the whole batch, `[1 1 query key]`."""
    return random.standard_normal((1, 1, shape.query_length, shape.key_length))


def bias_per_head(shape: Shape, random: np.random.Generator) -> Array:
    """Draw a bias from N(0, 1) per head, like relative position biases, `[1 heads query key]`."""
    return random.standard_normal((1, *shape.logits[1:]))


def bias_far_below_zero(shape: Shape, random: np.random.Generator) -> Array:
    """Draw from N(0, 1); subtract 100 in the last entry, where exp then underflows float32.

    The other entries stay ordinary, because bfloat16 holds little of a number of 100.
    """
    bias = random.standard_normal(shape.logits)
    bias[-1] -= 100.0
    return bias


def bias_high_on_padding(shape: Shape, random: np.random.Generator) -> Array:
    """Draw from N(0, 1); add 200 where `key_padding` blocks, so exp of what is left underflows."""
    return random.standard_normal(shape.logits) + 200.0 * ~key_padding(shape, random)


def bias_over_keys(shape: Shape, random: np.random.Generator) -> Array:
    """Draw a bias from N(0, 1) for each key, the same for all queries, `[batch heads 1 key]`."""
    return random.standard_normal((*shape.logits[:2], 1, shape.key_length))


def bias_in_full(shape: Shape, random: np.random.Generator) -> Array:
    """Draw a bias from N(0, 1) for every logit, `[batch heads query key]`."""
    return random.standard_normal(shape.logits)


def _arbitrary(shape: tuple[int, ...], random: np.random.Generator) -> BoolArray:
    """Return a mask that allows about 60 %, and in each row at least one key, but not all."""
    mask = random.random(shape) < 0.6
    keys = shape[-1]
    for index in np.ndindex(shape[:-1]):
        kept, lost = random.permutation(keys)[:2]
        mask[(*index, kept)], mask[(*index, lost)] = True, False
    return mask
