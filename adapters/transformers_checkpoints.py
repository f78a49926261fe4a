"""More attentions of Hugging Face transformers, whose checkpoints can be converted.

These layers are not in the published table. `mha-conformance convert` reads the files of their
models, by the names of `checkpoint`, and runs them beside what it made of the weights.

Easy to miss in a port:

- GPT-2: `c_attn` holds queries, keys and values, one after another on the last axis, because its
  projections are `Conv1D`, whose weights are transposed: `[in out]`. Two options change the scale.
- T5: logits are not scaled, so the scale is 1, and there are no biases. A bias by the distance of
  the tokens is added to the logits; only the first layer of a stack holds its parameters.
- Phi-3: `qkv_proj` holds all queries, then the keys and values, of which there are fewer.
- Qwen 2: queries, keys and values have biases, the output has none.
- ViT: with `qkv_bias=False`, only the output has a bias. Files have other names than the modules of
  transformers 5.
- Gemma: factors of a norm are 1 + the parameter, also those of the query/key norm of Gemma 3, whose
  rotary embeddings have one base in layers with a window and another in those without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance import Fixed, HeadNorm, Layer, MaskArgument, Mode, Parameter, Shape, Unsupported
from conformance.adapter import Checkpoint, Static
from conformance.adapters.shapes import ask
from conformance.adapters.transformers_models import (
    Gemma2Eager,
    LlamaModelEager,
    MistralEager,
    checkpoint_of,
    scale_of_gemma,
)

_ON_THE_LEFT = ("embed heads head -> (heads head) embed", "heads head -> (heads head)")
_OUTPUT = ("heads head embed -> embed (heads head)", "embed -> embed")


def _apart(**names: str) -> tuple[Parameter, ...]:
    """Return the rows of four `torch.nn.Linear`, given their native names by canonical weight."""
    rows = []
    for name, native in names.items():
        weight, bias = _OUTPUT if name == "output" else _ON_THE_LEFT
        rows.append(Parameter(f"{native}.weight", name, weight))
        rows.append(Parameter(f"{native}.bias", f"{name}_bias", bias))
    return tuple(rows)


class Qwen2(MistralEager):
    """The adapter for Qwen2Model with eager attention."""

    title = "transformers Qwen 2 (eager)"
    config = "Qwen2Config"
    checkpoint = checkpoint_of("qwen2", absent=("output_bias",))

    def finish(self, attention: Any, shape: Shape, settings: Mapping[str, Static]) -> None:
        import torch

        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = getattr(attention, name).weight
            sizes = weight.shape[::-1]
            layer = torch.nn.Linear(*sizes, bias=shape.bias, dtype=weight.dtype)
            setattr(attention, name, layer)


class Phi3(MistralEager):
    """The adapter for Phi3Model with eager attention."""

    title = "transformers Phi-3 (eager)"
    config = "Phi3Config"
    checkpoint = checkpoint_of("phi3")

    def check_shape(self, shape: Shape) -> None:
        super().check_shape(shape)
        if shape.bias:
            raise Unsupported("no biases")

    def parameters_for(self, shape: Shape) -> tuple[Parameter, ...]:
        return (
            Parameter(
                f"{self.attention}.qkv_proj.weight",
                "query key value",
                "embed heads head -> (heads head) embed",
                stack=0,
            ),
            Parameter(f"{self.attention}.o_proj.weight", "output", _OUTPUT[0]),
        )


class Gemma(LlamaModelEager):
    """The adapter for GemmaModel with eager attention."""

    title = "transformers Gemma (eager)"
    config = "GemmaConfig"
    checkpoint = checkpoint_of("gemma")


class Gemma3(Gemma2Eager):
    """The adapter for Gemma3TextModel with eager attention, in a layer without a window."""

    title = "transformers Gemma 3 (eager)"
    config = "Gemma3TextConfig"
    checkpoint = checkpoint_of("gemma3_text", scale=scale_of_gemma)
    always = ("query/key norm",)
    features = (
        HeadNorm(
            "layers.0.self_attn.q_norm.weight",
            "layers.0.self_attn.k_norm.weight",
            epsilon="rms_norm_eps",
            parameters=True,
            offset=1.0,
        ),
        *Gemma2Eager.features,
    )

    def options(
        self, shape: Shape, scale: float | None, settings: Mapping[str, Static]
    ) -> dict[str, Any]:
        turns = {"rope_type": "default", "rope_theta": settings.get("rope_theta", 10000.0)}
        return {
            **super().options(shape, scale, settings),
            "rms_norm_eps": settings.get("rms_norm_eps", 1e-6),
            "rope_parameters": {"full_attention": turns, "sliding_attention": turns},
        }


class _Alone(Layer):
    """The base class of adapters for an attention without the rest of its model."""

    framework = "torch"
    packages = ("transformers",)
    modes = (Mode("eval", about="after .eval()"),)

    def check_shape(self, shape: Shape) -> None:
        ask(shape, "heads", "values")
        if {shape.key_width, shape.value_width, shape.output_width} != {shape.query_width}:
            raise Unsupported("inputs and output have one width")


def _scale_of_gpt2(config: Mapping[str, Any], layer: int) -> float:
    size = config["n_embd"] // config["n_head"]
    scale = float(size**-0.5) if config.get("scale_attn_weights", True) else 1.0
    return scale / (layer + 1 if config.get("scale_attn_by_inverse_layer_idx") else 1)


class Gpt2(_Alone):
    """The adapter for GPT2Attention with eager attention."""

    title = "transformers GPT-2 (eager)"
    documentation = "https://huggingface.co/docs/transformers/model_doc/gpt2"
    custom_scale = True
    mask_arguments = (
        MaskArgument("attention_mask", "batch heads query key", number="added", broadcasts=True),
    )
    parameters = (
        Parameter(
            "c_attn.weight", "query key value", "embed heads head -> embed (heads head)", stack=1
        ),
        Parameter(
            "c_attn.bias",
            "query_bias key_bias value_bias",
            "heads head -> (heads head)",
            stack=0,
        ),
        Parameter("c_proj.weight", "output", "heads head embed -> (heads head) embed"),
        Parameter("c_proj.bias", "output_bias", "embed -> embed"),
    )

    checkpoint = Checkpoint(
        ("gpt2",),
        ("h.{layer}.attn.",),
        beside={"bias": "buffers", "masked_bias": "buffers"},
        scale=_scale_of_gpt2,
    )

    def check_shape(self, shape: Shape) -> None:
        super().check_shape(shape)
        ask(shape, "self", "biases", "width")

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        import torch
        from transformers import GPT2Config
        from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

        config = GPT2Config(
            n_embd=shape.query_width, n_head=shape.heads, attn_implementation="eager"
        )
        layer = GPT2Attention(config, layer_idx=0)
        if hasattr(layer, "bias"):
            raise Unsupported("in this version of transformers, the attention is always causal")
        if scale is not None:
            layer.scaling = scale
        return layer.to(getattr(torch, dtype)).eval()

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        return layer(query, **masks)[0]


class Vit(_Alone):
    """The adapter for ViTAttention with eager attention."""

    title = "transformers ViT (eager)"
    documentation = "https://huggingface.co/docs/transformers/model_doc/vit"
    parameters = _apart(
        query="attention.query",
        key="attention.key",
        value="attention.value",
        output="output.dense",
    )
    checkpoint = Checkpoint(
        ("vit",),
        ("encoder.layer.{layer}.attention.",),
        absent=("query_bias", "key_bias", "value_bias"),
    )

    def check_shape(self, shape: Shape) -> None:
        super().check_shape(shape)
        ask(shape, "self", "width")

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        import torch
        from transformers import ViTConfig
        from transformers.models.vit.modeling_vit import ViTAttention

        config = ViTConfig(
            hidden_size=shape.query_width,
            num_attention_heads=shape.heads,
            qkv_bias=shape.bias,
            attn_implementation="eager",
        )
        attention = ViTAttention(config)
        if not hasattr(attention, "q_proj"):
            raise Unsupported("needs transformers 5, whose ViTAttention holds its projections")
        if not shape.bias:
            sizes = attention.o_proj.weight.shape[::-1]
            attention.o_proj = torch.nn.Linear(*sizes, bias=False)
        # The projections by their names in files, in front of the attention that uses them.
        named = {
            "attention": torch.nn.ModuleDict(
                {"query": attention.q_proj, "key": attention.k_proj, "value": attention.v_proj}
            ),
            "output": torch.nn.ModuleDict({"dense": attention.o_proj}),
            "whole": attention,
        }
        return torch.nn.ModuleDict(named).to(getattr(torch, dtype)).eval()

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        return layer["whole"](query)[0]


def _scale_of_t5(config: Mapping[str, Any], layer: int) -> float:
    return 1.0


class T5(_Alone):
    """The adapter for T5Attention with eager attention, without the bias of its positions."""

    title = "transformers T5 (eager)"
    documentation = "https://huggingface.co/docs/transformers/model_doc/t5"
    fixed = Fixed(scale=1.0)
    parameters = _apart(query="q", key="k", value="v", output="o")[::2]

    checkpoint = Checkpoint(
        ("t5",),
        (
            "encoder.block.{layer}.layer.0.SelfAttention.",
            "decoder.block.{layer}.layer.0.SelfAttention.",
            "decoder.block.{layer}.layer.1.EncDecAttention.",
        ),
        added="SelfAttention.relative_attention_bias.weight",
        # The first models of T5 have one for the encoder's tokens, too, and do not use it.
        beside={"relative_attention_bias.": "unused"},
        scale=_scale_of_t5,
    )

    def check_shape(self, shape: Shape) -> None:
        super().check_shape(shape)
        ask(shape, "memory")
        if shape.bias:
            raise Unsupported("no biases")

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        import torch
        from transformers import T5Config
        from transformers.models.t5.modeling_t5 import T5Attention

        if scale != 1.0:
            raise Unsupported("the scale is 1")
        config = T5Config(
            d_model=shape.query_width,
            d_kv=shape.head_size,
            num_heads=shape.heads,
            attn_implementation="eager",
        )
        return T5Attention(config).to(getattr(torch, dtype)).eval()

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        return layer(query, key_value_states=None if key is query else key)[0]


CHECKPOINTS = {
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "gemma": "Gemma",
    "gemma3_text": "Gemma3",
    "gpt2": "Gpt2",
    "vit": "Vit",
    "t5": "T5",
}
