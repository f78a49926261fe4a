"""onnxruntime's own com.microsoft.MultiHeadAttention and GroupQueryAttention, on the CPU.

Easy to miss in a port: inputs have their heads side by side, `[batch length (heads head)]`. Padding
can be encoded in three ways, all of them int32: `key_padding_mask` holds either 1 for each key that
may be attended to, or one length for each sequence; `seqlens_k` holds the length *minus one*.
-10000 (`mask_filter_value`) is added to the logits of keys that `key_padding_mask` blocks, so a
fully masked query attends as if unmasked, or to all keys equally with -3e38. Only in
`attention_bias`, which is added unchanged, does -inf block.

MultiHeadAttention adds the biases of the projections if they are passed. Its fourth output is not
the weights but the logits, with bias and mask included. `unidirectional` is aligned top-left, but
the last query sees every key (since 1.21); with a cache, it is shifted by the length of the cache.
float16 inputs are computed in float32.

GroupQueryAttention has the features that language models need; on a CPU, only the norms of heads
are missing. `softcap` is applied before bias and masks; 0 or less means none. Since 1.24,
`local_window_size` counts the query's own key, so W shows that key and the W − 1 keys before it, as
in Mistral; in earlier versions, it shows W keys before it. −1 means no window, and 0 shows no key,
which gives zeros. `head_sink` holds base-e logits, neither scaled nor capped; `smooth_softmax=1`
adds a sink with logit 0. The tables of `do_rotary` have one column for each pair, so with fewer
columns only a part of each head is rotated; `rotary_interleaved` pairs neighbours, (2t, 2t + 1).
Keys in the cache must already be rotated, and the positions of new keys continue after them. On a
CPU, only the first of a prompt's `position_ids` is read. NaN beyond a length has no effect.

GroupQueryAttention is made for decoding. It is causal, aligned bottom-right, unless it is called
with `causal=0` (since 1.30). Keys that come before the queries have to be in a cache, and with a
cache, a batch of several sequences may have only one query each. The head size must be a multiple
of 8, and values must have the same size. The adapter pads other heads with zeros and passes the
scale of their original size, so that the result stays the same. A batch of 0 ends the process
(SIGFPE, as seen in 1.32), and is not passed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from conformance import (
    Cache,
    CausalFlag,
    Example,
    Function,
    Lengths,
    MaskArgument,
    Mode,
    Problem,
    RotaryTables,
    Shape,
    Sinks,
    SoftCap,
    Unsupported,
    Window,
)
from conformance.adapter import MaskTable, Natives, Spelling, since
from conformance.adapters.lengths import LengthTable

_DOCS = "https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md"
_PRESENT = ("present_key", "present_value")
_BIASES = ("query_bias", "key_bias", "value_bias")
_HEAD_MULTIPLE = 8


class _Contrib(Function):
    """The base class of both adapters, each of which runs one operator."""

    framework = "onnxruntime"
    dtypes = ("float32", "float16")
    custom_scale = True
    differentiable = False
    native_layout = "batch length (heads head)"
    operator: ClassVar[str]
    inputs: ClassVar[tuple[str, ...]]
    """The names of the operator's inputs, in order."""

    def _run(self, outputs: tuple[str, ...], given: Natives) -> Natives:
        """Run the operator and return the named outputs, by name.

        `given` holds the inputs and attributes by name: whatever is not in `self.inputs` is passed
        as an attribute.
        """
        arrays = {name: given[name] for name in self.inputs if name in given}
        attributes = tuple(item for item in given.items() if item[0] not in arrays)
        node = self.bridge.node(
            self.operator, self.inputs, outputs, attributes, domain="com.microsoft"
        )
        found: Natives = self.bridge.run(node, arrays)
        return found


