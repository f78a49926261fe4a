"""The suite's own time and memory at length, every element of output and all gradients compared.

    python benchmarks/long.py                 six lengths, up to 1,048,576
    python benchmarks/long.py 4096 131072     these lengths

What is measured is the suite alone: drawing the problem, the oracle, σ and the comparison, for one
head of size 64, causal, in float32. The answer that is compared was rounded from the oracle before,
in 1 GiB at a million tokens, which an implementation would need too. Each length runs in a process
of its own. Seconds of the CPU depend less on what else the machine does.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

LENGTHS = (4096, 16384, 65536, 131072, 262144, 1048576)
LIMITS = {131072: (10.0, 2**30), 1048576: (60.0, 2**32)}
"""Seconds on two cores, and bytes."""
INNER = "--inside"


def inside(length: int) -> None:
    """One length: seconds of wall clock and CPU, and the most memory that was used."""
    import numpy as np

    from conformance.long.calling import Answered
    from conformance.long.checking import check
    from conformance.long.oracle import Head, columns, rows
    from conformance.long.problem import Visibility, draw

    def clock() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    began = clock()
    problem = draw("float32", length, length, sees=Visibility(causal="top-left"))
    drawn = clock()
    arrays = {n: np.empty((length, 64), np.float32) for n in ("output", "query", "key", "value")}
    head = Head(problem, 0, 0)
    for block in rows(head, slice(0, length)):
        arrays["output"][block.span], arrays["query"][block.span] = block.output, block.d_query
    for part in columns([head], slice(0, length)):
        arrays["key"][part.span], arrays["value"][part.span] = part.d_key, part.d_value
    ready = clock()
    slices = {
        name: lambda entry, head, of, array=array: array[of].astype(np.float64)
        for name, array in arrays.items()
    }
    found = check(problem, Answered(slices, 0.0), threads=os.cpu_count() or 1)
    assert found.conforms()
    assert all(tally.count == 64 * length for tally in found.decisive().values())
    ended = clock()
    wall, cpu = (e - r + d - b for b, d, r, e in zip(began, drawn, ready, ended, strict=True))
    print(wall, cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def main(lengths: list[int]) -> None:
    """Print one line for each length."""
    for length in lengths:
        command = [sys.executable, __file__, INNER, str(length)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        wall, cpu, memory = map(float, done.stdout.split())
        text = f"{length:9,d} tokens: {wall:6.1f} s, {cpu:6.1f} s of CPU "
        text += f"({1e6 * cpu / length:5.1f} µs per token), {memory / 2**30:.2f} GiB"
        if length in LIMITS:
            seconds, most = LIMITS[length]
            text += f" (limits {seconds:g} s, {most / 2**30:g} GiB)"
        print(text, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == [INNER]:
        inside(int(sys.argv[2]))
    else:
        main([int(length) for length in sys.argv[1:]] or list(LENGTHS))
