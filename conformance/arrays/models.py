"""Compare two callables, or two models, whose attentions are found by hooks.

An attention is a module with projections of query, key and value, by one of the usual names. What
comes out of these are its heads, and what goes into its output projection is its output. Each
attention is judged by heads of its own, so that differences of earlier layers do not matter.
`torch.nn.MultiheadAttention` has no such modules; it is judged as a layer, by its weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from conformance.arrays import configuration
from conformance.arrays.between import against, between_outputs
from conformance.arrays.diagnosis import Diagnosis, Judged, diagnose
from conformance.arrays.diagnosis import told as stated
from conformance.arrays.given import BLOCKS, Given, Numbers, readings
from conformance.arrays.layers import diagnose_layer
from conformance.definition.dtypes import Array, DType, dtype_of
from conformance.errors import BadArrays, ConformanceError
from conformance.frameworks import BRIDGES, framework
from conformance.frameworks.base import Natives, Request
from conformance.porting.checkpoints import counts
from conformance.records.findings import Phrase

PROJECTIONS: Mapping[str, tuple[str, ...]] = {
    "query": ("q_norm", "query_norm", "q_proj", "query", "q_lin", "to_q", "wq", "q"),
    "key": ("k_norm", "key_norm", "k_proj", "key", "k_lin", "to_k", "wk", "k"),
    "value": ("v_proj", "value", "v_lin", "to_v", "wv", "v"),
    "packed": ("c_attn", "query_key_value", "qkv_proj", "qkv", "in_proj", "Wqkv", "wqkv"),
    "output": ("o_proj", "out_proj", "c_proj", "out_lin", "dense", "proj", "wo", "o"),
}
"""The names of projections inside an attention; a norm comes after its projection."""

COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
"""The names of an attention's attribute that is its number of heads."""

ORDERS = ("sides", "heads")
"""The orders of a packed projection: query, key and value one after another, or those of each
key/value head, beside its query heads."""


@dataclass
class SeenAttention:
    """An attention of a model, and the arrays that were seen in it.

    Attributes:
        name: its name in the model.
        module: the module.
        arrays: by name: "query", "key", "value" or "packed", and "output". Of a layer of torch,
            the first three are its inputs.
        returned: what the module returned.
        masks: what its arguments say of masks, as options of `conformance.diagnose`.
        order: the order of a packed projection.
    """

    name: str
    module: Any
    arrays: dict[str, Numbers] = field(default_factory=dict)
    returned: Numbers | None = None
    masks: dict[str, Any] = field(default_factory=dict)
    order: str = ORDERS[0]

    def children(self, part: str) -> dict[str, Any]:
        """Return the modules of a projection, and of the norm behind it, by name."""
        named = dict(self.module.named_children())
        return {name: named[name] for name in PROJECTIONS[part] if name in named}

    @property
    def is_layer(self) -> bool:
        """Whether it is `torch.nn.MultiheadAttention`."""
        return hasattr(self.module, "in_proj_weight") and hasattr(self.module, "out_proj")

    @property
    def is_attention(self) -> bool:
        """Whether its projections are found."""
        sides = self.children("query") and self.children("key")
        return bool(self.is_layer or self.children("packed") or sides)


