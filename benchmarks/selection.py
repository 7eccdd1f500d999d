"""Cost of grouping- and count-based selection with many clients.

    python benchmarks/selection.py [--clients 1000000] [--per-round 1000] [--rounds 50]

Prints the time of a round, the time of a round that regroups the clients, and the memory of the count table compared
with a dense N x K table of 32-bit counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc

import numpy as np

from fedcat.methods.selection import FunctionSelector, uniform
from fedcat.methods.selection.grouped import GroupedSelector


def milliseconds(selector: object, rounds: range) -> list[float]:
    """Return the milliseconds of each round."""
    times = []
    for r in rounds:
        begin = time.perf_counter()
        selector.select(r)
        times.append(1e3 * (time.perf_counter() - begin))
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--per-round", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=50)
    words = parser.parse_args()
    n, k = words.clients, words.per_round
    print(f"N = {n:,} clients, K = {k:,} per round, {words.rounds} rounds")
    for epsilon in (0.0, 0.5, 1.0):
        selector = GroupedSelector(0, n, k, epsilon)
        first = milliseconds(selector, range(1))[0]
        rest = milliseconds(selector, range(1, words.rounds))
        print(
            f"epsilon {epsilon:3.1f}: {statistics.median(rest):6.1f} ms per round (max {max(rest):.1f}), "
            f"{first:6.1f} ms with a new grouping"
        )
    cycles = 3
    selector = GroupedSelector(0, n, k, 0.5, period=k * cycles)
    for cycle in range(cycles):
        for position in range(min(k, words.rounds)):
            selector.select(cycle * k + position)
    later = milliseconds(selector, range(cycles * k, cycles * k + min(k, words.rounds)))
    print(f"cycle {cycles + 1}: {statistics.median(later):6.1f} ms per round")
    entries = selector.table.nbytes()
    print(f"count table: {entries / 1e6:.2f} MB after {cycles + 1} x {min(k, words.rounds)} rounds; ", end="")
    print(f"a dense table would take {4 * n * k / 1e6:,.0f} MB")
    tracemalloc.start()
    selector.select((cycles + 1) * k)
    print(f"peak working memory of a round: {tracemalloc.get_traced_memory()[1] / 1e6:.0f} MB")
    tracemalloc.stop()
    plain = milliseconds(FunctionSelector(uniform, 0, np.ones(n, np.int64), k), range(20))
    print(f"uniform selection, for comparison: {statistics.median(plain):.2f} ms per round")


if __name__ == "__main__":
    main()
