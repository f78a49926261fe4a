# diffusers.models.attention_processor.Attention: scale_qk=False, logits without the factor
# 1/sqrt(d), is obeyed by AttnProcessor, and ignored by AttnProcessor2_0, which does not pass it to
# torch.nn.functional.scaled_dot_product_attention. The constructor chooses the former, but
# set_processor(AttnProcessor2_0()) changes the result without a warning. Found with diffusers
# 0.42.1 on torch 2.13.0. A comment in the code knows: "add support for attn.scale when we move to
# Torch 2.1"; nothing else found upstream.
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0

torch.manual_seed(0)
layer = Attention(query_dim=8, heads=2, dim_head=4, scale_qk=False).eval()
tokens = torch.randn(1, 3, 8)
with torch.no_grad():
    want = layer(tokens)[0, 0, 0].item()
    layer.set_processor(AttnProcessor2_0())
    got = layer(tokens)[0, 0, 0].item()
print(f"got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}")
assert abs(got - want) < 1e-6, "scale_qk=False is ignored"
