# keras.ops.dot_product_attention on torch: `bias` and `is_causal` together raise, or not, by the
# kernel that torch chooses: with a bias that wants a gradient they do. Found with keras 3.15.1 and
# torch 2.13.0: the causal mask is joined with `mask` since Keras 3.15, with `bias` it is not.
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import torch

query = key = torch.ones((1, 2, 1, 3))  # [batch length heads head]
value = torch.tensor([[[[1.0, 1, 1]], [[3, 3, 3]]]])
bias = torch.zeros((1, 1, 2, 2))
want = 1.0  # the first query attends the first key only
for gradient in (False, True):
    got, told = float("nan"), f"bias.requires_grad={gradient}"
    try:
        output = keras.ops.dot_product_attention(
            query, key, value, bias=bias.requires_grad_(gradient), is_causal=True
        )
        got = output[0, 0, 0, 0].item()
    except Exception as error:
        told += f", {type(error).__name__}: {error}"
    print(f"got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}", told)
assert got == want, "it raised"
