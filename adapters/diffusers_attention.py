"""The Attention layer of diffusers with three processors: SDPA, matrix products, and slices.

Easy to miss in a port: `attention_mask` is added to the logits, and has three axes: `[batch query
key]`, which is repeated for each head, or `[(batch heads) query key]`. `prepare_attention_mask`
distinguishes them by whether the first axis is shorter than batch × heads, so a batch axis of 1 is
not broadcast. Models derive this mask from a mask `[batch key]`, and put -10000, not -inf, where
the latter is 0. The meaning of a boolean depends on the processor: with AttnProcessor2_0, which
calls torch's SDPA, True attends; AttnProcessor rejects booleans. Dropout applies to the output, not
to the weights. AttnProcessor2_0 ignores `scale_qk=False`.

The layer can do more than attend: group norm, spatial norm, norms of queries and keys, a residual
connection, `rescale_output_factor`. All of these are off by default, and stay off here. `bias`
stands for the biases of query, key and value, and is False by default; `out_bias` is True.

`kv_heads` is an argument of the layer, but only the processors of some models support it. The three
that are examined here raise an error if there are fewer key/value heads than query heads.
"""

from __future__ import annotations

from typing import Any, ClassVar

from conformance import Example, Layer, MaskArgument, Mode, Parameter, Shape, Unsupported
from conformance.adapters.shapes import ask


class DiffusersAttention(Layer):
    """The adapter for diffusers.models.attention_processor.Attention."""

    title = "diffusers.models.attention_processor.Attention"
    documentation = "https://huggingface.co/docs/diffusers/api/attnprocessor"
    framework = "torch"
    packages = ("diffusers",)
    fully_masked_row: ClassVar = {
        "sdpa": "output bias",
        "no-grad": "output bias",
        "plain": "nan",
        "sliced": "nan",
    }
    parameters = (
        Parameter("to_q.weight", "query", "embed heads head -> (heads head) embed"),
        Parameter("to_q.bias", "query_bias", "heads head -> (heads head)"),
        Parameter("to_k.weight", "key", "embed kv_heads head -> (kv_heads head) embed"),
        Parameter("to_k.bias", "key_bias", "kv_heads head -> (kv_heads head)"),
        Parameter("to_v.weight", "value", "embed kv_heads head -> (kv_heads head) embed"),
        Parameter("to_v.bias", "value_bias", "kv_heads head -> (kv_heads head)"),
        Parameter("to_out.0.weight", "output", "heads head embed -> embed (heads head)"),
        Parameter("to_out.0.bias", "output_bias", "embed -> embed"),
    )
    mask_arguments = (
        MaskArgument(
            "attention_mask", ("batch query key", "(batch heads) query key"), number="added"
        ),
    )
    modes = (
        Mode("sdpa", {"processor": "AttnProcessor2_0()"}, about="under AttnProcessor2_0, as built"),
        Mode(
            "no-grad",
            {"processor": "AttnProcessor2_0()"},
            gradients=False,
            about="under AttnProcessor2_0 and torch.no_grad(): torch may choose another kernel",
        ),
        Mode("plain", {"processor": "AttnProcessor()"}, about="under AttnProcessor"),
        Mode(
            "sliced",
            {"processor": "SlicedAttnProcessor(2)"},
            every_case=False,
            about="under SlicedAttnProcessor(2), as enable_attention_slicing() has it",
        ),
    )

    def check_shape(self, shape: Shape) -> None:
        ask(shape, "memory", "values")
        if shape.output_width not in (shape.query_width, shape.heads * shape.head_size):
            raise Unsupported("the output is as wide as the query, or as heads x head size")

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        import torch
        from diffusers.models import attention_processor

        name, _, given = mode["processor"].rstrip(")").partition("(")
        processor = getattr(attention_processor, name)(*map(int, given.split()))
        layer = attention_processor.Attention(**_sizes(shape), processor=processor)
        return layer.to(getattr(torch, dtype)).eval()

    def example_for(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Example:
        sizes = ", ".join(f"{name}={size}" for name, size in _sizes(shape).items())
        context = "" if shape.sharing == "self" else ", encoder_hidden_states=key"
        processor = f"processor=attention_processor.{mode['processor']}"
        return Example.of_module(
            dtype,
            False,
            f"layer = attention_processor.Attention({sizes}, {processor})",
            f"layer(query{context}{{masks}})",
            imports="from diffusers.models import attention_processor",
        )

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        return layer(query, encoder_hidden_states=None if key is query else key, **masks)


def _sizes(shape: Shape) -> dict[str, Any]:
    """Return the constructor's arguments.

    `cross_attention_dim` is left out for self-attention, `kv_heads` if it is equal to `heads`, and
    `out_dim` if it is equal to `query_dim`.
    """
    sizes = {
        "query_dim": shape.query_width,
        "cross_attention_dim": shape.key_width,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "dim_head": shape.head_size,
        "bias": shape.bias,
        "out_bias": shape.bias,
        "out_dim": shape.output_width,
    }
    if shape.sharing == "self":
        del sizes["cross_attention_dim"]
    if shape.kv_heads == shape.heads:
        del sizes["kv_heads"]
    if shape.output_width == shape.query_width:
        del sizes["out_dim"]
    return sizes


ADAPTERS = {"diffusers": "DiffusersAttention"}
