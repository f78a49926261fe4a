# ONNX Attention in onnxruntime, float64: a mask of numbers, of the inputs' own dtype as the operator
# asks, makes a model that does not load. For float64 there is no kernel but the body that ONNX gave
# the operator, where the mask is added to numbers in float32. Found with onnxruntime 1.23.2. Right
# since 1.24, but beside is_causal or nonpad_kv_seqlen only since 1.32.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

query = np.zeros((2, 2, 3, 2))  # [batch heads length head]
value = query + np.array([1, 2, 6])[:, None]
mask = np.array([[0, -np.inf, -np.inf], [0, 0, -np.inf], [0, 0, 0]])
want = [1, (1 + 2) / 2, (1 + 2 + 6) / 3]

node = helper.make_node("Attention", ["Q", "K", "V", "mask"], ["Y"])
for dtype, kind in {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}.items():
    given = {"Q": query, "K": query, "V": value, "mask": mask}
    inputs = [helper.make_tensor_value_info(n, kind, a.shape) for n, a in given.items()]
    output = helper.make_tensor_value_info("Y", kind, None)
    graph = helper.make_graph([node], "attention", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    got = session.run(None, {n: a.astype(dtype) for n, a in given.items()})[0][0, 0, :, 0]
    print(f"{dtype}: got {got}, want {want}")
    assert np.allclose(got, want), "the mask is not added"
