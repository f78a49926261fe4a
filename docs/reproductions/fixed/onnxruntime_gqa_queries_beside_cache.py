# com.microsoft.GroupQueryAttention on the CPU before 1.20: several queries beside a cache are taken
# for a prompt, and the cache for nothing. Since 1.20 that is right for one sequence, and refused
# for several. Found with onnxruntime 1.18.1.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

size = 8
query = np.zeros((1, 2, size), np.float32)  # [batch length (heads head)]
keys = np.repeat(np.array([1, 2, 4], np.float32), size).reshape(1, 3, size)
want = np.array([(1 + 2) / 2, (1 + 2 + 4) / 3])  # one key is in the cache, two are the queries' own

given = {"query": query, "key": keys[:, 1:], "value": keys[:, 1:]}
given |= {"past_key": keys[:, None, :1], "past_value": keys[:, None, :1]}
given |= {"seqlens_k": np.array([2], np.int32), "total": np.array(3, np.int32)}
names = ["output", "present_key", "present_value"]
node = helper.make_node("GroupQueryAttention", list(given), names, domain="com.microsoft",
    num_heads=1, kv_num_heads=1)
kind = lambda a: TensorProto.FLOAT if a.dtype == np.float32 else TensorProto.INT32
inputs = [helper.make_tensor_value_info(n, kind(a), a.shape) for n, a in given.items()]
outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
graph = helper.make_graph([node], "attention", inputs, outputs)
opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
got = session.run(["output"], {n: np.ascontiguousarray(a) for n, a in given.items()})[0][0, :, 0]
print(f"got {got}, want {want}")
assert np.allclose(got, want), "the cache is not attended"
