"""`mha-conformance new-adapter`: write the first files of a new adapter."""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.commands.shared import Commands
from conformance.errors import ConformanceError, ExitCode

if TYPE_CHECKING:
    from conformance.commands.recognising import Recognised

FRAMEWORKS = {"torch": "torch", "jax": "JAX", "tensorflow": "TensorFlow", "numpy": "NumPy"}
KINDS = ("function", "layer")


def add_parser(commands: Commands) -> None:
    """Add the parser of this command to `commands`."""
    new = commands.add_parser(
        "new-adapter",
        help="write a first adapter with its test and CI files",
        description="Write an adapter, its test, and builds for GitHub Actions and GitLab: around "
        "a function that is there, as in new-adapter mine.py:attention, or around an attention "
        "that conforms, to put your own in its place. On a terminal, you are asked for missing "
        "options. Nothing is overwritten.",
    )
    new.add_argument(
        "new_name",
        metavar="name",
        nargs="?",
        help="such as MyAttention or my_kernel; or path/to/file.py:NAME, a function to wrap",
    )
    new.add_argument("--framework", choices=FRAMEWORKS, help="framework in which it runs")
    new.add_argument(
        "--kind",
        choices=KINDS,
        help="a function of projected heads, or a layer with weights of its own",
    )
    new.add_argument(
        "-o",
        "--output",
        type=Path,
        help="a folder for the files (default: here, or beside the function that is wrapped)",
    )
    new.set_defaults(action=_new)


def _new(options: argparse.Namespace) -> int:
    if options.new_name and (":" in options.new_name or options.new_name.endswith(".py")):
        return _wrap(options)
    options.output = options.output or Path()
    installed = next((name for name in FRAMEWORKS if find_spec(name)), "numpy")
    new = NewAdapter(
        options.new_name or _asked("name", "my_attention"),
        options.framework or _asked("framework", installed, tuple(FRAMEWORKS)),
        options.kind or _asked("kind", KINDS[0], KINDS),
    )
    _write(
        new,
        options.output,
        "It conforms as it is. See for yourself, then put your own in its place:",
    )
    return ExitCode.OK


def _write(new: NewAdapter, folder: Path, what: str) -> None:
    """Write the files of `new` into the folder, and print their paths and what to do next."""
    written = write(new, folder)
    for path in written:
        print(path)
    kept = [name for name in BUILDS if folder / name not in written]
    if kept:
        print(f"{', '.join(kept)}: kept as it was; add {new.module}.py:{new.adapter} to its gate")
    print(f"\n{what}\n")
    print(f"  mha-conformance run {shlex.quote(f'{written[0]}:{new.adapter}')}")
    print(f"  pytest {shlex.quote(str(written[1]))}")


def _wrap(options: argparse.Namespace) -> int:
    """Write an adapter of a function that is there; return the exit code."""
    from conformance.commands.recognising import recognise
    from conformance.text import stdout_to_stderr

    if options.kind == "layer":
        raise ConformanceError(
            f"{options.new_name}: a layer has weights of its own, whose layout cannot be "
            "recognised; new-adapter NAME --kind layer writes an adapter to start from"
        )
    with stdout_to_stderr():
        found = recognise(options.new_name, options.framework)
    place, _, function = options.new_name.partition(":")
    folder = Path(place).parent if place.endswith(".py") else Path()
    output = options.output or folder
    if output.resolve() != folder.resolve():
        raise ConformanceError(
            f"the adapter of {options.new_name} imports it, so it is written beside it; say "
            f"-o {folder}, or nothing"
        )
    name = function.rpartition(".")[2]
    _write(NewAdapter(f"{name}_adapter", found.framework, "function", found), output, found.told)
    return ExitCode.OK


def _asked(what: str, default: str, choices: tuple[str, ...] | None = None) -> str:
    """Ask the user for a value at a prompt, and return it; Enter alone selects the default.

    Args:
        what: the name of the value, which is the prompt.
        choices: the valid values; None for any.

    Raises:
        ConformanceError: if stdin is not a terminal, or ends.
    """
    if not sys.stdin.isatty():
        told = f"--{what} {' or '.join(choices)}" if choices else f"a name, such as {default}"
        raise ConformanceError(f"new-adapter: which {what}? say {told}")
    from rich.prompt import Prompt

    try:
        return Prompt.ask(what, choices=list(choices) if choices else None, default=default)
    except EOFError as error:
        raise ConformanceError(f"new-adapter: which {what}?") from error


