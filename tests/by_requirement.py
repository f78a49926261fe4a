"""Defective attentions, each one small plausible mistake away from a right one.

For every requirement there is one that it kills. `Right` is the original, and survives everything.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from mutants.zoo import find_mutants

from conformance import CausalFlag, Function, MaskArgument
from conformance.adapters.ours import Ours


class Right(Function):
    """A plain attention on projected heads, in steps that mutants override."""

    framework = "torch"
    mask_arguments = (
        MaskArgument(
            "mask", "batch heads query key", true="attends", number="added", broadcasts=True
        ),
        MaskArgument("bias", "batch heads query key", number="added", broadcasts=True),
    )
    causal_flag = CausalFlag("causal", alignment="top-left")
    returns_weights = "per head"
    fully_masked_row = "nan"

    def attend(self, query, key, value, masks: dict[str, Any], **options: Any):
        weights = self.softmax(self.logits(query, key, dict(masks)))
        return self.finish(weights @ value, weights, masks)

    def logits(self, query, key, masks):
        logits = query @ key.mT / math.sqrt(query.shape[-1])
        if "bias" in masks:
            logits = logits + self.bias(masks["bias"])
        if masks.get("causal"):
            triangle = torch.ones(logits.shape[-2:], dtype=torch.bool).tril(self.diagonal)
            logits = logits.masked_fill(~triangle, -math.inf)
        mask = masks.get("mask")
        if mask is None:
            return logits
        if mask.dtype != torch.bool:
            return logits + self.additive(mask)
        return torch.where(mask, logits, logits + self.blocked)

    diagonal = 0
    blocked = -math.inf

    def additive(self, mask):
        return mask

    def bias(self, bias):
        return bias

    def softmax(self, logits):
        return torch.softmax(logits, dim=-1)

    def finish(self, context, weights, masks):
        return context, weights


class ScaleByWidth(Right):
    def logits(self, query, key, masks):
        return super().logits(query / math.sqrt(query.shape[-1]), key, masks)


class KeyDetached(Right):
    def logits(self, query, key, masks):
        return super().logits(query, key.detach(), masks)


class BiasDetached(Right):
    def bias(self, bias):
        return bias.detach()


class OutputWidened(Ours):
    def call(self, layer, query, key, value, masks, mode):
        answer = super().call(layer, query, key, value, masks, mode)
        return _with_output(answer, lambda output: output.to(torch.float64))


class WeightGradientDoubled(Ours):
    def bind(self, layer, parameters):
        hooked = layer.output_projection
        if not getattr(hooked, "is_hooked", False):
            hooked.weight.register_hook(lambda gradient: 2 * gradient)
            hooked.is_hooked = True
        return layer


class WeightsOfOneHead(Right):
    def finish(self, context, weights, masks):
        return context, weights[:, :1].expand_as(weights)


class WeightsAfterDropout(Right):
    def finish(self, context, weights, masks):
        return context, weights * 0.9


class WeightsLeak(Right):
    def finish(self, context, weights, masks):
        return context, weights + 1e-6 * (weights == 0)


class Inverted(Right):
    def logits(self, query, key, masks):
        mask = masks.get("mask")
        if mask is not None and mask.dtype == torch.bool:
            masks["mask"] = ~mask
        return super().logits(query, key, masks)


class Ignored(Right):
    def logits(self, query, key, masks):
        masks.pop("mask", None)
        return super().logits(query, key, masks)


class SoftMask(Right):
    blocked = -5.0


class FirstKeyFavoured(Right):
    def logits(self, query, key, masks):
        logits = super().logits(query, key, masks)
        return logits * (1 + 0.01 * (torch.arange(logits.shape[-1]) == 0).to(logits.dtype))


class NeighbourLeaks(Right):
    def attend(self, query, key, value, masks, **options):
        return super().attend(query, key, value + 1e-2 * value.mean(0), masks, **options)


class NormaliserWithEpsilon(Right):
    def softmax(self, logits):
        powers = torch.exp(logits)
        return powers / (powers.sum(-1, keepdim=True) + 1e-2)


class EvaluationScaled(Ours):
    def call(self, layer, query, key, value, masks, mode):
        answer = super().call(layer, query, key, value, masks, mode)
        return answer if mode["train"] else _with_output(answer, lambda output: 1.001 * output)


class AdditiveMaskHalved(Right):
    def additive(self, mask):
        return mask.clamp(min=-5.0)


class CausalFlagOffByOne(Right):
    diagonal = 1


class ChangesInput(Ours):
    def call(self, layer, query, key, value, masks, mode):
        answer = super().call(layer, query, key, value, masks, mode)
        query.data.mul_(2.0)
        return answer


class AttachesToInput(Ours):
    def call(self, layer, query, key, value, masks, mode):
        query.remembered = True
        return super().call(layer, query, key, value, masks, mode)


class SeedsEverybody(Ours):
    def call(self, layer, query, key, value, masks, mode):
        torch.manual_seed(1234)
        return super().call(layer, query, key, value, masks, mode)


class SetsDefaultDtype(Ours):
    def call(self, layer, query, key, value, masks, mode):
        torch.set_default_dtype(torch.float64)
        return super().call(layer, query, key, value, masks, mode)


class RemembersLastCall(Ours):
    def call(self, layer, query, key, value, masks, mode):
        answer = super().call(layer, query, key, value, masks, mode)
        layer.calls = getattr(layer, "calls", 0) + 1
        return _with_output(answer, lambda output: output + 1e-3 * layer.calls)


class SaysMeanForMaskedRow(Right):
    fully_masked_row = "mean of values"


class KeyNeedsQuery(Right):
    """A frozen query takes the key's gradient along."""

    def attend(self, query, key, value, masks, **options):
        key = key if query.requires_grad else key.detach()
        return super().attend(query, key, value, masks, **options)


