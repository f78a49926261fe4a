"""keras.layers.MultiHeadAttention, GroupQueryAttention and AdditiveAttention, on three backends.

Easy to miss in a port: the order of arguments is query, *value*, key. Kernels have the heads as a
separate axis: `[embed heads head]`, and `[heads value_head embed]` for the output. True in a mask
attends. Numbers are never added: they are cast to bool, so 0/-inf means the opposite of what it
means elsewhere. (In GroupQueryAttention with scores, an `attention_mask` that is the only mask
attends where it exceeds 0.5.) MultiHeadAttention overwrites `query_mask` with the mask that is
attached to the query, so passing one has no effect. It also removes the masks that are attached to
its inputs, so the next layer that reads these inputs attends to the padding. The causal flag is
aligned top-left. If the scores are requested, the layer takes another path: an explicit softmax,
where a fully masked row is zero (since Keras 3.10), instead of the backend's
`dot_product_attention`, where such a row attends to all keys. AdditiveAttention has neither heads
nor projections; its inputs are a list, [query, value, key], and so is its mask, [query_mask,
value_mask].

Keras runs on one backend per process, which is chosen before Keras is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from conformance import (
    Call,
    CausalFlag,
    Example,
    Function,
    Layer,
    MaskArgument,
    Mode,
    Parameter,
    Problem,
    Shape,
    Unavailable,
    Unsupported,
)
from conformance.adapter import (
    Framework,
    FullyMasked,
    NativeAdapter,
    Natives,
    framework,
    keywords,
)
from conformance.adapters.shapes import ask

_DOCS = "https://keras.io/api/layers/attention_layers"

_SCORES = {"return_attention_scores": True, "training": False}
_NO_SCORES = {"return_attention_scores": False, "training": False}
_TRAINING = {"return_attention_scores": True, "training": True}
_OPTIMISED = ("float32",)
_ABOUT = {
    "scores": "called with return_attention_scores=True",
    "no-scores": "called without it, which may take another path: the backend's own attention",
    "training": "return_attention_scores=True, training=True",
    "optimised": "as the first mode, with XLA's optimisations on; the others are compiled quickly",
}
_MODES: tuple[Mode, ...] = (
    Mode("scores", _SCORES, about=_ABOUT["scores"]),
    Mode("no-scores", _NO_SCORES, weights=False, about=_ABOUT["no-scores"]),
    Mode("training", _TRAINING, every_case=False, about=_ABOUT["training"]),
)
# Each mode is compiled separately; without dropout, training is the same program as scores.
_COMPILED_MODES: tuple[Mode, ...] = (
    _MODES[0],
    replace(_MODES[1], every_case=False, core_cases=True),
    replace(_MODES[2], dtypes=_OPTIMISED),
    Mode(
        "optimised",
        _SCORES,
        every_case=False,
        dtypes=_OPTIMISED,
        optimised=True,
        about=_ABOUT["optimised"],
    ),
)
_MASKED_WITH_SCORES: Mapping[str, FullyMasked] = dict.fromkeys(
    ("scores", "training", "optimised"), "output bias"
)
_MASKED: Mapping[str, FullyMasked] = {**_MASKED_WITH_SCORES, "no-scores": "mean of values"}


KERAS_PARAMETERS = (
    Parameter("query/kernel", "query", "embed heads head -> embed heads head"),
    Parameter("query/bias", "query_bias", "heads head -> heads head"),
    Parameter("key/kernel", "key", "embed heads head -> embed heads head"),
    Parameter("key/bias", "key_bias", "heads head -> heads head"),
    Parameter("value/kernel", "value", "embed heads head -> embed heads head"),
    Parameter("value/bias", "value_bias", "heads head -> heads head"),
    Parameter("attention_output/kernel", "output", "heads head embed -> heads head embed"),
    Parameter("attention_output/bias", "output_bias", "embed -> embed"),
)
"""The parameters of MultiHeadAttention in Keras 2 and 3, and of GroupQueryAttention."""


class OnBackend(NativeAdapter):
    """The base class of all Keras 3 adapters; a process can use only one Keras backend."""

    packages = ("keras",)

    @property
    def bridge(self) -> Framework:
        return _backend(self.framework)

    @contextmanager
    def around_call(self, problem: Problem, call: Call) -> Iterator[None]:
        import keras

        if self.framework != "torch":
            yield  # on the default device, which the bridge has set
            return
        # On torch, Keras moves tensors to a default device of its own, so set it. In the scope of
        # "cpu:0", torch layers with dropout cannot be made: a parameter that is moved from "cpu" to
        # "cpu:0" is no longer a parameter.
        with keras.device(self.bridge.device_name(call.device)):
            yield


class _Keras(OnBackend):
    """The base class of the adapters for Keras layers."""

    returns_weights = "per head"
    causal_flag = CausalFlag("use_causal_mask", alignment="top-left")


def _backend(name: str) -> Framework:
    """Select a Keras backend and return the suite's interface to its framework.

    Raises:
        Unavailable: if Keras cannot be imported, or already runs on another backend.
    """
    if "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = name
    bridge = framework(name)
    try:
        import keras
    except ModuleNotFoundError as error:
        if error.name != "keras":
            raise Unavailable(f"keras does not import: {error}") from error
        raise Unavailable("keras is not installed; pip install keras") from error
    running = keras.config.backend()
    if running != name:
        raise Unavailable(
            f"keras already runs on backend {running} in this process; run {name} alone"
        )
    return bridge


class _Stateless:
    """A Keras layer whose weights are passed to each call, keyed by their names in the layer."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.variables = {
            variable.path.split("/", 1)[1]: variable for variable in layer.trainable_variables
        }

    def __call__(self, weights: Natives, *inputs: Any, **arguments: Any) -> Any:
        import keras

        mapping = [(variable, weights[name]) for name, variable in self.variables.items()]
        with keras.StatelessScope(state_mapping=mapping):
            return self.layer(*inputs, **arguments)

    def named_parameters(self) -> list[tuple[str, Any]]:
        """Return the trainable weights as (name, value) pairs, like torch's `named_parameters`."""
        return [(name, variable.value) for name, variable in self.variables.items()]

    def to(self, device: str) -> _Stateless:
        """Return the layer unchanged; this is for code that calls `torch.nn.Module.to`."""
        return self