class OnnxRuntimeMultiHeadAttention(_Contrib):
    """The adapter for com.microsoft.MultiHeadAttention."""

    title = "com.microsoft.MultiHeadAttention (onnxruntime)"
    documentation = f"{_DOCS}#com.microsoft.MultiHeadAttention"
    operator = "MultiHeadAttention"
    inputs = (
        "query",
        "key",
        "value",
        "bias",
        "key_padding_mask",
        "attention_bias",
        "past_key",
        "past_value",
    )
    mask_arguments = (
        MaskArgument(
            "key_padding_mask",
            ("batch key", "batch query key"),
            number="attends, 0 or 1 only",
            dtype="int32",
        ),
        MaskArgument("attention_bias", "batch heads query key", number="added"),
    )
    causal_flag = CausalFlag("unidirectional", alignment="top-left")
    example = Example(
        imports="from onnx import helper as oh\nfrom onnxruntime import InferenceSession",
        build="""\
def attention(query, key, value, key_padding_mask=None, attention_bias=None, **attributes):
    every = {{"query": query, "key": key, "value": value, "bias": None}}
    whole = None if key_padding_mask is None else key_padding_mask.astype("int32")
    every |= {{"key_padding_mask": whole, "attention_bias": attention_bias}}
    given = {{name: array for name, array in every.items() if array is not None}}
    names = [name if name in given else "" for name in every]
    attributes |= {{"num_heads": {heads}, "domain": "com.microsoft"}}
    node = oh.make_node("MultiHeadAttention", names, ["output"], **attributes)
    kinds = {{name: oh.np_dtype_to_tensor_dtype(array.dtype) for name, array in given.items()}}
    inputs = [oh.make_tensor_value_info(name, kinds[name], given[name].shape) for name in given]
    output = oh.make_tensor_value_info("output", kinds["query"], None)
    graph = oh.make_graph([node], "attention", inputs, [output])
    opsets = [oh.make_opsetid("", 17), oh.make_opsetid("com.microsoft", 1)]
    model = oh.make_model(graph, opset_imports=opsets, ir_version=8)
    return InferenceSession(model.SerializeToString()).run(None, given)[0]""",
        call="attention(query, key, value{masks})",
    )
    modes = (
        Mode("default", about="query, key and value; without masks that may be a tiled kernel"),
        Mode(
            "present",
            {"outputs": _PRESENT},
            about="with the outputs present_key and present_value: never the tiled kernel",
        ),
        Mode(
            "cache",
            {"outputs": _PRESENT, "cache": True},
            about="the first keys as past_key and past_value. A mask that is causal and aligned "
            "bottom-right is said by unidirectional, with the keys before the queries as the past",
        ),
        Mode(
            "bias",
            about="the biases of the three projections are given to the operator, which adds them",
        ),
        Mode(
            "mask-filter-value",
            {"mask_filter_value": -3e38},
            every_case=False,
            about="mask_filter_value=-3e38 is added to the logits of padding, instead of -10000",
        ),
    )

    bias_modes = ("bias",)

    @cached_property
    def masks(self) -> MaskTable:
        return LengthTable(self.mask_arguments, self.causal_flag, lengths="key_padding_mask")

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode, **options: Any
    ) -> Any:
        heads = query.shape[1]
        if 0 in (query.shape[0], query.shape[2]):
            _needs("1.29", "no batch entry or query, which ends the process with SIGFPE before")
        biases = [options.pop(name).ravel() for name in _BIASES if name in options]
        given = {"num_heads": heads, **options, **masks}
        given |= {n: number for n, number in mode.options.items() if n == "mask_filter_value"}
        if biases:
            given["bias"] = np.concatenate(biases)
        causal = given.pop("unidirectional", False)
        if mode.options.get("cache") and not causal:
            if value.shape[3] != key.shape[3]:
                raise Unsupported("a cache has value heads of the key's size")
            before = key.shape[2] - query.shape[2]
            causal = before > 0 and _is_causal(given.get("key_padding_mask"), query, key)
            if causal:
                del given["key_padding_mask"]
            cut = before if causal else key.shape[2] // 2
            given |= {"past_key": key[:, :, :cut], "past_value": value[:, :, :cut]}
            key, value = key[:, :, cut:], value[:, :, cut:]
        if causal:
            given["unidirectional"] = 1
        given |= {"query": _merged(query), "key": _merged(key), "value": _merged(value)}
        found = self._run(("output", *mode.options.get("outputs", ())), given)
        return _split(found["output"], heads)


class _LastIndexTable(LengthTable):
    """A mask table that never combines `seqlens_k` with the causal flag if keys outnumber queries.

    The operator would then align the last query with the last key within each length. Encodings
    with the feature `Cache` remain.
    """

    def spellings(self, problem: Problem) -> Iterator[Spelling]:
        ahead = problem.shape.key_length > problem.shape.query_length
        for spelling in super().spellings(problem):
            if not (ahead and spelling.arguments.keys() >= {"causal", "seqlens_k"}):
                yield spelling


