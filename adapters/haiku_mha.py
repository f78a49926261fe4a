"""haiku.MultiHeadAttention, called through `hk.transform`.

Easy to miss in a port: heads are concatenated in one axis of the kernels, and the last projection
has the default name `linear`. By default (`model_size`), the output is as wide as all heads
together, not as the input. True in a mask attends, and a mask has four axes, any of which may have
size 1. There is no causal flag, no bias on logits, no dropout and no way to choose the scale, and
weights are not returned.

Blocked logits become -1e30, which is -inf in float16. So the output of a fully masked query is the
mean of the values, but NaN in float16, and the adapter does not declare it.
"""

from __future__ import annotations

from typing import Any

from conformance import Example, Layer, MaskArgument, Mode, Parameter, Shape
from conformance.adapter import keywords
from conformance.adapters.shapes import ask

_NAME = "multi_head_attention"


def _kernel(module: str, name: str) -> tuple[Parameter, Parameter]:
    return (
        Parameter(f"{_NAME}/{module}/w", name, "embed heads head -> embed (heads head)"),
        Parameter(f"{_NAME}/{module}/b", f"{name}_bias", "heads head -> (heads head)"),
    )


class HaikuMultiHeadAttention(Layer):
    """The adapter for haiku.MultiHeadAttention, as a pure function of its parameters."""

    title = "haiku.MultiHeadAttention"
    documentation = "https://dm-haiku.readthedocs.io/en/latest/api.html#multiheadattention"
    framework = "jax"
    packages = ("dm-haiku",)
    imports = ("haiku",)

    mask_arguments = (
        MaskArgument(
            "mask",
            "batch heads query key",
            true="attends",
            number="attends if nonzero",
            broadcasts=True,
        ),
    )
    parameters = (
        *_kernel("query", "query"),
        *_kernel("key", "key"),
        *_kernel("value", "value"),
        Parameter(f"{_NAME}/linear/w", "output", "heads head embed -> (heads head) embed"),
        Parameter(f"{_NAME}/linear/b", "output_bias", "embed -> embed"),
    )
    modes = (
        Mode("apply", about="hk.without_apply_rng(hk.transform(...)).apply, compiled quickly"),
        Mode(
            "optimised",
            every_case=False,
            dtypes=("float32",),
            optimised=True,
            about="as apply, with XLA's optimisations on",
        ),
    )

    def check_shape(self, shape: Shape) -> None:
        ask(shape, "heads")

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        import haiku as hk

        def attend(*inputs: Any, **masks: Any) -> Any:
            layer = hk.MultiHeadAttention(
                shape.heads,
                shape.head_size,
                w_init=hk.initializers.VarianceScaling(),
                with_bias=shape.bias,
                value_size=shape.value_head_size,
                model_size=shape.output_width,
            )
            return layer(*inputs, **masks)

        return hk.without_apply_rng(hk.transform(attend))

    def example_for(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Example:
        options = keywords(
            {"with_bias": True, "value_size": shape.head_size, "model_size": shape.query_width},
            with_bias=shape.bias,
            value_size=shape.value_head_size,
            model_size=shape.output_width,
        )
        return Example(
            imports="import haiku as hk",
            build=(
                "def attend(*inputs, **masks):",
                "    w_init = hk.initializers.VarianceScaling()",
                f"    made = hk.MultiHeadAttention({shape.heads}, {shape.head_size}, "
                f"w_init=w_init{options})",
                "    return made(*inputs, **masks)",
                "layer = hk.without_apply_rng(hk.transform(attend))",
            ),
            fresh="params = layer.init(jax.random.key(0), query, key, value)",
            load=(
                "params = {}",
                "for k, a in native.items(): params.setdefault(k[:-2], {})[k[-1]] = a",
            ),
            call="layer.apply(params, query, key, value{masks})",
        )

    def bind(self, layer: Any, parameters: dict[str, Any]) -> Any:
        tree: dict[str, dict[str, Any]] = {}
        for name, array in parameters.items():
            module, _, leaf = name.rpartition("/")
            tree.setdefault(module, {})[leaf] = array
        return layer, tree

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        transformed, parameters = layer
        return transformed.apply(parameters, query, key, value, **masks)


ADAPTERS = {"haiku-mha": "HaikuMultiHeadAttention"}
