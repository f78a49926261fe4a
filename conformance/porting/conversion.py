"""Convert weights between implementations, using the parameter tables of their adapters.

A row of a table only moves elements, so a conversion does not change any bit, in any dtype. No
framework is imported. Sizes that the tensors do not determine must be given; for example, torch's
stacked matrix has the same shape for 2 and for 4 heads. All other sizes are checked, and one error
lists all tensors that are missing, unexpected or not finite, and those with wrong shapes as far as
these can be identified.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from conformance.adapter import layouts
from conformance.adapter.code import lines
from conformance.adapter.features import HeadNorm, RotaryBase, RotaryTables, Sinks
from conformance.adapter.loading import find
from conformance.adapter.native import Layer
from conformance.adapter.parameters import Parameter, ParameterTable
from conformance.cases.casefile import File, Tensor, look, write
from conformance.definition.problem import WEIGHT_AXES, Pairs, Shape, Sharing
from conformance.errors import (
    ConformanceError,
    Unsupported,
    Untranslatable,
    WrongDeclaration,
    WrongShape,
    WrongTensors,
)

NOTE = "mha-conformance.conversions"
"""The metadata key under which a file lists its conversions as JSON, the latest last."""


def convert(
    tensors: Mapping[str, Any],
    *,
    source: str,
    target: str,
    heads: int | None = None,
    kv_heads: int | None = None,
    rotary_size: int | None = None,
) -> dict[str, np.ndarray]:
    """Convert the native parameters of one implementation to those of another, bit for bit.

    Rotary embeddings rotate pairs of components. If one implementation pairs the first half of a
    head with the second half, and the other pairs neighbouring components, the components of query
    and key heads are reordered, so that the same components are paired. This also happens if
    rotation is an option of the layer: weights that were trained with rotary embeddings need the
    new order, and without rotation the order does not matter, as long as queries and keys share it.
    Nothing is reordered if an argument of either layer selects how components are paired.

    Parameters of features, such as the factors of a query/key norm or sinks, may be missing from
    `tensors`. If they are given, they are converted, and the target must have them too.

    Args:
        tensors: arrays that NumPy can read, by the native names of the source's parameter table,
            such as "in_proj_weight" `[3·width width]`; they must be exactly those of the table,
            except for parameters of features.
        source: the implementation that the tensors are from: an adapter's name ("torch-mha"), its
            title with or without the part in brackets, or path/to/file.py:NAME.
        target: the implementation that the result is for, in the same form.
        heads: the number of heads; required if the tensors do not determine it.
        kv_heads: the number of key/value heads; required in the same case.
        rotary_size: the number of components of a head that are rotated; None for all of them, 0
            for none. It is required if heads of odd size would have to be reordered.

    Returns:
        Arrays by the native names of the target's table, such as "query/kernel"
        `[embed heads head]`, in the dtypes of the source.

    Raises:
        UnknownName: there is no such implementation; the message suggests similar names.
        WrongShape: `heads` or `kv_heads` is below 1, or `rotary_size` is odd, negative or larger
            than the head size.
        WrongTensors: tensors are missing, unexpected, misshapen or not finite (all are listed), or
            NumPy cannot read one.
        Untranslatable: an implementation has no parameter table, the sizes cannot be determined, or
            the target has no place for these weights; the message gives the reason.
        ConformanceError: an implementation cannot be loaded.
    """
    given = {}
    for name, array in tensors.items():
        try:
            given[name] = Tensor.of(name, np.asarray(array))
        except (TypeError, RuntimeError) as error:
            why = " ".join(str(error).split())
            raise WrongTensors(
                f"NumPy cannot read {name} as an array ({why}); "
                "a file of safetensors holds every dtype"
            ) from error
    counted = _counted(heads=heads, kv_heads=kv_heads)
    made, _ = _converted(given, layer(source), layer(target), counted, rotary_size)
    dtypes = {given[name].dtype: np.asarray(array).dtype for name, array in tensors.items()}
    native = {dtype: it.newbyteorder("=") for dtype, it in dtypes.items()}
    return {name: tensor.bits.view(native[tensor.dtype]) for name, tensor in made.items()}


def convert_file(
    weights: Path,
    out: Path,
    *,
    source: str,
    target: str,
    heads: int | None = None,
    kv_heads: int | None = None,
    rotary_size: int | None = None,
    prefix: str = "",
    out_prefix: str = "",
    force: bool = False,
) -> Shape:
    """Convert a safetensors file as `convert` does, and add the conversion to its metadata.

    Args:
        weights: the file to read.
        out: the file to write, which is written completely or not at all; it may be `weights`.
        source: as for `convert`.
        target: as for `convert`.
        heads: as for `convert`.
        kv_heads: as for `convert`.
        rotary_size: as for `convert`.
        prefix: convert only tensors whose names begin with this, such as
            "encoder.layers.0.self_attn."; the rest of each name must be a native name. Other
            tensors are not written.
        out_prefix: a prefix for the names in the new file.
        force: overwrite an existing file.

    Returns:
        The shape that the tensors imply; its batch size and its lengths are 1.

    Raises:
        WrongTensors: as for `convert`; also if the input is missing or is not a safetensors file,
            if no name begins with `prefix`, or if the output already exists and `force` is false.
        UnknownName: as for `convert`.
        WrongShape: as for `convert`.
        Untranslatable: as for `convert`.
        ConformanceError: as for `convert`.
    """
    whose, becomes = layer(source), layer(target)
    if out.exists() and not force:
        raise WrongTensors(f"{out} exists already; --force overwrites it")
    file = look(weights)
    names = [name for name in file.header if name.startswith(prefix)]
    if not names:
        raise WrongTensors(
            f"{weights}: no tensor's name begins with {prefix!r}{_elsewhere(file, whose, '')}"
        )
    tensors = {name.removeprefix(prefix): file.read(name) for name in names}
    try:
        counted = _counted(heads=heads, kv_heads=kv_heads)
        made, shape = _converted(tensors, whose, becomes, counted, rotary_size)
    except WrongTensors as error:
        raise WrongTensors(f"{weights}: {error}{_elsewhere(file, whose, prefix)}") from error
    except Untranslatable as error:
        raise Untranslatable(f"{weights}: {error}") from error
    note = {
        "from": whose.name,
        "to": becomes.name,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        **({} if rotary_size is None else {"rotary_size": rotary_size}),
        "prefix": prefix,
        "out_prefix": out_prefix,
        "by": f"mha-conformance {metadata.version('mha-conformance')}",
    }
    renamed = {out_prefix + name: tensor for name, tensor in made.items()}
    write(out, renamed, _noted(file.metadata, note))
    return shape


def built_without_biases(target: str, shape: Shape) -> str:
    """Return the argument that builds the target without biases, such as "use_bias=False".

    Return "" if the weights have biases, or if no example of the adapter contains such an argument.
    """
    if shape.bias:
        return ""
    becomes = layer(target)
    example = becomes.example_for(shape, "float32", None, becomes.modes[0])
    build = "\n".join(lines(example.build)) if example else ""
    return next(iter(re.findall(r"\b\w*bias=False\b", build)), "")


def layer(spec: str) -> Layer:
    """Return the layer with this name, title or path.

    If several implementations have this name and the same tables, return the first of them.

    Raises:
        UnknownName: there is no such implementation.
        Untranslatable: the implementation has no weights of its own or declares no parameter table,
            or several implementations have this name and different tables.
    """
    adapters = find(spec)
    layers = [adapter for adapter in adapters if isinstance(adapter, Layer)]
    if len(layers) < len(adapters):
        raise Untranslatable(f"{spec} has no weights of its own, so there is nothing to convert")
    first = layers[0]
    if any(tables(other) != tables(first) for other in layers[1:]):
        names = " or ".join(adapter.name for adapter in layers)
        raise Untranslatable(
            f"{spec} has different tables in these implementations; name one of them: {names}"
        )
    if not any(tables(first)):
        raise Untranslatable(f"{spec} declares no parameter table")
    return first


def _counted(**counts: int | None) -> dict[str, int]:
    """Return the counts that are not None; raise `WrongShape` if one is below 1."""
    given = {name: count for name, count in counts.items() if count is not None}
    for name, count in given.items():
        if count < 1:
            raise WrongShape(f"{name} is {count}; there must be one at least")
    return given


def _converted(
    tensors: Mapping[str, Tensor],
    source: Layer,
    target: Layer,
    given: Mapping[str, int],
    rotary_size: int | None,
) -> tuple[dict[str, Tensor], Shape]:
    own = _parameters_of_features(source)
    table = _read({n: it for n, it in tensors.items() if n not in own}, source, given)
    weights = [name for row in table.rows for name in row.names]
    sizes = {name: getattr(table.shape, name) for name in SIZES}
    fitting = _fitting(source, target, list(shapes_of(sizes, weights)))
    order = _order_of_components(source, target, table.shape.head_size, rotary_size)
    made = _written(tensors, table, fitting, order)
    of_features = {own[name]: tensors[name] for name in own if name in tensors}
    return made | _of_features(of_features, source, target, table.shape, order), table.shape


def _parameters_of_features(layer: Layer) -> dict[str, str]:
    """Return a canonical name for each parameter of the layer's features, by its native name."""
    named: dict[str, str] = {}
    for feature in layer.features:
        if isinstance(feature, HeadNorm) and feature.parameters:
            named |= {feature.query: "norm.query", feature.key: "norm.key"}
        elif isinstance(feature, Sinks) and feature.parameter:
            # Sinks in other units have another name, since they cannot be converted.
            named[feature.name] = f"sinks, {feature.units}, per {feature.per}"
    return named


