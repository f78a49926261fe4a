# tinygrad.Tensor.scaled_dot_product_attention in float16: logits are computed in float32, but cast
# back to float16 before the softmax. A logit beyond 65504 becomes inf, and its row NaN. In float32
# the same call is right. Found with tinygrad 0.14.0. https://github.com/tinygrad/tinygrad/pull/4985
# made the products float32 for such logits; nothing found upstream about the cast.
import os

os.environ.setdefault("DEV", "PYTHON")
import numpy as np
from tinygrad import Tensor

query = np.full((1, 1, 1, 4), 200, np.float16)  # [batch heads length head]
key = np.array([[[[200] * 4, [199] * 4]]], np.float16)  # logits 80000 and 79600
value = np.array([[[[1], [2]]]], np.float16)
want = 1.0  # the first key outweighs the second one by far
got = Tensor(query).scaled_dot_product_attention(Tensor(key), Tensor(value)).numpy().item()
print(f"got {got}, want {want}, apart {abs(got - want)}")
assert got == want, "logits overflow in float16"
