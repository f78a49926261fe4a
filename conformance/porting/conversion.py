"""Weights between implementations, through the parameter tables of their adapters.

A row of a table only moves elements, so a conversion changes no bit, in any dtype, and no framework
is imported. Sizes that the tensors do not determine have to be given: torch's stacked matrix is the
same for 2 and for 4 heads. All others are checked, and one error lists everything that is wrong.
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
from conformance.adapter.layer import Layer
from conformance.adapter.loading import find
from conformance.adapter.parameters import Parameter, ParameterTable
from conformance.cases.tensors import File, Tensor, look, write
from conformance.definition.problem import WEIGHT_AXES, Shape, Sharing
from conformance.errors import (
    ConformanceError,
    Unsupported,
    Untranslatable,
    WrongDeclaration,
    WrongShape,
    WrongTensors,
)

NOTE = "mha-conformance.conversions"
"""Where the metadata of a file says how it came about: a JSON list, the latest last."""


def convert(
    tensors: Mapping[str, Any],
    *,
    source: str,
    target: str,
    heads: int | None = None,
    kv_heads: int | None = None,
) -> dict[str, np.ndarray]:
    """Return native parameters of one implementation as those of another, bit for bit.

    Args:
        tensors: arrays that NumPy reads, by the native names of the source's parameter table, such
            as "in_proj_weight" `[3·width width]`. All of the table and nothing else.
        source: the implementation that they are from: an adapter's name ("torch-mha"), its title
            with or without the part in brackets, or path/to/file.py:NAME.
        target: the implementation that they are for, likewise.
        heads: the number of heads, needed if the tensors do not determine it.
        kv_heads: the number of key/value heads, likewise.

    Returns:
        Arrays by the native names of the target's table, such as "query/kernel"
        `[embed heads head]`, each in the dtype in which it came.

    Raises:
        UnknownName: no such implementation; the message has the nearest names.
        WrongTensors: tensors are missing, too many, misshapen or not finite; all are listed.
        Untranslatable: the sizes cannot be read, or the target cannot have these weights; the
            message has the reason.
    """
    given = {}
    for name, array in tensors.items():
        try:
            given[name] = Tensor.of(name, np.asarray(array))
        except (TypeError, RuntimeError) as error:
            told = " ".join(str(error).split())
            raise WrongTensors(
                f"{name} is no array that NumPy can read ({told}); "
                "a file of safetensors holds every dtype"
            ) from error
    made, _ = _converted(given, layer(source), layer(target), _counted(heads, kv_heads))
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
    prefix: str = "",
    out_prefix: str = "",
    force: bool = False,
) -> Shape:
    """Convert safetensors files as `convert` does; keep the metadata, and note the conversion.

    Args:
        weights: the file to read.
        out: the file to write, as a whole or not at all; it may be the same.
        source: as for `convert`.
        target: as for `convert`.
        heads: as for `convert`.
        kv_heads: as for `convert`.
        prefix: only tensors whose names begin with this, such as "encoder.layers.0.self_attn.";
            it is no part of the native name. All others are ignored, and not written.
        out_prefix: what the names in the new file begin with.
        force: overwrite a file that is there.

    Returns:
        The shape that was read from the tensors; its lengths are 1.

    Raises:
        WrongTensors: as `convert`; or a file is not there, no safetensors, or in the way.
        UnknownName: as `convert`.
        Untranslatable: as `convert`.
    """
    whose, becomes = layer(source), layer(target)
    if out.exists() and not force:
        raise WrongTensors(f"{out} is there already; --force overwrites it")
    file = look(weights)
    names = [name for name in file.header if name.startswith(prefix)]
    if not names:
        raise WrongTensors(
            f"{weights}: no tensor's name begins with {prefix!r}{_elsewhere(file, whose, '')}"
        )
    tensors = {name.removeprefix(prefix): file.read(name) for name in names}
    try:
        made, shape = _converted(tensors, whose, becomes, _counted(heads, kv_heads))
    except WrongTensors as error:
        raise WrongTensors(f"{weights}: {error}{_elsewhere(file, whose, prefix)}") from error
    except Untranslatable as error:
        raise Untranslatable(f"{weights}: {error}") from error
    note = {
        "from": whose.name,
        "to": becomes.name,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "prefix": prefix,
        "out_prefix": out_prefix,
        "by": f"mha-conformance {metadata.version('mha-conformance')}",
    }
    renamed = {out_prefix + name: tensor for name, tensor in made.items()}
    write(out, renamed, _noted(file.metadata, note))
    return shape


def built_without_biases(target: str, shape: Shape) -> str:
    """Return the argument that builds the target without biases, such as "use_bias=False".

    "" if the weights have biases, or if the adapter has no example.
    """
    becomes = layer(target)
    if shape.bias:
        return ""
    example = becomes.example_for(shape, "float32", None, becomes.modes[0])
    found = re.search(r"\b\w*bias=False\b", "\n".join(lines(example.build))) if example else None
    return found[0] if found else ""


def layer(spelled: str) -> Layer:
    """Return the layer of this name, title or path; raises `Untranslatable` if it has no table."""
    found = find(spelled)
    layers = [adapter for adapter in found if isinstance(adapter, Layer)]
    if len(layers) < len(found):
        raise Untranslatable(f"{spelled} has no weights of its own, so there is nothing to convert")
    first = layers[0]
    if any(tables(other) != tables(first) for other in layers[1:]):
        names = " or ".join(adapter.name for adapter in layers)
        raise Untranslatable(f"{spelled} does not have the same table everywhere; say {names}")
    if not any(tables(first)):
        raise Untranslatable(f"{spelled} declares no parameter table")
    return first


def _counted(heads: int | None, kv_heads: int | None) -> dict[str, int]:
    given = {"heads": heads, "kv_heads": kv_heads}
    for name, count in given.items():
        if count is not None and count < 1:
            raise WrongShape(f"{name} is {count}; there must be one at least")
    return {name: count for name, count in given.items() if count is not None}


def _converted(
    tensors: Mapping[str, Tensor], source: Layer, target: Layer, given: Mapping[str, int]
) -> tuple[dict[str, Tensor], Shape]:
    table = _read(tensors, source, given)
    weights = [name for row in table.rows for name in row.names]
    sizes = {name: getattr(table.shape, name) for name in SIZES}
    fitting = _fitting(source, target, list(shapes_of(sizes, weights)))
    return _written(tensors, table, fitting), table.shape


def _written(
    tensors: Mapping[str, Tensor], source: ParameterTable, target: ParameterTable
) -> dict[str, Tensor]:
    """Return the target's tensors, by way of the canonical layout."""
    canonical: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    for row in source.rows:
        canonical |= row.to_canonical(tensors[row.native].bits, source.shape)
        dtypes |= dict.fromkeys(row.names, tensors[row.native].dtype)
    made = {}
    for row in target.rows:
        own = {dtypes[name] for name in row.names}
        if len(own) > 1:
            told = ", ".join(f"{name} is {dtypes[name]}" for name in row.names)
            raise Untranslatable(
                f"{told}: they have one dtype in {row.native!r}; bring them to one before"
            )
        native = row.to_native(canonical, target.shape)
        made[row.native] = Tensor(own.pop(), np.ascontiguousarray(native))
    return made


