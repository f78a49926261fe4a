"""Mutants of an attention that returns the log-sum-exp of its logits beside its output.

It is in torch, so gradients need nothing of their own. Each method is one step that a mutant
replaces. The mutants are what people lost weeks to: the base, the sink, rows without keys, what is
scaled, capped and masked before, and gradients that stop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conformance import CausalFlag, Function, LogSumExp, MaskArgument, Sinks, SoftCap
from mutants.features import FeatureMutant

Tensor = Any
EQUAL = "log-sum-exp.equals-definition"
NO_KEYS = "log-sum-exp.of-no-keys"
MERGES = "log-sum-exp.merges-parts"
THROUGH = "gradient.through-log-sum-exp"


class Returning(Function):
    """Attention in small steps, `[batch heads length head]`, which returns (output, L)."""

    framework = "torch"
    grouped = True
    custom_scale = True
    fully_masked_row = "zeros"
    log_sum_exp = LogSumExp(differentiable=True)
    mask_arguments = (
        MaskArgument("mask", "batch heads query key", true="attends", broadcasts=True),
        MaskArgument("bias", "batch heads query key", number="added", broadcasts=True),
    )
    causal_flag = CausalFlag("causal", "bottom-right")
    features = (SoftCap("cap"), Sinks("sinks"))

    def __init__(self) -> None:
        self.kept: dict[Any, Tensor] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, masks: dict[str, Any], **options: Any
    ) -> Any:
        group = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(group, 1) for heads in (key, value))
        scale = options.get("scale", query.shape[-1] ** -0.5)
        products = (query @ key.mT).to(query.dtype)
        logits = self.added(self.capped(products * scale, masks), masks)
        seen = self.seen(logits, masks)
        sinks = masks.get("sinks")
        self.given = {"products": products, "scale": scale, "masks": masks, "logits": logits}
        self.given |= {"seen": seen, "group": group}
        powers, peak, total = self.exponentials(logits.masked_fill(~seen, -math.inf), sinks)
        context = (powers / total.masked_fill(total == 0, 1.0)) @ value
        return context, self.returned(peak, total)

    def capped(self, logits: Tensor, masks: dict[str, Any]) -> Tensor:
        cap = masks.get("cap")
        return logits if cap is None else cap * (logits / cap).tanh()

    def added(self, logits: Tensor, masks: dict[str, Any]) -> Tensor:
        return logits + masks["bias"] if "bias" in masks else logits

    def seen(self, logits: Tensor, masks: dict[str, Any]) -> Tensor:
        """Which keys each query sees."""
        import torch

        seen = torch.ones(logits.shape, dtype=torch.bool)
        if "mask" in masks:
            seen = seen & masks["mask"]
        if masks.get("causal"):
            seen = seen.tril(logits.shape[3] - logits.shape[2])
        return seen

    def exponentials(self, logits: Tensor, sinks: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The exponentials, the maximum that was taken off before, and their sum."""
        peak = logits.amax(-1, keepdim=True)
        if sinks is not None:
            peak = peak.maximum(sinks[:, None, None])
        peak = peak.masked_fill(peak.isinf(), 0.0).detach()
        powers = (logits - peak).exp()
        total = powers.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + (sinks[:, None, None] - peak).exp()
        return powers, peak, total

    def returned(self, peak: Tensor, total: Tensor) -> Tensor:
        """The log-sum-exp `[batch heads query]`; −∞ for a query that sees nothing."""
        nothing = total == 0
        found = peak + total.masked_fill(nothing, 1.0).log()
        return self.of_nothing(found, nothing)[..., 0]

    def of_nothing(self, found: Tensor, nothing: Tensor) -> Tensor:
        return found.masked_fill(nothing, -math.inf)

    def of(self, logits: Tensor, sinks: Any = None) -> Tensor:
        """The log-sum-exp of other logits."""
        _, peak, total = Returning.exponentials(self, logits, sinks)
        return Returning.returned(self, peak, total)


SOUND = (
    "plain/no-mask/cross",
    "mask/per-batch/gqa",
    "feature/sinks/mqa",
    "feature/soft-cap-with-sinks/cross",
    "edge/fully-masked-row/cross",
)
"""Cases in which the attention without a defect is asked all that concerns the log-sum-exp."""


@dataclass(frozen=True, eq=False)
class ReturningMutant(FeatureMutant):
    """A mutant of this attention."""

    def adapter(self) -> Any:
        """As an implementation."""
        adapter = type("Mutant", (Returning,), dict(self.changes))()
        adapter.name = self.name
        return adapter


MUTANTS: list[ReturningMutant] = []


def _add(
    name: str,
    did: str,
    *killed_by: str,
    case: str = SOUND[0],
    dtype: str = "float32",
    **changes: Any,
) -> None:
    assert all(hasattr(Returning, stage) for stage in changes), name
    by = killed_by or (EQUAL, MERGES)
    MUTANTS.append(ReturningMutant(name, "log-sum-exp", did, by, changes, case, dtype))


