"""Judge a whole layer by its input, its weights under the names of a library, and its output."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from conformance.adapter.loading import checkpoints, importable
from conformance.adapter.native import Layer
from conformance.arrays import configuration
from conformance.arrays.diagnosis import Diagnosis, beside, by_two, judged
from conformance.arrays.given import Given, Numbers, Reading, problems
from conformance.cases.casefile import Tensor
from conformance.definition.problem import Answer, Shape, Weights
from conformance.errors import BadArrays, ConformanceError, WrongTensors, check_names
from conformance.porting.checkpoints import configuration as read_configuration
from conformance.porting.checkpoints import contents
from conformance.porting.conversion import absent, layer_of, table_of, tables
from conformance.records.findings import Phrase


def diagnose_layer(
    x: Any,
    weights: Mapping[str, Any],
    output: Any,
    *,
    of: str = "",
    heads: int | None = None,
    kv_heads: int | None = None,
    config: Any = None,
    layer: int = 0,
    **options: Any,
) -> Diagnosis:
    """Say whether the output of a layer is noise apart, and which mistake it shows.

    Args:
        x: the input, `[batch length width]`; or a tuple of those of query, key and value.
        weights: its weights by the names that the library has for them, such as "q_proj.weight",
            with or without what stands before them in a model. A tree of mappings, as Flax has, is
            taken as well, and so is a module of torch or of `flax.nnx`.
        output: the output, after the output projection.
        of: whose names these are: an implementation, such as "torch-mha", or a kind of models, such
            as "llama"; "" for the kind of the configuration, or else any that fits: kinds of models
            first, then implementations.
        heads: the number of query heads, if weights and configuration do not say it.
        kv_heads: the number of key/value heads, in that case.
        config: the model's configuration, or its file, as for `conformance.diagnose`.
        layer: the number of the layer in the configuration.
        options: the other arguments of `conformance.diagnose`: masks, causal, scale, rotary, ...

    Raises:
        ConformanceError: if the weights are not those of such a layer, or arrays contradict them.
    """
    told: dict[str, Any] = {}
    said: list[Phrase] = []
    if config is not None:
        if not isinstance(config, Mapping):
            config = read_configuration(Path(config))
        told, said = configuration.told(config, layer)
    sizes: dict[str, int] = {n: told.pop(n) for n in ("heads", "kv_heads") if n in told}
    sizes |= {n: it for n, it in (("heads", heads), ("kv_heads", kv_heads)) if it is not None}
    told |= {name: it for name, it in options.items() if it is not None}
    tree = _flat(_by_name(weights))
    numbers = {name: Numbers.of(name, array) for name, array in tree.items()}
    if not numbers:
        raise BadArrays(
            "there is the input x of a layer, and none of its weights; dump them under the names "
            "that they have, or query, key and value in place of x"
        )
    kinds = [of] if of else [*checkpoints()]
    if not of and config and config.get("model_type") in kinds:
        of = config["model_type"]
        kinds = [of]
    shape, named, features = _read(numbers, kinds, sizes, layer, is_open=not of)
    own = [Numbers.of("x", it) for it in (x if isinstance(x, tuple) else [x])]
    if len(own) not in (1, 3):
        raise BadArrays(f"x is a tuple of {len(own)}; it is one array, or query, key and value")
    inputs = dict(zip(("query", "key", "value"), own * 3 if len(own) == 1 else own, strict=True))
    query, key, value = inputs.values()
    other = told.pop("wanted", None)
    check_names("argument of diagnose", told, [it.name for it in fields(Given)])
    values = {
        name: it.values.reshape((1,) * (3 - it.values.ndim) + it.values.shape)
        for name, it in inputs.items()
    }
    for name, array in values.items():
        width = getattr(shape, f"{name}_width")
        if array.shape[-1] != width:
            raise BadArrays(f"x has {array.shape[-1]} components, and the weights take {width}")
    (batch, queries, _), keys = values["query"].shape, values["key"].shape[1]
    if {it.shape[0] for it in values.values()} != {batch} or values["value"].shape[1] != keys:
        shapes = ", ".join(f"{name} {list(it.shape)}" for name, it in values.items())
        raise BadArrays(f"these inputs do not go together: {shapes}")
    shape = replace(
        shape,
        batch=batch,
        query_length=queries,
        key_length=keys,
        sharing="self" if len(own) == 1 else "separate",
    )
    wanted = (batch, queries, shape.output_width)

    def read(name: str, output: Any) -> tuple[Given, list[Reading]]:
        given = Given(query=query, key=key, value=value, output=output, **told, **features)
        got = Numbers.of(name, output)
        if got.values.size != np.prod(wanted):
            raise BadArrays(f"{name} has shape {list(got.values.shape)}, wanted {list(wanted)}")
        answer = Answer(got.values.reshape(wanted))
        arrays = {**inputs, "output": got}
        return given, [
            Reading(problem, answer, {}, "batch length width", (*assumed, *said), tuple(notes))
            for problem, assumed, notes in problems(given, arrays, shape, Weights(**named), values)
        ]

    given, every = read("output", output)
    found = judged(every, given)
    if found.verdict == "deviates" and not found.causes:
        found = by_two(every, given) or found
    if other is None:
        return found
    second, others = read("the other output", other)
    return beside(found, judged(others, second), lambda: [(given, every), (second, others)])


def _by_name(weights: Any) -> Mapping[str, Any]:
    """Return the weights of a layer by name; those of a module if one is passed.

    Raises:
        BadArrays: if there are no names.
    """
    if isinstance(weights, Mapping):
        return weights
    if any(it.__module__.startswith("flax.nnx") for it in type(weights).__mro__):
        # It is imported, since somebody made a module of it.
        nnx: Any = sys.modules["flax.nnx"]
        found = nnx.state(weights, nnx.Param)
        return dict(nnx.to_pure_dict(found))
    if callable(getattr(weights, "state_dict", None)):
        return dict(weights.state_dict())
    raise BadArrays(
        f"weights is a {type(weights).__name__}, which has no names; pass its arrays by name: "
        "layer.state_dict() of torch, the tree of parameters of Flax, or "
        "{it.path: it for it in layer.weights} of Keras"
    )


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of a tree of mappings by their paths, such as "query/kernel"."""
    found: dict[str, Any] = {}
    for name, it in tree.items():
        leaves = {"": it}
        if isinstance(it, Mapping):
            leaves = {f"/{rest}": leaf for rest, leaf in _flat(it).items()}
        found |= {f"{name}{rest}": leaf for rest, leaf in leaves.items()}
    return found


