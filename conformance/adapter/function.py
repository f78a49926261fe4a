"""Adapters of functions: attention on heads that are already projected.

The suite supplies the projections, in the function's own framework and dtype, so that kernels and
layers stand in one table.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, Literal

import einops
import numpy as np

from conformance.adapter import layouts
from conformance.adapter.arguments import CausalFlag, MaskArgument
from conformance.adapter.base import Call, FullyMasked, Mode
from conformance.adapter.native import NativeAdapter, Prepared
from conformance.definition.dtypes import DTYPES
from conformance.definition.problem import Answer, Problem, Shape, check_shape
from conformance.errors import Unsupported, WrongDeclaration
from conformance.frameworks.base import Evaluated, Natives, WrongAnswer

Layout = Literal["batch heads length head", "batch length heads head"]
_INPUTS = ("query", "key", "value")
_EINSUM = {"batch heads length head": "bhqd", "batch length heads head": "bqhd"}


class Function(NativeAdapter):
    """An attention on projected heads: (query, key, value, masks) to context or (context, weights).

    A subclass overrides `attend`; a plain function becomes an adapter through
    `attention_function`.

    Attributes:
        layout: of query, key, value and the result.
        fully_masked_row: of what the function returns, which the suite then projects.
        grouped: whether it takes fewer key/value heads than query heads.
        bias_modes: names of the modes in which the function itself adds the biases of query, key
            and value; they come with the options, as `query_bias` and so on, `[heads head]`.
    """

    layout: Layout = "batch heads length head"
    grouped: bool = False
    projections_supplied = True
    bias_modes: tuple[str, ...] = ()

    def attend(
        self,
        query: Any,
        key: Any,
        value: Any,
        masks: dict[str, Any],
        *,
        mode: Mode,
        **options: Any,
    ) -> Any:
        """Call the function: context, or (context, attention weights).

        `masks` holds the declared mask arguments by their own names. An override may do without
        `mode`: it is passed where there is a parameter of this name without a default. `options`
        holds `scale` where the problem departs from the default, and `score`, the weight
        `[heads head]`, for the additive score.
        """
        raise NotImplementedError

    def attend_for(self, problem: Problem, call: Call) -> tuple[Callable[..., Any], Hashable]:
        """Return `attend` for this problem, and what it depends on but shape, dtype, scale, mode.

        Overridden to prepare what cannot be made inside a compiled program.
        """
        if takes_mode(self.attend):
            return partial(self.attend, mode=call.mode), None
        return self.attend, None

    def masked_row(self, mode: Mode) -> FullyMasked | None:
        row = super().masked_row(mode)
        return "output bias" if row == "zeros" else row

    def check_shape(self, shape: Shape) -> None:
        if shape.group > 1 and not self.grouped:
            raise Unsupported("no fewer key/value heads than query heads")

    def _bind(self, problem: Problem, call: Call) -> tuple[Natives, Callable[..., Any], Hashable]:
        if call.unbatched:
            raise Unsupported("the suite supplies its inputs, always with a batch")
        bridge, axes, scale = self.bridge, _EINSUM[self.layout], problem.scale
        attend, key = self.attend_for(problem, call)
        adds_biases = call.mode.name in self.bias_modes
        natives = {
            name: bridge.array(values, problem.dtype, call.device)
            for name, values in problem.weights.named().items()
            if name == "score" or not call.projected
        }

        def project(own: Natives, name: str, values: Any) -> Any:
            if call.projected:
                return values
            heads = bridge.einsum(f"bqe,ehd->{axes}", values, own[name])
            bias = own.get(f"{name}_bias")
            if bias is not None and not adds_biases:
                heads = heads + (bias if axes == "bqhd" else bias[:, None, :])
            return self._lying(heads, call)

        def invoke(own: Natives, query: Any, key: Any, value: Any, masks: Natives) -> Any:
            projected = (project(own, "query", query), project(own, "key", key))
            options = {} if scale is None else {"scale": scale}
            given = (*(f"{name}_bias" for name in _INPUTS if adds_biases), "score")
            options |= {name: own[name] for name in given if name in own}
            result = attend(*projected, project(own, "value", value), masks, **options)
            context, weights = result if isinstance(result, tuple) else (result, None)
            self._check_context(context, problem)
            if call.projected:
                return context, weights
            # The projection takes the inputs' dtype only; the output is given back the one that the
            # function returned, so that another one shows.
            returned = bridge.dtype(context)
            another = returned in DTYPES and returned != problem.dtype
            context = bridge.cast(context, problem.dtype) if another else context
            output = bridge.einsum(f"{axes},hde->bqe", context, own["output"])
            bias = own.get("output_bias")
            output = output if bias is None else output + bias
            return (bridge.cast(output, returned) if another else output), weights

        mode = (call.mode.name, call.mode.dropout, call.mode.draw)
        program = (problem.shape, problem.dtype, scale, mode, call.device, call.projected, key)
        return natives, invoke, program

    def _input(self, name: str, problem: Problem, call: Call) -> Any:
        if not call.projected:
            return super()._input(name, problem, call)
        heads = problem.shape.kv_heads if name in ("key", "value") else problem.shape.heads
        pattern = f"batch length (heads head) -> {self.layout}"
        values = einops.rearrange(getattr(problem, name), pattern, heads=heads)
        return self.bridge.array(values, problem.dtype, call.device)

    def _answer(self, problem: Problem, ready: Prepared, result: Evaluated) -> Answer:
        answer = super()._answer(problem, ready, result)
        if answer.output.ndim == 3:
            return answer
        gradients = {
            name: self._merged(array) if name in _INPUTS else array
            for name, array in answer.gradients.items()
        }
        return dataclasses.replace(answer, output=self._merged(answer.output), gradients=gradients)

    def _merged(self, heads: np.ndarray) -> np.ndarray:
        return einops.rearrange(heads, f"{self.layout} -> batch length (heads head)")

    def _check_context(self, context: Any, problem: Problem) -> None:
        # Here, because an einsum takes lists, and may broadcast an axis of size 1.
        if not self.bridge.is_array(context):
            raise WrongAnswer(
                f"returned {type(context).__name__}, not an array of {self.bridge.name}"
            )
        shape = problem.shape
        sizes = {
            "batch": shape.batch,
            "heads": shape.heads,
            "length": shape.query_length,
            "head": shape.value_head_size,
        }
        wanted = layouts.shape(self.layout, sizes)
        check_shape(f"what it returned, [{self.layout}],", tuple(context.shape), wanted)

    def _canonical(self, problem: Problem, gradients: Natives) -> dict[str, np.ndarray]:
        return gradients


class _Decorated(Function):
    """A plain function as an adapter."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._takes_mode = takes_mode(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, which decorating leaves usable."""
        return self._function(*args, **kwargs)

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode, **options: Any
    ) -> Any:
        options |= {"mode": mode} if self._takes_mode else {}
        return self._function(query, key, value, **masks, **options)


