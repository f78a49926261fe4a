"""Our flash attention in Triton, interpreted, over several tiles: what the catalogue's small cases
cannot reach, because their tokens fit into one tile."""

from __future__ import annotations

import math
import os
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
    pytest.importorskip("triton")
    from conformance.adapters import triton_flash_kernel as kernel

pytestmark = pytest.mark.skipif(not kernel.INTERPRETED, reason="Triton was imported to compile")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def plain(query, key, value, causal, window, softcap, sinks):
    """The same attention with all logits at once."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = query @ key.mT * query.shape[-1] ** -0.5
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    ahead = torch.arange(key.shape[2]) - torch.arange(query.shape[2])[:, None]
    before, after = (math.inf if side < 0 else side for side in window)
    seen = (ahead >= -before) & (ahead <= (min(after, 0) if causal else after))
    logits = logits.masked_fill(~seen, -math.inf)
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, column), -1)
    context = logits.softmax(-1)[..., : key.shape[2]].nan_to_num(0.0) @ value
    return context, logits.logsumexp(-1)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("causal", "window", "softcap", "sunk"),
    [
        (True, (40, -1), 2.0, True),
        (False, (33, 5), 0.0, False),
        (False, (-1, 31), 0.0, True),
        (True, (0, -1), 50.0, False),
    ],
)
def test_tiles_give_what_all_logits_give(causal, window, softcap, sunk):
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, 2, 70, 8), (1, 1, 75, 8), (1, 1, 75, 6), (2,)]
    arrays = [3 * torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes]
    arrays = [array.requires_grad_() for array in arrays[: 4 if sunk else 3]]
    sinks = arrays[3] if sunk else None
    options = {"causal": causal, "window": window, "softcap": softcap, "sinks": sinks}
    found = kernel.flash_attention(*arrays[:3], **options, return_lse=True)
    wanted = plain(*arrays[:3], **options)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    # The last queries may see no key of the window, so nothing depends on their log-sum-exp.
    losses = [torch.randn(each.shape, generator=draw, dtype=torch.float64) for each in wanted]
    losses[1][wanted[1].isinf()] = 0
    gradients = (torch.autograd.grad(both, arrays, losses) for both in (found, wanted))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def test_a_cap_is_accurate_where_logits_are_small():
    query = torch.full((1, 1, 1, 8), 1e-4, dtype=torch.float32)
    key = torch.tensor([[1e-3], [-1e-3]]).expand(2, 8)[None, None].contiguous()
    value = torch.tensor([[1.0], [-1.0]])[None, None].expand(1, 1, 2, 1).contiguous()
    found = kernel.flash_attention(query, key, value, softcap=50.0)
    assert abs(found.item()) < 1e-6
    key, value = key[:, :, :1].contiguous(), value[:, :, :1].contiguous()
    query = torch.full((1, 1, 1, 8), 1.0, requires_grad=True)
    kernel.flash_attention(query, key, value, softcap=50.0, sinks=torch.zeros(1)).sum().backward()
    # One key and one sink: d context / d logit is 1/4 near 0, and the cap has the slope 1.
    assert torch.allclose(query.grad, torch.full((8,), 0.25e-3 * 8**-0.5), rtol=1e-5)


def test_sinks_are_one_for_each_head():
    heads = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"sinks have the shape \[3\], not \[2\]"):
        kernel.flash_attention(heads, heads, heads, sinks=torch.zeros(3))


@pytest.mark.parametrize("number", [-1e9, torch.finfo(torch.float32).min])
def test_a_row_that_is_filled_with_a_number_has_the_gradient_of_its_mean(number):
    draw = torch.Generator().manual_seed(0)
    query, key, value, cotangent = torch.randn(4, 1, 1, 40, 8, generator=draw)
    mask = torch.zeros(40, 40)
    mask[3], value.requires_grad = number, True
    context = kernel.flash_attention(query, key, value, mask)
    torch.testing.assert_close(context[0, 0, 3], value.mean(2)[0, 0])
    (gradient,) = torch.autograd.grad(context[0, 0, 3], value, cotangent[0, 0, 3])
    torch.testing.assert_close(gradient[0, 0], cotangent[0, 0, [3]].expand(40, 8) / 40)
