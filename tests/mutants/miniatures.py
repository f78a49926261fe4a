"""Small attentions that misbehave in one way each, always the same: doubles for tests.

    mha-conformance run tests/mutants/miniatures.py:Inverted

NumPy only, so that each can be run in a second, and without any framework installed.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from conformance import (
    Adapter,
    Answer,
    CausalFlag,
    Function,
    Layer,
    MaskArgument,
    Mode,
    Unavailable,
    Unsupported,
    attention_function,
)
from conformance.adapter.arguments import Spelling

MASK = MaskArgument("mask", "batch heads query key", true="attends", number="added")


def attention(query, key, value, mask=None, is_causal=False, scale=None):
    """Context and weights of `[batch heads length head]`, in the dtype of the query."""
    key, value = (np.repeat(x, query.shape[1] // x.shape[1], axis=1) for x in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    logits = np.einsum("bhqd,bhkd->bhqk", query, key) * query.dtype.type(factor)
    if mask is not None:
        logits = np.where(mask, logits, -np.inf) if mask.dtype == np.bool_ else logits + mask
    if is_causal:
        logits = np.where(np.tri(*logits.shape[2:], dtype=np.bool_), logits, -np.inf)
    peak = logits.max(axis=-1, keepdims=True)
    powers = np.exp(logits - np.where(np.isfinite(peak), peak, 0))
    total = powers.sum(axis=-1, keepdims=True)
    weights = (powers / np.where(total > 0, total, 1)).astype(query.dtype)
    return np.einsum("bhqk,bhkd->bhqd", weights, value), weights


class Correct(Function):
    """Right in everything that it declares."""

    grouped = True
    custom_scale = True
    returns_weights = "per head"
    fully_masked_row = "output bias"
    mask_arguments = (MASK,)
    causal_flag = CausalFlag("is_causal", alignment="top-left")

    def attend(self, query, key, value, masks, **options):
        return attention(query, key, value, **masks, **options)


class Inverted(Correct):
    """Takes True for blocked, and says otherwise."""

    def attend(self, query, key, value, masks, **options):
        turned = {n: ~m if getattr(m, "dtype", None) == np.bool_ else m for n, m in masks.items()}
        return attention(query, key, value, **turned, **options)


class Ignored(Correct):
    """Takes a mask, and attends to everything all the same."""

    def attend(self, query, key, value, masks, **options):
        masks.pop("mask", None)
        return super().attend(query, key, value, masks, **options)


class Observant(Correct):
    """Right, but for a characteristic that it declares wrongly."""

    fully_masked_row = "nan"


class Moded(Correct):
    """Mode "exact" is right, mode "rough" is not, and only some cases look at it."""

    modes = (Mode("exact"), Mode("rough", every_case=False))

    def attend(self, query, key, value, masks, mode, **options):
        context, weights = attention(query, key, value, **masks, **options)
        return (context * (1.0 if mode.name == "exact" else 1.01)).astype(context.dtype), weights


class FusedSelfAttention(Correct):
    """Takes another path if query, key and value are one array, as fused kernels do.

    There a fully masked query gets NaN, and the causal flag does nothing.
    """

    fully_masked_row = None

    def run(self, problem, call):
        if problem.shape.sharing != "self" or call.spelling is None:
            return super().run(problem, call)
        given = {n: a for n, a in call.spelling.arguments.items() if n != "is_causal"}
        answer = super().run(problem, replace(call, spelling=Spelling("fused", given)))
        seen = answer.weights.any(axis=(1, 3))[..., None]
        return replace(answer, output=np.where(seen, answer.output, np.nan))


class InexpressibleMasks(Correct):
    """Its adapter has no way to pass a mask on; the implementation was never asked."""

    def attend(self, query, key, value, masks, **options):
        if masks:
            raise Unsupported("no mask fits into the cache")
        return super().attend(query, key, value, masks, **options)


class ShortWithMasks(Correct):
    """Answers with a query too few if there is a mask."""

    def attend(self, query, key, value, masks, **options):
        context, _ = super().attend(query, key, value, masks, **options)
        return context[:, :, 1:] if masks else context


class Raises(Correct):
    """Raises for masks, in two lines, and answers everything else."""

    def attend(self, query, key, value, masks, **options):
        if "mask" in masks:
            raise ValueError("this mask\nis not for me")
        return super().attend(query, key, value, masks, **options)


class Exits(Correct):
    """Ends the program for masks."""

    def attend(self, query, key, value, masks, **options):
        if "mask" in masks:
            sys.exit("no masks")
        return super().attend(query, key, value, masks, **options)


class Dies(Correct):
    """Takes the whole process away for masks."""

    def attend(self, query, key, value, masks, **options):
        if "mask" in masks:
            os._exit(7)
        return super().attend(query, key, value, masks, **options)


class Hangs(Correct):
    """Never answers a problem with a mask."""

    def attend(self, query, key, value, masks, **options):
        if "mask" in masks:
            time.sleep(600)
        return super().attend(query, key, value, masks, **options)


class HangsLater(Correct):
    """Never answers in its second mode."""

    modes = (Mode("first"), Mode("second"))

    def attend(self, query, key, value, masks, mode, **options):
        if mode.name == "second":
            time.sleep(600)
        return super().attend(query, key, value, masks, **options)


class Refuses(Correct):
    """Cannot express anything."""

    def attend(self, query, key, value, masks, **options):
        raise Unsupported("today I cannot")


class Puzzled(Correct):
    """Has a mistake in what it says about shapes."""

    def check_shape(self, shape):
        raise KeyError("no such shape")


class Unready(Correct):
    """What it needs is not there."""

    def prepare(self):
        raise Unavailable("the abacus is not installed")

    def attend(self, query, key, value, masks, **options):
        self.prepare()


class Lazy(Correct):
    """Imports a package when it is called that nobody has."""

    def attend(self, query, key, value, masks, **options):
        import no_such_package_anywhere  # noqa: F401


class ReturnsList(Correct):
    """A list of lists, which einsum would take for an array."""

    def attend(self, query, key, value, masks, **options):
        return super().attend(query, key, value, masks, **options)[0].tolist()


class Foreign:
    """An array of another framework, which NumPy would convert without a word."""

    def __init__(self, array):
        self.array = array
        self.shape = array.shape

    def __array__(self, dtype=None, copy=None):
        return self.array


class ReturnsForeign(Correct):
    """An array of another framework."""

    def attend(self, query, key, value, masks, **options):
        return Foreign(super().attend(query, key, value, masks, **options)[0])


class ForeignWeights(Correct):
    """An output of its own framework, and weights of another."""

    def attend(self, query, key, value, masks, **options):
        context, weights = super().attend(query, key, value, masks, **options)
        return context, Foreign(weights)


class WrongShape(Correct):
    """One query too few."""

    def attend(self, query, key, value, masks, **options):
        return super().attend(query, key, value, masks, **options)[0][:, :, 1:]


class OneHead(Correct):
    """The mean over heads, as an axis of size 1, which einsum would broadcast."""

    def attend(self, query, key, value, masks, **options):
        context, _ = super().attend(query, key, value, masks, **options)
        return context.mean(axis=1, keepdims=True, dtype=context.dtype)


class WrongDtype(Correct):
    """Right, in double precision whatever it is given."""

    def attend(self, query, key, value, masks, **options):
        return tuple(x.astype(np.float64) for x in super().attend(query, key, value, masks))


class Raw(Adapter):
    """NumPy in and out; knows no masks."""

    differentiable = False
    returns_weights = "per head"

    def run(self, problem, call):
        self.check(problem)
        if problem.allowed is not None or problem.attn_bias is not None:
            raise Unsupported("no masks")
        own = {name: weight.astype(np.float32) for name, weight in problem.weights.named().items()}
        heads = [
            np.einsum("bqe,ehd->bhqd", getattr(problem, name), own[name])
            + own[f"{name}_bias"][:, None]
            for name in ("query", "key", "value")
        ]
        context, weights = attention(*heads)
        output = np.einsum("bhqd,hde->bqe", context, own["output"]) + own["output_bias"]
        return Answer(self.returned(output), weights.astype(np.float64))

    def returned(self, output):
        return output.astype(np.float64)


class RawList(Raw):
    """As `Raw`, but with a list where an array should be."""

    def returned(self, output):
        return output.tolist()


class RawWrongShape(Raw):
    """As `Raw`, with a batch entry too many."""

    def returned(self, output):
        return np.concatenate([output, output[:1]]).astype(np.float64)


class Abstract(Layer):
    """Says neither how to build nor how to call."""


class Unbuildable(Correct):
    """Wants something that nobody gives."""

    def __init__(self, path: Path):
        self.path = path


@attention_function("numpy", MASK, grouped=True, returns_weights="per head")
def decorated(query, key, value, mask=None, scale=None):
    """A function with its mask convention."""
    return attention(query, key, value, mask=mask, scale=scale)


instance = Correct()
not_an_adapter = {"attend": attention}
