"""From numbers to colours and words.

A colour is an ink with an opacity, so the ground shows through: the same figure is legible on white
paper and on a dark page. No meaning is left to colour alone.
"""

from __future__ import annotations

import math

WEIGHT = "#1b69ad"
"""Ink of an attention weight; full at 1."""
MORE, LESS = "#ae4a08", "#7a4fb5"
"""Inks of a difference: more weight than the reference has, and less; apart for all eyes."""
UNREAL = "#a3195b"
"""Ink of a cell that is no number."""

WHITE_ABOVE = 0.82
"""Opacity of an ink above which text on it is white: on either ground about as legible."""

STEPS = 50
"""So many shades; finer ones cannot be told apart and would only make files larger."""


def shade(value: float, most: float) -> float:
    """Opacity for |value|, full at `most`; never none for what is not zero."""
    if value == 0 or most <= 0:
        return 0.0
    step = round(min(1.0, abs(value) / most) * STEPS)
    return max(1, step) / STEPS


def exponent(most: float) -> int:
    """The power of ten in units of which differences up to `most` are short."""
    if most == 0 or 0.01 <= most < 100:
        return 0
    return math.floor(math.log10(most))


def cell(value: float) -> str:
    """A number in a cell: at most five characters, and zero only for zero."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    size = abs(value)
    if size < 0.005 or size >= 1000:
        mantissa, power = f"{size:.0e}".split("e")
        text = f"{mantissa}e{'−' * (int(power) < 0)}{abs(int(power))}"
    else:
        text = f"{size:.2f}" if size < 10 else f"{size:.0f}"
    return f"−{text}" if value < 0 else text


def signed(value: float) -> str:
    """A difference in a cell."""
    text = cell(value)
    return f"+{text}" if value > 0 else text


def number(value: float) -> str:
    """A number in a sentence, three digits of it."""
    if math.isinf(value):
        return "∞"
    if value == 0:
        return "0"
    power = math.floor(math.log10(abs(value)))
    if -3 <= power < 5:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value / 10.0**power:.2f}×10{raised(power)}" if power > -308 else f"{value:.2g}"


def sigmas(value: float) -> str:
    """A ratio in units of σ."""
    if math.isinf(value):
        return "∞σ"
    if value >= 1e4:
        mantissa, power = f"{value:.1e}".split("e")
        return f"{mantissa}×10{raised(int(power))}σ"
    return f"{value:.0f}σ" if value >= 100 else f"{value:.1f}σ"


def raised(power: int) -> str:
    """An exponent."""
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def clipped(text: str, most: int) -> str:
    """The beginning of a long name."""
    return text if len(text) <= most else text[: max(1, most - 1)].rstrip() + "…"
