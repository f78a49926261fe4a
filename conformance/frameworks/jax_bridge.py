"""JAX: one compiled program per family, dtype and set of arguments.

Eagerly each new shape costs two seconds, because every operation is compiled on its own; as one
program 0.5 s; and with `QUICK` 0.14 s, at most 4 ulp away from the optimised program. So most
of the suite compiles quickly, and a mode that says `optimised` compares with what users run.
Operations that experiments call eagerly are compiled quickly too, at half the cost; a third if
`XLA_FLAGS` says `--xla_cpu_use_fusion_emitters=false`, which only the environment can set for them.

From JAX 0.4.31 on. What it lacked then is asked for by name, never by version.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conformance.frameworks.base import Evaluated, Framework, Function, Natives, Request
from conformance.frameworks.surroundings import Setting

QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
"""Options for small programs that run a few times each: less optimisation, six times as quick."""

OPTIMISED = {"xla_cpu_use_fusion_emitters": True}
"""XLA's default, for programs that are optimised although `XLA_FLAGS` says otherwise."""

MOST_MAPPED = 40_000
"""Mappings of memory after which compiled programs are dropped: Linux allows a process 65,530, each
program keeps some twenty, and a process that compiles without one left dies."""


class Jax(Framework):
    """JAX arrays in and out."""

    name = "jax"
    packages = ("jax", "jaxlib")
    array_type = jax.Array
    compiles = True

    def __init__(self) -> None:
        self._programs: dict[Hashable, Callable[..., Any]] = {}
        self._sessions = 0

    def array(self, values: np.ndarray, dtype: str, device: str) -> Any:
        if values.dtype == np.float64:
            values = values.astype(jnp.dtype(dtype))
        return jax.device_put(values, jax.devices(device)[0])

    def numpy(self, native: Any) -> np.ndarray:
        values = np.asarray(native)
        return values if values.dtype == np.bool_ else values.astype(np.float64)

    @contextmanager
    def session(self, dtype: str, device: str) -> Iterator[None]:
        self._sessions += 1
        # Counting takes as long as a small call does.
        if self._sessions % 32 == 0 and _mapped() > MOST_MAPPED:
            self._programs.clear()
            jax.clear_caches()
        # 64 bits only for float64: elsewhere the library runs as its users run it.
        with (
            _enable_x64(dtype == "float64"),
            jax.default_device(jax.devices(device)[0]),
            _optimising(device != "cpu"),
        ):
            yield

    def call(self, request: Request) -> Evaluated:
        return self._run(request, _plain(request.function))

    def differentiate(self, request: Request) -> Evaluated:
        return self._run(request, _vjp(request.function))

    def _run(self, request: Request, run: Callable[..., tuple[Any, Any, Natives]]) -> Evaluated:
        if request.compiled:
            key = (request.program, request.gradients, request.optimised)
            if key not in self._programs:
                options = self._options(request.optimised)
                self._programs[key] = jax.jit(
                    run, **({"compiler_options": options} if options else {})
                )
            run = self._programs[key]
        with _optimising(request.optimised or not _on_cpu()):
            return Evaluated(*run(request.variables, request.constants, request.cotangent))

    def _options(self, optimised: bool) -> dict[str, Any]:
        if not _on_cpu():
            return {}
        known = self._known_options()
        return {
            name: value
            for name, value in (OPTIMISED if optimised else QUICK).items()
            if name in known
        }

    @lru_cache(maxsize=1)  # noqa: B019 - the bridge lives as long as the process
    def _known_options(self) -> frozenset[str]:
        """Return the names in `QUICK` and `OPTIMISED` that this version of XLA knows.

        Options come and go with XLA's versions; an unknown one is refused when compiling. Before
        JAX 0.4.36 there are none for `jit`.
        """
        known = set()
        for name, value in (QUICK | OPTIMISED).items():
            with suppress(Exception):
                jax.jit(lambda x: x, compiler_options={name: value})(jnp.zeros(()))
                known.add(name)
        return frozenset(known)

    def settings(self) -> tuple[Setting, ...]:
        return tuple(
            Setting(
                f"jax.config.{name}",
                partial(getattr, jax.config, name),
                partial(jax.config.update, name),
            )
            for name in (
                "jax_enable_x64",
                "jax_default_matmul_precision",
                "jax_default_prng_impl",
                "jax_numpy_dtype_promotion",
                "jax_debug_nans",
                "jax_disable_jit",
            )
        )

    def einsum(self, axes: str, *operands: Any) -> Any:
        return jnp.einsum(axes, *operands)

    def devices(self) -> dict[str, str]:
        models = {"cpu": "jax on the CPU"}
        with suppress(RuntimeError):
            models["gpu"] = jax.devices("gpu")[0].device_kind
        return models


def _on_cpu() -> bool:
    """Return whether arrays without a device of their own are on the CPU, in a session."""
    device = jax.config.jax_default_device
    return device is None or device.platform == "cpu"


@contextmanager
def _optimising(on: bool) -> Iterator[None]:
    """Whether XLA optimises what it compiles, also for operations that are called eagerly."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, not on)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _mapped() -> int:
    """Return the number of memory mappings of this process; 0 where it is unknown."""
    with suppress(OSError), open("/proc/self/maps", "rb") as lines:
        return sum(1 for _ in lines)
    return 0


def _enable_x64(on: bool) -> AbstractContextManager[Any]:
    """Return a context that turns 64-bit types on or off; JAX before 0.8 has it as experimental."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(on)
    from jax.experimental import enable_x64

    return enable_x64(on)


def _vjp(function: Function) -> Callable[..., tuple[Any, Any, Natives]]:
    def run(variables: Natives, constants: Natives, cotangent: Any) -> tuple[Any, Any, Natives]:
        output, pull, weights = jax.vjp(
            lambda given: function(given, constants), variables, has_aux=True
        )
        if output.shape != cotangent.shape:
            return output, weights, {}
        (gradients,) = pull(cotangent.astype(output.dtype))
        return output, weights, gradients

    return run


def _plain(function: Function) -> Callable[..., tuple[Any, Any, Natives]]:
    def run(variables: Natives, constants: Natives, cotangent: Any) -> tuple[Any, Any, Natives]:
        return (*function(variables, constants), {})

    return run
