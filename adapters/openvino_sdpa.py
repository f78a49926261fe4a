"""OpenVINO's ScaledDotProductAttention (opset 13), compiled for the CPU.

Easy to miss in a port: in `attention_mask`, True attends; numbers are added, and must have the
dtype of the query. With `causal=True`, a mask is not rejected but ignored, as documented; the
causal flag is aligned top-left. `causal` is an attribute, but `scale` is an input. Key and value
must have as many heads as the query, and weights are not returned.

How the operator is computed depends on the model that contains it. In a model without state, it is
decomposed into products and a softmax, and a fully masked query gets NaN. In a model that keeps
keys and values from one inference to the next, as exported language models do, it runs as one
kernel. There, a fully masked query gets the mean of the values if the mask is boolean and NaN if it
consists of numbers, and the causal flag is aligned bottom-right.

Here, `INFERENCE_PRECISION_HINT` is f32 and `EXECUTION_MODE_HINT` is ACCURACY, because by default
float32 is computed in bfloat16 on CPUs that support it. Even so, float64 is computed in float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import numpy as np

from conformance import (
    CausalFlag,
    Example,
    Function,
    MaskArgument,
    Mode,
    Unsupported,
)
from conformance.adapter import Natives


class OpenVinoScaledDotProductAttention(Function):
    """The adapter for OpenVINO's ScaledDotProductAttention-13 on the CPU."""

    title = "openvino.opset13.scaled_dot_product_attention (CPU)"
    documentation = (
        "https://docs.openvino.ai/2025/documentation/openvino-ir-format/operation-sets/"
        "operation-specs/sequence/scaled-dot-product-attention.html"
    )
    framework = "openvino"
    custom_scale = True
    differentiable = False
    # With a state, it depends on the mask: the mean of the values for False, NaN for -inf.
    fully_masked_row: ClassVar = {"dynamic": "nan", "static": "nan"}
    mask_arguments = (
        MaskArgument(
            "attention_mask",
            ("batch heads query key", "query key"),
            true="attends",
            number="added",
            broadcasts=True,
        ),
    )
    causal_flag = CausalFlag("causal", alignment="top-left", effect="instead of masks")
    example = Example(
        imports="import openvino as ov\nfrom openvino import opset13",
        build="""\
def attention(query, key, value, attention_mask=None, causal=False):
    split = lambda x: x.reshape(*x.shape[:2], {heads}, -1).swapaxes(1, 2).copy()
    given = [split(query), split(key), split(value)]
    given += [] if attention_mask is None else [attention_mask]
    inputs = [opset13.parameter(array.shape, array.dtype.type) for array in given]
    output = opset13.scaled_dot_product_attention(*inputs, causal=causal)
    exact = {{"INFERENCE_PRECISION_HINT": "f32"}}
    compiled = ov.compile_model(ov.Model([output], inputs), "CPU", exact)
    return compiled(given)[0].swapaxes(1, 2).reshape(query.shape)""",
        call="attention(query, key, value{masks})",
    )
    modes = (
        Mode("dynamic", about="compiled for any sizes"),
        Mode(
            "static",
            {"static": True},
            every_case=False,
            about="compiled for the sizes of its inputs",
        ),
        Mode(
            "state",
            {"state": True},
            about="keys and values are appended to a state, as in exported language models; those "
            "that come before the queries are put there by an inference of its own",
        ),
    )

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode, **options: Any
    ) -> Any:
        causal = masks.get("causal", False)
        given = {"query": query, "key": key, "value": value}
        if "attention_mask" in masks:
            given["attention_mask"] = masks["attention_mask"]
        if "scale" in options:
            given["scale"] = np.array(options["scale"], query.dtype)
        if mode.options.get("state"):
            # The shape of the state must have a fixed number and size of heads.
            known = dict.fromkeys(("query", "key", "value"), (1, 3))
            make = partial(_stateful, causal)
            return self.bridge.run(("state", causal), make, *_steps(given), known=known)
        make = partial(_plain, causal)
        static = mode.options.get("static", False)
        known = {name: range(array.ndim) for name, array in given.items()} if static else {}
        return self.bridge.run(("plain", causal), make, given, known=known)


def _steps(given: Natives) -> list[Natives]:
    """Return the inputs of one or two inferences.

    If there are more keys than queries, the first inference stores the keys and values that come
    before the queries. The last inference has the queries and the other keys and values.

    Raises:
        Unsupported: if there are fewer keys than queries.
    """
    query, mask = given["query"], given.get("attention_mask")
    before = given["key"].shape[2] - query.shape[2]
    if before < 0:
        raise Unsupported("as many keys are appended to the state as there are queries")
    beam = {"beam": np.arange(query.shape[0], dtype=np.int32)}
    own = {name: given[name][:, :, before:] for name in ("key", "value")}
    if not before:
        return [given | own | beam]
    first = {name: given[name][:, :, :before] for name in ("key", "value")}
    first["query"] = np.zeros((*query.shape[:2], before, query.shape[3]), query.dtype)
    if mask is not None:
        sizes = (*(1,) * (mask.ndim - 2), before, before)
        first["attention_mask"] = np.full(sizes, mask.dtype == np.bool_, mask.dtype)
    return [given | first | beam, given | own | beam]


def _plain(causal: bool, **nodes: Any) -> Any:
    from openvino import Model

    return Model([_attention(causal, nodes)], list(nodes.values()))


def _stateful(causal: bool, **nodes: Any) -> Any:
    """Return a model that appends keys and values to its state, which is empty at first."""
    from openvino import Model, opset13

    def constant(*numbers: int) -> Any:
        return opset13.constant(np.array(numbers, np.int64))

    joined, kept = {}, []
    for name in ("key", "value"):
        new = nodes[name]
        shape, dtype = new.get_partial_shape(), new.get_element_type()
        sizes = opset13.shape_of(new, "i64") * constant(1, 1, 0, 1)
        empty = opset13.broadcast(opset13.constant(0, dtype), sizes)
        state = opset13.read_value(empty, name, dtype, shape)
        # Language models select beams of a search here. Without this gather, no kernel is used.
        past = opset13.gather(state, nodes["beam"], opset13.constant(0))
        joined[name] = opset13.concat([past, new], 2)
        kept.append(opset13.assign(joined[name], name))
    result = opset13.result(_attention(causal, nodes | joined))
    return Model([result], kept, list(nodes.values()))


def _attention(causal: bool, nodes: Natives) -> Any:
    from openvino import opset13

    inputs = [nodes.get(name) for name in ("query", "key", "value", "attention_mask", "scale")]
    return opset13.scaled_dot_product_attention(*inputs, causal=causal)


ADAPTERS = {"openvino-sdpa": "OpenVinoScaledDotProductAttention"}