def _of_features(
    tensors: Mapping[str, Tensor],
    source: Layer,
    target: Layer,
    shape: Shape,
    order: np.ndarray | None,
) -> dict[str, Tensor]:
    """Return the target's parameters of features by native name, given `tensors` by canonical name.

    `order` holds, for each component of the target's heads, its index in the source's heads; None
    stands for the same order. Raise `WrongTensors` if the tensors do not fit the source, and
    `Untranslatable` if the target has no place for one of them.
    """
    becomes = {canonical: native for native, canonical in _parameters_of_features(target).items()}
    wrong = f"these are not the weights of {source.name}"
    halves = {"norm.query", "norm.key"} & tensors.keys()
    if len(halves) == 1:
        raise WrongTensors(f"{wrong}: there is only {halves.pop()}")
    made = {}
    for name, tensor in tensors.items():
        bits = tensor.bits
        size = shape.head_size if name in TURNED else 1 if "per layer" in name else shape.heads
        if bits.size != size:
            raise WrongTensors(
                f"{wrong}: wrong shape of {name} {list(bits.shape)}, expected {[size]}"
            )
        if name in TURNED and not tensor.finite:
            raise WrongTensors(f"{wrong}: NaN or infinity in {name}")
        if name not in becomes:
            raise Untranslatable(
                f"{target.name} cannot have these weights of {source.name}: it has no place for "
                f"{name}, and nothing is left out; choose another target"
            )
        if order is not None and name in TURNED:
            bits = np.ascontiguousarray(bits[..., order])
        made[becomes[name]] = Tensor(tensor.dtype, bits)
    return made


