# torch.nn.functional.scaled_dot_product_attention on the CPU: a NaN in a query does not reach its
# output, which is 0, if there are fewer keys than a vector of the processor holds numbers: in
# float32, 8 with AVX2 and 16 with AVX-512. With more keys it does, and also written out in
# operations (SDPBackend.MATH). Found with torch 2.13.0; for more keys, fixed as
# https://github.com/pytorch/pytorch/issues/141128.
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.manual_seed(0)
query, key, value = (torch.randn(1, 1, 4, 16) for _ in range(3))
query[0, 0, 3, 0] = torch.nan
lost = {}
for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
    with sdpa_kernel(backend):
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    lost[backend] = int(output[0, 0, 3].isnan().sum())
got, want = lost.values()
print(f"got {got}, want {want}, apart {abs(got - want)} of 16 numbers that should be NaN")
assert got == want, "the NaN was hidden"
