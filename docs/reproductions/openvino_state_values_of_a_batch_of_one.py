# OpenVINO's ScaledDotProductAttention on the CPU: in a model that keeps keys and values in a state,
# values of a batch of 1 beside keys of a batch of 2 are neither refused nor broadcast. The process
# dies with SIGSEGV. Found with openvino 2026.4.1; probe/bad-input, mode state.
import subprocess
import sys

CALL = """
import numpy as np
import openvino as ov
from openvino import opset13 as op

query, key, value = (np.ones((batch, 2, 5, 4), np.float32) for batch in (2, 2, {batch}))
q, k, v = (op.parameter([-1, 2, -1, 4], np.float32) for _ in range(3))
beam = op.parameter([-1], np.int32)
joined, kept = [], []
for name, new in (("key", k), ("value", v)):
    sizes = op.shape_of(new, "i64") * op.constant(np.array([1, 1, 0, 1]))
    empty = op.broadcast(op.constant(0, np.float32), sizes)
    state = op.read_value(empty, name, ov.Type.f32, ov.PartialShape([-1, 2, -1, 4]))
    joined.append(op.concat([op.gather(state, beam, op.constant(0)), new], 2))
    kept.append(op.assign(joined[-1], name))
attention = op.result(op.scaled_dot_product_attention(q, *joined))
model = ov.Model([attention], kept, [q, k, v, beam])
request = ov.Core().compile_model(model, "CPU").create_infer_request()
try:
    request.infer([ov.Tensor(a) for a in (query, key, value, np.arange(2, dtype=np.int32))])
except RuntimeError:
    pass  # refused
"""

want, got = (
    subprocess.run([sys.executable, "-c", CALL.format(batch=batch)], check=False).returncode
    for batch in (2, 1)
)
print(f"exit code: got {got}, want {want}, apart {abs(got - want)}")
assert got == want, "the process died"