class OnnxRuntimeGroupQueryAttention(_Contrib):
    """The adapter for com.microsoft.GroupQueryAttention."""

    title = "com.microsoft.GroupQueryAttention (onnxruntime)"
    documentation = f"{_DOCS}#com.microsoft.GroupQueryAttention"
    operator = "GroupQueryAttention"
    grouped = True
    fully_masked_row = "nan"
    returns_weights = "per head"
    weights_option = "qk_output=2"
    weights_otherwise = "none"
    inputs = (
        "query",
        "key",
        "value",
        "past_key",
        "past_value",
        "seqlens_k",
        "total_sequence_length",
        "cos_cache",
        "sin_cache",
        "position_ids",
        "attention_bias",
        "head_sink",
    )
    mask_arguments = (MaskArgument("attention_bias", "batch heads query key", number="added"),)
    causal_flag = CausalFlag("causal", alignment="bottom-right")
    features = (
        Cache("past_key", "past_value", lengths="seqlens_k_of_cache", counts="last index"),
        Lengths("seqlens_k", of="keys", counts="last index", aligns=False),
        Window(
            "local_window_size",
            form="own and before" if since("onnxruntime", "1.24") else "before",
            none=-1,
            alignment="bottom-right",
            needs_causal=True,
        ),
        SoftCap("softcap"),
        *([Sinks("head_sink")] if since("onnxruntime", "1.23") else []),
        # Keys that come before the queries are rotated when they enter the cache.
        RotaryTables("cos_cache", "sin_cache", flag="rotary_interleaved"),
    )
    modes = (
        Mode("default", weights=False, about="query, key and value as three inputs"),
        Mode("packed", {"packed": True}, weights=False, about="query, key and value in one input"),
        Mode("weights", {"weights": True}, about="with qk_output=2: the weights come back too"),
    )

    @cached_property
    def masks(self) -> MaskTable:
        return _LastIndexTable(
            self.mask_arguments,
            self.causal_flag,
            self.features,
            lengths="seqlens_k",
            less=1,
            first=True,
        )

    def check_shape(self, shape: Shape) -> None:
        if shape.key_length < shape.query_length:
            raise Unsupported("no fewer keys than queries")
        if shape.key_length > shape.query_length > 1 < shape.batch:
            raise Unsupported("beside a cache, several queries of one sequence only")

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode, **options: Any
    ) -> Any:
        (batch, heads, queries, size), keys = query.shape, key.shape[2]
        if not batch:
            raise Unsupported("an empty batch ends the process with SIGFPE, as seen in 1.32")
        given = {"num_heads": heads, "kv_num_heads": key.shape[1], "scale": size**-0.5}
        given |= options | masks
        if "attention_bias" in masks:
            _needs("1.22", "attention_bias")
        # A single query sees every key whether causal or not.
        if not given.pop("causal", queries == 1):
            _needs("1.30", "causal=0")
            given["causal"] = 0
        cached = "past_key" in given
        if cached:
            given["seqlens_k"] = given.pop("seqlens_k_of_cache")
        last = given.setdefault("seqlens_k", np.full(batch, keys - 1, np.int32))
        total = last.max() + 1 if cached else keys
        given["total_sequence_length"] = np.array(total, np.int32)
        if "cos_cache" in given:
            if given["cos_cache"].shape[1] % _HEAD_MULTIPLE:
                raise Unsupported(f"rotary pairs that are no multiple of {_HEAD_MULTIPLE}")
            given["do_rotary"] = 1
        given["rotary_interleaved"] = int(given.get("rotary_interleaved", False))
        value_size = value.shape[3]
        filled = -max(size, value_size) // _HEAD_MULTIPLE * -_HEAD_MULTIPLE
        query, key, value = (_filled(array, filled) for array in (query, key, value))
        if cached:
            given |= {n: _filled(given[n], filled) for n in ("past_key", "past_value")}
        elif keys > queries:
            # The last keys before the padding, one for each query, are appended to the cache.
            own = last[:, None] + np.arange(1 - queries, 1)
            given |= {"past_key": key[:, :, :-queries], "past_value": value[:, :, :-queries]}
            key, value = (
                np.take_along_axis(array, own[:, None, :, None], axis=2) for array in (key, value)
            )
        inputs = {"query": _merged(query), "key": _merged(key), "value": _merged(value)}
        if mode.options.get("packed"):
            inputs = {"query": np.concatenate(list(inputs.values()), axis=2)}
        outputs = ("output", *_PRESENT)
        if mode.weights:
            _needs("1.23", "qk_output")
            if cached:
                raise Unsupported("beside a cache, weights end at the longest length")
            given["qk_output"] = 2
            outputs += ("output_qk",)
        found = self._run(outputs, given | inputs)
        context = _split(found["output"], heads)[..., :value_size]
        return np.ascontiguousarray(context), found.get("output_qk")


def _needs(version: str, what: str) -> None:
    if not since("onnxruntime", version):
        raise Unsupported(f"{what}: since onnxruntime {version}")


def _is_causal(mask: np.ndarray | None, query: np.ndarray, key: np.ndarray) -> bool:
    """Return whether a mask is `[batch query key]`, causal and aligned bottom-right; 1 attends.

    Return False for None and for masks with a different number of axes.
    """
    queries, keys = query.shape[2], key.shape[2]
    return (
        mask is not None
        and mask.ndim == 3
        and bool((mask == np.tri(queries, keys, keys - queries)).all())
    )


def _filled(heads: np.ndarray, size: int) -> np.ndarray:
    """Return heads, `[batch heads length head]`, padded with zeros to the head size `size`."""
    return np.pad(heads, [(0, 0)] * 3 + [(0, size - heads.shape[3])])


def _merged(heads: np.ndarray) -> np.ndarray:
    """Return `[batch heads length head]` rearranged to `[batch length (heads head)]`."""
    batch, count, length, size = heads.shape
    return heads.swapaxes(1, 2).reshape(batch, length, count * size)


def _split(merged: np.ndarray, heads: int) -> np.ndarray:
    """Return `[batch length (heads head)]` rearranged to `[batch heads length head]`."""
    batch, length, width = merged.shape
    split = merged.reshape(batch, length, heads, width // heads)
    return np.ascontiguousarray(split.swapaxes(1, 2))


ADAPTERS = {
    "onnxruntime-mha": "OnnxRuntimeMultiHeadAttention",
    "onnxruntime-gqa": "OnnxRuntimeGroupQueryAttention",
}
