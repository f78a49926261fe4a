"""Tutorial 3: self-attention, as candidates are asked to write it in job interviews.

This file represents tutorials that implement only self-attention, on one input. In training, the
weights get dropout, 0.1 by default. Logits are set to -inf where `attention_mask == 0`, so a fully
masked query gets NaN. These tutorials expand a padding mask `[batch, seq_len]` for every head and
every query before the call:

    padding[:, None, None, :].expand(-1, head_num, seq_len, -1)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class MultiHeadSelfAttention(nn.Module):
    """Multi-head self-attention; returns the output only."""

    def __init__(self, hidden_dim: int, head_num: int, attention_dropout: float = 0.1) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.head_num = head_num
        self.head_dim = hidden_dim // head_num  # head_num * head_dim = hidden_dim

        self.q_proj = nn.Linear(hidden_dim, hidden_dim)
        self.k_proj = nn.Linear(hidden_dim, hidden_dim)
        self.v_proj = nn.Linear(hidden_dim, hidden_dim)
        self.o_proj = nn.Linear(hidden_dim, hidden_dim)
        self.att_dropout = nn.Dropout(attention_dropout)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the output of multi-head self-attention.

        x: (batch, seq_len, hidden_dim); attention_mask: (batch, head_num, seq_len, seq_len), 0
        hides a key. Returns (batch, seq_len, hidden_dim).
        """
        batch, seq_len, _ = x.size()

        # (batch, seq_len, hidden_dim) -> (batch, head_num, seq_len, head_dim)
        Q = self.q_proj(x).view(batch, seq_len, self.head_num, self.head_dim).permute(0, 2, 1, 3)
        K = self.k_proj(x).view(batch, seq_len, self.head_num, self.head_dim).permute(0, 2, 1, 3)
        V = self.v_proj(x).view(batch, seq_len, self.head_num, self.head_dim).permute(0, 2, 1, 3)

        # (batch, head_num, seq_len, seq_len)
        attention_weight = Q @ K.transpose(-1, -2) / math.sqrt(self.head_dim)
        if attention_mask is not None:
            attention_weight = attention_weight.masked_fill(attention_mask == 0, float("-inf"))
        attention_weight = torch.softmax(attention_weight, dim=-1)
        attention_weight = self.att_dropout(attention_weight)

        output_mid = attention_weight @ V
        # (batch, seq_len, head_num, head_dim) -> (batch, seq_len, hidden_dim)
        output_mid = output_mid.transpose(1, 2).contiguous().view(batch, seq_len, -1)
        return self.o_proj(output_mid)
