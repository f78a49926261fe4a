# OpenVINO's ScaledDotProductAttention on the CPU: in a model that keeps keys and values in a state,
# a scale without a mask fails. The mask is then a scalar 0, as the specification has it, and the
# kernel's shape inference takes it for a mask: "attention_mask do not match q and k". Found with
# openvino 2026.4.1 and 2025.4.1.
import numpy as np
import openvino as ov
from openvino import opset13 as op

query = np.ones((1, 1, 2, 1), np.float32)  # [batch heads length head]
values = np.array([0, 1], np.float32).reshape(1, 1, 2, 1)  # keys and values
weight = 1 / (1 + np.exp(-0.5))
want = np.array([weight, weight])  # the softmax of [0 0.5], times [0 1]

q, k, v = (op.parameter([-1, 1, -1, 1], np.float32) for _ in range(3))
beam = op.parameter([-1], np.int32)
joined, kept = [], []
for name, new in (("key", k), ("value", v)):
    sizes = op.shape_of(new, "i64") * op.constant(np.array([1, 1, 0, 1]))
    empty = op.broadcast(op.constant(0, np.float32), sizes)
    state = op.read_value(empty, name, ov.Type.f32, ov.PartialShape([-1, 1, -1, 1]))
    joined.append(op.concat([op.gather(state, beam, op.constant(0)), new], 2))
    kept.append(op.assign(joined[-1], name))
scale = op.constant(0.5, np.float32)
attention = op.result(op.scaled_dot_product_attention(q, *joined, scale=scale))
model = ov.Model([attention], kept, [q, k, v, beam])
request = ov.Core().compile_model(model, "CPU").create_infer_request()
print(f"want {want}")
request.infer([ov.Tensor(a) for a in (query, values, values, np.zeros(1, np.int32))])
got = request.get_output_tensor(0).data.reshape(-1)
print(f"got {got}")
assert np.allclose(got, want, atol=1e-2), "not the definition's"
