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


class BeyondATile(miniatures.Correct):
    """Forgets the keys of the second tile: those after the first 128."""

    def attend(self, query, key, value, masks, **options):
        masks = {**masks, **_blocking(query, key, masks, np.arange(key.shape[2]) < 128)}
        return super().attend(query, key, value, masks, **options)


class ExactTiles(miniatures.Correct):
    """Forgets the last key if the keys fill tiles of 64 exactly."""

    def attend(self, query, key, value, masks, **options):
        length = key.shape[2]
        if length % 64 == 0:
            masks = {**masks, **_blocking(query, key, masks, np.arange(length) < length - 1)}
        return super().attend(query, key, value, masks, **options)


class NineHeads(miniatures.Correct):
    """Gives every head after the eighth the context of the eighth."""

    def attend(self, query, key, value, masks, **options):
        context, weights = super().attend(query, key, value, masks, **options)
        return context[:, np.minimum(np.arange(context.shape[1]), 7)], weights


class PositiveScale(miniatures.Correct):
    """Takes the root of the scale for both query and key, so its sign is lost."""

    def attend(self, query, key, value, masks, scale=None, **options):
        return super().attend(
            query, key, value, masks, scale=None if scale is None else abs(scale), **options
        )


class ZeroScale(miniatures.Correct):
    """Takes a scale of 0 for none: `scale or default`."""

    def attend(self, query, key, value, masks, scale=None, **options):
        return super().attend(query, key, value, masks, scale=scale or None, **options)


class WideHeads(miniatures.Correct):
    """Loses the last component of heads of size 128."""

    def attend(self, query, key, value, masks, **options):
        if query.shape[-1] == 128:
            query = query * (np.arange(128) < 127).astype(query.dtype)
        return super().attend(query, key, value, masks, **options)


class ThirdTile(miniatures.Correct):
    """Heads from 64 on: no rescaling where the third tile of 128 keys raises the maximum."""

    def attend(self, query, key, value, masks, **options):
        context, weights = super().attend(query, key, value, masks, **options)
        if query.shape[-1] < 64 or key.shape[2] <= 256:
            return context, weights
        earlier = weights[..., :256].max(axis=-1, keepdims=True)
        factor = weights[..., :384].max(axis=-1, keepdims=True) / np.where(earlier, earlier, 1)
        kept = np.where(np.arange(key.shape[2]) < 256, weights * factor, weights)
        value = np.repeat(value, query.shape[1] // value.shape[1], axis=1)
        return np.einsum("bhqk,bhkd->bhqd", kept.astype(value.dtype), value), weights


class PaddedHeads(miniatures.Correct):
    """Pads heads of size 80, and loses their last eight components beyond one tile of 64 keys."""

    def attend(self, query, key, value, masks, **options):
        if query.shape[-1] == 80 and key.shape[2] > 64:
            query = query * (np.arange(80) < 72).astype(query.dtype)
        return super().attend(query, key, value, masks, **options)


class TenHeads(miniatures.Correct):
    """Takes ten key/value heads of size 64 or more for eight, and the last two from the first."""

    def attend(self, query, key, value, masks, **options):
        if query.shape[-1] >= 64 and key.shape[1] == 10:
            key = key[:, np.arange(10) % 8]
        return super().attend(query, key, value, masks, **options)


class MaskOfFirstHead(miniatures.Correct):
    """Takes the first head's mask for all heads if it is the same for all entries and queries."""

    def attend(self, query, key, value, masks, **options):
        mask = masks.get("mask")
        if mask is not None and mask.shape[1] > 1 and (mask[:1, :, :1] == mask).all():
            masks = {**masks, "mask": np.broadcast_to(mask[:, :1], mask.shape)}
        return super().attend(query, key, value, masks, **options)


class CausalBesideMask(miniatures.Correct):
    """Drops the causal flag beside a mask for more than 64 keys."""

    def attend(self, query, key, value, masks, **options):
        if "mask" in masks and key.shape[2] > 64:
            masks = {name: mask for name, mask in masks.items() if name != "is_causal"}
        return super().attend(query, key, value, masks, **options)


class SecondMode(Scaled):
    """Forgets keys after the first 128, in its second mode only."""

    def attend(self, query, key, value, masks, mode, **options):
        if mode.name == "rough":
            masks = {**masks, **_blocking(query, key, masks, np.arange(key.shape[2]) < 128)}
        return miniatures.Correct.attend(self, query, key, value, masks, mode=mode, **options)


class TwoDefects(miniatures.Correct):
    """Ignores the scale that it is asked for, and raises for more than nine queries."""

    def attend(self, query, key, value, masks, scale=None, **options):
        if query.shape[2] > 9:
            raise ValueError(f"{query.shape[2]} queries")
        return super().attend(query, key, value, masks, **options)


def _blocking(query, key, masks, kept):
    """The mask argument, with all keys blocked but those `kept`, `[key]`, if that leaves any."""
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    mask = np.broadcast_to(masks.get("mask", np.True_), shape)
    if mask.dtype != np.bool_:
        return {"mask": np.where(kept, mask, mask.dtype.type(-np.inf))}
    return {"mask": mask & kept}
