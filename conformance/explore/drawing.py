"""Draw recipes of problems: mostly small ones, some at the sizes of real kernels.

A `Recipe` consists of the names, sizes and seed that determine all numbers of a problem. Numbers,
masks, biases and regimes (ways to change the usual numbers) are drawn as in the catalogue, for
which the estimates of noise are known to be realistic; their combinations and sizes are new.

A combination of features is drawn first. It is used if the adapter's own `check` accepts a small
problem with it; the result is cached. Sizes are drawn next, and features that do not suit them are
dropped. Sizes are limited, because a search needs many problems and large ones are slow. If an
implementation declares a `Geometry`, the sizes are drawn from it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from conformance.adapter.base import Adapter
from conformance.cases import patterns
from conformance.cases.case import (
    BiasPattern,
    FeaturePattern,
    Pattern,
    Regime,
    assembled,
    draw,
    on_tiles,
    rounded,
)
from conformance.definition import features
from conformance.definition.dtypes import BoolArray
from conformance.definition.geometry import Fixed, Geometry, Pair, fixing
from conformance.definition.problem import (
    Causal,
    Problem,
    Score,
    Shape,
    Sharing,
    causal_mask,
)
from conformance.errors import ConformanceError, Unsupported

T = TypeVar("T")

Widths = Literal["equal", "memory", "free"]

SCORES: tuple[Score, ...] = ("scaled-dot", "additive")
SHARINGS: tuple[Sharing, ...] = ("self", "memory", "separate")
WIDTHS: tuple[Widths, ...] = ("equal", "memory", "free")

MASKS: dict[str, Pattern | None] = {
    "none": None,
    "padding": patterns.key_padding,
    "left-padding": patterns.left_padding,
    "shared": patterns.shared,
    "per-batch": patterns.per_batch,
    "per-head": patterns.per_head,
    "one-key": patterns.one_allowed_key,
    "over-keys": patterns.over_keys,
    "over-keys-per-head": patterns.keys_per_head,
    "heads-only": patterns.heads_only,
    "blocked-start": patterns.blocked_start,
    "block-diagonal": patterns.block_diagonal,
    "sliding-window": patterns.sliding_window,
    "prefix": patterns.prefix_lm,
    "everything": patterns.everything,
    "whole-tiles": patterns.whole_tiles,
}
BIASES: dict[str, BiasPattern | None] = {
    "none": None,
    "shared": patterns.bias_shared,
    "per-head": patterns.bias_per_head,
    "in-full": patterns.bias_in_full,
    "alibi": patterns.alibi,
    "over-keys": patterns.bias_over_keys,
    "over-queries": patterns.bias_over_queries,
    "per-entry": patterns.bias_per_entry,
}
REGIMES: dict[str, Regime | None] = {
    "none": None,
    "all-positive": patterns.all_positive,
    "outliers": patterns.outliers,
    "small-values": patterns.small_values,
    "large-logits": patterns.large_logits,
    "huge-logits": patterns.huge_logits,
    "constant-rows": patterns.constant_rows,
    "repeated-maxima": patterns.repeated_maxima,
}
FEATURES: dict[str, tuple[FeaturePattern, ...]] = {
    entry.name: tuple(getattr(patterns, name) for name in entry.drawn)
    for entry in features.FEATURES
    if entry.drawn
}
"""The ways to draw each feature; recipes contain the feature's name and the index of a way."""
SCALES = (None, 0.75, 0.125, 2.0, 1.0, 0.0, -0.5, -1.5)

MOST_SEEDS = 2**16
MOST_REFUSED = 1000
"""The most combinations of features to try until the adapter accepts one."""

TILES = (16, 32, 64, 128, 256)
"""Usual tile sizes of kernels; some lengths are drawn at multiples of them, or one before or after.
"""
LONGEST = 640
HEAD_SIZES = (16, 32, 64, 72, 80, 96, 128, 256)
"""Head sizes for which kernels have specialised code."""
MOST_HEADS = 32
MANY_HEADS = (8, 10, 12, 16, 32)
"""Numbers of key/value heads that models use."""
GROUPS = (2, 2, 2, 3, 4, 8, 16)

