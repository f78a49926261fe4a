# ONNX Attention in onnxruntime on the CPU: the soft cap comes after the mask, so −∞ becomes −cap,
# and keys that a mask, is_causal or nonpad_kv_seqlen blocks are attended. So did ONNX say before
# https://github.com/onnx/onnx/pull/7867; mended in onnxruntime 1.27 for float32 and float16 by
# https://github.com/microsoft/onnxruntime/pull/28379, and in 1.28 for float64. Found with 1.26.0.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

zeros = np.zeros((1, 1, 2, 1), np.float32)  # [batch heads length head]
given = {"query": zeros, "key": zeros, "value": np.array([1, 3], np.float32).reshape(1, 1, 2, 1)}
want = 1.0  # the first query sees its own key only

node = helper.make_node("Attention", list(given), ["output"], is_causal=1, softcap=1.0)
inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, zeros.shape) for n in given]
output = helper.make_tensor_value_info("output", TensorProto.FLOAT, None)
graph = helper.make_graph([node], "attention", inputs, [output])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
got = float(session.run(None, given)[0][0, 0, 0, 0])
print(f"got {got}, want {want}, apart {abs(got - want)}")
assert abs(got - want) < 1e-6, "a blocked key is attended"
