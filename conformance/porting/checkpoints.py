"""Read the weights of trained models: files with an index, the attentions in them, their meaning.

Files of Hugging Face name the tensors of a whole model. The declaration `Checkpoint` of an adapter
says which of them are the parameters of an attention; the others are left over, by kind. The
model's configuration, `config.json`, says what tensors cannot: the number of heads, how many
components of a head rotary embeddings turn, the scale.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from conformance.adapter.parameters import Checkpoint
from conformance.cases.casefile import File, Tensor, look
from conformance.definition.problem import Pairs
from conformance.definition.rotary import RotaryScaling
from conformance.errors import ConformanceError, Untranslatable, WrongShape, WrongTensors

INDEX = ".safetensors.index.json"


@dataclass(frozen=True)
class Rotation:
    """What is known of the rotary embedding of a layer.

    Attributes:
        base: the base of the angles; None if it is not known, or there is no rotary embedding.
        size: how many components of a head turn; None if whole heads do.
        scaling: the way in which frequencies are scaled, or "".
        scaled: the numbers of that way; None if some are missing.
    """

    base: float | None = None
    size: int | None = None
    scaling: str = ""
    scaled: RotaryScaling | None = None

    def for_texts(self) -> Rotation:
        """Return the same as far as it matters to texts, whose axes have equal positions."""
        scaling = self.scaling.removesuffix(" with mrope") if self.scaling != "mrope" else ""
        scaled = self.scaled.for_texts() if self.scaled is not None else None
        return replace(self, scaling=scaling, scaled=scaled)

    @property
    def described(self) -> str:
        """The way in which frequencies are scaled, and its numbers, as the configuration says."""
        numbers = {} if self.scaled is None else self.scaled.parameters()
        shown = [
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in numbers.items()
            if name != "rope_type" and (name == "mrope_section" or not isinstance(value, list))
        ]
        return f"{self.scaling} ({', '.join(shown)})" if shown else self.scaling


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What weights mean beyond their numbers; None where it is not known, or the default.

    Attributes:
        rotary_size: how many components of a head rotary embeddings turn, whatever `rotation` says:
            0 if they turn none; None for what it says.
        rotary_pairs: the pairs of the implementation that has an argument for them.
        rotation: the rotary embeddings, as far as they matter to texts.
        epsilon: ε of the query/key norm.
        scale: the scale of the logits, if it is not the default.
        soft_cap: the cap of the logits.
        added: the name of a bias that is added to the logits; "" if there is none.
        windowed: whether a query sees a window of keys only.
        told: further properties of the layer that its port must have, as text.
    """

    rotary_size: int | None = None
    rotary_pairs: Pairs | None = None
    rotation: Rotation = Rotation()
    epsilon: float | None = None
    scale: float | None = None
    soft_cap: float | None = None
    added: str = ""
    windowed: bool = False
    told: tuple[str, ...] = ()

    @property
    def turned(self) -> int | None:
        """How many components of a head turn: 0 for none, None for all of them."""
        return self.rotation.size if self.rotary_size is None else self.rotary_size


@dataclass(frozen=True, eq=False)
class Store:
    """The tensors of a file, or of all files in a folder.

    Attributes:
        path: the file or the folder.
        files: the file of each tensor, by the tensor's name.
        metadata: the metadata of the files.
    """

    path: Path
    files: Mapping[str, File]
    metadata: Mapping[str, str]

    @cached_property
    def config(self) -> Mapping[str, Any] | None:
        """The model's configuration, that of its text model if it has one; None if there is none.

        Raises:
            WrongTensors: if `config.json` cannot be read.
        """
        path = (self.path if self.path.is_dir() else self.path.parent) / "config.json"
        return configuration(path) if path.is_file() else None

    def read(self, name: str) -> Tensor:
        """Return the tensor with this name."""
        return self.files[name].read(name)


