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
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from conformance.adapter import layouts
from conformance.adapter.code import lines
from conformance.adapter.features import (
    MASKABLE,
    HeadNorm,
    PositionIds,
    RotaryBase,
    RotaryConfig,
    RotaryTables,
)
from conformance.adapter.loading import checkpoints, find, load
from conformance.adapter.native import Layer
from conformance.adapter.parameters import Parameter, ParameterTable
from conformance.cases.casefile import Tensor, write
from conformance.definition.geometry import PROJECTIONS
from conformance.definition.problem import WEIGHT_AXES, Pairs, Shape, Sharing
from conformance.errors import (
    ConformanceError,
    Unsupported,
    Untranslatable,
    WrongDeclaration,
    WrongShape,
    WrongTensors,
)
from conformance.porting.checkpoints import (
    Meaning,
    Store,
    chosen,
    contents,
    counts,
    meaning_of,
    named_model,
    opened,
)
from conformance.porting.masks import known_sizes

if TYPE_CHECKING:
    from conformance.porting.agreement import Agreement

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
    rotary_pairs: Pairs | None = None,
    scale: float | None = None,
) -> dict[str, np.ndarray]:
    """Convert the native parameters of one implementation to those of another, bit for bit.

    Rotary embeddings rotate pairs of components. If one implementation pairs the first half of a
    head with the second half, and the other pairs neighbouring components, the components of query
    and key heads are reordered, so that the same components are paired. This also happens if
    rotation is an option of both layers: weights that were trained with rotary embeddings need the
    new order, and without rotation the order does not matter, as long as queries and keys share it.

    Weights of a layer that rotates do not have the same meaning in one that does not. If it is not
    certain that both rotate or that neither does, `rotary_size` is required.

    Parameters of features, such as the factors of a query/key norm or sinks, may be missing from
    `tensors`. If they are given, they are converted, and the target must have them too.

    Args:
        tensors: arrays that NumPy can read, by the native names of the source's parameter table,
            such as "in_proj_weight" `[3·width width]`, or by those of its attention in a model,
            such as "q_proj.weight"; they must be exactly those of the table, except for
            parameters of features.
        source: the implementation that the tensors are from: an adapter's name ("torch-mha"), its
            title with or without the part in brackets, path/to/file.py:NAME, or the model_type of
            models that are declared ("gpt2").
        target: the implementation that the result is for, in the same form.
        heads: the number of heads; required if the tensors do not determine it.
        kv_heads: the number of key/value heads; required in the same case.
        rotary_size: the number of components of a head that are rotated; None for all of them, 0
            if neither layer rotates any. It is required if heads of odd size would have to be
            reordered, and if only one of the layers is sure to rotate.
        rotary_pairs: the pairs, "halves" or "interleaved", of the layer in which an argument
            selects them. It is required if the source has such an argument and the target does not.
        scale: the scale of the logits in the source; None for the default. It is required if models
            of the source differ in it.

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
    counted = known_sizes({"heads": heads, "kv_heads": kv_heads})
    whose = layer_of(source)
    if _differ_in_scale(whose) and scale is None:
        raise Untranslatable(
            f"models of {whose.name} differ in the scale of the logits; give scale="
        )
    meaning = Meaning(rotary_size=rotary_size, rotary_pairs=rotary_pairs, scale=scale)
    becomes = layer(target)
    made = _converted(_native(given, whose), whose, becomes, counted, meaning).made
    dtypes = {given[name].dtype: np.asarray(array).dtype for name, array in tensors.items()}
    native = {dtype: it.newbyteorder("=") for dtype, it in dtypes.items()}
    native = {"F32": np.dtype(np.float32)} | native
    return {name: tensor.bits.view(native[tensor.dtype]) for name, tensor in made.items()}


def convert_file(
    weights: Path,
    out: Path,
    *,
    target: str,
    source: str = "",
    heads: int | None = None,
    kv_heads: int | None = None,
    rotary_size: int | None = None,
    rotary_pairs: Pairs | None = None,
    scale: float | None = None,
    layer_number: int | None = None,
    all_layers: bool = False,
    prefix: str = "",
    out_prefix: str | None = None,
    run: bool = True,
    force: bool = False,
) -> Written:
    """Convert safetensors files as `convert` does, and add the conversion to the metadata.

    The names may be the native ones of the source, or those of a trained model, if the source
    declares them (`Layer.checkpoint`). Afterwards, both implementations are run on random inputs
    with these weights, if they can be run here. Only if they agree is the result written.

    Args:
        weights: the file to read, an index of several files, or the folder of a trained model.
        out: the file to write, which is written completely or not at all; it may be `weights`.
        target: as for `convert`.
        source: as for `convert`; "" for that of the model_type in `config.json`.
        heads: as for `convert`.
        kv_heads: as for `convert`.
        rotary_size: as for `convert`.
        rotary_pairs: as for `convert`.
        scale: as for `convert`; for a trained model, None for that in `config.json`.
        layer_number: the number of the layer of a trained model; None if there is only one.
        all_layers: whether to convert all attentions that are not excluded by other arguments.
        prefix: convert only tensors whose names begin with this, such as
            "encoder.layers.0.self_attn."; the rest of each name must be a native name. Other
            tensors are not written. For a trained model, the beginning of the attentions' names.
        out_prefix: a prefix for the names in the new file, in which "{layer}" is the number of the
            layer. None for none or, if there are several attentions, for their names in the model.
        run: whether to run both implementations.
        force: overwrite an existing file.

    Returns:
        What was written and left over, and how much the implementations differ.

    Raises:
        WrongTensors: as for `convert`; also if the input is missing or is not a safetensors file,
            if it is not clear which tensors are meant, or if the output already exists and `force`
            is false.
        UnknownName: as for `convert`.
        WrongShape: as for `convert`.
        Untranslatable: as for `convert`.
        Disagreement: the implementations give different outputs; nothing is written.
        ConformanceError: as for `convert`.
    """
    from conformance.porting.agreement import agreement

    becomes = layer(target)
    if out.exists() and not force:
        raise WrongTensors(f"{out} exists already; --force overwrites it")
    store = opened(weights)
    whose = layer_of(source) if source else _of_model(named_model(store))
    counted = known_sizes({"heads": heads, "kv_heads": kv_heads})
    given = Meaning(rotary_size=rotary_size, rotary_pairs=rotary_pairs, scale=scale)
    parts, others = _parts(
        store, whose, prefix, counted, given, layer_number=layer_number, all_layers=all_layers
    )
    renamed: dict[str, Tensor] = {}
    pieces = []
    for part in parts:
        begin = out_prefix if out_prefix is not None else part.place if len(parts) > 1 else ""
        begin = begin.replace("{layer}", "" if part.number is None else str(part.number))
        tensors = {native: store.read(name) for native, name in part.names.items()}
        where = f"{weights}: {part.place}: " if part.place else f"{weights}: "
        try:
            done = _converted(tensors, whose, becomes, part.counts, part.meaning)
        except WrongTensors as error:
            hint = "" if _known(whose, part.names) else _elsewhere(store, whose, prefix)
            own = whose.checkpoint.own if whose.checkpoint and part.number is not None else ""
            # Native names begin as in a model of one layer, which is another than this one.
            told = str(error).replace(own, "") if own else str(error)
            raise WrongTensors(f"{where}{told}{hint}") from error
        except Untranslatable as error:
            raise Untranslatable(f"{where}{error}") from error
        new = {begin + name: tensor for name, tensor in done.made.items()}
        if repeated := sorted(new.keys() & renamed.keys()):
            raise WrongTensors(
                f"{repeated[0]} would be written twice; use {{layer}} in --out-prefix, or leave it "
                "out"
            )
        renamed |= new
        ran = agreement(done, where) if run else None
        pieces.append(Piece(part.place, begin, done.shape, ran, done.notes))
    first = pieces[0].shape
    note = {
        "from": whose.name,
        "to": becomes.name,
        "heads": first.heads,
        "kv_heads": first.kv_heads,
        **({} if rotary_size is None else {"rotary_size": rotary_size}),
        **({} if rotary_pairs is None else {"rotary_pairs": rotary_pairs}),
        **({} if scale is None else {"scale": scale}),
        "prefix": parts[0].place if len(parts) == 1 else prefix,
        "out_prefix": out_prefix or "",
        "by": f"mha-conformance {metadata.version('mha-conformance')}",
    }
    write(out, renamed, _noted(store.metadata, note))
    return Written(whose.name, tuple(pieces), others)


@dataclass(frozen=True)
class Piece:
    """An attention that was converted.

    Attributes:
        place: how its names begin in the files that were read.
        begin: how its names begin in the file that was written.
        shape: the shape that the tensors imply; its batch size and its lengths are 1.
        ran: how much source and target differ; None if they were not run.
        notes: what the target must be built or called with, as text.
    """

    place: str
    begin: str
    shape: Shape
    ran: Agreement | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Written:
    """What `convert_file` did.

    Attributes:
        source: the name of the implementation whose weights were read.
        pieces: the attentions that were written.
        left_over: the names of all tensors that were not, by kind.
    """

    source: str
    pieces: tuple[Piece, ...]
    left_over: Mapping[str, tuple[str, ...]]

    @property
    def shape(self) -> Shape:
        """The shape of the first attention."""
        return self.pieces[0].shape


@dataclass(frozen=True, eq=False)
class _Part:
    """The tensors of an attention in a store: names by native names, and what is known of them."""

    place: str
    number: int | None
    names: Mapping[str, str]
    counts: Mapping[str, int]
    meaning: Meaning


def _of_model(kind: str) -> Layer:
    """Return the layer whose adapter is declared for models of a `model_type`."""
    models = checkpoints()
    if kind not in models:
        raise Untranslatable(
            f"no adapter is declared for the model_type {kind!r}, only for "
            f"{', '.join(sorted(models))}; declare one with the names of its files "
            "(`Layer.checkpoint`), or, if it computes what one of these does, move the weights "
            "away from their config.json, and name that one with --from and --prefix"
        )
    point = models[kind]
    found = load(point.value)
    assert isinstance(found, Layer)
    found.name = kind
    return found


def layer_of(spec: str) -> Layer:
    """Return the layer of an implementation, or of models of a `model_type`."""
    return _of_model(spec) if spec in checkpoints() else layer(spec)


def _differ_in_scale(layer: Layer) -> bool:
    """Return whether models of the layer differ in the scale of the logits."""
    always = layer.fixed is not None and layer.fixed.scale
    return layer.checkpoint is not None and layer.checkpoint.scale is not None and not always


def _native(named: Mapping[str, Any], layer: Layer) -> dict[str, Any]:
    """Return what is given by the names of one attention in a model, by the layer's native names.

    Other names are kept.
    """
    checkpoint = layer.checkpoint
    if checkpoint is None:
        return dict(named)
    natives = {row.native for table in tables(layer) for row in table}
    natives |= {*_parameters_of_features(layer)}
    rests = {name: name.removeprefix(checkpoint.own) for name in natives}
    owns = {checkpoint.renamed.get(rest, rest): name for name, rest in rests.items()}
    return {owns.get(name, name): it for name, it in named.items()}


def _parts(
    store: Store,
    whose: Layer,
    prefix: str,
    given: Mapping[str, int],
    meant: Meaning,
    *,
    layer_number: int | None,
    all_layers: bool,
) -> tuple[list[_Part], Mapping[str, tuple[str, ...]]]:
    """Return the attentions that are asked for, and the names of the other tensors by kind."""
    checkpoint = whose.checkpoint
    if meant.scale is None and whose.fixed and whose.fixed.scale:
        meant = replace(meant, scale=whose.fixed.scale)
    every = None if checkpoint is None else contents(store.files, checkpoint)
    asked = layer_number is not None or all_layers
    if asked and not (every and every.attentions):
        raise Untranslatable(
            f"{whose.name} does not declare how models name its layers (`Layer.checkpoint`); "
            "select one with --prefix"
            if checkpoint is None
            else f"{store.path} has no tensor named as in {' or '.join(checkpoint.places)}"
        )
    names = [name for name in store.files if name.startswith(prefix)]
    own = {name.removeprefix(prefix): name for name in names}
    whole = any(it.place.startswith(prefix) for it in every.attentions) if every else False
    if every is None or checkpoint is None or not (whole or asked):
        if not names:
            raise WrongTensors(
                f"{store.path}: no tensor's name begins with {prefix!r}"
                f"{_elsewhere(store, whose, '')}"
            )
        if _differ_in_scale(whose) and meant.scale is None:
            raise Untranslatable(
                f"{store.path}: models of {whose.name} differ in the scale of the logits; give "
                "--scale"
            )
        own = _native(own, whose)
        rest = tuple(name for name in store.files if name not in names)
        return [_Part(prefix, None, own, given, meant)], {"others": rest} if rest else {}
    kind = (store.config or {}).get("model_type")
    if kind is not None and kind not in checkpoint.models:
        raise Untranslatable(
            f"{store.path}: config.json says that these are weights of {kind}, and {whose.name} is "
            f"of {' or '.join(checkpoint.models)}; "
            f"{'leave out --from, or ' if kind in checkpoints() else ''}move the weights away from "
            "their config.json if they mean the same"
        )
    parts = []
    picked = chosen(store, every, prefix=prefix, layer=layer_number, all_layers=all_layers)
    for attention in picked:
        added = attention.stack in every.added
        known = meaning_of(store.config, checkpoint, attention, meant, added=added)
        heads = counts(store.config or {}, given)
        parts.append(_Part(attention.place, attention.layer, attention.tensors, heads, known))
    left = [it for it in every.attentions if it not in picked]
    further = tuple(name for it in left for name in it.tensors.values())
    return parts, {**every.others, **({"attentions of other layers": further} if left else {})}


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


@dataclass(frozen=True, eq=False)
class Conversion:
    """Converted tensors, and what is needed to run both implementations with them.

    Attributes:
        source, target: the implementations.
        given, made: the tensors by native names, of the source and of the target.
        read, written: the parameter tables of both, for one shape.
        turns: how both rotate; None if neither does.
        meaning: what the weights mean in the source.
        scale: the scale of the logits in the target; None for the default.
        notes: what the target must be built or called with, as text.
    """

    source: Layer
    target: Layer
    given: Mapping[str, Tensor]
    made: Mapping[str, Tensor]
    read: ParameterTable
    written: ParameterTable
    turns: Turns
    meaning: Meaning
    scale: float | None
    notes: tuple[str, ...]

    @property
    def shape(self) -> Shape:
        """The shape that the tensors of the source imply."""
        return self.read.shape


def _converted(
    tensors: Mapping[str, Tensor],
    source: Layer,
    target: Layer,
    given: Mapping[str, int],
    meaning: Meaning,
) -> Conversion:
    own = _parameters_of_features(source)
    weights = {name: tensor for name, tensor in tensors.items() if name not in own}
    zeros = absent(weights, source, given)
    weights |= zeros
    table = table_of(weights, source, given)
    shape = table.shape
    names = [name for row in table.rows for name in row.names]
    sizes = {name: getattr(shape, name) for name in SIZES}
    blank = {name for row in table.rows if row.native in zeros for name in row.names}
    fitting = _fitting(source, target, list(shapes_of(sizes, names)), blank)
    sure = meaning.rotation.base is not None  # a base that the model's configuration tells
    meaning = _as_always(source, meaning)
    of_features = {own[name]: tensors[name] for name in own if name in tensors}
    turns = _turns(source, target, shape.head_size, meaning, sure=sure)
    notes = [*turns.notes, *_of_meaning(source, target, meaning, {*of_features})]
    factor, scale = _scaled(source, target, shape, meaning)
    always = target.fixed is not None and target.fixed.scale
    if target.custom_scale and scale is not None and not always:
        notes.append(f"the scale {scale:.10g}")
    if target.fixed and target.fixed.causal and not (source.fixed and source.fixed.causal):
        notes.append("weights of a causal model, because it always masks later keys")
    # A norm removes any factor of the queries, so its gain has to be multiplied.
    normed = "norm.query" in of_features
    if factor != 1.0:
        its = shape.default_scale if scale is None else scale
        of = "the gains of queries were" if normed else "queries were"
        notes.append(f"its scale {its:.10g}, for which {of} multiplied by {factor:g}")
    made = _written(weights, table, fitting, turns.order, 1.0 if normed else factor)
    made |= _of_features(of_features, source, target, shape, turns.order, factor)
    if blank := blank & {name for row in fitting.rows for name in row.names}:
        biases = " and ".join(name for name in PROJECTIONS if f"{name}_bias" in blank)
        notes.append(f"zeros as the bias of {biases}, where the model has none")
    return Conversion(
        source,
        target,
        {**tensors, **zeros},
        made,
        table,
        fitting,
        turns,
        meaning,
        scale,
        (*notes, *meaning.told),
    )


def _as_always(source: Layer, meaning: Meaning) -> Meaning:
    """Return the meaning of weights, with what the source has in every call.

    Raise `Untranslatable` if the meaning contradicts that.
    """
    known = {"base": meaning.rotation.base, "rotary_size": meaning.turned, "scale": meaning.scale}
    own: dict[str, float | int] = {}
    turns = rotary_of(source)
    if isinstance(turns, RotaryBase) and not isinstance(turns.base, str):
        own["base"] = turns.base
    if source.fixed is not None:
        own |= {"scale": source.fixed.scale} if source.fixed.scale else {}
        own |= {"rotary_size": source.fixed.rotary_size} if source.fixed.rotary_size else {}
    for name, always in own.items():
        given = known[name]
        if given is not None and not math.isclose(given, always, rel_tol=1e-9):
            what = {"base": "rotary base", "rotary_size": "number of rotated components"}
            raise Untranslatable(
                f"the {what.get(name, name)} of these weights is {given:g}, and that of "
                f"{source.name} is always {always:g}"
            )
    rotation = replace(meaning.rotation, base=own.pop("base", meaning.rotation.base))
    return replace(meaning, rotation=rotation, **own)  # type: ignore[arg-type]


def absent(
    tensors: Mapping[str, Tensor], source: Layer, given: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return zeros for the biases that the models of `source` lack beside others that they have."""
    lacking = source.checkpoint.absent if source.checkpoint else ()
    rows = [row for table in tables(source)[:1] for row in table]
    biases = [row for row in rows if any(name.endswith("_bias") for name in row.names)]
    there = [row.native for row in biases if row.native in tensors]
    missing = [
        row for row in biases if set(row.names) <= set(lacking) and row.native not in tensors
    ]
    if not there or not missing:
        return {}
    bare = {name: it for name, it in tensors.items() if name not in {it.native for it in biases}}
    sizes = {size: getattr(table_of(bare, source, given).shape, size) for size in SIZES}
    first = tensors[there[0]]
    return {
        row.native: Tensor(first.dtype, np.zeros(native_shape(row, sizes), first.bits.dtype))
        for row in missing
    }


