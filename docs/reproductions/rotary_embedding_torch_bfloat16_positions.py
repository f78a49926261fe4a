# rotary_embedding_torch.RotaryEmbedding: positions are counted in the dtype of the queries, so in
# bfloat16 tokens 256 and 257 stand at the same place, though frequencies are float32. What was
# computed so is kept, and a call in float32 that follows is wrong, too. Found with
# rotary-embedding-torch 0.9.1, torch 2.13.0. Nothing found upstream, but a user works around it:
# https://github.com/nomadkaraoke/python-audio-separator/pull/298
import torch
from rotary_embedding_torch import RotaryEmbedding

def turned(first):
    """The first component of token 257, of ones in float32, after a call in another dtype."""
    rotary, ones = RotaryEmbedding(4), torch.ones(1, 1, 258, 4)
    rotary.rotate_queries_or_keys(ones.to(first))
    return rotary.rotate_queries_or_keys(ones)[0, 0, 257, 0].item()

got, want = turned(torch.bfloat16), turned(torch.float32)
print(f"got {got:.5f}, want {want:.5f}, apart {abs(got - want):.5f}")
assert abs(got - want) < 1e-5, "positions are rounded to bfloat16"