def compare_models(
    old: Any,
    new: Any,
    batch: Any,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    **options: Any,
) -> Diagnosis:
    """Diagnose the first attention of a model that differs from that of another one.

    The models are modules of torch, whose attentions have projections of query, key and value as
    modules of their own, or are `torch.nn.MultiheadAttention`. Numbers of heads, rotary embeddings
    and so on are read from the model's configuration, if it has one as those of Hugging Face do.

    Args:
        old: a model that is right.
        new: another one, which is diagnosed.
        batch: the input of both: keyword arguments, a tuple of arguments, or one.
        heads: the number of query heads, if no configuration says it.
        kv_heads: the number of key/value heads, if they are fewer.
        options: other arguments of `conformance.diagnose`, such as `causal` and `rotary`.

    Raises:
        ConformanceError: if attentions are not found or do not pair up.
    """
    olds, news = _seen(old, batch), _seen(new, batch)
    if len(olds) != len(news):
        raise BadArrays(
            f"{len(olds)} attentions were seen in one model and {len(news)} in the other"
        )
    config = _config(old) or _config(new)
    sizes = counts(config, {}) if config else {}
    sizes |= {n: it for n, it in (("heads", heads), ("kv_heads", kv_heads)) if it is not None}
    found: Diagnosis | None = None
    for layer, (one, other) in enumerate(zip(olds, news, strict=True)):
        said: dict[str, Any] = {}
        if config:
            said = configuration.told(config, layer)[0]
        if one.is_layer:
            # Its arguments say all that it blocks.
            said = {name: it for name, it in said.items() if name not in ("causal", "window")}
        own = {"heads": _count(one) or _count(other)}
        said = {**one.masks, **said, **own, **sizes, **options}
        if isinstance(batch, Mapping) and "attention_mask" in batch and "mask" not in options:
            said |= {"mask": batch["attention_mask"], "mask_true": "attends"}
        one.order = _order(one, said) or one.order
        right = _judged(one, said)
        if right.verdict == "deviates" and not one.is_layer and other.masks:
            again = {**said, **other.masks, **options}
            right, said = _judged(one, again), again
        other.order = _order(other, said) or _order_of_weights(one, other, said)
        judged = _judged(other, said)
        causes = [[it.text for it in side.causes] for side in (right, judged)]
        if causes[0] and causes[0] == causes[1]:
            # Both do to their heads what was not told.
            judged = msgspec.structs.replace(judged, verdict="noise", causes=[], partial=[])
        elif right.verdict == "deviates":
            # What is told is not what the old model does, so only their outputs are compared.
            named = judged.causes
            judged = against(*_outputs(other, one), layout="batch length head")
            judged = msgspec.structs.replace(judged, causes=named)
        judged = msgspec.structs.replace(judged, place=f"layer {layer}, {other.name}", wanted=right)
        if judged.verdict == "deviates":
            return judged
        if cause := _difference(one, other, said):
            return msgspec.structs.replace(judged, verdict="deviates", causes=[stated(cause)])
        if found is None or judged.verdict == "noise":
            found = judged
    assert found is not None
    note = stated(Phrase("layers.alike", {"count": len(olds)}))
    return msgspec.structs.replace(found, place="", wanted=None, notes=[*found.notes, note])


def _seen(model: Any, batch: Any) -> list[SeenAttention]:
    """Return the attentions of a model in the order in which they are called with a batch."""
    if not hasattr(model, "named_modules"):
        raise BadArrays(f"{type(model).__name__} is no module of torch")
    called: list[SeenAttention] = []
    hooks = [hook for it in _attentions(model) for hook in _hooked(it, called)]
    try:
        if isinstance(batch, Mapping):
            model(**batch)
        else:
            model(*(batch if isinstance(batch, tuple) else (batch,)))
    finally:
        for hook in hooks:
            hook.remove()
    if not called:
        names = " or ".join(f"{q}, {k}, {v}" for q, k, v in (("q_proj", "k_proj", "v_proj"),))
        raise BadArrays(
            f"{type(model).__name__} has no module with projections called {names}, ...; compare "
            "the attentions as callables: conformance.compare"
        )
    return called


def _attentions(model: Any) -> list[SeenAttention]:
    """Return the attentions of a model, none of which has been seen yet."""
    if not hasattr(model, "named_modules"):
        return []
    every = (SeenAttention(name, module) for name, module in model.named_modules())
    return [it for it in every if it.is_attention]


def _hooked(seen: SeenAttention, called: list[SeenAttention]) -> Iterator[Any]:
    """Yield hooks that remember the arrays of an attention, and itself when it has been called."""

    def keep(name: str, array: Any) -> None:
        seen.arrays[name] = Numbers.of(f"{seen.name}.{name}", array.detach())

    def after(module: Any, inputs: Any, named: Any, output: Any) -> None:
        returned = output[0] if isinstance(output, tuple | list) else output
        if returned is not None:
            seen.returned = _padded(f"{seen.name}.output", returned)
        if seen.is_layer:
            signature = inspect.signature(type(module).forward)
            _of_layer(seen, signature.bind(module, *inputs, **named).arguments)
        elif seen.returned is not None:
            seen.arrays.setdefault("output", seen.returned)
        called.append(seen)

    yield seen.module.register_forward_hook(after, with_kwargs=True)
    if seen.is_layer:
        return
    for part in ("query", "key", "value", "packed"):
        for child in [*seen.children(part).values()][:1]:
            yield child.register_forward_hook(
                lambda module, inputs, output, part=part: keep(part, output)
            )
    for child in [*seen.children("output").values()][:1]:
        yield child.register_forward_hook(lambda module, inputs, output: keep("output", inputs[0]))


