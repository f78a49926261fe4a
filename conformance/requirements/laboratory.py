"""A `Laboratory`, in which experiments call an implementation and observe its attention weights.

An experiment passes native arrays to mask arguments, in any dtype and shape; nothing converts them.

The output of a laboratory's problems *is* the attention weights. The input of each key contains the
key's index, one-hot, and the value projection copies that index and nothing else: the value of
key j is the unit vector e_j. The context of a query is then

    sum_j p_j e_j = (p_1, ..., p_keys)

and the output projection is the identity, so the output lists these weights head by head. All of
this is products with 0 and 1, so nothing is rounded. The remaining features of the inputs drive
queries and keys as in any attention; in the output, their places hold only the output bias.

An experiment thus sees the weights that were really applied, after dropout, even if the
implementation returns none. Its conclusions need no reference: a blocked key has weight 0, and the
effect of a mask is found by comparison with the implementation's own weights without the mask.
"""

from __future__ import annotations

import ast
import dataclasses
import linecache
import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import FrameType
from typing import Any, TypeVar

import einops
import numpy as np

from conformance.adapter.arguments import MaskArgument, Native, Spelling
from conformance.adapter.base import Adapter, Call, Mode
from conformance.adapter.features import Feature
from conformance.cases.case import assembled, rounded
from conformance.definition.comparison import BETWEEN_ANSWERS
from conformance.definition.dtypes import Array
from conformance.definition.expectation import expect
from conformance.definition.problem import Answer, Problem, Score, Shape, Sharing
from conformance.errors import (
    ConformanceError,
    RankLost,
    Unavailable,
    Unsupported,
    WrongAnswer,
    WrongShape,
)
from conformance.records.phrase import Phrase
from conformance.requirements.examination import check_answer
from conformance.text import text_of

Declared = TypeVar("Declared", bound=Feature)

OUTPUT_BIAS = 0.25
"""The bias of output features that hold no weight, so that a bias-only output is not all zeros."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the axes. By default all differ: where two are equal, swapped axes go unnoticed. The
    number of heads is even because some fast paths require that."""

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
    """Return a shape whose heads are wide enough to hold at least one number for each key. Each key
    head serves `group` query heads. `head` is the size of heads, or 0 for the smallest."""
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
    """Return the smallest head size that holds a number for each key, with some to spare."""
    return max(sizes.key, 1) + 3


@lru_cache(maxsize=64)
def readout(shape: Shape, dtype: str, seed: int = 0) -> Problem:
    """Return a problem of this shape whose output is the attention weights, as the module explains.
    Axes may have size 0. `seed` determines the random features of queries and keys."""
    random = np.random.default_rng([20261121, seed])
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
    if shape.bias:
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


@lru_cache(maxsize=64)
def noise_of(shape: Shape, dtype: str) -> Array:
    """Return σ of the weights of the readout problem of a shape, `[batch heads query key]`."""
    return expect(readout(shape, dtype), gradients=False).sigma["weights"]


def pattern(problem: Problem, output: Array) -> Array:
    """Return the weights `[batch heads query key]` that the output `[batch query width]` holds."""
    heads = einops.rearrange(output, "b q (h d) -> b h q d", h=problem.shape.heads)
    return heads[..., : problem.shape.key_length]


Natives = Mapping[str, Native]

REFUSED, SOMETHING_ELSE = Phrase("refused"), Phrase("something-else")
"""Values of entries that several experiments share. "refused" means that the library raised."""

CANNOT_BE_ASKED = Phrase("cannot-be-asked")
"""The suite or the adapter has no way to put the question; the library never saw it."""

NOTHING = 1e-25
"""A weight up to this counts as zero: a softmax that clips at exp(-64) leaves 1.6e-28."""


@dataclass(frozen=True, eq=False)
class Seen:
    """An answer to a problem, with the weights `[batch heads query key]` that were applied."""

    problem: Problem
    answer: Answer
    applied: Array


@dataclass(frozen=True)
class Refused:
    """There is no answer of the right shape; `reason` says why, in one line.

    Attributes:
        unsupported: whether the suite or the adapter said so with `Unsupported`.
        value: the value of an entry: refused, cannot be asked, or an answer of another kind.
    """

    reason: str
    unsupported: bool = False
    value: Phrase = REFUSED

    @property
    def told(self) -> str:
        """The reason, as the evidence of a card entry."""
        return f"unsupported: {self.reason}" if self.unsupported else self.reason


Outcome = Seen | Refused


class NoAnswer(ConformanceError):
    """The implementation gave no answer without a mask, with which others could be compared."""


