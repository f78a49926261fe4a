"""One right attention and four wrong ones, as a user would write and plug them in.

mha-conformance run tests/mutants/wrong_attentions.py:polarity_flipped
"""

import math

import torch

from conformance import MaskArgument, attention_function

MASK = MaskArgument("mask", "batch heads query key", true="attends", broadcasts=True)


def declared(function):
    """The same declaration for all: `mask` is True where a query may attend."""
    return attention_function("torch", MASK, returns_weights="per head")(function)


def attend(logits, value, axis=-1):
    weights = torch.softmax(logits, dim=axis)
    return weights @ value, weights


def scores(query, key, scale=None):
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return scale * query @ key.transpose(-1, -2)


@declared
def right(query, key, value, mask=None, scale=None):
    logits = scores(query, key, scale)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    return attend(logits, value)


@declared
def polarity_flipped(query, key, value, mask=None):
    logits = scores(query, key)
    if mask is not None:
        logits = logits.masked_fill(mask, -math.inf)
    return attend(logits, value)


@declared
def scale_by_d(query, key, value, mask=None):
    logits = scores(query, key, scale=1 / query.shape[-1])
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    return attend(logits, value)


@declared
def softmax_over_queries(query, key, value, mask=None):
    logits = scores(query, key)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    return attend(logits, value, axis=-2)


@declared
def mask_added(query, key, value, mask=None):
    logits = scores(query, key)
    if mask is not None:
        logits = logits + mask.to(logits.dtype)
    return attend(logits, value)