BUILDS = {
    "conformance-github.yml": "github.yml.j2",
    "conformance-gitlab.yml": "gitlab.yml.j2",
}
"""The template of each CI configuration, by file name; adapters in one folder share these files."""


@dataclass(frozen=True)
class NewAdapter:
    """An adapter to write, together with its test and CI files.

    Attributes:
        name: the name that the user gave, such as "MyAttention" or "my_attention".
        framework: a key of `FRAMEWORKS`.
        kind: "function" or "layer".
        wrapped: what was recognised of a function that is there; None for an attention to replace.

    Raises:
        ConformanceError: if the name is not an ASCII identifier or is a keyword, or if the
            adapter's file would hide an importable module other than a file in the current folder.
    """

    name: str
    framework: str
    kind: str
    wrapped: Recognised | None = None

    def __post_init__(self) -> None:
        for name in (self.module, self.adapter):
            if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
                raise ConformanceError(
                    f"{self.name!r} is an invalid identifier; give one such as MyAttention"
                )
        if find_spec(self.module) and not Path(f"{self.module}.py").exists():
            raise ConformanceError(
                f"a file {self.module}.py would hide the module {self.module}; say another name"
            )

    @property
    def module(self) -> str:
        """The name of the adapter's file in snake_case, without ".py"."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", self.name).lower()

    @property
    def adapter(self) -> str:
        """The name of the adapter in its file: CamelCase for a layer, snake_case for a function."""
        if self.wrapped is not None:
            return self.wrapped.function
        if self.kind == "function":
            return self.module
        return "".join(word[:1].upper() + word[1:] for word in self.name.split("_"))

    def files(self) -> dict[str, str]:
        """Return the text of every file to write, by file name."""
        from importlib import metadata

        from jinja2 import Environment, PackageLoader, StrictUndefined

        environment = Environment(
            loader=PackageLoader("conformance.commands", "newadapter"),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        links = metadata.metadata("mha-conformance").get_all("Project-URL") or []
        templates = {
            f"{self.module}.py": f"{'wrapped' if self.wrapped else self.kind}.py.j2",
            f"test_{self.module}.py": "test.py.j2",
            **BUILDS,
        }
        values = {
            "module": self.module,
            "name": self.adapter,
            "layer": f"{self.adapter}Layer",
            "title": "An attention" if self.kind == "function" else "An attention layer",
            "test": f"test_{self.module}.py",
            "framework": self.framework,
            "library": FRAMEWORKS[self.framework],
            "packages": "" if self.framework == "numpy" else f" {self.framework}",
            "baseline": " --baseline conformance.toml",
            "source": dict(link.split(", ", 1) for link in links)["Source"],
        }
        if self.wrapped is not None:
            values |= {
                "function": self.wrapped.function,
                "origin": self.wrapped.origin,
                "source": self.wrapped.source,
                "imports": self.wrapped.imports,
                "declared": self.wrapped.declared,
                "ignored": self.wrapped.ignored,
                "filled": self.wrapped.filled,
            }
        return {
            name: environment.get_template(template).render(values)
            for name, template in templates.items()
        }


def write(new: NewAdapter, folder: Path) -> list[Path]:
    """Write the files of `new` into the folder; return the paths written, the adapter first.

    A folder that does not exist is created. CI configurations that exist already, such as those of
    another adapter, are left as they are.

    Raises:
        ConformanceError: if the adapter or its test exists, or the folder cannot be written to.
    """
    files = {
        folder / name: text
        for name, text in new.files().items()
        if name not in BUILDS or not (folder / name).exists()
    }
    there = [str(path) for path in files if path.exists() or path.is_symlink()]
    if there:
        raise ConformanceError(f"{', '.join(there)}: already there; nothing was written")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConformanceError(f"{folder}: cannot be written ({error.strerror})") from error
    return list(files)
