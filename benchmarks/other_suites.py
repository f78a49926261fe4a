"""What do other suites notice? The ONNX Attention node cases against the zoo.

    pip install onnx==1.23.2
    PYTHONPATH=tests python benchmarks/other_suites.py
    PYTHONPATH=tests python benchmarks/other_suites.py --all

The node cases of the operator Attention (onnx.backend.test) are replayed, as ONNX's runner does it:
rtol 1e-3, atol 1e-7, the output only, in float32. They know no weights of projections, no gradients
and no modes, so only those mutants of `mha-conformance selftest` are put before them that change
the function between projected heads and context, and show in float32. Each runs on the plain and on
the fused path.

A case is replayed if it can be said to the attention: no soft cap, no window, one dtype. The causal
flag is aligned as ONNX does it, so mutants of the alignment are left out, and those of a padding
that no replayed case has. Cases that expand the operator into others hold the same numbers, and are
left out.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from mutants.attention import Attention, Given
from mutants.contestant import Contestant
from mutants.mutant import Mutant
from mutants.run import Examiner
from mutants.zoo import SMALL

from conformance.definition.dtypes import FLOAT32
from conformance.definition.problem import Shape

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


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="print every mutant, not survivors only")
    options = parser.parse_args()
    begun = time.monotonic()
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