def _of_layer(seen: SeenAttention, arguments: Mapping[str, Any]) -> None:
    """Remember what `torch.nn.MultiheadAttention` was called with, with the batch first."""
    module = seen.module

    def batched(numbers: Numbers) -> Numbers:
        values = numbers.values
        if values.ndim == 3 and not module.batch_first:
            values = values.swapaxes(0, 1)
        return Numbers(values if values.ndim == 3 else values[None], numbers.dtype)

    inputs = {name: arguments[name] for name in ("query", "key", "value")}
    same = inputs["query"] is inputs["key"] is inputs["value"]
    seen.arrays = {name: batched(_padded(f"{seen.name}.{name}", it)) for name, it in inputs.items()}
    if same:
        seen.arrays |= dict.fromkeys(("key", "value"), seen.arrays["query"])
    assert seen.returned is not None
    seen.returned = batched(seen.returned)
    if inputs["query"].is_nested:
        lengths = [len(it) for it in inputs["query"].unbind()]
        seen.masks |= {"query_lengths": lengths, "key_lengths": lengths}
    if module.add_zero_attn:
        # A key and a value of zeros are a sink whose logit is 0.
        seen.masks["sinks"] = np.zeros(module.num_heads)
    masks = {name: arguments.get(name) for name in ("attn_mask", "key_padding_mask")}
    batch, queries = seen.arrays["query"].values.shape[:2]
    keys = seen.arrays["key"].values.shape[1]
    allowed = np.ones((1, 1, 1, keys), np.bool_)
    for name, mask in masks.items():
        if mask is None:
            continue
        values = Numbers.of(name, mask.detach()).values
        if name == "key_padding_mask":
            values = values.reshape(-1, 1, 1, keys)
        elif values.ndim == 3:
            values = values.reshape(batch, -1, queries, keys)
        else:
            values = values[None, None]
        blocked = values if values.dtype == np.bool_ else values <= BLOCKS
        if values.dtype != np.bool_ and (added := np.where(blocked, 0.0, values)).any():
            seen.masks["bias"] = seen.masks.get("bias", 0.0) + added
        triangles = {"top-left": np.tri(queries, keys, dtype=np.bool_)}
        triangles["bottom-right"] = np.tri(queries, keys, keys - queries, dtype=np.bool_)
        aligned = [it for it, square in triangles.items() if np.array_equal(~blocked[0, 0], square)]
        if blocked.shape[:2] == (1, 1) and queries > 1 and aligned:
            seen.masks["causal"] = aligned[0]
        else:
            allowed = allowed & ~blocked
    if not allowed.all():
        seen.masks |= {"mask": allowed, "mask_true": "attends"}


def _padded(name: str, tensor: Any) -> Numbers:
    """Return a tensor; one whose entries have lengths of their own is padded with zeros."""
    tensor = tensor.detach()
    return Numbers.of(name, tensor.to_padded_tensor(0.0) if tensor.is_nested else tensor)


def _config(model: Any) -> Mapping[str, Any] | None:
    config: Any = getattr(model, "config", None)
    found = config.to_dict() if hasattr(config, "to_dict") else config
    return found if isinstance(found, Mapping) else None


def _count(seen: SeenAttention) -> int | None:
    """Return the number of heads that an attention has by its own account."""
    found = (getattr(seen.module, name, None) for name in COUNTS)
    return next((it for it in found if isinstance(it, int)), None)


def _sizes(seen: SeenAttention, said: Mapping[str, Any]) -> tuple[int, int]:
    heads = said.get("heads") or _count(seen)
    if not isinstance(heads, int):
        name = seen.name or type(seen.module).__name__
        raise BadArrays(f"say how many heads {name} has: heads=")
    return heads, said.get("kv_heads") or heads


def _given(seen: SeenAttention, said: Mapping[str, Any], order: str) -> dict[str, Any]:
    """Return the arguments of `diagnose` for an attention whose heads were seen."""
    heads, kv_heads = _sizes(seen, said)
    arrays = {name: _side_by_side(it) for name, it in seen.arrays.items()}
    if "packed" in arrays:
        packed = arrays.pop("packed")
        parts = _parts(packed.values, heads, kv_heads, order)
        arrays |= {name: Numbers(part, packed.dtype) for name, part in parts.items()}
    lacking = {"query", "key", "value", "output"} - arrays.keys()
    if lacking:
        raise BadArrays(f"{seen.name} called no projection of {' and '.join(sorted(lacking))}")
    given: dict[str, Any] = {**arrays, **said, "heads": heads, "kv_heads": kv_heads}
    return given | {"layout": "batch length (heads head)"}


