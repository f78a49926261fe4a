"""Patterns of masks, additive biases and unusual inputs, made from a shape and a random generator.

Masks are canonical: True where a query may attend to a key, with the axes `[batch heads query key]`
of size 1 where the pattern does not vary. In the families for which the catalogue uses a pattern,
every query may attend to at least one key, except in `with_fully_masked_row`, because
implementations disagree on fully masked queries.

A regime changes the dictionary of drawn inputs and weights, so that naive arithmetic or shortcuts
cause errors.

A feature returns fields of `Problem`, such as a window. Its numbers are chosen so that each of them
affects the answer: sinks as large as the largest logits, a window shorter than the keys, and so on.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from conformance.cases.case import Drawn
from conformance.definition.dtypes import Array, BoolArray, IntArray
from conformance.definition.geometry import Pair
from conformance.definition.problem import Causal, Norm, Pairs, Positions, Rotary, Segments, Shape
from conformance.definition.rotary import RotaryAxes, RotaryScaling

# Masks


def key_padding(shape: Shape, random: np.random.Generator, tiles: Pair | None = None) -> BoolArray:
    """Return a padding mask `[batch 1 1 key]`: entry b has its last b + 1 keys blocked.

    After an entry with one allowed key, the next entry again has one blocked key. `tiles` are the
    lengths of a tile of queries and of keys. If they are given and there are more keys than in one
    tile, the entries end, in turn, after the first key of the last tile but one, at the end of that
    tile, and one key before its end.
    """
    lengths = shape.key_length - 1 - np.arange(shape.batch) % max(1, shape.key_length - 1)
    if tiles and shape.key_length > tiles[1]:
        whole = (shape.key_length - 1) // tiles[1] * tiles[1]
        lengths = np.resize([whole - tiles[1] + 1, whole, whole - 1], shape.batch)
    return (np.arange(shape.key_length) < lengths[:, None])[:, None, None, :]


def other_mask(mask: BoolArray) -> BoolArray:
    """Return the inverted mask, except that every query may also attend to the first key."""
    other: BoolArray = np.logical_not(mask)
    other[..., 0] = True
    return other


def first_unpadded(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return a padding mask `[batch 1 1 key]`: entry b has its last b keys blocked.

    After an entry with one allowed key, the next entry again has all keys allowed.
    """
    lengths = shape.key_length - np.arange(shape.batch) % shape.key_length
    return (np.arange(shape.key_length) < lengths[:, None])[:, None, None, :]


