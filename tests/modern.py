"""Honest implementations of the features of today, in torch: no two round in the same places.

`eager` is how models are written: tensors in the dtype of the problem, tables of the rotation
rounded to it, the norm and the softmax in float32, the sink as a column of the logits. Its
gradients are torch's. `fused` is how kernels are written: all of it in float32 over tiles of keys,
with what goes into a matrix product rounded, the sink added to the normaliser at the end, and a
backward pass by hand that makes the weights again from the logarithm of the normaliser.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from problems import leaves, scale_of, three_inputs

from conformance.definition.problem import Problem
from conformance.definition.rotary import length_of

TILE = 3


def eager(problem: Problem) -> dict[str, np.ndarray]:
    """Output, weights and every gradient."""
    kind, leaf = _leaves(problem)
    wide = torch.promote_types(kind, torch.float32)
    projected = dict(zip(("query", "key", "value"), _projected(problem, leaf), strict=True))
    for name in ("query", "key"):
        heads = projected[name]
        if problem.norm is not None:
            mean = heads.to(wide).pow(2).mean(-1, keepdim=True)
            normed = heads.to(wide) * torch.rsqrt(mean + problem.norm.epsilon)
            heads = leaf[f"norm.{name}"] * normed.to(kind)
        if problem.rotary is not None:
            cosine, sine = (table.to(kind) for table in _tables(problem, name))
            heads = _rotated(problem, heads, cosine, sine)
        projected[name] = heads
    q, k, v = (_repeated(problem, heads) for heads in projected.values())
    logits = q @ k.mT * scale_of(problem)
    if problem.soft_cap is not None:
        logits = torch.tanh(logits / problem.soft_cap) * problem.soft_cap
    if problem.slopes is not None:
        logits = logits - (_distance(problem) * _tensor(problem.slopes)[:, None, None]).to(kind)
    if problem.attn_bias is not None:
        logits = logits + leaf["attn_bias"]
    hidden = ~torch.tensor(problem.allowed_in_full())
    logits = logits.masked_fill(hidden, -1e4)
    if problem.sinks is not None:
        sinks = leaf["sinks"][:, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sinks], dim=-1)
    weights = logits.softmax(-1, dtype=wide).to(kind)[..., : hidden.shape[-1]]
    weights = weights.masked_fill(hidden, 0.0)
    output = torch.einsum("bhqd,hde->bqe", weights @ v, leaf["weights.output"])
    if problem.shape.bias:
        output = output + leaf["weights.output_bias"]
    cotangent = torch.tensor(problem.cotangent).to(kind)
    found = dict(zip(leaf, torch.autograd.grad(output, leaf.values(), cotangent), strict=True))
    return _named({"output": output, "weights": weights}, found)


def fused(problem: Problem) -> dict[str, np.ndarray]:
    """Output and every gradient, for problems without an additive bias."""
    kind, leaf = _leaves(problem)
    wide = torch.promote_types(kind, torch.float32)
    cap, scale, shape = problem.soft_cap, scale_of(problem), problem.shape
    projected = list(_projected(problem, leaf))
    prepared = [
        _in_one_go(problem, name, heads, leaf.get(f"norm.{name}"), wide)
        for name, heads in zip(("query", "key"), projected, strict=False)
    ]
    q, k, v = (_repeated(problem, heads).detach().to(wide) for heads in (*prepared, projected[2]))
    hidden = ~torch.tensor(problem.allowed_in_full())
    distance = (
        _distance(problem)
        * _tensor(problem.slopes if problem.slopes is not None else 0)[..., None, None]
    )

    def logits_of(tile: slice) -> tuple[torch.Tensor, torch.Tensor]:
        scores = q @ k[:, :, tile].mT * scale
        capped = scores if cap is None else torch.tanh(scores / cap)
        logits = (capped if cap is None else cap * capped) - distance[..., tile].to(wide)
        return logits.masked_fill(hidden[..., tile], -torch.inf), capped

    peak = torch.full((*q.shape[:3], 1), -torch.inf, dtype=wide)
    total, context = torch.zeros_like(peak), torch.zeros(*q.shape[:3], v.shape[3], dtype=wide)
    tiles = [slice(start, start + TILE) for start in range(0, shape.key_length, TILE)]
    for tile in tiles:
        logits, _ = logits_of(tile)
        now = torch.maximum(peak, logits.amax(-1, keepdim=True))
        safe = now.masked_fill(now == -torch.inf, 0.0)
        powers, shrink = torch.exp(logits - safe), torch.exp(peak - safe)
        total = total * shrink + powers.sum(-1, keepdim=True)
        context = context * shrink + powers.to(kind).to(wide) @ v[:, :, tile]
        peak = now
    if problem.sinks is not None:
        sinks = leaf["sinks"].detach().to(wide)[:, None, None]
        now = torch.maximum(peak, sinks)
        total, context = (part * torch.exp(peak - now) for part in (total, context))
        total, peak = total + torch.exp(sinks - now), now
    empty = total == 0
    log_total = torch.where(empty, 0.0, peak + torch.log(total))
    context = (context / torch.where(empty, 1.0, total)).to(kind).requires_grad_()

    output = torch.einsum("bhqd,hde->bqe", context, leaf["weights.output"])
    if shape.bias:
        output = output + leaf["weights.output_bias"]
    cotangent = torch.tensor(problem.cotangent).to(kind)
    ends = {n: leaf[n] for n in ("weights.output", "weights.output_bias") if n in leaf}
    d_context, *last = torch.autograd.grad(output, (context, *ends.values()), cotangent)
    found = dict(zip(ends, last, strict=True))
    d_context = d_context.to(wide)
    row = (d_context * context.detach().to(wide)).sum(-1, keepdim=True)
    d_q, d_k, d_v = (torch.zeros_like(heads) for heads in (q, k, v))
    for tile in tiles:
        logits, capped = logits_of(tile)
        weights = torch.exp(logits - log_total)
        d_v[:, :, tile] = weights.to(kind).to(wide).mT @ d_context
        d_logits = weights * (d_context @ v[:, :, tile].mT - row)
        if cap is not None:
            d_logits = d_logits * (1 - capped * capped)
        d_logits = d_logits.to(kind).to(wide)
        d_q += d_logits @ k[:, :, tile] * scale
        d_k[:, :, tile] = d_logits.mT @ q * scale
    if problem.sinks is not None:
        found["sinks"] = -(torch.exp(sinks - log_total) * row).sum((0, 2, 3)).to(kind)
    ends = [*prepared, projected[2]]
    summed = [
        heads.reshape(*end.shape[:2], -1, *end.shape[2:]).sum(2).to(kind)
        for heads, end in zip((d_q, d_k, d_v), ends, strict=True)
    ]
    others = {name: array for name, array in leaf.items() if name not in found}
    backs = torch.autograd.grad(ends, others.values(), summed)
    found |= dict(zip(others, backs, strict=True))
    return _named({"output": output}, found)


def _in_one_go(problem: Problem, side: str, heads, gain, wide):
    """Norm and rotation as one kernel does both: in float32, rounded at the end."""
    kind, heads = heads.dtype, heads.to(wide)
    if gain is not None:
        mean = (heads * heads).mean(-1, keepdim=True)
        heads = heads * torch.rsqrt(mean + problem.norm.epsilon) * gain.to(wide)
    if problem.rotary is not None:
        heads = _rotated(problem, heads, *(table.to(wide) for table in _tables(problem, side)))
    return heads.to(kind)


def _leaves(problem: Problem):
    kind = getattr(torch, problem.dtype)
    return kind, {
        name: torch.tensor(array).to(kind).requires_grad_()
        for name, array in leaves(problem).items()
    }


def _projected(problem: Problem, leaf: dict):
    for name, tokens in zip(("query", "key", "value"), three_inputs(leaf), strict=True):
        weight = leaf[f"weights.{name}"]
        heads = (tokens @ weight.flatten(1)).unflatten(-1, weight.shape[1:])
        if problem.shape.bias:
            heads = heads + leaf[f"weights.{name}_bias"]
        yield heads.transpose(1, 2)


def _repeated(problem: Problem, heads):
    return heads.repeat_interleave(problem.shape.heads // heads.shape[1], dim=1)


def _tensor(array):
    return torch.tensor(np.asarray(array), dtype=torch.float64)


def _distance(problem: Problem):
    """In float64: what multiplies it is exact or rounded afterwards."""
    one, other = problem.position_of_queries, problem.position_of_keys
    return _tensor(np.abs(one[:, :, None] - other[:, None]))[:, None]


def _tables(problem: Problem, side: str):
    """Cosine and sine `[batch 1 length size/2]`, made in float32 or better, as models make them.

    Scaled frequencies are computed as by `ROPE_INIT_FUNCTIONS` of transformers.
    """
    kind = torch.float64 if problem.dtype == "float64" else torch.float32
    size = problem.rotary.size
    stands = problem.position_of_queries if side == "query" else problem.position_of_keys
    exponents = torch.arange(0, size, 2, dtype=kind) / size
    frequencies = 1.0 / (torch.tensor(problem.rotary.base, dtype=kind) ** exponents)
    if problem.rotary_scaling is not None and problem.rotary_scaling.rope_type != "default":
        frequencies = _scaled(problem, problem.rotary_scaling, frequencies, exponents)
    factor = 1.0 if problem.rotary_scaling is None else problem.rotary_scaling.gain
    angle = torch.tensor(stands).to(kind)[:, None, :, None] * frequencies
    if problem.axes is not None:
        # An outer product for each axis, of which sections are then put together, as in Qwen2-VL.
        stands = torch.tensor(getattr(problem.axes, side)).to(kind)
        every = stands[:, None, :, :, None] * frequencies
        angle = _put_together(every, problem.rotary_scaling)
    return torch.cos(angle) * factor, torch.sin(angle) * factor


def _put_together(every: torch.Tensor, scaling) -> torch.Tensor:
    """The angle of each pair `[batch 1 length pair]`, of those of all axes, the axis before it."""
    time, height, width = every.unbind(dim=-2)
    sections = scaling.mrope_section
    if not scaling.mrope_interleaved:
        parts = (axis.split(sections, dim=-1)[at] for at, axis in enumerate((time, height, width)))
        return torch.cat([*parts], dim=-1)
    found = time.clone()
    for at, axis in ((1, height), (2, width)):
        found[..., at : 3 * sections[at] : 3] = axis[..., at : 3 * sections[at] : 3]
    return found


def _scaled(problem: Problem, scaling, frequencies, exponents):
    """Frequencies after scaling, in the dtype of those before."""
    kind, size, base = exponents.dtype, problem.rotary.size, problem.rotary.base
    factor, before = scaling.factor, scaling.original_max_position_embeddings
    length = torch.tensor(length_of(problem))
    if scaling.rope_type == "linear":
        return frequencies / factor
    if scaling.rope_type == "dynamic":
        length = torch.maximum(length, torch.tensor(before)).to(kind)
        grown = (factor * length / before - (factor - 1)) ** (size / (size - 2))
        return 1.0 / (base * grown) ** exponents
    if scaling.rope_type == "longrope":
        listed = scaling.long_factor if length > before else scaling.short_factor
        return 1.0 / (torch.tensor(listed, dtype=kind) * base**exponents)
    if scaling.rope_type == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        wavelength = 2 * math.pi / frequencies
        found = torch.where(wavelength > before / low, frequencies / factor, frequencies)
        smooth = (before / wavelength - low) / (high - low)
        between = (1 - smooth) * found / factor + smooth * found
        medium = ~(wavelength < before / high) & ~(wavelength > before / low)
        return torch.where(medium, between, found)
    low, high = (
        size * math.log(before / (beta * 2 * math.pi)) / (2 * math.log(base))
        for beta in (scaling.beta_fast or 32, scaling.beta_slow or 1)
    )
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    steps = torch.arange(size // 2, dtype=torch.float32).to(kind)
    left = 1 - torch.clamp((steps - low) / (high - low or 0.001), 0, 1)
    divided = 1.0 / (factor * base**exponents)
    return divided * (1 - left) + frequencies * left


def _rotated(problem: Problem, heads, cosine, sine):
    """As models are written: heads · cos + half-turned heads · sin, on the first components."""
    size = problem.rotary.size
    turning, rest = heads[..., :size], heads[..., size:]
    if problem.rotary.pairs == "halves":
        one, other = turning.chunk(2, dim=-1)
        turned = torch.cat([-other, one], dim=-1)
        cosine, sine = (torch.cat([table, table], dim=-1) for table in (cosine, sine))
    else:
        turned = torch.stack([-turning[..., 1::2], turning[..., ::2]], dim=-1).flatten(-2)
        cosine, sine = (table.repeat_interleave(2, dim=-1) for table in (cosine, sine))
    return torch.cat([turning * cosine + turned * sine, rest], dim=-1)


def _named(found: dict, gradients: dict) -> dict[str, np.ndarray]:
    found = found | {f"gradient.{name}": gradient for name, gradient in gradients.items()}
    return {name: array.detach().double().numpy() for name, array in found.items()}
