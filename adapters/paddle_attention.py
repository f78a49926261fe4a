"""paddle.nn.MultiHeadAttention, and paddle.nn.functional.scaled_dot_product_attention.

Easy to miss in a port: a Linear stores its weight as `[in out]`, the transpose of torch's. True in
a mask attends, unlike in torch's layer. The meaning of a number depends on its type: floats are
added to the logits, while integers are 1 for attend and 0 for block. Where booleans block, the
layer adds -10⁹, so that a fully masked query attends to all keys equally (in float64, as if
unmasked); a query that -∞ blocks fully gets NaN. Attention weights are returned if the layer was
built with `need_weights=True`, and include dropout.

The layer does not use the function. The function has the layout `[batch length heads head]`,
supports fewer key/value heads without an option, adds -∞ for False, aligns its causal flag
top-left, and ignores a mask that is passed together with the flag. On CPUs the flag adds only -10⁴.

bfloat16 and float16 are not run on CPUs, where Paddle has no matrix product for them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from conformance import (
    CausalFlag,
    Example,
    Function,
    Layer,
    MaskArgument,
    Mode,
    Parameter,
    Shape,
)
from conformance.adapter import keywords
from conformance.adapters.shapes import ask

_DOCS = "https://www.paddlepaddle.org.cn/documentation/docs/en/api/paddle/nn"
_MASK = MaskArgument(
    "attn_mask", "batch heads query key", true="attends", number="added", broadcasts=True
)


class PaddleMultiHeadAttention(Layer):
    """The adapter for paddle.nn.MultiHeadAttention, in training and in evaluation."""

    title = "paddle.nn.MultiHeadAttention"
    documentation = f"{_DOCS}/MultiHeadAttention_en.html"
    framework = "paddle"
    returns_weights = "per head"
    dropout_modes = ("train",)
    mask_arguments = (dataclasses.replace(_MASK, whole="attends, 0 or 1 only"),)
    parameters = (
        Parameter("q_proj.weight", "query", "embed heads head -> embed (heads head)"),
        Parameter("q_proj.bias", "query_bias", "heads head -> (heads head)"),
        Parameter("k_proj.weight", "key", "embed heads head -> embed (heads head)"),
        Parameter("k_proj.bias", "key_bias", "heads head -> (heads head)"),
        Parameter("v_proj.weight", "value", "embed heads head -> embed (heads head)"),
        Parameter("v_proj.bias", "value_bias", "heads head -> (heads head)"),
        Parameter("out_proj.weight", "output", "heads head embed -> (heads head) embed"),
        Parameter("out_proj.bias", "output_bias", "embed -> embed"),
    )
    modes = (
        Mode(
            "train",
            {"train": True, "need_weights": True},
            about="built with need_weights=True, in training",
        ),
        Mode("eval", {"train": False, "need_weights": True}, about="the same after .eval()"),
        Mode(
            "eval-no-weights",
            {"train": False, "need_weights": False},
            weights=False,
            every_case=False,
            about="built without need_weights, after .eval()",
        ),
    )

    def check_shape(self, shape: Shape) -> None:
        ask(shape, "heads", "values", "query", "output")

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        import paddle

        layer = paddle.nn.MultiHeadAttention(
            shape.query_width,
            shape.heads,
            dropout=mode.dropout,
            kdim=shape.key_width,
            vdim=shape.value_width,
            need_weights=mode["need_weights"],
            bias_attr=None if shape.bias else False,
        )
        return _switched(layer.to(dtype=dtype), mode)

    def example_for(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Example:
        weights = mode["need_weights"]
        options = keywords(
            {"kdim": shape.query_width, "vdim": shape.query_width, "need_weights": False},
            kdim=shape.key_width,
            vdim=shape.value_width,
            need_weights=weights,
        )
        options += "" if shape.bias else ", bias_attr=False"
        return Example(
            imports="import paddle",
            build=(
                f"layer = paddle.nn.MultiHeadAttention({shape.query_width}, {shape.heads}{options})"
                f'.to(dtype="{dtype}")',
                f"layer.{'train' if mode['train'] else 'eval'}()",
            ),
            load=(
                "for name, p in layer.named_parameters(): "
                f'p.set_value(native[name].astype("{dtype}"))',
            ),
            call="layer(query, key, value{masks})",
            output="{}[0]" if weights else "{}",
            weights="{}[1]" if weights else "",
            parameter='dict(layer.named_parameters())["{name}"]',
        )

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        if mode.dropout:
            import paddle

            paddle.seed(mode.draw)
        return layer(query, key, value, **masks)


class PaddleScaledDotProductAttention(Function):
    """The adapter for paddle.nn.functional.scaled_dot_product_attention, on projected heads."""

    title = "paddle.nn.functional.scaled_dot_product_attention"
    documentation = f"{_DOCS}/functional/scaled_dot_product_attention_en.html"
    framework = "paddle"
    layout = "batch length heads head"
    grouped = True
    custom_scale = True
    fully_masked_row = "nan"
    mask_arguments = (_MASK,)
    causal_flag = CausalFlag("is_causal", alignment="top-left", effect="instead of masks")
    example = Example(
        imports="import paddle",
        build="""\
def attention(query, key, value, **masks):
    heads = [x.reshape([0, 0, {heads}, {head_size}]) for x in (query, key, value)]
    context = paddle.nn.functional.scaled_dot_product_attention(*heads, **masks)
    return context.flatten(2)""",
        call="attention(query, key, value{masks})",
    )

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        import paddle

        return paddle.nn.functional.scaled_dot_product_attention(
            query, key, value, **masks, **options
        )


def _switched(layer: Any, mode: Mode) -> Any:
    """Switch a layer to training or evaluation, and return it; Paddle's methods return None."""
    layer.train() if mode["train"] else layer.eval()
    return layer


ADAPTERS = {
    "paddle-mha": "PaddleMultiHeadAttention",
    "paddle-sdpa": "PaddleScaledDotProductAttention",
}
