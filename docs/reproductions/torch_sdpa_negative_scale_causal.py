# torch.nn.functional.scaled_dot_product_attention: the kernel that torch chooses on a CPU blocks
# with -inf before it multiplies with the scale. With is_causal, a negative scale makes that +inf, a
# scale of 0 NaN. The same triangle as a mask is right, and so is the kernel that writes the
# products out. Found with torch 2.13.0; of that other kernel negative scales were reported and
# mended in https://github.com/pytorch/pytorch/pull/105202
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

x = torch.tensor(np.arange(8.0).reshape(1, 1, 4, 2) / 8)  # one head, four tokens
triangle = torch.ones(4, 4, dtype=torch.bool).tril()

got = float(scaled_dot_product_attention(x, x, x, is_causal=True, scale=-0.5).sum())
want = float(scaled_dot_product_attention(x, x, x, attn_mask=triangle, scale=-0.5).sum())
print(f"sums of outputs: got {got:.6g}, want {want:.6g}, apart {got - want:.3g}")
assert abs(got - want) < 1e-6, "a negative scale turns the causal mask round"
