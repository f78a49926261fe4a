"""flax.nnx.MultiHeadAttention, called as a pure function.

Easy to miss in a port: the same as in `flax.linen`, with a few differences. Key and value share
`in_kv_features`; there may be fewer key/value heads than query heads; and there is a causal flag,
aligned top-left. Without `sow_weights` (and without dropout), the layer calls
`jax.nn.dot_product_attention`, another implementation, whose softmax is in float32 for all dtypes.

Flax 0.10.5 introduced the use of that function, 0.10.7 a separate width of key and value, 0.12.6
fewer key/value heads, and 0.12.8 the causal flag.
"""

from __future__ import annotations

from typing import Any

from conformance import CausalFlag, Example, Layer, Mode, Shape, Unsupported
from conformance.adapter import keywords, since
from conformance.adapters.flax_linen import FLAX_MASKS, FLAX_MODES, FLAX_PARAMETERS
from conformance.adapters.shapes import ask


class FlaxNnx(Layer):
    """The adapter for flax.nnx.MultiHeadAttention, split and merged to make it a pure function."""

    title = "flax.nnx.MultiHeadAttention"
    documentation = "https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/nn/attention.html"
    framework = "jax"
    packages = ("flax",)
    imports = ("flax.nnx",)
    returns_weights = "per head"
    fully_masked_row = "mean of values"
    dropout_modes = ("training",)

    mask_arguments = FLAX_MASKS
    parameters = FLAX_PARAMETERS
    modes = FLAX_MODES

    def __init__(self) -> None:
        super().__init__()
        if since("flax", "0.12.8"):
            self.causal_flag = CausalFlag("is_causal", alignment="top-left")

    def check_shape(self, shape: Shape) -> None:
        ask(shape, "values")
        if shape.key_width != shape.value_width:
            raise Unsupported("key and value have one width")
        if shape.key_width != shape.query_width and not since("flax", "0.10.7"):
            raise Unsupported("query, key and value have one width before Flax 0.10.7")
        if shape.kv_heads != shape.heads and not since("flax", "0.12.6"):
            raise Unsupported("no fewer key/value heads than query heads before Flax 0.12.6")

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        from flax import nnx

        def make() -> Any:
            return nnx.MultiHeadAttention(
                shape.heads,
                shape.query_width,
                qkv_features=shape.heads * shape.head_size,
                out_features=shape.output_width,
                use_bias=shape.bias,
                dtype=dtype,
                param_dtype=dtype,
                deterministic=not mode.options.get("train"),
                dropout_rate=mode.dropout,
                decode=False,
                rngs=nnx.Rngs(0),
                **_newer(shape),
            )

        return nnx.split(nnx.eval_shape(make))

    def example_for(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Example:
        value = "get_value()" if since("flax", "0.12.1") else "value"
        weights = f"({{}}, layer.attention_weights.{value}[0])[1]" if mode["sow"] else ""
        usual = {
            "qkv_features": shape.query_width,
            "out_features": shape.query_width,
            "in_kv_features": shape.query_width,
            "num_kv_heads": shape.heads,
            "use_bias": True,
            "dtype": "float32",
            "param_dtype": "float32",
        }
        options = keywords(
            usual,
            qkv_features=shape.heads * shape.head_size,
            out_features=shape.output_width,
            **_newer(shape),
            use_bias=shape.bias,
            dtype=dtype,
            param_dtype=dtype,
            deterministic=not mode.options.get("train"),
        )
        return Example(
            imports="from flax import nnx",
            build=(
                f"graph, state = nnx.split(nnx.MultiHeadAttention({shape.heads}, "
                f"{shape.query_width}{options}, decode=False, rngs=nnx.Rngs(0)))",
            ),
            fresh="layer = nnx.merge(graph, state)",
            load=(
                "layer = nnx.merge(graph, state)",
                "for k, a in native.items(): "
                "setattr(getattr(layer, k.split('/')[0]), k.split('/')[1], nnx.Param(a))",
            ),
            call=f"layer(query, key, value, sow_weights={mode['sow']}{{masks}})",
            weights=weights,
        )

    def bind(self, layer: Any, parameters: dict[str, Any]) -> Any:
        from flax import nnx

        bound = nnx.merge(*layer)
        for name, array in parameters.items():
            module, leaf = name.split("/")
            setattr(getattr(bound, module), leaf, nnx.Param(array))
        return bound

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        if mode.dropout:
            from flax import nnx

            masks = masks | {"rngs": nnx.Rngs(dropout=mode.draw)}
        output = layer(query, key, value, sow_weights=mode["sow"], **masks)
        if not mode["sow"]:
            return output
        sown = layer.attention_weights
        return output, (sown.get_value() if since("flax", "0.12.1") else sown.value)[0]


def _newer(shape: Shape) -> dict[str, Any]:
    """Return constructor arguments that the installed Flax accepts, but earlier versions do not."""
    found: dict[str, Any] = {}
    if since("flax", "0.10.7"):
        found |= {"in_kv_features": shape.key_width, "keep_rngs": False}
    if since("flax", "0.12.6"):
        found |= {"num_kv_heads": shape.kv_heads}
    return found


ADAPTERS = {"flax-nnx": "FlaxNnx"}
