"""Cases and shape families. A case is one problem, posed in several dtypes, with a stable id.

`describe` returns the description of a case that a record stores, so that reports can show its
facts and its masks.

The numbers follow docs/noise.md: inputs and cotangents are from N(0, 1), and projections have unit
gain, except that queries are larger, so that logits have a standard deviation of about 1.5. The
regime of a case, if it has one, deliberately changes these numbers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from conformance.definition import features
from conformance.definition.dtypes import Array, BoolArray, dtype_of
from conformance.definition.geometry import Fixed, Grid, Pair, apart, joined
from conformance.definition.problem import (
    ARRAY_NAMES,
    Causal,
    Problem,
    Shape,
    Weights,
)
from conformance.records.header import CaseInfo, Plane
from conformance.text import plural, some

Drawn = dict[str, Array]
"""Inputs and weights before rounding, by name ("query", "weights.query", "cotangent")."""

Pattern = Callable[[Shape, np.random.Generator], BoolArray]
BiasPattern = Callable[[Shape, np.random.Generator], Array]
FeaturePattern = Callable[[Shape, Causal | None, np.random.Generator], dict[str, Any]]
Regime = Callable[[Shape, Drawn, np.random.Generator], None]


KEY_BIAS_IDLE = {
    "weights.key_bias": "adds the same number to all logits of a row, which the softmax removes"
}
"""Why the bias of keys does not matter in most cases, for `Case.idle`."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem of the catalogue.

    Attributes:
        name: "chapter/what", such as "mask/key-padding".
        family: the name of its shape in `FAMILIES`.
        why: what the case does and which mistakes it catches.
        mask, bias: patterns that return the mask and the additive bias; None if there is none.
        causal, scale: as in `Problem`.
        regime: a pattern that changes the drawn inputs and weights; None if they stay ordinary.
        features: patterns that return fields of `Problem` for features, such as a window.
        maskable: whether the case is also run on implementations that can express its features only
            by a mask or a bias. Other cases with features are run only on implementations that
            declare an argument for at least one of them.
        serves: ids of requirements that use the case, in addition to those that use every case.
        defined: False if the definition leaves the answer open; the answer is then only observed.
        idle: the names of inputs that by definition do not affect the answer in this case, each
            with the reason.
        core: whether level "core" includes the case; that level has a case for each common mistake.
        large: whether level "large" includes the case even if `core` is False; that level has all
            cases of "core", too.
        exchanged: whether its outputs are stored with the record, so that implementations can be
            compared pairwise.
        grid: the grid that gives the sizes of the problem; None for the small sizes of its family.
        fixed: what the implementation does in every call, for which the case is posed; None for a
            case as the catalogue has it.
        tiled: whether the case is about tiles, so that it is used on grids only.
        wide: whether the case is posed in float32 and float64 only, because its logits are so large
            that half precision would have no digit of them.
    """

    name: str
    family: str
    why: str
    mask: Pattern | None = None
    bias: BiasPattern | None = None
    causal: Causal | None = None
    scale: float | None = None
    regime: Regime | None = None
    features: tuple[FeaturePattern, ...] = ()
    maskable: bool = False
    serves: frozenset[str] = frozenset()
    defined: bool = True
    idle: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    core: bool = False
    large: bool = False
    exchanged: bool = False
    grid: Grid | None = None
    fixed: Fixed | None = None
    tiled: bool = False
    wide: bool = False

    @property
    def id(self) -> str:
        """The stable id: "chapter/what/family", "chapter/what/family.grid" on a grid, and then
        "+" and the name of what is fixed for the implementation."""
        grid = f".{self.grid.name}" if self.grid else ""
        return self.off_grid + grid + (f"+{self.fixed.name}" if self.fixed else "")

    @property
    def off_grid(self) -> str:
        """The id of the case as the catalogue has it: "chapter/what/family"."""
        return f"{self.name}/{self.family}"

    @property
    def chapter(self) -> str:
        """The first part of the id, such as "mask"."""
        return self.name.split("/")[0]

    @property
    def shape(self) -> Shape:
        """The shape of the problem: that of its family, at the sizes of the grid if it has one."""
        small = FAMILIES[self.family]
        if self.fixed is not None:
            small = self.fixed.shape(small, beside=self.beside)
        return self.grid.shape(self.family, small) if self.grid else small

    @property
    def is_bare(self) -> bool:
        """Whether an implementation needs no argument but the inputs to be asked."""
        nothing = self.mask is None and self.bias is None and self.scale is None
        return nothing and not self.features and self.shape.score == "scaled-dot"

    def posed_in(self, dtype: str) -> bool:
        """Return whether the case is posed in this dtype."""
        return not self.wide or dtype_of(dtype).significand_bits >= 24

    @property
    def beside(self) -> bool:
        """Whether one input holds several, because the numbers of each are chosen."""
        one = self.fixed is not None and self.fixed.sharing == "self"
        return one and self.regime is not None and FAMILIES[self.family].sharing != "self"

    def on(self, grid: Grid) -> Case:
        """Return the same case with the sizes of a grid, and with `exchanged` False.

        Masks of patterns with the parameter `tiles` then end around the edges of tiles. A scale, if
        the case has one, is multiplied by √(former head size / head size of the grid).
        """
        return _on(self, grid)

    def with_fixed(self, fixed: Fixed) -> Case:
        """Return the same case for an implementation with this fixed, not `exchanged`."""
        made = dataclasses.replace(self, fixed=fixed, exchanged=False)
        idle = dict(self.idle)
        if made.shape.logits[2:] != self.shape.logits[2:]:
            # What is idle for a single key is felt among several.
            idle = {name: why for name, why in idle.items() if name == "weights.key_bias"}
        elif made.shape.sharing != self.shape.sharing:
            idle.pop("key", None)
        turned = fixed.rotary_base and made.shape.key_length > 1
        if turned or not made.shape.has_bias("key"):
            idle.pop("weights.key_bias", None)
        elif self.is_bare and not self.shape.has_bias("key"):
            idle |= KEY_BIAS_IDLE
        return dataclasses.replace(made, idle=MappingProxyType(idle))

    def problem(self, dtype: str) -> Problem:
        """Return the problem with its arrays rounded to `dtype`; the result is cached."""
        return _problem(self, dtype)

    def random(self, purpose: str = "") -> np.random.Generator:
        """Return a random generator whose seed depends only on the case's id and the purpose."""
        digest = hashlib.sha256(f"{self.id}:{purpose}".encode()).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "little")))

    def __hash__(self) -> int:
        return hash(self.id)


