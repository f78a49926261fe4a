"""A problem whose output *is* its attention weights.

Every key carries its own index in its input, one-hot, and the value projection copies that index
and nothing else: the value of key j is the unit vector e_j. The context of a query is then

    sum_j p_j e_j = (p_1, ..., p_keys)

and an output projection that is the identity hands it out, head beside head. All of this is
products with 0 and 1, so it rounds nothing. The remaining features of the inputs drive queries and
keys as in any attention; where they would come out, the output has nothing but its bias.

So an experiment sees the weights that were really applied, of implementations too that return none,
and after dropout. What it concludes does not lean on a reference: a blocked key has weight 0, and
what a mask does to the weights is compared with the implementation's own weights without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from conformance.definition.dtypes import Array, dtype_of
from conformance.definition.problem import Problem, Score, Shape, Sharing, Weights

OUTPUT_BIAS = 0.25
"""Of every output that holds no weight: zeros and the bias alone can be told apart."""


@dataclass(frozen=True)
class Sizes:
    """What may coincide, and hide a wrong axis where it does.

    The number of heads is even, because there are fast paths for no other.
    """

    batch: int = 2
    heads: int = 6
    query: int = 4
    key: int = 5

    def named(self) -> dict[str, int]:
        """By the names of the axes."""
        return {"batch": self.batch, "heads": self.heads, "query": self.query, "key": self.key}


def readout_shape(sizes: Sizes, sharing: Sharing, score: Score, *, bias: bool = True) -> Shape:
    """The shape of the problem: heads wide enough to hold one number for each key, and more."""
    head = max(sizes.key, 1) + 3
    width = sizes.heads * head
    return Shape(
        batch=sizes.batch,
        query_length=sizes.query,
        key_length=sizes.key,
        heads=sizes.heads,
        kv_heads=sizes.heads,
        head_size=head,
        value_head_size=head,
        query_width=width,
        key_width=width,
        value_width=width,
        output_width=width,
        bias=bias,
        score=score,
        sharing=sharing,
    )


@lru_cache(maxsize=64)
def readout(shape: Shape, dtype: str, seed: int = 0) -> Problem:
    """The problem; raises nothing for empty axes."""
    random = np.random.default_rng([20261121, seed])
    rounded = dtype_of(dtype).round
    keys = shape.key_length
    width, heads, head = shape.query_width, shape.heads, shape.head_size

    def inputs(length: int, *, indexed: bool) -> Array:
        drawn = random.standard_normal((shape.batch, length, width))
        drawn[:, :, :keys] = np.eye(length, keys) if indexed else 0.0
        return rounded(drawn)

    def features(gain: float) -> Array:
        weight = random.standard_normal((width, heads, head)) * gain / np.sqrt(width - keys)
        weight[:keys] = 0.0
        return rounded(weight)

    copy = np.zeros((width, heads, head))
    copy[np.arange(keys), :, np.arange(keys)] = 1.0
    biases: dict[str, Array] = {}
    if shape.bias:
        small = np.zeros((heads, head))
        biases = {"query_bias": small, "key_bias": small, "value_bias": small}
        beside = np.arange(width) % head >= keys
        biases["output_bias"] = np.where(beside, OUTPUT_BIAS, 0.0)
    score = rounded(random.standard_normal((heads, head))) if shape.score == "additive" else None
    key = inputs(shape.key_length, indexed=True)
    query = key if shape.sharing == "self" else inputs(shape.query_length, indexed=False)
    value = key if shape.sharing != "separate" else inputs(shape.key_length, indexed=True)
    return Problem(
        shape=shape,
        dtype=dtype,
        weights=Weights(
            query=features(1.2),
            key=features(1.0),
            value=copy,
            output=np.eye(width).reshape(heads, head, width),
            score=score,
            **biases,
        ),
        query=query,
        key=key,
        value=value,
        cotangent=rounded(random.standard_normal((shape.batch, shape.query_length, width))),
    )


def pattern(problem: Problem, output: Array) -> Array:
    """The applied weights `[batch heads query key]` in an output `[batch query width]`."""
    shape = problem.shape
    heads = output.reshape(shape.batch, shape.query_length, shape.heads, shape.value_head_size)
    return heads[..., : shape.key_length].transpose(0, 2, 1, 3)
