"""Mutants of the tiled attention at the sizes of kernels: tiles, splits, work, heads, precision.

Each declares its head sizes and tiles, and dies at the level that it names, in a case of the
catalogue that is posed at these sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np

from conformance.adapter.base import Mode
from conformance.adapter.features import Window
from conformance.definition.geometry import Geometry
from conformance.definition.problem import Causal
from conformance.errors import Unsupported
from conformance.long.problem import Visibility
from mutants.attention import Attention
from mutants.contestant import Contestant
from mutants.mutant import BIAS, INPUTS, KERNEL, OUTPUT, PARAMETERS, Mutant
from mutants.tiled import Array, F, Masked, Tiled

Level = Literal["core", "full", "large"]
D128 = Geometry(head_sizes=(128,), tiles=(128, 128))
D64 = Geometry(head_sizes=(64,), tiles=(128, 64))
UNLIKE = Geometry(head_sizes=(128,), value_head_sizes=(64,), tiles=(64, 128))


class TiledAttention(Attention):
    """The tiled attention between projections, as the catalogue poses it."""

    core: type[Tiled] = Tiled

    def attend(self) -> None:
        masks, given = dict(self.given.masks), self.given
        visible = None
        if "padding" in masks:
            visible = self.padding(masks["padding"])
        if "mask" in masks and masks["mask"].dtype == np.bool_:
            visible = masks["mask"] if visible is None else visible & masks["mask"]
        bias = masks.get("bias")
        if "mask" in masks and masks["mask"].dtype != np.bool_:
            bias = self.read(masks["mask"]) + (0 if bias is None else self.read(bias))
        # A pair, or only the keys before.
        sides = np.append(masks.get("window", -1), -1)[:2]
        sees = Visibility(
            causal="bottom-right" if given.causal else None,
            window=cast("Any", tuple(None if side < 0 else int(side) for side in sides)),
        )
        arrays = (np.ascontiguousarray(array) for array in (self.q, self.k, self.v))
        self.kernel = self.core(
            Masked(
                given.dtype.name,
                *arrays,
                cast("Array", None),
                self.factor(),
                sees,
                mask=visible,
                bias=None if bias is None else self.read(bias),
            )
        )
        self.weights = None
        self.context, self.log_total = self.kernel.forward()

    def d_attention(self, of_weights: Array, found: dict[str, Array]) -> tuple[Array, Array, Array]:
        self.kernel.given = replace(self.kernel.given, cotangent=self.d_context)
        gradients = self.kernel.backward(self.context, self.log_total)
        for name in ("mask", "bias"):
            if name in self.given.masks and self.given.masks[name].dtype != np.bool_:
                shape = self.given.masks[name].shape
                found[f"mask.{name}"] = self.d_added(self.kernel.d_bias, shape)
        return gradients["query"], gradients["key"], gradients["value"]


class Sized(Contestant):
    """The tiled attention, or a mutant of it, as a kernel that declares its sizes."""

    title = "a tiled attention in NumPy"
    scores = ("scaled-dot",)
    modes = (Mode("default", {"train": False, "fused": True}, weights=False),)
    dropout_modes = ()
    returns_weights = None
    projections_supplied = True
    accuracy = "A"

    def __init__(
        self,
        name: str = "tiled",
        kind: type[Tiled] = Tiled,
        geometry: Geometry | None = None,
        *,
        windowed: Causal | None = None,
    ) -> None:
        self.geometry = geometry or Geometry(head_sizes=(128,), tiles=(128, 128))
        tiles = {"rows": self.geometry.tiles[0], "columns": self.geometry.tiles[1]}
        core = type(kind.__name__, (kind,), tiles)
        super().__init__(name, type("Mutant", (TiledAttention,), {"core": core}))
        if windowed == "top-left":
            self.features = (Window("window", alignment=windowed),)
        elif windowed:
            self.features = (Window("window", "before", alignment=windowed, needs_causal=True),)


@dataclass(frozen=True, eq=False)
class SizeMutant(Mutant):
    """A mutant of the tiled attention.

    Attributes:
        geometry: the sizes that it declares.
        windowed: how the window that it takes is aligned, "bottom-right" if it takes one beside the
            causal flag only; None if it takes none.
    """

    geometry: Geometry = D128
    windowed: Causal | None = None

    @property
    def kind(self) -> Any:
        return type("Mutant", (Tiled,), dict(self.changes))

    def adapter(self) -> Contestant:
        return Sized(self.name, self.kind, self.geometry, windowed=self.windowed)


MUTANTS: list[SizeMutant] = []
EXPECTED = (OUTPUT, INPUTS, PARAMETERS, BIAS, KERNEL)
"""Each must be noticed by one of these requirements, which compare numbers with the definition."""


def _chapter(chapter: str) -> Callable[..., None]:
    def add(
        name: str,
        did: str,
        *,
        dtype: str = "float32",
        geometry: Geometry = D128,
        level: Level = "core",
        killed_by: tuple[str, ...] = EXPECTED,
        windowed: Causal | None = None,
        **changes: Any,
    ) -> None:
        unknown = [stage for stage in changes if not hasattr(Tiled, stage)]
        assert not unknown, f"{name}: the attention has no {unknown}"
        assert all(other.name != name for other in MUTANTS), f"{name}: the name is taken"
        MUTANTS.append(
            SizeMutant(
                name,
                chapter,
                did,
                killed_by,
                changes,
                dtype=dtype,
                geometry=geometry,
                level=level,
                windowed=windowed,
            )
        )

    return add


def _without(*pairs: tuple[int, int]) -> Callable[[Tiled, int], list[int]]:
    return lambda a, at: [column for column in a.visits(at) if (at, column) not in pairs]


def _bfloat16(values: Array) -> Array:
    bits = np.ascontiguousarray(values, F).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(F)


def _truncated(values: Array) -> Array:
    return (np.ascontiguousarray(values, F).view(np.uint32) & np.uint32(0xFFFF0000)).view(F)


# Tiles

tiles = _chapter("tiles")

tiles(
    "forward-loses-fourth-key-tile-of-second-query-tile",
    "loses one pair of tiles in the forward pass",
    visits_forward=_without((1, 3)),
)
tiles(
    "query-gradient-loses-last-pair",
    "loses the last pair of tiles in the gradient of queries",
    visits_for_query=lambda a, at: a.visits(at)[: -(at == len(a.of_queries) - 1 > 0) or None],
)
tiles(
    "key-gradient-loses-first-query-tile-of-third",
    "loses one pair of tiles in the gradients of keys and values",
    visits_for_key=_without((0, 2)),
)


def _value_gradient_loses(a: Tiled, gradient: Array, weights: Array, cotangent: Array) -> Array:
    if a.pair == (1, 1):
        return gradient
    return Tiled.for_value(a, gradient, weights, cotangent)


tiles(
    "value-gradient-loses-second-diagonal-tile",
    "loses one pair of tiles in the gradient of values alone",
    for_value=_value_gradient_loses,
)


def _in_row(stage: str, row: int, when: Callable[[int, int], bool], instead: Any) -> Any:
    """A stage that is replaced in one row of some pairs of tiles."""

    def changed(a: Tiled, tile: int, column: int, *operands: Array) -> Array:
        array = getattr(Tiled, stage)(a, tile, column, *operands)
        if when(tile, column) and len(array) > row:
            array = array.copy()
            array[row] = instead(*operands)[row]
        return array

    return changed


tiles(
    "maximum-of-row-77-stale-in-third-tile",
    "does not see that one row's maximum grew, so that its powers exceed 1",
    highest=lambda a, tile, column, before, logits: np.where(
        (np.arange(len(before)) == 77) & (column >= 2),
        np.where(before == -np.inf, logits.max(axis=1), before),
        Tiled.highest(a, tile, column, before, logits),
    ),
    shrink=lambda a, tile, column, before, now: np.where(
        (np.arange(len(before)) == 77) & (column >= 2),
        np.exp(np.minimum(before - now, 80)) * F(0.999),
        Tiled.shrink(a, tile, column, before, now),
    ),
)
tiles(
    "row-5-not-rescaled-in-third-tile",
    "leaves the sums of one row when its maximum grows",
    shrink=_in_row("shrink", 5, lambda tile, column: column == 2, lambda b, n: np.ones_like(b)),
)
tiles(
    "not-rescaled-in-fifth-tile",
    "leaves context and normaliser in the fifth tile of keys when the maximum grows",
    shrink=lambda a, tile, column, before, now: (
        np.ones_like(before) if column == 4 else Tiled.shrink(a, tile, column, before, now)
    ),
)
tiles(
    "row-17-not-rescaled-in-sixth-tile",
    "leaves the sums of one row when its maximum grows in the sixth tile of keys",
    shrink=_in_row("shrink", 17, lambda tile, column: column == 5, lambda b, n: np.ones_like(b)),
)
tiles(
    "not-rescaled-in-eighth-tile",
    "leaves context and normaliser in the eighth tile of keys when the maximum grows",
    shrink=lambda a, tile, column, before, now: (
        np.ones_like(before) if column == 7 else Tiled.shrink(a, tile, column, before, now)
    ),
)
tiles(
    "sum-not-rescaled-in-fourth-tile",
    "rescales the context and not the normaliser in the fourth tile",
    sum_of=lambda a, total, factor, powers: Tiled.sum_of(
        a, total, np.where(a.pair[1] == 3, F(1), factor), powers
    ),
)
tiles(
    "context-not-rescaled-in-last-tile",
    "rescales the normaliser and not the context in the last tile",
    context_of=lambda a, context, factor, *operands: Tiled.context_of(
        a,
        context,
        np.where(a.pair[1] == len(a.of_keys) - 1, np.minimum(1, 2 * factor), factor),
        *operands,
    ),
)
tiles(
    "rescaling-skipped-below-a-factor-of-two",
    "rescales the context only if the maximum grew by more than log 2",
    context_of=lambda a, context, factor, *operands: Tiled.context_of(
        a, context, np.where(factor > 0.5, F(1), factor), *operands
    ),
)


def _beyond(instead: str) -> dict[str, Any]:
    """The last, partial tile of keys is read to its end, where there is something else."""

    def masked(a: Tiled, tile: int, column: int) -> Array:
        rows, (start, stop) = a.of_queries[tile], a.of_keys[column]
        logits = Tiled.masked(a, tile, column)
        if a.phase == "backward" or stop - start == a.columns:
            return logits
        more = a.logits(a.load("query", rows), _read(a, "key", (stop, start + a.columns)))
        return np.concatenate([logits, more], axis=1).astype(a.wide)

    def _read(a: Tiled, name: str, span: tuple[int, int]) -> Array:
        array = getattr(a.given, name)
        flat = array.reshape(-1, array.shape[-1])
        index = (a.entry * a.kv_heads + a.kv_head()) * a.keys + np.arange(*span)
        rows: Array = flat[index % len(flat)]
        return rows * 0 if instead == "zeros" else rows

    def context_of(a: Tiled, context: Array, factor: Array, powers: Array, value: Array) -> Array:
        stop = a.of_keys[a.pair[1]][1]
        missing = powers.shape[1] - len(value)
        if missing:
            value = np.concatenate([value, _read(a, "value", (stop, stop + missing))])
        return Tiled.context_of(a, context, factor, powers, value)

    return {"masked": masked, "context_of": context_of}


tiles(
    "last-tile-reads-zeros-as-keys",
    "does not mask what lies behind the last key, where zeros are",
    **_beyond("zeros"),
)
tiles(
    "last-tile-reads-next-head",
    "does not mask what lies behind the last key, where the next head begins",
    **_beyond("next head"),
)


def _small_rest_unmasked(a: Tiled, tile: int, column: int) -> Array:
    start, stop = a.of_keys[column]
    changed = _beyond("zeros")["masked"]
    return (changed if stop - start == 1 else Tiled.masked)(a, tile, column)


tiles(
    "single-key-tile-reads-zeros",
    "masks the last tile only if it has more than one key",
    masked=_small_rest_unmasked,
    context_of=_beyond("zeros")["context_of"],
)


def _key_gradient_of_next_head(a: Tiled, gradient: Array, d_logits: Array, query: Array) -> Array:
    total = Tiled.for_key(a, gradient, d_logits, query)
    if len(query) < a.rows and a.head + 1 < a.heads:
        more = a.given.query[a.entry, a.head + 1][: a.rows - len(query)]
        weights = d_logits[: len(more)]
        total = total + a.held(weights).T @ more[: len(weights)] * a.scale * F(0.01)
    return total


tiles(
    "last-query-tile-adds-next-head-to-key-gradient",
    "does not mask the queries behind the last one, which are the next head's",
    for_key=_key_gradient_of_next_head,
)
tiles(
    "last-partial-query-tile-dropped",
    "counts tiles of queries by integer division if there is more than one",
    query_tiles=lambda a: Tiled.query_tiles(a)[: max(1, a.queries // a.rows)],
)
tiles(
    "last-partial-key-tile-dropped-beyond-two",
    "counts tiles of keys by integer division if there are more than two",
    key_tiles=lambda a: Tiled.key_tiles(a)[: max(2, a.keys // a.columns)],
)
tiles(
    "single-query-of-last-tile-dropped",
    "does not store a last tile of a single query",
    write=lambda a, name, array, rows, values: (
        None if rows[1] - rows[0] == 1 and rows[0] else Tiled.write(a, name, array, rows, values)
    ),
)
tiles(
    "last-query-tile-masked-as-first",
    "reads the mask of a partial tile of queries from the first tile",
    bits=lambda a, rows, columns: Tiled.bits(
        a,
        (0, rows[1] - rows[0]) if rows[0] and rows[1] - rows[0] < a.rows else rows,
        columns,
    ),
)
tiles(
    "tile-lengths-exchanged-in-causal-end",
    "computes the end of a causal row of tiles with the length of a tile of queries",
    geometry=D64,
    last_tile=lambda a, rows: (
        Tiled.last_tile(a, rows)
        if a.after() is None
        else min(len(a.of_keys), max(0, -(-(rows[1] + a.alignment()) // a.rows)))
    ),
)
tiles(
    "tile-lengths-exchanged-in-mask",
    "finds the bits of a tile by the length of the other kind of tile",
    geometry=D64,
    bits=lambda a, rows, columns: (
        Tiled.bits(a, rows, columns)
        if columns[0] == 0 or columns[1] == a.keys
        else Tiled.bits(
            a,
            rows,
            tuple(
                min(a.keys - (columns[1] - columns[0]), columns[0] // a.columns * a.rows) + n
                for n in (0, columns[1] - columns[0])
            ),
        )
    ),
)
tiles(
    "causal-end-rounded-down",
    "rounds the end of a causal row of tiles down, unless nothing were left",
    last_tile=lambda a, rows: (
        Tiled.last_tile(a, rows)
        if a.after() is None
        else min(len(a.of_keys), max(1, (rows[1] + a.alignment()) // a.columns))
    ),
)
tiles(
    "causal-mask-on-tiles-of-equal-number-only",
    "masks the tile whose number is that of the tile of queries, wherever the diagonal lies",
    after=lambda a: (
        None if a.given.sees.causal and a.pair[0] != a.pair[1] and a.pair[0] else Tiled.after(a)
    ),
    last_tile=lambda a, rows: (
        len(a.of_keys)
        if a.given.sees.causal is None
        else min(len(a.of_keys), max(0, -(-(rows[1] + a.alignment()) // a.columns)))
    ),
)
tiles(
    "diagonal-tile-open-in-third-row",
    "treats the diagonal tile of the third row of tiles as full",
    visible=lambda a, rows, columns: (
        Tiled.visible(a, rows, columns)
        | (a.given.sees.causal is not None and rows[0] >= 2 * a.rows and columns[0] >= rows[0])
    ),
)
tiles(
    "causal-tile-below-diagonal-skipped",
    "begins the second row of causal tiles with the second tile",
    first_tile=lambda a, rows: int(a.given.sees.causal is not None and rows[0] == a.rows),
)


def _window_begins_late(a: Tiled, rows: tuple[int, int]) -> int:
    if a.before() is None:
        return 0
    return max(0, rows[0] + a.alignment() - a.before() + 1) // a.columns


tiles(
    "window-begins-a-tile-late",
    "skips the first tile of a window if only its last key belongs to the window",
    windowed="top-left",
    first_tile=_window_begins_late,
)
tiles(
    "window-begins-a-tile-late-beside-causal",
    "skips the first tile of a causal window if only its last key belongs to the window",
    geometry=D64,
    windowed="bottom-right",
    first_tile=_window_begins_late,
)
tiles(
    "window-ends-a-tile-early",
    "skips the last tile of a window if only its first key belongs to the window",
    windowed="top-left",
    last_tile=lambda a, rows: (
        Tiled.last_tile(a, rows)
        if a.given.sees.window[1] is None
        else min(len(a.of_keys), max(0, -(-(rows[1] - 1 + a.alignment() + a.after()) // a.columns)))
    ),
)
tiles(
    "first-row-of-tile-sees-one-key-more",
    "lets the first query of each tile but the first see one key beyond its own",
    aligned=lambda a, rows: (
        Tiled.aligned(a, rows) + ((np.arange(*rows) % a.rows == 0) & (np.arange(*rows) > 0))
    ),
)
tiles(
    "alignment-of-whole-tiles",
    "aligns the causal triangle by lengths that are rounded up to tiles",
    alignment=lambda a: (
        0
        if a.given.sees.causal != "bottom-right"
        else -(-a.keys // a.columns) * a.columns - -(-a.queries // a.rows) * a.rows
    ),
)
tiles(
    "bits-of-one-tile-a-row-late",
    "reads the bits of one tile of the mask one row late",
    bits=lambda a, rows, columns: (
        np.roll(Tiled.bits(a, rows, columns), 1, axis=0)
        if (rows[0], columns[0]) == (0, a.columns)
        else Tiled.bits(a, rows, columns)
    ),
)
tiles(
    "bits-of-last-words-open",
    "treats what the last, partial word of 32 bits of a row of the mask says as open",
    bits=lambda a, rows, columns: (
        Tiled.bits(a, rows, columns) | (np.arange(*columns) >= a.keys // 32 * 32)
    ),
)
tiles(
    "bits-at-16-bit-offset",
    "keeps the offset of a bit of the mask, query × keys + key, in 16 bits",
    bits=lambda a, rows, columns: a.mask[a.entry, a.head].reshape(-1)[
        (np.arange(*rows)[:, None] * a.keys + np.arange(*columns)) % 2**16
    ],
)
tiles(
    "blocked-tile-of-first-head-skipped-for-all",
    "skips a tile for all heads that is blocked for the first one",
    is_blocked=lambda a, tile, column: (
        a.mask is not None
        and not a.mask[a.entry, 0, slice(*a.of_queries[tile]), slice(*a.of_keys[column])].any()
    ),
)
tiles(
    "blocked-tile-of-first-entry-skipped-for-all",
    "skips a tile in all batch entries that is blocked in the first one",
    is_blocked=lambda a, tile, column: (
        a.mask is not None
        and not a.mask[0, a.head, slice(*a.of_queries[tile]), slice(*a.of_keys[column])].any()
    ),
)
tiles(
    "tile-blocked-by-its-last-row",
    "skips a tile if nothing is visible to its last query",
    is_blocked=lambda a, tile, column: (
        a.mask is not None and not a.bits(a.of_queries[tile], a.of_keys[column])[-1].any()
    ),
)
tiles(
    "tile-blocked-by-its-corners",
    "skips a tile if its four corners are blocked",
    is_blocked=lambda a, tile, column: (
        a.mask is not None
        and not a.bits(a.of_queries[tile], a.of_keys[column])[:: a.rows - 1, :: a.columns - 1].any()
    ),
)
tiles(
    "tile-open-by-its-corners",
    "does not mask a tile whose first and last bits are set",
    bits=lambda a, rows, columns: (
        np.ones_like(Tiled.bits(a, rows, columns))
        if Tiled.bits(a, rows, columns)[[0, -1], [0, -1]].all()
        and (rows[1] - rows[0]) * (columns[1] - columns[0]) > 4096
        else Tiled.bits(a, rows, columns)
    ),
)
tiles(
    "visits-end-at-blocked-tile",
    "stops at the first blocked tile after an open one",
    visits=lambda a, tile: _until_gap(Tiled.visits(a, tile)),
)


def _until_gap(columns: list[int]) -> list[int]:
    gaps = [n for n in range(1, len(columns)) if columns[n] != columns[n - 1] + 1]
    return columns[: gaps[0]] if gaps else columns


tiles(
    "bias-of-last-tile-from-first",
    "reads the bias of the last, partial tile of keys from the first one",
    biases=lambda a, rows, columns: Tiled.biases(
        a,
        rows,
        (0, columns[1] - columns[0]) if columns[1] - columns[0] < a.columns else columns,
    ),
)
tiles(
    "bias-by-rows-of-the-tile",
    "counts the rows of the bias within the tile of queries",
    biases=lambda a, rows, columns: Tiled.biases(a, (0, rows[1] - rows[0]), columns),
)
tiles(
    "bias-gradient-of-last-key-tile-lost",
    "does not store the gradient of the bias of the last tile of keys",
    for_bias=lambda a, gradient, d_logits: (
        gradient if a.pair[1] == len(a.of_keys) - 1 > 0 else gradient + d_logits
    ),
)
tiles(
    "positions-in-bfloat16-at-128",
    "keeps positions in bfloat16",
    positions=lambda a, span: _bfloat16(np.arange(*span)),
)
tiles(
    "positions-in-8-bits",
    "keeps positions of queries in 8 bits",
    aligned=lambda a, span: Tiled.aligned(a, span) - np.arange(*span) // 256 * 256,
)

# Indices of elements

offsets = _chapter("offsets")


def _wrapped(name: str, bits: int) -> dict[str, Any]:
    """Offsets of elements of an array, batch × heads × length × head, that wrap."""

    def row_of(a: Tiled, asked: str, index: Array) -> Array:
        rows = Tiled.row_of(a, asked, index)
        if asked.removeprefix("d_") != name.removeprefix("d_") or (asked == name) is False:
            return rows
        arrays = {"output": "cotangent", "d_query": "query", "d_key": "key", "d_value": "value"}
        size = (
            getattr(a.given, arrays.get(name, name)).shape[-1]
            if name != "output"
            else (a.given.value.shape[-1])
        )
        return rows * size % 2**bits // size

    return {"row_of": row_of}


for _bits in (15, 16):
    for _name, _does in {
        "query": "reads queries",
        "key": "reads keys",
        "value": "reads values",
        "cotangent": "reads the incoming gradient",
        "output": "stores the output",
        "d_query": "stores the gradient of queries",
        "d_key": "adds to the gradient of keys",
    }.items():
        offsets(
            f"{_name.replace('_', '-')}-offset-of-{_bits}-bits",
            f"{_does} at an offset of {_bits} bits",
            **_wrapped(_name, _bits),
        )
offsets(
    "key-offset-of-20-bits",
    "reads keys at an offset of 20 bits",
    level="large",
    **_wrapped("key", 20),
)
offsets(
    "value-offset-in-bfloat16",
    "computes the number of a row of values in a float of 8 bits significance",
    row_of=lambda a, name, index: (
        _truncated(Tiled.row_of(a, name, index).astype(F)).astype(int)
        if name == "value"
        else Tiled.row_of(a, name, index)
    ),
)
offsets(
    "key-heads-as-far-apart-as-query-heads",
    "takes the distance of two query heads for that of two key/value heads",
    row_of=lambda a, name, index: (
        (Tiled.row_of(a, name, index) - a.keys * a.kv_head() + a.queries * a.kv_head())
        % (a.batch * a.kv_heads * a.keys)
        if name == "key"
        else Tiled.row_of(a, name, index)
    ),
)
offsets(
    "row-terms-as-far-apart-as-tiles",
    "keeps row terms at lengths rounded up to tiles, and reads them without",
    row_terms=lambda a, output: _as_far_apart_as_tiles(a, Tiled.row_terms(a, output)),
)


def _as_far_apart_as_tiles(a: Tiled, row: Array) -> Array:
    wide = np.zeros((*row.shape[:2], -(-a.queries // a.rows) * a.rows), row.dtype)
    wide[..., : a.queries] = row
    return wide.reshape(-1)[: row.size].reshape(row.shape)


offsets(
    "row-term-of-tile-before",
    "takes the row terms of the tile before for the last, partial tile of queries",
    row_terms=lambda a, output: _of_tile_before(a, Tiled.row_terms(a, output)),
)


def _of_tile_before(a: Tiled, row: Array) -> Array:
    start, stop = a.of_queries[-1]
    if start and stop - start < a.rows:
        row = row.copy()
        row[..., start:stop] = row[..., start - a.rows : stop - a.rows]
    return row


offsets(
    "row-term-of-first-query-head",
    "takes the row terms of the first query head of a group for all of it",
    row_terms=lambda a, output: np.repeat(
        Tiled.row_terms(a, output)[:, :: a.heads // a.kv_heads], a.heads // a.kv_heads, axis=1
    ),
)
offsets(
    "log-normaliser-of-last-tile-stale",
    "recomputes the weights of the last, partial tile of queries with the normaliser of the first",
    weights=lambda a, tile, column, log_total: (
        Tiled.weights(
            a,
            tile,
            column,
            a.first_log if tile and len(log_total) < a.rows else log_total,
        )
        if not _keep(a, tile, log_total)
        else Tiled.weights(a, tile, column, log_total)
    ),
)


def _keep(a: Tiled, tile: int, log_total: Array) -> bool:
    if tile == 0:
        a.first_log = log_total
        return True
    if len(log_total) < a.rows:
        a.first_log = a.first_log[: len(log_total)]
        return len(a.first_log) != len(log_total)
    return True


# Splits of the keys, where queries are few

splits = _chapter("splits")


def _merged(log_totals: Callable[[Tiled, Array], Array]) -> Callable[..., Any]:
    """The merge of splits with other log-normalisers."""
    return lambda a, outputs, totals: Tiled.merged(a, outputs, log_totals(a, totals))


splits(
    "splits-averaged",
    "averages the splits that see anything",
    share=lambda a, totals: np.isfinite(totals) / F(np.isfinite(totals).sum(axis=0)),
)
splits(
    "splits-weighed-by-maximum",
    "weighs splits by their maximum without their normaliser",
    merged=_merged(
        lambda a, totals: (
            totals
            - np.log(np.maximum(1, len(a.of_keys) - np.arange(len(totals))))[:, None].astype(
                totals.dtype
            )
        )
    ),
)
splits(
    "splits-weighed-by-first-maximum",
    "subtracts the log-normaliser of the first split, which may be −∞",
    share=lambda a, totals: np.exp(totals - totals[0]) / np.exp(totals - totals[0]).sum(axis=0),
)
splits(
    "empty-split-weighs-one",
    "begins the log-normaliser of an empty split at 0",
    merged=_merged(lambda a, totals: np.where(totals == -np.inf, F(0), totals)),
)
splits(
    "blocked-split-is-nan",
    "subtracts −∞ from −∞ in a split that is blocked for a query",
    share=lambda a, totals: np.where(
        np.isinf(totals).any(axis=0) & (a.mask is not None), np.nan, Tiled.share(a, totals)
    ),
)
splits(
    "blocked-split-divides-by-zero",
    "divides the context of a blocked split by its normaliser of 0",
    divided=lambda a, context, total: (
        context / total[:, None] if a.mask is not None else (Tiled.divided(a, context, total))
    ),
)
splits(
    "last-split-lost-if-partial",
    "counts splits by integer division of the keys",
    parts=lambda a, columns: (
        [
            part if split < max(1, a.keys // (-(-len(a.of_keys) // a.splits) * a.columns)) else []
            for split, part in enumerate(Tiled.parts(a, columns))
        ]
        if a.queries <= a.few
        else Tiled.parts(a, columns)
    ),
)
splits(
    "splits-overlap-by-a-tile",
    "begins each split with the last tile of the one before",
    parts=lambda a, columns: [
        ([part[0] - 1] if split and part and part[0] - 1 in columns else []) + part
        for split, part in enumerate(Tiled.parts(a, columns))
    ],
)
splits(
    "splits-beyond-fourth-lost",
    "has room for four splits",
    merged=lambda a, outputs, totals: Tiled.merged(a, outputs[:4], totals[:4]),
)
splits(
    "splits-beyond-first-tile-lost",
    "gives each split one tile of keys",
    parts=lambda a, columns: (
        [part[:1] for part in Tiled.parts(a, columns)]
        if a.queries <= a.few
        else Tiled.parts(a, columns)
    ),
)
splits(
    "splits-by-weights-of-first-query",
    "weighs the splits of all queries by those of the first",
    share=lambda a, totals: np.repeat(Tiled.share(a, totals)[:, :1], totals.shape[1], axis=1),
)
splits(
    "splits-by-weights-of-head-before",
    "weighs the splits of a head by those of the head before",
    share=lambda a, totals: _of_head_before(a, Tiled.share(a, totals)),
)


def _of_head_before(a: Tiled, share: Array) -> Array:
    before = getattr(a, "before_share", share)
    a.before_share = share
    return before if a.head % 2 else share


splits(
    "splits-without-own-normaliser",
    "merges contexts that are not divided by their own normalisers",
    divided=lambda a, context, total: (
        context if a.queries <= a.few and len(a.of_keys) > 1 else Tiled.divided(a, context, total)
    ),
)
splits(
    "splits-merged-with-base-2",
    "merges with exp2 what was made with exp",
    share=lambda a, totals: Tiled.share(a, totals * F(np.log(2))),
)
splits(
    "split-leaves-own-normaliser-for-backward",
    "leaves the log-normaliser of the last split that sees anything for the backward pass",
    merged=lambda a, outputs, totals: (
        Tiled.merged(a, outputs, totals)[0],
        np.where(np.isfinite(totals[1]), totals[1], totals[0]),
    ),
)
splits(
    "split-path-sees-everything",
    "applies no causal mask where queries are few, because the last one sees everything",
    after=lambda a: None if a.queries <= a.few else Tiled.after(a),
)
splits(
    "split-path-aligned-at-start",
    "aligns the causal triangle at the start where queries are few",
    alignment=lambda a: 0 if a.queries <= a.few else Tiled.alignment(a),
)
splits(
    "split-path-without-bias-in-later-splits",
    "reads the bias of the first split for all",
    biases=lambda a, rows, columns: (
        Tiled.biases(a, rows, columns)
        if a.queries > a.few
        else Tiled.biases(
            a,
            rows,
            (columns[0] % (2 * a.columns), columns[0] % (2 * a.columns) + columns[1] - columns[0]),
        )
    ),
)
splits(
    "split-path-with-mask-of-first-query",
    "reads the mask of the first query for all, where queries are few",
    bits=lambda a, rows, columns: (
        np.repeat(Tiled.bits(a, rows, columns)[:1], rows[1] - rows[0], axis=0)
        if a.queries <= a.few
        else Tiled.bits(a, rows, columns)
    ),
)
splits(
    "split-path-with-mask-of-first-head",
    "reads the mask of the first query head of a group for all of it, where queries are few",
    bits=lambda a, rows, columns: (
        a.mask[
            a.entry,
            a.head // (a.heads // a.kv_heads) * (a.heads // a.kv_heads),
            slice(*rows),
            slice(*columns),
        ]
        if a.queries <= a.few
        else Tiled.bits(a, rows, columns)
    ),
)
splits(
    "split-path-with-heads-in-turn",
    "gives query head h the key/value head h modulo their number, where queries are few",
    kv_head=lambda a: a.head % a.kv_heads if a.queries <= a.few else Tiled.kv_head(a),
)
splits(
    "split-path-of-one-query-only",
    "writes the first query only, where queries are few",
    write=lambda a, name, array, rows, values: Tiled.write(
        a,
        name,
        array,
        *(
            ((rows[0], rows[0] + 1), values[:1])
            if a.queries <= a.few and name == "output"
            else (rows, values)
        ),
    ),
)
splits(
    "split-of-second-tile-first-entry-length",
    "ends the splits of all batch entries where those of the first end",
    bits=lambda a, rows, columns: (
        a.mask[0, a.head, slice(*rows), slice(*columns)]
        if a.queries <= a.few
        else Tiled.bits(a, rows, columns)
    ),
)
splits(
    "log-normalisers-of-splits-in-bfloat16",
    "keeps the log-normaliser of a split in bfloat16",
    log_total=lambda a, total, peak: (
        _bfloat16(Tiled.log_total(a, total, peak))
        if a.queries <= a.few
        else Tiled.log_total(a, total, peak)
    ),
)
splits(
    "keys-beyond-1024-lost",
    "has room for 1,024 keys where queries are few",
    parts=lambda a, columns: Tiled.parts(
        a, [c for c in columns if a.queries > a.few or c * a.columns < 1024]
    ),
)
splits(
    "keys-beyond-8192-lost",
    "has room for 8,192 keys where queries are few",
    level="large",
    parts=lambda a, columns: Tiled.parts(
        a, [c for c in columns if a.queries > a.few or c * a.columns < 8192]
    ),
)
splits(
    "fourth-query-of-few-with-row-term-of-first",
    "takes the row term of the first query for all, where queries are few",
    row_term=lambda a, tile, cotangent, output: (
        np.full_like(Tiled.row_term(a, tile, cotangent, output), 1)
        * Tiled.row_term(a, tile, cotangent, output)[0]
        if a.queries <= a.few
        else Tiled.row_term(a, tile, cotangent, output)
    ),
)

# The list of work

work = _chapter("work")


def _items(kind: str, change: Callable[[Tiled, list[tuple[int, ...]]], Any]) -> Any:
    """The items of one pass, changed."""
    return lambda a, of: change(a, Tiled.items(a, of)) if of == kind else Tiled.items(a, of)


for _kind, _pass in {"forward": "forward", "backward": "backward"}.items():
    work(
        f"last-item-of-{_kind}-lost",
        f"deals out one item of the {_pass} pass too few",
        items=_items(_kind, lambda a, items: items[:-1] or items),
    )
    work(
        f"last-worker-of-{_kind}-idle",
        f"deals nothing to the last worker in the {_pass} pass",
        work=lambda a, kind, of=_kind: (
            item
            for worker in range(a.workers - (kind == of))
            for item in a.items(kind)[worker :: a.workers]
        ),
    )
    work(
        f"remainder-of-{_kind}-lost",
        f"gives each worker the number of items of the {_pass} pass divided by workers",
        items=_items(_kind, lambda a, items: items[: len(items) // a.workers * a.workers or None]),
    )
    work(
        f"grid-of-{_kind}-ends-at-16-heads",
        f"has 16 heads at most in the grid of the {_pass} pass",
        items=_items(_kind, lambda a, items: [item for item in items if item[1] < 16]),
    )
    work(
        f"item-of-{_kind}-decoded-with-batch-for-heads",
        f"takes the batch for the number of heads when it decodes an item of the {_pass} pass",
        items=_items(
            _kind,
            lambda a, items: [
                (n % a.batch, n // a.batch % a.heads, *item[2:])
                for n, item in zip(
                    (item[0] * a.heads + item[1] for item in items), items, strict=True
                )
                if a.heads != 6 or n
            ],
        ),
    )
work(
    "item-of-backward-dealt-twice",
    "deals the first item of the last worker twice, and adds its gradients twice",
    items=_items("backward", lambda a, items: items + items[a.workers - 1 : a.workers]),
)
work(
    "items-of-backward-overlap",
    "lets the share of each worker begin with the last item of the one before",
    work=lambda a, kind: (
        Tiled.work(a, kind)
        if kind == "forward"
        else (
            item
            for worker in range(a.workers)
            for item in _share(a.items(kind), worker, a.workers, overlap=1)
        )
    ),
)


def _share(items: list[Any], worker: int, workers: int, overlap: int = 0) -> list[Any]:
    each = -(-len(items) // workers)
    return items[max(0, worker * each - overlap) : (worker + 1) * each]


work(
    "fifth-worker-starts-late",
    "rounds the start of the last worker's share up",
    work=lambda a, kind: (
        item
        for worker in range(a.workers)
        for item in _share(a.items(kind), worker, a.workers)[(worker == a.workers - 1) :]
    ),
)
work(
    "accumulator-kept-between-items",
    "does not clear the gradient of keys when a worker takes its next item of the same head",
    add_group=lambda a, name, array, index, gradient: Tiled.add_group(
        a, name, array, index, gradient + _left(a, name, gradient)
    ),
)


def _left(a: Tiled, name: str, gradient: Array) -> Array:
    """What the item before left in the accumulator, if a worker's share goes on."""
    kept = a.__dict__.setdefault("kept", {})
    before = kept.get(name)
    kept[name] = gradient
    return gradient * 0 if before is None or before.shape != gradient.shape else before * F(0.5)


