"""A layer as in a language model, with a cache of its own, and how the suite feeds it."""

import torch

from conformance import StatefulLayer


class Attention(torch.nn.Module):
    """Causal self-attention that keeps keys and values of the tokens that it has seen."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads, self.keys, self.values = heads, None, None
        self.project = torch.nn.Linear(width, 3 * width)
        self.output = torch.nn.Linear(width, width)

    def forward(self, x):
        """Return the outputs of new tokens `[batch query width]`."""
        split = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = split
        if self.keys is not None:
            key, value = torch.cat([self.keys, key], 2), torch.cat([self.values, value], 2)
        self.keys, self.values = key, value
        # Query i of this call is token `cached + i` of the text.
        cached = key.shape[2] - query.shape[2]
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(cached)
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return self.output(found.transpose(1, 2).flatten(2))


class Mine(StatefulLayer):
    """`Attention`, which can be reset and rolled back."""

    width = 32

    def build(self, dtype):
        """Build the layer with weights that are the same each time."""
        torch.manual_seed(0)
        return Attention(self.width).to(getattr(torch, dtype))

    def feed(self, layer, tokens):
        """Return the outputs of new tokens."""
        return layer(tokens)

    def reset(self, layer):
        """Forget all tokens."""
        layer.keys = layer.values = None

    def rollback(self, layer, count):
        """Forget the last tokens."""
        layer.keys, layer.values = layer.keys[:, :, :-count], layer.values[:, :, :-count]
