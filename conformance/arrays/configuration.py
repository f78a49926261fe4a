"""Read what a model's configuration says of its attention, in the words of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.adapter.loading import checkpoints, load
from conformance.porting.checkpoints import (
    ASSUMED,
    chunk_of,
    completed,
    configuration,
    counts,
    reach_of,
    rotation,
    scale_of,
    window_of,
)
from conformance.records.findings import Argument, Phrase

INTERLEAVED = (
    *("codegen", "cohere", "cohere2", "ernie4_5", "glm", "glm4", "glm4v", "glm4v_text"),
    *("glm_ocr", "glm_ocr_text", "gptj", "llama4_text"),
)
"""Kinds of models whose rotary embeddings turn neighbouring components; others turn halves."""

NORMED = ("gemma3", "gemma3_text", "olmo2", "olmo3", "qwen3", "qwen3_moe", "qwen3_next")
"""Kinds of models that always norm queries and keys."""

DECODERS = (*ASSUMED, "bloom", "gpt2")
"""Kinds of models that are causal whatever class is named as their architecture."""


def told(config: Mapping[str, Any] | str | Path, layer: int) -> tuple[dict[str, Any], list[Phrase]]:
    """Return arguments of `conformance.diagnose`, and what a port of this layer must be told.

    Args:
        config: a configuration, or its file.
        layer: the number of the layer, from 0.

    Raises:
        ConformanceError: if the file cannot be read, or does not tell the scale.
    """
    config = completed(config) if isinstance(config, Mapping) else configuration(Path(config))
    found: dict[str, Any] = {}
    said: list[Phrase] = []
    kind = str(config.get("model_type", ""))
    sizes = counts(config, {})
    heads = sizes.get("heads")
    size = config.get("head_dim")
    if heads:
        kv_heads = sizes.get("kv_heads", heads)
        width = config.get("hidden_size") or config.get("n_embd") or 0
        size = size or config.get("d_kv") or width // heads
        found |= {"heads": heads, "kv_heads": kv_heads}
        about = {"heads": heads, "kv_heads": kv_heads, "size": size}
        said.append(Phrase("config.heads", {**about}))
    turned, plain = rotation(config, layer), config.get("no_rope_layers")
    # Positions on several axes are those of decoders of texts with images.
    decodes = kind in DECODERS or turned.scaling.endswith("mrope")
    decodes |= any(str(it).endswith(("ForCausalLM", "LMHeadModel")) for it in _listed(config))
    both_ways = config.get("use_bidirectional_attention")
    if decodes and not both_ways:
        found["causal"] = True
        said.append(Phrase("config.causal"))
    if scale := _scale(config, kind, layer):
        found["scale"] = scale
        said.append(Phrase("config.scale", {"scale": float(f"{scale:.6g}")}))
    if cap := config.get("attn_logit_softcapping"):
        found["soft_cap"] = float(cap)
        said.append(Phrase("config.soft-cap", {"cap": float(cap)}))
    if not both_ways and (window := window_of(config, layer)):
        found["window"] = window
        said.append(Phrase("config.window", {"size": window}))
    if (reach := reach_of(config, layer)) is not None:
        found["window"] = (reach, reach)
        said.append(Phrase("config.window-on-both-sides", {"count": reach}))
    if not both_ways and (chunk := chunk_of(config, layer)):
        found["chunk"] = chunk
        said.append(Phrase("config.chunk", {"size": chunk}))
    if turned.base is not None and (not plain or layer >= len(plain) or plain[layer]):
        pairs = "interleaved" if kind in INTERLEAVED else "halves"
        turns = turned.size or size or 0
        rotary: dict[str, Argument] = {"base": float(turned.base), "pairs": pairs, "size": turns}
        said.append(Phrase("config.rotary", rotary))
        if turned.scaling and turned.scaled is None:
            said.append(Phrase("config.frequencies", {"how": turned.described}))
        elif turns:
            found["rotary"] = rotary
            if turned.scaled is not None:
                found["rotary"] = {**rotary, "scaling": turned.scaled}
                said.append(Phrase("config.scaled", {"how": turned.described}))
    if kind in NORMED or config.get("use_qk_norm") or config.get("qk_layernorm"):
        said.append(Phrase("config.norm"))
    if kind == "gpt_oss":
        said.append(Phrase("config.sinks"))
    return found, said


def _listed(config: Mapping[str, Any]) -> list[Any]:
    return list(config.get("architectures") or ())


def _scale(config: Mapping[str, Any], kind: str, layer: int) -> float | None:
    """Return the scale of the logits; None if it is the default."""
    if "attention_multiplier" in config:
        return float(config["attention_multiplier"])
    known = checkpoints()
    checkpoint = getattr(load(known[kind].value), "checkpoint", None) if kind in known else None
    if checkpoint is not None and checkpoint.scale is not None:
        return scale_of(config, checkpoint, layer)
    scalar = config.get("query_pre_attn_scalar")
    return None if scalar is None else float(scalar) ** -0.5
