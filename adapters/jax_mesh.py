"""Base classes of JAX adapters that run on several devices, into which JAX divides the CPU.

The number of devices has to be set before JAX starts, that is, before it makes its first array.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from conformance import Call, Function, Layer, Mode, Problem, Shape, Unavailable, Unsupported
from conformance.adapter import NativeAdapter, Natives, Prepared, since

DEVICES = 4
"""The number of devices into which the CPU is divided: as many as the largest mesh needs."""
FLAG = "--xla_force_host_platform_device_count"
AXES = ("batch", "heads")
"""The names of the axes of a layer's mesh."""
STARTED = (
    "import jax, jax.numpy as jnp",
    f'jax.config.update("jax_num_cpu_devices", {DEVICES})',
)
"""The first lines of a layer's example: they import JAX and divide the CPU into devices."""
PARAMETER = "weights."
"""The prefix of the names of parameters among the arrays of a call."""


class OnMesh(NativeAdapter):
    """The base class of adapters whose arrays lie on a mesh of one or more devices."""

    framework = "jax"
    dtypes = ("float32", "bfloat16")

    def prepare(self) -> None:
        """Make JAX divide the CPU into `DEVICES` devices, unless a number has already been set.

        Raises:
            Unavailable: if JAX has fewer CPU devices, for example because it had already started,
                or if JAX is missing or older than 0.6.
        """
        super().prepare()
        if not since("jax", "0.6"):
            raise Unavailable("jax.shard_map and what goes with it came with JAX 0.6")
        import jax

        if FLAG not in os.environ.get("XLA_FLAGS", "") and jax.config.jax_num_cpu_devices == -1:
            with suppress(RuntimeError):  # JAX has started, perhaps with enough.
                jax.config.update("jax_num_cpu_devices", DEVICES)
        if (found := len(jax.devices("cpu"))) < DEVICES:
            raise Unavailable(
                f"JAX has started with {found} of {DEVICES} CPU devices; run this "
                f"implementation alone, or with JAX_NUM_CPU_DEVICES={DEVICES}"
            )

    def check_device(self, device: str) -> None:
        super().check_device(device)
        if device != "cpu":
            raise Unavailable("its devices are those of the CPU")

    def placed(self, ready: Prepared, problem: Problem, call: Call) -> Prepared:
        import jax

        def place(arrays: Natives) -> Natives:
            found = {}
            for name, array in arrays.items():
                lies = self.lies(name, call.mode)
                found[name] = array if lies is None else jax.device_put(array, lies)
            return found

        given = {"cotangent": ready.cotangent}
        if ready.weights_cotangent is not None:
            given["weights_cotangent"] = ready.weights_cotangent
        return replace(
            ready,
            variables=place(ready.variables),
            constants=place(ready.constants),
            **place(given),
        )

    @abstractmethod
    def lies(self, name: str, mode: Mode) -> Any:
        """Return the sharding of the array `name` of a call, or None to leave it where it is."""


def mesh(*sizes: int, axes: tuple[str, ...] = ("devices",)) -> Any:
    """Return a mesh of the first CPU devices, with axes of these sizes and names."""
    import jax

    devices = np.array(jax.devices("cpu")[: np.prod(sizes)])
    return jax.sharding.Mesh(devices.reshape(sizes), axes)


# For functions: meshes with one axis, "devices"


def modes(names: Iterable[str]) -> tuple[Mode, ...]:
    """Return a mode for each name; "heads-3", for example, divides heads over three devices.

    Each shape is compiled anew in each mode, so a mode is run only on the cases of level "core" in
    float32, and on the few cases that every mode must run.
    """
    return tuple(
        Mode(
            name,
            {"divided": divided, "size": int(size)},
            every_case=False,
            core_cases=True,
            about=f"on {size} device{'s' * (size != '1')}",
        )
        for name in names
        for divided, _, size in [name.partition("-")]
    )


class FunctionOnMesh(OnMesh, Function):
    """The base class of adapters for functions, with modes made by `modes`.

    Each device gets whole arrays, which the functions divide themselves.
    """

    def lies(self, name: str, mode: Mode) -> Any:
        from jax.sharding import NamedSharding, PartitionSpec

        return NamedSharding(mesh(mode["size"]), PartitionSpec())


# For layers: meshes with the axes `AXES`


def mesh_modes(options: Mapping[str, Any]) -> tuple[Mode, ...]:
    """Return a mode for each of five meshes.

    Each mode has `options` and, as a further option "mesh", the sizes (batch, heads) of its mesh.
    """
    return tuple(
        Mode(name, {**options, "mesh": sizes}, every_case=every, core_cases=True, about=about)
        for name, sizes, every, about in (
            ("mesh-1", (1, 1), True, "on a mesh of one device"),
            ("mesh-2", (1, 2), True, "heads are divided among two devices"),
            ("mesh-3", (1, 3), False, "heads are divided among three devices"),
            ("mesh-4", (1, 4), False, "heads are divided among four devices"),
            ("mesh-2x2", (2, 2), False, "batch and heads are divided among two devices each"),
        )
    )


class LayerOnMesh(OnMesh, Layer):
    """The base class of adapters for layers, with modes made by `mesh_modes`.

    An adapter inherits from this class first, and then from the adapter for the layer itself.
    By default, query, key, value and the output's cotangent are divided along the batch, and each
    device has the whole of every mask.
    """

    dropout_modes = ()

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        batch, heads = mode["mesh"]
        if shape.heads % heads:
            raise Unsupported(f"{shape.heads} heads cannot be divided among {heads} devices")
        if shape.batch % batch:
            raise Unsupported(f"a batch of {shape.batch} cannot be divided among {batch} devices")
        return super().build(shape, dtype, scale, mode)  # type: ignore[safe-super]

    def lies(self, name: str, mode: Mode) -> Any:
        from jax.sharding import NamedSharding, PartitionSpec

        if (axes := self.divided(name)) is None:
            return None
        return NamedSharding(mesh(*mode["mesh"], axes=AXES), PartitionSpec(*axes))

    def divided(self, name: str) -> tuple[str | None, ...] | None:
        """Return the mesh axes that divide the first axes of the array `name`, or None.

        In the tuple, None stands for an axis that is not divided. Further axes are not divided
        either, so with an empty tuple each device has the whole array. If the result itself is
        None, the array stays where it is. This is the default for parameters, which the layer has
        placed itself.
        """
        if name.startswith(PARAMETER):
            return None
        return ("batch",) if name in ("query", "key", "value", "cotangent") else ()
