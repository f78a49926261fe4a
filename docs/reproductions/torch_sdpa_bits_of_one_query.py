# torch.nn.functional.scaled_dot_product_attention on a CPU gives a query beside its keys, as in
# decoding, other bits than the same query among all, as in prefill or training. From 4 queries on,
# bits are those of all. No documentation promises more, and each answer is right to rounding.
# Found with torch 2.13.0, AMD EPYC with AVX-512, also in bfloat16, float16, and `math`.
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
query, key, value = (torch.randn(2, 4, 128, 64) for _ in range(3))
whole = attention(query, key, value, is_causal=True)
steps = torch.cat(
    [
        attention(query[:, :, t : t + 1], key[:, :, : t + 1], value[:, :, : t + 1])
        for t in range(128)
    ],
    dim=2,
)
other = (steps != whole).any(-1).double().mean().item()
at = (steps - whole).abs().flatten().argmax()
got, want = steps.flatten()[at].item(), whole.flatten()[at].item()
print(f"got {got:.9f}, want {want:.9f}, apart {abs(got - want):.2g}; {other:.0%} of rows differ")
assert got == want, "a query that is computed alone has other bits"
