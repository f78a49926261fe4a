"""An attention that keeps every promise of equal bits, and what breaks one in the last bit.

It computes in float64, with numbers that are multiples of a power of two. All its sums are exact,
so their order does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from conformance import CausalFlag, Function
from conformance.adapter.base import EQUAL_BITS, PROMISES
from conformance.adapter.features import SegmentIds
from mutants.miniatures import MASK

TORCH = tuple(name for name in PROMISES if name != "compiled")
"""What can be promised where nothing is compiled."""


def on_grid(values: torch.Tensor, power: int) -> torch.Tensor:
    """The nearest multiples of 2 to the minus `power`; gradients pass."""
    return values + (torch.round(values * 2.0**power) / 2.0**power - values).detach()


def next_number(values: torch.Tensor) -> torch.Tensor:
    """The same but for the last bit of each number; gradients pass."""
    later = torch.nextafter(values.detach(), torch.full_like(values, torch.inf))
    return values + (later - values).detach()


class Made(NamedTuple):
    """What a mutant knows of a call: the heads, the masks, and the number of the call."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    masks: dict[str, Any]
    number: int
    threads: bool


class Broken(NamedTuple):
    """A mistake in the last bit.

    Attributes:
        promise: the promise that it breaks.
        subjects: the ends of ids of subjects, of which at least one shows it.
        when: whether the output of a call has other bits.
        of: the input whose gradient has other bits in place of the output.
        rows: the entries of the batch that have them.
    """

    promise: str
    subjects: tuple[str, ...]
    when: Callable[[Made], bool]
    of: str = ""
    rows: slice = slice(None)


def _is_cut_out(array: torch.Tensor) -> bool:
    return array.untyped_storage().nbytes() > array.numel() * array.element_size()


ONE_QUERY = "batches-with-one-query"

BROKEN = {
    "batch-of-one": Broken("batch", ("alone", ONE_QUERY), lambda it: len(it.query) == 1),
    "batch-of-three": Broken("batch", ("batches", ONE_QUERY), lambda it: len(it.query) == 3),
    "batch-of-eight": Broken("batch", ("batches", ONE_QUERY), lambda it: len(it.query) == 8),
    "batch-of-one-in-bfloat16": Broken(
        "batch",
        ("alone", ONE_QUERY),
        lambda it: len(it.query) == 1 and it.query.dtype == torch.bfloat16,
    ),
    "keys-split-by-batch": Broken(
        "batch", ("alone", ONE_QUERY), lambda it: len(it.query) == 1 and it.key.shape[2] > 16
    ),
    "one-query-in-batch-of-one": Broken(
        "batch", (ONE_QUERY,), lambda it: len(it.query) == 1 and it.query.shape[2] == 1
    ),
    "one-query-in-batch-of-three": Broken(
        "batch", (ONE_QUERY,), lambda it: len(it.query) == 3 and it.query.shape[2] == 1
    ),
    "last-of-batch": Broken("batch position", ("place",), lambda it: True, rows=slice(-1, None)),
    "one-query": Broken("steps", ("steps",), lambda it: it.query.shape[2] == 1),
    "few-keys": Broken("steps", ("steps",), lambda it: it.key.shape[2] < 5),
    "first-step": Broken("steps", ("steps",), lambda it: it.key.shape[2] == 2),
    "seventeen-queries": Broken("chunks", ("chunks",), lambda it: it.query.shape[2] == 17),
    "few-queries-in-float16": Broken(
        "chunks",
        ("chunks",),
        lambda it: 1 < it.query.shape[2] < 5 and it.query.dtype == torch.float16,
    ),
    "packed": Broken("packing", ("packed",), lambda it: "query_ids" in it.masks),
    "every-other-call": Broken("runs", ("twice",), lambda it: it.number % 2 == 1),
    "gradient-of-value": Broken(
        "gradients", ("gradients",), lambda it: it.number % 2 == 1, "value"
    ),
    "gradient-of-key": Broken("gradients", ("gradients",), lambda it: it.number % 2 == 1, "key"),
    "threads": Broken("threads", ("threads",), lambda it: it.threads),
    "gaps": Broken("strides", ("strided", "mask-strided"), lambda it: it.query.stride(-1) != 1),
    "cut-out": Broken(
        "strides",
        ("strided", "window", "mask-strided", "mask-window"),
        lambda it: _is_cut_out(it.value),
    ),
    "mask-cut-out": Broken(
        "strides",
        ("mask-window", "mask-strided"),
        lambda it: any(_is_cut_out(mask) for mask in it.masks.values() if torch.is_tensor(mask)),
    ),
}
"""By name, mistakes that no limit of noise notices."""


class Exact(Function):
    """Keeps all its promises, unless it has one of the mistakes in `BROKEN`."""

    framework = "torch"
    mask_arguments = (MASK,)
    causal_flag = CausalFlag("causal", alignment="bottom-right")
    features = (SegmentIds("query_ids", "key_ids"),)

    def __init__(self, broken: str = "", dtypes=("float32",), promises=TORCH) -> None:
        self.name = broken or "exact"
        self.dtypes = dtypes
        self.promises = dict.fromkeys(promises, EQUAL_BITS)
        self._broken = BROKEN.get(broken)
        self._calls, self._threads = 0, torch.get_num_threads()

    def attend(self, query, key, value, masks, **options):
        self._calls += 1
        given = Made(query, key, value, masks, self._calls, self._is_on_other_threads())
        broken = self._broken is not None and self._broken.when(given)
        if broken and self._broken.of:
            array = {"query": query, "key": key, "value": value}[self._broken.of]
            if array.requires_grad:
                array.register_hook(next_number)
        visible = visible_of(query, key, **masks)
        output = exact(query, key, value, visible).to(query.dtype)
        if not broken or self._broken.of:
            return output
        rows = torch.zeros(len(output), 1, 1, 1, dtype=torch.bool)
        rows[self._broken.rows] = True
        return torch.where(rows, next_number(output), output)

    def _is_on_other_threads(self) -> bool:
        return torch.get_num_threads() != self._threads


def visible_of(query, key, mask=None, causal=False, query_ids=None, key_ids=None) -> torch.Tensor:
    """What a query may attend to, `[batch heads query key]` or with axes of size 1."""
    queries, keys = query.shape[2], key.shape[2]
    visible = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    if mask is not None:
        visible = mask if mask.dtype == torch.bool else torch.isfinite(mask)
    if causal:
        visible = visible & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    if query_ids is not None:
        visible = visible & (query_ids[:, None, :, None] == key_ids[:, None, None, :])
    return visible


def exact(query, key, value, visible) -> torch.Tensor:
    """The context in float64; all sums are exact."""
    query, key, value = (on_grid(it.double(), 6) for it in (query, key, value))
    logits = (query @ key.mT) * query.shape[-1] ** -0.5
    logits = torch.where(visible, logits, -torch.inf)
    peak = logits.max(dim=-1, keepdim=True).values.detach()
    powers = on_grid(torch.exp(logits - peak), 30)
    return powers @ value / powers.sum(dim=-1, keepdim=True)
