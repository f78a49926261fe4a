"""The judge of kernels: cheats get nothing, and their honest twins what they deserve.

Every candidate runs in a process of its own, in a sandbox that stays warm.
"""

from __future__ import annotations

import base64
import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from cheats import CHEATS, NUMPY, TORCH
from mutants.miniatures import Correct

import conformance
from conformance.adapter.arguments import CausalFlag
from conformance.adapter.features import RotaryBase, RotaryConfig, RotaryTables
from conformance.adapter.function import attention_function
from conformance.adapter.loading import load
from conformance.cases.case import FAMILIES
from conformance.cases.catalogue import case_of, every_case
from conformance.cli import main
from conformance.commands.judge import _told
from conformance.errors import ConformanceError
from conformance.judging import pool, runner, sandbox
from conformance.judging.judge import Judging, Task, fresh, needs_of
from conformance.judging.pool import Candidates, Options
from conformance.judging.sandbox import (
    CandidateLimits,
    IsolationMissing,
    Lost,
    Sandbox,
    Worker,
    check,
)
from conformance.judging.verdict import Marks, scored
from conformance.records.findings import Figures, Finding
from conformance.requirements.examination import ResultMemory
from conformance.running import isolation

TOKEN = "5eed" * 8
TASK = Task(chapters=("plain", "mask"), dtypes=("float32",), gradients=False)
FEW = Task(cases=("plain/no-mask/cross",), dtypes=("float32",), gradients=False)
MISJUDGED = (
    "depends-on-the-call-before",
    "declares-that-heads-have-size-one",
    "declares-that-there-is-one-head",
    "declares-tf32-to-be-less-accurate",
    "calls-a-reference-of-the-library",
    "traces-the-library-on-import",
    "hides-a-call-under-names-of-the-library",
    "hides-a-call-in-an-operator-of-its-own",
    "hides-a-call-in-a-class-of-autograd",
    "remembers-by-content",
    "remembers-in-a-thread",
    "has-a-buffer-for-every-other-call",
    "renames-the-variables-of-the-library",
    "runs-the-layer-for-quantization",
    "takes-the-backward-of-the-library",
    "calls-the-library-by-its-binary-interface",
    "calls-the-library-of-another-format",
    "compiles-the-source-of-the-library-anew",
    "carries-its-answers-past-the-observer",
)
"""Cheats that were no cheats once, or whose twins were wrong."""
SOME = [
    cheat
    for place, cheat in enumerate(CHEATS)
    if os.environ.get("JUDGE_EVERY_CHEAT") or place % 4 == 0 or cheat.name in MISJUDGED
]
"""The cheats to ask; `tox -e cheats` asks all."""
TOKENS = [f"{number:032x}" for number in range(int(os.environ.get("JUDGE_TOKENS", "1")))]
"""For the honest twins. For fifty: JUDGE_TOKENS=50 tox -e cheats -- tests/test_judge.py -k twin"""


def isolated():
    try:
        check("bubblewrap")
    except IsolationMissing:
        return False
    return True


pytestmark = pytest.mark.skipif(not isolated(), reason="bubblewrap is not available")


@pytest.fixture(scope="module")
def boxes():
    """A judge with sandboxes by framework, which stay warm."""
    limits = CandidateLimits(item=4, file=8)
    with Candidates(Options(TASK, TOKEN, hints=0, limits=limits)) as held:
        yield held


def judged(boxes, source, framework="numpy", **more):
    """The verdict of a judge that remembers what is expected, with other options."""
    pytest.importorskip(framework)
    default = ResultMemory(256) if "token" in more else boxes.expectations
    expectations = more.pop("expectations", default)
    options = dataclasses.replace(boxes.options, **more)
    judge = dataclasses.replace(boxes, options=options, expectations=expectations)
    return judge.judge_source("candidate.py", source, "attention")


FIRST = {cheat.kind: cheat for cheat in reversed(SOME)}
"""The first cheat of each kind, which belongs to each commit."""
EVERY = pytest.mark.parametrize(
    "cheat",
    [
        pytest.param(cheat, marks=[] if cheat in FIRST.values() else [pytest.mark.night])
        for cheat in SOME
    ],
    ids=lambda cheat: cheat.name,
)


@EVERY
def test_a_cheat_gets_nothing(boxes, cheat):
    task = dataclasses.replace(TASK, gradients=cheat.gradients)
    verdict = judged(boxes, cheat.source, cheat.framework, own_work=cheat.own_work, task=task)
    assert verdict.score == 0, verdict
    assert verdict.verdict != "right"
    if cheat.kind:
        assert verdict.verdict == "cheat"
        assert cheat.kind in {trick.kind for trick in verdict.tricks}


@pytest.fixture(scope="module")
def remembered():
    """What is expected of all twins, by token."""
    return defaultdict(lambda: ResultMemory(256))


