"""Mutate the code of the suite that judges, and see whether the suite's own tests notice.

    cd tests && python -m mutants.own_code [--module NAME] [--quick] [--part 2/40]

Each mutant is a module with one small change: another comparison or operator, a constant that is
one more, a condition that always holds, a statement that is missing. It runs in a fork, which
imports the changed module in place of the file, until one of the tests that cover it fails.

`mutmut` needs a copy of the tree in which a package lies where its name says, and cannot sample;
`cosmic-ray` edits the files themselves and needs 8 s for a mutant. This takes 1 to 3 s.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

TESTS = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
LIMIT = 90.0
"""Seconds after which a mutant counts as noticed: it hangs, or it is far slower."""

SWAPS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.Add,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
}
NAMES = {"any": "all", "min": "max", "maximum": "minimum", "isfinite": "isnan", "argmax": "argmin"}
NAMES |= {new: old for old, new in NAMES.items()}

IDLE = ("strict", "maxsize", "slots", "frozen", "eq", "kw_only", "default_factory", "repr", "hash")
"""Keywords that are mutated in vain: what they forbid, no correct code does."""


@dataclass(frozen=True)
class Mutant:
    """One change: `number` counts the changes of a module in the order of its syntax tree."""

    module: str
    number: int
    where: str
    line: int
    change: str

    @property
    def id(self) -> str:
        """What stays as it is while other parts of the module are edited."""
        return f"{self.module}:{self.where}: {self.change}"


def file_of(module: str) -> Path:
    """Return the file of a module of the suite."""
    folder = TESTS.parent / module.replace(".", "/")
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in place of a node."""

    def changed(**fields: Any) -> ast.AST:
        other = copy.copy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return ast.copy_location(other, node)

    match node:
        case ast.Compare(ops=operators):
            for place, operator in enumerate(operators):
                for swap in SWAPS[type(operator)]:
                    yield changed(ops=[*operators[:place], swap(), *operators[place + 1 :]])
        case ast.BinOp(op=operator) | ast.AugAssign(op=operator):
            yield from (changed(op=swap()) for swap in SWAPS.get(type(operator), ()))
            if isinstance(node, ast.AugAssign):
                yield ast.Pass()
        case ast.BoolOp(op=operator, values=values):
            yield changed(op=ast.Or() if isinstance(operator, ast.And) else ast.And())
            if len(values) > 2:
                for place in range(len(values)):
                    yield changed(values=[*values[:place], *values[place + 1 :]])
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield changed(value=not value)
        case ast.Constant(value=int() as value):
            yield from (changed(value=value + 1), changed(value=value - 1))
        case ast.Constant(value=float() as value):
            yield changed(value=2 * value if value else 1.0)
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield changed(value=ast.Constant(None))
        case ast.Continue() | ast.Break() | ast.Raise():
            yield ast.Pass()
        case ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()):
            yield ast.Pass()
        case ast.If() | ast.IfExp():
            yield from (changed(test=ast.Constant(value)) for value in (True, False))
        case ast.comprehension(ifs=[*filters]):
            for place in range(len(filters)):
                yield changed(ifs=[*filters[:place], *filters[place + 1 :]])
        case ast.Name(id=name, ctx=ast.Load()) if name in NAMES:
            yield changed(id=NAMES[name])
        case ast.Attribute(attr=name, ctx=ast.Load()) if name in NAMES:
            yield changed(attr=NAMES[name])
        case ast.Slice():
            for name in ("lower", "upper"):
                bound = getattr(node, name)
                if bound and not isinstance(bound, ast.Constant):
                    yield changed(**{name: ast.BinOp(bound, ast.Add(), ast.Constant(1))})


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def changes(tree: ast.Module) -> Iterator[tuple[str, ast.AST, ast.AST, Any]]:
    """Yield, for every change of a module: where, the node before and after, and how to make it."""

    def walk(node: ast.AST, where: str) -> Iterator[tuple[str, ast.AST, ast.AST, Any]]:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_comment", "msg"):
                continue
            for place, child in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(child, ast.AST):
                    continue
                if isinstance(child, ast.keyword) and child.arg in IDLE:
                    continue
                if isinstance(child, ast.JoinedStr) or _is_for_types(child):
                    continue
                inner = where
                if isinstance(child, ast.FunctionDef | ast.ClassDef):
                    inner = f"{where}.{child.name}".lstrip(".")
                for other in replacements(child):
                    yield inner, child, other, (node, name, place if value is not child else None)
                yield from walk(child, inner)

    yield from walk(tree, "")


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def mutants(module: str) -> list[Mutant]:
    """Return every mutant of a module."""
    seen: Counter[str] = Counter()
    found = []
    tree = ast.parse(file_of(module).read_text(encoding="utf-8"))
    for number, (where, old, new, _) in enumerate(changes(tree)):
        before, after = (_head(node) for node in (old, new))
        change = f"{before} -> {after}"
        seen[f"{where}: {change}"] += 1
        if (again := seen[f"{where}: {change}"]) > 1:
            change += f" #{again}"
        found.append(Mutant(module, number, where, getattr(old, "lineno", 0), change))
    return found


