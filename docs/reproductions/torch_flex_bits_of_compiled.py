# torch.nn.attention.flex_attention on a CPU: compiled, each query has other bits than called
# operation by operation. No documentation promises more, and each answer is right to rounding.
# Found with torch 2.13.0, Intel Xeon with AVX-512. Upstream, on GPUs and far beyond rounding:
# https://github.com/pytorch/pytorch/issues/135161, closed.
import warnings

import torch
from torch.nn.attention.flex_attention import flex_attention

warnings.simplefilter("ignore")  # of the call that is not compiled
torch.manual_seed(0)
query, key, value = (torch.randn(2, 4, 64, 64) for _ in range(3))
eager = flex_attention(query, key, value)
compiled = torch.compile(flex_attention)(query, key, value)
other = (compiled != eager).any(-1).double().mean().item()
at = (compiled - eager).abs().flatten().argmax()
got, want = compiled.flatten()[at].item(), eager.flatten()[at].item()
print(f"got {got:.9f}, want {want:.9f}, apart {abs(got - want):.2g}; {other:.0%} of rows differ")
assert got == want, "compiled, a query has other bits"