@pytest.mark.parametrize("token", TOKENS)
@EVERY
def test_an_honest_twin_gets_what_it_deserves(boxes, remembered, cheat, token):
    more = {"token": token, "expectations": remembered[token], "own_work": cheat.own_work}
    more["task"] = dataclasses.replace(TASK, gradients=cheat.gradients)
    verdict = judged(boxes, cheat.twin, cheat.framework, **more)
    assert verdict.verdict == "right", verdict
    assert verdict.score > 0.8


# What a verdict says


def honest(name="garbage-collector"):
    (found,) = [cheat.twin for cheat in CHEATS if cheat.name == name]
    return found


def test_a_token_replays_bit_for_bit(boxes):
    source = honest().replace("right(query, key, value, mask)", "right(query, key, value)")
    task = Task(cases=("mask/key-padding/cross",), dtypes=("float32",), gradients=False)
    asked = {"task": task, "hints": 1, "token": "ab" * 16}
    one, other = (judged(boxes, source, **asked) for _ in range(2))
    assert one.verdict == "wrong"
    assert one.causes
    assert msgspec.structs.replace(one, seconds=0) == msgspec.structs.replace(other, seconds=0)


@pytest.mark.sample(4)
@pytest.mark.parametrize("declared", ["", ", geometry=Geometry(head_sizes=(16,), tiles=(8, 8))"])
@pytest.mark.parametrize("level", ["core", "full"])
def test_the_command_of_a_cause_asks_its_problem_again(boxes, declared, level):
    unscaled = f"""
from conformance import Geometry, attention_function
@attention_function("numpy"{declared})
def attention(query, key, value):
    return right(query * query.dtype.type(2), key, value)
"""
    task = dataclasses.replace(TASK, level=level)
    memory = ResultMemory(256)
    wrong = judged(boxes, NUMPY + unscaled, task=task, hints=1, expectations=memory)
    (cause,) = wrong.causes
    words = cause.reproduce.split()
    told = dict(zip(words[3::2], words[4::2], strict=True))
    task = Task(told["--level"], (), (told["--dtype"],), cases=(told["--case"],))
    again = judged(boxes, NUMPY + unscaled, task=task, hints=9, token=told["--token"])
    assert cause in again.causes


def test_full_asks_at_the_sizes_of_the_catalogue_too():
    by_level = {}
    for level in ("core", "full"):
        task = dataclasses.replace(TASK, level=level, cases=("plain/no-mask/gqa",))
        judging = Judging(Correct(), task, TOKEN, ResultMemory(9))
        by_level[level] = {item.id: item.asked.shape for item in judging.items()}
    (jittered,) = by_level["core"].values()
    assert len(by_level["full"]) == 2
    assert set(by_level["full"].values()) == {jittered, FAMILIES["gqa"]}
    assert jittered != FAMILIES["gqa"]


def test_the_least_accurate_class_is_reported():
    found = []
    for reached in ("A0", "B", "C"):
        figures = Figures("output", 1.0, 1.0, 0.0, 8.0, reached)
        finding = Finding("output.equals-definition", "conforms", figures=figures)
        item = SimpleNamespace(dtype="bfloat16")
        found.append((item, SimpleNamespace(findings=[finding])))
    judging = Judging(Correct(), Task("core", (), (), True), TOKEN, ResultMemory(9), found=found)
    assert judging.accuracy() == {"bfloat16": "C"}


def test_one_candidate_is_no_folder(tmp_path):
    for name in ("one.py", "other.py"):
        (tmp_path / name).write_text("")
    with pytest.raises(ConformanceError, match="a folder; name a file in it"):
        conformance.judge(tmp_path)


def test_blind_verdicts_have_no_hints(boxes):
    verdict = judged(boxes, honest(), blind=True, task=FEW)
    assert verdict.score > 0
    assert (verdict.causes, verdict.chapters, verdict.token) == ([], {}, "")


