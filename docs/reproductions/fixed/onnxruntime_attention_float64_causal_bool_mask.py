# ONNX Attention in onnxruntime, float64: beside a mask of booleans is_causal does nothing, so that
# queries see later keys. ONNX, and the kernels for float32 and float16, block what either blocks.
# For float64 there is no kernel but the body that ONNX gave the operator. Found with onnxruntime
# 1.23.2, where float32 is right. Right since 1.24.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

query = np.zeros((2, 2, 3, 2))  # [batch heads length head]
value = query + np.array([1, 2, 6])[:, None]
mask = np.ones((3, 3), bool)  # blocks nothing
want = [1, (1 + 2) / 2, (1 + 2 + 6) / 3]

node = helper.make_node("Attention", ["Q", "K", "V", "mask"], ["Y"], is_causal=1)
for dtype, kind in {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}.items():
    inputs = [helper.make_tensor_value_info(n, kind, query.shape) for n in "QKV"]
    inputs.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, mask.shape))
    output = helper.make_tensor_value_info("Y", kind, None)
    graph = helper.make_graph([node], "attention", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"Q": query.astype(dtype), "K": query.astype(dtype), "V": value.astype(dtype)}
    got = session.run(None, feeds | {"mask": mask})[0][0, 0, :, 0]
    print(f"{dtype}: got {got}, want {want}")
    assert np.allclose(got, want), "a query sees later keys"
