"""Deliberate mistakes, so that you can see what a failure looks like before you meet one.

    mha-conformance run docs/examples/mistakes.py:flipped_mask --case key-padding --strict

Each is the smallest adapter, numpy_function.py, with one common mistake.
"""

import math

import numpy as np

from conformance import MaskArgument, attention_function

ATTENDS = MaskArgument("mask", "batch heads query key", true="attends")
BLOCKS = MaskArgument("mask", "batch heads query key", true="blocks")


def attention(query, key, value, mask=True):
    """The correct function that the mistakes below change."""
    logits = query @ key.swapaxes(-1, -2) * query.shape[-1] ** -0.5
    logits = np.where(mask, logits, -np.inf)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True) @ value


@attention_function("numpy", BLOCKS)
def flipped_mask(query, key, value, mask=True):
    """The declaration says that True blocks, but in the code True attends."""
    return attention(query, key, value, mask)


@attention_function("numpy", ATTENDS)
def forgotten_scale(query, key, value, mask=True):
    """The logits are not divided by the root of the head size."""
    return attention(query * math.sqrt(query.shape[-1]), key, value, mask)


@attention_function("numpy", ATTENDS, returns_weights="per head")
def finite_mask(query, key, value, mask=True):
    """Blocked logits become -10: the mask leaks, as `mha-conformance heads` shows."""
    logits = query @ key.swapaxes(-1, -2) * query.shape[-1] ** -0.5
    logits = np.where(mask, logits, -10.0)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights = powers / powers.sum(axis=-1, keepdims=True)
    return weights @ value, weights


@attention_function("numpy", ATTENDS)
def float64_scale(query, key, value, mask=True):
    """np.sqrt returns a NumPy float64, and NumPy promotes the arrays to it."""
    logits = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    logits = np.where(mask, logits, -np.inf)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True) @ value