def _of_meaning(
    source: Layer, target: Layer, meaning: Meaning, given: Collection[str]
) -> Iterator[str]:
    """Yield what the target must be built or called with for these weights, as text.

    `given` holds the canonical names of parameters of features. Raise `Untranslatable` if the
    target cannot compute what the source does, or always does more.
    """
    covered = {part for feature in target.features for part in feature.covers}
    adds = [
        name
        for name, it in target.masks.by_name.items()
        if it.number == "added" and it.layout_over("heads", "query", "key")
    ]
    refusal = f"{target.name} cannot have these weights of {source.name}"
    norm = "norm.query" in given
    if "query/key norm" in source.always and not norm:
        raise WrongTensors(
            f"these are not the weights of {source.name}: missing the gains of its query/key norm"
        )
    needed = {*source.always} | ({"soft cap"} if meaning.soft_cap is not None else set())
    needed |= {"query/key norm"} if norm else set()
    lacking = sorted(part for part in needed - covered if not (part in MASKABLE and adds))
    if lacking:
        raise Untranslatable(
            f"{refusal}: it has no place for {', '.join(lacking)}; choose another target"
        )
    if more := sorted({*target.always} - needed):
        raise Untranslatable(
            f"{refusal}: it always has {', '.join(more)}, with which they were not trained; choose "
            "another target"
        )
    if meaning.added and not adds:
        raise Untranslatable(
            f"{refusal}: {meaning.added} is added to the logits, and the target has no argument "
            "for that; choose another target"
        )
    if meaning.added:
        yield f"{meaning.added} of the model, as {adds[0]}"
    if "alibi" in source.always and "alibi" not in target.always:
        yield f"ALiBi with the slopes of {source.name}"
    if meaning.soft_cap is not None:
        yield f"the soft cap {meaning.soft_cap:g}"
    elif target.checkpoint is not None and "soft cap" in covered:
        yield "no soft cap"
    if target.checkpoint is not None and "window" in covered and not meaning.windowed:
        yield "no window"
    if norm:
        yield from _of_epsilon(source, target, meaning, refusal)


