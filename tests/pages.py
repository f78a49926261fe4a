"""The documentation as its readers have it: pages, their blocks, and commands in a shell."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import children

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = {"mha-conformance": "conformance", "python": "", "pytest": "pytest"}
"""First words of commands, and their modules: those of this environment are meant."""


class Block(NamedTuple):
    """A fenced block, and the line of the page in which its text begins."""

    language: str
    text: str
    line: int


def blocks(page: Path, *languages: str) -> list[Block]:
    """The page's blocks, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(found[1], found[2], text.count("\n", 0, found.start()) + 2)
        for found in BLOCK.finditer(text)
        if found[1] in languages
    ]


def prose(page: Path) -> str:
    """The page without its blocks."""
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def commands(console: str) -> list[tuple[str, list[str]]]:
    """Commands of a block with the lines that they print."""
    found: list[tuple[str, list[str]]] = []
    for line in console.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line.strip():
            found[-1][1].append(line)
    return found


def shell(command: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command as a reader would."""
    program, _, rest = command.partition(" ")
    if program in PROGRAMS:
        module = PROGRAMS[program]
        own = children.python("-m", module) if module else [sys.executable]
        command = f"{shlex.join(own)} {rest}"
    environment = {
        name: value
        for name, value in os.environ.items()
        # pytest prints more where it sees that no human reads it.
        if "PYTEST" not in name and name not in ("CI", "BUILD_NUMBER")
    }
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "80", "NO_COLOR": "1"}
    return subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=False,
    )


def missing(wanted: list[str], printed: str) -> Iterator[str]:
    """Lines that a page shows and a command did not print, in this order.

    `...` and measured numbers (1.5e+07) stand for what varies. Columns may be wider or narrower.
    """
    rest = iter(printed.splitlines())
    for line in wanted:
        measured = re.sub(r"\d\.\d+e[+-]\d+", "\0", _spaced(line)).replace("...", "\0")
        pattern = ".*".join(re.escape(part) for part in measured.split("\0"))
        if not any(re.fullmatch(pattern, _spaced(it)) for it in rest):
            yield line
            return


def _spaced(line: str) -> str:
    """With two blanks between columns, and none at the end."""
    return re.sub(r"(?<=\S) {2,}", "  ", line.rstrip())
