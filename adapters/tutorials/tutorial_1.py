"""Tutorial 1: the mask marks the keys that are hidden.

This file represents tutorials that build masks with `eq(PAD)` and `triu`, so that 1 means
*blocked*, and set blocked scores to -inf. Dropout is applied to the weights before they are
multiplied with the values, and the weights are returned after dropout. The code literally tests
`mask == 1`: True and 1 block, any other number does not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class MultiHeadAttention(nn.Module):
    """Multi-head attention with dropout; returns the output and the weights after dropout."""

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        assert d_model % n_heads == 0, "d_model must be divisible by n_heads"
        self.n_heads = n_heads
        self.d_k = d_model // n_heads

        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.fc = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the attention weights.

        q: [batch, q_len, d_model], k and v: [batch, k_len, d_model];
        mask: [batch, n_heads, q_len, k_len], any axis of which may have size 1; 1 hides a key.
        Returns the output [batch, q_len, d_model], and the weights after dropout
        [batch, n_heads, q_len, k_len].
        """
        batch = q.size(0)

        # [batch, len, d_model] -> [batch, n_heads, len, d_k]
        q = self.w_q(q).view(batch, -1, self.n_heads, self.d_k).transpose(1, 2)
        k = self.w_k(k).view(batch, -1, self.n_heads, self.d_k).transpose(1, 2)
        v = self.w_v(v).view(batch, -1, self.n_heads, self.d_k).transpose(1, 2)

        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 1, float("-inf"))

        attn = self.dropout(torch.softmax(scores, dim=-1))
        context = torch.matmul(attn, v)

        # [batch, n_heads, q_len, d_k] -> [batch, q_len, d_model]
        context = context.transpose(1, 2).contiguous().view(batch, -1, self.n_heads * self.d_k)
        return self.fc(context), attn
