"""Find the attentions of two models by hooks, and diagnose the first that differs.

An attention is a module with projections of query, key and value, by one of the usual names. What
comes out of these are its heads, and what goes into its output projection is its output. Each
attention is judged by heads of its own, so that differences of earlier layers do not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from conformance.arrays import configuration
from conformance.arrays.between import against
from conformance.arrays.diagnosis import Diagnosis, diagnose, told
from conformance.arrays.given import Numbers
from conformance.definition.dtypes import dtype_of
from conformance.errors import BadArrays
from conformance.porting.checkpoints import counts
from conformance.records.findings import Phrase

PROJECTIONS: Mapping[str, tuple[str, ...]] = {
    "query": ("q_norm", "query_norm", "q_proj", "query", "q_lin", "to_q", "wq", "q"),
    "key": ("k_norm", "key_norm", "k_proj", "key", "k_lin", "to_k", "wk", "k"),
    "value": ("v_proj", "value", "v_lin", "to_v", "wv", "v"),
    "packed": ("c_attn", "qkv_proj", "qkv", "in_proj", "Wqkv", "wqkv"),
    "output": ("o_proj", "out_proj", "c_proj", "out_lin", "dense", "proj", "wo", "o"),
}
"""The names of projections inside an attention; a norm comes after its projection."""


@dataclass
class Seen:
    """An attention of a model, and the arrays that were seen in it.

    Attributes:
        name: its name in the model.
        module: the module.
        arrays: by name: "query", "key", "value" or "packed", and "output".
    """

    name: str
    module: Any
    arrays: dict[str, Numbers] = field(default_factory=dict)

    def child(self, part: str) -> Any:
        """Return the module of a projection, or None."""
        named = dict(self.module.named_children())
        return next((named[it] for it in PROJECTIONS[part] if it in named), None)


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
    modules of their own. Numbers of heads, rotary embeddings and so on are read from the model's
    configuration, if it has one as those of Hugging Face do.

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
        said = {**said, **sizes, **options}
        if isinstance(batch, Mapping) and "attention_mask" in batch and "mask" not in options:
            said |= {"mask": batch["attention_mask"], "mask_true": "attends"}
        right, judged = (_judged(it, said) for it in (one, other))
        if right.verdict == "deviates":
            # What is told is not what the old model does, so only their outputs are compared.
            arrays = (_side_by_side(it.arrays["output"]) for it in (other, one))
            judged = against(*arrays, layout="batch length head")
        found = msgspec.structs.replace(judged, place=f"layer {layer}, {other.name}", wanted=right)
        if judged.verdict == "deviates":
            return found
        differing = [it for it in PROJECTIONS if _weights_differ(one.child(it), other.child(it))]
        if differing:
            cause = told(Phrase("layers.weights-differ", {"projections": [*differing]}))
            return msgspec.structs.replace(found, verdict="deviates", causes=[cause])
    assert found is not None
    note = told(Phrase("layers.alike", {"count": len(olds)}))
    return msgspec.structs.replace(found, place="", wanted=None, notes=[*found.notes, note])


def _seen(model: Any, batch: Any) -> list[Seen]:
    """Return the attentions of a model in the order in which they are called with a batch."""
    if not hasattr(model, "named_modules"):
        raise BadArrays(f"{type(model).__name__} is no module of torch")
    every = [Seen(name, module) for name, module in model.named_modules()]
    there = [it for it in every if it.child("packed") or (it.child("query") and it.child("key"))]
    called: list[Seen] = []
    hooks = [hook for it in there for hook in _hooked(it, called)]
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


def _hooked(seen: Seen, called: list[Seen]) -> Iterator[Any]:
    """Yield hooks that remember the arrays of an attention, and itself when it has been called."""

    def keep(name: str, array: Any) -> None:
        seen.arrays[name] = Numbers.of(f"{seen.name}.{name}", array.detach())

    for part in ("query", "key", "value", "packed"):
        child = seen.child(part)
        if child is not None:
            yield child.register_forward_hook(
                lambda module, inputs, output, part=part: keep(part, output)
            )
    output = seen.child("output")
    if output is not None:
        yield output.register_forward_hook(lambda module, inputs, output: keep("output", inputs[0]))

    def after(module: Any, inputs: Any, output: Any) -> None:
        if "output" not in seen.arrays:
            keep("output", output[0] if isinstance(output, tuple | list) else output)
        called.append(seen)

    yield seen.module.register_forward_hook(after)


def _config(model: Any) -> Mapping[str, Any] | None:
    config: Any = getattr(model, "config", None)
    found = config.to_dict() if hasattr(config, "to_dict") else config
    return found if isinstance(found, Mapping) else None


def _judged(seen: Seen, said: dict[str, Any]) -> Diagnosis:
    heads = said.get("heads") or getattr(seen.module, "num_heads", None)
    if not isinstance(heads, int):
        raise BadArrays(f"say how many heads {seen.name} has: heads=")
    kv_heads = said.get("kv_heads") or heads
    arrays = {name: _side_by_side(it) for name, it in seen.arrays.items()}
    if "packed" in arrays:
        packed = arrays.pop("packed")
        size = packed.values.shape[-1] // (heads + 2 * kv_heads)
        ends = [heads * size, (heads + kv_heads) * size]
        parts = np.split(packed.values, ends, axis=-1)
        arrays |= {
            name: Numbers(part, packed.dtype)
            for name, part in zip(("query", "key", "value"), parts, strict=True)
        }
    lacking = {"query", "key", "value", "output"} - arrays.keys()
    if lacking:
        raise BadArrays(f"{seen.name} called no projection of {' and '.join(sorted(lacking))}")
    given: dict[str, Any] = {**arrays, **said, "heads": heads, "kv_heads": kv_heads}
    return diagnose(**given, layout="batch length (heads head)")


def _side_by_side(array: Numbers) -> Numbers:
    """Return heads apart, as a norm returns them, side by side."""
    values = array.values
    return Numbers(values.reshape(*values.shape[:2], -1), array.dtype) if values.ndim > 3 else array


def _weights_differ(one: Any, other: Any) -> bool:
    """Return whether two projections have different weights; they may be transposed."""
    if one is None or other is None:
        return False
    for name in ("weight", "bias"):
        pair: list[Any] = [getattr(it, name, None) for it in (one, other)]
        if any(it is None for it in pair):
            continue
        numbers = [Numbers.of(name, it.detach()) for it in pair]
        narrow = max((dtype_of(it.dtype) for it in numbers), key=lambda it: it.roundoff)
        first, second = (narrow.round(it.values) for it in numbers)
        if first.shape != second.shape:
            second = second.T
        if first.shape == second.shape and not np.array_equal(first, second):
            return not np.array_equal(first, second.T) if first.ndim == 2 else True
    return False