TURNED = ("query", "key", "query_bias", "key_bias", "norm.query", "norm.key")
"""Canonical weights whose last axis holds the components that rotary embeddings rotate."""


def pairs_of(layer: Layer) -> Pairs | None:
    """Return which components of a head the layer's rotary embeddings pair, such as "halves".

    Return None if the layer never rotates heads, or if one of its arguments selects the pairs.
    """
    for feature in layer.features:
        if isinstance(feature, RotaryBase | RotaryTables) and not feature.flag:
            return feature.pairs
    return None


def _order_of_components(
    source: Layer, target: Layer, head_size: int, rotary_size: int | None
) -> np.ndarray | None:
    """Return, for each component `[head]` of the target's heads, its index in the source's heads.

    Return None if both layers pair the same components, or if `pairs_of` is None for one of them.
    Raise `WrongShape` if `rotary_size` is impossible, and `Untranslatable` if pairs have to be
    reordered but the number of rotated components is odd.
    """
    size = head_size if rotary_size is None else rotary_size
    if not 0 <= size <= head_size or (size % 2 and rotary_size is not None):
        raise WrongShape(
            f"rotary_size is {size}; it must be even and at most {head_size}, the size of a head"
        )
    before, after = pairs_of(source), pairs_of(target)
    if before is None or after is None or before == after:
        return None
    if size % 2:
        raise Untranslatable(
            f"heads of size {size} have no pairs; give the number of components that turn, 0 for "
            "none, with --rotary-size (rotary_size=)"
        )
    order = np.arange(head_size)
    # Transposing two rows, one for each half, makes neighbours of pairs, and vice versa.
    sides = (2, -1) if before == "halves" else (-1, 2)
    order[:size] = order[:size].reshape(sides).T.ravel()
    return order