def configuration(path: Path) -> dict[str, Any]:
    """Return a model's configuration, that of its text model if it has one.

    Raises:
        WrongTensors: if the file cannot be read.
    """
    return completed(_json(path))


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration, or that of its text model, with what its model assumes beside it."""
    text = config.get("text_config")
    own = {**config, **text} if isinstance(text, Mapping) else {**config}
    return {**ASSUMED.get(str(own.get("model_type")), {}), **own}


def opened(path: Path) -> Store:
    """Return the tensors of a safetensors file, an index of several, or a folder with either.

    Raises:
        WrongTensors: if there are no such files, one cannot be read, or files and index differ.
    """
    if not path.is_dir() and not path.name.endswith(INDEX):
        file = look(path)
        return Store(path, dict.fromkeys(file.header, file), file.metadata)
    indexes = sorted(path.glob(f"*{INDEX}")) if path.is_dir() else [path]
    if not indexes:
        singles = sorted(path.glob("*.safetensors"))
        if len(singles) != 1:
            found = ", ".join(it.name for it in singles) or "none"
            raise WrongTensors(
                f"{path} has no *{INDEX}, and not one file *.safetensors but {found}; name the "
                "file, or save the model with save_pretrained(folder)"
            )
        file = look(singles[0])
        return Store(path, dict.fromkeys(file.header, file), file.metadata)
    if len(indexes) > 1:
        names = ", ".join(it.name for it in indexes)
        raise WrongTensors(f"{path} has several indexes; name one of them: {names}")
    return _of_index(path, indexes[0])


def _of_index(path: Path, index: Path) -> Store:
    places = _json(index).get("weight_map")
    texts = isinstance(places, dict) and all(isinstance(it, str) for it in places.values())
    if not texts or not places:
        raise WrongTensors(f'{index} has no "weight_map" of tensors and their files')
    names = sorted(set(places.values()))
    beyond = [name for name in names if Path(name).name != name]
    if beyond:
        raise WrongTensors(f"{index} names files that are not beside it: {', '.join(beyond)}")
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise WrongTensors(f"{index.parent} lacks {', '.join(absent)}, which its index names")
    files = {name: look(index.parent / name) for name in names}
    wrong = [name for name, place in places.items() if name not in files[place].header]
    wrong += [
        name for place, file in files.items() for name in file.header if places.get(name) != place
    ]
    if wrong:
        raise WrongTensors(f"{index} and its files differ in {', '.join(sorted(set(wrong))[:5])}")
    metadata = {key: value for file in files.values() for key, value in file.metadata.items()}
    return Store(path, {name: files[place] for name, place in places.items()}, metadata)


def _json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WrongTensors(f"{path} cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise WrongTensors(f"{path} is no JSON object")
    return read


# Attentions


@dataclass(frozen=True, eq=False)
class Attention:
    """An attention in the files of a model.

    Attributes:
        place: how the names of its tensors begin, such as "model.layers.0.self_attn.".
        stack: `place` with "{layer}" in place of the number of the layer.
        layer: the number of the layer.
        tensors: the names of its tensors in the files by their native names.
    """

    place: str
    stack: str
    layer: int
    tensors: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Contents:
    """What is in the files of a model.

    Attributes:
        attentions: the attentions, by stack and layer.
        others: the names of all other tensors, by kind.
        added: the stacks to whose logits a bias is added.
    """

    attentions: tuple[Attention, ...]
    others: Mapping[str, tuple[str, ...]]
    added: frozenset[str]


KINDS = (
    ("head", r"lm_head|\bcls\b|classifier|\bscore\b|pooler|qa_outputs|predictions"),
    ("embeddings", r"embed|\bwte\b|\bwpe\b|^shared\b|cls_token|mask_token"),
    ("buffers", r"inv_freq|position_ids|masked_bias"),
    ("norms", r"norm|\bln_"),
    ("attentions", r"attn|attention"),
    ("MLP", r"mlp|intermediate|DenseReluDense|feed_forward|experts|\.output\.dense\."),
)
"""Patterns of the names of tensors that are no attention's, by kind; the first one decides."""
UNKNOWN = "unknown"
POSITIONS = "position biases"


