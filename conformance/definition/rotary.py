"""The scaling of rotary frequencies, in the vocabulary of `rope_parameters` of transformers.

A model that reads texts longer than those it was trained on turns some pairs of components more
slowly. However it is configured, what remains is an angle per position for each pair and a factor
of cosine and sine. With f_t = base^(−2t/size) the frequency of pair t, a scaled frequency is

    f_t s_t + (f_t / d_t) (1 − s_t)

where s_t is the share that is left as it is, and d_t divides the rest:

    linear     s = 0, d = factor                       Chen et al. 2023, arXiv:2306.15595
    dynamic    s = 1, a larger base beyond the         u/bloc97 and u/emozilla 2023, as described
               original length                         in arXiv:2309.00071, appendix B
    yarn       s falls from 1 to 0 between two pairs   Peng et al. 2023, arXiv:2309.00071, and
                                                       github.com/jquesnelle/yarn
    longrope   s = 0, d is listed for each pair        Ding et al. 2024, arXiv:2402.13753, and
                                                       github.com/microsoft/LongRoPE
    llama3     s falls from 1 to 0 between two         `apply_scaling` of
               wavelengths                             github.com/meta-llama/llama-models

Beside any of these, or alone, pairs may turn by positions on several axes (mrope, Wang et al. 2024,
arXiv:2409.12191, section 2.1): `mrope_section` counts the pairs of time, height and width. Pair t
turns by p_a f_t, where p_a is the token's position on the axis a of the pair. Sections lie side by
side, or are interleaved (Qwen3-VL, arXiv:2511.21631): pair t belongs to axis a = t mod 3 as long as
t < 3 · section a, and to time beyond.

What authors leave to the program is as in transformers, by which models are published: a length is
the last position of any token plus 1, and YaRN's ramp over no pair at all is 0.001 wide.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from conformance.definition.dtypes import Array, IntArray
from conformance.errors import WrongShape

if TYPE_CHECKING:
    from conformance.definition.features import Rotary
    from conformance.definition.problem import Problem

ScalingKind = Literal["linear", "dynamic", "yarn", "longrope", "llama3"]

POSITION_AXES = ("time", "height", "width")
"""The axes on which tokens of images and videos have positions, in the order of `mrope_section`."""

_LENGTH = "original_max_position_embeddings"
_NEEDED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor", _LENGTH),
    "yarn": ("factor", _LENGTH),
    "longrope": ("factor", _LENGTH, "short_factor", "long_factor"),
    "llama3": ("factor", _LENGTH, "low_freq_factor", "high_freq_factor"),
}
_ALLOWED: dict[str, tuple[str, ...]] = {
    "yarn": (
        "beta_fast",
        "beta_slow",
        "truncate",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
    ),
    "longrope": ("attention_factor",),
}
_SECTIONS = ("mrope_section", "mrope_interleaved")
_AT_LEAST_1 = ("factor", _LENGTH)
_ORDERED = (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast"))


@dataclass(frozen=True, eq=False, kw_only=True)
class RotaryAxes:
    """Positions on the axes of `POSITION_AXES`, by which pairs turn; masks do not follow them.

    `query` is `[batch query 3]`, `key` is `[batch key 3]`.
    """

    query: IntArray
    key: IntArray


@dataclass(frozen=True)
class Scaled:
    """What scales the frequencies of all pairs: s and d, and from what they are computed.

    Attributes:
        base: the base of the frequencies before they are scaled.
        grown: by how much more than itself a relative error of the ratio of lengths affects `base`.
        share: s, `[pair]`.
        divisor: d, `[pair]`.
        ramp: the number of which s is the rest, or from which it is taken, `[pair]`.
        follows: whether `ramp` is proportional to the frequency.
    """

    base: float
    grown: float
    share: Array
    divisor: Array
    ramp: Array
    follows: bool = False

    def frequencies(self) -> Array:
        """Return the scaled frequencies, `[pair]`."""
        pairs = len(self.share)
        plain = self.base ** (-np.arange(0.0, pairs) / pairs)
        return plain * self.share + plain / self.divisor * (1 - self.share)

    def felt(self) -> Array:
        """Return by how much an error of the share, as it is, changes a frequency, `[pair]`.

        The change is relative to the frequency. Where the share is 0 or 1, it is none.
        """
        left = self.share + (1 - self.share) / self.divisor
        falls = (self.share > 0) & (self.share < 1)
        return np.where(falls, (1 - 1 / self.divisor) / left, 0.0)

    def variance(self) -> Array:
        """Return the variance of the relative error of each frequency, `[pair]`.

        The unit is the variance of a relative rounding error; the errors are those that the
        definition draws. Those of the ratio of lengths, of the power, of the ramp, and of the
        result are independent.
        """
        pairs = np.arange(len(self.share)) / len(self.share)
        felt = self.felt() * self.ramp
        before = 1 + (math.log(self.base) * pairs) ** 2 + (self.grown * pairs) ** 2
        return before * (1 + felt * self.follows) ** 2 + felt**2 + 1


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How the frequencies of a rotary embedding are scaled; fields are named as in transformers.

    Attributes:
        rope_type: the kind of scaling.
        factor: by how much texts are longer than those before.
        original_max_position_embeddings: the length of those before.
        low_freq_factor, high_freq_factor: for llama3, how often a pair turns within this length: at
            most the first, and it is scaled in full; at least the second, and it is not scaled.
        beta_fast, beta_slow: the same for yarn, 32 and 1 if None.
        truncate: for yarn, whether the pairs between which the share falls are rounded outwards to
            whole numbers; they are if it is None.
        mscale, mscale_all_dim: for yarn, what multiplies 0.1 ln(factor) in the numerator and the
            denominator of the attention factor.
        attention_factor: what multiplies cosine and sine; None for what the kind of scaling says.
        short_factor, long_factor: for longrope, the divisor of each pair up to the original length
            and beyond it.
        mrope_section: how many pairs turn by the position on each axis of `POSITION_AXES`; None if
            all turn by the one position that a token has.
        mrope_interleaved: whether these pairs take turns; if not, those of an axis are neighbours.
    """

    rope_type: ScalingKind | Literal["default"]
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    mrope_section: tuple[int, ...] | None = None
    mrope_interleaved: bool | None = None

    def __repr__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        told = ", ".join(f"{name}={it!r}" for name, it in given.items() if it is not None)
        return f"RotaryScaling({told})"

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> RotaryScaling | None:
        """Return the scaling in an entry such as `rope_parameters`; None if nothing is scaled.

        Sections of several axes count as a scaling, of the kind "default" if there is no other.
        The base and the part of a head that is rotated, which such an entry has too, are ignored.

        Raises:
            WrongShape: if the entry has an unknown kind or name, or lacks a number.
        """
        given: dict[str, Any] = {
            n: tuple(v) if isinstance(v, list) else v for n, v in parameters.items()
        }
        kind: Any = given.pop("rope_type", given.pop("type", "default"))
        for name in ("type", "rope_theta", "partial_rotary_factor"):
            given.pop(name, None)
        kind = "default" if kind == "mrope" else kind
        if kind == "default" and given.get("mrope_section") is None:
            return None
        names = {field.name for field in dataclasses.fields(cls)}
        for name in given:
            if name not in names:
                raise WrongShape(f"rotary_scaling has no {name}")
        scaling = cls(rope_type=kind, **given)
        listed = scaling.short_factor or scaling.long_factor
        pairs = len(listed) if listed else sum(scaling.mrope_section or (2,))
        scaling.check(2 * pairs)
        return scaling

    def parameters(self) -> dict[str, Any]:
        """Return the entry in which a configuration tells it, without the base."""
        told = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        shown = {n: list(v) if isinstance(v, tuple) else v for n, v in told.items()}
        return {name: value for name, value in shown.items() if value is not None}

    def for_texts(self) -> RotaryScaling | None:
        """Return the same for positions that are equal on all axes; None if nothing is scaled."""
        if self.rope_type == "default":
            return None
        return dataclasses.replace(self, mrope_section=None, mrope_interleaved=None)

    def check(self, size: int) -> None:
        """Raise `WrongShape` if this cannot scale the frequencies of `size` rotated components."""
        why = self._wrong(size)
        if why:
            raise WrongShape(f"rotary_scaling{why}")

    def fits(self, size: int) -> bool:
        """Return whether this can scale the frequencies of `size` rotated components."""
        return not self._wrong(size)

    def fitted(self, size: int) -> RotaryScaling | None:
        """Return the same for fewer rotated components; None if nothing like it is possible."""
        fewer: dict[str, Any] = {}
        if self.short_factor is not None and self.long_factor is not None:
            fewer["short_factor"] = self.short_factor[: size // 2]
            fewer["long_factor"] = self.long_factor[: size // 2]
        if self.mrope_section is not None:
            of = np.bincount(self.axis_of_pairs()[: size // 2], minlength=len(POSITION_AXES))
            fewer["mrope_section"] = tuple(of.tolist())
        made = dataclasses.replace(self, **fewer)
        return made if made.fits(size) else None

    def _wrong(self, size: int) -> str:
        """Return what is wrong, as the rest of a sentence about "rotary_scaling", or ""."""
        kind = self.rope_type
        if kind not in ("default", *get_args(ScalingKind)):
            known = ", ".join(map(repr, get_args(ScalingKind)))
            return f".rope_type is {kind!r}; say one of {known}"
        if self.mrope_section is not None and (why := self._wrong_sections(size)):
            return why
        told = self.parameters()
        needed = ("rope_type", *_NEEDED.get(kind, ("mrope_section",)))
        for name in needed:
            if name not in told:
                return f" of {kind} lacks {name}"
        for name, value in told.items():
            if name not in (*needed, *_ALLOWED.get(kind, ()), *_SECTIONS):
                return f" of {kind} takes no {name}"
            if name in ("rope_type", "truncate", *_SECTIONS):
                continue
            least = 1 if name in _AT_LEAST_1 else 0
            for number in value if isinstance(value, list) else [value]:
                if not (least <= number < math.inf and number > 0):
                    bound = "at least 1" if least else "positive"
                    return f".{name} is {number}; it is {bound} and finite"
            if isinstance(value, list) and len(value) != size // 2:
                return f".{name} has {len(value)} numbers for {size // 2} pairs"
        betas = {"beta_slow": self.slow, "beta_fast": self.fast}
        for one, other in _ORDERED if kind in ("llama3", "yarn") else ():
            low, high = (told.get(name, betas.get(name)) for name in (one, other))
            if low is not None and high is not None and low >= high:
                return f".{one} is {low}; it is below {other}, {high}"
        if kind == "dynamic" and size < 4:
            return " of dynamic needs two pairs: the first is never scaled"
        return ""

    def _wrong_sections(self, size: int) -> str:
        """Return what is wrong with `mrope_section`, as the rest of a sentence, or ""."""
        sections = self.mrope_section or ()
        said = f".mrope_section is {list(sections)}"
        if len(sections) != len(POSITION_AXES) or any(
            not isinstance(it, int) or isinstance(it, bool) or it < 0 for it in sections
        ):
            return f"{said}; it is three numbers of pairs, of {', '.join(POSITION_AXES)}"
        if sum(sections) != size // 2:
            return f"{said}, {sum(sections)} pairs together; {size // 2} are rotated"
        last = max(axis + 3 * (sections[axis] - 1) for axis in (1, 2))
        if self.mrope_interleaved and last >= size // 2:
            return f"{said}; interleaved, height and width have at most a third of the pairs each"
        return ""

    def axis_of_pairs(self) -> IntArray:
        """Return the index in `POSITION_AXES` of the axis by which each pair turns, `[pair]`."""
        sections = self.mrope_section
        assert sections is not None
        if not self.mrope_interleaved:
            return np.repeat(np.arange(len(POSITION_AXES)), sections)
        found = np.zeros(sum(sections), np.int64)
        for axis in (1, 2):
            found[axis : 3 * sections[axis] : 3] = axis
        return found

    @property
    def fast(self) -> float:
        """How often a pair turns within the original length that yarn does not scale."""
        return 32.0 if self.beta_fast is None else self.beta_fast

    @property
    def slow(self) -> float:
        """How often a pair turns within the original length that yarn scales in full."""
        return 1.0 if self.beta_slow is None else self.beta_slow

    @property
    def gain(self) -> float:
        """The attention factor: what multiplies cosine and sine, so that logits get its square.

        It is √(1 + ln(factor) / ln(original length)) for longrope, 0.1 ln(factor) + 1 for yarn
        unless it has both `mscale` and `mscale_all_dim`, and 1 for the others.
        """
        if self.attention_factor is not None:
            return self.attention_factor
        grown = math.log(self.factor or 1.0)
        if self.rope_type == "longrope":
            length = self.original_max_position_embeddings
            assert length is not None
            # Texts of one token have no logarithm to divide by.
            return math.sqrt(1.0 + grown / math.log(max(length, 2)))
        if self.rope_type == "yarn":
            if self.mscale is None or self.mscale_all_dim is None:
                return 0.1 * grown + 1.0
            return (0.1 * self.mscale * grown + 1.0) / (0.1 * self.mscale_all_dim * grown + 1.0)
        return 1.0

    def scaled(self, size: int, base: float, length: int) -> Scaled:
        """Return what scales the frequencies of `size` components for texts of `length` tokens."""
        pairs, none = np.arange(size // 2), np.zeros(size // 2)
        factor, original = self.factor or 1.0, self.original_max_position_embeddings or 1
        if self.rope_type == "dynamic":
            ratio = factor * max(length, original) / original
            rest, power = ratio - (factor - 1), size / (size - 2)
            return Scaled(base * rest**power, power * ratio / rest + 1, none + 1, none + 1, none)
        if self.rope_type == "longrope":
            listed = self.long_factor if length > original else self.short_factor
            return Scaled(base, 0.0, none, np.array(listed, float), none)
        if self.rope_type == "yarn":
            low, high = (
                size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
                for turns in (self.fast, self.slow)
            )
            if self.truncate is None or self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, size - 1)
            width = high - low if high != low else 0.001
            share = 1 - np.clip((pairs - low) / width, 0, 1)
            return Scaled(base, 0.0, share, none + factor, 1 + pairs / abs(width))
        if self.rope_type == "llama3":
            low, high = self.low_freq_factor or 0.0, self.high_freq_factor or 1.0
            turned = original * base ** (-2 * pairs / size) / (2 * math.pi)
            ramp = turned / (high - low)
            share = np.clip((turned - low) / (high - low), 0, 1)
            return Scaled(base, 0.0, share, none + factor, ramp, follows=True)
        return Scaled(base, 0.0, none, none + factor, none)


def turning(problem: Problem) -> tuple[Array, float]:
    """Return the angle per position of each pair of a rotated problem, and the attention factor."""
    rotary, scaling = problem.rotary, problem.rotary_scaling
    assert rotary is not None
    if scaling is None or scaling.rope_type == "default":
        return float(rotary.base) ** (-np.arange(0.0, rotary.size, 2.0) / rotary.size), 1.0
    how = scaling.scaled(rotary.size, rotary.base, length_of(problem))
    return how.frequencies(), scaling.gain


_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
_EXACT = 31
"""How many significant bits of a frequency leave its product with a position below 2^22 exact."""


def exact_tables(
    rotary: Rotary, positions: IntArray, how: Scaled | None = None
) -> tuple[Array, Array]:
    """Return the cosines and sines of the angles of each token and pair, `[token pair]` each.

    Their errors do not grow with the position, up to 2^22, whereas a product in float64 is off by
    1e-10 at a million tokens. Frequencies are computed to 50 digits, in turns instead of radians,
    from the base, the shares and the divisors of `how`, if they are scaled. The product with their
    leading bits is exact, so its whole turns are left out exactly.
    """
    plain = np.ones(rotary.size // 2)
    base, share, divisor = (rotary.base, plain, plain)
    if how is not None:
        base, share, divisor = how.base, how.share, how.divisor
    parts = zip(share.tolist(), divisor.tolist(), strict=True)
    leading, rest = _turns(rotary.size, float(base), tuple(parts))
    tokens = np.asarray(positions, np.float64)[:, None]
    turns = tokens * leading
    angles = 2 * math.pi * (turns - np.trunc(turns) + tokens * rest)
    return np.cos(angles), np.sin(angles)


@lru_cache(maxsize=8)
def _turns(size: int, base: float, parts: tuple[tuple[float, float], ...]) -> tuple[Array, Array]:
    """Return the turns per position of each pair, as leading bits and what they leave, `[pair]`.

    `parts` are the share of each pair that is not scaled, and the divisor of the rest.
    """
    leading, rest = np.empty((2, size // 2))
    with localcontext(prec=50):
        for pair, (share, divisor) in enumerate(parts):
            left = Decimal(share) + (1 - Decimal(share)) / Decimal(divisor)
            turns = left * Decimal(base) ** (Decimal(-2 * pair) / size) / (2 * _PI)
            unit = math.ldexp(1.0, math.frexp(float(turns))[1] - _EXACT)
            leading[pair] = round(float(turns) / unit) * unit
            rest[pair] = float(turns - Decimal(leading[pair]))
    return leading, rest


def length_of(problem: Problem) -> int:
    """Return the last position of any token of the problem plus 1, on which scalings depend."""
    sides = (problem.position_of_queries, problem.position_of_keys)
    if problem.axes is not None:
        sides = (problem.axes.query, problem.axes.key)
    return max(int(side.max(initial=0)) for side in sides) + 1
