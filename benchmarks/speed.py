"""How long the suite takes, as ratios and wall times measured in one run.

    python benchmarks/speed.py            everything below
    python benchmarks/speed.py torch      suite time / time in the implementation's own calls
    python benchmarks/speed.py flax       wall time of each Flax implementation, with compilation
    python benchmarks/speed.py probe      mha-conformance probe, with everything that it imports
    python benchmarks/speed.py help       mha-conformance --help

Each measurement runs in a process of its own. `tox` is timed with the shell: `time tox`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

INNER = "--inside"


def suite(implementation: str, cache: str = "") -> tuple[float, float, str]:
    """CPU seconds of the whole suite and of the implementation's own calls, and pytest's last line.

    `cache` is where expectations are kept, if not in the user's cache.
    """
    command = [sys.executable, __file__, INNER, implementation]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment |= {"MHA_CONFORMANCE_CACHE": cache} if cache else {}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = done.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("seconds "):
        sys.exit(f"{implementation}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    _, whole, own = lines[-1].split()
    return float(whole), float(own), lines[-2]


def inside(implementation: str) -> None:
    """One suite run with the framework's `evaluate` timed; imports are not counted.

    Its own calls are those of `evaluate`: the forward pass and, where there are gradients, the
    backward pass, on native arrays. Seconds are those of the CPU, so that what else the machine
    does hardly matters.
    """
    import conformance.running.run  # noqa: F401 - imports are not counted
    from conformance.adapter.loading import load
    from conformance.cli import main as command

    # Also not what the framework imports at its first derivative.
    command(["run", implementation, "--case", "plain/no-mask/self", "--dtype", "float32"])
    adapter = load(implementation)
    bridge = type(adapter.bridge)
    evaluate, own = bridge.evaluate, [0.0]

    def timed(self, *arguments, **options):
        started = time.process_time()
        try:
            return evaluate(self, *arguments, **options)
        finally:
            own[0] += time.process_time() - started

    bridge.evaluate = timed
    started = time.process_time()
    command(["run", implementation, "--case", "*/*/*"])  # the catalogue; `probe` is timed below
    print(f"seconds {time.process_time() - started:.3f} {own[0]:.3f}")


def torch() -> None:
    """The claim: at most 2.5 times the implementation's own forward and backward calls.

    The first run computes what is expected; the others, which count, find it in the cache.
    """
    ratios = []
    with tempfile.TemporaryDirectory() as cache:
        for run in ("first", "second", "third", "fourth"):
            whole, own, told = suite("torch-mha", cache)
            ratios.append(whole / own)
            figures = f"suite {whole:.1f} s, own calls {own:.1f} s, ratio {whole / own:.2f}"
            print(f"torch-mha, {run} run: {figures}")
    print(f"torch-mha: median ratio {statistics.median(ratios[1:]):.2f} (limit 2.5); {told}")


def flax() -> None:
    """The claim: at most 30 s each."""
    for name in ("flax-linen", "flax-nnx"):
        whole, own, told = suite(name)
        print(f"{name}: {whole:.1f} s (limit 30), {own:.1f} s of it compiling and calling; {told}")


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
        told = f"{time.perf_counter() - started:.1f} s (limit {limit}), {entries} entries"
        print(f"mha-conformance probe {name}: {told}")


def help_() -> None:
    """The claim: under 0.4 s."""
    times = []
    for _ in range(7):
        started = time.perf_counter()
        command = [sys.executable, "-m", "conformance", "--help"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - started)
    print(f"mha-conformance --help: median {statistics.median(times):.2f} s (limit 0.4)")


def main(wanted: list[str]) -> None:
    """Run what is asked for, or everything."""
    known = {"torch": torch, "flax": flax, "probe": probe, "help": help_}
    for name in wanted or list(known):
        if name not in known:
            sys.exit(f"unknown benchmark {name!r}; known: {', '.join(known)}")
        known[name]()


if __name__ == "__main__":
    if sys.argv[1:2] == [INNER]:
        inside(sys.argv[2])
    else:
        main(sys.argv[1:])
