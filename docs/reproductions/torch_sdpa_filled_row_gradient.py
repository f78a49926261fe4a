# scaled_dot_product_attention on a CPU: a row of the mask that is filled with a large finite number
# gives the mean of the values, but the gradient of their sum. The backward pass makes the weights
# again from the log-sum-exp, which has lost log(number of keys) to rounding. Found with torch
# 2.13.0.
import torch

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 1, 5, 8).unbind()
mask = torch.zeros(1, 1, 5, 5)
mask[..., 1, :] = torch.finfo(torch.float32).min
v.requires_grad_()
output = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
assert torch.allclose(output[0, 0, 1], v.mean(2)[0, 0]), "the query gets the mean of the values"
(gradient,) = torch.autograd.grad(output[0, 0, 1].sum(), v)
got, want = gradient[0, 0, 0, 0].item(), 1 / 5
print(f"got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}")
assert abs(got - want) < 1e-3, "each of 5 values has a part of 1/5"
