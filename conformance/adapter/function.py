"""Adapters for functions that compute attention on heads that have already been projected.

The suite supplies the projections, in the function's framework and dtype, so that kernels can be
compared with layers.
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
from conformance.adapter.arguments import NO_MASK, CausalFlag, MaskArgument, Spelling
from conformance.adapter.base import Call, FullyMasked, Mode, SideEffects
from conformance.adapter.handing import Moved, turns_of
from conformance.adapter.native import (
    NativeAdapter,
    Prepared,
    check_device_of,
    output_and_weights,
)
from conformance.definition.dtypes import DTYPES
from conformance.definition.problem import Answer, Problem, Shape, check_shape
from conformance.errors import Unsupported, WrongAnswer, WrongDeclaration
from conformance.frameworks.base import Evaluated, Natives

Layout = Literal["batch heads length head", "batch length heads head"]
_INPUTS = ("query", "key", "value")
_EINSUM = {"batch heads length head": "bhqd", "batch length heads head": "bqhd"}


class Function(NativeAdapter):
    """The base class of adapters for attention functions that take projected heads.

    A subclass overrides `attend`; a plain function becomes an adapter through
    `attention_function`.

    Attributes:
        layout: the layout of query, key, value and the result.
        native_layout: the layout that the library takes, if `attend` rearranges the arrays; "" if
            it does not. It is only shown.
        fully_masked_row: the result for a fully masked query, before the output projection.
        grouped: whether the function accepts fewer key/value heads than query heads.
        bias_modes: names of the modes in which the function itself adds the biases of query, key
            and value. If the layer has biases, they are passed as the options `query_bias`
            `[heads head]`, `key_bias` `[kv_heads head]` and `value_bias` `[kv_heads value_head]`.
    """

    layout: Layout = "batch heads length head"
    native_layout: str = ""
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
        """Return the context (the attended values per head), or (context, attention weights).

        `masks` holds the declared arguments for masks and features that the problem needs, by name.
        An override may omit `mode`, which is passed only if it is a parameter without a default.
        `options` holds `scale` if the problem sets one, the weight `score` `[heads head]` for the
        additive score, and the layer's biases in the modes that `bias_modes` names.
        """
        raise NotImplementedError

    def attend_for(self, problem: Problem, call: Call) -> tuple[Callable[..., Any], Hashable]:
        """Return the function to call for this problem, and a key for the objects it closes over.

        Calls with equal keys may share a compiled program. By default, the function is `attend`,
        and the key is None. Override this method to prepare objects that cannot be created inside a
        compiled program.
        """
        if _takes_mode(self.attend):
            return partial(self.attend, mode=call.mode), None
        return self.attend, None

    def side_effects(self, problem: Problem, call: Call) -> SideEffects:
        """Also look for changes of the heads, pages and caches that the function is given.

        Memory of pages and caches that no token uses, which holds NaN, may be written to. Nothing
        is looked at in modes that the bridge compiles.
        """
        if call.mode.optimised and self.bridge.compiles_modes:
            return super().side_effects(problem, call)
        handed: list[tuple[str, Any, np.ndarray]] = []
        effects = super().side_effects(problem, dataclasses.replace(call, handed=handed))
        changed = list(effects.changed)
        for name, array, before in handed:
            now = self.bridge.numpy(array)
            if not (np.isnan(before) | (now == before)).all():
                changed.append(f"{name}, as the function gets it: its numbers changed")
        return dataclasses.replace(effects, changed=tuple(dict.fromkeys(changed)))

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
        spelling = call.spelling or NO_MASK
        moved = spelling.handing
        if moved is not None and call.given is not None:
            raise Unsupported("its inputs are moved, so no others can be given")
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
            return self._lying(heads, call, name)

        def invoke(own: Natives, query: Any, key: Any, value: Any, masks: Natives) -> Any:
            inputs = {"query": query, "key": key, "value": value}
            heads = {name: project(own, name, values) for name, values in inputs.items()}
            more: Natives = {}
            if moved is not None:
                cached = heads["key"]
                if moved.prepared:
                    cached = self._cached(problem, cached, masks, spelling, call.device)
                handed = moved.hand(bridge, self.layout, heads, cached, call.device)
                heads, more = (self._handed_lying(arrays, call) for arrays in handed)
                masks = masks | more
            options = {} if scale is None else {"scale": scale}
            given = (*(f"{name}_bias" for name in _INPUTS if adds_biases), "score")
            options |= {name: own[name] for name in given if name in own}
            if call.handed is not None and not (call.projected and moved is None):
                call.handed.extend(
                    (name, array, bridge.numpy(array).copy())
                    for name, array in (heads | more).items()
                    if not (moved is not None and moved.ring and name in moved.names)
                )
            result = attend(*heads.values(), masks, **options)
            context, weights = output_and_weights(result)
            check_device_of(bridge, context, heads["query"], "returned its result")
            if call.given is None:
                self._check_context(context, problem, moved)
            if moved is not None and moved.back is not None:
                # The weights of packed queries are not those of a batch.
                context, weights = moved.returned(bridge, self.layout, context, call.device), None
            if call.projected:
                return context, weights
            # The projection needs the inputs' dtype. If the function returned another dtype, the
            # output is cast back to it, so that the deviation is visible.
            returned = bridge.dtype(context)
            another = returned in DTYPES and returned != problem.dtype
            context = bridge.cast(context, problem.dtype) if another else context
            output = bridge.einsum(f"{axes},hde->bqe", context, own["output"])
            bias = own.get("output_bias")
            output = output if bias is None else output + bias
            return (bridge.cast(output, returned) if another else output), weights

        mode = (call.mode.name, call.mode.dropout, call.mode.draw)
        program = (problem.shape, problem.dtype, scale, mode, call.device, call.projected, key)
        if moved is None:
            return natives, invoke, program
        epsilon = None if problem.norm is None else problem.norm.epsilon
        return (
            natives,
            invoke,
            (*program, moved.program, problem.rotary, problem.rotary_scaling, epsilon),
        )

    def _handed_lying(self, arrays: Natives, call: Call) -> Natives:
        """Return arrays with tokens that were moved, with the strides of `call`.

        Moving copies them, so that they are contiguous whatever their strides were before.
        """
        if not call.strided:
            return arrays
        return {name: self._lying(array, call, name) for name, array in arrays.items()}

    def _cached(
        self, problem: Problem, keys: Any, masks: Natives, spelling: Spelling, device: str
    ) -> Any:
        """Return the keys as earlier calls would have left them in a cache.

        They are normed if the problem has a norm, and rotated if it has a rotary embedding.
        """
        if problem.norm is None and problem.rotary is None:
            return keys
        bridge, axes = self.bridge, _EINSUM[self.layout]
        dtype = bridge.dtype(keys)
        wide = "float64" if dtype == "float64" else "float32"
        heads = bridge.cast(keys, wide)
        # Bridges to runtimes only have matrix products, so NumPy prepares the cached keys.
        einsum: Any = np.einsum if isinstance(heads, np.ndarray) else bridge.einsum

        def native(values: np.ndarray) -> Any:
            return bridge.array(values, wide, device)

        if problem.norm is not None:
            gain = masks[spelling.variables["norm.key"].argument]
            mean = native(np.full(problem.shape.head_size, 1 / problem.shape.head_size))
            squares = einsum(f"{axes},d->{axes[:-1]}", heads * heads, mean)
            root = (squares + problem.norm.epsilon) ** -0.5
            heads = einsum(f"{axes},d->{axes}", heads * root[..., None], bridge.cast(gain, wide))
        if problem.rotary is not None:
            turns = native(turns_of(problem))
            turned = axes.replace("d", "e")
            heads = einsum(f"{axes},bqde->{turned}", heads, turns)
        return bridge.cast(heads, dtype)

    def _input(self, name: str, problem: Problem, call: Call) -> Any:
        if not call.projected or (call.given and name in call.given):
            return super()._input(name, problem, call)
        heads = problem.shape.kv_heads if name in ("key", "value") else problem.shape.heads
        pattern = f"batch length (heads head) -> {self.layout}"
        values = einops.rearrange(getattr(problem, name), pattern, heads=heads)
        return self._lying(self.bridge.array(values, problem.dtype, call.device), call, name)

    def _answer(self, problem: Problem, ready: Prepared, result: Evaluated) -> Answer:
        answer = super()._answer(problem, ready, result)
        if answer.output.ndim != 4:
            return answer
        gradients = {
            name: self._merged(array) if name in _INPUTS and array.ndim == 4 else array
            for name, array in answer.gradients.items()
        }
        return dataclasses.replace(answer, output=self._merged(answer.output), gradients=gradients)

    def _merged(self, heads: np.ndarray) -> np.ndarray:
        return einops.rearrange(heads, f"{self.layout} -> batch length (heads head)")

    def _check_context(self, context: Any, problem: Problem, moved: Moved | None) -> None:
        # The output projection would not fail: einsum accepts lists and broadcasts size 1.
        if not self.bridge.is_array(context):
            raise WrongAnswer(
                f"returned {type(context).__name__}, not an array of {self.bridge.name}"
            )
        batch, heads, queries, _ = problem.shape.logits
        sizes = {"batch": batch, "heads": heads, "length": queries}
        sizes |= {"head": problem.shape.value_head_size}
        layout: str = self.layout
        if moved is not None and moved.query is not None:
            layout, sizes = "token heads head", sizes | {"token": len(moved.query)}
        wanted = layouts.shape(layout, sizes)
        check_shape(f"what it returned, [{layout}],", tuple(context.shape), wanted)

    def _canonical(self, problem: Problem, gradients: Natives) -> dict[str, np.ndarray]:
        return gradients


class _Decorated(Function):
    """The adapter that `attention_function` makes from a plain function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._takes_mode = _takes_mode(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the decorated function itself."""
        return self._function(*args, **kwargs)

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode, **options: Any
    ) -> Any:
        options |= {"mode": mode} if self._takes_mode else {}
        return self._function(query, key, value, **masks, **options)


def _takes_mode(function: Callable[..., Any]) -> bool:
    """Return whether a function has a parameter `mode` without a default."""
    parameter = inspect.signature(function).parameters.get("mode")
    return parameter is not None and parameter.default is parameter.empty


def attention_function(
    framework: str,
    *masks: MaskArgument | Iterable[MaskArgument],
    **declaration: Any,
) -> Callable[[Callable[..., Any]], _Decorated]:
    """Return a decorator that turns `function(query, key, value, **masks)` into an adapter.

    Args:
        framework: the name of a bridge, as in `Adapter.framework`, such as "torch" or "numpy".
        masks: the function's mask arguments, one by one or in iterables.
        declaration: further attributes of `Function` and `Adapter`, such as `layout`, `grouped`,
            `causal_flag`, `dtypes`, `returns_weights`. If `causal_flag` is a string, it names a
            flag that the function rejects if lengths differ. The function's parameters `scale` and
            `mode` need no declaration; `mode` must not have a default, and receives the `Mode` of
            the call.

    Returns:
        A decorator. The decorated function receives query, key and value in `layout`, by default
        `[batch heads length head]`, and the masks by name. It must return the context in the same
        layout, or (context, attention weights). The decorator raises `UnknownName` if there is no
        such framework.

    Raises:
        WrongDeclaration: if `declaration` names an attribute that adapters do not have.
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