def _written(
    tensors: Mapping[str, Tensor],
    source: ParameterTable,
    target: ParameterTable,
    order: np.ndarray | None,
) -> dict[str, Tensor]:
    """Return the target's tensors by native name, converted by way of the canonical layout.

    `order` holds, for each component of the target's heads, its index in the source's heads; None
    stands for the same order. Raise `Untranslatable` if weights of different dtypes belong in one
    tensor.
    """
    canonical: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    for row in source.rows:
        canonical |= row.to_canonical(tensors[row.native].bits, source.shape)
        dtypes |= dict.fromkeys(row.names, tensors[row.native].dtype)
    if order is not None:
        turned = canonical.keys() & set(TURNED)
        canonical |= {name: canonical[name][..., order] for name in turned}
    written = {}
    for row in target.rows:
        if len({dtypes[name] for name in row.names}) > 1:
            several = ", ".join(f"{name} is {dtypes[name]}" for name in row.names)
            raise Untranslatable(
                f"{several}: they have one dtype in {row.native!r}; bring them to one before"
            )
        native = np.ascontiguousarray(row.to_native(canonical, target.shape))
        written[row.native] = Tensor(dtypes[row.names[0]], native)
    return written


def _fitting(source: Layer, target: Layer, shapes: Sequence[Shape]) -> ParameterTable:
    """Return the target's table for the first of these shapes that the target supports.

    Raise `Untranslatable` if the target supports none, or if its table lacks a place for a weight.
    """
    refusal = f"{target.name} cannot have these weights of {source.name}"
    reason = f"no {shapes[0].score} score"
    for shape in shapes if shapes[0].score in target.scores else ():
        try:
            target.check_shape(shape)
            rows = target.parameters_for(shape)
            break
        except Unsupported as error:
            reason = f"{error}{_widths(shape)}"
    else:
        raise Untranslatable(f"{refusal}: {reason}; choose another target")
    named = {name for row in rows for name in row.names}
    homeless = [name for name in shape.weight_shapes() if name not in named]
    if homeless:
        raise Untranslatable(
            f"{refusal}: it has no place for {', '.join(homeless)}, and nothing is left out, not "
            "even zeros; choose another target"
        )
    return ParameterTable(rows, shape)


def _widths(shape: Shape) -> str:
    """Return a text that lists the widths, or "" if all are equal, as many layers require."""
    widths = {name.removesuffix("_width"): getattr(shape, name) for name in WIDTHS}
    if len(set(widths.values())) == 1:
        return ""
    return f" (here: {', '.join(f'{name} {size}' for name, size in widths.items())})"


# Sizes from tensors

WIDTHS = ("query_width", "key_width", "value_width", "output_width")
SIZES = ("heads", "kv_heads", "head_size", "value_head_size", *WIDTHS)
SHARINGS: tuple[Sharing, ...] = ("separate", "memory", "self")

Rows = tuple[Parameter, ...]


