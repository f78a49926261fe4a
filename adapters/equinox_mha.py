"""equinox.nn.MultiheadAttention, mapped over a batch by `jax.vmap`.

Easy to miss in a port: inputs are `[length width]`, without a batch axis; users map the layer over
a batch. Kernels are `[out in]`, applied as `W x`; heads are concatenated in the first axis, and in
the second axis of the output's kernel. Biases are off unless they are enabled by four flags. True
in a mask attends; a mask is `[query key]` or `[heads query key]`, and its axes must have full size,
not 1. There is no causal flag, no bias on logits and no way to choose the scale, and weights are
not returned. For half precision, the softmax is computed in float32. Dropout is on unless
`inference=True`; while it is on, each call and each batch entry needs a random key.
"""

from __future__ import annotations

from typing import Any

from conformance import Example, Layer, MaskArgument, Mode, Parameter, Shape
from conformance.adapter import keywords
from conformance.adapters.shapes import ask

_WIDTHS = ("key_size", "value_size", "output_size")
_PROJECTION = "embed heads head -> (heads head) embed"


class EquinoxMultiheadAttention(Layer):
    """The adapter for equinox.nn.MultiheadAttention, in inference and in training."""

    title = "equinox.nn.MultiheadAttention"
    documentation = (
        "https://docs.kidger.site/equinox/api/nn/attention/#equinox.nn.MultiheadAttention"
    )
    framework = "jax"
    packages = ("equinox",)
    imports = ("equinox",)
    fully_masked_row = "mean of values"
    dropout_modes = ("training",)

    # jax.vmap removes the batch axis: the layer gets [query key] or [heads query key].
    mask_arguments = (
        MaskArgument(
            "mask",
            ("batch query key", "batch heads query key"),
            true="attends",
            number="attends if nonzero",
        ),
    )
    parameters = (
        Parameter("query_proj.weight", "query", _PROJECTION),
        Parameter("query_proj.bias", "query_bias", "heads head -> (heads head)"),
        Parameter("key_proj.weight", "key", _PROJECTION),
        Parameter("key_proj.bias", "key_bias", "heads head -> (heads head)"),
        Parameter("value_proj.weight", "value", _PROJECTION),
        Parameter("value_proj.bias", "value_bias", "heads head -> (heads head)"),
        Parameter("output_proj.weight", "output", "heads head embed -> embed (heads head)"),
        Parameter("output_proj.bias", "output_bias", "embed -> embed"),
    )
    modes = (
        Mode("inference", {"inference": True}, about="made with inference=True"),
        Mode(
            "optimised",
            {"inference": True},
            every_case=False,
            dtypes=("float32",),
            optimised=True,
            about="as inference, with XLA's optimisations on; the others are compiled quickly",
        ),
        Mode(
            "training",
            {"inference": False},
            every_case=False,
            dtypes=("float32",),
            about="as made, inference=False",
        ),
    )

    def check_shape(self, shape: Shape) -> None:
        ask(shape, "heads")

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        import equinox
        import jax

        def make() -> Any:
            return equinox.nn.MultiheadAttention(
                shape.heads,
                **_sizes(shape),
                dropout_p=mode.dropout,
                inference=mode["inference"],
                dtype=jax.numpy.dtype(dtype),
                key=jax.random.key(0),
            )

        return equinox.filter_eval_shape(make)

    def example_for(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Example:
        size = shape.query_width // shape.heads
        usual = {"qk_size": size, "vo_size": size, **dict.fromkeys(_WIDTHS, shape.query_width)}
        sizes = {name: value for name, value in _sizes(shape).items() if value}
        options = keywords(usual | {"inference": False}, **sizes, inference=mode["inference"])
        return Example(
            imports="import equinox as eqx",
            build=(
                f"layer = eqx.nn.MultiheadAttention({shape.heads}{options}, dtype=jnp.{dtype}, "
                "key=jax.random.key(0))",
            ),
            fresh="loaded = layer",
            load=(
                "where = lambda layer: "
                "[getattr(getattr(layer, k.split('.')[0]), k.split('.')[1]) for k in native]",
                "loaded = eqx.tree_at(where, layer, list(native.values()))",
            ),
            call="jax.vmap(loaded)(query, key, value{masks})",
        )

    def bind(self, layer: Any, parameters: dict[str, Any]) -> Any:
        import equinox

        def where(tree: Any) -> list[Any]:
            places = (name.split(".") for name in parameters)
            return [getattr(getattr(tree, module), leaf) for module, leaf in places]

        return equinox.tree_at(where, layer, list(parameters.values()))

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        import jax

        if query.ndim == 2:
            return layer(query, key, value, **masks)
        if mode.dropout:
            masks = masks | {"key": jax.random.split(jax.random.key(mode.draw), len(query))}
        return jax.vmap(layer)(query, key, value, **masks)


def _sizes(shape: Shape) -> dict[str, Any]:
    return {
        "query_size": shape.query_width,
        "key_size": shape.key_width,
        "value_size": shape.value_width,
        "output_size": shape.output_width,
        "qk_size": shape.head_size,
        "vo_size": shape.value_head_size,
        "use_query_bias": shape.bias,
        "use_key_bias": shape.bias,
        "use_value_bias": shape.bias,
        "use_output_bias": shape.bias,
    }


ADAPTERS = {"equinox-mha": "EquinoxMultiheadAttention"}
