"""How many mistakes does `mha-conformance diagnose` name from arrays alone, and how many wrongly?

    python benchmarks/diagnose.py                     every mutant, at 2 x 8 heads x 256 x 64
    python benchmarks/diagnose.py --part 1/20         every twentieth of them, from the first
    python benchmarks/diagnose.py --jobs 2            in two processes
    python benchmarks/diagnose.py --size 2x4x32x16    another size: batch x heads x tokens x head
    python benchmarks/diagnose.py --honest            right answers only, which get no name
    python benchmarks/diagnose.py --long              in bfloat16 at 1 x 32 heads x 4,096 x 128

Each mutant of the zoo that is a small change to the attention answers a random problem on heads,
with those features that its own case has. Its output, and nothing else of it, is diagnosed. Right
answers are those of the honest algorithms, in each dtype. Of long outputs, the time of each
diagnosis is told, and the memory of the process.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
# ruff: noqa: E402 - the attention and its mutants belong to the tests.
sys.path.insert(0, str(ROOT / "tests"))

from mutants.causes import CAUSES
from mutants.contestant import Featureful
from mutants.featured import Featured
from mutants.features import FeatureMutant
from mutants.honest import algorithms
from mutants.mutant import Mutant
from mutants.zoo import FEATURES, SMALL

from conformance.adapter.base import Call, Mode
from conformance.arrays.diagnosis import Diagnosis, diagnose
from conformance.arrays.given import identities, separate
from conformance.cases.catalogue import find_cases
from conformance.definition.dtypes import DTYPES, Array, dtype_of
from conformance.definition.problem import NO_WINDOW, Problem, Shape
from conformance.errors import ConformanceError, Unsupported
from conformance.records.findings import NOTHING

WITHOUT_GRADIENTS = Mode("eval", {"train": False, "fused": False}, gradients=False)
FUSED = Mode("fused", {"train": False, "fused": True}, weights=False, gradients=False)
KINDS = ("named", "named among others", "named wrongly", "not named", "does not show")


def posed(case_id: str, dtype: str, sizes: tuple[int, int, int, int]) -> Problem:
    """Return a random problem on heads with the features of a case."""
    batch, heads, tokens, size = sizes
    like = None
    if not case_id.startswith("probe/"):
        like = find_cases(case_id)[0].problem(dtype)
    random = np.random.default_rng(7)
    group = 1 if like is None or like.shape.group == 1 or heads % 2 else heads // 2
    kv_heads = heads // group
    unequal = like is not None and like.shape.query_length != like.shape.key_length
    queries = tokens - tokens // 4 if unequal else tokens
    shape = Shape.of_heads((batch, heads, queries, size), (batch, kv_heads, tokens, size))
    rounded = dtype_of(dtype).round

    def drawn(*shape: int) -> Array:
        return rounded(random.standard_normal(shape))

    fields: dict[str, Any] = {}
    if like is not None:
        if like.mask is not None:
            full = random.random((batch, 1, queries, tokens)) < 0.8
            full[..., 0] = True
            padding = like.mask.shape[-2] == 1
            fields["mask"] = full[:, :, :1] if padding else full
        if like.attn_bias is not None:
            fields["attn_bias"] = drawn(1, heads, queries, tokens)
        fields["causal"] = like.causal
        # A scale of 0 is refused: it leaves nothing of query and key to compare.
        fields["scale"] = like.scale or None
        if like.window != NO_WINDOW:
            fields["window"] = tuple(
                None if side is None else (side * tokens // 16 or side) for side in like.window
            )
        fields["soft_cap"] = like.soft_cap
        if like.sinks is not None:
            fields["sinks"] = drawn(heads)
        if like.slopes is not None:
            fields["slopes"] = rounded(0.5 ** (1 + np.arange(heads)))
        if like.rotary is not None:
            part = like.rotary.size < like.shape.head_size
            turned = size // 2 if part else size
            fields["rotary"] = dataclasses.replace(like.rotary, size=turned)
        if like.norm is not None:
            gains = {side: rounded(1 + 0.3 * random.standard_normal(size)) for side in "qk"}
            fields["norm"] = dataclasses.replace(like.norm, query=gains["q"], key=gains["k"])
        if like.key_lengths is not None:
            fields["key_lengths"] = np.linspace(tokens // 2, tokens, batch).astype(np.int64)
    return Problem(
        shape=shape,
        dtype=dtype,
        weights=identities(shape),
        heads_alone=True,
        query=drawn(batch, queries, heads * size),
        key=drawn(batch, tokens, kv_heads * size),
        value=drawn(batch, tokens, kv_heads * size),
        cotangent=np.zeros((batch, queries, heads * size)),
        **fields,
    )


def judged(problem: Problem, output: Array, accuracy: str = "") -> Diagnosis:
    """Return the diagnosis of an output from arrays alone."""
    shape = problem.shape
    told = {
        name: getattr(problem, name)
        for name in ("causal", "scale", "window", "soft_cap", "sinks", "slopes", "rotary", "norm")
    }
    return diagnose(
        separate(problem.query, shape.heads),
        separate(problem.key, shape.kv_heads),
        separate(problem.value, shape.kv_heads),
        separate(output, shape.heads),
        mask=problem.mask,
        mask_true="attends",
        bias=problem.attn_bias,
        key_lengths=problem.key_lengths,
        layout="batch heads length head",
        dtype=problem.dtype,
        accuracy=accuracy,
        **told,
    )


def answered(mutant: Mutant, sizes: tuple[int, int, int, int]) -> tuple[Problem, Array] | None:
    """Return a problem and the mutant's output, or None if it does not answer."""
    problem = posed(mutant.case, mutant.dtype, sizes)
    adapter = mutant.adapter()
    if isinstance(mutant, FeatureMutant):
        adapter = Featureful.for_problem(mutant.name, mutant.kind, problem)
    try:
        answer = adapter.run(problem, Call(mode=WITHOUT_GRADIENTS))
    except (Unsupported, ConformanceError, ArithmeticError, LookupError, TypeError, ValueError):
        # A mutant that refuses or fails here leaves no arrays.
        return None
    if answer.output.shape != problem.cotangent.shape:
        return None
    return problem, answer.output


