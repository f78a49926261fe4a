# ONNX Attention in onnx.reference.ReferenceEvaluator: with is_causal, a mask that is broadcast over
# the queries, [batch, 1, 1, key], makes every query see the first key only. The triangle is made
# for as many queries as the mask has, op_attention.py, _apply_causal: base.shape[-2:]. Found with
# onnx 1.23.2, opsets 23 to 25.
import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

x = np.array([[[[1], [2], [4]]]], np.float32)  # [batch heads length head]; query, key and value
mask = np.ones((1, 1, 1, 3), bool)  # everybody may attend every key

logits = np.einsum("bhqd,bhkd->bhqk", x, x)
logits = np.where(np.tri(3, dtype=bool) & mask, logits, -np.inf)
weights = np.exp(logits - logits.max(-1, keepdims=True))
weights /= weights.sum(-1, keepdims=True)
want = np.einsum("bhqk,bhkd->bhqd", weights, x)[0, 0, :, 0]

node = helper.make_node("Attention", ["Q", "K", "V", "attn_mask"], ["Y"], is_causal=1)
inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("Q", "K", "V")]
inputs.append(helper.make_tensor_value_info("attn_mask", TensorProto.BOOL, None))
output = helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)
graph = helper.make_graph([node], "attention", inputs, [output])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
feeds = {"Q": x, "K": x, "V": x, "attn_mask": mask}
(got,) = ReferenceEvaluator(model).run(None, feeds)
got = got[0, 0, :, 0]
print(f"got {got.ravel()[1]}, want {want.ravel()[1]}, apart {abs(got - want).max()}")
assert np.allclose(got, want), "the causal triangle was made for one query"
