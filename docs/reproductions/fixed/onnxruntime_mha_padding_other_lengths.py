# com.microsoft.MultiHeadAttention on the CPU before 1.21: with fewer or more queries than keys, a
# key_padding_mask blocks other keys than it says: the mask was made for as many keys as there are
# queries. Found with onnxruntime 1.18.1 and 1.20.1.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

query = np.zeros((2, 1, 1), np.float32)  # [batch length (heads head)]
key = value = np.array([[[1], [2], [4]], [[1], [2], [4]]], np.float32)
mask = np.array([[1, 1, 0], [1, 1, 0]], np.int32)  # the last key is padding

want = (value[..., 0] * mask).sum(-1) / mask.sum(-1)

kinds = {"query": TensorProto.FLOAT, "key": TensorProto.FLOAT, "value": TensorProto.FLOAT}
node = helper.make_node("MultiHeadAttention", [*kinds, "", "mask"], ["output"],
    domain="com.microsoft", num_heads=1)
inputs = [helper.make_tensor_value_info(name, kind, [None] * 3) for name, kind in kinds.items()]
inputs.append(helper.make_tensor_value_info("mask", TensorProto.INT32, [None] * 2))
output = helper.make_tensor_value_info("output", TensorProto.FLOAT, None)
graph = helper.make_graph([node], "attention", inputs, [output])
opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
(got,) = session.run(None, {"query": query, "key": key, "value": value, "mask": mask})
got = got[:, 0, 0]
print(f"got {got}, want {want}")
assert np.allclose(got, want), "padding is attended"
