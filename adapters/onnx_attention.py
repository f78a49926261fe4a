"""The operator Attention of ONNX, in ONNX's own reference evaluator and in onnxruntime.

Easy to miss in a port: in `attn_mask`, True attends, and numbers are added. A mask may have fewer
than four axes, but three axes are `[heads query key]`, not `[batch query key]`. `is_causal` is
aligned top-left; with a cache, it is shifted by the number of keys that come before the queries,
which makes it bottom-right. The square root of `scale` is applied twice, once to the query and once
to the key. The operator takes heads as a separate axis, or side by side if `q_num_heads` and
`kv_num_heads` are given. The fourth output holds the weights only if `qk_matmul_output_mode` is 3:
with 0, the default, 1 and 2, it holds the logits before the cap, after it, and after cap and mask.
With 0, the reference evaluator caps them all the same, and onnxruntime 1.24, which applied the mask
first, held them after the mask with 1 and after both with 2 (1.27 does not). The softmax is in the
dtype of the inputs, even float16, unless `softmax_precision` sets another.

`softcap` is applied before the mask, and 0 or less means none. Until ONNX changed this in 2026, it
was applied after the mask, so that −∞ became −cap (onnxruntime before 1.27). `left_window_size` and
`right_window_size` count the keys before and after the query's own, and −1 means no limit. The
causal flag and windows start from the position of the first query: 0, or the number of keys in the
cache, or `nonpad_kv_seqlen`, if given, minus the number of queries. So only `nonpad_kv_seqlen`
makes `is_causal` align at the end of each batch entry. Keys and values beyond `nonpad_kv_seqlen`
are multiplied by a weight of 0, so NaN there reaches every query. A mask for fewer keys than there
are is padded with −∞ by ONNX, and rejected by onnxruntime.

Opset 23 introduced the operator, 24 added the input `nonpad_kv_seqlen`, and 25 added windows, which
onnxruntime has since 1.32. If an argument needs a later opset than that of the mode, the adapter
uses the first opset that has it. onnxruntime has kernels for float32 and float16; float64 is
computed operator by operator, as ONNX defines it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
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
    SoftCap,
    Unsupported,
    Window,
)
from conformance.adapter import DTYPES, MaskTable, Natives, Spelling, since
from conformance.adapters.lengths import right_padding

_DOCS = "https://onnx.ai/onnx/operators/onnx__Attention.html"
_SINCE_OPSET = {"nonpad_kv_seqlen": 24, "window_size": 25}
_INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
_OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")
_WITH_WEIGHTS = {"qk_matmul_output_mode": 3}

_MODES = (
    Mode("opset-23", {"opset": 23}, about="opset 23, with qk_matmul_output_mode=3"),
    Mode("opset-24", {"opset": 24}, about="the same in opset 24"),
    Mode(
        "no-weights",
        {"opset": 23, "attributes": {}},
        weights=False,
        about="opset 23, without the fourth output",
    ),
    Mode(
        "three-axes",
        {"opset": 23, "side by side": True},
        about="opset 23, inputs [batch, length, heads · head] with q_num_heads and kv_num_heads",
    ),
    Mode(
        "softmax-float32",
        {"opset": 23, "attributes": _WITH_WEIGHTS | {"softmax_precision": 1}},
        dtypes=("bfloat16", "float16"),
        about="opset 23, softmax_precision=1: the softmax is in float32",
    ),
    Mode(
        "cache",
        {"opset": 23, "instead": "past"},
        about="opset 23, the first keys as past_key and past_value. A mask that is causal and "
        "aligned bottom-right is said by is_causal, with the keys before the queries as the past",
    ),
    Mode(
        "lengths",
        {"opset": 24, "instead": "lengths"},
        about="opset 24, padding on the right as nonpad_kv_seqlen. A mask that is causal and "
        "aligned bottom-right is said by is_causal beside it",
    ),
)
_WINDOWS = Mode(
    "windows",
    {"opset": 25, "instead": "windows"},
    about="opset 25, a mask that is a band as left_window_size and right_window_size",
)


def _example(imports: str, run: str) -> Example:
    """Return user code that builds a model for its inputs; the code `run` runs the model."""
    return Example(
        imports=f"from onnx import helper as oh\n{imports}",
        build="""\
