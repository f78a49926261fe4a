"""Attentions that are wrong beyond a boundary only: what a search must find, exactly.

NumPy only. Each is right wherever its sentence does not say otherwise.
"""

from __future__ import annotations

import numpy as np

from conformance import Mode, Unsupported
from mutants import miniatures


class Long(miniatures.Correct):
    """Wrong for more than six keys."""

    def attend(self, query, key, value, masks, **options):
        context, weights = super().attend(query, key, value, masks, **options)
        return context * (1 + (key.shape[2] > 6)), weights


class Batched(miniatures.Correct):
    """Wrong for a batch: every entry gets the first one's answer."""

    def attend(self, query, key, value, masks, **options):
        context, weights = super().attend(query, key, value, masks, **options)
        return np.broadcast_to(context[:1], context.shape).copy(), weights


class Grouped(miniatures.Correct):
    """Wrong for fewer key/value heads than query heads: they are taken in turn."""

    def attend(self, query, key, value, masks, **options):
        group = query.shape[1] // key.shape[1]
        key, value = (np.tile(x, (1, group, 1, 1)) for x in (key, value))
        return super().attend(query, key, value, masks, **options)


class Half(miniatures.Correct):
    """Wrong in float16 only: a thousandth too large."""

    def attend(self, query, key, value, masks, **options):
        context, weights = super().attend(query, key, value, masks, **options)
        factor = 1.05 if query.dtype == np.float16 else 1.0
        return (context * factor).astype(query.dtype), weights


class Scaled(miniatures.Correct):
    """Ignores the scale that it is asked for, in its second mode."""

    modes = (Mode("exact"), Mode("rough"))

    def attend(self, query, key, value, masks, mode, **options):
        options = {} if mode.name == "rough" else options
        return super().attend(query, key, value, masks, **options)


class Overflows(miniatures.Correct):
    """Does not subtract the row's maximum."""

    def attend(self, query, key, value, masks, **options):
        _, weights = super().attend(query, key, value, masks, **options)
        logits = np.einsum(
            "bhqd,bhkd->bhqk", query, np.repeat(key, query.shape[1] // key.shape[1], axis=1)
        )
        if np.abs(logits).max() > 60:
            weights = np.full_like(weights, np.nan)
        value = np.repeat(value, query.shape[1] // value.shape[1], axis=1)
        return np.einsum("bhqk,bhkd->bhqd", weights, value), weights


class Narrow(miniatures.Correct):
    """Right, but takes self-attention without biases only."""

    def check_shape(self, shape):
        if shape.sharing != "self" or shape.bias:
            raise Unsupported("self-attention without biases only")
