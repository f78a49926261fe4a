"""The JAX bridge compiles one program per shape, dtype, mode and set of arguments.

If a function is called eagerly, each new shape takes two seconds, because every operation is
compiled separately. As one program, a shape takes 0.5 s, and 0.14 s with the options `QUICK`, with
which results deviate by at most 4 ulp. Most of the suite therefore uses these options, and modes
with `optimised` check what users run. Operations that are called eagerly also compile with fewer
optimisations, at half the cost.

JAX 0.4.31 or later is required. Newer features are detected by trying them out, not by the version.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conformance.frameworks.base import (
    DeviceState,
    Evaluated,
    Framework,
    Function,
    Memory,
    Natives,
    Request,
    Setting,
    cudnn_version,
    poisoned_sizes,
)

_IN_ONE_PIECE = {"xla_cpu_parallel_codegen_split_count": 1}
"""A small program compiles in half the time if XLA does not divide it among threads."""

QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    **_IN_ONE_PIECE,
}
"""Compiler options for programs that run only a few times: they compile several times as fast."""

OPTIMISED = {"xla_cpu_use_fusion_emitters": True, **_IN_ONE_PIECE}
"""Compiler options with which XLA emits its default code even if `XLA_FLAGS` changes that."""

MOST_MAPPED = 40_000
"""The number of memory mappings above which compiled programs, each with about twenty, are dropped.
Linux allows a process 65,530, and a process that compiles with none left dies."""

_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
    "jax_debug_nans",
    "jax_disable_jit",
)


class Jax(Framework):
    """The bridge to JAX."""

    name = "jax"
    packages = ("jax", "jaxlib")
    array_type = jax.Array
    compiles = True
    differentiates_weights = True
    settings = tuple(
        Setting(
            f"jax.config.{name}",
            partial(getattr, jax.config, name),
            partial(jax.config.update, name),
            recorded=name == "jax_default_matmul_precision",
        )
        for name in _SETTINGS
    )

    def __init__(self) -> None:
        self._programs: dict[Hashable, Callable[..., Any]] = {}
        self._sessions = 0
        self._state = DeviceState()

    def array(self, values: np.ndarray, dtype: str, device: str) -> Any:
        if values.dtype == np.float64:
            values = values.astype(jnp.dtype(dtype))
        return jax.device_put(values, jax.devices(device)[0])

    def device_of(self, native: Any) -> str:
        if isinstance(native, jax.core.Tracer):
            return ""
        kinds = {_kind_of(device) for device in native.devices()}
        return kinds.pop() if len(kinds) == 1 else ""

    def numpy(self, native: Any) -> np.ndarray:
        values = np.asarray(native)
        return values if values.dtype == np.bool_ else values.astype(np.float64)

    @contextmanager
    def session(self, dtype: str, device: str) -> Iterator[None]:
        self._sessions += 1
        # Counting the mappings takes as long as a small call, so it is done rarely.
        if self._sessions % 32 == 0 and _mapped() > MOST_MAPPED:
            self._programs.clear()
            jax.clear_caches()
        # Enable 64-bit types only for float64, because most users run without them.
        with (
            _enable_x64(dtype == "float64"),
            jax.default_device(jax.devices(device)[0]),
            _optimising(device != "cpu"),
        ):
            if device == "cpu":
                yield
                return
            with self._state.watching(partial(_try, jax.devices(device)[0])):
                yield

    def poison(self, arrays: Iterable[Any]) -> None:
        memory = None if _on_cpu() else self.memory("gpu")
        if memory is not None:
            sizes = {array.nbytes for array in arrays}
            # They are freed when all of them are made. In every dtype of floats, 255s are NaN.
            _ = [
                jax.device_put(np.full(size, 255, np.uint8), _gpus()[0])
                for size in poisoned_sizes(sizes, memory.free)
            ]

    def wait(self, arrays: Iterable[Any]) -> None:
        jax.block_until_ready([*arrays])

    def call(self, request: Request) -> Evaluated:
        return self._run(request, _plain(request.function), request.cotangent)

    def differentiate(self, request: Request) -> Evaluated:
        if request.weights_cotangent is not None:
            return self._run(request, _vjp_of_both(request.function), request.losses(None, None)[1])
        return self._run(request, _vjp(request.function), request.cotangent)

    def _run(
        self, request: Request, run: Callable[..., tuple[Any, Any, Natives]], cotangents: Any
    ) -> Evaluated:
        if request.compiled:
            of_both = request.weights_cotangent is not None
            key = (request.program, request.gradients, request.optimised, of_both)
            if key not in self._programs:
                self._programs[key] = jax.jit(run, **_options(request.optimised))
            run = self._programs[key]
        with _optimising(request.optimised or not _on_cpu()):
            return Evaluated(*run(request.variables, request.constants, cotangents))

    def einsum(self, axes: str, *operands: Any) -> Any:
        return jnp.einsum(axes, *operands)

    def devices(self) -> dict[str, str]:
        models = {"cpu": "jax on the CPU"}
        if _gpus():
            models["gpu"] = _gpus()[0].device_kind
        return models

    def toolkit(self) -> dict[str, str]:
        # There is no public name for this.
        from jax._src.lib import cuda_versions

        cuda = cuda_versions.cuda_runtime_get_version()
        return {
            "CUDA": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "cuDNN": cudnn_version(cuda_versions.cudnn_get_version()),
        }

    def memory(self, device: str, *, anew: bool = False) -> Memory | None:
        found = None if device == "cpu" or not _gpus() else _gpus()[0].memory_stats()
        if not found or "bytes_limit" not in found:
            return None
        used = found["bytes_in_use"]
        return Memory(found["bytes_limit"] - used, used, found["peak_bytes_in_use"])


def _options(optimised: bool) -> dict[str, Any]:
    """Return the keyword arguments of `jax.jit` that choose the compiler options.

    Return {} if arrays are not on the CPU, or if this version of JAX knows none of the options.
    """
    if not _on_cpu():
        return {}
    wanted, known = OPTIMISED if optimised else QUICK, _known_options()
    chosen = {name: value for name, value in wanted.items() if name in known}
    return {"compiler_options": chosen} if chosen else {}


@cache
def _known_options() -> frozenset[str]:
    """Return the names of the options in `QUICK` and `OPTIMISED` that this XLA version knows.

    Compiling fails with an unknown option. Before JAX 0.4.36, `jit` accepts no options.
    """
    known = set()
    for name, value in (QUICK | OPTIMISED).items():
        with suppress(Exception):
            jax.jit(lambda x: x, compiler_options={name: value})(jnp.zeros(()))
            known.add(name)
    return frozenset(known)


def _on_cpu() -> bool:
    """Return whether arrays are placed on the CPU by default in the current session."""
    device = jax.config.jax_default_device
    return _kind_of(jax.devices()[0] if device is None else device) == "cpu"


def _kind_of(device: Any) -> str:
    """Return the kind of a device, "cpu" or "gpu"."""
    return "gpu" if device in _gpus() else "cpu"


def _try(device: Any) -> None:
    """Use a device; raise an exception if that is no longer possible."""
    jax.block_until_ready(jax.device_put(np.zeros(1, np.float32), device))


@cache
def _gpus() -> tuple[Any, ...]:
    """Return the GPUs that JAX can use; to be told that there are none takes a third of a ms."""
    with suppress(RuntimeError):
        return tuple(jax.devices("gpu"))
    return ()


@contextmanager
def _optimising(on: bool) -> Iterator[None]:
    """Turn XLA's optimisations on or off in the body, also for operations called eagerly."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, not on)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _mapped() -> int:
    """Return the number of memory mappings of this process, or 0 if it is unknown."""
    with suppress(OSError), open("/proc/self/maps", "rb") as lines:
        return sum(1 for _ in lines)
    return 0


