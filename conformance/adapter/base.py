"""The interface of adapters: `run(problem, call) -> Answer`; all else is declared or has a default.

An adapter is meant to be read as documentation of its library. It sees problems, never the
expected results. Most adapters are a `Layer` (`conformance.adapter.native`) or a `Function`
(`conformance.adapter.function`). An adapter that derives directly from `Adapter` takes and returns
NumPy arrays. It may call anything, such as another process or a program in another language.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import einops
import numpy as np

from conformance.adapter import layouts
from conformance.adapter.arguments import CausalFlag, MaskArgument, MaskTable, Spelling
from conformance.adapter.code import SMALL, Example
from conformance.adapter.features import Feature, Unasked, parts_of
from conformance.adapter.handing import Pages
from conformance.definition.dtypes import DTYPES, Array
from conformance.definition.geometry import Fixed, Geometry
from conformance.definition.problem import Answer, Problem, Score, Shape, check_shape
from conformance.definition.statistics import LOG_SUM_EXP, MAX_LOGIT, STATISTICS, RowStatistic
from conformance.errors import Unsupported, WrongDeclaration, check_names
from conformance.frameworks.base import PROCESS, Setting, Strides, changes, look, put_back

FullyMasked = Literal["nan", "zeros", "output bias", "mean of values"]
ReturnsWeights = Literal["per head", "averaged"]
Promise = Literal["", "A0", "A", "TF32"]
"""An accuracy class that an adapter can promise, or "" for none; see `Adapter.accuracy`."""

EQUAL_BITS = "equal bits"
"""What can be promised of a relation: that both calls give the same bits, where −0 equals 0."""

PROMISES = (
    *("batch", "batch position", "steps", "chunks", "packing"),
    *("runs", "gradients", "threads", "strides", "compiled"),
)
"""The relations of which an adapter can promise equal bits."""


@dataclass(frozen=True)
class Mode:
    """One way to run an implementation; all modes of an implementation must give the same results.

    Args:
        name: a short name, such as "eval".
        options: the adapter's own options for this mode, which it reads as `mode[option]`.
        gradients: whether this mode has a derivative (torch's fast path has none).
        weights: whether the implementation returns attention weights in this mode.
        every_case: False if the mode is expensive, for example to compile. It is then run only on a
            few cases, such as one with a fully masked query, and on those that `core_cases` adds.
        core_cases: whether a mode with `every_case` False is also run on all cases of level "core"
            in float32, for example because it is the call that most users make.
        dtypes: the dtypes in which this mode is run, or None for all dtypes of the adapter.
        optimised: whether to compile with the options of normal use. By default the suite
            compiles with fewer optimisations, if the framework has such an option.
        dropout: the probability with which attention weights are dropped; nonzero only when the
            suite examines dropout. It takes effect only in the modes in `Adapter.dropout_modes`.
        draw: the seed of the dropout; equal seeds drop the same weights. A new layer is built for
            each seed.
        about: a description, for users, of how the implementation is called in this mode.
        compiled: False if the implementation cannot be compiled as a whole although its framework
            compiles; then it is called operation by operation.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    gradients: bool = True
    weights: bool = True
    every_case: bool = True
    core_cases: bool = False
    dtypes: tuple[str, ...] | None = None
    optimised: bool = False
    dropout: float = 0.0
    draw: int = 0
    about: str = ""
    compiled: bool = True

    def __getitem__(self, option: str) -> Any:
        return self.options[option]

    def has(self, dtype: str) -> bool:
        """Return whether this mode is run in a dtype, if the adapter has the dtype at all."""
        return self.dtypes is None or dtype in self.dtypes


DEFAULT_MODE = Mode("default")


@dataclass(frozen=True)
class ReturnedStatistic:
    """A number of each query and head, which an implementation returns beside its output.

    The implementation returns (output, statistic), and no attention weights.

    Args:
        axes: the layout, a pattern of einops over batch, heads and query.
        base: of the logarithm that the logits are, "e" or "2".
        includes_sink: whether a sink counts as a key.
        of_no_keys: the number for a query that sees neither a key nor a sink that counts. None if
            it is not declared.
        modes: names of the modes in which it is returned; () for all.

    Raises:
        WrongDeclaration: if the base or the axes are others.
    """

    of: ClassVar[RowStatistic]
    axes: str = "batch heads query"
    base: Literal["e", "2"] = "e"
    includes_sink: bool = True
    of_no_keys: float | None = -math.inf
    modes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        named = type(self).__name__
        if self.base not in ("e", "2"):
            raise WrongDeclaration(f"{named}: base={self.base!r}; say 'e' or '2'")
        if sorted(layouts.axes(self.axes)) != ["batch", "heads", "query"]:
            raise WrongDeclaration(
                f"{named}: axes={self.axes!r}; they are batch, heads and query in some order"
            )

    def canonical(self, native: Array, shape: Shape) -> Array:
        """Return a returned array in base e, `[batch heads query]`.

        Raises:
            WrongShape: if the array does not have the declared layout.
        """
        sizes = dict(zip(("batch", "heads", "query"), shape.logits, strict=False))
        wanted = layouts.shape(self.axes, sizes)
        check_shape(f"the {self.of.title}, [{self.axes}],", native.shape, wanted)
        found = einops.rearrange(native, f"{self.axes} -> batch heads query", **sizes)
        return found if self.base == "e" else found * math.log(2)

    def cotangent(self, natural: Array) -> Array:
        """Return a gradient with respect to `canonical` as one with respect to what it is given."""
        native = einops.rearrange(natural, f"batch heads query -> {self.axes}")
        return native if self.base == "e" else native * math.log(2)


@dataclass(frozen=True)
class LogSumExp(ReturnedStatistic):
    """The log-sum-exp of each query's logits, which an implementation returns beside its output.

    It is L = log(Σ_j exp(s_j)), over the visible keys j, of the logits s after scale, cap, bias and
    ALiBi. Attentions over parts of the keys can be merged by it; of those without a key, only if
    `of_no_keys` is −∞ without a special case.

    Args:
        differentiable: whether a loss may depend on it.
    """

    of = LOG_SUM_EXP
    differentiable: bool = False


@dataclass(frozen=True)
class MaxLogit(ReturnedStatistic):
    """The largest logit of each query, which an implementation returns beside its output.

    It is M = max_j s_j, over the visible keys j, of the logits s after scale, cap, bias and ALiBi.
    Optimisers clip by it, and kernels in tiles subtract it before the exponential. A sink is no
    key, unless `includes_sink`. Nothing is asked of its gradient.
    """

    of = MAX_LOGIT
    includes_sink: bool = MAX_LOGIT.includes_sink


@dataclass(frozen=True, eq=False)
class Call:
    """Options of a call to an implementation; most are changed only by experiments and some checks.

    Attributes:
        mode, device: the mode, and the kind of device ("cpu" or "gpu").
        spelling: how the masks are encoded; None for the adapter's preferred encoding.
        compiled: False to call operation by operation even if the framework compiles.
        unbatched: whether to pass the inputs without a batch axis, which requires a batch of 1.
        strided: how arrays lie in memory, see `Framework.strided`; "" for contiguous arrays.
        strided_alone: the name of the only array to which `strided` applies: an input, "cotangent",
            or a mask argument; "" for all of them.
        wanted: what to differentiate with respect to: names of inputs, "attn_bias", "sinks",
            "norm.query", "norm.key", or "weights" for all parameters; None for everything.
        backwards: the number of backward passes through the same graph; the last one's gradients
            are returned.
        projected: whether the inputs are the concatenated heads themselves. All projections are
            then the identity, and the suite leaves out the projections that it supplies.
        given: arrays by name that are passed in place of the problem's inputs of the same names,
            although they may contradict the problem. The answer may then have any shape. None to
            pass the inputs of the problem.
        shared: the names of inputs for which the query, or a view of its first tokens, is passed;
            gradients with respect to them must not be wanted. The problem's inputs must agree.
        built: the shape, with other lengths, for which a layer is built; None for the problem's.
        around: the number that surrounds every input and mask in memory, if the framework's arrays
            can be views of other arrays; `strided` then has no effect. None to surround no array.
        handed: a list to which a function's adapter adds what it hands to the function: the name of
            an array, the array and a copy of its numbers. None to add nothing.
    """

    mode: Mode = DEFAULT_MODE
    device: str = "cpu"
    spelling: Spelling | None = None
    compiled: bool = True
    unbatched: bool = False
    strided: Strides = ""
    strided_alone: str = ""
    wanted: frozenset[str] | None = None
    backwards: int = 1
    projected: bool = False
    given: Mapping[str, np.ndarray] | None = None
    shared: tuple[str, ...] = ()
    built: Shape | None = None
    around: float | None = None
    handed: list[tuple[str, Any, np.ndarray]] | None = None

    def spelled(self, spelling: Spelling) -> Call:
        """Return the same call with masks in this encoding, faster than `dataclasses.replace`."""
        made = object.__new__(Call)
        made.__dict__.update(self.__dict__, spelling=spelling)
        return made


@dataclass(frozen=True)
class SideEffects:
    """The results of two identical calls on the same objects.

    Attributes:
        changed: one line of text for each array, such as an input, a mask or a parameter, whose
            numbers the calls changed, and for each attribute that they attached to an array.
        first, second: the two answers.
        surroundings: one line of text for each change of a process-wide setting.
    """

    changed: tuple[str, ...]
    first: Answer
    second: Answer
    surroundings: tuple[str, ...] = ()


def check_promises(promises: Mapping[str, str], known: Sequence[str], spec: str) -> None:
    """Check a declaration of promises of equal bits.

    Args:
        promises: the declaration.
        known: the relations of which equal bits can be promised.
        spec: the name of what declares them, for messages.

    Raises:
        UnknownName: if a relation is not known.
        WrongDeclaration: if something else than equal bits is promised.
    """
    check_names("promise", promises, known)
    for relation, value in promises.items():
        if value != EQUAL_BITS:
            raise WrongDeclaration(
                f"{spec}: promises: {relation!r} can be {EQUAL_BITS!r}, not {value!r}"
            )


class Adapter(ABC):
    """The base class of adapters. Each wraps one implementation, which its attributes declare.

    Attributes:
        name: the name for `--implementation`; set by the loader if it is not declared.
        title: the implementation's name in code, such as "torch.nn.MultiheadAttention"; the loader
            sets it to `name` if it is not declared.
        documentation: a link to the library's documentation of the implementation.
        framework: name of the bridge ("torch", "jax", "tensorflow", "mlx", "paddle", "tinygrad",
            "onnx", "onnxruntime", "openvino" or "numpy").
        packages: the distributions whose versions belong in the record, in addition to those of the
            framework.
        dtypes: the supported dtypes.
        geometry: the sizes of heads, lengths and tiles for which the implementation is written;
            the cases of the catalogue are then given these sizes. None if they keep their own.
        fixed: what the implementation does in every call, such as a causal mask, without an
            argument for it; the cases are then posed so. None if there is nothing.
        scores: "scaled-dot", "additive" or both.
        custom_scale: whether the scale of the logits can be chosen.
        differentiable: whether the implementation has gradients.
        accuracy: the accuracy class by which answers are judged, in the dtypes that have it. In
            bfloat16 and float16, "A" promises that logits, statistics and sums are held in float32,
            "A0" that everything is, with one final rounding of the results, which are the
            gradients, too. In float32, "TF32" says that the operands of matrix products are rounded
            to TF32. "" is no promise. For different classes, a dictionary by dtype.
        promises: for names in `PROMISES`, "equal bits". What is promised is required; what is not
            is only observed.
        mask_arguments, causal_flag: the arguments for masks, and the flag for a causal mask, see
            `conformance.adapter.arguments`.
        features: the arguments for windows, soft caps, sinks, lengths and the like, see
            `conformance.adapter.features`.
        modes: the ways to run the implementation; all are compared with the first.
        returns_weights: "per head", "averaged" over heads, or None.
        weights_option: the option that the adapter passes to get weights per head; "" if it passes
            none.
        weights_otherwise: the weights that are returned without `weights_option`, such as
            "averaged".
        returned_logits: for each option with which logits are returned in place of weights, the
            options of a mode that passes it.
        log_sum_exp: the log-sum-exp that is returned in place of weights, or None.
        max_logit: the largest logit of each query that is returned in place of weights, or None.
        fully_masked_row: the output of a fully masked query, in all modes or by name of the mode;
            None if it is not declared.
        conventions: further declared conventions, which the experiments must observe, such as
            {"size.no-key": "row.nan", "leak(*number.nan*)": "leak.hidden"}. Each maps the subject
            of an entry of the convention card, which lists what was observed, to its value. Both
            are texts, and may be glob patterns, as in a baseline.
        implicit_masks: masks that the framework attaches to inputs and propagates by itself;
            `call` receives them as it does mask arguments. Only experiments use them.
        projections_supplied: whether the suite computes the projections. If so, a check can
            distinguish deviations of the kernel from those of a projection.
        dropout_modes: names of the modes in which dropout is active if `Mode.dropout` is not 0.
        sequence_first: name of the mode that takes inputs `[length batch width]`; "" if there is
            none.
        example: the code that users write, or None; override `example_for` if this code depends on
            more than the sizes and the mode.
    """

    name: str = ""
    title: str = ""
    documentation: ClassVar[str] = ""
    framework: ClassVar[str] = "numpy"
    packages: ClassVar[tuple[str, ...]] = ()
    dtypes: tuple[str, ...] = tuple(DTYPES)
    geometry: Geometry | None = None
    fixed: Fixed | None = None
    scores: tuple[str, ...] = ("scaled-dot",)
    custom_scale: bool = False
    differentiable: bool = True
    accuracy: Promise | Mapping[str, Promise] = ""
    promises: Mapping[str, str] = MappingProxyType({})
    mask_arguments: tuple[MaskArgument, ...] = ()
    causal_flag: CausalFlag | None = None
    features: tuple[Feature, ...] = ()
    modes: tuple[Mode, ...] = (DEFAULT_MODE,)
    returns_weights: ReturnsWeights | None = None
    weights_option: ClassVar[str] = ""
    weights_otherwise: ClassVar[str] = "averaged"
    returned_logits: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    log_sum_exp: LogSumExp | None = None
    max_logit: MaxLogit | None = None
    fully_masked_row: FullyMasked | Mapping[str, FullyMasked] | None = None
    conventions: Mapping[str, str] = MappingProxyType({})
    implicit_masks: tuple[MaskArgument, ...] = ()
    dropout_modes: tuple[str, ...] = ()
    projections_supplied: bool = False
    sequence_first: str = ""
    example: ClassVar[Example | None] = None

    @abstractmethod
    def run(self, problem: Problem, call: Call) -> Answer:
        """Return the implementation's answer: its output and, if possible, weights and gradients.

        Raise `Unsupported` if the implementation cannot express the problem or the call's options.
        """

    @property
    def compiles(self) -> bool:
        """Whether each new combination of arguments is compiled.

        If so, checks that pass the mask in several forms run in one dtype only.
        """
        return False

    @property
    def has_gradients(self) -> bool:
        """Whether gradients can be computed: by default, whether the adapter declares them."""
        return self.differentiable

    @property
    def page(self) -> int:
        """The largest page size, in keys, that the features declare; 0 if keys have no pages."""
        return max((paged.size for paged in self.features if isinstance(paged, Pages)), default=0)

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers that features fix instead of an argument, by fields of `Fixed`."""
        return {name: n for one in self.features for name, n in one.numbers.items()}

    @cached_property
    def masks(self) -> MaskTable:
        """The table of the declared arguments for masks and features.

        Raises:
            WrongDeclaration: if the declarations contradict each other.
        """
        unasked = () if self.fixed is None else (Unasked(self.fixed),)
        return MaskTable(tuple(self.mask_arguments), self.causal_flag, (*self.features, *unasked))

    def example_for(
        self, shape: Shape, dtype: str, scale: float | None, mode: Mode
    ) -> Example | None:
        """Return the code with which users call this implementation in this mode, or None.

        By default, this is `example` with the sizes of the shape filled in, whatever the dtype and
        the scale; it is None if `example` is None or contains no call for this mode.
        """
        if self.example is None:
            return None
        first = mode.name == self.modes[0].name
        call = self.example.call if first else self.example.calls.get(mode.name)
        return None if call is None else self.example.formatted(shape, call)

    def small_example(self, mode: Mode) -> Example | None:
        """Return the example for the shape `SMALL`, with biases if they are supported.

        Return None if there is no example or the shape is not supported even without biases.
        """
        score: Score = "scaled-dot" if "scaled-dot" in self.scores else "additive"
        for bias in (True, False):
            shape = replace(SMALL, bias=bias, score=score)
            with suppress(Unsupported):
                self.check_shape(shape)
                return self.example_for(shape, "float32", None, mode)
        return None

    def masked_row(self, mode: Mode) -> FullyMasked | None:
        """Return the declared output of a fully masked query in this mode; None if undeclared."""
        declared = self.fully_masked_row
        return declared.get(mode.name) if isinstance(declared, Mapping) else declared

    def statistics_in(self, mode: Mode) -> dict[str, ReturnedStatistic]:
        """Return, by name, the declarations of statistics that are returned in this mode."""
        declared = {name: getattr(self, name) for name in STATISTICS}
        return {
            name: one
            for name, one in declared.items()
            if one is not None and (not one.modes or mode.name in one.modes)
        }

    def log_sum_exp_in(self, mode: Mode) -> LogSumExp | None:
        """Return the declared log-sum-exp if it is returned in this mode; None otherwise."""
        return self.log_sum_exp if LOG_SUM_EXP.name in self.statistics_in(mode) else None

    def promised(self, dtype: str) -> str:
        """Return the accuracy class that is promised in a dtype, or "" if there is none.

        A class that the dtype does not have is no promise, see `Expectation.at_accuracy`.
        """
        declared = self.accuracy
        return declared.get(dtype, "") if isinstance(declared, Mapping) else declared

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages that the adapter uses, by name; by default {}."""
        return {}

    def toolkit(self) -> dict[str, str]:
        """Return the versions of the libraries that a GPU needs, by name; by default {}."""
        return {}

    def device_model(self, device: str) -> str:
        """Return the model name of a kind of device, by default the kind itself.

        An override raises `Unavailable` if there is no such device.
        """
        return device

    def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Import the packages needed, by default none; raise `Unavailable` if one is missing."""

    def settings(self) -> tuple[Setting, ...]:
        """Return the process-wide settings that no call may change."""
        return PROCESS

    def check(self, problem: Problem) -> None:
        """Raise `Unsupported` if the declarations rule out this problem."""
        if problem.dtype not in self.dtypes:
            raise Unsupported(f"no {problem.dtype}")
        if problem.shape.score not in self.scores:
            raise Unsupported(f"no {problem.shape.score} score")
        if self.fixed is not None:
            self.fixed.check(problem)
        if isinstance(problem.shape.bias, tuple) and (self.fixed is None or not self.fixed.bias):
            raise Unsupported("all projections have biases or none has")
        scaled = self.custom_scale or (self.fixed is not None and self.fixed.scale)
        if problem.scale is not None and not scaled:
            raise Unsupported("the scale cannot be chosen")
        if self.geometry is not None:
            self.geometry.check(problem.shape)
        self.check_shape(problem.shape)
        self.check_features(problem)

    def check_features(self, problem: Problem) -> None:
        """Raise `Unsupported`, naming the feature, if the problem has one that is not declared."""
        declared = {part for feature in self.masks.features for part in feature.covers}
        for part in parts_of(problem):
            if part not in declared:
                raise Unsupported(f"no {part}")

    def check_shape(self, shape: Shape) -> None:  # noqa: B027 - most shapes are fine for most
        """Raise `Unsupported` for a shape that the implementation does not support.

        By default, every shape is supported. This is called before the framework is imported, so
        overrides must not use the framework.
        """

    def rewritten(self, problem: Problem, earlier: Problem, call: Call) -> Answer:
        """Run `earlier`, overwrite its arrays with those of `problem`, and return the new answer.

        This detects results that are cached by the memory addresses of arrays. The two problems
        have the same shape and kinds of masks. Raise `Unsupported`, as by default, if arrays cannot
        be written to.
        """
        raise Unsupported("its arrays cannot be written to")

    def reread(self, problem: Problem, later: Problem, call: Call) -> tuple[Answer, Answer]:
        """Run two problems; return the answer to the first, read before and after the second call.

        The two problems have the same shape and kinds of masks. Raise `Unsupported` if answers are
        not kept as native arrays, which is the default.
        """
        raise Unsupported("its answers are not kept as native arrays")

    def interrupted(self, problem: Problem, later: Problem, call: Call) -> Answer:
        """Return the answer to a problem if `later` is run before its backward pass.

        The two problems are as in `reread`. Raise `Unsupported` if the backward pass is not a call
        of its own, which is the default.
        """
        raise Unsupported("its backward pass is not a call of its own")

    def side_effects(self, problem: Problem, call: Call) -> SideEffects:
        """Run a problem twice on the same arrays; return both answers and what changed."""
        before = _numbers(problem)
        first, second, surroundings = twice(lambda: self.run(problem, call), self.settings())
        changed = [
            name
            for name, array in _numbers(problem).items()
            if not np.array_equal(array, before[name], equal_nan=True)
        ]
        return SideEffects(tuple(changed), first, second, surroundings)


def twice(
    call: Callable[[], Answer], settings: Sequence[Setting]
) -> tuple[Answer, Answer, tuple[str, ...]]:
    """Call a function twice; return both answers, and one line for each change of a setting.

    All settings are restored after each call. Without this, a random generator that each call
    reseeds would seem unchanged by the second call. A change that only the first call makes is
    reported only if messages show the setting's value (`Setting.shown`). The first call may thus
    draw random numbers to initialise something.
    """
    before = look(settings)
    first = call()
    after_first = look(settings)
    put_back(settings, before, after_first)
    second = call()
    after_second = look(settings)
    lines = changes(settings, before, after_second)
    put_back(settings, before, after_second)
    by_first = [
        line
        for setting, one, other in zip(settings, before, after_first, strict=True)
        if setting.shown
        for line in changes([setting], [one], [other])
    ]
    return first, second, tuple(dict.fromkeys(lines + by_first))


def _numbers(problem: Problem) -> dict[str, np.ndarray]:
    arrays = {
        name: getattr(problem, name) for name in ("query", "key", "value", "mask", "attn_bias")
    }
    return {name: array.copy() for name, array in arrays.items() if array is not None}