ALSO = {
    "last-full-tile-of-128-dropped": "keys.ignored",
    "window-without-first-key": "keys.ignored",
    "lengths-of-queries-for-keys": "keys.ignored",
    "segments-positions-go-on": "rotary.queries-from-0",
    "query-scaled-in-place": "scale.of-size",
    "float64-through-float32": "precision.rounded",
    "norm-in-float16": "accuracy.tf32",
}
"""Other names that say the same of the random problem, in which the mutants' own sizes and masks
are not there."""


def kind_of(mutant: Mutant, found: Diagnosis) -> str:
    """Return one of `KINDS`."""
    if found.verdict != "deviates":
        return KINDS[4]
    if not found.causes:
        return KINDS[3]
    expected = CAUSES.get(mutant.name, NOTHING)
    ids = [it.id for it in found.causes]
    if ids[0] in (expected.id, ALSO.get(mutant.name)):
        return KINDS[0]
    return KINDS[1] if expected.id in ids else KINDS[2]


def counted(name: str, sizes: tuple[int, int, int, int]) -> tuple[str, float, list[str]]:
    """Return the kind of a mutant's diagnosis, its CPU seconds, and the ids of the causes."""
    mutant = next(it for it in (*SMALL, *FEATURES) if it.name == name)
    with np.errstate(all="ignore"):
        made = answered(mutant, sizes)
        if made is None:
            return "no output", 0.0, []
        begun = time.process_time()
        found = judged(*made)
    return kind_of(mutant, found), time.process_time() - begun, [it.id for it in found.causes]


def honest(sizes: tuple[int, int, int, int]) -> Iterator[tuple[str, Diagnosis]]:
    """Yield right answers of every algorithm, with their diagnoses."""
    for algorithm in algorithms(slow=False):
        for dtype in DTYPES:
            for case in ("plain/no-mask/cross", "mask/per-batch/gqa"):
                problem = posed(case, dtype, sizes)
                try:
                    answer = algorithm.run(problem, Call(mode=WITHOUT_GRADIENTS))
                except (Unsupported, ConformanceError):
                    continue
                yield f"{algorithm.name} {dtype} {case}", judged(problem, answer.output)
    for dtype in DTYPES:
        for feature in ("window", "soft-cap", "sinks", "alibi", "rotary"):
            for found in find_cases(f"feature/{feature}*/self")[:1]:
                problem = posed(found.id, dtype, sizes)
                adapter = Featureful.for_problem("featured", Featured, problem)
                for mode in (WITHOUT_GRADIENTS, FUSED):
                    answer = adapter.run(problem, Call(mode=mode))
                    name = f"{mode.name} {dtype} {found.id}"
                    yield name, judged(problem, answer.output)


LONG = (1, 32, 4096, 128)