def contents(names: Collection[str], checkpoint: Checkpoint) -> Contents:
    """Return the attentions among tensors with these names, and the other tensors by kind."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    others: dict[str, list[str]] = {}
    natives = {file: native for native, file in checkpoint.renamed.items()}
    added = set()
    for name in sorted(names):
        at = _place(name, checkpoint)
        rest = name[at[2] :] if at else ""
        beside = [kind for begin, kind in checkpoint.beside.items() if rest.startswith(begin)]
        if at and checkpoint.added and name.endswith(checkpoint.added):
            added.add(at[0])
            others.setdefault(POSITIONS, []).append(name)
        elif at and not beside:
            native = checkpoint.own + natives.get(rest, rest)
            found.setdefault((at[0], at[1]), {})[native] = name
        else:
            like = (kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))
            kind = beside[0] if beside else next(like, UNKNOWN)
            others.setdefault(kind, []).append(name)
    attentions = [
        Attention(stack.replace("{layer}", str(layer)), stack, layer, tensors)
        for (stack, layer), tensors in sorted(found.items())
    ]
    kinds = {kind: tuple(listed) for kind, listed in sorted(others.items())}
    return Contents(tuple(attentions), kinds, frozenset(added))


def _place(name: str, checkpoint: Checkpoint) -> tuple[str, int, int] | None:
    """Return stack and layer of the attention that a tensor's name begins with, and their length.

    Return None if it begins with no attention's place.
    """
    for place in checkpoint.places:
        before, after = place.split("{layer}")
        pattern = rf"((?:.*?\.)?{re.escape(before)})(\d+)({re.escape(after)})"
        if match := re.match(pattern, name):
            return f"{match[1]}{{layer}}{match[3]}", int(match[2]), match.end()
    return None


def chosen(
    store: Store, every: Contents, *, prefix: str, layer: int | None, all_layers: bool
) -> tuple[Attention, ...]:
    """Return the attentions that are asked for; raise `WrongTensors` if that is not clear.

    Args:
        store: the files.
        every: what is in them.
        prefix: how the place of the attention begins; "" for any.
        layer: the number of the layer; None for any.
        all_layers: whether several attentions may be meant.
    """
    fitting = [it for it in every.attentions if it.place.startswith(prefix)]
    if not fitting:
        there = "".join(f" {it}" for it in _stacks(every.attentions)) or " none"
        begun = f" that begins with {prefix!r}" if prefix else " of this model"
        raise WrongTensors(f"{store.path}: no attention{begun}; there is{there}")
    of_layer = [it for it in fitting if layer is None or it.layer == layer]
    if not of_layer:
        layers = [it.layer for it in fitting]
        raise WrongTensors(
            f"{store.path}: no layer {layer}; there are {min(layers)} to {max(layers)}"
        )
    if len(of_layer) > 1 and not all_layers:
        stacks = _stacks(of_layer)
        if layer is not None:
            raise WrongTensors(
                f"{store.path}: layer {layer} has {len(of_layer)} attentions; give --prefix: "
                f"{' or '.join(it.place for it in of_layer)}"
            )
        numbers = sorted({it.layer for it in of_layer})
        raise WrongTensors(
            f"{store.path}: there are {len(of_layer)} attentions, in layers {numbers[0]} to "
            f"{numbers[-1]} of {' and '.join(stacks)}; give --layer or --all-layers"
        )
    return tuple(of_layer)


def _stacks(attentions: Collection[Attention]) -> list[str]:
    return list(dict.fromkeys(it.stack for it in attentions))


# Configurations

SIZES = {
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads",),
}
"""The names that configurations have for numbers of heads."""


_GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}
_QWEN = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
ASSUMED: Mapping[str, Mapping[str, Any]] = {
    "llama": {"rope_theta": 10000.0},
    "mistral": {"rope_theta": 10000.0, "sliding_window": 4096},
    "phi3": {"rope_theta": 10000.0},
    "qwen2": {"rope_theta": 10000.0, **_QWEN},
    "qwen3": {"rope_theta": 10000.0, **_QWEN},
    "gpt_oss": {
        "rope_theta": 150000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0},
        "sliding_window": 128,
    },
    "gemma": {"rope_theta": 10000.0},
    "gemma2": {"rope_theta": 10000.0, "attn_logit_softcapping": 50.0, **_GEMMA},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
        **_GEMMA,
    },
}
"""What the classes of transformers assume where a configuration says nothing, by model_type.

Files in use rely on it: those of Gemma 3 leave out numbers of heads, the scale and both bases."""


def counts(config: Mapping[str, Any], given: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers of heads that a configuration tells, with those that the user gave.

    Raise `WrongTensors` if they differ.
    """
    told: dict[str, int] = {}
    for size, names in SIZES.items():
        numbers = [config[name] for name in names if isinstance(config.get(name), int)]
        told |= {size: numbers[0]} if numbers else {}
    for name, number in given.items():
        if told.get(name, number) != number:
            option = name.replace("_", "-")
            raise WrongTensors(
                f"config.json says {name}={told[name]}, and --{option} {number}; leave one of them"
            )
    return {**told, **given}