USUAL = tuple(
    Geometry(head_sizes=HEAD_SIZES, tiles=tiles) for tiles in ((64, 64), (64, 128), (128, 128))
)
"""The geometries of usual kernels, for implementations that declare no geometry."""
AT_SIZE = 0.2
"""The share of problems that are drawn at the sizes of `USUAL` if no geometry is declared."""
KINDS = ({"keys"}, {"keys"}, {"queries"}, {"queries", "keys"}, {"heads"})
"""What a problem at kernel sizes has many of; one of these sets is drawn for each problem."""
WIDTH = 32
"""The width of inputs and output at kernel sizes if widths are free and the suite projects them."""

MOST_COST, MOST_COST_AT_SIZE, MOST_COST_IF_LARGE = 2**18, 2**21, 2**23
"""The highest `_cost` of small problems, of those at kernel sizes, and of a few of the latter.

Problems at kernel sizes may cost as much as the cheapest one with several tiles, if that is more.
"""
LARGE = 0.06
"""The share of problems whose limit on the cost is higher.

It is then `MOST_COST_AT_SIZE` for small problems, and `MOST_COST_IF_LARGE` at kernel sizes.
"""

FEATURED = 0.4
"""The probability that a feature is tried in a recipe, if the adapter accepts it alone."""

CAUSAL: tuple[Causal | None, ...] = (None, "top-left", "bottom-right")


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Properties of a problem that an implementation may require regardless of the sizes.

    Attributes:
        score: how a query and a key give a logit, "scaled-dot" or "additive".
        sharing: which inputs are the same array: "self", "memory" (key and value) or "separate".
        bias: whether the projections have biases.
        widths: which widths may differ from heads × head size; see `Recipe`.
        fixed: what the implementation does in every call, as its adapter declares it.
    """

    score: Score = "scaled-dot"
    sharing: Sharing = "self"
    widths: Widths = "equal"
    bias: bool = True
    fixed: Fixed | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One problem, described by keys of `MASKS`, `BIASES`, `REGIMES` and `FEATURES`, and numbers.

    `query` and `key` are lengths; in self-attention, the number of keys is `query`, and `key` has
    no effect. `group` is the number of query heads for each key/value head, and `size` the head
    size of queries and keys.

    `frame.widths` specifies which widths differ from heads × head size: none for "equal", those of
    key and value for "memory", and all for "free". A key width that differs exceeds heads × head
    size by `extra`. A `width` other than 0 replaces the widths of all inputs and of the output.

    If `tiles` is given, masks whose patterns depend on tiles end around the edges of these tiles.
    """

    frame: Frame = Frame()
    batch: int = 2
    query: int = 3
    key: int = 3
    kv_heads: int = 2
    group: int = 1
    size: int = 3
    value_size: int = 0
    """The head size of values; 0 stands for `size`."""
    extra: int = 1
    width: int = 0
    tiles: Pair | None = None
    mask: str = "none"
    bias: str = "none"
    causal: Causal | None = None
    scale: float | None = None
    features: tuple[tuple[str, int], ...] = ()
    regime: str = "none"
    seed: int = 0

    def but(self, **changes: Any) -> Recipe:
        """Return a copy of the recipe in which the given fields are replaced."""
        return dataclasses.replace(self, **changes)

    @property
    def shape(self) -> Shape:
        """The shape of the problem; `WrongShape` is raised if the sizes do not fit together."""
        frame, heads = self.frame, self.kv_heads * self.group
        width = heads * self.size
        free = frame.widths == "free"
        key_width = width if frame.widths == "equal" else width + self.extra
        output_width = width + 3 * free
        query_width = key_width if free and frame.sharing == "self" else width + 2 * free
        if self.width:
            query_width = key_width = output_width = self.width
        separate = not self.width and frame.sharing == "separate" and frame.widths != "equal"
        shape = Shape(
            batch=self.batch,
            query_length=self.query,
            key_length=self.query if frame.sharing == "self" else self.key,
            heads=heads,
            kv_heads=self.kv_heads,
            head_size=self.size,
            value_head_size=self.value_size or self.size,
            query_width=query_width,
            key_width=key_width,
            value_width=key_width + separate,
            output_width=output_width,
            bias=frame.bias,
            score=frame.score,
            sharing=frame.sharing,
        )
        return shape if frame.fixed is None else frame.fixed.shape(shape)

    def problem(self, dtype: str) -> Problem:
        """Return the problem, with its arrays of floats rounded to the dtype.

        A mask that would leave a query without any visible key is changed. Infinite or NaN inputs
        are possible if the regime does not suit the sizes.
        """
        shape = self.shape
        random = np.random.Generator(np.random.PCG64(self.seed))
        drawn = draw(shape, random)
        mask, bias, regime = MASKS[self.mask], BIASES[self.bias], REGIMES[self.regime]
        if mask is not None and self.tiles is not None:
            mask = on_tiles(mask, self.tiles)
        fixed = {} if self.frame.fixed is None else self.frame.fixed.fields(shape)
        given = fixed.pop("causal", None), fixed.pop("scale", None)
        causal = self.causal or given[0]
        scale = given[1] if self.scale is None else self.scale
        allowed = None if mask is None else _usable(mask(shape, random), shape, causal)
        added = None if bias is None else bias(shape, random)
        if regime is not None:
            # A small problem may be unable to have huge logits; it becomes NaN and is skipped.
            with np.errstate(all="ignore"):
                regime(shape, drawn, random)
        fields: dict[str, Any] = {}
        for name, place in self.features:
            fields |= FEATURES[name][place](shape, causal, random)
        fields = fields if self.frame.fixed is None else self.frame.fixed.numbers(fields)
        exact = assembled(
            shape,
            drawn,
            mask=allowed,
            attn_bias=added,
            causal=causal,
            scale=scale,
            **fixed | fields,
        )
        return rounded(_visible(exact) if fields else exact, dtype)


