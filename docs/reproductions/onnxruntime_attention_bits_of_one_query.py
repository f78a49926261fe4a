# ONNX Attention in onnxruntime on the CPU gives a query beside its keys, as in decoding, other bits
# than the same query among all. Neither another batch nor another number of threads changes bits.
# No documentation promises more, and each answer is right to rounding. Found with onnxruntime
# 1.32.0, Intel Xeon with AVX-512; nothing found upstream.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

sizes = {"query": ["batch", 4, "queries", 64], "key": ["batch", 4, "keys", 64]}
sizes["value"] = sizes["key"]


def attention(causal, *arrays):
    node = helper.make_node("Attention", [*sizes], ["output"], is_causal=causal)
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in sizes.items()]
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "attention", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip(sizes, arrays, strict=True)))[0]


query, key, value = np.random.default_rng(0).standard_normal((3, 2, 4, 64, 64), dtype=np.float32)
whole = attention(1, query, key, value)
steps = [
    attention(0, query[:, :, t : t + 1], key[:, :, : t + 1], value[:, :, : t + 1])
    for t in range(64)
]
alone = np.concatenate(steps, 2)
other = (alone != whole).any(-1).mean()
at = np.unravel_index(abs(alone - whole).argmax(), whole.shape)
got, want = alone[at], whole[at]
print(f"got {got:.9f}, want {want:.9f}, apart {abs(got - want):.2g}; {other:.0%} of rows differ")
assert got == want, "a query that is computed alone has other bits"
