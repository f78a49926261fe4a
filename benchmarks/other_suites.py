"""What do other suites notice? Their rules, and the ONNX Attention node cases, against the zoo.

    pip install onnx==1.23.2
    PYTHONPATH=tests python benchmarks/other_suites.py
    PYTHONPATH=tests python benchmarks/other_suites.py --all
    PYTHONPATH=tests python benchmarks/other_suites.py --rules 200

The node cases of the operator Attention (onnx.backend.test) are replayed, as ONNX's runner does it:
rtol 1e-3, atol 1e-7, the output only, in float32. They know no weights of projections, no gradients
and no modes, so only those mutants of `mha-conformance selftest` are put before them that change
the function between projected heads and context, and show in float32. Each runs on the plain and on
the fused path.

A case is replayed if it can be said to the attention: no soft cap, no window, one dtype. The causal
flag is aligned as ONNX does it, so mutants of the alignment are left out, and those of a padding
that no replayed case has. Cases that expand the operator into others hold the same numbers, and are
left out.

With `--rules N`, N mutants are drawn, and each is put before the rules by which others accept an
answer, on inputs of the sizes and kinds that their tests have (`RULES`). A rule is not the whole of
a suite: sizes are reduced to what NumPy computes in a moment, and nothing is asked of what the rule
does not look at.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from mutants.attention import Attention, Given
from mutants.contestant import Contestant
from mutants.mutant import Mutant
from mutants.run import Examiner
from mutants.zoo import SMALL

from conformance.adapter.base import Adapter, Call
from conformance.cases import patterns
from conformance.cases.case import assembled, draw, rounded
from conformance.definition.dtypes import FLOAT32
from conformance.definition.expectation import solve
from conformance.definition.problem import Problem, Shape
from conformance.errors import Unsupported

OUTSIDE = {
    "project",
    "input",
    "shifted",
    "weight",
    "heads",
    "split",
    "merge",
    "finish",
    "returned",
    "stored",
    "gradient",
    "begin",
    "read",
    "offset",
    "padding",
}
"""Stages before and behind the function, the alignment, and padding, which no replayed case has."""

LAYER = {"project", "weight", "split", "merge", "finish"}
"""Stages before and behind the function, where gradients and masks are asked, too."""

FOREIGN = {"mask-ignored-with-bias", "causal-ignored-with-padding"}
"""ONNX has one mask argument, no additive score and no numbers that are not added."""

KNOWN = {
    "is_causal",
    "scale",
    "q_num_heads",
    "kv_num_heads",
    "softcap",
    "softmax_precision",
    "qk_matmul_output_mode",
}
"""Attributes of the operator that the attention has, or that do not move the output."""

CHAPTERS = ("forward", "masks", "causal", "precision")
RTOL, ATOL = 1e-3, 1e-7
"""Of ONNX's runner."""


@dataclass(frozen=True, eq=False)
class Replay:
    """A node case as the attention is given it."""

    name: str
    heads: dict[str, np.ndarray]
    """Query, key and value, `[batch heads length head]`."""
    masks: dict[str, np.ndarray]
    causal: int | None
    """Own key of the first query, or None without the flag."""
    scale: float | None
    output: np.ndarray


def node_cases() -> list[Any]:
    """Those of the operator Attention."""
    try:
        from onnx.backend.test.case.node import collect_testcases
    except ImportError:
        sys.exit("onnx is not installed; pip install onnx==1.23.2")
    warnings.simplefilter("ignore")  # Cases of other operators overflow on purpose.
    return [case for case in collect_testcases("Attention") if "_expanded" not in case.name]


def replayed(case: Any) -> Replay | str:
    """The case, or why it cannot be said."""
    import onnx

    node = case.model.graph.node[0]
    options = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
    inputs, outputs = case.data_sets[0]
    given = dict(zip((name for name in node.input if name), inputs, strict=True))
    # Inputs are named after the operator's parameters by their position.
    parameters = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
    by_role = {
        role: given[name] for role, name in zip(parameters, node.input, strict=False) if name
    }
    if options.get("softcap"):
        return "with a soft cap"
    if options.keys() - KNOWN:
        return f"with {', '.join(sorted(options.keys() - KNOWN))}"
    query, key, value = (by_role[role] for role in "QKV")
    if query.dtype != np.float32 or value.dtype != np.float32:
        return "of another dtype"
    query = _split(query, options.get("q_num_heads"))
    key = _split(key, options.get("kv_num_heads"))
    value = _split(value, options.get("kv_num_heads"))
    past = 0
    if "past_key" in by_role:
        past = by_role["past_key"].shape[2]
        key = np.concatenate([by_role["past_key"], key], axis=2)
        value = np.concatenate([by_role["past_value"], value], axis=2)
    lengths = (query.shape[2], key.shape[2])
    causal = bool(options.get("is_causal"))
    masks: dict[str, np.ndarray] = {}
    if "attn_mask" in by_role:
        mask = np.asarray(by_role["attn_mask"])
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        if mask.shape[-1] != lengths[1]:
            return "with a mask shorter than the keys"
        if mask.dtype == np.bool_:
            masks["mask"] = mask
        else:
            masks["bias"] = mask.astype(np.float32)
    if "nonpad_kv_seqlen" in by_role:
        if causal:
            return "causal and aligned at the padding"
        masks["padding"] = np.arange(lengths[1]) < by_role["nonpad_kv_seqlen"][:, None]
    output = np.asarray(outputs[0])
    if output.ndim == 3:
        output = _split(output, options.get("q_num_heads"))
    heads = {"query": query, "key": key, "value": value}
    return Replay(case.name, heads, masks, past if causal else None, options.get("scale"), output)


