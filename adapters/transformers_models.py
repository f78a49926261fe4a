"""Decoders of Hugging Face transformers: attention with the masks and positions of its model.

Each adapter examines a whole model with one layer, made from its configuration: Mistral, Gemma 2,
gpt-oss, Qwen 3, the text models of Qwen 2.5-VL and Qwen 3-VL, Llama, Bloom or Falcon. The
embeddings, norms, feed-forward network and residual connections are removed. The rest of the model
still makes the mask, the window, the rotary angles and the caches as usual, and calls the
attention. `transformers_llama.py` examines a layer alone.

Easy to miss in a port: these models are causal without a mask. Their `attention_mask` is
`[batch key]`, with 1 for tokens and 0 for padding; a mask with four axes replaces the causal mask
and the window, and is added (eager) or may be boolean (SDPA). `sliding_window` counts the query's
own key, so a window of W covers this key and the W - 1 keys before it. Documents packed into one
sequence are separated only by `position_ids` that restart, and only without a mask and without a
cache: with `use_cache`, which is true by default in inference, they attend to each other. Rotary
embeddings rotate the two halves of a whole head, by angles from float32 tables that are rounded to
the model's dtype. `model.to(torch.bfloat16)` rounds the frequencies too, unlike
`dtype=torch.bfloat16`, which is how models are made here.

Llama's adapter passes `rope_parameters` with scaled frequencies too: linear, dynamic, YaRN,
LongRoPE, and as in Llama 3.1. Dynamic scaling reads the original length from
`max_position_embeddings` only. A base that has grown for a longer text remains for those after it
that are not shorter than the original length. Beside a cache, keys keep the angles with which they
were stored.

The models differ as follows:

- Mistral: a window in every layer.
- Gemma 2: `attn_logit_softcapping`, and a window in every other layer. SDPA has no soft cap.
- Gemma 2 and Llama: bidirectional spans, which a multimodal model hands over as a mask. They are
  passed as `block_sequence_ids` to the functions of `masking_utils` that make the masks, as
  PaliGemma does. -1 is the id of tokens in no span. A window does not hold inside a span.
- gpt-oss: a sink for each head, which is a parameter of the layer; a window in every other layer.
  SDPA would ignore the sinks. The softmax is computed in the model's dtype.
- Qwen 3: an RMS norm of queries and keys before they are rotated, in float32. There is no option to
  omit it.
- Qwen 2.5-VL and Qwen 3-VL: positions of time, height and width, `position_ids`
  `[3 batch length]`, by which rotary pairs turn. `mrope_section` counts the pairs of each, side by
  side in Qwen 2.5-VL, and interleaved in Qwen 3-VL, which does not read `mrope_interleaved`. Packed
  documents are told apart only by a row of positions of tokens before the three,
  `[4 batch length]`. From `position_ids` `[batch length]`, Qwen 3-VL makes this row, too, and Qwen
  2.5-VL does not. The projections of Qwen 2.5-VL always have biases, but for the output; a window
  is in the layers from `max_window_layers` on. Qwen 3-VL has the norms of Qwen 3.
- Bloom: ALiBi with the slopes of the paper's code, also for head counts that are not powers of two.
  It adds slope · key position, which for causal queries is equivalent to minus slope · distance.
- Falcon: rotary embeddings, or ALiBi that is divided by √head and rounded to bfloat16 regardless of
  the dtype. Eager attention adds ALiBi twice.

For problems without rotary embeddings, cos = 1 and sin = 0 replace the model's angles; for problems
without sinks, the sinks are -inf. If a problem has biases and the model has none, the model's
projections are replaced by projections with biases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, ClassVar, cast

import numpy as np

from conformance import (
    Alibi,
    CausalFlag,
    HeadNorm,
    Layer,
    Lengths,
    Mode,
    Parameter,
    PositionIds,
    Problem,
    RotaryBase,
    RotaryConfig,
    SegmentIds,
    Shape,
    Sinks,
    SoftCap,
    Spans,
    Unsupported,
    Window,
)
from conformance.adapter import Checkpoint, Said, Static
from conformance.adapters.shapes import ask
from conformance.adapters.transformers_attention import Eager, Sdpa

_PROJECTIONS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
_CHUNKS = (1, 2, 3, 5)
"""The numbers of tokens in successive calls with a cache, repeated until no token is left."""


class _Packed(SegmentIds):
    """Segment ids passed as positions that restart, from which the model recognises segments.

    This encoding is offered only if there are no key lengths, queries and keys have equal ids, and
    the tokens of each segment are consecutive.
    """

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        segments = problem.segments
        if segments is None or problem.key_lengths is not None:
            return
        ids = segments.query
        begins = np.diff(ids, axis=1, prepend=ids[:, :1] - 1) != 0
        runs = begins.sum(axis=1)
        together = runs == [len(np.unique(row)) for row in ids]
        if together.all() and np.array_equal(ids, segments.key):
            (way,) = super().ways(problem, said)
            positions = problem.position_of_queries.astype(self.dtype)
            arguments = {**way.arguments, self.query: positions}
            yield replace(way, arguments=arguments, needs_flag=True)


@dataclass(frozen=True)
class _OwnSlopes(Alibi):
    """ALiBi with the model's built-in slopes, which is offered only with the causal flag.

    Args:
        divided: whether the slopes are divided by √head_size, like the logits.
    """

    divided: bool = False

    def own(self, shape: Shape) -> np.ndarray:
        return paper_slopes(shape.heads) / (shape.head_size**0.5 if self.divided else 1.0)

    def native(self, slopes: np.ndarray, problem: Problem) -> bool:
        return True

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        for way in super().ways(problem, said):
            yield replace(way, needs_flag=True)


def paper_slopes(heads: int) -> np.ndarray:
    """Return the ALiBi slopes `[heads]` as the code of the paper's authors computes them.

    If `heads` is a power of two, these are the slopes in the paper. Otherwise, let n be the next
    smaller power of two: after the slopes for n heads come the first, third, fifth and so on of the
    slopes for 2n heads, until each head has a slope.
    """
    power = 2 ** int(np.log2(heads))
    slopes = 2.0 ** (-8 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4 / power * np.arange(1, 2 * (heads - power) + 1, 2))
    return np.concatenate([slopes, between])


def _apart(block: str) -> tuple[Parameter, ...]:
    """Return the parameter table of the module at the path `block`, with separate projections."""
    rows = []
    for native, name in _PROJECTIONS.items():
        heads = "kv_heads" if name in ("key", "value") else "heads"
        if name == "output":
            patterns = "heads head embed -> embed (heads head)", "embed -> embed"
        else:
            patterns = (
                f"embed {heads} head -> ({heads} head) embed",
                f"{heads} head -> ({heads} head)",
            )
        rows.append(Parameter(f"{block}.{native}.weight", name, patterns[0]))
        rows.append(Parameter(f"{block}.{native}.bias", f"{name}_bias", patterns[1]))
    return tuple(rows)


def _together(block: str) -> tuple[Parameter, ...]:
    """Return the parameter table of the module at the path `block`, with a fused projection."""
    fused = f"{block}.query_key_value"
    return (
        Parameter(
            f"{fused}.weight",
            "query key value",
            "embed heads head -> (heads head) embed",
            stack=0,
            grouped=True,
        ),
        Parameter(
            f"{fused}.bias",
            "query_bias key_bias value_bias",
            "heads head -> (heads head)",
            stack=0,
            grouped=True,
        ),
        Parameter(f"{block}.dense.weight", "output", "heads head embed -> embed (heads head)"),
        Parameter(f"{block}.dense.bias", "output_bias", "embed -> embed"),
    )


_SLIDING = {"layer_types": ["sliding_attention"]}
_FULL = {"layer_types": ["full_attention"]}

_MODES = (
    Mode("eval", {"chunks": ()}, about="after .eval()"),
    Mode(
        "cache",
        {"chunks": _CHUNKS, "static": False},
        every_case=False,
        about="after .eval(), in chunks of 1, 2, 3 and 5 tokens beside a DynamicCache",
    ),
    Mode(
        "static-cache",
        {"chunks": _CHUNKS, "static": True},
        gradients=False,
        every_case=False,
        about="in the same chunks beside a StaticCache, under torch.no_grad()",
    ),
)


class _Decoder(Layer):
    """The base class of adapters for one-layer models in which only the attention remains.

    Attributes:
        config: the name of the model's configuration class.
        implementation: the value of `attn_implementation`.
        attention: the path of the attention module in the model.
    """

    documentation = "https://huggingface.co/docs/transformers/attention_interface"
    framework = "torch"
    packages = ("transformers",)
    causal_flag = CausalFlag("causal", alone=True)
    modes = _MODES
    config: ClassVar[str]
    implementation: ClassVar[str]
    attention: ClassVar[str] = "layers.0.self_attn"

    def check_shape(self, shape: Shape) -> None:
        ask(shape, "self", "values", "output")

    def parameters_for(self, shape: Shape) -> tuple[Parameter, ...]:
        return _apart(self.attention)

    def build_with(
        self,
        shape: Shape,
        dtype: str,
        scale: float | None,
        mode: Mode,
        settings: Mapping[str, Static],
    ) -> Any:
        import torch
        import transformers

        if not hasattr(transformers, self.config):
            raise Unsupported("this version of transformers does not have the model")
        model = transformers.AutoModel.from_config(
            self.configuration(shape, scale, settings),
            dtype=getattr(torch, dtype),
            attn_implementation=self.implementation,
        )
        layers, _, name = self.attention.split(".")
        attention = getattr(getattr(model, layers)[0], name)
        for part in [part for part, _ in model.named_children()]:
            if part == "rotary_emb" and not {"rope_theta", "rope_parameters"} & {*settings}:
                delattr(model, part)
                model.rotary_emb = _no_rotation
            elif part != "rotary_emb":
                setattr(model, part, torch.nn.Identity())
        alone = torch.nn.Module()
        setattr(alone, name, attention)
        alone.forward = lambda hidden, **given: self.attend(model, attention, hidden, given)
        setattr(model, layers, torch.nn.ModuleList([alone]))
        self.finish(attention, shape, settings)
        return model.eval()

    def attend(self, model: Any, attention: Any, hidden: Any, given: dict[str, Any]) -> Any:
        """Call the attention as the model's layer would, and return what the layer returns.

        The weights, or None, are kept in `model.returned_weights`.
        """
        output, model.returned_weights = attention(hidden, **given)
        return output

    def configuration(
        self, shape: Shape, scale: float | None, settings: Mapping[str, Static]
    ) -> Any:
        """Return the model's configuration; `settings` has the arguments that express features."""
        import transformers

        turns: Any = {"rope_type": "default", "rope_theta": settings.get("rope_theta", 10000.0)}
        turns = dict(cast("Any", settings.get("rope_parameters", turns)))
        # Dynamic scaling reads no other length than that of the model.
        before = turns.pop("original_max_position_embeddings", 2048)
        most = before
        if turns["rope_type"] not in ("default", "linear", "dynamic"):
            most = int(before * turns["factor"])
            turns["original_max_position_embeddings"] = before
        options = {
            "max_position_embeddings": most,
            "vocab_size": 1,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": None,
            "hidden_size": 2 * shape.heads,
            "intermediate_size": 1,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "rope_parameters": turns,
            **self.options(shape, scale, settings),
        }
        config = getattr(transformers, self.config)(**options)
        if "hidden_size" not in self.options(shape, scale, settings):
            # The configuration rejects sizes that the attention supports.
            config.hidden_size, config.head_dim = shape.query_width, shape.head_size
        return config

    def options(
        self, shape: Shape, scale: float | None, settings: Mapping[str, Static]
    ) -> dict[str, Any]:
        """Return the configuration arguments that are specific to this model."""
        return {"attention_bias": shape.bias}

    def finish(self, attention: Any, shape: Shape, settings: Mapping[str, Static]) -> None:
        """Make the changes to the attention module for which the configuration has no option.

        The base class makes none.
        """

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        import torch

        length = query.shape[1]
        mask, lengths = masks.get("attention_mask"), masks.get("lengths")
        if lengths is not None:
            mask = (torch.arange(length, device=query.device) < lengths[:, None]).long()
        elif mask is None and "causal" not in masks:
            mask = query.new_zeros(1, 1, length, length)
        given = {"attention_mask": mask}
        positions = self.positions(masks)
        if positions is not None:
            given["position_ids"] = positions
        if "block_sequence_ids" in masks:
            if mode["chunks"]:
                raise Unsupported("beside a cache, no span is whole")
            given["attention_mask"] = self.spanned(layer.config, query, given, masks)
        if not mode["chunks"]:
            output = layer(inputs_embeds=query, use_cache=False, **given).last_hidden_state
            return (output, layer.returned_weights) if self.returns_weights else output
        if "causal" not in masks or "packed" in masks:
            raise Unsupported("beside a cache, a problem is causal and not packed")
        if _is_of_length(layer.config):
            raise Unsupported("beside a cache, keys keep the angles of a shorter text")
        return _in_chunks(layer, query, given, mode)

    def positions(self, masks: dict[str, Any]) -> Any:
        """Return the `position_ids` of a call; None if they are not passed."""
        return masks.get("position_ids", masks.get("packed"))

    def spanned(
        self, config: Any, query: Any, given: Mapping[str, Any], masks: Mapping[str, Any]
    ) -> Any:
        """Return the masks of a multimodal model, with spans, for this model of its text.

        Models whose layers are of several types take one for each type.
        """
        from transformers import masking_utils

        told = (config, query, given["attention_mask"], None)
        more = {
            "position_ids": given.get("position_ids"),
            "block_sequence_ids": masks["block_sequence_ids"],
        }
        mask = masking_utils.create_causal_mask(*told, **more)
        if not getattr(config, "layer_types", None):
            return mask
        sliding = masking_utils.create_sliding_window_causal_mask(*told, **more)
        return {"full_attention": mask, "sliding_attention": sliding}