def _after(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A last step that changes the log-sum-exp that would be returned."""
    return lambda a, peak, total: change(Returning.returned(a, peak, total))


def _of(logits: Callable[[Any], Tensor], sinks: bool = True) -> Callable[..., Tensor]:
    """A last step that returns the log-sum-exp of other logits, hidden as the mask says."""

    def returned(a: Any, peak: Tensor, total: Tensor) -> Tensor:
        hidden = logits(a).masked_fill(~a.given["seen"], -math.inf)
        return a.of(hidden, a.given["masks"].get("sinks") if sinks else None)

    return returned


def _detached_in_part(a: Any, peak: Tensor, total: Tensor) -> Tensor:
    found = Returning.returned(a, peak, total)
    return found.detach() + 0.5 * (found - found.detach())


def _tiled(a: Any, peak: Tensor, total: Tensor) -> Tensor:
    found = Returning.returned(a, peak, total)
    batch, heads, queries = found.shape
    grouped = found.reshape(batch, -1, a.given["group"], queries)
    return grouped.transpose(1, 2).reshape(batch, heads, queries)


def _kept(a: Any, peak: Tensor, total: Tensor) -> Tensor:
    found = Returning.returned(a, peak, total)
    return a.kept.setdefault(found.shape, found.detach())


_add("lse-in-base-2", "returns the logarithm in base 2", returned=_after(lambda s: s / math.log(2)))
_add(
    "lse-converted-twice",
    "multiplies by log 2 what is in base e already",
    returned=_after(lambda s: s * math.log(2)),
)
_add("lse-negated", "returns the log-sum-exp with the other sign", returned=_after(lambda s: -s))
_add(
    "lse-not-a-logarithm", "returns the sum, not its logarithm", returned=_after(lambda s: s.exp())
)
_add(
    "lse-without-maximum",
    "forgets to add the maximum that was taken off",
    returned=lambda a, peak, total: Returning.returned(a, 0.0 * peak, total),
)
_add(
    "lse-maximum-only",
    "returns the maximum of the logits",
    returned=lambda a, peak, total: Returning.returned(a, peak, total / total),
)
_add(
    "lse-of-the-mean",
    "divides the sum by the number of keys",
    returned=lambda a, peak, total: Returning.returned(
        a, peak, total / a.given["logits"].shape[-1]
    ),
)
_add(
    "lse-before-scale",
    "returns that of the products, before the scale",
    returned=_of(lambda a: a.given["products"]),
)
_add(
    "lse-before-cap",
    "returns that of the logits before the soft cap",
    case="feature/soft-cap-with-sinks/cross",
    returned=_of(lambda a: a.given["products"] * a.given["scale"]),
)
_add(
    "lse-before-bias",
    "returns that of the logits before the bias",
    case="bias/in-full/cross",
    returned=_of(lambda a: a.given["products"] * a.given["scale"]),
)
_add(
    "lse-before-mask",
    "counts blocked keys, too",
    case="mask/per-batch/gqa",
    returned=lambda a, peak, total: a.of(a.given["logits"], a.given["masks"].get("sinks")),
)
_add(
    "lse-without-sink",
    "leaves the sink out, which the output counts",
    case="feature/sinks/mqa",
    returned=_of(lambda a: a.given["logits"], sinks=False),
)
_add(
    "lse-sink-twice",
    "counts the sink a second time",
    case="feature/sinks/mqa",
    returned=lambda a, peak, total: Returning.returned(
        a,
        peak,
        total + (a.given["masks"]["sinks"][:, None, None] - peak).exp()
        if "sinks" in a.given["masks"]
        else total,
    ),
)
_add(
    "lse-of-nothing-0",
    "returns 0 for a query that sees nothing",
    NO_KEYS,
    case="edge/fully-masked-row/cross",
    of_nothing=lambda a, found, nothing: found,
)
_add(
    "lse-of-nothing-infinite",
    "returns +∞ for a query that sees nothing",
    NO_KEYS,
    case="edge/fully-masked-row/cross",
    of_nothing=lambda a, found, nothing: found.masked_fill(nothing, math.inf),
)
_add(
    "lse-of-nothing-finite",
    "returns a large negative number for a query that sees nothing",
    NO_KEYS,
    case="edge/fully-masked-row/cross",
    of_nothing=lambda a, found, nothing: found.masked_fill(nothing, -1e30),
)
_add(
    "lse-of-nothing-nan",
    "returns NaN for a query that sees nothing",
    NO_KEYS,
    case="edge/fully-masked-row/cross",
    of_nothing=lambda a, found, nothing: found.masked_fill(nothing, math.nan),
)
_add("lse-of-first-head", "returns that of the first head for all",
     returned=_after(lambda s: s[:, :1].expand_as(s)))  # fmt: skip
_add("lse-of-first-entry", "returns that of the first batch entry for all",
     returned=_after(lambda s: s[:1].expand_as(s)))  # fmt: skip
_add(
    "lse-of-next-query", "returns that of the next query", returned=_after(lambda s: s.roll(-1, 2))
)
_add(
    "lse-heads-tiled",
    "orders heads by their place in the group",
    case="mask/per-batch/gqa",
    returned=_tiled,
)
_add(
    "lse-in-bfloat16",
    "stores the log-sum-exp in bfloat16",
    returned=_after(lambda s: s.bfloat16().to(s.dtype)),
)
_add(
    "lse-of-first-call",
    "returns a buffer that the first call has filled, if the shape is the same",
    MERGES,
    returned=_kept,
)
_add("lse-detached", "cuts the gradient of the log-sum-exp off", THROUGH,
     returned=_after(lambda s: s.detach()))  # fmt: skip
_add(
    "lse-gradient-halved",
    "passes half of the gradient of the log-sum-exp on",
    THROUGH,
    returned=_detached_in_part,
)
_add(
    "lse-gradient-negated",
    "subtracts the gradient of the log-sum-exp, where it is added to dP − D",
    THROUGH,
    returned=_after(lambda s: 2 * s.detach() - s),
)
_add(
    "lse-gradient-of-sink-lost",
    "gives the sink no gradient of the log-sum-exp",
    THROUGH,
    case="feature/sinks/mqa",
    returned=lambda a, peak, total: Returning.returned(
        a,
        peak,
        total
        - (a.given["masks"]["sinks"][:, None, None] - peak).exp()
        + (a.given["masks"]["sinks"].detach()[:, None, None] - peak).exp()
        if "sinks" in a.given["masks"]
        else total,
    ),
)