FAULTS = {
    "does-not-import": "import no_such_package",
    "no-python": "def attention(query,",
    "another-signature": "import numpy as np\ndef attention(x):\n    return x",
    "ends-on-import": "raise SystemExit(0)",
    "dies-on-import": "import os\nos.abort()",
    "no-function": "import numpy as np\nattention = 3",
    "a-forged-declaration": """
import os, struct
for text in (b'{"id": "", "declared": {}}', b"[" * 10**5):
    for number in range(3, 64):
        try: os.write(number, struct.pack("<II", len(text), 0) + text)
        except OSError: pass
""",
    "prints-megabytes": "import numpy as np\nprint('x' * 10**7)\n"
    "def attention(query, key, value):\n    print('x' * 10**6)\n    return value[:0]",
    "a-false-declaration": """
from conformance import Geometry, attention_function
@attention_function("numpy", geometry=Geometry(head_sizes=(10**9,)))
def attention(query, key, value): return query
""",
    "hangs": "import numpy as np, time\ndef attention(query, key, value):\n    time.sleep(99)",
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_its_own_candidate_only(boxes, fault):
    verdict = judged(boxes, FAULTS[fault], task=FEW)
    assert (verdict.verdict, verdict.score) in {("failed", 0.0), ("wrong", 0.0)}, verdict
    assert judged(boxes, honest(), task=FEW).verdict == "right"


LEFT = {
    "a-file": ("open('/tmp/left', 'w')", "os.path.exists('/tmp/left')"),
    "a-file-in-memory": ("open('/dev/shm/left', 'w')", "os.path.exists('/dev/shm/left')"),
    "shared-memory": ("c.shmget(77, 4096, 0o1666)", "c.shmget(77, 4096, 0) >= 0"),
    "semaphores": ("c.semget(77, 1, 0o1666)", "c.semget(77, 1, 0) >= 0"),
    "a-queue": ("c.msgget(77, 0o1666)", "c.msgget(77, 0) >= 0"),
    "a-priority": ("os.setpriority(0, os.getppid(), 7)", "os.getpriority(0, 0) == 7"),
    "a-limit": ("resource.prlimit(os.getppid(), resource.RLIMIT_DATA, (1, 1))", "False"),
    "processors": (
        "os.sched_setaffinity(os.getppid(), [min(os.sched_getaffinity(0))])",
        f"len(os.sched_getaffinity(0)) < {len(os.sched_getaffinity(0))}",
    ),
    "a-preference": (
        "open(f'/proc/{os.getppid()}/oom_score_adj', 'w').write('500')",
        "open('/proc/self/oom_score_adj').read().strip() == '500'",
    ),
}


@pytest.mark.sample(9)
@pytest.mark.parametrize("place", LEFT)
def test_nothing_is_left_for_the_next(boxes, place):
    leave, find = LEFT[place]
    imports = "import ctypes, os, resource\nc = ctypes.CDLL(None)\n"
    judged(boxes, f"{imports}{leave}", task=FEW)
    finds = f"{imports}if {find}: raise ValueError('found')\n{honest()}"
    verdict = judged(boxes, finds, task=FEW)
    assert verdict.verdict == "right", verdict.why


GEOMETRY = """
from conformance import Geometry, MaskArgument, attention_function
declared = attention_function(
    "numpy",
    MaskArgument("mask", "batch heads query key", true="attends", number="added", broadcasts=True),
    geometry=Geometry({}),
    grouped=True,
)
attention = declared(right)
"""


@pytest.mark.night
@pytest.mark.parametrize(
    "geometry", ["head_sizes=(4,), groups=(1,)", "head_sizes=(2,), tiles=(2, 2), groups=(1,)"]
)
def test_to_declare_less_gains_nothing(boxes, geometry):
    plain = judged(boxes, NUMPY + "\nattention = right")
    fewer = judged(boxes, NUMPY + GEOMETRY.format(geometry))
    assert fewer.verdict == "right", fewer
    assert fewer.score <= plain.score


def test_multiples_are_small(boxes):
    verdict = judged(boxes, NUMPY + GEOMETRY.format("head_sizes=(4,), multiples=(1021, 1024)"))
    assert verdict.verdict == "failed"
    assert "multiples" in verdict.why


@pytest.mark.parametrize(
    ("geometry", "told"),
    [
        ("head_sizes=(1024,), heads=(1024,), tiles=(1024, 1024)", "1024 heads of size 1024"),
        ("head_sizes=(2,), heads=(1024,), tiles=(1024, 1024)", "logits"),
    ],
)
def test_a_geometry_that_takes_too_much_memory_is_refused(boxes, geometry, told):
    verdict = judged(boxes, NUMPY + GEOMETRY.format(geometry))
    assert verdict.verdict == "failed"
    assert told in verdict.why
    assert len(verdict.why.splitlines()) == 1


MASKLESS = "attention = lambda query, key, value: right(query, key, value)"


def test_a_verdict_says_how_much_is_supported(boxes):
    task = Task(cases=("plain/no-mask/cross", "causal/*"), dtypes=("float32",), gradients=False)
    plain = judged(boxes, NUMPY + MASKLESS, task=task)
    assert plain.verdict == "right"
    assert 0 < plain.supports < 1
    assert f"right in the {int(100 * plain.supports)} % that it supports" in _told(plain)
    whole = judged(boxes, honest(), task=FEW)
    assert whole.supports == 1
    assert ": right, 1.000" in _told(whole)


@pytest.mark.night
def test_what_is_required_must_be_supported(boxes):
    task = Task(chapters=("plain",), dtypes=("float32",), gradients=False, require=("mask",))
    assert judged(boxes, honest(), task=task).verdict == "right"
    without = judged(boxes, NUMPY + MASKLESS, task=task)
    assert (without.verdict, without.score) == ("failed", 0.0)
    assert without.why.endswith("required: mask")
    # It takes no fewer key/value heads than heads, which no argument tells.
    grouped = dataclasses.replace(task, require=("grouped", "mask"))
    assert judged(boxes, honest(), task=grouped).why.endswith("required: grouped")


def test_a_requirement_that_does_not_exist_is_an_error():
    with pytest.raises(ConformanceError, match="windows"):
        Options(Task(require=("windows",))).checked()


def test_a_dtype_is_asked_once(boxes):
    twice = GEOMETRY.format("head_sizes=(4,)").replace("grouped=True", 'dtypes=("float32",) * 9')
    once = GEOMETRY.format("head_sizes=(4,)").replace("grouped=True", 'dtypes=("float32",)')
    asked = {judged(boxes, NUMPY + text, task=FEW).asked for text in (twice, once)}
    assert len(asked) == 1


def test_what_supports_next_to_nothing_is_not_right(boxes):
    few = """
from conformance import Unsupported
class Small(Unsupported): pass
def attention(query, key, value, mask=None):
    if query.shape != (2, 4, 7, 6):
        raise Small("another size")
    return right(query, key, value, mask)
"""
    verdict = judged(boxes, NUMPY + few)
    assert (verdict.verdict, verdict.score) == ("failed", 0.0), verdict


def test_what_is_printed_is_thrown_away(boxes):
    prints = """
import sys
print("imported", flush=True)
def attention(query, key, value, mask=None):
    print("called \\ud800", flush=True)
    print("called", file=sys.stderr, flush=True)
    return right(query, key, value, mask)
"""
    assert judged(boxes, NUMPY + prints).verdict == "right"


def test_half_a_character_in_an_exception_can_be_sent(boxes):
    assert "ValueError: x\\ud800" in judged(boxes, "raise ValueError('x\\ud800')").why


def test_a_file_that_cannot_be_read_costs_its_neighbours_nothing(tmp_path):
    good = NUMPY + "\nattention = right\n"
    (tmp_path / "good.py").write_text(good)
    (tmp_path / "says-latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe4\n" + good.encode())
    (tmp_path / "marked.py").write_text(good, encoding="utf-8-sig")
    (tmp_path / "latin.py").write_bytes(b"# \xe4\n" + good.encode())
    (tmp_path / "dangling.py").symlink_to(tmp_path / "none")
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "large.py").write_bytes(b"#" * 2**21)
    (tmp_path / os.fsdecode(b"name-\xff.py")).write_text(good)
    verdicts = {
        os.path.basename(verdict.candidate.partition(":")[0]): verdict
        for verdict in pool.judged([str(tmp_path)], Options(FEW, hints=0))
    }
    right = {name for name, verdict in verdicts.items() if verdict.verdict == "right"}
    assert right == {"good.py", "says-latin.py", "marked.py", "name-\\xff.py"}
    failed = {name for name, verdict in verdicts.items() if verdict.verdict == "failed"}
    assert failed == {"latin.py", "dangling.py", "folder.py", "pipe.py", "large.py"}
    assert all("cannot be read" in verdicts[name].why for name in failed)
    msgspec.json.encode([*verdicts.values()])


