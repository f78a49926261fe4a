# com.microsoft.MultiHeadAttention on the CPU: with unidirectional=1 the triangle is aligned
# top-left, but the last query sees every key: of its row nothing is blocked, as if queries and keys
# were as many (contrib_ops/cpu/bert/attention_helper.h, PrepareMask: s_i < sequence_length - 1).
# Bottom-right it would be [1.5 2.3333]. Found with onnxruntime 1.31.1.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

query = np.array([[[0], [0]]], np.float32)  # [batch length (heads head)]
key = value = np.array([[[1], [2], [4]]], np.float32)

visible = np.tri(2, 3, dtype=bool)  # query i sees keys 0 to i
want = np.where(visible, value[0, :, 0], 0).sum(-1) / visible.sum(-1)

names = ["query", "key", "value"]
node = helper.make_node("MultiHeadAttention", names, ["output"], domain="com.microsoft",
    num_heads=1, unidirectional=1)
inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 3) for name in names]
output = helper.make_tensor_value_info("output", TensorProto.FLOAT, None)
graph = helper.make_graph([node], "attention", inputs, [output])
opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
(got,) = session.run(None, {"query": query, "key": key, "value": value})
got = got[0, :, 0]
print(f"last query: got {got[1]:.4f}, want {want[1]:.4f}, apart {got[1] - want[1]:.4f}")
assert np.allclose(got, want), "the last query sees every key"
