"""Batch-invariant attention: a token gets the same bits, whatever else is computed beside it.

Sums of floating-point numbers depend on their order, and a library chooses the order by the shape
of a product: one query takes another path than ten, and a row in a batch of three another than
alone. Here every product is cut into tiles of one size, filled up with zeros, and the tiles along
the axis of the sum are added one after the other. So the library sees one shape only, the order
of a sum does not depend on the shape of the whole, and keys after the last that a query sees add
zeros. The normaliser of the softmax is such a product, too: that of the exponentials and of ones.

This holds for a sequence that begins with the first key. One that is packed behind another begins
inside a tile, so its sums have another order.

The technique is that of H. He and Thinking Machines Lab, "Defeating Nondeterminism in LLM
Inference", 2025: one strategy of reduction for all shapes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from conformance.adapters.ours.attention import MultiHeadAttention, in_float32

if TYPE_CHECKING:
    from jaxtyping import Float

TILE = 32
"""The size of a tile along each of the three axes of a product."""


class InvariantAttention(MultiHeadAttention):
    """`MultiHeadAttention` with the same bits for a token in any batch, alone, and in steps.

    The same arguments, shapes and errors as those of `MultiHeadAttention`.
    """

    def _projected(
        self, projection: nn.Linear, tokens: Float[Tensor, "batch length width"]
    ) -> Float[Tensor, "batch length projected"]:
        projected = tiled(tokens.flatten(0, 1), projection.weight.T).unflatten(0, tokens.shape[:2])
        return projected if projection.bias is None else projected + projection.bias

    def _product(
        self, left: Float[Tensor, "batch heads m n"], right: Float[Tensor, "batch heads n p"]
    ) -> Float[Tensor, "batch heads m p"]:
        return tiled(left, right)

    def _softmax(
        self, logits: Float[Tensor, "batch heads query key"]
    ) -> Float[Tensor, "batch heads query key"]:
        if not logits.shape[-1]:
            return logits
        powers = (logits - logits.amax(-1, keepdim=True).detach()).exp()
        ones = powers.new_ones(*powers.shape[:2], powers.shape[-1], 1)
        return powers / self._product(powers, ones)


def tiled(left: Float[Tensor, "*batch m n"], right: Float[Tensor, "*batch n p"]) -> Tensor:
    """Return the matrix products `[*batch m p]` in the dtype of `left`, from tiles of one size.

    They are added in float32 or better.
    """
    rows, columns = _tiles(in_float32(left)), _tiles(in_float32(right))
    # [*batch m/TILE p/TILE TILE TILE] for each tile along the axis of the sum
    products = (
        rows[..., :, None, at, :, :] @ columns[..., None, at, :, :, :]
        for at in range(rows.shape[-3])
    )
    total = functools.reduce(torch.add, products).transpose(-3, -2)
    found = total.flatten(-4, -3).flatten(-2, -1)
    return found[..., : left.shape[-2], : right.shape[-1]].to(left.dtype)


def _tiles(matrix: Tensor) -> Tensor:
    """Return `[*batch m n]` as tiles `[*batch m/TILE n/TILE TILE TILE]`, filled up with zeros.

    They lie in memory one after the other, because a library may add transposed ones otherwise.
    """
    below, beside = (-size % TILE if size else TILE for size in matrix.shape[-2:])
    filled = nn.functional.pad(matrix, (0, beside, 0, below))
    tiles = filled.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE)).transpose(-3, -2)
    return tiles.contiguous()