def test_a_verdict_is_one_line(boxes):
    forged = judged(boxes, "raise ValueError('x\\nother.py:attention: right, 1.000')")
    assert len(_told(forged).splitlines()) == 1


def test_sizes_of_heads_are_few(boxes):
    sizes = "Geometry(head_sizes=tuple(range(2, 999)))"
    text = FAULTS["a-false-declaration"].replace("Geometry(head_sizes=(10**9,))", sizes)
    verdict = judged(boxes, text)
    assert "at most 8 sizes" in verdict.why
    assert verdict.asked == 0


@pytest.mark.night
def test_a_compiled_function_of_jax_is_judged():
    pytest.importorskip("jax")
    source = """
import jax

@jax.jit
def attention(query, key, value):
    logits = query @ key.swapaxes(-1, -2) * query.shape[-1] ** -0.5
    return jax.nn.softmax(logits, -1) @ value
"""
    task = dataclasses.replace(TASK, cases=("plain/no-mask/cross",))
    with Candidates(Options(task, TOKEN, limits=CandidateLimits(item=60))) as candidates:
        verdict = candidates.judge_source("candidate.py", source, "attention")
    assert (verdict.verdict, verdict.tricks) == ("right", []), verdict


SCRIPTABLE = """
import torch
from functools import partial
from typing import Optional

def computed(query, key, value, mask: Optional[torch.Tensor] = None):
    logits = (query @ key.transpose(-2, -1)) * query.size(-1) ** -0.5
    if mask is not None:
        if mask.dtype == torch.bool:
            logits = logits.masked_fill(~mask, float("-inf"))
        else:
            logits = logits + mask
    return torch.softmax(logits, -1) @ value

class Layer(torch.nn.Module):
    def forward(self, query, key, value, mask: Optional[torch.Tensor] = None):
        return computed(query, key, value, mask)

class Kernel:
    def __call__(self, query, key, value, mask=None):
        return computed(query, key, value, mask)

def scaled(scale, query, key, value, mask=None, *, sign):
    return computed(scale * sign * query, key, value, mask)

attention = """
FORMS = {
    "a-script": "torch.jit.script(computed)",
    "a-scripted-module": "torch.jit.script(Layer())",
    "a-module": "Layer()",
    "an-object": "Kernel()",
    "a-method": "Layer().forward",
    "a-partial": "partial(scaled, -1.0, sign=-1.0)",
    "a-partial-of-a-script": "partial(torch.jit.script(computed))",
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("form", FORMS)
def test_what_can_be_called_is_a_candidate(boxes, form):
    pytest.importorskip("torch")
    cases = (*FEW.cases, "mask/key-padding/cross")
    options = dataclasses.replace(boxes.options, task=dataclasses.replace(FEW, cases=cases))
    judge = dataclasses.replace(boxes, options=options)
    # The name of the function is not given.
    verdict = judge.judge_source("candidate.py", SCRIPTABLE + FORMS[form], "")
    assert (verdict.verdict, verdict.score) == ("right", 1.0), verdict
    assert verdict.candidate == "candidate.py:attention"


TILED = """
def flash_attention(query, key, value, tile):
    total, peak = query.new_zeros(query.shape[:3]), query.new_full(query.shape[:3], float("-inf"))
    output = query.new_zeros(*query.shape[:3], value.shape[-1])
    for start in range(0, key.shape[2], tile):
        keys, values = key[:, :, start : start + tile], value[:, :, start : start + tile]
        logits = (query @ keys.mT) * query.shape[-1] ** -0.5
        higher = torch.maximum(peak, logits.amax(-1))
        powers, shrink = (logits - higher[..., None]).exp(), (peak - higher).exp()
        total, peak = total * shrink + powers.sum(-1), higher
        output = output * shrink[..., None] + powers @ values
    return output / total[..., None]

class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value):
        ctx.save_for_backward(query, key, value)
        return flash_attention(query, key, value, 4)

    @staticmethod
    def backward(ctx, gradient):
        query, key, value = ctx.saved_tensors
        scale = query.shape[-1] ** -0.5
        weights = torch.softmax(query @ key.mT * scale, -1)
        through = gradient @ value.mT
        slopes = weights * (through - (through * weights).sum(-1, keepdim=True)) * scale
        return slopes @ key, slopes.mT @ query, weights.mT @ gradient

def attention(query, key, value):
    return Kernel.apply(query, key, value)
"""
PROGRAM = """
#include <math.h>
#include <stdint.h>
void flash_attention(const float *q, const float *k, const float *v, float *out,
                     int64_t heads, int64_t queries, int64_t keys, int64_t size, int64_t width) {
    for (int64_t row = 0; row < heads * queries; row++) {
        const float *own = k + row / queries * keys * size;
        const float *values = v + row / queries * keys * width;
        double peak = -INFINITY, total = 0, sums[256] = {0};
        for (int64_t key = 0; key < keys; key++) {
            double logit = 0;
            for (int64_t i = 0; i < size; i++)
                logit += (double)q[row * size + i] * own[key * size + i];
            logit /= sqrt(size);
            double higher = fmax(peak, logit);
            double shrink = exp(peak - higher), power = exp(logit - higher);
            total = total * shrink + power;
            peak = higher;
            for (int64_t i = 0; i < width; i++)
                sums[i] = sums[i] * shrink + power * values[key * width + i];
        }
        for (int64_t i = 0; i < width; i++) out[row * width + i] = sums[i] / total;
    }
}
"""
LOADED = """
import base64, ctypes
from conformance import attention_function
with open("/tmp/own.so", "wb") as file:
    file.write(base64.b64decode({}))
library = ctypes.CDLL("/tmp/own.so")

@attention_function("torch", dtypes=("float32",), differentiable=False)
def attention(query, key, value):
    query, key, value = (array.contiguous() for array in (query, key, value))
    output = query.new_empty(*query.shape[:3], value.shape[-1])
    places = [ctypes.c_void_p(array.data_ptr()) for array in (query, key, value, output)]
    batch, heads, queries, size = query.shape
    sizes = batch * heads, queries, key.shape[2], size, value.shape[-1]
    library.flash_attention(*places, *map(ctypes.c_int64, sizes))
    return output
"""


def built(folder):
    """A library in C, as text for the source of a candidate."""
    (folder / "own.c").write_text(PROGRAM)
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", "own.so", "own.c", "-lm"]
    subprocess.run(command, cwd=folder, check=True)
    return repr(base64.b64encode((folder / "own.so").read_bytes()))


@pytest.mark.parametrize(
    "own", ["c", *(pytest.param(own, marks=pytest.mark.night) for own in ("tiles", "compiled"))]
)
def test_own_work_is_no_cheat(boxes, tmp_path, own):
    source = {
        "tiles": lambda: TORCH + TILED,
        "c": lambda: TORCH + LOADED.format(built(tmp_path)),
        "compiled": lambda: (
            TORCH
            + "def own(query, key, value):\n    return right(query, key, value)\n"
            + 'attention = torch.compile(own, backend="aot_eager")\n'
        ),
    }[own]()
    task = dataclasses.replace(FEW, gradients=own == "tiles")
    limits = CandidateLimits(start=120, item=60, once=120)
    options = dataclasses.replace(boxes.options, task=task, own_work=True, limits=limits)
    with Candidates(options, boxes.expectations) as candidates:
        verdict = candidates.judge_source("candidate.py", source, "attention")
    assert (verdict.verdict, verdict.calls, verdict.score) == ("right", [], 1.0), verdict


COMPILES = """
import runpy, sys
import torch
if sys.argv[1:]:
    runpy.run_path(sys.argv[1])["keep_plain_operations"]()

@torch.compile
def attention(query, key, value):
    logits = torch.matmul(query, key.transpose(-2, -1)).div(query.shape[-1] ** 0.5)
    return logits.softmax(dim=-1).matmul(value)

arrays = torch.randn(3, 2, 4, 8, 16).unbind()
with torch.no_grad():
    attention(*arrays)
    with torch.autograd.profiler.profile() as profiled:
        attention(*arrays)
print(any("attention" in event.name for event in profiled.function_events))
"""


@pytest.mark.night
@pytest.mark.parametrize("kept", [True, False])
def test_the_compiler_puts_no_attention_in_the_place_of_plain_operations(tmp_path, kept):
    pytest.importorskip("torch")
    (tmp_path / "compiles.py").write_text(COMPILES)
    command = [sys.executable, "compiles.py", *([runner.__file__] if kept else [])]
    own = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        command, cwd=tmp_path, env=own, capture_output=True, text=True, check=True
    )
    # Without the measure, it does: otherwise this test would show nothing.
    assert done.stdout.split()[-1] == str(not kept)


