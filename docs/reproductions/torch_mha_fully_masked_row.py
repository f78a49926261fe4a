# torch.nn.MultiheadAttention: what a query that may attend nothing gets depends on whether weights
# are asked for: NaN if they are, and the output bias if not. Found with torch 2.13.0; known as
# https://github.com/pytorch/pytorch/issues/160064.
import torch

torch.manual_seed(0)
layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
x = torch.randn(1, 3, 8)
blocked = torch.zeros(3, 3, dtype=torch.bool)
blocked[1] = True
with_weights, _ = layer(x, x, x, attn_mask=blocked, need_weights=True)
without, _ = layer(x, x, x, attn_mask=blocked, need_weights=False)
got, want = with_weights[0, 1, 0].item(), without[0, 1, 0].item()
print(f"got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}")
assert torch.equal(with_weights.isnan(), without.isnan()), "NaN only if weights are asked for"