def on_tiles(mask: Pattern, tiles: Pair) -> Pattern:
    """Return the pattern with its parameter `tiles` set, or unchanged if it has no such parameter.

    `tiles` are the lengths of a tile of queries and of a tile of keys. Masks of a pattern with this
    parameter end around the edges of such tiles.
    """
    if "tiles" not in inspect.signature(mask).parameters:
        return mask
    return cast("Pattern", partial(mask, tiles=tiles))  # type: ignore[call-arg]


@lru_cache(maxsize=1024)
def _on(case: Case, grid: Grid) -> Case:
    mask, scale = case.mask, case.scale
    if mask is not None:
        mask = on_tiles(mask, grid.tiles)
    if scale is not None:
        scale *= float(np.sqrt(case.shape.head_size / grid.head_size))
    return dataclasses.replace(case, grid=grid, mask=mask, scale=scale, exchanged=False)


@lru_cache(maxsize=2048)
def _problem(case: Case, dtype: str) -> Problem:
    problem = rounded(_exact(case), dtype)
    arrays = [getattr(problem, name) for name in ARRAY_NAMES]
    arrays += [*problem.weights.named().values(), *problem.feature_arrays().values()]
    for array in arrays:
        if array is not None:
            array.setflags(write=False)
    return problem


@lru_cache(maxsize=16)
def _exact(case: Case) -> Problem:
    """Return the problem before rounding; the dtypes of a case follow each other in a plan."""
    shape, random = case.shape, case.random()
    several = apart(shape, FAMILIES[case.family].sharing) if case.beside else shape
    drawn = draw(several, random)
    mask = None if case.mask is None else case.mask(shape, random)
    bias = None if case.bias is None else case.bias(shape, random)
    if case.regime is not None:
        case.regime(several, drawn, random)
        drawn = joined(several, drawn, shape.query_width) if case.beside else drawn
    fixed: dict[str, Any] = {} if case.fixed is None else case.fixed.fields(shape)
    given = fixed.pop("causal", None), fixed.pop("scale", None)
    causal = case.causal or given[0]
    scale = given[1] if case.scale is None else case.scale
    fields: dict[str, Any] = {}
    for feature in case.features:
        fields |= feature(shape, causal, random)
    fields = fields if case.fixed is None else case.fixed.numbers(fields)
    exact = assembled(
        shape, drawn, mask=mask, attn_bias=bias, causal=causal, scale=scale, **fixed | fields
    )
    return _without_loss_on_masked_rows(exact) if case.defined or fields else exact


