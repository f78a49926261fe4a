"""Five textbook multi-head attentions in PyTorch, in the style of tutorials on the web.

Each file `tutorial_N.py` represents one kind of web page, with its names, its argument order, its
mask polarity and its quirks. Like those pages, the files share no code. Their adapters are below.
Beware of mixing code from several pages: `mask == 1` blocks in tutorial 1, but `mask == 0` blocks
in the others. For a fully masked query, tutorials 1 and 3 (-inf) give NaN, while 2, 4 and 5 (a
large negative number) give the mean of the values.
"""

from __future__ import annotations

from typing import Any

from conformance import Example, Layer, MaskArgument, Mode, Parameter, Shape, Unsupported
from conformance.adapters.shapes import ask

FOUR_AXES = "batch heads query key"


def _projections(query: str, key: str, value: str, output: str) -> tuple[Parameter, ...]:
    """Return the parameter table of four nn.Linear layers with biases, given their names."""
    inputs = {"query": query, "key": key, "value": value}
    rows = [
        Parameter(f"{native}.weight", name, "embed heads head -> (heads head) embed")
        for name, native in inputs.items()
    ]
    rows += [
        Parameter(f"{native}.bias", f"{name}_bias", "heads head -> (heads head)")
        for name, native in inputs.items()
    ]
    return (
        *rows,
        Parameter(f"{output}.weight", "output", "heads head embed -> embed (heads head)"),
        Parameter(f"{output}.bias", "output_bias", "embed -> embed"),
    )


class Tutorial(Layer):
    """The base class of the five adapters, with one width for everything and biases everywhere."""

    framework = "torch"
    modes = (
        Mode("train", {"train": True}, about="as built, in training"),
        Mode("eval", {"train": False}, about="after .eval()"),
    )

    def check_shape(self, shape: Shape) -> None:
        if shape.kv_heads != shape.heads or shape.value_head_size != shape.head_size:
            raise Unsupported("keys and values have the heads of the queries")
        widths = {shape.query_width, shape.key_width, shape.value_width, shape.output_width}
        if widths != {shape.heads * shape.head_size}:
            raise Unsupported("one width for all, which is heads x head size")
        if not shape.bias:
            raise Unsupported("projections always have biases")

    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        import torch

        layer = self.make(shape.query_width, shape.heads, mode.dropout)
        return layer.to(getattr(torch, dtype)).train(mode["train"])

    def example_for(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Example:
        # The code of the page, with the width and heads of this shape.
        page = self.example.formatted(shape, self.example.call)
        return Example.of_module(
            dtype,
            mode["train"],
            page.build,
            page.call,
            imports=page.imports,
            output=page.output,
            weights=page.weights,
        )

    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        if mode.dropout:
            import torch

            torch.manual_seed(mode.draw)
        return self.attend(layer, query, key, value, masks)

    def make(self, width: int, heads: int, dropout: float) -> Any:
        """Return the tutorial's module; tutorials without dropout ignore `dropout`."""
        raise NotImplementedError

    def attend(self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any]) -> Any:
        """Call the module with its own argument order; return the output, or (output, weights)."""
        return layer(query, key, value, **masks)


class Tutorial1(Tutorial):
    """The adapter for tutorial 1, whose module takes `d_model, n_heads, dropout`.

    In the module's mask, a 1 blocks the key.
    """

    title = "Tutorial 1 (mask == 1 blocks)"
    returns_weights = "per head"
    fully_masked_row = "nan"
    dropout_modes = ("train",)
    # A number blocks if it equals one, literally: 2 hides nothing.
    mask_arguments = (
        MaskArgument("mask", FOUR_AXES, true="blocks", number="blocks if 1", broadcasts=True),
    )
    parameters = _projections("w_q", "w_k", "w_v", "fc")
    example = Example(
        imports="from conformance.adapters.tutorials.tutorial_1 import MultiHeadAttention",
        build="layer = MultiHeadAttention({query_width}, {heads}, dropout=0.0)",
        call="layer(query, key, value{masks})",
        output="{}[0]",
        weights="{}[1]",
    )

    def make(self, width: int, heads: int, dropout: float) -> Any:
        from conformance.adapters.tutorials.tutorial_1 import MultiHeadAttention

        return MultiHeadAttention(width, heads, dropout)