def _of_epsilon(source: Layer, target: Layer, meaning: Meaning, refusal: str) -> Iterator[str]:
    """Yield which ε the target's norm must have, as text; raise `Untranslatable` if it cannot."""
    (own,) = (it.epsilon for it in source.features if isinstance(it, HeadNorm))
    (its,) = (it.epsilon for it in target.features if isinstance(it, HeadNorm))
    epsilon = own if isinstance(own, float) else meaning.epsilon
    if epsilon is None:
        yield "the epsilon of the query/key norm that the source has"
    elif isinstance(its, str):
        yield f"{its}={epsilon:g}"
    elif its != epsilon:
        raise Untranslatable(
            f"{refusal}: its query/key norm has the epsilon {its:g}, and theirs is {epsilon:g}; "
            "choose another target"
        )


def _scaled(
    source: Layer, target: Layer, shape: Shape, meaning: Meaning
) -> tuple[float, float | None]:
    """Return the factor by which queries are multiplied, and the scale of the target.

    The scale is None for the default, or what the target has in every call. If it has no other, the
    weights are multiplied by the difference, if that changes no digit. Else raise `Untranslatable`.
    """
    always = target.fixed.scale if target.fixed and target.fixed.scale else None
    its = shape.default_scale if always is None else always
    scale = shape.default_scale if meaning.scale is None else meaning.scale
    chosen = target.custom_scale and always is None
    # Models that differ in the scale have another default.
    if chosen and target.checkpoint is not None and target.checkpoint.scale is not None:
        return 1.0, scale
    if math.isclose(scale, its, rel_tol=1e-9):
        return 1.0, always
    if chosen:
        return 1.0, scale
    factor = scale / its
    power = 2.0 ** round(math.log2(factor)) if factor > 0 else 0.0
    if not math.isclose(factor, power, rel_tol=1e-9):
        raise Untranslatable(
            f"{target.name} cannot have these weights of {source.name}: the scale of their logits "
            f"is {scale:.6g}, that of the target always {its:.6g}, and to multiply the queries by "
            f"{factor:.6g} would round them; choose a target with a scale of its own"
        )
    return power, always


