"""torch.nn.MultiheadAttention, with batch_first=True in all modes except one.

Easy to miss in a port: the query, key and value projections are one matrix, stacked on axis 0,
unless the width of key or value differs from that of the query; then they are three matrices. True
in a boolean mask means *blocked*, unlike in `scaled_dot_product_attention`, where True attends. A
mask per head combines batch and heads in one axis. Returned weights are averaged over heads unless
`average_attn_weights=False`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from conformance import (
    CausalFlag,
    Example,
    Layer,
    MaskArgument,
    Mode,
    Parameter,
    Shape,
)
from conformance.adapter import keywords
from conformance.adapters.shapes import ask


class TorchMultiheadAttention(Layer):
    """The adapter for torch.nn.MultiheadAttention, on its normal path and on its fast path."""

    title = "torch.nn.MultiheadAttention"
    documentation = (
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html"
    )
    framework = "torch"
    returns_weights = "per head"
    weights_option = "average_attn_weights=False"
    dropout_modes = ("train", "train-no-weights", "sequence-first")
    sequence_first = "sequence-first"
    # Without weights it goes through scaled_dot_product_attention, which gives zeros there. So does
    # the fast path, unless torch takes its native kernel: self-attention with an even number of
    # heads. That gives NaN.
    fully_masked_row: ClassVar = {
        "train": "nan",
        "eval": "nan",
        "fast-path-weights": "nan",
        "sequence-first": "nan",
        "train-no-weights": "output bias",
        "eval-no-weights": "output bias",
    }

    mask_arguments = (
        MaskArgument("key_padding_mask", "batch key", true="blocks", number="added"),
        MaskArgument(
            "attn_mask", ("query key", "(batch heads) query key"), true="blocks", number="added"
        ),
    )
    # "Provides a hint that attn_mask is the causal mask": the mask is still needed.
    causal_flag = CausalFlag("is_causal", needs="attn_mask", alignment="top-left")

    modes = (
        Mode(
            "train",
            {"train": True, "need_weights": True},
            about="as built, in training: weights come back unless need_weights=False",
        ),
        Mode(
            "train-no-weights",
            {"train": True, "need_weights": False},
            weights=False,
            about="in training, need_weights=False",
        ),
        Mode("eval", {"train": False, "need_weights": True}, about="after .eval()"),
        Mode(
            "eval-no-weights",
            {"train": False, "need_weights": False},
            weights=False,
            about="after .eval(), need_weights=False",
        ),
        # Without gradients, evaluation may use the fused native path.
        Mode(
            "fast-path",
            {"train": False, "need_weights": False},
            gradients=False,
            weights=False,
            about="after .eval(), need_weights=False, under torch.no_grad(): torch may compute all "
            "in one native kernel",
        ),
        Mode(
            "fast-path-weights",
            {"train": False, "need_weights": True},
            gradients=False,
            about="the same with weights",
        ),
        # This is torch's default.
        Mode(
            "sequence-first",
            {"train": True, "need_weights": True},
            every_case=False,
            about="without batch_first=True: inputs are [length, batch, width]; in training",
        ),
    )

    def parameters_for(self, shape: Shape) -> tuple[Parameter, ...]:
        if shape.query_width == shape.key_width == shape.value_width:
            inputs = [
                Parameter(
                    "in_proj_weight",
                    "query key value",
                    "embed heads head -> (heads head) embed",
                    stack=0,
                )
            ]
        else:
            inputs = [
                Parameter(f"{short}_proj_weight", name, "embed heads head -> (heads head) embed")
                for short, name in (("q", "query"), ("k", "key"), ("v", "value"))
            ]
        return (
            *inputs,
            Parameter(
                "in_proj_bias",
                "query_bias key_bias value_bias",
                "heads head -> (heads head)",
                stack=0,
            ),
            Parameter("out_proj.weight", "output", "heads head embed -> embed (heads head)"),
            Parameter("out_proj.bias", "output_bias", "embed -> embed"),
        )

    def check_shape(self, shape: Shape) -> None:
        ask(shape, "heads", "values", "query", "output")

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        import torch

        layer = torch.nn.MultiheadAttention(
            shape.query_width,
            shape.heads,
            dropout=mode.dropout,
            bias=shape.bias,
            kdim=shape.key_width,
            vdim=shape.value_width,
            batch_first=mode.name != self.sequence_first,
            dtype=getattr(torch, dtype),
        )
        return layer.train(mode["train"])

    def example_for(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Example:
        widths = {"kdim": shape.key_width, "vdim": shape.value_width}
        usual = dict.fromkeys(widths, shape.query_width) | {"bias": True, "batch_first": False}
        first = mode.name != self.sequence_first
        options = keywords(usual, bias=shape.bias, **widths, batch_first=first)
        swap = "" if first else ".transpose(0, 1)"
        inputs = ", ".join(f"{name}{swap}" for name in ("query", "key", "value"))
        needed = mode["need_weights"]
        asked = "average_attn_weights=False" if needed else "need_weights=False"
        return Example.of_module(
            dtype,
            mode["train"],
            f"layer = torch.nn.MultiheadAttention({shape.query_width}, {shape.heads}{options})",
            f"layer({inputs}, {asked}{{masks}})",
            output=f"{{}}[0]{swap}",
            weights="{}[1]" if needed else "",
        )

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        if mode.dropout:
            import torch

            torch.manual_seed(mode.draw)
        if not layer.batch_first:
            # Inputs that are one tensor must stay one, because torch projects them together.
            swapped = {id(item): item.transpose(0, 1) for item in (query, key, value)}
            query, key, value = (swapped[id(item)] for item in (query, key, value))
        output, weights = layer(
            query,
            key,
            value,
            need_weights=mode["need_weights"],
            average_attn_weights=False,
            **masks,
        )
        return (output if layer.batch_first else output.transpose(0, 1)), weights


ADAPTERS = {"torch-mha": "TorchMultiheadAttention"}
