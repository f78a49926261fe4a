# com.microsoft.GroupQueryAttention on the CPU: local_window_size=W is the query's own key and W
# keys before it, before onnxruntime 1.24. Since then it is the own key and W − 1 before it, as in
# Mistral, so models that were exported for one of them are off by one key in the other. Documented
# as "left_window_size for causal local attention (like Mistral)" in both. Found with 1.23.2 and
# 1.24.4; changed upstream by https://github.com/microsoft/onnxruntime/pull/25927
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

size = 8
zeros = np.zeros((1, 2, size), np.float32)  # [batch length (heads head)]
value = np.repeat(np.array([1, 3], np.float32), size).reshape(1, 2, size)
want = 3.0  # a window of 1: the second query sees its own key only

given = {"query": zeros, "key": zeros, "value": value}
lengths = {"seqlens_k": np.array([1], np.int32), "total": np.array(2, np.int32)}
names = [*given, "", "", *lengths]
outputs = ["output", "present_key", "present_value"]
node = helper.make_node("GroupQueryAttention", names, outputs, domain="com.microsoft",
    num_heads=1, kv_num_heads=1, local_window_size=1)
kind = lambda a: TensorProto.FLOAT if a.dtype == np.float32 else TensorProto.INT32
given |= lengths
inputs = [helper.make_tensor_value_info(n, kind(a), a.shape) for n, a in given.items()]
typed = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
graph = helper.make_graph([node], "attention", inputs, typed)
opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
got = float(session.run(None, given)[0][0, 1, 0])
print(f"got {got}, want {want}, apart {abs(got - want)}")
assert abs(got - want) < 1e-6, "the window does not count the query's own key"