def attention(query, key, value, attn_mask=None, **attributes):
    given = {{"Q": query, "K": key, "V": value, "attn_mask": attn_mask}}
    given = {{name: array for name, array in given.items() if array is not None}}
    attributes |= {{"q_num_heads": {heads}, "kv_num_heads": {heads}}}
    node = oh.make_node("Attention", list(given), ["Y"], **attributes)
    kinds = {{name: oh.np_dtype_to_tensor_dtype(array.dtype) for name, array in given.items()}}
    inputs = [oh.make_tensor_value_info(name, kinds[name], given[name].shape) for name in given]
    output = oh.make_tensor_value_info("Y", kinds["Q"], None)
    graph = oh.make_graph([node], "attention", inputs, [output])
    model = oh.make_model(graph, opset_imports=[oh.make_opsetid("", 23)], ir_version=11)
    return """
        + run,
        call="attention(query, key, value{masks})",
    )


_FLAG = CausalFlag("is_causal", alignment="top-left")
_LENGTHS = Lengths("nonpad_kv_seqlen", of="keys", dtype="int64")
_WINDOW = Window("window_size", none=-1, alignment="top-left")


@dataclass(frozen=True, eq=False)
class _Table(MaskTable):
    """A mask table in which lengths change the alignment of the causal flag and of windows.

    Args:
        at_end: the table for encodings with lengths, in which flag and windows are aligned
            bottom-right.
    """

    at_end: MaskTable = field(default_factory=MaskTable)

    def spellings(self, problem: Problem) -> Iterator[Spelling]:
        for spelling in self.at_end.spellings(problem):
            if _LENGTHS.name in spelling.arguments:
                yield spelling
        yield from super().spellings(problem)


class _Attention(Function):
    """The base class of both adapters, which run the operator in different runtimes."""

    documentation = _DOCS
    grouped = True
    custom_scale = True
    differentiable = False
    returns_weights = "per head"
    weights_option = "qk_matmul_output_mode=3"
    weights_otherwise = "logits"
    returned_logits: ClassVar = {
        f"qk_matmul_output_mode={stage}": {"attributes": {"qk_matmul_output_mode": stage}}
        for stage in range(3)
    }
    modes = _MODES

    mask_arguments = (
        MaskArgument(
            "attn_mask",
            ("batch heads query key", "query key"),
            true="attends",
            number="added",
            broadcasts=True,
        ),
    )
    causal_flag = _FLAG
    features = (SoftCap("softcap"), _LENGTHS, Cache("past_key", "past_value", prepared=False))
    opsets: ClassVar[Mapping[int, str]]
    """For each opset that changed the operator, the first version of the runtime to support it."""

    @cached_property
    def masks(self) -> _Table:
        arguments = tuple(self.mask_arguments)
        others = tuple(feature for feature in self.features if feature is not _LENGTHS)
        # The operator does not take a cache beside lengths.
        ended = tuple(
            replace(feature, alignment="bottom-right") if isinstance(feature, Window) else feature
            for feature in self.features
            if not isinstance(feature, Cache)
        )
        flag = replace(_FLAG, alignment="bottom-right")
        return _Table(arguments, _FLAG, others, MaskTable(arguments, flag, ended))

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode, **options: Any
    ) -> Any:
        opset = max(
            [mode["opset"], *(since_ for name, since_ in _SINCE_OPSET.items() if name in masks)]
        )
        if not since(self.framework, self.opsets[opset]):
            raise Unsupported(f"opset {opset}: since {self.framework} {self.opsets[opset]}")
        given = {"Q": query, "K": key, "V": value}
        given |= {name: masks[name] for name in _INPUTS if name in masks}
        attributes = dict(mode.options.get("attributes", _WITH_WEIGHTS)) | options
        attributes |= {name: masks[name] for name in ("softcap",) if name in masks}
        if "window_size" in masks:
            left, right = masks["window_size"]
            attributes |= {"left_window_size": left, "right_window_size": right}
        mask = given.pop("attn_mask", None)
        if "is_causal" in masks:
            attributes["is_causal"] = 1
        elif "instead" in mode.options and not given.keys() & {"past_key", _LENGTHS.name}:
            if "window_size" in masks:
                raise Unsupported("a window counts from the keys in the cache, and is one")
            inputs, further, mask = _INSTEAD[mode["instead"]](query, key, value, mask)
            given, attributes = given | inputs, attributes | further
        if mask is not None:
            given["attn_mask"] = mask
        self.check_inputs(given)
        if mode.options.get("side by side"):
            attributes |= {"q_num_heads": query.shape[1], "kv_num_heads": key.shape[1]}
            given |= {name: _side_by_side(given[name]) for name in ("Q", "K", "V")}
        asked = {"Y"} | ({"qk_matmul_output"} if mode.weights else set())
        # "They shall be used together, and not allowed to use only one of them."
        asked |= {"present_key", "present_value"} if "past_key" in given else set()
        outputs = tuple(name if name in asked else "" for name in _OUTPUTS)
        node = self.bridge.node("Attention", _INPUTS, outputs, tuple(attributes.items()), opset)
        found = self.bridge.run(node, given)
        context, weights = found["Y"], found.get("qk_matmul_output")
        if mode.options.get("side by side"):
            heads, width = query.shape[1], context.shape[2]
            context = context.reshape(*context.shape[:2], heads, width // heads).swapaxes(1, 2)
        return context, weights

    def check_inputs(self, given: Natives) -> None:
        """Raise `Unsupported` for inputs that the installed version of the runtime rejects.

        The base class accepts all inputs.
        """


def _side_by_side(heads: np.ndarray) -> np.ndarray:
    """Return `[batch heads length head]` rearranged to `[batch length (heads head)]`."""
    batch, count, length, size = heads.shape
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(batch, length, count * size)


_Instead = tuple[Natives, dict[str, Any], Any]
"""Inputs and attributes that replace all or part of a mask; what is left of the mask, or None."""


def _past(query: Any, key: Any, value: Any, mask: Any) -> _Instead:
    before = key.shape[2] - query.shape[2]
    causal = before > 0 and _is_band(mask, query, key, -key.shape[2], before)
    cut = before if causal else key.shape[2] // 2
    inputs = {"K": key[:, :, cut:], "V": value[:, :, cut:]}
    inputs |= {"past_key": key[:, :, :cut], "past_value": value[:, :, :cut]}
    return (inputs, {"is_causal": 1}, None) if causal else (inputs, {}, mask)


def _lengths(query: Any, key: Any, value: Any, mask: Any) -> _Instead:
    batch, keys = key.shape[0], key.shape[2]
    read = _in_full(mask, query, key)
    counts = None if read is None else right_padding(read)
    # A mask may encode the padding of all entries in one row; the operator needs a number for each.
    known = np.broadcast_to(keys if counts is None else counts, batch)
    inputs = {"nonpad_kv_seqlen": known.astype(np.int64)}
    if _is_band(mask, query, key, -keys, keys - query.shape[2]):
        return inputs, {"is_causal": 1}, None
    return inputs, {}, mask if counts is None else None


def _windows(query: Any, key: Any, value: Any, mask: Any) -> _Instead:
    read = _in_full(mask, query, key)
    if read is not None and read.any():
        queries, keys = np.nonzero(read.any(axis=(0, 1)))
        left, right = (queries - keys).max(), (keys - queries).max()
        if left >= 0 and right >= 0 and _is_band(mask, query, key, -left, right):
            return {}, {"left_window_size": int(left), "right_window_size": int(right)}, None
    return {}, {}, mask


_INSTEAD = {"past": _past, "lengths": _lengths, "windows": _windows}


def _in_full(mask: Any, query: Any, key: Any) -> Any:
    """Return a boolean mask with all four axes.

    Return None if there is no mask, and for a mask of numbers or of sizes that do not fit.
    """
    if mask is None or mask.dtype != np.bool_ or mask.ndim > 4:
        return None
    mask = mask[(None,) * (4 - mask.ndim)]
    sizes = (*query.shape[:3], key.shape[2])
    fits = all(own in (1, size) for own, size in zip(mask.shape, sizes, strict=True))
    return mask if fits else None


def _is_band(mask: Any, query: Any, key: Any, first: int, last: int) -> bool:
    """Return whether a mask shows exactly the keys `first` to `last` positions after each query.

    True in the mask shows a key. Return False if `_in_full` returns None.
    """
    mask = _in_full(mask, query, key)
    if mask is None:
        return False
    after = np.arange(key.shape[2]) - np.arange(query.shape[2])[:, None]
    return bool((mask == ((after >= first) & (after <= last))).all())


class OnnxReference(_Attention):
    """The adapter for the operator in onnx.reference.ReferenceEvaluator."""

    title = "ONNX Attention (reference evaluator)"
    framework = "onnx"
    example = _example(
        "from onnx.reference import ReferenceEvaluator",
        "ReferenceEvaluator(model).run(None, given)[0]",
    )
    dtypes = tuple(DTYPES) if since("onnx", "1.19") else ("float64", "float32", "float16")
    fully_masked_row = "zeros"
    modes = (*_MODES, _WINDOWS)
    features = (*_Attention.features, *([_WINDOW] if since("onnx", "1.23") else []))
    opsets: ClassVar = {23: "1.18", 24: "1.19", 25: "1.23"}


class OnnxRuntimeAttention(_Attention):
    """The adapter for the operator in onnxruntime, on the CPU."""

    title = "ONNX Attention (onnxruntime)"
    framework = "onnxruntime"
    example = _example(
        "from onnxruntime import InferenceSession",
        "InferenceSession(model.SerializeToString()).run(None, given)[0]",
    )
    # There is no matrix product of bfloat16. float64 has no kernel, but is computed by ONNX's
    # definition of the operator.
    dtypes = ("float64", "float32", "float16")
    fully_masked_row = "zeros"
    modes = (*_MODES, _WINDOWS)
    features = (*_Attention.features, *([_WINDOW] if since("onnxruntime", "1.32") else []))
    opsets: ClassVar = {23: "1.23", 24: "1.24", 25: "1.32"}


ADAPTERS = {
    "onnx-reference": "OnnxReference",
    "onnxruntime-attention": "OnnxRuntimeAttention",
}
