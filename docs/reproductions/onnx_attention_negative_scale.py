# ONNX Attention in onnx.reference.ReferenceEvaluator: a negative scale gives NaN. The attribute is
# "Scaling factor applied to Q*K^T" without a bound, but query and key are each multiplied by its
# root (op_attention.py, scale = np.sqrt(scale)), and so they are in the operator's function body.
# Found with onnx 1.23.2 by exploration; nothing found upstream.
import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

scale = -0.5
x = np.arange(6, dtype=np.float32).reshape(1, 1, 3, 2) / 4  # [batch heads length head]

logits = scale * (x @ x.swapaxes(-1, -2))
powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
want = (powers / powers.sum(axis=-1, keepdims=True) @ x)[0, 0, 0, 0]

node = helper.make_node("Attention", ["query", "key", "value"], ["output"], scale=scale)
inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, x.shape) for n in node.input]
output = helper.make_tensor_value_info("output", TensorProto.FLOAT, None)
graph = helper.make_graph([node], "attention", inputs, [output])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
got = ReferenceEvaluator(model).run(None, dict.fromkeys(node.input, x))[0][0, 0, 0, 0]
print(f"got {got}, want {want}, apart {abs(got - want)}")
assert abs(got - want) < 1e-5, "a negative scale gives NaN"
