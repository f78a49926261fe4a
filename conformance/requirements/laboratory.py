"""Define `Laboratory`, with which experiments call an implementation and see its weights.

An experiment passes native arrays to mask arguments, in any dtype and shape, without conversion.

The output of a laboratory's problems *is* the attention weights. The input of each key contains the
index of the key as a one-hot vector, and the value projection copies only that: the value of key j
is the unit vector e_j. The context of a query, its weighted sum of values, is then

    sum_j p_j e_j = (p_1, ..., p_keys)

and the output projection is the identity, so the output lists these weights head by head. The
value and output projections only multiply by 0 and 1, so they round nothing. Queries and keys are
computed from the remaining components of the inputs, as in any attention. Components of the output
that hold no weight are equal to the output bias, or 0 without one.

An experiment thus sees the weights that were really applied, after dropout, even if the
implementation returns none. Conclusions about masks need no reference: a blocked key has weight 0,
and the effect of a mask is found by comparison with the implementation's own weights without it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import einops
import numpy as np

from conformance.adapter.arguments import MaskArgument, Native, Spelling
from conformance.adapter.base import Adapter, Call, Mode
from conformance.adapter.features import Feature
from conformance.adapter.raised import is_our_own
from conformance.cases.case import assembled, draw, rounded
from conformance.definition.attention import heads_alone
from conformance.definition.comparison import BETWEEN_ANSWERS
from conformance.definition.dtypes import Array
from conformance.definition.expectation import Expectation, expect
from conformance.definition.problem import Answer, Problem, Score, Shape, Sharing
from conformance.errors import (
    ConformanceError,
    ProcessLost,
    Unavailable,
    Unsupported,
    WrongAnswer,
    WrongShape,
)
from conformance.records.findings import Phrase
from conformance.requirements.examination import check_answer
from conformance.text import text_of

Declared = TypeVar("Declared", bound=Feature)

OUTPUT_BIAS = 0.25
"""The output bias of the components that hold no weight: an output that is only the bias is then
not all zeros."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of the axes.

    The defaults all differ, because swapped axes of equal size would go unnoticed. The default
    number of heads is even, because some fast paths require that.
    """

    batch: int = 2
    heads: int = 6
    query: int = 4
    key: int = 5

    def named(self) -> dict[str, int]:
        """Return the sizes by axis name."""
        return dataclasses.asdict(self)


def readout_shape(
    sizes: Sizes,
    sharing: Sharing,
    score: Score,
    *,
    bias: bool = True,
    group: int = 1,
    head: int = 0,
) -> Shape:
    """Return a shape whose heads are large enough to hold one number for each key.

    `bias` is whether the projections have biases, `group` the number of query heads that share a
    key/value head, and `head` the size of a head, or 0 for the smallest one that is possible.
    """
    head = head or smallest_head(sizes)
    widths = ("query_width", "key_width", "value_width", "output_width")
    return Shape(
        batch=sizes.batch,
        query_length=sizes.query,
        key_length=sizes.key,
        heads=sizes.heads,
        kv_heads=sizes.heads // group,
        head_size=head,
        value_head_size=head,
        bias=bias,
        score=score,
        sharing=sharing,
        **dict.fromkeys(widths, sizes.heads * head),
    )


def smallest_head(sizes: Sizes) -> int:
    """Return the size of a head with a component for each key, and three further components."""
    return max(sizes.key, 1) + 3


@lru_cache(maxsize=64)
def readout(shape: Shape, dtype: str) -> Problem:
    """Return a problem of this shape whose output is the attention weights.

    The docstring of this module explains how. The shape must come from `readout_shape`; axes may
    have size 0.
    """
    random = np.random.default_rng([20261121, 0])
    keys = shape.key_length
    width, heads, head = shape.query_width, shape.heads, shape.head_size

    def inputs(length: int, *, indexed: bool) -> Array:
        drawn = random.standard_normal((shape.batch, length, width))
        drawn[:, :, :keys] = np.eye(length, keys) if indexed else 0.0
        return drawn

    def features(heads: int, gain: float) -> Array:
        weight = random.standard_normal((width, heads, head)) * gain / np.sqrt(width - keys)
        weight[:keys] = 0.0
        return weight

    sizes = shape.weight_shapes()
    drawn = {f"weights.{n}": np.zeros(size) for n, size in sizes.items() if n.endswith("_bias")}
    if shape.has_bias("output"):
        drawn["weights.output_bias"][np.arange(width) % head >= keys] = OUTPUT_BIAS
    if shape.score == "additive":
        drawn["weights.score"] = random.standard_normal((heads, head))
    key = inputs(keys, indexed=True)
    if shape.sharing == "self":
        drawn["query"] = key
    else:
        drawn |= {"query": inputs(shape.query_length, indexed=False), "key": key}
    if shape.sharing == "separate":
        drawn["value"] = inputs(keys, indexed=True)
    drawn["weights.query"] = features(heads, 1.2)
    drawn["weights.key"] = features(shape.kv_heads, 1.0)
    drawn["weights.value"] = np.zeros(sizes["value"])
    drawn["weights.value"][np.arange(keys), :, np.arange(keys)] = 1.0
    drawn["weights.output"] = np.eye(width).reshape(heads, head, width)
    drawn["cotangent"] = random.standard_normal((shape.batch, shape.query_length, width))
    return rounded(assembled(shape, drawn), dtype)


@lru_cache(maxsize=16)
def _drawn(shape: Shape, dtype: str, *, heads: bool) -> Problem:
    random = np.random.default_rng([20261127, *shape.logits])
    problem = rounded(assembled(shape, draw(shape, random)), dtype)
    return heads_alone(problem) if heads else problem


@lru_cache(maxsize=64)
def noise_of(shape: Shape, dtype: str) -> Array:
    """Return σ of the weights `[batch heads query key]` in the problem that `readout` returns."""
    return expect(readout(shape, dtype), gradients=False).sigma["weights"]


def pattern(problem: Problem, output: Array) -> Array:
    """Return the weights `[batch heads query key]` in the output `[batch query width]`.

    `problem` is the problem, made by `readout`, that has this output.
    """
    heads = einops.rearrange(output, "b q (h d) -> b h q d", h=problem.shape.heads)
    return heads[..., : problem.shape.key_length]


Natives = Mapping[str, Native]

REFUSED, SOMETHING_ELSE = Phrase("refused"), Phrase("something-else")
"""Values of entries in several experiments: the library raised an exception, or it did something
that no known convention explains."""

CANNOT_BE_ASKED = Phrase("cannot-be-asked")
"""The value of an entry if the suite or the adapter cannot pose the question to the library."""

NOTHING = 1e-25
"""The largest weight that counts as zero: a softmax that clips at exp(-64) leaves 1.6e-28."""


@dataclass(frozen=True, eq=False)
class Accepted:
    """An answer to a problem, and the weights `[batch heads query key]` that were applied."""

    problem: Problem
    answer: Answer
    applied: Array


@dataclass(frozen=True)
class Refused:
    """The outcome of a call that gave no answer of the right shape.

    Attributes:
        reason: the reason, in one line.
        unsupported: whether the suite or the adapter raised `Unsupported`.
        value: the value of an entry that reports this outcome: refused, cannot be asked, another
            shape, or a malformed answer.
    """

    reason: str
    unsupported: bool = False
    value: Phrase = REFUSED

    @property
    def told(self) -> str:
        """The reason, as evidence in an entry; "unsupported: " precedes it if `unsupported`."""
        return f"unsupported: {self.reason}" if self.unsupported else self.reason


Outcome = Accepted | Refused


class NoAnswer(ConformanceError):
    """Raised if a call without a mask, with which other calls are compared, gives no answer."""


@dataclass
class Laboratory:
    """One implementation in one mode and dtype, on one device, ready for experiments.

    Attributes:
        adapter: the adapter for the implementation.
        dtype, device, mode: those with which the implementation is called by default.
        only: the names of the mask arguments to examine; empty for all of them.
        case: a shape that gives the default sharing, score, biases and numbers of heads of
            problems; None to choose what suits the implementation.
        fixed_sharing: which inputs are the same array if there is no `case`; None for as few inputs
            as the implementation supports.
        expect: the function that computes the expectation for a problem, as in `Workbench`.
    """

    adapter: Adapter
    dtype: str
    device: str
    mode: Mode
    only: tuple[str, ...] = ()
    case: Shape | None = None
    fixed_sharing: Sharing | None = None
    expect: Callable[..., Expectation] = expect
    _plain: dict[tuple[Sizes, str, float | None], Outcome] = field(default_factory=dict)

    @cached_property
    def sharing(self) -> Sharing:
        """Which inputs are the same array.

        The sharing is that of `case`, or else `fixed_sharing`. Without these, it is the first of
        "separate", "memory" and "self" that the adapter supports, or "separate" if it supports none
        of them.
        """
        if self.case is not None:
            return self.case.sharing
        if self.fixed_sharing is not None:
            return self.fixed_sharing
        for sharing in ("separate", "memory", "self"):
            if self._has_shape(sharing, bias=True) or self._has_shape(sharing, bias=False):
                return sharing
        return "separate"

    @cached_property
    def biased(self) -> bool:
        """Whether problems have projection biases: as in `case` or, without one, if supported."""
        return bool(self.case.bias) if self.case else self._has_shape(self.sharing, bias=True)

    @cached_property
    def with_shared_inputs(self) -> Laboratory | None:
        """A laboratory in which query, key and value are the same array.

        It is None if they are the same array in this laboratory already, or if there is a case.
        """
        if self.sharing == "self" or self.case is not None:
            return None
        return dataclasses.replace(self, fixed_sharing="self", _plain={})

    def in_other_dtypes(self) -> Iterator[Laboratory]:
        """Yield a laboratory for each other dtype that is supported on this device."""
        for dtype in self.adapter.dtypes:
            if dtype != self.dtype and self.has(dtype):
                yield dataclasses.replace(self, dtype=dtype, _plain={})

    def has(self, dtype: str) -> bool:
        """Return whether the adapter and its framework support a dtype on this device.

        A call that fails for a reason other than `Unsupported` counts as support.
        """
        if not self._expresses(self.problem(dtype=dtype)):
            return False
        try:
            self.plain(dtype=dtype)
        except (Unsupported, NoAnswer) as error:
            return isinstance(error, NoAnswer)
        return True

    def _has_shape(self, sharing: Sharing, *, bias: bool) -> bool:
        equal = sharing == "self"
        sizes = self._declared(Sizes(query=5 if equal else 4), equal=equal)
        return self._expresses(self.problem(sizes, sharing=sharing, bias=bias))

    def _expresses(self, problem: Problem) -> bool:
        try:
            self.adapter.check(problem)
        except Exception as error:
            # A bug in the adapter's check is not a refusal; the call itself will report it.
            return not isinstance(error, Unsupported)
        return True

    def sizes(self, **sizes: int) -> Sizes:
        """Return sizes with the given values, and defaults for the others.

        In self-attention, both lengths are `key`, or else `query`, or else 5. The number of heads
        is that of the case by default. Without a case, the sizes are adapted to those that the
        adapter declares.
        """
        if self.sharing == "self":
            length = sizes.get("key", sizes.get("query", 5))
            sizes |= {"query": length, "key": length}
        if self.case is not None:
            sizes = {"heads": self.case.heads} | sizes
        return self._declared(Sizes(**sizes), equal=self.sharing == "self")

    def _declared(self, sizes: Sizes, *, equal: bool) -> Sizes:
        """Return sizes near `sizes` that the adapter declares as supported; lengths of 0 remain 0.

        With a case, or if the adapter declares no sizes, return `sizes` unchanged. `equal` is
        whether both lengths must be equal.
        """
        geometry = self.adapter.geometry
        if geometry is None or self.case is not None:
            return sizes
        query, key = geometry.lengths(sizes.query, sizes.key, equal=equal)
        heads, _ = geometry.numbers_of_heads(sizes.heads, 1)
        return dataclasses.replace(sizes, query=query, key=key, heads=heads)

    def problem(
        self,
        sizes: Sizes | None = None,
        *,
        sharing: Sharing | None = None,
        bias: bool | None = None,
        dtype: str = "",
        scale: float | None = None,
    ) -> Problem:
        """Return a problem of these sizes whose output is the attention weights, as in `readout`.

        Arguments that are not given are those of the laboratory: `sizes()`, `sharing`, `biased` and
        `dtype`. The default scale is that of the score.
        """
        score: Score = "scaled-dot" if "scaled-dot" in self.adapter.scores else "additive"
        sizes = sizes or self.sizes()
        shape = readout_shape(
            sizes,
            sharing or self.sharing,
            self.case.score if self.case else score,
            bias=self.biased if bias is None else bias,
            group=self._group(sizes.heads),
            head=self._head(smallest_head(sizes)),
        )
        made = readout(shape, dtype or self.dtype)
        return made if scale is None else made.replace(scale=scale)

    def drawn(self, sizes: Sizes, head: int) -> Problem:
        """Return a problem of these sizes with random numbers, whose output is not the weights.

        Its heads are of size `head`, or of the next size that the adapter declares. For a function,
        it is on heads that have been projected, so that the suite's projections take no part.
        """
        shape = readout_shape(
            sizes,
            self.sharing,
            "scaled-dot" if "scaled-dot" in self.adapter.scores else "additive",
            bias=self.biased,
            group=self._group(sizes.heads),
            head=self._head(head),
        )
        return _drawn(shape, self.dtype, heads=self.adapter.projections_supplied)

    def _group(self, heads: int) -> int:
        """Return how many query heads share a key/value head.

        The number is that of the case, or else one that the adapter declares; 1 if it declares
        none, or none that divides `heads`.
        """
        if self.case is not None:
            return self.case.heads // self.case.kv_heads
        if self.adapter.geometry is None:
            return 1
        _, kv_heads = self.adapter.geometry.numbers_of_heads(heads, 1)
        return heads // kv_heads if kv_heads and heads % kv_heads == 0 else 1

    def _head(self, smallest: int) -> int:
        """Return the smallest declared head size of at least `smallest`, or else `smallest`."""
        geometry = self.adapter.geometry
        sizes = [] if geometry is None else [s for s in geometry.head_sizes if s >= smallest]
        return min(sizes, default=smallest)

    def ask(
        self,
        problem: Problem,
        natives: Natives | Spelling | None = None,
        *,
        gradients: bool = False,
        mode: Mode | None = None,
        **manner: Any,
    ) -> Outcome:
        """Call the implementation with a problem and only the mask arguments `natives`.

        Return the outcome, which is `Refused` if there is no answer of the right shape.

        Args:
            problem: the problem, whose mask, bias and causal flag are not used.
            natives: the array for each mask argument, by name, in the dtype to pass (float64 stands
                for the dtype of the inputs), and a bool for the causal flag. A `Spelling` also
                specifies which arguments are parameters.
            gradients: whether the caller needs gradients; if not, they are computed only if calls
                without gradients may use another algorithm.
            mode: a mode that replaces the laboratory's.
            manner: further fields of `Call`; with any, the outcome is `Refused` for an adapter
                without a bridge.
        """
        if manner and self.bridge is None:
            reason = "this adapter hands on NumPy arrays as they are"
            return Refused(reason, unsupported=True, value=CANNOT_BE_ASKED)
        mode = mode or self.mode
        if not gradients and not (self.bridge and self.bridge.takes_other_paths):
            mode = dataclasses.replace(mode, gradients=False)
        answer = self._run(problem, natives, mode, {"compiled": False} | manner)
        if isinstance(answer, Refused):
            return answer
        return Accepted(problem, answer, pattern(problem, answer.output))

    def answer(self, problem: Problem, *, compiled: bool = False) -> Answer | Refused:
        """Return the answer to any problem, or `Refused` if there is none.

        The mask, bias and causal flag are not passed, and no gradients are computed. Set `compiled`
        to have the call compiled as a whole, which takes less time than compiling each operation if
        the sizes are used for the first time.
        """
        mode = dataclasses.replace(self.mode, gradients=False)
        return self._run(problem, None, mode, {"compiled": compiled})

    def attempt(
        self,
        problem: Problem,
        given: Mapping[str, np.ndarray],
        natives: Natives | None = None,
        *,
        around: float | None = None,
    ) -> Answer | Refused:
        """Return the answer to inputs and masks that may contradict each other.

        The answer may have any shape. Without an answer, the result is `Refused`.

        Args:
            problem: a similar problem, which supplies all arrays that are not in `given`.
            given: the inputs to replace, as in `Call.given`. For a function, they are projected
                heads.
            natives: the array for each mask argument, as in `ask`.
            around: the number that surrounds each array in memory, as in `Call.around`.
        """
        manner = {"compiled": False, "given": given, "around": around}
        manner |= {"projected": self.adapter.projections_supplied}
        return self._run(problem, natives, self.mode, manner)

    def _run(
        self,
        problem: Problem,
        natives: Natives | Spelling | None,
        mode: Mode,
        manner: Mapping[str, Any],
    ) -> Answer | Refused:
        if not isinstance(natives, Spelling):
            natives = Spelling("as it is", natives or {})
        call = Call(mode, self.device, natives, **manner)
        try:
            answer = self.adapter.run(problem, call)
            if call.given is None:
                check_answer(answer, problem)
        except (Unavailable, ProcessLost, KeyboardInterrupt):
            raise
        except Unsupported as reason:
            return Refused(str(reason), unsupported=True, value=CANNOT_BE_ASKED)
        except WrongShape as error:
            return Refused(_first_line(error), value=Phrase("another-shape"))
        except WrongAnswer as error:
            return Refused(_first_line(error), value=Phrase("malformed-answer"))
        except BaseException as error:
            # This includes SystemExit and exceptions that do not derive from Exception.
            value = CANNOT_BE_ASKED if is_our_own(error, self.adapter) else REFUSED
            return Refused(_first_line(error), value=value)
        return answer

    @property
    def bridge(self) -> Any:
        """The adapter's bridge to a framework; None if the adapter takes NumPy arrays itself."""
        return getattr(self.adapter, "bridge", None)

    def plain(
        self, sizes: Sizes | None = None, dtype: str = "", scale: float | None = None
    ) -> Accepted:
        """Return the answer to the problem that `problem` returns for these arguments (cached).

        The problem has no mask, and its output is the attention weights.

        Raises:
            Unsupported: the adapter does not support even this problem.
            NoAnswer: there is no answer for another reason, such as an exception or a wrong shape.
        """
        key = (sizes or self.sizes(), dtype or self.dtype, scale)
        if key not in self._plain:
            self._plain[key] = self.ask(self.problem(key[0], dtype=key[1], scale=scale))
        found = self._plain[key]
        if isinstance(found, Accepted):
            return found
        if found.unsupported:
            raise Unsupported(found.reason)
        raise NoAnswer(f"without any mask: {found.told}")

    def unmasked(self, seen: Accepted) -> Array:
        """Return the weights `[batch heads query key]` for the same problem without any mask.

        They are those that `plain` returns for the same sizes, dtype and scale. The exceptions are
        also those of `plain`.
        """
        problem = seen.problem
        return self.plain(Sizes(*problem.shape.logits), problem.dtype, problem.scale).applied

    def noise(self, problem: Problem) -> Array:
        """Return σ, the rounding noise of correct weights `[batch heads query key]`."""
        return noise_of(problem.shape, problem.dtype)

    def alike(self, seen: Accepted, predicted: Array) -> bool:
        """Return whether applied and predicted weights are equal up to the noise of two answers.

        The noise is larger where masking makes a weight larger. Where zero is predicted, weights up
        to `NOTHING` are allowed. NaN counts as equal to NaN.
        """
        plain = self.unmasked(seen)
        with np.errstate(all="ignore"):
            growth = np.where(plain > 0, np.abs(predicted) / plain, 1.0)
            allowed = BETWEEN_ANSWERS * self.noise(seen.problem) * np.maximum(growth, 1.0)
            allowed = np.where(predicted == 0, NOTHING, allowed)
            near = np.abs(seen.applied - predicted) <= allowed
        both = np.isnan(seen.applied) & np.isnan(predicted)
        return bool((near | both).all())

    @staticmethod
    def alike_to_noise(one: Array, other: Array, noise: Array) -> bool:
        """Return whether two arrays of weights for one problem differ only by rounding noise."""
        return bool((np.abs(one - other) <= BETWEEN_ANSWERS * noise).all())

    def features(self, kind: type[Declared]) -> tuple[Declared, ...]:
        """Return the adapter's declarations of features that are instances of this class."""
        return tuple(each for each in self.adapter.features if isinstance(each, kind))

    def arguments(self) -> tuple[MaskArgument, ...]:
        """Return the mask arguments to examine: declared ones, then implicit ones of the framework.

        A framework attaches implicit masks to arrays. If `fixed_sharing` is "self", one array has
        all of these masks, so they cannot be examined separately and are left out. Arguments that
        are not in `only`, if it names any, are left out too.
        """
        attached = () if self.fixed_sharing == "self" else self.adapter.implicit_masks
        known = (*self.adapter.mask_arguments, *attached)
        return tuple(item for item in known if not self.only or item.name in self.only)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in text_of(error).splitlines() if line.strip()]
    message = " ".join(lines[:1])[:160]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def numbers(row: Array, most: int = 8) -> str:
    """Return the first `most` numbers of a row as text, such as "[0 0.25 −inf …]"."""

    def one(value: float) -> str:
        if math.isnan(value):
            return "NaN"
        text = f"{value:.0e}" if 0 < abs(value) < 0.005 else f"{value:.2g}"
        return "0" if value == 0 else text.replace("-", "−")

    listed = [one(float(value)) for value in row[:most]]
    return f"[{' '.join(listed)}{' …' if len(row) > most else ''}]"
