"""Is every line of code that depends on the device run by a test, without a GPU?

    pip install coverage
    python benchmarks/device_lines.py           runs the tests that run these lines, for long
    python benchmarks/device_lines.py --list    prints the lines, and runs nothing

A statement depends on the device if it names one, by `NAMES` or `WORDS`, if it stands under a
condition that does, or in a function whose name does. The bridge to a framework that is not
installed is left out, and named, and so are files that know the CPU only, in `ON_CPUS_ONLY`.

The tests run stand-ins for GPUs, see `tests/test_device.py`. Statements that no test has run are
printed with the file and the line, and make the exit code 1.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from coverage import CoverageData

ROOT = Path(__file__).parents[1]
NAMES = re.compile(
    r"device|gpu|cuda|cudnn|accelerator|synchronize|block_until_ready|is_cpu|_on_cpu|empty_cache"
    r"|memory_stats|mem_get_info|poison|\bcpu\b|triton_interpret|toolkit|driver",
    re.IGNORECASE,
)
"""The pattern of names of variables, attributes, arguments and functions that concern devices."""

WORDS = re.compile(r"(cpu|gpu|cuda|meta)(:\d)?|cuda\w*|TRITON_INTERPRET|.*_is_available", re.ASCII)
"""The pattern of strings that name a device, as a whole."""

TESTS = (
    "test_device.py",
    "test_gpu.py",
    "test_flash_attention.py",
    "test_checks.py",
    "test_commands.py",
    "test_conversion.py",
    "test_diagnose.py",
    "test_explore.py",
    "test_faults.py",
    "test_functions.py",
    "test_gate_command.py",
    "test_growth.py",
    "test_jax_bridge.py",
    "test_hostile.py",
    "test_long.py",
    "test_ours_attention.py",
    "test_probes_paths.py",
    "test_record.py",
    "test_report.py",
    "test_reproduce.py",
    "test_suite_plugin.py",
    "test_tutorials.py",
)
"""The tests that run these lines, and those of the night among them."""

NEEDS = {
    "conformance/frameworks/jax_bridge.py": "jax",
    "conformance/frameworks/mlx_bridge.py": "mlx",
    "conformance/frameworks/paddle_bridge.py": "paddle",
    "conformance/frameworks/tensorflow_bridge.py": "tensorflow",
    "conformance/frameworks/tinygrad_bridge.py": "tinygrad",
    "conformance/frameworks/torch_bridge.py": "torch",
}
"""The frameworks without which a file cannot be run."""

ON_CPUS_ONLY = {
    "adapters/deepspeed_ulysses.py": "its devices are ranks",
    "adapters/flax_sharded.py": "its devices are those that JAX makes of a CPU",
    "adapters/jax_mesh.py": "its devices are those that JAX makes of a CPU",
    "adapters/jax_sharded.py": "its devices are those that JAX makes of a CPU",
    "adapters/keras_sharded.py": "its devices are those that JAX makes of a CPU",
    "adapters/ours/jax_ring.py": "its devices are those that JAX makes of a CPU",
    "adapters/pallas_tpu_splash.py": "it is for TPUs",
    "adapters/torch_dtensor.py": "its devices are ranks",
    "conformance/adapter/world.py": "ranks run on the CPU",
    "conformance/frameworks/numpy_bridge.py": "it knows the CPU only",
    "conformance/frameworks/openvino_bridge.py": "it knows the CPU only",
    "conformance/judging/": "candidates are judged on the CPU",
    "conformance/running/matrix.py": "it asks for nodes, not for devices",
}
"""Files, and folders, that no GPU ever sees, and why."""


def main() -> int:
    """Print what was not run, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument(
        "--data", type=Path, help="a file of coverage.py, made if it does not exist"
    )
    options = parser.parse_args()
    found = {file: statements(file) for file in files()}
    if options.list:
        for file, spans in found.items():
            text = file.read_text(encoding="utf-8").splitlines()
            for first, _ in spans:
                print(f"{file.relative_to(ROOT)}:{first}: {text[first - 1].strip()}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        ran = lines_run(options.data or Path(folder) / "data")
    missed = total = 0
    for file, spans in found.items():
        text, name = file.read_text(encoding="utf-8").splitlines(), str(file.relative_to(ROOT))
        if name in NEEDS and find_spec(NEEDS[name]) is None:
            print(f"{name}: left out, because {NEEDS[name]} is not installed")
            continue
        total += len(spans)
        for first, last in spans:
            line = text[first - 1].strip()
            if not ran.get(name, set()).isdisjoint(range(first, last + 1)):
                continue
            missed += 1
            print(f"{name}:{first}: {line}")
    print(f"{total} statements depend on the device; {missed} of them were run by no test")
    return 1 if missed else 0


def files() -> Iterator[Path]:
    """Yield the files of the code that calls implementations."""
    for folder in ("conformance", "adapters"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if not str(file.relative_to(ROOT)).startswith((*ON_CPUS_ONLY,)):
                yield file


def statements(file: Path) -> list[tuple[int, int]]:
    """Return the first and the last line of each statement that depends on the device."""
    found: list[tuple[int, int]] = []

    def visit(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.stmt):
                visit(child, inside)
                continue
            own = [one for one in ast.iter_child_nodes(child) if not isinstance(one, ast.stmt)]
            depends = any(names_device(one) for part in own for one in walk(part))
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                # That a function is defined says nothing: its body has to be run.
                named = isinstance(child, ast.FunctionDef) and NAMES.search(child.name)
                visit(child, inside or bool(named))
                continue
            ends = min((part.lineno for part in blocks(child)), default=child.end_lineno + 1) - 1
            if (inside or depends) and not is_text(child):
                found.append((child.lineno, max(child.lineno, ends)))
            branches = isinstance(child, ast.If | ast.While | ast.With | ast.For)
            visit(child, inside or (branches and depends))

    tree = ast.parse(file.read_text(encoding="utf-8"))
    visit(tree, inside=False)
    return [span for span in found if span not in imports(tree)]


def blocks(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Yield the statements that stand directly within a statement."""
    for node in ast.iter_child_nodes(statement):
        if isinstance(node, ast.stmt):
            yield node
        elif isinstance(node, ast.ExceptHandler | ast.match_case):
            yield from node.body


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node of a statement's head and all below it, without the statements in it."""
    if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from walk(child)


def names_device(node: ast.AST) -> bool:
    """Return whether a node is a name or a string of a device."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
            return bool(NAMES.search(name))
        case ast.Constant(value=str(text)):
            return bool(WORDS.fullmatch(text))
    return False


def is_text(statement: ast.stmt) -> bool:
    """Return whether a statement is a docstring, which nobody runs."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def imports(tree: ast.AST) -> set[tuple[int, int]]:
    """Return the lines of annotations and of what only a type checker reads."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and node.value is None:
            found.add((node.lineno, node.end_lineno or node.lineno))
    return found


def lines_run(data: Path) -> dict[str, set[int]]:
    """Return the lines that the tests run, by file; run the tests unless `data` exists."""
    if not data.exists():
        settings = data.with_name(f"{data.name}-settings")
        settings.write_text(
            f"[run]\nparallel = true\ndata_file = {data}\nsource = {ROOT}\n"
            "patch = subprocess, _exit\nconcurrency = multiprocessing,thread\nsigterm = true\n"
        )
        environment = {**os.environ, "COVERAGE_RCFILE": str(settings), "OMP_NUM_THREADS": "1"}
        tests = [str(ROOT / "tests" / name) for name in TESTS]
        for words in (
            ["run", "-m", "pytest", "-q", "-m", "night or not night", *tests],
            ["combine", "--quiet"],
        ):
            command = [sys.executable, "-m", "coverage", *words]
            subprocess.run(command, cwd=ROOT, env=environment, check=True)
    read = CoverageData(str(data))
    read.read()
    return {
        str(Path(file).relative_to(ROOT)): set(read.lines(file) or ())
        for file in read.measured_files()
        if Path(file).is_relative_to(ROOT)
    }


if __name__ == "__main__":
    sys.exit(main())
