# torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, the operator below SDPA on CPUs, which
# is not public, returns a log-sum-exp of 0 for a query that sees no key, where the sum is 0 and its
# logarithm -inf. Merging such a part with another gives it the weight exp(0), and the output is too
# small. Found with torch 2.13.0; nothing found upstream.
import torch

torch.manual_seed(0)
query, key, value = (torch.randn(1, 1, n, 8) for n in (1, 6, 6))
attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
seen = torch.zeros(1, 6)
seen[:, 3:] = float("-inf")  # the second half of the keys is padding

parts = [
    attention(query, key[:, :, at], value[:, :, at], attn_mask=seen[:, at])
    for at in (slice(0, 3), slice(3, 6))
]
sums = torch.stack([part[1] for part in parts])
shares = (sums - sums.logsumexp(0)).exp()
got = sum(share[..., None] * part[0] for share, part in zip(shares, parts))[0, 0, 0, 0].item()
want = attention(query, key, value, attn_mask=seen)[0][0, 0, 0, 0].item()
print(f"got {got:.5f}, want {want:.5f}, apart {abs(got - want):.5f}")
assert abs(got - want) < 1e-5, "a part without keys takes a share of the output"
