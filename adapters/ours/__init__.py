"""Our own attention in `attention.py`, a batch-invariant one in `invariant.py`, their adapters."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from conformance import (
    Alibi,
    Example,
    HeadNorm,
    Layer,
    Lengths,
    MaskArgument,
    Mode,
    Parameter,
    PositionIds,
    RotaryBase,
    SegmentIds,
    Shape,
    Sinks,
    SoftCap,
    Spans,
    Tree,
    Window,
)
from conformance.adapter import keywords


class Ours(Layer):
    """The adapter for `MultiHeadAttention` in `attention.py`, in training and after `.eval()`."""

    title = "MultiHeadAttention (ours)"
    documentation = "docs/definition.md"
    framework = "torch"
    scores = ("scaled-dot", "additive")
    custom_scale = True
    returns_weights = "per head"
    fully_masked_row = "output bias"
    dropout_modes = ("train",)
    # One query at a time has other bits than all at once: BLAS adds in another order.
    promises = MappingProxyType({"runs": "equal bits", "gradients": "equal bits"})

    mask_arguments = (
        MaskArgument("attend_mask", "batch heads query key", true="attends", broadcasts=True),
        MaskArgument("block_mask", "batch heads query key", true="blocks", broadcasts=True),
        MaskArgument("attn_bias", "batch heads query key", number="added", broadcasts=True),
    )
    features = (
        PositionIds(
            "query_positions", "key_positions", of=("rotary", "alibi", "window"), dtype="int64"
        ),
        Window("window", none=None, alignment="top-left"),
        SoftCap("soft_cap", none=None),
        Alibi("slopes", alignment="top-left"),
        Sinks("sinks", parameter=True),
        RotaryBase("base", size="size", flag="interleaved", alignment="top-left"),
        HeadNorm("query_norm.weight", "key_norm.weight", epsilon="norm_epsilon", parameters=True),
        Lengths("key_lengths", of="keys", dtype="int64"),
        Lengths("query_lengths", of="queries", dtype="int64"),
        SegmentIds("query_segments", "key_segments", dtype="int64"),
        Tree("query_parents", dtype="int64"),
        Spans("key_spans", alignment="top-left", causal=True, dtype="int64"),
    )
    parameters = (
        Parameter("query_projection.weight", "query", "embed heads head -> (heads head) embed"),
        Parameter("key_projection.weight", "key", "embed heads head -> (heads head) embed"),
        Parameter("value_projection.weight", "value", "embed heads head -> (heads head) embed"),
        Parameter("output_projection.weight", "output", "heads head embed -> embed (heads head)"),
        Parameter("query_projection.bias", "query_bias", "heads head -> (heads head)"),
        Parameter("key_projection.bias", "key_bias", "heads head -> (heads head)"),
        Parameter("value_projection.bias", "value_bias", "heads head -> (heads head)"),
        Parameter("output_projection.bias", "output_bias", "embed -> embed"),
        Parameter("score_vector", "score", "heads head -> heads head"),
    )
    modes = (
        Mode("train", {"train": True, "need_weights": True}, about="in training, with weights"),
        Mode("eval", {"train": False, "need_weights": True}, about="after .eval(), with weights"),
        Mode(
            "eval-no-weights",
            {"train": False, "need_weights": False},
            weights=False,
            about="after .eval(), without weights",
        ),
    )

    def layer(self) -> Any:
        """Return the class of the layer."""
        from conformance.adapters.ours.attention import MultiHeadAttention

        return MultiHeadAttention

    def build_with(
        self,
        shape: Shape,
        dtype: str,
        scale: float | None,
        mode: Mode,
        settings: Mapping[str, Any],
    ) -> Any:
        import torch

        from conformance.adapters.ours.attention import Rotary

        names = ("window", "soft_cap", "norm_epsilon", "sinks")
        features = {name: settings[name] for name in names if name in settings}
        if "base" in settings:
            turned = (settings["size"], settings["base"], settings["interleaved"])
            features["rotary"] = Rotary(*turned)
        layer = self.layer()(
            shape.query_width,
            shape.heads,
            head_size=shape.head_size,
            value_head_size=shape.value_head_size,
            kv_heads=shape.kv_heads,
            key_width=shape.key_width,
            value_width=shape.value_width,
            output_width=shape.output_width,
            bias=shape.bias,
            score=shape.score,
            scale=scale,
            dropout=mode.dropout,
            dtype=getattr(torch, dtype),
            **features,
        )
        return layer.train(mode["train"])

    def example_for(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Example:
        usual = {
            "head_size": shape.query_width // shape.heads,
            "value_head_size": shape.head_size,
            "kv_heads": shape.heads,
            "key_width": shape.query_width,
            "value_width": shape.key_width,
            "output_width": shape.query_width,
            "bias": True,
            "score": "scaled-dot",
        }
        options = {name: getattr(shape, name) for name in usual} | {"scale": scale}
        needed = {"need_weights": mode["need_weights"]}
        return Example.of_module(
            dtype,
            mode["train"],
            f"layer = {self.layer().__name__}({shape.query_width}, {shape.heads}"
            f"{keywords(usual | {'scale': None}, **options)})",
            f"layer(query, key, value{keywords({'need_weights': False}, **needed)}{{masks}})",
            imports=f"from {self.layer().__module__} import {self.layer().__name__}",
            output="{}[0]" if mode["need_weights"] else "{}",
            weights="{}[1]" if mode["need_weights"] else "",
        )

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        if mode.dropout:
            import torch

            torch.manual_seed(mode.draw)
        layer.slopes = masks.pop("slopes", None)
        if "key_spans" in masks:
            masks["causal"] = "top-left"
        return layer(query, key, value, need_weights=mode["need_weights"], **masks)


class OursInvariant(Ours):
    """The adapter for `InvariantAttention` in `invariant.py`: its bits do not depend on the batch.

    The bits of a sequence that is packed behind another are not promised.
    """

    title = "InvariantAttention (ours)"
    scores = ("scaled-dot",)
    promises = MappingProxyType(
        dict.fromkeys(
            (
                *("batch", "batch position", "steps", "chunks"),
                *("runs", "gradients", "threads", "strides"),
            ),
            "equal bits",
        )
    )

    def layer(self) -> Any:
        from conformance.adapters.ours.invariant import InvariantAttention

        return InvariantAttention


ADAPTERS = {"ours": "Ours", "ours-invariant": "OursInvariant"}
