"""Milliseconds per round: the fixed workloads by which changes of the engines are judged.

    python benchmarks/rounds.py methods [--nets lab-cifar lab-mnist] [--runs 1 18] [--precisions fp32] [--json FILE]
    python benchmarks/rounds.py nets [--nets ...] [--runs 1 18] [--precisions fp32 tf32 bf16] [--json FILE]
    python benchmarks/rounds.py host [--runs 1 18] [--json FILE]

`methods`: the six methods on the two nets of the paper, five local epochs. `nets`: FedAvg on every built-in net of
images. `host`: FedAvg on lab-cifar, one local epoch, 500 samples on every client, and the same with nothing replayed on
the GPU, which leaves the host's part.

All rounds are on random images, K = 10 of 100 clients. A figure is the time of several rounds of all runs side by side,
divided by the rounds and the runs, after warm-up; the median of four such parts. Two versions that ran the same command
did the same work: compare them on one machine, one after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fedcat
from fedcat.bench.measure import wait
from fedcat.bench.workload import IMAGES, Workload
from fedcat.core.device import find_device
from fedcat.runs.driver import Driver
from fedcat.runs.run import Run

METHODS = ("fedavg", "fedprox", "scaffold", "fedgen", "clusamp", "fedcat")
EPOCHS = {"mcmahan-mnist": 1, "mcmahan-cifar": 1}
"""Local epochs of the nets that take long; all others have five."""


class Measured(Exception):
    """Ends runs when all is measured."""


def timed(runs: list[Run], words: argparse.Namespace, replay: bool) -> dict[str, Any]:
    """Return the milliseconds per round and run, and what computed them; stop after `limit` seconds."""
    found: dict[str, Any] = {}

    def parts() -> Iterator[None]:
        """Wait for a step at every `yield`."""
        begin, limit = time.perf_counter(), words.limit
        found["first_s"] = (yield from _until(1, runs, begin + limit, words.device)) * len(runs) / 1000
        yield from _until(words.warm, runs, begin + limit / 2, words.device)
        with nothing_replayed() if not replay else nullcontext():
            if words.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(words.device)
            each = []
            for _ in range(words.parts):
                number = max(1, words.rounds // words.parts)
                each.append((yield from _until(number, runs, begin + limit, words.device)))
        found["ms"], found["parts_ms"] = statistics.median(each), [round(part, 3) for part in each]
        raise Measured

    steps = parts()
    next(steps)  # begins before the first step
    with suppress(Measured):
        Driver(runs).run(partial(next, steps))
    found["kernels"] = runs[0].engine.kernels(runs[0].task)
    if words.device.type == "cuda":
        found["peak_mb"] = torch.cuda.max_memory_allocated(words.device) / 1e6
    return found


def _until(number: int, runs: list[Run], end: float, device: torch.device) -> Generator[None, None, float]:
    """Wait until all runs have recorded `number` more rounds; return the milliseconds per round and run.

    A driver's step may be a round of some of the runs only, and work may still be under way when it ends.
    """
    before, start = [len(run.history) for run in runs], time.perf_counter()
    while min(len(run.history) - old for run, old in zip(runs, before, strict=True)) < number:
        yield
        if time.perf_counter() > end and len(runs[-1].history) > before[-1]:
            break
    wait(device)
    done = sum(len(run.history) for run in runs) - sum(before)
    return 1000 * (time.perf_counter() - start) / max(1, done)


@contextmanager
def nothing_replayed() -> Any:
    """Replay no graph: what is left of a round is the host's part, and what it starts on the GPU by itself."""
    kept = torch.cuda.CUDAGraph.replay
    torch.cuda.CUDAGraph.replay = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.cuda.CUDAGraph.replay = kept  # type: ignore[method-assign]


def cases(words: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the cases to measure."""
    nets = (
        words.nets or {"methods": ["lab-cifar", "lab-mnist"], "nets": list(IMAGES), "host": ["lab-cifar"]}[words.what]
    )
    methods = words.methods if words.what == "methods" else ["fedavg"]
    whole = [
        {"net": net, "precision": precision, "runs": runs, "method": method}
        for net in nets
        for precision in words.precisions
        for runs in words.runs
        for method in methods
    ]
    return whole if words.what != "host" else [{**case, "replay": on} for case in whole for on in (True, False)]


def measure(case: dict[str, Any], words: argparse.Namespace, data: dict[str, Any]) -> dict[str, Any]:
    """Measure one case."""
    net, host = case["net"], words.what == "host"
    work = Workload(net, epochs=1 if host else EPOCHS.get(net, 5))
    if net not in data:
        data[net] = work.dataset()
    settings = {"method": case["method"], "precision": case["precision"], "device": str(words.device)}
    settings |= {"alpha": None, "partition": "iid"} if host else {}
    settings |= {"evaluate_every": 1} if words.evaluate else {}
    runs = work.runs(case["runs"], data[net], **settings)
    found = timed(runs, words, case.get("replay", True))
    runs[0].engine.release()
    return {**case, **found}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("methods", "nets", "host"))
    parser.add_argument("--nets", nargs="+", choices=list(IMAGES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--runs", nargs="+", type=int, default=[1, 18])
    parser.add_argument("--precisions", nargs="+", default=["fp32"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm", type=int, default=8)
    parser.add_argument("--parts", type=int, default=4, help="parts in which the rounds are timed")
    parser.add_argument("--evaluate", action="store_true", help="evaluate after every round, on 1,000 images")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds per case")
    parser.add_argument("--device", default="auto", type=find_device)
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {"fedcat": fedcat.__version__, "commit": git.stdout.strip(), "torch": torch.__version__}
    about["device"] = torch.cuda.get_device_name() if words.device.type == "cuda" else "cpu"
    rows: list[dict[str, Any]] = []
    data: dict[str, Any] = {}
    for case in cases(words):
        row = measure(case, words, data)
        rows.append(row)
        name = " ".join(str(value) for value in case.values())
        print(f"{name:42} {row['ms']:9.2f} ms per round and run  {row['kernels'][:60]}", flush=True)
        if words.json:
            words.json.write_text(json.dumps({"what": words.what, "machine": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