def _head(node: ast.AST) -> str:
    """Return a node as text, a statement without its body."""
    text = "if ".join(("", *map(ast.unparse, node.ifs))) if isinstance(node, ast.comprehension) \
        else ast.unparse(ast.fix_missing_locations(node))  # fmt: skip
    return text.splitlines()[0].strip() if text else "no condition"


def mutated(mutant: Mutant) -> ast.Module:
    """Return the syntax tree of the module with the change made."""
    tree = ast.parse(file_of(mutant.module).read_text(encoding="utf-8"))
    for number, (_, _, new, (parent, field, place)) in enumerate(changes(tree)):
        if number == mutant.number:
            if place is None:
                setattr(parent, field, new)
            else:
                getattr(parent, field)[place] = new
            return ast.fix_missing_locations(tree)
    raise ValueError(f"{mutant.id} does not exist")


class Replaced(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module with the change, and all others as they are."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.module, str(file_of(mutant.module)))
        self.mutant = mutant

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.mutant.module:
            return None
        folder = [str(Path(self.path).parent)] if Path(self.path).stem == "__init__" else None
        return importlib.util.spec_from_file_location(
            fullname, self.path, loader=self, submodule_search_locations=folder
        )

    def get_code(self, fullname: str) -> Any:
        return compile(mutated(self.mutant), self.path, "exec")


def survives(mutant: Mutant | None, tests: Sequence[str]) -> bool:
    """Return whether no test fails in a fork that imports the mutant, or the original if None."""
    child = os.fork()
    if not child:
        os.setsid()
        sink = os.open(os.environ.get("OWN_CODE_LOG", os.devnull), os.O_WRONLY | os.O_CREAT)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        code = 1
        try:
            if mutant:
                sys.meta_path.insert(0, Replaced(mutant))
            import hypothesis
            import pytest

            # Whether there is an example, the same each time, and not which is the smallest.
            phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
            quick = hypothesis.settings(phases=phases, derandomize=True, database=None)
            hypothesis.settings.register_profile("own-code", quick)
            hypothesis.settings.load_profile("own-code")
            os.chdir(TESTS.parent)
            options = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist"]
            options += ["-m", ""]
            code = int(pytest.main([*options, *tests]))
        finally:
            os._exit(code)
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what survived that the table does not call equivalent; return 1 if something did."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(prog="python -m mutants.own_code")
    parser.add_argument("--module", action="append", default=[], help="only modules with this name")
    parser.add_argument("--quick", action="store_true", help="only modules with quick tests")
    parser.add_argument("--part", default="1/1", help="2/40: the second of forty parts")
    options = parser.parse_args(arguments)
    tests = {**table["quick"], **({} if options.quick else table["slow"])}
    names = [one for one in tests if not options.module or any(m in one for m in options.module)]
    every = [mutant for name in names for mutant in mutants(f"conformance.{name}")]
    # By the id, so that a mutant stays in its part while the code around it changes.
    part, parts = map(int, options.part.split("/"))
    every = [one for one in every if crc32(one.id.encode()) % parts == part % parts]
    # Imported once, before the forks; nothing of the suite itself.
    for name in ("torch", "hypothesis", "jinja2", "safetensors.numpy", "tomlkit", "rich.console"):
        importlib.import_module(name)
    began, counts = time.monotonic(), Counter[str]()
    for mutant in every:
        if (reason := table["equivalent"].get(mutant.id)) is not None:
            counts["equivalent"] += 1
            assert reason, f"{mutant.id}: why is it equivalent?"
        elif survives(mutant, tests[mutant.module.removeprefix("conformance.")]):
            counts["survived"] += 1
            print(f"survived: {mutant.id} (line {mutant.line})", flush=True)
        else:
            counts["killed"] += 1
    tried = counts["killed"] + counts["survived"]
    print(
        f"{counts['killed']} of {tried} mutants killed, {counts['equivalent']} more are equivalent,"
        f" in {time.monotonic() - began:.0f} s"
    )
    return 1 if counts["survived"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
