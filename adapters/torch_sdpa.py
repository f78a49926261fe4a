"""torch.nn.functional.scaled_dot_product_attention: as torch chooses, and kernel by kernel.

Easy to miss in a port: True in a mask attends, which is the opposite of
torch.nn.MultiheadAttention. The causal flag is aligned top-left if lengths differ. Together with a
mask it is documented to be an error; on a CPU only the math kernel raises it, and the tiled kernel
applies both. Fewer key/value heads need enable_gqa=True, except that a single one is broadcast.
dropout_p takes effect even after .eval(). A fully masked query gets zeros, not NaN (since torch
2.5).

The function has several kernels, and torch chooses by device, dtype, shape, mask, and by what needs
a gradient. On a CPU it takes the tiled kernel ("flash"), unless value heads have a different size,
inputs or mask have three axes, the mask needs a gradient, or there is dropout; in these cases, it
computes matrix products and a softmax ("math"). `torch.nn.attention.sdpa_kernel` restricts torch to
one kernel. If that kernel does not support a problem, torch raises "No available kernel" and warns
of the reason, which becomes the reason of `Unsupported`. Two kernels are for GPUs only, and need
head sizes that are multiples of 8. cuDNN's kernel supports half precision only, and head sizes of
up to 128, or 256 on newer GPUs.
"""

from __future__ import annotations

import re
import warnings
from typing import Any, ClassVar

from conformance import (
    CausalFlag,
    Example,
    Function,
    Geometry,
    LogSumExp,
    MaskArgument,
    Mode,
    Unsupported,
)

_MODES = (
    Mode("with-gradients", about="called as in training, so that gradients can be asked for"),
    Mode(
        "no-grad",
        gradients=False,
        about="called under torch.no_grad(): torch may choose another kernel",
    ),
)

_NO_KERNEL = ("No available kernel", "No viable backend")
"""How torch's error messages begin if the only enabled kernel cannot be used."""


def _example(attention: str, imports: str = "") -> Example:
    return Example(
        imports="import torch\nfrom torch.nn.functional import scaled_dot_product_attention"
        + imports,
        build=f"attention = {attention}\n"
        "split = lambda x: x.unflatten(-1, ({heads}, -1)).transpose(1, 2)",
        call="attention(split(query), split(key), split(value){masks}).transpose(1, 2).flatten(2)",
    )


def _forced(backend: str) -> Example:
    return _example(
        f"sdpa_kernel(SDPBackend.{backend})(scaled_dot_product_attention)",
        "\nfrom torch.nn.attention import SDPBackend, sdpa_kernel",
    )


class Default(Function):
    """The adapter for scaled_dot_product_attention with the kernel that torch chooses."""

    title = "torch.nn.functional.scaled_dot_product_attention"
    documentation = (
        "https://docs.pytorch.org/docs/stable/generated/"
        "torch.nn.functional.scaled_dot_product_attention.html"
    )
    framework = "torch"
    grouped = True
    custom_scale = True
    fully_masked_row = "zeros"
    modes = _MODES
    # dropout_p takes effect in all modes.
    dropout_modes = ("with-gradients", "no-grad")
    example = _example("scaled_dot_product_attention")

    mask_arguments = (
        MaskArgument(
            "attn_mask",
            ("query key", "batch heads query key"),
            true="attends",
            number="added",
            broadcasts=True,
        ),
    )
    # "An error is thrown if both attn_mask and is_causal are set."
    causal_flag = CausalFlag("is_causal", alignment="top-left", alone=True)

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode, **options: Any
    ) -> Any:
        if query.shape[1] != key.shape[1]:
            options["enable_gqa"] = True
        if mode.dropout:
            import torch

            torch.manual_seed(mode.draw)
            options["dropout_p"] = mode.dropout
        return self._attention(query, key, value, **masks, **options)

    def _attention(self, *inputs: Any, **arguments: Any) -> Any:
        from torch.nn.functional import scaled_dot_product_attention

        return scaled_dot_product_attention(*inputs, **arguments)


class _OneKernel(Default):
    """The base class of adapters in which only one kernel is enabled."""

    documentation = (
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html"
    )
    backend: ClassVar[str]
    """The name of the kernel in `torch.nn.attention.SDPBackend`."""

    def _attention(self, *inputs: Any, **arguments: Any) -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                with sdpa_kernel(getattr(SDPBackend, self.backend)):
                    return super()._attention(*inputs, **arguments)
            except RuntimeError as error:
                if not str(error).startswith(_NO_KERNEL):
                    raise
                reason = _reason([str(item.message) for item in told], arguments.get("attn_mask"))
                raise Unsupported(reason) from error


