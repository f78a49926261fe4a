"""How much faster are two machines than one, and what does the engine itself take?

    pip install -e '.[cluster,torch,flax,haiku,equinox]'
    python benchmarks/matrix.py                 eight environments: tox, and two nodes of one CPU
    python benchmarks/matrix.py --simulated     a thousand environments of a second, 64 workers
    python benchmarks/matrix.py --worlds        our ring attention on one to four processes

The nodes are processes of this machine, which needs two free CPUs. Each node is bound to one of
them, as is tox, because JAX would otherwise compile on both. The engines take turns, four times. In
the first round they install; medians of the other rounds are printed.

    tox         seconds of `mha-conformance matrix --on tox`, with one worker
    ray         seconds of `mha-conformance matrix --on ray`, with two nodes of one CPU
    ratio       tox / ray
    overhead    what an environment takes longer on Ray: (2 ray - tox) / environments
    ideal       a thousand seconds by the number of workers
    start       seconds of the first run in a world, less those of the second
    items       seconds of the second run
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from ray.cluster_utils import Cluster as Nodes

from conformance import examine
from conformance.running import matrix, node

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ["ours", "tutorials", "torch", "torch-kernels", "flax", "haiku", "equinox", "jax"]
ROUNDS = 3
SIMULATED, WORKERS = 1_000, 64


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--worlds", action="store_true")
    parser.add_argument("environment", nargs="*", default=ENVIRONMENTS)
    options = parser.parse_args()
    if options.worlds:
        worlds()
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.simulated:
            simulated(Path(folder))
        else:
            compared(Path(folder), options.environment)


def compared(folder: Path, environments: list[str]) -> None:
    """Time the same environments on both engines."""
    project = folder / "project"
    node.unpack(matrix.archive(ROOT), project)
    # What a run writes is no source, which only git can tell.
    subprocess.run(["git", "init", "--quiet", str(project)], check=True)
    # Nodes take the settings of this process. What was downloaded once is shared with them, as
    # machines share an index of packages near them.
    os.environ.setdefault("UV_CACHE_DIR", str(Path.home() / ".cache" / "uv"))
    os.environ["XDG_CACHE_HOME"] = str(folder / "caches")
    nodes = cluster(0)
    for number in range(2):
        with bound(number):
            nodes.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = nodes.address
    rounds = []
    # The first round installs. The speed of a machine changes, so each round is compared by itself.
    for number in range(ROUNDS + 1):
        with bound(0):
            tox = timed(project, environments, "tox")
        ray = timed(project, environments, "ray")
        print(f"{'warm' if number else 'cold'}: tox {tox:.1f} s, ray {ray:.1f} s", flush=True)
        rounds.append((tox, ray))
    nodes.shutdown()
    ratio = median(tox / ray for tox, ray in rounds[1:])
    overhead = median((2 * ray - tox) / len(environments) for tox, ray in rounds[1:])
    print(f"{'ratio':>8} {ratio:8.2f}\n{'overhead':>8} {overhead:8.1f} s")


def timed(project: Path, environments: list[str], engine: str) -> float:
    """Return the seconds of a run."""
    command = [sys.executable, "-m", "conformance", "matrix", "--on", engine, *environments]
    begun = time.perf_counter()
    done = subprocess.run(
        [*command, "--", "--level", "core", "--fresh"],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    took = time.perf_counter() - begun
    # A core run that finds what is known is 0; one that found something new was made, too.
    if done.returncode not in (0, 1):
        raise SystemExit(done.stdout[-3_000:] + done.stderr)
    return took


def simulated(folder: Path) -> None:
    """Time a thousand environments that take a second each."""
    os.environ["RAY_ADDRESS"] = (nodes := cluster(0, WORKERS // 2, WORKERS // 2)).address
    attention = f"{ROOT}/docs/examples/numpy_function.py:attention"
    found = examine(attention, cases="mask/", dtypes="float32")
    found.save(folder / "one.json")
    record = (folder / "one.json").read_bytes()
    records = {f"e{number}": f"records/e{number}.json" for number in range(SIMULATED)}
    chosen = matrix.Environments([], records, [])

    def second(
        project: bytes, key: str, where: str, part: node.EnvironmentPart, workers: int
    ) -> node.PartResult:
        time.sleep(1)
        return node.PartResult(
            0, {f"{where}/{part.environment}.json": record}, "", "simulated", 1.0
        )

    node.run = second
    (folder / "tox.ini").touch()
    with matrix.connected("ray") as machines:
        warm(WORKERS)
        run = matrix.ClusterRun(chosen, matrix.Cluster(), folder, lambda line: None)
        run.check(machines)
        begun = time.perf_counter()
        run.all()
        took = time.perf_counter() - begun
    nodes.shutdown()
    assert len([*(folder / "records").glob("*.json")]) == SIMULATED
    ideal = SIMULATED / WORKERS
    print(f"{took:.1f} s, ideal {ideal:.1f} s, ratio {took / ideal:.2f}")


def worlds() -> None:
    """Time the same cases on one process and on more."""
    alone = 0.0
    for size in (1, 2, 3, 4):
        took = []
        for _ in range(2):
            begun = time.perf_counter()
            examine("ours-ring", cases=("plain/", "causal/"), modes=f"ring-{size}", level="core")
            took.append(time.perf_counter() - begun)
        alone = alone or took[1]
        start = took[0] - took[1]
        print(f"{size} ranks: start {start:.1f} s, items {took[1]:.1f} s, {took[1] / alone:.2f}")


def warm(workers: int) -> None:
    """Have Ray start its processes."""
    import ray

    sleep = ray.remote(num_cpus=1)(lambda: time.sleep(10))
    ray.get([sleep.remote() for _ in range(workers)])


@contextmanager
def bound(number: int) -> Iterator[None]:
    """Bind the processes that are started meanwhile to one CPU."""
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(every)[number]})
    yield
    os.sched_setaffinity(0, every)


def cluster(*cpus: int) -> Nodes:
    """Return nodes with so many CPUs each, the first of which is the head."""
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": cpus[0]})
    for each in cpus[1:]:
        nodes.add_node(num_cpus=each)
    return nodes


if __name__ == "__main__":
    main()