def _visible(problem: Problem) -> Problem:
    """Return the problem with the mask opened for each query that has no visible key.

    Other rules, such as a window, may still hide keys from these queries. Without a mask, return
    the problem unchanged.
    """
    if problem.mask is None:
        return problem
    hidden = ~problem.allowed_in_full().any(axis=-1, keepdims=True)
    return problem.replace(mask=problem.mask | hidden) if hidden.any() else problem


def _usable(mask: BoolArray, shape: Shape, causal: Causal | None) -> BoolArray:
    """Return the mask, but let fully masked queries attend to the last causally allowed key.

    The mask is True where a query may attend. Queries without causally allowed keys stay masked.
    """
    visible = np.ones((1, 1, 1, shape.key_length), np.bool_)
    if causal is not None:
        visible = causal_mask(shape, causal)
    empty = ~(mask & visible).any(axis=-1, keepdims=True)
    if not empty.any():
        return mask
    last = visible & ~np.roll(visible, -1, axis=-1)
    last[..., -1] = visible[..., -1]
    return mask | (empty & last)


class Drawer:
    """A source of random recipes with features that the adapter's own `check` accepts.

    Args:
        adapter: the adapter for the implementation.
        dtype: the dtype of the problems that are passed to `check`.
        few_shapes: whether to draw from fewer sizes, for implementations that compile each new
            shape.

    Raises:
        Unsupported: the adapter accepts none of the simplest problems.
    """

    def __init__(self, adapter: Adapter, dtype: str, *, few_shapes: bool = False) -> None:
        self._adapter, self._dtype, self._few = adapter, dtype, few_shapes
        self._geometry = adapter.geometry
        self._groups = () if self._geometry is None else self._geometry.groups
        self._taken: dict[Recipe, bool] = {}
        every = itertools.product(SCORES, SHARINGS, WIDTHS, (True, False))
        fixed = fixing(adapter.fixed, **adapter.numbers)
        own = "" if fixed is None else fixed.sharing
        frames = [
            Frame(score=s, sharing=w, widths=v, bias=b, fixed=fixed)
            for s, w, v, b in every
            if own in ("", w)
        ]
        self._frames = [frame for frame in frames if self.takes(self._plain(frame=frame))]
        if not self._frames:
            raise Unsupported("it takes none of the plainest problems")
        self._features_taken = self._declared() if adapter.features else {}

    def _plain(self, **features: Any) -> Recipe:
        """Return a recipe with the given fields and small default sizes.

        If the adapter declares a geometry, each size is replaced by a similar one that it allows.
        """
        recipe = Recipe(**features)
        if self._geometry is None:
            return recipe
        return _sized(recipe.but(width=self._width(recipe.frame)), self._geometry)

    def _declared(self) -> dict[str, list[int]]:
        """Return the features that the adapter accepts in a problem without any other feature.

        The problem may have a causal mask. For each feature, list the accepted ways to draw it, as
        indices into its entry in `FEATURES`.
        """
        alone = partial(self._plain, query=3, key=5, size=4, frame=self._frames[-1])
        found: dict[str, list[int]] = {}
        for name, ways in FEATURES.items():
            for place in range(len(ways)):
                recipes = (alone(causal=causal, features=((name, place),)) for causal in CAUSAL)
                if any(map(self.takes, recipes)):
                    found.setdefault(name, []).append(place)
        return found

    def _some_features(self, recipe: Recipe, random: np.random.Generator) -> Recipe:
        """Return the recipe with random features added, each only if the adapter accepts it."""
        for name, places in self._features_taken.items():
            if random.random() < FEATURED:
                with_it = recipe.but(features=(*recipe.features, (name, _one(random, places))))
                if self.takes(with_it):
                    recipe = with_it
        return recipe

    def _width(self, frame: Frame) -> int:
        """Return the value of `Recipe.width` at the sizes of kernels: `WIDTH`, or 0 for none.

        It is `WIDTH` only if widths are free and the suite supplies the projections.
        """
        return WIDTH if self._adapter.projections_supplied and frame.widths == "free" else 0

    def takes(self, recipe: Recipe) -> bool:
        """Return whether the adapter's own `check` accepts a recipe; the result is cached.

        Any exception but `Unsupported` and `ConformanceError` counts as acceptance.
        """
        if recipe not in self._taken:
            self._taken[recipe] = True
            try:
                self._adapter.check(recipe.problem(self._dtype))
            except (Unsupported, ConformanceError):
                self._taken[recipe] = False
            except Exception:
                # A bug in the adapter's check is a finding, so the search has to reach it.
                pass
        return self._taken[recipe]

    def draw(self, random: np.random.Generator) -> Recipe:
        """Return a random recipe with features that the adapter accepts at small sizes.

        The adapter may still refuse the sizes, which are not checked.
        """
        recipe = self._features(random)
        recipe = recipe.but(
            batch=int(random.integers(1, 4)),
            kv_heads=self._heads(random),
            group=recipe.group if recipe.group in (1, *self._groups) else _one(random, GROUPS),
            extra=int(random.integers(1, 4)) if recipe.frame.widths != "equal" else 1,
            regime=_one(random, self._regimes(recipe)),
            seed=int(random.integers(MOST_SEEDS)),
        )
        geometry = self._geometry
        if geometry is None and random.random() < AT_SIZE:
            geometry = USUAL[-1] if self._few else _one(random, USUAL)
        if geometry is None:
            recipe = self._small(recipe, random)
        else:
            recipe = self._at_size(recipe, geometry, random)
        if recipe.causal == "bottom-right" and recipe.shape.key_length < recipe.query:
            # Some queries would have no visible key.
            recipe = recipe.but(causal=None)
        if recipe.mask != "none" and recipe.shape.key_length < 2:
            recipe = recipe.but(mask="none")
        if recipe.features and recipe.shape.key_length < recipe.query:
            # Windows and lengths could leave queries beyond the last key without a visible key.
            recipe = recipe.but(query=recipe.key, key=recipe.query)
            if self._geometry is not None:
                recipe = _sized(recipe, self._geometry)
        return recipe

    def _small(self, recipe: Recipe, random: np.random.Generator) -> Recipe:
        """Return the recipe with random sizes, mostly small; some lengths span several tiles."""
        query = self._length(random)
        key = query if recipe.frame.sharing == "self" else self._length(random)
        if recipe.causal == "bottom-right" and key < query:
            query, key = key, query
        value_size = int(random.integers(1, 9)) if recipe.value_size else 0
        recipe = recipe.but(query=query, key=key, size=self._size(random), value_size=value_size)
        large = random.random() < LARGE
        return _fitting(recipe, MOST_COST_AT_SIZE if large else MOST_COST, None, random)

    def _at_size(self, recipe: Recipe, geometry: Geometry, random: np.random.Generator) -> Recipe:
        """Return the recipe at random sizes of a geometry.

        Depending on the set drawn from `KINDS`, the numbers of queries, of keys or of both are
        around the edges of tiles, or there are many heads. Other lengths are short.
        """
        kind = _one(random, KINDS)
        query = self._edge(geometry.tiles[0], random) if "queries" in kind else self._short(random)
        key = self._edge(geometry.tiles[1], random) if "keys" in kind else self._short(random)
        size, value_size = _one(random, geometry.pairs)
        kv_heads = int(_one(random, MANY_HEADS)) if "heads" in kind else recipe.kv_heads
        if geometry.heads:
            kv_heads = max(1, _one(random, geometry.heads) // recipe.group)
        if self._geometry is None and self._few:
            size = value_size = 64
        if self._geometry is None and recipe.value_size:
            value_size = _one(random, HEAD_SIZES)
        narrow = dataclasses.replace(recipe.frame, widths="free")
        frame = narrow if narrow in self._frames else recipe.frame
        scale = recipe.scale
        if scale is not None:
            # A scale that suits heads of size 4 would make the weights of large ones 0 and 1.
            scale *= 2.0 ** round(math.log2(4 / size) / 2)
        if recipe.causal == "bottom-right" and key < query:
            query = key
        recipe = recipe.but(
            frame=frame,
            width=self._width(frame),
            query=query,
            key=key,
            kv_heads=kv_heads,
            size=size,
            value_size=value_size if value_size != size else 0,
            scale=scale,
            tiles=geometry.tiles,
        )
        large = random.random() < LARGE
        most = MOST_COST_IF_LARGE if large else MOST_COST_AT_SIZE
        # Large heads or multiples make everything costly, but three tiles are always possible.
        least = recipe.but(batch=1, query=1, key=3 * geometry.tiles[1] + 1, kv_heads=1, group=1)
        if self._geometry is not None:
            least = _sized(least, self._geometry)
        most = max(most, _cost(least))
        return _fitting(recipe, most, self._geometry, random)

    def _features(self, random: np.random.Generator) -> Recipe:
        """Return a small recipe with random features that the adapter accepts together.

        If the adapter refuses `MOST_REFUSED` recipes in a row, return one without any features.
        """
        for _ in range(MOST_REFUSED):
            recipe = self._plain(
                frame=_one(random, self._frames),
                group=_one(random, self._groups or (1, 1, 2)),
                value_size=_one(random, (0, 0, 2)),
                mask=_often(random, "none", list(MASKS)),
                bias=_often(random, "none", list(BIASES)),
                causal=_often(random, None, list(CAUSAL)),
                scale=_often(random, None, list(SCALES)),
            )
            if self.takes(recipe):
                return self._some_features(recipe, random)
        return self._plain(frame=self._frames[0])

    def _regimes(self, recipe: Recipe) -> list[str]:
        return [
            name
            for name in REGIMES
            if (recipe.frame.score == "scaled-dot" or not name.endswith("-logits"))
            and (name != "huge-logits" or (recipe.frame.sharing != "self" and recipe.scale is None))
        ]

    def _length(self, random: np.random.Generator) -> int:
        kind = random.random()
        if kind < 0.75 and self._few:
            return int(random.choice((1, 2, 5, 9)))
        if kind < 0.55:
            return int(random.integers(1, 13))
        if kind < 0.75:
            return int(random.integers(1, 41))
        if kind < 0.92:
            tile = int(random.choice(TILES))
            most = max(1, (2 if self._few else 4) * 64 // tile)
            return tile * int(random.integers(1, most + 1)) + int(random.choice((0, 0, 1, -1)))
        return int(random.choice((200, 300, 513, 600)) if self._few else random.integers(41, 601))

    def _short(self, random: np.random.Generator) -> int:
        """Return a random length from 1 to 40, usually at most 9."""
        if self._few:
            return _one(random, (1, 9))
        return int(random.integers(1, 9) if random.random() < 0.6 else random.integers(1, 41))

    def _edge(self, tile: int, random: np.random.Generator) -> int:
        """Return a random length at, next to or between the edges of tiles of size `tile`."""
        most = max(1, LONGEST // tile)
        tiles = _one(random, (1, 3)) if self._few else min(int(random.integers(1, 5)), most)
        beyond = (1,) if self._few else (0, 1, -1, int(random.integers(1, tile + 1)))
        return tiles * tile + _one(random, beyond)

    def _heads(self, random: np.random.Generator) -> int:
        if random.random() < 0.8:
            return int(random.integers(1, 3 if self._few else 5))
        return int(random.choice(MANY_HEADS) if self._few else random.integers(5, MOST_HEADS + 1))

    def _size(self, random: np.random.Generator) -> int:
        kind = random.random()
        if kind < 0.65:
            return int(random.integers(1, 4 if self._few else 7))
        if kind < 0.95:
            return int(random.choice((8, *HEAD_SIZES)))
        return int(random.integers(1, 129))


def _sized(recipe: Recipe, geometry: Geometry) -> Recipe:
    """Return the recipe at sizes of the geometry: the nearest lengths and numbers of heads.

    If the geometry lacks the recipe's pair of head sizes, use its first pair whose sizes are equal
    if the recipe's are, or different if the recipe's are. Without such a pair, use its first pair.
    """
    equal = recipe.frame.sharing == "self"
    key = recipe.query if equal else recipe.key
    query, key = geometry.lengths(recipe.query, key, equal=equal)
    heads, kv_heads = geometry.numbers_of_heads(recipe.kv_heads * recipe.group, recipe.group)
    sizes: Pair = (recipe.size, recipe.value_size or recipe.size)
    wants_other = recipe.value_size not in (0, recipe.size)
    if sizes not in geometry.pairs:
        # Prefer a pair whose sizes differ exactly if those of the recipe do.
        pairs = [pair for pair in geometry.pairs if (pair[0] != pair[1]) == wants_other]
        sizes = (pairs or geometry.pairs)[0]
    return recipe.but(
        query=query,
        key=key,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        size=sizes[0],
        value_size=sizes[1] if sizes[1] != sizes[0] else 0,
    )


def _fitting(
    recipe: Recipe, most: int, geometry: Geometry | None, random: np.random.Generator
) -> Recipe:
    """Return the recipe with sizes reduced, in random order, until it costs at most `most`.

    If the reductions do not suffice, the recipe still costs more. If there is a geometry, only
    sizes that it allows are used. If the recipe has tiles, the head size is kept, because kernels
    may have special code for it; otherwise, it is reduced last. There are at most `MOST_HEADS`
    query heads, unless the geometry requires more.
    """

    def sized(recipe: Recipe, field: str, size: int) -> Recipe:
        recipe = recipe.but(**{field: size})
        return recipe if geometry is None else _sized(recipe, geometry)

    recipe = sized(recipe, "kv_heads", max(1, min(recipe.kv_heads, MOST_HEADS // recipe.group)))
    lengths = ["query"] if recipe.frame.sharing == "self" else ["query", "key"]
    counts = random.permutation(["batch", "kv_heads", "group"])
    # A problem may be long, or have many heads.
    some = [*random.permutation(lengths), *counts] if random.random() < 0.5 else [*counts, *lengths]
    fields = some if recipe.tiles else [*some, "size"]
    for field in itertools.chain(fields, fields):
        while (cost := _cost(recipe)) > most:
            size = getattr(recipe, field)
            tile = dict(zip(("query", "key"), recipe.tiles or (), strict=False)).get(field, size)
            # A length next to the edge of a tile stays next to one.
            smaller = sized(recipe, field, size - tile if size > tile else max(1, size // 2))
            if _cost(smaller) >= cost:
                break
            recipe = smaller
    if recipe.causal == "bottom-right" and recipe.shape.key_length < recipe.query:
        recipe = sized(recipe, "query", recipe.key)
    return recipe


def _cost(recipe: Recipe) -> int:
    """Return the rough cost of an evaluation of the problem, in multiplications."""
    heads = recipe.kv_heads * recipe.group
    lengths = recipe.batch * (recipe.query + recipe.shape.key_length)
    logits = recipe.batch * heads * recipe.query * recipe.shape.key_length
    width = heads * recipe.size
    projected = 4 * width * (lengths + (recipe.width or width))
    # Estimating the noise of one number takes about as long as eight multiplications.
    return logits * (8 + recipe.size) + 8 * projected


def _one(random: np.random.Generator, items: Sequence[T]) -> T:
    return items[int(random.integers(len(items)))]


def _often(random: np.random.Generator, usual: T, items: Sequence[T]) -> T:
    """Return `usual` with a probability of one half, and otherwise a random one of the items."""
    return usual if random.random() < 0.5 else _one(random, items)
