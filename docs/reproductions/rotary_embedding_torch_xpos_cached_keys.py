# rotary_embedding_torch.RotaryEmbedding(use_xpos=True): a query beside cached keys gets other
# logits than within the whole text. The decay of a token counts from the middle of the array it is
# in, and rotate_queries_with_cached_keys takes those of queries and keys from arrays of different
# lengths, so they no longer cancel. Found with rotary-embedding-torch 0.9.1, torch 2.13.0. The
# function was written for this: https://github.com/lucidrains/rotary-embedding-torch/issues/27
import torch
from rotary_embedding_torch import RotaryEmbedding

torch.manual_seed(0)
query, key = torch.randn(2, 1, 1, 400, 8)  # [batch heads length head]
whole = RotaryEmbedding(8, use_xpos=True).rotate_queries_and_keys(query, key)
last = RotaryEmbedding(8, use_xpos=True).rotate_queries_with_cached_keys(query[:, :, -1:], key)
want, got = ((q[0, 0, -1] @ k[0, 0, -1]).item() for q, k in (whole, last))
print(f"logit of the last token: got {got:.5f}, want {want:.5f}, apart {abs(got - want):.5f}")
assert abs(got - want) < 1e-4, "the decay of queries and keys is counted from different places"