def test_a_missing_isolation_is_an_error(monkeypatch):
    monkeypatch.setattr("conformance.judging.sandbox._why_not", lambda: "there is none")
    with pytest.raises(IsolationMissing, match="--isolation limits"):
        check("bubblewrap")


def test_less_isolation_is_said(boxes):
    options = dataclasses.replace(boxes.options, isolation="limits", limits=CandidateLimits())
    with Candidates(options, boxes.expectations) as candidates:
        verdict = candidates.judge_source("candidate.py", honest(), "attention")
    assert verdict.verdict == "right"
    assert verdict.isolation.lacks


REACHES = """
import ctypes, os
own = os.getppid()
judge = int(open(f"/proc/{own}/stat").read().rpartition(")")[2].split()[1])
libc, word = ctypes.CDLL(None), (ctypes.c_long * 2)()
for pid in (own, judge):
    try:
        open(f"/proc/{pid}/mem", "r+b").close()
    except OSError:
        pass
    else:
        raise ValueError(f"reached the memory of {pid}")
    # PTRACE_SEIZE
    done = libc.ptrace(0x4206, pid, 0, 0), libc.process_vm_writev(pid, word, 0, word, 0, 0)
    if done != (-1, -1):
        raise ValueError(f"reached {pid}")
"""


def test_less_isolation_keeps_the_memory_of_the_judge(boxes):
    options = dataclasses.replace(boxes.options, isolation="limits", task=FEW)
    with Candidates(options, boxes.expectations) as candidates:
        verdict = candidates.judge_source("candidate.py", REACHES + honest(), "attention")
    assert verdict.verdict == "right", verdict.why