class Tutorial2(Tutorial):
    """The adapter for tutorial 2, built from `embed_size, num_heads`.

    The module takes values first and returns no attention weights.
    """

    title = "Tutorial 2 (mask == 0 blocks, -1e20)"
    fully_masked_row = "mean of values"
    mask_arguments = (
        MaskArgument(
            "mask", FOUR_AXES, true="attends", number="attends if nonzero", broadcasts=True
        ),
    )
    parameters = _projections("queries", "keys", "values", "fc_out")
    example = Example(
        imports="from conformance.adapters.tutorials.tutorial_2 import MultiHeadAttention",
        build="layer = MultiHeadAttention({query_width}, {heads})",
        call="layer(value, key, query{masks})",
    )

    def make(self, width: int, heads: int, dropout: float) -> Any:
        from conformance.adapters.tutorials.tutorial_2 import MultiHeadAttention

        return MultiHeadAttention(width, heads)

    def attend(self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any]) -> Any:
        return layer(value, key, query, **masks)


class Tutorial3(Tutorial):
    """The adapter for tutorial 3, built from `hidden_dim, head_num`.

    The module is self-attention; its page expands masks for every head and every query.
    """

    title = "Tutorial 3 (self-attention, mask == 0 blocks)"
    fully_masked_row = "nan"
    dropout_modes = ("train",)
    # No axis of size 1: the page expands before it calls.
    mask_arguments = (
        MaskArgument("attention_mask", FOUR_AXES, true="attends", number="attends if nonzero"),
    )
    parameters = _projections("q_proj", "k_proj", "v_proj", "o_proj")
    example = Example(
        imports="from conformance.adapters.tutorials.tutorial_3 import MultiHeadSelfAttention",
        build="layer = MultiHeadSelfAttention({query_width}, {heads}, 0.0)",
        call="layer(query{masks})",
    )

    def check_shape(self, shape: Shape) -> None:
        ask(shape, "self")
        super().check_shape(shape)

    def make(self, width: int, heads: int, dropout: float) -> Any:
        from conformance.adapters.tutorials.tutorial_3 import MultiHeadSelfAttention

        return MultiHeadSelfAttention(width, heads, dropout)

    def attend(self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any]) -> Any:
        return layer(query, **masks)


class Tutorial4(Tutorial):
    """The adapter for tutorial 4, built from `d_model, num_heads`.

    The module is the Transformer's attention, split into small methods.
    """

    title = "Tutorial 4 (mask == 0 blocks, -1e9)"
    returns_weights = "per head"
    fully_masked_row = "mean of values"
    mask_arguments = (
        MaskArgument(
            "mask", FOUR_AXES, true="attends", number="attends if nonzero", broadcasts=True
        ),
    )
    parameters = _projections("W_q", "W_k", "W_v", "W_o")
    example = Example(
        imports="from conformance.adapters.tutorials.tutorial_4 import MultiHeadAttention",
        build="layer = MultiHeadAttention({query_width}, {heads})",
        call="layer(query, key, value{masks})",
        output="{}[0]",
        weights="{}[1]",
    )

    def make(self, width: int, heads: int, dropout: float) -> Any:
        from conformance.adapters.tutorials.tutorial_4 import MultiHeadAttention

        return MultiHeadAttention(width, heads)


class Tutorial5(Tutorial):
    """The adapter for tutorial 5, built from `hidden_size, num_heads`.

    The module uses Bahdanau's additive score, and one mask for all heads.
    """

    title = "Tutorial 5 (additive score, mask == 0 blocks)"
    scores = ("additive",)
    returns_weights = "per head"
    fully_masked_row = "mean of values"
    mask_arguments = (
        MaskArgument(
            "mask", "batch query key", true="attends", number="attends if nonzero", broadcasts=True
        ),
    )
    parameters = (
        *_projections("q_linear", "k_linear", "v_linear", "out_linear"),
        Parameter("v", "score", "heads head -> heads head"),
    )
    example = Example(
        imports="from conformance.adapters.tutorials.tutorial_5 import AdditiveMultiHeadAttention",
        build="layer = AdditiveMultiHeadAttention({query_width}, {heads})",
        call="layer(query, key, value{masks})",
        output="{}[0]",
        weights="{}[1]",
    )

    def make(self, width: int, heads: int, dropout: float) -> Any:
        from conformance.adapters.tutorials.tutorial_5 import AdditiveMultiHeadAttention

        return AdditiveMultiHeadAttention(width, heads)


ADAPTERS = {
    "tutorial-1": "Tutorial1",
    "tutorial-2": "Tutorial2",
    "tutorial-3": "Tutorial3",
    "tutorial-4": "Tutorial4",
    "tutorial-5": "Tutorial5",
}
