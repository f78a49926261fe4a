"""The laboratory in which experiments call an implementation and record what it does or refuses.

An experiment hands native arrays to mask arguments as they are, in any dtype and shape; nothing is
translated.

The output of its problems *is* the attention weights. Every key carries its own index in its input,
one-hot, and the value projection copies that index and nothing else: the value of key j is the unit
vector e_j. The context of a query is then

    sum_j p_j e_j = (p_1, ..., p_keys)

and an output projection that is the identity hands it out, head beside head. All of this is
products with 0 and 1, so it rounds nothing. The remaining features of the inputs drive queries and
keys as in any attention; where they would come out, the output has nothing but its bias.

So an experiment sees the weights that were really applied, of implementations too that return none,
and after dropout. What it concludes does not lean on a reference: a blocked key has weight 0, and
what a mask does to the weights is compared with the implementation's own weights without it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from conformance.adapter.arguments import MaskArgument, Native, Spelling
from conformance.adapter.base import Adapter, Call, Mode
from conformance.definition.comparison import BETWEEN_ANSWERS
from conformance.definition.dtypes import Array, dtype_of
from conformance.definition.expectation import expect
from conformance.definition.problem import Answer, Problem, Score, Shape, Sharing, Weights
from conformance.errors import ConformanceError, Unavailable, Unsupported
from conformance.records.phrase import Phrase
from conformance.requirements.examination import check_answer

OUTPUT_BIAS = 0.25
"""Of every output that holds no weight: zeros and the bias alone can be told apart."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the axes; a wrong axis stays hidden where two sizes coincide.

    The number of heads is even, because there are fast paths for no other.
    """

    batch: int = 2
    heads: int = 6
    query: int = 4
    key: int = 5

    def named(self) -> dict[str, int]:
        """Return the sizes by axis name."""
        return {"batch": self.batch, "heads": self.heads, "query": self.query, "key": self.key}


def readout_shape(
    sizes: Sizes, sharing: Sharing, score: Score, *, bias: bool = True, group: int = 1
) -> Shape:
    """Return a shape with heads wide enough to hold at least one number for each key."""
    head = max(sizes.key, 1) + 3
    width = sizes.heads * head
    return Shape(
        batch=sizes.batch,
        query_length=sizes.query,
        key_length=sizes.key,
        heads=sizes.heads,
        kv_heads=sizes.heads // group,
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
    """Return the readout problem; empty axes are allowed."""
    random = np.random.default_rng([20261121, seed])
    rounded = dtype_of(dtype).round
    keys = shape.key_length
    width, heads, head = shape.query_width, shape.heads, shape.head_size

    def inputs(length: int, *, indexed: bool) -> Array:
        drawn = random.standard_normal((shape.batch, length, width))
        drawn[:, :, :keys] = np.eye(length, keys) if indexed else 0.0
        return rounded(drawn)

    def features(heads: int, gain: float) -> Array:
        weight = random.standard_normal((width, heads, head)) * gain / np.sqrt(width - keys)
        weight[:keys] = 0.0
        return rounded(weight)

    copy = np.zeros((width, shape.kv_heads, head))
    copy[np.arange(keys), :, np.arange(keys)] = 1.0
    biases: dict[str, Array] = {}
    if shape.bias:
        small, few = np.zeros((heads, head)), np.zeros((shape.kv_heads, head))
        biases = {"query_bias": small, "key_bias": few, "value_bias": few}
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
            query=features(heads, 1.2),
            key=features(shape.kv_heads, 1.0),
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


@lru_cache(maxsize=64)
def _noise(shape: Shape, dtype: str) -> Array:
    return expect(readout(shape, dtype)).loosest["weights"]


def pattern(problem: Problem, output: Array) -> Array:
    """Return the applied weights `[batch heads query key]` from an output `[batch query width]`."""
    shape = problem.shape
    heads = output.reshape(shape.batch, shape.query_length, shape.heads, shape.value_head_size)
    return heads[..., : shape.key_length].transpose(0, 2, 1, 3)


Natives = Mapping[str, Native]

REFUSED, SOMETHING_ELSE = Phrase("refused"), Phrase("something-else")
"""Values that entries of several experiments have."""

NOTHING = 1e-25
"""A weight that passes for zero. Softmaxes that stop at exp(-64) leave 1.6e-28 of a blocked key."""


@dataclass(frozen=True, eq=False)
class Seen:
    """An answer, and the weights that it applied, `[batch heads query key]`."""

    problem: Problem
    answer: Answer
    applied: Array


@dataclass(frozen=True)
class Refused:
    """The implementation raised, or cannot express it; `reason` says how, in one line."""

    reason: str
    unsupported: bool = False

    @property
    def told(self) -> str:
        """The refusal as evidence."""
        return f"unsupported: {self.reason}" if self.unsupported else self.reason


Outcome = Seen | Refused


class NoAnswer(ConformanceError):
    """An error: there is no unmasked answer to compare with."""


@dataclass
class Laboratory:
    """One implementation, in one mode, dtype and on one device.

    Attributes:
        adapter, dtype, device, mode: who is asked, and how.
        only: names of the mask arguments that are looked at; all if empty.
        case: a shape whose sharing, score, biases and heads every problem has; if None, the first
            of each that the implementation allows.
    """

    adapter: Adapter
    dtype: str
    device: str
    mode: Mode
    only: tuple[str, ...] = ()
    case: Shape | None = None
    _plain: dict[tuple[Sizes, str], Outcome] = field(default_factory=dict)

    @cached_property
    def sharing(self) -> Sharing:
        """Inputs as distinct as the implementation allows; some support only self-attention."""
        if self.case is not None:
            return self.case.sharing
        for sharing in ("separate", "memory", "self"):
            if self._expressible(sharing, bias=True) or self._expressible(sharing, bias=False):
                return sharing
        return "separate"

    @cached_property
    def biased(self) -> bool:
        """Whether the layer can have biases."""
        return self.case.bias if self.case else self._expressible(self.sharing, bias=True)

    def has(self, dtype: str) -> bool:
        """Return whether the adapter and its framework support a dtype on this device."""
        if not self._is_expressible(self.problem(dtype=dtype)):
            return False
        try:
            self.plain(dtype=dtype)
        except Unsupported:
            return False
        except NoAnswer:
            pass
        return True

    def _expressible(self, sharing: Sharing, *, bias: bool) -> bool:
        length = 5 if sharing == "self" else 4
        return self._is_expressible(self.problem(Sizes(query=length), sharing=sharing, bias=bias))

    def _is_expressible(self, problem: Problem) -> bool:
        try:
            self.adapter.check(problem)
        except Unsupported:
            return False
        except Exception:
            # A mistake in the adapter's own check: asking will say which.
            return True
        return True

    def sizes(self, **sizes: int) -> Sizes:
        """Return sizes that differ unless given; lengths are equal if there is only one input."""
        if self.sharing == "self":
            length = sizes.get("key", sizes.get("query", 5))
            sizes |= {"query": length, "key": length}
        if self.case is not None:
            sizes = {"heads": self.case.heads} | sizes
        return Sizes(**sizes)

    def problem(
        self,
        sizes: Sizes | None = None,
        *,
        sharing: Sharing | None = None,
        bias: bool | None = None,
        dtype: str = "",
    ) -> Problem:
        """Return the readout problem of these sizes."""
        score: Score = "scaled-dot" if "scaled-dot" in self.adapter.scores else "additive"
        shape = readout_shape(
            sizes or self.sizes(),
            sharing or self.sharing,
            self.case.score if self.case else score,
            bias=self.biased if bias is None else bias,
            group=self.case.heads // self.case.kv_heads if self.case else 1,
        )
        return readout(shape, dtype or self.dtype)

    def ask(
        self,
        problem: Problem,
        natives: Natives | None = None,
        *,
        gradients: bool = False,
        mode: Mode | None = None,
        **manner: Any,
    ) -> Outcome:
        """Put a problem with these native mask arguments, and no others.

        Args:
            problem: its own mask, bias and causal flag are not used.
            natives: mask argument to array, in the dtype in which it is handed over; float64
                stands for the implementation's own. The causal flag to a bool.
            gradients: whether they are looked at.
            mode: another mode than the laboratory's.
            manner: further fields of `Call`.
        """
        if manner and self._bridge is None:
            return Refused("unsupported: this adapter hands on NumPy arrays as they are")
        mode = mode or self.mode
        if not gradients and not (self._bridge and self._bridge.takes_other_paths):
            mode = dataclasses.replace(mode, gradients=False)
        call = Call(
            mode,
            self.device,
            Spelling("as it is", natives or {}),
            **({"compiled": False} | manner),
        )
        try:
            answer = self.adapter.run(problem, call)
            check_answer(answer, problem)
        except Unavailable:
            raise
        except Unsupported as reason:
            return Refused(str(reason), unsupported=True)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # Also what ends a program: SystemExit, or an exception of theirs that is no Exception.
            return Refused(_first_line(error))
        return Seen(problem, answer, pattern(problem, answer.output))

    @property
    def _bridge(self) -> Any:
        return getattr(self.adapter, "bridge", None)

    def plain(self, sizes: Sizes | None = None, dtype: str = "") -> Seen:
        """Return the answer without any mask.

        Raises:
            Unsupported: the implementation cannot express even that.
            NoAnswer: it raised, or what it returned is no answer.
        """
        key = (sizes or self.sizes(), dtype or self.dtype)
        if key not in self._plain:
            self._plain[key] = self.ask(self.problem(key[0], dtype=key[1]))
        found = self._plain[key]
        if isinstance(found, Refused):
            if found.unsupported:
                raise Unsupported(found.reason)
            raise NoAnswer(f"without any mask: {found.told}")
        return found

    def noise(self, problem: Problem) -> Array:
        """Return σ of the weights `[batch heads query key]` for an honest implementation."""
        return _noise(problem.shape, problem.dtype)

    def alike(self, seen: Seen, predicted: Array) -> bool:
        """Whether these are the applied weights: to the noise of two answers, zeros to `NOTHING`.

        Where a mask leaves few keys, their weights grow, and the noise with them.
        """
        plain = self.plain(Sizes(*seen.problem.shape.logits), seen.problem.dtype).applied
        with np.errstate(all="ignore"):
            growth = np.where(plain > 0, np.abs(predicted) / plain, 1.0)
            allowed = BETWEEN_ANSWERS * self.noise(seen.problem) * np.maximum(growth, 1.0)
            allowed = np.where(predicted == 0, NOTHING, allowed)
            near = np.abs(seen.applied - predicted) <= allowed
        both = np.isnan(seen.applied) & np.isnan(predicted)
        return bool((near | both).all())

    @staticmethod
    def alike_to_noise(one: Array, other: Array, noise: Array) -> bool:
        """Return whether two answers to one problem differ by rounding only."""
        return bool((np.abs(one - other) <= BETWEEN_ANSWERS * noise).all())

    def arguments(self) -> tuple[MaskArgument, ...]:
        """Return the declared mask arguments, then those that the framework attaches by itself."""
        known = (*self.adapter.mask_arguments, *self.adapter.implicit_masks)
        return tuple(item for item in known if not self.only or item.name in self.only)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = " ".join(lines[:1])[:160]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def numbers(row: Array, most: int = 8) -> str:
    """Return a row of numbers as evidence, such as "[0 0.25 −inf]": short, and exact zeros as 0."""

    def one(value: float) -> str:
        if value == 0:
            return "0"
        if math.isinf(value):
            return "−inf" if value < 0 else "inf"
        if math.isnan(value):
            return "NaN"
        if abs(value) < 0.005:
            return f"{value:.0e}".replace("-", "−")
        return f"{value:.2g}".replace("-", "−")

    listed = [one(float(value)) for value in row[:most]]
    return f"[{' '.join(listed)}{' …' if len(row) > most else ''}]"