def _without_loss_on_masked_rows(problem: Problem) -> Problem:
    """Return the problem with a cotangent of 0 for queries that are fully masked in some head.

    The output of these queries is a convention of the implementation, on which no loss may depend.
    """
    seen = np.all(problem.allowed_in_full().any(axis=-1), axis=1)
    if seen.all():
        return problem
    return problem.replace(cotangent=np.where(seen[..., None], problem.cotangent, 0.0))


def assembled(shape: Shape, drawn: Mapping[str, Array], **fields: Any) -> Problem:
    """Return a float64 problem with this shape, these arrays and these other fields.

    Args:
        shape: the shape of the problem.
        drawn: inputs, weights and cotangent by name. An array that serves as several inputs has
            the name of the first of them.
        fields: the other fields of `Problem`, such as `mask`, `attn_bias`, `causal`, `scale` and
            all features.
    """
    weights = {
        name.removeprefix("weights."): array
        for name, array in drawn.items()
        if name.startswith("weights.")
    }
    key = drawn.get("key", drawn["query"])
    return Problem(
        shape=shape,
        dtype="float64",
        weights=Weights(**weights),
        query=drawn["query"],
        key=key,
        value=drawn.get("value", key),
        cotangent=drawn["cotangent"],
        **fields,
    )


def rounded(problem: Problem, dtype: str) -> Problem:
    """Return the problem in a dtype, with its floating-point arrays rounded to this dtype.

    These are inputs, weights, cotangent, bias and the arrays of features.
    """
    to_dtype = dtype_of(dtype).round
    inputs = {name: to_dtype(getattr(problem, name)) for name in problem.shape.distinct_inputs()}
    bias = problem.attn_bias
    return problem.replace(
        dtype=dtype,
        weights=Weights(**{n: to_dtype(array) for n, array in problem.weights.named().items()}),
        **problem.shape.spread(inputs),
        cotangent=to_dtype(problem.cotangent),
        attn_bias=None if bias is None else to_dtype(bias),
        **features.rounded(problem, to_dtype),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredCase(Case):
    """A case outside the catalogue, made from stored numbers.

    Attributes:
        stored: the problem in float64, before rounding to the requested dtype.
        path: the case file from which it was read or to which it was written; "" if there is none.
    """

    stored: Problem
    path: str = ""

    # Two stored cases may have the same id but different numbers; caches must distinguish them.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def shape(self) -> Shape:
        """The shape of the stored problem."""
        return self.stored.shape

    def problem(self, dtype: str) -> Problem:
        """Return the stored problem, rounded to `dtype`; the result is cached."""
        return _rounded(self, dtype)


@lru_cache(maxsize=64)
def _rounded(case: StoredCase, dtype: str) -> Problem:
    return rounded(case.stored, dtype)


@lru_cache(maxsize=1024)
def case_hash(case: Case) -> str:
    """Return a hash of a case's problem, `serves`, `defined` and the names in `idle`.

    The hash is the same in every process, and has 16 hexadecimal digits. It covers the float64
    numbers, which determine those of all other dtypes. Together with the name of a dtype, it
    identifies a case in that dtype. Names, texts and levels are not included.
    """
    flags = (
        case.problem("float64").digest(),
        sorted(case.serves),
        case.defined,
        sorted(case.idle),
    )
    return hashlib.sha256(repr(flags).encode()).hexdigest()[:16]


def draw(shape: Shape, random: np.random.Generator) -> Drawn:
    """Draw random inputs, weights and a cotangent for a shape; return them by name.

    Inputs that share an array are drawn once.
    """
    drawn: Drawn = {}
    inputs = shape.input_shapes()
    for name in shape.distinct_inputs():
        drawn[name] = random.standard_normal(inputs[name])
    # The gain of queries gives logits a standard deviation of about 1.5; additive scores are sums
    # of `head` products with a tanh, so their weight needs a different gain for the same spread.
    gains = {"query": 1.5, "score": 1.2}
    for name, size in shape.weight_shapes().items():
        weight = random.standard_normal(size)
        if name.endswith("_bias"):
            weight *= 0.5
        elif name == "output":
            weight /= np.sqrt(size[0] * size[1])
        elif name != "score":
            weight /= np.sqrt(size[0])
        drawn[f"weights.{name}"] = weight * gains.get(name, 1.0)
    size = (shape.batch, shape.query_length, shape.output_width)
    drawn["cotangent"] = random.standard_normal(size)
    return drawn


def _shape(
    batch: int, query: int, key: int, heads: int, head: int, widths: Sequence[int] = (), **more: Any
) -> Shape:
    """Return a shape with these sizes; `more` sets or overrides other fields.

    Without `more`, there is a key/value head for each head, and value heads have the size `head`.
    `widths` are those of query, key, value and output; without them, each is heads × head.
    """
    names = ("query_width", "key_width", "value_width", "output_width")
    sizes: dict[str, Any] = {
        "kv_heads": heads,
        "value_head_size": head,
        **dict.fromkeys(names, heads * head),
    }
    sizes |= dict(zip(names, widths, strict=False)) | more
    return Shape(
        batch=batch, query_length=query, key_length=key, heads=heads, head_size=head, **sizes
    )


FAMILIES: dict[str, Shape] = {
    # An even number of heads, because torch uses its fused path only then.
    "self": _shape(2, 7, 7, 4, 6, sharing="self"),
    "cross": _shape(3, 4, 6, 2, 5, sharing="memory"),
    "separate": _shape(2, 5, 7, 3, 4, widths=(12, 9, 11, 12)),
    "narrow": _shape(2, 6, 4, 3, 5, widths=(8, 7, 7, 9), sharing="memory"),
    "value-head": _shape(3, 4, 5, 2, 7, value_head_size=6, widths=(11, 9, 8, 11)),
    "gqa": _shape(4, 5, 7, 6, 8, kv_heads=2, widths=(10, 9, 9, 10), sharing="memory"),
    "mqa": _shape(2, 5, 5, 4, 6, kv_heads=1, widths=(9, 9, 9, 9), bias=False, sharing="self"),
    "one-query": _shape(3, 1, 6, 2, 4, sharing="memory"),
    "one-key": _shape(3, 5, 1, 2, 4),
    "one-head": _shape(2, 4, 6, 1, 5, bias=False),
    "long": _shape(1, 19, 131, 2, 8),
    # One more than a power of two: the last tile of a kernel holds a single query and key.
    "tiles": _shape(1, 129, 129, 2, 33, sharing="self"),
    # Several tiles of 64 with ragged ends, which no diagonal meets at a multiple of 16.
    "blocks": _shape(1, 87, 150, 2, 4, bias=False, sharing="memory"),
    # More positions than bfloat16 has consecutive integers (256).
    "longer": _shape(1, 300, 300, 1, 4, bias=False, sharing="separate"),
    # Lengths that are multiples of every usual tile, and heads as wide as a tensor core's.
    "full-tiles": _shape(1, 128, 128, 1, 16, sharing="self"),
    "decoding": _shape(3, 1, 20, 12, 4, kv_heads=2, widths=(24, 22, 22, 24), sharing="memory"),
    # As many tokens as heads, of size 1: a bias [heads 1] can be broadcast along tokens by mistake.
    "size-one": _shape(2, 3, 3, 3, 1, sharing="self"),
    # More batch entries than implementations compute at once.
    "large-batch": _shape(17, 4, 6, 2, 3, bias=False, sharing="memory"),
    # All sizes coincide, so code that recognises an axis by its size goes wrong.
    "square": _shape(4, 4, 4, 4, 4, sharing="memory"),
    # Heads that are wider than 64 and fill no second block of 64, nor of 16.
    "wide-head": _shape(2, 3, 5, 1, 72, bias=False, sharing="memory"),
    # Self-attention without biases, whose three projections can be one matrix product.
    "packed": _shape(3, 6, 6, 4, 5, bias=False, sharing="self"),
    # No biases, and an output of its own width, so that no two of the four weights have one shape.
    "own-width": _shape(2, 5, 5, 3, 4, widths=(12, 12, 12, 7), bias=False, sharing="self"),
    "wide-value": _shape(2, 5, 6, 4, 3, value_head_size=8, bias=False, sharing="memory"),
    "additive": _shape(2, 4, 6, 3, 5, sharing="memory", score="additive"),
    "additive-self": _shape(3, 6, 6, 2, 5, sharing="self", score="additive"),
    # For tiled cases only. Few queries, so that keys are split into parts, which are merged.
    "split": _shape(2, 1, 9, 4, 5, kv_heads=2, bias=False, sharing="separate"),
    # Lengths that are multiples of the tiles; the keys fill an odd number of them.
    "exact": _shape(1, 4, 6, 1, 4, bias=False, sharing="memory"),
    "few-queries": _shape(2, 4, 9, 6, 5, kv_heads=2, bias=False, sharing="memory"),
    "chunk": _shape(1, 5, 9, 2, 4, bias=False, sharing="memory"),
    "far": _shape(1, 4, 9, 2, 5, kv_heads=1, bias=False, sharing="separate"),
    # Several tiles on both sides, many on one side.
    "oblong": _shape(1, 5, 7, 1, 4, bias=False, sharing="memory"),
    "wide": _shape(1, 3, 9, 1, 4, bias=False, sharing="memory"),
    "tall": _shape(1, 9, 3, 2, 4, kv_heads=1, value_head_size=3, bias=False, sharing="memory"),
    # More heads than 4 bits can number, and more key/value heads than 3 bits can.
    "many-heads": _shape(
        1, 3, 5, 9, 4, kv_heads=3, widths=(12, 12, 12, 12), bias=False, sharing="memory"
    ),
}
"""The shape families, which are few because compiling frameworks compile for each new shape.

Within most families, the sizes (batch, query, key, heads, kv_heads, group, head, value_head) differ
as far as implementations allow, so that swapped axes change a shape or the answer. Widths equal
heads × head, as most layers require, except in `separate`, `narrow`, `value-head`, `gqa`, `mqa`,
`decoding`, `own-width` and `many-heads`.
"""


MOST_PLANES = 4
MOST_ELEMENTS = 2**17
"""The most elements of a mask that a record describes: larger masks are unreadable in reports."""


def describe_all(cases: Iterable[Case]) -> dict[str, CaseInfo]:
    """Return the descriptions of cases, by the id of the case."""
    return {case.id: describe(case) for case in dict.fromkeys(cases)}


def describe(case: Case) -> CaseInfo:
    """Return the description of one case: its purpose, facts, masks, hash and features."""
    problem = case.problem("float64")
    drawn = planes(problem)
    return CaseInfo(
        why=case.why,
        facts=facts(problem),
        planes=drawn[:MOST_PLANES],
        more=max(0, len(drawn) - MOST_PLANES),
        hash=case_hash(case),
        features=list(problem.features),
    )


def facts(problem: Problem) -> list[str]:
    """Return short texts on the sizes of a problem, its masks, bias, scale, score and features."""
    shape = problem.shape
    sharing = {
        "self": "query, key and value are one array",
        "memory": "key and value are one array",
        "separate": "query, key and value are three arrays",
    }
    heads = plural(shape.heads, "head")
    if shape.kv_heads != shape.heads:
        heads += f" on {plural(shape.kv_heads, 'key/value head')}"
    size = f"of size {shape.head_size}"
    if shape.value_head_size != shape.head_size:
        size += f", {shape.value_head_size} for values"
    widths = (shape.query_width, shape.key_width, shape.value_width, shape.output_width)
    every = [
        f"batch of {shape.batch}",
        f"{plural(shape.query_length, 'query', 'queries')}, {plural(shape.key_length, 'key')}",
        f"{heads} {size}",
        sharing[shape.sharing],
        f"widths {'/'.join(map(str, widths[:3]))} to {widths[3]}"
        if len(set(widths)) > 1
        else f"width {widths[0]}",
        _biases(shape),
    ]
    if shape.score != "scaled-dot":
        every.append(f"{shape.score} score")
    if problem.mask is not None:
        every.append(f"mask of shape {_size(problem.mask.shape)}")
    if problem.causal is not None:
        every.append(f"causal, aligned {problem.causal}")
    if problem.attn_bias is not None:
        every.append(f"additive bias of shape {_size(problem.attn_bias.shape)}")
    if problem.scale is not None:
        every.append(f"scale {problem.scale:g}")
    return every + [fact for entry in problem.entries for fact in entry.facts(problem)]


def _biases(shape: Shape) -> str:
    if isinstance(shape.bias, tuple):
        return f"with biases of {' and '.join(shape.bias)} only"
    return "with biases" if shape.bias else "without biases"


def planes(problem: Problem) -> list[Plane]:
    """Return each distinct mask `[query key]`, with the batch entries and heads that use it.

    The mask combines all that restricts which keys a query may attend to. The list is empty if the
    problem has no such restriction, or no queries or keys. If masks have more than `MOST_ELEMENTS`
    elements, the list holds one plane without runs.
    """
    if problem.allowed is None or problem.allowed.shape[-1] * problem.allowed.shape[-2] == 0:
        return []
    allowed = problem.allowed_in_full()
    batch, heads, queries, keys = allowed.shape
    if queries * keys > MOST_ELEMENTS:
        # Return a plane without runs, because an empty list would mean that nothing is blocked.
        return [Plane("", queries, keys, [])]
    places: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
    for entry in range(batch):
        for head in range(heads):
            places[allowed[entry, head].tobytes()].append((entry, head))
    return [
        Plane(_where(same, batch, heads), queries, keys, runs(allowed[same[0]]))
        for same in places.values()
    ]


def runs(plane: BoolArray) -> list[int]:
    """Return the lengths of alternating runs of False and True in a mask, read row by row.

    The first run is of False, so its length is 0 if the mask begins with True.
    """
    flat = plane.ravel()
    edges = np.flatnonzero(np.diff(flat)) + 1
    lengths = np.diff(np.concatenate(([0], edges, [flat.size])))
    return [*([0] if flat.size and flat[0] else []), *(int(length) for length in lengths)]


def _where(places: Sequence[tuple[int, int]], batch: int, heads: int) -> str:
    if len(places) == batch * heads:
        return ""
    entries = sorted({entry for entry, _ in places})
    of_heads = sorted({head for _, head in places})
    if len(places) != len(entries) * len(of_heads):
        return some([f"entry {entry} head {head}" for entry, head in places], 3)
    parts = [] if len(entries) == batch else [_numbered("entry", "entries", entries)]
    parts += [] if len(of_heads) == heads else [_numbered("head", "heads", of_heads)]
    return ", ".join(parts)


def _numbered(one: str, many: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{one} {numbers[0]}"
    return f"{many} {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _size(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))