def _parts(packed: np.ndarray, heads: int, kv_heads: int, order: str) -> dict[str, np.ndarray]:
    """Return what a packed projection holds on its last axis, by side."""
    names, group = ("query", "key", "value"), heads // kv_heads
    size = packed.shape[-1] // (heads + 2 * kv_heads)
    if order == "sides":
        ends = [heads * size, (heads + kv_heads) * size]
        return dict(zip(names, np.split(packed, ends, axis=-1), strict=True))
    apart = packed.reshape(*packed.shape[:-1], kv_heads, group + 2, size)
    parts = np.split(apart, [group, group + 1], axis=-2)
    return {n: it.reshape(*packed.shape[:-1], -1) for n, it in zip(names, parts, strict=True)}


def _order(seen: SeenAttention, said: Mapping[str, Any]) -> str:
    """Return the order of a packed projection with which the output is right; "" if none is."""
    if "packed" not in seen.arrays:
        return ""
    for order in ORDERS:
        given = Given(**_given(seen, said, order))
        if any(Judged(reading, given).fits for reading in readings(given)):
            return order
    return ""


def _order_of_weights(one: SeenAttention, other: SeenAttention, said: Mapping[str, Any]) -> str:
    """Return the order in which the other projection has the weights of the first, or its order."""
    if "packed" in other.arrays:
        for order in ORDERS:
            if _difference(one, replace(other, order=order), said) is None:
                return order
    return one.order


def _judged(seen: SeenAttention, said: Mapping[str, Any]) -> Diagnosis:
    if not seen.is_layer:
        return diagnose(**_given(seen, said, seen.order))
    heads, kv_heads = _sizes(seen, said)
    if kv_heads != heads:
        raise BadArrays(f"{seen.name} has as many key/value heads as query heads, not {kv_heads}")
    weights = {name: it.detach() for name, it in seen.module.named_parameters()}
    inputs = [seen.arrays[name] for name in ("query", "key", "value")]
    x = inputs[0] if inputs[0] is inputs[1] is inputs[2] else tuple(inputs)
    options = {name: it for name, it in said.items() if name != "kv_heads"}
    return diagnose_layer(x, weights, seen.returned, of="torch-mha", **options)


def _outputs(one: SeenAttention, other: SeenAttention) -> tuple[Numbers, Numbers]:
    """Return the outputs of two attentions: before the output projection if both are known."""
    if one.is_layer or other.is_layer:
        assert one.returned is not None
        assert other.returned is not None
        return _side_by_side(one.returned), _side_by_side(other.returned)
    return _side_by_side(one.arrays["output"]), _side_by_side(other.arrays["output"])


def _side_by_side(array: Numbers) -> Numbers:
    """Return heads apart, as a norm returns them, side by side."""
    values = array.values
    return Numbers(values.reshape(*values.shape[:2], -1), array.dtype) if values.ndim > 3 else array


def _difference(one: SeenAttention, other: SeenAttention, said: Mapping[str, Any]) -> Phrase | None:
    """Return the cause that the projections of two attentions differ, or None if they do not."""
    stored = [str(next(it.module.parameters()).dtype).rpartition(".")[2] for it in (one, other)]
    narrow = max((dtype_of(it) for it in stored), key=lambda it: it.roundoff)
    first, second = (_projections(it, said) for it in (one, other))
    differing = [it for it in first if it in second and _differ(first[it], second[it], narrow)]
    packed = "packed" in first and "packed" in second and "packed" not in differing
    differing = [it for it in differing if it != "packed"]
    if not differing:
        return None
    if one.order != other.order and packed:
        return Phrase("layers.packed-otherwise", {"order": Phrase(f"order.by-{other.order}")})
    sides = dict.fromkeys(it.partition(" ")[0] for it in differing)
    return Phrase("layers.weights-differ", {"projections": [*sides]})


