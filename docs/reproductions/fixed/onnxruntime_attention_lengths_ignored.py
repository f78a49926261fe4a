# ONNX Attention of opset 24 in onnxruntime on the CPU: nonpad_kv_seqlen does nothing in 1.24. Found
# with onnxruntime 1.24.4. Right since 1.25.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

query = np.zeros((1, 1, 1, 1), np.float32)  # [batch heads length head]
key = value = np.array([[[[1], [2], [4]]]], np.float32)
want = (1 + 2) / 2  # of three keys, two are no padding

node = helper.make_node("Attention", ["Q", "K", "V", "", "", "", "lengths"], ["Y"])
inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 1, None, 1]) for n in "QKV"]
inputs.append(helper.make_tensor_value_info("lengths", TensorProto.INT64, [1]))
output = helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)
graph = helper.make_graph([node], "attention", inputs, [output])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
got = session.run(None, {"Q": query, "K": key, "V": value, "lengths": np.array([2])})[0].item()
print(f"got {got:.4f}, want {want}")
assert np.isclose(got, want), "padding is attended"