def _reason(warned: list[str], mask: Any) -> str:
    """Return why torch rejected the only enabled kernel, from the warnings `warned`, without sizes.

    If no warning gives a reason, return a sentence that depends on whether `mask` needs a gradient.
    """
    told = [re.split(r" Got | \(Triggered internally", text)[0] for text in warned]
    # Omit the warnings about the disabled kernels.
    reasons = [it for it in told if not it.endswith("because:") and "runtime disabled" not in it]
    if not reasons and mask is not None and mask.requires_grad:
        # check_attn_mask_shape in sdp_utils_cpp.h rejects it without a warning.
        return "the kernel gives no gradient of attn_mask"
    return " ".join(reasons) or "No available kernel, and torch does not say why"


class Math(_OneKernel):
    """The adapter for the "math" kernel: matrix products and a softmax in torch operations."""

    title = "torch.nn.functional.scaled_dot_product_attention (math)"
    backend = "MATH"
    example = _forced("MATH")


class Flash(_OneKernel):
    """The adapter for the tiled kernel: FlashAttention 2 on a GPU, torch's own kernel on a CPU.

    On a CPU it also supports float64 and float32. The operator below it, which is not public,
    returns the log-sum-exp too: natural, float32 for half precision, without a gradient. That of a
    query that sees no key is 0, so whoever merges parts by it gives a part without keys the weight
    exp(0).
    """

    title = "torch.nn.functional.scaled_dot_product_attention (flash)"
    backend = "FLASH_ATTENTION"
    example = _forced("FLASH_ATTENTION")
    log_sum_exp = LogSumExp(of_no_keys=0.0, modes=("log-sum-exp",))
    modes = (
        *_MODES,
        Mode(
            "log-sum-exp",
            gradients=False,
            every_case=False,
            core_cases=True,
            about="torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, for CPUs",
        ),
    )

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode, **options: Any
    ) -> Any:
        # Of empty arrays, the operator ends the process; scaled_dot_product_attention handles them.
        if mode.name not in self.log_sum_exp.modes or not (query.numel() and key.numel()):
            return super().attend(query, key, value, masks, mode, **options)
        import torch

        if query.device.type != "cpu":
            raise Unsupported("the operator is for CPUs")
        if value.shape[-1] != query.shape[-1]:
            raise Unsupported("value heads of the key's size only")
        mask = masks.get("attn_mask")
        if mask is not None and mask.dtype == torch.bool:
            # As scaled_dot_product_attention does before it calls the operator.
            numbers = torch.zeros(mask.shape, dtype=query.dtype)
            masks = masks | {"attn_mask": numbers.masked_fill(~mask, float("-inf"))}
        # It reads the last axis as contiguous, which scaled_dot_product_attention checks before.
        query, key, value = (heads.contiguous() for heads in (query, key, value))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, **masks, **options
        )


class _OnGpu(_OneKernel):
    """The base class of adapters for kernels that exist only for GPUs."""

    gpus_only = True
    geometry = Geometry(head_sizes=(64, 128), tiles=(64, 64))


class Efficient(_OnGpu):
    """The adapter for the memory-efficient kernel, which is from xFormers."""

    title = "torch.nn.functional.scaled_dot_product_attention (efficient)"
    backend = "EFFICIENT_ATTENTION"
    dtypes = ("float32", "bfloat16", "float16")
    example = _forced("EFFICIENT_ATTENTION")


class Cudnn(_OnGpu):
    """The adapter for cuDNN's kernel.

    A tile of keys has 128, but lengths of 64 and 192 matter too: with a mask, torch 2.11 has NaN in
    gradients there (https://github.com/pytorch/pytorch/issues/196678).
    """

    title = "torch.nn.functional.scaled_dot_product_attention (cuDNN)"
    backend = "CUDNN_ATTENTION"
    dtypes = ("bfloat16", "float16")
    example = _forced("CUDNN_ATTENTION")


ADAPTERS = {
    "torch-sdpa": "Default",
    "torch-sdpa-math": "Math",
    "torch-sdpa-flash": "Flash",
    "torch-sdpa-efficient": "Efficient",
    "torch-sdpa-cudnn": "Cudnn",
}
