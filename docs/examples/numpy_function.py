"""The smallest adapter: a NumPy function on projected heads, with one mask argument.

    mha-conformance run docs/examples/numpy_function.py:attention

The suite projects the inputs to `[batch heads length head]`, calls the function, and projects the
result back. NumPy has no derivatives and no bfloat16, so both are `unsupported`; this is no pass.
"""

import numpy as np

from conformance import MaskArgument, attention_function


@attention_function("numpy", MaskArgument("mask", "batch heads query key", true="attends"))
def attention(query, key, value, mask=True):
    """Softmax attention over the keys that `mask` allows."""
    logits = (query * query.shape[-1] ** -0.5) @ key.swapaxes(-1, -2)
    logits = np.where(mask, logits, -np.inf)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True) @ value
