"""keras.ops.dot_product_attention, on three backends.

Easy to miss in a port: query, key and value are `[batch length heads head]`, while `bias` and
`mask` are `[batch heads query key]`. `mask` is boolean, and True attends; numbers go into `bias`,
which is added to the logits. `is_causal` is aligned top-left. With fewer key/value heads, each
serves a group of neighbouring query heads. If `mask` blocks all keys of a query, the query attends
to all of them equally, because blocked logits become a large finite number. If a `bias` of -inf
blocks them all, the query gets NaN (on torch, zeros). Attention weights are not returned.

The backends compute attention differently: TensorFlow with the formula written out, JAX with
`jax.nn.dot_product_attention`, and torch with `scaled_dot_product_attention`, which has a single
argument for `mask` and `bias` and therefore rejects both at once. A `mask` of numbers is cast to
bool on JAX and torch, so that -inf attends; TensorFlow rejects a tensor of them, and casts a NumPy
array of them too. Since Keras 3.12, JAX and torch compute float64 in float32 and return float32;
TensorFlow (3.15) computes in float64, but with the factor 1/√d rounded to float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from conformance import CausalFlag, Example, Function, MaskArgument, Mode, Shape, Unsupported
from conformance.adapter import since
from conformance.adapters.keras_layers import OnBackend

_MASK = MaskArgument("mask", "batch heads query key", true="attends", broadcasts=True)
_BIAS = MaskArgument("bias", "batch heads query key", number="added", broadcasts=True)


def _example(backend: str) -> Example:
    return Example(
        imports=f'import os; os.environ["KERAS_BACKEND"] = "{backend}"\nimport keras',
        build="attention = keras.ops.dot_product_attention\n"
        "split = lambda x: keras.ops.reshape(x, (*x.shape[:2], {heads}, -1))",
        call="attention(split(query), split(key), split(value){masks})",
    )


class _DotProductAttention(OnBackend, Function):
    documentation = "https://keras.io/api/ops/nn/#dot_product_attention-function"
    layout = "batch length heads head"
    grouped = True
    custom_scale = True
    mask_arguments = (_MASK, _BIAS)
    causal_flag = CausalFlag("is_causal", alignment="top-left")

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        import keras

        return keras.ops.dot_product_attention(query, key, value, **masks, **options)


class TensorFlowDotProductAttention(_DotProductAttention):
    """The adapter for keras.ops.dot_product_attention on TensorFlow, run eagerly."""

    title = "keras.ops.dot_product_attention (TensorFlow)"
    framework = "tensorflow"
    example = _example("tensorflow")


class JaxDotProductAttention(_DotProductAttention):
    """The adapter for keras.ops.dot_product_attention on JAX, compiled."""

    title = "keras.ops.dot_product_attention (JAX)"
    framework = "jax"
    example = _example("jax")
    modes = (
        Mode("default", about="called with its defaults"),
        Mode(
            "optimised",
            every_case=False,
            dtypes=("float32",),
            optimised=True,
            about="as default, with XLA's optimisations on; the other is compiled quickly",
        ),
    )

    def check_shape(self, shape: Shape) -> None:
        super().check_shape(shape)
        if shape.value_head_size != shape.head_size:
            raise Unsupported("the value has the shape of the key")


class TorchDotProductAttention(_DotProductAttention):
    """The adapter for keras.ops.dot_product_attention on torch."""

    title = "keras.ops.dot_product_attention (torch)"
    framework = "torch"
    example = _example("torch")
    # Before Keras 3.14, torch's backend raises "doesn't support `bias`".
    mask_arguments = (
        _MASK,
        replace(_BIAS, alone=True, effect="always" if since("keras", "3.14") else "refused"),
    )


ADAPTERS = {
    "keras-tensorflow-sdpa": "TensorFlowDotProductAttention",
    "keras-jax-sdpa": "JaxDotProductAttention",
    "keras-torch-sdpa": "TorchDotProductAttention",
}