def _split(array: np.ndarray, heads: int | None) -> np.ndarray:
    """`[batch length (heads head)]` to `[batch heads length head]`; four axes stay."""
    if array.ndim == 4:
        return array
    assert heads is not None
    batch, length, _ = array.shape
    return array.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)


def passes(kind: type[Attention], replay: Replay, fused: bool) -> bool:
    """Whether ONNX's runner would accept the attention's context."""
    members = {
        "heads": lambda a, name: a.given.inputs[name],
        "finish": lambda a, merged: merged,
        "offset": lambda a: replay.causal,
    }
    function = type("Function", (kind,), members)
    query, key, value = replay.heads.values()
    batch, heads, queries, size = query.shape
    width = heads * size
    shape = Shape(
        batch=batch,
        query_length=queries,
        key_length=key.shape[2],
        heads=heads,
        kv_heads=key.shape[1],
        head_size=size,
        value_head_size=value.shape[3],
        query_width=width,
        key_width=key.shape[1] * size,
        value_width=value.shape[1] * value.shape[3],
        output_width=heads * value.shape[3],
        bias=False,
    )
    mode = Contestant.modes[2 if fused else 1]
    masks = {name: mask.copy() for name, mask in replay.masks.items()}
    given = Given(
        shape, FLOAT32, replay.heads, {}, masks, replay.causal is not None, replay.scale, mode, {}
    )
    attention = function(given)
    attention.batch, attention.queries, attention.keys = batch, queries, key.shape[2]
    with np.errstate(all="ignore"):
        output, _ = attention.forward()
    return np.allclose(
        output.transpose(0, 2, 1, 3), replay.output, rtol=RTOL, atol=ATOL, equal_nan=True
    )


def of_the_function() -> Iterator[Mutant]:
    """Mutants that show in float32 between the projected heads and the context."""
    for mutant in SMALL:
        if mutant.chapter not in CHAPTERS or mutant.dtype != "float32":
            continue
        foreign = "additive" in mutant.case or "number" in mutant.name or mutant.name in FOREIGN
        if not OUTSIDE & set(mutant.changes) and not foreign:
            yield mutant


Arrays = Mapping[str, np.ndarray]
Accepts = Callable[[str, np.ndarray, np.ndarray, np.ndarray], bool]
"""Whether a rule accepts an array, by its name, the answer, that of the definition, and that of
PyTorch's operators one by one in the dtype of the problem."""


@dataclass(frozen=True, eq=False)
class Rule:
    """By which answers others accept, on which problems."""

    name: str
    problems: tuple[Problem, ...]
    accepts: Accepts
    gradients: bool = True


def posed(
    dtype: str, queries: int, keys: int, seed: int = 0, kv_heads: int = 4, **fields: Any
) -> Problem:
    """Return a problem with 4 heads of 64, whose masks and features are patterns of cases.

    Its projections are the identity, because what these rules were written for has none.
    """
    width, of_keys = 4 * 64, kv_heads * 64
    shape = Shape(
        batch=2,
        query_length=queries,
        key_length=keys,
        heads=4,
        kv_heads=kv_heads,
        head_size=64,
        value_head_size=64,
        query_width=width,
        key_width=of_keys,
        value_width=of_keys,
        output_width=width,
        bias=False,
    )
    numbers = np.random.default_rng(seed)
    for name in fields.keys() & {"mask", "attn_bias"}:
        fields[name] = fields[name](shape, numbers)
    feature = fields.pop("feature", None)
    if feature is not None:
        fields |= feature(shape, fields.get("causal"), numbers)
    drawn = draw(shape, numbers)
    for name, size in shape.weight_shapes().items():
        drawn[f"weights.{name}"] = np.eye(
            width if name in ("query", "output") else of_keys
        ).reshape(size)
    return rounded(assembled(shape, drawn, **fields), dtype)


