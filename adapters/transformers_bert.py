"""BERT's self- and cross-attention of Hugging Face transformers, eager and with torch's SDPA.

Easy to miss in a port: the layer's mask is not the model's. `BertModel` takes `[batch key]` of 1
and 0; the layer takes what the model makes of it, `[batch 1 query key]`. For eager, the latter is
added to the logits, and the model uses the dtype's lowest number, not -inf, so a fully masked query
attends to all keys equally, whereas -inf would give NaN. Booleans are for SDPA, where True attends;
eager accepts them too, but adds True as 1, which hides nothing. The output projection is not in the
attention but in the block after it, with the residual connection and LayerNorm. Since transformers
5, both accept `is_causal=True`: SDPA obeys it unless there is a mask, eager never does.

The adapters examine `BertAttention.self` followed by `BertAttention.output.dense`: the layer
without the rest of its output block, which is dropout, the residual connection and LayerNorm.
Projections always have biases, and heads × head size is the width.

The same attention has different names in different versions. Up to transformers 4, one class did
both self- and cross-attention, and SDPA had a separate class (4.40 has no SDPA for BERT); those
versions take the mask of a context as `encoder_attention_mask`. Only `_attention` and `_arguments`
depend on the version.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from conformance import (
    CausalFlag,
    Example,
    Layer,
    Mode,
    Parameter,
    Shape,
    Unsupported,
)
from conformance.adapter import Checkpoint, FlagEffect, since
from conformance.adapters.shapes import ask
from conformance.adapters.transformers_attention import MODES, NO_GRAD, Eager, Sdpa

_IMPORTS = (
    "from transformers import BertConfig",
    "from transformers.models.bert.modeling_bert import BertAttention",
)


class _Bert(Layer):
    """The base class of both adapters for BERT's layer."""

    documentation = "https://huggingface.co/docs/transformers/model_doc/bert"
    framework = "torch"
    packages = ("transformers",)
    dropout_modes = ("train",)
    parameters = (
        Parameter("self.query.weight", "query", "embed heads head -> (heads head) embed"),
        Parameter("self.query.bias", "query_bias", "heads head -> (heads head)"),
        Parameter("self.key.weight", "key", "embed heads head -> (heads head) embed"),
        Parameter("self.key.bias", "key_bias", "heads head -> (heads head)"),
        Parameter("self.value.weight", "value", "embed heads head -> (heads head) embed"),
        Parameter("self.value.bias", "value_bias", "heads head -> (heads head)"),
        Parameter("dense.weight", "output", "heads head embed -> embed (heads head)"),
        Parameter("dense.bias", "output_bias", "embed -> embed"),
    )
    checkpoint = Checkpoint(
        ("bert", "roberta"),
        ("encoder.layer.{layer}.attention.", "encoder.layer.{layer}.crossattention."),
        renamed={"dense.weight": "output.dense.weight", "dense.bias": "output.dense.bias"},
        beside={"output.LayerNorm.": "norms"},
    )
    implementation: ClassVar[str]
    effect_of_flag: ClassVar[FlagEffect]

    def __init__(self) -> None:
        super().__init__()
        if since("transformers", "5.0"):
            self.causal_flag = CausalFlag("is_causal", "top-left", effect=self.effect_of_flag)

    def check_shape(self, shape: Shape) -> None:
        ask(shape, "memory", "heads", "values", "biases")
        width = shape.heads * shape.head_size
        if {shape.query_width, shape.key_width, shape.output_width} != {width}:
            raise Unsupported("heads x head size must be the width of inputs and output")

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        import torch

        attention = _attention(shape, self.implementation, mode.dropout)
        layer = torch.nn.ModuleDict({"self": attention.self, "dense": attention.output.dense})
        return layer.to(getattr(torch, dtype)).train(mode["train"])

    def example_for(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Example:
        cross = "" if shape.sharing == "self" else ", is_cross_attention=True"
        context = "" if shape.sharing == "self" else ", encoder_hidden_states=key"
        dropout = ", attention_probs_dropout_prob=0.0" if mode["train"] else ""
        return Example.of_module(
            dtype,
            mode["train"],
            (
                f"config = BertConfig(hidden_size={shape.query_width}, "
                f"num_attention_heads={shape.heads}{dropout}, "
                f'attn_implementation="{self.implementation}")',
                f"block = BertAttention(config{cross})",
                'layer = torch.nn.ModuleDict({"self": block.self, "dense": block.output.dense})',
            ),
            f'layer["self"](query{context}{{masks}})',
            imports=_IMPORTS,
            output='layer["dense"]({}[0])',
            weights="{}[1]" if self.returns_weights else "",
        )

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        if mode.dropout:
            import torch

            torch.manual_seed(mode.draw)
        context = None if key is query else key
        arguments = _arguments(layer["self"], context, masks, weights=bool(self.returns_weights))
        if asks := "output_attentions" in mode.options:
            arguments["output_attentions"] = True
        found = layer["self"](query, **arguments)
        output = layer["dense"](found[0])
        return (output, found[1]) if self.returns_weights or asks else output


def _attention(shape: Shape, implementation: str, dropout: float) -> Any:
    """Return a `BertAttention` whose `attn_implementation` is `implementation`.

    Raises:
        Unsupported: if `implementation` is not "eager" and the installed transformers offers no
            choice of implementation for BERT.
    """
    from transformers import BertConfig
    from transformers.models.bert import modeling_bert

    config = BertConfig(
        hidden_size=shape.query_width,
        num_attention_heads=shape.heads,
        attention_probs_dropout_prob=dropout,
        attn_implementation=implementation,
    )
    choices = ("BERT_SELF_ATTENTION_CLASSES", "ALL_ATTENTION_FUNCTIONS")
    if implementation != "eager" and not any(hasattr(modeling_bert, name) for name in choices):
        raise Unsupported("BERT has no choice of implementations in this version of transformers")
    build = modeling_bert.BertAttention
    if "is_cross_attention" in inspect.signature(build).parameters:
        return build(config, is_cross_attention=shape.sharing != "self")
    return build(config)


def _arguments(
    attention: Any, context: Any, masks: dict[str, Any], *, weights: bool
) -> dict[str, Any]:
    """Return the arguments of a call, named as the installed version of transformers names them."""
    known = inspect.signature(inspect.unwrap(attention.forward)).parameters
    given = dict(masks)
    if context is not None:
        given["encoder_hidden_states"] = context
        if "encoder_attention_mask" in known and "attention_mask" in given:
            given["encoder_attention_mask"] = given.pop("attention_mask")
    if weights and "output_attentions" in known:
        given["output_attentions"] = True
    return given


class BertEager(Eager, _Bert):
    """The adapter for attn_implementation="eager": two matrix products and a softmax."""

    title = "transformers BERT attention (eager)"
    modes = MODES


class BertSdpa(Sdpa, _Bert):
    """The adapter for attn_implementation="sdpa": torch's SDPA, which returns no weights."""

    title = "transformers BERT attention (sdpa)"
    modes = (
        *MODES,
        Mode(
            "output-attentions",
            {"train": False, "output_attentions": True},
            every_case=False,
            about="after .eval(), with output_attentions=True, for which there is eager until "
            "transformers 4, and None for the weights since 5",
        ),
        NO_GRAD,
    )


CHECKPOINTS = {"bert": "BertEager", "roberta": "BertEager"}

ADAPTERS = {
    "bert-eager": "BertEager",
    "bert-sdpa": "BertSdpa",
}
