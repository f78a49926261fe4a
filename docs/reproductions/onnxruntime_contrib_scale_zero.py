# com.microsoft.MultiHeadAttention and GroupQueryAttention on the CPU: scale=0 is taken for "not
# given", so the logits are multiplied by 1/sqrt(head size). The documentation says "Custom scale
# will be used if specified"; negative ones are. Found with onnxruntime 1.31.1 by exploration;
# nothing found upstream.
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

x = np.arange(16, dtype=np.float32).reshape(1, 2, 8) / 8  # [batch length (heads head)], one head
want = x.mean(axis=1)[0, 0]  # of the last query, causal or not: all logits are 0

def answer(operator, given, heads):
    given = {"query": x, "key": x, "value": x, **given}
    kind = lambda a: TensorProto.FLOAT if a.dtype == np.float32 else TensorProto.INT32
    inputs = [helper.make_tensor_value_info(n, kind(a), a.shape) for n, a in given.items()]
    names = [*list(given)[:3], "", "", *list(given)[3:]] if len(given) > 3 else list(given)
    results = ["output", "present_key", "present_value"][: 3 if len(given) > 3 else 1]
    node = helper.make_node(operator, names, results, domain="com.microsoft", scale=0.0, **heads)
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in results]
    graph = helper.make_graph([node], "attention", inputs, outputs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    got = session.run(["output"], given)[0][0, -1, 0]
    print(f"{operator}: got {got}, want {want}, apart {abs(got - want)}")
    return abs(got - want) < 1e-5

lengths = {"seqlens_k": np.array([1], np.int32), "total": np.array(2, np.int32)}
right = [answer("MultiHeadAttention", {}, {"num_heads": 1})]
right += [answer("GroupQueryAttention", lengths, {"num_heads": 1, "kv_num_heads": 1})]
assert all(right), "a scale of 0 is taken for none"
