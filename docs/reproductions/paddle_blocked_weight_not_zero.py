# paddle.nn.functional.scaled_dot_product_attention and paddle.nn.MultiHeadAttention, on CPUs: a key
# that the mask blocks has weight exp(-64) = 1.6e-28, not 0, because the softmax clips exponents
# there. So what lies behind the mask reaches the output if it is large, and gradients that are 0
# are not. On GPUs the weight is 0. Found with paddlepaddle 3.3.1.
import numpy as np
import paddle

paddle.set_device("cpu")
query = np.zeros((1, 1, 1, 1), "float32")  # [batch length heads head]
key = np.zeros((1, 2, 1, 1), "float32")
value = np.array([1, 1e30], "float32").reshape(1, 2, 1, 1)
mask = np.array([True, False]).reshape(1, 1, 1, 2)  # True attends: only the first key

want = value[0, 0, 0, 0]
attend = paddle.nn.functional.scaled_dot_product_attention
got = attend(*map(paddle.to_tensor, (query, key, value, mask))).numpy()[0, 0, 0, 0]
print(f"got {got:.9g}, want {want:.9g}, apart {abs(got - want):.3g}")
assert abs(got - want) <= 1e-6, "more than rounding can explain"
