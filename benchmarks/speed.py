"""The figures that this repository holds itself to: its size, and how long things take.

    python benchmarks/speed.py            all of the following but `core`, `large` and `tox`
    python benchmarks/speed.py house      lines, names and features of conformance/ and tests/
    python benchmarks/speed.py help       mha-conformance --help
    python benchmarks/speed.py torch      suite time / time in the implementation's own calls
    python benchmarks/speed.py core       level "core" for a kernel of head size 128 in tiles of 128
    python benchmarks/speed.py large      the suite's share of the time at level "large"
    python benchmarks/speed.py flax       CPU time of each Flax implementation, with compilation
    python benchmarks/speed.py probe      mha-conformance probe, with everything that it imports
    python benchmarks/speed.py tox        both commands of the README, in a fresh clone

Each measurement runs in a process of its own. Times are wall-clock times, unless they are said to
be those of the CPU.
"""

from __future__ import annotations

import ast
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FEATURES = {"soft cap": "soft[ _-]?cap", "sinks": r"\bsinks?\b", "rotary": "rotary"}
INNER = "--inside"


def house() -> None:
    """The goals: 27,000 lines of code, 40,000 of tests, no name twice, a feature in 10 files."""
    modules = [path for path in (ROOT / "conformance").rglob("*.py") if path.is_file()]
    texts = {path: path.read_text(encoding="utf-8") for path in modules}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    code = sum(len(lines_of_code(trees[path], texts[path])) for path in modules)
    tests = sum(
        path.read_text(encoding="utf-8").count("\n") for path in (ROOT / "tests").rglob("*.py")
    )
    names = Counter(
        node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)
    )
    print(
        f"modules: {len(modules)}, lines: {sum(text.count(chr(10)) for text in texts.values()):,d}"
    )
    print(f"lines of code: {code:,d} (goal 27,000), of tests: {tests:,d} (goal 40,000)")
    print(f"class names that occur twice: {sum(n > 1 for n in names.values())} (goal 0)")
    for feature, pattern in FEATURES.items():
        known = sum(bool(re.search(pattern, text, re.IGNORECASE)) for text in texts.values())
        print(f"modules that name {feature}: {known} (goal 10)")


def lines_of_code(tree: ast.Module, text: str) -> set[int]:
    """The numbers of the lines without docstrings, imports, blank lines and comments."""
    lines = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#")
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or is_text:
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def help_() -> None:
    """The claim: at most 0.2 s."""
    command = [sys.executable, "-m", "conformance", "--help"]
    times = [seconds(command) for _ in range(9)]
    print(f"mha-conformance --help: median {statistics.median(times):.2f} s (limit 0.2)")


def tox() -> None:
    """The claims: 300 s from nothing but a warm cache of packages, 30 s where nothing changed, and
    360 s for the tests."""
    command = [sys.executable, "-m", "tox"]
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        seconds(["git", "clone", "--quiet", str(ROOT), str(clone)])
        print(f"tox, from nothing: {seconds(command, clone):.0f} s (limit 300)")
        print(f"tox, unchanged: {seconds(command, clone):.0f} s (limit 30)")
        print(f"tox -e tests: {seconds([*command, '-e', 'tests'], clone):.0f} s (limit 360)")


