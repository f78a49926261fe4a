"""mlx.nn.MultiHeadAttention, and mlx.core.fast.scaled_dot_product_attention, which it calls.

Easy to miss in a port: there are no biases unless `bias=True`, unlike nearly everywhere else. By
default, `value_input_dims` is the width of the key, and `value_dims` is that of all heads together.
A mask may be boolean, and then True attends. It may also consist of numbers, which are added and
must have a dtype that promotes to the output's: a float32 mask with float16 inputs is an error. A
query that is fully masked by booleans attends to all keys equally, and one that is fully masked by
−∞ gets NaN, so the adapter does not declare what a fully masked query gets. The layer has no causal
flag. The function takes the string "causal" in place of a mask, aligned bottom-right, so causality
and a mask cannot be combined. It does not apply the factor 1/√d by itself, so `scale` has to be
passed. Attention weights are not returned.

`sinks` holds one base-e logit for each query head, neither scaled nor masked. Its dtype must
promote to the output's, so float32 sinks with bfloat16 inputs are an error. A fully masked query
with a sink gets zeros. Rotary embeddings are a separate function, which the adapter calls before
the attention: `traditional=True` pairs neighbours, (2t, 2t + 1), and False pairs halves. `offset`
is the position of the first token, so for queries with a cache it must be the length of the cache.

On CPUs, the function runs operation by operation; fused kernels exist for GPUs.
"""

from __future__ import annotations

from typing import Any

from conformance import (
    CausalFlag,
    Example,
    Function,
    Layer,
    MaskArgument,
    Mode,
    Parameter,
    RotaryBase,
    Shape,
    Sinks,
    Unsupported,
)
from conformance.adapter import keywords
from conformance.adapters.shapes import ask

_DOCS = "https://ml-explore.github.io/mlx/build/html/python"
_MASK = MaskArgument(
    "mask", "batch heads query key", true="attends", number="added", broadcasts=True
)
_MODES = (
    Mode("default", about="operation by operation"),
    Mode(
        "compiled",
        every_case=False,
        dtypes=("float32",),
        optimised=True,
        about="through mlx.core.compile, which needs a C++ compiler on CPUs",
    ),
)


class MlxMultiHeadAttention(Layer):
    """The adapter for mlx.nn.MultiHeadAttention, with its parameters as arguments."""

    title = "mlx.nn.MultiHeadAttention"
    documentation = f"{_DOCS}/nn/_autosummary/mlx.nn.MultiHeadAttention.html"
    framework = "mlx"
    mask_arguments = (_MASK,)
    modes = _MODES
    parameters = (
        Parameter("query_proj.weight", "query", "embed heads head -> (heads head) embed"),
        Parameter("query_proj.bias", "query_bias", "heads head -> (heads head)"),
        Parameter("key_proj.weight", "key", "embed heads head -> (heads head) embed"),
        Parameter("key_proj.bias", "key_bias", "heads head -> (heads head)"),
        Parameter("value_proj.weight", "value", "embed heads head -> (heads head) embed"),
        Parameter("value_proj.bias", "value_bias", "heads head -> (heads head)"),
        Parameter("out_proj.weight", "output", "heads head embed -> embed (heads head)"),
        Parameter("out_proj.bias", "output_bias", "embed -> embed"),
    )

    def check_shape(self, shape: Shape) -> None:
        ask(shape, "heads")

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        from mlx import nn

        return nn.MultiHeadAttention(
            shape.heads * shape.head_size,
            shape.heads,
            query_input_dims=shape.query_width,
            key_input_dims=shape.key_width,
            value_input_dims=shape.value_width,
            value_dims=shape.heads * shape.value_head_size,
            value_output_dims=shape.output_width,
            bias=shape.bias,
        )

    def example_for(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Example:
        width = shape.heads * shape.head_size
        options = keywords(
            {
                "query_input_dims": width,
                "key_input_dims": width,
                "value_input_dims": shape.key_width,
                "value_dims": width,
                "value_output_dims": width,
                "bias": False,
            },
            query_input_dims=shape.query_width,
            key_input_dims=shape.key_width,
            value_input_dims=shape.value_width,
            value_dims=shape.heads * shape.value_head_size,
            value_output_dims=shape.output_width,
            bias=shape.bias,
        )
        return Example(
            imports="from mlx import nn",
            build=f"layer = nn.MultiHeadAttention({width}, {shape.heads}{options})",
            load=(
                "layer.load_weights([(name, mx.array(a, "
                f"mx.{dtype})) for name, a in native.items()])",
            ),
            call="mx.compile(layer)(query, key, value{masks})"
            if mode.optimised
            else "layer(query, key, value{masks})",
        )

    def bind(self, layer: Any, parameters: dict[str, Any]) -> Any:
        from mlx.utils import tree_unflatten

        return layer.update(tree_unflatten(list(parameters.items())))

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        return layer(query, key, value, **masks)


class MlxScaledDotProductAttention(Function):
    """The adapter for mlx.core.fast.scaled_dot_product_attention, a function of projected heads."""

    title = "mlx.core.fast.scaled_dot_product_attention"
    documentation = f"{_DOCS}/_autosummary/mlx.core.fast.scaled_dot_product_attention.html"
    framework = "mlx"
    grouped = True
    custom_scale = True
    mask_arguments = (_MASK,)
    # The adapter passes this flag as mask="causal", so there can be no other mask.
    causal_flag = CausalFlag("causal", alignment="bottom-right", alone=True)
    features = (
        Sinks("sinks"),
        RotaryBase("base", size="dims", flag="traditional", alignment="bottom-right"),
    )
    modes = _MODES
    example = Example(
        imports="import mlx.core as mx",
        build="""\
def attention(query, key, value, mask=None, causal=False):
    heads = [mx.unflatten(x, -1, ({heads}, -1)).swapaxes(1, 2) for x in (query, key, value)]
    context = mx.fast.scaled_dot_product_attention(
        *heads, scale={head_size} ** -0.5, mask="causal" if causal else mask
    )
    return context.swapaxes(1, 2).flatten(-2)""",
        call="attention(query, key, value{masks})",
    )

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        import mlx.core as mx

        scale = options.get("scale", query.shape[-1] ** -0.5)
        if "causal" in masks:
            if "mask" in masks:
                raise Unsupported('mask is "causal" or an array, not both')
            masks = {name: given for name, given in masks.items() if name != "causal"}
            masks["mask"] = "causal"
        if "base" in masks:
            names = ("dims", "base", "traditional")
            turn = {"scale": 1.0, **{name: masks[name] for name in names}}
            masks = {name: given for name, given in masks.items() if name not in names}
            query = mx.fast.rope(query, offset=key.shape[2] - query.shape[2], **turn)
            key = mx.fast.rope(key, offset=0, **turn)
        return mx.fast.scaled_dot_product_attention(query, key, value, scale=scale, **masks)


ADAPTERS = {
    "mlx-mha": "MlxMultiHeadAttention",
    "mlx-sdpa": "MlxScaledDotProductAttention",
}