def shapes_of(sizes: Mapping[str, int], weights: Collection[str]) -> Iterator[Shape]:
    """Yield a shape with these sizes and canonical weights for each way of sharing inputs.

    Weights determine neither the lengths, which are 1 here, nor which inputs are the same array.
    Ways of sharing that are impossible with these widths are skipped.
    """
    for sharing in SHARINGS:
        with suppress(WrongShape):
            yield Shape(
                batch=1,
                query_length=1,
                key_length=1,
                bias=any(name.endswith("_bias") for name in weights),
                score="additive" if "score" in weights else "scaled-dot",
                sharing=sharing,
                **{name: sizes[name] for name in SIZES},
            )


@lru_cache(maxsize=64)
def tables(layer: Layer) -> tuple[Rows, ...]:
    """Return every distinct table that the layer declares for the shapes that are tried.

    A table may depend on which widths are equal, on the number and the size of key/value heads, on
    biases, on the score and on shared inputs, so small shapes that differ in these are tried.
    """
    if type(layer).parameters_for is Layer.parameters_for:
        return (tuple(layer.parameters),)
    every: dict[Rows, None] = {}
    for shape in _small_shapes("additive" in layer.scores):
        with suppress(Unsupported, ConformanceError):
            every[tuple(layer.parameters_for(shape))] = None
    return tuple(every)


@lru_cache(maxsize=2)
def _small_shapes(additive: bool) -> tuple[Shape, ...]:
    """Return small shapes that differ in everything on which a table may depend.

    If `additive` is true, there are also shapes with the additive score.
    """
    widths = ((8, 8, 8, 8), (8, 6, 6, 8), (8, 6, 7, 8), (8, 8, 7, 8), (6, 8, 8, 8), (7, 6, 5, 9))
    scores = [("score",), ()] if additive else [()]
    every: list[Shape] = []
    for wide, kv_heads, value_head, score, biases in itertools.product(
        widths, (4, 2, 1), (2, 3), scores, (("query_bias",), ())
    ):
        sizes = (4, kv_heads, 2, value_head, *wide)
        every += shapes_of(dict(zip(SIZES, sizes, strict=True)), (*score, *biases))
    return tuple(every)


@lru_cache(maxsize=64)
def _always_equal(layer: Layer) -> dict[str, str]:
    """Return the pairs of sizes that the layer requires to be equal, as a mapping of their names.

    "kv_heads" is compared with "heads", and "value_head_size" with "head_size". A pair is in the
    result if its sizes are equal in all small shapes that the layer supports.
    """
    equal = {"kv_heads": "heads", "value_head_size": "head_size"}
    possible = []
    for shape in _small_shapes("additive" in layer.scores):
        with suppress(Unsupported):
            layer.check_shape(shape)
            possible.append(shape)
    return {
        name: other
        for name, other in equal.items()
        if possible and all(getattr(it, name) == getattr(it, other) for it in possible)
    }


def _asked(table: Rows, there: Collection[str]) -> Rows:
    """Return the rows of a table that apply to the tensors with the native names `there`.

    Rows for biases are left out if no tensor holds a bias, and the row for the score if no tensor
    holds the score.
    """
    held = {name for row in table if row.native in there for name in row.names}
    biases = {name for row in table for name in row.names if name.endswith("_bias")}
    dropped = (set() if held & biases else biases) | ({"score"} - held)
    return tuple(row for row in table if not set(row.names) <= dropped)


def native_shape(row: Parameter, sizes: Mapping[str, int]) -> list[int]:
    """Return the shape of the native parameter of a row, given the sizes by name."""
    return [
        sum(math.prod(sizes[name] for name in product) for product in sums[0])
        for sums in _axes(row)
    ]


Sum = tuple[tuple[str, ...], ...]
"""A sum of products of sizes; each product is a tuple of the names of its factors."""


def _axes(row: Parameter) -> list[list[Sum]]:
    """Return, for each native axis, the formulas for its size, all of which must give that size.

    A stacked axis has one formula: the sum over the row's weights. Any other axis has one formula
    for each distinct product of sizes among these weights.
    """
    canonical, native = layouts.sides(row.pattern)
    left = layouts.axes(canonical)
    if any(len(left) != len(WEIGHT_AXES[name]) for name in row.names):
        raise WrongDeclaration(
            f"parameter {row.native!r}: {row.pattern!r} does not name the axes of {row.sources}"
        )
    named = [dict(zip(left, WEIGHT_AXES[name], strict=True)) for name in row.names]
    axes: list[list[Sum]] = []
    for at, joined in enumerate(layouts.parse(native)):
        products = tuple(tuple(sizes[axis] for axis in joined) for sizes in named)
        axes.append([products] if at == row.stack else [(it,) for it in dict.fromkeys(products)])
    return axes


