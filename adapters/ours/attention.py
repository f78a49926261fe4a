"""Multi-head attention: the definition as mathematics, and a PyTorch module that computes it.

Queries x_i, keys y_j and values z_j are projected for every query head h, and for the key/value
head g = h // (heads / kv_heads) that it reads:

    q_ih = W_Qh x_i + b_Qh          k_jg = W_Kg y_j + b_Kg          v_jg = W_Vg z_j + b_Vg

    s_ijh = score(q_ih, k_jg) + bias_ijh                                             (the logits)
    p_ijh = exp(s_ijh) / sum(exp(s_ilh) for l in A_ih) if j in A_ih, else 0          (the weights)
    c_ih  = sum(p_ijh v_jg for all j)                                                (the context)
    out_i = sum(W_Oh c_ih for all h) + b_O                                           (the output)

A_ih is the set of keys that query i may attend to in head h: those that no mask, causality, window,
length, segment or bias of -inf blocks. If A_ih is empty in a head, all weights and the context of
that head are zero; if it is empty in all heads, the output is b_O. (Some libraries return NaN in
this case, or the mean of the values.)

There are two scores, each with a default scale; for the second, every head learns a vector u_h:

    scaled-dot  scale (q . k), scale = 1 / sqrt(head_size)  Vaswani et al. 2017, arXiv:1706.03762
    additive    scale (u_h . tanh(q + k)), scale = 1        Bahdanau et al. 2015, arXiv:1409.0473

There may be fewer key/value heads than query heads:

    kv_heads = heads  each head has its own                  Vaswani et al. 2017
    kv_heads = 1      all share one: multi-query attention   Shazeer 2019, arXiv:1911.02150
    between           groups share: grouped-query attention  Ainslie et al. 2023, arXiv:2305.13245

Language models add some of the following, in this order:

    norm      q and k become g x / sqrt(mean(x^2) + eps)   Henry et al. 2020, arXiv:2010.04245
    rotary    q and k are rotated by their positions       `positions.Rotary`
    soft cap  s becomes cap tanh(s / cap), before biases   Gemma 2, arXiv:2408.00118
    ALiBi     slope_h |p_i - r_j| is subtracted from s     Press et al. 2021, arXiv:2108.12409
    sinks     the sum in p_ijh gets the term exp(sink_h)   gpt-oss, arXiv:2508.10925

With a sink, the weights of a query sum to less than one. `positions.py` defines p_i and r_j,
windows, lengths, segments, spans and trees of drafted tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor, nn

from conformance.adapters.ours.positions import Cache, Rotary, Tokens

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

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
        norm_epsilon: float | None = None,  # no norm of queries and keys
        rotary: Rotary | None = None,
        soft_cap: float | None = None,
        slopes: Sequence[float] | None = None,  # of ALiBi, one for each head
        window: tuple[int | None, int | None] = (None, None),  # before, after the query's own key
        sinks: bool = False,
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
        if soft_cap is not None and soft_cap <= 0:
            raise ValueError(f"soft_cap must be positive, got {soft_cap}; None for no cap")
        if slopes is not None and len(slopes) != heads:
            raise ValueError(f"there are {len(slopes)} slopes for {heads} heads")
        for side in window:
            if side is not None and side < 0:
                raise ValueError(f"window counts keys, got {window}; None for no limit")

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

        self.rotary, self.soft_cap, self.window, self.slopes = rotary, soft_cap, window, slopes
        if rotary is not None and (rotary.size % 2 or not 0 < rotary.size <= head_size):
            raise ValueError(f"rotary.size must be even and at most {head_size}, got {rotary.size}")
        self.query_norm = self.key_norm = None
        if norm_epsilon is not None:
            options = {"eps": norm_epsilon, "device": device, "dtype": dtype}
            self.query_norm = nn.RMSNorm(head_size, **options)
            self.key_norm = nn.RMSNorm(head_size, **options)
        self.sinks = nn.Parameter(torch.zeros(heads, device=device, dtype=dtype)) if sinks else None

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
        key_lengths: Int[Tensor, batch] | None = None,
        query_lengths: Int[Tensor, batch] | None = None,
        key_segments: Int[Tensor, "batch key"] | None = None,
        query_segments: Int[Tensor, "batch query"] | None = None,
        key_positions: Int[Tensor, "batch key"] | None = None,
        query_positions: Int[Tensor, "batch query"] | None = None,
        key_spans: Int[Tensor, "batch key"] | None = None,
        query_parents: Int[Tensor, "batch query"] | None = None,
        cache: Cache | None = None,
        need_weights: bool = False,
    ) -> Output | tuple[Output, Weights]:
        """Return the output, or with `need_weights` (output, weights), with weights before dropout.

        `key` defaults to `query` (self-attention) and `value` to `key`. A query attends to a key
        iff `attend_mask` is True, `block_mask` is False, `attn_bias` is not -inf, and `causal`, the
        layer's window, lengths and segments allow it. Without positions, lengths, segments and a
        cache, `causal` lets query i see keys j <= i ("top-left") or j <= i + keys - queries
        ("bottom-right").

        Masks and bias are [query key], [batch query key] or [batch heads query key], each axis of
        full size or 1; a [batch key] padding mask is passed as `mask[:, None, None, :]`.

        Lengths count the tokens of each batch entry that are not padding. Tokens see each other
        only if their segments are equal. Beside `causal`, a query also sees the later keys of its
        span: those with the number that `key_spans` has for the key at its position, if that is not
        0. With a cache, `key_spans` are of all its keys. With `query_parents`, the queries are
        drafted tokens: each sees the cached keys, itself and those from which it descends; -1 is
        the parent of those that follow the cached keys. Positions that are not given are derived
        from lengths, segments, cache, parents and `causal`. A `cache` is extended by the new keys
        and values; all of its keys then take part, so the key axis of masks has the length of the
        extended cache.

        Raises:
            ValueError: if shapes do not fit, `causal` is unknown, only one side has segments, keys
                have lengths or segments although the cache is not empty, there are spans without
                `causal`, or a parent is not before its token.
            TypeError: if a mask is not a boolean tensor, or `attn_bias` is not floating-point.
        """
        key = query if key is None else key
        value = key if value is None else value
        self._check_inputs(query, key, value)
        past = 0 if cache is None else len(cache)
        if past and (key_lengths is not None or key_segments is not None):
            raise ValueError("a cache has neither lengths nor segments: pass masks and positions")
        if (key_segments is None) != (query_segments is None):
            raise ValueError("pass segments of both queries and keys, or of neither")
        if key_spans is not None and causal is None:
            raise ValueError("spans add keys to a causal mask: pass causal too")

        axes = (query.shape[0], self.heads, query.shape[1], past + key.shape[1])
        lengths, segments = (query_lengths, key_lengths), (query_segments, key_segments)
        if (
            query_parents is not None
            and (query_parents >= torch.arange(axes[2], device=query.device)).any()
        ):
            raise ValueError("a parent is the index of an earlier query, or -1")
        tokens = Tokens(axes[2], axes[3], past, *lengths, *segments, key_spans, query_parents)
        _check_causal(causal)
        p, r = tokens.positions(causal, query.device)
        p = p if query_positions is None else query_positions
        r = r if key_positions is None else key_positions
        blocked = ~tokens.visible(p, r, causal, self.window)
        if attend_mask is not None:
            blocked = blocked | ~_with_all_axes("attend_mask", attend_mask, axes)
        if block_mask is not None:
            blocked = blocked | _with_all_axes("block_mask", block_mask, axes)
        if attn_bias is not None:
            attn_bias = _with_all_axes("attn_bias", attn_bias, axes)
            blocked = blocked | (attn_bias == -math.inf)

        # Clear all beyond an entry's length, because a weight of 0 times NaN would be NaN.
        query = _within(query, query_lengths)
        key, value = _within(key, key_lengths), _within(value, key_lengths)

        group = self.heads // self.kv_heads  # query heads that share one key/value head
        q = _split_heads(self._projected(self.query_projection, query), self.heads)
        k = _split_heads(self._projected(self.key_projection, key), self.kv_heads)
        v = _split_heads(self._projected(self.value_projection, value), self.kv_heads)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q, p), self.rotary(k, r[:, past:])
        if cache is not None:
            k, v = cache.extended(k, v)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

        logits = self._score(q, k)
        if self.soft_cap is not None:
            logits = (in_float32(logits) / self.soft_cap).tanh() * self.soft_cap
        if self.slopes is not None:
            logits = in_float32(logits)
            slopes = torch.as_tensor(self.slopes, dtype=logits.dtype, device=logits.device)
            distance = (p[:, None, :, None] - r[:, None, None, :]).abs()
            logits = logits - slopes[:, None, None] * distance
        if attn_bias is not None:
            logits = logits + attn_bias
        weights = self._softmax_over_visible(logits, blocked).to(v.dtype)
        kept = nn.functional.dropout(weights, self.dropout, self.training)
        context = self._product(kept, v).transpose(1, 2).flatten(2)  # (heads value_head)
        output = self._projected(self.output_projection, context)
        return (output, weights) if need_weights else output

    # These three are methods so that `invariant.py` can add in another order.

    def _projected(
        self, projection: nn.Linear, tokens: Float[Tensor, "batch length width"]
    ) -> Float[Tensor, "batch length projected"]:
        return projection(tokens)

    def _product(
        self, left: Float[Tensor, "batch heads m n"], right: Float[Tensor, "batch heads n p"]
    ) -> Float[Tensor, "batch heads m p"]:
        return left @ right

    def _softmax(self, logits: Weights) -> Weights:
        return logits.softmax(-1)

    def _score(
        self, q: Float[Tensor, "batch heads query head"], k: Float[Tensor, "batch heads key head"]
    ) -> Weights:
        if self.score_vector is None:
            # Scaled before the product, which may overflow float16.
            return self._product(self.scale * q, k.mT)
        hidden = torch.tanh(q[:, :, :, None, :] + k[:, :, None, :, :])
        return self.scale * torch.einsum("bhqkd,hd->bhqk", hidden, self.score_vector)

    def _softmax_over_visible(self, logits: Weights, blocked: Mask) -> Weights:
        """Return the softmax over visible keys, in float32 or better, with zeros where blocked.

        A sink takes part in the softmax, but its weight is not returned. In a row with neither
        visible keys nor a sink, the softmax is taken of zeros, not of -inf, and then replaced by
        zeros, so that neither the row nor its gradient is NaN.
        """
        logits, before = logits.masked_fill(blocked, -math.inf), 0
        if self.sinks is not None:  # as a key before all others, whose value is zero
            column = self.sinks[None, :, None, None].expand(*logits.shape[:3], 1)
            logits, before = torch.cat((in_float32(column), in_float32(logits)), -1), 1
        empty = (logits == -math.inf).all(-1, keepdim=True)
        logits = in_float32(logits.masked_fill(empty, 0.0))
        return self._softmax(logits).masked_fill(empty, 0.0)[..., before:]

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


def _within(
    tokens: Float[Tensor, "batch length width"], lengths: Int[Tensor, batch] | None
) -> Float[Tensor, "batch length width"]:
    """Return tokens with zeros beyond the length of each entry; unchanged if `lengths` is None."""
    if lengths is None:
        return tokens
    at = torch.arange(tokens.shape[1], device=tokens.device)
    return tokens.masked_fill((at >= lengths[:, None])[..., None], 0.0)


def in_float32(array: Tensor) -> Tensor:
    """Return an array in float32, or unchanged if it is in float64."""
    return array.to(torch.promote_types(array.dtype, torch.float32))


def _check_causal(causal: str | None) -> None:
    if causal not in (None, "top-left", "bottom-right"):
        raise ValueError(
            f"causal must be None, 'top-left' (query i sees keys j <= i) or 'bottom-right' "
            f"(j <= i + key_length - query_length), got {causal!r}: for different lengths they "
            f"differ, so that one has to be chosen"
        )


def _with_all_axes(name: str, mask: Tensor, axes: tuple[int, int, int, int]) -> Tensor:
    """Return a view of a mask or bias with axes [batch heads query key], each of full size or 1.

    Raises:
        TypeError: if `mask` is not a tensor, if a bias is not floating-point, or if a mask other
            than a bias is not boolean.
        ValueError: if the shape is not one of those that `MultiHeadAttention.forward` accepts.
    """
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
