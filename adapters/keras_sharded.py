"""keras.layers.MultiHeadAttention on JAX under keras.distribution, on several devices.

Easy to miss in a port: a `LayoutMap` looks up the path of each variable. If none of its patterns
matches the path as a whole, the variable is not divided, and every device silently gets the whole
of it. Query, key and value have kernels `[embed heads head]`, and their biases have heads as well;
the kernel of the output is `[heads head embed]`. A distribution applies to the whole process; the
adapter sets it for the duration of each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from conformance import Call, Example, Mode, Problem, Shape
from conformance.adapter import Natives
from conformance.adapters.jax_mesh import AXES, STARTED, LayerOnMesh, mesh_modes
from conformance.adapters.keras_layers import JaxMultiHeadAttention

LAYOUTS: dict[str, tuple[str | None, ...]] = {
    ".*/(query|key|value)/kernel": (None, "heads", None),
    ".*/(query|key|value)/bias": ("heads", None),
    ".*/attention_output/kernel": ("heads", None, None),
}
"""For each pattern of variable paths, the mesh axis that divides each axis of a variable.

None means that the variable's axis is not divided.
"""

SCORES = {"return_attention_scores": True, "training": False}
MODES = (
    *mesh_modes(SCORES),
    Mode(
        "no-scores",
        {"return_attention_scores": False, "training": False, "mesh": (1, 2)},
        weights=False,
        every_case=False,
        core_cases=True,
        about="as mesh-2, without scores: through jax.nn.dot_product_attention",
    ),
    Mode(
        "data-2",
        {**SCORES, "mesh": (2, 1), "parallel": "data"},
        every_case=False,
        core_cases=True,
        about="under DataParallel: the batch is divided among two devices",
    ),
)


class KerasSharded(LayerOnMesh, JaxMultiHeadAttention):
    """The adapter for Keras MultiHeadAttention under ModelParallel; in one mode, DataParallel."""

    title = "keras.layers.MultiHeadAttention (JAX) on a mesh"
    modes = MODES
    fully_masked_row = {  # noqa: RUF012
        mode.name: "output bias" if mode["return_attention_scores"] else "mean of values"
        for mode in MODES
    }

    @contextmanager
    def around_call(self, problem: Problem, call: Call) -> Iterator[None]:
        with super().around_call(problem, call), distribution(call.mode).scope():
            yield

    def own_parameters(
        self, layer: Any, parameters: Mapping[str, np.ndarray], dtype: str, device: str
    ) -> Natives:
        for name, array in super().own_parameters(layer, parameters, dtype, device).items():
            layer.variables[name].assign(array)
        return dict(layer.named_parameters())

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        return super().call(layer, query, key, value, masks, plain(mode))

    def example_for(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Example:
        example = super().example_for(shape, dtype, scale, plain(mode))
        sizes = mode["mesh"]
        return replace(
            example,
            imports=(
                *STARTED,
                *example.imports,
                "from keras import distribution",
            ),
            build=(
                f"devices = distribution.list_devices()[:{sizes[0] * sizes[1]}]",
                *(
                    ("spread = distribution.DataParallel(devices=devices)",)
                    if mode.options.get("parallel")
                    else (
                        f"mesh = distribution.DeviceMesh({sizes}, {AXES}, devices)",
                        "layouts = distribution.LayoutMap(mesh)",
                        *(f'layouts["{path}"] = {axes}' for path, axes in LAYOUTS.items()),
                        "spread = distribution.ModelParallel(layout_map=layouts)",
                    )
                ),
                "distribution.set_distribution(spread)",
                *example.build,
            ),
            load=(
                "put = distribution.distribute_tensor",
                "query, key, value = "
                "(put(a, spread.get_data_layout(a.shape)) for a in (query, key, value))",
                "layout = lambda v: spread.get_variable_layout(v)",
                example.load[0].replace(
                    'native[v.path.split("/", 1)[1]]',
                    'put(native[v.path.split("/", 1)[1]], layout(v))',
                ),
                *example.load[1:],
            ),
        )


def distribution(mode: Mode) -> Any:
    """Return a mode's distribution: ModelParallel on its mesh, or DataParallel on its devices."""
    from keras.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel, list_devices

    sizes = mode["mesh"]
    devices = list_devices("cpu")[: int(np.prod(sizes))]
    if mode.options.get("parallel") == "data":
        return DataParallel(devices=devices)
    layouts = LayoutMap(DeviceMesh(sizes, AXES, devices))
    for path, axes in LAYOUTS.items():
        layouts[path] = axes
    return ModelParallel(layout_map=layouts)


def plain(mode: Mode) -> Mode:
    """Return `mode` without the options "mesh" and "parallel", which the layer does not accept."""
    own = {name: value for name, value in mode.options.items() if name not in ("mesh", "parallel")}
    return replace(mode, options=own)


ADAPTERS = {"keras-jax-sharded": "KerasSharded"}
