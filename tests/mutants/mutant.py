"""A Mutant: one small, plausible change to the attention, and what is expected to notice it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from conformance.adapter.base import EQUAL_BITS
from conformance.definition.problem import Causal
from mutants.attention import Attention
from mutants.contestant import Contestant, Function

OUTPUT = "output.equals-definition"
INPUTS = "gradient.inputs-equal-definition"
PARAMETERS = "gradient.parameters-equal-definition"
BEYOND_LENGTHS = "lengths.nothing-beyond-is-read"
BIAS = "gradient.bias-equals-definition"
FEATURES = "gradient.features-equal-definition"
KERNEL = "kernel.equals-definition"
DTYPE = "dtype.in-is-out"
WEIGHTS = "weights.equal-definition"
SUMS = "weights.rows-sum-to-one"
BLOCKED_WEIGHTS = "weights.blocked-are-zero"
MADE = "weights.made-the-output"
POLARITY = "mask.polarity-is-as-declared"
BLOCKED_KEY = "mask.blocked-key-has-no-influence"
SPELLINGS = "mask.spellings-agree"
KEY_ORDER = "invariance.key-order"
STEPS = "cache.steps-equal-the-whole"
BATCH = "invariance.batch-entries-are-independent"
SHIFT = "invariance.logit-shift"
MODES = "modes.agree"
FROZEN = "gradient.does-not-depend-on-what-is-frozen"
TWICE = "gradient.asked-for-twice-is-the-same"
REWRITTEN = "call.reads-what-its-arguments-hold-now"
UNCHANGED = "call.leaves-inputs-unchanged"
REPEATS = "call.repeats"
SURROUNDINGS = "call.leaves-global-state-alone"
LAYOUT = "call.memory-layout-does-not-matter"
BEYOND = "call.reads-only-what-it-is-given"
DROPOUT = "dropout.is-unbiased"
DROPPED_OFF = "dropout.off-is-off"
DROPPED_BACK = "dropout.backward-drops-the-same"
SHARED = "call.takes-one-array-twice"
LENGTHS = "call.serves-other-lengths"
INFERENCE = "call.without-gradients-is-the-same"
OF_A_SUM = "gradient.of-a-sum"
KEPT = "call.leaves-earlier-answers-alone"
THROUGH_WEIGHTS = "gradient.through-returned-weights"
DECLARED = "adapter.declares-what-is-observed"
NAN = "nan.reaches-the-output"
PROMISED = "bits.are-as-promised"
OF_MASKED_QUERY = "gradient.of-fully-masked-query"
FLAG_BLOCKS = "causal.flag-blocks"
COMBINE = "mask.arguments-combine"
SAME_IN_MODES = "conventions.same-in-every-mode"
SAME_IN_DTYPES = "conventions.same-in-every-dtype"
SAME_IF_SHARED = "conventions.same-for-shared-inputs"
SAME_IN_ENCODINGS = "conventions.same-for-every-encoding"
SAME_IN_LAYOUTS = "conventions.same-in-every-layout"
FULLY_MASKED = "observed.fully-masked-row"
ALIGNMENT = "observed.causal-alignment"
RETURNED = "observed.returned-weights"

CASE = "plain/no-mask/cross"


@dataclass(frozen=True, eq=False)
class Mutant:
    """One defective attention.

    Attributes:
        name: unique, as in `--mutant`.
        chapter: what it is about.
        did: what a programmer did, in one sentence.
        killed_by: requirements of which at least one must notice it.
        changes: stage of `Attention` to what stands in its place.
        case: where it is looked for first: the id of a case, or "probe/..." for an experiment.
        dtype: in which dtype it is looked for first.
        accuracy: the class that it promises; then it is a function, on heads of the suite.
        alignment: what it declares of its causal flag.
        level: at which level of the suite it must be noticed.
        promises: of which relations it promises equal bits.
    """

    name: str
    chapter: str
    did: str
    killed_by: tuple[str, ...]
    changes: Mapping[str, Any]
    case: str = CASE
    dtype: str = "float32"
    accuracy: Literal["", "A0", "A"] = ""
    alignment: Causal = "bottom-right"
    level: str = "full"
    promises: tuple[str, ...] = ()

    @property
    def kind(self) -> type[Attention]:
        """The attention with the change."""
        return type("Mutant", (Attention,), dict(self.changes))

    def adapter(self) -> Contestant:
        """As an implementation."""
        if self.accuracy:
            return Function(self.name, self.kind, self.accuracy)
        made = Contestant(self.name, self.kind, self.alignment)
        made.promises = dict.fromkeys(self.promises, EQUAL_BITS)
        return made


Maker = Callable[..., None]


def chapter(name: str, mutants: list[Mutant]) -> Maker:
    """A function that adds mutants to the list: (name, what was done, killed by, **changes)."""

    def add(
        mutant: str,
        did: str,
        *killed_by: str,
        case: str = CASE,
        dtype: str = "float32",
        accuracy: Literal["", "A0", "A"] = "",
        alignment: Causal = "bottom-right",
        promises: tuple[str, ...] = (),
        **changes: Any,
    ) -> None:
        unknown = [stage for stage in changes if not hasattr(Attention, stage)]
        assert not unknown, f"{mutant}: the attention has no {unknown}"
        assert all(other.name != mutant for other in mutants), f"{mutant}: the name is taken"
        mutants.append(
            Mutant(
                *(mutant, name, did, killed_by, changes, case, dtype, accuracy, alignment),
                promises=promises,
            )
        )

    return add