def blocked_start(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return a mask `[1 1 1 key]` that blocks the first 54 % of the keys, rounded up.

    In the family `tiles`, which has 129 keys, these are more than a tile of 64.
    """
    return (np.arange(shape.key_length) >= 0.54 * shape.key_length)[None, None, None]


def left_padding(shape: Shape, random: np.random.Generator, tiles: Pair | None = None) -> BoolArray:
    """Return a padding mask `[batch 1 1 key]` with padding on the left, as in generation."""
    return key_padding(shape, random, tiles)[..., ::-1].copy()


def padded_cache(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return a mask `[batch 1 1 key]` that blocks 0, 1, 2, ... keys in batch entries 0, 1, 2, ...

    The blocked keys are the first keys of a cache, and the queries are the last tokens. The number
    of blocked keys restarts at 0 before a bottom-right causal mask would leave a query no key.
    """
    cached = shape.key_length - shape.query_length
    blocked = np.arange(shape.batch) % (cached + 1)
    return (np.arange(shape.key_length) >= blocked[:, None])[:, None, None, :]


def keys_per_head(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return a random mask `[1 heads 1 key]`, the same for all batch entries and queries."""
    return _arbitrary((1, shape.heads, 1, shape.key_length), random)


def heads_only(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return a random mask `[1 heads query key]`, the same for all batch entries."""
    return _arbitrary((1, *shape.logits[1:]), random)


def shared_with_first_key(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return a random mask `[1 1 query key]` that also allows the first key for every query.

    With a causal mask, each query therefore still attends to at least one key.
    """
    mask = shared(shape, random)
    mask[..., 0] = True
    return mask


def near_diagonal(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return a random mask `[1 1 query key]` that always allows the keys near each query.

    These are the key with the query's index, and the key at the same relative place. About three
    quarters of the other keys are allowed too. Combined with a window or with segments, the mask
    leaves keys to nearly all queries.
    """
    mask = shared(shape, random)
    query, key = np.ogrid[: shape.query_length, : shape.key_length]
    mask |= (key == query) | (key == query * shape.key_length // shape.query_length)
    mask |= random.random(mask.shape) < 0.4
    return mask


def shared(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return a random mask `[1 1 query key]`, the same for all batch entries and heads."""
    return _arbitrary((1, 1, shape.query_length, shape.key_length), random)


def per_batch(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return a random mask `[batch 1 query key]`, the same for all heads of a batch entry."""
    return _arbitrary((shape.batch, 1, shape.query_length, shape.key_length), random)


def per_head(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return a random mask `[batch heads query key]`, drawn for every entry and head."""
    return _arbitrary(shape.logits, random)


def over_keys(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return a random mask `[1 1 1 key]`, which varies over the keys only."""
    return _arbitrary((1, 1, 1, shape.key_length), random)


def everything(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return a mask `[1 1 query 1]` that blocks nothing: only its shape can be misread."""
    return np.ones((1, 1, shape.query_length, 1), np.bool_)


def block_diagonal(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return a mask `[batch 1 query key]` for two sequences packed into each batch entry.

    The first sequence has about 35 % of the tokens in the first entry, rising to 65 % in the last.
    """
    cuts = 0.35 + 0.3 * np.arange(shape.batch) / max(1, shape.batch - 1)
    query = (np.arange(shape.query_length) + 0.5) / shape.query_length > cuts[:, None]
    key = (np.arange(shape.key_length) + 0.5) / shape.key_length > cuts[:, None]
    return (query[:, :, None] == key[:, None, :])[:, None]


def sliding_window(
    shape: Shape, random: np.random.Generator, tiles: Pair | None = None
) -> BoolArray:
    """Return a mask `[1 1 query key]` that allows 2 keys before and 1 after the query's own key.

    The own key of query i, which is allowed too, has the index i · keys / queries, rounded down.
    With `tiles`, as many keys before it as a tile of keys holds are allowed instead of 2, so that
    the window crosses the edge of a tile.
    """
    centre = np.arange(shape.query_length) * shape.key_length // shape.query_length
    distance = np.arange(shape.key_length) - centre[:, None]
    return ((distance >= -(tiles[1] if tiles else 2)) & (distance <= 1))[None, None]


def whole_tiles(shape: Shape, random: np.random.Generator, tiles: Pair | None = None) -> BoolArray:
    """Return a mask `[batch heads query key]` of tiles: open, blocked, or cut by a diagonal.

    The tiles are drawn for every entry and head, except that in entry 0, head 0 has the first tile
    of keys blocked for all queries, and head 1 the last one. A query that would then be fully
    masked may attend to one key of the last tile but one, or of the only tile.
    """
    rows, columns = tiles or (64, 64)
    across = -(-shape.query_length // rows), -(-shape.key_length // columns)
    kinds = random.choice(3, p=(0.4, 0.4, 0.2), size=(*shape.logits[:2], *across))
    kinds[0, 0, :, 0] = 1
    if shape.heads > 1:
        kinds[0, 1, :, -1] = 1
    kinds = kinds.repeat(rows, 2).repeat(columns, 3)
    kinds = kinds[:, :, : shape.query_length, : shape.key_length]
    query, key = np.ogrid[: shape.query_length, : shape.key_length]
    mask: BoolArray = (kinds == 0) | ((kinds == 2) & (key % columns <= query % rows))
    entry, head, row = np.nonzero(~mask.any(axis=3))
    # Give a fully masked row a key of the last tile but one, or of the only tile.
    mask[entry, head, row, max(0, shape.key_length - columns - 1)] = True
    return mask


def spans(shape: Shape, random: np.random.Generator, tiles: Pair | None = None) -> BoolArray:
    """Return a mask `[batch heads query key]` of two random spans of keys for each query.

    Each span is an eighth to a quarter of the keys long, or shorter if it is cut off by the end of
    the keys. The spans differ between the queries of a head, so that a tile or a split is blocked
    for only some of these queries. In the last head, the first query sees the first keys. If there
    are several heads, the first query of head 0 sees the last keys.
    """
    keys = shape.key_length
    least = max(1, keys // 8)
    sizes = random.integers(least, 2 * least + 1, size=(2, *shape.logits[:3], 1))
    starts = random.integers(0, keys, size=sizes.shape)
    starts[:, :, 0, 0] = np.maximum(0, keys - sizes[:, :, 0, 0])
    starts[:, :, -1, 0] = 0
    positions = np.arange(keys)
    first, second = (positions >= starts) & (positions < starts + sizes)
    seen: BoolArray = first | second
    return seen


def ragged_cache(shape: Shape, random: np.random.Generator, tiles: Pair | None = None) -> BoolArray:
    """Return a padding mask `[batch 1 1 key]` of caches that are filled to very different lengths.

    The first entry has two keys or, with `tiles`, one key more than a tile. If there are several
    entries, the last one has all keys but one.
    """
    first = min((tiles[1] if tiles else 1) + 1, shape.key_length)
    lengths = np.linspace(first, max(first, shape.key_length - 1), shape.batch).astype(int)
    return (np.arange(shape.key_length) < lengths[:, None])[:, None, None, :]


def prefix_lm(shape: Shape, random: np.random.Generator, tiles: Pair | None = None) -> BoolArray:
    """Return a causal mask `[batch 1 query key]` that also allows every query a prefix of the keys.

    In entry b, the prefix has b + 1 keys; after a prefix of all keys but one, the numbers start
    again from 1. With `tiles`, each prefix is longer by a tile.
    """
    prefix = 1 + np.arange(shape.batch) % (shape.key_length - 1) + (tiles[1] if tiles else 0)
    causal = np.tri(shape.query_length, shape.key_length, dtype=np.bool_)
    visible = np.arange(shape.key_length) < prefix[:, None]
    return causal[None, None] | visible[:, None, None, :]


def one_allowed_key(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return a random mask `[batch 1 query key]` that leaves every second query exactly one key."""
    mask = per_batch(shape, random)
    for entry in range(shape.batch):
        for query in range(0, shape.query_length, 2):
            mask[entry, :, query] = False
            mask[entry, :, query, (query + 2 * entry + 1) % shape.key_length] = True
    return mask


def with_fully_masked_row(shape: Shape, random: np.random.Generator) -> BoolArray:
    """Return a random mask `[batch 1 query key]` that blocks all keys of query 1 of entry 0."""
    mask = per_batch(shape, random)
    mask[0, :, 1] = False
    return mask


# Additive biases


def alibi(shape: Shape, random: np.random.Generator) -> Array:
    """Return a bias `[1 heads query key]` of −slope · |key − query| (ALiBi, arXiv:2108.12409).

    The slopes of the heads are the powers of 2 from 2^(−4/heads) down to 2^−4.
    """
    slopes = 2.0 ** (-4.0 * np.arange(1, shape.heads + 1) / shape.heads)
    distance = np.arange(shape.key_length) - np.arange(shape.query_length)[:, None]
    return -np.abs(distance)[None, None] * slopes[None, :, None, None]


def bias_shared(shape: Shape, random: np.random.Generator) -> Array:
    """Return a bias `[1 1 query key]` from N(0, 1), the same for all batch entries and heads."""
    return random.standard_normal((1, 1, shape.query_length, shape.key_length))


def bias_per_head(shape: Shape, random: np.random.Generator) -> Array:
    """Return a bias `[1 heads query key]` from N(0, 1), like relative position biases."""
    return random.standard_normal((1, *shape.logits[1:]))


def bias_far_below_zero(shape: Shape, random: np.random.Generator) -> Array:
    """Return a bias `[batch heads query key]` from N(0, 1), minus 100 in the last batch entry.

    In that entry, exp underflows in float32 unless the row's maximum is subtracted. The other
    entries are not shifted, because bfloat16 has few digits left near 100.
    """
    bias = random.standard_normal(shape.logits)
    bias[-1] -= 100.0
    return bias


def bias_lower(shape: Shape, random: np.random.Generator) -> Array:
    """Return a bias `[batch heads query key]` from N(0, 1), lowered by 60,000, 2,000 or 600.

    This is so for every other query, in turn. In programs, -50,000, -10,000, -1,000 and -300 are in
    use as the start of a running maximum, and each hides other rows.
    """
    bias = random.standard_normal(shape.logits)
    return bias - np.resize([6e4, 0.0, 2e3, 0.0, 6e2, 0.0], shape.query_length)[:, None]


def bias_high_on_padding(shape: Shape, random: np.random.Generator) -> Array:
    """Return a bias `[batch heads query key]` from N(0, 1), plus 200 on the padding.

    The padding is what `key_padding` blocks, so the 200 must have no effect.
    """
    return random.standard_normal(shape.logits) + 200.0 * ~key_padding(shape, random)


def bias_over_keys(shape: Shape, random: np.random.Generator) -> Array:
    """Return a bias `[batch heads 1 key]` from N(0, 1), the same for all queries of a head."""
    return random.standard_normal((*shape.logits[:2], 1, shape.key_length))


def bias_per_key(shape: Shape, random: np.random.Generator) -> Array:
    """Return a bias `[batch 1 1 key]` from N(0, 1), the same for all heads and queries."""
    return random.standard_normal((shape.batch, 1, 1, shape.key_length))


def bias_over_queries(shape: Shape, random: np.random.Generator) -> Array:
    """Return a bias `[1 heads query 1]` from N(0, 1), which a softmax over keys cancels."""
    return random.standard_normal((1, shape.heads, shape.query_length, 1))


def bias_per_entry(shape: Shape, random: np.random.Generator) -> Array:
    """Return a bias `[batch 1 query key]` from N(0, 1), shared by all heads."""
    return random.standard_normal((shape.batch, 1, *shape.logits[2:]))


def bias_in_full(shape: Shape, random: np.random.Generator) -> Array:
    """Return a bias `[batch heads query key]` from N(0, 1), one number for every logit."""
    return random.standard_normal(shape.logits)


def _arbitrary(shape: tuple[int, ...], random: np.random.Generator) -> BoolArray:
    """Return a random mask that allows about 60 % of keys, in each row at least one but not all.

    `shape` is that of the mask; its last axis, the keys, has to be at least 2.
    """
    mask = random.random(shape) < 0.6
    keys = shape[-1]
    for index in np.ndindex(shape[:-1]):
        kept, lost = random.permutation(keys)[:2]
        mask[(*index, kept)], mask[(*index, lost)] = True, False
    return mask


# Regimes


def large_logits(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Scale logits by 8: the softmax is nearly one-hot, and rounding a logit has a large effect."""
    _scale_queries(drawn, 8.0)


def huge_logits(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Raise the largest logit of the last batch entry to about 110, where exp overflows float32.

    A softmax must therefore subtract the maximum of the row first. Queries grow with the index of
    their entry. The first entry is unchanged, because a one-hot softmax hides mistakes in scale and
    biases. Larger logits would have too much noise in bfloat16.
    """
    logits = _logits(shape, drawn)
    growth = np.linspace(0.0, 1.0, shape.batch)[:, None, None]
    drawn["query"] *= (110.0 / logits[-1].max()) ** growth


def low_logits(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Shift all logits of the last batch entry to about -200, where exp underflows float32.

    A common component is added to all queries of this entry, and to all its keys a vector whose
    logit with that component is -200 in each head. Shifting all logits of a row leaves its weights
    unchanged if the row's own maximum is subtracted.
    """
    common = 2.0 * random.standard_normal(shape.query_width)
    drawn["query"][-1] += common
    heads = np.einsum("e,ehd->hd", common, drawn["weights.query"])
    keys = drawn["weights.key"].repeat(shape.group, axis=1)
    along = np.einsum("ehd,hd->he", keys, heads)
    wanted = np.full(shape.heads, -200.0 / shape.default_scale)
    drawn["key"][-1] += np.linalg.lstsq(along, wanted, rcond=None)[0]


def lower_logits(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Shift all logits of each query, in turn, to about -3,000, -400 and -12.

    A running maximum that starts at a finite number, or that is 0 after a tile without a visible
    key, then hides the rows below it by as much as exp can express. One component of all heads
    makes the shift, in the middle because the sums that follow it are rounded at its size. Its
    numbers are powers of 2, 128 in keys.
    """
    query, key = "query", shape.array_of("key")
    largest = min(2.0**15, 2.0 ** np.ceil(np.log2(2000.0 / shape.default_scale)))
    drawn[query][..., 0] = np.resize(2.0 ** np.array([0.0, -3.0, -8.0]), shape.query_length)
    drawn[key][..., 1] = 1.0
    middle = shape.head_size // 2
    for name, channel, number in (("query", 0, -largest / 128.0), ("key", 1, 128.0)):
        weights = drawn[f"weights.{name}"]
        weights[channel] = 0.0
        weights[:, :, middle] = 0.0
        weights[channel, :, middle] = number
        if shape.has_bias(name):
            drawn[f"weights.{name}_bias"][:, middle] = 0.0


def no_loss_on_lowest(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Let the loss not depend on the queries that `bias_lower` lowers by 60,000.

    In float32, one rounding of the log-normaliser of these rows changes their weights by 0.4 %, and
    backward passes that convert it to base 2 and back round it several times.
    """
    drawn["cotangent"][:, ::6] = 0.0


def large_heads(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Scale projected queries and keys by 128, so that products of them overflow float16."""
    for name in ("query", "key"):
        _scale(drawn, 128.0, f"weights.{name}", f"weights.{name}_bias")


def beyond_float16(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Raise inputs until products of heads exceed the range of float16, although the logits do not.

    In the first entry, the logits of keys that `key_padding` blocks reach 60,000, or as much as
    keys and their heads in the range of float16 allow. In the last entry, one query and one key
    that it may attend to are raised, so that the query attends to nothing else.
    """
    visible, logits = key_padding(shape, random)[:, 0, 0], _logits(shape, drawn)
    blocked = drawn["key"][0, ~visible[0]]
    heads = np.einsum("ke,ehd->khd", blocked, drawn["weights.key"])
    most = 6e4 / max(np.abs(blocked).max(), np.abs(heads).max())
    drawn["key"][0, ~visible[0]] *= min(6e4 / logits[0, :, :, ~visible[0]].max(), most)
    pairs = np.where(visible[-1], logits[-1].max(axis=0), -np.inf)
    query, key = np.unravel_index(pairs.argmax(), pairs.shape)
    growth = np.sqrt(5e4 / pairs.max())
    drawn["query"][-1, query] *= growth
    drawn["key"][-1, key] *= growth


def queries_without_scale(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Multiply the query projection by the default scale.

    Models without a scale, such as T5, initialise it that way.
    """
    _scale_queries(drawn, shape.default_scale)


def next_key_attracts(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Make each query resemble the next key, so that an off-by-one causal mask is noticed.

    Otherwise, one extra key among hundreds would be lost in the noise of half precision.
    """
    drawn["weights.query"] = drawn["weights.key"].repeat(shape.group, axis=1)
    both = min(shape.query_length, shape.key_length - 1)
    drawn["query"][:, :both] = 4.0 * drawn["key"][:, 1 : both + 1]


def rising_logits(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Let keys grow a hundredfold along the sequence, and scale queries until logits reach 110.

    The first query is unchanged, and the last is scaled most. In some rows, the logit of one of the
    last keys then exceeds those of the first keys by so much that exp of the difference overflows
    float32.
    """
    drawn["key"] *= np.geomspace(0.01, 1.0, shape.key_length)[:, None]
    logits = _logits(shape, drawn)
    growth = np.linspace(0.0, 1.0, shape.query_length)[:, None]
    drawn["query"] *= (110.0 / logits[:, :, -1].max()) ** growth


def climbing_logits(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Let the logits of every row climb by about 5 from the first key to the last.

    Every tile of keys then raises the running maximum of nearly every row, but none outweighs the
    others.
    """
    start = random.standard_normal(shape.query_width)
    of_query = np.einsum("e,ehd->hd", start, drawn["weights.query"])
    keys = drawn["weights.key"].repeat(shape.group, axis=1)
    step = np.einsum("ehd,hd->e", keys, of_query)
    step *= np.sqrt(step.size) / np.linalg.norm(step)
    of_key = np.einsum("e,ehd->hd", step, keys)
    climb = shape.default_scale * (of_query * of_key).sum(axis=1)
    drawn["weights.query"] *= (5.0 / climb)[:, None]
    # The random parts of queries and keys spread the logits as much as before.
    shrink = np.abs(climb).mean() / 5.0
    drawn["query"] = drawn["query"] * shrink + start
    drawn["key"] += np.linspace(0.0, 1.0, shape.key_length)[:, None] * step


def large_scores(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Scale the weight of the additive score by 6; tanh limits the effect of larger inputs."""
    drawn["weights.score"] *= 6.0


def constant_rows(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Make all keys of the first batch entry equal, so that its attention weights are uniform."""
    name = shape.array_of("key")
    drawn[name][0] = drawn[name][0, :1]


def repeated_maxima(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Make keys equal in pairs, so that the largest logit of a row appears exactly twice.

    If the number of keys is odd, the last key has no equal, and its logit may be the largest. The
    projected queries are scaled by 3.
    """
    name = shape.array_of("key")
    _scale_queries(drawn, 3.0)
    half = drawn[name].shape[1] // 2
    drawn[name][:, half : 2 * half] = drawn[name][:, :half]


def outliers(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Add noise of variance 100 to about 1 % of the elements of each input, and to at least one.

    FlashAttention-3's error table has such noise in 0.1 % of the elements.
    """
    for name in shape.distinct_inputs():
        values = drawn[name]
        chosen = random.random(values.shape) < 0.01
        chosen.flat[random.integers(values.size)] = True
        values[chosen] += 10.0 * random.standard_normal(int(chosen.sum()))


def all_positive(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Draw inputs uniformly from [0, 2): sums do not cancel, so biased rounding accumulates."""
    for name in shape.distinct_inputs():
        drawn[name] = 2.0 * random.random(drawn[name].shape)


def small_values(shape: Shape, drawn: Drawn, random: np.random.Generator) -> None:
    """Scale the output by 1/1024, so that a fixed absolute tolerance would accept anything."""
    _scale(drawn, 2.0**-10, "weights.value", "weights.value_bias", "weights.output_bias")


# Features

Fields = dict[str, Any]


def window(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a window whose two sides differ by 2 and, if there are enough keys, cut off keys.

    Exchanging the sides is therefore not the same mistake as being off by one. With at most 4 keys,
    the sides may differ by only 1.
    """
    queries, keys = shape.query_length, shape.key_length
    before = max(1, min(keys // 3, queries - 3), queries - keys + 1)
    return {"window": (before, before + 2 if before + 2 < keys - 1 else max(0, before - 2))}


def window_tight(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a window of a third of the keys before the query, at least 2, and one key after it.

    If there are more queries than keys, it may reach further before, so that each query sees a key.
    """
    return {"window": (_before(shape), 1)}


def window_before(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a window as far before the query as `window_tight`, without a limit after it."""
    return {"window": (_before(shape), None)}


def window_narrow(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a window of a query's own position and the next, which cuts even short segments."""
    return {"window": (0, 1)}


def window_of_one(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a window of one key before and one after: at an edge of a tile, one lies beyond it."""
    return {"window": (1, 1)}


def window_each_side(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a window of as many keys before the query as after it: an eighth of them, at least 3.

    With 3, a window that is one key wider, one narrower, and one that counts the whole window for
    each side (2 · 3 + 1) or halves it are four different windows.
    """
    side = max(3, shape.key_length // 8)
    return {"window": (side, side)}


def window_nothing_before(
    shape: Shape, causal: Causal | None, random: np.random.Generator
) -> Fields:
    """Return a window of a query's own position and two after: 0 keys before is not "no limit"."""
    return {"window": (0, 2)}


def window_nothing_after(
    shape: Shape, causal: Causal | None, random: np.random.Generator
) -> Fields:
    """Return a window as far before the query as `window_tight`, with no key after its position.

    The window cuts off later keys, although there is no causal mask.
    """
    return {"window": (_before(shape), 0)}


def window_only_after(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a window that ends one key after a query's own position, without a limit before it."""
    return {"window": (None, 1)}


def window_of_last_queries(
    shape: Shape, causal: Causal | None, random: np.random.Generator
) -> Fields:
    """Return a window of two keys before and one after, with the queries at the last positions.

    The keys have the positions 0, 1, 2, ..., and the last query has the position of the last key.
    """
    size = (shape.batch, 1)
    query = np.arange(shape.key_length - shape.query_length, shape.key_length)
    at = Positions(query=np.tile(query, size), key=np.tile(np.arange(shape.key_length), size))
    return {"window": (2, 1), "positions": at}


def _before(shape: Shape) -> int:
    # If there are more queries than keys, the last query still sees a key.
    return max(2, shape.key_length // 3, shape.query_length - shape.key_length + 1)


def chunk(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return chunks of three positions, or of a third of the keys: the last one is not full."""
    return {"chunk": max(3, shape.key_length // 3 + 1)}


def dilation(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a dilation of 2, of 5 for many keys, or of 3 where queries stand an even step later.

    With 2, those queries would see the same keys if their positions were counted from 0.
    """
    later = shape.key_length - shape.query_length
    usual = 5 if shape.key_length > 50 else 2
    return {"dilation": usual if later == 0 or later % usual else usual + 1}


def window_of_steps(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a window that shows, beside `dilation`, two keys before the query's own and one after.

    It shows one key before where three would not fit. Beside a causal mask, it has no limit after.
    """
    step = dilation(shape, causal, random)["dilation"]
    before = 2 * step if 3 * step < shape.key_length else step
    return {"window": (before, None if causal else step)}


def global_tokens(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return two global tokens in every second entry, one of them the first, and one in the others.

    The second stands in the middle of the keys, and that of the other entries one key later.
    """
    entries, keys = np.arange(shape.batch)[:, None] % 2, np.arange(shape.key_length)
    first = (keys == 0) & (entries == 0)
    return {"global_tokens": 1 * (first | (keys == shape.key_length // 2 + 1 + entries))}


def spans_two(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return two spans of at least two keys with a key between them.

    In every second batch entry they begin at the first key, else at the second.
    """
    return {"spans": _spans(shape)}


def spans_of_one_id(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return the spans of `spans_two` with one id, with which they are one span in two parts."""
    return {"spans": np.minimum(_spans(shape), 1)}


def _spans(shape: Shape) -> IntArray:
    entries, keys = np.arange(shape.batch)[:, None], np.arange(shape.key_length)
    begins, length = 1 - entries % 2, max(2, shape.key_length // 4)
    one = (keys >= begins) & (keys < begins + length)
    other = (keys > begins + length) & (keys < shape.key_length - entries % 2)
    return one + 2 * other


def spans_adjacent(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return two spans without a key between them, and a last key in no span."""
    entries, keys = np.arange(shape.batch)[:, None], np.arange(shape.key_length)
    begins, half = 1 - entries % 2, shape.key_length // 2 + 1 - 2 * (entries % 2)
    inside = (keys >= begins) & (keys < shape.key_length - 1)
    return {"spans": np.where(inside, np.where(keys < half, 1, 2), 0)}


def spans_long(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a span of all keys but two, which windows cut and whose first keys a cache holds.

    The two keys are the first and the last, or, in every second batch entry, the first two.
    """
    entries, keys = np.arange(shape.batch)[:, None], np.arange(shape.key_length)
    begins = 1 + entries % 2
    return {"spans": 1 * ((keys >= begins) & (keys < shape.key_length - 2 + begins))}


def spans_prefix(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a span from the first key on that leaves out the last two keys, or the last three."""
    entries, keys = np.arange(shape.batch)[:, None], np.arange(shape.key_length)
    return {"spans": 1 * (keys < shape.key_length - 2 - entries % 2)}


def tree_of_drafts(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a tree in which tokens have siblings and parents that are not the token before them.

    In each batch entry the second token, or the third, descends from no drafted token.
    """
    tokens, entries = np.arange(shape.query_length), np.arange(shape.batch)[:, None]
    parents = np.where(tokens % 3 == 2, tokens - 2, (tokens - 1) // 2)
    roots = (tokens == 0) | (tokens == 1 + entries % 2)
    return {"tree": np.where(roots, -1, np.minimum(parents, tokens - 1))}


def soft_cap(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a soft cap of 1.5, which matters because logits of ordinary cases reach about 4."""
    return {"soft_cap": 1.5}


def sinks(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return sinks about as large as the largest logits, one for each head, in random order.

    For up to 8 keys, they lie between 0.5 and 3. For more keys, log(keys / 8) is added.
    """
    more = np.log(max(1.0, shape.key_length / 8))
    return {"sinks": more + 0.5 + 2.5 * random.permutation(shape.heads) / max(1, shape.heads - 1)}


def sink_of_layer(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return one sink for all heads, as large as the largest logits."""
    return {"sinks": np.full(shape.heads, 2.0 + np.log(max(1.0, shape.key_length / 8)))}


def sinks_far_apart(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return sinks of 100 and -100 for the first two heads, and ordinary ones for the others.

    The exponential of the difference of these two overflows float32.
    """
    ordinary = sinks(shape, causal, random)["sinks"]
    return {"sinks": np.concatenate([[100.0, -100.0], ordinary[2:]])[: shape.heads]}


def slopes(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return slopes from 0.125 to 0.75 in random order, which follow no usual formula."""
    return {"slopes": 0.125 + 0.625 * random.permutation(shape.heads) / max(1, shape.heads - 1)}


def slopes_of_alibi(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return the slopes of the code of the ALiBi paper, for any number of heads."""
    return {"slopes": alibi_slopes(shape.heads)}


def alibi_slopes(heads: int, step: int = 2) -> Array:
    """Return the slopes of the code of the ALiBi paper (arXiv:2108.12409) for a number of heads.

    These are the slopes for the largest power of two that does not exceed the number of heads,
    followed, as far as needed, by every other slope for twice that power: by each `step`th.
    """
    power = power_within(heads)
    first = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    others = 2.0 ** (-4.0 * np.arange(1, 2 * power + 1, step) / power)
    return np.concatenate([first, others])[:heads]


def power_within(count: int) -> int:
    """Return the largest power of two that does not exceed a positive number."""
    return 1 << (count.bit_length() - 1)


def rotary_halves(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a rotation of whole heads (except an odd last component), with pairs across halves."""
    return _rotary(shape, "halves")


def rotary_interleaved(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a rotation of whole heads (except an odd last component), with interleaved pairs."""
    return _rotary(shape, "interleaved")


def rotary_partial(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a rotation of about two thirds of each head, with interleaved pairs."""
    return _rotary(shape, "interleaved", max(2, shape.head_size // 3 * 2))


def rotary_partial_halves(
    shape: Shape, causal: Causal | None, random: np.random.Generator
) -> Fields:
    """Return a rotation of about two thirds of each head, with pairs across halves of that part."""
    return _rotary(shape, "halves", max(2, shape.head_size // 3 * 2))


def rotary_far(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a rotation with the usual base, 10000, which turns the last pairs by small angles."""
    return _rotary(shape, "halves", base=10000.0)


def _rotary(shape: Shape, pairs: Pairs, size: int = 0, base: float = 50.0) -> Fields:
    # With the usual base, the last pairs of a short sequence would hardly turn.
    size = size or shape.head_size // 2 * 2
    return {"rotary": Rotary(size=size, base=base, pairs=pairs)}


def rotary_linear(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a rotation with all frequencies divided by 4."""
    return _scaled(shape, RotaryScaling(rope_type="linear", factor=4.0))


def rotary_dynamic(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a rotation with a larger base, because there are twice the original tokens."""
    return _scaled(shape, _dynamic(_tokens(shape) // 2))


def rotary_dynamic_short(
    shape: Shape, causal: Causal | None, random: np.random.Generator
) -> Fields:
    """Return a rotation that would get a larger base with one more token."""
    return _scaled(shape, _dynamic(_tokens(shape)))


def rotary_yarn(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a rotation scaled as by YaRN, with a ramp between pairs that are rounded outwards."""
    return _scaled(shape, _yarn(beta_fast=2.0, beta_slow=0.5))


def rotary_yarn_untruncated(
    shape: Shape, causal: Causal | None, random: np.random.Generator
) -> Fields:
    """Return a rotation scaled as by YaRN, with a ramp from and to where pairs turn that often."""
    return _scaled(shape, _yarn(beta_fast=2.0, beta_slow=0.5, truncate=False))


def rotary_yarn_mscale(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a rotation scaled as by YaRN, with the usual ramp and a factor made of two others."""
    return _scaled(shape, _yarn(mscale=3.0, mscale_all_dim=0.5))


def rotary_attention_factor(
    shape: Shape, causal: Causal | None, random: np.random.Generator
) -> Fields:
    """Return a rotation of two thirds of each head, the cosine and sine of which are multiplied."""
    part = max(2, shape.head_size // 3 * 2)
    scaling = dataclasses.replace(_longrope(part, _tokens(shape) // 2), attention_factor=1.375)
    return _rotary(shape, "interleaved", part) | {"rotary_scaling": scaling}


def rotary_longrope(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a rotation with a divisor for each pair, those for more than the original tokens."""
    return _scaled(shape, _longrope(shape.head_size, _tokens(shape) // 2))


def rotary_longrope_short(
    shape: Shape, causal: Causal | None, random: np.random.Generator
) -> Fields:
    """Return a rotation that would get other divisors with one more token."""
    return _scaled(shape, _longrope(shape.head_size, _tokens(shape)))


def rotary_llama3(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return a rotation whose wavelengths are partly short, partly long, and partly between."""
    scaling = RotaryScaling(
        rope_type="llama3",
        factor=4.0,
        original_max_position_embeddings=32,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    return _scaled(shape, scaling)


def _scaled(shape: Shape, scaling: RotaryScaling, base: float = 50.0) -> Fields:
    fields = _rotary(shape, "halves", base=base)
    # Two pairs are the fewest that can be scaled differently.
    return fields | {"rotary_scaling": scaling if scaling.fits(fields["rotary"].size) else None}


def _dynamic(original: int) -> RotaryScaling:
    tokens = max(original, 1)
    return RotaryScaling(rope_type="dynamic", factor=4.0, original_max_position_embeddings=tokens)


def _yarn(**more: Any) -> RotaryScaling:
    return RotaryScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, **more)


def _longrope(size: int, original: int) -> RotaryScaling:
    pairs = size // 2
    return RotaryScaling(
        rope_type="longrope",
        factor=4.0,
        original_max_position_embeddings=max(original, 2),
        short_factor=tuple(1.0 + 0.5 * (pair % 3) for pair in range(pairs)),
        long_factor=tuple(1.5 + 1.25 * pair for pair in range(pairs)),
    )


def _tokens(shape: Shape) -> int:
    return max(shape.query_length, shape.key_length)


def axes_of_text(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return three equal positions of each token, as of a text, which begin at 2 and at 3 in turn.

    One position per token would give the same rotation, if it began there too.
    """
    at = np.arange(_tokens(shape)) + 2 + np.arange(shape.batch)[:, None] % 2
    return _on_axes(shape, np.repeat(at[..., None], 3, axis=-1))


def axes_of_image(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return the positions of a text with an image in it, by which sections side by side turn."""
    return _on_axes(shape, _image(shape))


def axes_of_image_interleaved(
    shape: Shape, causal: Causal | None, random: np.random.Generator
) -> Fields:
    """Return the positions of a text with an image in it, by which interleaved sections turn."""
    return _on_axes(shape, _image(shape), interleaved=True)


def axes_of_video(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return the positions of a text with a video in it, whose frames are two positions apart."""
    return _on_axes(shape, _image(shape, frames=True))


def axes_partial(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return the positions of an image for a part of each head only, with interleaved pairs."""
    return _on_axes(shape, _image(shape), rotated=rotary_partial(shape, causal, random))


def axes_yarn(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return the positions of an image, and frequencies scaled as by YaRN."""
    return _on_axes(shape, _image(shape), rotated=rotary_yarn(shape, causal, random))


def axes_dynamic(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return the positions of a video that are twice the original length, and a larger base.

    The base depends on the largest position on any axis, not on the number of tokens.
    """
    at = _image(shape, frames=True)
    scaling = _dynamic((_longest(at) + 1) // 2)
    return _on_axes(shape, at, rotated=_scaled(shape, scaling, NEAR))


def axes_dynamic_short(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return the positions of a text with an image that has more tokens than the original length.

    The largest position on any axis is the last one before the base would grow.
    """
    at = _image(shape)
    return _on_axes(shape, at, rotated=_scaled(shape, _dynamic(_longest(at) + 1), NEAR))


def _longest(at: IntArray) -> int:
    return int(at.max(initial=0))


NEAR = 3.0
"""A base with which the few positions of an image turn the last pairs, too, enough for bfloat16."""


def _image(shape: Shape, *, frames: bool = False) -> IntArray:
    """Return positions of time, height and width `[batch token 3]` of texts with an image.

    One token of text is before it, two in every second entry, and the image is about two thirds of
    the others. Its rows and columns count from the position where it begins. A video has frames of
    two rows and two columns, two positions of time apart. The text after it begins one position
    beyond the largest. Where there is no room for an image, all is text.
    """
    tokens, entries = _tokens(shape), []
    for entry in range(shape.batch):
        before = 1 + entry % 2
        rest = max(tokens - before, 0)
        rows = 2 if frames else max(2, math.isqrt(rest // 2))
        columns = 2 if frames else max(1, -(-2 * rest // 3) // rows)
        pictures = max(1, -(-2 * rest // 3) // (rows * columns)) if frames else 1
        grid = np.indices((pictures, rows, columns)).reshape(3, -1).T
        image = before + grid[: len(grid) if len(grid) <= rest else 0] * (1 + frames, 1, 1)
        after = image.max(initial=before - 1) + 1 + np.arange(rest - len(image))
        text = (np.repeat(at[:, None], 3, axis=1) for at in (np.arange(before), after))
        entries.append(np.concatenate([next(text), image, next(text)])[:tokens])
    return np.reshape(entries, (shape.batch, tokens, 3)).astype(np.int64)


def _on_axes(
    shape: Shape, at: IntArray, *, interleaved: bool = False, rotated: Fields | None = None
) -> Fields:
    """Return a rotation by these positions `[batch token 3]`, with sections that fit the heads.

    The last of them are those of the queries, if they are fewer than keys, and vice versa. The
    sections of five and more pairs differ in length.
    """
    fields = dict(_rotary(shape, "halves", base=NEAR) if rotated is None else rotated)
    scaling = fields.get("rotary_scaling") or RotaryScaling(rope_type="default")
    pairs = fields["rotary"].size // 2
    if interleaved:
        # Height and width have at most every third pair; width has one less if it has two.
        width, height = max(pairs // 3 - 1, min(pairs // 3, 1)), (pairs + 1) // 3
        time = pairs - height - width
    else:
        time, height = (pairs + 3) // 6, (pairs + 1) // 3
        width = pairs - time - height
    sections = (time, height, width)
    scaling = dataclasses.replace(
        scaling, mrope_section=sections, mrope_interleaved=True if interleaved else None
    )
    query, key = (at[:, at.shape[1] - n :] for n in (shape.query_length, shape.key_length))
    axes = RotaryAxes(query=query, key=key)
    return fields | {"rotary_scaling": scaling, "axes": axes}


def positions_with_gaps(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return positions that have gaps, differ between batch entries and do not begin at 0.

    If there are fewer queries than keys, the queries have the last of the keys' positions, and vice
    versa.
    """
    tokens = max(shape.query_length, shape.key_length)
    return _positions(shape, 2 + np.cumsum(random.integers(1, 4, (shape.batch, tokens)), axis=1))


def positions_permuted(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return the positions 0, 1, 2, ... of tokens that lie in the arrays in random order.

    The order is another in each batch entry. If there are fewer queries than keys, the queries have
    the positions of the last keys in the arrays, and vice versa.
    """
    tokens = max(shape.query_length, shape.key_length)
    return _positions(shape, np.stack([random.permutation(tokens) for _ in range(shape.batch)]))


def _positions(shape: Shape, at: IntArray) -> Fields:
    """Return the last of the positions `at` `[batch token]` for the queries, and for the keys."""
    query, key = (at[:, at.shape[1] - n :] for n in (shape.query_length, shape.key_length))
    return {"positions": Positions(query=query, key=key)}


def positions_far(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return positions with gaps on both sides of 4,096, where a usual table ends."""
    at = positions_with_gaps(shape, causal, random)["positions"]
    return {"positions": Positions(query=at.query + 4086, key=at.key + 4086)}


def norm(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return an RMS norm of queries and keys, with random gains and an epsilon of 1/4.

    Next to a mean square of about 1, such an epsilon is not negligible.
    """
    query, key = 1.25 + 0.375 * random.standard_normal((2, shape.head_size))
    return {"norm": Norm(query=query, key=key, epsilon=0.25)}


def key_lengths(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return key lengths that differ between batch entries.

    In turn, they are just over half of the keys, one key, all keys, and all keys but one.
    """
    keys = shape.key_length
    return {"key_lengths": np.resize([keys // 2 + 1, 1, keys, keys - 1], shape.batch)}


def key_lengths_from_queries(
    shape: Shape, causal: Causal | None, random: np.random.Generator
) -> Fields:
    """Return key lengths from the number of queries up to all keys, as with caches of a batch.

    In turn, they are all keys but one, all keys, all but two, all but three and so on, down to the
    number of queries. So the caches of entries differ in length, and the first is not the longest.
    There must be more keys than queries.
    """
    most, least = shape.key_length, min(shape.query_length, shape.key_length)
    short = np.arange(max(2, most - least + 1))
    short[:2] = 1, 0
    return {"key_lengths": most - np.resize(short, shape.batch)}


def key_lengths_apart(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return key lengths that alternate: an eighth of the keys (at least 1), then all keys."""
    keys = shape.key_length
    return {"key_lengths": np.resize([max(1, keys // 8), keys], shape.batch)}


def key_lengths_empty(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return the lengths of `key_lengths`, but 0 for every second batch entry."""
    lengths = key_lengths(shape, causal, random)["key_lengths"]
    lengths[1::2] = 0
    return {"key_lengths": lengths}


def lengths(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return query and key lengths that leave out some queries and keys of every batch entry.

    At least one query and one key remain.
    """
    entries = np.arange(shape.batch)
    return {
        "query_lengths": np.maximum(1, shape.query_length - 1 - 2 * entries),
        "key_lengths": np.maximum(1, shape.key_length - 2 + entries % 2),
    }


def segments(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return three segments of 1, 2 and more queries, or fewer segments if there are few tokens.

    Each segment gets as many keys as queries, as far as there are enough. Remaining keys are
    distributed over the segments. The order of the segments differs between batch entries.
    """
    return {"segments": _segments(shape, 0)}


def two_segments(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return two segments: one with a single query, and one so long that windows cut it."""
    return {"segments": _segments(shape, 0, 2)}


def segments_of_many_queries(
    shape: Shape, causal: Causal | None, random: np.random.Generator
) -> Fields:
    """Return two segments, one of 2 queries and 5 keys, and one of all other tokens.

    With 19 queries, the second has 17, one more than fit into a tile of the smallest usual size.
    """
    query, key = (
        np.repeat([0, 1], [few, length - few])
        for few, length in ((2, shape.query_length), (5, shape.key_length))
    )
    size = (shape.batch, 1)
    return {"segments": Segments(query=np.tile(query, size), key=np.tile(key, size))}


def segments_unequal(shape: Shape, causal: Causal | None, random: np.random.Generator) -> Fields:
    """Return segments with different numbers of queries and keys, although the totals may agree.

    Queries are divided as `segments` divides them. The keys of each batch entry are divided as
    `segments` divides the keys of the next entry.
    """
    found = _segments(shape, 0)
    of_keys = found.query if shape.query_length == shape.key_length else found.key
    return {"segments": Segments(query=found.query, key=np.roll(of_keys, -1, axis=0))}


def segments_large_numbers(
    shape: Shape, causal: Causal | None, random: np.random.Generator
) -> Fields:
    """Return the segments of `segments` with ids that begin at 510.

    bfloat16 rounds 511 and 512 to the same number.
    """
    return {"segments": _segments(shape, 510)}


def _segments(shape: Shape, first: int, most: int = 3) -> Segments:
    members = min(most, shape.query_length, shape.key_length)
    of_queries = _members(shape.query_length, members)
    of_keys = _members(min(shape.query_length, shape.key_length), members)
    for more in range(shape.key_length - sum(of_keys)):
        of_keys[(2 * more if most == 3 else -1) % members] += 1
    numbers = first + np.arange(members)
    query, key = (
        np.stack([np.repeat(numbers, np.roll(sizes, entry)) for entry in range(shape.batch)])
        for sizes in (of_queries, of_keys)
    )
    return Segments(query=query, key=key)


def _members(tokens: int, members: int) -> list[int]:
    """Return the sizes of `members` segments, at most 3, that together have `tokens` tokens.

    The last segment has all tokens that the others, with 1 and 2 tokens, leave. If too few are
    left, the others are smaller.
    """
    sizes = [1, 2, tokens][:members]
    while sum(sizes[:-1]) > tokens - 1:
        sizes[sizes.index(max(sizes[:-1]))] -= 1
    sizes[-1] = tokens - sum(sizes[:-1])
    return sizes


def _logits(shape: Shape, drawn: Drawn) -> Array:
    """Return the logits `[batch heads query key]` of drawn arrays, without any biases."""
    q = np.einsum("bqe,ehd->bhqd", drawn["query"], drawn["weights.query"])
    k = np.einsum("bke,ehd->bhkd", drawn["key"], drawn["weights.key"]).repeat(shape.group, axis=1)
    return shape.default_scale * np.einsum("bhqd,bhkd->bhqk", q, k)


def _scale_queries(drawn: Drawn, factor: float) -> None:
    # Scale the weights, not the inputs, which in self-attention are keys and values too.
    _scale(drawn, factor, "weights.query", "weights.query_bias")


def _scale(drawn: Drawn, factor: float, *names: str) -> None:
    """Multiply the arrays with these names, if there are any, by a factor, in place."""
    for name in drawn.keys() & set(names):
        drawn[name] *= factor