class _DotProduct(_Keras, Layer):
    """The base class of the adapters for Keras layers that include projections."""

    fully_masked_row = _MASKED
    parameters = KERAS_PARAMETERS
    # Keras itself passes the first three on from an Embedding with mask_zero=True.
    mask_arguments = (
        MaskArgument("value_mask", "batch key", true="attends", number="attends if nonzero"),
        MaskArgument("key_mask", "batch key", true="attends", number="attends if nonzero"),
        MaskArgument("query_mask", "batch query", true="attends", number="attends if nonzero"),
        MaskArgument(
            "attention_mask",
            ("batch query key", "batch heads query key"),
            true="attends",
            number="attends if nonzero",
            broadcasts=True,
        ),
    )
    # Keras attaches these to tensors, and layers read them from their inputs.
    implicit_masks = (
        MaskArgument("query._keras_mask", "batch query", true="attends"),
        MaskArgument("value._keras_mask", "batch key", true="attends"),
        MaskArgument("key._keras_mask", "batch key", true="attends"),
    )
    modes = _MODES
    dropout_modes = ("training",)

    def example_for(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Example:
        inputs = shape.input_shapes()
        sizes = f"{inputs['query']}, {inputs['value']}, {inputs['key']}"
        usual = {"use_bias": True, "dtype": "float32"}
        usual |= {"return_attention_scores": False, "training": False}
        made = f"{self._constructor(shape)}{keywords(usual, use_bias=shape.bias, dtype=dtype)})"
        options = f"{keywords(usual, **mode.options)}{{masks}})"
        scores = mode["return_attention_scores"]
        parameter = 'next(v for v in layer.weights if v.path.endswith("/{name}"))'
        example = Example(
            imports=(
                f'import os; os.environ["KERAS_BACKEND"] = "{self.framework}"',
                f"import {made.partition('.')[0]}",
            ),
            build=f"layer = {made}",
            load=(
                f"layer.build({sizes})",
                'for v in layer.weights: v.assign(native[v.path.split("/", 1)[1]])',
            ),
            call=f"layer(query, value, key{options}",
            output="{}[0]" if scores else "{}",
            weights="{}[1]" if scores else "",
            parameter=f"{parameter}.value" if self.framework == "torch" else parameter,
        )
        if self.framework != "jax":
            return example
        # In JAX parameters are arguments, so that one can differentiate by them.
        return replace(
            example,
            build=(f"layer = {made}", f"layer.build({sizes})"),
            fresh="call = layer",
            load=(
                'own = [native[v.path.split("/", 1)[1]] for v in layer.trainable_variables]',
                "rest = [v.value for v in layer.non_trainable_variables]",
                "call = lambda *inputs, **options: "
                "layer.stateless_call(own, rest, *inputs, **options)[0]",
            ),
            call=f"call(query, value, key{options}",
        )

    def _constructor(self, shape: Shape) -> str:
        """Return code that constructs the layer, without the closing parenthesis."""
        raise NotImplementedError

    def bind(self, layer: _Stateless, parameters: Natives) -> Any:
        return partial(layer, parameters)

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        inputs = {"query": query, "value": value, "key": key}
        for name in [name for name in masks if name.endswith("._keras_mask")]:
            mask = masks.pop(name)
            try:
                inputs[name.partition(".")[0]]._keras_mask = mask
            except AttributeError as error:
                raise Unsupported("these tensors take no attributes, so no masks") from error
        return layer(*inputs.values(), **mode.options, **masks)


class KerasMultiHeadAttention(_DotProduct):
    """The base class of the adapters for Keras's MultiHeadAttention and layers derived from it."""

    documentation = f"{_DOCS}/multi_head_attention/"
    made_by = "keras.layers.MultiHeadAttention"

    def layer_class(self) -> Any:
        """Return the Keras class of the layer."""
        import keras

        return keras.layers.MultiHeadAttention

    def check_shape(self, shape: Shape) -> None:
        ask(shape, "heads")

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        layer = self.layer_class()(
            shape.heads,
            shape.head_size,
            value_dim=shape.value_head_size,
            use_bias=shape.bias,
            output_shape=shape.output_width,
            **_common(dtype, mode),
        )
        return _built(layer, shape)

    def _constructor(self, shape: Shape) -> str:
        options = keywords(
            {"value_dim": shape.head_size, "output_shape": shape.query_width},
            value_dim=shape.value_head_size,
            output_shape=shape.output_width,
        )
        return f"{self.made_by}({shape.heads}, {shape.head_size}{options}"


class _GroupQueryAttention(_DotProduct):
    documentation = f"{_DOCS}/group_query_attention/"
    # An attention_mask that comes alone attends above ½ if the scores are returned, and wherever it
    # is not 0 if they are not.
    mask_arguments = tuple(
        replace(item, number="attends, 0 or 1 only") if item.name == "attention_mask" else item
        for item in _DotProduct.mask_arguments
    )

    def check_shape(self, shape: Shape) -> None:
        ask(shape, "values", "output")

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        import keras

        layer = keras.layers.GroupQueryAttention(
            shape.head_size,
            shape.heads,
            shape.kv_heads,
            use_bias=shape.bias,
            **_common(dtype, mode),
        )
        return _built(layer, shape)

    def _constructor(self, shape: Shape) -> str:
        sizes = f"{shape.head_size}, {shape.heads}, {shape.kv_heads}"
        return f"keras.layers.GroupQueryAttention({sizes}"


def _common(dtype: str, mode: Mode) -> dict[str, Any]:
    # Weights are loaded anyway, and JAX compiles random ones for each shape.
    common = {"dtype": dtype, "kernel_initializer": _zeros(), "bias_initializer": _zeros()}
    return common | ({"dropout": mode.dropout, "seed": mode.draw} if mode.dropout else {})


@cache
def _zeros() -> Any:
    """Return an initializer of zeros: "zeros", or on JAX an object that needs no compilation."""
    import keras

    if keras.config.backend() != "jax":
        return "zeros"
    import jax

    class Zeros(keras.initializers.Initializer):  # type: ignore[misc]
        def __call__(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
            return jax.device_put(np.zeros(shape, dtype))

    return Zeros()


def _built(layer: Any, shape: Shape) -> _Stateless:
    inputs = shape.input_shapes()
    layer.build(inputs["query"], inputs["value"], inputs["key"])
    return _Stateless(layer)


class _AdditiveAttention(_Keras, Function):
    """The base class of adapters that run one AdditiveAttention per head, on projected heads.

    The output of a fully masked query is not declared, because it depends on the dtype: 1e9 (65504
    in float16) is subtracted from blocked scores. In float32, this rounds the scores away, but in
    float64, they keep enough digits to attend as if unmasked.
    """

    documentation = f"{_DOCS}/additive_attention/"
    native_layout = "batch length head"
    scores = ("additive",)
    # These are the elements of its argument `mask`, which is a list.
    mask_arguments = (
        MaskArgument("value_mask", "batch key", true="attends", number="attends if nonzero"),
        MaskArgument("query_mask", "batch query", true="attends", number="attends if nonzero"),
    )
    # Without dropout, neither training nor requesting the scores changes the computation.
    modes: tuple[Mode, ...] = (Mode("scores", about=_ABOUT["scores"]),)

    def __init__(self) -> None:
        self._layers: dict[tuple[int, str], _Stateless] = {}

    def attend_for(self, problem: Problem, call: Call) -> tuple[Callable[..., Any], Hashable]:
        import keras

        # Build layers here, because they cannot be built inside a compiled program.
        size, dtype = problem.shape.head_size, problem.dtype
        if (size, dtype) not in self._layers:
            layer = keras.layers.AdditiveAttention(use_scale=True, dtype=dtype)
            layer.build([(None, None, size)] * 3)
            self._layers[size, dtype] = _Stateless(layer)
        return super().attend_for(problem, call)

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        import keras

        layer = self._layers[query.shape[-1], self.bridge.dtype(query)]
        listed = [masks.get("query_mask"), masks.get("value_mask")]
        given = any(mask is not None for mask in listed)
        heads = [
            layer(
                {"scale": scale},
                [query[:, head], value[:, head], key[:, head]],
                mask=listed if given else None,
                return_attention_scores=True,
                use_causal_mask=masks.get("use_causal_mask", False),
            )
            for head, scale in enumerate(options["score"])
        ]
        return tuple(keras.ops.stack(arrays, axis=1) for arrays in zip(*heads, strict=True))


class TensorFlowMultiHeadAttention(KerasMultiHeadAttention):
    """The adapter for MultiHeadAttention on TensorFlow, run eagerly."""

    title = "keras.layers.MultiHeadAttention (TensorFlow)"
    framework = "tensorflow"


class TensorFlowGroupQueryAttention(_GroupQueryAttention):
    """The adapter for GroupQueryAttention on TensorFlow, run eagerly."""

    title = "keras.layers.GroupQueryAttention (TensorFlow)"
    framework = "tensorflow"


class TensorFlowAdditiveAttention(_AdditiveAttention):
    """The adapter for AdditiveAttention on TensorFlow, run eagerly."""

    title = "keras.layers.AdditiveAttention (TensorFlow)"
    framework = "tensorflow"


class JaxMultiHeadAttention(KerasMultiHeadAttention):
    """The adapter for MultiHeadAttention on JAX, compiled."""

    title = "keras.layers.MultiHeadAttention (JAX)"
    framework = "jax"
    modes = _COMPILED_MODES


class JaxGroupQueryAttention(_GroupQueryAttention):
    """The adapter for GroupQueryAttention on JAX, compiled."""

    title = "keras.layers.GroupQueryAttention (JAX)"
    framework = "jax"
    modes = _COMPILED_MODES


class JaxAdditiveAttention(_AdditiveAttention):
    """The adapter for AdditiveAttention on JAX, compiled."""

    title = "keras.layers.AdditiveAttention (JAX)"
    framework = "jax"
    modes = (
        Mode("scores", about=_ABOUT["scores"]),
        Mode(
            "optimised",
            every_case=False,
            dtypes=_OPTIMISED,
            optimised=True,
            about=_ABOUT["optimised"],
        ),
    )


class TorchMultiHeadAttention(KerasMultiHeadAttention):
    """The adapter for MultiHeadAttention on torch."""

    title = "keras.layers.MultiHeadAttention (torch)"
    framework = "torch"
    # Without scores it depends on the dtype, because a large finite number is added to a blocked
    # logit: -2.4e38 leaves nothing of it, float16's -45856 leaves all.
    fully_masked_row = _MASKED_WITH_SCORES


class TorchGroupQueryAttention(_GroupQueryAttention):
    """The adapter for GroupQueryAttention on torch."""

    title = "keras.layers.GroupQueryAttention (torch)"
    framework = "torch"
    fully_masked_row = _MASKED_WITH_SCORES


class TorchAdditiveAttention(_AdditiveAttention):
    """The adapter for AdditiveAttention on torch."""

    title = "keras.layers.AdditiveAttention (torch)"
    framework = "torch"


ADAPTERS = {
    "keras-tensorflow-mha": "TensorFlowMultiHeadAttention",
    "keras-tensorflow-gqa": "TensorFlowGroupQueryAttention",
    "keras-tensorflow-additive": "TensorFlowAdditiveAttention",
    "keras-jax-mha": "JaxMultiHeadAttention",
    "keras-jax-gqa": "JaxGroupQueryAttention",
    "keras-jax-additive": "JaxAdditiveAttention",
    "keras-torch-mha": "TorchMultiHeadAttention",
    "keras-torch-gqa": "TorchGroupQueryAttention",
    "keras-torch-additive": "TorchAdditiveAttention",
}
