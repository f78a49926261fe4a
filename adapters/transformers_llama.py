"""Llama's self-attention of Hugging Face transformers, eager and with torch's SDPA.

Easy to miss in a port: the meaning of a missing mask. With SDPA, attention is then causal, unless
the layer is called with `is_causal=False` (since 4.48; before, only a mask that is True everywhere
turns this off). Without a mask, eager attends to everything and ignores the flag, so the causal
triangle has to be in the mask. (SDPA has had the flag since 4.48; eager ignored it in 4.40 already,
as any argument that it does not know.) If there is a mask, transformers 5 ignores `is_causal=True`;
before, torch refused the two together. The mask is `[batch 1 query key]` and is added to the
logits; under SDPA it may be boolean, and True attends, while eager adds True as 1. Eager computes
its softmax in float32 for all dtypes, which is more precise than bfloat16 requires but less precise
than float64.

Key/value heads are repeated one by one (`repeat_kv`), so query head h uses key/value head
h // group, as in the definition. There are no biases unless `attention_bias=True`.

The adapters examine `LlamaAttention` without rotary embeddings: the layer is given cos = 1 and
sin = 0, which leaves queries and keys unchanged, bit for bit. In transformers 4.40, these are not
arguments but computed by a submodule, `rotary_emb`, which is replaced by one that returns the same
1 and 0. No cache is passed, so queries and keys come from the same tokens. Since transformers 5,
`LlamaConfig` rejects a width that is not a multiple of the number of heads and an odd `head_dim`,
which rotations cannot split into halves, in 5.24 only above 4. The layer itself has neither
restriction, so width and head size are set after the configuration is checked.

Only `_attention` and `_call` depend on the installed version of transformers.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, ClassVar

from conformance import (
    CausalFlag,
    Example,
    Layer,
    Mode,
    Parameter,
    RotaryTables,
    Shape,
    Unsupported,
)
from conformance.adapter import Checkpoint, FlagEffect, keywords, since
from conformance.adapters.shapes import ask
from conformance.adapters.transformers_attention import MODES, NO_GRAD, Eager, Sdpa

_IMPORTS = (
    "from transformers import LlamaConfig",
    "from transformers.models.llama.modeling_llama import LlamaAttention",
)


class _Llama(Layer):
    """The base class of both adapters for Llama's layer."""

    documentation = "https://huggingface.co/docs/transformers/model_doc/llama"
    framework = "torch"
    packages = ("transformers",)
    dropout_modes = ("train",)
    parameters = (
        Parameter("q_proj.weight", "query", "embed heads head -> (heads head) embed"),
        Parameter("q_proj.bias", "query_bias", "heads head -> (heads head)"),
        Parameter("k_proj.weight", "key", "embed kv_heads head -> (kv_heads head) embed"),
        Parameter("k_proj.bias", "key_bias", "kv_heads head -> (kv_heads head)"),
        Parameter("v_proj.weight", "value", "embed kv_heads head -> (kv_heads head) embed"),
        Parameter("v_proj.bias", "value_bias", "kv_heads head -> (kv_heads head)"),
        Parameter("o_proj.weight", "output", "heads head embed -> embed (heads head)"),
        Parameter("o_proj.bias", "output_bias", "embed -> embed"),
    )
    rotary = RotaryTables()
    checkpoint = Checkpoint(
        ("llama",), ("layers.{layer}.self_attn.",), beside={"rotary_emb.inv_freq": "buffers"}
    )
    implementation: ClassVar[str]
    effect_of_flag: ClassVar[FlagEffect]

    def __init__(self) -> None:
        super().__init__()
        eager = self.effect_of_flag == "none"
        if eager or since("transformers", "4.48"):
            ignored = eager or since("transformers", "5.0")
            self.causal_flag = CausalFlag(
                "is_causal",
                alignment="top-left",
                effect=self.effect_of_flag if ignored else "always",
                alone=not ignored,
            )

    def check_shape(self, shape: Shape) -> None:
        ask(shape, "self", "values", "output")

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        import torch

        layer = _attention(shape, self.implementation, mode.dropout)
        return layer.to(getattr(torch, dtype)).train(mode["train"])

    def example_for(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Example:
        sdpa = self.implementation == "sdpa"
        options = keywords(
            {"num_key_value_heads": shape.heads, "attention_bias": False},
            num_key_value_heads=shape.kv_heads,
            attention_bias=shape.bias,
            attn_implementation=self.implementation,
        )
        # A configuration may refuse an odd head size that it computes from the width.
        wide = shape.query_width == shape.heads * shape.head_size and shape.head_size % 2 == 0
        width = shape.query_width if wide else 2 * shape.heads
        sizes = f"{shape.query_width}, {shape.head_size}"
        resized = [] if wide else [f"config.hidden_size, config.head_dim = {sizes}"]
        example = Example.of_module(
            dtype,
            mode["train"],
            (
                f"config = LlamaConfig(hidden_size={width}, "
                f"num_attention_heads={shape.heads}{options})",
                *resized,
                f"one = torch.ones(1, 1, {shape.head_size}, dtype=torch.{dtype})",
                "rotary = one, torch.zeros_like(one)  # no rotation",
                "layer = LlamaAttention(config, layer_idx=0)",
            ),
            "layer(query, rotary{masks})",
            imports=_IMPORTS,
            output="{}[0]",
            weights="{}[1]" if self.returns_weights else "",
        )
        # Without a mask, it would be causal.
        return replace(example, defaults={"is_causal": "False"} if sdpa else {})

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        if mode.dropout:
            import torch

            torch.manual_seed(mode.draw)
        mask, flag = masks.get("attention_mask"), masks.get("is_causal")
        is_triangle = mask is None if flag else _is_triangle(mask)
        asked = {name: True for name in mode.options if name == "output_attentions"}
        if mode.options.get("triangle left out") and is_triangle:
            found = _call(layer, query, None)
        elif mask is None and flag is None and self.implementation == "sdpa":
            found = _call(layer, query, None, is_causal=False, **asked)
        else:
            found = _call(layer, query, mask, is_causal=flag, **asked)
        return found if self.returns_weights or asked else found[0]


def _attention(shape: Shape, implementation: str, dropout: float) -> Any:
    """Return a `LlamaAttention` whose `attn_implementation` is `implementation`.

    Raises:
        Unsupported: if this version does not support the head size.
    """
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama

    own_head_size = hasattr(LlamaConfig(), "head_dim")
    if not own_head_size and shape.heads * shape.head_size != shape.query_width:
        raise Unsupported("heads x head size must be the width in this version of transformers")
    config = LlamaConfig(
        hidden_size=2 * shape.heads,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        attention_bias=shape.bias,
        attention_dropout=dropout,
        attn_implementation=implementation,
    )
    config.hidden_size, config.head_dim = shape.query_width, shape.head_size
    classes = getattr(modeling_llama, "LLAMA_ATTENTION_CLASSES", None)
    build = modeling_llama.LlamaAttention if classes is None else classes[implementation]
    layer = build(config, layer_idx=0)
    if not _takes(layer, "position_embeddings"):
        del layer.rotary_emb
        layer.rotary_emb = _no_rotation
    return layer


def _call(
    layer: Any, query: Any, mask: Any, *, is_causal: bool | None = None, **asked: bool
) -> tuple[Any, Any]:
    """Call the layer as the installed version requires; return (output, weights or None).

    If `is_causal` is None, the flag is not passed. If it is False and the version has no such flag,
    a mask that is True everywhere replaces it; `mask` must then be None. `asked` holds further
    arguments.
    """
    from transformers.models.llama import modeling_llama

    given: dict[str, Any] = {"attention_mask": mask}
    has_flag = hasattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS")
    if is_causal or (has_flag and is_causal is not None):
        given["is_causal"] = is_causal
    elif is_causal is False:
        given["attention_mask"] = query.new_ones(1, 1, query.shape[1], query.shape[1]).bool()
    if _takes(layer, "position_embeddings"):
        given["position_embeddings"] = _no_rotation(query.new_empty(1, layer.head_dim))
    if _takes(layer, "output_attentions"):
        given["output_attentions"] = layer.config._attn_implementation == "eager"
    given |= asked
    output, weights, *_ = layer(query, **given)
    return output, weights


def _takes(layer: Any, name: str) -> bool:
    return name in inspect.signature(inspect.unwrap(layer.forward)).parameters


def _no_rotation(values: Any, *_: Any) -> tuple[Any, Any]:
    """Return cosine 1 and sine 0, with which rotary embeddings leave queries and keys unchanged."""
    cosine = values.new_ones(1, 1, values.shape[-1])
    return cosine, cosine - cosine


def _is_triangle(mask: Any) -> bool:
    """Return whether a mask is exactly the causal mask and needs no gradient; False for None."""
    import torch

    if mask is None or mask.requires_grad:
        return False
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return False  # Whole numbers cannot block.
    allowed = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    if mask.dtype != torch.bool:
        allowed = torch.zeros_like(mask).masked_fill(~allowed, -torch.inf)
    return bool((mask == allowed).all())


class LlamaEager(Eager, _Llama):
    """The adapter for attn_implementation="eager": matrix products and a softmax in float32."""

    title = "transformers Llama attention (eager)"
    modes = MODES


class LlamaSdpa(Sdpa, _Llama):
    """The adapter for attn_implementation="sdpa": torch's SDPA, which returns no weights."""

    title = "transformers Llama attention (sdpa)"
    modes = (
        *MODES,
        Mode(
            "triangle-left-out",
            {"train": False, "triangle left out": True},
            every_case=False,
            about="as the model calls it: a mask that is the causal triangle and nothing else is "
            "left out, because this layer is causal without a mask",
        ),
        Mode(
            "output-attentions",
            {"train": False, "output_attentions": True},
            every_case=False,
            about="after .eval(), with output_attentions=True, for which there is eager until "
            "transformers 4.52, and None for the weights since 4.53",
        ),
        NO_GRAD,
    )


ADAPTERS = {
    "llama-eager": "LlamaEager",
    "llama-sdpa": "LlamaSdpa",
}
