"""How the attention functions of transformers are called, whatever the model is."""

from dataclasses import replace
from typing import ClassVar

from conformance import MaskArgument, Mode
from conformance.adapter import FlagEffect

# Booleans are accepted by eager attention but added as 1 and 0, so they are not declared as masks.
ADDED = MaskArgument("attention_mask", "batch heads query key", number="added", broadcasts=True)
EITHER = replace(ADDED, true="attends")

MODES = (
    Mode("eval", {"train": False}, about="after .eval()"),
    Mode("train", {"train": True}, every_case=False, about="as built, in training"),
)
NO_GRAD = Mode(
    "no-grad",
    {"train": False},
    gradients=False,
    about="after .eval(), under torch.no_grad(): torch may choose another kernel",
)


class Eager:
    """What attn_implementation="eager" declares: two matrix products and a softmax."""

    implementation = "eager"
    effect_of_flag: ClassVar[FlagEffect] = "none"
    returns_weights = "per head"
    fully_masked_row = "nan"
    mask_arguments = (ADDED,)


class Sdpa:
    """What attn_implementation="sdpa" declares: torch's SDPA, which returns no weights."""

    implementation = "sdpa"
    effect_of_flag: ClassVar[FlagEffect] = "without a mask"
    fully_masked_row = "output bias"
    mask_arguments = (EITHER,)
