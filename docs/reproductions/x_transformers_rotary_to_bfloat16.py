# x_transformers.x_transformers.RotaryEmbedding: model.to(torch.bfloat16) rounds its buffer inv_freq
# too, and forward takes positions to that dtype (t.type_as(self.inv_freq)), so tokens 256 and 257
# stand at the same place. Found with torch 2.13.0, x-transformers 2.31.10. Nothing found upstream.
import torch
from x_transformers.x_transformers import RotaryEmbedding

def step(dtype):
    """By how much the first pair turns from token 256 to token 257, in radians."""
    angles, _ = RotaryEmbedding(8).to(dtype).forward_from_seq_len(258)
    return (angles[0, 257, 0] - angles[0, 256, 0]).item()

got, want = step(torch.bfloat16), step(torch.float32)
print(f"radians: got {got:.3f}, want {want:.3f}, apart {abs(got - want):.3f}")
assert got == want, "positions are rounded to bfloat16"
