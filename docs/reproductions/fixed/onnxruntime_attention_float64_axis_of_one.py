# ONNX Attention in onnxruntime, float64: every axis of size 1 is missing from the output, such as
# that of the queries while a text is continued token by token. For float64 there is no kernel but
# the body that ONNX gave the operator. With heads side by side (three axes) the session raises.
# Found with onnxruntime 1.23.2, where float32 is right. Right since 1.24.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

query = np.zeros((2, 2, 1, 2))  # [batch heads length head]: one query
key = np.zeros((2, 2, 3, 2))
want = query.shape

node = helper.make_node("Attention", ["Q", "K", "V"], ["Y"])
for dtype, kind in {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}.items():
    feeds = {n: a.astype(dtype) for n, a in {"Q": query, "K": key, "V": key}.items()}
    inputs = [helper.make_tensor_value_info(n, kind, a.shape) for n, a in feeds.items()]
    output = helper.make_tensor_value_info("Y", kind, None)
    graph = helper.make_graph([node], "attention", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    got = session.run(None, feeds)[0].shape
    print(f"{dtype}: got {got}, want {want}")
    assert got == want, "an axis is missing"