def _times(tensor: Tensor, factor: float, name: str) -> Tensor:
    """Return a tensor times a power of two; raise `Untranslatable` if a number is rounded."""
    kind = {"F64": np.float64, "F16": np.float16}.get(tensor.dtype, np.float32)
    with np.errstate(over="ignore", under="ignore"):
        scaled = tensor.values * factor
        bits = scaled.astype(kind).view(f"u{np.dtype(kind).itemsize}")
    if tensor.dtype == "BF16":
        bits = (bits >> 16).astype(np.uint16)
    made = Tensor(tensor.dtype, bits)
    if not np.array_equal(made.values, scaled) or not np.array_equal(
        scaled / factor, tensor.values
    ):
        raise Untranslatable(
            f"{name} times {factor:g} would be rounded in {tensor.dtype}; convert the weights to "
            "another dtype, or choose a target with a scale of its own"
        )
    return made


def _gains(tensor: Tensor, offsets: tuple[float, float], factor: float, name: str) -> Tensor:
    """Return the parameters of a norm whose gains are `factor` times those of `tensor`.

    `offsets` are what source and target add to their parameters to get the gains. Sums are computed
    in float32 or wider, as layers do.
    """
    before, after = offsets
    if before == after and factor == 1.0:
        return tensor
    if before == after == 0.0:
        return _times(tensor, factor, name)
    kind = np.float64 if tensor.dtype == "F64" else np.float32
    return Tensor.of(name, ((tensor.values + before) * factor - after).astype(kind))


