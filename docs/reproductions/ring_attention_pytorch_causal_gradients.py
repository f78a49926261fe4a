# ring_flash_attn with causal=True and more keys than queries: the forward pass aligns the triangle
# bottom-right, the backward pass top-left. Found with ring-attention-pytorch 0.5.20.
import torch
from ring_attention_pytorch.ring_flash_attention import ring_flash_attn
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)
query = torch.randn(1, 2, 1, 16, requires_grad=True)
key, value = (torch.randn(1, 4, 1, 16, requires_grad=True) for _ in range(2))
inputs = [it.transpose(1, 2) for it in (query, key, value)]
want = scaled_dot_product_attention(*inputs, torch.ones(2, 4).tril(2).bool()).transpose(1, 2)
got = ring_flash_attn(query, key, value, causal=True)
assert torch.allclose(got, want, atol=1e-5), "the output is another one"
got, want = (torch.autograd.grad(it.sum(), value)[0] for it in (got, want))
apart = float((got - want).abs().max())
print(f"got {float(got.norm()):.6g}, want {float(want.norm()):.6g}, apart {apart:.2g}")
assert apart < 1e-5, "the gradient is another one"
