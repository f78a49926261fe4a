"""Read arrays and options as somebody has them, and find out what they may mean.

Arrays from another program come without declarations. Whatever their shapes leave open, such as the
order of the axes or the meaning of a mask, is read in every way that fits; the numbers then decide,
and the way that was chosen is stated. What neither shapes nor numbers decide has to be told.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, make_dataclass, replace
from typing import Any, Literal

import numpy as np

from conformance.arrays.configuration import told
from conformance.cases.casefile import Tensor
from conformance.definition.dtypes import DTYPES, Array, IntArray, dtype_of
from conformance.definition.features import FEATURES
from conformance.definition.problem import (
    NO_WINDOW,
    Answer,
    Causal,
    Norm,
    Positions,
    Problem,
    Rotary,
    Segments,
    Shape,
    Weights,
    identities,
)
from conformance.definition.rotary import POSITION_AXES, RotaryAxes, RotaryScaling
from conformance.definition.statistics import STATISTICS
from conformance.errors import BadArrays, UnknownName, WrongShape
from conformance.frameworks import BRIDGES, framework
from conformance.records.findings import Phrase

AXES = {
    "batch": "batch b",
    "length": "length query key sequence seq tokens q k n t l s",
    "heads": "heads h",
    "head": "head dim d",
}
"""The axes of a layout, with the words for each."""

LAYOUTS: Mapping[int, tuple[str, ...]] = {
    2: ("length head",),
    3: ("heads length head", "length heads head"),
    4: ("batch heads length head", "batch length heads head"),
}
"""The layouts of query, key, value and output that are tried, by the number of axes."""

MERGED: Mapping[int, str] = {2: "length (heads head)", 3: "batch length (heads head)"}
"""The layouts in which heads are side by side, by the number of axes."""

BLOCKS = -1e4
"""Numbers of a mask up to this one block a key; programs use −1e4, −1e9 and finfo.min for −∞."""

MOST_LOGITS = 2**25
"""The most logits of arrays that are examined as a whole; larger ones are examined in part."""

Means = Literal["", "attends", "blocks"]


@dataclass(frozen=True, eq=False)
class Numbers:
    """An array as float64, bool or int64, and the name of the dtype in which it was stored."""

    values: np.ndarray
    dtype: str

    @classmethod
    def of(cls, name: str, array: Any) -> Numbers:
        """Read an array of NumPy or of another framework, a tensor of a file, or a nested list.

        Raises:
            BadArrays: if it does not consist of numbers or booleans.
        """
        if isinstance(array, Numbers):
            return array
        if isinstance(array, Tensor):
            return _of_tensor(name, array)
        module = type(array).__module__.partition(".")[0]
        module = {"jaxlib": "jax"}.get(module, module)
        if module != "numpy" and module in BRIDGES and hasattr(array, "dtype"):
            bridge = framework(module)
            return cls(np.asarray(bridge.numpy(array)), bridge.dtype(array))
        try:
            found = np.asarray(array)
        except (TypeError, ValueError, RuntimeError) as error:
            why = " ".join(str(error).split())
            raise BadArrays(f"{name} cannot be read as an array: {why}") from error
        kind = found.dtype.name
        if kind in DTYPES:
            return cls(found.astype(np.float64), kind)
        if found.dtype.kind == "b":
            return cls(found, "bool")
        if found.dtype.kind in "iu":
            return cls(found.astype(np.int64), kind)
        raise BadArrays(f"{name} holds neither numbers nor booleans, but {kind}")


def _of_tensor(name: str, tensor: Tensor) -> Numbers:
    named = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    if tensor.dtype in named:
        return Numbers(tensor.values, named[tensor.dtype])
    if tensor.dtype == "BOOL":
        return Numbers(tensor.bits.astype(np.bool_), "bool")
    if tensor.dtype[0] in "IU":
        signed = tensor.bits.view(f"{tensor.dtype[0].lower()}{tensor.bits.itemsize}")
        return Numbers(signed.astype(np.int64), tensor.dtype.lower())
    raise BadArrays(f"{name} is {tensor.dtype}; convert it to float32 before it is saved")


_PLAIN = {
    name: entry
    for entry in FEATURES
    if entry.value is None
    for name in (*entry.files, *entry.options)
    if name in entry.absent and name != "window"
}
"""The features that are given as the one array or number that `Problem` has, by its field."""

_Plain: Any = make_dataclass(
    "_Plain",
    [(name, Any, None) for name in _PLAIN],
    frozen=True,
    eq=False,
    kw_only=True,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Given(_Plain):  # type: ignore[misc]
    """All that was passed, before it is known what it means; see `conformance.diagnose`.

    What is told of a feature has the name of its field of `Problem`.
    """

    query: Any
    key: Any
    value: Any
    output: Any
    mask: Any = None
    mask_true: Means = ""
    bias: Any = None
    causal: bool | Causal | None = None
    scale: float | None = None
    window: int | tuple[int | None, int | None] | None = None
    rotary: Rotary | Mapping[str, Any] | None = None
    norm: Norm | Mapping[str, Any] | None = None
    segments: Any = None
    positions: Any = None
    weights: Any = None
    log_sum_exp: Any = None
    max_logit: Any = None
    gradients: Mapping[str, Any] | None = None
    layout: str = ""
    heads: int | None = None
    kv_heads: int | None = None
    batch: int | None = None
    dtype: str = ""
    accuracy: str = ""
    config: Any = None
    layer: int = 0


@dataclass(frozen=True, eq=False)
class Reading:
    """One way to read what was given.

    Attributes:
        problem: the problem, on projected heads.
        answer: the output and what else was returned, in canonical layout.
        statistics: the statistics of rows that were returned, `[batch heads query]`, by name.
        layout: the layout of query, key and value.
        assumed: what was not told and is read in this way.
    """

    problem: Problem
    answer: Answer
    statistics: Mapping[str, Array]
    layout: str
    assumed: tuple[Phrase, ...] = ()
    notes: tuple[Phrase, ...] = ()

    def located(self) -> tuple[int, int, int, int]:
        """Return the sizes `[batch heads query component]` of the output."""
        shape = self.problem.shape
        return shape.batch, shape.heads, shape.query_length, shape.value_head_size


def split(layout: str) -> list[list[str]]:
    """Return the axes of a layout such as "batch length (heads head)": a list for each axis.

    Raises:
        BadArrays: if a word is no axis, or an axis is missing or occurs twice.
    """
    words = {word: axis for axis, listed in AXES.items() for word in listed.split()}
    found: list[list[str]] = []
    joined = False
    for token in layout.replace("(", " ( ").replace(")", " ) ").replace(",", " ").split():
        if token in "()":
            joined = token == "("
            if joined:
                found.append([])
            continue
        if token not in words:
            raise BadArrays(f"layout {layout!r}: {token!r} is no axis; write {' '.join(AXES)}")
        if joined:
            found[-1].append(words[token])
        else:
            found.append([words[token]])
    flat = [axis for axes in found for axis in axes]
    if len(set(flat)) < len(flat) or not {"length", "head"} <= set(flat):
        raise BadArrays(
            f"layout {layout!r} needs length and head, each axis once: 'batch heads length head'"
        )
    return found


def laid_out(name: str, values: np.ndarray, layout: str, heads: int | None) -> np.ndarray:
    """Return an array of heads as `[batch heads length head]`, read in the given layout.

    `heads` is the number of heads if the layout joins them with their components.

    Raises:
        BadArrays: if the array does not have these axes.
    """
    axes = split(layout)
    if len(axes) != values.ndim:
        raise BadArrays(
            f"{name} has {values.ndim} axes {list(values.shape)}, and the layout {layout!r} has "
            f"{len(axes)}"
        )
    sizes: list[int] = []
    for joined, size in zip(axes, values.shape, strict=True):
        if len(joined) == 1:
            sizes.append(size)
            continue
        if set(joined) != {"heads", "head"}:
            listed = " and ".join(joined)
            raise BadArrays(
                f"layout {layout!r} joins {listed}, but only heads and head may be joined; reshape "
                f"the arrays, so that {listed} are axes of their own"
            )
        if heads is None:
            raise BadArrays(
                f"{name} has heads side by side in an axis of {size}; say how many heads there "
                "are with heads= and kv_heads= (--heads, --kv-heads)"
            )
        if heads < 1 or size % heads:
            raise BadArrays(
                f"{name} has an axis of {size}, which is not {heads} heads side by side; correct "
                "heads= or kv_heads= (--heads, --kv-heads)"
            )
        parts = {"heads": heads, "head": size // heads}
        sizes += [parts[axis] for axis in joined]
    flat = [axis for joined in axes for axis in joined]
    array = values.reshape(sizes)
    for axis in ("heads", "batch"):
        if axis not in flat:
            flat.insert(0, axis)
            array = array[None]
    return array.transpose([flat.index(axis) for axis in AXES_IN_ORDER])


AXES_IN_ORDER = ("batch", "heads", "length", "head")


def given_layout(heads: np.ndarray, layout: str) -> np.ndarray:
    """Return heads `[batch heads length head]` in the given layout: the inverse of `laid_out`."""
    axes = split(layout)
    flat = [axis for joined in axes for axis in joined]
    dropped = tuple(n for n, axis in enumerate(AXES_IN_ORDER) if axis not in flat)
    kept = [axis for axis in AXES_IN_ORDER if axis in flat]
    array = heads.squeeze(dropped).transpose([kept.index(axis) for axis in flat])
    sizes = dict(zip(flat, array.shape, strict=True))
    return array.reshape([math.prod(sizes[axis] for axis in joined) for joined in axes])


MOST_WIDTH = 8192
"""A layout is not tried of which an output would have more components, if another one fits."""


def readings(given: Given) -> list[Reading]:
    """Return every way to read what was given; at least one.

    Raises:
        BadArrays: if there is none.
    """
    stored = {name: _floats(name, getattr(given, name)) for name in ("query", "key", "value")}
    if given.output is not None:
        stored["output"] = _floats("output", given.output, finite=False)
    found, reasons = [], []
    given, arrays, apart = _with_entries_apart(given, stored)
    given, said, open_rotation = _with_config(given, arrays["query"].values.shape)
    said = [*apart, *said]
    for layout in _layouts(given, arrays):
        try:
            found += [*_readings(given, arrays, layout, open_rotation)]
        except (BadArrays, WrongShape) as reason:
            reasons.append(reason)
    if not found:
        advice = _on_heads(given, arrays)
        raise BadArrays(f"{reasons[0]}{advice}") if advice else reasons[0]
    narrow = [one for one in found if one.problem.shape.output_width <= MOST_WIDTH]
    found = narrow or found
    if given.layout == "":
        found = [
            replace(one, assumed=(*one.assumed, Phrase("reading.layout", {"layout": one.layout})))
            for one in found
        ]
    return [replace(one, assumed=(*one.assumed, *said)) for one in found] if said else found


FLAT = "(batch length)"
"""How a layout begins in which the tokens of all batch entries follow each other in one axis."""

_WITH_ENTRIES = {
    **{"mask": 4, "bias": 4, "weights": 4, "log_sum_exp": 3, "max_logit": 3},
    **{"query_lengths": 1, "key_lengths": 1},
}
"""Arrays whose first axis is that of the batch entries if they have so many axes."""


def _with_entries_apart(
    given: Given, arrays: Mapping[str, Numbers]
) -> tuple[Given, Mapping[str, Numbers], list[Phrase]]:
    """Return what was given, with batch entries apart whose tokens follow each other in one axis.

    This is how `[batch * length, width]` comes out of a linear layer. How many entries there are is
    told, or is the size of another array.

    Raises:
        BadArrays: if the tokens are not those of so many entries of one length.
    """
    layout, is_told = given.layout, given.layout.startswith(FLAT)
    sides = [arrays[name].values for name in ("query", "key", "value")]
    axes = {it.ndim for it in sides}
    if (layout and not is_told) or axes not in ({2}, {3}):
        return given, arrays, []
    (count,) = axes
    batch = _entries(given, arrays, count)
    if batch is None and is_told:
        raise BadArrays(f"layout {layout!r} needs the number of batch entries: batch= (--batch)")
    if batch is None or (count == 3 and not is_told and {len(it) for it in sides} == {batch}):
        return given, arrays, []
    if batch < 1 or any(len(it) % batch for it in sides):
        if given.batch is None and not is_told:
            return given, arrays, []
        rows = ", ".join(str(len(it)) for it in sides)
        raise BadArrays(
            f"query, key and value have {rows} rows, which are not those of {batch} batch entries "
            "of one length; correct batch= (--batch)"
        )
    if batch == 1 and not is_told:
        return given, arrays, []

    def apart(numbers: Numbers) -> Numbers:
        values = numbers.values
        if values.ndim != count or len(values) % batch:
            return numbers
        return Numbers(values.reshape(batch, -1, *values.shape[1:]), numbers.dtype)

    gradients = given.gradients and {
        name: None if it is None else apart(Numbers.of(f"gradient.{name}", it))
        for name, it in given.gradients.items()
    }
    rest = layout.removeprefix(FLAT).strip() or ("(heads head)" if count == 2 else "heads head")
    given = replace(given, layout=f"batch length {rest}", gradients=gradients)
    said = [Phrase("reading.entries-in-one-axis", {"batch": batch})]
    return given, {name: apart(it) for name, it in arrays.items()}, said


def _entries(given: Given, arrays: Mapping[str, Numbers], axes: int) -> int | None:
    """Return the number of batch entries that is told, or that another array has; None if none."""
    if given.batch is not None:
        return given.batch
    output = arrays["output"].values if "output" in arrays else None
    if output is not None and output.ndim > axes:
        return len(output)
    for name, count in _WITH_ENTRIES.items():
        array = getattr(given, name)
        if array is not None:
            values = Numbers.of(name, array).values
            if values.ndim == count and (len(values) > 1 or count == 1):
                return len(values)
    return None


def _on_heads(given: Given, arrays: Mapping[str, Numbers]) -> str:
    """Return what to say of heads if no reading fits and they may be side by side, or ""."""
    query, key = (arrays[name].values.shape for name in ("query", "key"))
    if len(query) not in MERGED or query[-1] <= key[-1] or given.kv_heads is not None:
        return ""
    if given.heads is not None:
        return "; if keys have fewer heads than queries, say how many: kv_heads= (--kv-heads)"
    if given.layout:
        return ""
    return (
        "; if heads are side by side in the last axis, say how many: heads= and kv_heads= "
        "(--heads, --kv-heads)"
    )


def _with_config(given: Given, query: tuple[int, ...]) -> tuple[Given, list[Phrase], bool]:
    """Return what was given, with what a configuration says, and the latter as phrases.

    The third result is whether nobody said if query and key are rotated already.
    """
    if given.config is None:
        return given, [], False
    options, said = told(given.config, given.layer)
    heads = options.get("heads")
    if heads and len(query) < 4 and (query[-1] % heads or heads in query[:-1]):
        options = {name: it for name, it in options.items() if name not in ("heads", "kv_heads")}
    options = {name: it for name, it in options.items() if getattr(given, name) is None}
    return replace(given, **options), said, "rotary" in options


def _floats(name: str, array: Any, *, finite: bool = True) -> Numbers:
    """Return an array of floating-point numbers; raise `BadArrays` if it is something else."""
    if array is None:
        raise BadArrays(f"{name} is missing; query, key, value and output are needed")
    found = Numbers.of(name, array)
    if found.values.dtype != np.float64:
        raise BadArrays(
            f"{name} holds {found.dtype}; save the floating-point numbers that the attention "
            "computes with (dequantised, if they are quantised)"
        )
    if not found.values.size:
        raise BadArrays(f"{name} is empty: shape {list(found.values.shape)}")
    if finite and not np.isfinite(found.values).all():
        at = np.argwhere(~np.isfinite(found.values))
        raise BadArrays(
            f"{name} has {len(at):,} elements that are NaN or infinite, the first at "
            f"{at[0].tolist()}; nothing can be said of what follows from them"
        )
    return found


def _layouts(given: Given, arrays: Mapping[str, Numbers]) -> list[str]:
    """Return the layouts of query, key and value that their numbers of axes allow."""
    if given.layout:
        return [given.layout]
    axes = {name: arrays[name].values.ndim for name in ("query", "key", "value")}
    if len(set(axes.values())) > 1:
        shapes = ", ".join(f"{name} {list(arrays[name].values.shape)}" for name in axes)
        raise BadArrays(f"query, key and value have different numbers of axes: {shapes}")
    (count,) = set(axes.values())
    if given.heads is not None and count in MERGED:
        return [MERGED[count]]
    if count not in LAYOUTS:
        raise BadArrays(
            f"query has {count} axes {list(arrays['query'].values.shape)}; say what they are, "
            "for example layout='batch length heads head' (--layout)"
        )
    return [*LAYOUTS[count]]


def _readings(
    given: Given, arrays: Mapping[str, Numbers], layout: str, open_rotation: bool
) -> Iterator[Reading]:
    heads, kv_heads = given.heads, given.kv_heads or given.heads
    q = laid_out("query", arrays["query"].values, layout, heads)
    k = laid_out("key", arrays["key"].values, layout, kv_heads)
    v = laid_out("value", arrays["value"].values, layout, kv_heads)
    for name, array, count in (("query", q, heads), ("key", k, kv_heads)):
        if count is not None and array.shape[1] != count:
            raise BadArrays(
                f"{name} has {array.shape[1]} heads, read as {layout!r}, and {count} are told"
            )
    _check(layout, q, k, v)
    shape = Shape.of_heads(q.shape, v.shape)
    outputs = (
        [*_outputs(arrays["output"].values, layout, shape)]
        if "output" in arrays
        else [(np.zeros((shape.batch, shape.query_length, shape.output_width)), layout)]
    )
    heads_of = {"query": merged(q), "key": merged(k), "value": merged(v)}
    every = problems(given, arrays, shape, None, heads_of, open_rotation=open_rotation)
    returned = [name for name in STATISTICS if getattr(given, name) is not None]
    for (output, placed), (problem, assumed, notes) in itertools.product(outputs, every):
        yield Reading(
            problem.replace(cotangent=_cotangent(given, placed, shape, output.shape)),
            _answer(given, output, layout, shape),
            {n: _of_rows(n, getattr(given, n), shape) for n in returned},
            layout,
            (*assumed, *_placed(placed, layout)),
            tuple(notes),
        )


def problems(
    given: Given,
    arrays: Mapping[str, Numbers],
    shape: Shape,
    weights: Weights | None,
    inputs: Mapping[str, Array],
    *,
    open_rotation: bool = False,
) -> Iterator[tuple[Problem, tuple[Phrase, ...], list[Phrase]]]:
    """Yield every problem that may be meant, what is assumed in it, and notes.

    Args:
        given: what was given.
        arrays: the arrays as they are stored.
        shape: the shape of the problem.
        weights: the weights of a layer; None if `inputs` are heads.
        inputs: query, key and value, `[batch length width]`.
        open_rotation: whether query and key may have been rotated already.
    """
    if given.scale is not None and not 1e-12 < abs(given.scale) < 1e12:
        raise BadArrays(f"scale is {given.scale}; it is a finite number other than 0")
    dtype, notes = _dtype(given, arrays)
    rounded = dtype_of(dtype).round
    base = {
        **{
            name: array if arrays[name].dtype == dtype else rounded(array)
            for name, array in inputs.items()
        },
        "dtype": dtype,
        "scale": given.scale,
        "window": _window(given.window),
        **_features(given, shape),
    }
    for name, array in inputs.items():
        if base[name] is not array and not np.array_equal(base[name], array):
            notes.append(Phrase("reading.rounded", {"array": name, "dtype": dtype}))
    if given.bias is not None:
        bias = _floats("bias", given.bias).values
        base["attn_bias"] = next(iter(_broadcast("bias", bias, shape)))
    turned: list[tuple[dict[str, Any], tuple[Phrase, ...]]] = [({}, ())]
    if open_rotation:
        turned = [
            ({"rotary": None}, (Phrase("reading.rotated"),)),
            ({}, (Phrase("reading.not-rotated"),)),
        ]
    if weights is not None:
        weights = Weights(**{name: rounded(array) for name, array in weights.named().items()})
    nothing = np.zeros((shape.batch, shape.query_length, shape.output_width))
    for (mask, means), (rotary, rotated), (causal, aligned) in itertools.product(
        _masks(given, shape), turned, [*_causal(given, shape)]
    ):
        extra = {**mask, **rotary}
        if "attn_bias" in extra and "attn_bias" in base:
            extra["attn_bias"] = extra["attn_bias"] + base["attn_bias"]
        problem = Problem(
            shape=shape,
            weights=weights or identities(shape),
            cotangent=nothing,
            causal=causal,
            heads_alone=weights is None,
            **{**base, **extra},
        )
        yield problem, (*means, *aligned, *rotated), notes


def merged(heads: np.ndarray) -> np.ndarray:
    """Return `[batch heads length head]` with the heads side by side, `[batch length width]`."""
    batch, count, length, size = heads.shape
    return np.ascontiguousarray(heads.transpose(0, 2, 1, 3)).reshape(batch, length, count * size)


def separate(width: np.ndarray, heads: int) -> np.ndarray:
    """Return `[batch length width]` with its heads apart: `[batch heads length head]`."""
    batch, length, size = width.shape
    return width.reshape(batch, length, heads, size // heads).transpose(0, 2, 1, 3)


def _check(layout: str, q: Array, k: Array, v: Array) -> None:
    """Raise `BadArrays` if heads `[batch heads length head]` do not go together."""
    shapes = f"query {list(q.shape)}, key {list(k.shape)}, value {list(v.shape)}"
    read = f"read as [batch heads length head], from {layout!r}: {shapes}"
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise BadArrays(f"query, key and value have different batch sizes ({read})")
    if k.shape[1] != v.shape[1]:
        raise BadArrays(f"key and value have different numbers of heads ({read})")
    if k.shape[2] != v.shape[2]:
        raise BadArrays(f"key and value have different lengths ({read})")
    if q.shape[3] != k.shape[3]:
        raise BadArrays(f"query and key have heads of different sizes ({read})")
    if q.shape[1] % k.shape[1]:
        raise BadArrays(
            f"{q.shape[1]} query heads cannot share {k.shape[1]} key/value heads ({read})"
        )


def _dtype(given: Given, arrays: Mapping[str, Numbers]) -> tuple[str, list[Phrase]]:
    """Return the dtype by whose roundoff the output is judged, and a note if it was found out.

    It is the narrowest format that holds every number of the output as it was stored: programs
    without bfloat16 save it in float32. Where there is none, it is that of the inputs if they are
    stored in a narrower one: a factor such as `np.sqrt(d)` makes NumPy's result float64.
    """
    if given.dtype:
        return dtype_of(given.dtype).name, []
    output = arrays["output"] if "output" in arrays else arrays["query"]
    finite = output.values[np.isfinite(output.values)]
    narrow = ("bfloat16", "float16", "float32")
    order = [it for it in narrow if dtype_of(it).roundoff > dtype_of(output.dtype).roundoff]
    if finite.any() and finite.size >= FEWEST:
        for name in order:
            if np.array_equal(dtype_of(name).round(finite), finite):
                return name, [Phrase("reading.dtype", {"dtype": name, "stored": output.dtype})]
    inputs = [arrays[name].dtype for name in ("query", "key", "value") if name in arrays]
    if len(inputs) == 3 and {*inputs} <= {*order}:
        name = min(inputs, key=lambda it: dtype_of(it).roundoff)
        why = Phrase("reading.dtype-of-inputs", {"dtype": name, "stored": output.dtype})
        return name, [why]
    return output.dtype, []


FEWEST = 16
"""The fewest numbers from which a dtype narrower than the stored one is concluded."""


def _window(window: Any) -> tuple[int | None, int | None]:
    """Return how many keys before and after its own a query sees.

    One number counts the query's own key, as models do: 4 is the own key and three before it.
    """
    if window is None:
        return NO_WINDOW
    if isinstance(window, int):
        if window < 1:
            raise BadArrays(f"window is {window}; it counts the own key, so it is at least 1")
        return (window - 1, 0)
    before, after = window
    return (before, after)


def _features(given: Given, shape: Shape) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, entry in _PLAIN.items():
        told = getattr(given, name)
        if told is not None and name in entry.arrays:
            values = _whole(name, told) if entry.whole else _floats(name, told).values
            told = _spread(name, values, [getattr(shape, axis) for axis in entry.arrays[name]])
        found[name] = told
    if given.rotary is not None:
        options = given.rotary
        if not isinstance(options, Rotary):
            options = dict(options)
            scaling = options.pop("scaling", None)
            if isinstance(scaling, Mapping):
                scaling = RotaryScaling.of(scaling)
            found["rotary_scaling"] = scaling
        try:
            found["rotary"] = (
                options
                if isinstance(options, Rotary)
                else Rotary(**{"size": shape.head_size, **options})
            )
        except TypeError as error:
            raise BadArrays(f"rotary takes size, base, pairs and scaling: {error}") from error
        if found["rotary"].pairs not in ("halves", "interleaved"):
            raise UnknownName("pairs", str(found["rotary"].pairs), ("halves", "interleaved"))
    if given.norm is not None:
        norm = given.norm
        if not isinstance(norm, Norm):
            gains = {
                side: np.ones(shape.head_size)
                if norm.get(side) is None
                else _sized(f"norm.{side}", _floats(side, norm[side]).values, shape.head_size)
                for side in ("query", "key")
            }
            norm = Norm(**gains, epsilon=float(norm.get("epsilon", 1e-6)))
        found["norm"] = norm
    for name, kind in (("segments", Segments), ("positions", Positions)):
        array = getattr(given, name)
        if array is None:
            continue
        sides = (
            (array["query"], array["key"])
            if isinstance(array, Mapping)
            else array
            if isinstance(array, tuple)
            else (array, array)
        )
        read = []
        for side, length in zip(sides, (shape.query_length, shape.key_length), strict=True):
            values = _whole(name, side)
            rows = values.shape[:-2] if name == "positions" else ()
            if values.shape[-1:] != (length,) or rows not in ((), (3,), (4,)):
                raise BadArrays(
                    f"{name} has shape {list(values.shape)}, wanted [batch, {length}]"
                    + (f", or [3, batch, {length}] for several axes" if rows else "")
                )
            read.append(np.broadcast_to(values, (*rows, shape.batch, length)).copy())
        query, key = read
        if query.ndim != key.ndim:
            raise BadArrays(f"{name} of queries and of keys have different numbers of axes")
        if query.ndim == 3:
            if math.prod(shape.logits) > MOST_LOGITS:
                raise BadArrays(
                    f"positions on several axes are judged beside up to {MOST_LOGITS:,} attention "
                    "weights; pass fewer heads, batch entries or queries"
                )
            found |= _of_axes(query, key)
            continue
        found[name] = kind(query=query, key=key)
    return found


def _of_axes(query: IntArray, key: IntArray) -> dict[str, Any]:
    """Return what positions `[3 or 4, batch, length]` are: those of a text first, then of axes."""
    found: dict[str, Any] = {}
    query, key = (np.moveaxis(side, 0, -1) for side in (query, key))
    if query.shape[-1] > len(POSITION_AXES):
        found["positions"] = Positions(query=query[..., 0], key=key[..., 0])
    of_query, of_key = (
        np.ascontiguousarray(side[..., -len(POSITION_AXES) :]) for side in (query, key)
    )
    return {**found, "axes": RotaryAxes(query=of_query, key=of_key)}


def _spread(name: str, array: Any, sizes: list[int]) -> Any:
    """Return an array of these sizes; one of the last axis alone is that of each batch entry."""
    if len(sizes) == 1:
        return _sized(name, array.reshape(-1), *sizes)
    if array.shape[-1:] != tuple(sizes[-1:]) or array.shape[:-1] not in ((), (1,), (sizes[0],)):
        raise BadArrays(f"{name} has shape {list(array.shape)}, wanted {sizes}")
    return np.broadcast_to(array, sizes).copy()


def _sized(name: str, array: Any, size: int) -> Any:
    if array.shape != (size,):
        raise BadArrays(f"{name} has shape {list(array.shape)}, wanted [{size}]")
    return array


def _whole(name: str, array: Any) -> IntArray:
    values = Numbers.of(name, array).values
    if not np.array_equal(values, np.round(values)):
        raise BadArrays(f"{name} holds numbers that are no integers")
    return values.astype(np.int64)


def _outputs(output: np.ndarray, layout: str, shape: Shape) -> Iterator[tuple[Array, str]]:
    """Yield the output as `[batch query width]`, with the layout in which it is so read.

    The layout of query, key and value is preferred; others are tried only where it does not fit.
    """
    wanted = (shape.batch, shape.heads, shape.query_length, shape.value_head_size)
    others = [*LAYOUTS.get(output.ndim, ()), MERGED.get(output.ndim, "")]
    fitting = []
    for one in dict.fromkeys([layout, *filter(None, others)]):
        try:
            heads = laid_out("output", output, one, shape.heads)
        except BadArrays:
            continue
        if heads.shape == wanted:
            fitting.append((merged(heads), one))
    if not fitting:
        raise BadArrays(
            f"output has shape {list(output.shape)}, which is not [batch heads query head] = "
            f"{list(wanted)} in any order of axes; query is read as {layout!r}"
        )
    if fitting[0][1] == layout or shape.heads == 1:
        yield fitting[0]
    else:
        yield from fitting


def _placed(placed: str, layout: str) -> tuple[Phrase, ...]:
    return () if placed == layout else (Phrase("reading.output", {"layout": placed}),)


def _broadcast(name: str, values: np.ndarray, shape: Shape) -> list[np.ndarray]:
    """Return the arrays `[batch heads query key]`, of full size or 1, as which a mask may be read.

    Raises:
        BadArrays: if there is none.
    """
    b, h, q, k = shape.logits
    places = {1: ["k"], 2: ["qk", "bk"], 3: ["bqk", "hqk", "b1k"], 4: ["bhqk"]}
    sizes = {"b": b, "h": h, "q": q, "k": k}
    found: list[np.ndarray] = []
    for place in places.get(values.ndim, []):
        fits = all(
            size in (1, sizes.get(axis, 1)) for axis, size in zip(place, values.shape, strict=True)
        )
        if fits:
            at = dict(zip(place, values.shape, strict=True))
            full = values.reshape([at.get(axis, 1) for axis in "bhqk"])
            if not any(np.array_equal(full, other) for other in found if other.shape == full.shape):
                found.append(full)
    if not found:
        raise BadArrays(
            f"{name} has shape {list(values.shape)}; wanted [batch heads query key] = "
            f"{[b, h, q, k]}, each axis in full or as 1, or [query key], [batch key], [key]"
        )
    return found


def _masks(given: Given, shape: Shape) -> Iterator[tuple[dict[str, Any], tuple[Phrase, ...]]]:
    """Yield the fields of the problem that the mask may mean, each with what is assumed."""
    if given.mask is None:
        yield {}, ()
        return
    numbers = Numbers.of("mask", given.mask)
    values = numbers.values
    if values.dtype == np.float64 and np.isnan(values).any():
        raise BadArrays("mask has elements that are NaN")
    placed = _broadcast("mask", values, shape)
    for full in placed:
        axes = tuple(n for n, size in zip("bhqk", full.shape, strict=True) if size > 1)
        where = (
            (Phrase("reading.mask-axes", {"axes": [_NAMES[axis] for axis in axes]}),)
            if len(placed) > 1
            else ()
        )
        if values.dtype == np.bool_ or np.isin(values, (0, 1)).all():
            for means in ("attends", "blocks"):
                if given.mask_true in ("", means):
                    seen = full.astype(np.bool_) == (means == "attends")
                    if not given.mask_true and not seen.any():
                        # No element would be judged, so that anything would fit.
                        continue
                    said = () if given.mask_true else (Phrase(f"reading.mask-{means}"),)
                    yield {"mask": seen}, (*said, *where)
            continue
        blocked = full <= BLOCKS
        rest = np.where(blocked, 0.0, full)
        fields: dict[str, Any] = {"mask": ~blocked} if blocked.any() else {}
        if rest.any():
            fields["attn_bias"] = rest.astype(np.float64)
        yield fields, where


_NAMES = {"b": "batch", "h": "heads", "q": "query", "k": "key"}


def _causal(given: Given, shape: Shape) -> Iterator[tuple[Causal | None, tuple[Phrase, ...]]]:
    if given.causal is None or given.causal is False:
        yield None, ()
    elif given.causal is not True:
        if given.causal not in ("top-left", "bottom-right"):
            raise UnknownName("causal", str(given.causal), ("top-left", "bottom-right"))
        yield given.causal, ()
    elif shape.query_length == shape.key_length:
        yield "bottom-right", ()
    else:
        for aligned in ("bottom-right", "top-left"):
            yield aligned, (Phrase("reading.causal", {"alignment": aligned}),)  # type: ignore[misc]


def _cotangent(given: Given, placed: str, shape: Shape, like: tuple[int, ...]) -> Array:
    gradients = given.gradients or {}
    if not gradients:
        return np.zeros(like)
    if gradients.get("output") is None:
        raise BadArrays(
            'gradients need that of the output, gradients["output"] (gradient.output in a file): '
            "ones if the loss is the sum of the output"
        )
    heads = laid_out(
        "gradient.output",
        _floats("gradient.output", gradients["output"]).values,
        placed,
        shape.heads,
    )
    return merged(heads)


def _answer(given: Given, output: Array, layout: str, shape: Shape) -> Answer:
    weights = None
    if given.weights is not None:
        values = _floats("weights", given.weights, finite=False).values
        while values.ndim < 4:
            values = values[None]
        if values.shape != shape.logits:
            raise BadArrays(
                f"weights have shape {list(values.shape)}, wanted [batch heads query key] = "
                f"{list(shape.logits)}"
            )
        weights = values
    gradients = {}
    for name, array in (given.gradients or {}).items():
        if name == "output" or array is None:
            continue
        if name not in ("query", "key", "value"):
            raise UnknownName("gradient", name, ("output", "query", "key", "value"))
        heads = shape.heads if name == "query" else shape.kv_heads
        values = _floats(f"gradient.{name}", array, finite=False).values
        apart = laid_out(f"gradient.{name}", values, layout, heads)
        gradients[name] = merged(apart)
        wanted = shape.input_shapes()[name]
        if gradients[name].shape != wanted:
            raise BadArrays(f"gradient.{name} has another shape than {name}")
    return Answer(output, weights, gradients)


def _of_rows(name: str, array: Any, shape: Shape) -> Array:
    """Return a statistic of rows in canonical layout, `[batch heads query]`."""
    values = _floats(name, array, finite=False).values
    if values.ndim and values.shape[-1] == 1 and shape.query_length != 1:
        values = values[..., 0]
    while values.ndim < 3:
        values = values[None]
    wanted = (shape.batch, shape.heads, shape.query_length)
    if values.shape != wanted and values.transpose(0, 2, 1).shape == wanted:
        values = values.transpose(0, 2, 1)
    if values.shape != wanted:
        raise BadArrays(
            f"{name} has shape {list(values.shape)}, wanted [batch heads query] = {list(wanted)}"
        )
    return values
