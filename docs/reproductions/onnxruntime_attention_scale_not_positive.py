# ONNX Attention in onnxruntime on the CPU: a scale of 0 or below is refused in float32, "scale must
# be greater than 0" (core/providers/cpu/llm/attention.cc), and in float64, where the operator is
# taken apart, a negative one gives NaN, because its root is taken. ONNX says "Scaling factor
# applied to Q*K^T", without a bound. Found with onnxruntime 1.31.1 by exploration; nothing found
# upstream.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

scale = -0.5

def answer(kind, dtype):
    x = np.arange(6).reshape(1, 1, 3, 2).astype(dtype) / 4  # [batch heads length head]
    logits = scale * (x @ x.swapaxes(-1, -2))
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    want = (powers / powers.sum(axis=-1, keepdims=True) @ x)[0, 0, 0, 0]
    node = helper.make_node("Attention", ["query", "key", "value"], ["output"], scale=scale)
    inputs = [helper.make_tensor_value_info(n, kind, x.shape) for n in node.input]
    output = helper.make_tensor_value_info("output", kind, None)
    graph = helper.make_graph([node], "attention", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    try:
        session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        got = session.run(None, dict.fromkeys(node.input, x))[0][0, 0, 0, 0]
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        got = float("nan")
    print(f"{np.dtype(dtype)}: got {got}, want {want}, apart {abs(got - want)}")
    return abs(got - want) < 1e-5

right = [answer(TensorProto.FLOAT, np.float32), answer(TensorProto.DOUBLE, np.float64)]
assert all(right), "a negative scale is refused, or gives NaN"
