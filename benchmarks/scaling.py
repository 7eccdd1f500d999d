"""How the cost of a round grows with K, N, the samples per client, and the runs side by side.

    python benchmarks/scaling.py [--device auto] [--precision fp32] [--net lab-cifar] [--json FILE] [--plot FILE]

FedAvg rounds on random images, one local epoch, the same number of samples on every client. One size is varied at a
time. A point is the best time of several whole rounds (selection, training, aggregation) and the peak memory of the
GPU, or of the process on a CPU. N is varied with digits-cnn and two samples per client, so that a million clients fit
into memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedcat
from fedcat.bench.measure import clock, round_of_all
from fedcat.bench.workload import IMAGES
from fedcat.core.device import find_device
from fedcat.runs.build import Builder
from fedcat.runs.driver import Driver

BASE = {"per_round": 10, "clients": 100, "samples": 500, "runs": 1}
SWEEPS: dict[str, list[int]] = {
    "per_round": [10, 30, 100, 300, 1000],
    "clients": [100, 1_000, 10_000, 100_000, 1_000_000],
    "samples": [10, 50, 250, 1000, 5000],
    "runs": [1, 2, 4, 8, 18, 36, 72],
}
LABELS = {
    "per_round": "clients per round, K",
    "clients": "clients, N (digits)",
    "samples": "samples per client",
    "runs": "runs side by side",
}


def sizes(sweep: str, value: int) -> dict[str, int]:
    """Return the sizes of one point; the sweep over K has few samples, so that 1,000 clients fit into memory."""
    found = {**BASE, sweep: value}
    if sweep == "per_round":
        found |= {"clients": 1000, "samples": 50}
    if sweep == "clients":
        found |= {"samples": 2}
    if sweep == "samples":
        found |= {"clients": 10}
    return found


def federation(net: str, clients: int, samples: int) -> fedcat.Federation:
    """Return a federation of random images, with equally many per client."""
    rng = np.random.default_rng(0)
    total = clients * samples
    x = rng.integers(256, size=(total, *IMAGES[net].shape), dtype=np.uint8)
    y = rng.integers(10, size=total)
    return fedcat.Federation(fedcat.Pool(x, y), fedcat.Pool(x[:10], y[:10]), np.arange(total) % clients, classes=10)


def point(sweep: str, value: int, words: argparse.Namespace) -> dict[str, Any]:
    """Measure one point in this process."""
    net = "digits-cnn" if sweep == "clients" else words.net
    device, size = find_device(words.device), sizes(sweep, value)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    data = federation(net, size["clients"], size["samples"])
    builder = Builder()
    given = {"dataset": data, "net": net, "method": "fedavg", "per_round": size["per_round"], "epochs": 1}
    given |= {"batch_size": IMAGES[net].batch_size, "lr": 1e-3, "rounds": 10**9, "evaluate_every": 10**9}
    given |= {"device": words.device, "precision": words.precision}
    runs = [builder.build({**given, "seed": seed}) for seed in range(size["runs"])]
    ready = time.perf_counter() - begin
    driver = Driver(runs)
    first = clock(lambda: round_of_all(driver), device)
    times = [clock(lambda: round_of_all(driver), device) for _ in range(words.turns)]
    batch = IMAGES[net].batch_size
    steps = size["runs"] * size["per_round"] * -(-size["samples"] // batch)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(device)
    runs[0].engine.release()
    return {
        "sweep": sweep,
        "value": value,
        "net": net,
        "size": size,
        "seconds": min(times),
        "first": first,
        "ready": ready,
        "steps": steps,
        "bytes": memory,
    }


def draw(points: list[dict[str, Any]], title: str, file: Path) -> None:
    """Plot time and memory against each size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2), layout="constrained")
    figure.suptitle(title, fontsize=10)
    for axes, sweep in zip(figure.subplots(1, len(SWEEPS)), SWEEPS, strict=True):
        mine = [p for p in points if p["sweep"] == sweep]
        x = [p["value"] for p in mine]
        axes.loglog(x, [1e3 * p["seconds"] for p in mine], "o-", color="#1f5fa8", label="ms per round")
        axes.loglog(x, [p["bytes"] / 1e6 for p in mine], "s--", color="#c2571a", label="memory, MB")
        axes.set_xlabel(LABELS[sweep])
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.savefig(file, dpi=130)


def apart(sweep: str, value: int, common: list[str]) -> dict[str, Any]:
    """Measure one point in a separate process, to get its peak memory."""
    command = [sys.executable, __file__, *common, "--point", sweep, str(value)]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure all points; print, write and plot them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--net", default="lab-cifar", choices=list(IMAGES))
    parser.add_argument("--sweeps", nargs="+", default=list(SWEEPS), choices=list(SWEEPS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.point:
        print(json.dumps(point(words.point[0], int(words.point[1]), words)))
        return
    common = ["--device", words.device, "--precision", words.precision, "--net", words.net, "--turns", str(words.turns)]
    device, points = find_device(words.device), []
    print(f"{'varied':10} {'value':>9} {'ms/round':>11} {'us/step':>10} {'memory':>10} {'setup':>12}")
    for sweep in words.sweeps:
        for value in SWEEPS[sweep]:
            p = point(sweep, value, words) if device.type == "cuda" else apart(sweep, value, common)
            points.append(p)
            print(
                f"{sweep:10} {value:9} {1e3 * p['seconds']:11.2f} {1e6 * p['seconds'] / p['steps']:10.1f} "
                f"{p['bytes'] / 1e6:7.0f} MB {p['ready']:10.1f} s",
                flush=True,
            )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    if words.json:
        head = {"device": name, "precision": words.precision, "net": words.net, "torch": torch.__version__}
        words.json.write_text(json.dumps({**head, "points": points}, indent=1) + "\n")
    if words.plot:
        draw(points, f"{words.net}, {name}, {words.precision}", words.plot)


if __name__ == "__main__":
    main()
