"""Weights between implementations, through the parameter tables of their adapters.

A row of a table only moves elements, so a conversion changes no bit, in any dtype, and no framework
is imported. What the tensors do not tell (torch's stacked matrix is the same for 2 and for 4 heads)
has to be said; what they tell is checked, and everything that is wrong is told at once.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from conformance.adapter.code import lines
from conformance.adapter.layer import Layer
from conformance.adapter.naming import find
from conformance.adapter.parameters import Parameter, ParameterTable
from conformance.definition.problem import Shape
from conformance.definition.tensors import File, Tensor, look, write
from conformance.errors import (
    ConformanceError,
    Unsupported,
    Untranslatable,
    WrongDeclaration,
    WrongShape,
    WrongTensors,
)
from conformance.porting.sizes import (
    AXES_OF,
    Equation,
    equations,
    native_shape,
    shapes_of,
    solve,
    tables,
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
    """Native parameters of one implementation as those of another, bit for bit.

    Args:
        tensors: arrays that NumPy reads, by the native names of the source's parameter table, such
            as "in_proj_weight" `[3·width width]`. All of the table and nothing else.
        source: whose they are: an adapter's name ("torch-mha"), its title with or without what
            stands in brackets, or path/to/file.py:NAME.
        target: whose they shall be, likewise.
        heads: the number of heads, needed where the tensors do not tell it.
        kv_heads: the number of key/value heads, likewise.

    Returns:
        Arrays by the native names of the target's table, such as "query/kernel"
        `[embed heads head]`, each in the dtype in which it came.

    Raises:
        UnknownName: no such implementation; the message has the nearest names.
        WrongTensors: tensors are missing, too many, misshapen or not finite; all are told.
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
    """`convert` for files of safetensors; the metadata is kept, and the conversion noted in it.

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
    """What to build the target with for such weights without biases, such as "use_bias=False"; ""
    if they have biases, or if its adapter does not say."""
    becomes = layer(target)
    if shape.bias:
        return ""
    example = becomes.example_for(shape, "float32", None, becomes.modes[0])
    found = re.search(r"\b\w*bias=False\b", "\n".join(lines(example.build))) if example else None
    return found[0] if found else ""


def layer(spelled: str) -> Layer:
    """The layer of this name, title or path; raises `Untranslatable` for what has no table."""
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
    sizes = {field: getattr(table.shape, field) for axes in AXES_OF.values() for field in axes}
    fitting = _fitting(source, target, list(shapes_of(sizes, weights)))
    return _written(tensors, table, fitting), table.shape


def _written(
    tensors: Mapping[str, Tensor], source: ParameterTable, target: ParameterTable
) -> dict[str, Tensor]:
    """Elements to their places, by way of the canonical layout."""
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
    """The target's table for one of the shapes; raises `Untranslatable` where it can have none."""
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
    """Where they differ, which few layers can have."""
    if len({shape.query_width, shape.key_width, shape.value_width, shape.output_width}) == 1:
        return ""
    return (
        f" (here: query {shape.query_width}, key {shape.key_width}, value {shape.value_width}, "
        f"output {shape.output_width})"
    )


# What the tensors say


@dataclass(frozen=True)
class _Reading:
    """Tensors beside one table."""

    rows: tuple[Parameter, ...]
    weights: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]

    @classmethod
    def of(cls, table: Sequence[Parameter], names: Iterable[str]) -> _Reading:
        """Rows that the tensors do not ask for, such as those of biases if none is there, drop."""
        there = set(names)
        held = {name for row in table if row.native in there for name in row.names}
        dropped = (
            set() if any(map(_bias, held)) else {n for r in table for n in r.names if _bias(n)}
        )
        dropped |= {"score"} - held
        rows = tuple(row for row in table if not set(row.names) <= dropped)
        native = [row.native for row in rows]
        return cls(
            rows,
            tuple(name for row in rows for name in row.names),
            tuple(name for name in native if name not in there),
            tuple(sorted(there - set(native))),
        )

    @property
    def wrong(self) -> int:
        return len(self.missing) + len(self.extra)


def _bias(name: str) -> bool:
    return name.endswith("_bias")


def _read(tensors: Mapping[str, Tensor], source: Layer, given: Mapping[str, int]) -> ParameterTable:
    """The source's table for the shape that the tensors have.

    Raises:
        WrongTensors: they are not what any of the source's tables asks for.
        Untranslatable: they do not tell the shape.
    """
    readings = [_Reading.of(table, tensors) for table in tables(source)]
    best = min(reading.wrong for reading in readings)
    nearest = list(dict.fromkeys(reading for reading in readings if reading.wrong == best))
    shapes: dict[Shape, tuple[Parameter, ...]] = {}
    for reading in nearest if best == 0 else ():
        for shape in _shapes(reading, tensors, source, given):
            shapes[shape] = reading.rows
    unsound = [name for name, tensor in tensors.items() if not tensor.finite]
    if not shapes or unsound:
        raise _what_is_wrong(nearest[0], tensors, source, given, unsound, bool(shapes))
    if len(shapes) > 1:
        raise _which(list(shapes), source)
    ((shape, rows),) = shapes.items()
    return ParameterTable(rows, shape)


def _shapes(
    reading: _Reading, tensors: Mapping[str, Tensor], source: Layer, given: Mapping[str, int]
) -> Iterator[Shape]:
    """Shapes that the source can have, with this table, and with these tensors."""
    asked = _equations(reading.rows, tensors)
    if asked is None:
        return
    for sizes in solve(asked, given):
        shape = _possible(sizes, reading, source)
        if shape is not None:
            yield shape


