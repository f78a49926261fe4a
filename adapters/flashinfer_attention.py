"""FlashInfer's prefill attention: for one sequence, for packed sequences, and for keys in pages.

Easy to miss in a port: axes are `[length heads head]`, without a batch. The causal flag is aligned
bottom-right if lengths differ. `window_left` counts the keys before the query's own, is also
aligned bottom-right, and hides no later key, so a sliding window needs the causal flag too; -1
means no window. A soft cap of None or 0 means none. A fully masked query gets zeros. FlashInfer is
for inference, so there are no gradients.

`single_prefill_with_kv_cache` takes a boolean `custom_mask` `[query key]`, in which True attends.
Beside it, the causal flag is ignored silently. The function refuses a causal flag if there are more
queries than keys. The wrappers have two methods: `plan` receives everything about a batch except
the tensors, and `run` receives the tensors. The dtype has to be passed to `plan` too; otherwise, it
is float16. Sequences are given by offsets. Pages are given by the numbers of the pages of all
sequences in a row, by offsets, and by the number of keys in the last page of each sequence. `run`
of the paged wrapper has an argument `sinks`, but only a kernel for Blackwell reads it, so the
adapter does not declare it.

nvcc compiles a kernel for each combination of dtype, head size, window or none, and soft cap or
none when it is first called, which takes a while, so only one head size is examined. The kernels
exist for GPUs only, in float16 and bfloat16, for head sizes of 64, 128 and 256.
"""

from __future__ import annotations

from typing import Any

from conformance import (
    CausalFlag,
    Geometry,
    MaskArgument,
    SoftCap,
    Unsupported,
    Window,
)
from conformance.adapter import Packed, Pages, Static
from conformance.adapters.flash_attention import FlashKernel

PAGE = 16
"""The number of keys in a page."""
WORKSPACE = 128 * 1024 * 1024
"""The recommended number of bytes of a wrapper's buffer."""


class _KeysBefore(Window):
    """A window that limits the keys before a query only, so that it sees all later keys."""

    def limits(self, value: Any, *, causal: bool) -> tuple[int | None, int | None] | None:
        limits = super().limits(value, causal=causal)
        return None if limits is None else (limits[0], 0 if causal else None)

    def value(self, window: tuple[int | None, int | None], *, causal: bool) -> Static:
        return super().value(window, causal=True) if causal or window[1] is None else None


_FEATURES = (
    _KeysBefore("window_left", "before", alignment="bottom-right"),
    SoftCap("logits_soft_cap", none=None),
)


class SinglePrefill(FlashKernel):
    """The adapter for single_prefill_with_kv_cache, called once for each entry of the batch."""

    title = "flashinfer.single_prefill_with_kv_cache"
    documentation = "https://docs.flashinfer.ai/api/attention.html"
    packages = ("flashinfer-python",)
    imports = ("flashinfer",)
    differentiable = False
    geometry = Geometry(head_sizes=(128,), tiles=(128, 128))
    mask_arguments: tuple[MaskArgument, ...] = (
        MaskArgument("custom_mask", "batch query key", true="attends"),
    )
    causal_flag = CausalFlag("causal", alignment="bottom-right", alone=True)
    features = _FEATURES

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        import torch
        from flashinfer import single_prefill_with_kv_cache

        scale, masks = options.get("scale"), dict(masks)
        custom = masks.pop("custom_mask", None)
        if masks.get("causal"):
            if custom is not None:
                raise Unsupported("the causal flag is ignored beside custom_mask")
            if query.shape[1] > key.shape[1]:
                raise Unsupported("a causal flag is refused with more queries than keys")
        each_mask = [None] * len(query) if custom is None else custom
        entries = [
            single_prefill_with_kv_cache(*one, custom_mask=mask, sm_scale=scale, **masks)
            for *one, mask in zip(query, key, value, each_mask, strict=True)
        ]
        return torch.stack(entries)


class RaggedPrefill(SinglePrefill):
    """The adapter for BatchPrefillWithRaggedKVCacheWrapper, which takes packed sequences.

    The wrapper has a mask argument too, which is not used here: it is packed like the sequences.
    """

    title = "flashinfer.BatchPrefillWithRaggedKVCacheWrapper"
    mask_arguments = ()
    features = (*_FEATURES, Packed("qo_indptr", "kv_indptr", only=True))

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        wrapper = BatchPrefillWithRaggedKVCacheWrapper(_workspace(query))
        wrapper.plan(**masks, **_told(query, key, value, options))
        return wrapper.run(query, key, value)


class PagedPrefill(SinglePrefill):
    """The adapter for BatchPrefillWithPagedKVCacheWrapper.

    It takes a rectangular table of pages, and the number of keys of each entry, as most libraries
    do, and makes the wrapper's arguments from them.
    """

    title = "flashinfer.BatchPrefillWithPagedKVCacheWrapper"
    mask_arguments = ()
    features = (*_FEATURES, Pages("block_table", "kv_lens", size=PAGE, only=True))

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        import torch
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        masks = dict(masks)
        table, lengths = masks.pop("block_table"), masks.pop("kv_lens")
        batch, count = query.shape[:2]
        pages = (lengths + PAGE - 1) // PAGE
        used = torch.arange(table.shape[1], device=table.device) < pages[:, None]
        wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(query))
        wrapper.plan(
            count * torch.arange(batch + 1, dtype=torch.int32, device=table.device),
            torch.nn.functional.pad(pages.cumsum(0, dtype=torch.int32), (1, 0)),
            table[used],
            (lengths - 1) % PAGE + 1,
            page_size=PAGE,
            **masks,
            **_told(query, key, value, options),
        )
        output = wrapper.run(query.flatten(0, 1), (key, value))
        return output.unflatten(0, (batch, count))


def _workspace(query: Any) -> Any:
    """Return the buffer that a wrapper needs, on the device of `query`."""
    import torch

    return torch.empty(WORKSPACE, dtype=torch.uint8, device=query.device)


def _told(query: Any, key: Any, value: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return what `plan` is told about the tensors, and the scale."""
    return {
        "num_qo_heads": query.shape[-2],
        "num_kv_heads": key.shape[-2],
        "head_dim_qk": query.shape[-1],
        "head_dim_vo": value.shape[-1],
        "q_data_type": query.dtype,
        "sm_scale": options.get("scale"),
    }


ADAPTERS = {
    "flashinfer-single": "SinglePrefill",
    "flashinfer-ragged": "RaggedPrefill",
    "flashinfer-paged": "PagedPrefill",
}