def meaning_of(
    config: Mapping[str, Any] | None,
    checkpoint: Checkpoint,
    attention: Attention,
    given: Meaning,
    *,
    added: bool,
) -> Meaning:
    """Return what the weights of an attention mean, according to its model's configuration.

    What is `given` takes precedence. `added` says whether a bias is added to the logits.

    Raises:
        Untranslatable: if there is no configuration, and the meaning depends on it.
    """
    bias = checkpoint.added.split(".")[-2] if added else ""
    if config is None:
        if checkpoint.scale is not None and given.scale is None:
            raise Untranslatable(
                "the scale of the logits is in the model's config.json, which is not there; put "
                "it beside the weights, or give --scale"
            )
        return replace(given, added=bias)
    turned, window = rotation(config, attention.layer), window_of(config, attention.layer)
    told = []
    if turned.scaling:
        told.append(f"rotary embeddings are of the kind {turned.described}")
    if config.get("use_bidirectional_attention"):
        told.append("no causal mask")
        # The number counts the keys on both sides.
        window = window and window // 2 + 1
        seen = "and those on each side"
    else:
        seen = "and those before it"
    if window:
        told.append(f"a window of {window} keys, the query's own {seen}")
    scale = given.scale
    if scale is None:
        scale = scale_of(config, checkpoint, attention.layer)
    return Meaning(
        rotary_size=given.rotary_size,
        rotary_pairs=given.rotary_pairs,
        rotation=turned.for_texts(),
        epsilon=config.get("rms_norm_eps"),
        scale=scale,
        soft_cap=config.get("attn_logit_softcapping"),
        added=bias,
        windowed=window is not None,
        told=tuple(told),
    )


def scale_of(config: Mapping[str, Any], checkpoint: Checkpoint, layer: int) -> float | None:
    """Return the scale of the logits in a layer, according to its model's configuration.

    Return None if it is always the default.

    Raises:
        Untranslatable: if the configuration does not tell it.
    """
    try:
        return checkpoint.scale(config, layer) if checkpoint.scale is not None else None
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise Untranslatable(
            f"config.json does not tell the scale of the logits ({error}); give --scale"
        ) from error


def rotation(config: Mapping[str, Any], layer: int) -> Rotation:
    """Return what a configuration says of the rotary embedding of a layer.

    Raises:
        WrongTensors: if it tells rotations by kinds of layers, and none for this layer's, or if
            its sections of several axes do not add up.
    """
    kind = _kind(config, layer)
    turns = config.get("rope_parameters") or config.get("rope_scaling") or {}
    turns = turns if isinstance(turns, Mapping) else {}
    by_kind = [name for name, told in turns.items() if isinstance(told, Mapping)]
    if by_kind:
        kind = kind or FULL
        if kind not in turns:
            raise WrongTensors(
                f"config.json has rope_parameters for {', '.join(by_kind)}, and layer {layer} is "
                f"of the kind {kind}; name it there, or correct layer_types"
            )
        # None stands for layers without a rotation.
        turns = turns[kind] or {"rope_theta": None}
    elif kind == SLIDING and "rope_local_base_freq" in config:
        # A base of their own, and frequencies that are never scaled.
        turns = {"rope_theta": config["rope_local_base_freq"]}
    elif "global_rope_theta" in config:
        local = config.get("local_rope_theta") if kind == SLIDING else None
        turns = {"rope_theta": local or config["global_rope_theta"]}
    base = turns.get("rope_theta", config.get("rope_theta"))
    part = turns.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    size = None
    if part is not None and part != 1:
        size = int((_head_size(config) or 0) * part)
    scaling = turns.get("rope_type", turns.get("type")) or "default"
    if turns.get("mrope_section") is not None:
        return _of_axes(config, Rotation(base, size, scaling), turns)
    if scaling == "default":
        return Rotation(base, size, "")
    return Rotation(base, size, scaling, _scaling(config, turns, scaling))


def _of_axes(config: Mapping[str, Any], found: Rotation, turns: Mapping[str, Any]) -> Rotation:
    """Return the rotation by positions on several axes; raise `WrongTensors` if it is none."""
    plain, model = found.scaling in ("default", "mrope"), str(config.get("model_type", ""))
    how = "mrope" if plain else f"{found.scaling} with mrope"
    if not model.startswith(SECTIONED):
        return replace(found, scaling=how)
    if "qwen3" in model:
        # Its files say so, and where one does not, the layers of transformers do it all the same.
        turns = {"mrope_interleaved": True, **turns}
    try:
        made = RotaryScaling.of(turns) if plain else _scaling(config, turns, found.scaling)
        size = found.size or _head_size(config)
        if made is not None and size is not None:
            made.check(size)
    except (WrongShape, TypeError) as error:
        raise WrongTensors(f"config.json, rope_parameters: {error}") from error
    return replace(found, scaling=how, scaled=made)


