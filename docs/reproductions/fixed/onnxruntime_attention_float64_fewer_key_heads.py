# ONNX Attention in onnxruntime, float64, with fewer key/value heads than query heads: the heads of
# key and value are repeated as a whole, 0 1 0 1, while ONNX, and the kernels for float32 and
# float16, repeat each, 0 0 1 1. For float64 there is no kernel but the body that ONNX gave the
# operator before https://github.com/onnx/onnx/pull/7274 Found with onnxruntime 1.23.2, where
# float32 is right. Right since 1.24.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

query = np.zeros((2, 4, 2, 2))  # [batch heads length head]
key = np.zeros((2, 2, 3, 2))
value = key + np.array([10, 20])[:, None, None]  # a number for each head
want = [10, 10, 20, 20]

node = helper.make_node("Attention", ["Q", "K", "V"], ["Y"])
for dtype, kind in {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}.items():
    feeds = {n: a.astype(dtype) for n, a in {"Q": query, "K": key, "V": value}.items()}
    inputs = [helper.make_tensor_value_info(n, kind, a.shape) for n, a in feeds.items()]
    output = helper.make_tensor_value_info("Y", kind, None)
    graph = helper.make_graph([node], "attention", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    got = session.run(None, feeds)[0][0, :, 0, 0]
    print(f"{dtype}: got {got}, want {want}")
    assert np.allclose(got, want), "a query head has the values of another head"
