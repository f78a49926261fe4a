# rotary_embedding_torch.RotaryEmbedding.get_axial_freqs: the offsets of an axis are ignored once an
# axis of this length or longer was asked for, and the other way round: angles with an offset are
# kept, and serve calls without one. The cache is asked for a length, and not told the offset. Found
# with rotary-embedding-torch 0.9.1, torch 2.13.0. For other methods this was corrected:
# https://github.com/lucidrains/rotary-embedding-torch/issues/11
from rotary_embedding_torch import RotaryEmbedding

want = RotaryEmbedding(4).get_axial_freqs(4, offsets=(5,))[0, 0].item()  # of position 5
rotary = RotaryEmbedding(4)
rotary.get_axial_freqs(4)
got = rotary.get_axial_freqs(4, offsets=(5,))[0, 0].item()
print(f"angle: got {got:.3f}, want {want:.3f}, apart {abs(got - want):.3f}")
assert got == want, "the offset is ignored"
