"""Tutorial 5: additive attention with heads.

This file represents tutorials that come from translation with recurrent networks: the score is
Bahdanau's v . tanh(q + k), here computed in every head, between the projections of the Transformer.
The logits are not scaled. They are set to -1e10 where `mask == 0`. -1e10 is finite, so a fully
masked query averages all values; float16 cannot represent -1e10. All heads share one mask,
[batch, query, key]. A translation model calls the layer in three places:

    encoder          attention(x, x, x, pad_mask(x_lengths, x_len))
    decoder          attention(y, y, y, pad_mask(y_lengths, y_len) & causal_mask(y_len, y.device))
    decoder, memory  attention(y, memory, memory, pad_mask(x_lengths, x_len))
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class AdditiveMultiHeadAttention(nn.Module):
    """Multi-head attention with Bahdanau's score; returns the output and the weights."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        assert hidden_size % num_heads == 0, "hidden_size must be divisible by num_heads"
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads

        self.q_linear = nn.Linear(hidden_size, hidden_size)
        self.k_linear = nn.Linear(hidden_size, hidden_size)
        self.v_linear = nn.Linear(hidden_size, hidden_size)
        self.out_linear = nn.Linear(hidden_size, hidden_size)
        self.v = nn.Parameter(torch.rand(num_heads, self.head_dim))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the attention weights.

        query: [batch, query len, hidden size], key and value: [batch, key len, hidden size];
        mask: [batch, query len, key len], any axis of which may have size 1; 0 hides a key.
        Returns the output [batch, query len, hidden size], and the weights
        [batch, heads, query len, key len].
        """
        # [batch, heads, len, head dim]
        q = self._heads(self.q_linear(query))
        k = self._heads(self.k_linear(key))
        v = self._heads(self.v_linear(value))

        # [batch, heads, query len, key len, head dim]: every query meets every key
        hidden = torch.tanh(q.unsqueeze(3) + k.unsqueeze(2))
        # [batch, heads, query len, key len]
        energy = (hidden * self.v[:, None, None, :]).sum(dim=-1)
        if mask is not None:
            energy = energy.masked_fill(mask.unsqueeze(1) == 0, -1e10)
        attention = torch.softmax(energy, dim=-1)

        context = (attention @ v).transpose(1, 2).flatten(2)
        return self.out_linear(context), attention

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)


def pad_mask(lengths: Tensor, max_len: int) -> Tensor:
    """Convert lengths [batch] to a mask [batch, 1, max len]: True for tokens, False for padding."""
    return (torch.arange(max_len, device=lengths.device) < lengths[:, None]).unsqueeze(1)


def causal_mask(length: int, device: torch.device | str | None = None) -> Tensor:
    """Return a mask [1, length, length]: True where a token meets itself or an earlier token."""
    return torch.ones(1, length, length, dtype=torch.bool, device=device).tril()
