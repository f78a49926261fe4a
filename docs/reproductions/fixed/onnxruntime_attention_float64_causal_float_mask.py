# ONNX Attention in onnxruntime, float64: with is_causal (or nonpad_kv_seqlen) a mask of numbers, of
# the inputs' own dtype as the operator asks, makes a model that does not load. For float64 there is
# no kernel but the body that ONNX gives the operator, where the mask is added to a triangle in
# float32. For bfloat16 known upstream: https://github.com/onnx/onnx/pull/7776 Found with
# onnxruntime 1.31.1. Right since 1.32.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

x = np.array([[[[1], [2], [4]]]], float)  # [batch heads length head]; query, key and value
mask = np.zeros((3, 3))

logits = np.where(np.tri(3, dtype=bool), np.einsum("bhqd,bhkd->bhqk", x, x) + mask, -np.inf)
weights = np.exp(logits - logits.max(-1, keepdims=True))
weights /= weights.sum(-1, keepdims=True)
want = np.einsum("bhqk,bhkd->bhqd", weights, x)[0, 0, :, 0]

node = helper.make_node("Attention", ["Q", "K", "V", "mask"], ["Y"], is_causal=1)
inputs = [helper.make_tensor_value_info(n, TensorProto.DOUBLE, [1, 1, 3, 1]) for n in "QKV"]
inputs.append(helper.make_tensor_value_info("mask", TensorProto.DOUBLE, [3, 3]))
output = helper.make_tensor_value_info("Y", TensorProto.DOUBLE, None)
graph = helper.make_graph([node], "attention", inputs, [output])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
print(f"want {want}")
session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
(got,) = session.run(None, {"Q": x, "K": x, "V": x, "mask": mask})
got = got[0, 0, :, 0]
print(f"got {got}")
assert np.allclose(got, want), "not the definition's"
