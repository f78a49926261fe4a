"""The self-attention within torch.nn.TransformerEncoderLayer, on its slow and on its fast path.

Easy to miss in a port: after .eval() and without gradients, a different implementation runs, one
native operation for the whole layer, unless biases are omitted, the number of heads is odd, tokens
are not batch first, the activation is neither ReLU nor GELU, the two norms have different eps, a
submodule has a hook, or autocast is on for a GPU (that of a CPU is not asked about). This fast path
does not add a mask of numbers: everything that is not 0 is blocked, and a fully masked query gets
NaN. True in a boolean mask means *blocked* on both paths. `is_causal` is a hint about `src_mask`,
which is still required: without the mask, training raises, and the fast path attends to the future.
torch.nn.TransformerEncoder goes further: before its layers, it removes tokens that a padding mask
hides at the end of a sequence, and it returns 0 for them, whereas in training the encoder returns
their attention output.

The layer cannot run its attention alone, so everything else is turned into the identity. The
feed-forward network is zero. A LayerNorm with eps 4^n and weight 2^n divides by 2^n and multiplies
by it again, if n is so large that the variance is negligible relative to eps; its only remaining
effect is to subtract the mean of a token's channels. Therefore the layer is four times as wide as
the problem and has four times as many heads, and its channels are [x, -x, a, -a], whose mean is 0.
The attention reads x and writes a and -a, to which the residual adds 0. All other weights are 0,
and the output is half of a - (-a), in which any remainder of the mean cancels.
"""

from __future__ import annotations

from typing import Any, ClassVar

from conformance import (
    CausalFlag,
    Layer,
    MaskArgument,
    Mode,
    Parameter,
    Shape,
    Unsupported,
)
from conformance.adapters.shapes import ask

_BROAD = 4
"""The factor by which the layer is wider, and has more heads, than the problem."""

_POWERS = {"float64": 50, "float32": 20, "bfloat16": 20, "float16": 14}
"""The exponent n for each dtype: 2^n is representable, and a variance added to 4^n is lost."""


class EncoderLayerAttention(Layer):
    """The adapter for torch.nn.TransformerEncoderLayer, with all but the attention neutralised."""

    title = "torch.nn.TransformerEncoderLayer (its attention)"
    documentation = (
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.TransformerEncoderLayer.html"
    )
    framework = "torch"
    mask_arguments = (
        MaskArgument("src_key_padding_mask", "batch key", true="blocks", number="added"),
        MaskArgument(
            "src_mask", ("query key", "(batch heads) query key"), true="blocks", number="added"
        ),
    )
    causal_flag = CausalFlag("is_causal", needs="src_mask", alignment="top-left")
    # In the encoder it depends on the mask: sequences of padding only are removed.
    fully_masked_row: ClassVar = {"train": "output bias", "fast-path": "nan"}

    modes = (
        Mode("train", {"train": True}, about="as built, in training: the slow path"),
        Mode(
            "fast-path",
            {"train": False},
            gradients=False,
            about="after .eval(), under torch.no_grad(): one native operation",
        ),
        Mode(
            "encoder",
            {"train": False, "encoder": True},
            gradients=False,
            about="the same layer in torch.nn.TransformerEncoder(layer, 1), which cuts out padding",
        ),
    )

    parameters = (
        Parameter(
            "self_attn.in_proj_weight",
            "query key value",
            "embed heads head -> (heads head) embed",
            stack=0,
        ),
        Parameter(
            "self_attn.in_proj_bias",
            "query_bias key_bias value_bias",
            "heads head -> (heads head)",
            stack=0,
        ),
        Parameter("self_attn.out_proj.weight", "output", "heads head embed -> embed (heads head)"),
        Parameter("self_attn.out_proj.bias", "output_bias", "embed -> embed"),
    )

    def check_shape(self, shape: Shape) -> None:
        ask(shape, "self", "heads", "values", "query", "output")
        if not shape.bias:
            raise Unsupported("without biases there is no fast path")

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        import torch

        own = torch.nn.Module()
        own.self_attn = torch.nn.MultiheadAttention(
            shape.query_width, shape.heads, batch_first=True, dtype=getattr(torch, dtype)
        )
        layer = torch.nn.TransformerEncoderLayer(
            _BROAD * shape.query_width,
            _BROAD * shape.heads,
            dim_feedforward=1,
            dropout=0.0,
            layer_norm_eps=4.0 ** _POWERS[dtype],
            batch_first=True,
            dtype=getattr(torch, dtype),
            # The layer is called with all of its parameters as arguments.
            device="meta",
        )
        whole = torch.nn.TransformerEncoder(layer, 1) if mode.options.get("encoder") else layer
        # A tuple hides the layer, so that only the problem's parameters are registered.
        own.whole = (whole.train(mode["train"]),)
        return own

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        import torch

        (whole,) = layer.whole
        width, heads = query.shape[-1], layer.self_attn.num_heads
        masks = dict(masks)
        mask = masks.pop("src_mask", None)
        if mask is not None:
            # torch.nn.TransformerEncoder uses another name for this argument.
            masks["mask" if mode.options.get("encoder") else "src_mask"] = _for_all(mask, heads)
        zeros = torch.zeros_like(query)
        output = torch.func.functional_call(
            whole,
            _parameters(layer.self_attn, whole, _POWERS[str(query.dtype).removeprefix("torch.")]),
            (torch.cat([query, -query, zeros, zeros], dim=-1),),
            masks,
        )
        positive, negative = output[..., 2 * width :].split(width, dim=-1)
        return (positive - negative) / 2


