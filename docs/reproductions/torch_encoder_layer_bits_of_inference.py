# torch.nn.TransformerEncoderLayer on a CPU, after .eval() and without dropout: under no_grad, where
# the fast path computes it, each token has other bits than with gradients. No documentation
# promises more, and each answer is right to rounding. Found with torch 2.13.0, Intel Xeon with
# AVX-512. Upstream: https://github.com/pytorch/pytorch/issues/128209, closed.
import torch

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(64, 4, dropout=0.0, batch_first=True).eval()
tokens = torch.randn(8, 64, 64)
trained = layer(tokens).detach()
with torch.no_grad():
    inferred = layer(tokens)
other = (inferred != trained).any(-1).double().mean().item()
at = (inferred - trained).abs().flatten().argmax()
got, want = inferred.flatten()[at].item(), trained.flatten()[at].item()
print(f"got {got:.9f}, want {want:.9f}, apart {abs(got - want):.2g}; {other:.0%} of tokens differ")
assert got == want, "without gradients, a token has other bits"
