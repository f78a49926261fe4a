"""Describe the code that users of an implementation write, and the syntax of its framework.

An adapter describes that code once, as an `Example`. Convention cards, stand-alone reproductions
and porting advice are generated from it as text, without importing a framework.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from conformance.definition.problem import Shape

SMALL = Shape(
    batch=2,
    query_length=4,
    key_length=4,
    heads=2,
    kv_heads=2,
    head_size=4,
    value_head_size=4,
    query_width=8,
    key_width=8,
    value_width=8,
    output_width=8,
    sharing="self",
)
"""Self-attention with few tokens and small heads, for generated code."""


@dataclass(frozen=True)
class Example:
    """The code that a user of the implementation writes.

    The code may use NumPy as `np` and the native inputs `query`, `key` and `value`. `load` may also
    use `native`, a dictionary of the given parameters by their names in the parameter table. The
    parameters are NumPy arrays, except in JAX, where `load` and `call` run in a function whose
    arguments are `native` and the inputs.

    Args:
        imports: import lines, as one string or several, such as "import torch".
        build: lines that create the layer, or that define what else `call` needs.
        call: an expression; `{masks}` stands for mask arguments with a leading comma, such as
            ", attn_mask=mask", or for nothing.
        output: an expression for the output, in which `{}` stands for the call.
        weights: likewise, an expression for the attention weights; "" if none are returned.
        fresh: lines that follow `build` if the layer keeps its initial parameters.
        load: lines that follow `build` and load `native` into the layer; if there are none, a
            reproduction needs this suite.
        parameter: an expression for the parameter `{name}`, of which a gradient is taken; "" if
            there is none, or if the framework is JAX, which does not need it.
        defaults: code for arguments that are passed in `{masks}` unless masks of these names are.
        calls: in `Adapter.example` only: what takes the place of `call` in modes other than the
            first, by the name of the mode.
    """

    imports: str | Sequence[str]
    build: str | Sequence[str]
    call: str
    output: str = "{}"
    weights: str = ""
    fresh: str | Sequence[str] = ()
    load: str | Sequence[str] = ()
    parameter: str = ""
    defaults: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    calls: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of_module(
        cls,
        dtype: str,
        train: bool,
        build: str | Sequence[str],
        call: str,
        *,
        imports: str | Sequence[str] = (),
        output: str = "{}",
        weights: str = "",
    ) -> Example:
        """Return the example for a `torch.nn.Module`.

        The last line of `build` assigns the module to `layer`. A conversion to `dtype` is appended
        to this line unless `dtype` is "float32", and `.eval()` is appended unless `train` is true.
        """
        state = ("" if dtype == "float32" else f".to(torch.{dtype})") + ("" if train else ".eval()")
        *before, last = lines(build)
        return cls(
            imports=("import torch", *lines(imports)),
            build=(*before, last + state),
            call=call,
            output=output,
            weights=weights,
            load="layer.load_state_dict({name: torch.tensor(a) for name, a in native.items()})",
            parameter='layer.get_parameter("{name}")',
        )

    def formatted(self, shape: Shape, call: str) -> Example:
        """Return the example with this call, and with the sizes of the shape filled in.

        `build` and `call` are format strings with fields of `Shape`, such as "{heads}"; `{masks}`
        in `call` is kept.
        """
        sizes = dataclasses.asdict(shape)
        return dataclasses.replace(
            self,
            build=[line.format(**sizes) for line in lines(self.build)],
            call=call.format(masks="{masks}", **sizes),
        )

    def expression(self, masks: Mapping[str, str], *, weights: bool = False) -> str:
        """Return code for the output or, if `weights` is true, for the attention weights.

        `masks` maps the names of the mask arguments to pass to the code for their values.
        """
        passed = {**self.defaults, **masks}
        given = "".join(f", {name}={value}" for name, value in passed.items())
        call = self.call.replace("{masks}", given)
        return (self.weights if weights else self.output).replace("{}", call)


def lines(text: str | Sequence[str]) -> list[str]:
    """Return the lines of a string, or of a sequence of lines, as a list."""
    return text.splitlines() if isinstance(text, str) else list(text)


def keywords(usual: Mapping[str, object], **given: object) -> str:
    """Return code for the keyword arguments in `given`, such as ", bias=False".

    Arguments that have their default value, given in `usual`, are left out; the result may be "".
    """
    return "".join(
        f', {name}="{value}"' if isinstance(value, str) else f", {name}={value!r}"
        for name, value in given.items()
        if name not in usual or usual[name] != value
    )


@dataclass(frozen=True)
class FrameworkSyntax:
    """The syntax for arrays in a framework; `{}` stands for the code of an array.

    Attributes:
        imported: the line that imports the framework.
        plain: an expression that converts a NumPy array to the framework; where the framework
            allows it, the dtype is kept.
        typed: likewise, an expression that also converts the array to the dtype `{dtype}`.
        numpy: an expression that converts an array of the framework to NumPy: to float64, except in
            tinygrad, where the dtype is kept.
        on_gpu: a line that makes the GPU, which the framework calls `{device}`, its default device,
            and raises an exception if there is none.
        from_gpu: likewise an expression, for an array on a GPU; "" if it is that of `numpy`.
    """

    imported: str
    plain: str
    typed: str
    numpy: str
    on_gpu: str = ""
    from_gpu: str = ""

    def on(self, device: str) -> FrameworkSyntax:
        """Return the syntax for arrays on a device, "cpu" or "gpu"."""
        if device == "cpu" or not self.from_gpu:
            return self
        return dataclasses.replace(self, numpy=self.from_gpu)

    def array(self, code: str, dtype: str = "") -> str:
        """Return code that converts a NumPy array to the framework.

        Args:
            code: code for the NumPy array.
            dtype: the name of the dtype of the result; "" to keep the array's dtype if possible.
        """
        return self.typed.format(code, dtype=dtype) if dtype else self.plain.format(code)

    def imports(self, example: Example) -> list[str]:
        """Return the lines that import NumPy, the library and its framework, each line once."""
        every = ["import numpy as np", *lines(example.imports), self.imported]
        return list(dict.fromkeys(every))


_RUNTIME = FrameworkSyntax("import numpy as np", "{}", '{}.astype("{dtype}")', "{}.astype(float)")
"""The syntax of runtimes that take and return NumPy arrays."""

FRAMEWORKS: Mapping[str, FrameworkSyntax] = {
    "torch": FrameworkSyntax(
        "import torch",
        "torch.tensor({})",
        "torch.tensor({}, dtype=torch.{dtype})",
        "{}.detach().double().numpy()",
        'torch.set_default_device("{device}")',
        "{}.detach().cpu().double().numpy()",
    ),
    "jax": FrameworkSyntax(
        "import jax, jax.numpy as jnp",
        "jnp.asarray({})",
        'jnp.asarray({}, "{dtype}")',
        "np.array({}).astype(float)",
        'jax.config.update("jax_default_device", jax.devices("{device}")[0])',
    ),
    "tensorflow": FrameworkSyntax(
        "import tensorflow as tf",
        "tf.constant({})",
        'tf.constant({}, "{dtype}")',
        "{}.numpy().astype(float)",
        'assert tf.config.list_logical_devices("{device}")  # the default, if there is one',
    ),
    "mlx": FrameworkSyntax(
        "import mlx.core as mx",
        "mx.array({})",
        "mx.array({}, mx.{dtype})",
        "np.array({}.astype(mx.float64))",
        "mx.set_default_device(mx.{device})",
        "np.array({}.astype(mx.float32))",
    ),
    "paddle": FrameworkSyntax(
        "import paddle",
        "paddle.to_tensor({})",
        'paddle.to_tensor({}, "{dtype}")',
        '{}.astype("float64").numpy()',
        'paddle.set_device("{device}")',
    ),
    "tinygrad": FrameworkSyntax(
        "from tinygrad import Tensor", "Tensor({})", 'Tensor({}, dtype="{dtype}")', "{}.numpy()"
    ),
    **dict.fromkeys(("onnx", "onnxruntime", "openvino"), _RUNTIME),
}
"""The syntax of each framework except NumPy, keyed by the name of the framework's bridge."""
