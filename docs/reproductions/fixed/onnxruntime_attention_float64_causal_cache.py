# ONNX Attention in onnxruntime, float64: with is_causal the keys in a cache, past_key, are not
# counted, so that a query sees only as many keys as if it were the first. ONNX, and the kernels for
# float32 and float16, show it the cache as well. For float64 there is no kernel but the body that
# ONNX gave the operator; of its reference evaluator that was mended by
# https://github.com/onnx/onnx/pull/7297 Found with onnxruntime 1.23.2, where float32 is right.
# Right since 1.24.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

query = np.zeros((2, 2, 2, 2))  # [batch heads length head]: two tokens after two in the cache
past = np.full((2, 2, 2, 2), 1.0)
new = np.full((2, 2, 2, 2), 4.0)
want = [(1 + 1 + 4) / 3, (1 + 1 + 4 + 4) / 4]

names, outputs = ["Q", "K", "V", "", "past_key", "past_value"], ["Y", "key", "value"]
node = helper.make_node("Attention", names, outputs, is_causal=1)
for dtype, kind in {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}.items():
    given = {"Q": query, "K": new, "V": new, "past_key": past, "past_value": past}
    inputs = [helper.make_tensor_value_info(n, kind, a.shape) for n, a in given.items()]
    typed = [helper.make_tensor_value_info(n, kind, None) for n in outputs]
    graph = helper.make_graph([node], "attention", inputs, typed)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    got = session.run(["Y"], {n: a.astype(dtype) for n, a in given.items()})[0][0, 0, :, 0]
    print(f"{dtype}: got {got}, want {want}")
    assert np.allclose(got, want), "the keys in the cache are not counted"
