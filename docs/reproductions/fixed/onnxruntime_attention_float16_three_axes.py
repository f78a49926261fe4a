# ONNX Attention in onnxruntime on the CPU, float16, with heads side by side (three axes): wrong
# numbers with fewer key/value heads than query heads, in 1.23 with any number of heads. The same
# inputs in float32 are right. Found with onnxruntime 1.23.2 and 1.24.4. Right since 1.25.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

random = np.random.default_rng(0)
heads, shared, size = 4, 2, 8
query = random.normal(size=(2, 5, heads * size))  # [batch length (heads head)]
key, value = random.normal(size=(2, 2, 7, shared * size))

node = helper.make_node("Attention", ["Q", "K", "V"], ["Y"], q_num_heads=heads, kv_num_heads=shared)
found = {}
for dtype, kind in {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}.items():
    shapes = {"Q": query.shape, "K": key.shape, "V": value.shape}
    inputs = [helper.make_tensor_value_info(n, kind, shape) for n, shape in shapes.items()]
    output = helper.make_tensor_value_info("Y", kind, None)
    graph = helper.make_graph([node], "attention", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"Q": query.astype(dtype), "K": key.astype(dtype), "V": value.astype(dtype)}
    (found[dtype],) = session.run(None, feeds)
got, want = found["float16"].astype(float), found["float32"]
worst = np.unravel_index(np.abs(got - want).argmax(), want.shape)
print(f"got {got[worst]:.4f}, want {want[worst]:.4f}")
assert np.allclose(got, want, atol=0.02), "not what float32 gives"
