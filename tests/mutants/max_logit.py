"""Mutants of an attention that returns the largest logit of each query beside its output.

It is what keeps a training stable that clips its queries and keys by it, and what kernels in tiles
hold as the running maximum. The mutants are the numbers that such a kernel has at hand in its
place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from conformance import MaxLogit
from mutants.log_sum_exp import Returning, ReturningMutant, Tensor

EQUAL = "max-logit.equals-definition"
NO_KEYS = "max-logit.of-no-keys"


class Largest(Returning):
    """The same attention, which returns (output, M)."""

    log_sum_exp = None
    max_logit = MaxLogit()

    def returned(self, peak: Tensor, total: Tensor) -> Tensor:
        """The largest logit `[batch heads query]`, of the keys that a query sees."""
        return self.largest(self.given["logits"].masked_fill(~self.given["seen"], -math.inf))

    def largest(self, hidden: Tensor) -> Tensor:
        return self.of_no_keys(hidden.amax(-1))

    def of_no_keys(self, found: Tensor) -> Tensor:
        return found


class InTiles(Largest):
    """Keeps a running maximum over tiles of two keys, which starts at a finite number."""

    max_logit = MaxLogit(of_no_keys=-16384.0)

    def largest(self, hidden: Tensor) -> Tensor:
        running = hidden.new_full(hidden.shape[:-1], -16384.0)
        for start in range(0, hidden.shape[-1], 2):
            running = running.maximum(hidden[..., start : start + 2].amax(-1))
        return running


class InBase2(Largest):
    """Holds logits in base 2, as kernels do that have an instruction for 2^x, and says so."""

    max_logit = MaxLogit(base="2")

    def of_no_keys(self, found: Tensor) -> Tensor:
        return found / math.log(2)


class WithSink(Largest):
    """Starts the running maximum at the sink, and says so."""

    max_logit = MaxLogit(includes_sink=True)

    def largest(self, hidden: Tensor) -> Tensor:
        return _with_sink(self, hidden.amax(-1))


class QueriesFirst(Largest):
    """Returns `[batch query heads]`, and 0 for a query that sees no key, and says so."""

    max_logit = MaxLogit("batch query heads", of_no_keys=0.0)

    def of_no_keys(self, found: Tensor) -> Tensor:
        return found.masked_fill(found.isinf(), 0.0).mT


TWINS = (Largest, InTiles, InBase2, WithSink, QueriesFirst)
"""Attentions that return the largest logit in a way that they declare."""

SOUND = (
    "plain/no-mask/cross",
    "mask/per-batch/gqa",
    "feature/sinks/mqa",
    "feature/soft-cap-with-sinks/cross",
    "bias/in-full/cross",
    "causal/square/self",
    "edge/fully-masked-row/cross",
)
"""Cases in which an attention without a defect is asked all that concerns the largest logit."""


class LargestMutant(ReturningMutant):
    """A mutant of this attention."""

    def adapter(self) -> Any:
        """As an implementation."""
        adapter = type("Mutant", (Largest,), dict(self.changes))()
        adapter.name = self.name
        return adapter


MUTANTS: list[LargestMutant] = []


def _add(
    name: str,
    did: str,
    killed_by: str = EQUAL,
    case: str = SOUND[0],
    dtype: str = "float32",
    **changes: Any,
) -> None:
    assert all(hasattr(Largest, stage) for stage in changes), name
    changed = LargestMutant(name, "max-logit", did, (killed_by,), changes, case, dtype)
    MUTANTS.append(changed)


def _of(logits: Callable[[Any], Tensor]) -> Callable[..., Tensor]:
    """A last step that returns the maximum of other logits, hidden as the mask says."""
    return lambda a, peak, total: a.largest(logits(a).masked_fill(~a.given["seen"], -math.inf))


def _with_sink(a: Any, found: Tensor) -> Tensor:
    sinks = a.given["masks"].get("sinks")
    return found if sinks is None else found.maximum(sinks[:, None])


def _of_group(a: Any, hidden: Tensor) -> Tensor:
    found, group = hidden.amax(-1), a.given["group"]
    largest = found.unflatten(1, (-1, group)).amax(2)
    return largest.repeat_interleave(group, 1)


_add(
    "max-logit-of-blocked-keys",
    "takes the maximum over all keys, blocked ones too",
    case="mask/per-batch/gqa",
    returned=lambda a, peak, total: a.largest(a.given["logits"]),
)
_add(
    "max-logit-of-all-causal",
    "takes the maximum over later keys, too",
    case="causal/square/self",
    returned=lambda a, peak, total: a.largest(a.given["logits"]),
)
_add(
    "max-logit-before-scale",
    "returns the largest product, before the scale",
    returned=_of(lambda a: a.given["products"]),
)
_add(
    "max-logit-before-cap",
    "returns the largest logit before the soft cap",
    case="feature/soft-cap-with-sinks/cross",
    returned=_of(lambda a: a.given["products"] * a.given["scale"]),
)
_add(
    "max-logit-before-bias",
    "returns the largest logit before the bias",
    case="bias/in-full/cross",
    returned=_of(lambda a: a.given["products"] * a.given["scale"]),
)
_add(
    "max-logit-in-base-2",
    "returns that of logits in base 2",
    of_no_keys=lambda a, found: found / math.log(2),
)
_add(
    "max-logit-converted-twice",
    "multiplies the largest logit by log 2, although it is in base e",
    of_no_keys=lambda a, found: found * math.log(2),
)
_add(
    "max-logit-of-first-tile",
    "returns the running maximum after the first half of the keys",
    largest=lambda a, hidden: hidden[..., : -(-hidden.shape[-1] // 2)].amax(-1),
)
_add(
    "max-logit-of-last-tile",
    "returns the maximum of the last half of the keys, not the running one",
    largest=lambda a, hidden: hidden[..., hidden.shape[-1] // 2 :].amax(-1),
)
_add(
    "max-logit-with-sink",
    "counts the sink, which is no key",
    case="feature/sinks/mqa",
    largest=lambda a, hidden: _with_sink(a, hidden.amax(-1)),
)
_add(
    "max-logit-clamped-at-0",
    "starts the running maximum at 0",
    case="causal/square/self",
    largest=lambda a, hidden: hidden.amax(-1).clamp(min=0.0),
)
_add(
    "max-logit-of-previous-query",
    "returns that of the previous query",
    largest=lambda a, hidden: hidden.amax(-1).roll(1, 2),
)
_add(
    "max-logit-of-absolute",
    "returns the largest absolute value",
    returned=lambda a, peak, total: (
        a.given["logits"].abs().masked_fill(~a.given["seen"], -math.inf).amax(-1)
    ),
)
_add("max-logit-smallest", "returns the smallest logit",
     returned=lambda a, peak, total: a.given["logits"].amin(-1))  # fmt: skip
_add(
    "max-logit-is-log-sum-exp",
    "returns the log-sum-exp",
    case="mask/per-batch/gqa",
    returned=lambda a, peak, total: Returning.returned(a, peak, total),
)
_add(
    "max-logit-of-first-head",
    "returns the largest logit of the first head for all",
    largest=lambda a, hidden: hidden.amax(-1)[:, :1].expand(hidden.shape[:-1]),
)
_add(
    "max-logit-of-first-entry",
    "returns the largest logit of the first batch entry for all",
    largest=lambda a, hidden: hidden.amax(-1)[:1].expand(hidden.shape[:-1]),
)
_add(
    "max-logit-of-group",
    "returns the maximum over the heads that share a key",
    case="mask/per-batch/gqa",
    largest=_of_group,
)
_add(
    "max-logit-of-head",
    "returns the maximum over all queries of a head",
    largest=lambda a, hidden: hidden.amax((-2, -1))[..., None].expand(hidden.shape[:-1]),
)
_add(
    "max-logit-in-bfloat16",
    "stores the maximum in bfloat16",
    of_no_keys=lambda a, found: found.bfloat16().to(found.dtype),
)
_add(
    "max-logit-of-nothing-0",
    "returns 0 for a query that sees no key",
    NO_KEYS,
    case="edge/fully-masked-row/cross",
    of_no_keys=lambda a, found: found.masked_fill(found.isinf(), 0.0),
)
_add(
    "max-logit-of-nothing-finite",
    "returns a large negative number for a query that sees no key",
    NO_KEYS,
    case="edge/fully-masked-row/cross",
    of_no_keys=lambda a, found: found.masked_fill(found.isinf(), -1e30),
)
_add(
    "max-logit-of-nothing-nan",
    "returns NaN for a query that sees no key",
    NO_KEYS,
    case="edge/fully-masked-row/cross",
    of_no_keys=lambda a, found: found.masked_fill(found.isinf(), math.nan),
)
