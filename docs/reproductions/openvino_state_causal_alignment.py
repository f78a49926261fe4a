# OpenVINO's ScaledDotProductAttention on the CPU, causal=True: the specification aligns the
# triangle top-left (numpy.triu(..., k=1)), and so does a model without state. In a model that keeps
# keys and values in a state, the kernel aligns it bottom-right (scaled_attn.cpp: kv_len - q_len + m
# + 1). Found with openvino 2026.4.1 and 2025.4.1.
import numpy as np
import openvino as ov
from openvino import opset13 as op

query = np.zeros((1, 1, 2, 1), np.float32)  # [batch heads length head]
values = np.array([1, 2, 4], np.float32).reshape(1, 1, 3, 1)  # keys and values
want = np.array([1, (1 + 2) / 2])  # query i sees keys 0 to i

def infer(model, *inferences):
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    request = ov.Core().compile_model(model, "CPU", exact).create_infer_request()
    for arrays in inferences:
        request.infer([ov.Tensor(np.ascontiguousarray(array)) for array in arrays])
    return request.get_output_tensor(0).data[0, 0, :, 0].copy()

q, k, v = (op.parameter([-1, 1, -1, 1], np.float32) for _ in range(3))
plain = ov.Model([op.scaled_dot_product_attention(q, k, v, causal=True)], [q, k, v])
without = infer(plain, (query, values, values))

q, k, v = (op.parameter([-1, 1, -1, 1], np.float32) for _ in range(3))
beam = op.parameter([-1], np.int32)
joined, kept = [], []
for name, new in (("key", k), ("value", v)):
    sizes = op.shape_of(new, "i64") * op.constant(np.array([1, 1, 0, 1]))
    empty = op.broadcast(op.constant(0, np.float32), sizes)
    state = op.read_value(empty, name, ov.Type.f32, ov.PartialShape([-1, 1, -1, 1]))
    joined.append(op.concat([op.gather(state, beam, op.constant(0)), new], 2))
    kept.append(op.assign(joined[-1], name))
attention = op.result(op.scaled_dot_product_attention(q, *joined, causal=True))
model = ov.Model([attention], kept, [q, k, v, beam])
first, rest, order = values[:, :, :1], values[:, :, 1:], np.zeros(1, np.int32)
got = infer(model, (query[:, :, :1], first, first, order), (query, rest, rest, order))
print(f"without state {without}, with state {got}, want {want}")
assert np.allclose(got, want), "the triangle is aligned bottom-right"
