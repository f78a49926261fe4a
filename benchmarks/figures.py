"""The figures that this repository holds itself to: its size, its structure, and its speed.

    python benchmarks/figures.py           size, structure, and the time of `--help`
    python benchmarks/figures.py --tox     also both commands of the README, in a fresh clone

Sizes are of the Python in `conformance/` and `reports/`. Times are medians of wall-clock seconds on
the machine that runs this; `benchmarks/speed.py` prints the ratio to the implementation's own time.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("conformance", "reports")
LIMITS = {"lines": 27_500, "modules": 165, "packages": 25}


def sizes() -> dict[str, int]:
    """Lines, modules and packages of what a wheel holds, without the adapters."""
    modules = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    return {
        "lines": sum(path.read_text(encoding="utf-8").count("\n") for path in modules),
        "modules": len(modules),
        "packages": len({path.parent for path in modules}),
    }


def seconds(command: list[str], *, times: int = 1, folder: Path = ROOT) -> float:
    """The median time of a command, in seconds; raises `CalledProcessError` where it fails."""
    taken = []
    for _ in range(times):
        began = time.monotonic()
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        taken.append(time.monotonic() - began)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tox", action="store_true", help="also time tox, in a fresh clone")
    options = parser.parse_args()
    for name, size in sizes().items():
        print(f"{name:<40s}{size:>10,d}   at most {LIMITS[name]:,d}")
    print_help = [sys.executable, "-m", "conformance", "--help"]
    print(f"{'seconds of --help':<40s}{seconds(print_help, times=9):>10.2f}   at most 0.20")
    if options.tox:
        tox = [sys.executable, "-m", "tox"]
        with tempfile.TemporaryDirectory() as folder:
            clone = Path(folder) / "clone"
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
            print(f"{'seconds of tox, from nothing':<40s}{seconds(tox, folder=clone):>10.0f}   300")
            print(f"{'seconds of tox, unchanged':<40s}{seconds(tox, folder=clone):>10.0f}   30")
            tests = [*tox, "-e", "tests"]
            print(f"{'seconds of tox -e tests':<40s}{seconds(tests, folder=clone):>10.0f}   360")


if __name__ == "__main__":
    main()