def _possible(sizes: Mapping[str, int], reading: _Reading, source: Layer) -> Shape | None:
    """The first shape of these sizes that the source can have and that has these rows."""
    for shape in shapes_of(sizes, reading.weights):
        try:
            source.check_shape(shape)
            rows = ParameterTable(source.parameters_for(shape), shape).rows
        except (Unsupported, WrongDeclaration):
            continue
        if rows == reading.rows:
            return shape
    return None


def _equations(rows: Iterable[Parameter], tensors: Mapping[str, Tensor]) -> list[Equation] | None:
    """Of all tensors that are there; None if one has another number of axes."""
    found: list[Equation] = []
    for row in rows:
        if row.native in tensors:
            own = equations(row, tensors[row.native].bits.shape)
            if own is None:
                return None
            found += own
    return found


def _which(shapes: Sequence[Shape], source: Layer) -> ConformanceError:
    """Several shapes fit: say what has to be said."""
    for field, option in (("heads", "--heads"), ("kv_heads", "--kv-heads")):
        counts = sorted({getattr(shape, field) for shape in shapes})
        if len(counts) > 1:
            told = ", ".join(map(str, counts[:8])) + (" or more" if len(counts) > 8 else "")
            return Untranslatable(
                f"the tensors of {source.name} do not tell the number of {field}, which may be "
                f"{told}; give {option} ({field}=)"
            )
    return Untranslatable(f"the tensors of {source.name} fit {len(shapes)} shapes; none is chosen")


def _what_is_wrong(
    reading: _Reading,
    tensors: Mapping[str, Tensor],
    source: Layer,
    given: Mapping[str, int],
    unsound: Sequence[str],
    shaped: bool,
) -> ConformanceError:
    """Everything that is wrong with the tensors, at once."""
    told = []
    if reading.missing:
        told.append(f"missing {', '.join(reading.missing)}")
    if reading.extra:
        told.append(f"extra {', '.join(reading.extra)}")
    misshapen = {} if shaped else _misshapen(reading, tensors, source, given)
    if misshapen:
        told.append("misshapen " + ", ".join(misshapen.values()))
    if unsound:
        told.append(f"NaN or infinity in {', '.join(unsound)}")
    if told:
        return WrongTensors(f"these are no weights of {source.name}: {'; '.join(told)}")
    shapes = ", ".join(f"{name} {list(tensor.bits.shape)}" for name, tensor in tensors.items())
    also = "".join(f" with {name}={count}" for name, count in given.items())
    why = _indivisible(reading, tensors, source, given)
    return WrongTensors(f"{source.name} cannot have weights of these shapes{also}: {why}{shapes}")


def _indivisible(
    reading: _Reading, tensors: Mapping[str, Tensor], source: Layer, given: Mapping[str, int]
) -> str:
    """That the number of heads given is not the one that the tensors can have."""
    heads = given.get("heads")
    free = next(_shapes(reading, tensors, source, {}), None)
    if heads is None or free is None:
        return ""
    width = free.heads * free.head_size
    return f"{width} is not divisible by {heads}; " if width % heads else ""


def _misshapen(
    reading: _Reading, tensors: Mapping[str, Tensor], source: Layer, given: Mapping[str, int]
) -> dict[str, str]:
    """The fewest tensors without which the others fit, with what was wanted of them."""
    rows = [row for row in reading.rows if row.native in tensors]
    ranks = {
        row.native: f"{row.native} {list(tensors[row.native].bits.shape)}, wanted {row.pattern!r}"
        for row in rows
        if equations(row, tensors[row.native].bits.shape) is None
    }
    sound = [row for row in rows if row.native not in ranks]
    for count in range(min(len(sound), 4)):
        for left in itertools.combinations(sound, count):
            asked = _equations((row for row in sound if row not in left), tensors)
            assert asked is not None
            for solved in itertools.islice(solve(asked, given), 1000):
                for sizes in _completed(solved):
                    if _possible(sizes, reading, source) is None:
                        continue
                    wrong = [row for row in rows if row in left or row.native in ranks]
                    return {row.native: _wanted(row, tensors[row.native], sizes) for row in wrong}
    return ranks


def _completed(sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """With sizes that only the misshapen tensors tell, taken from the others."""
    fields = sorted({axis for axes in AXES_OF.values() for axis in axes} - sizes.keys())
    known = sorted({size for field, size in sizes.items() if field.endswith("width")})
    counts = sorted({size for field, size in sizes.items() if not field.endswith("width")})
    choices = [known if field.endswith("width") else counts for field in fields]
    for chosen in itertools.product(*choices):
        yield {**sizes, **dict(zip(fields, chosen, strict=True))}


def _wanted(row: Parameter, tensor: Tensor, sizes: Mapping[str, int]) -> str:
    return f"{row.native} {list(tensor.bits.shape)}, wanted {native_shape(row, sizes)}"


# Files


def _elsewhere(file: File, whose: Layer, prefix: str) -> str:
    """A hint at the prefixes under which such tensors lie."""
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
    """The metadata with one more conversion in it."""
    try:
        notes = json.loads(before.get(NOTE, "[]"))
    except json.JSONDecodeError:
        notes = before[NOTE]
    notes = notes if isinstance(notes, list) else [notes]
    return {**before, NOTE: json.dumps([*notes, note])}
