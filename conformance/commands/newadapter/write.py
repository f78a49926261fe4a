"""What is written, under which names."""

from __future__ import annotations

import importlib.util
import keyword
import re
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from conformance.errors import ConformanceError

FRAMEWORKS = {"torch": "torch", "jax": "JAX", "tensorflow": "TensorFlow", "numpy": "NumPy"}
KINDS = ("function", "layer")
PACKAGES = {
    "torch": " torch",
    "jax": " jax",
    "tensorflow": " tensorflow",
    "numpy": "",
}
"""What a build installs beside the suite."""


@dataclass(frozen=True)
class Wanted:
    """What to write.

    Attributes:
        name: as the user calls it, "MyAttention" or "my_attention".
    """

    name: str
    framework: str
    kind: str

    def __post_init__(self) -> None:
        for name in (self.module, self.adapter):
            if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
                raise ConformanceError(
                    f"{self.name!r} is no name for Python; say one such as MyAttention"
                )
        if importlib.util.find_spec(self.module) and not Path(f"{self.module}.py").exists():
            raise ConformanceError(
                f"a file {self.module}.py would hide the module {self.module}; say another name"
            )

    @property
    def module(self) -> str:
        """Name of the file, without .py."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", self.name).lower()

    @property
    def adapter(self) -> str:
        """Name of the adapter in it: classes are written in one way, functions in another."""
        if self.kind == "function":
            return self.module
        return "".join(word[:1].upper() + word[1:] for word in self.name.split("_"))

    def files(self) -> dict[str, str]:
        """Name to text of everything that is written."""
        test = f"test_{self.module}.py"
        values = {
            "module": self.module,
            "name": self.adapter,
            "layer": f"{self.adapter}Layer",
            "title": "An attention" if self.kind == "function" else "An attention layer",
            "test": test,
            "framework": self.framework,
            "library": FRAMEWORKS[self.framework],
            "packages": PACKAGES[self.framework],
            "baseline": " --baseline conformance.toml",
        }
        environment = Environment(
            loader=PackageLoader("conformance.commands.newadapter", ""),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        return {
            name: environment.get_template(template).render(values)
            for name, template in (
                (f"{self.module}.py", f"{self.kind}.py.j2"),
                (test, "test.py.j2"),
                ("conformance-github.yml", "github.yml.j2"),
                ("conformance-gitlab.yml", "gitlab.yml.j2"),
            )
        }


def write(wanted: Wanted, folder: Path) -> list[Path]:
    """Write all files, or none.

    Raises:
        ConformanceError: one of them is there, or the folder cannot be written to.
    """
    files = {folder / name: text for name, text in wanted.files().items()}
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
