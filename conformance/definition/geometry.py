"""The sizes that an implementation supports, what is fixed in it, and the shapes of cases for it.

Kernels are written for certain head sizes and work in tiles, so a mistake may appear only at their
sizes. An adapter declares a `Geometry`. The cases of the catalogue then get the sizes of a `Grid`,
one choice of sizes that the geometry allows, with lengths around the edges of its tiles.

A layer of a model may do in every call what others do on request: it is always causal, rotates
always, and takes one input only. Its adapter declares this as `Fixed`, and the cases are posed so.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast, get_args

import msgspec
import numpy as np

from conformance.definition.problem import (
    Causal,
    Pairs,
    Problem,
    Rotary,
    Shape,
    Sharing,
)
from conformance.errors import Unsupported, WrongDeclaration

Pair = tuple[int, int]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The lengths and numbers of heads that an implementation supports.

    Attributes:
        tiles: the lengths of the tiles of queries and of keys in which it works. Lengths of the
            cases are chosen around their edges.
        multiples: the number of queries must be a multiple of the first, and the number of keys a
            multiple of the second.
        greatest_length: the greatest number of queries and of keys; 0 for no limit.
        heads: the allowed numbers of query heads; empty if all are.
        groups: the allowed numbers of query heads per key/value head; empty if all are.
    """

    tiles: Pair = (64, 64)
    multiples: Pair = (1, 1)
    greatest_length: int = 0
    heads: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()

    def lengths(self, queries: int, keys: int, *, equal: bool) -> Pair:
        """Return the number of queries and of keys for a case that wants `queries` and `keys`.

        Each is the least allowed length that is not below the wanted one. If that would exceed
        `greatest_length`, it is the greatest allowed length. If `equal` is true, both are the same.
        """
        if equal:
            each = self._length(max(queries, keys), math.lcm(*self.multiples))
            return each, each
        return self._length(queries, self.multiples[0]), self._length(keys, self.multiples[1])

    def _length(self, wanted: int, multiple: int) -> int:
        length = -(-wanted // multiple) * multiple
        if self.greatest_length and length > self.greatest_length:
            length = self.greatest_length // multiple * multiple
        return length

    def numbers_of_heads(self, heads: int, group: int) -> Pair:
        """Return the allowed numbers of query heads and of key/value heads nearest to those wanted.

        The number of query heads per key/value head is chosen first. If all numbers of query heads
        are allowed, `heads` is rounded up to a multiple of it.

        Args:
            heads: the wanted number of query heads.
            group: the wanted number of query heads per key/value head.
        """
        groups = self.groups or (range(1, max(self.heads) + 1) if self.heads else (group,))
        shared = [each for each in groups if any(n % each == 0 for n in self.heads)] or groups
        group = min(shared, key=lambda each: abs(each - group))
        every = [each for each in self.heads if each % group == 0] or [-(-heads // group) * group]
        heads = min(every, key=lambda each: abs(each - heads))
        return heads, heads // group


class Grid(Limits, frozen=True, kw_only=True):
    """One choice of sizes for the cases of the catalogue.

    Attributes:
        head_size: the size of query and key heads.
        value_head_size: the size of value heads in the families in whose catalogue shapes value
            heads and key heads differ in size; 0 if value heads always get the size of key heads.
        only_pairs: whether value heads have the size `value_head_size` in all families, because the
            implementation does not support value heads of the size of key heads.
        layer: whether widths that equal heads × head size in the catalogue also equal it on this
            grid, as most layers require. If this is False, such widths are 32, because otherwise
            the suite's own projections would take most of the time.
    """

    head_size: int
    value_head_size: int = 0
    only_pairs: bool = False
    layer: bool = False

    @property
    def name(self) -> str:
        """The name of the grid, such as "d128t128x64", from which `parse` restores the grid."""
        parts = [f"d{self.head_size}"]
        mark = "-" if self.only_pairs else "v"
        parts += [f"{mark}{self.value_head_size}"] if self.value_head_size else []
        parts += ["t{}x{}".format(*self.tiles)]
        parts += ["m{}x{}".format(*self.multiples)] if self.multiples != (1, 1) else []
        parts += [f"l{self.greatest_length}"] if self.greatest_length else []
        parts += ["h" + "-".join(map(str, self.heads))] if self.heads else []
        parts += ["g" + "-".join(map(str, self.groups))] if self.groups else []
        return "".join(parts) + ("-layer" if self.layer else "")

    @staticmethod
    def parse(name: str) -> Grid | None:
        """Return the grid with this name, or None if it is not the name of a grid."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        numbers = {part: tuple(map(int, re.findall(r"\d+", text or ""))) for part, text in
                   found.groupdict().items()}  # fmt: skip
        return Grid(
            head_size=numbers["head"][0],
            value_head_size=(*numbers["value"], *numbers["only"], 0)[0],
            only_pairs=bool(numbers["only"]),
            tiles=_pair(numbers["tiles"]),
            multiples=_pair(numbers["multiples"] or (1, 1)),
            greatest_length=(*numbers["longest"], 0)[0],
            heads=numbers["heads"],
            groups=numbers["groups"],
            layer=name.endswith("-layer"),
        )

    def shape(self, family: str, small: Shape) -> Shape:
        """Return the shape that the cases of a shape family have on this grid.

        The batch is at most 2, because cases of these lengths are costly. Lengths and numbers of
        heads are those that the grid allows.

        Args:
            family: the name of the family.
            small: the shape of the family in the catalogue.
        """
        query_tile, key_tile = self.tiles
        queries, keys = _LENGTHS.get(family, _beyond_a_tile(small))(query_tile, key_tile)
        queries, keys = self.lengths(queries, keys, equal=small.sharing == "self")
        heads, kv_heads = _HEADS.get(family, (small.heads, small.kv_heads))
        heads, kv_heads = self.numbers_of_heads(heads, heads // kv_heads)
        head = value_head = self.head_size
        if self.only_pairs or small.value_head_size != small.head_size:
            value_head = self.value_head_size or self.head_size
        joined, usual = small.heads * small.head_size, (_WIDTH, heads * head)
        names = ("query_width", "key_width", "value_width", "output_width")
        widths: dict[str, Any] = {}
        for name in names:
            width = getattr(small, name)
            widths[name] = usual[self.layer] if width == joined else width
        return dataclasses.replace(
            small,
            batch=min(small.batch, 2),
            query_length=queries,
            key_length=keys,
            heads=heads,
            kv_heads=kv_heads,
            head_size=head,
            value_head_size=value_head,
            **widths,
        )


LEAST_TILE = 4
"""The length of tiles on grids for implementations that declare tiles of 1 or 2.

It is a multiple of both. With smaller tiles, cases would have no room for what they test."""


MOST_SIZE = 8192
"""The maximum of each declared size of heads, tile, multiple, or number of heads or groups.

With more, the arrays of a single case would not fit into the memory of most machines."""


class Geometry(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes that an implementation supports, as its adapter declares them.

    Attributes:
        head_sizes: the sizes of query and key heads, the most important one first. Each case is run
            with the first; cases of level "core" are run with all of them.
        value_head_sizes: the size of value heads for each element of `head_sizes`; empty if value
            heads have the size of key heads. A head size may be repeated with a different size of
            value heads: `head_sizes=(64, 64), value_head_sizes=(64, 32)`.

    Raises:
        WrongDeclaration: if the sizes contradict each other, or are not positive integers, or one
            other than `greatest_length` exceeds `MOST_SIZE`.
    """

    head_sizes: tuple[int, ...]
    value_head_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("head_sizes", "value_head_sizes", "tiles", "multiples", "heads", "groups"):
            sizes = getattr(self, name)
            if not isinstance(sizes, tuple) or not all(map(_is_size, sizes)):
                raise WrongDeclaration(
                    f"geometry: {name} is {sizes!r}; it must be a tuple of sizes"
                )
            if sizes and max(sizes) > MOST_SIZE:
                raise WrongDeclaration(f"geometry: {name} is {sizes!r}; at most {MOST_SIZE:,}")
        if not self.head_sizes:
            raise WrongDeclaration("geometry: head_sizes is empty; name at least one")
        for name in ("tiles", "multiples"):
            if len(getattr(self, name)) != 2:
                raise WrongDeclaration(
                    f"geometry: {name} must be two sizes, of queries and of keys"
                )
        if self.value_head_sizes and len(self.value_head_sizes) != len(self.head_sizes):
            raise WrongDeclaration(
                f"geometry: {len(self.value_head_sizes)} value_head_sizes for "
                f"{len(self.head_sizes)} head_sizes; name one for each"
            )
        if len({*self.pairs}) != len(self.pairs):
            raise WrongDeclaration(f"geometry: head_sizes is {self.head_sizes!r}, one twice")
        limit, multiple = self.greatest_length, math.lcm(*self.multiples)
        if limit != 0 and not (_is_size(limit) and limit >= multiple):
            raise WrongDeclaration(
                f"geometry: no length is a multiple of {multiple} and at most {limit!r}"
            )
        if limit and max(self.tiles) > limit:
            raise WrongDeclaration(
                f"geometry: tiles are {self.tiles!r}, longer than the greatest length, {limit}"
            )
        if self.heads and self.groups:
            for group in self.groups:
                if not any(heads % group == 0 for heads in self.heads):
                    raise WrongDeclaration(
                        f"geometry: none of {list(self.heads)} heads can share key/value heads "
                        f"in groups of {group}"
                    )

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The supported pairs (size of key heads, size of value heads)."""
        return tuple(zip(self.head_sizes, self.value_head_sizes or self.head_sizes, strict=True))

    def grids(self, *, layer: bool) -> tuple[Grid, ...]:
        """Return the grids for all head sizes, in the order in which the head sizes are declared.

        A head size has one grid for each of its value head sizes that differs from it, or a single
        grid if none differs. `layer` is the field `Grid.layer` of all these grids.
        """
        limits = {name: getattr(self, name) for name in Limits.__struct_fields__}
        limits["tiles"] = tuple(tile if tile > 2 else LEAST_TILE for tile in self.tiles)
        found = []
        for head in dict.fromkeys(self.head_sizes):
            values = [value for size, value in self.pairs if size == head]
            for value in [value for value in values if value != head] or [0]:
                only = bool(value) and head not in values
                found.append(
                    Grid(
                        head_size=head,
                        value_head_size=value,
                        only_pairs=only,
                        layer=layer,
                        **limits,
                    )
                )
        return tuple(found)

    def check(self, shape: Shape) -> None:
        """Raise `Unsupported` if a shape is not within the declared sizes."""
        if shape.head_size not in self.head_sizes:
            raise Unsupported(f"head size {shape.head_size}; declared are {_list(self.head_sizes)}")
        if (shape.head_size, shape.value_head_size) not in self.pairs:
            raise Unsupported(f"value heads of size {shape.value_head_size}")
        lengths = {"queries": shape.query_length, "keys": shape.key_length}
        for (name, length), multiple in zip(lengths.items(), self.multiples, strict=True):
            if length % multiple:
                raise Unsupported(f"{length} {name}, which is no multiple of {multiple}")
            if self.greatest_length and length > self.greatest_length:
                raise Unsupported(f"{length} {name}; at most {self.greatest_length} are declared")
        if self.heads and shape.heads not in self.heads:
            raise Unsupported(f"{shape.heads} heads; declared are {_list(self.heads)}")
        if self.groups and shape.group not in self.groups:
            raise Unsupported(f"key/value heads shared by {shape.group} heads")

    def has(self, shape: Shape) -> bool:
        """Return whether a shape is within the declared sizes."""
        try:
            self.check(shape)
        except Unsupported:
            return False
        return True


PROJECTIONS = ("query", "key", "value", "output")
"""The names of the projections of a layer."""


class Fixed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an implementation does in every call, or never has, without an argument for it.

    The cases of the catalogue are posed so: a case without a causal mask gets the one that is
    declared, for example. A case that contradicts the declaration is unsupported.

    Attributes:
        causal: the alignment of the causal mask of every call; None if there is none.
        rotary_base: the base of the rotary embedding of every call; 0 if there is none.
        rotary_pairs: which components form a pair, as in `Rotary`.
        rotary_size: how many components of a head are rotated; 0 if all are, in which case head
            sizes are even.
        scale: the scale of the logits of every call, such as 1; 0 if it is 1/√head.
        base: the base of each rotary embedding that a call asks for; 0 if a call says it.
        norm_epsilon: the ε of each query/key norm that a call asks for; 0 if a call says it.
        sharing: "self" if there is one input, "memory" if key and value are one; "" if there are
            three.
        bias: True if all projections have biases, False if none has, the names of those that have,
            such as `("query", "key", "value")` or `("output",)`, or None if the layer is built as a
            case demands.
        width: "heads" if every width is the number of heads × their size, and value heads have the
            size of query heads; "" if sizes are free.
        output_width: "query" if the output is as wide as the query; "" if it is free.
        value_heads: "alike" if value heads have the size of query heads; "" if it is free.
        grouped: False if every query head has a key/value head of its own; None if they may share.

    Raises:
        WrongDeclaration: if a field has a value that there is not.
    """

    causal: Causal | None = None
    rotary_base: float = 0.0
    rotary_pairs: Pairs = "halves"
    rotary_size: int = 0
    scale: float = 0.0
    base: float = 0.0
    norm_epsilon: float = 0.0
    sharing: Sharing | Literal[""] = ""
    bias: bool | tuple[str, ...] | None = None
    width: Literal["heads", ""] = ""
    output_width: Literal["query", ""] = ""
    value_heads: Literal["alike", ""] = ""
    grouped: Literal[False] | None = None

    def __post_init__(self) -> None:
        choices: dict[str, tuple[Any, ...]] = {
            "causal": (*get_args(Causal), None),
            "rotary_pairs": get_args(Pairs),
            "sharing": (*get_args(Sharing), ""),
            "width": ("heads", ""),
            "output_width": ("query", ""),
            "value_heads": ("alike", ""),
            "grouped": (False, None),
        }
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                listed = ", ".join(map(repr, known))
                raise WrongDeclaration(f"Fixed.{name} is {value!r}; say one of {listed}")
        biased = self.bias if isinstance(self.bias, tuple) else ()
        if not isinstance(self.bias, bool | tuple | None) or not set(biased) < set(PROJECTIONS):
            raise WrongDeclaration(
                f"Fixed.bias is {self.bias!r}; say True, False, or some of {', '.join(PROJECTIONS)}"
            )
        for name in ("rotary_base", "rotary_size", "scale", "base", "norm_epsilon"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise WrongDeclaration(f"Fixed.{name} is {value!r}; say a number, 0 for none")
        if self.rotary_size % 2:
            raise WrongDeclaration("Fixed.rotary_size is odd; components are rotated in pairs")
        if not self.name:
            raise WrongDeclaration("Fixed() fixes nothing; say what is fixed, or leave it out")

    @property
    def name(self) -> str:
        """A name such as "causal-bottom-right+self", which `parse` reads."""
        parts = [f"causal-{self.causal}"] if self.causal else []
        if self.rotary_base:
            size = f"-{self.rotary_size}" if self.rotary_size else ""
            parts += [f"rotary-{self.rotary_pairs}-{self.rotary_base:g}{size}"]
        for name in ("scale", "base", "norm_epsilon"):
            if value := getattr(self, name):
                parts.append(f"{name.removeprefix('norm_')}-{value:g}")
        parts += [self.sharing] if self.sharing else []
        of = "-".join(self.bias) if isinstance(self.bias, tuple) else ""
        biases = f"biases-{of}" if of else "biases" if self.bias else "no-biases"
        parts += [] if self.bias is None else [biases]
        parts += ["joined"] if self.width else []
        parts += ["output-as-query"] if self.output_width else []
        parts += ["value-heads-alike"] if self.value_heads else []
        parts += [] if self.grouped is None else ["ungrouped"]
        return "+".join(parts)

    @staticmethod
    def parse(name: str) -> Fixed | None:
        """Return the declaration with this name, or None if it is not the name of one."""
        found = _FIXED.fullmatch(name)
        if found is None or not name:
            return None
        has = found.groupdict()
        of = tuple(has["of"].split("-")) if has["of"] else ()
        if not set(of) <= set(PROJECTIONS):
            return None
        return Fixed(
            causal=cast("Causal | None", has["causal"]),
            rotary_base=float(has["base"] or 0),
            rotary_pairs=cast("Pairs", has["pairs"] or "halves"),
            rotary_size=int(has["size"] or 0),
            scale=float(has["scale"] or 0),
            base=float(has["of_each"] or 0),
            norm_epsilon=float(has["epsilon"] or 0),
            sharing=cast("Sharing", has["sharing"] or ""),
            bias=of or {None: None, "biases": True, "no-biases": False}[has["bias"]],
            width="heads" if has["joined"] else "",
            output_width="query" if has["output"] else "",
            value_heads="alike" if has["alike"] else "",
            grouped=False if has["ungrouped"] else None,
        )

    def shape(self, small: Shape, *, beside: bool = False) -> Shape:
        """Return the shape of a family of cases for such an implementation.

        Args:
            small: the shape of the family in the catalogue.
            beside: whether the one input of self-attention holds what the catalogue has as several
                inputs, beside each other along its width; see `joined`.
        """
        head, joined = small.head_size, small.heads * small.head_size
        if self.rotary_base and not self.rotary_size:
            head += head % 2
        head = max(head, self.rotary_size)
        fields: dict[str, Any] = {"head_size": head}
        alike = self.width or self.value_heads
        if alike or small.value_head_size == small.head_size:
            fields["value_head_size"] = head
        if self.grouped is False:
            fields["kv_heads"] = small.heads
        names = ("query_width", "key_width", "value_width", "output_width")
        for name in names:
            if self.width or getattr(small, name) == joined:
                fields[name] = small.heads * head
        if self.output_width:
            fields["output_width"] = fields.get("query_width", small.query_width)
        if self.bias is not None:
            fields["bias"] = self.bias
        if self.sharing == "self":
            length = max(small.query_length, small.key_length)
            fields |= {"query_length": length, "key_length": length, "sharing": "self"}
            width = fields.get("query_width", small.query_width)
            if beside and not self.width:
                parts = small.distinct_inputs()
                width = sum(fields.get(f"{n}_width", getattr(small, f"{n}_width")) for n in parts)
            fields |= dict.fromkeys(names, width)
        elif self.sharing == "memory" and small.sharing == "separate":
            width = fields.get("key_width", small.key_width)
            fields |= {"value_width": width, "sharing": "memory"}
        return dataclasses.replace(small, **fields)

    def rotary(self, shape: Shape) -> Rotary | None:
        """Return the rotation of every call for this shape, or None if there is none."""
        if not self.rotary_base:
            return None
        size = self.rotary_size or shape.head_size // 2 * 2
        return Rotary(size=size, base=self.rotary_base, pairs=self.rotary_pairs)

    def fields(self, shape: Shape) -> dict[str, Any]:
        """Return the fields of `Problem` that every problem has, for this shape."""
        rotary = self.rotary(shape)
        fields: dict[str, Any] = {} if rotary is None else {"rotary": rotary}
        fields |= {"causal": self.causal} if self.causal else {}
        return fields | ({"scale": self.scale} if self.scale else {})

    def numbers(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields of `Problem` with the fixed base and ε, where they have one."""
        found = dict(fields)
        if self.base and fields.get("rotary") is not None:
            found["rotary"] = dataclasses.replace(fields["rotary"], base=self.base)
        if self.norm_epsilon and fields.get("norm") is not None:
            found["norm"] = dataclasses.replace(fields["norm"], epsilon=self.norm_epsilon)
        return found

    def check(self, problem: Problem) -> None:
        """Raise `Unsupported` if a problem asks for a call without what is done in every call."""
        shape = problem.shape
        square = shape.query_length == shape.key_length
        if self.causal and not (problem.causal and (square or problem.causal == self.causal)):
            raise Unsupported(f"it is always causal, aligned {self.causal}")
        if self.rotary_base and problem.rotary != self.rotary(shape):
            raise Unsupported(f"it always rotates, by {self.rotary(shape)}")
        if self.scale and problem.scale != self.scale:
            raise Unsupported(f"its scale is always {self.scale:g}")
        self.check_shape(shape)

    def check_shape(self, shape: Shape) -> None:
        """Raise `Unsupported` if a shape has not what every call has."""
        if self.sharing == "self" and shape.sharing != "self":
            raise Unsupported("self-attention only")
        if self.sharing == "memory" and shape.sharing == "separate":
            raise Unsupported("key and value are always one array")
        if self.output_width and shape.output_width != shape.query_width:
            raise Unsupported("the output is always as wide as the query")
        if self.bias is not None and shape.bias != self.bias:
            of = f" of {' and '.join(self.bias)}" if isinstance(self.bias, tuple) else ""
            raise Unsupported(f"it always has biases{of}" if self.bias else "it has no biases")


def fixed_for(problem: Problem, numbers: Mapping[str, float]) -> dict[str, float]:
    """Return those of the fixed numbers whose feature the problem has."""
    has = {"base": problem.rotary is not None, "norm_epsilon": problem.norm is not None}
    return {name: number for name, number in numbers.items() if has[name]}


def fixing(fixed: Fixed | None, *, base: float = 0.0, norm_epsilon: float = 0.0) -> Fixed | None:
    """Return what is fixed for an implementation, with the numbers that are not 0 fixed too."""
    if not (base or norm_epsilon):
        return fixed
    if fixed is None:
        return Fixed(base=base, norm_epsilon=norm_epsilon)
    return msgspec.structs.replace(fixed, base=base, norm_epsilon=norm_epsilon)


_FIXED = re.compile(
    r"(?:\+?causal-(?P<causal>top-left|bottom-right))?"
    r"(?:\+?rotary-(?P<pairs>halves|interleaved)-(?P<base>[\d.e+]+?)(?:-(?P<size>\d+))?(?=\+[a-z]|$))?"
    r"(?:\+?scale-(?P<scale>[\d.e+-]+?)(?=\+[a-z]|$))?"
    r"(?:\+?base-(?P<of_each>[\d.e+-]+?)(?=\+[a-z]|$))?"
    r"(?:\+?epsilon-(?P<epsilon>[\d.e+-]+?)(?=\+[a-z]|$))?"
    r"(?:\+?(?P<sharing>self|memory|separate))?"
    r"(?:\+?(?P<bias>biases(?:-(?P<of>[a-z-]+))?|no-biases))?"
    r"(?:\+?(?P<joined>joined))?"
    r"(?:\+?(?P<output>output-as-query))?"
    r"(?:\+?(?P<alike>value-heads-alike))?"
    r"(?:\+?(?P<ungrouped>ungrouped))?"
)
"""The pattern of `Fixed.name`."""


def apart(shape: Shape, sharing: Sharing) -> Shape:
    """Return the shape of several inputs that fit beside each other into one of self-attention."""
    parts = dataclasses.replace(shape, sharing=sharing).distinct_inputs()
    each = shape.query_width // len(parts)
    widths: dict[str, Any] = {f"{name}_width": each for name in parts}
    if sharing == "memory":
        widths["value_width"] = widths["key_width"]
    return dataclasses.replace(shape, sharing=sharing, **widths)


def joined(shape: Shape, drawn: Mapping[str, np.ndarray], width: int) -> dict[str, np.ndarray]:
    """Return inputs and weights of self-attention that compute the same as several inputs.

    The inputs lie beside each other along the width of one, and the weight of each projection is 0
    for those of the others. What is left of the width repeats a part of the query.

    Args:
        shape: the shape of the several inputs, which have the same length, as `apart` returns it.
        width: the width of the one input.
        drawn: their numbers and the weights, by name, as `draw` returns them.
    """
    names = shape.distinct_inputs()
    ends = np.cumsum([drawn[name].shape[2] for name in names])
    found = {name: array for name, array in drawn.items() if name not in names}
    parts = [drawn[name] for name in names]
    rest = drawn["query"][:, :, : width - ends[-1]]
    found["query"] = np.concatenate([*parts, rest], axis=2)
    for name in ("query", "key", "value"):
        place = names.index(name if name in names else "key")
        weight = drawn[f"weights.{name}"]
        whole = np.zeros((width, *weight.shape[1:]))
        whole[ends[place] - len(weight) : ends[place]] = weight
        found[f"weights.{name}"] = whole
    return found


LARGE = (
    Grid(head_size=64, tiles=(64, 64)),
    Grid(head_size=128, value_head_size=64, tiles=(128, 128)),
)
"""The grids of level "large", for implementations that accept every size."""


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _list(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))


def _pair(numbers: tuple[int, ...]) -> Pair:
    return numbers[0], numbers[1]


_NAME = re.compile(
    r"d(?P<head>\d+)(v(?P<value>\d+)|-(?P<only>\d+))?t(?P<tiles>\d+x\d+)(m(?P<multiples>\d+x\d+))?"
    r"(l(?P<longest>\d+))?(h(?P<heads>\d+(-\d+)*))?(g(?P<groups>\d+(-\d+)*))?(-layer)?"
)

_WIDTH = 32

Lengths = Callable[[int, int], Pair]

# Around the edges of tiles: one less, exact, one more, and several tiles with a partial one.
_LENGTHS: Mapping[str, Lengths] = {
    "self": lambda q, k: (q + 1, k + 1),
    "cross": lambda q, k: (q - 1, 2 * k + 1),
    "separate": lambda q, k: (q + 1, k - 1),
    "narrow": lambda q, k: (q, 2 * k),
    "value-head": lambda q, k: (q + 7, k + 1),
    "gqa": lambda q, k: (q + 1, k + k // 2),
    "mqa": lambda q, k: (q, k),
    "one-query": lambda q, k: (1, 2 * k + 1),
    "one-key": lambda q, k: (q + 1, 1),
    "one-head": lambda q, k: (2 * q + 1, k + 1),
    "long": lambda q, k: (q // 4 + 3, 3 * k + k // 3),
    "tiles": lambda q, k: (2 * q + 1, 2 * k + 1),
    "blocks": lambda q, k: (q, k + 1),
    "longer": lambda q, k: (3 * max(q, k) + max(q, k) // 3,) * 2,
    "decoding": lambda q, k: (1, 4 * k + k // 3),
    "split": lambda q, k: (1, 8 * k + 1),
    "exact": lambda q, k: (2 * q, 3 * k),
    "few-queries": lambda q, k: (4, 2 * k + 1),
    "chunk": lambda q, k: (16, 8 * k + k // 3),
    "oblong": lambda q, k: (2 * q + 1, 3 * k + k // 3),
    "wide": lambda q, k: (q // 4 + 3, 8 * k + 1),
    "tall": lambda q, k: (8 * q + 1, k // 4 + 7),
    "many-heads": lambda q, k: (q // 4 + 3, k // 4 + 7),
    "far": lambda q, k: (4, max(16_385, 8 * k + 1)),
}

_HEADS: Mapping[str, Pair] = {
    "self": (2, 2),
    "mqa": (16, 1),
    "few-queries": (16, 1),
    "decoding": (20, 10),
    "many-heads": (20, 10),
}
"""The numbers of query and key/value heads that families have on a grid, if these differ from their
numbers in the catalogue. More heads matter there because kernels also divide work by heads."""


def _beyond_a_tile(small: Shape) -> Lengths:
    """Return a function from tiles to the lengths of a family that is not in `_LENGTHS`.

    Each length is one tile longer than in `small`, the family's shape in the catalogue, except that
    a length of 1 remains 1.
    """

    def lengths(query_tile: int, key_tile: int) -> Pair:
        queries, keys = small.query_length, small.key_length
        return (
            queries if queries == 1 else query_tile + queries,
            keys if keys == 1 else key_tile + keys,
        )

    return lengths
