# ONNX Attention in onnxruntime, float64, with heads side by side (three axes): query, key and value
# are reshaped to four axes without a transposition, so that the numbers of one token are taken for
# several tokens. For float64 there is no kernel but the body that ONNX gave the operator; of its
# reference evaluator the same is told in https://github.com/onnx/onnx/issues/7118 Found with
# onnxruntime 1.23.2, where float32 is right. Right since 1.24.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

query = np.zeros((2, 2, 4))  # [batch length (heads head)]: both heads see both keys alike
key = query
value = np.arange(16.0).reshape(2, 2, 4)
want = value.mean(1)[0]

node = helper.make_node("Attention", ["Q", "K", "V"], ["Y"], q_num_heads=2, kv_num_heads=2)
for dtype, kind in {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}.items():
    inputs = [helper.make_tensor_value_info(n, kind, query.shape) for n in "QKV"]
    output = helper.make_tensor_value_info("Y", kind, None)
    graph = helper.make_graph([node], "attention", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"Q": query.astype(dtype), "K": key.astype(dtype), "V": value.astype(dtype)}
    got = session.run(None, feeds)[0][0, 0]
    print(f"{dtype}: got {got}, want {want}")
    assert np.allclose(got, want), "the mean of other numbers than those of the head"
