"""Tutorial 2: values first, einsum, and a very negative number.

This file represents tutorials that split the embedding by `reshape`, write both products as
`einsum`, and replace logits by -1e20 where `mask == 0`. The order of the arguments is values, keys,
query. -1e20 is finite, so a fully masked query averages all values; float16 cannot represent -1e20.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MultiHeadAttention(nn.Module):
    """Multi-head attention by einsum; returns the output only."""

    def __init__(self, embed_size: int, num_heads: int) -> None:
        super().__init__()
        self.embed_size = embed_size
        self.num_heads = num_heads
        self.head_dim = embed_size // num_heads
        assert self.head_dim * num_heads == embed_size, "embed_size must divide into the heads"

        self.values = nn.Linear(embed_size, embed_size)
        self.keys = nn.Linear(embed_size, embed_size)
        self.queries = nn.Linear(embed_size, embed_size)
        self.fc_out = nn.Linear(embed_size, embed_size)

    def forward(
        self, values: Tensor, keys: Tensor, query: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Return the output of multi-head attention.

        values and keys: (N, key_len, embed_size), query: (N, query_len, embed_size);
        mask: (N, num_heads, query_len, key_len), any axis of which may have size 1; 0 hides a key.
        Returns (N, query_len, embed_size).
        """
        N, query_len = query.shape[0], query.shape[1]
        value_len, key_len = values.shape[1], keys.shape[1]

        values = self.values(values).reshape(N, value_len, self.num_heads, self.head_dim)
        keys = self.keys(keys).reshape(N, key_len, self.num_heads, self.head_dim)
        queries = self.queries(query).reshape(N, query_len, self.num_heads, self.head_dim)

        # (N, query_len, heads, head_dim), (N, key_len, heads, head_dim)
        #   -> (N, heads, query_len, key_len)
        energy = torch.einsum("nqhd,nkhd->nhqk", [queries, keys]) / self.head_dim**0.5
        if mask is not None:
            energy = energy.masked_fill(mask == 0, float("-1e20"))

        attention = torch.softmax(energy, dim=3)

        # (N, heads, query_len, key_len), (N, value_len, heads, head_dim)
        #   -> (N, query_len, heads, head_dim), then the heads are joined
        out = torch.einsum("nhql,nlhd->nqhd", [attention, values])
        return self.fc_out(out.reshape(N, query_len, self.embed_size))
