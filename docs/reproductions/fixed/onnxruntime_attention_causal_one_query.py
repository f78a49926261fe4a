# ONNX Attention in onnxruntime on the CPU, before 1.28: is_causal does nothing where there is one
# query without a cache. ONNX aligns the triangle top-left, so that it sees the first key alone.
# Found with onnxruntime 1.23.2 to 1.27.0.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

query = np.zeros((1, 1, 1, 1), np.float32)  # [batch heads length head]
key = value = np.array([1, 2, 6], np.float32).reshape(1, 1, 3, 1)

node = helper.make_node("Attention", ["Q", "K", "V"], ["Y"], is_causal=1)
shapes = {"Q": query.shape, "K": key.shape, "V": key.shape}
inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
output = helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)
graph = helper.make_graph([node], "attention", inputs, [output])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
(got,) = session.run(None, {"Q": query, "K": key, "V": value})
print(f"got {got.item()}, want 1.0, the first value")
assert np.allclose(got, 1), "every key is seen"
