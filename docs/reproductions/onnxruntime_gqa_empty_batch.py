# com.microsoft.GroupQueryAttention on the CPU: a batch without entries ends the process (SIGFPE),
# where MultiHeadAttention returns an empty array (since 1.29; before, it died too). Found with
# onnxruntime 1.32.0; nothing found upstream.
import subprocess
import sys

CALL = """
import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

x = np.ones(({batch}, 2, 8), np.float32)  # [batch length (heads head)], one head
given = {{"query": x, "key": x, "value": x, "lengths": np.full({batch}, 1, np.int32)}}
given["total"] = np.array(2, np.int32)
kind = lambda a: TensorProto.FLOAT if a.dtype == np.float32 else TensorProto.INT32
inputs = [helper.make_tensor_value_info(n, kind(a), a.shape) for n, a in given.items()]
names = ["query", "key", "value", "", "", "lengths", "total"]
results = ["output", "present_key", "present_value"]
node = helper.make_node(
    "GroupQueryAttention", names, results, domain="com.microsoft", num_heads=1, kv_num_heads=1
)
outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in results]
graph = helper.make_graph([node], "attention", inputs, outputs)
opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
try:
    session.run(["output"], given)
except Exception:
    pass  # refused
"""

want, got = (
    subprocess.run([sys.executable, "-c", CALL.format(batch=batch)], check=False).returncode
    for batch in (2, 0)
)
print(f"exit code: got {got}, want {want}, apart {abs(got - want)}")
assert got == want, "the process died"