def _fitting(source: Layer, target: Layer, shapes: Sequence[Shape]) -> ParameterTable:
    """Return the target's table for the first shape that it can have; raises `Untranslatable`."""
    told = f"{target.name} cannot have these weights of {source.name}"
    reason = f"no {shapes[0].score} score"
    for shape in shapes if shapes[0].score in target.scores else ():
        try:
            target.check_shape(shape)
            rows = target.parameters_for(shape)
            break
        except Unsupported as refused:
            reason = f"{refused}{_widths(shape)}"
    else:
        raise Untranslatable(f"{told}: {reason}; choose another target")
    named = {name for row in rows for name in row.names}
    homeless = [name for name in shape.weight_shapes() if name not in named]
    if homeless:
        raise Untranslatable(
            f"{told}: it has no place for {', '.join(homeless)}, and nothing is left out, not even "
            "zeros; choose another target"
        )
    return ParameterTable(rows, shape)


def _widths(shape: Shape) -> str:
    """Return the widths that differ, if any; few layers support that."""
    if len({shape.query_width, shape.key_width, shape.value_width, shape.output_width}) == 1:
        return ""
    return (
        f" (here: query {shape.query_width}, key {shape.key_width}, value {shape.value_width}, "
        f"output {shape.output_width})"
    )