def _parameters(own: Any, whole: Any, power: int) -> dict[str, Any]:
    """Return the wide layer's parameters by path; with them, only its attention has an effect.

    Args:
        own: the attention with the problem's parameters.
        whole: the wide layer, or the encoder that contains it.
        power: the exponent n of the LayerNorms' weights; see `_POWERS`.
    """
    import torch

    width = own.embed_dim
    pad = torch.nn.functional.pad
    rest = (_BROAD - 1) * width
    in_weight = pad(own.in_proj_weight.unflatten(0, (3, width)), (0, rest, 0, rest))
    in_bias = pad(own.in_proj_bias.unflatten(0, (3, width)), (0, rest))
    out_weight, out_bias = own.out_proj.weight, own.out_proj.bias
    zeros = torch.zeros_like(out_bias)
    made = {
        "self_attn.in_proj_weight": in_weight.flatten(0, 1),
        "self_attn.in_proj_bias": in_bias.flatten(),
        "self_attn.out_proj.weight": pad(
            torch.cat([out_weight, -out_weight]), (0, rest, 2 * width, 0)
        ),
        "self_attn.out_proj.bias": torch.cat([zeros, zeros, out_bias, -out_bias]),
    }
    like = {"dtype": out_bias.dtype, "device": out_bias.device}
    found = {}
    for path, parameter in whole.named_parameters():
        name = path.removeprefix("layers.0.")
        fill = 2.0**power if name in ("norm1.weight", "norm2.weight") else 0.0
        found[path] = made[name] if name in made else torch.full(parameter.shape, fill, **like)
    return found


def _for_all(mask: Any, heads: int) -> Any:
    """Extend a mask that has heads to the wide layer's heads; the added heads attend to all keys.

    A mask with heads is `[(batch heads) query key]`; any other mask is returned unchanged.
    """
    import torch

    if mask.ndim != 3 or mask.shape[0] % heads:
        return mask
    own = mask.unflatten(0, (-1, heads))
    others = torch.zeros_like(own).repeat(1, _BROAD - 1, 1, 1)
    return torch.cat([own, others], dim=1).flatten(0, 1)


ADAPTERS = {"torch-encoder-layer": "EncoderLayerAttention"}
