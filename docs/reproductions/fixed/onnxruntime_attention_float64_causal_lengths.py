# ONNX Attention in onnxruntime, float64: is_causal beside nonpad_kv_seqlen is aligned top-left,
# while ONNX, and the kernels for float32 and float16 since 1.28, align it bottom-right: query i
# sees the keys up to i + nonpad_kv_seqlen - queries. For float64 there is no kernel but the body
# that ONNX gave the operator before https://github.com/onnx/onnx/pull/8068 Found with onnxruntime
# 1.31.1, where float32 is right. Right since 1.32.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

query = np.zeros((1, 1, 1, 1))  # [batch heads length head]: the last of three tokens
key = value = np.array([[[[1], [2], [4]]]], float)
want = value.mean()  # it sees all three

node = helper.make_node("Attention", ["Q", "K", "V", "", "", "", "lengths"], ["Y"], is_causal=1)
kinds = {"float64": TensorProto.DOUBLE, "float32": TensorProto.FLOAT}
for dtype, kind in kinds.items():
    inputs = [helper.make_tensor_value_info(n, kind, [1, 1, None, 1]) for n in "QKV"]
    inputs.append(helper.make_tensor_value_info("lengths", TensorProto.INT64, [1]))
    output = helper.make_tensor_value_info("Y", kind, None)
    graph = helper.make_graph([node], "attention", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=12)
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"Q": query.astype(dtype), "K": key.astype(dtype), "V": value.astype(dtype)}
    got = session.run(None, feeds | {"lengths": np.array([3])})[0].item()
    print(f"{dtype}: got {got:.4f}, want {want:.4f}")
    assert np.isclose(got, want), "the last query does not see every key"