@dataclass(frozen=True)
class _Reading:
    """An attempt to match tensors with the rows of one table of their layer.

    `given` holds the sizes that the user gave. `equal` maps the name of a size to that of another
    size that always equals it.
    """

    source: Layer
    rows: Rows
    tensors: Mapping[str, Tensor]
    given: Mapping[str, int]
    equal: Mapping[str, str]

    @property
    def missing(self) -> list[str]:
        return [row.native for row in self.rows if row.native not in self.tensors]

    @property
    def extra(self) -> list[str]:
        return sorted(set(self.tensors) - {row.native for row in self.rows})

    def sizes(self, without: Collection[Parameter] = ()) -> dict[str, int] | None:
        """Return the given sizes and those that the tensors determine, or None if they conflict.

        Sizes also conflict if the heads cannot share the key/value heads evenly. Rows in `without`
        are left out. Sizes that remain unknown are missing from the result.
        """
        sizes = {self.equal.get(name, name): size for name, size in self.given.items()}
        if any(sizes[self.equal.get(name, name)] != size for name, size in self.given.items()):
            return None
        # An axis with one unknown size determines it, which may leave one unknown size elsewhere.
        before = -1
        while before < len(sizes):
            before = len(sizes)
            for row in self.rows:
                if row.native not in self.tensors or row in without:
                    continue
                shape, axes = self.tensors[row.native].bits.shape, _axes(row)
                if len(shape) != len(axes):
                    return None
                for size, sums in zip(shape, axes, strict=True):
                    if not all(self._tell(size, products, sizes) for products in sums):
                        return None
        sizes |= {name: sizes[other] for name, other in self.equal.items() if other in sizes}
        return None if sizes.get("heads", 0) % sizes.get("kv_heads", 1) else sizes

    def _tell(self, size: int, products: Sum, sizes: dict[str, int]) -> bool:
        """Add the size that an axis determines to `sizes`; return False only on a contradiction.

        `size` is the size of the axis, and `products` is a formula for it.
        """
        factors: Counter[tuple[str, ...]] = Counter()
        for product in products:
            names = [self.equal.get(name, name) for name in product]
            unknown = tuple(name for name in names if name not in sizes)
            factors[unknown] += math.prod(sizes[name] for name in names if name in sizes)
        size -= factors.pop((), 0)
        if not factors:
            return size == 0
        ((unknown, factor), *others) = factors.items()
        if others or len(unknown) > 1:
            return size > 0
        if size > 0 and size % factor == 0:
            sizes[unknown[0]] = size // factor
            return True
        return False

    def shape(self, sizes: Mapping[str, int]) -> Shape | None:
        """Return a supported shape with these sizes for which the source has `rows`; else None."""
        weights = [name for row in self.rows for name in row.names]
        for shape in shapes_of(sizes, weights):
            with suppress(Unsupported, WrongDeclaration):
                self.source.check_shape(shape)
                if ParameterTable(self.source.parameters_for(shape), shape).rows == self.rows:
                    return shape
        return None

    def unknown(self, sizes: Mapping[str, int]) -> ConformanceError:
        """Return the error that tells the user which size to give.

        This is the number of heads or, if `sizes` contains it, the number of key/value heads.
        """
        field = "kv_heads" if "heads" in sizes else "heads"
        divides = f", which divides {self.joined}" if field == "heads" and self.joined else ""
        return Untranslatable(
            f"the tensors of {self.source.name} do not determine the number of {field}{divides}; "
            f"give --{field.replace('_', '-')} ({field}=)"
        )

    @property
    def joined(self) -> int:
        """The number of heads times their size, read from an axis that joins both, or else 0."""
        for row in self.rows:
            shape = self.tensors[row.native].bits.shape if row.native in self.tensors else ()
            for size, sums in zip(shape, _axes(row), strict=False):
                if sums[0][0][0:1] == ("heads",) and len(sums[0][0]) == 2:
                    return size // len(sums[0])
        return 0

    def misshapen(self) -> list[str]:
        """Return a text with the expected shape for each tensor that does not fit the others.

        These are the fewest tensors (at most 3) without which all others fit. The result is [] if
        all tensors fit, or if more than 3 would have to be left out.
        """
        present = [row for row in self.rows if row.native in self.tensors]
        for count in range(min(len(present), 4)):
            for left in itertools.combinations(present, count):
                sizes = self.sizes(without=left)
                widths = [size for name, size in (sizes or {}).items() if name in WIDTHS]
                if sizes is None or not widths:
                    continue
                # A width that only the left-out tensors determine is assumed to equal the others.
                sizes = dict.fromkeys(WIDTHS, widths[0]) | sizes
                if sizes.keys() >= set(SIZES) and self.shape(sizes) is not None:
                    return [
                        f"{row.native} {list(self.tensors[row.native].bits.shape)}, "
                        f"expected {native_shape(row, sizes)}"
                        for row in left
                    ]
        return []


