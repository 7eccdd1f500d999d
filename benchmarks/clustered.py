"""Cost per round of clustered sampling, once every client has taken part.

    python benchmarks/clustered.py [--clients 100 1000] [--fraction 0.1] [--parameters 62006] [--similarity cosine]

Prints, for each number of clients, the time to compare the updates of a round's clients with all others, the time
to cluster and draw, and the process's peak memory.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np
import torch

from fedcat.methods.selection.clustered import SIMILARITIES, ClusteredSelector


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--fraction", type=float, default=0.1)
    parser.add_argument("--parameters", type=int, default=62_006)
    parser.add_argument("--similarity", choices=SIMILARITIES, default="cosine")
    words = parser.parse_args()
    print(f"{words.parameters:,} parameters, {words.similarity}, {torch.get_num_threads()} threads")
    for clients in words.clients:
        k = max(1, round(words.fraction * clients))
        rng = np.random.default_rng(0)
        selector = ClusteredSelector(0, rng.integers(50, 1000, size=clients), k, words.similarity)
        for begin in range(0, clients, k):
            times = [time.perf_counter()]
            selector.learn({d: torch.randn(words.parameters) for d in range(begin, min(begin + k, clients))})
            times.append(time.perf_counter())
        selector.select(0)
        times.append(time.perf_counter())
        learn, select = np.diff(times)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(f"N = {clients:6,}, K = {k:5,}: compare {learn:.2f} s, cluster {select:.2f} s, peak {peak:.1f} GB")


if __name__ == "__main__":
    main()