def _is_of_length(config: Any) -> bool:
    """Return whether rotary frequencies depend on the length of the text."""
    turns = getattr(config, "rope_parameters", None) or {}
    return turns.get("rope_type") in ("dynamic", "longrope")


def _in_chunks(model: Any, query: Any, given: Mapping[str, Any], mode: Mode) -> Any:
    """Return the output computed chunk by chunk, with a cache of the tokens of earlier chunks.

    `mode` says how many tokens a chunk has; `given` holds mask and positions of the whole sequence.
    """
    import torch
    from transformers import DynamicCache, StaticCache

    length, end, outputs = query.shape[1], 0, []
    if mode["static"]:
        cache = StaticCache(config=model.config, max_cache_len=length)
    else:
        cache = DynamicCache(config=model.config)
    for size in cycle(mode["chunks"]):
        start, end = end, min(end + size, length)
        now = {name: array for name, array in given.items() if array is not None}
        if "attention_mask" in now:
            # Bloom needs one column per key; with a StaticCache, as many as its capacity.
            unknown = length - end if mode["static"] else 0
            seen = now["attention_mask"][:, :end]
            now["attention_mask"] = torch.nn.functional.pad(seen, (0, unknown))
        if "position_ids" in now:
            now["position_ids"] = now["position_ids"][..., start:end]
        found = model(
            inputs_embeds=query[:, start:end], past_key_values=cache, use_cache=True, **now
        )
        outputs.append(found.last_hidden_state)
        if end == length:
            return torch.cat(outputs, dim=1)


