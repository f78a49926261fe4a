"""com.microsoft.GroupQueryAttention of onnxruntime in a loop, as a layer that keeps a state.

The operator takes the keys and values of earlier tokens, and returns them with those of the new
ones. The projections are NumPy's.
"""

import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

from conformance import StatefulLayer

HEADS, KV_HEADS, SIZE = 4, 2, 16
PAST = ["batch", KV_HEADS, "past", SIZE]


def session():
    """Return a session with the operator alone."""
    inputs = {
        "query": (TensorProto.FLOAT, ["batch", "new", HEADS * SIZE]),
        "key": (TensorProto.FLOAT, ["batch", "new", KV_HEADS * SIZE]),
        "value": (TensorProto.FLOAT, ["batch", "new", KV_HEADS * SIZE]),
        "past_key": (TensorProto.FLOAT, PAST),
        "past_value": (TensorProto.FLOAT, PAST),
        "seqlens_k": (TensorProto.INT32, ["batch"]),
        "total_sequence_length": (TensorProto.INT32, []),
    }
    names = ["output", "present_key", "present_value"]
    options = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "domain": "com.microsoft"}
    node = helper.make_node("GroupQueryAttention", [*inputs], names, **options)
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, *told) for name, told in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    return InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


class Loop(StatefulLayer):
    """The operator, with the cache that it returned last."""

    framework = "numpy"
    width = 32
    dtypes = ("float32",)

    def build(self, dtype):
        """Return the weights, and a cache without tokens."""
        random = np.random.default_rng(0)
        sizes = {"query": HEADS, "key": KV_HEADS, "value": KV_HEADS}
        weights = {
            name: random.standard_normal((self.width, count * SIZE), dtype=np.float32) / 6
            for name, count in sizes.items()
        }
        weights["output"] = random.standard_normal((HEADS * SIZE, self.width), dtype=np.float32) / 8
        return {"weights": weights, "past": None}

    def fresh(self, layer):
        """Return the layer without a cache."""
        return {**layer, "past": None}

    def feed(self, layer, tokens):
        """Return the outputs of new tokens `[batch query width]`."""
        weights = layer["weights"]
        given = {name: tokens @ weights[name] for name in ("query", "key", "value")}
        if layer["past"] is None:
            layer["past"] = [np.zeros((len(tokens), KV_HEADS, 0, SIZE), np.float32)] * 2
        given |= dict(zip(("past_key", "past_value"), layer["past"], strict=True))
        # Beside a cache, the operator takes several tokens of one row only.
        alone = layer["past"][0].shape[2] and tokens.shape[1] > 1
        rows = [[row] for row in range(len(tokens))] if alone else [[*range(len(tokens))]]
        found = [self.run({name: array[of] for name, array in given.items()}) for of in rows]
        output, *layer["past"] = map(np.concatenate, zip(*found, strict=True))
        return output @ weights["output"]

    def run(self, given):
        """Return the outputs of the operator: the output, and keys and values of all tokens."""
        if not hasattr(self, "session"):
            self.session = session()
        total = given["past_key"].shape[2] + given["query"].shape[1]
        lengths = np.full(len(given["query"]), total - 1, np.int32)
        more = {"seqlens_k": lengths, "total_sequence_length": np.array(total, np.int32)}
        return self.session.run(None, given | more)

    def reset(self, layer):
        """Forget all tokens."""
        layer["past"] = None

    def rollback(self, layer, count):
        """Forget the last tokens."""
        layer["past"] = [heads[:, :, :-count] for heads in layer["past"]]

    def reorder(self, layer, rows):
        """Let each row go on from another one."""
        layer["past"] = [heads[rows] for heads in layer["past"]]

    def save(self, layer):
        """Return the state."""
        return layer["past"]

    def restore(self, layer, saved):
        """Go on from a state that was saved."""
        layer["past"] = saved