def _native(given: Mapping[str, Numbers], layer: Layer, number: int) -> Mapping[str, Numbers]:
    """Return tensors by the names of the layer's parameters, if they have those of files.

    Raises:
        BadArrays: if there are those of several layers, and their names have no numbers.
    """
    checkpoint = layer.checkpoint
    if checkpoint is not None:
        place = checkpoint.places[0].format(layer=number)
        for before in ("", place):
            named = {f"{before}{name}": it for name, it in given.items()}
            every = contents(named, checkpoint).attentions
            chosen = [it for it in every if it.layer == number] or list(every)
            if len(chosen) == 1:
                return {native: named[file] for native, file in chosen[0].tensors.items()}
    listed = [[row.native for row in table] for table in tables(layer)]
    if all("/" in native for table in listed for native in table):
        # Trees of Flax are also flattened with dots.
        given = {name.replace(".", "/"): it for name, it in given.items()}
    inside = {
        name.removesuffix(native)
        for table in listed
        for name, native in itertools.product(given, table)
        if name.endswith((f".{native}", f"/{native}"))
    }
    whole = sorted(
        it
        for it in inside
        if any(all(f"{it}{name}" in given for name in table) for table in listed)
    )
    if len(whole) > 1:
        places = ", ".join(whole[:3])
        raise BadArrays(f"there are weights of {len(whole)} layers ({places}, ...); pass one's")
    # A layer may lack some of its parameters, such as biases.
    (before,) = whole or (inside if len(inside) == 1 else [""])
    return {name.removeprefix(before): it for name, it in given.items() if before in name}


def _read(
    numbers: Mapping[str, Numbers],
    kinds: list[str],
    sizes: Mapping[str, int],
    number: int,
    *,
    is_open: bool,
) -> tuple[Shape, dict[str, Any], dict[str, Any]]:
    """Return the shape, the canonical weights and the features that native tensors hold.

    If it is open whose they are, they may also be those of an implementation, if those of no other
    one have the same names and are stored otherwise.
    """
    reasons: list[ConformanceError] = []
    for kind in kinds:
        try:
            return _of_layer(numbers, layer_of(kind), sizes, number)
        except ConformanceError as reason:
            reasons.append(reason)
    found: dict[str, tuple[Shape, dict[str, Any], dict[str, Any]]] = {}
    for layer in _implementations() if is_open else ():
        try:
            found[layer.name] = _of_layer(numbers, layer, sizes, number)
        except ConformanceError as reason:
            reasons.append(reason)
    if found:
        first, *others = found.values()
        if any(not _are_equal(first, other) for other in others):
            raise BadArrays(
                f"these may be the weights of {' or '.join(found)}, which store them in different "
                "ways; say whose they are: of= (--of)"
            )
        return first
    # Names that fit, of weights that do not tell all sizes, tell more than other names.
    near = [it for it in reasons if not isinstance(it, WrongTensors | BadArrays)]
    if len(reasons) == 1 or (near and is_open):
        raise (near or reasons)[0]
    raise BadArrays(
        f"{', '.join(sorted(numbers)[:4])}, ... are the weights of none of {', '.join(kinds)}; say "
        "whose they are, and how many heads there are: --of, --heads"
    )


def _implementations() -> Iterator[Layer]:
    """Yield the implementations that have weights, and tables of them."""
    for adapter in importable():
        if isinstance(adapter, Layer) and adapter.checkpoint is None and any(tables(adapter)):
            yield adapter


def _are_equal(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Return whether two readings of weights are one."""
    return (
        one[0] == other[0]
        and one[1].keys() == other[1].keys()
        and all(np.array_equal(array, other[1][name]) for name, array in one[1].items())
    )


def _of_layer(
    given: Mapping[str, Numbers], layer: Layer, sizes: Mapping[str, int], number: int
) -> tuple[Shape, dict[str, Any], dict[str, Any]]:
    """Return what `_read` does, of a layer; raise `ConformanceError` if they are not its own."""
    numbers = _native(given, layer, number)
    features: dict[str, Any] = {}
    used: set[str] = set()
    for feature in layer.features:
        values = {name: numbers[name].values for name in feature.holds if name in numbers}
        if held := feature.held(values, 1e-6):
            features |= held
            used |= values.keys()
    tensors = {n: Tensor.of(n, it.values) for n, it in numbers.items() if n not in used}
    tensors |= absent(tensors, layer, sizes)
    table = table_of(tensors, layer, sizes)
    named = {
        name: array
        for row in table.rows
        for name, array in row.to_canonical(tensors[row.native].values, table.shape).items()
    }
    return table.shape, named, features