@dataclass
class Laboratory:
    """One implementation in one mode and dtype, on one device, ready for experiments.

    Attributes:
        adapter, dtype, device, mode: which implementation is called, and how.
        only: names of the mask arguments to examine; all if empty.
        case: a shape whose sharing, score, biases and heads every problem uses; if None, the first
            of each that the implementation allows.
        fixed_sharing: which inputs are one array, if not as few as the implementation allows.
    """

    adapter: Adapter
    dtype: str
    device: str
    mode: Mode
    only: tuple[str, ...] = ()
    case: Shape | None = None
    fixed_sharing: Sharing | None = None
    _plain: dict[tuple[Sizes, str, float | None], Outcome] = field(default_factory=dict)

    @cached_property
    def sharing(self) -> Sharing:
        """Which inputs are the same array: none if possible, else key and value, else all three."""
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
        """Whether the problems have projection biases: if the case has, or the layer can."""
        return self.case.bias if self.case else self._has_shape(self.sharing, bias=True)

    @cached_property
    def with_shared_inputs(self) -> Laboratory | None:
        """A laboratory in which query, key and value are one array, where that is another call."""
        if self.sharing == "self" or self.case is not None:
            return None
        return dataclasses.replace(self, fixed_sharing="self", _plain={})

    def in_other_dtypes(self) -> Iterator[Laboratory]:
        """Yield a laboratory for each other dtype that the implementation has on this device."""
        for dtype in self.adapter.dtypes:
            if dtype != self.dtype and self.has(dtype):
                yield dataclasses.replace(self, dtype=dtype, _plain={})

    def has(self, dtype: str) -> bool:
        """Return whether the adapter and its framework support a dtype on this device."""
        if self._expresses(self.problem(dtype=dtype)):
            try:
                self.plain(dtype=dtype)
            except Unsupported:
                return False
            except NoAnswer:
                pass
            return True
        return False

    def _has_shape(self, sharing: Sharing, *, bias: bool) -> bool:
        sizes = Sizes(query=5 if sharing == "self" else 4)
        sizes = self._declared(sizes, equal=sharing == "self")
        return self._expresses(self.problem(sizes, sharing=sharing, bias=bias))

    def _expresses(self, problem: Problem) -> bool:
        # A bug in the adapter's check is not a refusal; the call itself will report it.
        with suppress(Exception):
            try:
                self.adapter.check(problem)
            except Unsupported:
                return False
        return True

    def sizes(self, **sizes: int) -> Sizes:
        """Return sizes with these values and defaults for the rest; in self-attention, both lengths
        are equal."""
        if self.sharing == "self":
            length = sizes.get("key", sizes.get("query", 5))
            sizes |= {"query": length, "key": length}
        if self.case is not None:
            sizes = {"heads": self.case.heads} | sizes
        return self._declared(Sizes(**sizes), equal=self.sharing == "self")

    def _declared(self, sizes: Sizes, *, equal: bool) -> Sizes:
        """Return the nearest sizes that the implementation declares; axes of size 0 stay empty."""
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
        """Return the readout problem of these sizes; defaults suit the implementation or case."""
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

    def _group(self, heads: int) -> int:
        """Return how many heads share a key head: those of the case, or as few as is declared."""
        if self.case is not None:
            return self.case.heads // self.case.kv_heads
        if self.adapter.geometry is None:
            return 1
        _, kv_heads = self.adapter.geometry.numbers_of_heads(heads, 1)
        return heads // kv_heads if kv_heads and heads % kv_heads == 0 else 1

    def _head(self, smallest: int) -> int:
        """Return the smallest head size from `smallest` on that the implementation takes."""
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
        """Call the implementation with a problem and these native mask arguments only.

        Args:
            problem: its own mask, bias and causal flag are not used.
            natives: maps a mask argument to its array, in the dtype to be passed (float64 stands
                for the implementation's own), and the causal flag to a bool. A spelling says
                besides which arguments are parameters.
            gradients: whether the caller needs gradients.
            mode: replaces the laboratory's mode.
            manner: further fields of `Call`.
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
        return Seen(problem, answer, pattern(problem, answer.output))

    def answer(self, problem: Problem, *, compiled: bool = False) -> Answer | Refused:
        """Call with any problem without its mask, bias and causal flag; return what came back.

        At sizes that were never asked before, it takes less time to have the call compiled as a
        whole than each of its operations.
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
        """Call with inputs and masks that may contradict each other; the answer has any shape.

        Args:
            problem: one that resembles the call; its other arrays are passed.
            given: replaces inputs, as in `Call.given`. A function gets heads that are projected.
            natives: maps mask arguments to arrays, as in `ask`.
            around: the number beside each array in memory, as in `Call.around`.
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
        """Return the implementation's answer, or why there is none."""
        if not isinstance(natives, Spelling):
            natives = Spelling("as it is", natives or {})
        call = Call(mode, self.device, natives, **manner)
        try:
            answer = self.adapter.run(problem, call)
            if call.given is None:
                check_answer(answer, problem)
        except (Unavailable, RankLost, KeyboardInterrupt):
            raise
        except Unsupported as reason:
            return Refused(str(reason), unsupported=True, value=CANNOT_BE_ASKED)
        except (WrongShape, WrongAnswer) as error:
            kind = "another-shape" if isinstance(error, WrongShape) else "malformed-answer"
            return Refused(_first_line(error), value=Phrase(kind))
        except BaseException as error:
            # This includes SystemExit and exceptions that do not derive from Exception.
            value = CANNOT_BE_ASKED if is_our_own(error, self.adapter) else REFUSED
            return Refused(_first_line(error), value=value)
        return answer

    @property
    def bridge(self) -> Any:
        """The framework's bridge; None if the adapter takes NumPy arrays."""
        return getattr(self.adapter, "bridge", None)

    def plain(
        self, sizes: Sizes | None = None, dtype: str = "", scale: float | None = None
    ) -> Seen:
        """Return the answer to the readout problem of these sizes without any mask, cached.

        Raises:
            Unsupported: the adapter does not support even this problem.
            NoAnswer: the implementation raised, or returned arrays of wrong shapes.
        """
        key = (sizes or self.sizes(), dtype or self.dtype, scale)
        if key not in self._plain:
            self._plain[key] = self.ask(self.problem(key[0], dtype=key[1], scale=scale))
        found = self._plain[key]
        if isinstance(found, Refused):
            if found.unsupported:
                raise Unsupported(found.reason)
            raise NoAnswer(f"without any mask: {found.told}")
        return found

    def unmasked(self, seen: Seen) -> Array:
        """Return the weights `[batch heads query key]` for the same problem without any mask."""
        problem = seen.problem
        return self.plain(Sizes(*problem.shape.logits), problem.dtype, problem.scale).applied

    def noise(self, problem: Problem) -> Array:
        """Return σ, the rounding noise of correct weights `[batch heads query key]`."""
        return noise_of(problem.shape, problem.dtype)

    def alike(self, seen: Seen, predicted: Array) -> bool:
        """Return whether applied and predicted weights are equal up to the noise of two answers.

        Where masking enlarges weights, the noise is larger. Predicted zeros allow up to `NOTHING`.
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
        """Return whether two arrays of weights for one problem differ by rounding noise only."""
        return bool((np.abs(one - other) <= BETWEEN_ANSWERS * noise).all())

    def features(self, kind: type[Declared]) -> tuple[Declared, ...]:
        """Return the adapter's declarations of features of this kind."""
        return tuple(each for each in self.adapter.features if isinstance(each, kind))

    def arguments(self) -> tuple[MaskArgument, ...]:
        """Return the mask arguments to examine: the declared ones, then those of the framework.

        A framework attaches its masks to arrays, so an array that is query, key and value at once
        has all of them together, and none of them can be examined alone.
        """
        attached = () if self.fixed_sharing == "self" else self.adapter.implicit_masks
        known = (*self.adapter.mask_arguments, *attached)
        return tuple(item for item in known if not self.only or item.name in self.only)


