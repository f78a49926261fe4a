# diffusers.models.attention_processor.Attention: is_causal=True in the constructor has no effect.
# The layer keeps it, but of all processors only that of Stable Audio reads it; AttnProcessor2_0,
# which is the default, passes is_causal=False to torch, and AttnProcessor and SlicedAttnProcessor
# know no flag. Every query attends to what comes after it. Found with diffusers 0.42.1 on torch
# 2.13.0; nothing found upstream.
import torch
from diffusers.models.attention_processor import Attention

torch.manual_seed(0)
layer = Attention(query_dim=8, heads=2, dim_head=4, is_causal=True).eval()
tokens = torch.randn(1, 3, 8)
later = tokens.clone()
later[:, 2] += 1  # the last token, which the first may not see
with torch.no_grad():
    want, got = layer(tokens)[0, 0, 0].item(), layer(later)[0, 0, 0].item()
print(f"got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}")
assert abs(got - want) < 1e-6, "the first token attends to the last one"