def test_what_root_lacks_is_said(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (tmp_path / "one.py").write_text(honest())
    few = ["--case", FEW.cases[0], "--dtype", "float32", "--no-gradients"]
    main(["judge", str(tmp_path / "one.py"), "--isolation", "limits", *few])
    assert sandbox.AS_ROOT in capsys.readouterr().err


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_candidate_that_ends_what_would_end_it_is_ended(tmp_path, name):
    pid = tmp_path / "pid"
    source = f"""
import os, pathlib, signal, time
pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))
os.kill(os.getppid(), signal.{name})
while True:
    time.sleep(600)
"""
    with Sandbox("limits", CandidateLimits(start=3), ("numpy",)) as box:
        worker = Worker(box)
        with pytest.raises(Lost):
            worker.load(source, "candidate.py", "attention", "numpy", profiled=False)

    def alive():
        try:
            return ") Z" not in Path("/proc", pid.read_text(), "stat").read_text()
        except OSError:
            return False

    while alive():
        time.sleep(0.02)


@pytest.mark.parametrize("heads", [True, False])
def test_fresh_numbers_are_finite_in_float16(heads):
    case = {one.id: one for one in every_case()}["logits/beyond-float16/separate"]
    for number in range(30):
        problem = fresh(case, f"{number:08x}", heads=heads).problem("float16")
        assert np.isfinite(problem.key).all()
        assert np.abs(problem.key).max() > 10_000


def test_core_asks_both_half_precisions():
    adapter = type("Adapter", (), {"dtypes": ("float16", "bfloat16", "float64", "float32")})
    assert Task().dtypes_of(adapter) == ("float32", "bfloat16", "float16")
    assert Task(dtypes=("float16",)).dtypes_of(adapter) == ("float16",)
    assert Task("full").dtypes_of(adapter) == adapter.dtypes


def test_a_torch_without_its_profiler_is_named(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.delattr(torch.autograd, "_enable_profiler_legacy")
    with pytest.raises(RuntimeError, match="_enable_profiler_legacy"):
        runner.TorchArrays()


SPENDS = """
import time
calls = [0]

def spend(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

def attention(query, key, value, mask=None):
    calls[0] += 1
    {}
    return right(query, key, value, mask)
"""


def timed(boxes, spends, **limits):
    source = NUMPY + SPENDS.format(spends)
    options = dataclasses.replace(boxes.options, task=FEW, limits=CandidateLimits(**limits))
    with Candidates(options, boxes.expectations) as candidates:
        return candidates.judge_source("candidate.py", source, "attention")


@pytest.mark.night
def test_what_is_done_once_may_take_longer_than_a_problem(boxes):
    first = "if calls[0] == 1: spend(1)"
    assert timed(boxes, first, item=0.5, once=10).verdict == "right"
    assert timed(boxes, first, item=0.5, once=0).verdict == "wrong"


@pytest.mark.night
def test_what_is_done_once_is_not_done_at_every_call(boxes):
    verdict = timed(boxes, "spend(1)", item=0.5, once=1)
    assert verdict.verdict != "right"
    assert "1 s of CPU time for all answers" in verdict.why


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("hangs", "told"),
    [
        ("time.sleep(10**6)", "within 1 s of sleeping time"),
        ("while True: time.sleep(0.001)", "within 1 s of sleeping time"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "within 1 s of sleeping time"),
        ("while True: pass", "within 1 s of CPU and sleeping time, beside 0.5 s of CPU time"),
    ],
    ids=["sleeps", "naps", "is-stopped", "spins"],
)
def test_what_does_not_end_is_ended(boxes, hangs, told):
    verdict = timed(boxes, hangs, item=1, once=0.5)
    assert (verdict.verdict, verdict.score) == ("wrong", 0.0)
    assert told in verdict.why


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("import time; time.sleep(10**6)", "wrong"),
        ("while True: pass", "wrong"),
        ("import time\nwhile time.process_time() < 1.5: pass", "right"),
    ],
    ids=["sleeps", "spins", "computes"],
)
def test_processes_that_a_candidate_starts_are_on_its_clock(boxes, program, verdict):
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"
    spends = f"if calls[0] == 1: {starts}"
    assert timed(boxes, spends, item=1, once=2, processes=4096).verdict == verdict


