# com.microsoft.GroupQueryAttention on the CPU: with qk_output=2 (the weights, after the softmax),
# the weights of keys beyond a sequence's length are what was in memory before. The output is right.
# Found with onnxruntime 1.31.1, since 1.23, which has qk_output. Zeros since 1.32.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

heads, size, keys = 1, 8, 64
query = np.ones((2, 1, size), np.float32)  # [batch length (heads head)]
past = np.ones((2, heads, keys - 1, size), np.float32)
lengths = np.array([keys, 2], np.int32)

want = (np.arange(keys) < lengths[:, None]) / lengths[:, None]

floats = {"query": query, "key": query, "value": query, "past_key": past, "past_value": past}
given = {**floats, "seqlens_k": lengths - 1, "total": np.array(keys, np.int32)}
names = ["output", "present_key", "present_value", "weights"]
node = helper.make_node("GroupQueryAttention", list(given), names, domain="com.microsoft",
    num_heads=heads, kv_num_heads=heads, qk_output=2)
kind = lambda a: TensorProto.FLOAT if a.dtype == np.float32 else TensorProto.INT32
inputs = [helper.make_tensor_value_info(n, kind(a), a.shape) for n, a in given.items()]
outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
graph = helper.make_graph([node], "attention", inputs, outputs)
opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
for _ in range(20):  # until there is something else than zeros in memory
    got = session.run(["weights"], given)[0][:, 0, 0]
    if not np.allclose(got, want):
        break
print(f"got {got[1, :6]}, want {want[1, :6]}; sum {got[1].sum():.3g}")
assert np.allclose(got, want), "weights of padding are not zero"
