"""Self-attention as in Llama, always causal and always rotated, and the adapter that declares it.

    mha-conformance run docs/examples/torch_llama.py:LlamaLike

What a layer does in every call needs no argument: `fixed` says it, and the cases are posed so.
"""

import torch
from torch import nn

from conformance import Fixed, Layer, Parameter


class LlamaLikeModule(nn.Module):
    """The user's code. It knows nothing of the suite."""

    def __init__(self, width, heads, kv_heads, head, dtype):
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, head
        self.q_proj = nn.Linear(width, heads * head, bias=False, dtype=dtype)
        self.k_proj = nn.Linear(width, kv_heads * head, bias=False, dtype=dtype)
        self.v_proj = nn.Linear(width, kv_heads * head, bias=False, dtype=dtype)
        self.o_proj = nn.Linear(heads * head, width, bias=False, dtype=dtype)

    def rotated(self, x):
        """Turn the pairs (i, i + head/2) of a head by position · 10000^(−2i/head)."""
        exact = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * 10000.0 ** (
            -torch.arange(0, self.head, 2, dtype=torch.float64) / self.head
        )
        cos, sin = exact.cos().to(x.dtype), exact.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def forward(self, x):
        """`x` is `[batch length width]`, and so is the result."""
        q = self.rotated(self.q_proj(x).unflatten(-1, (self.heads, self.head)).transpose(1, 2))
        k = self.rotated(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head)).transpose(1, 2))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head)).transpose(1, 2)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=1) for y in (k, v))
        logits = q @ k.mT * self.head**-0.5
        future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        weights = logits.masked_fill(future, float("-inf")).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class LlamaLike(Layer):
    """The adapter: what is fixed, where the weights are, how to build and how to call."""

    title = "LlamaLikeModule"
    framework = "torch"
    fixed = Fixed(
        causal="bottom-right",
        rotary_base=10000.0,
        sharing="self",
        bias=False,
        value_heads="alike",
    )
    parameters = (
        Parameter("q_proj.weight", "query", "embed heads head -> (heads head) embed"),
        Parameter("k_proj.weight", "key", "embed heads head -> (heads head) embed"),
        Parameter("v_proj.weight", "value", "embed heads head -> (heads head) embed"),
        Parameter("o_proj.weight", "output", "heads head embed -> embed (heads head)"),
    )

    def build(self, shape, dtype, scale, mode):
        """Build a module for a shape in a dtype."""
        heads = shape.heads, shape.kv_heads, shape.head_size
        return LlamaLikeModule(shape.query_width, *heads, getattr(torch, dtype))

    def call(self, layer, query, key, value, masks, mode):
        """Call it with its only input."""
        return layer(query)