def _enable_x64(on: bool) -> AbstractContextManager[Any]:
    """Return a context manager that turns 64-bit types on or off, in any version of JAX."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(on)
    from jax.experimental import enable_x64

    return enable_x64(on)


def _vjp(function: Function) -> Callable[..., tuple[Any, Any, Natives]]:
    def run(variables: Natives, constants: Natives, cotangent: Any) -> tuple[Any, Any, Natives]:
        output, pull, weights = jax.vjp(
            lambda given: function(given, constants), variables, has_aux=True
        )
        if not isinstance(output, jax.Array) or output.shape != cotangent.shape:
            return output, weights, {}
        (gradients,) = pull(cotangent.astype(output.dtype))
        return output, weights, gradients

    return run


def _vjp_of_both(function: Function) -> Callable[..., tuple[Any, Any, Natives]]:
    """Return a function that computes output, weights, and the gradients of a loss on both.

    It takes the variables, the constants, and the cotangents of output and weights.
    """

    def run(variables: Natives, constants: Natives, cotangents: Any) -> tuple[Any, Any, Natives]:
        found, pull = jax.vjp(lambda given: function(given, constants), variables)
        cast = tuple(one.astype(to.dtype) for one, to in zip(cotangents, found, strict=True))
        (gradients,) = pull(cast)
        return (*found, gradients)

    return run


def _plain(function: Function) -> Callable[..., tuple[Any, Any, Natives]]:
    def run(variables: Natives, constants: Natives, cotangent: Any) -> tuple[Any, Any, Natives]:
        return (*function(variables, constants), {})

    return run