@pytest.mark.night
def test_all_of_a_candidate_has_a_limit_too(boxes):
    verdict = timed(boxes, "spend(0.5)", seconds=1)
    assert verdict.verdict == "wrong"
    assert "CPU and sleeping time" in verdict.why


@pytest.fixture
def loaded():
    """One processor, which three busy loops share with this process and what it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(before)])
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    yield
    for one in busy:
        one.kill()
        one.wait()
    os.sched_setaffinity(0, before)


@pytest.mark.night
@pytest.mark.usefixtures("loaded")
def test_a_loaded_machine_is_no_fault_of_a_candidate(boxes, monkeypatch):
    # Whatever else this machine does may leave it a hundredth of the processor.
    monkeypatch.setattr(sandbox, "SLOWEST", 300)
    verdict = timed(boxes, "if calls[0] == 1: spend(0.7)", item=1, once=0)
    assert verdict.verdict == "right", verdict


def test_the_clock_of_a_process_stands_still_while_it_waits_for_a_processor(monkeypatch):
    monkeypatch.setattr(isolation, "_activity", lambda *_, **__: (0.0, False))
    clock = isolation.Clock(1)
    clock.read(2.0)
    assert (clock.cpu, clock.asleep, clock.own) == (0.0, 0.0, 0.0)
    assert clock.seconds == 2.0 / isolation.SLOWEST


def test_where_processes_are_hidden_elapsed_time_counts(monkeypatch):
    def hidden(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(isolation, "stat_of", hidden)
    clock = isolation.Clock(os.getpid())
    clock.read(2.0)
    assert clock.seconds == clock.own == 2.0


@pytest.mark.sample(2)
@pytest.mark.parametrize(("stopped", "found"), [(True, sandbox.SANDBOX_LOST), (False, "")])
def test_a_slow_sandbox_is_not_a_stopped_one(monkeypatch, stopped, found):
    with Sandbox("bubblewrap", CandidateLimits(), ("numpy",)) as box:
        worker = Worker(box)
        os.kill(box._runner, signal.SIGSTOP)
        if not stopped:
            monkeypatch.setattr(sandbox, "_is_stopped", lambda pid: False)
            box.limits = CandidateLimits(start=0.05)
        assert box.bury() == found
        worker.close()


@pytest.mark.night
def test_a_hang_in_the_repetition_costs_the_score(boxes):
    hangs = """
