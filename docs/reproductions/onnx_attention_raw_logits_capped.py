# ONNX Attention in onnx.reference.ReferenceEvaluator: with a soft cap, the fourth output in mode 0,
# "raw QK matmul result", holds the capped logits, as in mode 1. The cap overwrites the array that
# is returned (op_attention.py, qk_matmul_output = _softcap(...)). onnxruntime 1.31.1 returns the
# raw logits. Found with onnx 1.23.2; nothing found upstream. The cap was put before the mask by
# https://github.com/onnx/onnx/pull/7867
import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

query = np.full((1, 1, 1, 1), 3, np.float32)  # [batch heads length head]
ones = np.ones_like(query)
want = 3.0  # 3 · 1, and the scale is 1

outputs = ["output", "", "", "logits"]
node = helper.make_node("Attention", ["query", "key", "value"], outputs, softcap=1.0)
inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ones.shape) for n in node.input]
typed = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs if n]
graph = helper.make_graph([node], "attention", inputs, typed)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
given = {"query": query, "key": ones, "value": ones}
got = float(ReferenceEvaluator(model).run(["logits"], given)[0][0, 0, 0, 0])
print(f"got {got}, want {want}, apart {abs(got - want)}")
assert abs(got - want) < 1e-5, "the raw logits are capped"