def _parameters_of_features(layer: Layer) -> dict[str, str]:
    """Return a canonical name for each parameter of the layer's features, by its native name."""
    return {name: what for feature in layer.features for name, what in feature.holds.items()}


def _of_features(
    tensors: Mapping[str, Tensor],
    source: Layer,
    target: Layer,
    shape: Shape,
    order: np.ndarray | None,
    factor: float,
) -> dict[str, Tensor]:
    """Return the target's parameters of features by native name, given `tensors` by canonical name.

    `order` holds, for each component of the target's heads, its index in the source's heads; None
    stands for the same order. The gains of queries are multiplied by `factor`. Raise `WrongTensors`
    if the tensors do not fit the source, and `Untranslatable` if the target has no place for one.
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
        if name in TURNED:
            offsets = _offset(source), _offset(target)
            times = factor if name == "norm.query" else 1.0
            made[becomes[name]] = _gains(made[becomes[name]], offsets, times, name)
    return made


def _offset(layer: Layer) -> float:
    """Return what the layer adds to the parameters of its query/key norm to get the gains."""
    return next((it.offset for it in layer.features if isinstance(it, HeadNorm)), 0.0)


TURNED = ("query", "key", "query_bias", "key_bias", "norm.query", "norm.key")
"""Canonical weights whose last axis holds the components that rotary embeddings rotate."""


@dataclass(frozen=True, eq=False)
class Turns:
    """How source and target rotate the components of heads.

    Attributes:
        size: the number of components that are rotated; 0 if neither rotates.
        base: the base of the angles; None if it is not known.
        before, after: the pairs of source and target.
        order: for each component `[head]` of the target's heads, its index in the source's heads;
            None for the same order.
        notes: what the target must be built or called with, as text.
    """

    size: int = 0
    base: float | None = None
    before: Pairs = "halves"
    after: Pairs = "halves"
    order: np.ndarray | None = None
    notes: tuple[str, ...] = ()


def always_turns(layer: Layer) -> RotaryBase | RotaryConfig | RotaryTables | None:
    """Return the rotary embeddings that the layer applies in every call; None if there are none."""
    fixed = layer.fixed
    if layer.rotary is None and fixed is not None and fixed.rotary_base:
        return RotaryBase(fixed.rotary_base, pairs=fixed.rotary_pairs)
    return layer.rotary


def rotary_of(layer: Layer) -> RotaryBase | RotaryConfig | RotaryTables | None:
    """Return the declaration of the layer's rotary embeddings; None if it never rotates.

    Raises:
        Untranslatable: if it declares positions for rotary embeddings, but not their pairs.
    """
    declared = [
        it for it in layer.features if isinstance(it, RotaryBase | RotaryConfig | RotaryTables)
    ]
    found = always_turns(layer) or next(iter(declared), None)
    if found is None and any(
        isinstance(it, PositionIds) and "rotary" in it.of for it in layer.features
    ):
        raise Untranslatable(
            f"{layer.name} has positions for rotary embeddings and does not declare their pairs; "
            "declare RotaryBase or RotaryTables, with pairs=, among the features of its adapter"
        )
    return found


def _only_texts(source: Layer, target: Layer) -> Iterator[str]:
    """Yield why the target turns images other than the source, although it turns texts alike."""
    one, other = (
        next((it for it in layer.features if isinstance(it, RotaryConfig) and it.axes), None)
        for layer in (source, target)
    )
    if one is not None and other is None:
        yield f"texts only: {target.name} takes no positions on several axes"
    elif one is not None and other is not None and not {*one.sections} & {*other.sections}:
        laid = f"{' or '.join(one.sections)}, those of {target.name} {' or '.join(other.sections)}"
        yield f"texts only: the sections of {source.name} are {laid}"


def _turns(source: Layer, target: Layer, head_size: int, meaning: Meaning, *, sure: bool) -> Turns:
    """Return how both layers rotate, and the order in which both pair the same components.

    `sure` says that the model of these weights rotates, whatever the user says.
    Raise `WrongShape` if `rotary_size` is impossible, and `Untranslatable` if it is not certain
    that both rotate the same components, or if they cannot.
    """
    told, rotation = meaning.turned, meaning.rotation
    size = head_size if told is None else told
    if not 0 <= size <= head_size or (size % 2 and told is not None):
        raise WrongShape(
            f"rotary_size is {size}; it must be even and at most {head_size}, the size of a head"
        )
    one, other = rotary_of(source), rotary_of(target)
    always = always_turns(target)
    turning = [it.name for it in (source, target) if it.fixed and it.fixed.rotary_base]
    if told == 0 and (turning or sure):
        raise Untranslatable(
            f"{' and '.join(turning) or 'the model of these weights'} rotates queries and keys in "
            "every call; leave out --rotary-size 0 (rotary_size=0)"
        )
    if told == 0 or (one is None and (other is None or always is None)):
        return Turns(notes=("no rotary embeddings",) if other and not always else ())
    if one is None or other is None or (told is None and always and not always_turns(source)):
        raise Untranslatable(_unlike(source, target, sure=sure or bool(turning)))
    pairs = meaning.rotary_pairs
    if pairs is not None and not one.flag and not other.flag:
        raise Untranslatable(
            f"{source.name} and {target.name} declare their pairs; leave out --rotary-pairs "
            "(rotary_pairs=)"
        )
    if one.flag and not other.flag and pairs is None:
        raise Untranslatable(
            f"in {source.name}, the argument {one.flag} selects the pairs of rotary embeddings, "
            f"and those of {target.name} are {other.pairs}; say which the weights were trained "
            "with: --rotary-pairs halves or interleaved (rotary_pairs=)"
        )
    if isinstance(other, RotaryBase):
        its = head_size
        if target.fixed and target.fixed.rotary_base:
            its = target.fixed.rotary_size or head_size
        which = f"all {its}" if its == head_size else f"{its} of {head_size}"
        fixed = [] if other.size or size == its else [f"{which} components, not {size}"]
        if not isinstance(other.base, str) and rotation.base not in (None, other.base):
            fixed.append(f"with the base {other.base:g}, not {rotation.base:g}")
        if not isinstance(other.base, str) and rotation.scaling:
            fixed.append(f"without scaling, not of the kind {rotation.scaling}")
        if fixed:
            raise Untranslatable(
                f"{target.name} cannot have these weights of {source.name}: it always rotates "
                f"{' and '.join(fixed)}; choose another target"
            )
    before = (pairs or "halves") if one.flag else one.pairs
    after = (pairs or before) if other.flag else other.pairs
    number = rotation.base
    if number is None and isinstance(other, RotaryBase) and not isinstance(other.base, str):
        number = other.base
    base = "" if number is None else f", base {number:g}"
    part = f", {size} of {head_size} components" if size < head_size else ""
    kept = "as in the source" if one.flag and pairs is None else after == "interleaved"
    flag = f", {other.flag}={kept}" if other.flag else ""
    optional = "" if always_turns(source) else ", if the source has them"
    notes = (f"rotary embeddings{base}{part}{flag}{optional}", *_only_texts(source, target))
    if before == after:
        return Turns(size, number, before, after, None, notes)
    if size % 2:
        raise Untranslatable(
            f"heads of size {size} have no pairs; give the number of components that turn, 0 for "
            "none, with --rotary-size (rotary_size=)"
        )
    order = np.arange(head_size)
    # Transposing two rows, one for each half, makes neighbours of pairs, and vice versa.
    sides = (2, -1) if before == "halves" else (-1, 2)
    order[:size] = order[:size].reshape(sides).T.ravel()
    return Turns(size, number, before, after, order, notes)


def _unlike(source: Layer, target: Layer, *, sure: bool) -> str:
    """Return why weights of one layer are none of the other, of which only one surely rotates.

    `sure` says that it rotates in every call, whatever the user says.
    """
    one, other = rotary_of(source), rotary_of(target)
    said = []
    for layer, found in ((source, one), (target, other)):
        how = "always rotates" if always_turns(layer) else "can rotate"
        pairs = "" if found is None else found.flag or found.pairs
        rotates = f"{how} queries and keys (pairs: {pairs})"
        said.append(f"{layer.name} {rotates if found else 'declares no rotary embeddings'}")
    ways = ["choose another target"]
    if not (one and other):
        ways[:0] = ["declare them with their pairs in its adapter (RotaryBase or RotaryTables)"]
    if one and other:
        ways += [
            "give --rotary-size (rotary_size=), how many components the weights turn, 0 if none"
        ]
    elif not sure:
        ways += ["give --rotary-size 0 (rotary_size=0) if none turns on either side"]
    *first, last = ways
    return f"{said[0]}, and {said[1]}: {', '.join(first)}{', or ' if first else ''}{last}"


def _written(
    tensors: Mapping[str, Tensor],
    source: ParameterTable,
    target: ParameterTable,
    order: np.ndarray | None,
    factor: float,
) -> dict[str, Tensor]:
    """Return the target's tensors by native name, converted by way of the canonical layout.

    `order` holds, for each component of the target's heads, its index in the source's heads; None
    stands for the same order. Queries are multiplied by `factor`. Raise `Untranslatable` if that
    rounds them, or if weights of different dtypes belong in one tensor.
    """
    canonical: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    for row in source.rows:
        canonical |= row.to_canonical(tensors[row.native].bits, source.shape)
        dtypes |= dict.fromkeys(row.names, tensors[row.native].dtype)
    if order is not None:
        turned = canonical.keys() & set(TURNED)
        canonical |= {name: canonical[name][..., order] for name in turned}
    for name in canonical.keys() & {"query", "query_bias"} if factor != 1.0 else ():
        canonical[name] = _times(Tensor(dtypes[name], canonical[name]), factor, name).bits
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


def _fitting(
    source: Layer, target: Layer, shapes: Sequence[Shape], blank: Collection[str]
) -> ParameterTable:
    """Return the target's table for the first of these shapes that the target supports.

    The biases in `blank` are zeros that were added; a target that never has them does without.

    Raise `Untranslatable` if the target supports none, or if its table lacks a place for a weight.
    """
    refusal = f"{target.name} cannot have these weights of {source.name}"
    reason = f"no {shapes[0].score} score"
    fixed = target.fixed
    if fixed and isinstance(fixed.bias, tuple):
        without = {f"{name}_bias" for name in PROJECTIONS} - {f"{it}_bias" for it in fixed.bias}
        if without <= {*blank}:
            shapes = [replace(shape, bias=fixed.bias) for shape in shapes]
    for shape in shapes if shapes[0].score in target.scores else ():
        try:
            _check_shape(target, shape)
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


def _check_shape(layer: Layer, shape: Shape) -> None:
    """Raise `Unsupported` if the layer cannot have this shape, or has another in every call."""
    layer.check_shape(shape)
    if layer.fixed is not None:
        layer.fixed.check_shape(shape)
    if isinstance(shape.bias, tuple) and not (layer.fixed and layer.fixed.bias):
        raise Unsupported("all projections have biases or none has")


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
    biased = tuple(name for name in PROJECTIONS if f"{name}_bias" in weights)
    for sharing in SHARINGS:
        with suppress(WrongShape):
            yield Shape(
                batch=1,
                query_length=1,
                key_length=1,
                bias=biased if 0 < len(biased) < len(PROJECTIONS) else bool(biased),
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
    all_biases = tuple(f"{name}_bias" for name in PROJECTIONS)
    every: list[Shape] = []
    for wide, kv_heads, value_head, score, biases in itertools.product(
        widths, (4, 2, 1), (2, 3), scores, (all_biases, ())
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
                _check_shape(self.source, shape)
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


def table_of(
    tensors: Mapping[str, Tensor], source: Layer, given: Mapping[str, int]
) -> ParameterTable:
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


def _elsewhere(store: Store, whose: Layer, prefix: str) -> str:
    """Return a hint that lists prefixes with which the file names parameters of the layer `whose`.

    At most three prefixes other than `prefix` are listed. If there are none, return "".
    """
    natives = {row.native for table in tables(whose) for row in table}
    prefixes = {
        name.removesuffix(native)
        for name, native in itertools.product(store.files, natives)
        if name.endswith((f".{native}", f"/{native}"))
    }
    names = sorted(prefixes - {prefix})
    more = " ..." if names[3:] else ""
    return f"; try --prefix {' or '.join(names[:3])}{more}" if names else ""


def _known(whose: Layer, names: Collection[str]) -> bool:
    """Return whether one of these native names is a parameter of the layer `whose`."""
    return any(row.native in names for table in tables(whose) for row in table)


def _noted(before: Mapping[str, str], note: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a file, extended by a note on one more conversion."""
    try:
        notes = json.loads(before.get(NOTE, "[]"))
    except json.JSONDecodeError:
        notes = before[NOTE]
    notes = notes if isinstance(notes, list) else [notes]
    return {**before, NOTE: json.dumps([*notes, note])}