SECTIONED = ("qwen", "glm", "paddleocr")
"""How the kinds of models begin whose sections mean what `RotaryScaling` says.

Those of Ernie are in another order, and those of HunYuan count components.
"""


def _head_size(config: Mapping[str, Any]) -> int | None:
    """Return the number of components of a head, or None if a configuration does not tell it."""
    size = config.get("head_dim")
    if size is None and "hidden_size" in config and "num_attention_heads" in config:
        size = config["hidden_size"] // config["num_attention_heads"]
    return size


def _scaling(
    config: Mapping[str, Any], turns: Mapping[str, Any], kind: str
) -> RotaryScaling | None:
    """Return how frequencies are scaled, with what models say elsewhere in their configuration."""
    length, most = "original_max_position_embeddings", config.get("max_position_embeddings")
    before = most if kind == "dynamic" else turns.get(length, config.get(length))
    given = {**turns, "rope_type": "longrope" if kind == "su" else kind}
    if before and kind != "linear":
        given[length] = before
        if most and kind in ("yarn", "longrope", "su"):
            given.setdefault("factor", most / before)
    try:
        return RotaryScaling.of(given)
    except (WrongShape, TypeError):
        return None


FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
"""The kinds of layers that see all keys, have a window, or blocks, as configurations name them."""


def window_of(config: Mapping[str, Any], layer: int) -> int | None:
    """Return how many keys a query of a layer sees, its own included; None if all before it."""
    return (config.get("sliding_window") or None) if _kind(config, layer) == SLIDING else None


def reach_of(config: Mapping[str, Any], layer: int) -> int | None:
    """Return how many keys on each side a token of a layer sees beside itself; None if all.

    Configurations of encoders with windows tell both sides together: Longformer and LED by layer,
    ModernBERT for its layers that are local. An odd size is rounded down, as these models do.

    Raises:
        WrongTensors: if the sizes of windows by layer have none for this layer.
    """
    sizes = config.get("attention_window")
    if isinstance(sizes, list) and layer >= len(sizes):
        raise WrongTensors(
            f"config.json has attention_window for {len(sizes)} layers, and none for layer {layer}"
        )
    size = sizes[layer] if isinstance(sizes, list) else sizes
    if size is None and _kind(config, layer) == SLIDING:
        size = config.get("local_attention")
    return None if size is None else int(size) // 2


def chunk_of(config: Mapping[str, Any], layer: int) -> int | None:
    """Return the number of positions of a block of a layer, as of Llama 4; None without blocks."""
    size, turns = config.get("attention_chunk_size"), config.get("no_rope_layers") or ()
    kind = _kind(config, layer)
    if not kind and layer < len(turns) and turns[layer]:
        # The layers that turn queries and keys, whatever the name says.
        kind = CHUNKED
    return int(size) if size and kind == CHUNKED else None


def _kind(config: Mapping[str, Any], layer: int) -> str:
    """Return the kind of a layer: `layer_types`, or how older files of each model say it."""
    model, kinds = config.get("model_type"), config.get("layer_types") or ()
    if model in ("qwen2", "qwen3") and not config.get("use_sliding_window"):
        return FULL
    if layer < len(kinds):
        return str(kinds[layer])
    slides = (
        (model in ("mistral", "phi3") and config.get("use_sliding_window", True))
        or (model in ("gemma2", "gpt_oss") and layer % 2 == 0)
        or (model == "gemma3_text" and (layer + 1) % config["sliding_window_pattern"])
        or (model in ("qwen2", "qwen3") and layer >= config["max_window_layers"])
        or (model == "modernbert" and layer % config.get("global_attn_every_n_layers", 3))
    )
    return SLIDING if slides else ""


def named_model(store: Store) -> str:
    """Return the model_type in a store's configuration.

    Raises:
        ConformanceError: if there is none.
    """
    kind = (store.config or {}).get("model_type")
    if not isinstance(kind, str):
        raise ConformanceError(
            f"{store.path}: no config.json beside it names a model_type; say with --from whose "
            "weights these are"
        )
    return kind
