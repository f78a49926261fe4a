"""Adapters of layers: implementations with weights of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from conformance.adapter.base import Call, Mode
from conformance.adapter.native import NativeAdapter
from conformance.adapter.parameters import Parameter, ParameterTable
from conformance.definition.problem import Problem, Shape, Weights
from conformance.errors import WrongDeclaration
from conformance.frameworks.base import Natives


class Layer(NativeAdapter):
    """An implementation with its own weights.

    A subclass declares `parameters` (or `parameters_for`, where the table depends on the shape)
    and the mask arguments, and says how to build and how to call.
    """

    parameters: tuple[Parameter, ...] = ()

    def __init__(self) -> None:
        self._built: dict[Hashable, Any] = {}
        self._tables: dict[Shape, ParameterTable] = {}
        self._loaded: tuple[Weights, Shape, Mapping[str, np.ndarray]] | None = None

    def parameters_for(self, shape: Shape) -> tuple[Parameter, ...]:
        """Return the parameter table for this shape."""
        return self.parameters

    @abstractmethod
    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        """Return the layer, in its framework's dtype; raises `Unsupported` for an impossible shape.

        `scale` is None unless the adapter declares `custom_scale` and the problem has one.
        """

    @abstractmethod
    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        """Call the layer: output, or (output, attention weights).

        `masks` holds the declared mask arguments by their own names, ready to be passed on; those
        that the problem does not need are absent.
        """

    def bind(self, layer: Any, parameters: Natives) -> Any:
        """Return the layer with these parameters; itself if they are loaded in place."""
        return layer

    def own_parameters(
        self, layer: Any, parameters: Mapping[str, np.ndarray], dtype: str, device: str
    ) -> Natives:
        """Return the native parameters to differentiate by, by name, with these numbers.

        Overridden where a layer keeps them in variables of its own that its framework's bridge does
        not know; then there is no `bind`.
        """
        return self.bridge.load(layer, parameters, dtype, device)

    def table(self, shape: Shape) -> ParameterTable:
        """Return the parameter table, checked against the shape."""
        if shape not in self._tables:
            self._tables[shape] = ParameterTable(self.parameters_for(shape), shape)
        return self._tables[shape]

    def _bind(self, problem: Problem, call: Call) -> tuple[Natives, Callable[..., Any], Hashable]:
        mode = (call.mode.name, call.mode.dropout, call.mode.draw)
        key = (problem.shape, problem.dtype, problem.scale, mode, call.device)
        if key not in self._built:
            built = self.build(problem.shape, problem.dtype, problem.scale, call.mode)
            self._built[key] = self.bridge.place(built, call.device)
        layer = self._built[key]
        own = type(self)
        handed_on = own.bind is not Layer.bind or own.own_parameters is not Layer.own_parameters
        if not (self.bridge.loads_in_place or handed_on):
            raise WrongDeclaration(
                f"parameters are arguments in {self.bridge.name}: {type(self).__name__} needs "
                "bind(layer, parameters), which returns the layer with these parameters"
            )
        parameters = self._parameters_of(problem)
        natives = self.own_parameters(layer, parameters, problem.dtype, call.device)

        def invoke(own: Natives, query: Any, key: Any, value: Any, masks: Natives) -> Any:
            return self.call(self.bind(layer, own), query, key, value, masks, call.mode)

        return natives, invoke, key

    def _parameters_of(self, problem: Problem) -> Mapping[str, np.ndarray]:
        """Return the native parameters in NumPy; the last ones are kept for the next mode."""
        weights, shape, parameters = self._loaded or (None, None, {})
        if weights is not problem.weights or shape != problem.shape:
            parameters = self.table(problem.shape).load(problem.weights)
            self._loaded = (problem.weights, problem.shape, parameters)
        return parameters

    def _canonical(self, problem: Problem, gradients: Natives) -> dict[str, np.ndarray]:
        return self.table(problem.shape).export(gradients)
