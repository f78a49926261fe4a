"""keras_hub.layers.CachedMultiHeadAttention: Keras' attention with a cache, for decoding.

Easy to miss in a port: the cache holds *projected* keys and values, `[batch 2 length heads head]`,
in one array of full length from the beginning, so keys and values must have the same head size.
The projections of a call are written at `cache_update_index`, and queries attend to everything else
in the cache too, even zeros, unless the mask blocks it. So the mask has the length of the cache,
`[batch query length]`, also for a single query, and the caller must block positions that are not
yet filled. There is no causal flag, and masks attached to tensors are not read, unlike in the base
class. With a cache and no index, queries attend only to the cache, and key and value are ignored.
The layer returns (output, cache), or (output, scores, cache).

The adapter runs the layer on TensorFlow, which keras-hub needs in any case.
"""

from __future__ import annotations

from typing import Any

from conformance import Example, MaskArgument, Mode, Shape, Unsupported
from conformance.adapter import Natives
from conformance.adapters.keras_layers import KerasMultiHeadAttention

_SCORES = {"return_attention_scores": True, "training": False}
_NO_CACHE = ("scores", "no-scores", "training")


class CachedMultiHeadAttention(KerasMultiHeadAttention):
    """The adapter for the layer, without a cache and with caches that are filled in three ways."""

    title = "keras_hub.layers.CachedMultiHeadAttention"
    documentation = "https://keras.io/api/keras_hub/modeling_layers/cached_multi_head_attention"
    framework = "tensorflow"
    packages = ("keras-hub", "keras")
    made_by = "keras_hub.layers.CachedMultiHeadAttention"
    causal_flag = None
    implicit_masks = ()
    mask_arguments = (
        MaskArgument(
            "attention_mask",
            ("batch query key", "batch heads query key"),
            true="attends",
            number="attends, 0 or 1 only",
            broadcasts=True,
        ),
    )
    modes = (
        Mode("scores", _SCORES, about="without a cache, return_attention_scores=True"),
        Mode(
            "no-scores",
            _SCORES | {"return_attention_scores": False},
            weights=False,
            about="without a cache and without scores: the backend's own attention",
        ),
        Mode(
            "training",
            _SCORES | {"training": True},
            every_case=False,
            about="as scores, training=True",
        ),
        Mode(
            "filled-at-once",
            _SCORES,
            gradients=False,
            about="with an empty cache of the full length, and cache_update_index=0",
        ),
        Mode(
            "static-cache",
            _SCORES,
            gradients=False,
            about="with the cache of an earlier call, and no cache_update_index",
        ),
        Mode(
            "token-by-token",
            _SCORES,
            gradients=False,
            about="with an empty cache, one call for each token, cache_update_index its place; "
            "where no query may attend what comes after it",
        ),
    )

    def layer_class(self) -> Any:
        import keras_hub

        return keras_hub.layers.CachedMultiHeadAttention

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        if mode.name not in _NO_CACHE and shape.value_head_size != shape.head_size:
            raise Unsupported("one cache holds keys and values: their heads have one size")
        return super().build(shape, dtype, scale, mode)

    def example_for(
        self, shape: Shape, dtype: str, scale: float | None, mode: Mode
    ) -> Example | None:
        example = super().example_for(shape, dtype, scale, mode)
        return example if mode.name in _NO_CACHE else None

    def bind(self, layer: Any, parameters: Natives) -> Any:
        return super().bind(layer, parameters), parameters["key/kernel"].shape[1:]

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        attend, heads = layer
        if mode.name in _NO_CACHE:
            return attend(query, value, key, **mode.options, **masks)
        import keras

        cache = keras.ops.zeros((key.shape[0], 2, key.shape[1], *heads), query.dtype)
        if mode.name == "token-by-token":
            return _token_by_token(attend, (query, value, key), cache, masks, mode)
        options = mode.options | masks
        output, weights, cache = attend(
            query, value, key, cache=cache, cache_update_index=0, **options
        )
        if mode.name == "static-cache":
            output, weights, _ = attend(query, value[:, :1] * 0, cache=cache, **options)
        return output, weights


def _token_by_token(
    attend: Any, inputs: tuple[Any, ...], cache: Any, masks: dict[str, Any], mode: Mode
) -> Any:
    import keras

    length = cache.shape[2]
    mask = masks.get("attention_mask", keras.ops.ones((1, 1, length), "bool"))
    future = keras.ops.triu(keras.ops.ones((length, length), "bool"), 1)
    if inputs[0].shape[1] != length or keras.ops.any(keras.ops.cast(mask, "bool") & future):
        raise Unsupported("it would attend what is not in the cache yet")
    steps = []
    for place in range(length):
        here = slice(place, place + 1)
        row = mask if mask.shape[-2] == 1 else mask[..., here, :]
        tokens = (array[:, here] for array in inputs)
        *step, cache = attend(
            *tokens, attention_mask=row, cache=cache, cache_update_index=place, **mode.options
        )
        steps.append(step)
    outputs, weights = zip(*steps, strict=True)
    return keras.ops.concatenate(outputs, axis=1), keras.ops.concatenate(weights, axis=2)


ADAPTERS = {"keras-hub-cached": "CachedMultiHeadAttention"}
