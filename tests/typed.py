"""Check the types of the whole package: `python tests/typed.py`.

An installed package has `conformance.reports` inside; in a checkout, it lies beside. A type checker
does not follow an editable install, so this lays links in `build/typed`, as a wheel has its files.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINKS = ROOT / "build" / "typed" / "conformance"


def lay_links() -> None:
    """Make a link for every file and room of the package."""
    LINKS.mkdir(parents=True, exist_ok=True)
    for link in LINKS.iterdir():
        link.unlink()
    for path in [*(ROOT / "conformance").iterdir(), ROOT / "reports"]:
        if path.name != "__pycache__":
            (LINKS / path.name).symlink_to(path, target_is_directory=path.is_dir())


if __name__ == "__main__":
    lay_links()
    options = ["--config-file", str(ROOT / "pyproject.toml"), *sys.argv[1:]]
    raise SystemExit(subprocess.call([sys.executable, "-m", "mypy", *options], cwd=LINKS.parent))
