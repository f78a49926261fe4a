"""tf_keras.layers.MultiHeadAttention: Keras 2, which is continued as tf_keras alongside Keras 3.

Easy to miss in a port: the order of arguments is query, *value*, key. True in `attention_mask`
attends, and there is no other mask argument: padding is read from the masks that
`Embedding(mask_zero=True)` attaches to tensors, for query, value and key alike. If `attention_mask`
is the only mask, it is not cast to bool: 1 minus the mask is multiplied by a large negative number
and *added* to the logits, so that 0.5 blocks too, and 2 attracts. A fully masked query therefore
attends to all keys equally, but in float64 as if nothing were masked, because adding -1e9 preserves
the logits there. Its output is not zero, unlike in Keras 3 with scores.
`softmax_robust_masking=True` replaces the logits by that large negative number. The causal flag is
aligned top-left. Attention weights are returned per head if requested, which does not change the
computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from conformance import (
    CausalFlag,
    Example,
    Layer,
    MaskArgument,
    Mode,
    Shape,
)
from conformance.adapter import Natives, keywords
from conformance.adapters.keras_layers import KERAS_PARAMETERS
from conformance.adapters.shapes import ask


class TfKerasMultiHeadAttention(Layer):
    """The adapter for tf_keras.layers.MultiHeadAttention, run eagerly."""

    title = "tf_keras.layers.MultiHeadAttention"
    documentation = "https://keras.io/2/api/layers/attention_layers/multi_head_attention"
    framework = "tensorflow"
    packages = ("tf-keras",)
    returns_weights = "per head"
    # In the other modes it depends on the dtype: only float64 keeps the logit after adding -1e9.
    fully_masked_row: ClassVar = {"robust-masking": "mean of values"}
    mask_arguments = (
        MaskArgument(
            "attention_mask",
            ("batch query key", "batch heads query key"),
            true="attends",
            number="attends, 0 or 1 only",
            broadcasts=True,
        ),
    )
    causal_flag = CausalFlag("use_causal_mask", alignment="top-left")
    # Keras attaches these to tensors, and layers read them from their inputs.
    implicit_masks = (
        MaskArgument("query._keras_mask", "batch query", true="attends"),
        MaskArgument("value._keras_mask", "batch key", true="attends"),
        MaskArgument("key._keras_mask", "batch key", true="attends"),
    )
    parameters = KERAS_PARAMETERS
    modes = (
        Mode(
            "scores",
            {"return_attention_scores": True, "training": False},
            about="called with return_attention_scores=True",
        ),
        Mode(
            "no-scores",
            {"return_attention_scores": False, "training": False},
            weights=False,
            about="called without it",
        ),
        Mode(
            "training",
            {"return_attention_scores": True, "training": True},
            every_case=False,
            about="return_attention_scores=True, training=True",
        ),
        Mode(
            "robust-masking",
            {"return_attention_scores": True, "training": False},
            about="as scores, built with softmax_robust_masking=True",
        ),
    )
    dropout_modes = ("training",)

    def check_shape(self, shape: Shape) -> None:
        ask(shape, "heads")

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        import tensorflow as tf
        import tf_keras

        if mode.dropout:
            tf_keras.utils.set_random_seed(mode.draw)
        layer = tf_keras.layers.MultiHeadAttention(
            shape.heads,
            shape.head_size,
            value_dim=shape.value_head_size,
            use_bias=shape.bias,
            output_shape=shape.output_width,
            dropout=mode.dropout,
            softmax_robust_masking=mode.name == "robust-masking",
            dtype=dtype,
        )
        sizes = shape.input_shapes()
        # The first call creates the variables.
        layer(*(tf.zeros(sizes[name], dtype) for name in ("query", "value", "key")))
        return layer

    def example_for(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Example:
        inputs = shape.input_shapes()
        zeros = ", ".join(
            f'tf.zeros({inputs[name]}, "{dtype}")' for name in ("query", "value", "key")
        )
        options = keywords(
            {
                "value_dim": shape.head_size,
                "output_shape": shape.query_width,
                "use_bias": True,
                "softmax_robust_masking": False,
                "dtype": "float32",
            },
            value_dim=shape.value_head_size,
            output_shape=shape.output_width,
            use_bias=shape.bias,
            softmax_robust_masking=mode.name == "robust-masking",
            dtype=dtype,
        )
        usual = {"return_attention_scores": False, "training": False}
        scores = mode["return_attention_scores"]
        return Example(
            imports="import tf_keras",
            build=(
                f"layer = tf_keras.layers.MultiHeadAttention({shape.heads}, {shape.head_size}"
                f"{options})",
            ),
            load=(
                f"layer({zeros})  # makes its weights",
                'for v in layer.weights: v.assign(native[v.name.split("/", 1)[1][:-2]])',
            ),
            call=f"layer(query, value, key{keywords(usual, **mode.options)}{{masks}})",
            output="{}[0]" if scores else "{}",
            weights="{}[1]" if scores else "",
            parameter='next(v for v in layer.weights if v.name.endswith("/{name}:0"))',
        )

    def own_parameters(
        self, layer: Any, parameters: Mapping[str, np.ndarray], dtype: str, device: str
    ) -> Natives:
        variables = {
            variable.name.split("/", 1)[1].removesuffix(":0"): variable
            for variable in layer.trainable_variables
        }
        for name, variable in variables.items():
            variable.assign(parameters[name])
        return variables

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        inputs = {"query": query, "value": value, "key": key}
        for name in [name for name in masks if name.endswith("._keras_mask")]:
            inputs[name.partition(".")[0]]._keras_mask = masks.pop(name)
        return layer(*inputs.values(), **mode.options, **masks)


ADAPTERS = {"tf-keras-mha": "TfKerasMultiHeadAttention"}