_SHAPING = {
    "reshape",
    "rearrange",
    "repeat",
    "swapaxes",
    "transpose",
    "broadcast_to",
    "concatenate",
}
_SHAPING |= {"stack", "split", "pad", "take_along_axis", "expand_dims", "squeeze", "astype"}


def is_our_own(error: BaseException, adapter: Adapter) -> bool:
    """Return whether the suite or the adapter failed, and not the library.

    It did if the innermost of its frames was arranging an array, as in `array.reshape(...)`. Other
    calls in that frame are the library's. A decorated function is the implementation itself.
    """
    if isinstance(error, ConformanceError):
        return True
    modules = {kind.__module__ for kind in type(adapter).__mro__}
    trace = error.__traceback__
    own = [
        summary
        for summary, (frame, _) in zip(
            traceback.extract_tb(trace), traceback.walk_tb(trace), strict=True
        )
        if frame.f_globals.get("__name__") in modules or _is_of_suite(frame)
    ]
    return bool(own) and _called(own[-1]) in _SHAPING


def _called(summary: traceback.FrameSummary) -> str:
    """Return the name of the function that was being called in this frame, or ""."""
    first, last = summary.lineno, summary.end_lineno
    if first is None or last is None or summary.colno is None:
        return ""
    lines = [linecache.getline(summary.filename, n).encode() for n in range(first, last + 1)]
    lines[-1] = lines[-1][: summary.end_colno]
    lines[0] = lines[0][summary.colno :]
    with suppress(SyntaxError):
        called = ast.parse(f"({b''.join(lines).decode()})", mode="eval").body
        if isinstance(called, ast.Call):
            return getattr(called.func, "attr", getattr(called.func, "id", ""))
    return ""


def _is_of_suite(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.startswith("conformance.") and not name.startswith("conformance.adapters.")


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
