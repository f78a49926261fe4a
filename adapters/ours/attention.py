"""Multi-head attention: the definition as mathematics, and a PyTorch module that computes it.

Queries x_i, keys y_j and values z_j are projected for every query head h, and for the key/value
head g = h // (heads / kv_heads) that it reads:

    q_ih = W_Qh x_i + b_Qh          k_jg = W_Kg y_j + b_Kg          v_jg = W_Vg z_j + b_Vg

    s_ijh = score(q_ih, k_jg) + bias_ijh                                             (the logits)
    p_ijh = exp(s_ijh) / sum(exp(s_ilh) for l in A_ih) if j in A_ih, else 0          (the weights)
    c_ih  = sum(p_ijh v_jg for all j)                                                (the context)
    out_i = sum(W_Oh c_ih for all h) + b_O                                           (the output)

A_ih is the set of keys that query i may attend in head h: what masks, causality and a bias of -inf
leave. Where it is empty every weight is zero, so the context is the empty sum and the output b_O.
(Other libraries return NaN there, or the mean of the values.)

The score, with its default scale; in the second, every head learns a vector u_h:

    scaled-dot  scale (q . k), scale = 1 / sqrt(head_size)  Vaswani et al. 2017, arXiv:1706.03762
    additive    scale (u_h . tanh(q + k)), scale = 1        Bahdanau et al. 2015, arXiv:1409.0473

The number of key/value heads:

    kv_heads = heads  each head has its own                  Vaswani et al. 2017
    kv_heads = 1      all share one: multi-query attention   Shazeer 2019, arXiv:1911.02150
    between           groups share: grouped-query attention  Ainslie et al. 2023, arXiv:2305.13245
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    Mask: TypeAlias = Bool[Tensor, "*#batch_heads #query #key"]
    Bias: TypeAlias = Float[Tensor, "*#batch_heads #query #key"]
    Output: TypeAlias = Float[Tensor, "batch query output_width"]
    Weights: TypeAlias = Float[Tensor, "batch heads query key"]


class MultiHeadAttention(nn.Module):
    """Multi-head attention as the docstring at the top of this file defines it."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_size: int | None = None,  # width // heads
        value_head_size: int | None = None,  # head_size
        kv_heads: int | None = None,  # heads
        key_width: int | None = None,  # width
        value_width: int | None = None,  # key_width
        output_width: int | None = None,  # width
        bias: bool = True,
        score: Literal["scaled-dot", "additive"] = "scaled-dot",
        scale: float | None = None,  # 1 / sqrt(head_size), or 1 for the additive score
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"width": width, "heads": heads, "head_size": head_size, "kv_heads": kv_heads}
        sizes |= {"value_head_size": value_head_size, "output_width": output_width}
        for name, size in (sizes | {"key_width": key_width, "value_width": value_width}).items():
            if size is not None and size < 1:
                raise ValueError(f"{name} must be positive, got {size}")
        if head_size is None and width % heads:
            raise ValueError(f"width {width} is not divisible by {heads} heads: pass head_size")
        if heads % (kv_heads or heads):
            raise ValueError(f"heads ({heads}) must be a multiple of kv_heads ({kv_heads})")
        if score not in ("scaled-dot", "additive"):
            raise ValueError(f"score must be 'scaled-dot' or 'additive', got {score!r}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and less than 1, got {dropout}")

        head_size = head_size or width // heads
        value_head_size = value_head_size or head_size
        key_width = key_width or width
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.score, self.dropout = score, dropout
        default_scale = 1 / math.sqrt(head_size) if score == "scaled-dot" else 1.0
        self.scale = default_scale if scale is None else scale

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        self.query_projection = linear(width, self.heads * head_size)  # out: (heads head)
        self.key_projection = linear(key_width, self.kv_heads * head_size)
        self.value_projection = linear(value_width or key_width, self.kv_heads * value_head_size)
        self.output_projection = linear(self.heads * value_head_size, output_width or width)
        self.score_vector: nn.Parameter | None = None
        if score == "additive":  # u, drawn as nn.Linear(head_size, 1) draws its weight
            bound = 1 / math.sqrt(head_size)
            vector = torch.empty(heads, head_size, device=device, dtype=dtype)
            self.score_vector = nn.Parameter(vector.uniform_(-bound, bound))

    def forward(
        self,
        query: Float[Tensor, "batch query query_width"],
        key: Float[Tensor, "batch key key_width"] | None = None,
        value: Float[Tensor, "batch key value_width"] | None = None,
        *,
        attend_mask: Mask | None = None,
        block_mask: Mask | None = None,
        attn_bias: Bias | None = None,
        causal: Literal["top-left", "bottom-right"] | None = None,
        need_weights: bool = False,
    ) -> Output | tuple[Output, Weights]:
        """Attend. With `need_weights` return (output, weights), the weights as before dropout.

        `key` defaults to `query` (self-attention) and `value` to `key`. A key is attended iff
        `attend_mask` is True, `block_mask` is False, `attn_bias` is not -inf, and `causal` allows
        it: "top-left" lets query i see keys j <= i, "bottom-right" j <= i + keys - queries.
        Masks and bias are [query key], [batch query key] or [batch heads query key], each axis of
        full size or 1; a [batch key] padding mask is passed as `mask[:, None, None, :]`.
        """
        key = query if key is None else key
        value = key if value is None else value
        self._check_inputs(query, key, value)

        axes = (query.shape[0], self.heads, query.shape[1], key.shape[1])
        blocked = _blocked_by_causality(causal, axes[2], axes[3], query.device)
        if attend_mask is not None:
            blocked = blocked | ~_with_all_axes("attend_mask", attend_mask, axes)
        if block_mask is not None:
            blocked = blocked | _with_all_axes("block_mask", block_mask, axes)
        if attn_bias is not None:
            attn_bias = _with_all_axes("attn_bias", attn_bias, axes)
            blocked = blocked | (attn_bias == -math.inf)

        group = self.heads // self.kv_heads  # query heads that share one key/value head
        q = _split_heads(self.query_projection(query), self.heads)
        k = _split_heads(self.key_projection(key), self.kv_heads).repeat_interleave(group, 1)
        v = _split_heads(self.value_projection(value), self.kv_heads).repeat_interleave(group, 1)

        logits = self._score(q, k)
        if attn_bias is not None:
            logits = logits + attn_bias
        weights = _softmax_over_visible(logits, blocked).to(v.dtype)
        context = nn.functional.dropout(weights, self.dropout, self.training) @ v
        output = self.output_projection(context.transpose(1, 2).flatten(2))  # (heads value_head)
        return (output, weights) if need_weights else output

    def _score(
        self, q: Float[Tensor, "batch heads query head"], k: Float[Tensor, "batch heads key head"]
    ) -> Weights:
        if self.score_vector is None:
            return (self.scale * q) @ k.mT  # scaled before the product, which may overflow float16
        hidden = torch.tanh(q[:, :, :, None, :] + k[:, :, None, :, :])
        return self.scale * torch.einsum("bhqkd,hd->bhqk", hidden, self.score_vector)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        inputs = {"query": query, "key": key, "value": value}
        for name, array in inputs.items():
            width = getattr(self, f"{name}_projection").in_features
            if array.dim() != 3 or array.shape[-1] != width:
                wanted = f"(batch, length, {name} width = {width})"
                raise ValueError(f"{name} has shape {tuple(array.shape)}; wanted {wanted}")
        if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
            shapes = ", ".join(f"{name} {tuple(array.shape)}" for name, array in inputs.items())
            raise ValueError(f"got {shapes}; wanted one batch size, and as many values as keys")