def takes_mode(function: Callable[..., Any]) -> bool:
    """Return whether a function has a parameter `mode` without a default."""
    parameter = inspect.signature(function).parameters.get("mode")
    return parameter is not None and parameter.default is parameter.empty


def attention_function(
    framework: str,
    *masks: MaskArgument | Iterable[MaskArgument],
    **declaration: Any,
) -> Callable[[Callable[..., Any]], _Decorated]:
    """Make an adapter of `function(query, key, value, **mask arguments)`.

    Args:
        framework: "torch", "jax", "tensorflow", "mlx", "paddle", "tinygrad" or "numpy".
        masks: its mask arguments, one by one or together.
        declaration: further attributes of `Function` and `Adapter`, such as `layout`, `grouped`,
            `causal_flag`, `dtypes`, `returns_weights`. A parameter `scale` is found by itself, and
            so is one `mode` without a default, to which the `Mode` of the call is passed.

    Returns:
        A decorator. Query, key and value arrive as `layout` says, by default
        `[batch heads length head]`, and so must the result.

    Raises:
        WrongDeclaration: for an attribute that adapters do not have.
    """
    groups = ([given] if isinstance(given, MaskArgument) else given for given in masks)
    arguments = tuple(itertools.chain.from_iterable(groups))
    unknown = [name for name in declaration if not hasattr(Function, name) or name.startswith("_")]
    if unknown:
        raise WrongDeclaration(f"adapters have no attribute {', '.join(map(repr, unknown))}")
    flag = declaration.get("causal_flag")
    if isinstance(flag, str):
        declaration["causal_flag"] = CausalFlag(flag)

    def decorate(function: Callable[..., Any]) -> _Decorated:
        members = {
            "framework": framework,
            "mask_arguments": arguments,
            "title": getattr(function, "__name__", "function"),
            "custom_scale": "scale" in inspect.signature(function).parameters,
            "__doc__": function.__doc__,
            **declaration,
        }
        return type(_Decorated.__name__, (_Decorated,), members)(function)

    return decorate