def close(rtol: float, atol: float) -> Accepts:
    """Return the rule of `allclose`."""
    return lambda name, got, want, low: bool(np.allclose(got, want, rtol=rtol, atol=atol))


def twice(name: str, got: np.ndarray, want: np.ndarray, low: np.ndarray) -> bool:
    """FlashAttention: the largest error is twice that of PyTorch, three times for gradients."""
    factor = 2.0 if name == "output" else 3.0
    return bool(np.abs(got - want).max() <= factor * np.abs(low - want).max())


FUDGE = {"output": 4.0, "gradient.query": 160.0, "gradient.key": 25.0, "gradient.value": 8.0,
         "gradient.attn_bias": 45.0}  # fmt: skip


def fudged(name: str, got: np.ndarray, want: np.ndarray, low: np.ndarray) -> bool:
    """PyTorch: as many times the largest error of its operators as the file says, or 1e-5."""
    limit = max(1e-5, FUDGE[name] * float(np.abs(low - want).max()))
    return bool(np.abs(got - want).max() <= limit)


def rules() -> list[Rule]:
    """Return the rules, with inputs as their tests have them."""
    fixed = tuple(posed("float32", 128, 128, seed) for seed in range(5))
    causal = tuple(posed("float32", 128, 128, seed, causal="bottom-right") for seed in range(5))
    end: dict[str, Any] = {"causal": "bottom-right"}
    features = [{"feature": getattr(patterns, name)} for name in ("window", "slopes", "soft_cap")]
    kinds = [{}, *features, {"mask": patterns.key_padding}]
    flash = [posed("bfloat16", 113, 203, **kind, **more) for kind in kinds for more in ({}, end)]
    flash.append(posed("bfloat16", 108, 256, kv_heads=2, **end))
    masks = ({}, {"causal": "top-left"}, {"mask": patterns.per_batch},
             {"attn_bias": patterns.bias_in_full}, {"scale": 0.1})  # fmt: skip
    torch = [posed(dtype, 64, 128, **one) for dtype in ("float16", "float32") for one in masks]
    engine = [posed("bfloat16", 128, 256, **kind, **more) for kind in kinds for more in ({}, end)]
    engine += [
        posed("bfloat16", 128, 256, attn_bias=patterns.bias_per_head),
        posed("bfloat16", 128, 256, kv_heads=2),
    ]
    return [
        Rule("allclose 1e-2", fixed, close(1e-2, 1e-2), gradients=False),
        Rule("allclose 1e-4", fixed, close(1e-4, 1e-4), gradients=False),
        Rule("1e-2, gradients, causal too", (*fixed, *causal), close(1e-2, 1e-2)),
        Rule("1e-4, gradients, causal too", (*fixed, *causal), close(1e-4, 1e-4)),
        Rule("FlashAttention", tuple(flash), twice),
        Rule("PyTorch", tuple(torch), fudged),
        Rule("Transformer Engine", tuple(engine), close(1.5e-2, 1.5e-2)),
    ]


@lru_cache(maxsize=256)
def wanted(problem: Problem) -> tuple[Arrays, Arrays]:
    """Return the answer of the definition, and that of PyTorch's operators in the dtype."""
    return solve(problem).arrays(), _operators(problem)


def _operators(problem: Problem) -> Arrays:
    """Return output and gradients of PyTorch's operators, each of which rounds to the dtype."""
    import torch

    dtype = getattr(torch, problem.dtype)
    named = {f"weights.{name}": array for name, array in problem.weights.named().items()}
    named |= {name: getattr(problem, name) for name in ("query", "key", "value", "attn_bias")}
    t = {
        name: torch.tensor(array, dtype=dtype, requires_grad=True)
        for name, array in named.items()
        if array is not None
    }
    q, k, v = (
        torch.einsum("ble,ehd->bhld", t[name], t[f"weights.{name}"])
        for name in ("query", "key", "value")
    )
    k, v = (x.repeat_interleave(problem.shape.group, dim=1) for x in (k, v))
    logits = q @ k.mT * problem.logit_scale
    if problem.soft_cap is not None:
        logits = problem.soft_cap * torch.tanh(logits / problem.soft_cap)
    if problem.attn_bias is not None:
        logits = logits + t["attn_bias"]
    if problem.slopes is not None:
        far = torch.tensor(np.abs(problem.distances()), dtype=dtype)
        logits = logits - torch.tensor(problem.slopes, dtype=dtype)[:, None, None] * far
    allowed = torch.tensor(problem.allowed_in_full().copy())
    weights = torch.softmax(logits.masked_fill(~allowed, -torch.inf), dim=-1)
    weights = weights.masked_fill(~allowed.any(dim=-1, keepdim=True), 0.0)
    output = torch.einsum("bhld,hde->ble", weights @ v, t["weights.output"])
    output.backward(torch.tensor(problem.cotangent, dtype=dtype))
    inputs = {name: one.grad for name, one in t.items() if not name.startswith("weights.")}
    arrays = {"output": output, **{f"gradient.{name}": one for name, one in inputs.items()}}
    return {name: one.detach().double().numpy() for name, one in arrays.items()}


