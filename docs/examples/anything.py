"""An adapter that implements `run` itself: NumPy in, NumPy out, and anything in between.

    mha-conformance run docs/examples/anything.py:Loop

This one computes the definition in loops over single numbers. It could just as well write the
arrays to a file and start a program in another language. Nothing is translated for such an adapter:
it reads the problem's mask, causal flag, bias and weights in their canonical form.
"""

import math

import numpy as np

from conformance import Adapter, Answer, Unsupported


class Loop(Adapter):
    """Attention, one number at a time."""

    title = "the definition as loops"
    custom_scale = True
    differentiable = False
    returns_weights = "per head"
    fully_masked_row = "output bias"

    def run(self, problem, call):
        """Return output and weights, but no gradients."""
        if problem.shape.score != "scaled-dot":
            raise Unsupported("no additive score")
        if problem.shape.group > 1:
            raise Unsupported("no fewer key/value heads than query heads")
        q = project(problem.query, problem.weights.query, problem.weights.query_bias)
        k = project(problem.key, problem.weights.key, problem.weights.key_bias)
        v = project(problem.value, problem.weights.value, problem.weights.value_bias)
        allowed = problem.allowed_in_full()  # mask and causal flag in one; True = may attend
        added = np.zeros_like(allowed, float) if problem.attn_bias is None else problem.attn_bias
        added = np.broadcast_to(added, allowed.shape)
        weights = np.zeros(allowed.shape)
        context = np.zeros((*allowed.shape[:3], v.shape[-1]))
        for b, h, i in np.ndindex(allowed.shape[:3]):
            keys = np.flatnonzero(allowed[b, h, i])
            if not keys.size:
                continue  # the empty sum
            logits = [problem.logit_scale * math.fsum(q[b, h, i] * k[b, h, j]) for j in keys]
            logits += added[b, h, i, keys]
            powers = [math.exp(logit - max(logits)) for logit in logits]
            for j, power in zip(keys, powers, strict=True):
                weights[b, h, i, j] = power / math.fsum(powers)
                context[b, h, i] += weights[b, h, i, j] * v[b, h, j]
        output = np.einsum("bhqd,hde->bqe", context, problem.weights.output)
        if problem.weights.output_bias is not None:
            output += problem.weights.output_bias
        to_dtype = problem.format.round  # float64 that holds only numbers which the dtype has
        return Answer(to_dtype(output), to_dtype(weights), dtypes={"output": problem.dtype})


def project(values, weight, bias):
    """`[batch length embed]` to `[batch heads length head]`."""
    heads = np.einsum("ble,ehd->bhld", values, weight)
    return heads if bias is None else heads + bias[:, None, :]