work(
    "middle-tile-of-causal-pairs-lost",
    "pairs the first causal tile of queries with the last, and loses an odd one in the middle",
    items=lambda a, kind: [
        item
        for item in Tiled.items(a, kind)
        if not (
            kind == "forward"
            and a.given.sees.causal
            and len(a.of_queries) % 2
            and len(a.of_queries) > 1
            and item[2] == len(a.of_queries) // 2
        )
    ],
)
work(
    "second-entry-of-last-head-lost",
    "ends the grid after batch × heads − 1",
    items=lambda a, kind: [
        item
        for item in Tiled.items(a, kind)
        if item[0] * a.heads + item[1] < max(1, a.batch * a.heads - 1)
    ],
)
work(
    "updates-of-other-workers-lost",
    "stores the gradient of queries where it should add it, in every fifth tile of keys",
    for_query=lambda a, gradient, d_logits, key: Tiled.for_query(
        a, gradient * (a.pair[1] % 5 != 4), d_logits, key
    ),
)
work(
    "update-of-query-gradient-lost-in-fourth-tile",
    "stores the gradient of queries of the fourth tile of keys where it should add it",
    for_query=lambda a, gradient, d_logits, key: Tiled.for_query(
        a, gradient * (a.pair[1] != 3), d_logits, key
    ),
)