def noticed(rule: Rule, adapter: Adapter) -> bool | None:
    """Return whether a rule rejects an answer; None if no problem can be posed."""
    asked = False
    for problem in rule.problems:
        want, low = wanted(problem)
        for mode in adapter.modes:
            if mode.name not in ("eval", "fused"):
                continue
            try:
                with np.errstate(all="ignore"):
                    call = Call(mode, wanted=None if rule.gradients else ())
                    got = adapter.run(problem, call).arrays()
            except Unsupported:
                continue
            except Exception:
                return True
            asked = True
            seen = np.all(problem.allowed_in_full().any(axis=-1), axis=1)[..., None]
            for name, array in got.items():
                if name not in low:
                    continue
                # What a fully masked query gets is no matter of these rules.
                mine = np.where(seen, array, want[name]) if name == "output" else array
                if not rule.accepts(name, mine, want[name], low[name]):
                    return True
    return False if asked else None


def print_rules(number: int) -> None:
    """Print how many of the drawn mutants each rule notices."""
    mutants = [
        one
        for one in SMALL
        if one.level == "full" and one.case.count("/") == 2 and not LAYER & set(one.changes)
        if "additive" not in one.case
    ]
    drawn = random.Random(0).sample(mutants, min(number, len(mutants)))
    every = rules()
    for rule in every:
        print(f"{rule.name}: the original {'fails' if noticed(rule, Contestant()) else 'passes'}")
    told: Counter[tuple[str, str]] = Counter()
    for mutant in drawn:
        for rule in every:
            told[rule.name, mutant.chapter] += bool(noticed(rule, mutant.adapter()))
        told["this suite", mutant.chapter] += Examiner().kill(mutant).killed
    drawn_of = Counter(mutant.chapter for mutant in drawn)
    print("\n| rule | " + " | ".join(drawn_of) + " | all |")
    print("| --- |" + " ---: |" * (len(drawn_of) + 1))
    for name in ("mutants", *(rule.name for rule in every), "this suite"):
        counts = [drawn_of[one] if name == "mutants" else told[name, one] for one in drawn_of]
        print(f"| {name} | {' | '.join(map(str, counts))} | {sum(counts)} |")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="print every mutant, not survivors only")
    parser.add_argument("--rules", type=int, metavar="N", help="rules of others on N mutants")
    options = parser.parse_args()
    begun = time.monotonic()
    if options.rules:
        print_rules(options.rules)
        print(f"\n{time.monotonic() - begun:.0f} s")
        return 0
    cases = node_cases()
    found = [replayed(case) for case in cases]
    replays = [item for item in found if isinstance(item, Replay)]
    left_out: dict[str, int] = {}
    for item in found:
        if isinstance(item, str):
            left_out[item] = left_out.get(item, 0) + 1
    wrong = [
        replay.name
        for replay in replays
        for fused in (False, True)
        if not passes(Attention, replay, fused)
    ]
    told = ", ".join(f"{count} {why}" for why, count in left_out.items())
    print(f"{len(cases)} ONNX node cases, {len(replays)} replayed (left out: {told})")
    print(f"the original fails in {len(wrong)}{': ' if wrong else ''}{', '.join(wrong)}\n")
    examiner = Examiner()
    rows = []
    for mutant in of_the_function():
        theirs = sum(
            not (passes(mutant.kind, replay, False) and passes(mutant.kind, replay, True))
            for replay in replays
        )
        ours = examiner.kill(mutant)
        at_float32 = ours.killed and ":float32:" in ours.where
        rows.append((mutant, theirs, ours.where.split(":")[1] if at_float32 else ""))
    print("| mutant | chapter | ONNX cases that notice it | ours, the first |")
    print("| --- | --- | ---: | --- |")
    for mutant, theirs, where in rows:
        if options.all or not theirs or not where:
            print(f"| {mutant.name} | {mutant.chapter} | {theirs} | {where or 'none'} |")
    print("\n| chapter | mutants | killed by ONNX | killed by this suite |")
    print("| --- | ---: | ---: | ---: |")
    for chapter in (*CHAPTERS, "all"):
        own = [row for row in rows if chapter in (row[0].chapter, "all")]
        by_them, by_us = sum(bool(row[1]) for row in own), sum(bool(row[2]) for row in own)
        print(f"| {chapter} | {len(own)} | {by_them} | {by_us} |")
    print(f"\n{time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
