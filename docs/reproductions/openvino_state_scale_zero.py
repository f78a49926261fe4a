# OpenVINO's ScaledDotProductAttention on the CPU: in a model that keeps keys and values in a state,
# a scale of 0 is taken for none, so the logits are scaled by 1/√d. A model without state scales
# them by 0. Found with openvino 2026.4.1.
import numpy as np
import openvino as ov
from openvino import opset13 as op

query = np.ones((1, 1, 2, 1), np.float32)  # [batch heads length head]
values = np.array([0, 1], np.float32).reshape(1, 1, 2, 1)  # keys and values
mask = np.zeros((1, 1, 2, 2), np.float32)  # without one, no scale is taken
want = np.array([0.5, 0.5])  # the mean of the values

q, k, v = (op.parameter([-1, 1, -1, 1], np.float32) for _ in range(3))
m = op.parameter([-1, 1, -1, -1], np.float32)
beam = op.parameter([-1], np.int32)
joined, kept = [], []
for name, new in (("key", k), ("value", v)):
    sizes = op.shape_of(new, "i64") * op.constant(np.array([1, 1, 0, 1]))
    empty = op.broadcast(op.constant(0, np.float32), sizes)
    state = op.read_value(empty, name, ov.Type.f32, ov.PartialShape([-1, 1, -1, 1]))
    joined.append(op.concat([op.gather(state, beam, op.constant(0)), new], 2))
    kept.append(op.assign(joined[-1], name))
scale = op.constant(0, np.float32)
attention = op.result(op.scaled_dot_product_attention(q, *joined, m, scale))
model = ov.Model([attention], kept, [q, k, v, m, beam])
request = ov.Core().compile_model(model, "CPU").create_infer_request()
request.infer([ov.Tensor(a) for a in (query, values, values, mask, np.zeros(1, np.int32))])
got = request.get_output_tensor(0).data.reshape(-1)
print(f"got {got[0]}, want {want[0]}, apart {got[0] - want[0]}")
assert np.allclose(got, want, atol=1e-2), "a scale of 0 is taken for none"
