# ONNX Attention in onnxruntime on the CPU, before 1.29, with heads side by side (three axes): fewer
# values than keys are not refused, and what lies behind the values in memory is read.
# Found with onnxruntime 1.23.2 to 1.28.0; probe/bad-input, mode three-axes.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

query = np.zeros((1, 1, 2), np.float32)  # [batch length (heads head)]
key = np.zeros((1, 6, 2), np.float32)
memory = np.full(12, 1000, np.float32)
memory[:6] = 1
value = memory[:6].reshape(1, 3, 2)  # three of the six that there should be

node = helper.make_node("Attention", ["Q", "K", "V"], ["Y"], q_num_heads=1, kv_num_heads=1)
names = ("Q", "K", "V")
inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None] * 3) for n in names]
output = helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)
graph = helper.make_graph([node], "attention", inputs, [output])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
try:
    (got,) = session.run(None, {"Q": query, "K": key, "V": value})
except Exception as error:
    print(f"refused: {str(error).splitlines()[0][:100]}")
else:
    print(f"got {got.tolist()}, though every value that was passed is 1")
    assert np.allclose(got, 1), "read beyond the values"