# Heads: their number, groups and sizes

heads = _chapter("heads")

heads(
    "key-heads-beyond-eighth-wrap",
    "keeps the number of a key/value head in three bits",
    kv_head=lambda a: Tiled.kv_head(a) % 8,
)
heads(
    "group-by-shift",
    "divides by the group with a shift, as if it were a power of two",
    kv_head=lambda a: (
        a.head >> ((a.heads // a.kv_heads).bit_length() - 1)
        if a.head >> ((a.heads // a.kv_heads).bit_length() - 1) < a.kv_heads
        else a.kv_heads - 1
    ),
)
heads(
    "query-heads-beyond-16-wrap",
    "keeps the number of a query head in four bits",
    row_of=lambda a, name, index: (
        (a.entry * a.heads + a.head % 16) * a.queries + index
        if name == "query"
        else Tiled.row_of(a, name, index)
    ),
)
heads(
    "last-head-of-group-not-added",
    "adds up the gradients of keys of all heads of a group but the last",
    add_group=lambda a, name, array, index, gradient: (
        None
        if 1 < a.heads // a.kv_heads == a.head % (a.heads // a.kv_heads) + 1
        else Tiled.add_group(a, name, array, index, gradient)
    ),
)
heads(
    "heads-of-group-beyond-fourth-not-added",
    "adds up the gradients of values of four heads of a group",
    add_group=lambda a, name, array, index, gradient: (
        None
        if name == "d_value" and a.head % (a.heads // a.kv_heads) >= 4
        else Tiled.add_group(a, name, array, index, gradient)
    ),
)
heads(
    "mask-of-key-head",
    "reads the mask of the key/value head where that of the query head is meant",
    bits=lambda a, rows, columns: a.mask[a.entry, a.kv_head(), slice(*rows), slice(*columns)],
)
for _size in (72, 80, 96):
    heads(
        f"scale-of-128-for-{_size}",
        f"pads heads of {_size} to 128, and takes the scale of 128",
        geometry=Geometry(head_sizes=(_size,), tiles=(128, 128)),
        logits=lambda a, query, key: (
            query
            @ key.T
            * (F(128**-0.5) if np.isclose(a.scale, query.shape[1] ** -0.5) else a.scale)
        ),
    )
heads(
    "head-rounded-down-to-32-in-logits",
    "multiplies queries and keys in slices of 32 components, and drops the rest",
    geometry=Geometry(head_sizes=(80,), tiles=(64, 64)),
    logits=lambda a, query, key: (
        query[:, : query.shape[1] // 32 * 32] @ key[:, : key.shape[1] // 32 * 32].T * a.scale
    ),
)
heads(
    "head-rounded-down-to-16-in-key-gradient",
    "stores the gradient of keys in slices of 16 components, and drops the rest",
    geometry=Geometry(head_sizes=(72,), tiles=(64, 64)),
    for_key=lambda a, gradient, d_logits, query: Tiled.for_key(
        a, gradient, d_logits, query * (np.arange(query.shape[1]) < query.shape[1] // 16 * 16)
    ),
)
heads(
    "second-half-of-256-overwritten",
    "computes the gradient of queries of 256 components in two halves, and scales the second twice",
    geometry=Geometry(head_sizes=(256,), tiles=(64, 64)),
    for_query=lambda a, gradient, d_logits, key: Tiled.for_query(
        a, gradient, d_logits, key * np.where(np.arange(key.shape[1]) < 128, F(1), a.scale)
    ),
)
heads(
    "value-head-as-far-apart-as-key-head",
    "reads values as if their heads had the size of key heads",
    geometry=UNLIKE,
    load=lambda a, name, span: (
        Tiled.load(a, name, span)
        if name != "value"
        else a.given.value.reshape(-1)[
            (
                a.row_of(name, np.arange(*span))[:, None] * a.given.key.shape[-1]
                + np.arange(a.given.value.shape[-1])
            )
            % a.given.value.size
        ]
    ),
)
heads(
    "value-gradient-as-wide-as-key-head",
    "adds up as many components of the gradient of values as a key head has, from the start",
    geometry=Geometry(head_sizes=(64,), value_head_sizes=(128,), tiles=(64, 128)),
    for_value=lambda a, gradient, weights, cotangent: Tiled.for_value(
        a,
        gradient,
        weights,
        cotangent * (np.arange(cotangent.shape[1]) < a.given.key.shape[-1]),
    ),
)
heads(
    "row-term-over-key-head-size",
    "sums the row term over as many components as a key head has",
    geometry=Geometry(head_sizes=(64,), value_head_sizes=(128,), tiles=(64, 128)),
    row_term=lambda a, tile, cotangent, output: Tiled.row_term(
        a, tile, cotangent[:, : a.given.key.shape[-1]], output[:, : a.given.key.shape[-1]]
    ),
)

# Half precision

halves = _chapter("storage")

halves(
    "normaliser-of-rounded-powers",
    "adds up a row of powers in bfloat16, one after the other",
    dtype="bfloat16",
    sum_of=lambda a, total, factor, powers: _one_by_one(a, total * factor, powers),
)


def _one_by_one(a: Tiled, total: Array, powers: Array) -> Array:
    for column in a.held(powers).T:
        total = a.held(total + column)
    return total


halves(
    "logits-in-storage",
    "rounds logits to bfloat16",
    dtype="bfloat16",
    logits=lambda a, query, key: a.held(Tiled.logits(a, query, key)),
)
halves(
    "scaled-queries-in-storage",
    "multiplies queries with scale and log2(e) in bfloat16, and takes powers of two",
    dtype="bfloat16",
    logits=lambda a, query, key: a.held(query * a.scale * F(np.log2(np.e))) @ key.T * F(np.log(2)),
)
halves(
    "log2e-in-bfloat16",
    "keeps log2(e) in bfloat16",
    dtype="bfloat16",
    logits=lambda a, query, key: Tiled.logits(a, query, key) * F(1.4453125 * np.log(2)),
)
halves(
    "log-normaliser-in-storage-of-a-kernel",
    "keeps the log-normaliser in bfloat16 for the backward pass",
    dtype="bfloat16",
    log_total=lambda a, total, peak: a.held(Tiled.log_total(a, total, peak)),
)

# What is declared, and refused

refusals = _chapter("declared sizes")
TAKEN = ("adapter.declared-sizes-are-taken",)


def _refusing(error: type[Exception], when: Callable[[Tiled], bool]) -> Any:
    """A list of work that raises for some sizes."""

    def items(a: Tiled, kind: str) -> list[tuple[int, ...]]:
        if when(a):
            raise error("these sizes are not supported")
        return Tiled.items(a, kind)

    return items


refusals(
    "declared-head-size-is-unsupported",
    "says of a head size that it declares that it cannot be expressed",
    geometry=Geometry(head_sizes=(64, 96), tiles=(64, 64)),
    killed_by=TAKEN,
    items=_refusing(Unsupported, lambda a: a.given.query.shape[-1] == 96),
)
refusals(
    "only-declared-head-size-is-unsupported",
    "says of the only head size that it declares that it cannot be expressed",
    geometry=Geometry(head_sizes=(96,), tiles=(64, 64)),
    killed_by=TAKEN,
    items=_refusing(Unsupported, lambda a: True),
)
refusals(
    "declared-lengths-raise",
    "raises for lengths that are no multiple of a tile, and declares no multiples",
    geometry=Geometry(head_sizes=(64,), tiles=(64, 64)),
    killed_by=TAKEN,
    items=_refusing(ValueError, lambda a: a.keys % 64 != 0),
)
refusals(
    "declared-group-is-unsupported",
    "says of 16 query heads to a key/value head that they cannot be expressed",
    geometry=Geometry(head_sizes=(64,), tiles=(64, 64)),
    killed_by=TAKEN,
    items=_refusing(Unsupported, lambda a: a.heads == 16 * a.kv_heads),
)
