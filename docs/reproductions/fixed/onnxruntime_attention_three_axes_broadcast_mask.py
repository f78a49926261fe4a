# ONNX Attention in onnxruntime on the CPU, with heads side by side (three axes): a mask that is
# broadcast over the queries, [batch, 1, 1, key], is taken for one of another shape. The shape is
# checked only if heads are an axis, where such a mask is refused. Found with onnxruntime 1.23.2 and
# 1.24.4. Refused since 1.25.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

query = np.zeros((2, 2, 1), np.float32)  # [batch length (heads head)]
key = value = np.array([[[1], [2], [4]]] * 2, np.float32)
mask = np.array([[1, 0, 1], [1, 1, 0]], bool)[:, None, None]

want = ((value[..., 0] * mask[:, 0, 0]).sum(-1) / mask.sum(-1)[:, 0, 0])[:, None].repeat(2, 1)

node = helper.make_node("Attention", ["Q", "K", "V", "mask"], ["Y"], q_num_heads=1, kv_num_heads=1)
shapes = {"Q": query.shape, "K": key.shape, "V": key.shape}
inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
inputs.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, [None] * 4))
output = helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)
graph = helper.make_graph([node], "attention", inputs, [output])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
(got,) = session.run(None, {"Q": query, "K": key, "V": value, "mask": mask})
got = got[..., 0]
print(f"got {got.tolist()}, want {want.tolist()}")
assert np.allclose(got, want), "another mask"