class OverwritesWhatItKept(Right):
    """The backward pass writes over what the forward pass kept for it."""

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, context):
            ctx.kept = torch.ones_like(context)
            return context.clone()

        @staticmethod
        def backward(ctx, gradient):
            gradient = ctx.kept * gradient
            ctx.kept *= 2
            return gradient

    def finish(self, context, weights, masks):
        return super().finish(self.Kept.apply(context), weights, masks)


class RemembersMasks(Right):
    """Finds a mask again by identity, whatever has been written into it."""

    known = None

    def attend(self, query, key, value, masks, **options):
        mask = masks.get("mask")
        if mask is not None:
            if self.known is None or self.known[0] is not mask:
                self.known = mask, mask.clone()
            masks = {**masks, "mask": self.known[1]}
        return super().attend(query, key, value, masks, **options)


class SaysBottomRight(Right):
    causal_flag = CausalFlag("causal", alignment="bottom-right")


class SaysAveraged(Right):
    returns_weights = "averaged"


class SaysBlocks(Right):
    """Wrong in its words only: nothing but its first argument's polarity is declared otherwise."""

    mask_arguments = (
        MaskArgument("mask", "batch heads query key", true="blocks", number="added"),
        *Right.mask_arguments[1:],
    )


def _with_output(answer, change):
    """Change the output of an answer that may come with weights."""
    if isinstance(answer, tuple):
        return (change(answer[0]), answer[1])
    return change(answer)


KILLS = {
    "output.equals-definition": ScaleByWidth,
    "gradient.inputs-equal-definition": KeyDetached,
    "gradient.parameters-equal-definition": WeightGradientDoubled,
    "gradient.bias-equals-definition": BiasDetached,
    "dtype.in-is-out": OutputWidened,
    "weights.equal-definition": WeightsOfOneHead,
    "weights.rows-sum-to-one": WeightsAfterDropout,
    "weights.blocked-are-zero": WeightsLeak,
    "weights.made-the-output": WeightsOfOneHead,
    "mask.polarity-is-as-declared": Inverted,
    "mask.blocked-key-has-no-influence": SoftMask,
    "invariance.key-order": FirstKeyFavoured,
    "invariance.batch-entries-are-independent": NeighbourLeaks,
    "invariance.logit-shift": NormaliserWithEpsilon,
    "modes.agree": EvaluationScaled,
    "mask.spellings-agree": AdditiveMaskHalved,
    "call.leaves-inputs-unchanged": AttachesToInput,
    "call.repeats": RemembersLastCall,
    "call.leaves-global-state-alone": SeedsEverybody,
    "gradient.does-not-depend-on-what-is-frozen": KeyNeedsQuery,
    "gradient.asked-for-twice-is-the-same": OverwritesWhatItKept,
    "call.reads-what-its-arguments-hold-now": RemembersMasks,
    "observed.fully-masked-row": SaysMeanForMaskedRow,
    "observed.causal-alignment": SaysBottomRight,
    "observed.returned-weights": SaysAveraged,
}
"""Requirement to a mutant that a case kills."""


def of_the_zoo(name):
    """A mutant of `mutants`, in NumPy."""
    (found,) = find_mutants([], [name])
    return found.adapter


KILLED_BY_EXPERIMENT = {
    "adapter.declares-what-is-observed": (SaysBlocks, "masks"),
    "dropout.is-unbiased": (of_the_zoo("dropout-not-rescaled"), "dropout"),
    "call.memory-layout-does-not-matter": (of_the_zoo("strides-ignored"), "repeatability"),
}
"""Requirement to a mutant, and the experiment that kills it: no case says anything about it."""

ALONE = {
    "gradient.bias-equals-definition": BiasDetached,
    "gradient.parameters-equal-definition": WeightGradientDoubled,
    "dtype.in-is-out": OutputWidened,
    "call.leaves-inputs-unchanged": AttachesToInput,
    "call.leaves-global-state-alone": SeedsEverybody,
    "observed.fully-masked-row": SaysMeanForMaskedRow,
    "observed.returned-weights": SaysAveraged,
}
"""Mutants that one requirement kills and no other notices."""
