# torch.nn.TransformerEncoderLayer: numbers in src_mask are added to the logits, a relative position
# bias for instance, but not after .eval() and without gradients. There the fast path casts the mask
# to bool, so that whatever is not 0 is blocked. Found with torch 2.13.0, float64; known as
# https://github.com/pytorch/pytorch/issues/118628
import numpy as np
import torch

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(
    8, 2, dim_feedforward=8, dropout=0.0, batch_first=True, dtype=torch.float64
)
x = torch.tensor(np.random.default_rng(0).normal(size=(1, 3, 8)))
bias = torch.tensor([[0.0, 0.5, 0.25], [0.5, 0.0, 0.5], [0.25, 0.5, 0.0]], dtype=torch.float64)
blocked = bias != 0  # everybody sees itself only

with torch.no_grad():
    want = layer.train()(x, src_mask=bias)[0, 0, 0].item()
    got = layer.eval()(x, src_mask=bias)[0, 0, 0].item()
    alone = layer(x, src_mask=blocked)[0, 0, 0].item()
print(f"got {got:.17g}, want {want:.17g}, apart {abs(got - want):.3g}")
print(f"with the bias as a mask of who is blocked: {alone:.17g}")
assert abs(got - want) <= 1e-12, "more than rounding can explain"