# Sizes from tensors

WIDTHS = ("query_width", "key_width", "value_width", "output_width")
SIZES = ("heads", "kv_heads", "head_size", "value_head_size", *WIDTHS)
SHARINGS: tuple[Sharing, ...] = ("separate", "memory", "self")

Rows = tuple[Parameter, ...]


def shapes_of(sizes: Mapping[str, int], weights: Collection[str]) -> Iterator[Shape]:
    """Yield shapes with these sizes and canonical weights, one for each kind of shared inputs.

    Weights determine neither lengths, which are 1 here, nor which inputs are one array, on which
    some implementations insist.
    """
    for sharing in SHARINGS:
        with suppress(WrongShape):
            yield Shape(
                batch=1,
                query_length=1,
                key_length=1,
                bias=any(map(_is_bias, weights)),
                score="additive" if "score" in weights else "scaled-dot",
                sharing=sharing,
                **{name: sizes[name] for name in SIZES},
            )


@lru_cache(maxsize=64)
def tables(layer: Layer) -> tuple[Rows, ...]:
    """Return every table that the layer declares for some shape, each once.

    A table may depend on which widths are equal, on fewer key/value heads, on another size of value
    heads, on biases, the score and shared inputs; so shapes that differ in these are put to it.
    """
    if type(layer).parameters_for is Layer.parameters_for:
        return (tuple(layer.parameters),)
    found: dict[Rows, None] = {}
    for shape in _small_shapes(layer):
        with suppress(Unsupported, ConformanceError):
            found[tuple(layer.parameters_for(shape))] = None
    return tuple(found)


def _small_shapes(layer: Layer) -> Iterator[Shape]:
    widths = ((8, 8, 8, 8), (8, 6, 6, 8), (8, 6, 7, 8), (8, 8, 7, 8), (6, 8, 8, 8), (7, 6, 5, 9))
    additive = [("score",), ()] if "additive" in layer.scores else [()]
    for wide, kv_heads, value_head, score, biases in itertools.product(
        widths, (4, 2, 1), (2, 3), additive, (("query_bias",), ())
    ):
        sizes = (4, kv_heads, 2, value_head, *wide)
        yield from shapes_of(dict(zip(SIZES, sizes, strict=True)), (*score, *biases))


@lru_cache(maxsize=64)
def _always_equal(layer: Layer) -> dict[str, str]:
    """Return sizes that equal another one in every shape that the layer can have."""
    possible = []
    for shape in _small_shapes(layer):
        with suppress(Unsupported):
            layer.check_shape(shape)
            possible.append(shape)
    pairs = {"kv_heads": "heads", "value_head_size": "head_size"}
    return {
        name: other
        for name, other in pairs.items()
        if possible and all(getattr(it, name) == getattr(it, other) for it in possible)
    }


def _is_bias(name: str) -> bool:
    return name.endswith("_bias")


def _asked(table: Rows, there: Collection[str]) -> Rows:
    """Return the table without the rows of biases, or of the score, if no tensor has any."""
    held = {name for row in table if row.native in there for name in row.names}
    biases = {name for row in table for name in row.names if _is_bias(name)}
    dropped = (set() if held & biases else biases) | ({"score"} - held)
    return tuple(row for row in table if not set(row.names) <= dropped)


def native_shape(row: Parameter, sizes: Mapping[str, int]) -> list[int]:
    """Return the shape of a native parameter for these sizes."""
    return [
        sum(math.prod(sizes[name] for name in product) for product in sums[0])
        for sums in _axes(row)
    ]


Sum = tuple[tuple[str, ...], ...]
"""Products of sizes, added up."""


