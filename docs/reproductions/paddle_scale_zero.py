# paddle.nn.functional.scaled_dot_product_attention on a CPU: scale=0.0 is taken for "not given", so
# the products are multiplied by 1/sqrt(head size). Every other scale is used as it is. Found with
# paddlepaddle 3.3.1 by exploration; nothing found upstream.
import numpy as np
import paddle
from paddle.nn.functional import scaled_dot_product_attention

x = np.arange(4, dtype=np.float32).reshape(1, 2, 1, 2) / 2  # [batch length heads head]
want = x.mean(axis=1)[0, 0, 0]  # all logits are 0, so every query gets the mean of the values

t = paddle.to_tensor(x)
got = float(scaled_dot_product_attention(t, t, t, scale=0.0).numpy()[0, 0, 0, 0])
print(f"got {got}, want {want}, apart {abs(got - want)}")
assert abs(got - want) < 1e-5, "a scale of 0 is taken for none"
