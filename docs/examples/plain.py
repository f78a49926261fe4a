"""A function that says nothing of itself, to be wrapped by `mha-conformance new-adapter`."""

import numpy as np


def attention(q, k, v, mask=None):
    """Arrays are `[batch heads length head]`; True in the mask blocks."""
    logits = q * q.shape[-1] ** -0.5 @ k.swapaxes(-1, -2)
    if mask is not None:
        logits = np.where(mask, -np.inf, logits)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True) @ v
