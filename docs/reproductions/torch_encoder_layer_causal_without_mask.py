# torch.nn.TransformerEncoderLayer: is_causal=True is a hint about src_mask, and without a src_mask
# training raises. After .eval() and without gradients the fast path does not look at it: nothing
# is masked, and every token attends those after it. Found with torch 2.13.0, float64; to
# https://github.com/pytorch/pytorch/issues/96941 the answer was the hint.
import numpy as np
import torch

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(
    8, 2, dim_feedforward=8, dropout=0.0, batch_first=True, dtype=torch.float64
)
x = torch.tensor(np.random.default_rng(0).normal(size=(1, 3, 8)))
causal = torch.nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)

try:
    layer.train()(x, is_causal=True)
except RuntimeError as error:
    print("in training:", error)
with torch.no_grad():
    want = layer.eval()(x, src_mask=causal, is_causal=True)[0, 0, 0].item()
    got = layer(x, is_causal=True)[0, 0, 0].item()
    open_to_all = layer(x)[0, 0, 0].item()
print(f"got {got:.17g}, want {want:.17g}, apart {abs(got - want):.3g}")
print(f"without is_causal: {open_to_all:.17g}")
assert abs(got - want) <= 1e-12, "is_causal was not looked at"
