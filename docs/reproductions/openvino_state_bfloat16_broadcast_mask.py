# OpenVINO's ScaledDotProductAttention on CPUs that have bfloat16, in bfloat16: in a model that
# keeps keys and values in a state, a mask that is broadcast over the batch, [1, 1, query, key], is
# right for the first entry only. For the others numbers are read that are not the mask's. Found
# with openvino 2026.4.1, since 2026.0.
import ml_dtypes
import numpy as np
import openvino as ov
from openvino import opset13 as op

if "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
    raise SystemExit("this CPU has no bfloat16")

tokens = 32
query = np.zeros((4, 1, tokens, 8))  # [batch heads length head]
values = np.broadcast_to(np.arange(tokens)[:, None], query.shape) / tokens  # keys and values
mask = np.where(np.tri(tokens, dtype=bool), 0, -np.inf)[None, None]
want = np.arange(tokens) / 2 / tokens  # the mean of those that query i sees

q, k, v = (op.parameter([-1, 1, -1, 8], ov.Type.bf16) for _ in range(3))
m, beam = op.parameter([-1, -1, -1, -1], ov.Type.bf16), op.parameter([-1], np.int32)
joined, kept = [], []
for name, new in (("key", k), ("value", v)):
    sizes = op.shape_of(new, "i64") * op.constant(np.array([1, 1, 0, 1]))
    empty = op.broadcast(op.constant(0, ov.Type.bf16), sizes)
    state = op.read_value(empty, name, ov.Type.bf16, ov.PartialShape([-1, 1, -1, 8]))
    joined.append(op.concat([op.gather(state, beam, op.constant(0)), new], 2))
    kept.append(op.assign(joined[-1], name))
attention = op.convert(op.scaled_dot_product_attention(q, *joined, m), "f32")
model = ov.Model([op.result(attention)], kept, [q, k, v, m, beam])
request = ov.Core().compile_model(model, "CPU").create_infer_request()
arrays = [a.astype(ml_dtypes.bfloat16).view(np.uint16) for a in (query, values, values, mask)]
tensors = [ov.Tensor(a, list(a.shape), ov.Type.bf16) for a in arrays]
request.infer([*tensors, ov.Tensor(np.arange(4, dtype=np.int32))])
got = request.get_output_tensor(0).data[:, 0, :, 0]
print(f"got {got[0, -1]} in entry 0, {got[1, -1]} in entry 1, want {want[-1]}")
assert np.allclose(got, want, atol=0.02), "the mask of entry 1 is another"
