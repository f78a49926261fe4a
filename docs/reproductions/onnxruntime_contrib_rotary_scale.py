# com.microsoft.RotaryEmbedding on the CPU: the attribute scale is ignored. The documentation says
# "Custom scale will be used if specified", and not what is scaled; here neither the output nor its
# angles change. Found with onnxruntime 1.32.0. Implementers of the operator noticed it, too:
# https://github.com/ROCm/AMDMIGraphX/pull/3812
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

angle = np.arange(4.0, dtype=np.float32)[:, None]  # [position pair]
given = {"input": np.ones((1, 1, 4, 2), np.float32), "position_ids": np.arange(4)[None],
         "cos_cache": np.cos(angle), "sin_cache": np.sin(angle)}

def answer(scale):
    """The first component of the last token."""
    kind = {"int64": TensorProto.INT64, "float32": TensorProto.FLOAT}
    inputs = [helper.make_tensor_value_info(n, kind[a.dtype.name], None) for n, a in given.items()]
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, None)
    node = helper.make_node("RotaryEmbedding", list(given), ["output"], domain="com.microsoft",
                            scale=scale)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "rotation", inputs, [output])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, given)[0][0, 0, -1, 0].item()

got = abs(answer(0.5) - answer(1.0))
print(f"moved by the scale: got {got}, want >0, apart {got}")
assert got > 0, "the scale is ignored"