def _projections(
    seen: SeenAttention, said: Mapping[str, Any]
) -> dict[str, tuple[Array, Array | None]]:
    """Return the weights `[out in]` of projections, and of norms, each with its bias or None."""
    module = seen.module
    sides = ("query", "key", "value")
    found: dict[str, tuple[Array, Array | None]] = {}
    for part in PROJECTIONS:
        for name, child in seen.children(part).items():
            if getattr(child, "weight", None) is None:
                continue
            weight, bias = _values(child.weight), _values(getattr(child, "bias", None))
            # Those of GPT-2 have their output, of size `nf`, on the last axis.
            weight = weight.T if hasattr(child, "nf") else weight
            found.setdefault(f"{part} norm" if name.endswith("norm") else part, (weight, bias))
    if seen.is_layer and module.in_proj_weight is not None:
        found["packed"] = _values(module.in_proj_weight), _values(module.in_proj_bias)
    elif seen.is_layer:
        biases = _values(module.in_proj_bias)
        apart = [None] * 3 if biases is None else np.split(biases, 3)
        for side, bias in zip(sides, apart, strict=True):
            found[side] = _values(getattr(module, f"{side[0]}_proj_weight")), bias
    if "packed" in found:
        weight, bias = found["packed"]
        heads = _sizes(seen, said)
        weights = _parts(weight.T, *heads, seen.order)
        parted = {} if bias is None else _parts(bias, *heads, seen.order)
        found |= {side: (weights[side].T, parted.get(side)) for side in sides}
    return found


def _values(array: Any) -> Any:
    """Return a parameter of torch in NumPy; None if it is None."""
    return None if array is None else Numbers.of("a parameter", array.detach()).values


def _differ(
    one: tuple[Array, Array | None], other: tuple[Array, Array | None], narrow: DType
) -> bool:
    """Return whether two projections have different weights; these may be transposed."""
    first, second = (narrow.round(it[0]) for it in (one, other))
    if not np.array_equal(first, second) and not np.array_equal(first, second.T):
        return True
    # A bias that is not there is one of zeros.
    added = [np.zeros(1) if it[1] is None else narrow.round(it[1]) for it in (one, other)]
    return not bool(np.all(added[0] == added[1]))


# Two callables


def compare(
    old: Any,
    new: Any,
    *inputs: Any,
    frameworks: tuple[str, str] | None = None,
    heads: bool | int | None = None,
    gradients: bool = True,
    **told: Any,
) -> Diagnosis:
    """Call two implementations with the same inputs, and diagnose the second beside the first.

    If the inputs are query, key and value as heads, both outputs and the gradients of the second
    are compared with the definition, and the mistake is named. Otherwise, such as for layers with
    weights of their own, the second output is compared with the first, as `against` does. If it
    deviates, the attentions in both are compared as `compare_models` does; or, if only one of the
    two is an attention of torch, both outputs are compared with the definition by its weights.
    Two arrays are two outputs, the second of which is compared with the first.

    Args:
        old: a function or layer that takes the inputs and returns the output, or a tuple that
            begins with it; or an output.
        new: another one, which is diagnosed.
        inputs: arrays, which each side gets in its framework.
        frameworks: the frameworks of both, such as ("torch", "jax"); None for that of the inputs.
        heads: whether the inputs are query, key and value as heads; None if there are three of
            them, with at least three axes each, and neither side is a layer of torch. For layers,
            it may be the number of their heads.
        gradients: whether to differentiate the second, if its framework does.
        told: the other arguments of `diagnose`, or of `against`.

    Raises:
        ConformanceError: as `diagnose` or `against` does, or if a framework is not installed.
    """
    arrays = [name for name, it in (("first", old), ("second", new)) if not callable(it)]
    if len(arrays) == 2 and not inputs:
        sizes = {} if heads is None or isinstance(heads, bool) else {"heads": heads}
        return between_outputs(new, old, **sizes, **told)
    if arrays:
        raise BadArrays(
            f"the {' and the '.join(arrays)} of the two sides can not be called with inputs; pass "
            "two functions and their inputs, or two outputs alone; an output beside its query, key "
            "and value is what diagnose takes"
        )
    numbers = [Numbers.of(f"input {n}", array) for n, array in enumerate(inputs)]
    own = _framework_of(inputs)
    names = frameworks or (own, own)
    layers = [bool(_attentions(it)) for it in (old, new)]
    if heads is None:
        plain = len(inputs) == 3 and all(it.values.ndim >= 3 for it in numbers)
        heads = plain and not any(layers)
    first, _ = _called(old, names[0], numbers, None)
    if heads is not True:
        second, _ = _called(new, names[1], numbers, None)
        sizes = {} if heads is False else {"heads": heads}
        kept = {name: it for name, it in told.items() if name in ("dtype", "layout")}
        found = against(second, first, **kept)
        if found.verdict == "noise" or not any(layers):
            return found
        try:
            if all(layers):
                inside = compare_models(old, new, _tensors(numbers), **sizes, **told)
                return inside if inside.verdict == "deviates" else found
            layer = old if layers[0] else new
            return _by_weights(layer, numbers, (first, second), {**sizes, **told})
        except ConformanceError as reason:
            note = stated(Phrase("layers.not-compared", {"why": str(reason)}))
            return msgspec.structs.replace(found, notes=[*found.notes, note])
    cotangent = None
    if gradients and framework(names[1]).differentiable:
        random = np.random.Generator(np.random.PCG64(0))
        rounded = dtype_of(first.dtype).round
        cotangent = rounded(random.standard_normal(first.values.shape))
    second, derived = _called(new, names[1], numbers, cotangent)
    if derived:
        told["gradients"] = {"output": cotangent, **derived}
    query, key, value = numbers
    return diagnose(query, key, value, second, wanted=first, **told)


