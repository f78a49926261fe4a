# ONNX Attention in onnxruntime on the CPU: a mask for fewer keys than there are is refused. ONNX
# says "The last dimension can also be shorter than total_sequence_length and will be padded [...]
# with negative infinity", so that one mask serves a cache that is longer. Found with onnxruntime
# 1.31.1; known upstream as a TODO: https://github.com/microsoft/onnxruntime/pull/27542
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

value = np.array([1, 3, 100], np.float32).reshape(1, 1, 3, 1)  # [batch heads length head]
given = {"query": value[:, :, :1], "key": 0 * value, "value": value}
given["mask"] = np.zeros((1, 2), np.float32)  # of the first two keys
want = 2.0  # equal logits: the mean of the first two values

node = helper.make_node("Attention", list(given), ["output"])
inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in given.items()]
output = helper.make_tensor_value_info("output", TensorProto.FLOAT, None)
graph = helper.make_graph([node], "attention", inputs, [output])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
try:
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    got = float(session.run(None, given)[0][0, 0, 0, 0])
except Exception as error:
    print(f"{type(error).__name__}: {error}")
    got = float("nan")
print(f"got {got}, want {want}, apart {abs(got - want)}")
assert abs(got - want) < 1e-5, "a mask for fewer keys is refused"
