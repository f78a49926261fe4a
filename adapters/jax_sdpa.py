"""jax.nn.dot_product_attention, written out in operations for XLA, and as cuDNN's kernel.

Easy to miss in a port: heads come after the length, `[batch length heads head]`, unlike in torch.
`mask` is boolean, and True attends; it rejects numbers, which go into `bias`. The causal flag is
aligned top-left if lengths differ. Blocked logits become a large finite number, so that the output
of a fully masked query is the mean of all values, not zeros as in torch. The softmax is in float32
for all dtypes. Values have the head size of keys.

JAX 0.4.33 added grouped-query attention and three arguments. `key_value_seq_lengths` is a count of
keys for each batch entry, and so can encode only padding on the right. A count of 0 gives the mean
of all values, padding included. NaN in the values beyond a count reaches every query, because it is
multiplied by a weight of 0. `query_seq_lengths` sets the outputs of queries beyond the count to 0.
`local_window_size` is (keys before, keys after), not counting the query's own, or one number for
both sides. It is aligned top-left like the causal flag, and can be combined with it. −1 does not
mean "no limit", as in flash attention, but blocks the query's own key. Before JAX 0.8.2, the window
is ignored unless there is another mask.

`return_residual` returns the log-sum-exp too, `[batch length heads]`, natural, and in half
precision rounded to the dtype of the inputs. It has no gradient: JAX returns zeros for it, without
an error.

cuDNN's kernel is for GPUs, half precision and some sizes; on a CPU it is unavailable. The adapter
does not declare a window for it, because (W, 0) without `is_causal` shows all later keys
(https://github.com/jax-ml/jax/pull/39576).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from conformance import (
    CausalFlag,
    Example,
    Function,
    Geometry,
    Lengths,
    LogSumExp,
    MaskArgument,
    Mode,
    Problem,
    Shape,
    Unsupported,
    Window,
)
from conformance.adapter import MaskTable, Spelling, since
from conformance.adapters.lengths import LengthTable
from conformance.adapters.shapes import ask


class _WithLengths(LengthTable):
    """A mask table that yields encodings of padding as lengths right after the preferred encoding.

    Thus the suite examines lengths even where it does not examine all encodings.
    """

    def spellings(self, problem: Problem) -> Iterator[Spelling]:
        masks = MaskTable.spellings(self, problem)
        yield from itertools.islice(masks, 1)
        yield from self._counted(problem)
        yield from masks


class DotProductAttention(Function):
    """The adapter for jax.nn.dot_product_attention(implementation="xla"), the default."""

    title = "jax.nn.dot_product_attention"
    documentation = "https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html"
    framework = "jax"
    layout = "batch length heads head"
    custom_scale = True
    fully_masked_row = "mean of values"
    example = Example(
        imports="import jax, jax.numpy as jnp",
        build="split = lambda x: x.reshape(*x.shape[:-1], {heads}, -1)",
        call="jax.nn.dot_product_attention("
        "split(query), split(key), split(value){masks}).reshape(query.shape)",
    )

    mask_arguments = (
        MaskArgument("mask", "batch heads query key", true="attends", broadcasts=True),
        MaskArgument("bias", "batch heads query key", number="added", broadcasts=True),
    )
    causal_flag = CausalFlag("is_causal", alignment="top-left")
    features = (
        Window("local_window_size", none=None, alignment="top-left"),
        Lengths("key_value_seq_lengths", of="keys", aligns=False),
        Lengths("query_seq_lengths", of="queries", aligns=False),
    )
    modes = (
        Mode("xla", about='implementation="xla", and the default: written out in operations'),
        Mode(
            "optimised",
            every_case=False,
            dtypes=("float32",),
            optimised=True,
            about="as xla, with XLA's optimisations on; the others are compiled quickly",
        ),
        Mode(
            "log-sum-exp",
            every_case=False,
            about="return_residual=True, which returns the log-sum-exp too",
        ),
    )
    # The mask is a large number, so that of a query that sees no key is one, too.
    log_sum_exp = LogSumExp("batch query heads", of_no_keys=None, modes=("log-sum-exp",))
    implementation: ClassVar[str] = "xla"

    def __init__(self) -> None:
        self.grouped = since("jax", "0.4.33")
        if not self.grouped:
            self.features = ()
        if not since("jax", "0.8"):
            self.modes = tuple(mode for mode in self.modes if mode.name != "log-sum-exp")

    @cached_property
    def masks(self) -> MaskTable:
        if not self.grouped:
            return super().masks
        return _WithLengths(
            tuple(self.mask_arguments),
            self.causal_flag,
            self.features,
            lengths="key_value_seq_lengths",
        )

    def check_shape(self, shape: Shape) -> None:
        super().check_shape(shape)
        ask(shape, "values")

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode, **options: Any
    ) -> Any:
        import jax

        if self.log_sum_exp_in(mode) is not None:
            options["return_residual"] = True
        if isinstance(window := masks.get("local_window_size"), tuple):
            # JAX has no number for "no limit" on one side, so pass the length.
            most = max(query.shape[1], key.shape[1])
            limits = tuple(most if limit is None else limit for limit in window)
            masks = masks | {"local_window_size": limits}
        return jax.nn.dot_product_attention(
            query, key, value, **masks, **options, implementation=self.implementation
        )


class CudnnAttention(DotProductAttention):
    """The adapter for jax.nn.dot_product_attention(implementation="cudnn").

    Beside a mask or a bias, gradients need even lengths, so the first mode has no gradients. The
    causal flag is cuDNN's mask of the same name, which begins top-left too. The adapter does not
    declare the output of a fully masked query. Masks and biases are passed in full size, because a
    single row for all queries is rejected.
    """

    title = "jax.nn.dot_product_attention (cuDNN)"
    dtypes = ("bfloat16", "float16")
    geometry = Geometry(head_sizes=(64, 128), tiles=(64, 64))
    fully_masked_row = None
    log_sum_exp = None
    mask_arguments = tuple(
        replace(argument, broadcasts=False) for argument in DotProductAttention.mask_arguments
    )
    features = tuple(f for f in DotProductAttention.features if isinstance(f, Lengths))
    modes = (
        Mode("cudnn", gradients=False, about='implementation="cudnn": one kernel, for GPUs'),
        Mode("cudnn-gradients", about="as cudnn, so that gradients can be asked for"),
    )
    implementation = "cudnn"
    gpus_only = True

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode, **options: Any
    ) -> Any:
        try:
            return super().attend(query, key, value, masks, mode, **options)
        except NotImplementedError as error:
            # JAX documents: "supports only a subset of shapes/dtypes"; others raise this error.
            raise Unsupported(str(error)) from error


ADAPTERS = {"jax-sdpa": "DotProductAttention", "jax-sdpa-cudnn": "CudnnAttention"}
