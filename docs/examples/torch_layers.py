"""Layers as models have them, and adapters that declare what is fixed in each.

    mha-conformance run docs/examples/torch_layers.py:GPT2Like

GPT-2 is always causal and has one fused projection, a ViT has one input and a bias at the output
only, BERT has padding, T5 no scale and a bias that its model computes, a Perceiver reads from a
memory of another width, and Swin adds a bias within windows, which are entries of the batch.
"""

from typing import ClassVar

import torch
from torch import nn

from conformance import Fixed, Layer, MaskArgument, Parameter

SPLIT = "embed heads head -> (heads head) embed"
JOINED = "heads head embed -> embed (heads head)"


class Attention(nn.Module):
    """The users' code, of which each layer below is a variant. It knows nothing of the suite."""

    def __init__(self, width, heads, head, dtype, *, memory=0, fused=False, bias="qkvo", **options):
        super().__init__()
        self.heads, self.head, self.options = heads, head, options
        for name in "qkv":
            source = (memory or width) if name in "kv" else width
            linear = nn.Linear(source, heads * head, bias=name in bias, dtype=dtype)
            setattr(self, name, linear)
        if fused:
            # As in transformers' Conv1D, the weight is [inputs outputs].
            self.c_attn = nn.Parameter(torch.empty(width, 3 * heads * head, dtype=dtype))
            self.c_bias = nn.Parameter(torch.empty(3 * heads * head, dtype=dtype))
            del self.q, self.k, self.v
        self.o = nn.Linear(heads * head, options.get("out", width), bias="o" in bias, dtype=dtype)

    def forward(self, x, memory=None, attention_mask=None, position_bias=None, window_mask=None):
        """`x` is `[batch query width]`, `memory` `[batch key memory]`, the rest is for logits."""
        source = x if memory is None else memory
        if hasattr(self, "c_attn"):
            q, k, v = (x @ self.c_attn + self.c_bias).chunk(3, dim=-1)
        else:
            q, k, v = self.q(x), self.k(source), self.v(source)
        q, k, v = (y.unflatten(-1, (self.heads, self.head)).transpose(1, 2) for y in (q, k, v))
        logits = q @ k.mT * self.options.get("scale", self.head**-0.5)
        if position_bias is not None:
            logits = logits + position_bias
        if window_mask is not None:
            logits = logits + window_mask[:, None]
        if attention_mask is not None:
            logits = logits.masked_fill(attention_mask[:, None, None] == 0, float("-inf"))
        if self.options.get("causal"):
            future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
            logits = logits.masked_fill(future, float("-inf"))
        return self.o((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


class _Like(Layer):
    """What the adapters below have in common."""

    framework = "torch"
    options: ClassVar = {}
    parameters = (
        *(Parameter(f"{name[0]}.weight", name, SPLIT) for name in ("query", "key", "value")),
        Parameter("o.weight", "output", JOINED),
        *(
            Parameter(f"{name[0]}.bias", f"{name}_bias", "heads head -> (heads head)")
            for name in ("query", "key", "value")
        ),
        Parameter("o.bias", "output_bias", "embed -> embed"),
    )

    def build(self, shape, dtype, scale, mode):
        """Build a module for a shape in a dtype."""
        memory = 0 if shape.sharing == "self" else shape.key_width
        names = ("query", "key", "value", "output")
        bias = "".join("o" if n == "output" else n[0] for n in names if shape.has_bias(n))
        options: ClassVar = {
            "memory": memory,
            "bias": bias,
            "out": shape.output_width,
            **self.options,
        }
        sizes = shape.query_width, shape.heads, shape.head_size, getattr(torch, dtype)
        return Attention(*sizes, **options)

    def call(self, layer, query, key, value, masks, mode):
        """Call it with its input, and with a memory if that is another."""
        return layer(query, None if key is query else key, **masks)


class GPT2Like(_Like):
    """Causal always, one projection for query, key and value, a bias everywhere."""

    fixed = Fixed(causal="bottom-right", sharing="self", bias=True, width="heads", grouped=False)
    options: ClassVar = {"causal": True, "fused": True}
    parameters = (
        Parameter("c_attn", "query key value", "embed heads head -> embed (heads head)", stack=1),
        Parameter(
            "c_bias", "query_bias key_bias value_bias", "heads head -> (heads head)", stack=0
        ),
        Parameter("o.weight", "output", JOINED),
        Parameter("o.bias", "output_bias", "embed -> embed"),
    )


class ViTLike(_Like):
    """Self-attention without a mask, with a bias at the output only."""

    fixed = Fixed(sharing="self", bias=("output",), width="heads", grouped=False)


class BertLike(_Like):
    """Self-attention with padding: 1 marks a token, 0 marks padding."""

    fixed = Fixed(sharing="self", bias=True, width="heads", grouped=False)
    mask_arguments = (
        MaskArgument("attention_mask", "batch key", number="attends if nonzero", dtype="int64"),
    )
    fully_masked_row = "nan"


class T5Like(_Like):
    """No scale and no biases of projections; the model adds a bias to the logits."""

    fixed = Fixed(scale=1.0, sharing="memory", bias=False, value_heads="alike", grouped=False)
    options: ClassVar = {"scale": 1.0}
    mask_arguments = (
        MaskArgument("position_bias", "batch heads query key", number="added", broadcasts=True),
    )
    fully_masked_row = "nan"


class PerceiverLike(_Like):
    """Few queries read a memory, which has another width and length."""

    fixed = Fixed(sharing="memory", bias=True, value_heads="alike", grouped=False)


class SwinLike(_Like):
    """Windows are entries of the batch; a shifted window has a mask for each of them."""

    fixed = Fixed(sharing="self", bias=True, width="heads", grouped=False)
    mask_arguments = (
        MaskArgument("position_bias", "heads query key", number="added"),
        MaskArgument("window_mask", "batch query key", number="added"),
    )
    fully_masked_row = "nan"
