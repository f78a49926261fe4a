# torch.nn.functional.scaled_dot_product_attention: "An error is thrown if both attn_mask and
# is_causal are set." That is true of the kernel that writes the products out. The one that torch
# chooses on a CPU takes both and joins them, and asked for a gradient of the mask, torch chooses
# the other. Found with torch 2.13.0; known as https://github.com/pytorch/pytorch/issues/187801
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

x = torch.tensor(np.arange(8.0).reshape(1, 1, 4, 2))  # one head, four tokens

def raised(mask):
    try:
        scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=True)
    except RuntimeError as error:
        print(error)
        return 1
    return 0

mask = torch.zeros(4, 4, dtype=torch.float64)
want = raised(mask.clone().requires_grad_())
got = raised(mask)
print(f"errors: got {got}, want {want}, apart {want - got}")
assert got == want, "whether it is an error depends on the kernel"