def seconds(command: list[str], folder: Path = ROOT) -> float:
    """How long a command takes; raises `CalledProcessError` if it fails."""
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def suite(implementation: str, cache: str = "", *selected: str) -> tuple[float, float, str]:
    """CPU seconds of the whole suite and of the implementation's own calls, and pytest's last line.

    `cache` is where expectations are kept, if not in the user's cache; what is selected is the
    catalogue, if nothing else.
    """
    command = [sys.executable, __file__, INNER, implementation, *selected]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}
    environment |= {"MHA_CONFORMANCE_CACHE": cache} if cache else {}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = done.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("seconds "):
        sys.exit(f"{implementation}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    _, whole, own = lines[-1].split()
    return float(whole), float(own), lines[-2]


def inside(implementation: str, *selected: str) -> None:
    """One suite run with the implementation's own calls timed; imports are not counted.

    Its own calls are those of the framework's `evaluate`: the forward pass and, where there are
    gradients, the backward pass, on native arrays. An adapter with a `_native` of its own does
    the same there. Seconds are those of the CPU, so that what else the machine does hardly matters.
    """
    import conformance.running.run  # noqa: F401 - imports are not counted
    from conformance.adapter.loading import load
    from conformance.adapter.native import NativeAdapter
    from conformance.cli import main as command

    # Also not what the framework imports at its first derivative.
    small = ["--case", "plain/no-mask/self", "--dtype", "float32", "--no-isolate"]
    command(["run", implementation, *small])
    adapter = load(implementation)
    owner: Any = type(adapter.bridge)
    name, own = "evaluate", [0.0]
    if type(adapter)._native is not NativeAdapter._native:
        owner, name = type(adapter), "_native"
    evaluate = getattr(owner, name)

    def timed(self, *arguments, **options):
        started = time.process_time()
        try:
            return evaluate(self, *arguments, **options)
        finally:
            own[0] += time.process_time() - started

    setattr(owner, name, timed)
    started = time.process_time()
    chosen = selected or ("--case", "*/*/*")  # the catalogue; `probe` is timed below
    command(["run", implementation, "--no-isolate", *chosen])
    print(f"seconds {time.process_time() - started:.3f} {own[0]:.3f}")


def torch() -> None:
    """The claim: at most 2.5 times the implementation's own forward and backward calls.

    The first run computes what is expected; the others, which count, find it in the cache.
    """
    ratios = []
    with tempfile.TemporaryDirectory() as cache:
        for run in ("first", "second", "third", "fourth"):
            whole, own, last_line = suite("torch-mha", cache)
            ratios.append(whole / own)
            figures = f"suite {whole:.1f} s, own calls {own:.1f} s, ratio {whole / own:.2f}"
            print(f"torch-mha, {run} run: {figures}")
    print(f"torch-mha: median ratio {statistics.median(ratios[1:]):.2f} (limit 2.5); {last_line}")


def core() -> None:
    """The claim: at most 60 s for a kernel in NumPy with gradients, with nothing kept before."""
    name = "tests/mutants/sizes.py:Sized"
    with tempfile.TemporaryDirectory() as cache:
        for state in ("cold", "warm"):
            whole, own, last_line = suite(name, cache, "--level", "core")
            figures = f"suite {whole - own:.1f} s, own calls {own:.1f} s, {whole:.1f} s (limit 60)"
            print(f"{name}, {state}: {figures}; {last_line}", flush=True)


def large(*selected: str) -> None:
    """The claim: the suite takes at most 1.5 times what the implementation's own calls take.

    At first it computes what is expected, and the second time it finds that in the cache. The same
    arguments as for `mha-conformance run` select a part of the level.
    """
    for name in ("torch-mha", "torch-sdpa", "docs/examples/numpy_function.py:attention"):
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                whole, own, last_line = suite(name, cache, "--level", "large", *selected)
                figures = f"suite {whole - own:.1f} s, own calls {own:.1f} s"
                share = f"share {(whole - own) / own:.2f} (limit 1.5)"
                print(f"{name}, {state}: {figures}, {share}; {last_line}", flush=True)


def flax() -> None:
    """The claim: at most 30 s each."""
    for name in ("flax-linen", "flax-nnx"):
        whole, own, last_line = suite(name)
        print(f"{name}: {whole:.1f} s (limit 30), {own:.1f} s compiling and calling; {last_line}")


def probe() -> None:
    """The claims: torch within 15 s, an implementation on JAX within 40 s."""
    limits = {"torch-mha": 15, "flax-linen": 40, "flax-nnx": 40, "keras-jax-mha": 40}
    for name, limit in limits.items():
        started = time.perf_counter()
        command = [sys.executable, "-m", "conformance", "probe", name, "--json"]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            sys.exit(f"{name}: {done.stderr.decode()[-2000:]}")
        entries = done.stdout.count(b'"subject"')
        taken = time.perf_counter() - started
        print(f"mha-conformance probe {name}: {taken:.1f} s (limit {limit}), {entries} entries")


def main(names: list[str]) -> None:
    """Run the named benchmarks; without a name, all but `core`, `large` and `tox`."""
    benchmarks = {"house": house, "help": help_, "torch": torch, "flax": flax, "probe": probe}
    every = benchmarks | {"core": core, "large": large, "tox": tox}
    if names[:1] == ["large"]:
        large(*names[1:])
        return
    for name in names or list(benchmarks):
        if name not in every:
            sys.exit(f"unknown benchmark {name!r}; known: {', '.join(every)}")
        every[name]()


if __name__ == "__main__":
    if sys.argv[1:2] == [INNER]:
        inside(*sys.argv[2:])
    else:
        main(sys.argv[1:])