def _axes(row: Parameter) -> list[list[Sum]]:
    """Return for each native axis the sums that its size is, of each weight or of all stacked.

    Raises:
        WrongDeclaration: the pattern does not name the axes of its weights.
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
    """Tensors beside one table of their layer.

    Attributes:
        given: sizes that the user gave.
        equal: sizes that are always those of another one.
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
        """Return the sizes that the tensors determine, or None if they contradict each other.

        An axis of a tensor with one unknown size determines it; repeated until none does.
        """
        sizes = dict(self.given)
        for name, other in self.equal.items():
            if sizes.setdefault(other, sizes.get(name, 0)) != sizes.pop(name, sizes[other]):
                return None
            sizes = {name: size for name, size in sizes.items() if size}
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
        """Add the size that an axis determines; return False if it contradicts the others."""
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
        """Return the first shape of these sizes that the source can have, with these rows."""
        weights = [name for row in self.rows for name in row.names]
        for shape in shapes_of(sizes, weights):
            with suppress(Unsupported, WrongDeclaration):
                self.source.check_shape(shape)
                if ParameterTable(self.source.parameters_for(shape), shape).rows == self.rows:
                    return shape
        return None

    def unknown(self, sizes: Mapping[str, int]) -> ConformanceError:
        """Return the error that names the size to be given."""
        field = "kv_heads" if "heads" in sizes else "heads"
        divides = f", which divides {self.joined}" if field == "heads" and self.joined else ""
        return Untranslatable(
            f"the tensors of {self.source.name} do not tell the number of {field}{divides}; give "
            f"--{field.replace('_', '-')} ({field}=)"
        )

    @property
    def joined(self) -> int:
        """Return heads times head size from an axis that holds nothing else; 0 if there is none."""
        for row in self.rows:
            shape = self.tensors[row.native].bits.shape if row.native in self.tensors else ()
            for size, sums in zip(shape, _axes(row), strict=False):
                if sums[0][0][0:1] == ("heads",) and len(sums[0][0]) == 2:
                    return size // len(sums[0])
        return 0

    def misshapen(self) -> list[str]:
        """Return the fewest tensors without which the others fit, with their expected shapes."""
        present = [row for row in self.rows if row.native in self.tensors]
        for count in range(min(len(present), 4)):
            for left in itertools.combinations(present, count):
                sizes = self.sizes(without=left)
                widths = [size for name, size in (sizes or {}).items() if name in WIDTHS]
                if sizes is None or not widths:
                    continue
                # A width that only they tell is taken from the others.
                sizes = dict.fromkeys(WIDTHS, widths[0]) | sizes
                if sizes.keys() >= set(SIZES) and self.shape(sizes) is not None:
                    return [
                        f"{row.native} {list(self.tensors[row.native].bits.shape)}, "
                        f"wanted {native_shape(row, sizes)}"
                        for row in left
                    ]
        return []


def _read(tensors: Mapping[str, Tensor], source: Layer, given: Mapping[str, int]) -> ParameterTable:
    """Return the source's table for the shape that the tensors have.

    Raises:
        WrongTensors: they are not what any of the source's tables asks for; everything is listed.
        Untranslatable: they do not determine the shape.
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
    told = {
        "missing": reading.missing,
        "extra": reading.extra,
        "misshapen": reading.misshapen(),
        "NaN or infinity in": unsound,
    }
    wrong = "; ".join(f"{what} {', '.join(names)}" for what, names in told.items() if names)
    if wrong:
        raise WrongTensors(f"these are no weights of {source.name}: {wrong}")
    shapes = ", ".join(f"{name} {list(tensor.bits.shape)}" for name, tensor in tensors.items())
    also = "".join(f" with {name}={count}" for name, count in given.items())
    heads = given.get("heads", 1)
    why = f"{reading.joined} is not divisible by {heads}; " if reading.joined % heads else ""
    raise WrongTensors(f"{source.name} cannot have weights of these shapes{also}: {why}{shapes}")


# Files


def _elsewhere(file: File, whose: Layer, prefix: str) -> str:
    """Return a hint at the prefixes under which the file has such tensors, or ""."""
    first = {row.native for table in tables(whose) for row in table}
    found = sorted(
        {
            name[: -len(native)]
            for name in file.header
            for native in first
            if name.endswith((f".{native}", f"/{native}"))
        }
        - {prefix}
    )
    if not found:
        return ""
    return "; try --prefix " + " or ".join(found[:3]) + (" ..." if len(found) > 3 else "")


def _noted(before: Mapping[str, str], note: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata with one more conversion in it."""
    try:
        notes = json.loads(before.get(NOTE, "[]"))
    except json.JSONDecodeError:
        notes = before[NOTE]
    notes = notes if isinstance(notes, list) else [notes]
    return {**before, NOTE: json.dumps([*notes, note])}
