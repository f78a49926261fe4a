"""A torch module with weights of its own, and the adapter that declares it.

    mha-conformance run docs/examples/torch_module.py:CrossAttention

It declares that one matrix projects key and value, first all keys and then all values, that the
output projection has one matrix per head, and that two mask arguments have opposite polarity.
"""

import torch
from torch import nn

from conformance import Layer, MaskArgument, Mode, Parameter, Unsupported


class CrossAttentionModule(nn.Module):
    """The user's code. It knows nothing of the suite."""

    def __init__(self, width, memory_width, output_width, heads, head, dtype):
        super().__init__()
        self.heads, self.head = heads, head
        self.query = nn.Linear(width, heads * head, dtype=dtype)
        self.key_value = nn.Linear(memory_width, 2 * heads * head, dtype=dtype)
        self.output = nn.Parameter(torch.empty(heads, output_width, head, dtype=dtype))
        self.output_bias = nn.Parameter(torch.empty(output_width, dtype=dtype))

    def forward(self, x, memory, padding=None, visible=None, need_weights=False):
        """`padding` `[batch key]`: True is padding. `visible` `[batch query key]`: True attends."""
        q = self.query(x).unflatten(-1, (self.heads, self.head)).transpose(1, 2)
        both = self.key_value(memory).unflatten(-1, (2, self.heads, self.head))
        k, v = both.permute(2, 0, 3, 1, 4)
        logits = (q * self.head**-0.5) @ k.mT
        if padding is not None:
            logits = logits.masked_fill(padding[:, None, None, :], float("-inf"))
        if visible is not None:
            logits = logits.masked_fill(~visible[:, None], float("-inf"))
        weights = logits.softmax(-1)
        output = torch.einsum("bhqd,hed->bqe", weights @ v, self.output) + self.output_bias
        return (output, weights) if need_weights else output


class CrossAttention(Layer):
    """The adapter: tables first, then how to build and how to call."""

    title = "CrossAttentionModule"
    framework = "torch"
    returns_weights = "per head"
    fully_masked_row = "nan"

    mask_arguments = (
        MaskArgument("padding", "batch key", true="blocks"),
        MaskArgument("visible", "batch query key", true="attends", broadcasts=True),
    )
    parameters = (
        Parameter("query.weight", "query", "embed heads head -> (heads head) embed"),
        Parameter("query.bias", "query_bias", "heads head -> (heads head)"),
        Parameter(
            "key_value.weight", "key value", "embed heads head -> (heads head) embed", stack=0
        ),
        Parameter("key_value.bias", "key_bias value_bias", "heads head -> (heads head)", stack=0),
        Parameter("output", "output", "heads head embed -> heads embed head"),
        Parameter("output_bias", "output_bias", "embed -> embed"),
    )
    modes = (
        Mode("weights", {"need_weights": True}),
        Mode("no-weights", {"need_weights": False}, weights=False),
    )

    def check_shape(self, shape):
        """Refuse shapes that the module cannot have, with the reason."""
        if shape.sharing == "separate":
            raise Unsupported("key and value are one memory")
        if not shape.bias:
            raise Unsupported("projections always have a bias")
        if shape.kv_heads != shape.heads or shape.value_head_size != shape.head_size:
            raise Unsupported("keys and values have the heads of the queries")

    def build(self, shape, dtype, scale, mode):
        """Build one module per shape, dtype and mode."""
        return CrossAttentionModule(
            shape.query_width,
            shape.key_width,
            shape.output_width,
            shape.heads,
            shape.head_size,
            getattr(torch, dtype),
        )

    def call(self, layer, query, key, value, masks, mode):
        """`masks` holds `padding` and `visible` where the problem needs them."""
        return layer(query, key, **masks, **mode.options)
