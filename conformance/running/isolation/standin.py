"""In place of an implementation that lives in another process: its declaration, and no code."""

from __future__ import annotations

from conformance.adapter.base import Adapter, Call, Mode
from conformance.cases.case import Case
from conformance.definition.problem import Answer, Problem
from conformance.errors import Unavailable
from conformance.running.isolation.messages import Declared, plan_key


class StandIn(Adapter):
    """What a run needs of an adapter, without the adapter."""

    def __init__(self, declared: Declared) -> None:
        self.declared = declared
        described = declared.implementation
        self.name = described.name
        self.title = described.title
        self.dtypes = tuple(described.dtypes)
        self.modes = tuple(Mode(mode.name, optimised=mode.optimised) for mode in declared.modes)

    @property
    def compiles(self) -> bool:
        return self.declared.compiles

    def modes_of(self, case: Case, dtype: str) -> tuple[Mode, ...]:
        """The modes in which the case is asked, as the adapter's own process planned it."""
        if self.declared.ended is not None:
            return self.modes[:1]
        names = self.declared.plan.get(plan_key(case.id, dtype), [])
        return tuple(mode for mode in self.modes if mode.name in names)

    def versions(self) -> dict[str, str]:
        return self.declared.implementation.versions

    def device_model(self, device: str) -> str:
        if self.declared.implementation.unavailable:
            raise Unavailable(self.declared.implementation.unavailable)
        return self.declared.device_model

    def run(self, problem: Problem, call: Call) -> Answer:
        raise AssertionError("an isolated implementation is asked by its keeper")