def long(
    sizes: tuple[int, int, int, int], only: str = ""
) -> Iterator[tuple[str, dict[str, Any], list[Array]]]:
    """Yield mistakes in long outputs: a name, what is told, and query, key, value and output.

    `only` is the name of one of them, or "" for all.
    """
    batch, heads, tokens, size = sizes
    index = np.arange(tokens)
    ahead = index - index[:, None]
    causal, padding = ahead <= 0, np.broadcast_to(index < tokens - tokens // 8, ahead.shape)
    angles = index[:, None] / 10000.0 ** (np.arange(0, size, 2) / size)
    sine, cosine = (turn(angles).astype(np.float32) for turn in (np.sin, np.cos))

    def turned(array: Array) -> Array:
        """Rotate neighbours, where halves are told."""
        one, other = array[..., ::2], array[..., 1::2]
        found = np.empty_like(array)
        found[..., ::2] = one * cosine - other * sine
        found[..., 1::2] = one * sine + other * cosine
        return found

    told_window = {"causal": True, "window": tokens // 4}
    told_cap = {"causal": True, "soft_cap": 2.0}
    told_rotary = {"causal": True, "rotary": {"base": 10000.0, "pairs": "halves"}}
    told_mask = {"mask": padding[:1], "mask_true": "attends"}
    for name, told, change in (
        ("right", {}, {}),
        ("right, causal", {"causal": True}, {"seen": causal}),
        ("no scale", {}, {"scale": 1.0}),
        ("mask inverted", told_mask, {"seen": ~padding}),
        ("causal mask off by one", {"causal": True}, {"seen": ahead <= 1}),
        ("window off by one", told_window, {"seen": causal & (ahead >= -tokens // 4)}),
        ("rotary pairs", told_rotary, {"seen": causal, "turn": turned}),
        ("groups tiled", {"causal": True}, {"seen": causal, "group": 2}),
        ("cap after mask", told_cap, {"seen": causal, "cap": 2.0}),
        ("every fifth weight lost", {"causal": True}, {"seen": causal & (index % 5 != 3)}),
    ):
        if only not in ("", name):
            continue
        random = np.random.default_rng(0)
        kv_heads = heads // change.get("group", 1)
        rounded = dtype_of("bfloat16").round
        query, key, value = (
            rounded(random.standard_normal((batch, count, tokens, size))).astype(np.float32)
            for count in (heads, kv_heads, kv_heads)
        )
        output = np.empty_like(query)
        turn = change.get("turn", lambda array: array)
        for entry, head in itertools.product(range(batch), range(heads)):
            own = entry, head % kv_heads
            logits = turn(query[entry, head]) @ turn(key[own]).T
            logits *= np.float32(change.get("scale", size**-0.5))
            logits[~change.get("seen", np.ones_like(causal))] = -np.inf
            if "cap" in change:
                logits = change["cap"] * np.tanh(logits / change["cap"])
            logits -= logits.max(axis=-1, keepdims=True)
            np.exp(logits, out=logits)
            output[entry, head] = logits @ value[own] / logits.sum(axis=-1, keepdims=True)
        yield name, told, [query, key, value, rounded(output).astype(np.float32)]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="1/1", help="which mutants, such as 1/20")
    parser.add_argument("--size", help="batch x heads x tokens x head")
    parser.add_argument("--honest", action="store_true", help="right answers only")
    parser.add_argument("--long", action="store_true", help="mistakes in long outputs only")
    parser.add_argument("--name", default="", help="with --long: this mistake only")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes")
    parser.add_argument("--verbose", action="store_true", help="print what was not named rightly")
    options = parser.parse_args()
    usual = LONG if options.long else (2, 8, 256, 64)
    given = (int(size) for size in options.size.split("x")) if options.size else usual
    batch, heads, tokens, head = given
    sizes = (batch, heads, tokens, head)
    if options.long:
        for name, told, arrays in long(sizes, options.name):
            begun, used = time.perf_counter(), time.process_time()
            found = diagnose(*arrays, dtype="bfloat16", layout="batch heads length head", **told)
            took, used = time.perf_counter() - begun, time.process_time() - used
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            said = ", ".join(it.text for it in found.causes) or found.verdict
            seconds = f"{took:.0f} s, of CPU {used:.0f} s"
            print(f"  {name}: {seconds}, {memory:.2f} GiB: {said}", flush=True)
        return
    if options.honest:
        count = names = deviates = 0
        for name, found in honest(sizes):
            count += 1
            names += bool(found.causes)
            deviates += found.verdict == "deviates"
            if found.verdict == "deviates":
                print(f"  {name}: {found}")
        print(f"{count} right answers: {deviates} deviate, {names} get a name")
        return
    part, parts = (int(number) for number in options.part.split("/"))
    mutants = [m for m in (*SMALL, *FEATURES) if m.name in CAUSES][part - 1 :: parts]
    kinds: Counter[str] = Counter()
    seconds: list[float] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        names = [mutant.name for mutant in mutants]
        for name, (kind, took, causes) in zip(
            names, pool.map(counted, names, itertools.repeat(sizes)), strict=True
        ):
            kinds[kind] += 1
            if kind in KINDS[:4]:
                seconds.append(took)
            if options.verbose and kind in KINDS[1:4]:
                said = ", ".join(causes[:4])
                print(f"  {name}: {kind}: {CAUSES[name]}; {said}; {took:.1f} s", flush=True)
    shown = sum(kinds[kind] for kind in KINDS[:4])
    size = "x".join(map(str, sizes))
    print(f"{len(mutants)} mutants at {size}, of which {shown} show in the output")
    for kind in (*KINDS, "no output"):
        share = f" ({kinds[kind] / shown:.0%})" if shown and kind in KINDS[:4] else ""
        print(f"  {kind:<20} {kinds[kind]:4d}{share}")
    if seconds:
        print(f"  CPU seconds: median {np.median(seconds):.1f}, largest {max(seconds):.1f}")


if __name__ == "__main__":
    main()
