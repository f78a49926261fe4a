"""Mutants of the tiled attention that show at length; `test_long.py` poses the problems to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from longer import TILES

from conformance.definition.dtypes import DTYPES
from mutants.mutant import Mutant
from mutants.tiled import Array, F, Kernel, Tiled

EVERY_ELEMENT = "long"
"""What notices it: the comparison of every element with the class oracle."""


@dataclass(frozen=True, eq=False)
class LongMutant(Mutant):
    """A mutant of the tiled attention; `case` is the problem of `tests/longer.py` that shows it."""

    @property
    def kernel(self) -> Kernel:
        """As an implementation at length."""
        return Kernel(type("Mutant", (Tiled,), dict(self.changes)), TILES.get(self.case, (64, 128)))


MUTANTS: list[LongMutant] = []


def _add(name: str, did: str, problem: str, **changes: Any) -> None:
    unknown = [stage for stage in changes if not hasattr(Tiled, stage)]
    assert not unknown, f"{name}: the attention has no {unknown}"
    assert all(other.name != name for other in MUTANTS), f"{name}: the name is taken"
    *_, dtype = f"float32-{problem}".split("-")
    MUTANTS.append(
        LongMutant(
            name,
            "length",
            did,
            (EVERY_ELEMENT,),
            changes,
            case=problem,
            dtype=dtype if dtype in DTYPES else "float32",
            level="long",
        )
    )


@cache
def _steps(length: int, frequencies: tuple[float, ...]) -> Array:
    return np.cumsum(np.full((length, len(frequencies)), frequencies, F), axis=0, dtype=F)


def _added_up(a: Tiled, length: int) -> Array:
    """The angle of every position as a sum of float32, `[position pair]`."""
    return _steps(length, tuple(Tiled.frequencies(a).tolist()))


def _without(tile: int, column: int) -> Callable[[Tiled, int], list[int]]:
    return lambda a, at: [c for c in a.visits(at) if (at, c) != (tile, column)]


# Tiles and work.

_add(
    "pair-lost-forward",
    "loses one pair of 32 × 16 tiles in the forward pass",
    "full",
    visits_forward=_without(17, 9),
)
_add(
    "pair-lost-for-query",
    "loses one pair of tiles in the gradient of queries",
    "full",
    visits_for_query=_without(17, 9),
)
_add(
    "pair-lost-for-key",
    "loses one pair of 32 × 16 tiles in the gradients of keys and values",
    "full",
    visits_for_key=_without(17, 9),
)
_add(
    "pair-lost-forward-in-bfloat16",
    "loses one pair of 32 × 16 tiles in the forward pass of bfloat16",
    "full-bfloat16",
    visits_forward=_without(17, 9),
)
_add(
    "pair-twice-for-key",
    "adds one pair of tiles twice to the gradients of keys and values",
    "full",
    visits_for_key=lambda a, at: a.visits(at) + ([3] if at == 11 else []),
)
_add(
    "causal-tile-skipped",
    "skips the tile on the diagonal that the rounding of the end loses",
    "causal",
    last_tile=lambda a, rows: max(1, Tiled.last_tile(a, rows) - (rows[0] == 1984)),
)
_add(
    "causal-tile-open",
    "does not mask the last tile of the diagonal",
    "causal",
    visible=lambda a, rows, columns: (
        Tiled.visible(a, rows, columns) | (rows[0] == 1984) & (columns[0] == 1920)
    ),
)
_add(
    "window-begins-one-tile-late",
    "rounds the first tile of a window up",
    "window",
    first_tile=lambda a, rows: -(-max(0, rows[0] - a.before()) // a.columns),
)
_add(
    "window-ends-one-tile-early",
    "rounds the last tile of a window down",
    "window",
    last_tile=lambda a, rows: min(len(a.key_tiles()), max(1, (rows[1] + a.after()) // a.columns)),
)
_add(
    "window-one-key-narrow",
    "counts the own key as one of those before",
    "window",
    before=lambda a: Tiled.before(a) - 1,
)
_add(
    "window-one-key-wide",
    "lets the window begin one key early",
    "window",
    before=lambda a: Tiled.before(a) + 1,
)
_add(
    "last-item-dropped",
    "deals out one item of work too few",
    "full",
    items=lambda a, kind: Tiled.items(a, kind)[: None if kind == "backward" else -1],
)
_add(
    "remainder-of-work-dropped",
    "gives each worker the number of items divided by workers",
    "grouped",
    items=lambda a, kind: (
        every := Tiled.items(a, kind),
        every[: len(every) // a.workers * a.workers if kind == "forward" else None],
    )[1],
)
_add(
    "last-partial-tile-dropped",
    "counts tiles of keys by integer division",
    "ragged",
    key_tiles=lambda a: Tiled.key_tiles(a)[: a.keys // a.columns],
)
_add(
    "last-key-of-tiles-dropped",
    "ends every 16th tile one key early",
    "full",
    key_tiles=lambda a: [(j, k - (j % 2048 == 0)) for j, k in Tiled.key_tiles(a)],
)
_add(
    "last-tile-read-beyond",
    "reads the last, partial tile to its end, where zeros are",
    "ragged",
    sum_of=lambda a, total, factor, powers: (
        Tiled.sum_of(a, total, factor, powers)
        + (
            0
            if powers.shape[1] == a.columns
            else (a.columns - powers.shape[1]) * powers.min(axis=1)
        )
    ),
)
_add(
    "last-queries-dropped",
    "counts tiles of queries by integer division",
    "ragged",
    query_tiles=lambda a: Tiled.query_tiles(a)[: a.queries // a.rows],
)
_add(
    "padding-to-tile",
    "rounds the length of the keys up to a tile",
    "padded",
    length=lambda a: min(a.keys, -(-Tiled.length(a) // a.columns) * a.columns),
)
_add(
    "lengths-of-first-entry",
    "uses the length of the first batch entry for all",
    "padded",
    length=lambda a: a.given.sees.key_lengths[0],
)
_add(
    "member-of-tile",
    "takes the packed member of the first query of a tile for all of it",
    "packed",
    member=lambda a, side, span: np.where(
        side == 0, Tiled.member(a, side, (span[0], span[0] + 1))[0], Tiled.member(a, side, span)
    ),
)
_add(
    "member-bound-late",
    "lets a member begin one token late",
    "packed",
    member=lambda a, side, span: Tiled.member(
        a, side, (max(0, span[0] - 1), max(0, span[1] - 1)) if side and span[0] else span
    ),
)
_add(
    "positions-run-on",
    "does not start the positions of a packed member again",
    "packed-causal",
    within=lambda a, side, span: a.positions(span),
    aligned=lambda a, span: a.positions(span) + a.alignment(),
)

# Lengths of keys.

_add(
    "lengths-of-full-tiles-lost-at-length",
    "takes the remainder of a length for what its last tile holds: 0 if it is full",
    "lengths",
    visible=lambda a, rows, columns: (
        Tiled.visible(a, rows, columns)
        & (
            (columns[0] // a.columns != a.filled() - 1)
            | (np.arange(*columns) % a.columns < a.length() % a.columns)
        )
    ),
)
_add(
    "lengths-one-key-in-a-tile-lost",
    "counts one tile less where the last holds a single key",
    "lengths-causal",
    filled=lambda a: -(-(a.length() - 1) // a.columns),
)
_add(
    "lengths-of-full-tiles-lost-where-keys-are-split",
    "visits one tile too few where few queries see a length that is a multiple of tiles",
    "lengths-decoding",
    filled=lambda a: Tiled.filled(a) - (a.queries <= a.few and a.length() % a.columns == 0),
)
_add(
    "lengths-of-0-show-the-first-key",
    "reads at least one key",
    "lengths",
    length=lambda a: max(1, Tiled.length(a)),
)
_add(
    "lengths-of-0-are-none",
    "takes a length of 0 for none, so that all keys are seen",
    "lengths-causal",
    length=lambda a: Tiled.length(a) or a.keys,
)
_add(
    "lengths-in-16-bits",
    "keeps the lengths of keys in 16 bits",
    "lengths-far",
    length=lambda a: Tiled.length(a) % 2**16,
)
_add(
    "lengths-in-float16",
    "keeps the lengths of keys in float16, exact up to 2,048",
    "lengths-decoding",
    length=lambda a: int(np.float16(Tiled.length(a))),
)
_add(
    "lengths-lost-in-backward-at-length",
    "makes weights again as if no key were padding",
    "lengths",
    length=lambda a: a.keys if a.phase == "backward" else Tiled.length(a),
)
_add(
    "lengths-lost-where-keys-are-split",
    "sees padding where few queries have their keys split",
    "lengths-decoding",
    filled=lambda a: len(a.of_keys),
    visible=lambda a, rows, columns: (
        np.arange(*columns) <= a.aligned(rows)[:, None] + (a.split > 0) * a.keys
    ),
)
_add(
    "lengths-of-next-entry-at-length",
    "uses the length of the next entry for the one before",
    "lengths-bfloat16",
    length=lambda a: a.given.sees.key_lengths[(a.entry + 1) % a.batch],
)
_add(
    "lengths-of-the-longest-at-length",
    "uses the greatest length of a batch for all its entries",
    "lengths-causal",
    length=lambda a: max(a.given.sees.key_lengths),
)
_add(
    "lengths-not-in-alignment-at-length",
    "aligns the last queries with the end of the cache instead of the length",
    "lengths-decoding",
    alignment=lambda a: a.keys - a.queries,
)
_add(
    "lengths-one-short-at-length",
    "leaves the last key within a length out",
    "lengths-bfloat16",
    length=lambda a: Tiled.length(a) - 1,
)
_add(
    "lengths-split-as-the-first-entry",
    "splits keys into as many parts as the first entry fills, and leaves the others out",
    "lengths-far",
    parts=lambda a, columns: (
        [
            [c for c in columns if c // -(-a.given.sees.key_lengths[0] // a.columns // 6) == split]
            for split in range(6)
        ]
        + [[]]
    ),
)

# Indices and positions.

for _bits in (15, 16):
    _add(
        f"keys-wrap-at-2-{_bits}",
        f"keeps the index of a key in {_bits} bits",
        "few-queries",
        address=lambda a, index, n=2**_bits: index % n,
    )
    _add(
        f"queries-wrap-at-2-{_bits}",
        f"keeps the index of a query in {_bits} bits",
        "few-keys",
        address_of_queries=lambda a, index, n=2**_bits: index % n,
    )
_add(
    "writes-wrap-at-2-16",
    "stores rows at an index of 16 bits",
    "few-keys",
    stored_at=lambda a, index: index % 2**16,
)
_add(
    "offset-in-float",
    "computes the offset of an element in a float of 16 bits significance",
    "few-queries",
    address=lambda a, index: (
        np.minimum(index.astype(F).view(np.uint32) & np.uint32(0xFFFFFF00), 2**31)
        .astype(np.uint32)
        .view(F)
        .astype(int)
    ),
)


def _bfloat16(values: Array) -> Array:
    bits = np.ascontiguousarray(values, F).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(F)


_add(
    "positions-of-3000-in-bfloat16",
    "keeps 3,000 positions in bfloat16",
    "causal",
    positions=lambda a, span: _bfloat16(np.arange(*span)),
)
_add(
    "positions-in-float16",
    "keeps positions in float16, exact up to 2,048",
    "causal",
    positions=lambda a, span: np.arange(*span).astype(np.float16).astype(F),
)
_add(
    "bits-off-by-one-row",
    "reads the bits of one causal tile of 24 × 16 one row late",
    "causal",
    visible=lambda a, rows, columns: np.roll(
        Tiled.visible(a, rows, columns), (rows[0], columns[0]) == (1984, 1920), axis=0
    ),
)
_add(
    "causal-at-the-start",
    "aligns the triangle at the start where lengths differ",
    "decoding",
    alignment=lambda a: 0,
)
_add(
    "heads-dealt-in-turn",
    "gives query head h the key/value head h modulo their number",
    "grouped",
    kv_head=lambda a: a.head % a.kv_heads,
)
_add(
    "group-not-summed",
    "keeps the gradient of the last head of a group only",
    "grouped",
    add_group=lambda a, name, array, index, gradient: array.reshape(
        -1, array.shape[-1]
    ).__setitem__(a.row_of(name, index), gradient),
)

# The online softmax.


def _in_one_row(stage: str, instead: Callable[..., Array]) -> Callable[..., Array]:
    """A stage that is replaced in the sixth row of one tile of queries."""

    def changed(a: Tiled, tile: int, column: int, *operands: Array) -> Array:
        array = getattr(Tiled, stage)(a, tile, column, *operands)
        if tile == 21 and column > 0:
            array = array.copy()
            array[5] = instead(*operands)[5]
        return array

    return changed


_add(
    "sums-of-one-row-not-rescaled",
    "leaves the sums of one row of the 22nd tile of queries when its maximum grows",
    "full",
    shrink=_in_one_row("shrink", lambda before, now: np.ones_like(before)),
)
_add(
    "maximum-of-one-row-of-its-tile",
    "takes the maximum of the last tile alone in one row",
    "full",
    highest=_in_one_row("highest", lambda before, logits: logits.max(axis=1)),
    shrink=lambda a, tile, column, before, now: np.minimum(
        Tiled.shrink(a, tile, column, before, now), 1
    ),
)
_add(
    "split-without-weight",
    "averages the splits of the keys",
    "decoding",
    share=lambda a, log_totals: np.full(log_totals.shape, F(1 / len(log_totals))),
)
_add(
    "split-by-maximum",
    "weighs splits without their normalisers",
    "decoding",
    log_total=lambda a, total, peak: np.where(total > 0, peak, -np.inf),
)
_add(
    "empty-split-weighs",
    "begins the log-normaliser of an empty split of 300 keys at 0",
    "decoding-short",
    merged=lambda a, outputs, log_totals: Tiled.merged(
        a, outputs, np.where(log_totals == -np.inf, F(0), log_totals)
    ),
)
_add(
    "last-split-dropped",
    "merges one split too few",
    "decoding",
    merged=lambda a, outputs, log_totals: Tiled.merged(a, outputs[:-1], log_totals[:-1]),
)
_add(
    "sum-in-storage",
    "keeps the normaliser in bfloat16 over 2,000 tiles",
    "few-queries-bfloat16",
    sum_of=lambda a, total, factor, powers: a.held(Tiled.sum_of(a, total, factor, powers)),
)
_add(
    "context-in-storage",
    "keeps the context in bfloat16 over 2,000 tiles",
    "few-queries-bfloat16",
    context_of=lambda a, *operands: a.held(Tiled.context_of(a, *operands)),
)
_add(
    "sum-saturates",
    "keeps the normaliser in float16, which ends at 65,504",
    "few-queries",
    exp=lambda a, x: np.exp(x),
    sum_of=lambda a, total, factor, powers: np.minimum(
        Tiled.sum_of(a, total, factor, powers), F(2048)
    ),
)
_add(
    "query-gradient-in-storage",
    "adds up the gradient of queries in bfloat16",
    "few-queries-bfloat16",
    for_query=lambda a, *operands: a.held(Tiled.for_query(a, *operands)),
)
_add(
    "key-gradient-in-storage",
    "adds up the gradients of keys in bfloat16",
    "few-keys-bfloat16",
    for_key=lambda a, *operands: a.held(Tiled.for_key(a, *operands)),
)
_add(
    "value-gradient-in-storage",
    "adds up the gradients of values in bfloat16",
    "few-keys-bfloat16",
    for_value=lambda a, *operands: a.held(Tiled.for_value(a, *operands)),
)
_add(
    "exp-by-polynomial",
    "approximates exp with a relative error of 1e-5",
    "full",
    exp=lambda a, x: np.exp(x) * (1 + F(1e-5) * np.sin(np.where(np.isfinite(x), x, 0) * 40)),
)

# The backward pass.

_add(
    "row-term-lost",
    "leaves the row term of the last tile of queries at zero",
    "full",
    row_term=lambda a, tile, cotangent, output: (
        Tiled.row_term(a, tile, cotangent, output) * (tile < len(a.query_tiles()) - 1)
    ),
)
_add(
    "scale-missing-for-key",
    "does not scale the gradient of keys",
    "full",
    for_key=lambda a, gradient, d_logits, query: gradient + d_logits.T @ query,
)
_add(
    "log-total-in-bfloat16",
    "keeps the log-normaliser in bfloat16 beside tensors of float32",
    "full",
    log_total=lambda a, total, peak: _bfloat16(Tiled.log_total(a, total, peak)),
)
_add(
    "update-lost",
    "stores the gradient of a tile of values where it should add it",
    "full",
    for_value=lambda a, gradient, weights, cotangent: Tiled.for_value(
        a,
        gradient * (not np.array_equal(cotangent, a.load("cotangent", (640, 704)))),
        weights,
        cotangent,
    ),
)

# Sinks and soft caps.

_add(
    "sink-lost-where-keys-are-split",
    "leaves the sink out where few queries have their keys split",
    "decoding-with-sinks-and-cap",
    sink=lambda a: a.wide(-np.inf) if a.queries <= a.few else Tiled.sink(a),
)
_add(
    "sink-in-every-split",
    "adds the sink to the normaliser of every split",
    "decoding-with-sinks-and-cap",
    sink=lambda a: Tiled.sink(a) + (np.log(F(a.splits)) if a.queries <= a.few else 0),
)
_add(
    "sink-lost-in-last-tile-of-queries",
    "leaves the sink out in the last tile of queries, which is partial",
    "sinks",
    with_sink=lambda a, context, log_total: (
        (context, log_total) if len(context) < a.rows else Tiled.with_sink(a, context, log_total)
    ),
)
_add(
    "sink-of-key-head-at-length",
    "reads the sink of the key/value head instead of the query head's",
    "sinks",
    sink=lambda a: a.wide(a.given.sinks[a.kv_head()]),
)
_add(
    "sink-lost-for-backward",
    "keeps a log-normaliser without the sink for the backward pass",
    "sinks",
    with_sink=lambda a, context, log_total: (
        Tiled.with_sink(a, context, log_total)[0],
        log_total,
    ),
)
_add(
    "sink-gradient-of-last-tile-lost",
    "leaves the last tile of queries out of the gradient of the sinks",
    "sinks",
    for_sinks=lambda a, log_total, row: Tiled.for_sinks(
        a, log_total[..., : a.of_queries[-1][0]], row[..., : a.of_queries[-1][0]]
    ),
)
_add(
    "sink-gradient-with-wrong-sign",
    "returns the gradient of the sinks with the sign of a key's",
    "sinks-and-cap-bfloat16",
    for_sinks=lambda a, log_total, row: -Tiled.for_sinks(a, log_total, row),
)
_add(
    "cap-lost-where-keys-are-split",
    "does not cap logits where few queries have their keys split",
    "decoding-with-sinks-and-cap",
    capped=lambda a, logits: logits if a.queries <= a.few else Tiled.capped(a, logits),
)
_add(
    "cap-lost-in-backward",
    "recomputes logits without the cap in the backward pass",
    "capped",
    capped=lambda a, logits: logits if a.phase == "backward" else Tiled.capped(a, logits),
)
_add(
    "cap-without-derivative",
    "forgets the derivative of the cap in the backward pass",
    "capped",
    slope=lambda a, tile, column: 1.0,
)
_add(
    "cap-derivative-lost-on-diagonal",
    "forgets the derivative of the cap in the last tile of keys of each tile of queries",
    "capped",
    slope=lambda a, tile, column: (
        1.0 if column == a.visits(tile)[-1] else Tiled.slope(a, tile, column)
    ),
)
_add(
    "cap-before-scale",
    "caps products before they are scaled",
    "packed-with-sinks-and-cap",
    capped=lambda a, logits: Tiled.capped(a, logits / a.scale) * a.scale,
)
_add(
    "cap-in-bfloat16",
    "caps logits that were rounded to bfloat16, beside tensors of float32",
    "packed-with-sinks-and-cap",
    capped=lambda a, logits: Tiled.capped(a, _bfloat16(logits)),
)
_add(
    "cap-by-clipping",
    "clips logits instead of bending them",
    "sinks-and-cap-bfloat16",
    capped=lambda a, logits: np.clip(logits, -a.given.soft_cap, a.given.soft_cap),
)

# Rotation.

_add(
    "rotary-positions-in-bfloat16-at-length",
    "computes angles in float32, of positions in bfloat16",
    "rotary",
    rotary_positions=lambda a, name, span: _bfloat16(Tiled.rotary_positions(a, name, span)),
)
_add(
    "rotary-positions-in-bfloat16-in-few-queries",
    "computes angles in float32, of the positions of keys in bfloat16",
    "rotary-far",
    rotary_positions=lambda a, name, span: (
        _bfloat16(Tiled.rotary_positions(a, name, span))
        if name == "key"
        else Tiled.rotary_positions(a, name, span)
    ),
)
_add(
    "rotary-positions-wrap-at-2-16",
    "keeps the positions of a rotation in 16 bits",
    "rotary-far",
    rotary_positions=lambda a, name, span: Tiled.rotary_positions(a, name, span) % 2**16,
)
_add(
    "rotary-positions-of-keys-end-at-2-16",
    "has tables of 65,536 positions, and rotates keys beyond by the last",
    "rotary-far",
    rotary_positions=lambda a, name, span: np.minimum(
        Tiled.rotary_positions(a, name, span), 2**16 - 1 if name == "key" else 2**30
    ),
)
_add(
    "rotary-positions-restart-in-each-tile",
    "counts the positions of a rotation from the beginning of each tile",
    "rotary",
    rotary_positions=lambda a, name, span: np.arange(span[1] - span[0]),
)
_add(
    "rotary-last-queries-at-the-start",
    "rotates the last queries as if they were the first",
    "rotary-far",
    rotary_positions=lambda a, name, span: (
        np.arange(*span) if name == "query" else Tiled.rotary_positions(a, name, span)
    ),
)
_add(
    "rotary-positions-run-on-at-length",
    "lets the positions of a rotation run on over all packed members",
    "rotary-packed",
    rotary_positions=lambda a, name, span: np.arange(*span),
)
_add(
    "rotary-neighbours-for-halves",
    "rotates neighbouring components instead of halves",
    "rotary",
    places=lambda a: (slice(0, None, 2), slice(1, None, 2)),
)
_add(
    "rotary-halves-for-neighbours",
    "rotates halves instead of neighbouring components",
    "rotary-packed",
    places=lambda a: (slice(0, 16), slice(16, 32)),
)
_add(
    "rotary-of-last-tile-by-one-less",
    "rotates the keys of the last tile by one position less",
    "rotary-far",
    rotary_positions=lambda a, name, span: (
        Tiled.rotary_positions(a, name, span) - (name == "key" and span == a.of_keys[-1])
    ),
)
_add(
    "rotary-angles-added-up",
    "adds up angles token by token in float32",
    "rotary-far",
    angles=lambda a, positions: _added_up(a, 140_000)[positions],
)
_add(
    "rotary-angles-in-bfloat16-at-length",
    "rounds angles to bfloat16",
    "rotary-bfloat16",
    angles=lambda a, positions: _bfloat16(Tiled.angles(a, positions)),
)
_add(
    "rotary-tables-in-bfloat16",
    "stores cosines and sines in bfloat16 beside tensors of float32",
    "rotary",
    table=lambda a, values: _bfloat16(values),
)
_add(
    "rotary-frequencies-in-bfloat16",
    "rounds frequencies to bfloat16, as a model does that is cast to it",
    "rotary-bfloat16",
    frequencies=lambda a: _bfloat16(Tiled.frequencies(a)),
)
_add(
    "rotary-frequencies-in-float16-in-few-queries",
    "rounds frequencies to float16",
    "rotary-far",
    frequencies=lambda a: Tiled.frequencies(a).astype(np.float16).astype(F),
)
_add(
    "rotary-gradient-of-keys-not-turned-back",
    "returns the gradient of rotated keys",
    "rotary-packed",
    turned_back=lambda a, name, span, gradient: (
        gradient if name == "key" else Tiled.turned_back(a, name, span, gradient)
    ),
)
_add(
    "rotary-gradient-of-queries-turned-on",
    "rotates the gradient of queries once more instead of back",
    "rotary-bfloat16",
    turned_back=lambda a, name, span, gradient: a.turned(
        name, span, gradient, 1 if name == "query" else -1
    ),
)

# Norms of queries and keys.

_add(
    "norm-lost-where-keys-are-split",
    "norms nothing where few queries have their keys split",
    "norm-decoding",
    normed=lambda a, name, rows: rows if a.queries <= a.few else Tiled.normed(a, name, rows),
)
_add(
    "norm-lost-in-last-tile",
    "norms whole tiles only",
    "norm",
    normed=lambda a, name, rows: (
        rows
        if len(rows) < (a.rows if name == "query" else a.columns)
        else Tiled.normed(a, name, rows)
    ),
)
_add(
    "norm-lost-in-backward-at-length",
    "makes weights again of queries and keys before their norm",
    "norm-bfloat16",
    normed=lambda a, name, rows: rows if a.phase == "backward" else Tiled.normed(a, name, rows),
)
_add(
    "norm-of-tiles",
    "takes one mean square for all tokens of a tile",
    "norm",
    root=lambda a, rows: np.sqrt((rows**2).mean() + a.epsilon()),
)
_add(
    "norm-root-in-bfloat16",
    "stores the roots of mean squares in bfloat16 beside tensors of float32",
    "norm-decoding",
    root=lambda a, rows: _bfloat16(Tiled.root(a, rows)),
)
_add(
    "norm-epsilon-lost-at-length",
    "adds no epsilon to mean squares",
    "norm-bfloat16",
    epsilon=lambda a: a.wide(0),
)
_add(
    "norm-gain-after-rotation-at-length",
    "multiplies with the gain after the rotation",
    "norm-decoding",
    prepared=lambda a, name, span, rows: (
        a.turned(name, span, rows / a.root(rows), 1) * a.gain_of_norm(name)
    ),
)
_add(
    "norm-gradient-of-constant-root",
    "takes the root of the mean square for a constant in the backward pass",
    "norm",
    across=lambda a, gradient, quotients: gradient,
)
_add(
    "norm-gains-exchanged-at-length",
    "norms keys with the gain of queries, and queries with that of keys",
    "norm",
    gain_of_norm=lambda a, name: Tiled.gain_of_norm(a, "key" if name == "query" else "query"),
)


def _one_by_one(a: Tiled, total: Array, gradient: Array, quotients: Array) -> Array:
    for terms in gradient * quotients:
        total = a.held(total + terms)
    return total


_add(
    "norm-gradient-of-gain-in-storage",
    "adds up the gradients of the gains token by token in bfloat16",
    "norm-far-bfloat16",
    for_gain=_one_by_one,
)
_add(
    "norm-gradient-of-gain-of-a-tile-lost",
    "leaves the last tile of keys out of the gradient of their gain",
    "norm-decoding",
    for_gain=lambda a, total, gradient, quotients: (
        Tiled.for_gain(a, total, gradient, quotients)
        if len(quotients) in (a.queries, a.columns)
        else total
    ),
)
_add(
    "norm-gradient-of-gain-of-last-head",
    "stores what the last head adds to the gradients of the gains",
    "norm",
    for_gain=lambda a, total, gradient, quotients: Tiled.for_gain(
        a, total * (a.head == a.heads - 1), gradient, quotients
    ),
)

# Chunks.

_add(
    "chunk-lost-in-backward-at-length",
    "makes weights again as if there were no chunks",
    "chunk",
    chunk=lambda a: None if a.phase == "backward" else Tiled.chunk(a),
)
_add(
    "chunk-lost-where-keys-are-split",
    "leaves chunks out where few queries have their keys split",
    "chunk-decoding",
    chunk=lambda a: None if a.queries <= a.few else Tiled.chunk(a),
)
_add(
    "chunk-counted-from-the-first-query",
    "counts the positions of chunks from the first of the last queries",
    "chunk-decoding",
    block=lambda a, side, span: a.within(side, span) // a.chunk(),
)
_add(
    "chunk-of-whole-tiles",
    "rounds the size of chunks down to whole tiles of keys",
    "chunk",
    chunk=lambda a: Tiled.chunk(a) // a.columns * a.columns,
)
_add(
    "chunk-begins-one-tile-late",
    "rounds the first tile of a chunk up",
    "chunk",
    chunk_begins=lambda a, position: -(-Tiled.chunk_begins(a, position) // a.columns) * a.columns,
)
_add(
    "chunk-begins-one-key-early",
    "lets a chunk begin at the last key of the one before",
    "chunk",
    block=lambda a, side, span: (
        (a.within(1, span) + 1) // a.chunk() if side else Tiled.block(a, side, span)
    ),
)
_add(
    "chunk-runs-on-over-members",
    "counts the positions of chunks over all packed members",
    "chunk-packed",
    block=lambda a, side, span: (
        (np.arange(*span) + (0 if side else a.aligned(span) - a.within(0, span))) // a.chunk()
    ),
)
_add(
    "chunk-positions-wrap-at-2-16",
    "keeps the positions of which chunks are told in 16 bits",
    "chunk-decoding",
    block=lambda a, side, span: (
        (a.within(1, span) if side else a.aligned(span)) % 2**16 // a.chunk()
    ),
)

# ALiBi.

_add(
    "alibi-positions-in-bfloat16-at-length",
    "counts distances between positions in bfloat16",
    "alibi",
    alibi_positions=lambda a, name, span: _bfloat16(Tiled.alibi_positions(a, name, span)),
)
_add(
    "alibi-positions-wrap-at-2-16",
    "keeps the positions of which distances are counted in 16 bits",
    "alibi-far",
    alibi_positions=lambda a, name, span: Tiled.alibi_positions(a, name, span) % 2**16,
)
_add(
    "alibi-last-queries-at-the-start",
    "counts distances as if the last queries were the first",
    "alibi-far",
    alibi_positions=lambda a, name, span: (
        np.arange(*span) if name == "query" else Tiled.alibi_positions(a, name, span)
    ),
)
_add(
    "alibi-distances-of-tiles",
    "counts distances from the beginning of each tile of keys",
    "alibi",
    alibi_positions=lambda a, name, span: (
        Tiled.alibi_positions(a, name, span)
        if name == "query"
        else np.full(span[1] - span[0], span[0])
    ),
)
_add(
    "alibi-only-before-at-length",
    "lets keys after a query lose nothing",
    "alibi-both-ways",
    far=lambda a, rows, columns: np.maximum(
        a.aligned(rows)[:, None] - a.within(1, columns), 0
    ).astype(a.wide),
)
_add(
    "alibi-runs-on-over-members",
    "counts distances over packed members whose lengths differ",
    "alibi-packed",
    alibi_positions=lambda a, name, span: np.arange(*span),
)
_add(
    "alibi-of-key-head-at-length",
    "reads the slope of the key/value head",
    "alibi",
    alibi_slope=lambda a: a.wide(a.given.slopes[a.kv_head()]),
)
_add(
    "alibi-lost-where-keys-are-split",
    "leaves ALiBi out where few queries have their keys split",
    "alibi-far",
    alibi_slope=lambda a: Tiled.alibi_slope(a) * (a.queries > a.few),
)
_add(
    "alibi-lost-in-backward-at-length",
    "makes weights again without ALiBi",
    "alibi-bfloat16",
    alibi_slope=lambda a: Tiled.alibi_slope(a) * (a.phase == "forward"),
)
_add(
    "alibi-distance-ends-at-2-16",
    "lets distances end at 65,535",
    "alibi-far",
    far=lambda a, rows, columns: np.minimum(Tiled.far(a, rows, columns), 2**16 - 1),
)

# Dilations.

_add(
    "dilation-from-the-start-of-tiles",
    "sees every 7th key of each tile, and not of the distance",
    "dilation",
    in_step=lambda a, rows, columns, distance: (
        (np.arange(columns[1] - columns[0]) % a.given.dilation == 0)
        | np.zeros(distance.shape, bool)
    ),
)
_add(
    "dilation-of-index",
    "sees the keys whose index is a multiple, instead of their distance",
    "dilation",
    in_step=lambda a, rows, columns, distance: (
        a.positions(columns) % a.given.dilation == np.zeros((len(distance), 1))
    ),
)
_add(
    "dilation-of-last-queries-from-the-start",
    "dilates distances as if the last queries were the first",
    "dilation-decoding",
    in_step=lambda a, rows, columns, distance: (
        (a.within(1, columns) - np.arange(*rows)[:, None]) % a.given.dilation == 0
    ),
)
_add(
    "dilation-lost-where-keys-are-split",
    "leaves the dilation out where few queries have their keys split",
    "dilation-decoding",
    in_step=lambda a, rows, columns, distance: (
        Tiled.in_step(a, rows, columns, distance) | (a.queries <= a.few)
    ),
)
_add(
    "dilation-of-one-less-at-length",
    "takes the number of keys between those that are seen for the dilation",
    "dilation",
    in_step=lambda a, rows, columns, distance: distance % (a.given.dilation - 1) == 0,
)
_add(
    "dilation-lost-in-backward-at-length",
    "makes weights again without the dilation",
    "dilation",
    in_step=lambda a, rows, columns, distance: (
        Tiled.in_step(a, rows, columns, distance) | (a.phase == "backward")
    ),
)
_add(
    "dilation-of-positions-in-float16",
    "dilates positions in float16, exact up to 2,048",
    "dilation-decoding",
    in_step=lambda a, rows, columns, distance: (
        distance.astype(np.float16).astype(F) % a.given.dilation == 0
    ),
)

# Global tokens.

_add(
    "global-tokens-see-only-their-window",
    "lets others see global tokens, and these no more than others",
    "global-tokens",
    of_global=lambda a, rows, columns: (
        a.is_global("key", columns) | np.zeros((rows[1] - rows[0], 1), bool)
    ),
)
_add(
    "global-tokens-unseen",
    "lets global tokens see everything, and others no more of them",
    "global-tokens-both-ways",
    of_global=lambda a, rows, columns: (
        a.is_global("query", rows)[:, None] | np.zeros(columns[1] - columns[0], bool)
    ),
)
_add(
    "global-tokens-end-the-causal-mask",
    "lets global tokens see what comes after them",
    "global-tokens",
    before_own=lambda a, distance: np.ones(distance.shape, bool),
)
_add(
    "global-tokens-of-first-tile-only",
    "visits the first tile of keys beside those of the window",
    "global-tokens",
    is_global=lambda a, name, span: Tiled.is_global(a, name, span) & (np.arange(*span) < a.columns),
)
_add(
    "global-tokens-of-next-tile",
    "reads who is global one tile of keys further",
    "global-tokens-both-ways",
    is_global=lambda a, name, span: (
        np.roll(a.given.global_tokens[a.entry], -a.columns if name == "key" else 0)[
            np.arange(*span)
        ]
        != 0
    ),
)
_add(
    "global-tokens-lost-in-backward",
    "makes weights again without global tokens",
    "global-tokens",
    is_global=lambda a, name, span: Tiled.is_global(a, name, span) & (a.phase == "forward"),
)
_add(
    "global-tokens-lost-in-last-tile-of-queries",
    "leaves global tokens out in the last tile of queries, which is partial",
    "global-tokens-both-ways",
    of_global=lambda a, rows, columns: (
        Tiled.of_global(a, rows, columns) & (rows[1] - rows[0] == a.rows)
    ),
)

# Spans.

_add(
    "spans-end-at-the-diagonal-tile",
    "visits no tile of keys after that of a query",
    "spans",
    end_of_spans=lambda a, rows: 0,
)
_add(
    "spans-of-first-query-of-tile",
    "takes the span of the first query of a tile for all of them",
    "spans-in-window",
    span_ids=lambda a, name, span: (
        np.full(span[1] - span[0], Tiled.span_ids(a, name, span)[0])
        if name == "query"
        else Tiled.span_ids(a, name, span)
    ),
)
_add(
    "spans-of-index",
    "takes the spans of the first keys for those of the last queries",
    "spans-decoding",
    span_ids=lambda a, name, span: a.given.spans[a.entry][np.arange(*span)],
)
_add(
    "spans-lost-where-keys-are-split",
    "sees nothing after a query where few queries have their keys split",
    "spans-decoding",
    in_span=lambda a, rows, columns: Tiled.in_span(a, rows, columns) & (a.queries > a.few),
)
_add(
    "spans-lost-in-backward-at-length",
    "makes weights again with a causal mask alone",
    "spans",
    in_span=lambda a, rows, columns: Tiled.in_span(a, rows, columns) & (a.phase == "forward"),
)
_add(
    "spans-of-text-too-at-length",
    "takes all tokens outside spans for one span",
    "spans",
    in_span=lambda a, rows, columns: (
        a.span_ids("query", rows)[:, None] == a.span_ids("key", columns)
    ),
)
_add(
    "spans-side-by-side-are-one",
    "looks only at whether a key is in a span, and joins two that touch",
    "spans",
    span_ids=lambda a, name, span: np.where((ids := Tiled.span_ids(a, name, span)) == 2, 1, ids),
)
_add(
    "spans-of-one-id-apart",
    "ends a span where the first run of its id ends",
    "spans-in-window",
    span_ids=lambda a, name, span: (
        Tiled.span_ids(a, name, span)
        * (Tiled.aligned(a, span) < 1000 if name == "query" else np.arange(*span) < 1000)
    ),
)
_add(
    "spans-beyond-windows-at-length",
    "shows queries all of their span, whatever the window hides",
    "spans-in-window",
    visible=lambda a, rows, columns: (
        Tiled.visible(a, rows, columns) | Tiled.in_span(a, rows, columns)
    ),
)
_add(
    "spans-of-8-bits",
    "keeps the ids of spans in 8 bits",
    "spans-decoding",
    span_ids=lambda a, name, span: Tiled.span_ids(a, name, span) % 256,
)

# Scaled frequencies.


def _unscaled(a: Tiled) -> Array:
    rotary = a.given.rotary
    return rotary.base ** (-np.arange(0.0, rotary.size, 2) / rotary.size)


_add(
    "scaling-lost-where-keys-are-split",
    "rotates by frequencies that are not scaled where few queries have their keys split",
    "scaling-linear",
    frequencies=lambda a: _unscaled(a) if a.queries <= a.few else Tiled.frequencies(a),
)
_add(
    "scaling-of-whole-positions",
    "divides positions by the factor, and drops what is left",
    "scaling-linear",
    rotary_positions=lambda a, name, span: Tiled.rotary_positions(a, name, span) // 8 * 8,
)
_add(
    "scaling-by-the-present-length",
    "takes the number of keys for the length before the frequencies were scaled",
    "scaling-yarn",
    scaling=lambda a: replace(a.given.rotary_scaling, original_max_position_embeddings=a.keys),
)
_add(
    "scaling-without-factor",
    "leaves the attention factor out",
    "scaling-yarn",
    gain=lambda a, name: a.wide(1),
)
_add(
    "scaling-factor-of-keys-lost",
    "multiplies queries alone by the attention factor",
    "scaling-yarn",
    gain=lambda a, name: Tiled.gain(a, name) if name == "query" else a.wide(1),
)
_add(
    "scaling-factor-lost-in-gradients",
    "turns gradients back without the attention factor",
    "scaling-yarn",
    turned_back=lambda a, name, span, gradient: (
        Tiled.turned_back(a, name, span, gradient) / a.gain(name)
    ),
)
_add(
    "scaling-all-or-nothing",
    "scales a frequency in full or not at all, without those between",
    "scaling-llama3",
    frequencies=lambda a: np.where(
        Tiled.frequencies(a) > _unscaled(a) / 2, _unscaled(a), _unscaled(a) / 8
    ),
)
_add(
    "scaling-of-fast-pairs",
    "scales the pairs that turn fast, and leaves those that turn slowly",
    "scaling-llama3",
    frequencies=lambda a: _unscaled(a) ** 2 / 8 / Tiled.frequencies(a),
)
_add(
    "scaling-in-bfloat16-at-length",
    "rounds scaled frequencies to bfloat16",
    "scaling-yarn",
    frequencies=lambda a: _bfloat16(Tiled.frequencies(a)),
)
