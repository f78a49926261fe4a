"""flax.nnx.MultiHeadAttention.

As `flax.linen`'s, but: key and value have one width (`in_kv_features`); fewer key/value heads
are possible; there is a causal flag, aligned top-left; and without `sow_weights` (and without
dropout) it goes through `jax.nn.dot_product_attention`, another implementation with a softmax in
float32 whatever the dtype.
"""

from __future__ import annotations

from typing import Any

from conformance.adapters.flax_linen import FLAX_MASKS, FLAX_MODES, FLAX_PARAMETERS

from conformance import CausalFlag, Example, Layer, Mode, Script, Shape, Unsupported


class FlaxNnx(Layer):
    """flax.nnx.MultiHeadAttention, split and merged as a functional program."""

    title = "flax.nnx.MultiHeadAttention"
    documentation = "https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/nn/attention.html"
    framework = "jax"
    packages = ("flax",)
    returns_weights = "per head"
    fully_masked_row = "mean of values"
    dropout_modes = ("training",)
    example = Example(
        imports="from flax import nnx",
        build="attention = nnx.MultiHeadAttention("
        "{heads}, {query_width}, decode=False, rngs=nnx.Rngs(0))",
        call="attention(query, key, value{masks})",
    )

    mask_arguments = FLAX_MASKS
    causal_flag = CausalFlag("is_causal", alignment="top-left")
    parameters = FLAX_PARAMETERS
    modes = FLAX_MODES

    def check_shape(self, shape: Shape) -> None:
        if shape.value_head_size != shape.head_size:
            raise Unsupported("no value head size of its own")
        if shape.key_width != shape.value_width:
            raise Unsupported("key and value have one width")

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        from flax import nnx

        def make() -> Any:
            return nnx.MultiHeadAttention(
                shape.heads,
                shape.query_width,
                qkv_features=shape.heads * shape.head_size,
                out_features=shape.output_width,
                in_kv_features=shape.key_width,
                num_kv_heads=shape.kv_heads,
                use_bias=shape.bias,
                dtype=dtype,
                param_dtype=dtype,
                deterministic=not mode.options.get("train"),
                dropout_rate=mode.dropout,
                decode=False,
                keep_rngs=False,
                rngs=nnx.Rngs(0),
            )

        graph, _ = nnx.split(nnx.eval_shape(make))
        return graph

    def script(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Script:
        weights = "({}, layer.attention_weights.get_value()[0])[1]" if mode["sow"] else ""
        return Script(
            imports=("from flax import nnx",),
            build=(
                f"graph, _ = nnx.split(nnx.MultiHeadAttention({shape.heads}, {shape.query_width}, "
                f"qkv_features={shape.heads * shape.head_size}, "
                f"out_features={shape.output_width}, in_kv_features={shape.key_width}, "
                f"num_kv_heads={shape.kv_heads}, use_bias={shape.bias}, "
                f'dtype="{dtype}", param_dtype="{dtype}", decode=False, keep_rngs=False, '
                f"deterministic={not mode.options.get('train')}, rngs=nnx.Rngs(0)))",
            ),
            load=(
                "leaves = [(tuple(k.split('/')), nnx.Param(a)) for k, a in native.items()]",
                "layer = nnx.merge(graph, nnx.from_flat_state(leaves))",
            ),
            call=f"layer(query, key, value, sow_weights={mode['sow']}{{masks}})",
            weights=weights,
        )

    def bind(self, layer: Any, parameters: dict[str, Any]) -> Any:
        from flax import nnx

        leaves = [(tuple(name.split("/")), nnx.Param(array)) for name, array in parameters.items()]
        return nnx.merge(layer, nnx.from_flat_state(leaves))

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        if mode.dropout:
            from flax import nnx

            masks = masks | {"rngs": nnx.Rngs(dropout=mode.draw)}
        output = layer(query, key, value, sow_weights=mode["sow"], **masks)
        return (output, layer.attention_weights.get_value()[0]) if mode["sow"] else output