def _no_rotation(hidden: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    """Return cosine 1 and sine 0, with which rotary embeddings leave queries and keys unchanged."""
    cosine = hidden.new_ones(1, 1, 1)
    return cosine, cosine - cosine


def _with_biases(attention: Any, *, bias: bool = True) -> None:
    """Replace the four projections with ones of the same sizes that have biases, or have none."""
    import torch

    for name in _PROJECTIONS:
        weight = getattr(attention, name).weight
        projection = torch.nn.Linear(*weight.shape[::-1], bias=bias, dtype=weight.dtype)
        setattr(attention, name, projection)


_WINDOW = Window("sliding_window", "own and before", none=None, needs_causal=True)
# The model's mask `[batch key]`, with which it is always causal.
_PADDING = Lengths("lengths", dtype="int64", aligns=False, needs_causal=True)
_NORM = HeadNorm(
    "layers.0.self_attn.q_norm.weight",
    "layers.0.self_attn.k_norm.weight",
    epsilon="rms_norm_eps",
    parameters=True,
)
_TURNS = RotaryBase("rope_theta")
_SCALED = RotaryConfig(kinds=("linear", "dynamic", "yarn", "longrope", "llama3"), partial=False)
# The ids are an argument of masks, which a model makes of types of tokens.
_SPANS = Spans("block_sequence_ids", none=-1, limited=False, dtype="int64")
_ROTARY = (
    _TURNS,
    PositionIds("position_ids", dtype="int64"),
    _Packed("packed", dtype="int64"),
    _PADDING,
)


def checkpoint_of(model: str, **more: Any) -> Checkpoint:
    """Return the declaration of files of a model whose names are those of Llama's."""
    return Checkpoint(
        (model,),
        ("layers.{layer}.self_attn.",),
        own="layers.0.self_attn.",
        beside={"rotary_emb.inv_freq": "buffers"},
        **more,
    )


class _Eager(Eager, _Decoder):
    """The base class of adapters with eager attention."""


class _Sdpa(Sdpa, _Decoder):
    """The base class of adapters that use torch's scaled_dot_product_attention."""


class _Llama(_Decoder):
    """The base class of both adapters for LlamaModel."""

    config = "LlamaConfig"
    features = (_SCALED, _SPANS, *_ROTARY)
    rotary = _TURNS
    checkpoint = checkpoint_of("llama")


class LlamaModelEager(_Llama, _Eager):
    """The adapter for LlamaModel with eager attention."""

    title = "transformers Llama model (eager)"


class LlamaModelSdpa(_Llama, _Sdpa):
    """The adapter for LlamaModel with SDPA."""

    title = "transformers Llama model (sdpa)"


class _Mistral(_Decoder):
    config = "MistralConfig"
    features = (_WINDOW, *_ROTARY)
    rotary = _TURNS
    checkpoint = checkpoint_of("mistral")

    def options(
        self, shape: Shape, scale: float | None, settings: Mapping[str, Static]
    ) -> dict[str, Any]:
        return {"sliding_window": settings.get("sliding_window")}

    def finish(self, attention: Any, shape: Shape, settings: Mapping[str, Static]) -> None:
        if shape.bias:
            _with_biases(attention)


class MistralEager(_Mistral, _Eager):
    """The adapter for MistralModel with eager attention."""

    title = "transformers Mistral (eager)"


class MistralSdpa(_Mistral, _Sdpa):
    """The adapter for MistralModel with SDPA."""

    title = "transformers Mistral (sdpa)"


def _layer_types(settings: Mapping[str, Static]) -> dict[str, Any]:
    """Return configuration arguments that give the only layer the window in `settings`, if any."""
    kind = "sliding_attention" if "sliding_window" in settings else "full_attention"
    # A number is required even if no layer uses it.
    return {"sliding_window": settings.get("sliding_window", 4096), "layer_types": [kind]}


def scale_of_gemma(config: Mapping[str, Any], layer: int) -> float:
    """Return the scale of the logits in any layer of Gemma 2 or 3."""
    return float(config["query_pre_attn_scalar"]) ** -0.5


class Gemma2Eager(_Eager):
    """The adapter for Gemma2Model with eager attention."""

    title = "transformers Gemma 2 (eager)"
    config = "Gemma2Config"
    custom_scale = True
    features = (SoftCap("attn_logit_softcapping", none=None), _WINDOW, _SPANS, *_ROTARY)
    rotary = _TURNS
    checkpoint = checkpoint_of("gemma2", scale=scale_of_gemma)

    def options(
        self, shape: Shape, scale: float | None, settings: Mapping[str, Static]
    ) -> dict[str, Any]:
        scalar = shape.head_size if scale is None else round(scale**-2) if scale else 0
        if scale is not None and (scalar < 1 or scalar**-0.5 != scale):
            raise Unsupported("the scale is 1/√n of an integer n")
        return {
            "attention_bias": shape.bias,
            "attn_logit_softcapping": settings.get("attn_logit_softcapping"),
            "query_pre_attn_scalar": scalar,
            **_layer_types(settings),
        }


class GptOssEager(_Eager):
    """The adapter for GptOssModel with eager attention."""

    title = "transformers gpt-oss (eager)"
    config = "GptOssConfig"
    features = (Sinks("layers.0.self_attn.sinks", parameter=True), _WINDOW, *_ROTARY)
    rotary = _TURNS
    checkpoint = checkpoint_of("gpt_oss")

    def check_shape(self, shape: Shape) -> None:
        super().check_shape(shape)
        ask(shape, "even")

    def options(
        self, shape: Shape, scale: float | None, settings: Mapping[str, Static]
    ) -> dict[str, Any]:
        return {
            "attention_bias": shape.bias,
            "num_local_experts": 1,
            "num_experts_per_tok": 1,
            **_layer_types(settings),
        }

    def finish(self, attention: Any, shape: Shape, settings: Mapping[str, Static]) -> None:
        if "layers.0.self_attn.sinks" not in settings:
            none = attention.sinks.detach().fill_(-float("inf"))
            del attention.sinks
            attention.register_buffer("sinks", none)


class _Qwen3(_Decoder):
    config = "Qwen3Config"
    always = ("query/key norm",)
    features = (_NORM, _WINDOW, *_ROTARY)
    rotary = _TURNS
    checkpoint = checkpoint_of("qwen3")

    def options(
        self, shape: Shape, scale: float | None, settings: Mapping[str, Static]
    ) -> dict[str, Any]:
        return {
            "attention_bias": shape.bias,
            "use_sliding_window": "sliding_window" in settings,
            "rms_norm_eps": settings.get("rms_norm_eps", 1e-6),
            **_layer_types(settings),
        }

    def finish(self, attention: Any, shape: Shape, settings: Mapping[str, Static]) -> None:
        if "rms_norm_eps" not in settings:
            import torch

            attention.q_norm = attention.k_norm = torch.nn.Identity()
        if shape.bias:
            _with_biases(attention)


class Qwen3Eager(_Qwen3, _Eager):
    """The adapter for Qwen3Model with eager attention."""

    title = "transformers Qwen 3 (eager)"


class Qwen3Sdpa(_Qwen3, _Sdpa):
    """The adapter for Qwen3Model with SDPA."""

    title = "transformers Qwen 3 (sdpa)"


class _OnAxes(_Decoder):
    """The base class for Qwen 2.5-VL and Qwen 3-VL, whose tokens have three positions."""

    def configuration(
        self, shape: Shape, scale: float | None, settings: Mapping[str, Static]
    ) -> Any:
        config = super().configuration(shape, scale, settings)
        # Without sections, those of the published models would be read.
        config.rope_parameters.setdefault("mrope_section", [shape.head_size // 2, 0, 0])
        return config

    def positions(self, masks: dict[str, Any]) -> Any:
        """Return positions of time, height and width, after those of packed documents if any."""
        import torch

        axes, packed = masks.get("axis_ids"), masks.get("packed")
        if packed is None:
            return axes if axes is not None else masks.get("position_ids")
        turned = packed.expand(3, -1, -1) if axes is None else axes
        return torch.cat([packed[None], turned])

    def finish(self, attention: Any, shape: Shape, settings: Mapping[str, Static]) -> None:
        if "rms_norm_eps" not in settings and hasattr(attention, "q_norm"):
            import torch

            attention.q_norm = attention.k_norm = torch.nn.Identity()
        _with_biases(attention, bias=shape.bias)


def _on_axes(sections: str) -> RotaryConfig:
    """Return the declaration of a configuration with sections that are laid out so."""
    return replace(_SCALED, axes="axis_ids", sections=(sections,), dtype="int64")


class _Qwen25Vl(_OnAxes):
    config = "Qwen2_5_VLTextConfig"
    features = (_on_axes("side by side"), _WINDOW, *_ROTARY)
    rotary = _TURNS

    def check_shape(self, shape: Shape) -> None:
        super().check_shape(shape)
        ask(shape, "width")

    def options(
        self, shape: Shape, scale: float | None, settings: Mapping[str, Static]
    ) -> dict[str, Any]:
        return {
            "hidden_size": shape.query_width,
            "use_sliding_window": "sliding_window" in settings,
            **_layer_types(settings),
        }


class Qwen25VlEager(_Qwen25Vl, _Eager):
    """The adapter for Qwen2_5_VLTextModel with eager attention."""

    title = "transformers Qwen 2.5-VL (eager)"


class Qwen25VlSdpa(_Qwen25Vl, _Sdpa):
    """The adapter for Qwen2_5_VLTextModel with SDPA."""

    title = "transformers Qwen 2.5-VL (sdpa)"


class _Qwen3Vl(_OnAxes):
    config = "Qwen3VLTextConfig"
    always = ("query/key norm",)
    features = (_on_axes("interleaved"), _NORM, *_ROTARY)
    rotary = _TURNS

    def options(
        self, shape: Shape, scale: float | None, settings: Mapping[str, Static]
    ) -> dict[str, Any]:
        return {"rms_norm_eps": settings.get("rms_norm_eps", 1e-6)}


class Qwen3VlEager(_Qwen3Vl, _Eager):
    """The adapter for Qwen3VLTextModel with eager attention."""

    title = "transformers Qwen 3-VL (eager)"


class Qwen3VlSdpa(_Qwen3Vl, _Sdpa):
    """The adapter for Qwen3VLTextModel with SDPA."""

    title = "transformers Qwen 3-VL (sdpa)"


class _Fusing(_Decoder):
    """The base class for Bloom and Falcon, which fuse the query, key and value projections."""

    attention = "h.0.self_attention"

    def check_shape(self, shape: Shape) -> None:
        super().check_shape(shape)
        ask(shape, "width")

    def parameters_for(self, shape: Shape) -> tuple[Parameter, ...]:
        return _together(self.attention)


class Bloom(_Fusing, _Eager):
    """The adapter for BloomModel with eager attention."""

    title = "transformers Bloom"
    config = "BloomConfig"
    always = ("alibi",)
    mask_arguments = ()
    features = (_OwnSlopes("alibi"), _PADDING)
    checkpoint = Checkpoint(("bloom",), ("h.{layer}.self_attention.",), own="h.0.self_attention.")

    def check_shape(self, shape: Shape) -> None:
        super().check_shape(shape)
        ask(shape, "heads", "biases")

    def options(
        self, shape: Shape, scale: float | None, settings: Mapping[str, Static]
    ) -> dict[str, Any]:
        return {"hidden_size": shape.query_width, "n_head": shape.heads}

    def attend(self, model: Any, attention: Any, hidden: Any, given: dict[str, Any]) -> Any:
        output, model.returned_weights = attention(hidden, hidden.new_zeros(1, 1, 1), **given)
        return output, None


class _Falcon(_Fusing):
    config = "FalconConfig"
    features = (_OwnSlopes("alibi", divided=True), *_ROTARY)

    def check_shape(self, shape: Shape) -> None:
        super().check_shape(shape)
        ask(shape, "even")

    def options(
        self, shape: Shape, scale: float | None, settings: Mapping[str, Static]
    ) -> dict[str, Any]:
        return {
            "hidden_size": shape.query_width,
            "bias": shape.bias,
            "alibi": "alibi" in settings,
            "multi_query": shape.kv_heads == 1,
            "new_decoder_architecture": 1 < shape.kv_heads < shape.heads,
            "num_kv_heads": shape.kv_heads,
        }

    def attend(self, model: Any, attention: Any, hidden: Any, given: dict[str, Any]) -> Any:
        return super().attend(model, attention, hidden, given), None


class FalconEager(_Falcon, _Eager):
    """The adapter for FalconModel with eager attention."""

    title = "transformers Falcon (eager)"


class FalconSdpa(_Falcon, _Sdpa):
    """The adapter for FalconModel with SDPA."""

    title = "transformers Falcon (sdpa)"


CHECKPOINTS = {
    "llama": "LlamaModelEager",
    "mistral": "MistralEager",
    "gemma2": "Gemma2Eager",
    "qwen3": "Qwen3Eager",
    "gpt_oss": "GptOssEager",
    "bloom": "Bloom",
}

ADAPTERS = {
    "llama-model-eager": "LlamaModelEager",
    "llama-model-sdpa": "LlamaModelSdpa",
    "mistral-eager": "MistralEager",
    "mistral-sdpa": "MistralSdpa",
    "gemma2-eager": "Gemma2Eager",
    "gpt-oss-eager": "GptOssEager",
    "qwen3-eager": "Qwen3Eager",
    "qwen3-sdpa": "Qwen3Sdpa",
    "qwen2-5-vl-eager": "Qwen25VlEager",
    "qwen2-5-vl-sdpa": "Qwen25VlSdpa",
    "qwen3-vl-eager": "Qwen3VlEager",
    "qwen3-vl-sdpa": "Qwen3VlSdpa",
    "bloom": "Bloom",
    "falcon-eager": "FalconEager",
    "falcon-sdpa": "FalconSdpa",
}
