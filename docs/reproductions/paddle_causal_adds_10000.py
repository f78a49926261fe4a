# paddle.nn.functional.scaled_dot_product_attention on a CPU: is_causal adds -10000 to the logits of
# later keys instead of blocking them, whatever the dtype (flash_attention.py,
# get_triangle_upper_mask). A later key whose logit is larger by more than that is attended to.
# With the same triangle as attn_mask it is not, as False becomes -inf. Found with paddlepaddle
# 3.3.1; nothing found upstream.
import numpy as np
import paddle
from paddle.nn.functional import scaled_dot_product_attention


def tensor(*numbers):
    return paddle.to_tensor(np.array(numbers, np.float32).reshape(1, 2, 1, 1))


query, key, value = tensor(300, 0), tensor(1, 100), tensor(1, 2)  # [batch length heads head]
want = 1.0  # the first query sees the first key only, whose value is 1
got = float(scaled_dot_product_attention(query, key, value, is_causal=True).numpy()[0, 0, 0, 0])
print(f"got {got}, want {want}, apart {abs(got - want)}")
assert got == want, "the first query attends to the second key"
