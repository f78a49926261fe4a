"""Tutorial 4: the Transformer in small methods.

This file represents tutorials that build a whole Transformer from `split_heads`,
`scaled_dot_product_attention` and `combine_heads`, and replace logits by -1e9 where `mask == 0`.
-1e9 is finite, so a fully masked query averages all values; float16 cannot represent -1e9.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class MultiHeadAttention(nn.Module):
    """Multi-head attention; returns the output and the weights."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        assert d_model % num_heads == 0, "d_model must be divisible by num_heads"
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_model // num_heads

        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def split_heads(self, x: Tensor) -> Tensor:
        """Convert (batch, seq_length, d_model) to (batch, num_heads, seq_length, d_k)."""
        batch_size, seq_length, _ = x.size()
        return x.view(batch_size, seq_length, self.num_heads, self.d_k).transpose(1, 2)

    def combine_heads(self, x: Tensor) -> Tensor:
        """Convert (batch, num_heads, seq_length, d_k) to (batch, seq_length, d_model)."""
        batch_size, _, seq_length, _ = x.size()
        return x.transpose(1, 2).contiguous().view(batch_size, seq_length, self.d_model)

    def scaled_dot_product_attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the heads' contexts, and the weights (batch, num_heads, query, key).

        0 in the mask hides a key.
        """
        attn_scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            attn_scores = attn_scores.masked_fill(mask == 0, -1e9)
        attn_probs = torch.softmax(attn_scores, dim=-1)
        return torch.matmul(attn_probs, value), attn_probs

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output (batch, query, d_model) and the attention weights.

        query: (batch, query, d_model), key and value: (batch, key, d_model);
        mask: (batch, num_heads, query, key), any axis of which may have size 1; 0 hides a key.
        """
        Q = self.split_heads(self.W_q(query))
        K = self.split_heads(self.W_k(key))
        V = self.split_heads(self.W_v(value))
        attn_output, attn_probs = self.scaled_dot_product_attention(Q, K, V, mask)
        return self.W_o(self.combine_heads(attn_output)), attn_probs
