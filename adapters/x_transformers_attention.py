"""x-transformers' Attention, with its own softmax and with flash=True, torch's SDPA.

Easy to miss in a port: with fewer key/value heads, query head h uses key/value head h % kv_heads,
not h // group as in Llama: all keys are repeated as one block, `b (r kvh) n d`. Query heads thus
have a different order, and weights of other libraries have to be reordered. True in a mask attends.
There are two token masks. `context_mask` blocks keys and has no other effect. `mask` marks the
query tokens: it sets the *output* of masked tokens to zero after the projection, and without a
context it also blocks them as keys. An `attn_mask` with three axes is `[heads query key]`, without
a batch axis; a bias has a separate argument, `attn_bias`. The causal triangle is aligned
bottom-right, but top-left with flash=True and more queries than keys. The context of a query is
zero if a mask blocks all of its keys, the mean of all values if the causal triangle does, and NaN
if a bias of -inf does.

With flash=True there are two pitfalls. `causal=True` is an argument of both the constructor and the
call, but that of the call has no effect. And a boolean `attn_bias` attends where it is True, but
where a mask or the triangle blocks, it is filled with a number that is also interpreted as True.

`max_attend_past` counts keys before the query's own, and hides none after it; it is aligned
bottom-right. `logit_softclamp_value` is applied after a bias is added, and before masks. A learned
sink (`head_learned_sink`) is one logit for each head, and its weight comes first in the returned
weights. With flash=True, neither the clamp nor the sink is available. Rotary embeddings rotate
pairs of adjacent components. ALiBi and sinks use the layer's order of heads. `RotaryEmbedding` is a
module whose buffer is rounded if a model is converted, and positions are rounded too: in bfloat16,
257 becomes 256. Here the module remains in float32.

The softmax is computed in float32 for every dtype, unless flash=True.

The library has no biases. If a problem has biases, the four projections, which are
`torch.nn.Linear` without bias, are replaced by projections with bias; everything else is unchanged.
With a single head, the output projection is omitted by default; `project_out=True` keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from conformance import (
    Alibi,
    CausalFlag,
    Example,
    Layer,
    MaskArgument,
    Mode,
    Parameter,
    RotaryBase,
    Shape,
    Sinks,
    SoftCap,
    Unsupported,
    Window,
)
from conformance.adapter import Static, keywords
from conformance.adapters.shapes import ask

_PROJECTIONS = ("to_q", "to_k", "to_v", "to_out")
_CAUSAL_AS_BUILT = (
    "def attend(*inputs, causal=False, **options):",
    "    layer.causal = layer.attend.causal = causal  # as the constructor would",
    "    return layer(*inputs, **options)",
)
_BUILT_IN = ("max_attend_past", "logit_softclamp_value")
"""The arguments of the constructor that express features."""
_FLASH = ("flash", "flash-train", "flash-causal-in-call")


class XTransformersAttention(Layer):
    """The adapter for x_transformers.x_transformers.Attention."""

    title = "x_transformers.x_transformers.Attention"
    documentation = "https://github.com/lucidrains/x-transformers"
    framework = "torch"
    packages = ("x-transformers",)
    returns_weights = "per head"
    # Without flash it depends on the argument: zeros for a mask, NaN for an attn_bias of -inf.
    fully_masked_row: ClassVar = dict.fromkeys(_FLASH, "output bias")
    dropout_modes = ("train", "flash-train")
    parameters = (
        Parameter(
            "to_q.weight", "query", "embed heads head -> (heads head) embed", interleaved=True
        ),
        Parameter("to_q.bias", "query_bias", "heads head -> (heads head)", interleaved=True),
        Parameter("to_k.weight", "key", "embed kv_heads head -> (kv_heads head) embed"),
        Parameter("to_k.bias", "key_bias", "kv_heads head -> (kv_heads head)"),
        Parameter("to_v.weight", "value", "embed kv_heads head -> (kv_heads head) embed"),
        Parameter("to_v.bias", "value_bias", "kv_heads head -> (kv_heads head)"),
        Parameter(
            "to_out.weight", "output", "heads head embed -> embed (heads head)", interleaved=True
        ),
        Parameter("to_out.bias", "output_bias", "embed -> embed"),
    )
    mask_arguments = (
        MaskArgument("context_mask", "batch key", true="attends"),
        MaskArgument(
            "attn_mask",
            ("query key", "heads query key", "batch heads query key"),
            true="attends",
            broadcasts=True,
        ),
        MaskArgument(
            "attn_bias",
            ("query key", "heads query key", "batch heads query key"),
            number="added",
            broadcasts=True,
        ),
        MaskArgument("mask", "batch query", true="attends"),
    )
    causal_flag = CausalFlag("causal", alignment="bottom-right")
    features = (
        Window("max_attend_past", "before", None, "bottom-right", needs_causal=True),
        SoftCap("logit_softclamp_value", none=None),
        Sinks("head_attn_sink"),
        Alibi("slopes", alignment="bottom-right"),
        RotaryBase("rotary.base", size="rotary.dim", pairs="interleaved"),
    )
    modes = (
        Mode("eval", {"train": False, "flash": False}, about="flash=False, after .eval()"),
        Mode(
            "train",
            {"train": True, "flash": False},
            every_case=False,
            about="flash=False, in training",
        ),
        Mode(
            "flash",
            {"train": False, "flash": True},
            weights=False,
            about="flash=True: torch's scaled_dot_product_attention; after .eval()",
        ),
        Mode(
            "flash-train",
            {"train": True, "flash": True},
            weights=False,
            every_case=False,
            about="flash=True, in training",
        ),
        Mode(
            "causal-in-call",
            {"train": False, "flash": False, "causal in call": True},
            every_case=False,
            about="flash=False, and causal=True as an argument of the call; elsewhere it is one "
            "of the constructor",
        ),
        Mode(
            "flash-causal-in-call",
            {"train": False, "flash": True, "causal in call": True},
            weights=False,
            every_case=False,
            about="flash=True, and causal=True as an argument of the call",
        ),
    )

    def check_shape(self, shape: Shape) -> None:
        ask(shape, "memory")

    def build_with(
        self,
        shape: Shape,
        dtype: str,
        scale: float | None,
        mode: Mode,
        settings: Mapping[str, Static],
    ) -> Any:
        import torch
        from x_transformers.x_transformers import Attention, RotaryEmbedding

        options = {name: settings[name] for name in _BUILT_IN if name in settings}
        if "logit_softclamp_value" in options:
            if mode["flash"]:
                raise Unsupported("no soft cap with flash=True")
            options["softclamp_logits"] = True
        layer = Attention(
            shape.query_width,
            dim_context=shape.key_width,
            dim_head=shape.head_size,
            value_dim_head=shape.value_head_size,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            dim_out=shape.output_width,
            project_out=True,
            dropout=mode.dropout,
            flash=mode["flash"],
            **options,
        )
        for name in _PROJECTIONS if shape.bias else ():
            bare = getattr(layer, name)
            setattr(layer, name, torch.nn.Linear(bare.in_features, bare.out_features))
        layer.train(mode["train"])
        layer.to(getattr(torch, dtype))
        layer.rotary = None
        if "rotary.dim" in settings:
            layer.rotary = RotaryEmbedding(settings["rotary.dim"], base=settings["rotary.base"])
        return layer

    def example_for(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Example:
        kind = "" if dtype == "float32" else f", dtype=torch.{dtype}"
        biases = [
            f"layer.{name} = torch.nn.Linear(layer.{name}.in_features, "
            f"layer.{name}.out_features{kind})"
            for name in (_PROJECTIONS if shape.bias else ())
        ]
        options = keywords(
            {
                "dim_context": shape.query_width,
                "value_dim_head": shape.head_size,
                "kv_heads": shape.heads,
                "dim_out": shape.query_width,
                "flash": False,
            },
            dim_context=shape.key_width,
            dim_head=shape.head_size,
            value_dim_head=shape.value_head_size,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            dim_out=shape.output_width,
            project_out=True,
            flash=mode["flash"],
        )
        context = "" if shape.sharing == "self" else ", context=key"
        weights = not mode["flash"]
        in_call = mode.options.get("causal in call")
        example = Example.of_module(
            dtype,
            mode["train"],
            f"layer = Attention({shape.query_width}{options})",
            f"{'layer' if in_call else 'attend'}(query{context}, "
            f"return_intermediates={weights}{{masks}})",
            imports="from x_transformers.x_transformers import Attention",
            output="{}[0]" if weights else "{}",
            weights="{}[1].post_softmax_attn" if weights else "",
        )
        wrapped = () if in_call else _CAUSAL_AS_BUILT
        return replace(example, build=(*example.build, *biases, *wrapped))

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        if mode.dropout:
            import torch

            torch.manual_seed(mode.draw)
        if not mode.options.get("causal in call"):
            # The constructor's argument sets these attributes.
            layer.causal = layer.attend.causal = masks.pop("causal", False)
        for name in ("attn_mask", "attn_bias"):
            if name in masks and masks[name].ndim > 2:
                masks[name] = _interleaved(masks[name], layer.heads, layer.kv_heads)
        lengths = query.shape[1], key.shape[1]
        if "slopes" in masks:
            alibi = _alibi(layer, masks.pop("slopes"))
            if "attn_bias" in masks:
                masks["attn_bias"] = masks["attn_bias"] + alibi(*lengths)
            else:
                masks["rel_pos"] = alibi
        if layer.rotary is not None:
            names = "rotary_pos_emb", "context_rotary_pos_emb"
            masks |= {
                n: layer.rotary.forward_from_seq_len(m) for n, m in zip(names, lengths, strict=True)
            }
        sinks = masks.pop("head_attn_sink", None)
        layer.attend.head_learned_sink = sinks is not None
        if sinks is not None:
            if mode["flash"]:
                raise Unsupported("no sinks with flash=True")
            sinks = _interleaved(sinks[:, None, None], layer.heads, layer.kv_heads)
            layer.attend.head_attn_sink = sinks.flatten()
        # `mask` also blocks keys, unless the keys are passed as a context.
        context = None if key is query and "mask" not in masks else key
        output, found = layer(query, context=context, return_intermediates=True, **masks)
        layer.attend.head_attn_sink = None
        weights = found.post_softmax_attn
        if sinks is not None:
            weights = weights[..., 1:]
        if weights is not None:
            weights = _interleaved(weights, layer.heads, layer.heads // layer.kv_heads)
        return output, weights


def _interleaved(array: Any, heads: int, shared: int) -> Any:
    """Return an array whose heads (axis -3) are reordered from group by group to the layer's order.

    The layer's order is the first head of each of the `shared` groups, then the second of each, and
    so on. Pass the size of a group as `shared` to undo the reordering. An axis of size 1 is
    unchanged.
    """
    if array.shape[-3] != heads or shared in (1, heads):
        return array
    return array.unflatten(-3, (shared, -1)).transpose(-4, -3).flatten(-4, -3)


def _alibi(layer: Any, slopes: Any) -> Any:
    """Return the library's ALiBi with `slopes`, `[heads]`, reordered as the layer's heads are."""
    from x_transformers.x_transformers import AlibiPositionalBias

    ordered = _interleaved(slopes[:, None, None], layer.heads, layer.kv_heads)
    alibi = AlibiPositionalBias(layer.heads, slopes=ordered.flatten().tolist())
    alibi.slopes = ordered
    return alibi


ADAPTERS = {"x-transformers": "XTransformersAttention"}
