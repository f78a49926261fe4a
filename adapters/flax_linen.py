"""flax.linen.MultiHeadDotProductAttention, called through `apply`.

Easy to miss in a port: kernels are `[embed heads head]`, and that of the output is
`[heads head embed]`, so nothing is transposed; True in a mask means that the query attends to the
key; a mask of three axes is read as `[heads query key]`, not `[batch query key]`; there is no
causal flag, no additive bias and no way to choose the scale. A fully masked query attends to all
keys equally, because blocked logits become a large negative finite number.
"""

from __future__ import annotations

from typing import Any

from conformance import Example, Layer, MaskArgument, Mode, Parameter, Shape
from conformance.adapter import keywords
from conformance.adapters.shapes import ask

FLAX_PARAMETERS = (
    Parameter("query/kernel", "query", "embed heads head -> embed heads head"),
    Parameter("query/bias", "query_bias", "heads head -> heads head"),
    Parameter("key/kernel", "key", "embed heads head -> embed heads head"),
    Parameter("key/bias", "key_bias", "heads head -> heads head"),
    Parameter("value/kernel", "value", "embed heads head -> embed heads head"),
    Parameter("value/bias", "value_bias", "heads head -> heads head"),
    Parameter("out/kernel", "output", "heads head embed -> heads head embed"),
    Parameter("out/bias", "output_bias", "embed -> embed"),
)
"""The parameters of both Flax layers, which have equal names and shapes."""
FLAX_MASKS = (
    MaskArgument(
        "mask",
        "batch heads query key",
        true="attends",
        number="attends if nonzero",
        broadcasts=True,
    ),
)
FLAX_MODES = (
    Mode(
        "sown-weights",
        {"sow": True},
        about="called with sow_weights=True: weights are put among the intermediates",
    ),
    Mode(
        "no-weights",
        {"sow": False},
        weights=False,
        every_case=False,
        core_cases=True,
        about="without sow_weights",
    ),
    Mode(
        "optimised",
        {"sow": True},
        every_case=False,
        dtypes=("float32",),
        optimised=True,
        about="as sown-weights, with XLA's optimisations on; the others are compiled quickly",
    ),
    # Without dropout, training runs the same program.
    Mode(
        "training",
        {"sow": True, "train": True},
        every_case=False,
        dtypes=("float32",),
        about="as sown-weights, deterministic=False",
    ),
)


class FlaxLinen(Layer):
    """The adapter for flax.linen.MultiHeadDotProductAttention, called through `apply`."""

    title = "flax.linen.MultiHeadDotProductAttention"
    documentation = (
        "https://flax-linen.readthedocs.io/en/latest/api_reference/flax.linen/layers.html"
        "#flax.linen.MultiHeadDotProductAttention"
    )
    framework = "jax"
    packages = ("flax",)
    imports = ("flax.linen",)
    returns_weights = "per head"
    fully_masked_row = "mean of values"
    dropout_modes = ("training",)

    mask_arguments = FLAX_MASKS
    parameters = FLAX_PARAMETERS
    modes = FLAX_MODES

    def check_shape(self, shape: Shape) -> None:
        ask(shape, "heads", "values")

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        from flax import linen

        return linen.MultiHeadDotProductAttention(
            num_heads=shape.heads,
            qkv_features=shape.heads * shape.head_size,
            out_features=shape.output_width,
            use_bias=shape.bias,
            deterministic=not mode.options.get("train"),
            dropout_rate=mode.dropout,
            dtype=dtype,
            param_dtype=dtype,
        )

    def example_for(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Example:
        sow = ", sow_weights=True, mutable=['intermediates']" if mode["sow"] else ""
        usual = {
            "qkv_features": shape.query_width,
            "out_features": shape.query_width,
            "use_bias": True,
            "deterministic": None,
            "dtype": "float32",
            "param_dtype": "float32",
        }
        options = keywords(
            usual,
            qkv_features=shape.heads * shape.head_size,
            out_features=shape.output_width,
            use_bias=shape.bias,
            deterministic=not mode.options.get("train"),
            dtype=dtype,
            param_dtype=dtype,
        )
        return Example(
            imports="from flax import linen, traverse_util",
            build=f"layer = linen.MultiHeadDotProductAttention({shape.heads}{options})",
            fresh="params = layer.init(jax.random.key(0), query, key, value)",
            load='params = {"params": traverse_util.unflatten_dict(native, sep="/")}',
            call=f"layer.apply(params, query, key, value{sow}{{masks}})",
            output="{}[0]" if sow else "{}",
            weights='{}[1]["intermediates"]["attention_weights"][0]' if sow else "",
        )

    def bind(self, layer: Any, parameters: dict[str, Any]) -> Any:
        tree: dict[str, dict[str, Any]] = {}
        for name, array in parameters.items():
            module, leaf = name.split("/")
            tree.setdefault(module, {})[leaf] = array
        return layer, {"params": tree}

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        import jax

        module, variables = layer
        if mode.dropout:
            masks = masks | {"rngs": {"dropout": jax.random.key(mode.draw)}}
        if not mode["sow"]:
            return module.apply(variables, query, key, value, **masks)
        output, sown = module.apply(
            variables, query, key, value, sow_weights=True, mutable=["intermediates"], **masks
        )
        return output, sown["intermediates"]["attention_weights"][0]


ADAPTERS = {"flax-linen": "FlaxLinen"}
