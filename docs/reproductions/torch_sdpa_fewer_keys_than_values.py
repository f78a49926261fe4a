# torch.nn.functional.scaled_dot_product_attention: key and value have the same length S. The kernel
# that torch chooses on a CPU takes it from the value alone, so with fewer keys than values it reads
# what lies behind the keys; its backward pass writes there, and the process may die later. The
# kernel that writes the products out raises. Found with torch 2.13.0; the reads are known as
# https://github.com/pytorch/pytorch/pull/193728
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

memory = torch.zeros(100)
query, key, value = torch.ones(1, 1, 1, 2), memory[:6].view(1, 1, 3, 2), torch.eye(5, 2)[None, None]

def answer(behind):
    memory[6:] = behind
    try:
        return scaled_dot_product_attention(query, key, value)[0, 0, 0, 0].item()
    except RuntimeError:
        return "an error"

with sdpa_kernel(SDPBackend.MATH):
    print(f"with the products written out: {answer(0.0)}")
first, second = answer(0.0), answer(10.0)
print(f"with 10 behind the keys: got {second:.2g}, want {first:.2g}, apart {first - second:.2g}")
assert first == second, "the answer is made of numbers that are not in its arguments"