import time
seen, calls, inner = {}, 0, attention
def attention(query, key, value, mask=None):
    global calls
    calls += 1
    name = query.tobytes() + key.tobytes() + (b"" if mask is None else mask.tobytes())
    if calls - seen.setdefault(name, calls) > 60:
        time.sleep(99)
    return inner(query, key, value, mask)
"""
    verdict = judged(boxes, honest() + hangs)
    assert verdict.score == 0
    assert "no answer within" in verdict.why, verdict


def test_the_score_never_falls_with_what_is_right():
    names = [("plain", "a"), ("plain", "b"), ("mask", "c"), ("bias", "d")]
    random = np.random.default_rng(0)
    for _ in range(200):
        before = random.random((len(names), 2)) < 0.5
        after = before | (random.random(before.shape) < 0.3)
        scores = [
            scored(
                {
                    (*n, "single"): [Marks(True, *map(bool, m))]
                    for n, m in zip(names, marks, strict=True)
                },
                gradients=True,
            )
            for marks in (before, after)
        ]
        assert 0 <= scores[0] <= scores[1] <= 1


def test_where_nothing_isolates_no_candidate_runs_on_a_node_either(monkeypatch):
    monkeypatch.setattr(sandbox, "_why_not", lambda: "bubblewrap does not work: no walls")
    with pytest.raises(IsolationMissing) as raised, Candidates(Options()) as candidates:
        candidates.judge_source("attempt.py", "def attention(query, key, value): ...", "attention")
    assert str(raised.value).count("no walls") == 1
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_the_time_of_a_candidate_also_ends_after_a_lost_process():
    judging = Judging(load("torch-sdpa"), TASK, TOKEN, ResultMemory(8), lost=["it hung"])
    judging.is_over = lambda: True
    judging.run()
    assert {result.verdict for _, result in judging.found} == {"not-run"}


def test_a_feature_is_required_with_what_it_is_nothing_without():
    assert needs_of(case_of("feature/position-axes/self")) == {"position-axes"}
    assert needs_of(case_of("feature/position-axes-with-norm/self")) == {
        "position-axes",
        "query/key-norm",
    }
    assert needs_of(case_of("feature/rotary/self")) == {"rotary"}


BOTTOM_RIGHT = CausalFlag("causal", "bottom-right")
ONE_CONVENTION = {
    "rotary halves": ([RotaryTables(alignment="bottom-right"), BOTTOM_RIGHT], ["rotary"], []),
    "rotary neighbours": (
        [RotaryTables(pairs="interleaved", alignment="top-left")],
        ["rotary"],
        [],
    ),
    "rotary of equal lengths": ([RotaryTables(), BOTTOM_RIGHT], ["rotary"], ["rotary"]),
    "rotary by a base": (
        [RotaryBase("base", "size", alignment="top-left")],
        ["rotary", "rotary-scaling"],
        ["rotary with rotary-scaling"],
    ),
    "rotary without causal": (
        [RotaryTables(alignment="top-left")],
        ["rotary", "causal"],
        ["causal"],
    ),
    "causal": ([BOTTOM_RIGHT], ["causal"], []),
    "causal of equal lengths": ([CausalFlag("causal")], ["causal"], ["causal"]),
    "sections side by side": (
        [RotaryConfig(axes="axes", alignment="top-left", sections=("side by side",))],
        ["position-axes"],
        [],
    ),
    "sections interleaved": (
        [
            RotaryConfig(
                axes="axes", key_axes="keys", alignment="top-left", sections=("interleaved",)
            )
        ],
        ["position-axes"],
        [],
    ),
    "no positions on axes": (
        [RotaryConfig(alignment="top-left")],
        ["position-axes"],
        ["position-axes"],
    ),
}
"""What is declared, what is required, and what is lacking."""


@pytest.mark.sample(4)
@pytest.mark.parametrize("level", ["core", pytest.param("full", marks=pytest.mark.night)])
@pytest.mark.parametrize("name", ONE_CONVENTION)
def test_one_convention_is_enough_for_what_is_required(name, level):
    declared, required, lacks = ONE_CONVENTION[name]
    adapter = attention_function(
        "numpy",
        causal_flag=next((one for one in declared if isinstance(one, CausalFlag)), None),
        features=tuple(one for one in declared if not isinstance(one, CausalFlag)),
    )(lambda query, key, value, **_: np.zeros((*query.shape[:-1], value.shape[-1]), query.dtype))
    task = Task(level, ("plain",), ("float32",), gradients=False, require=(*required,))
    judging = Judging(adapter, task, TOKEN, ResultMemory(8))
    judging.run()
    assert judging.lacking() == lacks
