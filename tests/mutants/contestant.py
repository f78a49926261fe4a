"""The adapter through which the attention and its mutants are examined.

It declares what a library would: three mask arguments, a causal flag, modes that must agree, every
dtype. bfloat16 is float32 that was rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from conformance.adapter.arguments import CausalFlag, MaskArgument
from conformance.adapter.base import Adapter, Call, Mode
from conformance.adapter.features import (
    Alibi,
    Chunk,
    HeadNorm,
    Lengths,
    PositionIds,
    RotaryBase,
    RotaryConfig,
    SegmentIds,
    Sinks,
    SoftCap,
    Spans,
    Tree,
    Window,
)
from conformance.adapter.native import NativeAdapter, Prepared
from conformance.definition.dtypes import dtype_of
from conformance.definition.problem import Answer, Causal, Problem
from conformance.definition.rotary import ScalingKind
from conformance.errors import Unsupported
from conformance.frameworks.base import Evaluated, Framework, Natives
from conformance.frameworks.numpy_bridge import NumPy
from mutants.attention import Attention, Given
from mutants.featured import Featured


class Emulated(NumPy):
    """NumPy with bfloat16, as float32 that holds nothing else."""

    differentiable = True
    records_graphs = True

    def array(self, values: np.ndarray, dtype: str, device: str) -> Any:
        """float64, the suite's own numbers, as `dtype`; the rest as it is."""
        return super().array(values, "float32" if dtype == "bfloat16" else dtype, device)


_BRIDGE = Emulated()


class Contestant(NativeAdapter):
    """An attention of `mutants` as an implementation like any other."""

    title = "the original of the mutants"
    scores = ("scaled-dot", "additive")
    custom_scale = True
    mask_arguments = (
        MaskArgument("bias", "batch heads query key", number="added", broadcasts=True),
        MaskArgument("padding", "batch key", true="attends", number="attends if nonzero"),
        MaskArgument(
            "mask", "batch heads query key", true="attends", number="added", broadcasts=True
        ),
    )
    modes = (
        Mode("train", {"train": True, "fused": False}),
        Mode("eval", {"train": False, "fused": False}),
        Mode("fused", {"train": False, "fused": True}, weights=False),
    )
    dropout_modes = ("train",)
    returns_weights = "per head"
    fully_masked_row = "output bias"

    def __init__(
        self,
        name: str = "selftest",
        kind: type[Attention] = Attention,
        alignment: Causal = "bottom-right",
    ) -> None:
        self.name = name
        self.causal_flag = CausalFlag("causal", alignment=alignment)
        self._kind = kind
        self._memory: dict[str, Any] = {}
        self._called: list[Attention] = []
        self._wanted: Iterable[str] = ()

    @property
    def bridge(self) -> Framework:
        """NumPy with bfloat16."""
        return _BRIDGE

    def check(self, problem: Problem) -> None:
        """Raise `Unsupported` for what the declaration rules out."""
        Adapter.check(self, problem)
        self.masks.spell(problem)

    def _bind(self, problem: Problem, call: Call) -> tuple[Natives, Callable[..., Any], Hashable]:
        if call.unbatched:
            raise Unsupported("always with a batch")
        weights = problem.weights.named()
        natives = {
            name: self.bridge.array(array, problem.dtype, call.device)
            for name, array in weights.items()
        }

        def invoke(own: Natives, query: Any, key: Any, value: Any, masks: Natives) -> Any:
            given = Given(
                problem.shape,
                dtype_of(problem.dtype),
                {"query": query, "key": key, "value": value},
                own,
                {name: mask for name, mask in masks.items() if name != "causal"},
                bool(masks.get("causal", False)),
                problem.scale,
                call.mode,
                self._memory,
                frozenset(self._wanted),
            )
            self._called.append(self._kind(given))
            return self._called[-1].forward()

        return natives, invoke, None

    def _native(self, call: Call, ready: Prepared) -> Evaluated:
        variables, constants = ready.split(call.wanted)
        self._wanted = variables if call.mode.gradients else ()
        self._called.clear()
        with np.errstate(all="ignore"):
            output, weights = ready.function(variables, constants)
            gradients: Natives = {}
            if self._wanted:
                for _ in range(call.backwards):
                    every = self._called[0].backward(ready.cotangent, ready.weights_cotangent)
                gradients = {name: every[name] for name in variables if name in every}
        return Evaluated(output, weights, gradients)

    def _answer(self, problem: Problem, ready: Prepared, result: Evaluated) -> Answer:
        answer = super()._answer(problem, ready, result)
        if problem.dtype == "bfloat16":
            named = {name: "bfloat16" if d == "float32" else d for name, d in answer.dtypes.items()}
            answer = replace(answer, dtypes=named)
        return answer

    def _canonical(self, problem: Problem, gradients: Natives) -> dict[str, np.ndarray]:
        return dict(gradients)


class Function(Contestant):
    """The same as a function, which is given heads, and which promises an accuracy class."""

    projections_supplied = True

    def __init__(self, name: str, kind: type[Attention], accuracy: Literal["", "A0", "A"]) -> None:
        super().__init__(name, kind)
        self.accuracy = accuracy


class Featureful(Contestant):
    """The attention with all that kernels have today, or a mutant of it.

    `positions` says whether it is told where tokens stand.
    """

    scores = ("scaled-dot",)
    modes = (
        Mode("eval", {"train": False, "fused": False}),
        Mode("fused", {"train": False, "fused": True}, weights=False),
        Mode(
            "cached",
            {"train": False, "fused": True, "cached": True},
            weights=False,
            gradients=False,
        ),
    )
    dropout_modes = ()

    def __init__(
        self,
        name: str = "featured",
        kind: type[Attention] = Featured,
        alignment: Causal = "bottom-right",
        *,
        positions: bool = False,
    ) -> None:
        end = alignment == "bottom-right"
        super().__init__(name, type(kind.__name__, (kind,), {"end": end}), alignment)
        every = ("rotary", "alibi", "window", "chunk", "causal")
        self.features = (
            Window(
                "window",
                alignment=alignment,
                dilation="dilation",
                global_tokens="global_tokens",
            ),
            Chunk("chunk", alignment=alignment),
            Spans("spans", alignment=alignment),
            Tree("tree"),
            SoftCap("soft_cap"),
            Sinks("sinks"),
            Alibi("slopes", alignment=alignment),
            RotaryBase("rotary_base", "rotary_size", flag="interleaved", alignment=alignment),
            RotaryConfig(
                kinds=get_args(ScalingKind),
                flag="neighbours",
                alignment=alignment,
                axes="query_axes",
                key_axes="key_axes",
            ),
            HeadNorm("query_norm", "key_norm"),
            Lengths("key_lengths"),
            Lengths("query_lengths", of="queries"),
            SegmentIds("query_segments", "key_segments"),
            *([PositionIds("query_positions", "key_positions", of=every)] if positions else []),
        )

    @classmethod
    def for_problem(cls, name: str, kind: type[Attention], problem: Problem) -> Featureful:
        """Return it with the alignment of a problem, and told positions that it cannot count."""
        unequal = problem.segments is not None and problem.shape.sharing != "self"
        positions = unequal or problem.positions is not None or problem.tree is not None
        return cls(name, kind, problem.causal or "top-left", positions=positions)
