# com.microsoft.MultiHeadAttention on the CPU: without any key the output is never written, so it is
# what was in memory before. Found with onnxruntime 1.20.1 to 1.28.0; in 1.18.1 it is zeros or NaN.
# Zeros since 1.29.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

query = np.zeros((1, 3, 8), np.float32)  # [batch length (heads head)]
key = np.zeros((1, 0, 8), np.float32)

node = helper.make_node("MultiHeadAttention", ["Q", "K", "V"], ["Y"], domain="com.microsoft",
    num_heads=1)
shapes = {"Q": [1, 3, 8], "K": [1, "keys", 8], "V": [1, "keys", 8]}
inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
output = helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)
graph = helper.make_graph([node], "attention", inputs, [output])
opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
keys = np.full((1, 3, 8), 5, np.float32)
for _ in range(9):  # leaves something in memory
    session.run(None, {"Q": query, "K": keys, "V": keys})
(got,) = session.run(None, {"Q": query, "K": key, "V": key})
print(f"got {got[0, :, 0]}, want zeros")
assert not got.any(), "what was in memory before"