def _tensors(numbers: Sequence[Numbers]) -> tuple[Any, ...]:
    bridge = framework("torch")
    return tuple(bridge.array(it.values, it.dtype, "cpu") for it in numbers)


def _by_weights(
    layer: Any, numbers: Sequence[Numbers], outputs: tuple[Numbers, Numbers], told: dict[str, Any]
) -> Diagnosis:
    """Diagnose two outputs by the weights of an attention of torch, which returned one of them.

    Raises:
        BadArrays: if the layer is not an attention, but holds one.
    """
    (seen,) = _seen(layer, _tensors(numbers))[:1]
    if seen.name:
        raise BadArrays(f"{seen.name} is inside a layer, and the other side is a function")
    said: dict[str, Any] = {**seen.masks, "heads": _count(seen), **told}
    said |= dict(zip(("heads", "kv_heads"), _sizes(seen, said), strict=True))
    if seen.is_layer:
        first, second = (_judged(replace(seen, returned=it), said) for it in outputs)
        return msgspec.structs.replace(second, wanted=first)
    seen.order = _order(seen, said) or seen.order
    found = _projections(seen, said)
    sides = ("query", "key", "value", "output")
    if not all(it in found for it in sides):
        raise BadArrays(f"{type(layer).__name__} lacks a projection of query, key, value or output")
    biased = any(found[it][1] is not None for it in sides)
    weights: dict[str, Array] = {}
    for side in sides:
        weight, bias = found[side]
        weights[f"{side[0]}_proj.weight"] = weight
        if biased:
            weights[f"{side[0]}_proj.bias"] = np.zeros(len(weight)) if bias is None else bias
    first, second = (diagnose_layer(numbers[0], weights, it, of="llama", **said) for it in outputs)
    return msgspec.structs.replace(second, wanted=first)


def _framework_of(inputs: Sequence[Any]) -> str:
    module = type(inputs[0]).__module__.partition(".")[0] if inputs else "numpy"
    module = {"jaxlib": "jax"}.get(module, module)
    return module if module in BRIDGES else "numpy"


def _called(
    function: Callable[..., Any], name: str, numbers: Sequence[Numbers], cotangent: Array | None
) -> tuple[Numbers, dict[str, Numbers]]:
    """Return the output for these inputs, and the gradients of the first three, if asked for."""
    bridge = framework(name)
    dtype = next((it.dtype for it in numbers if it.values.dtype == np.float64), "float32")
    with bridge.session(dtype, "cpu"):
        natives = {str(n): bridge.array(it.values, it.dtype, "cpu") for n, it in enumerate(numbers)}
        variables = natives if cotangent is not None else {}
        constants = {} if cotangent is not None else natives

        def called(variables: Natives, constants: Natives) -> tuple[Any, Any]:
            given = {**constants, **variables}
            found = function(*(given[str(n)] for n in range(len(numbers))))
            return (found[0] if isinstance(found, tuple | list) else found), None

        if cotangent is None:
            output, _ = called(variables, constants)
            return Numbers(np.asarray(bridge.numpy(output)), bridge.dtype(output)), {}
        request = Request(
            function=called,
            variables=variables,
            constants=constants,
            cotangent=bridge.array(cotangent, dtype, "cpu"),
            gradients=True,
            program=("compare", id(function)),
        )
        result = bridge.evaluate(request)
        derived = {
            side: Numbers(np.asarray(bridge.numpy(result.gradients[str(n)])), dtype)
            for n, side in enumerate(("query", "key", "value"))
            if str(n) in result.gradients
        }
        output = result.output
        return Numbers(np.asarray(bridge.numpy(output)), bridge.dtype(output)), derived