def _softmax_over_visible(logits: Weights, blocked: Mask) -> Weights:
    """Softmax in float32 or better, zero where blocked. A row without any visible key goes through
    the softmax as zeros, not as -inf, and leaves as zeros: neither it nor its gradient is NaN."""
    logits = logits.masked_fill(blocked, -math.inf)
    empty = (logits == -math.inf).all(-1, keepdim=True)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.masked_fill(empty, 0.0).softmax(-1, dtype=dtype).masked_fill(empty, 0.0)


def _blocked_by_causality(
    causal: str | None, queries: int, keys: int, device: torch.device
) -> Bool[Tensor, "query key"]:
    first_blocked_by_row_0 = {None: keys, "top-left": 1, "bottom-right": 1 + keys - queries}
    if causal not in first_blocked_by_row_0:
        raise ValueError(
            f"causal must be None, 'top-left' (query i sees keys j <= i) or 'bottom-right' "
            f"(j <= i + key_length - query_length), got {causal!r}: for different lengths they "
            f"differ, so that one has to be chosen"
        )
    everywhere = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return everywhere.triu(first_blocked_by_row_0[causal])


def _with_all_axes(name: str, mask: Tensor, axes: tuple[int, int, int, int]) -> Tensor:
    """A view with all of [batch heads query key], once dtype and shape leave no doubt."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(mask).__name__}")
    if name == "attn_bias" and not mask.is_floating_point():
        hint = "pass booleans as attend_mask (True = may attend) or block_mask (True = must not)"
        raise TypeError(f"attn_bias must be floating, got {mask.dtype}: {hint}")
    if name != "attn_bias" and mask.dtype != torch.bool:
        hint = "pass mask.bool() if nonzero means True, or attn_bias if it is added to the logits"
        polarity = "the polarity of numbers is never guessed"
        raise TypeError(f"{name} must be bool, got {mask.dtype}: {polarity}; {hint}")
    shape = tuple(mask.shape)
    full = {2: axes[2:], 3: (axes[0], *axes[2:]), 4: axes}
    sizes = full.get(len(shape))
    if sizes is None or any(got not in (1, size) for got, size in zip(shape, sizes, strict=True)):
        hint = f"; pass a [batch key] padding mask as {name}[:, None, None, :]"
        raise ValueError(
            f"{name} has shape {shape}; wanted [query key] {full[2]}, [batch query key] {full[3]} "
            f"or [batch heads query key] {axes}, each axis of that size or 1"
            f"{hint if shape == (axes[0], axes[3]) else ''}"
        )
    return mask[:, None] if len(shape) == 3 else mask[(None,) * (4 - len(shape))]


def _split_heads(
    projected: Float[Tensor, "batch length heads*head"], heads: int
) -> Float[Tensor, "batch heads length head"]:
    batch, length, width = projected.shape
    return projected.reshape(batch, length, heads, width // heads).transpose(1, 2)