def _read(tensors: Mapping[str, Tensor], source: Layer, given: Mapping[str, int]) -> ParameterTable:
    """Return the source's table for the shape that the tensors imply.

    `given` holds the sizes that the user gave. Raise `Untranslatable` if a size is unknown, and
    `WrongTensors` if the tensors are not those of the source.
    """
    equal = _always_equal(source)
    readings = [
        _Reading(source, _asked(table, tensors), tensors, given, equal) for table in tables(source)
    ]
    fewest = min(len(it.missing) + len(it.extra) for it in readings)
    nearest = [it for it in readings if len(it.missing) + len(it.extra) == fewest]
    unsound = [name for name, tensor in tensors.items() if not tensor.finite]
    unknown: ConformanceError | None = None
    for reading in nearest if not fewest and not unsound else ():
        sizes = reading.sizes()
        if sizes is not None and sizes.keys() < set(SIZES):
            unknown = reading.unknown(sizes)
        elif sizes is not None and (shape := reading.shape(sizes)) is not None:
            return ParameterTable(reading.rows, shape)
    if unknown is not None:
        raise unknown
    reading = nearest[0]
    faults = {
        "missing": reading.missing,
        "unexpected": reading.extra,
        "wrong shape of": reading.misshapen(),
        "NaN or infinity in": unsound,
    }
    wrong = "; ".join(f"{what} {', '.join(names)}" for what, names in faults.items() if names)
    if wrong:
        raise WrongTensors(f"these are not the weights of {source.name}: {wrong}")
    shapes = ", ".join(f"{name} {list(tensor.bits.shape)}" for name, tensor in tensors.items())
    also = "".join(f" with {name}={count}" for name, count in given.items())
    heads = given.get("heads", 1)
    why = f"{reading.joined} is not divisible by {heads}; " if reading.joined % heads else ""
    raise WrongTensors(f"{source.name} cannot have weights of these shapes{also}: {why}{shapes}")


# Files


def _elsewhere(file: File, whose: Layer, prefix: str) -> str:
    """Return a hint that lists prefixes with which the file names parameters of the layer `whose`.

    At most three prefixes other than `prefix` are listed. If there are none, return "".
    """
    natives = {row.native for table in tables(whose) for row in table}
    prefixes = {
        name.removesuffix(native)
        for name, native in itertools.product(file.header, natives)
        if name.endswith((f".{native}", f"/{native}"))
    }
    names = sorted(prefixes - {prefix})
    more = " ..." if names[3:] else ""
    return f"; try --prefix {' or '.join(names[:3])}{more}" if names else ""


def _noted(before: Mapping[str, str], note: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a file, extended by a note on one more conversion."""
    try:
        notes = json.loads(before.get(NOTE, "[]"))
    except json.JSONDecodeError:
        notes = before[NOTE]
    notes = notes if isinstance(notes, list) else [notes]
    return {**before, NOTE: json.dumps([*notes, note])}
